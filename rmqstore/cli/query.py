"""rmqstore query and get: messages by key, by place and by queue."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TextIO

import click

from rmqstore.arguments import IndexType
from rmqstore.cli.completion import complete_queue
from rmqstore.cli.group import FOUND_NOTHING, nothing
from rmqstore.cli.messages import about_topic, body_option, print_message, uncovered_text
from rmqstore.cli.options import (
    Given,
    note_assumed,
    optional_topic_argument,
    path_argument,
    store_options,
    tiered_option,
    topic_argument,
)
from rmqstore.cli.terminal import TIME, Printer, Progress, escape, note
from rmqstore.errors import CorruptionError, OffsetOutOfRangeError
from rmqstore.flatfile.metadata import METADATA_FILE
from rmqstore.index.log_index import DEFAULT_LOG_BYTES
from rmqstore.message import MessageExt
from rmqstore.store.message_store import MessageStore

_INDEX_TYPES: dict[str | None, IndexType | None] = {None: None, "key": "K", "unique": "U", "tag": "T"}


@click.command()
@path_argument
@optional_topic_argument
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--keys-from", type=click.File(encoding="utf-8"), help="More keys, one a line of this file; - is stdin.")
@click.option(
    "--type",
    "key_type",
    type=click.Choice(["key", "unique", "tag"]),
    help="What KEY is; by default a key or unique key.",
)
@click.option("--begin", type=TIME, help="Stored at or after: ISO time, ms since epoch, or '2h ago'.")
@click.option("--end", type=TIME, help="Stored at or before.")
@click.option("--max-num", type=click.IntRange(min=1), default=64, show_default=True, help="At most so many.")
@click.option("--compat", is_flag=True, help="Answer as RocketMQ's queryMessage does, quirks included.")
@click.option(
    "--max-log-bytes",
    type=click.IntRange(min=0),
    default=DEFAULT_LOG_BYTES,
    show_default=True,
    help="Search at most so many bytes of the log that the index does not cover.",
)
@click.option("--id", "msg_id", help="Instead of KEY: an offset message id, or a producer's id, of TOPIC or any.")
@click.option("--phy-offset", "phy_offset", type=int, help="Instead of TOPIC and KEY: a phy offset.")
@body_option
@tiered_option
@store_options
def query(
    path: str,
    topic: str | None,
    keys: tuple[str, ...],
    keys_from: TextIO | None,
    key_type: str | None,
    begin: int | None,
    end: int | None,
    max_num: int,
    compat: bool,
    max_log_bytes: int,
    msg_id: str | None,
    phy_offset: int | None,
    body: str,
    given: Given,
) -> None:
    """Find messages by key in the index, newest first, each checked against its message.

    Of several keys each is asked for in turn.  What the index does not cover is searched in the log.
    """
    by_place = (msg_id is not None) + (phy_offset is not None)
    by_key = bool(keys) or keys_from is not None
    if by_place + by_key != 1 or (topic is None and by_key) or (topic is not None and phy_offset is not None):
        raise click.UsageError("give TOPIC and KEY, or --id (and maybe TOPIC), or --phy-offset")
    printer = Printer(given.as_json)
    with given.open(path) as store:
        if by_place:
            message = _message_at(store, msg_id, phy_offset, topic)
            print_message(printer, message, body)
            if message.corrupt:
                nothing("the message does not agree with its CRC")
            return
        assert topic is not None
        if key_type == "tag":
            note_assumed(store.config, ("index_tags",))
        absent, several = 0, len(keys) > 1 or keys_from is not None
        uncovered: tuple[tuple[int, int], ...] = ()
        with Progress("searching the log", "bytes") as progress:
            for key in (*keys, *(_lines(keys_from) if keys_from is not None else ())):
                found = store.query_message(
                    topic, key, max_num, begin, end, index_type=_INDEX_TYPES[key_type], compat=compat,
                    max_log_bytes=max_log_bytes, progress=progress,
                )  # fmt: skip
                for message in found:
                    print_message(printer, message, body)
                uncovered = found.uncovered
                if not found:
                    absent += 1
                    where = " in what was searched" if uncovered else about_topic(store, topic)
                    note(f"no message of topic {topic} has {key_type or 'key'} {key}{where}")
                if found.truncated:
                    note(f"there are more than {max_num}{f' of {key}' if several else ''}; give --max-num or a time range")
        if given.tiered is None and os.path.exists(os.path.join(path, METADATA_FILE)):
            note("older messages of this store are in tiered storage, which was not searched: give --tiered DIR")
        if uncovered:
            if given.as_json:
                printer.json_line({"complete": False, "uncovered": [list(stretch) for stretch in uncovered]})
            nothing(uncovered_text(store, uncovered, "give --max-log-bytes, or rmqstore rebuild --what index"))
        if absent:
            click.get_current_context().exit(FOUND_NOTHING)


def _lines(file: TextIO) -> Iterator[str]:
    for line in file:
        key = line.rstrip("\r\n")
        if key:
            yield key


def _message_at(store: MessageStore, msg_id: str | None, phy_offset: int | None, topic: str | None) -> MessageExt:
    try:
        if msg_id is not None:
            phy_offset = store.phy_offset_by_id(msg_id, topic)
        assert phy_offset is not None
        message = store.commit_log.look_up(phy_offset)
        # A corrupt message is shown and said to be so; where there is none the error tells why.
        return store.message_at(phy_offset) if message is None else message
    except (OffsetOutOfRangeError, CorruptionError) as error:
        nothing(str(error))
    except ValueError as error:
        raise click.BadParameter(escape(str(error)), param_hint="--id") from None


@click.command()
@path_argument
@topic_argument
@click.argument("queue_id", metavar="QUEUE", type=click.IntRange(min=0), shell_complete=complete_queue)
@click.option(
    "--begin-queue-offset", "queue_offset", type=int, help="Queue offset to begin with; by default the first there is."
)
@click.option("--time", "timestamp", type=TIME, help="Begin with the first message stored at or after this time.")
@click.option("--max-num", type=click.IntRange(min=1), default=32, show_default=True, help="At most so many.")
@click.option("--tags", help="Only these tags: 'a || b'.")
@body_option
@tiered_option
@store_options
def get(
    path: str,
    topic: str,
    queue_id: int,
    queue_offset: int | None,
    timestamp: int | None,
    max_num: int,
    tags: str | None,
    body: str,
    given: Given,
) -> None:
    """Read messages of a queue in order."""
    if queue_offset is not None and timestamp is not None:
        raise click.UsageError("give --begin-queue-offset or --time, not both")
    printer = Printer(given.as_json)
    with given.open(path) as store:
        if timestamp is not None:
            queue_offset = store.offset_by_time(topic, queue_id, timestamp)
        elif queue_offset is None:
            queue_offset = store.min_queue_offset(topic, queue_id)
        left = max_num
        while True:
            # A get ends with its queue file, and one with tags may pass over all that it examines.
            result = store.get_message(topic, queue_id, queue_offset, left, tags)
            for message in result.messages:
                print_message(printer, message, body)
            left -= len(result.messages)
            if left <= 0 or not queue_offset < result.next_queue_offset < result.max_queue_offset:
                break
            queue_offset = result.next_queue_offset
        if store.unserved is not None:
            note(f"messages from phy offset {store.unserved[0]} on are in no queue; rmqstore rebuild --what consumequeue")
        if left == max_num:
            known = store.queue_ids(topic)
            if queue_id not in known:
                nothing(
                    f"there is no queue {topic}/{queue_id}"
                    + (f"; the topic has: {', '.join(map(str, known[:20]))}" if known else about_topic(store, topic))
                )
            nothing(
                f"{result.status.name}: nothing at queue offset {queue_offset} of {topic}/{queue_id}, which holds "
                f"{result.min_queue_offset} to {result.max_queue_offset}"
            )
        if result.next_queue_offset < result.max_queue_offset:
            note(f"there are more: go on with --begin-queue-offset {result.next_queue_offset}")
