"""Journal and segments of a queue index of version 1: loaded into a `JournalMap`, and read as columns.

Owns the names of these files.  It never writes and takes no lock: `QueueIndex` makes it thread-safe.

Invariants: damage is a `Problem` and never an error; a file that someone else changed since it was loaded or written is a
StoreChangedError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rmqstore.errors import CorruptionError, GeometryError, StoreChangedError
from rmqstore.files.listing import listing
from rmqstore.files.open_file import read_ahead, read_small_file
from rmqstore.files.os_errors import missing_file
from rmqstore.rabbitmq._core import MAX_SEQ_ID, Findings, JournalMap, Segment, load_segment
from rmqstore.rabbitmq.layout import MAX_SEGMENT_ENTRY_COUNT, map_file
from rmqstore.rabbitmq.live_index import IndexColumns, map_present, release
from rmqstore.rabbitmq.problem import Problem, problems_of, unreadable_file

__all__ = ["JOURNAL", "SEGMENT_NAME", "IndexDirectory", "check_entry_count", "read_segment"]

JOURNAL = "journal.jif"
SEGMENT_NAME = re.compile(r"(0|[1-9][0-9]{0,18})\.idx")
_SEGMENT_HEAD_AND_BODY = 34
_JOURNAL_HEAD_AND_BODY = 40
# Segments, of 3 MB and more, that are read ahead.
_AHEAD = 4
# Entries that are made into objects at once, at least.
_CHUNK = 8192
_REPAIR = "nothing was changed; run `rmqstore rabbitmq repair`, which writes a new directory with all that is whole"


_Room = tuple[np.ndarray, np.ndarray, np.ndarray]


def _room(count: int) -> _Room:
    """Return arrays for `JournalMap.rows` to fill, with room for `count` entries."""
    return np.empty((6, count), np.int64), np.empty(count, np.uint8), np.empty((count, 16), np.uint8)


def _columns(room: _Room, count: int) -> IndexColumns:
    seq_id, size, expiry_us, file, pos, term_size = room[0][:, :count]
    term_pos = pos + np.where(file < 0, _JOURNAL_HEAD_AND_BODY, _SEGMENT_HEAD_AND_BODY)
    return IndexColumns(seq_id, size, room[1][:count], expiry_us, room[2][:count], file, pos, term_pos, term_size)


def check_entry_count(segment_entry_count: int, path: str | None = None) -> None:
    """Raise GeometryError if a segment cannot have this number of entries."""
    if not 1 <= segment_entry_count <= MAX_SEGMENT_ENTRY_COUNT:
        raise GeometryError(
            f"segment_entry_count is {segment_entry_count}, not between 1 and {MAX_SEGMENT_ENTRY_COUNT}", path
        )


def read_segment(
    source: str | os.PathLike[str] | bytes, segment_entry_count: int, *, number: int | None = None, check_terms: bool = True
) -> tuple[IndexColumns, list[Problem]]:
    """Read one segment file alone, acked entries included; never raises for damage.

    After damage, reading continues at the next publish record that is certainly one: its term is well-formed for exactly
    its length and has the record's message id, or it has none and records follow to the end of the file.  `number` is by
    default that of the file's name, or 0.  With `check_terms`, entries whose embedded term fails are `ENTRY_DAMAGED`.
    """
    check_entry_count(segment_entry_count)
    path = "" if isinstance(source, bytes) else os.fspath(source)
    name = SEGMENT_NAME.fullmatch(os.path.basename(path))
    number = int(name[1]) if number is None and name else number
    data = source if isinstance(source, bytes) else map_file(path) or b""
    try:
        findings, segment = Findings(), Segment(number or 0)
        load_segment(data, segment, segment_entry_count, findings, check_terms)
        nothing = np.empty(0, np.int64)
        room = _room(segment_entry_count)
        count = JournalMap(segment_entry_count).rows(segment, data, nothing, nothing, False, *room, 0)
        return _columns(room, count), problems_of(findings, lambda _: path)
    finally:
        release(data)


class IndexDirectory:
    """Journal and segments of one queue.

    For a reader (`read_only`) an unreadable file is a problem, for a writer an error.  `journal_size` is the size of the
    journal's file as it was read; a `journal_malformed` has more damage than an end cut by a crash.  Loading `merged` this
    number of the journal's entries with a segment.
    """

    def __init__(self, path: str, segment_entry_count: int, read_only: bool):
        self.path = path
        self.segment_entry_count = segment_entry_count
        self.read_only = read_only
        self.journal = JournalMap(segment_entry_count)
        self.journal_size = 0
        self.journal_malformed = False
        self.merged = 0
        self.problems: list[Problem] = []

    def path_of(self, file: int) -> str:
        """Return the path of a segment by its number, of the journal for a negative one."""
        return os.path.join(self.path, JOURNAL if file < 0 else f"{file}.idx")

    def source(self, file: int) -> Any:
        """Return the bytes of a segment, or of the journal as it is in memory; None if the segment is gone."""
        return self.journal.image_view() if file < 0 else map_present(self.path_of(file))

    def unacked(self) -> dict[int, int]:
        """Return the number of unacked entries by number of the segment, ascending."""
        return {number: segment.unacked for number, segment in sorted(self.journal.segments.items())}

    def part(self, segment: Segment, seqs: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Select a segment's entries among those collected from the journal."""
        first = segment.number * self.segment_entry_count
        low, high = np.searchsorted(seqs, (first, first + self.segment_entry_count))
        return seqs[low:high], words[low:high]

    # ---------------------------------------------------------------------------------------------------------- loading

    def load(self, check_terms: bool, chosen: range | None) -> None:
        """Read the journal, then the segments (a live node moves entries in this direction)."""
        findings, count = Findings(), self.segment_entry_count
        numbers = []
        for name in listing(self.path).checked().names:
            match = SEGMENT_NAME.fullmatch(name)
            if match and int(match[1]) <= MAX_SEQ_ID // count:
                if chosen is None or int(match[1]) in chosen:
                    numbers.append(int(match[1]))
            elif name.endswith(".idx"):
                detail = "no segment has this name; the file was not read"
                self.problems.append(Problem(os.path.join(self.path, name), None, "bad_name", detail))
        data = self._reading(read_small_file, self.path_of(-1)) or b""
        self.journal_size = len(data)
        _, self.journal_malformed = self.journal.load(data, findings, check_terms)
        seqs, words = self.journal.collect()
        present = set()
        numbers.sort()
        for at, number in enumerate(numbers):
            # Without read-ahead the disk would be idle while entries are parsed.
            for following in numbers[at + _AHEAD if at else 0 : at + _AHEAD + 1]:
                read_ahead(self.path_of(following))
            source = self._reading(map_present, self.path_of(number))
            if source is None:
                continue
            try:
                present.add(number)
                segment = Segment(number)
                load_segment(source, segment, count, findings, check_terms)
                self.journal.segments[number] = segment
                self.merged += self.journal.merge(segment, source, *self.part(segment, seqs, words), findings)
            finally:
                release(source)
        for number in np.unique(seqs // count).tolist():
            if number in present or (chosen is not None and number not in chosen):
                continue
            segment = Segment(number)
            self.merged += self.journal.merge(segment, None, *self.part(segment, seqs, words), findings)
            if segment.unacked:
                self.journal.segments[number] = segment
        self.journal.replace(seqs, words)
        self.problems += problems_of(findings, self.path_of)

    def _reading(self, read: Callable[[str], Any], path: str) -> Any:
        try:
            found = read(path)
            # A live node may delete a segment that was just listed; a broken symlink hides its file.
            if found is None and os.path.lexists(path) and not os.path.exists(path):
                raise missing_file(path, "a link to nothing")
            return found
        except OSError as error:
            if not self.read_only:
                raise
            self.problems.append(unreadable_file(path, error))
            return None

    def refuse_damage(self) -> None:
        """Raise CorruptionError if appending would hide whole records or misplaced marks; nothing was changed yet."""
        malformed = [number for number, segment in self.journal.segments.items() if segment.malformed]
        paths = {self.path_of(number) for number in malformed}
        if self.journal_malformed:
            paths.add(self.path_of(-1))
        for problem in self.problems:
            if problem.path in paths:
                raise CorruptionError(f"{problem.kind}: {problem.detail}; {_REPAIR}", problem.path, problem.pos)
        if paths:
            raise CorruptionError(f"the file is damaged; {_REPAIR}", min(paths))

    # ---------------------------------------------------------------------------------------------------------- reading

    def columns_of(self, numbers: Iterable[int], live: bool) -> IndexColumns:
        """Read the entries of some segments; without `live` also those that are acked or damaged."""
        journal = self.journal
        chosen = [segment for segment in map(journal.segments.get, numbers) if segment is not None]
        room = _room(sum(segment.unacked for segment in chosen) if live else len(chosen) * self.segment_entry_count)
        seqs, words = journal.collect()
        at = 0
        for segment in chosen:
            if live and not segment.unacked:
                continue
            source = map_present(self.path_of(segment.number)) if segment.size > 0 else None
            try:
                if segment.size > 0 and (source is None or len(source) < segment.size):
                    at = -1
                else:
                    at = journal.rows(segment, source, *self.part(segment, seqs, words), live, *room, at)
            finally:
                release(source)
            if at < 0:
                raise StoreChangedError(
                    "the file is not the one that was read; open the queue again", self.path_of(segment.number)
                )
        return _columns(room, at)

    def highest_seq_id(self) -> int:
        """Return the highest sequence id, -1 in an empty queue.  A node crashes on a second publish of an acked one, too."""
        for number in sorted(self.journal.segments, reverse=True):
            columns = self.columns_of([number], False)
            if len(columns.seq_id):
                return int(columns.seq_id[-1])
        return -1

    def parts(self) -> list[list[int]]:
        """List the numbers of the segments in groups that have enough entries to be read at once."""
        parts: list[list[int]] = [[]]
        count = 0
        for number, unacked in self.unacked().items():
            if count >= _CHUNK:
                parts.append([])
                count = 0
            parts[-1].append(number)
            count += unacked
        return parts
