"""A key and what belongs to it, put and got in batches, beside the key stores that a Python user would pick instead.

Random keys of 16 characters, payloads of 256 bytes, 10 000 a batch, each store in its best batch interface.  Nobody forces a
batch to the disk: all of them keep what was put when the process dies, and none promises it when the machine does.  The reads
follow the puts, with the pages in memory; all keys are asked for, in another order.

The limit of what a store of messages can do are plain loops in C (c/rebuild.c, c/query.c), which lay out the same records,
units and index entries and find them again, and an extension in C that makes the message objects and checks nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rmqstore import Message, MessageStore, StoreConfig

from . import data
from .extensions import messages_of
from .loops import compiled, run_loop
from .rebuild import loop_over
from .rounds import Outcome, Work
from .setting import Setting, remove, timed

BATCH = 10_000
BODY = 256
_SQL_VARIABLES = 1000


class Rows:
    """The keys and payloads in the forms that the stores take; made before any clock starts."""

    def __init__(self, n: int):
        self.n = n
        self.keys = data.keys(n)
        self.blob = data.bodies(n, BODY)
        self.encoded = [key.encode() for key in self.keys]
        self.payloads = [self.blob[i * BODY : (i + 1) * BODY] for i in range(n)]
        order = np.random.default_rng(6).permutation(n)
        self.asked = [self.keys[i] for i in order]
        self.asked_encoded = [self.encoded[i] for i in order]

    def batches(self) -> Iterator[slice]:
        """The batches, as slices."""
        return (slice(at, at + BATCH) for at in range(0, self.n, BATCH))


class Contender:
    """A store in a folder: made new by `create`, filled by `put`, asked by `get`, which returns how many bytes it got."""

    def __init__(self, rows: Rows, path: str):
        self.rows, self.path = rows, path

    def create(self) -> None:
        """Make it, empty."""
        raise NotImplementedError

    def put(self) -> None:
        """Put everything."""
        raise NotImplementedError

    def get(self) -> int:
        """Get everything; bytes of payload."""
        raise NotImplementedError

    def close(self) -> None:
        """Close it."""
        raise NotImplementedError


class OfRmqstore(Contender):
    """Messages with a key; `columns` takes tables in both directions."""

    def __init__(self, rows: Rows, path: str, columns: bool):
        super().__init__(rows, path)
        self.columns = columns

    def create(self) -> None:
        self.store = MessageStore.open(self.path, config=StoreConfig())
        rows = self.rows
        if self.columns:
            import pyarrow as pa

            self.prepared: Any = [
                pa.table(
                    {
                        "keys": pa.array([[key] for key in rows.keys[part]]),
                        "body": pa.array(rows.payloads[part], pa.binary()),
                    }
                )
                for part in rows.batches()
            ]
        else:
            self.prepared = [
                [Message(data.TOPIC, body, keys=[key]) for key, body in zip(rows.keys[part], rows.payloads[part])]
                for part in rows.batches()
            ]

    def put(self) -> None:
        for batch in self.prepared:
            if self.columns:
                self.store.put_table(batch, topic=data.TOPIC, queue_id=0)
            else:
                self.store.put_messages(batch, queue_id=0)
        self.prepared = None

    def get(self) -> int:
        asked = self.rows.asked
        if self.columns:
            import pyarrow.compute as pc

            total = 0
            for part in self.rows.batches():
                table = self.store.query_table(asked[part], topic=data.TOPIC, columns=["body"])
                total += pc.sum(pc.binary_length(table["body"])).as_py()
            return total
        return body_bytes(self.store, asked)

    def close(self) -> None:
        self.store.close()


def body_bytes(asked: Any, keys: list[str]) -> int:
    """The bytes of the bodies that `asked` finds, a call for each key."""
    total = 0
    for key in keys:
        for message in asked.query_message(data.TOPIC, key):
            total += len(message.body)
    return total


class OfLmdb(Contender):
    """`putmulti` in one transaction a batch, `getmulti` with one cursor; MDB_NOSYNC and MDB_WRITEMAP."""

    def create(self) -> None:
        import lmdb

        self.env = lmdb.open(self.path, map_size=16 << 30, sync=False, writemap=True, map_async=True)

    def put(self) -> None:
        rows = self.rows
        for part in rows.batches():
            with self.env.begin(write=True) as transaction, transaction.cursor() as cursor:
                cursor.putmulti(zip(rows.encoded[part], rows.payloads[part]))

    def get(self) -> int:
        total, asked = 0, self.rows.asked_encoded
        with self.env.begin() as transaction, transaction.cursor() as cursor:
            for part in self.rows.batches():
                for _, payload in cursor.getmulti(asked[part]):
                    total += len(payload)
        return total

    def close(self) -> None:
        self.env.close()


class OfRocksdict(Contender):
    """RocksDB with raw bytes: a WriteBatch a batch with its log on and not forced, reads of lists."""

    def create(self) -> None:
        import rocksdict

        self.rocksdict = rocksdict
        self.db = rocksdict.Rdict(self.path, rocksdict.Options(raw_mode=True))

    def put(self) -> None:
        rows = self.rows
        for part in rows.batches():
            batch = self.rocksdict.WriteBatch(raw_mode=True)
            for key, payload in zip(rows.encoded[part], rows.payloads[part]):
                batch.put(key, payload)
            self.db.write(batch)

    def get(self) -> int:
        total, asked = 0, self.rows.asked_encoded
        for part in self.rows.batches():
            for payload in self.db[asked[part]]:
                total += len(payload)
        return total

    def close(self) -> None:
        self.db.close()


class OfSqlite(Contender):
    """A table without row ids, write-ahead log, synchronous off: `executemany` in a transaction a batch, reads by IN (...)."""

    def create(self) -> None:
        os.mkdir(self.path)
        self.db = sqlite3.connect(os.path.join(self.path, "kv"), isolation_level=None)
        for statement in (
            "PRAGMA journal_mode=WAL",
            "PRAGMA synchronous=OFF",
            "PRAGMA cache_size=-262144",
            "CREATE TABLE kv (k BLOB PRIMARY KEY, v BLOB) WITHOUT ROWID",
        ):
            self.db.execute(statement)

    def put(self) -> None:
        rows = self.rows
        for part in rows.batches():
            self.db.execute("BEGIN")
            self.db.executemany("INSERT INTO kv VALUES (?, ?)", zip(rows.encoded[part], rows.payloads[part]))
            self.db.execute("COMMIT")

    def get(self) -> int:
        total, asked = 0, self.rows.asked_encoded
        for at in range(0, len(asked), _SQL_VARIABLES):
            part = asked[at : at + _SQL_VARIABLES]
            found = self.db.execute(f"SELECT k, v FROM kv WHERE k IN ({','.join('?' * len(part))})", part)
            for _, payload in found:
                total += len(payload)
        return total

    def close(self) -> None:
        self.db.close()


PEERS = {"LMDB": ("lmdb", OfLmdb), "rocksdict": ("rocksdict", OfRocksdict), "SQLite": ("sqlite3", OfSqlite)}


def works(setting: Setting) -> Iterator[Work]:
    """Puts into new stores; gets from the ones that the last round filled."""
    rows = Rows(setting.size(500_000, 20_000))
    folder = setting.folder("kv")
    there: dict[str, Contender] = {}
    skipped: dict[str, str] = {}
    ours = {
        "put_messages, query_message": (OfRmqstore(rows, os.path.join(folder, "messages"), False), ""),
        "put_table, query_table": (
            OfRmqstore(rows, os.path.join(folder, "tables"), True),
            ""
            if hasattr(MessageStore, "put_table") and hasattr(MessageStore, "query_table")
            else "this rmqstore has no put_table or query_table",
        ),
    }
    for name, (contender, why_not) in ours.items():
        if why_not:
            skipped[name] = why_not
        else:
            there[name] = contender
    for name, (module, kind) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            skipped[name] = f"{module} is not installed: pip install --group bench"
        else:
            there[name] = kind(rows, os.path.join(folder, module))
    opened: dict[str, Contender] = {}

    def put(name: str) -> Outcome:
        if name in opened:
            opened.pop(name).close()
        contender = there[name]
        remove(contender.path)
        contender.create()
        opened[name] = contender
        setting.settle()
        seconds, _ = timed(contender.put)
        return Outcome(seconds)

    def get(name: str) -> Outcome:
        seconds, total = timed(there[name].get)
        return Outcome(seconds, {"bytes": total})

    limits, why_not = in_c(setting, folder, rows)
    runs: tuple[tuple[str, Callable[[str], Outcome], float], ...] = (("put", put, 10), ("get", get, 3))
    try:
        for what, way, goal in runs:
            yield Work(
                "kv",
                f"{what}, {BATCH // 1000} 000 a batch",
                "keys",
                rows.n,
                {name: lambda name=name, way=way: way(name) for name in there} | limits[what],
                base=tuple(PEERS),
                others=list(limits[what]),
                goals={name: goal for name in ours},
                skipped=skipped | why_not,
                warm_up=setting.warm_up(1),
            )
    finally:
        for contender in opened.values():
            with contextlib.suppress(Exception):
                contender.close()
        remove(folder)


def in_c(
    setting: Setting, folder: str, rows: Rows
) -> tuple[dict[str, dict[str, Callable[[], Outcome]]], dict[str, str]]:
    """What C alone makes of the same store, for puts and for gets, and what cannot run and why."""
    source = os.path.join(folder, "source")
    store = OfRmqstore(rows, source, True)
    store.create()
    store.put()
    end = store.store.commit_log.max_offset
    store.close()
    segment, config = os.path.join(source, "commitlog", f"{0:020d}"), StoreConfig()
    (index,) = Path(source, "index").iterdir()
    asked = data.write_keys(os.path.join(folder, "asked"), rows.asked)
    limits: dict[str, dict[str, Callable[[], Outcome]]] = {"put": {}, "get": {}}
    skipped = {}

    def put() -> Outcome:
        target = os.path.join(folder, "loop")
        os.mkdir(target)
        setting.settle()
        outcome = loop_over(folder, segment, end, target, config, 20 * rows.n, "append")
        remove(target)
        return Outcome(outcome.seconds)

    def get() -> Outcome:
        slots = config.max_hash_slot_num
        nanoseconds, _, total = run_loop(folder, "query", segment, index, slots, data.TOPIC, *asked.values())
        # It adds the queue offsets, which are 0, 1, and so on.
        return Outcome(nanoseconds / 1e9, {"bytes": total - rows.n * (rows.n - 1) // 2})

    for what, loop, title, way in (
        ("put", "rebuild", "plain C loop", put),
        ("get", "query", "plain C loop, bodies alone", get),
    ):
        by, why_not = compiled(folder, loop)
        if why_not:
            skipped[f"{title}{by}"] = why_not
        else:
            limits[what][f"{title}{by}"] = way
    extension, title = messages_of(folder, source)

    def objects() -> Outcome:
        seconds, total = timed(lambda: body_bytes(extension, rows.asked))
        return Outcome(seconds, {"bytes": total})

    if extension is None:
        skipped[title] = "it cannot be compiled here"
    else:
        limits["get"][title] = objects
    return limits, skipped
