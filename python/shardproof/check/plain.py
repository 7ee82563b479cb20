"""The plain runs: PyTorch alone trains the model on all microbatches. One takes sums in the order that is specified; the others
round otherwise, to measure how far roundings carry, and the last one computes in float64.

Nothing here calls what is checked.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .plan import Plan, Segment, Step, frozen_names, optimizer_of
from .witness import Witness, in_state_dict

ACCUMULATES_FIRST = ("", "ddp", "zero1")
FLAVOURS = ("", "backwards", "one float off 0", "one float off 1", "one float off 2", "float64")


@dataclass
class Expected:
    """What a plain run had at a step."""

    values: dict[str, Any]
    """What is the same on all ranks, whole, by its name."""
    places: list[dict[str, Any]]
    """What each data-parallel rank sees."""
    terms: list[list[dict[str, Any]]]
    """The gradients of each microbatch and each data-parallel rank, of which the step's gradient is the sum."""
    wide: bool = False
    """In float64."""


@dataclass
class References:
    """All plain runs of a case."""

    steps: list[list[list[Expected]]]
    """Of [segment][step] each run: first the plain one, at last the one in float64, if there are kernels."""
    start: dict[str, torch.Tensor]
    streams: list[torch.Tensor] = field(default_factory=list)
    """The state of torch's generator after each segment."""

    def truth(self, segment: int, step: int) -> Expected:
        """What distances are measured from."""
        runs = self.steps[segment][step]
        return runs[-1] if runs[-1].wide else runs[0]


class Diverged(Exception):
    """The plain run left the finite numbers, or cannot compute what was drawn, so there is nothing to compare."""


class PlainFailed(Exception):
    """The plain run raised. `error` is the model's own."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def references(case: Any) -> References:
    """The plain runs of a case. Throws Diverged or PlainFailed."""
    plan, subject = case.plan, case.subject
    flavours = FLAVOURS if plan.mode == "fast" else FLAVOURS[:1]
    with plainly(plan):
        runs = [PlainRun(case)]
    subject.require(case, runs[0].model)
    with plainly(plan):
        runs += [PlainRun(case, flavour) for flavour in flavours[1:]]
    every = runs[0].model.named_parameters(remove_duplicate=False)  # a tied one has several names
    found = References([], {name: p.detach().clone() for name, p in every})
    saved: list[dict] = []
    for s, segment in enumerate(plan.segments):
        for run, state in zip(runs, saved):
            with plainly(plan):
                if not run.restore(state, segment, subject.before_loads(plan, segment)):
                    raise Diverged
        saved = [run.snapshot() for run in runs] if segment.saved == 0 else saved
        found.steps.append([])
        for t, step in enumerate(segment.steps):
            found.steps[s].append(_step(case, runs, s, t, step))
            if segment.saved == t + 1:
                saved = [run.snapshot() for run in runs]
        found.streams.append(runs[0].stream)
    return found


def _step(case: Any, runs: list[PlainRun], s: int, t: int, step: Step) -> list[Expected]:
    with plainly(case.plan):
        batches = [case.subject.batches(case, s, t, m) for m in range(step.microbatches)]
    expected = []
    for run in list(runs):
        try:
            # A batch may reach frozen parameters only, and a loss may need a graph.
            with plainly(case.plan, asks=step.frozen > 0 or step.eval):
                expected.append(run.step(step, batches))
        except (PlainFailed, Diverged):
            if not run.wide:
                raise
            runs.remove(run)  # an operator without a kernel in float64
    return expected


@contextlib.contextmanager
def plainly(plan: Plan, asks: bool = False):
    """What the plain run raises is the model's own; or it cannot compute what a case `asks` for besides."""
    try:
        yield
    except Diverged:
        raise
    except Exception as error:
        if asks or plan.asks:
            raise Diverged(f"{type(error).__name__}: {error}") from error
        raise PlainFailed(error) from error


