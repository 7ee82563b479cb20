"""What readers of other projects' trackers reported there, tried here: one small input each. docs/outside.md is the log.

The docstring of a test begins with the ids of the reports. CONTRIBUTING.md says how to add one.
"""

import copy
import glob
import os
import re

import pytest
import torch
from torch import nn

import shardproof
from models import Block, Net, assert_same_bits, batch, loss_of, train_plain

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_every_report_that_a_test_names_is_in_the_log_and_the_log_names_tests_that_exist():
    with open(os.path.join(ROOT, "docs", "outside.md"), encoding="utf-8") as file:
        log = file.read()
    rows = [line for line in log.splitlines() if re.match(r"\| [\w.-]+#\d+", line)]
    logged = set(re.findall(r"[\w.-]+#\d+", " ".join(row.split("|")[1] for row in rows)))
    assert len(rows) > 40 and all(len(row.split("|")) == 5 and row.split("|")[3].strip() for row in rows)
    tests = set()
    for path in glob.glob(os.path.join(ROOT, "python", "tests", "test_*.py")):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        tests |= {f"{os.path.basename(path)[:-3]}.{name}" for name in re.findall(r"^def test_(\w+)", text, re.MULTILINE)}
    assert set(re.findall(r"`(test_\w+\.\w+)`", log)) <= tests
    for name, test in globals().items():
        if name.startswith("test_") and test.__doc__:
            assert set(re.findall(r"[\w.-]+#\d+", test.__doc__.split(":")[0])) <= logged, name


def trained(base, make, *, world=2, steps=3, make_batch=batch, **options):
    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, **options)
        optimizer = make(sharded)
        for step in range(steps):
            loss_of(model, make_batch(step * world + comm.rank)).backward()
            optimizer.step()
        return sharded.gather()

    return shardproof.run_threads(world, body)


@pytest.mark.parametrize("shape", [(1,), (2,), (), (1, 1), (0, 3)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_smallest_parameters_train_on_any_number_of_ranks(shape, world):
    """pytorch#144045: a parameter of one element of an inner unit had a gradient of zero on one rank."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.multiplier = nn.Linear(5, 5), nn.Parameter(torch.full(shape, 0.5))

        def forward(self, x):
            return self.up(x) * torch.exp(self.multiplier.sum())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.out = Scaled(), Scaled(), nn.Linear(5, 1)

        def forward(self, x):
            return self.out(self.second(self.first(x)))

    base = Model()
    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1), steps=3, world=world)
    make = lambda sharded: shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)  # noqa: E731
    for values in trained(base, make, world=world, units=[Scaled]):
        assert_same_bits(values, dict(expected.named_parameters()))
    if 0 not in shape:
        assert not torch.equal(expected.first.multiplier, base.first.multiplier)


@pytest.mark.parametrize(
    "strategy,mesh", [("zero3", "dp_shard=1"), ("zero2", "dp_shard=1"), ("hsdp", "dp_replicate=2,dp_shard=1")]
)
def test_a_group_of_one_rank_accumulates_microbatches_once(strategy, mesh):
    """Megatron-LM#6660: gradients doubled with every microbatch where the group that shards them has one rank."""
    base = Net()
    world = 2 if "replicate=2" in mesh else 1

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, mesh=mesh, strategy=strategy, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        for number in sharded.microbatches([k * world + comm.rank for k in range(5)]):
            (loss_of(model, batch(number)) / 5).backward()
        optimizer.step()
        return sharded.gather()

    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1), steps=1, world=world, rounds=5, ranks_first=False)
    for values in shardproof.run_threads(world, body):
        for name, value in expected.named_parameters():
            assert torch.allclose(values[name], value, rtol=1e-6, atol=1e-7), name


