"""`shardproof verify` and `replay` from outside: exit codes, messages, reports."""
import json
import os
import signal
import subprocess
import tempfile
import unittest

SHARDPROOF = os.path.join(os.environ["SHARDPROOF_BUILD"], "shardproof")
GOOD = "mlp(widths=5-7-3) mesh(dp_shard=4) zero3 sgd(lr=0.1) ordered seed=3 : accumulate(3) step*2"
EXPLOSIVE = "mlp(widths=3-4) mesh(dp_shard=2) zero3 sgd(lr=1e+30) ordered seed=1 : step*3"


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.report = os.path.join(self.folder, "report.json")

    def run_command(self, *arguments, environment=None):
        return subprocess.run([SHARDPROOF, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              cwd=self.folder, env=dict(os.environ, **(environment or {})))

    def verify(self, *arguments):
        done = self.run_command("verify", "--no-python", "--json", self.report, *arguments)
        lines = []
        if os.path.exists(self.report):
            with open(self.report, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
        return done, lines

    def expect_refused(self, message, *arguments, environment=None):
        """Exit code 2, one clear message, no stack."""
        done = self.run_command(*arguments, environment=environment)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn(message, done.stderr)
        for word in ("Exception raised from", "frame #", "terminate called"):
            self.assertNotIn(word, done.stderr)

    def test_a_healthy_campaign_ends_with_0_a_short_verdict_and_a_report(self):
        done, lines = self.verify("--cases", "30", "--jobs", "2", "--strategy", "zero2", "--world-max", "3")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("ALL HELD: 30 of 30 cases held", done.stdout)
        said = done.stdout.splitlines()
        self.assertLessEqual(len(said), 6, done.stdout)
        self.assertRegex(said[0], r"^drawn: 1 strategy, [1-5] kinds? of models?, 1 to 3 ranks$")
        self.assertRegex(said[1], r"^compared: [1-9]\d* values")
        self.assertIn("--verbose lists it, --report FILE shows it in a browser, --json FILE has all of it", said[2])
        self.assertRegex(said[-1], "^ALL HELD: ")
        cases = [line["case"] for line in lines if line["type"] == "case"]
        self.assertEqual(len(set(cases)), 30)
        for case in cases:
            self.assertRegex(case, r"mesh\(((dp_replicate=[123],)?dp_shard=[123])?,?(cp=[23])?,?(tp=[23])?\) zero2")
        self.assertEqual(lines[-1]["type"], "summary")
        self.assertIn("frozen", lines[-1]["covered"])

    def test_a_verbose_campaign_lists_what_its_cases_had_and_so_do_merged_reports(self):
        done, _ = self.verify("--cases", "6", "--tiny", "--verbose")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"strategy +model +world +cases +failures\n")
        merged = {how: self.run_command("verify", "--merge", self.report, *how).stdout for how in ((), ("--verbose",))}
        self.assertNotIn("covered (cases):", merged[()])
        self.assertIn("--verbose lists it", merged[()])
        for said in (done.stdout, merged["--verbose",]):
            self.assertRegex(said, r"covered \(cases\):\n")
            self.assertRegex(said, r"valid pairs were drawn")
        for said in (done.stdout, *merged.values()):
            self.assertRegex(said.splitlines()[-1], "^ALL HELD: 6 of 6 cases held")

    def test_a_campaign_runs_on_jemalloc_and_a_few_cases_or_a_caller_with_another_allocator_do_not(self):
        def summary(*arguments, **environment):
            done = self.run_command("verify", "--no-python", "--tiny", "--json", self.report, *arguments,
                                    environment=environment)
            self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
            with open(self.report, encoding="utf-8") as file:
                return json.loads(file.readlines()[-1])

        many = summary("--cases", "100", "--quiet")
        self.assertEqual((many["cases"], many["allocator"]), (100, "jemalloc"))
        self.assertEqual(summary("--minutes", "0.01", "--quiet")["allocator"], "jemalloc")
        self.assertEqual(summary("--cases", "99", "--quiet")["allocator"], "libc")
        self.assertEqual(summary("--cases", "100", "--quiet", LD_PRELOAD="libm.so.6")["allocator"], "libc")

    def test_the_same_seed_runs_the_same_cases_and_another_others(self):
        def cases(seed):
            return sorted(line["case"] for line in self.verify("--cases", "12", "--seed", seed)[1] if line["type"] == "case")

        self.assertEqual(cases("5"), cases("5"))
        self.assertNotEqual(cases("5"), cases("6"))

    def test_a_failure_ends_with_1_its_case_and_how_to_replay_it(self):
        failures = os.path.join(self.folder, "found")
        os.mkdir(failures)
        with open(os.path.join(failures, "0.case"), "w", encoding="utf-8") as file:
            file.write(EXPLOSIVE + "\n")
        done, lines = self.verify("--cases", "2", "--failures", failures, "--failures-max", "1", "--shrink-seconds", "5")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        failure = next(line for line in lines if line["type"] == "failure")
        self.assertIn("the loss is", failure["what"])
        self.assertIn(f"{SHARDPROOF} replay '{failure['case']}'", done.stdout)
        self.assertEqual(self.run_command("replay", failure["case"]).returncode, 1)

    def data_of(self, page):
        """What the script of a page of --report reads."""
        with open(page, encoding="utf-8") as file:
            return json.loads(file.read().split('id="data">', 1)[1].split("</script>", 1)[0])

    def test_a_report_is_a_page_of_one_run_or_of_merged_ones(self):
        page = os.path.join(self.folder, "page.html")
        parts = []
        for shard in ("1/2", "2/2"):
            done, _ = self.verify("--cases", "6", "--tiny", "--shard", shard, "--report", page)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual((self.data_of(page)["cases"], self.data_of(page)["held"]), (3, True))
            parts.append(self.report + shard[0])
            os.rename(self.report, parts[-1])
        self.expect_refused("part 2 of 2 of 6 cases from seed 1 --tiny", "verify", "--merge", parts[0])
        both = os.path.join(self.folder, "both.json")
        done = self.run_command("verify", "--merge", *parts, "--json", both)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.expect_refused("so --json must name another file", "verify", "--merge", both, "--json", both)
        done = self.run_command("verify", "--merge", both, "--report", page)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual((self.data_of(page)["cases"], self.data_of(page)["reports"]), (6, 2))

    def test_where_nothing_was_compared_nothing_holds(self):
        self.expect_refused("--shrink-seconds must not be negative, got -1", "verify", "--shrink-seconds", "-1")
        self.expect_refused("part 3 of 3 has none of 2 cases", "verify", "--no-python", "--cases", "2", "--shard", "3/3")
        empty = {"type": "summary", "drawn_from": "seed 1", "asked": "2 cases", "part": 1, "parts": 1, "cases": 0,
                 "failures": 0, "seconds": 0, "interrupted": True, "covered": {},
                 "oracle_differences": 0, "values_compared": 0}
        with open(self.report, "w", encoding="utf-8") as file:
            file.write(json.dumps(empty) + "\n")
        self.expect_refused("no case has run in the 1 reports", "verify", "--merge", self.report)

    def test_options_that_mean_nothing_beside_merge_are_refused(self):
        for options in (["--cases", "3"], ["--no-python"], ["--backend", "threads"]):
            self.expect_refused(f"so {options[0]} has no effect", "verify", "--merge", self.report, *options)

    def test_a_report_of_a_failure_shows_who_owns_what_and_the_calls_of_its_step(self):
        failures, page = os.path.join(self.folder, "found"), os.path.join(self.folder, "page.html")
        os.mkdir(failures)
        with open(os.path.join(failures, "0.case"), "w", encoding="utf-8") as file:
            file.write(EXPLOSIVE + "\n")
        done, _ = self.verify("--cases", "1", "--failures", failures, "--failures-max", "1", "--shrink-seconds", "0",
                              "--report", page)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        failure = self.data_of(page)["failure_rows"][0]
        self.assertEqual(failure["case"], EXPLOSIVE)
        self.assertEqual([len(calls) > 0 for calls in failure["picture"]["calls"]], [True, True])
        weight = next(tensor for tensor in failure["picture"]["tensors"] if tensor["shape"] == [4, 3])
        held = [run for runs in weight["state"]["ranks"] for run in runs]
        self.assertEqual(sum(end - begin for begin, end in held), 12)

    def test_a_report_that_cannot_be_written_is_refused_before_the_run(self):
        self.expect_refused("cannot write /nowhere/x; give --report", "verify", "--report", "/nowhere/x")
        self.expect_refused("give that too", "verify", "--faults", "x")
        self.expect_refused("cannot read /nowhere/x", "verify", "--report", self.report, "--faults", "/nowhere/x")

    def test_an_interrupt_prints_what_is_known_so_far(self):
        process = subprocess.Popen([SHARDPROOF, "verify", "--minutes", "10", "--no-python", "--json", self.report],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   cwd=self.folder)
        while not (os.path.exists(self.report) and os.path.getsize(self.report) > 0):
            self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
        self.assertEqual(process.returncode, 2, output)  # the other cases have no verdict
        self.assertRegex(output, r"INTERRUPTED, so far ALL HELD: [1-9]")

    def test_replay_gives_the_same_verdict_every_time(self):
        runs = [self.run_command("replay", GOOD) for _ in range(3)]
        self.assertEqual({run.returncode for run in runs}, {0})
        self.assertEqual(len({run.stdout for run in runs}), 1)
        self.assertIn("HELD", runs[0].stdout)
        self.assertIn(GOOD, runs[0].stdout)

    def test_numbers_that_blow_up_end_replay_with_1_step_and_rank(self):
        done = self.run_command("replay", EXPLOSIVE)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        for word in ("rank ", "step 2", "the loss is"):
            self.assertIn(word, done.stdout)

    def test_malformed_case_text_is_shown_with_its_column(self):
        self.expect_refused("column 36: expected a strategy", "replay", GOOD.replace("zero3", "zero9"))
        self.expect_refused("\n  " + " " * 11 + "^", "replay", GOOD.replace("5-7-3", "x-7-3"))

    def test_an_unknown_strategy_or_axis_is_refused_with_those_there_are(self):
        self.expect_refused("ddp, zero1, zero2, zero3", "verify", "--strategy", "zero9")
        self.expect_refused("needs the mesh axis dp_replicate", "verify", "--strategy", "hsdp", "--mesh", "tp=2")
        self.expect_refused("dp_shard", "replay", GOOD.replace("dp_shard", "pp"))
        self.expect_refused("exact, ordered, canonical or fast", "verify", "--mode", "slow")

    def test_meshes_without_an_axis_of_data_parallelism_are_one_replica_and_hold(self):
        for mesh in ("tp=2", "cp=2", "cp=2,tp=2"):
            done, lines = self.verify("--cases", "12", "--mesh", mesh, "--seed", "5")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            cases = [line["case"] for line in lines if line["type"] == "case"]
            self.assertTrue(cases and all(f" mesh({mesh}) " in case for case in cases), cases)

    def test_a_malformed_mesh_is_shown_with_its_column(self):
        self.expect_refused("column 10", "verify", "--mesh", "dp_shard=x")

    def test_sizes_that_do_not_fit_are_refused(self):
        self.expect_refused("hidden=10 is not divisible by heads=3", "replay",
                            "gpt(hidden=10,heads=3) mesh(dp_shard=2) ddp sgd(lr=1) ordered seed=1 : step")
        self.expect_refused("at most 1024", "verify", "--mesh", "dp_shard=2000")
        self.expect_refused("at most 1024", "replay", GOOD.replace("dp_shard=4", "dp_shard=1025"))
        self.expect_refused("more than --world-max 2", "verify", "--mesh", "dp_shard=4", "--world-max", "2")
        self.expect_refused("can't allocate memory", "replay", GOOD.replace("5-7-3", "3000000-3000000"))

    def test_wrong_usage_is_refused(self):
        for arguments in ((), ("prove",), ("verify", "--case", "3"), ("verify", "--cases", "many"), ("replay",)):
            self.expect_refused("", *arguments)
        self.expect_refused("--cases must be at least 1", "verify", "--cases", "0")
        self.expect_refused("cannot write /nowhere/x", "verify", "--json", "/nowhere/x")

    def test_output_that_is_closed_leaves_its_places_to_no_file_of_a_worker(self):
        line = f'exec "{SHARDPROOF}" verify --no-python --cases 12 --jobs 2 --world-max 3 --verbose --json report.json >&- 2>&-'
        self.assertEqual(subprocess.run(["sh", "-c", line], cwd=self.folder, check=False).returncode, 0)
        with open(self.report, encoding="utf-8") as file:
            self.assertEqual(sum(json.loads(line)["type"] == "case" for line in file), 12)

    def test_a_missing_python_is_refused_before_all_cases_have_run(self):
        self.expect_refused("no Python at", "verify", "--minutes", "10", environment={"SHARDPROOF_VENV": "/nowhere"})


if __name__ == "__main__":
    unittest.main()
