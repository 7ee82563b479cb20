"""The plain run: PyTorch alone trains the model on all microbatches, and takes sums in the order that the strategy specifies.

Nothing here calls the library, but for the code that finds the tensors of a structure, and casts them where a unit begins.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import types
from fractions import Fraction
from typing import Any, Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..units import _Casts as Casts
from ..units import map_tensors
from .case import Case, parse_call
from .witness import Witness, leaves

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


def canonical_sum(terms: list, world: int):
    """The sum in fixed point, of multiples of 2^-44, so that no order matters; None where all are None. NaN where the terms may
    not fit: each rank has the room of its part of the sum."""
    given = [term for term in terms if term is not None]
    if not given:
        return None
    scaled = torch.stack([torch.round(term.double() * 2.0**44) for term in given])
    fits = scaled.abs().sum(0) < 2.0**62 / world  # false for NaN
    total = torch.where(fits, scaled, 0.0).to(torch.int64).sum(0)
    dtype = torch.promote_types(given[0].dtype, torch.float32)
    return torch.where(fits, total.to(dtype) * 2.0**-44, math.nan)


class PlainRun:
    """A plain model in training: a replica for each rank, of which all share the parameters' memory, while buffers and all else
    is each one's own. `flavour` rounds otherwise, to measure how far roundings carry.

    flavour: "" as specified, "backwards" adds in the opposite order, "off" starts with one element off by a float, "recompute"
    runs the unit that is recomputed by torch.utils.checkpoint.
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
        self.make_model, self.dtype, self.loss, self.case, self.flavour = make_model, dtype, loss, case, flavour
        self.build()
        self.trains = {name for name, p in self.named.items() if p.requires_grad}
        self.rule, self.settings = parse_call(case.optimizer)
        self.state: "dict[str, dict[str, torch.Tensor]]" = {}
        self.updates: "dict[str, int]" = {}
        self.torch_optimizer = None
        self.hooks_ran: "list[str]" = []
        self.lr_factor = 1.0
        self.scale, self.good_steps = float(case.option("scale") or 0), 0
        if flavour == "off":
            trained = [p for p in self.named.values() if p.requires_grad and p.numel() and p.is_floating_point()]
            with torch.no_grad():
                first = trained[off % len(trained)]
                first[(0,) * first.dim()] = torch.nextafter(*(first.new_tensor(first.flatten()[0].item() + k) for k in (0, 1)))

    def build(self) -> None:
        """Makes the models, as they are at first."""
        low = self.case.option("compute")
        self.model = self.make_model()
        if self.dtype is not None:
            self.model.to(self.dtype)
        self.named = dict(self.model.named_parameters())
        self.witnesses: "list[Witness]" = []
        first: Any = None
        for rank in range(self.case.data_ranks):
            replica = self.make_model() if low or rank else self.model
            if self.dtype is not None:
                replica.to(self.dtype)
            for name, p in replica.named_parameters():
                # Parameters of units are contiguous. Other strides may mean other kernels, which round otherwise.
                own = p.detach().to(getattr(torch, low) if low else p.dtype).contiguous()
                p.data = first[name].data if rank else own
            first = first or dict(replica.named_parameters())
            modules = dict(replica.named_modules())
            for name in {"", *filter(None, self.case.option("units").split("+"))} if low else ():
                cast_at_border(modules[name], getattr(torch, low))
            again = self.case.option("recompute")
            if again and self.flavour == "recompute":
                forward = modules[again].forward
                modules[again].forward = functools.partial(checkpoint, forward, use_reentrant=False)
            self.witnesses.append(Witness(replica, self.loss, self.case.option("inputs") == "grad"))
            self.witnesses[-1].watch()
        self.stream = torch.get_rng_state()

    def cast(self, batch: Any) -> Any:
        if self.dtype is None:
            return batch
        return map_tensors(batch, lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    def refresh(self) -> None:
        """Brings what the models compute with up to date: rounded copies of the parameters, and what trains."""
        for witness in self.witnesses:
            for name, p in witness.model.named_parameters():
                if p.dtype != self.named[name].dtype:
                    p.data.copy_(self.named[name].detach())
                p.requires_grad_(self.named[name].requires_grad)

    @contextlib.contextmanager
    def own_stream(self):
        """Draws random numbers where this run left off."""
        torch.set_rng_state(self.stream)
        yield
        self.stream = torch.get_rng_state()

    def freeze(self, choice: int) -> None:
        """Freezes the chosen parameters, and lets all others train. 0: freezes none."""
        names = sorted(self.trains)
        held = frozen(names, choice) if choice else set()
        for name in names:
            self.named[name].requires_grad_(name not in held)

    def evaluated(self, batches: list) -> "list[dict]":
        """What each rank sees without a graph."""
        self.refresh()
        with torch.no_grad(), self.own_stream():
            return [w.forward("no graph", self.cast(batch))[1] for w, batch in zip(self.witnesses, batches)]

    def gradients(self, batches: "list[list]", every: int) -> "tuple[list[list[dict]], dict[str, torch.Tensor]]":
        """What is seen in each microbatch, and the final gradient of a step; `batches` are of [round][data-parallel rank]."""
        rounds, world = len(batches), self.case.data_ranks
        canonical = self.case.mode == "canonical"
        seen: "list[list[dict]]" = [[] for _ in range(rounds)]
        terms: "dict[tuple[int, int], dict]" = {}
        self.refresh()
        with self.own_stream():
            for k, rank in itertools.product(range(rounds), range(world)):
                witness = self.witnesses[rank]
                value, results = witness.forward(f"microbatch {k}", self.cast(batches[k][rank]))
                loss = value / (rounds * world if canonical else rounds)
                (loss * self.scale if self.scale else loss).backward()
                seen[k].append({**results, **witness.arguments(f"microbatch {k}")})
                terms[k, rank] = {}
                for name, p in witness.model.named_parameters():
                    if p.requires_grad:
                        terms[k, rank][name] = None if p.grad is None else p.grad.to(self.named[name].dtype)
                    p.grad = None
        order = reversed if self.flavour == "backwards" else list
        groups = syncs(rounds, every, self.case.strategy in ACCUMULATES_FIRST)
        result = {}
        for name in terms[0, 0]:
            if canonical:
                total = canonical_sum([term[name] for term in terms.values()], world)
                result[name] = torch.zeros_like(self.named[name]) if total is None else total
                continue
            of_replicas = [
                added([added([added([terms[k, rank][name] for k in group]) for rank in order(ranks)]) for group in groups])
                for ranks in ranks_of_sums(self.case)
            ]
            total = added(order(of_replicas))
            result[name] = (torch.zeros_like(self.named[name]) if total is None else total) / world
            if self.scale:
                result[name] = result[name] / self.scale
        return seen, result

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
        optimizer = self.torch_optimizer = self.torch_optimizer or self.new_torch_optimizer()
        for name, p in self.named.items():
            p.grad = gradients.get(name)
        for group in optimizer.param_groups:
            group["lr"] = self.settings["lr"] * self.lr_factor
        optimizer.step()
        for p in self.named.values():
            p.grad = None
        for name, p in self.named.items():
            held = optimizer.state.get(p, {})
            self.state[name] = {slot: torch.as_tensor(value).clone() for slot, value in held.items() if value is not None}

    def new_torch_optimizer(self) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.rule[len("torch.") :])
        optimizer = kind([self.named[name] for name in self.named if name in self.trains], **self.settings)
        watch_steps(optimizer, self.hooks_ran)
        return optimizer

    def after_step(self) -> "list[dict]":
        """What each rank's model holds besides parameters, and its state dict."""
        self.refresh()
        return [{**w.state(), **in_state_dict(w.model, w.model.state_dict())} for w in self.witnesses]

    def snapshot(self) -> dict:
        """What a checkpoint has: the model as rank 0 has it, and all that the optimizer and the scaler hold."""
        kept = {"parameters": self.named, "state": self.state, "model": self.witnesses[0].model.state_dict()}
        optimizer = self.torch_optimizer and self.torch_optimizer.state_dict()
        return copy.deepcopy(
            {**kept, "updates": self.updates, "optimizer": optimizer, "scaling": (self.scale, self.good_steps)}
        )

    def restore(self, saved: dict, case: Case, before: list) -> bool:
        """Loads into new models, each of which has gone through a microbatch of `before` if there are any, and says whether
        that was finite."""
        saved = copy.deepcopy(saved)
        self.case = case
        self.build()
        gradients = self.gradients([before], 1)[1] if before else {}
        with torch.no_grad():
            for name, value in saved["parameters"].items():
                self.named[name].copy_(value)
        for witness in self.witnesses:
            keeps = set(dict(witness.model.named_parameters(remove_duplicate=False)))
            witness.model.load_state_dict({n: v for n, v in saved["model"].items() if n not in keeps}, strict=False)
        self.state, self.updates = saved["state"], saved["updates"]
        self.scale, self.good_steps = saved["scaling"]
        self.torch_optimizer = None
        if saved["optimizer"] is not None:
            self.torch_optimizer = self.new_torch_optimizer()
            self.torch_optimizer.load_state_dict(saved["optimizer"])
        return all(bool(g.isfinite().all()) for g in gradients.values())


def watch_steps(optimizer: torch.optim.Optimizer, ran: "list[str]") -> None:
    """Notes down in `ran` what an optimizer of torch calls before and after each step."""
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))


def in_state_dict(model: nn.Module, state: "dict[str, Any]") -> "dict[str, Any]":
    """A state dict's names, and what it has besides parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    others = [leaves(f"state dict {name}", value) for name, value in state.items() if name not in parameters]
    return {"names of the state dict": list(state), **dict(itertools.chain(*others))}


def cast_at_border(module: nn.Module, dtype: torch.dtype) -> None:
    """What a unit does in low precision with the tensors that it is given, by the code that does it there."""
    entered: "list[Casts]" = []

    def enter(_, args, kwargs):
        made: "dict[int, torch.Tensor]" = {}

        def cast(tensor):
            if not tensor.is_floating_point() or tensor.dtype == dtype:
                return tensor
            return made[id(tensor)] if id(tensor) in made else made.setdefault(id(tensor), tensor.to(dtype))

        entered.append(Casts(types.SimpleNamespace(input=cast)))
        return map_tensors((args, kwargs), entered[-1], entered[-1].rebuilt)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(lambda *_: entered.pop().give_back())


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