def test_a_vocabulary_that_no_number_of_ranks_divides_resumes_with_the_same_bits(tmp_path):
    """torchtitan#1136: the loss after a resume was another one where the vocabulary is no multiple of the ranks."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(13, 6), nn.Linear(6, 13, bias=False)

        def forward(self, x):
            return self.head(self.words(x))

    base = Words()

    def loss(model, number):
        tokens = torch.randint(0, 13, (4, 7), generator=torch.Generator().manual_seed(number))
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    def run(comm, first, last, load=False, save=False):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, units=[nn.Embedding, nn.Linear])
        optimizer = shardproof.torch_optimizer(torch.optim.AdamW, sharded, lr=0.05)
        if load:
            shardproof.load(tmp_path / "saved", sharded, optimizer)
        losses = []
        for step in range(first, last):
            losses.append(loss(sharded, step * comm.size + comm.rank))
            losses[-1].backward()
            optimizer.step()
        if save:
            shardproof.save(tmp_path / "saved", sharded, optimizer, step=last)
        return [value.item() for value in losses], sharded.gather()

    whole = shardproof.run_threads(4, lambda comm: run(comm, 0, 6))
    shardproof.run_threads(4, lambda comm: run(comm, 0, 3, save=True))
    for (losses, values), (all_losses, expected) in zip(shardproof.run_threads(4, lambda c: run(c, 3, 6, load=True)), whole):
        assert losses == all_losses[3:]
        assert_same_bits(values, expected)


RANDOM = {
    "dropout": nn.Dropout(0.5),
    "alpha dropout": nn.AlphaDropout(0.5),
    "rrelu": nn.RReLU(),
    "gumbel": lambda x: nn.functional.gumbel_softmax(x, dim=-1),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: x * (1 + torch.multinomial(torch.ones(4), 2)[0].item()),
    "noise": lambda x: x + torch.randn_like(x),
    "permutation": lambda x: x[:, torch.randperm(x.shape[1])],
    "in place": lambda x: x * torch.empty_like(x).uniform_(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_each_random_operator_in_a_recomputed_unit_is_refused_by_name(name):
    """pytorch#193671, OLMo-core#828, guided-diffusion#167: the recomputation drew other numbers than the forward."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.random = nn.Linear(5, 5), RANDOM[name]

        def forward(self, x):
            return self.random(self.up(x))

    def body(comm):
        model = nn.Sequential(Noisy(), nn.Linear(5, 1))
        sharded = shardproof.fully_shard(model, comm, units=[Noisy], recompute=[Noisy])
        loss_of(sharded, batch(comm.rank)).backward()

    with pytest.raises(RuntimeError, match="draws from LibTorch.s generator"):
        shardproof.run_threads(2, body)


@pytest.mark.parametrize("options", [{"strategy": "zero1"}, {"strategy": "zero2"}, {"reshard_after_forward": False}, {}])
def test_averages_stand_in_for_low_precision_parameters_in_every_evaluation(options):
    """pytorch#106858, pytorch#117742: an evaluation with averages computed on low-precision copies of an earlier step."""
    base = Net()

    def body(comm):
        model = copy.deepcopy(base)
        precision = shardproof.Precision(compute=torch.bfloat16)
        sharded = shardproof.fully_shard(model, comm, units=[Block], precision=precision, **options)
        optimizer, ema = shardproof.sgd(sharded, lr=0.3), shardproof.Ema(sharded, decay=0.5)
        x = batch(9)[0].bfloat16()
        for step in range(3):
            with torch.no_grad():
                sharded(x)  # leaves copies behind where they are kept
            model(x).float().square().mean().backward()
            optimizer.step()
            ema.update()
            averages, values = ema.gather(), sharded.gather_main_parameters()
            with ema.swapped_in(), torch.no_grad():
                averaged = sharded(x)
            with torch.no_grad():
                own = sharded(x)
            for result, expected in ((averaged, averages), (own, values)):
                plain = Net().bfloat16()
                plain.load_state_dict({name: value.bfloat16() for name, value in expected.items()})
                with torch.no_grad():
                    assert torch.equal(result, plain(x)), step
            assert not torch.equal(averaged, own)

    shardproof.run_threads(2, body)


def test_parameters_are_back_after_an_evaluation_with_averages_that_raises():
    """Self-Forcing#84: the averages stayed in the place of the parameters after an exception."""

    def body(comm):
        sharded = shardproof.fully_shard(Net(), comm, units=[Block])
        optimizer, ema = shardproof.sgd(sharded, lr=0.3), shardproof.Ema(sharded, decay=0.5)
        loss_of(sharded, batch(0)).backward()
        optimizer.step()
        before, averages = sharded.gather(), ema.gather()
        with pytest.raises(ZeroDivisionError):
            with ema.swapped_in():
                raise ZeroDivisionError
        assert_same_bits(sharded.gather(), before)
        assert_same_bits(ema.gather(), averages)

    shardproof.run_threads(2, body)


def test_an_infinite_norm_is_an_error_on_every_rank_and_scales_nothing():
    """DeepSpeed#7171: the factor of an infinite norm became NaN."""

    def body(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, units=[Block], check_gradients=False)
        (loss_of(sharded, batch(0)) * (float("inf") if comm.rank == 1 else 1.0)).backward()
        with pytest.raises(shardproof.NonFiniteError):
            sharded.clip_gradients(1.0)
        sharded.skip_step()
        loss_of(sharded, batch(0)).backward()
        return sharded.clip_gradients(1e9)

    base = Net()
    expected = copy.deepcopy(base)
    loss_of(expected, batch(0)).backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 1e9).item()
    assert shardproof.run_threads(3, body) == [pytest.approx(norm, rel=1e-6)] * 3


