"""Index file: putting and selecting keys, beside RocketMQ's IndexFile, default geometry.

"Warm" is a file all of whose pages were touched before, in the process that works on it; "fresh" one that was just made.  The
short chains are those of 2 000 000 keys in 5 000 000 slots (1.2 entries looked at for a key that is there); the long ones of
a full file (20 000 000 entries, 5 looked at), which both sides read.

Beside the calls with one key stands the same loop over an extension in C that does nothing (`asv_bench/constant.c`): what a
call costs in Python at least; and over one that writes and reads the same entries and checks nothing (c/one_key.c).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rmqstore import IndexFile, StoreConfig
from rmqstore._core import java_string_hash

from . import data
from .extensions import CONSTANT, ONE_KEY, constant_of, one_key
from .jvm import Java
from .rounds import Outcome, Work
from .setting import Setting, remove, timed

PUT_GOALS = {"put_keys, list of str": 5, "put_keys, Arrow": 5, "put_hashes, NumPy": 5, "put_key, one call": 1}
SELECT_GOALS = {"select_phy_offsets, list of str": 5, "select_phy_offset, one call": 1}


def index_hash(text: str) -> int:
    """The hash that the index keeps of a key: Java's, without its sign."""
    return abs(java_string_hash(text)) & 0x7FFFFFFF


class Files:
    """Our file and Java's, of one geometry."""

    def __init__(self, setting: Setting, config: StoreConfig):
        self.setting, self.config = setting, config
        self.folder = setting.folder("index")
        self.number = 0
        self.ours: IndexFile | None = None
        self.theirs = ""
        self.unchecked = ""

    def path(self) -> str:
        """The name of a file that is not there yet; RocketMQ takes only numbers."""
        self.number += 1
        return os.path.join(self.folder, f"{20260101000000000 + self.number}")

    def open_ours(self) -> IndexFile:
        """A new file of ours instead of the one before."""
        self.close_ours()
        self.ours = IndexFile.create(self.path(), self.config)
        return self.ours

    def close_ours(self) -> None:
        """Close and delete our file."""
        if self.ours is not None:
            self.ours.close()
            os.unlink(self.ours.path)
            self.ours = None

    def open_theirs(self, java: Java, path: str = "") -> str:
        """A new file of Java's instead of the one before."""
        self.close_theirs(java)
        self.theirs = path or self.path()
        java.ask("index-open", path=self.theirs, slots=self.config.max_hash_slot_num, entries=self.config.max_index_num)
        return self.theirs

    def close_theirs(self, java: Java) -> None:
        """Let Java delete its file."""
        if self.theirs:
            java.ask("index-destroy", path=self.theirs)
            self.theirs = ""

    def open_unchecked(self, extension: Any) -> None:
        """A new file of the extension's instead of the one before."""
        self.close_unchecked()
        self.unchecked = self.path()
        IndexFile.create(self.unchecked, self.config).close()
        self.reopen_unchecked(extension, self.unchecked)

    def reopen_unchecked(self, extension: Any, path: str) -> None:
        """Let the extension take up what lies at `path`."""
        extension.open(path, self.config.max_hash_slot_num, self.config.max_index_num)

    def close_unchecked(self) -> None:
        """Delete the extension's file."""
        if self.unchecked:
            os.unlink(self.unchecked)
            self.unchecked = ""

    def empty(self, path: str) -> None:
        """Zero header and slots; the entries keep their pages."""
        with open(path, "r+b", buffering=0) as file:
            file.write(bytes(40 + 4 * self.config.max_hash_slot_num))

    def close(self) -> None:
        """Delete everything."""
        self.close_ours()
        self.close_unchecked()
        if self.setting.java is not None:
            self.close_theirs(self.setting.java)
        remove(self.folder)


def works(setting: Setting) -> Iterator[Work]:
    """Puts into warm and fresh files; selects of keys that are there and of ones that are not."""
    n = setting.size(2_000_000, 50_000)
    config = StoreConfig() if not setting.quick else StoreConfig(max_hash_slot_num=100_000, max_index_num=400_000)
    files = Files(setting, config)
    try:
        keys = data.whole_keys(n)
        described = data.write_keys(os.path.join(files.folder, "keys"), keys)
        yield from puts(setting, files, keys, described)
        yield from selects(setting, files, keys, "short chains")
        setting_full = config.max_index_num - 1 - n
        assert files.ours is not None
        fill_up(files.ours, setting_full, 10 * n)
        yield from selects(setting, files, keys, "full file")
    finally:
        files.close()


