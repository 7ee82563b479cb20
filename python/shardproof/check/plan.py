"""What is checked, and what one random case of it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import torch

from .draw import Draw

CLIPS = (None, (0.05, 2.0), (0.5, 2.0), (1000.0, 2.0), (0.5, 1.0), (0.05, float("inf")))
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "foreach": False}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4, "foreach": False}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-4, "foreach": False}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-4, "centered": True, "momentum": 0.5, "foreach": False}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-4, "foreach": False}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01, "eps": (1e-8, 1e-3), "foreach": False}),
}


@dataclass
class Subject:
    """A function that shards models, and all that is needed to try it."""

    parallelize: Callable[..., Any]
    make_model: Callable[..., torch.nn.Module]
    make_batch: Callable[..., tuple[Any, Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    mesh: Mapping[str, Sequence[int]] = field(default_factory=lambda: {"dp": (1, 2, 3, 4)})
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    optimizers: Sequence[str] = ("sgd", "momentum", "adamw")
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64)
    clips: Sequence[tuple[float, float] | None] = CLIPS
    no_sync: bool = True
    freeze: bool = True
    load: bool = True
    checkpoints: Sequence[str] = ("dcp", "flat")
    """How a run is saved: by DCP ("dcp"), with flat names of the optimizer's state ("flat"), or whole on rank 0 ("full")."""
    max_ranks: int = 4
    refusals: Sequence[str] = ()
    """Patterns of messages by which the engine says that it cannot do a thing. Such cases are counted."""
    known: Mapping[str, str] = field(default_factory=dict)
    """Pattern of a failure -> name of the finding that describes it. Such cases are counted as well."""
    patience: float = 30.0
    """Seconds of silence after which ranks that still wait are taken for hung."""
    name: str = "check"

    @property
    def data_axes(self) -> list[str]:
        """Axes along which ranks get different data. Along the others they get the same."""
        return [axis for axis in self.mesh if axis.startswith("dp")]


@dataclass
class Step:
    microbatches: int
    sync_last: bool
    clip: tuple[float, float] | None


@dataclass
class Segment:
    """Steps on one mesh. A case of several segments saves at the end of each and loads on the next mesh."""

    mesh: dict[str, int]
    steps: list[Step]

    @property
    def ranks(self) -> int:
        result = 1
        for size in self.mesh.values():
            result *= size
        return result


@dataclass
class Plan:
    segments: list[Segment]
    options: dict[str, Any]
    optimizer: str
    dtype: torch.dtype
    samples: int
    frozen: int
    data: int
    checkpoint: str

    @property
    def precision(self) -> torch.dtype | None:
        """The dtype to compute in, if it is not that of the parameters."""
        return self.options.get("precision")


def draw_plan(draw: Draw, subject: Subject) -> Plan:
    """A random case of the subject."""
    count = draw.integer("segments", 1, 3) if subject.load and draw.flag("load") else 1
    segments = [_draw_segment(draw, subject, i) for i in range(count)]
    options = {name: draw.choice(name, list(values)) for name, values in subject.options.items()}
    mixed = options.get("precision") is not None
    return Plan(
        segments=segments,
        options=options,
        optimizer=draw.choice("optimizer", list(subject.optimizers)),
        dtype=torch.float32 if mixed else draw.choice("dtype", list(subject.dtypes)),
        samples=draw.integer("samples", 1, 3),
        frozen=draw.integer("frozen", 0, 7) if subject.freeze and draw.flag("freeze") else 0,
        data=draw.integer("data", 0, 999_999),
        checkpoint=draw.choice("checkpoint", list(subject.checkpoints)) if count > 1 else "dcp",
    )


def _draw_segment(draw: Draw, subject: Subject, index: int) -> Segment:
    prefix = f"s{index}." if index else ""
    mesh: dict[str, int] = {}
    room = subject.max_ranks
    for axis, sizes in subject.mesh.items():
        fitting = [size for size in sizes if size <= room]
        if not fitting:
            fitting = [min(sizes)]
        mesh[axis] = draw.choice(f"{prefix}{axis}", fitting)
        room //= mesh[axis]
    steps = []
    for s in range(draw.integer(f"{prefix}steps", 1, 3)):
        name = f"{prefix}step{s}."
        microbatches = draw.integer(name + "microbatches", 1, 3)
        steps.append(
            Step(
                microbatches=microbatches,
                sync_last=bool(subject.no_sync and microbatches > 1 and draw.flag(name + "no_sync")),
                clip=draw.choice(name + "clip", subject.clips),
            )
        )
    return Segment(mesh, steps)


def make_optimizer(plan: Plan, parameters, wrap=None):
    """The optimizer of the plan. `wrap(parameters, class, **settings)` makes a sharded one of it."""
    kind, settings = OPTIMIZERS[plan.optimizer]
    parameters = [p for p in parameters if p.requires_grad]
    return wrap(parameters, kind, **settings) if wrap else kind(parameters, **settings)


def freeze(model: torch.nn.Module, frozen: int) -> None:
    """Bit i of frozen is set: parameters i, i + 3, i + 6, ... do not train. At least one always trains."""
    parameters = list(model.parameters())
    for i, parameter in enumerate(parameters):
        if frozen >> (i % 3) & 1 and i + 1 < len(parameters):
            parameter.requires_grad_(False)


def batch_of(subject: Subject, draw: Draw, plan: Plan, segment: int, step: int, microbatch: int, pieces: int):
    """The pieces of one microbatch, one for each data-parallel rank."""
    seed = ((plan.data * 5 + segment) * 5 + step) * 5 + microbatch
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = call(subject.make_batch, draw, generator=generator, count=plan.samples * pieces)
    cut = lambda x, r: _floats(x[r * plan.samples : (r + 1) * plan.samples], plan.dtype)
    return [(cut(inputs, r), cut(targets, r)) for r in range(pieces)]


def base_model(subject: Subject, draw: Draw, plan: Plan) -> torch.nn.Module:
    """The plain model as it is at the start, in the dtype of the plan."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.data)
        model = call(subject.make_model, draw).to(plan.dtype)
    freeze(model, plan.frozen)
    return model


def call(function, draw: Draw, *positional, **arguments):
    """Calls a function of the user, with the draw if it has a parameter of that name."""
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    if "draw" in names:
        arguments["draw"] = draw
    return function(*positional, **arguments)


def _floats(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
