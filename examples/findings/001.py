"""FSDP2: clip_grad_norm_ by the largest value raises on a rank whose shard is empty."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)  # one row: rank 1 holds none of it
    plain = torch.nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    x = torch.ones(2, 3)
    model(x).sum().backward()
    plain(x).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type=float("inf"))
    found = "nothing"
    try:
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type=float("inf"), foreach=False)
        found = str(float(norm.to_local()))
    except RuntimeError as error:
        found = f"RuntimeError: {error}"
    print(f"rank {rank}: expected {float(expected)}, got {found}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int("RuntimeError" in found))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(rank_main, args=(folder + "/store",), nprocs=2, start_method="fork")
        except torch.multiprocessing.ProcessExitedException:
            sys.exit("the finding holds")
    print("the finding does not hold")
