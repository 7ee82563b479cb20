"""PyTorch's own strategies on the model, weights and data of `shardproof bench`. One JSON line on stdout.

Usage: peer.py SPEC, where SPEC is a JSON object: strategy (ddp, ddp_zero1, fsdp2, fsdp2_zero2, dtensor, python_gloo), ours (the
strategy of python_gloo), ranks, axes (of the mesh: [name, size], the names dp_replicate, dp_shard and tp), sequence_parallel,
expert_ranks, layers, hidden, heads, vocab, seq, batch, experts (0: a block has one MLP), lr, steps, warmup, device (cpu, cuda),
bf16, data (a file: float32 parameters in the order of `parameters`, then int64 tokens [steps, batch, seq + 1]).

- `ddp_zero1` is DDP with ZeroRedundancyOptimizer, which updates after the backward: in its mode that overlaps both, the first
  steps update nothing.
- `fsdp2` on dp_replicate and dp_shard is HSDP.
- `fsdp2_zero2` is `fsdp2` with reshard_after_forward=False: what a forward gathered stays whole until its backward, as in
  FSDP1's SHARD_GRAD_OP.
- `dtensor` cuts along tp with parallelize_module, and shards that as `fsdp2` does.
- `fsdp2` with expert_ranks lets so many neighbours along dp_shard have different experts, as torchtitan does: rows go to the
  ranks of their experts by all_to_all_single, and fully_shard cuts experts over the ranks that hold the same ones.
- `python_gloo` is Shardproof in the place of FSDP2, over Gloo as well.

Starts its own ranks on loopback: over gloo, one thread each, or over nccl, a GPU each.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time


def file_of_package(name):
    """A module of this tree's package that needs PyTorch alone, whatever version of the package is installed."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python", "shardproof", "check", name + ".py")
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def parameters(spec):
    hidden, out = spec["hidden"], []
    out.append(("tok.weight", (spec["vocab"], hidden)))
    out.append(("pos.weight", (spec["seq"], hidden)))
    for i in range(spec["layers"]):
        block = f"blocks.{i}."
        out += [(block + "ln1.weight", (hidden,)), (block + "ln1.bias", (hidden,))]
        out += [(block + name + ".weight", (hidden, hidden)) for name in ("wq", "wk", "wv", "wo")]
        out += [(block + "ln2.weight", (hidden,)), (block + "ln2.bias", (hidden,))]
        if spec["experts"]:
            out.append((block + "router.weight", (spec["experts"], hidden)))
            out.append((block + "experts.gate_up_proj", (spec["experts"], 2 * hidden, hidden)))
            out.append((block + "experts.down_proj", (spec["experts"], hidden, hidden)))
        else:
            out += [(block + "fc1.weight", (4 * hidden, hidden)), (block + "fc2.weight", (hidden, 4 * hidden))]
    out += [("lnf.weight", (hidden,)), ("lnf.bias", (hidden,)), ("head.weight", (spec["vocab"], hidden))]
    return out


