"""shardproof.verify compares all that a model does: whatever sharding changes of it is found, and named."""

import copy
import re

import pytest
import torch
from torch import nn

from shardproof.check import Draw, trained
from shardproof.check.ours import Subject, draw_plan
from shardproof.check.verify import draw_of


class Net(nn.Module):
    """Has buffers of both kinds, extra state, an attribute of each step, results besides, and writes into its argument."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("transient", torch.zeros(()), persistent=False)
        self.calls, self.history = 0, []

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, batch):
        x = batch["x"]
        self.calls += 1
        self.seen += x.detach().mean(0)
        self.transient = self.transient + x.detach().sum()
        y = self.norm(self.first(x))
        self.history = [*self.history[-1:], y.detach().mean()]
        batch["cache"].append(y.detach())
        return {"loss": self.last(y).square().mean(), "hidden": (y, {"norm": y.norm()}), "scale": 3}


def batch(number):
    return {"x": torch.randn(4, 6), "cache": []}


def loss(model, given):
    return model(given)["loss"]


LINE = "units=first{} optimizer={} strategy=zero3 dp_shard=2 steps=2 step0.microbatches=2 step1.microbatches=2 data=3"


def verdict_of(line=LINE.format("", "sgd(lr=0.1)")):
    return Subject(Net, batch, loss).tried(draw_of(line))


@pytest.mark.parametrize("options", ["", " inputs=grad"])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "torch.AdamW(lr=0.01)"])
def test_all_that_is_compared_is_equal_where_nothing_is_wrong(options, optimizer):
    verdict = verdict_of(LINE.format(options, optimizer))
    assert verdict.kind == "held", verdict.message


class Breaks:
    """Does something to the models that are sharded, on the last rank."""

    def __init__(self, monkeypatch, change):
        plain = trained.fully_shard

        def sharded(model, comms, **given):
            made = plain(model, comms, **given)
            if comms.rank == 1:
                change(model, made)
            return made

        monkeypatch.setattr(trained, "fully_shard", sharded)


def at_forward(change):
    """Changes the model after each forward."""

    def hook(module, args, result):
        change(module, result)

    return lambda model, sharded: model.register_forward_hook(hook)


def _with_another_hidden(model, sharded):
    hidden = lambda given: (given[0] + 1, *given[1:])  # noqa: E731
    model.register_forward_hook(lambda module, args, result: {**result, "hidden": hidden(result["hidden"])})


def _without_a_graph(model, sharded):
    hidden = lambda given: (given[0].detach(), *given[1:])  # noqa: E731
    model.register_forward_hook(lambda module, args, result: {**result, "hidden": hidden(result["hidden"])})


def _with_a_copied_list(model, sharded):
    model.register_forward_pre_hook(lambda module, args: ({**args[0], "cache": list(args[0]["cache"])},))


def _of_two_batches(model, sharded):
    model.norm.register_forward_pre_hook(lambda module, args: (module.num_batches_tracked.add_(1), None)[1])


def _with_a_lost_extra_state(model, sharded):
    plain = sharded.state_dict
    sharded.state_dict = lambda: {name: value for name, value in plain().items() if "extra" not in name}


CHANGES = {
    "a persistent buffer": (at_forward(lambda module, _: module.seen.add_(1)), "buffer seen"),
    "a buffer that is not persistent": (at_forward(lambda module, _: module.transient.add_(1)), "buffer transient"),
    "statistics that count twice": (_of_two_batches, "buffer norm.num_batches_tracked"),
    "another result": (_with_another_hidden, r"result of microbatch 0\[0\]\['hidden'\]\[0\]"),
    "a result without a graph": (_without_a_graph, "kind of result of microbatch 0.*grad=True.*grad=False"),
    "an argument that is a copy": (_with_a_copied_list, "argument of microbatch 0"),
    "an attribute": (at_forward(lambda module, _: setattr(module, "calls", 0)), "attribute calls"),
    "a tensor among the attributes": (at_forward(lambda module, _: module.history[-1].mul_(2)), r"attribute history\[\d\]"),
    "extra state": (_with_a_lost_extra_state, "names of the state dict"),
    "another buffer object": (
        lambda model, sharded: setattr(model, "seen", model.seen.clone()),
        r"parts that are other objects now: .*buffer seen",
    ),
    "another module object": (
        lambda model, sharded: setattr(model, "norm", copy.copy(model.norm)),
        r"parts that are other objects now: .*module norm",
    ),
    "a random number": (at_forward(lambda module, _: torch.rand(())), "torch's generator has drawn other numbers"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_sharding_would_change_is_found_and_named(what, monkeypatch):
    change, says = CHANGES[what]
    Breaks(monkeypatch, change)
    verdict = verdict_of()
    assert verdict.kind == "differs", verdict
    assert re.search(says, verdict.message), verdict.message


@pytest.mark.parametrize("mode", ["ordered", "canonical", "fast"])
def test_a_model_in_float64_is_compared_in_float64(mode):
    def make():
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).double()

    subject = Subject(make, lambda number: torch.randn(4, 6).double(), lambda model, x: model(x).square().mean())
    verdict = subject.tried(draw_of(f"mode={mode} units=0 strategy=zero3 dp_shard=2 steps=2 data=3"))
    assert verdict.kind == "held", verdict.message


def test_hooks_of_an_optimizer_that_run_twice_are_found(monkeypatch):
    plain = trained.torch_optimizer

    def twice(*args, **settings):
        made = plain(*args, **settings)
        step = made.step
        made.step = lambda: (step(), [hook(made, (), {}) for hook in made._optimizer_step_post_hooks.values()])
        return made

    monkeypatch.setattr(trained, "torch_optimizer", twice)
    verdict = verdict_of(LINE.format("", "torch.AdamW(lr=0.01)"))
    assert verdict.kind == "differs" and "hooks of the optimizer" in verdict.message, verdict
    assert verdict_of().kind == "held"


def test_gradients_of_a_batch_are_compared(monkeypatch):
    def halves(model, sharded):
        def hook(module, args):
            if args[0]["x"].requires_grad:
                args[0]["x"].register_hook(lambda gradient: gradient / 2)

        model.register_forward_pre_hook(hook)

    Breaks(monkeypatch, halves)
    verdict = verdict_of(LINE.format(" inputs=grad", "sgd(lr=0.1)"))
    assert verdict.kind == "differs" and "gradient of argument" in verdict.message, verdict
    assert verdict_of().kind == "held"


HISTORY = "strategy=zero3 dp_shard=2 steps=3 lost=1 s1.dp_shard=3 s1.steps=2 s1.unsaved=yes"
RESUMED = "units=first{} optimizer={} load=yes segments=3 data=3 " + HISTORY
MOMENTUM = ("sgd(lr=0.05,momentum=0.9)", "torch.SGD(lr=0.05,momentum=0.9)", "torch.Adam(lr=0.01)")


@pytest.mark.parametrize("optimizer", [*MOMENTUM, "adamw(lr=0.01)"])
@pytest.mark.parametrize("options", ["", " resume=used"])
def test_a_process_that_goes_on_has_what_rank_0_saved_whether_it_is_fresh_or_used(options, optimizer):
    verdict = verdict_of(RESUMED.format(options, optimizer))
    assert verdict.kind == "held", verdict.message


@pytest.mark.parametrize("optimizer", MOMENTUM)
def test_a_checkpoint_of_before_the_first_step_empties_a_used_optimizer(optimizer):
    verdict = verdict_of(f"resume=used optimizer={optimizer} load=yes segments=2 strategy=zero3 dp_shard=2 lost=1 s1.steps=2")
    assert verdict.kind == "held", verdict.message


def test_state_that_a_used_process_keeps_is_found(monkeypatch):
    plain = trained.load
    monkeypatch.setattr(trained, "load", lambda folder, sharded, optimizer, **given: plain(folder, sharded, **given))
    verdict = verdict_of(RESUMED.format(" resume=used", "torch.SGD(lr=0.05,momentum=0.9)"))
    assert verdict.kind == "differs" and "parameter of" in verdict.message, verdict


def test_on_one_rank_random_numbers_are_those_of_plain_pytorch():
    def make():
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    subject = Subject(make, lambda number: torch.randn(4, 6), lambda model, x: model(x).square().mean())
    line = "units=0+2 strategy=zero3 steps=2 step0.eval=yes step0.microbatches=2 step1.discard=yes step1.microbatches=2 data=3"
    verdict = subject.tried(draw_of(line))
    assert verdict.kind == "held", verdict.message


def test_draws_reach_used_processes_batches_with_gradients_and_loads_of_torchs_optimizers():
    draws = [Draw(1, number) for number in range(600)]
    for draw in draws:
        draw_plan(draw, Subject(Net, batch, loss, units=("", "a+b")))
    lines = [draw.line for draw in draws]
    assert all(sum(word in line for line in lines) > 20 for word in ("resume=used", "inputs=grad", "recompute="))
    assert sum("torch." in line and "load=yes" in line for line in lines) > 20
