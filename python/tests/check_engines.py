"""PyTorch's engines hold where they are known to hold, at the speed and with the controls that are promised."""

from __future__ import annotations

import pytest

import shardproof.check as check
from shardproof.check.engines import ENGINES


@pytest.mark.parametrize("name", ["torch-ddp", "torch-zero1", "torch-fsdp2", "torch-hsdp"])
def test_healthy_engines_hold(name):
    report = check(ENGINES[name], cases=40, seed=11)
    assert report.ok and report.held + sum(report.known.values()) == 40, str(report)
    assert report.held >= 35 and report.controls >= 80 and report.blind == 0 and report.farthest < 8


def test_engines_hold_on_processes_too():
    report = check(ENGINES["torch-fsdp2"], cases=4, seed=2, ranks="processes")
    assert report.ok and report.held == 4, str(report)


def test_cases_depend_on_the_seed_and_the_number_only():
    lines = [[check.Draw(7, number).integer("x", 0, 10**6) for number in range(5)] for _ in range(2)]
    assert lines[0] == lines[1] and len(set(lines[0])) == 5
