"""What keeps experts equally busy, for models whose routers are their own: losses, and the biases that transformers has."""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Optional

import torch
from torch import nn

from . import _C

_BIAS = "e_score_correction_bias"


def called_with(module: nn.Module, args: tuple, kwargs: dict, in_order: bool = False) -> tuple:
    """What a module of experts is called with, (x, experts [tokens, choices], ..), by whatever names."""
    kind = type(module).__name__
    try:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs) if kwargs else None
    except TypeError as error:
        raise _C.Error(f"[experts] a {kind} is called otherwise than its forward takes: {error}") from None
    by_name = bound.kwargs if bound else {}
    if by_name and in_order:
        raise _C.Error(
            f"[experts] a {kind} takes {', '.join(by_name)} by keyword alone. Let its forward take (x, experts, weights) in "
            "this order, by whatever names"
        )
    given = (*bound.args[1:], *by_name.values()) if bound else args
    experts = given[1] if len(given) > 1 else None
    if not isinstance(experts, torch.Tensor) or experts.dim() != 2 or experts.dtype != torch.int64:
        said = f"{list(experts.shape)} of {experts.dtype}" if isinstance(experts, torch.Tensor) else type(experts).__name__
        raise _C.Error(
            f"[experts] a {kind} has to be called with (x, experts [tokens, choices] of int64, ..), and its second argument is "
            f"{said}"
        )
    return given


def balance_loss(
    logits: torch.Tensor,
    experts: torch.Tensor,
    *,
    sigmoid: bool = False,
    comm: Optional[_C.Comm] = None,
    parts: Optional[_C.Comm] = None,
) -> torch.Tensor:
    """The loss of DeepSeek-V3 that falls as tokens spread over experts, a sum over tokens; multiply it by what it shall weigh.

    Each token adds the sum over experts e of ``f_e * p_e``. p_e is its probability of e, and f_e, a constant, the number of
    experts times the part of the choices that went to e: of the token's sequence, or with a comm of all tokens of its ranks.
    A sequence has to be whole, or ``parts`` has to say who has the rest: a part would be taken for a sequence.

    Parameters
    ----------
    logits : torch.Tensor
        [sequences, tokens, experts], as the router computes them.
    experts : torch.Tensor
        [sequences, tokens, choices]: which experts each token chose.
    sigmoid : bool
        Probabilities are sigmoids divided by their sum, and not a softmax.
    comm : Comm, optional
        The ranks that have a step's tokens, each in one microbatch, e.g. ``sharded.comms.world``. Collective over them.
    parts : Comm, optional
        Without a comm: the ranks that have the other parts of these sequences, which come in the same order there, e.g.
        ``comms.along("cp")``. Collective over them.
    """
    if logits.dim() != 3 or experts.dim() != 3 or logits.shape[:2] != experts.shape[:2]:
        raise _C.Error(
            "[experts] balance_loss takes logits [sequences, tokens, experts] and experts [sequences, tokens, choices], got "
            f"{list(logits.shape)} and {list(experts.shape)}"
        )
    if comm is not None and parts is not None:
        raise _C.Error("[experts] balance_loss got a comm, of all tokens of a step, and parts, of sequences. Give one of them")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    probabilities = wide.softmax(-1)
    if sigmoid:
        scores = wide.sigmoid()
        probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    chosen = experts.detach().flatten(1)
    counts = chosen.new_zeros(len(chosen), logits.shape[-1], dtype=torch.float64)
    counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
    if comm is not None:
        counts = counts.sum(0, keepdim=True)
        comm.all_reduce(counts)
    if parts is not None:
        parts.all_reduce(counts)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1) * logits.shape[-1]
    return (probabilities * shares.to(wide.dtype).unsqueeze(1)).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The loss of ST-MoE that keeps logits [.., experts] small: the sum over tokens of ``logsumexp(logits)**2``."""
    return (logits if logits.dtype == torch.float64 else logits.float()).logsumexp(-1).square().sum()


class RouterBiases:
    """Moves the biases by which routers choose, as DeepSeek-V3 was trained; transformers has them and never moves them.

    A layer with the child ``experts``, called with (x, experts [tokens, choices], ..), and a child with the buffer
    ``e_score_correction_bias``, has such a bias. What its training forwards choose is counted, and not what those of a copy
    choose. Tokens of ranks along tp count as often as there are such ranks, and those of units that are recomputed twice, all
    alike, which changes no sign.

    Parameters
    ----------
    model : nn.Module
        The model, before or after ``fully_shard``.
    rate : float
        By so much a bias rises where its expert was chosen less often than the mean, and falls where more often.

    Examples
    --------
    >>> biases = shardproof.RouterBiases(model, rate=1e-3)
    >>> optimizer.step()
    >>> biases.update(sharded.comms.world)
    """

    def __init__(self, model: nn.Module, rate: float):
        self.rate = rate
        self.layers: "list[tuple[nn.Module, torch.Tensor]]" = []  # who has the bias, and counts
        for layer in model.modules():
            gates = [child for child in layer.children() if _BIAS in child._buffers]
            experts = getattr(layer, "experts", None)
            if gates and isinstance(experts, nn.Module):
                counts = torch.zeros(gates[0].get_buffer(_BIAS).numel(), dtype=torch.float64)
                self.layers.append((gates[0], counts))
                experts.register_forward_pre_hook(self._counting(experts, counts), with_kwargs=True)
        if not self.layers:
            raise _C.Error(f"[experts] the model has no layer with 'experts' beside a module with the buffer {_BIAS}")

    @staticmethod
    def _counting(counted: nn.Module, counts: torch.Tensor) -> Any:
        own = weakref.ref(counted)  # copies of the model have this hook, too

        def hook(experts: nn.Module, args: tuple, kwargs: dict) -> None:
            if experts is own() and experts.training and torch.is_grad_enabled():
                chosen = called_with(experts, args, kwargs)[1].detach().flatten()
                counts.add_(torch.bincount(chosen[chosen >= 0], minlength=len(counts)).cpu())

        return hook

    def update(self, comm: Optional[_C.Comm]) -> None:
        """After each step of the optimizer, on every rank. Collective over the comm, whose ranks have the step's tokens;
        None where this process alone has them."""
        for gate, counts in self.layers:
            bias = gate.get_buffer(_BIAS)
            if bias.dtype not in (torch.float32, torch.float64):
                raise _C.Error(f"[experts] {_BIAS} is {bias.dtype}, in which small moves are lost. Keep it in float32")
            if comm is not None:
                comm.all_reduce(counts)
            bias.add_((counts.sum() - counts * len(counts)).sign().to(bias), alpha=self.rate)
        self.forget()

    def forget(self) -> None:
        """For a step that is skipped or threw, forwards whose gradients are dropped, and before a load."""
        for _, counts in self.layers:
            counts.zero_()
