"""What happens at the borders of a unit: its caller's objects stay what they are, and plain PyTorch says what is right."""

import collections
import dataclasses
import warnings

import pytest
import torch
from bordered import EVERY_WAY, WAYS, Block, Closed, batch, chain, check, plain, sharded, square
from torch import nn

import shardproof


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


@EVERY_WAY
@pytest.mark.parametrize("make", [lambda: Bag([]), Closed, lambda: collections.deque([0])], ids=["bag", "object", "deque"])
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


def test_keys_that_a_unit_removes_from_a_dict_that_was_copied_for_a_cast_are_gone():
    def run(self, x):
        kept = {name: torch.ones(4) for name in "abcd"}
        x = self.blocks[0](self.first(x), kept)
        assert list(kept) == ["d"]
        return x.float()

    def each(self, x, kept):
        for name in "abc":
            del kept[name]
        return self.linear(x) * kept["d"]

    sharded(chain(run, each, 1), square, [Block], precision=shardproof.Precision(compute=torch.bfloat16))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_a_unit_writes_into_the_cast_of_a_tensor_is_written_into_the_tensor(mode):
    table = torch.full((2, 4), 0.1)

    def run(self, x):
        own = table.clone()
        for block in self.blocks:
            x = block(x, own)
        assert own[0].tolist() == [3.0] * 4 and torch.equal(own[1], table[1])
        return x

    def each(self, x, own):
        own[0] = own[0].floor() + 1
        return x

    models = [chain(run, each) for _ in range(2)]

    def body(comm):
        precision = shardproof.Precision(compute=torch.bfloat16)
        shardproof.fully_shard(models[comm.rank], comm, units=[Block], precision=precision)
        with mode():
            models[comm.rank](batch(comm.rank))

    shardproof.run_threads(2, body)


def test_what_a_unit_writes_into_the_cast_of_a_tensor_has_its_gradient():
    def run(self, x):
        x = self.first(x).double()
        for block in self.blocks:
            block(x)
        return x

    model = chain(run, lambda self, x: x.mul_(torch.tanh(self.linear(x.float().clone()))))
    gradients, _, _ = plain(model, square)
    for own, _, _ in sharded(model, square, [Block], precision=shardproof.Precision(compute=torch.float32)):
        for name, value in own.items():
            torch.testing.assert_close(value, gradients[name])


@EVERY_WAY
@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight,
        lambda weight: weight[:3],
        lambda weight: weight.t(),
        lambda weight: weight[:1].expand(1, 4),
        lambda weight: weight.detach(),
        lambda weight: weight.data[0],
    ],
)
def test_a_unit_may_return_its_parameter_or_a_part_of_it(way, view):
    def run(self, x):
        x = self.first(x)
        for block in self.blocks:
            x, part = block(x)
            x = x * part.sum().exp() + part[..., :1].mean()
        return x

    check(chain(run, lambda self, x: (torch.tanh(self.linear(x)), view(self.linear.weight))), square, [Block], **way)
