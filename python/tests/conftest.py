"""Models and plain runs that the tests compare with."""

import os
import sys

import pytest
import torch

sys.path[:0] = [os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), os.pardir, os.pardir, "ci", "tests")]
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
