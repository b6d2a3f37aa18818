"""rmqstore query and get: messages by key, id, phy offset and queue.  A note on stderr reports an incomplete answer."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import os
import shlex
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

import click

from rmqstore.arguments import DEFAULT_LOG_BYTES
from rmqstore.cli.errors import error_text
from rmqstore.cli.group import FOUND_NOTHING, exit_not_found
from rmqstore.cli.messages import MessageForm, about_queues, about_topic, form_options, print_message, uncovered_text
from rmqstore.cli.options import (
    Given,
    begin_option,
    end_option,
    gathered,
    note_assumed,
    optional_topic_argument,
    path_argument,
    selecting,
    store_options,
    tags_option,
    tiered_option,
    topic_argument,
)
from rmqstore.cli.terminal import BEGIN_HELP, TIME, Progress, escape, note
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.consumer.settings_sources import settings_sources, take_settings
from rmqstore.errors import ChecksumError, CorruptionError, InvalidMessageError, OffsetOutOfRangeError, StoreError
from rmqstore.flatfile.flat_files import METADATA_FILE
from rmqstore.message import MessageExt
from rmqstore.selection import Selection
from rmqstore.spans import without
from rmqstore.store.message_store import MessageStore
from rmqstore.store.querying import LogSearch
from rmqstore.store.results import GetMessageResult, QueryResult

_KEY_TYPES = {"key": "K", "unique": "U", "tag": "T"}
_KEY_TYPE_NAMES = {None: "key", "K": "key", "U": "unique", "T": "tag"}
# The most units without a message that are looked for.
_UNREADABLE = 1000


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Keys, a message id, or a phy offset."""

    more_keys: tuple[str, ...]
    keys: tuple[str, ...]
    keys_from: BinaryIO | None
    msg_id: str | None
    phy_offset: int | None
    compat: bool
    max_log_bytes: int

    @property
    def by_place(self) -> bool:
        return self.msg_id is not None or self.phy_offset is not None

    @property
    def several(self) -> bool:
        return len(self.more_keys) + len(self.keys) > 1 or self.keys_from is not None

    def check(self, topic: str | None) -> None:
        """Raise UsageError unless there are keys, an id, or a phy offset."""
        by_key = bool(self.more_keys or self.keys) or self.keys_from is not None
        if topic is not None and not by_key and not self.by_place:
            raise click.UsageError(
                f"KEY is missing: give a KEY of topic {escape(topic)}, or --key {escape(topic)} if that is the key"
            )
        number = (self.msg_id is not None) + (self.phy_offset is not None) + by_key
        if number != 1 or (topic is not None and self.phy_offset is not None):
            raise click.UsageError("give TOPIC and KEY, or --key, or --id (with or without TOPIC), or --phy-offset")
        if topic is None and self.compat:
            raise click.UsageError("--compat requires TOPIC")

    def texts(self) -> Iterator[str | None]:
        """Yield the keys; a line that is not UTF-8 is reported on stderr, and is None."""
        yield from (*self.more_keys, *self.keys)
        for number, line in enumerate(self.keys_from or (), 1):
            try:
                # Windows editors begin a file with a byte order mark.
                key = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                assert self.keys_from is not None
                note(f"{self.keys_from.name}, line {number}: not UTF-8 text; skipped")
                yield None
                continue
            if key:
                yield key


