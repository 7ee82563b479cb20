"""What becomes of a model when it is sharded: cases that the engine of `shardproof.verify` draws and compares."""

from __future__ import annotations

import dataclasses
import os
import random
import time
import traceback
import zlib
from typing import Any, Iterator

import torch
from torch import nn

import shardproof
from shardproof.check import Draw, parse_line
from shardproof.check.ours import Subject
from shardproof.check.verify import prepare, sets_of_units

from .model import Model, NotBuildable, said, tensors_in

# The best one last: a model has the first of these that one of its cases has.
VERDICTS = ("crash", "hang", "WRONG", "unclear error", "clear error", "slow", "not buildable", "close", "equal")
SLOW_STEP = 0.25  # seconds of a plain forward and backward above which a case has one step
# The first case of every model: a checkpoint that another number of ranks loads, `eval` and `generate` before and after.
FIRST = "optimizer=adamw(lr=0.01) load=yes segments=2 strategy=zero3 dp_shard=2 s1.dp_shard=3 s1.step0.eval=yes data={seed}"
LONGER = " steps=2 step1.eval=yes"


@dataclasses.dataclass
class Observed:
    """What a forward without a graph is asked for besides the loss."""

    outputs: bool = True
    tokens: bool = True


def weighed(tensors: "list[torch.Tensor]") -> torch.Tensor:
    """A number that changes when any element does."""
    total = torch.zeros((), dtype=torch.float64)
    for i, each in enumerate(tensors):
        real = torch.view_as_real(each) if each.is_complex() else each
        flat = torch.nan_to_num(real.double().reshape(-1), nan=7.0, posinf=3.0, neginf=-3.0)
        total = total + (flat * torch.cos(torch.arange(1, flat.numel() + 1, dtype=torch.float64) + i)).sum()
    return total


def loss_for(model: Model, observed: Observed) -> Any:
    """The loss; without a graph, a number of what the model gives and generates in eval as well."""

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            return model.loss(module, batch)
        modes = [(each, each.training) for each in module.modules()]
        module.eval()
        try:
            value = model.loss(module, batch)
            if observed.outputs:
                value = value.double() + weighed(tensors_in(model.outputs(module, batch)))
            if observed.tokens and model.generate is not None:
                value = value.double() + weighed([model.generate(module, batch)])
            return value
        finally:
            for each, training in modes:
                each.training = training

    return loss


class Judge:
    """Tries the cases of one model."""

    def __init__(self, model: Model, name: str, seed: int):
        self.model, self.observed = model, Observed()
        self.rng = random.Random(zlib.crc32(f"{seed} {name} {model.label}".encode()))
        self.subject = Subject(model.make, model.batch, loss_for(model, self.observed), before=self.observe)
        torch.manual_seed(5)
        module = model.make()
        start = time.monotonic()
        model.loss(module, model.batch(0)).backward()
        self.slow = time.monotonic() - start > SLOW_STEP
        if self.slow:
            self.subject.ranks_max, self.subject.steps_max = 3, 1
        try:
            self.sets = self.subject.units = sets_of_units(prepare(self.subject), None, module)
        except shardproof.Error as error:
            raise NotBuildable(str(error)) from error

    def observe(self, plan: Any) -> None:
        """Chooses what a case looks at: outputs and tokens are the same in bits only."""
        self.observed.outputs = self.observed.tokens = plan.mode != "fast"

    def cases(self, count: int, only: "str | None") -> "Iterator[Draw]":
        if only is not None:
            yield Draw(values=parse_line(only))
            return
        units = max(self.sets, key=lambda names: (names.count("+") > 0, self.rng.random()))
        line = FIRST.format(seed=self.rng.randrange(10**6)) + (f" units={units}" if units else "")
        yield Draw(values=parse_line(line if self.slow else line + LONGER))
        seed = self.rng.randrange(10**6)
        for number in range(1, count):
            yield Draw(seed, number)

    def tried(self, draw: Draw) -> dict:
        """One row: the verdict of a case. Where bits differ, "close" is what verify accepts of sums in another order."""
        found = self.subject.tried(draw)
        row = {"case": found.line, "verdict": "equal", "values": found.compared, "detail": ""}
        if found.kind == "differs":
            row.update(verdict="WRONG", detail=found.message)
            if draw.chosen["mode"] != "fast" and self.is_close(found.line):
                row["verdict"] = "close"
        elif found.kind == "raised":
            clear = isinstance(found.error, shardproof.Error) or str(found.error).startswith("[")
            row.update(verdict="clear error" if clear else "unclear error", detail=said(found.error) + where(found.error))
        elif found.kind == "plain":
            row.update(verdict="not buildable", detail=said(found.error))
        elif found.kind == "diverged":
            row.update(verdict="nothing")
        return row

    def is_close(self, line: str) -> bool:
        """Whether tokens are equal, and the same history holds in mode "fast"."""
        words = {name: label for name, label in parse_line(line).items() if name not in ("compute", "scale")}
        return self.subject.tried(Draw(values={**words, "mode": "fast"})).kind == "held"


def where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return "".join(f" (at {os.path.basename(frame.filename)}:{frame.lineno})" for frame in last)


def rows_of(models: "list[Model]", name: str, seed: int, cases: int, seconds: float, only: "str | None") -> "Iterator[dict]":
    """Tries cases of each model until the seconds are over; each has its first one tried."""
    start = time.monotonic()
    for model in models:
        try:
            judge = Judge(model, name, seed)
        except NotBuildable as error:
            yield {"verdict": "not buildable", "detail": str(error), "label": model.label}
            continue
        for number, case in enumerate(judge.cases(cases, only)):
            if number and time.monotonic() - start > seconds:
                break
            yield {**judge.tried(case), "label": model.label, **({"about": model.about} if model.about else {})}


def worst(rows: "list[dict]") -> dict:
    """The row that gives a model its verdict. Of a model that was built in one way, other ways do not count."""
    compared = [row for row in rows if row["verdict"] not in ("not buildable", "nothing")]
    if not compared:
        detail = next((row["detail"] for row in rows if row["detail"]), "every case diverged without sharding")
        return {"verdict": "not buildable", "detail": detail}
    return min(compared, key=lambda row: VERDICTS.index(row["verdict"]))
