"""A process of its own for each model, with limits of time and memory, so that none can stop the others."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import tempfile
import time
import traceback
from typing import Any, Callable, Iterable, Iterator


class Child:
    """Runs `rows_of()`, which gives rows, in a fork. What it prints goes to a log."""

    def __init__(self, name: str, rows_of: "Callable[[], Iterable[dict]]", seconds: float, memory_gib: float):
        self.name, self.seconds = name, seconds
        self.rows, self.log = tempfile.NamedTemporaryFile("r", suffix=".jsonl"), tempfile.NamedTemporaryFile("r", suffix=".log")
        self.start = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self.run(rows_of, memory_gib)

    def run(self, rows_of: "Callable[[], Iterable[dict]]", memory_gib: float) -> None:
        """Never returns."""
        code = 1
        try:
            log = open(self.log.name, "w", encoding="utf-8")
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            faulthandler.enable(log)
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=log)
            resource.setrlimit(resource.RLIMIT_AS, (int(memory_gib * 2**30), resource.RLIM_INFINITY))
            with open(self.rows.name, "w", encoding="utf-8") as file:
                for row in rows_of():
                    file.write(json.dumps(row) + "\n")
                    file.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            faulthandler.cancel_dump_traceback_later()
            os._exit(code)

    def stop_when_late(self) -> None:
        """Its own limit has a stack to show, so this one comes later."""
        if time.monotonic() - self.start > self.seconds + 10:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def ended(self, status: int, usage: Any) -> "dict[str, Any]":
        """Its rows, and one more if it did not come to its end. A hang waits, and what is only slow computes."""
        took = time.monotonic() - self.start
        rows = [json.loads(line) for line in self.rows.read().splitlines()]
        if status != 0:
            stack = self.log.read()[-4000:]
            late = took > self.seconds - 1
            waits = "run_threads" in stack and usage.ru_utime + usage.ru_stime < took / 4
            verdict = "crash" if not late else "hang" if waits else "slow"
            last = (stack.splitlines() or [""])[-1]
            rows.append({"verdict": verdict, "detail": f"exit code {os.waitstatus_to_exitcode(status)}: {last}", "log": stack})
        return {"rows": rows, "seconds": round(took, 2), "mib": usage.ru_maxrss // 1024}


def run_all(
    names: "list[str]", rows_of: "Callable[[str], Iterable[dict]]", *, at_once: int, seconds: float, memory_gib: float,
    end: "float | None" = None,
) -> "Iterator[tuple[str, dict]]":
    """Each name with its rows, as they end. None begins after the time `end`."""
    waiting, running = list(names), {}  # type: list[str], dict[int, Child]
    try:
        while waiting or running:
            if end is not None and time.monotonic() > end:
                waiting = []
                if not running:
                    break
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                child = Child(name, lambda name=name: rows_of(name), seconds, memory_gib)
                running[child.pid] = child
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid in running:
                child = running.pop(pid)
                yield child.name, child.ended(status, usage)
                continue
            time.sleep(0.02)
            for child in running.values():
                child.stop_when_late()
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
