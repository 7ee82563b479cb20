"""What keeps experts equally busy, of routers that are not the library's."""

import copy

import pytest
import torch
import transformers
from torch import nn

import shardproof
from shardproof import ExpertParallel

PATTERN = "model.layers.*.mlp.experts"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def glm4_moe():
    return transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            vocab_size=12, hidden_size=8, intermediate_size=6, moe_intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=4, n_routed_experts=6, num_experts_per_tok=2,
            n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, pad_token_id=None,
        )
    )  # fmt: skip


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def tokens_of(rank, step):
    return torch.randint(0, 12, (1, 3 + rank % 2), generator=torch.Generator().manual_seed(10 * step + rank))


def test_biases_of_transformers_move_alike_on_one_rank_and_on_ranks_that_share_experts():
    torch.manual_seed(3)
    model = glm4_moe().train()
    own = copy.deepcopy(model)
    biases = shardproof.RouterBiases(own, rate=0.125)
    for step in range(3):
        loss_of(own, tokens_of(7, step))
        biases.forget()
        with torch.no_grad():
            own(tokens_of(8, step))
        for rank in range(2):
            loss_of(own, tokens_of(rank, step))
        biases.update(None)
    expected = own.get_buffer(BIAS)
    assert expected.min() < 0 < expected.max()

    def body(comm, sharing):
        sharded_model = copy.deepcopy(model)
        comms = shardproof.MeshComm(comm, "dp_shard=2")
        shardproof.parallelize(sharded_model, comms, plan={PATTERN: ExpertParallel(sharing)})
        sharded = shardproof.fully_shard(sharded_model, comms, strategy="zero3")
        biases = shardproof.RouterBiases(sharded_model, rate=0.125)
        for step in range(3):
            loss_of(sharded_model, tokens_of(comms.rank, step)).backward()
            sharded.zero_gradients()
            biases.update(sharded.comms.world)
        return sharded_model.get_buffer(BIAS).clone()

    for sharing in (1, 2):
        for bias in shardproof.run_threads(2, lambda comm, sharing=sharing: body(comm, sharing)):
            assert torch.equal(bias, expected)


def test_a_model_without_biases_and_one_in_low_precision_are_refused():
    with pytest.raises(shardproof.Error, match="no layer with 'experts' beside a module with the buffer e_score"):
        shardproof.RouterBiases(nn.Linear(2, 2), rate=0.1)
    low = glm4_moe()
    low.get_submodule(BIAS.rpartition(".")[0]).to(torch.bfloat16)
    with pytest.raises(shardproof.Error, match="bfloat16, in which small moves are lost"):
        shardproof.RouterBiases(low, rate=0.1).update(None)
    with pytest.raises(shardproof.Error, match=r"got \[3, 4\] and \[3, 2\]"):
        shardproof.balance_loss(torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.long))


def by_hand(logits, experts, sigmoid, whole):
    total = logits.new_zeros(())
    for sequence in range(len(logits)):
        seen = experts if whole else experts[sequence]
        for token in logits[sequence]:
            p = token.sigmoid() / token.sigmoid().sum() if sigmoid else token.softmax(-1)
            for e in range(logits.shape[-1]):
                total = total + p[e] * logits.shape[-1] * (seen == e).sum() / seen.numel()
    return total


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_losses_of_ranks_are_those_of_one_with_all_tokens(sigmoid, whole):
    torch.manual_seed(1)
    logits = torch.randn(4, 3, 5, dtype=torch.float64)
    experts = logits.topk(2).indices
    leaf = logits.clone().requires_grad_()
    expected = by_hand(leaf, experts, sigmoid, whole) + (leaf.exp().sum(-1).log() ** 2).sum()
    expected.backward()

    def body(comm):
        part = slice(0, 3) if comm.rank == 0 else slice(3, 4)
        own = logits[part].clone().requires_grad_()
        balance = shardproof.balance_loss(own, experts[part], sigmoid=sigmoid, comm=comm if whole else None)
        (balance + shardproof.z_loss(own)).backward()
        assert torch.allclose(own.grad, leaf.grad[part])
        return (balance + shardproof.z_loss(own)).item()

    assert sum(shardproof.run_threads(2, body)) == pytest.approx(expected.item())


