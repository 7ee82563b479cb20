"""ci/faults on a toy tree of C++, where one build carries bugs and others are built alone."""
import os
import subprocess
import sys
import unittest

from faults_test import ToyTree, patch
from scratch import CI

sys.path.insert(0, os.path.join(CI, "lib"))
import carried  # noqa: E402 pylint: disable=wrong-import-position

# A program that says 2. Bugs that make it say 4 are killed, and 3 survives.
PROGRAM = """\
#include <cstdio>
#include "start.h"
namespace {
struct Sum {
  explicit Sum(int value) : value(value) {
    this->value += 1;
  }
  int value;
};
void add(int& value) {
  value += 0;
}
int each(int value) {
  const auto one = [](int x) {
    return x * 1;
  };
  return one(value);
}
int late(int value) {
again:
  if (value < 0) goto again;
  return value;
}
}  // namespace

int main() {
  Sum sum(kStart);
  add(sum.value);
  std::printf("%d", late(each(sum.value)));
}
"""


def line(fault_id, old, new, path="impl/value.cpp"):
    return f"# id: {fault_id}\n# title: Another line\n# from: nowhere\n# expect: a case\n@ {path}\n- {old}\n+ {new}\n"


class CarriedBugs(ToyTree):
    def run_program(self, bugs, *arguments):
        """As run_faults on a tree of C++, whose builds are counted as well."""
        self.write("source/impl/value.cpp", PROGRAM)
        self.write("source/impl/start.h", "constexpr int kStart = 1;\n")
        code, rows, output = self.run_faults(bugs, *arguments, build="echo >> ../builds; g++ impl/value.cpp -o built")
        with open(self.path("scratch/builds"), encoding="utf-8") as file:
            return code, {name: row["verdict"] for name, row in rows.items()}, output, len(file.readlines())

    def test_one_build_carries_the_bugs_of_bodies(self):
        bugs = [line("CONSTRUCTOR", "this->value += 1;", "this->value += 3;"), line("VOID", "value += 0;", "value += 1;"),
                line("SAME", "value += 0;", "value += 2;"), line("LAMBDA", "return x * 1;", "return x * 2;"),
                patch("PATCH", "").split("---")[0] + "--- a/impl/value.cpp\n+++ b/impl/value.cpp\n@@ -28 +28 @@\n"
                '-  std::printf("%d", late(each(sum.value)));\n+  std::printf("%d", 2 * late(each(sum.value)));\n']
        code, verdicts, output, builds = self.run_program(bugs)
        wanted = {"CONSTRUCTOR": "killed", "VOID": "survived", "SAME": "killed", "LAMBDA": "killed", "PATCH": "killed"}
        self.assertEqual((code, verdicts, builds), (1, wanted, 1), output)

    def test_what_cannot_be_carried_is_built_alone(self):
        bugs = [line("HEADER", "constexpr int kStart = 1;", "constexpr int kStart = 3;", "impl/start.h"),
                line("INITIALIZER", "explicit Sum(int value) : value(value) {", "explicit Sum(int value) : value(3) {"),
                line("LABEL", "return value;", "return 2 * value;"), line("WRONG", "value += 0;", "value += nothing;"),
                line("CARRIED", "this->value += 1;", "this->value += 3;"),
                patch("ADDED", "").split("---")[0] + "--- /dev/null\n+++ b/impl/added.cpp\n@@ -0,0 +1 @@\n+int main() {}\n"]
        code, verdicts, output, builds = self.run_program(bugs)
        wanted = {"HEADER": "killed", "INITIALIZER": "killed", "LABEL": "killed", "WRONG": "error", "CARRIED": "killed",
                  "ADDED": "survived"}
        self.assertEqual((code, verdicts), (2, wanted), output)
        # Two or three times with what it carries, as a compiler names what does not compile, and once for each of the others.
        self.assertIn(builds, (7, 8), output)
        self.assertRegex(output, r"built alone, for their bodies do not compile beside others: .*LABEL")
        self.assertRegex(output, r"WRONG +error .*does not build: impl/value\.cpp:\d+:\d+: error: .nothing. was not declared")

    def test_a_module_of_a_bug_is_imported_in_the_place_of_the_true_one(self):
        bugs = carried.Carried({"A": {"python/answer.py": "VALUE = 2\n"}, "B": {"python/other.py": "VALUE = 3\n"}},
                               lambda path: "", python=True)
        self.write("tree/python/answer.py", "VALUE = 1\n")
        for name, text in bugs.modules().items():
            self.write("texts/" + name, text)
        self.write("path/sitecustomize.py", carried.LOADER.format(
            tree=os.path.realpath(self.path("tree")), texts=self.path("texts"), variable=carried.VARIABLE))
        path = os.pathsep.join((self.path("path"), self.path("tree/python")))
        said = {}
        for bug in (None, "A", "B", None):  # the first leaves compiled code behind, which must not hide a bug from the others
            planted = {carried.VARIABLE: str(carried.number_of(bug))} if bug else {}
            environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path, **planted}
            said[bug] = subprocess.check_output([sys.executable, "-c", "import answer; print(answer.VALUE)"], env=environment)
        self.assertEqual(said, {None: b"1\n", "A": b"2\n", "B": b"1\n"})


if __name__ == "__main__":
    unittest.main()
