"""torchtitan as programs of a CPU import it: without what it has for texts, boards and GPUs.

It is where ci/setup puts it, or in the environment.
"""

import sys
import types

import torch


def stand_in(name, *missing):
    """A module that torchtitan imports and that no program here calls."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(dict.fromkeys(missing))


stand_in("torch.utils.tensorboard", "SummaryWriter")
stand_in("datasets", "Dataset", "load_dataset")
stand_in("datasets.distributed", "split_dataset_by_node")
from torchtitan.tools import utils  # noqa: E402


class Device:
    """A CPU as torchtitan asks for a GPU, whose memory its log has beside each loss."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def get_device_name(self, device):
        return "CPU"

    def get_device_properties(self, device):
        return types.SimpleNamespace(total_memory=1 << 30)

    def current_device(self):
        return 0

    def memory_stats(self, device):
        return {}

    def empty_cache(self):
        pass

    reset_peak_memory_stats = empty_cache


# The type of the device is found as this file is imported, and the other files take it from here.
utils.device_type, utils.device_module = "cpu", Device()
from torchtitan.models.llama3 import config_registry  # noqa: E402, F401
