"""Checkpoints go on with the bits of the run that was not interrupted, on other meshes as well; schedules and loss scaling."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

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


class Normed(nn.Module):
    """Batch norms, of few values and of many, and a layer that is left out of sharding."""

    def __init__(self):
        super().__init__()
        self.sharded = nn.Sequential(nn.Linear(5, 64, bias=False), nn.BatchNorm1d(64), nn.Linear(64, 3), nn.BatchNorm1d(3))
        self.outside = nn.Linear(3, 1)

    def forward(self, x):
        return self.outside(self.sharded(x))


@pytest.mark.parametrize("world,strategy", [(2, "zero3"), (3, "ddp")])
@pytest.mark.parametrize("how", ["save", "Manager", "in background", "copied in background"])
def test_what_ranks_have_as_their_own_is_saved_as_rank_0_has_it(tmp_path, world, strategy, how):
    def make(comm, strategy):
        torch.manual_seed(1)
        sharded = shardproof.fully_shard(Normed(), comm, units=[nn.Linear], strategy=strategy, ignored="outside.*")
        return sharded, shardproof.torch_optimizer(torch.optim.AdamW, sharded, sharded.module.parameters(), lr=0.01)

    def own(sharded, optimizer):
        found = {**dict(sharded.module.named_buffers()), **dict(sharded.module.outside.named_parameters())}
        for name, parameter in sharded.module.outside.named_parameters():
            found.update({f"{name} {what}": value for what, value in optimizer.state[parameter].items()})
        return {name: value.detach().clone() for name, value in found.items()}

    def train(comm):
        sharded, optimizer = make(comm, strategy)
        for step in range(2):
            loss_of(sharded.module, batch(step * world + comm.rank)).backward()
            optimizer.step()
        if how == "save":
            shardproof.save(str(tmp_path / "step_2"), sharded, optimizer)
        else:
            manager = shardproof.Manager(
                str(tmp_path), in_background="back" in how, copy_in_background="copied" in how)
            manager.save(sharded, optimizer, 2)
            manager.wait()
        return own(sharded, optimizer), {name: value for name, value in sharded.state_dict().items() if "running" in name}

    def load(comm):
        sharded, optimizer = make(comm, "zero2")
        shardproof.load(str(tmp_path / "step_2"), sharded, optimizer)
        return own(sharded, optimizer)

    (first, state), *others = shardproof.run_threads(world, train)
    assert len(first) == 2 * 3 + 2 + 2 * 3 and not torch.equal(first["weight exp_avg"], others[0][0]["weight exp_avg"])
    assert not torch.equal(first["sharded.3.running_var"], others[0][0]["sharded.3.running_var"])
    for loaded in shardproof.run_threads(2, load):
        assert_same_bits(loaded, first)
        assert_same_bits({name: loaded[name] for name in state}, state)


KINDS = {
    "adamw": lambda sharded: shardproof.adamw(sharded, lr=0.01),
    "sgd": lambda sharded: shardproof.sgd(sharded, lr=0.01, momentum=0.9),
    "torch AdamW": lambda sharded: shardproof.torch_optimizer(torch.optim.AdamW, sharded, lr=0.01, amsgrad=True),
    "torch SGD": lambda sharded: shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("saved_after", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_has_trained_something_else_goes_on_as_a_fresh_one(tmp_path, kind, saved_after):
    folder = str(tmp_path / "saved")

    class Run:
        def __init__(self, comm, seed):
            torch.manual_seed(seed)
            self.rank, self.sharded = comm.rank, shardproof.fully_shard(Net(), comm, units=[Block])
            self.optimizer = KINDS[kind](self.sharded)
            self.ema, self.scaler = shardproof.Ema(self.sharded, decay=0.5), shardproof.LossScaler(initial=8, growth_interval=3)

        def train(self, first, steps):
            for step in range(first, first + steps):
                for microbatch in range(1 + step % 2):
                    if step % 2 == 1:
                        self.sharded.set_last_microbatch(microbatch == 1)
                    self.backward(4 * step + 2 * microbatch + self.rank)
                assert self.scaler.unscale(self.sharded)
                self.optimizer.step()
                self.ema.update()

        def backward(self, index):
            self.scaler.scale(loss_of(self.sharded.module, batch(index))).backward()

    def save(comm):
        run = Run(comm, 1)
        run.train(0, saved_after)
        shardproof.save(folder, run.sharded, run.optimizer, step=saved_after, scaler=run.scaler)

    def go_on(comm, used):
        run = Run(comm, 2)
        if used:
            if "torch" in kind:
                run.optimizer.param_groups[0]["lr"] = 0.04
                schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
            run.train(100, 5)
            if "torch" in kind:
                schedule.step()
            run.sharded.set_last_microbatch(False)
            run.backward(7)  # and was in the middle of a step
        loaded = shardproof.load(folder, run.sharded, run.optimizer, scaler=run.scaler)
        if "torch" in kind:
            schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
            assert schedule.base_lrs == [0.01]
        run.train(loaded["step"], 3)
        counts = {"scale": torch.tensor(run.scaler.value), "step": torch.tensor(run.sharded.step)}
        return {**run.sharded.gather(), **{f"ema.{name}": value for name, value in run.ema.gather().items()}, **counts}

    shardproof.run_threads(2, save)
    fresh = shardproof.run_threads(2, lambda comm: go_on(comm, used=False))[0]
    for used in shardproof.run_threads(2, lambda comm: go_on(comm, used=True)):
        assert_same_bits(used, fresh)


def test_a_scaler_that_the_checkpoint_does_not_know_is_no_part_of_a_load(tmp_path):
    def body(comm):
        sharded, scaler = shardproof.fully_shard(Net(), comm), shardproof.LossScaler(initial=2.0)
        shardproof.save(str(tmp_path / "saved"), sharded)
        before = sharded.gather()
        with torch.no_grad():
            sharded.write_parameters({name: value + 1 for name, value in before.items()})
        changed = sharded.gather()
        with pytest.raises(shardproof.Error, match="nothing was loaded: trainer.scaler is missing"):
            shardproof.load(str(tmp_path / "saved"), sharded, scaler=scaler)
        assert_same_bits(sharded.gather(), changed)
        skipped = shardproof.load(str(tmp_path / "saved"), sharded, scaler=scaler, partial=True)["skipped"]
        assert len(skipped) == 1 and "trainer.scaler" in skipped[0] and scaler.value == 2.0
        assert_same_bits(sharded.gather(), before)

    shardproof.run_threads(2, body)


def test_a_manager_takes_a_link_to_a_folder_for_that_folder(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")

    def train(comm, steps):
        sharded = shardproof.fully_shard(Net(), comm, units=[Block])
        manager = shardproof.Manager(str(tmp_path / "link"), keep=2)
        found = manager.load_latest(sharded)
        for step in range(found["step"] if found else 0, steps):
            manager.save(sharded, None, step + 1)
        return found and found["step"], manager.steps()

    assert shardproof.run_threads(2, lambda comm: train(comm, 3)) == [(None, [2, 3])] * 2
    assert shardproof.run_threads(2, lambda comm: train(comm, 5)) == [(3, [4, 5])] * 2
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["step_4", "step_5"]


SAVES_AND_STAYS = """
import sys, time, shardproof
from torch import nn

