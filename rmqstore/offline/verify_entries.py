"""Verify index files: compare their entries with the keys of the records of a log, in order."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from rmqstore import _core, _dispatch
from rmqstore import _numpy as np
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config.infer import has_no_entry
from rmqstore.errors import Finding, OffsetOutOfRangeError, finding_of
from rmqstore.files.listing import listing
from rmqstore.files.open_file import why_unreadable
from rmqstore.files.os_errors import is_unreadable
from rmqstore.index.index_file import IndexFile
from rmqstore.index.index_service import IndexService, is_index_name


class IndexCheck:
    """Compares the entries of all index files, in order, with the keys of records in the order of the log.

    `file_number` (from 0) and `entry` (from 1) are where the comparison is; `total` counts the keys of the records so far.
    """

    def __init__(self, index_service: IndexService, commit_log: CommitLog):
        self.index_service = index_service
        self.commit_log = commit_log
        self.names = list(index_service.names)
        self.file_number = 0
        self.entry = 1
        self.index: IndexFile | None = None
        self.started = False
        self.skipped = 0
        self.missing = 0
        self.previous = -1
        self.previous_hashes: list[int] = []
        self.total = 0

    def begin(self, end: int) -> Iterator[Finding]:
        """Check slots, chains and headers; `end` is the end of the log."""
        listed, self.names = self.names, []
        for name in listed:
            try:
                index = self.index_service.file(name)
            except (FileNotFoundError, OffsetOutOfRangeError):
                continue  # The store is in use, and the file expired since it was listed.
            self.names.append(name)
            for pos, detail in index.check_links(end):
                yield Finding(index.path, pos, "bad_index", detail)
            yield from self._header(index)
        self._open(0)

    def _header(self, index: IndexFile) -> Iterator[Finding]:
        header = index.header
        if not 1 < header.index_count <= index.index_num:
            return
        log = self.commit_log
        first, last = index.read_entry(1)[1], index.read_entry(header.index_count - 1)[1]
        for pos, name, stated, needed in (
            (0, "beginTimestamp", header.begin_timestamp, log.store_timestamp_at(first)),
            (8, "endTimestamp", header.end_timestamp, log.store_timestamp_at(last)),
            (16, "beginPhyOffset", header.begin_phy_offset, first),
            (24, "endPhyOffset", header.end_phy_offset, last),
        ):
            if stated != needed and needed >= 0:
                yield Finding(index.path, pos, "bad_index", f"{name} is {stated}, its entries' records need {needed}")

    def go_to(self, file_number: int, entry: int) -> None:
        """Begin at an entry (from 1) of a file (from 0) instead of at the first."""
        self._open(file_number)
        self.entry = entry

    def _open(self, number: int) -> None:
        self.file_number = number
        self.entry = 1
        self.index = self.index_service.file(self.names[number]) if number < len(self.names) else None

    def _left(self) -> tuple[IndexFile | None, int]:
        # The file of the next entry, and the number of entries left in it; None after the last file.
        while self.index is not None:
            left = min(self.index.index_count, self.index.index_num) - self.entry
            if left > 0:
                return self.index, left
            self._open(self.file_number + 1)
        return None, 0

    def _next_offsets(self) -> np.ndarray:
        # Phy offsets of the next entries, all of one file.
        index, left = self._left()
        return np.empty(0, np.int64) if index is None else index.read_entries(self.entry, min(4096, left))[1]

    def records(self, columns: RecordColumns) -> Iterator[Finding]:
        """Compare the entries of the records in `columns`, which follow those before in the log."""
        total = int(columns.key_start[columns.count])
        self.total += total
        done = 0
        while done < total and self.names:
            index, _ = self._left()
            if index is None:
                self.missing += total - done
                if self.missing == total - done:
                    phy_offset = int(columns.phy_offset[self._row_of(columns, done)])
                    detail = f"the keys of the record at phy offset {phy_offset} and of later ones are not indexed"
                    yield Finding(self.index_service.path, 0, "missing_entry", detail)
                return
            count = _dispatch.agreeing_entries(index, self.entry, columns, done)
            if count:
                done += count
                self._pass(columns, done, count)
                continue
            row = self._row_of(columns, done)
            got, hashes = index.read_entry(self.entry), columns.key_hash[done : int(columns.key_start[row + 1])].tolist()
            want = hashes[0], int(columns.phy_offset[row])
            if got[:2] == want:
                yield self._wrong_time(index, got[2], int(columns.store_timestamp[row]))
                done += 1
                self._pass(columns, done, 1)
                continue
            following = self._entry_after(index)
            if self._is_odd(got[1], following):
                yield self._odd_entry(index, got[1])
                # It is in the place of this key's entry, unless that comes after it.
                done += following != want
                self.entry += 1
            elif got[1] == want[1] and got[0] in hashes[1:]:
                # Entries of the record's first keys are gone, like the file before; this one is of a later key.
                yield from self._missing(index, *want, got[1])
                done += 1
            else:
                yield from self._disagreement(index, got[0], got[1], *want)
                is_again = got[1] == self.previous and got[1] <= want[1]
                done += got[1] >= want[1] and not is_again
                self.entry += got[1] <= want[1]

    def _row_of(self, columns: RecordColumns, key: int) -> int:
        return int(np.searchsorted(columns.key_start[: columns.count], key, side="right")) - 1

    def _pass(self, columns: RecordColumns, done: int, count: int) -> None:
        # `count` entries belong to their keys, of which the last has the number `done` - 1.
        row = self._row_of(columns, done - 1)
        self.started = True
        self.entry += count
        self.previous = int(columns.phy_offset[row])
        self.previous_hashes = columns.key_hash[int(columns.key_start[row]) : done].tolist()

    def _entry_after(self, index: IndexFile) -> tuple[int, int] | None:
        # Hash and phy offset of the entry after the current one, maybe in the next file.
        number = self.entry + 1
        if number >= min(index.index_count, index.index_num):
            if self.file_number + 1 >= len(self.names):
                return None
            index, number = self.index_service.file(self.names[self.file_number + 1]), 1
            if min(index.index_count, index.index_num) <= 1:
                return None
        return index.read_entry(number)[:2]

    def _is_odd(self, phy_offset: int, following: tuple[int, int] | None) -> bool:
        # True if no entry in this place can have the offset: it is outside the log, or above that of the next entry although
        # that one follows the one before.  Such an entry shows nothing about the records around it.
        if not 0 <= phy_offset < self.commit_log.max_offset:
            return True
        return following is not None and self.previous <= following[1] < phy_offset

    def _odd_entry(self, index: IndexFile, got_phy: int) -> Finding:
        detail = "which does not lie between those of the entries around it"
        if not 0 <= got_phy < self.commit_log.max_offset:
            detail = f"the log ends at {self.commit_log.max_offset}"
        return self._bad_entry(index, f"entry {self.entry} says phy offset {got_phy}, {detail}")

    def _bad_entry(self, index: IndexFile, detail: str, pos: int = 0) -> Finding:
        return Finding(index.path, index.entry_pos(self.entry) + pos, "bad_entry", detail)

    def _disagreement(
        self, index: IndexFile, got_hash: int, got_phy: int, want_hash: int, want_phy: int
    ) -> Iterator[Finding]:
        if got_phy == self.previous and got_hash in self.previous_hashes:
            # After an unclean exit RocketMQ indexes the last record again, even if it was indexed in part.
            return
        if got_phy > want_phy:
            yield from self._missing(index, want_hash, want_phy, got_phy)
        elif got_phy == want_phy:
            detail = f"entry {self.entry} for phy offset {got_phy} has hash {got_hash}, the record's key has {want_hash}"
            yield self._bad_entry(index, detail)
        elif got_phy >= self.commit_log.min_offset:
            # Entries of expired records stay.
            yield self._bad_entry(index, f"entry {self.entry} says phy offset {got_phy}, {want_phy} comes next")

    def _missing(self, index: IndexFile, want_hash: int, want_phy: int, got_phy: int) -> Iterator[Finding]:
        # Only the first is named; the others are counted.
        self.skipped += 1
        if self.skipped == 1:
            detail = f"no entry with hash {want_hash} for the record at phy offset {want_phy}; entry {self.entry} is of {got_phy}"
            detail += "" if self.started else ", so the index begins later than the log"
            yield Finding(index.path, index.entry_pos(self.entry), "missing_entry", detail)

    def _wrong_time(self, index: IndexFile, seconds: int, store_timestamp: int) -> Finding:
        begin = index.read_header()[0]
        needed = min(max(store_timestamp - begin, 0) // 1000, 0x7FFFFFFF) if begin > 0 else 0
        detail = f"entry {self.entry} is {seconds} s after the file's begin, its record {needed} s"
        return self._bad_entry(index, detail, int(_core.IndexLayout.ENTRY_TIME_DIFF))

    def pass_over_range(self, begin: int, end: int) -> None:
        """Skip the entries of records in an unreadable stretch of the log."""
        while len(got_phy := self._next_offsets()):
            # An entry that points outside the log is a finding of its own file.
            inside = (got_phy < end) | (got_phy >= self.commit_log.max_offset)
            count = len(got_phy) if inside.all() else int(np.argmin(inside))
            self.entry += count
            if count < len(got_phy):
                return

    def finish(self) -> Iterator[Finding]:
        """Report the number of missing entries, and the entries of no record."""
        if self.missing > 1 or self.skipped > 1:
            detail = f"{self.missing + self.skipped} entries are missing in all"
            yield Finding(self.index_service.path, 0, "missing_entry", detail)
        while len(got_phy := self._next_offsets()):
            strange = np.flatnonzero(got_phy != self.previous)
            if len(strange) and self.index is not None:
                number = self.entry + int(strange[0])
                detail = f"{len(strange)} entries from number {number} on are of no record in the log"
                yield Finding(self.index.path, self.index.entry_pos(number), "bad_entry", detail)
            self.entry += len(got_phy)


def load_index(service: IndexService) -> tuple[list[Finding], bool]:
    """Take the index files with right names and lengths; return findings about the others, and True if some cannot be read."""
    found = listing(service.path)
    if found.unreadable is not None:
        return [finding_of(service.unreadable_folder(found.unreadable), "file", service.path)], True
    if found.problem is not None:
        raise found.problem
    problems: list[Finding] = []
    is_unread = False
    good = []
    for name, path in zip(found.names, found.paths):
        if not is_index_name(name) or not _may_be_file(path):
            problems.append(Finding(path, 0, "file", "no part of the store; a directory here stops a real broker"))
            continue
        error = why_unreadable(path)
        if error is not None:
            is_unread = True
            problems.append(finding_of(service.unreadable_file(error, path), "file", path))
            continue
        if "max_index_num" in service.config.assumed and has_no_entry(path):
            # The file has no entry, and its geometry is unknown.
            continue
        length = os.path.getsize(path)
        if length != service.config.index_file_size:
            problems.append(finding_of(service.wrong_length(length, path), "file", path))
            continue
        good.append(name)
    service.take(good)
    return problems, is_unread


def _may_be_file(path: str) -> bool:
    # In a folder that can be listed but not searched, the error comes from reading the file.
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return is_unreadable(error)
