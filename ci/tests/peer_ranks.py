"""A script of PyTorch's as the ranks of one job: `run_ranks` starts it, `join` and `leave` are its first and last calls.

Ranks meet in a file, as a port probed free may be taken by the next test, and they leave when all have come to the end by
that file's word: a rank that closes its connections while a neighbour is still in a collective makes that neighbour fail.
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
                       PEER_STORE=os.path.join(folder, "store"), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
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


def store():
    import torch.distributed as dist
    return dist.FileStore(os.environ["PEER_STORE"], int(os.environ["WORLD_SIZE"]))


def join():
    import torch.distributed as dist
    dist.init_process_group("gloo", store=store(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def leave():
    """Ends this process with 0 once every rank has come here; gloo's threads sometimes abort a normal exit."""
    sys.stdout.flush()
    meeting = store()
    meeting.add("leaving", 1)
    while meeting.add("leaving", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    os._exit(0)
