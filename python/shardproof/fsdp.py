"""The names of FSDP2: ``from shardproof.fsdp import fully_shard`` instead of torch.distributed.fsdp's.

>>> for block in model.blocks:
...     fully_shard(block, mesh=mesh)
>>> fully_shard(model, mesh=mesh)
>>> optimizer = AdamW(model.parameters(), lr=1e-3)

Between uses the model's parameters and their ``.grad`` are DTensors, cut along one dim as FSDP2's (`shards.py`). The engine
around them is made at the first forward, which is collective. docs/howto/move_from_fsdp2.md lists what differs.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Callable, Optional

import torch
import torch.distributed._composable.fsdp
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import Shard

from . import _C
from .shard_norms import clip_grad_norm_
from .sharded import Sharded, sharded_of
from .sharding import as_precision, fully_shard as _fully_shard
from .shard_parameter import comms_of, cut_of
from .shards import Places, Shards, dims_of
from .torch_private import outside_transforms, uncompiled
from .units import Unit
from .updates import SGD, Adam, AdamW  # noqa: F401, which users import from here


class _Request:
    """What `fully_shard` was told about the modules of one unit."""

    def __init__(self, modules: "list[nn.Module]", options: dict):
        self.modules = [weakref.ref(module) for module in modules]
        self.options = options
        self.later: "list[tuple[int, Callable]]" = []  # methods that the user has called, and when
        if isinstance(options["mesh"], str):
            options["mesh"] = comms_of(options["mesh"])
        device = next((p.device.type for module in modules for p in module.parameters() if not p.is_meta), "cpu")
        self.cut, ignored = cut_of(options["mesh"], device, options["dp_mesh_dims"]), options["ignored"] or ()
        options["mesh"] = options["mesh"] if self.cut.within is None else self.cut.mesh
        dim_of = functools.partial(_dim_of, options["shard_placement_fn"])
        self.places = {id(module): Places(module, self.cut, _is_unit, ignored, dim_of) for module in modules}
        self.triggers = [m.register_forward_pre_hook(self.run, prepend=True, with_kwargs=True) for m in modules]

    @uncompiled
    def run(self, module, args, kwargs):
        """Shards the model, and enters its root, whose own hooks come too late for this forward."""
        return shard_now(module).enter_root(args, kwargs)


_calls = itertools.count()
_noted: "weakref.WeakKeyDictionary[nn.Module, _Request]" = weakref.WeakKeyDictionary()
# By each module of a list that makes up one unit: the list's first module, which names the unit.
_first_of: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]" = weakref.WeakKeyDictionary()
# By each module that was noted down: the model that it is a unit of. A unit need not have parameters.
_around: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Sharded]]" = weakref.WeakKeyDictionary()


def _dim_of(shard_placement_fn: "Optional[Callable]", parameter: nn.Parameter) -> int:
    placement = None if shard_placement_fn is None else shard_placement_fn(parameter)
    if placement is None:
        return 0
    if type(placement) is not Shard:
        raise _C.Error(f"[fsdp] shard_placement_fn returned {placement!r}. Let it return None or a Shard")
    return placement.dim + parameter.dim() if placement.dim < 0 else placement.dim


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _not_offered(name: str, way_out: str) -> _C.Error:
    return _C.Error(f"[fsdp] {name} is not offered. {way_out}")


def _once_there(method: Callable) -> Callable:
    """A method on the model's engine, which a call before the first forward waits for."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        request = _noted.get(self)
        if request is None:
            return method(self, *args, **kwargs)
        module = weakref.ref(self)
        request.later.append((next(_calls), lambda: method(module(), *args, **kwargs)))

    return call


