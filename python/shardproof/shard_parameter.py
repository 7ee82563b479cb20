"""One parameter as a DTensor, its shard, and whole, as its unit computes with it."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from . import _C
from .ranks import default_comm, mesh_comm
from .torch_private import local_of


@dataclasses.dataclass(frozen=True)
class Cut:
    """How parameters lie over ranks: the last dimension of the mesh cuts them, one before it has replicas."""

    mesh: Any  # a DeviceMesh
    rank: int
    ranks: int


def cut_of(mesh: Any, device: str) -> Cut:
    """The cut on a mesh: a DeviceMesh, a MeshComm, a text, or None for all ranks of the default process group."""
    is_ours = isinstance(mesh, _C.MeshComm)
    if is_ours:
        others = [name for name, size in mesh.axes() if name not in ("dp_replicate", "dp_shard") and size > 1]
        if others:
            raise _C.Error(
                f"[fsdp] the mesh {mesh.mesh} has the axis {others[0]}: shards are DTensors over dp_replicate and dp_shard. "
                "Use shardproof.fully_shard for other meshes"
            )
        if "dp_shard" not in dict(mesh.axes()):
            raise _C.Error(f"[fsdp] the mesh {mesh.mesh} has no axis dp_shard, over which parameters are cut")
        from .comm_mesh import device_mesh_of  # pylint: disable=import-outside-toplevel

        mesh = device_mesh_of(mesh, device)
    elif mesh is None:
        from torch.distributed.device_mesh import init_device_mesh  # pylint: disable=import-outside-toplevel

        if not torch.distributed.is_initialized():
            default_comm()  # says what to do
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    if not 1 <= mesh.ndim <= 2:
        raise _C.Error(f"[fsdp] a mesh has one dimension, or two, (replicate, shard), got {mesh}")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks) and not is_ours:
        raise _C.Error(f"[fsdp] the mesh lists ranks as {mesh.mesh.tolist()}. Give them in ascending order")
    return Cut(mesh, mesh.get_coordinate()[-1], mesh.shape[-1])


def comms_of(mesh: Any) -> _C.MeshComm:
    """The communicators of a mesh as `cut_of` takes it. The last dimension of a DeviceMesh cuts, as in FSDP2."""
    sizes = getattr(mesh, "shape", None)
    if mesh is None or isinstance(mesh, (_C.MeshComm, str)) or not sizes:
        return mesh_comm(None, mesh)
    if len(sizes) == 1:
        return mesh_comm(mesh.get_group(), f"dp_shard={sizes[0]}")
    whole = torch.distributed.get_world_size() == mesh.size()
    return mesh_comm(None if whole else mesh._flatten().get_group(), f"dp_replicate={sizes[0]},dp_shard={sizes[1]}")


class Parameter:
    """A parameter of a model: its shard, which the module has between uses, and the whole one, which its unit computes with."""

    def __init__(self, given: nn.Parameter, name: str, cut: Cut, dim: int = 0):
        if not isinstance(given, DTensor) and type(given) is not nn.Parameter:
            raise _C.Error(
                f"[fsdp] parameter {name} is a {type(given).__name__}, and must be a plain torch.nn.Parameter or a DTensor. "
                "Make a lazy module run once, and take off whatever has wrapped or quantized the parameter"
            )
        if given.dim() == 0:
            raise _C.Error(f"[fsdp] parameter {name} is a scalar, which has no dim to cut. Give it the shape (1,)")
        if not 0 <= dim < given.dim():
            raise _C.Error(f"[fsdp] parameter {name} has {given.dim()} dims, and shard_placement_fn says dim {dim}")
        self.tensor_parallel = given._spec if isinstance(given, DTensor) else None
        self.dim = dim
        self.cut = cut
        rows_first = local_of(given).detach().movedim(dim, 0)
        rows, self.shape = rows_first.shape[0], rows_first.shape  # as the engine has it
        each = -(-rows // cut.ranks)
        self.begin, self.end = min(cut.rank * each, rows), min((cut.rank + 1) * each, rows)
        own = rows_first[self.begin : self.end].clone(memory_format=torch.contiguous_format)
        shard = DTensor(self._turned(own), _spec_of(given, cut, dim), requires_grad=False)
        self.shard = nn.Parameter(shard, given.requires_grad)
        self.shard._shardproof_parameter = self
        self.whole = nn.Parameter(torch.empty(self.shape, dtype=given.dtype, device="meta"), given.requires_grad)
        self.turned: Optional[torch.Tensor] = None  # the whole one's memory, with dims in the module's order
        self.attributes = {key: value for key, value in vars(given).items() if key not in vars(self.shard)}
        for tensor in (self.shard, self.whole):
            vars(tensor).update(self.attributes)
        given._shardproof_shard = self.shard  # for who has the parameter already, such as an optimizer
        self.is_assigned = False
        self.view: Optional[torch.Tensor] = None  # of the engine's main parameter
        self.sharded: Callable = lambda: None  # the model's Sharded, once there is one

    def take(self, shard: nn.Parameter) -> None:
        """Another DTensor is the shard from now on. Optimizers that have the old one get it at their next step."""
        vars(shard).pop("_shardproof_shard", None)  # of one that was the shard before
        self.shard._shardproof_shard = shard
        self.shard, self.is_assigned = shard, True
        self.mark()

    def mark(self) -> None:
        """Moves and casts of a module take attributes off."""
        if "_shardproof_parameter" not in vars(self.shard):
            vars(self.shard).update({**self.attributes, "_shardproof_parameter": self})

    @property
    def local(self) -> torch.Tensor:
        return self.shard._local_tensor

    @property
    def is_as_in_engine(self) -> bool:
        return self.dim == 0 and self.tensor_parallel is None

    def _turned(self, rows_first: torch.Tensor) -> torch.Tensor:
        return rows_first.movedim(0, self.dim) if self.dim else rows_first

    def as_local(self, flat: Optional[torch.Tensor]) -> torch.Tensor:
        """What the engine has of it on this rank, in the shape of the shard's own part."""
        if flat is None:
            return torch.empty_like(self.local)
        return self._turned(flat.view(self.end - self.begin, *self.shape[1:]))

    def is_unused(self) -> bool:
        return not self.is_as_in_engine and self.turned is None

    def used(self) -> torch.Tensor:
        """What a unit computes with: the whole parameter, or what it is in its module, with a graph that leads to it."""
        if self.is_as_in_engine:
            return self.whole
        if self.turned is None:  # its first use, when it has memory
            self.turned = self._turned(self.whole.detach())
        with torch.enable_grad():
            turned = _Used.apply(self.whole, self.turned, self.dim)
            if self.tensor_parallel is None:
                return turned
            mesh, placements, (shape, stride, _) = (
                self.tensor_parallel.mesh,
                self.tensor_parallel.placements,
                self.tensor_parallel.tensor_meta,
            )
            return DTensor.from_local(turned, mesh, placements, run_check=False, shape=shape, stride=stride)

    def fill(self, begin: int, end: int, values: torch.Tensor) -> None:
        """Write the whole parameter's elements [begin, end) into `values`, as far as they are here, and zeros elsewhere."""
        row = self.shape[1:].numel()
        first, last = max(begin, self.begin * row), min(end, self.end * row)
        values.zero_()
        if first < last:
            own = self.local.movedim(self.dim, 0).reshape(-1)[first - self.begin * row : last - self.begin * row]
            values[first - begin : last - begin].copy_(own)

    def add_gradient(self, flat: Optional[torch.Tensor]) -> None:
        """Give it what a backward has made."""
        local = self.as_local(flat)
        if self.shard.grad is None:
            self.shard.grad = DTensor(local, self.shard._spec, requires_grad=False)
        elif self.shard.grad.placements == self.shard.placements:
            self.shard.grad._local_tensor.add_(local)
        else:
            self.shard.grad.add_(DTensor(local, self.shard._spec, requires_grad=False))

    def tell_hooks(self) -> None:
        for hook in (self.shard._post_accumulate_grad_hooks or {}).values():
            hook(self.shard)


