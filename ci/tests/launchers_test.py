"""What launchers do to ranks: each of two ranks of Open MPI sees files, vector instructions or variables of its own."""
import os
import subprocess
import unittest

from training_runs import ENVIRONMENT, MODEL, SHARDPROOF, TrainingRuns


class Launchers(TrainingRuns):
    def setUp(self):
        super().setUp()
        for rank in range(2):
            os.mkdir(self.of_rank(rank))

    def of_rank(self, rank, *names):
        return os.path.join(self.folder, f"host_{rank}", *names)

    def write_data(self, *contents):
        for rank, content in enumerate(contents):
            with open(self.of_rank(rank, "data"), "wb") as file:
                file.write(content)

    def on_two_hosts(self, *arguments, before="", data="data"):
        """A run whose ranks have a folder each, in which they begin. Its exit code and what both have said."""
        train = [SHARDPROOF, "train", "--backend", "mpi", "--model", MODEL, "--seq", "6", "--steps", "2", "--timeout", "60",
                 "--data", data, *arguments]
        return self.each_in_its_folder(train, before)

    def each_in_its_folder(self, command, before=""):
        script = f'cd "{self.folder}/host_$OMPI_COMM_WORLD_RANK"; {before} exec "$@"'
        done = subprocess.run(["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", "sh", "-c", script, "sh", *command],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False, env=ENVIRONMENT)
        return done.returncode, done.stdout

    def expect_said_twice(self, said, pattern):
        """By each rank."""
        self.assertEqual(len([line for line in said.splitlines() if pattern in line]), 2, said)

    def test_what_one_rank_cannot_read_is_told_by_both(self):
        self.write_data(b"some text to train on" * 20)
        code, said = self.on_two_hosts()
        self.assertNotEqual(code, 0)
        self.expect_said_twice(said, "data")
        self.expect_said_twice(said, "rank 1")
        self.assertNotIn("died", said)

    def test_a_model_that_one_rank_cannot_read_is_told_by_both(self):
        code, _, output, errors = self.train("--checkpoint-dir", self.of_rank(0, "run"))
        self.assertEqual(code, 0, output + errors)
        code, said = self.each_in_its_folder(
            [SHARDPROOF, "sample", "run", "--prompt", "ab", "--length", "3", "--backend", "mpi", "--timeout", "60"])
        self.assertNotEqual(code, 0)
        self.expect_said_twice(said, "rank 1")
        self.assertNotIn("died", said)

    def test_data_that_differ_are_refused_before_the_first_step(self):
        self.write_data(b"some text to train on" * 20, b"some text to train on" * 21)
        code, said = self.on_two_hosts()
        self.assertNotEqual(code, 0)
        self.expect_said_twice(said, "ranks 0 and 1 do not run the same: the fingerprint of --data")

    def test_a_folder_of_checkpoints_that_hosts_do_not_share_is_refused_before_the_first_step(self):
        self.write_data(*[b"some text to train on" * 20] * 2)
        code, said = self.on_two_hosts("--checkpoint-dir", "run")
        self.assertNotEqual(code, 0)
        self.assertIn("rank 1", said)
        self.assertIn("run", said)
        self.assertNotIn("step 1 ", said)

    def test_a_checkpoint_that_one_rank_does_not_see_is_named(self):
        self.write_data(*[b"some text to train on" * 20] * 2)
        code, _, output, errors = self.train("--checkpoint-dir", self.of_rank(0, "run"), "--global-batch", "8", "--data",
                                             self.of_rank(0, "data"), "--steps", "1")
        self.assertEqual(code, 0, output + errors)
        code, said = self.on_two_hosts("--checkpoint-dir", "run", "--resume", "--global-batch", "8")
        self.assertNotEqual(code, 0)
        self.assertIn("run/step_1", said)
        self.assertNotIn("make the same calls", said)

    def test_another_cpu_capability_is_named(self):
        self.write_data(*[b"some text to train on" * 20] * 2)
        code, said = self.on_two_hosts(
            before='test $OMPI_COMM_WORLD_RANK = 1 && export ATEN_CPU_CAPABILITY=default;')
        self.assertNotEqual(code, 0)
        self.expect_said_twice(said, "the CPU capability, which ATEN_CPU_CAPABILITY sets, is '")

    def alone(self, *arguments, **variables):
        """A process that something else started: exit code and errors."""
        clean = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("OMPI_C", "PMI", "SLURM", "RANK"))}
        done = subprocess.run([SHARDPROOF, "verify", "--cases", "1", "--no-python", "--failures",
                               os.path.join(self.folder, "failures"), *arguments], env=dict(clean, **variables),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    def test_processes_that_mpi_did_not_join_do_not_run_alone(self):
        for variables in ({"PMI_RANK": "1", "PMI_SIZE": "2"},
                          {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}):
            code, errors = self.alone("--backend", "mpi", **variables)
            self.assertEqual(code, 2, errors)
            self.assertIn("started 2 processes, and this is rank 1, but MPI has joined 1 of them here as rank 0", errors)

    def test_launchers_that_disagree_are_named_and_a_shell_in_a_step_is_none(self):
        worker = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
        task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "2",
                "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}
        code, errors = self.alone(**worker, **task)
        self.assertEqual(code, 2, errors)
        self.assertIn("two launchers disagree: torchrun says that this is rank 0 of 2", errors)
        self.assertIn("srun says that this is rank 2 of 4", errors)
        shell = dict(task, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1", SLURM_NTASKS="4", SLURM_LOCALID="0",
                     SLURM_STEP_TASKS_PER_NODE="1")
        code, errors = self.alone(**shell)
        self.assertEqual(code, 0, errors)
        pod = {name: value for name, value in worker.items() if name != "LOCAL_RANK"}
        code, errors = self.alone(**dict(pod, WORLD_SIZE="1"))
        self.assertEqual(code, 0, errors)


if __name__ == "__main__":
    unittest.main()
