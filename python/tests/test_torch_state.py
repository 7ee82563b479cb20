"""Optimizers of torch.optim on shards are saved and loaded as the library's own: a resumed run has plain PyTorch's bits."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import shardproof
import shardproof.fsdp
from models import Block, Net, assert_same_bits, batch, loss_of, train_plain

KINDS = [
    (torch.optim.AdamW, dict(lr=0.01, amsgrad=True)),
    (torch.optim.Adam, dict(lr=0.01, weight_decay=0.1, maximize=True)),
    (torch.optim.SGD, dict(lr=0.01)),
    (torch.optim.SGD, dict(lr=0.01, momentum=0.9, dampening=0.5)),
    (torch.optim.RMSprop, dict(lr=0.01, momentum=0.9, centered=True)),
    (torch.optim.NAdam, dict(lr=0.01)),
    (torch.optim.Adagrad, dict(lr=0.01)),
    (torch.optim.ASGD, dict(lr=0.01)),
    (torch.optim.Rprop, dict(lr=0.01)),
]


class Scaled(nn.Module):
    """With a parameter of no dims, whose state has the shape of a number; or of one, which FSDP2 asks for."""

    def __init__(self, *shape):
        super().__init__()
        self.gain = nn.Parameter(torch.full(shape, 1.5))
        self.net = Net()

    def forward(self, x):
        return self.gain * self.net(x)


def shard(comm, model, strategy="zero3"):
    """By the door of FSDP2, whose parameters have a dim, or by our own."""
    own = copy.deepcopy(model)
    if own.gain.dim() == 0:
        shardproof.fully_shard(own, comm, strategy=strategy, units=[Block])
        return own
    mesh = shardproof.MeshComm(comm, f"dp_shard={comm.size}")
    for block in own.net.blocks:
        shardproof.fsdp.fully_shard(block, mesh=mesh)
    return shardproof.fsdp.fully_shard(own, mesh=mesh, strategy=strategy)


def made(kind, model, parameters=None, **settings):
    if model.gain.dim() == 0:
        return shardproof.torch_optimizer(kind, shardproof.sharded_of(model), parameters or model.parameters(), **settings)
    return kind(parameters or model.parameters(), **settings)


def train(comm, model, optimizer, steps):
    for step in range(steps):
        loss_of(model, batch(step * comm.size + comm.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(base, kind, settings, parts):
    """Plain PyTorch through parts of a run, each of (steps, ranks)."""
    made = []

    def make(parameters):
        optimizer = kind(parameters, **settings)
        if made:
            optimizer.load_state_dict(made[-1].state_dict())
        made.append(optimizer)
        return optimizer

    model = base
    for steps, world in parts:
        _, model = train_plain(model, make, steps=steps, world=world)
    return dict(model.named_parameters()), made[-1]


@pytest.mark.parametrize("kind,settings", KINDS)
@pytest.mark.parametrize("on", [(2, "zero3"), (3, "zero1"), (1, "ddp"), (3, "zero3", 1), (2, "zero1", 1)])
def test_a_run_on_another_mesh_goes_on_with_the_bits_of_plain_pytorch(tmp_path, kind, settings, on):
    world, strategy, *shape = on
    base, saved = Scaled(*shape), str(tmp_path / "saved")
    if shape and kind is torch.optim.Rprop:
        pytest.skip("DTensor has no index_put_, which Rprop calls")

    def first(comm):
        model = shard(comm, base)
        optimizer = made(kind, model, **settings)
        train(comm, model, optimizer, 3)
        shardproof.save(saved, model, optimizer, step=3)

    def second(comm):
        model = shard(comm, base, strategy)
        optimizer = made(kind, model, **settings)
        assert shardproof.load(saved, model, optimizer)["step"] == 3
        train(comm, model, optimizer, 2)
        return shardproof.sharded_of(model).gather()

    shardproof.run_threads(2, first)
    expected, _ = plain(base, kind, settings, [(3, 2), (2, world)])
    for got in shardproof.run_threads(world, second):
        assert_same_bits(got, expected, kind.__name__)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_load_restores_what_the_optimizer_had_before_it_trained_on(tmp_path, shape):
    base, saved = Scaled(*shape), str(tmp_path / "saved")

    def body(comm):
        model = shard(comm, base)
        optimizer = made(torch.optim.AdamW, model, lr=0.01)
        train(comm, model, optimizer, 1)
        shardproof.save(saved, model, optimizer)
        results = []
        for _ in range(2):
            train(comm, model, optimizer, 2)
            results.append(shardproof.sharded_of(model).gather())
            shardproof.load(saved, model, optimizer)
        assert_same_bits(*results)

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_pytorch_goes_on_with_what_was_saved(tmp_path, shape):
    base, saved = Scaled(*shape), str(tmp_path / "saved")
    settings = dict(lr=0.01, amsgrad=True)

    def body(comm):
        model = shard(comm, base)
        optimizer = made(torch.optim.AdamW, model, **settings)
        train(comm, model, optimizer, 3)
        shardproof.save(saved, model, optimizer)

    shardproof.run_threads(2, body)
    model = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=saved, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    expected, before = plain(base, torch.optim.AdamW, settings, [(3, 2)])
    assert_same_bits(dict(model.named_parameters()), expected)
    for own, theirs in zip(optimizer.state_dict()["state"].values(), before.state_dict()["state"].values()):
        assert_same_bits(own, theirs)


@pytest.mark.parametrize("first_is_ours", [True, False])
def test_the_librarys_adamw_and_pytorchs_load_each_others_state(tmp_path, first_is_ours):
    base, saved = Scaled(), str(tmp_path / "saved")

    def make(model, ours):
        if ours:
            return shardproof.adamw(shardproof.sharded_of(model), lr=0.01, weight_decay=0.1)
        return made(torch.optim.AdamW, model, lr=0.01, weight_decay=0.1)

    def body(comm):
        model = shard(comm, base)
        first, second = make(model, first_is_ours), make(model, not first_is_ours)
        train(comm, model, first, 2)
        shardproof.save(saved, model, first)
        shardproof.load(saved, model, second)
        ours = first if first_is_ours else second
        theirs = second if first_is_ours else first
        state = theirs.torch_state.for_save()
        for name in ("exp_avg", "exp_avg_sq"):
            pieces = {}
            for piece in ours.state(name):
                pieces.setdefault(piece.name, []).append(piece.data)
            for parameter, data in pieces.items():
                assert torch.equal(torch.cat(data), state.state(parameter)[0][name])
                assert state.state(parameter)[1]["step"] == ours.updates(parameter) == 2

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_settings_come_from_the_checkpoint_and_a_scheduler_goes_on(tmp_path, shape):
    saved = str(tmp_path / "saved")
    base = Scaled(*shape)

    def run(comm, first, last, restore):
        model = shard(comm, base)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.5 if restore else 0.02}]
        optimizer = made(torch.optim.AdamW, model, groups, lr=0.7 if restore else 0.01, weight_decay=0.0, foreach=restore)
        if restore:
            values = shardproof.load(saved, model, optimizer)["values"]
            assert [group["foreach"] for group in optimizer.param_groups] == [True, True]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if restore:
            shardproof.load(saved, model, optimizer)  # what the scheduler's constructor did to the rates
            schedule.load_state_dict(values["schedule"])
        rates = []
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, batch(step * comm.size + comm.rank)).backward()
            optimizer.step()
            schedule.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        if not restore:
            state = {name: value for name, value in schedule.state_dict().items() if isinstance(value, (int, float, list))}
            shardproof.save(saved, model, optimizer, step=last, values={"schedule": state}, overwrite=True)
        return rates, shardproof.sharded_of(model).gather()

    whole_rates, whole = shardproof.run_threads(2, lambda comm: run(comm, 0, 4, False))[0]
    shardproof.run_threads(2, lambda comm: run(comm, 0, 2, False))
    for rates, values in shardproof.run_threads(2, lambda comm: run(comm, 2, 4, True)):
        assert rates == whole_rates[2:]
        assert_same_bits(values, whole)


def test_parameters_that_are_not_sharded_or_not_trained_keep_their_state_too(tmp_path):
    saved = str(tmp_path / "saved")

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.shift = nn.Parameter(torch.ones(1, 3))
            self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
            self.net.inp.weight.requires_grad_(False)

        def forward(self, x):
            return self.net(x) + self.shift.sum() + self.frozen.sum()

    def body(comm):
        def make():
            model = Mixed()
            sharded = shardproof.fully_shard(model, comm, units=[Block], ignored=[model.shift])
            return model, sharded, shardproof.torch_optimizer(torch.optim.Adam, sharded, model.parameters(), lr=0.1)

        model, sharded, optimizer = make()
        for _ in range(2):
            loss_of(model, batch(0)).backward()  # the same on every rank
            optimizer.step()
            optimizer.zero_grad()
        shardproof.save(saved, sharded, optimizer)
        other, sharded, restored = make()
        shardproof.load(saved, sharded, restored)
        before, after = optimizer.state[model.shift], restored.state[other.shift]
        assert_same_bits(after, before)
        assert after["step"] == 2 and after["exp_avg"].abs().sum() > 0
        assert other.frozen not in restored.state

    shardproof.run_threads(2, body)


def contents(folder):
    """Every tensor of a checkpoint, as PyTorch reads it."""
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in described.items()
        if hasattr(tensor, "size")
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_state_of_parameters_that_are_cut_by_columns_comes_back_under_any_cut(tmp_path):
    folders = [str(tmp_path / name) for name in ("cut", "whole", "cut_again")]
    plan = {"blocks.*.up": shardproof.ColumnParallel(), "blocks.*.down": shardproof.RowParallel()}

    def run(comm, tp, restore, save):
        model = Net()
        comms = shardproof.MeshComm(comm, f"dp_shard={comm.size // tp},tp={tp}")
        if tp > 1:
            shardproof.parallelize(model, comms, plan=plan)
        sharded = shardproof.fully_shard(model, comms, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.AdamW, sharded, lr=0.01)
        if restore:
            shardproof.load(restore, sharded, optimizer)
        else:
            for step in range(2):
                loss_of(model, batch(step)).backward()
                optimizer.step()
        shardproof.save(save, sharded, optimizer)
        names = [piece.name for piece in sharded.main_parameters()]
        return max(names.count(name) for name in names)  # runs of the whole parameter

    assert max(shardproof.run_threads(4, lambda comm: run(comm, 2, None, folders[0]))) > 1, "nothing is cut by columns"
    shardproof.run_threads(3, lambda comm: run(comm, 1, folders[0], folders[1]))
    shardproof.run_threads(4, lambda comm: run(comm, 2, folders[1], folders[2]))
    values = contents(folders[0])
    assert values["optim.state.blocks.0.down.weight.exp_avg"].abs().sum() > 0
    for folder in folders[1:]:
        assert_same_bits(contents(folder), values)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("copies", [False, True])
def test_a_manager_saves_in_the_background_what_the_optimizer_was_then(tmp_path, copies, shape):
    base = Scaled(*shape)

    def body(comm):
        model = shard(comm, base)
        optimizer = made(torch.optim.AdamW, model, lr=0.01)
        manager = shardproof.Manager(str(tmp_path), in_background=True, copy_in_background=copies)
        assert manager.load_latest(model, optimizer) is None
        train(comm, model, optimizer, 2)
        manager.save(model, optimizer, 2)
        train(comm, model, optimizer, 3)
        manager.wait()
        comm.barrier()
        assert manager.load_latest(model, optimizer)["step"] == 2
        train(comm, model, optimizer, 1)
        return shardproof.sharded_of(model).gather()

    expected, _ = plain(base, torch.optim.AdamW, dict(lr=0.01), [(2, 2), (1, 2)])
    for got in shardproof.run_threads(2, body):
        assert_same_bits(got, expected)


def test_what_cannot_be_saved_or_does_not_fit_is_an_error_on_every_rank(tmp_path):
    saved = str(tmp_path / "saved")

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.state[parameter]["rows"] = torch.zeros(2, 2)

    def body(comm):
        model = shard(comm, Scaled())
        optimizer = made(torch.optim.AdamW, model, lr=0.01)
        with pytest.raises(shardproof.Error, match="expected an optimizer on shards, got a SGD"):
            shardproof.save(saved, model, torch.optim.SGD(nn.Linear(1, 1).parameters()))
        with pytest.raises(shardproof.Error, match="expected a sharded model, got a Linear"):
            shardproof.save(saved, nn.Linear(1, 1))
        sharded = shardproof.sharded_of(model)
        odd = shardproof.torch_optimizer(Odd, sharded)
        train(comm, model, odd, 1)
        with pytest.raises(shardproof.Error, match="the state 'rows' that Odd keeps of .* cannot be saved"):
            shardproof.save(saved, model, odd)
        train(comm, model, optimizer, 1)
        if comm.rank == 1:
            next(iter(optimizer.state.values()))["step"] += 1
        with pytest.raises(shardproof.Error, match="is not the same on the ranks that hold parts of it: rank 0 has .* rank 1"):
            shardproof.save(saved, model, optimizer)
        if comm.rank == 1:
            next(iter(optimizer.state.values()))["step"] -= 1
        shardproof.save(saved, model, optimizer)
        parameters = list(model.parameters())
        other = made(torch.optim.AdamW, model, [{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.02, amsgrad=True)
        with pytest.raises(shardproof.Error, match="max_exp_avg_sq is missing from the checkpoint"):
            shardproof.load(saved, model, other)
        other = made(torch.optim.AdamW, model, [{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.02)
        with pytest.raises(shardproof.Error, match="no group in the checkpoint has just the 2 parameters of group 0 here"):
            shardproof.load(saved, model, other)
        train(comm, model, other, 1)
        other.param_groups[0]["amsgrad"] = True  # from now on it needs state that the checkpoint lacks
        kept = {parameter: state["exp_avg"].clone() for parameter, state in other.state.items()}
        assert any("max_exp_avg_sq" in line for line in shardproof.load(saved, model, other, partial=True)["skipped"])
        first = {id(parameter) for parameter in other.param_groups[0]["params"]}
        for parameter, before in kept.items():
            assert torch.equal(other.state[parameter]["exp_avg"], before) == (id(parameter) in first)
        other.param_groups[0]["amsgrad"] = False
        skipped = shardproof.load(saved, model, other, partial=True)["skipped"]
        assert len(skipped) == 2 and all("optim.param_groups" in line for line in skipped)
        assert [group["lr"] for group in other.param_groups] == [0.02, 0.02]

    shardproof.run_threads(2, body)


def test_hooks_of_a_step_run_once_a_step_before_and_after_a_load(tmp_path):
    torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(1))])  # torch puts hooks around the class's own step from now on

    def body(comm):
        model = torch.nn.Linear(2, 1)
        sharded = shardproof.fully_shard(model, comm)
        optimizer = shardproof.torch_optimizer(torch.optim.RMSprop, sharded)
        calls, counts = [], []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for loads in (False, True):
            if loads:
                shardproof.save(str(tmp_path / "saved"), sharded, optimizer)
                shardproof.load(str(tmp_path / "saved"), sharded, optimizer)
            calls.clear()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            counts.append(list(calls))
        return counts

    assert shardproof.run_threads(2, body)[0] == [["before", "after"]] * 2


class Normalized(torch.optim.SGD):
    """The step divides by a norm of the gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / parameter.grad.norm()
        return super().step(closure)


