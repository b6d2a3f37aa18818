"""A look at a queue without opening it: its bounds, its newest unit, what its messages take in the log.

Owns reading these from the files of a simple queue by a few short reads, however long the queue is: whoever shows ten thousand
queues maps none of them.  It keeps nothing, changes nothing, and never reads the commit log.  What is not as a writer leaves it
(a strange name or length, a gap, pre-fill units at the start, units in RocksDB) is left to whoever opens the queue.

The end of a file is found by halving, from its first page on: beyond that page a unit that was never written is taken for the
end of all that were.  A queue that was opened knows its end from all its units.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from rmqstore import _core, _dispatch
from rmqstore import _numpy as np
from rmqstore._core import PRE_FILL_SIZE
from rmqstore._dispatch import RecordColumns
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import GeometryError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import name_of_offset, offset_of_name
from rmqstore.files.open_file import open_regular, written_extents

__all__ = ["QueueLook", "look_at_files", "look_at_queue", "unit_in_files"]

_UNIT_SIZE = int(_core.UnitLayout.UNIT_SIZE)
# What is read of a file at once: two pages.  Most queues of a store with many are shorter.
_READ_UNITS = 8192 // _UNIT_SIZE
# Units of a queue that are all added up; of a longer one so many parts of so many.
_ALL_UNITS = 4096
_PARTS, _PART_UNITS = 32, 102
# Beyond this no log ends; what is added to it does not overflow.
_FAR = 2**62
_UNIT = [("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")]
_FIELDS = struct.Struct(">qiq")


class QueueLook(NamedTuple):
    """What a look at a queue says.

    - `kind`: "SimpleCQ" or "BatchCQ".
    - `min_queue_offset`, `max_queue_offset`: of the first message that the log still holds, and of the next one to come.
    - `log_bytes`: bytes of the log that its records take, from the sizes in its units; -1 where nobody asked.
    - `exact`: whether all units were added up for `log_bytes`, instead of some all over it.
    - `ext_files`, `ext_size`: files of its extension, and their bytes.
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

    @property
    def messages(self) -> int:
        """int: messages that are still there."""
        return self.max_queue_offset - self.min_queue_offset


def _read(fd: int, size: int, pos: int) -> bytes:
    data = os.pread(fd, size, pos)
    if len(data) < size:
        raise GeometryError("the file was cut meanwhile")
    return data


def _stop_read_ahead(fd: int) -> None:
    # Pages that are read ahead, of each of many queues, would fill the memory of a container.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


class _Files:
    """The files of one simple queue, read by `pread` and closed at the end of a look; what each begins with is read once."""

    def __init__(self, directory: str, file_size: int, offsets: list[int]):
        self.directory, self.file_size, self.offsets = directory, file_size, offsets
        self.units_per_file = file_size // _UNIT_SIZE
        self._open: dict[int, tuple[int, bytes]] = {}

    def _opened(self, base: int) -> tuple[int, bytes]:
        opened = self._open.get(base)
        if opened is None:
            fd = open_regular(f"{self.directory}{os.sep}{name_of_offset(base)}")
            # Noted at once, so that `close` knows it whatever happens.
            self._open[base] = fd, b""
            if os.fstat(fd).st_size != self.file_size:
                raise GeometryError("the file is not whole", self.directory)
            _stop_read_ahead(fd)
            opened = self._open[base] = fd, _read(fd, min(_READ_UNITS, self.units_per_file) * _UNIT_SIZE, 0)
        return opened

    def check_lengths(self) -> None:
        """Look at the length of every file; that of an open one is known."""
        for base in self.offsets:
            if base not in self._open:
                if os.stat(f"{self.directory}{os.sep}{name_of_offset(base)}").st_size != self.file_size:
                    raise GeometryError("the file is not whole", self.directory)

    def start(self, base: int) -> bytes:
        """bytes: the first units of a file, at most two pages."""
        return self._opened(base)[1]

    def read(self, base: int, first: int, count: int) -> bytes:
        """bytes: `count` units of a file."""
        fd, start = self._opened(base)
        begin, end = first * _UNIT_SIZE, (first + count) * _UNIT_SIZE
        return start[begin:end] if end <= len(start) else _read(fd, end - begin, begin)

    def unit(self, base: int, number: int) -> tuple[int, int]:
        # (phy offset, size) of a unit of a file.
        phy_offset, size, _ = _FIELDS.unpack(self.read(base, number, 1))
        return phy_offset, size

    def close(self) -> None:
        for fd, _ in self._open.values():
            os.close(fd)


