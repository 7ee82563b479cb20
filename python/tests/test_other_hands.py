"""Losses, norms, schedules, scales and optimizers, judged by PyTorch's and transformers' own in the same precision.

Where roundings may differ, the judge is PyTorch in float64: ours may be no farther from it than twice what PyTorch itself is in
the precision of the run.
"""

import copy
import unittest.mock

import pytest
import torch
import transformers
from torch import nn

import shardproof
from models import Block, Net, batch, loss_of

LOW = [torch.float32, torch.bfloat16, torch.float16]


def gradients_of(model, steps):
    """The same in every precision: numbers of bfloat16 that float16 has as well."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape):
        return torch.randn(shape, generator=generator).mul(0.5).half().bfloat16().double()

    return [{name: drawn(p.shape) for name, p in model.named_parameters()} for _ in range(steps)]


def by_pytorch(base, kind, settings, dtype, steps):
    model = copy.deepcopy(base).to(dtype)
    optimizer = kind([{"params": [p]} for p in model.parameters()], foreach=False, **settings)
    for gradients in gradients_of(base, steps):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].to(dtype)
        optimizer.step()
    return {name: p.detach().double() for name, p in model.named_parameters()}


def by_us(base, make, dtype, steps, world=2, **options):
    """The library's optimizer, whose gradients are written by hand."""

    def body(comm):
        model = copy.deepcopy(base).to(dtype)
        sharded = shardproof.fully_shard(model, comm, units=[Block], **options)
        optimizer = make(sharded)
        for gradients in gradients_of(base, steps):
            model(torch.zeros(1, 5, dtype=dtype)).sum().backward()
            sharded.write_gradients({name: value.to(dtype) for name, value in gradients.items()})
            optimizer.step()
        return {name: value.double() for name, value in sharded.gather_main_parameters().items()}

    return shardproof.run_threads(world, body)[0]


def rounded(base, dtype):
    """Starts where every precision of the test starts."""
    return copy.deepcopy(base).to(dtype).to(torch.float32)


def farthest(values, truth):
    return {name: (value - truth[name]).abs().max().item() for name, value in values.items()}


OPTIMIZERS = [
    (shardproof.sgd, torch.optim.SGD, {"lr": 0.05}),
    (shardproof.sgd, torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.2}),
    (shardproof.sgd, torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.2}),
    (shardproof.adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 0.2, "weight_decay": 0.3}),
    (shardproof.adamw, torch.optim.AdamW, {"lr": 0.01, "betas": (0.7, 0.9), "eps": 0.2, "weight_decay": 0.4}),
]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("make,kind,settings", OPTIMIZERS)
def test_optimizers_are_as_near_to_float64_as_pytorchs_own_in_every_precision(make, kind, settings, dtype):
    base = rounded(Net(), torch.bfloat16)
    truth = by_pytorch(base, kind, settings, torch.float64, 6)
    theirs = farthest(by_pytorch(base, kind, settings, dtype, 6), truth)
    ours = farthest(by_us(base, lambda sharded: make(sharded, **settings), dtype, 6), truth)
    for name in ours:
        spacing = 2 * torch.finfo(dtype).eps * max(truth[name].abs().max().item(), base.get_parameter(name).abs().max().item())
        assert ours[name] <= 2 * theirs[name] + spacing, (name, ours[name], theirs[name])
    # Each setting counts: with one of them at its default the run ends elsewhere.
    for left_out in set(settings) - {"lr", "momentum" if "nesterov" in settings else ""}:
        other = by_us(base, lambda sharded: make(sharded, **{k: v for k, v in settings.items() if k != left_out}), dtype, 6)
        assert any(value > 10 * ours[name] for name, value in farthest(other, truth).items()), left_out


