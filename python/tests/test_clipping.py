"""PyTorch's own clipping would change nothing on a sharded model, and says so. Elsewhere it is as it was."""

import copy
import types
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

# Before the package is opened, as programs do.
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

import shardproof
from shardproof import fsdp
from models import Block, Net, batch, loss_of

CLIPS = [clip_grad_norm_, clip_grad_value_, torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_]


def with_the_norm(parameters, norm_max):
    """torchtitan's way."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in given if p.grad is not None])
    clip_grads_with_norm_(given, norm_max, norm)


with_the_norm.__name__ = "clip_grads_with_norm_"


@pytest.mark.parametrize("clip", [*CLIPS, with_the_norm])
def test_pytorchs_clipping_of_a_sharded_model_is_refused_and_names_ours(clip):
    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        loss_of(model, batch(comm.rank)).backward()
        for given in (model.parameters(), list(model.parameters()), model.inp.weight, [torch.ones(2), model.inp.weight]):
            with pytest.raises(shardproof.Error, match=rf"{clip.__name__} was given parameters of a sharded model") as raised:
                clip(given, 1.0)
            assert "sharded.clip_gradients" in str(raised.value)
        sharded.skip_step()

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("clip", [*CLIPS[:2], with_the_norm])
def test_pytorchs_clipping_of_parameters_that_are_not_sharded_is_as_it_was(clip):
    def gradients_of(model, given):
        loss_of(model, batch(0)).backward()
        before = [parameter.grad.clone() for parameter in given]
        clip((parameter for parameter in given), 1e-3)
        return before, [parameter.grad for parameter in given]

    def body(comm):
        plain = Net()
        before, after = gradients_of(plain, list(plain.parameters()))
        assert not any(torch.equal(old, new) for old, new in zip(before, after))

        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block], ignored="out.*")
        before, after = gradients_of(model, list(model.out.parameters()))
        assert not any(torch.equal(old, new) for old, new in zip(before, after))
        sharded.skip_step()

        before, after = gradients_of(model, list(sharded.remove().parameters()))
        assert not all(torch.equal(old, new) for old, new in zip(before, after))

    shardproof.run_threads(1, body)


def test_the_norm_and_the_warning_of_pytorchs_clipping_are_as_they_were():
    shardproof.fully_shard  # the package is open
    model = Net()
    loss_of(model, batch(0)).backward()
    again = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), again.parameters()):
        other.grad = parameter.grad.clone()
    norm = clip_grad_norm_(model.parameters(), 0.5, norm_type=1.0)
    total = torch.nn.utils.get_total_norm([p.grad for p in again.parameters()], 1.0)
    assert torch.equal(norm, total)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip_grad_norm_([], 1.0)
        assert not caught
        clip_grad_norm_((p for p in ()), 1.0)
    assert len(caught) == 1 and "empty generator" in str(caught[0].message), caught
    assert isinstance(model.parameters(), types.GeneratorType)


def sharded_parts(comm, base, how):
    """Models that are clipped together, on two ranks that have the same batch."""
    parts, mesh = copy.deepcopy(base), shardproof.MeshComm(comm, "dp_shard=2")
    if how == "two models":
        for model in parts:
            fsdp.fully_shard(model, mesh=mesh)
    elif how == "ignored parameters":
        for model in parts:
            fsdp.fully_shard(model, mesh=mesh, ignored_params=set(parts[1].out.parameters()))
    else:
        for model in parts:
            for block in model.blocks:
                fsdp.fully_shard(block, mesh=mesh)
    return parts


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("norm_max", [0.3, 1e9])
@pytest.mark.parametrize("how", ["two models", "ignored parameters", "layers without a root"])
def test_parameters_of_several_models_and_plain_ones_are_clipped_by_one_norm(how, norm_max, order):
    base = nn.ModuleList([Net(), Net()])

    def backward(parts):
        (loss_of(parts[0], batch(0)) + 3 * loss_of(parts[1], batch(1))).backward()

    expected = copy.deepcopy(base)
    backward(expected)
    norm_expected = clip_grad_norm_(expected.parameters(), norm_max, order)

    def body(comm):
        parts = sharded_parts(comm, base, how)
        backward(parts)
        norm = fsdp.clip_grad_norm_(parts.parameters(), norm_max, order)
        assert norm.dtype == torch.float32 and norm.item() == pytest.approx(norm_expected.item(), rel=1e-5)
        got = {name: p.grad for name, p in parts.named_parameters()}
        assert any(isinstance(value, DTensor) for value in got.values())
        got = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in got.items()}
        for name, p in expected.named_parameters():
            assert torch.allclose(got[name], p.grad, rtol=1e-4, atol=1e-8), name

    shardproof.run_threads(2, body)


def test_a_norm_of_nothing_is_refused_for_one_model_and_for_several():
    def body(comm):
        parts = sharded_parts(comm, nn.ModuleList([Net(), Net()]), "two models")
        (loss_of(parts[0], batch(0)) + loss_of(parts[1], batch(1))).backward()
        for given in (parts.parameters(), parts[0].parameters()):
            with pytest.raises(shardproof.Error, match="max_norm must be above 0, got 0"):
                fsdp.clip_grad_norm_(given, 0.0)

    shardproof.run_threads(2, body)


def test_plain_parameters_whose_gradients_differ_between_ranks_are_not_clipped_with_a_model():
    def body(comm):
        parts = sharded_parts(comm, nn.ModuleList([Net()]), "layers without a root")
        loss_of(parts[0], batch(comm.rank)).backward()
        with pytest.raises(shardproof.Error, match="8 of the parameters are not sharded, and the norms .* Average these"):
            fsdp.clip_grad_norm_([*parts.parameters(), *parts[0].inp.parameters(), *parts[0].out.parameters()], 0.1)

    shardproof.run_threads(2, body)
