"""The library inside a process group of PyTorch (Gloo), between real processes."""
import unittest

import c10d_ranks  # noqa: F401, the ranks are forks, and find here what it imports
from peer_ranks import run_ranks


class ProcessGroup(unittest.TestCase):
    def test_every_verb_is_its_specification_bit_for_bit(self):
        for world in (1, 3):
            run_ranks("c10d_ranks.py", world, ["collectives"])

    def test_a_caller_may_make_the_groups(self):
        run_ranks("c10d_ranks.py", 4, ["made_groups"])

    def test_training_has_the_bits_of_rank_threads(self):
        run_ranks("c10d_ranks.py", 2, ["train", "dp_shard=2", "zero3"])

    def test_training_on_a_mesh_of_two_axes_has_the_bits_of_rank_threads(self):
        run_ranks("c10d_ranks.py", 4, ["train", "dp_replicate=2,dp_shard=2", "hsdp"])

    def test_a_dead_peer_is_an_error_that_names_the_call_and_the_rank(self):
        said = run_ranks("c10d_ranks.py", 2, ["dead_peer"])[0]
        for word in ("[c10d] all_reduce(sum, float32 x 3) on 'world' (rank 0 of 2) failed", "die"):
            self.assertIn(word, said)


if __name__ == "__main__":
    unittest.main()
