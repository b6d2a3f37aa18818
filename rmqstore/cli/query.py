"""rmqstore query and get: messages by key, by place and by queue.

Owns what KEY, a message id and a time on the command line mean.  It reads only.  Invariant: an answer that was cut by
--max-num, or that no index file covers, says so on stderr.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
from collections.abc import Iterator
from typing import BinaryIO

import click

from rmqstore.arguments import IndexType
from rmqstore.cli.completion import complete_queue
from rmqstore.cli.formats import LineFormat, format_option
from rmqstore.cli.group import FOUND_NOTHING, error_text, nothing
from rmqstore.cli.messages import (
    about_queues,
    about_topic,
    body_option,
    check_format,
    print_message,
    uncovered_text,
)
from rmqstore.cli.options import (
    Given,
    note_assumed,
    optional_topic_argument,
    path_argument,
    store_options,
    tiered_option,
    topic_argument,
)
from rmqstore.cli.terminal import BEGIN_HELP, END_HELP, END_TIME, TIME, Printer, Progress, escape, note
from rmqstore.cli.words import in_words
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import ChecksumError, CorruptionError, InvalidMessageError, OffsetOutOfRangeError
from rmqstore.flatfile.metadata import METADATA_FILE
from rmqstore.index.log_index import DEFAULT_LOG_BYTES
from rmqstore.message import MessageExt
from rmqstore.offline.key_search import find_in_all_topics, topics_to_ask
from rmqstore.selection import Selection
from rmqstore.spans import without
from rmqstore.store.message_store import MessageStore
from rmqstore.store.querying import LogLook
from rmqstore.store.results import GetMessageResult

# So many units that lead to no message are looked for at most.
_UNREADABLE = 1000
_INDEX_TYPES: dict[str | None, IndexType | None] = {None: None, "key": "K", "unique": "U", "tag": "T"}


@click.command()
@path_argument
@optional_topic_argument
@click.argument("more_keys", metavar="[KEY]...", nargs=-1)
@click.option("--key", "keys", multiple=True, help="A key, of all topics where TOPIC is not given; repeatable.")
@click.option("--keys-from", type=click.File("rb"), help="More keys, one a line of this file; - is stdin.")
@click.option(
    "--type",
    "key_type",
    type=click.Choice(["key", "unique", "tag"]),
    help="What KEY is; by default a key or unique key.",
)
@click.option("--begin", type=TIME, help=BEGIN_HELP)
@click.option("--end", type=END_TIME, help=END_HELP)
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
@format_option
@body_option
@tiered_option
@store_options
def query(
    path: str,
    topic: str | None,
    more_keys: tuple[str, ...],
    keys: tuple[str, ...],
    keys_from: BinaryIO | None,
    key_type: str | None,
    begin: int | None,
    end: int | None,
    max_num: int,
    compat: bool,
    max_log_bytes: int,
    msg_id: str | None,
    phy_offset: int | None,
    line_format: LineFormat | None,
    body: str,
    given: Given,
) -> None:
    """Find messages by key in the index, newest first, each checked against its message.

    Of several keys each is asked for in turn.  What the index does not cover is searched in the log.  Without TOPIC
    every topic is asked.
    """
    keys = (*more_keys, *keys)
    by_place = (msg_id is not None) + (phy_offset is not None)
    by_key = bool(keys) or keys_from is not None
    if topic is not None and not by_key and not by_place:
        raise click.UsageError(
            f"give a KEY of topic {escape(topic)}, or --key {escape(topic)} if that is a key and its topic is not known"
        )
    if by_place + by_key != 1 or (topic is not None and phy_offset is not None):
        raise click.UsageError("give TOPIC and KEY, or --key alone, or --id (and maybe TOPIC), or --phy-offset")
    if topic is None and compat:
        raise click.UsageError("--compat needs TOPIC: RocketMQ asks for one")
    check_format(given.as_json, line_format)
    printer = Printer(given.as_json)
    with given.open(path) as store:
        if by_place:
            message = _message_at(store, msg_id, phy_offset, topic)
            print_message(printer, message, body, line_format)
            if message.corrupt:
                nothing(f"the message is CORRUPT ({in_words(str(message.damage))}); {_next_step(path)}")
            return
        if key_type == "tag":
            note_assumed(store.config, ("index_tags",))
        absent, corrupt, several = 0, 0, len(keys) > 1 or keys_from is not None
        uncovered: tuple[tuple[int, int], ...] = ()
        every = topics_to_ask(store) if topic is None else []
        with Progress("searching the log", "bytes") as progress:
            for key in itertools.chain(keys, _lines(keys_from) if keys_from is not None else ()):
                if isinstance(key, _NoKey):
                    absent += 1
                    note(f"{key.place}: this is no UTF-8 text, and was not asked for")
                    continue
                if topic is None:
                    asked = Selection(
                        keys=(key,), begin=begin, end=end, index_type=_INDEX_TYPES[key_type], max_num=max_num
                    )
                    everywhere = find_in_all_topics(store, asked, LogLook(max_log_bytes, progress), every)
                    messages, truncated, uncovered = everywhere.messages, everywhere.truncated, everywhere.uncovered
                    what = f"no message of {_topics_text(everywhere.topics)}"
                else:
                    found = store.query_message(
                        topic, key, max_num, begin, end, index_type=_INDEX_TYPES[key_type], compat=compat,
                        max_log_bytes=max_log_bytes, progress=progress,
                    )  # fmt: skip
                    messages, truncated, uncovered = found, found.truncated, found.uncovered
                    what = f"no message of topic {topic}"
                for message in messages:
                    print_message(printer, message, body, line_format)
                    corrupt += message.corrupt
                if not messages:
                    absent += 1
                    about = "" if topic is None else about_topic(store, topic)
                    where = " in what was searched" if uncovered else about
                    note(f"{what} has {key_type or 'key'} {key}{where}")
                if truncated:
                    of_key = f" of {key}" if several else ""
                    note(f"there are more than {max_num}{of_key}; give --max-num or a time range")
        if given.tiered is None and os.path.exists(os.path.join(path, METADATA_FILE)):
            note("older messages of this store are in tiered storage, which was not searched: give --tiered DIR")
        if uncovered and given.as_json:
            printer.json_line({"complete": False, "uncovered": [list(stretch) for stretch in uncovered]})
        # Lost parts are named below.
        uncovered = tuple(part for each in uncovered for part in without(*each, store.lost_log))
        if uncovered:
            nothing(uncovered_text(store, uncovered, "give --max-log-bytes, or rmqstore rebuild --what index"))
        damage = () if store.index_service is None else store.index_service.log_damage
        damage = tuple(sorted({*damage, *store.lost_log}))
        if damage:
            size, places = sum(end - begin for begin, end in damage), _places_text([begin for begin, _ in damage])
            note(
                f"{size} bytes of the log at phy offset {places} cannot be read, and may hold more; {_next_step(path)}"
            )
        if corrupt:
            note(f"{_corrupt_text(corrupt)}; {_next_step(path)}")
        if absent or corrupt or damage:
            click.get_current_context().exit(FOUND_NOTHING)


def _next_step(path: str) -> str:
    return f"next: rmqstore verify {shlex.quote(path)}"


def _corrupt_text(number: int) -> str:
    return "1 message is CORRUPT" if number == 1 else f"{number} messages are CORRUPT"


def _places_text(places: list[int]) -> str:
    rest = f" and {len(places) - 5} more" if len(places) > 5 else ""
    return ", ".join(map(str, places[:5])) + rest


def _topics_text(topics: int | None) -> str:
    if topics is None:
        return "any topic"
    return "the only topic" if topics == 1 else f"the {topics} topics"


@dataclasses.dataclass
class _NoKey:
    """A line that is no text: where it is."""

    place: str


def _lines(file: BinaryIO) -> Iterator[str | _NoKey]:
    for number, line in enumerate(file, 1):
        try:
            # Editors of Windows begin a file with a mark.
            key = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            yield _NoKey(f"{file.name}, line {number}")
            continue
        if key:
            yield key


def _message_at(store: MessageStore, msg_id: str | None, phy_offset: int | None, topic: str | None) -> MessageExt:
    try:
        if msg_id is not None:
            return store.message_by_id(msg_id.strip(), topic)
        assert phy_offset is not None
        return store.message_at(phy_offset)
    except ChecksumError:
        # It is shown, and said to be corrupt.
        if msg_id is not None:
            phy_offset = store.phy_offset_by_id(msg_id.strip(), topic)
        assert phy_offset is not None
        message = store.commit_log.look_up(phy_offset)
        if message is None:
            raise
        return message
    except (InvalidMessageError, OffsetOutOfRangeError, CorruptionError) as error:
        nothing(error_text(error))


@click.command()
@path_argument
@topic_argument
@click.argument("queue_id", metavar="QUEUE", type=click.IntRange(min=0), shell_complete=complete_queue)
@click.option(
    "--begin-queue-offset", "queue_offset", type=int, help="Queue offset to begin with; by default the first there is."
)
@click.option("--begin", "--time", "begin", type=TIME, help=BEGIN_HELP)
@click.option("--end", type=END_TIME, help=END_HELP)
@click.option("--max-num", type=click.IntRange(min=1), default=32, show_default=True, help="At most so many.")
@click.option("--tags", help="Only these tags: 'a || b'.")
@format_option
@body_option
@tiered_option
@store_options
def get(
    path: str,
    topic: str,
    queue_id: int,
    queue_offset: int | None,
    begin: int | None,
    end: int | None,
    max_num: int,
    tags: str | None,
    line_format: LineFormat | None,
    body: str,
    given: Given,
) -> None:
    """Read messages of a queue in order."""
    if queue_offset is not None and begin is not None:
        raise click.UsageError("give --begin-queue-offset or --begin, not both")
    check_format(given.as_json, line_format)
    printer = Printer(given.as_json)
    with given.open(path) as store:
        if begin is not None:
            queue_offset = store.offset_by_time(topic, queue_id, begin)
        elif queue_offset is None:
            queue_offset = store.min_queue_offset(topic, queue_id)
        first = queue_offset
        # Times fall where the clock of a broker went back: between these places each message is compared as well.
        stop = None if end is None else store.offset_by_time(topic, queue_id, end, "upper") + 1
        in_time = Selection(begin=begin, end=end)
        shown = corrupt = 0
        unreadable: list[Unit] = []
        while True:
            # A get ends with its queue file, and one with tags may pass over all that it examines.
            result = store.get_message(topic, queue_id, queue_offset, max_num - shown, tags)
            messages = [each for each in result.messages if in_time.has(each)]
            for message in messages:
                print_message(printer, message, body, line_format)
                corrupt += message.corrupt
            shown += len(messages)
            passed_over = len(result.messages) < result.next_queue_offset - queue_offset
            # Where each place had a sound message, none of them is to be looked at again.
            if len(unreadable) <= _UNREADABLE and (passed_over or any(each.corrupt for each in result.messages)):
                reached = result.next_queue_offset if stop is None else min(result.next_queue_offset, stop)
                unreadable += _unreadable(store, topic, queue_id, queue_offset, reached, tags)
            high = result.max_queue_offset if stop is None else min(stop, result.max_queue_offset)
            if shown >= max_num or not queue_offset < result.next_queue_offset < high:
                break
            queue_offset = result.next_queue_offset
        if store.unserved is not None and not store.queues.unseen:
            note(
                f"messages from phy offset {store.unserved[0]} on are in no queue; rmqstore rebuild --what consumequeue"
            )
        if unreadable:
            rest = " or more" if len(unreadable) > _UNREADABLE else ""
            lead = "queue offset of {} leads" if len(unreadable) == 1 else "queue offsets of {} lead"
            note(
                f"{len(unreadable)}{rest} {lead.format(f'{topic}/{queue_id}')} to no whole message: queue offset "
                f"{_places_text([unit.queue_offset for unit in unreadable])} (phy offset "
                f"{_places_text([unit.phy_offset for unit in unreadable])}); {_next_step(path)}"
            )
        if corrupt:
            note(f"{_corrupt_text(corrupt)}; {_next_step(path)}")
        if not shown and not unreadable:
            if queue_id not in store.queue_ids(topic):
                nothing(f"there is no queue {topic}/{queue_id}{about_queues(store, topic, [queue_id])}")
            nothing(_nothing_text(f"{topic}/{queue_id}", first, stop, tags, result))
        following = result.next_queue_offset
        if begin is not None:
            # Without a begin the last message before `high` is one of them.
            following = _next_in_time(store, topic, queue_id, following, high, in_time)
        if following < high:
            note(f"there are more: go on with --begin-queue-offset {following}")
        if corrupt or unreadable:
            click.get_current_context().exit(FOUND_NOTHING)


def _next_in_time(
    store: MessageStore, topic: str, queue_id: int, at: int, high: int, in_time: Selection
) -> int:
    """Return the queue offset of the next message stored in this time, at or after `at`, whatever its tags; `high` for none."""
    while at < high:
        result = store.get_message(topic, queue_id, at)
        for message in result.messages:
            if in_time.has(message):
                return message.queue_offset
        at = result.next_queue_offset if result.next_queue_offset > at else high
    return high


def _unreadable(
    store: MessageStore, topic: str, queue_id: int, begin: int, end: int, tags: str | None
) -> Iterator[Unit]:
    """Units from `begin` to `end` whose record the log should have and has not, which a get passes over without a word."""
    queue = store.queues.find(topic, queue_id)
    selection = Selection(tags=tags)
    log = store.commit_log
    at = begin
    while queue is not None and at < end:
        following = at
        for unit in queue.read(at, end - at):
            following = unit.queue_offset + max(unit.num, 1)
            if unit.queue_offset >= end:
                break
            if (
                selection.may_have_code(queue.tags_code(unit))
                and unit.phy_offset >= log.min_offset
                and log.look_up(unit.phy_offset, unit.size) is None
            ):
                yield unit
        at = following if following > at else max(queue.next_file_offset(at), at + 1)


def _nothing_text(queue: str, first: int, stop: int | None, tags: str | None, result: GetMessageResult) -> str:
    """str: why there is nothing, with what the queue holds."""
    low, high = result.min_queue_offset, result.max_queue_offset
    if low >= high:
        return f"queue {queue} is empty; the next message gets queue offset {high}"
    if stop is not None and (stop <= first or not tags):
        return f"no message of queue {queue} was stored in this time; it holds the queue offsets {low} to {high - 1}"
    if first < high and tags:
        return f"no message of queue {queue} from queue offset {first} on has tags {tags}"
    return f"nothing at queue offset {first} of {queue}, which holds {low} to {high - 1}"
