"""PyTorch's own engines as subjects of a check: each is a plain function of a model and a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from . import models
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
) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as of_torch

    fully_shard = fully_shard or of_torch
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
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


UNITS = {"units": ("root", "blocks"), "reshard": (True, False)}
MIXED = {**UNITS, "precision": (None, None, None, torch.bfloat16)}

FINITE = tuple(clip for clip in CLIPS if clip is None or clip[1] != float("inf"))
KNOWN = {
    "Expected device to be set": "docs/findings/018.md",
    r"(?s)(gradient of (embed|head)\.weight|: norm of).*ties=yes": "docs/findings/004.md",
    "_chunk_cat expects non-empty tensor": "docs/findings/005.md",
    "req MetadataIndex.* mismatch sizes": "docs/findings/006.md",
    "inf norm on an empty tensor": "docs/findings/001.md",
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
}


def with_known(name: str) -> Subject:
    """An engine with all that is known to fail: known findings count as failures, and what leads to them is drawn."""
    subject = ENGINES[name]
    options = {**subject.options, **WIDER.get(name, {})}
    return replace(subject, make_model=models.make_model, known={}, clips=CLIPS, optimizers=tuple(OPTIMIZERS), options=options)
