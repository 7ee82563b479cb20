"""Python may change a model's tensors and children after it was sharded: that is as in plain PyTorch, or one clear error."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import shardproof
from models import assert_same_bits

EVERY = ["ddp", "zero1", "zero2", "zero3"]


class Counts(nn.Module):
    """Buffers of every kind, beside parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("later", None)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.inner = nn.BatchNorm1d(2, affine=False)

    def forward(self, x):
        return self.inner(self.layer(x))


def assign_anew(model):
    model.count = model.count + 1


def fill_what_was_none(model):
    model.later = torch.tensor([1, 2, 3])


def add_one(model):
    model.layer.register_buffer("fresh", torch.ones(2, dtype=torch.float64))


def take_one_away(model):
    del model.count


def change_shape_and_dtype(model):
    model.count = torch.full((2, 2), 5, dtype=torch.int32)


def make_it_persistent(model):
    model.register_buffer("table", model.table + 1)


def make_it_transient(model):
    model.register_buffer("count", model.count, persistent=False)


def assign_a_child_without_parameters(model):
    model.inner = nn.BatchNorm1d(2, affine=False, momentum=0.5)
    model.inner.running_mean += 3


BUFFERS = [
    assign_anew,
    fill_what_was_none,
    add_one,
    take_one_away,
    change_shape_and_dtype,
    make_it_persistent,
    make_it_transient,
    assign_a_child_without_parameters,
]


def changed(change):
    """What plain PyTorch saves after the change."""
    model = counts()
    change(model)
    return model


def counts():
    torch.manual_seed(0)
    return Counts()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("change", BUFFERS)
def test_a_checkpoint_and_a_state_dict_have_the_buffers_that_a_module_has_now(tmp_path, change, strategy):
    models = [counts() for _ in range(4)]

    def save(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm, strategy=strategy, units=[nn.Linear])
        change(sharded.module)
        shardproof.save(str(tmp_path / "saved"), sharded)
        return sharded.state_dict()

    def load(comm):
        sharded = shardproof.fully_shard(models[2 + comm.rank], comm, units=[nn.Linear])
        change(sharded.module)
        with torch.no_grad():
            for buffer in sharded.module.buffers():
                buffer.zero_()
        shardproof.load(str(tmp_path / "saved"), sharded)
        return sharded.state_dict()

    plain = changed(change).state_dict()
    for state in shardproof.run_threads(2, save) + shardproof.run_threads(2, load):
        assert_same_bits(state, plain, change.__name__)


@pytest.mark.parametrize("change", BUFFERS)
def test_a_transfer_moves_the_buffers_that_a_module_has_now(change):
    models = [counts() for _ in range(4)]

    def body(comm):
        source = shardproof.fully_shard(models[comm.rank], comm)
        target = shardproof.fully_shard(models[2 + comm.rank], comm, strategy="ddp")
        change(source.module)
        change(target.module)
        with torch.no_grad():
            for buffer in target.module.buffers():
                buffer.zero_()
        shardproof.transfer(source, target)
        return target.state_dict()

    for state in shardproof.run_threads(2, body):
        assert_same_bits(state, changed(change).state_dict(), change.__name__)


def test_a_manager_saves_and_loads_the_buffers_that_a_module_has_now(tmp_path):
    models = [counts() for _ in range(2)]

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm)
        manager = shardproof.Manager(str(tmp_path), in_background=True, copy_in_background=True)
        for step in (1, 2):
            assign_anew(sharded.module)
            assert manager.save(sharded, None, step)
            manager.wait()
        sharded.module.count = torch.full((), -1.0)
        manager.load_latest(sharded)
        return sharded.module.count.item()

    assert shardproof.run_threads(2, body) == [2.0, 2.0]


def test_a_transfer_moves_parameters_that_are_not_sharded():
    models = [counts() for _ in range(4)]

    def body(comm):
        source, target = (
            shardproof.fully_shard(model, comm, ignored="layer.bias") for model in (models[comm.rank], models[2 + comm.rank])
        )
        with torch.no_grad():
            source.module.layer.bias.fill_(4)
        shardproof.transfer(source, target)
        return target.module.layer.bias.tolist()

    assert shardproof.run_threads(2, body) == [[4.0, 4.0]] * 2


