"""rmqstore topics and queues: what a store holds of each topic and of each of its queues.

Owns the two tables; the counts are the queues' own.  It reads only, and every unit of a queue only where --bytes asks
for it.
"""

from __future__ import annotations

from typing import Any

import click

from rmqstore.cli.group import nothing
from rmqstore.cli.messages import about_topic
from rmqstore.cli.options import Given, optional_topic_argument, path_argument, store_options
from rmqstore.cli.terminal import Printer, Progress, format_size, note
from rmqstore.offline.describe import queue_rows
from rmqstore.store.message_store import MessageStore

bytes_option = click.option(
    "--bytes",
    "with_bytes",
    is_flag=True,
    help="Also the bytes of its records in the log, which every unit of every queue is read for.",
)


_SORTS = ("name", "messages", "bytes", "time")
_TIMES = ("first_store_timestamp", "last_store_timestamp")


@click.command()
@path_argument
@optional_topic_argument
@bytes_option
@click.option(
    "--sort",
    type=click.Choice(_SORTS),
    default="name",
    show_default=True,
    help="Which come first: most messages, most bytes (which adds --bytes), or newest last message.",
)
@store_options
def topics(path: str, topic: str | None, with_bytes: bool, sort: str, given: Given) -> None:
    """List the topics: queues, messages, and the store times of the first and the last."""
    with_bytes |= sort == "bytes"
    printer = Printer(given.as_json)
    with given.open(path) as store:
        rows = _queue_objects(store, topic, with_bytes)
        advice = "" if topic is None else about_topic(store, topic)
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        value = merged.setdefault(
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
        value["queues"] += 1
        value["messages"] += row["messages"]
        if with_bytes:
            value["size"] += row["size"]
        for name, choose in zip(_TIMES, (min, max), strict=True):
            times = [each for each in (value[name], row[name]) if each is not None]
            value[name] = choose(times) if times else None
    if not merged:
        _check_seen(store)
        if topic is not None:
            nothing(f"topic {topic} has no queue here{advice}")
        nothing("the store has no queues, so that no topic is known (rebuild makes them from the commit log)")
    values = _sorted(list(merged.values()), sort)
    if given.as_json:
        for value in values:
            printer.json_line({"type": "topic", **value})
        return
    if len(values) > 1:
        values.append(_total(values))
    printer.table(
        "topics",
        ("topic", "first stored", "last stored", "queues", "messages", *(["bytes"] if with_bytes else [])),
        [
            (
                value["topic"],
                # The total has none.
                *(printer.time(value[name]) if name in value else "" for name in _TIMES),
                value["queues"],
                value["messages"],
                *([format_size(value["size"])] if with_bytes else []),
            )
            for value in values
        ],
        left=3,
    )


def _sorted(values: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """list of dict: the topics in the order of `sort`; those that are equal in it by name."""
    values.sort(key=lambda value: str(value["topic"]))
    if sort != "name":
        name = {"messages": "messages", "bytes": "size", "time": "last_store_timestamp"}[sort]
        values.sort(key=lambda value: -1 if value[name] is None else int(value[name]), reverse=True)
    return values


def _total(values: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {"topic": f"total of {len(values)}"}
    for name in ("queues", "messages", "size"):
        total[name] = sum(value.get(name, 0) for value in values)
    return total


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
        _check_seen(store)
        if topic is None:
            nothing("the store has no queues (rebuild makes them from the commit log)")
        nothing(f"there is no queue of topic {topic}{advice}")
    if given.as_json:
        for row in rows:
            printer.json_line({"type": "queue", **row})
        return
    # A terminal has room for what differs.
    with_kind = not printer.terminal or {row["kind"] for row in rows} != {"SimpleCQ"}
    printer.table(
        "queues",
        ("topic", *(["kind"] if with_kind else []), "first stored", "last stored", "queue", "min", "max", "messages", "files")
        + (("bytes",) if with_bytes else ()),
        [
            (
                row["topic"],
                *([row["kind"]] if with_kind else []),
                printer.time(row["first_store_timestamp"], "minutes"),
                printer.time(row["last_store_timestamp"], "minutes"),
                str(row["queue_id"]),
                str(row["min_queue_offset"]),
                str(row["max_queue_offset"]),
                row["messages"],
                row["files"],
                *([format_size(row["size"])] if with_bytes else []),
            )
            for row in rows
        ],
        left=3 + with_kind,
    )


def _check_seen(store: MessageStore) -> None:
    # What could not be looked at was named; nobody knows that it is not there.
    if store.queues.unseen or store.queues.unread:
        nothing("no queue could be read")


def _queue_objects(store: MessageStore, topic: str | None, with_bytes: bool) -> list[dict[str, Any]]:
    with Progress("reading the queues", "queues") as progress:
        rows = list(queue_rows(store, topic, with_bytes=with_bytes, progress=progress))
    advice = "rmqstore rebuild --what consumequeue makes queues"
    if store.queues.unseen:
        note("messages whose queues cannot be looked into are not counted here; export, sql and query read them")
    elif store.unserved is not None:
        note(f"messages from phy offset {store.unserved[0]} on are in no queue, and not counted here; {advice}")
    elif rows and store.queue_database is None and not any(queue.disk_files for queue in store.queues.opened()):
        note(f"no queue of consumequeue/ has a file: the queues are shown as the log tells; {advice}")
    return rows
