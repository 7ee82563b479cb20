"""Models whose parts share more than tensors hold under shardproof.verify: what one unit writes is there for the next."""

import collections
import dataclasses

import pytest
import torch
from torch import nn

import shardproof
from shardproof.check.ours import Subject
from shardproof.check.trained import threads_on
from shardproof.check.verify import prepare

WIDTH = 6


class Named(collections.namedtuple("Named", "x mask")):
    """A named tuple."""


@dataclasses.dataclass
class Data:
    """A dataclass, with what is no tensor besides."""

    x: torch.Tensor
    level: int = 0
    kept: list = dataclasses.field(default_factory=list)


class Unknown:
    """An object of a kind that nobody knows, with the items of a dict."""

    def __init__(self, **items):
        self.items = items

    def __getitem__(self, name):
        return self.items[name]

    def __setitem__(self, name, value):
        self.items[name] = value

    def keys(self):
        return self.items.keys()


class Cache:
    """As the caches of transformers: a list of what each layer has, and a method that adds to it."""

    def __init__(self):
        self.layers = []

    def update(self, value):
        self.layers.append(value)
        return torch.stack(self.layers).sum(0)


class Layer(nn.Module):
    """One layer that hands on a structure."""

    def __init__(self, step):
        super().__init__()
        self.linear, self.step = nn.Linear(WIDTH, WIDTH), step

    def forward(self, x, *shared, **named):
        return self.step(lambda y: torch.tanh(self.linear(y)), x, *shared, **named)


class Stack(nn.Module):
    """Layers, and how the first is called and the last one's result becomes a number."""

    def __init__(self, step, begin, end=lambda value, shared: value):
        super().__init__()
        self.first, self.begin, self.end = nn.Linear(WIDTH, WIDTH), begin, end
        self.layers = nn.ModuleList(Layer(step) for _ in range(3))

    def forward(self, x):
        value, shared = self.begin(self.first(x))
        for layer in self.layers:
            value = layer(value, *shared)
        return self.end(value, shared)


def _writes_a_dict(run, x, shared):
    shared["sum"] = shared.get("sum", 0) + run(x)
    return run(shared["sum"])


def _writes_a_list(run, x, shared):
    shared.append(run(x))
    return shared[0] + shared[-1]


def _writes_a_cache(run, x, cache):
    return cache.update(run(x))


def _writes_an_object(run, x, shared):
    shared["y"] = run(x) + shared["y"]
    shared["count"] = shared["count"] + 1
    return shared["y"] * shared["count"]


def _hands_on_a_named_tuple(run, given):
    return Named(run(given.x) * given.mask, given.mask)


def _hands_on_data(run, given):
    return Data(run(given.x) + sum(given.kept), given.level + 1, [*given.kept, given.x])


def _same_tensor_twice(run, x, again):
    return run(x) if x is again else run(x) + run(again) * 0.5


STACKS = {
    "a dict": lambda: Stack(_writes_a_dict, lambda x: (x, ({},)), lambda value, shared: value + shared[0]["sum"]),
    "a list": lambda: Stack(_writes_a_list, lambda x: (x, ([],)), lambda value, shared: value + len(shared[0])),
    "a cache": lambda: Stack(_writes_a_cache, lambda x: (x, (Cache(),)), lambda value, shared: value + shared[0].layers[1]),
    "an object of unknown kind": lambda: Stack(_writes_an_object, lambda x: (x, (Unknown(y=x, count=0),))),
    "named tuples": lambda: Stack(_hands_on_a_named_tuple, lambda x: (Named(x, x > 0), ()), lambda value, _: value.x),
    "dataclasses": lambda: Stack(_hands_on_data, lambda x: (Data(x), ()), lambda value, _: value.x * value.level),
    "one tensor twice": lambda: Stack(_same_tensor_twice, lambda x: (x, (x,))),
}


def squares(model, x):
    return model(x).square().mean()


