"""Averages of the parameters of a sharded model over the steps of a run."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch

from . import _C
from .sharded import Sharded


class Ema:
    """Exponential moving averages of main parameters. Each rank averages its own shards.

    They begin as the parameters are now. As long as the Ema lives, `save` and `Manager.save` save them with the model, as
    "<name>.<parameter>", and `load` puts them back, on any mesh.

    Parameters
    ----------
    sharded : Sharded
        The model.
    decay : float
        Of the averages, in [0, 1).
    name : str
        What the averages are called in checkpoints. Two Emas of one model have different names.

    Examples
    --------
    >>> ema = shardproof.Ema(sharded, decay=0.999)
    >>> optimizer.step()
    >>> ema.update()
    >>> with ema.swapped_in():
    ...     evaluate(model)
    """

    def __init__(self, sharded: Sharded, decay: float = 0.999, *, name: str = "ema"):
        self.sharded = sharded
        self.native = _C.Ema(sharded.native, decay, name)
        self.name = name

    def update(self) -> None:
        """After a step of the optimizer: ``average = decay * average + (1 - decay) * parameter``, of those that train."""
        self.native.update()

    def set_decay(self, decay: float) -> None:
        """Change the decay from the next update on."""
        self.native.set_decay(decay)

    def pieces(self) -> "list[_C.Piece]":
        """What this rank holds of the averages."""
        return self.native.pieces()

    def gather(self) -> "dict[str, torch.Tensor]":
        """Whole averages by name, on every rank, in the main dtype. Collective."""
        return self.native.gather()

    def gather_one(self, name: str) -> torch.Tensor:
        """The whole average of one parameter. Collective; every rank passes the same name."""
        return self.native.gather_one(name)

    def write(self, values: "dict[str, torch.Tensor]") -> None:
        """Write whole values into the averages, by name. Collective; every rank passes the same values."""
        self.native.write({name: value.detach() for name, value in values.items()})

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within, the model computes with the averages. Afterwards it has its parameters back, also after an exception.

        Collective. A rank that alone raises an exception puts its parameters back without waiting for the others.
        """
        self.native.swap_in()
        self.sharded._note_published()
        try:
            yield
        except BaseException:
            self.native.put_back()
            self.sharded._note_published()
            raise
        self.native.swap_out()
        self.sharded._note_published()
