"""What one rank does: it shards the model, trains it as the plan says, and keeps what it holds after each step."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .draw import Draw
from .plain import WRAPPERS, buffers_are_rank_0s, buffers_of, to_array
from .plan import OPTIMIZERS, Plan, Subject, base_model, batch_of, call, make_optimizer


@dataclass
class Sharded:
    """What a parallelize function may return, where the module alone does not say enough.

    Parameters
    ----------
    module
        What the user calls.
    wrap_optimizer
        `wrap_optimizer(parameters, optimizer_class, **settings)` makes the optimizer. The plain class is used without it.
    clip
        `clip(max_norm, norm_type)` clips the gradients and returns their norm. `clip_grad_norm_` is used without it.
    microbatch
        `microbatch(index, count)` is a context for one forward and backward, for accumulation in a way of its own.
    parameters, gradients
        Give the parameters and gradients by the names of the plain model, where `named_parameters()` does not.
    after_build
        `after_build(optimizer)` may replace the optimizer or prepare it.
    """

    module: torch.nn.Module
    wrap_optimizer: Any = None
    clip: Any = None
    microbatch: Any = None
    parameters: Any = None
    gradients: Any = None
    after_build: Any = None


@dataclass
class Piece:
    """What one rank holds of one tensor."""

    value: np.ndarray
    shape: tuple[int, ...]
    placements: tuple[tuple, ...] = ()
    mesh: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    """The ranks of the mesh that the tensor lies on."""


@dataclass
class RankStep:
    loss: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Of a case that was given: of each microbatch."""
    norm: float | None = None
    gradients: dict[str, Piece | None] = field(default_factory=dict)
    parameters: dict[str, Piece] = field(default_factory=dict)
    state: dict[str, dict[str, Piece]] = field(default_factory=dict)
    """Of a case that was given: slots of the optimizer's state."""
    seen: dict[tuple[str, str, int], np.ndarray] = field(default_factory=dict)
    """As of the plain run's StepRecord."""
    hooks: int = 1
    """How often the optimizer called what was to be called after its step."""
    gathered: dict[str, Piece] = field(default_factory=dict)
    """What `full_tensor` gives after the last step of a segment."""


def piece_of(tensor: torch.Tensor) -> Piece:
    """The rank's own part of a tensor, with where it belongs."""
    if not isinstance(tensor, DTensor):
        return Piece(to_array(tensor), tuple(tensor.shape))
    local = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    return Piece(
        to_array(local),
        tuple(tensor.shape),
        tuple(_placement(p) for p in tensor.placements),
        tuple(tensor.device_mesh.shape),
        tuple(tensor.device_mesh.get_coordinate() or ()),
        tuple(tensor.device_mesh.mesh.flatten().tolist()),
    )


def _placement(placement) -> tuple:
    if isinstance(placement, Replicate):
        return ("replicate",)
    if isinstance(placement, Partial):
        return ("partial", placement.reduce_op)
    if isinstance(placement, Shard) and type(placement) is Shard:
        return ("shard", placement.dim)
    if hasattr(placement, "split_factor"):
        return ("strided", placement.dim, placement.split_factor)
    return ("unknown", str(placement))


def run_segment(subject: Subject, draw: Draw, plan: Plan, base: torch.nn.Module, index: int, folder: str) -> list[RankStep]:
    """Runs one segment of the plan on the calling rank. The process group is there already."""
    segment = plan.segments[index]
    mesh = init_device_mesh("cpu", tuple(segment.mesh.values()), mesh_dim_names=tuple(segment.mesh))
    model = copy.deepcopy(base)
    if index:
        spoil(model)
    sharded = call(subject.parallelize, draw, model, mesh, **plan.options)
    if not isinstance(sharded, Sharded):
        sharded = Sharded(sharded)
    optimizer = make_optimizer(plan, sharded.module.parameters(), sharded.wrap_optimizer)
    if sharded.after_build:
        optimizer = sharded.after_build(optimizer) or optimizer
    if index:
        load(sharded.module, optimizer, os.path.join(folder, str(index - 1)), plan.checkpoint)
    coordinate = dict(zip(segment.mesh, mesh.get_coordinate()))
    records = [_step(subject, draw, plan, sharded, optimizer, index, t, coordinate) for t in range(len(segment.steps))]
    distributed = {n: p.detach() for n, p in parameters_of(sharded).items() if isinstance(p, DTensor)}
    records[-1].gathered = {n: Piece(to_array(p.full_tensor()), tuple(p.shape)) for n, p in distributed.items()}
    if index + 1 < len(plan.segments):
        save(sharded.module, optimizer, os.path.join(folder, str(index)), plan.checkpoint)
    return records


