"""The pinned kernels: short pieces of work whose machine instructions are counted, one after the other, under callgrind.

Owns what the kernels do.  It counts and compares nothing itself: `instructions.py` starts this file under valgrind, with
the package that is to be counted first on the path, and reads what callgrind wrote.  The file runs on its own, because it
may be another commit's package that it runs with.  Every kernel is run before it counts, then with n and with 2n operations:
their difference is n operations, without what a run costs once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import rmqstore
from rmqstore import IndexFile, Message, MessageStore, StoreConfig, _core, _dispatch

TIME = 1_700_000_000_000
HANDFUL = ["topic", "queue_id", "queue_offset", "keys", "tags", "store_timestamp", "body", "corrupt"]
STORED = 4000


class Kernel(NamedTuple):
    """A piece of work: `run(n)` does it n times; `n` is a multiple of what one call of `run` can do."""

    name: str
    n: int
    run: Callable[[int], object]


def config(**options: Any) -> StoreConfig:
    """A geometry whose files are quickly made, and no timers: housekeeping would be counted too."""
    settled = {
        "mapped_file_size_commit_log": 64 << 20,
        "max_hash_slot_num": 200_000,
        "max_index_num": 400_000,
        "flush_interval_commit_log": 0,
        "flush_interval_consume_queue": 0,
        "flush_consumer_offset_interval": 0,
        "clean_resource_interval": 0,
    }
    return StoreConfig(**(settled | options))


def messages(first: int, num: int) -> list[Message]:
    """Messages of 256 bytes with a key and a tag, in records of about 340 bytes."""
    body = bytes(i * 7 % 251 for i in range(256))
    return [
        Message("Orders", body, keys=[f"ORD-{i:08d}"], tags=("created", "paid", "shipped")[i % 3])
        for i in range(first, first + num)
    ]


def each(function: Callable[..., object], arguments: list[Any]) -> Callable[[int], object]:
    """Call `function` with one argument after the other."""

    def run(n: int) -> None:
        for argument in arguments[:n]:
            function(argument)

    return run


def beyond_the_call(function: Callable[[Any], object], nothing: Any, arguments: list[Any]) -> Callable[[int], object]:
    """Call `function` so that the difference of 2n and n is its work alone: a call from Python takes more than that."""
    num = len(arguments)

    def run(n: int) -> None:
        for argument in arguments if n > num else [nothing] * num:
            function(argument)

    return run


def small() -> Iterator[Kernel]:
    """What needs no file."""
    data = bytes(i * 7 % 251 for i in range(4096))
    yield Kernel("crc32, a call", 1000, each(_core.crc32, [b""] * 2000))
    for name, parts in (("64 B", [data[i : i + 64] for i in range(1000)]), ("4 KiB", [data] * 1000)):
        yield Kernel(f"crc32 {name}", 1000, beyond_the_call(_core.crc32, b"", parts))
    yield Kernel("java_string_hash, a call", 1000, each(_core.java_string_hash, [""] * 2000))
    for length in (20, 200):
        keys = [f"{i:08d}".rjust(length, "K") for i in range(1000)]
        yield Kernel(f"java_string_hash {length}", 1000, beyond_the_call(_core.java_string_hash, "", keys))


def index_file(folder: str) -> Iterator[Kernel]:
    """Index puts and queries; every key is there once, in chains of one or two entries."""
    index = IndexFile.create(os.path.join(folder, "20260101000000000"), config())
    num = 40_000
    keys = [f"Orders#ORD-{i:08d}" for i in range(num)]
    phy_offsets = np.arange(num, dtype=np.int64) * 256
    times = TIME + np.arange(num, dtype=np.int64) // 50
    hashes = np.array([_core.java_string_hash(key) for key in keys], np.int32)
    batch = num // 2

    def emptied(put: Callable[[int], object]) -> Callable[[int], object]:
        # A hash put twice would lengthen the chains of what is counted next.
        def run(n: int) -> None:
            index.write_header(0, 0, 0, 0, 0, 0)
            put(n)

        return run

    yield Kernel("put_hashes", batch, emptied(lambda n: index.put_hashes(hashes[:n], phy_offsets[:n], times[:n])))
    yield Kernel("put_keys list", batch, emptied(lambda n: index.put_keys(keys[:n], phy_offsets[:n], times[:n])))
    yield Kernel("put_key", 2000, emptied(each(lambda key: index.put_key(key, 256, TIME), keys)))
    index.write_header(0, 0, 0, 0, 0, 0)
    index.put_keys(keys, phy_offsets, times)
    yield Kernel("select_hashes", batch, lambda n: index.select_hashes(hashes[:n]))
    yield Kernel("select_phy_offsets list", batch, lambda n: index.select_phy_offsets(keys[:n]))
    yield Kernel("select_phy_offset", 1000, each(index.select_phy_offset, keys))
    index.close()


def append(folder: str) -> Iterator[Kernel]:
    """Appends, with dispatch to queue and index."""
    import pyarrow

    with MessageStore.open(os.path.join(folder, "append"), config=config()) as store:
        many = messages(0, 2000)
        yield Kernel("put_message", 500, each(store.put_message, many))
        yield Kernel(
            "put_messages 1000", 1000, lambda n: [store.put_messages(many[i : i + 1000]) for i in range(0, n, 1000)]
        )
        table = pyarrow.table(
            {
                "body": pyarrow.array([message.body for message in many], pyarrow.binary()),
                "keys": pyarrow.array([message.keys for message in many], pyarrow.list_(pyarrow.string())),
                "tags": pyarrow.array([message.tags for message in many]),
            }
        )
        yield Kernel("put_table", 1000, lambda n: store.put_table(table.slice(0, n), topic="Orders", queue_id=0))


def filled(path: str, num: int, geometry: StoreConfig) -> None:
    """Make a store of `num` messages in four queues."""
    with MessageStore.open(path, config=geometry) as store:
        for first in range(0, num, 500):
            store.put_messages(messages(first, 500), queue_id=first // 500 % 4)


def read(folder: str) -> Iterator[Kernel]:
    """Reads; of scans and tables an operation is one message."""
    path = os.path.join(folder, "read")
    filled(path, STORED, config())
    # A reader looks for a writer's files every 5 ms, and how often that is within a count depends on the machine's load.
    # By its name, wherever the commit that is counted has it.
    for module in [module for name, module in sys.modules.items() if name.startswith("rmqstore.store.")]:
        for name in {"LOOK_INTERVAL", "_LOOK_INTERVAL"} & vars(module).keys():
            setattr(module, name, float("inf"))
    with MessageStore.open(path, config=config(), read_only=True) as store:
        log = store.commit_log
        columns = _dispatch.RecordColumns()

        def times(n: int, work: Callable[[], object]) -> None:
            for _ in range(n // STORED):
                work()

        def scan_columns() -> None:
            for _ in log.stretches(log.min_offset, log.max_offset, columns, resume=False):
                pass

        def scan(asked: list[str] | None) -> None:
            # How far threads come ahead is another number every time.
            for _ in store.scan(asked, use_threads=False):
                pass

        def decode() -> None:
            for _ in store.messages():
                pass

        read_once = list(store.messages())

        def look(n: int) -> None:
            for message in read_once[:n]:
                message.keys, message.tags, message.unique_key  # noqa: B018

        keys = [f"ORD-{i:08d}" for i in range(0, STORED, 2)]
        absent = [f"ORD-{i:08d}" for i in range(STORED, 2 * STORED, 2)]
        yield Kernel("scan to RecordColumns", STORED, lambda n: times(n, scan_columns))
        yield Kernel("scan to Arrow, a handful", STORED, lambda n: times(n, lambda: scan(HANDFUL)))
        yield Kernel("scan to Arrow, all columns", STORED, lambda n: times(n, lambda: scan(None)))
        yield Kernel("messages", STORED, lambda n: times(n, decode))
        yield Kernel("get_message 32", 50, pages(store))
        yield Kernel("get_message 32, four attributes looked at", 50, pages_looked_at(store))
        yield Kernel("keys, tags and unique_key of a message", 2000, look)
        yield Kernel("query_message", 500, asking(store, keys))
        yield Kernel("query_message, no hit", 500, asking(store, absent))
        yield Kernel("query_table", 1000, lambda n: store.query_table(keys[:n], "Orders", HANDFUL))


def pages(store: Any) -> Callable[[int], object]:
    """Get 32 messages after the other."""

    def run(n: int) -> None:
        for i in range(n):
            store.get_message("Orders", i % 4, i * 32 % 900, max_num=32)

    return run


def pages_looked_at(store: Any) -> Callable[[int], object]:
    """The same, and what most programs ask of a message."""

    def run(n: int) -> None:
        for i in range(n):
            for message in store.get_message("Orders", i % 4, i * 32 % 900, max_num=32).messages:
                message.queue_offset  # noqa: B018
                message.body  # noqa: B018
                message.keys  # noqa: B018
                message.tags  # noqa: B018

    return run


def asking(store: Any, keys: list[str]) -> Callable[[int], object]:
    """Ask for one key after the other."""

    def run(n: int) -> None:
        for key in keys[:n]:
            store.query_message("Orders", key)

    return run


def constant() -> Iterator[Kernel]:
    """What of the calls is the interpreter's: the same ones of a store in C that gives one object again and again."""
    from constant import Constant, ConstantMessage

    class Page(NamedTuple):
        messages: list[Any]

    page = Page([ConstantMessage(i, b"body", ["ORD-00000000"], "created") for i in range(32)])
    many = [None] * 1000
    yield Kernel("constant: put_message", 500, each(Constant(None).put_message, many))
    yield Kernel("constant: query_message", 500, asking(Constant([]), ["ORD-00000000"] * 1000))
    yield Kernel("constant: get_message 32", 50, pages(Constant(page)))
    yield Kernel("constant: get_message 32, four attributes", 50, pages_looked_at(Constant(page)))


