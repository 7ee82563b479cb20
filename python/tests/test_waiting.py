"""Ranks that are threads share Python's lock: whoever waits for another rank, or enters an object, must mind it."""

import time

import pytest
import torch
from torch import nn

import shardproof


def _drop(sharded):
    """Lets go of the library's object alone, as the end of a body does with a model that nothing else holds."""
    for hooks in sharded._hooks:
        hooks.remove()
        hooks.call = None
    sharded._native = None


LOOKS = {
    "parameters": lambda sharded: sharded.parameters(),
    "main_parameters": lambda sharded: sharded.main_parameters(),
    "Ema": lambda sharded: shardproof.Ema(sharded),
    "torch_optimizer": lambda sharded: shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1),
    "the destructor": _drop,
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_waits_for_parameters_lets_the_rank_that_sends_them_go_on(look):
    """Where it does not, this test never ends: the other rank cannot begin its step."""

    def body(comm):
        model = nn.Linear(8, 8)
        sharded = shardproof.fully_shard(model, comm, strategy="zero1", publish="at_first_use")
        optimizer = shardproof.sgd(sharded, lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        if comm.rank == 1:
            time.sleep(0.3)
        optimizer.step()
        del optimizer
        LOOKS[look](sharded)
        return True

    assert shardproof.run_threads(2, body) == [True, True]


def test_ranks_make_communicators_of_meshes_at_the_same_time():
    """pybind11 has one list of all objects. Without the lock entries are lost, or the process crashes."""

    def body(comm):
        for _ in range(1000):
            assert len({id(each) for each in [shardproof.MeshComm(comm, "dp_shard=4") for _ in range(100)]}) == 100

    shardproof.run_threads(4, body)
