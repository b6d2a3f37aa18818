"""Simple consume queues: the place of each message of a queue in the commit log.

Owns the 20-byte units (``consumequeue``), and their entries in the extension, if a queue has one.  It never reads the commit log.
A unit's place follows from its queue offset alone, so that no unit is written twice (RocketMQ 5.5.0 appends and shifts the queue).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from rmqstore import _core, _dispatch
from rmqstore import _numpy as np
from rmqstore._core import EXT_ADDRESS_BASE, EXT_ADDRESS_MAX, PRE_FILL_SIZE
from rmqstore._dispatch import RecordColumns
from rmqstore._rows import FileEnd
from rmqstore._shown import shows
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue_ext import ConsumeQueueExt
from rmqstore.consumequeue.queue_folders import queue_directory
from rmqstore.consumequeue.unit_queue import NO_TAGS_CODE, UNIT_SIZE, Unit, UnitQueue
from rmqstore.errors import InvalidMessageError, OffsetOutOfRangeError
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, name_of_offset
from rmqstore.sources import STEP, DamagePolicy, Places
from rmqstore.spans import Span

# The number of units that are read together backward.
_BACK = 256
_EXT_UNIT_MIN_SIZE = int(_core.ExtUnitLayout.EXT_UNIT_MIN_SIZE)


@shows(
    "bounds", "config", "cq_type", "first_unit", "kind", "last_record", "mapped_files", "max_queue_offset",
    "min_queue_offset", "queue_id", "read", "read_only", "root", "tags_code", "topic",
    "unit", "unit_num", "unit_size", "units",
)  # fmt: skip
class ConsumeQueue(UnitQueue):
    """A simple queue: 20-byte units, number = queue offset.

    Parameters
    ----------
    root : str
        The store's root.
    topic, queue_id
    config : StoreConfig
        `consume_queue_file_size` in bytes.
    pool : MappedFilePool
    read_only : bool
    """

    kind = "consumequeue"
    cq_type = "SimpleCQ"
    unit_size = UNIT_SIZE

    def __init__(
        self,
        root: str,
        topic: str,
        queue_id: int,
        config: StoreConfig,
        pool: MappedFilePool,
        *,
        read_only: bool = False,
    ):
        super().__init__(root, topic, queue_id, config, pool, read_only=read_only)
        self._file_end: FileEnd | None = None
        if config.enable_consume_queue_ext or os.path.isdir(queue_directory(root, "consumequeue_ext", topic, queue_id)):
            self.ext = ConsumeQueueExt(root, topic, queue_id, config, pool, read_only=read_only)

    def load(self) -> None:
        """Load the units and the extension."""
        super().load()
        if self.ext is not None:
            self.ext.load()

    def tidy(self) -> None:
        """Delete bytes after the end, empty files, and entries of the extension without a unit."""
        super().tidy()
        if self.ext is None:
            return
        self.ext.files.tidy()
        if not len(self.files):
            self.ext.files.destroy()
            return
        for base in reversed(self.files.offsets):
            if self._cut_extension(self.units(base // UNIT_SIZE, self.units_per_file)[2]):
                break

    def _cut_extension(self, tags_codes: np.ndarray) -> bool:
        # Cuts the extension after the last entry of these units; False if they have none.  Addresses ascend, except for torn ones.
        addresses = tags_codes[tags_codes <= EXT_ADDRESS_MAX]
        if self.ext is None or not len(addresses):
            return False
        self.ext.truncate(int(addresses.max()))
        return True

    def file_end(self, number: int) -> FileEnd | None:
        """Return the file for unit `number`, which stays mapped, in the same object each time; None for readers and extensions."""
        if self.ext is not None or self.read_only:
            return None
        if self._file_end is None:
            self._file_end = FileEnd(self.files)
        before, mapped_file = self._file_end.mapped_file, self._file_of_unit(min(number, self.unit_num))
        if before is not mapped_file and before is not None and before.file_from_offset != self.files.offsets[-1]:
            before.appended = False
            if before.mapped:
                self.pool.admit(before)
        if mapped_file is not None:
            mapped_file.appended = True
            mapped_file.region  # noqa: B018  (mapped now, and marked as used)
        self._file_end.learn(mapped_file, number)
        return self._file_end

    def sound_end(self, min_phy_offset: int) -> int:
        """Return the number of the first unit that a power cut may have torn, `unit_num` for none."""
        return min(self.whole_end(), self._first_unresolved(min_phy_offset))

    def whole_end(self) -> int:
        """Return `unit_num` without torn units at the end, whose phy offset is below those before them in the file."""
        first = max(self.unit_num - 1, 0) // self.units_per_file * self.units_per_file
        phy_offsets, sizes, _ = self.units(first, self.units_per_file)
        torn = _are_torn(phy_offsets, sizes)
        whole = np.flatnonzero(_are_real(phy_offsets, sizes) & ~torn)
        end = int(whole[-1]) + 1 if len(whole) else 0
        return first + end if torn[end:].any() else self.unit_num

    def _first_unresolved(self, min_phy_offset: int) -> int:
        # The number of the first unit without an entry of its own in the extension, `unit_num` for none.  Entries are only
        # appended: an address that is not after the entries of earlier units is torn.  Units before `min_phy_offset` do not count.
        if self.ext is None:
            return self.unit_num
        behind = 0
        for base in self.files.offsets:
            number = base // UNIT_SIZE
            phy_offsets, _, tags_codes = self.units(number, self.units_per_file)
            places = np.flatnonzero(tags_codes <= EXT_ADDRESS_MAX)
            offsets = tags_codes[places] - np.int64(EXT_ADDRESS_BASE)
            ends = np.maximum.accumulate(np.concatenate([[behind], offsets + _EXT_UNIT_MIN_SIZE]))
            is_needed = phy_offsets[places] >= min_phy_offset
            torn = np.flatnonzero(is_needed & (offsets < ends[:-1]))
            needed = np.flatnonzero(is_needed)
            count = self.ext.agreeing(tags_codes[places[needed]])
            found = [*torn[:1].tolist(), *needed[count : count + 1].tolist()]
            if found:
                return number + int(places[min(found)])
            behind = int(ends[-1])
        return self.unit_num

    def leads_before(self, number: int, phy_offset: int) -> bool:
        """Return True if a whole unit after `number`, in its file, points to a record before `phy_offset`."""
        first = number - number % self.units_per_file
        phy_offsets, sizes, _ = self.units(first, self.units_per_file)
        older = _are_real(phy_offsets, sizes) & ~_are_torn(phy_offsets, sizes) & (phy_offsets < phy_offset)
        return bool(older[number - first :].any())

    @property
    def max_queue_offset(self) -> int:
        """The queue offset of the next message."""
        return self.unit_num

    def min_queue_offset(self, min_phy_offset: int) -> int:
        """Return the queue offset of the first message that is still in the log; `max_queue_offset` for none."""
        return self.first_unit_at_or_after(min_phy_offset)

    def unit(self, queue_offset: int) -> Unit | None:
        """Return the unit at `queue_offset`, None for no unit or a pre-fill unit."""
        place = self.place_of(queue_offset)
        if place is None:
            return None
        phy_offset, size, tags_code = _core.read_unit(place[0].region, place[1])
        is_real = size > 0 and (phy_offset, size) != (0, PRE_FILL_SIZE)
        return Unit(queue_offset, phy_offset, size, tags_code) if is_real else None

    def _number_of(self, queue_offset: int) -> int | None:
        return queue_offset if self.first_unit <= queue_offset < self.unit_num else None

    def units(self, queue_offset: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read up to `count` units from `queue_offset`, up to the end of its file.

        - Returns (int64 array, int32 array, int64 array): phy offsets, sizes, tags codes; empty without a file.
        """
        # The end first: a file that is opened later holds all units before it.
        end = self.unit_num
        mapped_file = self._file_of_unit(queue_offset) if queue_offset < end else None
        if mapped_file is None:
            return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)
        end = min(end, (mapped_file.file_from_offset // UNIT_SIZE) + self.units_per_file)
        return _core.read_units(
            mapped_file.region,
            queue_offset * UNIT_SIZE - mapped_file.file_from_offset,
            max(0, min(count, end - queue_offset)),
        )

    def agrees(self, columns: RecordColumns, rows: np.ndarray) -> bool:
        """Return True if the units of these records exist and agree with them; the records must have consecutive units."""
        number, done = int(columns.queue_offset[rows[0]]), 0
        while done < len(rows):
            mapped_file = self._file_of_unit(number) if self.first_unit <= number < self.unit_num else None
            if mapped_file is None:
                return False
            pos = number * UNIT_SIZE - mapped_file.file_from_offset
            count = min(len(rows) - done, self.unit_num - number, (mapped_file.size - pos) // UNIT_SIZE)
            part = rows[done : done + count]
            if _dispatch.agreeing_units(mapped_file.region, pos, columns, part, number, self.ext is None) < count:
                return False
            if self.ext is not None and len(self.differing_tags(number, columns, part)):
                return False
            number += count
            done += count
        return True

    def differing_tags(self, queue_offset: int, columns: RecordColumns, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of `rows` whose tags codes or times differ from the units after `queue_offset` in one file (int64)."""
        codes = self.units(queue_offset, len(rows))[2]
        tags_codes = columns.tags_code[rows]
        differ = codes != tags_codes
        if self.ext is not None:
            places = np.flatnonzero(codes <= EXT_ADDRESS_MAX)
            differ[places] = False
            times = columns.store_timestamp[rows]
            while len(places):
                count = self.ext.agreeing(codes[places], tags_codes[places], times[places])
                if count < len(places):
                    differ[places[count]] = True
                places = places[count + 1 :]
        return np.flatnonzero(differ)

    def region_of(self, queue_offset: int, count: int) -> tuple[_core.Region, int, int] | None:
        """Return the file with up to `count` units, the position of the first, and their number; None for none."""
        files = self.files
        # The end first, see `units`.
        room = files.wrote_where // UNIT_SIZE - queue_offset
        offsets = files.file_offsets
        mapped_file = files.find(queue_offset * UNIT_SIZE)
        if mapped_file is None or room <= 0:
            return None
        region, base = mapped_file.region, mapped_file.file_from_offset
        files.remember(region, base, offsets)
        pos = queue_offset * UNIT_SIZE - base
        return region, pos, min(count, room, self.units_per_file - pos // UNIT_SIZE)

    def read(self, queue_offset: int, count: int) -> Iterator[Unit]:
        """Yield the units of `units` without pre-fill units."""
        phy_offsets, sizes, tags_codes = self.units(queue_offset, count)
        for i, (phy, size, tags) in enumerate(
            zip(phy_offsets.tolist(), sizes.tolist(), tags_codes.tolist(), strict=True), queue_offset
        ):
            if (phy, size) != (0, PRE_FILL_SIZE):
                yield Unit(i, phy, size, tags)

    def path_of(self, queue_offset: int) -> tuple[str, int | None]:
        """Return the file, or former file, of the unit for this queue offset, and its position; the folder if unknown."""
        if not self.disk_files:
            return super().path_of(queue_offset)
        pos = queue_offset * UNIT_SIZE % self.files.mapped_file_size
        return os.path.join(self.files.path, name_of_offset(queue_offset * UNIT_SIZE - pos)), pos

    def places(self, begin: int, end: int, damage: DamagePolicy | None = None) -> Iterator[Places]:
        """Yield the places of the units from queue offset `begin` up to but not including `end`, each part from one file."""
        at = begin
        tell = self.warn_of_lost if damage is None else partial(damage.units, self)
        if damage is not None and self.in_memory:
            # Units that left the front of a database leave no gap between files.
            first = min(self.first_unit_at_or_after(0), end)
            if at < first:
                tell(at, first)
                at = first
        torn = self.torn_units()
        while at < min(self.unit_num, end):
            try:
                phy_offsets, sizes, codes = self.units(at, min(STEP, end - at))
            except OffsetOutOfRangeError:
                # Its file was deleted since it was listed.
                if damage is None:
                    raise
                phy_offsets = sizes = codes = np.empty(0, np.int64)
            if len(phy_offsets):
                if (sizes <= 0).any():
                    # A file was cut short, or a page of it lost.
                    edges = np.flatnonzero(np.diff(np.concatenate([[False], sizes <= 0, [False]])))
                    for first, until in edges.reshape(-1, 2).tolist():
                        tell(at + first, at + until)
                queue_offsets = np.arange(at, at + len(phy_offsets))
                if torn:
                    codes = np.where(np.isin(queue_offsets, torn), NO_TAGS_CODE, codes)
                yield Places(phy_offsets, queue_offsets, sizes, codes)
                at += len(phy_offsets)
            else:
                following = min(self.next_file_offset(at), end)
                tell(at, following)
                at = following
        if damage is not None and at < end:
            tell(at, end)

    def backward(self, begin: int, end: int) -> Iterator[Unit]:
        """Yield the units from queue offset `begin` up to but not including `end`, the newest first."""
        while begin < end:
            first = max(begin, end - _BACK, end - 1 - (end - 1) % self.units_per_file)
            yield from reversed(list(self.read(first, end - first)))
            end = first

    def cuts(self, begin: int, end: int, step: int) -> Iterator[Span]:
        """Yield parts of these queue offsets of about `step` messages that can be read separately."""
        for at in range(begin, end, step):
            yield at, min(at + step, end)

    def next_file_offset(self, queue_offset: int) -> int:
        """Return the first queue offset of the next existing file after `queue_offset`."""
        return next((base // UNIT_SIZE for base in self.files.offsets if base // UNIT_SIZE > queue_offset), self.unit_num)

    def tags_code(self, unit: Unit) -> int | None:
        """Return the hash of the tags, None if it is lost."""
        if unit.queue_offset in self.torn_units():
            return None
        if unit.tags_code > EXT_ADDRESS_MAX:
            return unit.tags_code
        found = self.ext.get(unit.tags_code) if self.ext is not None else None
        return found[0] if found else None

    def resolved_codes(self, codes: np.ndarray) -> np.ndarray:
        """Return tags codes with extension addresses resolved; an address without a unit stays."""
        if self.ext is None:
            return codes
        codes = codes.copy()
        for place in np.flatnonzero(codes <= EXT_ADDRESS_MAX).tolist():
            found = self.ext.get(int(codes[place]))
            if found is not None:
                codes[place] = found[0]
        return codes

    def _whole_units(self, mapped_file: MappedFile, count: int, end_phy_offset: int) -> int:
        phy_offsets, sizes, tags_codes = _core.read_units(mapped_file.region, 0, count)
        # Lost units have no size.
        bad = _are_real(phy_offsets, sizes) & (phy_offsets + sizes > end_phy_offset) | (sizes <= 0)
        keep = int(np.argmax(bad)) if bad.any() else count
        if keep < count:
            self._cut_extension(tags_codes[:keep])
        return keep

    def last_record(self) -> Unit | None:
        """Return the newest unit, None for a queue without units or with a pre-fill unit at its end."""
        return self.unit(self.unit_num - 1)

    def first_record(self) -> Unit | None:
        """Return the oldest unit that points to a record, None for none."""
        # Not cached: a recovery may repair a unit before it.
        return self.unit(self._find_first_unit(0))

    def begin_again(self) -> int:
        """Drop every unit and the extension, see `UnitQueue.begin_again`."""
        dropped = super().begin_again()
        if self.ext is not None:
            self.ext.files.destroy()
        return dropped

    def _record_num(self) -> int:
        files = (self.units(base // UNIT_SIZE, self.units_per_file)[:2] for base in self.files.offsets)
        return sum(int(_are_real(phy_offsets, sizes).sum()) for phy_offsets, sizes in files)

    def put(self, unit: Unit, store_timestamp: int, *, extended: bool = True) -> bool:
        """Write one unit, see `UnitQueue.put` and `put_units`."""
        queue_offset, phy_offset, size, tags_code, _ = unit
        if queue_offset < self.unit_num:
            return False
        self._reach(queue_offset)
        if extended and self.config.enable_consume_queue_ext and self.ext is not None:
            tags_code = self.ext.put(tags_code, store_timestamp)
        mapped_file = self.files.file_for_append(queue_offset * UNIT_SIZE)
        pos = queue_offset * UNIT_SIZE - mapped_file.file_from_offset
        mapped_file.mark_dirty(pos + UNIT_SIZE)
        _core.write_unit(mapped_file.region, pos, phy_offset, size, tags_code)
        self.files.wrote_where = (queue_offset + 1) * UNIT_SIZE
        return True

    def put_units(
        self,
        queue_offset: int,
        phy_offsets: np.ndarray,
        sizes: np.ndarray,
        tags_codes: np.ndarray,
        store_timestamps: np.ndarray,
    ) -> int:
        """Write the units of records with the queue offsets `queue_offset`, +1, …, and return the number of new ones.

        Existing units stay.  Pre-fill units, which readers skip, fill the gap between the end of the queue and `queue_offset`.
        """
        skip = min(max(self.unit_num - queue_offset, 0), len(phy_offsets))
        number = queue_offset + skip
        done = skip
        if done == len(phy_offsets):
            return 0
        self._reach(number)
        if self.config.enable_consume_queue_ext and self.ext is not None:
            tags_codes = np.array(
                [
                    0 if i < skip else self.ext.put(int(tags), int(time))
                    for i, (tags, time) in enumerate(zip(tags_codes, store_timestamps, strict=True))
                ],
                np.int64,
            )
        while done < len(phy_offsets):
            mapped_file = self.files.file_for_append(number * UNIT_SIZE)
            pos = number * UNIT_SIZE - mapped_file.file_from_offset
            count = min(len(phy_offsets) - done, (mapped_file.size - pos) // UNIT_SIZE)
            mapped_file.mark_dirty(pos + count * UNIT_SIZE)
            part = slice(done, done + count)
            _core.write_units(
                mapped_file.region,
                pos,
                np.ascontiguousarray(phy_offsets[part]),
                np.ascontiguousarray(sizes[part]),
                np.ascontiguousarray(tags_codes[part]),
            )
            number += count
            done += count
            self.files.wrote_where = number * UNIT_SIZE
        return done - skip

    def _reach(self, queue_offset: int) -> None:
        # Writes pre-fill units from the end, or from the start of the first file, up to this unit.
        if not 0 <= queue_offset <= (2**63 - 1) // UNIT_SIZE - self.units_per_file:
            raise InvalidMessageError(f"queue offset {queue_offset} has no place in a queue", self.files.path)
        while queue_offset > self.unit_num or (not len(self.files) and queue_offset):
            mapped_file = self.files.file_for_append(queue_offset * UNIT_SIZE)
            first = mapped_file.file_from_offset // UNIT_SIZE
            start = max(self.unit_num, first)
            end = min(queue_offset, first + self.units_per_file)
            if end > start:
                count = end - start
                mapped_file.mark_dirty((end - first) * UNIT_SIZE)
                _core.write_units(
                    mapped_file.region,
                    (start - first) * UNIT_SIZE,
                    np.zeros(count, np.int64),
                    np.full(count, PRE_FILL_SIZE, np.int32),
                    np.zeros(count, np.int64),
                )
            self.files.wrote_where = end * UNIT_SIZE
            if end == queue_offset:
                return

    def fill_holes(self, phy_offset: int) -> int:
        """Write pre-fill units into holes after about `phy_offset` of the log; cut holes and pre-fill units at the end.

        The next opening then finds the same end, the first unwritten place of the newest file.
        """
        filled, is_end = 0, True
        for base in reversed(self.files.offsets):
            first = base // UNIT_SIZE
            count = min(self.units_per_file, self.unit_num - first)
            if count <= 0:
                continue
            mapped_file = self.files.file(base)
            phy_offsets, sizes, _ = _core.read_units(mapped_file.region, 0, count)
            torn = _are_torn(phy_offsets, sizes)
            real = np.flatnonzero(_are_real(phy_offsets, sizes) & ~torn)
            if is_end:
                count = int(real[-1]) + 1 if len(real) else 0
                if first + count < self.unit_num:
                    self.truncate(first + count)
            is_end = is_end and not len(real)
            holes = np.flatnonzero((sizes[:count] <= 0) | torn[:count])
            if len(holes):
                mapped_file.mark_dirty((int(holes[-1]) + 1) * UNIT_SIZE)
                for number in holes.tolist():
                    _core.write_unit(mapped_file.region, number * UNIT_SIZE, 0, PRE_FILL_SIZE, 0)
                filled += len(holes)
            if len(real) and phy_offsets[real[0]] < phy_offset:
                break
        return filled

    def repair(self, unit: Unit, store_timestamp: int) -> bool:
        """Overwrite the existing unit of this queue offset if it differs; True if it was written."""
        queue_offset, phy_offset, size, tags_code, _ = unit
        mapped_file = self._file_of_unit(queue_offset)
        if mapped_file is None:
            return False
        pos = queue_offset * UNIT_SIZE - mapped_file.file_from_offset
        *stored, code = _core.read_unit(mapped_file.region, pos)
        repaired = False
        if self.ext is not None and code <= EXT_ADDRESS_MAX and self.ext.get(code) is not None:
            repaired = self.ext.repair(code, tags_code, store_timestamp)
            tags_code = code
        if stored == [phy_offset, size] and code == tags_code:
            return repaired
        mapped_file.mark_dirty(pos + UNIT_SIZE)
        _core.write_unit(mapped_file.region, pos, phy_offset, size, tags_code)
        return True

    def make_room(self, count: int) -> None:
        """Allocate space for `count` units, also in the extension."""
        super().make_room(count)
        if self.ext is not None and self.config.enable_consume_queue_ext:
            self.ext.make_room(count)

    def delete_before(self, min_phy_offset: int) -> int:
        """Delete old files, see `UnitQueue.delete_before`, and those of the extension that no unit points into."""
        deleted = super().delete_before(min_phy_offset)
        if deleted and self.ext is not None:
            tags_codes = self.units(self.first_unit, self.units_per_file)[2]
            addresses = tags_codes[tags_codes <= EXT_ADDRESS_MAX]
            if len(addresses):
                self.ext.files.delete_before(int(addresses[0]) - EXT_ADDRESS_BASE)
        return deleted


def _are_real(phy_offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    # A mask of the units that point to a record.
    real: np.ndarray = (sizes > 0) & ~((phy_offsets == 0) & (sizes == PRE_FILL_SIZE))
    return real


def _are_torn(phy_offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    # A mask of the units of a file with a lower phy offset than those before them, as if a part was never written.  Equal ones are
    # fine: a record that names a light message queue twice has two units there.
    if not len(phy_offsets):
        return np.zeros(0, bool)
    real = _are_real(phy_offsets, sizes)
    furthest = np.maximum.accumulate(np.where(real, phy_offsets, -1))
    torn = np.zeros(len(phy_offsets), bool)
    torn[1:] = real[1:] & (phy_offsets[1:] < furthest[:-1])
    return torn
