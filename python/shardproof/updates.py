"""Adam, AdamW and SGD of torch.optim, whose steps give PyTorch's kernels what a rank has of each DTensor.

PyTorch's own steps give them DTensors. Each operator on one of these takes longer than the arithmetic of a small tensor.
What is asked of each of a thousand tensors is asked in C++ (updates.cpp), since that takes longer than the kernel, too.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, List, Optional, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from . import _C
from .torch_private import check_graph_capture
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
        parts = _C.with_gradients(list(group["params"]), _is_cut_alike)
        if parts is None:
            return False
        if parts[0]:
            self._update(group, *parts)
        return True

    def _update(self, group: dict, params: "Tensors", own: "Tensors", gradients: "Tensors") -> None:
        raise NotImplementedError

    def _common(self, group: dict) -> dict:
        """Settings that all rules and kernels have, with what a GradScaler leaves to the kernel."""
        named = {name: group[name] for name in ("lr", "weight_decay", "maximize")}
        return {**named, "grad_scale": getattr(self, "grad_scale", None), "found_inf": getattr(self, "found_inf", None)}


def _wants_fused(group: dict, own: "Tensors") -> bool:
    """Whether PyTorch's fused kernel is to update these: on a CPU or GPU, unless the user has chosen another way."""
    if group["fused"] is not None or group["foreach"] is not None:
        return bool(group["fused"])
    return own[0].is_cpu or all(tensor.is_cuda and tensor.is_floating_point() for tensor in own)


def _has_fused(
    group: dict, kernel: "Callable", settings: dict, changed: "list[Tensors]", gradients: "Tensors", steps: "Sequence" = ()
) -> bool:
    """Update by PyTorch's fused kernel on the CPU, if it is wanted, and if the tensors lie as it takes them."""
    if not _wants_fused(group, gradients) or not _C.lie_alike([gradients, *filter(None, changed)]):
        return False

    def updated(changed: "list[Tensors]", gradients: "Tensors", steps: "Tensors") -> None:
        kernel(changed[0], gradients, *changed[1:], *[steps] * bool(steps), **settings)

    _C.add_to_each(list(steps), 1)
    if settings["grad_scale"] is None:
        _C.update_together(changed, gradients, list(steps), updated)
    else:  # by which the kernel divides the gradients, too
        updated(changed, gradients, list(steps))
    return True


def _overflowed(settings: dict) -> bool:
    """Whether a GradScaler has found that the step has to be left out, which it leaves to whoever updates by fused kernels."""
    return settings["found_inf"] is not None and settings["found_inf"].item() != 0


def _otherwise(group: dict, own: "Tensors", gradients: "Tensors", settings: dict) -> dict:
    """Settings by which PyTorch computes what its fused kernel on the CPU does not take, of gradients without their scale."""
    way = {"foreach": group["foreach"], "fused": _wants_fused(group, own) and not own[0].is_cpu}
    if way["fused"]:
        return {**settings, **way}
    if settings["grad_scale"] is not None:
        torch._foreach_div_(gradients, settings["grad_scale"])
    return {**settings, **way, "grad_scale": None, "found_inf": None}


class _AdamOnLocals(_OnLocals):
    _of_torch = torch.optim.Adam

    def _update(self, group: dict, params: "Tensors", own: "Tensors", gradients: "Tensors") -> None:
        names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"], "step"]
        state = _C.state_of(self.state, params, names)
        if state is None:
            self._init_group(group, [], [], [], [], [], [])  # makes what is missing
            state = _C.state_of(self.state, params, names)
        *moments, steps = state
        moments += [[]] * (3 - len(moments))
        settings = dict(self._common(group), **{name: group[name] for name in ("eps", "amsgrad")})
        beta1, beta2 = group["betas"]
        if own[0].is_cpu and _overflowed(settings):
            return
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        betas = {"beta1": float(beta1), "beta2": float(beta2)}
        if _has_fused(group, kernel, {**settings, **betas}, [own, *moments], gradients, steps):
            return
        if any(gradient.is_sparse for gradient in gradients):
            self._init_group(group, [], [], [], [], [], [])  # says that there is another class for these
        check_graph_capture(self)
        settings = _otherwise(group, own, gradients, settings)
        for i, p in enumerate(params if settings["fused"] else ()):  # which takes counts that are where the parameters are
            steps[i] = self.state[p]["step"] = steps[i].to(own[i].device, torch.float32)
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
        known = _C.state_of(self.state, params, ["momentum_buffer"]) if group["momentum"] else [[]]
        if known is not None:
            self._update_part(group, params, own, gradients, known[0])
            return
        states = [self.state[p] for p in params]
        are_first = [state.get("momentum_buffer") is None for state in states]
        for is_first in set(are_first):  # a kernel makes all buffers, or none
            chosen = [each is is_first for each in are_first]
            parts = [list(itertools.compress(each, chosen)) for each in (params, own, gradients)]
            if is_first:
                self._update_part(group, *parts, None)
            else:
                self._update(group, *parts)

    def _update_part(
        self, group: dict, params: "Tensors", own: "Tensors", gradients: "Tensors", buffers: "Optional[Tensors]"
    ) -> None:
        is_first = buffers is None
        settings = dict(self._common(group), **{name: group[name] for name in ("momentum", "dampening", "nesterov")})
        momenta = list(map(torch.empty_like, gradients)) if buffers is None else buffers
        # The kernel leaves first momenta as they were allocated (docs/findings/022.md), or moves them before it looks.
        if (own[0].is_cpu or group["momentum"]) and _overflowed(settings):
            return
        if not _has_fused(group, torch._fused_sgd_, {**settings, "is_first_step": is_first}, [own, momenta], gradients):
            momenta = [None] * len(own) if is_first else momenta
            settings = _otherwise(group, own, gradients, settings)
            sgd(own, gradients, momenta, has_sparse_grad=any(g.is_sparse for g in gradients), **settings)
        if is_first:
            for p, buffer in zip(params, momenta):
                whole = DTensor(buffer, p._spec, requires_grad=False) if isinstance(p, DTensor) else buffer
                self.state[p]["momentum_buffer"] = whole
