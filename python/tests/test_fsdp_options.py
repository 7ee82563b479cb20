"""What FSDP2's names take beside their defaults has the effect that PyTorch's documentation says."""

import copy

import pytest
import torch
from torch import nn

import shardproof
import shardproof.fsdp
from models import Net, assert_same_bits, batch, loss_of, train_plain
from shardproof.fsdp import fully_shard


def shard(comm, model, of_blocks=None, **options):
    comms = shardproof.MeshComm(comm, f"dp_shard={comm.size}")
    for block in model.blocks:
        fully_shard(block, mesh=comms, **(of_blocks or {}))
    return fully_shard(model, mesh=comms, **options)


def whole(model):
    return [unit.is_unsharded for unit in model._shardproof_handle().units()]


def test_what_fsdp2s_fully_shard_takes_has_its_effect():
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    base = Net()
    x = batch(0)[0]

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        model(x)
        plain = whole(model)
        model = shard(comm, copy.deepcopy(base), of_blocks={"reshard_after_forward": False}, reshard_after_forward=True)
        model(x)
        turned = whole(model)
        model = copy.deepcopy(base)
        shard(comm, model, ignored_params={model.out.bias})
        optimizer = shardproof.fsdp.SGD(model.parameters(), lr=0.1)
        loss_of(model, batch(comm.rank)).backward()
        own = model.out.bias.grad.clone()
        optimizer.step()
        host = []
        for policy in (None, OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
            model = shard(comm, copy.deepcopy(base), offload_policy=policy)
            sharded = shardproof.fsdp.shard_now(model)
            host.append(sum(now for now, _ in sharded.host_memory().values()) > 0)
        return plain, turned, own, host

    for rank, (plain, turned, own, host) in enumerate(shardproof.run_threads(2, body)):
        assert plain == [True, False, False, False] and turned == [False, True, True, True]
        assert host == [False, False, True, True]
        other = copy.deepcopy(base)
        loss_of(other, batch(rank)).backward()
        assert torch.equal(own, other.out.bias.grad)  # of this rank alone


@pytest.mark.parametrize("recurse", [True, False])
def test_what_stays_whole_is_set_for_one_module_or_for_all_below_it(recurse):
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = shardproof.fsdp.SGD(model.parameters(), lr=0.1)
        model.set_reshard_after_forward(False, recurse=recurse)
        model.set_reshard_after_backward(False, recurse=recurse)
        model.blocks[1].set_reshard_after_forward(True)
        seen = []
        for step in range(2):
            value = loss_of(model, batch(2 * step + comm.rank))
            seen.append(whole(model))
            value.backward()
            seen.append(whole(model))
            optimizer.step()
            optimizer.zero_grad()
        return seen, model._shardproof_handle().gather()

    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1), steps=2, world=2)
    for seen, values in shardproof.run_threads(2, body):
        assert seen[0] == seen[2] == [True, recurse, False, recurse]
        assert seen[1] == seen[3] == [True, recurse, recurse, recurse]
        assert_same_bits(values, dict(expected.named_parameters()))


@pytest.mark.parametrize("recurse", [True, False])
def test_gradients_of_one_unit_wait_and_come_whole_at_the_end(recurse):
    """Where one waits, a rank adds its microbatches before ranks are added; elsewhere it is the other way round."""
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = shardproof.fsdp.SGD(model.parameters(), lr=0.1)
        model.blocks[1].set_requires_gradient_sync(False, recurse=recurse)
        for k in range(3):
            if k == 2:
                model.blocks[1].set_requires_gradient_sync(True, recurse=recurse)
            (loss_of(model, batch(2 * k + comm.rank)) / 3).backward()
        optimizer.step()
        return model._shardproof_handle().gather()

    expected = {}
    for ranks_first in (True, False):
        _, plain = train_plain(
            base, lambda p: torch.optim.SGD(p, lr=0.1), steps=1, world=2, rounds=3, ranks_first=ranks_first
        )
        values = dict(plain.named_parameters())
        waits = [name for name in values if name.startswith("blocks.1.")]
        assert ranks_first or any(not torch.equal(values[name], expected[name]) for name in waits)
        expected.update(values if ranks_first else {name: values[name] for name in waits})
    for values in shardproof.run_threads(2, body):
        assert_same_bits(values, expected)


def test_gathers_ahead_and_those_that_a_backward_needs_not_change_no_bit():
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = shardproof.fsdp.AdamW(model.parameters(), lr=0.01, fused=False)
        model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
        seen = []
        model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(is_under_way(model.blocks[1])))
        model.blocks[2].register_full_backward_hook(lambda *args: seen.append(is_under_way(model.blocks[0])))
        for step in range(2):
            loss_of(model, batch(2 * step + comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen, model._shardproof_handle().gather()

    def is_under_way(block):
        return block._units(recurse=False)[0].is_unsharded

    _, expected = train_plain(base, lambda p: torch.optim.AdamW(p, lr=0.01), steps=2, world=2)
    for _, values in shardproof.run_threads(2, body):
        assert_same_bits(values, dict(expected.named_parameters()))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf"), "inf"])
def test_clipping_takes_each_type_of_norm(norm_type):
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = shardproof.fsdp.SGD(model.parameters(), lr=0.1)
        loss_of(model, batch(0)).backward()
        norm = shardproof.fsdp.clip_grad_norm_(model.parameters(), 0.25, norm_type=norm_type)
        optimizer.step()
        return norm.item(), model._shardproof_handle().gather()

    plain = copy.deepcopy(base)
    loss_of(plain, batch(0)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.25, norm_type=float(norm_type)).item()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for norm, values in shardproof.run_threads(2, body):
        assert norm == pytest.approx(expected, rel=1e-6)
        for name, value in plain.named_parameters():
            assert torch.allclose(values[name], value, rtol=1e-6, atol=1e-7), name
