"""rmqstore info, topics and queues: the geometry and content of a store."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from typing import Any

import click

from rmqstore.cli.group import exit_not_found
from rmqstore.cli.messages import about_topic
from rmqstore.cli.options import Given, optional_topic_argument, path_argument, store_options, tiered_option
from rmqstore.cli.terminal import Printer, Progress, escape, format_size, note
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.offline.describe import StoreDescription, describe, queue_rows
from rmqstore.store.message_store import MessageStore

_DAMAGED_SHOWN = 20
# With more queues the table has a row for each topic.
_QUEUES_SHOWN = 500


@click.command()
@path_argument
@tiered_option
@click.option("--all", "every_queue", is_flag=True, help=f"List every queue, even if there are more than {_QUEUES_SHOWN}.")
@store_options
def info(path: str, every_queue: bool, given: Given) -> None:
    """Describe a store: geometry, log, queues, index, checkpoint.

    With many queues the table has a row for each topic; --json always lists every queue.
    """
    description = describe(path, given.config(path, read_only=True))
    tiered, cluster = None, ""
    if given.tiered:
        with contextlib.closing(FlatStore(given.tiered, path)) as opened:
            tiered, cluster = _tiered_object(opened, description), opened.cluster
    printer = Printer(given.as_json)
    if given.as_json:
        printer.json_line(_info_object(description) | ({} if tiered is None else {"tiered": tiered}))
        return
    _print_info(printer, description, every_queue)
    if tiered is not None:
        _print_tiered(printer, tiered, cluster)


def _tiered_object(tiered: FlatStore, description: StoreDescription) -> dict[str, Any]:
    begins = {(queue.topic, queue.queue_id): queue.min_queue_offset for queue in description.queues}
    return {
        "path": tiered.path,
        "broker": tiered.broker,
        "queues": [
            {
                "topic": queue.topic, "queue_id": queue.queue_id, "min_queue_offset": queue.min_queue_offset,
                "max_queue_offset": queue.max_queue_offset, "log_bytes": queue.log.max_offset - queue.log.min_offset,
                "log_files": len(queue.log), "unit_files": len(queue.units),
            }
            for queue in tiered.queues()
        ],
        "index_files": [
            {
                "path": index.path, "compacted": index.compacted, "begin_timestamp": index.begin_timestamp,
                "end_timestamp": index.end_timestamp, "slots": index.slot_num, "items": index.item_num,
            }
            for index in reversed(tiered.index.files)
        ],
        "notes": tiered.notes,
        "gaps": [gap.detail for gap in tiered.gaps(begins)],
        "damaged_files": [{"path": each.path, "detail": each.detail} for each in tiered.problems],
    }  # fmt: skip


def _print_tiered(printer: Printer, tiered: dict[str, Any], cluster: str) -> None:
    size = sum(queue["log_bytes"] for queue in tiered["queues"])
    printer.fields(
        [
            ("tiered storage", tiered["path"]),
            ("  broker", f"{tiered['broker']} of cluster {cluster}"),
            ("  records", f"{size} bytes ({format_size(size)})"),
            *(("  note", escape(text)) for text in tiered["notes"]),
            *(("  gap", escape(text)) for text in tiered["gaps"]),
            *(("  damaged", f"{escape(each['path'])}: {escape(each['detail'])}") for each in tiered["damaged_files"]),
        ]
    )
    printer.table(
        "queues in tiered storage",
        ("topic", "queue", "min", "max", "messages", "files"),
        [
            (
                queue["topic"], *(str(queue[name]) for name in ("queue_id", "min_queue_offset", "max_queue_offset")),
                queue["max_queue_offset"] - queue["min_queue_offset"], queue["log_files"] + queue["unit_files"],
            )
            for queue in tiered["queues"]
        ],
        left=1,
    )  # fmt: skip
    printer.table(
        "index files of tiered storage",
        ("name", "kind", "created", "newest item", "items"),
        [
            (
                os.path.basename(index["path"]), "compacted" if index["compacted"] else "unsealed",
                printer.time(index["begin_timestamp"]), printer.time(index["end_timestamp"]), index["items"],
            )
            for index in tiered["index_files"]
        ],
        left=4,
    )  # fmt: skip


def _progress_rows(description: StoreDescription) -> list[tuple[str, str, int, int, int | None]]:
    # Group, topic, queue id, offset, and lag (None if there is no such queue).
    ends = {(queue.topic, queue.queue_id): queue.max_queue_offset for queue in description.queues}
    rows: list[tuple[str, str, int, int, int | None]] = []
    for (group, topic), queues in sorted(description.consumer_offsets.items()):
        for queue_id, offset in sorted(queues.items()):
            end = ends.get((topic, queue_id))
            rows.append((group, topic, queue_id, offset, None if end is None else end - offset))
    return rows


def _info_object(description: StoreDescription) -> dict[str, Any]:
    log = description.commit_log
    return {
        "path": description.path,
        "clean": description.clean,
        "config": description.config.as_dict(),
        "assumed": list(description.config.assumed),
        "commit_log": {**dataclasses.asdict(log), "size": log.max_offset - log.min_offset},
        "topics": list(description.topics),
        "queues": [queue.as_dict() for queue in description.queues],
        "index_files": [dataclasses.asdict(index) for index in description.index_files],
        "queue_database": None
        if description.queue_database is None
        else dataclasses.asdict(description.queue_database),
        "undispatched": None if description.undispatched is None else list(description.undispatched),
        "unserved": None if description.unserved is None else list(description.unserved),
        "checkpoint": dataclasses.asdict(description.checkpoint),
        "consumer_offsets": [
            dict(zip(("group", "topic", "queue_id", "offset", "lag"), row)) for row in _progress_rows(description)
        ],
        "consumer_offsets_error": description.consumer_offsets_error,
        "layout": description.layout,
        "damaged_files": [{"path": path, "detail": detail} for path, detail in description.damaged_files],
        "unread": [part._asdict() for part in description.unread],
    }


def _print_info(printer: Printer, description: StoreDescription, every_queue: bool) -> None:
    log, config, point = description.commit_log, description.config, description.checkpoint
    size = log.max_offset - log.min_offset
    printer.fields(
        [
            ("store", description.path),
            ("state", "clean" if description.clean else "in use, or not shut down cleanly (there is an abort file)"),
            ("commit log", f"{printer.number(size)} bytes ({format_size(size)})"),
            ("  phy offsets", f"{log.min_offset} to {log.max_offset}"),
            (
                "  segments",
                f"{printer.number(log.segments)} of {printer.number(log.segment_size)} bytes "
                f"({format_size(log.segment_size)})",
            ),
            ("  first stored", printer.time(log.first_store_timestamp)),
            ("  last stored", printer.time(log.last_store_timestamp)),
            ("queue files", f"{printer.number(config.consume_queue_file_size)} bytes, "
                f"{printer.number(config.consume_queue_file_size // 20)} units"),
            (
                "index files",
                f"{printer.number(config.index_file_size)} bytes, {printer.number(config.max_hash_slot_num)} slots, "
                f"{printer.number(config.max_index_num)} entries",
            ),
            ("index of tags", "yes" if config.index_tags else "no"),
            ("store host", config.store_host),
            ("assumed", ", ".join(config.assumed) or "nothing"),
            *([("not dispatched", _undispatched_text(description))] if description.undispatched else []),
            *([("queues in RocksDB", text) for text in _queue_database_texts(description)]),
            ("kept in", "; ".join(f"{name}: {where}" for name, where in description.layout.items()) or "no files yet"),
            *_damaged_fields(description),
            *[("not read", escape(str(part))) for part in description.unread],
        ]
    )  # fmt: skip
    _print_queues(printer, description, every_queue or len(description.queues) <= _QUEUES_SHOWN)
    printer.table(
        "index files",
        ("name", "first entry", "last entry", "entries", "full", "slots used"),
        [
            (
                index.name, printer.time(index.begin_timestamp), printer.time(index.end_timestamp), index.entries,
                f"{100 * index.entries / max(index.capacity, 1):.1f} %", index.used_slots,
            )
            for index in description.index_files
        ],
        left=3,
    )  # fmt: skip
    printer.table(
        "checkpoint",
        ("field", "value"),
        [
            (name, printer.time(value) if name.endswith("timestamp") and value else str(value))
            for name, value in dataclasses.asdict(point).items()
        ],
        left=2,
    )  # fmt: skip


def _print_queues(printer: Printer, description: StoreDescription, every_queue: bool) -> None:
    if every_queue:
        printer.table(
            "queues",
            ("topic", "kind", "queue", "min", "max", "messages", "files"),
            [
                (
                    queue.topic, queue.kind, str(queue.queue_id), str(queue.min_queue_offset), str(queue.max_queue_offset),
                    queue.max_queue_offset - queue.min_queue_offset, queue.files,
                )
                for queue in description.queues
            ],
            left=2,
        )  # fmt: skip
        return
    sums: dict[str, list[int]] = {}
    for queue in description.queues:
        topic = sums.setdefault(queue.topic, [0, 0, 0])
        for place, number in enumerate((1, queue.max_queue_offset - queue.min_queue_offset, queue.files)):
            topic[place] += number
    printer.table(
        "queues, by topic",
        ("topic", "queues", "messages", "files"),
        [(topic, *numbers) for topic, numbers in sums.items()],
    )
    note(f"there are {len(description.queues)} queues; list each with --all or rmqstore queues")


def _undispatched_text(description: StoreDescription) -> str:
    assert description.undispatched is not None
    begin, end = description.undispatched
    if description.unseen_queues:
        return "unknown, because folders of queues cannot be read"
    text = f"{end - begin} bytes from phy offset {begin} are in no queue on disk"
    if description.unserved is None:
        return f"{text}; read from the log"
    return f"{text}; queues end at phy offset {description.unserved[0]}: run rmqstore rebuild --what consumequeue"


def _queue_database_texts(description: StoreDescription) -> list[str]:
    state = description.queue_database
    if state is None:
        return []
    folder = escape(os.path.relpath(state.path, description.path))
    end = "never flushed" if state.checkpoint is None else f"up to phy offset {state.checkpoint}"
    texts = [f"{folder}/: {state.queues} queues, {end}"]
    texts += [
        f"units from phy offset {begin} to {end} are missing or damaged; read from the log"
        for begin, end in state.completed
    ]
    return texts + [f"damaged: {escape(text)}" for text in state.damage]


def _damaged_fields(description: StoreDescription) -> list[tuple[str, str]]:
    damaged = description.damaged_files
    found = [("unreadable or damaged", f"{escape(path)}: {escape(detail)}") for path, detail in damaged[:_DAMAGED_SHOWN]]
    if len(damaged) > _DAMAGED_SHOWN:
        found.append(("", f"and {len(damaged) - _DAMAGED_SHOWN} more, see --json"))
    return found


bytes_option = click.option(
    "--bytes",
    "with_bytes",
    is_flag=True,
    help="Add the bytes of the records in the log; reads every unit of every queue.",
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
    help="Sort by name, or put the most messages, most bytes (implies --bytes), or newest message first.",
)
@store_options
def topics(path: str, topic: str | None, with_bytes: bool, sort: str, given: Given) -> None:
    """List the topics with their queues, messages, and first and last store times."""
    with_bytes |= sort == "bytes"
    printer = Printer(given.as_json)
    with given.open(path) as store:
        rows = _queue_objects(store, topic, with_bytes)
        advice = "" if topic is None else about_topic(store, topic)
    values = [_topic_sums(name, list(group), with_bytes) for name, group in itertools.groupby(rows, lambda row: row["topic"])]
    if not values:
        _check_seen(store)
        if topic is not None:
            exit_not_found(f"topic {topic} has no queue{advice}")
        exit_not_found("the store has no queues, and so no known topics; build them with rmqstore rebuild")
    values = _sorted(values, sort)
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
                *(printer.time(value[name]) if name in value else "" for name in _TIMES),
                value["queues"],
                value["messages"],
                *([format_size(value["size"])] if with_bytes else []),
            )
            for value in values
        ],
        left=3,
    )


def _topic_sums(topic: str, queues: list[dict[str, Any]], with_bytes: bool) -> dict[str, Any]:
    first, last = ([each[name] for each in queues if each[name] is not None] for name in _TIMES)
    return {
        "topic": topic,
        "queues": len(queues),
        "messages": sum(each["messages"] for each in queues),
        "first_store_timestamp": min(first, default=None),
        "last_store_timestamp": max(last, default=None),
    } | ({"size": sum(each["size"] for each in queues)} if with_bytes else {})


def _sorted(values: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    # The second order is by name.
    values.sort(key=lambda value: str(value["topic"]))
    if sort != "name":
        name = {"messages": "messages", "bytes": "size", "time": "last_store_timestamp"}[sort]
        values.sort(key=lambda value: -1 if value[name] is None else int(value[name]), reverse=True)
    return values


def _total(values: list[dict[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(value.get(name, 0) for value in values) for name in ("queues", "messages", "size")}
    return {"topic": f"total of {len(values)}", **sums}


@click.command()
@path_argument
@optional_topic_argument
@bytes_option
@store_options
def queues(path: str, topic: str | None, with_bytes: bool, given: Given) -> None:
    """List the queues with their offsets, messages, files, and first and last store times."""
    printer = Printer(given.as_json)
    with given.open(path) as store:
        rows = _queue_objects(store, topic, with_bytes)
        advice = "" if topic is None else about_topic(store, topic)
    if not rows:
        _check_seen(store)
        if topic is None:
            exit_not_found("the store has no queues; build them with rmqstore rebuild")
        exit_not_found(f"topic {topic} has no queue{advice}")
    if given.as_json:
        for row in rows:
            printer.json_line({"type": "queue", **row})
        return
    # Save room on a terminal.
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
    # A warning has named the unreadable parts.
    if store.queues.unseen or store.queues.unread:
        exit_not_found("no queue could be read")


def _queue_objects(store: MessageStore, topic: str | None, with_bytes: bool) -> list[dict[str, Any]]:
    with Progress("reading the queues", "queues") as progress:
        rows = list(queue_rows(store, topic, with_bytes=with_bytes, progress=progress))
    advice = "build queues with rmqstore rebuild --what consumequeue"
    if store.queues.unseen:
        note("messages of unreadable queues are not counted; export, sql and query read them")
    elif store.unserved is not None:
        note(f"messages after phy offset {store.unserved[0]} are not in a queue, and not counted; {advice}")
    elif rows and store.queue_database is None and not any(row["files"] for row in rows):
        note(f"consumequeue/ has no queue files, and the queues are computed from the log; {advice}")
    return rows