def test_the_norm_is_of_gradients_that_are_divided_by_the_scale_of_the_loss():
    """DeepSpeed#2695: the norm was computed with the scale of the next step."""
    base = Net()

    def body(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, units=[Block], check_gradients=False)
        scaler = shardproof.LossScaler(1024.0, growth_interval=1)
        scaler.scale(loss_of(sharded, batch(0))).backward()
        assert scaler.unscale(sharded) and scaler.value == 2048.0
        return sharded.clip_gradients(0.1), sharded.gradient_norm()

    plain = copy.deepcopy(base)
    loss_of(plain, batch(0)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    for before, after in shardproof.run_threads(2, body):
        assert before == pytest.approx(expected, rel=1e-6) and after == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("offload", ["none", "pinned"])
def test_parameters_that_no_rank_used_have_a_gradient_of_zero_and_no_part_in_the_norm(offload):
    """DeepSpeed#5241, pytorch#28294, Muon#54: unused parameters were an error of the norm, or decayed by surprise."""

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.other = nn.Linear(5, 1), nn.Linear(5, 1)

        def forward(self, x):
            return self.used(x)

    base = Branch()

    def body(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, units=[nn.Linear], offload=offload)
        optimizer = shardproof.sgd(sharded, lr=0.1, weight_decay=0.5)
        loss_of(sharded, batch(0)).backward()
        norm = sharded.gradient_norm()
        optimizer.step()
        return norm, sharded.gather()

    plain = copy.deepcopy(base)
    loss_of(plain, batch(0)).backward()
    expected = nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], 1e9).item()
    plain.other.requires_grad_(False)
    for parameter in plain.other.parameters():  # docs/howto/move_from_fsdp2.md says that it is zero
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.5).step()
    for norm, values in shardproof.run_threads(2, body):
        assert norm == pytest.approx(expected, rel=1e-6)
        for name, value in plain.named_parameters():
            assert torch.allclose(values[name], value, rtol=1e-6), name


SCHEDULES = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "function": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.4, 0.2], total_steps=10),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 5], 0.5),
}


@pytest.mark.parametrize("order", ["made before the load", "made after the load", "its state alone", "the optimizer's alone"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_after_a_load_are_those_of_pytorch_whichever_is_made_or_loaded_first(tmp_path, name, order):
    """pytorch#29697, pytorch#60265, ColossalAI#5151, torch-points3d#630, rat-sql#45, apex#766, Automodel#3882: other rates.

    The plain run makes and loads in the same order.
    """
    schedule, base = SCHEDULES[name], Net()

    def groups_of(model, decay):
        out = list(model.out.parameters())
        taken = {id(p) for p in out}
        rest = [p for p in model.parameters() if id(p) not in taken]
        return [{"params": rest, "weight_decay": decay}, {"params": out, "lr": 0.05, "betas": (0.8, 0.9)}]

    def settings(optimizer):
        names = ("lr", "initial_lr", "betas", "weight_decay", "eps")
        return [{key: group[key] for key in names if key in group} for group in optimizer.param_groups]

    def steps_of(model, optimizer, made, count):
        seen = []
        for step in range(count):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            made.step()
            seen.append(settings(optimizer))
        return seen

    def resume(optimizer, load_optimizer, state, made=None):
        if order == "made before the load":
            made = schedule(optimizer)
            load_optimizer()
            made.load_state_dict(state)
        elif order == "made after the load":
            load_optimizer()
            made = schedule(optimizer)
            made.load_state_dict(state)
        elif order == "its state alone":
            made = schedule(optimizer)
            made.load_state_dict(state)
        else:
            load_optimizer()
            made = schedule(optimizer)
        return made

    plain = copy.deepcopy(base)
    first = torch.optim.AdamW(groups_of(plain, 0.3), lr=0.1)
    first_schedule = schedule(first)
    steps_of(plain, first, first_schedule, 3)
    saved_optimizer, saved_schedule = copy.deepcopy(first.state_dict()), copy.deepcopy(first_schedule.state_dict())
    resumed = copy.deepcopy(plain)
    second = torch.optim.AdamW(groups_of(resumed, 0.0), lr=0.7)
    made = resume(second, lambda: second.load_state_dict(saved_optimizer), copy.deepcopy(saved_schedule))
    expected = [settings(second), *steps_of(resumed, second, made, 4)]

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.AdamW, sharded, groups_of(model, 0.3), lr=0.1)
        made = schedule(optimizer)
        steps_of(model, optimizer, made, 3)
        shardproof.save(tmp_path / "saved", sharded, optimizer, step=3)
        assert settings(optimizer) == settings(first)
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.AdamW, sharded, groups_of(model, 0.0), lr=0.7)
        made = resume(
            optimizer, lambda: shardproof.load(tmp_path / "saved", sharded, optimizer), copy.deepcopy(saved_schedule)
        )
        return [settings(optimizer), *steps_of(model, optimizer, made, 4)]

    for got in shardproof.run_threads(2, body):
        assert got == expected


