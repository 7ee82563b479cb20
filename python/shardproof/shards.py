"""Parameters between uses: DTensors that are cut along one dim, as FSDP2 has them, in the place of whole parameters.

`fully_shard` of `shardproof.fsdp` puts them into a module at once, and the first forward gives the engine their values. From
then on they are views of the engine's main parameters. While a unit runs, or a backward, the module has the whole parameters,
with which it computes. What a backward leaves is in `.grad`, so whatever PyTorch does with parameters, gradients and optimizers
it does with these. What was written to them is brought to all ranks at the next forward.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable, Iterator, Optional

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import _C
from .optim import numbers_of
from .shard_parameter import Cut, Parameter, shard_of
from .torch_state import TorchState


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
        self.sums: Optional[torch.dtype] = None  # in which gradients of several backwards are added
        self.adds = False  # whether some wait for the next one
        for name, part in _own_modules(module, is_unit):
            for key, given in part._parameters.items():
                if given is None or id(given) in spared:
                    continue
                known = getattr(shard_of(given), "_shardproof_parameter", None)
                parameter = known or Parameter(given, f"{name}.{key}" if name else key, cut, dim_of(given))
                self.entries.append((part._parameters, key, parameter))
        self._put(whole=False)
        for _, _, parameter in self.entries:
            parameter.retire_given()

    def _put(self, whole: bool, plainly: bool = False, has_memory: bool = True) -> None:
        """`plainly`: what the engine computes with, not what modules do. Without memory what has had none yet stays a shard."""
        used: "dict[int, torch.Tensor]" = {}
        for items, key, parameter in self.entries:
            now = items.get(key)
            if not whole:
                if id(now) in self.used or shard_of(now) is parameter.shard:
                    items[key] = parameter.shard
            # functional_call lends others
            elif now is parameter.shard and (plainly or has_memory or not parameter.is_unused()):
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
            parameter.mark()
            if parameter.whole.dtype != parameter.local.dtype or not parameter.whole.is_meta:
                kept = vars(parameter.whole)
                parameter.whole = parameter.new_whole(parameter.local.dtype, parameter.whole.requires_grad)
                vars(parameter.whole).update(kept)

    def begin_backward(self, reduces: bool) -> None:
        """Says in which dtypes gradients come: the first term of a sum on this rank has the digits of the sum, as FSDP2's."""
        as_made, self.adds = reduces or self.adds, not reduces
        for _, _, parameter in self.entries:
            parameter.set_gradient_dtype(None if as_made else self.sums or parameter.local.dtype)

    def enter(self, has_memory: bool = True) -> None:
        self.depth += 1
        if self.depth == 1 or has_memory:
            self._put(whole=True, has_memory=has_memory)

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
        present = {id(items.get(key)) for items, key, _ in self.entries}
        for items, key, parameter in self.entries:
            now = items.get(key)
            if now is parameter.shard or id(now) in self.used or not isinstance(now, DTensor):
                continue
            if shard_of(now) is parameter.shard and id(parameter.shard) in present:  # a place of a tied one
                items[key] = parameter.shard
                continue
            other = vars(now).get("_shardproof_parameter", parameter)
            if not isinstance(now, nn.Parameter) or other.sharded() not in (None, parameter.sharded()):
                raise _C.Error(
                    f"[fsdp] parameter {parameter.name} was lent a DTensor, as by functional_call, or the shard of another "
                    "model. Lend whole values, as full_tensor() gives them, and assign values by copy_ or load_state_dict"
                )
            if now.shape != parameter.shard.shape or now.placements != parameter.shard.placements:
                raise _C.Error(
                    f"[fsdp] parameter {key} was replaced by a DTensor of shape {tuple(now.shape)} and placements "
                    f"{now.placements}, and is cut as {parameter.shard.placements}, of shape {tuple(parameter.shard.shape)}"
                )
            parameter.take(now)
            present.add(id(now))
            adopted = True
        return adopted


