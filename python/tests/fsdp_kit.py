"""What programs of FSDP2's users have in common (fsdp_training.py, fsdp_models.py), and how two libraries run one of them."""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from models import Net, batch, loss_of


def net(**sizes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(**sizes)


def given(step):
    return batch(step * dist.get_world_size() + dist.get_rank())


def sharded(lib, model=None, **options):
    model = net() if model is None else model
    for block in model.blocks:
        lib.fully_shard(block, **options)
    return lib.fully_shard(model, **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(model):
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def gradients(model):
    return {name: None if p.grad is None else whole(p.grad).clone() for name, p in model.named_parameters()}


def train(model, optimizer, steps=3, loss=loss_of):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, given(step))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def flat(result):
    """Numbers and tensors of a result, with where they are in it."""
    if isinstance(result, dict):
        for name, value in result.items():
            for at, each in flat(value):
                yield f"{name}{at}", each
    elif isinstance(result, (list, tuple)):
        for i, value in enumerate(result):
            for at, each in flat(value):
                yield f"[{i}]{at}", each
    else:
        yield "", result


def compare(program):
    """Run a program with both libraries."""
    import torch.distributed.fsdp as theirs

    import shardproof.fsdp as ours

    expected, got, name = list(flat(program(theirs))), list(flat(program(ours))), program.__name__
    assert expected and [at for at, _ in got] == [at for at, _ in expected], name
    for (at, own), (_, other) in zip(got, expected):
        if isinstance(other, torch.Tensor):
            near = (1e-4, 1e-5) if other.dtype == torch.float32 else (2e-2, 1e-3)
            torch.testing.assert_close(own, other, rtol=near[0], atol=near[1], msg=lambda text, at=at: f"{name}: {at}: {text}")
        elif isinstance(other, float):
            assert math.isclose(own, other, rel_tol=1e-5, abs_tol=1e-6), (name, at, own, other)
        else:
            assert own == other, (name, at, own, other)
