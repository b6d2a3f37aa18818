"""The long way of a message into the store: checked and laid out in Python, rule by rule.

Owns what a broker refuses, what it adds (unique key, inner batch, further queues) and the order of both; RocketMQ 5.5.0.  It
writes nothing: `Writing` does, after `place`.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore.arguments import plain_text
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.errors import InvalidMessageError
from rmqstore.message import (
    MAX_PROPERTIES_SIZE,
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
from rmqstore.store.store_state import StoreState

__all__ = ["LongWay", "Prepared", "next_offset"]


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
    """What a message needs that is not plain, step by step; the caller holds the append lock from `place` on.

    Attributes
    ----------
    hosts : dict of str to bytes
        Hosts as records hold them, which the core fills as well.
    """

    def __init__(self, state: StoreState):
        self.config = state.config
        self.queues = state.queues
        self.hosts: dict[str, bytes] = {}
        self._unique_key_counter = random.randrange(0x10000)

    def checked_batch(self, messages: list[Message | MessageExt]) -> list[Message]:
        """Return the messages to put, or raise InvalidMessageError where they cannot be one classic batch."""
        for message in messages:
            if not isinstance(message, (Message, MessageExt)):
                raise InvalidMessageError(f"messages holds a {type(message).__name__}, which is not a Message")
        batch = [_to_put(message) for message in messages]
        if len({message.topic for message in batch}) > 1:
            raise InvalidMessageError("the messages of a batch must be of one topic; use put_messages")
        for message in batch:
            if message.delay_level > 0:
                raise InvalidMessageError("a delayed message cannot be part of a batch; use put_messages")
            if message.topic.startswith(RETRY_PREFIX):
                raise InvalidMessageError("retry topics take no batches; use put_messages")
            if message.sys_flag & SysFlag.TRANSACTION_MASK.value:
                raise InvalidMessageError("a transactional message cannot be part of a batch; use put_messages")
            if message.sys_flag & SysFlag.INNER_BATCH.value:
                raise InvalidMessageError("an inner batch cannot be part of a batch; use put_message")
        return batch

    def prepare(self, given: Message | MessageExt, queue_id: int, *, append_crc: bool) -> Prepared:
        """Check a message and take it apart."""
        message = _to_put(given)
        message.validate()
        message = _with_plain_texts(message)
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
            # The value is set when the place is known; a given one keeps its place in the text.
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
        """A host as records hold it."""
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

    def place(self, prepared: list[Prepared], now: int) -> list[tuple[Any, ...]]:
        """Give every message its queue offset; the rows for `RowBatch.take_prepared`.  Nothing is written yet."""
        following: dict[tuple[str, int], int] = {}

        def take(topic: str, queue_id: int, num: int) -> int:
            key = (topic, queue_id)
            if key not in following:
                following[key] = next_offset(self.queues, topic, queue_id)
            offset = following[key]
            following[key] = offset + num
            return offset

        rows = []
        for each in prepared:
            message = each.message
            offset = take(message.topic, each.queue_id, each.inner_num) if is_queued(message.sys_flag) else 0
            properties = each.properties
            if message.sys_flag & SysFlag.INNER_BATCH.value:
                properties = {**properties, "INNER_BASE": str(offset)}
            if each.dispatch_names:
                numbers = ",".join(str(take(name, 0, 1)) for name in each.dispatch_names)
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
        return rows

    def units(self, prepared: list[Prepared]) -> dict[tuple[str, int], int]:
        """Return how many units the messages leave in each queue, by topic and queue id."""
        wanted: dict[tuple[str, int], int] = {}
        for each in prepared:
            if is_queued(each.message.sys_flag):
                lights = [(name, 0) for name in each.dispatch_names if name and "/" not in name]
                for key in [(each.message.topic, each.queue_id), *lights]:
                    wanted[key] = wanted.get(key, 0) + 1
        return wanted


def next_offset(queues: ConsumeQueueStore, topic: str, queue_id: int) -> int:
    """Return the queue offset of the next message of a queue."""
    queue = queues.find(topic, queue_id)
    return 0 if queue is None else queue.max_queue_offset


def _with_plain_texts(message: Message) -> Message:
    # The core finds out only after the record is written.
    properties = message.properties
    if all(type(text) is str for text in (message.topic, *properties, *properties.values())):
        return message
    return Message(
        plain_text(message.topic),
        message.body,
        properties={plain_text(name): plain_text(value) for name, value in properties.items()},
        flag=message.flag,
        born_timestamp=message.born_timestamp,
        born_host=message.born_host,
        sys_flag=message.sys_flag,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
        store_host=message.store_host,
    )


def _to_put(message: Message | MessageExt) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, MessageExt):
        raise InvalidMessageError(f"{type(message).__name__} is not a Message")
    # A message that was read is put again as it was sent.
    return Message(
        message.topic,
        message.body_stored,
        properties=message.properties,
        flag=message.flag,
        born_timestamp=message.born_timestamp,
        born_host=message.born_host,
        sys_flag=message.sys_flag & ~(SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6).value,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )
