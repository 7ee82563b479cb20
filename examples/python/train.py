"""Trains a small residual net under ZeRO-3 on four ranks, which are threads, and saves a checkpoint.

python examples/python/train.py [FOLDER]
torchrun --nproc-per-node 4 examples/python/train.py [FOLDER]      the same with processes
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import shardproof


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def body(comm):
    model = nn.Sequential(nn.Linear(1, 32), Block(32), Block(32), nn.Linear(32, 1))
    sharded = shardproof.fully_shard(model, comm, strategy="zero3", units=[Block], prefetch_forward=1)
    optimizer = shardproof.adamw(sharded, lr=0.01)
    x = torch.linspace(comm.rank - 2, comm.rank - 1, 64).unsqueeze(1)  # a quarter each
    for step in range(101):
        optimizer.set_lr_factor(shardproof.warmup_cosine(step, 10, 101))
        loss = (model(x) - (2 * x).sin()).square().mean()
        loss.backward()
        sharded.clip_gradients(1.0)
        optimizer.step()
        if comm.rank == 0 and step % 50 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    if len(sys.argv) > 1:
        shardproof.save(os.path.join(sys.argv[1], "step_100"), sharded, optimizer, step=100)


if __name__ == "__main__":
    torch.manual_seed(0)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        body(shardproof.comm_of())
        dist.destroy_process_group()
    else:
        shardproof.run_threads(4, body)
