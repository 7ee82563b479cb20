"""The run of properties/doubles/checkpoint_driver.cpp in PyTorch: FSDP2 (fsdp2), or FSDP2 over tensor parallelism (fsdp2_tp),
with AdamW.

    python checkpoint_training_peers.py KIND BEGIN END [load FOLDER] [expect FILE] [save FOLDER]
A rank of `torch.distributed`. Loads into a model and optimizer of other values; `expect` compares all bits of both with a file
of dcp_to_torch_save. Rank 0 prints the losses of steps BEGIN to END, one a line.
"""
import math
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from peer_ranks import join, leave

SAMPLES = 4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 4)])

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


def build(kind):
    torch.manual_seed(17)
    model, world = Mlp(), dist.get_world_size()
    ranks = world  # that share the samples
    mesh = init_device_mesh("cpu", (world,))
    if kind == "fsdp2_tp":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
        mesh, ranks = both["dp"], world // 2
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return model, optimizer, mesh.get_local_rank(), ranks


def train(model, optimizer, share, shares, step):
    per = SAMPLES // shares
    first = torch.arange(per, dtype=torch.float32) + (step * SAMPLES + share * per)
    loss = model((first.unsqueeze(1) + torch.arange(6.0)).cos()).square().sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def differences(model, optimizer, file):
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=whole)
    expected = torch.load(file, weights_only=False)
    if dist.get_rank() != 0:
        return
    bits = lambda tensor: tensor.contiguous().reshape(-1).view(torch.int32)  # noqa: E731
    pairs = {name: (of_model[name], value) for name, value in expected["model"].items()}
    for name, state in expected["optim"]["state"].items():
        pairs.update({f"{name}.{slot}": (of_optimizer["state"][name][slot], value) for slot, value in state.items()})
    assert len(of_model) == 4 and len(pairs) == 4 + 4 * 3, sorted(pairs)
    for name, (got, value) in pairs.items():
        assert got.dtype == value.dtype == torch.float32 and got.shape == value.shape, name
        assert torch.equal(bits(got), bits(value)), f"{name} differs: {got} {value}"
    for group in of_optimizer["param_groups"]:
        assert math.isclose(group["lr"], 0.01) and len(group["params"]) == 4, group


def main():
    kind, begin, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = dict(zip(sys.argv[4::2], sys.argv[5::2]))
    torch.set_num_threads(1)
    store = join()
    model, optimizer, share, shares = build(kind)
    if "load" in options:
        train(model, optimizer, share, shares, 50)
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optim": of_optimizer}
        dcp.load(state, checkpoint_id=options["load"])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    if "expect" in options:
        differences(model, optimizer, options["expect"])
    losses = [train(model, optimizer, share, shares, step) for step in range(begin, end)]
    if "save" in options:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=options["save"])
    if dist.get_rank() == 0:
        print("\n".join(f"{loss:.17g}" for loss in losses), flush=True)
    leave(store)


if __name__ == "__main__":
    main()
