"""ci/instructions on a toy program that takes a second under callgrind."""
import json
import os
import shutil
import subprocess
import sys
import unittest

from scratch import ScratchCase

INSTRUCTIONS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "instructions")
NO_VALGRIND = "valgrind is not installed"

# It stands for bench_count: two parts, of which the first one loops ROUNDS times.
PROGRAM = r"""
#include <cstdio>
volatile long sum;
extern "C" __attribute__((noinline)) void shardproof_counted_part(long rounds) {
  for (long i = 0; i < rounds; ++i) sum = sum + i;
}
int main() {
  std::puts("{\"compiler\": \"COMPILER\"}");
  for (long i = 0; i < 12345; ++i) sum = sum + i;  // counts for nothing: it is outside
  shardproof_counted_part(ROUNDS);
  std::puts("first/part");
  shardproof_counted_part(5000);
  std::puts("second/part");
}
"""


class Instructions(ScratchCase):
    def program(self, rounds=1000, compiler="g++ 12"):
        source, program = self.path("toy.cpp"), self.path(f"toy_{rounds}_{len(compiler)}")
        with open(source, "w", encoding="utf-8") as file:
            file.write(PROGRAM.replace("ROUNDS", str(rounds)).replace("COMPILER", compiler))
        subprocess.run(["g++", "-O1", "-o", program, source], check=True)
        return program

    def run_script(self, *arguments, **variables):
        done = subprocess.run([sys.executable, INSTRUCTIONS, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, env=dict(os.environ, **variables), check=False)
        return done.returncode, done.stdout

    def table(self):
        """A table of the toy as it is."""
        if not shutil.which("valgrind"):
            self.skipTest(NO_VALGRIND)
        path = self.path("table.json")
        code, text = self.run_script("--update", "--table", path, "--program", self.program())
        self.assertEqual(code, 0, text)
        return path

    def test_the_same_program_has_the_same_figures_twice(self):
        table = self.table()
        code, text = self.run_script("--table", table, "--program", self.program(), "--json", self.path("again.json"))
        self.assertEqual(code, 0, text)
        with open(table, encoding="utf-8") as one, open(self.path("again.json"), encoding="utf-8") as other:
            first, again = json.load(one), json.load(other)
        self.assertEqual(first, again)
        parts = first["instructions"]
        self.assertEqual(list(parts), ["first/part", "second/part"])
        # A round takes the same few instructions in either part, and what is outside is not counted.
        self.assertGreater(parts["first/part"], 3 * 1000)
        self.assertAlmostEqual(parts["second/part"] / parts["first/part"], 5, delta=0.1)

    def test_a_part_that_takes_a_tenth_more_is_red_and_named(self):
        code, text = self.run_script("--table", self.table(), "--program", self.program(rounds=1100))
        self.assertEqual(code, 1, text)
        self.assertRegex(text, r"first/part .*\+9\..*GREW")
        self.assertNotRegex(text, r"second/part.*GREW")

    def test_a_part_that_takes_a_little_more_or_much_less_is_green(self):
        table = self.table()
        self.assertEqual(self.run_script("--table", table, "--program", self.program(rounds=1030))[0], 0)
        code, text = self.run_script("--table", table, "--program", self.program(rounds=500))
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"first/part .*fell; --update stores it")

    def test_a_table_of_another_compiler_is_named_and_not_compared_with(self):
        code, text = self.run_script("--table", self.table(), "--program", self.program(rounds=9000, compiler="clang++ 19"))
        self.assertEqual(code, 2, text)
        self.assertIn("compiler: g++ 12 in the table, clang++ 19 here", text)
        self.assertNotIn("GREW", text)

    def test_a_part_without_a_figure_and_a_figure_without_a_part_are_red(self):
        table = self.table()
        with open(table, encoding="utf-8") as file:
            stored = json.load(file)
        stored["instructions"]["gone"] = stored["instructions"].pop("first/part")
        with open(table, "w", encoding="utf-8") as file:
            json.dump(stored, file)
        code, text = self.run_script("--table", table, "--program", self.program())
        self.assertEqual(code, 1, text)
        self.assertRegex(text, "first/part +is not in the table")
        self.assertRegex(text, "gone +is in the table, and the program has no such part")

    def test_without_valgrind_it_says_so_and_ends_with_2(self):
        code, text = self.run_script("--program", "/bin/true", PATH=self.path(""))
        self.assertEqual(code, 2, text)
        self.assertIn("there is no valgrind here", text)

    def test_without_the_program_it_says_how_to_build_it(self):
        if not shutil.which("valgrind"):
            self.skipTest(NO_VALGRIND)
        code, text = self.run_script("--build", self.path(""))
        self.assertEqual(code, 2, text)
        self.assertIn("ninja -C", text)


if __name__ == "__main__":
    unittest.main()
