"""Queues and index from the log alone, beside RocketMQ's recovery and beside the limit, a plain loop in C (c/rebuild.c).

Every round works on a copy whose log is in the page cache.  Ours is `rebuild`, which verifies what it built before it swaps it
in, and `MessageStore.open` of a store that lost both folders and its checkpoint; both force what they wrote to the disk.
Java's is `load` of such a store in a process whose code is compiled by then; it leaves the writing to the system.  The
loop in C writes the same units and entries into new files, once without and once with forcing them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import rmqstore
from rmqstore import IndexFile, MessageStore, StoreConfig

from . import data
from .jvm import Java
from .loops import compiled, run_loop
from .rounds import Outcome, Work
from .setting import Setting, copy_sparse, remove, timed

BODY = 256


def works(setting: Setting) -> Iterator[Work]:
    """Beside Java; beside the loop."""
    folder = setting.folder("rebuild")
    n = setting.size(1_000_000, 20_000)
    config = StoreConfig()
    source, copy = os.path.join(folder, "source"), os.path.join(folder, "copy")
    try:
        with MessageStore.open(source, config=config) as store:
            data.fill(store, data.keys(n), data.bodies(n, BODY), BODY)
            end = store.commit_log.max_offset

        def entries(path: str) -> int:
            index = os.path.join(path, "index")
            found = 0
            for name in os.listdir(index):
                with IndexFile.open(os.path.join(index, name), config, read_only=True) as file:
                    found += file.index_count - 1
            return found

        def fresh(lost: bool) -> str:
            copy_sparse(source, copy)
            if lost:
                for name in ("consumequeue", "index"):
                    shutil.rmtree(os.path.join(copy, name))
                os.unlink(os.path.join(copy, "checkpoint"))
                with open(os.path.join(copy, "abort"), "w", encoding="ascii"):
                    pass
            setting.settle()
            return copy

        def rebuild() -> Outcome:
            path = fresh(lost=False)
            seconds, _ = timed(lambda: rmqstore.rebuild(path, config=config))
            return Outcome(seconds, {"entries": entries(path)})

        def open_lost() -> Outcome:
            path = fresh(lost=True)
            seconds, store = timed(lambda: MessageStore.open(path, config=config))
            units = sum(store.max_queue_offset(topic, queue_id) for topic, queue_id in store.queues.keys())
            answer = {"end": store.commit_log.max_offset, "units": units}
            store.close()
            return Outcome(seconds, {**answer, "entries": entries(path)})

        def load_lost(java: Java) -> Outcome:
            path = fresh(lost=True)
            outcome = java.timed("open", path=path)
            java.ask("close", path=path)
            return Outcome(outcome.seconds, {**outcome.answer, "entries": entries(path)})

        ours = {"MessageStore.open, all lost": open_lost, "rebuild, verified": rebuild}
        yield Work(
            "rebuild",
            "queues and index from the log",
            "messages",
            n,
            ours | setting.of_java("Java load, all lost", load_lost),
            base="Java load, all lost",
            goals={name: 8 for name in ours},
            skipped=setting.without_java("Java load, all lost"),
            warm_up=setting.warm_up(3),
        )
        by, why_not = compiled(folder, "rebuild")
        plain, forced = f"plain C loop{by}", f"plain C loop, forced to disk{by}"

        def loop(*force: str) -> Outcome:
            # The copy brings the log into the state in which the others find it.
            path = fresh(lost=True)
            target = os.path.join(folder, "loop")
            os.mkdir(target)
            outcome = loop_over(
                folder, os.path.join(path, "commitlog", f"{0:020d}"), end, target, config, 20 * n, *force
            )
            remove(target)
            return outcome

        contenders: dict[str, Callable[[], Outcome]] = dict(ours)
        if not why_not:
            contenders |= {plain: loop, forced: lambda: loop("force")}
        yield Work(
            "rebuild",
            "the same, beside the limit",
            "messages",
            n,
            contenders,
            base=plain,
            others=[forced],
            goals={name: 0.7 for name in ours},
            skipped={plain: why_not} if why_not else {},
            warm_up=setting.warm_up(1),
        )
    finally:
        remove(folder)


def loop_over(
    folder: str, segment: str, end: int, target: str, config: StoreConfig, queue_bytes: int, *force: str
) -> Outcome:
    """Run the loop that was compiled into `folder` over a segment; it writes into `target`, which is empty."""
    numbers = config.max_hash_slot_num, config.max_index_num, queue_bytes
    nanoseconds, units, entries = run_loop(folder, "rebuild", segment, end, target, *numbers, *force)
    return Outcome(nanoseconds / 1e9, {"units": units, "entries": entries})
