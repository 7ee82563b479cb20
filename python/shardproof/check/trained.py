"""This library's ranks: threads that train a model under one of its strategies, and the verdict on what they had."""

from __future__ import annotations

import contextlib
import os
import tempfile
import types
from typing import Any

import torch

from ..checkpoint import load, save
from ..optim import LossScaler, Optimizer, adam, adamw, lion, sgd, torch_optimizer
from ..parallel import parallelize
from ..ranks import MeshComm, run_threads
from ..sharded import Sharded
from ..sharding import fully_shard
from ..units import Precision, Unit
from .assemble import Piece
from .case import Case
from .judge import first_difference
from .plain import Diverged, PlainFailed, PlainRun, plainly, watch_steps
from .plan import Plan, Step, frozen_names, optimizer_of
from .train import Rank
from .verdict import Verdict, failure_of
from .witness import in_state_dict


def threads_on(device: torch.device) -> dict:
    """Where a case's ranks run, and when a collective takes effect: on a device its own streams decide that."""
    return {"completion": "random"} if device.type == "cpu" else {"device": device}


def make_optimizer(sharded: Sharded, plan: Plan) -> Any:
    """The optimizer of a case, on shards."""
    rule, settings = optimizer_of(plan.optimizer)
    if isinstance(rule, type):
        return torch_optimizer(rule, sharded, **settings)
    if rule == "sgd":
        settings["nesterov"] = bool(settings.get("nesterov", 0))
    return {"sgd": sgd, "adam": adam, "adamw": adamw, "lion": lion}[rule](sharded, **settings)


def shard(case: Case, index: int, model: torch.nn.Module, comm: Any) -> Sharded:
    """The sharded model of a case."""
    segment, options, modules = case.segments[index], case.plan.options, dict(model.named_modules())
    comms = MeshComm(comm, ",".join(f"{axis}={size}" for axis, size in segment.mesh.items()))
    if segment.tensor_ranks > 1:
        parallelize(model, comms, plan=case.subject.plan, sequence_dim=case.subject.sequence_dim)
    return fully_shard(
        model,
        comms,
        strategy=segment.strategy,
        units=[Unit(modules[name], recompute=name == options["recompute"]) for name in options["units"]],
        prefetch_forward=options["prefetch"],
        prefetch_backward=options["prefetch"],
        gather=options["gather"],
        buffers=options["buffers"],
        bucket_count=options["buckets"],
        reshard_after_forward=options["reshard"],
        granularity=options["granularity"],
        shard_dim=options["shard_dim"],
        granule=options["granule"],
        precision=Precision(compute=options["compute"]) if options["compute"] else None,
        numerics=case.plan.mode,
        check_gradients=not options["scale"],
        **({"gradient_divide": 1} if case.plan.mode == "canonical" else {}),
    )


