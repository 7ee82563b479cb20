"""Ranks as threads of one process, on PyTorch's own threaded process group.

The threads live as long as the process. DTensor keeps caches of its own in each thread, and torch 2.11 crashes where a new
thread follows one that ended.
"""

from __future__ import annotations

import queue
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

import torch.distributed as dist

from ..torch_private import threaded_group
from .case import Trial
from .verdict import Failure, Verdict, failure_of

GRACE = 3.0


def wake() -> None:
    """Ends the collectives that ranks wait in. The group's own `exception_handle` walks a dict that others change."""
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

    ProcessLocalGroup._terminate.set()
    with ProcessLocalGroup._coll_lock:
        waiting = list(ProcessLocalGroup._cur_coll_on_pgs.values())
    for collective in waiting:
        for condition in (collective._start_cond, collective._done_cond):
            with condition:
                condition.notify_all()


class _Rank(threading.Thread):
    def __init__(self, number: int, done: queue.Queue) -> None:
        super().__init__(daemon=True, name=f"rank {number}")
        self.number = number
        self.tasks: queue.Queue = queue.Queue()
        self.done = done
        self.start()

    def run(self) -> None:
        while True:
            task, size, store, function = self.tasks.get()
            try:
                dist.init_process_group("threaded", rank=self.number, world_size=size, store=store)
                result = function()
            except BaseException as error:  # noqa: BLE001
                result = failure_of(error)
            if isinstance(result, Failure):
                wake()
            try:
                dist.destroy_process_group()
            except BaseException as error:  # noqa: BLE001
                result = result if isinstance(result, Failure) else failure_of(error)
            self.done.put((task, self.number, result))


class ThreadRanks:
    """Runs cases on threads of this process. After a hang this process is of no use any more: `broken` says so."""

    def __init__(self) -> None:
        self.group = threaded_group()
        self.done: queue.Queue = queue.Queue()
        self.ranks: list[_Rank] = []
        self.task = 0
        self.broken = False

    def run(self, case: Trial) -> Any:
        """What the case makes of what its ranks hold, or a verdict on ranks that failed."""
        seen = []
        with tempfile.TemporaryDirectory(prefix="shardproof-check-") as folder:
            for s, segment in enumerate(case.segments):
                results, stacks = self._segment(segment.ranks, lambda s=s: case.run_rank(s, folder), case.patience)
                failures = {rank: r for rank, r in results.items() if isinstance(r, Failure)}
                if stacks and not failures:
                    message = f"segment {s}: ranks {sorted(stacks)} wait and never end, ranks {sorted(results)} ended"
                    return case.finish(Verdict("hung", where="hung", message=message, traces=stacks))
                if failures:
                    return case.failed(s, failures)
                seen.append([results[rank] for rank in range(segment.ranks)])
        return case.judge(seen)

    def _segment(self, size: int, function, patience: float):
        while len(self.ranks) < size:
            self.ranks.append(_Rank(len(self.ranks), self.done))
        self.task += 1
        store = dist.HashStore()
        for rank in self.ranks[:size]:
            rank.tasks.put((self.task, size, store, function))
        results: dict[int, object] = {}
        stacks: dict[int, str] = {}
        limit = time.monotonic() + patience
        while len(results) < size:
            try:
                task, rank, result = self.done.get(timeout=max(0.01, limit - time.monotonic()))
            except queue.Empty:
                if stacks:  # woken ranks did not end either
                    self.broken = True
                    break
                stacks = self._stacks(set(range(size)) - set(results))
                wake()
                limit = time.monotonic() + GRACE
                continue
            if task == self.task:
                results[rank] = result
                if isinstance(result, Failure):
                    limit = min(limit, time.monotonic() + GRACE)
        self.group.reset()
        return {rank: result for rank, result in results.items() if rank not in stacks}, stacks

    def _stacks(self, waiting: set[int]) -> dict[int, str]:
        frames = sys._current_frames()
        return {
            r: "".join(traceback.format_stack(frames[self.ranks[r].ident])) for r in waiting if self.ranks[r].ident in frames
        }
