"""`shardproof train --precision bf16` and `--recompute`: the golden run's bits, and no step that is another one's."""
import json
import os
import unittest

from training_runs import TrainingRuns


class TrainPrecision(TrainingRuns):
    def test_bf16_with_main_parameters_trains_to_the_golden_bits_under_every_strategy(self):
        for strategy in ("ddp", "zero1", "zero3"):
            code, lines, output, errors = self.train(
                "--precision", "bf16", "--strategy", strategy, "--check", "--mesh", "dp_shard=3", "--global-batch", "18")
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output.splitlines()[-1])
            self.assertIn(", bf16", output.splitlines()[0])
            self.assertTrue(json.loads(lines[-1])["equal"])

    def test_bf16_rounds_and_float32_does_not(self):
        runs = [self.train("--precision", precision) for precision in ("float32", "bf16")]
        losses = [[json.loads(line)["loss"] for line in lines[1:-1]] for _, lines, _, _ in runs]
        self.assertNotEqual(losses[0], losses[1])
        for one, other in zip(*losses):
            self.assertAlmostEqual(one, other, delta=0.05)

    def test_recomputation_changes_no_bit(self):
        for precision in ("float32", "bf16"):
            runs = [self.train("--precision", precision, "--check", *recompute) for recompute in ((), ("--recompute",))]
            for code, _, output, errors in runs:
                self.assertEqual(code, 0, output + errors)
            self.assertEqual(self.losses(runs[0][1]), self.losses(runs[1][1]))
            self.assertIn(", recomputing", runs[1][2].splitlines()[0])

    def test_recomputed_attention_and_activations_in_the_hosts_memory_change_no_bit(self):
        plain = self.losses(self.train("--check")[1])
        for options in (("--recompute=attention",), ("--recompute=**.c_fc",), ("--offload-activations",),
                        ("--recompute", "--offload-activations"),
                        ("--recompute=attention", "--offload-activations", "--precision", "bf16")):
            code, lines, output, errors = self.train("--check", *options)
            self.assertEqual(code, 0, output + errors)
            if "bf16" not in options:
                self.assertEqual(self.losses(lines), plain)
            first = output.splitlines()[0]
            self.assertEqual(", activations on the host" in first, "--offload-activations" in options)
            self.assertEqual(", recomputing attention" in first, "--recompute=attention" in options)

    def test_gradients_that_are_made_later_change_no_bit(self):
        plain = self.losses(self.train("--check")[1])
        for bytes_max, *options in (("1GiB",), ("1GiB", "--recompute"), ("20KiB",)):
            code, lines, output, errors = self.train("--check", "--set", f"delayed_gradient_bytes_max={bytes_max}", *options)
            self.assertEqual(code, 0, output + errors)
            self.assertEqual(self.losses(lines), plain)
            self.assertIn(", delayed_gradient_bytes_max=", output.splitlines()[0])

    def test_options_of_fully_shard_keep_the_bits_and_those_of_sums_are_refused(self):
        plain = self.losses(self.train("--check")[1])
        for texts in (("keep_whole_numel_max=300", "bucket_count=2"), ("alignment_bytes=64", "publish=at_first_use")):
            code, lines, output, errors = self.train("--check", *(word for text in texts for word in ("--set", text)))
            self.assertEqual(code, 0, output + errors)
            self.assertEqual(self.losses(lines), plain)
        for text in ("numerics=ordered", "gradient_divide=3", "divide=before", "divide_by_tokens=true",
                     "reduce_replicas_every_microbatch=true"):
            self.expect_refused("train decides how sums", "--set", text)

    def test_a_pattern_of_recomputed_modules_that_fits_none_is_refused(self):
        self.expect_refused("--recompute=nothing.* fits no module", "--recompute=nothing.*")

    def test_a_run_goes_on_in_its_precision_on_another_mesh_and_in_no_other(self):
        folder = os.path.join(self.folder, "run")
        first = self.train("--precision", "bf16", "--checkpoint-dir", folder, "--steps", "2")
        self.assertEqual(first[0], 0, first[3])
        self.expect_refused("saved with --precision 'bf16', and this run has no --precision", "--checkpoint-dir", folder,
                            "--resume")
        code, _, output, errors = self.train(
            "--precision", "bf16", "--checkpoint-dir", folder, "--resume", "--mesh", "dp_shard=4", "--steps", "4", "--check")
        self.assertEqual(code, 0, output + errors)
        self.assertIn("EQUAL in every bit", output)

    def test_another_precision_is_refused_and_the_nearest_suggested(self):
        self.expect_refused("--precision must be float32 or bf16, got 'bf61'. Did you mean 'bf16'?", "--precision", "bf61")
        self.expect_refused("leave out --precision bf16", "--precision", "bf16", "--arithmetic", "canonical")


if __name__ == "__main__":
    unittest.main()
