"""Checkpoints that older releases of PyTorch wrote; releases/make.py made them."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
RELEASES = os.path.join(HERE, "releases")
COMMAND = os.path.join(os.environ["SHARDPROOF_BUILD"], "shardproof")
sys.path.insert(0, RELEASES)
import make  # noqa: E402


def shardproof(*arguments):
    return subprocess.run([COMMAND, "checkpoint", *arguments], capture_output=True, text=True, check=True).stdout


class CheckpointReleases(unittest.TestCase):
    def reads(self, release):
        kinds = [name for name in os.listdir(os.path.join(RELEASES, release)) if not name.endswith(".json")]
        self.assertEqual(set(kinds), set(make.RANKS))
        for kind in kinds:
            folder = os.path.join(RELEASES, release, kind)
            with open(folder + ".json", encoding="ascii") as file:
                expected = json.load(file)
            with tempfile.TemporaryDirectory() as scratch:
                shardproof("verify", folder)
                shardproof("convert", folder, os.path.join(scratch, "copy"))
                shardproof("convert", os.path.join(scratch, "copy"), os.path.join(scratch, "full.pt"), "--to", "torch")
                loaded = torch.load(os.path.join(scratch, "full.pt"), weights_only=True)
            got = {name: make.described(value) for name, value in make.flat(loaded)}
            self.assertEqual(got, expected, (release, kind))

    def test_what_2_5_wrote_is_read_to_the_bit(self):
        self.reads("2.5.1")

    def test_what_2_8_wrote_is_read_to_the_bit(self):
        self.reads("2.8.0")


if __name__ == "__main__":
    unittest.main()
