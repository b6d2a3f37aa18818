"""The queue index of a classic queue, version 1: which messages are in it, what was delivered, what was acked.

Owns a queue's directory: `journal.jif` and the segments `N.idx`, their merging after a crash, flushing, and who may write
(a lock on the directory itself, so that no foreign file lies in it).  It never looks into a message store and never changes
`.queue_name` or `recovery.dets`.  The bytes and the map of what is not flushed belong to `rmqstore.rabbitmq._core`.

Invariants: opening read-only changes and locks nothing; a segment is only appended to, by one write that ends with whole
records, or deleted; the journal is emptied after the segments have what it said; damage is a `Problem` while reading and
an error before the first change when writing.  Source of all rules: RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmqstore._core import Region
from rmqstore.errors import (
    CorruptionError,
    GeometryError,
    InvalidMessageError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    StoreChangedError,
    StoreClosedError,
    StoreError,
    StoreLockedError,
    StorePoisonedError,
)
from rmqstore.files.mapped_file import NotCopied, fsync_directory, make_directories, naming_errors, open_regular
from rmqstore.rabbitmq._core import (
    ENTRY_ACK,
    ENTRY_DAMAGED,
    ENTRY_DELIVER,
    ENTRY_EMBEDDED,
    ENTRY_PERSISTENT,
    ENTRY_PUBLISH,
    MAX_SEQ_ID,
    PROBLEM_KINDS,
    Findings,
    JournalMap,
    Segment,
    checked_ids,
    load_segment,
    says_persistent,
    scan_journal,
    terms_at,
)
from rmqstore.rabbitmq.layout import LEGACY_SEGMENT_ENTRY_COUNT, MAX_SEGMENT_ENTRY_COUNT, read_segment_entry_count

if TYPE_CHECKING:
    from rmqstore.rabbitmq.message import Message

__all__ = [
    "DEFAULT_MAX_JOURNAL_ENTRIES",
    "ENTRY_ACK",
    "ENTRY_DAMAGED",
    "ENTRY_DELIVER",
    "ENTRY_EMBEDDED",
    "ENTRY_PERSISTENT",
    "ENTRY_PUBLISH",
    "IndexColumns",
    "IndexEntry",
    "JournalColumns",
    "Problem",
    "QueueIndex",
    "read_journal",
    "read_segment",
]

logger = logging.getLogger(__name__)

JOURNAL = "journal.jif"
# A node's queue_index_max_journal_entries.
DEFAULT_MAX_JOURNAL_ENTRIES = 32768
# Entries that are made into objects at once, at least.
_CHUNK = 8192
# Above what a node's journal reaches with its default limits of entries and of embedded messages.
_DEFAULT_MAX_JOURNAL_SIZE = 256 << 20
_SEGMENT_NAME = re.compile(r"(0|[1-9][0-9]{0,18})\.idx")
_SEGMENT_HEAD_AND_BODY = 34
_JOURNAL_HEAD_AND_BODY = 40
_REPAIR = "nothing was changed; run `rmqstore rabbitmq repair`, which writes a new directory with all that is whole"
# What a real node does is known of 3.10.8 (section 10); verify says it for each kind.
_DETAILS = {
    "torn_record": "a record is cut after {extent} bytes",
    "bad_prefix": "{extent} bytes begin like no record",
    "zero_stretch": "{extent} bytes begin with zeros where a record should",
    "bad_term": "{extent} bytes: the term of a message is not well-formed",
    "zero_tail": "the last {extent} bytes are zeros",
    "nul_file": "all {extent} bytes of the file are zeros",
    "rel_out_of_range": "a record's place in the segment is not below segment_entry_count: is that as the vhost's .config says?",
    "duplicate_publish": "the same message was published again",
    "different_publish": "another message has the same sequence id; the first one counts",
    "publish_after_ack": "a publish comes after its ack; the ack counts",
    "publish_after_deliver": "a publish comes after its deliver",
    "deliver_without_publish": "a deliver of a message that was never published",
    "duplicate_deliver": "a message was marked as delivered twice",
    "deliver_after_ack": "a deliver comes after the ack",
    "ack_without_publish": "an ack of a message that was never published",
    "ack_without_deliver": "an ack of a message that was never delivered; it counts",
    "third_mark": "a third mark of a message that is acked already",
    "msg_id_mismatch": "the record and the message inside it have different message ids",
    "salvage_given_up": "what follows looks so much like records everywhere that the search for whole ones was ended",
}


class Problem(NamedTuple):
    """Something in a file that no writer leaves there, met while reading.

    Attributes
    ----------
    path : str
    pos : int or None
        Position in bytes.
    kind : str
        Short, stable, snake_case: for programs.
    detail : str
        For people.
    seq_id : int or None
        The entry that it is about, where one is known.
    """

    path: str
    pos: int | None
    kind: str
    detail: str
    seq_id: int | None = None


class IndexEntry(NamedTuple):
    """A message that is in the queue.

    Attributes
    ----------
    seq_id : int
    msg_id : bytes
        16 bytes.
    expiry : int or None
        When it expires, in ms since the epoch.
    size : int
        Bytes of the body.
    persistent : bool
    delivered : bool
        A node would hand it out as redelivered: its id is below `QueueIndex.next_deliver_seq_id`.
    message : bytes or None
        The external term of an embedded message; None: it lies in a message store.
    path, pos : str, int
        Where its publish record is.  Of an entry that is not written yet, where in the journal it will be.
    expiry_us : int
        As the file has it: microseconds, 0 = none.
    marked : bool
        It has a deliver record; since RabbitMQ 3.10 every entry gets one when it is published.
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

    @property
    def term_pos(self) -> np.ndarray:
        """ndarray (n,) of int64: where the embedded terms begin in their files."""
        return self.pos + np.where(self.segment < 0, _JOURNAL_HEAD_AND_BODY, _SEGMENT_HEAD_AND_BODY)


class JournalColumns(NamedTuple):
    """The records of a journal in their order.

    Attributes
    ----------
    type : ndarray (n,) of uint8
        0 publish of a persistent message, 1 of a transient one, 2 deliver, 3 ack.
    seq_id, pos, extent : ndarray (n,) of int64
        `extent`: bytes of the whole record.
    """

    type: np.ndarray
    seq_id: np.ndarray
    pos: np.ndarray
    extent: np.ndarray


