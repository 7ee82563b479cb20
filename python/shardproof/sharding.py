"""`fully_shard`: makes a sharded model of a plain one."""

from __future__ import annotations

import inspect
import itertools
import textwrap
import weakref
from typing import Any, Callable, Iterable, Optional, Union

import torch
from torch import nn

from . import _C
from .ranks import comm_of, mesh_comm, usable_device
from .sharded import Sharded, owner_of, refuse_hook, sharded_of
from .torch_private import KEEPS_GRADIENT_DTYPES
from .units import Precision, Unit, as_list, select_units

# What `parallelize` did to a model, for `fully_shard`: the same mirror.
mirrors: "weakref.WeakKeyDictionary[nn.Module, _C.Mirror]" = weakref.WeakKeyDictionary()


def mirror_of(module: nn.Module) -> _C.Mirror:
    """The mirror that `parallelize` made of a model, or a new one."""
    known = mirrors.get(module)
    return known if known is not None else _C.Mirror(module)


def _ignored_parameters(module: nn.Module, ignored: Any) -> "list[nn.Parameter]":
    if ignored is None:
        return []
    selectors = [ignored] if isinstance(ignored, (str, nn.Parameter)) or callable(ignored) else list(ignored)
    chosen = {}
    for selector in selectors:
        if isinstance(selector, torch.Tensor):
            chosen[id(selector)] = selector
            continue
        fits = [
            value
            for name, value in module.named_parameters()
            if (_C.name_matches(selector, name) if isinstance(selector, str) else selector(name, value))
        ]
        if not fits:
            names = ", ".join(name for name, _ in itertools.islice(module.named_parameters(), 8))
            raise _C.Error(f"[fully_shard] ignored: {selector!r} fits no parameter. The first ones are called {names}")
        chosen.update((id(value), value) for value in fits)
    return list(chosen.values())


def device_of(
    module: nn.Module, plain: "Iterable[nn.Parameter]" = (), device: Union[torch.device, str, None] = None
) -> torch.device:
    """The device that a model trains on: the given one, or that of its parameters, without those that stay plain."""
    if device is not None:
        return usable_device(device)
    spared = {id(parameter) for parameter in plain}
    own = (each.device for each in module.parameters() if not each.is_meta and id(each) not in spared)
    return usable_device(next(own, "cpu"))


def _give_memory_to_buffers(module: nn.Module, device: torch.device) -> None:
    for name, part in module.named_modules():
        meta = {key: value for key, value in part._buffers.items() if value is not None and value.is_meta}
        if not meta:
            continue
        if not hasattr(part, "reset_buffers"):
            raise _C.Error(
                f"[fully_shard] module '{name}' ({type(part).__name__}) has a buffer on the meta device, which has no "
                "values. Give it a method reset_buffers() that computes its buffers, or build it outside of "
                "torch.device('meta')"
            )
        for key, value in meta.items():
            part._buffers[key] = torch.empty_like(value, device=device)
        part.reset_buffers()


