"""Made the checkpoints beside it, with the PyTorch release that each folder is named after.

    pip install torch==RELEASE numpy; python make.py RELEASE
For each kind (plain: one process; fsdp2: 2 ranks; fsdp2_tp: 2 x 2) a folder RELEASE/KIND of what `dcp.save` writes, and what it
holds in RELEASE/KIND.json: for each tensor its dtype, sizes and bytes, for each other value its repr.
"""
import json
import os
import subprocess
import sys

RANKS = {"plain": 1, "fsdp2": 2, "fsdp2_tp": 4}


def flat(value, path=()):
    if isinstance(value, dict):
        for key in value:
            yield from flat(value[key], path + (key,))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from flat(item, path + (index,))
    else:
        yield ".".join(map(str, path)), value


def described(value):
    import torch

    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return {"dtype": str(value.dtype), "sizes": list(value.shape), "bytes": data.hex()}


def plain():
    import torch

    g = torch.Generator().manual_seed(5)
    return {
        "model": {"bf16": torch.randn(3, 2, generator=g).bfloat16(), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4),
                  "view": torch.randn(6, generator=g)[1:4], "mask": torch.tensor([True, False])},
        "step": 7, "lr": 0.125, "name": "run", "betas": (0.9, 0.95), "flag": None,
    }


def sharded(kind):
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before 2.6
        from torch.distributed._composable.fsdp import fully_shard
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8 if kind == "fsdp2_tp" else 5))
    if kind == "fsdp2_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for parameter in model.parameters():  # 2.5 runs no forward of FSDP2 without a GPU
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optim": of_optimizer}


def worker(release, kind):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    assert torch.__version__.startswith(release), torch.__version__
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = plain() if kind == "plain" else sharded(kind)
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    folder = os.path.join(release, kind)  # `.metadata` has it: no path of the machine
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    expected = {name: described(value) for name, value in flat(state)}
    if dist.get_rank() == 0:
        with open(folder + ".json", "w", encoding="ascii") as file:
            json.dump(expected, file, indent=0, sort_keys=True)
    dist.barrier()
    os._exit(0)


def main():
    release = sys.argv[1]
    if "RANK" in os.environ:
        return worker(release, sys.argv[2])
    for port, (kind, ranks) in enumerate(RANKS.items(), 29611):
        started = []
        for rank in range(ranks):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
            started.append(subprocess.Popen([sys.executable, __file__, release, kind], env=env))
        if any([process.wait() for process in started]):
            sys.exit(f"{kind} failed")


if __name__ == "__main__":
    main()
