"""FSDP2 over one rank divides a gradient by set_gradient_divide_factor twice, unless it is reduced in float32 or bfloat16."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def gradient_in(dtype):
    """Of a weight in this dtype, which is 1 before anything is divided."""
    model = torch.nn.Linear(1, 1, bias=False).to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model.set_gradient_divide_factor(4)
    model(torch.ones(1, 1, dtype=dtype)).sum().backward()
    return model.weight.grad.full_tensor().item()


def main():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = {dtype: gradient_in(dtype) for dtype in (torch.float32, torch.float16, torch.float64)}
        dist.destroy_process_group()
    for dtype, gradient in found.items():
        print(f"1 divided by 4 in {dtype}: {gradient}")
    holds = found == {torch.float32: 1 / 4, torch.float16: 1 / 16, torch.float64: 1 / 16}
    print("the finding holds" if holds else "the finding does not hold")
    return int(holds)


if __name__ == "__main__":
    sys.exit(main())
