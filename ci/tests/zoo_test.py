"""ci/zoo: each way in which a sharded model can go wrong gets its verdict, and torch's modules hold."""
import contextlib
import io
import json
import os
import sys
import threading
import types
import unittest

from scratch import CI, ScratchCase

BUILD = os.environ.get("SHARDPROOF_BUILD", os.path.join(os.path.dirname(CI), "build"))
sys.path[:0] = [os.path.join(CI, "lib"), os.path.join(BUILD, "python")]
# pylint: disable=wrong-import-position
import torch  # noqa: E402
from torch import nn  # noqa: E402

import shardproof  # noqa: E402
from zoo import __main__ as zoo  # noqa: E402
from zoo.model import Model, NotBuildable  # noqa: E402


class Toy(nn.Module):
    """A linear layer that does something else in the threads of a sharded run."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        y = self.linear(x)
        if self.kind == "random":
            return y + torch.rand(())
        if self.kind == "slow" or threading.current_thread() is threading.main_thread():
            while self.kind == "slow":
                pass
            return y
        if self.kind == "refused":
            raise shardproof.Error("[toy] expected another model. Make another one")
        if self.kind == "puzzling":
            raise TypeError("nothing")
        if self.kind == "hangs":
            threading.Event().wait()
        if self.kind == "crashes":
            os.abort()
        return y * {"wrong": 1.01, "rounded": 1 + 2**-23}.get(self.kind, 1.0)


def build(kind):
    if kind == "impossible":
        raise NotBuildable("12 parameters are too many")

    def batch(n):
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(n))

    return [Model(lambda: Toy(kind), batch, lambda model, x: model(x).square().mean(), lambda model, x: model(x))]


KINDS = {"right": "equal", "rounded": "close", "wrong": "WRONG", "puzzling": "unclear error", "refused": "clear error",
         "crashes": "crash", "random": "not buildable", "impossible": "not buildable"}
STOPPED = {"hangs": "hang", "slow": "slow"}


class Zoo(ScratchCase):
    def setUp(self):
        super().setUp()
        self.built = []

        def counted(kind):
            self.built.append(kind)
            return build(kind)

        names = [*KINDS, *STOPPED]
        sys.modules["zoo.of_toy"] = types.SimpleNamespace(names=lambda: names, build=counted)
        self.addCleanup(sys.modules.pop, "zoo.of_toy")

    def run_toys(self, *kinds, arguments=(), known=None):
        """Results by name, and what was written."""
        options = zoo.parsed(["--cases", "2", *(word for kind in kinds for word in ("--only", kind)), *arguments])
        written = []
        with contextlib.redirect_stdout(io.StringIO()):
            found = zoo.run_part("toy", options, known or {}, written.append)
        return {name: row for (_, name), row in found.items()}, written

    def test_each_kind_of_end_has_its_verdict(self):
        found, _ = self.run_toys(*KINDS)
        self.assertEqual({name: row["verdict"] for name, row in found.items()}, KINDS)
        self.assertIn("loss", found["wrong"]["detail"])
        self.assertIn("12 parameters", found["impossible"]["detail"])
        self.assertGreater(found["right"]["values"], 50)

    def test_what_does_not_end_is_stopped_and_a_hang_is_told_from_slow_code(self):
        found, _ = self.run_toys(*STOPPED, arguments=("--limit", "15"))
        self.assertEqual({name: row["verdict"] for name, row in found.items()}, STOPPED)

    def test_a_wrong_value_fails_the_run_unless_it_is_expected(self):
        def code(expected):
            path = self.path("expected.txt")
            with open(path, "w", encoding="utf-8") as file:
                file.write(expected)
            kept, zoo.EXPECTED = zoo.EXPECTED, path
            try:
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    return zoo.conclude({("toy", "wrong"): row}), said.getvalue()
            finally:
                zoo.EXPECTED = kept

        row = self.run_toys("wrong")[0]["wrong"]
        number, said = code("# none\n")
        self.assertEqual(number, 1)
        self.assertIn("WRONG: toy wrong", said)
        self.assertIn(row["case"], said)
        self.assertEqual(code("toy | wrong | WRONG | a reason\n")[0], 0)
        self.assertEqual(code("toy | wrong | hang | a reason\n")[0], 1)

    def test_a_run_goes_on_where_it_was_broken_off(self):
        _, written = self.run_toys("right", "impossible")
        path = self.path("rows.jsonl")
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in written)
            file.write('{"part": "toy", "model": "rou')  # it was broken off here
        found, written = self.run_toys("right", "impossible", "rounded", known=zoo.read(path))
        self.assertEqual([row["model"] for row in written], ["rounded"])
        self.assertEqual(set(found), {"right", "impossible", "rounded"})
        _, written = self.run_toys("right", "impossible", arguments=("--again", "not buildable"), known=zoo.read(path))
        self.assertEqual([row["model"] for row in written], ["impossible"])

    def test_the_page_and_the_list_have_every_model_once_under_its_verdict(self):
        rows = {("torch", f"nn.{name}"): {"verdict": verdict, "values": 7, "detail": "12 parameters", "about": {}}
                for name, verdict in [*KINDS.items(), *STOPPED.items()]}
        text = zoo.page(rows, {("torch", "nn.wrong"): ("WRONG", "a reason")}) + zoo.models(rows)
        for name in [*KINDS, *STOPPED]:
            self.assertEqual(text.count(f"nn.{name}"), 1, name)
        self.assertIn("- nn.wrong: a reason", text)
        self.assertIn("| Modules of torch | 8 | 1 | 1 | 1 | 1 | 1 | 1 | 1 | 1 | 2 | 70 |", text)

    def test_a_sample_is_drawn_by_the_seed(self):
        module = types.SimpleNamespace(names=lambda: [str(i) for i in range(100)])

        def drawn(*arguments):
            return zoo.chosen("toy", module, zoo.parsed(list(arguments)))

        self.assertEqual(len(drawn("--sample", "9")), 9)
        self.assertEqual(drawn("--sample", "9"), drawn("--sample", "9"))
        self.assertNotEqual(drawn("--sample", "9"), drawn("--sample", "9", "--seed", "2"))
        self.assertEqual(drawn("--only", "1?"), [str(i) for i in range(10, 20)])

    def test_a_sample_of_the_modules_of_torch_trains_the_same_when_it_is_sharded(self):
        options = ["--part", "torch", "--sample", "8", "--cases", "2", "--seconds", "1", "--at-once", "1", "--seed", "3"]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = zoo.main(options)
        self.assertEqual(code, 0, said.getvalue())
        self.assertIn("torch: 8 models", said.getvalue())


if __name__ == "__main__":
    unittest.main()
