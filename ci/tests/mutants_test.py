"""ci/mutants on a toy tree whose build takes the comments out of its sources and whose `verify` reads what is left."""
import json
import os
import subprocess
import sys
import textwrap
import unittest

from scratch import ScratchCase, load

MUTANTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "mutants")

# The toy's language has one line a file, `answer = A + B;`, and a build that takes sums of numbers only.
BUILD = r"""
set -e; mkdir -p build; rm -f build/lib.txt
for f in impl/src/*/*.cpp; do
  grep -qE '^answer = \(?-?[0-9]+([-+]1\))? [-+*] \(?-?[0-9]+([-+]1\))?;$' $f || { echo "error: $f"; exit 1; }
  echo "$f $(( $(sed 's/answer = //; s/;//' $f) ))" >> build/lib.txt
done"""
# Sees what the room `seen` gives, and nothing of `blind`.
VERIFY = """
import json, sys
built = dict(line.split() for line in open("build/lib.txt"))
report = open(sys.argv[sys.argv.index("--json") + 1], "w")
assert sys.argv[sys.argv.index("--cases") + 1] == "200"
if built["impl/src/seen/a.cpp"] != "5":
    print(json.dumps({"type": "failure", "what": "answer", "case": "tiny case", "cases": 3}), file=report)
    sys.exit(1)
"""
# Stands for the package from the index: like its module, it makes (line number, line, (rule, source)).
MODULE = """
def mutants_regexp(lines, ruleFiles=None, ignorePatterns=None):
    print("chatter")
    return [(n, line.replace(old, new), (old + " ==> " + new, "toy.rules:1"))
            for n, line in enumerate(lines, 1) for old, new in (("+", "-"), ("+", "*"), ("2", "(2+1)"), ("2 + 3", "3 + 2"),
                                                                ("3", "x"), (" + ", " +  "))]
"""

