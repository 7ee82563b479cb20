"""Checkpoints go on with the bits of the run that was not interrupted, on other meshes as well; schedules and loss scaling."""

import copy

import pytest
import torch

import shardproof
from models import Block, Net, assert_same_bits, batch, loss_of


def run(comm, model, steps, first=0, strategy="zero3", restore=None, save=None, make=shardproof.adamw):
    own = copy.deepcopy(model)
    sharded = shardproof.fully_shard(own, comm, strategy=strategy, units=[Block])
    optimizer = make(sharded, lr=0.01)
    if restore:
        loaded = shardproof.load(restore, sharded, optimizer)
        assert loaded["step"] == first and loaded["values"] == {"tokens": 17, "name": "run", "list": [1, (2.5, None)]}
    for step in range(first, first + steps):
        optimizer.set_lr_factor(shardproof.warmup_cosine(step, 2, 10))
        loss_of(own, batch(step * comm.size + comm.rank)).backward()
        optimizer.step()
    if save:
        shardproof.save(
            save, sharded, optimizer, step=first + steps, values={"tokens": 17, "name": "run", "list": [1, (2.5, None)]}
        )
    return sharded.gather()


def test_a_run_that_is_saved_and_loaded_goes_on_with_the_same_bits(tmp_path):
    model = Net()
    whole = shardproof.run_threads(2, lambda comm: run(comm, model, 4))[0]
    saved = str(tmp_path / "saved")
    shardproof.run_threads(2, lambda comm: run(comm, model, 2, save=saved))
    for resumed in shardproof.run_threads(2, lambda comm: run(comm, model, 2, first=2, restore=saved)):
        assert_same_bits(resumed, whole)


@pytest.mark.parametrize("world,strategy", [(3, "zero3"), (1, "ddp"), (4, "zero1")])
def test_another_mesh_and_strategy_load_the_same_values(tmp_path, world, strategy):
    model, saved = Net(), str(tmp_path / "saved")
    before = shardproof.run_threads(2, lambda comm: run(comm, model, 2, save=saved))[0]
    for after in shardproof.run_threads(world, lambda comm: run(comm, model, 0, first=2, restore=saved, strategy=strategy)):
        assert_same_bits(after, before)


def test_what_does_not_fit_is_an_error_on_every_rank_or_is_skipped(tmp_path):
    saved = str(tmp_path / "saved")
    shardproof.run_threads(2, lambda comm: run(comm, Net(), 1, save=saved))

    def body(comm):
        sharded = shardproof.fully_shard(Net(blocks=4), comm, units=[Block])
        with pytest.raises(shardproof.Error, match="blocks.3"):
            shardproof.load(saved, sharded)
        return shardproof.load(saved, sharded, partial=True)["skipped"]

    for skipped in shardproof.run_threads(2, body):
        assert any("blocks.3.up.weight" in line for line in skipped)


@pytest.mark.parametrize("copies", [False, True])
def test_a_manager_keeps_the_last_ones_and_loads_the_latest(tmp_path, copies):
    def body(comm):
        sharded = shardproof.fully_shard(Net(), comm, units=[Block])
        optimizer = shardproof.sgd(sharded)
        manager = shardproof.Manager(str(tmp_path), keep=2, in_background=True, copy_in_background=copies)
        assert manager.load_latest(sharded, optimizer) is None
        for step in range(1, 5):
            loss_of(sharded.module, batch(comm.rank)).backward()
            optimizer.step()
            manager.save(sharded, optimizer, step, of_rank={"rank": comm.rank})
        manager.wait()
        comm.barrier()
        loaded = manager.load_latest(sharded, optimizer)
        assert loaded["step"] == 4 and loaded["of_rank"] == {"rank": comm.rank}
        return manager.steps(), manager.latest()

    assert shardproof.run_threads(2, body) == [([3, 4], 4)] * 2


def test_a_value_of_an_unknown_kind_is_refused_by_name(tmp_path):
    def body(comm):
        sharded = shardproof.fully_shard(Net(), comm)
        with pytest.raises(shardproof.Error, match="'bad' holds a set"):
            shardproof.save(str(tmp_path / "x"), sharded, values={"bad": {1}})

    shardproof.run_threads(2, body)


def test_an_overflow_skips_the_step_everywhere_and_lowers_the_scale():
    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block], check_gradients=False)
        optimizer, scaler = shardproof.sgd(sharded), shardproof.LossScaler(initial=4.0)
        before = sharded.gather()
        scale = float("inf") if comm.rank == 1 else 1.0
        scaler.scale(loss_of(model, batch(0)) * scale).backward()
        assert not scaler.unscale(sharded) and scaler.value == 2.0
        assert_same_bits(sharded.gather(), before)
        scaler.scale(loss_of(model, batch(0))).backward()
        assert scaler.unscale(sharded)
        optimizer.step()
        other = shardproof.LossScaler()
        other.load_state_dict(scaler.state_dict())
        return other.value

    assert shardproof.run_threads(2, body) == [2.0, 2.0]


def test_schedulers_of_torch_take_an_optimizer_on_shards():
    def body(comm):
        sharded = shardproof.fully_shard(Net(), comm, units=[Block])
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        rates = []
        for _ in range(3):
            loss_of(sharded.module, batch(comm.rank)).backward()
            optimizer.step()
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
        return rates

    assert shardproof.run_threads(2, body) == [[0.5, 0.25, 0.125]] * 2


def test_an_optimizer_of_torch_on_the_models_own_parameters_is_refused():
    def body(comm):
        model = Net()
        shardproof.fully_shard(model, comm, units=[Block])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, batch(comm.rank)).backward()
        with pytest.raises(shardproof.Error, match="so it would train nothing. Make it by shardproof.torch_optimizer"):
            optimizer.step()

    shardproof.run_threads(2, body)


def test_groups_have_rates_of_their_own():
    def body(comm):
        sharded = shardproof.fully_shard(Net(), comm, units=[Block])
        optimizer = shardproof.adamw(
            sharded, lr=0.5, groups=[{"takes": "out.*", "lr_factor": 0.1}], decay_norms_and_biases=False
        )
        return [(group["lr"], group["weight_decay"]) for group in optimizer.groups()]

    rates = shardproof.run_threads(1, body)[0]
    assert [(round(a, 6), round(b, 6)) for a, b in rates] == [(0.05, 0.01), (0.5, 0.0), (0.5, 0.01)]


def test_muon_updates_matrices_that_lie_whole_on_a_rank():
    model = Net()

    def body(comm):
        own = copy.deepcopy(model)
        sharded = shardproof.fully_shard(own, comm, units=[Block], granularity="tensor")
        optimizer = shardproof.muon(sharded, lr=0.02)
        loss_of(own, batch(0)).backward()
        optimizer.step()
        return sharded.gather()

    one = shardproof.run_threads(1, body)[0]
    assert not torch.equal(one["inp.weight"], model.inp.weight)
    for many in shardproof.run_threads(2, body):
        for name, value in one.items():
            assert torch.allclose(many[name], value, atol=1e-6)