@click.command()
@path_argument
@optional_topic_argument
@click.argument("more_keys", metavar="[KEY]...", nargs=-1)
@click.option("--key", "keys", multiple=True, help="Find this key, in all topics unless TOPIC is given; repeatable.")
@click.option("--keys-from", type=click.File("rb"), help="Read keys from this file, one a line; - is stdin.")
@click.option(
    "--type",
    "index_type",
    type=click.Choice(list(_KEY_TYPES)),
    callback=lambda ctx, param, value: None if value is None else _KEY_TYPES[value],
    help="Type of KEY; by default a key or unique key.",
)
@begin_option
@end_option
@click.option("--max-num", type=click.IntRange(min=1), default=64, show_default=True, help="Maximum number of messages.")
@click.option("--compat", is_flag=True, help="Return what RocketMQ's queryMessage returns, including its quirks.")
@click.option(
    "--max-log-bytes",
    type=click.IntRange(min=0),
    default=DEFAULT_LOG_BYTES,
    show_default=True,
    help="Maximum number of bytes to search in the part of the log that is not indexed.",
)
@click.option("--id", "msg_id", help="Find this offset message id or unique key, instead of KEY.")
@click.option("--phy-offset", "phy_offset", type=int, help="Show the message at this phy offset, instead of TOPIC and KEY.")
@form_options
@tiered_option
@store_options
@gathered(_Asked, "asked")
@selecting("topic", "index_type", "begin", "end", "max_num")
def query(path: str, asked: _Asked, selection: Selection, form: MessageForm, given: Given) -> None:
    """Find messages by key, id or phy offset, newest first.

    Several keys are looked up one after the other. The part of the log that is not indexed is searched too. Without
    TOPIC, all topics are searched.
    """
    topic, max_num = None if selection.topics is None else selection.topic, selection.max_num or 0
    asked.check(topic)
    printer = form.printer(given.as_json)
    with given.open(path) as store:
        if asked.by_place:
            message = _message_at(store, asked, topic)
            print_message(printer, message, form)
            if message.corrupt:
                exit_not_found(f"the message is CORRUPT ({message.damage}); {_next_step(path)}")
            return
        if selection.index_type == "T":
            note_assumed(store.config, ("index_tags",))
        absent, corrupt = 0, 0
        uncovered: tuple[tuple[int, int], ...] = ()
        every = _topics_to_ask(store) if topic is None else []
        with Progress("searching the log", "bytes") as progress:
            for key in asked.texts():
                if key is None:
                    absent += 1
                    continue
                if topic is None:
                    question = dataclasses.replace(selection, keys=(key,))
                    found = _in_all_topics(store, question, LogSearch(asked.max_log_bytes, progress), every)
                else:
                    found = store.query_message(
                        topic, key, max_num, selection.begin, selection.end, index_type=selection.index_type,
                        compat=asked.compat, max_log_bytes=asked.max_log_bytes, progress=progress,
                    )  # fmt: skip
                uncovered = found.uncovered
                for message in found:
                    print_message(printer, message, form)
                    corrupt += message.corrupt
                if not found:
                    absent += 1
                    about = "" if topic is None else about_topic(store, topic)
                    where = " in the part of the log that was searched" if uncovered else about
                    what = "any topic" if topic is None else f"topic {topic}"
                    note(f"no message of {what} has {_KEY_TYPE_NAMES[selection.index_type]} {key}{where}")
                if found.truncated:
                    of_key = f" with {key}" if asked.several else ""
                    note(f"there are more than {max_num}{of_key}; give --max-num or a time range")
        if store.older.one_log and os.path.exists(os.path.join(path, METADATA_FILE)):
            note("older messages of this store are in tiered storage, which was not searched: give --tiered DIR")
        if uncovered and given.as_json:
            printer.json_line({"complete": False, "uncovered": [list(stretch) for stretch in uncovered]})
        # Missing parts are reported below.
        uncovered = tuple(part for each in uncovered for part in without(*each, store.lost_log))
        if uncovered:
            exit_not_found(uncovered_text(store, uncovered, "give --max-log-bytes, or rmqstore rebuild --what index"))
        damage = () if store.index_service is None else store.index_service.log_damage
        damage = tuple(sorted({*damage, *store.lost_log}))
        if damage:
            size, places = sum(end - begin for begin, end in damage), _places_text([begin for begin, _ in damage])
            note(
                f"{size} bytes of the log at phy offset {places} cannot be read and may contain more messages; "
                f"{_next_step(path)}"
            )
        if corrupt:
            note(f"{_corrupt_text(corrupt)}; {_next_step(path)}")
        if absent or corrupt or damage:
            click.get_current_context().exit(FOUND_NOTHING)


def _topics_to_ask(store: MessageStore) -> list[str]:
    # Topics that have a queue, and those that the broker's settings name.
    names = set(store.topics())
    with contextlib.suppress(StoreError, OSError):
        topics = take_settings(settings_sources(store.path, "topics", quiet=True))
        names.update(topics.tables.get("topicConfigTable", {}))
    return sorted(names)


