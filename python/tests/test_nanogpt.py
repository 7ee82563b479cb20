"""A script in the manner of nanoGPT, before and after its move from FSDP2: one line is another."""

import json
import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, os.pardir, "ci", "tests"))
from peer_ranks import run_ranks  # noqa: E402


def run(*arguments):
    program = os.path.join(HERE, "nanogpt_program.py")
    return json.loads(run_ranks(program, 2, [str(each) for each in arguments])[0].splitlines()[-1])


@pytest.mark.parametrize("precision, again, saved", [("fp32", "theirs", "ours"), ("bf16", "ours", "theirs")])
def test_a_nanogpt_has_fsdp2s_losses_and_norms_and_resumes_from_what_the_other_saved(precision, again, saved, tmp_path):
    folders = {name: tmp_path / name for name in ("theirs", "ours", "more")}
    for folder in folders.values():
        folder.mkdir()
    expected = run("theirs", precision, folders["theirs"], "")
    assert run("ours", precision, folders["ours"], "") == expected
    assert run(again, precision, folders["more"], folders[saved]) == expected[3:]
