"""What is checked, and what one random case of it does."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import torch
from torch.utils import _pytree

from .draw import Draw

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# What is compared of a foreign engine, by the begin of the name.
COMPARED = ("loss of", "result of", "argument of", "gradient of", "norm of", "parameter of", "gathered", "hooks of")
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
    ep: Sequence[int] = ()
    """How many neighbours among the data-parallel ranks may have different experts. `parallelize` is given one of those that
    divide these ranks as `ep`, or 1 where none does, in each segment another one. Empty: the engine does not know `ep`, and is
    not given it."""
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

    def __post_init__(self) -> None:
        if self.ep and ("ep" in self.options or "ep" in self.mesh):
            raise ValueError("ep is drawn by itself, as what divides the data-parallel ranks: take it out of options and mesh")
        if any(each < 1 for each in self.ep):
            raise ValueError(f"ep lists numbers of ranks, which are at least 1, got {tuple(self.ep)}")

    strict = False
    """Whether all that a model has and sees is the plain one's, norms are known where nothing is clipped, and parameters that
    no sample reaches have gradients."""

    def draw_plan(self, draw: Draw) -> Plan:
        return draw_plan(draw, self)

    def base_of(self, draw: Draw, plan: Plan) -> torch.nn.Module:
        """The plain model as it is at the start, in the dtype of the plan. It is made once, as ranks may be threads that share
        torch's generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.data)
            model = call(self.make_model, draw).to(plan.dtype)
        parameters = dict(model.named_parameters())
        for name in frozen_names(list(parameters), plan.frozen):
            parameters[name].requires_grad_(False)
        return model

    def model_of(self, case: Any) -> torch.nn.Module:
        """A model as it is at the start."""
        return copy.deepcopy(case.base)

    def batches(self, case: Any, segment: int, step: int, microbatch: int) -> list[tuple[Any, Any]]:
        """The pieces of one microbatch, one for each data-parallel rank."""
        plan, pieces = case.plan, case.plan.segments[segment].data_ranks
        generator = torch.Generator().manual_seed(((plan.data * 5 + segment) * 5 + step) * 5 + microbatch)
        given = call(self.make_batch, case.draw, generator=generator, count=plan.samples * pieces)
        cut = lambda x, r: as_floats(x[r * plan.samples : (r + 1) * plan.samples], plan.dtype)
        return [tuple(cut(x, r) for x in given) for r in range(pieces)]

    def loss_of(self, model: torch.nn.Module, batch: tuple[Any, Any], dtype: torch.dtype) -> torch.Tensor:
        """The loss of a batch, in this dtype."""
        output = model(batch[0])
        low = output.is_floating_point() and output.dtype != dtype
        return self.loss(output.to(dtype) if low else output, batch[1])

    def map_tensors(self, value: Any, visit: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return _pytree.tree_map_only(torch.Tensor, visit, value)

    def lower(self, plan: Plan, model: torch.nn.Module, low: torch.dtype) -> None:
        """Makes a model whose parameters are in a low precision cast its inputs."""
        model.register_forward_pre_hook(lambda module, args: self.map_tensors(args, lambda x: as_floats(x, low)))

    def require(self, case: Any, model: torch.nn.Module) -> None:
        """Throws where the plan does not fit the model."""

    def before_loads(self, plan: Plan, segment: Segment) -> list:
        """The batches that models train on before they are loaded into."""
        return []

    def rank_of(self, case: Any, segment: int, comm: Any) -> Any:
        """What trains a segment on the calling rank."""
        from .train import ForeignRank

        return ForeignRank(case, segment)

    def compares(self, case: Any, segment: int, rank: int, name: str) -> bool:
        """Whether a value is compared. Engines differ in whose buffers a checkpoint has, and in the shapes of their state."""
        if name.startswith("buffer "):
            alone = all(before.data_ranks == 1 for before in case.plan.segments[:segment])
            return case.place(segment, rank) == 0 and alone
        return name.startswith(COMPARED)


@dataclass
class Step:
    microbatches: int = 1
    every: int = 1
    """Ranks are synchronized after so many microbatches, and after the last one."""
    clip: tuple[float, float] | None = None
    """The largest norm of a gradient, and the kind of norm."""
    frozen: int = 0
    """As of `frozen_names`."""
    lr: float = 1.0
    """What the learning rate is multiplied by."""
    eval: bool = False
    """A forward without a graph comes first."""
    discard: bool = False
    """A microbatch whose gradients are thrown away comes first."""

    def synchronizes(self, microbatch: int) -> bool:
        return (microbatch + 1) % self.every == 0 or microbatch + 1 == self.microbatches


@dataclass
class Segment:
    """Steps on one mesh. All segments but the first begin with a load of what was saved last."""

    mesh: dict[str, int]
    steps: list[Step]
    saved: int | None = None
    """After how many of its steps it saves, None if it does not."""
    strategy: str = ""
    ep: int = 0
    """As of Subject; 0: the engine is not told."""

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def data_ranks(self) -> int:
        """The number of microbatches that ranks train on at a time. Along axes that begin with "dp" they are different ones."""
        return math.prod(size for axis, size in self.mesh.items() if axis.startswith("dp"))

    @property
    def tensor_ranks(self) -> int:
        """Neighbours that compute one microbatch together."""
        return self.ranks // self.data_ranks


@dataclass
class Plan:
    segments: list[Segment]
    options: dict[str, Any]
    optimizer: str
    data: int
    """The seed of the model's values and of what is random besides."""
    dtype: torch.dtype = torch.float32
    samples: int = 1
    frozen: int = 0
    checkpoint: str = "dcp"
    mode: str = "fast"

    def options_of(self, segment: Segment) -> dict[str, Any]:
        """What `parallelize` is given in a segment."""
        return {**self.options, "ep": segment.ep} if segment.ep else self.options

    @property
    def precision(self) -> torch.dtype | None:
        """The dtype to compute in, if it is not that of the parameters."""
        return self.options.get("precision") or self.options.get("compute")

    @property
    def asks(self) -> bool:
        """Whether it asks for what PyTorch may not be able to compute."""
        return self.precision is not None or self.dtype is not torch.float32 or self.options.get("inputs") == "grad"


def as_floats(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor, in the dtype if it has floats."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def draw_plan(draw: Draw, subject: Subject) -> Plan:
    """A random case of the subject."""
    count = draw.integer("segments", 1, 3) if subject.load and draw.flag("load") else 1
    segments = [_draw_segment(draw, subject, i) for i in range(count)]
    for segment in segments[:-1]:
        segment.saved = len(segment.steps)
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
        mesh[axis] = draw.choice(f"{prefix}{axis}", [size for size in sizes if size <= room] or [min(sizes)])
        room //= mesh[axis]
    steps = []
    for s in range(draw.integer(f"{prefix}steps", 1, 3)):
        name = f"{prefix}step{s}."
        count = draw.integer(name + "microbatches", 1, 3)
        every = draw.integer(name + "sync", 1, count) if subject.no_sync else 1
        steps.append(Step(count, every, draw.choice(name + "clip", subject.clips)))
    segment = Segment(mesh, steps)
    if subject.ep:
        segment.ep = draw.choice(f"{prefix}ep", [each for each in subject.ep if segment.data_ranks % each == 0] or [1])
    return segment


def optimizer_of(text: str) -> tuple[Any, dict[str, Any]]:
    """The class of a text like "torch.SGD(lr=0.1)" or of a name of the table, and what it is made with. For a rule of the
    library it is the rule's name."""
    if text in OPTIMIZERS:
        return OPTIMIZERS[text]
    name, rest = text[:-1].split("(", 1)
    settings = {key: float(value) for key, value in (part.split("=") for part in rest.split(",") if part)}
    return getattr(torch.optim, name.removeprefix("torch.")) if name.startswith("torch.") else name, settings


def frozen_names(names: Sequence[str], frozen: int) -> set[str]:
    """Bit i of frozen is set: names i, i + 3, i + 6, ... do not train. At least one always trains."""
    return {name for i, name in enumerate(names) if frozen >> (i % 3) & 1 and i + 1 < len(names)}


def call(function, draw: Draw, *positional, **arguments):
    """Calls a function of the user, with the draw if it has a parameter of that name."""
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    if "draw" in names:
        arguments["draw"] = draw
    return function(*positional, **arguments)
