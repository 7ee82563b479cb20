"""shardproof.verify holds for sound models, finds what is wrong, makes it small, and replays it."""

import functools

import pytest
import torch
from torch import nn

import shardproof
from models import Block, Net, batch, loss_of
from shardproof.check import Draw, parse_line, trained
from shardproof.check import verify as proof
from shardproof.check.ours import Subject, draw_plan

pytest_plugins = ["pytester"]


def test_a_sound_model_holds():
    report = shardproof.verify(Net, batch, loss_of, cases=30, seed=1)
    assert report.cases == 30 and report.values > 10000
    assert "ALL HELD: 30 of 30" in str(report)


def drawn(number, **given):
    draw = Draw(3, number)
    return draw_plan(draw, Subject(Net, batch, loss_of, units=("", "c", "a+b"), **given)), draw


def test_the_line_of_a_case_is_the_case():
    for number in range(300):
        plan, draw = drawn(number, plan={})
        for again in (Draw(values=parse_line(draw.line)), Draw(values=draw.indices)):
            assert draw_plan(again, Subject(Net, batch, loss_of, units=("", "c", "a+b"), plan={})) == plan
            assert again.line == draw.line


@pytest.mark.parametrize(
    "given", [dict(strategies=["zero2", "hsdp"]), dict(optimizers=["torch.SGD(lr=0.3)"]), dict(modes=["fast"])]
)
def test_a_line_says_all_that_the_callers_choices_would_have_said(given):
    for number in range(40):
        plan, draw = drawn(number, **given)
        assert draw_plan(Draw(values=parse_line(draw.line)), Subject(Net, batch, loss_of, units=("",))) == plan


def test_a_wrong_division_is_found_made_small_and_replayed(monkeypatch):
    monkeypatch.setattr(trained, "fully_shard", functools.partial(trained.fully_shard, gradient_divide=1))
    with pytest.raises(shardproof.ProofFailed, match="segment 0 step 0: gradient of ") as raised:
        shardproof.verify(Net, batch, loss_of, cases=20)
    line = raised.value.case
    assert set(parse_line(line)) <= {"dp_shard", "dp_replicate", "data"} and "=2" in line, line
    assert f"case={line!r}" in str(raised.value)
    with pytest.raises(shardproof.ProofFailed, match="gradient of "):
        shardproof.verify(Net, batch, loss_of, case=line)
    monkeypatch.undo()
    shardproof.verify(Net, batch, loss_of, case=line)


def test_draws_reach_canonical_sums_float16_and_tensor_parallelism():
    lines = [drawn(number, plan={})[1].line for number in range(1000)]
    for text in ("mode=canonical", "compute=float16", "scale=1024", "tp=2"):
        assert sum(text in line for line in lines) > 5, text
    assert not any("tp=" in drawn(number)[1].line for number in range(100))


PLAN = {"blocks.*.up": shardproof.ColumnParallel(), "blocks.*.down": shardproof.RowParallel()}
TWICE = "steps=2 step0.microbatches=2 step1.microbatches=2 data=3"
CUT = "tp=2 mode=fast units=blocks.0+blocks.1 optimizer=adamw(lr=0.01) strategy=zero3 dp_shard=2 step0.clip=(0.5,2.0) " + TWICE
CANONICAL = "mode=canonical optimizer=adamw(lr=0.01) strategy=zero2 dp_shard=3 " + TWICE
SCALED = "compute=float16 scale=1000000000 load=yes segments=2 strategy=zero3 dp_shard=2 steps=3 lost=1 data=3"


@pytest.mark.parametrize("line", [CUT, CANONICAL, SCALED])
def test_a_sound_model_holds_cut_by_tensor_parallelism_with_canonical_sums_and_with_a_scaled_loss(line):
    assert shardproof.verify(Net, batch, loss_of, case=line, plan=PLAN).values > 1000


def test_norms_that_are_summed_over_ranks_that_hold_them_whole_are_found():
    plan = {**PLAN, "blocks.*.norm": shardproof.PartialGradients()}
    with pytest.raises(shardproof.ProofFailed, match="gradient|norm"):
        shardproof.verify(Net, batch, loss_of, case=CUT, plan=plan)


def test_ordered_sums_where_canonical_ones_were_asked_for_are_found(monkeypatch):
    plain = trained.fully_shard
    monkeypatch.setattr(trained, "fully_shard", lambda *args, **given: plain(*args, **{**given, "numerics": "ordered"}))
    with pytest.raises(shardproof.ProofFailed, match="gradient"):
        shardproof.verify(Net, batch, loss_of, case=CANONICAL)


def test_a_loss_scale_that_falls_too_far_is_found(monkeypatch):
    plain = trained.LossScaler
    monkeypatch.setattr(trained, "LossScaler", lambda **given: plain(**{**given, "backoff": 0.25}))
    with pytest.raises(shardproof.ProofFailed, match="loss scale"):
        shardproof.verify(Net, batch, loss_of, case=SCALED)


CLIP = trained.Sharded.clip_gradients


def clip_half_as_much(sharded, norm_max, order=2):
    return CLIP(sharded, norm_max * 2, order)


