"""`shardproof train` from outside: its data rule repeated here, its verdict, its messages."""
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

from training_runs import MODEL, SHARDPROOF, TrainingRuns, data_checksum

# Copies a checkpoint with PyTorch's own writer, one value of a tensor made another.
SPOIL = """
import sys, torch, torch.distributed.checkpoint as dcp
source, target, name, value = sys.argv[1:]
items = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
state = {key: torch.empty(item.size, dtype=item.properties.dtype) if hasattr(item, "size") else None
         for key, item in items.items()}
dcp.load(state, checkpoint_id=source, no_dist=True)
state[name].view(-1)[0] = float(value)
plain = dcp.DefaultSavePlanner(flatten_state_dict=False)
dcp.save(state, checkpoint_id=target, planner=plain, no_dist=True)
"""


class Train(TrainingRuns):
    def test_fingerprints_of_replicas_are_compared_on_every_mesh_and_an_unknown_check_is_refused(self):
        for mesh in ("dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2"):
            code, _, output, _ = self.train("--check=fingerprint", "--mesh", mesh, "--strategy", "zero1")
            self.assertEqual(code, 0, output)
            self.assertIn("the check of replicas found nothing wrong", output)
        code, _, _, errors = self.train("--check=sometimes")
        self.assertEqual(code, 2)
        self.assertIn("--check must be golden (as without a value) or fingerprint, got 'sometimes'", errors)

    def test_any_program_can_repeat_which_bytes_a_step_reads(self):
        for ranks, microbatch, batch in ((1, 1, 12), (2, 1, 12), (2, 2, 12), (4, 3, 24), (3, 4, 12)):
            code, lines, _, errors = self.train(
                "--mesh", f"dp_shard={ranks}", "--microbatch", str(microbatch), "--global-batch", str(batch))
            self.assertEqual(code, 0, errors)
            self.assertEqual(len(lines), 1 + 3 + 1)
            for step in map(json.loads, lines[1:-1]):
                self.assertEqual(step["data_fnv1a"],
                                 data_checksum(self.files, 6, batch, microbatch, ranks, step["step"]))

    def test_every_strategy_trains_to_the_golden_bits(self):
        for strategy in ("ddp", "zero1", "zero2", "zero3"):
            for optimizer in (("adamw", "--clip", "0.5"), ("sgd", "--lr", "0.1")):
                code, lines, output, errors = self.train(
                    "--strategy", strategy, "--check", "--mesh", "dp_shard=3", "--global-batch", "18",
                    "--optimizer", *optimizer)
                self.assertEqual(code, 0, output + errors)
                self.assertIn("EQUAL in every bit", output.splitlines()[-1])
                end = json.loads(lines[-1])
                self.assertTrue(end["equal"] and end["checked"] and end["steps"] == 3)
                self.assertGreater(end["values_compared"], 3 * 4 * 2000)

    def test_offload_keeps_the_bits_of_the_golden_run_and_of_the_checkpoint(self):
        folders = []
        for offload in ((), ("--set", "offload=pinned")):
            folders.append(os.path.join(self.folder, "with" if offload else "without"))
            code, _, output, errors = self.train(
                "--check", "--mesh", "dp_shard=3", "--global-batch", "18", "--checkpoint-dir", folders[-1], *offload)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output.splitlines()[-1])
        self.expect_same_end(*(os.path.join(folder, "step_3") for folder in folders))

    def test_losses_are_token_means_with_17_digits(self):
        code, lines, _, errors = self.train("--global-batch", "8")
        self.assertEqual(code, 0, errors)
        for line in lines[1:-1]:
            text = re.search(r'"loss":([-+.0-9e]+)', line).group(1)
            self.assertEqual(text, f"{float(text):.17g}")
        first = json.loads(lines[1])
        self.assertEqual(first["tokens"], 8 * 6)
        # Parameters start small, so the first guess is nearly uniform over 256 bytes.
        self.assertAlmostEqual(first["loss"], math.log(256), delta=0.05)

    def test_how_the_batch_is_cut_changes_rounding_only(self):
        runs = []
        for ranks, microbatch in ((1, 12), (2, 2), (3, 1), (4, 3)):
            code, lines, _, errors = self.train(
                "--mesh", f"dp_shard={ranks}", "--microbatch", str(microbatch), "--global-batch", "12",
                "--optimizer", "sgd", "--lr", "0.5")
            self.assertEqual(code, 0, errors)
            steps = [json.loads(line) for line in lines[1:-1]]
            runs.append([(step["loss"], step["gradient_norm"]) for step in steps])
        for run in runs[1:]:
            for (loss, norm), (loss_0, norm_0) in zip(run, runs[0]):
                self.assertAlmostEqual(loss, loss_0, delta=1e-5)
                self.assertAlmostEqual(norm, norm_0, delta=1e-4)

    def test_the_same_command_gives_the_same_bits(self):
        def bits(lines):
            return [struct.pack("<d", json.loads(line)["loss"]) for line in lines[1:-1]]

        first, second, other = (self.train("--seed", seed)[1] for seed in ("5", "5", "6"))
        self.assertEqual(bits(first), bits(second))
        self.assertNotEqual(bits(first), bits(other))

    def test_a_run_resumed_on_another_mesh_is_the_run_that_never_stopped_bit_for_bit(self):
        canonical = ("--global-batch", "12", "--canonical", "--save-every", "3")
        whole, resumed = (os.path.join(self.folder, name) for name in ("whole", "resumed"))
        code, through, _, errors = self.train(*canonical, "--steps", "6", "--checkpoint-dir", whole)
        self.assertEqual(code, 0, errors)
        for before, after in ((("dp_shard=3", "zero3"), ("dp_shard=2", "ddp")),
                              (("dp_shard=1", "zero1"), ("dp_replicate=2,dp_shard=3", "hsdp")),
                              (("dp_shard=6", "zero2"), ("dp_shard=4", "zero3"))):
            with tempfile.TemporaryDirectory() as folder:
                for (mesh, strategy), steps, more in ((before, "3", ()), (after, "6", ("--resume", "--check", "--async-save"))):
                    code, lines, output, errors = self.train(
                        *canonical, "--steps", steps, "--mesh", mesh, "--strategy", strategy, "--microbatch", "1",
                        "--checkpoint-dir", folder, *more)
                    self.assertEqual(code, 0, output + errors)
                self.assertIn("step_3 after 3 of 6 steps", output)
                self.assertIn("EQUAL in every bit", output)
                self.assertEqual(sorted(os.listdir(folder)), ["step_3", "step_6"])
                self.assertEqual(self.losses(lines).keys(), {3, 4, 5})
        # Microbatches as in the run that never stopped: losses, norms and all that is saved are the same.
        for mesh, steps, more in (("dp_shard=3", "3", ()), ("dp_shard=1", "6", ("--resume",))):
            code, lines, output, errors = self.train(
                *canonical, "--steps", steps, "--mesh", mesh, "--checkpoint-dir", resumed, *more)
            self.assertEqual(code, 0, output + errors)
        for step, text in self.losses(lines).items():
            self.assertEqual(text, self.losses(through)[step])
        self.expect_same_end(os.path.join(whole, "step_6"), os.path.join(resumed, "step_6"))

    def test_a_link_to_a_run_folder_is_the_run_folder(self):
        disk, link, behind = (os.path.join(self.folder, name) for name in ("disk", "link", "link/behind/run"))
        os.mkdir(disk)
        os.symlink(disk, link)
        for folder in (link, link + "/", behind):
            save = ("--checkpoint-dir", folder, "--save-every", "1", "--keep", "1")
            self.assertEqual(self.train(*save)[0], 0)
            self.assertEqual([name for name in os.listdir(folder) if "step" in name], ["step_3"])
            self.expect_refused(f"there is {folder}/step_3 already", *save)
            code, lines, output, errors = self.train(*save, "--resume", "--steps", "5")
            self.assertEqual(code, 0, output + errors)
            self.assertEqual(self.losses(lines).keys(), {3, 4})
            done = subprocess.run([SHARDPROOF, "sample", folder, "--prompt", "a", "--length", "3"], capture_output=True,
                                  check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            shutil.rmtree(os.path.join(folder, "step_5"))
        self.assertEqual(sorted(os.listdir(disk)), ["behind"])

    def spoiled(self, source, target, name, value):
        done = subprocess.run([sys.executable, "-c", SPOIL, source, target, name, value], capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return target

    def test_what_is_not_finite_is_neither_saved_nor_gone_on_from(self):
        folder = os.path.join(self.folder, "run")
        common = ("--checkpoint-dir", folder, "--save-every", "1", "--clip", "0")
        code, _, output, errors = self.train(*common, "--lr", "1e38", "--steps", "2")
        self.assertEqual(code, 1, output + errors)
        self.assertRegex(errors, "step 1, the norm of the parameters is (inf|nan)")
        self.assertEqual(os.listdir(folder), [])
        self.assertEqual(self.train(*common)[0], 0)
        for name in ("model.h.0.ln_1.weight", "optim.state.h.0.ln_1.weight.exp_avg_sq"):
            with tempfile.TemporaryDirectory() as other:
                rewritten = self.spoiled(os.path.join(folder, "step_3"), os.path.join(other, "step_3"), name, "inf")
                self.expect_refused(f"{rewritten} has 1 values of parameters or of the optimizer's state", "--checkpoint-dir",
                                    other, "--clip", "0", "--resume")

    def test_a_check_of_earlier_steps_that_the_golden_run_cannot_repeat_is_refused(self):
        folder = os.path.join(self.folder, "cut")
        code, _, output, errors = self.train("--steps", "1", "--mesh", "tp=2", "--checkpoint-dir", folder)
        self.assertEqual(code, 0, output + errors)
        on = ("--steps", "2", "--mesh", "dp_shard=2", "--checkpoint-dir", folder, "--resume")
        code, _, output, errors = self.train(*on, "--check")
        self.assertEqual(code, 2, output + errors)
        self.assertIn("steps up to 1 were trained on --mesh tp=2 without --arithmetic canonical", errors)
        code, _, output, errors = self.train(*on)
        self.assertEqual(code, 0, output + errors)

    def test_tensor_sequence_and_context_parallel_runs_train_to_the_golden_bits_and_resume_as_each_other(self):
        legs = (("cp=2,tp=2", "zero3", ()), ("tp=2", "zero1", ()), ("cp=2", "ddp", ()),
                ("dp_shard=2,tp=2", "zero2", ("--sequence-parallel",)),
                ("dp_replicate=2,dp_shard=1,cp=3", "hsdp", ()), ("dp_shard=3", "ddp", ()))
        common = ("--arithmetic", "canonical", "--global-batch", "6", "--microbatch", "1", "--check")
        whole, resumed = (os.path.join(self.folder, name) for name in ("whole", "resumed"))
        code, _, output, errors = self.train(*common, "--steps", "12", "--mesh", "dp_shard=1", "--checkpoint-dir", whole)
        self.assertEqual(code, 0, output + errors)
        for number, (mesh, strategy, more) in enumerate(legs):
            code, _, output, errors = self.train(
                *common, "--steps", str(2 * number + 2), "--mesh", mesh, "--strategy", strategy, "--checkpoint-dir", resumed,
                "--resume", *more)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
        self.expect_same_end(os.path.join(whole, "step_12"), os.path.join(resumed, "step_12"))

    def test_a_mesh_that_cuts_the_model_changes_rounding_only(self):
        llama = "llama(layers=1,hidden=8,heads=4,kv_heads=2,intermediate=6,vocab=256,positions=6)"
        for model in (MODEL, llama):
            losses = []
            for mesh, more in (("dp_shard=2", ()), ("dp_shard=2,cp=2", ()), ("dp_shard=2,tp=2", ("--sequence-parallel",)),
                               ("dp_shard=2,tp=2", ("--sequence-parallel", "--overlap-pieces", "2")),
                               ("dp_replicate=2,dp_shard=1,cp=2,tp=2", ())):
                code, lines, output, errors = self.train("--mesh", mesh, "--global-batch", "4", *more, model=model)
                self.assertEqual(code, 0, output + errors)
                losses.append([(step["loss"], step["gradient_norm"]) for step in map(json.loads, lines[1:-1])])
            for run in losses[1:]:
                for (loss, norm), (loss_0, norm_0) in zip(run, losses[0], strict=True):
                    self.assertAlmostEqual(loss, loss_0, delta=1e-4)
                    self.assertAlmostEqual(norm, norm_0, delta=1e-3)
        self.expect_refused("add --arithmetic canonical, or leave --check out", "--mesh", "dp_shard=2,tp=2", "--check")

    def test_experts_that_ranks_share_train_to_the_golden_bits(self):
        llama = ("llama(layers=2,hidden=8,heads=2,kv_heads=1,intermediate=6,vocab=256,positions=6,experts=5,top_k=2,"
                 "expert_width=4,shared_width=3,dense_layers=1)")
        busy = llama[:-1] + ",expert_balance=0.01,expert_bias=0.1,expert_capacity=1)"
        for mesh, model in (("dp_shard=3", llama), ("dp_replicate=2,dp_shard=3", llama), ("dp_shard=3", busy)):
            code, _, output, errors = self.train(
                "--mesh", mesh, "--expert-ranks", "3", "--global-batch", "24", "--check", model=model)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
        # Biases come out of a checkpoint on more ranks than those that saved them.
        folder = ("--checkpoint-dir", os.path.join(self.folder, "biases"), "--resume", "--check", "--global-batch", "12")
        for ranks, steps in (("2", "2"), ("3", "4")):
            code, _, output, errors = self.train(
                "--mesh", f"dp_shard={ranks}", "--expert-ranks", ranks, "--steps", steps, *folder, model=busy)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
        shared = ("--expert-ranks", "2")
        self.expect_refused("needs a llama with experts", *shared)
        self.expect_refused("--cut-experts needs a llama with experts", "--cut-experts")
        for message, *more in (("so many ranks cannot share", "--mesh", "dp_shard=3"),
                               ("--check adds gradients", "--mesh", "dp_shard=4", "--check")):
            code, _, _, errors = self.train(*shared, *more, model=llama)
            self.assertEqual(code, 2)
            self.assertIn(message, errors)

    def test_biases_of_routers_begin_as_the_model_says_and_as_those_of_the_golden_run(self):
        llama = ("llama(layers=2,hidden=8,heads=2,kv_heads=1,intermediate=6,vocab=256,positions=6,experts=5,top_k=2,"
                 "expert_width=4,score=sigmoid{})")
        losses = set()
        canonical = ("--arithmetic", "canonical", "--canonical", "--mesh")
        for more, mesh in (("", ("--mesh", "dp_shard=2")), (",expert_lean=0.25", ("--mesh", "dp_shard=2")),
                           (",expert_lean=0.25,expert_bias=0.125", (*canonical, "dp_shard=2,tp=2"))):
            folder = ("--checkpoint-dir", os.path.join(self.folder, f"run{len(losses)}"), "--resume", "--lr", "0.1")
            for steps in ("2", "4"):
                code, lines, output, errors = self.train("--check", *mesh, *folder, "--steps", steps, model=llama.format(more))
                self.assertEqual(code, 0, output + errors)
                self.assertIn("EQUAL in every bit", output)
            losses.add(json.loads(lines[-2])["loss"])
        self.assertEqual(len(losses), 3)

    def test_a_run_with_experts_that_changes_every_axis_at_its_checkpoints_has_the_golden_bits(self):
        llama = ("llama(layers=2,hidden=8,heads=2,kv_heads=1,intermediate=6,vocab=256,positions=6,experts=5,top_k=2,"
                 "expert_width=4,shared_width=3,score=sigmoid,dense_layers=1)")
        directory = os.path.join(self.folder, "experts")
        legs = (("dp_shard=2,tp=2", "zero3", "2", "--sequence-parallel"), ("dp_replicate=2,dp_shard=3", "hsdp", "6"),
                ("dp_shard=2,tp=2", "zero2", "2", "--cut-experts"), ("dp_shard=2,cp=2", "zero1", "4"),
                ("dp_shard=1,tp=2", "zero3", "1", "--cut-experts"), ("dp_shard=1", "ddp", "1"))
        for number, (mesh, strategy, sharing, *more) in enumerate(legs):
            code, lines, output, errors = self.train(
                "--arithmetic", "canonical", "--canonical", "--steps", str(2 * number + 2), "--mesh", mesh, "--strategy",
                strategy, "--expert-ranks", sharing, "--microbatch", "1", "--global-batch", "12", "--checkpoint-dir",
                directory, "--resume", "--check", *more, model=llama)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
            self.assertEqual(json.loads(lines[-1])["first_step"], 2 * number)

    def test_windows_and_documents_on_several_ranks_have_the_golden_bits_however_keys_come(self):
        llama = "llama(layers=2,hidden=16,heads=4,kv_heads=2,intermediate=6,vocab=256,positions=6,window=3,full_layers=1)"
        end = str(self.files[min(self.files)][2])  # of the first sequence's tokens
        third = ("--document-end", end, "--arithmetic", "canonical", "--check")
        losses = set()
        for attention in ("ring", "gathered", "ulysses"):
            code, lines, output, errors = self.train("--mesh", "dp_shard=2,cp=2", "--context-attention", attention,
                                                     "--global-batch", "4", *third, model=llama)
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
            losses.add(json.loads(lines[1])["loss"])
        code, lines, output, errors = self.train("--global-batch", "4", "--arithmetic", "canonical", model=llama)
        self.assertEqual(code, 0, output + errors)
        self.assertEqual(len(losses), 1)
        self.assertNotIn(json.loads(lines[1])["loss"], losses)  # without documents
        self.expect_refused("must be a token of a llama", "--document-end", "32")
        self.expect_refused("--context-attention is for a mesh with cp", "--context-attention", "ulysses")
        # A run that goes on has the documents that it began with.
        folder = ("--checkpoint-dir", os.path.join(self.folder, "documents"))
        for steps, more, code_expected in (("2", third[:2], 0), ("3", ["--resume"], 0),
                                           ("4", ("--resume", "--document-end", "33"), 2)):
            code, _, output, errors = self.train("--steps", steps, *folder, *more, model=llama)
            self.assertEqual(code, code_expected, output + errors)
        self.assertIn(f"goes on has {end} ", errors)

    def test_the_check_of_a_resumed_run_knows_in_which_order_each_step_was_summed(self):
        directory = os.path.join(self.folder, "history")
        legs = (("dp_shard=3", "zero3", "2"), ("dp_replicate=2,dp_shard=2", "hsdp", "1"), ("dp_shard=2", "zero1", "3"))
        for number, (mesh, strategy, microbatch) in enumerate(legs):
            code, lines, output, errors = self.train(
                "--steps", str(2 * number + 2), "--mesh", mesh, "--strategy", strategy, "--microbatch", microbatch,
                "--global-batch", "12", "--checkpoint-dir", directory, "--keep", "2", "--resume", "--check")
            self.assertEqual(code, 0, output + errors)
            self.assertIn("EQUAL in every bit", output)
            self.assertIn("after" if number else "starting with step 1", output)
            self.assertEqual(json.loads(lines[-1])["first_step"], 2 * number)
        self.assertEqual(sorted(os.listdir(directory)), ["step_4", "step_6"])
        code, _, output, _ = self.train("--steps", "6", "--global-batch", "12", "--checkpoint-dir", directory, "--resume")
        self.assertEqual((code, output.splitlines()[-1]), (0, "nothing is left to train"))

    def test_the_step_of_a_difference_is_that_of_the_line_above(self):
        folder = os.path.join(self.folder, "differs")
        code, _, output, errors = self.train("--steps", "2", "--checkpoint-dir", folder)
        self.assertEqual(code, 0, output + errors)
        with tempfile.TemporaryDirectory() as other:
            self.spoiled(os.path.join(folder, "step_2"), os.path.join(other, "step_2"), "model.h.0.ln_1.weight", "1.5")
            code, lines, output, errors = self.train("--steps", "4", "--checkpoint-dir", other, "--resume", "--check")
        self.assertEqual(code, 1, output + errors)
        shown, verdict = output.splitlines()[-2:]
        self.assertRegex(shown, "^step +3/4 ")
        self.assertRegex(verdict, "^NOT EQUAL to the golden run at step 3: ")
        self.assertEqual(json.loads(lines[-2])["step"], 2, "programs count from 0")

    def test_checkpoint_options_that_make_no_sense_are_refused(self):
        directory = os.path.join(self.folder, "taken")
        for option in ("--resume", "--async-save"):
            self.expect_refused(f"{option} needs --checkpoint-dir", option)
        for option in ("--save-every", "--keep"):
            self.expect_refused(f"{option} needs --checkpoint-dir", option, "2")
            self.expect_refused(f"{option} must be at least 1", option, "-1", "--checkpoint-dir", directory)
        self.expect_refused("no folder", "--checkpoint-dir", os.path.join(self.write("a_file", b"x"), "below"))
        self.assertEqual(self.train("--checkpoint-dir", directory)[0], 0)
        self.expect_refused("go on from it with --resume", "--checkpoint-dir", directory)
        again = ("--checkpoint-dir", directory, "--resume")
        self.expect_refused("counts from the beginning of the run; give at least", "--steps", "2", *again)
        for option, value in (("--lr", "0.5"), ("--seed", "4"), ("--global-batch", "8"), ("--seq", "5")):
            self.expect_refused(f"and this run has {option} {value}. To go on, give {option} ", option, value, *again)
        self.expect_refused(f"--model has heads=4, and {directory}/step_3 has heads=2", *again,
                            model=MODEL.replace("heads=2", "heads=4"))
        self.expect_refused(f"--model is a llama, and {directory}/step_3 is of a gpt", *again, model="llama(layers=1)")
        code, _, output, errors = self.train(*again, "--steps", "4", model="gpt(layers=1,heads=2)")
        self.assertEqual(code, 0, "what is left out is as in the checkpoint: " + output + errors)

    def test_a_second_run_in_a_folder_is_refused_until_the_first_is_gone(self):
        directory = os.path.join(self.folder, "shared")
        save = ("--checkpoint-dir", directory, "--save-every", "1", "--keep", "2")
        first, report = self.begin(*save)
        self.after_steps(first, report, 3)
        self.expect_refused(f"another run saves in {directory}: process {first.pid} on ", *save, "--steps", "999999",
                            "--resume")
        self.after_steps(first, report, 6)
        first.kill()
        first.wait()
        self.assertIn(".step_owner", os.listdir(directory))
        done = max(int(name[5:]) for name in os.listdir(directory) if name.startswith("step_"))
        code, _, output, errors = self.train(*save, "--steps", str(done + 1), "--resume")
        self.assertEqual(code, 0, output + errors)
        self.assertEqual(sorted(os.listdir(directory)), sorted([f"step_{done}", f"step_{done + 1}"]))

    def test_a_limit_on_file_sizes_is_an_error_that_names_the_file(self):
        directory = os.path.join(self.folder, "limited")
        done = subprocess.run(["prlimit", "--fsize=4096", SHARDPROOF, "train", "--model", MODEL, "--seq", "6", "--steps", "1",
                               "--data", os.path.join(self.folder, "data"), "--checkpoint-dir", directory],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertRegex(done.stderr, r"cannot write .*\.distcp at byte .*File too large on ")

    def test_damage_is_named_and_the_checkpoint_before_still_resumes(self):
        directory = os.path.join(self.folder, "damaged")
        code, _, output, errors = self.train("--checkpoint-dir", directory, "--save-every", "1", "--mesh", "dp_shard=2")
        self.assertEqual(code, 0, output + errors)
        data = os.path.join(directory, "step_3", "__1_0.distcp")
        with open(data, "r+b") as file:
            file.truncate(os.path.getsize(data) // 2)
        self.expect_refused("__1_0.distcp", "--checkpoint-dir", directory, "--steps", "4", "--resume")
        self.expect_refused(f"The checkpoint before it is {directory}/step_2", "--checkpoint-dir", directory, "--steps", "4",
                            "--resume")
        shutil.rmtree(os.path.join(directory, "step_3"))
        code, _, output, errors = self.train("--checkpoint-dir", directory, "--resume", "--check")
        self.assertEqual(code, 0, output + errors)
        self.assertIn("after 2 of 3 steps", output)

    def test_the_default_data_is_text_that_is_there(self):
        done = subprocess.run([SHARDPROOF, "train", "--steps", "1", "--model", MODEL, "--seq", "6"],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"data +[0-9,]{8,} bytes in [0-9,]+ files")

    def test_data_that_is_missing_empty_or_too_short_is_refused(self):
        self.expect_refused("there is no /nowhere", "--data", "/nowhere")
        self.expect_refused("is empty", "--data", self.write("empty", b""))
        self.expect_refused("are too few for one sequence of 6", "--data", self.write("short", b"abcdef"))

    def test_batches_that_ranks_cannot_share_are_refused(self):
        self.expect_refused("must be a multiple of microbatch 2 x 3 data-parallel ranks = 6",
                            "--mesh", "dp_shard=3", "--global-batch", "16")
        self.expect_refused("at least 1, got 16, 0 and 2", "--microbatch", "0")
        over_step = ("llama(layers=1,hidden=8,heads=2,kv_heads=1,vocab=256,positions=6,experts=5,expert_balance=0.1,"
                     "expert_balance_over=step)")
        self.expect_refused("expert_balance_over=step has one forward in a step, which sees all of its tokens, and a step has "
                            "4 microbatches; set --microbatch 8", model=over_step)
        code, _, output, errors = self.train("--microbatch", "8", model=over_step)
        self.assertEqual(code, 0, output + errors)

    def test_an_unknown_strategy_axis_or_optimizer_is_refused_with_those_there_are(self):
        self.expect_refused("zero3", "--strategy", "zero4")
        for mesh, axis in (("ep=2", "ep"), ("dp_shard=2,pp=2", "pp")):
            self.expect_refused(f"has the axis '{axis}'; there are dp_replicate, dp_shard, cp, tp", "--mesh", mesh)
        self.expect_refused("cp must follow dp_shard", "--mesh", "cp=2,dp_shard=2")
        self.expect_refused("native or canonical", "--arithmetic", "exact")
        self.expect_refused("adamw or sgd", "--optimizer", "lion")

    def test_a_malformed_mesh_or_model_is_refused_with_the_place(self):
        self.expect_refused("column", "--mesh", "dp_shard=two")
        self.expect_refused("^", model="gpt(layers=1,hidden=8,heads=two)")
        self.expect_refused("must be gpt(...) or llama(...)", model="mlp(widths=3-4)")

    def test_a_model_that_does_not_fit_is_refused(self):
        self.expect_refused("heads", model="gpt(layers=1,hidden=8,heads=3,vocab=256,positions=6)")
        self.expect_refused("vocab=256 or more, got 100",
                            model="gpt(layers=1,hidden=8,heads=2,vocab=100,positions=6)")
        self.expect_refused("6 positions, too few for sequences of 7", "--seq", "7")

    def test_a_world_larger_than_threads_allow_is_refused(self):
        self.expect_refused("at most 1024", "--mesh", "dp_shard=2000", "--global-batch", "4000")

    def test_numbers_out_of_range_and_unknown_options_are_refused(self):
        self.expect_refused("--steps must be at least 1, got 0", "--steps", "0")
        self.expect_refused("--lr must be above 0", "--lr", "-1")
        self.expect_refused("--clip must not be negative", "--clip", "-1")
        self.expect_refused("--nonsense", "--nonsense")

    def test_a_report_that_cannot_be_written_is_refused(self):
        self.expect_refused("cannot write /nowhere/x.json", "--json", "/nowhere/x.json")

    def test_numbers_that_blow_up_end_the_run_with_step_rank_and_remedy(self):
        explosive = ("--optimizer", "sgd", "--lr", "1e30", "--steps", "20", "--clip", "0")
        for words in ("rank ", "step ", "--lr"):
            self.expect_refused(words, *explosive, code=1)
        self.expect_refused("step ", *explosive, "--check", code=1)


if __name__ == "__main__":
    unittest.main()
