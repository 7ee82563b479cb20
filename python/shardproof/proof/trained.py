"""One case: the plain run and the sharded run, step by step, and the first value that differs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import tempfile
import types
from typing import Any, Callable, Optional

import torch
from torch import nn

from .._C import Error
from ..checkpoint import load, save
from ..optim import LossScaler, Optimizer, adam, adamw, lion, sgd, torch_optimizer
from ..parallel import parallelize
from ..ranks import MeshComm, run_threads
from ..sharded import Sharded
from ..sharding import fully_shard
from ..units import Precision, Unit
from .compare import TOLERANCE, Comparison, Differs, Expected
from .case import Case, mesh_text, number_of, parse_call, parse_mesh, size_of
from .plain import PlainRun, frozen, in_state_dict, watch_steps
from .witness import Witness


@dataclasses.dataclass
class Subject:
    """What is proved: how to make the model, its batches, and the loss of one."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    plan: "Optional[dict]" = None
    """Of `parallelize`, for cases whose mesh has an axis tp."""
    sequence_dim: Optional[int] = None
    seed: int = 0
    made: "dict[int, Any]" = dataclasses.field(default_factory=dict)
    ignored: "frozenset[str]" = frozenset()
    """What is another thing in each plain model, such as an address; `prepare` finds it."""

    def batch(self, number: int) -> Any:
        """Batch number n, made once, without a trace in torch's generator."""
        if number not in self.made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed * 1_000_003 + number)
                self.made[number] = self.make_batch(number)
        return self.made[number]


def threads_on(device: torch.device) -> dict:
    """Where a case's ranks run, and when a collective takes effect: on a device its own streams decide that."""
    return {"completion": "random"} if device.type == "cpu" else {"device": device}


class Diverged(Exception):
    """The plain run left the finite numbers, or cannot compute what was drawn, so there is nothing to compare."""


