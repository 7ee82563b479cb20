"""Experts that ranks share: of models of transformers, and of a module of one's own."""

import copy

import pytest
import torch
import transformers
from torch import nn

import shardproof
from shardproof import ExpertParallel


class Experts(nn.Module):
    """A matrix and a bias for each expert."""

    def __init__(self, count, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width) / width)
        self.bias = nn.Parameter(torch.randn(count, width))

    def forward(self, x, experts, weights):
        y = torch.zeros_like(x)
        for expert in range(len(self.weight)):
            tokens, places = torch.where(experts == expert)
            given = torch.tanh(nn.functional.linear(x[tokens], self.weight[expert], self.bias[expert]))
            y = y.index_add(0, tokens, given * weights[tokens, places, None])
        return y


class Own(nn.Module):
    def __init__(self, count=5, width=6):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.router = nn.Linear(width, count)
        self.experts = Experts(count, width)
        self.head = nn.Linear(width, 12)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        weights, experts = self.router(x).softmax(-1).topk(2)
        return self.head(x + self.experts(x, experts, weights)).unflatten(0, tokens.shape)


class Dropping(Own):
    """Choices that weigh little go nowhere, and with them some tokens."""

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        weights, experts = self.router(x).softmax(-1).topk(2)
        experts = experts.masked_fill(weights < 0.3, -1)
        return self.head(x + self.experts(x, experts, weights)).unflatten(0, tokens.shape)


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=5, num_experts_per_tok=2, pad_token_id=None,
        )
    )  # fmt: skip


def qwen3_moe():
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=12, hidden_size=8, intermediate_size=6, moe_intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_experts=6, num_experts_per_tok=3,
            norm_topk_prob=True, mlp_only_layers=[0],
        )
    )  # fmt: skip


OF_TRANSFORMERS = "model.layers.*.mlp.experts"
MODELS = {
    "own": (Own, "experts"), "dropping": (Dropping, "experts"),
    "mixtral": (mixtral, OF_TRANSFORMERS), "qwen3": (qwen3_moe, OF_TRANSFORMERS),
}  # fmt: skip


def loss_of(model, tokens):
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def tokens_of(rank, step):
    return torch.randint(0, 12, (1, 3 + rank % 2), generator=torch.Generator().manual_seed(10 * step + rank))


