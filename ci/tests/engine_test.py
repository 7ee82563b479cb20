"""`shardproof verify --engine`: PyTorch's sharded training, and a user's, under the cases of the harness."""
import json
import os
import re
import subprocess
import tempfile
import unittest

SHARDPROOF = os.path.join(os.environ["SHARDPROOF_BUILD"], "shardproof")
ENGINES = '''
import torch
import torch.distributed as dist
import torch.nn as nn


class Replicas(nn.Module):
    """Averages gradients with hooks, or, with a mistake, adds them up."""

    def __init__(self, model, mesh, divides):
        super().__init__()
        self.module = model
        group = mesh.get_group("dp")
        divisor = dist.get_world_size(group) if divides else 1

        def average(gradient):
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=group)
            return gradient / divisor

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(average)

    def forward(self, *inputs):
        return self.module(*inputs)


def right(model, mesh):
    return Replicas(model, mesh, True)


def wrong(model, mesh):
    return Replicas(model, mesh, False)
'''
MIXTURE = ("llama(layers=1,hidden=8,heads=1,kv_heads=1,intermediate=4,vocab=5,positions=4,experts=4,top_k=2,expert_width=3,"
           "shared_width={3},score=sigmoid) mesh({0}) {1}(ep={2}) sgd(lr=0.1,momentum=0.5) fast seed=3 : "
           "accumulate(2) step save step load@mesh({4}) step")
MLP = "mlp(widths=5-7-3) mesh(dp_shard=2) ddp sgd(lr=0.1) fast seed=3 : accumulate(2) step*2"


