"""Parameters and gradients that are DTensors between uses, where FSDP2 has no answer to compare with."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardproof
import shardproof.fsdp
from fsdp_on_threads import shard, whole
from models import Net, assert_same_bits, batch, loss_of, train_plain
from shardproof.fsdp import FSDPModule, fully_shard
from shardproof.shards import shards_of


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hsdp"])
def test_every_strategy_that_cuts_the_optimizers_memory_trains_shards_with_plain_pytorchs_bits(strategy):
    base = Net()

    def body(comm):
        model = copy.deepcopy(base)
        comms = shardproof.MeshComm(comm, "dp_replicate=2,dp_shard=2" if strategy == "hsdp" else "dp_shard=4")
        for part in (*model.blocks, model):
            fully_shard(part, mesh=comms, **(dict(strategy=strategy) if part is model else {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step * comm.size + comm.rank)).backward()
            optimizer.step()
        return whole(model), shardproof.sharded_of(model).gather()

    _, expected = train_plain(base, lambda p: torch.optim.AdamW(p, lr=0.01), steps=3, world=4)
    for shards, computed in shardproof.run_threads(4, body):
        if strategy == "hsdp":  # adds replicas last
            for name, value in expected.named_parameters():
                torch.testing.assert_close(shards[name], value.detach(), rtol=1e-4, atol=1e-5)
        else:
            assert_same_bits(shards, dict(expected.named_parameters()))
        assert_same_bits(computed, shards)


def test_a_parameter_has_a_gradient_where_any_rank_has_reached_it_and_is_left_alone_where_none_has():
    class Choosing(Net):
        def __init__(self):
            super().__init__()
            self.never, self.sometimes = nn.Linear(3, 3), nn.Linear(1, 1)

        def forward(self, x):
            result = super().forward(x)
            return self.sometimes(result) if x.sum() > 0 else result

    base = Choosing()
    inputs = [torch.ones(2, 5), -torch.ones(2, 5)]

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs[comm.rank]).square().mean().backward()
            assert model.never.weight.grad is None and model.sometimes.weight.grad is not None
            optimizer.step()
        optimizer.zero_grad()
        model(inputs[1]).square().mean().backward()  # no rank
        assert model.sometimes.weight.grad is None
        return whole(model)

    plain = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(plain(x).square().mean() for x in inputs) / 2).backward()
        optimizer.step()
    for values in shardproof.run_threads(2, body):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-5, atol=1e-6)


def test_parameters_that_two_units_share_are_one_shard_and_train_as_plain_ones():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
            self.blocks[1].weight = self.blocks[0].weight
            self.head = nn.Linear(5, 5)
            self.head.weight = self.blocks[0].weight

        def forward(self, x):
            return self.head(self.blocks[1](torch.tanh(self.blocks[0](x))))

    base = Tied()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        assert model.head.weight is model.blocks[0].weight is model.blocks[1].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(2 * step + comm.rank)).backward()
            optimizer.step()
        return whole(model)

    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1), steps=2, world=2)
    for values in shardproof.run_threads(2, body):
        for name, value in expected.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_after_an_exception_the_module_has_its_shards_and_training_goes_on(when):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("on purpose")

    base = Net()

    def fail(module, args, result):
        if when == "forward":
            raise ValueError("on purpose")
        return Fails.apply(result)

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = model.blocks[1].up.register_forward_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            loss_of(model, batch(0)).backward()
        handle.remove()
        assert when == "backward" or all(isinstance(p, DTensor) for p in model.parameters())
        model.reset_iter_state()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank)).backward()
        optimizer.step()
        return whole(model)

    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1), steps=1, world=2)
    for values in shardproof.run_threads(2, body):
        assert_same_bits(values, dict(expected.named_parameters()))


def test_any_dim_is_cut_in_parts_that_need_not_divide_it(tmp_path):
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base), shard_placement_fn=lambda p: Shard(p.dim() - 1))
        assert model.inp.weight.placements == (Shard(1),) and model.out.bias.placements == (Shard(0),)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step * comm.size + comm.rank)).backward()
            optimizer.step()
        sharded = shardproof.sharded_of(model)
        values = whole(model)
        assert_same_bits(dict(sharded.gather()), values)
        assert_same_bits(dict(shardproof.Ema(sharded).gather()), values)
        shardproof.save(str(tmp_path / "saved"), sharded, optimizer)
        # Its state goes on under another cut.
        other = shard(comm, copy.deepcopy(base))
        updates = torch.optim.AdamW(other.parameters(), lr=0.01)
        loss_of(other, batch(0)).backward()  # makes the engine
        updates.zero_grad()
        shardproof.load(str(tmp_path / "saved"), shardproof.sharded_of(other), updates)
        for each, steps in ((model, optimizer), (other, updates)):
            steps.zero_grad()
            loss_of(each, batch(comm.rank)).backward()
            steps.step()
        for name, value in whole(other).items():
            torch.testing.assert_close(whole(model)[name], value, rtol=1e-5, atol=1e-6)
        return values

    _, expected = train_plain(base, lambda p: torch.optim.AdamW(p, lr=0.01), steps=3, world=3)
    for values in shardproof.run_threads(3, body):
        for name, value in expected.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graph", [False, True])
def test_a_forward_may_come_between_two_backwards_of_others(graph):
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        losses = [loss_of(model, batch(0)), loss_of(model, batch(1))]
        losses[0].backward()
        with torch.set_grad_enabled(graph):
            losses.append(loss_of(model, batch(2)))
        for loss in losses[1:] if graph else losses[1:2]:
            loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    plain = copy.deepcopy(base)
    for k in range(3 if graph else 2):
        loss_of(plain, batch(k)).backward()
    for gradients in shardproof.run_threads(2, body):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_an_update_of_one_part_keeps_what_another_has_accumulated():
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        head = torch.optim.SGD(model.out.parameters(), lr=0.0)
        for block in model.blocks:
            block.set_requires_gradient_sync(False)
        loss_of(model, batch(0)).backward()
        head.step()
        head.zero_grad()
        model.set_requires_gradient_sync(True)  # of all below, too
        loss_of(model, batch(1)).backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters() if name.startswith("blocks")}

    plain = copy.deepcopy(base)
    for k in range(2):
        loss_of(plain, batch(k)).backward()
    for gradients in shardproof.run_threads(2, body):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-4)


def test_other_dims_of_a_block_that_runs_later_than_the_others():
    class Later(Net):
        runs = False

        def forward(self, x):
            x = self.inp(x)
            for block in self.blocks[: 3 if self.runs else 2]:
                x = block(x)
            return self.out(x)

    base = Later()

    def body(comm):
        model = shard(comm, copy.deepcopy(base), shard_placement_fn=lambda p: Shard(p.dim() - 1))
        loss_of(model, batch(0)).backward()
        model.runs = True
        return model(batch(0)[0]).detach()

    plain = copy.deepcopy(base)
    plain.runs = True
    for result in shardproof.run_threads(2, body):
        torch.testing.assert_close(result, plain(batch(0)[0]).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", ["dp_shard=2,dp_replicate=2", "dp_replicate=2,dp_shard=2,tp=1", "dp_shard=4,cp=1"])
def test_the_axes_of_a_mesh_may_come_in_any_order(axes):
    weight = torch.arange(15.0).view(5, 3)

    def body(comm):
        model = nn.Linear(3, 5, bias=False)
        model.weight.data.copy_(weight)
        fully_shard(model, mesh=shardproof.MeshComm(comm, axes))
        assert torch.equal(model(torch.eye(3)).T, weight) and torch.equal(model.weight.full_tensor(), weight)

    shardproof.run_threads(4, body)


def test_ranks_whose_optimizers_differ_are_told_so():
    def body(comm):
        model = shard(comm, Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + comm.rank)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank)).backward()
            optimizer.step()

    with pytest.raises(shardproof.Error, match=r"after SGD \| lr=0.1 .*after SGD \| lr=1.1"):
        shardproof.run_threads(2, body)


def test_an_optimizer_that_was_made_before_gets_the_shards_unless_it_has_made_steps():
    def body(comm):
        model = Net()
        optimizer = torch.optim.AdamW([{"params": model.blocks.parameters()}, {"params": model.out.parameters(), "lr": 0.1}])
        trained = copy.deepcopy(model)
        late = torch.optim.AdamW(trained.parameters())
        loss_of(trained, batch(0)).backward()
        late.step()
        shard(comm, model)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        assert [sharded.module for sharded in shards_of(optimizer)] == [model]
        shard(comm, trained)
        trained(batch(0)[0])
        with pytest.raises(shardproof.Error, match="AdamW has made steps on a model before fully_shard"):
            late.step()

    shardproof.run_threads(1, body)


def test_ranks_differ_after_memory_was_given_to_a_model_too():
    def body(comm):
        with torch.device("meta"):
            model = Net()
        model.inp.weight.mine = True
        model = shard(comm, model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + comm.rank)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank)).backward()
            optimizer.step()

    with pytest.raises(shardproof.Error, match=r"after SGD \| lr=0.1 .*after SGD \| lr=1.1"):
        shardproof.run_threads(2, body)


class Odd(nn.Module):
    def __init__(self, parameter):
        super().__init__()
        self.odd = parameter


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Odd(nn.Parameter(torch.tensor(1.0))), "odd is a scalar, which has no dim to cut. Give it the shape"),
        (lambda: nn.LazyLinear(3), "weight is a UninitializedParameter, and must be a plain torch.nn.Parameter"),
    ],
)
def test_parameters_that_cannot_be_cut_are_refused(make, message):
    def body(comm):
        with pytest.raises(shardproof.Error, match=message):
            fully_shard(make(), mesh=shardproof.MeshComm(comm, "dp_shard=1"))

    shardproof.run_threads(1, body)


def test_what_would_be_lost_is_refused():
    def body(comm):
        with pytest.raises(shardproof.Error, match="has the axis tp: shards are DTensors over dp_replicate and dp_shard"):
            fully_shard(Net(), mesh=shardproof.MeshComm(comm, "dp_shard=1,tp=2"))
        model = shard(comm, Net(), strategy="ddp")
        with pytest.raises(shardproof.Error, match="a module within the outermost one was given options"):
            model(batch(0)[0])
        for options, message in (
            (dict(strategy="ddp"), "does not cut over dp_shard alone. Leave strategy out"),
            (dict(mp_policy=shardproof.Precision(main=torch.float64)), "main of Precision asks for another one"),
        ):
            model = fully_shard(Net(), mesh=shardproof.MeshComm(comm, "dp_shard=2"), **options)
            before, parameters = model.state_dict(), [p._shardproof_parameter for p in model.parameters()]
            for _ in range(2):  # nor does it train without shards
                with pytest.raises(shardproof.Error, match=message):
                    model(batch(0)[0])
                assert isinstance(model, FSDPModule) and all(parameter.whole.is_meta for parameter in parameters)
            for name, value in model.state_dict().items():
                assert isinstance(value, DTensor) and torch.equal(value.full_tensor(), before[name].full_tensor()), name
        model = Net()
        for part in (*model.blocks, model):
            axes = "dp_shard=2" if part is model else "dp_replicate=2,dp_shard=1"
            fully_shard(part, mesh=shardproof.MeshComm(comm, axes))
        for _ in range(2):  # a refusal leaves the model as it was
            with pytest.raises(shardproof.Error, match="was given different meshes"):
                model(batch(0)[0])
        model = shard(comm, Net())
        with pytest.raises(shardproof.Error, match="deepcopy of a sharded model is not offered"):
            copy.deepcopy(model)
        newer = ("set_manual_backward_finalization", "set_keep_unsharded_storage")
        for name in (*newer, "set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
            with pytest.raises(shardproof.Error, match=f"{name} is not offered. "):
                getattr(model, name)(None)
        model.set_force_sum_reduction_for_comms(True)
        model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_symm_mem_for_comm()
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(2)
        model.set_reduce_scatter_unused_params(True)
        policy = types.SimpleNamespace(**{**vars(shardproof.fsdp.MixedPrecisionPolicy()), "param_dtype_override_fn": id})
        other = shard(comm, Net(), mp_policy=policy)
        with pytest.raises(shardproof.Error, match="has a param_dtype_override_fn, which is not offered"):
            other(batch(0)[0])
        loss_of(model, batch(0)).backward()
        with pytest.raises(shardproof.Error, match="set_requires_all_reduce is of the whole model"):
            model.blocks[0].set_requires_all_reduce(False)
        with pytest.raises(shardproof.Error, match="set_gradient_divide_factor comes before the first forward"):
            model.set_gradient_divide_factor(2.0)
        with pytest.raises(shardproof.Error, match="the library's own optimizers do not look"):
            shardproof.adamw(shardproof.sharded_of(model))
        with pytest.raises(shardproof.Error, match="the .grad of its parameters has taken them"):
            shardproof.sharded_of(model).clip_gradients(1.0)
        model.out.weight.grad.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="the norm of order 2.0 is nan, and nothing is clipped"):
            shardproof.fsdp.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        model.double()
        with pytest.raises(shardproof.Error, match="was moved or cast from torch.float32 on cpu to torch.float64 on cpu"):
            model(batch(0)[0])
        with pytest.raises(shardproof.Error, match="deepcopy of a sharded model is not offered"):
            copy.deepcopy(model.blocks)
        other = shard(comm, Net())
        other.out.weight = other.inp.weight
        with pytest.raises(shardproof.Error, match="parameter weight was replaced by a DTensor of shape"):
            other(batch(0)[0])

    shardproof.run_threads(2, body)


def test_after_remove_a_model_is_plain_and_may_be_copied_and_sharded_again():
    def body(comm):
        model, plain = shard(comm, Net()), Net()
        model(batch(0)[0])
        values, removed = whole(model), shardproof.sharded_of(model)
        removed.remove()
        assert type(model) is Net and type(model.blocks[0]) is type(plain.blocks[0])
        assert_same_bits(dict(copy.deepcopy(model).named_parameters()), values)
        shard(comm, model).unshard()
        loss_of(model, batch(0)).backward()
        plain.load_state_dict(values)
        loss_of(plain, batch(0)).backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)

    shardproof.run_threads(2, body)


def test_a_forward_waits_for_the_event_behind_the_optimizers_step():
    class Event:
        waited = 0

        def wait(self):
            self.waited += 1

    def body(comm):
        model, event = shard(comm, Net()), Event()
        model(batch(0)[0])
        model.set_post_optim_event(event)
        assert event.waited == 0
        model(batch(0)[0])
        model(batch(0)[0])
        assert event.waited == 1

    shardproof.run_threads(1, body)


def test_a_mesh_without_a_process_group_has_the_collectives_of_dtensors():
    def body(comm):
        comms = shardproof.MeshComm(comm, f"dp_shard={comm.size}")
        model = fully_shard(nn.Linear(4, 5, bias=False), mesh=comms)
        weight = model.weight.detach()
        mesh = weight.device_mesh
        full = weight.full_tensor()
        again = distribute_tensor(full, mesh, weight.placements, src_data_rank=None)
        assert torch.equal(again.to_local(), weight.to_local())
        assert weight.sum().full_tensor().item() == pytest.approx(full.sum().item(), rel=1e-5)
        assert weight.max().full_tensor().item() == full.max().item() and weight.min().full_tensor().item() == full.min().item()
        assert weight.mean().full_tensor().item() == pytest.approx(full.mean().item(), rel=1e-5)
        assert all_reduce(torch.full((), float(comm.rank)), "avg", mesh).item() == 1.0
        product = (weight.T @ weight).full_tensor()
        torch.testing.assert_close(product, full.T @ full)
        torch.testing.assert_close(weight.redistribute(mesh, [Shard(1)]).full_tensor(), full)
        group = mesh.get_group()
        assert (group.size(), group.rank(), mesh.get_coordinate()) == (comm.size, comm.rank, (comm.rank,))
        assert repr(group) == f"CommGroup('dp_shard', rank {comm.rank} of {comm.size})"
        return full

    first, *others = shardproof.run_threads(3, body)
    assert len(others) == 2
