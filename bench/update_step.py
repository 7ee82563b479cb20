"""The update of many small tensors, or of a few large ones, by optimizers on shards, in turns, on two ranks over Gloo.

    PYTHONPATH=build/python python bench/update_step.py [--model small|large] [--rounds 20]

small has 1,200 tensors: 300 blocks of a norm, a linear layer of 32 and a scale, 30 blocks a unit. large has 25 million
parameters, in 24 such blocks of 1024, 3 a unit. All contestants are in the same two processes, and each takes one step in each
round. `step` is a forward, a backward and an update. Times are those of the processor for the calling thread, so that other
programs, and what ranks wait for, are left out as far as they can be.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.multiprocessing
from torch import nn

import shardproof
import shardproof.fsdp

MODELS = {"small": dict(width=32, blocks=300, of_a_unit=30), "large": dict(width=1024, blocks=24, of_a_unit=3)}
RANKS = 2
WARM_UP = 2  # rounds, which make memory and state


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return x + self.scale * torch.relu(self.linear(self.norm(x)))


def model_of(width, blocks, of_a_unit):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(*(Block(width) for _ in range(of_a_unit))) for _ in range(blocks // of_a_unit)))


def sharded_by(lib, model):
    for unit in model:
        lib.fully_shard(unit)
    return lib.fully_shard(model)


def on_shards(lib, kind, **settings):
    def made(model):
        return kind(sharded_by(lib, model).parameters(), lr=1e-3, **settings)

    return made


def flat(model):
    return shardproof.adamw(shardproof.fully_shard(model, units=list(model), granularity="row"), lr=1e-3)


CONTESTANTS = {
    "shardproof.fsdp.AdamW": on_shards(shardproof.fsdp, shardproof.fsdp.AdamW),
    "torch's AdamW on our shards": on_shards(shardproof.fsdp, torch.optim.AdamW),
    "torch's fused AdamW on our shards": on_shards(shardproof.fsdp, torch.optim.AdamW, fused=True),
    "torch's fused AdamW on FSDP2's": on_shards(torch.distributed.fsdp, torch.optim.AdamW, fused=True),
    "shardproof.adamw": flat,
}


def worker(rank, folder, options):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    base = model_of(**MODELS[options.model])
    width = MODELS[options.model]["width"]
    runs = {}
    for name, make in CONTESTANTS.items():
        model = copy.deepcopy(base)
        runs[name] = (model, make(model))
    times = {name: {"update": [], "step": []} for name in runs}
    for index in range(WARM_UP + options.rounds):
        losses = []
        for name, (model, optimizer) in runs.items():
            x = torch.randn(4, width, generator=torch.Generator().manual_seed(index * RANKS + rank))
            dist.barrier()
            begun = time.thread_time()
            loss = model(x).square().mean()
            loss.backward()
            between = time.thread_time()
            optimizer.step()
            ended = time.thread_time()
            optimizer.zero_grad()
            losses.append(loss.item())
            if index >= WARM_UP:
                times[name]["update"].append((ended - between) * 1e3)
                times[name]["step"].append((ended - begun) * 1e3)
        if not max(losses) - min(losses) <= 1e-3 * abs(losses[0]):
            raise SystemExit(f"rank {rank}, round {index}: the contestants' losses are {losses}")
    for name, taken in times.items() if rank == 0 else ():
        kinds = (statistics.median, min, max)
        row = {f"{what}_ms_{of.__name__}": round(of(taken[what]), 2) for what in taken for of in kinds}
        print(json.dumps({"contestant": name, "model": options.model, "loss": losses[0], **row}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a normal exit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rounds", type=int, default=20, help=f"after {WARM_UP} of warm-up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (folder, options), nprocs=RANKS)


if __name__ == "__main__":
    main()
