"""The locks of Python packages fit what is asked for, and ci/lock --check finds each way in which they could fail to."""
import os
import unittest

from scratch import CI, judged, load

lock = load("lock")



def pinned(requirement, digit):
    return f"{requirement} \\\n    --hash=sha256:{digit * 64}\n"


TORCH = pinned("torch==2.11.0", "a")
PINNED = TORCH + pinned("numpy==2.4.6 ; python_full_version < '3.12'", "b") + \
    pinned("numpy==2.5.5 ; python_full_version >= '3.12'", "c")
CLEAN = {"run.in": "# What a build needs.\ntorch==2.11.*\nnumpy\n", "run.lock": "# A lock.\n" + PINNED}
for other in ("cuda", "docs", "mutants", "peers", "tools", "zoo"):
    CLEAN[other + ".in"] = "some_tool==1.*\n"
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
                         ["run.lock has no transformers, which run.in asks for. Run ci/lock"])

    def test_a_package_without_a_checksum_is_found(self):
        self.assertEqual(self.found({"docs.lock": "some-tool==1.2\n"}), ["docs.lock: some-tool has no version or no SHA-256"])

    def test_a_package_of_which_one_line_lacks_a_checksum_is_found(self):
        cut = PINNED[:PINNED.index("numpy==2.5.5")] + "numpy==2.5.5 ; python_full_version >= '3.12'\n"
        self.assertEqual(self.found({"run.lock": cut}), ["run.lock: numpy has no version or no SHA-256"])

    def test_a_lock_that_names_an_index_is_found(self):
        for line in ("--index-url https://index.example/simple", "--find-links wheels"):
            self.assertEqual(self.found({"tools.lock": line + "\n" + CLEAN["tools.lock"]}),
                             ["tools.lock names an index; it has to serve all of them"])

    def test_a_package_that_pip_would_be_given_twice_is_found(self):
        self.assertEqual(self.found({"cuda.lock": CLEAN["cuda.lock"] + TORCH}),
                         ["torch is in cuda.lock and in run.lock; both are installed, and must not differ"])

    def test_what_always_holds_is_left_out_of_markers(self):
        always = "python_full_version < '3.15' and sys_platform == 'linux'"
        self.assertEqual(lock.simplified(f"a==1 ; {always} \\\nb==2 ; python_full_version >= '3.12' and {always} \\\n"),
                         "a==1 \\\nb==2 ; python_full_version >= '3.12' \\\n")


if __name__ == "__main__":
    unittest.main()
