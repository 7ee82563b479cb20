"""One call of ci/gpu: what it finds on the machine, and the stages that it runs."""
import datetime
import glob
import os
import random
import shlex
import shutil
import time

from . import Trouble, bundle, environment, execute, summary

BUILDS = ("configure", "build-kernels", "build-tests")


def job_count():
    """One for each core, but compiling a file against LibTorch takes up to 2 GB of memory."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return max(1, min(len(os.sched_getaffinity(0)), available // (2 * 1024 * 1024)))


class Session:
    def __init__(self, root, options):
        self.root, self.options = root, options
        self.begun = time.monotonic()
        self.deadline = self.begun + options.minutes * 60
        self.out, self.build = os.path.abspath(options.out), os.path.abspath(options.build)
        for folder in (self.path("logs"), self.path("json"), self.build):
            os.makedirs(folder, exist_ok=True)
        before = summary.read_results(self.path("results.json")) if options.go_on else {}
        self.results = {"begun": datetime.datetime.now().isoformat(timespec="seconds"), "notes": [],
                        "seed": before.get("seed", random.SystemRandom().randrange(2**31)), "stages": before.get("stages", {})}
        if options.go_on:  # what an earlier call has built takes no time now, which would tell nobody anything
            self.results["first_gpu_stage_seconds"] = before.get("first_gpu_stage_seconds")
        self.now_passed = set()
        self.cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        self.commands = dict(os.environ)  # the environment of commands

    def path(self, *names):
        return os.path.join(self.out, *names)

    def json_of(self, stage):
        return self.path("json", stage.name + ".jsonl")

    def say(self, text):
        print(f"[gpu {time.monotonic() - self.begun:5.0f}s] {text}", flush=True)

    def note(self, text):
        self.say(text)
        self.results["notes"].append(text)

    def run(self, stages):
        self.find_machine()
        for stage in self.in_order(stages):
            self.results["stages"][stage.name] = self.run_stage(stage)
            self.save(stages)
        self.save(stages)
        return self.verdict(stages)

    # What is there.

    def find_machine(self):
        self.python = environment.find_python(self.root, os.environ)
        tools = [os.path.dirname(self.python["executable"]), os.path.join(self.cuda_home, "bin")]
        self.commands["PATH"] = os.pathsep.join([os.environ.get("PATH", "/usr/bin:/bin"), *tools])
        self.commands.pop("SHARDPROOF_VENV", None)  # the build's own is meant
        for tool in ("cmake", "c++"):
            if not shutil.which(tool, path=self.commands["PATH"]):
                raise Trouble(f"there is no {tool} on the PATH or beside {self.python['executable']}")
        gpu = environment.gpus(self.python["executable"])
        self.has_gpu = gpu["count"] > 0 and not self.options.rehearse
        self.capabilities = gpu["capabilities"]
        self.results["machine"] = {"gpus": gpu["names"], "torch": gpu["torch"] or "(does not import)", "cuda": gpu["cuda"],
                                   "python": self.python["version"], "cores": len(os.sched_getaffinity(0)),
                                   "interpreter": self.python["executable"]}
        self.note(f"torch {gpu['torch']} of {self.python['executable']}; {', '.join(gpu['names']) or 'no GPU'}; "
                  f"{job_count()} jobs; {self.options.minutes:g} minutes")
        self.lay_out()

    def lay_out(self):
        """The environment and the libraries that the build uses."""
        env = os.path.join(self.build, "env")
        packages = environment.lay_over(self.python, env)
        self.libraries = None
        if self.options.bundle:
            unpacked = bundle.unpack(self.options.bundle, os.path.join(self.build, "bundle"))
            count, unfit = bundle.install_wheels(unpacked, packages, self.python["version"])
            self.libraries = unpacked
            self.note(f"{count} wheels of the bundle lie over that Python's packages"
                      + (f"; not for Python {self.python['version']}: {', '.join(unfit)}" if unfit else ""))
        self.environment = env

    # Running stages.

    def in_order(self, stages):
        """Builds, and what has not run, in their order; then what failed before."""
        wanted = set(filter(None, self.options.only.split(",")))
        for stage in reversed(stages):
            if stage.name in wanted:
                wanted |= set(stage.needs)
        chosen = [stage for stage in stages if not wanted or stage.name in wanted]
        status = {name: result["status"] for name, result in self.results["stages"].items()}
        chosen = [stage for stage in chosen if stage.name in BUILDS or status.get(stage.name) not in execute.FINAL]
        failed = [stage for stage in chosen if stage.name not in BUILDS and status.get(stage.name) == execute.FAILED]
        return [stage for stage in chosen if stage not in failed] + failed

    def run_stage(self, stage):
        status, detail, seconds = self.try_stage(stage)
        if status == execute.PASSED:
            self.now_passed.add(stage.name)
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
        if stage.name not in BUILDS:
            self.results.setdefault("first_gpu_stage_seconds", round(time.monotonic() - self.begun, 1))
        log = self.path("logs", stage.name + ".log")
        for stale in (log, self.json_of(stage), self.junit(stage)):
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
        return self.path("json", stage.name + ".xml")

    def command_of(self, stage):
        """The command for the shell, and else why there is none."""
        if stage.name == "configure":
            return self.configure_command(), None
        if stage.targets:
            targets = " ".join(stage.targets)
            return f"cmake --build {shlex.quote(self.build)} --parallel {job_count()} --target {targets}", None
        template = stage.rehearsal if self.options.rehearse else stage.command
        if not template:
            return None, "nothing of it is left without a GPU"
        values = {"build": self.build, "scratch": os.path.join(self.build, "scratch"), "failures": self.path("failures"),
                  "json": self.json_of(stage), "junit": self.junit(stage)}
        os.makedirs(values["scratch"], exist_ok=True)
        values = {name: shlex.quote(value) for name, value in values.items()}
        left = (self.deadline - time.monotonic()) / 60
        values |= {"seed": self.results["seed"], "minutes": f"{max(0.5, min(5, left / 4)):.1f}"}
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
        summary.write_results(self.path("results.json"), self.results)
        with open(self.path("summary.md"), "w", encoding="utf-8") as file:
            file.write(summary.page(self.results, stages, self.json_of))

    def verdict(self, stages):
        status = {stage.name: self.results["stages"].get(stage.name, {}).get("status", execute.NOT_RUN) for stage in stages}
        count = {word: list(status.values()).count(word) for word in sorted(set(status.values()))}
        self.say(f"{', '.join(f'{number} {word}' for word, number in count.items())}; see {self.path('summary.md')}")
        if any(word in (execute.FAILED, execute.TIMED_OUT) for word in status.values()):
            return 1
        return 0 if set(status.values()) == {execute.PASSED} else 2
