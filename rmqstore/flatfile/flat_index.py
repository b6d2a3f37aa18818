"""Index files of tiered storage: one file in either form, all files of a broker, and their items of one queue.

Impossible numbers are `damage` of a file, and walks end because the numbers of items strictly decrease.  The records are scanned
if index files are missing or damaged, or an item is false.

Facts (RocketMQ 5.5.0): a file that is being written is in tiered_index_file/ of the local store, preallocated, its items chained;
one that was uploaded is in rmq_sys_INDEX/0/INDEX, compacted, the items of a slot together.  No header has the number of slots: it
follows from the first slot of a compacted file, and from where the items of an unsealed one end.  Item 0 of an unsealed file is
unused.  The begin timestamp is the time at which the file was made, so items may be older; end may be before begin.  Index files
have no tags, and the messages of a queue are indexed in order.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import NamedTuple

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore.errors import Finding, OffsetOutOfRangeError
from rmqstore.files.listing import ask_again, listing
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, NotCopied
from rmqstore.flatfile.flat_files import FlatFiles
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.index.key_source import Candidates, SoughtKeys
from rmqstore.message import MessageExt
from rmqstore.spans import Span

__all__ = [
    "LOCAL_FOLDER",
    "NO_HASH",
    "FlatIndex",
    "FlatIndexFile",
    "FlatKeys",
    "IndexItem",
    "flat_index_hash",
    "keys_of",
]

LOCAL_FOLDER = "tiered_index_file"
"""The folder of index files that are not uploaded yet, below the root of the local store."""

HEADER_SIZE, SLOT_SIZE = 28, 8
COMPACTED_ITEM_SIZE, UNSEALED_ITEM_SIZE = 28, 32
MAGIC_UNSEALED, MAGIC_SEALED = 0xBCC50289, 0xBCC50285
_HEADER = struct.Struct(">Iqqii")
_SLOT = struct.Struct(">ii")
_ITEM = struct.Struct(">iiiqii")
_CHAINED_ITEM = struct.Struct(">iiiqiii")
# RocketMQ's defaults for tieredStoreIndexFileMaxHashSlotNum and tieredStoreIndexFileMaxIndexNum.
_USUAL_SLOTS, _USUAL_ITEMS = 5_000_000, 20_000_000
NO_HASH = -(2**31)
"""The hash without a positive number, which RocketMQ cannot look up."""


def flat_index_hash(topic: str, key: str) -> int:
    """Return the hash of a key in index files; `NO_HASH` for a key that they cannot contain."""
    value = _core.java_string_hash(f"{topic}#{key}")
    return -value if NO_HASH < value < 0 else value


class IndexItem(NamedTuple):
    """One entry: the place of a message with a key of this hash; `seconds` from the file's begin, maybe negative."""

    hash: int
    topic_id: int
    queue_id: int
    log_offset: int
    size: int
    seconds: int


