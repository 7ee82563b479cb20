"""Units that are computed again, caches, and second order: bits, buffers and memory, beside plain PyTorch."""

import collections
import copy
import random
import types

import pytest
import torch
from bordered import EVERY_WAY, Block, Closed, chain, check, plain, sharded, square
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardproof


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Biased(nn.Module):
    """Attention with a trained bias, for which PyTorch has another kernel when there is no graph."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 3, 3))

    def forward(self, x):
        q = x.view(x.shape[0], x.shape[1], 2, 2).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q * 2, q, attn_mask=(self.bias * 2).unsqueeze(0))
        return y.transpose(1, 2).reshape(x.shape)


class Normed(nn.Module):
    """Statistics, vectors of the spectral norm and two counters change in every forward, and the loss reads them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("anew", torch.ones(()), persistent=False)
        self.count, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.anew = self.anew * 2
        self.count += 1
        self.seen.append(self.count)
        y = self.spectral(self.norm(x)) * self.calls.clone() + self.anew * self.count
        return y + len(self.seen) * self.norm.running_mean[0]


@EVERY_WAY
@pytest.mark.parametrize("kind", [Recurrent, Biased, Normed])
def test_a_unit_has_the_kernels_and_the_buffers_of_the_plain_model(way, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))

    def loss(model, x):
        value = square(model, x) + square(model, x + 1)
        model.eval()  # the backward is that of the forward that was
        return value, (getattr(model[1], "count", 0), getattr(model[1], "seen", None))

    check(model, loss, ["1"], **way)


@EVERY_WAY
def test_a_tensor_in_an_object_that_nobody_looks_into_has_its_gradient(way):
    def run(self, x):
        x = self.first(x)
        for block in self.blocks:
            closed, mean = block(x)
            x = closed.found[0] + mean
        return x

    def each(self, x):
        closed = Closed()
        closed.found.append(self.linear(x))
        return closed, torch.sigmoid(self.linear(x)).mean()

    check(chain(run, each), square, [Block], **way)


def test_a_recomputed_unit_of_which_nothing_is_seen_trains_like_plain():
    def run(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x).found[0]
        return x

    def each(self, x):
        closed = Closed()
        closed.found.append(torch.sigmoid(self.linear(x)))
        return closed

    for strategy in ("ddp", "zero3"):
        check(chain(run, each), square, [Block], strategy=strategy, recompute=True)


def test_a_recomputed_unit_keeps_no_activations_and_a_kept_graph_goes_back_twice():
    saved = []

    def each(self, x):
        for _ in range(3):
            x = x + self.linear.bias
            saved.append(StorageWeakRef(x.untyped_storage()))
            x = torch.sin(x)
        return x

    def loss(model, x):
        y = model(x).sum()
        kept = [not storage.expired() for storage in saved]
        torch.autograd.grad(y, model.blocks[0].linear.bias, retain_graph=True)
        assert [not storage.expired() for storage in saved] == (kept if all(kept) else [False] * 6)
        saved.clear()
        return y, kept

    def run(self, x):
        return self.blocks[0](self.first(x))

    model = chain(run, each, 1)
    expected, _, _ = plain(model, loss, 1)
    for recompute in (False, True):
        ((gradients, _, kept),) = sharded(model, loss, [Block], recompute=recompute, world=1)
        assert kept == [not recompute] * 3
        assert all(torch.equal(gradients[name], value) for name, value in expected.items())


def test_arguments_of_a_recomputed_unit_may_be_nested_as_deep_as_they_like():
    nodes = None
    for _ in range(3000):
        nodes = types.SimpleNamespace(rest=nodes)
    model = chain(lambda self, x: self.blocks[0](self.first(x), nodes), lambda self, x, nodes: self.linear(x), 1)
    check(model, square, [Block], recompute=True)


def test_a_recomputed_unit_that_changes_its_input_is_an_error_that_says_so():
    def run(self, x):
        return self.blocks[0](self.first(x) * 1)

    with pytest.raises(shardproof.Error, match=r"unit 'blocks.0' needs a tensor that was written in place.*clone"):
        sharded(chain(run, lambda self, x: self.linear(x.mul_(3)), 1), square, [Block], recompute=True)


