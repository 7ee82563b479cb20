"""Tensor parallelism of a layer with fewer outputs than ranks trains no step."""

import logging
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

RANKS = 2

logging.disable(logging.ERROR)


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    failed = False
    for outputs in (2, 1):
        layer = parallelize_module(torch.nn.Linear(2, outputs, bias=False), mesh, ColwiseParallel())
        layer(torch.ones(3, 2)).sum().backward()
        weight = layer.weight
        try:
            torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False).step()
            result = "steps"
        except RuntimeError as error:
            result = f"RuntimeError: {str(error).splitlines()[0]}"
            failed = outputs == 1 and weight.grad.placements != weight.placements
        cuts = f"the weight is {weight.placements}, its gradient {weight.grad.placements}"
        print(f"rank {rank}, outputs={outputs}: {cuts}. {result}")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(failed))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(rank_main, args=(folder + "/store",), nprocs=RANKS, start_method="fork")
        except torch.multiprocessing.ProcessExitedException:
            sys.exit("the finding holds")
    print("the finding does not hold")
