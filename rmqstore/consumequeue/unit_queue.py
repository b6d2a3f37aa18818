"""What simple and batch queues share: files of units of one size, found by number.

Owns the files of one queue and where its units end.  What a unit says, and at which queue offset it stands, is known to
`ConsumeQueue` and `BatchConsumeQueue`.  It never reads the commit log.  Owns the search by store time too: times do not have to
rise, as clocks step back and jump ahead, so a block of units is skipped only where the times of all of them are known.
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
"""What makes a file of a queue again."""

NO_TAGS_CODE = EXT_ADDRESS_MAX
"""Stands for a tags code that is lost: an address in an extension that leads nowhere, so that the record decides."""


class Unit(NamedTuple):
    """One unit as queried: `queue_offset` is its (first) ordinal, `num` how many messages its record holds."""

    queue_offset: int
    phy_offset: int
    size: int
    tags_code: int
    num: int = 1


class UnitQueue(NotCopied):
    """What simple and batch queues share: files of units, found by number."""

    kind: str
    # The queue's type as RocketMQ names it (CQType).
    cq_type: str
    unit_size: int
    # Where tags codes and times are that a unit has no room for; None where units have them.
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
                # A reader of many queues touches a page or two of each, and units are small: what the system reads ahead around
                # a page, holes too, would fill the memory of a container.
                "random" if read_only else "normal",
                REPAIR,
            ),
        )
        if file_size != usual:
            self.files.of_all_files = GeometryError(
                f"the files of this queue have {file_size} bytes where the store's others have {usual}: a broker takes one size "
                "and ends at the other. Readers read all of them. For a broker, rebuild the queues from the log "
                "(rmqstore rebuild --what consumequeue)",
                directory,
                0,
            )
        self.units_per_file = file_size // self.unit_size
        # When a reader beside a writer looked last (`time.monotonic`).
        self.refreshed_at = -1.0
        self._forget()
        self._warned_of: set[int] = set()

    def _forget(self) -> None:
        # What is known of units that may go, or become others.
        # What `bounds` found last: the commit log's min offset, and the number of the first unit at or after it.
        self.min_for = None
        self.times = UnitTimes()

    def load(self) -> None:
        """Find the files and the end: the first unit that was never written.  Nothing is changed.

        A last file without a unit (RocketMQ 5.5.0 gains a bogus unit from one) counts as absent; `tidy` deletes it.
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
        """int: the lowest phy offset of units that lie behind the end, after one that was lost; -1 where there is none."""
        end = self.files.wrote_where
        mapped_file = self.files.find(end)
        if mapped_file is None:
            return -1
        first = end - mapped_file.file_from_offset
        last = mapped_file.last_nonzero(first)
        places = range(first, min(last, mapped_file.size - self.unit_size + 1), self.unit_size)
        found = (_place_of_record(mapped_file.region, pos) for pos in places)
        return min((phy_offset for phy_offset in found if phy_offset >= 0), default=-1)

    def torn_units(self) -> list[int]:
        """list of int: numbers of the units in which a file that was cut short ends: their tags codes may be lost."""
        ends = [
            (offset_of_name(os.path.basename(problem.path)) or 0) + problem.pos
            for problem in self.files.damaged()
            if problem.path is not None and problem.pos is not None
        ]
        return [end // self.unit_size for end in ends if end % self.unit_size]

    def warn_of_lost(self, begin: int, end: int) -> None:
        """Say, once for each place, that the units of these queue offsets are lost, past which somebody reads."""
        if begin not in self._warned_of:
            self._warned_of.add(begin)
            logger.warning(
                "%s: no unit of queue %s/%d is there for queue offsets %d to %d; these messages are left out. To have "
                "them again, %s",
                self.files.path, self.topic, self.queue_id, begin, end - 1, REPAIR,
            )  # fmt: skip

    def leads_before(self, number: int, phy_offset: int) -> bool:
        """bool: a unit from `number` on, in its file, leads to a record before `phy_offset`."""
        mapped_file = self._file_of_unit(number)
        if mapped_file is None:
            return False
        end = min(self.files.wrote_where - mapped_file.file_from_offset, mapped_file.size - self.unit_size + 1)
        places = range(number * self.unit_size - mapped_file.file_from_offset, end, self.unit_size)
        return any(0 <= _place_of_record(mapped_file.region, pos) < phy_offset for pos in places)

    def tidy(self) -> None:
        """Make the files say what `load` understood: no bytes after the end and no file without a unit."""
        self.files.tidy()
        end = self.files.wrote_where
        if len(self.files) and end == 0:
            self.files.destroy()
        else:
            self.files.truncate(end)

    def refresh(self) -> None:
        """Take in the units that another process appended since (read-only use); units in memory stand until it is closed."""
        if self.in_memory:
            return
        with self.pool.lock:
            if self.files.was_replaced():
                # The queue was made again: nothing that was known of it stands.
                self.files.forget_files()
                self._forget()
                self.files.relist()
                self.files.wrote_where = self._end()
                return
            self.files.refresh()
            while (mapped_file := self.files.find(self.files.wrote_where)) is not None:
                # Another process only ever appends, so what was counted before still stands.
                base = mapped_file.file_from_offset
                known = (self.files.wrote_where - base) // self.unit_size
                end = base + self.unit_size * _core.count_units(mapped_file.region, self.unit_size, known)
                if end <= self.files.wrote_where:
                    return
                self.files.wrote_where = end

    @property
    def in_memory(self) -> bool:
        """bool: units are put into memory instead of into files (read-only use)."""
        return self.files.in_memory

    @in_memory.setter
    def in_memory(self, value: bool) -> None:
        for files in self.file_lists():
            files.in_memory = value

    @property
    def takes_short_way(self) -> bool:
        """bool: a put leaves one unit of 20 bytes at the end of this queue's files and nothing else, as `Appender` writes it."""
        return False

    def let_go(self) -> None:
        """Let every mapping go; what is asked for again is mapped again."""
        for files in self.file_lists():
            files.let_go()

    @property
    def disk_files(self) -> int:
        """int: how many files of units are on disk."""
        return self.files.disk_num

    @property
    def unit_num(self) -> int:
        """int: number of the unit that is written next; units before the oldest file count."""
        return self.files.wrote_where // self.unit_size

    @property
    def max_queue_offset(self) -> int:
        """int: queue offset of the next message."""
        raise NotImplementedError

    def min_queue_offset(self, min_phy_offset: int) -> int:
        """int: queue offset of the first message that the log still holds; `max_queue_offset` if it holds none."""
        raise NotImplementedError

    @property
    def first_unit(self) -> int:
        """int: number of the first unit for which there is a file."""
        return max(self.files.min_offset, 0) // self.unit_size

    def numbers_of(self, begin: int, end: int) -> Span:
        """Return the numbers of the units from queue offset `begin` to before `end`, first and one after the last."""
        return begin, end

    def numbered_places(self, begin: int, end: int) -> Iterator[Places]:
        """Yield the places of the units with numbers from `begin` to before `end`, some at a time."""
        return self.places(begin, end)

    def spans(self, begin: int, end: int, *, backward: bool = False) -> list[Span]:
        """list of (int, int): the numbers of the units from queue offset `begin` to before `end` for which there are files."""
        begin, end = self.numbers_of(begin, end)
        firsts = (base // self.unit_size for base in self.files.file_offsets)
        found = joined((max(first, begin), min(first + self.units_per_file, end)) for first in firsts)
        return found[::-1] if backward else found

    def _file_of_unit(self, number: int) -> MappedFile | None:
        return self.files.find(number * self.unit_size)

    def first_unit_at_or_after(self, min_phy_offset: int) -> int:
        """int: number of the first unit whose record is at or after `min_phy_offset`.

        Pre-fill units do not count, nor do places whose unit was lost.
        """
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
        """(int, int): `min_queue_offset`, which is never above the second, and `max_queue_offset`."""
        high = self.max_queue_offset
        return min(self.min_queue_offset(min_phy_offset), high), high

    def place_of(self, queue_offset: int) -> tuple[MappedFile, int] | None:
        """Return the file that has the unit for this queue offset, and the unit's position in it; None for no unit."""
        number = self._number_of(queue_offset)
        mapped_file = None if number is None else self._file_of_unit(number)
        if number is None or mapped_file is None:
            return None
        return mapped_file, number * self.unit_size - mapped_file.file_from_offset

    def _number_of(self, queue_offset: int) -> int | None:
        raise NotImplementedError

    def region_of(self, queue_offset: int, count: int) -> tuple[_core.Region, int, int] | None:
        """Return the file with up to `count` units of one message each, the position of the first, and how many; None for none."""
        return None

    def path_of(self, queue_offset: int) -> tuple[str, int | None]:
        """Return the file that has, or had, the unit for this queue offset, and the position in it; the folder where unknown."""
        return self.files.path, None

    def places(self, begin: int, end: int, damage: DamagePolicy | None = None) -> Iterator[Places]:
        """Yield the places of the units from queue offset `begin` up to but not including `end`, some at a time.

        The tags code is `NO_TAGS_CODE` where it is lost, as in a unit within which a file was cut short.

        - `damage`: for callers that know that there were units from `begin` to `end`: takes those that are not there
          (any more). Pre-fill units, and queue offsets that a batch queue has no place for, are not gone.  By default a warning
          names those between others.
        """
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------- compared with records

    def agrees(self, columns: RecordColumns, rows: np.ndarray) -> bool:
        """Return whether the units of these records are known to be there and to be what the records need."""
        return False

    def fill_holes(self, phy_offset: int) -> int:
        """Give each place that lost its message after `phy_offset` a pre-fill unit, where units have places; their number."""
        return 0

    def put(self, unit: Unit, store_timestamp: int, *, extended: bool = True) -> bool:
        """Write the unit of one record; False where it is there already.

        - `extended`: put tags code and time into the extension if the config says so; RocketMQ does not for further queues
          (LMQ).
        """
        raise NotImplementedError

    def cut(self, end_phy_offset: int, before: Callable[[UnitQueue, int], None] | None = None) -> int:
        """Drop the units from the first on whose record does not end at or before `end_phy_offset`; their number.

        - `before`: told the queue and the number of the first unit that goes, before anything is changed.
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
        """Return tags codes, with codes from the extension in place of addresses; an address without a unit stays."""
        return codes

    def _whole_units(self, mapped_file: MappedFile, count: int, end_phy_offset: int) -> int:
        raise NotImplementedError

    def truncate(self, number: int) -> int:
        """Drop the units from `number` on; how many there were."""
        dropped = self.unit_num - number
        self._forget()
        self.files.truncate(number * self.unit_size)
        self.files.wrote_where = number * self.unit_size
        self.tidy()
        return dropped

    def begin_again(self) -> int:
        """Drop every unit: the queue was deleted, and another one of its name begins; how many led to records."""
        dropped = self._record_num()
        self._forget()
        self.files.destroy()
        return dropped

    def _record_num(self) -> int:
        raise NotImplementedError

    def delete_before(self, min_phy_offset: int) -> int:
        """Delete the files whose last unit lies below `min_phy_offset`, oldest first, never the last; their number."""
        deleted = 0
        while len(self.files) > 1:
            if self._last_phy_offset(self.files.file(self.files.offsets[0]).region) >= min_phy_offset:
                break
            self.files.delete_before(self.files.offsets[0] + self.files.mapped_file_size)
            self._forget()
            deleted += 1
        return deleted

    def _last_phy_offset(self, region: _core.Region) -> int:
        # Of the last unit in a full file that leads to a record; -1 for none.  A lost message left a hole, or a pre-fill unit,
        # whose phy offset is 0.
        places = range((self.units_per_file - 1) * self.unit_size, -1, -self.unit_size)
        found = (_place_of_record(region, pos) for pos in places)
        return next((phy_offset for phy_offset in found if phy_offset >= 0), -1)

    def make_room(self, count: int) -> None:
        """Make sure that `count` units can be put, see `MappedFileQueue.make_room`."""
        self.files.make_room(count * self.unit_size)

    def forget_prepared(self) -> None:
        """Leave what was prepared to the parent of this forked process."""
        for files in self.file_lists():
            files.prepared.forget()

    def file_lists(self) -> list[MappedFileQueue]:
        """Return the lists of its files, that of the extension included."""
        return [self.files] if self.ext is None else [self.files, self.ext.files]

    def mapped_files(self) -> Iterator[MappedFile]:
        """Every file, those of the extension included."""
        for files in self.file_lists():
            for base in files.offsets:
                yield files.file(base)

    def take_dirty(self, least_pages: int = 0) -> list[MappedFile]:
        """The files that were written since this was last asked, see `MappedFileQueue.take_dirty`."""
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
    # The phy offset that the unit at `pos` says, simple or batch; -1 of one that leads to no record.
    phy_offset, size, _ = _core.read_unit(region, pos)
    return -1 if size <= 0 or (phy_offset, size) == (0, PRE_FILL_SIZE) else phy_offset


BLOCK_UNITS = 8192
"""The number of units of which times are read at once."""

TimesOf = Callable[[int, int], tuple["np.ndarray", "np.ndarray"]]
"""By the numbers of units, first and one after the last: queue offsets and store times of those that lead to a record."""


class UnitTimes:
    """The least and the greatest store time of each block of units that were read and all lead to records."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def find(self, spans: Iterable[Span], times: tuple[int, int], times_of: TimesOf, *, newest: bool) -> int | None:
        """Return the queue offset of the first unit with a store time in a range; of the last with `newest`; None for none.

        - `times_of`: reads the times of at most `BLOCK_UNITS` units.
        """
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
