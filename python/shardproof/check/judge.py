"""Compares what the ranks hold with the truth.

A value may be at most 8 times as far from the float64 run as the plain runs in its own precision are, in relative Frobenius
norm. Distances below the precision's epsilon count as epsilon. There is no absolute tolerance.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import torch

from .assemble import Misplaced, assemble
from .localize import explain
from .plain import References, StepRecord
from .plan import Plan, Subject
from .train import RankStep

FACTOR = 8.0
LOOSE = 0.25
ROUNDING = 2.0**-40


@dataclass
class Verdict:
    """How a case ended.

    kind is one of: held; differs; raised; hung; crashed; refused (the engine said that it cannot do this); known (a finding
    that is listed already); diverged (the plain run is not finite); vacuous (nothing could be compared).
    """

    kind: str
    line: str = ""
    message: str = ""
    where: str = ""
    compared: int = 0
    zeros: int = 0
    loose: int = 0
    controls: int = 0
    blind: int = 0
    farthest: float = 0.0
    traces: dict[int, str] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return self.kind in ("differs", "raised", "hung", "crashed", "vacuous")


@dataclass
class Comparison:
    """One value of the truth beside the same value of the ranks."""

    segment: int
    step: int
    kind: str
    name: str
    truth: np.ndarray
    found: list[tuple[list[int], np.ndarray]]
    scale: float
    bound: float

    def distance(self, value: np.ndarray) -> float:
        if not np.isfinite(value).all():
            return math.inf
        error = float(np.linalg.norm(value - self.truth))
        if self.scale == 0.0:
            return 0.0 if error == 0.0 else math.inf
        return error / self.scale

    @property
    def title(self) -> str:
        what = {"loss": "loss", "norm": "norm of the gradient"}.get(self.kind, f"{self.kind} {self.name}")
        return f"segment {self.segment} step {self.step}: {what}"


class Diverged(Exception):
    pass


def judge(subject: Subject, plan: Plan, references: References, ranks: list[list[list[RankStep]]]) -> Verdict:
    """`ranks[segment][rank][step]` is what was seen. The verdict names the first difference."""
    verdict = Verdict("held")
    seen: list[Comparison] = []
    try:
        for comparison in _comparisons(plan, references, ranks):
            seen.append(comparison)
            verdict.compared += 1
            verdict.zeros += comparison.scale == 0.0
            if comparison.bound > LOOSE:
                verdict.loose += 1
                continue
            distances = [(comparison.distance(value), owners, value) for owners, value in comparison.found]
            worst = max(distances, key=lambda entry: entry[0])
            verdict.farthest = max(verdict.farthest, worst[0] / comparison.bound * FACTOR if comparison.bound else 0.0)
            if worst[0] > comparison.bound:
                verdict.kind = "differs"
                verdict.where = f"{comparison.kind}"
                verdict.message = explain(subject, plan, references, comparison, distances)
                return verdict
    except Misplaced as error:
        verdict.kind, verdict.where, verdict.message = "differs", "placement", str(error)
        return verdict
    except Diverged:
        verdict.kind = "diverged"
    _control(plan, seen, verdict)
    return verdict


def _control(plan: Plan, seen: list[Comparison], verdict: Verdict) -> None:
    """Each case that holds must show that it could have failed: twice one value must be found, for each kind of value."""
    chance = random.Random(plan.data)
    judged = [c for c in seen if c.bound <= LOOSE and c.scale > 0.0 and float(np.linalg.norm(c.truth)) > 0.0]
    for kind in sorted({c.kind for c in judged}):
        chosen = chance.choice([c for c in judged if c.kind == kind])
        verdict.controls += 1
        verdict.blind += not chosen.distance(2.0 * chosen.found[0][1]) > chosen.bound
    if not judged and verdict.kind == "held":
        verdict.kind, verdict.message = "vacuous", "every value that was compared is empty, zero or unknown but for rounding"


def _comparisons(plan: Plan, references: References, ranks):
    for s, segment in enumerate(plan.segments):
        for t in range(len(segment.steps)):
            truth = references.truth[s][t]
            controls = [control[s][t] for control in references.controls]
            found = {rank: records[t] for rank, records in enumerate(ranks[s])}
            if not _finite(truth):
                raise Diverged
            yield from _step(plan, references, s, t, truth, controls, found)


def _finite(record: StepRecord) -> bool:
    arrays = [a for group in (record.gradients, record.parameters) for a in group.values() if a is not None]
    return math.isfinite(record.loss) and all(np.isfinite(a).all() for a in arrays)


def _step(plan, references, s, t, truth, controls, found):
    scalar = lambda x: np.array(x if x is not None else math.nan)
    # The ranks' own losses differ: their mean is the plain run's.
    losses = np.array([record.loss for record in found.values()])
    yield _comparison(
        plan, s, t, "loss", "", scalar(truth.loss), [scalar(c.loss) for c in controls], [(sorted(found), losses.mean())]
    )
    for key, value in truth.seen.items():
        if key[0] != "buffer":
            yield _seen(plan, s, t, key, value, controls, found)
    yield from _tensors(plan, references, s, t, "gradient", truth, controls, found)
    if truth.norm is not None:
        norms: dict[float, list[int]] = {}
        for rank, record in found.items():
            norms.setdefault(record.norm, []).append(rank)
        values = [(owners, scalar(value)) for value, owners in norms.items()]
        yield _comparison(plan, s, t, "norm", "", scalar(truth.norm), [scalar(c.norm) for c in controls], values)
    yield from _tensors(plan, references, s, t, "parameter", truth, controls, found)
    for key, value in truth.seen.items():
        if key[0] == "buffer":
            yield _seen(plan, s, t, key, value, controls, found)
    calls = {rank: record.hooks for rank, record in found.items() if record.hooks != 1}
    if calls:
        raise Misplaced(f"segment {s} step {t}: what the optimizer calls after a step was called so often, by rank: {calls}")
    if any(record.gathered for record in found.values()):
        yield from _tensors(plan, references, s, t, "full_tensor of", truth, controls, found)


def _seen(plan, s, t, key, value, controls, found) -> Comparison:
    """What a model gave, did to its inputs or holds besides parameters, on the ranks of one place in the batch."""
    kind, name, place = key
    values = [([rank], record.seen[key]) for rank, record in found.items() if key in record.seen]
    if not values or any(v.shape != value.shape for _, v in values):
        shapes = {owners[0]: v.shape for owners, v in values}
        raise Misplaced(f"segment {s} step {t}: {kind} {name}: plain shape {value.shape}, by rank {shapes}")
    others = [control.seen[key] for control in controls if key in control.seen]
    return _comparison(plan, s, t, kind, name, value, others, values)


def _tensors(plan, references, s, t, kind, truth, controls, found):
    of = lambda record: record.gradients if kind == "gradient" else record.parameters
    seen = (lambda record: record.gathered) if kind == "full_tensor of" else of
    total = math.sqrt(sum(float(np.sum(a * a)) for a in of(truth).values() if a is not None))
    for name, value in of(truth).items():
        if kind == "full_tensor of" and not any(name in seen(record) for record in found.values()):
            continue
        zero = np.zeros_like(truth.parameters[name])
        value = zero if value is None else value
        missing = [rank for rank, record in found.items() if name not in seen(record)]
        if missing:
            raise Misplaced(f"segment {s} step {t}: ranks {missing} have no {kind} of {name}")
        pieces = {rank: seen(record)[name] for rank, record in found.items()}
        try:
            wholes = assemble(pieces, value.shape)
        except Misplaced as error:
            raise Misplaced(f"segment {s} step {t}: {kind} {name}: {error}") from None
        without = [rank for rank, piece in pieces.items() if piece is None]
        if without:
            wholes.append((without, zero))
        others = [zero if of(c).get(name) is None else of(c)[name] for c in controls]
        change = None
        if kind != "gradient" and plan.precision is not None:
            change = float(np.linalg.norm(value - references.start[name]))
        yield _comparison(plan, s, t, kind, name, value, others, wholes, total, change)


def _comparison(plan, s, t, kind, name, truth, controls, found, total=0.0, change=None) -> Comparison:
    size = float(np.linalg.norm(truth))
    scale = size if size >= ROUNDING * total or (size == 0.0 and not any(c.any() for c in controls)) else total
    epsilon = torch.finfo(plan.dtype).eps
    if plan.precision is not None:
        low = torch.finfo(plan.precision).eps
        epsilon = epsilon + low * change / scale if change is not None and scale > 0 else low
    comparison = Comparison(s, t, kind, name, truth, found, scale, 0.0)
    distances = [comparison.distance(control) for control in controls] if scale > 0.0 else []
    comparison.bound = FACTOR * max([epsilon, *distances])
    return comparison
