"""One case from its choices to its verdict, apart from how ranks are started."""

from __future__ import annotations

import functools
import re
from typing import Any, Sequence

import torch

from .draw import Draw
from .judge import judge
from .plain import Diverged, PlainFailed, References, references
from .plan import Plan
from .verdict import Failure, Verdict, failure_of


class Trial:
    """What a crew runs: segments, each on a world of its own, and what becomes of what the ranks hold."""

    segments: Sequence[Any]
    """Each has `ranks`, their number."""
    patience: float
    """Seconds of silence after which ranks that still wait are taken for hung."""

    def train(self, segment: int, folder: str, comm: Any = None) -> list[dict[str, Any]]:
        """Runs a segment on the calling rank, and gives what it has at each step by name."""
        raise NotImplementedError

    def judge(self, ranks: list[list[list[dict[str, Any]]]]) -> Any:
        """The result, from the steps as [segment][rank][step]."""
        raise NotImplementedError

    def finish(self, verdict: Verdict) -> Verdict:
        """The verdict on ranks that raised, hang or are gone."""
        return verdict

    def run_rank(self, segment: int, folder: str) -> list[dict[str, Any]] | Failure:
        """As `train`, but what it raises comes back as a value."""
        try:
            return self.train(segment, folder)
        except BaseException as error:  # noqa: BLE001 - a rank may raise anything, and all of it is a finding
            return failure_of(error)

    def failed(self, segment: int, failures: dict[int, Failure]) -> Verdict:
        """The verdict on a segment in which some ranks raised."""
        own = {rank: f for rank, f in failures.items() if not f.follows}
        if not own and len(failures) < self.segments[segment].ranks:
            message = f"segment {segment}: ranks {sorted(failures)} wait for ranks that have ended"
            return self.finish(Verdict("hung", where="hung", message=message, traces={r: f.text for r, f in failures.items()}))
        own = own or failures
        first = next(iter(own.values()))
        ranks = "every rank" if len(own) == self.segments[segment].ranks else f"rank {', '.join(map(str, sorted(own)))}"
        message = f"segment {segment}: {ranks} raised: {first.said}"
        return self.finish(Verdict("raised", where=first.place, message=message, traces={r: f.text for r, f in own.items()}))


class Case(Trial):
    """A drawn case of a subject."""

    def __init__(self, subject: Any, draw: Draw) -> None:
        self.subject = subject
        self.draw = draw
        self.plan: Plan = subject.draw_plan(draw)
        self.segments = self.plan.segments
        self.patience = subject.patience
        self.base = subject.base_of(draw, self.plan)

    def make_model(self) -> torch.nn.Module:
        """The plain model as it is at the start."""
        return self.subject.model_of(self)

    def place(self, segment: int, rank: int) -> int:
        """Which data-parallel rank a rank is."""
        place, stride, rest = 0, 1, rank
        for axis, size in reversed(self.plan.segments[segment].mesh.items()):
            coordinate, rest = rest % size, rest // size
            if axis.startswith("dp"):
                place, stride = place + coordinate * stride, stride * size
        return place

    def train(self, segment: int, folder: str, comm: Any = None) -> list[dict[str, Any]]:
        return self.subject.rank_of(self, segment, comm).run(folder)

    def judge(self, ranks: list[list[list[dict[str, Any]]]]) -> Verdict:
        plain = self.plainly
        self.draw.require_used()  # all choices have been made
        return self.finish(judge(self, plain, ranks) if isinstance(plain, References) else plain)

    def failed(self, segment: int, failures: dict[int, Failure]) -> Verdict:
        """As of any trial, unless the plain model raises, too."""
        return super().failed(segment, failures) if isinstance(self.plainly, References) else self.finish(self.plainly)

    @functools.cached_property
    def plainly(self) -> References | Verdict:
        """The plain runs, or why there are none."""
        state = torch.get_rng_state()
        try:
            return references(self)
        except Diverged as error:
            return Verdict("diverged", message=str(error))
        except PlainFailed as failed:
            return Verdict("plain", message=failure_of(failed.error).text, error=failed.error)
        finally:
            torch.set_rng_state(state)

    def finish(self, verdict: Verdict) -> Verdict:
        verdict.line = self.draw.line
        verdict.values = dict(self.draw.indices)
        verdict.row = (self.segments[0].strategy, self.segments[0].ranks)
        if verdict.bad:
            text = "\n".join([verdict.where, verdict.message, *verdict.traces.values(), verdict.line])
            for kind, patterns in (("refused", {r: r for r in self.subject.refusals}), ("known", self.subject.known)):
                name = next((name for pattern, name in patterns.items() if re.search(pattern, text)), None)
                if name:
                    verdict.kind, verdict.where = kind, name
                    break
        return verdict