@pytest.mark.parametrize("settings", [{}, {"lr": 0.05}, {"momentum": 0.5}, {"weight_decay": 0.3}, {"lr": 0.1, "momentum": 0.0}])
def test_muon_is_pytorchs_muon_whose_products_are_not_in_bfloat16(settings):
    class Matrices(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.square, self.tall = nn.Linear(24, 8), nn.Linear(8, 8), nn.Linear(8, 40)

        def forward(self, x):
            return self.tall(torch.relu(self.square(torch.relu(self.wide(x)))))

    base = rounded(Matrices(), torch.bfloat16)
    every = gradients_of(base, 3)
    others = {"lr": 0.02, "betas": (0.6, 0.8), "eps": 1e-3, "weight_decay": 0.2}

    def by_pytorch_muon(dtype):
        model = copy.deepcopy(base).to(dtype)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        ours = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, **settings}
        optimizers = [
            torch.optim.Muon(matrices, nesterov=True, **ours),
            torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], foreach=False, **others),
        ]
        for gradients in every:
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name].to(dtype)
            for optimizer in optimizers:
                optimizer.step()
        return {name: p.detach().double() for name, p in model.named_parameters()}

    to = torch.Tensor.to

    def unrounded(tensor, *args, **kwargs):  # how newer torch rounds
        return tensor.clone() if kwargs.get("dtype") == torch.bfloat16 else to(tensor, *args, **kwargs)

    with unittest.mock.patch.multiple(torch.Tensor, bfloat16=lambda self: self.clone(), to=unrounded):
        truth = by_pytorch_muon(torch.float64)
        theirs = farthest(by_pytorch_muon(torch.float32), truth)

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, granularity="tensor")
        optimizer = shardproof.muon(sharded, **settings, others=others)
        for gradients in every:
            model(torch.zeros(1, 24)).sum().backward()
            sharded.write_gradients({name: value.float() for name, value in gradients.items()})
            optimizer.step()
        return {name: value.double() for name, value in sharded.gather_main_parameters().items()}

    for values in shardproof.run_threads(2, body):
        for name, value in farthest(values, truth).items():
            assert value <= 4 * theirs[name] + 1e-6, (name, value, theirs[name])


def test_the_factor_of_the_rate_multiplies_decay_and_update_from_the_next_step_on():
    base, factors = Net(), [1.0, 0.25, 3.0]

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        groups = [{"takes": "out.*", "lr_factor": 0.5, "decay_factor": 0.1}]
        optimizer = shardproof.adamw(sharded, lr=0.02, weight_decay=0.3, groups=groups)
        assert optimizer.state_names() == ["exp_avg", "exp_avg_sq"]
        for factor, gradients in zip(factors, gradients_of(base, 3)):
            optimizer.set_lr_factor(factor)
            model(torch.zeros(1, 5)).sum().backward()
            sharded.write_gradients({name: value.float() for name, value in gradients.items()})
            optimizer.step()
        return sharded.gather_main_parameters()

    plain = copy.deepcopy(base)
    out = list(plain.out.parameters())
    rest = [p for name, p in plain.named_parameters() if not name.startswith("out.")]
    groups = [{"params": out, "lr": 0.01, "weight_decay": 0.03}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, 2)])
    for gradients in gradients_of(base, 3):
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients[name].float()
        optimizer.step()
        schedule.step()
    for values in shardproof.run_threads(2, body):
        for name, value in plain.named_parameters():
            assert torch.allclose(values[name], value, rtol=1e-5, atol=1e-6), name


