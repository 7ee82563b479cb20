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
                          MistralForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)

from biased_routers import CLASSES, biases_of, model_with_biases
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
            for parameter in [*model.parameters(), *biases_of(model).values()]:
                parameter.normal_()
        model.save_pretrained(theirs)
        shardproof("checkpoint", "convert", theirs, ours, "--family", family)
        shardproof("checkpoint", "verify", ours)
        dcp_to_torch_save(ours, self.path("ours.pt"))
        got = torch.load(self.path("ours.pt"), weights_only=True)
        for name, parameter in [*model.named_parameters(), *biases_of(model).items()]:
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

    def test_llamas_of_other_names_come_and_go(self):
        kinds = {"mistral": (MistralForCausalLM, MistralConfig(**SIZES)),
                 "mixtral": (MixtralForCausalLM, MixtralConfig(**{**SIZES, "intermediate_size": 8}, num_local_experts=11)),
                 "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, head_dim=6, moe_intermediate_size=8, num_experts=11,
                                                                   num_experts_per_tok=3, mlp_only_layers=[0])),
                 "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
                 "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=6))}
        models = {family: kind(config) for family, (kind, config) in kinds.items()}
        models.update((family, model_with_biases(family, **SIZES)) for family in CLASSES)
        for family, model in models.items():
            with self.subTest(family=family):
                self.there_and_back(family, model, lambda name: "model." + name)
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

    def test_weights_that_the_model_of_the_config_lacks_are_refused(self):
        biased = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
        biased.save_pretrained(self.path("theirs"))
        for model_type, first in (("llama", "self_attn.k_proj.bias"), ("qwen2", "mlp.down_proj.bias")):
            self.rewrite("theirs", model_type=model_type, attention_bias=False, mlp_bias=False)
            error = shardproof("checkpoint", "convert", self.path("theirs"), self.path("x"), "--family", model_type, code=2)
            self.assertIn(f"the model has no place for model.layers.0.{first}", error)
        llama(False).save_pretrained(self.path("plain"))
        self.rewrite("plain", vocab_size=14)
        error = shardproof("checkpoint", "convert", self.path("plain"), self.path("x"), "--family", "llama", code=2)
        self.assertIn("lm_head.weight is [13, 12] and not [14, 12]", error)
        self.assertFalse(os.path.exists(self.path("x")))

    def test_layers_that_the_config_calls_drafts_stay_behind_and_no_others(self):
        theirs, usual = self.path("theirs"), ("--family", "glm4_moe")
        model_with_biases("glm4_moe", **SIZES).save_pretrained(theirs)
        weights = load_file(os.path.join(theirs, "model.safetensors"))
        weights["model.layers.2.eh_proj.weight"] = torch.zeros(12, 24)
        save_file(weights, os.path.join(theirs, "model.safetensors"), {"format": "pt"})
        self.rewrite("theirs", num_nextn_predict_layers=0)
        error = shardproof("checkpoint", "convert", theirs, self.path("ours"), *usual, code=2)
        self.assertIn("the model has no place for model.layers.2.eh_proj.weight", error)
        self.rewrite("theirs", num_nextn_predict_layers=1)
        shardproof("checkpoint", "convert", theirs, self.path("ours"), *usual)
        shardproof("checkpoint", "convert", self.path("ours"), self.path("back"), "--to", "safetensors", *usual)
        self.assertEqual(opened(self.path("back")).config.num_mtp_layers, 0)

    def test_a_tied_head_with_values_of_its_own_is_refused(self):
        llama(True).save_pretrained(self.path("theirs"))
        values = load_file(self.path("theirs/model.safetensors"))
        for head, code in ((values["model.embed_tokens.weight"].clone(), 0), (values["model.embed_tokens.weight"] + 1, 2)):
            save_file({**values, "lm_head.weight": head}, self.path("theirs/model.safetensors"), {"format": "pt"})
            arguments = (self.path("theirs"), self.path(f"to_{code}"), "--family", "llama")
            said = shardproof("checkpoint", "convert", *arguments, code=code)
        self.assertIn("the head of this model is tied to model.embed_tokens.weight, and lm_head.weight has other values", said)
        shardproof("checkpoint", "convert", self.path("to_0"), self.path("back"), "--to", "safetensors", "--family", "llama")
        self.assertEqual(set(load_file(self.path("back/model.safetensors"))), set(values))

    def rewrite(self, folder, **changes):
        path = self.path(folder + "/config.json")
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**config, **changes}, file)

    def described(self, folder, leave_out=("dtype", "torch_dtype")):
        texts = []
        for name in ("config.json", "generation_config.json"):
            with open(os.path.join(self.path(folder), name), encoding="utf-8") as file:
                texts.append({key: value for key, value in json.load(file).items() if key not in leave_out})
        return texts

    def test_what_a_model_says_of_itself_comes_out_as_it_went_in(self):
        ids = dict(bos_token_id=1, eos_token_id=[2, 7], pad_token_id=0)
        sizes = {**SIZES, "vocab_size": 256, "initializer_range": 0.5, "rms_norm_eps": 1e-5, **ids}
        window = dict(use_sliding_window=True, sliding_window=8, max_window_layers=0)
        models = {"mistral": MistralForCausalLM(MistralConfig(**sizes, sliding_window=8)),
                  "qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes, **window)),
                  "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=16, n_embd=12, n_layer=2, n_head=3, **ids))}
        for family, model in models.items():
            with self.subTest(family=family):
                model.generation_config.max_new_tokens = 33
                model.save_pretrained(self.path("theirs"))
                shardproof("checkpoint", "convert", self.path("theirs"), self.path("ours"), "--family", family)
                shardproof("checkpoint", "reshard", self.path("ours"), self.path("two"), "--mesh", "dp_shard=2")
                shardproof("train", "--weights", self.path("theirs"), "--seq", "8", "--steps", "1", "--checkpoint-dir",
                           self.path("run"), "--quiet")
                shardproof("train", "--seq", "8", "--steps", "2", "--checkpoint-dir", self.path("run"), "--quiet", "--resume")
                shardproof("checkpoint", "reshard", self.path("run/step_2"), self.path("run_two"), "--mesh", "dp_shard=2")
                for source in ("ours", "two", "run/step_2", "run_two"):
                    out = source.replace("/", "_") + "_out"
                    shardproof("checkpoint", "convert", self.path(source), self.path(out), "--to", "safetensors", "--family",
                               family, "--dtype", "bf16")
                    self.assertEqual(self.described(out), self.described("theirs"), source)
                    self.assertEqual(opened(self.path(out)).dtype, torch.bfloat16)
                shardproof("checkpoint", "convert", self.path("theirs"), self.path("plain"), "--to", "safetensors", "--dtype",
                           "bf16")
                self.assertEqual(self.described("plain"), self.described("theirs"))
                self.assertEqual(opened(self.path("plain")).dtype, torch.bfloat16)
                other = "llama" if family != "gpt2" else "qwen2"
                error = shardproof("checkpoint", "convert", self.path("run/step_2"), self.path("x"), "--to", "safetensors",
                                   "--family", other, code=2)
                self.assertIn(f"describes a {family}, and --family is {other}", error)
                self.setUp()

    def test_the_config_of_another_model_is_refused(self):
        shardproof("train", "--model", "llama(layers=1,hidden=32,heads=4,kv_heads=2,intermediate=20,vocab=256,positions=64)",
                   "--seq", "16", "--steps", "1", "--checkpoint-dir", self.path("run"), "--quiet")
        usual = ("--to", "safetensors", "--family", "llama")
        shardproof("checkpoint", "convert", self.path("run/step_1"), self.path("right"), *usual)
        shardproof("checkpoint", "convert", self.path("right"), self.path("ours"), "--family", "llama")
        os.remove(self.path("ours/config.json"))
        changes = {"heads": dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16), "theta": dict(rope_theta=5e5),
                   "eps": dict(rms_norm_eps=0.01), "positions": dict(max_position_embeddings=16), "vocab": dict(vocab_size=300),
                   "layers": dict(num_hidden_layers=7), "tied": dict(tie_word_embeddings=True),
                   "intermediate": dict(intermediate_size=9)}
        for word, change in changes.items():
            shutil.copytree(self.path("right"), self.path("of_" + word))
            self.rewrite("of_" + word, **change)
            error = shardproof("checkpoint", "convert", self.path("run/step_1"), self.path("x"), *usual, "--config",
                               self.path("of_" + word), code=2)
            self.assertIn(word, error)
            # The shapes alone are known of a checkpoint that says nothing.
            code = 2 if word in ("vocab", "layers", "tied", "intermediate") else 0
            shardproof("checkpoint", "convert", self.path("ours"), self.path("y"), *usual, "--config", self.path("of_" + word),
                       "--overwrite", code=code)
        self.assertFalse(os.path.exists(self.path("x")))
        shardproof("checkpoint", "convert", self.path("run/step_1"), self.path("same"), *usual, "--config", self.path("right"))

    def test_a_number_that_the_dtype_does_not_hold_is_refused_by_name(self):
        model = llama(False)
        with torch.no_grad():
            model.model.norm.weight[3] = 1e5
            model.lm_head.weight[0, 0] = float("inf")
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype).save_pretrained(self.path("theirs"))
            error = shardproof("checkpoint", "convert", self.path("theirs"), self.path("x"), "--family", "llama", "--dtype",
                               "fp16", code=2)
            self.assertRegex(error, "model.norm.weight: 1 of its values are too large for float16, such as (100000|99840)")
        self.assertFalse(os.path.exists(self.path("x")))
        shardproof("checkpoint", "convert", self.path("theirs"), self.path("x"), "--family", "llama", "--dtype", "bf16")

    def test_wrong_usage_is_told(self):
        model = llama(True)
        model.save_pretrained(self.path("theirs"))
        self.assertIn("has the names of the package already. Leave out --family",
                      shardproof("checkpoint", "convert", self.path("theirs"), self.path("x"), "--family", "llama", "--to",
                                 "safetensors", code=2))
        self.assertIn("known are gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, dots1, glm4_moe, deepseek_v3",
                      shardproof("checkpoint", "convert", self.path("theirs"), self.path("x"), "--family", "opt", code=2))
        self.assertFalse(os.path.exists(self.path("x")))


if __name__ == "__main__":
    unittest.main()
