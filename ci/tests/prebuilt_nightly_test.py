"""The archive of ci/prebuilt as it is, and a rehearsal of ci/gpu out of it on a machine without a GPU."""
import json
import os
import shutil
import subprocess
import tarfile
import unittest

from scratch import ScratchCase

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class PrebuiltNightly(ScratchCase):
    def run_script(self, *command, environment=None):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False, env=environment)
        return done.returncode, done.stdout

    def test_an_archive_is_small_and_names_no_folder_and_all_that_a_cpu_can_rehearse_passes_out_of_it(self):
        archive = self.path("prebuilt.tar.xz")
        code, said = self.run_script(os.path.join(ROOT, "ci", "prebuilt"), archive)
        self.assertEqual(code, 0, said[-3000:])
        self.assertLessEqual(os.path.getsize(archive), 12 * 2**20)
        with tarfile.open(archive) as contents:
            for entry in filter(tarfile.TarInfo.isfile, contents):
                self.assertNotIn(os.path.realpath(ROOT).encode(), contents.extractfile(entry).read(), entry.name)
        # The tree is elsewhere on the runner, and has no build folder and no environment of its own.
        tree = self.path("tree")
        for name in ("bench", "ci", "cmake", "python", "golden", "harness", "impl", "properties"):
            shutil.copytree(os.path.join(ROOT, name), os.path.join(tree, name), ignore=shutil.ignore_patterns("__pycache__"))
        environment = dict(os.environ, SHARDPROOF_PYTHON=os.path.join(ROOT, ".venv", "bin", "python3"))
        code, said = self.run_script(os.path.join(tree, "ci", "gpu"), "--prebuilt", archive, "--rehearse", "--minutes", "60",
                                     environment=environment)
        report = os.path.join(tree, "build-gpu", "report")
        self.assertLessEqual(len(os.listdir(report)), 8)
        with open(os.path.join(report, "results.json"), encoding="utf-8") as file:
            stages = json.load(file)["stages"]
        # What needs a GPU is not run, or says that there is none; nothing fails.
        self.assertLessEqual({stage["status"] for stage in stages.values()}, {"passed", "no GPU", "not run"}, said)
        passed = {name for name, stage in stages.items() if stage["status"] == "passed"}
        self.assertLessEqual({"first-kernel", "kernels", "two-hosts", "verify", "verify-python", "train", "step-python",
                              "step-cpp", "bench-kernels", "bench-checkpoint", "checkpoints", "offload"}, passed, said)


if __name__ == "__main__":
    unittest.main()