def dims_of(places: "dict[int, Places]") -> "Callable[[str, nn.Parameter], int]":
    """Along which dims the engine is to cut the whole parameters."""
    dims = {id(parameter.whole): parameter.dim for each in places.values() for _, _, parameter in each.entries}
    return lambda name, whole: dims[id(whole)]


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
        of_units = {unit.name: unit for unit in sharded.units()}
        modules = [(name, module) for name, module in sharded.module.named_modules() if name in of_units]
        self.adding = [(of_units[name], places[id(module)]) for name, module in modules if id(module) in places]
        self.in_backward = False
        self.done: "list[str]" = []  # optimizers' steps since the last forward
        self.event: Any = None  # the next forward waits for it
        self.follows = True  # the model computes with what the shards have, as far as is known
        self.open_forwards = 0  # of the model, whose backward may still come
        self.open_outside = False  # whether one of a unit alone may, as of a head that a loss calls by parts of its input
        self.keeps_graph = False  # the backward under way
        self.awaits_weights = False  # backwards that keep their graphs gave no parameter a gradient, and none has since
        views = {name: data for name, _, _, data in sharded.native.main_shards()}
        sizes = {name: views[name].numel() if name in views else 0 for name in self.first_names(sharded)}
        differ = [name for name, numel in sizes.items() if numel != self.by_name[name].local.numel()]
        others = [name for name, view in views.items() if view.dtype != self.by_name[name].local.dtype]
        found = torch.tensor([len(differ), len(others)])
        resized, recast = sharded.comms.world.all_reduce(found, "max").tolist()
        if resized > 0:
            raise _C.Error(
                f"[fsdp] shards of {resized} parameters on some rank have other sizes than the optimizer's memory: the "
                "strategy does not cut over dp_shard alone. Leave strategy out, or use shardproof.fully_shard"
            )
        if recast > 0:
            raise _C.Error(
                "[fsdp] shards are what the optimizer updates, in the dtype that the model has, and main of Precision asks for "
                "another one. Leave main out, and cast the model before fully_shard"
            )
        for name, parameter in self.by_name.items():
            if name in views or parameter.view is None:
                parameter.view = parameter.as_local(views.get(name))
        for parameter in self.every:
            # Who has a view of the shard from before sees what is trained. An assigned one may have another model's memory.
            if not parameter.is_assigned and _C.share_memory(parameter.local.detach(), parameter.view):
                parameter.view = parameter.local
            else:
                parameter.shard._local_tensor = parameter.view
            parameter.sharded = weakref.ref(sharded)
        told = weakref.WeakMethod(self._told)
        sharded.native.watch_backwards(lambda begins: told()(begins))
        for each in places.values():
            each.hold(False)

    def first_names(self, sharded: Any) -> "list[str]":
        return [name for name, _ in sharded.module.named_parameters() if name in self.by_name]

    def tensors(self) -> "list[torch.Tensor]":
        return [parameter.shard for parameter in self.every]

    def places_of(self, module: nn.Module) -> "Iterator[Places]":
        """Those of a module that is a unit."""
        if id(module) in self.places:
            yield self.places[id(module)]

    def adopt(self) -> None:
        """Take DTensors that were assigned in the place of shards."""
        for places in self.places.values():
            self.follows &= not places.adopt()

    @torch.no_grad()
    def lag(self) -> bool:
        """Whether the model has to be brought to what was written to shards since, or may have been."""
        self.end_lost_backward()
        if self.event is not None:
            self.event.wait()
            self.event = None
        self.adopt()
        for parameter in self.every:
            parameter.mark()
            if parameter.local is not parameter.view:  # a cast or a move of the module
                if parameter.local.dtype != parameter.view.dtype or parameter.local.device != parameter.view.device:
                    raise _C.Error(
                        f"[fsdp] a parameter was moved or cast from {parameter.view.dtype} on {parameter.view.device} to "
                        f"{parameter.local.dtype} on {parameter.local.device} after the model ran first. Do it before"
                    )
                parameter.view.copy_(parameter.local)
                parameter.shard._local_tensor = parameter.view
                self.follows = False
        # Writes of foreach kernels and through .data are counted nowhere. So values are taken anew wherever no backward may
        # need the parameters as they were. Every rank finds the same, as all run the same forwards and backwards.
        lags = not self.follows or not (self.open_forwards or self.open_outside)
        self.follows = True
        return lags

    def _told(self, begins: bool) -> None:
        if begins:
            if self.in_backward:  # of one that an exception has ended
                self._end_backward()
            self.in_backward = True
            self.keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            for unit, places in self.adding:
                places.begin_backward(unit.gradient_sync)
            for places in self.places.values():
                places.enter(has_memory=False)
            return
        kept_graph = self.keeps_graph
        self._end_backward()
        used, local = self.sharded()._engine.hand_over_gradients()
        if kept_graph and used:
            self._end_forward()
        self.awaits_weights = not used and (self.awaits_weights or kept_graph)
        with torch.no_grad():
            given = {name: self.by_name[name].through_hooks(local.get(name)) for name in used}
            for name, gradient in given.items():
                self.by_name[name].add_gradient(gradient)
            for name in used:  # once all are there, since a hook may raise
                self.by_name[name].tell_hooks()

    def _end_backward(self) -> None:
        self.in_backward = False
        if self.keeps_graph:  # a backward for the weights of the same forward may come
            self.keeps_graph = False
        else:
            self._end_forward()
        for places in self.places.values():
            places.leave()

    def _end_forward(self) -> None:
        if self.open_outside:
            self.open_outside = False
        else:
            self.open_forwards = max(0, self.open_forwards - 1)

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
                    "averages of this library know cuts over data parallelism only. Use torch.distributed.checkpoint, and "
                    "full_tensor() of parameters"
                )

    def publish_outside(self) -> None:
        """Before a unit is entered or gathered that is not within the model's forward, and where nothing is kept gathered."""
        if not self.in_backward and not any(places.depth or places.held for places in self.places.values()):
            self.sharded()._publish()

    def enter_unit(self) -> None:
        """Before the forward of a unit that is not the root."""
        self.publish_outside()
        if not self.in_backward and not any(places.depth for places in self.places.values()):
            self.open_outside |= torch.is_grad_enabled()

    def forget_forwards(self) -> None:
        """No backward needs parameters as they were."""
        self.open_forwards, self.open_outside = 0, False

    def reset(self) -> None:
        """After whatever has ended a forward or backward: modules have their shards."""
        self.in_backward = False
        self.forget_forwards()
        for places in self.places.values():
            places.depth = 0
            places.hold(False)

    def restore(self) -> None:
        """Put the whole parameters and the modules' classes back for good."""
        for places in self.places.values():
            places.hold(True, plainly=True)
            places.entries = []
        for module in self.sharded().module.modules():
            plain = vars(type(module)).get("_shardproof_plain")
            if plain is not None and id(module) in self.places:
                module.__class__ = plain


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


