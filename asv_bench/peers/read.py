"""Reading a store whose pages are in memory: by queue, by key, and all of the log, beside DefaultMessageStore and
MessageDecoder.

Both sides read the same bytes: Java opens a copy of the store that we wrote.  The limit of a scan is a plain loop in C
(c/scan.c), which lays out the same columns, as copies or as views; with "pages let go" it gives back what it is past, as
a scan does.  Beside calls that give messages stand the same loop over an extension in C that only finds the records and
makes the objects (c/messages.c), and over one that does nothing; beside queries a loop in C that looks the keys up and reads
their records (c/query.c), too.  Everyone checks the body's CRC of every message, reads its body, keys,
topic and queue offset, and lets go of it before the next one, or the next table, is read.  Java's decoded messages are
what its client gets, without the network between.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rmqstore import MessageStore, StoreConfig

from . import data
from .extensions import CONSTANT, constant_of, messages_of
from .jvm import Java
from .loops import compiled, run_loop
from .rounds import Outcome, Work
from .setting import Setting, copy_sparse, remove, timed

if TYPE_CHECKING:
    import pyarrow as pa

BODY = 256
EACH = 32
_ROWS = 10_000


def works(setting: Setting) -> Iterator[Work]:
    """One store, several questions."""
    folder = setting.folder("read")
    path, copy = os.path.join(folder, "ours"), os.path.join(folder, "theirs")
    n = setting.size(1_000_000, 20_000)
    keys = data.keys(n)
    try:
        with MessageStore.open(path, config=StoreConfig()) as store:
            data.fill(store, keys, data.bodies(n, BODY), BODY)
            end = store.commit_log.max_offset
        if setting.java is not None:
            setting.java.ask("open", path=copy_sparse(path, copy))
        with MessageStore.open(path, config=StoreConfig(), read_only=True) as store:
            objects = messages_of(folder, path)
            yield get(setting, store, n, copy, objects)
            yield from query(setting, store, keys, folder, path, copy, objects)
            yield scan(setting, store, n, folder, os.path.join(path, "commitlog", f"{0:020d}"), end)
    finally:
        if setting.java is not None and os.path.isdir(copy):
            setting.java.ask("close", path=copy)
        remove(folder)


def get(setting: Setting, store: MessageStore, n: int, copy: str, objects: tuple[Any, str]) -> Work:
    """All messages of all queues, 32 a call, beside getMessage and an extension that makes the objects alone."""
    extension, limit = objects

    def all_of_them(asked: Any) -> tuple[int, int]:
        messages = total = 0
        for queue_id in range(data.QUEUES):
            at = 0
            while True:
                result = asked.get_message(data.TOPIC, queue_id, at, max_num=EACH)
                if not result.messages:
                    break
                for message in result.messages:
                    (key,) = message.keys
                    total += len(message.body) + len(key) + len(message.topic) + message.queue_offset
                messages += len(result.messages)
                at = result.next_queue_offset
        return messages, total

    def messages_of_all(asked: Any = store) -> Outcome:
        seconds, (messages, total) = timed(lambda: all_of_them(asked))
        return Outcome(seconds, {"messages": messages, "sum": total})

    def of_java(java: Java) -> Outcome:
        return java.timed("get", path=copy, topic=data.TOPIC, queues=data.QUEUES, each=EACH)

    def tables() -> Outcome:
        import pyarrow.compute as pc

        def all_of_them() -> tuple[int, int]:
            messages = total = 0
            for queue_id in range(data.QUEUES):
                at = 0
                while True:
                    table = store.get_table(data.TOPIC, queue_id, at, max_num=_ROWS)
                    if not len(table):
                        break
                    total += pc.sum(pc.binary_length(table["body"])).as_py() + pc.sum(table["queue_offset"]).as_py()
                    messages += len(table)
                    at += len(table)
            return messages, total

        seconds, (messages, total) = timed(all_of_them)
        return Outcome(seconds, {"messages": messages, "sum": total + messages * (data.KEY_WIDTH + len(data.TOPIC))})

    contenders: dict[str, Callable[[], Outcome]] = {f"get_message, {EACH} a call": messages_of_all}
    skipped = setting.without_java(f"Java getMessage {EACH} + decode")
    if extension is None:
        skipped[limit] = "it cannot be compiled here"
    else:
        contenders[limit] = lambda: messages_of_all(extension)
    if hasattr(store, "get_table"):
        contenders["get_table, 10 000 rows a call"] = tables
    else:
        skipped["get_table, 10 000 rows a call"] = "this rmqstore has no get_table"
    return Work(
        "get",
        "all of four queues",
        "messages",
        n,
        contenders | setting.of_java(f"Java getMessage {EACH} + decode", of_java),
        base=f"Java getMessage {EACH} + decode",
        others=[limit],
        goals={f"get_message, {EACH} a call": 1.5},
        skipped=skipped,
        warm_up=setting.warm_up(2),
    )


def query(
    setting: Setting, store: MessageStore, there: list[str], folder: str, path: str, copy: str, objects: tuple[Any, str]
) -> Iterator[Work]:
    """Keys in random order, one call each and in batches, beside queryMessage, an extension and a loop in C (c/query.c)."""
    extension, limit = objects
    n = setting.size(100_000, 2000)
    by, why_not = compiled(folder, "query")
    (index,) = sorted(Path(path, "index").iterdir())
    files = [Path(path, "commitlog", f"{0:020d}"), index, StoreConfig().max_hash_slot_num, data.TOPIC]
    chosen = np.random.default_rng(4).permutation(len(there))[:n]
    for kind, keys in (("there", [there[i] for i in chosen]), ("not there", data.keys(n, seed=8))):
        described = data.write_keys(os.path.join(folder, "asked"), keys)

        def one_by_one(keys: list[str] = keys, asked: Any = store) -> Outcome:
            keys = data.made_anew(keys)

            def ask() -> tuple[int, int]:
                messages = total = 0
                for key in keys:
                    for message in asked.query_message(data.TOPIC, key):
                        total += len(message.body) + message.queue_offset
                        messages += 1
                return messages, total

            seconds, (messages, total) = timed(ask)
            return Outcome(seconds, {"messages": messages, "sum": total})

        def batches(keys: list[str] = keys) -> Outcome:
            import pyarrow.compute as pc

            keys = data.made_anew(keys)

            def ask() -> tuple[int, int]:
                messages = total = 0
                for at in range(0, len(keys), _ROWS):
                    table = store.query_table(keys[at : at + _ROWS], topic=data.TOPIC)
                    total += pc.sum(pc.binary_length(table["body"])).as_py() or 0
                    total += pc.sum(table["queue_offset"]).as_py() or 0
                    messages += len(table)
                return messages, total

            seconds, (messages, total) = timed(ask)
            return Outcome(seconds, {"messages": messages, "sum": total})

        def of_java(java: Java, described: dict[str, Any] = described) -> Outcome:
            return java.timed("query", path=copy, topic=data.TOPIC, **described)

        def in_c(described: dict[str, Any] = described) -> Outcome:
            nanoseconds, messages, total = run_loop(folder, "query", *files, *described.values())
            return Outcome(nanoseconds / 1e9, {"messages": messages, "sum": total})

        does_nothing = constant_of(folder, [])

        def of_constant(one_by_one: Callable[..., Outcome] = one_by_one, does_nothing: Any = does_nothing) -> Outcome:
            return Outcome(one_by_one(asked=does_nothing).seconds)

        def of_objects(one_by_one: Callable[..., Outcome] = one_by_one) -> Outcome:
            return one_by_one(asked=extension)

        contenders: dict[str, Callable[[], Outcome]] = {"query_message, one call": one_by_one, CONSTANT: of_constant}
        skipped = setting.without_java("Java queryMessage + decode")
        if extension is None:
            skipped[limit] = "it cannot be compiled here"
        else:
            contenders[limit] = of_objects
        if hasattr(store, "query_table"):
            contenders["query_table, 10 000 keys a call"] = batches
        else:
            skipped["query_table, 10 000 keys a call"] = "this rmqstore has no query_table"
        loop = f"plain C loop, bodies alone{by}"
        if why_not:
            skipped[loop] = why_not
        else:
            contenders[loop] = in_c
        yield Work(
            "query",
            f"keys {kind}",
            "keys",
            n,
            contenders | setting.of_java("Java queryMessage + decode", of_java),
            base="Java queryMessage + decode",
            others=[CONSTANT, limit, loop],
            # A key that is not there takes no verifying and no decoding, which the higher goals are about.
            goals={"query_message, one call": 2, "query_table, 10 000 keys a call": 8}
            if kind == "there"
            else {"query_message, one call": 1},
            skipped=skipped,
            warm_up=setting.warm_up(2),
        )


def body_lengths(bodies: pa.Array) -> int:
    """The sum of the lengths of bodies, bytes."""
    import pyarrow.compute as pc

    # pyarrow 26 has no `binary_length` of views; the length stands in the first 4 bytes of each.
    if bodies.type == "binary":
        return pc.sum(pc.binary_length(bodies)).as_py()
    views = np.frombuffer(bodies.buffers()[1], np.int32).reshape(-1, 4)
    return int(views[bodies.offset : bodies.offset + len(bodies), 0].sum())


def scan(setting: Setting, store: MessageStore, n: int, folder: str, segment: str, end: int) -> Work:
    """Every record of the log with its CRC, decoded."""

    def objects() -> Outcome:
        def all_of_them() -> tuple[int, int]:
            messages = total = 0
            for message in store.messages():
                total += len(message.body) + message.queue_offset
                messages += 1
            return messages, total

        seconds, (messages, total) = timed(all_of_them)
        return Outcome(seconds, {"messages": messages, "sum": total})

    def columns(chosen: list[str] | None, use_threads: bool, views: bool) -> Outcome:
        import pyarrow.compute as pc

        # A release without them does not know the words.
        how = {"use_threads": use_threads} if has_threads else {}
        if views:
            how["views"] = True

        def all_of_them() -> tuple[int, int]:
            messages = total = 0
            for batch in store.scan(columns=chosen, **how):
                messages += len(batch)
                total += pc.sum(batch.column("queue_offset")).as_py()
                if "body" in batch.schema.names:
                    total += body_lengths(batch.column("body"))
            return messages, total

        seconds, (messages, total) = timed(all_of_them)
        answer = {"messages": messages}
        if chosen is None or "body" in chosen:
            answer["sum"] = total
        return Outcome(seconds, answer)

    def of_java(java: Java) -> Outcome:
        return java.timed("scan", segment=segment, end=end)

    def in_c(chosen: str) -> Outcome:
        nanoseconds, messages, total = run_loop(folder, "scan", segment, end, *chosen.split())
        return Outcome(nanoseconds / 1e9, {"messages": messages, "sum": total})

    # A CRC is computed where it shows: in the column that tells of damage.
    handful = ["queue_id", "queue_offset", "keys", "store_timestamp", "corrupt"]
    contenders: dict[str, Callable[[], Outcome]] = {"messages(), objects": objects}
    skipped = setting.without_java("Java decode with CRC")
    names = {
        "scan(), all columns": (None, False),
        "scan(), 5 columns without body": (handful, False),
        "scan(), these and body": ([*handful, "body"], False),
        "scan(views=True), all columns": (None, True),
        "scan(views=True), these and body": ([*handful, "body"], True),
    }
    known = inspect.signature(store.scan).parameters if hasattr(store, "scan") else {}
    has_threads = "use_threads" in known
    with_threads = {name: f"{name}, two threads" for name in names}
    for name, (chosen, views) in names.items():
        if views and "views" not in known:
            skipped |= dict.fromkeys([name, with_threads[name]], "this rmqstore has no views")
            continue
        if known:
            contenders[name] = lambda chosen=chosen, views=views: columns(chosen, False, views)
        else:
            skipped[name] = "this rmqstore has no scan"
        if has_threads:
            contenders[with_threads[name]] = lambda chosen=chosen, views=views: columns(chosen, True, views)
        else:
            skipped[with_threads[name]] = "this rmqstore scans on one thread"
    by, why_not = compiled(folder, "scan")
    loops = {}
    for name, chosen in {
        "no columns": "walk",
        "all columns": "all",
        "5 columns": "handful",
        "these and body": "body",
    }.items():
        loops[f"plain C loop, {name}{by}"] = lambda chosen=chosen: in_c(chosen)
    # What the same loop makes of two threads, and of views while it gives back the pages that it is past.
    for name, chosen in {
        "no columns, two threads": "walk two",
        "no columns, pages let go, two threads": "walk release two",
        "views, all columns": "all views release",
        "views, all columns, two threads": "all views release two",
        "views, these and body": "body views release",
        "views, these and body, two threads": "body views release two",
    }.items():
        loops[f"C loop, {name}"] = lambda chosen=chosen: in_c(chosen)
    if why_not:
        skipped |= dict.fromkeys(loops, why_not)
    else:
        contenders |= loops
    return Work(
        "scan",
        "all of the log, CRC checked",
        "messages",
        n,
        contenders | setting.of_java("Java decode with CRC", of_java),
        base="Java decode with CRC",
        others=list(loops),
        goals={
            name: 10 if name.startswith("scan(views=True), these and body") else 8
            for name in [*names, *with_threads.values()]
        },
        skipped=skipped,
        warm_up=setting.warm_up(2),
    )
