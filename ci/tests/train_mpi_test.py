"""`shardproof train` with ranks that are processes does what it does with ranks that are threads."""
import json
import os
import signal
import subprocess
import unittest

from training_runs import ENVIRONMENT, SHARDPROOF, TrainingRuns


class TrainMpi(TrainingRuns):
    def test_processes_read_and_learn_what_threads_do(self):
        runs = []
        for backend in (("--mesh", "dp_shard=2"), ("--backend", "mpi", "--ranks", "2")):
            code, lines, output, errors = self.train("--shuffle", "--check", *backend)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
            runs.append((self.losses(lines), self.checksums(lines)))
        self.assertEqual(*runs)

    def test_held_out_data_and_norms_are_measured_over_processes(self):
        runs = []
        for backend in (("--mesh", "dp_shard=2"), ("--backend", "mpi", "--ranks", "2")):
            code, lines, output, errors = self.train("--validation-part", "0.2", "--check", *backend)
            self.assertEqual(code, 0, output + errors)
            last = json.loads(lines[-2])
            runs.append([last[name] for name in ("validation_loss", "zero_gradients", "held_bytes", "lr")])
        self.assertIsNotNone(runs[0][0])
        self.assertEqual(*runs)

    def test_a_signal_to_the_launcher_stops_all_ranks_and_threads_go_on(self):
        folder = os.path.join(self.folder, "run")
        process, report = self.begin("--backend", "mpi", "--ranks", "2", "--checkpoint-dir", folder)
        self.after_steps(process, report, 3)
        process.send_signal(signal.SIGUSR1)
        done, output = self.stopped(process, report)
        self.assertEqual(os.listdir(folder), [f"step_{done}"], output)
        code, lines, output, errors = self.train("--checkpoint-dir", folder, "--mesh", "dp_shard=4", "--steps", str(done + 1),
                                                 "--resume")
        self.assertEqual(code, 0, output + errors)
        self.assertEqual(json.loads(lines[1])["step"], done)

    def test_a_sample_of_processes_is_that_of_threads(self):
        folder = os.path.join(self.folder, "run")
        code, _, output, errors = self.train("--checkpoint-dir", folder)
        self.assertEqual(code, 0, output + errors)
        texts = []
        for ranks in (("--mesh", "dp_shard=2"), ("--backend", "mpi", "--ranks", "2")):
            done = subprocess.run([SHARDPROOF, "sample", folder, "--prompt", "ab", "--length", "20", *ranks], env=ENVIRONMENT,
                                  stdin=subprocess.DEVNULL, capture_output=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            texts.append(done.stdout)
        self.assertEqual(*texts)


if __name__ == "__main__":
    unittest.main()
