"""A program for Lightning's ModelParallelStrategy trains the same with this library. Each loads what the other has saved."""

import pytest
from several_programs import run_programs

pytest.importorskip("lightning")

PROGRAM = "lightning_program.py"
MODULES = ["lightning.pytorch.strategies", "transformers.models.llama.modeling_llama", "torch._dynamo"]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Of each precision: what the library says that begins, and what the other one says that goes on from its checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def first(precision):
        return [PROGRAM, precision, folder / precision, ""]

    def second(precision):
        return [PROGRAM, precision, folder / f"{precision}-more", folder / precision]

    (fp32,) = run_programs("theirs", MODULES, first("fp32"))
    fp32_more, bf16 = run_programs("ours", MODULES, second("fp32"), first("bf16"))
    (bf16_more,) = run_programs("theirs", MODULES, second("bf16"))
    return {"fp32": (fp32, fp32_more), "bf16": (bf16, bf16_more)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lightnings_model_parallel_strategy_trains_the_same_and_resumes_from_what_the_other_saved(precision, said):
    first, second = said[precision]
    assert len(first) == 24
    assert second == first