def _in_all_topics(store: MessageStore, selection: Selection, look: LogSearch, topics: list[str]) -> QueryResult:
    # The index holds a hash of topic and key together, so it is asked once for each topic.
    max_num = selection.max_num or 0
    if store.index_service is None or (store.queues.unseen and store.older.one_log):
        return _in_log(store, selection, look)
    found = [
        store.query_message(
            name, selection.key, max_num, selection.begin, selection.end, *look, index_type=selection.index_type
        )
        for name in topics
    ]

    def newest_first(message: MessageExt) -> tuple[int, int]:
        # With tiered storage each queue has phy offsets of its own.
        return (0 if store.older.one_log else -message.store_timestamp, -message.phy_offset)

    messages = list(itertools.islice(heapq.merge(*found, key=newest_first), max_num + 1))
    truncated = len(messages) > max_num or any(hits.truncated for hits in found)
    return QueryResult(messages[:max_num], truncated, found[-1].uncovered if found else ())


def _in_log(store: MessageStore, selection: Selection, look: LogSearch) -> QueryResult:
    log, max_num, (max_log_bytes, progress) = store.commit_log, selection.max_num or 0, look
    low, high = log.min_offset, log.max_offset
    # Whole segments, the newest ones: a record is known to begin where a segment does.
    first = next((base for base in log.files.offsets if max_log_bytes is None or base >= high - max_log_bytes), high)
    first = min(max(first, low), high)
    found: deque[MessageExt] = deque(maxlen=max_num + 1)
    for number, message in enumerate(store.messages(first) if first < high else ()):
        if progress is not None and number % 4096 == 0:
            progress(message.phy_offset - first, max(high - first, 1))
        if selection.has(message):
            found.append(message)
    messages = list(found)[::-1]
    uncovered = ((low, first),) if first > low else ()
    return QueryResult(messages[:max_num], len(messages) > max_num, uncovered)


def _next_step(path: str) -> str:
    return f"next: rmqstore verify {shlex.quote(path)}"


def _corrupt_text(number: int) -> str:
    return "1 message is CORRUPT" if number == 1 else f"{number} messages are CORRUPT"


def _places_text(places: list[int]) -> str:
    rest = f" and {len(places) - 5} more" if len(places) > 5 else ""
    return ", ".join(map(str, places[:5])) + rest


def _message_at(store: MessageStore, asked: _Asked, topic: str | None) -> MessageExt:
    msg_id, phy_offset = asked.msg_id, asked.phy_offset
    try:
        if msg_id is not None:
            return store.message_by_id(msg_id.strip(), topic)
        assert phy_offset is not None
        return store.message_at(phy_offset)
    except ChecksumError:
        # Show it as corrupt.
        if msg_id is not None:
            phy_offset = store.phy_offset_by_id(msg_id.strip(), topic)
        assert phy_offset is not None
        message = store.commit_log.look_up(phy_offset)
        if message is None:
            raise
        return message
    except (InvalidMessageError, OffsetOutOfRangeError, CorruptionError) as error:
        exit_not_found(error_text(error))


