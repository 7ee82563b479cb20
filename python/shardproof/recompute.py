"""What a forward needs that runs a second time in the backward, to do what it did the first time."""

from __future__ import annotations

import collections
import copyreg
import random
import sys
import types
from typing import Any

import torch
from torch import nn

from . import _C

_PARTS = nn.Module().__dict__.keys() - {"_buffers"}  # of a module, whose content a forward leaves as it is
_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, nn.Parameter)
_ONCE = (types.GeneratorType, map, zip, filter)


class State:
    """What Python may change in a forward: modules, generators of random numbers, and all that attributes and arguments hold.

    Their values are those of the time when it was made, `while` it is entered. Those of buffers are the library's to keep.
    """

    def __init__(self, module: nn.Module, arguments: list):
        self._kept: "dict[int, tuple]" = {}
        self._tensors: "dict[int, tuple]" = {id(buffer): () for buffer in module.buffers()}
        for value in arguments:
            self._look_into(value, 8, False)
        of_arguments = len(self._kept)
        for each in module.modules():
            self._look_into_module(each, 4)
        self._keep(random._inst)  # type: ignore[attr-defined]
        if "numpy" in sys.modules:
            self._keep(sys.modules["numpy"].random.mtrand._rand)
        plain: dict = {}
        for key, (value, content) in list(self._kept.items())[of_arguments:]:
            self._kept[key] = (value, _without_graphs(content, plain))

    def _keep(self, value: Any) -> bool:
        return id(value) not in self._kept and bool(self._kept.setdefault(id(value), (value, _content(value))))

    def _look_into_module(self, module: nn.Module, depth: int) -> None:
        if self._keep(module.__dict__):
            for name, value in module.__dict__.items():
                if name not in _PARTS:
                    self._look_into(value, depth - 1)

    def _look_into(self, value: Any, depth: int, is_held: bool = True) -> None:
        if isinstance(value, _PLAIN) or depth == 0:
            return
        if isinstance(value, torch.Tensor):
            if is_held and type(value) is torch.Tensor and not (value.requires_grad or value.is_inference()):
                if id(value) not in self._tensors:
                    self._tensors[id(value)] = (value, value._version, value.clone())
        elif isinstance(value, nn.Module):
            self._look_into_module(value, depth)
        elif isinstance(value, tuple):
            for item in value:
                self._look_into(item, depth - 1, is_held)
        elif type(value) in _CONTAINERS:
            if self._keep(value):
                for item in list(value.values() if isinstance(value, dict) else value):
                    self._look_into(item, depth - 1)
        elif type(value) is random.Random:
            self._keep(value)
        elif not callable(value):
            self._look_into(getattr(value, "__dict__", None), depth)
            if copyreg._slotnames(type(value)) and self._keep(value):  # type: ignore[attr-defined]
                for item in _content(value).values():
                    self._look_into(item, depth - 1)

    def __enter__(self) -> None:
        self._now = [(value, _content(value)) for value, _ in self._kept.values()]
        for value, before in self._kept.values():
            _fill(value, before)
        # What nobody has written to stays: ranks that are threads may share it.
        changed = [each for each in self._tensors.values() if each and each[0]._version != each[1]]
        self._written = [(tensor, tensor.data) for tensor, _, _ in changed]
        for tensor, _, before in changed:
            tensor.data = before.clone()

    def __exit__(self, *error: Any) -> None:
        for value, now in self._now:
            _fill(value, now)
        for tensor, now in self._written:
            tensor.data = now
        del self._now, self._written


def _content(value: Any) -> Any:
    """A copy of what may change of it."""
    if type(value) in _CONTAINERS:
        return value.copy()
    if names := copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return value.getstate() if isinstance(value, random.Random) else value.get_state()


def _fill(value: Any, content: Any) -> None:
    if type(value) in _CONTAINERS:
        if _identities(value) != _identities(content):
            value.clear()
            (value.extend if hasattr(value, "extend") else value.update)(content)
    elif isinstance(content, dict):
        for name, item in content.items():
            object.__setattr__(value, name, item)
    else:
        (value.setstate if isinstance(value, random.Random) else value.set_state)(content)


def _identities(values: Any) -> list:
    return [*map(id, values), *map(id, values.values() if isinstance(values, dict) else ())]


def _without_graphs(content: Any, plain: dict) -> Any:
    """The same, of which nothing keeps a graph of an earlier step alive. One tensor is replaced by one, and is no leaf."""

    def replaced(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            return value
        return plain.setdefault(id(value), value.detach().requires_grad_().view_as(value))

    if isinstance(content, dict):
        return {key: replaced(value) for key, value in content.items()}
    return [replaced(value) for value in content] if type(content) in _CONTAINERS else content


class Again:
    """A forward that runs again: called with the tensors among its arguments, which are not kept here.

    Attributes
    ----------
    inputs : list of torch.Tensor
        These tensors, until it is called.
    """

    def __init__(self, module: nn.Module, forward: Any, args: tuple, kwargs: dict):
        self.module, self.forward, self.inputs = module, forward, []
        self.state = State(module, [*args, *kwargs.values()])
        self.args = self._slots(args)
        self.kwargs = {name: self._slots(value) for name, value in kwargs.items()}
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

    def _slots(self, value: Any) -> Any:
        if isinstance(value, _ONCE):
            raise _C.Error(
                f"[unit] a {type(self.module).__name__} that is recomputed was given a {type(value).__name__}, which runs only "
                "once. Give it a list"
            )
        if isinstance(value, torch.Tensor):
            self.inputs.append(value)
            return _Slot(len(self.inputs) - 1)
        return tuple([self._slots(item) for item in value]) if type(value) is tuple else value

    def __call__(self, tensors: "list[torch.Tensor]") -> None:
        def filled(value: Any) -> Any:
            if type(value) is _Slot:
                return tensors[value.index]
            return tuple([filled(item) for item in value]) if type(value) is tuple else value

        with self.state, _Autocast(self.autocast):
            self.forward(*filled(self.args), **{name: filled(value) for name, value in self.kwargs.items()})


class _Slot:
    def __init__(self, index: int):
        self.index = index


class _Autocast:
    """The autocast of a forward, for the time that it is computed again."""

    def __init__(self, states: list):
        self.contexts = [torch.autocast(kind, dtype=dtype, enabled=True) for kind, enabled, dtype in states if enabled]

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)
