"""torchtitan's Trainer, with FSDP2 and with this library in its place: one program, and each loads what the other saved."""

import importlib.util
import pathlib
import sys

import pytest
import torch
from several_programs import run_programs

TORCH = ".".join(torch.__version__.split(".")[:2])
# Where ci/setup puts it. FSDP2 looks for its package of types once, as it is imported.
sys.path += map(str, pathlib.Path(__file__).parents[2].glob(f"build-torchtitan-{TORCH}/lib/python*/site-packages"))
if importlib.util.find_spec("torchtitan") is None:
    pytest.skip(f"torchtitan is not installed: ci/setup has none that goes with torch {TORCH}", allow_module_level=True)

PROGRAM = "torchtitan_program.py"
MODULES = ["torchtitan_on_cpu", "torch._dynamo"]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each program says, by its name: first those that train, then those that go on from what the other library saved."""
    folder = tmp_path_factory.mktemp("outputs")

    def program(dtype, name, loaded="", shared=1):
        return [PROGRAM, dtype, shared, folder / f"{name}-{dtype}-{shared}", folder / f"{loaded}-{dtype}-1" if loaded else ""]

    def programs(name):
        return program("float32", name), program("bfloat16", name), program("float32", name, shared=2)

    names = ["float32", "bfloat16", "shared"]
    theirs = run_programs("theirs", MODULES, *programs("theirs"))
    *ours, more = run_programs("ours", MODULES, *programs("ours"), program("bfloat16", "more", "theirs"))
    (again,) = run_programs("theirs", MODULES, program("float32", "more", "ours"))
    return {"theirs": dict(zip(names, theirs)), "ours": dict(zip(names, ours)), "more": {"bfloat16": more, "float32": again}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchtitans_trainer_has_fsdp2s_losses_and_norms_and_resumes_from_what_the_other_saved(dtype, said):
    assert len(said["theirs"][dtype]) == 4
    assert said["ours"][dtype] == said["theirs"][dtype]
    assert said["more"][dtype] == said["theirs"][dtype][2:]


def test_torchtitans_tensor_parallelism_has_the_same_losses_and_norms(said):
    """Its parameters are plain tensors whose types say how they lie over the ranks that share a layer."""
    assert said["theirs"]["shared"] != said["theirs"]["float32"]
    assert said["ours"]["shared"] == said["theirs"]["shared"]
