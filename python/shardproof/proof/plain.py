"""The plain run: PyTorch alone trains the model on all microbatches, and takes sums in the order that the strategy specifies.

Nothing here calls the library.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Callable

import torch
from torch import nn

from .case import Case, parse_call

ACCUMULATES_FIRST = ("ddp", "zero1")


def ranks_of_sums(case: Case) -> "list[list[int]]":
    """The groups of ranks whose gradients are added first; then the groups are added."""
    sizes = dict(case.mesh)
    world = case.data_ranks
    if "dp_replicate" not in sizes:
        return [list(range(world))]
    shard = sizes.get("dp_shard", 1)
    return [list(range(first, first + shard)) for first in range(0, world, shard)]


def syncs(rounds: int, every: int, accumulates_first: bool) -> "list[list[int]]":
    """The microbatches of a step in the groups that are reduced together."""
    if accumulates_first:
        return [list(range(rounds))]
    groups, current = [], []
    for k in range(rounds):
        current.append(k)
        if (k + 1) % every == 0 or k + 1 == rounds:
            groups.append(current)
            current = []
    return groups


def frozen(names: "list[str]", choice: int) -> "set[str]":
    """About a third of the parameters, and never all."""
    chosen = {name for i, name in enumerate(names) if (i * 7919 + choice * 104729) % 97 % 3 == 0}
    return chosen if len(chosen) < len(names) else set(names[1:])


def added(terms: list):
    """The sum of tensors from left to right; None where all are None."""
    total = None
    for term in terms:
        if term is not None:
            total = term.clone() if total is None else total + term
    return total


def canonical_sum(terms: list):
    """The sum in fixed point, of multiples of 2^-44, so that no order matters; None where all are None. NaN where a term does
    not fit."""
    given = [term for term in terms if term is not None]
    if not given:
        return None
    scaled = torch.stack([torch.round(term.double() * 2.0**44) for term in given])
    fits = (scaled.abs() < 2.0**62).all(0)  # false for NaN
    total = torch.where(fits, scaled, 0.0).to(torch.int64).sum(0)
    return torch.where(fits, total.to(torch.float32) * 2.0**-44, math.nan)


class PlainRun:
    """A plain model in training. `flavour` rounds otherwise, to measure how far roundings carry.

    flavour: "" as specified, "backwards" adds in the opposite order, "off" starts with one element off by a float.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        loss: Callable,
        case: Case,
        dtype: Any = None,
        flavour: str = "",
        off: int = 0,
    ):
        self.model = make_model()
        if dtype is not None:
            self.model.to(dtype)
        self.dtype, self.loss, self.case, self.flavour = dtype, loss, case, flavour
        self.named = dict(self.model.named_parameters())
        self.runs_on = self.model
        if case.option("compute"):
            self.runs_on = self.low_precision(make_model, getattr(torch, case.option("compute")))
        self.trains = {name for name, p in self.named.items() if p.requires_grad}
        self.rule, self.settings = parse_call(case.optimizer)
        self.state: "dict[str, dict[str, torch.Tensor]]" = {}
        self.updates: "dict[str, int]" = {}
        self.torch_optimizer = None
        self.lr_factor = 1.0
        self.scale, self.good_steps = float(case.option("scale") or 0), 0
        if flavour == "off":
            trained = [p for p in self.named.values() if p.requires_grad]
            with torch.no_grad():
                flat = trained[off % len(trained)].view(-1)
                flat[0] = torch.nextafter(flat[0], flat[0] + 1)

    def cast(self, batch: Any) -> Any:
        if self.dtype is None:
            return batch
        from ..units import map_tensors

        return map_tensors(batch, lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    def low_precision(self, make_model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
        """A model whose parameters are rounded copies of the main ones, and whose units cast what they are given."""
        from ..units import map_tensors

        def cast_inputs(module, args, kwargs):
            return map_tensors((args, kwargs), lambda t: t.to(dtype) if t.is_floating_point() else t)

        model = make_model()
        for parameter in model.parameters():
            parameter.data = parameter.detach().to(dtype)
        modules = dict(model.named_modules())
        for name in {"", *filter(None, self.case.option("units").split("+"))}:
            modules[name].register_forward_pre_hook(cast_inputs, with_kwargs=True)
        return model

    def copies(self) -> "dict[str, nn.Parameter]":
        """What the model computes with: the parameters, or rounded copies, as they are now."""
        copies = dict(self.runs_on.named_parameters())
        if self.runs_on is not self.model:
            for name, copy in copies.items():
                copy.data.copy_(self.named[name].detach())
                copy.requires_grad_(self.named[name].requires_grad)
        return copies

    def freeze(self, choice: int) -> None:
        """Freezes the chosen parameters, and lets all others train."""
        names = sorted(self.trains)
        held = frozen(names, choice)
        for name in names:
            self.named[name].requires_grad_(name not in held)

    def losses_without_graph(self, batches: list) -> list:
        self.copies()
        with torch.no_grad():
            return [self.loss(self.runs_on, self.cast(batch)).detach() for batch in batches]

    def gradients(self, batches: "list[list]", every: int) -> "tuple[list[list], dict[str, torch.Tensor]]":
        """Losses and the final gradient of a step; `batches` are of [round][data-parallel rank]."""
        rounds, world = len(batches), self.case.data_ranks
        canonical = self.case.mode == "canonical"
        losses: "list[list]" = []
        terms: "dict[tuple[int, int], dict]" = {}
        trained = {name: p for name, p in self.copies().items() if p.requires_grad}
        for k in range(rounds):
            losses.append([])
            for rank in range(world):
                for p in trained.values():
                    p.grad = None
                value = self.loss(self.runs_on, self.cast(batches[k][rank]))
                loss = value / (rounds * world if canonical else rounds)
                (loss * self.scale if self.scale else loss).backward()
                losses[k].append(value.detach())
                terms[k, rank] = {
                    name: None if p.grad is None else p.grad.to(self.named[name].dtype) for name, p in trained.items()
                }
        order = reversed if self.flavour == "backwards" else list
        groups = syncs(rounds, every, self.case.strategy in ACCUMULATES_FIRST)
        result = {}
        for name in trained:
            p, of_replicas = trained[name], []
            if canonical:
                total = canonical_sum([term[name] for term in terms.values()])
                result[name] = torch.zeros_like(self.named[name]) if total is None else total
                p.grad = None
                continue
            for ranks in ranks_of_sums(self.case):
                of_replicas.append(
                    added([added([added([terms[k, rank][name] for k in group]) for rank in order(ranks)]) for group in groups])
                )
            total = added(order(of_replicas))
            result[name] = (torch.zeros_like(self.named[name]) if total is None else total) / world
            if self.scale:
                result[name] = result[name] / self.scale
            p.grad = None
        return losses, result

    def adapt_scale(self, finite: bool) -> None:
        """As the library's LossScaler with growth_interval=2."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 2.0**-14)
        elif self.good_steps == 2:
            self.scale, self.good_steps = self.scale * 2, 0

    @torch.no_grad()
    def update(self, gradients: "dict[str, torch.Tensor]", norm_max) -> float:
        norm = exact_norm(list(gradients.values()))
        if norm_max is not None:
            factor = norm_max / (norm + 1e-6)
            if factor < 1:
                gradients = {name: g * torch.full_like(g, factor) for name, g in gradients.items()}
        if self.rule.startswith("torch."):
            self.update_by_torch(gradients)
            return norm
        for name, gradient in gradients.items():
            self.updates[name] = self.updates.get(name, 0) + 1
            self.named[name].copy_(
                updated(
                    self.rule,
                    self.settings,
                    self.lr_factor,
                    self.named[name].detach(),
                    gradient,
                    self.state.setdefault(name, {}),
                    self.updates[name],
                )
            )
        return norm

    def update_by_torch(self, gradients) -> None:
        if self.torch_optimizer is None:
            kind = getattr(torch.optim, self.rule[len("torch.") :])
            self.torch_optimizer = kind([self.named[name] for name in self.named if name in self.trains], **self.settings)
        for name, p in self.named.items():
            p.grad = gradients.get(name)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = self.settings["lr"] * self.lr_factor
        self.torch_optimizer.step()
        for p in self.named.values():
            p.grad = None

    def snapshot(self) -> dict:
        return {
            "parameters": {name: p.detach().clone() for name, p in self.named.items()},
            "updates": dict(self.updates),
            "scaling": (self.scale, self.good_steps),
            "state": {name: {slot: t.clone() for slot, t in held.items()} for name, held in self.state.items()},
        }

    @torch.no_grad()
    def restore(self, saved: dict) -> None:
        for name, value in saved["parameters"].items():
            self.named[name].copy_(value)
        self.updates = dict(saved["updates"])
        self.scale, self.good_steps = saved["scaling"]
        self.state = {name: {slot: t.clone() for slot, t in held.items()} for name, held in saved["state"].items()}


def exact_norm(gradients: "list[torch.Tensor]") -> float:
    """The norm, its sum of squares taken without rounding."""
    if all(g.dtype == torch.float32 for g in gradients):  # squares of floats are exact doubles
        values = torch.cat([g.double().flatten() for g in gradients])
        if not bool(torch.isfinite(values).all()):
            return math.nan
        return math.sqrt(math.fsum((values * values).tolist()))
    total = sum((Fraction(v) ** 2 for g in gradients for v in g.double().flatten().tolist() if math.isfinite(v)), Fraction(0))
    return math.sqrt(total)


def updated(rule: str, settings: dict, factor: float, p, g, state: dict, t: int):
    """A parameter after one update by the formulas of docs (optim/optimizer.h), one rounding an operation."""

    def held(slot):
        return state.setdefault(slot, torch.zeros_like(p))

    def times(x, scalar):
        return x * torch.full_like(x, scalar)

    lr, decay = settings.get("lr") * factor, settings.get("weight_decay", {"adamw": 0.01}.get(rule, 0.0))
    if rule == "sgd":
        if decay:
            g = g + times(p, decay)
        momentum = settings.get("momentum", 0.0)
        if momentum:
            m = state["momentum_buffer"] = times(held("momentum_buffer"), momentum) + g
            g = g + times(m, momentum) if settings.get("nesterov") else m
        return p - times(g, lr)
    beta1, beta2, eps = 0.9, 0.99 if rule == "lion" else 0.999, 1e-8
    if rule == "adam" and decay:
        g = g + times(p, decay)
    if rule in ("adamw", "lion"):
        p = times(p, 1 - lr * decay) if decay else p
    m = held("exp_avg")
    if rule == "lion":
        direction = torch.sign(times(m, beta1) + times(g, 1 - beta1))
        state["exp_avg"] = times(m, beta2) + times(g, 1 - beta2)
        return p - times(direction, lr)
    m = state["exp_avg"] = times(m, beta1) + times(g, 1 - beta1)
    v = state["exp_avg_sq"] = times(held("exp_avg_sq"), beta2) + times(g * g, 1 - beta2)
    # In float32, torch takes square roots that are not rounded correctly.
    root = v.double().sqrt().to(v.dtype) / torch.full_like(v, math.sqrt(1 - beta2**t))
    return p - times(m / (root + torch.full_like(v, eps)), lr / (1 - beta1**t))