def factors_of(schedule, steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    made = schedule(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    return rates


@pytest.mark.parametrize("warmup,total", [(0, 10), (4, 20), (7, 8)])
def test_schedules_are_those_of_transformers_whose_warm_up_begins_one_step_later(warmup, total):
    """Our step s trains with a rate above 0 at once, as transformers' step s + 1 of the warm-up; both fall alike.

    Where transformers' wsd has a least rate, its warm-up begins with that one, so that warm-up is not compared.
    """
    pairs = [
        (lambda s: shardproof.warmup_constant(s, warmup), lambda o: transformers.get_constant_schedule_with_warmup(o, warmup)),
        (
            lambda s: shardproof.warmup_cosine(s, warmup, total),
            lambda o: transformers.get_cosine_schedule_with_warmup(o, warmup, total),
        ),
        (
            lambda s: shardproof.warmup_cosine(s, warmup, total, 0.2),
            lambda o: transformers.get_cosine_with_min_lr_schedule_with_warmup(o, warmup, total, min_lr_rate=0.2),
        ),
        (
            lambda s: shardproof.warmup_linear(s, warmup, total),
            lambda o: transformers.get_linear_schedule_with_warmup(o, warmup, total),
        ),
        (
            lambda s: shardproof.warmup_stable_decay(s, warmup, total, (total - warmup) // 2, 0.1),
            lambda o: transformers.get_wsd_schedule(
                o, warmup, (total - warmup) // 2, num_training_steps=total, decay_type="linear", min_lr_ratio=0.1
            ),
        ),
    ]
    for index, (ours, theirs) in enumerate(pairs):
        expected = factors_of(theirs, total + 3)
        for step in range(warmup if index == 4 else 0, total):
            assert ours(step) == pytest.approx(expected[step + 1] if step < warmup else expected[step], abs=1e-12), step
    if warmup > 0:
        expected = factors_of(lambda o: transformers.get_inverse_sqrt_schedule(o, warmup), total + 3)
        for step in range(total):
            assert shardproof.warmup_inverse_sqrt(step, warmup) == pytest.approx(expected[step + 1], abs=1e-12)
    for step in range(total, total + 5):
        assert shardproof.warmup_cosine(step, warmup, total, 0.2) == shardproof.warmup_linear(step, warmup, total, 0.2) == 0.2


@pytest.mark.parametrize("dtype", [torch.float64, *LOW])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_of_cut_logits_is_pytorchs_in_every_precision(dtype, reduction, smoothing):
    vocab, padded, ignored = 11, 16, 3
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(5, 4, padded, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, vocab, (5, 4), generator=generator)
    targets[0] = ignored

    def plain(values):
        values = values.detach()[..., :vocab].clone().requires_grad_()
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        loss = nn.functional.cross_entropy(values.flatten(0, 1), targets.flatten(), **options)
        loss.backward()
        return loss.item(), values.grad.double()

    def body(comm):
        comms = shardproof.MeshComm(comm, "dp_shard=1,tp=2")
        part = slice(comm.rank * padded // 2, (comm.rank + 1) * padded // 2)
        own = logits[..., part].clone().requires_grad_()
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored, "vocab": vocab}
        loss = shardproof.vocab_parallel_cross_entropy(own, targets, padded, comms, axis="tp", **options)
        loss.backward()
        return loss.item(), own.grad.double()

    (ours, left), (same, right) = shardproof.run_threads(2, body)
    assert ours == same
    gradient = torch.cat([left, right], -1)
    assert not gradient[..., vocab:].any()
    true_loss, true_gradient = plain(logits.double())
    their_loss, their_gradient = plain(logits)
    eps = torch.finfo(dtype).eps
    assert abs(ours - true_loss) <= 2 * abs(their_loss - true_loss) + 4 * eps * abs(true_loss)
    distance = (gradient[..., :vocab] - true_gradient).abs().max()
    assert distance <= 2 * (their_gradient - true_gradient).abs().max() + 4 * eps * true_gradient.abs().max()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_norms_and_clipped_gradients_are_pytorchs_in_every_precision(dtype, order):
    base = rounded(Net(), torch.bfloat16)
    gradients = gradients_of(base, 1)[0]

    def plain(dtype):
        model = copy.deepcopy(base).to(dtype)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].to(dtype)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.7, norm_type=order)
        return norm.item(), {name: p.grad.double() for name, p in model.named_parameters()}

    def body(comm):
        model = copy.deepcopy(base).to(dtype)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        model(torch.zeros(1, 5, dtype=dtype)).sum().backward()
        sharded.write_gradients({name: value.to(dtype) for name, value in gradients.items()})
        norm = sharded.clip_gradients(0.7, order)
        clipped = {name: value.double() for name, value in sharded.gather_gradients().items()}
        sharded.skip_step()
        return norm, clipped

    true_norm, truth = plain(torch.float64)
    their_norm, theirs = plain(dtype)
    for norm, clipped in shardproof.run_threads(3, body):
        assert abs(norm - true_norm) <= 2 * abs(their_norm - true_norm) + 1e-6 * true_norm
        for name, value in farthest(clipped, truth).items():
            bound = 2 * farthest(theirs, truth)[name] + torch.finfo(dtype).eps * truth[name].abs().max().item()
            assert value <= bound, name


def test_the_scale_of_the_loss_takes_the_course_of_pytorchs_scaler():
    overflows = [False, True, False, False, False, True, True, False, False, False, False, False]
    settings = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2}
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, **settings)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    expected = []
    for overflow in overflows:
        theirs.scale(parameter.sum() * (float("inf") if overflow else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        expected.append(theirs.get_scale())

    def body(comm):
        sharded = shardproof.fully_shard(Net(), comm, units=[Block], check_gradients=False)
        scaler = shardproof.LossScaler(64.0, 3.0, 0.25, 2, scale_min=1.0)
        scales = []
        for step, overflow in enumerate(overflows):
            bad = overflow and comm.rank == step % 2
            scaler.scale(loss_of(sharded, batch(step)) * (float("inf") if bad else 1.0)).backward()
            if scaler.unscale(sharded):
                sharded.skip_step()
            scales.append(scaler.value)
        return scales, [scaler.value for _ in range(1)]

    for scales, _ in shardproof.run_threads(2, body):
        assert scales == expected and min(scales) < 4.0 < 64.0 < max(expected[:1] + [65.0])


def test_averages_are_those_of_pytorchs_averaged_model_when_the_decay_changes():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    base = Net()

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        ema = shardproof.Ema(sharded, decay=0.5)
        for step in range(4):
            if step == 2:
                ema.set_decay(0.875)
            loss_of(model, batch(0)).backward()
            optimizer.step()
            ema.update()
        written = ema.gather()
        ema.write({name: value + 1 for name, value in written.items()})
        return written, ema.gather()

    plain = copy.deepcopy(base)
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with torch.no_grad():  # PyTorch's first update copies; ours begin with what the parameters were
        averaged.update_parameters(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            averaged.multi_avg_fn = get_ema_multi_avg_fn(0.875)
        optimizer.zero_grad()
        loss_of(plain, batch(0)).backward()
        optimizer.step()
        averaged.update_parameters(plain)
    for written, more in shardproof.run_threads(2, body):
        for name, value in averaged.module.named_parameters():
            assert torch.allclose(written[name], value, rtol=1e-5, atol=1e-6), name
            assert torch.equal(more[name], written[name] + 1)


@pytest.mark.parametrize("settings", [{"lr": 0.01}, {"lr": 0.02, "betas": (0.5, 0.7), "weight_decay": 0.3}])
def test_lion_is_its_formula_in_float64(settings):
    """No library that the tests install has Lion; this is the formula of Chen et al. 2023, on PyTorch's tensors."""
    base = rounded(Net(), torch.bfloat16)
    (beta1, beta2), decay, lr = settings.get("betas", (0.9, 0.99)), settings.get("weight_decay", 0.0), settings["lr"]
    truth = {name: p.detach().double() for name, p in base.named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in truth.items()}
    clear = {name: torch.ones_like(value) for name, value in truth.items()}  # 0 where float32 may see another sign
    for gradients in gradients_of(base, 5):
        for name, gradient in gradients.items():
            direction = beta1 * momentum[name] + (1 - beta1) * gradient
            clear[name] *= direction.abs() > 1e-6
            truth[name] = truth[name] * (1 - lr * decay) - lr * torch.sign(direction)
            momentum[name] = beta2 * momentum[name] + (1 - beta2) * gradient
    ours = by_us(base, lambda sharded: shardproof.lion(sharded, **settings), torch.float32, 5)
    assert all(((ours[name] - value) * clear[name]).abs().max() < 1e-6 for name, value in truth.items())
    assert sum(value.sum() for value in clear.values()) > 0.99 * sum(value.numel() for value in clear.values())
    assert max(farthest({name: p.detach().double() for name, p in base.named_parameters()}, truth).values()) > 0.01


@pytest.mark.parametrize(
    "make,kind,more",
    [
        (shardproof.sgd, torch.optim.SGD, {"momentum": 0.5}),
        (shardproof.adam, torch.optim.Adam, {"eps": 1e-3}),
        (shardproof.adamw, torch.optim.AdamW, {"eps": 1e-3}),
        (shardproof.lion, None, {}),
    ],
)
def test_groups_and_what_is_spared_decay_are_those_of_every_rule(make, kind, more):
    base, settings = rounded(Net(), torch.bfloat16), {"lr": 0.02, "weight_decay": 0.5, **more}
    still = {"takes": lambda name, shape: name == "inp.bias", "lr_factor": 0.0}
    groups = [{"takes": "out.*", "lr_factor": 0.5, "decay_factor": 0.2}, still]

    def factors(name, parameter):
        if name.startswith("out."):
            return 0.5, 0.2
        return (0.0, 1.0) if name == "inp.bias" else (1.0, 0.0 if parameter.dim() < 2 else 1.0)

    ours = by_us(base, lambda s: make(s, **settings, groups=groups, decay_norms_and_biases=False), torch.float32, 3)
    if kind is None:  # the parts that do not train or decay, of a rule that PyTorch does not have
        whole = by_us(base, lambda s: make(s, **{**settings, "weight_decay": 0.0}), torch.float32, 3)
        assert torch.equal(ours["inp.bias"], base.inp.bias.detach().double())
        assert torch.equal(ours["blocks.0.norm.weight"], whole["blocks.0.norm.weight"])
        assert not torch.equal(ours["blocks.0.up.weight"], whole["blocks.0.up.weight"])
        return
    model = copy.deepcopy(base)
    named = [(p, *factors(name, p)) for name, p in model.named_parameters()]
    optimizer = kind(
        [{"params": [p], "lr": 0.02 * lr, "weight_decay": 0.5 * decay} for p, lr, decay in named], foreach=False, **settings
    )
    for gradients in gradients_of(base, 3):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].float()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name].float(), parameter, rtol=1e-5, atol=1e-6), name
