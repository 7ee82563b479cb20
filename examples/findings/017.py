"""set_state_dict with broadcast_from_rank0 hangs on what get_state_dict gave: other ranks have no dict, and skip the model."""

import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

RANKS = 2


def rank_main(rank, store):
    limit = timedelta(seconds=10)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit)
    torch.manual_seed(rank)  # each rank begins with other values, as a rank does that is to be loaded
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=gather)
    print(f"rank {rank}: get_state_dict gave {len(model_state)} tensors of the model", flush=True)
    load = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    try:
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=load)
        result = "loaded"
    except RuntimeError as error:
        result = f"RuntimeError: {str(error).splitlines()[0][-100:]}"
    print(f"rank {rank}: {result}; weight {model.weight.flatten().tolist()}", flush=True)
    sys.exit(int("RuntimeError" in result))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(rank_main, args=(folder + "/store",), nprocs=RANKS, start_method="fork")
        except torch.multiprocessing.ProcessExitedException:
            sys.exit("the finding holds")
    print("the finding does not hold")