class FSDPModule:
    """What a module gains by `fully_shard`: the methods of torch.distributed.fsdp.FSDPModule."""

    def _shardproof_handle(self) -> Sharded:
        found = _sharded_around(self)
        return found if found is not None else shard_now(_root_of(self))

    def _places(self) -> "list[Places]":
        return list(self._shardproof_handle().shards.places_of(self))

    def _units(self, recurse: bool) -> list:
        sharded = self._shardproof_handle()
        names = {id(module): name for name, module in sharded.module.named_modules()}
        own = names[id(_first_of.get(self, lambda: self)())]
        return [
            unit for unit in sharded.units() if unit.name == own or (recurse and (not own or unit.name.startswith(own + ".")))
        ]

    def unshard(self, async_op: bool = False) -> "Optional[UnshardHandle]":
        """Gather this module's own parameters."""
        self._shardproof_handle().shards.publish_outside()
        handle = UnshardHandle(self._units(recurse=False)[0], self._places())
        if not async_op:
            handle.wait()
            return None
        handle.unit.start_unshard()
        return handle

    def reshard(self) -> None:
        """Free this module's own parameters."""
        for places in self._places():
            places.hold(False)
        self._units(recurse=False)[0].reshard()

    def __deepcopy__(self, memo: dict) -> Any:
        way_out = "FSDP2 refuses it, too. Make the model again, shard it, and load this one's state dict"
        raise _not_offered("deepcopy of a sharded model", way_out)

    @_once_there
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """While False, backwards add to gradients on this rank and reduce nothing."""
        for unit in self._units(recurse):
            unit.set_gradient_sync(requires_gradient_sync, False)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing, since each backward ends what it has begun. FSDP2 has the name."""

    @_once_there
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """While False, on a mesh of two dimensions, gradients are summed over shards and wait for the sum over replicas.

        Of the root and all below it, or an error.
        """
        sharded = self._shardproof_handle()
        if sharded.module is not self or not recurse:
            raise _C.Error("[fsdp] set_requires_all_reduce is of the whole model. Call it of the outermost module, and recurse")
        if sharded.shards.every[0].cut.mesh.ndim > 1:
            sharded.set_last_microbatch(requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's own gradients by `factor` instead of the number of ranks. Before the first forward."""
        request = _noted.get(self)
        if request is None:
            raise _C.Error("[fsdp] set_gradient_divide_factor comes before the first forward, which makes the model's engine")
        request.options["gradient_divide"] = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    @_once_there
    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward wait for an event, which was recorded behind the optimizer's step."""
        self._shardproof_handle().shards.event = event

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing, since ranks always add and then divide. FSDP2 has the name."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing, since the library asks for registered memory itself. FSDP2 has the name."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Do nothing, since the library asks for registered memory itself. FSDP2 has the name since torch 2.15."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Do nothing: which communicator sums take changes no value. FSDP2 has the name since torch 2.15."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Do nothing: ``bytes_in_flight_max`` of `fully_shard` bounds sums under way. FSDP2 has the name since torch 2.15."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Do nothing, since each rank may use parameters that others do not. FSDP2 has the name since torch 2.15.

        What no rank's backward has reached has no gradient, where FSDP2 then has zeros.
        """

    def reset_iter_state(self) -> None:
        """Go on after an exception in a forward or backward, on every rank, without gradients that are not in ``.grad`` yet."""
        sharded = self._shardproof_handle()
        sharded.shards.reset()
        sharded.zero_gradients()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        way_out = (
            "Call set_requires_gradient_sync(False) before each backward but the last one. Where a PipelineStage has called "
            "it, import torch.distributed.pipelining before patch_torch()"
        )
        raise _not_offered("set_manual_backward_finalization", way_out)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        way_out = "Call set_reshard_after_forward(False) and set_reshard_after_backward(False)"
        raise _not_offered("set_keep_unsharded_storage", way_out)

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        raise _not_offered("set_all_reduce_hook", "Change .grad after the backward, or in a hook of each parameter")

    def set_custom_all_gather(self, comm: Any) -> None:
        raise _not_offered("set_custom_all_gather", "Pass a Comm of your own in a MeshComm as mesh")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        raise _not_offered("set_custom_reduce_scatter", "Pass a Comm of your own in a MeshComm as mesh")

    @_once_there
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed after the forward, from the next one on."""
        for unit in self._units(recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    @_once_there
    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after the backward."""
        for unit in self._units(recurse):
            unit.set_reshard_after_backward(reshard_after_backward)

    @_once_there
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backwards gather this module's own parameters. False is for modules whose backward reads none of them."""
        self._units(recurse=False)[0].set_unshard_in_backward(unshard_in_backward)

    @_once_there
    def set_modules_to_forward_prefetch(self, modules: "list[nn.Module]") -> None:
        """Gather these modules while this one runs."""
        self._units(False)[0].set_forward_prefetch([module._units(False)[0] for module in modules])

    @_once_there
    def set_modules_to_backward_prefetch(self, modules: "list[nn.Module]") -> None:
        """Gather these modules while the backward of this one runs."""
        self._units(False)[0].set_backward_prefetch([module._units(False)[0] for module in modules])


class UnshardHandle:
    """A gather under way."""

    def __init__(self, unit: _C.UnitHandle, places: "list[Places]"):
        self.unit = unit
        self.places = places

    def wait(self) -> None:
        """Return when the parameters are whole."""
        self.unit.unshard()
        for each in self.places:
            each.hold(True)


def fully_shard(
    module: "nn.Module | list[nn.Module]",
    *,
    mesh: Any = None,
    reshard_after_forward: Any = None,
    shard_placement_fn: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: "Optional[set[nn.Parameter]]" = None,
    dp_mesh_dims: Any = None,
    **options: Any,
) -> "nn.Module | list[nn.Module]":
    """Note down that this module is a unit, as FSDP2's ``fully_shard``, and return it.

    Parameters
    ----------
    module : torch.nn.Module or list of torch.nn.Module
        A unit, or modules that make up one together. The outermost one is the root, and one module.
    mesh : DeviceMesh, MeshComm or str, optional
        Of one dimension, or (replicate, shard). Ranks that are threads pass ``shardproof.MeshComm(comm, "dp_shard=2")``.
    reshard_after_forward : bool or int, optional
        Without it True, and False for the root.
    shard_placement_fn : callable, optional
        Along which dim a parameter is cut, as a Shard; None is Shard(0). Sizes need not divide.
    mp_policy : MixedPrecisionPolicy or Precision, optional
        The dtypes.
    offload_policy : OffloadPolicy, optional
        A CPUOffloadPolicy moves the optimizer's memory to the host.
    ignored_params : set of Parameter, optional
        They stay plain.
    dp_mesh_dims : DataParallelMeshDims, optional
        Which dimensions of `mesh` are data parallelism. Parameters are DTensors on `mesh`, or have types of spmd_types for it.
    **options
        Of the root: what `shardproof.fully_shard` takes besides, e.g. ``strategy`` or ``gather``.

    Returns
    -------
    torch.nn.Module or list of torch.nn.Module
        What was given, with the methods of `FSDPModule`.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module) if isinstance(module, (list, tuple)) else []
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise _C.Error(f"[fsdp] fully_shard takes a module, or a list of modules that make up one unit, got {module!r}")
    for each in modules:
        if isinstance(each, FSDPModule):
            raise _C.Error(f"[fsdp] this {type(each).__name__} was given to fully_shard before")
    request = _Request(
        modules,
        dict(
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            precision=mp_policy,
            offload_policy=offload_policy,
            ignored=ignored_params,
            shard_placement_fn=shard_placement_fn,
            dp_mesh_dims=dp_mesh_dims,
            options=options,
        ),
    )
    for each in modules:
        _around.pop(each, None)
        _noted[each] = request
        _first_of[each] = request.modules[0]
        each.__class__ = _with_methods(type(each))
    return module


@functools.lru_cache(maxsize=None)
def _with_methods(kind: type) -> type:
    """One class for each class, so that modules of one kind stay of one kind for who compiles or compares them."""
    return type("FSDP" + kind.__name__, (FSDPModule, kind), {"_shardproof_plain": kind})


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a module that `fully_shard` was given run as its forward does, with its parameters gathered.

    A module that was not given to `fully_shard` stays as it is. Calls of the module inside of the method are forwards as ever.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = {name: value for name, value in vars(module).items() if name == "forward"}

        def put_back() -> None:
            vars(module).pop("forward", None)
            vars(module).update(before)

        def instead(*args: Any, **kwargs: Any) -> Any:
            put_back()
            return method(*args, **kwargs)

        vars(module)["forward"] = instead
        try:
            return module(*args, **kwargs)
        finally:
            put_back()  # a hook may have failed before

    setattr(module, method_name, run)


def share_comm_ctx(modules: "list[nn.Module]") -> None:
    """Do nothing, since all models on one mesh share its communicators. FSDP2 has the name."""


def patch_torch() -> None:
    """Let ``torch.distributed.fsdp`` have these functions and classes, for programs that import FSDP2 themselves.

    Accelerate and the Trainer of transformers are such. Every rank calls it first: what was imported by name before stays
    FSDP2's.
    """
    for name in ("fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx"):
        for place in (torch.distributed.fsdp, torch.distributed._composable.fsdp):
            setattr(place, name, globals()[name])


def _all_noted() -> "list[nn.Module]":
    # One copy of the keys, since ranks that are threads note down modules of theirs meanwhile.
    return [module for module in (reference() for reference in _noted.keyrefs()) if module is not None]


def _root_of(module: nn.Module) -> nn.Module:
    """The outermost module that was noted down and has this one below it."""
    around = [noted for noted in _all_noted() if any(part is module for part in noted.modules())]
    return max(around, key=lambda noted: sum(1 for _ in noted.modules()), default=module)


def _sharded_around(module: nn.Module) -> Optional[Sharded]:
    own = sharded_of(module)
    return own if own is not None else _around.get(module, lambda: None)()


@outside_transforms()
@torch.inference_mode(False)  # what is made in the first forward is for later ones, too
def shard_now(root: nn.Module) -> Sharded:
    """Make the engine around the model that was noted down, with `root` as its root. Collective."""
    noted = [(module, _noted[module]) for module in root.modules() if module in _noted]
    requests = {id(module): request for module, request in noted}
    if id(root) not in requests:
        raise _C.Error(f"[fsdp] this {type(root).__name__} is not sharded any more, by remove(). Make the model again")
    own = requests[id(root)].options
    if len(requests[id(root)].modules) > 1:
        raise _C.Error("[fsdp] the outermost module is one of a list. Call fully_shard of the module around them as well")
    for request in requests.values():
        if request.cut.mesh != requests[id(root)].cut.mesh:
            raise _C.Error(
                "[fsdp] fully_shard of modules of one model was given different meshes. Give one DeviceMesh or MeshComm"
            )
        offloads_alone = _offloads(request) and not _offloads(requests[id(root)])
        if request is not requests[id(root)] and (request.options["options"] or offloads_alone):
            raise _C.Error(
                "[fsdp] a module within the outermost one was given options, or a CPUOffloadPolicy, which are of the whole "
                "model. Give them to fully_shard of the outermost module"
            )
    others = list({id(request): request for module, request in noted if module is not root}.values())
    places: "dict[int, Places]" = {}
    for request in requests.values():
        places.update(request.places)
        for each in request.places.values():
            each.sums = getattr(as_precision(request.options["precision"]), "reduce", None)
    units = [
        Unit(
            [module for module in (reference() for reference in request.modules) if module is not None],
            reshard_after_forward=request.options["reshard_after_forward"],
            precision=request.options["precision"],
            gradient_divide=request.options.get("gradient_divide"),
        )
        for request in [*others, requests[id(root)]]
    ]
    ignored = {id(p): p for _, request in noted for p in request.options["ignored"] or ()}
    options = {"check_gradients": False, **own["options"], "granularity": "row"}
    if _offloads(requests[id(root)]):
        options.setdefault("offload", "pinned" if own["offload_policy"].pin_memory else "pageable")
    try:
        for each in places.values():
            each.adopt()
            each.make_wholes()
            each.hold(True, plainly=True)
        sharded = _fully_shard(
            root,
            comms_of(own["mesh"]),
            units=units,
            precision=own["precision"],
            ignored=list(ignored.values()) or None,
            **{**_values_of(root, places), **options, "shard_dim": dims_of(places)},
        )
        try:
            shards = Shards(sharded, places)
        except BaseException:
            sharded._let_go()
            raise
    except BaseException:
        for each in places.values():
            each.hold(False)
            each.make_wholes()  # without memory
        raise
    for module, request in noted:
        del _noted[module]
        for trigger in request.triggers:
            trigger.remove()
        _around[module] = weakref.ref(sharded)
    sharded.follow_shards(shards)
    later = {id(request): request.later for request in requests.values()}
    for _, call in sorted((entry for entries in later.values() for entry in entries), key=lambda entry: entry[0]):
        call()
    return sharded


def _offloads(request: _Request) -> bool:
    return type(request.options["offload_policy"]).__name__ == "CPUOffloadPolicy"


def _values_of(root: nn.Module, places: "dict[int, Places]") -> dict:
    """Where whole parameters get their values and their memory: from the shards that each rank has."""
    by_whole = {id(parameter.whole): parameter for each in places.values() for _, _, parameter in each.entries}
    named = {name: by_whole.get(id(value)) for name, value in root.named_parameters(remove_duplicate=False)}
    without = [name for name, parameter in named.items() if parameter is not None and parameter.local.is_meta]
    if len(without) == sum(parameter is not None for parameter in named.values()) > 0:
        return {}  # `initialize` is to give values
    if without:
        raise _C.Error(
            f"[fsdp] the shard of {without[0]} is on the meta device, and others are not. Call to_empty of the whole model, "
            "and give it values, before the first forward"
        )

    def fill(name: str, shape: "list[int]", begin: int, end: int, values: torch.Tensor) -> None:
        named[name].fill(begin, end, values)

    device = next((parameter.local.device for parameter in by_whole.values()), None)
    return {"initialize": fill, "device": device}


def __getattr__(name: str) -> Any:
    """``shardproof.fsdp.RMSprop`` and the like are torch.optim's own. Policies are FSDP2's own."""
    if name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims"):
        return getattr(torch.distributed.fsdp, name)
    kind = getattr(torch.optim, name, None)
    if name.startswith("_") or not isinstance(kind, type):
        raise AttributeError(f"module 'shardproof.fsdp' has no attribute '{name}', and torch.optim has no class of that name")
    return kind
