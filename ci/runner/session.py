"""One call of ci/gpu: what it finds on the machine, and the stages that it runs."""
import concurrent.futures
import datetime
import glob
import itertools
import os
import random
import shlex
import shutil
import tarfile
import threading
import time

from . import Trouble, archives, environment, execute, prebuilt, summary

BUILDS = ("configure", "build-kernels", "build-tests", "build-python")
LANES_MAX = 8  # of stages side by side: one GPU carries so many


def job_count():
    """One for each core, but compiling a file against LibTorch takes up to 2 GB of memory."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return max(1, min(len(os.sched_getaffinity(0)), available // (2 * 1024 * 1024)))


def lanes():
    """How many stages run side by side."""
    return max(2, min(LANES_MAX, len(os.sched_getaffinity(0)) // 2))


class Session:
    def __init__(self, root, options):
        self.root, self.options = root, options
        self.begun = time.monotonic()
        self.deadline = self.begun + options.minutes * 60
        self.out, self.build = os.path.abspath(options.out), os.path.abspath(options.build)
        for folder in (self.out, self.work("logs"), self.work("json"), self.work("profiles")):
            os.makedirs(folder, exist_ok=True)
        before = summary.read_results(self.path("results.json")) if options.go_on else {}
        self.results = {"begun": datetime.datetime.now().isoformat(timespec="seconds"), "notes": [],
                        "seed": before.get("seed", random.SystemRandom().randrange(2**31)), "stages": before.get("stages", {})}
        if options.go_on:  # what an earlier call has built takes no time now, which would tell nobody anything
            self.results["first_verdict_seconds"] = before.get("first_verdict_seconds")
        self.now_passed = set()
        self.lock = threading.Lock()  # of results and output, while stages run side by side
        self.cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        self.programs = self.build
        self.commands = dict(os.environ)  # the environment of commands

    def path(self, *names):
        """Of the few files that a call leaves."""
        return os.path.join(self.out, *names)

    def work(self, *names):
        """Of what stages write, which `save` packs."""
        return os.path.join(self.build, "report-work", *names)

    def json_of(self, stage):
        return self.work("json", stage.name + ".jsonl")

    def say(self, text):
        print(f"[gpu {time.monotonic() - self.begun:5.0f}s] {text}\n", end="", flush=True)  # one write, by any thread

    def note(self, text):
        self.say(text)
        self.results["notes"].append(text)

    def run(self, stages):
        self.find_machine()
        for alone, group in itertools.groupby(self.in_order(stages), key=lambda stage: stage.alone):
            self.run_group(list(group), 1 if alone else lanes(), stages)
        self.save(stages)
        return self.verdict(stages)

    def run_group(self, group, width, stages):
        """So many at a time. Who interrupts this ends the commands too."""
        with concurrent.futures.ThreadPoolExecutor(width) as pool:
            try:
                for done in [pool.submit(self.run_and_save, stage, stages) for stage in group]:
                    done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(execute.running):
                    execute.end_group(process)
                raise

    def run_and_save(self, stage, stages):
        result = self.run_stage(stage)
        with self.lock:
            self.results["stages"][stage.name] = result
            self.save(stages)
            if self.profiles_of(stage):
                self.pack("profiles.tar.gz", "profiles")

    # What is there.

    def find_machine(self):
        archive = self.options.prebuilt
        torch = prebuilt.torch_of(archive, os.path.join(self.build, "prebuilt")) if archive else None
        self.python = environment.find_python(self.root, os.environ, torch)
        tools = [os.path.dirname(self.python["executable"]), os.path.join(self.cuda_home, "bin")]
        self.commands["PATH"] = os.pathsep.join([os.environ.get("PATH", "/usr/bin:/bin"), *tools])
        gpu = environment.gpus(self.python["executable"])
        self.has_gpu = bool(gpu["names"]) and not self.options.rehearse
        self.capabilities = gpu["capabilities"]
        self.results["machine"] = {"gpus": gpu["names"], "torch": self.python["release"], "python": self.python["version"],
                                   "cores": len(os.sched_getaffinity(0)), "interpreter": self.python["executable"]}
        self.note(f"torch {self.python['release']} of {self.python['executable']}; {', '.join(gpu['names']) or 'no GPU'}; "
                  f"{job_count()} jobs; {self.options.minutes:g} minutes")
        self.lay_out(self.take_prebuilt())

    def take_prebuilt(self):
        """The folder of programs that were built elsewhere. None where they are to be built here."""
        folder = None
        if self.options.prebuilt:
            folder, why_not = prebuilt.take(self.options.prebuilt, os.path.join(self.build, "prebuilt"), self.root, self.python)
            self.note(f"built elsewhere, from {prebuilt.tree_of(folder)}" if folder
                      else f"{self.options.prebuilt} does not load here, so this builds: {why_not}")
        if not folder:
            for tool in ("cmake", "c++"):
                if not shutil.which(tool, path=self.commands["PATH"]):
                    raise Trouble(f"there is no {tool} on the PATH or beside {self.python['executable']}")
        return folder

    def lay_out(self, folder):
        """The environment, and the libraries that a build uses."""
        self.environment = os.path.join(self.build, "env")
        packages = environment.lay_over(self.python, self.environment)
        self.libraries = None
        if self.options.bundle:
            self.libraries = archives.unpack(self.options.bundle, os.path.join(self.build, "bundle"), "bundle")
        for wheels in filter(None, (self.libraries, folder)):
            count, unfit = archives.install_wheels(wheels, packages, self.python["version"])
            self.note(f"{count} wheels lie over that Python's packages"
                      + (f"; not for Python {self.python['version']}: {', '.join(unfit)}" if unfit else ""))
        if folder:
            self.programs = folder
            self.now_passed |= set(BUILDS)
            prebuilt.link(self.environment, os.path.join(folder, "env"))
            prebuilt.lay_tests(folder, self.root, self.tool_of_environment("python"))
        # Programs look for Python where they were built for it to be, unless this says where.
        self.commands["SHARDPROOF_VENV"] = self.environment
        self.commands["PYTHONPATH"] = os.path.join(self.programs, "python")
        self.commands["PYTHONDONTWRITEBYTECODE"] = self.commands["HF_HUB_OFFLINE"] = "1"

    def tool_of_environment(self, name):
        return os.path.join(self.environment, "bin", name)

    # Running stages.

    def in_order(self, stages):
        """Builds, and what has not run, in their order; then what failed before."""
        wanted = set(filter(None, self.options.only.split(",")))
        for stage in reversed(stages):
            if stage.name in wanted:
                wanted |= set(stage.needs)
        chosen = [stage for stage in stages if (not wanted or stage.name in wanted) and stage.name not in self.now_passed]
        status = {name: result["status"] for name, result in self.results["stages"].items()}
        chosen = [stage for stage in chosen if stage.name in BUILDS or status.get(stage.name) not in execute.FINAL]
        failed = [stage for stage in chosen if stage.name not in BUILDS and status.get(stage.name) == execute.FAILED]
        return [stage for stage in chosen if stage not in failed] + failed

    def run_stage(self, stage):
        status, detail, seconds = self.try_stage(stage)
        with self.lock:
            if status == execute.PASSED:
                self.now_passed.add(stage.name)
            if stage.name not in BUILDS:
                self.results.setdefault("first_verdict_seconds", round(time.monotonic() - self.begun, 1))
            self.say(f"{stage.name}: {status}{': ' + detail if detail else ''} ({seconds:.0f} s)")
        return {"status": status, "detail": detail, "seconds": round(seconds, 1), "log": f"logs/{stage.name}.log"}

    def try_stage(self, stage):
        """(status, detail, seconds)."""
        missing = [name for name in stage.needs if name not in self.now_passed]
        if missing:
            return execute.NOT_RUN, f"needs {', '.join(missing)}", 0
        command, why_not = self.command_of(stage)
        if why_not:
            return execute.NOT_RUN, why_not, 0
        left = self.deadline - time.monotonic()
        if left < stage.least:
            return execute.NO_TIME, f"{left:.0f} s are left, and it takes {stage.least} at least", 0
        self.say(f"{stage.name}: {stage.title}")
        log = self.work("logs", stage.name + ".log")
        for stale in (log, self.json_of(stage), self.junit(stage), *self.profiles_of(stage)):
            if os.path.exists(stale):
                os.unlink(stale)
        begin = time.monotonic()
        code = execute.run(command, log, min(left, stage.most), self.commands)
        with open(log, encoding="utf-8", errors="replace") as file:
            output = file.read()
        status, detail = execute.judge(code, output, self.has_gpu, execute.count_junit(self.junit(stage)))
        if stage.name == "configure":
            for line in output.splitlines():
                if line.startswith("-- ["):
                    self.note(line[3:])
        return status, "" if stage.name in BUILDS and status == execute.PASSED else detail, time.monotonic() - begin

    def junit(self, stage):
        return self.work("json", stage.name + ".xml")

    def profiles_of(self, stage):
        return glob.glob(glob.escape(self.work("profiles", stage.name)) + "*")

    def command_of(self, stage):
        """The command for the shell, and else why there is none."""
        if stage.name == "configure":
            return self.configure_command(), None
        if stage.targets:
            targets = " ".join(stage.targets)
            if stage.name == "build-python" and not self.python["headers"]:
                return None, f"{self.python['executable']} has no headers"
            return f"cmake --build {shlex.quote(self.build)} --parallel {job_count()} --target {targets}", None
        template = stage.rehearsal if self.options.rehearse else stage.command
        if not template:
            return None, "nothing of it is left without a GPU"
        values = {"build": self.programs, "root": self.root, "python": self.tool_of_environment("python"),
                  "scratch": os.path.join(self.build, "scratch", stage.name), "failures": self.work("failures"),
                  "json": self.json_of(stage), "junit": self.junit(stage), "profile": self.work("profiles", stage.name)}
        os.makedirs(values["scratch"], exist_ok=True)
        values = {name: shlex.quote(value) for name, value in values.items()}
        left = (self.deadline - time.monotonic()) / 60
        values |= {"seed": self.results["seed"], "minutes": f"{max(0.5, min(5, left / 6)):.1f}", "jobs": max(1, lanes() // 2)}
        if stage.tool:
            tool = self.find_tool(stage.tool)
            if not tool:
                return None, f"there is no {stage.tool}"
            values[stage.tool] = shlex.quote(tool)
        return template.format(**values), None

    def find_tool(self, name):
        places = [os.path.join(self.cuda_home, name, name), *sorted(glob.glob(f"/usr/local/cuda*/{name}/{name}"))]
        return shutil.which(name, path=self.commands["PATH"]) or next(filter(os.path.exists, places), None)

    def configure_command(self):
        generator = "-G Ninja" if shutil.which("ninja", path=self.commands["PATH"]) else ""
        steps, options = [], [f"-DSHARDPROOF_VENV={self.environment}", "-DCMAKE_BUILD_TYPE=Release"]
        if not self.python["embeds"]:
            self.note(f"{self.python['executable']} has no headers or no library to link, so its oracle is left out")
            options.append("-DSHARDPROOF_EMBED_PYTHON=OFF")
        if not self.python["headers"]:
            options.append("-DSHARDPROOF_PYTHON=OFF")
        if self.libraries:
            source, prefix = os.path.join(self.libraries, "sources", "googletest"), os.path.join(self.libraries, "prefix")
            tree = shlex.quote(os.path.join(self.build, "googletest"))
            steps += [f"cmake {generator} -S {shlex.quote(source)} -B {tree} -DCMAKE_BUILD_TYPE=Release -DBUILD_GMOCK=OFF "
                      "-DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_INSTALL_LIBDIR=lib "
                      f"-DCMAKE_INSTALL_PREFIX={shlex.quote(prefix)}",
                      f"cmake --build {tree} --parallel {job_count()} --target install"]
            options.append(f"-DCMAKE_PREFIX_PATH={prefix}")
        if self.capabilities:
            options.append(f"-DSHARDPROOF_CUDA_ARCHITECTURES={';'.join(self.capabilities)}")
        steps.append(f"cmake {generator} -S {shlex.quote(self.root)} -B {shlex.quote(self.build)} "
                     + " ".join(shlex.quote(option) for option in options))
        return " && ".join(steps)

    # What is left behind.

    def save(self, stages):
        """A few files, after each stage, since the machine may be taken away."""
        summary.write_results(self.path("results.json"), self.results)
        self.pack("logs.tar.gz", "logs", "json", "failures")
        with open(self.path("summary.md"), "w", encoding="utf-8") as file:
            file.write(summary.page(self.results, self.shown(stages), self.json_of))

    def pack(self, name, *folders):
        with tarfile.open(self.path(name + ".new"), "w:gz", compresslevel=3) as archive:
            for folder in filter(os.path.exists, map(self.work, folders)):
                archive.add(folder, arcname=os.path.basename(folder))
        os.replace(self.path(name + ".new"), self.path(name))

    def shown(self, stages):
        """Without the builds, where there were none."""
        return [stage for stage in stages if self.programs == self.build or stage.name not in BUILDS]

    def verdict(self, stages):
        status = {stage.name: self.results["stages"].get(stage.name, {}).get("status", execute.NOT_RUN)
                  for stage in self.shown(stages)}
        count = {word: list(status.values()).count(word) for word in sorted(set(status.values()))}
        self.say(f"{', '.join(f'{number} {word}' for word, number in count.items())}; see {self.path('summary.md')}")
        if any(word in (execute.FAILED, execute.TIMED_OUT) for word in status.values()):
            return 1
        return 0 if set(status.values()) == {execute.PASSED} else 2
