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


class Differs(Exception):
    """Ends a run whose value differs."""


@dataclasses.dataclass
class Expected:
    """What a plain run had at a step; what is a list of dicts has one for each data-parallel rank."""

    seen: "list[list[dict[str, Any]]]"
    """Of each microbatch: the loss, the results, and the arguments afterwards."""
    gradients: "dict[str, torch.Tensor]"
    norm: float
    parameters: "dict[str, torch.Tensor]"
    """By each of their names."""
    state: "dict[str, dict[str, torch.Tensor]]"
    """Of the optimizer, as [slot][name]."""
    after: "list[dict[str, Any]]"
    """What models hold besides parameters after the step."""
    evaluated: "list[dict[str, Any]]"
    scale: float = 0.0
    """Of the loss, in this step; 0 without one."""
    skipped: bool = False
    """Because a scaled gradient was not finite; there are no gradients then, and no norm."""
    hooks: "list[str]" = dataclasses.field(default_factory=list)
    """What the optimizer called in this step."""
    wide: bool = False
    """In float64."""


def bits(value: torch.Tensor) -> str:
    """A number with its bits."""
    if value.is_complex() or value.dtype == torch.float64:
        return repr(value.item())
    number = float(value)
    return f"{number:.9g} (0x{struct.unpack('<I', struct.pack('<f', number))[0]:08x})"


def first_difference(expected: torch.Tensor, got: torch.Tensor) -> Optional[int]:
    """The first element whose bits differ; -0 and +0 do, and NaN is NaN."""
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return 0
    a, b = expected.detach(), got.detach()
    wrong = a != b
    if a.is_floating_point():
        wrong = (wrong | (torch.signbit(a) != torch.signbit(b))) & ~(a.isnan() & b.isnan())
    where = wrong.reshape(-1).nonzero()
    return int(where[0]) if where.numel() else None


def distance(a: torch.Tensor, truth: torch.Tensor) -> float:
    """The Frobenius norm of the difference, relative to the truth; infinite where other elements are finite."""
    if a.shape != truth.shape or bool((a.isfinite() != truth.isfinite()).any()):
        return math.inf
    kept = truth.isfinite()
    a, truth = a.double()[kept], truth.double()[kept]
    scale = truth.norm().item()
    return (a - truth).norm().item() / (scale if scale > 0 else 1.0)


class Comparison:
    """Compares values of a sharded run with plain ones, and counts them.

    Parameters
    ----------
    runs : list of Expected
        The plain run; in mode fast then those that round otherwise, and at last the one in float64, if there are kernels.
    with_tolerance : bool
        Whether distances are compared, and not bits. Without a run in float64 they are those from the plain run.
    rank, step : int
        For messages.
    ignored : set of str
        Names of facts that differ from one plain model to the next.
    """

    def __init__(self, runs: "list[Expected]", with_tolerance: bool, rank: int, step: int, ignored: "frozenset[str]"):
        self.ignored = ignored
        self.plain, self.rank, self.step = runs[0], rank, step
        self.others = [run for run in runs[1:] if not run.wide]
        self.truth = (runs[-1] if runs[-1].wide else runs[0]) if with_tolerance else None
        self.values = 0
        self.farthest = 0.0

    def differs(self, what: str) -> Differs:
        return Differs(f"step {self.step + 1}: {what} on rank {self.rank}")

    def facts(self, pick: Callable[[Expected], "dict[str, Any]"], got: "dict[str, Any]", only: str = "") -> None:
        """Compares what is seen of a model: tensors and plain values by name. `only` those whose name begins so."""
        expected = pick(self.plain)
        for name in [name for name in [*expected, *got] if name.startswith(only) and name not in self.ignored]:
            if name not in got or name not in expected:
                raise self.differs(f"{name} is there only {'without' if name in expected else 'with'} sharding")
            if not all(name in pick(run) for run in [*self.others, self.truth or self.plain]):
                continue  # plain runs that round otherwise lack it
            if isinstance(got[name], torch.Tensor) and isinstance(expected[name], torch.Tensor):
                self.value(name, lambda run, name=name: pick(run)[name], got[name])
            elif repr(expected[name]) != repr(got[name]) and all(pick(run)[name] == expected[name] for run in self.others):
                raise self.differs(f"{name}: plain {expected[name]!r}, sharded {got[name]!r}")

    def bound(self, pick: Callable[[Expected], torch.Tensor]) -> "tuple[torch.Tensor, float]":
        """The truth of a value, and how far from it plain runs are."""
        truth = pick(self.truth)
        distances = [distance(pick(run), truth) for run in [self.plain, *self.others]]
        return truth, max([*distances, DISTANCE_MIN])

    def value(self, what: str, pick: Callable[[Expected], torch.Tensor], got: torch.Tensor) -> None:
        expected = pick(self.plain)
        self.values += got.numel()
        if self.truth is None or not expected.is_floating_point():
            at = first_difference(expected, got)
            if at is None or any(first_difference(expected, pick(run)) is not None for run in self.others):
                return
            if expected.shape != got.shape or expected.dtype != got.dtype:
                says = f"{what}: plain {tuple(expected.shape)} {expected.dtype}, sharded {tuple(got.shape)} {got.dtype}"
            elif expected.is_floating_point() or expected.is_complex():
                says = f"{what}[{at}]: plain {bits(expected.reshape(-1)[at])}, sharded {bits(got.reshape(-1)[at])}"
            else:
                says = f"{what}[{at}]: plain {expected.reshape(-1)[at].item()}, sharded {got.reshape(-1)[at].item()}"
            raise self.differs(says)
        truth, allowed = self.bound(pick)
        far = distance(got, truth)
        # Negated, so that a NaN is a difference.
        if not far <= TOLERANCE * allowed and not (truth.norm().item() < 1e-12 and got.norm().item() < 1e-6):
            from_where = "float64" if self.truth.wide else "plain PyTorch"
            raise self.differs(
                f"{what}: its distance from the run in {from_where} is {far:.3g}, {far / allowed:.1f} times that of plain runs"
            )
        self.farthest = max(self.farthest, far / allowed if math.isfinite(far) else 0.0)

    def pieces(self, kind: str, pick: Callable[[Expected], "dict[str, torch.Tensor]"], pieces: list) -> None:
        for piece in pieces:
            self.value(
                f"{kind} of {piece.name}[{piece.begin}:{piece.end}]",
                lambda run, piece=piece: pick(run)[piece.name].reshape(-1)[piece.begin : piece.end],
                piece.data,
            )
