"""A model of a zoo: how it is made, what it is fed, and what of it is compared."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch
from torch import nn
from torch.utils import _pytree


class NotBuildable(Exception):
    """The plain model cannot be made, run or trained here."""


@dataclasses.dataclass
class Model:
    """What all ranks and the plain run make alike."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]  # number n
    loss: Callable[[nn.Module, Any], torch.Tensor]
    outputs: Callable[[nn.Module, Any], Any]  # in eval, without a graph
    generate: "Callable[[nn.Module, Any], torch.Tensor] | None" = None
    label: str = ""
    about: dict = dataclasses.field(default_factory=dict)


def said(error: BaseException, length: int = 300) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:length]


def plain_containers(value: Any) -> Any:
    """Objects that hold tensors, as dicts and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_containers(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "items"):
        return {str(key): plain_containers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_containers(each) for each in value]
    return value


def tensors_in(value: Any) -> "list[torch.Tensor]":
    return [leaf for leaf in _pytree.tree_leaves(plain_containers(value)) if isinstance(leaf, torch.Tensor)]


def loss_of_outputs(outputs: "list[torch.Tensor]") -> torch.Tensor:
    """A number that depends on every element of the outputs, each with another weight."""
    total = None
    for each in outputs:
        if each.is_floating_point() and each.numel() and (each.requires_grad or not torch.is_grad_enabled()):
            weights = torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype).view(each.shape)
            term = (each * weights).mean() + 0.1 * each.square().mean()
            total = term if total is None else total + term
    if total is None:
        raise NotBuildable("no output has a gradient")
    return total


def without_randomness(model: nn.Module) -> nn.Module:
    """With all its probabilities of dropping at 0."""
    names = ("p", "drop_prob", "drop_path", "drop_rate", "dropout", "dropout_rate", "layerdrop")
    names += ("attention_dropout", "attn_dropout")
    for module in model.modules():
        for name in names:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model


def require_trains(model: Model) -> nn.Module:
    """One plain step; throws NotBuildable where that is no basis of a comparison. Returns the model."""
    torch.manual_seed(5)
    module = model.make()
    loss = model.loss(module, model.batch(0))
    if not bool(torch.isfinite(loss)):
        raise NotBuildable(f"the plain loss is {loss.item()}")
    loss.backward()
    for name, parameter in module.named_parameters():
        gradient = parameter.grad.to_dense() if parameter.grad is not None and parameter.grad.is_sparse else parameter.grad
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            raise NotBuildable(f"the plain gradient of {name} is not finite")
    module.zero_grad()
    return module
