"""Ranks: threads of this process, processes of a torch.distributed process group, or processes of an MPI job."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable, Optional, Union

import torch

from . import _C

Comm = _C.Comm
MeshComm = _C.MeshComm


def run_threads(
    ranks: int,
    body: Callable[[Comm], Any],
    *,
    schedule: str = "parallel",
    completion: str = "eager",
    sum: str = "rank_order",
    seed: int = 0,
) -> list:
    """Run ``body(comm)`` on every rank, each a thread of this process.

    Parameters
    ----------
    ranks : int
        How many ranks there are.
    body : callable
        What a rank does. Its argument is the rank's communicator.
    schedule : {"parallel", "serial"}
        Whether ranks run freely, or one at a time in an order that ``seed`` chooses, so that a run repeats exactly.
    completion : {"eager", "late", "random"}
        When a collective takes effect. Under ``late`` and ``random`` its output holds garbage until it is waited for.
    sum : {"rank_order", "ring"}
        The order in which collectives add.
    seed : int
        Chooses the order of ranks and of completions.

    Returns
    -------
    list
        What the body returned on each rank.

    Raises
    ------
    Exception
        What the first rank to fail raised, with a note that names the rank. All other ranks end, too.
    """
    identities: set = set()

    def registered(comm):
        identity = threading.get_ident()
        identities.add(identity)
        try:
            return body(comm)
        finally:
            identities.discard(identity)

    outcome: dict = {}

    def run():
        try:
            outcome["results"] = _C.run_threads(ranks, registered, schedule, completion, sum, seed)
        except BaseException as error:  # noqa: B036  handed to the caller's thread
            outcome["error"] = error

    # The caller's thread only waits, so that it can hear an interrupt. The number of threads within an operator belongs to a
    # thread, and the new one takes the caller's.
    threads_within = torch.get_num_threads()

    def run_like_the_caller():
        if torch.get_num_threads() != threads_within:
            torch.set_num_threads(threads_within)
        run()

    thread = threading.Thread(target=run_like_the_caller, name="shardproof.run_threads", daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        for identity in list(identities):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(identity), ctypes.py_object(KeyboardInterrupt))
        thread.join()
        raise
    if "error" in outcome:
        error = outcome.pop("error")
        try:
            raise error
        finally:
            del error
    return outcome["results"]


def run_mpi(body: Callable[[Comm], Any], *, timeout_seconds: float = 300.0, flight_directory: str = "") -> Any:
    """Run ``body(comm)`` on every process of an MPI job, which ``mpirun -n N python script.py`` starts.

    Parameters
    ----------
    body : callable
        What a rank does.
    timeout_seconds : float
        A rank that others wait for, or that gives no sign of life, for longer than this ends the job.
    flight_directory : str
        Where each rank writes its last calls when something ends the job.

    Returns
    -------
    object
        What the body returned on this rank.
    """
    try:
        from . import _mpi
    except ImportError as error:
        raise _C.Error(
            f"[mpi] this build of shardproof has no MPI, or MPI's library is not found: {error}. Install Open MPI "
            "and build the package again, or start the ranks with torchrun"
        ) from error
    return _mpi.run_mpi(body, timeout_seconds, flight_directory)


def comm_of(group: Optional["torch.distributed.ProcessGroup"] = None, *, native: bool = False) -> Comm:
    """Make a communicator of a process group of torch.distributed.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; without one, the default group.
    native : bool
        Leave sums to the process group, in its own order. Otherwise they are taken in rank order, and have the bits of
        ranks that are threads.
    """
    import torch.distributed as dist

    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise _C.Error(
                "[comm] there is no process group. Start the script with torchrun and call "
                "torch.distributed.init_process_group first, or run the ranks as threads: "
                "shardproof.run_threads(ranks, body), and pass the body's argument as comm"
            )
        group = dist.group.WORLD
    return _C.comm_of(group, native)


_default_comms: "dict[int, tuple]" = {}


def default_comm() -> Comm:
    """The communicator of the default process group, the same one in every call."""
    import torch.distributed as dist

    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    known = _default_comms.get(id(group)) if group is not None else None
    if known is None:
        known = (group, comm_of(group))
        _default_comms.clear()
        _default_comms[id(group)] = known
    return known[1]


def as_comm(comm: Union[Comm, "torch.distributed.ProcessGroup", None]) -> Comm:
    """A communicator, from one, from a process group, or from the default process group."""
    if isinstance(comm, Comm):
        return comm
    return default_comm() if comm is None else comm_of(comm)


def mesh_text(mesh: Any, ranks: int) -> str:
    """A mesh as "axis=size,...": from such a text, a dict, a DeviceMesh of torch.distributed, or None."""
    if mesh is None:
        return f"dp_shard={ranks}"
    if isinstance(mesh, str):
        return mesh
    if isinstance(mesh, dict):
        return ",".join(f"{name}={size}" for name, size in mesh.items())
    sizes = list(getattr(mesh, "mesh", torch.empty(())).shape)
    if not sizes:
        raise _C.Error(f"[mesh] expected a text such as 'dp_shard=2,tp=2', a dict or a DeviceMesh, got {mesh!r}")
    names = mesh.mesh_dim_names or (("dp_shard",) if len(sizes) == 1 else ("dp_replicate", "dp_shard"))
    if len(names) != len(sizes):
        raise _C.Error(
            f"[mesh] a DeviceMesh of {len(sizes)} dimensions needs names: init_device_mesh(..., "
            "mesh_dim_names=('dp_shard', 'tp'))"
        )
    shard = {"dp", "fsdp", "shard", "data"}
    names = ["dp_shard" if name in shard else "dp_replicate" if name in ("replicate", "ddp") else name for name in names]
    if len(names) == 1 and names[0] not in ("dp_replicate", "dp_shard", "cp", "tp"):
        names = ["dp_shard"]  # as FSDP2 shards over a mesh of one dimension, whatever its name
    size = 1
    for each in sizes:
        size *= each
    if size != ranks:
        raise _C.Error(
            f"[mesh] the mesh {mesh} has {size} ranks and the communicator has {ranks}. Give the whole mesh, and "
            "not a part of it, or a communicator of the ranks of the part"
        )
    return ",".join(f"{name}={size}" for name, size in zip(names, sizes))


def mesh_comm(comm: Any, mesh: Any) -> MeshComm:
    """Communicators of a mesh: ``comm`` may be a MeshComm already, a Comm, a process group, or None."""
    if isinstance(comm, MeshComm):
        if mesh is not None and mesh_text(mesh, comm.size) != comm.mesh:
            raise _C.Error(f"[mesh] comm is of mesh '{comm.mesh}', and mesh says '{mesh_text(mesh, comm.size)}'")
        return comm
    if isinstance(mesh, MeshComm):
        return mesh
    if comm is None and getattr(mesh, "ndim", 0) == 1 and hasattr(mesh, "get_group"):
        comm = mesh.get_group()  # of a part of a larger mesh, too
    world = as_comm(comm)
    return MeshComm(world, mesh_text(mesh, world.size))
