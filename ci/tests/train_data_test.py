"""What `shardproof train` reads: files of tokens, the shuffled order, and both again after a checkpoint."""
import json
import os
import shutil
import struct
import subprocess
import unittest

from training_runs import ENVIRONMENT, MODEL, SHARDPROOF, TrainingRuns, data_checksum

TOKENS_MODEL = "gpt(layers=1,hidden=8,heads=2,vocab=700,positions=6)"


class TrainData(TrainingRuns):
    def expected(self, steps, **rule):
        return {step: data_checksum(self.files, 6, step=step, **rule) for step in steps}

    def write_elsewhere(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def write_tokens(self, name, tokens, letter):
        return self.write(name, struct.pack(f"<{len(tokens)}{letter}", *tokens))

    def test_any_program_can_repeat_the_shuffled_order_over_epochs_and_ranks(self):
        for ranks, microbatch, seed in ((1, 4, 1), (2, 2, 1), (4, 3, 2**40), (3, 4, 7)):
            code, lines, output, errors = self.train(
                "--shuffle", "--data-seed", str(seed), "--steps", "9", "--mesh", f"dp_shard={ranks}", "--microbatch",
                str(microbatch), "--global-batch", "12")
            self.assertEqual(code, 0, errors)
            self.assertIn(", shuffled;", output)
            # 57 sequences make an epoch, so the run sees the second one.
            self.assertEqual(json.loads(lines[0])["sequences"], 57)
            self.assertEqual(json.loads(lines[0])["shuffle"], seed)
            self.assertEqual(self.checksums(lines), self.expected(
                range(9), global_batch=12, microbatch=microbatch, ranks=ranks, seed=seed))

    def test_a_shuffled_run_goes_on_exactly_where_it_was_on_another_mesh(self):
        common = ("--global-batch", "12", "--canonical", "--shuffle", "--data-seed", "3")
        whole, resumed = (os.path.join(self.folder, name) for name in ("whole", "resumed"))
        code, through, _, errors = self.train(*common, "--steps", "6", "--checkpoint-dir", whole)
        self.assertEqual(code, 0, errors)
        for mesh, steps, more in (("dp_shard=3", "3", ()), ("dp_shard=1", "6", ("--resume", "--check"))):
            code, lines, output, errors = self.train(
                *common, "--steps", steps, "--mesh", mesh, "--checkpoint-dir", resumed, *more)
            self.assertEqual(code, 0, output + errors)
        self.assertIn("EQUAL in every bit", output)
        self.assertEqual(self.checksums(lines), self.expected(
            range(3, 6), global_batch=12, microbatch=2, ranks=1, seed=3))
        for step, text in self.losses(lines).items():
            self.assertEqual(text, self.losses(through)[step])
        self.expect_same_end(os.path.join(whole, "step_6"), os.path.join(resumed, "step_6"))

    def test_ranks_that_cut_a_layer_have_the_same_data_wherever_their_axis_stands_on_the_mesh(self):
        common = ("--canonical", "--arithmetic", "canonical", "--check", "--global-batch", "16", "--validation-part", "0.2",
                  "--validate-every", "2")
        runs = {}
        for mesh in ("dp_replicate=2,dp_shard=2,tp=2", "dp_replicate=2,tp=2,dp_shard=2", "tp=2,dp_shard=2,dp_replicate=2"):
            code, lines, output, errors = self.train(*common, "--mesh", mesh)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
            runs[mesh] = (self.losses(lines), self.checksums(lines))
        self.assertEqual(len(set(map(str, runs.values()))), 1, runs)

    def test_a_resumed_run_has_the_same_data_in_the_same_order(self):
        folder = os.path.join(self.folder, "run")
        self.assertEqual(self.train("--shuffle", "--checkpoint-dir", folder)[0], 0)
        again = ("--checkpoint-dir", folder, "--resume", "--steps", "4")
        self.expect_refused("it was saved with --shuffle --data-seed 1, and this run has no --shuffle. To go on, "
                            "give --shuffle --data-seed 1. Or", *again)
        self.expect_refused("saved with --shuffle --data-seed 1, and this run has --shuffle --data-seed 2. To go on, give "
                            "--shuffle --data-seed 1. Or", "--shuffle", "--data-seed", "2", *again)
        self.assertEqual(self.train("--shuffle", *again)[0], 0)
        plain = os.path.join(self.folder, "plain")
        self.assertEqual(self.train("--checkpoint-dir", plain)[0], 0)
        self.expect_refused("saved with no --shuffle, and this run has --shuffle --data-seed 1. To go on, leave out --shuffle "
                            "--data-seed 1. Or", "--shuffle", "--checkpoint-dir", plain, "--resume", "--steps", "4")
        self.expect_refused("saved with --lr 0.001, no --shuffle, and this run has --lr 0.5, --shuffle --data-seed 1. To go "
                            "on, give --lr 0.001, and leave out --shuffle", "--shuffle", "--lr", "0.5", "--checkpoint-dir",
                            plain, "--resume", "--steps", "4")

    def test_a_resumed_run_compares_what_its_data_are_and_not_what_they_are_called(self):
        data, run = os.path.join(self.folder, "data"), os.path.join(self.folder, "run")
        validation = self.write_elsewhere("validation", b"v" * 60)
        common = ("--checkpoint-dir", run, "--resume", "--validation-data", validation)
        self.assertEqual(self.train(*common)[0], 0)
        elsewhere = os.path.join(self.folder, "elsewhere")
        shutil.copytree(data, os.path.join(elsewhere, "copy"))
        os.symlink(data, os.path.join(self.folder, "0data"))
        together = self.write_elsewhere("together", b"".join(self.files[name] for name in sorted(self.files, key=os.fsencode)))
        for number, paths in enumerate((
                (os.path.join(elsewhere, "copy"),), (os.path.join(self.folder, "0data"),), (os.path.relpath(data),),
                (os.path.join(data, "b.txt"), os.path.relpath(os.path.join(data, "a")), os.path.join(data, "a", "..", "a.txt")),
                (together,))):
            code, lines, output, errors = self.train(*common, "--steps", str(4 + number), "--data", *paths)
            self.assertEqual(code, 0, output + errors)
            self.assertEqual(self.checksums(lines), self.expected(range(3 + number, 4 + number), global_batch=16, microbatch=2,
                                                                  ranks=2))
        again = ("--steps", "9")
        for name, content in self.files.items():
            for at in (0, len(content) - 1):
                changed = bytearray(content)
                changed[at] = changed[at] % 251 + 1  # no zero byte, which would make it no text
                self.write(name, bytes(changed))
                self.expect_refused("this run has --data with the fingerprint", *common, *again)
            self.files[name] = content
            self.write(name, content)
        one, other = self.files["a.txt"], self.files["b.txt"]
        self.write("a.txt", other)
        self.write("b.txt", one)
        self.expect_refused("this run has --data with the fingerprint", *common, *again)
        self.write("a.txt", one)
        self.write("b.txt", other)
        self.write_elsewhere("validation", b"w" * 60)
        self.expect_refused("this run has --validation-data with the fingerprint", *common, *again)
        self.assertEqual(self.train("--checkpoint-dir", run, "--resume", *again)[0], 0)  # or validates no more

    def test_files_of_tokens_train_to_the_golden_bits_in_the_documented_order(self):
        for letter, kind, width in (("H", "uint16", 2), ("I", "uint32", 4)):
            shutil.rmtree(os.path.join(self.folder, "data"))
            self.files.clear()
            self.write_tokens("b.bin", [(7 * i * i) % 700 for i in range(100)], letter)
            self.write_tokens("a.bin", [(11 * i) % 700 for i in range(51)], letter)
            code, lines, output, errors = self.train(
                "--token-type", kind, "--check", "--global-batch", "12", "--shuffle", model=TOKENS_MODEL)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("151 tokens in 2 files, 25 sequences of 6, shuffled", output)
            self.assertEqual(self.checksums(lines), self.expected(
                range(3), global_batch=12, microbatch=2, ranks=2, seed=1, width=width))

    def test_tokens_that_are_not_the_models_are_refused_wherever_they_are_found(self):
        path = self.write_tokens("t.bin", [i % 700 for i in range(120)] + [700, 1, 2], "H")
        for mesh in ("dp_shard=1", "dp_shard=3"):
            self.expect_refused(f"token 120 of {path} is 700, and the model has vocab=700", "--data", path, "--token-type",
                                "uint16", "--mesh", mesh, "--global-batch", "6", "--steps", "9", "--microbatch", "1",
                                model=TOKENS_MODEL)
        self.expect_refused(f"{path} may hold tokens or bytes: add --token-type uint16, uint32 or uint8", "--data", path)
        self.assertEqual(self.train("--data", path, "--token-type", "uint8")[0], 0)
        self.expect_refused("uint8, uint16 or uint32, got 'int8'", "--data", path, "--token-type", "int8")
        self.expect_refused("which is no multiple of the 4 bytes of a uint32 token", "--data", self.write("u.bin", b"abcdef"),
                            "--token-type", "uint32")
        folder = os.path.dirname(self.write("c/d", b"ab"))
        self.expect_refused("no .bin files under", "--token-type", "uint16", "--data", folder)
        self.expect_refused("--data-seed needs --shuffle", "--data-seed", "4")

    def test_without_data_it_trains_on_a_text_that_the_program_makes_wherever_it_runs(self):
        command = [SHARDPROOF, "train", "--model", MODEL, "--seq", "6", "--steps", "1", "--json", "-", "--quiet"]
        lines = set()
        for environment in (ENVIRONMENT, {"PATH": "/nowhere"}):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True, cwd="/",
                                  env=environment)
            run, step = (json.loads(line) for line in done.stdout.splitlines()[:2])
            self.assertEqual((run["files"], run["bytes"]), (1, 2**20))
            lines.add((step["loss"], step["data_fnv1a"]))
        self.assertEqual(len(lines), 1)
        done = subprocess.run([*command, "--token-type", "uint16"], capture_output=True, text=True, check=False)
        self.assertIn("--token-type uint16 needs --data", done.stderr)


if __name__ == "__main__":
    unittest.main()
