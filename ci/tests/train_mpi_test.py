"""`shardproof train` with ranks that are processes does what it does with ranks that are threads."""
import unittest

from training_runs import TrainingRuns


class TrainMpi(TrainingRuns):
    def test_processes_read_and_learn_what_threads_do(self):
        runs = []
        for backend in (("--mesh", "dp_shard=2"), ("--backend", "mpi", "--ranks", "2")):
            code, lines, output, errors = self.train("--shuffle", "--check", *backend)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
            runs.append((self.losses(lines), self.checksums(lines)))
        self.assertEqual(*runs)


if __name__ == "__main__":
    unittest.main()
