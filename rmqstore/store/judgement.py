"""Judge a store that is being recovered: where the log ends, what queues and index lack, which index entries are sound.

Only `IndexSurvey.cut` writes.  The index ends in the oldest file that lacks pages.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, field

from rmqstore import _core
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.log_walk import Stretch
from rmqstore.errors import ChooseRecovery, CorruptionError, Sentence
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.index.index_file import IndexFile
from rmqstore.index.index_service import IndexService
from rmqstore.store.dispatch_rules import Agreement

__all__ = ["FAR", "IndexSurvey", "Judgement", "LogJudge"]

logger = logging.getLogger(__name__)


class IndexSurvey:
    """The sound entries of the index files, found without changing them, and the cut after them.

    The checkpoint covers files that were full and flushed; all others may lack pages after a crash.  `kept_end` is the phy offset
    of the last entry that will stay, -1 for none.
    """

    def __init__(self, commit_log: CommitLog, index_service: IndexService, checkpoint: Checkpoint, clean: bool):
        self.commit_log = commit_log
        self.index_service = index_service
        self.checkpoint = checkpoint
        self.clean = clean
        # Counts of the files that may lack pages, up to the one at which the index ends; and files whose chains need repair.
        self.counts: dict[int, int] = {}
        self.unlinked: set[int] = set()
        self.last = len(index_service.names) - 1
        for number in range(self._first_in_doubt(), len(index_service.names)):
            count, linked = self._survey(number)
            self.counts[number], self.last = count, number
            if not linked:
                self.unlinked.add(number)
            if count < self._expected(number) or (number < len(index_service.names) - 1 and count <= 1):
                break
        self.kept_end = self._end_of(self.last)

    def _file(self, number: int) -> IndexFile:
        return self.index_service.file(self.index_service.names[number])

    def _stored(self, number: int) -> int:
        index = self._file(number)
        return min(index.index_count, index.index_num)

    def _expected(self, number: int) -> int:
        # Every file but the newest is full.
        index = self._file(number)
        return index.index_count if number == len(self.index_service.names) - 1 else index.index_num

    def _count(self, number: int) -> int:
        return self.counts[number] if number in self.counts else self._stored(number)

    def _end_of(self, number: int) -> int:
        while number >= 0:
            count = self._count(number)
            if count > 1:
                return int(self._file(number).read_entry(count - 1)[1])
            number -= 1
        return -1

    def _first_in_doubt(self) -> int:
        newest = len(self.index_service.names) - 1
        for number in range(newest, -1, -1):
            index = self._file(number)
            header, stored = index.header, self._stored(number)
            whole = (
                stored == header.index_count
                and (stored <= 1 or index.read_entry(stored - 1)[1] == header.end_phy_offset)
                and stored == self._expected(number)
            )
            flushed = number < newest and self.checkpoint.has_index(header.end_timestamp, header.end_phy_offset)
            if whole and (self.clean or flushed):
                return number + 1
        return 0

    def _survey(self, number: int) -> tuple[int, bool]:
        index = self._file(number)
        count, linked = index.survey(2**63 - 1, max(self._end_of(number - 1), 0))
        if not self.clean and count > 1 and self._is_torn(index, count - 1):
            return count - 1, False
        return count, linked

    def _is_torn(self, index: IndexFile, number: int) -> bool:
        # The last entry may begin on a page that was written and end on one that was lost.
        key_hash, phy_offset, time_diff, _ = index.read_entry(number)
        columns = RecordColumns(1)
        for _ in self.commit_log.stretches(phy_offset, phy_offset + 1, columns, check_crc=False, resume=False):
            break
        if columns.count == 0 or key_hash not in columns.key_hash[: columns.key_start[1]]:
            return True
        if number == 1:
            return False
        begin = self.commit_log.store_timestamp_at(index.read_entry(1)[1], behind_end=True)
        if begin < 0:
            # Retention deleted that record.  The header has its time, unless it is lost as well.
            begin = index.header.begin_timestamp
        expected = min(max((int(columns.store_timestamp[0]) - begin) // 1000, 0), 2**31 - 1)
        return begin > 0 and time_diff != expected

    def cut(self, end: int) -> tuple[int, int]:
        """Drop entries after the last sound one and those of records at or after `end`; return the numbers of entries and files."""
        names = self.index_service.names
        self._limit(end)
        dropped = sum(max(self._stored(number) - 1, 0) for number in range(self.last + 1, len(names)))
        for name in reversed(names[self.last + 1 :]):
            self.index_service.remove(name)
        for number, count in sorted(self.counts.items(), reverse=True):
            index = self._file(number)
            index.mapped_file.reserve(index.mapped_file.size)
            stored = self._stored(number)
            dropped += stored - count
            if number in self.unlinked or count != stored:
                index.relink(count, erase=False)
            index.mapped_file.zero_from(index.entry_pos(count))
            self._repair_header(index, number, count)
        if self.last > 0 and self.counts.get(self.last, 2) <= 1:
            self.index_service.remove(names[self.last])
        return dropped, len(names) - len(self.index_service.names)

    def _limit(self, end: int) -> None:
        # Go back to the last entry whose record is before the end of the log.
        while self.last >= 0:
            index, count = self._file(self.last), self._count(self.last)
            if count > 1 and index.read_entry(count - 1)[1] >= end:
                if self.last in self.counts:
                    count = bisect_left(range(1, count), end, key=lambda entry: index.read_entry(entry)[1]) + 1
                else:
                    count = index.survey(end, max(self._end_of(self.last - 1), 0))[0]
                self.counts[self.last] = count
                self.unlinked.add(self.last)
            if count > 1 or self.last == 0 or self.last not in self.counts:
                return
            del self.counts[self.last]
            self.last -= 1

    def _repair_header(self, index: IndexFile, number: int, count: int) -> None:
        begin, end_time, begin_phy, end_phy, slots, stored = index.read_header()
        if count > 1:
            begin_phy, end_phy = index.read_entry(1)[1], index.read_entry(count - 1)[1]
            first = self.commit_log.store_timestamp_at(begin_phy, behind_end=True)
            last = self.commit_log.store_timestamp_at(end_phy, behind_end=True)
            begin = first if first >= 0 else begin
            end_time = last if last >= 0 else end_time
        elif number == 0:
            begin = end_time = begin_phy = end_phy = 0
        repaired = (begin, end_time, begin_phy, end_phy, slots, stored)
        if repaired != index.read_header():
            index.write_header(*repaired)


FAR = 2**63 - 1
"""Greater than every phy offset."""


@dataclass(slots=True)
class Judgement:
    """The scanned part of the log, in phy offsets: ranges of whole records, and the damage between them (offset, size, verdict).

    `units_from` and `entries_from` are the first records that queues, or the index, may lack something of; `FAR` for none.
    """

    begin: int
    end: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    damage: list[tuple[int, int, str]] = field(default_factory=list)
    records: int = 0
    last_record: int = -1
    units_from: int = FAR
    entries_from: int = FAR

    @property
    def dispatch_from(self) -> int:
        """int: the first record that queues or index may lack something of."""
        return min(self.units_from, self.entries_from)

    def note(self, stretch: Stretch) -> None:
        """Count the records of a stretch."""
        self.records += stretch.records
        self.last_record = stretch.last_record


class LogJudge:
    """Reads the log of one store, CRCs included, and judges it."""

    def __init__(
        self, commit_log: CommitLog, agreement: Agreement, index: IndexSurvey | None, newest_unit_end: int, clean: bool
    ):
        self.commit_log = commit_log
        self.agreement = agreement
        self.index_end = FAR if index is None else index.kept_end
        self.newest_unit_end = newest_unit_end
        self.clean = clean
        # The search for whole records after damage, in the segment that was searched last, and the end of the bytes there.
        self._search: _core.RecordSearch | None = None
        self._search_limit = 0

    def judge(self, begin: int, marked_end: int, mode: str) -> Judgement:
        """Judge the log, beginning at `begin`."""
        judged = Judgement(begin, begin)
        at = start = begin
        while True:
            at, verdict = self._read_on(at, judged)
            if verdict is None:
                break
            following = self._whole_record_after(at, judged, max(self.newest_unit_end, marked_end))
            if following < 0 and not self._known_after(at):
                break
            mapped_file = self.commit_log.files.find(at)
            assert mapped_file is not None  # Something was found there.
            pos = at - mapped_file.file_from_offset
            behind = (
                f"whole records follow from phy offset {following}, in a log of {len(self.commit_log.files)} segments"
                if following >= 0
                else "queue units or later segments say that the log goes on there"
            )
            if mode == "strict":
                raise CorruptionError(
                    Sentence(
                        f"the commit log is damaged at phy offset {at} (", verdict, f"), and {behind}", ChooseRecovery()
                    ),
                    mapped_file.path,
                    pos,
                )
            where = pos, mapped_file.path
            if mode == "truncate" or following < 0:
                logger.warning("the commit log is cut at phy offset %d, %d bytes into %s (%s)", at, *where, behind)
                break
            logger.warning(
                "left %d damaged bytes in place at phy offset %d, %d bytes into %s", following - at, at, *where
            )
            judged.ranges.append((start, at))
            judged.damage.append((at, following - at, verdict.name))
            at = start = following
        judged.ranges.append((start, at))
        judged.end = at
        return judged

    def _read_on(self, at: int, judged: Judgement) -> tuple[int, Verdict | None]:
        # Reads records from `at` to the first place without one, and returns that place and its verdict; None after the last
        # segment.  Until a unit is missing, records are also compared with the queues.
        log = self.commit_log
        end = max((base + log.segment_size for base in log.files.offsets), default=at)
        if judged.units_from == FAR:
            for stretch, columns in log.scans(at, end, keys=False, resume=False):
                if stretch.verdict is not Verdict.RECORD:
                    if stretch.verdict is not Verdict.BLANK:
                        return stretch.begin, stretch.verdict
                    continue
                judged.note(stretch)
                # An index that ends within these records may lack the rest of their entries; of its last record only after a
                # crash.
                if (stretch.last_record if self.clean else stretch.end) > self.index_end:
                    judged.entries_from = min(judged.entries_from, stretch.begin)
                if not self.agreement.holds(columns):
                    judged.units_from = stretch.begin
                    at = stretch.end
                    break
            else:
                return end, None
        for stretch in log.stretches(at, end, resume=False):
            if stretch.verdict is Verdict.RECORD:
                judged.note(stretch)
            elif stretch.verdict is not Verdict.BLANK:
                return stretch.begin, stretch.verdict
        return end, None

    def _whole_record_after(self, at: int, judged: Judgement, known_end: int) -> int:
        # The first whole record of this log after the damage, in this segment or a later one; -1 for none.
        log = self.commit_log
        for base in log.files.offsets:
            if base + log.segment_size <= at:
                continue
            mapped_file = log.files.file(base)
            pos = max(at + 1 - base, 0)
            if self._search is None or self._search.region is not mapped_file.region:
                self._search = _core.RecordSearch(mapped_file.region, base, log.crc_check)
                self._search_limit = mapped_file.last_nonzero(pos)
            found = self._search.find(pos, self._search_limit)
            if found >= 0:
                return base + found if self._belongs(base + found, judged, known_end) else -1
        return -1

    def _belongs(self, offset: int, judged: Judgement, known_end: int) -> bool:
        # RocketMQ's truncation leaves old records after the end (its issue 10666): they are older than the last record, and
        # neither units nor the checkpoint point to them.  All other records are part of this log.
        if known_end > offset or judged.last_record < 0:
            return True
        last = self.commit_log.store_timestamp_at(judged.last_record, behind_end=True)
        return self.commit_log.store_timestamp_at(offset, behind_end=True) >= last

    def _known_after(self, at: int) -> bool:
        # Without a whole record after it the end is a torn write, unless an orderly exit left units that point further, or a
        # later segment has bytes.
        if self.clean and self.newest_unit_end > at:
            return True
        files = self.commit_log.files
        return any(base > at and files.file(base).last_nonzero() > 0 for base in files.offsets)
