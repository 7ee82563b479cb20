"""Random cases of a subject: run, confirmed, shrunk and reported."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from .case import Case
from .crew import ProcessCrew, ThreadCrew
from .draw import Draw
from .judge import Verdict
from .plan import Subject

CONFIRM = 3


@dataclass
class Report:
    """What `check` found."""

    name: str
    cases: int = 0
    held: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    diverged: int = 0
    compared: int = 0
    zeros: int = 0
    loose: int = 0
    controls: int = 0
    blind: int = 0
    farthest: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    failures: list["Counterexample"] = field(default_factory=list)
    threads_only: list[Verdict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures and self.blind == 0 and self.held > 0

    def add(self, verdict: Verdict) -> None:
        self.cases += 1
        self.held += verdict.kind == "held"
        self.diverged += verdict.kind == "diverged"
        for kind, counts in (("refused", self.refused), ("known", self.known)):
            if verdict.kind == kind:
                counts[verdict.where] = counts.get(verdict.where, 0) + 1
        for name in ("compared", "zeros", "loose", "controls", "blind"):
            setattr(self, name, getattr(self, name) + getattr(verdict, name))
        self.cpu_seconds += verdict.seconds
        if verdict.kind == "held":
            self.farthest = max(self.farthest, verdict.farthest)

    def __str__(self) -> str:
        rate = self.cases / self.seconds * 60 if self.seconds else 0.0
        lines = [
            f"{self.name}: {self.cases} cases, {self.held} held, {len(self.failures)} counterexamples, "
            f"{sum(self.known.values())} known, {sum(self.refused.values())} refused by the engine, {self.diverged} diverged",
            f"  {self.compared} values compared, {self.zeros} of them zero, {self.loose} too loose to judge; "
            f"{self.controls} negative controls, {self.blind} of them missed",
            f"  the farthest value was {self.farthest:.2g} times as far from float64 as the plain runs are (8 are allowed)",
            f"  {self.seconds:.1f} s, {rate:.0f} cases a minute",
        ]
        lines += [f"  refused {count} times: {why}" for why, count in sorted(self.refused.items())]
        lines += [f"  known {count} times: {why}" for why, count in sorted(self.known.items())]
        lines += [f"  only under the threaded group: {v.kind} {v.where}: {v.line}" for v in self.threads_only]
        lines += [str(failure) for failure in self.failures]
        return "\n".join(lines)


@dataclass
class Counterexample:
    verdict: Verdict
    first_line: str
    confirmed: int
    of: int
    ranks: str
    script: str = ""

    def __str__(self) -> str:
        v = self.verdict
        text = f"  {v.kind.upper()} [{v.where}], {self.confirmed} of {self.of} reruns on {self.ranks}"
        text += f"\n    replay: {v.line}\n    {v.message}"
        for rank, trace in sorted(v.traces.items()):
            text += f"\n    rank {rank}:\n" + "\n".join("      " + line for line in trace.strip().splitlines()[-12:])
        return text


def crew_of(subject: Subject, ranks: str) -> ThreadCrew | ProcessCrew:
    """Runs cases of the subject: `run(number, values)`, where values are the choices of an earlier case or None."""
    crew = ThreadCrew if ranks == "threads" else ProcessCrew
    return crew(lambda number, values: Case(subject, Draw(*number, values=values)), subject.patience)


def run_cases(subject: Subject, cases: int, seed: int, jobs: int, ranks: str, stop_after: int, budget: float | None) -> Report:
    """Runs random cases until enough have run or enough kinds of failures are known."""
    report = Report(subject.name)
    crews = [crew_of(subject, ranks) for _ in range(jobs)]
    start = time.monotonic()
    numbers = iter(range(cases))
    bad: dict[tuple[str, str], Verdict] = {}
    lock, over = threading.Lock(), threading.Event()

    def next_number() -> int | None:
        with lock:
            out_of_time = budget and time.monotonic() - start > budget
            return None if over.is_set() or len(bad) >= stop_after or out_of_time else next(numbers, None)

    def work(crew) -> None:
        try:
            while (number := next_number()) is not None:
                verdict = crew.run((seed, number), None)
                with lock:
                    report.add(verdict)
                    if verdict.bad:
                        bad.setdefault((verdict.kind, verdict.where), verdict)
        except BaseException:
            over.set()
            raise

    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for future in [pool.submit(work, crew) for crew in crews]:
                    future.result()
            finally:  # after an error or an interrupt the cases under way end, and no other begins
                over.set()
        report.seconds = time.monotonic() - start
        for verdict in bad.values():
            _examine(subject, verdict, ranks, report)
    finally:
        for crew in crews:
            crew.stop()
    return report


def _examine(subject: Subject, verdict: Verdict, ranks: str, report: Report) -> None:
    """Shrinks a failure, and confirms it on processes: the threaded group is a stand-in with faults of its own."""
    from .script import script_of

    quick = replace(subject, patience=min(subject.patience, 6.0)) if verdict.kind == "hung" else subject
    shrinker = crew_of(quick, ranks)  # a case that hangs costs the patience
    try:
        small = shrink(shrinker, verdict)
    finally:
        shrinker.stop()
    judge = crew_of(subject, "processes")
    try:
        for candidate in ([small, verdict] if small.values != verdict.values else [verdict]):
            again = [judge.run((0, 0), candidate.values) for _ in range(CONFIRM)]
            same = [v for v in again if v.kind == candidate.kind or v.bad]
            if same:
                script = script_of(subject, same[0])
                report.failures.append(Counterexample(same[0], verdict.line, len(same), CONFIRM, "processes", script))
                return
    finally:
        judge.stop()
    report.threads_only.append(small)


def shrink(crew, verdict: Verdict, seconds: float = 60.0) -> Verdict:
    """Makes one choice at a time simpler, as long as the case fails in the same way."""
    limit = time.monotonic() + seconds
    best = verdict
    improved = True
    while improved and time.monotonic() < limit:
        improved = False
        for name in list(best.values):
            for index in _simpler(best.values.get(name, 0)):
                if name == "data" or time.monotonic() > limit:
                    break
                candidate = crew.run((0, 0), {**best.values, name: index})
                if (candidate.kind, candidate.where) == (verdict.kind, verdict.where):
                    best, improved = candidate, True
                    break
    return best


def _simpler(index: int) -> list[int]:
    return sorted({0, index // 2, index - 1} - {index, -1}) if index > 0 else []