class Renamed(torch.optim.LBFGS):
    pass


@pytest.mark.parametrize("kind", [Normalized, Renamed, torch.optim.Adafactor, torch.optim.Muon])
def test_an_optimizer_that_does_not_update_element_by_element_is_refused(kind):
    def body(comm):
        shardproof.torch_optimizer(kind, shardproof.fully_shard(Net(), comm), lr=0.1)

    with pytest.raises(shardproof.Error, match=f"{kind.__name__} needs whole parameters"):
        shardproof.run_threads(3, body)


def named(model, make):
    return make(list(model.named_parameters()))


def one_by_one(model, make):
    first, *others = model.parameters()
    return make([{"params": first, "lr": 0.02}, {"params": iter(others)}])


def added_later(model, make):
    first, *others = model.named_parameters()
    optimizer = make([first])
    optimizer.add_param_group({"params": others, "lr": 0.02})
    return optimizer


@pytest.mark.parametrize("groups", [named, one_by_one, added_later])
def test_groups_are_taken_as_torch_takes_them(tmp_path, groups):
    base = Net()

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        make = lambda params: shardproof.torch_optimizer(torch.optim.AdamW, sharded, params, lr=0.01)  # noqa: E731
        optimizer = groups(model, make)
        train(comm, model, optimizer, 2)
        shardproof.save(str(tmp_path / "saved"), sharded, optimizer)
        train(comm, model, optimizer, 1)
        shardproof.load(str(tmp_path / "saved"), sharded, optimizer)
        train(comm, model, optimizer, 1)
        return sharded.gather_main_parameters()

    own = copy.deepcopy(base)
    optimizer = groups(own, lambda params: torch.optim.AdamW(params, lr=0.01))
    for step in (0, 1, 0):
        total = [torch.zeros_like(parameter) for parameter in own.parameters()]
        for rank in range(2):
            for sum_, gradient in zip(total, torch.autograd.grad(loss_of(own, batch(2 * step + rank)), list(own.parameters()))):
                sum_ += gradient
        for parameter, sum_ in zip(own.parameters(), total):
            parameter.grad = sum_ / 2
        optimizer.step()
    for got in shardproof.run_threads(2, body):
        assert_same_bits(got, dict(own.named_parameters()), groups.__name__)


