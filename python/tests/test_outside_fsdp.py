"""Reports of others, tried with shardproof.fsdp: a small program each, whose values are those of plain PyTorch.

The docstring of a program begins with the ids of the reports. docs/outside.md is the log.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardproof
from fsdp_on_threads import HALF, shard, whole
from models import Block, Net, assert_same_bits, batch, loss_of

WORLD = 2


class Stack(nn.Module):
    """Blocks of one kind between two linear layers."""

    def __init__(self, *blocks):
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(5, 6), nn.ModuleList(blocks), nn.Linear(6, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = self.use(block, x)
        return self.out(x)

    def use(self, block, x):
        return block(x)


def values(model):
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in model.named_parameters()}


def the_same(program, make=Net, **options):
    """A program computes what it does without ranks. It gets a model, whether to shard or not, and its loss of a step."""
    base = make()

    def of_all(model, step, loss=loss_of):
        return sum(loss(model, batch(WORLD * step + rank)) for rank in range(WORLD)) / WORLD

    expected = program(copy.deepcopy(base), lambda model: model, of_all)

    def body(comm):
        own = lambda model, step, loss=loss_of: loss(model, batch(WORLD * step + comm.rank))  # noqa: E731
        return program(copy.deepcopy(base), lambda model: shard(comm, model, **options), own)

    for results in shardproof.run_threads(WORLD, body):
        assert len(results) == len(expected)
        for got, plain in zip(results, expected):
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-6)


def train(model, loss, steps=3, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("wrapped", [False, True])
def test_hooks_of_a_parameter_get_and_change_its_gradient_from_before_wrapping_and_from_after(wrapped):
    """torchrec#4268, fairscale#1101: hooks of parameters never ran, and nothing was said."""

    def halved(gradient):
        gradient.mul_(0.5)

    def program(model, wrap, loss):
        seen = []
        model = wrap(model) if wrapped else model
        model.inp.weight.register_hook(lambda gradient: gradient * 0)
        model.out.weight.register_hook(halved)
        half = model.blocks[0].up.weight.register_hook(lambda gradient: gradient / 2)
        model.out.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
        model = model if wrapped else wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, loss, optimizer=optimizer)
        half.remove()
        loss(model, 5).backward()  # is added to what the last step has left
        gradient = model.blocks[0].up.weight.grad
        return train(model, loss, 2, optimizer), torch.tensor(seen), getattr(gradient, "full_tensor", lambda: gradient)()

    the_same(program)


def test_a_hook_that_returns_no_dtensor_is_told():
    def body(comm):
        model = shard(comm, Net())
        model.inp.weight.register_hook(lambda gradient: gradient.to_local() * 0)
        with pytest.raises(shardproof.Error, match="a hook of parameter inp.weight .* returned a Tensor"):
            loss_of(model, batch(comm.rank)).backward()

    shardproof.run_threads(WORLD, body)


@pytest.mark.parametrize("before", [False, True])
def test_hooks_after_a_gradient_are_refused_where_they_would_take_it_from_the_library(before):
    def hook(parameter):
        raise AssertionError

    def body(comm):
        model = Net()
        if before:
            model.inp.weight.register_post_accumulate_grad_hook(hook)
        with pytest.raises(shardproof.Error, match="register_post_accumulate_grad_hook of parameter inp.weight"):
            shardproof.fully_shard(model, comm, units=[Block])
            model.inp.weight.register_post_accumulate_grad_hook(hook)

    shardproof.run_threads(WORLD, body)


@pytest.mark.parametrize("policy", [None, HALF])
def test_a_first_forward_in_inference_mode_is_followed_by_training(policy):
    """pytorch#113203, litgpt#703: an evaluation before the first step made tensors that no step could update."""

    def body(comm):
        model = shard(comm, Net(), mp_policy=policy)
        with torch.inference_mode():
            first = model(batch(0)[0])
        with torch.no_grad():
            assert torch.equal(first, model(batch(0)[0]))
        before = whole(model)
        trained = train(model, lambda model, step: loss_of(model, batch(WORLD * step + comm.rank)).float())
        assert not torch.equal(before["inp.weight"], trained["inp.weight"])

    shardproof.run_threads(WORLD, body)


