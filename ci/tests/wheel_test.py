"""The wheel of shardproof.check: it is pure Python, judges other engines, also from pytest, and says what it lacks."""
import os
import subprocess
import unittest
import zipfile

from scratch import CI, ScratchCase, write

PYTHON = os.path.join(os.path.dirname(CI), ".venv", "bin", "python")
TEST = """def test_replicas(checks):
    from shardproof.check.engines import PLAIN, ddp
    report = checks(ddp, **PLAIN, load=False)
    assert report.cases == 2
"""


class CheckWheel(ScratchCase):
    def python(self, *arguments):
        environment = {**os.environ, "PYTHONPATH": self.path("installed"), "OMP_NUM_THREADS": "1"}
        return subprocess.run([PYTHON, *arguments], cwd=self.root, env=environment, text=True, capture_output=True)

    def test_it_is_pure_and_judges_an_engine_and_says_what_it_lacks(self):
        built = subprocess.run([os.path.join(CI, "wheel"), "--check", self.root], stdout=subprocess.DEVNULL)
        self.assertEqual(built.returncode, 0)
        (wheel,) = [name for name in os.listdir(self.root) if name.endswith(".whl")]
        self.assertTrue(wheel.endswith("-py3-none-any.whl"), wheel)
        with zipfile.ZipFile(self.path(wheel)) as archive:
            archive.extractall(self.path("installed"))
        result = self.python("-m", "shardproof.check", "--engine", "torch-ddp", "--cases", "3")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("torch-ddp: 3 cases, 3 held", result.stdout)
        write(self.path("test_mine.py"), TEST)
        result = self.python("-m", "pytest", "-q", "--shardproof-cases", "2", "test_mine.py")
        self.assertIn("1 passed", result.stdout, result.stdout + result.stderr)
        result = self.python("-c", "import shardproof; shardproof.fully_shard")
        self.assertIn("shardproof's C++ library cannot be opened", result.stderr)


if __name__ == "__main__":
    unittest.main()
