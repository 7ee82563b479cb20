"""Programs for Accelerate's plugin of FSDP2 train with this library as they do with FSDP2, and read each other's states."""

import json
import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, os.pardir, "ci", "tests"))

pytest.importorskip("accelerate")
from peer_ranks import run_ranks  # noqa: E402


def run(*arguments):
    said = run_ranks(os.path.join(HERE, "accelerate_program.py"), 2, [str(each) for each in arguments])[0]
    return json.loads(said.splitlines()[-1])


@pytest.mark.parametrize("precision, extras", [("bf16", "again,whole"), ("no", "ram,tied")])
def test_accelerates_plugin_of_fsdp2_trains_the_same_and_reads_what_either_saved(precision, extras, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    expected = run("theirs", precision, extras, theirs, theirs)
    assert expected["again"] == expected["second"]
    assert run("ours", precision, extras, ours, theirs) == expected
    assert run("theirs", precision, extras, tmp_path / "more", ours) == expected
