"""set_model_state_dict cannot load a whole state dict into FSDP2 over tensor parallelism with uneven shards."""

import logging
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

RANKS = 4

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    failed = False
    for rows in (8, 6):  # 6 rows: 3 for each tensor-parallel rank, cut in 2 and 1 by FSDP2
        model = torch.nn.Linear(1, rows, bias=False)
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        fully_shard(model, mesh=mesh["dp"])
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        try:
            set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
            result = "loaded what was gathered"
        except AssertionError as error:
            result = f"AssertionError: {error}"
            failed = True
        print(f"rank {rank}, {rows} rows: {result}", flush=True)
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
