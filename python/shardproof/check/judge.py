"""Compares what the ranks hold with the plain runs: bit for bit, or by distances from the run in float64.

In mode fast a value may be at most 8 times as far from the float64 run as the plain runs in its own precision are, in relative
Frobenius norm. Distances below the precision's epsilon count as epsilon. There is no absolute tolerance.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import dataclass
from typing import Any

import torch

from .assemble import Misplaced, Piece, assemble
from .localize import explain
from .plain import References
from .verdict import Verdict

FACTOR = 8.0
LOOSE = 0.25
ROUNDING = 2.0**-40
CUT = ("gradient of ", "parameter of ", "optimizer state ")  # what ranks hold in pieces, as the name begins


class Differs(Exception):
    """Ends a comparison. `where` is the kind of the value."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


def kind_of(name: str) -> str:
    """What sort of value has such a name, to tell one failure from another."""
    return re.match(r"(gathered parameter|optimizer state|state dict|kind of \w+|[\w' ]*?(?= of )|\w*)", name).group(0) or name


@dataclass
class Comparison:
    """One value of the plain runs beside the same value of the ranks."""

    segment: int
    step: int
    name: str
    runs: list[torch.Tensor]
    """Of each plain run; the first one rounds as specified, the last one is the truth."""
    found: list[tuple[list[int], torch.Tensor]]
    bits: bool
    region: slice | None = None
    """The elements of the flat tensor that are compared, if not all."""
    scale: float = 0.0
    bound: float = 0.0

    @property
    def truth(self) -> torch.Tensor:
        return self.runs[-1]

    @property
    def title(self) -> str:
        part = f"[{self.region.start}:{self.region.stop}]" if self.region else ""
        return f"segment {self.segment} step {self.step}: {self.name}{part}"

    def pick(self, whole: torch.Tensor) -> torch.Tensor:
        """What is compared of a whole tensor."""
        return whole.reshape(-1)[self.region] if self.region else whole

    @property
    def judged(self) -> bool:
        """Whether a wrong value would be noticed."""
        return self.bits or self.bound <= LOOSE and self.scale > 0.0 and self.scale == _size(self.truth)

    def distance(self, value: torch.Tensor) -> float:
        """Of a value from the truth. In bits it is 0 or infinite, and -0 is another number than +0, and NaN is NaN."""
        if self.bits:
            return 0.0 if first_difference(self.runs[0], value) is None else math.inf
        if bool((value.isfinite() != self.truth.isfinite()).any()):
            return math.inf
        error = _size(torch.where(self.truth.isfinite(), value.to(self.truth.dtype) - self.truth, 0))
        return error / self.scale if self.scale > 0.0 else 0.0 if error == 0.0 else math.inf

    def measure(self, eps: float, total: float, low: float = 0.0, change: float | None = None) -> None:
        """Finds out how far plain runs are from the truth. A value that is zero but for rounding is measured on the scale of
        all of its kind; `low` is the epsilon of the dtype that is computed in, and `change` what a parameter has moved."""
        size, others = _size(self.truth), self.runs[:-1] or self.runs
        is_zero = size == 0.0 and not any(bool((run != 0).any()) for run in others)
        self.scale = size if size >= ROUNDING * total or is_zero else total
        if self.scale == 0.0 and not is_zero:
            self.bound = math.inf
            return
        if low:
            eps = eps + low * change / self.scale if change is not None and self.scale > 0 else low
        self.bound = FACTOR * max([eps, *(self.distance(run) for run in others if self.scale > 0.0)])


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _size(tensor: torch.Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor[tensor.isfinite()].to(wide)))


def first_difference(expected: torch.Tensor, got: torch.Tensor) -> int | None:
    """The first element whose bits differ; -0 and +0 do, and NaN is NaN."""
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return 0
    wrong = expected != got
    if expected.is_floating_point():
        wrong = (wrong | (torch.signbit(expected) != torch.signbit(got))) & ~(expected.isnan() & got.isnan())
    where = wrong.reshape(-1).nonzero()
    return int(where[0]) if where.numel() else None


def judge(case: Any, references: References, ranks: list[list[list[dict[str, Any]]]]) -> Verdict:
    """`ranks[segment][rank][step]` is what was seen. The verdict names the first difference."""
    judge_ = Judge(case, references)
    try:
        for s, segment in enumerate(ranks):
            for t in range(min(len(records) for records in segment)):
                judge_.step(s, t, {rank: records[t] for rank, records in enumerate(segment)})
    except (Differs, Misplaced) as error:
        judge_.verdict.kind, judge_.verdict.message = "differs", str(error)
        judge_.verdict.where, judge_.verdict.error = getattr(error, "where", "placement"), error
    judge_.control()
    return judge_.verdict


