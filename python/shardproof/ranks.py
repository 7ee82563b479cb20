"""Ranks: threads of this process, processes of a torch.distributed process group, or processes of an MPI job."""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _C
from .interruptible import Interruptible

Comm = _C.Comm
MeshComm = _C.MeshComm


class seeded(TorchDispatchMode):
    """Within, torch draws what it draws after ``torch.manual_seed(seed)``, on this thread alone.

    Ranks that are threads share torch's own generator: what one of them seeds, another may have drawn from before it draws
    itself.

    Examples
    --------
    >>> def body(comm):
    ...     with shardproof.seeded(0):
    ...         model, data = Net(), torch.randn(8, 4)
    """

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.generators: "dict[torch.device, torch.Generator]" = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        first = next((each for each in args if isinstance(each, torch.Tensor)), None)
        device = torch.device(kwargs.get("device") or ("cpu" if first is None else first.device))
        if device.type == "meta":
            return func(*args, **kwargs)
        return _taking_generator(func)(*args, **{**kwargs, "generator": self.generator(device)})

    def generator(self, device: torch.device) -> torch.Generator:
        known = self.generators.get(device)
        if known is None:
            known = self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return known


def _taking_generator(func: Any) -> Any:
    """The overload of an operator that takes a generator beside what this one takes."""

    def names(overload: Any) -> "list[str]":
        return [argument.name for argument in overload._schema.arguments]

    own = [name for name in names(func) if name != "generator"]
    for overload in (func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())):
        if "generator" in names(overload) and [name for name in names(overload) if name != "generator"] == own:
            return overload
    raise _C.Error(
        f"[seeded] {func} takes no generator, so ranks that are threads would share its numbers. Within seeded, draw by an "
        "operator that takes one, such as torch.rand"
    )


def use_cuda() -> None:
    """Give this process the arithmetic of CUDA. `fully_shard` calls it for models on a GPU."""
    try:
        from . import _cuda
    except ImportError as error:
        raise _C.Error(
            f"[cuda] the CUDA part of shardproof cannot be opened: {error}. Install torch with CUDA, or use the CPU"
        ) from error
    _cuda.use_cuda()


def usable_device(device: Union[torch.device, str]) -> torch.device:
    """A device by its type and index, ready for use. Of a GPU without an index, the current one."""
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return chosen
    use_cuda()
    return chosen if chosen.index is not None else torch.device("cuda", torch.cuda.current_device())