def test_state_of_other_shards_or_of_a_plain_optimizer_is_refused_and_a_rank_takes_its_own():
    states, base = {}, Net()
    other = torch.optim.SGD(base.parameters(), momentum=0.9)

    def body(comm):
        model = copy.deepcopy(base)
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.01, momentum=0.9)
        train(comm, model, optimizer, 1)
        states[comm.rank] = copy.deepcopy(optimizer.state_dict())
        comm.barrier()
        for state in (states[1 - comm.rank], other.state_dict()):
            with pytest.raises(shardproof.Error, match=f"rank {comm.rank}: load_state_dict takes what state_dict.. of"):
                optimizer.load_state_dict(state)
        values = sharded.gather_main_parameters()
        train(comm, model, optimizer, 1)
        first = sharded.gather_main_parameters()
        optimizer.load_state_dict(states[comm.rank])
        sharded.write_parameters(values)
        train(comm, model, optimizer, 1)
        assert_same_bits(sharded.gather_main_parameters(), first)

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("kind,settings", [(torch.optim.SGD, {}), (torch.optim.Adam, dict(fused=True))])
def test_torchs_scaler_of_the_loss_is_refused(kind, settings):
    def body(comm):
        model = Net()
        optimizer = shardproof.torch_optimizer(kind, shardproof.fully_shard(model, comm), **settings)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, batch(0))).backward()
        scaler.step(optimizer)

    with pytest.raises(shardproof.Error, match="Use shardproof.LossScaler"):
        shardproof.run_threads(2, body)
