"""Parameters between uses: DTensors that are cut along dim 0, as FSDP2 has them, in the place of whole parameters.

`fully_shard` of `shardproof.fsdp` puts them into a module at once, and the first forward gives the engine their values. From
then on they are views of the engine's main parameters. While a unit runs, or a backward, the module has the whole parameters,
with which it computes. What a backward leaves is in `.grad`, so whatever PyTorch does with parameters, gradients and optimizers
it does with these. What was written to them is brought to all ranks at the next forward.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Callable, Iterable, Iterator, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import _C
from .optim import numbers_of
from .ranks import default_comm, mesh_comm
from .torch_state import TorchState


@dataclasses.dataclass(frozen=True)
class Cut:
    """How parameters lie over ranks: the last dimension of the mesh cuts them, one before it has replicas."""

    mesh: Any  # a DeviceMesh
    rank: int
    ranks: int


def cut_of(mesh: Any, device: str) -> Cut:
    """The cut on a mesh: a DeviceMesh, a MeshComm, a text, or None for all ranks of the default process group."""
    if isinstance(mesh, str):
        mesh = mesh_comm(None, mesh)
    if isinstance(mesh, _C.MeshComm):
        others = [name for name, size in mesh.axes() if name not in ("dp_replicate", "dp_shard") and size > 1]
        if others:
            raise _C.Error(
                f"[fsdp] the mesh {mesh.mesh} has the axis {others[0]}: shards are DTensors over dp_replicate and dp_shard. "
                "Use shardproof.fully_shard for other meshes"
            )
        from .comm_mesh import device_mesh_of  # pylint: disable=import-outside-toplevel

        mesh = device_mesh_of(mesh, device)
    elif mesh is None:
        from torch.distributed.device_mesh import init_device_mesh  # pylint: disable=import-outside-toplevel

        if not torch.distributed.is_initialized():
            default_comm()  # says what to do
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    if not 1 <= mesh.ndim <= 2:
        raise _C.Error(f"[fsdp] a mesh has one dimension, or two, (replicate, shard), got {mesh}")
    return Cut(mesh, mesh.get_coordinate()[-1], mesh.shape[-1])


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
        rows_first = _local(given).detach().movedim(dim, 0)
        rows, self.shape = rows_first.shape[0], rows_first.shape  # as the engine has it
        each = -(-rows // cut.ranks)
        self.begin, self.end = min(cut.rank * each, rows), min((cut.rank + 1) * each, rows)
        own = rows_first[self.begin : self.end].clone(memory_format=torch.contiguous_format)
        shard = DTensor(self._turned(own), _spec_of(given, cut, dim), requires_grad=False)
        self.shard = nn.Parameter(shard, given.requires_grad)
        self.shard._shardproof_parameter = self
        self.whole = nn.Parameter(torch.empty(self.shape, dtype=given.dtype, device="meta"), given.requires_grad)
        self.turned: Optional[torch.Tensor] = None  # the whole one's memory, with dims in the module's order
        for tensor in (self.shard, self.whole):
            tensor.__dict__.update({key: value for key, value in vars(given).items() if key not in vars(tensor)})
        given._shardproof_shard = self.shard  # for who has the parameter already, such as an optimizer
        self.view: Optional[torch.Tensor] = None  # of the engine's main parameter
        self.sharded: Callable = lambda: None  # the model's Sharded, once there is one

    def take(self, shard: nn.Parameter) -> None:
        """Another DTensor is the shard from now on. Optimizers that have the old one get it at their next step."""
        vars(shard).update({key: value for key, value in vars(self.shard).items() if key not in vars(shard)})
        if shard.grad is None:
            shard.grad = self.shard.grad
        self.shard._shardproof_shard = shard
        self.shard = shard

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
        """Give it what a backward has made, and tell those who wait for it."""
        local = self.as_local(flat)
        if self.shard.grad is None:
            self.shard.grad = DTensor(local, self.shard._spec, requires_grad=False)
        elif self.shard.grad.placements == self.shard.placements:
            self.shard.grad._local_tensor.add_(local)
        else:
            self.shard.grad.add_(DTensor(local, self.shard._spec, requires_grad=False))
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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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


class Places:
    """Where the modules of a unit have its parameters. They are whole between `enter` and `leave`, or while `held`."""

    def __init__(
        self,
        module: nn.Module,
        cut: Cut,
        is_unit: "Callable[[nn.Module], bool]",
        ignored: "Iterable[nn.Parameter]" = (),
        dim_of: "Callable[[nn.Parameter], int]" = lambda parameter: 0,
    ):
        """Cuts the parameters below the module that are below no other unit, and puts the shards into their places."""
        spared = {id(parameter) for parameter in ignored}
        self.entries: "list[tuple[dict, str, Parameter]]" = []
        self.depth = 0
        self.held = False
        self.used: "dict[int, torch.Tensor]" = {}  # what the module has in the place of shards
        for name, part in _own_modules(module, is_unit):
            for key, given in part._parameters.items():
                if given is None or id(given) in spared:
                    continue
                known = getattr(shard_of(given), "_shardproof_parameter", None)
                parameter = known or Parameter(given, f"{name}.{key}" if name else key, cut, dim_of(given))
                self.entries.append((part._parameters, key, parameter))
        self._put(whole=False)

    def _put(self, whole: bool, plainly: bool = False) -> None:
        """`plainly`: what the engine computes with, not what modules do."""
        used: "dict[int, torch.Tensor]" = {}
        for items, key, parameter in self.entries:
            now = items.get(key)
            if not whole:
                if id(now) in self.used or shard_of(now) is parameter.shard:
                    items[key] = parameter.shard
            elif now is parameter.shard:  # functional_call lends others
                if parameter.whole.requires_grad != now.requires_grad:
                    parameter.whole.requires_grad_(now.requires_grad)
                if id(parameter) not in used:
                    used[id(parameter)] = parameter.whole if plainly else parameter.used()
                items[key] = used[id(parameter)]
        if whole:
            self.used.update({id(tensor): tensor for tensor in used.values()})
        else:
            self.used.clear()

    def make_wholes(self) -> None:
        """What is to be computed with, in the dtype that the shards have by now."""
        for _, _, parameter in self.entries:
            if parameter.whole.dtype != parameter.local.dtype:
                kept = vars(parameter.whole)
                whole = torch.empty(parameter.shape, dtype=parameter.local.dtype, device="meta")
                parameter.whole = nn.Parameter(whole, parameter.whole.requires_grad)
                vars(parameter.whole).update(kept)

    def enter(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self._put(whole=True)

    def leave(self) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth == 0:
            self.held = False
            self._put(whole=False)

    def hold(self, held: bool, plainly: bool = False) -> None:
        """Whole from now on, until `leave` or until this is taken back."""
        self.held = held
        if self.depth == 0:
            self._put(whole=held, plainly=plainly)

    @torch.no_grad()
    def adopt(self) -> bool:
        """Takes DTensors that were assigned in the place of shards for these, and says whether there were any."""
        adopted = False
        for items, key, parameter in self.entries:
            now = items.get(key)
            if now is parameter.shard or id(now) in self.used or not isinstance(now, DTensor):
                continue
            if shard_of(now) is parameter.shard:  # another place of one that was made anew
                items[key] = parameter.shard
                continue
            if now.shape != parameter.shape or now.placements != parameter.shard.placements:
                raise _C.Error(
                    f"[fsdp] parameter {key} was replaced by a DTensor of shape {tuple(now.shape)} and placements "
                    f"{now.placements}, and is cut as {parameter.shard.placements}, of shape {tuple(parameter.shape)}"
                )
            parameter.take(now)
            adopted = True
        return adopted


def _own_modules(module: nn.Module, is_unit: "Callable[[nn.Module], bool]") -> "Iterator[tuple[str, nn.Module]]":
    seen, waiting = {id(module)}, [("", module)]
    while waiting:
        name, part = waiting.pop(0)
        yield name, part
        for key, child in part.named_children():
            if id(child) not in seen and not is_unit(child):
                seen.add(id(child))
                waiting.append((f"{name}.{key}" if name else key, child))


class Shards:
    """The shards of a model, from its first forward on.

    Parameters
    ----------
    sharded : Sharded
        The model.
    places : dict of int to Places
        By the id of each module of a unit.
    """

    def __init__(self, sharded: Any, places: "dict[int, Places]"):
        self.sharded = weakref.ref(sharded)
        self.places = places
        named = sharded.module.named_parameters(remove_duplicate=False)
        by_whole = {id(p.whole): p for each in places.values() for _, _, p in each.entries}
        self.by_name = {name: by_whole[id(value)] for name, value in named if id(value) in by_whole}
        self.every = list(by_whole.values())
        self.in_backward = False
        self.done: "list[str]" = []  # optimizers' steps since the last forward
        self.event: Any = None  # the next forward waits for it
        self.follows = True  # the model computes with what the shards have
        views = {piece.name: piece.data for piece in sharded.main_parameters()}
        for name, parameter in self.by_name.items():
            if name in views and views[name].numel() != parameter.local.numel():
                raise _C.Error(
                    f"[fsdp] the optimizer's memory of {name} has {views[name].numel()} elements on this rank, and its shard "
                    f"{parameter.local.numel()}: the strategy does not cut over dp_shard alone. Leave strategy out, or use "
                    "shardproof.fully_shard"
                )
            if name in views or parameter.view is None:
                parameter.view = parameter.as_local(views.get(name))
        for parameter in self.every:
            if parameter.view.dtype != parameter.local.dtype:
                raise _C.Error(
                    f"[fsdp] shards are what the optimizer updates, in {parameter.local.dtype}, and Precision asks for "
                    f"{parameter.view.dtype}. Leave main out, and cast the model before fully_shard"
                )
            parameter.shard._local_tensor = parameter.view
            parameter.sharded = weakref.ref(sharded)
        told = weakref.WeakMethod(self._told)
        sharded.native.watch_backwards(lambda begins: told()(begins))
        for each in places.values():
            each.hold(False)

    def tensors(self) -> "list[torch.Tensor]":
        return [parameter.shard for parameter in self.every]

    def places_of(self, module: nn.Module) -> "Iterator[Places]":
        """Those of a module that is a unit."""
        if id(module) in self.places:
            yield self.places[id(module)]

    @torch.no_grad()
    def begin_forward(self) -> bool:
        """Before a forward: whether the model has to follow what was written to shards since."""
        self.end_lost_backward()
        if self.event is not None:
            self.event.wait()
            self.event = None
        for places in self.places.values():
            self.follows &= not places.adopt()
        for parameter in self.every:
            if parameter.local is not parameter.view:  # a cast or a move of the module
                if parameter.local.dtype != parameter.view.dtype or parameter.local.device != parameter.view.device:
                    raise _C.Error(
                        f"[fsdp] a parameter was moved or cast from {parameter.view.dtype} on {parameter.view.device} to "
                        f"{parameter.local.dtype} on {parameter.local.device} after the model ran first. Do it before"
                    )
                parameter.view.copy_(parameter.local)
                parameter.shard._local_tensor = parameter.view
                self.follows = False
        follows, self.follows = self.follows, True
        return not follows

    def _told(self, begins: bool) -> None:
        if begins:
            self.end_lost_backward()
            self.in_backward = True
            for places in self.places.values():
                places.enter()
            return
        self._end_backward()
        used, pieces = self.sharded()._engine.hand_over_gradients()
        local = {piece.name: piece.data for piece in pieces}
        with torch.no_grad():
            for name in used:
                self.by_name[name].add_gradient(local.get(name))
        self.follows &= not used  # an optimizer may write without autograd's knowing

    def _end_backward(self) -> None:
        self.in_backward = False
        for places in self.places.values():
            places.leave()

    def end_lost_backward(self) -> None:
        """After a backward that an exception has ended: the module has its shards again."""
        if self.in_backward and torch._C._current_graph_task_id() < 0:
            self._end_backward()

    def state_of(self, optimizer: torch.optim.Optimizer) -> TorchState:
        """The state of an optimizer of shards, to be saved or loaded."""
        return HeldShards(self.sharded(), optimizer).state(optimizer)

    def require_as_in_engine(self) -> None:
        """Refuses what knows parameters by their names and shapes, which it would give or take wrong."""
        for name, parameter in self.by_name.items():
            if not parameter.is_as_in_engine:
                raise _C.Error(
                    f"[fsdp] parameter {name} is cut as {parameter.shard.placements}, and methods of Sharded, checkpoints and "
                    "averages of this library know rows only. Use torch.distributed.checkpoint, and full_tensor() of parameters"
                )

    def restore(self) -> None:
        """Put the whole parameters back for good."""
        for places in self.places.values():
            places.hold(True, plainly=True)
            places.entries = []


class HeldShards:
    """What an optimizer of torch.optim has of a model's shards, as `TorchState` asks for it."""

    def __init__(self, sharded: Any, optimizer: torch.optim.Optimizer):
        shards_of(optimizer)
        self.sharded = sharded
        names = {id(parameter.shard): name for name, parameter in reversed(sharded.shards.by_name.items())}
        plain = {id(value): name for name, value in reversed(list(sharded.module.named_parameters())) if id(value) not in names}
        self.groups: "list[list[str]]" = []
        self.plain: "dict[str, nn.Parameter]" = {}
        self.pieces: "list[tuple[str, int, nn.Parameter]]" = []
        for group in optimizer.param_groups:
            self.groups.append([])
            for value in group["params"]:
                name = names.get(id(value)) or plain.get(id(value))
                if name is None:
                    raise _C.Error(
                        f"[checkpoint] rank {sharded.rank}: {type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(value.shape)} that is not one of the model's, so its state has no name to be saved by"
                    )
                self.groups[-1].append(name)
                if id(value) in plain:
                    self.plain[name] = value
                elif value._local_tensor.numel():
                    self.pieces.append((name, 0, value))

    def state(self, optimizer: torch.optim.Optimizer) -> TorchState:
        return TorchState(optimizer, type(optimizer), {}, self, self.groups, self.plain)


def shards_of(optimizer: torch.optim.Optimizer) -> "Iterable[Any]":
    """The models whose shards an optimizer has. Whole parameters that it was given before give way to their shards."""
    models = {}
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            shard = shard_of(parameter)
            if shard is not parameter:
                if isinstance(parameter, DTensor) and parameter in optimizer.state:
                    optimizer.state[shard] = optimizer.state.pop(parameter)
                elif parameter in optimizer.state:
                    raise _C.Error(
                        f"[fsdp] {type(optimizer).__name__} has made steps on a model before fully_shard, and its state would "
                        "not follow. Make the optimizer after fully_shard, or load its state then"
                    )
                group["params"][i] = shard
            known = vars(shard).get("_shardproof_parameter")
            if known is not None and (sharded := known.sharded()) is not None:
                models[id(sharded)] = sharded
    return list(models.values())


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for sharded in shards_of(optimizer):
        sharded.main_parameters_will_change()


def _end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for sharded in shards_of(optimizer):
        sharded.shards.follows = False
        sharded.shards.done.append(" | ".join([type(optimizer).__name__, *map(numbers_of, optimizer.param_groups)]))


register_optimizer_step_pre_hook(_begin_step)
register_optimizer_step_post_hook(_end_step)
