"""`shardproof train` with ranks that are processes does what it does with ranks that are threads."""
import json
import os
import shutil
import signal
import subprocess
import unittest
from unittest import mock

from training_runs import ENVIRONMENT, SHARDPROOF, TrainingRuns

# What rank 1 sees of a disk: it flushes files of checkpoints slowly, and does not yet see a name.
ODD_DISK = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int is_rank_1(void) { const char* rank = getenv("OMPI_COMM_WORLD_RANK"); return rank && !strcmp(rank, "1"); }
int fsync(int fd) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (is_rank_1() && readlink(link, path, sizeof path - 1) > 0 && strstr(path, ".distcp")) sleep(atoi(getenv("SLOW_S")));
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
struct dirent* readdir(DIR* folder) {
  struct dirent* entry;
  do entry = ((struct dirent * (*)(DIR*)) dlsym(RTLD_NEXT, "readdir"))(folder);
  while (entry && is_rank_1() && !strcmp(entry->d_name, getenv("UNSEEN")));
  return entry;
}
"""


class TrainMpi(TrainingRuns):
    def on_an_odd_disk(self, *arguments, slow_s="0", unseen="none"):
        library = os.path.join(self.folder, "odd_disk.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=ODD_DISK, text=True, check=True)
        with mock.patch.dict(ENVIRONMENT, {"LD_PRELOAD": library, "SLOW_S": slow_s, "UNSEEN": unseen}):
            return self.train("--backend", "mpi", "--ranks", "2", *arguments)

    def test_a_rank_whose_disk_is_slow_is_not_late(self):
        folder = os.path.join(self.folder, "run")
        for more in ((), ("--async-save",)):
            code, _, output, errors = self.on_an_odd_disk(
                "--steps", "2", "--checkpoint-dir", folder, "--timeout", "3", *more, slow_s="5")
            self.assertEqual(code, 0, output + errors)
            self.assertEqual(os.listdir(folder), ["step_2"])
            shutil.rmtree(folder)

    def test_the_latest_checkpoint_is_the_one_that_rank_0_sees(self):
        folder = os.path.join(self.folder, "run")
        code, _, output, errors = self.train("--steps", "4", "--checkpoint-dir", folder, "--save-every", "2")
        self.assertEqual(code, 0, output + errors)
        code, _, output, errors = self.on_an_odd_disk(
            "--steps", "6", "--checkpoint-dir", folder, "--resume", "--check", unseen="step_4")
        self.assertEqual(code, 0, output + errors)
        self.assertIn("step_4 after 4 of 6 steps", output)

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
