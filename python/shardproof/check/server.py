"""Trains what the C++ harness sends, by messages on the standard streams: ``python -m shardproof.check.server``.

The first message is the source of golden/oracle.py. Then each is answered: ("facts", engine) by the reason why the engine
cannot run here and whether it takes `ep`, and ("train", setup, run) by an error, or the steps, as given.py says.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from types import SimpleNamespace

from .crew import ProcessCrew, ThreadCrew
from .given import PATIENCE, GivenCase, engine_of
from .verdict import Verdict

CREWS = {"threads": ThreadCrew, "processes": ProcessCrew}


def facts(engine: str) -> tuple[str, bool]:
    try:
        return "", engine_of(engine).takes_ep
    except LookupError as error:
        return str(error.args[0]), False


def train(crews, setup: str, run):
    case = GivenCase(crews.oracle, setup, run)
    try:
        result = crews.of(case.setup["ranks"]).run(setup, run)
    except RuntimeError as error:
        return str(error), None
    return (result.message, None) if isinstance(result, Verdict) else ("", result)


class Crews:
    """Started when they are first needed, and kept."""

    def __init__(self, oracle: SimpleNamespace) -> None:
        self.oracle = oracle
        self.made: dict[str, ThreadCrew | ProcessCrew] = {}

    def of(self, ranks: str) -> ThreadCrew | ProcessCrew:
        if ranks not in self.made:
            self.made[ranks] = CREWS[ranks](lambda setup, run: GivenCase(self.oracle, setup, run), PATIENCE)
        return self.made[ranks]

    def stop(self) -> None:
        for crew in self.made.values():
            crew.stop()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness ends this process by closing its stream
    sys.path.insert(0, os.getcwd())
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what engines print is no answer
    names: dict = {"__name__": "oracle"}
    exec(compile(pickle.load(sys.stdin.buffer), "golden/oracle.py", "exec"), names)  # noqa: S102
    crews = Crews(SimpleNamespace(**names))
    try:
        while True:
            what, *rest = pickle.load(sys.stdin.buffer)
            pickle.dump(facts(*rest) if what == "facts" else train(crews, *rest), answers)
            answers.flush()
    except EOFError:
        crews.stop()


if __name__ == "__main__":
    main()