class _Used(torch.autograd.Function):
    """The memory of a whole parameter, turned, as a function of the parameter. It is freed while the parameter is."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, turned: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return turned.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient.movedim(ctx.dim, 0), None, None


def _spec_of(given: torch.Tensor, cut: Cut, dim: int) -> DTensorSpec:
    """Where a shard of the given parameter lies: over the cut's mesh, and over that of a parameter that PyTorch cut before."""
    strides = torch.empty(given.shape, device="meta").stride()
    meta = TensorMeta(given.shape, strides, given.dtype)
    placements = [*(Replicate() for _ in range(cut.mesh.ndim - 1)), Shard(dim)]
    if not isinstance(given, DTensor):
        return DTensorSpec(cut.mesh, tuple(placements), meta)
    parts = given._spec.num_shards_map[dim]
    if parts > 1:  # a rank has a part of each part
        placements[-1] = _StridedShard(dim, split_factor=parts)
    mesh = DeviceMesh._concatenate([cut.mesh, given.device_mesh])
    return DTensorSpec(mesh, (*placements, *given.placements), meta)


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """The shard that has taken the place of a whole parameter or of another shard, or the given tensor."""
    while parameter is not None and (shard := vars(parameter).get("_shardproof_shard")) is not None:
        parameter = shard
    return parameter
