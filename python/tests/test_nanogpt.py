"""A script in the manner of nanoGPT, before and after its move from FSDP2: one line is another."""

import pytest
from several_programs import run_programs

PROGRAM = "nanogpt_program.py"
MODULES = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Of each precision: what either library says, and what one says that goes on from what the other has saved."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def made(name):
        (folder / name).mkdir()
        return folder / name

    def program(precision, name, loaded=""):
        return [PROGRAM, precision, made(f"{name}-{precision}"), folder / f"{loaded}-{precision}" if loaded else ""]

    theirs = run_programs("theirs", MODULES, program("fp32", "theirs"), program("bf16", "theirs"))
    *ours, bf16 = run_programs(
        "ours", MODULES, program("fp32", "ours"), program("bf16", "ours"), program("bf16", "more", "theirs")
    )
    (fp32,) = run_programs("theirs", MODULES, program("fp32", "more", "ours"))
    return dict(zip(("fp32", "bf16"), zip(theirs, ours, (fp32, bf16))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_nanogpt_has_fsdp2s_losses_and_norms_and_resumes_from_what_the_other_saved(precision, said):
    theirs, ours, more = said[precision]
    assert ours == theirs
    assert more == theirs[3:]
