"""torch.optim.Adafactor raises on the parameters of FSDP2."""

import logging
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2

logging.disable(logging.ERROR)


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    failed = False
    for foreach in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adafactor(model.parameters(), foreach=foreach)
        model(torch.ones(1, 4)).sum().backward()
        try:
            optimizer.step()
            result = "steps"
        except RuntimeError as error:
            result = f"RuntimeError: {str(error).splitlines()[0]}"
            failed = True
        print(f"rank {rank}, foreach={foreach}: {result}", flush=True)
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
