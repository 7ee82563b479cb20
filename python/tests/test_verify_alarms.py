"""shardproof.verify calls a failure only what sharding did: what plain PyTorch does, or cannot do, is no failure."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardproof
from shardproof.check.ours import Subject
from shardproof.check.verify import draw_of, prepare


def squares(model, batch):
    return model(batch).square().mean()


def verdict_of(make_model, line, make_batch=lambda number: torch.randn(4, 8), loss=squares):
    return Subject(make_model, make_batch, loss).tried(draw_of(line))


class Lambda(nn.Module):
    """A parameter, and a function of it and the batch."""

    def __init__(self, value, run):
        super().__init__()
        self.value, self.run = nn.Parameter(value), run

    def forward(self, x):
        return self.run(x, self.value)


def test_what_float16_has_no_kernel_for_shows_nothing_under_no_grad_either():
    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.AvgPool3d(2))

    line = "compute=float16 strategy=zero3 step0.eval=yes data=1"
    verdict = verdict_of(make, line, lambda number: torch.randn(2, 4, 4, 8))
    assert verdict.kind == "diverged" and verdict.compared == 0


def test_a_model_without_kernels_in_float64_is_measured_from_the_plain_run():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 16, 16) * 0.1)

        def forward(self, x):
            return functional.grouped_mm(x, self.weight, offs=torch.tensor([4, 8], dtype=torch.int32))

    line = "mode=fast optimizer=adamw(lr=0.01) strategy=zero2 dp_shard=3 steps=2 step0.microbatches=2 data=1"
    verdict = verdict_of(Experts, line, lambda number: torch.randn(8, 16))
    assert verdict.kind == "held" and verdict.compared > 5000 and verdict.narrow
    report = shardproof.verify(Experts, lambda: torch.randn(8, 16), squares, cases=4, modes=["fast"])
    assert "4 cases in fast mode were measured from the plain run: it has no kernels in float64" in str(report)


@pytest.mark.parametrize("mode", ["ordered", "canonical", "fast"])
def test_a_parameter_above_two_to_the_24_holds(mode):
    line = f"mode={mode} strategy=zero3 dp_shard=2 steps=2 data=1"
    verdict = verdict_of(
        lambda: Lambda(torch.tensor([3e7]), torch.mul), line, loss=lambda model, batch: model(batch).mean() * 1e-3
    )
    assert verdict.kind == "held", verdict.message


def test_a_gradient_without_room_in_the_fixed_point_sums_of_three_ranks_shows_nothing():
    line = "mode=canonical strategy=zero3 dp_shard=3 data=1"

    def steep(number):
        return torch.full((2,), 4.5e5)

    verdict = verdict_of(lambda: Lambda(torch.ones(1), torch.mul), line, steep, lambda model, x: model(x).mean())
    assert verdict.kind == "diverged"


def _part():
    return Lambda(torch.randn(9, 20)[1:, 3:11], torch.matmul)


def _channels_last():
    return nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)


def _with_an_empty_one():
    model = nn.Linear(8, 8)
    model.empty = nn.Parameter(torch.empty(0, 4))
    return model


@pytest.mark.parametrize(
    "make,shape",
    [
        (lambda: Lambda(torch.randn(8, 6).t().contiguous().t(), torch.matmul), (4, 8)),
        (_part, (4, 8)),
        (_channels_last, (2, 8, 5, 5)),
        (_with_an_empty_one, (4, 8)),
        (lambda: nn.Linear(8, 3).double(), (4, 8)),
        (lambda: nn.Linear(8, 3).bfloat16(), (4, 8)),
        (lambda: Lambda(torch.tensor(1.5), torch.mul), (4, 8)),
    ],
    ids=["transposed", "a part of a tensor", "channels last", "with an empty one", "float64", "bfloat16", "a number"],
)
def test_parameters_of_rare_kinds_hold(make, shape):
    def batch():
        return torch.randn(shape).to(next(make().parameters()).dtype)

    report = shardproof.verify(make, batch, squares, cases=12)
    assert report.diverged < 6


def test_an_infinite_loss_shows_nothing():
    line = "strategy=zero3 dp_shard=2 data=1"
    verdict = verdict_of(lambda: nn.Linear(8, 1), line, loss=lambda model, x: model(x).mean() + float("inf"))
    assert verdict.kind == "diverged"


class Once:
    """A function that raises when it is called for the third time."""

    def __init__(self, run):
        self.run, self.calls = run, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls > 2:
            raise LookupError("there is no more")
        return self.run(*args)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_the_callers_own_functions_raise_is_the_callers(which):
    functions = [lambda: nn.Linear(8, 1), lambda number: torch.randn(4, 8), squares]
    functions[which] = Once(functions[which])
    with pytest.raises(LookupError, match="there is no more") as raised:
        shardproof.verify(*functions, cases=30)
    assert not isinstance(raised.value, shardproof.ProofFailed)
    notes = getattr(raised.value, "__notes__", [])  # none where it is raised before there is a case
    assert all("the plain model raises this without sharding" in note for note in notes) and (notes or which != 1)


def test_what_only_the_sharded_model_raises_is_a_failure_with_its_error():
    class Peeks(nn.Module):
        def __init__(self):
            super().__init__()
            self.unit, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.last(self.unit(x)) + self.unit.bias.sum()

    verdict = verdict_of(Peeks, "units=unit strategy=zero3 dp_shard=2 data=1")
    assert verdict.kind == "raised" and "unit.bias is sharded and has no data here" in str(verdict.error) and verdict.bad


def test_a_recomputation_that_plain_pytorch_cannot_do_either_shows_nothing():
    calls = []

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            calls.append(1)
            return self.linear(x) * torch.full_like(x, len(calls) % 5)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.unit = nn.Linear(8, 8), Counts()

        def forward(self, x):
            return self.unit(self.first(x))

    line = "units=unit recompute=unit strategy=zero3 dp_shard=2 data=1"
    assert verdict_of(Net, line).kind == "diverged"


def test_an_attribute_that_is_another_one_in_every_model_is_not_compared():
    class Named(nn.Linear):
        count = 0

        def __init__(self):
            super().__init__(8, 1)
            Named.count += 1
            self.number = Named.count

    subject = Subject(Named, lambda number: torch.randn(4, 8), squares)
    prepare(subject)
    verdict = subject.tried(draw_of("strategy=zero3 dp_shard=2 data=1"))
    assert verdict.kind == "held", verdict.message
