"""Optimizers of torch.optim's kind on shards: those of a user's own, what they need of a tensor, hooks, and more than one."""

import pytest
import torch
from models import Block, Net, assert_same_bits, batch, loss_of, train_plain
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardproof


class WithRate(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))


class Lars(WithRate):
    """A step as long as the tensor's own norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / (p.grad.norm() + 1e-8)))


class OfAll(WithRate):
    """A step as long as the norm of all tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in given]).norm() if given else 1
        for p in given:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"] / float(norm + 1e-8))


class Signs(WithRate):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


def sharded_run(kind, ranks=3, steps=3, granularity="element", strategy="zero3", **settings):
    start = Net()

    def body(comm):
        model = Net()
        model.load_state_dict(start.state_dict())
        sharded = shardproof.fully_shard(model, comm, units=[Block], granularity=granularity, strategy=strategy)
        optimizer = shardproof.torch_optimizer(kind, sharded, **settings)
        for step in range(steps):
            loss_of(model, batch(step * comm.size + comm.rank)).backward()
            optimizer.step()
        return sharded.gather()

    _, plain = train_plain(start, lambda p: kind(p, **settings), steps=steps, world=ranks)
    return shardproof.run_threads(ranks, body)[0], dict(plain.named_parameters())


def assert_near(ours, plain):
    for name, value in plain.items():
        assert torch.allclose(ours[name], value, rtol=1e-5, atol=1e-6), name


def test_a_class_that_takes_the_norm_of_each_tensor_is_refused_where_ranks_have_parts():
    with pytest.raises(shardproof.Error, match="Lars needs whole parameters.*granularity='tensor'"):
        sharded_run(Lars)


def test_a_class_that_takes_the_norm_of_each_tensor_is_right_where_they_lie_whole():
    assert_near(*sharded_run(Lars, granularity="tensor"))
    assert_near(*sharded_run(Lars, strategy="ddp"))


def test_a_class_that_takes_the_norm_of_all_tensors_is_refused_unless_each_rank_has_all():
    for granularity in ("element", "tensor"):
        with pytest.raises(shardproof.Error, match="OfAll needs (whole parameters|all parameters together)"):
            sharded_run(OfAll, granularity=granularity)
    assert_near(*sharded_run(OfAll, strategy="ddp"))


def test_a_class_of_the_callers_that_updates_each_element_is_taken():
    assert_same_bits(*sharded_run(Signs, lr=1e-6))


@pytest.mark.parametrize("lr", [1e-6, 1])
def test_a_norm_that_clips_only_large_gradients_and_a_small_rate_are_seen(lr):
    class Clipped(WithRate):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.add_(p.grad * min(1.0, 1000 / float(p.grad.norm())), alpha=-self.param_groups[0]["lr"])

    with pytest.raises(shardproof.Error, match="Clipped needs whole parameters"):
        sharded_run(Clipped, lr=lr)


