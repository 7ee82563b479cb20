"""`shardproof plan`: what one rank of a mesh would hold and call, against the closed forms of docs/strategies.md."""
import json
import os
import re
import subprocess
import tempfile
import unittest

COMMAND = os.path.join(os.environ["SHARDPROOF_BUILD"], "shardproof")
WIDTH, UNITS = 16, 5
BYTES = WIDTH * WIDTH * 4  # of a unit
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CHAIN = f"mlp(widths={'-'.join([str(WIDTH)] * (UNITS + 1))},bias=0)"
EXPERTS = ("llama(layers=2,hidden=16,heads=2,kv_heads=2,intermediate=8,vocab=12,positions=8,experts=8,top_k=2,"
           "expert_width=6)")


def plan(*arguments, code=0):
    """The lines of --json, and what was printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plan.json")
        done = subprocess.run([COMMAND, "plan", *arguments, "--json", path], capture_output=True, text=True)
        if done.returncode != code:
            raise AssertionError(f"exit {done.returncode}, expected {code}: {done.stdout}{done.stderr}")
        lines = []
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
        return lines, done.stdout + done.stderr


def traffic(lines):
    return {(line["op"], line["group"]): (line["calls"], line["bytes"]) for line in lines if line["type"] == "plan_traffic"}


def memory(lines, place="device"):
    return {line["kind"]: (line["now_bytes"], line["peak_bytes"]) for line in lines
            if line["type"] == "plan_memory" and line["place"] == place}


class Plan(unittest.TestCase):
    def test_calls_and_bytes_are_those_of_the_strategy(self):
        for rounds in (1, 3):
            lines, _ = plan("--model", CHAIN, "--mesh", "dp_shard=4", "--strategy", "zero3", "--rounds", str(rounds))
            self.assertEqual(traffic(lines), {
                ("all_gather", "dp_shard"): (2 * rounds * UNITS, 2 * rounds * UNITS * BYTES),
                ("reduce_scatter", "dp_shard"): (rounds * UNITS, rounds * UNITS * BYTES)})
            self.assertEqual(memory(lines)["parameter"][0], UNITS * BYTES // 4)
            self.assertEqual(memory(lines)["optimizer"], (2 * UNITS * BYTES // 4,) * 2)
            self.assertEqual(memory(lines)["gathered"], (0, BYTES))
        lines, _ = plan("--model", CHAIN, "--mesh", "dp_shard=4", "--strategy", "ddp")
        self.assertEqual(traffic(lines), {("all_reduce", "dp_shard"): (UNITS, UNITS * BYTES)})
        self.assertEqual(memory(lines)["parameter"][0], UNITS * BYTES)

    def test_a_rank_of_ten_thousand_is_counted_in_its_own_memory(self):
        model = "mlp(widths=4096-4096-4096-4096,bias=0)"
        lines, said = plan("--model", model, "--mesh", "dp_replicate=4,dp_shard=4096", "--strategy", "hsdp", "--rank", "16383")
        self.assertEqual(memory(lines)["parameter"][0], 3 * 4096 * 4096 * 4 // 4096)
        self.assertIn("rank 16383 of 16384", said)
        self.assertEqual(traffic(lines)["all_reduce", "dp_replicate"], (3, 3 * 4096 * 4))

    def test_offload_leaves_the_parameters_on_the_device_and_the_rest_to_the_host(self):
        own = UNITS * BYTES // 4
        where = ("--model", CHAIN, "--mesh", "dp_shard=4", "--strategy", "zero3", "--dtype", "bf16")
        lines, said = plan(*where, "--set", "offload=pageable")
        device, host = memory(lines), memory(lines, "host")
        self.assertEqual(device["parameter"], (own // 2, own // 2))
        self.assertEqual(device["optimizer"], (0, 0))
        self.assertEqual(device["together"][0], own // 2)
        self.assertEqual(host["parameter"], (own + own // 2,) * 2)
        self.assertEqual(host["optimizer"], (2 * own, 2 * own))
        self.assertEqual(host["gradient"], (0, own))
        self.assertIn("host", said)
        lines, _ = plan(*where)
        self.assertEqual(memory(lines)["parameter"][0], own)  # main parameters alone: a gather rounds them
        self.assertEqual(memory(lines, "host"), {})

    def test_the_page_of_options_has_the_options_that_there_are(self):
        _, said = plan("--options")
        with open(os.path.join(ROOT, "docs/options.md"), encoding="utf-8") as page:
            self.assertTrue(page.read().endswith(said), "write the rows of `plan --options` into docs/options.md")

    def test_every_member_that_a_number_or_a_word_says_is_an_option(self):
        with open(os.path.join(ROOT, "impl/include/shardproof/sharding/shard_options.h"), encoding="utf-8") as header:
            struct = header.read().split("\nstruct ShardOptions {")[1]
        with open(os.path.join(ROOT, "impl/src/sharding/named_options.cpp"), encoding="utf-8") as source:
            rows = dict(re.findall(r'Row\("(\w+)", &O::(\w+)', source.read()))
        functions = "UnitSelector|ParameterSelector|ParameterDim|ParameterGranule"
        members = re.findall(rf"^  (?!Strategy|{functions}|Precision|Reshard|Initializer|std::)\w+ (\w+) = ", struct,
                             re.MULTILINE)
        self.assertEqual(rows, {name: name for name in members})

    def test_an_option_that_there_is_not_names_the_nearest(self):
        for text, says in (("bukets=2", "no option 'bukets'"), ("buffers=pool", "buffers must be one of freed, pooled"),
                           ("bucket_count", "name=value"), ("bucket_count=-1", "at least 0"),
                           ("prefetch_forward=1MiB", "a number")):
            with self.subTest(text):
                done = subprocess.run([COMMAND, "plan", "--set", text], capture_output=True, text=True)
                self.assertEqual(done.returncode, 2, done.stdout)
                self.assertIn(says, done.stderr)

    def test_the_pieces_of_all_ranks_tile_the_parameters(self):
        model = "gpt(layers=1,hidden=8,heads=2,vocab=11,positions=5,tied=1)"
        taken = {}
        for rank in range(3):
            lines, _ = plan("--model", model, "--mesh", "dp_shard=3", "--rank", str(rank), "--pieces")
            for line in lines:
                if line["type"] == "plan_piece":
                    numel = 1
                    for size in line["shape"]:
                        numel *= size
                    taken.setdefault((line["parameter"], numel), []).append((line["begin"], line["end"]))
        self.assertIn(("wte.weight", 88), taken)
        for (name, numel), runs in taken.items():
            runs.sort()
            self.assertEqual([runs[0][0]] + [end for _, end in runs], [begin for begin, _ in runs] + [numel], name)

    def test_parallel_axes_have_their_calls(self):
        model = "gpt(layers=2,hidden=16,heads=4,vocab=12,positions=8,tied=1)"
        lines, _ = plan("--model", model, "--mesh", "dp_shard=2,cp=2,tp=2", "--sequence-parallel")
        groups = {group for _, group in traffic(lines)}
        self.assertTrue({"tp", "cp"} <= groups, groups)
        self.assertTrue(any("dp_shard" in group for group in groups), groups)

    def test_bytes_of_experts_are_a_range_from_even_routing_to_all_tokens_on_one_rank(self):
        tokens, chosen, layers, of_counts = 8, 2, 2, (8 + 2) * 8  # and a word to each rank
        # There and back, forwards and backwards.
        exchanged = [layers * (of_counts + 4 * rows * 16 * 4) for rows in (tokens * chosen, 2 * tokens * chosen)]
        lines, said = plan("--model", EXPERTS, "--mesh", "dp_shard=4", "--expert-ranks", "2")
        self.assertEqual(traffic(lines)["all_to_all", "ep"], (5 * layers, exchanged[0]))
        worst = {(line["op"], line["group"]): line["worst_bytes"] for line in lines if line["type"] == "plan_traffic"}
        self.assertEqual(worst["all_to_all", "ep"], exchanged[1])
        self.assertEqual([(line["rows"], line["worst_rows"]) for line in lines if line["type"] == "plan_experts"], [(16, 32)])
        self.assertRegex(said, r"all_to_all +ep +2 +10 +8\.16 KiB   to 16\.16 KiB")
        self.assertRegex(said, r"experts of the rank get 16 rows .*\n.*at most 32,")
        ranks = {(line["group"], line["ranks"]) for line in lines if line["type"] == "plan_traffic"}
        self.assertTrue({("dp_shard", 4), ("dp_shard", 2)} <= ranks, "experts are sharded over those that hold the same")
        lines, said = plan("--model", EXPERTS, "--mesh", "dp_shard=4")
        self.assertNotIn("plan_experts", {line["type"] for line in lines})
        self.assertNotIn("all_to_all", said)

    def test_slices_of_experts_sum_their_rows_forwards_and_backwards(self):
        rows, layers = 8 * 2, 2
        (calls, amount), (more_calls, more) = (
            traffic(plan("--model", EXPERTS, "--mesh", "dp_shard=2,tp=2", *cut)[0])["all_reduce", "tp"]
            for cut in ((), ("--cut-experts",)))
        self.assertEqual((more_calls - calls, more - amount), (2 * layers, 2 * layers * rows * 16 * 4))

    def test_a_search_shares_experts_where_a_mesh_can(self):
        lines, said = plan("--model", EXPERTS, "--search", "--ranks", "4", "--expert-ranks", "4")
        self.assertIn("dp_shard=4", {line["mesh"] for line in lines if line["type"] == "plan_choice"})
        self.assertIn("not possible: zero1 dp_shard=2,tp=2", said)

    def test_what_does_not_fit_is_refused_with_what_would(self):
        for arguments, words in (
                (["--strategy", "zero9"], ["zero9", "zero3"]),
                (["--mesh", "dp_shard=4", "--strategy", "hsdp"], ["hsdp", "dp_replicate"]),
                (["--mesh", "dp_shard=4", "--rank", "4"], ["0 to 3", "4"]),
                (["--mesh", "dp_shard=x"], ["dp_shard=x"]),
                (["--dtype", "int8"], ["int8", "bf16"]),
                (["--model", CHAIN, "--set", "offload=pinned", "--search", "--ranks", "4"], ["--search", "leave offload out"]),
                (["--model", "conv(channels=1-4,kernel=3,size=4,classes=2)", "--machine", "h100"], ["--machine", "a conv"]),
                (["--expert-ranks", "2"], ["--expert-ranks 2", "a llama with experts"]),
                (["--model", EXPERTS, "--mesh", "dp_shard=3", "--expert-ranks", "2"],
                 ["dp_shard=3", "so many ranks cannot share"]),
                (["--model", EXPERTS, "--mesh", "dp_shard=2", "--cut-experts"], ["no ranks along it", "tp=2"]),
                (["--model", EXPERTS[:-1] + ",expert_balance=0.1,expert_balance_over=step)", "--rounds", "2"],
                 ["expert_balance_over=step", "2 microbatches", "leave out --rounds"]),
                (["--model", EXPERTS[:-1] + ",expert_balance=0.1,expert_balance_over=step)", "--rounds", "2", "--search"],
                 ["expert_balance_over=step"]),
                (["--model", EXPERTS, "--set", "offload=pageable"], ["experts", "leave offload out"]),
                (["--model", "gpt(layers=2,hidden=7,heads=2)"], ["hidden", "heads"])):
            _, said = plan(*arguments, code=2)
            for word in words:
                self.assertIn(word, said)


if __name__ == "__main__":
    unittest.main()
