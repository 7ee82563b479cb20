"""One case: the plain run and the sharded run, step by step, and the first value that differs."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from typing import Any, Callable, Optional

import torch
from torch import nn

from ..checkpoint import load, save
from ..optim import LossScaler, adam, adamw, lion, sgd, torch_optimizer
from ..parallel import parallelize
from ..ranks import MeshComm, run_threads
from ..sharded import Sharded
from ..sharding import fully_shard
from ..units import Precision, Unit
from .compare import Comparison, Differs, Expected, distance
from .case import Case, mesh_text, number_of, parse_call, parse_mesh, size_of
from .plain import PlainRun, frozen


@dataclasses.dataclass
class Subject:
    """What is proved: how to make the model, its batches, and the loss of one."""

    make_model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    plan: "Optional[dict]" = None
    """Of `parallelize`, for cases whose mesh has an axis tp."""
    sequence_dim: Optional[int] = None


class Diverged(Exception):
    """The plain run left the finite numbers, or cannot compute in low precision, so there is nothing to compare."""


@dataclasses.dataclass
class Setting:
    """What words of a history have set."""

    rounds: int = 1
    every: int = 1
    lr_factor: float = 1.0
    next_batch: int = 0
    steps: int = 0
    eval_next: bool = False
    discard_next: bool = False
    freeze: int = 0


def clip_of(case: Case) -> Optional[float]:
    """The largest norm of a gradient, None without clipping."""
    return case.clip


def make_optimizer(sharded: Sharded, case: Case) -> Any:
    """The optimizer of a case, on shards."""
    rule, settings = parse_call(case.optimizer)
    if rule.startswith("torch."):
        return torch_optimizer(getattr(torch.optim, rule[len("torch.") :]), sharded, **settings)
    if rule == "sgd":
        settings["nesterov"] = bool(settings.get("nesterov", 0))
    return {"sgd": sgd, "adam": adam, "adamw": adamw, "lion": lion}[rule](sharded, **settings)


def shard(case: Case, subject: Subject, comm: Any) -> Sharded:
    """The sharded model of a case."""
    torch.manual_seed(case.seed)
    model = subject.make_model()
    recompute = case.option("recompute")
    names = [name for name in case.option("units").split("+") if name]
    modules = dict(model.named_modules())
    missing = [name for name in names if name not in modules]
    if missing:
        raise ValueError(f"the model has no module {missing[0]}")
    prefetch = int(case.option("prefetch"))
    comms = MeshComm(comm, mesh_text(case.mesh))
    if case.tensor_ranks > 1:
        parallelize(model, comms, plan=subject.plan, sequence_dim=subject.sequence_dim)
    return fully_shard(
        model,
        comms,
        strategy=case.strategy,
        units=[Unit(modules[name], recompute=name == recompute) for name in names],
        prefetch_forward=prefetch,
        prefetch_backward=prefetch,
        gather=case.option("gather"),
        buffers=case.option("buffers"),
        bucket_count=int(case.option("buckets")),
        reshard_after_forward=case.option("reshard") == "1",
        granularity=case.option("granularity"),
        precision=Precision(compute=getattr(torch, case.option("compute"))) if case.option("compute") else None,
        numerics=case.mode,
        check_gradients=not case.option("scale"),
        **({"gradient_divide": 1} if case.mode == "canonical" else {}),
    )


def make_scaler(case: Case) -> Optional[LossScaler]:
    """The loss scaler of a case, if it has one."""
    return LossScaler(initial=float(case.option("scale")), growth_interval=2) if case.option("scale") else None


class Trainer:
    """Runs a history twice: first plain, then sharded, segment by segment between loads."""

    def __init__(self, case: Case, subject: Subject):
        self.case, self.subject = case, subject
        self.values, self.farthest = 0, 0.0
        self.checkpoint: "Optional[dict]" = None

    def plain_run(self, case: Case, **flavour) -> PlainRun:
        def make():
            torch.manual_seed(case.seed)
            return self.subject.make_model()

        return PlainRun(make, self.subject.loss, case, **flavour)

    def run(self) -> None:
        case = self.case
        runs = [self.plain_run(case)]
        if case.mode == "fast":
            runs += [self.plain_run(case, flavour="backwards")]
            runs += [self.plain_run(case, flavour="off", off=k) for k in range(3)]
            runs += [self.plain_run(case, dtype=torch.float64)]
        setting = Setting()
        with tempfile.TemporaryDirectory(prefix="shardproof") as folder:
            segment: "list[str]" = []
            load_from = None
            saved: "Optional[tuple]" = None
            for word in [*case.history, "end"]:
                if not (word.startswith("load") or word == "end"):
                    segment.append(word)
                    continue
                saved, setting = self.run_segment(case, runs, segment, setting, os.path.join(folder, "saved"), load_from, saved)
                segment = []
                if word == "end":
                    break
                if saved is None:
                    continue
                case = other_case(case, word)
                load_from = os.path.join(folder, "saved")
                for run, state in zip(runs, saved):
                    run.case = case
                    run.restore(state)
                setting = dataclasses.replace(setting)

    def run_segment(self, case, runs, words, setting, path, load_from, saved):
        plan = []
        for word in words:
            if word == "step":
                plan.append(("step", *self.plain_step(case, runs, setting)))
                setting = dataclasses.replace(
                    setting,
                    eval_next=False,
                    discard_next=False,
                    steps=setting.steps + 1,
                    next_batch=setting.next_batch + setting.rounds * case.data_ranks,
                )
            elif word == "save":
                saved = [run.snapshot() for run in runs]
                plan.append(("save",))
            else:
                setting = changed(setting, word)
                if word.startswith("freeze"):
                    for run in runs:
                        run.freeze(setting.freeze)
        if plan:
            self.run_sharded(case, plan, path, load_from, setting)
        return saved, setting

    def plain_step(self, case, runs, setting):
        ranks = case.data_ranks
        numbers = [[setting.next_batch + k * ranks + rank for rank in range(ranks)] for k in range(setting.rounds)]
        batches = [[self.subject.batch(n) for n in row] for row in numbers]
        expected = []
        for run in runs:
            run.lr_factor = setting.lr_factor
            evaluated = run.losses_without_graph(batches[0]) if setting.eval_next else []
            try:
                losses, gradients = run.gradients(batches, setting.every)
            except RuntimeError as error:
                if case.option("compute"):  # some operators do not know low precision
                    raise Diverged from error
                raise
            scale, finite = run.scale, all(bool(torch.isfinite(g).all()) for g in gradients.values())
            if not finite and not scale:
                raise Diverged
            norm = run.update(dict(gradients), case.clip) if finite else 0.0
            if scale:
                run.adapt_scale(finite)
            state: "dict[str, dict[str, torch.Tensor]]" = {}
            for name, held in run.state.items():
                for slot, value in held.items():
                    state.setdefault(slot, {})[name] = value.clone()
            expected.append(
                Expected(
                    losses,
                    gradients,
                    norm,
                    {name: p.detach().clone() for name, p in run.named.items()},
                    state,
                    evaluated,
                    scale,
                    not finite,
                )
            )
        return numbers, setting, expected

    def run_sharded(self, case, plan, path, load_from, setting):
        values = [0.0] * case.world
        ratios = [0.0] * case.world

        def body(comm):
            sharded = shard(case, self.subject, comm)
            optimizer, scaler = make_optimizer(sharded, case), make_scaler(case)
            if load_from is not None:
                load(load_from, sharded, optimizer, scaler=scaler)
            trains = sorted(name for name, p in sharded.module.named_parameters() if p.requires_grad)
            for kind, *rest in plan:
                if kind == "save":
                    save(path, sharded, optimizer, scaler=scaler, overwrite=True)
                    continue
                numbers, given, expected = rest
                held = frozen(trains, given.freeze) if given.freeze else set()
                parameters = dict(sharded.module.named_parameters())
                for name in trains:
                    parameters[name].requires_grad_(name not in held)
                comparison = Comparison(
                    expected[0], expected[1:-1], expected[-1] if case.mode == "fast" else None, comm.rank, given.steps
                )
                self.step(case, comm.rank, sharded, optimizer, scaler, numbers, given, comparison)
                values[comm.rank] += comparison.values
                ratios[comm.rank] = max(ratios[comm.rank], comparison.farthest)

        run_threads(
            case.world,
            body,
            schedule="serial",
            completion="random",
            seed=case.seed,
            sum="rank_order" if case.mode == "ordered" else "ring",
        )
        self.values += int(sum(values))
        self.farthest = max(self.farthest, *ratios)

    def step(self, case, rank, sharded, optimizer, scaler, numbers, given, comparison):
        loss, batch = self.subject.loss, self.subject.batch
        rank //= case.tensor_ranks  # of the data-parallel ranks
        if given.eval_next:
            with torch.no_grad():
                value = loss(sharded.module, batch(numbers[0][rank]))
            comparison.value("loss without a graph", lambda run: run.evaluated[rank], value)
        if given.discard_next:
            sharded.set_last_microbatch(False)
            loss(sharded.module, batch(numbers[0][rank])).backward()
            sharded.zero_gradients()
        rounds = len(numbers)
        for k, row in enumerate(numbers):
            last = k + 1 == rounds
            sharded.set_last_microbatch(last)
            sharded.set_gradient_sync(last or (k + 1) % given.every == 0)
            value = loss(sharded.module, batch(row[rank]))
            comparison.value(f"loss of microbatch {k}", lambda run, k=k: run.losses[k][rank], value.detach())
            share = value / (rounds * case.data_ranks if case.mode == "canonical" else rounds)
            (scaler.scale(share) if scaler else share).backward()
        if scaler:
            self.value(comparison, "loss scale", lambda run: run.scale, scaler.value)
            skipped = not scaler.unscale(sharded)
            self.value(comparison, "whether the step is skipped", lambda run: run.skipped, skipped)
        if not (scaler and skipped):
            self.update(case, sharded, optimizer, given, comparison)
        self.compare_parameters(sharded, optimizer, comparison)
        self.prove_that_it_notices(comparison, rank, sharded)

    @staticmethod
    def value(comparison, what, pick, got):
        """Compares a number."""
        comparison.value(
            what, lambda run: torch.tensor(pick(run), dtype=torch.float64), torch.tensor(got, dtype=torch.float64)
        )

    def update(self, case, sharded, optimizer, given, comparison):
        comparison.pieces("gradient", lambda run: run.gradients, sharded.gradients())
        norm_max = clip_of(case)
        norm = sharded.clip_gradients(norm_max) if norm_max is not None else sharded.gradient_norm()
        self.value(comparison, "norm of the gradient", lambda run: run.norm, norm)
        if hasattr(optimizer, "set_lr_factor"):
            optimizer.set_lr_factor(given.lr_factor)
        else:
            for group in optimizer.param_groups:
                group["lr"] = parse_call(case.optimizer)[1]["lr"] * given.lr_factor
        optimizer.step()

    @staticmethod
    def compare_parameters(sharded, optimizer, comparison):
        comparison.pieces("parameter", lambda run: run.parameters, sharded.main_parameters())
        for name, whole in sharded.gather().items():
            if name in comparison.plain.parameters:
                comparison.value(
                    f"gathered parameter {name}", lambda run, name=name: run.parameters[name].to(whole.dtype), whole
                )
        if hasattr(optimizer, "state_names"):
            for slot in optimizer.state_names():
                trained = comparison.plain.state.get(slot, {})
                comparison.pieces(
                    f"optimizer state {slot}",
                    lambda run, slot=slot: run.state[slot],
                    [piece for piece in optimizer.state(slot) if piece.name in trained],
                )

    @staticmethod
    def prove_that_it_notices(comparison, rank, sharded):
        """A comparison that holds has to fail when a value is another one."""
        pieces = sharded.main_parameters()
        if not pieces:
            return
        piece = pieces[0]
        wrong = piece.data.clone()
        wrong[0] = wrong[0] + 1 if comparison.truth is not None else torch.nextafter(wrong[0], wrong[0] + 1)
        try:
            comparison.value(
                "a planted error", lambda run: run.parameters[piece.name].reshape(-1)[piece.begin : piece.end], wrong
            )
        except Differs:
            return
        if comparison.truth is None or distance(wrong, piece.data.double()) > 1e-2:
            raise AssertionError("the comparison did not notice a planted error; this is a bug of shardproof.verify")


def changed(setting: Setting, word: str) -> Setting:
    """The setting after a word of a history."""
    if word == "eval":
        return dataclasses.replace(setting, eval_next=True)
    if word == "discard":
        return dataclasses.replace(setting, discard_next=True)
    field = {"accumulate": "rounds", "sync": "every", "freeze": "freeze", "lr": "lr_factor"}[word[: word.index("(")]]
    number = number_of(word)
    return dataclasses.replace(setting, **{field: number / 100 if field == "lr_factor" else number})


def other_case(case: Case, word: str) -> Case:
    """The case as it goes on after a load."""
    if word.startswith("load@mesh("):
        mesh = parse_mesh(word[len("load@mesh(") : -1])
        if {name for name, _ in mesh} == {name for name, _ in case.mesh} and size_of(mesh) >= 1:
            return dataclasses.replace(case, mesh=mesh)
    if word.startswith("load@strategy("):
        return dataclasses.replace(case, strategy=word[len("load@strategy(") : -1])
    return case