def test_parts_of_sequences_are_balanced_as_the_whole_sequences():
    torch.manual_seed(1)
    logits = torch.randn(2, 5, 4, dtype=torch.float64)
    experts = logits.topk(2).indices
    expected = by_hand(logits, experts, False, False)

    def body(comm):
        part = slice(0, 3) if comm.rank == 0 else slice(3, 5)
        with pytest.raises(shardproof.Error, match="parts, of sequences. Give one of them"):
            shardproof.balance_loss(logits, experts, comm=comm, parts=comm)
        return shardproof.balance_loss(logits[:, part], experts[:, part], parts=comm).item()

    assert sum(shardproof.run_threads(2, body)) == pytest.approx(expected.item())


class Named(nn.Module):
    """Experts whose arguments have names of their own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6, 6) / 6)

    def forward(self, rows, chosen, weighed_by):
        one_of = nn.functional.one_hot(chosen, len(self.weight)).to(rows)
        return torch.einsum("tk,tke,eoi,ti->to", weighed_by, one_of, self.weight, rows)


class Turned(Named):
    def forward(self, rows, weighed_by, chosen):
        return super().forward(rows, chosen, weighed_by)


class KeywordOnly(Named):
    def forward(self, rows, chosen, *, weighed_by):
        return super().forward(rows, chosen, weighed_by)


class ByKeyword(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.gate = nn.Linear(6, 5)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(5))
        self.experts = experts

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(2).indices
        return x + self.experts(x, weighed_by=scores.gather(1, chosen), chosen=chosen)


def shared_over_two(layer, x):
    def body(comm):
        own = copy.deepcopy(layer)
        shardproof.parallelize(own, shardproof.MeshComm(comm, "dp_shard=2"), plan={"experts": ExpertParallel(2)})
        own(x)

    shardproof.run_threads(2, body)


def test_experts_may_be_called_by_keywords_and_what_is_no_choice_is_refused():
    torch.manual_seed(2)
    layer, x = ByKeyword(Named()), torch.randn(4, 7, 6)
    own = copy.deepcopy(layer)
    biases = shardproof.RouterBiases(own, rate=0.5)
    for part in x:
        own(part).square().sum().backward()
    biases.update(None)
    assert own.gate.e_score_correction_bias.abs().max() == 0.5

    def body(comm):
        shared, comms = copy.deepcopy(layer), shardproof.MeshComm(comm, "dp_shard=2")
        shardproof.parallelize(shared, comms, plan={"experts": ExpertParallel(2)})
        biases = shardproof.RouterBiases(shared, rate=0.5)
        for part in x[2 * comm.rank :][:2]:
            shared(part).square().sum().backward()
        biases.update(comm)
        assert torch.equal(shared.gate.e_score_correction_bias, own.gate.e_score_correction_bias)
        gradient = shared.gate.weight.grad.clone()
        comm.all_reduce(gradient)
        assert torch.allclose(gradient, own.gate.weight.grad, rtol=1e-4, atol=1e-6)
        with pytest.raises(shardproof.Error, match="otherwise than its forward takes.*missing.*'chosen'"):
            shared.experts(x[0], weighed_by=x[0])
        with pytest.raises(shardproof.Error, match=r"got 2 arguments"):
            shared.experts(x[0], torch.zeros(7, 2, dtype=torch.long))

    shardproof.run_threads(2, body)
    only = ByKeyword(KeywordOnly())
    counting = shardproof.RouterBiases(only, rate=0.5)
    only(x[0])
    assert counting.layers[0][1].sum() == 14
    with pytest.raises(shardproof.Error, match="a KeywordOnly takes weighed_by by keyword alone"):
        shared_over_two(only, x[0])
    turned = ByKeyword(Turned())
    shardproof.RouterBiases(turned, rate=0.5)
    with pytest.raises(shardproof.Error, match=r"a Turned has to be called with .*argument is \[7, 2\] of torch.float32"):
        turned(x[0])


def test_what_a_copy_of_the_model_chooses_is_not_counted():
    torch.manual_seed(2)
    layer, x = ByKeyword(Named()), torch.randn(7, 6)
    biases = shardproof.RouterBiases(layer, rate=0.5)
    copy.deepcopy(layer)(x)
    biases.update(None)
    assert layer.gate.e_score_correction_bias.abs().max() == 0
    layer(x)
    biases.update(None)
    assert layer.gate.e_score_correction_bias.abs().max() == 0.5