class LibraryRank(Rank):
    """A rank-thread of this library."""

    def __init__(self, case: Case, index: int, model: torch.nn.Module, comm: Any) -> None:
        super().__init__(case, index, model)
        self.place = case.place(index, comm.rank)
        self.sharded = shard(case, index, model, comm)
        self.witness.watch()
        self.optimizer = make_optimizer(self.sharded, self.plan)
        scale = self.plan.options["scale"]
        self.scaler = LossScaler(initial=float(scale), growth_interval=2) if scale else None
        self.hooks: list[str] = []
        if hasattr(self.optimizer, "register_step_post_hook"):
            watch_steps(self.optimizer, self.hooks)
        self.trains = sorted(name for name, p in self.sharded.module.named_parameters() if p.requires_grad)
        self.parts = self.segment.data_ranks if self.plan.mode == "canonical" else 1  # sums are no means there

    def begin(self, step: Step) -> None:
        held, parameters = frozen_names(self.trains, step.frozen), dict(self.sharded.module.named_parameters())
        for name in self.trains:
            parameters[name].requires_grad_(name not in held)
        self.hooks.clear()
        if hasattr(self.optimizer, "set_lr_factor"):
            self.optimizer.set_lr_factor(step.lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = optimizer_of(self.plan.optimizer)[1]["lr"] * step.lr

    def discard(self, batch: Any) -> None:
        self.sharded.set_last_microbatch(False)
        self.witness.forward("", batch)[0].backward()
        self.sharded.zero_gradients()

    def microbatch(self, m: int, step: Step) -> Any:
        self.sharded.set_last_microbatch(m + 1 == step.microbatches)
        self.sharded.set_gradient_sync(step.synchronizes(m))
        return contextlib.nullcontext()

    def backward(self, value: torch.Tensor, step: Step) -> None:
        share = value / (step.microbatches * self.parts)
        (self.scaler.scale(share) if self.scaler else share).backward()

    def update(self, step: Step) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        if self.scaler:
            seen["loss scale"] = self.scaler.value
            seen["whether the step is skipped"] = not self.scaler.unscale(self.sharded)
            if seen["whether the step is skipped"]:
                return seen
        seen.update(by_name("gradient of", self.sharded.gradients()))
        clips = self.sharded.clip_gradients
        seen["norm of the gradient"] = clips(*step.clip) if step.clip else self.sharded.gradient_norm()
        self.optimizer.step()
        return seen

    def held(self, last: bool) -> dict[str, Any]:
        state = self.sharded.state_dict()
        every = dict(self.sharded.module.named_parameters(remove_duplicate=False))
        seen = by_name("parameter of", self.sharded.main_parameters())
        seen.update({f"gathered parameter of {name}": state[name].clone() for name in every if name in state})
        for slot, pieces in pieces_of_state(self.sharded, self.optimizer).items():
            seen.update(by_name(f"optimizer state {slot} of", pieces))
        seen.update({**self.witness.state(), **in_state_dict(self.sharded.module, state)})
        return {**seen, "hooks of the optimizer": list(self.hooks)}

    def save(self, folder: str) -> None:
        save(os.path.join(folder, "saved"), self.sharded, self.optimizer, scaler=self.scaler, overwrite=True)

    def load(self, folder: str) -> None:
        for given in self.subject.before_loads(self.plan, self.segment)[self.place :][:1]:
            (self.witness.forward("", given)[0] / self.parts).backward()
            self.optimizer.step()
        load(os.path.join(folder, "saved"), self.sharded, self.optimizer, scaler=self.scaler)


def held_of(pieces: list) -> dict[str, list[Piece]]:
    """What a rank holds of each parameter."""
    found: dict[str, list[Piece]] = {}
    for each in pieces:
        found.setdefault(each.name, []).append(Piece(each.data.detach().clone(), flat=(each.begin, each.end)))
    return found


def by_name(kind: str, pieces: list) -> dict[str, list[Piece]]:
    """The same by names of values that are compared."""
    return {f"{kind} {name}": held for name, held in held_of(pieces).items()}


def pieces_of_state(sharded: Sharded, optimizer: Any) -> dict[str, list]:
    """What this rank holds of the optimizer's state, by slot."""
    if isinstance(optimizer, Optimizer):
        return {slot: optimizer.state(slot) for slot in optimizer.state_names()}
    slots: dict[str, list] = {}
    held = {name: iter(pieces) for name, pieces in optimizer.torch_state.pieces.items()}
    for piece in sharded.main_parameters():
        for slot, value in optimizer.state.get(next(held[piece.name]), {}).items():
            if value is None:
                continue
            value = torch.as_tensor(value).detach()
            begin, end = (piece.begin, piece.end) if value.dim() else (0, 1)
            found = types.SimpleNamespace(name=piece.name, begin=begin, end=end, data=value.reshape(-1))
            slots.setdefault(slot, []).append(found)
    return slots


def tried(case: Case) -> Verdict:
    """Runs a case, plain and then sharded."""
    if isinstance(case.plainly, Verdict):
        return case.finish(case.plainly)
    records: list[list[list]] = []
    error: Exception | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="shardproof") as folder:
            for index in range(len(case.segments)):
                run_segment(case, index, folder, records)
    except Diverged as failed:
        return case.finish(Verdict("diverged", message=str(failed)))
    except PlainFailed as failed:  # the user's own function, which made one more model
        return case.finish(Verdict("plain", message=str(failed), error=failed.error))
    except Exception as raised:  # noqa: B902  whatever a user's model raises only when it is sharded
        error = raised
    verdict = case.judge(records)
    if error and verdict.kind != "differs":
        verdict = case.finish(raised_by(error))
    if verdict.bad and not recomputation_is_plain(case):
        says = "torch.utils.checkpoint trains something else, too"
        return case.finish(Verdict("diverged", message=says, error=verdict.error))
    verdict.kind = "diverged" if verdict.kind == "vacuous" else verdict.kind
    return verdict


def raised_by(error: Exception) -> Verdict:
    """The verdict on what only the sharded run raised."""
    failure = failure_of(error)
    if isinstance(error, DrewMore):
        return Verdict("differs", message=str(error), where="random numbers", error=error)
    return Verdict("raised", message=f"{failure.said} ({failure.place})", where=failure.place, error=error)


class DrewMore(Exception):
    """A sharded run drew other random numbers than the plain one."""


def run_segment(case: Case, index: int, folder: str, records: list) -> None:
    """Trains a segment on rank-threads, and appends what they had, all the same if they raise."""
    segment, plan = case.segments[index], case.plan
    with plainly(plan):
        models = [case.make_model() for _ in range(segment.ranks)]
    ranks: list[list] = [[] for _ in models]
    records.append(ranks)

    def body(comm):
        rank = LibraryRank(case, index, models[comm.rank], comm)
        rank.records = ranks[comm.rank]
        rank.run(folder)

    device = next((p.device for p in models[0].parameters()), torch.device("cpu"))
    sums = "rank_order" if plan.mode == "ordered" else "ring"
    run_threads(segment.ranks, body, schedule="serial", seed=plan.data, sum=sums, **threads_on(device))
    seeds_itself = "seed of torch's generator" in case.subject.ignored  # as by torch.seed()
    stream = case.plainly.streams[index]
    if segment.tensor_ranks == 1 and not seeds_itself and not torch.equal(torch.get_rng_state(), stream):
        raise DrewMore(f"segment {index}: torch's generator has drawn other numbers than without sharding")


def recomputation_is_plain(case: Case) -> bool:
    """Whether torch.utils.checkpoint of the recomputed unit gives what the plain run gives, in two microbatches."""
    if not case.plan.options["recompute"]:
        return True
    batches = [[case.subject.batch(rank) for rank in range(case.segments[0].data_ranks)]] * 2
    try:
        plain, again = (PlainRun(case, flavour).step(Step(2), batches) for flavour in ("", "recompute"))
    except Exception:
        return False
    names = [name for name in plain.values if name.startswith("gradient of ")]
    facts = [(plain.values[name], again.values.get(name)) for name in names]
    for one, two in zip(plain.places, again.places):
        facts += [(one[name], two.get(name)) for name in one if "microbatch" in name and name not in case.subject.ignored]
    return all(same(one, two) for one, two in facts)


def same(one: Any, two: Any) -> bool:
    """Whether two values have the same bits."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return first_difference(one, two) is None
    return repr(one) == repr(two)
