"""One case from its choices to its verdict, apart from how ranks are started."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Any, Sequence

import torch

from .draw import Draw
from .judge import Verdict, judge
from .plain import References, references
from .plan import Plan, Subject, base_model, draw_plan
from .train import RankStep, run_segment

FOLLOWS = r"SystemExit|Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting"


@dataclass
class Failure:
    """What a rank raised."""

    kind: str
    text: str

    @property
    def follows(self) -> bool:
        """Whether a rank raises this because another one has ended."""
        return re.search(FOLLOWS, self.text) is not None


class Trial:
    """What a crew runs: segments, each on a world of its own, and what becomes of what the ranks hold."""

    segments: Sequence[Any]
    """Each has `ranks`, their number."""
    patience: float
    """Seconds of silence after which ranks that still wait are taken for hung."""

    def train(self, segment: int, folder: str) -> list[RankStep]:
        """Runs a segment on the calling rank."""
        raise NotImplementedError

    def judge(self, ranks: list[list[list[RankStep]]]) -> Any:
        """The result, from the steps as [segment][rank][step]."""
        raise NotImplementedError

    def finish(self, verdict: Verdict) -> Verdict:
        """The verdict on ranks that raised, hang or are gone."""
        return verdict

    def run_rank(self, segment: int, folder: str) -> list[RankStep] | Failure:
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
        message = f"segment {segment}: {ranks} raised: {_raised(first)}"
        return self.finish(Verdict("raised", where=_place(first), message=message, traces={r: f.text for r, f in own.items()}))


class Case(Trial):
    """A drawn case of a subject. The model is built once, every rank copies it."""

    def __init__(self, subject: Subject, draw: Draw) -> None:
        self.subject = subject
        self.draw = draw
        self.plan: Plan = draw_plan(draw, subject)
        self.base = base_model(subject, draw, self.plan)
        self.segments = self.plan.segments
        self.patience = subject.patience

    def train(self, segment: int, folder: str) -> list[RankStep]:
        return run_segment(self.subject, self.draw, self.plan, self.base, segment, folder)

    def judge(self, ranks: list[list[list[RankStep]]]) -> Verdict:
        plain = self.plainly()
        return self.finish(judge(self.subject, self.plan, plain, ranks) if plain else Verdict("diverged"))

    def failed(self, segment: int, failures: dict[int, Failure]) -> Verdict:
        """As of any trial, unless the plain model raises, too."""
        return super().failed(segment, failures) if self.plainly() else self.finish(Verdict("diverged"))

    def plainly(self) -> References | None:
        """The plain runs, nothing where PyTorch cannot run the model in the case's precision. What else they raise is the
        user's own."""
        try:
            return references(self.subject, self.draw, self.plan)
        except Exception:
            if self.plan.dtype is torch.float32 and self.plan.precision is None:
                raise
            return None

    def finish(self, verdict: Verdict) -> Verdict:
        verdict.line = self.draw.line
        verdict.values = dict(self.draw.indices)
        if verdict.bad:
            text = "\n".join([verdict.where, verdict.message, *verdict.traces.values(), verdict.line])
            for kind, patterns in (("refused", {r: r for r in self.subject.refusals}), ("known", self.subject.known)):
                name = next((name for pattern, name in patterns.items() if re.search(pattern, text)), None)
                if name:
                    verdict.kind, verdict.where = kind, name
                    break
        return verdict


def failure_of(error: BaseException) -> Failure:
    return Failure(type(error).__name__, "".join(traceback.format_exception(error)))


def _raised(failure: Failure) -> str:
    """The exception as it was printed, with all of its lines."""
    begin = list(re.finditer(rf"^(?:[\w.]+\.)?{re.escape(failure.kind)}(?:: |$)", failure.text, re.MULTILINE))
    return failure.text[begin[-1].start() :].strip() if begin else failure.text.strip().splitlines()[-1]


def _place(failure: Failure) -> str:
    """The kind of an exception and the function that raised it, to tell one failure from another."""
    frames = re.findall(r'File "[^"]*?([^/"]+)", line \d+, in (\S+)', failure.text)
    return f"{failure.kind} in {frames[-1][0]}:{frames[-1][1]}" if frames else failure.kind
