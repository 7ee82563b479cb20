"""Random models for checking engines: an MLP with residual blocks, one with an embedding and a tied head, a small conv net."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from .draw import Draw


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mlp(nn.Module):
    def __init__(self, features: int, width: int, hidden: int, classes: int, layers: int, bias: bool, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(features, width, bias=bias)
        self.blocks = nn.ModuleList(Block(width, hidden, bias, norm) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(nn.Module):
    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int, bias: bool, norm: bool, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, bias, norm) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Conv(nn.Module):
    def __init__(self, features: int, width: int, classes: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 3, padding=1, bias=bias)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1, bias=bias) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.unsqueeze(1))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x.mean(2))


def routed(plain, parameters, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For each row of x the sum of what its experts give, times their weights. `plain(rows, *own)` is one expert with its parts
    of the parameters, in which experts lie along the first dim."""
    held = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=len(held[0])).tolist()
    parts = x.index_select(0, order // experts.shape[1]).split(counts)
    given = torch.cat([plain(part, *own) for part, *own in zip(parts, *(p.unbind() for p in held))])
    return (given[order.argsort()].view(*experts.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(1)


class Experts(nn.Module):
    """Two matrices for each expert, one expert behind the other along the first dim."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        plain = lambda rows, up, down: torch.tanh(rows @ up.T) @ down.T
        return routed(plain, (self.up, self.down), x, experts, weights)


class Mixture(nn.Module):
    """A block of experts, of which each token gets some."""

    def __init__(self, width: int, hidden: int, count: int, each: int) -> None:
        super().__init__()
        self.each = each
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Experts(count, width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        weights, experts = self.router(rows).softmax(-1).topk(self.each)
        return x + self.experts(rows, experts, weights).view_as(x)


class Mixtures(nn.Module):
    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int, each: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Mixture(width, hidden, EXPERTS, each) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


EXPERTS = 12  # which 1 to 4 ranks have in equal parts
KINDS = ("mlp", "tied", "conv")


def make_even_model(draw: Draw) -> nn.Module:
    """A model whose hidden widths can be cut in 2 and in 3 equal parts."""
    return make_model(draw, even=True)


def make_model(draw: Draw, even: bool = False) -> nn.Module:
    kind = draw.choice("model", KINDS)
    layers = draw.integer("layers", 0, 2)
    width = draw.integer("width", 1, 9)
    bias = draw.flag("bias")
    if kind == "conv":
        return Conv(draw.integer("features", 1, 6), width, draw.integer("classes", 1, 5), layers, bias)
    hidden = draw.integer("hidden", 1, 9) * (6 if even else 1)
    norm = draw.flag("norm") and width >= 5
    if kind == "tied":
        return Tied(draw.integer("vocabulary", 2, 9), width, hidden, layers, bias, norm, draw.flag("ties"))
    return Mlp(draw.integer("features", 1, 6), width, hidden, draw.integer("classes", 1, 5), layers, bias, norm)


def make_expert_model(draw: Draw) -> nn.Module:
    """Layers of experts between an embedding and a head."""
    layers, width, hidden = draw.integer("layers", 1, 2), draw.integer("width", 1, 9), draw.integer("hidden", 1, 9)
    return Mixtures(draw.integer("vocabulary", 2, 9), width, hidden, layers, draw.integer("each", 1, 3))


def make_expert_batch(draw: Draw, generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and those that follow them."""
    tokens = torch.randint(0, draw.integer("vocabulary", 2, 9), (count, 4), generator=generator)
    return tokens[:, :3], tokens[:, 1:]


def make_batch(draw: Draw, generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    if draw.choice("model", KINDS) == "tied":
        return make_expert_batch(draw, generator, count)
    features, classes = draw.integer("features", 1, 6), draw.integer("classes", 1, 5)
    inputs = torch.randn(count, features, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(count, classes, generator=generator, dtype=torch.float64)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
