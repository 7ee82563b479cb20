"""Values of a sharded run beside those of plain ones: bit for bit, or as far from the run in float64 as plain runs are."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any, Callable, Optional

import torch

# How many times as far from the run in float64 as plain runs are a sharded one may be, and the distance that counts at least.
TOLERANCE = 8.0
DISTANCE_MIN = 2.0**-23


@dataclasses.dataclass
class Found:
    """A value that differs."""

    what: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step + 1}: {self.what} on rank {self.rank}"


class Differs(Exception):
    """Ends a run whose value differs."""

    def __init__(self, found: Found):
        super().__init__(str(found))
        self.found = found


@dataclasses.dataclass
class Expected:
    """What the plain run had at a step; in fast mode with runs that tell how far roundings carry, and one in float64."""

    losses: "list[list[torch.Tensor]]"
    gradients: "dict[str, torch.Tensor]"
    norm: float
    parameters: "dict[str, torch.Tensor]"
    state: "dict[str, dict[str, torch.Tensor]]"
    evaluated: "list[torch.Tensor]"
    scale: float = 0.0
    """Of the loss, in this step; 0 without one."""
    skipped: bool = False
    """Because a scaled gradient was not finite; there are no gradients then, and no norm."""


def bits(value: Any) -> str:
    """A number with its bits."""

    number = float(value)
    return f"{number:.9g} (0x{struct.unpack('<I', struct.pack('<f', number))[0]:08x})"


def first_difference(expected: torch.Tensor, got: torch.Tensor) -> Optional[int]:
    """The first element whose bits differ; -0 and +0 do, a NaN always does."""
    if expected.dtype != got.dtype:
        return 0
    integers = {4: torch.int32, 8: torch.int64, 2: torch.int16}[expected.element_size()]
    a, b = (t.detach().contiguous().reshape(-1).view(integers) for t in (expected, got))
    wrong = (a != b) | ~torch.isfinite(got.detach().reshape(-1))
    where = wrong.nonzero()
    return int(where[0]) if where.numel() else None


def distance(a: torch.Tensor, truth: torch.Tensor) -> float:
    """The Frobenius norm of the difference, relative to the truth."""
    scale = truth.norm().item()
    return (a.double() - truth).norm().item() / (scale if scale > 0 else 1.0)


class Comparison:
    """Compares values of a sharded run with plain ones, and counts them."""

    def __init__(self, plain: Expected, others: "list[Expected]", truth: Optional[Expected], rank: int, step: int):
        self.plain, self.others, self.truth, self.rank, self.step = plain, others, truth, rank, step
        self.values = 0
        self.farthest = 0.0

    def value(self, what: str, pick: Callable[[Expected], torch.Tensor], got: torch.Tensor) -> None:
        expected = pick(self.plain)
        self.values += got.numel()
        if self.truth is None:
            at = first_difference(expected, got)
            if at is not None:
                raise Differs(
                    Found(
                        f"{what}[{at}]: plain {bits(expected.reshape(-1)[at])}, sharded {bits(got.reshape(-1)[at])}",
                        self.rank,
                        self.step,
                    )
                )
            return
        truth = pick(self.truth).double()
        allowed = max([distance(pick(run), truth) for run in [self.plain, *self.others]] + [DISTANCE_MIN])
        far = distance(got, truth)
        # Negated, so that a NaN is a difference.
        if not far <= TOLERANCE * allowed and not (truth.norm().item() < 1e-12 and got.norm().item() < 1e-6):
            raise Differs(
                Found(
                    f"{what}: its distance from the run in float64 is {far:.3g}, {far / allowed:.1f} times that of plain runs",
                    self.rank,
                    self.step,
                )
            )
        self.farthest = max(self.farthest, far / allowed if math.isfinite(far) else 0.0)

    def pieces(self, kind: str, pick: Callable[[Expected], "dict[str, torch.Tensor]"], pieces: list) -> None:
        for piece in pieces:
            self.value(
                f"{kind} of {piece.name}[{piece.begin}:{piece.end}]",
                lambda run, piece=piece: pick(run)[piece.name].reshape(-1)[piece.begin : piece.end],
                piece.data,
            )
