"""Planted bugs in foreign functions: each must be found, and the report must say what it looks like."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardproof.check as check
from shardproof.check import Sharded, models
from shardproof.check.engines import FINITE

PLAIN = (models.make_model, models.make_batch, models.loss)


class Replicas(nn.Module):
    """Data parallelism by hand: `reduce()` averages the gradients after the last backward. It leaves room for a mistake."""

    def __init__(self, module: nn.Module, group, mistake: str) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.mistake = mistake
        self.last = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def reduce(self) -> None:
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        for number, parameter in enumerate(p for p in self.module.parameters() if p.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.mistake == "skips a parameter" and number == 0:
                continue
            if self.mistake == "drops a term" and rank == 1:
                parameter.grad.zero_()
            dist.all_reduce(parameter.grad, group=self.group)
            if self.mistake == "doubles a tied gradient" and getattr(self.module, "embed", None) is not None:
                if self.module.head.weight is self.module.embed.weight is parameter:
                    parameter.grad *= 2
            if self.mistake == "drifts" and rank == 1:
                parameter.grad *= 1 + 1e-4
            if self.mistake != "forgets to divide":
                parameter.grad /= size


class Reducing:
    """An optimizer that reduces the gradients at the start of its step, but for the clip."""

    def __init__(self, wrapped: Replicas, optimizer: torch.optim.Optimizer) -> None:
        self.wrapped, self.optimizer = wrapped, optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        if self.wrapped.mistake != "keeps old gradients":
            self.optimizer.zero_grad()


def replicas(mistake: str):
    def parallelize(model: nn.Module, mesh) -> Sharded:
        wrapped = Replicas(model, mesh.get_group("dp"), mistake)

        def gradients() -> dict:
            wrapped.reduce()
            return {name: p.grad for name, p in model.named_parameters()}

        return Sharded(
            wrapped,
            parameters=lambda: dict(model.named_parameters()),
            gradients=gradients,
            after_build=lambda optimizer: Reducing(wrapped, optimizer),
        )

    return parallelize


@functools.cache
def run(mistake: str):
    return check(replicas(mistake), *PLAIN, cases=60, seed=5, stop_after=1, load=False, no_sync=False)


def test_data_parallelism_by_hand_holds_in_all_cases_side_by_side():
    report = check(replicas(""), *PLAIN, cases=24, seed=5, jobs=3, load=False, no_sync=False)
    assert report.ok, str(report)
    assert report.cases == 24 and report.held == 24 and report.controls >= 48 and report.blind == 0


@pytest.mark.parametrize(
    "mistake, looks",
    [
        ("forgets to divide", "the size of dp"),
        ("drops a term", "the mean without the term of data-parallel rank 1"),
        ("skips a parameter", "of data-parallel rank 0 alone"),
        ("doubles a tied gradient", "2 times the plain run's"),
        ("keeps old gradients", "this step's gradient added to the last one's"),
        ("drifts", "rank 1: differ"),
    ],
)
def test_a_mistake_is_found_and_named(mistake, looks):
    report = run(mistake)
    assert len(report.failures) == 1, str(report)
    verdict = report.failures[0].verdict
    assert verdict.kind == "differs" and looks in verdict.message, verdict.message
    assert report.failures[0].confirmed == report.failures[0].of


def test_a_counterexample_is_as_small_as_it_can_be():
    verdict = run("forgets to divide").failures[0].verdict
    words = dict(word.split("=") for word in verdict.line.split())
    assert set(words) == {"dp", "data"} and words["dp"] == "2", verdict.line


def test_a_counterexample_is_replayed_from_its_line():
    line = run("drops a term").failures[0].verdict.line
    again = check(replicas("drops a term"), *PLAIN, replay=line, load=False, no_sync=False)
    assert again.kind == "differs" and again.line == line
    healthy = check(replicas(""), *PLAIN, replay=line, load=False, no_sync=False)
    assert healthy.kind == "held" and healthy.line == line


class Stale(nn.Module):
    """Computes on copies of the parameters, which `refresh` brings up to date."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.refresh()

    def refresh(self) -> None:
        self.copies = {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = {name: p + (self.copies[name] - p).detach() for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, values, (x,))


class Refreshing(torch.optim.SGD):
    """Calls `after` at the end of a step, but not of the empty step by which `get_state_dict` makes an optimizer's state."""

    def step(self, closure=None):
        moves = any(p.grad is not None and p.grad.any() for group in self.param_groups for p in group["params"])
        super().step()
        if moves:
            self.after()


def test_parameters_that_are_stale_after_a_step_are_found():
    report = check(lambda model, mesh: Stale(model), *PLAIN, cases=40, mesh={"dp": (1,)}, load=False, stop_after=1)
    assert len(report.failures) == 1 and report.failures[0].verdict.where == "loss", str(report)
    assert "segment 0 step 1" in report.failures[0].verdict.message


def test_parameters_that_are_stale_after_a_load_are_found():
    def parallelize(model: nn.Module, mesh) -> Sharded:
        stale = Stale(model)

        def refreshed(parameters, kind, **settings):
            optimizer = Refreshing(parameters, **settings)
            optimizer.after = stale.refresh
            return optimizer

        return Sharded(stale, wrap_optimizer=refreshed)

    settings = {"mesh": {"dp": (1,)}, "optimizers": ("sgd",), "stop_after": 1}
    held = check(parallelize, *PLAIN, cases=20, load=False, **settings)
    assert held.ok, str(held)
    report = check(parallelize, *PLAIN, cases=60, **settings)
    assert len(report.failures) == 1, str(report)
    assert "segment 1 step 0: loss" in report.failures[0].verdict.message


def test_a_rank_that_raises_is_a_counterexample():
    def parallelize(model: nn.Module, mesh) -> nn.Module:
        if mesh.get_local_rank() == 1:
            raise ValueError("rank 1 does not like this")
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))

    report = check(parallelize, *PLAIN, cases=20, stop_after=1)
    assert [f.verdict.kind for f in report.failures] == ["raised"], str(report)
    assert "rank 1 raised: ValueError: rank 1 does not like this" in report.failures[0].verdict.message


