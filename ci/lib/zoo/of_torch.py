"""The modules of torch's own module database, and what it leaves out: what `torch.nn.utils` does to modules, and rare ones."""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
import unittest
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, rnn
from torch.utils import _pytree

if importlib.util.find_spec("expecttest") is None:  # torch.testing derives a class from its one, which nobody uses here
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
from torch.testing._internal.common_modules import module_db  # noqa: E402

from .model import Model, NotBuildable, loss_of_outputs, require_trains, said, tensors_in, without_randomness  # noqa: E402

SAMPLES_MAX = 3  # of the inputs that the database has for a module
INFOS = {info.name: info for info in module_db}


def _randn(*shapes: "tuple[int, ...]") -> Callable[[], tuple]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def _ids(*shape: int) -> Callable[[], tuple]:
    return lambda: (torch.randint(0, 10, shape),)


def _packed() -> tuple:
    return (rnn.pack_padded_sequence(torch.randn(5, 3, 4), torch.tensor([5, 3, 2])),)


def _with(module: nn.Module, change: Callable[[nn.Module], Any]) -> nn.Module:
    change(module)
    return module


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)


class _Shapes(nn.Module):
    """Parameters of shapes that are rare."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.list = nn.ParameterList([torch.randn(4), torch.randn(1)])
        self.dict = nn.ParameterDict({"a": torch.randn(3, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.number + self.list[0] * self.list[1]) @ self.dict["a"].t() + self.empty.sum()


def _with_padding() -> tuple:
    return torch.randn(2, 4, 8), None, torch.tensor([[False] * 4, [False, False, True, True]])


def _transposed() -> nn.Module:
    return _with(nn.Linear(4, 6), lambda linear: setattr(linear, "weight", nn.Parameter(torch.randn(4, 6).t())))


def _traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))


def _complex() -> tuple:
    return (torch.randn(3, 4, dtype=torch.complex64),)


_ROWS = _randn((3, 4))  # what most take
# How each is made, and its inputs.
MORE: "dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple]]]" = {
    "nn.AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
        lambda: (torch.randn(6, 8), torch.arange(6)),
    ),
    "nn.Conv2d channels_last": (
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        _randn((2, 3, 5, 5)),
    ),
    "nn.Embedding max_norm": (lambda: nn.Embedding(10, 4, max_norm=0.5), _ids(3, 5)),
    "nn.Embedding padding_idx": (lambda: nn.Embedding(10, 4, padding_idx=2), _ids(3, 5)),
    "nn.Embedding scale_grad_by_freq": (lambda: nn.Embedding(10, 4, scale_grad_by_freq=True), _ids(3, 5)),
    "nn.Embedding sparse": (lambda: nn.Embedding(10, 4, sparse=True), _ids(3, 5)),
    "nn.EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4), _ids(3, 5)),
    "nn.GRU packed": (lambda: nn.GRU(4, 6, bidirectional=True), _packed),
    "nn.LSTM packed": (lambda: nn.LSTM(4, 6, 2), _packed),
    "nn.LSTM proj_size": (lambda: nn.LSTM(4, 6, proj_size=3), _randn((5, 3, 4))),
    "nn.LazyBatchNorm1d": (nn.LazyBatchNorm1d, _ROWS),
    "nn.LazyLinear": (lambda: nn.LazyLinear(6), _ROWS),
    "nn.Linear complex": (lambda: nn.Linear(4, 6, dtype=torch.complex64), _complex),
    "nn.Linear frozen weight": (lambda: _with(nn.Linear(4, 6), lambda m: m.weight.requires_grad_(False)), _ROWS),
    "nn.Linear transposed": (_transposed, _ROWS),
    "nn.MultiheadAttention bias_kv": (
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True),
        lambda: (torch.randn(3, 2, 8),) * 3,
    ),
    "nn.MultiheadAttention kdim": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True),
        _randn((2, 3, 8), (2, 5, 6), (2, 5, 4)),
    ),
    "nn.ReLU inplace": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(True), nn.Linear(6, 4)), _randn((2, 3, 4))),
    "nn.SyncBatchNorm eval": (lambda: nn.SyncBatchNorm(4).eval(), _randn((3, 4, 2))),
    "nn.TransformerEncoder padding": (_encoder, _with_padding),
    "nn.parameters of rare shapes": (_Shapes, _ROWS),
    "nn.utils.parametrizations.orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), _ROWS),
    "nn.utils.parametrizations.spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 6)), _ROWS),
    "nn.utils.parametrizations.weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 6)), _ROWS),
    "nn.utils.prune": (lambda: prune.l1_unstructured(nn.Linear(4, 6), "weight", 0.5), _ROWS),
    "nn.utils.spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 6)), _ROWS),
    "nn.utils.weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 6)), _ROWS),
    "nn.utils.weight_norm conv": (lambda: nn.utils.weight_norm(nn.Conv1d(4, 6, 2)), _randn((3, 4, 5))),
    "fx.symbolic_trace": (_traced, _ROWS),
    "jit.script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.Tanh())), _ROWS),
    "jit.trace": (lambda: torch.jit.trace(nn.Linear(4, 6), torch.randn(3, 4)), _ROWS),
    "optim.swa_utils.AveragedModel": (lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 6)), _ROWS),
}


class Root(nn.Module):
    """Calls a module, with its first floating input times a parameter, so that gradients pass through it."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor([0.9], dtype=dtype))

    def forward(self, args: tuple, kwargs: dict) -> Any:
        args = list(args)
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                args[i] = value * self.scale
                break
        return self.inner(*args, **kwargs), self.scale * 0.01


