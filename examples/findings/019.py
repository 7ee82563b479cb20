"""Asking for the state dict of an optimizer that has not stepped counts a step, so Adam's first update is another one."""

import sys

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict


def first_update(asks):
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if asks:
        get_state_dict(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model.weight.item() - 1.0, int(optimizer.state[model.weight]["step"])


def main():
    plain, asked = first_update(False), first_update(True)
    print(f"the first update: {plain[0]:.4f}, and the optimizer has counted {plain[1]} step")
    print(f"after get_state_dict: {asked[0]:.4f}, and it has counted {asked[1]} steps")
    failed = plain != asked
    print("the finding holds" if failed else "the finding does not hold")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