class FlatIndexFile(NotCopied):
    """One index file; `damage` says why not all of its items can be looked up."""

    def __init__(self, mapped_file: MappedFile, *, compacted: bool, slot_num: int | None = None):
        self.file, self.compacted = mapped_file, compacted
        self.path, self.size = mapped_file.path, mapped_file.size
        self.begin_timestamp = self.end_timestamp = self.used_slots = self.item_num = self.slot_num = 0
        self.damage: Finding | None = None
        if self.size < HEADER_SIZE:
            self._damaged(0, f"{self.size} bytes, an index file has at least {HEADER_SIZE}")
            return
        header = _HEADER.unpack(mapped_file.region.read(0, HEADER_SIZE))
        magic, self.begin_timestamp, self.end_timestamp, self.used_slots, self.item_num = header
        if magic not in (MAGIC_UNSEALED, MAGIC_SEALED):
            self._damaged(0, f"the magic code is {magic:#010x}, of an index file {MAGIC_SEALED:#x} or {MAGIC_UNSEALED:#x}")
        elif self.item_num < 0 or self.used_slots < 0:
            self._damaged(20, f"the header says {self.used_slots} slots in use and {self.item_num} items")
        elif compacted:
            self._measure_compacted()
        else:
            self._measure_unsealed(slot_num)

    def _damaged(self, pos: int, detail: str) -> None:
        if self.damage is None:
            self.damage = Finding(self.path, pos, "bad_index", detail)

    def _measure_compacted(self) -> None:
        if self.size < HEADER_SIZE + SLOT_SIZE:
            self._damaged(HEADER_SIZE, "the file ends before its first slot")
            return
        first = self.file.region.get_i32(HEADER_SIZE)
        slot_num, rest = divmod(first - HEADER_SIZE, SLOT_SIZE)
        length = HEADER_SIZE + SLOT_SIZE * slot_num + COMPACTED_ITEM_SIZE * self.item_num
        if rest or slot_num <= 0 or length != self.size:
            detail = f"{self.size} bytes do not hold {slot_num} slots, as the first one says, and {self.item_num} items"
            self._damaged(HEADER_SIZE, detail)
        else:
            self.slot_num = slot_num

    def _measure_unsealed(self, slot_num: int | None) -> None:
        usual = HEADER_SIZE + SLOT_SIZE * _USUAL_SLOTS + UNSEALED_ITEM_SIZE * _USUAL_ITEMS
        tries = [slot_num, _USUAL_SLOTS if self.size == usual else None, self._slots_by_last_item()]
        for each in tries:
            if each is not None and self._fits(each):
                self.slot_num = each
                return
        detail = f"{self.size} bytes: its slots and {self.item_num} items cannot be told apart, or its newest item was damaged"
        self._damaged(HEADER_SIZE, detail)

    def _slots_by_last_item(self) -> int | None:
        # The newest item ends within 16 bytes after the last written byte, at a multiple of items from the end.
        last = self.file.last_nonzero(HEADER_SIZE)
        for end in range(last, last + 16):
            begin = end - UNSEALED_ITEM_SIZE * (self.item_num + 1)
            slots, rest = divmod(begin - HEADER_SIZE, SLOT_SIZE)
            if slots > 0 and not rest and (self.size - end) % UNSEALED_ITEM_SIZE == 0:
                return slots
        return None

    def _fits(self, slot_num: int) -> bool:
        # The newest item of all is the newest one of its slot.
        room = self.size - HEADER_SIZE - SLOT_SIZE * slot_num
        if slot_num <= 0 or room < UNSEALED_ITEM_SIZE * (self.item_num + 1) or room % UNSEALED_ITEM_SIZE:
            return False
        if not self.item_num:
            return True
        pos = HEADER_SIZE + SLOT_SIZE * slot_num + UNSEALED_ITEM_SIZE * self.item_num
        value = self.file.region.get_i32(pos)
        return value >= 0 and self.file.region.get_i32(HEADER_SIZE + SLOT_SIZE * (value % slot_num)) == self.item_num

    # ------------------------------------------------------------------------------------------------------ lookup

    def items(self, key_hash: int) -> Iterator[IndexItem]:
        """Yield the items with this hash, newest first; an impossible number ends them and becomes `damage`."""
        if self.damage is not None and not self.slot_num:
            return
        pos = HEADER_SIZE + SLOT_SIZE * (key_hash % self.slot_num)
        value, length = _SLOT.unpack(self.file.region.read(pos, SLOT_SIZE))
        for item in self._run(pos, value, length, key_hash) if self.compacted else self._chain(pos, value, key_hash):
            if item.hash == key_hash:
                yield item

    def _run(self, slot_pos: int, begin: int, length: int, key_hash: int) -> Iterator[IndexItem]:
        low = HEADER_SIZE + SLOT_SIZE * self.slot_num
        if not length:
            return
        uneven = length % COMPACTED_ITEM_SIZE or (begin - low) % COMPACTED_ITEM_SIZE
        if uneven or length < 0 or begin < low or begin + length > self.size:
            detail = f"the slot's items lie at {begin}, {length} bytes, and the file holds items from {low} to {self.size}"
            self._damaged(slot_pos, detail)
            return
        for number, values in enumerate(_ITEM.iter_unpack(self.file.region.read(begin, length))):
            item = IndexItem(*values)
            if item.hash < 0 or item.hash % self.slot_num != key_hash % self.slot_num:
                pos = begin + number * COMPACTED_ITEM_SIZE
                self._damaged(pos, f"an item with hash {item.hash} among those of another slot")
                continue
            yield item

    def _chain(self, slot_pos: int, newest: int, key_hash: int) -> Iterator[IndexItem]:
        if not 0 <= newest <= self.item_num:
            self._damaged(slot_pos, f"the slot leads to item {newest}, and there are {self.item_num}")
            return
        number = newest
        while number > 0:
            pos = HEADER_SIZE + SLOT_SIZE * self.slot_num + UNSEALED_ITEM_SIZE * number
            *values, previous = _CHAINED_ITEM.unpack(self.file.region.read(pos, UNSEALED_ITEM_SIZE))
            item = IndexItem(*values)
            if item.hash < 0 or item.hash % self.slot_num != key_hash % self.slot_num:
                self._damaged(pos, f"an item with hash {item.hash} in the chain of another slot")
                return
            yield item
            if not 0 <= previous < number:
                self._damaged(pos + 28, f"item {number} leads on to item {previous}, which must be an older one")
                return
            number = previous

    # ------------------------------------------------------------------------------------------------------- whole

    def survey(self) -> Iterator[IndexItem | Finding]:
        """Yield every item, slot by slot, and findings about slots, items and header."""
        if self.damage is not None and not self.slot_num:
            yield self.damage
            return
        used = found = 0
        expected = HEADER_SIZE + SLOT_SIZE * self.slot_num
        step = 8192
        for first in range(0, self.slot_num, step):
            num = min(step, self.slot_num - first)
            slots = self.file.region.read(HEADER_SIZE + SLOT_SIZE * first, SLOT_SIZE * num)
            for slot, (value, length) in enumerate(_SLOT.iter_unpack(slots), first):
                pos = HEADER_SIZE + SLOT_SIZE * slot
                self.damage = None
                if self.compacted:
                    if value != expected:
                        detail = f"the slot's items lie at {value}, those of the slot before end at {expected}"
                        yield Finding(self.path, pos, "bad_index", detail)
                    items = list(self._run(pos, value, length, slot))
                    expected += length if 0 <= length <= self.size else 0
                else:
                    items = list(self._chain(pos, value, slot))
                yield from self._taken_damage()
                used, found = used + bool(items), found + len(items)
                yield from items
        self.damage = None
        if found != self.item_num or used != self.used_slots:
            detail = f"slots lead to {found} items from {used} slots, the header says {self.item_num} and {self.used_slots}"
            yield Finding(self.path, 20, "bad_index", detail)

    def _taken_damage(self) -> list[Finding]:
        return [] if self.damage is None else [self.damage]


