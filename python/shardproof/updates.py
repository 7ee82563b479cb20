"""Adam, AdamW and SGD of torch.optim, whose steps give PyTorch's kernels what a rank has of each DTensor.

PyTorch's own steps give them DTensors. Each operator on one of these takes longer than the arithmetic of a small tensor.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, List, Optional

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from . import _C
from .torch_private import check_graph_capture, local_of
from .torch_state import bare_step

Tensors = List[torch.Tensor]


def _is_cut_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    own, others = getattr(tensor, "_spec", None), getattr(other, "_spec", None)
    return own is others or (own and others and own.mesh == others.mesh and own.placements == others.placements)


class _OnLocals(torch.optim.Optimizer):
    """The step of a class of torch.optim that updates by element. All else is that class's own."""

    _of_torch: type

    @torch.no_grad()
    def step(self, closure: "Optional[Callable]" = None) -> Any:
        """Update what has a gradient, and return what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        others = [group for group in groups if not self._has_updated(group)]
        if others:
            self.param_groups = others
            try:
                bare_step(self._of_torch)(self)
            finally:
                self.param_groups = groups
        return loss

    def _has_updated(self, group: dict) -> bool:
        """Update a group, unless PyTorch's own step has to see whole DTensors, or their graphs."""
        if group["differentiable"]:
            return False
        params = group["params"]
        gradients = [p.grad for p in params]
        if not all([gradient is not None for gradient in gradients]):
            params = [p for p in params if p.grad is not None]
            gradients = [p.grad for p in params]
        if not all(map(_is_cut_alike, params, gradients)):
            return False
        if params:
            self._update(group, params, list(map(local_of, params)), list(map(local_of, gradients)))
        return True

    def _update(self, group: dict, params: "Tensors", own: "Tensors", gradients: "Tensors") -> None:
        raise NotImplementedError

    def _common(self, group: dict) -> dict:
        """Settings that all rules and kernels have, with what a GradScaler leaves to the kernel."""
        named = {name: group[name] for name in ("lr", "weight_decay", "maximize")}
        return {**named, "grad_scale": getattr(self, "grad_scale", None), "found_inf": getattr(self, "found_inf", None)}


def _may_be_fused(group: dict, *lists: "Tensors") -> bool:
    """Whether PyTorch's fused kernel on the CPU is to update these: unless the user has chosen another way."""
    is_wanted = group["fused"] or (group["fused"] is None and group["foreach"] is None)
    return is_wanted and _C.lie_alike([tensors for tensors in lists if tensors])


def _overflowed(settings: dict) -> bool:
    """Whether a GradScaler has found that the step has to be left out, which it leaves to whoever updates by fused kernels."""
    return settings["found_inf"] is not None and settings["found_inf"].item() != 0


def _otherwise(group: dict, own: "Tensors", gradients: "Tensors", settings: dict) -> dict:
    """Settings by which PyTorch computes what its fused kernel on the CPU does not take, of gradients without their scale."""
    way = {"foreach": group["foreach"], "fused": group["fused"] and not own[0].is_cpu}
    if way["fused"]:
        return {**settings, **way}
    if settings["grad_scale"] is not None:
        torch._foreach_div_(gradients, settings["grad_scale"])
    return {**settings, **way, "grad_scale": None, "found_inf": None}


class _AdamOnLocals(_OnLocals):
    _of_torch = torch.optim.Adam

    def _update(self, group: dict, params: "Tensors", own: "Tensors", gradients: "Tensors") -> None:
        states = list(map(self.state.get, params))
        if not all(states):
            self._init_group(group, [], [], [], [], [], [])  # makes what is missing
            states = list(map(self.state.get, params))
        moments = [[local_of(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")]
        moments.append([local_of(state["max_exp_avg_sq"]) for state in states] if group["amsgrad"] else [])
        steps = [state["step"] for state in states]
        settings = dict(self._common(group), **{name: group[name] for name in ("eps", "amsgrad")})
        beta1, beta2 = group["betas"]
        if own[0].is_cpu and _overflowed(settings):
            return
        if _may_be_fused(group, own, gradients, *moments):
            _C.add_to_each(steps, 1)
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            kernel(own, gradients, *moments, steps, beta1=float(beta1), beta2=float(beta2), **settings)
            return
        if any(gradient.is_sparse for gradient in gradients):
            self._init_group(group, [], [], [], [], [], [])  # says that there is another class for these
        check_graph_capture(self)
        settings = _otherwise(group, own, gradients, settings)
        settings.update({name: group[name] for name in ("capturable", "decoupled_weight_decay")})
        settings.update(beta1=beta1, beta2=beta2, has_complex=any(map(torch.is_complex, own)))
        adam(own, gradients, *moments, steps, **settings)


class Adam(_AdamOnLocals, torch.optim.Adam):
    """``torch.optim.Adam``, whose step is fast on shards."""


class AdamW(_AdamOnLocals, torch.optim.AdamW):
    """``torch.optim.AdamW``, whose step is fast on shards."""


class SGD(_OnLocals, torch.optim.SGD):
    """``torch.optim.SGD``, whose step is fast on shards."""

    _of_torch = torch.optim.SGD

    def _update(self, group: dict, params: "Tensors", own: "Tensors", gradients: "Tensors") -> None:
        states = [self.state[p] for p in params] if group["momentum"] else [{}] * len(params)
        are_first = [state.get("momentum_buffer") is None for state in states]
        for is_first in set(are_first):  # a kernel makes all buffers, or none
            chosen = [each is is_first for each in are_first]
            parts = (list(itertools.compress(each, chosen)) for each in (params, own, gradients, states))
            self._update_part(group, is_first and group["momentum"] != 0, *parts)

    def _update_part(
        self, group: dict, is_first: bool, params: "Tensors", own: "Tensors", gradients: "Tensors", states: "list[dict]"
    ) -> None:
        settings = dict(self._common(group), **{name: group[name] for name in ("momentum", "dampening", "nesterov")})
        buffers: list = []
        if is_first:
            buffers = list(map(torch.empty_like, gradients))
        elif group["momentum"]:
            buffers = [local_of(state["momentum_buffer"]) for state in states]
        # The kernel leaves first momenta as they were allocated (docs/findings/022.md), or moves them before it looks.
        if (own[0].is_cpu or group["momentum"]) and _overflowed(settings):
            return
        if _may_be_fused(group, own, gradients, buffers):
            torch._fused_sgd_(own, gradients, buffers, is_first_step=is_first, **settings)
        else:
            buffers = [None] * len(own) if is_first else buffers
            settings = _otherwise(group, own, gradients, settings)
            sgd(own, gradients, buffers, has_sparse_grad=any(g.is_sparse for g in gradients), **settings)
        if is_first:
            for p, state, buffer in zip(params, states, buffers):
                state["momentum_buffer"] = DTensor(buffer, p._spec, requires_grad=False) if isinstance(p, DTensor) else buffer
