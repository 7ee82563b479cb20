"""Loading an optimizer's state casts NAdam's mu_product to the dtype of the parameter."""

import copy
import sys

import torch


def main():
    torch.manual_seed(0)
    start = torch.nn.Parameter(torch.randn(512).bfloat16())
    gradients = [torch.randn(512).bfloat16() for _ in range(20)]

    def step(parameter, optimizer, gradient):
        parameter.grad = gradient.clone()
        optimizer.step()

    one = torch.nn.Parameter(start.detach().clone())
    optimizer = torch.optim.NAdam([one], lr=1e-1)
    resumed_at = []
    for i, gradient in enumerate(gradients):
        if i == 1:
            two = torch.nn.Parameter(one.detach().clone())
            resumed = torch.optim.NAdam([two], lr=1e-1)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            before, after = optimizer.state[one]["mu_product"], resumed.state[two]["mu_product"]
            print(f"mu_product before saving: {before.item():.9g} ({before.dtype})")
            print(f"mu_product after loading: {after.item():.9g} ({after.dtype})")
            resumed_at = [before.item(), after.item()]
        if i >= 1:
            step(two, resumed, gradient)
        step(one, optimizer, gradient)
    differ = int((one != two).sum())
    print(f"{differ} of {one.numel()} values of the resumed run differ from the run that was not interrupted")
    holds = differ > 0 and resumed_at[0] != resumed_at[1]
    print("the finding holds" if holds else "the finding does not hold")
    return int(holds)


if __name__ == "__main__":
    sys.exit(main())
