"""A script of PyTorch's as the ranks of one job: `run_ranks` starts it, `join` and `leave` are its first and last calls.

Rank 0 serves the store at a port that the system gives it and tells the others by a file: a port probed free beforehand may be
taken by the next test. Ranks leave when all have come to the end by the store's word: a rank that closes its connections while
a neighbour is still in a collective makes that neighbour fail.
"""
import ctypes
import multiprocessing
import os
import pathlib
import random
import runpy
import signal
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
fork = multiprocessing.get_context("fork")


def run_ranks(script, world, arguments, fresh=False):
    """The standard output of every rank; AssertionError with what all said when one failed, which ends the others.

    Ranks are forks of this process, and find what it has imported: imports take longer than most scripts. Those of `fresh`
    are interpreters of their own, whose sets have other orders, as a user's ranks are. A process that has touched CUDA needs
    them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(HERE, script)
        ranks = [fork.Process(target=be_rank, args=(path, rank, world, arguments, folder, fresh, os.getpid()))
                 for rank in range(world)]
        for rank in ranks:
            rank.start()
        while any(rank.exitcode is None for rank in ranks) and not any(rank.exitcode for rank in ranks):
            time.sleep(0.02)
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
        outputs, errors = ([pathlib.Path(folder, f"{kind}{rank}").read_text() for rank in range(world)]
                           for kind in ("out", "err"))
    if any(codes):
        said = "\n".join(f"rank {rank}: exit {codes[rank]}\n{outputs[rank][-1500:]}{errors[rank][-1500:]}"
                         for rank in range(world))
        raise AssertionError(f"{arguments} on {world} ranks failed:\n{said}")
    return outputs


def end_with_parent(parent):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # which had ended before
        os._exit(1)


def be_rank(script, rank, world, arguments, folder, fresh, parent):
    """What `python script arguments` does, in this process."""
    end_with_parent(parent)
    for number, kind in ((1, "out"), (2, "err")):
        with open(os.path.join(folder, f"{kind}{rank}"), "w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), PEER_PORT=os.path.join(folder, "port"),
                      OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    if fresh:
        os.execv(sys.executable, [sys.executable, script, *arguments])
    import torch
    torch.set_num_threads(1)  # as the variable says; and a fork's pool of threads is mended before two threads do it at once
    random.seed()
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def until(condition):
    while not condition():
        time.sleep(0.01)


def serve_or_connect():
    from torch.distributed import TCPStore
    path, world = os.environ["PEER_PORT"], int(os.environ["WORLD_SIZE"])
    if os.environ["RANK"] == "0":
        serving = TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
        pathlib.Path(path + ".new").write_text(str(serving.port))
        os.rename(path + ".new", path)
        return serving
    until(lambda: os.path.exists(path))
    return TCPStore("127.0.0.1", int(pathlib.Path(path).read_text()), world, False)


def join(backend="gloo", **more):
    """The store of all ranks, beside the process group that it begins."""
    import torch.distributed as dist
    store = serve_or_connect()
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]), **more)
    return store


def leave(store):
    """Ends this process with 0 once every rank has come here, the server last; gloo's threads sometimes abort a normal exit."""
    sys.stdout.flush()
    world = int(os.environ["WORLD_SIZE"])
    store.add("here", 1)
    until(lambda: store.add("here", 0) == world)
    store.add("leaving", 1)
    if os.environ["RANK"] == "0":
        until(lambda: store.add("leaving", 0) == world)
    os._exit(0)
