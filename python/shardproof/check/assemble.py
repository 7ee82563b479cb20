"""Puts the pieces of all ranks together, by what the placements mean and without any code of the engine.

A dim is cut as `torch.chunk` cuts it. Where an axis is strided, the axes after it cut first: FSDP2 over tensor parallelism
cuts each rank's tensor-parallel part once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Piece:
    """What one rank holds of one tensor: what the placements on a mesh say, or so many elements of the flat tensor."""

    value: torch.Tensor
    shape: tuple[int, ...] = ()
    placements: tuple[tuple, ...] = ()
    mesh: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    """The ranks of the mesh that the tensor lies on."""
    flat: tuple[int, int] | None = None
    """From which element to which."""


class Misplaced(Exception):
    """The pieces do not make up the tensor."""


def assemble(pieces: dict[int, Piece | None], shape: tuple[int, ...]) -> list[tuple[list[int], torch.Tensor]]:
    """The whole tensor of every replica, with the ranks that hold it. Replicas of the same values are one entry."""
    replicas: dict[tuple, list[int]] = {}
    for rank, piece in pieces.items():
        if piece is None:
            continue
        if piece.shape != tuple(shape):
            raise Misplaced(f"rank {rank} says that the shape is {piece.shape}, the plain model's is {tuple(shape)}")
        key = (
            tuple(c for c, p in zip(piece.coordinate, piece.placements) if p[0] == "replicate") if piece.placements else (rank,)
        )
        replicas.setdefault((piece.group, key), []).append(rank)
    wholes: list[tuple[list[int], torch.Tensor]] = []
    for ranks in replicas.values():
        whole = _whole({rank: pieces[rank] for rank in ranks}, tuple(shape))
        same = next((entry for entry in wholes if same_values(entry[1], whole)), None)
        if same:
            same[0].extend(ranks)
        else:
            wholes.append((list(ranks), whole))
    return wholes


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _whole(pieces: dict[int, Piece], shape: tuple[int, ...]) -> torch.Tensor:
    whole = torch.zeros(shape, dtype=next(iter(pieces.values())).value.dtype)
    held = torch.zeros(shape, dtype=torch.int64)
    copies = 1
    for rank, piece in pieces.items():
        region, copies = _region(piece)
        want = tuple(r.stop - r.start for r in region)
        if tuple(piece.value.shape) != want:
            held_shape = tuple(piece.value.shape)
            raise Misplaced(f"rank {rank} holds shape {held_shape}, its placements {piece.placements} mean {want}")
        whole[region] += piece.value
        held[region] += 1
    if bool((held != copies).any()):
        where = tuple((held != copies).nonzero()[0].tolist())
        raise Misplaced(f"element {list(where)} is held by {int(held[where])} ranks of {sorted(pieces)}, expected {copies}")
    if any(p[0] == "partial" and p[1] == "avg" for p in next(iter(pieces.values())).placements):
        whole /= copies
    return whole


def _region(piece: Piece) -> tuple[tuple[slice, ...], int]:
    """The part of the whole tensor that a piece is, and how many ranks add to it."""
    start = [0] * len(piece.shape)
    stop = list(piece.shape)
    copies = 1
    cuts = []
    for axis, placement in enumerate(piece.placements):
        if placement[0] in ("shard", "strided"):
            cuts.append((placement[0] == "strided", axis, placement[1]))
        elif placement[0] == "partial":
            copies *= piece.mesh[axis]
        elif placement[0] != "replicate":
            raise Misplaced(f"placement {placement} is not known")
    for _, axis, dim in sorted(cuts):
        length = stop[dim] - start[dim]
        chunk = -(-length // piece.mesh[axis])
        first = min(length, chunk * piece.coordinate[axis])
        last = min(length, chunk * (piece.coordinate[axis] + 1))
        start[dim], stop[dim] = start[dim] + first, start[dim] + last
    return tuple(slice(a, b) for a, b in zip(start, stop)), copies
