"""Tensor parallelism over one rank of a layer with one output and a bias has no backward."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def backward_with(outputs, mesh):
    """What it says."""
    layer = parallelize_module(torch.nn.Linear(2, outputs), mesh, ColwiseParallel())
    try:
        layer(torch.ones(3, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def main():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        said = {outputs: backward_with(outputs, mesh) for outputs in (2, 1)}
        dist.destroy_process_group()
    for outputs, text in said.items():
        print(f"outputs: {outputs}. {text}")
    holds = said[2] == "no error" and "would remove or reshape sharded dimension" in said[1]
    print("the finding holds" if holds else "the finding does not hold")
    return int(holds)


if __name__ == "__main__":
    sys.exit(main())
