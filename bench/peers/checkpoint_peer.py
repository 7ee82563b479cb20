"""PyTorch's distributed checkpoint on the model of `shardproof bench checkpoint`, FSDP2 and AdamW. One JSON line on stdout.

Usage: checkpoint_peer.py SPEC, a JSON object: ranks, load_ranks, layers, hidden, heads, vocab, seq, batch, repeats, folder.
Times are milliseconds until the last rank is done, fsync included, of dcp.save, dcp.async_save (blocking part) and dcp.load
alone: making and setting the state dicts is not counted. The first repeat is not kept.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import peer


def build(spec, seed):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = peer.make_model(spec)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)


def train(spec, model, optimizer, step):
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, spec["vocab"], (spec["batch"], spec["seq"] + 1), generator=generator)
    mine = tokens[rank * (spec["batch"] // world) : (rank + 1) * (spec["batch"] // world)]
    optimizer.zero_grad()
    loss = F.cross_entropy(model(mine[:, :-1].contiguous()).flatten(0, 1), mine[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / world


def repeat(times, timed, untimed=lambda index: None):
    import torch.distributed as dist

    kept = []
    for index in range(times + 1):
        dist.barrier()
        start = time.perf_counter()
        blocked = timed(index)
        if blocked is None:
            dist.barrier()
            blocked = (time.perf_counter() - start) * 1e3
        kept.append(blocked)
        untimed(index)
    return kept[1:]


def save(spec, state, result):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    folder, futures = spec["folder"], []

    def writer(kind, index):
        return dcp.FileSystemWriter(f"{folder}/{kind}{index}", sync_files=True)

    def remove(kind, index):
        dist.barrier()
        if dist.get_rank() == 0 and (kind, index) != ("save", 0):
            shutil.rmtree(f"{folder}/{kind}{index}")
        dist.barrier()

    def blocking(index):
        dcp.save(state, storage_writer=writer("save", index))

    def background(index):
        start = time.perf_counter()
        futures.append(dcp.async_save(state, storage_writer=writer("async", index)))
        return (time.perf_counter() - start) * 1e3

    def finish(index):
        futures.pop().result()
        remove("async", index)

    result["save"] = repeat(spec["repeats"], blocking, lambda index: remove("save", index))
    result["async_blocking"] = repeat(spec["repeats"], background, finish)


def worker(spec, loads):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = build(spec, 99 if loads else 1234)
    result = {}

    def state_of():
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optim": of_optimizer}

    train(spec, model, optimizer, 0)
    if not loads:
        train(spec, model, optimizer, 1)
        save(spec, state_of(), result)
    else:
        state = state_of()
        result["load"] = repeat(
            spec["repeats"],
            lambda index: dcp.load(state, storage_reader=dcp.FileSystemReader(spec["folder"] + "/save0")))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    result["loss"] = train(spec, model, optimizer, 2)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a normal exit


def launch(spec, ranks, loads):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(ranks):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                   OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", LOADS=str(int(loads)))
        started.append(subprocess.Popen([sys.executable, __file__, sys.argv[1]], env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"{ranks} ranks of {spec} failed")
    return json.loads(next(line for line in outputs[0].splitlines() if line.startswith("{")))


def main():
    spec = json.loads(sys.argv[1])
    if "RANK" in os.environ:
        return worker(spec, os.environ["LOADS"] == "1")
    result = launch(spec, spec["ranks"], False)
    path = spec["folder"] + "/save0"
    result["disk_bytes"] = sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path))
    same, other = launch(spec, spec["ranks"], True), launch(spec, spec["load_ranks"], True)
    shutil.rmtree(path)
    result["load"], result["load_resharded"] = same["load"], other["load"]
    result["losses"] = [result.pop("loss"), same["loss"], other["loss"]]
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
