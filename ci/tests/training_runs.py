"""Small runs of `shardproof train` for its tests, on files of their own, and the rule which tokens a step reads."""
import json
import os
import subprocess
import tempfile
import time
import unittest

SHARDPROOF = os.path.join(os.environ["SHARDPROOF_BUILD"], "shardproof")
MODEL = "gpt(layers=1,hidden=8,heads=2,vocab=256,positions=6,tied)"
DEADLINE_S = 600  # so that nothing hangs; no test relies on it
STOPPED = 75  # the exit code of a run that was told to stop
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def sample(position, samples, seed):
    """Which sample a position of a shuffled run takes, from the rule as harness/data/sample_order.h documents it."""
    epoch, i = divmod(position, samples)
    bits = max(1, ((samples - 1).bit_length() + 1) // 2)
    key = mix((mix(seed) + epoch) % 2**64)
    while True:
        left, right = i >> bits, i % 2**bits
        for r in range(8):
            left, right = right, left ^ mix(mix((key + r) % 2**64) ^ right) % 2**bits
        i = left << bits | right
        if i < samples:
            return i


def data_checksum(files, length, global_batch, microbatch, ranks, step, *, width=1, seed=None, held_out=0):
    """FNV-1a of what a step reads, rank by rank and round by round, from the rule as it is documented."""
    text = b"".join(files[name] for name in sorted(files, key=os.fsencode))
    sequences = (len(text) // width - 1) // length - held_out
    value = 0xCBF29CE484222325
    for rank in range(ranks):
        for k in range(global_batch // (microbatch * ranks)):
            for j in range(microbatch):
                position = step * global_batch + (k * ranks + rank) * microbatch + j
                i = position % sequences if seed is None else sample(position, sequences, seed)
                for byte in text[i * length * width:(i * length + length + 1) * width]:
                    value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


class TrainingRuns(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.files = {}
        for number, name in enumerate(("b.txt", "a/z.txt", "a.txt", "a/y.txt")):
            self.write(name, bytes((7 * number + i * i) % 251 + 1 for i in range(40 + 31 * number)))

    def write(self, name, content):
        path = os.path.join(self.folder, "data", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        self.files[name] = content
        return path

    def train(self, *arguments, model=MODEL):
        """Exit code, JSON lines, output and errors of a small run."""
        report = os.path.join(self.folder, "report.json")
        data = () if "--data" in arguments else ("--data", os.path.join(self.folder, "data"))
        seq = () if "--seq" in arguments else ("--seq", "6")
        steps = () if "--steps" in arguments else ("--steps", "3")
        json_file = () if "--json" in arguments else ("--json", report)
        done = subprocess.run(
            [SHARDPROOF, "train", "--model", model, *json_file, *data, *seq, *steps, *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        lines = []
        if os.path.exists(report):
            with open(report, encoding="utf-8") as file:
                lines = file.read().splitlines()
            os.remove(report)
        return done.returncode, lines, done.stdout, done.stderr

    def expect_refused(self, words, *arguments, code=2, **options):
        got, _, output, errors = self.train(*arguments, **options)
        self.assertEqual(got, code, output + errors)
        self.assertIn(words, errors)
        self.assertLessEqual(len(errors.strip().splitlines()), 3, errors)
        self.assertNotIn("Exception raised from", errors)

    def expect_same_end(self, one, two):
        """The checkpoints have the same bits, but for the value that says on which meshes they were trained."""
        done = subprocess.run([SHARDPROOF, "checkpoint", "diff", one, two], capture_output=True, text=True)
        self.assertRegex(done.stdout.splitlines()[-1], r"^[0-9]+ names, [01] differ$", done.stdout + done.stderr)
        for line in done.stdout.splitlines()[:-1]:
            self.assertIn("trainer.values.history", line)

    def losses(self, lines):
        return {json.loads(line)["step"]: line.split('"tokens"')[0] for line in lines[1:-1]}

    def checksums(self, lines):
        return {step["step"]: step["data_fnv1a"] for step in map(json.loads, lines[1:-1])}

    def begin(self, *arguments, steps="1000000"):
        """A run, of very many steps unless told otherwise, and the file of its steps."""
        report = os.path.join(self.folder, f"steps_{len(os.listdir(self.folder))}.json")
        process = subprocess.Popen(
            [SHARDPROOF, "train", "--model", MODEL, "--seq", "6", "--steps", steps, "--json", report, "--data",
             os.path.join(self.folder, "data"), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        return process, report

    def after_steps(self, process, report, steps):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and process.poll() is None:
            if os.path.exists(report):
                with open(report, encoding="utf-8") as file:
                    if sum('"type":"step"' in line for line in file) >= steps:
                        return
            time.sleep(0.02)
        self.fail(f"no {steps} steps: {process.poll()}")

    def stopped(self, process, report):
        """The number of steps that a run has done that was told to stop."""
        output, _ = process.communicate(timeout=DEADLINE_S)
        self.assertEqual(process.returncode, STOPPED, output)
        with open(report, encoding="utf-8") as file:
            end = json.loads(file.read().splitlines()[-1])
        self.assertTrue(end["stopped"])
        self.assertIn(f"stopped after {end['steps']} of 1000000 steps", output)
        return end["steps"], output
