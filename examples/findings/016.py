"""The mean of an FSDP2 parameter over tensor parallelism is the mean of the ranks' means, though the shards are uneven."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

RANKS = 4


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(1, 6, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, 7.0).view(6, 1))
    expected = float(model.weight.detach().mean())
    parallelize_module(model, mesh["tp"], ColwiseParallel())  # 3 rows for each tp rank
    fully_shard(model, mesh=mesh["dp"])  # 2 rows and 1 row of them for each dp rank
    found = float(model.weight.detach().mean().full_tensor())
    total = float(model.weight.detach().sum().full_tensor())
    print(
        f"rank {rank}: rows {model.weight.to_local().flatten().tolist()}, mean {found}, expected {expected}, sum {total}",
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(found != expected))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(rank_main, args=(folder + "/store",), nprocs=RANKS, start_method="fork")
        except torch.multiprocessing.ProcessExitedException:
            sys.exit("the finding holds")
    print("the finding does not hold")
