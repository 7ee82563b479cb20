"""One parameter as a DTensor, its shard, and whole, as its unit computes with it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from . import _C
from .ranks import default_comm, mesh_comm
from .torch_private import KEEPS_GRADIENT_DTYPES, local_of


@dataclasses.dataclass(frozen=True)
class Cut:
    """How parameters lie over ranks: the last dimension of the mesh cuts them, one before it has replicas."""

    mesh: Any  # a DeviceMesh
    rank: int
    ranks: int
    within: Any = None  # the DeviceMesh of all dimensions, where dp_mesh_dims says which ones are data parallelism
    names: "tuple[str, ...]" = ()  # those

    @property
    def others(self) -> "tuple[str, ...]":
        """The dimensions that are not data parallelism."""
        return () if self.within is None else tuple(name for name in self.within.mesh_dim_names if name not in self.names)


def cut_of(mesh: Any, device: str, dims: Any = None) -> Cut:
    """The cut on a mesh: a DeviceMesh, a MeshComm, a text, or None for all ranks of the default process group.

    With a DataParallelMeshDims, on these dimensions of a DeviceMesh.
    """
    if dims is not None:
        cut = cut_of(_data_parallel_part(mesh, dims), device)
        return dataclasses.replace(cut, within=mesh, names=(*dims.replicate_names, *dims.shard_names))
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


def _data_parallel_part(mesh: Any, dims: Any) -> DeviceMesh:
    known = getattr(mesh, "mesh_dim_names", None) or ()
    for name in (*dims.replicate_names, *dims.shard_names):
        if name not in known:
            raise _C.Error(f"[fsdp] dp_mesh_dims has the dimension {name!r}, and the mesh {known}. Give a DeviceMesh with it")
    if not dims.shard_names:
        raise _C.Error("[fsdp] dp_mesh_dims has no dimension to shard over. Give it shard=..., or leave the model to DDP")
    order = [known.index(name) for name in (*dims.replicate_names, *dims.shard_names)]
    if order != sorted(order):
        raise _C.Error(
            f"[fsdp] dp_mesh_dims replicates over {tuple(dims.replicate_names)} and shards over {tuple(dims.shard_names)}, and "
            f"the mesh has the dimensions {known}. Make one in which they come in this order"
        )
    parts = [
        mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
        for names in (dims.replicate_names, dims.shard_names)
        if names
    ]
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


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
        if getattr(given, "grad_dtype", None) not in (None, given.dtype):
            raise _C.Error(
                f"[fsdp] parameter {name} is in {given.dtype}, and its grad_dtype is {given.grad_dtype}. Gradients have the "
                f"dtype of their shards, so make it {given.grad_dtype}, and compute in {given.dtype} by mp_policy"
            )
        if not 0 <= dim < given.dim():
            raise _C.Error(f"[fsdp] parameter {name} has {given.dim()} dims, and shard_placement_fn says dim {dim}")
        self.parallel = _parallel_of(given, name, cut)
        self.dim = dim
        self.cut = cut
        whole = local_of(given).detach()
        rows, self.shape = whole.shape[dim], whole.shape  # as the engine has it
        each = -(-rows // cut.ranks)
        self.begin, self.end = min(cut.rank * each, rows), min((cut.rank + 1) * each, rows)
        own = whole.narrow(dim, self.begin, self.end - self.begin).clone(memory_format=torch.contiguous_format)
        shard = DTensor(own, _spec_of(given, self.parallel, cut, dim), requires_grad=False)
        self.shard = nn.Parameter(shard, given.requires_grad)
        self.shard._shardproof_parameter = self
        self.whole = self.new_whole(given.dtype, given.requires_grad)
        self.memory: Optional[torch.Tensor] = None  # the whole one's, where the module computes with something else
        self.attributes = {key: value for key, value in vars(given).items() if key not in vars(self.shard)}
        for tensor in (self.shard, self.whole):
            vars(tensor).update(self.attributes)
        given._shardproof_shard = self.shard  # for who has the parameter already, such as an optimizer
        self.given: Optional[torch.Tensor] = given
        self.name = name
        self.is_assigned = False
        self.view: Optional[torch.Tensor] = None  # of the engine's main parameter
        self.sharded: Callable = lambda: None  # the model's Sharded, once there is one

    def retire_given(self) -> None:
        """The shard has its hooks from now on, and a backward through the parameter that was given is an error."""
        given, self.given = self.given, None
        if given is None or not given.requires_grad:
            return
        name = self.name

        def refuse(gradient: torch.Tensor) -> None:
            raise _C.Error(
                f"[fsdp] a backward reached parameter {name} as it was before fully_shard, which is trained no more. Whatever "
                "keeps parameters besides their module, such as a list or a penalty of weights, has to take them from the "
                "module after fully_shard"
            )

        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            setattr(self.shard, hooks, getattr(given, hooks))
            setattr(given, hooks, None)
        given.register_hook(refuse)

    def new_whole(self, dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
        """A whole parameter, without memory yet."""
        return nn.Parameter(torch.empty(self.shape, dtype=dtype, device="meta"), requires_grad)

    def set_gradient_dtype(self, dtype: Optional[torch.dtype]) -> None:
        """In which dtype autograd hands gradients over. With None in that in which it makes them."""
        if KEEPS_GRADIENT_DTYPES and self.whole.requires_grad:
            self.whole.grad_dtype = dtype

    def take(self, shard: nn.Parameter) -> None:
        """Another DTensor is the shard from now on. Optimizers that have the old one get it at their next step."""
        vars(shard).pop("_shardproof_shard", None)  # of one that was the shard before
        if self.local is self.view:  # which gets other values, and the old shard may come back, as after functional_call
            self.shard._local_tensor = self.local.clone()
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
        return self.parallel is None

    def as_local(self, flat: Optional[torch.Tensor]) -> torch.Tensor:
        """What the engine has of it on this rank, in the shape of the shard's own part."""
        if flat is None:
            return torch.empty_like(self.local)
        return flat.view(self.local.shape)

    def is_unused(self) -> bool:
        return not self.is_as_in_engine and self.memory is None

    def used(self) -> torch.Tensor:
        """What a unit computes with: the whole parameter, or what it is in its module, with a graph that leads to it."""
        if self.is_as_in_engine:
            return self.whole
        if self.memory is None:  # its first use
            self.memory = self.whole.detach()
        with torch.enable_grad():
            return self.parallel.used(_Used.apply(self.whole, self.memory))

    def fill(self, begin: int, end: int, values: torch.Tensor) -> None:
        """Write the whole parameter's elements [begin, end) into `values`, as far as they are here, and zeros elsewhere."""
        inner = self.shape[self.dim + 1 :].numel()
        row, own = self.shape[self.dim] * inner, (self.begin * inner, self.end * inner)
        values.zero_()
        lines = values.view(-1, min(row, end - begin))  # whole rows, or a part of one
        first, last = max(begin % row, own[0]), min(begin % row + lines.shape[1], own[1])
        if first < last:
            held = self.local.reshape(-1, own[1] - own[0])[begin // row :][: lines.shape[0]]
            lines[:, first - begin % row : last - begin % row] = held[:, first - own[0] : last - own[0]]

    def through_hooks(self, flat: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """What the hooks of the parameter (``register_hook``) make of what a backward has made."""
        if not self.shard._backward_hooks:
            return flat
        gradient = DTensor(self.as_local(flat), self.shard._spec, requires_grad=False)
        for hook in list(self.shard._backward_hooks.values()):
            changed = hook(gradient)
            if changed is not None and not isinstance(changed, DTensor):
                raise _C.Error(
                    f"[fsdp] a hook of parameter {self.name} got its gradient, a DTensor, and returned a "
                    f"{type(changed).__name__}. Return a DTensor, or None"
                )
            gradient = gradient if changed is None else changed
        return gradient.redistribute(placements=self.shard.placements)._local_tensor

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
    """The memory of a whole parameter as a function of the parameter. It is freed while the parameter is."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient, None


class _Parallel:
    """How a parameter lies over dimensions of a mesh that do not cut it here, and what its module computes with."""

    def __init__(self, spec: DTensorSpec, gradients: "Optional[list]" = None, local_gradients: "Optional[list]" = None):
        self.spec = spec
        self.gradients = {} if gradients is None else {"grad_placements": gradients}
        self.local_gradients = local_gradients  # of a plain tensor, which the module then computes with

    def used(self, local: torch.Tensor) -> torch.Tensor:
        shape, stride, _ = self.spec.tensor_meta
        placed = DTensor.from_local(
            local, self.spec.mesh, self.spec.placements, run_check=False, shape=shape, stride=stride, **self.gradients
        )
        return placed if self.local_gradients is None else placed.to_local(grad_placements=self.local_gradients)

    def beside(self, cut: Cut) -> "tuple[Optional[DeviceMesh], list]":
        """The dimensions that are not the cut's, and the placements there."""
        names = [name for name in cut.others if name in self.spec.mesh.mesh_dim_names]
        if cut.within is None or self.local_gradients is not None:
            return self.spec.mesh, list(self.spec.placements)
        at = self.spec.mesh.mesh_dim_names.index
        return self.spec.mesh[tuple(names)] if names else None, [self.spec.placements[at(name)] for name in names]


def _parallel_of(given: torch.Tensor, name: str, cut: Cut) -> Optional[_Parallel]:
    if not isinstance(given, DTensor):
        return _annotated(given, name, cut) if cut.others else None
    if cut.within is None:
        return _Parallel(given._spec)
    if given.device_mesh != cut.within:
        raise _C.Error(
            f"[fsdp] parameter {name} is a DTensor on {given.device_mesh}, and dp_mesh_dims is about {cut.within}. "
            "Give fully_shard the mesh that the parameters are on"
        )
    gradients = list(given.placements)
    for i, dimension in enumerate(cut.within.mesh_dim_names):
        if dimension in cut.names:
            if not given.placements[i].is_replicate():
                raise _C.Error(
                    f"[fsdp] parameter {name} is {given.placements[i]} over {dimension!r}, which dp_mesh_dims has. Make it "
                    "Replicate() there"
                )
            gradients[i] = Partial()  # each rank has its own terms, which the engine adds
    return _Parallel(given._spec, gradients)


def _annotated(given: torch.Tensor, name: str, cut: Cut) -> _Parallel:
    """A plain tensor to which spmd_types has noted down how it lies over the dimensions beside data parallelism."""
    spmd = sys.modules.get("spmd_types")
    types = {} if spmd is None else dict(spmd.get_local_type(given))
    if types:
        from spmd_types.runtime import get_partition_spec  # pylint: disable=import-outside-toplevel
        from spmd_types.types import partition_spec_to_shard_types  # pylint: disable=import-outside-toplevel

        dims = get_partition_spec(given)
        types.update({} if dims is None else partition_spec_to_shard_types(dims))
    found = [types.get(spmd.MeshAxis.of(cut.within.get_group(other))) if types else None for other in cut.others]
    if None in found:
        raise _C.Error(
            f"[fsdp] parameter {name} is a plain tensor, and nothing says how it lies over {cut.others[found.index(None)]!r}, "
            "which the mesh has beside dp_mesh_dims. Make it a DTensor on that mesh, or note down its type by spmd_types"
        )
    placements = [spmd.spmd_type_to_dtensor_placement(kind) for kind in found]
    spec = DTensor.from_local(given.detach(), cut.within[cut.others], placements, run_check=False)._spec
    return _Parallel(spec, None, [spmd.spmd_type_to_dtensor_placement(kind.backward_type()) for kind in found])


def _spec_of(given: torch.Tensor, parallel: Optional[_Parallel], cut: Cut, dim: int) -> DTensorSpec:
    """Where a shard of the given parameter lies: over the cut's mesh, and beside that as it lay before."""
    placements = [*(Replicate() for _ in range(cut.mesh.ndim - 1)), Shard(dim)]
    if parallel is None:
        meta = TensorMeta(given.shape, torch.empty(given.shape, device="meta").stride(), given.dtype)
        return DTensorSpec(cut.mesh, tuple(placements), meta)
    parts = parallel.spec.num_shards_map[dim]
    if parts > 1:  # a rank has a part of each part
        placements[-1] = _StridedShard(dim, split_factor=parts)
    shape = parallel.spec.tensor_meta.shape
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), given.dtype)
    mesh, others = parallel.beside(cut)
    whole = cut.mesh if mesh is None else DeviceMesh._concatenate([cut.mesh, mesh])
    return DTensorSpec(whole, (*placements, *others), meta)


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """The shard that has taken the place of a whole parameter or of another shard, or the given tensor."""
    while parameter is not None and (shard := vars(parameter).get("_shardproof_shard")) is not None:
        parameter = shard
    return parameter
