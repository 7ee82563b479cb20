"""Says what a difference looks like: which ranks have it, and whether the value is one that a known mistake would give."""

from __future__ import annotations

import math

import numpy as np

from .plain import References
from .plan import Plan, Subject


def explain(subject: Subject, plan: Plan, references: References, comparison, distances) -> str:
    """Some lines about the first difference of a case."""
    lines = [comparison.title]
    worst = max(distance for distance, _, _ in distances)
    lines.append(f"  {worst:.3g} away from the float64 run, where {comparison.bound:.3g} is allowed")
    for distance, owners, value in sorted(distances, key=lambda entry: entry[1]):
        state = "differ" if distance > comparison.bound else "agree"
        lines.append(
            f"  rank{'s' if len(owners) > 1 else ''} {', '.join(map(str, sorted(owners)))}: {state} (distance {distance:.3g})"
        )
    wrong = next(value for distance, _, value in distances if distance > comparison.bound)
    close = max(64 * comparison.bound, 1e-6)
    guesses = [text for text, guess in _guesses(subject, plan, references, comparison) if _near(wrong, guess, close)]
    guesses += _factor(subject, plan, comparison, wrong, close)
    lines += [f"  it looks like {text}" for text in guesses[:3]]
    if not guesses and wrong.size:
        worst_at = np.unravel_index(int(np.argmax(np.abs(wrong - comparison.truth))), wrong.shape)
        at = [int(i) for i in worst_at]
        lines.append(f"  element {at} is {wrong[worst_at]:.9g}, the plain run has {comparison.truth[worst_at]:.9g}")
    return "\n".join(lines)


def _near(value: np.ndarray, guess: np.ndarray, close: float) -> bool:
    size = float(np.linalg.norm(guess))
    return size > 0 and np.isfinite(value).all() and float(np.linalg.norm(value - guess)) <= close * size


def _factor(subject: Subject, plan: Plan, comparison, wrong: np.ndarray, close: float) -> list[str]:
    truth = comparison.truth
    square = float(np.sum(truth * truth))
    if square == 0.0 or not np.isfinite(wrong).all():
        return []
    factor = float(np.sum(wrong * truth)) / square
    if not wrong.any():
        return ["zero"]
    if abs(factor - 1) < close or not _near(wrong, factor * truth, close):
        return []
    segment = plan.segments[comparison.segment]
    sizes = {f"the size of {axis}": size for axis, size in segment.mesh.items() if size > 1}
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


def _guesses(subject: Subject, plan: Plan, references: References, comparison):
    """Values that known mistakes give."""
    s, t, name = comparison.segment, comparison.step, comparison.name
    record = references.truth[s][t]
    if comparison.kind in ("parameter", "full_tensor of"):
        before = (
            references.truth[s][t - 1].parameters if t else references.truth[s - 1][-1].parameters if s else references.start
        )
        yield "the value before the step", before[name]
        if s:
            from .train import SPOIL_STEP

            yield "the value before the load", references.start[name] + SPOIL_STEP * (1 + list(references.start).index(name))
    if comparison.kind != "gradient" or not record.terms:
        return
    zero = np.zeros_like(comparison.truth)
    value = lambda term: zero if term.get(name) is None else term[name]
    pieces = len(record.terms[0])
    by_rank = [sum((value(micro[r]) for micro in record.terms), zero) for r in range(pieces)]
    by_micro = [sum((value(term) for term in micro), zero) for micro in record.terms]
    for r in range(pieces if pieces > 1 else 0):
        yield f"the mean without the term of data-parallel rank {r}", comparison.truth - by_rank[r]
        yield f"the gradient of data-parallel rank {r} alone", by_rank[r] * pieces
        yield f"the term of data-parallel rank {r} alone", by_rank[r]
    for m in range(len(by_micro) if len(by_micro) > 1 else 0):
        yield f"the gradient of microbatch {m} alone", by_micro[m]
        yield f"the gradient without microbatch {m}", comparison.truth - by_micro[m]
    if t or s:
        before = references.truth[s][t - 1] if t else references.truth[s - 1][-1]
        if before.gradients.get(name) is not None:
            yield "this step's gradient added to the last one's", comparison.truth + before.gradients[name]
    if comparison.truth.ndim and comparison.truth.shape[0] > 1:
        yield "the same rows in reverse order", comparison.truth[::-1]