def rebuild(folder: str) -> Iterator[Kernel]:
    """Queues and index from the log alone, compared with the log as always; an operation is one message."""
    paths = {num: os.path.join(folder, f"rebuild {num}") for num in (STORED, 2 * STORED)}
    # Small files: how much of the zeros behind the end is read depends on what the system has written back by then.
    geometry = config(
        mapped_file_size_commit_log=512 << 10,
        mapped_file_size_consume_queue=20_000,
        max_hash_slot_num=10_000,
        max_index_num=4 * STORED + 2,
    )
    for num, path in paths.items():
        filled(path, num, geometry)
    yield Kernel("rebuild", STORED, lambda n: rmqstore.rebuild(paths[n], config=geometry))


def rabbitmq(folder: str) -> Iterator[Kernel]:
    """RabbitMQ's queues: an operation is one small message."""
    from rmqstore.rabbitmq import Message as QueueMessage
    from rmqstore.rabbitmq import QueueIndex, _term

    made = [
        QueueMessage(
            b"%06d" % i,
            properties={"delivery_mode": 2, "headers": {"id": i}},
            routing_keys=["orders"],
            msg_id=b"%016d" % i,
        )
        for i in range(2 * STORED)
    ]
    terms = [message.term for message in made]
    index = QueueIndex.open(os.path.join(folder, "queue"), segment_entry_count=16384, create=True)

    def life(n: int) -> None:
        # Flushed each time, so that every run begins with an empty journal.
        index.ack(index.publish_many(terms[:n], deliver=True))
        index.flush()

    yield Kernel("queue: publish, deliver, ack", STORED, life)
    index.close()
    paths = {num: os.path.join(folder, f"queue {num}") for num in (STORED, 2 * STORED)}
    for num, path in paths.items():
        with QueueIndex.open(path, segment_entry_count=1000, create=True) as filled_index:
            filled_index.publish_many(terms[:num], deliver=True)
            filled_index.flush()

    def load(n: int) -> None:
        with QueueIndex.open(paths[n], segment_entry_count=1000, read_only=True) as opened:
            opened.columns()

    yield Kernel("queue: load", STORED, load)

    def read(n: int) -> None:
        for term in terms[:n]:
            message = QueueMessage.from_term(term)
            message.body, message.properties  # noqa: B018

    yield Kernel("queue: messages", STORED, read)
    data = b"".join(terms)
    sizes = np.array([len(term) for term in terms], np.int64)
    positions = np.cumsum(sizes) - sizes
    columns = ("body", "exchange", "routing_keys", "headers")
    yield Kernel(
        "queue: columns", STORED, lambda n: _term.message_columns(data, positions[:n], sizes[:n], columns=columns)
    )


