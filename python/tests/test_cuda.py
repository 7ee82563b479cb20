"""Models of Python on GPUs. Without a GPU all of it is skipped, with the reason."""

import copy
import os
import sys

import pytest
import torch

import shardproof
from models import Block, Net, batch, loss_of, train_plain
from shardproof import _cuda

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, os.pardir, "ci", "tests"))

from peer_ranks import run_ranks  # noqa: E402

GPUS = 0 if _cuda.why_no_cuda() else torch.cuda.device_count()
WITHOUT = f"CUDA cannot be used here: {_cuda.why_no_cuda()}"  # tests.cmake knows these words


@pytest.mark.skipif(GPUS == 0, reason=WITHOUT)
def test_ranks_that_share_a_gpu_train_what_plain_pytorch_trains():
    torch.manual_seed(0)
    start = Net()

    def body(comm):
        model = copy.deepcopy(start).to("cuda:0")
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        for step in range(3):
            loss_of(model, [part.to("cuda:0") for part in batch(2 * step + comm.rank)]).backward()
            optimizer.step()
        return {name: value.cpu() for name, value in sharded.gather().items()}

    _, expected = train_plain(copy.deepcopy(start), lambda p: torch.optim.SGD(p, lr=0.1), steps=3, world=2)
    for whole in shardproof.run_threads(2, body, device="cuda:0"):
        for name, value in expected.named_parameters():  # which were trained on the CPU: products round differently there
            assert torch.allclose(whole[name], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.skipif(GPUS < 4, reason=f"this needs 4 GPUs, and there are {GPUS}" if GPUS else WITHOUT)
def test_ranks_with_a_gpu_each_train_over_nccl_on_a_mesh_of_two_axes():
    run_ranks(os.path.join(HERE, "gloo_ranks.py"), 4, ["nccl"], fresh=True)  # CUDA ends in forks
