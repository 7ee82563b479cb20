"""Programs of FSDP2's users (fsdp_training.py, fsdp_models.py) compute the same with this library, in a process group."""

import inspect

import fsdp_models
import fsdp_training
import gloo_ranks
import pytest
import torch.distributed.fsdp
from peer_ranks import run_ranks

import shardproof.check as check
from shardproof.check.engines import ENGINES

PROGRAMS = [
    name
    for module in (fsdp_training, fsdp_models)
    for name, program in vars(module).items()
    if inspect.isfunction(program) and program.__module__ == module.__name__
]
# Three ranks have parts of different lengths. Compilers take most of the time, and see whole parameters however many ranks
# there are; tensor parallelism needs an even number.
ON_TWO = ["compiled_blocks", "blocks_that_are_compiled_after_wrapping", "tensor_parallelism_of_pytorch", "replicas_of_shards"]
ON_FOUR = ["data_parallelism_as_dimensions_of_one_mesh"]
IS_NEWER = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")  # than torch 2.11
# FSDP2 of torch 2.11 adds in the dtype of computation in the first, and fails in the next two; stages of one rank cannot send
# to each other over its Gloo.
ON_NEWER = ["mixed_precision_without_a_dtype_of_sums", "a_loss_that_calls_the_head_by_parts", "derivatives_along_a_direction"]
ON_NEWER += ["a_pipeline_without_bubbles"]
ON_THREE = [name for name in PROGRAMS if name not in (*ON_TWO[:2], *ON_FOUR, *([] if IS_NEWER else ON_NEWER))]


@pytest.mark.parametrize("ranks, names", [(2, ON_TWO), (3, ON_THREE)])
def test_programs_of_fsdp2_compute_the_same_after_a_change_of_the_import(ranks, names):
    assert set(names) <= set(PROGRAMS)
    run_ranks(gloo_ranks.__file__, ranks, ["programs", *names])


@pytest.mark.skipif(not IS_NEWER, reason="this torch has none")
def test_data_parallelism_may_be_dimensions_of_the_mesh_that_parameters_are_on():
    run_ranks(gloo_ranks.__file__, 4, ["programs", *ON_FOUR])
    run_ranks(gloo_ranks.__file__, 2, ["dimensions_that_do_not_fit"])


def test_drawn_models_histories_and_checkpoints_hold():
    report = check(ENGINES["shardproof-fsdp"], cases=8, seed=5, ranks="processes")
    assert report.ok and report.held >= 7 and report.blind == 0, str(report)
