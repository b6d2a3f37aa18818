"""Find lost parts of the commit log, and the queue units and index entries that point to them.

A rebuild or recovery that would drop such units and entries is refused until the caller names their number.  Files are read as
bytes, so that queues count which nothing else can open.

- A unit or entry counts where the log has no segment, or after the end of a log that is known to have been longer.
- Retention deleted what points before the log, except in files that it would have deleted too.
- A unit counts only in the order of its neighbours: one that lost a bit is repaired from the log.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rmqstore import _numpy as np
from rmqstore._core import PRE_FILL_SIZE, BatchUnitLayout, IndexLayout, UnitLayout
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.queue_folders import queue_directories
from rmqstore.errors import CorruptionError, DropUnits, LostLogError, MissingDependencyError, Sentence
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import name_of_offset, offset_of_name
from rmqstore.files.open_file import open_regular, read_at, written_end
from rmqstore.files.os_errors import is_unreadable
from rmqstore.rocksdb.database import queue_databases
from rmqstore.spans import joined

__all__ = ["claimed_end", "end_of_known", "is_named", "lost_ranges", "lost_text", "refuse_loss", "units_outside"]

logger = logging.getLogger(__name__)

_UNIT_SIZES = {"consumequeue": int(UnitLayout.UNIT_SIZE), "batchconsumequeue": int(BatchUnitLayout.BATCH_UNIT_SIZE)}
_HEADER_SIZE = int(IndexLayout.INDEX_HEADER_SIZE)
_ENTRY_SIZE = int(IndexLayout.ENTRY_SIZE)
_FAR = 2**63 - 1


class Outside(NamedTuple):
    """Units or entries of one file that point outside the log: their number, the first of them, and its phy offset."""

    num: int
    path: str
    pos: int
    phy_offset: int


def end_of_known(commit_log: CommitLog, end: int, checkpoint: Checkpoint, clean: bool) -> int:
    """Return the phy offset at and after which units point to lost parts of the log.

    A loss of power takes the end of the newest segment, and leaves units that point there; that is no lost part.  Missing
    segments are, and records that the checkpoint counts as forced.
    """
    end = _end_of_bytes(commit_log, end)
    newest = commit_log.last_store_timestamp() or 0
    if clean or checkpoint.flushed_offset > end or checkpoint.physic_msg_timestamp > newest:
        return end
    return max((base + commit_log.segment_size for base in commit_log.files.offsets), default=0)


def _end_of_bytes(commit_log: CommitLog, end: int) -> int:
    # The end of the bytes after `end`: damage is no lost part.
    for base in commit_log.files.offsets:
        begin = max(end - base, 0)
        if begin < commit_log.segment_size:
            last = commit_log.files.file(base).last_nonzero(begin)
            end = base + last if last > begin else end
    return end


def claimed_end(root: str, checkpoint: Checkpoint) -> int:
    """Return the end of the log by the checkpoint and the newest index file; call it before the log's end is searched."""
    end = max(checkpoint.logics_physical_offset, checkpoint.flushed_offset, 0)
    for path in reversed(_files(os.path.join(root, "index"))):
        try:
            with open(open_regular(path), "rb") as file:
                header = file.read(_HEADER_SIZE)
        except OSError:
            continue
        at = int(IndexLayout.INDEX_END_PHY_OFFSET)
        last = int.from_bytes(header[at : at + 8], "big", signed=True)
        if last > 0:
            return max(end, last + 1)
    return end


def lost_ranges(commit_log: CommitLog, claimed: int) -> tuple[tuple[int, int], ...]:
    """Return begin and end of each part of the log that no segment holds: gaps, and the part up to `claimed`."""
    size, offsets = commit_log.segment_size, commit_log.files.offsets
    lost = [(low + size, high) for low, high in itertools.pairwise(offsets) if high > low + size]
    end = commit_log.max_offset
    if claimed > end:
        end = _end_of_bytes(commit_log, end)
        lost += [(end, claimed)] if claimed > end else []
    return tuple(lost)


def is_named(commit_log: CommitLog, begin: int, end: int, paths: set[str | None]) -> bool:
    """Return True if `paths` has each segment of the range from `begin` to `end`."""
    bases = range(begin - begin % commit_log.segment_size, end, commit_log.segment_size)
    # `end` may be any number that a damaged file has.
    return len(bases) <= len(paths) and all(
        os.path.join(commit_log.path, name_of_offset(base)) in paths for base in bases
    )


def lost_text(begin: int, end: int) -> str:
    """Return the warning about one of `lost_ranges`."""
    return (
        f"the commit log lacks phy offsets {begin} to {end}, which it had: segments are missing, and messages there are not seen. "
        "Mount the disk of the segments, or take them from a backup; rmqstore verify counts what leads there"
    )


