"""`shardproof train --weights` and `sample --weights`: from the folders of the transformers package."""
import json
import os
import re
import shutil
import struct
import subprocess
import unittest

import torch
from transformers import (AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)

from biased_routers import CLASSES, biases_of, model_with_biases
from training_runs import ENVIRONMENT, SHARDPROOF, TrainingRuns

LENGTH = 16
TOKENS = [(7 * i * i + 3 * i) % 300 for i in range(LENGTH * 16 + 1)]
SLOWED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8}


def model_of(family):
    sizes = {"vocab_size": 300, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 64}
    models = {"gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=24, n_layer=2, n_head=4)),
              "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, rope_scaling=SLOWED)),
              "mistral": lambda: MistralForCausalLM(MistralConfig(**sizes, sliding_window=40)),
              "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=5)),
              "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, head_dim=8, moe_intermediate_size=8,
                                                                      num_experts=5, num_experts_per_tok=3,
                                                                      mlp_only_layers=[0])),
              "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
              "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))}
    torch.manual_seed(0)
    model = models[family]() if family in models else model_with_biases(family, **sizes)
    with torch.no_grad():
        for parameter in [*model.parameters(), *biases_of(model).values()]:
            parameter.normal_(std=0.3)
    return model.eval()


def loss_of(model):
    inputs, targets = (torch.tensor(TOKENS[begin:begin + LENGTH * 16]).reshape(16, LENGTH) for begin in (0, 1))
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).item()


