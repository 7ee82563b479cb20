"""FSDP2 over tensor parallelism: the backward raises on a rank whose part of a weight is empty."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

RANKS = 2


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    failed = False
    for sharded in (False, True):
        model = torch.nn.Linear(2, 1)  # one row: tensor-parallel rank 1 holds none of it
        parallelize_module(model, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        if sharded:
            fully_shard(model, mesh=mesh["dp"])
        try:
            model(torch.ones(3, 2)).sum().backward()
            result = "trains"
        except RuntimeError as error:
            result = f"RuntimeError: {error}"
            failed = True
        print(f"rank {rank}, {'FSDP2 over tensor parallelism' if sharded else 'tensor parallelism'}: {result}", flush=True)
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
