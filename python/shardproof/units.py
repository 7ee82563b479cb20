"""Which modules are units, and what runs around their forward."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Callable, Iterable, Optional, Sequence, Union

import torch
from torch import nn
from torch.utils import _pytree

from . import _C


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


def map_tensors(value: Any, visit: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor replaced by ``visit(tensor)``.

    Looks into tuples, named tuples, lists, dicts, dataclasses, and types that are registered with torch.utils._pytree.
    """
    if isinstance(value, torch.Tensor):
        return visit(value)
    kind = type(value)
    if kind is tuple:
        return tuple([map_tensors(item, visit) for item in value])
    if kind is list:
        return [map_tensors(item, visit) for item in value]
    if kind is dict:
        return {key: map_tensors(item, visit) for key, item in value.items()}
    if value is None or kind in (int, float, bool, str):
        return value
    if kind in _pytree.SUPPORTED_NODES:
        leaves, spec = _pytree.tree_flatten(value)
        return _pytree.tree_unflatten([map_tensors(leaf, visit) for leaf in leaves], spec)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[map_tensors(item, visit) for item in value])
    if isinstance(value, collections.abc.MutableMapping):
        result = value.copy() if hasattr(value, "copy") else kind(value)
        for key in list(value):
            result[key] = map_tensors(value[key], visit)
        return result
    if dataclasses.is_dataclass(value):
        changes = {
            field.name: map_tensors(getattr(value, field.name), visit) for field in dataclasses.fields(value) if field.init
        }
        return dataclasses.replace(value, **changes)
    return value


def tensors_of(value: Any) -> "list[torch.Tensor]":
    """The tensors of a structure, in the order of `map_tensors`."""
    found: "list[torch.Tensor]" = []

    def keep(tensor):
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def with_tensors(value: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The same structure with these tensors, in the order of `map_tensors`."""
    following = iter(tensors)
    return map_tensors(value, lambda _: next(following))


class UnitHooks:
    """Enters and leaves a unit around the forward of a module, until `remove`."""

    def __init__(self, mirror: _C.Mirror, module: nn.Module, name: str):
        self.call = _C.UnitCall(mirror, module)
        self.name = name
        self.entered: "list[list]" = []
        self.handles = [
            module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.leave, with_kwargs=True),
        ]
        self.module = module
        if self.call.recomputes:
            self.plain_forward = module.forward
            module.forward = self.forward_without_graph

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.call is not None and "forward" in self.module.__dict__ and hasattr(self, "plain_forward"):
            restore_forward(self.module, self.plain_forward)

    def enter(self, module, args, kwargs):
        call = self.call
        call.before()
        watched: list = []

        def watch(tensor):
            result = call.input(tensor)
            if result is not tensor and result.requires_grad:
                watched.append((tensor, tensor._version))
            return result

        args = map_tensors(args, watch)
        if kwargs:
            kwargs = map_tensors(kwargs, watch)
        self.entered.append(watched)
        return args, kwargs

    def leave(self, module, args, kwargs, result):
        for tensor, version in self.entered.pop():
            if tensor._version != version:
                raise _C.Error(
                    f"[unit] '{self.name}' changed an input in place. Its caller would go on with a tensor whose "
                    "gradient leaves out what the unit did. Pass a copy (x.clone()) to the unit, or take inplace=True "
                    "out of its first operation"
                )
        call, found = self.call, False

        def watch(tensor):
            nonlocal found
            found = True
            return call.output(tensor)

        result = map_tensors(result, watch)
        if not found and torch.is_grad_enabled():
            raise _C.Error(
                f"[unit] '{self.name}' returned a {type(result).__name__}, in which no tensor was found, so its "
                "backward could not be followed. Return tensors, or tuples, lists, dicts or dataclasses of tensors, "
                "or register the type with torch.utils._pytree"
            )
        call.after()
        return result

    def forward_without_graph(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        first: list = []
        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

        def body(tensors):
            current_args, current_kwargs = with_tensors((args, kwargs), tensors)
            with _autocast(autocast):
                result = self.plain_forward(*current_args, **current_kwargs)
            if not body.ran:
                first.append(result)
            body.ran = True
            return tensors_of(result)

        body.ran = False
        outputs = self.call.run_without_graph(body, tensors_of((args, kwargs)))
        return with_tensors(first.pop(), outputs)


class _autocast:
    """The autocast of a forward, for the time that it is computed again."""

    def __init__(self, states):
        self.contexts = [torch.autocast(kind, dtype=dtype, enabled=True) for kind, enabled, dtype in states if enabled]

    def __enter__(self):
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error):
        for context in reversed(self.contexts):
            context.__exit__(*error)


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
