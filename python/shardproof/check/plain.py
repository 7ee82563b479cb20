"""The plain model, trained unsharded: once in float64 as the truth, and several times in the case's own precision.

The runs in the case's precision say how far rounding alone carries. Two of them sum in another order. In three of them the
first parameters are one float off.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import numpy as np
import torch

from .draw import Draw
from .plan import Plan, Subject, base_model, batch_of, make_optimizer

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
CONTROLS = ("whole batches", "pieces backwards", "one float off 0", "one float off 1", "one float off 2")


@dataclass
class StepRecord:
    """What one step computed. Tensors are float64 arrays, by name of the parameter."""

    loss: float = math.nan
    norm: float | None = None
    gradients: dict[str, np.ndarray | None] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    seen: dict[tuple[str, str, int], np.ndarray] = field(default_factory=dict)
    """What the model gave, did to its inputs, and holds besides, by kind, name, and data-parallel rank."""
    terms: list[list[dict[str, np.ndarray | None]]] = field(default_factory=list)
    """The truth keeps the gradient of each microbatch and each rank's piece as well."""


@dataclass
class References:
    truth: list[list[StepRecord]]
    controls: list[list[list[StepRecord]]]
    start: dict[str, np.ndarray]


def references(subject: Subject, draw: Draw, plan: Plan) -> References:
    """The truth and the controls of a case."""
    base = base_model(subject, draw, plan)
    try:
        truth = _train(subject, draw, plan, base, torch.float64, "pieces")
    except Exception:  # an operator without a kernel in float64
        truth = _train(subject, draw, plan, base, plan.dtype, "pieces")
    # Statistics of a whole batch are others than those of its pieces.
    own = any(key[0] == "buffer" for segment in truth for record in segment for key in record.seen)
    return References(
        truth=truth,
        controls=[_train(subject, draw, plan, base, plan.dtype, how) for how in CONTROLS[own:]],
        start={name: to_array(p) for name, p in base.named_parameters()},
    )


def to_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64, copy=True).numpy()


def _train(
    subject: Subject, draw: Draw, plan: Plan, base: torch.nn.Module, dtype: torch.dtype, how: str
) -> list[list[StepRecord]]:
    model = copy.deepcopy(base).to(dtype)
    if how.startswith("one float off"):
        _perturb(model, int(how[-1]), plan)
    optimizer = make_optimizer(plan, model.parameters())
    start = buffers_of(model)
    result = []
    for s, segment in enumerate(plan.segments):
        pieces = math.prod(segment.mesh[axis] for axis in subject.data_axes)
        records = []
        for t, step in enumerate(segment.steps):
            record = StepRecord(loss=0.0)
            for m in range(step.microbatches):
                batches = batch_of(subject, draw, plan, s, t, m, pieces)
                _microbatch(subject, plan, model, batches, step.microbatches, how, dtype, record, m)
            record.gradients = {n: None if p.grad is None else to_array(p.grad) for n, p in model.named_parameters()}
            if step.clip:
                record.norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), *step.clip, foreach=False))
            optimizer.step()
            optimizer.zero_grad()
            record.parameters = {n: to_array(p) for n, p in model.named_parameters()}
            if buffers_are_rank_0s(subject, plan, s):
                now = buffers_of(model)
                changed = {n: v for n, v in now.items() if not np.array_equal(v, start[n], equal_nan=True)}
                record.seen.update((("buffer", n, 0), v) for n, v in changed.items())
            records.append(record)
        result.append(records)
    return result


def buffers_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """What the model holds besides parameters, without the names that wrappers add."""
    named = {".".join(part for part in n.split(".") if part not in WRAPPERS): b for n, b in model.named_buffers()}
    return {name: to_array(buffer) for name, buffer in named.items()}


def buffers_are_rank_0s(subject: Subject, plan: Plan, segment: int) -> bool:
    """Whether buffers on the first rank are those of its own samples: engines differ in whose buffers a checkpoint has."""
    return all(math.prod(s.mesh[axis] for axis in subject.data_axes) == 1 for s in plan.segments[:segment])


def _microbatch(subject, plan, model, batches, microbatches, how, dtype, record, m) -> None:
    low = plan.precision if dtype is not torch.float64 else None
    places = list(range(len(batches)))
    if how == "whole batches" and low is None:
        batches = [tuple(torch.cat(tensors) for tensors in zip(*batches))]
    elif how != "pieces":
        batches, places = batches[::-1], places[::-1]
    parameters = dict(model.named_parameters())
    terms = []
    for place, (inputs, targets) in zip(places, batches):
        others = [] if place == 0 else [(b, b.clone()) for b in model.buffers()]  # they stay those of the first rank
        before = {n: p.grad for n, p in parameters.items()} if how == "pieces" else {}
        for n in before:
            parameters[n].grad = None
        inputs = _as(inputs, dtype)
        output = _forward(model, parameters, inputs, low, how)
        if len(batches) == len(places):
            record.seen["output", f"of microbatch {m}", place] = to_array(output)
        loss = subject.loss(output.to(dtype) if low else output, _as(targets, dtype)) / (len(batches) * microbatches)
        if loss.requires_grad:
            loss.backward()
        record.loss += float(loss.detach())
        if len(batches) == len(places):
            record.seen["input", f"after microbatch {m}", place] = to_array(inputs)
        for buffer, before_it in others:
            buffer.copy_(before_it)
        if how == "pieces":
            terms.append({n: None if p.grad is None else to_array(p.grad) for n, p in parameters.items()})
            for n, old in before.items():
                if old is not None:
                    parameters[n].grad = old if parameters[n].grad is None else old + parameters[n].grad
    if how == "pieces":
        record.terms.append(terms)


def _forward(model, parameters, inputs, low, how):
    if low is None:
        return model(inputs)
    cast = {n: p.to(low) for n, p in parameters.items()}
    if how.startswith("one float off"):
        generator = torch.Generator().manual_seed(int(how[-1]))
        for n, p in cast.items():
            cast[n] = p * (1 + torch.finfo(low).eps * torch.randint(0, 2, p.shape, generator=generator).to(low))
    return torch.func.functional_call(model, cast, (_as(inputs, low),))


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _perturb(model: torch.nn.Module, which: int, plan: Plan) -> None:
    """Makes each value one float larger or smaller."""
    generator = torch.Generator().manual_seed(plan.data * 3 + which)
    with torch.no_grad():
        for p in model.parameters():
            up = torch.randint(0, 2, p.shape, generator=generator).bool()
            p.copy_(
                torch.where(
                    up, torch.nextafter(p, torch.full_like(p, math.inf)), torch.nextafter(p, torch.full_like(p, -math.inf))
                )
            )