def make_model(spec):
    import torch
    from torch import nn
    from torch.nn import functional as F

    hidden, heads = spec["hidden"], spec["heads"]  # of the whole model; a rank along tp has some of the heads

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(spec["experts"], 2 * hidden, hidden))
            self.down_proj = nn.Parameter(torch.zeros(spec["experts"], hidden, hidden))

        def forward(self, x, experts, weights):
            order, counts = experts.flatten().argsort(stable=True), experts.flatten().bincount(minlength=len(self.down_proj))
            rows = x.index_select(0, order // experts.shape[1]).split(counts.tolist())
            given = []
            for own, gate_up, down in zip(rows, self.gate_up_proj.unbind(), self.down_proj.unbind()):
                gate, up = (own @ gate_up.T).chunk(2, -1)
                given.append((F.silu(gate) * up) @ down.T)
            given = torch.cat(given).index_select(0, order.argsort())
            return (given.view(*experts.shape, hidden) * weights.unsqueeze(-1)).sum(1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            for name in ("wq", "wk", "wv", "wo"):
                setattr(self, name, nn.Linear(hidden, hidden, bias=False))
            if spec["experts"]:
                self.router, self.experts = nn.Linear(hidden, spec["experts"], bias=False), Experts()
                return
            self.fc1 = nn.Linear(hidden, 4 * hidden, bias=False)
            self.fc2 = nn.Linear(4 * hidden, hidden, bias=False)

        def forward(self, x):
            y = self.ln1(x)
            q, k, v = (w(y).unflatten(-1, (-1, hidden // heads)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.wo(mixed.transpose(1, 2).flatten(2))
            return x + self.mlp(self.ln2(x))

        def mlp(self, x):
            if not spec["experts"]:
                return self.fc2(F.gelu(self.fc1(x)))
            rows = x.flatten(0, 1)
            weights, experts = self.router(rows).softmax(-1).topk(2)
            return self.experts(rows, experts, weights / weights.sum(-1, keepdim=True)).view_as(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok = nn.Embedding(spec["vocab"], hidden)
            self.pos = nn.Embedding(spec["seq"], hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(spec["layers"]))
            self.lnf = nn.LayerNorm(hidden)
            self.head = nn.Linear(hidden, spec["vocab"], bias=False)

        def forward(self, tokens):
            x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.lnf(x))

    return Model()


def load(spec, model):
    """Fills the model and returns the tokens, without the memory of the file."""
    import torch

    with open(spec["data"], "rb") as file:
        blob = bytearray(file.read())
    own, at = dict(model.named_parameters()), 0
    with torch.no_grad():
        for name, shape in parameters(spec):
            count = own[name].numel()
            own[name].copy_(torch.frombuffer(blob, dtype=torch.float32, count=count, offset=at).view(shape))
            at += 4 * count
    return torch.frombuffer(blob, dtype=torch.int64, offset=at).view(-1, spec["batch"], spec["seq"] + 1).clone()


def memory_mib(key):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def count_collectives():
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        calls, bytes = 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if DTensor in types:
                return NotImplemented  # it calls again, with the tensors of this rank
            result = func(*args, **(kwargs or {}))
            name = func._schema.name
            space, _, op = name.partition("::")
            if space in ("c10d", "_c10d_functional") and op not in ("wait_tensor", "_wrap_tensor_autograd"):
                sizes = [0]

                def visit(value):
                    if isinstance(value, torch.Tensor):
                        sizes.append(value.numel() * value.element_size())
                    elif isinstance(value, (list, tuple)):
                        for item in value:
                            visit(item)

                visit([args, result])
                self.calls += 1
                self.bytes += max(sizes)
            return result

    return Counter()


def cut(model, mesh, sequence_parallel):
    """Tensor parallelism as torchtitan writes it down: logits stay cut, and norms work on pieces of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.blocks)):
        plan.update({f"blocks.{i}.{name}": ColwiseParallel() for name in ("wq", "wk", "wv", "fc1")})
        plan.update({f"blocks.{i}.{name}": RowwiseParallel(output_layouts=between) for name in ("wo", "fc2")})
        if sequence_parallel:
            plan.update({f"blocks.{i}.{name}": SequenceParallel() for name in ("ln1", "ln2")})
    if sequence_parallel:
        plan["lnf"] = SequenceParallel()
        plan["pos"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    parallelize_module(model, mesh, plan)
    if sequence_parallel:
        # One gather serves all layers behind a norm.
        for block in model.blocks:
            for norm in (block.ln1, block.ln2):
                norm.register_forward_hook(lambda module, inputs, output: output.redistribute(placements=[Replicate()]))


def share_experts(spec, model, mesh, options):
    """Leaves each rank its experts. Returns the parameters that nobody else has, so that there is nothing to shard."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks, shared = mesh.size(), spec["expert_ranks"]
    expert_mesh = init_device_mesh(spec["device"], (ranks // shared, shared), mesh_dim_names=("dp_shard", "ep"))
    alone = set()
    for block in model.blocks:
        module = block.experts
        exchanged = file_of_package("expert_exchange").exchanged
        module.forward = exchanged(module.forward, len(module.down_proj), expert_mesh.get_group("ep"))
        for name, parameter in list(module.named_parameters()):
            own = parameter.detach().chunk(shared)[expert_mesh.get_local_rank("ep")].clone()
            setattr(module, name, torch.nn.Parameter(own))
        if shared < ranks:
            fully_shard(module, **dict(options, mesh=expert_mesh["dp_shard"]))
            module.set_gradient_divide_factor(ranks)
            module.set_force_sum_reduction_for_comms(True)
        else:
            alone.update(module.parameters())
    for parameter in alone:
        parameter.register_hook(lambda gradient: gradient.div_(ranks))
    return alone


def wrap(spec, model):
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    if spec["strategy"] in ("ddp", "ddp_zero1"):
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = [name for name, size in spec["axes"]]
    mesh = init_device_mesh(spec["device"], [size for name, size in spec["axes"]], mesh_dim_names=names)
    if "tp" in names:
        cut(model, mesh["tp"], spec["sequence_parallel"])
    shards = tuple(name for name in ("dp_replicate", "dp_shard") if name in names)
    if not shards:
        return model
    mesh = mesh[shards]
    if spec["strategy"] == "python_gloo":
        from shardproof.fsdp import fully_shard as shard

        for block in model.blocks:
            shard(block, mesh=mesh)
        return shard(model, mesh=mesh, strategy=spec["ours"])
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": bf16 if spec["bf16"] else MixedPrecisionPolicy()}
    if spec["strategy"] == "fsdp2_zero2":
        options["reshard_after_forward"] = False
    if spec["expert_ranks"] > 1:
        options["ignored_params"] = share_experts(spec, model, mesh, options)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def adamw(spec, model):
    """Fused, as `single` has it. One group for each kind of tensor, since it refuses lists that mix them."""
    import torch

    if spec["strategy"] == "ddp_zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # Each rank sends what it updated as one buffer, without a copy.
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=spec["lr"],
                                       fused=True)
    optim = torch.optim
    if spec["strategy"] == "python_gloo":
        from shardproof import fsdp as optim

    groups = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return optim.AdamW([{"params": group} for group in groups.values()], lr=spec["lr"], fused=True)


def part_of_batch(spec, rank):
    """Which part of the batch the rank has, and how many parts there are. Ranks along tp have the same part."""
    part, parts, stride = 0, 1, 1
    for name, size in reversed(spec["axes"]):
        if name != "tp":
            part += rank // stride % size * parts
            parts *= size
        stride *= size
    return part, parts


def train_step(spec, model, optimizer, tokens):
    """Returns the loss of this rank's part of a batch, detached."""
    import contextlib

    import torch
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.nn import functional as F

    autocast = spec["bf16"] and spec["strategy"].startswith("ddp")
    cuts_logits = any(name == "tp" for name, size in spec["axes"])
    optimizer.zero_grad()
    with torch.autocast(spec["device"], torch.bfloat16, enabled=autocast):
        logits = model(tokens[:, :-1].contiguous())
    with loss_parallel() if cuts_logits else contextlib.nullcontext():
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].reshape(-1))
        loss.backward()
    optimizer.step()
    loss = loss.detach()
    return loss.to_local() if cuts_logits else loss


def warm_up(spec):
    """Trains a toy for a step, so that the baseline of memory has what a first step imports and what products need."""
    import gc

    import torch

    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    ranks = spec["ranks"]
    toy = dict(spec, layers=1, hidden=8 * spec["heads"], vocab=16 * ranks, seq=8 * ranks)
    model = wrap(toy, make_model(toy).to(spec["device"]))
    tokens = torch.zeros(1, toy["seq"] + 1, dtype=torch.int64, device=spec["device"])
    train_step(toy, model, adamw(toy, model), tokens)
    del model
    gc.collect()


def worker(spec):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    on_gpu = spec["device"] == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    part, parts = part_of_batch(spec, rank)
    per = spec["batch"] // parts
    warm_up(spec)
    base = memory_mib("VmRSS")
    model = make_model(spec)
    tokens = load(spec, model).to(spec["device"])
    model = wrap(spec, model.to(spec["device"]))
    optimizer = adamw(spec, model)

    def finish():
        if on_gpu:
            torch.cuda.synchronize()

    def step(index):
        mine = tokens[index, part * per : (part + 1) * per]
        total = train_step(spec, model, optimizer, mine).double()
        dist.all_reduce(total)
        return total.item() / spec["ranks"]

    losses, times = [], []
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    for index in range(spec["warmup"] + spec["steps"]):
        dist.barrier()
        finish()
        start = time.perf_counter()
        losses.append(step(index))
        finish()
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else memory_mib("VmHWM") - base
    with count_collectives() as counter:
        step(len(losses) - 1)
    peaks = [None] * spec["ranks"]
    dist.all_gather_object(peaks, peak)
    if rank == 0:
        print(json.dumps({"step_ms": times[spec["warmup"] :], "losses": losses, "peak_mib": max(peaks),
                          "calls": counter.calls - 1, "bytes": counter.bytes - 8}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a normal exit


def main():
    spec = json.loads(sys.argv[1])
    if "RANK" in os.environ:
        return worker(spec)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(spec["ranks"]):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(spec["ranks"]), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(port), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        ranks.append(subprocess.Popen([sys.executable, __file__, sys.argv[1]], env=env))
    codes = [rank.wait() for rank in ranks]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
