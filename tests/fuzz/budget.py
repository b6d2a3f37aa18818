"""What reading may cost: time and memory that grow with the bytes and no faster.

Owns the budgets, how an input is made large, and how both are measured.  Memory is the more of two numbers: what Python
and NumPy were asked for (`tracemalloc`, which sees also what nobody touches), and what the process has in memory at its
peak (the kernel's count, which sees also what compiled code takes by itself).  It reads no file but those of /proc.
"""

from __future__ import annotations

import contextlib
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What an input is repeated to, bytes.
STRETCHED = 1 << 18
#: What its reading may then take: seconds of the processor, at all and a byte.
SECONDS = 0.2
SECONDS_A_BYTE = 8e-6
#: The same for memory, bytes.  A byte of a term may be a list, which is 64 bytes and a place in another list; a store that
#: an import makes has files of its own, and buffers.
MEMORY = 16 << 20
MEMORY_A_BYTE = 128
#: What a process that fuzzes may ask for beyond what it has.  More is an error of the call, touched or not.
ADDRESSES = 1 << 30

Read = Callable[[bytes], Any]


class OverBudgetError(AssertionError):
    """Reading takes more than a linear reader would."""


def stretched(data: bytes, head: int = 0) -> bytes:
    """Bytes again and again put together, the first `head` of them once."""
    again = data[head:]
    return data[:head] + again * max(STRETCHED // max(len(again), 1), 1)


def judge_time(
    read: Read,
    data: bytes,
    clock: Callable[[], float] = time.thread_time,
    at_all: float = SECONDS,
    a_byte: float = SECONDS_A_BYTE,
    tries: int = 3,
) -> None:
    """Read bytes: what that takes by `clock` is within the budget."""

    def measured() -> float:
        begin = clock()
        read(data)
        return clock() - begin

    _judge(measured, len(data), at_all, a_byte, tries, "by the clock")


def judge_memory(
    read: Read, data: bytes, at_all: float = MEMORY, a_byte: float = MEMORY_A_BYTE, tries: int = 3
) -> None:
    """Read bytes: what that has in memory at its peak is within the budget."""
    _judge(lambda: memory(read, data), len(data), at_all, a_byte, tries, "bytes of memory")


def _judge(measured: Callable[[], float], size: int, at_all: float, a_byte: float, tries: int, unit: str) -> None:
    limit = at_all + a_byte * size
    # A machine that is slow for a moment, and what is loaded at the first call, are none of the reader's: the best of some.
    best = float("inf")
    for _ in range(tries):
        best = min(best, measured())
        if best <= limit:
            return
    raise OverBudgetError(f"{size} bytes take {best:.2f} {unit}, a linear reader {limit:.2f} at most")


def memory(read: Read, data: bytes) -> int:
    """How many bytes reading has in memory at its peak."""
    before = _resident(peak=False)
    tracemalloc.start()
    try:
        read(data)
        _, traced = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return max(traced, _resident(peak=True) - before)


def _resident(peak: bool) -> int:
    # Zero where the kernel does not tell; then what Python was asked for is all that counts.
    status = Path("/proc/self/status")
    try:
        if not peak:
            # The peak begins anew.
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(r"VmHWM:\s*([0-9]+) kB", status.read_text())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def limit_addresses(more: int = ADDRESSES) -> None:
    """Refuse this process what goes beyond `more` bytes from now on: a MemoryError, for every input that asks for it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
