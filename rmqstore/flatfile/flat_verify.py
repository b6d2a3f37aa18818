"""verify for tiered storage: compare files with metadata and each other, units with records, and index items with records.

No finding ends the run, and memory is constant except for one byte a unit.  The compiled core and NumPy find differences, and
Python names each one.

Facts (RocketMQ 5.5.0): the end timestamp of an index file is the newest store time of its items, whose seconds are rounded towards
zero; a record has one item for each different key, its unique key among them, and one for an empty key where two spaces follow
each other in KEYS.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from rmqstore import _core, _dispatch
from rmqstore import _numpy as np
from rmqstore._columns import ArrowColumns
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.log_walk import DAMAGE_KINDS
from rmqstore.errors import Finding, Sentence
from rmqstore.files.listing import ask_again
from rmqstore.files.mapped_file import MappedFile
from rmqstore.flatfile.flat_index import (
    COMPACTED_ITEM_SIZE,
    HEADER_SIZE,
    SLOT_SIZE,
    UNSEALED_ITEM_SIZE,
    FlatIndexFile,
    IndexItem,
    flat_index_hash,
)
from rmqstore.flatfile.flat_queue import UNIT_SIZE, FlatQueue
from rmqstore.flatfile.flat_store import INDEX_TOPIC, FlatStore
from rmqstore.message import MessageExt, SysFlag, body_findings, encode_java_utf8
from rmqstore.sources import EXPIRED, DamagePolicy

__all__ = ["verify_flat"]

_CHUNK = 65536
_SCAN_WINDOW = 32 * 1024 * 1024
_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MASK = 2**64 - 1


def verify_flat(flat_store: FlatStore, progress: Callable[[int, int], object] | None = None) -> Iterator[Finding]:
    """Yield everything that is wrong with files, units and index items; nothing is changed.

    Another `FlatStore` lists the folders again.  `progress` is called with bytes of records done, and bytes in all.
    """
    cluster, broker, path = flat_store.cluster, flat_store.broker, flat_store.path
    own = FlatStore(
        path, flat_store.store_path, cluster=cluster, broker=broker, damage=DamagePolicy("skip"), goes_on=True
    )
    with contextlib.closing(own):
        yield from _Verify(own, progress).run()


class _Verify:
    def __init__(self, flat_store: FlatStore, progress: Callable[[int, int], object] | None):
        self.flat_store = flat_store
        self.progress = progress or (lambda done, whole: None)
        self.topic_ids = {} if flat_store.metadata is None else flat_store.metadata.topic_ids
        self.ids_of = {topic: number for number, topic in self.topic_ids.items()}
        self.done, self.whole = 0, 0
        # Findings about files as a whole.
        self.told: list[Finding] = []
        # The items that the records should have.
        self.expected = _Sum()
        # Items of empty keys are compared one by one: the core skips such keys, and few records have them.
        self.empty_hashes: np.ndarray = np.empty(0, np.int64)
        # Missing libraries that were reported.
        self.missing: set[str] = set()

    def run(self) -> Iterator[Finding]:
        yield from self._strange()
        self.told = self.flat_store.problems
        yield from self.told
        queues = list(self.flat_store.queues())
        self.empty_hashes = np.array(sorted({flat_index_hash(queue.topic, "") for queue in queues}), np.int64)
        self.whole = sum(queue.log.max_offset - queue.log.min_offset for queue in queues)
        for queue in queues:
            yield from self._queue(queue)
        yield from self._index(queues)
        self.progress(self.whole, self.whole)

    def _strange(self) -> Iterator[Finding]:
        for folder, _, names in os.walk(self.flat_store.folder):
            depth = os.path.relpath(folder, self.flat_store.folder).count(os.sep)
            if depth < 2 or folder == self.flat_store.folder:
                for name in sorted(names):
                    yield Finding(os.path.join(folder, name), 0, "file", "no part of tiered storage")

    # ------------------------------------------------------------------------------------------------------ queues

    def _queue(self, queue: FlatQueue) -> Iterator[Finding]:
        covered = _Covered(queue)
        indexed_to = self.flat_store.keys_of(queue).indexed_to
        columns = RecordColumns()
        for base in queue.log.bases:
            mapped_file = queue.log.find(base)
            if mapped_file is not None and queue.log.region_of(base) is not None:
                yield from self._file(queue, mapped_file, columns, covered, indexed_to)
        at = covered.next_missing(queue.min_queue_offset)
        while at is not None:
            following = at + 1
            # A hole among the units is a finding already.
            if queue.unit_at(at) is not None:
                finding, following = queue.why_unread(at, queue.max_queue_offset)
                yield from self._unless_expired(finding)
            at = covered.next_missing(following)
        for files in (queue.units, queue.log):
            for hole in files.holes:
                if hole.finding not in self.told:
                    yield from self._unless_expired(hole.finding)

    def _unless_expired(self, finding: Finding) -> Iterator[Finding]:
        if finding.kind == EXPIRED:
            self.flat_store.damage.finding(finding)
        else:
            yield finding

    def _file(
        self, queue: FlatQueue, mapped_file: MappedFile, columns: RecordColumns, covered: _Covered, indexed_to: int
    ) -> Iterator[Finding]:
        region, base, at = mapped_file.region, mapped_file.file_from_offset, 0
        search = None
        released = 0
        while at < region.size:
            pos, verdict = _dispatch.scan(region, at, region.size, base, columns, array("q"), 1, False, True)
            if columns.count:
                yield from self._records(queue, columns, covered, indexed_to)
            self.done += pos - at
            at = pos
            if at - released >= _SCAN_WINDOW:
                region.release_pages(released, at - released)
                released = at
            self.progress(min(self.done, self.whole), self.whole)
            if verdict is Verdict.LIMIT:
                break
            if verdict is Verdict.COLUMNS_FULL:
                continue
            if verdict in (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC):
                until = at + region.get_i32(at)
                yield Finding(mapped_file.path, at, DAMAGE_KINDS[verdict], "the record does not agree with its CRC")
                self._cover_damaged(queue, base + at, covered, indexed_to)
            else:
                search = _core.RecordSearch(region, base) if search is None else search
                found = search.find(at + 1)
                until = found if found >= 0 else region.size
                detail = Sentence(f"{until - at} bytes that are not a record (", verdict, ")")
                yield Finding(mapped_file.path, at, DAMAGE_KINDS.get(verdict, "bad_record"), detail)
            self.done += until - at
            at = until

    def _cover_damaged(self, queue: FlatQueue, log_offset: int, covered: _Covered, indexed_to: int) -> None:
        # A damaged record has a unit and items like any other.
        message = queue.log.look_up(log_offset)
        if message is None:
            return
        covered.add(np.array([message.queue_offset], np.int64))
        if message.queue_offset < indexed_to:
            self._expect(queue, message)

    def _expect(self, queue: FlatQueue, message: Any) -> None:
        hashes = np.array([flat_index_hash(queue.topic, key) for key in _indexed_keys(message) - {""}], np.int64)
        self.expected.add(hashes, self.ids_of.get(queue.topic, 0), queue.queue_id, message.phy_offset, message.size)

    def _records(
        self, queue: FlatQueue, columns: RecordColumns, covered: _Covered, indexed_to: int
    ) -> Iterator[Finding]:
        num = columns.count
        offsets, sizes = columns.phy_offset[:num], columns.size[:num]
        queue_offsets, codes = columns.queue_offset[:num], columns.tags_code[:num]
        names = columns.topics.topics
        own = np.array([name == encode_java_utf8(queue.topic) for name in names], np.bool_)[columns.topic[:num]]
        own &= columns.queue_id[:num] == queue.queue_id
        for row in np.flatnonzero(~own).tolist():
            name = names[int(columns.topic[row])].decode("utf-8", "replace")
            detail = f"a record of queue {name}/{int(columns.queue_id[row])} in the log of {queue.topic}/{queue.queue_id}"
            yield Finding(*queue.log.place_of(int(offsets[row])), "wrong_queue", detail)
        for log_offset in offsets[columns.sys_flag[:num] & SysFlag.COMPRESSED.value != 0].tolist():
            message = queue.log.look_up(log_offset)
            if message is not None:
                yield from body_findings(message, *queue.log.place_of(log_offset), self.missing)
        beyond = np.flatnonzero(own & (queue_offsets >= queue.max_queue_offset))
        if len(beyond):
            place = queue.log.place_of(int(offsets[beyond[0]]))
            yield Finding(*place, "not_queued", f"{len(beyond)} records from here have no unit")
        inside = own & (queue_offsets >= queue.min_queue_offset) & (queue_offsets < queue.max_queue_offset)
        agreed = self._agreeing(queue, queue_offsets, offsets, sizes, codes, inside)
        covered.add(np.asarray(queue_offsets[agreed]))
        for row in np.flatnonzero(inside & ~agreed).tolist():
            said = int(offsets[row]), int(sizes[row]), int(codes[row])
            yield from self._wrong_unit(queue, int(queue_offsets[row]), *said, covered)
        self._expect_rows(queue, columns, own & (queue_offsets < indexed_to))

    def _agreeing(
        self, queue: FlatQueue, queue_offsets: Any, offsets: Any, sizes: Any, codes: Any, inside: np.ndarray
    ) -> np.ndarray:
        # True for rows that agree with their unit.
        agreed = np.zeros(len(offsets), np.bool_)
        rows = np.flatnonzero(inside)
        if not len(rows):
            return agreed
        low, high = int(queue_offsets[rows].min()), int(queue_offsets[rows].max()) + 1
        if high - low > 4 * len(rows) + _CHUNK:
            # Such distances are damage; each row is compared alone.
            for row in rows.tolist():
                said = int(offsets[row]), int(sizes[row]), int(codes[row])
                agreed[row] = queue.unit_at(int(queue_offsets[row])) == said
            return agreed
        for places in queue.places(low, high):
            first = int(places.queue_offsets[0])
            part = rows[(queue_offsets[rows] >= first) & (queue_offsets[rows] < first + len(places))]
            there = places[queue_offsets[part] - first]
            agreed[part] = (
                (there.phy_offsets == offsets[part]) & (there.sizes == sizes[part]) & (there.tags_codes == codes[part])
            )
        return agreed

    def _wrong_unit(
        self, queue: FlatQueue, queue_offset: int, log_offset: int, size: int, code: int, covered: _Covered
    ) -> Iterator[Finding]:
        unit = queue.unit_at(queue_offset)
        if unit is None or unit[1] <= 0:
            return  # A hole, or a file cut in a unit: a finding already.  Units without a size are reported together.
        other = queue.log.look_up(unit[0], unit[1]) if unit[0] != log_offset else None
        if other is not None and other.queue_offset == queue_offset:
            detail = f"queue offset {queue_offset} again; its unit leads to log offset {unit[0]}"
            yield Finding(*queue.log.place_of(log_offset), "duplicate_record", detail)
            return
        covered.add(np.array([queue_offset], np.int64))
        detail = f"log offset, size, tags code {unit}; the record of queue offset {queue_offset} says {(log_offset, size, code)}"
        yield Finding(*queue.units.place_of(20 * queue_offset), "bad_unit", detail)

    def _expect_rows(self, queue: FlatQueue, columns: RecordColumns, chosen: np.ndarray) -> None:
        num = columns.count
        starts = columns.key_start[: num + 1]
        counts = np.diff(starts)
        hashes = columns.key_hash[: int(starts[num])]
        rows = np.repeat(np.arange(num), counts)
        # A key that a record has twice has one item; two keys may share a hash, so that their texts are compared.
        pairs = (rows.astype(np.int64) << 32) | hashes.astype(np.int64)
        unique, numbers = np.unique(pairs, return_counts=True)
        twice = np.unique(unique[numbers > 1] >> 32)
        kept = chosen.copy()
        kept[twice] = False
        wanted = kept[rows]
        rows, hashes = rows[wanted], hashes[wanted]
        size = np.asarray(columns.size)[rows]
        offsets = np.asarray(columns.phy_offset)[rows]
        self.expected.add(hashes, self.ids_of.get(queue.topic, 0), queue.queue_id, offsets, size)
        for row in twice.tolist():
            if chosen[row]:
                message = queue.log.look_up(int(columns.phy_offset[row]))
                if message is not None:
                    self._expect(queue, message)

    # ------------------------------------------------------------------------------------------------------- index

    def _index(self, queues: list[FlatQueue]) -> list[Finding]:
        # If a local file was uploaded, or retention deleted one, the present files are compared.
        index, sizes = self.flat_store.index, self.flat_store.said("INDEX", INDEX_TOPIC, 0)
        return ask_again(lambda: list(self._index_files(queues)), lambda: index.load(sizes))

    def _index_files(self, queues: list[FlatQueue]) -> Iterator[Finding]:
        found = _Sum()
        for index in self.flat_store.index.files:
            if index.damage is not None and not index.slot_num:
                continue  # A finding already.
            name = os.path.basename(index.path)
            if not index.compacted and name != str(index.begin_timestamp):
                detail = f"the begin timestamp is {index.begin_timestamp}, the file's name {name}"
                yield Finding(index.path, 4, "bad_index", detail)
            if not _is_linked(index):
                for each in index.survey():
                    if isinstance(each, Finding):
                        yield each
            yield from self._items(index, found)
        if found != self.expected:
            yield from self._wrong_items()
            yield from self._without_item(queues)

    def _items(self, index: FlatIndexFile, found: _Sum) -> Iterator[Finding]:
        newest, whole = None, True
        for first in range(0, index.item_num, _CHUNK):
            items = _item_array(index, first, min(_CHUNK, index.item_num - first))
            times = self._store_times(items)
            known = times >= 0
            named = ~np.isin(items["hash"].astype(np.int64), self.empty_hashes)
            topic_ids = items["topic"].astype(np.int64) if self.topic_ids else np.zeros(len(items), np.int64)
            found.add(
                items["hash"][named].astype(np.int64), topic_ids[named], items["queue"][named].astype(np.int64),
                items["offset"][named].astype(np.int64), items["size"][named].astype(np.int64),
            )  # fmt: skip
            for place in np.flatnonzero(~named & ~known).tolist() if self.topic_ids else ():
                wrong = self._wrong_item(IndexItem(*items[place].item()[:6]))
                if wrong is not None:
                    yield Finding(index.path, _item_pos(index, first + place), "bad_index", wrong)
            # Towards zero, as Java divides.
            after = times - index.begin_timestamp
            seconds = np.sign(after) * (np.abs(after) // 1000)
            for place in np.flatnonzero(known & (seconds != items["seconds"])).tolist():
                detail = f"the item says {int(items['seconds'][place])} s after the file began, its record {int(seconds[place])} s"
                yield Finding(index.path, _item_pos(index, first + place), "bad_index", detail)
            whole = whole and bool(known.all())
            if known.any():
                newest = max(newest or 0, int(times.max()))
        # The newest record may have expired.
        if newest is not None and whole and newest != index.end_timestamp:
            detail = f"the end timestamp is {index.end_timestamp}, the newest item's store time {newest}"
            yield Finding(index.path, 12, "bad_index", detail)

    def _store_times(self, items: np.ndarray) -> np.ndarray:
        # Store time of the record that each item points to, -1 if unknown.
        times = np.full(len(items), -1, np.int64)
        if not self.topic_ids:
            return times
        pairs = items["topic"].astype(np.int64) * 2**32 + items["queue"].astype(np.int64) % 2**32
        for pair in np.unique(pairs).tolist():
            topic_id, queue_id = divmod(pair, 2**32)
            topic = self.topic_ids.get(topic_id)
            queue = self.flat_store.queue(topic, queue_id) if topic is not None and queue_id < 2**31 else None
            if queue is not None:
                places = np.flatnonzero(pairs == pair)
                offsets, sizes = items["offset"][places].astype(np.int64), items["size"][places].astype(np.int32)
                times[places] = _times_at(queue, offsets, sizes)
        return times

    def _wrong_items(self) -> Iterator[Finding]:
        for index in self.flat_store.index.files:
            if index.damage is not None and not index.slot_num:
                continue
            for number in range(index.item_num):
                item = IndexItem(*_item_array(index, number, 1)[0].item()[:6])
                wrong = self._wrong_item(item)
                # Items of empty keys were reported before.
                if wrong is not None and (not self.topic_ids or item.hash not in self.empty_hashes):
                    yield Finding(index.path, _item_pos(index, number), "bad_index", wrong)

    def _wrong_item(self, item: IndexItem) -> str | None:
        topic = self.topic_ids.get(item.topic_id)
        if self.topic_ids and topic is None:
            return f"the item is of topic {item.topic_id}, which the metadata do not have"
        names = [topic] if topic is not None else sorted({name for name, _ in self.flat_store.keys()})
        for name in names:
            queue = self.flat_store.queue(name, item.queue_id) if item.queue_id >= 0 else None
            if queue is None or item.log_offset < 0:
                continue
            hole = queue.log.hole_at(item.log_offset)
            if item.log_offset < queue.log.min_offset or (hole is not None and hole.finding.kind == EXPIRED):
                return None  # Its record expired.
            message = queue.log.look_up(item.log_offset, item.size)
            if message is not None and any(flat_index_hash(name, key) == item.hash for key in _indexed_keys(message)):
                return None
        place = f"log offset {item.log_offset}, {item.size} bytes, of queue {item.queue_id}"
        return f"no message with a key of hash {item.hash} at {place}"

    def _without_item(self, queues: list[FlatQueue]) -> Iterator[Finding]:
        for queue in queues:
            for queue_offset in range(queue.min_queue_offset, self.flat_store.keys_of(queue).indexed_to):
                unit = queue.unit_at(queue_offset)
                message = None if unit is None else queue.log.look_up(unit[0], unit[1])
                if message is None:
                    continue
                for key in sorted(_indexed_keys(message) - {""}):
                    if not self.flat_store.keys_of(queue).has_item(message, key):
                        detail = f"queue offset {queue_offset} of {queue.topic}/{queue.queue_id}: no index file has its key {key}"
                        yield Finding(*queue.log.place_of(message.phy_offset), "not_indexed", detail)


class _Covered:
    """The units of a queue that belong to a record: a byte for each unit of each file."""

    def __init__(self, queue: FlatQueue):
        self._files: list[tuple[int, bytearray]] = []
        for base in queue.units.bases:
            mapped_file = queue.units.find(base)
            size = 0 if mapped_file is None else mapped_file.size
            first = max(-(-base // UNIT_SIZE), queue.min_queue_offset)
            self._files.append((first, bytearray(max((base + size) // UNIT_SIZE - first, 0))))

    def add(self, queue_offsets: np.ndarray) -> None:
        """Mark these units as covered; those that no file has are skipped."""
        for first, marks in self._files:
            inside = queue_offsets[(queue_offsets >= first) & (queue_offsets < first + len(marks))]
            if len(inside):
                np.frombuffer(marks, np.uint8)[inside - first] = 1

    def next_missing(self, queue_offset: int) -> int | None:
        """Return the first unit at or after `queue_offset` that is not covered; None for none."""
        for first, marks in self._files:
            place = marks.find(0, max(queue_offset - first, 0))
            if place >= 0:
                return first + place
        return None


class _Sum:
    """The number of items, and a sum over them that does not depend on their order."""

    def __init__(self) -> None:
        self.num = self.total = 0

    def add(self, hashes: Any, topic_ids: Any, queue_ids: Any, offsets: Any, sizes: Any) -> None:
        """Add items: an array of hashes; the rest arrays of the same length, or numbers."""
        with np.errstate(over="ignore"):
            mixed = _unsigned(hashes) * np.uint64(_MIX[0]) + _unsigned(queue_ids) * np.uint64(_MIX[1])
            mixed = mixed + _unsigned(offsets) * np.uint64(_MIX[2]) + _unsigned(sizes) * np.uint64(_MIX[3])
            mixed = mixed + _unsigned(topic_ids) * np.uint64(_MIX[0] ^ _MIX[2])
            mixed ^= mixed >> np.uint64(31)
            mixed = mixed * np.uint64(_MIX[1])
            mixed ^= mixed >> np.uint64(29)
            self.total = (self.total + int(mixed.sum(dtype=np.uint64))) & _MASK
        self.num += len(mixed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sum) and (self.num, self.total) == (other.num, other.total)

    __hash__ = None  # type: ignore[assignment]


def _indexed_keys(message: MessageExt) -> set[str]:
    # Java's split leaves out empty texts at the end.
    pieces = message.properties.get("KEYS", "").rstrip(" ").split(" ") if message.keys else []
    return {*pieces, *([message.unique_key] if message.unique_key else [])}


def _unsigned(values: Any) -> Any:
    return np.asarray(values, np.int64).astype(np.uint64)


def _times_at(queue: FlatQueue, offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    times = np.full(len(offsets), -1, np.int64)
    out = ArrowColumns(("store_timestamp",), max(len(offsets), 1))
    taken = np.zeros(len(offsets), np.uint8)
    for part, regions, bases, numbers in queue.log.located(offsets):
        out.fill_at(regions, bases, numbers, offsets[part], sizes[part], taken[part])
    if out.count:
        _, parts, _ = out.take()
        times[taken != 0] = np.frombuffer(parts["store_timestamp"][0], np.int64)[: int(taken.sum())]
    return times


def _item_type(index: FlatIndexFile) -> Any:
    fields = [("hash", ">i4"), ("topic", ">i4"), ("queue", ">i4"), ("offset", ">i8"), ("size", ">i4"), ("seconds", ">i4")]
    return np.dtype(fields if index.compacted else [*fields, ("previous", ">i4")])


def _item_pos(index: FlatIndexFile, number: int) -> int:
    # Items are numbered from 0; the first place of an unsealed file is unused.
    begin = HEADER_SIZE + SLOT_SIZE * index.slot_num
    return begin + (COMPACTED_ITEM_SIZE * number if index.compacted else UNSEALED_ITEM_SIZE * (number + 1))


def _item_array(index: FlatIndexFile, first: int, num: int) -> np.ndarray:
    kind = _item_type(index)
    return np.frombuffer(index.file.region.read(_item_pos(index, first), num * kind.itemsize), kind)


def _field(index: FlatIndexFile, name: str) -> np.ndarray:
    # One field of all items.
    steps = range(0, index.item_num, _CHUNK)
    parts = [_item_array(index, at, min(_CHUNK, index.item_num - at))[name].astype(np.int64) for at in steps]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _is_linked(index: FlatIndexFile) -> bool:
    # True if each slot points to its items and to no others, and the header has their number; `survey` names what is wrong.
    slots = np.frombuffer(index.file.region.read(HEADER_SIZE, SLOT_SIZE * index.slot_num), ">i4").reshape(-1, 2)
    heads, lengths = slots[:, 0].astype(np.int64), slots[:, 1].astype(np.int64)
    hashes = _field(index, "hash")
    if (hashes < 0).any():
        return False
    if index.compacted:
        ends = HEADER_SIZE + SLOT_SIZE * index.slot_num + np.cumsum(lengths)
        if (lengths < 0).any() or (lengths % COMPACTED_ITEM_SIZE).any() or (heads != ends - lengths).any():
            return False
        owners = np.repeat(np.arange(index.slot_num), lengths // COMPACTED_ITEM_SIZE)
        return (
            len(owners) == index.item_num
            and bool((owners == hashes % index.slot_num).all())
            and int(np.count_nonzero(lengths)) == index.used_slots
        )
    owners = hashes % index.slot_num
    order = np.argsort(owners, kind="stable")
    numbers = order + 1
    same = np.diff(owners[order]) == 0
    expected = np.zeros(index.item_num, np.int64)
    expected[order[1:][same]] = numbers[:-1][same]
    previous = _field(index, "previous")
    newest = np.zeros(index.slot_num, np.int64)
    newest[owners[order]] = numbers
    return bool(
        (previous == expected).all() and (heads == newest).all() and np.count_nonzero(newest) == index.used_slots
    )
