"""Tensor and sequence parallelism of plain modules."""

import copy

import pytest
import torch
from torch import nn

import shardproof
from shardproof import ColumnParallel, RowParallel, SequenceParallel, VocabParallel


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab=12, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLAN = {
    "embed": VocabParallel(),
    "layers.*.up": ColumnParallel(),
    "layers.*.down": RowParallel(),
    "head": ColumnParallel(gather_output=True),
    "layers.*.norm": SequenceParallel(),
    "norm": SequenceParallel(),
}


def tokens_of(group, step):
    return torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(10 * step + group))


def loss_of(logits, tokens):
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def train(model, world, mesh, steps=3, sequence_dim=None, plan=PLAN, strategy="zero3", loss=None, overlap_pieces=1):
    def body(comm):
        own = copy.deepcopy(model)
        comms = shardproof.MeshComm(comm, mesh)
        shardproof.parallelize(own, comms, plan=plan, sequence_dim=sequence_dim, overlap_pieces=overlap_pieces)
        sharded = shardproof.fully_shard(own, comms, units=[Layer], strategy=strategy)
        optimizer = shardproof.adamw(sharded, lr=0.01)
        losses = []
        for step in range(steps):
            tokens = tokens_of(comms.coordinate("dp_shard"), step)
            value = loss(own, tokens, comms) if loss else loss_of(own(tokens), tokens)
            value.backward()
            sharded.clip_gradients(1.0)
            optimizer.step()
            losses.append(value.item())
        return losses, sharded.gather()

    return shardproof.run_threads(world, body)


@pytest.mark.parametrize("overlap_pieces", [1, 3])
@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_a_model_that_is_cut_and_sharded_trains_what_the_whole_one_trains(sequence_dim, overlap_pieces):
    model = Model()
    plan = PLAN if sequence_dim is not None else {k: v for k, v in PLAN.items() if not isinstance(v, SequenceParallel)}
    whole = train(model, 2, "dp_shard=2,tp=1", plan={"norm": SequenceParallel()})
    cut = train(model, 4, "dp_shard=2,tp=2", sequence_dim=sequence_dim, plan=plan, overlap_pieces=overlap_pieces)
    for rank, (losses, parameters) in enumerate(cut):
        expected_losses, expected = whole[rank // 2]
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        for name, value in expected.items():
            assert parameters[name].shape == value.shape
            assert torch.allclose(parameters[name], value, rtol=1e-3, atol=2e-4), name


def test_the_loss_of_logits_that_are_cut_is_that_of_whole_ones():
    model = Model()
    plan = {**{k: v for k, v in PLAN.items() if not isinstance(v, SequenceParallel)}, "head": ColumnParallel()}

    def parallel_loss(own, tokens, comms):
        return shardproof.vocab_parallel_cross_entropy(own(tokens), tokens.roll(1, 1), 12, comms)

    cut = train(model, 2, "dp_shard=1,tp=2", plan=plan, loss=parallel_loss)
    whole = train(model, 1, "dp_shard=1,tp=1", plan={"norm": SequenceParallel()})
    assert cut[0][0] == pytest.approx(whole[0][0], rel=1e-4)


def test_a_cut_model_holds_its_part_and_gathers_the_whole():
    model = Model()

    def body(comm):
        own = copy.deepcopy(model)
        comms = shardproof.MeshComm(comm, "tp=2")
        parallel = shardproof.parallelize(own, comms, plan={"layers.*.up": ColumnParallel(), "layers.*.down": RowParallel()})
        assert own.layers[0].up.weight.shape == (16, 8) and own.layers[0].down.weight.shape == (8, 16)
        assert {name for name, _, _ in parallel.parameters()} == {
            f"layers.{i}.{part}" for i in (0, 1) for part in ("up.weight", "up.bias", "down.weight")
        }
        return parallel.gather()

    for whole in shardproof.run_threads(2, body):
        for name, value in model.named_parameters():
            assert torch.equal(whole[name], value), name


@pytest.mark.parametrize(
    "plan,says",
    [
        ({"layers.*.norm": ColumnParallel()}, "needs a torch::nn::Linear, and module 'layers.0.norm' is LayerNorm"),
        ({"nothing": ColumnParallel()}, "pattern 'nothing' fits no module"),
        ({"head": "column"}, "a plan holds styles"),
    ],
)
def test_wrong_plans_say_what_is_wrong(plan, says):
    def body(comm):
        shardproof.parallelize(Model(), comm, "tp=2", plan)

    with pytest.raises(shardproof.Error) as raised:
        shardproof.run_threads(2, body)
    assert says in str(raised.value)


def test_a_mesh_with_an_axis_that_nobody_cut_is_refused():
    def body(comm):
        shardproof.fully_shard(Model(), comm, mesh="dp_shard=1,tp=2")

    with pytest.raises(shardproof.Error, match="no module was cut along it. Call parallelize"):
        shardproof.run_threads(2, body)


def test_parallelize_comes_before_fully_shard():
    def body(comm):
        model = Model()
        shardproof.fully_shard(model, comm)
        with pytest.raises(shardproof.Error, match="Call parallelize before"):
            shardproof.parallelize(model, comm, "tp=2", PLAN)

    shardproof.run_threads(2, body)


@pytest.mark.parametrize("mesh", ["dp_replicate=2,dp_shard=2,tp=2", "tp=2,dp_shard=2,dp_replicate=2"])
def test_ranks_along_tp_read_the_same_samples_wherever_the_axis_stands(mesh):
    def body(comm):
        comms = shardproof.MeshComm(comm, mesh)
        expected = 2 * comms.coordinate("dp_replicate") + comms.coordinate("dp_shard")
        assert comms.data_rank == expected and comms.data_size == 4
        return comms.data_rank

    assert sorted(shardproof.run_threads(8, body)) == [0, 0, 1, 1, 2, 2, 3, 3]
