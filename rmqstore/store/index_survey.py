"""The index after a crash: which entries are sound, and the cut after the last of them.

Owns that judgement and that cut, for `recovery`.  Looking changes nothing; only `IndexSurvey.cut` writes.  Invariants:

- Entries follow the order of the log, so the oldest file that lacks pages is where the index ends.
- After a cut every file says in its header what its entries say, and the next record is dispatched after them.
"""

from __future__ import annotations

from bisect import bisect_left

from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.index.index_file import IndexFile
from rmqstore.index.index_service import IndexService

__all__ = ["IndexSurvey"]


class IndexSurvey:
    """What is sound in the index files, found without changing them, and the cut that follows from it.

    A file that became full has been flushed, and the checkpoint says so.  All others may lack pages after a crash: the
    oldest of them that does is where the index ends, as entries follow the order of the log.

    Attributes
    ----------
    kept_end : int
        phy offset of the last entry that will stay, -1 if none does.
    """

    def __init__(self, commit_log: CommitLog, index_service: IndexService, checkpoint: Checkpoint, clean: bool):
        self.commit_log = commit_log
        self.index_service = index_service
        self.checkpoint = checkpoint
        self.clean = clean
        # Counts of the files that may lack pages, up to the one at which the index ends; those to set right as well.
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
        # An entry may begin on a page that was written and end on one that was lost; the next one is all zeros then, so
        # only the last can be like that.
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
            # Retention deleted that record. The header, which may be lost as well, says its time too.
            begin = index.header.begin_timestamp
        expected = min(max((int(columns.store_timestamp[0]) - begin) // 1000, 0), 2**31 - 1)
        return begin > 0 and time_diff != expected

    def cut(self, end: int) -> tuple[int, int]:
        """Drop the entries after the last sound one and those of records from `end` on; how many, and how many files."""
        names = self.index_service.names
        self._limit(end)
        dropped = sum(max(self._stored(number) - 1, 0) for number in range(self.last + 1, len(names)))
        for name in reversed(names[self.last + 1 :]):
            self.index_service.remove(name)
        for number, count in sorted(self.counts.items(), reverse=True):
            index = self._file(number)
            index.mapped_file.reserve()
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
        # Go back to the last entry whose record lies before the end of the log.
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
