"""Which modules are units, and what runs around their forward."""

from __future__ import annotations

import collections
import dataclasses
import operator
from typing import Any, Callable, Iterable, Optional, Sequence, Union

import torch
from torch import nn
from torch.utils import _pytree

from . import _C
from .recompute import Again
from .torch_private import beneath_transforms, outside_transforms, uncompiled


@dataclasses.dataclass(frozen=True)
class Precision:
    """Which dtype each kind of value has. What is None follows from the others.

    Attributes
    ----------
    main : torch.dtype, optional
        Of the parameters that the optimizer updates, and of its state. As the module's parameters by default.
    compute : torch.dtype, optional
        Of parameters while their unit runs, and of floating inputs of the unit.
    gradient : torch.dtype, optional
        In which gradients are added over microbatches. ``main`` by default.
    reduce : torch.dtype, optional
        Of gradients on their way between ranks. ``gradient`` by default.
    output : torch.dtype, optional
        Of the unit's floating outputs.
    cast_inputs : bool
        Whether floating inputs of a unit are cast to ``compute``.
    float32_sums : bool
        Send ``reduce``, add in float32, and round once.
    """

    main: Optional[torch.dtype] = None
    compute: Optional[torch.dtype] = None
    gradient: Optional[torch.dtype] = None
    reduce: Optional[torch.dtype] = None
    output: Optional[torch.dtype] = None
    cast_inputs: bool = True
    float32_sums: bool = False


@dataclasses.dataclass(frozen=True)
class Unit:
    """Units with options of their own.

    Attributes
    ----------
    modules : type, str, torch.nn.Module, sequence of torch.nn.Module, or callable
        What is a unit, as an element of ``units`` of `fully_shard`.
    reshard_after_forward : bool or int, optional
        As in `fully_shard`, for these units.
    precision : Precision, optional
        As in `fully_shard`, for these units.
    recompute : bool
        Compute activations again in the backward instead of keeping them.
    offload_activations : bool
        Keep activations in the host's memory between forward and backward.
    strategy : str, optional
        As in `fully_shard`, for these units.
    mesh : str, optional
        The same ranks under other axes, which the units' strategy then means, e.g. "dp_replicate=2,dp_shard=2" where all
        others have "dp_shard=4".
    gradient_divide : float, optional
        As in `fully_shard`, for these units.
    """

    modules: Any
    reshard_after_forward: Union[bool, int, None] = None
    precision: Optional[Precision] = None
    recompute: bool = False
    offload_activations: bool = False
    strategy: Optional[str] = None
    mesh: Optional[str] = None
    gradient_divide: Optional[float] = None


Selector = Union[type, str, nn.Module, Sequence[nn.Module], Callable[[str, nn.Module], bool], Unit]


def as_list(selectors: Any) -> list:
    """Selectors as a list, where one may stand for itself."""
    if selectors is None:
        return []
    if isinstance(selectors, (type, str, nn.Module, Unit)) or callable(selectors):
        return [selectors]
    return list(selectors)


def chosen(selector: Selector, named: "list[tuple[str, nn.Module]]") -> "list[list[nn.Module]]":
    """The units that a selector chooses among the modules: of each its modules."""
    if isinstance(selector, nn.Module):
        return [[selector]]
    if isinstance(selector, type):
        return [[module] for name, module in named if isinstance(module, selector)]
    if isinstance(selector, str):
        return [[module] for name, module in named if _C.name_matches(selector, name)]
    if callable(selector):
        return [[module] for name, module in named if selector(name, module)]
    return [list(selector)]


def describe(selector: Selector) -> str:
    """A selector as messages show it."""
    return selector.__name__ if isinstance(selector, type) else repr(selector)


def modules_of(option: str, selectors: Iterable[Selector], root: nn.Module) -> "list[nn.Module]":
    """The modules below the root that the selectors of an option choose; each selector must choose one."""
    named = [(name, module) for name, module in root.named_modules() if name]
    found: "dict[int, nn.Module]" = {}
    for selector in selectors:
        groups = chosen(selector, named)
        if not groups:
            kind = type(root).__name__
            raise _C.Error(f"[fully_shard] {option}: {describe(selector)} fits no module of the {kind}. {_have(named)}")
        found.update((id(module), module) for group in groups for module in group)
    return list(found.values())


def _have(named: "list[tuple[str, nn.Module]]") -> str:
    return f"It has modules of these types: {', '.join(sorted({type(module).__name__ for _, module in named}))}."


