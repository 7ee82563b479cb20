"""Optimizers that take norms of whole tensors under some settings, or of some tensors, only: a trial finds all of them."""

import pytest
import torch
from models import batch, loss_of, train_plain
from torch import nn

import shardproof


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.conv, self.out = nn.Linear(5, 12), nn.Linear(12, 12), nn.Conv2d(1, 8, 2), nn.Linear(48, 1)

    def forward(self, x):
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.out(torch.tanh(self.conv(x.view(-1, 1, 3, 4))).flatten(1))


class Normed(torch.optim.Optimizer):
    """A step as long as the gradient's norm for some parameters, and by element for all others."""

    def __init__(self, params, lr=0.1, **settings):
        super().__init__(params, dict(lr=lr, **settings))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    length = p.grad.norm() + 1e-8 if self.takes_norm(p, group) else 1
                    p.add_(p.grad / length, alpha=-group["lr"])

    def takes_norm(self, p, group):
        return True


class AtRateZero(Normed):
    def __init__(self, params, lr=0):
        super().__init__(params, lr)


class OfDecay(Normed):
    def __init__(self, params, lr=0.1, weight_decay=0):
        super().__init__(params, lr, weight_decay=weight_decay)

    def takes_norm(self, p, group):
        return group["weight_decay"] > 0


class OfFlag(Normed):
    def __init__(self, params, lr=0.1, use_muon=False):
        super().__init__(params, lr, use_muon=use_muon)

    def takes_norm(self, p, group):
        return group["use_muon"]


class OfNamedFlag(OfFlag):
    def __init__(self, params, lr=0.1):
        params = list(params)
        assert all("use_muon" in group for group in params)
        super().__init__(params, lr)


class OfLarge(Normed):
    def takes_norm(self, p, group):
        return p.ndim == 2 and min(p.shape) >= 8


class OfConvolutions(Normed):
    def takes_norm(self, p, group):
        return p.ndim > 3


class SingleOnly(Normed):
    """By element, and of float32 only."""

    def takes_norm(self, p, group):
        assert p.dtype == torch.float32
        return False


class NeedsMore(Normed):
    """Cannot be tried, as it wants more of its parameters than that they are some."""

    def __init__(self, params, lr=0.1):
        params = list(params)
        assert len(params) > 9, "so few"
        super().__init__(params, lr)

    def takes_norm(self, p, group):
        return False


def matrices_apart(**of_matrices):
    return lambda parameters: [
        {"params": [p for p in parameters if p.ndim == 2], **of_matrices},
        {"params": [p for p in parameters if p.ndim != 2], **{name: type(value)() for name, value in of_matrices.items()}},
    ]


def rate(optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 0.1


CASES = [
    (AtRateZero, list),
    (OfDecay, matrices_apart(weight_decay=0.1)),
    (OfFlag, matrices_apart(use_muon=True)),
    (OfNamedFlag, matrices_apart(use_muon=True)),
    (OfLarge, list),
    (OfConvolutions, list),
]


def sharded_run(kind, groups, granularity="element", later=False):
    start = Mixed()

    def body(comm):
        model = Mixed()
        model.load_state_dict(start.state_dict())
        sharded = shardproof.fully_shard(model, comm, granularity=granularity)
        given = groups(list(model.parameters()))
        optimizer = shardproof.torch_optimizer(kind, sharded, given[1:] if later else given)
        if later:
            optimizer.add_param_group(given[0])
        rate(optimizer)
        for step in range(2):
            loss_of(model, batch(step * comm.size + comm.rank)).backward()
            optimizer.step()
        return sharded.gather()

    def plain_optimizer(parameters):
        optimizer = kind(groups(parameters))
        rate(optimizer)
        return optimizer

    _, plain = train_plain(start, plain_optimizer, steps=2, world=3)
    for values in shardproof.run_threads(3, body):
        for name, value in plain.named_parameters():
            assert torch.allclose(values[name], value, rtol=1e-5, atol=1e-6), name


def made(granularity):
    def body(comm):
        shardproof.torch_optimizer(NeedsMore, shardproof.fully_shard(Mixed(), comm, granularity=granularity))

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("kind,groups", CASES)
def test_a_class_that_takes_norms_at_some_settings_or_of_some_tensors_is_refused_and_right_where_they_lie_whole(kind, groups):
    with pytest.raises(shardproof.Error, match=f"{kind.__name__} needs whole parameters.*granularity='tensor'"):
        sharded_run(kind, groups)
    sharded_run(kind, groups, granularity="tensor")


def test_a_group_that_comes_later_is_tried_too():
    with pytest.raises(shardproof.Error, match="OfFlag needs whole parameters.*granularity='tensor'"):
        sharded_run(OfFlag, matrices_apart(use_muon=True), later=True)
    sharded_run(OfFlag, matrices_apart(use_muon=False), later=True)


def test_a_class_that_cannot_be_tried_is_refused_where_ranks_have_parts():
    with pytest.raises(shardproof.Error, match="(?s)NeedsMore may need whole .*AssertionError: so few.*granularity='tensor'"):
        made("element")
    with pytest.raises(AssertionError, match="so few"):  # which the class says where it is made
        made("tensor")
    sharded_run(SingleOnly, list)


class Counts(Normed):
    """A rate that falls by a count, which is kept beside the parameters' state."""

    def step(self, closure=None):
        self.count()
        super().step(closure)

    def takes_norm(self, p, group):
        return False


class CountsInState(Counts):
    def count(self):
        self.state["all"]["t"] = self.state["all"].get("t", 0) + 1


class CountsInItsDict(Counts):
    t = 0

    def count(self):
        self.t += 1

    def state_dict(self):
        return {**super().state_dict(), "t": self.t}


class CountsInGroups(Counts):
    def count(self):
        self.param_groups[0]["t"] = self.param_groups[0].get("t", 0) + 1

    def state_dict(self):
        return super().state_dict()


@pytest.mark.parametrize("kind,what", [(CountsInState, r"state\['all'\]"), (CountsInItsDict, "t"), (CountsInGroups, "")])
def test_state_that_no_checkpoint_takes_is_refused_on_every_rank(kind, what, tmp_path):
    def body(comm):
        model = Mixed()
        sharded = shardproof.fully_shard(model, comm)
        optimizer = shardproof.torch_optimizer(kind, sharded)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        if what:
            with pytest.raises(shardproof.Error, match=f"rank 0: {kind.__name__} keeps {what} beside the state of parameters"):
                shardproof.save(str(tmp_path / "x"), sharded, optimizer)
        else:
            shardproof.save(str(tmp_path / "x"), sharded, optimizer)
            optimizer.param_groups[0]["t"] = 7
            shardproof.load(str(tmp_path / "x"), sharded, optimizer)
            assert optimizer.param_groups[0]["t"] == 1
        assert (tmp_path / "x").exists() == (not what)

    shardproof.run_threads(2, body)
