"""Processes that die or get errors at a chosen system call, and what they left behind.

Owns building `faults.c`, the client of the server process that runs under it (`server.py`: one process that has imported
rmqstore, which forks a child for every case, so that a case costs milliseconds), and reading the log of calls.  What a
store promises after a fault is the tests' business, what is durable after a power loss that of `power`.  Linux only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))

#: Kinds of calls, in the order of `enum name` in faults.c.
NAMES = (
    "create", "write", "pwrite", "ftruncate", "fallocate", "link", "rename", "unlink", "mkdir", "rmdir", "msync", "fsync",
    "fdatasync", "open", "mmap", "photo", "store",
)  # fmt: skip
#: Those that change or force something; the others only matter as calls that may fail, and the last two are none: a photo
#: says what a mapping held at some moment, and a store is an instruction that writes to one.
CHANGING = NAMES[: NAMES.index("open")]
ACTIONS = {"nothing": 0, "kill before": 1, "kill after": 2, "fail": 3, "short write": 4}

_ENTRY = struct.Struct("=IIQQQQQqQiIIIII")
_MAGIC = 0x464C5453
IS_NEW, IS_DIRECTORY, LAST_LINK = 1, 2, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of a child's log.  Paths begin with "/" at the store's root; the root itself is ""."""

    name: str
    number: int
    begin: int
    end: int
    inode: int
    replaced: int
    offset: int
    size: int
    error: int
    flags: int
    path: str
    second: str
    data: bytes

    def __str__(self) -> str:
        failed = f", {os.strerror(self.error)}" if self.error else ""
        return f"{self.number}. {self.name} {self.path}{' ' + self.second if self.second else ''}{failed}"


def read_log(path: str) -> list[Call]:
    """The calls in the order in which they returned; a torn last entry of a killed process is left out."""
    if not os.path.exists(path):
        return []  # Killed before it was armed.
    with open(path, "rb") as file:
        log = file.read()
    calls, at = [], 0
    while at + _ENTRY.size <= len(log):
        magic, name, number, begin, end, inode, replaced, offset, size, error, flags, first, second, data, _ = (
            _ENTRY.unpack_from(log, at)
        )
        assert magic == _MAGIC, f"{path} is no log of calls at {at}"
        at += _ENTRY.size
        texts = log[at : at + first + second]
        content = log[at + first + second : at + first + second + data]
        at += first + second + data
        if at > len(log):
            break
        calls.append(
            Call(
                NAMES[name], number, begin, end, inode, replaced, offset, size, error, flags,
                os.fsdecode(texts[:first]), os.fsdecode(texts[first:]), content,
            )
        )  # fmt: skip
    return sorted(calls, key=lambda call: call.end)


@dataclasses.dataclass(slots=True)
class Outcome:
    """How a child ended.  `said` are the lines that it wrote, each a dict with its "what"."""

    status: int
    said: list[dict]
    calls: list[Call]
    errors: str

    @property
    def killed(self) -> bool:
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    @property
    def ended(self) -> bool:
        """It came to its end and nothing went wrong that it did not say."""
        return os.WIFEXITED(self.status) and os.WEXITSTATUS(self.status) == 0

    def __str__(self) -> str:
        if os.WIFSIGNALED(self.status):
            end = signal.Signals(os.WTERMSIG(self.status)).name
            end = {"SIGALRM": "a hang (SIGALRM)"}.get(end, end)
        else:
            end = f"exit code {os.WEXITSTATUS(self.status)}"
        return f"ended by {end} after {[line['what'] for line in self.said]}; {self.errors}"


