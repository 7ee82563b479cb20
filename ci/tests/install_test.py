"""The library as a training engineer has it: installed, and found by a project of its own."""
import os
import shutil
import subprocess
import tempfile
import unittest

BUILD = os.environ["SHARDPROOF_BUILD"]
PROJECT = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "own_project")


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


class Install(unittest.TestCase):
    def test_a_project_of_its_own_finds_and_links_the_library_wherever_it_was_moved(self):
        with tempfile.TemporaryDirectory() as scratch:
            run("cmake", "--install", BUILD, "--prefix", f"{scratch}/first")
            shutil.move(f"{scratch}/first", f"{scratch}/prefix")
            run("cmake", "-S", PROJECT, "-B", f"{scratch}/own", f"-DCMAKE_PREFIX_PATH={scratch}/prefix")
            run("cmake", "--build", f"{scratch}/own")
            linked = run("ldd", f"{scratch}/own/train_tiny")
            self.assertIn(f"{scratch}/prefix", next(line for line in linked.split("\n") if "libshardproof.so" in line))
            self.assertRegex(run(f"{scratch}/own/train_tiny"), r"step 200  loss 0\.00\d+\n$")


if __name__ == "__main__":
    unittest.main()
