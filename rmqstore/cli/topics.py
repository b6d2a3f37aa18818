"""rmqstore topics and queues: what a store holds of each topic and of each of its queues."""

from __future__ import annotations

from typing import Any

import click

from rmqstore._core import PRE_FILL_SIZE
from rmqstore.cli.group import nothing
from rmqstore.cli.messages import about_topic
from rmqstore.cli.options import Given, optional_topic_argument, path_argument, store_options
from rmqstore.cli.terminal import Printer, Progress, format_size, format_time, note
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.offline.describe import QueueDescription
from rmqstore.store.message_store import MessageStore

_UNIT_BLOCK = 1 << 16
bytes_option = click.option(
    "--bytes",
    "with_bytes",
    is_flag=True,
    help="Also the bytes of its records in the log, which every unit of every queue is read for.",
)


@click.command()
@path_argument
@bytes_option
@store_options
def topics(path: str, with_bytes: bool, given: Given) -> None:
    """List the topics: queues, messages, and the store times of the first and the last."""
    printer = Printer(given.as_json)
    with given.open(path) as store:
        rows = _queue_objects(store, None, with_bytes)
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        topic = merged.setdefault(
            row["topic"],
            {
                "topic": row["topic"],
                "queues": 0,
                "messages": 0,
                "first_store_timestamp": None,
                "last_store_timestamp": None,
            }
            | ({"size": 0} if with_bytes else {}),
        )
        topic["queues"] += 1
        topic["messages"] += row["messages"]
        if with_bytes:
            topic["size"] += row["size"]
        for name, choose in (("first_store_timestamp", min), ("last_store_timestamp", max)):
            times = [each for each in (topic[name], row[name]) if each is not None]
            topic[name] = choose(times) if times else None
    if not merged:
        nothing("the store has no queues, so that no topic is known (rebuild makes them from the commit log)")
    if given.as_json:
        for topic in merged.values():
            printer.json_line({"type": "topic", **topic})
        return
    printer.table(
        "topics",
        ("topic", "first stored", "last stored", "queues", "messages", *(["bytes"] if with_bytes else [])),
        [
            (
                topic["topic"],
                format_time(topic["first_store_timestamp"]),
                format_time(topic["last_store_timestamp"]),
                topic["queues"],
                topic["messages"],
                *([format_size(topic["size"])] if with_bytes else []),
            )
            for topic in merged.values()
        ],
        left=3,
    )


@click.command()
@path_argument
@optional_topic_argument
@bytes_option
@store_options
def queues(path: str, topic: str | None, with_bytes: bool, given: Given) -> None:
    """List the queues: queue offsets, messages, files, and the store times of the first and the last."""
    printer = Printer(given.as_json)
    with given.open(path) as store:
        rows = _queue_objects(store, topic, with_bytes)
        advice = "" if topic is None else about_topic(store, topic)
    if not rows:
        if topic is None:
            nothing("the store has no queues (rebuild makes them from the commit log)")
        nothing(f"there is no queue of topic {topic}{advice}")
    if given.as_json:
        for row in rows:
            printer.json_line({"type": "queue", **row})
        return
    printer.table(
        "queues",
        ("topic", "kind", "first stored", "last stored", "queue", "min", "max", "messages", "files")
        + (("bytes",) if with_bytes else ()),
        [
            (
                row["topic"],
                row["kind"],
                format_time(row["first_store_timestamp"]),
                format_time(row["last_store_timestamp"]),
                row["queue_id"],
                row["min_queue_offset"],
                row["max_queue_offset"],
                row["messages"],
                row["files"],
                *([format_size(row["size"])] if with_bytes else []),
            )
            for row in rows
        ],
        left=4,
    )


def _queue_objects(store: MessageStore, topic: str | None, with_bytes: bool) -> list[dict[str, Any]]:
    names = [name for name in store.queues.keys() if topic in (None, name[0])]
    rows = []
    with Progress("reading the queues", "queues") as progress:
        for number, (name, queue_id) in enumerate(names):
            progress(number, len(names))
            for _ in range(3):
                queue = store.queues.find(name, queue_id)
                if queue is None:
                    break
                try:
                    rows.append(_queue_object(store, queue, with_bytes))
                    break
                except OffsetOutOfRangeError:
                    # Retention deleted a file meanwhile; the list of files is read again.
                    store.refresh()
    advice = "rmqstore rebuild --what consumequeue makes queues"
    if store.unserved is not None:
        note(f"messages from phy offset {store.unserved[0]} on are in no queue, and not counted here; {advice}")
    elif rows and not any(queue.disk_files for queue in store.queues.opened()):
        note(f"no queue of consumequeue/ has a file: the queues are shown as the log tells; {advice}")
    return rows


def _queue_object(store: MessageStore, queue: AnyConsumeQueue, with_bytes: bool) -> dict[str, Any]:
    described = QueueDescription.of(queue, store.commit_log.min_offset)
    low, high = described.min_queue_offset, described.max_queue_offset
    first, last = queue.unit(low) if low < high else None, queue.last_record()
    value = {
        **described.as_dict(),
        "first_store_timestamp": None if first is None else _time_at(store, first.phy_offset),
        "last_store_timestamp": None if last is None else _time_at(store, last.phy_offset),
    }
    if with_bytes:
        value["size"] = _bytes(queue, low, high)
    return value


def _time_at(store: MessageStore, phy_offset: int) -> int | None:
    timestamp = store.commit_log.store_timestamp_at(phy_offset)
    return timestamp if timestamp >= 0 else None


def _bytes(queue: AnyConsumeQueue, low: int, high: int) -> int:
    """int: the sizes of the records that the units from `low` on lead to."""
    total, at = 0, low
    while at < high:
        if isinstance(queue, ConsumeQueue):
            phy_offsets, sizes, _ = queue.units(at, min(_UNIT_BLOCK, high - at))
            # Pre-fill units lead to no record: they have phy offset 0 and a size that no record has there.
            filled = (phy_offsets == 0) & (sizes == PRE_FILL_SIZE)
            total += int(sizes[~filled].sum())
            following = at + len(sizes)
        else:
            following = at
            for unit in queue.read(at, 4096):
                total += unit.size
                following = unit.queue_offset + max(unit.num, 1)
        at = following if following > at else max(queue.next_file_offset(at), at + 1)
    return total
