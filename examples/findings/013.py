"""DCP saves over a checkpoint. A crash before the end leaves a mixture of both saves, which loads without a word."""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

warnings.filterwarnings("ignore")


class DiesOnRank1(FileSystemWriter):
    """A writer on a machine that is lost before its file is written."""

    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            os._exit(0)
        return super().write_data(plan, planner)


def state(value):
    mesh = init_device_mesh("cpu", (2,))
    return {"weight": DTensor.from_local(torch.full((2,), value), mesh, [Shard(0)])}


def save_rank(rank, folder, value, dies):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{value}", rank=rank, world_size=2)
    writer = (DiesOnRank1 if dies else FileSystemWriter)(folder + "/saved", overwrite=True)
    try:
        dcp.save(state(value), storage_writer=writer)
    except BaseException as error:  # noqa: BLE001
        print(f"rank {rank}: the second save ended with {type(error).__name__}", flush=True)
    os._exit(0)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for value, dies in ((1.0, False), (2.0, True)):
            torch.multiprocessing.start_processes(save_rank, args=(folder, value, dies), nprocs=2, start_method="fork")
        loaded = {"weight": torch.zeros(4)}
        try:
            dcp.load(loaded, checkpoint_id=folder + "/saved", no_dist=True)
        except Exception as error:  # noqa: BLE001
            print(f"refused: {type(error).__name__}: {error}")
            print("the finding does not hold")
            return 0
    print("saved 1 and then, with a crash, 2; loaded", loaded["weight"].tolist())
    holds = len(set(loaded["weight"].tolist())) > 1
    print("the finding holds" if holds else "the finding does not hold")
    return int(holds)


if __name__ == "__main__":
    sys.exit(main())
