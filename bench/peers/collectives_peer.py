"""The collectives of `shardproof bench collectives` by PyTorch over gloo. One JSON line on stdout.

Usage: collectives_peer.py RANKS REPEATS MIB...
Starts its own ranks on loopback, one thread each.
"""

import json
import os
import socket
import subprocess
import sys
import time

WARMUP = 2


def times_of(torch, dist, op, mib, repeats):
    size = dist.get_world_size()
    numel = (mib << 18) // size * size
    whole, part = torch.ones(numel), torch.ones(numel // size)
    times = []
    for i in range(-WARMUP, repeats):
        whole.fill_(1), part.fill_(1)
        dist.barrier()
        start = time.perf_counter()
        if op == "all_reduce":
            dist.all_reduce(whole)
        elif op == "all_gather":
            dist.all_gather_into_tensor(whole, part)
        else:
            dist.reduce_scatter_tensor(part, whole)
        slowest = torch.tensor([(time.perf_counter() - start) * 1e3], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if i >= 0:
            times.append(slowest.item())
    return times


def run_rank(repeats, sizes):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {op: {str(mib): times_of(torch, dist, op, mib, repeats) for mib in sizes}
              for op in ("all_reduce", "all_gather", "reduce_scatter")}
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a normal exit


def main(arguments):
    ranks, repeats, sizes = int(arguments[0]), int(arguments[1]), [int(a) for a in arguments[2:]]
    if "RANK" in os.environ:
        return run_rank(repeats, sizes)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo",
                OMP_NUM_THREADS="1")
    children = [subprocess.Popen([sys.executable, *sys.argv], env=dict(base, RANK=str(rank))) for rank in range(ranks)]
    return max([child.wait() for child in children])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
