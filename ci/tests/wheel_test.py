"""The wheel of shardproof.check: it is pure Python, judges other engines, and says what it lacks."""
import os
import subprocess
import unittest
import zipfile

from scratch import CI, ScratchCase

PYTHON = os.path.join(os.path.dirname(CI), ".venv", "bin", "python")


class CheckWheel(ScratchCase):
    def setUp(self):
        super().setUp()
        ci_wheel = [os.path.join(CI, "wheel"), "--check", self.root]
        self.assertEqual(subprocess.run(ci_wheel, stdout=subprocess.DEVNULL).returncode, 0)
        (self.wheel,) = [name for name in os.listdir(self.root) if name.endswith(".whl")]
        with zipfile.ZipFile(self.path(self.wheel)) as archive:
            archive.extractall(self.path("installed"))

    def python(self, *arguments):
        environment = {**os.environ, "PYTHONPATH": self.path("installed"), "OMP_NUM_THREADS": "1"}
        return subprocess.run([PYTHON, *arguments], cwd=self.root, env=environment, text=True, capture_output=True)

    def test_it_runs_on_any_machine(self):
        self.assertTrue(self.wheel.endswith("-py3-none-any.whl"), self.wheel)

    def test_it_judges_an_engine(self):
        result = self.python("-m", "shardproof.check", "--engine", "torch-ddp", "--cases", "3")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("torch-ddp: 3 cases, 3 held", result.stdout)

    def test_what_is_of_the_library_says_that_it_is_missing(self):
        result = self.python("-c", "import shardproof; shardproof.fully_shard")
        self.assertIn("shardproof's C++ library cannot be opened", result.stderr)


if __name__ == "__main__":
    unittest.main()
