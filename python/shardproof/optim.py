"""Optimizers on the shards that a rank holds: the library's own, and any of torch.optim that updates element by element."""

from __future__ import annotations

import itertools
import math
import weakref
import zlib
from typing import Any, Callable, Iterable, Optional, Union

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from . import _C
from .sharded import Sharded
from .torch_state import TorchState, bare_step

warmup_cosine = _C.warmup_cosine
warmup_linear = _C.warmup_linear
warmup_stable_decay = _C.warmup_stable_decay
warmup_constant = _C.warmup_constant
warmup_inverse_sqrt = _C.warmup_inverse_sqrt


class Optimizer:
    """One of the library's optimizers. Made by `sgd`, `adam`, `adamw`, `lion` and `muon`."""

    def __init__(self, sharded: Sharded, groups: list):
        if sharded.shards is not None:
            raise _C.Error(
                "[optimizer] after shardproof.fsdp.fully_shard gradients are in the .grad of parameters, where the library's "
                "own optimizers do not look. Give the parameters to one of torch.optim, or shard by shardproof.fully_shard"
            )
        self.sharded = sharded
        self.native = _C.make_optimizer(sharded.native, groups)

    def step(self) -> None:
        """Update the shards, bring the parameters up to date, and forget the gradients. Collective."""
        self.native.step()
        self.sharded._note_published()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were accumulated. `step` does it as well."""
        self.sharded.zero_gradients()

    def set_lr_factor(self, factor: float) -> None:
        """Multiply every learning rate from the next step on, e.g. by `warmup_cosine` or another schedule."""
        self.native.set_lr_factor(factor)

    def state_names(self) -> "list[str]":
        """Names of the state tensors, e.g. "exp_avg"."""
        return self.native.state_names()

    def state(self, name: str) -> "list[_C.Piece]":
        """What this rank holds of one state tensor."""
        return self.native.state(name)

    def gather_state(self, name: str) -> "dict[str, torch.Tensor]":
        """One whole state tensor of each parameter that has it, on every rank. Collective."""
        return self.native.gather_state(name)

    def gather_state_of(self, name: str, parameter: str) -> torch.Tensor:
        """One whole state tensor of one parameter. Collective; every rank passes the same names."""
        return self.native.gather_state_of(name, parameter)

    def write_state(self, name: str, values: "dict[str, torch.Tensor]") -> None:
        """Write whole values into one state tensor, by the parameter's name. Collective; every rank passes the same values."""
        self.native.write_state(name, {parameter: value.detach() for parameter, value in values.items()})

    def updates(self, parameter: str) -> int:
        """How often the parameter was updated."""
        return self.native.updates(parameter)

    def groups(self) -> "list[dict]":
        """Settings, parameters and state names of each group, as of now."""
        return self.native.groups()


Groups = Union["list[dict]", None]


def _takes(selector: Union[str, Callable, None]) -> Optional[Callable]:
    if isinstance(selector, str):
        return lambda name, shape: _C.name_matches(selector, name)
    return selector


def _is_spared(name: str, shape: "list[int]") -> bool:
    return len(shape) < 2 or "norm" in name or "ln_" in name


def _groups(rule: str, settings: dict, groups: Groups, decay_norms_and_biases: bool) -> list:
    settings = {name: float(value) for name, value in settings.items()}
    result = []
    for group in groups or []:
        unknown = set(group) - {"takes", "lr_factor", "decay_factor"}
        if unknown:
            raise _C.Error(f"[optimizer] a group has takes, lr_factor and decay_factor, got {sorted(unknown)}")
        result.append((_takes(group["takes"]), rule, settings, group.get("lr_factor", 1.0), group.get("decay_factor", 1.0)))
    if not decay_norms_and_biases:
        result.append((_is_spared, rule, settings, 1.0, 0.0))
    return [*result, (None, rule, settings, 1.0, 1.0)]


