"""Memory of the CPU's tensors that the process keeps when they are freed."""

from __future__ import annotations

from . import _C


def use_host_pool() -> None:
    """Let new tensors on the CPU lie in a pool that keeps their memory, as a GPU's tensors do in PyTorch.

    A step frees and allocates the same tensors as the one before. With the pool it fetches no fresh memory, so it takes less
    time, and the process needs less memory. Tensors of less than 64 KiB stay with the system's allocator.

    Call it first: no other thread may make a tensor meanwhile. It is for the whole process, and a second call has no effect.
    """
    _C.use_host_pool()


def host_pool_bytes() -> dict[str, int]:
    """Bytes of the pool: ``used`` by tensors now, ``used_max`` at one time, and ``kept`` for the next ones."""
    return _C.host_pool_bytes()


def trim_host_pool() -> None:
    """Give the memory that is kept back to the system. The next tensors fetch it again."""
    _C.trim_host_pool()
