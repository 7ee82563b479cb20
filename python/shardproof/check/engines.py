"""PyTorch's own engines as subjects of a check: each is a plain function of a model and a mesh."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Callable, Sequence

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from . import models
from .expert_exchange import exchanged
from .plan import CLIPS, OPTIMIZERS, Subject
from .train import Sharded

EVEN = {"make_model": models.make_even_model, "make_batch": models.make_batch, "loss": models.loss}
PLAIN = {"make_model": models.make_model, "make_batch": models.make_batch, "loss": models.loss}


# "root" alone, the model's "blocks" besides, or these modules.
Units = str | Sequence[nn.Module]


def ddp(model: nn.Module, mesh, static: bool = False, bucket_view: bool = False, find_unused: bool = False) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        model,
        process_group=mesh.get_group("dp"),
        static_graph=static,
        gradient_as_bucket_view=bucket_view,
        find_unused_parameters=find_unused,
    )


def zero1(model: nn.Module, mesh, overlap: bool = False) -> Sharded:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    group = mesh.get_group("dp")
    module = nn.parallel.DistributedDataParallel(model, process_group=group)
    return Sharded(module, wrap_optimizer=lambda p, kind, **s: ZeroRedundancyOptimizer(p, kind, process_group=group, **s))


def fsdp2(
    model: nn.Module,
    mesh,
    units: Units = "root",
    reshard: bool | int = True,
    precision: torch.dtype | None = None,
    fully_shard: Callable | None = None,
    ignored: set[nn.Parameter] | None = None,
) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as of_torch

    fully_shard = fully_shard or of_torch
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if ignored:
        settings["ignored_params"] = ignored
    if precision is not None:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for unit in model.blocks if units == "blocks" else () if units == "root" else units:
        fully_shard(unit, **settings)
    return fully_shard(model, **settings)


def ours(
    model: nn.Module, mesh, units: Units = "root", reshard: bool | int = True, precision: torch.dtype | None = None
) -> nn.Module:
    from ..fsdp import fully_shard

    return fsdp2(model, mesh, units, reshard, precision, fully_shard)


def tensor_plan(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for name, module in model.named_modules():
        if name.endswith(".up"):
            plan[name] = ColwiseParallel()
        elif name.endswith(".down"):
            plan[name] = RowwiseParallel()
        elif isinstance(module, nn.Embedding):
            plan[name] = RowwiseParallel(input_layouts=Replicate())
    return plan


def clip_by_mesh(module: nn.Module, max_norm: float, kind: float) -> torch.Tensor:
    """Clips gradients that lie on several meshes, which `clip_grad_norm_` cannot."""
    norms: dict[Any, list[torch.Tensor]] = {}
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    for gradient in gradients:
        norms.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    totals = [torch.nn.utils.get_total_norm(group, kind, foreach=False) for group in norms.values()]
    totals = [total.full_tensor() if isinstance(total, DTensor) else total for total in totals]
    norm = torch.linalg.vector_norm(torch.stack(totals), kind)
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _clipped(module: nn.Module, clip: str) -> nn.Module | Sharded:
    return module if clip == "torch" else Sharded(module, clip=lambda max_norm, kind: clip_by_mesh(module, max_norm, kind))


def tp(model: nn.Module, mesh, clip: str = "by_mesh", plan: dict[str, Any] | None = None) -> nn.Module | Sharded:
    from torch.distributed.tensor.parallel import parallelize_module

    return _clipped(parallelize_module(model, mesh["tp"], plan or tensor_plan(model)), clip)


def fsdp2_tp(
    model: nn.Module,
    mesh,
    units: Units = "root",
    reshard: bool | int = True,
    clip: str = "by_mesh",
    plan: dict[str, Any] | None = None,
) -> nn.Module | Sharded:
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(model, mesh["tp"], plan or tensor_plan(model))
    return _clipped(fsdp2(model, mesh["dp"], units, reshard), clip)


def hsdp(
    model: nn.Module, mesh, units: Units = "root", reshard: bool | int = True, precision: torch.dtype | None = None
) -> nn.Module:
    return fsdp2(model, mesh["dp_replicate", "dp_shard"], units, reshard, precision)


def fsdp2_ep(
    model: nn.Module,
    mesh,
    ep: int = 1,
    units: Units = "root",
    reshard: bool | int = True,
    clip: str = "by_mesh",
    over_one: bool = False,
) -> nn.Module | Sharded:
    """As torchtitan does it: the ranks along dp are a mesh of their own for experts, which `ep` neighbours share. Without
    `over_one` experts that only one rank holds are left to nobody, since FSDP2 divides their gradients twice."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks = mesh["dp"].size()
    alone: set[nn.Parameter] = set()
    expert_mesh = init_device_mesh(mesh.device_type, (ranks // ep, ep), mesh_dim_names=("dp_shard", "ep"))
    for module in [module for name, module in model.named_modules() if name.endswith(".experts")]:
        count = len(next(module.parameters()))
        module.forward = exchanged(module.forward, count, expert_mesh.get_group("ep"))
        for name, p in list(module.named_parameters()):
            cut = distribute_tensor(p.detach(), expert_mesh["ep"], [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(cut, p.requires_grad))
        # What other ranks along ep would have added they have sent, so it is divided by all ranks, as other gradients are.
        if ep < ranks or over_one:
            fully_shard(module, mesh=expert_mesh["dp_shard"], reshard_after_forward=bool(reshard))
            module.set_gradient_divide_factor(ranks)
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply
        else:
            alone.update(module.parameters())
    for p in [p for p in alone if p.requires_grad]:
        p.register_hook(lambda gradient: gradient / ranks)
    return _clipped(fsdp2(model, mesh, units, reshard, ignored=alone), clip)


def ours_ep(model: nn.Module, mesh, ep: int = 1, units: Units = "root", strategy: str = "zero3") -> Sharded:
    from .. import ExpertParallel, fully_shard, parallelize, torch_optimizer
    from ..shard_parameter import comms_of
    from .trained import held_of

    comms, names = comms_of(mesh), [name for name, _ in model.named_parameters()]
    parallelize(model, comms, plan={"blocks.*.experts": ExpertParallel(ep)})
    sharded = fully_shard(model, comms, strategy=strategy, units=list(model.blocks) if units == "blocks" else ())

    @contextlib.contextmanager
    def microbatch(index: int, count: int):
        sharded.set_last_microbatch(index + 1 == count)
        yield

    def by_name(pieces: list) -> dict[str, list]:
        held = held_of(pieces)
        return {name: held.get(name, []) for name in names}

    return Sharded(
        model,
        wrap_optimizer=lambda parameters, kind, **settings: torch_optimizer(kind, sharded, parameters, **settings),
        clip=sharded.clip_gradients,
        microbatch=microbatch,
        parameters=lambda: by_name(sharded.main_parameters()),
        gradients=lambda: by_name(sharded.gradients()),
    )


UNITS = {"units": ("root", "blocks"), "reshard": (True, False)}
MIXED = {**UNITS, "precision": (None, None, None, torch.bfloat16)}

FINITE = tuple(clip for clip in CLIPS if clip is None or clip[1] != float("inf"))
KNOWN = {
    "Expected device to be set": "docs/findings/018.md",
    r"(?s)(gradient of (embed|head)\.weight|: norm of).*ties=yes": "docs/findings/004.md",
    "_chunk_cat expects non-empty tensor": "docs/findings/005.md",
    "req MetadataIndex.* mismatch sizes": "docs/findings/006.md",
    "inf norm on an empty tensor": "docs/findings/001.md",
    r"Sharding propagation failed for aten.view.default\(Spec\(\w+\[1, 1\]\(S\(1\)\)\), \[1\]\)": "docs/findings/021.md",
    r"aten\.\w+_\.\w+\(Spec\(\w+\[[12](, .*)?\]\(S\(0\)\)\), Spec\(.*\(R\)\)": "docs/findings/023.md",
}

ENGINES: dict[str, Subject] = {
    "torch-ddp": Subject(ddp, **PLAIN, options={"bucket_view": (False, True)}, known=KNOWN, name="torch-ddp"),
    "torch-zero1": Subject(zero1, **PLAIN, load=False, name="torch-zero1"),
    "torch-fsdp2": Subject(fsdp2, **PLAIN, options=MIXED, known=KNOWN, clips=FINITE, name="torch-fsdp2"),
    "shardproof-fsdp": Subject(
        ours,
        **PLAIN,
        options=MIXED,
        known={"Expected device to be set": KNOWN["Expected device to be set"]},  # of torch.distributed.checkpoint
        clips=FINITE,
        name="shardproof-fsdp",
    ),
    "shardproof-ep": Subject(
        ours_ep,
        models.make_expert_model,
        models.make_expert_batch,
        models.loss,
        ep=(1, 2, 3, 4),
        options={"units": UNITS["units"], "strategy": ("zero3", "ddp", "zero1", "zero2")},
        no_sync=False,
        load=False,
        name="shardproof-ep",
    ),
    "torch-tp": Subject(tp, **EVEN, mesh={"tp": (1, 2, 3)}, no_sync=False, known=KNOWN, clips=FINITE, name="torch-tp"),
    "torch-fsdp2-tp": Subject(
        fsdp2_tp,
        **EVEN,
        mesh={"dp": (1, 2, 3), "tp": (1, 2, 3)},
        options=UNITS,
        max_ranks=6,
        known=KNOWN,
        clips=FINITE,
        name="torch-fsdp2-tp",
    ),
    "torch-fsdp2-ep": Subject(
        fsdp2_ep,
        models.make_expert_model,
        models.make_expert_batch,
        models.loss,
        ep=(1, 2, 3, 4),
        options=UNITS,
        known=KNOWN,
        clips=FINITE,
        name="torch-fsdp2-ep",
    ),
    "torch-hsdp": Subject(
        hsdp,
        **PLAIN,
        mesh={"dp_replicate": (1, 2, 3), "dp_shard": (1, 2, 3)},
        options=MIXED,
        max_ranks=6,
        known=KNOWN,
        clips=FINITE,
        name="torch-hsdp",
    ),
}

for _subject in ENGINES.values():
    _subject.checkpoints = ("dcp", "flat", "full")

WIDER: dict[str, dict[str, Sequence[Any]]] = {
    "torch-ddp": {"static": (False, True)},
    "torch-tp": {"clip": ("by_mesh", "torch")},
    "torch-fsdp2-tp": {"clip": ("by_mesh", "torch")},
    "torch-fsdp2-ep": {"clip": ("by_mesh", "torch"), "over_one": (False, True)},
}


def with_known(name: str) -> Subject:
    """An engine with all that is known to fail: known findings count as failures, and what leads to them is drawn."""
    subject = ENGINES[name]
    options = {**subject.options, **WIDER.get(name, {})}
    make_model = models.make_model if subject.make_model is models.make_even_model else subject.make_model
    return replace(subject, make_model=make_model, known={}, clips=CLIPS, optimizers=tuple(OPTIMIZERS), options=options)