# A tree that CMake builds. The program of the test has the library's objects in it in the place of the library, and so it
# is out of date after a mutant until it is built as well.
CMAKE_TREE = {
    "CMakePresets.json": """{"version": 3, "configurePresets": [{"name": "release", "generator": "Ninja",
        "binaryDir": "${sourceDir}/build"}]}""",
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.25)
        project(toy CXX)
        enable_testing()
        add_library(shardproof SHARED impl/src/comm/a.cpp)
        add_executable(shardproof_command command.cpp)
        add_executable(comm_props props.cpp impl/src/comm/a.cpp)
        add_test(NAME Comm.answers COMMAND comm_props --gtest_filter=Comm.answers)
        set_tests_properties(Comm.answers PROPERTIES LABELS comm)""",
    "impl/src/comm/a.cpp": "int answer() {\n  return 2 + 3;\n}\n",
    "command.cpp": "int main() {}\n",
    "props.cpp": """
        #include <cstdio>
        int answer();
        int main() {
          if (answer() == 5) return 0;
          std::puts("[  FAILED  ] Comm.answers (0 ms)");
          return 1;
        }
        """,
}


class Mutants(ScratchCase):
    def setUp(self):
        super().setUp()
        for room in ("seen", "blind"):
            self.write(f"source/impl/src/{room}/a.cpp", "answer = 2 + 3;\n")
        self.write("source/verify.py", textwrap.dedent(VERIFY))
        self.write("scratch/python/universalmutator/__init__.py", "")
        self.write("scratch/python/universalmutator/mutator.py", MODULE)

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def run_mutants(self, *arguments, source="source",
                    how=("--build", BUILD, "--libraries", "build/lib.txt", "--verify", f"{sys.executable} verify.py")):
        """Exit code, rows, and everything printed."""
        done = subprocess.run(
            [sys.executable, MUTANTS, "--source", self.path(source), "--scratch", self.path("scratch"), *how,
             "--json", self.path("report"), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        rows = []
        if os.path.exists(self.path("report")):
            with open(self.path("report"), encoding="utf-8") as file:
                rows = [json.loads(line) for line in file]
        return done.returncode, rows, done.stdout

    def test_a_mutant_that_verify_finds_is_killed_and_others_survive_with_their_diff(self):
        code, rows, output = self.run_mutants("--sample", "6")
        self.assertEqual(code, 1, output)
        counted = [row for row in rows if row["verdict"] in ("killed", "survived")]
        found = {(row["room"], row["verdict"]) for row in counted}
        self.assertEqual(found, {("seen", "killed"), ("blind", "survived")}, output)
        killed = next(row for row in counted if row["room"] == "seen")
        self.assertEqual((killed["check"], killed["by"], killed["cases"], killed["case"]), ("verify", "answer", 3, "tiny case"))
        survivor = next(row for row in counted if row["room"] == "blind")
        self.assertIn("--- a/impl/src/blind/a.cpp", survivor["diff"])
        self.assertIn("-answer = 2 + 3;\n+answer = ", survivor["diff"])
        self.assertIn(survivor["diff"], output)
        self.assertRegex(output, r"(?m)^all +3 +3 +0 ")

    def test_mutants_that_do_not_compile_or_change_no_code_are_not_counted(self):
        _, rows, output = self.run_mutants("--sample", "100")
        verdicts = [row["verdict"] for row in rows if row["room"] == "seen"]
        self.assertEqual(sorted(verdicts), ["does not compile", "killed", "killed", "killed", "same code"], output)
        self.assertNotIn("anther", "".join(row["diff"] for row in rows if row["verdict"] != "does not compile"))

    def test_a_mutant_with_another_signature_is_not_counted_when_programs_miss_the_symbol(self):
        how = ("--build", BUILD, "--libraries", "build/lib.txt", "--verify", "bash -c 'exit 127' --")
        _, rows, output = self.run_mutants("--sample", "1", "--skip-baseline", how=how)
        self.assertNotIn("killed", [row["verdict"] for row in rows], output)

    def test_rooms_are_sampled_evenly(self):
        _, rows, output = self.run_mutants("--sample", "4")
        counted = [row["room"] for row in rows if row["verdict"] in ("killed", "survived")]
        self.assertEqual(sorted(counted), ["blind", "blind", "seen", "seen"], output)

    def test_the_seed_chooses_and_the_same_seed_chooses_alike(self):
        def drawn(seed):
            return [row["diff"] for row in self.run_mutants("--sample", "2", "--seed", seed)[1]]

        self.assertEqual(drawn("1"), drawn("1"))
        self.assertGreater(len({str(drawn(str(seed))) for seed in range(1, 4)}), 1)

    def test_each_mutant_meets_a_clean_tree_and_the_source_stays_as_it_is(self):
        code, rows, output = self.run_mutants("--sample", "100", "--room", "seen")
        self.assertEqual((code, {row["room"] for row in rows}), (0, {"seen"}), output)
        for place in ("source", "scratch/src"):
            with open(self.path(f"{place}/impl/src/seen/a.cpp"), encoding="utf-8") as file:
                self.assertEqual(file.read(), "answer = 2 + 3;\n")

    def test_a_tree_that_fails_by_itself_proves_nothing(self):
        self.write("source/impl/src/seen/a.cpp", "answer = 2 + 4;\n")
        code, rows, output = self.run_mutants()
        self.assertEqual((code, rows), (2, []), output)
        self.assertIn("the tree without any planted bug fails `verify`: answer tiny case", output)

    def test_the_programs_of_a_room_are_built_anew_for_each_mutant(self):
        for name, text in CMAKE_TREE.items():
            self.write(f"cmake/{name}", textwrap.dedent(text))
        code, rows, output = self.run_mutants("--sample", "3", source="cmake", how=("--verify", "true"))
        counted = [row for row in rows if row["verdict"] not in ("does not compile", "same code")]
        self.assertEqual(len(counted), 3, output)
        self.assertEqual({(row["verdict"], row["check"], row["by"]) for row in counted},
                         {("killed", "ctest -L ^(comm|parallel)$ -LE nightly", "Comm.answers")}, output)
        self.assertEqual(code, 0, output)

    def test_a_test_whose_program_misses_a_symbol_kills_nothing(self):
        ends_unlinked = {"props.cpp": "int answer();\nint main() { return answer() == 5 ? 0 : 127; }\n"}
        for name, text in {**CMAKE_TREE, **ends_unlinked}.items():
            self.write(f"cmake/{name}", textwrap.dedent(text))
        _, rows, output = self.run_mutants("--sample", "1", source="cmake", how=("--verify", "true"))
        self.assertTrue(rows, output)
        self.assertEqual({row["verdict"] for row in rows} - {"same code"}, {"does not compile"}, output)

    def test_ctest_knows_the_tests_of_each_room_of_this_tree(self):
        mutants = load("mutants")
        build = os.environ["SHARDPROOF_BUILD"]
        selections = {}
        for room in mutants.sources_by_room(mutants.ROOT):
            # Only a build that embeds Python has the tests of PyTorch's process groups.
            if room != "comm/c10d" or os.path.exists(os.path.join(build, "c10d_driver.so")):
                selections.setdefault(" ".join(mutants.tests_of(room)), []).append(room)
        for selection, rooms in selections.items():
            done = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1", *selection.split()],
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
            self.assertTrue(selection and json.loads(done.stdout)["tests"], f"mutants of {rooms} meet no test: {selection}")

    def test_an_added_statement_joins_its_line_unless_that_ends_with_a_comment(self):
        on_one_line = load("mutants").on_one_line
        self.assertEqual(on_one_line("  a();\n  continue;\n"), "  a();   continue;\n")
        self.assertEqual(on_one_line("  b();\n"), "  b();\n")
        self.assertEqual(on_one_line("  c();  // why\n  break;\n"), "  c();  // why\n  break;\n")

    def test_an_unknown_room_is_refused_with_those_there_are(self):
        code, _, output = self.run_mutants("--room", "attic")
        self.assertEqual(code, 2)
        self.assertIn("there is no room attic in impl/src; there are: blind seen", output)

    def test_runs_are_merged_with_each_mutant_once(self):
        rows = []
        for seed in ("1", "2"):
            rows.append(self.run_mutants("--sample", "3", "--seed", seed)[1])
            os.rename(self.path("report"), self.path(seed))
        code, merged, output = self.run_mutants("--merge", self.path("1"), self.path("2"))
        different = {row["diff"]: row["verdict"] for row in rows[0] + rows[1]}
        self.assertLess(len(different), len(rows[0] + rows[1]))
        self.assertEqual({row["diff"]: row["verdict"] for row in merged}, different, output)
        self.assertEqual(len(merged), len(different))
        verdicts = list(different.values())
        self.assertEqual(code, 1)
        self.assertRegex(output, rf"(?m)^all +{verdicts.count('killed')} +{verdicts.count('survived')} +0 ")

    def test_what_is_no_result_is_not_merged(self):
        self.write("text", "no result\n")
        for name in ("text", "absent"):
            code, _, output = self.run_mutants("--merge", self.path(name))
            self.assertEqual(code, 2, output)
            self.assertIn(self.path(name), output)
            self.assertNotIn("Traceback", output)


if __name__ == "__main__":
    unittest.main()
