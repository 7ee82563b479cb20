"""What each process does under mpirun in test_process_groups.py."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch  # noqa: E402

import shardproof  # noqa: E402
from models import Block, Net, assert_same_bits, batch, loss_of, train_plain  # noqa: E402


def net():
    with shardproof.seeded(0):
        return Net()


def body(comm):
    model = net()
    sharded = shardproof.fully_shard(model, comm, strategy="zero3", units=[Block], gather="side_by_side")
    optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1, momentum=0.9)
    for step in range(3):
        loss_of(model, batch(step * comm.size + comm.rank)).backward()
        optimizer.step()
    _, expected = train_plain(net(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), steps=3, world=comm.size)
    assert_same_bits(sharded.gather(), dict(expected.named_parameters()))
    return "same bits"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(shardproof.run_mpi(body), flush=True)
