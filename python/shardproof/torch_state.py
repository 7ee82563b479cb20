"""State of an optimizer of torch.optim on shards, on its way into a checkpoint and out of it.

Such an optimizer holds a tensor for each piece of a parameter, and numbers such as its count of steps. A checkpoint has one
tensor for each parameter, and each number once, by the names that FSDP2 gives them.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable

import torch
from torch import nn

from . import _C
from .torch_private import local_of

# How a step is computed, and not what: an optimizer keeps its own, whoever saved the checkpoint.
_OF_THE_MACHINE = {"foreach", "fused", "capturable", "differentiable"}


class TorchState:
    """What is known of an optimizer that `torch_optimizer` made, or that has shards of a model (`shards.py`).

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer.
    kind : type
        Its class in torch.optim.
    settings : dict
        What it was made with.
    shards : ShardParameters
        The pieces that it updates.
    groups : list of list of str
        Names of parameters, by group, the same on every rank.
    plain : dict
        Parameters of the groups that are not sharded, by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type,
        settings: dict,
        shards: Any,
        groups: "list[list[str]]",
        plain: "dict[str, nn.Parameter]",
    ):
        self.optimizer = optimizer
        self.kind = kind
        self.settings = settings
        self.sharded = shards.sharded
        self.pieces: "dict[str, list[nn.Parameter]]" = {name: [parameter] for name, parameter in plain.items()}
        for name, found in itertools.groupby(shards.pieces, lambda piece: piece[0]):
            self.pieces[name] = [parameter for _, _, parameter in found]
        self.groups = groups
        self.plain = plain

    def for_save(self) -> _C.ForeignOptimizer:
        """The state of all ranks. Collective."""
        foreign = self._foreign([([], []) for _ in self.groups])
        try:
            self._require_state_of_parameters()
            for name in itertools.chain(*self.groups):
                if name in self.pieces:
                    foreign.hold(name, *self._joined(name, self.pieces[name]))
        except _C.Error as error:
            foreign.fail(str(error))
        foreign.share()
        return foreign

    def for_load(self) -> _C.ForeignOptimizer:
        """What a load is to fill."""
        names = []
        for group, of_group in zip(self.optimizer.param_groups, self.groups):
            state = self._after_a_step(group, of_group)
            names.append(([n for n in state if not _is_number(state[n])], [n for n in state if _is_number(state[n])]))
        return self._foreign(names)

    def take(self, loaded: _C.ForeignOptimizer) -> None:
        """Put into the optimizer what was loaded."""
        for group, names in zip(self.optimizer.param_groups, self.groups):
            model = self._after_a_step(group, names)
            for name in filter(loaded.is_restored, names):
                tensors, scalars = loaded.state(name)
                numbers = {what: (value, model[what]) for what, value in scalars.items()}
                at = 0
                for parameter in self.pieces.get(name, []):
                    end = at + local_of(parameter).numel()
                    state: "dict[str, Any]" = {what: _number_as(*number) for what, number in numbers.items()}
                    state.update({what: _like(parameter, whole[at:end]) for what, whole in tensors.items()})
                    self.optimizer.state.pop(parameter, None)
                    if state:
                        self.optimizer.state[parameter] = state
                    at = end
        for index, saved in loaded.loaded_settings().items():
            group = self.optimizer.param_groups[index]
            for name in set(saved) & set(group) - _OF_THE_MACHINE:
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(saved[name])
                else:
                    group[name] = tuple(saved[name]) if isinstance(saved[name], list) else saved[name]
            # Schedulers leave it here, on one side or on both. Of one that this process used before, nothing stays.
            group.pop("initial_lr", None)
            group.update({name: saved[name] for name in ("initial_lr",) if name in saved})

    def _foreign(self, names: "list[tuple[list, list]]") -> _C.ForeignOptimizer:
        groups = [
            (of_group, *known, _settings_of(group))
            for of_group, known, group in zip(self.groups, names, self.optimizer.param_groups)
        ]
        return _C.ForeignOptimizer(self.sharded.native, groups, {name: p.detach() for name, p in self.plain.items()})

    def _joined(self, name: str, pieces: "list[nn.Parameter]") -> "tuple[dict, dict]":
        """The tensors of a parameter's state that this rank has, each in one piece, and its numbers."""
        states = [self.optimizer.state.get(piece, {}) for piece in pieces]
        tensors, scalars = {}, {}
        for what, first in states[0].items():
            if first is None:
                continue
            values = [state.get(what) for state in states]
            if _is_number(first):
                scalars[what] = torch.as_tensor(first).detach().cpu()
                continue
            for piece, value in zip(pieces, values):
                if not isinstance(value, torch.Tensor) or value.shape != piece.shape:
                    raise _C.Error(
                        f"[checkpoint] rank {self.sharded.rank}: the state '{what}' that {self.kind.__name__} keeps of {name} "
                        "has neither one value for each element of the parameter nor one number, so it cannot be saved"
                    )
            flat = [local_of(value.detach()).contiguous().view(-1) for value in values]
            tensors[what] = flat[0] if len(flat) == 1 else torch.cat(flat)
        return tensors, scalars

    def _require_state_of_parameters(self) -> None:
        beside = [f"state[{key!r}]" for key in self.optimizer.state if not isinstance(key, torch.Tensor)]
        if self.kind.state_dict is not torch.optim.Optimizer.state_dict:
            beside += sorted(set(self.optimizer.state_dict()) - {"state", "param_groups", "shards"})
        if beside:
            raise _C.Error(
                f"[checkpoint] rank {self.sharded.rank}: {self.kind.__name__} keeps {', '.join(beside)} beside the state of "
                "parameters, which a checkpoint does not take. Keep it in param_groups, or in the state of each parameter"
            )

    def _after_a_step(self, group: dict, names: "list[str]") -> dict:
        """What the optimizer holds of a parameter of this group after one step: of a small one with as many dims."""
        dims = self.sharded.module.get_parameter(names[0]).dim() if names else 1
        like = next((piece for pieces in self.pieces.values() for piece in pieces), torch.empty(0))
        parameter = nn.Parameter(torch.zeros([2] * max(1, dims), dtype=like.dtype, device=like.device))
        parameter.grad = torch.zeros_like(parameter)
        settings = {name: _copied(value) for name, value in group.items() if name != "params"}
        alone = self.kind([{**settings, "params": [parameter]}], **self.settings)
        with torch.no_grad():
            bare_step(self.kind)(alone)
        return {name: value for name, value in alone.state[parameter].items() if value is not None}


_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def bare_step(kind: type) -> Callable:
    """A class's step without the hooks, which torch puts around it for good when it makes the first instance."""
    step = kind.step
    while getattr(step, "__code__", None) is _HOOKED_STEP:
        step = step.__wrapped__
    return step


def _like(parameter: nn.Parameter, flat: torch.Tensor) -> torch.Tensor:
    values = flat.view(local_of(parameter).shape)
    return type(parameter)(values, parameter._spec, requires_grad=False) if hasattr(parameter, "_local_tensor") else values


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _number_as(value: torch.Tensor, model: Any) -> Any:
    if isinstance(model, torch.Tensor):
        return value.to(dtype=model.dtype, device=model.device, copy=True)
    return type(model)(value.item())


def _settings_of(group: dict) -> dict:
    settings = {}
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            value = value.item()
        settings[name] = tuple(map(float, value)) if isinstance(value, (tuple, list)) else value
    return settings
