"""Parameters that are cut between granules (`granule` of fully_shard): places of cuts, values, state and mistakes."""

import copy

import pytest
import torch

import shardproof
from models import Block, Net, assert_same_bits, batch, loss_of, train_plain


def row(name, part):
    assert part.is_meta  # it has a shape and no values
    return part.shape[1] if part.dim() == 2 else part.numel()


def options(granule):
    return {"units": [Block], "alignment_bytes": 64, "granule": granule}


@pytest.mark.parametrize("granule", [5, 32, row])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_rank_holds_whole_granules_and_trains_as_without_them(granule, strategy):
    base = Net()

    def body(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, strategy=strategy, **options(granule))
        size_of = {
            name: granule if isinstance(granule, int) else granule(name, p.detach().to("meta"))
            for name, p in base.named_parameters()
        }
        for piece in sharded.main_parameters():
            size = size_of[piece.name]
            end = piece.begin + piece.data.numel()
            assert piece.begin % size == 0 and (end % size == 0 or end == torch.Size(piece.shape).numel()), piece.name
        optimizer = shardproof.torch_optimizer(torch.optim.SGD, sharded, lr=0.1, momentum=0.9)
        for step in range(3):
            for micro in sharded.microbatches(range(2)):
                (loss_of(sharded, batch((step * 2 + micro) * comm.size + comm.rank)) / 2).backward()
            sharded.clip_gradients(0.5)
            optimizer.step()
        return sharded.gather()

    plan = dict(steps=3, world=3, rounds=2, norm_max=0.5, ranks_first=strategy != "zero1")
    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **plan)
    for values in shardproof.run_threads(3, body):
        assert_same_bits(values, dict(expected.named_parameters()))


def test_checkpoints_and_averages_go_between_granules_rows_and_whole_tensors(tmp_path):
    base = Net()

    def begun(comm, given):
        sharded = shardproof.fully_shard(copy.deepcopy(base), comm, units=[Block], **given)
        return sharded, shardproof.adamw(sharded, lr=0.01), shardproof.Ema(sharded, decay=0.5)

    def trained(comm, sharded, optimizer, ema, steps):
        for step in steps:
            loss_of(sharded, batch(step)).backward()  # the same on all ranks, so on any number of them
            optimizer.step()
            ema.update()
        return {**sharded.gather(), **{"ema." + name: value for name, value in ema.gather().items()}}

    def saved(comm):
        sharded, optimizer, ema = begun(comm, {"granule": row})
        trained(comm, sharded, optimizer, ema, range(2))
        shardproof.save(str(tmp_path / "saved"), sharded, optimizer, step=2)
        return trained(comm, sharded, optimizer, ema, range(2, 4))

    expected = shardproof.run_threads(2, saved)[0]

    def resumed(comm, given):
        sharded, optimizer, ema = begun(comm, given)
        shardproof.load(str(tmp_path / "saved"), sharded, optimizer)
        return trained(comm, sharded, optimizer, ema, range(2, 4))

    for given in ({"granule": 32}, {"granularity": "row"}, {"granularity": "tensor"}, {"granule": row, "strategy": "zero1"}):
        for world in (2, 4):
            for values in shardproof.run_threads(world, lambda comm, given=given: resumed(comm, given)):
                assert_same_bits(values, expected, f"{given} on {world}")


def test_adapters_of_low_rank_train_in_granules():
    base = Net()

    def body(comm, **given):
        model = copy.deepcopy(base)
        shardproof.add_lora(model, "*", rank=2, seed=3)
        sharded = shardproof.fully_shard(model, comm, units=[Block], **given)
        optimizer = shardproof.adamw(sharded, lr=0.1)
        for step in range(2):
            loss_of(sharded, batch(step)).backward()
            optimizer.step()
        return sharded.gather()

    expected = shardproof.run_threads(1, body)[0]
    assert not torch.equal(expected["inp.lora_B.weight"], torch.zeros(12, 2))
    for granule in (5, row):
        for values in shardproof.run_threads(4, lambda comm, granule=granule: body(comm, granule=granule, alignment_bytes=64)):
            assert_same_bits(values, expected)


def test_answers_that_are_no_granules_are_errors_on_every_rank():
    def body(comm):
        answers = [
            (0, "says 0 elements for parameter inp.weight"),
            ("one", "granule returned 'one' for parameter inp.weight. Let it return a number of elements"),
            (2 + comm.rank, "parameter inp.weight"),
        ]
        for says, message in answers:
            with pytest.raises(shardproof.Error, match=message):
                shardproof.fully_shard(Net(), comm, granule=lambda *_, says=says: says)
        for given in ({"granule": 2}, {"granule": row}):
            with pytest.raises(shardproof.Error, match="granularity `row` cuts them elsewhere"):
                shardproof.fully_shard(Net(), comm, granularity="row", **given)
        with pytest.raises(shardproof.Error, match="granule must be at least 1, got 0"):
            shardproof.fully_shard(Net(), comm, granule=0)

    shardproof.run_threads(2, body)
