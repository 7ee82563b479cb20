"""Functions and options that random cases do not draw: each is right, beside its default. See docs/periphery.md."""

import copy
import json
import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardproof
from models import Block, Net, assert_same_bits, batch, loss_of, train_plain


def trained(sharded, optimizer, steps, world, first=0):
    for step in range(first, first + steps):
        loss_of(sharded, batch(step * world + sharded.rank)).backward()
        optimizer.step()


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_manager_goes_on_with_the_scale_and_what_may_be_overwritten(tmp_path):
    def body(comm):
        sharded = shardproof.fully_shard(Net(), comm, units=[Block])
        optimizer = shardproof.adamw(sharded, lr=0.01)
        scaler = shardproof.LossScaler(64.0, growth_interval=2)
        manager = shardproof.Manager(tmp_path / "run", in_background=True, overwrite=True)
        assert manager.load_latest(sharded) is None and manager.latest() is None
        for step in range(3):
            scaler.scale(loss_of(sharded, batch(step))).backward()
            assert scaler.unscale(sharded)
            optimizer.step()
        assert manager.save(sharded, optimizer, 3, values={"kept": [1.5, "x"]}, of_rank={"mine": comm.rank}, scaler=scaler)
        while not manager.poll():
            pass
        assert manager.steps() == [3]
        first = sharded.gather()
        trained(sharded, optimizer, 1, comm.size)
        manager.save(sharded, optimizer, 3, scaler=scaler)  # overwrites
        manager.wait()
        second = sharded.gather()
        with pytest.raises(shardproof.Error, match="does not come after step 3"):
            strict = shardproof.Manager(tmp_path / "run")
            strict.save(sharded, optimizer, 3)
        with pytest.raises(shardproof.Error):
            shardproof.save(tmp_path / "run" / "step_3", sharded)
        shardproof.save(tmp_path / "once", sharded, optimizer, step=7, of_rank={"mine": comm.rank})
        again = {"of_rank": {"mine": -comm.rank}, "scaler": scaler, "overwrite": True}
        shardproof.save(tmp_path / "once", sharded, optimizer, step=8, **again)
        other = shardproof.fully_shard(Net(), comm, strategy="zero1", units=[Block])
        its, its_scaler = shardproof.adamw(other, lr=0.01), shardproof.LossScaler(2.0, growth_interval=2)
        found = manager.load_latest(other, its, scaler=its_scaler)
        assert found["step"] == 3 and its_scaler.value == scaler.value == 128.0
        assert its_scaler.state_dict() == scaler.state_dict() and its.updates("out.weight") == 4
        assert_same_bits(other.gather(), second)
        its_scaler = shardproof.LossScaler(2.0)
        found = shardproof.load(tmp_path / "once", other, its, scaler=its_scaler)
        assert found["step"] == 8 and found["of_rank"] == {"mine": -comm.rank} and its_scaler.value == 128.0
        wider = shardproof.fully_shard(Net(blocks=4), comm, units=[Block])
        with pytest.raises(shardproof.Error, match="blocks.3"):
            manager.load_latest(wider)
        assert manager.load_latest(wider, partial=True)["step"] == 3
        assert_same_bits({n: v for n, v in wider.gather().items() if "blocks.3" not in n}, second)
        return torch.equal(first["out.weight"], second["out.weight"])

    assert shardproof.run_threads(2, body) == [False, False]


def test_adapters_are_saved_under_the_prefix_and_the_orientation_that_are_asked_for(tmp_path):
    def body(comm):
        model = Net()
        lora = shardproof.add_lora(model, ["blocks.*.up", "out"], rank=2, seed=1)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        names = sorted(name for name in sharded.gather_main_parameters() if "lora_" in name)
        whole = sharded.gather_main_parameters()
        values = {name: drawn(*whole[name].shape, seed=k) for k, name in enumerate(names)}
        sharded.write_parameters(values)
        lora.save(tmp_path / "a", sharded, module_prefix="net.", fan_in_fan_out=True)
        with pytest.raises(shardproof.Error):
            lora.save(tmp_path / "a", sharded)
        lora.save(tmp_path / "b", sharded)
        lora.save(tmp_path / "b", sharded, overwrite=True)
        sharded.write_parameters({name: torch.zeros_like(value) for name, value in values.items()})
        with pytest.raises(shardproof.Error):
            lora.load(tmp_path / "a", sharded)
        lora.load(tmp_path / "a", sharded, module_prefix="net.")
        assert_same_bits({name: sharded.gather_main_parameters()[name] for name in names}, values)
        return values

    values = shardproof.run_threads(2, body)[0]
    for folder, prefix, turned in (("a", "net.", True), ("b", "", False)):
        stored = load_file(os.path.join(tmp_path, folder, "adapter_model.safetensors"))
        assert_same_bits(stored, {f"base_model.model.{prefix}{name}": value for name, value in values.items()})
        with open(os.path.join(tmp_path, folder, "adapter_config.json"), encoding="utf-8") as file:
            config = json.load(file)
        assert config["fan_in_fan_out"] is turned
        assert all(name.startswith(prefix) for name in config["target_modules"])