class PlainFailed(Exception):
    """The plain run raised. `error` is the model's own."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


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


def names_of_units(case: Case) -> "list[str]":
    """The units of a case by their names."""
    return [name for name in case.option("units").split("+") if name]


def shard(case: Case, subject: Subject, model: nn.Module, comm: Any) -> Sharded:
    """The sharded model of a case."""
    recompute = case.option("recompute")
    names, modules = names_of_units(case), dict(model.named_modules())
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
        self.float64 = True

    def make(self) -> nn.Module:
        torch.manual_seed(self.case.seed)
        return self.subject.make_model()

    def plain_run(self, **flavour) -> PlainRun:
        return PlainRun(self.make, self.subject.loss, self.case, **flavour)

    @contextlib.contextmanager
    def plainly(self, asks: bool = False):
        """What the plain run raises is the model's own; or it cannot compute what a case `asks` for besides."""
        try:
            yield
        except Diverged:
            raise
        except Exception as error:
            if asks or self.case.option("compute") or self.case.option("inputs"):
                raise Diverged from error
            raise PlainFailed(error) from error

    def run(self) -> None:
        case = self.case
        with self.plainly():
            runs = [self.plain_run()]
        missing = [name for name in names_of_units(case) if name not in dict(runs[0].model.named_modules())]
        if missing:
            raise Error(f"[verify] the case has a unit {missing[0]!r}, and the model has no module of that name")
        if case.mode == "fast":
            runs += [self.plain_run(flavour="backwards")]
            runs += [self.plain_run(flavour="off", off=k) for k in range(3)]
            runs += [self.plain_run(dtype=torch.float64)]
        setting, saved, load_from = Setting(), None, None
        with tempfile.TemporaryDirectory(prefix="shardproof") as folder:
            segment: "list[str]" = []
            for word in [*case.history, "end"]:
                if not (word.startswith("load") or word == "end"):
                    segment.append(word)
                    continue
                path = os.path.join(folder, "saved")
                saved, setting = self.run_segment(case, runs, segment, setting, path, load_from, saved)
                segment = []
                if word == "end":
                    break
                if saved is None:
                    continue
                case, load_from = other_case(case, word), path
                for run, state in zip(runs, saved):
                    with self.plainly():
                        finite = run.restore(state, case, self.before_loads(case))
                    if not finite:
                        raise Diverged
                    run.freeze(setting.freeze)

    def before_loads(self, case: Case) -> list:
        """The batches that models train on before they are loaded into, if the process is not a fresh one."""
        used = case.option("resume") and not case.option("compute")
        return [self.subject.batch(rank) for rank in range(case.data_ranks)] if used else []

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
            self.run_sharded(case, plan, path, load_from, runs[0])
        return saved, setting

    def plain_step(self, case, runs, setting):
        ranks = case.data_ranks
        numbers = [[setting.next_batch + k * ranks + rank for rank in range(ranks)] for k in range(setting.rounds)]
        with self.plainly():
            batches = [[self.subject.batch(n) for n in row] for row in numbers]
        expected = []
        for run in list(runs):
            try:
                with self.plainly(asks=setting.freeze > 0):  # a batch may reach frozen parameters only
                    expected.append(self.expected(case, run, batches, setting))
            except (PlainFailed, Diverged):
                if run.dtype is None:
                    raise
                runs.remove(run)  # an operator without a kernel in float64
                self.float64 = False
        return numbers, setting, expected

    @staticmethod
    def expected(case, run, batches, setting) -> Expected:
        run.lr_factor = setting.lr_factor
        evaluated = run.evaluated(batches[0]) if setting.eval_next else []
        if setting.discard_next:
            run.gradients(batches[:1], 1)
        seen, gradients = run.gradients(batches, setting.every)
        scale, finite = run.scale, all(bool(torch.isfinite(g).all()) for g in gradients.values())
        losses = [value for row in seen for each in row for name, value in each.items() if name.startswith("loss")]
        if not scale and not (finite and all(bool(value.isfinite()) for value in losses)):
            raise Diverged
        run.hooks_ran.clear()
        norm = run.update(dict(gradients), case.clip) if finite else 0.0
        if scale:
            run.adapt_scale(finite)
        state: "dict[str, dict[str, torch.Tensor]]" = {}
        for name, held in run.state.items():
            for slot, value in held.items():
                state.setdefault(slot, {})[name] = value.clone()
        parameters = {n: p.detach().clone() for n, p in run.model.named_parameters(remove_duplicate=False)}
        after = run.after_step()
        wide = run.dtype is not None
        hooks = list(run.hooks_ran)
        return Expected(seen, gradients, norm, parameters, state, after, evaluated, scale, not finite, hooks, wide)

    def recomputation_is_plain(self) -> bool:
        """Whether torch.utils.checkpoint of the recomputed unit gives what the plain run gives, in two microbatches."""
        if not self.case.option("recompute"):
            return True
        ranks = range(self.case.data_ranks)
        batches = [[self.subject.batch(rank) for rank in ranks]] * 2
        try:
            plain, again = (
                self.expected(self.case, self.plain_run(flavour=flavour), batches, Setting()) for flavour in ("", "recompute")
            )
            comparison = Comparison([plain], False, 0, 0, self.subject.ignored)
            for k, rank in itertools.product(range(2), ranks):
                comparison.facts(lambda run, k=k, rank=rank: run.seen[k][rank], again.seen[k][rank])
            comparison.facts(lambda run: run.gradients, again.gradients)
        except Exception:
            return False
        return True

    def run_sharded(self, case, plan, path, load_from, plain):
        values, ratios = [0.0] * case.world, [0.0] * case.world
        with self.plainly():
            models = [self.make() for _ in range(case.world)]

        def body(comm):
            rank, model = comm.rank // case.tensor_ranks, models[comm.rank]  # of the data-parallel ranks
            witness = Witness(model, self.subject.loss, case.option("inputs") == "grad")
            sharded = shard(case, self.subject, model, comm)
            witness.watch()
            optimizer, scaler, hooks = make_optimizer(sharded, case), make_scaler(case), []
            if hasattr(optimizer, "register_step_post_hook"):
                watch_steps(optimizer, hooks)
            if load_from is not None:
                for given in self.before_loads(case)[rank:][:1]:
                    (witness.forward("", given)[0] / (case.data_ranks if case.mode == "canonical" else 1)).backward()
                    optimizer.step()
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
                comparison = Comparison(expected, case.mode == "fast", comm.rank, given.steps, self.subject.ignored)
                hooks.clear()
                self.step(case, rank, sharded, optimizer, scaler, witness, numbers, given, comparison)
                comparison.facts(lambda run: {"hooks of the optimizer": run.hooks}, {"hooks of the optimizer": list(hooks)})
                values[comm.rank] += comparison.values
                ratios[comm.rank] = max(ratios[comm.rank], comparison.farthest)

        device = next((p.device for p in models[0].parameters()), torch.device("cpu"))
        sums = "rank_order" if case.mode == "ordered" else "ring"
        run_threads(case.world, body, schedule="serial", seed=case.seed, sum=sums, **threads_on(device))
        seeds_itself = "seed of torch's generator" in self.subject.ignored  # as by torch.seed()
        if case.tensor_ranks == 1 and not seeds_itself and not torch.equal(torch.get_rng_state(), plain.stream):
            raise Differs("torch's generator has drawn other numbers than without sharding")
        self.values += int(sum(values))
        self.farthest = max(self.farthest, *ratios)

    def step(self, case, rank, sharded, optimizer, scaler, witness, numbers, given, comparison):
        only = "loss" if case.tensor_ranks > 1 else ""  # what else a model gives may be cut over ranks
        batch = self.subject.batch
        if given.eval_next:
            with torch.no_grad():
                seen = witness.forward("no graph", batch(numbers[0][rank]))[1]
            comparison.facts(lambda run: run.evaluated[rank], seen, only)
        if given.discard_next:
            sharded.set_last_microbatch(False)
            witness.forward("", batch(numbers[0][rank]))[0].backward()
            sharded.zero_gradients()
        rounds = len(numbers)
        for k, row in enumerate(numbers):
            last = k + 1 == rounds
            sharded.set_last_microbatch(last)
            sharded.set_gradient_sync(last or (k + 1) % given.every == 0)
            value, seen = witness.forward(f"microbatch {k}", batch(row[rank]))
            share = value / (rounds * case.data_ranks if case.mode == "canonical" else rounds)
            (scaler.scale(share) if scaler else share).backward()
            seen.update(witness.arguments(f"microbatch {k}"))
            comparison.facts(lambda run, k=k: run.seen[k][rank], seen, only)
        if scaler:
            self.value(comparison, "loss scale", lambda run: run.scale, scaler.value)
            skipped = not scaler.unscale(sharded)
            self.value(comparison, "whether the step is skipped", lambda run: run.skipped, skipped)
        if not (scaler and skipped):
            self.update(case, sharded, optimizer, given, comparison)
        state = sharded.state_dict()
        self.compare_parameters(sharded, optimizer, state, comparison)
        if case.tensor_ranks == 1:
            comparison.facts(lambda run: run.after[rank], {**witness.state(), **in_state_dict(sharded.module, state)})
        prove_that_it_notices(comparison, sharded)

    @staticmethod
    def value(comparison, what, pick, got):
        """Compares a number."""
        comparison.value(what, lambda run: torch.tensor(float(pick(run))).double(), torch.tensor(float(got)).double())

    def update(self, case, sharded, optimizer, given, comparison):
        comparison.pieces("gradient", lambda run: run.gradients, sharded.gradients())
        norm_max = clip_of(case)
        norm = sharded.clip_gradients(norm_max) if norm_max is not None else sharded.gradient_norm()
        plain, parameters = comparison.plain.norm, comparison.plain.parameters.values()
        if math.isclose(norm, plain, rel_tol=1e-6) and any(p.dtype != torch.float32 for p in parameters):
            norm = plain  # only float32 has a specified norm
        self.value(comparison, "norm of the gradient", lambda run: run.norm, norm)
        if hasattr(optimizer, "set_lr_factor"):
            optimizer.set_lr_factor(given.lr_factor)
        else:
            for group in optimizer.param_groups:
                group["lr"] = parse_call(case.optimizer)[1]["lr"] * given.lr_factor
        optimizer.step()

    @staticmethod
    def compare_parameters(sharded, optimizer, state, comparison):
        comparison.pieces("parameter", lambda run: run.parameters, sharded.main_parameters())
        for name, whole in state.items():
            if name in comparison.plain.parameters:
                comparison.value(
                    f"gathered parameter {name}", lambda run, name=name: run.parameters[name].to(whole.dtype), whole
                )
        for slot, pieces in pieces_of_state(sharded, optimizer).items():
            trained = comparison.plain.state.get(slot, {})
            comparison.pieces(
                f"optimizer state {slot}",
                lambda run, slot=slot: run.state[slot],
                [piece for piece in pieces if piece.name in trained],
            )


def pieces_of_state(sharded: Sharded, optimizer: Any) -> "dict[str, list]":
    """What this rank holds of the optimizer's state, by slot."""
    if isinstance(optimizer, Optimizer):
        return {slot: optimizer.state(slot) for slot in optimizer.state_names()}
    slots: "dict[str, list]" = {}
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


def prove_that_it_notices(comparison: Comparison, sharded: Sharded) -> None:
    """A comparison that holds has to fail when a value is another one: the next float, or, with tolerance, one far off."""
    piece = next((piece for piece in sharded.main_parameters() if piece.data.numel()), None)
    if piece is None:
        return

    def of_piece(run):
        return run.parameters[piece.name].reshape(-1)[piece.begin : piece.end]

    wrong = piece.data.clone()
    if comparison.truth is None:
        wrong[0] = torch.nextafter(wrong[0], torch.full_like(wrong[0], math.inf))
    elif comparison.bound(of_piece)[1] * TOLERANCE < 1:
        wrong = wrong + wrong.abs() + 1
    else:  # plain runs do not know a digit of it
        return
    try:
        comparison.value("a planted error", of_piece, wrong)
    except Differs:
        return
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
