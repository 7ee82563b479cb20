"""The names of FSDP2: ``from shardproof.fsdp import fully_shard`` instead of torch.distributed.fsdp's.

>>> for block in model.blocks:
...     fully_shard(block, mesh=mesh)
>>> fully_shard(model, mesh=mesh)
>>> optimizer = shardproof.fsdp.AdamW(model.parameters(), lr=1e-3)      # instead of torch.optim.AdamW

Modules are only noted down until the optimizer is made or the model first runs: then all of them are sharded at once.
docs/howto/move_from_fsdp2.md lists what is the same and what is not.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Iterable, Optional

import torch
from torch import nn

from . import _C
from .optim import parameters_in, torch_optimizer
from .ranks import mesh_comm
from .sharded import Sharded, owner_of, sharded_of
from .sharding import fully_shard as _fully_shard
from .units import Unit


class _Request:
    """What `fully_shard` was told about the modules of one unit."""

    def __init__(self, modules: "list[nn.Module]", options: dict):
        self.modules = [weakref.ref(module) for module in modules]
        self.options = options
        self.triggers = [m.register_forward_pre_hook(self.run, prepend=True, with_kwargs=True) for m in modules]

    def run(self, module, args, kwargs):
        """Shards the model, and enters its root, whose own hooks come too late for this forward."""
        return shard_now(module).enter_root(args, kwargs)


_noted: "weakref.WeakKeyDictionary[nn.Module, _Request]" = weakref.WeakKeyDictionary()
# By each module of a list that makes up one unit: the list's first module, which names the unit.
_first_of: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]" = weakref.WeakKeyDictionary()
# By each module that was noted down: the model that it is a unit of. A unit need not have parameters.
_around: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Sharded]]" = weakref.WeakKeyDictionary()


class FSDPModule:
    """What a module gains by `fully_shard`: the methods of torch.distributed.fsdp.FSDPModule."""

    def _shardproof_handle(self) -> Sharded:
        found = _sharded_around(self)
        return found if found is not None else shard_now(_root_of(self))

    def _units(self, recurse: bool) -> list:
        sharded = self._shardproof_handle()
        names = {id(module): name for name, module in sharded.module.named_modules()}
        own = names[id(_first_of.get(self, lambda: self)())]
        below = [
            unit for unit in sharded.units() if unit.name == own or (recurse and (not own or unit.name.startswith(own + ".")))
        ]
        return below

    def unshard(self, async_op: bool = False) -> "Optional[UnshardHandle]":
        """Gather this module's own parameters."""
        unit = self._units(recurse=False)[0]
        if not async_op:
            unit.unshard()
            return None
        unit.start_unshard()
        return UnshardHandle(unit)

    def reshard(self) -> None:
        """Free this module's own parameters."""
        self._units(recurse=False)[0].reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """While False, backwards add to gradients on this rank. Of the root, it also says whether the next backward is last."""
        sharded = self._shardproof_handle()
        if sharded.module is self and recurse:
            sharded.set_gradient_sync(requires_gradient_sync)
            sharded.set_last_microbatch(requires_gradient_sync)
            return
        for unit in self._units(recurse=False):
            unit.set_gradient_sync(requires_gradient_sync, recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last one before the optimizer's step."""
        self._shardproof_handle().set_last_microbatch(is_last_backward)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed after the forward, from the next one on."""
        for unit in self._units(recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after the backward."""
        for unit in self._units(recurse):
            unit.set_reshard_after_backward(reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backwards gather this module's own parameters. False is for modules whose backward reads none of them."""
        self._units(recurse=False)[0].set_unshard_in_backward(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: "list[nn.Module]") -> None:
        """Gather these modules while this one runs."""
        self._units(False)[0].set_forward_prefetch([module._units(False)[0] for module in modules])

    def set_modules_to_backward_prefetch(self, modules: "list[nn.Module]") -> None:
        """Gather these modules while the backward of this one runs."""
        self._units(False)[0].set_backward_prefetch([module._units(False)[0] for module in modules])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients of plain parameters. The root's own also forgets those that are accumulated in shards."""
        sharded = _sharded_around(self)
        if sharded is not None and sharded.module is not self:
            raise _C.Error(
                f"[fsdp] zero_grad() of a {type(self).__name__}, which is a part of a sharded {type(sharded.module).__name__}: "
                "gradients are dropped of the whole model only. Call zero_grad() of the outermost module, or of the optimizer"
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]


class UnshardHandle:
    """A gather under way."""

    def __init__(self, unit: _C.UnitHandle):
        self.unit = unit

    def wait(self) -> None:
        """Return when the parameters are whole."""
        self.unit.unshard()


def fully_shard(
    module: "nn.Module | list[nn.Module]",
    *,
    mesh: Any = None,
    reshard_after_forward: Any = None,
    shard_placement_fn: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: "Optional[set[nn.Parameter]]" = None,
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
    shard_placement_fn
        Refused: units are cut flat at any element, or with ``granularity="row"`` along dim 0.
    mp_policy : MixedPrecisionPolicy or Precision, optional
        The dtypes.
    offload_policy : OffloadPolicy, optional
        A CPUOffloadPolicy moves the optimizer's memory to the host.
    ignored_params : set of Parameter, optional
        They stay plain.
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
    if shard_placement_fn is not None:
        raise _C.Error(
            "[fsdp] shard_placement_fn is not offered: units are cut flat at any element, or with granularity='row' along "
            "dim 0. Leave it out"
        )
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
            options=options,
        ),
    )
    for each in modules:
        _noted[each] = request
        _first_of[each] = request.modules[0]
        each.__class__ = _with_methods(type(each))
    return module


@functools.lru_cache(maxsize=None)
def _with_methods(kind: type) -> type:
    """One class for each class, so that modules of one kind stay of one kind for who compiles or compares them."""
    return type("FSDP" + kind.__name__, (FSDPModule, kind), {})


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


def _all_noted() -> "list[nn.Module]":
    # One copy of the keys, since ranks that are threads note down modules of theirs meanwhile.
    return [module for module in (reference() for reference in _noted.keyrefs()) if module is not None]


def _contains(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def _root_of(module: nn.Module) -> nn.Module:
    """The outermost module that was noted down and has this one below it."""
    around = [noted for noted in _all_noted() if _contains(noted, module)]
    return max(around, key=lambda noted: sum(1 for _ in noted.modules()), default=module)


def _sharded_around(module: nn.Module) -> Optional[Sharded]:
    own = sharded_of(module)
    if own is not None:
        return own
    known = _around.get(module)
    if known is not None and (found := known()) is not None:
        return found
    return next((found for found in map(owner_of, module.parameters()) if found is not None), None)


def shard_now(root: nn.Module) -> Sharded:
    """Shard the model that was noted down, with `root` as its root. Collective."""
    noted = [(module, _noted.pop(module)) for module in root.modules() if module in _noted]
    requests = {id(module): request for module, request in noted}
    own = requests[id(root)].options
    if len(requests[id(root)].modules) > 1:
        raise _C.Error("[fsdp] the outermost module is one of a list. Call fully_shard of the module around them as well")
    others = list({id(request): request for module, request in noted if module is not root}.values())
    for request in requests.values():
        for trigger in request.triggers:
            trigger.remove()
    units = [
        Unit(
            [module for module in (reference() for reference in request.modules) if module is not None],
            reshard_after_forward=request.options["reshard_after_forward"],
            precision=request.options["precision"],
        )
        for request in others
    ]
    ignored = {id(p): p for _, request in noted for p in request.options["ignored"] or ()}
    options = dict(own["options"])
    if type(own["offload_policy"]).__name__ == "CPUOffloadPolicy":
        options.setdefault("offload", "pinned" if own["offload_policy"].pin_memory else "pageable")
    sharded = _fully_shard(
        root,
        mesh_comm(None, own["mesh"]),
        units=units,
        precision=own["precision"],
        ignored=list(ignored.values()) or None,
        root_reshard_after_forward=own["reshard_after_forward"],
        **options,
    )
    for module, _ in noted:
        _around[module] = weakref.ref(sharded)
    return sharded


def optimizer(kind: type, params: Iterable, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer of torch.optim for parameters of a model that `fully_shard` was given, or of a plain one. Collective.

    Parameters
    ----------
    kind : type
        A class of torch.optim.
    params : iterable
        Parameters, or dicts of them, as torch.optim takes them.
    **settings
        As the class takes them.
    """
    given = list(params)
    if given and isinstance(given[0], dict):
        given = [{**group, "params": parameters_in(group["params"])} for group in given]
        every = [parameter for group in given for parameter in group["params"]]
    else:
        every = parameters_in(given)
    sharded = next((found for found in map(owner_of, every) if found is not None), None)
    if sharded is None:
        ids = {id(parameter) for parameter in every}
        noted = [module for module in _all_noted() if any(id(parameter) in ids for parameter in module.parameters())]
        if not noted:
            return kind(given, **settings)
        sharded = shard_now(_root_of(noted[0]))
    return torch_optimizer(kind, sharded, given, **settings)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: "float | str" = 2.0) -> torch.Tensor:
    """Clip the gradients of whole models by one norm over all of them, as torch.nn.utils.clip_grad_norm_. Collective.

    The norm counts every element once on every mesh, and is taken of all sharded parameters of each model that one of the
    given is of, and of the given ones that are not sharded. Gradients of the latter must be the same on every rank.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    plain = [parameter for parameter in given if owner_of(parameter) is None]
    models = list(dict.fromkeys(found for found in map(owner_of, given) if found is not None))
    if not max_norm > 0:
        raise _C.Error(f"[fsdp] clip_grad_norm_: max_norm must be above 0, got {max_norm}; skip_step() drops gradients")
    if not models:
        raise _C.Error(
            "[fsdp] clip_grad_norm_: none of the parameters is of a sharded model. Use torch.nn.utils.clip_grad_norm_"
        )
    if len(models) == 1 and not plain:
        return torch.tensor(models[0].clip_gradients(max_norm, float(norm_type)))
    gradients = [parameter.grad for parameter in plain if parameter.grad is not None]
    norms = [sharded.gradient_norm(float(norm_type)) for sharded in models]
    if plain:
        norms.append(float(torch.nn.utils.get_total_norm(gradients, float(norm_type))))
        of_ranks = models[0].comms.world.gather_texts(str(norms[-1]))
        if len(set(of_ranks)) > 1:
            raise _C.Error(
                f"[fsdp] clip_grad_norm_: {len(plain)} of the parameters are not sharded, and the norms of their gradients are "
                f"{', '.join(of_ranks)} on the ranks, so no one factor fits. Average these gradients over the ranks before, "
                "or call fully_shard of the root, too, without ignored_params"
            )
    norm = torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), float(norm_type))
    divisor = (float(norm) + 1e-6) / max_norm
    if not divisor <= 1:
        for sharded in models:
            sharded.divide_gradients(divisor)
        for gradient in gradients:
            gradient.div_(divisor)
    return norm.float()


def __getattr__(name: str) -> Any:
    """``shardproof.fsdp.AdamW`` and the like: torch.optim's class of that name, on shards. Policies are FSDP2's own."""
    if name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        from torch.distributed import fsdp  # pylint: disable=import-outside-toplevel

        return getattr(fsdp, name)
    kind = getattr(torch.optim, name, None)
    if name.startswith("_") or not isinstance(kind, type):
        raise AttributeError(f"module 'shardproof.fsdp' has no attribute '{name}', and torch.optim has no class of that name")
    return functools.partial(optimizer, kind)
