"""Models of shardproof.fsdp on rank-threads."""

import torch
from torch.distributed.tensor import distribute_tensor

import shardproof
import shardproof.fsdp
from models import Net
from shardproof.fsdp import fully_shard


def shard(comm, model, **options):
    comms = shardproof.MeshComm(comm, f"dp_shard={comm.size}")
    for block in model.blocks:
        fully_shard(block, mesh=comms, **options)
    return fully_shard(model, mesh=comms, **options)


HALF = shardproof.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def in_half(model):
    """A plain model in bfloat16 that has the values of the shards."""
    plain = Net().bfloat16()
    plain.load_state_dict(whole(model))
    return plain


def whole(model):
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def with_values(model, value):
    return {
        name: distribute_tensor(torch.full(p.shape, value), p.device_mesh, p.placements, src_data_rank=None)
        for name, p in model.named_parameters()
    }
