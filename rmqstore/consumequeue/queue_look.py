"""Inspect a queue without opening it: its bounds, its newest unit, the size of its messages in the log.

Owns a few short reads of the files of a simple queue, so that an overview of ten thousand queues maps none of them.  It keeps
nothing, changes nothing, and never reads the commit log.  A queue with a strange name or length, a gap, pre-fill units at the
start, or units in RocksDB must be opened instead.

The end of a file is found by bisection after its first page: an unwritten unit there counts as the end.  An open queue reads all
units.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from rmqstore import _core, _dispatch
from rmqstore import _numpy as np
from rmqstore._core import PRE_FILL_SIZE
from rmqstore._dispatch import RecordColumns
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import GeometryError
from rmqstore.files.listing import names_in
from rmqstore.files.mapped_file import name_of_offset, offset_of_name
from rmqstore.files.open_file import open_regular, open_with_size, written_extents

__all__ = ["QueueLook", "look_at_files", "look_at_queue", "unit_in_files"]

_UNIT_SIZE = int(_core.UnitLayout.UNIT_SIZE)
# The units of a read, two pages.  Most queues of a large store are shorter.
_READ_UNITS = 8192 // _UNIT_SIZE
# The longest queue whose units are all added up; the number of parts of a longer one, and their units.
_ALL_UNITS = 4096
_PARTS, _PART_UNITS = 32, 102
# After the end of any log, and sums do not overflow.
_FAR = 2**62
_UNIT = [("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")]
_FIELDS = struct.Struct(">qiq")


class QueueLook(NamedTuple):
    """The bounds, the last unit and the sizes of a queue.

    - `kind`: "SimpleCQ" or "BatchCQ".
    - `min_queue_offset`, `max_queue_offset`: of the first message that is still in the log, and of the next one.
    - `log_bytes`: bytes of its records in the log, from the sizes in its units; -1 if not requested.
    - `exact`: True if all units were added up for `log_bytes`, instead of samples.
    - `ext_files`, `ext_size`: files of its extension, and their bytes.
    - `units`: by queue offset the units that the caller asked for, if they were read from files; None for one without a record.
    """

    kind: str
    min_queue_offset: int
    max_queue_offset: int
    files: int
    size: int
    last: Unit | None
    log_bytes: int = -1
    exact: bool = True
    ext_files: int = 0
    ext_size: int = 0
    units: Mapping[int, Unit | None] = {}

    @property
    def messages(self) -> int:
        """The number of messages."""
        return self.max_queue_offset - self.min_queue_offset

    @property
    def end(self) -> int:
        """The phy offset after the record of the newest unit, 0 for none."""
        return 0 if self.last is None else self.last.phy_offset + max(self.last.size, 0)


def _read(fd: int, size: int, pos: int) -> bytes:
    data = os.pread(fd, size, pos)
    if len(data) < size:
        raise GeometryError("the file was cut meanwhile")
    return data


def _stop_read_ahead(fd: int) -> None:
    # Read-ahead in many queues would fill the memory of a container.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


class _Files:
    """The files of one simple queue, read by `pread` and closed at the end of a look; what each begins with is read once."""

    __slots__ = ("_fds", "_starts", "directory", "file_size", "offsets", "units_per_file")

    def __init__(self, directory: str, file_size: int, offsets: list[int]):
        self.directory, self.file_size, self.offsets = directory, file_size, offsets
        self.units_per_file = file_size // _UNIT_SIZE
        self._fds: dict[int, int] = {}
        self._starts: dict[int, bytes] = {}

    def start(self, base: int) -> bytes:
        """Return the first units of a file, at most two pages."""
        known = self._starts.get(base)
        if known is not None:
            return known
        fd, size = open_with_size(f"{self.directory}{os.sep}{name_of_offset(base)}")
        self._fds[base] = fd
        if size != self.file_size:
            raise GeometryError("the file is not whole", self.directory)
        _stop_read_ahead(fd)
        data = self._starts[base] = _read(fd, min(_READ_UNITS, self.units_per_file) * _UNIT_SIZE, 0)
        return data

    def are_whole(self) -> bool:
        """Return True if every file has its length; the length of an open one is known."""
        return _all_whole(self.directory, self.file_size, [base for base in self.offsets if base not in self._starts])

    def read(self, number: int, count: int) -> bytes:
        """Return the bytes of `count` consecutive units of one file, the first with this number."""
        begin = number * _UNIT_SIZE % self.file_size
        base, end = number * _UNIT_SIZE - begin, begin + count * _UNIT_SIZE
        start = self.start(base)
        return start[begin:end] if end <= len(start) else _read(self._fds[base], end - begin, begin)

    def unit(self, number: int) -> tuple[int, int, int]:
        """Return phy offset, size and tags code of a unit."""
        return _FIELDS.unpack(self.read(number, 1))

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


def _count(files: _Files, base: int) -> int | None:
    # The number of written units from the start of a file; None for a gap at its start.
    data = files.start(base)
    known = len(data) // _UNIT_SIZE
    # A hole may begin within the last unit, whose tags code ends in zeros.
    low = -(-_core.nonzero_size(data) // _UNIT_SIZE)
    if low and _core.unit_ends(memoryview(data)[: low * _UNIT_SIZE], _FAR) is None:
        return None
    if low < known or known >= files.units_per_file:
        return low
    first, high = base // _UNIT_SIZE, files.units_per_file
    while low < high:
        middle = (low + high) // 2
        phy_offset, size, _ = files.unit(first + middle)
        if size > 0 and phy_offset >= 0:
            low = middle + 1
        else:
            high = middle
    return low


def _first_at_or_after(files: _Files, end: int, min_phy_offset: int) -> int | None:
    # The number of the first unit whose record is at or after this, `end` for none; None after pre-fill units.
    for base in files.offsets:
        first = base // _UNIT_SIZE
        last = min(first + files.units_per_file, end) - 1
        if last < first:
            break
        phy_offset, size, _ = files.unit(first)
        if min_phy_offset == phy_offset == 0 and size == PRE_FILL_SIZE:
            return None
        if phy_offset >= min_phy_offset:
            return first
        if files.unit(last)[0] < min_phy_offset:
            continue
        while first < last:
            middle = (first + last) // 2
            phy_offset, size, _ = files.unit(middle)
            if phy_offset == 0 and size == PRE_FILL_SIZE:
                return None
            if phy_offset < min_phy_offset:
                first = middle + 1
            else:
                last = middle
        return first
    return end


def _parts(begin: int, end: int) -> list[tuple[int, int]]:
    # The units to add up, as (number, count): all of a short queue, samples of a longer one.
    if end - begin <= _ALL_UNITS:
        return [(begin, end - begin)]
    step = (end - begin - _PART_UNITS) / (_PARTS - 1)
    return [(begin + round(part * step), _PART_UNITS) for part in range(_PARTS)]


def _estimate(total: int, seen: int, num: int) -> tuple[int, bool]:
    if seen >= num:
        return total, True
    return (round(total / seen * num) if seen else 0), False


def _log_bytes(files: _Files, begin: int, end: int) -> tuple[int, bool]:
    # The bytes of the records of the units from `begin` to `end`, and True if all were added up.
    total = seen = 0
    for number, count in _parts(begin, end):
        stop = number + count
        while number < stop:
            num = min(stop - number, files.units_per_file - number % files.units_per_file)
            units = np.frombuffer(files.read(number, num), np.dtype(_UNIT), num)
            sizes = units["size"].astype(np.int64)
            total += int(sizes[(sizes > 0) & (sizes != PRE_FILL_SIZE)].sum())
            seen += num
            number += num
    return _estimate(total, seen, end - begin)


def _unit_of(queue_offset: int, fields: tuple[int, int, int]) -> Unit | None:
    # None where no record was put, or a pre-fill unit.
    phy_offset, size, tags_code = fields
    if size <= 0 or phy_offset < 0 or (phy_offset, size) == (0, PRE_FILL_SIZE):
        return None
    return Unit(queue_offset, phy_offset, size, tags_code)


def _units(files: _Files, offsets: Iterable[int], end: int) -> dict[int, Unit | None]:
    # The units before `end`; reading one by itself reports why it cannot be read.
    units = {}
    for offset in offsets:
        if offset < end:
            with contextlib.suppress(GeometryError, OSError):
                units[offset] = _unit_of(offset, files.unit(offset))
    return units


def look_at_files(
    directory: str, file_size: int, min_phy_offset: int, *, sizes: bool = False, offsets: Collection[int] = ()
) -> QueueLook | None:
    """Look at a simple queue in its files; None where it is not as a writer leaves it, and has to be opened.

    - `sizes`: also find `QueueLook.log_bytes`: up to 80 KiB of units are read for it.
    - `offsets`: also read `QueueLook.units` at these queue offsets; for those before the first message, its unit.
    """
    bases = files_in_a_row(directory, file_size)
    if not bases:
        return None
    files = _Files(directory, file_size, bases)
    try:
        number = 0
        for base in reversed(bases):
            count = _count(files, base)
            if count is None:
                return None
            if count or base == bases[0]:
                number = base // _UNIT_SIZE + count
                break
        first = _first_at_or_after(files, number, min_phy_offset)
        if first is None:
            return None
        last = _unit_of(number - 1, files.unit(number - 1)) if number > bases[0] // _UNIT_SIZE else None
        units = _units(files, {max(offset, first) for offset in offsets}, number) if offsets else {}
        log_bytes, exact = _log_bytes(files, first, number) if sizes else (-1, True)
        if not files.are_whole():
            return None
        return QueueLook(
            ConsumeQueue.cq_type, first, number, len(bases), len(bases) * file_size, last, log_bytes, exact, units=units
        )
    except (GeometryError, OSError):
        # A file is not whole, cannot be read, or went: opening the queue says which.
        return None
    finally:
        files.close()


def look_at_queue(queue: ConsumeQueue | BatchConsumeQueue, min_phy_offset: int, *, sizes: bool = False) -> QueueLook:
    """Inspect an open queue, see `look_at_files`."""
    low, high = queue.bounds(min_phy_offset)
    log_bytes, exact = _log_bytes_of_open(queue, low, high) if sizes else (-1, True)
    files = queue.files
    ext = None if queue.ext is None else queue.ext.files
    return QueueLook(
        queue.cq_type,
        low,
        high,
        queue.disk_files,
        queue.disk_files * files.mapped_file_size,
        queue.last_record(),
        log_bytes,
        exact,
        0 if ext is None else ext.disk_num,
        0 if ext is None else ext.disk_num * ext.mapped_file_size,
    )


def _log_bytes_of_open(queue: ConsumeQueue | BatchConsumeQueue, low: int, high: int) -> tuple[int, bool]:
    total = seen = 0
    reached = low
    for number, count in _parts(low, high):
        stop, number = number + count, max(number, reached)
        while number < stop:
            before = number
            # None beyond the file in which the first lies.
            for unit in queue.read(number, stop - number):
                if unit.queue_offset >= stop:
                    break
                if unit.queue_offset + max(unit.num, 1) > number:
                    total += max(unit.size, 0)
                    number = reached = unit.queue_offset + max(unit.num, 1)
            number = max(number, min(queue.next_file_offset(before), stop))
            seen += number - before
    return _estimate(total, seen, high - low)


def unit_in_files(directory: str, file_size: int, queue_offset: int) -> Unit | None:
    """Unit or None: of a simple queue, read from its file; None for one that was never written, and for a pre-fill unit."""
    at = queue_offset * _UNIT_SIZE
    base = at - at % file_size
    if base > _FAR:
        return None
    try:
        fd, size_of_file = open_with_size(f"{directory}{os.sep}{name_of_offset(base)}")
    except FileNotFoundError:
        offsets = files_in_a_row(directory, file_size)
        if offsets is None or not _all_whole(directory, file_size, offsets):
            raise GeometryError("the files have another size", directory) from None
        return None
    try:
        if size_of_file != file_size:
            raise GeometryError("the file is not whole", directory)
        _stop_read_ahead(fd)
        data = os.pread(fd, _UNIT_SIZE, at - base)
    finally:
        os.close(fd)
    if len(data) < _UNIT_SIZE:
        return None
    return _unit_of(queue_offset, _FIELDS.unpack(data))


def ends_as(directory: str, file_size: int, look: QueueLook) -> bool:
    """Return True if the files of a simple queue still end with the last unit of this look."""
    if look.last is None:
        return False
    at = look.last.queue_offset * _UNIT_SIZE
    try:
        fd = open_regular(f"{directory}{os.sep}{name_of_offset(at - at % file_size)}")
        try:
            data = os.pread(fd, 2 * _UNIT_SIZE, at % file_size)
        finally:
            os.close(fd)
    except OSError:
        return False
    return data == _FIELDS.pack(*look.last[1:4]).ljust(len(data), b"\0")


class PlainQueue(NamedTuple):
    """The end of a queue that `plain_queue` found to be in order.

    - `last_end`, `furthest_end`: the phy offsets at which the record of the last unit ends, and the furthest one of its file; -1
      for a pre-fill unit.
    - `offsets`, `end`: where the files begin, and the last unit ends, in bytes of the queue.
    """

    last_end: int
    furthest_end: int
    offsets: list[int]
    end: int

    def agrees(self, directory: str, file_size: int, columns: RecordColumns, rows: np.ndarray) -> bool | None:
        """bool: as `ConsumeQueue.agrees`, read from the newest file; None where the units lie in others."""
        number, newest = int(columns.queue_offset[rows[0]]), self.offsets[-1]
        pos = number * _UNIT_SIZE - newest
        if pos < 0 or pos + len(rows) * _UNIT_SIZE > file_size:
            return None
        fd = open_regular(f"{directory}{os.sep}{name_of_offset(newest)}")
        try:
            data = os.pread(fd, len(rows) * _UNIT_SIZE, pos)
        finally:
            os.close(fd)
        if len(data) < len(rows) * _UNIT_SIZE:
            return False
        return _dispatch.agreeing_unit_bytes(data, columns, rows, number) == len(rows)


def files_in_a_row(directory: str, file_size: int) -> list[int] | None:
    """Return the offsets of a queue's files, ascending; None for a gap in their names, or other entries."""
    try:
        names = names_in(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _row_of(tuple(names), file_size)


@functools.lru_cache(maxsize=64)
def _row_of(names: tuple[str, ...], file_size: int) -> list[int] | None:
    # The files of most queues have the same names; callers must not change the list.
    first = offset_of_name(names[0]) if names else 0
    if first is None or first % file_size:
        return None
    offsets = list(range(first, first + file_size * len(names), file_size))
    return offsets if list(names) == [f"{offset:020}" for offset in offsets] else None


def _all_whole(directory: str, file_size: int, offsets: Iterable[int]) -> bool:
    # True if these are files of this size.
    for offset in offsets:
        status = os.stat(f"{directory}{os.sep}{name_of_offset(offset)}")
        if status.st_size != file_size or not stat.S_ISREG(status.st_mode):
            return False
    return True


def plain_queue(directory: str, file_size: int) -> PlainQueue | None:
    """Look at a simple queue without mapping it or keeping anything of it: opening a store looks at all of them.

    None unless it is plain: its files whole and in a row, all units of the newest one written without a gap, and nothing
    after them.  `ConsumeQueue.load` and `ConsumeQueue.tidy` then have nothing to refuse and nothing to do, if there is no
    extension.
    """
    offsets = files_in_a_row(directory, file_size)
    if not offsets or not _all_whole(directory, file_size, offsets):
        return None
    data = _written_start(f"{directory}{os.sep}{name_of_offset(offsets[-1])}", file_size)
    size = -(-_core.nonzero_size(data) // _UNIT_SIZE) * _UNIT_SIZE
    if not size:
        return None
    # A hole may begin within the last unit, whose tags code ends in zeros.
    ends = _core.unit_ends(memoryview(data.ljust(size, b"\0"))[:size], _FAR)
    return None if ends is None else PlainQueue(*ends, offsets, offsets[-1] + size)


def _written_start(path: str, size: int) -> bytes:
    # The written part of a file of `size` bytes if it is one range from the start; empty otherwise, or if the file system does not
    # report it.
    fd = open_regular(path)
    try:
        extents = written_extents(fd, 0, size) if os.fstat(fd).st_size == size else None
        if extents is None or len(extents) != 1 or extents[0][0] != 0:
            return b""
        data = os.pread(fd, extents[0][1], 0)
        return data if len(data) == extents[0][1] else b""
    except OSError:
        return b""
    finally:
        os.close(fd)
