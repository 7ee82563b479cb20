"""Programs for Accelerate's plugin of FSDP2, and for the Trainer of transformers with it, train the same with this library.

Each library reads what the other has saved.
"""

import json
import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, os.pardir, "ci", "tests"))

pytest.importorskip("accelerate")
from peer_ranks import run_ranks  # noqa: E402


def run(program, *arguments):
    said = run_ranks(os.path.join(HERE, program), 2, [str(each) for each in arguments])[0]
    return json.loads(said.splitlines()[-1])


@pytest.mark.parametrize("precision, extras", [("bf16", "again,whole"), ("no", "ram,tied")])
def test_accelerates_plugin_of_fsdp2_trains_the_same_and_reads_what_either_saved(precision, extras, tmp_path):
    program, theirs, ours = "accelerate_program.py", tmp_path / "theirs", tmp_path / "ours"
    expected = run(program, "theirs", precision, extras, theirs, theirs)
    assert expected["again"] == expected["second"]
    assert run(program, "ours", precision, extras, ours, theirs) == expected
    assert run(program, "theirs", precision, extras, tmp_path / "more", ours) == expected


def test_the_trainer_with_fsdp2_logs_the_same_and_resumes_from_what_either_saved(tmp_path):
    program, theirs, ours = "trainer_program.py", tmp_path / "theirs", tmp_path / "ours"
    expected = run(program, "theirs", theirs, "")
    assert len(expected) == 6
    assert run(program, "ours", ours, "") == expected
    assert run(program, "ours", tmp_path / "more", theirs / "checkpoint-3") == expected
    assert run(program, "theirs", tmp_path / "even more", ours / "checkpoint-3") == expected
