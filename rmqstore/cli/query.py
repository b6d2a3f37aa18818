"""rmqstore query and get: messages by key, by place and by queue."""

from __future__ import annotations

import click

from rmqstore.cli.completion import complete_queue
from rmqstore.cli.group import nothing
from rmqstore.cli.messages import about_topic, body_option, print_message
from rmqstore.cli.options import (
    Given,
    note_assumed,
    optional_topic_argument,
    path_argument,
    store_options,
    topic_argument,
)
from rmqstore.cli.terminal import TIME, Printer, escape, note
from rmqstore.errors import CorruptionError, OffsetOutOfRangeError
from rmqstore.message import MessageExt
from rmqstore.message_store import MessageStore

_INDEX_TYPES = {None: None, "key": "K", "unique": "U", "tag": "T"}


@click.command()
@path_argument
@optional_topic_argument
@click.argument("key", required=False)
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
@click.option("--id", "msg_id", help="Instead of TOPIC and KEY: an offset message id.")
@click.option("--phy-offset", "phy_offset", type=int, help="Instead of TOPIC and KEY: a phy offset.")
@body_option
@store_options
def query(
    path: str,
    topic: str | None,
    key: str | None,
    key_type: str | None,
    begin: int | None,
    end: int | None,
    max_num: int,
    compat: bool,
    msg_id: str | None,
    phy_offset: int | None,
    body: str,
    given: Given,
) -> None:
    """Find messages by key in the index, newest first, each checked against its message."""
    by_place = (msg_id is not None) + (phy_offset is not None)
    if by_place + (topic is not None) != 1 or (topic is not None and key is None):
        raise click.UsageError("give TOPIC and KEY, or --id, or --phy-offset")
    printer = Printer(given.as_json)
    with given.open(path) as store:
        if by_place:
            message = _message_at(store, msg_id, phy_offset)
            print_message(printer, message, body)
            if message.corrupt:
                nothing("the message does not agree with its CRC")
            return
        assert topic is not None and key is not None
        if key_type == "tag":
            note_assumed(store.config, ("index_tags",))
        found = store.query_message(
            topic, key, max_num, begin, end, index_type=_INDEX_TYPES[key_type], compat=compat
        )  # fmt: skip
        for message in found:
            print_message(printer, message, body)
        if not found:
            nothing(f"no message of topic {topic} has {key_type or 'key'} {key}{about_topic(store, topic)}")
        if found.truncated:
            note(f"there are more than {max_num}; give --max-num or a time range")


def _message_at(store: MessageStore, msg_id: str | None, phy_offset: int | None) -> MessageExt:
    try:
        if msg_id is not None:
            return store.message_by_id(msg_id)
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
