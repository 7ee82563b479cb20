"""ci/instructions on the library's bookkeeping in two sizes."""
import os
import subprocess
import sys
import unittest

INSTRUCTIONS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "instructions")


class InstructionsOfGrowth(unittest.TestCase):
    def test_bookkeeping_of_four_times_the_tensors_takes_four_times_the_instructions(self):
        command = [sys.executable, INSTRUCTIONS, "--growth", "--build", os.environ["SHARDPROOF_BUILD"]]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False)
        print(done.stdout)
        if "there is no valgrind here" in done.stdout:
            self.skipTest(done.stdout)
        self.assertEqual(done.returncode, 0)


if __name__ == "__main__":
    unittest.main()
