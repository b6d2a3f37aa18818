"""Index entries in memory for the parts of the log that no index file covers.

Owns finding these stretches (a file is missing or damaged, or the broker died before it indexed the newest records) and building
an index file in memory for each, within a bound.  It writes nothing to disk (I7).  Java-compatible searches never use it.  A
stretch may hold no key; it is scanned once anyway.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rmqstore import _numpy as np
from rmqstore._core import Verdict, doubtful_entry
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.errors import GeometryError, OffsetOutOfRangeError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.mapped_file import MemoryFile
from rmqstore.files.store_lock import abort_mark, is_held
from rmqstore.index.database_index import DatabaseIndex
from rmqstore.index.index_file import IndexFile
from rmqstore.index.index_service import IndexService
from rmqstore.index.key_source import Candidates, SoughtKeys
from rmqstore.selection import ANY_TIME
from rmqstore.spans import Span, joined, without

__all__ = ["LogIndex"]

logger = logging.getLogger(__name__)

# The number of steps in which a growing log is scanned before all of it is scanned at once.
_PARTS = 64


class _Part(NamedTuple):
    # A scanned stretch of the log, its entries or None, and the unreadable ranges in it.
    begin: int
    end: int
    entries: IndexFile | None
    damage: tuple[tuple[int, int], ...] = ()


class LogIndex:
    """The index files of a store, and entries for the stretches of its log that they do not cover, as a `KeySource`.

    - `database`: the index in RocksDB; what it covers is not scanned.
    - `uncovered`: the ranges of phy offsets that neither covers, ascending.
    """

    def __init__(
        self, root: str, commit_log: CommitLog, index_service: IndexService, database: DatabaseIndex | None = None
    ):
        self.root = root
        self.database = database
        self.commit_log = commit_log
        self.index_service = index_service
        self.uncovered: tuple[tuple[int, int], ...] = ()
        self._parts: list[_Part] = []
        self._bytes = 0
        self._known: tuple[int, int] | None = None
        # The ranges that the index in RocksDB covered at the last scan.
        self._of_database: list[tuple[int, int]] = []
        self._tail: tuple[int, int] | None = None
        # The time of the `abort` file at the last scan, and whether a writer held the store.
        self._writer: tuple[tuple[int, int] | None, bool] = None, False
        self._complained: set[str] = set()
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Forget all entries from the log, which was replaced."""
        self._parts, self._bytes, self._known = [], 0, None

    def look_again(self) -> None:
        """Invalidate the entries if a writer started or died: a dead writer leaves records that nobody indexes."""
        with self._lock:
            if self._known is not None and self._writer_now() != self._writer:
                self._known = None
                self.index_service.invalidate()

    def _writer_now(self) -> tuple[tuple[int, int] | None, bool]:
        return abort_mark(self.root), is_held(self.root)

    def stretches(self) -> list[tuple[int, int]]:
        """Return the ranges of phy offsets that the index does not cover and `cover` scans."""
        return self._stretches()[0]

    def candidates(self, sought: SoughtKeys, wanted: np.ndarray | None = None) -> Iterator[Candidates]:
        """Yield the places of entries with the hashes of the keys, see `KeySource`."""
        times = sought.selection.times
        for found in self.index_service.entries(sought.hashes, wanted, lambda index: self.times_in(index, times)):
            yield Candidates(*found)

    def times_in(self, index: IndexFile, times: Span) -> Span:
        """Return the store times by which entries of a file can be chosen: any, if its begin time contradicts its first record."""
        if times == ANY_TIME:
            return times
        header = index.header
        return times if self.commit_log.store_timestamp_at(header.begin_phy_offset) == header.begin_timestamp else ANY_TIME

    def covered(self) -> list[Span]:
        """Return the parts of the log that this or `database` covers, see `KeySource`."""
        return without(self.commit_log.min_offset, self.commit_log.max_offset, self.uncovered)

    def doubt(self, sought: SoughtKeys, rejected: Candidates) -> None:
        """Make the index service distrust files with impossible entries, see `KeySource`."""
        key_hashes, phy_offsets = sought.hashes[rejected.numbers], rejected.phy_offsets
        for place in np.flatnonzero(phy_offsets >= self.commit_log.max_offset).tolist():
            self.index_service.distrust_entry(int(key_hashes[place]), int(phy_offsets[place]))
        for part, regions, bases, numbers in self.commit_log.located(phy_offsets):
            hashes, offsets = key_hashes[part], phy_offsets[part]
            place = -1
            while (place := doubtful_entry(regions, bases, numbers, offsets, hashes, place + 1)) >= 0:
                self.index_service.distrust_entry(int(hashes[place]), int(offsets[place]))

    def is_current(self) -> bool:
        """Return True if neither the list of index files nor the end of log and index changed since `cover`."""
        if self._known is None or self._known[0] != self.index_service.version or not self.index_service.has_log_files:
            return False
        if self.database is not None and self.database.covered() != self._of_database:
            return False
        return self._tail is None or self._tail == self._tail_now()

    def _tail_now(self) -> tuple[int, int]:
        names = self.index_service.names
        newest = self._file(names[-1]) if names else None
        return self.commit_log.max_offset, 0 if newest is None else newest.index_count

    def _file(self, name: str) -> IndexFile | None:
        # None for a deleted or damaged file.
        try:
            return self.index_service.file(name)
        except (FileNotFoundError, OffsetOutOfRangeError, GeometryError):
            return None

    def cover(self, max_log_bytes: int | None, progress: Callable[[int, int], object] | None = None) -> None:
        """Scan what the index files do not cover, the newest first, and give the entries to the index service.

        - `max_log_bytes`: the number of bytes to scan at most, with those of earlier calls; None = all.
        - `progress`: called with the numbers of scanned bytes and of all bytes to scan.
        """
        limit = 1 << 62 if max_log_bytes is None else max(max_log_bytes, 0)
        with self._lock:
            while not self._cover(limit, progress):
                pass  # A writer added a file.

    def renew_lock(self) -> None:
        """Replace the lock after a fork."""
        self._lock = threading.Lock()

    def _cover(self, limit: int, progress: Callable[[int, int], object] | None) -> bool:
        # False if the list of index files changed.
        if self.is_current() and (not self.uncovered or (self._known is not None and limit <= self._known[1])):
            return True
        version, tail, self._writer = self.index_service.version, self._tail_now(), self._writer_now()
        self._of_database = [] if self.database is None else self.database.covered()
        stretches, has_tail = self._stretches()
        wanted = [piece for stretch in stretches for piece in self._pieces(*stretch)]
        self._parts = [part for part in self._parts if any(b <= part.begin and part.end <= e for b, e in stretches)]
        if len(self._parts) > _PARTS + len(wanted):
            self._parts = []
        self._bytes = sum(part.end - part.begin for part in self._parts)
        known = [(part.begin, part.end) for part in self._parts]
        missing = [left for piece in wanted for left in without(*piece, known)]
        total = sum(end - begin for begin, end in missing)
        uncovered, done = [], 0
        for begin, end in reversed(missing):
            room = limit - self._bytes
            first = begin if end - begin <= room else end - room
            if room > 0:
                part = self._scan(first, end, progress, done, total)
                # A part that begins within a record covers from the next record.
                first = part.begin
                self._parts.append(part)
                self._bytes += end - first
                done += end - first
            if first > begin:
                uncovered.append((begin, min(first, end)))
        self._parts.sort(key=lambda part: part.begin)
        self.uncovered = tuple(joined(uncovered))
        self._known, self._tail = (version, limit), tail if has_tail else None
        return self._hand_over(version, stretches[-1][0] if has_tail else None)

    def _hand_over(self, version: int, tail: int | None) -> bool:
        # Parts are ordered among the files by the offset of their first entry.  Parts of the log's end, from `tail`, are newer than
        # any file: they hold all that a file has of it.
        names = self.index_service.names
        begins = [self._span(name, quiet=True)[0] for name in names]
        order: list[tuple[int, int, str, IndexFile | None]] = [
            (max(begins[: i + 1]), 0, name, None) for i, name in enumerate(names)
        ]
        order += [(part.begin, 1, f"log{part.begin:019d}", part.entries) for part in self._parts if part.entries is not None]
        # A file that begins with the last record of a stretch is newer than the stretch.
        order.sort(key=lambda each: (tail is not None and each[1] == 1 and each[0] >= tail, each[0], -each[1]))
        self.index_service.log_damage = tuple(joined(stretch for part in self._parts for stretch in part.damage))
        return self.index_service.take_log_files(
            [(name, index) for _, _, name, index in order], not self.uncovered, version
        )

    def _span(self, name: str, *, quiet: bool = False) -> tuple[int, int, int]:
        # Phy offsets of the first and last record of an index file, and of the end of the last; (-1, -1, -1) for a file that is
        # empty or whose header cannot be true.
        index = None if name in self.index_service.distrusted else self._file(name)
        if index is None:
            return -1, -1, -1
        header = index.header
        first, last = header.begin_phy_offset, header.end_phy_offset
        count = header.index_count
        if count <= 1:
            return -1, -1, -1
        sound = count <= index.index_num and 0 <= first <= last and index.read_entry(1)[1] == first
        if sound:
            of_entry = index.read_entry(count - 1)[1]
            if (last != of_entry or last >= self.commit_log.max_offset) and is_held(self.root):
                # A running writer is ahead of what is known of its log, and sets the header's fields one by one.
                last = min(last, of_entry)
                sound = last >= first
            else:
                sound = last == of_entry and last < self.commit_log.max_offset
        if not sound:
            if not quiet and name not in self._complained:
                self._complained.add(name)
                logger.warning(
                    "the header of index file %s does not agree with its entries; the log is searched instead "
                    "(rmqstore verify reports more, rmqstore rebuild --what index rebuilds it)",
                    os.path.join(self.index_service.path, name),
                )
            return -1, -1, -1
        message = self.commit_log.look_up(last)
        return first, last, last + 1 if message is None else last + message.size

    def _stretches(self) -> tuple[list[tuple[int, int]], bool]:
        # The uncovered stretches, ascending; True if they include the end of the log.
        found, has_tail = self._stretches_of_files()
        if self.database is not None and (covered := self.database.covered()):
            found = [left for stretch in found for left in without(*stretch, covered)]
            has_tail = bool(found) and found[-1][1] >= self.commit_log.max_offset
        return found, has_tail

    def _stretches_of_files(self) -> tuple[list[tuple[int, int]], bool]:
        log = self.commit_log
        low, high = log.min_offset, log.max_offset
        at, last, found = low, low, []
        for name in self.index_service.names:
            first_of, last_of, end_of = self._span(name)
            if first_of < 0 or end_of <= low or at >= high:
                continue
            if first_of > at:
                # The records at both ends may have entries in the missing file.
                message = log.look_up(first_of)
                found.append((last, min(first_of + (1 if message is None else message.size), high)))
            if end_of >= at:
                at, last = end_of, last_of
        service = self.index_service
        if at > low and last >= 0 and service.names[-1] not in service.distrusted and is_held(self.root):
            # A running writer indexes the end of the log itself, if it has an index.
            return found, False
        unsure = self._unsure(last)
        if at >= high and unsure >= high:
            return found, False
        begin = max(min(last, unsure), low)
        # Earlier stretches end there at the latest.
        found = [(first, min(end, begin)) for first, end in found if first < begin]
        return [*found, (begin, high)], True

    def _unsure(self, last: int) -> int:
        # The first record of which the index may lack entries.  A writer that dies leaves out some entries of its last record; a
        # power cut takes what was not on disk, by the checkpoint's mark.
        if abort_mark(self.root) is None:
            return self.commit_log.max_offset
        flushed = Checkpoint.load_or_zeros(os.path.join(self.root, "checkpoint")).flushed_offset
        return last if flushed < 0 else min(flushed, last)

    def _pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        # By segment, so that the newest can be scanned first; missing segments are left out.
        cuts = [base for base in self.commit_log.files.offsets if begin < base < end]
        pieces = zip([begin, *cuts], [*cuts, end], strict=True)
        return [(first, until) for first, until in pieces if self.commit_log.files.find(first) is not None]

    def _scan(
        self, begin: int, end: int, progress: Callable[[int, int], object] | None, done: int, total: int
    ) -> _Part:
        hashes, phy_offsets, times = [np.empty(0, np.int32)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        first = begin
        met = False
        damage = []
        for stretch, columns in self.commit_log.scans(begin, end, check_crc=False):
            if stretch.verdict is not None and stretch.verdict < 0:
                damage.append((stretch.begin, stretch.end))
            if stretch.verdict is Verdict.RECORD:
                if not met:
                    at_record = begin in self.commit_log.files.offsets or stretch.begin == begin
                    first, met = begin if at_record else stretch.begin, True
                num = int(columns.key_start[columns.count])
                of, at = columns.key_records(0, num)
                hashes.append(columns.key_hash[:num].copy())
                phy_offsets.append(of.copy())
                times.append(at.copy())
            if progress is not None:
                progress(done + stretch.end - begin, total)
        entries = sum(map(len, hashes))
        if not entries:
            return _Part(first, end, None, tuple(damage))
        index = self._memory_index(f"log{first:019d}", entries)
        index.put_hashes(np.concatenate(hashes), np.concatenate(phy_offsets), np.concatenate(times))
        return _Part(first, end, index, tuple(damage))

    def _memory_index(self, name: str, entries: int) -> IndexFile:
        # Some entries stay free: a full file makes readers look for the next file.
        config = self.index_service.config.replace(max_hash_slot_num=max(entries, 16), max_index_num=entries + 16)
        path = os.path.join(self.index_service.path, name)
        return IndexFile.over(MemoryFile(path, config.index_file_size), config)
