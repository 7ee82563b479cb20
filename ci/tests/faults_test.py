"""ci/faults on a toy tree whose build is a copy and whose `verify` compares a file with what it should be."""
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest

from scratch import CI, load

FAULTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "faults")

# Answers as `shardproof verify` does: counts to the 7th case, where a wrong value shows.
VERIFY = """
import json, os, signal, subprocess, sys, time
value = subprocess.check_output("./built").decode() if os.path.exists("built") else open("built.txt").read().strip()
report = open(sys.argv[sys.argv.index("--json") + 1], "w")
seed = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else 0
assert sys.argv[sys.argv.index("--cases") + 1] == ("200" if seed else "50")
assert sys.argv[sys.argv.index("--failures-max") + 1] == "1"
if value == "crash": os.kill(os.getpid(), signal.SIGSEGV)
if value == "hang": time.sleep(600)
if value == "unusable": sys.exit(2)
if value == "5" and seed % 3:
    sys.exit(0)
if value == "6":
    replay = sys.executable + " replay.py 'large case'"
    failure = {"type": "failure", "what": "crash (SIGSEGV)", "case": "large case", "replay": replay}
    print(json.dumps(failure), file=report)
    sys.exit(1)
if value in "78":
    case = "mlp(widths=1-1) mesh(dp_shard=2) ddp sgd(lr=0.1) fast seed=1 : step"
    guess = "the terms of rank 1 are missing" if value == "7" else ""
    print(json.dumps({"type": "failure", "what": "gradient of w", "case": case, "cases": 7, "guess": guess}), file=report)
    sys.exit(1)
if value in "45" or (value == "3" and "--odd" in sys.argv):
    same, later = {"differ": 2, "found": 2}, {"differ": 1, "found": 2}
    replicas = {"minimal": same, "original": same if value == "4" else later}
    failure = {"type": "failure", "what": "gradient of w", "case": "tiny case", "cases": 7, "replicas_differ": replicas}
    print(json.dumps(failure), file=report)
    sys.exit(1)
print(json.dumps({"type": "summary", "cases": 50}), file=report)
"""

# Answers as `shardproof replay --shrink` does.
REPLAY = """
import json, sys
assert sys.argv[1:4] == ["large case", "--shrink", "--json"]
print(json.dumps({"type": "failure", "what": "crash (SIGSEGV)", "case": "small case"}), file=open(sys.argv[4], "w"))
sys.exit(1)
"""


# Answers as ctest does: the first test of the family finds value 9 in its first two runs, and the second one in its first.
CTEST = """#!/usr/bin/env python3
import os, re, sys
if "--show-only=json-v1" in sys.argv:
    print('{"tests": []}')
    sys.exit(0)
assert "--stop-on-failure" in sys.argv
pattern = sys.argv[sys.argv.index("-R") + 1]
for number, name in enumerate(("Family.first", "Family.second"), 1):
    if not re.search(pattern, name): continue
    with open("runs_of_" + name, "a") as file: print(file=file)
    count = len(open("runs_of_" + name).readlines())
    print(f"    {number}/2 Test #{number}: {name}")
    if open("built.txt").read().strip() == "9" and count <= 3 - number:
        print("The following tests FAILED:\\n" + f"          {number} - {name} (Failed)")
        sys.exit(8)
"""


def patch(fault_id, new, old="2", path="impl/value.txt", extra=""):
    return (f"# id: {fault_id}\n# title: The value is {new}\n# from: nowhere\n# expect: a case\n{extra}"
            f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}\n+{new}\n")


def bug(fault_id, new, old="2", path="impl/value.txt"):
    return f"# id: {fault_id}\n# title: The value is {new}\n# from: nowhere\n# expect: a case\n@ {path}\n- {old}\n+ {new}\n"


NO_CHANGE = "# id: NONE\n# title: Nothing\n# from: nowhere\n# expect: survives\n"

# Bugs whose guess is right, wrong, wrong, not there; one that survives, and one that has no minimal case.
GUESSED = (patch("A", "7", extra="# guess: terms of rank \\d+ are (missing|alone)\n"),
           patch("B", "7", extra="# check: verify\n# guess: terms of rank \\d+ are alone\n"), patch("C", "7"),
           patch("D", "8", extra="# guess: missing\n"), patch("E", "3", extra="# guess: missing\n"),
           patch("F", "crash", extra="# guess: missing\n"))
