"""A sample of test_verify_zoo.py, which runs by night: a dense model, one of experts, and one with an encoder and a decoder."""

import pytest

import shardproof

pytest.importorskip("transformers")
import mainstream  # noqa: E402


@pytest.mark.parametrize("name", ["Qwen3", "Mixtral", "T5"])
def test_a_mainstream_architecture_holds(name):
    report = shardproof.verify(*mainstream.made(name), cases=6, seed=2)
    assert report.cases == 6 and report.values > 50_000, str(report)