class Engines(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.report, self.page = os.path.join(self.folder, "report.json"), os.path.join(self.folder, "page.html")
        with open(os.path.join(self.folder, "engines.py"), "w", encoding="utf-8") as file:
            file.write(ENGINES)

    def run_command(self, *arguments, environment=None):
        return subprocess.run([SHARDPROOF, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              cwd=self.folder, env=dict(os.environ, **(environment or {})))

    def verify(self, engine, *arguments):
        done = self.run_command("verify", "--engine", engine, "--json", self.report, *arguments)
        lines = []
        if os.path.exists(self.report):
            with open(self.report, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
        return done, lines

    def test_cases_that_an_engine_can_train_hold_and_the_others_are_counted(self):
        done, lines = self.verify("torch-ddp", "--cases", "24", "--seed", "3", "--world-max", "3")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        counted = next(line for line in lines if line["type"] == "engine")
        self.assertEqual(counted["drawn"], 24)
        self.assertEqual(counted["trained"] + sum(counted["refused"].values()), 24)
        self.assertGreaterEqual(counted["trained"], 3)
        self.assertGreaterEqual(counted["refused"]["tensor parallelism"], 1)
        self.assertRegex(done.stdout, rf"torch-ddp trained {counted['trained']} of 24 drawn cases")
        self.assertRegex(done.stdout, r"\d+  tensor parallelism\n")
        for line in lines:
            if line["type"] == "case":
                self.assertRegex(line["case"], r"\) ddp.* fast seed")

    def test_a_wrong_divisor_is_found_made_small_and_replayed(self):
        done, lines = self.verify("engines:wrong", "--cases", "30", "--seed", "2", "--world-max", "2", "--failures-max", "1",
                                  "--shrink-seconds", "4", "--report", self.page)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        failure = next(line for line in lines if line["type"] == "failure")
        self.assertIn("they are 2 times what they should be", failure["guess"])
        self.assertIn("--engine engines:wrong ", failure["replay"])
        with open(self.page, encoding="utf-8") as file:
            page = json.loads(file.read().split('id="data">', 1)[1].split("</script>", 1)[0])
        self.assertEqual([row["replay"] for row in page["failure_rows"]], [failure["replay"]])
        self.assertEqual({row[4] for row in page["case_rows"]}, {"engines:wrong"})
        self.assertEqual(self.run_command("replay", "--engine", "engines:wrong", failure["case"]).returncode, 1)
        self.assertEqual(self.run_command("replay", "--engine", "engines:right", failure["case"]).returncode, 0)
        self.assertEqual(self.run_command("replay", failure["case"]).returncode, 0)

    def test_engines_that_take_ep_are_told_how_many_ranks_share_experts_and_the_others_are_not(self):
        for settings in (("dp_shard=4", "zero3", 4, 2, "dp_shard=2"), ("dp_shard=4", "zero3", 2, 0, "dp_shard=2"),
                         ("dp_replicate=2,dp_shard=2", "hsdp", 2, 2, "dp_replicate=2,dp_shard=1")):
            done = self.run_command("replay", "--engine", "torch-fsdp2-ep", MIXTURE.format(*settings))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.add("def told(model, mesh, ep):\n    raise ValueError(f'ep is {ep} on {mesh.size()} ranks')\n")
        case = MIXTURE.format("dp_shard=4", "ddp", 4, 0, "dp_shard=2")
        done = self.run_command("replay", "--engine", "engines:told", case)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("ValueError: ep is 4 on 4 ranks", done.stdout)
        done = self.run_command("replay", "--engine", "engines:right", case)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertNotIn("ep=4", done.stdout)

    def test_a_gradient_of_experts_that_is_divided_by_too_few_ranks_is_found(self):
        self.add("from shardproof.check.engines import fsdp2_ep\n\n\n"
                 "def shares(model, mesh, ep):\n"
                 "    made = fsdp2_ep(model, mesh, ep, over_one=True)\n"
                 "    for name, module in model.named_modules():\n"
                 "        if name.endswith('.experts'):\n"
                 "            module.set_gradient_divide_factor(mesh.size() // ep)\n"
                 "    return made\n")
        for ep, code in ((1, 0), (2, 1)):
            case = MIXTURE.format("dp_shard=2", "ddp", ep, 0, "dp_shard=1")
            done = self.run_command("replay", "--engine", "engines:shares", case)
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)

    def test_a_known_fault_of_pytorch_is_counted_by_verify_and_shown_by_replay(self):
        done, lines = self.verify("torch-ddp", "--cases", "40", "--seed", "13", "--world-max", "2", "--mesh", "dp_shard=1")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        counted = next(line for line in lines if line["type"] == "engine")["refused"]
        for known in ("a save before the first step", "the largest gradient, where a rank has an empty one"):
            self.assertTrue([reason for reason in counted if reason.startswith(known)], counted)
        save = "mlp(widths=1-1) mesh() ddp {} fast seed=3 : save step"
        largest = "mlp(widths=1-1) mesh(dp_shard=2) {} sgd(lr=0.1,norm=inf) fast seed=3 : step"
        for engine, case, code in (("torch-ddp", save.format("adamw(lr=0.1)"), 1),
                                   ("torch-ddp", save.format("sgd(lr=0.1,momentum=0.9,decay=0.1)"), 1),
                                   ("torch-ddp", save.format("sgd(lr=0.1,momentum=0.9)"), 0),
                                   ("torch-ddp", largest.format("ddp"), 0),
                                   ("torch-fsdp2", largest.format("zero3"), 1)):
            done = self.run_command("replay", "--engine", engine, case)
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)

    def expect_refused(self, message, *arguments, environment=None):
        """Exit code 2 and one clear message."""
        done = self.run_command(*arguments, environment=environment)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn(message, done.stderr)

    def test_engines_that_cannot_run_here_say_why(self):
        self.expect_refused("megatron-fsdp runs on CUDA devices only", "verify", "--engine", "megatron-fsdp")
        self.expect_refused("no engine is called ddp; there are torch-ddp, ", "verify", "--engine", "ddp")
        self.expect_refused("engines:nothing cannot be imported: AttributeError", "verify", "--engine", "engines:nothing")
        self.expect_refused("--schedules takes the library's rank-threads", "verify", "--engine", "torch-ddp",
                            "--schedules", "3")
        self.expect_refused("leave out --mode", "verify", "--engine", "torch-ddp", "--mode", "exact")
        self.expect_refused("--jobs 4 has no effect with --engine", "verify", "--engine", "torch-ddp", "--jobs", "4")
        for command in (["verify"], ["replay", MLP]):
            self.expect_refused("leave out --device, --backend and --ranks", *command, "--engine", "torch-ddp", "--ranks", "2")
            self.expect_refused("--timeout is for --backend", *command, "--engine", "torch-ddp", "--timeout", "3")
        self.expect_refused("torch-ddp cannot train this case: tensor parallelism", "replay", "--engine", "torch-ddp",
                            MLP.replace("dp_shard=2", "tp=2").replace("ddp", "zero3"))

    def test_without_python_there_are_no_engines_and_the_message_says_what_to_do(self):
        self.expect_refused("no Python at /nowhere/bin/python. Run ./ci/setup", "verify", "--engine", "torch-ddp",
                            environment={"SHARDPROOF_VENV": "/nowhere"})

    def add(self, text):
        with open(os.path.join(self.folder, "engines.py"), "a", encoding="utf-8") as file:
            file.write("\n\n" + text)

    def test_a_guess_on_two_ranks_knows_that_both_hold_the_same(self):
        self.add("def first(model, mesh):\n"
                 "    group = mesh.get_group('dp')\n\n"
                 "    def only_of_rank_0(gradient):\n"
                 "        gradient = gradient.clone()\n"
                 "        dist.broadcast(gradient, dist.get_global_rank(group, 0), group=group)\n"
                 "        return gradient / dist.get_world_size(group)\n\n"
                 "    for parameter in model.parameters():\n"
                 "        parameter.register_hook(only_of_rank_0)\n"
                 "    return model\n")
        done = self.run_command("replay", "--engine", "engines:first", MLP)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("guess    the terms of data-parallel rank 1 are missing", done.stdout)

    def test_replicas_of_an_engine_that_drift_apart_are_told(self):
        self.add("def apart(model, mesh):\n    for parameter in model.parameters():\n"
                 "        parameter.register_hook(lambda gradient: gradient / 2)\n    return model\n")
        done = self.run_command("replay", "--engine", "engines:apart", MLP)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"replicas after step 1 rank 0 and rank 1 hold different bits of layers\.\d\.")
        self.assertIn("guess    each rank has its own terms alone", done.stdout)

    def test_an_exception_of_an_engine_is_shown_with_all_its_lines(self):
        self.add("def raises(model, mesh):\n    raise RuntimeError('sizes differ:\\n  given 3\\n  expected 4')\n")
        done = self.run_command("replay", "--engine", "engines:raises", MLP)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"raised: RuntimeError: sizes differ:\n\s*given 3\n\s*expected 4")

    def test_an_engine_that_ends_its_process_is_a_failure_that_says_so(self):
        self.add("def dies(model, mesh):\n    import os\n    os._exit(7)\n")
        done = self.run_command("replay", "--engine", "engines:dies", MLP)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIsNotNone(re.search(r"FAILED: error: .*the process ended with 7", done.stdout), done.stdout)


if __name__ == "__main__":
    unittest.main()
