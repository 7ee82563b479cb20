"""What ci/faults and ci/mutants share: a scratch copy of the tree, in which bugs are planted, built and looked for."""
import copy
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

COMMAND, EVERYTHING = "shardproof_command", "all"  # targets of the build
# One file changes at a time, so what may change is compiled file by file.
ALONE = ("shardproof", "shardproof_algebra", "shardproof_formats", "shardproof_mpi", "shardproof_nccl", "shardproof_cuda")


class Trouble(Exception):
    """Ends this bug, or the whole run, with exit code 2."""


class DoesNotBuild(Trouble):
    def __init__(self, text, output):
        super().__init__(text)
        self.output = output


@dataclasses.dataclass
class Outcome:
    failed: bool
    by: str = ""  # the property, or the kind of end
    cases: int = 0
    case: str = ""
    guess: str = ""  # what verify says that it looks like
    replay: str = ""  # the command that runs the case
    replicas: str = ""  # where the bug leaves replicas different: whether their check finds it in the same step


def source_files(root):
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith((".", "build", "__pycache__"))]
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), root)


RUNNING, INTERRUPTED = set(), threading.Event()


def run(command, cwd, seconds_max=None, environment=None):
    """Exit code (None when the time was up) and output of a command, which ends with all its children."""
    if INTERRUPTED.is_set():
        raise Trouble("the run was interrupted")
    process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment,
                               stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    RUNNING.add(process)
    try:
        output, _ = process.communicate(timeout=seconds_max)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        RUNNING.discard(process)


def interrupt():
    """Ends what other threads run, and lets them run nothing more."""
    INTERRUPTED.set()
    for process in list(RUNNING):
        os.killpg(process.pid, signal.SIGKILL)


def replicas_of(failure):
    """Whether the check of replicas finds a failure of `verify` in the first step that leaves some of them different, in its
    minimal case and as it was found: "found" or "missed"; "" where replicas never differ."""
    different = [run for run in (failure.get("replicas_differ") or {}).values() if run["differ"]]
    if not different:
        return ""
    return "found" if all(run["found"] == run["differ"] for run in different) else "missed"


def apply(patch, tree):
    """Applies a unified diff, whose context must be there unchanged."""
    code, output = run(["patch", "-p1", "--fuzz=0", "--batch", "--forward", "--no-backup-if-mismatch", "--reject-file=-",
                        "--input", os.path.abspath(patch)], tree)
    if code != 0:
        raise Trouble("does not apply: " + " / ".join(output.strip().splitlines()[:3]))


