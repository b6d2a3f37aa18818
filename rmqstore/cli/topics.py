"""rmqstore topics and queues: what a store holds of each topic and of each of its queues."""

from __future__ import annotations

from typing import Any

import click

from rmqstore.cli.group import nothing
from rmqstore.cli.messages import about_topic
from rmqstore.cli.options import Given, optional_topic_argument, path_argument, store_options
from rmqstore.cli.terminal import Printer, Progress, format_size, format_time, note
from rmqstore.offline.queue_rows import queue_rows
from rmqstore.store.message_store import MessageStore

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
    with Progress("reading the queues", "queues") as progress:
        rows = list(queue_rows(store, topic, with_bytes=with_bytes, progress=progress))
    advice = "rmqstore rebuild --what consumequeue makes queues"
    if store.unserved is not None:
        note(f"messages from phy offset {store.unserved[0]} on are in no queue, and not counted here; {advice}")
    elif rows and store.queue_database is None and not any(queue.disk_files for queue in store.queues.opened()):
        note(f"no queue of consumequeue/ has a file: the queues are shown as the log tells; {advice}")
    return rows
