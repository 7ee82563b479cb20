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
from .engine import Subject, draw_case, parse_case, prepare, sets_of_units, try_case

from .model import Model, NotBuildable, said, tensors_in

# The best one last: a model has the first of these that one of its cases has.
VERDICTS = ("crash", "hang", "WRONG", "unclear error", "clear error", "slow", "not buildable", "close", "equal")
SLOW_STEP = 0.25  # seconds of a plain forward and backward above which a case has one step
# The first case of every model: a checkpoint that another number of ranks loads, `eval` and `generate` before and after.
FIRST = "mesh(dp_shard=2) zero3(units={units}) adamw(lr=0.01) ordered seed({seed}) : {history}"
HISTORY = "step eval step save load@mesh(dp_shard=3) eval step"
HISTORY_OF_SLOW = "step save load@mesh(dp_shard=3) eval step"


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
        self.subject = Subject(model.make, model.batch, loss_for(model, self.observed))
        torch.manual_seed(5)
        module = model.make()
        start = time.monotonic()
        model.loss(module, model.batch(0)).backward()
        self.slow = time.monotonic() - start > SLOW_STEP
        try:
            self.sets = sets_of_units(prepare(self.subject), None, module)
        except shardproof.Error as error:
            raise NotBuildable(str(error)) from error

    def cases(self, count: int, only: "str | None") -> "Iterator[Any]":
        if only is not None:
            yield parse_case(only)
            return
        units = max(self.sets, key=lambda names: (names.count("+") > 0, self.rng.random()))
        history = HISTORY_OF_SLOW if self.slow else HISTORY
        yield parse_case(FIRST.format(units=units, seed=self.rng.randrange(10**6), history=history))
        for _ in range(count - 1):
            case = draw_case(self.rng, self.sets, ranks_max=3 if self.slow else 4)
            if self.slow:
                case = dataclasses.replace(case, history=case.history[: case.history.index("step") + 1])
            yield case

    def tried(self, case: Any) -> dict:
        """One row: the verdict of a case. Where bits differ, "close" is what verify accepts of sums in another order."""
        self.observed.outputs = self.observed.tokens = case.mode != "fast"
        found = try_case(self.subject, case)
        row = {"case": str(case), "verdict": "equal", "values": found.values, "detail": ""}
        if found.kind == "differs":
            row.update(verdict="WRONG", detail=found.detail)
            if case.mode != "fast" and self.is_close(case):
                row["verdict"] = "close"
        elif found.kind == "raised":
            clear = isinstance(found.error, shardproof.Error) or str(found.error).startswith("[")
            row.update(verdict="clear error" if clear else "unclear error", detail=said(found.error) + where(found.error))
        elif found.kind == "plain":
            row.update(verdict="not buildable", detail=said(found.error))
        elif found.kind == "diverged":
            row.update(verdict="nothing")
        return row

    def is_close(self, case: Any) -> bool:
        """Whether tokens are equal, and the same history holds in mode "fast"."""
        options = tuple(each for each in case.options if each[0] not in ("compute", "scale"))
        self.observed.outputs = self.observed.tokens = False
        return try_case(self.subject, dataclasses.replace(case, mode="fast", options=options)).kind == "held"


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
