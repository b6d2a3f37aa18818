"""Put messages: one, or many rows.

A message is **plain** if the core takes it whole (`RowBatch`): exactly a `Message` (no subclass), with a topic, keys, tags and
properties that need no rule beyond their lengths and characters, no transaction, no inner batch, no further queues, no delay
level, and a queue that is known.  One plain message is put by one call of the core (`Appender`).  Rows of plain messages and of
tables are checked by the core, every other message by `LongWay`, which has the errors; `Writing._append` writes and dispatches
all of them.  Invariants:

- A message is dispatched to its queue and the index before the put returns, so what was put can be read at once.
- Files are made before anything is written, so that a full disk is an error that changes nothing.
- After a failed write the store refuses writes; also after one that was interrupted (Ctrl-C) once a byte may be written.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._dispatch import RecordColumns
from rmqstore._rows import Appender, FileEnd, RowBatch
from rmqstore.arguments import plain_text
from rmqstore.config import system_clock
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.errors import DiskFullError, InvalidMessageError
from rmqstore.message import (
    MAX_PROPERTIES_SIZE,
    MAX_RETRY_TOPIC_LENGTH,
    MAX_TOPIC_LENGTH,
    RETRY_PREFIX,
    Message,
    MessageExt,
    SysFlag,
    encode_java_utf8,
    host_to_bytes,
    is_queued,
    properties_to_bytes,
)
from rmqstore.store.dispatch_rules import multi_dispatch_allowed
from rmqstore.store.dispatcher import CommitLogDispatcher
from rmqstore.store.flushing import Flushing
from rmqstore.store.results import PutResult, PutResults
from rmqstore.store.store_state import StoreState

__all__ = ["NEW_QUEUE", "V6_BITS", "LongWay", "Prepared", "Writing", "next_offset"]


@dataclass(slots=True)
class Prepared:
    """A validated message and the parts of its row that do not depend on its place."""

    message: Message
    queue_id: int
    topic: bytes
    body: bytes
    properties: dict[str, str]
    store_host: bytes
    born_host: bytes
    version: int
    inner_num: int = 1
    dispatch_names: list[str] = field(default_factory=list)


class LongWay:
    """The steps that put a message that is not plain; callers of `place` hold the append lock."""

    def __init__(self, state: StoreState):
        self.config = state.config
        self.queues = state.queues
        self.hosts: dict[str, bytes] = {}
        self._unique_key_counter = random.randrange(0x10000)

    def checked_batch(self, messages: list[Message | MessageExt]) -> list[Message]:
        """Return the messages to put, or raise InvalidMessageError where they cannot be one classic batch."""
        batch = [_to_put(given) for given in messages]
        if len({message.topic for message in batch}) > 1:
            raise InvalidMessageError("the messages of a batch must be of one topic; use put_messages")
        for message in batch:
            for is_refused, what in (
                (message.delay_level > 0, "a delayed message"),
                (message.topic.startswith(RETRY_PREFIX), "a message of a retry topic"),
                (message.sys_flag & SysFlag.TRANSACTION_MASK.value, "a transactional message"),
                (message.sys_flag & SysFlag.INNER_BATCH.value, "an inner batch"),
            ):
                if is_refused:
                    raise InvalidMessageError(f"{what} cannot be part of a batch; use put_messages")
        return batch

    def prepare(self, given: Message | MessageExt, queue_id: int) -> Prepared:
        """Check a message and take it apart."""
        message = _to_put(given)
        if not isinstance(queue_id, (int, np.integer)) or not 0 <= queue_id <= 2**31 - 1:
            raise InvalidMessageError(f"queue_id is {queue_id!r}; give an int from 0 to 2**31 - 1")
        if len(message.body) > self.config.max_message_size:
            raise InvalidMessageError(
                f"the body has {len(message.body)} bytes, max_message_size allows {self.config.max_message_size}: shorten "
                "or compress it, or raise max_message_size"
            )
        properties = message.properties
        if self.config.generate_unique_key and "UNIQ_KEY" not in properties:
            properties = {**properties, "UNIQ_KEY": self._unique_key()}
        if "__CRC32#" in properties:
            properties = {name: value for name, value in properties.items() if name != "__CRC32#"}
        inner_num = self._inner_num(message)
        if inner_num is not None:
            # `place` sets the value; a property that is given keeps its place in the text.
            properties = properties if "INNER_BASE" in properties else {"INNER_BASE": "", **properties}
        names: list[str] = []
        if (
            self.config.enable_lmq
            and self.config.enable_multi_dispatch
            and properties.get("INNER_MULTI_DISPATCH")
            and multi_dispatch_allowed(message.topic)
        ):
            names = properties["INNER_MULTI_DISPATCH"].split(",")
            for name in names:
                if not name or name in (".", "..") or "\0" in name or len(name.encode("utf-8", "replace")) > 255:
                    raise InvalidMessageError(f"INNER_MULTI_DISPATCH names the queue {name!r}, which cannot be one")
            if "INNER_MULTI_QUEUE_OFFSET" not in properties:
                properties = {**properties, "INNER_MULTI_QUEUE_OFFSET": ""}
        version = 2 if len(message.topic) > 127 and self.config.auto_message_version_on_topic_len else 1
        topic = encode_java_utf8(message.topic)
        if version == 1 and len(topic) > 127:
            raise InvalidMessageError(
                "the topic has more than 127 bytes and auto_message_version_on_topic_len is off; shorten it"
            )
        return Prepared(
            message,
            int(queue_id),
            topic,
            message.body,
            properties,
            self.host(message.store_host or self.config.store_host),
            self.host(message.born_host or message.store_host or self.config.store_host),
            version,
            inner_num or 1,
            names,
        )

    def _inner_num(self, message: Message) -> int | None:
        is_inner = bool(message.sys_flag & SysFlag.INNER_BATCH.value)
        text = message.properties.get("INNER_NUM")
        if not is_inner:
            if text is not None:
                raise InvalidMessageError(
                    "INNER_NUM is given, but sys_flag does not say INNER_BATCH; set it or leave it out"
                )
            return None
        if text is None or not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 32767:
            raise InvalidMessageError(f"an inner batch needs property INNER_NUM from 1 to 32767, not {text!r}")
        if not self.queues.add_batch_topic(message.topic):
            raise InvalidMessageError(
                f"topic {message.topic!r} has simple queues, which cannot hold an inner batch; use a topic of queue.type BatchCQ"
            )
        return int(text)

    def host(self, host: str) -> bytes:
        """Return a host as records hold it."""
        found = self.hosts.get(host)
        if found is None:
            found = host_to_bytes(host)
            if len(self.hosts) < 10_000:
                self.hosts[host] = found
        return found

    def _unique_key(self) -> str:
        # RocketMQ's MessageClientIDSetter: address, process, a number of this class loader (here: of this store),
        # ms since the month began, a counter.
        moment = time.localtime()
        month = time.mktime((moment.tm_year, moment.tm_mon, 1, 0, 0, 0, 0, 0, -1))
        since = int(time.time() * 1000 - month * 1000) % 2**32
        self._unique_key_counter = (self._unique_key_counter + 1) & 0xFFFF
        address = self.host(self.config.store_host)[:-4].hex().upper()
        number = id(self) // 16 % 2**32
        return f"{address}{os.getpid() & 0xFFFF:04X}{number:08X}{since:08X}{self._unique_key_counter:04X}"

    def place(self, prepared: list[Prepared], now: int) -> tuple[list[tuple[Any, ...]], dict[tuple[str, int], int]]:
        """Give every message its queue offset, without writing anything.

        Returns the rows for `RowBatch.take_prepared`, and the number of units of each queue, by topic and queue id.
        """
        following: dict[tuple[str, int], int] = {}
        units: dict[tuple[str, int], int] = {}

        def take(topic: str, queue_id: int, num: int, has_unit: bool) -> int:
            key = (topic, queue_id)
            offset = following[key] if key in following else next_offset(self.queues, topic, queue_id)
            following[key] = offset + num
            if has_unit:
                units[key] = units.get(key, 0) + 1
            return offset

        rows = []
        for each in prepared:
            message, queued = each.message, is_queued(each.message.sys_flag)
            offset = take(message.topic, each.queue_id, each.inner_num, True) if queued else 0
            properties = each.properties
            if message.sys_flag & SysFlag.INNER_BATCH.value:
                properties = {**properties, "INNER_BASE": str(offset)}
            if each.dispatch_names:
                names = each.dispatch_names
                numbers = ",".join(str(take(name, 0, 1, queued and "/" not in name)) for name in names)
                properties = {**properties, "INNER_MULTI_QUEUE_OFFSET": numbers}
            text = properties_to_bytes(properties)
            size = len(text) + (_core.RecordLayout.PROP_CRC_SIZE if self.config.enabled_append_prop_crc else 0)
            if size > MAX_PROPERTIES_SIZE:
                raise InvalidMessageError(
                    f"the properties take {size} bytes, a record holds at most {MAX_PROPERTIES_SIZE}: move large values "
                    "into the body"
                )
            born = message.born_timestamp
            rows.append(
                (
                    each.topic, each.body, text, each.born_host, each.store_host,
                    each.queue_id, message.flag, message.sys_flag, message.reconsume_times, each.version,
                    offset, now if born is None else born, now, message.prepared_transaction_offset,
                )
            )  # fmt: skip
        return rows, units


def next_offset(queues: ConsumeQueueStore, topic: str, queue_id: int) -> int:
    """Return the queue offset of the next message of a queue."""
    queue = queues.find(topic, queue_id)
    return 0 if queue is None else queue.max_queue_offset


def _to_put(given: Message | MessageExt) -> Message:
    # A valid message of plain texts, as the core would find out about others only after the record is written; one that was
    # read as it was sent.
    if isinstance(given, MessageExt):
        body, store_host, sys_flag = given.body_stored, None, given.sys_flag & ~V6_BITS
    elif isinstance(given, Message):
        given.validate()
        properties = given.properties
        if all(type(text) is str for text in (given.topic, *properties, *properties.values())):
            return given
        body, store_host, sys_flag = given.body, given.store_host, given.sys_flag
    else:
        raise InvalidMessageError(f"messages holds a {type(given).__name__}, which is not a Message")
    message = Message(
        plain_text(given.topic),
        body,
        properties={plain_text(name): plain_text(value) for name, value in given.properties.items()},
        flag=given.flag,
        born_timestamp=given.born_timestamp,
        born_host=given.born_host,
        sys_flag=sys_flag,
        reconsume_times=given.reconsume_times,
        prepared_transaction_offset=given.prepared_transaction_offset,
        store_host=store_host,
    )
    message.validate()
    return message


NEW_QUEUE = -2
"""The reason of `RowBatch` for a row that it does not take: its topic or queue is new to it."""

_INT64_MAX = 2**63 - 1
V6_BITS = (SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6).value
_NO_TIMESTAMPS = array("q")


class Writing:
    """Puts messages into one store.

    Plain messages are laid out in `rows` under the append lock; None where every message goes the long way.
    """

    def __init__(self, state: StoreState, flushing: Flushing):
        self.state, self.flushing = state, flushing
        self.path, self.config = state.path, state.config
        self.commit_log, self.queues, self.index_service = state.commit_log, state.queues, state.index_service
        self.dispatcher = CommitLogDispatcher(self.commit_log, self.queues, self.index_service)
        self.long_way = LongWay(state)
        self.columns = RecordColumns()
        self.rows: RowBatch | None = None
        self._one: Appender | None = None

    def enable_writes(self) -> None:
        """Enable the appender of the core, unless the store refuses writes now."""
        # The core generates no unique keys.
        if self.rows is None and not self.config.generate_unique_key:
            config = self.config
            self.rows = self._batch()
            self._one = Appender(
                self.state,
                self._batch(),
                Message,
                PutResult,
                None if config.clock is system_clock else config.clock,
                self.after_put,
                self.index_service is not None,
                config.index_tags,
            )
        taken = (
            self.rows is not None and not self.state.disk_full and not self.state.closing and self.state.poison is None
        )
        self.state.appender = self._one if taken else None

    @functools.cached_property
    def _prepared(self) -> RowBatch:
        # Messages that are not plain are laid out in here, under the append lock.
        return self._batch()

    def _batch(self) -> RowBatch:
        config = self.config
        return RowBatch(
            self.columns.topics,
            self.long_way.host(config.store_host),
            self.long_way.hosts,
            config.max_message_size,
            MAX_RETRY_TOPIC_LENGTH if config.auto_message_version_on_topic_len else MAX_TOPIC_LENGTH,
            config.enabled_append_prop_crc,
        )

    def put(
        self,
        messages: list[Message] | list[Message | MessageExt],
        queue_id: int | Sequence[int],
        *,
        together: bool = False,
        now: int | None = None,
    ) -> PutResults:
        """Append messages, see `MessageStore.put_messages`; `together` in one segment, `now` instead of the clock."""
        self.state.check_writable()
        if isinstance(queue_id, (int, np.integer, str, bytes)) or not hasattr(queue_id, "__iter__"):
            given: Any = queue_id
        else:
            given = list(queue_id)
            if len(given) != len(messages):
                raise InvalidMessageError(f"{len(messages)} messages, but {len(given)} queue ids")
        if not messages:
            return PutResults()
        if not together and now is None and self.rows is not None:
            plain = self._put_plain(messages, given)
            if plain is not None:
                return plain
        queue_ids: list[int] = given if isinstance(given, list) else [given] * len(messages)
        prepared = [self.long_way.prepare(message, each) for message, each in zip(messages, queue_ids, strict=True)]
        with self.at(now) as now:
            rows = self._prepared
            try:
                laid_out, units = self.long_way.place(prepared, now)
                rows.take_prepared(laid_out)
                end = self._append(rows, units, now, together=together)
                placed = PutResults.of(rows.placed(), PutResult, rows.count)
            finally:
                rows.clear()
        self.after_put(end, messages)
        return placed

    def put_batch(self, messages: list[Message | MessageExt], queue_id: int) -> PutResults:
        """Append messages as a classic batch, see `MessageStore.put_message_batch`."""
        return self.put(self.long_way.checked_batch(messages), queue_id, together=True)

    @contextlib.contextmanager
    def at(self, now: int | None = None) -> Iterator[int]:
        """Hold the append lock, and return the store time: `now` if given, by a caller who has the lock already."""
        given = now is not None
        while True:
            with self.state.lock:
                self.check_accepts_writes()
                now = self.now() if now is None else now
                if given or not self.flushing.is_too_old(now):
                    yield now
                    return
            # The lock is not held while waiting for the disk.
            self.flushing.allow_for(now)

    def _put_plain(
        self, messages: list[Message] | list[Message | MessageExt], queue_ids: int | list[int]
    ) -> PutResults | None:
        # None if any of them is not plain; nothing is written then.
        rows = self.rows
        assert rows is not None and self._one is not None
        with self.at() as now:
            try:
                at, why = rows.take_messages(messages, queue_ids, 0, Message)
                while why == NEW_QUEUE:
                    message = messages[at]
                    assert isinstance(message, Message)
                    message.validate()
                    self.queue_number(message.topic, queue_ids if isinstance(queue_ids, int) else queue_ids[at])
                    at, why = rows.take_messages(messages, queue_ids, at, Message)
                if why:
                    self._one.asked = now
                    return None
                end = self.append_rows(rows, now, _NO_TIMESTAMPS)
                results = PutResults.of(rows.placed(), PutResult, rows.count)
            finally:
                rows.clear()
        self.after_put(end, messages)
        return results

    def append_rows(self, rows: RowBatch, now: int, timestamps: np.ndarray | array[int]) -> int:
        """Number and write plain rows; the rest as for `_append`.  The caller holds the append lock."""
        topics = self.columns.topics
        wanted: dict[tuple[str, int], int] = {}
        following: dict[int, int] = {}
        for number, count in rows.queues():
            topic, queue_id = topics.queues[number]
            name = topics.topics[topic].decode()
            wanted[name, queue_id] = count
            following[number] = next_offset(self.queues, name, queue_id)
        rows.number(following, now, timestamps)
        return self._append(rows, wanted, int(timestamps[-1]) if len(timestamps) else now)

    def _append(
        self, rows: RowBatch, units: Mapping[tuple[str, int], int], last: int, *, together: bool = False
    ) -> int:
        # Writes numbered rows, their units and their index entries, and returns the end of the log.  `units` are numbers by
        # queue; `last` is the store time of the last row.
        self._make_room(units)
        before = self.commit_log.max_offset
        try:
            end = self.commit_log.append_rows(rows, together=together)
            self.state.last_store_timestamp = max(self.state.last_store_timestamp, last)
            for columns in self._columns_of(rows, end):
                self.dispatcher.dispatch_columns(columns)
        except BaseException as error:
            # If the log still ends at `before`, these errors mean that nothing was written.  An interrupt may have left bytes
            # after that end, which the next record need not cover.
            if isinstance(error, (OSError, InvalidMessageError)) and self.commit_log.max_offset == before:
                self._forget(units)
            else:
                self.state.fail(error)
            raise
        return end

    def _columns_of(self, rows: RowBatch, end: int) -> Iterator[RecordColumns]:
        # Rows that are not plain are scanned in the log.
        if rows.prepared:
            first = int(rows.columns()[0][0])
            for _ in self.commit_log.stretches(first, end, self.columns, check_crc=False, resume=False):
                yield self.columns
            return
        done = 0
        while done < rows.count:
            done = rows.fill_columns(self.columns, done, self.config.index_tags)
            yield self.columns

    def _make_room(self, units: Mapping[tuple[str, int], int]) -> None:
        try:
            for (topic, queue_id), count in units.items():
                self.queues.find_or_create(topic, queue_id).make_room(count)
            if self.index_service is not None:
                self.index_service.reserve()
        except BaseException:
            self._forget(units)
            raise

    def _forget(self, units: Iterable[tuple[str, int]]) -> None:
        # A queue without a message does not exist.
        for topic, queue_id in units:
            self.queues.forget(topic, queue_id)

    def note_ends(self, message: Message | MessageExt, queue_id: int) -> None:
        """Show the core the ends of the files after a put that it did not do: it may do the next one."""
        appender = self.state.appender
        if appender is None or type(message) is not Message:
            return
        with self.state.lock:
            last = self.commit_log.files.last()
            if last is not None:
                last.region  # noqa: B018  (mapped now, and marked as used)
                index = None if self.index_service is None else self.index_service.newest()
                appender.learn(FileEnd(self.commit_log.files, last), index)

    def queue_number(self, topic: str, queue_id: int) -> int:
        """Return the number of a queue among `columns`."""
        topics = self.columns.topics
        return topics.add_queue(topics.add(topic.encode()), queue_id)

    def now(self) -> int:
        """Return the store time (ms since epoch): the one that `Appender` asked for, if it left a put to this class."""
        if self._one is not None and self._one.asked is not None:
            now, self._one.asked = self._one.asked, None
            return now
        now = self.config.clock()
        if not -_INT64_MAX - 1 <= now <= _INT64_MAX:
            raise InvalidMessageError(f"the clock says {now}, which does not fit 64 bits; correct config.clock")
        return now

    def check_accepts_writes(self) -> None:
        """Raise where nothing may be written now."""
        self.state.check_writable()
        if self.state.disk_full:
            raise DiskFullError(
                f"the disk is used above disk_space_warning_level_ratio = {self.config.disk_space_warning_level_ratio} %; "
                "free space, or open the store with another limit",
                self.path,
            )

    def after_put(self, end: int, messages: Iterable[Message | MessageExt]) -> None:
        """Wake readers that wait for messages; with SYNC_FLUSH wait for the disk.  Callers do not hold the append lock."""
        if self.state.waiting:
            with self.state.arrived:
                self.state.arrived.notify_all()
        if self.state.sync_flush and any(message.properties.get("WAIT", "true") == "true" for message in messages):
            self.flushing.wait_until_flushed(end)
