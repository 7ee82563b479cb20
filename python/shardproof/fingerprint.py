"""A check, after each step, that ranks hold the same bits of what they hold in copies."""

from __future__ import annotations

from . import _C
from .optim import Optimizer
from .sharded import Sharded


class FingerprintCheck:
    """Compares fingerprints of replicas: of parameters, of main parameters and of the optimizer's state.

    A wrong sum over some ranks, an update that one rank missed and faulty memory leave replicas different, and the loss falls
    all the same. The check also finds padding that was written, and a shard that an update should have moved and did not.

    Parameters
    ----------
    sharded : Sharded
        The model.
    optimizer : Optimizer
        One of the library's, as `adamw` makes it. The state of a ``torch.optim`` optimizer is not known to the library.

    Examples
    --------
    >>> check = shardproof.FingerprintCheck(sharded, optimizer)
    >>> optimizer.step()
    >>> check.step()
    """

    def __init__(self, sharded: Sharded, optimizer: Optimizer):
        if not isinstance(optimizer, Optimizer):
            name = type(optimizer).__name__
            raise TypeError(
                f"FingerprintCheck takes an optimizer of the library, as shardproof.adamw makes it, got {name}"
            )
        self.native = _C.FingerprintCheck(sharded.native, optimizer.native)

    def step(self) -> None:
        """Compare. Collective, between steps.

        Raises
        ------
        FailedCheck
            On every rank, with one message. It names the step, the tensor and two ranks that disagree.
        """
        self.native.step()