def kernels(folder: str) -> Iterator[tuple[str, Callable[[], Iterator[Kernel]]]]:
    """The groups of kernels; one that cannot run does not keep the others from it."""
    yield "small", small
    yield "constant", constant
    for group in (index_file, append, read, rebuild, rabbitmq):
        yield group.__name__, lambda group=group: group(folder)


def versions() -> dict[str, str]:
    """What the counts depend on besides the source, as far as this process knows."""
    import pyarrow

    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": ".".join(np.__version__.split(".")[:2]),
        "pyarrow": pyarrow.__version__.split(".")[0],
        "machine": platform.machine(),
        "crc32": _core.crc32_implementation,
    }


def main(library: str, answer: str) -> None:
    """Run every kernel between marks, and say in `answer` which there were and how often each was done."""
    marks = ctypes.CDLL(library)
    if not marks.running_on_valgrind():
        raise SystemExit("kernels.py counts nothing by itself: run `make instructions`")
    done: dict[str, int] = {}
    missing: dict[str, str] = {}
    folder = tempfile.mkdtemp(prefix="rmqstore-instructions-")
    try:
        for group, found in kernels(folder):
            try:
                for name, n, run in found():
                    run(n)
                    run(2 * n)
                    gc.collect()
                    gc.disable()
                    marks.begin()
                    run(n)
                    marks.mark(f"{name}|{n}".encode())
                    run(2 * n)
                    marks.mark(f"{name}|{2 * n}".encode())
                    marks.end()
                    gc.enable()
                    done[name] = n
            except (AttributeError, ImportError, TypeError) as error:
                # What a package does not have yet; the comparison decides whether it may lack it.
                missing[group] = repr(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(
            {"package": rmqstore.__file__, "versions": versions(), "kernels": done, "missing": missing}, file, indent=1
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
