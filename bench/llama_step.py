"""The step of a Llama of transformers from Python, by one contestant after the other, each in processes of its own.

    PYTHONPATH=build/python python bench/llama_step.py plain,fsdp2,ours,megatron [--device cuda] [--model llama0.9b]

plain is PyTorch's step without sharding, fsdp2 is PyTorch's fully_shard, ours is shardproof.fsdp.fully_shard, and megatron is
Megatron-FSDP, which is left out where it is not installed. With --precision bf16 forwards and backwards are in bfloat16, and
parameters, sums of gradients and updates in float32. Losses have to agree with those of the first contestant, except those of
megatron, which clips no gradients. With --ranks 2 and more the ranks share the GPU: each says that it is a host of its own, so
NCCL takes sockets between them, and what is computed counts, not how fast.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time

SIZES = {
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
                 vocab_size=256),
    "llama0.9b": dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8,
                      intermediate_size=5632, vocab_size=32000),
}
BATCHES = {"tiny": (2, 32), "llama0.9b": (8, 1024)}
WARM_UP = 4
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 0.02}  # relative; bf16 rounds at other places in each contestant
NO_GPU = "CUDA cannot be used here: no GPU"


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestants", help="separated by commas, out of " + ", ".join(CONTESTANTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", choices=SIZES, default="llama0.9b")
    parser.add_argument("--precision", choices=LOSS_TOLERANCE, default="bf16")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="after %d of warm-up" % WARM_UP)
    parser.add_argument("--json", metavar="FILE", help="also write one JSON object for each contestant")
    parser.add_argument("--profile", metavar="PREFIX", help="also write PREFIX-CONTESTANT.json: operators, kernels, memory")
    options = parser.parse_args(arguments)
    for name in options.contestants.split(","):
        if name not in CONTESTANTS:
            parser.error(f"there is no contestant {name}")
    return options


# Contestants: each returns the model, its optimizer, what clips gradients, and the context of a forward.

def fused_adamw(model):
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def clips(model):
    import torch

    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def mesh_of(options, *more):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(options.device, (options.ranks, *(1 for _ in more)), mesh_dim_names=("dp_shard", *more))


def sharding_options(options):
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return {"mesh": mesh_of(options), "mp_policy": bf16 if options.precision == "bf16" else MixedPrecisionPolicy()}


def plain(options, model):
    import torch

    autocast = torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16")
    return model, fused_adamw(model), clips(model), autocast


def fsdp2(options, model):
    from torch.distributed.fsdp import fully_shard

    given = sharding_options(options)
    for block in model.model.layers:
        fully_shard(block, **given)
    fully_shard(model, **given)
    return model, fused_adamw(model), clips(model), contextlib.nullcontext()


def ours(options, model):
    from shardproof.fsdp import fully_shard

    given = sharding_options(options)
    for block in model.model.layers:
        fully_shard(block, **given)
    fully_shard(model, prefetch_forward=1, prefetch_backward=1, **given)
    return model, fused_adamw(model), clips(model), contextlib.nullcontext()


def megatron(options, model):
    import torch
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    block = type(model.model.layers[0])
    if options.precision == "bf16":
        model = model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    model = fully_shard_model(module=model, fsdp_unit_modules=[block], device_mesh=mesh_of(options, "tp"),
                              dp_shard_dim="dp_shard", tp_dim="tp", zero_dp_strategy=3, mixed_precision_policy=policy)
    return model, fully_shard_optimizer(fused_adamw(model)), lambda: None, contextlib.nullcontext()


CONTESTANTS = {"plain": plain, "fsdp2": fsdp2, "ours": ours, "megatron": megatron}


def why_left_out(name, options):
    if name == "megatron" and importlib.util.find_spec("megatron_fsdp") is None:
        return "megatron_fsdp is not installed"
    if name == "megatron" and options.device == "cpu":
        return "it asks for a GPU"
    return "it is for one rank" if name == "plain" and options.ranks > 1 else None


# One rank of one contestant.

def worker(name, options):
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    on_gpu = options.device == "cuda"
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    with torch.device(options.device):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False, **SIZES[options.model])).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    generator = torch.Generator().manual_seed(1 + rank)
    shape = BATCHES[options.model]
    batches = [torch.randint(0, SIZES[options.model]["vocab_size"], shape, generator=generator).to(options.device)
               for _ in range(2)]
    model, optimizer, clip, forward = CONTESTANTS[name](options, model)

    def finish():
        if on_gpu:
            torch.cuda.synchronize()

    def step(tokens):
        with forward:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    times, losses = [], []
    for index in range(WARM_UP + options.steps):
        finish()
        begun = time.perf_counter()
        loss = step(batches[index % 2])
        finish()
        times.append((time.perf_counter() - begun) * 1e3)
        losses.append(loss.item())
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    if rank == 0:
        times = sorted(times[WARM_UP:])
        print(json.dumps({"type": "python_step", "contestant": name, "model": options.model, "precision": options.precision,
                          "device": options.device, "ranks": options.ranks, "parameters": count,
                          "step_ms_median": statistics.median(times), "step_ms_min": times[0], "step_ms_max": times[-1],
                          "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0,
                          "losses": (mean / options.ranks).tolist()}), flush=True)
    if options.profile:
        with torch.profiler.profile(profile_memory=True) as profile:
            step(batches[0])
            finish()
        if rank == 0:
            profile.export_chrome_trace(f"{options.profile}-{name}.json")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a normal exit


# All of them.

def run(name, arguments, ranks):
    """What the contestant prints as JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=str(port), SHARDPROOF_CONTESTANT=name, GLOO_SOCKET_IFNAME="lo")
        if ranks > 1:
            environment |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        processes.append(subprocess.Popen([sys.executable, __file__, *arguments], env=environment, stdout=subprocess.PIPE,
                                          text=True))
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return None
    return next(json.loads(line) for line in said[0].splitlines() if line.startswith('{"type"'))


def gpu_is_there():
    """Asks in a process of its own, so that this one takes no memory of the GPU."""
    return subprocess.run([sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"],
                          check=False).returncode == 0


def main(arguments):
    options = parse(arguments)
    if "SHARDPROOF_CONTESTANT" in os.environ:
        return worker(os.environ["SHARDPROOF_CONTESTANT"], options)
    if options.device == "cuda" and not gpu_is_there():
        print(NO_GPU)
        return 2
    first, held = None, True
    for name in options.contestants.split(","):
        why = why_left_out(name, options)
        if why:
            print(f"{name}: left out: {why}", flush=True)
            continue
        row = run(name, arguments, options.ranks)
        if row is None:
            print(f"{name}: failed; its errors are above", flush=True)
            held = False
            continue
        first = first or row
        distances = [abs(a - b) / abs(b) for a, b in zip(row["losses"], first["losses"])]
        farthest = next((each for each in distances if each != each), max(distances))  # NaN is the farthest
        agrees = name == "megatron" or farthest <= LOSS_TOLERANCE[options.precision]
        held &= agrees
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(row, loss_difference_max=farthest)) + "\n")
        print(f"{name}: {row['step_ms_median']:.1f} ms a step ({row['step_ms_min']:.1f} to {row['step_ms_max']:.1f}), peak "
              f"{row['peak_mib']:.0f} MiB, losses {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}, {farthest:.1e} from "
              f"those of {first['contestant']}{'' if agrees else ': TOO FAR'}", flush=True)
    return 0 if held and first else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
