"""What is wrong in index files, compared with the keys of the records of a log in their order, as findings."""

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
    """Compares the entries of all index files, in order, with the keys of the records as they come.

    `file_number` (from 0) and `entry` (from 1) are where the comparison is; `total` counts the keys of the records that were seen.
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
        """What is wrong with slots, chains and headers, beside the records; `end` is the log's."""
        if not self.names:
            return
        listed, self.names = self.names, []
        for name in listed:
            try:
                index = self.index_service.file(name)
            except (FileNotFoundError, OffsetOutOfRangeError):
                continue  # The store that is looked at is in use, and the file expired meanwhile.
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
        """Begin at this entry, from 1 on, of this file, from 0 on, instead of at the first."""
        self._open(file_number)
        self.entry = entry

    def _open(self, number: int) -> None:
        self.file_number = number
        self.entry = 1
        self.index = self.index_service.file(self.names[number]) if number < len(self.names) else None

    def _next(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Up to `count` entries from where the comparison stands, all of one file.
        while self.index is not None:
            left = min(self.index.index_count, self.index.index_num) - self.entry
            if left > 0:
                return self.index.read_entries(self.entry, min(count, left))
            self._open(self.file_number + 1)
        return np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)

    def _agreeing(self, columns: RecordColumns, total: int) -> int:
        # Skips the entries that agree with the columns' keys, a file at a time; the number of these keys.
        done = 0
        while done < total and self.index is not None:
            left = min(self.index.index_count, self.index.index_num) - self.entry
            if left <= 0:
                self._open(self.file_number + 1)
                continue
            count = min(left, total - done)
            if _dispatch.agreeing_entries(self.index, self.entry, columns, done) < count:
                break
            done += count
            row = int(np.searchsorted(columns.key_start[: columns.count], done - 1, side="right")) - 1
            first, phy_offset = int(columns.key_start[row]), int(columns.phy_offset[row])
            self._passed(count, phy_offset, columns.key_hash[first:done])
        return done

    def _passed(self, count: int, phy_offset: int, hashes: np.ndarray) -> None:
        # `count` entries were right; the last is of the record at `phy_offset`, whose keys up to it have `hashes`.
        self.started = True
        self.entry += count
        self.previous = phy_offset
        self.previous_hashes = hashes.tolist()

    def records(self, columns: RecordColumns) -> Iterator[Finding]:
        """What is wrong with the entries of the records in `columns`, those that follow in the log."""
        n = columns.count
        self.total += int(columns.key_start[n])
        if not self.names or not n:
            return
        starts = columns.key_start[: n + 1]
        total = int(starts[n])
        done = self._agreeing(columns, total)
        if done == total:
            return
        hashes = columns.key_hash[:total].copy()
        counts = np.diff(starts)
        phy_offsets = np.repeat(columns.phy_offset[:n], counts)
        times = np.repeat(columns.store_timestamp[:n], counts)
        while done < total:
            got_hashes, got_phy, got_diffs = self._next(total - done)
            count = len(got_phy)
            if not count:
                # Nothing is indexed from here on.
                self.missing += total - done
                if self.missing == total - done:
                    yield Finding(
                        self.index_service.path,
                        0,
                        "missing_entry",
                        f"the keys of the record at phy offset {int(phy_offsets[done])} and of later ones are not indexed",
                    )
                return
            part = slice(done, done + count)
            same = (got_hashes == hashes[part]) & (got_phy == phy_offsets[part])
            good = count if same.all() else int(np.argmin(same))
            if good:
                yield from self._times(times[done : done + good], got_diffs[:good])
                done += good
                phy_offset = int(phy_offsets[done - 1])
                first = int(np.searchsorted(phy_offsets, phy_offset, side="left"))
                self._passed(good, phy_offset, hashes[first:done])
                continue
            following = self._entry_after()
            if self._is_odd(int(got_phy[0]), following):
                yield from self._odd_entry(int(got_phy[0]))
                # It stands where the entry of this key should, unless that comes after it.
                done += following != (int(hashes[done]), int(phy_offsets[done]))
                self.entry += 1
                continue
            of_record = int(np.searchsorted(phy_offsets, int(got_phy[0]), side="right"))
            if int(got_phy[0]) == int(phy_offsets[done]) and int(got_hashes[0]) in hashes[done + 1 : of_record]:
                # Entries of the record's first keys are gone, as with the file before; this one is of a later key.
                yield from self._missing(int(hashes[done]), int(phy_offsets[done]), int(got_phy[0]))
                done += 1
                continue
            yield from self._disagreement(
                int(got_hashes[0]), int(got_phy[0]), int(hashes[done]), int(phy_offsets[done])
            )
            if int(got_phy[0]) < int(phy_offsets[done]) or (
                int(got_phy[0]) == self.previous and int(got_phy[0]) <= int(phy_offsets[done])
            ):
                self.entry += 1
            elif int(got_phy[0]) > int(phy_offsets[done]):
                done += 1
            else:
                self.entry += 1
                done += 1

    def _entry_after(self) -> tuple[int, int] | None:
        # Hash and phy offset of the entry after the one where the comparison stands, maybe in the next file.
        index, number = self.index, self.entry + 1
        assert index is not None
        if number >= min(index.index_count, index.index_num):
            if self.file_number + 1 >= len(self.names):
                return None
            index, number = self.index_service.file(self.names[self.file_number + 1]), 1
            if min(index.index_count, index.index_num) <= 1:
                return None
        key_hash, phy_offset, _, _ = index.read_entry(number)
        return key_hash, phy_offset

    def _is_odd(self, phy_offset: int, following: tuple[int, int] | None) -> bool:
        # Whether an entry says an offset that none in its place can have: outside the log, or above the one after it where
        # that goes on from the one before.  It tells nothing of the entries and records that follow.
        if not 0 <= phy_offset < self.commit_log.max_offset:
            return True
        return following is not None and self.previous <= following[1] < phy_offset

    def _odd_entry(self, got_phy: int) -> Iterator[Finding]:
        index = self.index
        assert index is not None
        detail = (
            f"entry {self.entry} says phy offset {got_phy}, which does not lie between those of the entries around it"
        )
        if not 0 <= got_phy < self.commit_log.max_offset:
            detail = (
                f"entry {self.entry} says phy offset {got_phy}, the log ends at {self.commit_log.max_offset}"
            )
        yield Finding(index.path, index.entry_pos(self.entry), "bad_entry", detail)

    def _disagreement(self, got_hash: int, got_phy: int, want_hash: int, want_phy: int) -> Iterator[Finding]:
        index = self.index
        assert index is not None
        pos = index.entry_pos(self.entry)
        if got_phy == self.previous and got_hash in self.previous_hashes:
            # RocketMQ indexes the boundary record again after an unclean exit, also one that was indexed in part.
            return
        if got_phy < want_phy:
            # Entries of expired records stay.
            if got_phy >= self.commit_log.min_offset:
                yield Finding(
                    index.path, pos, "bad_entry", f"entry {self.entry} says phy offset {got_phy}, {want_phy} comes next"
                )
        elif got_phy > want_phy:
            yield from self._missing(want_hash, want_phy, got_phy)
        else:
            yield Finding(
                index.path,
                pos,
                "bad_entry",
                f"entry {self.entry} for phy offset {got_phy} has hash {got_hash}, the record's key has {want_hash}",
            )

    def _missing(self, want_hash: int, want_phy: int, got_phy: int) -> Iterator[Finding]:
        # Only the first is named; the others are counted.
        index = self.index
        assert index is not None
        self.skipped += 1
        if self.skipped == 1:
            yield Finding(
                index.path,
                index.entry_pos(self.entry),
                "missing_entry",
                f"no entry with hash {want_hash} for the record at phy offset {want_phy}; entry {self.entry} is of {got_phy}"
                + ("" if self.started else ", so the index begins later than the log"),
            )

    def _times(self, times: np.ndarray, diffs: np.ndarray) -> Iterator[Finding]:
        index = self.index
        assert index is not None
        begin = index.read_header()[0]
        if begin <= 0:
            needed = np.zeros(len(times), np.int64)
        else:
            delta = times - begin
            needed = np.clip(np.where(delta < 0, 0, delta // 1000), 0, 0x7FFFFFFF)
        wrong = diffs != needed
        if self.entry == 1 and len(wrong):
            # The first entry of a rolled file holds the time since the file before (RocketMQ 5.5.0), elsewhere 0.
            wrong[0] = False
        for i in np.flatnonzero(wrong).tolist():
            yield Finding(
                index.path,
                index.entry_pos(self.entry + i) + int(_core.IndexLayout.ENTRY_TIME_DIFF),
                "bad_entry",
                f"entry {self.entry + i} is {int(diffs[i])} s after the file's begin, its record {int(needed[i])} s",
            )

    def pass_over_range(self, begin: int, end: int) -> None:
        """Step over the entries of records in a stretch that could not be read."""
        while True:
            _, got_phy, _ = self._next(4096)
            if not len(got_phy):
                return
            # An entry that leads outside the log is a finding of its own file.
            inside = (got_phy < end) | (got_phy >= self.commit_log.max_offset)
            count = len(got_phy) if inside.all() else int(np.argmin(inside))
            self.entry += count
            if count < len(got_phy):
                return

    def finish(self) -> Iterator[Finding]:
        """What is left over: how many entries are missing, and those of no record."""
        if self.missing > 1 or self.skipped > 1:
            yield Finding(
                self.index_service.path,
                0,
                "missing_entry",
                f"{self.missing + self.skipped} entries are missing in all",
            )
        while self.names:
            _, got_phy, _ = self._next(4096)
            if not len(got_phy):
                return
            index = self.index
            assert index is not None
            strange = np.flatnonzero(got_phy != self.previous)
            if len(strange):
                yield Finding(
                    index.path,
                    index.entry_pos(self.entry + int(strange[0])),
                    "bad_entry",
                    f"{len(strange)} entries from number {self.entry + int(strange[0])} on are of no record in the log",
                )
            self.entry += len(got_phy)


def load_index(service: IndexService) -> tuple[list[Finding], bool]:
    """Take the index files whose names and lengths are right; what is wrong with the others, and whether some cannot be read."""
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
            # It does not tell its numbers, and has no key that could be missed.
            continue
        length = os.path.getsize(path)
        if length != service.config.index_file_size:
            problems.append(finding_of(service.wrong_length(length, path), "file", path))
            continue
        good.append(name)
    service.take(good)
    return problems, is_unread


def _may_be_file(path: str) -> bool:
    # Where a folder may be listed and not searched, nobody knows what a name stands for; reading it says so.
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return is_unreadable(error)