def _count(files: _Files, base: int) -> int | None:
    # How many units from the start of a file on are written; None where its start has a gap.
    data = files.start(base)
    known = len(data) // _UNIT_SIZE
    low, high = 0, known
    while low < high:
        middle = (low + high) // 2
        # Sizes and phy offsets that were written have no sign, and a size is not 0.
        if 0 < int.from_bytes(data[middle * _UNIT_SIZE + 8 : middle * _UNIT_SIZE + 12], "big") < 1 << 31:
            low = middle + 1
        else:
            high = middle
    if low and _core.unit_ends(data[: low * _UNIT_SIZE], _FAR) is None:
        return None
    if low < known or known >= files.units_per_file:
        return low
    low, high = known, files.units_per_file
    while low < high:
        middle = (low + high) // 2
        phy_offset, size = files.unit(base, middle)
        if size > 0 and phy_offset >= 0:
            low = middle + 1
        else:
            high = middle
    return low


def _first_at_or_after(files: _Files, end: int, min_phy_offset: int) -> int | None:
    # Number of the first unit whose record is at or after this, `end` if there is none; None where pre-fill units are in the way.
    for base in files.offsets:
        first = base // _UNIT_SIZE
        count = min(files.units_per_file, end - first)
        if count <= 0:
            break
        phy_offset, size = files.unit(base, 0)
        if (phy_offset, size) == (0, PRE_FILL_SIZE) and min_phy_offset == 0:
            return None
        if phy_offset >= min_phy_offset:
            return first
        if files.unit(base, count - 1)[0] < min_phy_offset:
            continue
        low, high = 0, count - 1
        while low < high:
            middle = (low + high) // 2
            phy_offset, size = files.unit(base, middle)
            if (phy_offset, size) == (0, PRE_FILL_SIZE):
                return None
            if phy_offset < min_phy_offset:
                low = middle + 1
            else:
                high = middle
        return first + low
    return end


def _parts(begin: int, end: int) -> list[tuple[int, int]]:
    # Which units are added up, as (number, count): all of a short queue, of a longer one some that are spread over it evenly.
    if end - begin <= _ALL_UNITS:
        return [(begin, end - begin)]
    step = (end - begin - _PART_UNITS) / (_PARTS - 1)
    return [(begin + round(part * step), _PART_UNITS) for part in range(_PARTS)]


def _estimate(total: int, seen: int, num: int) -> tuple[int, bool]:
    if seen >= num:
        return total, True
    return (round(total / seen * num) if seen else 0), False


def _log_bytes(files: _Files, begin: int, end: int) -> tuple[int, bool]:
    # Bytes of the records of the units from `begin` to `end`, and whether all of them were added up.
    total = seen = 0
    for number, count in _parts(begin, end):
        stop = number + count
        while number < stop:
            base = number * _UNIT_SIZE
            base -= base % files.file_size
            first = number - base // _UNIT_SIZE
            num = min(stop - number, files.units_per_file - first)
            units = np.frombuffer(files.read(base, first, num), np.dtype(_UNIT), num)
            sizes = units["size"].astype(np.int64)
            total += int(sizes[(sizes > 0) & (sizes != PRE_FILL_SIZE)].sum())
            seen += num
            number += num
    return _estimate(total, seen, end - begin)


