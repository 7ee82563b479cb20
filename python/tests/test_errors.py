"""Mistakes end with an error on every rank, which says what to do; nothing hangs."""

import copy
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import shardproof
from shardproof.interruptible import Interruptible
from models import Block, Net, batch, loss_of


def test_an_exception_of_one_rank_ends_all_with_that_exception():
    class Mine(Exception):
        pass

    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        if comm.rank == 1:
            raise Mine("in the body")
        loss_of(model, batch(0)).backward()
        sharded.skip_step()

    with pytest.raises(Mine, match="in the body") as raised:
        shardproof.run_threads(3, body)
    assert "rank 1 of 3" in raised.value.__notes__[0]


def test_an_exception_in_a_forward_or_a_backward_ends_all_ranks():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ZeroDivisionError("in the backward")

    def body(comm):
        model = Net()
        if comm.rank == 1:
            model.blocks[1].register_forward_hook(lambda module, args, result: Broken.apply(result))
        shardproof.fully_shard(model, comm, units=[Block])
        loss_of(model, batch(0)).backward()

    with pytest.raises(ZeroDivisionError, match="in the backward"):
        shardproof.run_threads(2, body)


def test_ranks_that_wait_for_each_other_are_told_so():
    def body(comm):
        if comm.rank == 0:
            comm.barrier()

    with pytest.raises(shardproof.Error, match="deadlock.*|rank 1 has returned"):
        shardproof.run_threads(2, body)


def test_a_step_without_a_backward_is_refused():
    def body(comm):
        sharded = shardproof.fully_shard(Net(), comm, units=[Block])
        for optimizer in (shardproof.sgd(sharded), shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1)):
            with pytest.raises(shardproof.Error, match="gradient"):
                optimizer.step()

    shardproof.run_threads(2, body)


@pytest.mark.parametrize(
    "options,says",
    [
        (dict(units=["blocks"], strategy="zero9"), "zero9"),
        (dict(units=["nothing.*"]), "fits no module of the Net. It has modules of these types: Block, LayerNorm"),
        (dict(units=[nn.Conv2d]), "Conv2d fits no module"),
        (dict(recompute=["nothing.*"]), "recompute: 'nothing.*' fits no module of the Net"),
        (dict(offload_activations=[Block]), "are no units"),
        (dict(mesh="dp_shard=5"), "5"),
        (dict(mesh="dp=2"), "Name that axis dp_shard"),
        (dict(mesh=2), "expected a text such as 'dp_shard=2,tp=2', a dict or a DeviceMesh, got 2"),
        (dict(mesh="dp_shard=2", strategy="hsdp"), "dp_replicate"),
        (dict(ignored="nothing.*"), "The first ones are called inp.weight"),
        (dict(numerics="best"), "numerics must be one of ordered, canonical, fast, got 'best'"),
        (dict(bucket_bytes_max="many"), "bucket_bytes_max cannot be 'many'"),
        (dict(precision=3), "must be a shardproof.Precision"),
    ],
)
def test_wrong_options_say_what_is_wrong(options, says):
    def body(comm):
        shardproof.fully_shard(Net(), comm, **options)

    with pytest.raises(shardproof.Error) as raised:
        shardproof.run_threads(2, body)
    assert says in str(raised.value)


def test_a_unit_that_hides_its_tensors_is_refused():
    class Secret:
        def __init__(self, value):
            self.value = value

    class Hides(Block):
        def forward(self, x):
            return Secret(super().forward(x))

    def body(comm):
        model = nn.Sequential(Hides(5))
        shardproof.fully_shard(model, comm, units=[Hides])
        with pytest.raises(shardproof.Error, match="returned a Secret, in which no tensor was found"):
            model(torch.zeros(2, 5))

    shardproof.run_threads(2, body)


def test_random_operators_in_a_recomputed_unit_are_refused_and_ours_is_replayed():
    class Drops(Block):
        def __init__(self, width, drop):
            super().__init__(width)
            self.drop = drop

        def forward(self, x):
            return self.drop(super().forward(x))

    class Around(nn.Module):
        def __init__(self, drop):
            super().__init__()
            self.inp, self.block = nn.Linear(5, 5), Drops(5, drop)

        def forward(self, x):
            return self.block(self.inp(x))

    def gradient(recompute):
        def body(comm):
            with shardproof.seeded(0):
                model = Around(shardproof.Dropout(0.5))
            sharded = shardproof.fully_shard(model, comm, units=[shardproof.Unit(Drops, recompute=recompute)])
            shardproof.random_stream(5)
            model(torch.ones(4, 5)).square().sum().backward()
            norm = sharded.gradient_norm()
            sharded.skip_step()
            return norm

        return shardproof.run_threads(1, body)

    assert gradient(False) == gradient(True)

    def refused(comm):
        model = Around(nn.Dropout(0.5))
        shardproof.fully_shard(model, comm, units=[shardproof.Unit(Drops, recompute=True)])
        model(torch.ones(4, 5))

    with pytest.raises(RuntimeError, match="draws from LibTorch's generator"):
        shardproof.run_threads(1, refused)


