"""What the command says when it is mistyped, the examples of its help, and completion in a shell."""
import os
import re
import shlex
import shutil
import subprocess
import unittest

SHARDPROOF = os.path.join(os.environ["SHARDPROOF_BUILD"], "shardproof")


def run(*arguments):
    return subprocess.run([SHARDPROOF, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def completed(*words):
    """What bash offers for the last word."""
    line = " ".join(shlex.quote(word) for word in ("shardproof", *words))
    script = f"source <('{SHARDPROOF}' completion bash); COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shardproof; " \
             'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, check=False)
    if done.stderr:
        raise AssertionError(done.stderr)
    return done.stdout.split()


class Usage(unittest.TestCase):
    def expect_suggestion(self, suggestion, *arguments):
        done = run(*arguments)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn(suggestion, done.stderr)

    def test_a_mistyped_command_is_suggested(self):
        self.expect_suggestion("There is no command 'verfy'. Did you mean 'verify'?", "verfy")
        self.expect_suggestion("There is no command 'kernls'. Did you mean 'kernels'?", "bench", "kernls")

    def test_help_lists_all_strategies(self):
        for command in ("plan", "train", "bench", "sample"):
            help_text = " ".join(run(command, "--help").stdout.split())
            self.assertIn("zero3, hsdp, hfsdp, hzero2", help_text, command)

    def test_a_mistyped_option_is_suggested(self):
        self.expect_suggestion("There is no option '--casse'. Did you mean '--cases'?", "verify", "--casse=3")
        self.expect_suggestion("There is no option '--stratgey'. Did you mean '--strategy'?", "plan", "--stratgey", "zero3")

    def test_a_mistyped_axis_is_refused_and_suggested(self):
        for command in ("plan", "verify", "train"):
            self.expect_suggestion("'dp_shrad'; there are dp_replicate, dp_shard, cp, tp. Did you mean 'dp_shard'?",
                                   command, "--mesh", "dp_shrad=2")

    def test_a_mistyped_strategy_is_suggested(self):
        for command in ("plan", "verify", "train", "bench"):
            self.expect_suggestion("hzero2, and rows without a name, row_* (docs/strategies.md). Did you mean 'hfsdp'?",
                                   command, "--strategy", "hfsdb")

    def test_a_value_of_check_that_stands_alone_is_shown_in_its_place(self):
        self.expect_suggestion("stands behind an equals sign: --check=fingerprint", "train", "--check", "fingerprint")

    def test_the_names_of_pytorch_are_answered_with_ours(self):
        self.expect_suggestion("Did you mean 'dp_shard'?", "plan", "--mesh", "dp=2")
        self.expect_suggestion("Did you mean 'dp_replicate'?", "plan", "--mesh", "replicate=2")
        self.expect_suggestion("Did you mean 'zero3'?", "plan", "--strategy", "fsdp")
        self.expect_suggestion("Did you mean 'hsdp'?", "plan", "--strategy", "hybrid_shard")

    def test_a_launcher_that_is_missing_is_named(self):
        nowhere = dict(os.environ, PATH="/nonexistent")
        done = subprocess.run([SHARDPROOF, "verify", "--backend", "mpi", "--ranks", "2", "--cases", "1"],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=nowhere)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("cannot run mpirun: No such file or directory. Install Open MPI", done.stderr)

    def test_help_of_train_says_its_exit_codes(self):
        self.assertIn("75 stopped by Ctrl-C, SIGTERM or", run("train", "--help").stdout)

    def test_what_is_near_nothing_gets_no_suggestion(self):
        done = run("verify", "--horses", "3")
        self.assertEqual(done.returncode, 2)
        self.assertIn("There is no option '--horses'.\n", done.stderr)

    def test_every_command_has_examples_that_parse(self):
        for command in ("verify", "replay", "train", "plan", "bench", "checkpoint"):
            examples = run(command, "--help").stdout.split("Examples:\n")[1]
            lines = [line.strip() for line in examples.strip().split("\n")]
            self.assertTrue(lines, command)
            for line in lines:
                words = shlex.split(re.split(r"   +", line)[0])
                self.assertEqual(words[:2], ["shardproof", command])
                done = run(*words[1:], "--help")
                self.assertEqual((done.returncode, done.stderr), (0, ""), line)
                options = [word for word in words if word.startswith("--")]
                for option in options:
                    self.assertIn(option, done.stdout, line)

    def test_bash_completes_commands_options_and_values(self):
        self.assertEqual(completed("ver"), ["verify"])
        self.assertEqual(completed("bench", "coll"), ["collectives"])
        self.assertEqual(completed("verify", "--cas"), ["--cases"])
        self.assertIn("zero3", completed("plan", "--strategy", "zero"))
        self.assertNotIn("ddp", completed("plan", "--strategy", "zero"))
        self.assertEqual(completed("plan", "--cas"), [])

    def test_a_quiet_run_says_its_verdict_and_a_verbose_one_each_case(self):
        quiet, verbose = (run("verify", "--cases", "3", "--no-python", "--jobs", "1", how) for how in ("--quiet", "-v"))
        self.assertEqual((quiet.returncode, quiet.stderr), (0, ""))
        self.assertRegex(quiet.stdout, r"^ALL HELD: 3 of 3 cases held, in [^\n]*\n$")
        self.assertEqual(len(re.findall(r"^held +[0-9.]+ s  ", verbose.stderr, re.MULTILINE)), 3, verbose.stderr)
        self.assertGreater(len(verbose.stdout.splitlines()), 10)
        self.assertEqual(run("verify", "--quiet", "--verbose").returncode, 2)

    def test_scripts_of_the_other_shells_are_written(self):
        zsh = run("completion", "zsh").stdout
        self.assertTrue(zsh.startswith("autoload -U +X bashcompinit && bashcompinit\n_shardproof() {"), zsh)
        fish = run("completion", "fish").stdout
        self.assertIn("complete -c shardproof -n '__fish_seen_subcommand_from verify' -l cases -d ", fish)
        self.expect_suggestion("there is no script for 'bsh'; there are bash, zsh, fish. Did you mean 'bash'?",
                               "completion", "bsh")
        for shell, arguments in (("zsh", ["-n"]), ("fish", ["--no-execute"])):
            if shutil.which(shell):
                script = run("completion", shell).stdout
                done = subprocess.run([shell, *arguments], input=script, capture_output=True, text=True, check=False)
                self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
