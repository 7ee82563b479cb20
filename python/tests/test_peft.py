"""Adapters go between the library and peft: each opens the files of the other, and computes the same with them."""

import copy
import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardproof

peft = pytest.importorskip("peft", reason="the package peft is not installed here, so nobody opens our files but ourselves")

TARGETS = ["model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.v_proj", "model.layers.1.mlp.down_proj"]
TOKENS = torch.arange(12).reshape(2, 6) % 17


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    return model


def logits_of(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def test_peft_opens_adapters_that_were_trained_sharded(base, tmp_path):
    def train(comm):
        model = copy.deepcopy(base)
        lora = shardproof.add_lora(model, TARGETS, rank=3, alpha=12, dropout=0.25)
        sharded = shardproof.fully_shard(model, comm, strategy="zero3")
        optimizer = shardproof.adamw(sharded, lr=0.05)
        model.train()
        for step in range(3):
            shardproof.random_stream(step * 2 + comm.rank)
            sharded(TOKENS, use_cache=False).logits.square().mean().backward()
            optimizer.step()
        model.eval()
        lora.save(tmp_path / "adapters", sharded, base_model=str(tmp_path / "base"))
        return logits_of(sharded)

    found = shardproof.run_threads(2, train)[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    opened = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    config = opened.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 12, 0.25)
    assert torch.allclose(logits_of(opened), found, atol=1e-5)
    assert not torch.allclose(logits_of(base), found, atol=1e-2), "the adapters compute nothing"


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=1,tp=2"])
def test_adapters_of_peft_come_into_shards(base, tmp_path, mesh):
    names = [name for name, _ in base.named_modules() if any(shardproof._C.name_matches(target, name) for target in TARGETS)]
    asked = peft.LoraConfig(r=2, lora_alpha=5, lora_dropout=0.1, target_modules=names)
    theirs = peft.get_peft_model(copy.deepcopy(base), asked)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    theirs.eval().save_pretrained(tmp_path / "adapters")
    plan = {
        "model.layers.*.self_attn.q_proj": shardproof.ColumnParallel(gather_output=True),
        "model.layers.*.mlp.down_proj": shardproof.RowParallel(input_is_parallel=False),
    }

    def load(comm):
        model = copy.deepcopy(base)
        lora = shardproof.add_lora(model, TARGETS, rank=2, alpha=5, seed=7)
        comms = shardproof.MeshComm(comm, mesh)
        parallel = "tp" in mesh and shardproof.parallelize(model, comms, plan=lora.with_styles(plan))
        sharded = shardproof.fully_shard(model, comms, strategy="zero3")
        lora.load(tmp_path / "adapters", sharded)
        return logits_of(sharded), parallel

    for found, _ in shardproof.run_threads(2, load):
        assert torch.allclose(found, logits_of(theirs), atol=1e-5)


@pytest.mark.parametrize("setting", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 9}}])
def test_adapters_of_peft_that_are_scaled_otherwise_are_refused(base, tmp_path, setting):
    theirs = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj"], **setting))
    theirs.save_pretrained(tmp_path / "adapters")

    def load(comm):
        model = copy.deepcopy(base)
        lora = shardproof.add_lora(model, "model.layers.*.self_attn.q_proj", rank=2, alpha=5)
        lora.load(tmp_path / "adapters", shardproof.fully_shard(model, comm, strategy="zero3"))

    with pytest.raises(shardproof.Error, match=next(iter(setting))):
        shardproof.run_threads(2, load)
    with open(tmp_path / "adapters" / "adapter_config.json", encoding="utf-8") as file:
        assert json.load(file)["r"] == 2 and os.path.getsize(tmp_path / "adapters" / "adapter_model.safetensors") > 0
