"""What is written to shards, or assigned in their place, is computed with."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import shardproof
import shardproof.fsdp
from fsdp_on_threads import HALF, in_half, shard, whole, with_values
from models import Net, assert_same_bits, batch, loss_of, train_plain
from shardproof.fsdp import fully_shard


@pytest.mark.parametrize("after", ["a forward", "a backward", "a backward that keeps its graph"])
def test_what_is_written_to_shards_is_computed_with_in_the_dtype_of_computation_too(after):
    x = batch(0)[0]

    def body(comm):
        model = shard(comm, Net(), mp_policy=HALF)
        for step, write in enumerate(COUNTED if after == "a forward" else WRITES):
            loss = loss_of(model, batch(0))
            if after != "a forward":
                loss.backward(retain_graph=after != "a backward")
            with torch.no_grad():
                write(model)
            expected = in_half(model)(x.bfloat16())
            torch.testing.assert_close(model(x).detach(), expected.detach(), msg=f"write {step}")
            model.zero_grad()
            model._shardproof_handle().shards.open_forwards = 0  # as after a backward

    shardproof.run_threads(2, body)


COUNTED = [  # by autograd, or in the module
    lambda model: [p.mul_(1.5) for p in model.parameters()],
    lambda model: model.load_state_dict(with_values(model, 0.5)),
    lambda model: model.load_state_dict({name: nn.Parameter(v) for name, v in with_values(model, 0.75).items()}, assign=True),
]
WRITES = [
    *COUNTED,
    lambda model: torch._foreach_add_(list(model.parameters()), 0.25),
    lambda model: [p.data.fill_(2) for p in model.parameters()],
    lambda model: [p.to_local().fill_(3) for p in model.parameters()],
]


def test_averages_that_never_run_backwards_are_computed_with():
    """Foreach kernels and .data raise no version, and no optimizer tells."""
    base, x = Net(), batch(0)[0]

    def body(comm):
        mesh = shardproof.MeshComm(comm, "dp_shard=2")
        model, averages = copy.deepcopy(base), copy.deepcopy(base)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        for part in (*averages.blocks, averages):
            fully_shard(part, mesh=mesh, mp_policy=HALF)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(2 * step + comm.rank)).backward()
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(list(averages.parameters()), [p.detach() for p in model.parameters()], 0.5)
                torch.testing.assert_close(averages(x), in_half(averages)(x.bfloat16()))

    shardproof.run_threads(2, body)


def test_what_a_program_has_of_shards_from_before_the_first_forward_follows():
    def body(comm):
        model = shard(comm, Net())
        state, locals_before = model.state_dict(), [p.to_local() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(model, batch(comm.rank)).backward()
        optimizer.step()
        for (name, parameter), local in zip(model.named_parameters(), locals_before):
            assert torch.equal(state[name].to_local(), parameter.to_local()) and torch.equal(local, parameter.to_local())

    shardproof.run_threads(2, body)


def test_units_that_are_entered_or_gathered_by_themselves_have_what_was_written():
    def body(comm):
        model = shard(comm, Net(), mp_policy=HALF)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank)).backward()
            optimizer.step()
            expected, x = whole(model), torch.ones(2, 12)
            with torch.no_grad():
                torch.testing.assert_close(model.blocks[0](x), in_half(model).blocks[0](x.bfloat16()))
            model.unshard()
            assert torch.equal(model.inp.weight, expected["inp.weight"].bfloat16())
            model.reshard()

    shardproof.run_threads(2, body)


def test_an_optimizer_goes_on_with_shards_that_were_assigned_and_with_its_state():
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            if step == 2:
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
            optimizer.zero_grad()
            loss_of(model, batch(2 * step + comm.rank)).backward()
            optimizer.step()
        return whole(model)

    _, expected = train_plain(base, lambda p: torch.optim.AdamW(p, lr=0.01), steps=4, world=2)
    for values in shardproof.run_threads(2, body):
        assert_same_bits(values, dict(expected.named_parameters()))


def test_a_parameter_that_comes_back_is_the_shard_again():
    def body(comm):
        model = shard(comm, Net())
        expected = model(batch(0)[0]).detach()
        first = model.inp.weight
        kept = first.detach().clone()
        model.inp.weight = nn.Parameter(first.detach().clone().zero_())
        assert not torch.equal(model(batch(0)[0]), expected)
        with torch.no_grad():
            first.copy_(kept)
        model.inp.weight = first
        assert torch.equal(model(batch(0)[0]), expected) and model.inp.weight is first

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("ran", [False, True])
def test_an_assigned_state_of_another_model_is_copied_along_any_dim(dim, ran):
    x = batch(0)[0]

    def body(comm):
        mesh = shardproof.MeshComm(comm, "dp_shard=2")
        source, target = Net(), Net()
        for part in (*source.blocks, source, *target.blocks, target):
            fully_shard(part, mesh=mesh, shard_placement_fn=lambda p: Shard(dim % p.dim()))
        expected, kept = source(x).detach(), {name: value.clone() for name, value in whole(source).items()}
        if ran:
            target(x)
        target.load_state_dict(source.state_dict(), assign=True)
        torch.testing.assert_close(target(x).detach(), expected)
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
            target(x)
            torch.testing.assert_close(source(x), expected)
        assert_same_bits(whole(source), kept)

    shardproof.run_threads(2, body)
