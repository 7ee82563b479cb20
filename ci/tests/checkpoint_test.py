"""Checkpoints of real PyTorch through `shardproof checkpoint`, and ours through real PyTorch.

PyTorch is imported only where a test needs it, for that takes longer than the tests that do without it.
"""
import json
import os
import pickle
import struct
import subprocess
import unittest

from peer_ranks import run_ranks
from scratch import ScratchCase

COMMAND = os.path.join(os.environ["SHARDPROOF_BUILD"], "shardproof")
DRIVER = os.path.join(os.environ["SHARDPROOF_BUILD"], "checkpoint_driver")


def ranks(world, *arguments):
    import checkpoint_peers  # noqa: F401, the ranks are forks, and find here what it imports
    run_ranks("checkpoint_peers.py", world, arguments)


def shardproof(*arguments, code=0):
    done = subprocess.run([COMMAND, "checkpoint", *arguments], capture_output=True, text=True)
    if done.returncode != code:
        raise AssertionError(f"checkpoint {arguments}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout + done.stderr


HOSTILE = ["a\x1b]0;owned\x07", "b\x1b[2Jc", "one\ntwo", "\r\x7f\x9b31m", "\u202eabc\u2066", "fine.\u00e4.\U0001f600",
           "line\u2028two"]
UNSEEN = [*range(0x20), *range(0x7f, 0xa0), 0x61c, 0x200e, 0x200f, *range(0x2028, 0x202f), *range(0x2066, 0x206a)]


def shown(*arguments):
    """The lines that the command prints, whatever its exit code, all of which a terminal can be given."""
    done = subprocess.run([COMMAND, "checkpoint", *arguments], capture_output=True)
    text = (done.stdout + done.stderr).decode("utf-8")
    bad = {character for character in text if ord(character) in UNSEEN and character != "\n"}
    if bad or done.returncode not in (0, 1, 2):
        raise AssertionError(f"checkpoint {arguments}: exit code {done.returncode}, {bad} in {text[-2000:]!r}")
    return text.splitlines()


def write_safetensors(path, names, dtype="F32"):
    header = {name: {"dtype": dtype, "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + bytes(4 * len(names)))


class Checkpoint(ScratchCase):
    def there_and_back(self, kind, save_ranks, load_ranks):
        """PyTorch saves; we verify, copy, and cut anew; PyTorch loads each, on other ranks, to the same bits."""
        theirs, ours, cut = self.path("theirs"), self.path("ours"), self.path("cut")
        ranks(save_ranks, "save", kind, theirs)
        shardproof("verify", theirs)
        shardproof("convert", theirs, ours)
        shardproof("reshard", theirs, cut, "--mesh", "dp_shard=3")
        for folder in (ours, cut):
            self.assertIn("sidecar's checksums", shardproof("verify", folder))
            self.assertIn(" 0 differ", shardproof("diff", theirs, folder))
            ranks(load_ranks, "load", kind, folder, theirs + ".expected")
        return theirs

    def test_plain_dicts_come_back(self):
        self.there_and_back("plain", 1, 1)

    def test_fsdp2_on_2_comes_back_on_4(self):
        self.there_and_back("fsdp2", 2, 4)

    def test_fsdp2_on_4_with_empty_shards_comes_back_on_2(self):
        self.there_and_back("fsdp2", 4, 2)

    def test_hsdp_with_replicas_saved_once_comes_back(self):
        self.there_and_back("hsdp", 4, 2)

    def test_fsdp2_with_tensor_parallel_comes_back(self):
        self.there_and_back("fsdp2_tp", 4, 2)

    def test_pickles_of_both_protocols_are_what_python_reads(self):
        numbers = [(1 << power) + near for power in range(64) for near in (-1, 0, 1)]
        numbers = [number - (1 << 64) if number >= 1 << 63 else number for number in numbers]
        import torch
        expected = {"numbers": numbers + [0.0, -0.5, 1e300, 5e-324],
                    "texts": tuple("x" * (i % 300) + "\u00e4" for i in range(600)),
                    "nested": [None, True, False, bytes(range(256)), [], {}, *(tuple(range(i)) for i in range(6)),
                               torch.Size(range(6)), torch.float32, torch.float32]}
        for protocol in "24":
            written = subprocess.run([DRIVER, "pickle", protocol], capture_output=True, check=True).stdout
            self.assertEqual(written[1], int(protocol))
            got = pickle.loads(written)
            self.assertEqual(got, expected)
            self.assertEqual([type(value) for value in got["numbers"]], [type(value) for value in expected["numbers"]])
            self.assertEqual(type(got["nested"][12]), torch.Size)

    def test_our_folder_is_what_dcp_to_torch_save_reads_and_our_file_what_torch_load_does(self):
        import checkpoint_peers
        import torch
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        theirs, ours = self.path("theirs"), self.path("ours")
        ranks(1, "save", "plain", theirs)
        shardproof("convert", theirs, ours)
        shardproof("convert", theirs, self.path("full.pt"), "--to", "torch")
        for folder in (theirs, ours):
            dcp_to_torch_save(folder, folder + ".pt")
        expected = dict(checkpoint_peers.flat(torch.load(theirs + ".pt", weights_only=False)))
        for name, safe in (("ours.pt", False), ("full.pt", True)):
            got = dict(checkpoint_peers.flat(torch.load(self.path(name), weights_only=safe)))
            self.assertEqual(set(expected), set(got))
            for key, value in expected.items():
                self.assertTrue(checkpoint_peers.same(value, got[key]), (name, key, value, got[key]))

    def test_every_tensor_entry_is_what_torch_load_reads_with_weights_only(self):
        import torch
        theirs, ours, listing = self.path("theirs"), self.path("ours"), self.path("list.json")
        ranks(1, "save", "plain", theirs)
        shardproof("convert", theirs, ours)
        shardproof("inspect", ours, "--json", listing)
        with open(listing, encoding="utf-8") as file:
            tensors = [entry for entry in map(json.loads, file) if entry["type"] == "tensor"]
        self.assertGreater(len(tensors), 7)
        for tensor in tensors:
            for box in tensor["boxes"]:
                with open(os.path.join(ours, box["file"]), "rb") as file:
                    file.seek(box["offset"])
                    data = file.read(box["length"])
                piece = self.path("entry.pt")
                with open(piece, "wb") as file:
                    file.write(data)
                loaded = torch.load(piece, weights_only=True)
                self.assertEqual(list(loaded.shape), box["sizes"])
                self.assertEqual(str(loaded.dtype), "torch." + tensor["dtype"])

    def test_safetensors_are_laid_out_as_the_format_says(self):
        import numpy
        import torch
        theirs, one, many, back = (self.path(n) for n in ("theirs", "one", "many", "back"))
        ranks(2, "save", "fsdp2", theirs)
        shardproof("convert", theirs, one, "--to", "safetensors")
        shardproof("convert", theirs, many, "--to", "safetensors", "--file-bytes-max", "300")
        shardproof("diff", one, many)
        shardproof("convert", many, back)
        shardproof("verify", back)
        expected = torch.load(theirs + ".expected", weights_only=False)
        with open(os.path.join(one, "model.safetensors"), "rb") as file:
            data = file.read()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + length])
        self.assertEqual(header.pop("__metadata__"), {"format": "pt"})
        for name, entry in header.items():
            tensor = expected["." + name] if "." + name in expected else None
            if tensor is None or entry["dtype"] != "F32":
                continue
            begin, end = entry["data_offsets"]
            got = numpy.frombuffer(data[8 + length + begin:8 + length + end], dtype="<f4").reshape(entry["shape"])
            numpy.testing.assert_array_equal(got.view("u4"), tensor.numpy().view("u4"))
        with open(os.path.join(many, "model.safetensors.index.json"), encoding="utf-8") as file:
            self.assertGreater(len(set(json.load(file)["weight_map"].values())), 2)

    def test_a_flipped_bit_that_pytorch_loads_silently_is_found(self):
        import torch
        theirs = self.path("theirs")
        ranks(1, "save", "plain", theirs)
        listing = self.path("list.json")
        shardproof("inspect", theirs, "--json", listing)
        with open(listing, encoding="utf-8") as file:
            box = next(e for e in map(json.loads, file) if e.get("name") == "model.double")["boxes"][0]
        path = os.path.join(theirs, box["file"])
        expected = torch.load(theirs + ".expected", weights_only=False)
        payload = expected[".model.double"].numpy().tobytes()
        with open(path, "rb") as file:
            data = bytearray(file.read())
        data[data.find(payload) + 6] ^= 1
        with open(path, "wb") as file:
            file.write(data)
        with self.assertRaisesRegex(AssertionError, "differ: .*model.double"):
            ranks(1, "load", "plain", theirs, theirs + ".expected")  # PyTorch gives the wrong values without a word
        output = shardproof("verify", theirs, code=1)
        self.assertIn("model.double", output)
        self.assertIn("data/0 is damaged", output)
        self.assertIn("model.double", shardproof("convert", theirs, self.path("copy"), code=2))
        self.assertFalse(os.path.exists(self.path("copy")))

    def test_differences_are_named_and_wrong_usage_is_told(self):
        one, two = self.path("theirs"), self.path("two")
        ranks(1, "save", "plain", one)
        shardproof("convert", one, two)
        shardproof("convert", one, two, code=2)
        shardproof("convert", one, two, "--overwrite")
        shardproof("verify", self.path("absent"), code=2)
        shardproof("convert", one, self.path("three"), "--to", "onnx", code=2)
        shardproof("reshard", one, self.path("three"), "--mesh", "tp=2", code=2)
        os.remove(os.path.join(two, ".metadata"))
        self.assertIn("is missing", shardproof("verify", two, code=1))

    def test_a_tensor_of_one_element_that_claims_more_bytes_than_can_be_counted_is_refused(self):
        import torch
        file = self.path("many.pt")
        for dtype, elements in ((torch.float32, 2**62), (torch.float64, 2**61 + 3), (torch.complex128, 2**60)):
            torch.save({"w": torch.zeros(1, dtype=dtype).expand(elements)}, file)
            for command in (["convert", file, self.path("out")], ["convert", file, self.path("out.pt"), "--to", "torch"],
                            ["diff", file, file]):
                self.assertRegex(shardproof(*command, code=2), r"many\.pt.*\bw\b.* 2\^63 bytes")

    def test_a_folder_of_checkpoints_is_told_from_one_and_the_newest_is_named(self):
        file, run = self.path("one.safetensors"), self.path("run")
        write_safetensors(file, ["first"])
        for step in (2, 10):
            os.makedirs(run, exist_ok=True)
            shardproof("convert", file, os.path.join(run, f"step_{step}"))
        for command in (("inspect", run), ("convert", run, self.path("out")), ("verify", run)):
            said = shardproof(*command, code=2)
            self.assertIn(f"{run} is a folder of checkpoints, and no checkpoint. The newest one in it is {run}/step_10", said)
        shardproof("inspect", os.path.join(run, "step_10"))

    def test_a_pointer_of_git_lfs_is_called_one(self):
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 988097824\n"
        for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
            folder = self.path(name + "_folder")
            os.makedirs(folder)
            with open(os.path.join(folder, name), "w", encoding="ascii") as file:
                file.write(pointer)
            said = shardproof("convert", folder, self.path("out"), code=2)
            self.assertIn(f"{name}: this is a pointer of Git LFS", said)
            self.assertIn("git lfs pull", said)

    def test_names_in_files_are_shown_and_never_obeyed(self):
        one, other, listing = self.path("a.safetensors"), self.path("b.safetensors"), self.path("list.json")
        write_safetensors(one, HOSTILE)
        write_safetensors(other, HOSTILE[1:])
        lines = shown("inspect", one, "--boxes", "--json", listing)
        self.assertTrue(any(line.startswith("a\\x1b]0;owned\\x07 ") for line in lines), lines)
        self.assertEqual(sum("float32" in line for line in lines), len(HOSTILE))  # a name makes no lines
        with open(listing, encoding="ascii") as file:  # a program gets the name itself
            self.assertEqual({json.loads(line)["name"] for line in file}, set(HOSTILE))
        self.assertIn("only in the first", " ".join(shown("diff", one, other)))
        folder = self.path("folder")
        shown("convert", one, folder)
        for command in (["inspect", folder], ["verify", folder], ["diff", one, folder], ["reshard", folder, self.path("cut"),
                        "--mesh", "dp_shard=2"], ["convert", folder, self.path("back"), "--to", "safetensors"],
                        ["convert", folder, self.path("file.pt"), "--to", "torch"]):
            self.assertTrue(shown(*command))
        for name in HOSTILE:
            wrong = self.path("wrong.safetensors")
            write_safetensors(wrong, [name], dtype=name)
            self.assertEqual(len(shown("inspect", wrong)), 1)  # one error, one line

    def test_people_read_sizes_and_times_in_their_units_and_programs_in_bytes_and_seconds(self):
        one, folder, listing = self.path("one.safetensors"), self.path("folder"), self.path("list.json")
        write_safetensors(one, ["first", "second"])
        shown("convert", one, folder)
        lines = shown("inspect", folder, "--boxes", "--json", listing)
        self.assertRegex(lines[0], r"^first +float32 +\[1\] +4 B in 1 box$")
        self.assertRegex(lines[1], r"^  \[0:1\] +\S+ from byte [0-9]+ on, [0-9.]+ (B|KiB)$")
        self.assertRegex(lines[-1], r"^2 tensors, 8 B; [0-9]+ values?; with checksums$")
        with open(listing, encoding="ascii") as file:
            self.assertEqual(json.loads(file.readline())["bytes"], 4)
        self.assertRegex(shardproof("verify", folder, "--json", listing).splitlines()[0],
                         r"^[0-9]+ entries, [0-9.]+ KiB in [0-9.]+ (us|ms|s), against the sidecar's checksums: 0 problems$")
        with open(listing, encoding="ascii") as file:
            verified = json.loads(file.readline())
        self.assertGreater(verified["bytes"], 1000)
        self.assertGreater(verified["seconds"], 0)

    def test_damaged_names_and_hostile_names_of_files_make_readable_messages(self):
        one, folder = self.path("one.safetensors"), self.path("folder")
        write_safetensors(one, ["layers.first.weight", "layers.second.weight"])
        shown("convert", one, folder)
        path = os.path.join(folder, ".metadata")
        with open(path, "rb") as file:
            data = file.read()
        at = data.find(b"layers.first.weight")
        for value in (0x1b, 0x80, 0xff, 0x0a):
            damaged = bytearray(data)
            damaged[at + 3] = value
            with open(path, "wb") as file:
                file.write(damaged)
            for command in (["inspect", folder, "--boxes", "--json", self.path("list.json")], ["verify", folder, "--json",
                            self.path("found.json")], ["diff", one, folder, "--json", self.path("diff.json")],
                            ["reshard", folder, self.path("cut"), "--overwrite", "--mesh", "dp_shard=2"],
                            ["convert", folder, self.path("back"), "--overwrite", "--to", "safetensors"]):
                self.assertTrue(shown(*command), command)
            for name in ("list.json", "found.json", "diff.json"):
                with open(self.path(name), encoding="ascii") as file:
                    for line in file:
                        json.loads(line)
        for name in HOSTILE:
            with open(self.path("model.safetensors.index.json"), "w", encoding="utf-8") as file:
                json.dump({"weight_map": {"weight": name}}, file, ensure_ascii=False)
            self.assertTrue(shown("inspect", self.root))


if __name__ == "__main__":
    unittest.main()
