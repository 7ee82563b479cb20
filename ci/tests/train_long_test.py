"""Five hundred steps in canonical arithmetic: one curve on every mesh, through kills and a change of the mesh."""
import json
import os
import re
import signal
import subprocess
import sysconfig
import time
import unittest

from training_runs import ENVIRONMENT, SHARDPROOF, TrainingRuns

MODEL = "gpt(layers=2,hidden=32,heads=4,vocab=256,positions=32,tied)"
STEPS = int(os.environ.get("SHARDPROOF_LONG_STEPS", "500"))
DEADLINE_S = 7200


class TrainLong(TrainingRuns):
    def start(self, mesh, strategy, folder, *more):
        """A run on the sources of Python's standard library, and the file of its steps."""
        report = os.path.join(self.folder, f"steps_{len(os.listdir(self.folder))}.json")
        with open(report + ".log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(  # pylint: disable=consider-using-with
                [SHARDPROOF, "train", "--data", sysconfig.get_paths()["stdlib"], "--model", MODEL, "--seq", "32",
                 "--global-batch", "8", "--microbatch", "2", "--arithmetic", "canonical", "--shuffle",
                 "--validation-part", "0.001", "--validation-sequences", "8",
                 "--validate-every", str(STEPS // 10), "--steps", str(STEPS), "--mesh", mesh, "--strategy", strategy,
                 "--checkpoint-dir", folder, "--save-every", str(STEPS // 20), "--keep", "2", "--json", report, *more],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        self.addCleanup(process.kill)
        return process, report

    def steps(self, report):
        """Of each step that was written whole: the texts of its losses."""
        if not os.path.exists(report):
            return {}
        with open(report, encoding="utf-8") as file:
            lines = [line for line in file if '"type":"step"' in line and line.endswith("\n")]
        return {json.loads(line)["step"]: re.findall(r'"((?:validation_)?loss)":([-+.0-9e]+)', line) for line in lines}

    def finish(self, process, report):
        code = process.wait(DEADLINE_S)
        with open(report + ".log", encoding="utf-8") as file:
            self.assertEqual(code, 0, file.read()[-2000:])
        return self.steps(report)

    def kill_after(self, step, process, report):
        """SIGKILL once that step is done."""
        deadline = time.monotonic() + DEADLINE_S
        while not any(done >= step for done in self.steps(report)):
            self.assertIsNone(process.poll(), f"the run ended before step {step}")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        self.assertEqual(process.wait(DEADLINE_S), -signal.SIGKILL)
        return self.steps(report)

    def expect_part(self, steps, whole, first_min, first_max):
        """These steps have the bits of the whole run, and begin where a run begins that goes on from a checkpoint."""
        self.assertLessEqual(first_min, min(steps))
        self.assertLessEqual(min(steps), first_max)
        for step, losses in steps.items():
            self.assertEqual(losses, whole[step], step)

    def expect_one_curve(self, begins, ends):
        """Killed twice on one mesh, a run ends on another mesh with the losses of the run that is whole and never stops."""
        begun = time.monotonic()
        folder, run = os.path.join(self.folder, "whole"), os.path.join(self.folder, "run")
        whole = self.finish(*self.start("dp_shard=1", "ddp", folder))
        self.assertEqual(set(whole), set(range(STEPS)))
        validated = [float(dict(losses)["validation_loss"]) for losses in whole.values() if len(losses) == 2]
        self.assertEqual(len(validated), 10)
        self.assertLess(validated[-1], validated[0])
        one = self.kill_after(STEPS // 4, *self.start(*begins, run))
        self.expect_part(one, whole, 0, 0)
        two = self.kill_after(STEPS // 2, *self.start(*begins, run, "--resume"))
        self.expect_part(two, whole, 1, max(one) + 1)
        three = self.finish(*self.start(*ends, run, "--resume"))
        self.expect_part(three, whole, STEPS // 4, max(two) + 1)
        self.assertEqual(max(three), STEPS - 1)
        self.expect_same_end(os.path.join(folder, f"step_{STEPS}"), os.path.join(run, f"step_{STEPS}"))
        print(f"{STEPS} steps, {begins} to {ends}: validation losses {validated[0]:.4f} to {validated[-1]:.4f} "
              f"in {len(validated)} of {len(validated)} the same bits; killed after steps {max(one) + 1} and {max(two) + 1}, "
              f"resumed at {min(two)} and {min(three)}; {time.monotonic() - begun:.0f} s")

    def test_zero3_on_2_ranks_has_the_curve_of_the_unsharded_run_through_kills_and_a_change_of_the_mesh(self):
        self.expect_one_curve(("dp_shard=2", "zero3"), ("dp_shard=4", "zero1"))

    def test_tp_on_2_ranks_has_the_curve_of_the_unsharded_run_through_kills_and_a_change_of_the_mesh(self):
        self.expect_one_curve(("tp=2", "ddp"), ("dp_shard=2", "zero3"))

    def test_tp_times_zero3_has_the_curve_of_the_unsharded_run_through_kills_and_a_change_of_the_mesh(self):
        self.expect_one_curve(("dp_shard=2,tp=2", "zero3"), ("dp_replicate=2,tp=2", "ddp"))


if __name__ == "__main__":
    unittest.main()
