"""Adapters go between the library and peft: each opens the files of the other, and computes the same with them."""

import copy
import json
import shutil

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


PLAIN = [
    {},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "orthogonal"},
    {"exclude_modules": ["model.layers.0.self_attn.v_proj"]},
    {"layers_to_transform": [1]},
    {"task_type": "CAUSAL_LM"},
]
OTHERS = [
    {"use_rslora": True},
    {"alpha_pattern": {"q_proj": 9}},
    {"rank_pattern": {"q_proj": 3}},
    {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_2"},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "eva", "eva_config": peft.EvaConfig()},
    {"use_dora": True},
    {"lora_bias": True},
    {"bias": "all"},
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": [1, 2]},
    {"layer_replication": [[0, 2], [1, 2]]},
    {"target_modules": [], "target_parameters": ["self_attn.q_proj.weight"]},
]


def saved_by_peft(base, folder, **setting):
    """What PEFT computes with adapters that it saved and opened again: some variants change the base when they are opened."""
    asked = peft.LoraConfig(**{"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], **setting})
    theirs = peft.get_peft_model(copy.deepcopy(base), asked)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(folder)
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    adapters = [name for name, _ in opened.named_modules() if name.endswith(".lora_A")]
    return logits_of(opened), [name.removeprefix("base_model.model.").removesuffix(".lora_A") for name in adapters]


def load_of(base, folder, layers, refused=()):
    """The logits after a load, before which the folders `refused`, {folder: what the error says}, are refused."""

    def load(comm):
        model = copy.deepcopy(base)
        lora = shardproof.add_lora(model, layers, rank=2, alpha=5)
        sharded = shardproof.fully_shard(model, comm, strategy="zero3")
        for other in refused:
            with pytest.raises(shardproof.Error, match=refused[other]):
                lora.load(other, sharded)
        lora.load(folder, sharded)
        return logits_of(sharded)

    return shardproof.run_threads(2, load)[0]


@pytest.mark.parametrize("setting", PLAIN, ids=str)
def test_plain_adapters_of_peft_compute_what_peft_computes_whatever_else_their_config_says(base, tmp_path, setting):
    expected, layers = saved_by_peft(base, tmp_path / "adapters", **setting)
    assert torch.allclose(load_of(base, tmp_path / "adapters", layers), expected, atol=1e-5)


@pytest.mark.parametrize("setting", OTHERS, ids=str)
def test_adapters_of_peft_that_compute_something_else_are_refused_by_name(base, tmp_path, setting):
    saved_by_peft(base, tmp_path / "adapters", **setting)
    with pytest.raises(shardproof.Error, match="|".join(setting)):
        load_of(base, tmp_path / "adapters", ["model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.v_proj"])


def test_every_entry_of_pefts_config_is_known_or_refused_when_it_is_on(base, tmp_path):
    expected, layers = saved_by_peft(base, tmp_path / "adapters")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    off = {key for key, value in config.items() if value is None or value is False or value == {}}
    assert {"use_dora", "velora_config", "kasa_config", "use_qalora", "use_bdlora", "rank_pattern"} <= off
    off -= {"auto_mapping", "revision", "task_type", "base_model_name_or_path", "inference_mode", "exclude_modules"}
    off -= {"layers_to_transform", "layers_pattern", "fan_in_fan_out"}
    refused = {}
    for key in sorted(off | {"of_the_next_release"}):
        for value in (True, {"a": 1}, 1):
            folder = tmp_path / f"{len(refused)}"
            shutil.copytree(tmp_path / "adapters", folder)
            (folder / "adapter_config.json").write_text(json.dumps({**config, key: value}))
            refused[folder] = f'has "{key}": .*were not loaded'
    assert torch.allclose(load_of(base, tmp_path / "adapters", layers, refused), expected, atol=1e-5)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_the_head_is_merged_or_refused_and_the_model_computes_the_same(strategy, tied):
    sizes = {"vocab_size": 17, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 3}
    base = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()

    def body(comm):
        model = copy.deepcopy(base)
        lora = shardproof.add_lora(model, ["lm_head", "model.layers.0.mlp.up_proj"], rank=2, alpha=4)
        sharded = shardproof.fully_shard(model, comm, strategy=strategy)
        optimizer = shardproof.adamw(sharded, lr=0.1)
        sharded(TOKENS, use_cache=False).logits.square().mean().backward()
        optimizer.step()
        before = logits_of(sharded)
        if tied:
            with pytest.raises(shardproof.Error, match="'lm_head' is 'model.embed_tokens.weight' too.*nothing was merged"):
                lora.merge(sharded)
        else:
            lora.merge(sharded)
        return before, logits_of(sharded), sharded.gather_main_parameter("lm_head.lora_B.weight")

    before, after, up = shardproof.run_threads(2, body)[0]
    assert torch.allclose(before, after, atol=1e-5) and not torch.allclose(before, logits_of(base), atol=1e-3)
    assert (up.abs().max() > 0) == tied