def loss_of(model: nn.Module, batch: tuple) -> torch.Tensor:
    outputs = [each.to_dense() if each.is_sparse else each for each in tensors_in(model(*batch))]
    outputs = [torch.view_as_real(each) if each.is_complex() else each for each in outputs]
    return loss_of_outputs(outputs)


def model_of(make: Callable[[], nn.Module], given: tuple, dtype: torch.dtype, vary: bool, label: str) -> Model:
    """`vary` gives each batch other values than the one before."""

    def made() -> nn.Module:
        inner = make()
        for each in inner.modules():
            if isinstance(each, nn.RReLU):
                each.upper = each.lower
        root = without_randomness(Root(inner, dtype))
        if any(isinstance(each, nn.parameter.UninitializedParameter) for each in inner.parameters()):
            with torch.no_grad():
                root(*batch(0))
        return root

    def batch(n: int) -> tuple:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach().clone()
            if tensor.is_floating_point():  # the database takes the logarithm of negative numbers for KLDivLoss
                tensor = torch.nan_to_num(tensor, nan=-0.5)
            return tensor * (1 - 0.0625 * (n % 13)) if vary and tensor.is_floating_point() else tensor

        return _pytree.tree_map_only(torch.Tensor, own, given)

    return Model(made, batch, loss_of, lambda model, given: tensors_in(model(*given)), label=label)


def samples_of(info: Any, dtype: torch.dtype) -> list:
    given = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=True)
    return [sample for sample in given if sample.forward_input is not None]


def _of_database(info: Any, dtype: torch.dtype, count: int) -> "list[tuple]":
    torch.manual_seed(1)
    samples = samples_of(info, dtype)
    found = []
    for sample in samples[:: -(-len(samples) // count)]:
        arguments = sample.constructor_input

        def make(arguments: Any = arguments) -> nn.Module:
            inner = info.module_cls(*copy.deepcopy(arguments.args), **copy.deepcopy(arguments.kwargs))
            return inner.to(dtype).train()

        found.append((make, (sample.forward_input.args, sample.forward_input.kwargs), dtype, sample.desc or ""))
    return found


def names() -> "list[str]":
    return [*INFOS, *MORE]


def build(name: str) -> "list[Model]":
    """A model for each of some samples of its inputs."""
    if name in INFOS:
        candidates = _of_database(INFOS[name], torch.float32, SAMPLES_MAX) + _of_database(INFOS[name], torch.float64, 1)
    else:
        torch.manual_seed(1)
        make, inputs = MORE[name]
        candidates = [(make, (inputs(), {}), torch.float32, "")]
    models, reason = [], "the database has no inputs"
    for number, (make, given, dtype, desc) in enumerate(candidates):
        label = f"{number + 1}/{len(candidates)} {str(dtype).removeprefix('torch.')} {desc}".strip()
        for vary in (True, False):  # targets of some losses are no longer valid when they vary
            model = model_of(make, given, dtype, vary, label)
            try:
                require_trains(model)
                models.append(model)
                break
            except Exception as error:  # whatever plain PyTorch raises
                reason = said(error)
    if not models:
        raise NotBuildable(reason)
    return models
