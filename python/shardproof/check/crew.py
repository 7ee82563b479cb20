"""Warm processes that run cases: one process with rank-threads, or one process for each rank, connected by gloo.

They live from case to case. One that crashes or hangs is killed, and the next case starts new ones.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any, Callable

from .case import Trial
from .verdict import Failure, Verdict, failure_of

fork = multiprocessing.get_context("fork")
# What an optimizer and a checkpoint import when they are first used. A process that is forked before takes a second for it.
AHEAD = ("torch._dynamo", "torch.distributed.checkpoint.state_dict")
_forking = threading.Lock()


class Died(Exception):
    """A process ended or was silent too long."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class Worker:
    """A forked process that answers messages. Functions need no pickling, as the process is a copy of this one."""

    def __init__(self, serve) -> None:
        for module in AHEAD:
            importlib.import_module(module)
        handle, self.stacks = tempfile.mkstemp(prefix="shardproof-stacks-")
        os.close(handle)
        with _forking:
            self.pipe, other = fork.Pipe()
            self.process = fork.Process(target=self._main, args=(serve, other, self.pipe), daemon=True)
            self.process.start()
        other.close()

    def _main(self, serve, pipe, parents) -> None:
        import torch

        parents.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)
        faulthandler.register(signal.SIGUSR1, file=open(self.stacks, "w"), all_threads=True)
        answer = serve()
        try:
            while True:
                pipe.send_bytes(pickle.dumps(answer(*pickle.loads(pipe.recv_bytes()))))
        except (EOFError, OSError):
            os._exit(0)

    def send(self, *message) -> None:
        try:
            self.pipe.send_bytes(pickle.dumps(message))
        except OSError:
            raise Died("crashed", self._exit()) from None

    def receive(self, seconds: float):
        try:
            if not self.pipe.poll(seconds):
                raise Died("hung", f"no answer within {seconds:.0f} s")
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise Died("crashed", self._exit()) from None

    def _exit(self) -> str:
        self.process.join(2)
        code = self.process.exitcode
        return (
            f"the process ended by signal {signal.Signals(-code).name}"
            if code and code < 0
            else f"the process ended with {code}"
        )

    def stack(self) -> str:
        """Where the process stands now."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        with open(self.stacks) as file:
            text = file.read()
        lines = text[text.rfind("most recent call first") :].splitlines()[1:]  # the main thread comes last
        return "\n".join(reversed(lines))

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()
        if os.path.exists(self.stacks):
            os.unlink(self.stacks)


class ThreadCrew:
    """One process whose threads are the ranks.

    Parameters
    ----------
    make_case
        Makes the case of a message, a `Trial`. Processes make it once more, so it must be the same every time.
    patience
        As the trials have it.
    """

    def __init__(self, make_case: Callable[..., Trial], patience: float) -> None:
        self.make_case = make_case
        self.patience = patience
        self.worker: Worker | None = None

    def run(self, *message) -> Any:
        if self.worker is None:
            self.worker = Worker(lambda: _serve_threads(self.make_case))
        try:
            self.worker.send(*message)
            result, broken = self.worker.receive(60.0 + 4 * self.patience)
        except Died as died:
            stack = self.worker.stack()
            self.stop()
            verdict = Verdict(died.kind, where=died.kind, message=died.text, traces={0: stack})
            return self.make_case(*message).finish(verdict)
        if broken:
            self.stop()
        return _unless_failed(result)

    def stop(self) -> None:
        if self.worker:
            self.worker.stop()
            self.worker = None


def _unless_failed(result):
    if isinstance(result, Failure):
        raise RuntimeError(f"the plain model or the comparison failed:\n{result.text}")
    return result


def _serve_threads(make_case):
    from .thread_ranks import ThreadRanks

    ranks = ThreadRanks()

    def answer(*message):
        try:
            start = time.process_time()
            result = ranks.run(make_case(*message))
            if isinstance(result, Verdict):
                result.error = None  # it may not go through a pipe
                result.seconds = time.process_time() - start
        except Exception as error:  # noqa: BLE001
            return failure_of(error), ranks.broken
        return result, ranks.broken

    return answer


class ProcessCrew:
    """One process for each rank. Parameters are those of `ThreadCrew`."""

    grace = 4.0

    def __init__(self, make_case: Callable[..., Trial], patience: float) -> None:
        self.make_case = make_case
        self.patience = patience
        self.workers: list[Worker] = []

    def run(self, *message) -> Any:
        case = self.make_case(*message)
        seen = []
        with tempfile.TemporaryDirectory(prefix="shardproof-check-") as folder:
            for s, segment in enumerate(case.segments):
                results, dead, stacks = self._segment(segment.ranks, message, s, folder)
                failures = {r: x for r, x in results.items() if isinstance(x, Failure)}
                if failures and (not dead or not all(x.follows for x in failures.values())):
                    return case.failed(s, failures)
                if dead:
                    rank, died = next(iter(dead.items()))
                    text = f"segment {s}: rank {rank}: {died.text}; ranks {sorted(results)} ended"
                    return case.finish(Verdict(died.kind, where=died.kind, message=text, traces=stacks))
                seen.append([results[rank] for rank in range(segment.ranks)])
        self.workers[0].send("judge", message, seen)
        return _unless_failed(self.workers[0].receive(90.0))

    def _segment(self, size: int, message, s: int, folder: str):
        while len(self.workers) < size:
            rank = len(self.workers)
            self.workers.append(Worker(lambda rank=rank: _serve_process(self.make_case, self.patience, rank)))
        store = os.path.join(folder, f"store{s}")
        results, dead, stacks = {}, {}, {}
        for rank, worker in enumerate(self.workers[:size]):
            try:
                worker.send("segment", message, s, folder, store, size)
            except Died as died:
                dead[rank] = died
        limit = time.monotonic() + self.patience
        while len(results) + len(dead) < size:
            for rank in [r for r in range(size) if r not in results and r not in dead]:
                try:
                    results[rank] = self.workers[rank].receive(0.005)
                    if isinstance(results[rank], Failure):
                        limit = min(limit, time.monotonic() + self.grace)
                except Died as died:
                    if died.kind == "crashed":
                        dead[rank] = died
                        limit = min(limit, time.monotonic() + self.grace)
                    elif time.monotonic() > limit:
                        stacks[rank] = self.workers[rank].stack()
                        dead[rank] = Died("hung", "waits and never ends")
        if dead:
            self.stop()
            crashed = {r: d for r, d in dead.items() if d.kind == "crashed"}
            dead = crashed or dead
        return results, dead, stacks

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers = []


def _serve_process(make_case, patience: float, rank: int):
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    made: list[tuple[Any, Trial]] = []  # the last case, which has several segments

    def case_of(message) -> Trial:
        key = pickle.dumps(message)
        if not made or made[0][0] != key:
            made[:] = [(key, make_case(*message))]
        return made[0][1]

    def segment(message, s, folder, store, size):
        case = case_of(message)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=patience + 60),
        )
        try:
            return case.run_rank(s, folder)
        finally:
            dist.destroy_process_group()

    def answer(what, message, *rest):
        try:
            result = segment(message, *rest) if what == "segment" else case_of(message).judge(*rest)
            if isinstance(result, Verdict):
                result.error = None  # it may not go through a pipe
            return result
        except Exception as error:  # noqa: BLE001
            return failure_of(error)

    return answer
