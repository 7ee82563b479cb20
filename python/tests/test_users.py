"""What lies beside a model in training: averages, adapters, another model that it fills, whole values by name."""

import copy
import json
import os

import pytest
import torch
import torch.distributed.checkpoint
from models import Block, Net, assert_same_bits, batch, loss_of, train_plain
from safetensors.torch import load_file

import shardproof


def sharded_net(comm, mesh=None, strategy="zero3", seed=0, **options):
    with shardproof.seeded(seed):
        model = Net()
    return shardproof.fully_shard(model, comm, mesh=mesh, strategy=strategy, units=[Block], **options)


def test_the_check_of_replicas_names_the_tensor_that_one_rank_changed():
    def body(comm):
        model = sharded_net(comm, strategy="ddp")
        optimizer = shardproof.adamw(model, lr=0.1)
        check = shardproof.FingerprintCheck(model, optimizer)
        for step in range(2):
            loss_of(model, batch(comm.rank)).backward()
            optimizer.step()
            check.step()
        if comm.rank == 1:
            with torch.no_grad():
                next(piece for piece in model.parameters() if piece.name == "out.weight").data[0] += 1
        with pytest.raises(shardproof.FailedCheck, match=r"step 2.*out\.weight"):
            check.step()
        other = shardproof.torch_optimizer(torch.optim.SGD, model, lr=0.1)
        with pytest.raises(TypeError, match="an optimizer of the library, as shardproof.adamw makes it"):
            shardproof.FingerprintCheck(model, other)

    shardproof.run_threads(3, body)


def test_averages_are_those_of_plain_pytorch_and_stand_in_for_the_parameters():
    torch.manual_seed(0)
    plain = Net()
    averaged = torch.optim.swa_utils.AveragedModel(plain, avg_fn=lambda a, p, n: a * 0.75 + p * 0.25)
    averaged.update_parameters(plain)  # torch's first update copies
    _, trained = train_plain(plain, lambda p: torch.optim.SGD(p, lr=0.1), steps=1, world=3)
    averaged.update_parameters(trained)
    expected = dict(averaged.module.named_parameters())

    def body(comm):
        model = sharded_net(comm)
        model.load_state_dict(plain.state_dict())
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, model, lr=0.1)
        ema = shardproof.Ema(model, decay=0.75)
        loss_of(model, batch(comm.rank)).backward()
        optimizer.step()
        ema.update()
        assert_same_bits(ema.gather(), expected, "averages")
        assert torch.equal(ema.gather_one("out.weight"), expected["out.weight"])
        before = model.state_dict()
        with ema.swapped_in():
            assert_same_bits(model.gather(), expected, "within")
            with pytest.raises(shardproof.Error, match="averages 'ema' are in the place of the parameters"):
                ema.update()
            loss_of(model, batch(comm.rank)).backward()
            with pytest.raises(shardproof.Error, match=r"SGD.step \(rank \d\) while the averages 'ema' are in the place"):
                optimizer.step()
            model.zero_gradients()
        assert_same_bits(model.state_dict(), before, "afterwards")
        assert_same_bits(ema.gather(), expected, "averages afterwards")
        with pytest.raises(ValueError, match="of rank 1 alone"):
            with ema.swapped_in():
                if comm.rank == 1:
                    raise ValueError("of rank 1 alone")
                raise ValueError("not of rank 1 alone")
        assert_same_bits(model.state_dict(), before, "after an exception")

    shardproof.run_threads(3, body)


def test_averages_are_in_checkpoints_and_come_back_on_another_mesh(tmp_path):
    def save(comm):
        model = sharded_net(comm)
        ema = shardproof.Ema(model, decay=0.5)
        model.write_parameters({"out.bias": torch.ones(1)})
        ema.update()
        shardproof.save(tmp_path / "at", model)
        return ema.gather()

    saved = shardproof.run_threads(3, save)[0]

    def load(comm):
        model = sharded_net(comm, "dp_replicate=2,dp_shard=1", "hsdp", seed=1)
        ema = shardproof.Ema(model)
        shardproof.load(tmp_path / "at", model)
        assert_same_bits(ema.gather(), saved)

    shardproof.run_threads(2, load)


