"""Experts that ranks of a foreign engine share: `ep` is drawn for engines that know it, and a wrong gradient is found."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

import shardproof.check as check
from shardproof.check import Counterexample, Sharded, models
from shardproof.check.engines import ENGINES, fsdp2_ep
from shardproof.check.plan import Subject, draw_plan
from shardproof.check.script import script_of

EXPERTS = ENGINES["torch-fsdp2-ep"]


def plans_of(subject: Subject, count: int = 200) -> list:
    return [draw_plan(check.Draw(3, number), subject) for number in range(count)]


def test_ranks_that_share_experts_are_drawn_for_each_segment_and_divide_the_data_parallel_ranks():
    segments = [plan.segments for plan in plans_of(EXPERTS)]
    every = [segment for each in segments for segment in each]
    assert all(segment.data_ranks % segment.ep == 0 for segment in every)
    assert {(segment.data_ranks, segment.ep) for segment in every} >= {(2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4)}
    assert any(first.ep > 1 and second.ep not in (1, first.ep) for first, second, *_ in filter(lambda e: len(e) > 1, segments))


@pytest.mark.parametrize("name", [name for name in ENGINES if not ENGINES[name].ep])
def test_an_engine_that_does_not_know_ep_is_not_given_it_and_draws_what_it_drew(name):
    for plan in plans_of(ENGINES[name], 20):
        assert all(segment.ep == 0 and "ep" not in plan.options_of(segment) for segment in plan.segments)
    draw = check.Draw(3, 0)
    draw_plan(draw, ENGINES[name])
    assert not any(choice.endswith("ep") and "step" not in choice for choice in draw.indices)


def test_ep_is_no_option_and_no_axis_besides():
    for settings in ({"options": {"ep": (1, 2)}}, {"mesh": {"dp": (1, 2), "ep": (1, 2)}}):
        with pytest.raises(ValueError, match="take it out of options and mesh"):
            replace(EXPERTS, **settings)
    with pytest.raises(ValueError, match="at least 1"):
        replace(EXPERTS, ep=(0, 2))


# Of 2,000 seeds the two below draw the most values, and pairs of them, in so few cases: as many as 40 and 60 cases of seed 11.
def test_experts_of_fsdp2_hold():
    report = check(EXPERTS, cases=16, seed=1423)
    assert report.ok and report.held + sum(report.known.values()) == 16, str(report)
    assert report.held >= 14 and report.controls >= 32 and report.blind == 0 and report.farthest < 8


def test_experts_of_this_library_hold():
    report = check(ENGINES["shardproof-ep"], cases=24, seed=551, ranks="processes")
    assert report.ok and report.held == 24, str(report)
    assert report.controls >= 32 and report.blind == 0 and report.farthest < 8


def run(text: str, folder) -> subprocess.CompletedProcess:
    script = folder / "case.py"
    script.write_text(text)
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)


def fsdp2_divides_as_it_does_by_itself(model: nn.Module, mesh, ep: int = 1) -> Sharded:
    """pytorch#160285: gradients of experts are means over the ranks that hold the same ones, and no other rank divides."""
    made = fsdp2_ep(model, mesh, ep, over_one=True)
    for name, module in model.named_modules():
        if name.endswith("experts"):
            module.set_gradient_divide_factor(mesh["dp"].size() // ep)
    return made


def test_gradients_of_experts_that_are_not_divided_by_the_ranks_that_sent_rows_are_found(tmp_path):
    wrong = replace(EXPERTS, parallelize=fsdp2_divides_as_it_does_by_itself, options={}, load=False, name="wrong")
    report = check(wrong, cases=60, seed=5, stop_after=1)
    assert len(report.failures) == 1 and report.failures[0].confirmed == report.failures[0].of, str(report)
    verdict = report.failures[0].verdict
    assert verdict.kind == "differs" and verdict.where == "gradient" and ".experts." in verdict.message, verdict.message
    assert "2 times the plain run's, which is ep, the number of ranks that have different experts" in verdict.message
    assert {word.split("=")[0] for word in verdict.line.split()} == {"dp", "ep", "data"}, verdict.line
    assert check(wrong, replay=verdict.line.replace("ep=2", "ep=1")).kind == "held"  # this mistake is seen by nothing else

    ended = run(report.failures[0].script, tmp_path)
    assert ended.returncode == 1 and "the sharded run differs" in ended.stdout, ended.stdout + ended.stderr


def test_the_script_of_a_case_in_which_each_segment_has_another_ep_ends_with_0(tmp_path):
    line = "load=yes segments=2 dp=4 ep=4 s1.dp=4 s1.ep=2 data=3"
    verdict = check(EXPERTS, replay=line)
    assert verdict.kind == "held", verdict.message
    ended = run(script_of(EXPERTS, verdict), tmp_path)
    assert ended.returncode == 0 and "agrees with the plain one" in ended.stdout, ended.stdout + ended.stderr
    # The source of such an engine imports from its package, which a script has not, and the report says so.
    assert script_of(ENGINES["shardproof-ep"], verdict) == ""
    assert "no script: the source of a function" in str(Counterexample(verdict, verdict.line, 3, 3, "processes"))
    assert "no script" not in str(Counterexample(verdict, verdict.line, 3, 3, "processes", "print()"))


def by_hand(mistake: bool):
    """Replicas of the whole model, whatever `ep` is. The mistake divides gradients of experts by too few ranks."""

    def parallelize(model: nn.Module, mesh, ep: int) -> Sharded:
        group = mesh.get_group("dp")

        def gradients() -> dict:
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad, group=group)
                shared = mistake and "experts" in name
                parameter.grad /= mesh["dp"].size() // (ep if shared else 1)
            return {name: parameter.grad for name, parameter in model.named_parameters()}

        return Sharded(model, gradients=gradients)

    return parallelize


@pytest.mark.parametrize("mistake", [False, True])
def test_an_engine_of_the_users_own_gets_ep_where_its_check_says_so(mistake):
    given = (models.make_expert_model, models.make_expert_batch, models.loss)
    settings = {"cases": 30 if mistake else 12, "seed": 1, "stop_after": 1, "load": False, "no_sync": False}
    report = check(by_hand(mistake), *given, ep=(1, 2), **settings)
    assert report.ok != mistake, str(report)
    if mistake:
        assert "gradient of blocks.0.experts.up" in report.failures[0].verdict.message