def fully_shard(
    module: nn.Module,
    comm: Any = None,
    *,
    mesh: Any = None,
    strategy: str = "zero3",
    units: Any = (),
    precision: Optional[Precision] = None,
    reshard_after_forward: Union[bool, int, None] = None,
    recompute: Any = (),
    offload_activations: Any = (),
    ignored: Any = None,
    initialize: Union["tuple[int, float]", Callable, None] = None,
    device: Union[torch.device, str, None] = None,
    root_reshard_after_forward: Union[bool, int, None] = None,
    **options: Any,
) -> Sharded:
    """Shard the training of any ``torch.nn.Module`` over ranks.

    Collective: every rank calls it with the same arguments, for a model of its own. Rank 0's parameters and buffers become
    everybody's.

    Parameters
    ----------
    module : torch.nn.Module
        The model. Its parameters keep their identity, and are whole only while their unit runs.
    comm : Comm, MeshComm or ProcessGroup, optional
        The ranks: what `run_threads` or `run_mpi` passed to the body, or a process group. Without one, the default process
        group of torch.distributed.
    mesh : str, dict or DeviceMesh, optional
        How the ranks are arranged, e.g. ``"dp_replicate=2,dp_shard=4"``. Without one, ``dp_shard`` over all ranks.
    strategy : str
        ddp, zero1, zero2, zero3, hsdp, hfsdp or hzero2.
    units : class, str, module, list, callable, Unit, or several of them
        Modules whose parameters are gathered, freed and reduced together: every module of a class, modules whose names fit a
        pattern such as ``"blocks.*"``, a module, a list of modules that make up one unit, ``f(name, module) -> bool``, or a
        `Unit` with options of its own. The root is always a unit, and holds what no other one does.
    precision : Precision, optional
        The dtypes. Also an FSDP2 ``MixedPrecisionPolicy``.
    reshard_after_forward : bool or int, optional
        What stays gathered between a unit's forward and its backward: nothing (True), everything (False), or a part, in
        groups of so many ranks. Without it as the strategy says, which for the named ones is nothing.
    recompute : as units
        Units whose activations are computed again in the backward, and modules within units of which the same holds: their
        parameters stay those of the unit around them. Such a module must be called, and not only hold others.
    offload_activations : as units
        Units whose activations lie in the host's memory between forward and backward.
    ignored : str, callable, Parameter, or several of them
        Parameters that stay plain: a pattern of names, ``f(name, parameter) -> bool``, or the parameter.
    initialize : (int, float) or callable, optional
        For parameters on the meta device: a seed and a standard deviation, or ``f(name, shape, begin, end, values)`` that fills
        the elements [begin, end) of a parameter.
    device : torch.device or str, optional
        Where parameters and buffers of the meta device get their memory. Without it where the other parameters are; when all
        are meta, the CPU.
    root_reshard_after_forward : bool or int, optional
        As ``reshard_after_forward``, for the root, which keeps its own parameters without it.
{options}

    Returns
    -------
    Sharded
        The sharded model.

    Examples
    --------
    >>> def body(comm):
    ...     model = Net()
    ...     sharded = shardproof.fully_shard(model, comm, strategy="zero3", units=[Block])
    ...     optimizer = shardproof.adamw(sharded, lr=1e-3)
    ...     for x, y in batches(comm.rank):
    ...         loss(model(x), y).backward()
    ...         sharded.clip_gradients(1.0)
    ...         optimizer.step()
    >>> shardproof.run_threads(4, body)
    """
    for name in options.keys() - {name for name, *_ in _C.named_options()}:
        raise TypeError(f"fully_shard() got an unexpected keyword argument '{name}'")
    if not isinstance(module, nn.Module):
        raise _C.Error(f"[fully_shard] expected a torch.nn.Module, got a {type(module).__name__}")
    if sharded_of(module) is not None:
        raise _C.Error("[fully_shard] this model is sharded already. Call remove() on its Sharded first, or use a new model")
    comms = mesh_comm(comm, mesh)
    selected, inner = select_units(module, as_list(units), as_list(recompute), as_list(offload_activations))
    for each in itertools.chain([module], *(unit.modules for unit in selected), inner):
        require_hooks(each)
    plain = _ignored_parameters(module, ignored)
    for name, value in module.named_parameters():
        if owner_of(value) is not None and not any(value is each for each in plain):
            raise _C.Error(
                f"[fully_shard] parameter {name} belongs to another sharded model already. Call remove() of that one's Sharded "
                "first, or give the models modules of their own"
            )
        if value._post_accumulate_grad_hooks and not any(value is each for each in plain):
            refuse_hook(name)
    where = device_of(module, plain, device)
    _give_memory_to_buffers(module, where)
    options.update(
        strategy=strategy,
        ignored=plain,
        precision=as_precision(precision),
        reshard_after_forward=reshard_after_forward,
        recompute_modules=[name for name, each in module.named_modules() if any(each is other for other in inner)],
        initialize=initialize,
        device=where,
    )
    mirror = mirror_of(module)
    if root_reshard_after_forward is not None:
        selected.append(Unit([module], reshard_after_forward=root_reshard_after_forward))
    given = [(unit.modules, {**vars(unit), "precision": as_precision(unit.precision)}) for unit in selected]
    return Sharded(module, _C.shard(mirror, comms, given, options), mirror, selected, inner, plain)


