"""A strategy and a property of somebody else: built against the installed package, and under verify."""
import os
import subprocess
import tempfile
import unittest

BUILD = os.environ["SHARDPROOF_BUILD"]
PROJECT = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "new_strategy")


def run(*command, code=0, cwd=None):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=cwd)
    if done.returncode != code:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def build(scratch, source):
    run("cmake", "--install", BUILD, "--prefix", f"{scratch}/prefix")
    run("cmake", "-S", source, "-B", f"{scratch}/own", f"-DCMAKE_PREFIX_PATH={scratch}/prefix")
    run("cmake", "--build", f"{scratch}/own")
    return f"{scratch}/own/crossed"


class NewStrategy(unittest.TestCase):
    def test_of_another_project_is_verified_with_its_property_which_fails_where_it_does_not_hold(self):
        with tempfile.TemporaryDirectory() as scratch:
            program = build(scratch, PROJECT)
            linked = run("ldd", program)
            for library in ("libshardproof.so", "libshardproof_harness.so", "libshardproof_golden.so"):
                self.assertIn(f"{scratch}/prefix", next(line for line in linked.split("\n") if library in line))
            only = ("--strategy", "crossed", "--no-python", "--failures", f"{scratch}/failures")
            output = run(program, "verify", "--cases", "40", "--verbose", *only)
            self.assertRegex(output, r"crossed +\w+ +\d+")
            self.assertRegex(output, r"properties asked \(cases\): keeps_what_it_updates [1-9]")
            self.assertIn("ALL HELD: 40 of 40 cases", output)
            planned = run(program, "plan", "--mesh", "dp_replicate=2,dp_shard=2", "--strategy", "crossed")
            self.assertRegex(planned, r"all_gather +dp_replicate")  # of a backward, which no other row with hsdp's state has

            # The same claim about a row of which it is not true: parameters are whole, and only the state is split.
            with open(os.path.join(PROJECT, "crossed.cpp"), encoding="utf-8") as file:
                text = file.read()
            wrong = text.replace("row.parameter = row.state = ", "row.parameter = whole;\n  row.state = ")
            self.assertNotEqual(text, wrong)
            os.mkdir(f"{scratch}/wrong")
            with open(os.path.join(PROJECT, "CMakeLists.txt"), encoding="utf-8") as file:
                lists = file.read()
            for name, content in (("crossed.cpp", wrong), ("CMakeLists.txt", lists)):
                with open(f"{scratch}/wrong/{name}", "w", encoding="utf-8") as file:
                    file.write(content)
            run("cmake", "-S", f"{scratch}/wrong", "-B", f"{scratch}/other", f"-DCMAKE_PREFIX_PATH={scratch}/prefix")
            run("cmake", "--build", f"{scratch}/other")
            program = f"{scratch}/other/crossed"
            output = run(program, "verify", "--cases", "40", "--failures-max", "1", *only, code=1)
            self.assertRegex(output, r"FAILURE after \d+ cases?: property keeps_what_it_updates: step \d+, rank \d+, ")
            case = next(line for line in output.split("\n") if line.startswith("  replay   "))
            self.assertTrue(case.startswith(f"  replay   {program} replay '"), case)
            replayed = run(program, "replay", case.split("'")[1], code=1)
            self.assertIn("FAILED: property keeps_what_it_updates: ", replayed)


if __name__ == "__main__":
    unittest.main()
