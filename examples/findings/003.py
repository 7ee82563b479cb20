"""clip_grad_norm_ beside plain tensors: tensor parallelism that leaves a layer alone."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    failed = False
    for foreach in (None, False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
        plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
        plain.load_state_dict(model.state_dict())
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"1": ColwiseParallel(), "2": RowwiseParallel()})
        x = torch.ones(2, 2)
        model(x).sum().backward()
        plain(x).sum().backward()
        expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=foreach))
        try:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
            norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            failed |= abs(norm - expected) > 1e-5 * expected
            grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
            errors = [float((g - p.grad).norm() / p.grad.norm()) for g, p in zip(grads, plain.parameters())]
            failed |= max(errors) > 1e-5
            print(f"rank {rank} foreach={foreach}: norm {norm}, the plain model's {expected}; gradients {errors}", flush=True)
        except RuntimeError as error:
            failed = True
            print(f"rank {rank} foreach={foreach}: {str(error).splitlines()[0]}", flush=True)
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