def test_an_index_of_weights_has_the_sizes_of_the_files_and_of_all_tensors(tmp_path):
    def body(comm):
        sharded = shardproof.fully_shard(Net(width=32), comm, units=[Block])
        shardproof.save_weights(tmp_path / "w", sharded, dtype=torch.bfloat16, file_bytes_max=6000)
        return sharded.gather()

    values = shardproof.run_threads(2, body)[0]
    folder = os.path.join(tmp_path, "w")
    with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as file:
        index = json.load(file)
    assert index["metadata"]["total_size"] == 2 * sum(value.numel() for value in values.values())
    assert set(index["weight_map"]) == set(values) and len(set(index["weight_map"].values())) > 2
    for name in set(index["weight_map"].values()):
        stored = load_file(os.path.join(folder, name))
        assert set(stored) == {tensor for tensor, at in index["weight_map"].items() if at == name}
        assert sum(value.numel() * 2 for value in stored.values()) <= 6000
        assert_same_bits(stored, {tensor: values[tensor].bfloat16() for tensor in stored})


def test_gradients_are_forgotten_by_each_name_that_pytorch_has_for_it():
    base = Net()

    def body(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, units=[Block], ignored="out.bias")
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, sharded.module.parameters(), lr=0.1)
        ours = shardproof.sgd(sharded, lr=0.1)
        norms = []
        for forget in (
            lambda: None,
            lambda: (sharded.zero_gradients(), optimizer.zero_grad()),
            optimizer.zero_grad,
            lambda: optimizer.zero_grad(set_to_none=False),
            lambda: (ours.zero_grad(), ours.zero_grad(set_to_none=True)),
            sharded.module.zero_grad,
            lambda: sharded.module.zero_grad(set_to_none=False),
        ):
            sharded.set_last_microbatch(False)
            loss_of(sharded, batch(1)).backward()
            forget()
            sharded.set_last_microbatch(True)
            loss_of(sharded, batch(0)).backward()
            norms.append(sharded.gradient_norm())
            sharded.skip_step()
            plain = sharded.module.out.bias
            sharded.module.zero_grad(set_to_none=False)
            assert plain.grad is not None and not plain.grad.any()
            sharded.module.zero_grad()
            assert plain.grad is None
        model = sharded.remove()
        model(batch(0)[0]).sum().backward()
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters()) and "zero_grad" not in vars(model)
        return norms

    plain = copy.deepcopy(base)
    plain.out.bias.requires_grad_(False)
    loss_of(plain, batch(0)).backward()
    alone = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]).item()
    for both, *others in shardproof.run_threads(2, body):
        assert others == [pytest.approx(alone, rel=1e-6)] * 6 and abs(both - alone) > 1e-3