def _empty_columns(count: int) -> IndexColumns:
    return IndexColumns(
        np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.uint8), np.empty(count, np.int64),
        np.empty((count, 16), np.uint8), np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64),
    )  # fmt: skip


def _cut_columns(columns: IndexColumns, count: int) -> IndexColumns:
    return columns if len(columns.seq_id) == count else IndexColumns(*(column[:count] for column in columns))


def _problems_of(findings: Findings, path_of: Callable[[int], str]) -> list[Problem]:
    problems = []
    for number, pos, seq_id, extent, segment in findings.table().tolist():
        kind = PROBLEM_KINDS[number]
        detail = _DETAILS[kind].format(extent=extent)
        problems.append(Problem(path_of(segment), pos, kind, detail, None if seq_id < 0 else seq_id))
    if findings.total > findings.count:
        more = findings.total - findings.count
        problems.append(Problem(path_of(-1), None, "more_problems", f"{more} more problems are not listed"))
    return problems


def _read_file(path: str) -> bytes | None:
    try:
        with open(open_regular(path), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _map_file(path: str) -> Region | bytes | None:
    """The file as a Region, empty bytes for an empty one, None where there is none."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return None
    try:
        with naming_errors(path):
            size = os.fstat(fd).st_size
            return Region.map(fd, size) if size else b""
    finally:
        os.close(fd)


def _release(source: Region | bytes | None) -> None:
    if isinstance(source, Region):
        source.close()


def _write_all(fd: int, data: bytes, pos: int | None = None) -> None:
    view = memoryview(data)
    while view:
        done = os.write(fd, view) if pos is None else os.pwrite(fd, view, pos)
        view = view[done:]
        pos = None if pos is None else pos + done


def _check_entry_count(segment_entry_count: int, path: str | None = None) -> int:
    if not 1 <= segment_entry_count <= MAX_SEGMENT_ENTRY_COUNT:
        raise GeometryError(
            f"segment_entry_count is {segment_entry_count}, not between 1 and {MAX_SEGMENT_ENTRY_COUNT}", path
        )
    return segment_entry_count


def read_segment(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview,
    segment_entry_count: int,
    *,
    number: int | None = None,
    check_terms: bool = True,
) -> tuple[IndexColumns, list[Problem]]:
    """Read one segment file, acked entries included; damage becomes problems and never an error.

    After a damaged stretch reading goes on at the next publish record that is certainly one: its term is well-formed for
    exactly its length and has the record's message id, or it has none and records follow to the end of the file.

    Parameters
    ----------
    source : path or bytes
    segment_entry_count : int
        As the vhost's `.config` says.
    number : int, optional
        Of the segment; without it that of the file's name, or 0.
    check_terms : bool
        Look at every embedded term; entries that fail are marked `ENTRY_DAMAGED`.

    Returns
    -------
    IndexColumns, list of Problem

    Raises
    ------
    GeometryError
        `segment_entry_count` is not between 1 and 16384.
    OSError
        The file cannot be read.
    """
    _check_entry_count(segment_entry_count)
    path = ""
    data: Region | bytes | None
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
    else:
        path = os.fspath(source)
        data = _map_file(path)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        name = _SEGMENT_NAME.fullmatch(os.path.basename(path))
        number = int(name[1]) if number is None and name else number
    try:
        findings, journal, segment = Findings(), JournalMap(segment_entry_count), Segment(number or 0)
        load_segment(data, segment, segment_entry_count, findings, check_terms)
        nothing = np.empty(0, np.int64)
        columns = _empty_columns(segment_entry_count)
        count = journal.rows(segment, data, nothing, nothing, 0, columns, 0)
        return _cut_columns(columns, count), _problems_of(findings, lambda _: path)
    finally:
        _release(data)


def read_journal(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview, *, check_terms: bool = True
) -> tuple[JournalColumns, list[Problem]]:
    """Read one journal: its records up to the first damage, and everything that is wrong.

    The problems are those of the journal alone; what does not fit the segments is said by `QueueIndex.problems`.

    Parameters
    ----------
    source : path or bytes
    check_terms : bool
        Look at every embedded term.

    Returns
    -------
    JournalColumns, list of Problem
    """
    path = ""
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
    else:
        path = os.fspath(source)
        with open(open_regular(path), "rb") as file:
            data = file.read()
    findings = Findings()
    JournalMap(MAX_SEGMENT_ENTRY_COUNT).load(data, findings, check_terms)
    return JournalColumns(*scan_journal(data)), _problems_of(findings, lambda _: path)


def _microseconds(milliseconds: int | None) -> int:
    if milliseconds is None:
        return 0
    if not 0 < milliseconds <= (1 << 63) // 1000 - 1:
        raise InvalidMessageError(
            f"expiry {milliseconds} is no time in ms since the epoch; None means that it never expires"
        )
    return milliseconds * 1000


def _as_ids(msg_ids: Any) -> np.ndarray:
    if isinstance(msg_ids, np.ndarray):
        if msg_ids.dtype != np.uint8 or msg_ids.ndim != 2 or msg_ids.shape[1] != 16:
            raise InvalidMessageError("msg_ids as an array is of shape (n, 16) and of uint8")
        return np.ascontiguousarray(msg_ids)
    ids = list(msg_ids)
    if any(len(msg_id) != 16 for msg_id in ids):
        raise InvalidMessageError("a message id has 16 bytes")
    return np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16)


def _as_seq_ids(seq_ids: Any) -> np.ndarray:
    if isinstance(seq_ids, range):
        return np.arange(seq_ids.start, seq_ids.stop, seq_ids.step, dtype=np.int64)
    if isinstance(seq_ids, (int, np.integer)):
        seq_ids = [seq_ids]
    if type(seq_ids) is list and len(seq_ids) == 1 and type(seq_ids[0]) is int and 0 <= seq_ids[0] <= MAX_SEQ_ID:
        return np.array(seq_ids, np.int64)
    try:
        array = np.asarray(seq_ids if isinstance(seq_ids, (np.ndarray, list, tuple)) else list(seq_ids))
        if array.size == 0:
            return np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu" or int(array.max()) > MAX_SEQ_ID:
            raise OverflowError
        return np.ascontiguousarray(array, dtype=np.int64)
    except OverflowError:
        raise OffsetOutOfRangeError("sequence ids are integers from 0 to 2**62 - 1") from None


_REASONS: dict[int, tuple[type[StoreError], str]] = {
    -1: (OffsetOutOfRangeError, "is not in the queue: it was never published, or its segment is gone"),
    -2: (OffsetOutOfRangeError, "was acked already"),
    -3: (InvalidMessageError, "was delivered already; an entry has one deliver record"),
    -4: (InvalidMessageError, "was not delivered; deliver it first, a node crashes on an ack without a deliver"),
}


class QueueIndex(NotCopied):
    """The queue index (version 1) of one classic queue; made by `open`.

    Usable in a ``with`` statement, from any thread; calls are serialised.  Actions lie in memory until `sync` writes them to
    the journal or `flush` to the segments, as in a node: what was not synced is gone after a crash.

    Attributes
    ----------
    path : str
    segment_entry_count : int
    read_only : bool
    recovered_clean : bool
        The queue was opened with terms of an orderly stop, which were good.
    """

    def __init__(self, path: str, segment_entry_count: int, read_only: bool):
        # Users call `open`; here nothing of the directory is touched.
        self.path = path
        self.segment_entry_count = segment_entry_count
        self.read_only = read_only
        self.recovered_clean = False
        self.max_journal_entries = DEFAULT_MAX_JOURNAL_ENTRIES
        self.max_journal_size = _DEFAULT_MAX_JOURNAL_SIZE
        self._lock = threading.RLock()
        self._journal = JournalMap(segment_entry_count)
        self._journal_size_read = 0
        self._journal_malformed = False
        self._problems: list[Problem] = []
        self._next_seq_id = 0
        self._next_deliver_seq_id = 0
        self._persistent_ref: bytes | None = None
        self._closed = False
        self._poison: BaseException | None = None
        self._journal_fd = -1
        self._lock_fd = -1
        self._last_action = time.monotonic()
        self._idle: _IdleThread | None = None

    # ---------------------------------------------------------------------------------------------------------- opening

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        segment_entry_count: int | None = None,
        max_journal_entries: int = DEFAULT_MAX_JOURNAL_ENTRIES,
        max_journal_size: int = _DEFAULT_MAX_JOURNAL_SIZE,
        read_only: bool = False,
        create: bool = False,
        terms: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        store_clean: bool = True,
        is_stored: Callable[[bytes], bool] | None = None,
        check_terms: bool = True,
        idle_interval: float = 0,
        segments: range | None = None,
    ) -> QueueIndex:
        """Open the index of a queue's directory: load, merge and, for writing, recover it as a node would.

        Without `terms` the queue is dirty: next_seq_id begins behind the last segment that remains, every message counts as
        delivered, entries without a deliver record get one, transient ones and those that are in no store are acked, and all
        of it is flushed.  Read-only, the numbers are the same and nothing is changed.

        Parameters
        ----------
        path : path
            The queue's directory, ``queues/<QUEUE_DIR>``.
        segment_entry_count : int, optional
            Without it, what the vhost's `.config` two directories above says, else 16384.
        max_journal_entries : int
            A flush is due when more actions than this wait for it (a node's queue_index_max_journal_entries).  It is tested
            after each publish, after each call of `deliver` and of `ack`.
        max_journal_size : int
            The same in bytes of the journal that is held in memory.  It stands for a node's flush under memory pressure,
            when the actions are more than the messages that its memory monitor lets the queue keep (target RAM count): a
            number that only a node knows.  The default is above what its other limits let a journal grow to.
        read_only : bool
            Change nothing and lock nothing.
        create : bool
            Make the directory if it is missing.
        terms : mapping or pairs, optional
            The queue's recovery terms after an orderly stop (section 9.1): segments, next_seq_id, next_deliver_seq_id, ….
        store_clean : bool
            False with `terms`: the message store was not clean.  Numbers come from the terms, what is in no store is acked.
        is_stored : callable, optional
            Whether the persistent store has a message id, for entries that are not embedded; without it all persistent are.
        check_terms : bool
            Look at every embedded term; those that fail are a problem and no entry.
        idle_interval : float
            ms without an action after which a thread calls `idle`; 0 = no thread.
        segments : range, optional
            Read-only: only the entries of these segments, and no other file is read; numbers that speak of the whole queue
            are then of no use.

        Raises
        ------
        FileNotFoundError
            There is no such directory.
        StoreLockedError
            Another writer has it open.
        CorruptionError
            For writing: a file has damage that is more than the end that a crash cuts.  Nothing was changed.
        GeometryError
            `segment_entry_count` is impossible.
        """
        folder = os.path.abspath(os.fspath(path))
        if max_journal_entries < 0 or max_journal_size < 0:
            raise ValueError("max_journal_entries and max_journal_size are not negative")
        if segments is not None and not read_only:
            raise ValueError("a part of a queue can only be read: give read_only=True")
        if segment_entry_count is None:
            segment_entry_count = read_segment_entry_count(os.path.dirname(os.path.dirname(folder)))
            if segment_entry_count is None:
                segment_entry_count = LEGACY_SEGMENT_ENTRY_COUNT
        _check_entry_count(segment_entry_count, folder)
        if create and not read_only:
            make_directories(folder)
        index = cls(folder, segment_entry_count, read_only)
        index.max_journal_entries = max_journal_entries
        index.max_journal_size = max_journal_size
        try:
            if not read_only:
                index._take_lock()
            changed = index._load(check_terms, segments)
            clean = index._take_terms(terms, segments)
            if read_only:
                index._number(clean)
            else:
                index._refuse_damage()
                index._recover(clean, changed, store_clean, is_stored)
        except BaseException:
            index.abandon()
            raise
        index.recovered_clean = clean is not None and store_clean
        if idle_interval > 0 and not read_only:
            index._idle = _IdleThread(index, idle_interval / 1000)
        return index

    def _take_lock(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise StoreLockedError(
                "another writer has the queue open; close it first, or open it with read_only=True", self.path
            ) from None
        self._lock_fd = fd

    def _path_of(self, segment: int) -> str:
        return os.path.join(self.path, JOURNAL if segment < 0 else f"{segment}.idx")

    def _load(self, check_terms: bool, chosen: range | None) -> int:
        """Read the journal, then the segments (a live node moves entries in this direction); how much was merged."""
        findings, count = Findings(), self.segment_entry_count
        numbers = []
        for name in os.listdir(self.path):
            match = _SEGMENT_NAME.fullmatch(name)
            if match and int(match[1]) <= MAX_SEQ_ID // count:
                if chosen is None or int(match[1]) in chosen:
                    numbers.append(int(match[1]))
            elif name.endswith(".idx"):
                detail = "no segment has this name; the file was not read"
                self._problems.append(Problem(os.path.join(self.path, name), None, "bad_name", detail))
        data = self._reading(_read_file, self._path_of(-1)) or b""
        self._journal_size_read = len(data)
        _, self._journal_malformed = self._journal.load(data, findings, check_terms)
        seqs, words = self._journal.collect()
        present = set()
        changed = 0
        for number in sorted(numbers):
            source = self._reading(_map_file, self._path_of(number))
            if source is None:
                continue
            try:
                present.add(number)
                segment = Segment(number)
                load_segment(source, segment, count, findings, check_terms)
                low, high = np.searchsorted(seqs, (number * count, (number + 1) * count))
                self._journal.add_segment(segment)
                changed += self._journal.merge(segment, source, seqs[low:high], words[low:high], findings)
            finally:
                _release(source)
        if len(seqs):
            alone, starts = np.unique(seqs // count, return_index=True)
            bounds = [*starts.tolist(), len(seqs)]
            for i, number in enumerate(alone.tolist()):
                if number in present or (chosen is not None and number not in chosen):
                    continue
                segment = Segment(number)
                low, high = bounds[i], bounds[i + 1]
                changed += self._journal.merge(segment, None, seqs[low:high], words[low:high], findings)
                if segment.unacked:
                    self._journal.add_segment(segment)
        self._journal.replace(seqs, words)
        self._problems += _problems_of(findings, self._path_of)
        return changed

    def _reading(self, read: Callable[[str], Any], path: str) -> Any:
        # A reader goes on without a file that the system does not give out; a writer has no business without it.
        try:
            return read(path)
        except OSError as error:
            if not self.read_only:
                raise
            detail = f"the file cannot be read: {error.strerror}"
            self._problems.append(Problem(path, None, "unreadable", detail))
            return None

    def _take_terms(
        self, terms: Mapping[str, Any] | Iterable[tuple[str, Any]] | None, chosen: range | None
    ) -> dict[str, Any] | None:
        if terms is None:
            return None
        try:
            clean = {str(key): value for key, value in (terms.items() if isinstance(terms, Mapping) else terms)}
            numbers = clean["segments"]
            pairs = numbers.items() if isinstance(numbers, Mapping) else numbers
            clean["segments"] = {int(number): int(count) for number, count in pairs}
            for key in ("next_seq_id", "next_deliver_seq_id"):
                clean[key] = int(clean[key])
                if not 0 <= clean[key] <= MAX_SEQ_ID + 1:
                    raise ValueError(key)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # A node without "segments" in the terms recovers as if there were none.
            detail = f"the recovery terms lack or spoil {error}; the queue counts as dirty"
            self._problems.append(Problem(self.path, None, "bad_terms", detail))
            return None
        stated = {
            number: count
            for number, count in clean["segments"].items()
            if count and (chosen is None or number in chosen)
        }
        found = {number: segment.unacked for number, segment in self._journal.segments.items() if segment.unacked}
        for number in sorted(stated.keys() | found.keys()):
            if stated.get(number, 0) != found.get(number, 0):
                detail = (
                    f"the recovery terms say {stated.get(number, 0)} unacked entries, the files {found.get(number, 0)}"
                )
                self._problems.append(Problem(self._path_of(number), None, "segment_count_mismatch", detail))
        highest = self._highest_seq_id()
        if highest >= clean["next_seq_id"]:
            detail = (
                f"the recovery terms say that the next sequence id is {clean['next_seq_id']}, but {highest} is taken"
            )
            self._problems.append(Problem(self.path, None, "next_seq_id_too_low", detail, highest))
            clean["next_seq_id"] = highest + 1
        ref = clean.get("persistent_ref")
        self._persistent_ref = bytes(ref) if isinstance(ref, (bytes, bytearray)) else None
        return clean

    def _highest_seq_id(self) -> int:
        # Acked entries count too: a node crashes on another publish of their ids.
        for number in sorted(self._journal.segments, reverse=True):
            columns = self._columns_of([number], 0)
            if len(columns.seq_id):
                return int(columns.seq_id[-1])
        return -1

    def _number(self, clean: dict[str, Any] | None) -> None:
        if clean is not None:
            self._next_seq_id = clean["next_seq_id"]
            self._next_deliver_seq_id = min(clean["next_deliver_seq_id"], self._next_seq_id)
            return
        remaining = [number for number, segment in self._journal.segments.items() if segment.unacked]
        self._next_seq_id = (max(remaining) + 1) * self.segment_entry_count if remaining else 0
        self._next_deliver_seq_id = self._next_seq_id

    def _refuse_damage(self) -> None:
        """Raise where appending would hide whole records, or marks that do not fit; nothing was changed so far."""
        malformed = [number for number, segment in self._journal.segments.items() if segment.malformed]
        paths = {self._path_of(number) for number in malformed}
        if self._journal_malformed:
            paths.add(self._path_of(-1))
        for problem in self._problems:
            if problem.path in paths:
                raise CorruptionError(f"{problem.kind}: {problem.detail}; {_REPAIR}", problem.path, problem.pos)
        if paths:
            raise CorruptionError(f"the file is damaged; {_REPAIR}", min(paths))

    def _recover(
        self,
        clean: dict[str, Any] | None,
        changed: int,
        store_clean: bool,
        is_stored: Callable[[bytes], bool] | None,
    ) -> None:
        path = self._path_of(-1)
        self._journal_fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        self._cut_tails()
        journal = self._journal
        if self._journal_size_read != journal.used:
            with self._poisoning(path):
                os.ftruncate(self._journal_fd, journal.used)
                os.fsync(self._journal_fd)
            self._journal_size_read = journal.used
        if clean is None or not store_clean:
            self._settle(clean is None, is_stored)
            self._flush()
        elif changed or self._problems:
            self._flush()
        self._number(clean)

    def _cut_tails(self) -> None:
        # What a crash left of a record at a file's end; the reading looked for whole ones in it and found none.
        for number, segment in sorted(self._journal.segments.items()):
            if segment.end == segment.size or segment.size < 0:
                continue
            path = self._path_of(number)
            logger.warning("%s: cut from %d to %d bytes, its last whole record", path, segment.size, segment.end)
            with self._poisoning(path):
                fd = open_regular(path, os.O_RDWR)
                try:
                    if os.fstat(fd).st_size != segment.size:
                        raise StoreChangedError("the file was changed by someone else; is a node running?", path)
                    os.ftruncate(fd, segment.end)
                    os.fsync(fd)
                finally:
                    os.close(fd)
            segment.cut(segment.end)

    def _settle(self, dirty: bool, is_stored: Callable[[bytes], bool] | None) -> None:
        """Section 7.4: what is in no store, or was transient, is acked; in a dirty queue the rest counts as delivered."""
        for numbers in self._chunks():
            columns = self._columns_of(numbers, 1)
            if not len(columns.seq_id):
                continue
            embedded = (columns.flags & ENTRY_EMBEDDED) != 0
            present = (columns.flags & ENTRY_PERSISTENT) != 0
            self._look_into_terms(columns, embedded, present)
            if is_stored is not None:
                for i in np.flatnonzero(~embedded).tolist():
                    present[i] = bool(is_stored(columns.msg_id[i].tobytes()))
            undelivered = (columns.flags & ENTRY_DELIVER) == 0
            for seqs, ack in (
                (columns.seq_id[undelivered & (dirty | ~present)], False),
                (columns.seq_id[~present], True),
            ):
                verdict, _ = self._journal.marks(seqs, ack)
                assert verdict == 0, "an entry that was just listed takes its marks"

    def _look_into_terms(self, columns: IndexColumns, embedded: np.ndarray, present: np.ndarray) -> None:
        # A node asks the embedded message itself whether it is persistent.
        for number in np.unique(columns.segment[embedded]).tolist():
            source: Any = self._journal.image_view() if number < 0 else _map_file(self._path_of(number))
            try:
                for flag in (True, False):
                    rows = np.flatnonzero(embedded & (columns.segment == number) & (present == flag))
                    if source is not None and len(rows):
                        present[rows] = says_persistent(source, columns.term_pos[rows], columns.term_size[rows], flag)
            finally:
                _release(source)

    def _chunks(self) -> Iterator[list[int]]:
        # Numbers of segments, several at once where they have few entries.
        numbers: list[int] = []
        count = 0
        for number in sorted(self._journal.segments):
            numbers.append(number)
            count += self._journal.segments[number].unacked
            if count >= _CHUNK:
                yield numbers
                numbers, count = [], 0
        if numbers:
            yield numbers

    # ---------------------------------------------------------------------------------------------------------- writing

    def _check_writable(self) -> None:
        if self._closed:
            raise StoreClosedError("the queue index is closed; open it again", self.path)
        if self.read_only:
            raise ReadOnlyError(
                "the queue index was opened read-only; open it with read_only=False to write", self.path
            )
        if self._poison is not None:
            raise StorePoisonedError(
                f"writing failed before ({self._poison}); close the index and open it again, which recovers what is on disk",
                self.path,
            )

    @contextlib.contextmanager
    def _poisoning(self, path: str) -> Iterator[None]:
        try:
            with naming_errors(path):
                yield
        except BaseException as error:
            self._poison = error
            raise

    def publish(
        self,
        *,
        msg_id: bytes | None = None,
        message: Message | bytes | None = None,
        size: int | None = None,
        expiry: int | None = None,
        expiry_us: int | None = None,
        persistent: bool | None = None,
        seq_id: int | None = None,
    ) -> int:
        """Add one entry; a node of 3.10 or later follows every publish by its deliver, which is the caller's to do.

        Parameters
        ----------
        msg_id : bytes
            16 bytes; may be left out for an embedded message.
        message : Message or bytes, optional
            Embedded: a `Message`, or its external term.  None: it lies in a message store.
        size : int
            Bytes of the body; may be left out for an embedded message.
        expiry, expiry_us : int, optional
            When it expires, since the epoch: in ms, or in microseconds as the file has it.
        persistent : bool, optional
            None: as the embedded message says, else True.
        seq_id : int, optional
            None: the next one.  A number that leaves a gap is fine (transient messages in a node leave some).

        Returns
        -------
        int
            The sequence id.

        Raises
        ------
        InvalidMessageError
            Something is missing or impossible, or the id is in use; nothing was changed.
        OSError
            A flush that was due failed.  The entry was not written; the index takes no more writes.
        """
        if expiry_us is None:
            expiry_us = _microseconds(expiry)
        elif not 0 <= expiry_us < 1 << 63:
            raise InvalidMessageError(f"expiry_us is {expiry_us}, which does not fit")
        if size is not None and not (isinstance(size, (int, np.integer)) and 0 <= size <= 0xFFFFFFFF):
            raise InvalidMessageError(f"a body of {size!r} bytes is impossible")
        term: Any = message if message is None or type(message) is bytes else _terms_of([message])[0]
        with self._lock:
            self._check_writable()
            first = self._next_seq_id if seq_id is None else seq_id
            if not 0 <= first <= MAX_SEQ_ID:
                raise InvalidMessageError(f"sequence id {first} does not fit into 62 bits", self.path)
            flag = -1 if persistent is None else int(bool(persistent))
            free = first >= self._next_seq_id
            if not self._journal.publish_one(first, msg_id, term, -1 if size is None else size, expiry_us, flag, free):
                size = int(self._body_sizes([term], np.array([-1]))[0])
                self._journal.publish_one(first, msg_id, term, size, expiry_us, flag, free)
            self._last_action = time.monotonic()
            self._next_seq_id = max(self._next_seq_id, first + 1)
            self._flush_if_due()
            return first

    def publish_many(
        self,
        messages: Sequence[Message | bytes] | tuple[Any, Any] | None = None,
        *,
        msg_ids: Any = None,
        sizes: Any = None,
        expiries: Sequence[int | None] | None = None,
        expiries_us: Any = None,
        persistent: bool | Sequence[bool] | np.ndarray | None = None,
        deliver: bool = False,
    ) -> range:
        """Add entries in one call, with the bytes and the flushes of as many calls of `publish`.

        Parameters
        ----------
        messages : sequence of Message or bytes, or (buffer, offsets), or None
            As of `publish`.  In the second form term ``i`` is ``buffer[offsets[i]:offsets[i + 1]]``; `offsets` is an array of
            ``n + 1`` integers.
        msg_ids : ndarray (n, 16) of uint8, or sequence of bytes
            May be left out for embedded messages.
        sizes : array of n integers
            Bytes of the bodies; may be left out for embedded messages.
        expiries, expiries_us : sequence, optional
            ms (None in it: never), or an array of microseconds (0: never).
        persistent : bool or array of bool, optional
        deliver : bool
            Follow each publish by its deliver, as a node of 3.10 does.

        Returns
        -------
        range
            The sequence ids.

        Raises
        ------
        InvalidMessageError
            One of them cannot be; nothing was changed.
        OSError
            A flush that was due failed; of these entries only what a new opening finds is in the queue.
        """
        with self._lock:
            columns = [_microseconds(expiry) for expiry in expiries] if expiries is not None else expiries_us
            return self._publish(messages, msg_ids, sizes, columns, persistent, deliver)

    def _publish(self, messages: Any, msg_ids: Any, sizes: Any, expiries: Any, persistent: Any, deliver: bool) -> range:
        self._check_writable()
        first = self._next_seq_id
        terms: list[bytes] | None = None
        size_column: np.ndarray | None = None
        data: np.ndarray | None = None
        offsets: np.ndarray | None = None
        ids = None if msg_ids is None else _as_ids(msg_ids)
        if messages is None:
            if ids is None or sizes is None:
                raise InvalidMessageError("a message that lies in a store needs its id and its size")
        else:
            if isinstance(messages, tuple) and len(messages) == 2 and not isinstance(messages[1], bytes):
                data = np.frombuffer(messages[0], np.uint8)
                offsets = np.ascontiguousarray(messages[1], dtype=np.int64)
                if offsets.ndim != 1 or not len(offsets):
                    raise InvalidMessageError("offsets are an array of one integer more than there are messages")
                number = len(offsets) - 1
            else:
                terms = _terms_of(messages)
                number = len(terms)
            if ids is not None and len(ids) != number:
                raise InvalidMessageError(f"{len(ids)} message ids for {number} messages")
            ids, found, flags = checked_ids(terms, data, offsets, ids)
            size_column = self._body_sizes(terms, found) if sizes is None else None
            persistent = flags if persistent is None else persistent
        count = len(ids)
        if size_column is None:
            size_column = _column(sizes, count, "sizes", 0, 0xFFFFFFFF)
        expiry_column = np.zeros(count, np.int64) if expiries is None else _column(
            expiries, count, "expiries", 0, (1 << 63) - 1)  # fmt: skip
        if persistent is None or isinstance(persistent, (bool, np.bool_)):
            flag_column = np.full(count, 1 if persistent is None else int(persistent), np.uint8)
        else:
            flag_column = np.ascontiguousarray(np.asarray(persistent, dtype=bool), dtype=np.uint8)
            if flag_column.shape != (count,):
                raise InvalidMessageError(f"persistent has shape {flag_column.shape} for {count} messages")
        # No entry has an id from the next one on, so that none is looked up.
        if first > MAX_SEQ_ID - count + 1:
            raise InvalidMessageError(f"sequence ids from {first} on do not fit into 62 bits", self.path)
        done, actions = 0, count * (2 if deliver else 1)
        self._last_action = time.monotonic()
        while done < actions:
            try:
                done = self._journal.publish(
                    first, count, ids, size_column, expiry_column, flag_column, terms, data, offsets, deliver, done,
                    self.max_journal_entries, self.max_journal_size,
                )  # fmt: skip
            finally:
                # Where memory runs out in the middle, the entries before it are in the queue.
                self._next_seq_id = max(self._next_seq_id, self._journal.published_end)
            self._flush_if_due()
        return range(first, first + count)

    @staticmethod
    def _body_sizes(terms: list[bytes] | None, found: np.ndarray) -> np.ndarray:
        if len(found) and found.min() < 0:
            if terms is None:
                raise InvalidMessageError(
                    "not every message in the buffer says its size plainly; give the sizes of the bodies"
                )
            from rmqstore.rabbitmq.message import Message

            for i in np.flatnonzero(found < 0).tolist():
                found[i] = len(Message.from_term(terms[i]).body)
        return found

    def deliver(self, seq_ids: int | range | Iterable[int] | np.ndarray) -> None:
        """Mark entries as delivered, all or none.

        This writes their deliver records and does not move `next_deliver_seq_id`, as in a node since 3.10.

        Raises
        ------
        OffsetOutOfRangeError
            One is not in the queue.
        InvalidMessageError
            One was delivered before.
        """
        self._mark(seq_ids, False)

    def ack(self, seq_ids: int | range | Iterable[int] | np.ndarray) -> None:
        """Ack entries, all or none; a node acks several from the highest id down, here the order is the caller's.

        Raises
        ------
        OffsetOutOfRangeError
            One is not in the queue, or was acked before.
        InvalidMessageError
            One was not delivered.
        """
        self._mark(seq_ids, True)

    def ack_many(self, seq_ids: int | range | Iterable[int] | np.ndarray) -> None:
        """The same as `ack`, which takes any number of ids; the name beside `publish_many`."""
        self._mark(seq_ids, True)

    def _mark(self, seq_ids: Any, ack: bool) -> None:
        seqs = _as_seq_ids(seq_ids)
        with self._lock:
            self._check_writable()
            self._last_action = time.monotonic()
            verdict, number = self._journal.marks(seqs, ack)
            if verdict:
                kind, reason = _REASONS[verdict]
                raise kind(f"sequence id {seqs[number]} {reason}; nothing was changed", self.path)
            self._flush_if_due()

    def _flush_if_due(self) -> None:
        if self._journal.dirty_count > self.max_journal_entries or self._journal.used > self.max_journal_size:
            self._flush()

    def idle(self) -> None:
        """What a node does before its queue hibernates: flush if there were actions since the last flush."""
        with self._lock:
            self._check_writable()
            if self._journal.dirty_count:
                self._flush()

    def flush(self) -> None:
        """Move the journal into the segments: delete those without unacked entries, append to the others, empty the journal.

        Everything is on disk when this returns.  A crash in between leaves entries both in the journal and in segments,
        which the next opening merges.

        Raises
        ------
        OSError
            The index takes no more writes then; reading goes on.
        """
        with self._lock:
            self._check_writable()
            self._flush()

    def _flush(self) -> None:
        journal, path = self._journal, self._path_of(-1)
        with self._poisoning(path):
            seqs, words = journal.collect()
            touched = set(np.unique(seqs // self.segment_entry_count).tolist())
            doomed = [number for number, segment in journal.segments.items() if segment.unacked == 0]
            if journal.written:
                # What the journal's file has must not lag behind the segments: a deliver whose ack is in the segment already,
                # or whose publish went with its segment, is what a node does not boot on.
                self._sync()
            names_changed = False
            for number in sorted(touched.union(doomed)):
                segment = journal.segments.get(number)
                if segment is None:
                    continue
                if segment.unacked == 0:
                    if segment.size >= 0:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(self._path_of(number))
                        names_changed = True
                    journal.forget(segment)
                else:
                    low, high = np.searchsorted(
                        seqs, (number * self.segment_entry_count, (number + 1) * self.segment_entry_count)
                    )
                    names_changed |= segment.size < 0
                    self._append(segment, seqs[low:high], words[low:high])
            if names_changed:
                fsync_directory(self.path)
            self._check_unchanged(self._journal_fd, path, max(journal.written, self._journal_size_read))
            os.ftruncate(self._journal_fd, 0)
            journal.clear()
            self._journal_size_read = 0

    def _check_unchanged(self, fd: int, path: str, size: int) -> None:
        if os.fstat(fd).st_size != size:
            raise StoreChangedError("the file was changed by someone else; is a node running on this directory?", path)

    def _append(self, segment: Segment, seqs: np.ndarray, words: np.ndarray) -> None:
        path = self._path_of(segment.number)
        blob = self._journal.encode(segment, seqs, words)
        self._journal.prepare(segment)
        old = max(segment.size, 0)
        with naming_errors(path):
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                self._check_unchanged(fd, path, old)
                try:
                    _write_all(fd, blob)
                    os.fsync(fd)
                except BaseException:
                    # A node hangs on a part of a record; the journal still has everything.
                    with contextlib.suppress(OSError):
                        os.ftruncate(fd, old)
                    raise
            finally:
                os.close(fd)
        self._journal.applied(segment, seqs, words)

    def sync(self) -> None:
        """Write the journal's new bytes and force them to disk: what was done before is not lost after this returns.

        Raises
        ------
        OSError
            The index takes no more writes then; reading goes on.
        """
        with self._lock:
            self._check_writable()
            with self._poisoning(self._path_of(-1)):
                self._sync()

    def _sync(self) -> None:
        journal, path = self._journal, self._path_of(-1)
        data = journal.unwritten()
        if not data:
            return
        with naming_errors(path):
            self._check_unchanged(self._journal_fd, path, max(journal.written, self._journal_size_read))
            _write_all(self._journal_fd, data, journal.written)
            os.fsync(self._journal_fd)
        journal.written += len(data)
        self._journal_size_read = journal.written

    # ---------------------------------------------------------------------------------------------------------- closing

    def close(self) -> dict[str, Any] | None:
        """Sync the journal and give the directory back; closing twice does nothing.

        Returns
        -------
        dict or None
            The recovery terms for `recovery.dets` in a node's order (section 9.1); None if read-only or closed before.

        Raises
        ------
        StorePoisonedError
            An earlier write failed; the directory is given back all the same.
        """
        self._stop_idle()
        with self._lock:
            if self._closed:
                return None
            if self.read_only:
                self.abandon()
                return None
            try:
                self._check_writable()
                with self._poisoning(self._path_of(-1)):
                    self._sync()
                return self._terms()
            finally:
                self.abandon()

    def _terms(self) -> dict[str, Any]:
        columns = self.columns()
        persistent = columns.size[(columns.flags & ENTRY_PERSISTENT) != 0]
        return {
            "segments": [(number, segment.unacked) for number, segment in sorted(self._journal.segments.items())],
            "next_seq_id": self._next_seq_id,
            "next_deliver_seq_id": self._next_deliver_seq_id,
            "persistent_ref": self._persistent_ref or os.urandom(16),
            "persistent_count": len(persistent),
            "persistent_bytes": int(persistent.sum()),
        }

    def abandon(self) -> None:
        """Give the directory back without writing anything: what was not synced is gone, as after a crash."""
        self._stop_idle()
        with self._lock:
            self._closed = True
            for fd in (self._journal_fd, self._lock_fd):
                if fd >= 0:
                    os.close(fd)
            self._journal_fd = self._lock_fd = -1

    def _stop_idle(self) -> None:
        # Never under the lock: the thread may wait for it.
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.stop()

    def __enter__(self) -> QueueIndex:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._poison is not None:
            self.abandon()
        else:
            self.close()

    def __del__(self) -> None:
        # A half-made object has no lock.
        if getattr(self, "_lock_fd", -1) >= 0 or getattr(self, "_journal_fd", -1) >= 0:
            self.abandon()

    # ---------------------------------------------------------------------------------------------------------- reading

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the queue index is closed; open it again", self.path)

    @property
    def closed(self) -> bool:
        """bool"""
        return self._closed

    @property
    def depth(self) -> int:
        """int: entries without an ack."""
        return self._journal.depth

    @property
    def next_seq_id(self) -> int:
        """int: the sequence id of the next publish."""
        return self._next_seq_id

    @property
    def next_deliver_seq_id(self) -> int:
        """int: all entries below were handed to a consumer at least once; settable, up to `next_seq_id`."""
        return self._next_deliver_seq_id

    @next_deliver_seq_id.setter
    def next_deliver_seq_id(self, value: int) -> None:
        with self._lock:
            self._check_writable()
            if not 0 <= value <= self._next_seq_id:
                raise OffsetOutOfRangeError(
                    f"{value} is not between 0 and the next sequence id {self._next_seq_id}", self.path
                )
            self._next_deliver_seq_id = value

    @property
    def segments(self) -> dict[int, int]:
        """dict: unacked entries by number of the segment."""
        with self._lock:
            return {number: segment.unacked for number, segment in sorted(self._journal.segments.items())}

    @property
    def journal_size(self) -> int:
        """int: bytes of the journal since the last flush, whether written or not."""
        return self._journal.used

    @property
    def dirty_count(self) -> int:
        """int: actions since the last flush, those that cancelled each other included."""
        return self._journal.dirty_count

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: what was met while reading that no writer leaves there."""
        return list(self._problems)

    def _columns_of(self, numbers: Iterable[int], which: int) -> IndexColumns:
        journal = self._journal
        chosen = [segment for segment in (journal.segments.get(number) for number in numbers) if segment is not None]
        room = sum(segment.unacked for segment in chosen) if which else len(chosen) * self.segment_entry_count
        columns = _empty_columns(room)
        return _cut_columns(columns, self._fill(chosen, which, columns, room))

    def _fill(self, chosen: list[Segment], which: int, columns: Any, room: int) -> int:
        journal = self._journal
        seqs, words = journal.collect()
        at = 0
        for segment in chosen:
            if which and not segment.unacked:
                continue
            source = _map_file(self._path_of(segment.number)) if segment.size > 0 else None
            try:
                low, high = np.searchsorted(
                    seqs, (segment.number * self.segment_entry_count, (segment.number + 1) * self.segment_entry_count)
                )
                if segment.size > 0 and (source is None or len(source) < segment.size):
                    at = -1
                else:
                    at = journal.rows(segment, source, seqs[low:high], words[low:high], which, columns, at)
            finally:
                _release(source)
            if at < 0:
                raise StoreChangedError(
                    "the file is not the one that was read; open the queue again", self._path_of(segment.number)
                )
        return at

    def columns(self, *, live: bool = True) -> IndexColumns:
        """The entries as columns, in the order of their sequence ids.

        Parameters
        ----------
        live : bool
            False: acked and damaged ones too, as long as they are in a file.

        Raises
        ------
        StoreChangedError
            A node, or another writer, changed the files meanwhile.
        """
        with self._lock:
            self._check_open()
            return self._columns_of(sorted(self._journal.segments), 1 if live else 0)

    def references(self) -> np.ndarray:
        """ndarray (n, 16) of uint8: message ids of live persistent entries that lie in the message store, one an entry."""
        with self._lock:
            self._check_open()
            chosen = [segment for _, segment in sorted(self._journal.segments.items())]
            room = sum(segment.unacked for segment in chosen)
            ids = np.empty((room, 16), np.uint8)
            return ids[: self._fill(chosen, 2, ids, room)]

    def __iter__(self) -> Iterator[IndexEntry]:
        """Live entries in the order of their sequence ids, read a segment or so at a time, when the first one is due."""
        with self._lock:
            self._check_open()
            chunks = list(self._chunks())
        for numbers in chunks:
            with self._lock:
                self._check_open()
                entries = self._entries_of(numbers)
            yield from entries

    def _entries_of(self, numbers: list[int]) -> list[IndexEntry]:
        columns = self._columns_of(numbers, 1)
        count = len(columns.seq_id)
        if not count:
            return []
        terms: list[bytes | None] = [None] * count
        embedded = (columns.flags & ENTRY_EMBEDDED) != 0
        term_pos = columns.term_pos
        paths = {number: self._path_of(number) for number in np.unique(columns.segment).tolist()}
        for number, path in paths.items():
            chosen = np.flatnonzero(embedded & (columns.segment == number))
            if not len(chosen):
                continue
            source: Any = self._journal.image_view() if number < 0 else _map_file(path)
            if source is None:
                raise StoreChangedError("the file is gone; open the queue again", path)
            try:
                found = terms_at(source, term_pos[chosen], columns.term_size[chosen])
            finally:
                _release(source)
            for i, term in zip(chosen.tolist(), found):
                terms[i] = term
        ids = columns.msg_id.tobytes()
        deliver, mask = self._next_deliver_seq_id, (1 << 64) - 1
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
                seq_id < deliver,
                term,
                paths[segment],
                pos,
                expiry & mask,
                bool(flags & ENTRY_DELIVER),
            )
            for i, (seq_id, size, flags, expiry, segment, pos, term) in enumerate(rows)
        ]

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"<QueueIndex {self.path}, {self.depth} entries, {state}>"


