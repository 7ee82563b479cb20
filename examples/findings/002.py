"""clip_grad_norm_ raises where gradients lie on two meshes: FSDP2 over tensor parallelism that leaves a layer alone."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(2, 2)).sum().backward()
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        failed = False
    except RuntimeError as error:
        failed = True
        print(f"rank {rank}: {str(error).splitlines()[0]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(failed))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(rank_main, args=(folder + "/store",), nprocs=2, start_method="fork")
        except torch.multiprocessing.ProcessExitedException:
            sys.exit("the finding holds")
    print("the finding does not hold")
