"""The loss whose logits never exist as a whole, beside PyTorch's linear and cross_entropy."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardproof
from fsdp_on_threads import whole
from shardproof.fsdp import fully_shard


def plain_loss(hidden, weight, targets, bias=None, vocab=None, **options):
    logits = F.linear(hidden, weight, bias)[..., :vocab]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def inputs_of(entries, targets_below, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*sizes, generator=generator) for sizes in ((3, 5, 7), (entries, 7), (entries,)))
    targets = torch.randint(0, targets_below, (3, 5), generator=generator)
    return [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)], targets


def results_of(loss_of, tensors, *given, **options):
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    loss = loss_of(tensors[0], tensors[1], *given, tensors[2], **options)
    (loss * 0.3).backward()
    return loss, [t.grad for t in tensors]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("vocab", [0, 11])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_the_loss_and_its_gradients_are_pytorchs(reduction, smoothing, vocab, ignored):
    tensors, targets = inputs_of(13, 11)
    targets[0] = ignored
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    loss, gradients = results_of(shardproof.fused_linear_cross_entropy, tensors, targets, vocab=vocab, **options)
    wanted, plain = results_of(plain_loss, tensors, targets, vocab=vocab or None, **options)
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=0)
    for gradient, of_plain in zip(gradients, plain):
        torch.testing.assert_close(gradient, of_plain, rtol=1e-12, atol=1e-14)


def test_logits_take_as_many_bytes_as_they_may():
    tensors, targets = inputs_of(13, 13)
    for tokens, pieces in ((15, 1), (4, 4), (0.1, 15)):
        with torch.profiler.profile() as profile, torch.no_grad():
            hidden, weight, bias = tensors
            bytes_max = int(tokens * 13 * 8)
            shardproof.fused_linear_cross_entropy(hidden, weight, targets, bias, logits_bytes_max=bytes_max)
        assert sum(event.name == "aten::amax" for event in profile.events()) == pieces


def test_a_vocabulary_that_ranks_share_has_the_loss_of_the_whole_one():
    tensors, targets = inputs_of(13, 13)
    wanted, plain = results_of(plain_loss, tensors, targets)

    def body(comm):
        comms = shardproof.MeshComm(comm, "dp_shard=1,parts=2")
        part = slice(0, 7) if comm.rank == 0 else slice(7, 13)
        own = [tensors[0], tensors[1][part], tensors[2][part]]
        split = {"comms": comms, "axis": "parts", "entries": 13, "logits_bytes_max": 4 * 7 * 8}
        loss, gradients = results_of(shardproof.fused_linear_cross_entropy, own, targets, **split)
        torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=0)
        for gradient, whole_one in zip(gradients, (plain[0], plain[1][part], plain[2][part])):
            torch.testing.assert_close(gradient, whole_one, rtol=1e-12, atol=1e-14)

    shardproof.run_threads(2, body)


class Head(nn.Linear):
    def forward(self, hidden, targets, fused):
        loss = shardproof.fused_linear_cross_entropy if fused else plain_loss
        return loss(hidden, self.weight, targets, self.bias, **({"logits_bytes_max": 600} if fused else {}))


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(17, 6), nn.Linear(6, 6), Head(6, 17, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, fused):
        hidden = torch.tanh(self.body(self.embed(tokens)))
        return self.head(hidden, (tokens * 3 + 1) % 17, fused)


def tokens_of(step, rank):
    return torch.randint(0, 17, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_sharded_model_whose_head_gives_the_loss_trains_as_the_plain_one(tied, strategy):
    base = Model(tied).double()
    plain = copy.deepcopy(base)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        sum(plain(tokens_of(step, rank), fused=False) / 2 for rank in range(2)).backward()
        optimizer.step()

    def body(comm):
        model = copy.deepcopy(base)
        comms = shardproof.MeshComm(comm, "dp_shard=2")
        for part in [model.body, *([] if tied else [model.head]), model]:
            fully_shard(part, mesh=comms, **({"strategy": strategy} if part is model else {}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            model(tokens_of(step, comm.rank), fused=True).backward()
            optimizer.step()
        values = whole(model)
        with pytest.raises(shardproof.Error, match=r"weight is a DTensor.*in the forward of its module"):
            shardproof.fused_linear_cross_entropy(torch.ones(1, 6), model.head.weight, torch.zeros(1, dtype=torch.long))
        return values

    for values in shardproof.run_threads(2, body):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-12, atol=1e-13)


def test_what_is_asked_and_not_there_is_refused():
    (hidden, weight, bias), targets = inputs_of(13, 13)
    with pytest.raises(shardproof.Error, match="reduction must be 'mean' or 'sum', got 'none'"):
        shardproof.fused_linear_cross_entropy(hidden, weight, targets, bias, reduction="none")
    with pytest.raises(shardproof.Error, match="entries=13 without comms"):
        shardproof.fused_linear_cross_entropy(hidden, weight, targets, bias, entries=13)
    with pytest.raises(RuntimeError, match="second gradient"):
        loss = shardproof.fused_linear_cross_entropy(hidden, weight, targets, bias)
        torch.autograd.grad(loss, hidden, create_graph=True)