def test_styles_of_a_plan_give_what_their_fields_say():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    x = drawn(3, 6)

    def body(comm):
        comms = shardproof.MeshComm(comm, "dp_shard=1,tp=2")
        half = slice(4 * comm.rank, 4 * comm.rank + 4)
        model = copy.deepcopy(base)
        kept = [shardproof.parallelize(model, comms, plan={"0": shardproof.ColumnParallel()}, axis="tp")]
        assert torch.allclose(model[0](x), base[0](x)[:, half], atol=1e-6)
        model = copy.deepcopy(base)
        kept.append(shardproof.parallelize(model, comms, plan={"0": shardproof.ColumnParallel(gather_output=True)}))
        assert torch.allclose(model[0](x), base[0](x), atol=1e-6)
        model = copy.deepcopy(base)
        kept.append(shardproof.parallelize(model, comms, plan={"1": shardproof.RowParallel()}))
        assert torch.allclose(model[1](base[0](x)[:, half]), base(x), atol=1e-6)
        model = copy.deepcopy(base)
        kept.append(shardproof.parallelize(model, comms, plan={"1": shardproof.RowParallel(input_is_parallel=False)}))
        assert torch.allclose(model[1](base[0](x)), base(x), atol=1e-6)
        # Rows that are two things, of 4 each: every rank has a half of both.
        model = copy.deepcopy(base)
        two = ((4, 1, False), (4, 1, False))
        plan = {"0": shardproof.ColumnParallel(segments=two), "1": shardproof.RowParallel(segments=two)}
        kept.append(shardproof.parallelize(model, comms, plan=plan))
        own = [0, 1, 4, 5] if comm.rank == 0 else [2, 3, 6, 7]
        assert torch.equal(model[0].weight, base[0].weight[own]) and torch.equal(model[1].weight, base[1].weight[:, own])
        assert torch.allclose(model(x), base(x), atol=1e-6)
        assert_same_bits(kept[-1].gather(), dict(base.named_parameters()))
        with pytest.raises(shardproof.Error, match="cp"):
            shardproof.parallelize(copy.deepcopy(base), comms, plan={"0": shardproof.ColumnParallel()}, axis="cp")

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("compares", [True, False])
def test_gradients_of_whole_parameters_are_compared_over_the_ranks_that_share_them(compares):
    def body(comm):
        comms = shardproof.MeshComm(comm, "dp_shard=1,tp=2")
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 1))
        plan = {"1": shardproof.ColumnParallel(), "2": shardproof.RowParallel()}
        parallel = shardproof.parallelize(model, comms, plan=plan, compare_replicas=compares)
        sharded = shardproof.fully_shard(model, comms)
        # The ranks read other samples, so the whole layer's gradients differ.
        sharded(drawn(3, 6, seed=comm.rank)).square().mean().backward()
        sharded.skip_step()
        return parallel is not None

    if compares:
        with pytest.raises(RuntimeError, match="0.weight|0.bias"):
            shardproof.run_threads(2, body)
    else:
        assert shardproof.run_threads(2, body) == [True, True]


def test_a_report_counts_what_was_run_within_the_bounds_that_were_given(capsys):
    def run(**options):
        return shardproof.verify(
            lambda: nn.Linear(3, 1), lambda: torch.randn(4, 3), lambda model, x: model(x).square().mean(), seed=5, **options
        )

    report = run(cases=6, ranks_max=2, modes=["ordered", "fast"], progress=True)
    assert report.cases == 6 == sum(report.rows.values()) and report.diverged == 0
    assert max(world for _, world in report.rows) == 2
    assert report.values > 100 and 0 < report.seconds < 120 and 0 <= report.farthest < 8
    printed = capsys.readouterr()
    assert "6" in printed.err + printed.out
    assert max(world for _, world in run(cases=12, ranks_max=4, progress=False).rows) > 2
    printed = capsys.readouterr()
    assert printed.err + printed.out == ""
    short = run(minutes=0.02)
    assert 0 < short.cases < 1000 and 0.5 < short.seconds < 30


def test_ranks_add_in_the_order_that_was_chosen():
    terms = [torch.tensor([1e8, 1.0]), torch.tensor([3.0, 2.0]), torch.tensor([-1e8, 4.0]), torch.tensor([5.0, 8.0])]

    def sums(**options):
        return shardproof.run_threads(4, lambda comm: comm.all_reduce(terms[comm.rank].repeat(4)), **options)

    in_order = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    for got in sums():
        assert torch.equal(got, in_order.repeat(4))
    ring, *others = sums(sum="ring")
    assert all(torch.equal(ring, other) for other in others) and not torch.equal(ring, in_order.repeat(4))
    turned = {(((terms[k] + terms[(k + 1) % 4]) + terms[(k + 2) % 4]) + terms[(k + 3) % 4])[0].item() for k in range(4)}
    assert set(ring[::2].tolist()) <= turned and torch.equal(ring[1::2], torch.full((4,), 15.0))


def test_a_sharded_model_says_its_units_its_rank_and_its_mesh():
    def body(comm):
        sharded = shardproof.fully_shard(Net(), comm, mesh="dp_replicate=2,dp_shard=2", strategy="hsdp", units=[Block])
        assert sharded.comms.axes() == [("dp_replicate", 2), ("dp_shard", 2)]
        assert sharded.unit("blocks.1").name == "blocks.1" and sharded.unit("").name == ""
        return sharded.rank, [unit.name for unit in sharded.units()], sharded.comms.mesh

    names = ["", "blocks.0", "blocks.1", "blocks.2"]
    assert shardproof.run_threads(4, body) == [(rank, names, "dp_replicate=2,dp_shard=2") for rank in range(4)]


