"""The fused SGD with momentum, on a CPU, keeps memory that nobody has written as its momenta where the first step overflows."""

import sys

import torch


def momenta():
    """Of a parameter whose first gradient is infinite, and whose second one is 2, behind a GradScaler."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    waste = [torch.full((1000,), 7.0) for _ in range(100)]
    del waste  # what is allocated next has this
    for factor in (float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return optimizer.state[parameter]["momentum_buffer"]


def main():
    found = momenta().unique().tolist()
    print(f"momenta after one step that counts: {found}, and they should be [2.0]")
    holds = found != [2.0]
    print("the finding holds" if holds else "the finding does not hold")
    return int(holds)


if __name__ == "__main__":
    sys.exit(main())
