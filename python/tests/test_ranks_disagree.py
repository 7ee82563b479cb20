"""Ranks that do not do the same get one error each, which says who has what: no hang, and no wrong sum in silence."""

import os
import re
import shutil
import subprocess
import sys

import disagreeing
import gloo_ranks
import pytest
import torch
from models import Block, Net, batch, loss_of
from peer_ranks import run_ranks
from torch import nn

import shardproof

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.mark.parametrize("name", disagreeing.CASES)
def test_ranks_that_are_threads_are_told_who_has_what(name):
    with pytest.raises(RuntimeError) as refused:
        shardproof.run_threads(2, disagreeing.CASES[name][0])
    disagreeing.check(name, str(refused.value))


MESHES = {"ddp": "dp_shard=2", "zero1": "dp_shard=2", "zero2": "dp_shard=2", "zero3": "dp_shard=2"}
MESHES |= {row: "dp_replicate=2,dp_shard=2" for row in ("hsdp", "hfsdp", "hzero2")}


@pytest.mark.parametrize("gather", ["copied", "side_by_side"])
@pytest.mark.parametrize("strategy", MESHES)
def test_other_numbers_of_microbatches_are_an_error_or_train_what_plain_pytorch_trains(strategy, gather):
    ranks = 2 if "replicate" not in MESHES[strategy] else 4
    for counts in (((1, 2), (2, 1)), ((2, 3), (3, 2))):
        plain = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(plain.weight)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for of_step in counts:
            optimizer.zero_grad()
            for _ in range(sum(of_step) * ranks // 2):
                ((plain(torch.ones(1, 4)) - 1).square().sum() / ranks).backward()
            optimizer.step()

        def body(comm, counts=counts):
            return disagreeing.microbatches(comm, counts, mesh=MESHES[strategy], strategy=strategy, gather=gather)

        try:
            values = shardproof.run_threads(ranks, body)
        except RuntimeError as error:
            assert strategy not in ("ddp", "zero1"), error
            assert re.search(r"rank \d calls .*step 1, reduction .*, rank \d calls .*step 1, reduction ", str(error)), error
            assert "the last" in str(error)
        else:
            assert strategy in ("ddp", "zero1") and values == pytest.approx([plain.weight[0, 0].item()] * ranks, abs=1e-6)


def test_equal_ranks_are_told_nothing_whatever_they_freeze_and_clip():
    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        optimizer = shardproof.adamw(sharded, lr=0.01)
        for step in range(4):
            model.blocks[1].up.weight.requires_grad_(step % 2 == 0)
            optimizer.set_lr_factor(1 / (step + 1))
            for number in sharded.microbatches(range(step % 2 + 1)):
                loss_of(model, batch(10 * step + 2 * number + comm.rank)).backward()
            sharded.clip_gradients(1.0 + step)
            optimizer.step()
        return sharded.step

    assert shardproof.run_threads(3, body) == [4] * 3


OVER_PROCESSES = ["strategy", "order", "microbatches", "later microbatches", "freeze", "rate", "a step more"]


@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_ranks_of_a_process_group_are_told_who_has_what(name):
    run_ranks(gloo_ranks.__file__, 2, ["disagree", name])


@pytest.mark.parametrize("name", disagreeing.APART)
def test_ranks_of_a_process_group_that_run_forwards_alone_are_told_and_end(name):
    said = run_ranks(gloo_ranks.__file__, 2, ["apart", name])
    assert any("has gathered units" in text and "also to evaluate, or where a batch is left out" in text for text in said), said


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
@pytest.mark.parametrize("name", ["strategy", "microbatches", "freeze", "rate"])
def test_ranks_of_mpi_are_told_who_has_what(name):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    done = subprocess.run(
        [*command, os.path.join(HERE, "disagreeing.py"), name], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.count("refused") == 2, done.stdout + done.stderr


def test_switches_go_back_when_a_backward_ends_in_an_exception():
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("the caller's own")

    def body(comm):
        model = Net()
        sharded = shardproof.fully_shard(model, comm, units=[Block])
        optimizer = shardproof.sgd(sharded)
        with pytest.raises(ValueError, match="the caller's own"), sharded.no_sync():
            with sharded.no_sync():
                assert not sharded.native.gradient_sync
            assert not sharded.native.gradient_sync
            Breaks.apply(loss_of(model, batch(0))).backward()
            loss_of(model, batch(0)).backward()
        assert sharded.native.gradient_sync
        sharded.zero_gradients()
        loss_of(model, batch(0)).backward()
        optimizer.step()
        with pytest.raises(ValueError, match="the caller's own"), sharded.no_sync():
            model(Breaks.apply(batch(0)[0].requires_grad_())).sum().backward()  # after the units' own backwards
        assert sharded.native.gradient_sync

    shardproof.run_threads(2, body)


def drawn():
    """Of functions with a generator, without one, and of one that draws inside."""
    ones = torch.ones(3)
    values = [torch.randn(3), torch.randperm(5), torch.randint(2, 9, (4,)), torch.rand_like(ones), torch.empty(20).normal_()]
    return [*Net().state_dict().values(), *values, nn.functional.dropout(ones), nn.functional.gumbel_softmax(ones)]


def test_what_is_drawn_within_seeded_is_each_ranks_own_and_that_of_manual_seed():
    torch.manual_seed(7)
    expected = drawn()
    state = torch.get_rng_state()

    def body(comm):
        made = []
        for _ in range(20):
            with shardproof.seeded(7):
                made.append(drawn())
        return made

    for of_rank in shardproof.run_threads(4, body):
        for values in of_rank:
            assert all(torch.equal(a, b) for a, b in zip(values, expected))
    assert torch.equal(torch.get_rng_state(), state)
    with shardproof.seeded(7):
        assert torch.rand(2, device="meta").is_meta
        own = torch.Generator().manual_seed(1)
        assert torch.equal(torch.rand(2, generator=own), torch.rand(2, generator=torch.Generator().manual_seed(1)))
        with pytest.raises(shardproof.Error, match="native_dropout.* takes no generator"):
            torch.native_dropout(torch.ones(3), 0.5, True)
