"""Tensor parallelism of a hidden width that the ranks do not divide: the second layer takes its input for another width."""

import logging
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2

logging.disable(logging.ERROR)


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    failed = False
    for hidden in (4, 3):
        model = torch.nn.Sequential(torch.nn.Linear(2, hidden), torch.nn.Linear(hidden, 2))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        try:
            model(torch.ones(1, 2))
            result = "computes"
        except RuntimeError as error:
            result = f"RuntimeError: {str(error).splitlines()[0]}"
            failed = True
        print(f"rank {rank}, hidden width {hidden}: {result}", flush=True)
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