def select_units(
    root: nn.Module, selectors: Iterable[Selector], recompute: Iterable[Selector] = (), away: Iterable[Selector] = ()
) -> "tuple[list[Unit], list[nn.Module]]":
    """One `Unit` for each unit, whose ``modules`` is the list of its modules, and the modules that `recompute` chooses besides.

    `away` chooses units whose activations are kept in the host's memory.
    """
    named = [(name, module) for name, module in root.named_modules() if name]
    units: "list[Unit]" = []
    taken: set = set()
    for selector in selectors:
        options = selector if isinstance(selector, Unit) else Unit(selector)
        groups = chosen(options.modules, named)
        if not groups:
            raise _C.Error(
                f"[fully_shard] units: {describe(options.modules)} fits no module of the {type(root).__name__}. "
                f"{_have(named)} An element of units is a class, a pattern of names such "
                "as 'blocks.*', a module, a list of modules that make up one unit, or a function of name and module"
            )
        explicit = isinstance(options.modules, (nn.Module, list, tuple))
        for group in groups:
            if not explicit and id(group[0]) in taken:
                continue
            taken.update(id(module) for module in group)
            units.append(dataclasses.replace(options, modules=group))
    units, inner = _marked(units, "recompute", modules_of("recompute", recompute, root))
    units, others = _marked(units, "offload_activations", modules_of("offload_activations", away, root))
    if others:
        names = ", ".join(f"'{name}'" for name, module in named if any(module is other for other in others))
        raise _C.Error(f"[fully_shard] offload_activations: {names} are no units. Only units can be; add them to units")
    return units, inner


def _marked(units: "list[Unit]", option: str, modules: "list[nn.Module]") -> "tuple[list[Unit], list[nn.Module]]":
    """The units, with the option where the modules are theirs, and the other modules."""
    marks = {id(module) for module in modules}
    marked = [
        dataclasses.replace(unit, **{option: True}) if any(id(module) in marks for module in unit.modules) else unit
        for unit in units
    ]
    of_units = {id(module) for unit in units for module in unit.modules}
    return marked, [module for module in modules if id(module) not in of_units]


def map_tensors(value: Any, visit: Callable[[torch.Tensor], torch.Tensor], rebuilt: Optional[Callable] = None) -> Any:
    """The same structure with every tensor replaced by ``visit(tensor)``. What has no other tensors then is the very object.

    Looks into tuples, named tuples, lists, dicts, dataclasses, and types that are registered with torch.utils._pytree. Calls
    ``rebuilt(before, after)`` for each that it had to make anew.
    """
    if isinstance(value, torch.Tensor):
        return visit(value)
    kind = type(value)
    if value is None or kind in (int, float, bool, str):
        return value
    make: Callable = kind
    if kind in (tuple, list):
        parts = value
    elif kind in _pytree.SUPPORTED_NODES and kind is not dict:
        parts, spec = _pytree.tree_flatten(value)
        make = lambda items: _pytree.tree_unflatten(items, spec)  # noqa: E731
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts, make = value, kind._make
    elif isinstance(value, collections.abc.MutableMapping):
        keys = list(value)
        parts = [value[key] for key in keys]
        make = lambda items: _with_items(value, keys, items)  # noqa: E731
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        parts = [getattr(value, name) for name in names]
        make = lambda items: dataclasses.replace(value, **dict(zip(names, items)))  # noqa: E731
    else:
        return value
    items = [map_tensors(part, visit, rebuilt) for part in parts]
    if all(map(operator.is_, items, parts)):
        return value
    result = make(items)
    if rebuilt:
        rebuilt(value, result)
    return result


def _with_items(value: Any, keys: list, items: list) -> Any:
    result = value.copy() if hasattr(value, "copy") else type(value)(value)
    for key, item in zip(keys, items):
        result[key] = item
    return result


class _Casts:
    """What a unit gets in the place of its caller's tensors and containers. What it writes into these goes to the caller's."""

    def __init__(self, call: _C.UnitCall):
        self.call = call
        self.given: "dict[int, tuple]" = {}  # by what the unit gets: that, what the caller has, and what was in it

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.call.input(tensor)
        if result is not tensor:
            self.given[id(result)] = (result, tensor, None if result.is_inference() else result._version)
        return result

    def rebuilt(self, before: Any, after: Any) -> None:
        self.given[id(after)] = (after, before, _content(after))

    def of_caller(self, value: Any) -> Any:
        return self.given.get(id(value), (None, value))[1]

    def give_back(self) -> None:
        for after, before, content in self.given.values():
            if isinstance(after, torch.Tensor):
                if after.is_inference() or after._version != content:
                    if not after.requires_grad:  # what was not written keeps its digits
                        after = torch.where(after == before.to(after.dtype), before, after.to(before.dtype))
                    before.copy_(after)
                continue
            now = _content(after)
            if now is None or (now.keys() == content.keys() and all(now[key] is content[key] for key in now)):
                continue
            items = {key: map_tensors(self.of_caller(item), self.of_caller) for key, item in now.items()}
            if isinstance(before, list):
                before[:] = items.values()
            elif isinstance(before, collections.abc.MutableMapping):
                for key in content.keys() - items.keys():
                    del before[key]
                for key, item in items.items():
                    before[key] = item
            else:
                vars(before).update(items)


