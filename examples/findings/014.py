"""The mean squared error of a DTensor that is cut unevenly is the mean of the ranks' means."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    wrong = []
    for dtype in (torch.float32, torch.float64):
        output = torch.tensor([[1.0], [2.0], [6.0]], dtype=dtype)  # rank 0 holds two samples, rank 1 holds one
        target = torch.zeros_like(output)
        for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss):
            plain = output.clone().requires_grad_()
            loss(plain, target).backward()
            sharded = distribute_tensor(output, mesh, [Shard(0)]).requires_grad_()
            value = loss(sharded, distribute_tensor(target, mesh, [Shard(0)]))
            value.backward()
            found, expected = float(value.detach().full_tensor()), float(loss(plain.detach(), target))
            gradient = sharded.grad.full_tensor()
            same = abs(found - expected) < 1e-5 * expected and torch.allclose(gradient, plain.grad, rtol=1e-5, atol=0)
            if rank == 0:
                print(
                    f"{dtype} {loss.__name__}: {found}, plain {expected}; gradient {gradient.flatten().tolist()}, "
                    f"plain {plain.grad.flatten().tolist()}{'' if same else '   DIFFERS'}",
                    flush=True,
                )
            wrong.append(not same)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(any(wrong)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(rank_main, args=(folder + "/store",), nprocs=RANKS, start_method="fork")
        except torch.multiprocessing.ProcessExitedException:
            sys.exit("the finding holds")
    print("the finding does not hold")