class Judge:
    """Compares step by step, and counts."""

    def __init__(self, case: Any, references: References) -> None:
        self.case, self.plan, self.subject, self.references = case, case.plan, case.subject, references
        self.verdict = Verdict("held")
        self.bits = self.plan.mode != "fast"
        self.float32 = all(p.dtype is torch.float32 for p in references.start.values())
        self.verdict.narrow = int(not self.bits and not references.truth(0, 0).wide)
        self.kept: dict[str, Comparison] = {}
        self.chance = random.Random(self.plan.data)

    def step(self, s: int, t: int, found: dict[int, dict[str, Any]]) -> None:
        """Compares all that ranks had at a step."""
        self.s, self.t, self.runs = s, t, self.references.steps[s][t]
        self.totals = {kind: self._total(kind) for kind in CUT}
        order = {name: number for number, name in enumerate(self.runs[0].values)}
        names = dict.fromkeys([*itertools.chain(*found.values()), *order, *self.runs[0].places[0]])
        at = lambda name: -1 if re.search("microbatch|no graph", name) else order.get(name, len(order))  # noqa: E731
        for name in sorted(names, key=at):
            self._named(name, {rank: record[name] for rank, record in found.items() if name in record}, found)

    def _total(self, kind: str) -> float:
        truth = self.references.truth(self.s, self.t).values
        return math.sqrt(sum(_size(v) ** 2 for n, v in truth.items() if n.startswith(kind) and v.is_floating_point()))

    def _named(self, name: str, values: dict[int, Any], found: dict[int, Any]) -> None:
        """Compares what has this name, where it is compared at all."""
        shared = name in self.runs[0].values
        places = {rank: 0 if shared else self.case.place(self.s, rank) for rank in found}
        for place in dict.fromkeys(places.values()):
            ranks = [rank for rank in found if places[rank] == place and self.subject.compares(self.case, self.s, rank, name)]
            plain = [run.values if shared else run.places[place] for run in self.runs]
            here = {rank: values[rank] for rank in ranks if rank in values}
            if not here and name.startswith(("gathered", "hooks")):
                continue
            if not ranks or name not in plain[0] and (not here or not self.subject.strict or name.startswith(CUT)):
                continue
            if name not in plain[0] or len(here) < len(ranks) and not (self.subject.strict and name.startswith(CUT)):
                side = "with" if name not in plain[0] else "without"
                missing = f" on ranks {[r for r in ranks if r not in here]}" if side == "without" else ""
                raise Differs(f"segment {self.s} step {self.t}: {name} is there only {side} sharding{missing}", kind_of(name))
            if all(name in each for each in plain):  # else plain runs that round otherwise lack it
                self._values(name, [each[name] for each in plain], here)

    def _values(self, name: str, plain: list[Any], values: dict[int, Any]) -> None:
        """Compares one value of the runs with those of some ranks."""
        if all(isinstance(value, torch.Tensor) for value in plain):
            for region, found in regions_of(values, plain[0]):
                self._tensor(name, plain, found, region)
        elif isinstance(plain[0], float):
            found = [([rank], torch.tensor(float(value), dtype=torch.float64)) for rank, value in values.items()]
            self._tensor(name, [torch.tensor(value, dtype=torch.float64) for value in plain], found)
        else:
            for rank, value in values.items():
                self.verdict.compared += 1
                if repr(plain[0]) != repr(value) and all(repr(each) == repr(plain[0]) for each in plain[:-1]):
                    text = f"segment {self.s} step {self.t}: {name}: plain {plain[0]!r}, sharded {value!r} on rank {rank}"
                    raise Differs(text, kind_of(name))

    def _tensor(self, name: str, wholes: list, found: list, region: slice | None = None) -> None:
        if name.startswith("gathered") and found:
            wholes = [whole.to(found[0][1].dtype) if self.bits else whole for whole in wholes]
        comparison = Comparison(self.s, self.t, name, wholes, found, self.bits or not _counts(wholes[0]), region)
        comparison.runs = plain = [comparison.pick(whole) for whole in wholes]
        self.verdict.compared += sum(value.numel() for _, value in found)
        for owners, value in found:
            if value.shape != plain[0].shape or self.bits and value.dtype != plain[0].dtype:
                said = [f"{tuple(each.shape)} {each.dtype}" for each in (plain[0], value)]
                raise Differs(f"{comparison.title}: plain {said[0]}, sharded {said[1]} on ranks {owners}", kind_of(name))
        if comparison.bits and any(first_difference(plain[0], run) is not None for run in plain[1:-1]):
            return  # plain runs do not know it
        if not comparison.bits:
            self._measure(comparison)
        elif name.startswith("norm") and not self.float32:  # only float32 has a specified norm
            comparison.bits, comparison.scale, comparison.bound = False, abs(float(plain[0])), 1e-6
        if not comparison.bits and comparison.bound > LOOSE:
            self.verdict.loose += 1
            return
        distances = [(comparison.distance(value), owners, value) for owners, value in found]
        worst = max((distance for distance, _, _ in distances), default=0.0)
        if not comparison.bits and comparison.bound:
            self.verdict.zeros += comparison.scale == 0.0
            self.verdict.farthest = max(self.verdict.farthest, worst / comparison.bound * FACTOR)
        if not worst <= comparison.bound:
            raise Differs(explain(self.case, self.references, comparison, distances), kind_of(name))
        nonzero = [each for each in found if bool((each[1] != 0).any())]
        kind = kind_of(name)
        if nonzero and comparison.judged and (kind not in self.kept or self.chance.random() < 0.2):
            comparison.found, self.kept[kind] = nonzero, comparison

    def _measure(self, comparison: Comparison) -> None:
        name, plan = comparison.name, self.plan
        own = comparison.runs[0].dtype if plan.dtype is torch.float32 and comparison.runs[0].dim() else plan.dtype
        change, low = None, torch.finfo(plan.precision).eps if plan.precision else 0.0
        parameter = re.match(r"(?:gathered )?parameter of (.*)", name)
        if parameter and low:
            change = _size(comparison.truth - self.references.start[parameter[1]].to(comparison.truth))
        kind = next((kind for kind in CUT if name.removeprefix("gathered ").startswith(kind)), None)
        eps = min(torch.finfo(own).eps, torch.finfo(plan.dtype).eps) if own.is_floating_point else torch.finfo(plan.dtype).eps
        comparison.measure(eps, self.totals[kind] if kind else 0.0, low, change)

    def control(self) -> None:
        """Each case that holds must show that it could have failed: another value of each kind must be found."""
        for comparison in self.kept.values():
            value = comparison.found[0][1]
            self.verdict.controls += 1
            wrong = changed(value) if comparison.bits else 2.0 * value
            self.verdict.blind += not comparison.distance(wrong) > comparison.bound
        if not self.kept and self.verdict.kind == "held":
            says = "every value that was compared is empty, zero or unknown but for rounding"
            self.verdict.kind, self.verdict.message = "vacuous", says