def puts(setting: Setting, files: Files, keys: list[str], described: dict[str, Any]) -> Iterator[Work]:
    """All the ways to put, warm and fresh."""
    n = len(keys)
    offsets = np.arange(n, dtype=np.int64) * data.STEP
    times = np.full(n, data.TIME, np.int64) + np.arange(n, dtype=np.int64) // 50
    hashes = np.array([index_hash(key) for key in keys], np.int32)
    single_offsets, single_times = offsets.tolist(), times.tolist()

    def put_key(index: IndexFile) -> int:
        put = index.put_key
        taken = 0
        for key, offset, timestamp in zip(keys, single_offsets, single_times):
            taken += put(key, offset, timestamp)
        return taken

    ways: dict[str, Callable[[IndexFile], int]] = {
        "put_keys, list of str": lambda index: index.put_keys(keys, offsets, times),
        "put_hashes, NumPy": lambda index: index.put_hashes(hashes, offsets, times),
        "put_key, one call": put_key,
    }
    does_nothing = constant_of(files.folder, True)

    def of_constant() -> Outcome:
        return Outcome(timed(lambda: put_key(does_nothing))[0])

    unchecked = one_key(files.folder)
    skipped = setting.without_java("Java")
    try:
        import pyarrow as pa

        column = pa.array(keys, pa.string())
        ways["put_keys, Arrow"] = lambda index: index.put_keys(column, offsets, times)
    except ImportError:
        skipped["put_keys, Arrow"] = "pyarrow is not installed"
    for state in ("warm", "fresh"):
        if state == "warm":
            ours = files.open_ours()
            ours.put_keys(keys, offsets, times)
            files.open_unchecked(unchecked)
            if setting.java is not None:
                files.open_theirs(setting.java)

        def of_unchecked(fresh: bool = state == "fresh") -> Outcome:
            if fresh:
                files.open_unchecked(unchecked)
                setting.settle()
            else:
                files.empty(files.unchecked)
                files.reopen_unchecked(unchecked, files.unchecked)
            seconds, taken = timed(lambda: put_key(unchecked))
            return Outcome(seconds, {"taken": taken})

        def of_ours(way: Callable[[IndexFile], int], fresh: bool = state == "fresh") -> Outcome:
            if fresh:
                index = files.open_ours()
                setting.settle()
            else:
                assert files.ours is not None
                index = files.ours
                files.empty(index.path)
            seconds, taken = timed(lambda: way(index))
            return Outcome(seconds, {"taken": taken})

        def of_java(java: Java, fresh: bool = state == "fresh") -> Outcome:
            if fresh:
                files.open_theirs(java)
                setting.settle()
            else:
                files.empty(files.theirs)
                java.ask("index-reload", path=files.theirs)
            return java.timed("index-put", path=files.theirs, step=data.STEP, time=data.TIME, **described)

        yield Work(
            "index",
            f"put, {state} pages",
            "keys",
            n,
            {name: lambda way=way: of_ours(way) for name, way in ways.items()}
            | {CONSTANT: of_constant, ONE_KEY: of_unchecked}
            | setting.of_java("Java", of_java),
            others=[CONSTANT, ONE_KEY],
            goals=PUT_GOALS,
            skipped=skipped,
            warm_up=setting.warm_up(3),
        )
    # What follows asks a file that holds all of them.
    files.open_ours().put_keys(keys, offsets, times)


def fill_up(index: IndexFile, count: int, first: int) -> None:
    """Put `count` more entries with random hashes, so that chains become long; none is one of our keys' on purpose."""
    rng = np.random.default_rng(5)
    for at in range(0, count, 1_000_000):
        step = min(1_000_000, count - at)
        index.put_hashes(
            rng.integers(0, 2**31, step, dtype=np.int32),
            (first + at + np.arange(step, dtype=np.int64)) * data.STEP,
            np.full(step, data.TIME + 60_000, np.int64),
        )


def selects(setting: Setting, files: Files, there: list[str], chains: str) -> Iterator[Work]:
    """Batch and single selects in random order, both sides on the same file."""
    index = files.ours
    assert index is not None
    n = len(there) // 2
    order = np.random.default_rng(3).permutation(len(there))[:n]
    if setting.java is not None:
        files.open_theirs(setting.java, index.path)
    unchecked = one_key(files.folder)
    files.reopen_unchecked(unchecked, index.path)
    for kind, keys in (("there", [there[i] for i in order]), ("not there", data.whole_keys(n, seed=9))):
        described = data.write_keys(os.path.join(files.folder, "asked"), keys)

        def batch(keys: list[str] = keys) -> Outcome:
            keys = data.made_anew(keys)
            seconds, (offsets, _) = timed(lambda: index.select_phy_offsets(keys))
            return Outcome(seconds, {"found": len(offsets), "sum": int(offsets.sum())})

        def single(keys: list[str] = keys, asked: Any = index) -> Outcome:
            select = asked.select_phy_offset
            keys = data.made_anew(keys)

            def all_of_them() -> int:
                found = 0
                for key in keys:
                    found += len(select(key))
                return found

            seconds, found = timed(all_of_them)
            return Outcome(seconds, {"found": found})

        does_nothing = constant_of(files.folder, [0] if kind == "there" else [])

        def of_constant(single: Callable[..., Outcome] = single, does_nothing: Any = does_nothing) -> Outcome:
            return Outcome(single(asked=does_nothing).seconds)

        def of_unchecked(single: Callable[..., Outcome] = single) -> Outcome:
            return single(asked=unchecked)

        def of_java(java: Java, described: dict[str, Any] = described) -> Outcome:
            return java.timed("index-select", path=files.theirs, **described)

        yield Work(
            "index",
            f"select, {chains}, keys {kind}",
            "keys",
            n,
            {
                "select_phy_offsets, list of str": batch,
                "select_phy_offset, one call": single,
                CONSTANT: of_constant,
                ONE_KEY: of_unchecked,
            }
            | setting.of_java("Java", of_java),
            others=[CONSTANT, ONE_KEY],
            goals=SELECT_GOALS,
            skipped=setting.without_java("Java"),
            warm_up=setting.warm_up(3),
        )
    # Java must not delete the file that is ours too.
    files.theirs = ""
