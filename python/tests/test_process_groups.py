"""Ranks as processes: a process group of torch.distributed over Gloo, and MPI."""

import os
import shutil
import subprocess
import sys
import types

import gloo_ranks
import pytest
import torch
from peer_ranks import run_ranks

import shardproof
from shardproof.ranks import mesh_text

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPT = gloo_ranks.__file__


def test_training_in_a_process_group_has_the_bits_of_plain_pytorch():
    run_ranks(SCRIPT, 3, ["train"])


def test_with_rows_a_rank_holds_the_local_tensors_of_fsdp2():
    run_ranks(SCRIPT, 3, ["rows"])


def test_a_device_mesh_of_two_dimensions_is_hsdp():
    run_ranks(SCRIPT, 4, ["hsdp_mesh"])


@pytest.mark.parametrize(
    "names, expected",
    [
        (None, "dp_replicate=2,dp_shard=2"),
        (("ddp", "fsdp"), "dp_replicate=2,dp_shard=2"),
        (("replicate", "data"), "dp_replicate=2,dp_shard=2"),
        (("dp", "tp"), "dp_shard=2,tp=2"),
        (("stages", "shard"), "stages=2,dp_shard=2"),
    ],
)
def test_names_of_two_dimensions_are_those_of_axes_and_unknown_ones_stay(names, expected):
    mesh = types.SimpleNamespace(mesh=torch.arange(4).view(2, 2), mesh_dim_names=names)  # what is read of a DeviceMesh
    assert mesh_text(mesh, 4) == expected
    with pytest.raises(shardproof.Error, match="has 4 ranks and the communicator has 8"):
        mesh_text(mesh, 8)


def test_each_part_of_a_device_mesh_trains_a_model_of_its_own():
    run_ranks(SCRIPT, 4, ["part_of_a_mesh"])


@pytest.mark.parametrize("sizes, names", [((2, 2, 2), None), ((2, 2), ("fsdp",))])
def test_each_dimension_of_a_mesh_needs_a_name(sizes, names):
    mesh = types.SimpleNamespace(mesh=torch.zeros(sizes), mesh_dim_names=names)
    with pytest.raises(shardproof.Error, match=f"a DeviceMesh of {len(sizes)} dimensions needs names"):
        mesh_text(mesh, mesh.mesh.numel())


def test_axes_of_a_mesh_have_groups_of_their_own_however_many_groups_a_rank_is_in():
    run_ranks(SCRIPT, 4, ["made_groups"])


def test_a_group_of_some_ranks_makes_groups_of_those_ranks():
    run_ranks(SCRIPT, 5, ["made_groups_of_a_part"])


def test_a_group_that_takes_tensors_of_gpus_alone_serves_and_its_groups_do_not_pile_up():
    run_ranks(SCRIPT, 4, ["as_users_begin"])


def test_a_group_that_cannot_serve_is_refused_with_what_to_do():
    run_ranks(SCRIPT, 2, ["refused_groups"])


def test_fsdp2_opens_our_checkpoints_and_we_open_those_of_fsdp2(tmp_path):
    run_ranks(SCRIPT, 2, ["checkpoint", str(tmp_path)], fresh=True)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_ranks_of_mpi_have_the_bits_of_plain_pytorch():
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        os.path.join(HERE, "mpi_ranks.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same bits") == 2
