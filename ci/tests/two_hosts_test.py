"""Two hosts on one machine: network namespaces joined by a cable, each with a host name of its own. Open MPI then starts a
daemon on each, finds no shared memory between them and speaks TCP, and the cable can be cut.

Needs root (or the right to make namespaces) and iproute2; elsewhere every test is skipped with what was missing."""
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

BUILD = os.environ["SHARDPROOF_BUILD"]
NETWORK = "10.77.0"


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Cable:
    """Namespaces "host-a" and "host-b" with an address each, and nothing else."""

    def __init__(self):
        self.names = {host: f"shardproof-{os.getpid()}-{host}" for host in "ab"}

    def lay(self):
        for host in "ab":
            ip("netns", "add", self.names[host])
        ip("link", "add", "cable", "netns", self.names["a"], "type", "veth", "peer", "name", "cable", "netns", self.names["b"])
        for number, host in enumerate("ab", 1):
            ip("-n", self.names[host], "addr", "add", f"{NETWORK}.{number}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", self.names[host], "link", "set", link, "up")

    def cut(self):
        ip("-n", self.names["a"], "link", "set", "cable", "down")

    def processes(self, host):
        return [int(pid) for pid in ip("netns", "pids", self.names[host]).split()]

    def inside(self, host):
        """The beginning of a command that runs its arguments on that host."""
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c",
                f'hostname host-{host}; exec "$@"', "sh"]

    def remove(self):
        """With all that runs there."""
        for host, name in self.names.items():
            if os.path.exists(f"/run/netns/{name}"):
                for pid in self.processes(host):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                ip("netns", "del", name)


class TwoHosts(unittest.TestCase):
    def setUp(self):
        if not shutil.which("ip"):
            self.skipTest("needs iproute2: no `ip` on the PATH")
        self.cable = Cable()
        self.addCleanup(self.cable.remove)
        try:
            self.cable.lay()
            subprocess.run([*self.cable.inside("a"), "true"], check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            self.skipTest(f"needs the right to make network namespaces: {error.stderr.strip()}")
        self.scratch = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.scratch)
        # Open MPI calls it as `agent HOST words of a shell command`.
        self.agent = os.path.join(self.scratch, "agent")
        with open(self.agent, "w") as script:
            script.write(f'#!/bin/sh\nshift\nexec {shlex.join(self.cable.inside("b"))} sh -c "$*"\n')
        os.chmod(self.agent, 0o755)

    def start(self, *command):
        network = f"{NETWORK}.0/24"
        mpirun = ["mpirun", "--host", f"{NETWORK}.1:2,{NETWORK}.2:2", "--mca", "plm_rsh_agent", self.agent,
                  "--mca", "oob_tcp_if_include", network, "--mca", "btl_tcp_if_include", network,
                  "--oversubscribe", "--bind-to", "none", "-x", "OMP_NUM_THREADS"]
        environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        return subprocess.Popen([*self.cable.inside("a"), *mpirun, *command], env=environment, cwd=self.scratch,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run_well(self, *command):
        job = self.start(*command)
        said = job.communicate()[0]
        self.assertEqual(job.returncode, 0, said)
        return said

    def test_the_ranks_are_on_two_hosts(self):
        said = self.run_well("sh", "-c", "echo $(hostname) $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_LOCAL_SIZE")
        # Open MPI may warn that its agent was faster than its call of setpgid. The line begins with a bracket.
        ranks = sorted(line for line in said.split("\n") if line and not line.startswith("["))
        self.assertEqual(ranks, ["host-a 0 2", "host-a 1 2", "host-b 2 2", "host-b 3 2"], said)

    def test_every_collective_is_its_specification_bit_for_bit(self):
        self.run_well(f"{BUILD}/comm_mpi_props", "--gtest_filter=-CommThreads.*")

    def test_random_cases_hold(self):
        said = self.run_well(f"{BUILD}/shardproof", "verify", "--backend", "mpi", "--cases", "30", "--no-python",
                             "--seed", "16", "--failures", f"{self.scratch}/failures")
        self.assertIn("30 cases", said)

    def test_a_cut_cable_ends_the_ranks_of_both_hosts_with_an_error_that_names_a_rank(self):
        never = "1000000000"
        job = self.start(f"{BUILD}/mpi_driver", "none", "all_reduce", "0", never, "50000", "4", self.scratch)
        self.addCleanup(job.communicate)
        self.addCleanup(self.cable.remove)
        while len(self.drivers()) < 4:
            self.assertIsNone(job.poll(), "the job ended early")
            time.sleep(0.1)
        self.wait_for_data(job)
        self.cable.cut()
        # The ranks end by themselves; the launcher's daemons, which have lost each other, may take longer.
        while self.drivers():
            time.sleep(0.1)
        for rank in range(4):
            with open(f"{self.scratch}/rank_{rank}.jsonl") as record:
                why = record.readline()
            self.assertRegex(why, "no sign of life|died|is late", f"rank {rank}")

    def drivers(self):
        found = []
        for host in "ab":
            for pid in self.cable.processes(host):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/comm") as name:
                    if name.read().strip() == "mpi_driver":
                        found.append(pid)
        return found

    def wait_for_data(self, job):
        """Until the ranks have sent each other more over the cable than start-up needs."""
        def sent():
            return int(ip("-n", self.cable.names["a"], "-s", "link", "show", "cable").split("\n")[-2].split()[0])
        while sent() < 50_000_000:
            self.assertIsNone(job.poll(), "the job ended early")
            time.sleep(0.1)


if __name__ == "__main__":
    unittest.main()
