"""Random models for checking engines: an MLP with residual blocks, one with an embedding and a tied head, a small conv net."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

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


def make_batch(draw: Draw, generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    if draw.choice("model", KINDS) == "tied":
        vocabulary = draw.integer("vocabulary", 2, 9)
        tokens = torch.randint(0, vocabulary, (count, 4), generator=generator)
        return tokens[:, :3], tokens[:, 1:]
    features, classes = draw.integer("features", 1, 6), draw.integer("classes", 1, 5)
    inputs = torch.randn(count, features, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(count, classes, generator=generator, dtype=torch.float64)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
