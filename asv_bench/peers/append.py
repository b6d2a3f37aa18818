"""Appending with dispatch to queue and index done, beside DefaultMessageStore.putMessage, both from one thread with ASYNC_FLUSH.

Java dispatches on a thread of its own, so its time counts until dispatch has caught up with the log.  Every message has a key
and a tag, four queues take runs of 1000.  "Fresh" is a store that was just made, so that every page of log, queues and index
is touched for the first time; "second gigabyte" one into which a gigabyte of log was put before: the next segment was
prepared, the slots of the index were touched.  Messages are made before the clock starts, on both sides.

The limit is a plain loop in C (c/rebuild.c): records that stand in memory, copied into a new segment with the CRC of each
body taken, and their units and index entries written, into new files that it makes; in the second gigabyte after it wrote
a first one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from rmqstore import MessageStore, StoreConfig

from . import data
from .jvm import Java
from .loops import compiled
from .rebuild import loop_over
from .rounds import Outcome, Work
from .setting import Setting, remove, timed

BATCH = "put_messages, 1000 a call"
TABLE = "put_table, 10 000 rows a call"
SINGLE = "put_message"
GOALS = {BATCH: 4, TABLE: 4, SINGLE: 1}
_ROWS = 10_000


class Appends:
    """What is appended in a round, and the ways to do it."""

    def __init__(self, setting: Setting, folder: str, n: int, size: int):
        self.setting, self.n, self.size = setting, n, size
        self.keys = data.keys(n)
        self.blob = data.bodies(n, size)
        bodies = os.path.join(folder, f"bodies-{size}")
        with open(bodies, "wb") as file:
            file.write(self.blob)
        self.described: dict[str, Any] = {
            **data.write_keys(os.path.join(folder, f"keys-{size}"), self.keys),
            "bodies": bodies,
            "size": size,
            "topic": data.TOPIC,
            "run": data.RUN,
            "queues": data.QUEUES,
        }
        self.skipped = setting.without_java("Java putMessage")
        self.ways: dict[str, Callable[[MessageStore], Callable[[], None]]] = {
            BATCH: self._batches,
            SINGLE: self._singles,
        }
        if hasattr(MessageStore, "put_table"):
            self.ways[TABLE] = self._tables
        else:
            self.skipped[TABLE] = "this rmqstore has no put_table"

    def _batches(self, store: MessageStore) -> Callable[[], None]:
        messages = data.messages(self.keys, self.blob, self.size)

        def put() -> None:
            for at in range(0, self.n, data.RUN):
                store.put_messages(messages[at : at + data.RUN], queue_id=at // data.RUN % data.QUEUES)

        return put

    def _singles(self, store: MessageStore) -> Callable[[], None]:
        messages = data.messages(self.keys, self.blob, self.size)
        queue_ids = data.queue_ids(self.n).tolist()

        def put() -> None:
            put_message = store.put_message
            for message, queue_id in zip(messages, queue_ids):
                put_message(message, queue_id)

        return put

    def _tables(self, store: MessageStore) -> Callable[[], None]:
        table = data.table(self.keys, self.blob, self.size)

        def put() -> None:
            for at in range(0, self.n, _ROWS):
                store.put_table(table.slice(at, _ROWS), topic=data.TOPIC)

        return put

    def into(self, store: MessageStore, way: str) -> Outcome:
        """Put everything in one of our ways."""
        before = store.commit_log.max_offset
        put = self.ways[way](store)
        self.setting.settle()
        seconds, _ = timed(put)
        return Outcome(seconds, {"bytes": store.commit_log.max_offset - before})

    def into_java(self, java: Java, path: str) -> Outcome:
        """Let Java put everything."""
        self.setting.settle()
        return java.timed("put", path=path, **self.described)


def works(setting: Setting) -> Iterator[Work]:
    """Two sizes of bodies; fresh stores and, in full runs, such as hold a gigabyte already."""
    folder = setting.folder("append")
    try:
        for size, full in ((256, 200_000), (1024, 100_000)):
            appends = Appends(setting, folder, setting.size(full, 4000), size)
            yield from into_fresh_stores(setting, folder, appends)
            if not setting.quick:
                yield from into_full_stores(setting, folder, appends)
    finally:
        remove(folder)


def into_fresh_stores(setting: Setting, folder: str, appends: Appends) -> Iterator[Work]:
    """A new store for everyone in every round."""

    def of_ours(way: str) -> Outcome:
        path = os.path.join(folder, "ours")
        with MessageStore.open(path, config=StoreConfig()) as store:
            outcome = appends.into(store, way)
        remove(path)
        return outcome

    def of_java(java: Java) -> Outcome:
        path = os.path.join(folder, "theirs")
        os.mkdir(path)
        java.ask("open", path=path)
        outcome = appends.into_java(java, path)
        java.ask("close", path=path)
        remove(path)
        return outcome

    contenders = {way: lambda way=way: of_ours(way) for way in appends.ways}
    contenders |= setting.of_java("Java putMessage", of_java)
    loop, why_not = in_c(setting, folder, appends, "append")
    yield Work(
        "append",
        f"{appends.size} B, fresh store",
        "messages",
        appends.n,
        contenders | loop,
        base="Java putMessage",
        others=list(loop),
        goals=GOALS,
        skipped=appends.skipped | why_not,
        warm_up=setting.warm_up(2),
    )


def in_c(
    setting: Setting, folder: str, appends: Appends, how: str
) -> tuple[dict[str, Callable[[], Outcome]], dict[str, str]]:
    """The loop in C over a segment that holds what is appended, by its name; or its name and why it cannot run."""
    by, why_not = compiled(folder, "rebuild")
    name = f"plain C loop{by}"
    if why_not:
        return {}, {name: why_not}
    source, target = os.path.join(folder, f"records-{appends.size}"), os.path.join(folder, "loop")
    config = StoreConfig()
    if not os.path.isdir(source):
        with MessageStore.open(source, config=config) as store:
            data.fill(store, appends.keys, appends.blob, appends.size)
    with MessageStore.open(source, config=config, read_only=True) as store:
        end = store.commit_log.max_offset

    def append() -> Outcome:
        os.mkdir(target)
        setting.settle()
        segment = os.path.join(source, "commitlog", f"{0:020d}")
        outcome = loop_over(folder, segment, end, target, config, 20 * appends.n, how)
        remove(target)
        return Outcome(outcome.seconds, {"bytes": end})

    return {name: append}, {}


def into_full_stores(setting: Setting, folder: str, appends: Appends) -> Iterator[Work]:
    """One store of ours and one of Java's that go on growing."""
    paths = os.path.join(folder, "ours"), os.path.join(folder, "theirs")
    enough = 1 << 30
    store = MessageStore.open(paths[0], config=StoreConfig())
    try:
        while store.commit_log.max_offset < enough:
            data.fill(store, appends.keys, appends.blob, appends.size)
        if setting.java is not None:
            os.mkdir(paths[1])
            setting.java.ask("open", path=paths[1])
            done = 0
            while done < enough:
                done += setting.java.ask("put", path=paths[1], **appends.described)["bytes"]
        # The blank that closes a segment is among the bytes of whoever comes to its end, so that they cannot be compared here.
        contenders: dict[str, Callable[[], Outcome]] = {
            way: lambda way=way: Outcome(appends.into(store, way).seconds, {}) for way in appends.ways
        }
        loop, why_not = in_c(setting, folder, appends, "append-more")
        contenders |= {name: lambda append=append: Outcome(append().seconds) for name, append in loop.items()}
        yield Work(
            "append",
            f"{appends.size} B, second gigabyte",
            "messages",
            appends.n,
            contenders
            | setting.of_java("Java putMessage", lambda java: Outcome(appends.into_java(java, paths[1]).seconds, {})),
            base="Java putMessage",
            others=list(loop),
            goals=GOALS,
            skipped=appends.skipped | why_not,
            warm_up=0,
        )
    finally:
        store.close()
        if setting.java is not None and os.path.isdir(paths[1]):
            setting.java.ask("close", path=paths[1])
        for path in paths:
            remove(path)
