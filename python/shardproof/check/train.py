"""What one rank does: it trains what was sharded as the plan says, and keeps what it has at each step."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .assemble import Piece
from .plain import watch_steps
from .plan import WRAPPERS, Step, call, optimizer_of
from .witness import Witness


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
        Give the parameters and gradients by the names of the plain model, where `named_parameters()` does not. A value may be
        a list of `Piece`.
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


class Rank:
    """One rank in one segment of a case. A class below says how what was sharded is driven: `load(folder)` and `save(folder)`,
    `microbatch(m, step)`, a context of one forward and backward, `update(step)`, which gives gradients and their norm and makes
    the optimizer's step, and `held(last)`, what the rank has after it; `discard(batch)` trains, and forgets the gradients."""

    def __init__(self, case: Any, index: int, module: torch.nn.Module) -> None:
        self.case, self.plan, self.subject, self.index = case, case.plan, case.subject, index
        self.segment = case.plan.segments[index]
        self.witness = Witness(module, case.subject, case.plan.dtype, case.plan.options.get("inputs") == "grad")
        self.place = 0
        self.records: list[dict[str, Any]] = []

    def run(self, folder: str) -> list[dict[str, Any]]:
        """All steps of the segment, from the load to the save. What the rank has at each step, by name."""
        if self.index:
            self.load(folder)
        for t, step in enumerate(self.segment.steps):
            if self.segment.saved == t:
                self.save(folder)
            self.records.append(self.step(t, step))
        if self.segment.saved == len(self.records):
            self.save(folder)
        return self.records

    def step(self, t: int, step: Step) -> dict[str, Any]:
        """One step."""
        counts = range(step.microbatches)
        batches = [self.subject.batches(self.case, self.index, t, m)[self.place] for m in counts]
        seen: dict[str, Any] = {}
        self.begin(step)
        if step.eval:
            with torch.no_grad():
                seen.update(self.witness.forward("no graph", batches[0])[1])
        if step.discard:
            self.discard(batches[0])
        for m, batch in enumerate(batches):
            with self.microbatch(m, step):
                value, results = self.witness.forward(f"microbatch {m}", batch)
                self.backward(value, step)
            seen.update({**results, **self.witness.arguments(f"microbatch {m}")})
        seen.update(self.update(step))
        return {**seen, **self.held(t + 1 == len(self.segment.steps))}

    def begin(self, step: Step) -> None:
        """Sets what holds for the step: what is frozen, and the learning rate."""

    def backward(self, value: torch.Tensor, step: Step) -> None:
        if value.requires_grad:
            (value / step.microbatches).backward()


class ForeignRank(Rank):
    """Drives what a function of the user's made of the model. The process group is there already."""

    def __init__(self, case: Any, index: int) -> None:
        segment, model = case.plan.segments[index], case.make_model()
        mesh = init_device_mesh("cpu", tuple(segment.mesh.values()), mesh_dim_names=tuple(segment.mesh))
        if index:
            spoil(model)
        made = call(case.subject.parallelize, case.draw, model, mesh, **case.plan.options_of(segment))
        self.sharded = made if isinstance(made, Sharded) else Sharded(made)
        super().__init__(case, index, self.sharded.module)
        self.place = case.place(index, dist.get_rank())
        kind, settings = optimizer_of(self.plan.optimizer)
        trained = [p for p in self.sharded.module.parameters() if p.requires_grad]
        wrap = self.sharded.wrap_optimizer
        self.optimizer = wrap(trained, kind, **settings) if wrap else kind(trained, **settings)
        if self.sharded.after_build:
            self.optimizer = self.sharded.after_build(self.optimizer) or self.optimizer
        self.hooks: list[str] = []
        # One whose class is derived may call the hooks of the class below it as well.
        derived = isinstance(self.optimizer, kind) and type(self.optimizer) is not kind
        self.watched = not derived and hasattr(self.optimizer, "register_step_post_hook")
        if self.watched:
            watch_steps(self.optimizer, self.hooks)
        self.witness.watch()

    def microbatch(self, m: int, step: Step) -> Any:
        return synchronized(self.sharded, m, step.microbatches, wait=not step.synchronizes(m))

    def update(self, step: Step) -> dict[str, Any]:
        self.hooks.clear()
        named = self.sharded.gradients() if self.sharded.gradients else grads_of(self.sharded)
        seen = {f"gradient of {n}": None if g is None else piece_of(g) for n, g in named.items()}
        if step.clip:
            seen["norm of the gradient"] = clip_gradients(self.sharded, *step.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {**seen, **({"hooks of the optimizer": list(self.hooks)} if self.watched else {})}

    def held(self, last: bool) -> dict[str, Any]:
        named = parameters_of(self.sharded)
        seen: dict[str, Any] = {f"parameter of {n}": piece_of(p) for n, p in named.items()}
        seen.update({f"buffer {plain_name(n)}": b.detach().clone() for n, b in self.sharded.module.named_buffers()})
        whole = {n: p.detach() for n, p in named.items() if last and isinstance(p, DTensor)}
        return {**seen, **{f"gathered parameter of {n}": p.full_tensor().clone() for n, p in whole.items()}}

    def save(self, folder: str) -> None:
        save(self.sharded.module, self.optimizer, os.path.join(folder, str(self.index)), self.plan.checkpoint)

    def load(self, folder: str) -> None:
        load(self.sharded.module, self.optimizer, os.path.join(folder, str(self.index - 1)), self.plan.checkpoint)


def piece_of(tensor: torch.Tensor | list[Piece]) -> Piece | list[Piece]:
    """The rank's own part of a tensor, with where it belongs."""
    if isinstance(tensor, list):
        return tensor
    if not isinstance(tensor, DTensor):
        return Piece(tensor.detach().clone(), tuple(tensor.shape))
    local = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    return Piece(
        local.detach().clone(),
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


def clip_gradients(sharded: Sharded, max_norm: float, kind: float) -> float:
    """The norm before clipping."""
    if sharded.clip:
        norm = sharded.clip(max_norm, kind)
    else:
        norm = torch.nn.utils.clip_grad_norm_(sharded.module.parameters(), max_norm, kind, foreach=False)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def plain_name(name: str) -> str:
    """A name without what wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def parameters_of(sharded: Sharded) -> dict[str, torch.Tensor]:
    """The parameters by the names that they have in the plain model."""
    if sharded.parameters:
        return sharded.parameters()
    return {plain_name(name): p for name, p in sharded.module.named_parameters(remove_duplicate=False)}


def grads_of(sharded: Sharded) -> dict[str, torch.Tensor | None]:
    """The gradients by those names."""
    return {name: p.grad for name, p in parameters_of(sharded).items()}


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
