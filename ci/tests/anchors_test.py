"""Where the edits of planted bugs find their place, in trees of small files."""
import os
import sys
import textwrap
import unittest

from scratch import CI, judged

sys.path.insert(0, os.path.join(CI, "lib"))
# pylint: disable=wrong-import-position
from anchors import Tree, read_edits, scopes  # noqa: E402
from planting import Trouble  # noqa: E402

SUM = """\
namespace a {

int sum(int x) {
  int y = x;
  y += 1;
  return y;
}

int twice(int x) {
  int y = x;
  y += x;
  return y;
}

}  // namespace a
"""
OTHER = "int other() { return 0; }\n"

SUM_PY = """\
class Sum:
    def add(self, x):
        if x:
            self.y += x
        return self.y

    @property
    def value(self):
        return self.y
"""


class Anchors(unittest.TestCase):
    def planted(self, bug, **files):
        """What a bug changes, {file: text}, and what it says of places; files are named without their suffix, or with _py."""
        files = {"impl/" + (name[:-3] + ".py" if name.endswith("_py") else name + ".cpp"): text for name, text in files.items()}
        edits = read_edits(bug, "a.bug")
        return judged(lambda root: Tree(root, lambda path: path.startswith("impl/")).planted(edits), files)

    def text(self, bug, **files):
        """The one file that a bug changes."""
        texts, moved = self.planted(bug, **files)
        self.assertEqual((len(texts), moved), (1, []))
        return next(iter(texts.values()))

    def refused(self, bug, **files):
        with self.assertRaises(Trouble) as caught:
            self.planted(bug, **files)
        return str(caught.exception)

    def test_old_lines_become_new_ones(self):
        bug = "# id: A\n\n@ impl/sum.cpp\n- y += 1;\n+ y += 2;\n+\n+ y += 3;\n"
        self.assertEqual(self.text(bug, sum=SUM), SUM.replace("  y += 1;\n", "  y += 2;\n\n  y += 3;\n"))

    def test_lines_can_go_and_lines_can_come_beside_one_that_stays(self):
        self.assertEqual(self.text("@ impl/sum.cpp\n- y += 1;\n", sum=SUM), SUM.replace("  y += 1;\n", ""))
        bug = "@ impl/sum.cpp\n+ y = 0;\n  y += 1;\n+ y -= 1;\n"
        self.assertEqual(self.text(bug, sum=SUM), SUM.replace("  y += 1;\n", "  y = 0;\n  y += 1;\n  y -= 1;\n"))

    def test_the_body_of_a_diff_will_do(self):
        self.assertEqual(self.text("@ impl/sum.cpp\n-  y += 1;\n+  y += 2;\n", sum=SUM), SUM.replace("y += 1", "y += 2"))

    def test_white_space_does_not_count_and_new_lines_stand_as_deep_as_the_old_ones(self):
        bug = "@ impl/sum.cpp\n- f(x,\n-   y);\n+ if (x)\n+   g(x);\n"
        text = "int f() {\n    {\n      f(x, y);\n    }\n}\n"
        self.assertEqual(self.text(bug, sum=text), text.replace("      f(x, y);\n", "      if (x)\n        g(x);\n"))
        text = "int f() {\n\n  f(x,\n\n    y);\n}\n"
        self.assertEqual(self.text(bug, sum=text), "int f() {\n\n  if (x)\n    g(x);\n}\n")

    def test_a_part_of_a_line_is_no_place(self):
        for line in ("z.y += 1;", "y += 1; z();", "y += 11;"):
            self.assertIn("is in no file", self.refused("@ impl/sum.cpp\n- y += 1;\n", sum=f"int f() {{\n  {line}\n}}\n"))

    def test_neighbours_may_change(self):
        text = SUM.replace("int y = x;", "int64_t y = x;  // wider").replace("return y", "return  checked(y)")
        self.assertEqual(self.text("@ impl/sum.cpp\n- y += 1;\n+ y += 2;\n", sum=text), text.replace("y += 1", "y += 2"))

    def test_the_function_tells_equal_lines_apart(self):
        bug = "@ impl/sum.cpp twice\n- int y = x;\n+ int y = 0;\n"
        head, tail = SUM.split("int twice")
        self.assertEqual(self.text(bug, sum=SUM), head + "int twice" + tail.replace("y = x", "y = 0"))
        self.assertIn("is in 2 places: impl/sum.cpp:4, impl/sum.cpp:10", self.refused(bug.replace(" twice", ""), sum=SUM))

    def test_what_moved_to_another_file_is_found_and_said(self):
        for function in ("", " twice"):
            bug = f"@ impl/old.cpp{function}\n- y += x;\n+ y += 2;\n"
            for old in ({}, {"old": OTHER}):
                texts, moved = self.planted(bug, sum=SUM, **old)
                self.assertEqual(texts, {"impl/sum.cpp": SUM.replace("y += x", "y += 2")})
                where = " in twice" if function else ""
                self.assertEqual(moved, [f"`y += x;` of impl/old.cpp{where} is at impl/sum.cpp:11 now"])

    def test_the_named_file_goes_before_others(self):
        texts, _ = self.planted("@ impl/sum.cpp\n- y += 1;\n", sum=SUM, copy=SUM)
        self.assertEqual(list(texts), ["impl/sum.cpp"])
        self.assertIn("is in 2 places: impl/copy.cpp:5, impl/sum.cpp:5",
                      self.refused("@ impl/old.cpp\n- y += 1;\n", sum=SUM, copy=SUM))
        many = {f"f{number}": SUM for number in range(5)}
        self.assertIn("is in 5 places: impl/f0.cpp:5, impl/f1.cpp:5, impl/f2.cpp:5, impl/f3.cpp:5, ...",
                      self.refused("@ impl/old.cpp\n- y += 1;\n", **many))

    def test_lines_that_are_nowhere_are_named(self):
        self.assertEqual(self.refused("@ impl/sum.cpp sum\n- y += 3;\n", sum=SUM),
                         "`y += 3;` of impl/sum.cpp in sum does not find its place: it is in no file that may be changed")

    def test_lines_outside_of_their_function_are_not_taken(self):
        bug = "@ impl/sum.cpp thrice\n- y += x;\n"
        self.assertIn("no file that may be changed, but outside of the function: impl/sum.cpp:11", self.refused(bug, sum=SUM))

    def test_other_languages_and_other_folders_are_not_searched(self):
        self.assertIn("is in no file", self.refused("@ impl/old.cpp\n- x = 1\n", of_py="x = 1\n"))
        self.assertIn("is in no file", self.refused("@ impl/old.cpp\n- y += 1;\n", **{"../beside": SUM}))

    def test_several_edits_of_several_files(self):
        bug = ("@ impl/sum.cpp\n- y += x;\n+ y += 5;\n@ impl/sum.cpp\n- y += 1;\n"
               "@ impl/other.cpp\n- int other() { return 0; }\n")
        texts, _ = self.planted(bug, sum=SUM, other=OTHER)
        changed = SUM.replace("  y += 1;\n", "").replace("y += x", "y += 5")
        self.assertEqual(texts, {"impl/sum.cpp": changed, "impl/other.cpp": ""})

    def test_places_are_those_before_any_edit(self):
        bug = "@ impl/sum.cpp\n- y += 1;\n+ y += x;\n@ impl/sum.cpp\n- y += x;\n+ y += 1;\n"
        swapped = SUM.replace("y += 1", "y += 0").replace("y += x", "y += 1").replace("y += 0", "y += x")
        self.assertEqual(self.text(bug, sum=SUM), swapped)

    def test_two_edits_of_one_line_are_refused(self):
        self.assertIn("changes lines that another edit changes, too",
                      self.refused("@ impl/sum.cpp\n- y += 1;\n@ impl/sum.cpp\n- int y = x;\n- y += 1;\n", sum=SUM))

    def test_an_edit_must_say_where_it_is(self):
        for bug in ("@ impl/sum.cpp\n+ y = 1;\n", "@\n- y += 1;\n", "@ impl/sum.cpp\n-\n+ y = 1;\n"):
            self.assertIn("lacks a line that is there now", self.refused(bug, sum=SUM))
        self.assertIn("a.bug:2: `y += 1;` is no line of an edit", self.refused("@ impl/sum.cpp\ny += 1;\n", sum=SUM))
        self.assertIn("a.bug:1: `- y += 1;` is no line of an edit", self.refused("- y += 1;\n", sum=SUM))

    def test_methods_of_python_have_the_name_of_their_class(self):
        bug = "@ impl/of.py Sum.value\n- return self.y\n+ return 0\n"
        self.assertEqual(self.text(bug, of_py=SUM_PY), SUM_PY[:-len("return self.y\n")] + "return 0\n")
        bug = "@ impl/of.py Sum.add\n- self.y += x\n+ self.y += 1\n+ self.z = x\n"
        self.assertEqual(self.text(bug, of_py=SUM_PY), SUM_PY.replace("+= x\n", "+= 1\n" + " " * 12 + "self.z = x\n"))

    def test_functions_of_python_are_found(self):
        self.assertEqual([(scope.name, scope.first, scope.end) for scope in scopes("of.py", SUM_PY)],
                         [("Sum", 0, 9), ("Sum.add", 1, 5), ("Sum.value", 6, 9)])
        self.assertEqual([scope.name for scope in scopes("of.py", "if 1:\n    async def f():\n        def g(): pass\n")], ["f"])

    def test_functions_of_cpp_are_found(self):
        text = textwrap.dedent("""\
            #define OPEN {
            namespace a::b {
            extern "C" {
            enum class E { one, two };
            constexpr int table[] = {1, 2};
            template <class T, std::vector<int>* F>
            class SHARD_API Outer final : public Base<T, Other> {
             public:
              Outer(int x) : x_{x}, y_(x) { f("}"); }
              ~Outer() override { g('{'); }  // {
              [[nodiscard]] bool operator()(int x = {}) const noexcept { return [x] { return x; }(); }
              struct Inner {
                int x = 0;
                std::map<int, std::string> f() { return {}; }
              };
             private:
              int x_{0};
            };
            const auto lambda = [](int x) { return x; };
            std::function<void(int)> Outer::make(
                int x) {
              if (x) { return {}; }
              struct Local { int f() { return 1; } };
            }
            bool operator<(A a, B b) { return R"x(})x" < a; }
            auto tail(std::vector<int> x = {1}) -> std::vector<int> {
              for (int i = 0; i < 1'000; ++i) {}
            }
            TEST(Some, test) {
            }
            }
            }
            void last() { /* } */
            }
            """)
        self.assertEqual([(scope.name, scope.first + 1, scope.end) for scope in scopes("a.h", text)], [
            ("Outer::Outer", 8, 9), ("Outer::~Outer", 10, 10), ("Outer::operator()", 11, 11), ("Outer::Inner::f", 14, 14),
            ("Outer::Inner", 12, 15), ("Outer", 6, 18), ("Outer::make", 20, 24), ("operator<", 25, 25), ("tail", 26, 28),
            ("TEST", 29, 30), ("last", 33, 34)])


if __name__ == "__main__":
    unittest.main()
