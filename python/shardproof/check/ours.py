"""What is drawn of this library: strategies, meshes, options, optimizers and histories."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Mapping, Sequence

import torch
from torch import nn

from .._C import Error
from ..units import _Casts as Casts
from ..units import map_tensors
from .case import Case
from .draw import Draw
from .plan import Plan, Segment, Step
from .verdict import Verdict

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "hzero2")
HYBRID = ("hsdp", "hfsdp", "hzero2")  # on meshes that have both axes
RULES = ("sgd", "adam", "adamw", "lion")  # of the library, of which the plain run knows the formulas
OPTIMIZERS = (
    "sgd(lr=0.1)",
    "sgd(lr=0.05,momentum=0.9)",
    "sgd(lr=0.05,momentum=0.9,nesterov=1,weight_decay=0.1)",
    "adamw(lr=0.01)",
    "adamw(lr=0.003,weight_decay=0.1)",
    "adam(lr=0.01,weight_decay=0.1)",
    "lion(lr=0.003)",
    "torch.SGD(lr=0.05,momentum=0.9)",
    "torch.AdamW(lr=0.01)",
    "torch.Adam(lr=0.01)",
)
OPTIONS: dict[str, tuple] = {
    "prefetch": (0, 1, 2),
    "gather": ("copied", "side_by_side"),
    "buffers": ("freed", "pooled"),
    "buckets": (0, 2),
    "reshard": (True, False),
    "granularity": ("element", "tensor", "row"),
    "shard_dim": (0, 1),  # along which granularity row cuts
    "granule": (1, 5, 32),  # of granularity element
    "compute": (None, torch.bfloat16, torch.float16),
    "scale": (0, 4, 1024, 1000000000),  # the loss scale at first
    "resume": ("fresh", "used"),  # what is loaded into has trained something else
    "inputs": ("plain", "grad"),  # floating tensors of a batch want gradients, too
}
NUMBERS = ("scale", "prefetch", "shard_dim", "granule")
MODES = ("ordered", "canonical", "fast")
ONLY_ORDERED = ("compute", "scale")
CLIPS = (None, (0.1, 2.0), (0.5, 2.0), (1.0, 2.0))
ALWAYS = ("gradient of ", "norm of ", "parameter of ", "gathered parameter of ", "optimizer state ", "hooks of ", "whether ")
RATES = (1.0, 0.1, 0.5, 2.0)


@dataclass
class Subject:
    """A model that this library shards: how to make it, its batches, and the loss of one."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    plan: dict | None = None
    """Of `parallelize`, for cases whose mesh has an axis tp."""
    sequence_dim: int | None = None
    seed: int = 0
    strategies: Sequence[str] = STRATEGIES
    optimizers: Sequence[str] = OPTIMIZERS
    modes: Sequence[str] = MODES
    ranks_max: int = 4
    units: Sequence[str] = ("",)
    """The sets of units that may be drawn, each a text of names joined by '+'."""
    specified: bool = True
    """Whether all parameters are in float32. For others no formulas are specified, so the optimizer is one of torch, and
    nothing is clipped or summed in fixed point."""
    steps_max: int = 3
    made: dict[int, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    """What is another thing in each plain model, such as an address; `prepare` finds it."""
    name: str = "verify"
    patience: float = 60.0
    strict: ClassVar[bool] = True
    refusals: ClassVar[Sequence[str]] = ()
    known: ClassVar[Mapping[str, str]] = {}
    before: Callable[[Plan], None] = lambda plan: None
    """Called when a case is drawn, before it runs."""

    def batch(self, number: int) -> Any:
        """Batch number n, made once, without a trace in torch's generator."""
        if number not in self.made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed * 1_000_003 + number)
                self.made[number] = self.make_batch(number)
        return self.made[number]

    def run(self, number: tuple[int, int], values: dict[str, int] | None) -> Verdict:
        """The verdict on a random case, or on the one that made such choices. It runs in this process, on rank-threads."""
        return self.tried(Draw(*number, values=values))

    def tried(self, draw: Draw) -> Verdict:
        """The verdict on the case of a draw."""
        from .trained import tried

        case = Case(self, draw)
        draw.require_used()
        self.before(case.plan)
        verdict = tried(case)
        if verdict.kind == "plain":
            note = f"shardproof.verify: the plain model raises this without sharding, in the case {verdict.line}"
            verdict.error.add_note(note)
        return verdict

    def draw_plan(self, draw: Draw) -> Plan:
        return draw_plan(draw, self)

    def base_of(self, draw: Draw, plan: Plan) -> None:
        """Models of the user's are made anew, as they may share what cannot be copied."""

    def model_of(self, case: Case) -> nn.Module:
        """A model as it is at the start. What it draws is drawn from the stream that the run goes on with."""
        torch.manual_seed(case.plan.data)
        return self.make_model()

    def batches(self, case: Case, segment: int, step: int, microbatch: int) -> list:
        """One microbatch of each data-parallel rank. None is seen twice."""
        steps = [(each, s.data_ranks) for s in case.segments[:segment] for each in s.steps]
        here = case.segments[segment]
        steps += [(each, here.data_ranks) for each in here.steps[:step]]
        first = sum(each.microbatches * ranks for each, ranks in steps) + microbatch * here.data_ranks
        return [self.batch(first + rank) for rank in range(here.data_ranks)]

    def loss_of(self, model: nn.Module, batch: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.loss(model, batch)

    def map_tensors(self, value: Any, visit: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return map_tensors(value, visit)

    def lower(self, plan: Plan, model: nn.Module, low: torch.dtype) -> None:
        """Casts what units are given as the library does."""
        modules = dict(model.named_modules())
        for name in {"", *plan.options["units"]}:
            cast_at_border(modules[name], low)

    def require(self, case: Case, model: nn.Module) -> None:
        """Throws for units that the model has not."""
        names = dict(model.named_modules())
        for name in case.plan.options["units"]:
            if name not in names:
                raise Error(f"[verify] the case has a unit {name!r}, and the model has no module of that name")

    def before_loads(self, plan: Plan, segment: Segment) -> list:
        """The batches that models train on before they are loaded into, if the process is not a fresh one."""
        used = plan.options["resume"] == "used" and not plan.options["compute"]
        return [self.batch(rank) for rank in range(segment.data_ranks)] if used else []

    def compares(self, case: Case, segment: int, rank: int, name: str) -> bool:
        """Whether a value is compared. What else a model gives and holds may be cut over ranks of tensor parallelism."""
        whole = case.segments[segment].tensor_ranks == 1 or name.startswith(("loss ", *ALWAYS))
        return whole and name not in self.ignored

    def stop(self) -> None:
        """As of a crew; there is nothing to stop."""


def draw_plan(draw: Draw, subject: Subject) -> Plan:
    """A random case of the subject."""
    fast = "fast" in subject.modes
    tensor_ranks = draw.choice("tp", (1, 2), 0.4, parse=_positive) if subject.plan is not None and fast else 1
    modes = [mode for mode in MODES if mode in subject.modes and (subject.specified or mode != "canonical")]
    if tensor_ranks > 1 or not modes:
        modes = ["fast" if tensor_ranks > 1 else "ordered"]
    mode = draw.choice("mode", modes, 0.4, "ordered")
    options = _draw_options(draw, subject, mode)
    optimizers = [each for each in subject.optimizers if subject.specified or each.startswith("torch.")]
    optimizer = draw.choice("optimizer", optimizers or ["torch.AdamW(lr=0.01)"], None, OPTIMIZERS[0], str)
    count = draw.integer("segments", 1, 3) if draw.flag("load", 0.4 if subject.steps_max > 1 else 0.0) else 1
    segments: list[Segment] = []
    for i in range(count):
        segments.append(_draw_segment(draw, subject, i, tensor_ranks, segments[-1] if i else None))
        if i + 1 < count and not (i and draw.flag(f"s{i}.unsaved", 0.2)):
            lost = draw.integer(f"s{i}.lost" if i else "lost", 0, len(segments[i].steps), 0.3)
            segments[i].saved = len(segments[i].steps) - lost
    return Plan(segments, options, optimizer, draw.integer("data", 0, 999_999), mode=mode)


def _draw_options(draw: Draw, subject: Subject, mode: str) -> dict[str, Any]:
    units = draw.choice("units", subject.units, None, "", str)
    options = {"units": [name for name in units.split("+") if name]}
    options["recompute"] = draw.choice("recompute", ["", *options["units"]], 0.25) if units else ""
    for name, values in OPTIONS.items():
        if name in ONLY_ORDERED and (mode != "ordered" or not subject.specified):
            options[name] = values[0]
        else:
            if name == "granularity" and options["gather"] == "side_by_side":  # which fully_shard refuses
                values = [value for value in values if value != "row"]
            if name == "granule" and options["granularity"] != "element":  # likewise
                values = values[:1]
            options[name] = draw.choice(name, values, 0.25, parse=int if name in NUMBERS else None)
    return options


def _draw_segment(draw: Draw, subject: Subject, index: int, tensor_ranks: int, before: Segment | None) -> Segment:
    """Where nothing else is drawn, a segment has the strategy and the mesh of the one before."""
    prefix = f"s{index}." if index else ""
    at_first = before.strategy if before else STRATEGIES[0]
    names = sorted(subject.strategies, key=lambda each: (each != at_first, STRATEGIES.index(each)))
    name = draw.choice(prefix + "strategy", names, 0.35 if before else None, at_first, _strategy)
    room, mesh = max(2, subject.ranks_max // tensor_ranks), {}
    hybrid = name in HYBRID
    sizes = before.mesh if before else {}
    often = 0.35 if before else 0.8 if hybrid else 0.4
    copies = _draw_size(draw, prefix + "dp_replicate", room, sizes.get("dp_replicate", 1), often)
    if hybrid or copies > 1:
        mesh["dp_replicate"] = copies
    often = 0.35 if before else 0.9
    mesh["dp_shard"] = _draw_size(draw, prefix + "dp_shard", room // copies, sizes.get("dp_shard", 1), often)
    if tensor_ranks > 1:
        mesh["tp"] = tensor_ranks
    count = draw.integer(prefix + "steps", 1, subject.steps_max)
    steps = [_draw_step(draw, subject, f"{prefix}step{s}.") for s in range(count)]
    return Segment(mesh, steps, None, name)


def _draw_size(draw: Draw, name: str, room: int, at_first: int, chance: float) -> int:
    sizes = [at_first, *(size for size in range(1, room + 1) if size != at_first)]
    return draw.choice(name, [size for size in sizes if size <= room] or [1], chance, at_first, _positive)


def _draw_step(draw: Draw, subject: Subject, prefix: str) -> Step:
    count = draw.integer(prefix + "microbatches", 1, 3, 0.4)
    return Step(
        count,
        draw.integer(prefix + "sync", 1, count, 0.3),
        draw.choice(prefix + "clip", CLIPS if subject.specified else CLIPS[:1], 0.3),
        draw.integer(prefix + "frozen", 0, 7, 0.15),
        draw.choice(prefix + "lr", RATES, 0.1),
        draw.flag(prefix + "eval", 0.06),
        draw.flag(prefix + "discard", 0.06),
    )


def _positive(label: str) -> int:
    if int(label) < 1:
        raise ValueError
    return int(label)


def _strategy(label: str) -> str:
    if label not in STRATEGIES:
        raise ValueError
    return label


def cast_at_border(module: nn.Module, dtype: torch.dtype) -> None:
    """What a unit does in low precision with the tensors that it is given, by the code that does it there."""
    entered: list[Casts] = []

    def enter(_, args, kwargs):
        made: dict[int, torch.Tensor] = {}

        def cast(tensor):
            if not tensor.is_floating_point() or tensor.dtype == dtype:
                return tensor
            return made[id(tensor)] if id(tensor) in made else made.setdefault(id(tensor), tensor.to(dtype))

        entered.append(Casts(types.SimpleNamespace(input=cast)))
        return map_tensors((args, kwargs), entered[-1], entered[-1].rebuilt)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(lambda *_: entered.pop().give_back())