def refuse_loss(
    commit_log: CommitLog, end: int, kinds: Iterable[str], drop_units: int = 0, *, replaced: bool = True
) -> None:
    """Raise LostLogError unless `drop_units` is the number of units and entries that point outside the log.

    With `replaced`, files of `kinds` are replaced as a whole; otherwise only units that point after the log are cut.
    """
    found = list(units_outside(commit_log, end, kinds, replaced=replaced))
    num = sum(each.num for each in found)
    if num in (0, drop_units):
        if num:
            logger.warning("%s: %d queue units and index entries go that lead outside the log", commit_log.path, num)
        return
    first = min(found, key=lambda each: each.phy_offset)
    told = f"; {drop_units} were to go" if drop_units else ""
    raise LostLogError(
        Sentence(
            f"{num} queue units and index entries lead outside the commit log, the first to phy offset {first.phy_offset}{told}: "
            "segments are missing. Nothing was changed. Bring the segments back: mount their disk, or make commitlog a link to "
            "the storePathCommitLog of the broker.conf. To drop what leads to them for good, give ",
            DropUnits(num, recovery=not replaced),
        ),
        first.path,
        first.pos,
        num,
    )


def units_outside(commit_log: CommitLog, end: int, kinds: Iterable[str], *, replaced: bool = True) -> Iterator[Outside]:
    """Yield for each file of queues and index what points outside the log; for `replaced` see `refuse_loss`."""
    kinds = tuple(kinds)
    root = os.path.dirname(commit_log.path)
    runs = _Runs.of(commit_log, end, replaced)
    if "consumequeue" in kinds:
        for kind, unit_size in _UNIT_SIZES.items():
            for _, _, directory in queue_directories(root, kind, {}):
                paths = [path for path in _files(directory) if offset_of_name(os.path.basename(path)) is not None]
                for path in paths:
                    is_expired = replaced and path != paths[-1]
                    yield from _read_by(functools.partial(_of_queue_file, path, unit_size, runs, is_expired), replaced)
        for folder in queue_databases(root) if replaced else ():
            yield from _of_database(folder, runs)
    if "index" in kinds:
        for path in _files(os.path.join(root, "index")):
            yield from _read_by(functools.partial(_of_index, path, commit_log.config.max_hash_slot_num, runs), replaced)


def _read_by(read: Callable[[], Iterator[Outside]], replaced: bool) -> list[Outside]:
    try:
        return list(read())
    except OSError as error:
        # Nothing of a file that stays is lost; readers report that it is unreadable.
        if replaced or not is_unreadable(error):
            raise
        return []


class _Runs:
    # The ranges of phy offsets that the log has, as begins and ends that ascend; `begin` of the first.

    def __init__(self, bounds: list[int], begin: int, segment_size: int):
        self.bounds = np.array(bounds, np.int64)
        self.begin, self.segment_size = begin, segment_size

    @classmethod
    def of(cls, commit_log: CommitLog, end: int, replaced: bool) -> _Runs:
        size = commit_log.segment_size
        spans = joined((base, base + size) for base in commit_log.files.offsets)
        bounds = [bound for span in spans for bound in span if bound < end]
        if len(bounds) % 2:
            bounds.append(end)
        begin = bounds[0] if bounds else 0
        if not replaced:
            # A gap stays as it is.
            bounds = [0, end] if end > 0 else []
        return cls(bounds, begin, size)

    def number(self, phy_offsets: np.ndarray) -> np.ndarray:
        # Odd within a range, 0 before the first.
        return np.searchsorted(self.bounds, phy_offsets, "right")

    def outside(self, phy_offsets: np.ndarray, sizes: np.ndarray | None) -> np.ndarray:
        # Rows that point outside, in the order of those that do not.  Retention deleted what is before the log.
        numbers = self.number(phy_offsets)
        inside = numbers % 2 == 1
        if len(self.bounds):
            outside = (numbers % 2 == 0) & (phy_offsets >= self.begin)
        else:
            outside = phy_offsets >= 0
        if sizes is not None:
            # No record crosses the end of its segment.
            outside &= (sizes > 0) & (phy_offsets % self.segment_size + sizes <= self.segment_size)
        before = np.maximum.accumulate(np.where(inside, phy_offsets, -1))
        after = np.minimum.accumulate(np.where(inside, phy_offsets, _FAR)[::-1])[::-1]
        return np.flatnonzero(outside & (phy_offsets > before) & (phy_offsets < after))


def _entry(fd: int, pos: int) -> int:
    return int.from_bytes(os.pread(fd, 8, pos + int(IndexLayout.ENTRY_PHY_OFFSET)), "big", signed=True)


def _files(directory: str) -> list[str]:
    # The code that replaces the files reports a folder that cannot be listed.
    found = listing(directory, lambda entry: entry.name.isascii() and entry.name.isdigit())
    return [path for path in found.paths if os.path.isfile(path)]


