"""How a case ended, and what a rank raised."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field

FOLLOWS = r"SystemExit|Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting"


@dataclass(kw_only=True)
class Counts:
    """What was compared, of one case or of all."""

    compared: int = 0
    zeros: int = 0
    loose: int = 0
    controls: int = 0
    blind: int = 0
    narrow: int = 0
    """1 for each case whose distances were measured from the plain run, which has no kernels in float64."""


@dataclass
class Verdict(Counts):
    """How a case ended.

    kind is one of: held; differs (a value); raised (only when it is sharded); hung; crashed; refused (the engine said that it
    cannot do this); known (a finding that is listed already); diverged (the plain run is not finite, or cannot be computed as
    the case asks, so there is nothing to compare); plain (the plain run raised, so that is the user's own); vacuous (nothing
    could be compared).
    """

    kind: str
    line: str = ""
    message: str = ""
    where: str = ""
    farthest: float = 0.0
    traces: dict[int, str] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    row: tuple[str, int] = ("", 0)
    """The strategy and the number of ranks at first."""
    error: Exception | None = None

    @property
    def bad(self) -> bool:
        return self.kind in ("differs", "raised", "hung", "crashed", "vacuous")


@dataclass
class Failure:
    """What a rank raised."""

    kind: str
    text: str

    @property
    def follows(self) -> bool:
        """Whether a rank raises this because another one has ended."""
        return re.search(FOLLOWS, self.text) is not None

    @property
    def said(self) -> str:
        """The exception as it was printed, with all of its lines."""
        begin = list(re.finditer(rf"^(?:[\w.]+\.)?{re.escape(self.kind)}(?:: |$)", self.text, re.MULTILINE))
        return self.text[begin[-1].start() :].strip() if begin else self.text.strip().splitlines()[-1]

    @property
    def place(self) -> str:
        """The kind of the exception and the function that raised it, to tell one failure from another."""
        frames = re.findall(r'File "[^"]*?([^/"]+)", line \d+, in (\S+)', self.text)
        return f"{self.kind} in {frames[-1][0]}:{frames[-1][1]}" if frames else self.kind


def failure_of(error: BaseException) -> Failure:
    return Failure(type(error).__name__, "".join(traceback.format_exception(error)))
