"""loss_parallel stays on after an exception has left its block, and then log_softmax has wrong gradients."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

RANKS = 2


def gradient(x):
    output = torch.log_softmax(x, 0)
    output = output.full_tensor() if isinstance(output, DTensor) else output
    (output * torch.arange(4.0, dtype=torch.float64).view(4, 1)).sum().backward()
    return x.grad


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    x = torch.tensor([[1.0], [2.0], [3.0], [5.0]], dtype=torch.float64)
    expected = gradient(x.clone().requires_grad_())
    sharded = lambda: gradient(distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()).full_tensor()
    before = sharded()
    try:
        with loss_parallel():
            raise KeyboardInterrupt  # or any error that the caller handles, such as one in a step that is skipped
    except KeyboardInterrupt:
        pass
    after = sharded()
    if rank == 0:
        print("plain ", expected.flatten().tolist())
        print("before", before.flatten().tolist())
        print("after ", after.flatten().tolist(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(torch.allclose(before, expected) and not torch.allclose(after, expected)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(rank_main, args=(folder + "/store",), nprocs=RANKS, start_method="fork")
        except torch.multiprocessing.ProcessExitedException:
            sys.exit("the finding holds")
    print("the finding does not hold")
