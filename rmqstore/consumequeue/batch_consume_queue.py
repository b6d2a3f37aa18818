"""Batch queues (``batchconsumequeue``): 46-byte units, for topics of queue type BatchCQ.

Owns the fields of a unit and the search by queue offset.  It never reads the commit log.  A damaged unit is skipped or corrected
by its neighbours, never trusted.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import partial
from typing import Any

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore.consumequeue.unit_queue import NO_TAGS_CODE, Unit, UnitQueue
from rmqstore.errors import CorruptionError, OffsetOutOfRangeError
from rmqstore.files.mapped_file import MappedFile
from rmqstore.sources import STEP, DamagePolicy, Places
from rmqstore.spans import Span

_BATCH_UNIT_SIZE = int(_core.BatchUnitLayout.BATCH_UNIT_SIZE)
_UNIT: Any = {
    "names": ["phy", "size", "base"],
    "formats": [">i8", ">i4", ">i8"],
    "offsets": [
        int(_core.BatchUnitLayout.BATCH_UNIT_PHY_OFFSET),
        int(_core.BatchUnitLayout.BATCH_UNIT_RECORD_SIZE),
        int(_core.BatchUnitLayout.BATCH_UNIT_BASE_OFFSET),
    ],
    "itemsize": _BATCH_UNIT_SIZE,
}
_INT64_MAX = 2**63 - 1
# Phy offset, size, tags code, store timestamp, base queue offset, number of messages.
_Fields = tuple[int, int, int, int, int, int]


class BatchConsumeQueue(UnitQueue):
    """A batch queue: 46-byte units that hold one record each, found by the base queue offset of the record.

    Used for topics of queue type BatchCQ (RocketMQ 5.0 and later); a record may hold many messages (an inner batch).
    """

    kind = "batchconsumequeue"
    cq_type = "BatchCQ"
    unit_size = _BATCH_UNIT_SIZE

    def _read(self, number: int) -> _Fields:
        mapped_file = self._file_of_unit(number)
        if mapped_file is None:
            raise CorruptionError(f"the file of unit {number} is missing; rebuild the queue", self.files.path)
        return _core.read_batch_unit(mapped_file.region, number * _BATCH_UNIT_SIZE - mapped_file.file_from_offset)

    def unit_of(self, number: int) -> Unit:
        """Return the unit with this number as it is stored."""
        phy_offset, size, tags_code, _, base_offset, num = self._read(number)
        return Unit(base_offset, phy_offset, size, tags_code, num)

    def units(self, number: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read up to `count` units from this one, as they are stored, up to the end of its file.

        - Returns (int64 array, int32 array, int64 array): phy offsets, sizes, base queue offsets; empty without a file.
        """
        mapped_file = self._file_of_unit(number) if number < self.unit_num else None
        if mapped_file is None:
            return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)
        count = min(count, self.unit_num - number, self.units_per_file - number % self.units_per_file)
        pos = number * _BATCH_UNIT_SIZE - mapped_file.file_from_offset
        units: Any = np.frombuffer(mapped_file.region.read(pos, count * _BATCH_UNIT_SIZE), np.dtype(_UNIT))
        return units["phy"].astype(np.int64), units["size"].astype(np.int32), units["base"].astype(np.int64)

    @property
    def max_queue_offset(self) -> int:
        """The queue offset of the next message."""
        if self.unit_num <= self.first_unit:
            return 0
        unit = self.unit_of(self.unit_num - 1)
        # A damaged unit may have any queue offset.
        return min(max(unit.queue_offset + max(unit.num, 1), 0), _INT64_MAX)

    def min_queue_offset(self, min_phy_offset: int) -> int:
        """Return the base queue offset of the first record that is still in the log; `max_queue_offset` for none."""
        number = self.first_unit_at_or_after(min_phy_offset)
        return max(self.unit_of(number).queue_offset, 0) if number < self.unit_num else self.max_queue_offset

    def unit(self, queue_offset: int) -> Unit | None:
        """Return the unit whose record holds the message with this queue offset, None for none."""
        number = self._number_of(queue_offset)
        return None if number is None else self.unit_of(number)

    def places(self, begin: int, end: int, damage: DamagePolicy | None = None) -> Iterator[Places]:
        """Yield the places of the units from queue offset `begin` up to but not including `end`, see `UnitQueue.places`."""
        tell = self.warn_of_lost if damage is None else partial(damage.units, self)
        at, number = begin, self.start_of(begin)
        previous = number - 1 if self.follows(number) else -2
        if damage is not None and number == 0:
            # Older units are reported.
            previous = -2
        reached: int | None = None
        while number < self.unit_num and at < end:
            try:
                found = list(self.numbered(number, STEP, reached))
            except OffsetOutOfRangeError:
                if damage is None:
                    raise
                # Its file was deleted since it was listed.
                number = self.next_file_unit(number)
                previous = -2
                continue
            units = []
            for here, unit in found:
                behind = unit.queue_offset + max(unit.num, 1)
                if at < unit.queue_offset and here != previous + 1:
                    tell(at, min(unit.queue_offset, end))
                if unit.queue_offset >= end:
                    at = end
                    break
                previous, at = here, max(at, behind)
                if behind > begin:
                    units.append(unit)
            if units:
                yield Places(
                    np.array([unit.phy_offset for unit in units], np.int64),
                    np.array([unit.queue_offset for unit in units], np.int64),
                    np.array([unit.size for unit in units], np.int32),
                    np.array([unit.tags_code for unit in units], np.int64),
                )
            last, unit = found[-1]
            reached = unit.queue_offset + max(unit.num, 1)
            number = next(self.numbers(last + 1), self.unit_num)
        if damage is not None and at < end:
            tell(at, end)

    def numbers_of(self, begin: int, end: int) -> Span:
        """Return the unit numbers of the queue offsets from `begin` up to but not including `end`."""
        return self.start_of(begin), self.start_of(end)

    def numbered_places(self, begin: int, end: int) -> Iterator[Places]:
        """Yield the places of the units with these numbers, as they are stored and without tags codes."""
        while begin < end:
            phy_offsets, sizes, queue_offsets = self.units(begin, end - begin)
            if len(phy_offsets):
                yield Places(phy_offsets, queue_offsets, sizes, np.full(len(phy_offsets), NO_TAGS_CODE, np.int64))
            begin = begin + len(phy_offsets) if len(phy_offsets) else self.next_file_unit(begin)

    def backward(self, begin: int, end: int) -> Iterator[Unit]:
        """Yield the units from queue offset `begin` up to but not including `end`, the newest first, back to a lost unit."""
        while end > begin:
            unit = self.unit(end - 1)
            if unit is None:
                return
            yield unit
            end = min(unit.queue_offset, end - 1)

    def cuts(self, begin: int, end: int, step: int) -> Iterator[Span]:
        """Yield all of these queue offsets as one part: the place of a unit does not follow from its queue offset."""
        if begin < end:
            yield begin, end

    def numbers(self, start: int) -> Iterator[int]:
        """Yield the numbers of the existing units from `start`."""
        number = self._written_from(start)
        while number < self.unit_num:
            yield number
            number = self._written_from(number + 1)

    def _written_from(self, number: int) -> int:
        # The number of the first existing unit from this one; `unit_num` for none.
        end, offsets = self.unit_num, self.files.file_offsets
        for base in offsets[max(bisect_right(offsets, number * _BATCH_UNIT_SIZE) - 1, 0) :]:
            first = base // _BATCH_UNIT_SIZE
            start, stop = max(number - first, 0), min(self.units_per_file, end - first)
            if start < stop:
                found = _core.written_unit(self.files.file(base).region, start, stop, _BATCH_UNIT_SIZE)
                if found >= 0:
                    return first + found
        return end

    def _written_before(self, number: int) -> int:
        # The number of the last existing unit before this one; -1 for none.
        offsets = self.files.file_offsets
        for base in reversed(offsets[: bisect_left(offsets, number * _BATCH_UNIT_SIZE)]):
            first = base // _BATCH_UNIT_SIZE
            start = min(self.units_per_file, number - first) - 1
            found = _core.written_unit(self.files.file(base).region, start, -1, _BATCH_UNIT_SIZE)
            if found >= 0:
                return first + found
        return -1

    def _number_above(self, queue_offset: int) -> int:
        # The number of the first existing unit whose base is above this queue offset; `unit_num` for none.
        end = self.unit_num

        def is_above(number: int) -> bool:
            fields = self._read(number)
            if fields[1] <= 0:
                number = self._written_from(number)
                if number == end:
                    return True
                fields = self._read(number)
            return fields[4] > queue_offset

        begins = [begin for base in self.files.file_offsets if (begin := base // _BATCH_UNIT_SIZE) < end]
        at = bisect_left(begins, True, key=is_above)
        if at == 0:
            return self._written_from(begins[0]) if begins else end
        first = begins[at - 1]
        numbers = range(first, min(first + self.units_per_file, end))
        return self._written_from(first + bisect_left(numbers, True, 1, key=is_above))

    def _number_of(self, queue_offset: int) -> int | None:
        number = self._written_before(self._number_above(queue_offset))
        return number if self._holds(number, queue_offset) else None

    def _holds(self, number: int, queue_offset: int) -> bool:
        if number < 0:
            return False
        unit = self.unit_of(number)
        return unit.queue_offset <= queue_offset < unit.queue_offset + max(unit.num, 1)

    def read(self, queue_offset: int, count: int) -> Iterator[Unit]:
        """Yield up to `count` units from the one that holds `queue_offset`, up to the end of its file.

        Their queue offsets rise and each holds at least one message: a damaged base or number, which goes back or beyond the next
        unit, is corrected by its neighbours.
        """
        number = self._written_before(self._number_above(queue_offset))
        before = self._written_before(number) if number >= 0 else -1
        if before >= 0 and self._read(before)[4] >= self._read(number)[4]:
            # One of the two bases is damaged, which may hide the unit.
            units = self._around(queue_offset, before - before % self.units_per_file)
            found = list(itertools.islice(units, count))
            if found:
                yield from found
                return
        if self._holds(number, queue_offset):
            for _, unit in self.numbered(number, count):
                yield unit

    def _around(self, queue_offset: int, first: int) -> Iterator[Unit]:
        # The corrected units of the file that begins with unit `first`, from the one that holds the queue offset.
        units = (unit for _, unit in self.numbered(self._written_from(first), self.units_per_file))
        return itertools.dropwhile(lambda unit: not unit.queue_offset <= queue_offset < unit.queue_offset + unit.num, units)

    def numbered(self, number: int, count: int, reached: int | None = None) -> Iterator[tuple[int, Unit]]:
        """Yield number and unit from an existing unit, corrected as in `read`, up to the end of its file."""
        torn = self.torn_units()
        last = min(self.unit_num, number - number % self.units_per_file + self.units_per_file, number + count)
        unit = self.unit_of(number)
        if reached is None:
            reached = unit.queue_offset
        while number < last:
            here = number
            number += 1
            after = self.unit_of(number) if number < last else None
            if after is None or after.size <= 0:
                number = self._written_from(number)
                after = self.unit_of(number) if number < self.unit_num else None
            following = _INT64_MAX if after is None else after.queue_offset
            base, num = unit.queue_offset, max(unit.num, 1)
            if base < reached or reached <= following < base:
                base = reached
            if base < following < base + num:
                num = following - base
            reached = base + num
            yield here, Unit(base, unit.phy_offset, unit.size, NO_TAGS_CODE if here in torn else unit.tags_code, num)
            if after is None:
                return
            unit = after

    def start_of(self, queue_offset: int) -> int:
        """Return the number of a unit after which all with this or a later queue offset are found; `unit_num` for none.

        If a damaged unit may claim or hide the queue offset, it is the first unit of its file, or of all.
        """
        if queue_offset >= self.max_queue_offset:
            return self.unit_num
        number = self._number_of(queue_offset)
        if number is None:
            number = self._number_above(queue_offset)
            before = max(self._written_before(number), 0)
            number = min(self._written_from(before - before % self.units_per_file), number)
        before = self._written_before(number)
        if before >= 0 and number < self.unit_num:
            if self.unit_of(before).queue_offset >= self.unit_of(number).queue_offset:
                return self._written_from(0)
        return number

    def next_file_offset(self, queue_offset: int) -> int:
        """Return the base queue offset of the first unit after `queue_offset`."""
        number = self._number_above(queue_offset)
        return self.unit_of(number).queue_offset if number < self.unit_num else self.max_queue_offset

    def next_file_unit(self, number: int) -> int:
        """Return the number of the first unit of the next existing file."""
        after = number * _BATCH_UNIT_SIZE
        return next((base // _BATCH_UNIT_SIZE for base in self.files.offsets if base > after), self.unit_num)

    def follows(self, number: int) -> bool:
        """Return True if the unit before this one exists, or this is the first of all."""
        return self._written_before(number) == number - 1

    def tags_code(self, unit: Unit) -> int | None:
        """Return the hash of the tags, None if it is lost."""
        return None if unit.tags_code == NO_TAGS_CODE else unit.tags_code

    def _whole_units(self, mapped_file: MappedFile, count: int, end_phy_offset: int) -> int:
        for number in range(count):
            phy_offset, size, *_ = _core.read_batch_unit(mapped_file.region, number * _BATCH_UNIT_SIZE)
            # Lost units have no size.
            if size <= 0 or phy_offset + size > end_phy_offset:
                return number
        return count

    def last_record(self) -> Unit | None:
        """Return the newest unit, None for an empty queue."""
        return self.unit_of(self.unit_num - 1) if self.unit_num > self.first_unit else None

    def first_record(self) -> Unit | None:
        """Return the oldest existing unit, None for none."""
        number = self._written_from(self.first_unit)
        return self.unit_of(number) if number < self.unit_num else None

    def _record_num(self) -> int:
        return sum(1 for _ in self.numbers(self.first_unit))

    def store_timestamp(self, queue_offset: int) -> int:
        """Return the store time (ms since epoch) in the unit that holds `queue_offset`, -1 for none."""
        number = self._number_of(queue_offset)
        return -1 if number is None else self._read(number)[3]

    def sound_end(self, min_phy_offset: int) -> int:
        """Return the number of the first unit that does not continue the one before in phy offset and queue offset."""
        previous: tuple[int, ...] | None = None
        for number in range(self.first_unit, self.unit_num):
            unit = self._read(number)
            if unit[1] <= 0 or unit[5] <= 0 or unit[4] < 0:
                return number
            if previous is not None and (unit[0] < previous[0] + previous[1] or unit[4] != previous[4] + previous[5]):
                return number
            previous = unit
        return self.unit_num

    def repair(self, unit: Unit, store_timestamp: int) -> bool:
        """Overwrite the existing unit of this phy offset, or else of this queue offset, if it differs; True if it was written."""
        queue_offset, phy_offset, size, tags_code, num = unit
        number = self._find_first_unit(phy_offset)
        if number >= self.unit_num or self._read(number)[0] != phy_offset:
            found = self._number_of(queue_offset)
            if found is None:
                return False
            number = found
        mapped_file = self._file_of_unit(number)
        expected = (phy_offset, size, tags_code, store_timestamp, queue_offset, num)
        if mapped_file is None or self._read(number) == expected:
            return False
        pos = number * _BATCH_UNIT_SIZE - mapped_file.file_from_offset
        mapped_file.mark_dirty(pos + _BATCH_UNIT_SIZE)
        _core.write_batch_unit(mapped_file.region, pos, phy_offset, size, tags_code, store_timestamp, queue_offset, num)
        return True

    def put(self, unit: Unit, store_timestamp: int, *, extended: bool = True) -> bool:
        """Append the unit of one record; False if the last unit has its phy offset or a later one."""
        queue_offset, phy_offset, size, tags_code, num = unit
        last = self.last_record()
        if last is not None and phy_offset <= last.phy_offset:
            return False
        mapped_file = self.files.file_for_append()
        pos = self.files.wrote_where - mapped_file.file_from_offset
        mapped_file.mark_dirty(pos + _BATCH_UNIT_SIZE)
        _core.write_batch_unit(mapped_file.region, pos, phy_offset, size, tags_code, store_timestamp, queue_offset, num)
        self.files.wrote_where += _BATCH_UNIT_SIZE
        return True
