"""The tests of a label as few steps, the fastest first, so that a bug that some test finds is found soon.

ctest starts a process for each test, and most of such a process is the start of LibTorch. Here one process runs all tests of
a GoogleTest program and stops at the first failure. What is no GoogleTest program (scripts, `verify`) stays with ctest.
"""
import dataclasses
import json
import os
import re
import time

import planting

# A step that takes this many times its usual time, and these seconds more, does not end. Other work slows a machine down.
TIMES_MAX, SECONDS_MORE = 6, 30


@dataclasses.dataclass
class Step:
    name: str
    command: list
    folder: str
    environment: dict
    seconds: float = 0  # what it takes on the tree as it is


def properties_of(test):
    return {entry["name"]: entry["value"] for entry in test.get("properties", [])}


def steps_of(tree, selection):
    """The steps of the tests that ctest selects by these arguments, which must be built."""
    build = os.path.join(os.path.abspath(tree), "build")
    code, output = planting.run(["ctest", "--test-dir", build, "--show-only=json-v1", *selection], tree)
    tests = json.loads(output)["tests"] if code == 0 else []
    if not tests:
        raise planting.Trouble(f"ctest {' '.join(selection)} selects no test")
    programs, others = {}, []
    for test in tests:
        command = test.get("command", [])
        names = [word.split("=", 1)[1] for word in command[1:] if word.startswith("--gtest_filter=")]
        if names and command[0].startswith(build + os.sep):
            programs.setdefault(command[0], []).append((names[0], properties_of(test)))
        else:
            others.append(test["name"])
    steps = [program_step(program, found) for program, found in programs.items()]
    for name in others:
        steps.append(Step(name, ["ctest", "--test-dir", build, "--output-on-failure", "--tests-regex", f"^{re.escape(name)}$"],
                          tree, {}))
    return steps


def program_step(program, found):
    names = [name for name, _ in found]
    properties = found[0][1]
    environment = dict(entry.split("=", 1) for entry in properties.get("ENVIRONMENT", []))
    command = [program, "--gtest_filter=" + ":".join(names), "--gtest_fail_fast", "--gtest_brief=1",
               "--gtest_also_run_disabled_tests"]
    return Step(os.path.basename(program), command, properties.get("WORKING_DIRECTORY", "."), environment)


def run_step(step, seconds_max):
    """An Outcome: the first test that failed, or how the program ended."""
    environment = [f"{name}={value}" for name, value in step.environment.items()]
    code, output = planting.run(["env", *environment, *step.command], step.folder, seconds_max)
    if code == 0:
        return planting.Outcome(False)
    failed = re.search(r"\[  FAILED  \] ([\w/.]+)", output)
    ended = f"{step.name}: {planting.how_it_ended(code, round(seconds_max))}"
    return planting.Outcome(True, failed.group(1) if failed else step.name if step.command[0] == "ctest" else ended)


class Steps:
    """The steps of each selection of tests, with the seconds that each takes when nothing is wrong."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.path = os.path.join(os.path.abspath(scratch.options.scratch), "seconds.json")
        self.seconds = {}
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                self.seconds = json.load(file)
        self.known = {}

    def of(self, selection):
        """Fastest first; those of unknown time come last."""
        key = " ".join(selection)
        if key not in self.known:
            steps = steps_of(self.scratch.tree, selection)
            for step in steps:
                step.seconds = self.seconds.get(step.name, float(self.scratch.options.seconds))
            self.known[key] = sorted(steps, key=lambda step: step.seconds)
        return self.known[key]

    def measure(self, selection):
        """Runs each step on the tree as it is. The outcome of the first that fails, if one does."""
        for step in self.of(selection):
            start = time.monotonic()
            outcome = run_step(step, 10 * self.scratch.options.seconds)
            if outcome.failed:
                return outcome
            step.seconds = self.seconds[step.name] = round(time.monotonic() - start, 2)
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump(self.seconds, file, indent=1)
        self.known.clear()  # since the order is another now
        return planting.Outcome(False)

    def check(self, selection):
        """The outcome of the first step that fails."""
        for count, step in enumerate(self.of(selection), 1):
            outcome = run_step(step, TIMES_MAX * step.seconds + SECONDS_MORE)
            if outcome.failed:
                outcome.cases = count
                return outcome
        return planting.Outcome(False)
