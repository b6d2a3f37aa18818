"""Consume queues: per topic and queue id, where in the commit log each message lies.

Owns three kinds of files: simple queues (20-byte units, ``consumequeue``), their extension (``consumequeue_ext``) and
batch queues (46-byte units, ``batchconsumequeue``, for topics of queue type BatchCQ).  It never reads the commit log
itself and never decides what to do about a gap; callers say.  A unit's place follows from its queue offset alone, so a
unit that is already there is never written twice (RocketMQ 5.5.0 appends at the end instead and shifts the queue).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rmqstore import _columns, _core
from rmqstore import _numpy as np
from rmqstore._columns import RecordColumns
from rmqstore._core import EXT_ADDRESS_BASE, EXT_ADDRESS_MAX, PRE_FILL_SIZE
from rmqstore._shown import shows
from rmqstore.config import StoreConfig, is_usual_size
from rmqstore.errors import CorruptionError, InvalidMessageError, UnsupportedFormatError
from rmqstore.files.mapped_file import (
    MappedFile,
    MappedFilePool,
    NotCopied,
    name_of_offset,
    offset_of_name,
    open_regular,
)
from rmqstore.files.mapped_file_queue import MappedFileQueue

__all__ = ["BatchConsumeQueue", "ConsumeQueue", "ConsumeQueueExt", "Unit", "queue_directories"]

_UNIT_SIZE = int(_core.UnitLayout.UNIT_SIZE)
_BATCH_UNIT_SIZE = int(_core.BatchUnitLayout.BATCH_UNIT_SIZE)
# An extension file ends with at least so many bytes that say so (RocketMQ ConsumeQueueExt.END_BLANK_DATA_LENGTH).
_EXT_END_SIZE = 4


class Unit(NamedTuple):
    """One unit as queried: `queue_offset` is its (first) ordinal, `num` how many messages its record holds."""

    queue_offset: int
    phy_offset: int
    size: int
    tags_code: int
    num: int = 1


def queue_directories(root: str, kind: str) -> Iterator[tuple[str, int, str]]:
    """Every queue below ``root/kind``: (topic, queue id, directory), sorted; other things there are passed over.

    Parameters
    ----------
    kind : str
        ``consumequeue``, ``batchconsumequeue`` or ``consumequeue_ext``.
    """
    try:
        topics = sorted(entry.name for entry in os.scandir(os.path.join(root, kind)) if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for topic in topics:
        directory = os.path.join(root, kind, topic)
        numbers = []
        for entry in os.scandir(directory):
            digits = entry.name.removeprefix("-")
            if entry.is_dir() and digits.isascii() and digits.isdigit() and len(digits) <= 10:
                numbers.append(int(entry.name))
        for queue_id in sorted(numbers):
            yield topic, queue_id, os.path.join(directory, str(queue_id))


def can_name_queue(topic: str) -> bool:
    """bool: `topic` can be the name of a directory."""
    return (
        topic not in ("", ".", "..")
        and "/" not in topic
        and "\0" not in topic
        and len(topic.encode("utf-8", "replace")) <= 255
    )


def queue_directory(root: str, kind: str, topic: str, queue_id: int) -> str:
    """str: the directory of a queue.

    Raises
    ------
    UnsupportedFormatError
        The topic is no name for a directory (empty, a dot name, with a slash or NUL, too long); a damaged or hostile
        record must not lead outside the store.
    """
    if not can_name_queue(topic):
        raise UnsupportedFormatError(f"topic {topic[:80]!r} cannot name a queue's directory", root)
    return os.path.join(root, kind, topic, str(queue_id))


# Beyond this no log ends; what is added to it does not overflow.
_FAR = 2**62
_INT64_MAX = 2**63 - 1


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
        return _columns.agreeing_unit_bytes(data, columns, rows, number) == len(rows)


def plain_queue(directory: str, file_size: int) -> PlainQueue | None:
    """Look at a simple queue without mapping it or keeping anything of it: opening a store looks at all of them.

    None unless it is plain: its files whole and in a row, all units of the newest one written without a gap, and nothing
    after them.  `ConsumeQueue.load` and `ConsumeQueue.tidy` then have nothing to refuse and nothing to do, if there is no
    extension.

    Parameters
    ----------
    directory : str
        The queue's.
    file_size : int
        Bytes of each file.
    """
    offsets = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                offset = offset_of_name(entry.name)
                if offset is None or not entry.is_file() or entry.stat().st_size != file_size or offset % file_size:
                    return None
                offsets.append(offset)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not offsets:
        return None
    offsets.sort()
    newest = offsets[-1]
    if offsets[0] + file_size * (len(offsets) - 1) != newest:
        return None
    data = _written_start(f"{directory}{os.sep}{name_of_offset(newest)}", file_size).rstrip(b"\0")
    count = -(-len(data) // _UNIT_SIZE)
    if not count:
        return None
    # The zeros at the end of the last unit went with those after it.
    ends = _core.unit_ends(data.ljust(count * _UNIT_SIZE, b"\0"), _FAR)
    return None if ends is None else PlainQueue(*ends, newest)


def _written_start(path: str, size: int) -> bytes:
    # What was written of a file of `size` bytes if it is one stretch from its start on; nothing if it is not, or if the file
    # system cannot tell.
    fd = open_regular(path)
    try:
        if os.fstat(fd).st_size != size or os.lseek(fd, 0, os.SEEK_DATA) != 0:
            return b""
        end = os.lseek(fd, 0, os.SEEK_HOLE)
        if end < size:
            try:
                os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    return b""
            else:
                return b""
        data = os.pread(fd, end, 0)
        return data if len(data) == end else b""
    except (OSError, AttributeError):
        return b""
    finally:
        os.close(fd)


@shows(
    "bounds", "config", "cq_type", "files", "first_unit", "kind", "last_record", "max_queue_offset",
    "min_queue_offset", "offset_by_time", "queue_id", "read", "read_only", "root", "tags_code", "topic",
    "unit", "unit_num", "unit_size", "units",
)  # fmt: skip
class _UnitQueue(NotCopied, _core.QueueFields):
    """What simple and batch queues share: files of units, found by number."""

    kind: str
    # The queue's type as RocketMQ names it (CQType).
    cq_type: str
    unit_size: int
    queue: MappedFileQueue
    min_for: tuple[int, int] | None

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
            config.consume_queue_file_size if self.unit_size == _UNIT_SIZE else config.batch_consume_queue_file_size
        )
        self.queue = MappedFileQueue(
            queue_directory(root, self.kind, topic, queue_id),
            file_size,
            pool,
            read_only=read_only,
            staging=root,
            is_usual_size=lambda: is_usual_size(root, self.kind, file_size),
            # A look at each of many queues touches a page or two of each, and units are small beside their records: what the
            # system reads ahead around a page, holes too, would fill the memory of a container.
            advice="random" if read_only else "normal",
        )
        self.units_per_file = file_size // self.unit_size
        # When a reader beside a writer looked last (`time.monotonic`).
        self.refreshed_at = -1.0
        # What `bounds` found last: the commit log's min offset, and the number of the first unit at or after it.
        self.min_for = None

    def load(self) -> None:
        """Find the files and the end: the first unit that was never written.  Nothing is changed.

        A last file without a unit (RocketMQ 5.5.0 gains a bogus unit from one) counts as absent; `tidy` deletes it.
        """
        self.queue.load()
        self.queue.wrote_where = self._end()

    def _end(self) -> int:
        # After the last unit that was written.
        offsets = self.queue.offsets
        for base in reversed(offsets):
            count = _core.count_units(self.queue.file(base).region, self.unit_size)
            if count or base == offsets[0]:
                return base + count * self.unit_size
        return 0

    def tidy(self) -> None:
        """Make the files say what `load` understood: no bytes after the end and no file without a unit."""
        self.queue.tidy()
        end = self.queue.wrote_where
        if len(self.queue) and end == 0:
            self.queue.destroy()
        else:
            self.queue.truncate(end)

    def refresh(self) -> None:
        """Take in the units that another process appended since (read-only use); units in memory stand until it is closed."""
        if self.in_memory:
            return
        with self.pool.lock:
            if self.queue.was_replaced():
                # The queue was made again: nothing that was known of it stands.
                self.queue.forget_files()
                self.min_for = None
                self.queue.relist()
                self.queue.wrote_where = self._end()
                return
            self.queue.refresh()
            while (mapped_file := self.queue.find(self.queue.wrote_where)) is not None:
                # Another process only ever appends, so what was counted before still stands.
                base = mapped_file.file_from_offset
                known = (self.queue.wrote_where - base) // self.unit_size
                end = base + self.unit_size * _core.count_units(mapped_file.region, self.unit_size, known)
                if end <= self.queue.wrote_where:
                    return
                self.queue.wrote_where = end

    @property
    def in_memory(self) -> bool:
        """bool: units are put into memory instead of into files (read-only use)."""
        return self.queue.in_memory

    @in_memory.setter
    def in_memory(self, value: bool) -> None:
        self.queue.in_memory = value

    @property
    def disk_files(self) -> int:
        """int: how many files of units are on disk."""
        return self.queue.disk_num

    @property
    def unit_num(self) -> int:
        """int: number of the unit that is written next; units before the oldest file count."""
        return self.queue.wrote_where // self.unit_size

    @property
    def first_unit(self) -> int:
        """int: number of the first unit for which there is a file."""
        return max(self.queue.min_offset, 0) // self.unit_size

    def _file_of_unit(self, number: int) -> MappedFile | None:
        return self.queue.find(number * self.unit_size)

    def first_unit_at_or_after(self, min_phy_offset: int) -> int:
        """int: number of the first unit whose record is at or after `min_phy_offset`; pre-fill units do not count."""
        known = self.min_for
        if known is not None and known[0] == min_phy_offset:
            return known[1]
        # Pre-fill units have phy offset 0 and lie at the start only, so asking for 1 more passes over them.
        number = end = self.unit_num
        for base in self.queue.offsets:
            region = self.queue.file(base).region
            first = base // self.unit_size
            high = min(self.units_per_file, end - first)
            if high <= 0:
                break
            at = _core.unit_at_or_after(region, 0, high, min_phy_offset, self.unit_size)
            if min_phy_offset == 0 and self.unit_size == _UNIT_SIZE:
                while at < high and _core.read_unit(region, at * _UNIT_SIZE)[:2] == (0, PRE_FILL_SIZE):
                    at += 1
            if at < high:
                number = first + at
                break
        if number < end:
            self.min_for = (min_phy_offset, number)
        return number

    def cut(self, end_phy_offset: int) -> int:
        """Drop the units from the first on whose record does not end at or before `end_phy_offset`; their number."""
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
            dropped += count - keep
            self.min_for = None
            self.queue.truncate((first + keep) * self.unit_size)
            self.queue.wrote_where = (first + keep) * self.unit_size
            if keep or first == self.first_unit:
                break
            self.queue.wrote_where = first * self.unit_size
        if dropped:
            self.tidy()
        return dropped

    def _whole_units(self, mapped_file: MappedFile, count: int, end_phy_offset: int) -> int:
        raise NotImplementedError

    def truncate(self, number: int) -> int:
        """Drop the units from `number` on; how many there were."""
        dropped = self.unit_num - number
        self.min_for = None
        self.queue.truncate(number * self.unit_size)
        self.queue.wrote_where = number * self.unit_size
        self.tidy()
        return dropped

    def delete_before(self, min_phy_offset: int) -> int:
        """Delete the files whose last unit lies below `min_phy_offset`, oldest first, never the last; their number."""
        deleted = 0
        while len(self.queue) > 1:
            region = self.queue.file(self.queue.offsets[0]).region
            if region.get_i64((self.units_per_file - 1) * self.unit_size) >= min_phy_offset:
                break
            self.queue.delete_before(self.queue.offsets[0] + self.queue.mapped_file_size)
            self.min_for = None
            deleted += 1
        return deleted

    def make_room(self, count: int) -> None:
        """Make sure that `count` units can be put: every file that this takes is allocated.

        Raises
        ------
        OSError
            The disk is full, …; the queue is as it was.
        """
        self.queue.make_room(count * self.unit_size)

    def forget_prepared(self) -> None:
        """Leave what was prepared to the parent of this forked process."""
        self.queue.prepared.forget()

    def files(self) -> Iterator[MappedFile]:
        """Every file, those of the extension included."""
        for base in self.queue.offsets:
            yield self.queue.file(base)

    def take_dirty(self, least_pages: int = 0) -> list[MappedFile]:
        """The files that were written since this was last asked, see `MappedFileQueue.take_dirty`."""
        return self.queue.take_dirty(least_pages)

    def flush(self) -> None:
        """Force everything written to the disk."""
        for mapped_file in self.take_dirty():
            mapped_file.flush()

    def close(self) -> None:
        """Close the files."""
        self.queue.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topic!r}, {self.queue_id})"


class ConsumeQueueExt(NotCopied):
    """The extension of a simple queue: tags code, store time and filter bitmap, addressed from the unit's tags code."""

    def __init__(
        self, root: str, topic: str, queue_id: int, config: StoreConfig, pool: MappedFilePool, *, read_only: bool
    ):
        self.queue = MappedFileQueue(
            queue_directory(root, "consumequeue_ext", topic, queue_id),
            config.mapped_file_size_consume_queue_ext,
            pool,
            read_only=read_only,
            staging=root,
            is_usual_size=lambda: is_usual_size(root, "consumequeue_ext", config.mapped_file_size_consume_queue_ext),
        )

    def load(self) -> None:
        """Find the files and the end of the last one by stepping over its units."""
        self.queue.load()
        if not self.queue.offsets:
            return
        base = self.queue.offsets[-1]
        region = self.queue.file(base).region
        pos = 0
        while (unit := _core.read_ext_unit(region, pos)) is not None:
            pos += _core.ExtUnitLayout.EXT_UNIT_MIN_SIZE + len(unit[2])
        self.queue.wrote_where = base + pos

    def get(self, address: int) -> tuple[int, int, bytes] | None:
        """(tags code, store timestamp, bitmap) at an address from a tags code, None where there is none."""
        offset = address - EXT_ADDRESS_BASE
        mapped_file = self.queue.find(offset)
        if mapped_file is None:
            return None
        return _core.read_ext_unit(mapped_file.region, offset - mapped_file.file_from_offset)

    def agreeing(
        self, addresses: np.ndarray, tags_codes: np.ndarray | None = None, store_timestamps: np.ndarray | None = None
    ) -> int:
        """int: how many addresses, from the first on, lead to a whole unit, which says these things if they are given."""
        done = 0
        while done < len(addresses):
            offset = int(addresses[done]) - EXT_ADDRESS_BASE
            mapped_file = self.queue.find(offset)
            if mapped_file is None:
                break
            count = _columns.agreeing_ext_units(
                mapped_file.region,
                mapped_file.file_from_offset,
                addresses[done:],
                None if tags_codes is None else tags_codes[done:],
                None if store_timestamps is None else store_timestamps[done:],
            )
            if not count:
                break
            done += count
        return done

    def repair(self, address: int, tags_code: int, store_timestamp: int) -> bool:
        """Write the whole unit at `address` again if it says something else; True if it did.  Its bitmap stays."""
        unit, mapped_file = self.get(address), self.queue.find(address - EXT_ADDRESS_BASE)
        if unit is None or mapped_file is None or unit[:2] == (tags_code, store_timestamp):
            return False
        mapped_file.mark_dirty()
        pos = address - EXT_ADDRESS_BASE - mapped_file.file_from_offset
        _core.write_ext_unit(mapped_file.region, pos, tags_code, store_timestamp, unit[2])
        return True

    def make_room(self, count: int) -> None:
        """Make sure that `count` units without bitmap can be put; errors as of `MappedFileQueue.make_room`."""
        size = int(_core.ExtUnitLayout.EXT_UNIT_MIN_SIZE)
        # A file ends with some bytes that no unit takes.
        offsets, file_size = self.queue.offsets, self.queue.mapped_file_size
        room = offsets[-1] + file_size - self.queue.wrote_where - _EXT_END_SIZE if offsets else 0
        missing = count - max(room, 0) // size
        if missing > 0:
            self.queue.prepared.prepare(-(-missing // ((file_size - _EXT_END_SIZE) // size)))
        elif offsets:
            self.queue.make_room(0)

    def put(self, tags_code: int, store_timestamp: int) -> int:
        """int: the address of a unit without bitmap that was appended."""
        size = int(_core.ExtUnitLayout.EXT_UNIT_MIN_SIZE)
        while True:
            mapped_file = self.queue.file_for_append()
            pos = self.queue.wrote_where - mapped_file.file_from_offset
            mapped_file.mark_dirty(pos + size)
            if pos + size + _EXT_END_SIZE <= mapped_file.size:
                _core.write_ext_unit(mapped_file.region, pos, tags_code, store_timestamp)
                self.queue.wrote_where += size
                return mapped_file.file_from_offset + pos + EXT_ADDRESS_BASE
            mapped_file.region.write(pos, b"\xff\xff")
            self.queue.wrote_where = mapped_file.file_from_offset + mapped_file.size

    def truncate(self, address: int) -> None:
        """Cut after the unit at `address`; the units that pointed further are gone."""
        unit = self.get(address)
        if unit is not None:
            self.queue.truncate(address - EXT_ADDRESS_BASE + _core.ExtUnitLayout.EXT_UNIT_MIN_SIZE + len(unit[2]))


class ConsumeQueue(_UnitQueue):
    """A simple queue: 20-byte units, number = queue offset.

    Parameters
    ----------
    root : str
        The store's root.
    topic, queue_id
        Whose queue.
    config : StoreConfig
        `consume_queue_file_size` in bytes.
    pool : MappedFilePool
    read_only : bool
    """

    kind = "consumequeue"
    cq_type = "SimpleCQ"
    unit_size = _UNIT_SIZE

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
        self.ext: ConsumeQueueExt | None = None
        if config.enable_consume_queue_ext or os.path.isdir(queue_directory(root, "consumequeue_ext", topic, queue_id)):
            self.ext = ConsumeQueueExt(root, topic, queue_id, config, pool, read_only=read_only)

    def load(self) -> None:
        """As every queue does; the extension's files too."""
        super().load()
        if self.ext is not None:
            self.ext.load()

    @property
    def in_memory(self) -> bool:
        """bool: as of every queue, the extension included."""
        return self.queue.in_memory

    @in_memory.setter
    def in_memory(self, value: bool) -> None:
        self.queue.in_memory = value
        if self.ext is not None:
            self.ext.queue.in_memory = value

    def tidy(self) -> None:
        """As every queue does; the extension's files too."""
        super().tidy()
        if self.ext is None:
            return
        # What no unit points at goes: units are written after what they point at.
        if not len(self.queue):
            self.ext.queue.destroy()
            return
        for base in reversed(self.queue.offsets):
            tags_codes = self.units(base // _UNIT_SIZE, self.units_per_file)[2]
            addresses = np.flatnonzero(tags_codes <= EXT_ADDRESS_MAX)
            if len(addresses):
                self.ext.truncate(int(tags_codes[addresses[-1]]))
                break

    def cut_unresolved(self) -> int:
        """Drop the units from the first on whose address leads nowhere in the extension; their number."""
        if self.ext is None:
            return 0
        for base in self.queue.offsets:
            number = base // _UNIT_SIZE
            tags_codes = self.units(number, self.units_per_file)[2]
            places = np.flatnonzero(tags_codes <= EXT_ADDRESS_MAX)
            count = self.ext.agreeing(tags_codes[places])
            if count < len(places):
                return self.truncate(number + int(places[count]))
        return 0

    @property
    def max_queue_offset(self) -> int:
        """int: queue offset of the next message."""
        return self.unit_num

    def min_queue_offset(self, min_phy_offset: int) -> int:
        """int: queue offset of the first message that the log still holds; `max_queue_offset` if it holds none."""
        return self.first_unit_at_or_after(min_phy_offset)

    def unit(self, queue_offset: int) -> Unit | None:
        """The unit at `queue_offset`, None if there is none or only a pre-fill unit."""
        if not self.first_unit <= queue_offset < self.unit_num:
            return None
        mapped_file = self._file_of_unit(queue_offset)
        if mapped_file is None:
            return None
        phy_offset, size, tags_code = _core.read_unit(
            mapped_file.region, queue_offset * _UNIT_SIZE - mapped_file.file_from_offset
        )
        return (
            None
            if (phy_offset, size) == (0, PRE_FILL_SIZE) or size <= 0
            else Unit(queue_offset, phy_offset, size, tags_code)
        )

    def units(self, queue_offset: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Up to `count` units from `queue_offset` on, none beyond the file in which it lies.

        Returns
        -------
        (int64 array, int32 array, int64 array)
            phy offsets, sizes, tags codes; empty where there is no file.
        """
        # The end first: a file that is asked for later holds all units before it.
        end = self.unit_num
        mapped_file = self._file_of_unit(queue_offset) if queue_offset < end else None
        if mapped_file is None:
            return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)
        end = min(end, (mapped_file.file_from_offset // _UNIT_SIZE) + self.units_per_file)
        return _core.read_units(
            mapped_file.region,
            queue_offset * _UNIT_SIZE - mapped_file.file_from_offset,
            max(0, min(count, end - queue_offset)),
        )

    def agrees(self, columns: RecordColumns, rows: np.ndarray) -> bool:
        """bool: the units of these records are there, one after the other, and say exactly what the records need.

        Parameters
        ----------
        columns : RecordColumns
        rows : int64 array
            Rows of this queue, in order, at least one.
        """
        number, done = int(columns.queue_offset[rows[0]]), 0
        while done < len(rows):
            mapped_file = self._file_of_unit(number) if self.first_unit <= number < self.unit_num else None
            if mapped_file is None:
                return False
            pos = number * _UNIT_SIZE - mapped_file.file_from_offset
            count = min(len(rows) - done, self.unit_num - number, (mapped_file.size - pos) // _UNIT_SIZE)
            part = rows[done : done + count]
            if _columns.agreeing_units(mapped_file.region, pos, columns, part, number, self.ext is None) < count:
                return False
            if self.ext is not None and len(self.differing_tags(number, columns, part)):
                return False
            number += count
            done += count
        return True

    def differing_tags(self, queue_offset: int, columns: RecordColumns, rows: np.ndarray) -> np.ndarray:
        """int64 array: which units, from `queue_offset` on in one file, give other tags codes or times than the records.

        Parameters
        ----------
        columns : RecordColumns
        rows : int64 array
            One row a unit; there must be as many units.
        """
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

    def bounds(self, min_phy_offset: int) -> tuple[int, int]:
        """(int, int): `min_queue_offset`, which is never above the second, and `max_queue_offset`."""
        known = self.min_for
        high = self.queue.wrote_where // _UNIT_SIZE
        if known is not None and known[0] == min_phy_offset:
            low = known[1]
        else:
            low = self.first_unit_at_or_after(min_phy_offset)
        return low if low < high else high, high

    def region_of(self, queue_offset: int, count: int) -> tuple[_core.Region, int, int] | None:
        """Where the units lie that `units` gives: the mapped file, the position of the first, and how many.

        None where there is no file.
        """
        queue = self.queue
        # The end first, as of `units`.
        room = queue.wrote_where // _UNIT_SIZE - queue_offset
        offsets = queue.file_offsets
        mapped_file = queue.find(queue_offset * _UNIT_SIZE)
        if mapped_file is None or room <= 0:
            return None
        region, base = mapped_file.region, mapped_file.file_from_offset
        queue.remember(region, base, offsets)
        pos = queue_offset * _UNIT_SIZE - base
        return region, pos, min(count, room, self.units_per_file - pos // _UNIT_SIZE)

    def read(self, queue_offset: int, count: int) -> Iterator[Unit]:
        """The units of `units` one by one, pre-fill units left out."""
        phy_offsets, sizes, tags_codes = self.units(queue_offset, count)
        for i, (phy, size, tags) in enumerate(
            zip(phy_offsets.tolist(), sizes.tolist(), tags_codes.tolist(), strict=True), queue_offset
        ):
            if (phy, size) != (0, PRE_FILL_SIZE):
                yield Unit(i, phy, size, tags)

    def next_file_offset(self, queue_offset: int) -> int:
        """int: queue offset at which the file after the one for `queue_offset` begins, of those that are there."""
        for base in self.queue.offsets:
            if base // _UNIT_SIZE > queue_offset:
                return base // _UNIT_SIZE
        return self.unit_num

    def tags_code(self, unit: Unit) -> int | None:
        """int or None: the hash of the tags; None when it is an address in the extension that leads nowhere."""
        if unit.tags_code > EXT_ADDRESS_MAX:
            return unit.tags_code
        found = self.ext.get(unit.tags_code) if self.ext is not None else None
        return found[0] if found else None

    def _whole_units(self, mapped_file: MappedFile, count: int, end_phy_offset: int) -> int:
        phy_offsets, sizes, tags_codes = _core.read_units(mapped_file.region, 0, count)
        # A unit without a size was never written, or its page was lost.
        bad = (phy_offsets + sizes > end_phy_offset) & ~((phy_offsets == 0) & (sizes == PRE_FILL_SIZE)) | (sizes <= 0)
        keep = int(np.argmax(bad)) if bad.any() else count
        if keep < count and self.ext is not None and keep and tags_codes[keep - 1] <= EXT_ADDRESS_MAX:
            self.ext.truncate(int(tags_codes[keep - 1]))
        return keep

    def last_record(self) -> Unit | None:
        """The newest unit, None for a queue that holds none but pre-fill units."""
        return self.unit(self.unit_num - 1)

    def put(
        self,
        queue_offset: int,
        phy_offset: int,
        size: int,
        tags_code: int,
        store_timestamp: int,
        *,
        extended: bool = True,
    ) -> bool:
        """Write the unit of one record; as `put_units` for one.

        Parameters
        ----------
        extended : bool
            Put tags code and time into the extension if the config says so; RocketMQ does not for further queues (LMQ).
        """
        if queue_offset < self.unit_num:
            return False
        self._reach(queue_offset)
        if extended and self.config.enable_consume_queue_ext and self.ext is not None:
            tags_code = self.ext.put(tags_code, store_timestamp)
        mapped_file = self.queue.file_for_append(queue_offset * _UNIT_SIZE)
        pos = queue_offset * _UNIT_SIZE - mapped_file.file_from_offset
        mapped_file.mark_dirty(pos + _UNIT_SIZE)
        _core.write_unit(mapped_file.region, pos, phy_offset, size, tags_code)
        self.queue.wrote_where = (queue_offset + 1) * _UNIT_SIZE
        return True

    def put_units(
        self,
        queue_offset: int,
        phy_offsets: np.ndarray,
        sizes: np.ndarray,
        tags_codes: np.ndarray,
        store_timestamps: np.ndarray,
    ) -> int:
        """Write the units of records with the queue offsets `queue_offset`, +1, …

        Those that are there already are left as they are.  What lies between the end of the queue and `queue_offset` is
        filled with pre-fill units, which readers pass over, so that every later unit has its place.

        Returns
        -------
        int
            How many were written.
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
            mapped_file = self.queue.file_for_append(number * _UNIT_SIZE)
            pos = number * _UNIT_SIZE - mapped_file.file_from_offset
            count = min(len(phy_offsets) - done, (mapped_file.size - pos) // _UNIT_SIZE)
            mapped_file.mark_dirty(pos + count * _UNIT_SIZE)
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
            self.queue.wrote_where = number * _UNIT_SIZE
        return done - skip

    def _reach(self, queue_offset: int) -> None:
        # Fills the place from the end, or from the start of the first file, up to the unit with pre-fill units.
        if not 0 <= queue_offset <= (2**63 - 1) // _UNIT_SIZE - self.units_per_file:
            raise InvalidMessageError(f"queue offset {queue_offset} has no place in a queue", self.queue.path)
        while queue_offset > self.unit_num or (not len(self.queue) and queue_offset):
            mapped_file = self.queue.file_for_append(queue_offset * _UNIT_SIZE)
            first = mapped_file.file_from_offset // _UNIT_SIZE
            start = max(self.unit_num, first)
            end = min(queue_offset, first + self.units_per_file)
            if end > start:
                count = end - start
                mapped_file.mark_dirty((end - first) * _UNIT_SIZE)
                _core.write_units(
                    mapped_file.region,
                    (start - first) * _UNIT_SIZE,
                    np.zeros(count, np.int64),
                    np.full(count, PRE_FILL_SIZE, np.int32),
                    np.zeros(count, np.int64),
                )
            self.queue.wrote_where = end * _UNIT_SIZE
            if end == queue_offset:
                return

    def repair(self, queue_offset: int, phy_offset: int, size: int, tags_code: int, store_timestamp: int) -> bool:
        """Write the unit at `queue_offset`, which lies before the end, again if it says something else; True if it did."""
        mapped_file = self._file_of_unit(queue_offset)
        if mapped_file is None:
            return False
        pos = queue_offset * _UNIT_SIZE - mapped_file.file_from_offset
        *stored, code = _core.read_unit(mapped_file.region, pos)
        repaired = False
        if self.ext is not None and code <= EXT_ADDRESS_MAX and self.ext.get(code) is not None:
            repaired = self.ext.repair(code, tags_code, store_timestamp)
            tags_code = code
        if stored == [phy_offset, size] and code == tags_code:
            return repaired
        mapped_file.mark_dirty()
        _core.write_unit(mapped_file.region, pos, phy_offset, size, tags_code)
        return True

    def offset_by_time(
        self, timestamp: float, boundary: str, store_timestamp_at: Callable[[int], int], min_phy_offset: int
    ) -> int:
        """The queue offset that belongs to a time.

        Parameters
        ----------
        timestamp : int
            ms since epoch.
        boundary : {"lower", "upper"}
            "lower": the first message stored at or after `timestamp`, the max offset if there is none; "upper": the last
            one stored at or before it, the min offset if there is none (RocketMQ 5.1.1 and later).
        store_timestamp_at : callable
            Store time by phy offset, -1 if unknown; unknown times count as earlier.
        """
        if boundary not in ("lower", "upper"):
            raise ValueError(f"boundary is {boundary!r}; give 'lower' or 'upper'")
        low = start = self.min_queue_offset(min_phy_offset)
        high = self.max_queue_offset
        while low < high:
            middle = (low + high) // 2
            unit = self.unit(middle)
            time = -1 if unit is None else store_timestamp_at(unit.phy_offset)
            if (unit is None or time == -1) or (time < timestamp if boundary == "lower" else time <= timestamp):
                low = middle + 1
            else:
                high = middle
        return low if boundary == "lower" else max(low - 1, start)

    def make_room(self, count: int) -> None:
        """As every queue does, in the extension too."""
        super().make_room(count)
        if self.ext is not None and self.config.enable_consume_queue_ext:
            self.ext.make_room(count)

    def forget_prepared(self) -> None:
        """As every queue does, in the extension too."""
        super().forget_prepared()
        if self.ext is not None:
            self.ext.queue.prepared.forget()

    def files(self) -> Iterator[MappedFile]:
        """The queue's files, then those of the extension."""
        yield from super().files()
        if self.ext is not None:
            for base in self.ext.queue.offsets:
                yield self.ext.queue.file(base)

    def delete_before(self, min_phy_offset: int) -> int:
        """As every queue does; the extension goes as far as the units that point into it."""
        deleted = super().delete_before(min_phy_offset)
        if deleted and self.ext is not None:
            # The extension goes with the units that point into it.
            tags_codes = self.units(self.first_unit, self.units_per_file)[2]
            addresses = tags_codes[tags_codes <= EXT_ADDRESS_MAX]
            if len(addresses):
                self.ext.queue.delete_before(int(addresses[0]) - EXT_ADDRESS_BASE)
        return deleted

    def take_dirty(self, least_pages: int = 0) -> list[MappedFile]:
        """As every queue does; the extension's files too."""
        files = super().take_dirty(least_pages)
        return files if self.ext is None else files + self.ext.queue.take_dirty()

    def close(self) -> None:
        """As every queue does; the extension too."""
        super().close()
        if self.ext is not None:
            self.ext.queue.close()


class BatchConsumeQueue(_UnitQueue):
    """A batch queue: 46-byte units that hold one record each, found by the base queue offset of the record.

    Used for topics of queue type BatchCQ (RocketMQ 5.0 and later); a record may hold many messages (an inner batch).
    """

    kind = "batchconsumequeue"
    cq_type = "BatchCQ"
    unit_size = _BATCH_UNIT_SIZE

    def _read(self, number: int) -> tuple[int, int, int, int, int, int]:
        mapped_file = self._file_of_unit(number)
        if mapped_file is None:
            raise CorruptionError(f"the file of unit {number} is missing; rebuild the queue", self.queue.path)
        return _core.read_batch_unit(mapped_file.region, number * _BATCH_UNIT_SIZE - mapped_file.file_from_offset)

    def _unit_of(self, number: int) -> Unit:
        phy_offset, size, tags_code, _, base_offset, num = self._read(number)
        return Unit(base_offset, phy_offset, size, tags_code, num)

    @property
    def max_queue_offset(self) -> int:
        """int: queue offset of the next message."""
        if self.unit_num <= self.first_unit:
            return 0
        unit = self._unit_of(self.unit_num - 1)
        # A unit may be damaged, and say what no queue offset is.
        return min(max(unit.queue_offset + max(unit.num, 1), 0), _INT64_MAX)

    def min_queue_offset(self, min_phy_offset: int) -> int:
        """int: base queue offset of the first record that the log still holds."""
        number = self.first_unit_at_or_after(min_phy_offset)
        return max(self._unit_of(number).queue_offset, 0) if number < self.unit_num else self.max_queue_offset

    def bounds(self, min_phy_offset: int) -> tuple[int, int]:
        """(int, int): `min_queue_offset`, which is never above the second, and `max_queue_offset`."""
        high = self.max_queue_offset
        return min(self.min_queue_offset(min_phy_offset), high), high

    def unit(self, queue_offset: int) -> Unit | None:
        """The unit whose record holds the message with this queue offset, None if there is none."""
        number = self._number_of(queue_offset)
        return None if number is None else self._unit_of(number)

    def _number_above(self, queue_offset: int) -> int:
        # Of the first unit whose base is above this.
        low, high = self.first_unit, self.unit_num
        while low < high:
            middle = (low + high) // 2
            if self._unit_of(middle).queue_offset <= queue_offset:
                low = middle + 1
            else:
                high = middle
        return low

    def _number_of(self, queue_offset: int) -> int | None:
        low = self._number_above(queue_offset)
        if low == self.first_unit:
            return None
        unit = self._unit_of(low - 1)
        return low - 1 if queue_offset < unit.queue_offset + max(unit.num, 1) else None

    def read(self, queue_offset: int, count: int) -> Iterator[Unit]:
        """Up to `count` units from the one that holds `queue_offset` on, none beyond its file.

        Their queue offsets rise and each holds one message at least: a base or a number that is damaged, so that it goes
        back, or beyond the unit after it, is taken for what the units around it leave.
        """
        number = self._number_of(queue_offset)
        if number is None:
            return
        last = min(self.unit_num, number - number % self.units_per_file + self.units_per_file, number + count)
        reached = self._unit_of(number).queue_offset
        for each in range(number, last):
            unit = self._unit_of(each)
            following = self._unit_of(each + 1).queue_offset if each + 1 < self.unit_num else _INT64_MAX
            base, num = unit.queue_offset, max(unit.num, 1)
            if base < reached or reached <= following < base:
                base = reached
            if base < following < base + num:
                num = following - base
            reached = base + num
            yield unit._replace(queue_offset=base, num=num)

    def next_file_offset(self, queue_offset: int) -> int:
        """int: where the first unit after `queue_offset` begins; the files of a batch queue are searched, not computed."""
        number = self._number_above(queue_offset)
        return self._unit_of(number).queue_offset if number < self.unit_num else self.max_queue_offset

    def tags_code(self, unit: Unit) -> int | None:
        """int: the hash of the tags."""
        return unit.tags_code

    def _whole_units(self, mapped_file: MappedFile, count: int, end_phy_offset: int) -> int:
        for number in range(count):
            phy_offset, size, *_ = _core.read_batch_unit(mapped_file.region, number * _BATCH_UNIT_SIZE)
            if phy_offset + size > end_phy_offset:
                return number
        return count

    def last_record(self) -> Unit | None:
        """The newest unit, None for an empty queue."""
        return self._unit_of(self.unit_num - 1) if self.unit_num > self.first_unit else None

    def store_timestamp(self, queue_offset: int) -> int:
        """int: store time (ms since epoch) in the unit that holds `queue_offset`, -1 if there is none."""
        number = self._number_of(queue_offset)
        return -1 if number is None else self._read(number)[3]

    def consistent_num(self) -> int:
        """int: number of the first unit that does not go on from the one before: offsets rise, batches join."""
        previous: tuple[int, ...] | None = None
        for number in range(self.first_unit, self.unit_num):
            unit = self._read(number)
            if unit[1] <= 0 or unit[5] <= 0 or unit[4] < 0:
                return number
            if previous is not None and (unit[0] < previous[0] + previous[1] or unit[4] != previous[4] + previous[5]):
                return number
            previous = unit
        return self.unit_num

    def repair(
        self, queue_offset: int, phy_offset: int, size: int, tags_code: int, store_timestamp: int, num: int
    ) -> bool:
        """Write the unit of the record at `phy_offset`, if it has one, again if that says something else."""
        number = self.first_unit
        for base in self.queue.offsets:
            first = base // _BATCH_UNIT_SIZE
            high = min(self.units_per_file, self.unit_num - first)
            at = _core.unit_at_or_after(self.queue.file(base).region, 0, max(high, 0), phy_offset, _BATCH_UNIT_SIZE)
            number = first + at
            if at < high:
                break
        if number >= self.unit_num or self._read(number)[0] != phy_offset:
            found = self._number_of(queue_offset)
            if found is None:
                return False
            number = found
        mapped_file = self._file_of_unit(number)
        expected = (phy_offset, size, tags_code, store_timestamp, queue_offset, num)
        if mapped_file is None or self._read(number) == expected:
            return False
        mapped_file.mark_dirty()
        pos = number * _BATCH_UNIT_SIZE - mapped_file.file_from_offset
        _core.write_batch_unit(mapped_file.region, pos, phy_offset, size, tags_code, store_timestamp, queue_offset, num)
        return True

    def put(
        self, queue_offset: int, phy_offset: int, size: int, tags_code: int, store_timestamp: int, num: int = 1
    ) -> bool:
        """Append the unit of a record that holds `num` messages from `queue_offset` on; False if it is there already."""
        last = self.last_record()
        if last is not None and phy_offset <= last.phy_offset:
            return False
        mapped_file = self.queue.file_for_append()
        pos = self.queue.wrote_where - mapped_file.file_from_offset
        mapped_file.mark_dirty(pos + _BATCH_UNIT_SIZE)
        _core.write_batch_unit(mapped_file.region, pos, phy_offset, size, tags_code, store_timestamp, queue_offset, num)
        self.queue.wrote_where += _BATCH_UNIT_SIZE
        return True

    def offset_by_time(
        self, timestamp: float, boundary: str, store_timestamp_at: Callable[[int], int], min_phy_offset: int
    ) -> int:
        """As `ConsumeQueue.offset_by_time`; the times stand in the units."""
        if boundary not in ("lower", "upper"):
            raise ValueError(f"boundary is {boundary!r}; give 'lower' or 'upper'")
        low = start = self.first_unit_at_or_after(min_phy_offset)
        high = self.unit_num
        while low < high:
            middle = (low + high) // 2
            time = self._read(middle)[3]
            if time < timestamp if boundary == "lower" else time <= timestamp:
                low = middle + 1
            else:
                high = middle
        if boundary == "upper":
            low = max(low - 1, start)
        return self._unit_of(low).queue_offset if low < self.unit_num else self.max_queue_offset