def sgd(
    sharded: Sharded,
    lr: float = 0.1,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    *,
    groups: Groups = None,
    decay_norms_and_biases: bool = True,
) -> Optimizer:
    """Stochastic gradient descent, as torch.optim.SGD with dampening 0.

    Parameters
    ----------
    sharded : Sharded
        The model.
    lr, momentum, nesterov, weight_decay
        As in torch.optim.SGD.
    groups : list of dict, optional
        Parameters with other rates: each has ``takes`` (a pattern of names, or ``f(name, shape) -> bool``), and ``lr_factor``
        or ``decay_factor``. The first group that takes a parameter counts.
    decay_norms_and_biases : bool
        Whether parameters of fewer than two dimensions, and of norms, decay.
    """
    settings = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    return Optimizer(sharded, _groups("sgd", settings, groups, decay_norms_and_biases))


def adam(
    sharded: Sharded,
    lr: float = 1e-3,
    betas: "tuple[float, float]" = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    groups: Groups = None,
    decay_norms_and_biases: bool = True,
) -> Optimizer:
    """Adam, as torch.optim.Adam up to rounding.

    Parameters
    ----------
    sharded, groups, decay_norms_and_biases
        As of `sgd`.
    lr, betas, eps, weight_decay
        As in torch.optim.Adam.
    """
    settings = dict(lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
    return Optimizer(sharded, _groups("adam", settings, groups, decay_norms_and_biases))


def adamw(
    sharded: Sharded,
    lr: float = 1e-3,
    betas: "tuple[float, float]" = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    groups: Groups = None,
    decay_norms_and_biases: bool = True,
) -> Optimizer:
    """AdamW, as torch.optim.AdamW up to rounding.

    Parameters
    ----------
    sharded, groups, decay_norms_and_biases
        As of `sgd`.
    lr, betas, eps, weight_decay
        As in torch.optim.AdamW.
    """
    settings = dict(lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
    return Optimizer(sharded, _groups("adamw", settings, groups, decay_norms_and_biases))


def lion(
    sharded: Sharded,
    lr: float = 1e-4,
    betas: "tuple[float, float]" = (0.9, 0.99),
    weight_decay: float = 0.0,
    *,
    groups: Groups = None,
    decay_norms_and_biases: bool = True,
) -> Optimizer:
    """Lion.

    Parameters
    ----------
    sharded, groups, decay_norms_and_biases
        As of `sgd`.
    lr, betas, weight_decay
        The rate, the two factors of momentum, and decoupled decay.
    """
    settings = dict(lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)
    return Optimizer(sharded, _groups("lion", settings, groups, decay_norms_and_biases))


def muon(
    sharded: Sharded, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0, *, others: Optional[dict] = None
) -> Optimizer:
    """Muon for matrices, and AdamW for all else. Needs ``granularity="tensor"``.

    Parameters
    ----------
    sharded : Sharded
        The model.
    lr, momentum, weight_decay : float
        Of matrices.
    others : dict, optional
        Settings of AdamW, as of `adamw`.
    """
    rest = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, **(others or {})}
    beta1, beta2 = rest.pop("betas")
    matrices = {"lr": float(lr), "momentum": float(momentum), "weight_decay": float(weight_decay)}
    return Optimizer(
        sharded,
        [
            (lambda name, shape: len(shape) == 2 and 0 not in shape, "muon", matrices, 1.0, 1.0),
            (None, "adamw", {**rest, "beta1": beta1, "beta2": beta2}, 1.0, 1.0),
        ],
    )


class LossScaler(_C.LossScaler):
    """Dynamic loss scaling for float16. Use it with ``check_gradients=False``.

    Examples
    --------
    >>> scaler.scale(loss).backward()
    >>> if scaler.unscale(sharded):
    ...     sharded.clip_gradients(1.0)
    ...     optimizer.step()
    """

    def unscale(self, sharded: Sharded) -> bool:
        """Divide gradients by the scale; or, where one is not finite, skip the step, lower the scale and return False."""
        return self._unscale(sharded.native)


class ShardParameters:
    """The elements of a model's parameters that this rank updates, as parameters for torch.optim."""

    def __init__(self, sharded: Sharded):
        self.sharded = sharded
        self.pieces: "list[tuple[str, int, nn.Parameter]]" = []
        for name, shape, begin, data in sharded.native.main_shards():
            is_whole = data.numel() == math.prod(shape)
            parameter = nn.Parameter(data.view(shape or (1,)) if is_whole else data, requires_grad=True)
            self.pieces.append((name, begin, parameter))

    def of(self, names: Iterable[str]) -> "list[nn.Parameter]":
        wanted = set(names)
        return [parameter for name, _, parameter in self.pieces if name in wanted]

    def take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = self.sharded.native.gradient_shards()
        trained = {name for name, value in self.sharded.module.named_parameters() if value.requires_grad}
        for name, _, parameter in self.pieces:
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.view(parameter.shape)
            if gradient is None and name in trained:
                last = self.sharded._stepped
                if last is not None and last[0]() not in (None, optimizer) and last[1] == self.sharded.step:
                    raise _C.Error(
                        f"[optimizer] rank {self.sharded.rank}: the step of {type(last[0]()).__name__} has ended the step "
                        f"of the whole model, and {type(optimizer).__name__} is another optimizer of it. Make one optimizer of "
                        "all parameters that train, with a group for each part: [{'params': a.parameters()}, {'params': ...}]"
                    )
                raise _C.Error(
                    f"[optimizer] rank {self.sharded.rank}, step {self.sharded.step + 1}: parameter {name} has no gradient. "
                    "Run the last backward of the step with set_last_microbatch(True) and set_gradient_sync(True) "
                    "before optimizer.step(), which takes the gradients of all parameters: a model has one optimizer"
                )

    def drop_gradients(self) -> None:
        for _, _, parameter in self.pieces:
            parameter.grad = None


# What an optimizer is tried on: small tensors, one that it may factor, one of a convolution.
_TRIED = (((4, 3), (3, 2)), ((130, 129), (3, 2)), ((3, 2, 2, 2), (3, 2)))


def _updates_alike(kind: type, settings: dict, group: Optional[dict], flat: bool, sizes: tuple, like: torch.Tensor) -> bool:
    """Whether a trial updates two tensors alike together and each alone; with `flat`, in flat pieces, as those of ranks."""
    generator = torch.Generator().manual_seed(0)

    def drawn(scale: float) -> "list[torch.Tensor]":
        return [(scale * torch.randn(size, dtype=torch.float64, generator=generator)).to(like) for size in sizes]

    values, gradients = drawn(1), [drawn(scale) for scale in (1, 1000, 1, 0.001, 1, 1)]

    def changes(chosen: "Callable[[list[torch.Tensor]], list[torch.Tensor]]") -> torch.Tensor:
        parameters = [nn.Parameter(each.clone()) for each in chosen(values)]
        optimizer = kind(parameters if group is None else [{**group, "params": parameters}], **settings)
        for made in optimizer.param_groups:
            if "lr" in made and not made["lr"]:  # a schedule is to set it
                made["lr"] = made["lr"] + 1.0
        for each in gradients:
            for parameter, gradient in zip(parameters, chosen(each)):
                parameter.grad = gradient.clone()
            bare_step(kind)(optimizer)
        return torch.cat([(new - old).flatten() for new, old in zip(parameters, chosen(values))])

    pieces = [lambda t: [t[0].flatten()[:5]], lambda t: [t[0].flatten()[5:]], lambda t: [t[1].flatten()]]
    with torch.no_grad():
        together = changes(lambda tensors: tensors)
    try:
        with torch.no_grad():
            alone = torch.cat([changes(each) for each in (pieces if flat else [lambda t: t[:1], lambda t: t[1:]])])
    except Exception:  # it takes no such tensors
        return False
    near = 1e-6 if like.dtype == torch.float64 else 1e-3
    return torch.allclose(together, alone, rtol=near, atol=near * float(together.abs().amax()), equal_nan=True)


def _require_fits(kind: type, settings: dict, sharded: Sharded, groups: list) -> None:
    """Refuse a class that needs more of a parameter, or of the model, than each rank has, with the settings of any group."""
    held = sharded.native.held_as()
    what, failed = "", None
    of_torch = kind.__module__.startswith("torch.optim")  # whose norms show in small tensors
    device = next(sharded.module.parameters(), torch.empty(0)).device
    groups = list({repr({**(group or {}), "lr": None, "params": None}): group for group in groups}.values())

    def updates_alike(flat: bool) -> bool:
        nonlocal failed
        for group, sizes in itertools.product(groups, _TRIED[: 1 if of_torch else None]):
            for like in (torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float32, device=device)):
                try:
                    if not _updates_alike(kind, settings, group, flat, sizes, like):
                        return False
                    break
                except Exception as error:
                    ended = error
            else:  # what it lacks it says when it is made, or at its step
                failed = ended if sizes is _TRIED[0] else failed
        return True

    if issubclass(kind, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        what = "needs whole parameters, and its closure several times a step or sparse gradients. Use another class"
    elif held == "model":
        return
    elif held == "tensor" and not updates_alike(flat=False):
        what = "needs all parameters together, and a rank holds some of them. Use strategy='ddp', which keeps all on every rank"
    elif held == "element" and not updates_alike(flat=True):
        what = (
            "needs whole parameters, e.g. for their norms, and a rank holds parts of them. Call fully_shard with "
            "granularity='tensor', so that each parameter lies whole on one rank; for Muon there is shardproof.muon"
        )
    elif held == "element" and failed is not None and not of_torch:
        what = (
            f"may need whole parameters, of which a rank holds parts: a trial of two small tensors ended with "
            f"{type(failed).__name__}: {failed}. Call fully_shard with granularity='tensor', or let the class take such tensors"
        )
    if what:
        raise _C.Error(f"[optimizer] {kind.__name__} {what}")


def parameters_in(given: Any) -> list:
    """Parameters as torch.optim takes them: one, several, or several with their names."""
    listed = [given] if isinstance(given, torch.Tensor) else list(given)
    return [each[1] if isinstance(each, tuple) else each for each in listed]


def numbers_of(group: dict) -> str:
    """A group's settings that are numbers: all ranks have the same."""
    return " ".join(f"{name}={value}" for name, value in group.items() if isinstance(value, (bool, int, float, tuple)))


def _begin_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """The gradients of a step are there for hooks of its user, who may change them; those of a closure come later."""
    if hasattr(optimizer, "torch_state") and (args[1] if len(args) > 1 else kwargs.get("closure")) is None:
        optimizer._begin_on_shards()


_global_optimizer_pre_hooks.move_to_end(register_optimizer_step_pre_hook(_begin_step).id, last=False)


def torch_optimizer(kind: type, sharded: Sharded, params: Optional[Iterable] = None, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer of torch.optim on the shards of a model, with the bits that it has on the plain model.

    Parameters
    ----------
    kind : type
        A class of torch.optim that updates each element by itself, such as AdamW, Adam, SGD or RMSprop. After
        ``fully_shard(granularity="tensor")`` also one that needs whole parameters, such as Muon or a class of your own.
    sharded : Sharded
        The model.
    params : iterable, optional
        Parameters of the model, or dicts of them with settings, as torch.optim takes them. Without any, all parameters.
    **settings
        As the class takes them.

    Returns
    -------
    torch.optim.Optimizer
        An instance of ``kind``. Its ``step`` is collective, and learning-rate schedulers of torch take it. What else writes to
        its tensors on every rank is in the next forward, which is then collective. After writes through ``.data``, which
        PyTorch does not count, call `Sharded.main_parameters_changed`.
    """
    given = [] if params is None else list(params)
    by_group = bool(given) and isinstance(given[0], dict)
    _require_fits(kind, settings, sharded, given if by_group else [None])
    shards = ShardParameters(sharded)
    names = {id(value): name for name, value in reversed(list(sharded.module.named_parameters(remove_duplicate=False)))}
    every = list(sharded.module.parameters())
    plain: "dict[str, nn.Parameter]" = {}
    names_of_groups: "list[list[str]]" = []

    def shard(given: Any) -> list:
        given = parameters_in(given)
        for parameter in given:
            if id(parameter) not in names:
                raise _C.Error(
                    f"[optimizer] rank {sharded.rank}: a parameter of shape {tuple(parameter.shape)} is not one of the "
                    "sharded model's. Give model.parameters()"
                )
        own = {names[id(parameter)]: parameter for parameter in given if id(parameter) in sharded._ignored}
        plain.update(own)
        names_of_groups.append([names[id(parameter)] for parameter in given])
        # torch refuses an empty group, and a rank may hold nothing of one
        dims = max(1, given[0].dim()) if given else 1
        return [*shards.of(names_of_groups[-1]), *own.values()] or [nn.Parameter(torch.empty([0] * dims))]

    if params is None:
        groups: list = [{"params": shard(parameter for parameter in every if id(parameter) not in sharded._ignored)}]
    elif by_group:
        groups = [{**group, "params": shard(group["params"])} for group in given]
    else:
        groups = [{"params": shard(given)}]

    update = bare_step(kind)
    members = f"{kind.__name__} of parameters {zlib.crc32(repr(names_of_groups).encode()):08x}"

    class OnShards(kind):  # type: ignore[misc, valid-type]
        _updates_shards = False

        def _begin_on_shards(self) -> None:
            if not self._updates_shards:  # where a class's step calls that of its base, hooks run again
                sharded.native.begin_foreign_step(f"{kind.__name__}.step")
                shards.take_gradients(self)

        @torch.no_grad()
        def step(self, closure: Optional[Callable] = None):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                self._begin_on_shards()
            self._updates_shards = True
            try:
                update(self)
            finally:
                self._updates_shards = False
            sharded.native.finish_foreign_step(" | ".join([members, *map(numbers_of, self.param_groups)]))
            sharded._note_published()
            sharded._stepped = (weakref.ref(self), sharded.step)
            shards.drop_gradients()
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            sharded.zero_gradients()
            super().zero_grad(set_to_none)  # of ignored parameters

        def add_param_group(self, group: dict) -> None:
            made = hasattr(self, "torch_state")
            if made:
                _require_fits(kind, settings, sharded, [group])
            super().add_param_group({**group, "params": shard(group["params"])} if made else group)

        def _no_scaler(self, *_: Any) -> bool:
            raise _C.Error(
                "[optimizer] torch.amp.GradScaler finds no gradients, which are in shards. Use shardproof.LossScaler"
            )

        _step_supports_amp_scaling = property(_no_scaler, lambda self, value: None)

    OnShards.__name__ = OnShards.__qualname__ = f"Sharded{kind.__name__}"
    made = OnShards(groups, **settings)
    sharded._of_optimizer = [parameter for _, _, parameter in shards.pieces]
    sharded._note_published()
    held = [[name, begin, parameter.numel()] for name, begin, parameter in shards.pieces]

    def require_own(_: Any, state: dict) -> None:
        if state.get("shards") != held:
            raise _C.Error(
                f"[optimizer] rank {sharded.rank}: load_state_dict takes what state_dict() of an optimizer on the same shards "
                "returned, and got that of a plain optimizer or of other shards. shardproof.save and load keep state for any "
                "mesh, and torch.distributed.checkpoint opens it"
            )

    made.register_state_dict_post_hook(lambda _, state: {**state, "shards": held})
    made.register_load_state_dict_pre_hook(require_own)
    made.torch_state = TorchState(made, kind, settings, shards, names_of_groups, plain)
    return made
