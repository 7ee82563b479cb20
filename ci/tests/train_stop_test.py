"""A run of `shardproof train` that is told to stop saves, and goes on later on another mesh."""
import json
import os
import signal
import time
import unittest

from training_runs import DEADLINE_S, STOPPED, TrainingRuns


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

    def validating(self, name, *arguments, **options):
        """A run that takes minutes to validate after its first step, in the midst of it, and the folder of its checkpoints."""
        held_out = os.path.join(self.folder, "held_out")
        with open(held_out, "wb") as file:
            file.write(os.urandom(20_000_000))
        folder = os.path.join(self.folder, name)
        process, report = self.begin("--checkpoint-dir", folder, "--validation-data", held_out, "--validate-every", "1",
                                     "--mesh", "dp_shard=2", *arguments, **options)
        return process, report, folder

    def test_a_run_that_validates_saves_at_once_and_gives_no_loss_of_a_part(self):
        for name, arguments in (("saved before", ("--save-every", "1")), ("saved now", ("--check",))):
            process, report, folder = self.validating(name, *arguments)
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline and not os.path.exists(os.path.join(folder, "step_1")):
                time.sleep(0.02)
                if name == "saved now" and os.path.exists(report) and os.path.getsize(report) > 0:
                    time.sleep(2)
                    break
            process.send_signal(signal.SIGTERM)
            done, output = self.stopped(process, report)
            self.assertEqual(done, 1)
            self.assertEqual(os.listdir(folder), ["step_1"])
            with open(report, encoding="utf-8") as file:
                self.assertIsNone(json.loads(file.read().splitlines()[1])["validation_loss"])

    def test_a_run_whose_last_validation_is_cut_short_is_through(self):
        process, _, folder = self.validating("run", steps="1")
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and not os.path.exists(os.path.join(folder, "step_1")):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=DEADLINE_S)
        self.assertEqual(process.returncode, 0, output)
        self.assertIn("asked to stop: no loss was taken", output)

    def test_a_run_that_repeats_its_golden_steps_stops_before_its_own(self):
        folder = os.path.join(self.folder, "run")
        common = ("--checkpoint-dir", folder, "--mesh", "dp_shard=2")
        process, report = self.begin(*common)
        self.after_steps(process, report, 2500)
        process.send_signal(signal.SIGTERM)
        saved, _ = self.stopped(process, report)
        process, report = self.begin(*common, "--resume", "--check")
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and not os.path.exists(report):
            time.sleep(0.02)
        time.sleep(0.5)  # it repeats 2,500 steps now
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=DEADLINE_S)
        self.assertEqual(process.returncode, STOPPED, output)
        self.assertIn(f"stopped after {saved} of 1000000 steps; --resume goes on from {folder}/step_{saved}", output)
        self.assertNotIn("EQUAL", output)
        self.assertEqual(os.listdir(folder), [f"step_{saved}"])

    def test_a_checked_run_stops_as_well(self):
        process, report = self.begin("--check", "--mesh", "dp_shard=2")
        self.after_steps(process, report, 2)
        process.send_signal(signal.SIGINT)
        output = self.stopped(process, report)[1]
        self.assertIn("EQUAL in every bit", output)


if __name__ == "__main__":
    unittest.main()