def test_layouts_are_those_that_were_asked_for():
    def pieces(**options):
        def body(comm):
            sharded = shardproof.fully_shard(Net(width=16), comm, units=[Block], **options)
            trained(sharded, shardproof.sgd(sharded, lr=0.1), 1, comm.size)
            memory = sharded.memory()
            return {p.name: p.data.numel() for p in sharded.main_parameters() if p.data.numel()}, memory

        return shardproof.run_threads(2, body)

    whole = {name: p.numel() for name, p in Net(width=16).named_parameters()}
    (a, _), (b, _) = pieces(granularity="tensor")
    assert a.keys().isdisjoint(b) and {**a, **b} == whole
    (a, memory), (b, _) = pieces(granularity="element")
    assert not a.keys().isdisjoint(b) and all(a.get(n, 0) + b.get(n, 0) == size for n, size in whole.items())
    (a, _), (b, _) = pieces(granularity="row")
    chunks = {name: [part.numel() for part in p.chunk(2)] for name, p in Net(width=16).named_parameters()}
    assert all([rank[name] for rank in (a, b) if name in rank] == sizes for name, sizes in chunks.items())
    (_, ahead), _ = pieces(prefetch_forward=3, prefetch_backward=3)
    (_, pooled), _ = pieces(prefetch_forward=3, prefetch_backward=3, buffers="pooled")  # two buffers, so one gather ahead
    assert memory["gathered"][1] < pooled["gathered"][1] < ahead["gathered"][1]
    (_, beside), _ = pieces(gather="side_by_side")
    assert beside["gathered"][1] == 0 < memory["gathered"][1]

    def kept(comm, broadcast):
        torch.manual_seed(comm.rank)
        model = Given(comm.rank)
        sharded = shardproof.fully_shard(model, comm, strategy="ddp", broadcast_initial_values=broadcast)
        return sharded.parameters()[0].data[0].item()

    assert shardproof.run_threads(2, lambda comm: kept(comm, False)) == [0.0, 1.0]
    assert shardproof.run_threads(2, lambda comm: kept(comm, True)) == [0.0, 0.0]


class Given(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), float(value)))


def test_units_have_each_option_for_themselves():
    base = Net()

    def body(comm):
        model = copy.deepcopy(base)
        seen = []
        model.blocks[1].up.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
        model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append("forward"))
        units = [
            shardproof.Unit("blocks.0", recompute=True, offload_activations=True),
            shardproof.Unit("blocks.1", precision=shardproof.Precision(compute=torch.float64, output=torch.float32)),
            shardproof.Unit("blocks.2", reshard_after_forward=False, gradient_divide=5.0),
        ]
        sharded = shardproof.fully_shard(model, comm, units=units)
        loss_of(sharded, batch(comm.rank)).backward()
        gradients = sharded.gather_gradients()
        sharded.skip_step()
        host = sharded.host_memory()["activation"][1]
        model(batch(0)[0])
        whole = [unit.is_unsharded for unit in sharded.units()]
        return seen[:3], gradients, host, whole

    plain = []
    for rank in range(2):
        model = copy.deepcopy(base)
        loss_of(model, batch(rank)).backward()
        plain.append({name: p.grad for name, p in model.named_parameters()})
    for seen, gradients, host, whole in shardproof.run_threads(2, body):
        assert seen == ["forward", torch.float64, "forward"] and host > 0
        assert whole[1:] == [False, False, True]
        for name, value in gradients.items():
            divisor = 5 if name.startswith("blocks.2") else 2
            assert torch.allclose(value, (plain[0][name] + plain[1][name]) / divisor, rtol=1e-4, atol=1e-6), name


def test_the_report_of_a_plain_run_is_the_one_that_a_sharded_run_repeats():
    base = Net()
    _, expected = train_plain(base, lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True), steps=3, world=2)

    def body(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.RMSprop, sharded, lr=0.01, momentum=0.5, centered=True)
        trained(sharded, optimizer, 3, 2)
        return sharded.gather()

    for values in shardproof.run_threads(2, body):
        assert_same_bits(values, dict(expected.named_parameters()))
