"""A queue index as it lies in its directory: the journal and the segments that it completes, loaded and read.

Owns the map of both (`JournalMap`), what was wrong with them, and the reading of entries as rows and objects.  It never
writes, locks nothing and knows no sequence id that is still to come.  It is not thread-safe: `QueueIndex` has the lock.

Invariant: what the files hold is what they held when they were loaded or last written; else StoreChangedError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from rmqstore.errors import CorruptionError, StoreChangedError
from rmqstore.files.listing import listing
from rmqstore.files.open_file import read_ahead, read_small_file
from rmqstore.files.os_errors import missing_file
from rmqstore.rabbitmq._core import (
    ENTRY_DELIVER,
    ENTRY_EMBEDDED,
    ENTRY_PERSISTENT,
    MAX_SEQ_ID,
    Findings,
    JournalMap,
    Segment,
    load_segment,
    terms_at,
)
from rmqstore.rabbitmq.index_columns import IndexColumns, IndexEntry, cut_columns, empty_columns
from rmqstore.rabbitmq.index_files import JOURNAL, SEGMENT_NAME, map_present, release
from rmqstore.rabbitmq.problem import Problem, problems_of, unreadable_file

__all__ = ["IndexDirectory"]

# So many segments are asked for before they are read; one has 3 MB and more.
_AHEAD = 4
# Entries that are made into objects at once, at least.
_CHUNK = 8192
_REPAIR = "nothing was changed; run `rmqstore rabbitmq repair`, which writes a new directory with all that is whole"


class IndexDirectory:
    """Journal and segments of one queue.

    Attributes
    ----------
    path : str
    segment_entry_count : int
    read_only : bool
        A file that cannot be read is a problem; otherwise an error.
    journal : JournalMap
        What was not flushed, and the segments that have entries.
    journal_size : int
        Bytes of the journal's file as far as it was read and not written.
    journal_malformed : bool
        Its damage is more than the end that a crash cuts.
    merged : int
        Entries of the journal that loading merged with a segment.
    problems : list of Problem
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

    def path_of(self, segment: int) -> str:
        """str: the file of a segment's number, the journal for a negative one."""
        return os.path.join(self.path, JOURNAL if segment < 0 else f"{segment}.idx")

    def unacked(self) -> dict[int, int]:
        """Unacked entries by number of the segment, ascending."""
        return {number: segment.unacked for number, segment in sorted(self.journal.segments.items())}

    def part(self, segment: Segment, seqs: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What of the journal's collected entries belongs to a segment."""
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
            # A page fault waits for the disk, and while entries are taken apart the disk would have nothing to do.
            for following in numbers[at + _AHEAD if at else 0 : at + _AHEAD + 1]:
                read_ahead(self.path_of(following))
            source = self._reading(map_present, self.path_of(number))
            if source is None:
                continue
            try:
                present.add(number)
                segment = Segment(number)
                load_segment(source, segment, count, findings, check_terms)
                self.journal.add_segment(segment)
                self.merged += self.journal.merge(segment, source, *self.part(segment, seqs, words), findings)
            finally:
                release(source)
        alone, starts = np.unique(seqs // count, return_index=True)
        bounds = [*starts.tolist(), len(seqs)]
        for i, number in enumerate(alone.tolist()):
            if number in present or (chosen is not None and number not in chosen):
                continue
            segment = Segment(number)
            low, high = bounds[i], bounds[i + 1]
            self.merged += self.journal.merge(segment, None, seqs[low:high], words[low:high], findings)
            if segment.unacked:
                self.journal.add_segment(segment)
        self.journal.replace(seqs, words)
        self.problems += problems_of(findings, self.path_of)

    def _reading(self, read: Callable[[str], Any], path: str) -> Any:
        # A reader goes on without a file that the system does not give out; a writer has no business without it.
        try:
            found = read(path)
            # A segment that was just listed may be flushed away by a live node; a link to nothing hides its file.
            if found is None and os.path.lexists(path) and not os.path.exists(path):
                raise missing_file(path, "a link to nothing")
            return found
        except OSError as error:
            if not self.read_only:
                raise
            self.problems.append(unreadable_file(path, error))
            return None

    def refuse_damage(self) -> None:
        """Raise where appending would hide whole records, or marks that do not fit; nothing was changed so far."""
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

    def columns_of(self, numbers: Iterable[int], which: int) -> IndexColumns:
        """The entries of some segments: all for `which` 0, the live ones for 1."""
        chosen = [
            segment for segment in (self.journal.segments.get(number) for number in numbers) if segment is not None
        ]
        room = sum(segment.unacked for segment in chosen) if which else len(chosen) * self.segment_entry_count
        columns = empty_columns(room)
        return cut_columns(columns, self.fill(chosen, which, columns))

    def fill(self, chosen: list[Segment], which: int, columns: Any) -> int:
        """Write the rows of segments into `columns`, and say how many they are.

        `which` is 0 for all entries, 1 for live ones, 2 for the ids alone of persistent live ones in a message store.
        """
        journal = self.journal
        seqs, words = journal.collect()
        at = 0
        for segment in chosen:
            if which and not segment.unacked:
                continue
            source = map_present(self.path_of(segment.number)) if segment.size > 0 else None
            try:
                if segment.size > 0 and (source is None or len(source) < segment.size):
                    at = -1
                else:
                    at = journal.rows(segment, source, *self.part(segment, seqs, words), which, columns, at)
            finally:
                release(source)
            if at < 0:
                raise StoreChangedError(
                    "the file is not the one that was read; open the queue again", self.path_of(segment.number)
                )
        return at

    def highest_seq_id(self) -> int:
        """int: -1 in an empty queue.  Acked entries count too: a node crashes on another publish of their ids."""
        for number in sorted(self.journal.segments, reverse=True):
            columns = self.columns_of([number], 0)
            if len(columns.seq_id):
                return int(columns.seq_id[-1])
        return -1

    def chunks(self) -> Iterator[list[int]]:
        """Numbers of segments, several at once where they have few entries."""
        numbers: list[int] = []
        count = 0
        for number in sorted(self.journal.segments):
            numbers.append(number)
            count += self.journal.segments[number].unacked
            if count >= _CHUNK:
                yield numbers
                numbers, count = [], 0
        if numbers:
            yield numbers

    def entries_of(self, numbers: list[int], next_deliver_seq_id: int) -> list[IndexEntry]:
        """The live entries of some segments, with their embedded messages."""
        columns = self.columns_of(numbers, 1)
        count = len(columns.seq_id)
        if not count:
            return []
        terms: list[bytes | None] = [None] * count
        embedded = (columns.flags & ENTRY_EMBEDDED) != 0
        term_pos = columns.term_pos
        paths = {number: self.path_of(number) for number in (-1, *numbers)}
        for number, path in paths.items():
            chosen = np.flatnonzero(embedded & (columns.segment == number))
            if not len(chosen):
                continue
            source: Any = self.journal.image_view() if number < 0 else map_present(path)
            if source is None:
                raise StoreChangedError("the file is gone; open the queue again", path)
            try:
                found = terms_at(source, term_pos[chosen], columns.term_size[chosen])
            finally:
                release(source)
            for i, term in zip(chosen.tolist(), found):
                terms[i] = term
        ids = columns.msg_id.tobytes()
        mask = (1 << 64) - 1
        rows = zip(
            columns.seq_id.tolist(), columns.size.tolist(), columns.flags.tolist(), columns.expiry_us.tolist(),
            columns.segment.tolist(), columns.pos.tolist(), terms,
        )  # fmt: skip
        return [
            IndexEntry(
                seq_id,
                ids[16 * i : 16 * i + 16],
                (expiry & mask) // 1000 if expiry else None,
                size,
                bool(flags & ENTRY_PERSISTENT),
                seq_id < next_deliver_seq_id,
                term,
                paths[segment],
                pos,
                expiry & mask,
                bool(flags & ENTRY_DELIVER),
            )
            for i, (seq_id, size, flags, expiry, segment, pos, term) in enumerate(rows)
        ]
