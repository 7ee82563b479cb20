"""Programs that run one after the other as the ranks of one job, each in a fork of a process that has imported what is slow.

`run_programs` starts the ranks. Their arguments: "theirs" or "ours", the modules, and programs with their arguments, in JSON.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, os.pardir, os.pardir, "ci", "tests")]
END = "--- a program has ended"


def run_programs(whose, modules, *programs):
    """The JSON that rank 0 of two says at the end of each program. A program: its file, and arguments behind `whose`."""
    from peer_ranks import run_ranks

    given = [[program, [whose, *map(str, arguments)]] for program, *arguments in programs]
    said = run_ranks(os.path.abspath(__file__), 2, [whose, json.dumps(modules), json.dumps(given)])[0]
    return [json.loads(part.strip().splitlines()[-1]) for part in said.split(END)[:-1]]


def run_forked(number, program, arguments):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent, which `run_ranks` ends where another rank failed
    os.environ["PEER_PORT"] += f".{number}"
    sys.argv = [program, *arguments]
    try:
        runpy.run_path(os.path.join(HERE, program), run_name="__main__")  # it ends the process by `leave`
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def main():
    whose, modules, programs = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    if whose == "ours":
        import shardproof.fsdp

        shardproof.fsdp.patch_torch()
    for module in modules:
        importlib.import_module(module)
    for number, (program, arguments) in enumerate(programs):
        if code := run_forked(number, program, arguments):
            sys.exit(code if code > 0 else 1)
        print(END, flush=True)


if __name__ == "__main__":
    main()