@pytest.mark.parametrize(
    "second,says",
    [
        (lambda self, x: torch.exp(self.linear(x)), "saved 3 tensors when it was recomputed, and 2"),
        (lambda self, x: self.linear(x[:1]), "saved other tensors when it was recomputed"),
    ],
)
def test_a_recomputed_unit_that_does_something_else_the_second_time_is_an_error_that_says_so(second, says):
    calls = []

    def each(self, x):
        calls.append(1)
        return self.linear(x) if len(calls) == 1 else second(self, x)

    model = chain(lambda self, x: self.blocks[0](self.first(x)), each, 1)
    with pytest.raises(RuntimeError, match=f"unit 'blocks.0' {says}"):
        sharded(model, square, [Block], recompute=True, world=1)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_penalty_on_the_gradient_of_the_input_trains_like_plain(strategy, recompute):
    model = chain(lambda self, x: self.blocks[1](self.blocks[0](self.first(x))), lambda self, x: torch.tanh(self.linear(x)), 2)

    def loss(model, x):
        x = x.clone().requires_grad_()
        y = model(x).square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return y + gradient.square().sum()

    check(model, loss, [Block], strategy=strategy, recompute=recompute)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_forward_between_the_two_backwards_of_a_penalty_leaves_the_first_ones_units_open(strategy, recompute):
    model = chain(lambda self, x: self.blocks[1](self.blocks[0](self.first(x))), lambda self, x: torch.tanh(self.linear(x)), 2)

    def loss(model, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return model(x.detach()).square().sum() + gradient.square().sum()

    check(model, loss, [Block], strategy=strategy, recompute=recompute)


def tiny_llama(**more):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("is_registered", [False, True])
def test_generation_with_a_cache_makes_the_tokens_of_the_plain_model(strategy, is_registered):
    model = tiny_llama().eval()
    if is_registered:  # as torch.export needs it, so that anybody may rebuild a cache
        from transformers.integrations.executorch import register_dynamic_cache_export_support

        register_dynamic_cache_export_support()
    tokens = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(0))

    def generate(model):
        with torch.no_grad():
            return model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, pad_token_id=0
            )

    expected, models = generate(model), [copy.deepcopy(model) for _ in range(2)]

    def body(comm):
        own = models[comm.rank]
        shardproof.fully_shard(own, comm, strategy=strategy, units=[type(own.model.layers[0])])
        return generate(own)

    for got in shardproof.run_threads(2, body):
        assert torch.equal(got, expected)


@EVERY_WAY
def test_a_cache_that_layers_fill_while_they_train_has_each_key_once(way):
    model = tiny_llama(use_cache=True, attn_implementation="eager").train()

    def loss(model, x):
        tokens = (x.flatten()[:12].abs() * 10).long().view(2, 6)
        result = model(input_ids=tokens, labels=tokens)
        return result.loss, result.past_key_values.get_seq_length()

    check(model, loss, [type(model.model.layers[0])], **way)


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


def count_in_an_attribute(kept):
    kept.n += 1
    return kept.n


def count_in_a_list_of_a_dict(kept):
    kept["a"][0] += 1
    return kept["a"][0]


def count_in_another_module(kept):
    kept[0].n += 1
    return kept[0].n


def count_in_a_tensor(kept):
    kept["n"].add_(1)
    return kept["n"].item()


def add_one_more(kept):
    (kept.append if hasattr(kept, "append") else kept.add)(len(kept))
    return len(kept)


def count_a_key(kept):
    kept["n"] += 1
    return kept["n"]


def draw(kept):
    return kept.random()


def module_with_a_number():
    module = nn.Module()
    module.n = 0
    return module


