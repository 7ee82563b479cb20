"""shardproof.fsdp has the names of FSDP2, and does what they say."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardproof
import shardproof.fsdp
from models import Net, assert_same_bits, batch, loss_of, train_plain
from shardproof.fsdp import fully_shard


def shard(comm, model, **options):
    comms = shardproof.MeshComm(comm, f"dp_shard={comm.size}")
    for block in model.blocks:
        fully_shard(block, mesh=comms, **options)
    return fully_shard(model, mesh=comms, **options)


def test_a_training_loop_in_its_names_has_the_bits_of_plain_pytorch():
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = shardproof.fsdp.AdamW([{"params": model.parameters()}], lr=0.01, foreach=True)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step * comm.size + comm.rank)).backward()
            optimizer.step()
        assert isinstance(model, shardproof.fsdp.FSDPModule) and isinstance(model.blocks[0], shardproof.fsdp.FSDPModule)
        return model._shardproof_handle().gather()

    _, expected = train_plain(base, lambda p: torch.optim.AdamW(p, lr=0.01), steps=3, world=2)
    for got in shardproof.run_threads(2, body):
        assert_same_bits(got, dict(expected.named_parameters()))


def test_the_first_forward_shards_a_model_that_has_no_optimizer_yet():
    def body(comm):
        model = shard(comm, Net())
        with torch.no_grad():
            model(batch(0)[0])
        assert model._shardproof_handle().native.unit_names() == ["", "blocks.0", "blocks.1", "blocks.2"]

    shardproof.run_threads(2, body)


def test_accumulation_by_set_requires_gradient_sync():
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = shardproof.fsdp.SGD(model.parameters(), lr=0.1)
        for k in range(2):
            model.set_requires_gradient_sync(k == 1)
            (loss_of(model, batch(2 * k + comm.rank)) / 2).backward()
        norm = shardproof.fsdp.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        return model._shardproof_handle().gather(), norm.item()

    _, expected = train_plain(base, lambda p: torch.optim.SGD(p, lr=0.1), steps=1, world=2, rounds=2, ranks_first=False)
    for got, norm in shardproof.run_threads(2, body):
        assert_same_bits(got, dict(expected.named_parameters()))
        assert norm > 0


def test_gradients_are_added_until_they_are_dropped():
    base = Net()

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        norms = []
        for drops in (False, True):
            loss_of(model, batch(1)).backward()
            if drops:
                model.zero_grad()
            loss_of(model, batch(0)).backward()
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item())
            model.blocks[0].zero_grad()
            assert model.blocks[0].up.weight.grad is None and model.blocks[1].up.weight.grad is not None
            model.zero_grad()
        return norms

    plain = copy.deepcopy(base)
    loss_of(plain, batch(0)).backward()
    alone = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    loss_of(plain, batch(1)).backward()
    both = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for norms in shardproof.run_threads(2, body):
        assert norms == pytest.approx([both, alone], rel=1e-6)


def test_units_are_gathered_and_freed_by_hand():
    def body(comm):
        model = shard(comm, Net())
        with torch.no_grad():
            model(batch(0)[0])
        block = model.blocks[1]
        block.unshard(async_op=True).wait()
        total = block.up.weight.sum().item()
        block.reshard()
        assert isinstance(block.up.weight, DTensor) and block.up.weight.sum().full_tensor().item() == pytest.approx(total)
        model.set_modules_to_forward_prefetch([model.blocks[0]])
        model.set_reshard_after_forward(False)
        model(batch(0)[0])
        model.zero_grad()
        return total

    a, b = shardproof.run_threads(2, body)
    assert a == b


def test_mixed_precision_policies_are_taken():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def body(comm):
        model = shard(comm, Net(), mp_policy=policy)
        optimizer = shardproof.fsdp.AdamW(model.parameters(), lr=0.01)
        result = model(batch(0)[0])
        result.float().square().mean().backward()
        optimizer.step()
        return result.dtype

    assert shardproof.run_threads(2, body) == [torch.bfloat16] * 2


def test_what_is_not_offered_is_refused():
    def body(comm):
        model = Net()
        with pytest.raises(shardproof.Error, match=r"shard_placement_fn returned Replicate\(\). Let it return None or a Shard"):
            fully_shard(model, mesh=shardproof.MeshComm(comm, "dp_shard=1"), shard_placement_fn=lambda p: Replicate())
        for dim in (2, 7):
            with pytest.raises(shardproof.Error, match=f"has [12] dims, and shard_placement_fn says dim {dim}"):
                fully_shard(Net(), mesh=shardproof.MeshComm(comm, "dp_shard=1"), shard_placement_fn=lambda p: Shard(dim))
        model = Net()
        fully_shard(model.blocks[0], mesh=shardproof.MeshComm(comm, "dp_shard=1"))
        with pytest.raises(shardproof.Error, match="there is no process group"):
            fully_shard(model.blocks[1], mesh="dp_shard=1")
        with pytest.raises(shardproof.Error, match="was given to fully_shard before"):
            fully_shard(model.blocks[0])
        with pytest.raises(AttributeError, match="torch.optim has no class of that name"):
            shardproof.fsdp.NoSuchOptimizer

    shardproof.run_threads(1, body)


def test_groups_of_parameters_keep_their_settings():
    base = Net()

    def groups_of(parameters):
        parameters = list(parameters)
        matrices = [p for p in parameters if p.dim() == 2]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in parameters if p.dim() < 2], "lr": 0.002}]

    def body(comm):
        model = shard(comm, copy.deepcopy(base))
        optimizer = shardproof.fsdp.AdamW(groups_of(model.parameters()), lr=0.01, weight_decay=0.0, fused=False)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(step * comm.size + comm.rank)).backward()
            optimizer.step()
        return model._shardproof_handle().gather()

    make = lambda parameters: torch.optim.AdamW(groups_of(parameters), lr=0.01, weight_decay=0.0)  # noqa: E731
    _, expected = train_plain(base, make, steps=2, world=3)
    for got in shardproof.run_threads(3, body):
        assert_same_bits(got, dict(expected.named_parameters()))


def test_a_unit_without_parameters_has_the_methods_of_a_unit():
    def body(comm):
        comms = shardproof.MeshComm(comm, f"dp_shard={comm.size}")
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
        for part in (*model, model):
            fully_shard(part, mesh=comms)
        optimizer = shardproof.fsdp.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        model[1].unshard()
        model[1].reshard()
        model[1].set_reshard_after_forward(False)
        assert model[1]._shardproof_handle() is model._shardproof_handle()

    shardproof.run_threads(2, body)


def test_what_fsdp2_refuses_or_computes_wrong_has_the_values_of_plain_pytorch():
    """The gradient of a gradient, and divisors of one's own where Gloo has no sum with a factor."""
    base = Net()

    def loss_with_penalty(model, given):
        x, y = given
        x.requires_grad_()
        loss = (model(x) - y).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    def body(comm):
        model = shard(comm, copy.deepcopy(base), reshard_after_forward=False)
        for part in (model, *model.blocks):
            part.set_gradient_divide_factor(1.0)
        for part in (model, *model.blocks):
            part.set_reshard_after_backward(False)
        loss_with_penalty(model, batch(comm.rank)).backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    plain = copy.deepcopy(base)
    (loss_with_penalty(plain, batch(0)) + loss_with_penalty(plain, batch(1))).backward()
    for gradients in shardproof.run_threads(2, body):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_a_step_without_the_gradients_of_weights_that_were_to_come_is_an_error_on_every_rank():
    def body(comm):
        model = shard(comm, Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch(comm.rank)
        x.requires_grad_()
        loss = loss_of(model, (x, y))
        torch.autograd.grad(loss, x, retain_graph=True)
        torch.autograd.backward(loss, inputs=list(model.parameters()), retain_graph=True)  # shards are in no graph
        with pytest.raises(shardproof.Error, match=f"rank {comm.rank}: SGD steps, and none of its parameters has"):
            optimizer.step()
        loss.backward()
        optimizer.step()
        # A model that only guides has no gradients, and the step trains the other one.
        guide = shard(comm, Net())
        torch.autograd.grad(loss_of(guide, (x, y)), x, retain_graph=True)
        loss_of(model, (x.detach(), y)).backward()
        torch.optim.SGD([*model.parameters(), *guide.parameters()], lr=0.1).step()

    shardproof.run_threads(2, body)
