"""Work on several threads that an interrupt of the main thread ends."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Callable, Iterator

# A signal that arrives while the main thread waits for the interpreter's lock, right before it blocks, is not heard until it
# wakes. With other threads in Python this is not rare, so the main thread does not block for longer than this.
_BLOCKED_SECONDS_MAX = 0.1


class Interruptible:
    """A function that runs beside the caller's thread, and parts of it on threads of their own.

    Python handles signals in the main thread only, between two lines of Python. So the caller's thread does nothing but wait.
    When a handler raises there, be it KeyboardInterrupt or another exception, every part gets a KeyboardInterrupt, and the
    caller gets the exception once the function has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: "set[int]" = set()  # the threads that are within `part`
        self._begun = False
        self._interrupted = False
        self._ended = threading.Event()

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """What a thread does within this context gets a KeyboardInterrupt when the caller of `run` is interrupted."""
        identity = threading.get_ident()
        with self._lock:
            if self._interrupted:
                raise KeyboardInterrupt
            self._parts.add(identity)
        try:
            yield
        finally:
            with self._lock:
                self._parts.discard(identity)

    def run(self, function: Callable[[], None], *, name: str) -> None:
        """Run ``function`` once, and raise what a signal's handler raised meanwhile. The function must raise nothing."""
        # `Thread.join` cannot be called again after an interrupt: in Python 3.11 it then takes a running thread for one that
        # has ended (https://github.com/python/cpython/issues/90882). An event can be waited for twice.
        thread = threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
        try:
            thread.start()
            self._wait()
        except BaseException:
            if self._interrupt_parts():
                self._wait()
            raise
        thread.join()

    def _run(self, function: Callable[[], None]) -> None:
        with self._lock:
            if self._interrupted:
                return
            self._begun = True
        try:
            function()
        finally:
            self._ended.set()

    def _wait(self) -> None:
        while not self._ended.wait(_BLOCKED_SECONDS_MAX):
            pass

    def _interrupt_parts(self) -> bool:
        """Whether the function has begun. If it has not, it never will."""
        with self._lock:
            self._interrupted = True
            for identity in self._parts:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(identity), ctypes.py_object(KeyboardInterrupt))
            return self._begun
