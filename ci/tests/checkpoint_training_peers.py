"""The run of properties/doubles/checkpoint_driver.cpp in PyTorch: FSDP2 (fsdp2), or FSDP2 over tensor parallelism (fsdp2_tp),
with AdamW; or one unsharded rank whose matrices are trained by Muon (muon: as PyTorch has it; muon_float32: its matrix products
are in float32 and not in bfloat16).

    python checkpoint_training_peers.py KIND BEGIN END [load FOLDER] [expect FILE] [save FOLDER]
A rank of `torch.distributed`. Loads into a model and optimizer of other values; `expect` compares all bits of both with a file
of dcp_to_torch_save. Rank 0 prints the losses of steps BEGIN to END, one a line.
"""
import math
import sys

import torch
import torch._dynamo  # which optimizers import when they are first called
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


class Float32:
    """The module torch, with float32 in the place of bfloat16."""

    def __getattr__(self, name):
        return torch.float32 if name == "bfloat16" else getattr(torch, name)


def muon_and_adamw(model, **settings):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, **settings), torch.optim.AdamW(others, lr=0.01, foreach=False)]


MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
OTHER_MUON = {"lr": 0.5, "weight_decay": 0.3, "momentum": 0.2, "nesterov": False, "ns_coefficients": (1.0, 2.0, 3.0),
              "eps": 0.1, "ns_steps": 2, "adjust_lr_fn": "match_rms_adamw"}


def build(kind, loads):
    torch.manual_seed(17)
    model, world = Mlp(), dist.get_world_size()
    if kind.startswith("muon"):
        if kind == "muon_float32":
            torch.Tensor.bfloat16 = torch.Tensor.clone  # by which Muon converts in torch 2.11, and nothing else does
            torch.optim._muon.torch = Float32()  # newer torch names the dtype there
        return model, muon_and_adamw(model, **(OTHER_MUON if loads else MUON)), 0, 1
    ranks = world  # that share the samples
    mesh = init_device_mesh("cpu", (world,))
    if kind == "fsdp2_tp":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
        mesh, ranks = both["dp"], world // 2
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)]
    return model, optimizers, mesh.get_local_rank(), ranks


def train(model, optimizers, share, shares, step):
    per = SAMPLES // shares
    first = torch.arange(per, dtype=torch.float32) + (step * SAMPLES + share * per)
    loss = model((first.unsqueeze(1) + torch.arange(6.0)).cos()).square().sum(1).mean()
    for optimizer in optimizers:  # not model.zero_grad(): behind a forward, the root's own parameters are the gathered ones
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def differences(kind, model, optimizers, file):
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    of_model, of_optimizer = get_state_dict(model, optimizers, options=whole)
    expected = torch.load(file, weights_only=False)
    if dist.get_rank() != 0:
        return
    bits = lambda tensor: tensor.contiguous().reshape(-1).view(torch.int32)  # noqa: E731
    pairs = {name: (of_model[name], value) for name, value in expected["model"].items()}
    for name, state in expected["optim"]["state"].items():
        pairs.update({f"{name}.{slot}": (of_optimizer["state"][name][slot], value) for slot, value in state.items()})
    states = 2 * 1 + 2 * 3 if kind.startswith("muon") else 4 * 3
    assert len(of_model) == 4 and len(pairs) == 4 + states, sorted(pairs)
    for name, (got, value) in pairs.items():
        assert got.dtype == value.dtype == torch.float32 and got.shape == value.shape, name
        assert torch.equal(bits(got), bits(value)), f"{name} differs: {got} {value}"
    if kind.startswith("muon"):
        same_settings(optimizers, muon_and_adamw(model, **MUON))
        return
    for group in of_optimizer["param_groups"]:
        assert math.isclose(group["lr"], 0.01) and len(group["params"]) == 4, group


def same_settings(optimizers, expected):
    """Every setting that was loaded is that of an optimizer that PyTorch made with the numbers of the saved run."""
    for one, other in zip(optimizers, expected):
        for group, wanted in zip(one.param_groups, other.param_groups, strict=True):
            for name in wanted:
                if name not in ("params", "foreach"):
                    assert type(group[name]) is type(wanted[name]) and group[name] == wanted[name], (name, group[name])


def main():
    kind, begin, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = dict(zip(sys.argv[4::2], sys.argv[5::2]))
    torch.set_num_threads(1)
    store = join()
    model, optimizers, share, shares = build(kind, "load" in options)
    if "load" in options:
        train(model, optimizers, share, shares, 50)
        of_model, of_optimizer = get_state_dict(model, optimizers)
        state = {"model": of_model, "optim": of_optimizer}
        dcp.load(state, checkpoint_id=options["load"])
        set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
    if "expect" in options:
        differences(kind, model, optimizers, options["expect"])
    losses = [train(model, optimizers, share, shares, step) for step in range(begin, end)]
    if "save" in options:
        of_model, of_optimizer = get_state_dict(model, optimizers)
        dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=options["save"])
    if dist.get_rank() == 0:
        print("\n".join(f"{loss:.17g}" for loss in losses), flush=True)
    leave(store)


if __name__ == "__main__":
    main()