FARED = {"A": "right", "B": "wrong", "C": "wrong", "D": "none", "E": "", "F": ""}
FARED_IN_WORDS = ("1 guesses of 3 are right (33%), 25% of all\n  wrong for B: the terms of rank 1 are missing\n"
                  "  wrong for C: the terms of rank 1 are missing\n")


class ToyTree(unittest.TestCase):
    """Runs ci/faults on the toy tree."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.write("source/impl/value.txt", "2\n")
        self.write("source/verify.py", textwrap.dedent(VERIFY))
        self.write("source/replay.py", textwrap.dedent(REPLAY))

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def run_faults(self, patches, *arguments, build="grep -v broken impl/value.txt > built.txt"):
        """Exit code, rows by id, and everything printed."""
        for number, text in enumerate(patches):
            suffix = "bug" if "\n@ " in text else "patch"
            self.write(f"faults/{number}.{suffix}", text)
        done = subprocess.run(
            [sys.executable, FAULTS, "--dir", self.path("faults"), "--source", self.path("source"),
             "--scratch", self.path("scratch"), "--build", build, "--cases", "50",
             "--verify", f"{sys.executable} verify.py", "--json", self.path("report"), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        rows = {}
        if os.path.exists(self.path("report")):
            with open(self.path("report"), encoding="utf-8") as file:
                rows = {row["id"]: row for row in map(json.loads, file)}
        return done.returncode, rows, done.stdout


class Faults(ToyTree):
    def test_a_bug_that_the_check_finds_is_killed_with_its_case(self):
        code, rows, output = self.run_faults([patch("A", "4")])
        self.assertEqual((code, rows["A"]["verdict"]), (0, "killed"), output)
        self.assertEqual((rows["A"]["by"], rows["A"]["cases"]), ("gradient of w", 7))
        self.assertEqual(rows["A"]["case"], "tiny case")
        self.assertEqual(rows["A"]["replicas"], "found")
        self.assertIn("1 planted bugs: 1 killed, 0 survived, 0 errors", output)

    def test_a_bug_with_an_anchor_is_planted_as_a_patch_is_and_taken_out_again(self):
        code, rows, output = self.run_faults([bug("A", "4"), patch("B", "4"), bug("C", "3")])
        self.assertEqual((code, [row["verdict"] for row in rows.values()]), (1, ["killed", "killed", "survived"]), output)
        with open(self.path("scratch/src/impl/value.txt"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "2\n")

    def test_a_bug_whose_lines_moved_is_planted_where_they_are(self):
        code, rows, output = self.run_faults([bug("A", "4", path="impl/old.txt")])
        self.assertEqual((code, rows["A"]["verdict"]), (0, "killed"), output)
        self.assertIn("`2` of impl/old.txt is at impl/value.txt:1 now", output)
        with open(self.path("scratch/src/impl/value.txt"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "2\n")

    def test_a_bug_without_a_place_is_an_error_that_names_it(self):
        code, rows, output = self.run_faults([bug("A", "4", old="5"), bug("B", "4")])
        self.assertEqual((code, rows["A"]["verdict"], rows["B"]["verdict"]), (2, "error", "killed"), output)
        self.assertRegex(output, r"A +error .*`5` of impl/value.txt does not find its place")

    def test_places_are_looked_for_without_planting(self):
        bugs = [bug("A", "4"), patch("B", "4"), bug("C", "4", path="impl/old.txt"), NO_CHANGE]
        code, rows, output = self.run_faults(bugs, "--places", build="false")
        self.assertEqual((code, rows), (0, {}), output)
        self.assertEqual(output, "C: `2` of impl/old.txt is at impl/value.txt:1 now\n4 of 4 bugs find their place\n")
        code, _, output = self.run_faults([*bugs, bug("D", "4", old="5"), patch("E", "4", old="5")], "--places")
        self.assertEqual(code, 2, output)
        self.assertIn("\nD: `5` of impl/value.txt does not find its place: it is in no file that may be changed\n"
                      "E: does not apply: ", output)
        self.assertTrue(output.endswith("4 of 6 bugs find their place\n"), output)
        self.assertFalse(os.path.exists(self.path("scratch")))

    def test_a_bug_can_be_planted_by_hand(self):
        code, _, output = self.run_faults([bug("A", "4"), bug("B", "5")], "--only", "A", "--diff", build="false")
        self.assertEqual((code, output), (0, "--- a/impl/value.txt\n+++ b/impl/value.txt\n@@ -1 +1 @@\n-2\n+4\n"))

    def test_replicas_that_differ_before_their_check_says_so_are_missed(self):
        _, rows, output = self.run_faults([patch("A", "5")])
        self.assertEqual(rows["A"]["replicas"], "missed", output)

    def test_a_case_that_crashes_is_shrunk_by_its_replay(self):
        code, rows, output = self.run_faults([patch("A", "6")])
        self.assertEqual((code, rows["A"]["verdict"], rows["A"]["by"]), (0, "killed", "crash (SIGSEGV)"), output)
        self.assertEqual(rows["A"]["case"], "small case")

    def test_minimal_cases_and_guesses_are_summed_up(self):
        cases = {"A": "mlp(widths=1-1) mesh() ddp sgd(lr=0.1) fast seed=1 : save load@mesh(dp_shard=2,tp=1) step*2",
                 "B": "mlp(widths=1-1-1) mesh(dp_shard=2) ddp sgd(lr=0.1) fast seed=1 : step",
                 "C": "gpt(layers=1) mesh(dp_shard=2,tp=2) zero3 sgd(lr=0.1) fast seed=1 : step",
                 "D": "conv(channels=4-1) mesh(cp=2) zero3 sgd(lr=0.1) fast seed=1 : step accumulate(2) step*2",
                 "E": ""}
        same = {"type": "fault", "title": "", "from": "", "expect": "", "check": "verify", "verdict": "killed", "by": "",
                "seconds": 1.0}
        replicas = {"A": "found", "B": "missed", "C": "found"}
        rows = [{**same, "id": name, "cases": number, "case": case, "guess": "doubled" if name in "AB" else "",
                 "replicas": replicas.get(name, "")} for number, (name, case) in enumerate(cases.items(), 1)]
        self.write("rows", "".join(json.dumps(row) + "\n" for row in rows))
        code, _, output = self.run_faults([patch(name, "4") for name in cases], "--merge", self.path("rows"))
        self.assertEqual(code, 0, output)
        self.assertIn("4 have a minimal case: 25% of them with at most 2 ranks, 1 layer and 2 steps, 50% with a guess; "
                      "found after 3 cases in the median", output)
        self.assertIn("3 leave replicas different: --check=fingerprint finds 2 of them in that step\n"
                      "  not B: mlp(widths=1-1-1)", output)

    def test_a_guess_is_right_if_its_patch_expects_it(self):
        _, rows, output = self.run_faults(GUESSED)
        self.assertEqual({name: row["guess_is"] for name, row in rows.items()}, FARED, output)
        self.assertIn(FARED_IN_WORDS, output)

    def test_guesses_of_earlier_runs_are_judged_by_what_their_patches_expect_now(self):
        self.run_faults(GUESSED)
        with open(self.path("report"), encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        for row in rows:  # as those from before there was the header, or as judged by another one
            if row["id"] in "AD":
                del row["guess_is"]
            else:
                row["guess_is"] = "right"
        self.write("earlier", "".join(json.dumps(row) + "\n" for row in rows))
        _, merged, output = self.run_faults(GUESSED, "--merge", self.path("earlier"))
        self.assertEqual({name: row["guess_is"] for name, row in merged.items()}, FARED, output)
        self.assertIn(FARED_IN_WORDS, output)

    def test_a_run_without_guesses_has_no_line_about_them(self):
        _, _, output = self.run_faults([patch("A", "8")])
        self.assertIn("0% with a guess", output)
        self.assertNotIn("guesses of", output)

    def test_a_guess_must_be_a_regular_expression(self):
        code, rows, output = self.run_faults([patch("A", "4", extra="# guess: rank (\\d+ is missing\n")])
        self.assertEqual((code, rows), (2, {}), output)
        self.assertRegex(output, r"0\.patch: `# guess: rank \(\\d\+ is missing` is no regular expression of Python: ")

    def test_how_many_default_runs_find_a_bug_is_told_by_seeds(self):
        code, rows, output = self.run_faults([patch("A", "4"), patch("B", "5")], "--seeds", "4",
                                             "--markdown", self.path("table"))
        self.assertEqual(code, 0, output)
        self.assertEqual(rows["A"]["by_seed"], [7, 7, 7, 7])
        self.assertEqual(rows["B"]["by_seed"], [None, None, 7, None])
        self.assertIn("B: found by 1 of 4 seeds, median 7", output)
        self.assertNotIn("A: found by", output)
        with open(self.path("table"), encoding="utf-8") as file:
            self.assertIn("7 cases (by 4 of 4 seeds, median 7)", file.read())

    def answer_as_ctest(self):
        self.write("bin/ctest", CTEST)
        os.chmod(self.path("bin/ctest"), 0o755)
        path = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", path)
        os.environ["PATH"] = self.path("bin") + os.pathsep + path

    def test_what_found_a_bug_in_an_earlier_run_goes_first(self):
        self.answer_as_ctest()
        known = {"type": "fault", "title": "", "from": "", "expect": "", "check": "", "verdict": "killed", "cases": 1,
                 "case": "", "guess": "", "seconds": 1}
        by = {"A": "Family.second", "B": "Family.of_another_name", "C": "gradient of w"}
        self.write("known", "".join(json.dumps({**known, "id": name, "by": test}) + "\n" for name, test in by.items()))
        check = "# check: ctest -R ^Family[.]\n"
        code, rows, output = self.run_faults([patch("A", "9", extra=check), patch("C", "7")], "--skip-baseline",
                                             "--known", self.path("known"))
        self.assertEqual(code, 0, output)
        self.assertEqual((rows["A"]["by"], rows["A"]["cases"]), ("Family.second", 1))
        self.assertEqual((rows["C"]["by"], rows["C"]["case"]), ("gradient of w", ""))
        code, rows, output = self.run_faults([patch("B", "9", extra=check)], "--skip-baseline", "--only", "B",
                                             "--known", self.path("known"))
        self.assertEqual((code, rows["B"]["by"]), (0, "Family.first"), output)

    def test_the_test_that_the_catalogue_names_goes_first(self):
        self.answer_as_ctest()
        self.write("faults/README.md", "| bug | what is planted | by |\n|---|---|---|\n| A | a value | Family.sec* |\n"
                                       "| B | a value | ctest | 1 test | Family.second | 3 |\n")
        bugs = [patch(name, "9", extra="# check: ctest -R ^Family[.]\n") for name in "AB"]
        code, rows, output = self.run_faults(bugs, "--skip-baseline")
        # Family.second finds it once, for A. What the page names for B finds nothing then, and the whole check goes on.
        self.assertEqual((code, rows["A"]["by"], rows["B"]["by"]), (0, "Family.second", "Family.first"), output)
        named = load("faults").tests_named
        self.assertEqual([named(by) for by in ("A.b", "A/A.b/0, C.d", "A.*", "A", "A.b*", "gradient of w", "")],
                         ["^A\\.b$", "^A/A\\.b/0$|^C\\.d$", "^A\\.", "^A", "^A\\.b", "", ""])

    def test_the_tree_as_it_is_has_to_pass_what_killed_and_not_the_whole_check(self):
        faults, planting = load("faults"), sys.modules["planting"]

        def killer(by, cases, check):
            return faults.killer_of(planting.Outcome(True, by, cases), check, budget=2000)

        self.assertEqual(killer("A.b", 3, "ctest -R A"), "ctest -R '^A\\.b$'")
        self.assertEqual(killer("no end within 300 s", 0, "ctest -R A"), "ctest -R A")
        self.assertEqual(killer("gradient of w", 7, "verify --strategy zero1"), "verify --strategy zero1 --cases 200")
        for cases, check in ((201, "verify"), (7, "verify --cases 300")):
            self.assertEqual(killer("gradient of w", cases, check), check)
        self.assertEqual(faults.killer_of(planting.Outcome(True, "gradient of w", 7), "verify", budget=50), "verify")

    def test_how_many_runs_of_tests_find_a_bug_is_told_as_well(self):
        self.answer_as_ctest()
        code, rows, output = self.run_faults([patch("A", "9", extra="# check: ctest -R ^Family[.]\n")], "--seeds", "4",
                                             "--skip-baseline", "--markdown", self.path("table"))
        self.assertEqual(code, 0, output)
        self.assertEqual(rows["A"]["by"], "Family.first")
        # The first test alone; then the second one, since the first finds nothing any more; then nobody.
        self.assertEqual(rows["A"]["by_seed"], [1, 2, None, None])
        self.assertIn("A: found by 2 of 4 runs", output)
        with open(self.path("table"), encoding="utf-8") as file:
            self.assertIn("1 test (by 2 of 4 runs)", file.read())

    def test_a_bug_that_no_check_finds_survives(self):
        code, rows, output = self.run_faults([patch("A", "4"), patch("B", "3")])
        self.assertEqual(code, 1, output)
        self.assertEqual((rows["A"]["verdict"], rows["B"]["verdict"]), ("killed", "survived"))

    def test_each_bug_meets_a_clean_tree(self):
        code, rows, output = self.run_faults([patch("A", "4"), NO_CHANGE, patch("B", "4")])
        verdicts = [rows[key]["verdict"] for key in ("A", "NONE", "B")]
        self.assertEqual((code, verdicts), (1, ["killed", "survived", "killed"]), output)
        with open(self.path("source/impl/value.txt"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "2\n")

    def test_a_patch_can_name_its_own_check(self):
        code, rows, output = self.run_faults([patch("A", "3", extra="# check: verify --odd\n")])
        self.assertEqual((code, rows["A"]["verdict"]), (0, "killed"), output)

    def test_a_patch_that_does_not_apply_is_an_error_that_names_it(self):
        code, rows, output = self.run_faults([patch("A", "4", old="5"), patch("B", "4")])
        self.assertEqual((code, rows["A"]["verdict"], rows["B"]["verdict"]), (2, "error", "killed"), output)
        self.assertRegex(output, r"A +error .*does not apply")

    def test_a_patch_that_does_not_build_is_an_error_that_names_it(self):
        code, rows, output = self.run_faults([patch("A", "broken"), patch("B", "4")])
        self.assertEqual((code, rows["A"]["verdict"], rows["B"]["verdict"]), (2, "error", "killed"), output)
        self.assertRegex(output, r"A +error .*does not build")

    def test_a_check_that_cannot_run_is_an_error(self):
        code, rows, output = self.run_faults([patch("A", "unusable")])
        self.assertEqual((code, rows["A"]["verdict"]), (2, "error"), output)

    def test_a_crash_kills(self):
        code, rows, output = self.run_faults([patch("A", "crash")])
        self.assertEqual((code, rows["A"]["by"]), (0, "crash (SIGSEGV)"), output)

    def test_a_check_without_an_end_kills(self):
        code, rows, output = self.run_faults([patch("A", "hang")], "--seconds", "2")
        self.assertEqual((code, rows["A"]["by"]), (0, "no end within 2 s"), output)

    def test_a_tree_that_fails_by_itself_proves_nothing(self):
        self.write("source/impl/value.txt", "4\n")
        code, rows, output = self.run_faults([patch("A", "5", old="4"), patch("B", "3", old="4")])
        self.assertEqual((code, rows["A"]["verdict"], rows["B"]["verdict"]), (2, "error", "survived"), output)
        self.assertEqual(rows["A"]["by"], "the tree without any planted bug fails `verify`: gradient of w tiny case")

    def test_only_picks_by_id_and_an_unknown_id_lists_those_there_are(self):
        code, rows, output = self.run_faults([patch("A", "4"), patch("B", "3")], "--only", "A")
        self.assertEqual((code, list(rows)), (0, ["A"]), output)
        code, _, output = self.run_faults([patch("A", "4"), patch("B", "3")], "--only", "C")
        self.assertEqual(code, 2)
        self.assertIn("there is no fault C; there are: A B", output)

    def test_the_parts_of_a_catalogue_together_are_the_catalogue(self):
        patches = [patch("A", "4"), patch("B", "3"), patch("C", "4")]
        parts = []
        for part, wanted in (("1/2", ["A", "C"]), ("2/2", ["B"])):
            _, rows, output = self.run_faults(patches, "--shard", part)
            self.assertEqual(list(rows), wanted, output)
            parts.append(self.path(f"part{part[0]}"))
            os.rename(self.path("report"), parts[-1])
        code, rows, output = self.run_faults(patches, "--merge", *parts, build="false")
        self.assertEqual((code, list(rows)), (1, ["A", "B", "C"]), output)
        self.assertIn("3 planted bugs: 2 killed, 1 survived, 0 errors", output)
        code, _, output = self.run_faults(patches, "--merge", parts[0])
        self.assertEqual((code, "no file has B" in output), (2, True), output)
        code, _, output = self.run_faults(patches, "--merge", *parts, parts[0])
        self.assertEqual((code, "is in an earlier file, too" in output), (2, True), output)
        self.write("other", '{"type": "case"}\n')
        code, _, output = self.run_faults(patches, "--merge", self.path("other"))
        self.assertEqual((code, "not a file of ci/faults --json" in output), (2, True), output)
        for part in ("0/2", "3/2", "1", "1/2/3", "4/4"):
            self.assertEqual(self.run_faults(patches, "--shard", part)[0], 2)

    def test_a_patch_must_say_what_it_is(self):
        code, _, output = self.run_faults([patch("A", "4").replace("# from: nowhere\n", "")])
        self.assertEqual(code, 2)
        self.assertIn("lacks `# from: ...`", output)

    def test_two_bugs_must_not_share_an_id(self):
        code, _, output = self.run_faults([patch("A", "4"), patch("A", "3")])
        self.assertEqual(code, 2)
        self.assertIn("two bugs have the id A", output)

    def test_each_bug_of_the_catalogue_of_this_tree_finds_its_place(self):
        faults, tree = load("faults"), os.path.dirname(CI)
        catalogue = faults.read_catalogue(os.path.join(tree, "harness", "faults"))
        self.assertGreater(len(catalogue), 200)
        with open(os.path.join(tree, "harness", "faults", "README.md"), encoding="utf-8") as file:
            text = file.read()
        for bugs, part in re.findall(r"^These (\d+) bugs(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL):
            self.assertEqual(int(bugs), len(re.findall(r"^\| [A-Z0-9]+-", part, re.MULTILINE)), "a count of the page")
        self.assertEqual(set(re.findall(r"^\| ([A-Z0-9]+-\w+) ", text, re.MULTILINE)), {fault.id for fault in catalogue})
        faults.find_places(catalogue, tree)
        lost = [(fault.id, fault.trouble, fault.notes) for fault in catalogue if fault.trouble or fault.notes]
        self.assertEqual(lost, [], "`@ FILE` names the file that has the lines")

    def test_a_patch_must_not_weaken_the_question(self):
        paths = ("verify.py", "python/tests/x.py", "python/shardproof/check/plain.py", "python/shardproof/check/judge.py")
        for make in (patch, bug):
            for path in paths:
                code, _, output = self.run_faults([make("A", "4", path=path)])
                self.assertEqual(code, 2)
                self.assertIn("changes " + path, output)

    def test_a_patch_may_change_the_python_package(self):
        self.write("source/python/shardproof/value.txt", "2\n")
        code, rows, _ = self.run_faults([patch("A", "4", path="python/shardproof/value.txt")])
        self.assertEqual((code, rows["A"]["verdict"]), (1, "survived"))

    def test_a_folder_without_patches_is_an_error(self):
        code, _, output = self.run_faults([], "--dir", self.path("source"))
        self.assertEqual(code, 2)
        self.assertIn("no *.bug and no *.patch", output)

    def test_what_is_equal_is_not_copied_again(self):
        self.run_faults([patch("A", "4")])
        before = os.stat(self.path("scratch/src/verify.py")).st_mtime_ns
        self.write("source/impl/new.txt", "1\n")
        self.run_faults([patch("A", "4")])
        self.assertEqual(os.stat(self.path("scratch/src/verify.py")).st_mtime_ns, before)
        self.assertTrue(os.path.exists(self.path("scratch/src/impl/new.txt")))
        os.remove(self.path("source/impl/new.txt"))
        self.run_faults([patch("A", "4")])
        self.assertFalse(os.path.exists(self.path("scratch/src/impl/new.txt")))


if __name__ == "__main__":
    unittest.main()
