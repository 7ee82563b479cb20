"""PyTorch's engines hold where they are known to hold, at the speed and with the controls that are promised."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import shardproof.check as check
from shardproof.check.engines import ENGINES
from shardproof.check.script import script_of


@pytest.mark.parametrize("name", ["torch-ddp", "torch-zero1", "torch-fsdp2", "torch-hsdp"])
def test_healthy_engines_hold(name):
    report = check(ENGINES[name], cases=40, seed=11)
    assert report.ok and report.held + sum(report.known.values()) == 40, str(report)
    assert report.held >= 35 and report.controls >= 80 and report.blind == 0 and report.farthest < 8


@pytest.mark.parametrize("name, cases", [("torch-fsdp2", 4), ("shardproof-fsdp", 100)])
def test_engines_hold_on_processes_too(name, cases):
    report = check(ENGINES[name], cases=cases, seed=2, ranks="processes")
    assert report.ok and report.held + sum(report.known.values()) == cases, str(report)


def test_cases_depend_on_the_seed_and_the_number_only():
    lines = [[check.Draw(7, number).integer("x", 0, 10**6) for number in range(5)] for _ in range(2)]
    assert lines[0] == lines[1] and len(set(lines[0])) == 5


@pytest.mark.parametrize("how", ["dcp", "flat", "full"])
def test_the_script_of_a_case_that_holds_ends_with_0(how, tmp_path):
    subject = ENGINES["torch-fsdp2"]
    line = f"load=yes segments=2 dp=2 s1.dp=3 optimizer=adamw checkpoint={how} data=3 features=3 classes=4"
    verdict = check(subject, replay=line)
    assert verdict.kind == "held", verdict.message
    script = tmp_path / "case.py"
    script.write_text(script_of(subject, verdict))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "agrees with the plain one" in ended.stdout, ended.stdout + ended.stderr


FIVE_LINES = """
import shardproof, torch
parallelize = lambda model, mesh: torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
make_batch = lambda generator, count: torch.rand(2, count, 3, generator=generator).unbind(0)
report = shardproof.check(parallelize, lambda: torch.nn.Linear(3, 3), make_batch, torch.nn.functional.mse_loss, cases=3)
print(report)
"""


def test_the_module_is_the_function_as_the_documents_write_it():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", FIVE_LINES], capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0 and "3 cases" in ended.stdout, ended.stdout + ended.stderr
