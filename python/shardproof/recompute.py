"""What a forward needs that runs a second time in the backward, to do what it did the first time."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn

_PARTS = ("_parameters", "_modules")  # of a module, which a forward leaves as they are
_CONTAINERS = (dict, list, collections.OrderedDict, collections.defaultdict, collections.deque)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.Tensor, torch.dtype, torch.device, nn.Module)


class State:
    """What Python may change in a forward: attributes and buffers of modules, and containers and objects among its arguments.

    Their values are those of the time when it was made, `while` it is entered.
    """

    def __init__(self, module: nn.Module, arguments: list):
        self._kept: "dict[int, tuple]" = {}
        for each in module.modules():
            self._keep(each.__dict__, _without_graphs(each.__dict__))
            for name, value in each.__dict__.items():
                if type(value) in (dict, list) and name not in _PARTS:
                    self._keep(value, _without_graphs(value))
        for value in arguments:
            self._look_into(value, 8)

    def _keep(self, container: Any, copy: Any) -> bool:
        return self._kept.setdefault(id(container), (container, copy))[1] is copy

    def _look_into(self, value: Any, depth: int) -> None:
        if depth == 0 or isinstance(value, _PLAIN) or callable(value):
            return
        if type(value) in _CONTAINERS:
            if not self._keep(value, value.copy()):
                return
        elif hasattr(value, "__dict__") and not self._keep(value.__dict__, value.__dict__.copy()):
            return
        for item in _items(value):
            self._look_into(item, depth - 1)

    def __enter__(self) -> None:
        self._now = [(container, container.copy()) for container, _ in self._kept.values()]
        for container, before in self._kept.values():
            _fill(container, before)

    def __exit__(self, *error: Any) -> None:
        for container, now in self._now:
            _fill(container, now)
        del self._now


def _items(value: Any) -> list:
    if isinstance(value, (list, tuple, set, collections.deque)):
        return list(value)
    inside = list(value.values()) if isinstance(value, collections.abc.Mapping) else []
    return inside + list(getattr(value, "__dict__", {}).values())


def _fill(container: Any, values: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(values)


def _without_graphs(values: Any) -> Any:
    """A copy that keeps no graph of an earlier step alive."""

    def plain(value: Any) -> Any:
        has_graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
        return value.detach().requires_grad_() if has_graph else value

    if isinstance(values, list):
        return [plain(value) for value in values]
    return {key: plain(value) for key, value in values.items()}


class Again:
    """A forward that runs again: called with the tensors among its arguments, which are not kept here.

    Attributes
    ----------
    inputs : list of torch.Tensor
        These tensors, until it is called.
    """

    def __init__(self, module: nn.Module, forward: Any, args: tuple, kwargs: dict):
        self.forward, self.inputs = forward, []
        self.state = State(module, [*args, *kwargs.values()])
        self.args = self._slots(args)
        self.kwargs = {name: self._slots(value) for name, value in kwargs.items()}
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

    def _slots(self, value: Any) -> Any:
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