def shards_of(optimizer: torch.optim.Optimizer) -> "list[Any]":
    """The models whose shards an optimizer has. Whole parameters that it was given before give way to their shards."""
    models = {}
    for group in optimizer.param_groups:
        if _C.attributes_of(group["params"], "_shardproof_shard"):
            _take_shards(optimizer, group["params"])
        last = None
        for known in _C.attributes_of(group["params"], "_shardproof_parameter"):
            if known.sharded is not last:
                last = known.sharded
                if (sharded := last()) is not None:
                    models[id(sharded)] = sharded
    return list(models.values())


def _take_shards(optimizer: torch.optim.Optimizer, params: "list[torch.Tensor]") -> None:
    replaced = [parameter for parameter in params if "_shardproof_shard" in vars(parameter)]
    known = {each.sharded for each in _C.attributes_of(replaced, "_shardproof_parameter")}
    for sharded in filter(None, (reference() for reference in known)):
        sharded.shards.adopt()  # what a functional_call has lent may have been given back since
    for i, parameter in enumerate(params):
        if "_shardproof_shard" in vars(parameter):
            shard = shard_of(parameter)
            if isinstance(parameter, DTensor) and parameter in optimizer.state:
                optimizer.state[shard] = optimizer.state.pop(parameter)
            elif parameter in optimizer.state:
                raise _C.Error(
                    f"[fsdp] {type(optimizer).__name__} has made steps on a model before fully_shard, and its state would "
                    "not follow. Make the optimizer after fully_shard, or load its state then"
                )
            params[i] = shard


def _require_weights(optimizer: torch.optim.Optimizer, models: "list[Any]") -> None:
    """Refuses a step that would train nothing, since gradients of weights have gone where no shard is."""
    waiting = [sharded.rank for sharded in models if sharded.shards.awaits_weights]
    if waiting and all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        raise _C.Error(
            f"[fsdp] rank {waiting[0]}: {type(optimizer).__name__} steps, and none of its parameters has a gradient, though a "
            "backward has kept its graph since the last one that gave any. Run backward() for the weights behind it, without "
            "inputs=, because parameters are whole within forwards and backwards only. A PipelineStage whose schedule makes "
            "gradients of weights later takes dw_builder=lambda: lambda: None. Leave out a step that is to do nothing"
        )


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    models = shards_of(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # whose forward may make a model's engine
    vars(optimizer)["_shardproof_models"] = list(map(weakref.ref, models)) if closure is None else None
    _require_weights(optimizer, models)
    for sharded in models:
        sharded.main_parameters_will_change()


def _end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # To look for them takes as long as a small update. A step that calls another class's step ends twice.
    known = vars(optimizer).pop("_shardproof_models", None)
    for sharded in shards_of(optimizer) if known is None else filter(None, (model() for model in known)):
        sharded.shards.follows = False
        sharded.shards.done.append(" | ".join([type(optimizer).__name__, *map(numbers_of, optimizer.param_groups)]))


register_optimizer_step_pre_hook(_begin_step)
register_optimizer_step_post_hook(_end_step)
