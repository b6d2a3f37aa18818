"""Opening a store after a crash, beside RocketMQ's own DefaultMessageStore on the same files.

Every opening gets a fresh copy, because opening after a crash changes it, and a new process, because a crash ends one; the
clock runs inside of it, so that starting Python with NumPy, which rmqstore loads with its first use, or the JVM is not in the
figures.  Two kinds of crash: a process that was
killed, whose queues and index are all there, and a store that lost both, so that everything is dispatched again.  The
checkpoint is lost in both, so that all of the log is looked at.

"Cold": the pages of the copy were dropped from the page cache before.  "Warm": everything was read before.  For Java there are
two figures: the first opening in a JVM, which is what a crashed broker does, and the second, of another copy, for which
the compiler has warmed up.  Both are the time of its `load`, which recovers; the second that `start` takes on top is left
out.  Ours is the whole of `MessageStore.open`, what was written forced to the disk.

Cold, an opening can be no faster than the disk gives what it has to look at: there the base is a program that does nothing but
read the bytes of the log, the queues and the index, file by file in order, 4 MiB at a time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from rmqstore import MessageStore, StoreConfig

from . import data, memory
from .jvm import JavaClass
from .rounds import Outcome, Work
from .setting import Setting, copy_sparse, remove

BODY = 256
KINDS = {"killed": (), "queues and index lost": ("consumequeue", "index")}
FIRST, SECOND = "Java, first in a JVM", "Java, second in a JVM"
DISK = "reading the store's bytes"
# Where queues and index are written again, the disk has more to do than to give the log.
GOALS = {
    ("killed", "warm"): {"MessageStore.open": 8.0},
    ("queues and index lost", "warm"): {"MessageStore.open": 8.0},
    ("killed", "cold"): {"MessageStore.open": 0.9},
}

OPEN_HERE = """
import sys, time
import numpy
from rmqstore import MessageStore, StoreConfig
config = StoreConfig()
begin = time.perf_counter_ns()
store = MessageStore.open(sys.argv[1], config=config)
ready = time.perf_counter_ns() - begin
units = sum(store.max_queue_offset(topic, queue_id) for topic, queue_id in store.queues.keys())
print("opened", ready, ready, store.commit_log.max_offset, units)
sys.stdout.flush()
import os
os._exit(0)
"""

READ_HERE = """
import os, sys, time
folder = sys.argv[1]
begin = time.perf_counter_ns()
for path in sorted(os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names):
    fd, at = os.open(path, os.O_RDONLY), 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    size = os.fstat(fd).st_size
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        end = os.lseek(fd, at, os.SEEK_HOLE)
        os.lseek(fd, at, os.SEEK_SET)
        while at < end and (block := os.read(fd, min(1 << 22, end - at))):
            at += len(block)
print("opened", time.perf_counter_ns() - begin, 0, 0, 0)
"""


def works(setting: Setting) -> Iterator[Work]:
    """Both kinds of crash, warm and cold."""
    folder = setting.folder("recovery")
    source = os.path.join(folder, "store")
    n = setting.size(2_000_000, 20_000)
    java = JavaClass("TimeOpen", folder) if setting.java is not None else None
    try:
        with MessageStore.open(source, config=StoreConfig()) as store:
            data.fill(store, data.keys(n), data.bodies(n, BODY), BODY)
        make_unclean(source)
        for kind, lost in KINDS.items():
            for state in ("warm",) if setting.quick else ("warm", "cold"):

                def fresh(name: str, lost: tuple[str, ...] = lost, warm: bool = state == "warm") -> str:
                    return fresh_copy(setting, source, os.path.join(folder, name), lost, warm)

                def ours() -> Outcome:
                    path = fresh("ours")
                    return opened([sys.executable, "-c", OPEN_HERE, path], folder)[0]

                def theirs(number: int) -> Outcome:
                    assert java is not None
                    paths = [fresh(f"theirs{one}") for one in range(number)]
                    return opened([*java.command, *paths], folder)[-1]

                def disk() -> Outcome:
                    path = fresh("disk")
                    return read_files(path, folder)

                contenders = {"MessageStore.open": ours}
                cold = state == "cold"
                if cold:
                    contenders[DISK] = disk
                if java is not None:
                    contenders |= {FIRST: lambda: theirs(1), SECOND: lambda: theirs(2)}
                yield Work(
                    "recovery",
                    f"opening, {kind}, {state}",
                    "messages",
                    n,
                    contenders,
                    base=DISK if cold else SECOND,
                    others=[FIRST, SECOND] if cold else [FIRST],
                    goals=GOALS.get((kind, state), {}),
                    skipped=setting.without_java(FIRST, SECOND),
                    warm_up=0,
                )
    finally:
        remove(folder)


def make_unclean(path: str) -> None:
    """Let it look as after a crash before the first flush: `abort` is there, the checkpoint is not."""
    with open(os.path.join(path, "abort"), "w", encoding="ascii"):
        pass
    os.unlink(os.path.join(path, "checkpoint"))


def fresh_copy(setting: Setting, source: str, target: str, lost: tuple[str, ...], warm: bool) -> str:
    """A sparse copy without the folders `lost`, on disk, and in the page cache or not."""
    copy_sparse(source, target)
    for folder in lost:
        shutil.rmtree(os.path.join(target, folder))
    setting.settle()
    for folder, _, names in os.walk(target):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                if not warm:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    read_written(fd)
            finally:
                os.close(fd)
    return target


def read_written(fd: int) -> None:
    """Read what was written of a file, not its holes."""
    size, at = os.fstat(fd).st_size, 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(fd, at, os.SEEK_HOLE)
        os.posix_fadvise(fd, at, end - at, os.POSIX_FADV_SEQUENTIAL)
        os.lseek(fd, at, os.SEEK_SET)
        while at < end and (block := os.read(fd, min(1 << 22, end - at))):
            at += len(block)


def read_files(folder: str, scratch: str) -> Outcome:
    """Read the files of a folder in a process of its own, as an opening has one, from the first byte to the last."""
    return Outcome(opened([sys.executable, "-c", READ_HERE, folder], scratch)[0].seconds)


def opened(command: list[str], scratch: str) -> list[Outcome]:
    """Run openings in a process of their own: for each the seconds of loading, the end of the log and the number of units."""
    memory.provide()
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=scratch)
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed ({result.returncode}):\n{result.stdout}{result.stderr}")
    rows = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("opened ")]
    return [Outcome(int(load) / 1e9, {"end": int(end), "units": int(units)}) for load, _, end, units in rows]
