"""What real PyTorch writes and reads, against `shardproof checkpoint`. A rank of `torch.distributed`; see checkpoint_test.py.

    python checkpoint_peers.py save|load KIND FOLDER
KIND is plain (a dict of odd tensors and values), fsdp2, hsdp or fsdp2_tp. `load` takes the file of expected values last. It
loads FOLDER into a model of other values, under as many ranks as the environment says, and exits with 0 if every bit is that
of the model that was saved.
"""
import sys

import torch
import torch._dynamo  # which optimizers import when they are first called
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from peer_ranks import join, leave


def plain(seed):
    g = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "bf16": torch.randn(5, 3, generator=g).bfloat16(), "scalar": torch.tensor(float(seed)),
            "empty": torch.empty(0, 4), "int": torch.arange(seed, seed + 7), "bool": torch.tensor([True, False, seed > 5]),
            "transposed": torch.randn(4, 6, generator=g).t(), "view": torch.randn(10, generator=g)[2:7],
            "double": torch.randn(3, 2, 2, 2, generator=g, dtype=torch.float64),
        },
        "step": seed, "lr": 0.1 * seed, "name": f"run {seed}", "betas": (0.9, 0.95), "history": [1, 2, {"deep": seed}],
        "flag": None, "rng": torch.get_rng_state(),
    }


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 10)
        self.two = nn.Linear(10, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.norm(self.two(torch.relu(self.one(x))))


def build(kind, seed):
    torch.manual_seed(seed)
    model = Model()
    model.steps += seed
    world = dist.get_world_size()
    if kind == "fsdp2_tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"one": ColwiseParallel(), "two": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), foreach=False)
    model(torch.ones(4, 6) * seed).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state(kind, seed):
    if kind == "plain":
        return plain(seed), None, None
    model, optimizer = build(kind, seed)
    m, o = get_state_dict(model, optimizer)
    return {"model": m, "optim": o}, model, optimizer


def flat(value, prefix=""):
    if isinstance(value, dict):
        for key in value:
            yield from flat(value[key], f"{prefix}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from flat(item, f"{prefix}.{i}")
    else:
        yield prefix, value.full_tensor() if hasattr(value, "full_tensor") else value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return (a.dtype == b.dtype and a.shape == b.shape
                and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)))
    return type(a) is type(b) and a == b


def main():
    action, kind, folder = sys.argv[1:4]
    torch.set_num_threads(1)
    store = join()
    if action == "save":
        saved, _, _ = state(kind, 3)
        dcp.save(saved, checkpoint_id=folder)
        expected = dict(flat(saved))
        if dist.get_rank() == 0:
            torch.save(expected, folder + ".expected")
    else:
        expected = torch.load(sys.argv[4], weights_only=False)
        loaded, model, optimizer = state(kind, 11)
        dcp.load(loaded, checkpoint_id=folder)
        if model is not None:
            set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
            m, o = get_state_dict(model, optimizer)
            loaded = {"model": m, "optim": o}
        got = dict(flat(loaded))
        wrong = [k for k in expected if k not in got or not same(expected[k], got[k])] + [k for k in got if k not in expected]
        if wrong:
            sys.exit(f"differ: {wrong[:5]} {[(expected.get(k), got.get(k)) for k in wrong[:2]]}")
    leave(store)


if __name__ == "__main__":
    main()