def test_an_error_that_the_caller_expects_is_counted_as_refused():
    def parallelize(model: nn.Module, mesh) -> nn.Module:
        if mesh.size() == 3:
            raise NotImplementedError("three ranks are not supported")
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))

    report = check(parallelize, *PLAIN, cases=30, refusals=("three ranks are not supported",), load=False)
    assert report.ok and sum(report.refused.values()) > 0 and report.held + sum(report.refused.values()) == 30, str(report)


def test_a_comparison_of_nothing_but_zeros_is_reported():
    def make_batch(generator, count):
        return torch.zeros(count, 2), torch.zeros(count, 1)

    def make_model():
        model = nn.Linear(2, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    report = check(
        lambda model, mesh: model, make_model, make_batch, models.loss, cases=3, mesh={"dp": (1,)}, load=False, stop_after=1
    )
    assert not report.ok and report.failures[0].verdict.kind == "vacuous"


def test_an_error_of_one_job_ends_the_others(tmp_path):
    cases = 1000

    def make_model(draw):
        with open(tmp_path / "made", "ab") as made:
            made.write(b".")
        try:
            (tmp_path / "raised").touch(exist_ok=False)
        except FileExistsError:
            return models.make_model(draw)
        raise ValueError("only once")

    with pytest.raises(RuntimeError, match="only once"):
        check(replicas(""), make_model, *PLAIN[1:], cases=cases, jobs=2, load=False, no_sync=False)
    # The other job runs half of the cases when nothing ends it, and makes the model at least twice for each.
    assert (tmp_path / "made").stat().st_size < cases // 2


def forgets_to_divide(model: nn.Module, mesh) -> nn.Module:
    """Sums the gradients of the ranks, and does not divide them."""
    group = mesh.get_group("dp")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(
                lambda gradient: dist.all_reduce(summed := gradient.clone(), group=group) and None or summed
            )
    return model


def test_the_script_of_a_counterexample_shows_it_by_itself(tmp_path):
    report = check(forgets_to_divide, *PLAIN, cases=20, seed=1, stop_after=1)
    script = tmp_path / "found.py"
    script.write_text(report.failures[0].script)
    assert "shardproof" not in script.read_text().split('"""')[2]
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "the sharded run differs" in ended.stdout
    healthy = script.read_text().replace("None or summed", "None or summed / dist.get_world_size(group)")
    script.write_text(healthy)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "agrees with the plain one" in ended.stdout, ended.stdout + ended.stderr


def test_a_hang_is_a_counterexample_with_the_stacks_of_the_ranks_that_wait():
    def parallelize(model: nn.Module, mesh) -> nn.Module:
        group = mesh.get_group("dp")
        if mesh.size() == 2 and mesh.get_local_rank() == 0:
            dist.all_reduce(torch.zeros(1), group=group)  # rank 1 never comes
        return nn.parallel.DistributedDataParallel(model, process_group=group) if mesh.size() != 2 else model

    for ranks in ("threads", "processes"):
        line = "dp=2 data=1"
        verdict = check(parallelize, *PLAIN, replay=line, ranks=ranks, patience=4.0, load=False)
        assert verdict.kind == "hung" and verdict.line == line, f"{verdict.kind} {verdict.message}"
        assert any("all_reduce" in trace for trace in verdict.traces.values()), verdict.traces


def test_a_crash_is_a_counterexample_and_the_cases_after_it_run():
    def parallelize(model: nn.Module, mesh) -> nn.Module:
        if mesh.size() == 2 and mesh.get_local_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))

    report = check(parallelize, *PLAIN, cases=12, seed=3, load=False, stop_after=2)
    assert report.cases == 12 and report.held > 3, str(report)
    assert [f.verdict.kind for f in report.failures] == ["crashed"], str(report)
    assert "SIGKILL" in report.failures[0].verdict.message


