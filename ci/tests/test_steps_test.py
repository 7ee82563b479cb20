"""The steps in which ci/mutants runs the tests of a label. The toy build has shell scripts instead of GoogleTest programs."""
import os
import sys
import types
import unittest

from scratch import CI, ScratchCase

sys.path.insert(0, os.path.join(CI, "lib"))
# pylint: disable=wrong-import-position
import planting  # noqa: E402
from test_steps import Steps, steps_of  # noqa: E402

# Says how it was called. The tests of a program that is named "wrong" fail, and "hangs" does not end.
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $* KEY=$KEY" >> {log}
case "$0" in
*wrong) echo "[  FAILED  ] Toy.is_right (0 ms)"; exit 1 ;;
*crashes) kill -SEGV $$ ;;
*hangs) sleep 600 ;;
esac
"""


class TestSteps(ScratchCase):
    def setUp(self):
        super().setUp()
        os.makedirs(self.path("src/build"))
        self.log = self.path("log")
        self.lines = []

    def program(self, name, *tests):
        """A GoogleTest program in which ctest knows these tests."""
        path = self.path(f"src/build/{name}")
        with open(path, "w", encoding="utf-8") as file:
            file.write(PROGRAM.format(log=self.log))
        os.chmod(path, 0o755)
        for test in tests:
            self.ctest(test, path, f"--gtest_filter={test}", "--gtest_also_run_disabled_tests")

    def ctest(self, name, *command):
        words = " ".join(f'"{word}"' for word in command)
        self.lines.append(f'add_test([=[{name}]=] {words})\n'
                          f'set_tests_properties([=[{name}]=] PROPERTIES LABELS toy ENVIRONMENT KEY=value '
                          f'WORKING_DIRECTORY {self.path("src")})\n')

    def steps(self, seconds=1):
        with open(self.path("src/build/CTestTestfile.cmake"), "w", encoding="utf-8") as file:
            file.writelines(self.lines)
        return Steps(types.SimpleNamespace(tree=self.path("src"), options=types.SimpleNamespace(
            scratch=self.root, seconds=seconds)))

    def called(self):
        if not os.path.exists(self.log):
            return []
        with open(self.log, encoding="utf-8") as file:
            return file.read().splitlines()

    def test_the_tests_of_a_program_are_one_process_and_scripts_stay_alone(self):
        self.program("props", "A.one", "A.two")
        self.ctest("Script.does", "/bin/true", "--gtest_filter=of another kind of program")
        self.steps()
        names = [step.name for step in steps_of(self.path("src"), ["-L", "^toy$"])]
        self.assertEqual(names, ["props", "Script.does"])
        self.assertFalse(self.steps().check(["-L", "^toy$"]).failed)
        self.assertEqual(self.called(), ["props --gtest_filter=A.one:A.two --gtest_fail_fast --gtest_brief=1 "
                                         "--gtest_also_run_disabled_tests KEY=value"])

    def test_only_what_ctest_selects_runs(self):
        self.program("props", "A.one", "A.two")
        self.assertFalse(self.steps().check(["-R", "^A.two$"]).failed)
        self.assertIn("--gtest_filter=A.two ", self.called()[0])
        with self.assertRaisesRegex(planting.Trouble, "ctest -L nothing selects no test"):
            self.steps().check(["-L", "nothing"])

    def test_the_first_failure_ends_it_and_names_the_test(self):
        for name in ("right", "wrong", "never"):
            self.program(name, f"{name}.test")
        outcome = self.steps().check(["-L", "toy"])
        self.assertEqual((outcome.failed, outcome.by, outcome.cases), (True, "Toy.is_right", 2))
        self.assertEqual([line.split()[0] for line in self.called()], ["right", "wrong"])

    def test_a_script_that_fails_is_named(self):
        self.ctest("Script.fails", "/bin/false")
        outcome = self.steps().check(["-L", "toy"])
        self.assertEqual((outcome.failed, outcome.by), (True, "Script.fails"))

    def test_a_crash_says_how_the_program_ended(self):
        self.program("crashes", "A.one")
        outcome = self.steps().check(["-L", "toy"])
        self.assertTrue(outcome.failed)
        self.assertRegex(outcome.by, "^crashes: .*(SIGSEGV|11)")

    def test_the_fastest_come_first_and_their_times_are_kept(self):
        self.program("a_slow", "A.one")
        self.ctest("Slow.script", "/bin/sleep", "0.5")
        self.program("z_fast", "Z.one")
        steps = self.steps(seconds=60)
        self.assertFalse(steps.measure(["-L", "toy"]).failed)
        self.assertEqual(steps.of(["-L", "toy"])[-1].name, "Slow.script")
        again = self.steps(seconds=60)  # reads them from the file
        again.seconds["a_slow"] = 0.4
        self.assertEqual([step.name for step in again.of(["-L", "toy"])], ["z_fast", "a_slow", "Slow.script"])
        self.assertGreater(again.of(["-L", "toy"])[-1].seconds, 0.5)

    def test_a_tree_that_fails_is_not_measured(self):
        self.program("wrong", "A.one")
        self.assertEqual(self.steps().measure(["-L", "toy"]).by, "Toy.is_right")
        self.assertFalse(os.path.exists(self.path("seconds.json")))


if __name__ == "__main__":
    unittest.main()
