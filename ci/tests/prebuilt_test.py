"""ci/prebuilt and ci/gpu --prebuilt, with programs that are scripts. prebuilt_nightly_test.py has the real ones."""
import argparse
import io
import json
import os
import random
import re
import sys
import tarfile
import unittest
from contextlib import redirect_stdout
from unittest import mock

from scratch import ScratchCase, load, write

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "ci"))
from runner import Trouble, prebuilt, session, stages, summary  # noqa: E402

ci_prebuilt = load("prebuilt")
NO_DRIVER = "[cuda] CUDA cannot be used here: no driver. Use the CPU, or look at nvidia-smi"
OWN = "%d.%d" % sys.version_info[:2]


class Prebuilt(ScratchCase):
    def archive(self, pythons=(OWN,), torch="2.11",
                program=f'case "$1" in --version) ;; *) echo "{NO_DRIVER}"; exit 2 ;; esac'):
        """An archive whose programs are this script."""
        folder = self.path(prebuilt.FOLDER)
        write(os.path.join(folder, "prebuilt.json"), json.dumps({"tree": "abc123", "torch": torch, "pythons": pythons}))
        for name in ("shardproof", "device_math_props"):
            write(os.path.join(folder, name), f"#!/bin/sh\necho $0 $1 >> {self.path('ran')}\n{program}\n", 0o755)
        write(os.path.join(folder, "tests.cmake"), "add_test(a @BUILD@/a @SOURCE@ @PYTHON@)\n")
        os.makedirs(os.path.join(folder, "wheels"), exist_ok=True)
        with redirect_stdout(io.StringIO()):
            ci_prebuilt.pack(folder, self.path("p.tar.xz"))
        return self.path("p.tar.xz")

    def python(self, version=OWN):
        """A Python that says that it has torch."""
        torch = os.path.dirname(write(self.path("env/site-packages/torch/version.py"), "__version__ = '2.11.0+cu130'\n"))
        said = {"version": version, "executable": sys.executable, "sites": [], "embeds": False, "headers": False,
                "torch": torch}
        return write(self.path("env/bin/python3"), f"#!/bin/sh\necho '{json.dumps(said)}'\n", 0o755)

    def session(self, archive, minutes=1.0, rehearse=False, **more):
        options = argparse.Namespace(out=self.path("out"), build=self.path("build"), minutes=minutes, go_on=False, only="",
                                     rehearse=rehearse, bundle=None, prebuilt=archive)
        with mock.patch.dict(os.environ, {"SHARDPROOF_PYTHON": self.python(**more), "PATH": self.path("empty"),
                                          "CUDA_HOME": self.path("empty")}):
            return session.Session(ROOT, options)

    def run_session(self, archive, **more):
        """The exit code, and what was printed."""
        out = io.StringIO()
        with redirect_stdout(out), mock.patch.dict(os.environ, {"SHARDPROOF_PYTHON": self.python(**more),
                                                                "PATH": self.path("empty"), "CUDA_HOME": self.path("empty")}):
            # Without those that need more than a shell.
            given = tuple(stage for stage in stages.STAGES if not re.search("{python}|^rm ", stage.command))
            code = self.session(archive, **more).run(given)
        return code, out.getvalue().splitlines()

    # On the runner.

    def test_the_first_kernel_comes_before_all_else_and_no_compiler_is_needed(self):
        code, lines = self.run_session(self.archive())
        self.assertEqual(code, 2)
        verdicts = [line.split("] ", 1)[1] for line in lines if ": no GPU" in line or ": not run" in line]
        self.assertTrue(verdicts[0].startswith("first-kernel: no GPU: [cuda] CUDA cannot be used here: no driver"), verdicts[0])
        with open(self.path("ran"), encoding="utf-8") as file:
            ran = [os.path.basename(line.split()[0]) for line in file]
        self.assertEqual(ran[:2], ["shardproof", "device_math_props"])  # the look whether it loads, and the kernel
        results = summary.read_results(self.path("out/results.json"))
        self.assertFalse(set(results["stages"]) & set(session.BUILDS))
        self.assertIn("first_verdict_seconds", results)
        self.assertIn("built elsewhere, from abc123", results["notes"])
        self.assertLessEqual(len(os.listdir(self.path("out"))), 8)

    def reason(self, archive, **more):
        """What is said where the archive is not taken. Without a compiler that is the end."""
        out = io.StringIO()
        with self.assertRaisesRegex(Trouble, "there is no cmake"), redirect_stdout(out):
            with mock.patch.dict(os.environ, {"SHARDPROOF_PYTHON": self.python(**more), "PATH": self.path("empty")}):
                self.session(archive, **more).find_machine()
        machine, said = out.getvalue().splitlines()
        self.assertIn("torch 2.11.0+cu130 of ", machine)
        self.assertIn(f"{archive} does not load here, so this builds: ", said)
        return said

    def test_one_line_says_why_an_archive_does_not_load_and_then_it_builds(self):
        self.assertIn("no modules for Python 3.9, only for 3.12, 3.13",
                      self.reason(self.archive(("3.12", "3.13")), version="3.9"))
        glibc = "/lib/libc.so.6: version 'GLIBC_2.38' not found (required by ./shardproof)"
        self.assertIn(glibc, self.reason(self.archive(program=f'echo noise; echo "{glibc}" >&2; exit 1')))
        self.assertIn("it was built with torch 2.15, and this Python has 2.11.0+cu130", self.reason(self.archive(torch="2.15")))
        other = "symbol lookup error: undefined symbol: _ZN2at3newEv"
        self.assertIn(f"exit code 127: {other}", self.reason(self.archive(
            program=f'test "$LD_BIND_NOW" = 1 && echo "{other}" >&2 && exit 127')))
        archive = self.archive()
        with open(archive, "r+b") as file:
            file.truncate(os.path.getsize(archive) // 2)
        self.assertIn("damaged", self.reason(archive))
        self.assertIn("is no prebuilt, or a damaged one", self.reason(write(self.path("garbage"), "garbage")))
        self.assertIn("cannot read", self.reason(self.path("none.tar.xz")))

    def test_tests_and_programs_find_what_they_need_by_links(self):
        said = {"version": OWN, "torch": "/site/torch", "release": "2.11.0"}
        folder, why_not = prebuilt.take(self.archive(), self.path("taken"), ROOT, said)
        self.assertIsNone(why_not)
        prebuilt.lay_tests(folder, ROOT, "/its/python")
        with open(os.path.join(folder, "CTestTestfile.cmake"), encoding="utf-8") as file:
            self.assertEqual(file.read(), f"add_test(a {folder}/a {ROOT} /its/python)\n")
        self.assertEqual({name: os.readlink(os.path.join(folder, name)) for name in ("packages", "source")},
                         {"packages": "/site", "source": ROOT})

    # The archive.

    def test_a_file_that_names_a_folder_of_the_machine_is_refused(self):
        write(self.path("archive/programs/one"), "text")
        ci_prebuilt.require_movable(self.path("archive"), {"/where/it/lies"})
        with open(self.path("archive/programs/one"), "ab") as file:
            file.write(b"\x7fELF\0\0/where/it/lies/impl/src/a.cpp\0more")
        with self.assertRaisesRegex(Trouble, "^programs/one names a folder of this machine: /where/it/lies/impl/src/a.cpp$"):
            ci_prebuilt.require_movable(self.path("archive"), {"/where/it/lies"})
        self.assertLessEqual({ROOT, os.path.realpath(ROOT), self.path("build")},
                             ci_prebuilt.names_of_this_machine(self.path("build")))

    def test_names_of_sources_in_programs_keep_their_length_and_lose_their_folder(self):
        content = b"\0/src/a.cpp\0impl/src/b.cpp\0/other/tree/c.h\0/usr/include/d.h\0see /src/e\0/src/folder\0"
        shown = ci_prebuilt.without_folders(content)
        self.assertEqual(shown, b"\0.////a.cpp\0impl/src/b.cpp\0.///////////c.h\0/usr/include/d.h\0see /src/e\0/src/folder\0")
        write(self.path("archive/program"), shown.decode())
        with self.assertRaisesRegex(Trouble, "^program names a folder of this machine: /src/e$"):
            ci_prebuilt.require_movable(self.path("archive"), ["/src"])

    def test_an_archive_is_the_same_for_the_same_files_and_one_of_more_than_12_mib_is_refused(self):
        contents = []
        for _ in range(2):
            with open(self.archive(), "rb") as file:
                contents.append(file.read())
            os.utime(self.path(prebuilt.FOLDER + "/prebuilt.json"), (1, 1))
        self.assertEqual(*contents)
        with open(self.path(prebuilt.FOLDER + "/large"), "wb") as file:
            file.write(random.Random(0).randbytes(ci_prebuilt.SIZE_MAX))
        self.assertEqual(ci_prebuilt.SIZE_MAX, 12 * 2**20)
        with self.assertRaisesRegex(Trouble, "the archive has 12.0 MiB, more than 12"):
            ci_prebuilt.pack(self.path(prebuilt.FOLDER), self.path("large.tar.xz"))
        self.assertFalse(os.path.exists(self.path("large.tar.xz")))

    def test_a_python_whose_headers_are_nowhere_is_left_out_with_the_reason(self):
        write(self.path("include/python3.11/Python.h"), "")
        with mock.patch.multiple(ci_prebuilt, HEADERS=(self.path("include/python{0}"),), PYTHONS=("3.11", "3.14"),
                                 debian_suites=mock.Mock(side_effect=Trouble("ended with 100:\nno server"))):
            found, missing = ci_prebuilt.find_headers(self.path("build"))
        self.assertEqual(found, {"3.11": self.path("include/python3.11")})
        self.assertEqual(missing, {"3.14": "no headers here, and none from Debian: no server"})

    def test_the_tests_in_an_archive_name_no_folder_of_the_machine(self):
        build = os.path.realpath(os.environ["SHARDPROOF_BUILD"])
        with mock.patch.multiple(ci_prebuilt, ROOT=os.path.dirname(build), VENV=os.path.join(os.path.dirname(build), ".venv")):
            text = ci_prebuilt.tests_file(build)
        self.assertNotIn(build, text)
        self.assertNotIn("NOT_BUILT", text)
        self.assertIn("[==[@BUILD@/nccl_props]==] [==[--gtest_filter=Nccl.", text)
        self.assertIn("[==[@PYTHON@]==] [==[-m]==] [==[pytest]==]", text)
        self.assertIn("ENVIRONMENT [==[PYTHONPATH=@BUILD@/python;", text)

    def test_an_archive_has_few_files(self):
        with tarfile.open(self.archive()) as archive:
            self.assertEqual({name.split("/")[0] for name in archive.getnames()}, {prebuilt.FOLDER})


if __name__ == "__main__":
    unittest.main()
