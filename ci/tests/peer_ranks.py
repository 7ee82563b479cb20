"""A script of PyTorch's as the ranks of one job: `run_ranks` starts it, `join` and `leave` are its first and last calls.

Rank 0 serves the store at a port that the system gives it and tells the others by a file: a port probed free beforehand may be
taken by the next test. Ranks leave when all have come to the end by the store's word: a rank that closes its connections while
a neighbour is still in a collective makes that neighbour fail.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def run_ranks(script, world, arguments):
    """The standard output of every rank; AssertionError with what all said when one failed, which ends the others."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                       PEER_PORT=os.path.join(folder, "port"), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
            with open(os.path.join(folder, f"out{rank}"), "w") as out, open(os.path.join(folder, f"err{rank}"), "w") as err:
                started.append(subprocess.Popen([sys.executable, os.path.join(HERE, script), *arguments], env=env, stdout=out,
                                                stderr=err))
        while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
            time.sleep(0.02)
        codes = [process.poll() for process in started]
        for process in started:
            process.kill()
            process.wait()
        outputs, errors = ([pathlib.Path(folder, f"{kind}{rank}").read_text() for rank in range(world)]
                           for kind in ("out", "err"))
    if any(codes):
        said = "\n".join(f"rank {rank}: exit {codes[rank]}\n{outputs[rank][-1500:]}{errors[rank][-1500:]}"
                         for rank in range(world))
        raise AssertionError(f"{arguments} on {world} ranks failed:\n{said}")
    return outputs


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
