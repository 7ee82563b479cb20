"""A training step from Python under fully_shard on two rank-threads, beside the plain step on two threads within operators.

    PYTHONPATH=build/python python bench/python_step.py [gpt33m|tiny] [STEPS]

Steps of both kinds alternate, so that what else the machine does meets both. Prints one JSON line.
"""

import copy
import json
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers"))

import peer  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import shardproof  # noqa: E402

SIZES = {
    "gpt33m": dict(layers=8, hidden=512, heads=8, vocab=8192, seq=128, batch=8),
    "tiny": dict(layers=2, hidden=64, heads=4, vocab=256, seq=32, batch=8),
}
RANKS = 2


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def made(spec):
    torch.manual_seed(0)
    model = peer.make_model(spec)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def run(name, steps):
    spec = SIZES[name]
    tokens = torch.randint(
        0, spec["vocab"], (steps + 3, spec["batch"], spec["seq"] + 1), generator=torch.Generator().manual_seed(1)
    )
    plain = made(spec)
    start = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, fused=True)
    times = {"plain": [], "sharded": []}
    losses = []

    def plain_step(step):
        torch.set_num_threads(RANKS)
        optimizer.zero_grad()
        loss = loss_of(plain, tokens[step])
        loss.backward()
        optimizer.step()
        torch.set_num_threads(1)
        return loss.item()

    def body(comm):
        model = copy.deepcopy(start)
        block = type(model.blocks[0])
        sharded = shardproof.fully_shard(model, comm, units=[block], gather="side_by_side", buffers="pooled")
        mine = shardproof.adamw(sharded, lr=3e-4)
        per = spec["batch"] // comm.size
        for step in range(steps + 3):
            comm.barrier()
            begin = time.perf_counter()
            if comm.rank == 0:
                value = plain_step(step)
            comm.barrier()
            between = time.perf_counter()
            loss = loss_of(model, tokens[step, comm.rank * per : (comm.rank + 1) * per])
            loss.backward()
            mine.step()
            comm.barrier()
            if comm.rank == 0 and step >= 3:
                times["plain"].append(between - begin)
                times["sharded"].append(time.perf_counter() - between)
            total = comm.all_reduce(loss.detach().clone()) / comm.size
            if comm.rank == 0:
                losses.append((value, total.item()))

    torch.set_num_threads(1)
    shardproof.run_threads(RANKS, body)
    medians = {kind: statistics.median(values) * 1e3 for kind, values in times.items()}
    print(
        json.dumps(
            {
                "model": name,
                "plain_ms": round(medians["plain"], 2),
                "sharded_ms": round(medians["sharded"], 2),
                "ratio": round(statistics.median(b / a for a, b in zip(times["plain"], times["sharded"])), 3),
                "loss_difference": max(abs(a - b) / abs(a) for a, b in losses),
            }
        )
    )


if __name__ == "__main__":
    run(sys.argv[1] if len(sys.argv) > 1 else "gpt33m", int(sys.argv[2]) if len(sys.argv) > 2 else 12)
