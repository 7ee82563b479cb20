"""shardproof.verify with defaults raises no alarm on models that train right: mainstream architectures, torch's modules."""

import copy
import importlib.util
import sys
import types
import unittest

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import shardproof

pytest.importorskip("transformers")
import mainstream  # noqa: E402

if importlib.util.find_spec("expecttest") is None:  # torch.testing derives a class from its one, which nobody uses here
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
from torch.testing._internal.common_modules import module_db  # noqa: E402


@pytest.mark.parametrize("name", mainstream.MODELS)
def test_a_mainstream_architecture_holds(name):
    make_model, make_batch = mainstream.made(name)
    report = shardproof.verify(make_model, make_batch, cases=25)
    assert report.cases == 25 and report.diverged <= 5, str(report)


class Root(nn.Module):
    """Calls a module of torch with its first floating input times a parameter. The loss is made of all that it returns."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor([0.9]))

    def forward(self, args, kwargs):
        first = next((i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
        args = [x * self.scale if i == first else x for i, x in enumerate(args)]
        return self.scale.sum() * 0.01, self.inner(*args, **kwargs)


def loss_of(model, batch):
    total, results = model(*batch)
    for output in _pytree.tree_leaves(results):
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            weights = torch.linspace(0.5, 1.5, output.numel()).view(output.shape)
            total = total + (output * weights).mean() + output.square().mean()
    return total


def samples(info):
    """How to make a module, and an input of it, for each input that torch's database has."""
    torch.manual_seed(1)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    for sample in [each for each in made if each.forward_input is not None]:
        given, batch = sample.constructor_input, (sample.forward_input.args, sample.forward_input.kwargs)

        def make(given=given, batch=batch):
            inner = info.module_cls(*copy.deepcopy(given.args), **copy.deepcopy(given.kwargs))
            for module in inner.modules():
                for name in ("p", "dropout"):
                    if isinstance(vars(module).get(name), float) and ("Drop" in type(module).__name__ or name == "dropout"):
                        setattr(module, name, 0.0)
            if any(isinstance(p, nn.parameter.UninitializedParameter) for p in inner.parameters()):
                inner(*batch[0], **batch[1])
            return Root(inner)

        yield make, batch


def plainly_trains(make, batch):
    """Whether plain PyTorch trains it, and in the same bits, whatever is drawn meanwhile."""
    losses = []
    for stream in range(2):
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(stream)
        try:
            losses.append(loss_of(model, copy.deepcopy(batch)))
            losses[-1].backward()
        except Exception:
            return False
    return bool(losses[0].isfinite()) and torch.equal(*losses)


# Of torch 2.11: what draws random numbers in every sample.
NOT_TRAINED = {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_of_torch_holds(info):
    usable = [(make, batch) for make, batch in samples(info) if plainly_trains(make, batch)]
    assert bool(usable) != (info.name in NOT_TRAINED)
    for make, batch in usable[:: max(1, len(usable) // 2)][:2]:
        shardproof.verify(make, lambda: batch, loss_of, cases=12)