def test_a_nan_names_rank_step_and_parameter():
    def body(comm):
        model = Net()
        shardproof.fully_shard(model, comm, units=[Block])
        x, y = batch(0)
        if comm.rank == 1:
            x[0, 0] = float("nan")
        loss_of(model, (x, y)).backward()

    with pytest.raises(RuntimeError, match="rank 1.*step 1|step 1.*rank 1") as raised:
        shardproof.run_threads(2, body)
    assert "weight" in str(raised.value) or "bias" in str(raised.value)


def test_errors_name_the_calls_of_python():
    def says(call, *words):
        with pytest.raises(RuntimeError) as raised:
            call()
        for word in words:
            assert word in str(raised.value), raised.value
        for word in ("ShardOptions::", "Sharded::", "Optimizer::", "Granularity::"):
            assert word not in str(raised.value), raised.value

    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        says(lambda: model.blocks[0].up.weight.sum(), "in Python call its module", "unit(...).unshard()", "in Python gather()")
        sharded.unit("blocks.0").unshard()
        model.blocks[0].up.weight.sum()
        sharded.unit("blocks.0").reshard()
        assert "blocks.0.up.weight" in sharded.gather() and sharded.parameters()

        loss_of(model, batch(0)).backward()
        says(loss_of(model, batch(1)).backward, "set_last_microbatch(False)", "set_is_last_backward(False)")
        sharded.zero_gradients()
        sharded.set_last_microbatch(False)
        loss_of(model, batch(0)).backward()
        says(lambda: sharded.clip_gradients(1.0), "set_last_microbatch(true)", "in Python True")
        sharded.zero_gradients()

        on_meta = Net().to("meta")
        says(lambda: shardproof.fully_shard(on_meta, comm), "Give fully_shard the option initialize")
        sharded = shardproof.fully_shard(Net(), comm, units=[Block])
        averages = shardproof.Ema(sharded)
        says(lambda: shardproof.Ema(sharded), "Give these another name")
        assert averages.pieces()

    shardproof.run_threads(2, body)


def test_sharding_twice_is_refused_and_parameters_of_strangers_too():
    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        with pytest.raises(shardproof.Error, match="sharded already"):
            shardproof.fully_shard(model, comm)
        with pytest.raises(shardproof.Error, match="is not one of the sharded model's"):
            shardproof.torch_optimizer(torch.optim.SGD, sharded, Net().parameters(), lr=0.1)
        with pytest.raises(shardproof.Error, match="needs whole parameters"):
            shardproof.torch_optimizer(torch.optim.LBFGS, sharded)
        return copy.copy(sharded) is not None

    assert shardproof.run_threads(2, body) == [True, True]


def test_without_ranks_it_says_how_to_get_them():
    with pytest.raises(shardproof.Error, match="torchrun.*run_threads"):
        shardproof.fully_shard(Net())


def test_worlds_in_several_threads_do_not_disturb_each_other():
    outcomes = []

    def run(seed):
        def body(comm):
            torch_model = Net()
            sharded = shardproof.fully_shard(torch_model, comm, units=[Block])
            loss_of(torch_model, batch(seed + comm.rank)).backward()
            sharded.skip_step()
            return comm.rank

        outcomes.append(shardproof.run_threads(2, body))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [[0, 1]] * 3


def test_an_interrupt_ends_all_ranks_before_the_caller_hears_of_it(tmp_path):
    script = tmp_path / "forever.py"
    script.write_text("""
import signal
import sys
import time
import shardproof

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us without

def body(comm):
    if comm.rank == 0:
        print("running", flush=True)
    try:
        while True:
            comm.barrier()
    finally:
        time.sleep(0.5)

def is_in_body(frame):
    return frame is not None and (frame.f_code is body.__code__ or is_in_body(frame.f_back))

try:
    shardproof.run_threads(3, body)
except KeyboardInterrupt:
    print(sum(map(is_in_body, sys._current_frames().values())), "ranks go on", flush=True)
    raise
""")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=300)
    finally:
        process.kill()
    assert printed == "0 ranks go on\n"
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in said


class Stopped(Exception):
    pass


def test_what_a_signals_handler_raises_ends_the_parts_that_run_and_those_that_begin_later():
    outcomes = []
    interruptible = Interruptible()

    def part(seconds):
        try:
            with interruptible.part():
                for _ in range(int(seconds / 0.01)):
                    time.sleep(0.01)
                outcomes.append("ran")
        except KeyboardInterrupt:
            outcomes.append("interrupted")

    def function():
        signal.raise_signal(signal.SIGUSR1)  # Python calls its handler in the main thread, which waits
        part(300)
        part(0)

    def stop(*_):
        raise Stopped

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(Stopped):
            interruptible.run(function, name="function")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert outcomes == ["interrupted"] * 2
