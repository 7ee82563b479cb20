"""Checkpoints of Hugging Face's transformers package through `shardproof checkpoint convert --family`, and back."""
import json
import os
import shutil
import subprocess
import unittest

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import (AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

from scratch import ScratchCase

COMMAND = os.path.join(os.environ["SHARDPROOF_BUILD"], "shardproof")
PROJECTIONS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def shardproof(*arguments, code=0):
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True)
    if done.returncode != code:
        raise AssertionError(f"{arguments}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def gpt2(tied):
    config = GPT2Config(vocab_size=13, n_positions=8, n_embd=12, n_layer=2, n_head=3, tie_word_embeddings=tied)
    return GPT2LMHeadModel(config)


SIZES = dict(vocab_size=13, hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=3,
             num_key_value_heads=1, max_position_embeddings=16)


def llama(tied):
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def opened(folder):
    """The model of a folder, which must say all by itself."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            raise AssertionError(f"{what}: {info[what]}")
    return model.eval()


def logits_of(model):
    return model.eval()(torch.arange(16).reshape(2, 8) % 13).logits


class HuggingFace(ScratchCase):
    def loaded(self, kind, folder, config_of):
        shutil.copy(os.path.join(config_of, "config.json"), folder)
        model, info = kind.from_pretrained(folder, output_loading_info=True)
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            self.assertFalse(info[what], what)
        return model

    def there_and_back(self, family, model, key_of):
        theirs, ours, back = self.path("theirs"), self.path("ours"), self.path("back")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.save_pretrained(theirs)
        shardproof("checkpoint", "convert", theirs, ours, "--family", family)
        shardproof("checkpoint", "verify", ours)
        dcp_to_torch_save(ours, self.path("ours.pt"))
        got = torch.load(self.path("ours.pt"), weights_only=True)
        for name, parameter in model.named_parameters():
            value = parameter.mT if name.endswith(PROJECTIONS) else parameter
            self.assertTrue(torch.equal(got.pop(key_of(name)), value), name)
        self.assertEqual(list(got), [])
        shardproof("checkpoint", "convert", ours, back, "--to", "safetensors", "--family", family)
        again = self.loaded(type(model), back, theirs)
        tokens = torch.arange(16).reshape(2, 8) % 13
        self.assertTrue(torch.equal(model.eval()(tokens).logits, again.eval()(tokens).logits))

    def test_gpt2_comes_and_goes(self):
        for tied in (True, False):
            with self.subTest(tied=tied):
                self.there_and_back("gpt2", gpt2(tied), lambda name: "model." + name.removeprefix("transformer."))
                self.setUp()

    def test_llama_comes_and_goes(self):
        for tied in (True, False):
            with self.subTest(tied=tied):
                self.there_and_back("llama", llama(tied), lambda name: "model." + name)
                self.setUp()

    def test_mistral_and_the_qwens_come_and_go(self):
        kinds = {"mistral": (MistralForCausalLM, MistralConfig(**SIZES)),
                 "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
                 "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=6))}
        for family, (kind, config) in kinds.items():
            with self.subTest(family=family):
                self.there_and_back(family, kind(config), lambda name: "model." + name)
                self.setUp()

    def test_files_of_torch_save_come_as_safetensors_do(self):
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.save_pretrained(self.path("safe"))
        os.mkdir(self.path("bin"))
        names = list(model.state_dict())
        parts = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for file, own in parts.items():
            torch.save({name: model.state_dict()[name] for name in own}, self.path("bin/" + file))
        with open(self.path("bin/pytorch_model.bin.index.json"), "w", encoding="utf-8") as index:
            json.dump({"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}, index)
        for folder in ("safe", "bin"):
            shardproof("checkpoint", "convert", self.path(folder), self.path("of_" + folder), "--family", "qwen2")
        self.assertIn("0 differ", shardproof("checkpoint", "diff", self.path("of_safe"), self.path("of_bin")))
        turned = {name: value.mT.contiguous().mT if value.dim() == 2 else value for name, value in model.state_dict().items()}
        torch.save({"model": turned, "epoch": 3}, self.path("run.pt"))
        shardproof("checkpoint", "convert", self.path("run.pt"), self.path("of_run"), "--family", "qwen2", "--entry", "model")
        self.assertIn("0 differ", shardproof("checkpoint", "diff", self.path("of_safe"), self.path("of_run")))
        error = shardproof("checkpoint", "convert", self.path("run.pt"), self.path("x"), "--family", "qwen2", code=2)
        self.assertIn("'epoch' is 3", error)

    def test_fused_projections_come_and_go(self):
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
        model.save_pretrained(self.path("theirs"))
        shardproof("checkpoint", "convert", self.path("theirs"), self.path("ours"), "--family", "qwen2")
        shardproof("checkpoint", "convert", self.path("ours"), self.path("fused"), "--to", "safetensors", "--family", "qwen2",
                   "--projections", "fused", "--config", self.path("theirs"))
        fused, state = load_file(self.path("fused/model.safetensors")), model.state_dict()
        for leaf in ("weight", "bias"):
            parts = [state[f"model.layers.1.self_attn.{part}_proj.{leaf}"] for part in "qkv"]
            self.assertTrue(torch.equal(fused[f"model.layers.1.self_attn.qkv_proj.{leaf}"], torch.cat(parts)))
        shardproof("checkpoint", "convert", self.path("fused"), self.path("back"), "--family", "qwen2")
        self.assertIn("0 differ", shardproof("checkpoint", "diff", self.path("ours"), self.path("back")))

    def test_the_base_model_comes_too_without_its_masks(self):
        model = gpt2(True).transformer
        state = dict(model.state_dict())
        state["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
        state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        os.mkdir(self.path("base"))
        save_file({name: value.contiguous() for name, value in state.items()}, self.path("base/model.safetensors"))
        output = shardproof("checkpoint", "convert", self.path("base"), self.path("ours"), "--family", "gpt2")
        self.assertIn("left out 2 entries that are no weights", output)
        dcp_to_torch_save(self.path("ours"), self.path("ours.pt"))
        got = torch.load(self.path("ours.pt"), weights_only=True)
        self.assertEqual(set(got), {"model." + name for name, _ in model.named_parameters()})

    def test_a_trained_checkpoint_is_a_model_of_the_package(self):
        shardproof("train", "--model", "gpt(layers=2,hidden=12,heads=3,vocab=256,positions=8,tied)", "--steps", "2",
                   "--seq", "8", "--mesh", "dp_shard=2", "--checkpoint-dir", self.path("run"), "--save-every", "2")
        step = os.path.join(self.path("run"), next(n for n in os.listdir(self.path("run")) if n.startswith("step_")))
        output = shardproof("checkpoint", "convert", step, self.path("exported"), "--to", "safetensors", "--family", "gpt2")
        self.assertIn("left out", output)  # the state of the optimizer and of the run
        config = GPT2Config(vocab_size=256, n_positions=8, n_embd=12, n_layer=2, n_head=3, activation_function="gelu")
        os.mkdir(self.path("config"))
        config.save_pretrained(self.path("config"))
        self.loaded(GPT2LMHeadModel, self.path("exported"), self.path("config"))

    def test_a_trained_checkpoint_says_its_own_config(self):
        runs = {"gpt2": "gpt(layers=2,hidden=12,heads=3,vocab=256,positions=8,tied)",
                "llama": "llama(layers=2,hidden=12,heads=3,kv_heads=1,intermediate=10,vocab=256,positions=8)",
                "qwen2": "llama(layers=1,hidden=12,heads=3,kv_heads=1,intermediate=10,vocab=256,positions=8,qkv_bias,tied)",
                "qwen3": "llama(hidden=12,heads=3,kv_heads=1,intermediate=10,vocab=256,positions=8,qk_norm,head_size=6)"}
        for family, model in runs.items():
            with self.subTest(family=family):
                shardproof("train", "--model", model, "--steps", "2", "--seq", "8", "--mesh", "dp_shard=2", "--checkpoint-dir",
                           self.path("run"))
                for dtype in ("float32", "bf16"):
                    shardproof("checkpoint", "convert", self.path("run/step_2"), self.path(dtype), "--to", "safetensors",
                               "--family", family, "--dtype", dtype)
                whole, rounded = opened(self.path("float32")), opened(self.path("bf16"))
                self.assertEqual(rounded.dtype, torch.bfloat16)
                for (name, parameter), other in zip(whole.named_parameters(), rounded.parameters()):
                    self.assertTrue(torch.equal(parameter.to(torch.bfloat16), other), name)
                tied = family in ("gpt2", "qwen2")
                self.assertEqual(whole.config.tie_word_embeddings, tied)
                self.assertEqual("lm_head.weight" in load_file(self.path("float32/model.safetensors")), not tied)
                self.assertTrue(torch.isfinite(logits_of(whole)).all())
                error = shardproof("checkpoint", "convert", self.path("run/step_2"), self.path("x"), "--to", "safetensors",
                                   "--family", "llama" if family == "qwen2" else "qwen2", code=2)
                self.assertIn("qwen2" if family != "qwen2" else "a llama has no such model", error)
                self.setUp()

    def test_wrong_usage_is_told(self):
        model = llama(True)
        model.save_pretrained(self.path("theirs"))
        self.assertIn("known are gpt2, llama, mistral, qwen2, qwen3",
                      shardproof("checkpoint", "convert", self.path("theirs"), self.path("x"), "--family", "opt", code=2))
        self.assertFalse(os.path.exists(self.path("x")))


if __name__ == "__main__":
    unittest.main()
