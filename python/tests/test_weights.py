"""Weights of the transformers package in and out of shards, and files of torch.save."""

import copy
import json
import os

import pytest
import torch
from safetensors.torch import load_file

import shardproof
from models import Block, Net, assert_same_bits


def whole(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("nested", [False, True])
def test_a_file_of_torch_save_comes_into_shards(tmp_path, nested):
    model = Net()
    expected = whole(model)
    # Matrices lie transposed in memory, and so in the file.
    state = {name: value.mT.contiguous().mT if value.dim() == 2 else value for name, value in model.state_dict().items()}
    path = str(tmp_path / "model.pt")
    prefix = "_orig_mod.module." if nested else ""
    state = {prefix + name: value for name, value in state.items()}
    torch.save({"model": state, "step": 3} if nested else state, path)

    def body(comm):
        own = Net()
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.fill_(7)
        sharded = shardproof.fully_shard(own, comm, units=[Block])
        loaded = shardproof.load_weights(path, sharded, entry="model" if nested else "", prefix=prefix)
        assert loaded["missing"] == [] and loaded["unused"] == []
        return sharded.gather(), loaded["bytes_read"]

    results = shardproof.run_threads(3, body)
    for values, _ in results:
        assert_same_bits(values, expected)
    assert sum(count for _, count in results) == sum(value.nbytes for value in model.state_dict().values())


def test_a_model_on_meta_is_filled_without_a_whole_one_anywhere(tmp_path):
    model, path = Net(), str(tmp_path / "model.pt")
    torch.save(model.state_dict(), path)

    def body(comm):
        with torch.device("meta"):
            own = Net()
        sharded = shardproof.fully_shard(own, comm, units=[Block], initialize=(7, 0.02), broadcast_initial_values=False)
        shardproof.load_weights(path, sharded)
        return sharded.gather()

    for values in shardproof.run_threads(3, body):
        assert_same_bits(values, whole(model))


def test_what_is_no_tensor_is_refused_and_nothing_is_run(tmp_path):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was_run"),)

    def refused(content, match, **options):
        torch.save(content, str(tmp_path / "bad.pt"))

        def body(comm):
            sharded = shardproof.fully_shard(Net(), comm, units=[Block])
            with pytest.raises(shardproof.Error, match=match):
                shardproof.load_weights(str(tmp_path / "bad.pt"), sharded, **options)

        shardproof.run_threads(2, body)

    refused({"model": Net().state_dict(), "step": 3}, "'step' is 3")
    refused({"model": Net().state_dict(), "x": Runs()}, "mkdir", entry="model")
    refused({**Net().state_dict(), "x": Runs()}, "mkdir")
    assert not (tmp_path / "was_run").exists()
    torch.save(Net().state_dict(), str(tmp_path / "old.pt"), _use_new_zipfile_serialization=False)
    with pytest.raises(shardproof.Error, match="before 1.6"):
        shardproof.run_threads(
            1, lambda comm: shardproof.load_weights(str(tmp_path / "old.pt"), shardproof.fully_shard(Net(), comm))
        )


def small(transformers, family):
    sizes = dict(
        vocab_size=13,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    if family == "gpt2":
        return transformers.GPT2Config(vocab_size=13, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    if family == "qwen3":
        return transformers.Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True)
    if family == "mixtral":
        return transformers.MixtralConfig(**{**sizes, "intermediate_size": 8}, num_local_experts=11)
    experts = dict(n_routed_experts=12, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1, n_group=2)
    if family == "dots1":
        return transformers.Dots1Config(**sizes, **experts)
    if family == "glm4_moe":
        return transformers.Glm4MoeConfig(**sizes, **experts, head_dim=8)
    if family == "deepseek_v3":
        sizes["num_key_value_heads"] = 2
        latents = dict(kv_lora_rank=6, q_lora_rank=None, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
        return transformers.DeepseekV3Config(**sizes, **experts, **latents, topk_group=1, first_k_dense_replace=1)
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=8, num_experts=11, num_experts_per_tok=2)
    kinds = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config"}
    return getattr(transformers, kinds[family])(**sizes)


def biases_of(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}


BIASED = ["dots1", "glm4_moe", "deepseek_v3"]


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", *BIASED])
def test_a_model_of_transformers_goes_out_and_from_pretrained_opens_it(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    config = small(transformers, family)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), *biases_of(model).values()]:
            parameter.normal_()
    folder = str(tmp_path / "out")

    def out(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(model), comm)
        shardproof.save_weights(folder, sharded, config=model.config, file_bytes_max=2000)

    shardproof.run_threads(3, out)
    assert os.path.exists(os.path.join(folder, "model.safetensors.index.json"))
    again, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_bits(whole(again), whole(model))
    assert_same_bits(biases_of(again), biases_of(model))
    tokens = torch.arange(16).reshape(2, 8) % 13
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)

    def back(comm):
        own = transformers.AutoModelForCausalLM.from_config(config)
        sharded = shardproof.fully_shard(own, comm)
        shardproof.load_weights(folder, sharded)
        return sharded.gather()

    for values in shardproof.run_threads(2, back):
        assert_same_bits({name: values[name] for name in whole(model)}, whole(model))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", *BIASED])
def test_experts_of_hub_files_come_into_a_model_of_transformers(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(small(transformers, family)).eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), *biases_of(model).values()]:
            parameter.normal_()
    model.save_pretrained(str(tmp_path / "hub"))

    def body(comm):
        own = transformers.AutoModelForCausalLM.from_config(model.config)
        shardproof.parallelize(own, comm, plan={"model.layers.*.mlp.experts": shardproof.ExpertParallel(ranks=2)})
        sharded = shardproof.fully_shard(own, comm)
        shardproof.load_weights(str(tmp_path / "hub"), sharded, family=family)
        shardproof.save_weights(str(tmp_path / "back"), sharded, family=family, config=model.config)
        return sharded.gather()

    for values in shardproof.run_threads(2, body):
        assert_same_bits({name: values[name] for name in whole(model)}, whole(model))
    written, hub = (sorted(load_file(tmp_path / folder / "model.safetensors")) for folder in ("back", "hub"))
    assert written == hub
    again, info = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "back"), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_bits(whole(again), whole(model))
    assert_same_bits(biases_of(again), biases_of(model))


def test_weights_are_rounded_to_a_dtype(tmp_path):
    model, folder = Net(), str(tmp_path / "out")

    def body(comm):
        sharded = shardproof.fully_shard(copy.deepcopy(model), comm, units=[Block])
        with pytest.raises(shardproof.Error, match="no dtype 'float8'"):
            shardproof.save_weights(folder, sharded, dtype="float8")
        shardproof.save_weights(folder, sharded, dtype=torch.bfloat16, config=json.dumps({"model_type": "net"}))
        shardproof.load_weights(folder, sharded)
        return sharded.gather()

    for values in shardproof.run_threads(2, body):
        assert_same_bits(values, {name: value.to(torch.bfloat16).float() for name, value in whole(model).items()})
    assert json.load(open(os.path.join(folder, "config.json"))) == {"model_type": "net"}