def build_library(directory: str) -> str:
    """Compile faults.c into `directory`; the library's path.  Without a compiler the test is skipped, never in CI."""
    compiler = os.environ.get("CC", "").split() or [
        found for found in map(shutil.which, ("cc", "gcc", "clang")) if found
    ]
    if not sys.platform.startswith("linux") or not compiler:
        assert not os.environ.get("CI"), "the tests of faults need Linux and a C compiler, and CI must run them"
        pytest.skip("needs Linux (LD_PRELOAD) and a C compiler: install gcc or clang")
    library = os.path.join(directory, "faults.so")
    command = [compiler[0], "-O1", "-Wall", "-shared", "-fPIC", "-pthread", "-o", library]
    subprocess.run([*command, os.path.join(HERE, "faults.c"), "-ldl"], check=True)
    return library


class Server:
    """The process under the layer that forks a child for each case; usable in a ``with`` statement.

    `run` gives back when the child is dead; its files, its log and what it said stay in `scratch`.
    """

    def __init__(self, library: str, scratch: str):
        self.scratch = scratch
        # A sanitizer that is preloaded wants to be the first.
        preload = " ".join(filter(None, (os.environ.get("LD_PRELOAD"), library)))
        self._process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "server.py"), library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LD_PRELOAD": preload},
        )

    def run(
        self,
        scenario: str,
        root: str,
        *,
        geometry: str = "plain",
        options: dict | None = None,
        names: tuple[str, ...] = CHANGING,
        action: str = "nothing",
        number: int = 0,
        error: int = 0,
        lasts: bool = False,
        data: bool = False,
        kill_after: float | None = None,
        values: dict | None = None,
        timeout: int = 60,
    ) -> Outcome:
        """Let a child run `scenario` of server.py on the store at `root`.

        Parameters
        ----------
        names, action, number, error, lasts
            What happens at the `number`-th (from 1) of the calls of these names; `error` is an errno; `lasts`: and at all
            after it.
        data : bool
            The log holds the bytes of everything that was forced.
        kill_after : float, optional
            Seconds after which the child gets SIGKILL, wherever it is.
        timeout : int
            Seconds after which a child counts as hung; it gets SIGALRM then.
        """
        said, log, errors = (os.path.join(self.scratch, name) for name in ("said", "log", "errors"))
        for path in (said, log, errors):
            if os.path.exists(path):
                os.unlink(path)
        request = {
            "scenario": scenario, "root": os.path.realpath(root), "geometry": geometry, "options": options or {},
            "names": sum(1 << NAMES.index(name) for name in names), "action": ACTIONS[action], "number": number,
            "error": error, "lasts": int(lasts), "data": int(data), "kill_after": kill_after, "values": values or {},
            "timeout": timeout, "said": said, "log": log, "errors": errors,
        }  # fmt: skip
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout + 60)
        assert ready, "the server of the children does not answer"
        answer = self._process.stdout.readline()
        assert answer, "the server of the children is dead"
        return Outcome(json.loads(answer)["status"], list(_lines(said)), read_log(log), _text(errors))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.stdin.close()
        self._process.wait(240)
        self._process.stdout.close()


def _lines(path: str) -> Iterator[dict]:
    # Each line was written by one call, but a kill may end that one between two pages: what was not said to its end counts
    # as not said.
    if os.path.exists(path):
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)


def _text(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def is_promise(line: dict) -> bool:
    """True if everything put before this action is on disk: a flush that returned, or a close in order."""
    return line["what"] == "flush" or (line["what"] == "closed" and not line["abort"])


def acknowledged_of(said: list[dict], *, durable: bool = False) -> list[tuple]:
    """What `check_readable` of test_crash takes: the messages whose put returned.

    With `durable` only those that a power loss must leave: put under SYNC_FLUSH, or before a flush
    or an orderly close that returned began.
    """
    puts = [each for each in said if each["what"] == "put"]
    if durable:
        sure = max((each["began"] for each in said if is_promise(each)), default=-1)
        puts = [each for each in puts if each["sync"] or each["done"] < sure]
    return [
        (topic, queue_id, queue_offset, phy_offset, tuple(keys), tags, bytes.fromhex(body))
        for each in puts
        for topic, queue_id, queue_offset, phy_offset, keys, tags, body in each["messages"]
    ]