def changed(value: torch.Tensor) -> torch.Tensor:
    """A tensor of which one element is the next number."""
    wrong = value.clone()
    first = (0,) * wrong.dim()
    if wrong.dtype is torch.bool:
        wrong[first] = not bool(wrong[first])
    elif wrong.is_floating_point():
        wrong[first] = torch.nextafter(wrong[first], torch.full_like(wrong[first], math.inf))
    else:
        wrong[first] += 1
    return wrong


def regions_of(values: dict[int, Any], plain: torch.Tensor) -> list[tuple[slice | None, list]]:
    """What ranks hold: of which elements, None for all, and what they are. Pieces that placements describe are put together."""
    parts: dict[tuple | None, list] = {}
    placed: dict[int, Piece | None] = {}
    for rank, value in values.items():
        for piece in value if isinstance(value, list) else [value]:
            if isinstance(piece, torch.Tensor):
                parts.setdefault(None, []).append(([rank], piece))
            elif piece is not None and piece.flat:
                parts.setdefault(piece.flat, []).append(([rank], piece.value))
            else:
                placed[rank] = piece
    found = [(slice(*flat) if flat else None, owned) for flat, owned in parts.items()]
    if placed:
        without = [rank for rank, piece in placed.items() if piece is None]
        wholes = assemble(placed, tuple(plain.shape))
        found.append((None, wholes + ([(without, torch.zeros_like(plain))] if without else [])))
    return found