def body(comm):
    sharded = shardproof.fully_shard(nn.Linear(2, 1), comm)
    manager = shardproof.Manager(sys.argv[1])
    manager.save(sharded, None, 1)
    print("saved", flush=True)
    time.sleep(600)

shardproof.run_threads(1, body)
"""


def test_one_process_saves_and_others_read_until_it_is_gone(tmp_path):
    def body(comm, step):
        sharded = shardproof.fully_shard(nn.Linear(2, 1), comm)
        manager = shardproof.Manager(str(tmp_path))
        loaded = manager.load_latest(sharded)
        if step:
            manager.save(sharded, None, step)
        return loaded["step"]

    with subprocess.Popen([sys.executable, "-c", SAVES_AND_STAYS, tmp_path], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout.readline() == b"saved\n"
            (tmp_path / ".step_2.saving-0-0").mkdir()
            assert shardproof.run_threads(2, lambda comm: body(comm, None)) == [1, 1]
            assert sorted(path.name for path in tmp_path.iterdir()) == [".step_2.saving-0-0", ".step_owner", "step_1"]
            with pytest.raises(shardproof.Error, match=f"another run saves in .*process {owner.pid} on "):
                shardproof.run_threads(2, lambda comm: body(comm, 2))
        finally:
            owner.kill()
    assert shardproof.run_threads(2, lambda comm: body(comm, 2)) == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


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
