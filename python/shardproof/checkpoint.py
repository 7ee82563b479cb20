"""Checkpoints that any mesh and strategy loads, and that torch.distributed.checkpoint opens."""

from __future__ import annotations

from typing import Any, Optional

import torch  # noqa: F401  loads the libraries of the extension module

from . import _C
from .optim import LossScaler, Optimizer
from .sharded import Sharded


def _native(optimizer: Optional[Optimizer]) -> Optional[_C.Optimizer]:
    if optimizer is None or isinstance(optimizer, Optimizer):
        return None if optimizer is None else optimizer.native
    raise _C.Error(
        f"[checkpoint] expected an optimizer of shardproof, got a {type(optimizer).__name__}. Checkpoints save the state "
        "of shardproof.sgd, adam, adamw, lion and muon; of another optimizer, save sharded.state_dict() and its own"
    )


def save(
    directory: str,
    sharded: Sharded,
    optimizer: Optional[Optimizer] = None,
    *,
    step: int = 0,
    values: Optional[dict] = None,
    of_rank: Optional[dict] = None,
    scaler: Optional[LossScaler] = None,
    overwrite: bool = False,
) -> None:
    """Save a checkpoint, whole and durable or not at all. Collective.

    Its names are those of FSDP2's ``get_state_dict``, and ``torch.distributed.checkpoint`` reads it.

    Parameters
    ----------
    directory : str
        Where to, on a file system that all ranks see.
    sharded : Sharded
        The model.
    optimizer : Optimizer, optional
        Its optimizer.
    step : int
        The caller's count of steps.
    values : dict, optional
        Whatever else is the same on every rank: numbers, texts, lists and dicts. Those of rank 0 are saved.
    of_rank : dict, optional
        This rank's own.
    scaler : LossScaler, optional
        A loss scaler.
    overwrite : bool
        Replace a directory that exists; otherwise it is an error.
    """
    _C.save(str(directory), sharded.native, _native(optimizer), step, values or {}, of_rank or {}, scaler, overwrite)


def load(
    directory: str,
    sharded: Sharded,
    optimizer: Optional[Optimizer] = None,
    *,
    scaler: Optional[LossScaler] = None,
    partial: bool = False,
) -> "dict[str, Any]":
    """Load a checkpoint, which may have been saved on another mesh, under another strategy, or by FSDP2. Collective.

    Parameters
    ----------
    directory : str
        The checkpoint.
    sharded, optimizer, scaler
        What to fill.
    partial : bool
        Load what fits, and list the rest under "skipped".

    Returns
    -------
    dict
        "step", "values", "of_rank" and "skipped".
    """
    return _C.load(str(directory), sharded.native, _native(optimizer), scaler, partial)


class Manager:
    """The checkpoints of one run: DIRECTORY/step_N, saved in the background if asked, the last few kept.

    Parameters
    ----------
    directory : str
        Where the checkpoints are.
    keep : int
        How many are kept. 0: all.
    in_background : bool
        Whether `save` returns when the values are copied.
    overwrite : bool
        Whether a step that is there already is replaced.
    """

    def __init__(self, directory: str, *, keep: int = 0, in_background: bool = False, overwrite: bool = False):
        self.native = _C.Manager(str(directory), keep, in_background, overwrite)

    def save(
        self,
        sharded: Sharded,
        optimizer: Optional[Optimizer],
        step: int,
        *,
        values: Optional[dict] = None,
        of_rank: Optional[dict] = None,
        scaler: Optional[LossScaler] = None,
    ) -> bool:
        """Save step_N. False when it was refused because the save before is still being written. Collective."""
        return self.native.save(sharded.native, _native(optimizer), step, values or {}, of_rank or {}, scaler)

    def poll(self) -> bool:
        """Commit the save under way if all ranks have written it. True when none is under way. Collective."""
        return self.native.poll()

    def wait(self) -> None:
        """Commit the save under way, waiting for it. Collective."""
        self.native.wait()

    def load_latest(
        self,
        sharded: Sharded,
        optimizer: Optional[Optimizer] = None,
        *,
        scaler: Optional[LossScaler] = None,
        partial: bool = False,
    ) -> "Optional[dict[str, Any]]":
        """Load the last checkpoint that was committed, as `load` does. None when there is none. Collective."""
        return self.native.load_latest(sharded.native, _native(optimizer), scaler, partial)

    def steps(self) -> "list[int]":
        """What is committed."""
        return self.native.steps()

    def latest(self) -> Optional[int]:
        """The last step that is committed."""
        return self.native.latest()