def test_a_forward_with_other_values_leaves_the_shards_as_they_were():
    """functional_call lends whole values, and Parameters. Then the model has its own again."""

    def program(model, wrap, loss):
        other, model = wrap(copy.deepcopy(model)), wrap(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []

        def lent(given):
            with torch.no_grad():
                result = torch.func.functional_call(model, given, (batch(0)[0],))
            seen.append(getattr(result, "full_tensor", lambda: result)().clone())

        train(model, loss, 1, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            lent(values(other))
            loss(model, step).backward()
            lent({name: nn.Parameter(value.detach().clone()) for name, value in other.named_parameters()})
            optimizer.step()
        return values(model), values(other), seen

    the_same(program)


def test_dtensors_that_are_lent_are_refused_and_training_goes_on():
    def body(comm):
        model, other = shard(comm, Net()), shard(comm, Net())
        for each in (model, other):
            loss_of(each, batch(0)).backward()
        before, result = whole(model), model(batch(0)[0])
        for lent in ({n: p.detach() * 0.5 for n, p in model.named_parameters()}, dict(other.named_parameters())):
            with torch.no_grad(), pytest.raises(shardproof.Error, match="parameter inp.weight was lent a DTensor"):
                torch.func.functional_call(model, lent, (batch(0)[0],))
        assert torch.equal(model(batch(0)[0]), result)
        assert_same_bits(whole(model), before)

    shardproof.run_threads(WORLD, body)


def test_a_penalty_of_parameters_from_before_wrapping_is_an_error_and_one_from_after_is_right():
    def program(model, wrap, loss):
        model = wrap(model)

        def penalized(model, given):
            weights = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
            return loss_of(model, given) + 0.1 * sum(weight.square().sum() for weight in weights)

        return [train(model, lambda model, step: loss(model, step, penalized))]

    the_same(program)

    def body(comm):
        model = Net()
        kept = list(model.parameters())
        shard(comm, model)
        loss = loss_of(model, batch(0)) + sum(parameter.square().sum() for parameter in kept)
        with pytest.raises(shardproof.Error, match="reached parameter .* as it was before fully_shard"):
            loss.backward()

    shardproof.run_threads(WORLD, body)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has none")
def test_gradients_that_are_to_have_another_dtype_than_their_parameter_are_refused():
    """pytorch#170648: they came in the dtype of the parameter, with its digits."""

    def body(comm):
        model = Net().bfloat16()
        model.inp.weight.grad_dtype = torch.float32
        with pytest.raises(shardproof.Error, match="inp.weight is in torch.bfloat16, and its grad_dtype is torch.float32"):
            shard(comm, model)

    shardproof.run_threads(WORLD, body)


class Views(Block):
    def __init__(self):
        super().__init__(6)

    def forward(self, x):
        return super().forward(x).view(-1, 2, 3)


class OnViews(Stack):
    def __init__(self):
        super().__init__(Views(), Views())

    def use(self, block, x):
        y = block(x)
        y += 1
        y.relu_()
        return y.flatten(1)


def test_units_whose_results_are_views_that_their_caller_writes_to():
    """pytorch#181832: the hook of a view was gone once the view was written to."""
    the_same(lambda model, wrap, loss: [train(wrap(model), loss)], OnViews)


@pytest.mark.parametrize("graph", [False, True])
def test_an_optimizer_that_is_made_after_a_forward_has_the_shards(graph):
    """pytorch#149205: it had whole parameters, which were left by the first step."""

    def program(model, wrap, loss):
        model = wrap(model)
        with torch.set_grad_enabled(graph):
            value = loss(model, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if graph:
            value.backward()
            optimizer.step()
        return [train(model, loss, optimizer=optimizer)]

    the_same(program)


def test_layers_that_are_thawed_and_frozen_after_an_evaluation_where_parameters_stay_whole():
    """pytorch#105371: whole parameters that were kept wanted gradients, or not, as the last forward had left them."""

    def program(model, wrap, loss):
        model.blocks[0].requires_grad_(False)
        model = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, loss, 1, optimizer)
        with torch.no_grad():
            loss(model, 1)
        model.blocks[0].requires_grad_(True)
        train(model, loss, 1, optimizer)
        model.blocks[1].requires_grad_(False)
        return [train(model, loss, 1, optimizer)]

    the_same(program, reshard_after_forward=False)


class Recomputed(Stack):
    reentrant, times = False, 1

    def __init__(self):
        super().__init__(Block(6), Block(6))

    def use(self, block, x):
        around = lambda x: torch.tanh(block(x))  # noqa: E731
        for _ in range(self.times):
            x = x + checkpoint(around, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant, times", [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_recomputed_parts_around_units_train_as_without_ranks_or_say_that_they_cannot(reentrant, times):
    """pytorch#187437, pytorch#153354, pytorch#89781, fairscale#777: a unit of a recomputed part runs twice in one backward.

    Each reentrant one ends a backward of its own, so two of one unit are refused.
    """

    def program(model, wrap, loss):
        model = wrap(model)
        model.reentrant, model.times = reentrant, times
        return [train(model, loss)]

    if not reentrant or times == 1:
        the_same(program, Recomputed)
        return
    with pytest.raises(RuntimeError, match="got a (second )?gradient"):
        the_same(program, Recomputed)


class Besides(nn.Linear):
    def forward(self, x, beside):
        return super().forward(x)


class Unused(Stack):
    def __init__(self):
        super().__init__(Besides(5, 6), nn.Linear(6, 6))
        self.blocks[0].requires_grad_(False)

    def forward(self, x):
        return self.out(self.blocks[1](self.blocks[0](x, self.inp(x))))


class Passed(nn.Linear):
    is_on = False

    def forward(self, x):
        return super().forward(x) if self.is_on else x


class InTurn(Stack):
    def __init__(self):
        super().__init__(Passed(6, 6), Passed(6, 6))


@pytest.mark.parametrize("make", [Unused, InTurn])
def test_units_that_do_nothing_for_the_result_are_left_alone(make):
    """pytorch#117510, pytorch#83107: frozen units beside an unused input, and units that return their input."""

    def program(model, wrap, loss):
        model = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            for number, block in enumerate(model.blocks):
                block.is_on = number == step % 2
            train(model, loss, 1, optimizer)
        return [values(model)]

    the_same(program, make)


class Spare(Net):
    uses = False

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(5, 1)

    def forward(self, x):
        return super().forward(x) + self.spare(x) if self.uses else super().forward(x)


@pytest.mark.parametrize("make_again", [lambda p: p, lambda p: p[::-1], lambda p: [{"params": p}, {"params": [], "lr": 0.7}]])
def test_a_resume_has_the_state_of_what_is_frozen_or_never_had_a_gradient(tmp_path, make_again):
    """pytorch#192202, pytorch#143828, verl#7283, pytorch#1489: state was lost, or went to other parameters."""
    base = Spare()

    def trained(model, make, loss, resume):
        optimizer = make(list(model.parameters()))
        train(model, loss, 2, optimizer)
        model.blocks[0].requires_grad_(False)
        train(model, loss, 1, optimizer)
        model, optimizer = resume(model, optimizer)
        model.blocks[0].requires_grad_(True)
        model.uses = True
        return train(model, loss, 2, optimizer)

    def body(comm):
        def resume(model, optimizer):
            shardproof.save(tmp_path / "saved", model, optimizer)
            again = shard(comm, copy.deepcopy(base))
            other = torch.optim.AdamW(make_again(list(again.parameters())), lr=0.5)
            shardproof.load(tmp_path / "saved", again, other)
            return again, other

        own = lambda model, step: loss_of(model, batch(WORLD * step + comm.rank))  # noqa: E731
        return trained(shard(comm, copy.deepcopy(base)), lambda p: torch.optim.AdamW(make_again(p), lr=0.01), own, resume)

    def of_all(model, step):
        return sum(loss_of(model, batch(WORLD * step + rank)) for rank in range(WORLD)) / WORLD

    expected = trained(copy.deepcopy(base), lambda p: torch.optim.AdamW(p, lr=0.01), of_all, lambda *both: both)
    for got in shardproof.run_threads(WORLD, body):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.critic = Net(), Net()


def test_a_critic_steps_between_the_forward_and_the_backward_of_what_it_judges():
    """Steps and graphs of two models interleave, and the second one is frozen while the first one trains."""

    def program(model, wrap, loss):
        maker, critic = wrap(model.maker), wrap(model.critic)
        first, second = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (maker, critic))
        for step in range(3):
            made = []

            def judge(critic, given, made=made):
                made.append(maker(given[0]).repeat(1, 5))
                return (critic(made[-1].detach()) - critic(given[0])).mean()

            first.zero_grad()
            second.zero_grad()
            loss(critic, step, judge).backward()
            second.step()
            critic.requires_grad_(False)
            (-sum(critic(each).mean() for each in made) / len(made)).backward()
            critic.requires_grad_(True)
            first.step()
        return values(maker), values(critic)

    the_same(program, Both)