def test_a_class_derived_from_one_of_pytorchs_may_do_anything():
    class Scaled(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(p.grad.norm() + 1)
            return super().step(closure)

    with pytest.raises(shardproof.Error, match="needs whole parameters"):
        sharded_run(Scaled, lr=0.1)
    assert_near(*sharded_run(Scaled, lr=0.1, granularity="tensor"))


def test_a_class_derived_from_one_of_pytorchs_that_leaves_its_step_alone_is_as_good():
    class Ours(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.02, momentum=0.9)

    Ours([nn.Parameter(torch.ones(1))])  # puts hooks around its step
    assert_same_bits(*sharded_run(Ours))


BY_ELEMENT = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("kind", BY_ELEMENT)
def test_each_class_of_pytorch_that_updates_by_element_has_the_bits_of_plain_pytorch(kind):
    ours, plain = sharded_run(getattr(torch.optim, kind), lr=0.01)
    assert_same_bits(ours, plain)


def test_pytorchs_adafactor_and_muon_are_right_where_tensors_lie_whole():
    with pytest.raises(shardproof.Error, match="Adafactor needs whole parameters"):
        sharded_run(torch.optim.Adafactor, lr=0.01)
    assert_near(*sharded_run(torch.optim.Adafactor, lr=0.01, granularity="tensor"))

    class Matrix(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 12, bias=False), nn.Linear(12, 1, bias=False)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    start = Matrix()

    def body(comm, folder=None):
        model = Matrix()
        model.load_state_dict(start.state_dict())
        sharded = shardproof.fully_shard(model, comm, granularity="tensor", strategy="zero3")
        optimizer = shardproof.torch_optimizer(torch.optim.Muon, sharded, lr=0.02)
        for step in range(3):
            loss_of(model, batch(step * comm.size + comm.rank)).backward()
            optimizer.step()
        return sharded.gather()

    _, plain = train_plain(start, lambda p: torch.optim.Muon(p, lr=0.02), steps=3, world=2)
    for name, value in plain.named_parameters():
        assert torch.allclose(shardproof.run_threads(2, body)[0][name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("kind", ["Muon", "RMSprop"])
def test_state_of_whole_tensors_comes_back_from_a_checkpoint(kind, tmp_path):
    def body(comm):
        runs = []
        for resumed in (False, True):
            with shardproof.seeded(3):
                model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False))
            sharded = shardproof.fully_shard(model, comm, granularity="tensor")
            optimizer = shardproof.torch_optimizer(getattr(torch.optim, kind), sharded, lr=0.01)
            for step in range(4):
                if step == 2:
                    if resumed:
                        shardproof.load(str(tmp_path / "x"), sharded, optimizer)
                    else:
                        shardproof.save(str(tmp_path / "x"), sharded, optimizer)
                if not resumed or step >= 2:
                    loss_of(model, batch(step * comm.size + comm.rank)).backward()
                    optimizer.step()
            runs.append(sharded.gather())
        assert_same_bits(runs[1], runs[0])

    shardproof.run_threads(3, body)


def test_two_optimizers_of_one_model_are_told_to_be_one():
    def body(comm):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        sharded = shardproof.fully_shard(model, comm)
        first, second = (
            shardproof.torch_optimizer(torch.optim.SGD, sharded, part.parameters(), lr=0.1) for part in model
        )
        model(torch.ones(2, 3)).sum().backward()
        first.step()
        with pytest.raises(shardproof.Error, match="Make one optimizer of all parameters that train, with a group for each"):
            second.step()
        model(torch.ones(2, 3)).sum().backward()
        second.step()  # one a step is no mistake
        with pytest.raises(shardproof.Error, match="has no gradient. Run the last backward"):
            second.step()
        native = shardproof.sgd(shardproof.sharded_of(model))
        with pytest.raises(shardproof.Error, match="A model has one optimizer"):
            native.step()

    shardproof.run_threads(2, body)


def test_hooks_of_every_kind_run_as_often_and_in_the_order_of_plain_pytorch(tmp_path):
    torch.optim.NAdam([nn.Parameter(torch.ones(1))])  # from now on the class itself has hooks around its step
    order = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: order.append("all, before")),
        register_optimizer_step_post_hook(lambda *_: order.append("all, after")),
    ]

    def with_hooks(optimizer):
        optimizer.register_step_pre_hook(lambda *_: order.append("before"))
        optimizer.register_step_post_hook(lambda *_: order.append("after"))
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def run(model, optimizer, scheduler):
        order.clear()
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(0)).backward()
            optimizer.step()
            scheduler.step()
        optimizer.step(lambda: loss_of(model, batch(1)).backward())
        return list(order)

    try:
        plain = Net()
        expected = run(plain, *with_hooks(torch.optim.NAdam(plain.parameters())))
        assert expected.count("before") == expected.count("all, before") == 3

        def body(comm):
            model = Net()
            sharded = shardproof.fully_shard(model, comm)
            made = with_hooks(shardproof.torch_optimizer(torch.optim.NAdam, sharded))
            before = run(model, *made)
            order.clear()
            shardproof.save(str(tmp_path / "x"), sharded, made[0])
            shardproof.load(str(tmp_path / "x"), sharded, made[0])
            return before, list(order), run(model, *made)

        assert shardproof.run_threads(1, body)[0] == (expected, [], expected)
    finally:
        for handle in handles:
            handle.remove()


