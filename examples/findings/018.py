"""A whole state dict of an optimizer without tensors (plain SGD) cannot be loaded."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict


def main():
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for momentum in (0.9, 0.0):
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
            options = StateDictOptions(full_state_dict=True)
            state = get_optimizer_state_dict(model, optimizer, options=options)
            try:
                set_optimizer_state_dict(model, optimizer, state, options=options)
                result = "loaded"
            except AssertionError as error:
                result = f"AssertionError: {error}"
                failed = True
            print(f"SGD with momentum {momentum}: {result}")
        dist.destroy_process_group()
    print("the finding holds" if failed else "the finding does not hold")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