def look_at_files(directory: str, file_size: int, min_phy_offset: int, *, sizes: bool = False) -> QueueLook | None:
    """Look at a simple queue in its files; None where it is not as a writer leaves it, and has to be opened.

    - `sizes`: also find `QueueLook.log_bytes`: up to 80 KiB of units are read for it.
    """
    offsets = files_in_a_row(directory, file_size)
    if not offsets:
        return None
    files = _Files(directory, file_size, offsets)
    try:
        number = 0
        for base in reversed(offsets):
            count = _count(files, base)
            if count is None:
                return None
            if count or base == offsets[0]:
                number = base // _UNIT_SIZE + count
                break
        first = _first_at_or_after(files, number, min_phy_offset)
        if first is None:
            return None
        last = None
        if number > offsets[0] // _UNIT_SIZE:
            base = (number - 1) * _UNIT_SIZE // file_size * file_size
            phy_offset, size, tags_code = _FIELDS.unpack(files.read(base, number - 1 - base // _UNIT_SIZE, 1))
            if size > 0 and (phy_offset, size) != (0, PRE_FILL_SIZE):
                last = Unit(number - 1, phy_offset, size, tags_code)
        log_bytes, exact = _log_bytes(files, first, number) if sizes else (-1, True)
        files.check_lengths()
        return QueueLook(
            ConsumeQueue.cq_type, first, number, len(offsets), len(offsets) * file_size, last, log_bytes, exact
        )
    except (GeometryError, FileNotFoundError, IsADirectoryError):
        # A file is not whole, or went meanwhile: whoever opens the queue judges it.
        return None
    finally:
        files.close()


def look_at_queue(queue: ConsumeQueue | BatchConsumeQueue, min_phy_offset: int, *, sizes: bool = False) -> QueueLook:
    """QueueLook: of an open queue; parameters as of `look_at_files`."""
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
        fd = open_regular(f"{directory}{os.sep}{name_of_offset(base)}")
    except FileNotFoundError:
        if files_in_a_row(directory, file_size, whole=True) is None:
            raise GeometryError("the files have another size", directory) from None
        return None
    try:
        if os.fstat(fd).st_size != file_size:
            raise GeometryError("the file is not whole", directory)
        _stop_read_ahead(fd)
        data = os.pread(fd, _UNIT_SIZE, at - base)
    finally:
        os.close(fd)
    if len(data) < _UNIT_SIZE:
        return None
    phy_offset, size, tags_code = _FIELDS.unpack(data)
    if size <= 0 or phy_offset < 0 or (phy_offset, size) == (0, PRE_FILL_SIZE):
        return None
    return Unit(queue_offset, phy_offset, size, tags_code)


class PlainQueue(NamedTuple):
    """What `plain_queue` found: where the record of the last unit ends, and the furthest one of its file, -1 for none.

    `newest` is the offset of the newest file, in bytes of the queue.
    """

    last_end: int
    furthest_end: int
    newest: int

    def agrees(self, directory: str, file_size: int, columns: RecordColumns, rows: np.ndarray) -> bool | None:
        """bool: as `ConsumeQueue.agrees`, read from the newest file; None where the units lie in others."""
        number = int(columns.queue_offset[rows[0]])
        pos = number * _UNIT_SIZE - self.newest
        if pos < 0 or pos + len(rows) * _UNIT_SIZE > file_size:
            return None
        fd = open_regular(f"{directory}{os.sep}{name_of_offset(self.newest)}")
        try:
            data = os.pread(fd, len(rows) * _UNIT_SIZE, pos)
        finally:
            os.close(fd)
        if len(data) < len(rows) * _UNIT_SIZE:
            return False
        return _dispatch.agreeing_unit_bytes(data, columns, rows, number) == len(rows)


def files_in_a_row(directory: str, file_size: int, *, whole: bool = False) -> list[int] | None:
    """list of int: the offsets of a queue's files, ascending; None unless they are in a row, and nothing else is there."""
    offsets = []
    try:
        for entry in listing(directory).checked():
            offset = offset_of_name(entry.name)
            if offset is None or offset % file_size or not entry.is_file():
                return None
            if whole and entry.stat().st_size != file_size:
                return None
            offsets.append(offset)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if offsets and offsets[0] + file_size * (len(offsets) - 1) != offsets[-1]:
        return None
    return offsets


def plain_queue(directory: str, file_size: int) -> PlainQueue | None:
    """Look at a simple queue without mapping it or keeping anything of it: opening a store looks at all of them.

    None unless it is plain: its files whole and in a row, all units of the newest one written without a gap, and nothing
    after them.  `ConsumeQueue.load` and `ConsumeQueue.tidy` then have nothing to refuse and nothing to do, if there is no
    extension.
    """
    offsets = files_in_a_row(directory, file_size, whole=True)
    if not offsets:
        return None
    newest = offsets[-1]
    data = _written_start(f"{directory}{os.sep}{name_of_offset(newest)}", file_size)
    size = -(-_core.nonzero_size(data) // _UNIT_SIZE) * _UNIT_SIZE
    if not size:
        return None
    # A hole may begin within the last unit, whose tags code ends in zeros.
    ends = _core.unit_ends(memoryview(data.ljust(size, b"\0"))[:size], _FAR)
    return None if ends is None else PlainQueue(*ends, newest)


def _written_start(path: str, size: int) -> bytes:
    # What was written of a file of `size` bytes if it is one stretch from its start on; nothing if it is not, or if the file
    # system cannot tell.
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