def _column(values: Any, count: int, name: str, low: int, high: int) -> np.ndarray:
    try:
        array = np.asarray(values)
        if array.shape != (count,) or (count and array.dtype.kind not in "iu"):
            raise InvalidMessageError(f"{name} are {count} integers, not an array of {array.dtype} {array.shape}")
        if count and not (low <= int(array.min()) and int(array.max()) <= high):
            raise InvalidMessageError(f"one of {name} is not between {low} and {high}")
        return np.ascontiguousarray(array, dtype=np.int64)
    except OverflowError:
        raise InvalidMessageError(f"one of {name} is not between {low} and {high}") from None


def _terms_of(messages: Sequence[Message | bytes]) -> list[bytes]:
    """The terms of messages, some of which may be terms already."""
    listed: list[Any] = messages if isinstance(messages, list) else list(messages)
    if set(map(type, listed)) <= {bytes}:
        return listed
    return [
        bytes(message) if isinstance(message, (bytes, bytearray, memoryview)) else message.term for message in listed
    ]


class _IdleThread:
    """Calls `QueueIndex.idle` when nothing was done for a while; it never keeps the index alive."""

    def __init__(self, index: QueueIndex, interval: float):
        self._index = weakref.ref(index)
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmqstore-rabbitmq-idle", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait = self._interval
        while not self._stopping.wait(wait):
            index = self._index()
            if index is None:
                return
            wait = self._interval
            since = time.monotonic() - index._last_action
            if since < self._interval:
                wait = self._interval - since
            elif index.dirty_count:
                try:
                    index.idle()
                except StoreError:
                    return
                except OSError as error:
                    logger.error("%s could not be flushed: %s", index.path, error)
                    return
            del index

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
