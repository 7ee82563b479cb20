"""DCP cannot load what FSDP2 over tensor parallelism saved, where a rank holds no rows: the empty piece hides a real one."""

import logging
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

RANKS = 6
ROWS = 7

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def rank_main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(1, ROWS, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, ROWS + 1).view(ROWS, 1))
    parallelize_module(model, mesh["tp"], ColwiseParallel())  # 4 and 3 rows
    fully_shard(model, mesh=mesh["dp"])  # 2, 2, 0 rows of the 4, and 1, 1, 1 of the 3
    dcp.save(model.state_dict(), checkpoint_id=folder + "/saved")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(rank_main, args=(folder,), nprocs=RANKS, start_method="fork")
        loaded = {"weight": torch.zeros(ROWS, 1)}
        try:
            dcp.load(loaded, checkpoint_id=folder + "/saved", no_dist=True)
            result = str(loaded["weight"].flatten().tolist())
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            result = str(error).strip().splitlines()[-1]
        print(f"saved {[float(i + 1) for i in range(ROWS)]}")
        print(f"loaded {result}")
        if not torch.equal(loaded["weight"].flatten(), torch.arange(1.0, ROWS + 1)):
            sys.exit("the finding holds")
    print("the finding does not hold")
