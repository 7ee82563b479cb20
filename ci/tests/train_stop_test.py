"""A run of `shardproof train` that is told to stop saves, and goes on later on another mesh."""
import json
import os
import signal
import unittest

from training_runs import TrainingRuns


class TrainStop(TrainingRuns):
    def test_each_of_the_signals_saves_and_any_mesh_goes_on(self):
        for number, (name, mesh) in enumerate((("SIGTERM", "dp_shard=3"), ("SIGINT", "dp_shard=4"), ("SIGUSR1", "dp_shard=1"))):
            folder = os.path.join(self.folder, f"run{number}")
            common = ("--checkpoint-dir", folder, "--shuffle", "--global-batch", "12", "--microbatch", "1")
            process, report = self.begin(*common, "--mesh", "dp_shard=2")
            self.after_steps(process, report, 3)
            process.send_signal(getattr(signal, name))
            done, output = self.stopped(process, report)
            self.assertIn(f"--resume goes on from {folder}/step_{done}", output)
            self.assertEqual(os.listdir(folder), [f"step_{done}"])
            if done > 2000:
                continue  # the check would train them all again
            code, lines, output, errors = self.train(
                *common, "--mesh", mesh, "--steps", str(done + 2), "--resume", "--check")
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
            self.assertEqual(json.loads(lines[1])["step"], done)

    def test_without_a_folder_nothing_is_saved_and_the_run_says_so(self):
        process, report = self.begin("--mesh", "dp_shard=2")
        self.after_steps(process, report, 1)
        process.send_signal(signal.SIGTERM)
        self.assertIn("nothing was saved", self.stopped(process, report)[1])

    def test_a_signal_that_several_programs_pass_on_is_one_request(self):
        folder = os.path.join(self.folder, "passed_on")
        process, report = self.begin("--checkpoint-dir", folder, "--mesh", "dp_shard=2")
        self.after_steps(process, report, 2)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        done, output = self.stopped(process, report)
        self.assertIn(f"--resume goes on from {folder}/step_{done}", output)

    def test_a_checked_run_stops_as_well(self):
        process, report = self.begin("--check", "--mesh", "dp_shard=2")
        self.after_steps(process, report, 2)
        process.send_signal(signal.SIGINT)
        output = self.stopped(process, report)[1]
        self.assertIn("EQUAL in every bit", output)


if __name__ == "__main__":
    unittest.main()
