"""ci/periphery finds each public name without an answer, and each answer without a name or a test."""
import unittest

from scratch import judged, load

periphery = load("periphery")

HEADER = "impl/include/shardproof/optim/rate.h"
CLEAN = {
    HEADER: "// Rates.\nnamespace shardproof {\n\nstruct RateOptions {\n  double first = 1;\n};\n\n"
            "class Rate {\n public:\n  double now() const;\n\n private:\n  int count();\n};\n\n"
            "double half(double x);\n\n}  // namespace shardproof\n",
    "python/shardproof/__init__.py": '_HOMES = {"rates": ("halve",)}\n',
    "python/shardproof/rates.py": "def halve(x, *, by=2):\n    return x / by\n\ndef hidden():\n    pass\n",
    "python/shardproof/check/ours.py": 'WORDS = ("rate", "step")\n',
    "harness/commands/cmd_rate.cpp": 'command->add_option("-r,--rate", rate, "a rate");\n',
    "properties/rates.cpp": "TEST(Rates, a_half_is_a_half) { half(1); }\n",
    "python/tests/test_rates.py": "def test_two_halves():\n    halve(1, by=2)\n",
    "ci/periphery.map": "[optim/rate.h]\nRateOptions.first = drawn rate\n* = Rates.a_half_is_a_half\n\n[shardproof/rates.py]\n"
                        "halve halve(by) = test_rates.two_halves\n\n[cmd_rate.cpp]\n--rate = no value: nobody reads it\n",
}


class Periphery(unittest.TestCase):
    def said(self, path, old, new):
        changed = {**CLEAN, path: CLEAN[path].replace(old, new)}
        self.assertNotEqual(changed[path], CLEAN[path])
        return [message for _, _, message in judged(lambda root: periphery.judge(root)[0], changed)]

    def test_a_tree_whose_names_all_have_an_answer_has_no_violation(self):
        self.assertEqual(judged(lambda root: periphery.judge(root)[0], CLEAN), [])
        rows = judged(lambda root: periphery.judge(root)[1], CLEAN)
        self.assertEqual(rows["optim/rate.h"], [(["RateOptions.first"], ["drawn rate"]),
                                                (["Rate::now", "half"], ["Rates.a_half_is_a_half"])])

    def test_a_new_setting_needs_an_answer_of_its_own(self):
        module, command = "python/shardproof/rates.py", "harness/commands/cmd_rate.cpp"
        self.assertEqual(self.said(HEADER, "first = 1;", "first = 1;\n  bool slow = false;"),
                         ["optim/rate.h: nothing sees a wrong value of RateOptions.slow"])
        self.assertEqual(self.said(module, "by=2", "by=2, to=0"),
                         ["shardproof/rates.py: nothing sees a wrong value of halve(to)"])
        self.assertEqual(self.said(command, "\n", '\ncommand->add_flag("--slow", slow, "slowly");\n'),
                         ["cmd_rate.cpp: nothing sees a wrong value of --slow"])

    def test_an_answer_that_names_nothing_is_found(self):
        self.assertEqual(self.said("ci/periphery.map", "Rates.a_half_is_a_half", "Rates.a_third"),
                         ["there is no test Rates.a_third"])
        self.assertEqual(self.said("ci/periphery.map", "drawn rate", "drawn rates"), ["no case has the word rates"])
        self.assertEqual(self.said("ci/periphery.map", "halve halve(by)", "halve halve(by) third"),
                         ["shardproof/rates.py has no third that is not answered already"])
        self.assertEqual(self.said("properties/rates.cpp", "a_half_is", "one_half_is"),
                         ["there is no test Rates.a_half_is_a_half"])


if __name__ == "__main__":
    unittest.main()