class TrainFromWeights(TrainingRuns):
    def saved(self, family="gpt2"):
        model, folder = model_of(family), os.path.join(self.folder, family)
        model.save_pretrained(folder)
        return model, folder

    def from_weights(self, folder, *arguments):
        """Exit code, JSON lines, output and errors of a run on tokens, without --model."""
        report = os.path.join(self.folder, "weights.json")
        path = self.write("tokens.bin", struct.pack(f"<{len(TOKENS)}H", *TOKENS))
        usual = {"--data": path, "--token-type": "uint16", "--seq": str(LENGTH), "--json": report}
        usual.update({"--weights": folder} if folder else {})
        options = [word for option, value in usual.items() if option not in arguments for word in (option, value)]
        done = subprocess.run([SHARDPROOF, "train", *options, *arguments], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, check=False, env=ENVIRONMENT)
        lines = []
        if os.path.exists(report):
            with open(report, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
            os.remove(report)
        return done.returncode, lines, done.stdout, done.stderr

    def losses_from(self, folder, *arguments):
        code, lines, output, errors = self.from_weights(folder, *arguments)
        self.assertEqual(code, 0, output + errors)
        return [line["loss"] for line in lines[1:-1]], output

    def test_the_first_loss_of_each_family_is_that_of_the_package_on_any_mesh(self):
        for family in ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", *CLASSES):
            model, folder = self.saved(family)
            meshes = [("dp_shard=2",), ("tp=2", "--sequence-parallel"), ("dp_shard=2,cp=2", "--strategy", "zero2")]
            if family in ("mixtral", "qwen3_moe", *CLASSES):
                meshes.append(("dp_shard=2", "--expert-ranks", "2"))
            for mesh in meshes:
                losses, output = self.losses_from(folder, "--steps", "1", "--mesh", *mesh)
                self.assertAlmostEqual(losses[0], loss_of(model), places=4, msg=f"{family} on {mesh}")
                self.assertIn(f"begin  with the weights in {folder}\n", output)

    def test_runs_from_weights_with_biases_of_routers_have_the_golden_bits(self):
        canonical = ("--arithmetic", "canonical", "--canonical")
        moved = ("--model", "llama(experts=12,expert_bias=0.01)")
        ways = (("--mesh", "dp_shard=2", "--expert-ranks", "2"), ("--mesh", "dp_shard=2", "--precision", "bf16", *moved),
                (*canonical, "--mesh", "dp_shard=2,tp=2", *moved),
                (*canonical, "--mesh", "dp_shard=2,cp=2", "--strategy", "zero2"))
        for family in CLASSES:
            _, folder = self.saved(family)
            for number, way in enumerate(ways):
                run = ("--checkpoint-dir", os.path.join(self.folder, f"{family}{number}"), "--resume", "--check")
                for steps in ("1", "3"):
                    code, _, output, errors = self.from_weights(folder, *way, *run, "--steps", steps)
                    self.assertEqual(code, 0, f"{family} {way}: {output}{errors}")
                    self.assertIn("EQUAL in every bit to the golden run", output)

    def test_the_first_loss_in_bfloat16_is_as_exact_as_that_of_the_package_at_1024_tokens(self):
        sizes = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_((torch.randn_like(parameter) * 0.3 + ("norm" in name)).bfloat16())
        folder, tokens = os.path.join(self.folder, "long"), torch.arange(1025) * 31 % 256
        model.save_pretrained(folder)

        def loss_in(dtype):
            with torch.no_grad():
                logits = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()(tokens[None, :1024]).logits[0].float()
            return torch.nn.functional.cross_entropy(logits, tokens[1:]).item()

        data = self.write("long.bin", struct.pack("<1025H", *tokens.tolist()))
        losses, _ = self.losses_from(folder, "--data", data, "--seq", "1024", "--global-batch", "1", "--microbatch", "1",
                                     "--mesh", "dp_shard=1", "--steps", "1", "--precision", "bf16")
        true = loss_in(torch.float32)
        self.assertLessEqual(abs(losses[0] - true), 1.5 * abs(loss_in(torch.bfloat16) - true) + 1e-3)

    def test_an_entry_of_a_config_changes_the_first_loss_as_in_the_package_or_is_refused(self):
        linear, yarn = ({"rope_type": kind, "factor": 4.0, "rope_theta": 1e4} for kind in ("linear", "yarn"))
        changes = {"llama": [{"rms_norm_eps": 0.1}, {"rope_scaling": linear}, {"rope_scaling": yarn}, {"is_causal": False},
                             {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}, {"hidden_act": "gelu"},
                             {"rope_parameters": {**SLOWED, "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
                             {"rope_scaling": {**SLOWED, "factor": 2.0}}, {"initializer_range": 0.5}, {"pretraining_tp": 2},
                             {"attention_bias": True}, {"final_logit_softcapping": 1.0}, {"sliding_window": 2},
                             {"quantization_config": {"quant_method": "fp8"}}, {"pad_token_id": 3, "eos_token_id": [1, 2]}],
                   "qwen2": [{"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, {"use_mrope": False},
                             {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}],
                   "gpt2": [{"activation_function": "gelu"}, {"scale_attn_weights": False}, {"layer_norm_epsilon": 0.1},
                            {"scale_attn_by_inverse_layer_idx": True}, {"reorder_and_upcast_attn": True}, {"resid_pdrop": 0.5}]}
        taken = 0
        for family in changes:
            _, folder = self.saved(family)
            path = os.path.join(folder, "config.json")
            with open(path, encoding="utf-8") as file:
                described = json.load(file)
            for change in changes[family]:
                with open(path, "w", encoding="utf-8") as file:
                    json.dump({**described, **change}, file)
                code, lines, _, errors = self.from_weights(folder, "--steps", "1")
                if code == 2:
                    self.assertIn("config.json", errors)
                    continue
                self.assertEqual(code, 0, f"{change}: {errors}")
                model = AutoModelForCausalLM.from_pretrained(folder).eval()
                self.assertAlmostEqual(lines[1]["loss"], loss_of(model), places=4, msg=f"{family}: {change}")
                taken += 1
        self.assertGreaterEqual(taken, 8)

    def test_a_file_of_options_names_the_folder_and_the_golden_run_starts_there(self):
        _, folder = self.saved("qwen2")
        config = os.path.join(self.folder, "run.toml")
        with open(config, "w", encoding="utf-8") as file:
            file.write(f'weights = "{folder}"\nsteps = 2\ncheck = true\n')
        code, _, output, errors = self.from_weights("", "--config", config)
        self.assertEqual(code, 0, output + errors)
        self.assertIn("EQUAL in every bit to the golden run", output)
        resolved = subprocess.run([SHARDPROOF, "train", "--config", config, "--print-config"], capture_output=True, text=True)
        self.assertRegex(resolved.stdout, rf'(?m)^weights ?= ?"{re.escape(folder)}"$')

    def test_a_run_is_resumed_without_the_folder_and_without_a_model(self):
        _, folder = self.saved("llama")
        run = os.path.join(self.folder, "run")
        whole, _ = self.losses_from(folder, "--steps", "4")
        self.losses_from(folder, "--steps", "2", "--checkpoint-dir", run)
        shutil.rmtree(folder)
        shutil.copytree(run, run + "_again")
        rest, output = self.losses_from(folder, "--steps", "4", "--checkpoint-dir", run, "--resume")
        self.assertEqual(rest, whole[2:])
        self.assertIn(f"begin  without the weights in {folder}: the checkpoint has what they became\n", output)
        rest, output = self.losses_from("", "--steps", "4", "--checkpoint-dir", run + "_again", "--resume")
        self.assertEqual(rest, whole[2:])
        self.assertNotIn("begin", output)

    def test_a_model_said_in_part_starts_a_run_and_resumes_it(self):
        _, folder = self.saved("gpt2")
        part = ("--model", "gpt(layers=2,heads=4)", "--checkpoint-dir", os.path.join(self.folder, "run"))
        whole, _ = self.losses_from(folder, "--steps", "3")
        self.losses_from(folder, "--steps", "2", *part)
        rest, _ = self.losses_from(folder, "--steps", "3", *part, "--resume")
        self.assertEqual(rest, whole[2:])

    def test_text_goes_on_as_the_package_goes_on(self):
        model, folder = self.saved("qwen3")
        prompt, expected = [5, 250, 17], [5, 250, 17]
        for _ in range(8):
            with torch.no_grad():
                expected.append(model(torch.tensor([expected])).logits[0, -1].argmax().item())
        for mesh in ("dp_shard=1", "dp_shard=2"):
            done = subprocess.run([SHARDPROOF, "sample", "--weights", folder, "--prompt-tokens", *map(str, prompt), "--length",
                                   "8", "--temperature", "0", "--mesh", mesh], capture_output=True, text=True)
            self.assertEqual(done.stdout.split(), [str(token) for token in expected[3:]], done.stderr)
        for words, arguments in (("Give --prompt-tokens, which the tokenizer makes of text", ("--weights", folder)),
                                 ("and not both", ("--weights", folder, folder)), ("give a checkpoint", ()),
                                 ("65 tokens of context, and the model of",
                                  ("--weights", folder, "--prompt-tokens", "1", "2", "3", "--length", "63"))):
            done = subprocess.run([SHARDPROOF, "sample", *arguments], capture_output=True, text=True)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn(words, done.stderr)

    def refused(self, words, *arguments):
        code, _, output, errors = self.from_weights(*arguments)
        self.assertEqual(code, 2, output + errors)
        self.assertIn(words, errors)
        self.assertLessEqual(len(errors.strip().splitlines()), 3, errors)

    def test_what_does_not_fit_is_refused_by_its_name(self):
        _, folder = self.saved("gpt2")
        self.refused("there is no such folder", os.path.join(self.folder, "nowhere"))
        self.refused("this folder has no config.json, so it is not that of a Hugging Face model", self.folder)
        self.refused("this is a file, and no folder", os.path.join(folder, "config.json"))
        self.refused("--model has heads=2, and", folder, "--model", "gpt(layers=2,heads=2)")
        self.refused("--model is a llama, and", folder, "--model", "llama(layers=2)")
        self.refused("expert_lean=0.25, and routers have the biases of --weights", folder, "--model",
                     "llama(experts=4,score=sigmoid,expert_lean=0.25)")
        self.refused("the model has 64 positions, too few for sequences of 65", folder, "--seq", "65")
        other = self.write("other.bin", struct.pack("<400H", *(i % 305 for i in range(400))))
        self.refused("is 300, and the model has vocab=300", folder, "--data", other, "--mesh", "dp_shard=2")
        text = self.write("text", b"letters " * 200)
        self.refused(f"there is no {folder}/tokenizer.json", folder, "--data", text, "--token-type", "uint8")
        config = os.path.join(folder, "config.json")
        with open(config, encoding="utf-8") as file:
            described = json.load(file)
        with open(config, "w", encoding="utf-8") as file:
            json.dump(dict(described, n_layer=3), file)
        self.refused("The weights may be those of another model, or of another family (known are gpt2, ", folder)
        os.remove(os.path.join(folder, "model.safetensors"))
        self.refused(folder, folder, "--mesh", "dp_shard=2")


if __name__ == "__main__":
    unittest.main()
