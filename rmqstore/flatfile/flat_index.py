"""Index files of tiered storage: one file in either form, and all of a broker's, local ones included.

Owns the layout of slots and items and the walk over the items of a hash.  It never compares keys (items have only hashes: who
asks looks at the record) and changes nothing.  Every number is hostile: what cannot be is `damage` of the file, walks end
because the numbers of items strictly decrease, and a lookup never answers from a place that does not belong to its slot.

Facts (RocketMQ 5.5.0): a file that is written lies in tiered_index_file/ of the local store, preallocated, its items chained; one
that was uploaded lies in rmq_sys_INDEX/0/INDEX, compacted, the items of a slot together.  How many slots a file has stands in
none: a compacted one tells by its first slot, an unsealed one by where its items end.  Both have item 0 of an unsealed file
unused.  The begin timestamp is the time at which the file was made, so items may be older; end may be before begin.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rmqstore import _core
from rmqstore.errors import Finding, OffsetOutOfRangeError
from rmqstore.files.again import ask_again
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, NotCopied
from rmqstore.flatfile.flat_files import FlatFiles
from rmqstore.flatfile.metadata import FlatFileMetadata

__all__ = ["LOCAL_FOLDER", "NO_HASH", "FlatIndex", "FlatIndexFile", "IndexItem", "flat_index_hash"]

LOCAL_FOLDER = "tiered_index_file"
"""Where a broker keeps index files that it did not upload yet, below the root of its local store."""

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
"""The hash that has no positive number, and that RocketMQ cannot look up."""


def flat_index_hash(topic: str, key: str) -> int:
    """Return what index files have for a key; `NO_HASH` for a key that they cannot have."""
    value = _core.java_string_hash(f"{topic}#{key}")
    return -value if NO_HASH < value < 0 else value


class IndexItem(NamedTuple):
    """One entry: where a message with a key of this hash lies.

    Attributes
    ----------
    hash, topic_id, queue_id, log_offset, size : int
    seconds : int
        From the file's begin timestamp to the store time; maybe negative.
    """

    hash: int
    topic_id: int
    queue_id: int
    log_offset: int
    size: int
    seconds: int


class FlatIndexFile(NotCopied):
    """One index file.

    Parameters
    ----------
    mapped_file : MappedFile
    compacted : bool
    slot_num : int, optional
        Of an unsealed file, where another file of the broker tells it.

    Attributes
    ----------
    magic, slot_num, item_num : int
    begin_timestamp, end_timestamp : int
        ms since epoch.
    used_slots : int
    damage : Finding or None
        Why not all of its items can be looked up.
    """

    def __init__(self, mapped_file: MappedFile, *, compacted: bool, slot_num: int | None = None):
        self.file, self.compacted = mapped_file, compacted
        self.path, self.size = mapped_file.path, mapped_file.size
        self.magic = self.begin_timestamp = self.end_timestamp = self.used_slots = self.item_num = self.slot_num = 0
        self.damage: Finding | None = None
        if self.size < HEADER_SIZE:
            self._damaged(0, f"{self.size} bytes, an index file has at least {HEADER_SIZE}")
            return
        header = _HEADER.unpack(mapped_file.region.read(0, HEADER_SIZE))
        self.magic, self.begin_timestamp, self.end_timestamp, self.used_slots, self.item_num = header
        if self.magic not in (MAGIC_UNSEALED, MAGIC_SEALED):
            self._damaged(0, f"the magic code is {self.magic:#010x}, of an index file {MAGIC_SEALED:#x} or {MAGIC_UNSEALED:#x}")
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
        # The newest item ends in the last 16 bytes before or after what was written last, at a multiple of items from the end.
        last = self.file.last_nonzero(HEADER_SIZE)
        for end in range(last, last + 16):
            begin = end - UNSEALED_ITEM_SIZE * (self.item_num + 1)
            if (self.size - end) % UNSEALED_ITEM_SIZE == 0 and begin > HEADER_SIZE and (begin - HEADER_SIZE) % SLOT_SIZE == 0:
                return (begin - HEADER_SIZE) // SLOT_SIZE
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
        """The items with this hash, newest first; what cannot be ends them and becomes `damage`."""
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
                self._damaged(begin + number * COMPACTED_ITEM_SIZE, f"an item with hash {item.hash} among those of another slot")
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

    def survey(self) -> Iterator[tuple[int, IndexItem] | Finding]:
        """Every item with its position in bytes, slot by slot, and what is wrong between slots, items and header."""
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
                    places = list(range(value, value + length, COMPACTED_ITEM_SIZE)) if items else []
                    expected += length if 0 <= length <= self.size else 0
                else:
                    items = list(self._chain(pos, value, slot))
                    places = self._chain_places(value, len(items))
                yield from self._taken_damage()
                used, found = used + bool(items), found + len(items)
                yield from zip(places, items)
        self.damage = None
        if found != self.item_num or used != self.used_slots:
            detail = f"slots lead to {found} items from {used} slots, the header says {self.item_num} and {self.used_slots}"
            yield Finding(self.path, 20, "bad_index", detail)

    def _taken_damage(self) -> list[Finding]:
        return [] if self.damage is None else [self.damage]

    def _chain_places(self, newest: int, count: int) -> list[int]:
        places, number = [], newest
        for _ in range(count):
            places.append(HEADER_SIZE + SLOT_SIZE * self.slot_num + UNSEALED_ITEM_SIZE * number)
            number = self.file.region.get_i32(places[-1] + 28)
        return places


class FlatIndex(NotCopied):
    """All index files of a broker.

    Parameters
    ----------
    path : path
        The folder of those that were uploaded.
    local_path : path or None
        The root of the broker's local store, which has the others; None where it is not known.
    pool : MappedFilePool
    metadata : mapping, optional
        As of `FlatFiles`.

    Attributes
    ----------
    uploaded : FlatFiles
    files : list of FlatIndexFile
        Newest first.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        local_path: str | os.PathLike[str] | None,
        pool: MappedFilePool,
        metadata: Mapping[int, FlatFileMetadata] | None = None,
    ):
        self._pool = pool
        self.uploaded = FlatFiles(path, pool, metadata)
        self.local_path = None if local_path is None else os.path.join(local_path, LOCAL_FOLDER)
        self.files: list[FlatIndexFile] = []
        self._strange: list[Finding] = []
        self._open(metadata)

    def load(self, metadata: Mapping[int, FlatFileMetadata] | None = None) -> None:
        """Look at the folders again, where a broker wrote meanwhile."""
        # A local file goes when it was uploaded, so that one of both is seen.
        self.uploaded.load(metadata)
        self._open(metadata)

    def _open(self, metadata: Mapping[int, FlatFileMetadata] | None) -> None:
        # A local file that is gone was uploaded; after the last try the others are used.
        with contextlib.suppress(OffsetOutOfRangeError):
            ask_again(self._open_once, lambda: self.uploaded.load(metadata), tries=2)

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
            # The file stays for a moment after it was uploaded.
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
                continue  # compacting/ has a copy of what is here, and is deleted at the next start.
            if not (entry.name.isascii() and entry.name.isdigit()) or not entry.is_file():
                self._strange.append(Finding(entry.path, 0, "file", "no index file; it is not read"))
                continue
            try:
                size = entry.stat().st_size
            except FileNotFoundError:
                continue  # Its broker uploaded it meanwhile.
            if not os.access(entry.path, os.R_OK):
                self._strange.append(Finding(entry.path, 0, "file", "may not be read; the records are gone over instead"))
            elif size:
                files.append(MappedFile.of_any_length(entry.path, size, pool=self._pool))
        return files

    @property
    def problems(self) -> list[Finding]:
        """list of Finding: why answers from the index may lack messages; the records themselves have to be gone over then."""
        return [*self.uploaded.problems, *self._strange, *(each.damage for each in self.files if each.damage is not None)]

    def items(self, key_hash: int) -> Iterator[IndexItem]:
        """The items with this hash in all files, those of the newest file first."""
        for index in self.files:
            yield from index.items(key_hash)

    def _close_local(self) -> None:
        for index in self.files:
            if not index.compacted:
                index.file.close()

    def close(self) -> None:
        """Let go of the files."""
        self._close_local()
        self.uploaded.close()
