"""Consume queues in RocksDB as ordinary queues: their units in memory, in stretches that are built at their first use.

`DatabaseQueues` merges the units of the database, of queue files next to it, and those that were collected from the log because
the database lacks them.  It never reads the log: `complete` reports holes and damage, `add` takes collected units.  The oldest
stretches are dropped.

`CollectedQueues` only collect the units of records of the log, in queue order and each unit once.  They have no files; a queue may
begin at any offset and have holes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rmqstore import _numpy as np
from rmqstore._core import PRE_FILL_SIZE, RecordLayout, UnitLayout
from rmqstore._dispatch import RecordColumns
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import can_name_queue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import CorruptionError, StoreClosedError
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, MemoryFile
from rmqstore.files.mapped_file_queue import MappedFileQueue
from rmqstore.rocksdb.queues import LastUnit, QueueDatabase, Units

__all__ = [
    "STRETCH_UNITS", "CollectedBatchQueue", "CollectedQueue", "CollectedQueues", "CollectedUnits", "DatabaseQueues", "UnitStream",
]  # fmt: skip

logger = logging.getLogger(__name__)

STRETCH_UNITS = 8192
"""The number of units of a stretch; a get ends with it as with a queue file."""

_UNIT_SIZE = int(UnitLayout.UNIT_SIZE)
_STRETCH_SIZE = STRETCH_UNITS * _UNIT_SIZE
_SMALLEST_RECORD = int(RecordLayout.RECORD_FIXED_SIZE)
# The number of stretches in memory, 160 KiB each.
_STRETCHES_KEPT = 1024
_UNIT = [("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")]

_COLUMNS = 5

Key = tuple[str, int]


class CollectedUnits:
    """Units of one queue, by queue offset, from `begin` up to but not including `end`; 0 and 0 without any."""

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._parts: list[tuple[np.ndarray, ...]] = []
        # Other threads read units while more are added.
        self._lock = threading.Lock()

    def renew_lock(self) -> None:
        """Replace the lock after a fork."""
        self._lock = threading.Lock()

    def add(self, *columns: np.ndarray) -> None:
        """Add units: queue offsets (ascending), phy offsets, sizes, tags codes, numbers of messages in each record."""
        first, last = int(columns[0][0]), int(columns[0][-1])
        with self._lock:
            self.begin = min(self.begin, first) if self._parts else first
            self._parts.append(columns)
            self.end = max(self.end, last + 1)

    def first(self) -> Unit | None:
        """Return the unit with the lowest queue offset, None for none."""
        columns = self.columns(self.begin, self.begin + 1)
        return Unit(*(int(each[0]) for each in columns)) if len(columns[0]) else None

    def clear(self) -> int:
        """Forget every unit, and return their number."""
        num = len(self.columns(self.begin, self.end)[0])
        with self._lock:
            self.begin = self.end = 0
            self._parts = []
        return num

    def columns(self, begin: int, end: int) -> tuple[np.ndarray, ...]:
        """Return the units with queue offsets from `begin` up to but not including `end`, like `add`; the first of equal ones."""
        with self._lock:
            if not self._parts:
                return tuple(np.empty(0, np.int64) for _ in range(_COLUMNS))
            if len(self._parts) > 1:
                joined = [np.concatenate(each) for each in zip(*self._parts, strict=True)]
                _, first = np.unique(joined[0], return_index=True)
                self._parts = [tuple(each[first] for each in joined)]
            (part,) = self._parts
        low, high = np.searchsorted(part[0], (begin, end))
        return tuple(each[low:high] for each in part)


class _Collecting:
    # The common part of both kinds of queues that collect their units and have no files.

    def __init__(self, topic: str, queue_id: int):
        self.topic, self.queue_id = topic, queue_id
        self.units_there = CollectedUnits()
        self._last: Unit | None = None

    def load(self) -> None:
        """Do nothing: it has no files."""

    def agrees(self, columns: RecordColumns, rows: np.ndarray) -> bool:
        """Return False: its units are not compared."""
        return False

    def file_end(self, number: int) -> None:
        """Return None: it has no files."""

    def close(self) -> None:
        """Do nothing: it has no files."""

    def last_record(self) -> Unit | None:
        """Return the newest unit, None for none."""
        return self._last

    def first_record(self) -> Unit | None:
        """Return the oldest unit, None for none."""
        return self.units_there.first()

    def begin_again(self) -> int:
        """Forget every unit, like `UnitQueue.begin_again`."""
        self._last = None
        return self.units_there.clear()


class CollectedQueue(_Collecting, ConsumeQueue):
    """A simple queue that collects its units."""

    @property
    def unit_num(self) -> int:
        """The queue offset after the last unit."""
        return self.units_there.end

    def put(self, unit: Unit, store_timestamp: int, *, extended: bool = True) -> bool:
        """Collect one unit."""
        one = [np.array([value], np.int64) for value in (unit.phy_offset, unit.size, unit.tags_code, store_timestamp)]
        return self.put_units(unit.queue_offset, *one) > 0

    def put_units(
        self,
        queue_offset: int,
        phy_offsets: np.ndarray,
        sizes: np.ndarray,
        tags_codes: np.ndarray,
        store_timestamps: np.ndarray,
    ) -> int:
        """Collect consecutive units, see `ConsumeQueue.put_units`; skip those before the end."""
        skip = min(max(self.unit_num - queue_offset, 0), len(phy_offsets))
        count = len(phy_offsets) - skip
        if count <= 0:
            return 0
        first = queue_offset + skip
        # The caller reuses its arrays.
        columns = [np.array(each[skip:], np.int64) for each in (phy_offsets, sizes, tags_codes)]
        self.units_there.add(np.arange(first, first + count, dtype=np.int64), *columns, np.ones(count, np.int64))
        self._last = Unit(first + count - 1, *(int(each[-1]) for each in columns))
        return count


class CollectedBatchQueue(_Collecting, BatchConsumeQueue):
    """A batch queue that collects its units."""

    @property
    def max_queue_offset(self) -> int:
        """The queue offset of the next message."""
        return 0 if self._last is None else self._last.queue_offset + self._last.num

    def put(self, unit: Unit, store_timestamp: int, *, extended: bool = True) -> bool:
        """Collect one unit; False if it is not newer than the last."""
        if self._last is not None and unit.phy_offset <= self._last.phy_offset:
            return False
        self.units_there.add(*(np.array([value], np.int64) for value in unit))
        self._last = unit
        return True


class CollectedQueues(ConsumeQueueStore):
    """Queues that collect the units dispatched to them; none has files."""

    def _make(self, topic: str, queue_id: int) -> AnyConsumeQueue:
        if topic in self._batch_topics:
            return CollectedBatchQueue(topic, queue_id)
        return CollectedQueue(topic, queue_id)

    def forget(self, topic: str, queue_id: int) -> None:
        """Remove a queue from the list."""
        with self._lock:
            self._queues.pop((topic, queue_id), None)

    def collected(self) -> dict[tuple[str, int], CollectedUnits]:
        """Return the units of each queue that has any, by topic and queue id."""
        found = {}
        for queue in self.opened():
            assert isinstance(queue, CollectedQueue | CollectedBatchQueue)
            if queue.last_record() is not None:
                found[queue.topic, queue.queue_id] = queue.units_there
        return found


class UnitStream(MappedFileQueue):
    """The units of one queue as files in memory that are built at their first use."""

    def __init__(self, owner: DatabaseQueues, topic: str, queue_id: int, older: ConsumeQueue | None):
        super().__init__(owner.path, _STRETCH_SIZE, owner.pool, read_only=True)
        self.in_memory = True
        self.owner = owner
        self.topic, self.queue_id = topic, queue_id
        self.older = older
        # The first unit in the database that may still be in the log, and its phy offset; -1 for none.
        self.first_unit = self.first_phy = -1
        # The number of calls of `take_in`.
        self._taken_in = 0
        self.take_in()

    def take_in(self, *, whole: bool = False) -> None:
        """Pick up newly collected units; with `whole` also those before the end."""
        bases, end = self.owner.extent(self)
        known = self.wrote_where
        # The last stretch has room, and readers may hold it.  The database is read without a lock: it may cause a scan of the log,
        # whose threads need the same one.
        grown = [] if whole else [base for base in self._files if base <= known < base + _STRETCH_SIZE and end > known]
        contents = {base: self.owner.content(self, base, end) for base in grown}
        with self.pool.lock:
            if whole:
                self._files = {}
            for base in [base for base in self._files if base + _STRETCH_SIZE > known]:
                if base in contents:
                    self._files[base].region.write(known - base, contents[base][known - base :])
                else:
                    # Another thread built it in the meantime.
                    del self._files[base]
            self.file_offsets, self._memory_only = bases, set(bases)
            self.wrote_where = end
            self._taken_in += 1

    def file(self, offset: int) -> MappedFile:
        """Return the stretch that begins at `offset`, and build it if needed."""
        made = self._files.get(offset)
        while made is None:
            end, taken_in = self.wrote_where, self._taken_in
            content = self.owner.content(self, offset, end)
            new = MemoryFile(self.path, _STRETCH_SIZE, file_from_offset=offset, content=content)
            with self.pool.lock:
                if self._closed:
                    raise StoreClosedError("the store is closed; open it again", self.path)
                # It lacks units that another thread picked up in the meantime.
                if taken_in == self._taken_in:
                    made = self._files.setdefault(offset, new)
            if made is not None:
                self.owner.keep(self, offset)
        return made

    def forget(self, offset: int) -> None:
        """Drop a stretch; the next use builds it again."""
        with self.pool.lock:
            self._files.pop(offset, None)

    def refresh(self) -> bool:
        """Return False: `take_in` picks up new units."""
        return False

    def was_replaced(self) -> bool:
        """Return False: no other process has these files."""
        return False


class DatabaseQueues:
    """The queues of one store that are in RocksDB, or only in the log.

    - `root`, `path`: the directories of the store and of the database.
    - `database`: None if it is unreadable, so that everything comes from the log.
    - `log_bounds`: returns the begin of the log and the end of its last segment; units that point elsewhere are stale.
    - `batch_num`: returns the number of messages of an inner batch by phy offset and size, 0 for no inner batch.
    - `complete`: collects the units of the records between two phy offsets, both None for the whole log, and calls `add`.
    - `damage`: unreadable parts of the database, for which the log was scanned.
    """

    def __init__(
        self,
        root: str,
        path: str,
        database: QueueDatabase | None,
        config: StoreConfig,
        pool: MappedFilePool,
        log_bounds: Callable[[], tuple[int, int]],
        batch_num: Callable[[int, int], int],
        complete: Callable[[int | None, int | None], None],
    ):
        self.root, self.path = root, path
        self.database = database
        self.config, self.pool = config, pool
        self.log_bounds, self.batch_num, self.complete = log_bounds, batch_num, complete
        self.damage: list[CorruptionError] = []
        self._collected: dict[Key, list[CollectedUnits]] = {}
        # Queues that began again and whose units in the database are old.
        self._replaced: set[Key] = set()
        self._kept: dict[tuple[UnitStream, int], None] = {}
        self._lock = threading.Lock()

    def renew_lock(self) -> None:
        """Replace the locks after a fork."""
        self._lock = threading.Lock()
        for known in self._collected.values():
            for units in known:
                units.renew_lock()

    def close(self) -> None:
        """Close the database."""
        if self.database is not None:
            self.database.close()

    # ----------------------------------------------------------------------------------------------- what there is

    def keys(self) -> set[Key]:
        """Return topic and queue id of every queue, without impossible names."""
        there = set(self._collected)
        if self.database is not None:
            there |= self.database.last.keys()
        return {key for key in there if can_name_queue(key[0])}

    def add(self, key: Key, units: CollectedUnits) -> None:
        """Add units that the database may lack; its own take precedence."""
        known = self._collected.setdefault(key, [])
        if units not in known:
            known.append(units)

    def database_of(self, key: Key) -> QueueDatabase | None:
        """Return the database, None if it has no units of this queue, or only of a deleted one of that name."""
        database = self.database
        return None if database is None or key not in database.last or key in self._replaced else database

    def begin_again(self, key: Key) -> None:
        """Forget all units of a queue: a new queue of its name began."""
        self._replaced.add(key)
        self._collected.pop(key, None)

    def is_batch(self, topic: str, queue_id: int) -> bool:
        """Return True if the newest unit of the queue in the database points to an inner batch."""
        database = self.database_of((topic, queue_id))
        if database is None:
            return False
        try:
            value = database.value(topic, queue_id, database.last[topic, queue_id].queue_offset)
        except CorruptionError as error:
            self.report(error)
            return False
        return value is not None and self.batch_num(value[0], value[1]) > 0

    def goes_beyond(self, queue: ConsumeQueue | BatchConsumeQueue) -> bool:
        """Return True if there are units after those in the files of a queue."""
        key = queue.topic, queue.queue_id
        database = self.database_of(key)
        ends = [each.end for each in self._collected.get(key, ())]
        end = max(*ends, 0 if database is None else database.last[key].queue_offset + 1, 0)
        return end > (queue.max_queue_offset if len(queue.files) else 0)

    def queue(self, own: ConsumeQueue | BatchConsumeQueue) -> ConsumeQueue | BatchConsumeQueue:
        """Return the queue with all of its units; `own` has those of its files."""
        if isinstance(own, BatchConsumeQueue):
            return self._batch_queue(own)
        older = own if len(own.files) else None
        queue = ConsumeQueue(self.root, own.topic, own.queue_id, self.config, self.pool, read_only=True)
        stream = UnitStream(self, own.topic, own.queue_id, older)
        queue.ext = None
        queue.files, queue.units_per_file = stream, STRETCH_UNITS
        begin_of_log = self.log_bounds()[0]
        if older is None and not self._collected.get((own.topic, own.queue_id)) and stream.first_phy >= begin_of_log:
            # The bounds need no unit.
            queue.min_for = begin_of_log, stream.first_unit
        return queue

    def _batch_queue(self, queue: BatchConsumeQueue) -> BatchConsumeQueue:
        # RocketMQ 5.5.0 writes one unit a record, without the number of its messages: its batch queues in RocksDB do not work.
        key = queue.topic, queue.queue_id
        units: dict[int, Unit] = {}
        for collected in self._collected.get(key, ()):
            for unit in zip(*(each.tolist() for each in collected.columns(0, 2**62)), strict=True):
                units.setdefault(unit[0], Unit(*unit))
        if self.database_of(key) is not None:
            stored = self._read(key, 0, 2**62)
            arrays = (stored.queue_offsets, stored.phy_offsets, stored.sizes, stored.tags_codes)
            for offset, phy_offset, size, tags_code in zip(*(each.tolist() for each in arrays), strict=True):
                units[offset] = Unit(offset, phy_offset, size, tags_code, max(self.batch_num(phy_offset, size), 1))
        queue.in_memory = True
        end = queue.max_queue_offset
        for offset, one in sorted(units.items()):
            if offset >= end:
                queue.put(one._replace(num=min(one.num, 0x7FFF)), -1)
        return queue

    # ------------------------------------------------------------------------------------------------------ units

    def extent(self, stream: UnitStream) -> tuple[list[int], int]:
        """Return the first offsets of the stretches of a queue, and its end, in bytes of the queue."""
        key = stream.topic, stream.queue_id
        # First, as damage there starts a scan of the log, which collects more.
        in_database = self._in_database(key)
        ranges = [(each.begin, each.end) for each in self._collected.get(key, ()) if each.end > each.begin]
        if in_database is not None:
            first, end = in_database
            stream.first_unit, stream.first_phy = first.queue_offset, first.phy_offset
            ranges.append((first.queue_offset, end))
        if stream.older is not None:
            ranges.append((stream.older.first_unit, stream.older.unit_num))
        stretches: set[int] = set()
        for begin, end in ranges:
            stretches.update(range(begin // STRETCH_UNITS, (end - 1) // STRETCH_UNITS + 1))
        end = max((end for _, end in ranges), default=0)
        return [number * _STRETCH_SIZE for number in sorted(stretches)], end * _UNIT_SIZE

    def _in_database(self, key: Key) -> tuple[LastUnit, int] | None:
        # The first unit that may still be in the log, and the end of the units; the last unit if all are stale.
        database = self.database_of(key)
        if database is None:
            return None
        last = database.last[key]
        try:
            first = database.at_or_after(*key, 0)
            begin_of_log, end_of_log = self.log_bounds()
            if first is None or first.phy_offset >= end_of_log:
                return None
            low, high = first.queue_offset, last.queue_offset + 1
            if last.phy_offset >= end_of_log:
                # The log was cut after these units were written.
                high = self._bound(key, low, high, end_of_log)
            if first.phy_offset < begin_of_log:
                first = database.at_or_after(*key, min(self._bound(key, low, high, begin_of_log), high - 1))
            newest = database.at_or_before(*key, high - 1)
        except CorruptionError as error:
            self.report(error)
            return None
        if first is None or newest is None:
            return None
        span = newest.queue_offset - first.queue_offset
        if not 0 <= span <= max(newest.phy_offset - first.phy_offset, 0) // _SMALLEST_RECORD + 1:
            text = (
                f"the units of {key[0]}/{key[1]} go from queue offset {first.queue_offset} to {newest.queue_offset}, which "
                "the log between their records has no room for"
            )
            self.report(CorruptionError(text, self.path))
            return None
        return first, newest.queue_offset + 1

    def _bound(self, key: Key, low: int, high: int, phy_offset: int) -> int:
        # The first queue offset from `low` whose unit is at or after `phy_offset`, at most `high`.
        assert self.database is not None
        while low < high:
            middle = (low + high) // 2
            found = self.database.at_or_after(*key, middle)
            if found is None or found.phy_offset >= phy_offset:
                high = middle
            else:
                low = found.queue_offset + 1
        return low

    def _read(self, key: Key, begin: int, end: int) -> Units:
        # The readable units of these queue offsets in the database.
        damage: list[CorruptionError] = []
        assert self.database is not None
        found = self.database.units(*key, begin, end, damage)
        for error in damage:
            self.report(error)
        return found

    def content(self, stream: UnitStream, base: int, end: int) -> bytes:
        """Return the units of the stretch at `base`, up to `end` (bytes of the queue); missing ones are pre-fill units."""
        key = stream.topic, stream.queue_id
        first = base // _UNIT_SIZE
        num = min(max(end // _UNIT_SIZE - first, 0), STRETCH_UNITS)
        units = np.zeros(num, np.dtype(_UNIT))
        units["size"] = PRE_FILL_SIZE
        stored = None
        if self.database_of(key) is not None:
            stored = self._read(key, first, first + num)
            self._complete_holes(key, first, num, stored)
        if stream.older is not None:
            _put_older(units, first, stream.older)
        for collected in self._collected.get(key, ()):
            offsets, phy_offsets, sizes, tags_codes, _ = collected.columns(first, first + num)
            at = offsets - first
            units["phy_offset"][at], units["size"][at], units["tags_code"][at] = phy_offsets, sizes, tags_codes
        content = units.view(np.uint8).reshape(num, _UNIT_SIZE)
        if stored is not None and len(stored.queue_offsets):
            content[stored.queue_offsets - first] = stored.values[:, :_UNIT_SIZE]
        return content.tobytes()

    def _complete_holes(self, key: Key, first: int, num: int, stored: Units) -> None:
        # Queue offsets with gaps: a broker that was killed lost units of records that are in the log.
        assert self.database is not None
        database = self.database
        offsets, phy_offsets = stored.queue_offsets, stored.phy_offsets
        # A gap may begin in a stretch before this one and end in one after it.
        before = after = None
        if first and (not len(offsets) or offsets[0] > first):
            before = database.at_or_before(*key, first - 1)
        if not len(offsets) or offsets[-1] < first + num - 1:
            after = database.at_or_after(*key, first + num)
        gaps = np.flatnonzero(np.diff(offsets) != 1)
        begins = [int(phy_offsets[gap]) for gap in gaps[:1]]
        ends = [int(phy_offsets[gap + 1]) for gap in gaps[-1:]]
        if before is not None:
            begins.append(before.phy_offset)
            ends += [int(each) for each in phy_offsets[:1]]
        if after is not None:
            begins += [int(each) for each in phy_offsets[-1:]]
            ends.append(after.phy_offset)
        if begins and ends and min(begins) < max(ends):
            self.complete(min(begins), max(ends))

    def report(self, error: CorruptionError) -> None:
        """Note damage in the database; the first one makes `complete` scan the whole log."""
        known = {each.message for each in self.damage}
        if error.message not in known:
            logger.warning("%s: %s; missing units are taken from the log", error.path, error.message)
            self.damage.append(error)
        if not known:
            self.complete(None, None)

    def keep(self, stream: UnitStream, offset: int) -> None:
        """Note a new stretch; drop the oldest if there are too many."""
        with self._lock:
            self._kept[stream, offset] = None
            while len(self._kept) > _STRETCHES_KEPT:
                oldest = next(iter(self._kept))
                del self._kept[oldest]
                oldest[0].forget(oldest[1])


def _put_older(units: np.ndarray, first: int, older: ConsumeQueue) -> None:
    at = max(first, older.first_unit)
    end = min(first + len(units), older.unit_num)
    while at < end:
        phy_offsets, sizes, tags_codes = older.units(at, end - at)
        if not len(phy_offsets):
            return
        if older.ext is not None:
            found = [older.tags_code(unit) for unit in older.read(at, len(phy_offsets))]
            if len(found) == len(tags_codes):
                tags_codes = np.array([0 if code is None else code for code in found], np.int64)
        part = slice(at - first, at - first + len(phy_offsets))
        units["phy_offset"][part], units["size"][part], units["tags_code"][part] = phy_offsets, sizes, tags_codes
        at += len(phy_offsets)
