"""PyTorch's own clipping would change nothing on a sharded model, and says so. Elsewhere it is as it was."""

import copy
import types
import warnings

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # before the package is opened, as programs do

import shardproof
from models import Block, Net, batch, loss_of

CLIPS = [clip_grad_norm_, clip_grad_value_, torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_]


@pytest.mark.parametrize("clip", CLIPS)
def test_pytorchs_clipping_of_a_sharded_model_is_refused_and_names_ours(clip):
    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        loss_of(model, batch(comm.rank)).backward()
        for given in (model.parameters(), list(model.parameters()), model.inp.weight, [torch.ones(2), model.inp.weight]):
            with pytest.raises(shardproof.Error, match=rf"{clip.__name__} was given parameters of a sharded model") as raised:
                clip(given, 1.0)
            assert "sharded.clip_gradients" in str(raised.value)
            assert "shardproof.fsdp.clip_grad_norm_" in str(raised.value)
        sharded.skip_step()

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("clip", CLIPS[:2])
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