@click.command()
@path_argument
@topic_argument
@click.argument("queue_id", metavar="QUEUE", type=click.IntRange(min=0))
@click.option(
    "--begin-queue-offset", "begin_queue_offset", type=int, help="First queue offset; by default the first in the queue."
)
@click.option("--begin", "--time", "begin", type=TIME, help=BEGIN_HELP)
@end_option
@click.option("--max-num", type=click.IntRange(min=1), default=32, show_default=True, help="Maximum number of messages.")
@tags_option
@form_options
@tiered_option
@store_options
@selecting("topic", "queue_id", "begin_queue_offset", "begin", "end", "max_num", "tags")
def get(path: str, selection: Selection, form: MessageForm, given: Given) -> None:
    """Read the messages of a queue in order."""
    topic, queue_id, queue_offset = selection.topic, selection.queue_id, selection.begin_queue_offset
    begin, end, max_num = selection.begin, selection.end, selection.max_num or 0
    if queue_offset is not None and begin is not None:
        raise click.UsageError("give --begin-queue-offset or --begin, not both")
    printer = form.printer(given.as_json)
    with given.open(path) as store:
        if begin is not None:
            queue_offset = store.offset_by_time(topic, queue_id, begin)
        elif queue_offset is None:
            queue_offset = store.min_queue_offset(topic, queue_id)
        first = queue_offset
        # Times are not monotonic if a broker's clock went back, so each message is compared as well.
        stop = None if end is None else store.offset_by_time(topic, queue_id, end, "upper") + 1
        in_time = Selection(begin=begin, end=end)
        shown = corrupt = 0
        unreadable: list[Unit] = []
        while True:
            # A get ends with its queue file, and may skip all messages because of their tags.
            result = store.get_message(topic, queue_id, queue_offset, max_num - shown, selection.tags)
            messages = [each for each in result.messages if in_time.has(each)]
            for message in messages:
                print_message(printer, message, form)
                corrupt += message.corrupt
            shown += len(messages)
            skipped = len(result.messages) < result.next_queue_offset - queue_offset
            if len(unreadable) <= _UNREADABLE and (skipped or any(each.corrupt for each in result.messages)):
                reached = result.next_queue_offset if stop is None else min(result.next_queue_offset, stop)
                unreadable += _unreadable(store, selection, queue_offset, reached)
            high = result.max_queue_offset if stop is None else min(stop, result.max_queue_offset)
            if shown >= max_num or not queue_offset < result.next_queue_offset < high:
                break
            queue_offset = result.next_queue_offset
        if store.unserved is not None and not store.queues.unseen:
            note(
                f"messages after phy offset {store.unserved[0]} are not in a queue; run rmqstore rebuild --what consumequeue"
            )
        if unreadable:
            rest = " or more" if len(unreadable) > _UNREADABLE else ""
            units = "unit of {} points" if len(unreadable) == 1 else "units of {} point"
            note(
                f"{len(unreadable)}{rest} {units.format(f'{topic}/{queue_id}')} to missing or damaged messages: queue offset "
                f"{_places_text([unit.queue_offset for unit in unreadable])} (phy offset "
                f"{_places_text([unit.phy_offset for unit in unreadable])}); {_next_step(path)}"
            )
        if corrupt:
            note(f"{_corrupt_text(corrupt)}; {_next_step(path)}")
        if not shown and not unreadable:
            if queue_id not in store.queue_ids(topic):
                exit_not_found(f"no such queue {topic}/{queue_id}{about_queues(store, topic, [queue_id])}")
            exit_not_found(_nothing_text(selection, first, stop, result))
        following = result.next_queue_offset
        if begin is not None:
            # Without a begin the last message before `high` is one of them.
            following = _next_in_time(store, selection, following, high)
        if following < high:
            note(f"there are more messages; continue with --begin-queue-offset {following}")
        if corrupt or unreadable:
            click.get_current_context().exit(FOUND_NOTHING)


def _next_in_time(store: MessageStore, selection: Selection, at: int, high: int) -> int:
    """Return the queue offset of the next message in this time range, at or after `at`, whatever its tags; or `high`."""
    in_time = Selection(begin=selection.begin, end=selection.end)
    while at < high:
        result = store.get_message(selection.topic, selection.queue_id, at)
        for message in result.messages:
            if in_time.has(message):
                return message.queue_offset
        at = result.next_queue_offset if result.next_queue_offset > at else high
    return high


def _unreadable(store: MessageStore, selection: Selection, begin: int, end: int) -> Iterator[Unit]:
    """Yield the units from `begin` to `end` whose record is missing in the log, which a get skips silently."""
    queue = store.queues.find(selection.topic, selection.queue_id)
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


def _nothing_text(selection: Selection, first: int, stop: int | None, result: GetMessageResult) -> str:
    queue, tags = f"{selection.topic}/{selection.queue_id}", " || ".join(selection.tags or ())
    low, high = result.min_queue_offset, result.max_queue_offset
    if low >= high:
        return f"queue {queue} is empty; the next message gets queue offset {high}"
    if stop is not None and (stop <= first or not tags):
        return f"no message of queue {queue} was stored in this time range; it has queue offsets {low} to {high - 1}"
    if first < high and tags:
        return f"no message of queue {queue} at or after queue offset {first} has tags {tags}"
    return f"queue {queue} has no queue offset {first}, only {low} to {high - 1}"