class Twice(torch.optim.SGD):
    """Its step calls that of its base, around which PyTorch puts hooks as well."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad = p.grad * 2
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Twice])
@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_hooks_before_a_step_see_its_gradients_and_may_change_them(kind, of_all, in_place):
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # puts hooks around its step

    def clamped(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            if p.numel():
                assert p.grad is not None
            if in_place:
                p.grad.clamp_(-0.01, 0.01)
            else:
                p.grad = p.grad.clamp(-0.01, 0.01)

    class Hooked(kind):
        def __init__(self, params, **settings):
            super().__init__(params, **settings)
            if not of_all:
                self.register_step_pre_hook(clamped)

    handle = register_optimizer_step_pre_hook(clamped) if of_all else None
    try:
        assert_near(*sharded_run(Hooked, ranks=2, lr=0.1))
    finally:
        if handle is not None:
            handle.remove()


class Averaged(WithRate):
    """As schedule-free optimizers: `eval` puts averages in the place of the parameters, `train` takes them out again."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
                self.state[p].setdefault("average", p.clone()).lerp_(p, 0.5)

    @torch.no_grad()
    def eval(self):
        for p, state in self.state.items():
            state["kept"] = p.clone()
            p.copy_(state["average"])

    @torch.no_grad()
    def train(self):
        for p, state in self.state.items():
            p.copy_(state.pop("kept"))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ddp"])
def test_what_is_written_to_the_optimizers_tensors_after_a_step_is_in_the_next_forward(strategy, low):
    base = Net()

    def body(comm):
        model = Net()
        model.load_state_dict(base.state_dict())
        precision = shardproof.Precision(compute=torch.bfloat16) if low else None
        sharded = shardproof.fully_shard(model, comm, units=[Block], strategy=strategy, precision=precision)
        optimizer = shardproof.torch_optimizer(Averaged, sharded)
        given, outputs = (each.bfloat16() if low else each for each in batch(0)), []
        x, y = given
        for _ in range(3):
            loss_of(model, (x, y)).backward()
            optimizer.step()
            optimizer.eval()
            assert_same_bits(sharded.gather(), {n: v.to(x.dtype) for n, v in sharded.gather_main_parameters().items()})
            optimizer.train()
            optimizer.eval()
            with torch.no_grad():
                outputs.append(model(x).float())
            optimizer.train()
        return outputs

    plain, expected = Net(), []
    plain.load_state_dict(base.state_dict())
    optimizer = Averaged(plain.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(plain, batch(0)).backward()
        optimizer.step()
        optimizer.eval()
        expected.append(plain(batch(0)[0]).detach())
        optimizer.train()
    for outputs in shardproof.run_threads(2, body):
        for ours, value in zip(outputs, expected):
            assert torch.allclose(ours, value, atol=0.05 if low else 1e-5)
    assert (expected[0] - expected[2]).abs().max() > 0.2


def test_what_the_library_writes_needs_no_forward_of_every_rank(tmp_path):
    base = Net()

    def body(comm):
        model = Net()
        model.load_state_dict(base.state_dict())
        sharded = shardproof.fully_shard(model, comm, strategy="zero1")
        optimizer, ema = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1), shardproof.Ema(sharded)
        loss_of(model, batch(comm.rank)).backward()
        optimizer.step()
        shardproof.save(str(tmp_path / "x"), sharded, optimizer)
        whole, alone = sharded.gather(), []

        def evaluate():
            if comm.rank == 0:
                with torch.no_grad():
                    alone.append(model(batch(2)[0]))

        evaluate()
        with ema.swapped_in():
            evaluate()
        evaluate()
        sharded.write_parameters({name: torch.zeros_like(value) for name, value in whole.items()})
        evaluate()
        shardproof.load(str(tmp_path / "x"), sharded, optimizer)
        evaluate()
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].zero_()
        sharded.main_parameters_changed()
        evaluate()
        comm.barrier()
        return alone

    trained, averaged, back, zero, loaded, _ = shardproof.run_threads(2, body)[0]
    assert torch.equal(trained, back) and torch.equal(trained, loaded) and not zero.any()
    assert not torch.equal(trained, averaged)