def plain(model, world, steps):
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    norms = []
    for step in range(steps):
        for rank in range(world):
            (loss_of(own, tokens_of(rank, step)) / world).backward()
        norms.append(nn.utils.clip_grad_norm_(own.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(own.named_parameters())


def three_steps(own, sharded, data_rank):
    optimizer = shardproof.adamw(sharded, lr=0.01, weight_decay=0.01)
    norms = []
    for step in range(3):
        loss_of(own, tokens_of(data_rank, step)).backward()
        norms.append(sharded.clip_gradients(0.5))
        optimizer.step()
    return norms, sharded.gather()


def are_as_expected(results, norms, expected):
    for found, parameters in results:
        assert found == pytest.approx(norms, rel=1e-4)
        for name, value in expected.items():
            assert torch.allclose(parameters[name], value, rtol=1e-3, atol=2e-4), name


@pytest.mark.parametrize("sharing", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("kind", MODELS)
def test_experts_that_ranks_share_train_as_the_whole_model_does(kind, strategy, sharing):
    torch.manual_seed(3)
    build, pattern = MODELS[kind]
    model = build().train()
    norms, expected = plain(model, 4, 3)

    def body(comm):
        own = copy.deepcopy(model)
        comms = shardproof.MeshComm(comm, "dp_shard=4")
        parallel = shardproof.parallelize(own, comms, plan={pattern: ExpertParallel(sharing)})
        assert bool(parallel.parameters()) == (sharing > 1)
        units = [Experts] if pattern == "experts" else None
        sharded = shardproof.fully_shard(own, comms, units=units, strategy=strategy)
        return three_steps(own, sharded, comms.rank)

    are_as_expected(shardproof.run_threads(4, body), norms, expected)


@pytest.mark.parametrize("sharing", [1, 2])
def test_experts_that_are_cut_inside_train_as_the_whole_model_does(sharing):
    torch.manual_seed(3)
    build, pattern = MODELS["mixtral"]
    model = build().train()
    norms, expected = plain(model, 2, 3)

    def body(comm):
        own = copy.deepcopy(model)
        comms = shardproof.MeshComm(comm, "dp_shard=2,tp=2")
        shardproof.parallelize(own, comms, plan={pattern: ExpertParallel(sharing, cut_inside=True)})
        slices = [parameter for name, parameter in own.named_parameters() if name.endswith("experts.down_proj")]
        assert {parameter.shape[1:] for parameter in slices} == {(8, 4)}
        sharded = shardproof.fully_shard(own, comms, strategy="zero3")
        return three_steps(own, sharded, comms.rank // 2)

    are_as_expected(shardproof.run_threads(4, body), norms, expected)


def test_a_module_whose_experts_cannot_be_cut_inside_is_refused_by_name():
    def body(comm):
        comms = shardproof.MeshComm(comm, "dp_shard=1,tp=2")
        with pytest.raises(shardproof.Error, match="gate_up_proj.*'experts' has weight"):
            shardproof.parallelize(Own(), comms, plan={"experts": ExpertParallel(cut_inside=True)})

    shardproof.run_threads(2, body)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 5)
        self.experts = Experts(5, 6)

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, experts = self.router(rows).softmax(-1).topk(2)
        return x + self.experts(rows, experts, weights).view_as(x)


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_a_layer_of_experts_is_whole_beside_tensor_parallelism(sequence_dim):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(12, 6), Layer(), nn.LayerNorm(6), nn.Linear(6, 12))
    own = copy.deepcopy(model)
    for rank in range(2):
        (loss_of(own, tokens_of(rank, 0)) / 2).backward()
    plan = {
        "0": shardproof.VocabParallel(), "1": shardproof.WholeSequence(), "1.experts": ExpertParallel(2),
        "2": shardproof.SequenceParallel(), "3": shardproof.ColumnParallel(gather_output=True),
    }  # fmt: skip

    def body(comm):
        sharded_model = copy.deepcopy(model)
        comms = shardproof.MeshComm(comm, "dp_shard=2,tp=2")
        parallel = shardproof.parallelize(sharded_model, comms, plan=plan, sequence_dim=sequence_dim)
        sharded = shardproof.fully_shard(sharded_model, comms)
        loss_of(sharded_model, tokens_of(comms.rank // 2, 0)).backward()
        assert parallel.parameters()
        optimizer = shardproof.sgd(sharded, lr=1.0)
        optimizer.step()
        return sharded.gather()

    for parameters in shardproof.run_threads(4, body):
        for name, value in own.named_parameters():
            assert torch.allclose(parameters[name], (value - value.grad).detach(), rtol=1e-4, atol=1e-5), name


def test_a_rank_whose_experts_get_no_rows_takes_part_in_the_backward():
    """Also where its inputs have no graph."""

    def body(comm, trains):
        torch.manual_seed(1)
        model = nn.ModuleDict({"experts": Experts(2, 3)})
        comms = shardproof.MeshComm(comm, "dp_shard=2")
        shardproof.parallelize(model, comms, plan={"experts": ExpertParallel(2)})
        x = torch.ones(2, 3, requires_grad=trains)
        model["experts"](x, torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)).sum().backward()
        return x.grad, model["experts"].weight.grad

    (first, gradient), (second, other) = shardproof.run_threads(2, lambda comm: body(comm, True))
    assert torch.equal(first, second) and first.abs().sum() > 0
    assert gradient.abs().sum() > 0 and other.abs().sum() == 0
    (_, gradient), (_, other) = shardproof.run_threads(2, lambda comm: body(comm, False))
    assert gradient.abs().sum() > 0 and other.abs().sum() == 0


def test_a_module_without_experts_is_refused():
    def body(comm):
        comms = shardproof.MeshComm(comm, "dp_shard=2")
        with pytest.raises(shardproof.Error, match=r"router.bias is \[5\]"):
            shardproof.parallelize(Own(), comms, plan={"router": ExpertParallel(2)})
        with pytest.raises(shardproof.Error, match="a matrix for each expert"):
            shardproof.parallelize(Own(), comms, plan={"embed": ExpertParallel(2)})

    shardproof.run_threads(2, body)
