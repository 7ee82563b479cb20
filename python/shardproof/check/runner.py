"""Random cases of a subject: run, confirmed, shrunk and reported."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any, Callable, Iterable

from .case import Case
from .crew import ProcessCrew, ThreadCrew
from .draw import Draw
from .plan import Subject
from .verdict import Counts, Verdict

CONFIRM = 3


@dataclass
class Report(Counts):
    """What `check` or `verify` found."""

    name: str = "check"
    cases: int = 0
    held: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    diverged: int = 0
    farthest: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    rows: dict[tuple[str, int], int] = field(default_factory=dict)
    """The cases of each strategy and number of ranks."""
    failures: list["Counterexample"] = field(default_factory=list)
    threads_only: list[Verdict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures and self.blind == 0 and self.held > 0

    @property
    def judged(self) -> int:
        """How many cases say something about the subject."""
        return self.held + len(self.failures) + sum(self.known.values()) + sum(self.refused.values())

    @property
    def values(self) -> int:
        """How many values were compared."""
        return self.compared

    def add(self, verdict: Verdict) -> None:
        """Counts a case."""
        self.cases += 1
        self.held += verdict.kind == "held"
        self.diverged += verdict.kind == "diverged"
        self.rows[verdict.row] = self.rows.get(verdict.row, 0) + 1
        for kind, counts in (("refused", self.refused), ("known", self.known)):
            if verdict.kind == kind:
                counts[verdict.where] = counts.get(verdict.where, 0) + 1
        for name in (each.name for each in fields(Counts)):
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
        ]
        lines += [f"  {count} cases of {name} on {ranks} ranks" for (name, ranks), count in sorted(self.rows.items()) if name]
        if self.diverged:
            lines.append(f"  {self.diverged} cases diverged, or could not be computed, without sharding, and show nothing")
        if self.narrow:
            lines.append(f"  {self.narrow} cases in fast mode were measured from the plain run: it has no kernels in float64")
        lines += [f"  refused {count} times: {why}" for why, count in sorted(self.refused.items())]
        lines += [f"  known {count} times: {why}" for why, count in sorted(self.known.items())]
        lines += [f"  only under the threaded group: {v.kind} {v.where}: {v.line}" for v in self.threads_only]
        lines += [str(failure) for failure in self.failures]
        says = "ALL HELD" if self.ok and self.held == self.judged else "FAILED" if self.failures else "HELD"
        took = f"in {self.seconds:.1f} s ({rate:.0f} cases a minute)"
        lines.append(f"{says}: {self.held} of {self.judged} cases held, {took}")
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
        if self.ranks == "processes" and not self.script:
            text += "\n    no script: the source of a function cannot be read, or it imports from a package of its own"
        for rank, trace in sorted(v.traces.items()):
            text += f"\n    rank {rank}:\n" + "\n".join("      " + line for line in trace.strip().splitlines()[-12:])
        return text


def crew_of(subject: Any, ranks: str) -> Any:
    """Runs cases of the subject: `run(number, values)`, where values are the choices of an earlier case or None."""
    if ranks == "here":
        return subject
    crew = ThreadCrew if ranks == "threads" else ProcessCrew
    return crew(lambda number, values: Case(subject, Draw(*number, values=values)), subject.patience)


def run_cases(
    subject: Any,
    cases: int | None,
    seed: int,
    jobs: int,
    ranks: str,
    stop_after: int,
    budget: float | None,
    show: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Runs random cases until enough have run, of which None is no number, or enough kinds of failures are known."""
    report = Report(subject.name)
    crews = [crew_of(subject, ranks) for _ in range(jobs)]
    start = time.monotonic()
    numbers = itertools.count() if cases is None else iter(range(cases))
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
                if verdict.kind == "plain":
                    raise verdict.error or RuntimeError(f"the plain model or the comparison failed:\n{verdict.message}")
                with lock:
                    report.add(verdict)
                    report.seconds = time.monotonic() - start
                    show(report)
                    if verdict.bad:
                        bad.setdefault((verdict.kind, verdict.where), verdict)
        except BaseException:
            over.set()
            raise

    try:
        _side_by_side([lambda crew=crew: work(crew) for crew in crews], over)
        for verdict in bad.values():
            _examine(subject, verdict, ranks, report)
    finally:
        for crew in crews:
            crew.stop()
    return report


class NothingJudged(RuntimeError):
    """No case of a campaign says anything about the subject."""


def require_judged(report: Report) -> None:
    """Raises where no case says anything, which is not the same as that all held."""
    if not report.judged:
        alone = report.threads_only
        raise NothingJudged(
            f"of {report.cases} cases none could be judged: {report.diverged} diverged without sharding, and "
            f"{report.cases - report.diverged} failed under the threaded group alone"
            + "".join(f"\n{v.kind} [{v.where}] {v.line}: {v.message}" for v in alone)
        )


def _side_by_side(jobs: list[Callable[[], None]], over: threading.Event) -> None:
    """Runs one job here, and several in threads. After an error or an interrupt they end the cases under way, and begin no
    other."""
    if len(jobs) == 1:
        return jobs[0]()
    with ThreadPoolExecutor(len(jobs)) as pool:
        try:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
        finally:
            over.set()


def _examine(subject: Any, verdict: Verdict, ranks: str, report: Report) -> None:
    """Shrinks a failure, and confirms it on processes: the threaded group is a stand-in with faults of its own."""
    quick = replace(subject, patience=min(subject.patience, 6.0)) if verdict.kind == "hung" else subject
    small = shrink(quick, ranks, verdict)
    for candidate in [small, verdict] if small.values != verdict.values else [verdict]:
        again = list(_again(subject, ranks, candidate))
        same = [v for v in again if v.kind == candidate.kind or v.bad]
        if same:
            how = "rank-threads" if ranks == "here" else "processes"
            script = "" if ranks == "here" else _script(subject, same[0])
            report.failures.append(Counterexample(same[0], verdict.line, len(same), len(again), how, script))
            return
    report.threads_only.append(small)


def _again(subject: Any, ranks: str, verdict: Verdict) -> Iterable[Verdict]:
    """A case that ran here is what it is."""
    if ranks == "here":
        yield verdict
        return
    judge = crew_of(subject, "processes")
    try:
        for _ in range(CONFIRM):
            yield judge.run((0, 0), verdict.values)
    finally:
        judge.stop()


def _script(subject: Subject, verdict: Verdict) -> str:
    from .script import script_of

    return script_of(subject, verdict)


def shrink(subject: Any, ranks: str, verdict: Verdict, seconds: float = 60.0) -> Verdict:
    """Makes one choice at a time simpler, as long as the case fails in the same way."""
    crew, limit = crew_of(subject, ranks), time.monotonic() + seconds  # a case that hangs costs the patience
    best = verdict
    improved = True
    try:
        while improved and time.monotonic() < limit:
            improved = False
            for name, index in [(n, i) for n in best.values if n != "data" for i in _simpler(best.values[n])]:
                if best.values.get(name, 0) <= index or time.monotonic() > limit:
                    continue
                candidate = crew.run((0, 0), {**best.values, name: index})
                if (candidate.kind, candidate.where) == (verdict.kind, verdict.where):
                    best, improved = candidate, True
    finally:
        crew.stop()
    return best


def _simpler(index: int) -> list[int]:
    return sorted({0, index // 2, index - 1} - {index, -1}) if index > 0 else []
