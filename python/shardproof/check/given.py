"""Cases that the C++ harness drew, trained by an engine. The harness compares; nothing is judged here.

The harness sends the run as golden/oracle.py takes it, and a setup, in JSON:

    engine, ranks       a name of ENGINES or "module:function"; "threads" or "processes"
    units, reshard      which modules are units ("root", "block" or "leaf"), and FSDP2's `reshard_after_forward`
    precision           the dtype to compute in, e.g. "bfloat16"; "float32" is that of the parameters
    segments            from load to load: mesh, how many ranks share the experts of a layer (ep), first and last step, and the
                        step before which what is loaded was saved
    steps               of each: whether a round is synchronized, and the flags eval, discard, unshard, save
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from . import engines, models
from .assemble import Misplaced, Piece, assemble
from .case import Trial
from .verdict import Verdict
from .train import Sharded, clip_gradients, load, parameters_of, piece_of, save, spoil, synchronized

PATIENCE = 30.0


@dataclass
class Built:
    """A plain model and what an engine may want to know of it."""

    model: nn.Module
    units: list[nn.Module]
    reshard: bool | int
    precision: torch.dtype | None
    may_be_unused: bool
    ep: int


def ddp(built: Built, mesh):
    return engines.ddp(built.model, mesh, find_unused=built.may_be_unused)


def fsdp2(built: Built, mesh):
    shard = engines.hsdp if "dp_replicate" in mesh.mesh_dim_names else engines.fsdp2
    return shard(built.model, mesh, built.units, built.reshard, built.precision)


def tp(built: Built, mesh):
    return engines.tp(built.model, mesh, plan=tensor_plan(built.model))


def fsdp2_tp(built: Built, mesh):
    return engines.fsdp2_tp(built.model, mesh, built.units, built.reshard, plan=tensor_plan(built.model))


def fsdp2_ep(built: Built, mesh):
    units = [unit for unit in built.units if not isinstance(unit, RoutedExperts)]  # which it makes units itself
    return engines.fsdp2_ep(built.model, mesh, built.ep, units, built.reshard)


ENGINES: dict[str, Callable[[Built, Any], Any]] = {
    "torch-ddp": ddp,
    "torch-fsdp2": fsdp2,
    "torch-tp": tp,
    "torch-fsdp2-tp": fsdp2_tp,
    "torch-fsdp2-ep": fsdp2_ep,
}


@dataclass
class Engine:
    parallelize: Callable[[Built, Any], Any]
    takes_ep: bool
    """Whether ranks share experts in it, which then get the rows of their own tokens alone (`RoutedExperts`)."""


def engine_of(name: str) -> Engine:
    """An engine of this module, or a function of the user's that takes a model and a mesh, and `ep` if it has a parameter of
    that name."""
    if name in ENGINES:
        return Engine(ENGINES[name], bool(engines.ENGINES[name].ep))
    if name == "shardproof-ep":
        raise LookupError("shardproof-ep is this library, whose own cases with ep `verify` draws without --engine")
    if name == "megatron-fsdp":
        raise LookupError("megatron-fsdp runs on CUDA devices only, and here engines train on the CPU")
    module, _, function = name.partition(":")
    if not function:
        raise LookupError(f"no engine is called {name}; there are {', '.join(ENGINES)}, or write module:function")
    try:
        parallelize = getattr(importlib.import_module(module), function)
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        raise LookupError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    takes_ep = callable(parallelize) and "ep" in inspect.signature(parallelize).parameters
    told = lambda built: {"ep": built.ep} if takes_ep else {}
    return Engine(lambda built, mesh: parallelize(built.model, mesh, **told(built)), takes_ep)


class RoutedExperts(nn.Module):
    """Experts of golden/oracle.py that are called like those of `models`: with rows, and with the experts of each."""

    def __init__(self, given: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = given.gate_up_proj, given.down_proj

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        def plain(rows, into, out):
            gate, up = (rows @ into.T).chunk(2, dim=-1)
            return (F.silu(gate) * up) @ out.T

        return models.routed(plain, (self.gate_up_proj, self.down_proj), x, experts, weights)


def route(mixture: nn.Module) -> None:
    """Has a mixture of golden/oracle.py, which asks every expert about every token, give them the rows that they are asked."""
    mixture.experts = RoutedExperts(mixture.experts)

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        weights, experts = mixture.weights(mixture.gate(rows)).topk(mixture.per_token)
        y = mixture.experts(rows, experts, mixture.scale * weights).view_as(x)
        return y if mixture.shared_experts is None else y + mixture.shared_experts(x)

    mixture.forward = forward


def tensor_plan(model: nn.Module) -> dict[str, Any]:
    """Pairs of linear layers are cut by columns and by rows, embeddings by rows, the head by columns."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    names = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    columns, rows = ("c_fc", "gate_proj", "up_proj"), ("mlp.c_proj", "down_proj")
    chain = [name for name in names if name.startswith("layers.")]  # of a perceptron
    paired = {name: number % 2 for number, name in enumerate(chain[: len(chain) // 2 * 2])}
    plan: dict[str, Any] = {}
    for name in names:
        if isinstance(model.get_submodule(name), nn.Embedding):
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        elif name == "lm_head":
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        elif name.endswith(rows) or paired.get(name) == 1:
            plan[name] = RowwiseParallel()
        elif name.endswith(columns) or paired.get(name) == 0:
            plan[name] = ColwiseParallel()
    return plan


def units_of(model: nn.Module, kind: str, used_elsewhere: str | None) -> list[nn.Module]:
    """Modules that are units besides the root. A module whose weight others read cannot be one."""
    if kind == "block":
        return [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    if kind == "leaf":
        leaves = [(n, m) for n, m in model.named_modules() if n and not list(m.children()) and list(m.parameters())]
        return [m for n, m in leaves if n != used_elsewhere]
    return []


def _tied(options: dict[str, Any], kind: str) -> str | None:
    names = {"gpt": "wte", "llama": "model.embed_tokens", "odd": "shared"}
    return names.get(kind) if options.get("tied") else None


def _single(value):
    """Floating values as float32, which they were before golden/oracle.py made float64 of them."""
    return value.float() if torch.is_tensor(value) and value.is_floating_point() else value


class GivenCase(Trial):
    """A run and its setup, as the module says. `oracle` has the names of golden/oracle.py."""

    patience = PATIENCE

    def __init__(self, oracle: SimpleNamespace, setup: str, run: dict[str, Any]) -> None:
        self.oracle = oracle
        self.setup = json.loads(setup)
        self.run = run
        self.engine = engine_of(self.setup["engine"])
        self.segments = [SimpleNamespace(ranks=int(np.prod(list(s["mesh"].values()))), **s) for s in self.setup["segments"]]
        self.steps = [{**step, **own} for step, own in zip(run["steps"], self.setup["steps"])]

    def build(self, ep: int) -> Built:
        model = self.oracle.make_model(self.run["kind"], self.run["model"], self.run["parameters"]).to(torch.float32)
        frozen = self.steps[0]["frozen"]
        for name, parameter in self.oracle.parameters_of(model):
            parameter.requires_grad_(name not in frozen)
        if self.engine.takes_ep:
            for mixture in [module for module in model.modules() if isinstance(module, self.oracle.Mixture)]:
                route(mixture)
        precision = getattr(torch, self.setup["precision"])
        units = units_of(model, self.setup["units"], _tied(self.run["model"], self.run["kind"]))
        reshard = {0: False, 1: True}.get(self.setup["reshard"], self.setup["reshard"])
        low = None if precision == torch.float32 else precision
        return Built(model, units, reshard, low, self.run["kind"] == "odd", ep)

    def train(self, index: int, folder: str, comm: Any = None) -> list[dict[str, Any]]:
        segment = self.segments[index]
        mesh = init_device_mesh("cpu", tuple(segment.mesh.values()), mesh_dim_names=tuple(segment.mesh))
        built = self.build(segment.ep)
        if segment.load is not None:
            spoil(built.model)
        sharded = self.engine.parallelize(built, mesh)
        sharded = sharded if isinstance(sharded, Sharded) else Sharded(sharded)
        optimizer = self.make_optimizer(sharded)
        if segment.load is not None:
            load(sharded.module, optimizer, os.path.join(folder, str(segment.load)), "dcp")
        position = 0
        for axis, coordinate in zip(segment.mesh, mesh.get_coordinate()):
            if axis != "tp":
                position = position * segment.mesh[axis] + coordinate
        data_ranks = len(self.steps[segment.first]["microbatches"][0])
        rank = Rank(self, sharded, optimizer, position, data_ranks, built.model)
        records = []
        for s in range(segment.first, segment.last):
            if s > segment.first or segment.load is None:
                self.save(sharded, optimizer, s, folder)
            records.append(rank.step(self.steps[s]))
        if segment.last < len(self.steps):
            self.save(sharded, optimizer, segment.last, folder)
        return records

    def make_optimizer(self, sharded: Sharded):
        named = [(name, p) for name, p in parameters_of(sharded).items() if p.requires_grad]
        make = sharded.wrap_optimizer or self.oracle.plainly
        optimizer = self.oracle.make_optimizer(named, make=make, **self.run["optimizer"])
        return (sharded.after_build(optimizer) or optimizer) if sharded.after_build else optimizer

    def save(self, sharded: Sharded, optimizer, s: int, folder: str) -> None:
        if self.steps[s]["save"]:
            save(sharded.module, optimizer, os.path.join(folder, str(s)), "dcp")

    def judge(self, ranks: list[list[list[dict[str, Any]]]]) -> list[list[dict[str, Any]]] | Verdict:
        """What each rank held after each step, as [step][rank]."""
        try:
            return [self._of_ranks([steps[s] for steps in segment]) for segment in ranks for s in range(len(segment[0]))]
        except Misplaced as error:
            return self.finish(Verdict("misplaced", where="misplaced", message=str(error)))

    def _of_ranks(self, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        step = [
            {"losses": [[x] for x in r["losses"]], "gradient_norm": r["norm"], "gradients": [], "parameters": [], "state": []}
            for r in ranks
        ]
        self._place([r["gradients"] for r in ranks], "gradient", [s["gradients"] for s in step])
        self._place([r["parameters"] for r in ranks], "parameter", [s["parameters"] for s in step])
        for slot in ranks[0]["state"]:
            for s in step:
                s["state"].append((slot, []))
            self._place([r["state"][slot] for r in ranks], slot, [s["state"][-1][1] for s in step])
        return step

    def _place(self, held: list[dict[str, Piece]], kind: str, into: list[list]) -> None:
        """Puts whole tensors together, and each on the first rank that holds it."""
        shapes = {name: tuple(value[2]) for name, value in self.run["parameters"]}
        for name in held[0]:
            try:
                wholes = assemble({r: pieces.get(name) for r, pieces in enumerate(held)}, shapes[name])
            except Misplaced as error:
                raise Misplaced(f"{kind} of {name}: {error}") from error
            for ranks, whole in wholes:
                into[ranks[0]].append((name, self.oracle.exported(whole)))


class Rank:
    """One rank's training."""

    def __init__(self, case: GivenCase, sharded: Sharded, optimizer, position: int, data_ranks: int, model: nn.Module) -> None:
        self.case, self.sharded, self.optimizer = case, sharded, optimizer
        self.position, self.data_ranks = position, data_ranks
        self.model = model

    def step(self, step: dict[str, Any]) -> dict[str, Any]:
        oracle, sharded = self.case.oracle, self.sharded
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * step["lr_factor"]
        self._before(step)
        # Engines take means over the data-parallel ranks; the run says what the sum is divided by.
        factor = self.data_ranks / step["divide"]
        losses = []
        for m, sync in enumerate(step["sync"]):
            with synchronized(sharded, m, len(step["sync"]), wait=not sync):
                loss = self._loss(step, m)
                if loss.requires_grad:
                    (loss * factor).backward()
            losses.append(float(loss.detach()))
        named = parameters_of(sharded)
        trained = {name: p for name, p in named.items() if p.requires_grad}
        for parameter in trained.values():
            if parameter.grad is None:  # as in golden/oracle.py
                parameter.grad = torch.zeros_like(parameter)
        norm_max = step["clip_norm"] if step["clip_norm"] > 0 else float("inf")
        norm = clip_gradients(sharded, norm_max, step["norm_order"])
        gradients = sharded.gradients() if sharded.gradients else {name: p.grad for name, p in trained.items()}
        held = {name: piece_of(g) for name, g in gradients.items() if name in trained and g is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        named = parameters_of(sharded)
        options = self.case.run["optimizer"]
        state = oracle.state_of(self.optimizer, list(named.items()), options["kind"], options["momentum"])
        return {
            "losses": losses,
            "norm": norm,
            "gradients": held,
            "parameters": {name: piece_of(p) for name, p in named.items()},
            "state": {slot: {name: piece_of(value) for name, value in values} for slot, values in state},
        }

    def _loss(self, step: dict[str, Any], m: int) -> torch.Tensor:
        oracle = self.case.oracle
        given, target, weight, branch = step["microbatches"][m][self.position]
        inputs = [_single(x) for x in oracle.inputs_of(self.model, given, branch)]
        return weight * oracle.loss_of(self.sharded.module(*inputs).float(), _single(oracle.tensor(target)))

    def _before(self, step: dict[str, Any]) -> None:
        """What must leave no trace in the step."""
        module = self.sharded.module
        if step["unshard"] and hasattr(module, "unshard"):
            module.unshard()
            module.reshard()
        if step["eval"]:
            with torch.no_grad():
                self._loss(step, 0)
        if step["discard"]:
            loss = self._loss(step, 0)
            if loss.requires_grad:
                loss.backward()
            self.optimizer.zero_grad()
