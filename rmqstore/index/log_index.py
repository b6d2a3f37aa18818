"""What the index files do not cover, found in the log: entries in memory for the stretches that no index file speaks for.

Owns finding these stretches (an index file is gone or damaged, there is none, or the broker died before it indexed the newest
records) and making an index file in memory for each, from the log, within a bound.  It writes nothing to disk (I7).  Answers as the
Java store gives them never ask it.  Records without keys leave no entries, so that a stretch between two files may be empty:
it is gone over once, and then known.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
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

# The end of the log is looked at in steps while another process appends; so many, then it is gone over at once.
_PARTS = 64


class _Part(NamedTuple):
    # A stretch of the log that was gone over, and its entries; None where it has none.  What of it no record could be read of.
    begin: int
    end: int
    entries: IndexFile | None
    damage: tuple[tuple[int, int], ...] = ()


class LogIndex:
    """The index files of a store, and entries of those stretches of its log that they do not cover, as a `KeySource`.

    - `database`: what it covers need not be gone over either.
    - `uncovered`: phy offsets, begin and end, of what neither the index nor this covers; ascending.
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
        # What the index in RocksDB covered then.
        self._of_database: list[tuple[int, int]] = []
        self._tail: tuple[int, int] | None = None
        # Who had the store for writing when it was looked at last: when `abort` was written, and whether he was there.
        self._writer: tuple[tuple[int, int] | None, bool] = None, False
        self._complained: set[str] = set()
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Forget what the log says: it was replaced."""
        self._parts, self._bytes, self._known = [], 0, None

    def look_again(self) -> None:
        """Have the next question look anew where a writer came or went since: a dead one leaves what nobody indexes."""
        with self._lock:
            if self._known is not None and self._writer_now() != self._writer:
                self._known = None
                self.index_service.ask_anew()

    def _writer_now(self) -> tuple[tuple[int, int] | None, bool]:
        return abort_mark(self.root), is_held(self.root)

    def stretches(self) -> list[tuple[int, int]]:
        """list of (int, int): phy offsets, begin and end, of what the index does not cover; `cover` goes over these."""
        return self._stretches()[0]

    def candidates(self, sought: SoughtKeys, wanted: np.ndarray | None = None) -> Iterator[Candidates]:
        """Yield the places of entries with the hashes of the keys, see `KeySource`."""
        times = sought.selection.times
        for found in self.index_service.entries(sought.hashes, wanted, lambda index: self.times_in(index, times)):
            yield Candidates(*found)

    def times_in(self, index: IndexFile, times: Span) -> Span:
        """Return the store times by which entries of a file can be chosen; any, if its begin time and first record differ."""
        if times == ANY_TIME:
            return times
        header = index.header
        return times if self.commit_log.store_timestamp_at(header.begin_phy_offset) == header.begin_timestamp else ANY_TIME

    def covered(self) -> list[Span]:
        """Return the parts of the log that this or `database` covers, see `KeySource`."""
        return without(self.commit_log.min_offset, self.commit_log.max_offset, self.uncovered)

    def doubt(self, sought: SoughtKeys, rejected: Candidates) -> None:
        """Have the index service distrust the files whose entries cannot be true, see `KeySource`."""
        key_hashes, phy_offsets = sought.hashes[rejected.numbers], rejected.phy_offsets
        for place in np.flatnonzero(phy_offsets >= self.commit_log.max_offset).tolist():
            self.index_service.distrust_entry(int(key_hashes[place]), int(phy_offsets[place]))
        for part, regions, bases, numbers in self.commit_log.located(phy_offsets):
            hashes, offsets = key_hashes[part], phy_offsets[part]
            place = -1
            while (place := doubtful_entry(regions, bases, numbers, offsets, hashes, place + 1)) >= 0:
                self.index_service.distrust_entry(int(hashes[place]), int(offsets[place]))

    def is_current(self) -> bool:
        """bool: `cover` would find nothing new in the list of index files, nor at the end of log and index."""
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
        # None where it was deleted since it was listed, or is damaged.
        try:
            return self.index_service.file(name)
        except (FileNotFoundError, OffsetOutOfRangeError, GeometryError):
            return None

    def cover(self, max_log_bytes: int | None, progress: Callable[[int, int], object] | None = None) -> None:
        """Go over what the index files do not cover, the newest first, and let the index service ask it.

        - `max_log_bytes`: go over at most so many bytes, those of earlier calls included; None = all.
        - `progress`: told how many bytes were gone over, and how many there are to go over.
        """
        limit = 1 << 62 if max_log_bytes is None else max(max_log_bytes, 0)
        with self._lock:
            while not self._cover(limit, progress):
                pass  # A writer's next file came meanwhile.

    def renew_lock(self) -> None:
        """Give up the lock that another thread of a parent process may have held at a fork."""
        self._lock = threading.Lock()

    def _cover(self, limit: int, progress: Callable[[int, int], object] | None) -> bool:
        # False where the list of index files changed meanwhile.
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
                part = self._go_over(first, end, progress, done, total)
                # Where it began in the middle of a record, it covers from the next one on.
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
        # Entries from the log stand where they would stand in the index: by the offset of the first.  Those of the log's end, from
        # `tail` on, are newer than any file: they hold whatever a file has of it too.
        names = self.index_service.names
        begins = [self._span(name, quiet=True)[0] for name in names]
        order: list[tuple[int, int, str, IndexFile | None]] = [
            (max(begins[: i + 1]), 0, name, None) for i, name in enumerate(names)
        ]
        order += [(part.begin, 1, f"log{part.begin:019d}", part.entries) for part in self._parts if part.entries is not None]
        # A file that begins with the last record of a stretch is newer than it.
        order.sort(key=lambda each: (tail is not None and each[1] == 1 and each[0] >= tail, each[0], -each[1]))
        self.index_service.log_damage = tuple(joined(stretch for part in self._parts for stretch in part.damage))
        return self.index_service.take_log_files(
            [(name, index) for _, _, name, index in order], not self.uncovered, version
        )

    def _span(self, name: str, *, quiet: bool = False) -> tuple[int, int, int]:
        # Phy offsets of the first and last record of an index file, and of the end of the last; (-1, -1, -1) for one that says
        # nothing: it is empty, or what it says of itself cannot be.
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
                # A living writer is ahead of what is known of its log, and sets the header's fields one by one.
                last = min(last, of_entry)
                sound = last >= first
            else:
                sound = last == of_entry and last < self.commit_log.max_offset
        if not sound:
            if not quiet and name not in self._complained:
                self._complained.add(name)
                logger.warning(
                    "the header of index file %s does not agree with its entries; the log is searched instead "
                    "(rmqstore verify says more, rmqstore rebuild --what index rebuilds it)",
                    os.path.join(self.index_service.path, name),
                )
            return -1, -1, -1
        message = self.commit_log.look_up(last)
        return first, last, last + 1 if message is None else last + message.size

    def _stretches(self) -> tuple[list[tuple[int, int]], bool]:
        # What the index leaves out, ascending; whether the end of the log is among it.
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
                # The records at both ends may have entries in the file that is not there.
                message = log.look_up(first_of)
                found.append((last, min(first_of + (1 if message is None else message.size), high)))
            if end_of >= at:
                at, last = end_of, last_of
        service = self.index_service
        if at > low and last >= 0 and service.names[-1] not in service.distrusted and is_held(self.root):
            # A living writer indexes the end of the log itself, if it has an index.
            return found, False
        unsure = self._unsure(last)
        if at >= high and unsure >= high:
            return found, False
        begin = max(min(last, unsure), low)
        # Up to there the stretches before it are part of it.
        found = [(first, min(end, begin)) for first, end in found if first < begin]
        return [*found, (begin, high)], True

    def _unsure(self, last: int) -> int:
        # From which record on the index may lack entries though its newest file has one of the record at `last`.  Whoever closed
        # the store in order put all; one that died between two entries left out some of its last record, and lost power takes
        # what was not on disk yet, of which only this package's own mark in the checkpoint tells.
        if abort_mark(self.root) is None:
            return self.commit_log.max_offset
        flushed = Checkpoint.load_or_zeros(os.path.join(self.root, "checkpoint")).flushed_offset
        return last if flushed < 0 else min(flushed, last)

    def _pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        # By segment, so that what is newest can be gone over first.
        offsets, size = self.commit_log.files.offsets, self.commit_log.segment_size
        cuts = [base for base in offsets if begin < base < end]
        ends = [*cuts, end]
        return [
            (first, until)
            for first, until in zip([begin, *cuts], ends, strict=True)
            # Where a segment is missing there is nothing to look at.
            if (at := bisect_left(offsets, first + 1) - 1) >= 0 and first < offsets[at] + size
        ]

    def _go_over(
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
        # Some entries are left free: a full file sends readers to look for the next.
        config = self.index_service.config.replace(max_hash_slot_num=max(entries, 16), max_index_num=entries + 16)
        path = os.path.join(self.index_service.path, name)
        return IndexFile.over(MemoryFile(path, config.index_file_size), config)
