"""Which device a model trains on, and what it says where that one cannot be used."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import shardproof
from models import Block, Net, batch, loss_of
from shardproof import _cuda
from shardproof.sharding import device_of

no_gpu = pytest.mark.skipif(not _cuda.why_no_cuda(), reason="there is a GPU here, so nothing is refused")


def model_on(device):
    """Of its parameter nothing is read but the device, which need not be there."""
    model = nn.Module()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(2, device=device))
    return model


def test_the_device_is_that_of_the_parameters_or_the_given_one():
    assert device_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2, device="meta"), device="xpu:1") == torch.device("xpu", 1)
    mixed = nn.Sequential(nn.Linear(2, 2, device="meta"), model_on("xpu:1"), nn.Linear(2, 2))
    assert device_of(mixed) == torch.device("xpu", 1)
    assert device_of(mixed, list(mixed[1].parameters())) == torch.device("cpu")


@no_gpu
def test_parameters_on_a_gpu_that_cannot_be_used_are_refused_with_the_reason():
    reason = _cuda.why_no_cuda()
    for model, device in ((model_on("cuda:0"), None), (nn.Linear(2, 2, device="meta"), "cuda")):
        with pytest.raises(shardproof.Error, match=r"\[cuda\] ") as raised:
            device_of(model, device=device)
        assert reason in str(raised.value)

    def body(comm):
        shardproof.fully_shard(nn.Linear(2, 2, device="meta"), comm, device="cuda", initialize=(1, 0.1))

    with pytest.raises(shardproof.Error, match=r"\[cuda\] ") as raised:
        shardproof.run_threads(2, body)
    assert reason in str(raised.value)
    with pytest.raises(shardproof.Error, match=r"\[cuda\] "):
        shardproof.run_threads(1, lambda comm: None, device="cuda:0")


def test_a_device_that_the_library_cannot_compute_on_is_refused_by_name():
    def body(comm):
        shardproof.fully_shard(nn.Linear(2, 2, device="meta"), comm, device="xpu:0", initialize=(1, 0.1))

    with pytest.raises(shardproof.Error, match="parameters are on xpu:0.*fully_shard calls by itself"):
        shardproof.run_threads(1, body)


def test_buffers_of_the_meta_device_get_memory_on_the_device_that_is_chosen():
    class Scales(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.register_buffer("scale", torch.ones(5, device="meta"))

        def reset_buffers(self):
            chosen.append(self.scale.device)
            self.scale.fill_(2)

    chosen = []

    def body(comm):
        model = Scales(Net())
        shardproof.fully_shard(model, comm, units=[Block], device="cpu")
        loss_of(model.inner, batch(0))
        return model.scale.tolist()

    assert shardproof.run_threads(1, body, device="cpu") == [[2.0] * 5]
    with pytest.raises(shardproof.Error, match="parameters are on meta"):
        shardproof.run_threads(1, lambda comm: shardproof.fully_shard(Scales(Net().to("meta")), comm, device="meta"))
    assert chosen == [torch.device("cpu"), torch.device("meta")]