class PlainRun:
    """A plain model in training: a replica for each data-parallel rank, of which all share the parameters' memory, while
    buffers and all else is each one's own.

    flavour: "" as specified, "backwards" adds in the opposite order, "one float off N" starts with each element one float
    larger or smaller, "float64" computes so, "recompute" runs the unit that is recomputed by torch.utils.checkpoint.
    """

    def __init__(self, case: Any, flavour: str = ""):
        self.case, self.plan, self.subject, self.flavour = case, case.plan, case.subject, flavour
        self.wide = flavour == "float64"
        self.segment = self.plan.segments[0]
        self.chances = None
        if flavour.startswith("one float off"):
            self.chances = torch.Generator().manual_seed(self.plan.data * 3 + int(flavour[-1]))
        self.build()
        self.trains = {name for name, p in self.named.items() if p.requires_grad}
        self.rule, self.settings = optimizer_of(self.plan.optimizer)
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.updates: dict[str, int] = {}
        self.torch_optimizer = None
        self.hooks_ran: list[str] = []
        self.lr_factor = 1.0
        self.scale, self.good_steps = float(self.plan.options.get("scale", 0)), 0
        if self.chances:
            with torch.no_grad():
                for p in [p for p in self.named.values() if p.is_floating_point()]:
                    up = torch.randint(0, 2, p.shape, generator=self.chances).to(p.device) > 0
                    p.copy_(torch.nextafter(p, torch.where(up, math.inf, -math.inf).to(p.dtype)))

    def build(self) -> None:
        """Makes the models, as they are at first."""
        low, options = None if self.wide else self.plan.precision, self.plan.options
        self.model = self.make()
        self.named = dict(self.model.named_parameters())
        self.witnesses: list[Witness] = []
        first: Any = None
        for rank in range(self.segment.data_ranks):
            replica = self.make() if low or rank else self.model
            for name, p in replica.named_parameters():
                # Parameters of units are contiguous. Other strides may mean other kernels, which round otherwise.
                own = p.detach().to(low or p.dtype).contiguous()
                p.data = first[name].data if rank else own
            first = first or dict(replica.named_parameters())
            if low:
                self.subject.lower(self.plan, replica, low)
            again = options.get("recompute")
            if again and self.flavour == "recompute":
                unit = replica.get_submodule(again)
                unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
            self.witnesses.append(Witness(replica, self.subject, self.dtype, options.get("inputs") == "grad"))
            self.witnesses[-1].watch()
        self.stream = torch.get_rng_state()

    def make(self) -> torch.nn.Module:
        model = self.case.make_model()
        return model.to(torch.float64) if self.wide else model

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.wide else self.plan.dtype

    def cast(self, batch: Any) -> Any:
        wide = lambda t: t.to(torch.float64) if t.is_floating_point() else t  # noqa: E731
        return self.subject.map_tensors(batch, wide) if self.wide else batch

    def refresh(self) -> None:
        """Brings what the models compute with up to date: rounded copies of the parameters, and what trains."""
        for i, witness in enumerate(self.witnesses):
            for name, p in witness.model.named_parameters():
                if p.dtype != self.named[name].dtype and i == 0:  # the replicas share them
                    p.data.copy_(self.named[name].detach())
                    if self.chances:
                        up = torch.randint(0, 2, p.shape, generator=self.chances).to(p)
                        p.data.mul_(1 + torch.finfo(p.dtype).eps * up)
                p.requires_grad_(self.named[name].requires_grad)

    @contextlib.contextmanager
    def own_stream(self):
        """Draws random numbers where this run left off."""
        torch.set_rng_state(self.stream)
        yield
        self.stream = torch.get_rng_state()

    def freeze(self, frozen: int) -> None:
        """Freezes some parameters, and lets all others train."""
        held = frozen_names(sorted(self.trains), frozen)
        for name in self.trains:
            self.named[name].requires_grad_(name not in held)

    def step(self, step: Step, batches: list[list]) -> Expected:
        """One step; batches are of [microbatch][data-parallel rank]. Throws Diverged where a value is not finite."""
        self.freeze(step.frozen)
        self.lr_factor = step.lr
        seen = self.evaluated(batches[0]) if step.eval else [{} for _ in self.witnesses]
        if step.discard:
            self.gradients(batches[:1], 1)
        gradients, terms, losses = self.gradients(batches, step.every, seen)
        finite, scale = all(bool(g.isfinite().all()) for g in gradients.values() if g is not None), self.scale
        if not scale and not (finite and all(bool(loss.isfinite()) for loss in losses)):
            raise Diverged("the plain run is not finite")
        self.hooks_ran.clear()
        measures = finite and (step.clip or self.subject.strict)
        norm = exact_norm([g for g in gradients.values() if g is not None], (step.clip or (0.0, 2.0))[1]) if measures else 0.0
        if finite:
            self.update(clipped(gradients, norm, step.clip))
        if scale:
            self.adapt_scale(finite)
        values: dict[str, Any] = {"loss scale": scale, "whether the step is skipped": not finite} if scale else {}
        if finite:
            values |= {f"gradient of {n}": torch.zeros_like(self.named[n]) if g is None else g for n, g in gradients.items()}
        if measures:
            values["norm of the gradient"] = norm
        values |= {f"parameter of {n}": p.detach().clone() for n, p in self.named.items()}
        every = self.model.named_parameters(remove_duplicate=False)
        values |= {f"gathered parameter of {n}": p.detach().clone() for n, p in every}
        values |= {f"optimizer state {k} of {n}": v.clone() for n, held in self.state.items() for k, v in held.items()}
        values["hooks of the optimizer"] = list(self.hooks_ran)
        self.refresh()
        for witness, each in zip(self.witnesses, seen):
            each |= witness.buffers()
            if self.subject.strict:
                each |= {**witness.state(), **in_state_dict(witness.model, witness.model.state_dict())}
        return Expected(values, seen, terms if self.wide or not self.flavour else [], self.wide)

    def evaluated(self, batches: list) -> list[dict]:
        """What each rank sees without a graph."""
        self.refresh()
        with torch.no_grad(), self.own_stream():
            return [w.forward("no graph", self.cast(batch))[1] for w, batch in zip(self.witnesses, batches)]

    def gradients(self, batches: list[list], every: int, seen: list[dict] | None = None) -> tuple[dict, list, list]:
        """The gradients of a step, their terms, and all losses. What each rank sees is added to `seen`."""
        rounds, world = len(batches), self.segment.data_ranks
        parts = rounds * world if self.plan.mode == "canonical" else rounds
        terms: list[list[dict]] = [[{} for _ in range(world)] for _ in range(rounds)]
        losses = []
        self.refresh()
        with self.own_stream():
            for k, rank in itertools.product(range(rounds), range(world)):
                witness = self.witnesses[rank]
                value, results = witness.forward(f"microbatch {k}", self.cast(batches[k][rank]))
                losses.append(value.detach())
                if value.requires_grad or self.subject.strict:
                    (value / parts * self.scale if self.scale else value / parts).backward()
                if seen:
                    seen[rank].update({**results, **witness.arguments(f"microbatch {k}")})
                for name, p in witness.model.named_parameters():
                    if p.requires_grad:
                        terms[k][rank][name] = None if p.grad is None else p.grad.to(self.named[name].dtype)
                    p.grad = None
        result = {name: self.summed(name, terms, every) for name in terms[0][0]}
        return result, terms, losses

    def summed(self, name: str, terms: list[list[dict]], every: int) -> Any:
        """The gradient of a parameter; None where no sample reaches it and that is no zero."""
        world, of = self.segment.data_ranks, [[term[name] for term in row] for row in terms]
        if self.plan.mode == "canonical":
            total = canonical_sum([term for row in of for term in row], world)
        else:
            order = reversed if self.flavour == "backwards" else list
            groups = syncs(len(terms), every, self.segment.strategy in ACCUMULATES_FIRST)
            replicas = [
                added([added([added([of[k][rank] for k in group]) for rank in order(ranks)]) for group in groups])
                for ranks in ranks_of_sums(self.segment)
            ]
            total = added(order(replicas))
            total = total if total is None else total / world
            total = total / self.scale if self.scale and total is not None else total
        return torch.zeros_like(self.named[name]) if total is None and self.subject.strict else total

    def adapt_scale(self, finite: bool) -> None:
        """As the library's LossScaler with growth_interval=2."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 2.0**-14)
        elif self.good_steps == 2:
            self.scale, self.good_steps = self.scale * 2, 0

    @torch.no_grad()
    def update(self, gradients: dict[str, Any]) -> None:
        """A step of the optimizer."""
        if isinstance(self.rule, type):
            self.update_by_torch(gradients)
            return
        for name, gradient in gradients.items():
            self.updates[name] = self.updates.get(name, 0) + 1
            p, state = self.named[name], self.state.setdefault(name, {})
            p.copy_(updated(self.rule, self.settings, self.lr_factor, p.detach(), gradient, state, self.updates[name]))

    def update_by_torch(self, gradients: dict[str, Any]) -> None:
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
        optimizer = self.rule([self.named[name] for name in self.named if name in self.trains], **self.settings)
        watch_steps(optimizer, self.hooks_ran)
        return optimizer

    def snapshot(self) -> dict:
        """What a checkpoint has: the model as rank 0 has it, and all that the optimizer and the scaler hold."""
        kept = {"parameters": self.named, "state": self.state, "model": self.witnesses[0].model.state_dict()}
        held = self.torch_optimizer.state if self.torch_optimizer else None
        optimizer = None if held is None else {name: held[p] for name, p in self.named.items() if p in held}
        scaling = (self.scale, self.good_steps)
        return copy.deepcopy({**kept, "updates": self.updates, "optimizer": optimizer, "scaling": scaling})

    def restore(self, saved: dict, segment: Segment, before: list) -> bool:
        """Loads into new models, each of which has gone through a microbatch of `before` if there are any, and says whether
        that was finite."""
        saved = copy.deepcopy(saved)
        self.segment = segment
        self.build()
        gradients = self.gradients([before], 1)[0] if before else {}
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
            for name, held in saved["optimizer"].items():  # `load_state_dict` would round (docs/findings/011.md)
                self.torch_optimizer.state[self.named[name]] = held
        return all(bool(g.isfinite().all()) for g in gradients.values() if g is not None)


def ranks_of_sums(segment: Segment) -> list[list[int]]:
    """The groups of ranks whose gradients are added first; then the groups are added."""
    world = segment.data_ranks
    shard = segment.mesh.get("dp_shard", 1) if "dp_replicate" in segment.mesh else world
    return [list(range(first, first + shard)) for first in range(0, world, shard)]


def syncs(rounds: int, every: int, accumulates_first: bool) -> list[list[int]]:
    """The microbatches of a step in the groups that are reduced together."""
    size = rounds if accumulates_first else every
    return [list(range(first, min(first + size, rounds))) for first in range(0, rounds, size)]


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


def watch_steps(optimizer: torch.optim.Optimizer, ran: list[str]) -> None:
    """Notes down in `ran` what an optimizer of torch calls before and after each step."""
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))


def clipped(gradients: dict[str, Any], norm: float, clip: tuple[float, float] | None) -> dict[str, Any]:
    """The gradients, scaled so that their norm is at most the first of the clip."""
    factor = clip[0] / (norm + 1e-6) if clip else 1.0
    if factor >= 1:
        return dict(gradients)
    return {name: None if g is None else g * torch.full_like(g, factor) for name, g in gradients.items()}


def exact_norm(gradients: list[torch.Tensor], kind: float = 2.0) -> float:
    """The norm, its sum taken without rounding. Squares of float32 are exact as well."""
    values = torch.cat([g.detach().flatten().double().abs() for g in gradients] or [torch.zeros(1, dtype=torch.float64)])
    if not bool(values.isfinite().all()):
        return math.nan
    if kind == math.inf:
        return max(values.tolist(), default=0.0)
    if kind == 2.0:
        return math.sqrt(math.fsum((values * values).tolist()))
    return math.fsum(values.pow(kind).tolist()) ** (1 / kind)


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
