"""Says what a difference looks like: which ranks have it, and whether the value is one that a known mistake would give."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from .plain import References


def explain(case: Any, references: References, comparison: Any, distances: list[tuple[float, list[int], torch.Tensor]]) -> str:
    """Some lines about the first difference of a case."""
    lines = [comparison.title]
    worst = max(distance for distance, _, _ in distances)
    if not comparison.bits:
        known = "float64" if references.truth(comparison.segment, comparison.step).wide else "plain"
        lines.append(f"  {worst:.3g} away from the {known} run, where {comparison.bound:.3g} is allowed")
    for distance, owners, _ in sorted(distances, key=lambda entry: entry[1]):
        state = "differ" if not distance <= comparison.bound else "agree"
        far = "" if comparison.bits else f" (distance {distance:.3g})"
        lines.append(f"  rank{'s' if len(owners) > 1 else ''} {', '.join(map(str, sorted(owners)))}: {state}{far}")
    wrong = next(value for distance, _, value in distances if not distance <= comparison.bound)
    guesses = _all_guesses(case, references, comparison, wrong)
    lines += [f"  it looks like {text}" for text in guesses[:3]]
    if wrong.numel() and (comparison.bits or not guesses):
        at = _place(comparison, wrong)
        plain, sharded = (bits_of(each.reshape(-1)[at]) for each in (comparison.runs[0], wrong))
        where = [int(i) for i in torch.unravel_index(torch.tensor(at), wrong.shape)]
        lines.append(f"  element {where}: plain {plain}, sharded {sharded}")
    return "\n".join(lines)


def _place(comparison: Any, wrong: torch.Tensor) -> int:
    """The first element whose bits differ, or the one that is farthest away."""
    if comparison.bits:
        from .judge import first_difference

        return first_difference(comparison.runs[0], wrong) or 0
    return int((wrong.double() - comparison.truth.double()).abs().nan_to_num(math.inf).argmax())


def bits_of(value: torch.Tensor) -> str:
    """A number, with its bits if it is a float."""
    if not value.is_floating_point() or value.dtype == torch.float64:
        return repr(value.item())
    number = float(value)
    return f"{number:.9g} (0x{struct.unpack('<I', struct.pack('<f', number))[0]:08x})"


def _all_guesses(case: Any, references: References, comparison: Any, wrong: torch.Tensor) -> list[str]:
    if not wrong.is_floating_point():
        return []
    close, wrong = max(64 * comparison.bound, 1e-6), wrong.double()
    named = [(text, comparison.pick(guess).double()) for text, guess in _guesses(case, references, comparison)]
    return [text for text, guess in named if _near(wrong, guess, close)] + _factor(case, comparison, wrong, close)


def _near(value: torch.Tensor, guess: torch.Tensor, close: float) -> bool:
    size = float(guess.norm())
    return size > 0 and bool(value.isfinite().all()) and float((value - guess).norm()) <= close * size


def _factor(case: Any, comparison: Any, wrong: torch.Tensor, close: float) -> list[str]:
    truth = comparison.truth.double()
    square = float((truth * truth).sum())
    if square == 0.0 or not bool(wrong.isfinite().all()):
        return []
    factor = float((wrong * truth).sum()) / square
    if not bool(wrong.any()):
        return ["zero"]
    if abs(factor - 1) < close or not _near(wrong, factor * truth, close):
        return []
    segment = case.plan.segments[comparison.segment]
    # Where a smaller `ep` shows the failure as well, a counterexample has that.
    sizes = {"ep, the number of ranks that have different experts": segment.ep} if segment.ep else {}
    sizes.update({f"the size of {axis}": size for axis, size in segment.mesh.items() if size > 1})
    sizes["the number of ranks"] = segment.ranks
    sizes["the number of microbatches"] = segment.steps[comparison.step].microbatches
    known = []
    for name, size in sizes.items():
        for text, value in (
            (name, size),
            (f"1 / {name}", 1 / size),
            (f"the square root of {name}", math.sqrt(size)),
            (f"1 / the square root of {name}", 1 / math.sqrt(size)),
            (f"the square of {name}", size**2),
        ):
            if size > 1 and abs(factor / value - 1) < close:
                known.append(text)
    return [f"{factor:.6g} times the plain run's" + (f", which is {known[0]}" if known else "")]


def _guesses(case: Any, references: References, comparison: Any):
    """Whole tensors that known mistakes give."""
    s, t = comparison.segment, comparison.step
    kind, _, name = comparison.name.partition(" of ")
    record = references.truth(s, t)
    before = references.truth(s, t - 1) if t else references.truth(s - 1, -1) if s else None
    if kind in ("parameter", "gathered parameter") and name in references.start:
        yield "the value before the step", before.values[f"parameter of {name}"] if before else references.start[name]
        if s:
            from .train import SPOIL_STEP

            yield "the value before the load", references.start[name] + SPOIL_STEP * (1 + list(references.start).index(name))
    whole = record.values.get(comparison.name)
    if kind != "gradient" or not record.terms or whole is None:
        return
    zero, pieces = torch.zeros_like(whole), len(record.terms[0])
    parts = 1 if case.plan.mode == "canonical" else pieces
    value = lambda term: zero if term.get(name) is None else term[name] / parts
    by_rank = [sum((value(micro[r]) for micro in record.terms), zero) for r in range(pieces)]
    by_micro = [sum((value(term) for term in micro), zero) for micro in record.terms]
    for r in range(pieces if pieces > 1 else 0):
        yield f"the mean without the term of data-parallel rank {r}", whole - by_rank[r]
        yield f"the gradient of data-parallel rank {r} alone", by_rank[r] * pieces
        yield f"the term of data-parallel rank {r} alone", by_rank[r]
    for m in range(len(by_micro) if len(by_micro) > 1 else 0):
        yield f"the gradient of microbatch {m} alone", by_micro[m]
        yield f"the gradient without microbatch {m}", whole - by_micro[m]
    if before and comparison.name in before.values:
        yield "this step's gradient added to the last one's", whole + before.values[comparison.name]
    if whole.dim() and whole.shape[0] > 1:
        yield "the same rows in reverse order", whole.flip(0)
