"""The examples do what they say."""

import os
import subprocess
import sys

import shardproof

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "examples", "python")


def run(*command):
    env = dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(os.path.abspath(shardproof.__file__))))
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=EXAMPLES, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_training_program_learns_and_saves(tmp_path):
    said = run("train.py", str(tmp_path))
    losses = [float(line.split()[-1]) for line in said.splitlines()]
    assert len(losses) == 3 and losses[-1] < losses[0] / 4
    assert shardproof.Manager(str(tmp_path)).steps() == [100]


def test_the_tests_of_models_pass():
    said = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "shardproof.pytest_plugin",
        "--shardproof-cases",
        "4",
        "test_own_model.py",
    )
    assert "3 passed" in said