class Scratch:
    """A copy of the tree with a build of its own, where each change rebuilds only what it touches."""

    def __init__(self, options):
        self.options = options
        self.tree = os.path.join(options.scratch, "src")
        self.folder = os.path.abspath(options.scratch)  # of what checks write
        self.texts = {}  # of files that are other than in the source
        self.environment = dict(os.environ)
        self.parallel = os.cpu_count()

    def beside(self, name, variables=()):
        """The same copy and build for a check that runs beside others, with variables of its own."""
        other = copy.copy(self)
        other.folder = os.path.join(self.folder, "beside", name)
        other.environment = {**self.environment, **dict(variables)}
        other.parallel = 1
        os.makedirs(other.folder, exist_ok=True)
        return other

    def mirror(self):
        """Makes the copy equal to the source. Files that are equal already stay as they are, so that nothing rebuilds them."""
        wanted = set(source_files(self.options.source))
        os.makedirs(self.tree, exist_ok=True)
        for name in set(source_files(self.tree)) - wanted:
            os.remove(os.path.join(self.tree, name))
        for name in wanted:
            self.restore(name)
        venv = os.path.join(self.options.source, ".venv")
        link = os.path.join(self.tree, ".venv")
        if os.path.exists(venv) and not os.path.lexists(link):
            os.symlink(os.path.realpath(venv), link)

    def restore(self, name):
        source = os.path.join(self.options.source, name)
        text = self.texts.get(name)
        if text is None and os.path.exists(source):
            with open(source, "rb") as file:
                text = file.read()
        self.write(name, text)
        if os.path.exists(source):
            shutil.copymode(source, os.path.join(self.tree, name))

    def write(self, name, text):
        """Gives a file of the copy this text, or removes it for None. Its time stays if nothing changes, and becomes new if
        anything does, because an old one would hide from the build that the file was restored."""
        target = os.path.join(self.tree, name)
        text = text.encode() if isinstance(text, str) else text
        if os.path.exists(target):
            with open(target, "rb") as file:
                if file.read() == text:
                    return
        if text is not None:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(text)
        elif os.path.exists(target):
            os.remove(target)

    def build_for(self, check):
        """Builds what a check runs. A bug in a header that everything includes would else cost a build of everything."""
        self.build(self.programs(check))

    def programs(self, check):
        """The targets that a check needs: the programs of its tests, and those that tests start themselves."""
        words = shlex.split(check)
        if words[0] == "verify":
            return [COMMAND]
        build = os.path.join(os.path.abspath(self.tree), "build")
        code, output = run(["ctest", "--test-dir", build, "--show-only=json-v1", *words[1:]], self.tree)
        programs = set()
        for test in json.loads(output)["tests"] if code == 0 else []:
            built = [word for word in test.get("command", [])
                     if word.startswith(build + os.sep) and os.path.isfile(word) and os.access(word, os.X_OK)]
            if not built:
                return [EVERYTHING]  # a script: there is no telling what it runs
            programs.update(os.path.relpath(word, build) for word in built)
        if not programs:
            return [EVERYTHING]
        return sorted(programs | {name for name in os.listdir(build) if "_driver" in name})

    def build(self, targets):
        if self.options.build:
            command = ["bash", "-c", self.options.build]
        else:
            configure = shlex.join(["cmake", "--preset", "release", "-DSHARDPROOF_ALONE=" + ";".join(ALONE)])
            # Where it carries bugs, all that do not compile are to be seen at once.
            command = ["bash", "-c", f"set -e; [ -f build/build.ninja ] || {configure}; "
                                     f"cmake --build build -j {os.cpu_count()} --target {shlex.join(targets)} -- -k 0"]
        code, output = run(command, self.tree)
        if code != 0:
            errors = [line for line in output.splitlines() if re.search(r"\berror\b|FAILED", line)]
            raise DoesNotBuild("does not build: " + (errors or output.splitlines() or ["no output"])[0][:300], output)

    def check(self, command):
        """Runs `verify ...` or `ctest ...`."""
        words = shlex.split(command)
        if words[0] == "verify":
            return self.verify(words[1:])
        if words[0] == "ctest":
            return self.ctest(words[1:])
        raise Trouble(f"unknown check `{command}`; it begins with verify or ctest")

    def verify(self, arguments):
        report = os.path.join(self.folder, "verify.json")
        if os.path.exists(report):
            os.remove(report)
        command = shlex.split(self.options.verify) + arguments
        if "--cases" not in arguments:
            command += ["--cases", str(self.options.cases)]
        # The failure database is empty, because cases that killed an earlier bug must not go first.
        failures = os.path.join(self.folder, "failures")
        shutil.rmtree(failures, ignore_errors=True)
        command += ["--failures-max", "1", "--json", report, "--failures", failures]
        code, output = run(command, self.tree, self.options.seconds, self.environment)
        if code == 0:
            return Outcome(False)
        if code == 2:
            raise Trouble("verify could not run: " + output.strip()[-300:])
        failure, cases = read_report(report)
        if code == 1 and failure:
            return Outcome(True, failure.get("what", ""), cases, failure.get("case", ""), failure.get("guess", ""),
                           failure.get("replay", ""), replicas_of(failure))
        return Outcome(True, how_it_ended(code, self.options.seconds), cases)

    def shrink_crash(self, outcome):
        """A smaller case for one that crashed, which may have ended an engine, or a program in the place of verify."""
        if not outcome.by.startswith("crash (") or not outcome.replay:
            return
        report = os.path.join(self.folder, "shrunk.json")
        run([*shlex.split(outcome.replay), "--shrink", "--json", report], self.tree, self.options.seconds, self.environment)
        failure, _ = read_report(report)
        if failure:
            outcome.case = failure["case"]
        if os.path.exists(report):
            os.remove(report)

    def ctest(self, arguments):
        # CTest writes where it starts, so it starts in a folder that has the tests of the build.
        with open(os.path.join(self.folder, "CTestTestfile.cmake"), "w", encoding="utf-8") as file:
            file.write(f'subdirs("{os.path.abspath(os.path.join(self.tree, "build"))}")\n')
        command = ["ctest", "--test-dir", self.folder, "--no-tests=error", "--output-on-failure", "--stop-on-failure",
                   "--parallel", str(self.parallel)] + arguments
        code, output = run(command, self.tree, self.options.seconds, self.environment)
        if code == 0:
            return Outcome(False)
        failed = re.findall(r"^\s*\d+ - (\S+) ", output, re.MULTILINE)
        if failed:
            return Outcome(True, failed[0], len(re.findall(r"^\s*\d+/\d+ Test", output, re.MULTILINE)))
        if code is None:
            return Outcome(True, how_it_ended(code, self.options.seconds))
        raise Trouble("ctest could not run: " + output.strip()[-300:])