def test_one_model_fills_another_on_other_ranks_and_on_another_mesh():
    def body(comm):
        trained = sharded_net(comm, "dp_shard=4", seed=0)
        other = sharded_net(comm, "dp_replicate=2,dp_shard=2", "hsdp", seed=1)
        wanted = trained.gather_main_parameters()
        shardproof.transfer(trained, other, bytes_at_once=256)
        assert_same_bits(other.gather_main_parameters(), wanted, "from zero3 to hsdp")
        narrow = Net(width=8)
        with pytest.raises(shardproof.Error, match="has shape .* in the model to transfer from"):
            shardproof.transfer(trained, shardproof.fully_shard(narrow, comm, mesh="dp_shard=4"))

    shardproof.run_threads(4, body)


def test_a_trainer_fills_a_model_that_is_cut_by_tensor_parallelism():
    plan = {"blocks.*.up": shardproof.ColumnParallel(), "blocks.*.down": shardproof.RowParallel()}

    def body(comm):
        trained = sharded_net(comm, "dp_shard=2")
        with shardproof.seeded(1):
            serving = Net()
        comms = shardproof.MeshComm(comm, "dp_shard=1,tp=2")
        parallel = shardproof.parallelize(serving, comms, plan=plan)
        cut = shardproof.fully_shard(serving, comms, strategy="ddp")
        shardproof.transfer(trained, cut)
        assert_same_bits(cut.gather_main_parameters(), trained.gather_main_parameters())
        x, _ = batch(0)
        with torch.no_grad():
            assert torch.allclose(serving(x), trained(x), atol=1e-6)
        assert parallel.parameters()

    shardproof.run_threads(2, body)


