"""DDP with static_graph=True: a first backward under no_sync fails by an internal assertion."""

import contextlib
import sys
import tempfile

import torch
import torch.distributed as dist

RANKS = 2


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    failed = False
    for static in (False, True):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), static_graph=static)
        try:
            for wait in (True, False):
                with model.no_sync() if wait else contextlib.nullcontext():
                    model(torch.ones(1, 1)).sum().backward()
            result = "trains"
        except RuntimeError as error:
            result = f"RuntimeError: {str(error).splitlines()[0]}"
            failed = True
        print(f"rank {rank}, static_graph={static}: {result}", flush=True)
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
