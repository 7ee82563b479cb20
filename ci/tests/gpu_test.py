"""ci/gpu and ci/bundle, as far as a machine without a GPU and an index goes. ci/prebuilt: prebuilt_test.py."""
import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import unittest
import zipfile
from contextlib import redirect_stdout
from unittest import mock

from scratch import ScratchCase, write

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "ci"))
from runner import Trouble, archives, environment, execute, session, stages, summary  # noqa: E402

NO_DRIVER = "[cuda] CUDA cannot be used here: no driver. Use the CPU, or look at nvidia-smi"


class Machine(session.Session):
    """A session that has found its machine already, and builds nothing."""

    def find_machine(self):
        self.has_gpu, self.environment = False, self.build
        self.results["machine"] = {"gpus": [], "torch": "2.11.0", "python": "3.12", "cores": 2}


class Gpu(ScratchCase):
    def run_stages(self, *given, go_on=False, minutes=1.0, only=""):
        options = argparse.Namespace(out=self.path("out"), build=self.path("build"), minutes=minutes, go_on=go_on, only=only,
                                     rehearse=False, bundle=None, prebuilt=None)
        with redirect_stdout(io.StringIO()):
            code = Machine(ROOT, options).run(given)
        results = summary.read_results(self.path("out/results.json"))["stages"]
        return code, {name: result["status"] for name, result in results.items()}

    def ran(self):
        with open(self.path("ran"), encoding="utf-8") as file:
            return file.read().split()

    def stage(self, name, command="true", **more):
        return stages.Stage(name, "Title", f"echo {name} >> {self.path('ran')}; {command}", least=0, **{"alone": True, **more})

    # Stages.

    def test_a_stage_that_fails_leaves_the_others_and_is_tried_again_last(self):
        broken = self.stage("broken", f"test -e {self.path('mended')}")
        code, status = self.run_stages(self.stage("first"), broken, self.stage("third"))
        self.assertEqual((code, status), (1, {"first": "passed", "broken": "failed", "third": "passed"}))
        results = summary.read_results(self.path("out/results.json"))
        before = results["first_verdict_seconds"] = 77.0
        summary.write_results(self.path("out/results.json"), results)
        write(self.path("mended"), "")
        code, status = self.run_stages(self.stage("first"), broken, self.stage("third"), self.stage("new"), go_on=True)
        self.assertEqual((code, status["broken"]), (0, "passed"))
        # When the first verdict came is the first call's to say: later ones find things built.
        self.assertEqual(summary.read_results(self.path("out/results.json"))["first_verdict_seconds"], before)
        self.assertEqual(self.ran(), ["first", "broken", "third", "new", "broken"])

    def test_a_stage_whose_time_is_over_ends_with_all_that_it_started(self):
        begin = time.monotonic()
        late = f"(sleep 3; echo late > {self.path('late')}) & sleep 60"
        code, status = self.run_stages(self.stage("long", late, most=1), self.stage("next"))
        self.assertEqual((code, status), (1, {"long": "timed out", "next": "passed"}))
        time.sleep(max(0.0, begin + 4 - time.monotonic()))
        self.assertFalse(os.path.exists(self.path("late")))

    def test_an_interrupt_ends_all_stages_that_run_side_by_side(self):
        def long(name):
            return self.stage(name, "sleep 60", alone=False)
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with self.assertRaises(KeyboardInterrupt), mock.patch.object(session, "lanes", lambda: 2):
            self.run_stages(long("left"), long("right"), long("never"))
        self.assertLess(time.monotonic() - begin, 30)
        self.assertEqual(sorted(self.ran()), ["left", "right"])
        self.assertEqual(execute.running, set())

    def test_a_stage_for_which_too_little_time_is_left_runs_when_the_next_call_continues(self):
        def stage(least):
            return stages.Stage("slow", "Title", "true", least=least)
        self.assertEqual(self.run_stages(stage(600)), (2, {"slow": "no time"}))
        self.assertEqual(self.run_stages(stage(1), go_on=True), (0, {"slow": "passed"}))

    def test_a_stage_without_what_it_needs_is_not_run(self):
        code, status = self.run_stages(self.stage("base", "false"), self.stage("on_top", needs=("base",)),
                                       self.stage("tooled", "{no-such-tool}", tool="no-such-tool"))
        self.assertEqual((code, status), (1, {"base": "failed", "on_top": "not run", "tooled": "not run"}))

    def test_only_the_stages_asked_for_run_with_what_they_need(self):
        given = self.stage("base"), self.stage("other"), self.stage("wanted", needs=("base",))
        self.assertEqual(self.run_stages(*given, only="wanted")[1], {"base": "passed", "wanted": "passed"})

    def test_the_summary_names_every_stage_and_its_figures(self):
        figure = json.dumps({"type": "kernel", "kernel": "adamw", "gb_per_s_median": 2400.0, "share_of_copy_median": 0.87})
        saves = [{"type": "bench_checkpoint", "timed": "save", "ours_ms": [4.0], "pytorch_ms": [9.0]},
                 {"type": "bench_checkpoint", "timed": "step_with_save", "ours_ms": [7.0]}]
        file = write(self.path("figure"), "\n".join([figure, *map(json.dumps, saves)]))
        self.run_stages(self.stage("bench", f"cp {file} {{json}}", json=True), self.stage("broken", "echo why; false"),
                        self.stage("build", "echo 'x.h:4: fatal error: y.h: No such file | or so'; echo stopped; false"))
        with open(self.path("out/summary.md"), encoding="utf-8") as file:
            page = file.read()
        for text in ("| bench: Title | **passed** |", "| broken: Title | **failed** |", "exit code 1: why",
                     "x.h:4: fatal error: y.h: No such file \\| or so |",
                     "adamw: 2400 GB/s, 0.87 of a copy", "checkpoint, save: 4 ms, PyTorch 9 ms\n",
                     "checkpoint, step_with_save: 7 ms\n"):
            self.assertIn(text, page)

    def test_stages_that_judge_run_side_by_side_and_those_that_time_run_alone(self):
        # Each of the pair waits for the other to have begun; alone, it would wait until its time is over.
        def meets(own, other):
            return self.stage(own, f"touch {self.path(own + '_begun')}; while ! test -e {self.path(other + '_begun')}; do "
                              "sleep 0.02; done", alone=False, most=30)
        def times(name):
            return self.stage(name, f"! test -e {self.path('timing')} && touch {self.path('timing')} && sleep 0.1; "
                              f"code=$?; rm -f {self.path('timing')}; exit $code")
        code, status = self.run_stages(meets("left", "right"), meets("right", "left"), times("first"), times("second"))
        self.assertEqual((code, set(status.values())), (0, {"passed"}))
        self.assertEqual(self.ran()[2:], ["first", "second"])

    def test_stages_with_times_are_alone_and_the_first_kernel_comes_before_all_others(self):
        runs = [stage for stage in stages.STAGES if not stage.targets and stage.name != "configure"]
        self.assertEqual(runs[0].name, "first-kernel")
        alone = [stage.name for stage in runs if stage.alone]
        self.assertEqual(alone, ["first-kernel"] + [stage.name for stage in runs if re.match("bench-|step-", stage.name)])
        self.assertEqual([stage.name for stage in runs[-len(alone) + 1:]], alone[1:])  # one group side by side before them

    def test_few_files_come_back(self):
        self.run_stages(*(self.stage(f"stage{index}", "echo {profile} > {profile}.json") for index in range(9)))
        left = sorted(os.listdir(self.path("out")))
        self.assertEqual(left, ["logs.tar.gz", "profiles.tar.gz", "results.json", "summary.md"])
        with tarfile.open(self.path("out/logs.tar.gz")) as logs, tarfile.open(self.path("out/profiles.tar.gz")) as profiles:
            self.assertLessEqual({f"logs/stage{index}.log" for index in range(9)}, set(logs.getnames()))
            self.assertLessEqual({f"profiles/stage{index}.json" for index in range(9)}, set(profiles.getnames()))

    # Verdicts.

    def test_no_gpu_is_told_from_failures(self):
        skipped = "[==========] 9 tests ran.\n[  PASSED  ] 0 tests.\n[  SKIPPED ] 9 tests, listed below:\n"
        broken = "[  PASSED  ] 8 tests.\n[  FAILED  ] 1 test, listed below:\n"
        for code, output, has_gpu, status in (
                (0, "fine", False, "passed"), (2, NO_DRIVER, False, "no GPU"), (2, NO_DRIVER, True, "failed"),
                (0, skipped, False, "no GPU"), (0, skipped, True, "failed"), (1, broken, False, "failed"),
                (1, "[verify] a case differs", False, "failed"), (None, "", False, "timed out")):
            self.assertEqual(execute.judge(code, output, has_gpu)[0], status, (code, output, has_gpu))
        self.assertEqual(execute.judge(0, "", False, (200, 0, 96)), ("no GPU", "200 passed, 0 failed, 96 skipped"))
        self.assertEqual(execute.judge(8, "", False, (200, 1, 96))[0], "failed")

    def test_the_commands_of_the_stages_are_understood_and_say_no_gpu_here(self):
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("this machine has a GPU")
        build = os.environ["SHARDPROOF_BUILD"]
        values = {"build": build, "scratch": self.path("s"), "failures": self.path("f"), "json": self.path("j"),
                  "junit": self.path("x"), "seed": 7, "minutes": "0.1", "jobs": 1, "ctest": "ctest", "root": ROOT,
                  "python": sys.executable, "profile": self.path("p")}
        of_a_gpu = r"(shardproof|[.]py) .*(--device cuda|kernels --mib)"
        tried = [stage for stage in stages.STAGES if re.search(of_a_gpu, stage.command)]
        self.assertGreaterEqual(len(tried), 8)
        for stage in tried:
            log = self.path(stage.name + ".log")
            environment_of = dict(os.environ, PYTHONPATH=os.path.join(build, "python"))
            code = execute.run(stage.command.format(**values), log, 60, environment_of)
            with open(log, encoding="utf-8") as file:
                status, detail = execute.judge(code, file.read(), False)
            self.assertEqual(status, "no GPU", f"{stage.name}: {detail}")

    # Python.

    def test_the_python_that_is_named_is_taken_and_one_without_torch_is_refused(self):
        torch = os.path.dirname(write(self.path("env/torch/version.py"), "__version__ = '2.11.0+cu130'\n"))
        said = json.dumps({"version": "3.12", "executable": "x", "sites": [], "embeds": True, "torch": torch})
        python = write(self.path("env/bin/python3"), f"#!/bin/sh\necho '{said}'\n", 0o755)
        self.assertEqual(environment.find_python(self.root, {"SHARDPROOF_PYTHON": python})["torch"], torch)
        self.assertEqual(environment.find_python(self.root, {"PATH": os.path.dirname(python)})["torch"], torch)
        write(self.path("env/torch/version.py"), "__version__ = '2.10.0'\n")
        with self.assertRaisesRegex(Trouble, "has torch 2.10.0"):
            environment.find_python(self.root, {"SHARDPROOF_PYTHON": python})
        with self.assertRaisesRegex(Trouble, "no Python with torch 2.11, .* among SHARDPROOF_PYTHON=/nowhere"):
            environment.find_python(self.root, {"SHARDPROOF_PYTHON": "/nowhere"})

    def test_of_several_pythons_that_fit_the_one_with_the_torch_of_the_archive_is_taken(self):
        folders = []
        for release in ("2.15.0+cu130", "2.11.0+cu130"):
            torch = os.path.dirname(write(self.path(f"{release}/torch/version.py"), f"__version__ = '{release}'\n"))
            said = json.dumps({"version": "3.12", "executable": "x", "sites": [], "embeds": True, "torch": torch})
            folders.append(os.path.dirname(write(self.path(f"{release}/bin/python3"), f"#!/bin/sh\necho '{said}'\n", 0o755)))
        found = {torch: environment.find_python(self.root, {"PATH": os.pathsep.join(folders)}, torch)["release"]
                 for torch in (None, "2.11", "2.14", "2.15")}
        self.assertEqual(found, {None: "2.15.0+cu130", "2.11": "2.11.0+cu130", "2.14": "2.15.0+cu130", "2.15": "2.15.0+cu130"})

    def test_gpus_are_counted_by_the_driver_without_torch(self):
        self.assertNotIn("torch", environment.ASK_GPU)
        write(self.path("driver.c"), """#include <string.h>
            int cuInit(unsigned flags) { return flags; }
            int cuDeviceGetCount(int* count) { *count = 2; return 0; }
            int cuDeviceGet(int* device, int index) { *device = 40 + index; return 0; }
            int cuDeviceGetName(char* name, int bytes, int device) { strcpy(name, device == 41 ? "B" : "A"); return bytes < 2; }
            int cuDeviceGetAttribute(int* value, int what, int device) { *value = what == 75 ? device - 31 : 0; return 0; }""")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", self.path("libcuda.so.1"), self.path("driver.c")], check=True)
        said = subprocess.run([sys.executable, "-c", environment.ASK_GPU], stdout=subprocess.PIPE, check=True,
                              env=dict(os.environ, LD_LIBRARY_PATH=self.root))
        self.assertEqual(json.loads(said.stdout), {"names": ["A", "B"], "capabilities": ["100", "90"]})

    def test_an_environment_that_nobody_activated_is_found(self):
        write(self.path("images/torch/lib/python3.12/site-packages/torch/version.py"), "")
        self.assertEqual(list(environment.environments_below(self.root)), [self.path("images/torch/bin/python3")])

    def test_the_bare_root_lacks_a_network_and_what_the_set_up_installs_and_keeps_what_is_built(self):
        if os.geteuid() != 0 or not shutil.which("apt-cache"):
            self.skipTest("ci/bare needs root and Debian")
        if subprocess.run(["unshare", "--mount", "--net", "true"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
            self.skipTest("ci/bare needs mounts of its own, and this container allows none")
        reach = "import socket; socket.create_connection((\"192.0.2.1\", 9), 5)"
        holds = ["test -e ci/gpu", "test ! -e .venv", "command -v c++", f"test ! -e {ROOT}/ci", "test -z \"$SHARDPROOF_BUILD\"",
                 "/srv/torch/bin/python3 -c 'import numpy'", f"! python3 -c '{reach}'",
                 *(f"test ! -e /usr/include/{name}" for name in ("gtest/gtest.h", "rapidcheck.h", "nlohmann/json.hpp",
                                                                     "CLI/CLI.hpp"))]
        script = "\n".join(f"{line} || {{ echo 'does not hold:' \"{index}\"; exit 1; }}" for index, line in enumerate(holds))
        done = subprocess.run([os.path.join(ROOT, "ci", "bare"), self.path("bare"), os.path.join(ROOT, ".venv/bin/python3"),
                               "sh", "-c", script + "\necho built > kept; exit 3"], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual(done.returncode, 3, f"{holds}\n{done.stdout}")
        self.assertEqual(archives.read(self.path("bare/tree/kept")), "built\n")

    # The bundle.

    def make_bundle(self, **wheels):
        folder = self.path(archives.folder_of("bundle"))
        write(os.path.join(folder, "bundle.json"), json.dumps({"python": "3.12", "contents": []}))
        for name, text in wheels.items():
            os.makedirs(os.path.join(folder, "wheels"), exist_ok=True)
            with zipfile.ZipFile(os.path.join(folder, "wheels", name.replace("__", "-") + ".whl"), "w") as wheel:
                wheel.writestr("tool/__init__.py", text)
                wheel.writestr("tool-2.dist-info/RECORD", "tool/__init__.py,,\ntool-2.dist-info/RECORD,,\n")
        with tarfile.open(self.path("b.tar.gz"), "w:gz") as archive:
            archive.add(folder, arcname=archives.folder_of("bundle"))
        return self.path("b.tar.gz")

    def test_wheels_are_laid_over_links_and_leave_what_the_links_mean(self):
        theirs = write(self.path("python/tool/__init__.py"), "old")
        write(self.path("python/tool-1.dist-info/RECORD"), "tool/__init__.py,,\ntool-1.dist-info/RECORD,,\n")
        packages = self.path("packages")
        os.makedirs(packages)
        for name in os.listdir(self.path("python")):
            os.symlink(os.path.join(self.path("python"), name), os.path.join(packages, name))
        unpacked = archives.unpack(self.make_bundle(**{"tool__2__py3__none__any": "new", "far__2__cp312__cp312__linux": ""}),
                                   self.path("unpacked"), "bundle")
        self.assertEqual(archives.install_wheels(unpacked, packages, "3.11"), (1, ["far"]))
        self.assertEqual(archives.read(os.path.join(packages, "tool", "__init__.py")), "new")
        self.assertEqual(archives.read(theirs), "old")
        self.assertEqual(sorted(os.listdir(packages)), ["tool", "tool-2.dist-info"])

    def test_a_damaged_bundle_and_a_stranger_are_refused(self):
        archive = self.make_bundle()
        with open(archive, "r+b") as file:
            file.truncate(os.path.getsize(archive) // 2)
        with self.assertRaisesRegex(Trouble, "damaged"):
            archives.unpack(archive, self.path("unpacked"), "bundle")
        with tarfile.open(self.path("other.tar.gz"), "w:gz") as other:
            other.add(write(self.path("file"), ""), arcname="file")
        with self.assertRaisesRegex(Trouble, "ci/bundle did not write it"):
            archives.unpack(self.path("other.tar.gz"), self.path("unpacked"), "bundle")
        with self.assertRaisesRegex(Trouble, "cannot read .*none.tar.gz"):
            archives.unpack(self.path("none.tar.gz"), self.path("unpacked"), "bundle")

    def test_the_pins_name_the_release_of_transformers_that_the_set_up_installs(self):
        requirements = archives.read(os.path.join(ROOT, "ci", "requirements", "run.in"))
        wanted = re.search(r"transformers==([\d.]+)\*", requirements).group(1)
        pins = [line.split() for line in archives.read(os.path.join(ROOT, "ci", "bundle_pins.txt")).splitlines()[1:]]
        self.assertTrue(all(len(pin) == 5 and re.fullmatch("[0-9a-f]{64}", pin[4]) for pin in pins))
        release = {pin[1]: pin[2] for pin in pins}
        self.assertTrue(release["transformers"].startswith(wanted))
        self.assertLessEqual({"googletest", "libcli11-dev", "librapidcheck-dev", "nlohmann-json3-dev"}, set(release))


if __name__ == "__main__":
    unittest.main()
