"""What happens at the borders of a unit: its caller's objects stay what they are, and plain PyTorch says what is right."""

import collections
import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardproof

WAYS = [
    dict(strategy="ddp"),
    dict(strategy="zero2", recompute=True),
    dict(strategy="zero3"),
    dict(strategy="zero3", prefetch_backward=1),
    dict(strategy="zero3", recompute=True),
]
EVERY_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(str(key) for pair in way.items() for key in pair))


def batch(rank):
    return torch.linspace(-1, 1, 24).view(2, 3, 4) * (rank + 1)


def plain(model, loss, world=2):
    """Gradients, buffers of each rank, and what ``loss`` says besides."""
    total, buffers, said = {}, [], []
    for rank in range(world):
        own = copy.deepcopy(model)
        value = loss(own, batch(rank))
        value, more = value if isinstance(value, tuple) else (value, None)
        value.backward()
        buffers.append({name: each.clone() for name, each in own.named_buffers()})
        said.append(more)
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad.clone()
    return {name: value / world for name, value in total.items()}, buffers, said


def sharded(model, loss, units, strategy="zero3", recompute=False, world=2, **options):
    models = [copy.deepcopy(model) for _ in range(world)]

    def body(comm):
        own = models[comm.rank]
        it = shardproof.fully_shard(own, comm, strategy=strategy, units=units, recompute=units if recompute else (), **options)
        value = loss(own, batch(comm.rank))
        value, more = value if isinstance(value, tuple) else (value, None)
        value.backward()
        return it.gather_gradients(), {name: each.clone() for name, each in own.named_buffers()}, more

    return shardproof.run_threads(world, body)


def check(model, loss, units, **way):
    """Every bit of gradients and buffers, and what was said."""
    gradients, buffers, said = plain(model, loss)
    for rank, (own, own_buffers, own_said) in enumerate(sharded(model, loss, units, **way)):
        for name, value in own.items():
            assert torch.equal(value, gradients.get(name, torch.zeros_like(value))), name
        for name, value in own_buffers.items():
            assert torch.equal(value, buffers[rank][name]), name
        assert own_said == said[rank]


class Block(nn.Module):
    """A linear layer, and what a test does with it."""

    def __init__(self, run, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.run = run

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


class Chain(nn.Module):
    def __init__(self, run, *blocks):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)
        self.run = run

    def forward(self, *args):
        return self.run(self, *args)


def chain(run, each, count=3):
    torch.manual_seed(0)
    return Chain(run, *[Block(each) for _ in range(count)])


def square(model, x):
    return model(x).square().mean()


@EVERY_WAY
def test_what_layers_write_into_a_list_of_the_caller_is_there_and_carries_gradients(way):
    def run(self, x):
        seen = []
        x = self.first(x)
        for block in self.blocks:
            x = block(x, seen)
        assert len(seen) == len(self.blocks)
        return x + sum(seen)

    def each(self, x, seen):
        seen.append(torch.tanh(self.linear(x)))
        return x + seen[0]

    check(chain(run, each), square, [Block], **way)


@EVERY_WAY
def test_a_key_that_one_layer_writes_is_read_by_a_later_one_with_its_gradient(way):
    def run(self, x):
        shared, holder = {}, collections.OrderedDict(own=None)
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x, shared=shared, holder=holder, index=index)
        return x * holder["own"]

    def each(self, x, shared, holder, index):
        if index == 0:
            shared["keys"] = holder["own"] = self.linear(x)
            shared[0] = [shared["keys"]]
            return torch.relu(x)
        assert shared[0][0] is shared["keys"]
        shared["keys"] = shared["keys"] * 2
        shared[0] = [shared["keys"]]
        return self.linear(x) + shared["keys"]

    check(chain(run, each), square, [Block], **way)


@dataclasses.dataclass
class Bag:
    items: list
    last: object = None


class Closed:
    """Of a kind that nobody looks into."""

    def __init__(self):
        self.found = []


