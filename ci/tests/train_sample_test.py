"""`shardproof sample`: text from what `train` saved."""
import json
import os
import struct
import subprocess
import unittest

from training_runs import MODEL, SHARDPROOF, TrainingRuns

LETTERS = "abcde"


class TrainSample(TrainingRuns):
    def sample(self, *arguments):
        done = subprocess.run([SHARDPROOF, "sample", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", check=False)
        return done.returncode, done.stdout, done.stderr

    def trained(self, *arguments, steps="200", model=MODEL):
        """The folder of a model that has learned the alphabet's first letters by heart."""
        folder = os.path.join(self.folder, f"run{len(os.listdir(self.folder))}")
        if not arguments:
            arguments = ("--data", self.write("letters", LETTERS.encode() * 20))
        code, _, output, errors = self.train("--steps", steps, "--lr", "0.03", "--checkpoint-dir", folder, *arguments,
                                             model=model)
        self.assertEqual(code, 0, output + errors)
        return folder

    def test_what_was_learned_by_heart_is_said_again_whatever_the_ranks(self):
        folder = self.trained()
        expected = (LETTERS * 6)[2:2 + 2 + 24] + "\n"
        greedy = ("--prompt", "cd", "--length", "24", "--temperature", "0")
        for where in (folder, os.path.join(folder, "step_200")):
            for mesh in ((), ("--mesh", "dp_shard=3"), ("--mesh", "dp_replicate=2,dp_shard=2", "--strategy", "hsdp")):
                self.assertEqual(self.sample(where, *greedy, *mesh), (0, expected, ""))
        self.assertEqual(self.sample(folder, "--prompt", "cd", "--length", "24", "--top-k", "1"), (0, expected, ""))
        self.assertEqual(self.sample(folder, "--prompt", "cd", "--length", "0"), (0, "cd\n", ""))

    def test_draws_depend_on_the_seed_and_the_temperature_alone(self):
        folder = self.trained(steps="2")
        report = os.path.join(self.folder, "sample.json")

        def tokens(*arguments):
            code, _, errors = self.sample(folder, "--length", "30", "--json", report, *arguments)
            self.assertEqual(code, 0, errors)
            with open(report, encoding="utf-8") as file:
                return json.load(file)["tokens"]

        first = tokens("--seed", "5")
        self.assertEqual(len(first), 30)
        self.assertEqual(tokens("--seed", "5", "--mesh", "dp_shard=2"), first)
        self.assertNotEqual(tokens("--seed", "6"), first)
        self.assertGreater(len(set(first)), len(set(tokens("--seed", "5", "--temperature", "0.02"))))
        self.assertLessEqual(len(set(tokens("--seed", "5", "--top-k", "2", "--prompt-tokens", "97"))), 30)

    def test_a_model_of_tokens_is_sampled_in_tokens(self):
        path = self.write("t.bin", struct.pack("<300H", *(600 + i % 5 for i in range(300))))
        folder = self.trained("--data", path, "--token-type", "uint16",
                              model="gpt(layers=1,hidden=8,heads=2,vocab=700,positions=6)")
        code, output, errors = self.sample(folder, "--prompt-tokens", "600", "601", "--length", "6", "--temperature", "0")
        self.assertEqual((code, output, errors), (0, "602 603 604 600 601 602\n", ""))
        for words, arguments in (("give --prompt-tokens", ("--prompt", "x")),
                                 ("token 700 of the prompt is none of the model's 700", ("--prompt-tokens", "700"))):
            code, _, errors = self.sample(folder, *arguments)
            self.assertEqual(code, 2)
            self.assertIn(words, errors)

    def test_what_makes_no_sense_is_refused(self):
        folder = self.trained(steps="1")
        for words, arguments in (("--temperature must be 0 or above", ("--temperature", "-1")),
                                 ("--length must not be negative", ("--length", "-2")),
                                 ("--top-k must be at least 1", ("--top-k", "-2")),
                                 ("whatever mesh they were trained on", ("--mesh", "tp=2")),
                                 ("at least one token", ("--prompt", "")),
                                 ("exclude each other", ("--prompt", "a", "--prompt-tokens", "3"))):
            code, _, errors = self.sample(folder, *arguments)
            self.assertEqual(code, 2, words)
            self.assertIn(words, errors)
        code, _, errors = self.sample(os.path.join(self.folder, "data"))
        self.assertEqual(code, 2)
        self.assertIn(".metadata", errors)


if __name__ == "__main__":
    unittest.main()
