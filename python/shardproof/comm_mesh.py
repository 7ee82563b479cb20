"""A DeviceMesh of torch.distributed for ranks that are no process group, such as threads: DTensors need one."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from . import _C
from .torch_private import under_new_names

_number = itertools.count(1)
_known: "weakref.WeakKeyDictionary[_C.Comm, dict[str, DeviceMesh]]" = weakref.WeakKeyDictionary()


def _done(result: Any) -> Any:
    future: "torch.futures.Future" = torch.futures.Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)


@under_new_names
class CommGroup(dist.ProcessGroup):
    """The ranks of a `Comm`, as the collectives of DTensors call them. Sums are taken in rank order."""

    def __init__(self, comm: _C.Comm):
        super().__init__(comm.rank, comm.size)
        self.comm = comm

    def getBackendName(self) -> str:
        return "shardproof"

    def __repr__(self) -> str:
        return f"CommGroup('{self.comm.name}', rank {self.comm.rank} of {self.comm.size})"

    def _reduce(self, tensor: torch.Tensor, op: Any) -> None:
        names = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
        name = next((name for known, name in names.items() if op == known), None)
        if name is None:
            raise _C.Error(f"[comm] ranks that are no process group have sum, avg, max and min, got {op}")
        whole = tensor.contiguous()
        self.comm.all_reduce(whole, name)
        tensor.copy_(whole / self.comm.size if op == dist.ReduceOp.AVG else whole)

    def allreduce(self, tensors: "list[torch.Tensor]", opts: Any = None) -> Any:
        for tensor in tensors:
            self._reduce(tensor, dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: "list[torch.Tensor]", opts: Any = None) -> Any:
        for tensor in tensors:
            tensor.copy_(self.comm.broadcast(tensor.contiguous(), 0 if opts is None else opts.rootRank))
        return _done(tensors)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        output.view(self.comm.size, -1).copy_(self.comm.all_gather(tensor).view(self.comm.size, -1))
        return _done(output)

    def allgather_into_tensor_coalesced(self, outputs: list, tensors: list, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, tensors):
            self._allgather_base(output, tensor)
        return _done(outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        whole = tensor.clone()
        self._reduce(whole, dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        output.copy_(whole.view(self.comm.size, *output.shape)[self.comm.rank])
        return _done(output)

    def reduce_scatter_tensor_coalesced(self, outputs: list, tensors: list, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, tensors):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        self.comm.barrier()
        return _done(None)


class CommMesh(DeviceMesh):
    """Its own ranks' numbers, where DeviceMesh asks the default process group."""

    def get_local_rank(self, mesh_dim: "int | str | None" = None) -> int:
        dim = 0 if mesh_dim is None else self._get_mesh_dim_by_name(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim
        return self.get_coordinate()[dim]


def device_mesh_of(comms: _C.MeshComm, device_type: str) -> DeviceMesh:
    """The DeviceMesh of a MeshComm, one for all of the same ranks and axes. It does not communicate."""
    meshes = _known.setdefault(comms.world, {})
    if comms.mesh in meshes:
        return meshes[comms.mesh]
    every, number = comms.axes(), next(_number)
    axes = [axis for name in ("dp_replicate", "dp_shard") for axis in every if axis[0] == name]
    ranks = torch.arange(comms.size).view([size for _, size in every])
    order = [every.index(axis) for axis in axes]
    ranks = ranks.permute([*order, *(dim for dim in range(len(every)) if dim not in order)]).reshape([size for _, size in axes])
    mesh = CommMesh(
        device_type, ranks, mesh_dim_names=tuple(name for name, _ in axes), _init_backend=False, _rank=comms.rank
    )
    mesh._thread_id = number  # makes it unequal to those of other ranks, by which DTensor caches for all threads
    mesh._dim_group_names = []
    for name, _ in axes:
        group, of_axis = CommGroup(comms.along(name)), f"shardproof/{number}/{name}"
        c10d._register_process_group(of_axis, group)
        weakref.finalize(mesh, c10d._unregister_process_group, of_axis)
        mesh._pg_registry[of_axis] = group
        mesh._dim_group_names.append(of_axis)
    meshes[comms.mesh] = mesh
    return mesh