@pytest.mark.parametrize(
    "break_it,says",
    [
        (
            lambda patch: patch.setattr(trained.Sharded, "clip_gradients", clip_half_as_much),
            "parameter",
        ),
        (lambda patch: patch.setattr(trained.Sharded, "set_gradient_sync", lambda self, sync: None), "gradient"),
    ],
)
def test_smaller_mistakes_are_found(monkeypatch, break_it, says):
    break_it(monkeypatch)
    with pytest.raises(shardproof.ProofFailed, match=says):
        shardproof.verify(Net, batch, loss_of, cases=200, seed=5)


def test_a_model_that_is_random_is_refused_with_the_reason():
    def make():
        return nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 1))

    with pytest.raises(shardproof.Error, match="dropout at 1: make the model with a probability of 0"):
        shardproof.verify(make, batch, loss_of)


def test_where_every_case_diverges_nothing_has_held():
    with pytest.raises(shardproof.Error, match="of 1 cases 1 diverged.*nothing was compared"):
        shardproof.verify(Net, batch, loss_of, case="optimizer=sgd(lr=1e+30) strategy=zero3 dp_shard=2 steps=3")
    with pytest.raises(shardproof.Error, match="nothing was compared"):
        shardproof.verify(Net, batch, loss_of, cases=0)
    with pytest.raises(shardproof.Error, match="loss on the first batch is nan"):
        shardproof.verify(Net, batch, lambda model, given: loss_of(model, given) * float("nan"))
    assert "ALL HELD: 3 of 3 cases held" in str(proof.Report(cases=5, held=3, diverged=2))


@pytest.mark.parametrize(
    "choice,says",
    [
        (dict(strategies=["zero9"]), "no strategy 'zero9'. There are ddp, zero1"),
        (dict(strategies=[]), "strategies is empty"),
        (dict(modes=["ordered", "slow"]), "no mode 'slow'. There are ordered, canonical, fast"),
        (dict(optimizers=["adamw"]), "'adamw' is no optimizer with a rate. Write it like 'sgd"),
        (dict(optimizers=["adamw()"]), "'adamw\\(\\)' is no optimizer with a rate"),
        (dict(optimizers=["muon(lr=0.1)"]), "no optimizer 'muon'. There are sgd, adam, adamw, lion"),
        (dict(optimizers=["torch.Nothing(lr=0.1)"]), "no optimizer 'torch.Nothing'"),
        (dict(ranks_max=1), "ranks_max must be at least 2, got 1"),
    ],
)
def test_choices_that_there_are_not_are_refused_with_those_there_are(choice, says):
    with pytest.raises(shardproof.Error, match=says):
        shardproof.verify(Net, batch, loss_of, cases=1, **choice)


def test_a_model_that_reads_anothers_parameter_is_a_failure_that_says_so():
    class Peeks(Net):
        def forward(self, x):
            return super().forward(x) + self.blocks[0].up.weight.sum()

    with pytest.raises(shardproof.ProofFailed, match="blocks.0.up.weight is sharded and has no data here"):
        shardproof.verify(Peeks, batch, loss_of, strategies=["zero3"], cases=40)


def test_units_strategies_and_optimizers_can_be_chosen():
    report = shardproof.verify(
        Net, batch, loss_of, cases=6, units=[Block], strategies=["hsdp"], optimizers=["torch.Adam(lr=0.01)"], modes=["ordered"]
    )
    assert {name for name, _ in report.rows} == {"hsdp"}


def test_a_convolutional_net_holds():
    def make():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(4, 4, 3),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    def images():
        return torch.randn(4, 3, 8, 8), torch.randint(0, 3, (4,))

    def loss(model, given):
        return nn.functional.cross_entropy(model(given[0]), given[1])

    assert shardproof.verify(make, images, loss, cases=15).cases == 15


def test_a_hugging_face_model_from_a_config_holds():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=31,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )

    def tokens():
        ids = torch.randint(0, 31, (2, 8))
        return {"input_ids": ids, "labels": ids}

    report = shardproof.verify(lambda: transformers.GPT2LMHeadModel(config), tokens, units=["transformer.h.*"], cases=8)
    assert report.cases == 8


def test_five_lines_make_a_test_and_an_option_replays(pytester, monkeypatch):
    pytester.makepyfile("""
        import shardproof, torch
        def test_mine(proves):
            proves(lambda: torch.nn.Linear(3, 1), lambda: torch.randn(4, 3), lambda model, x: model(x).square().mean(),
                   optimizers=["sgd(lr=0.1)"])  # torch.optim would load torch._dynamo anew
    """)

    def outcome(*args):
        with monkeypatch.context() as patch:
            patch.setattr(proof, "defaults", dict(proof.defaults))
            return pytester.runpytest_inprocess("-p", "shardproof.pytest_plugin", "-p", "no:cacheprovider", *args)

    outcome("--shardproof-cases", "3").assert_outcomes(passed=1)
    line = "strategy=zero3 dp_shard=2 data=1"
    outcome("--shardproof-case", line).assert_outcomes(passed=1)
    outcome("--shardproof-case", "nonsense").assert_outcomes(failed=1)


def test_settings_of_the_caller_are_as_they_were():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    proof.verify(Net, batch, loss_of, cases=1)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