@EVERY_WAY
@pytest.mark.parametrize("make", [lambda: Bag([]), Closed, lambda: collections.deque([0])], ids=["dataclass", "object", "deque"])
def test_objects_of_the_caller_keep_what_units_write_into_them(way, make):
    def run(self, x):
        bag = make()
        x = self.first(x)
        for block in self.blocks:
            x = block(x, bag)
        return x + bag.last, bag.count if hasattr(bag, "count") else len(bag)

    def each(self, x, bag):
        if isinstance(bag, collections.deque):
            return self.linear(x)
        bag.last = torch.sin(self.linear(x))
        bag.count = getattr(bag, "count", 0) + 1
        return x * bag.last

    def run_deque(self, x):
        bag = make()
        x = self.first(x)
        for block in self.blocks:
            bag.append(1)
            x = block(x, bag)
        return x, len(bag)

    def loss(model, x):
        y, count = model(x)
        return y.square().mean(), count

    model = chain(run_deque if isinstance(make(), collections.deque) else run, each)
    check(model, loss, [Block], **way)


class Marked(torch.Tensor):
    pass


def with_attribute(x):
    x.scale = 3
    return x


@EVERY_WAY
@pytest.mark.parametrize(
    "make,ask",
    [
        (lambda x: x.as_subclass(Marked), lambda x: type(x).__name__),
        (with_attribute, lambda x: x.scale),
        (lambda x: x.view(-1, 4), lambda x: x._is_view()),
        (lambda x: torch.nested.as_nested_tensor([x[0], x[1]], layout=torch.jagged), lambda x: x.is_nested),
    ],
    ids=["subclass", "attribute", "view", "nested"],
)
def test_a_unit_gets_the_very_tensor_that_its_caller_gave(way, make, ask):
    warnings.filterwarnings("ignore", message=".*nested tensors.*")
    asked = []

    def run(self, x):
        x = make(self.first(x))
        for block in self.blocks:
            y, said = block(x, twice=(x, x))
            assert said == (ask(x), True, True)
        return y

    def each(self, x, twice):
        asked.append(x)
        return x * self.linear.bias, (ask(x), twice[0] is x, twice[1] is x)

    def loss(model, x):
        y = model(x)
        return (y.values() if y.is_nested else y).square().sum().as_subclass(torch.Tensor)

    check(chain(run, each), loss, [Block], **way)
    assert asked


@EVERY_WAY
def test_self_attention_packs_its_products_as_it_does_in_the_plain_model(way):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    check(layer, square, [nn.MultiheadAttention], **way)


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
    """Its statistics, the vectors of the spectral norm and the two counters change in every forward, and the loss reads them."""

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
        return self.spectral(self.norm(x)) * self.calls.clone() + self.anew * self.count + len(self.seen) * self.norm.running_mean[0]


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


CHANGES = {
    "nothing": lambda y: y,
    "mul_": lambda y: y.mul_(2),
    "relu_": nn.ReLU(inplace=True),
    "masked_fill_": lambda y: y.masked_fill_(y > 0.5, 0),
    "a part": lambda y: y[..., :2].add_(1),
}


@EVERY_WAY
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_view", [True, False])
def test_a_caller_may_change_what_a_unit_returned(way, change, is_view):
    def run(self, x):
        x = self.first(x if is_view else x[0])
        for block in self.blocks:
            x = block(x)
            CHANGES[change](x)
        return x

    check(chain(run, lambda self, x: self.linear(x)), square, [Block], **way)


@pytest.mark.parametrize("way", [way for way in WAYS if "recompute" not in way], ids=str)
def test_a_unit_may_change_its_input_as_in_the_plain_model(way):
    def run(self, x):
        x = self.first(x)
        for block in self.blocks:
            y = x * 1
            x = block(y) + y
        return x

    check(chain(run, lambda self, x: self.linear(x.mul_(3))), square, [Block], **way)


def test_a_recomputed_unit_that_changes_its_input_is_an_error_that_says_so():
    def run(self, x):
        return self.blocks[0](self.first(x) * 1)

    with pytest.raises(shardproof.Error, match=r"unit 'blocks.0' needs a tensor that was written in place.*clone"):
        sharded(chain(run, lambda self, x: self.linear(x.mul_(3)), 1), square, [Block], recompute=True)


