"""Names of torch that are not public and that several files use, or that differ between the versions of torch.

It needs PyTorch alone, as `shardproof.check` does.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Callable, Iterator

import torch

# Collectives of a process group in torch 2.11, and what newer torch calls them.
RENAMED = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}

# Since torch 2.15 FSDP2 keeps gradients in their own dtype, and reduces them in that of the parameters where it is told none.
KEEPS_GRADIENT_DTYPES = hasattr(torch.Tensor, "_has_grad_dtype_override")


def under_new_names(group: type) -> type:
    """A class of process groups, whose collectives newer torch finds, too."""
    for old, new in RENAMED.items():
        setattr(group, new, getattr(group, old))
    return group


def threaded_group() -> type:
    """Makes ranks of torch.distributed threads of this process, and returns the class of their process groups."""
    from torch.testing._internal.distributed import multi_threaded_pg

    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # newer torch's recorder cannot be attached to groups that Python implements
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    world = multi_threaded_pg._install_threaded_pg()
    if not hasattr(world, "comms"):
        world.comms = []  # torch 2.11's destroy_process_group reads it, and its threaded world lacks it
    group = multi_threaded_pg.ProcessLocalGroup
    group._device_types = [torch.device("cpu")]  # loading a whole state dict reads it, and it is empty
    return group


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor, and other tensors as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def check_graph_capture(optimizer: torch.optim.Optimizer) -> None:
    """Refuses what cannot be captured into a graph of a device, where one is being captured."""
    name = "_accelerator_graph_capture_health_check"  # newer torch's
    (getattr(optimizer, name, None) or optimizer._cuda_graph_capture_health_check)()


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Outside of what torch.func transforms, where process groups get tensors without memory."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def beneath_transforms(tensor: torch.Tensor) -> "list[torch.Tensor]":
    """What torch.func's transforms have wrapped, whose graphs a backward() outside of them goes through: value and tangent."""
    if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return []
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with outside_transforms():
        value, tangent = torch._VF._unpack_dual(tensor, 0)
    return [value] if tangent is None else [value, tangent]


def uncompiled(function: Callable) -> Callable:
    """A function of which, and below which, torch.compile sees nothing."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame

    @functools.wraps(function)
    def plainly(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    # As torch._dynamo.disable, which takes a second to import.
    set_code_exec_strategy(plainly.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return plainly
