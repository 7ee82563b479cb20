"""What ci/coverage says of the lines and branches that ran."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Coverage(unittest.TestCase):
    def totals(self, *arguments):
        """What it says of 975 of 1,000 lines and 90 of 100 branches."""
        def part(covered, count):
            return {"covered": covered, "count": count, "percent": 100 * covered / count}

        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"data": [{"totals": {"lines": part(975, 1000), "branches": part(90, 100), "functions": part(9, 9)}}]},
                      file)
            file.flush()
            return subprocess.run([sys.executable, os.path.join(ROOT, "ci", "lib", "coverage_totals.py"), file.name,
                                   *arguments], capture_output=True, text=True, check=False)

    def test_says_how_much_ran(self):
        done = self.totals()
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout, "lines: 97.5% (975 of 1,000)\nbranches: 90.0% (90 of 100)\nfunctions: 100.0% (9 of 9)\n")

    def test_fails_where_less_ran_than_asked_for(self):
        self.assertEqual(self.totals("--lines-min", "97.5", "--branches-min", "90").returncode, 0)
        done = self.totals("--lines-min", "97.6", "--branches-min", "91")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, "ci/coverage: 97.50% of the lines ran, and 97.6% are asked for\n"
                                      "ci/coverage: 90.00% of the branches ran, and 91% are asked for\n")

    def test_explains_itself_and_refuses_what_it_does_not_know_before_it_builds(self):
        def coverage(*arguments):
            return subprocess.run([os.path.join(ROOT, "ci", "coverage"), *arguments], capture_output=True, text=True,
                                  check=False, timeout=60)

        for word in ("--help", "-h"):
            done = coverage(word)
            self.assertEqual(done.returncode, 0, done.stderr)
            for option in ("--lines-min", "--branches-min", "--build"):
                self.assertIn(option, done.stdout)
        for arguments in (["--lines-min"], ["--lines-min", "much"], ["--branches-min", "101"], ["--lines-min=97"]):
            done = coverage(*arguments)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(arguments[0], done.stderr)
        self.assertEqual(coverage("--lines-min", "97", "--help").returncode, 0)


if __name__ == "__main__":
    unittest.main()
