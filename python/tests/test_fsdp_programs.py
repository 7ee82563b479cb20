"""Programs of FSDP2's users (fsdp_training.py, fsdp_models.py) compute the same with this library, in a process group."""

import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, os.pardir, "ci", "tests"))

import shardproof.check as check  # noqa: E402
from peer_ranks import run_ranks  # noqa: E402
from shardproof.check.engines import ENGINES  # noqa: E402


@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_of_fsdp2_compute_the_same_after_a_change_of_the_import(ranks):
    run_ranks(os.path.join(HERE, "gloo_ranks.py"), ranks, ["programs"])


def test_drawn_models_histories_and_checkpoints_hold():
    report = check(ENGINES["shardproof-fsdp"], cases=12, seed=5, ranks="processes")
    assert report.ok and report.held >= 11 and report.blind == 0, str(report)
