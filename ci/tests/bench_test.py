"""What `bench` writes besides its table: the trace of rank-threads and of processes."""
import io
import json
import os
import subprocess
import sys
import unittest
import xml.etree.ElementTree
from contextlib import redirect_stdout
from unittest import mock

from scratch import ScratchCase

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

SHARDPROOF = os.path.join(os.environ.get("SHARDPROOF_BUILD", "build"), "shardproof")


class BenchFiles(ScratchCase):
    def trace_of(self, *options):
        """The spans of a trace of two steps of the tiny model, as Chrome's format has them."""
        path = self.path("trace.json")
        done = subprocess.run([SHARDPROOF, "bench", "--model", "tiny", "--steps", "2", "--warmup", "1", "--rounds", "1",
                               "--trace", path, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("ui.perfetto.dev", done.stdout)
        with open(path, encoding="utf-8") as file:
            return [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]

    def check(self, events, ranks):
        found = {(event["pid"], event["cat"]) for event in events}
        self.assertEqual(found, {(rank, cat) for rank in range(ranks) for cat in ("computation", "wait", "collective")})
        for rank in range(ranks):
            names = [event["name"] for event in events if event["pid"] == rank]
            # The warm-up, step 0, is left out.
            self.assertEqual([name for name in names if name.startswith("step")], ["step 1", "step 2"])
            for part in ("forward", "backward", "optimizer", "forward unit 'blocks.0'", "backward the root unit"):
                self.assertEqual(names.count(part), 2, part)

    def test_a_trace_of_threads_has_what_each_rank_computes_sends_and_waits_for(self):
        events = self.trace_of("--mesh", "dp_shard=2,tp=2")
        self.check(events, 4)
        self.assertEqual({event["args"]["group"] for event in events if event["cat"] == "collective"}, {"dp_shard", "tp"})

    def test_a_trace_of_processes_has_what_each_rank_computes_sends_and_waits_for(self):
        if "no MPI" in subprocess.run([SHARDPROOF, "bench", "collectives", "--ranks", "1"], stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout:
            self.skipTest("this build has no MPI")
        self.check(self.trace_of("--backend", "mpi"), 2)

    def rows_of(self, *options, model="tiny"):
        """What --json has of each contestant, for two steps of a tiny model."""
        path = self.path("rows.json")
        done = subprocess.run([SHARDPROOF, "bench", "--model", model, "--steps", "2", "--warmup", "1", "--rounds", "1",
                               "--json", path, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        with open(path, encoding="utf-8") as file:
            return {row["contestant"]: row for row in map(json.loads, file)}

    def test_pytorch_as_zero1_sends_what_each_rank_updated_and_as_zero2_gathers_each_block_once(self):
        rows = self.rows_of("--strategy", "zero3", "--against", "ddp,ddp_zero1,fsdp2,fsdp2_zero2")
        self.assertEqual(rows["ddp_zero1"]["calls"], rows["ddp"]["calls"] + 2)  # a broadcast of each of two ranks
        blocks = 2  # of the tiny model; the root's parameters stay whole in both
        self.assertEqual(rows["fsdp2_zero2"]["calls"], rows["fsdp2"]["calls"] - blocks)

    def test_ours_in_a_process_group_of_gloo_trains_like_the_unsharded_step(self):
        if not os.path.isdir(os.path.join(os.path.dirname(SHARDPROOF), "python", "shardproof")):
            self.skipTest("this build has no Python package")
        rows = self.rows_of("--strategy", "zero2", "--against", "fsdp2,python_gloo")
        # Between two processes each collective is a message there and one back. One call more compares what the backward is,
        # and one says which parameters it has reached.
        self.assertEqual(rows["python_gloo"]["calls"], 2 * rows["zero2"]["calls"] + 2)

    def test_pytorch_as_zero1_and_zero2_trains_like_the_unsharded_step_over_replicas_and_in_bfloat16(self):
        self.rows_of("--mesh", "dp_replicate=2,dp_shard=2", "--strategy", "hzero2", "--precision", "bf16", "--against",
                     "ddp_zero1,fsdp2_zero2")

    def test_the_check_of_replicas_trains_the_same_with_one_gather_more_in_a_step(self):
        rows = self.rows_of("--strategy", "ddp", "--against", "fingerprint")
        self.assertEqual(rows["fingerprint"]["losses"], rows["ddp"]["losses"])
        self.assertEqual(rows["fingerprint"]["calls"], rows["ddp"]["calls"] + 1)

    def test_experts_that_two_ranks_share_train_like_the_unsharded_step_and_like_those_of_fsdp2(self):
        whole = self.rows_of("--against", "fsdp2", model="moe_tiny")
        rows = self.rows_of("--expert-ranks", "2", "--against", "fsdp2", model="moe_tiny")
        # In each of two layers: how many rows go where, and the rows to their experts and back, forwards and backwards.
        # Experts that one rank has alone are neither gathered nor reduced, so that fewer bytes are moved.
        for name in ("fsdp2", "zero3"):
            self.assertEqual(rows[name]["calls"], whole[name]["calls"] + 2 * 5, name)
            self.assertLess(rows[name]["bytes"], whole[name]["bytes"], name)

    def test_experts_that_nobody_can_share_are_an_error_before_anything_runs(self):
        for given, said in ((["--model", "tiny", "--expert-ranks", "2"], "which has no experts"),
                            (["--model", "moe_tiny", "--expert-ranks", "3"], "must divide the 2 ranks"),
                            (["--model", "moe_tiny", "--expert-ranks", "2", "--against", "ddp"], "only fsdp2 shares experts"),
                            (["--model", "moe_tiny", "--mesh", "dp_shard=2,tp=2"], "nothing cuts it along tp")):
            done = subprocess.run([SHARDPROOF, "bench", *given], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, check=False)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn(said, done.stdout)

    def test_curves_of_scaling_have_a_dot_for_each_cost_of_each_row(self):
        path = self.path("curves.svg")
        for ranks_max, tensors_max in (("1", "10"), ("16", "100")):
            done = subprocess.run([SHARDPROOF, "bench", "scaling", "--ranks-max", ranks_max, "--tensors-max", tensors_max,
                                   "--repeats", "1", "--plot", path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout)
            with open(path, encoding="utf-8") as file:
                text = file.read()
            self.assertNotIn("nan", text)
            self.assertNotIn("inf", text)
            rows = [line for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
            dots = list(xml.etree.ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}circle"))
            self.assertGreater(len(rows), 1)
            self.assertEqual(len(dots) % len(rows), 0, (len(dots), len(rows)))
            self.assertGreaterEqual(len(dots), 3 * len(rows))

    def test_a_plot_has_a_bar_of_time_and_one_of_memory_for_each_contestant(self):
        path = self.path("plot.svg")
        done = subprocess.run([SHARDPROOF, "bench", "--model", "tiny", "--steps", "1", "--warmup", "0", "--rounds", "2",
                               "--plot", path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        picture = xml.etree.ElementTree.parse(path).getroot()
        of = "{http://www.w3.org/2000/svg}"
        texts = [text.text for text in picture.iter(of + "text")]
        names = ["single", "zero3", "side_by_side"]
        self.assertEqual([text for text in texts if text in names], names)
        bars = [rect for rect in picture.iter(of + "rect") if rect.get("fill") != "white"]
        self.assertEqual(len(bars), 2 * len(names))
        # What is written in the table is what the bars say: the longest is as wide as a panel, the others in proportion.
        steps = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines() if line.split()[:1] and
                 line.split()[0] in names}
        for name, bar in zip(names, bars):
            self.assertAlmostEqual(float(bar.get("width")) / float(bars[0].get("width")), steps[name] / steps[names[0]],
                                   delta=0.02 + 0.06 * steps[name] / steps[names[0]])

    def test_a_profile_has_what_a_step_computes_and_its_memory_over_time(self):
        path = self.path("profile.json")
        done = subprocess.run([SHARDPROOF, "bench", "--model", "tiny", "--ranks", "1", "--steps", "1", "--warmup", "1",
                               "--rounds", "1", "--profile", path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        page = subprocess.run([sys.executable, os.path.join(ROOT, "bench", "read_profile.py"), path], stdout=subprocess.PIPE,
                              text=True, check=True).stdout
        self.assertRegex(page, r"(?m)^ +\d+[.]\d+ ms x\d+ +aten::mm$")
        self.assertRegex(page, r"(?m)^memory of the host, at most [1-9]\d*[.]\d MiB; from the first allocation to the last")

    def test_contestants_of_the_step_from_python_have_to_agree_in_their_losses(self):
        sys.path.insert(0, os.path.join(ROOT, "bench"))
        import llama_step  # pylint: disable=import-outside-toplevel
        row = {"step_ms_median": 1.0, "step_ms_min": 1.0, "step_ms_max": 1.0, "peak_mib": 0.0}
        for difference, code, word in ((5e-5, 0, "losses 5.0000 to 4.0000"), (2e-4, 1, "TOO FAR")):
            losses = {"plain": [5.0, 4.0], "ours": [5.0, 4 * (1 + difference)]}
            with mock.patch.object(llama_step, "run", lambda name, *_: dict(row, contestant=name, losses=losses[name])):
                out = io.StringIO()
                with redirect_stdout(out):
                    given = ["plain,ours,megatron", "--device", "cpu", "--precision", "fp32", "--json", self.path("rows")]
                    self.assertEqual(llama_step.main(given), code)
            self.assertIn(word, out.getvalue())
            self.assertIn("megatron: left out: ", out.getvalue())

    def test_a_file_that_cannot_be_written_is_an_error(self):
        for what in ("trace", "profile"):
            done = subprocess.run([SHARDPROOF, "bench", "--model", "tiny", "--steps", "1", "--warmup", "0", "--rounds", "1",
                                   "--" + what, self.path("no/such/folder/file")], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn("cannot write the " + what, done.stdout)


if __name__ == "__main__":
    unittest.main()
