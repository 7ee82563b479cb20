"""`python -m shardproof.check --engine torch-fsdp2 --cases 300`: checks an engine of PyTorch, or replays one case of it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings

from . import check
from .engines import ENGINES, with_known
from .runner import NothingJudged


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shardproof.check", description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--ranks", choices=("threads", "processes"), help="threads, and processes for a replay, if not given")
    parser.add_argument("--stop-after", type=int, default=3, help="stop after so many kinds of failures")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    parser.add_argument("--scripts", help="write the script of each counterexample into this folder")
    parser.add_argument("--replay", help="the line of a case: run only this case")
    parser.add_argument("--all", action="store_true", help="draw what is known to fail as well (docs/findings)")
    arguments = parser.parse_args()
    subject = with_known(arguments.engine) if arguments.all else ENGINES[arguments.engine]
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    if arguments.replay is not None:
        verdict = check(subject, replay=arguments.replay, ranks=arguments.ranks or "processes")
        print(f"{verdict.kind} {verdict.where}\n{verdict.message}")
        for rank, trace in sorted(verdict.traces.items()):
            print(f"rank {rank}:\n{trace}")
        return int(verdict.bad)
    start = time.process_time()
    try:
        report = check(
            subject,
            cases=arguments.cases,
            seed=arguments.seed,
            jobs=arguments.jobs,
            ranks=arguments.ranks or "threads",
            stop_after=arguments.stop_after,
            budget=arguments.seconds,
        )
    except NothingJudged as error:
        print(f"shardproof.check: {error}", file=sys.stderr)
        return 2
    print(report)
    for number, failure in enumerate(report.failures):
        if arguments.scripts and failure.script:
            os.makedirs(arguments.scripts, exist_ok=True)
            with open(os.path.join(arguments.scripts, f"{arguments.engine}-{arguments.seed}-{number}.py"), "w") as file:
                file.write(failure.script)
    cases = max(1, report.cases)
    print(
        f"  {report.cpu_seconds / cases:.3f} CPU seconds a case in the ranks, {time.process_time() - start:.1f} in the parent"
    )
    return int(not report.ok)


if __name__ == "__main__":
    sys.exit(main())