def _content(value: Any) -> "Optional[dict]":
    """What a container has that can change, by index, key or name."""
    if isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, collections.abc.MutableMapping):
        return dict(value)
    return dict(vars(value)) if dataclasses.is_dataclass(value) and hasattr(value, "__dict__") else None


def tensors_of(value: Any) -> "list[torch.Tensor]":
    """The tensors of a structure, in the order of `map_tensors`."""
    found: "list[torch.Tensor]" = []

    def keep(tensor):
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


class UnitHooks:
    """Enters and leaves a unit around the forward of a module, until `remove`."""

    def __init__(self, mirror: _C.Mirror, module: nn.Module, name: str):
        self.call = _C.UnitCall(mirror, module)
        self.name = name
        self.entered: "list[_Casts]" = []
        self.handles = [
            module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.leave, with_kwargs=True),
        ]
        self.module = module
        self.freed = [parameter for parameter in module.parameters() if _has_no_data(parameter)]
        self.places: Any = None  # Places, where parameters are DTensors between uses
        self.publish: Optional[Callable] = None  # of units within the root, there: what brings parameters up to date
        if self.call.recomputes:
            self.plain_forward = module.forward
            module.forward = self.forward_recomputed

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        if "forward" in self.module.__dict__ and hasattr(self, "plain_forward"):
            restore_forward(self.module, self.plain_forward)

    def put_shards_back(self, places: Any, publish: Optional[Callable]) -> None:
        """Around forwards, also those that fail: whole parameters are in their places within, and shards outside."""
        self.places, self.publish = places, publish
        self.handles.append(self.module.register_forward_hook(uncompiled(lambda *_: places.leave()), always_call=True))

    @uncompiled
    def enter(self, module, args, kwargs):
        with outside_transforms():
            if self.publish is not None:
                self.publish()
            self.call.before()
        if self.places is not None:
            self.places.enter()
        casts = _Casts(self.call)
        self.entered.append(casts)
        return map_tensors((args, kwargs), casts, casts.rebuilt)

    @uncompiled
    def leave(self, module, args, kwargs, result):
        call, found = self.call, False
        freed = {parameter.untyped_storage()._cdata for parameter in self.freed}

        def watch(tensor):
            nonlocal found
            found = True
            if freed and torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata in freed:
                tensor = tensor.clone()  # a view of a parameter
            for each in beneath_transforms(tensor):
                call.output(each)
            return call.output(tensor)

        given, result = result, map_tensors(result, watch)
        if not found:  # it may have written to an argument
            map_tensors((args, kwargs), call.output)
        if not found and not call.is_seen:
            raise _C.Error(
                f"[unit] '{self.name}' returned a {type(result).__name__}, in which no tensor was found, so its "
                "backward could not be followed to gather its parameters. Return tensors, or tuples, lists, dicts or "
                "dataclasses of tensors, register the type with torch.utils._pytree, or pass reshard_after_forward=False"
            )
        self.entered.pop().give_back()
        call.after()
        return None if result is given else result

    def forward_recomputed(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        again = Again(self.module, self.plain_forward, args, kwargs)
        inputs, again.inputs = again.inputs, []
        self.call.forget_saved(again, inputs, list(self.module.buffers()))
        try:
            return self.plain_forward(*args, **kwargs)
        finally:
            self.call.keep_saved()


def _has_no_data(parameter: nn.Parameter) -> bool:
    try:
        return parameter.data_ptr() == 0
    except RuntimeError:  # which says why
        return True


def restore_forward(module: nn.Module, plain: Callable) -> None:
    """Gives the module the forward that it had, its class's where it had none of its own."""
    del module.__dict__["forward"]
    if module.forward != plain:
        module.forward = plain


class Dropout(nn.Module):
    """Dropout whose masks do not depend on the ranks: they are a function of `random_stream`.

    ``torch.nn.Dropout`` draws from a generator that all rank-threads share, and cannot be recomputed in a unit. This one can.
    Where tensor parallelism cuts its input, it needs a style: SequenceParallel, or CutDropout.

    Parameters
    ----------
    p : float
        The probability of zero.
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = p

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        placed = self.__dict__.get("placed")  # parallelize sets it
        return placed.run(input, self.p, self.training) if placed else _C.dropout(input, self.p, self.training)


def random_stream(seed: int, first_sample: int = 0) -> None:
    """Set what `Dropout` draws from, on the calling rank: call it at the start of a microbatch.

    Parameters
    ----------
    seed : int
        The same on every rank, from the step and the microbatch.
    first_sample : int
        The position of this rank's first sample in the whole batch.
    """
    _C.set_random_stream(seed, 0, first_sample)
