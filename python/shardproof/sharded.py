"""A sharded model, which `fully_shard` makes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import weakref
from typing import Any, Iterable, Iterator, Optional

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _C
from .module_state import with_tensors
from .torch_private import outside_transforms, uncompiled
from .units import UnitHooks

Piece = _C.Piece
UnitHandle = _C.UnitHandle


class Sharded:
    """A model whose parameters, gradients and optimizer state are spread over ranks. `fully_shard` makes it.

    Call it as the model. The model's hooks hold it, so it lives as long as the model, or until `remove`.

    Attributes
    ----------
    module : torch.nn.Module
        The model.
    comms : MeshComm
        The communicators of the mesh.
    """

    def __init__(
        self,
        module: nn.Module,
        native: _C.Sharded,
        mirror: _C.Mirror,
        units: list,
        inner: "list[nn.Module]",
        plain: "list[nn.Parameter]",
    ):
        self.module = module
        self._native = native
        self._stepped: "Optional[tuple]" = None  # the optimizer of torch.optim that made the last step, and the steps since
        self._ignored = {id(parameter) for parameter in plain}
        for name, parameter in module.named_parameters():
            if id(parameter) not in self._ignored:
                parameter._shardproof_owner = weakref.ref(self)
                parameter.register_post_accumulate_grad_hook = functools.partial(refuse_hook, name)
        names = {id(each): name for name, each in module.named_modules()}
        # A module within a recomputed one is not recomputed by itself.
        recomputed = [each for each in inner if _C.UnitCall(mirror, each).is_unit]
        modules = dict.fromkeys(itertools.chain([module], *[unit.modules for unit in units], recomputed))
        self._hooks = [UnitHooks(mirror, each, names.get(id(each), "") or "the model") for each in modules]
        self._hooks.append(module.register_forward_pre_hook(self._begin_forward, prepend=True))
        self._of_optimizer: "list[nn.Parameter]" = []  # what an optimizer of torch.optim writes to, and anybody else who may
        self._version = 0
        self.shards: Any = None  # Shards, where parameters are DTensors between uses
        module.__dict__["_shardproof_sharded"] = self
        module.__dict__["zero_grad"] = self._zero_grad_of_module

    def follow_shards(self, shards: Any) -> None:
        """Compute with what DTensors hold (`shards.Shards`), which are the module's parameters between uses."""
        self.shards = shards
        for hooks in self._hooks:
            if isinstance(hooks, UnitHooks) and (places := shards.places.get(id(hooks.module))) is not None:
                hooks.put_shards_back(places, None if hooks.module is self.module else shards.enter_unit)
        self.main_parameters_changed()

    def _zero_grad_of_module(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those that are accumulated in shards."""
        if self.shards is not None:
            self.shards.end_lost_backward()
        self.zero_gradients()
        type(self.module).zero_grad(self.module, set_to_none)

    def _versions(self) -> int:
        return sum(each._version for each in (self._of_optimizer if self.shards is None else self.shards.tensors()))

    def _publish(self) -> None:
        """Bring parameters up to date where somebody wrote to the optimizer's tensors since. Collective where that is so."""
        lags = self.shards is not None and self.shards.lag()
        if not lags and self._version == self._versions():
            return
        if self.shards is not None and self.shards.done:
            self._engine.end_updated_step("; ".join(self.shards.done))
            self.shards.done.clear()
            self._note_published()
        else:
            self.main_parameters_changed()
        if self.shards is not None:
            self.shards.forget_forwards()

    @uncompiled
    def _begin_forward(self, *_: Any) -> None:
        with outside_transforms():
            self._publish()
        if self.shards is not None:
            self.shards.open_forwards += torch.is_grad_enabled()

    def _note_published(self) -> None:
        """Take note that the library itself has brought the parameters up to date."""
        self._version = self._versions()

    def enter_root(self, args: tuple, kwargs: dict) -> "tuple[tuple, dict]":
        """What the first hook of the model does; for a forward that began before the model was sharded."""
        if self.shards is not None:
            self.shards.open_forwards += torch.is_grad_enabled()
        return self._hooks[0].enter(self.module, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def native(self) -> _C.Sharded:
        """The library's own object, whose parameters are those of the module by name and shape."""
        if self.shards is not None:
            self.shards.require_as_in_engine()
        return self._engine

    @property
    def _engine(self) -> _C.Sharded:
        """The same, of a model that has the parameters that it was sharded with."""
        self._alive().require_same_parameters()
        return self._alive()

    def _alive(self) -> _C.Sharded:
        if self._native is None:
            raise _C.Error("[fully_shard] this model was taken apart by remove(). Call fully_shard again")
        return self._native

    @property
    def comms(self) -> _C.MeshComm:
        return self._engine.comms

    @property
    def step(self) -> int:
        """Steps taken so far, skipped ones included."""
        return self._engine.step

    @property
    def rank(self) -> int:
        """The rank in the mesh."""
        return self._engine.rank

    def set_last_microbatch(self, last: bool) -> None:
        """Say whether the next backward is the last one before the optimizer's step; True at first."""
        self._engine.set_last_microbatch(last)

    def microbatches(self, batches: Iterable) -> Iterator:
        """Go through the microbatches of a step, and call `set_last_microbatch` before each.

        Examples
        --------
        >>> for batch in sharded.microbatches(batches):
        ...     (loss(sharded, batch) / len(batches)).backward()
        """
        iterator = iter(batches)
        try:
            current = next(iterator)
        except StopIteration:
            return
        for following in iterator:
            self.set_last_microbatch(False)
            yield current
            current = following
        self.set_last_microbatch(True)
        yield current

    def set_gradient_sync(self, sync: bool) -> None:
        """While False, backwards add to gradients on this rank and reduce nothing. The last one of a step must be True."""
        self._engine.set_gradient_sync(sync)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within reduce nothing, as DDP's ``no_sync``."""
        before = self._engine.gradient_sync
        self._engine.set_gradient_sync(False)
        try:
            yield
        finally:
            self._engine.set_gradient_sync(before)

    def add_tokens(self, tokens: int) -> None:
        """Add to the number of tokens that this rank's backwards of this step cover; needed with ``divide_by_tokens``.

        Call it before the last of these backwards.
        """
        self.native.add_tokens(tokens)

    def zero_gradients(self) -> None:
        """Forget accumulated gradients, and what a backward left that ended in an exception."""
        self._engine.zero_gradients()

    def gradient_norm(self, order: float = 2) -> float:
        """The norm of the whole gradient, each element counted once. Collective; after the last backward."""
        return self.native.gradient_norm(order)

    def clip_gradients(self, norm_max: float, order: float = 2) -> float:
        """Scale gradients so that their norm is at most ``norm_max``, and return the norm before. Collective.

        Parameters
        ----------
        norm_max : float
            The largest norm.
        order : float
            1, 2 or infinity.
        """
        return self.native.clip_gradients(norm_max, order)

    def divide_gradients(self, divisor: float) -> None:
        """Divide gradients, after the last backward."""
        self.native.divide_gradients(divisor)

    def gradients_are_finite(self) -> bool:
        """Whether no gradient on any rank is NaN or infinite. Collective."""
        return self.native.gradients_are_finite()

    def skip_step(self) -> None:
        """End a step without an update."""
        self.native.skip_step()

    def parameters(self) -> "list[Piece]":
        """What this rank holds of the parameters between steps, in the dtype of computation.

        Copies, where only main parameters are kept: under zero3 and hsdp, if their dtype is another one.
        """
        return self.native.parameters()

    def main_parameters(self) -> "list[Piece]":
        """What this rank holds of the parameters that the optimizer updates: live memory.

        Call `main_parameters_will_change` before and `main_parameters_changed` after writing to it.
        """
        return self.native.main_parameters()

    def gradients(self) -> "list[Piece]":
        """What this rank holds of the final gradients, after the last backward."""
        return self.native.gradients()

    def main_parameters_will_change(self) -> None:
        """Wait until nothing reads what you are going to write.

        That is a save under way (`copy_in_background`), and with ``gather="side_by_side"`` the other ranks. Collective over
        the mesh then; otherwise it does not communicate. Raises an error while averages are in the place of the parameters.
        """
        self._engine.main_parameters_will_change()

    def main_parameters_changed(self) -> None:
        """Bring the parameters up to date after the main ones were written to. Collective."""
        self._engine.main_parameters_changed()
        self._note_published()

    @torch.no_grad()
    def gather(self) -> "dict[str, torch.Tensor]":
        """Whole parameters by name, on every rank, in the dtype in which units compute. Collective."""
        self._publish()
        return dict(self.native.gather_parameters())

    def gather_main_parameters(self) -> "dict[str, torch.Tensor]":
        """Whole main parameters by name, on every rank, in the main dtype. Collective."""
        return self.native.gather_main_parameters()

    def gather_gradients(self) -> "dict[str, torch.Tensor]":
        """Whole gradients by name, on every rank, after the last backward. Collective."""
        return self.native.gather_gradients()

    def gather_main_parameter(self, name: str) -> torch.Tensor:
        """One whole main parameter, by any of its names. Collective; every rank passes the same name."""
        return self.native.gather_main_parameter(name)

    def gather_gradient(self, name: str) -> torch.Tensor:
        """One whole gradient, after the last backward. Collective; every rank passes the same name."""
        return self.native.gather_gradient(name)

    def write_parameters(self, values: "dict[str, torch.Tensor]") -> None:
        """Write whole values into the parameters, by name. Collective; every rank passes the same values.

        Each rank keeps its part, rounded to the main dtype. What has no value keeps the one that it has, and optimizer
        state stays as it is. A name or shape that does not fit is an error on every rank, before anything is written.
        """
        self.native.write_parameters({name: value.detach() for name, value in values.items()})
        self._note_published()

    def write_gradients(self, values: "dict[str, torch.Tensor]") -> None:
        """The same for the final gradients, after the last backward. Collective."""
        self.native.write_gradients({name: value.detach() for name, value in values.items()})

    @torch.no_grad()
    def state_dict(self) -> "dict[str, Any]":
        """What ``module.state_dict()`` of the plain model would be: whole parameters and buffers, on every rank. Collective.

        Parameters are in the dtype in which units compute; `save` keeps the main ones. Buffers and parameters that are not
        sharded are this rank's own; `save` keeps those of rank 0.
        """
        whole = self.gather()

        def copy(kind: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
            return nn.Parameter(whole[name], tensor.requires_grad) if name in whole else tensor.detach().clone()

        with with_tensors(self.module, copy):
            return self.module.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state: "dict[str, Any]", strict: bool = True) -> Any:
        """Take the values of a plain model's state dict. Collective; every rank passes the same values.

        The code of the modules themselves loads it, into whole main parameters that lie beside the shards meanwhile.

        Parameters
        ----------
        state : dict
            Whole parameters and buffers by name.
        strict : bool
            Whether names must be exactly the model's.

        Returns
        -------
        NamedTuple
            "missing_keys" and "unexpected_keys", as of ``torch.nn.Module.load_state_dict``.
        """
        rank, whole = self.rank, self.native.gather_main_parameters()
        named = list(self.module.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in named if name in whole}

        def copy(kind: str, name: str, tensor: torch.Tensor) -> "Optional[torch.Tensor]":
            if id(tensor) in first:
                name = first[id(tensor)]
                whole[name] = nn.Parameter(whole[name], tensor.requires_grad)
                return whole[name]
            return tensor.clone() if kind == "_buffers" else None

        with with_tensors(self.module, copy) as replaced:
            try:
                keys = self.module.load_state_dict(state, strict)
            except RuntimeError as error:
                raise _C.Error(f"[load_state_dict] rank {rank}: {error}. Pass strict=False to load what fits") from error
        self.write_parameters({name: value for name, value in whole.items() if value.is_floating_point() or name in state})
        for items, key, old, new in replaced:
            if items.get(key) is old and id(old) not in first:
                old.copy_(new)
        return keys

    def unit(self, name: str) -> UnitHandle:
        """The unit of this name; "" is the root. Gathers and frees it by hand, and changes its options."""
        return self._engine.unit(name)

    def units(self) -> "list[UnitHandle]":
        """All units, the root first."""
        return [self._engine.unit(name) for name in self._engine.unit_names()]

    def memory(self) -> "dict[str, tuple[int, int]]":
        """Bytes that this rank holds, now and at most since `reset_peak_memory`, by what they are for."""
        return self._engine.memory()[0]

    def host_memory(self) -> "dict[str, tuple[int, int]]":
        """The same of what ``offload`` and ``offload_activations`` moved to the host's memory."""
        return self._engine.memory()[1]

    def reset_peak_memory(self) -> None:
        """Count the largest use of memory anew."""
        self._engine.reset_peak_memory()

    def describe(self) -> str:
        """One line for each unit: its parameters, buckets and bytes on this rank."""
        return self._engine.describe()

    def remove(self) -> nn.Module:
        """Turn the model back into a plain one with whole parameters, and return it. Collective."""
        self._publish()
        whole = dict(self._alive().gather_parameters())
        if self.shards is not None:
            self.shards.restore()
        for name in self._let_go():
            self.module.get_parameter(name).data = whole[name]
        return self.module

    def _let_go(self) -> "list[str]":
        """End the engine on this rank, and return the names of the parameters that it had. What they hold stays as it is."""
        for hooks in self._hooks:
            hooks.remove()
        self._native = None
        for name in ("_shardproof_sharded", "zero_grad"):
            self.module.__dict__.pop(name, None)
        named = self.module.named_parameters(remove_duplicate=False)
        names = [name for name, parameter in named if owner_of(parameter) is self]  # others were assigned since
        for name in names:
            for key in ("_shardproof_owner", "register_post_accumulate_grad_hook"):
                self.module.get_parameter(name).__dict__.pop(key, None)
        return names


def sharded_of(module: nn.Module) -> Optional[Sharded]:
    """The Sharded of a model, None when it is plain."""
    return module.__dict__.get("_shardproof_sharded")


def owner_of(parameter: torch.Tensor) -> Optional[Sharded]:
    """The Sharded that a parameter is spread by, None of a plain one."""
    reference = getattr(parameter, "_shardproof_owner", None)
    return reference() if reference is not None else None


def refuse_hook(name: str, hook: Any = None) -> None:
    """Refuse what would take the place of the library's own hook, of which a tensor has one."""
    raise _C.Error(
        f"[fully_shard] register_post_accumulate_grad_hook of parameter {name} would take its gradient from the library. Sums "
        "over ranks are there after the last backward. Use register_step_pre_hook of the optimizer, or register_hook of the "
        "parameter, which gets the gradient of this rank"
    )


def _refuse_whole_parameters(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer that was given the model's own parameters would find no gradient in them, and train nothing."""
    for group in optimizer.param_groups:
        if any(owner is not None and owner() is not None for owner in _C.attributes_of(group["params"], "_shardproof_owner")):
            raise _C.Error(
                f"[optimizer] {type(optimizer).__name__} was given parameters of a sharded model, which have their "
                "gradients in shards, so it would train nothing. Make it by shardproof.torch_optimizer("
                f"torch.optim.{type(optimizer).__name__}, sharded, ...)"
            )


register_optimizer_step_pre_hook(_refuse_whole_parameters)


def _refuse_to_clip_whole_parameters(name: str) -> None:
    """Make a clipping function of torch.nn.utils refuse parameters of a sharded model. It would find no gradient.

    What it wraps is changed inside of it, because a program may have imported the function before this package.
    """
    function = getattr(torch.nn.utils, name)
    inside = dict(zip(function.__code__.co_freevars, function.__closure__ or ())).get("func")
    if inside is None:  # another version of PyTorch, which wraps it in another way
        return
    clip = inside.cell_contents

    @functools.wraps(clip)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        parameters = parameters if isinstance(parameters, (torch.Tensor, types.GeneratorType)) else given
        if any(owner_of(parameter) is not None for parameter in given):
            raise _C.Error(
                f"[clip] torch.nn.utils.{name} was given parameters of a sharded model, which have their gradients in shards, "
                "so it would clip nothing. Call sharded.clip_gradients(norm_max) on every rank"
            )
        if isinstance(parameters, types.GeneratorType):  # PyTorch warns of an empty one
            parameters = (parameter for parameter in given)
        return clip(parameters, *args, **kwargs)

    inside.cell_contents = checked


for _name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
    _refuse_to_clip_whole_parameters(_name)
