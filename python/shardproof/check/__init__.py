"""Does sharded code train what the plain model trains?

`shardproof.check(parallelize, make_model, make_batch, loss)` trains the plain model and the sharded one over random histories
and compares them. See docs/check.md.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Callable, Mapping, Sequence

from .draw import Draw, parse_line
from .verdict import Verdict
from .plan import Subject
from .runner import Counterexample, Report, crew_of, require_judged, run_cases
from .train import Sharded
from .verdict import Verdict

__all__ = ["Counterexample", "Draw", "Report", "Sharded", "Subject", "Verdict", "check", "replay_line"]


def check(
    parallelize: Callable[..., Any] | Subject,
    make_model: Callable[..., Any] | None = None,
    make_batch: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    *,
    cases: int = 100,
    seed: int = 0,
    jobs: int = 1,
    ranks: str = "threads",
    stop_after: int = 3,
    budget: float | None = None,
    replay: str | None = None,
    mesh: Mapping[str, Sequence[int]] | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    **settings: Any,
) -> Report | Verdict:
    """Trains what `parallelize` makes of random models beside the plain models, and reports every difference.

    Parameters
    ----------
    parallelize
        `parallelize(model, mesh, **options)` returns the module to train, or a `Sharded` where that does not say enough.
        It may also be a `Subject`, which holds this and the following three.
    make_model
        `make_model()` or `make_model(draw)` makes the plain model. Sizes taken from `draw.integer(name, low, high)` vary and
        shrink.
    make_batch
        `make_batch(generator, count)` makes `count` samples: inputs and targets whose first dim is the sample.
    loss
        `loss(output, target)`, a mean over samples.
    cases, seed
        How many random cases, and which.
    jobs
        How many processes work side by side.
    ranks
        "threads" (fast; every failure is confirmed on processes) or "processes" (gloo over loopback).
    stop_after, budget
        Stops after so many kinds of failures, or after so many seconds.
    replay
        The line of a printed case: runs only this case and returns its verdict.
    mesh
        Axis name -> sizes to draw from. Ranks along axes that begin with "dp" get different samples. The default is dp of 1
        to 4.
    options
        Keyword argument of `parallelize` -> values to draw from, the simplest first. `precision` is the dtype that it
        computes in.
    settings
        Further fields of `Subject`, such as `ep`, the numbers of ranks that may share experts.

    Returns
    -------
    Report
        `report.ok` says whether all held; `print(report)` shows counts and counterexamples with a line that replays each.

    Raises
    ------
    RuntimeError
        Where the plain model fails, or no case could be judged.
    """
    if isinstance(parallelize, Subject):
        subject = parallelize
    else:
        if make_model is None or make_batch is None or loss is None:
            raise TypeError("check needs parallelize, make_model, make_batch and loss")
        if mesh is not None:
            settings["mesh"] = mesh
        if options is not None:
            settings["options"] = options
        settings.setdefault("name", getattr(parallelize, "__name__", "check"))
        subject = Subject(parallelize, make_model, make_batch, loss, **settings)
    if replay is not None:
        return replay_line(subject, replay, ranks)
    report = run_cases(subject, cases, seed, jobs, ranks, stop_after, budget)
    require_judged(report)
    return report


def replay_line(subject: Subject, line: str, ranks: str = "processes") -> Verdict:
    """Runs the case of a printed line."""
    crew = crew_of(subject, ranks)
    try:
        verdict = crew.run((0, 0), parse_line(line))
        if verdict.kind == "plain":
            raise RuntimeError(f"the plain model or the comparison failed:\n{verdict.message}")
        return verdict
    finally:
        crew.stop()


class _CallableModule(types.ModuleType):
    """`shardproof.check` is this module, and `shardproof.check(...)` is the function."""

    def __call__(self, *positional: Any, **settings: Any) -> Report | Verdict:
        return check(*positional, **settings)


sys.modules[__name__].__class__ = _CallableModule