KEPT = {
    "an object": (lambda: types.SimpleNamespace(n=0), count_in_an_attribute),
    "an object with slots": (Slotted, count_in_an_attribute),
    "a list of a dict": (lambda: {"a": [0]}, count_in_a_list_of_a_dict),
    "another module": (lambda: (module_with_a_number(),), count_in_another_module),
    "a tensor of a dict": (lambda: {"n": torch.zeros(())}, count_in_a_tensor),
    "a deque": (lambda: collections.deque([1], maxlen=9), add_one_more),
    "a set": (lambda: {7}, add_one_more),
    "a counter": (collections.Counter, count_a_key),
    "a generator of random numbers": (lambda: random.Random(3), draw),
}


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("what", KEPT)
def test_what_a_forward_changes_is_as_it_was_when_it_runs_again(what, is_argument):
    make, change = KEPT[what]

    def each(self, x, *given):
        return torch.tanh(self.linear(x) * change(*given or [self.kept]))

    def run(self, x, *given):
        for block in self.blocks:
            x = block(x, *given)
        return x

    def loss(model, x):
        given = [make()] if is_argument else []
        return model(x, *given).square().mean() + model(x, *given).mean(), change(*given or [model.blocks[0].kept])

    model = chain(run, each)
    for block in model.blocks:
        block.kept = make()
    check(model, loss, [Block], strategy="zero3", recompute=True)


@pytest.mark.parametrize("generator", [random, pytest.importorskip("numpy").random])
def test_random_numbers_that_are_not_torchs_are_the_same_when_a_forward_runs_again(generator):
    def each(self, x):
        return torch.tanh(self.linear(x) * generator.random())

    def loss(model, x):
        generator.seed(3)
        return square(model, x), None

    model = chain(lambda self, x: self.blocks[1](self.blocks[0](x)), each)
    gradients, _, _ = plain(model, loss, world=1)
    for name, value in sharded(model, loss, [Block], recompute=True, world=1)[0][0].items():
        assert torch.equal(value, gradients.get(name, torch.zeros_like(value))), name


@EVERY_WAY
@pytest.mark.parametrize("put", [lambda gate: gate, lambda gate: [gate], lambda gate: types.SimpleNamespace(it=gate)])
def test_a_tensor_of_this_step_in_an_attribute_has_its_gradient(way, put):
    def run(self, x):
        x = self.first(x)
        for block in self.blocks:
            block.gate = put(x.exp())
            x = block(x)
        return x

    def each(self, x):
        gate = self.gate[0] if isinstance(self.gate, list) else getattr(self.gate, "it", self.gate)
        return torch.tanh(self.linear(x)) * gate

    check(chain(run, each), square, [Block], **way)


def test_a_recomputed_unit_refuses_an_argument_that_runs_once():
    model = chain(lambda self, x: self.blocks[0](part for part in x), lambda self, parts: self.linear(sum(parts)))
    with pytest.raises(shardproof.Error, match="a Block that is recomputed was given a generator, which runs only once"):
        sharded(model, square, [Block], recompute=True)


def test_a_recomputed_unit_gets_each_argument_in_its_place():
    def run(self, x):
        for block in self.blocks:
            x = block(x, (x.exp(), 2.0), shift=x.cos(), scale=x.sin())
        return x

    def each(self, x, pair, *, scale, shift):
        return torch.tanh(self.linear(x) * scale + shift * pair[0] / pair[1])

    check(chain(run, each), square, [Block], strategy="zero3", recompute=True)


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "node_creation_hook"), reason="this torch has no hooks of new nodes")
def test_hooks_of_new_nodes_are_called_in_a_recomputed_forward_too():
    def body(comm):
        model = shardproof.fully_shard(nn.Sequential(nn.Linear(3, 3)), comm, units=[shardproof.Unit(nn.Linear, recompute=True)])
        made = []
        with torch.autograd.graph.node_creation_hook(lambda node: made.append(node.name())):
            loss = model(torch.ones(2, 3)).sum()
            before = made.count("AddmmBackward0")
            loss.backward()
        return before, made.count("AddmmBackward0")

    assert shardproof.run_threads(1, body) == [(1, 2)]