def _step(subject, draw, plan: Plan, sharded: Sharded, optimizer, s: int, t: int, coordinate: dict[str, int]) -> RankStep:
    segment = plan.segments[s]
    step = segment.steps[t]
    position = 0
    pieces = math.prod(segment.mesh[axis] for axis in subject.data_axes)
    for axis in subject.data_axes:
        position = position * segment.mesh[axis] + coordinate[axis]
    record = RankStep()
    for m in range(step.microbatches):
        inputs, targets = batch_of(subject, draw, plan, s, t, m, pieces)[position]
        with synchronized(sharded, m, step.microbatches, wait=step.sync_last and m + 1 < step.microbatches):
            output = sharded.module(inputs)
            whole = output.full_tensor() if isinstance(output, DTensor) else output
            record.seen["output", f"of microbatch {m}", position] = to_array(whole)
            loss = subject.loss(_in_dtype(output, plan.dtype), targets) / step.microbatches
            loss.backward()
        record.seen["input", f"after microbatch {m}", position] = to_array(inputs)
        record.loss += float(loss.detach())
    named = parameters_of(sharded)
    gradients = sharded.gradients() if sharded.gradients else {n: p.grad for n, p in named.items()}
    record.gradients = {n: None if g is None else piece_of(g) for n, g in gradients.items()}
    if step.clip:
        record.norm = clip_gradients(sharded, *step.clip)
    calls: list = []
    kind = OPTIMIZERS[plan.optimizer][0]
    derived = isinstance(optimizer, kind) and type(optimizer) is not kind  # it may call the hooks of the class below it as well
    watch = not derived and getattr(optimizer, "register_step_post_hook", lambda _: None)(lambda *_: calls.append(1))
    optimizer.step()
    if watch:
        watch.remove()
        record.hooks = len(calls)
    optimizer.zero_grad()
    if position == 0 and buffers_are_rank_0s(subject, plan, s):
        record.seen.update((("buffer", name, 0), value) for name, value in buffers_of(sharded.module).items())
    record.parameters = {n: piece_of(p) for n, p in parameters_of(sharded).items()}
    return record


def clip_gradients(sharded: Sharded, max_norm: float, kind: float) -> float:
    """The norm before clipping."""
    if sharded.clip:
        norm = sharded.clip(max_norm, kind)
    else:
        norm = torch.nn.utils.clip_grad_norm_(sharded.module.parameters(), max_norm, kind, foreach=False)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _in_dtype(output, dtype):
    return output.to(dtype) if output.dtype != dtype and output.is_floating_point() else output


def parameters_of(sharded: Sharded) -> dict[str, torch.Tensor]:
    """The parameters by the names that they have in the plain model."""
    if sharded.parameters:
        return sharded.parameters()
    result = {}
    for name, parameter in sharded.module.named_parameters(remove_duplicate=False):
        result[".".join(part for part in name.split(".") if part not in WRAPPERS)] = parameter
    return result


SPOIL_STEP = 1.0


@contextlib.contextmanager
def synchronized(sharded: Sharded, m: int, count: int, wait: bool):
    """The context of microbatch m of count. With `wait` it skips communication, if the engine can."""
    if sharded.microbatch:
        with sharded.microbatch(m, count):
            yield
        return
    module = sharded.module
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(not wait)
        yield
    elif wait and hasattr(module, "no_sync"):
        with module.no_sync():
            yield
    else:
        yield


def spoil(model: torch.nn.Module) -> None:
    """Changes every parameter, so a load that leaves one alone is noticed."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(SPOIL_STEP * (1 + i))


def save(module, optimizer, path: str, how: str) -> None:
    """Saves by torch.distributed.checkpoint, as its tutorial does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(module, optimizer, options=_options(how))
    state = {"model": model_state, "optimizer": optimizer_state}
    if how == "full":
        if dist.get_rank() == 0:
            torch.save(state, path)
    else:
        dcp.save(state, checkpoint_id=path)


def load(module, optimizer, path: str, how: str) -> None:
    """Loads what `save` saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict

    if how == "full":
        state = torch.load(path) if dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
    else:
        model_state, optimizer_state = get_state_dict(module, optimizer, options=_options(how))
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path)
    # One call for both hangs where other ranks pass empty dicts (docs/findings/017.md).
    options = _options(how, broadcast_from_rank0=True) if how == "full" else _options(how)
    set_model_state_dict(module, state["model"], options=options)
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=options)


def _options(how: str, **more):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    if how == "full":
        return StateDictOptions(full_state_dict=True, cpu_offload=True, **more)
    return StateDictOptions(flatten_optimizer_state_dict=how == "flat")