def run_threads(
    ranks: int,
    body: Callable[[Comm], Any],
    *,
    schedule: str = "parallel",
    completion: str = "eager",
    sum: str = "rank_order",
    seed: int = 0,
    device: Union[torch.device, str, None] = None,
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
    device : torch.device or str, optional
        A GPU that all ranks share, each with a stream of its own. Needed where models are on a GPU.

    Returns
    -------
    list
        What the body returned on each rank.

    Raises
    ------
    Exception
        What the first rank to fail raised, with a note that names the rank. All other ranks end, too.
    KeyboardInterrupt
        Of the caller's thread, after every rank got it and has ended. A second interrupt does not wait for them. The same holds
        for whatever else the handler of a signal raises there.
    """
    gpu = None if device is None else usable_device(device)
    interruptible = Interruptible()
    outcome: dict = {}
    threads_within = torch.get_num_threads()

    def ranks_body(comm):
        with interruptible.part():
            return body(comm)

    def run():
        if torch.get_num_threads() != threads_within:  # the number belongs to a thread, and this one takes the caller's
            torch.set_num_threads(threads_within)
        try:
            outcome["results"] = _C.run_threads(ranks, ranks_body, schedule, completion, sum, seed, gpu)
        except BaseException as error:  # noqa: B036  handed to the caller's thread
            outcome["error"] = error

    interruptible.run(run, name="shardproof.run_threads")
    if "error" in outcome:
        error = outcome.pop("error")
        try:
            raise error
        finally:
            del error
    return outcome["results"]


def run_mpi(
    body: Callable[[Comm], Any],
    *,
    timeout_seconds: float = 300.0,
    flight_directory: str = "",
) -> Any:
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


def _timeout_of(group: "torch.distributed.ProcessGroup") -> Any:
    from torch.distributed import distributed_c10d

    backend = group._get_backend(group._device_types[0])
    options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)
    known = getattr(options, "_timeout", None)
    return known or distributed_c10d._get_default_timeout(torch.distributed.Backend(backend.name()))


def _group_within(
    parent: "torch.distributed.ProcessGroup", ranks: "list[int]", backends: str, name: str, number: str = "0"
) -> Any:
    """A group of some ranks of `parent`, by their numbers in the job, that has its timeout; one for each name and ranks.

    `torch.distributed.new_group` with `use_local_synchronization` names a group by the number of groups that a process is in.
    Where ranks are in different numbers of groups they wait for each other until a timeout. Here only those ranks call, and
    they have agreed on the name and the number. A group stays registered until destroy_process_group, with its connections and
    threads, so models that are sharded one after the other share it.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    registered, of_all = distributed_c10d._world, dist.group.WORLD
    name = f"shardproof/{parent.group_name}/{name}/{ranks}"
    for made, known in registered.pg_names.items():
        if known.rpartition("/")[0] == name:
            return made
    bound, of_all.bound_device_id = of_all.bound_device_id, None  # else every rank of the job would have to take part
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backends),
            registered.pg_map[parent][1],
            f"{name}/{number}",
            timeout=_timeout_of(parent),
            group_desc=name,
        )
    except RuntimeError as error:
        raise _C.Error(
            f"[comm] rank {dist.get_rank()} cannot make a process group of ranks {ranks} for '{name}': {error}. Gloo "
            "connects to the address that a host's own name has, which may be 127.0.1.1: set GLOO_SOCKET_IFNAME on each "
            "host to the network interface by which it reaches the others"
        ) from error
    finally:
        of_all.bound_device_id = bound
    registered.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def _backends_of(group: "torch.distributed.ProcessGroup") -> "dict[str, str]":
    """By type of device; with Gloo for the CPU where the group has nothing for it, since ranks agree by tensors of the CPU."""
    import torch.distributed as dist

    config = dist.distributed_c10d.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    return {"cpu": "gloo", **config.get_device_backend_map()}


def _with_cpu(group: "torch.distributed.ProcessGroup") -> "torch.distributed.ProcessGroup":
    """The group itself, or one of the same backends and a Gloo of our own for tensors of the CPU."""
    import torch.distributed as dist

    cpu = torch.device("cpu")
    if cpu in group._device_types:
        return group
    beside = _group_within(group, dist.get_process_group_ranks(group), "gloo", "cpu")
    both = dist.ProcessGroup(dist.distributed_c10d._world.pg_map[group][1], group.rank(), group.size())
    for device, name in _backends_of(group).items():
        owner = beside if device == "cpu" else group
        both._register_backend(
            torch.device(device), dist.Backend.backend_type_map[name], owner._get_backend(torch.device(device))
        )
    both._set_default_backend(dist.Backend.backend_type_map[name])
    return both


def comm_of(
    group: Optional["torch.distributed.ProcessGroup"] = None, *, native: bool = False, make_groups: Optional[bool] = None
) -> Comm:
    """Make a communicator of a process group of torch.distributed. All ranks of the group call it.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; without one, the default group. Where it takes no tensors of the CPU, as that of
        ``init_process_group("nccl")``, it gets a Gloo beside it, by which ranks agree on sizes and names.
    native : bool
        Leave sums to the process group, in its own order. Otherwise they are taken in rank order, and have the bits of
        ranks that are threads.
    make_groups : bool, optional
        Whether ranks along an axis of a mesh get a process group of their own, on the same backends and with the same timeout.
        Without one they send messages with tags through the given group. Only Gloo and MPI have tags, so by default groups are
        made where another backend takes part. An axis that has all ranks takes the given group.
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
    whole, backends, members = _with_cpu(group), _backends_of(group), dist.get_process_group_ranks(group)

    def make(ranks: "list[int]", name: str) -> "torch.distributed.ProcessGroup":
        if ranks == list(range(len(members))):
            return whole
        of, _, number = name.rpartition(".")
        text = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        return _group_within(group, [members[rank] for rank in ranks], text, of, number)

    makes = not {"gloo", "mpi"}.issuperset(backends.values()) if make_groups is None else make_groups
    return _C.comm_of(whole, native, make if makes else None)


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
