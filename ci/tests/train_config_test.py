"""`shardproof train --config FILE` and --print-config."""
import json
import os
import tomllib
import unittest

from training_runs import MODEL, TrainingRuns


class TrainConfig(TrainingRuns):
    def config(self, text):
        path = os.path.join(self.folder, "run.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def printed(self, *arguments):
        code, lines, output, errors = self.train("--print-config", *arguments)
        self.assertEqual((code, lines, errors), (0, [], ""))
        return output, tomllib.loads(output)

    def test_a_file_gives_options_and_the_command_line_has_the_last_word(self):
        path = self.config(f"""# A run.
lr = 0.004          # the rate
schedule = "cosine"
warmup = 2
clip = 0.5
shuffle = true
set = ["offload=pinned", "bucket_count=2"]
check = true
mesh = "dp_shard=3"
global-batch = 18
validation-data = ["{self.write('x', b'abcdefgh')}", "{self.write('y', b'abcdefgh')}"]
""")
        from_file = self.train("--config", path, "--clip", "2", "--mesh", "dp_shard=1")
        self.assertEqual(from_file[0], 0, from_file[3])
        self.assertIn("EQUAL in every bit", from_file[2])
        as_options = self.train(
            "--lr", "0.004", "--schedule", "cosine", "--warmup", "2", "--clip", "2", "--shuffle", "--check", "--mesh",
            "dp_shard=1", "--global-batch", "18", "--set", "offload=pinned", "--set", "bucket_count=2", "--validation-data",
            *(os.path.join(self.folder, "data", name) for name in "xy"))
        self.assertEqual(as_options[0], 0, as_options[3])

        def without_times(lines):
            return [{**json.loads(line), "tokens_per_s": 0} for line in lines]
        self.assertEqual(without_times(from_file[1]), without_times(as_options[1]))

    def test_the_resolved_options_are_toml_that_gives_themselves(self):
        self.assertEqual(self.printed()[1]["lr"], 1e-3)
        asked = ("--lr", "3e-4", "--shuffle", "--strategy", "zero2", "--check=fingerprint", "--schedule", "wsd")
        text, values = self.printed(*asked)
        for name, value in (("lr", 3e-4), ("shuffle", True), ("resume", False), ("strategy", "zero2"), ("check", "fingerprint"),
                            ("model", MODEL), ("mesh", "dp_shard=2"), ("steps", 3), ("clip", 1), ("schedule", "wsd"),
                            ("data", os.path.join(self.folder, "data"))):
            self.assertEqual(values[name], value, name)
        self.assertIn("# the learning rate\n", text)
        again = self.train("--print-config", "--config", self.config(text))
        self.assertEqual(again[0], 0, again[3])
        self.assertEqual(tomllib.loads(again[2]), values)
        code, _, output, errors = self.train("--config", self.config(text))
        self.assertEqual(code, 0, errors)
        self.assertIn("the check of replicas found nothing wrong", output)

    def test_a_number_sign_within_quotes_is_no_comment(self):
        for quote in ('"', "'"):
            given = self.config(f"checkpoint-dir = {quote}runs/exp#1{quote}  # 'the first'\nlr = 1e-3# \"the rate\n")
            text, values = self.printed("--config", given)
            self.assertEqual((values["checkpoint-dir"], values["lr"]), ("runs/exp#1", 1e-3))
            self.assertEqual(self.printed("--config", self.config(text))[1], values)

    def test_a_line_of_json_that_cannot_be_written_is_an_error(self):
        code, _, _, errors = self.train("--json", "/dev/full")
        self.assertEqual(code, 2, errors)
        self.assertIn("writing a line of --json failed: No space left on device", errors)

    def test_what_a_file_cannot_say_is_refused_with_its_name(self):
        for text, words in (("learning-rate = 1", "run.toml: there is no option 'learning-rate'."),
                            ("warm-up = 1", "there is no option 'warm-up'. Did you mean 'warmup'?"),
                            ("config = 'x'", "there is no option 'config'."),
                            ("[train]\nlr = 1", "tables such as [train] mean nothing here"),
                            ("lr = 1\nlr = 2", "--lr: At Most 1 required but received 2"),
                            ("lr = 1\nclip = 2\nlr = 2", "'lr' is there twice")):
            self.expect_refused(words, "--config", self.config(text))
        self.expect_refused("cannot read /nowhere.toml", "--config", "/nowhere.toml")
        code, _, _, errors = self.train("--config", self.config("warmup = many"))
        self.assertEqual(code, 2)
        self.assertIn("--warmup", errors)


if __name__ == "__main__":
    unittest.main()