def test_tied_parameters_stay_tied_when_gathers_and_updates_overlap():
    """Megatron-LM#656, accelerate#4171: a head and an embedding that share a weight drifted apart."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.middle, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x):
            return self.head(torch.tanh(self.middle(self.words(x))))

    base = Words()

    def loss(model, number):
        tokens = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(number))
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    _, expected = train_plain(
        base, lambda p: torch.optim.AdamW(p, lr=0.05), steps=4, world=2, loss=loss, make_batch=lambda number: number
    )

    def body(comm):
        model = copy.deepcopy(base)
        options = {"prefetch_forward": 2, "prefetch_backward": 2, "publish": "at_first_use"}
        sharded = shardproof.fully_shard(model, comm, units=[nn.Embedding, nn.Linear], **options)
        optimizer = shardproof.torch_optimizer(torch.optim.AdamW, sharded, lr=0.05)
        for step in range(4):
            loss(model, 2 * step + comm.rank).backward()
            optimizer.step()
        assert model.head.weight is model.words.weight
        return sharded.gather()

    for values in shardproof.run_threads(2, body):
        assert torch.equal(values["head.weight"], values["words.weight"])
        for name, value in expected.named_parameters():
            assert torch.allclose(values[name], value, rtol=1e-5, atol=1e-6), name


def test_adapters_in_low_precision_on_disk_are_read_as_their_values(tmp_path):
    """aprender#2189: adapters in bfloat16 were read as if they were float32."""
    from safetensors.torch import load_file, save_file

    def body(comm):
        model = Net()
        lora = shardproof.add_lora(model, "blocks.*.*", rank=2, alpha=5.0, seed=1)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        values = {n: v for n, v in sharded.gather_main_parameters().items() if "lora_" in n}
        generator = torch.Generator().manual_seed(0)
        drawn = {n: torch.randn(v.shape, generator=generator) for n, v in sorted(values.items())}
        sharded.write_parameters(drawn)
        lora.save(tmp_path / "adapters", sharded)
        path = os.path.join(tmp_path, "adapters", "adapter_model.safetensors")
        if comm.rank == 0:
            save_file({n: v.bfloat16() for n, v in load_file(path).items()}, path)
        comm.barrier()
        sharded.write_parameters({n: torch.zeros_like(v) for n, v in drawn.items()})
        lora.load(tmp_path / "adapters", sharded)
        found = sharded.gather_main_parameters()
        for n, v in drawn.items():
            assert torch.equal(found[n], v.bfloat16().float()), n

    shardproof.run_threads(2, body)


def test_each_adapter_is_merged_with_its_own_layer_and_the_scale():
    """peft#2489, trl#386: merging left out the scale, or some of the layers."""

    def body(comm):
        model = Net()
        lora = shardproof.add_lora(model, ["blocks.*.up", "out"], rank=2, alpha=5.0, seed=1)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        generator = torch.Generator().manual_seed(0)
        names = sorted(name for name in sharded.gather_main_parameters() if "lora_" in name)
        whole = sharded.gather_main_parameters()
        sharded.write_parameters({name: torch.randn(whole[name].shape, generator=generator) for name in names})
        before = sharded.gather_main_parameters()
        lora.merge(sharded)
        after = sharded.gather_main_parameters()
        assert lora.scale == 2.5 and len(lora.layers) == 4
        for name in lora.layers:
            a, b = before[name + ".lora_A.weight"], before[name + ".lora_B.weight"]
            assert torch.allclose(after[name + ".weight"], before[name + ".weight"] + 2.5 * (b @ a), atol=1e-5), name
        for name in set(before) - {name + ".weight" for name in lora.layers} - set(names):
            assert torch.equal(after[name], before[name]), name

    shardproof.run_threads(2, body)
