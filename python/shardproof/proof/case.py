"""A case: a mesh, a strategy with options, an optimizer, a mode, a seed and a history, as one line of text."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Optional

from .._C import Error

STRATEGIES = {  # with the axes of the meshes that are drawn
    "ddp": (("dp_shard",), ("dp_replicate", "dp_shard")),
    "zero1": (("dp_shard",), ("dp_replicate", "dp_shard")),
    "zero2": (("dp_shard",), ("dp_replicate", "dp_shard")),
    "zero3": (("dp_shard",), ("dp_replicate", "dp_shard")),
    "hsdp": (("dp_replicate", "dp_shard"),),
    "hfsdp": (("dp_replicate", "dp_shard"),),
    "hzero2": (("dp_replicate", "dp_shard"),),
}
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
# Of an option, the values that are drawn, the plainest one last.
OPTIONS = {
    "prefetch": ("1", "2", "0"),
    "gather": ("side_by_side", "copied"),
    "buffers": ("pooled", "freed"),
    "buckets": ("2", "0"),
    "reshard": ("0", "1"),
    "granularity": ("tensor", "element"),
    "compute": ("bfloat16", "float16", ""),
    "scale": ("4", "1024", "1000000000", ""),  # the loss scale at first
    "resume": ("used", ""),  # what is loaded into has trained something else
    "inputs": ("grad", ""),  # floating tensors of a batch want gradients, too
}
MODES = ("ordered", "canonical", "fast")
ONLY_ORDERED = ("compute", "scale")


@dataclasses.dataclass(frozen=True)
class Case:
    """One case, as its line says it."""

    mesh: "tuple[tuple[str, int], ...]"
    strategy: str
    options: "tuple[tuple[str, str], ...]"
    optimizer: str
    mode: str
    clip: Optional[float]
    seed: int
    history: "tuple[str, ...]"

    @property
    def world(self) -> int:
        return size_of(self.mesh)

    @property
    def tensor_ranks(self) -> int:
        """Neighbours that compute one microbatch together."""
        return dict(self.mesh).get("tp", 1)

    @property
    def data_ranks(self) -> int:
        """The number of microbatches that ranks train on at a time."""
        return self.world // self.tensor_ranks

    def option(self, name: str) -> str:
        return dict(self.options).get(name, OPTIONS[name][-1] if name in OPTIONS else "")

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options)
        clip = "" if self.clip is None else f" clip({self.clip:g})"
        return (
            f"mesh({mesh_text(self.mesh)}) {self.strategy}({options}) {self.optimizer} {self.mode}{clip} seed({self.seed}) : "
            + " ".join(self.history)
        )


def size_of(mesh) -> int:
    """The number of ranks of a mesh."""
    size = 1
    for _, each in mesh:
        size *= each
    return size


def mesh_text(mesh) -> str:
    """A mesh as "axis=size,..."."""
    return ",".join(f"{name}={size}" for name, size in mesh)


def parse_mesh(text: str):
    """The mesh of such a text."""
    return tuple((name, int(size)) for name, size in (part.split("=") for part in text.split(",") if part))


_LINE = re.compile(
    r"mesh\((?P<mesh>[^)]*)\) (?P<strategy>\w+)\((?P<options>[^)]*)\) (?P<optimizer>[\w.]+\([^)]*\)) "
    r"(?P<mode>ordered|canonical|fast)(?: clip\((?P<clip>[^)]*)\))? seed\((?P<seed>\d+)\) : (?P<history>.+)"
)
_WORD = re.compile(r"step|eval|discard|save|(accumulate|sync|freeze|lr)\(\d+\)|load|load@mesh\([^)]*\)|load@strategy\(\w+\)")


def parse_case(line: str) -> Case:
    """The case of a line that a report printed. Law: parse_case(str(case)) == case."""
    found = _LINE.fullmatch(line.strip())
    if not found:
        raise Error(f"[verify] this is no case: {line!r}. Copy the whole line after 'replay' of a report")
    options = tuple(tuple(part.split("=", 1)) for part in found["options"].split(",") if part)
    words = []
    for word in found["history"].split():
        if not _WORD.fullmatch(word):
            raise Error(
                f"[verify] '{word}' is no word of a history. There are step, eval, discard, save, accumulate(N), sync(N), "
                "freeze(N), lr(N), load, load@mesh(...) and load@strategy(...)"
            )
        words.append(word)
    return Case(
        parse_mesh(found["mesh"]),
        found["strategy"],
        options,
        found["optimizer"],
        found["mode"],
        float(found["clip"]) if found["clip"] else None,
        int(found["seed"]),
        tuple(words),
    )


def parse_call(text: str) -> "tuple[str, dict]":
    """("adamw", {"lr": 0.01}) of "adamw(lr=0.01)"."""
    name, rest = text[:-1].split("(", 1)
    return name, {key: float(value) for key, value in (part.split("=") for part in rest.split(",") if part)}


def number_of(word: str) -> int:
    """3 of "accumulate(3)"."""
    return int(word[word.index("(") + 1 : -1])


def _draw_mesh(rng: random.Random, axes, ranks_max: int):
    if len(axes) == 1:
        return ((axes[0], rng.randint(1 if rng.random() < 0.1 else 2, max(2, ranks_max))),)
    shapes = [(a, b) for a in range(1, ranks_max + 1) for b in range(1, ranks_max + 1) if 1 < a * b <= ranks_max]
    return tuple(zip(axes, rng.choice(shapes)))


def draw_strategy(rng: random.Random, names, ranks_max: int):
    """A random strategy, and a mesh that has its axes."""
    name = rng.choice(list(names))
    axes = rng.choice([each for each in STRATEGIES[name] if len(each) == 1 or ranks_max >= 2])
    return name, _draw_mesh(rng, axes, ranks_max)


def _draw_history(rng: random.Random, names, mesh, ranks_max: int) -> "tuple[str, ...]":
    words: "list[str]" = []
    steps = rng.randint(1, 4)
    saved = False
    for _ in range(steps):
        if rng.random() < 0.3:
            words.append(f"accumulate({rng.randint(1, 3)})")
        if rng.random() < 0.15:
            words.append(f"sync({rng.randint(1, 3)})")
        if rng.random() < 0.15:
            words.append(f"freeze({rng.randint(1, 99)})")
        if rng.random() < 0.1:
            words.append(f"lr({rng.randint(10, 200)})")
        if rng.random() < 0.1:
            words.append(rng.choice(["eval", "discard"]))
        words.append("step")
        if rng.random() < 0.2:
            words.append("save")
            saved = True
        elif saved and rng.random() < 0.5:
            name, other = draw_strategy(rng, names, ranks_max)
            other += tuple((axis, size) for axis, size in mesh if axis == "tp")
            fits = [axis for axis, _ in other] == [axis for axis, _ in mesh]
            words.append(rng.choice(["load", f"load@mesh({mesh_text(other)})", f"load@strategy({name})"] if fits else ["load"]))
    return tuple(words)


def draw_case(
    rng: random.Random, units, *, strategies=None, optimizers=None, modes=MODES, ranks_max=4, tensor_parallel=False
) -> Case:
    """A random case. `units` are the sets of units that may be drawn, each a text of names joined by '+'."""
    names = strategies or list(STRATEGIES)
    cuts = tensor_parallel and "fast" in modes and rng.random() < 0.4
    strategy, mesh = draw_strategy(rng, names, max(2, ranks_max // 2) if cuts else ranks_max)
    if cuts:
        mesh += (("tp", 2),)
    optimizer = rng.choice(list(optimizers or OPTIMIZERS))
    chosen = rng.choice(list(units))
    options = []
    if chosen:
        options.append(("units", chosen))
        if rng.random() < 0.25:
            options.append(("recompute", rng.choice(chosen.split("+"))))
    mode = "fast" if cuts else rng.choice([mode for mode in ("ordered", "ordered", *MODES) if mode in modes])
    for name, values in OPTIONS.items():
        if rng.random() < 0.25 and (name not in ONLY_ORDERED or mode == "ordered"):
            options.append((name, rng.choice(values[:-1])))
    clip = rng.choice([0.1, 0.5, 1.0]) if rng.random() < 0.3 else None
    return Case(
        mesh,
        strategy,
        tuple(options),
        optimizer,
        mode,
        clip,
        rng.randint(0, 10**6),
        _draw_history(rng, names, mesh, max(2, ranks_max // 2) if cuts else ranks_max),
    )


def without_specified_bits(case: Case) -> Case:
    """The case as a model can have it whose parameters are not all in float32: for these no formulas are specified, so the
    optimizer is one of torch, and nothing is clipped or summed in fixed point."""
    plain = case.optimizer if case.optimizer.startswith("torch.") else "torch.AdamW(lr=0.01)"
    options = tuple((name, value) for name, value in case.options if name not in ONLY_ORDERED)
    mode = "ordered" if case.mode == "canonical" else case.mode
    return dataclasses.replace(case, optimizer=plain, options=options, mode=mode, clip=None)


def smaller(case: Case):
    """Cases that are simpler in one respect, the simplest first."""
    change = dataclasses.replace
    steps = [i for i, word in enumerate(case.history) if word == "step"]
    if len(steps) > 1:
        yield change(case, history=case.history[: steps[0] + 1])
        yield change(case, history=case.history[: steps[-1]])
    for i, word in enumerate(case.history):
        rest = case.history[:i] + case.history[i + 1 :]
        if "step" in rest and (word != "save" or not any(w.startswith("load") for w in rest)):
            yield change(case, history=rest)
    for i, (axis, size) in enumerate(case.mesh):
        if axis == "tp":
            if not any(word.startswith("load@mesh") for word in case.history):
                yield change(case, mesh=case.mesh[:i] + case.mesh[i + 1 :])
            continue
        for less in sorted({2, size - 1}):
            if 1 <= less < size:
                yield change(case, mesh=case.mesh[:i] + ((axis, less),) + case.mesh[i + 1 :])
    for i, (name, value) in enumerate(case.options):
        if name == "units" and any(other == "recompute" for other, _ in case.options):
            continue
        yield change(case, options=case.options[:i] + case.options[i + 1 :])
        if name == "units" and "+" in value:
            for part in value.split("+"):
                yield change(case, options=case.options[:i] + ((name, part),) + case.options[i + 1 :])
    if case.clip is not None:
        yield change(case, clip=None)
    if case.optimizer != "sgd(lr=0.1)":
        yield change(case, optimizer="sgd(lr=0.1)")
    for i, word in enumerate(case.history):
        if "(" in word and "@" not in word and number_of(word) > 1:
            yield (
                change(case, history=case.history[:i] + (word[: word.index("(")] + "(2)",) + case.history[i + 1 :])
                if (number_of(word) > 2)
                else change(case, history=case.history[:i] + case.history[i + 1 :])
            )
