"""What `shardproof train` reports of a step: norms, zeros, memory, and event files for TensorBoard."""
import json
import os
import shutil
import struct
import subprocess
import unittest

import numpy

from training_runs import MODEL, SHARDPROOF, TrainingRuns

UNTIED = MODEL.replace(",tied", "")


def crc32c(data):
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(data):
    value = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) % 2**32


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def fields(data):
    """(number, value) of each field of a message of protocol buffers."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(data, at)
        else:
            size, at = varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = data[at:at + size], at + size
        yield number, value


def events(path):
    """The events of a file of TensorBoard, as dicts of fields; every checksum agrees."""
    with open(path, "rb") as file:
        data = file.read()
    while data:
        size = struct.unpack("<Q", data[:8])[0]
        event = data[12:12 + size]
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        assert struct.unpack("<I", data[12 + size:16 + size])[0] == masked(event)
        data = data[16 + size:]
        yield dict(fields(event))


def safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: numpy.frombuffer(data[8 + size:][slice(*entry["data_offsets"])], "<f4") for name, entry in header.items()}


class TrainLog(TrainingRuns):
    def step(self, *arguments, model=UNTIED):
        code, lines, output, errors = self.train("--steps", "1", "--global-batch", "4", "--microbatch", "1", *arguments,
                                                 model=model)
        self.assertEqual(code, 0, output + errors)
        return json.loads(lines[1])

    def test_norms_and_zeros_count_each_element_once_on_every_mesh(self):
        run = os.path.join(self.folder, "run")
        first = self.step("--mesh", "dp_shard=1", "--strategy", "ddp", "--checkpoint-dir", run)
        done = subprocess.run([SHARDPROOF, "checkpoint", "convert", os.path.join(run, "step_1"), os.path.join(run, "out"),
                               "--to", "safetensors"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        out = os.path.join(run, "out")
        path = out if os.path.isfile(out) else next(os.path.join(out, name) for name in os.listdir(out)
                                                    if name.endswith(".safetensors"))
        weights = {name: values for name, values in safetensors(path).items() if values.size and not name.startswith("optim")}
        norm = numpy.sqrt(sum(numpy.square(values.astype("f8")).sum() for values in weights.values()))
        self.assertAlmostEqual(first["parameter_norm"], norm, delta=1e-9 * norm)
        # Rows of the embedding whose byte is no input of the step have no gradient.
        text = b"".join(self.files[name] for name in sorted(self.files, key=os.fsencode))
        self.assertEqual(first["zero_gradients"], (256 - len(set(text[:4 * 6]))) * 8)
        for mesh, strategy in (("dp_shard=2", "zero3"), ("dp_shard=4", "zero1"), ("dp_replicate=2,dp_shard=2", "hsdp"),
                               ("dp_shard=2,tp=2", "zero2"), ("dp_replicate=2,dp_shard=1,cp=2", "hsdp")):
            other = self.step("--mesh", mesh, "--strategy", strategy)
            self.assertEqual(other["zero_gradients"], first["zero_gradients"], mesh)
            self.assertAlmostEqual(other["parameter_norm"], norm, delta=1e-5 * norm, msg=mesh)

    def test_a_sharded_rank_holds_less(self):
        big = "gpt(layers=2,hidden=64,heads=2,vocab=256,positions=6)"
        whole, sharded = (self.step("--mesh", "dp_shard=4", "--strategy", strategy, model=big)["held_bytes"]
                          for strategy in ("ddp", "zero3"))
        self.assertGreater(whole, 4 * 4 * 100000)  # parameters, gradients and two states of the optimizer
        self.assertLess(sharded, 0.7 * whole)

    def test_jsonl_is_another_name_of_json(self):
        path = os.path.join(self.folder, "run.jsonl")
        code, _, _, errors = self.train("--jsonl", path, "--json", path)
        self.assertEqual(code, 2, errors)
        done = subprocess.run([SHARDPROOF, "train", "--jsonl", path, "--steps", "1", "--seq", "6", "--model", MODEL,
                               "--data", os.path.join(self.folder, "data")], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(path, encoding="utf-8") as file:
            self.assertEqual([json.loads(line)["type"] for line in file], ["run", "step", "end"])

    def test_event_files_hold_what_the_json_lines_hold(self):
        folder = os.path.join(self.folder, "board")
        code, lines, output, errors = self.train("--tensorboard", folder, "--steps", "4", "--validation-part", "0.2",
                                                 "--validate-every", "2")
        self.assertEqual(code, 0, output + errors)
        name, = os.listdir(folder)
        self.assertRegex(name, r"^events\.out\.tfevents\.[0-9]{10}\.")
        first, *rest = events(os.path.join(folder, name))
        self.assertEqual(first[3], b"brain.Event:2")
        self.assertEqual(len(rest), 4)
        names = {"loss/train": "loss", "loss/validation": "validation_loss", "learning_rate": "lr",
                 "norm/gradient": "gradient_norm", "norm/parameters": "parameter_norm", "zero_gradients": "zero_gradients",
                 "tokens_per_s": "tokens_per_s", "held_bytes": "held_bytes"}
        for event, line in zip(rest, lines[1:-1], strict=True):
            step = json.loads(line)
            self.assertEqual(event[2], step["step"] + 1)
            self.assertGreater(struct.unpack("<d", event[1])[0], 1.7e9)
            values = {}
            for number, value in fields(event[5]):
                self.assertEqual(number, 1)
                parts = dict(fields(value))
                values[parts[1].decode()] = parts[2]
            expected = {tag: struct.pack("<f", step[key]) for tag, key in names.items() if step[key] is not None}
            self.assertEqual(values, expected)
        self.assertEqual(crc32c(b"123456789"), 0xE3069283)  # the check value of CRC-32C
        self.expect_refused("name another folder with --tensorboard", "--tensorboard", self.write("file", b"x"))

    def test_a_run_that_goes_on_has_each_step_once_in_its_lines_and_its_event_files(self):
        run, path, board = (os.path.join(self.folder, name) for name in ("run", "lines.jsonl", "board"))

        def lines(*arguments, folder=run):
            code, _, output, errors = self.train("--resume", "--save-every", "4", "--tensorboard", board, "--json", path,
                                                 "--checkpoint-dir", folder, *arguments)
            self.assertEqual(code, 0, output + errors)
            with open(path, encoding="utf-8") as file:
                return [json.loads(line) for line in file]

        lines("--steps", "6")
        shutil.rmtree(os.path.join(run, "step_6"))  # as if it had been killed after its sixth step
        with open(path, "a", encoding="utf-8") as file:
            file.write('{"type":"step","st')
        went_on = lines("--steps", "10")
        self.assertEqual([line["type"] for line in went_on], ["run"] + 4 * ["step"] + ["run"] + 6 * ["step"] + ["end"])
        steps = [line for line in went_on if line["type"] == "step"]
        self.assertEqual([step["step"] for step in steps], list(range(10)))
        through = self.losses(self.train("--steps", "10")[1])
        self.assertEqual({step["step"]: step["loss"] for step in steps},
                         {number: json.loads(line.rstrip(",") + "}")["loss"] for number, line in through.items()})
        shown = {}
        for name in sorted(os.listdir(board)):
            for event in events(os.path.join(board, name)):
                if 7 in event:
                    self.assertEqual(dict(fields(event[7])), {1: 1})  # START: TensorBoard drops this step and later ones
                    shown = {step: count for step, count in shown.items() if step < event[2]}
                elif 5 in event:
                    shown[event[2]] = shown.get(event[2], 0) + 1
        self.assertEqual(shown, {step: 1 for step in range(1, 11)})
        self.assertEqual(lines("--steps", "10")[:-2], went_on)
        begun = lines("--steps", "2", folder=os.path.join(self.folder, "other"))
        self.assertEqual([line["type"] for line in begun], ["run", "step", "step", "end"])


if __name__ == "__main__":
    unittest.main()
