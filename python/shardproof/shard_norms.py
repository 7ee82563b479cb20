"""The norm of gradients that are DTensors, on one mesh or several, and of plain ones beside them."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor

from . import _C
from .sharded import Sharded
from .shard_parameter import shard_of


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: "float | str" = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip gradients by one norm over all of them, as torch.nn.utils.clip_grad_norm_, and return it. Collective.

    Parameters that are not sharded may be among the given ones. Their gradients must be the same on every rank. PyTorch's own
    function takes shards as well, but for the infinity norm where a rank has no rows of a parameter.
    """
    order = float(norm_type)
    given = [shard_of(each) for each in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)]
    if not max_norm > 0:
        raise _C.Error(f"[fsdp] clip_grad_norm_: max_norm must be above 0, got {max_norm}; zero_grad() drops gradients")
    shards, plain = ([p for p in given if isinstance(p, DTensor) is is_shard] for is_shard in (True, False))
    by_cut: "dict[Any, list[torch.Tensor]]" = {}
    for gradient in (parameter.grad for parameter in shards if parameter.grad is not None):
        by_cut.setdefault((gradient.device_mesh, gradient.placements), []).append(gradient._local_tensor)
    norms = [_norm_along(cut, gradients, order) for cut, gradients in by_cut.items()]
    if plain:  # on ranks without gradients of them, too, where no other rank has any
        of_plain = [parameter.grad for parameter in plain if parameter.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(of_plain, order) if of_plain else torch.tensor(0.0))
    if shards and plain:
        _require_same(norms[-1], len(plain), vars(shards[0])["_shardproof_parameter"].sharded())
    total = torch.linalg.vector_norm(torch.stack(norms), order) if len(norms) > 1 else norms[0] if norms else torch.tensor(0.0)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"[fsdp] clip_grad_norm_: the norm of order {order} is {total.item()}, and nothing is clipped")
    alike: "dict[Any, list[torch.Tensor]]" = {}  # foreach kernels take tensors of one mesh
    for parameter in given:
        alike.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    for each in alike.values():
        torch.nn.utils.clip_grads_with_norm_(each, max_norm, total)
    return total


def _norm_along(cut: Any, gradients: "list[torch.Tensor]", order: float) -> torch.Tensor:
    """The norm of what the ranks of a cut have together."""
    held = [gradient for gradient in gradients if gradient.numel()]
    norm = torch.nn.utils.get_total_norm(held, order) if held else gradients[0].new_zeros(())
    mesh, placements = cut
    for dim in (dim for dim, placement in enumerate(placements) if not placement.is_replicate()):
        if order == float("inf"):
            norm = all_reduce(norm, "max", (mesh, dim))
        else:
            norm = all_reduce(norm**order, "sum", (mesh, dim)) ** (1.0 / order)
    return norm


def _require_same(norm: torch.Tensor, count: int, sharded: Optional[Sharded]) -> None:
    of_ranks = sharded.comms.world.gather_texts(str(norm.item())) if sharded is not None else []
    if len(set(of_ranks)) > 1:
        raise _C.Error(
            f"[fsdp] clip_grad_norm_: {count} of the parameters are not sharded, and the norms of their gradients are "
            f"{', '.join(of_ranks)} on the ranks, so no one factor fits. Average these gradients over the ranks before, "
            "or call fully_shard of the root, too, without ignored_params"
        )
