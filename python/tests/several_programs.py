"""Programs that run one after the other, each as the ranks of one job, beside a process that has imported what is slow."""

import importlib
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, os.pardir, os.pardir, "ci", "tests")]

from peer_ranks import end_with_parent, run_ranks  # noqa: E402


def run_programs(whose, modules, *programs):
    """The JSON that rank 0 of two says at the end of each program. A program: its file, and arguments behind `whose`.

    With "ours" the names of FSDP2 are this library's before the modules are imported.
    """
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, initializer=end_with_parent, initargs=(os.getpid(),)) as importer:
        return importer.submit(import_and_run, whose, modules, programs).result()


def import_and_run(whose, modules, programs):
    if whose == "ours":
        import shardproof.fsdp

        shardproof.fsdp.patch_torch()
    for module in modules:
        importlib.import_module(module)
    said = (run_ranks(os.path.join(HERE, program), 2, [whose, *map(str, given)])[0] for program, *given in programs)
    return [json.loads(each.strip().splitlines()[-1]) for each in said]
