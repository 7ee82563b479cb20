"""Models of the tests of borders, and what plain PyTorch makes of them."""

import copy

import pytest
import torch
from torch import nn

import shardproof

WAYS = [
    dict(strategy="ddp"),
    dict(strategy="zero2", recompute=True),
    dict(strategy="zero3"),
    dict(strategy="zero3", prefetch_backward=1),
    dict(strategy="zero3", recompute=True),
]


EVERY_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(str(key) for pair in way.items() for key in pair))


def batch(rank):
    return torch.linspace(-1, 1, 24).view(2, 3, 4) * (rank + 1)


def plain(model, loss, world=2):
    """Gradients, buffers of each rank, and what ``loss`` says besides."""
    total, buffers, said = {}, [], []
    for rank in range(world):
        own = copy.deepcopy(model)
        value = loss(own, batch(rank))
        value, more = value if isinstance(value, tuple) else (value, None)
        value.backward()
        buffers.append({name: each.clone() for name, each in own.named_buffers()})
        said.append(more)
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad.clone()
    return {name: value / world for name, value in total.items()}, buffers, said


def sharded(model, loss, units, strategy="zero3", recompute=False, world=2, **options):
    models = [copy.deepcopy(model) for _ in range(world)]

    def body(comm):
        own = models[comm.rank]
        it = shardproof.fully_shard(own, comm, strategy=strategy, units=units, recompute=units if recompute else (), **options)
        value = loss(own, batch(comm.rank))
        value, more = value if isinstance(value, tuple) else (value, None)
        value.backward()
        return it.gather_gradients(), {name: each.clone() for name, each in own.named_buffers()}, more

    return shardproof.run_threads(world, body)


def check(model, loss, units, **way):
    """Every bit of gradients and buffers, and what was said."""
    gradients, buffers, said = plain(model, loss)
    for rank, (own, own_buffers, own_said) in enumerate(sharded(model, loss, units, **way)):
        for name, value in own.items():
            assert torch.equal(value, gradients.get(name, torch.zeros_like(value))), name
        for name, value in own_buffers.items():
            assert torch.equal(value, buffers[rank][name]), name
        assert own_said == said[rank]


class Block(nn.Module):
    """A linear layer, and what a test does with it."""

    def __init__(self, run, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.run = run

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


class Chain(nn.Module):
    def __init__(self, run, *blocks):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)
        self.run = run

    def forward(self, *args):
        return self.run(self, *args)


def chain(run, each, count=3):
    torch.manual_seed(0)
    return Chain(run, *[Block(each) for _ in range(count)])


def square(model, x):
    return model(x).square().mean()


class Closed:
    """Of a kind that nobody looks into."""

    def __init__(self):
        self.found = []
