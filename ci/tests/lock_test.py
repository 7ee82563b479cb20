"""The locks of Python packages fit what is asked for, and ci/lock --check finds each way in which they could fail to."""
import os
import shutil
import subprocess
import tempfile
import unittest

from scratch import CI, judged, load

lock = load("lock")



def pinned(requirement, digit):
    return f"{requirement} \\\n    --hash=sha256:{digit * 64}\n"


TORCH = pinned("torch==2.11.0", "a")
PINNED = TORCH + pinned("numpy==2.4.6 ; python_full_version < '3.12'", "b") + \
    pinned("numpy==2.5.5 ; python_full_version >= '3.12'", "c")
CLEAN = {"run.in": "# What a build needs.\ntorch\nnumpy\n", "cuda.in": "some_tool\n", "zoo.in": "other_tool\n"}
for torch in lock.TORCHES:
    CLEAN[f"torch-{torch}.in"] = f"torch=={torch}.*\nsome_tool==1.*\n"
    CLEAN[f"run-{torch}.lock"] = "# A lock.\n" + PINNED.replace("torch==2.11.", f"torch=={torch}.")
    CLEAN[f"cuda-{torch}.lock"] = pinned("some-tool==1.2", "d")
    CLEAN[f"zoo-{torch}.lock"] = pinned("other-tool==1.2", "d")
for other in ("docs", "mutants", "peers", "tools", lock.ALONE):
    CLEAN[lock.asked(other)[0] + ".in"] = "some_tool==1.*\n"
    CLEAN[other + ".lock"] = pinned("some-tool==1.2", "d")


class Lock(unittest.TestCase):
    def found(self, changes):
        return judged(lambda root: list(lock.violations(root)), {**CLEAN, **changes})

    def test_the_locks_of_this_tree_have_what_is_asked_for(self):
        self.assertEqual(list(lock.violations(os.path.join(CI, "requirements"))), [])

    def test_locks_that_fit_have_no_violation(self):
        self.assertEqual(self.found({}), [])

    def test_a_package_that_is_not_locked_is_found(self):
        self.assertEqual(self.found({"run.in": CLEAN["run.in"] + "transformers\n"}),
                         [f"run-{torch}.lock has no transformers, which run.in asks for. Run ci/lock"
                          for torch in lock.TORCHES])

    def test_a_lock_of_another_torch_is_found(self):
        self.assertEqual(self.found({"run-2.15.lock": CLEAN["run-2.11.lock"]}),
                         ["run-2.15.lock has another torch than torch-2.15.in asks for. Run ci/lock"])

    def test_what_the_lock_has_beside_which_another_is_installed_need_not_be_in_that_one(self):
        both = CLEAN["run-2.11.lock"] + CLEAN["cuda-2.11.lock"]
        self.assertEqual(self.found({"run-2.11.lock": both, "cuda-2.11.lock": "# A lock.\n"}), [])

    @unittest.skipUnless(shutil.which("apt-get"), "this is not Debian")
    def test_a_set_up_begins_where_there_is_no_environment_yet(self):
        with tempfile.TemporaryDirectory() as root:
            shutil.copytree(CI, os.path.join(root, "ci"))
            done = subprocess.run([os.path.join(root, "ci", "setup"), "--debian"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("set-up complete", done.stdout)

    def test_a_package_without_a_checksum_is_found(self):
        self.assertEqual(self.found({"docs.lock": "some-tool==1.2\n"}), ["docs.lock: some-tool has no version or no SHA-256"])

    def test_a_package_of_which_one_line_lacks_a_checksum_is_found(self):
        cut = PINNED[:PINNED.index("numpy==2.5.5")] + "numpy==2.5.5 ; python_full_version >= '3.12'\n"
        self.assertEqual(self.found({"run-2.11.lock": cut}), ["run-2.11.lock: numpy has no version or no SHA-256"])

    def test_a_lock_that_names_an_index_is_found(self):
        for line in ("--index-url https://index.example/simple", "--find-links wheels"):
            self.assertEqual(self.found({"tools.lock": line + "\n" + CLEAN["tools.lock"]}),
                             ["tools.lock names an index; it has to serve all of them"])

    def test_a_package_that_pip_would_be_given_twice_is_found(self):
        self.assertEqual(self.found({"cuda-2.11.lock": CLEAN["cuda-2.11.lock"] + TORCH}),
                         ["torch is in cuda-2.11.lock and in run-2.11.lock; both are installed, and must not differ"])

    def test_what_always_holds_is_left_out_of_markers(self):
        always = "python_full_version < '3.15' and sys_platform == 'linux'"
        self.assertEqual(lock.simplified(f"a==1 ; {always} \\\nb==2 ; python_full_version >= '3.12' and {always} \\\n"),
                         "a==1 \\\nb==2 ; python_full_version >= '3.12' \\\n")


if __name__ == "__main__":
    unittest.main()