def test_buffers_that_are_assigned_between_parallelize_and_fully_shard_are_those_of_rank_0():
    models = [counts() for _ in range(2)]

    def body(comm):
        comms = shardproof.MeshComm(comm, "dp_shard=2")
        shardproof.parallelize(models[comm.rank], shardproof.MeshComm(comm, "tp=1,dp_shard=2"), plan={})
        models[comm.rank].count = torch.full((), 1.0 + comm.rank)
        shardproof.fully_shard(models[comm.rank], shardproof.MeshComm(comm, "tp=1,dp_shard=2"))
        return models[comm.rank].count.item(), comms.size

    assert shardproof.run_threads(2, body) == [(1.0, 2)] * 2


def pair():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def load_by_assignment(model):
    model.load_state_dict({name: torch.full(value.shape, 7.0) for name, value in pair().state_dict().items()}, assign=True)


def a_new_parameter(model):
    model[0].weight = nn.Parameter(torch.full((2, 2), 7.0))


def a_new_child(model):
    model[0] = nn.Linear(2, 2)


def a_child_more(model):
    model.append(nn.Linear(2, 2))


def a_child_less(model):
    del model[1]


def a_parameter_less(model):
    model[0].bias = None


def a_parameter_more(model):
    model[0].scale = nn.Parameter(torch.ones(1))


def another_name(model):
    model[0] = nn.Sequential(model[0])


def a_parametrization(model):
    parametrize.register_parametrization(model[0], "weight", nn.Identity(), unsafe=True)


def weight_norm(model):
    parametrizations.weight_norm(model[0])


def data(model):
    model[0].weight.data = torch.full((2, 2), 7.0)


def data_of_another_shape(model):
    model[0].weight.data = model[0].weight.data.t()


def a_cast(model):
    model.double()


def values_in_place(model):
    model[0].weight.data.copy_(torch.full((2, 2), 7.0))


def values_of_a_state_dict(model):
    model.load_state_dict({name: torch.full(value.shape, 7.0) for name, value in pair().state_dict().items()})


def forward(sharded, optimizer):
    sharded.module(torch.ones(1, 2))


def train(sharded, optimizer):
    optimizer.step()


def save(sharded, optimizer):
    shardproof.save("saved", sharded)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a save that should be refused leaves nothing for other tests


USES = [forward, save, lambda sharded, _: sharded.state_dict(), lambda sharded, _: sharded.gather_main_parameters()]
REFUSED = [
    load_by_assignment,
    a_new_parameter,
    a_new_child,
    a_child_more,
    a_child_less,
    a_parameter_less,
    a_parameter_more,
    another_name,
    a_parametrization,
    weight_norm,
    data,
    data_of_another_shape,
    a_cast,
]


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", REFUSED)
def test_a_parameter_that_was_changed_by_assignment_is_an_error_that_names_it(change, use, strategy):
    models = [pair() for _ in range(2)]

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm, strategy=strategy, units=[nn.Linear])
        optimizer = shardproof.sgd(sharded)
        sharded.module(torch.ones(1, 2)).sum().backward()
        change(sharded.module)
        use(sharded, optimizer)

    names = r"parameter [012]\.(weight|bias|scale|0|parametrizations)"
    with pytest.raises(RuntimeError, match=f"(?s){names}.*(the sharded model|the Sharded)"):
        shardproof.run_threads(2, body)


@pytest.mark.parametrize("strategy", EVERY)
def test_a_change_on_one_rank_ends_all_ranks_with_an_error_that_names_the_rank(strategy):
    models = [pair() for _ in range(3)]

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm, strategy=strategy)
        if comm.rank == 1:
            a_new_parameter(sharded.module)
        sharded.module(torch.ones(1, 2))

    with pytest.raises(shardproof.Error, match="rank 1: parameter 0.weight was replaced by another tensor"):
        shardproof.run_threads(3, body)


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("change", [values_in_place, values_of_a_state_dict])
def test_values_that_are_written_into_parameters_are_trained_and_saved_or_refused(change, compute, strategy):
    models = [pair() for _ in range(2)]

    def body(comm):
        precision = shardproof.Precision(compute=compute)
        sharded = shardproof.fully_shard(models[comm.rank], comm, strategy=strategy, units=[nn.Linear], precision=precision)
        change(sharded.module)
        sharded.module(torch.ones(1, 2))
        return sharded.gather_main_parameters()["0.weight"]

    taken = torch.full((2, 2), 7.0)
    if strategy != "zero3" and compute is None:
        for value in shardproof.run_threads(2, body):
            assert torch.equal(value, taken)
    elif not (strategy != "zero3" and change is values_in_place):  # `.data` hides what is written through it
        with pytest.raises(RuntimeError, match="(?s)0.weight.*sharded model"):
            shardproof.run_threads(2, body)


