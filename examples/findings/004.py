"""parallelize_module unties tied weights, and says nothing."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2, dtype=torch.float64)
        self.head = torch.nn.Linear(2, 4, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(torch.tensor([0, 1, 2])), torch.tensor([1, 2, 3]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    plain = Net()
    model = Net()
    model.load_state_dict(plain.state_dict())
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)  # both cut the weight's rows, so the tie could stay
    expected, found = train(plain), train(model)
    tied = model.head.weight is model.embed.weight
    count = len(list(model.parameters()))
    print(f"rank {rank}: tied {tied}, {count} parameters; losses {found}, the plain model's {expected}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(max(abs(a - b) for a, b in zip(expected, found)) > 1e-9))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.start_processes(rank_main, args=(folder + "/store",), nprocs=RANKS, start_method="fork")
        except torch.multiprocessing.ProcessExitedException:
            sys.exit("the finding holds")
    print("the finding does not hold")