class FlatIndex(NotCopied):
    """All index files of a broker, newest first: those that were uploaded, and those in the local store, if it is known."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        local_path: str | os.PathLike[str] | None,
        pool: MappedFilePool,
        sizes: Mapping[int, int] | None = None,
    ):
        self._pool = pool
        self.uploaded = FlatFiles(path, pool, sizes)
        self.local_path = None if local_path is None else os.path.join(local_path, LOCAL_FOLDER)
        self.files: list[FlatIndexFile] = []
        self._last: tuple[list[FlatIndexFile], int, list[IndexItem]] = ([], 0, [])
        self._strange: list[Finding] = []
        self._open(sizes)

    def load(self, sizes: Mapping[int, int] | None = None) -> None:
        """List the folders again."""
        # A local file is deleted after its upload, so that one of both is found.
        self.uploaded.load(sizes)
        self._open(sizes)

    def _open(self, sizes: Mapping[int, int] | None) -> None:
        # A missing local file was uploaded; after the last try the other files are used.
        with contextlib.suppress(OffsetOutOfRangeError):
            ask_again(self._open_once, lambda: self.uploaded.load(sizes), tries=2)

    def _open_once(self) -> None:
        local = self._local_files()
        found: list[FlatIndexFile] = []
        for base in self.uploaded.bases:
            mapped_file = self.uploaded.find(base)
            try:
                if mapped_file is not None:
                    found.append(FlatIndexFile(mapped_file, compacted=True))
            except OffsetOutOfRangeError:
                # Deleted since it was listed.
                self.uploaded.lose(base)
        slot_num = next((each.slot_num for each in found if each.slot_num), None)
        uploaded = {each.begin_timestamp for each in found if each.slot_num}
        moved: OffsetOutOfRangeError | None = None
        for mapped_file in local:
            try:
                index = FlatIndexFile(mapped_file, compacted=False, slot_num=slot_num)
            except OffsetOutOfRangeError as gone:
                moved = gone
                continue
            # The local file is deleted some time after its upload.
            if index.damage is not None or index.begin_timestamp not in uploaded:
                found.append(index)
        self.files = sorted(found, key=lambda each: -each.begin_timestamp)
        if moved is not None:
            raise moved

    def _local_files(self) -> list[MappedFile]:
        self._strange = []
        files: list[MappedFile] = []
        if self.local_path is None:
            return files
        entries = listing(self.local_path)
        if (error := entries.problem) is not None:
            self._strange.append(Finding(self.local_path, 0, "file", f"cannot be listed: {error.strerror or error}"))
        for entry in entries:
            if entry.is_dir():
                continue  # compacting/ has a copy of a file here, and is deleted at the next start.
            if not (entry.name.isascii() and entry.name.isdigit()) or not entry.is_file():
                self._strange.append(Finding(entry.path, 0, "file", "no index file; it is not read"))
                continue
            try:
                size = entry.stat().st_size
            except FileNotFoundError:
                continue  # The broker uploaded it.
            if not os.access(entry.path, os.R_OK):
                self._strange.append(Finding(entry.path, 0, "file", "may not be read; the records are scanned instead"))
            elif size:
                files.append(MappedFile(entry.path, size, pool=self._pool, read_only=True, padded=True))
        return files

    @property
    def problems(self) -> list[Finding]:
        """list of Finding: reasons why the index may lack messages, so that the records must be scanned."""
        damage = [each.damage for each in self.files if each.damage is not None]
        return [*self.uploaded.problems, *self._strange, *damage]

    def items(self, key_hash: int) -> list[IndexItem]:
        """Return the items with this hash in all files, those of the newest file first."""
        files, last = self.files, self._last
        if last[0] is not files or last[1] != key_hash:
            # Kept, because each queue of a topic needs the same items.
            last = self._last = files, key_hash, [item for index in files for item in index.items(key_hash)]
        return last[2]

    def close(self) -> None:
        """Close the files."""
        for index in self.files:
            if not index.compacted:
                index.file.close()
        self.uploaded.close()


# The number of messages without a key that are skipped in a search.
_KEYLESS = 256


class FlatKeys:
    """The index of one queue, a `KeySource` whose log is that of the queue; `topic_ids` is empty without metadata."""

    def __init__(self, queue: FlatQueue, index: FlatIndex, topic_ids: Mapping[int, str], queue_ids: Set[int]):
        self.queue, self.log, self.index = queue, queue.log, index
        self.topic_ids, self.queue_ids = topic_ids, queue_ids
        # Hashes with a false item.
        self.untrue: set[int] = set()

    def messages(self, sought: SoughtKeys) -> list[MessageExt]:
        """Return the messages that have the keys; of one that was uploaded twice, the later one."""
        while True:
            known, candidates = len(self.untrue), next(self.candidates(sought))
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

    def candidates(self, sought: SoughtKeys, wanted: np.ndarray | None = None) -> Iterator[Candidates]:
        """See `KeySource`; all are in one round."""
        numbers, log_offsets = list[int](), list[int]()
        for number, (topic, key) in enumerate(sought.pairs()):
            one = SoughtKeys.of(replace(sought.selection, topics=(topic,), keys=(key,)))
            found = self._candidates(one) if topic == self.queue.topic else set()
            numbers += [number] * len(found)
            log_offsets += sorted(found, reverse=True)
        yield Candidates.of(numbers, log_offsets)

    def _candidates(self, sought: SoughtKeys) -> set[int]:
        queue, found = self.queue, set[int]()
        parts: list[Span] = [(queue.min_queue_offset, queue.max_queue_offset)]
        key_hash = flat_index_hash(queue.topic, sought.selection.key)
        if sought.selection.index_type != "T" and key_hash != NO_HASH and key_hash not in self.untrue:
            items = self.index.items(key_hash)
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
        """See `KeySource`; for a key with a false item the records are scanned."""
        keys = [key for _, key in sought.pairs()]
        for number, log_offset in zip(rejected.numbers.tolist(), rejected.phy_offsets.tolist()):
            key_hash = flat_index_hash(self.queue.topic, keys[number])
            if not self._is_explained(log_offset, key_hash):
                self.untrue.add(key_hash)

    def _has_queue(self, item: IndexItem) -> bool:
        return item.queue_id in self.queue_ids or self.topic_ids.get(item.topic_id) != self.queue.topic

    def _may_be_here(self, item: IndexItem) -> bool:
        return item.queue_id == self.queue.queue_id and self.topic_ids.get(item.topic_id) in (None, self.queue.topic)

    def _is_explained(self, log_offset: int, key_hash: int) -> bool:
        # An item may point to another record because of a key with the same hash, another topic, or retention.
        message = self.log.look_up(log_offset)
        if message is not None:
            return any(flat_index_hash(message.topic, each) == key_hash for each in keys_of(message))
        if 0 <= log_offset < self.log.min_offset:
            return True
        items = [item for item in self.index.items(key_hash) if item.log_offset == log_offset and self._may_be_here(item)]
        # Without metadata it may be another topic's, unless a unit of this one points there.
        return not any(item.topic_id in self.topic_ids for item in items) and self.queue.unit_of(log_offset) == (-1, True)

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
        # None for a message without a key; `unread` for an unreadable one, which by default is scanned and reported.
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