def how_it_ended(code, seconds_max):
    if code is None:
        return f"no end within {seconds_max} s"
    return f"crash ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def read_report(path):
    """The first failure of a `verify --json` report, and the number of cases that ran."""
    failure, cases = None, 0
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            for line in file:
                entry = json.loads(line)
                cases = max(cases, entry.get("cases", 0))
                if entry.get("type") == "failure" and failure is None:
                    failure = entry
    return failure, cases


def say(options, text):
    print(f"[{options.name} {time.monotonic() - options.start:5.0f}s] {text}", file=options.progress, flush=True)


def add_options(parser, cases):
    """Those of every campaign: what is checked, how long, where. The last ones are for testing the scripts themselves."""
    option = parser.add_argument
    option("--json", metavar="FILE", help="one JSON object a bug; - is standard output")
    option("--cases", type=int, default=cases, help=f"budget of verify for each bug ({cases})")
    option("--seconds", type=int, default=300, help="a check that runs longer counts as a kill (300)")
    option("--scratch", default=os.path.join(ROOT, f"build-{parser.prog.split('/')[-1]}"), help="where the copy is built")
    option("--skip-baseline", action="store_true",
           help="do not try the tree as it is first: what fails by itself then counts as a kill")
    option = parser.add_argument_group("for a program of your own (docs/extending.md)").add_argument
    option("--build", metavar="COMMAND", help="rebuilds what is checked, in the copy")
    option("--verify", metavar="COMMAND", default="build/shardproof verify", help="stands for `verify`")
    option = parser.add_argument_group("for testing this script itself").add_argument
    option("--source", default=ROOT, help="the tree to copy")


def parsed(parser, arguments):
    options = parser.parse_args(arguments)
    if options.cases < 1 or options.seconds < 1:
        parser.error("--cases and --seconds must be at least 1")
    options.name = parser.prog.split("/")[-1]
    options.progress = sys.stderr if options.json == "-" else sys.stdout
    options.start = time.monotonic()
    return options


def main(name, campaign, options):
    """The exit code of campaign(options); 2, with a line that says why, if it cannot be told."""
    try:
        return campaign(options)
    except Trouble as trouble:
        print(f"ci/{name}: {trouble}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"ci/{name}: interrupted", file=sys.stderr)
    return 2


class Baseline:
    """The tree as it is has to build, and to pass what kills a bug. Otherwise that kill would say nothing."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.lock = threading.Lock()
        self.asked = {}  # check: a lock, and what is wrong, or None before anybody knows

    def build(self, targets):
        say(self.scratch.options, f"building the tree as it is in {os.path.relpath(self.scratch.tree)}")
        try:
            self.scratch.build(targets)
        except DoesNotBuild as trouble:
            raise DoesNotBuild(f"the tree without any planted bug {trouble}", trouble.output) from None

    def passes(self, check, prepare=lambda: None):
        """Runs a check once, in the thread that asks first, when that has prepared the tree."""
        if self.scratch.options.skip_baseline:
            return
        with self.lock:
            asked = self.asked.setdefault(check, [threading.Lock(), None])
            name = f"baseline-{list(self.asked).index(check)}"
        with asked[0]:
            if asked[1] is None:
                prepare()
                outcome = self.scratch.beside(name).check(check)
                asked[1] = f"fails `{check}`: {outcome.by} {outcome.case}".rstrip() if outcome.failed else ""
        if asked[1]:
            raise Trouble("the tree without any planted bug " + asked[1])


class JsonRows:
    """Writes one JSON object a line."""

    def __init__(self, path):
        self.file = sys.stdout if path == "-" else path and open(path, "w", encoding="utf-8")

    def add(self, row):
        if self.file:
            print(json.dumps(row), file=self.file, flush=True)


def read_rows(path, keys, tool):
    """What `tool --json` wrote there: objects that have all these keys."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise Trouble(f"{path}: {error}") from None
    for row in rows:
        if not isinstance(row, dict) or not keys.issubset(row):
            raise Trouble(f"{path}: not a file of {tool} --json")
    return rows