def _of_queue_file(path: str, unit_size: int, runs: _Runs, is_expired: bool) -> Iterator[Outside]:
    # With `is_expired` a later file follows, so that retention would have deleted this one with the segments of its units.
    fd = open_regular(path)
    try:
        end = written_end(fd)
        first, last = _unit(fd, 0), _unit(fd, (end - 1) // unit_size * unit_size)
        if first is not None and last is not None and first <= last:
            if is_expired and last < runs.begin:
                yield Outside(-(-end // unit_size), path, 0, first)
                return
            if _are_together(runs, first, last):
                # Units ascend, so that those between them point there as well.
                return
        yield from _of_bytes(path, read_at(fd, end, 0), unit_size, runs)
    finally:
        os.close(fd)


def _unit(fd: int, pos: int) -> int | None:
    # The phy offset of a unit; None if it points to no record.
    if pos < 0:
        return None
    data = os.pread(fd, 12, pos)
    phy_offset, size = int.from_bytes(data[:8], "big", signed=True), int.from_bytes(data[8:], "big", signed=True)
    return None if size <= 0 or phy_offset < 0 or (phy_offset, size) == (0, PRE_FILL_SIZE) else phy_offset


def _are_together(runs: _Runs, first: int, last: int) -> bool:
    low, high = runs.number(np.array([first, last])).tolist()
    return low == high and (low % 2 == 1 or (bool(len(runs.bounds)) and last < runs.begin))


def _of_bytes(path: str, data: bytes, unit_size: int, runs: _Runs) -> Iterator[Outside]:
    # The last unit may end in zeros, which `written_end` leaves out.
    num = -(-len(data) // unit_size)
    layout = np.dtype([("phy", ">i8"), ("size", ">i4"), ("", f"V{unit_size - 12}")])
    units = np.frombuffer(data.ljust(num * unit_size, b"\0"), layout)
    phy_offsets, sizes = units["phy"].astype(np.int64), units["size"].astype(np.int64)
    written = np.flatnonzero((sizes > 0) & ((phy_offsets != 0) | (sizes != PRE_FILL_SIZE)))
    rows = written[runs.outside(phy_offsets[written], sizes[written])]
    if len(rows):
        yield Outside(len(rows), path, int(rows[0]) * unit_size, int(phy_offsets[rows[0]]))


def _of_database(folder: str, runs: _Runs) -> Iterator[Outside]:
    # Imported here because few stores have such a database.
    from rmqstore.rocksdb.queues import QueueDatabase

    try:
        database = QueueDatabase(folder)
    except (CorruptionError, MissingDependencyError, FileNotFoundError):
        # It is not deleted, but moved aside.
        return
    try:
        for (topic, queue_id), last in database.last.items():
            if _are_together(runs, last.phy_offset, last.phy_offset):
                # Gaps before it are the log's, which a rebuild reads.
                continue
            units = database.units(topic, queue_id, 0, last.queue_offset + 1, [])
            rows = runs.outside(units.phy_offsets, units.sizes.astype(np.int64))
            if len(rows):
                yield Outside(len(rows), folder, 0, int(units.phy_offsets[rows[0]]))
    finally:
        database.close()


def _of_index(path: str, slot_num: int, runs: _Runs) -> Iterator[Outside]:
    # Entry 0 is never used.
    begin = _HEADER_SIZE + slot_num * int(IndexLayout.SLOT_SIZE) + _ENTRY_SIZE
    with open(open_regular(path), "rb") as file:
        header = file.read(_HEADER_SIZE)
        at = int(IndexLayout.INDEX_COUNT)
        room = (os.fstat(file.fileno()).st_size - begin) // _ENTRY_SIZE
        num = min(int.from_bytes(header[at : at + 4], "big", signed=True) - 1, room)
        if num <= 0:
            return
        first, last = (_entry(file.fileno(), begin + number * _ENTRY_SIZE) for number in (0, num - 1))
        if 0 <= first <= last and _are_together(runs, first, last):
            return
        file.seek(begin)
        data = file.read(num * _ENTRY_SIZE)
    phy_offsets = np.frombuffer(data, np.dtype([("hash", ">i4"), ("phy", ">i8"), ("", "V8")]))["phy"].astype(np.int64)
    rows = runs.outside(phy_offsets, None)
    # An entry past the end that the header states is damaged, and says nothing of the log.
    at = int(IndexLayout.INDEX_END_PHY_OFFSET)
    rows = rows[phy_offsets[rows] <= int.from_bytes(header[at : at + 8], "big", signed=True)]
    if len(rows):
        yield Outside(len(rows), path, begin + int(rows[0]) * _ENTRY_SIZE, int(phy_offsets[rows[0]]))
