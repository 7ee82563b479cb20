"""The loss of held-out data, and the learning rate, of `shardproof train`."""
import json
import math
import os
import unittest

from training_runs import TrainingRuns, data_checksum

SCHEDULES = {
    "constant": lambda step, warmup, total, last: 1,
    "cosine": lambda step, warmup, total, last:
        last + (1 - last) * (1 + math.cos(math.pi * min(1, (step - warmup) / (total - warmup)))) / 2,
    "linear": lambda step, warmup, total, last: last + (1 - last) * (1 - min(1, (step - warmup) / (total - warmup))),
    "wsd": lambda step, warmup, total, last:
        1 if step < total - 3 else last + (1 - last) * (1 - min(1, (step - total + 3) / 3)),
    "inverse-sqrt": lambda step, warmup, total, last: math.sqrt(warmup / (step + 1)),
}


class TrainValidation(TrainingRuns):
    def steps(self, *arguments, **options):
        code, lines, output, errors = self.train(*arguments, **options)
        self.assertEqual(code, 0, output + errors)
        return [json.loads(line) for line in lines[1:-1]], output

    def test_held_out_sequences_are_never_trained_on_and_training_does_not_depend_on_them(self):
        steps, output = self.steps("--validation-part", "0.2", "--steps", "9", "--shuffle", "--microbatch", "4")
        self.assertIn("46 sequences of 6, shuffled, 11 to validate with;", output)
        for step in steps:
            self.assertEqual(step["data_fnv1a"], data_checksum(self.files, 6, 16, 4, 2, step["step"], seed=1, held_out=11))
        own = self.write("held_out", bytes(range(97, 123)) * 3)
        apart = os.path.join(self.folder, "apart")
        os.rename(own, apart)
        plain, _ = self.steps("--steps", "4")
        validated, _ = self.steps("--steps", "4", "--validation-data", apart, "--validate-every", "1")
        for one, other in zip(plain, validated, strict=True):
            self.assertIsNone(one.pop("validation_loss"))
            self.assertIsNotNone(other.pop("validation_loss"))
            self.assertEqual({**one, "tokens_per_s": 0}, {**other, "tokens_per_s": 0})

    def test_the_loss_is_taken_when_it_is_asked_for_and_after_the_last_step(self):
        for every, expected in (("2", {1, 3, 4}), ("0", {4}), ("9", {4})):
            steps, output = self.steps("--validation-part", "0.1", "--validate-every", every, "--steps", "5")
            self.assertEqual({step["step"] for step in steps if step["validation_loss"] is not None}, expected)
            self.assertRegex(output, r"step 5/5  loss [0-9.]+  validation loss [0-9.]+  gradient norm")

    def test_the_validation_loss_has_the_golden_bits_on_every_mesh(self):
        common = ("--validation-part", "0.3", "--validate-every", "1", "--check", "--global-batch", "12")
        for mesh, strategy in (("dp_shard=2", "zero3"), ("dp_shard=3", "zero2"), ("dp_replicate=2,dp_shard=2", "hsdp"),
                               ("dp_shard=1", "ddp"), ("dp_shard=4", "zero1")):
            microbatch = "3" if mesh in ("dp_shard=2", "dp_shard=4", "dp_shard=1") else "1"
            _, output = self.steps(*common, "--mesh", mesh, "--strategy", strategy, "--microbatch", microbatch)
            self.assertIn("EQUAL in every bit", output)

    def test_canonical_validation_losses_are_the_same_bits_however_the_model_is_cut(self):
        common = ("--validation-part", "0.3", "--validate-every", "1", "--arithmetic", "canonical", "--global-batch", "4",
                  "--microbatch", "2", "--check", "--steps", "2")
        losses = []
        for mesh, strategy in (("dp_shard=1", "ddp"), ("dp_shard=2", "zero3"), ("tp=2", "ddp"), ("dp_shard=2,tp=2", "zero3"),
                               ("cp=2", "zero1")):
            steps, output = self.steps(*common, "--mesh", mesh, "--strategy", strategy)
            self.assertIn("EQUAL in every bit", output)
            losses.append([step["validation_loss"] for step in steps])
        for other in losses[1:]:
            self.assertEqual(other, losses[0])

    def test_only_the_first_sequences_are_validated_with_where_there_are_many(self):
        def loss(*more):
            return self.steps("--validation-data", held_out, "--steps", "1", *more)[0][0]["validation_loss"]

        held_out = os.path.join(self.folder, "held_out")
        with open(held_out, "wb") as file:
            file.write(b"abcdefghijklmnopqrs")  # three sequences
        whole, first = loss(), loss("--validation-sequences", "1")
        with open(held_out, "wb") as file:
            file.write(b"abcdefg")
        self.assertNotEqual(whole, first)
        self.assertEqual(loss(), first)

    def test_schedules_are_their_formulas_and_train_to_the_golden_bits(self):
        for kind, formula in SCHEDULES.items():
            more = [] if kind in ("constant", "inverse-sqrt") else ["--lr-last", "0.25", "--schedule-steps", "8"]
            more += ["--decay-steps", "3"] if kind == "wsd" else []
            steps, output = self.steps("--schedule", kind, "--warmup", "3", "--lr", "0.004", "--steps", "9", "--check", *more)
            self.assertIn("EQUAL in every bit", output)
            for step in steps:
                done = step["step"]
                factor = (done + 1) / 3 if done < 3 else formula(done, 3, 8, 0.25)
                self.assertAlmostEqual(step["lr"], 0.004 * factor, delta=1e-12, msg=f"{kind} {done}")

    def test_a_resumed_run_keeps_its_schedule(self):
        folder = os.path.join(self.folder, "run")
        cosine = ("--schedule", "cosine", "--warmup", "2", "--checkpoint-dir", folder)
        self.steps(*cosine, "--schedule-steps", "6", "--steps", "3")
        self.expect_refused("with --schedule-steps 6, and this run has --schedule-steps 5", *cosine, "--resume", "--steps", "5")
        self.expect_refused("give --schedule 'cosine' --schedule-steps 6 --lr-last", "--checkpoint-dir", folder, "--resume",
                            "--warmup", "2", "--steps", "5")
        resumed, output = self.steps(*cosine, "--schedule-steps", "6", "--steps", "6", "--resume", "--check", "--mesh",
                                     "dp_shard=4")
        self.assertIn("EQUAL in every bit", output)
        through, _ = self.steps("--schedule", "cosine", "--warmup", "2", "--steps", "6")
        self.assertEqual([step["lr"] for step in resumed], [step["lr"] for step in through[3:]])

    def test_what_makes_no_sense_is_refused(self):
        self.expect_refused("one of constant, cosine, linear, wsd, inverse-sqrt, got 'cosin'", "--schedule", "cosin")
        self.expect_refused("--lr-last is for --schedule cosine", "--lr-last", "0.1")
        self.expect_refused("--decay-steps is for --schedule wsd", "--decay-steps", "2", "--schedule", "linear")
        self.expect_refused("--warmup 4 is longer than the schedule's 3 steps", "--schedule", "cosine", "--warmup", "4")
        self.expect_refused("--warmup must be at least 0", "--warmup", "-1")
        self.expect_refused("in [0, 2], the schedule's steps after the warm-up, got 3", "--schedule", "wsd", "--warmup", "1",
                            "--decay-steps", "3")
        self.expect_refused("need --validation-part or --validation-data", "--validate-every", "2")
        self.expect_refused("exclude each other", "--validation-part", "0.5", "--validation-data", self.folder)
        self.expect_refused("is none; raise it", "--validation-part", "0.01")


if __name__ == "__main__":
    unittest.main()
