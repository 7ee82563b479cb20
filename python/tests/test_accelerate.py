"""Programs for Accelerate's plugin of FSDP2, and for the Trainer of transformers with it, train the same with this library.

Each library reads what the other has saved.
"""

import pytest
from several_programs import run_programs

pytest.importorskip("accelerate")

MODULES = ["accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama", "torch._dynamo"]
PLUGIN, TRAINER = "accelerate_program.py", "trainer_program.py"
PRECISIONS = {"bf16": "again,whole", "no": "ram,tied"}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each program says by its name: first those that train, then those that load what the other library saved."""
    folder = tmp_path_factory.mktemp("programs")
    found = {}

    def run(whose, **programs):
        found.update(zip(programs, run_programs(whose, MODULES, *programs.values())))

    def plugin(precision, saves, loads):
        return [PLUGIN, precision, PRECISIONS[precision], folder / f"{saves}-{precision}", folder / f"{loads}-{precision}"]

    def trainer(saves, loads=""):
        return [TRAINER, folder / saves, folder / loads / "checkpoint-3" if loads else ""]

    names = [f"plugin_{precision}" for precision in PRECISIONS]
    run("theirs", **dict(zip(names, (plugin(p, "theirs", "theirs") for p in PRECISIONS))), trainer=trainer("theirs"))
    ours = {f"ours_{name}": plugin(p, "ours", "theirs") for name, p in zip(names, PRECISIONS)}
    run("ours", **ours, ours_trainer=trainer("ours"), ours_trainer_again=trainer("more", "theirs"))
    theirs = {f"again_{name}": plugin(p, "again", "ours") for name, p in zip(names, PRECISIONS)}
    run("theirs", **theirs, theirs_trainer_again=trainer("even more", "ours"))
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_accelerates_plugin_of_fsdp2_trains_the_same_and_reads_what_either_saved(precision, said):
    expected = said[f"plugin_{precision}"]
    assert expected["again"] == expected["second"]
    assert said[f"ours_plugin_{precision}"] == expected
    assert said[f"again_plugin_{precision}"] == expected


def test_the_trainer_with_fsdp2_logs_the_same_and_resumes_from_what_either_saved(said):
    expected = said["trainer"]
    assert len(expected) == 6
    assert said["ours_trainer"] == expected
    assert said["ours_trainer_again"] == expected
    assert said["theirs_trainer_again"] == expected
