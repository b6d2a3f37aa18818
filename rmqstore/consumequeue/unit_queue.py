"""The base of simple and batch queues: files of units of one size, found by number.

Owns the files of one queue and the end of its units; `ConsumeQueue` and `BatchConsumeQueue` interpret the units.  It never reads
the commit log.  Owns the search by store time too: clocks step back and jump ahead, so a block of units is skipped only if the
times of all of them are known.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import EXT_ADDRESS_MAX, PRE_FILL_SIZE
from rmqstore._dispatch import RecordColumns
from rmqstore._rows import FileEnd
from rmqstore.config import StoreConfig, is_usual_size, own_size
from rmqstore.consumequeue.queue_folders import queue_directory
from rmqstore.errors import GeometryError
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, NotCopied, offset_of_name
from rmqstore.files.mapped_file_queue import Handling, MappedFileQueue
from rmqstore.sources import DamagePolicy, Places
from rmqstore.spans import Span, joined

if TYPE_CHECKING:
    from rmqstore.consumequeue.consume_queue_ext import ConsumeQueueExt

__all__ = ["BLOCK_UNITS", "UnitTimes"]

logger = logging.getLogger(__name__)

UNIT_SIZE = int(_core.UnitLayout.UNIT_SIZE)


REPAIR = "rebuild the queues from the log (rmqstore rebuild --what consumequeue), which needs no file of them"
"""The way to rebuild a file of a queue."""

NO_TAGS_CODE = EXT_ADDRESS_MAX
"""A lost tags code: an extension address without a unit, so that readers compare the record."""


class Unit(NamedTuple):
    """One unit: `queue_offset` is that of its first message, `num` the number of messages in its record."""

    queue_offset: int
    phy_offset: int
    size: int
    tags_code: int
    num: int = 1


class UnitQueue(NotCopied):
    """A queue: files of units, found by number."""

    kind: str
    # RocketMQ's name of the type (CQType).
    cq_type: str
    unit_size: int
    # Tags codes and times outside of the units.
    ext: ConsumeQueueExt | None = None
    files: MappedFileQueue
    min_for: tuple[int, int] | None
    times: UnitTimes

    def __init__(
        self, root: str, topic: str, queue_id: int, config: StoreConfig, pool: MappedFilePool, *, read_only: bool
    ):
        self.root = root
        self.topic = topic
        self.queue_id = queue_id
        self.config = config
        self.pool = pool
        self.read_only = read_only
        file_size = (
            config.consume_queue_file_size if self.unit_size == UNIT_SIZE else config.batch_consume_queue_file_size
        )
        directory = queue_directory(root, self.kind, topic, queue_id)
        usual = file_size
        if read_only:
            file_size = own_size(directory, usual, self.unit_size)
        self.files = MappedFileQueue(
            directory,
            file_size,
            pool,
            read_only=read_only,
            handling=Handling(
                root,
                lambda: file_size != usual or is_usual_size(root, self.kind, file_size),
                # A reader of many queues touches a page or two of each: read-ahead would fill the memory of a container.
                "random" if read_only else "normal",
                REPAIR,
            ),
        )
        if file_size != usual:
            self.files.of_all_files = GeometryError(
                f"the files of this queue have {file_size} bytes where the store's others have {usual}: a broker fails on them, "
                "readers do not. For a broker, rebuild the queues from the log (rmqstore rebuild --what consumequeue)",
                directory,
                0,
            )
        self.units_per_file = file_size // self.unit_size
        # The time of the last refresh (`time.monotonic`).
        self.refreshed_at = -1.0
        self._forget()
        self._warned_of: set[int] = set()

    def _forget(self) -> None:
        # The log's min offset at the last `first_unit_at_or_after`, and its result.
        self.min_for = None
        self.times = UnitTimes()

    def load(self) -> None:
        """List the files and find the end, the first unit that was never written.  Nothing is changed.

        A last file without a unit (RocketMQ 5.5.0 finds a bogus unit in one) counts as missing; `tidy` deletes it.
        """
        self.files.load()
        self.files.wrote_where = self._end()

    def _end(self) -> int:
        # After the last unit that was written.
        offsets = self.files.offsets
        for base in reversed(offsets):
            count = _core.count_units(self.files.file(base).region, self.unit_size)
            if count or base == offsets[0]:
                return base + count * self.unit_size
        return 0

    def lowest_behind_end(self) -> int:
        """Return the lowest phy offset of units after the end, where one was lost; -1 for none."""
        end = self.files.wrote_where
        mapped_file = self.files.find(end)
        if mapped_file is None:
            return -1
        first = end - mapped_file.file_from_offset
        return min(self._records(mapped_file, first, mapped_file.last_nonzero(first)), default=-1)

    def _records(self, mapped_file: MappedFile, begin: int, end: int) -> Iterator[int]:
        # The phy offsets in units that point to records, from position `begin` to before `end`.
        for pos in range(begin, min(end, mapped_file.size - self.unit_size + 1), self.unit_size):
            phy_offset = _place_of_record(mapped_file.region, pos)
            if phy_offset >= 0:
                yield phy_offset

    def torn_units(self) -> list[int]:
        """Return the numbers of the units within which a file was cut short: their tags codes may be lost."""
        ends = [
            (offset_of_name(os.path.basename(problem.path)) or 0) + problem.pos
            for problem in self.files.damaged()
            if problem.path is not None and problem.pos is not None
        ]
        return [end // self.unit_size for end in ends if end % self.unit_size]

    def warn_of_lost(self, begin: int, end: int) -> None:
        """Log once for each place that the units of these queue offsets are lost."""
        if begin not in self._warned_of:
            self._warned_of.add(begin)
            logger.warning(
                "%s: queue %s/%d lacks the units of queue offsets %d to %d; these messages are left out. To restore "
                "them, %s",
                self.files.path, self.topic, self.queue_id, begin, end - 1, REPAIR,
            )  # fmt: skip

    def leads_before(self, number: int, phy_offset: int) -> bool:
        """Return True if a unit after `number`, in its file, points to a record before `phy_offset`."""
        mapped_file = self._file_of_unit(number)
        if mapped_file is None:
            return False
        base = mapped_file.file_from_offset
        found = self._records(mapped_file, number * self.unit_size - base, self.files.wrote_where - base)
        return any(place < phy_offset for place in found)

    def tidy(self) -> None:
        """Delete bytes after the end, and files without a unit."""
        self.files.tidy()
        end = self.files.wrote_where
        if len(self.files) and end == 0:
            self.files.destroy()
        else:
            self.files.truncate(end)

    def refresh(self) -> None:
        """Pick up units that another process appended (read-only use); units in memory stay until the queue is closed."""
        if self.in_memory:
            return
        with self.pool.lock:
            if self.files.was_replaced():
                # The queue was rebuilt.
                self.files.forget_files()
                self._forget()
                self.files.relist()
                self.files.wrote_where = self._end()
                return
            self.files.refresh()
            while (mapped_file := self.files.find(self.files.wrote_where)) is not None:
                # Another process only appends, so the known units stay.
                base = mapped_file.file_from_offset
                known = (self.files.wrote_where - base) // self.unit_size
                end = base + self.unit_size * _core.count_units(mapped_file.region, self.unit_size, known)
                if end <= self.files.wrote_where:
                    return
                self.files.wrote_where = end

    @property
    def in_memory(self) -> bool:
        """True if units are put into memory instead of into files (read-only use)."""
        return self.files.in_memory

    @in_memory.setter
    def in_memory(self, value: bool) -> None:
        for files in self.file_lists():
            files.in_memory = value

    def file_end(self, number: int) -> FileEnd | None:
        """Return the file that has unit `number`, or gets it next, for compiled code; None if it cannot write the units."""
        return None

    def let_go(self) -> None:
        """Drop every mapping; the next use maps a file again."""
        for files in self.file_lists():
            files.let_go()

    @property
    def disk_files(self) -> int:
        """The number of files of units on disk."""
        return self.files.disk_num

    @property
    def unit_num(self) -> int:
        """The number of the next unit; units before the oldest file count."""
        return self.files.wrote_where // self.unit_size

    @property
    def max_queue_offset(self) -> int:
        """The queue offset of the next message."""
        raise NotImplementedError

    def min_queue_offset(self, min_phy_offset: int) -> int:
        """Return the queue offset of the first message that is still in the log; `max_queue_offset` for none."""
        raise NotImplementedError

    @property
    def first_unit(self) -> int:
        """The number of the first unit in the oldest file."""
        return max(self.files.min_offset, 0) // self.unit_size

    def numbers_of(self, begin: int, end: int) -> Span:
        """Return the unit numbers of the queue offsets from `begin` up to but not including `end`."""
        return begin, end

    def numbered_places(self, begin: int, end: int) -> Iterator[Places]:
        """Yield the places of the units with numbers from `begin` up to but not including `end`, some at a time."""
        return self.places(begin, end)

    def spans(self, begin: int, end: int, *, backward: bool = False) -> list[Span]:
        """Return the spans of unit numbers that have files, for the queue offsets from `begin` up to but not including `end`."""
        begin, end = self.numbers_of(begin, end)
        firsts = (base // self.unit_size for base in self.files.file_offsets)
        found = joined((max(first, begin), min(first + self.units_per_file, end)) for first in firsts)
        return found[::-1] if backward else found

    def _file_of_unit(self, number: int) -> MappedFile | None:
        return self.files.find(number * self.unit_size)

    def first_unit_at_or_after(self, min_phy_offset: int) -> int:
        """Return the number of the first unit whose record is at or after `min_phy_offset`, not of a pre-fill or lost one."""
        known = self.min_for
        if known is not None and known[0] == min_phy_offset:
            return known[1]
        number = self._find_first_unit(min_phy_offset)
        if number < self.unit_num:
            self.min_for = (min_phy_offset, number)
        return number

    def _find_first_unit(self, min_phy_offset: int) -> int:
        end = self.unit_num
        for base in self.files.offsets:
            region = self.files.file(base).region
            first = base // self.unit_size
            high = min(self.units_per_file, end - first)
            if high <= 0:
                break
            at = _core.unit_at_or_after(region, 0, high, min_phy_offset, self.unit_size)
            if at < high:
                return first + at
        return end

    # ------------------------------------------------------------------------------------------------ by queue offset

    def bounds(self, min_phy_offset: int) -> tuple[int, int]:
        """Return `min_queue_offset`, never above the second, and `max_queue_offset`."""
        high = self.max_queue_offset
        return min(self.min_queue_offset(min_phy_offset), high), high

    def place_of(self, queue_offset: int) -> tuple[MappedFile, int] | None:
        """Return the file that has the unit of this queue offset, and its position; None for no unit."""
        number = self._number_of(queue_offset)
        mapped_file = None if number is None else self._file_of_unit(number)
        if number is None or mapped_file is None:
            return None
        return mapped_file, number * self.unit_size - mapped_file.file_from_offset

    def _number_of(self, queue_offset: int) -> int | None:
        raise NotImplementedError

    def region_of(self, queue_offset: int, count: int) -> tuple[_core.Region, int, int] | None:
        """Return the file with up to `count` units of one message each, the position of the first, their number; None for none."""
        return None

    def path_of(self, queue_offset: int) -> tuple[str, int | None]:
        """Return the file, or former file, of the unit for this queue offset, and its position; the folder if unknown."""
        return self.files.path, None

    def places(self, begin: int, end: int, damage: DamagePolicy | None = None) -> Iterator[Places]:
        """Yield the places of the units from queue offset `begin` up to but not including `end`, some at a time.

        A lost tags code, as in a unit within which a file was cut short, is `NO_TAGS_CODE`.

        - `damage`: takes missing units, if all from `begin` to `end` existed; pre-fill units, and queue offsets between the units
          of a batch queue, are not missing.  By default a warning names gaps between units.
        """
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------- compared with records

    def agrees(self, columns: RecordColumns, rows: np.ndarray) -> bool:
        """Return True if the units of these records exist and agree with them."""
        return False

    def fill_holes(self, phy_offset: int) -> int:
        """Write pre-fill units in place of units that were lost after `phy_offset`, and return their number."""
        return 0

    def put(self, unit: Unit, store_timestamp: int, *, extended: bool = True) -> bool:
        """Write the unit of one record; False if it exists.

        - `extended`: put tags code and time into the extension if the config says so; RocketMQ does not for light queues (LMQ).
        """
        raise NotImplementedError

    def cut(self, end_phy_offset: int, before: Callable[[UnitQueue, int], None] | None = None) -> int:
        """Drop all units from the first whose record ends after `end_phy_offset`, and return their number.

        - `before`: called with the queue and the number of the first unit that goes, before any change.
        """
        dropped = 0
        while self.unit_num > self.first_unit:
            mapped_file = self._file_of_unit(self.unit_num - 1)
            if mapped_file is None:
                break
            first = mapped_file.file_from_offset // self.unit_size
            count = self.unit_num - first
            keep = self._whole_units(mapped_file, count, end_phy_offset)
            if keep == count:
                break
            if before is not None:
                before(self, first + keep)
            dropped += count - keep
            self._forget()
            self.files.truncate((first + keep) * self.unit_size)
            self.files.wrote_where = (first + keep) * self.unit_size
            if keep or first == self.first_unit:
                break
            self.files.wrote_where = first * self.unit_size
        if dropped:
            self.tidy()
        return dropped

    def resolved_codes(self, codes: np.ndarray) -> np.ndarray:
        """Return tags codes with extension addresses resolved; an address without a unit stays."""
        return codes

    def _whole_units(self, mapped_file: MappedFile, count: int, end_phy_offset: int) -> int:
        raise NotImplementedError

    def truncate(self, number: int) -> int:
        """Drop the units from `number`, and return their number."""
        dropped = self.unit_num - number
        self._forget()
        self.files.truncate(number * self.unit_size)
        self.files.wrote_where = number * self.unit_size
        self.tidy()
        return dropped

    def begin_again(self) -> int:
        """Drop every unit, as the queue was deleted and begins again; return the number of units that pointed to records."""
        dropped = self._record_num()
        self._forget()
        self.files.destroy()
        return dropped

    def _record_num(self) -> int:
        raise NotImplementedError

    def delete_before(self, min_phy_offset: int) -> int:
        """Delete the files whose last unit is below `min_phy_offset`, oldest first, never the last; return their number."""
        deleted = 0
        while len(self.files) > 1:
            if self._last_phy_offset(self.files.file(self.files.offsets[0]).region) >= min_phy_offset:
                break
            self.files.delete_before(self.files.offsets[0] + self.files.mapped_file_size)
            self._forget()
            deleted += 1
        return deleted

    def _last_phy_offset(self, region: _core.Region) -> int:
        # The phy offset in the last unit of a full file that points to a record; -1 for none.
        places = range((self.units_per_file - 1) * self.unit_size, -1, -self.unit_size)
        found = (_place_of_record(region, pos) for pos in places)
        return next((phy_offset for phy_offset in found if phy_offset >= 0), -1)

    def make_room(self, count: int) -> None:
        """Allocate space for `count` units, see `MappedFileQueue.make_room`."""
        self.files.make_room(count * self.unit_size)

    def forget_prepared(self) -> None:
        """Leave the prepared files to the parent of this forked process."""
        for files in self.file_lists():
            files.prepared.forget()

    def file_lists(self) -> list[MappedFileQueue]:
        """Return the lists of its files, with that of the extension."""
        return [self.files] if self.ext is None else [self.files, self.ext.files]

    def mapped_files(self) -> Iterator[MappedFile]:
        """Yield every file, with those of the extension."""
        for files in self.file_lists():
            for base in files.offsets:
                yield files.file(base)

    def take_dirty(self, least_pages: int = 0) -> list[MappedFile]:
        """Return the files that were written since the last call, see `MappedFileQueue.take_dirty`."""
        files = self.files.take_dirty(least_pages)
        return files if self.ext is None else files + self.ext.files.take_dirty()

    def flush(self) -> None:
        """Force everything written to the disk."""
        for mapped_file in self.take_dirty():
            mapped_file.flush()

    def close(self) -> None:
        """Close the files."""
        for files in self.file_lists():
            files.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topic!r}, {self.queue_id})"


def _place_of_record(region: _core.Region, pos: int) -> int:
    # The phy offset in the unit at `pos`, simple or batch; -1 if it points to no record.
    phy_offset, size, _ = _core.read_unit(region, pos)
    return -1 if size <= 0 or (phy_offset, size) == (0, PRE_FILL_SIZE) else phy_offset


BLOCK_UNITS = 8192
"""The number of units whose times are read at once."""

TimesOf = Callable[[int, int], tuple["np.ndarray", "np.ndarray"]]
"""Takes the first unit number and one after the last; returns queue offsets and store times of units that point to records."""


class UnitTimes:
    """The least and the greatest store time of each block of units that were read and all point to records."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def find(self, spans: Iterable[Span], times: tuple[int, int], times_of: TimesOf, *, newest: bool) -> int | None:
        """Return the queue offset of the first unit with a store time in a range; of the last with `newest`; None for none."""
        low, high = times
        for begin, end in spans:
            blocks = range(begin // BLOCK_UNITS, -(-end // BLOCK_UNITS))
            for block in reversed(blocks) if newest else blocks:
                known = self._known.get(block)
                if known is not None and (known[1] < low or known[0] > high):
                    continue
                first, last = max(begin, block * BLOCK_UNITS), min(end, (block + 1) * BLOCK_UNITS)
                queue_offsets, stored = times_of(first, last)
                if len(stored) == BLOCK_UNITS:
                    self._known[block] = int(stored.min()), int(stored.max())
                found = np.flatnonzero((stored >= low) & (stored <= high))
                if len(found):
                    return int(queue_offsets[found[-1 if newest else 0]])
        return None
