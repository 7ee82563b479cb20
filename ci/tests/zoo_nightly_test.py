"""A sample of the models of ci/zoo, others each night."""
import datetime
import os
import subprocess
import unittest

from scratch import CI


class ZooNightly(unittest.TestCase):
    def sampled(self, part, count):
        seed = str(datetime.date.today().toordinal())
        command = [os.path.join(CI, "zoo"), "--part", part, "--sample", str(count), "--seed", seed]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual(done.returncode, 0, f"{' '.join(command)}\n{done.stdout[-8000:]}")

    def test_modules_of_torch_train_the_same_when_they_are_sharded(self):
        self.sampled("torch", 60)

    def test_types_of_transformers_train_the_same_when_they_are_sharded(self):
        self.sampled("transformers", 60)

    def test_families_of_timm_train_the_same_when_they_are_sharded(self):
        self.sampled("timm", 20)


if __name__ == "__main__":
    unittest.main()
