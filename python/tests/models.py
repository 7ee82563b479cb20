"""Small models of plain PyTorch, and how plain PyTorch trains them: what the sharded runs have to equal bit for bit."""

import copy
import math

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=12, blocks=3):
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def batch(index):
    """Of a microbatch: a function of its number alone."""
    generator = torch.Generator().manual_seed(1000 + index)
    x = torch.randn(6, 5, generator=generator)
    return x, x.sum(1, keepdim=True)


def loss_of(model, given):
    x, y = given
    return (model(x) - y).square().mean()


def exact_norm(gradients):
    """The norm of float32 values, their squares added without rounding."""
    squares = [value * value for gradient in gradients for value in gradient.double().flatten().tolist()]
    return math.sqrt(math.fsum(squares))


def clip(parameters, norm_max):
    norm = exact_norm([p.grad for p in parameters])
    factor = norm_max / (norm + 1e-6)
    if factor < 1:
        for p in parameters:
            p.grad.mul_(torch.tensor(factor, dtype=torch.float64).to(p.grad.dtype))
    return norm


def train_plain(
    model, make_optimizer, *, steps, world, rounds=1, ranks_first=True, norm_max=None, loss=loss_of, make_batch=batch
):
    """Plain PyTorch on the same microbatches: gradients are added in the order of the ranks, then divided by their number.

    ranks_first: of each microbatch over the ranks, then over the microbatches; otherwise the other way round.
    """
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = make_optimizer(parameters), []
    for step in range(steps):
        losses.append([])
        gradients = {}  # of [round][rank]
        for k in range(rounds):
            for rank in range(world):
                for p in parameters:
                    p.grad = None
                value = loss(model, make_batch((step * rounds + k) * world + rank))
                (value / rounds).backward()
                losses[-1].append(value.item())
                gradients[k, rank] = [p.grad for p in parameters]
        for i, p in enumerate(parameters):
            outer, inner = (range(rounds), range(world)) if ranks_first else (range(world), range(rounds))
            total = None
            for a in outer:
                part = None
                for b in inner:
                    term = gradients[(a, b) if ranks_first else (b, a)][i]
                    if term is not None:
                        part = term.clone() if part is None else part + term
                if part is not None:
                    total = part if total is None else total + part
            p.grad = None if total is None else total / world
        if norm_max is not None:
            clip([p for p in parameters if p.grad is not None], norm_max)
        optimizer.step()
    return losses, model


def assert_same_bits(got, expected, what=""):
    assert set(got) == set(expected), (what, set(got) ^ set(expected))
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, (what, name)
        assert torch.equal(got[name], value.detach()), f"{what}: {name} differs by {(got[name] - value).abs().max():.3g}"
