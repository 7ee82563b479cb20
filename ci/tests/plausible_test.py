"""Which mutants ci/mutants leaves out before a compiler is asked."""
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "lib"))
# pylint: disable=wrong-import-position
from plausible import is_plausible  # noqa: E402


class Plausible(unittest.TestCase):
    def is_plausible(self, before, after, above=()):
        return is_plausible([*above, before + "\n"], len(above) + 1, after + "\n")

    def test_operators_between_operands_change_and_brackets_of_templates_do_not(self):
        line = "  for (int64_t i = 0; i < count - 1; ++i) values.push_back(static_cast<int64_t>(i) * -step);"
        for old, new in (("i < count", "i <= count"), ("count - 1", "count + 1"), ("++i", "--i"), ("(i) * -", "(i) / -"),
                         ("-step", "step"), ("i = 0", "i = 1")):
            self.assertTrue(self.is_plausible(line, line.replace(old, new)), new)
        for old, new in (("cast<int", "cast<=int"), ("64_t>(i)", "64_t>=(i)"), ("++i", "-+i"), ("-step", "%step"),
                         ("int64_t i", "int65_t i")):
            self.assertFalse(self.is_plausible(line, line.replace(old, new)), new)

    def test_texts_and_comments_do_not_change(self):
        line = '  SHARD_REQUIRE(size > 0, "mesh", "size > 0, got {}", size);  // 1 > 0'
        self.assertTrue(self.is_plausible(line, line.replace("(size >", "(size >=")))
        self.assertFalse(self.is_plausible(line, line.replace('"size >', '"size >=')))
        self.assertFalse(self.is_plausible(line, line.replace("// 1 >", "// 1 >=")))

    def test_a_loop_is_left_inside_of_a_loop_only(self):
        line = "    add(i);"
        for after in (line + "\n    break;", line + "\n    continue;"):
            self.assertTrue(self.is_plausible(line, after, ["void f() {\n", "  for (int i : all) {\n"]))
            self.assertFalse(self.is_plausible(line, after, ["  for (int i : all) {}\n", "  if (b) {\n"]))

    def test_a_statement_is_left_out_unless_it_declares(self):
        for line, expected in (("  add(i);", True), ("  const int64_t count = size();", False), ("  total += 1;", True),
                               ("  std::vector<int> all;", False), ("  call(first,", False), ("  return total;", False)):
            self.assertEqual(self.is_plausible(line, f"  /*{line.strip()}*/", ["{\n"]), expected, line)
        self.assertFalse(self.is_plausible("      second);", "      /*second);*/", ["  call(first,\n"]))

    def test_brackets_stay_in_pairs_and_words_whole(self):
        self.assertFalse(self.is_plausible("  send(a);", "  sbegin(a);"))
        self.assertFalse(self.is_plausible("  const auto x = find([](int e) { return e && y; });",
                                           "  const auto x = find([](int e) { return e (1==1) && y; });"))
        self.assertTrue(self.is_plausible("      listen(s) == 0 &&", " (1==1) &&"))


if __name__ == "__main__":
    unittest.main()
