"""The index of a queue as its readers have it, and that of version 1 as it is in its directory.

Owns the values that both versions give (`IndexEntry`, `IndexColumns`, `LiveIndex`), the names of version 1's files, and
the map of journal and segments (`JournalMap`): loading, and reading as rows and objects.  It never writes, locks nothing
and knows no sequence id that is still to come.  It is not thread-safe: `QueueIndex` has the lock.

Invariants: damage is a `Problem` and never an error; what the files hold is what they held when they were loaded or last
written, else StoreChangedError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rmqstore._core import Region
from rmqstore.errors import CorruptionError, GeometryError, StoreChangedError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
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
from rmqstore.rabbitmq.layout import MAX_SEGMENT_ENTRY_COUNT, map_file
from rmqstore.rabbitmq.problem import Problem, problems_of, unreadable_file

__all__ = [
    "JOURNAL",
    "SEGMENT_NAME",
    "IndexColumns",
    "IndexDirectory",
    "IndexEntry",
    "LiveIndex",
    "check_entry_count",
    "read_segment",
]

JOURNAL = "journal.jif"
SEGMENT_NAME = re.compile(r"(0|[1-9][0-9]{0,18})\.idx")
_SEGMENT_HEAD_AND_BODY = 34
_JOURNAL_HEAD_AND_BODY = 40
# So many segments are asked for before they are read; one has 3 MB and more.
_AHEAD = 4
# Entries that are made into objects at once, at least.
_CHUNK = 8192
_REPAIR = "nothing was changed; run `rmqstore rabbitmq repair`, which writes a new directory with all that is whole"


class IndexEntry(NamedTuple):
    """A message that is in the queue.

    Attributes
    ----------
    seq_id : int
    msg_id : bytes
        16 bytes.
    expiry, expiry_us : int or None, int
        When it expires, since the epoch: in ms, or None; in microseconds as in the file, 0 = none.
    size : int
        Bytes of the body.
    persistent : bool
    delivered : bool
        A node would deliver it as redelivered: its id is below `QueueIndex.next_deliver_seq_id`.
    message : bytes or None
        The external term of an embedded message; None: it is in a message store.
    path, pos : str, int
        The place of its publish record, in the journal also before it is written.
    marked : bool
        It has a deliver record; since RabbitMQ 3.10 each entry gets one with its publish.
    """

    seq_id: int
    msg_id: bytes
    expiry: int | None
    size: int
    persistent: bool
    delivered: bool
    message: bytes | None
    path: str
    pos: int
    expiry_us: int = 0
    marked: bool = True


class IndexColumns(NamedTuple):
    """Entries as columns of `n` rows.

    Attributes
    ----------
    seq_id, size, expiry_us, segment, pos, term_size : ndarray (n,) of int64
        `expiry_us` in microseconds since the epoch, 0 = none; `segment` is the number of the file that has the publish
        record, -1 for the journal; `pos` is where that record begins; `term_size` is 0 for a message in a store.
    flags : ndarray (n,) of uint8
        Bits `ENTRY_PUBLISH`, `ENTRY_DELIVER`, `ENTRY_ACK`, `ENTRY_PERSISTENT`, `ENTRY_EMBEDDED`, `ENTRY_DAMAGED`.
    msg_id : ndarray (n, 16) of uint8
    """

    seq_id: np.ndarray
    size: np.ndarray
    flags: np.ndarray
    expiry_us: np.ndarray
    msg_id: np.ndarray
    segment: np.ndarray
    pos: np.ndarray
    term_size: np.ndarray

    @classmethod
    def empty(cls, count: int) -> IndexColumns:
        """Columns with room for `count` entries, to be filled."""
        columns = (np.empty(count, np.uint8 if name == "flags" else np.int64) for name in cls._fields)
        return cls(*columns)._replace(msg_id=np.empty((count, 16), np.uint8))

    @property
    def term_pos(self) -> np.ndarray:
        """ndarray (n,) of int64: where the embedded terms begin in their files."""
        return self.pos + np.where(self.segment < 0, _JOURNAL_HEAD_AND_BODY, _SEGMENT_HEAD_AND_BODY)

    def rows(self, chosen: Any) -> IndexColumns:
        """The rows of an index, a mask or a slice."""
        return IndexColumns(*(column[chosen] for column in self))


_Room = tuple[np.ndarray, np.ndarray, np.ndarray]


def _room(count: int) -> _Room:
    """Arrays that `JournalMap.rows` fills, for `count` entries."""
    return np.empty((6, count), np.int64), np.empty(count, np.uint8), np.empty((count, 16), np.uint8)


def _columns(room: _Room, count: int) -> IndexColumns:
    seq_id, size, expiry_us, segment, pos, term_size = room[0][:, :count]
    return IndexColumns(seq_id, size, room[1][:count], expiry_us, room[2][:count], segment, pos, term_size)


class LiveIndex(NotCopied):
    """The live entries in a queue's directory `path`: the interface of an index of any version.

    `recovered_clean` says that the recovery terms of an orderly stop were there and are used.
    """

    path: str
    recovered_clean: bool

    @property
    def next_seq_id(self) -> int:
        """int: the sequence id of the next message."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """int: live entries."""
        raise NotImplementedError

    @property
    def segments(self) -> Mapping[int, Any]:
        """By number of the segment, ascending."""
        raise NotImplementedError

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: what was met in the files that no writer leaves there."""
        raise NotImplementedError

    def columns(self) -> IndexColumns:
        """The live entries as columns, in the order of their sequence ids."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[IndexEntry]:
        raise NotImplementedError

    @property
    def persistent_sizes(self) -> np.ndarray:
        """ndarray (n,) of int64: bytes of the bodies of persistent entries."""
        columns = self.columns()
        sizes: np.ndarray = columns.size[(columns.flags & ENTRY_PERSISTENT) != 0]
        return sizes

    def references(self) -> np.ndarray:
        """ndarray (n, 16) of uint8: message ids of live persistent entries that are in the message store, one an entry."""
        columns = self.columns()
        ids: np.ndarray = columns.msg_id[columns.flags & (ENTRY_PERSISTENT | ENTRY_EMBEDDED) == ENTRY_PERSISTENT]
        return ids


def count_problems(
    stated: Mapping[int, int], found: Mapping[int, int], path_of: Callable[[int], str]
) -> Iterator[Problem]:
    """A problem for each segment that has another number of live entries than the recovery terms say."""
    for number in sorted(stated.keys() | found.keys()):
        if stated.get(number, 0) != found.get(number, 0):
            detail = f"the recovery terms say {stated.get(number, 0)} live entries, the files {found.get(number, 0)}"
            yield Problem(path_of(number), None, "segment_count_mismatch", detail)


def bad_terms(path: str, what: object) -> Problem:
    """The problem of recovery terms that no node writes."""
    return Problem(path, None, "bad_terms", f"the recovery terms lack or spoil {what}; the queue counts as dirty")


def low_seq_id(path: str, next_seq_id: int, highest: int) -> Problem:
    """The problem of recovery terms whose next sequence id is taken."""
    detail = f"the recovery terms say that the next sequence id is {next_seq_id}, but {highest} is taken"
    return Problem(path, None, "next_seq_id_too_low", detail, highest)


def check_entry_count(segment_entry_count: int, path: str | None = None) -> None:
    """GeometryError where a segment cannot have so many entries."""
    if not 1 <= segment_entry_count <= MAX_SEGMENT_ENTRY_COUNT:
        raise GeometryError(
            f"segment_entry_count is {segment_entry_count}, not between 1 and {MAX_SEGMENT_ENTRY_COUNT}", path
        )


def map_present(path: str) -> Region | bytes | None:
    """The file as a Region, empty bytes for an empty one, None where there is none."""
    try:
        return map_file(path) or b""
    except FileNotFoundError:
        return None


def release(source: Region | bytes | None) -> None:
    """Unmap what `map_present` gave."""
    if isinstance(source, Region):
        source.close()


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

    Attributes
    ----------
    read_only : bool
        A file that cannot be read is a problem; otherwise an error.
    journal : JournalMap
    journal_size : int
        Bytes of the journal's file as far as it was read and not written.
    journal_malformed : bool
        Its damage is more than the end that a crash cuts.
    merged : int
        Entries of the journal that loading merged with a segment.
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
        """The journal's collected entries of a segment."""
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

    def columns_of(self, numbers: Iterable[int], live: bool) -> IndexColumns:
        """The entries of some segments; without `live` also those that are acked or damaged."""
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
        """int: -1 in an empty queue.  Acked entries count too: a node crashes on another publish of their ids."""
        for number in sorted(self.journal.segments, reverse=True):
            columns = self.columns_of([number], False)
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

    def embedded_terms(self, columns: IndexColumns, numbers: list[int]) -> Iterator[tuple[Any, np.ndarray]]:
        """For each file that has embedded terms of `columns`: its bytes, while they are asked for, and the rows."""
        embedded = (columns.flags & ENTRY_EMBEDDED) != 0
        for number in (-1, *numbers):
            rows = np.flatnonzero(embedded & (columns.segment == number))
            if not len(rows):
                continue
            source: Any = self.journal.image_view() if number < 0 else map_present(self.path_of(number))
            if source is None:
                raise StoreChangedError("the file is gone; open the queue again", self.path_of(number))
            try:
                yield source, rows
            finally:
                release(source)

    def entries_of(self, numbers: list[int], next_deliver_seq_id: int) -> list[IndexEntry]:
        """The live entries of some segments, with their embedded messages."""
        columns = self.columns_of(numbers, True)
        count = len(columns.seq_id)
        if not count:
            return []
        terms: list[bytes | None] = [None] * count
        term_pos = columns.term_pos
        for source, chosen in self.embedded_terms(columns, numbers):
            found = terms_at(source, term_pos[chosen], columns.term_size[chosen])
            for i, term in zip(chosen.tolist(), found):
                terms[i] = term
        paths = {number: self.path_of(number) for number in (-1, *numbers)}
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