def _named_options_of(function: Callable) -> None:
    """Give a function of ``**options`` the signature and the description that the library's own list of options has."""
    given = inspect.signature(function)
    own, lines = [], []
    for name, standard, words, _, about in _C.named_options():
        kind = inspect.Parameter.KEYWORD_ONLY
        own.append(inspect.Parameter(name, kind, default=standard, annotation=type(standard).__name__))
        values = "{" + ", ".join(f'"{word}"' for word in words) + "}" if words else type(standard).__name__
        lines += [f"    {name} : {values}, default {standard!r}", textwrap.indent(textwrap.fill(about, 112), " " * 8)]
    fixed = [each for each in given.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = given.replace(parameters=fixed + own)
    if function.__doc__:  # python -OO keeps none
        function.__doc__ = function.__doc__.replace("{options}", "\n".join(lines))


_named_options_of(fully_shard)


def require_hooks(module: nn.Module) -> None:
    """Refuse a module of TorchScript, which can be no unit."""
    if isinstance(module, torch.jit.ScriptModule):
        raise _C.Error(
            f"[fully_shard] a unit, or a module that is recomputed, is a {type(module).__name__}, which runs without "
            "hooks of Python. Choose the module around it instead"
        )


def as_precision(precision: Any) -> Optional[Precision]:
    """A Precision, from one or from an FSDP2 MixedPrecisionPolicy."""
    if precision is None or isinstance(precision, Precision):
        return precision
    if hasattr(precision, "param_dtype"):
        if getattr(precision, "param_dtype_override_fn", None) is not None:
            raise _C.Error(
                "[fully_shard] a MixedPrecisionPolicy has a param_dtype_override_fn, which is not offered. Make modules whose "
                "parameters keep their dtype units of their own, with another policy"
            )
        return Precision(
            compute=precision.param_dtype,
            reduce=precision.reduce_dtype or (None if KEEPS_GRADIENT_DTYPES else precision.param_dtype),
            output=precision.output_dtype,
            cast_inputs=precision.cast_forward_inputs,
        )
    raise _C.Error(f"[fully_shard] precision must be a shardproof.Precision or a MixedPrecisionPolicy, got {precision!r}")


def transfer(
    source: "Optional[Sharded]", target: "Optional[Sharded]", comm: Any = None, *, bytes_at_once: int = 64 << 20
) -> None:
    """Fill one sharded model with the values of another, on other ranks or on another mesh. Collective over ``comm``.

    No rank holds a whole parameter: what a rank lacks travels in slices. Values are the main parameters, rounded to the main
    dtype of the target. Persistent buffers, parameters that are not sharded and extra state of modules are those of the
    source's rank 0. Optimizer state and other buffers stay as they are.

    Parameters
    ----------
    source : Sharded or None
        The model that is copied; None on a rank that has no part of it.
    target : Sharded or None
        The model that is filled; None on a rank that has no part of it.
    comm : Comm, MeshComm or process group, optional
        Has every rank of both models. Without it the ranks of the source, or of the target, which then have to be the same.
    bytes_at_once : int
        So many bytes leave a rank at a time, at most, and as many arrive.

    Examples
    --------
    >>> shardproof.transfer(trained, serving)          # zero3 on 4 ranks -> tp=2 x ddp on the same 4
    """
    if comm is None:
        given = source if source is not None else target
        if given is None:
            raise _C.Error("[transfer] give a source or a target, or the comm that has the ranks of both")
        world = given.comms.world
    elif isinstance(comm, _C.MeshComm):
        world = comm.world
    else:
        world = comm if isinstance(comm, _C.Comm) else comm_of(comm)
    native = [None if model is None else model.native for model in (source, target)]
    _C.transfer(world, native[0], native[1], bytes_at_once)
    if target is not None:
        target._note_published()
