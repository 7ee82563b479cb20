"""Experts of several ranks in plain PyTorch: rows go to the ranks of their experts by `all_to_all_single`, and back."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.distributed as dist


class Exchange(torch.autograd.Function):
    """Sends so many rows to each rank of a group. Their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.way_back = received, sent, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return Exchange.apply(gradient, *ctx.way_back), None, None, None


def exchanged(plain: Callable, count: int, group: Any) -> Callable:
    """The forward of a module of experts whose ranks hold equal parts of `count` experts, in the order of ranks.

    `plain(x, experts, weights)` is that of a module which holds this rank's experts alone, as in `models.Experts`.
    """
    ranks = dist.get_world_size(group)
    if count % ranks:
        raise ValueError(f"{ranks} ranks cannot have equal parts of {count} experts")

    def forward(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat = experts.flatten()
        order, counts = flat.argsort(stable=True), flat.bincount(minlength=count)
        arriving = torch.empty_like(counts)  # of each rank, for each of this rank's experts
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = counts.view(ranks, -1).sum(1).tolist(), arriving.view(ranks, -1).sum(1).tolist()
        rows = Exchange.apply(x.index_select(0, order // experts.shape[1]), sent, received, group)
        own = torch.arange(count // ranks, device=x.device).repeat(ranks).repeat_interleave(arriving).unsqueeze(1)
        given = plain(rows, own, torch.ones_like(own, dtype=x.dtype))
        home = Exchange.apply(given, received, sent, group).index_select(0, order.argsort())
        return (home.view(*experts.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(1)

    return forward