@pytest.mark.parametrize("strategy", EVERY)
def test_values_that_a_forward_writes_into_its_parameters_are_refused_where_they_would_be_lost(strategy):
    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    torch.manual_seed(0)
    plain = nn.Sequential(Clamped(2, 2))
    models = [copy.deepcopy(plain) for _ in range(2)]

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm, strategy=strategy, units=[Clamped])
        for _ in range(2):
            with torch.no_grad():
                sharded.module(torch.ones(1, 2))
        return sharded.gather_main_parameters()["0.weight"]

    if strategy == "zero3":
        with pytest.raises(shardproof.Error, match="0.weight or a parameter beside it was changed in place"):
            shardproof.run_threads(2, body)
    else:
        plain(torch.ones(1, 2))
        for value in shardproof.run_threads(2, body):
            assert torch.equal(value, plain[0].weight)


def test_what_changes_no_parameter_stays_as_in_plain_pytorch():
    x = torch.ones(3, 2)
    models = [pair() for _ in range(2)]
    lent = torch.full((2, 2), 0.5)

    def change(model):
        model[0].bias.requires_grad_(False)
        model[0].register_forward_hook(lambda module, args, output: output * 2)
        model.note, model.child = "a text", nn.Tanh()
        model.child = nn.Identity()

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm, units=[nn.Linear])
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)
        change(sharded.module)
        with torch.no_grad():
            other = torch.func.functional_call(sharded.module, {"0.weight": lent}, (x,))
        sharded.module(x).sum().backward()
        optimizer.step()
        return other, sharded.gather_main_parameters()

    plain = pair()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    change(plain)
    with torch.no_grad():
        other = torch.func.functional_call(plain, {"0.weight": lent}, (x,))
    plain(x).sum().backward()
    optimizer.step()
    for got, parameters in shardproof.run_threads(2, body):
        assert torch.equal(got, other)
        assert_same_bits(parameters, dict(plain.named_parameters()))


def test_a_model_that_is_taken_apart_changed_and_sharded_again_trains_as_the_plain_one():
    x = torch.ones(3, 2)
    models = [pair() for _ in range(2)]

    def change(model):
        torch.manual_seed(1)
        model[1] = nn.Linear(2, 3)
        parametrizations.weight_norm(model[0])

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    first = [pair() for _ in range(2)]
    for model in first:
        change(model)
    changes = [model.state_dict() for model in first]

    def body(comm):
        model = models[comm.rank]
        sharded = shardproof.fully_shard(model, comm, units=[nn.Linear])
        step(model, shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1))
        sharded.remove()
        model[1] = nn.Linear(2, 3)
        parametrizations.weight_norm(model[0])
        model[1].load_state_dict({name[2:]: value for name, value in changes[comm.rank].items() if name.startswith("1.")})
        sharded = shardproof.fully_shard(model, comm, strategy="zero1")
        step(model, shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1))
        return sharded.gather_main_parameters()

    plain = pair()
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    change(plain)
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for parameters in shardproof.run_threads(2, body):
        assert_same_bits(parameters, dict(plain.named_parameters()))


def test_a_model_can_be_taken_apart_after_an_assignment_and_keeps_what_was_assigned():
    models = [pair() for _ in range(2)]

    def body(comm):
        sharded = shardproof.fully_shard(models[comm.rank], comm)
        a_new_parameter(sharded.module)
        with pytest.raises(shardproof.Error, match="0.weight was replaced"):
            sharded.gather()
        return sharded.remove().state_dict()

    plain = pair()
    a_new_parameter(plain)
    for state in shardproof.run_threads(2, body):
        assert_same_bits(state, plain.state_dict())