class Counted(nn.Module):
    """Has statistics of its batches, and results that the loss does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x * 1.0).mean(2))


def counted_batch(generator, count):
    return torch.randn(count, 3, 4, generator=generator), torch.zeros(count, 1)


def with_hook(change):
    """Plain data parallelism of FSDP2, and a hook after the forward of the whole model."""

    def parallelize(model: nn.Module, mesh) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        module = fully_shard(model, mesh=mesh)
        module.register_forward_hook(lambda module, args, result: change(module, args, result, mesh.get_local_rank()))
        return module

    return parallelize


def sums(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that does not show what the results are, so that they have to be compared themselves."""
    return (output - output.detach()).mean() + target.mean()


CHANGES = {
    "nothing": (lambda module, args, result, rank: None, ""),
    "statistics": (lambda module, args, result, rank: (module.norm.num_batches_tracked.add_(1), None)[1], "buffer"),
    "results": (lambda module, args, result, rank: result + 0.01 * (1 - 2 * rank), "result"),
    "inputs": (lambda module, args, result, rank: (args[0].add_(1.0), None)[1], "argument"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_statistics_results_and_inputs_are_compared(what):
    change, kind = CHANGES[what]
    settings = {"mesh": {"dp": (2,)}, "load": False, "loss": sums, "cases": 4, "stop_after": 1, "clips": FINITE}
    report = check(with_hook(change), Counted, counted_batch, dtypes=(torch.float64,), **settings)
    assert [failure.verdict.where for failure in report.failures] == ([kind] if kind else []), str(report)
    assert report.loose == 0, str(report)


def test_a_campaign_of_which_no_case_was_judged_is_an_error():
    def parallelize(model, mesh):
        if dist.get_backend() == "threaded":
            raise ValueError("no threads")
        return replicas("")(model, mesh)

    said = "of 2 cases none could be judged.*2 failed under the threaded group alone\nraised.*no threads"
    with pytest.raises(RuntimeError, match=said):
        check(parallelize, *PLAIN, cases=2, load=False, no_sync=False)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "shardproof.check", "--engine", "torch-ddp", "--cases", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 2 and "of 0 cases none could be judged" in ended.stderr, ended.stdout + ended.stderr


@pytest.mark.parametrize("which", ["make_model", "make_batch", "loss"])
def test_what_the_callers_own_functions_raise_is_no_counterexample(which):
    def fails(*_, **__):
        raise LookupError("there is no more")

    functions = {"make_model": Counted, "make_batch": counted_batch, "loss": models.loss, which: fails}
    with pytest.raises((RuntimeError, LookupError), match="there is no more"):
        check(replicas(""), **functions, cases=3, load=False, no_sync=False)


def test_a_model_without_kernels_in_float64_is_checked_in_float32():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, 16, 16) * 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.grouped_mm(x, self.weight, offs=torch.tensor([len(x)], dtype=torch.int32))

    def batch(generator, count):
        return torch.randn(count, 16, generator=generator), torch.zeros(count, 16)

    report = check(replicas(""), Experts, batch, models.loss, cases=8, load=False, no_sync=False, freeze=False)
    assert report.ok and report.held > 0 and report.diverged > 0 and report.held + report.diverged == 8, str(report)