class Counting(torch.nn.Module):
    """With a buffer that is state, and a table that is none."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def forward(self, x):
        return self.net(x)


def test_persistent_buffers_are_transferred_and_saved_and_others_are_not(tmp_path):
    saved = str(tmp_path / "saved")

    def sharded_counting(comm, strategy, value):
        model = Counting()
        sharded = shardproof.fully_shard(model, comm, strategy=strategy)
        model.seen.fill_(value)
        model.mask.copy_(torch.tensor([value % 2 == 1, True, False]))
        model.table.fill_(value)
        return sharded

    def body(comm):
        trained = sharded_counting(comm, "zero3", 7 + comm.rank)  # each rank has its own
        served = sharded_counting(comm, "ddp", 20)
        shardproof.transfer(trained, served)
        own = served.module
        assert own.seen.item() == 7 and own.mask.tolist() == [True, True, False] and own.table.tolist() == [20.0] * 4
        shardproof.save(saved, trained)
        loaded = sharded_counting(comm, "zero2", 30)
        shardproof.load(saved, loaded)
        assert loaded.module.seen.item() in (7, 8, 9) and loaded.module.table.tolist() == [30.0] * 4

    shardproof.run_threads(3, body)
    names = torch.distributed.checkpoint.FileSystemReader(saved).read_metadata().state_dict_metadata
    assert "model.seen" in names and "model.mask" in names and "model.table" not in names


class PlainAdapted(torch.nn.Module):
    """LoRA by hand, in plain PyTorch."""

    def __init__(self, linear, down, up, scale):
        super().__init__()
        self.linear, self.scale = linear, scale
        self.down, self.up = torch.nn.Parameter(down.clone()), torch.nn.Parameter(up.clone())

    def forward(self, x):
        return self.linear(x) + torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up) * self.scale


def test_adapters_train_as_lora_by_hand_in_plain_pytorch():
    torch.manual_seed(0)
    base = Net()
    ours = copy.deepcopy(base)
    lora = shardproof.add_lora(ours, ["blocks.*.up", "out"], rank=3, alpha=6.0, seed=1)
    by_hand = copy.deepcopy(base).requires_grad_(False)
    for name in lora.layers:
        parent, leaf = by_hand.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        layer = ours.get_submodule(name)
        setattr(parent, leaf, PlainAdapted(getattr(parent, leaf), layer.lora_A.weight, layer.lora_B.weight, 2.0))
    _, trained = train_plain(by_hand, lambda p: torch.optim.SGD(p, lr=0.1), steps=3, world=2)

    def body(comm):
        model = copy.deepcopy(base)
        shardproof.add_lora(model, ["blocks.*.up", "out"], rank=3, alpha=6.0, seed=1)
        sharded = shardproof.fully_shard(model, comm, strategy="zero3", units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        for step in range(3):
            loss_of(sharded, batch(step * 2 + comm.rank)).backward()
            optimizer.step()
        found = sharded.gather_main_parameters()
        for name in lora.layers:
            layer = trained.get_submodule(name)
            assert torch.equal(found[name + ".lora_A.weight"], layer.down), name
            assert torch.equal(found[name + ".lora_B.weight"], layer.up), name
            assert torch.equal(found[name + ".weight"], base.get_submodule(name).weight), name

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_adapters_with_dropout_have_the_same_masks_however_their_layers_are_cut(sequence_dim):
    base = Net()
    plan = {"blocks.*.up": shardproof.ColumnParallel(), "blocks.*.down": shardproof.RowParallel()}
    if sequence_dim is not None:
        plan |= {"blocks.*.norm": shardproof.SequenceParallel(), "inp": shardproof.ScatterOutput(dim=sequence_dim)}
        plan["out"] = shardproof.SequenceParallel()

    def train(mesh):
        def body(comm):
            model = copy.deepcopy(base)
            lora = shardproof.add_lora(model, "blocks.*.*", rank=2, seed=3, dropout=0.5)
            comms = shardproof.MeshComm(comm, mesh)
            parallel = None
            if "tp" in mesh:
                styles = lora.with_styles(plan)
                parallel = shardproof.parallelize(model, comms, plan=styles, sequence_dim=sequence_dim)
            sharded = shardproof.fully_shard(model, comms, strategy="zero3", units=[Block])
            optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
            for step in range(3):
                shardproof.random_stream(step)
                (sharded(torch.stack(batch(step)[0].split(2))).square().sum() / 6).backward()
                optimizer.step()
            return sharded.gather_main_parameters(), parallel

        return shardproof.run_threads(2, body)[0][0]

    whole, cut = train("dp_shard=2"), train("dp_shard=1,tp=2")
    assert any(value.count_nonzero() for name, value in whole.items() if name.endswith("lora_B.weight"))
    for name, value in whole.items():
        assert torch.allclose(cut[name], value, atol=1e-5), name


def test_adapters_are_saved_for_peft_loaded_cut_and_merged(tmp_path):
    plan = {"blocks.*.up": shardproof.ColumnParallel(), "blocks.*.down": shardproof.RowParallel()}

    base = Net()

    def train(comm):
        model = copy.deepcopy(base)
        lora = shardproof.add_lora(model, "blocks.*.*", rank=2)
        sharded = shardproof.fully_shard(model, comm, strategy="zero3", units=[Block])
        optimizer = shardproof.adamw(sharded, lr=0.05)
        for step in range(3):
            loss_of(sharded, batch(step * 2 + comm.rank)).backward()
            optimizer.step()
        lora.save(tmp_path / "adapters", sharded, base_model="net")
        x, _ = batch(9)
        with torch.no_grad():
            before = sharded(x)
            lora.merge(sharded)
            assert torch.allclose(sharded(x), before, atol=1e-5)
        with pytest.raises(shardproof.Error, match="these adapters were merged"):
            lora.save(tmp_path / "merged", sharded)
        shardproof.save(tmp_path / "checkpoint", sharded, optimizer, step=3)
        return before

    def resume(comm):
        model = copy.deepcopy(base)
        lora = shardproof.add_lora(model, "blocks.*.*", rank=2)
        sharded = shardproof.fully_shard(model, comm, strategy="zero1", units=[Block])
        shardproof.load(tmp_path / "checkpoint", sharded, shardproof.adamw(sharded, lr=0.05))
        with pytest.raises(shardproof.Error, match="these adapters were merged"):
            lora.save(tmp_path / "merged", sharded)
        with pytest.raises(shardproof.Error, match="They would be added twice"):
            lora.load(tmp_path / "adapters", sharded)

    before = shardproof.run_threads(2, train)[0]
    shardproof.run_threads(3, resume)
    with open(os.path.join(tmp_path, "adapters", "adapter_config.json"), encoding="utf-8") as file:
        config = json.load(file)
    assert config["peft_type"] == "LORA" and config["r"] == 2 and config["lora_alpha"] == 4.0
    assert config["base_model_name_or_path"] == "net" and len(config["target_modules"]) == 6
    stored = load_file(os.path.join(tmp_path, "adapters", "adapter_model.safetensors"))
    assert len(stored) == 12
    assert stored["base_model.model.blocks.0.up.lora_A.weight"].shape == (2, 12)
    assert stored["base_model.model.blocks.0.up.lora_B.weight"].shape == (24, 2)

    def load(comm):
        model = copy.deepcopy(base)
        lora = shardproof.add_lora(model, "blocks.*.*", rank=2, seed=7)
        comms = shardproof.MeshComm(comm, "dp_shard=1,tp=2")
        parallel = shardproof.parallelize(model, comms, plan=lora.with_styles(plan))
        sharded = shardproof.fully_shard(model, comms, strategy="zero3", units=[Block])
        lora.load(tmp_path / "adapters", sharded)
        x, _ = batch(9)
        with torch.no_grad():
            assert torch.allclose(sharded(x), before, atol=1e-5)
        assert any(name.endswith("down.lora_A.weight") for name, _, _ in parallel.parameters())

    shardproof.run_threads(2, load)


def test_adapters_that_cannot_be_are_refused():
    net = Net()
    with pytest.raises(shardproof.Error, match="target 'blocks.0.upp' fits no torch.nn.Linear"):
        shardproof.add_lora(net, "blocks.0.upp")
    with pytest.raises(shardproof.Error, match="the rank must be at least 1"):
        shardproof.add_lora(net, "out", rank=0)
    shardproof.add_lora(net, "out")
    with pytest.raises(shardproof.Error, match="layer 'out' has an adapter already"):
        shardproof.add_lora(net, "out")


def test_whole_values_are_gathered_one_at_a_time_and_a_near_name_is_suggested():
    def body(comm):
        model = sharded_net(comm)
        optimizer = shardproof.sgd(model, lr=0.5, momentum=0.5)
        loss_of(model, batch(comm.rank)).backward()
        gradient = model.gather_gradient("out.weight")
        assert torch.equal(gradient, model.gather_gradients()["out.weight"])
        optimizer.step()
        assert torch.equal(optimizer.gather_state_of("momentum_buffer", "out.weight"), gradient)
        assert torch.equal(model.gather_main_parameter("out.weight"), model.gather_main_parameters()["out.weight"])
        with pytest.raises(shardproof.Error, match="no parameter 'out.wieght'. Did you mean 'out.weight'"):
            model.gather_main_parameter("out.wieght" if comm.rank == 1 else "out.weight")

    shardproof.run_threads(2, body)


def test_the_schedules_are_those_of_the_library():
    assert [shardproof.warmup_constant(step, 2) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert shardproof.warmup_inverse_sqrt(15, 4) == 0.5
    stable = [shardproof.warmup_stable_decay(step, 2, 8, 4, 0.5) for step in range(10)]
    assert stable == [0.5, 1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_weights_have_their_gradients_from_what_a_backward_for_inputs_left_in_the_graph(strategy):
    """As stages of pipelines without bubbles do: each node was given a gradient that the one of its parameters follows from."""
    from torch.autograd.graph import GradientEdge
    from torch.distributed.pipelining._backward import stage_backward_input

    base = Net()

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, strategy=strategy, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        of_accumulator = {p.view_as(p).grad_fn.next_functions[0][0]: p for p in model.parameters()}
        for step in range(2):
            x, y = batch(step * comm.size + comm.rank)
            _, groups = stage_backward_input([loss_of(model, (x.requires_grad_(), y))], None, [x], model.parameters())
            for group in groups:
                left = zip(group["intermediates"], group["grads"])
                edges = [(GradientEdge(node, i), each) for node, got in left for i, each in enumerate(got) if each is not None]
                sharded.set_last_microbatch(group is groups[-1])
                sharded.set_gradient_sync(group is groups[-1])
                for unit in sharded.units():
                    unit.unshard()
                weights = [of_accumulator[node] for node in group["params"]]
                torch.autograd.backward(*zip(*edges), inputs=weights)
            optimizer.step()
        return sharded.gather()

    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1), steps=2, world=2)
    for got in shardproof.run_threads(2, body):
        assert_same_bits(got, dict(expected.named_parameters()))
