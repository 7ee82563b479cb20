"""A program for Lightning's ModelParallelStrategy trains the same with this library. Each loads what the other has saved."""

import json
import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, os.pardir, "ci", "tests"))

pytest.importorskip("lightning")
from peer_ranks import run_ranks  # noqa: E402


@pytest.mark.parametrize("precision, first, second", [("fp32", "theirs", "ours"), ("bf16", "ours", "theirs")])
def test_lightnings_model_parallel_strategy_trains_the_same_and_resumes_from_what_the_other_saved(
    precision, first, second, tmp_path
):
    def run(whose, folder, loaded=""):
        said = run_ranks(os.path.join(HERE, "lightning_program.py"), 2, [whose, precision, str(folder), str(loaded)])[0]
        return json.loads(said.splitlines()[-1])

    expected = run(first, tmp_path / "first")
    assert len(expected) == 24
    assert run(second, tmp_path / "second", tmp_path / "first") == expected