def test_a_recomputed_unit_that_does_something_else_the_second_time_is_an_error_that_says_so():
    state = {"calls": 0}

    def each(self, x):
        state["calls"] += 1
        return torch.exp(self.linear(x)) if state["calls"] > 1 else self.linear(x)

    with pytest.raises(RuntimeError, match="unit 'blocks.0' saved 3 tensors when it was recomputed, and 2"):
        sharded(chain(lambda self, x: self.blocks[0](self.first(x)), each, 1), square, [Block], recompute=True, world=1)


Pair = collections.namedtuple("Pair", "first second")


def returned(kind, y):
    if kind == "model output":
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=y, attentions=(y * 2,)), lambda it: it.last_hidden_state + it["attentions"][0]
    return {
        "dataclass": (Bag([y], y), lambda it: it.items[0] + it.last),
        "named tuple": (Pair(y, {"more": [y * 2]}), lambda it: it.first + it.second["more"][0]),
        "defaultdict": (collections.defaultdict(list, a=[y]), lambda it: it["a"][0]),
    }[kind]


@EVERY_WAY
@pytest.mark.parametrize("kind", ["dataclass", "named tuple", "defaultdict", "model output"])
def test_results_of_many_kinds_reach_the_caller_as_they_are(way, kind):
    made = []

    def run(self, x):
        x = self.first(x)
        for block in self.blocks:
            result = block(x)
            assert any(result is each for each in made)
            x = returned(kind, x)[1](result)
        return x

    def each(self, x):
        result = returned(kind, self.linear(x))[0]
        made.append(result)
        return result

    check(chain(run, each), square, [Block], **way)


@EVERY_WAY
def test_units_without_inputs_called_twice_within_another_and_giving_back_their_input_train_like_plain(way):
    def run(self, x):
        shift, same, around = self.blocks
        x = self.first(x)
        assert same(x) is x
        return around(x + shift(), shift, same) + shift()

    def each(self, *args):
        if not args:
            return torch.tanh(self.linear.weight).sum(0)
        if len(args) == 1:
            return args[0]
        x, shift, same = args
        return self.linear(x) * shift() + same(same(x))

    check(chain(run, each), square, [Block], **way)


@EVERY_WAY
def test_branches_of_one_input_train_like_plain(way):
    def run(self, x):
        x = self.first(x)
        return torch.cat([block(x) for block in self.blocks], -1)

    check(chain(run, lambda self, x: torch.tanh(self.linear(x)) * x + x), square, [Block], **way)


@EVERY_WAY
def test_a_unit_that_returns_nothing_and_writes_to_its_argument_trains_like_plain(way):
    def run(self, x):
        held = [self.first(x)]
        for block in self.blocks:
            block(held)
        return held[-1]

    def each(self, held):
        held.append(torch.tanh(self.linear(held[-1])))

    check(chain(run, each), square, [Block], **way)


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


def test_casts_give_one_tensor_for_one_and_what_is_written_comes_back():
    def run(self, x):
        x, kept = self.first(x).float(), {"a": None, "b": [torch.ones(4), None]}
        numbers = kept["b"]
        for block in self.blocks:
            x = block(x, x, kept).float()
        assert kept["b"] is numbers and numbers[0].dtype == torch.float32 and numbers[0] is numbers[2][0]
        assert kept["a"].dtype == torch.bfloat16 and len(numbers) == 2 + len(self.blocks)
        return x

    def each(self, x, same, kept):
        assert x is same and x.dtype == torch.bfloat16 and kept["b"][0].dtype == torch.bfloat16
        kept["a"] = self.linear(x)
        kept["b"].append((kept["b"][0], 1))
        return kept["a"] * kept["b"][0]

    precision = shardproof.Precision(compute=torch.bfloat16)
    for recompute in (False, True):
        sharded(chain(run, each), square, [Block], recompute=recompute, precision=precision)


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
