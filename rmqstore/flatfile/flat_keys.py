"""The messages of a queue in tiered storage by key: items of index files, and the records that no index file has.

Owns which index items count, and from which queue offset up to which other the index files have every message.  An answer lacks
nothing that is there: where index files are missing or damaged, or an item cannot be true, the records are scanned.

Facts (RocketMQ 5.5.0): index files have no tags, and the messages of a queue are indexed in order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from dataclasses import replace

from rmqstore.flatfile.flat_index import NO_HASH, FlatIndex, IndexItem, flat_index_hash
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.index.key_source import Candidates, SoughtKeys
from rmqstore.message import MessageExt
from rmqstore.spans import Span

__all__ = ["FlatKeys", "keys_of"]

# The number of messages in a row without a key that are read one by one.
_KEYLESS = 256


class FlatKeys:
    """The index of one queue, a `KeySource` whose log is that of the queue.

    Parameters
    ----------
    queue : FlatQueue
    index : FlatIndex
    topic_ids : mapping of int to str
        The topics by the numbers in index items; empty without metadata.
    queue_ids : set of int
        The queues of the topic.
    """

    def __init__(self, queue: FlatQueue, index: FlatIndex, topic_ids: Mapping[int, str], queue_ids: Set[int]):
        self.queue, self.log, self.index = queue, queue.log, index
        self.topic_ids, self.queue_ids = topic_ids, queue_ids
        # Hashes with an item that cannot be true.
        self.untrue: set[int] = set()

    def messages(self, sought: SoughtKeys) -> list[MessageExt]:
        """Return the messages that have the keys; of one that was uploaded twice, the later one."""
        while True:
            known, candidates = len(self.untrue), self.candidates(sought)
            taken = sought.matching(self.log, candidates)[1]
            self.doubt(sought, candidates[~taken])
            if len(self.untrue) == known:
                break
        found: dict[int, MessageExt] = {}
        for log_offset in sorted(set(candidates.phy_offsets[taken].tolist())):
            message = self.log.look_up(log_offset)
            if message is not None:
                number = self.queue.unit_of(log_offset)[0]
                if number >= 0:
                    message.check_queue(self.queue.topic, self.queue.queue_id, number)
                found[number if number >= 0 else message.queue_offset] = message
        return list(found.values())

    def candidates(self, sought: SoughtKeys) -> Candidates:
        """See `KeySource`."""
        numbers, log_offsets = list[int](), list[int]()
        for number, (topic, key) in enumerate(sought.pairs()):
            one = SoughtKeys.of(replace(sought.selection, topics=(topic,), keys=(key,)))
            found = self._candidates(one) if topic == self.queue.topic else set()
            numbers += [number] * len(found)
            log_offsets += sorted(found, reverse=True)
        return Candidates.of(numbers, log_offsets)

    def _candidates(self, sought: SoughtKeys) -> set[int]:
        queue, found = self.queue, set[int]()
        parts: list[Span] = [(queue.min_queue_offset, queue.max_queue_offset)]
        key_hash = flat_index_hash(queue.topic, sought.selection.key)
        if sought.selection.index_type != "T" and key_hash != NO_HASH and key_hash not in self.untrue:
            items = list(self.index.items(key_hash))
            if not self.index.problems and all(self._has_queue(item) for item in items):
                found = {item.log_offset for item in items if self._may_be_here(item)}
                parts = [(parts[0][0], self.indexed_from), (self.indexed_to, parts[0][1])]
        for begin, end in parts:
            found.update(queue.find_keys(sought, begin, end))
        return found

    def covered(self) -> list[Span]:
        """See `KeySource`."""
        return [(self.log.min_offset, self.log.max_offset)]

    def doubt(self, sought: SoughtKeys, rejected: Candidates) -> None:
        """See `KeySource`; the records are scanned for a key with an item that cannot be true."""
        keys = [key for _, key in sought.pairs()]
        for number, log_offset in zip(rejected.numbers.tolist(), rejected.phy_offsets.tolist()):
            key_hash = flat_index_hash(self.queue.topic, keys[number])
            if not self._is_explained(log_offset, key_hash):
                self.untrue.add(key_hash)

    def _topic_of(self, item: IndexItem) -> str | None:
        return self.topic_ids.get(item.topic_id)

    def _has_queue(self, item: IndexItem) -> bool:
        return item.queue_id in self.queue_ids or self._topic_of(item) != self.queue.topic

    def _may_be_here(self, item: IndexItem) -> bool:
        return item.queue_id == self.queue.queue_id and self._topic_of(item) in (None, self.queue.topic)

    def _is_explained(self, log_offset: int, key_hash: int) -> bool:
        # Why an item with the hash may point to something else: another key, another topic, or retention.
        message = self.log.look_up(log_offset)
        if message is not None:
            return any(flat_index_hash(message.topic, each) == key_hash for each in keys_of(message))
        if 0 <= log_offset < self.log.min_offset:
            return True
        items = [item for item in self.index.items(key_hash) if item.log_offset == log_offset and self._may_be_here(item)]
        # Without metadata it may be another topic's, unless a unit of this one points there.
        return all(self._topic_of(item) is None for item in items) and self.queue.unit_of(log_offset) == (-1, True)

    @functools.cached_property
    def indexed_to(self) -> int:
        """int: the queue offset after the last message that an index file has; found by bisection."""
        low, high = self.queue.min_queue_offset, self.queue.max_queue_offset
        middle = high - 1
        while low < high:
            at, indexed = middle, self._is_indexed(middle)
            while indexed is None and at > low and middle - at < _KEYLESS:
                # A message without a key is in no index file.
                at -= 1
                indexed = self._is_indexed(at)
            if indexed or (indexed is None and at == low):
                low = middle + 1
            else:
                high = at
            middle = (low + high) // 2
        return low

    @functools.cached_property
    def indexed_from(self) -> int:
        """int: the queue offset of the first message that an index file has; not above `indexed_to`.

        The oldest index file may expire, or be lost, before the log files that have its messages.
        """
        low, high = self.queue.min_queue_offset, self.indexed_to
        middle = low
        while low < high:
            at, indexed = middle, self._is_indexed(middle, unread=None)
            while indexed is None and at + 1 < high and at - middle < _KEYLESS:
                # No key, or unreadable: the next message decides.
                at += 1
                indexed = self._is_indexed(at, unread=None)
            if indexed:
                high = middle
            else:
                low = at + 1
            middle = (low + high) // 2
        return low

    def _is_indexed(self, queue_offset: int, unread: bool | None = False) -> bool | None:
        # None for a message without a key; an unreadable one counts as not indexed, so that it is read and reported.
        unit = self.queue.unit_at(queue_offset)
        message = None if unit is None else self.log.look_up(unit[0], unit[1])
        if message is None:
            return unread
        keys = keys_of(message)
        return self.has_item(message, keys[0]) if keys else None

    def has_item(self, message: MessageExt, key: str) -> bool:
        """Return True if an index file has this key of a message of the queue."""
        return any(
            item.log_offset == message.phy_offset and item.queue_id == self.queue.queue_id
            for item in self.index.items(flat_index_hash(message.topic, key))
        )


def keys_of(message: MessageExt) -> list[str]:
    """Return the unique key of a message and its keys."""
    unique_key = message.unique_key
    return [*([unique_key] if unique_key else []), *message.keys]
