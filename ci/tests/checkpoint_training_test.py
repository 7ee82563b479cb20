"""Runs that PyTorch began and we go on with, and the other way round: sharded model and optimizer through one checkpoint."""
import math
import os
import subprocess
import unittest

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import checkpoint_training_peers  # noqa: F401, the ranks are forks, and find here what it imports
from peer_ranks import run_ranks
from scratch import ScratchCase

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ["SHARDPROOF_BUILD"]
STEPS = 3


def pytorch(ranks, kind, begin, end, **options):
    arguments = [kind, str(begin), str(end)] + [word for option in options.items() for word in option]
    output = run_ranks("checkpoint_training_peers.py", ranks, arguments)[0]
    return [float(line) for line in output.split() if line[0].isdigit()]


def ours(mesh, strategy, begin, end, **options):
    arguments = [mesh, strategy, str(begin), str(end)] + [word for option in options.items() for word in option]
    done = subprocess.run([os.path.join(BUILD, "checkpoint_driver"), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{arguments}: {done.stderr[-2000:]}")
    return [float(line) for line in done.stdout.split()]


class CheckpointTraining(ScratchCase):
    def same_losses(self, got, expected, tolerance=2e-6):
        self.assertEqual(len(got), STEPS)
        self.assertEqual(len(set(expected)), STEPS)
        for one, other in zip(got, expected):
            self.assertTrue(math.isclose(one, other, rel_tol=tolerance), (got, expected))

    def theirs_goes_on_here(self, ranks, kind):
        at, later = self.path("at"), self.path("later")
        pytorch(ranks, kind, 0, STEPS, save=at)
        expected = pytorch(ranks, kind, STEPS, 2 * STEPS, load=at, save=later)
        for mesh, strategy in (("dp_shard=4", "zero3"), ("dp_shard=2", "zero1"), ("dp_replicate=2,dp_shard=2", "hsdp"),
                               ("dp_shard=1", "ddp")):
            self.same_losses(ours(mesh, strategy, STEPS, 2 * STEPS, load=at), expected)

    def test_what_fsdp2_trained_on_2_ranks_trains_on_here_on_any_mesh(self):
        self.theirs_goes_on_here(2, "fsdp2")

    def test_what_fsdp2_over_tensor_parallelism_trained_trains_on_here_on_any_mesh(self):
        self.theirs_goes_on_here(4, "fsdp2_tp")

    def ours_goes_on_there(self, ranks, kind):
        at, full = self.path("at"), self.path("full.pt")
        ours("dp_shard=4", "zero3", 0, STEPS, save=at)
        expected = ours("dp_shard=2", "zero2", STEPS, 2 * STEPS, load=at)
        dcp_to_torch_save(at, full)
        self.same_losses(pytorch(ranks, kind, STEPS, 2 * STEPS, load=at, expect=full), expected)

    def test_what_was_trained_here_trains_on_under_fsdp2_on_2_ranks_with_equal_bits(self):
        self.ours_goes_on_there(2, "fsdp2")

    def test_what_was_trained_here_trains_on_under_fsdp2_over_tensor_parallelism_with_equal_bits(self):
        self.ours_goes_on_there(4, "fsdp2_tp")

    def test_what_muon_of_pytorch_trained_trains_on_here_on_any_mesh(self):
        at = self.path("at")
        pytorch(1, "muon_float32", 0, STEPS, save=at)
        expected = pytorch(1, "muon_float32", STEPS, 2 * STEPS, load=at)
        for mesh, strategy in (("dp_shard=4", "zero3"), ("dp_shard=2", "zero1"), ("dp_shard=1", "ddp")):
            got = ours(mesh, strategy, STEPS, 2 * STEPS, optimizer="muon", load=at)
            self.same_losses(got, expected, tolerance=1e-5)

    def test_what_muon_trained_here_trains_on_in_pytorch_with_equal_bits_and_settings(self):
        at, full = self.path("at"), self.path("full.pt")
        ours("dp_shard=4", "zero3", 0, STEPS, optimizer="muon", save=at)
        expected = ours("dp_shard=2", "zero2", STEPS, 2 * STEPS, optimizer="muon", load=at)
        dcp_to_torch_save(at, full)
        got = pytorch(1, "muon_float32", STEPS, 2 * STEPS, load=at, expect=full)
        self.same_losses(got, expected, tolerance=1e-5)
        rounded = pytorch(1, "muon", STEPS, 2 * STEPS, load=at, expect=full)  # its matrix products are in bfloat16
        self.same_losses(rounded, expected, tolerance=2e-2)


if __name__ == "__main__":
    unittest.main()