def batch():
    return torch.randn(4, WIDTH)


def require_holds(make, loss=squares, cases=14, **given):
    report = shardproof.verify(make, batch, loss, cases=cases, **given)
    assert report.diverged <= cases // 3 and report.values > 1000


@pytest.mark.parametrize("what", STACKS)
def test_layers_that_share_hold(what):
    require_holds(STACKS[what])


class Tied(nn.Module):
    """Layers that hold a dict of the model, as those that share keys and values do, and a unit within a unit."""

    def __init__(self):
        super().__init__()
        self.notes = {}
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Sequential(self.inner, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.outer.notes = self.notes
        self.outer.register_forward_hook(lambda module, args, result: module.notes.update(last=result))

    def forward(self, x):
        y = self.inner(self.outer(x)) + self.inner(x)
        return y + self.notes.pop("last")


class WithoutInputs(nn.Module):
    """A unit that is called with nothing, and several times."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self):
            return self.weight.exp()

    def __init__(self):
        super().__init__()
        self.table, self.linear = self.Table(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x * self.table())
        return self.linear(x * self.table()) + self.table()


class Assigns(nn.Module):
    """Buffers and attributes that each forward assigns anew, and one that it writes to."""

    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("last", None, persistent=False)
            self.auxiliary = None

        def forward(self, x):
            y = super().forward(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            self.count += 1
            self.last = y.detach()[0]
            self.auxiliary = y.square().mean()
            return y - self.mean

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(self.Layer(), nn.Tanh(), self.Layer())

    def forward(self, x):
        y = self.layers(x)
        return y + self.layers[0].auxiliary + 0.1 * self.layers[2].auxiliary


@pytest.mark.parametrize("make", [Tied, WithoutInputs, Assigns], ids=lambda make: make.__name__)
def test_units_that_are_called_in_rare_ways_hold(make):
    require_holds(make)


def test_a_loss_of_second_order_holds():
    def penalty(model, x):
        x = x.detach().requires_grad_()
        value = model(x).square().mean()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.square().mean()

    def make():
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        return nn.Sequential(first, nn.Tanh(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), last)

    require_holds(make, penalty)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize(
    "made", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.randn(3, 4))], ids=["script", "trace"]
)
def test_layers_in_torchscript_hold_and_a_whole_model_in_it_is_refused(made):
    def loss(model, x):
        return model(x).square().mean()

    def batch(number):
        return torch.randn(3, 4)

    assert shardproof.verify(lambda: nn.Sequential(made(nn.Linear(4, 6)), nn.Linear(6, 1)), batch, loss, cases=8).cases == 8
    with pytest.raises(shardproof.Error, match="runs without hooks of Python. Choose the module around it"):
        shardproof.verify(lambda: made(nn.Linear(4, 6)), batch, loss)


def test_an_activation_that_all_models_of_a_process_share_is_not_compared():
    shared = nn.GELU()

    def make():
        return nn.Sequential(nn.Linear(4, 6), shared, nn.Linear(6, 1), shared)

    def batch(number):
        return torch.randn(3, 4)

    subject = Subject(make, batch, lambda model, x: model(x).square().mean())
    prepare(subject)
    assert {name for name in subject.ignored if name.endswith("training")} == {"attribute 1.training", "attribute 3.training"}


def test_a_model_that_seeds_torchs_generator_by_chance_holds():
    class Seeds(nn.Linear):
        def forward(self, x):
            torch.seed()
            return super().forward(x)

    def loss(model, x):
        return model(x).square().mean()

    assert shardproof.verify(lambda: Seeds(4, 1), lambda number: torch.randn(3, 4), loss, cases=2).cases == 2


def test_on_a_device_its_streams_decide_when_a_collective_takes_effect():
    assert threads_on(torch.device("cpu")) == {"completion": "random"}
    gpu = torch.device("cuda", 1)
    assert threads_on(gpu) == {"device": gpu}, "rank-threads refuse other completions than eager there"
