"""What a model does besides training: its results, its arguments, and all that a forward leaves behind in it.

The same code looks at the plain model and at the sharded one, so what differs is what sharding did.
"""

from __future__ import annotations

import collections.abc
import copy
import itertools
from typing import Any, Iterator

import torch
from torch import nn

_OWN = set(vars(nn.Module())) - {"training"} | {"forward"}  # recomputation replaces a unit's forward


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that is sparse or nested, as a tensor that is neither."""
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def leaves(name: str, value: Any, objects: bool = True, around: tuple = ()) -> "Iterator[tuple[str, Any]]":
    """The tensors and plain values of any structure, each with its way there, and the types of what holds them.

    With `objects`, it looks into objects of unknown types as well.
    """
    if isinstance(value, nn.Parameter) and not objects:  # one that an attribute holds besides: it is in shards now
        return
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        kept = value.detach()
        yield f"kind of {name}", f"{type(value).__name__} {value.dtype} {tuple(value.shape)} grad={value.requires_grad}"
        if kept.untyped_storage().nbytes() or not kept.numel():
            yield name, dense(kept).clone()
        return
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        yield name, value
        return
    if isinstance(value, collections.abc.Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):
        parts = [(f"{name}[{key!r}]", value[key]) for key in value.keys()]
    elif isinstance(value, (list, tuple, collections.abc.ValuesView)):
        parts = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    elif objects and hasattr(value, "__dict__") and not isinstance(value, nn.Module) and not callable(value):
        parts = [(f"{name}.{key}", item) for key, item in vars(value).items()]
    else:
        return
    if any(value is outer for outer in around):
        return
    yield f"kind of {name}", f"{type(value).__name__} of {len(parts)}"
    for part, item in parts:
        yield from leaves(part, item, objects, (*around, value))


def _objects(model: nn.Module) -> "dict[str, Any]":
    """The parameters, buffers and modules of a model, which plain PyTorch leaves in their places."""
    found: "dict[str, Any]" = {}
    for kind in ("parameter", "buffer", "module"):
        found.update((f"{kind} {name}", each) for name, each in getattr(model, f"named_{kind}s")(remove_duplicate=False))
    return found


class Witness:
    """Looks at one rank's model. Make it with the plain model, and call `watch` when its other hooks are there.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    subject
        What is checked: its loss, and how it finds tensors in a batch.
    dtype
        That of the parameters, in which the loss is computed.
    differentiates : bool
        Whether floating tensors of a batch want gradients as well.
    """

    def __init__(self, model: nn.Module, subject: Any, dtype: torch.dtype, differentiates: bool = False):
        self.model, self.subject, self.dtype, self.differentiates = model, subject, dtype, differentiates
        self.made = _objects(model)
        self.results: list = []
        self.batch: Any = None

    def watch(self) -> None:
        self.model.register_forward_hook(lambda module, args, result: self.results.append(result))

    def forward(self, what: str, batch: Any) -> "tuple[torch.Tensor, dict[str, Any]]":
        """The loss of a copy of a batch, and the results of the model on the way to it."""
        self.results.clear()
        self.batch = copy.deepcopy(batch)
        if self.differentiates:
            for tensor in self.tensors():
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        value = self.subject.loss_of(self.model, self.batch, self.dtype)
        return value, {f"loss of {what}": value.detach().clone(), **dict(leaves(f"result of {what}", list(self.results)))}

    def arguments(self, what: str) -> "dict[str, Any]":
        """What has become of the batch, with gradients of its tensors."""
        grads = {f"the gradient of argument {i} of {what}": t.grad for i, t in enumerate(self.tensors()) if t.is_leaf}
        return {**dict(leaves(f"argument of {what}", self.batch)), **{n: g for n, g in grads.items() if g is not None}}

    def buffers(self) -> dict[str, Any]:
        """Tensors that the model holds besides parameters."""
        named = self.model.named_buffers(remove_duplicate=False)
        return dict(itertools.chain(*[leaves(f"buffer {name}", each) for name, each in named]))

    def tensors(self) -> list[torch.Tensor]:
        """Those of the batch themselves, where `leaves` gives copies."""
        found: list[torch.Tensor] = []
        self.subject.map_tensors(self.batch, lambda tensor: found.append(tensor) or tensor)
        return found

    def state(self) -> "dict[str, Any]":
        """What the model holds besides parameters: buffers, attributes, and which of its objects are others than at first."""
        seen: "dict[str, Any]" = {}
        now = _objects(self.model)
        seen["names of its parts"] = list(now)
        seen["parts that are other objects now"] = [name for name in now if now[name] is not self.made.get(name)]
        seen.update(self.buffers())
        for name, module in self.model.named_modules(remove_duplicate=False):
            for key in sorted(key for key in vars(module) if key not in _OWN and not key.startswith("_shardproof")):
                seen.update(leaves(f"attribute {name}.{key}".replace(" .", " "), vars(module)[key], objects=False))
        return seen

def in_state_dict(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict's names, and what it has besides parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    others = [leaves(f"state dict {name}", value) for name, value in state.items() if name not in parameters]
    return {"names of the state dict": list(state), **dict(itertools.chain(*others))}
