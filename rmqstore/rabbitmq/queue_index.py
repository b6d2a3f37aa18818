"""The queue index of a classic queue, version 1: its messages, and which of them were delivered and acked.

Owns the operations of `QueueIndex`: one lock, the next sequence ids, the time of a flush, and the checks of arguments.
`index_directory` loads and reads, `index_writer` recovers and writes.  It never reads a message store and never changes
`.queue_name` or `recovery.dets`.

Invariants: opening read-only changes and locks nothing; damage is a `Problem` while reading, and an error before the
first change when writing.  Source of all rules: RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rmqstore.errors import (
    InvalidMessageError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    StoreClosedError,
    StoreError,
    StorePoisonedError,
)
from rmqstore.files.durable import make_directories
from rmqstore.files.listing import listing
from rmqstore.files.store_lock import ClosedAtExit
from rmqstore.rabbitmq._core import MAX_SEQ_ID, checked_ids
from rmqstore.rabbitmq.index_directory import IndexDirectory, check_entry_count
from rmqstore.rabbitmq.index_writer import IndexWriter, checked_terms, next_seq_ids, recover
from rmqstore.rabbitmq.layout import LEGACY_SEGMENT_ENTRY_COUNT, read_queue_name, read_segment_entry_count
from rmqstore.rabbitmq.live_index import ENTRY_REDELIVERED, IndexColumns, LiveIndex, StatedTerms
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.problem import Problem

__all__ = ["DEFAULT_MAX_JOURNAL_ENTRIES", "QueueIndex", "checked_expiry"]

# A node's queue_index_max_journal_entries.
DEFAULT_MAX_JOURNAL_ENTRIES = 32768
# Bytes in memory: more than a node's journal reaches with its default limits.
_MAX_JOURNAL_SIZE = 256 << 20
# On disk it is in microseconds.
_LAST_EXPIRY = (1 << 63) // 1000 - 1
_VERSION_2 = re.compile(r"\d+\.q[is]")
_REASONS: dict[int, tuple[type[StoreError], str]] = {
    -1: (OffsetOutOfRangeError, "is not in the queue: it was never published, or its segment is gone"),
    -2: (OffsetOutOfRangeError, "was acked already"),
    -3: (InvalidMessageError, "was delivered already; an entry has one deliver record"),
    -4: (InvalidMessageError, "was not delivered; deliver it first, a node crashes on an ack without a deliver"),
}


class QueueIndex(ClosedAtExit, LiveIndex):
    """The queue index (version 1) of one classic queue; made by `open`.

    Use it in a ``with`` statement, from any thread.  Actions stay in memory until `sync` writes them to the journal or
    `flush` to the segments: a crash, or garbage collection of an index that was not closed, loses the others.  At the end
    of the program an open index is closed with a ResourceWarning.

    Attributes
    ----------
    path : str
    segment_entry_count : int
    read_only : bool
    max_journal_entries : int
        A flush is due after more actions than this.
    recovered_clean : bool
        The queue was opened with good terms of an orderly stop.
    """

    location = "index"
    max_journal_entries: int
    _lock: threading.RLock

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("a queue index is made by opening it: use QueueIndex.open(path)")

    def _take(self, directory: IndexDirectory, writer: IndexWriter, clean: StatedTerms | None) -> None:
        self.path = directory.path
        self.segment_entry_count = directory.segment_entry_count
        self.read_only = directory.read_only
        self._lock = threading.RLock()
        self._directory, self._journal, self._writer = directory, directory.journal, writer
        self._next_seq_id, self._next_deliver_seq_id = next_seq_ids(directory, clean)
        self._persistent_ref = None if clean is None else clean.persistent_ref
        self._closed = False
        if not self.read_only:
            self._note_open()

    # ---------------------------------------------------------------------------------------------------------- opening

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        segment_entry_count: int | None = None,
        max_journal_entries: int = DEFAULT_MAX_JOURNAL_ENTRIES,
        read_only: bool = False,
        create: bool = False,
        terms: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        store_clean: bool = True,
        is_stored: Callable[[bytes], bool] | None = None,
        check_terms: bool = True,
        segments: range | None = None,
    ) -> QueueIndex:
        """Open the index of a queue's directory: load, merge and, for writing, recover it as a node would.

        Without `terms` the queue is dirty: next_seq_id begins after the last remaining segment, every message counts as
        delivered, and transient entries and those in no store are acked.  For writing, all of it is flushed.

        Parameters
        ----------
        path : path
            The queue's directory, ``queues/<QUEUE_DIR>``.
        segment_entry_count : int, optional
            By default that of the vhost's `.config` two directories above, else 16384.
        max_journal_entries : int
            A call flushes when more actions than this, or 256 MiB of the journal, are in memory (a node's
            queue_index_max_journal_entries).
        read_only, create : bool
            `create` a missing directory.
        terms : mapping or pairs, optional
            The queue's recovery terms after an orderly stop (section 9.1): segments, next_seq_id, next_deliver_seq_id, ….
        store_clean : bool
            False with `terms`: the message store was not clean; entries in no store are acked.
        is_stored : callable, optional
            True for a message id in the persistent store; by default all that are not embedded are there.
        check_terms : bool
            Check every embedded term; a bad one is a problem and no entry.
        segments : range, optional
            Read-only: only the entries of these segments; totals of the queue are then meaningless.

        Raises
        ------
        FileNotFoundError
            There is no such directory.
        StoreLockedError
            Another writer has it open.
        CorruptionError
            For writing: a file has more damage than an end cut by a crash.  Nothing was changed.
        StoreError
            For writing: the queue is of version 2.
        GeometryError
            `segment_entry_count` is impossible.
        """
        folder = os.path.abspath(os.fspath(path))
        if max_journal_entries < 0:
            raise ValueError("max_journal_entries is not negative")
        if segments is not None and not read_only:
            raise ValueError("a part of a queue can only be read: give read_only=True")
        if segment_entry_count is None:
            segment_entry_count = read_segment_entry_count(os.path.dirname(os.path.dirname(folder)))
            if segment_entry_count is None:
                segment_entry_count = LEGACY_SEGMENT_ENTRY_COUNT
        check_entry_count(segment_entry_count, folder)
        if not read_only:
            _check_version_1(folder)
        if create and not read_only:
            make_directories(folder)
        directory = IndexDirectory(folder, segment_entry_count, read_only)
        writer = IndexWriter(directory)
        try:
            if not read_only:
                writer.lock()
            directory.load(check_terms, segments)
            clean = None if terms is None else checked_terms(directory, terms, segments)
            if not read_only:
                recover(directory, writer, clean, store_clean, is_stored)
            index = cls.__new__(cls)
            index._take(directory, writer, clean)
        except BaseException:
            writer.close()
            raise
        index.recovered_clean = clean is not None and store_clean
        index.max_journal_entries = max_journal_entries
        return index

    # ---------------------------------------------------------------------------------------------------------- writing

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise ReadOnlyError(
                "the queue index was opened read-only; open it with read_only=False to write", self.path
            )
        if self._writer.failure is not None:
            raise StorePoisonedError(
                f"writing failed before ({self._writer.failure}); "
                "close the index and open it again, which recovers what is on disk",
                self.path,
            )

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
        """Add one entry and return its sequence id; a node of 3.10 or later follows every publish by its deliver.

        Parameters
        ----------
        msg_id, message : bytes, Message or bytes
            16 bytes, and the message to embed or its term.  A message in a store has only the id; an embedded one needs none.
        size : int
            Bytes of the body; optional for an embedded message.
        expiry, expiry_us : int, optional
            Expiry since the epoch: in ms, or in microseconds as in the file.
        persistent : bool, optional
            Default: that of the embedded message, else True.
        seq_id : int, optional
            Default: the next one.  It may leave a gap.

        Raises
        ------
        InvalidMessageError
            Something is missing or impossible, or the id is in use; nothing was changed.
        OSError
            A flush that was due failed: the entry was not written, and the index refuses writes.
        """
        expiry_us = _expiry_field(expiry, expiry_us)
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
                size = int(_body_sizes([term], np.array([-1]))[0])
                self._journal.publish_one(first, msg_id, term, size, expiry_us, flag, free)
            self._next_seq_id = max(self._next_seq_id, first + 1)
            self._flush_if_due()
            return first

    def publish_many(
        self,
        messages: Sequence[Message | bytes] | None = None,
        *,
        msg_ids: Any = None,
        sizes: Any = None,
        expiries: Sequence[int | None] | None = None,
        persistent: bool | Sequence[bool] | np.ndarray | None = None,
        deliver: bool = False,
    ) -> range:
        """Add entries with the bytes and flushes of as many calls of `publish`, and return their sequence ids.

        Parameters
        ----------
        messages, msg_ids, sizes, persistent : sequences or arrays of n, optional
            See `publish`; `msg_ids` may be an (n, 16) array of uint8, `persistent` one bool for all.
        expiries : sequence, optional
            ms since the epoch, None for never.
        deliver : bool
            Follow each publish by its deliver, as a node of 3.10 does.

        Raises
        ------
        InvalidMessageError
            One of them cannot be; nothing was changed.
        OSError
            A flush that was due failed; a new opening finds which of these entries are in the queue.
        """
        with self._lock:
            self._check_writable()
            new = _new_entries(messages, msg_ids, sizes, expiries, persistent)
            first, count = self._next_seq_id, len(new[0])
            if first > MAX_SEQ_ID - count + 1:
                raise InvalidMessageError(f"{count} sequence ids from {first} do not fit into 62 bits", self.path)
            done, actions = 0, count * (2 if deliver else 1)
            while done < actions:
                try:
                    done = self._journal.publish(
                        first, count, *new, deliver, done, self.max_journal_entries, _MAX_JOURNAL_SIZE
                    )
                finally:
                    # If memory runs out in the middle, the entries before it are in the queue.
                    self._next_seq_id = max(self._next_seq_id, self._journal.published_end)
                self._flush_if_due()
            return range(first, first + count)

    def deliver(self, seq_ids: int | range | Iterable[int] | np.ndarray) -> None:
        """Mark entries as delivered, all or none; `next_deliver_seq_id` stays, as in a node since 3.10.

        OffsetOutOfRangeError or InvalidMessageError if one is not in the queue, or was delivered before.
        """
        self._mark(seq_ids, False)

    def ack(self, seq_ids: int | range | Iterable[int] | np.ndarray) -> None:
        """Ack entries in this order, all or none.

        OffsetOutOfRangeError or InvalidMessageError if one is not in the queue, was acked before, or was not delivered.
        """
        self._mark(seq_ids, True)

    def _mark(self, seq_ids: Any, ack: bool) -> None:
        seqs = _seq_id_column(seq_ids)
        with self._lock:
            self._check_writable()
            verdict, number = self._journal.marks(seqs, ack)
            if verdict:
                kind, reason = _REASONS[verdict]
                raise kind(f"sequence id {seqs[number]} {reason}; nothing was changed", self.path)
            self._flush_if_due()

    def _flush_if_due(self) -> None:
        if self._journal.dirty_count > self.max_journal_entries or self._journal.used > _MAX_JOURNAL_SIZE:
            self._writer.flush()

    def idle(self) -> None:
        """Flush if there were actions since the last flush, as a node does before its queue hibernates."""
        with self._lock:
            self._check_writable()
            if self._journal.dirty_count:
                self._writer.flush()

    def flush(self) -> None:
        """Move the journal into the segments: delete those without unacked entries, append to the others, empty the journal.

        Everything is on disk when this returns.  A crash in between leaves entries both in the journal and in segments,
        which the next opening merges.  After an OSError the index refuses writes; reading continues.
        """
        with self._lock:
            self._check_writable()
            self._writer.flush()

    def sync(self) -> None:
        """Write the journal's new bytes and force them to disk.

        After an OSError the index refuses writes; reading continues.
        """
        with self._lock:
            self._check_writable()
            self._writer.sync()

    # ---------------------------------------------------------------------------------------------------------- closing

    def close(self) -> dict[str, Any] | None:
        """Sync the journal, release the directory and return the recovery terms for `recovery.dets` (section 9.1).

        None if the index is read-only or was closed before.  StorePoisonedError after a failed write; the directory is
        released anyway.
        """
        with self._lock:
            if self._closed:
                return None
            if self.read_only:
                self.abandon()
                return None
            try:
                self._check_writable()
                self._writer.sync()
                return self._terms()
            finally:
                self.abandon()

    def _terms(self) -> dict[str, Any]:
        sizes = self.persistent_sizes
        return {
            "segments": list(self._directory.unacked().items()),
            "next_seq_id": self._next_seq_id,
            "next_deliver_seq_id": self._next_deliver_seq_id,
            "persistent_ref": self._persistent_ref or os.urandom(16),
            "persistent_count": len(sizes),
            "persistent_bytes": int(sizes.sum()),
        }

    def abandon(self) -> None:
        """Release the directory without writing anything, as after a crash."""
        with self._lock:
            self._closed = True
            self._note_closed()
            self._writer.close()

    def __enter__(self) -> QueueIndex:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._writer.failure is not None:
            self.abandon()
        else:
            self.close()

    def __del__(self) -> None:
        super().__del__()
        # A half-made object has no lock.
        if hasattr(self, "_writer"):
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
        """int: all entries below were delivered at least once; settable, up to `next_seq_id`."""
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
            return self._directory.unacked()

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
        """list of Problem: damage that was met while reading."""
        return list(self._directory.problems)

    def refuse_damage(self) -> None:
        """Raise the CorruptionError of an opening for writing, if the files are damaged."""
        self._directory.refuse_damage()

    def path_of(self, file: int) -> str:
        """Return the path of a segment by its number, of the journal for a negative one."""
        return self._directory.path_of(file)

    def source(self, file: int) -> Any:
        """Return the bytes of a segment, or of the journal in memory; None if the segment is gone."""
        return self._directory.source(file)

    def columns(self, *, live: bool = True) -> IndexColumns:
        """Return the entries as columns, in the order of their sequence ids.

        Without `live` also those that are acked or damaged.  StoreChangedError if someone else has changed the files.
        """
        with self._lock:
            return self._columns_of(sorted(self._journal.segments), live)

    def _parts(self) -> list[list[int]]:
        with self._lock:
            self._check_open()
            return self._directory.parts()

    def _columns_of(self, numbers: list[int], live: bool = True) -> IndexColumns:
        self._check_open()
        columns = self._directory.columns_of(numbers, live)
        columns.flags[columns.seq_id < self._next_deliver_seq_id] |= ENTRY_REDELIVERED
        return columns

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"<QueueIndex {self.path}, {self.depth} entries, {state}>"


def _check_version_1(folder: str) -> None:
    """Raise StoreError where a queue's directory is of version 2: a node reads nothing of version 1 there."""
    stub = read_queue_name(folder)
    if any(map(_VERSION_2.fullmatch, listing(folder).names)) or (stub is not None and stub.index_version != 1):
        raise StoreError("the queue is of index version 2, which this version only reads; publish to a node", folder)


# ----------------------------------------------------------------------------------------------------------- arguments


def _new_entries(
    messages: Any, msg_ids: Any, sizes: Any, expiries: Sequence[int | None] | None, persistent: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[bytes] | None]:
    """Return ids, sizes, expiries in microseconds, persistent and embedded terms of `publish_many`, a row an entry."""
    terms: list[bytes] | None = None
    size_column: np.ndarray | None = None
    ids = None if msg_ids is None else _as_ids(msg_ids)
    if messages is None:
        if ids is None or sizes is None:
            raise InvalidMessageError("a message in a store needs its id and its size")
    else:
        terms = _terms_of(messages)
        if ids is not None and len(ids) != len(terms):
            raise InvalidMessageError(f"{len(ids)} message ids for {len(terms)} messages")
        ids, found, flags = checked_ids(terms, ids)
        size_column = _body_sizes(terms, found) if sizes is None else None
        persistent = flags if persistent is None else persistent
    count = len(ids)
    if size_column is None:
        size_column = _size_column(sizes, count)
    expiry_column = np.zeros(count, np.int64)
    if expiries is not None:
        if len(expiries) != count:
            raise InvalidMessageError(f"{len(expiries)} expiries for {count} messages")
        expiry_column[:] = [0 if expiry is None else 1000 * (checked_expiry(expiry) or 0) for expiry in expiries]
    if persistent is None or isinstance(persistent, (bool, np.bool_)):
        flag_column = np.full(count, 1 if persistent is None else int(persistent), np.uint8)
    else:
        flag_column = np.ascontiguousarray(np.asarray(persistent, dtype=bool), dtype=np.uint8)
        if flag_column.shape != (count,):
            raise InvalidMessageError(f"persistent has shape {flag_column.shape} for {count} messages")
    return ids, size_column, expiry_column, flag_column, terms


def checked_expiry(expiry: Any) -> int | None:
    """Return an expiry in ms since the epoch, or None for never; InvalidMessageError for anything else."""
    if expiry is None:
        return None
    if type(expiry) is bool or not isinstance(expiry, (int, np.integer)) or not 0 < expiry <= _LAST_EXPIRY:
        raise InvalidMessageError(f"expiry is {expiry!r}, not a time in ms since the epoch, nor None for never")
    return int(expiry)


def _expiry_field(milliseconds: int | None, in_microseconds: int | None) -> int:
    """Return the bits of an entry's field, which has no sign, as a signed number; `in_microseconds` goes first."""
    if in_microseconds is None:
        in_microseconds = 1000 * (checked_expiry(milliseconds) or 0)
    elif not 0 <= in_microseconds < 1 << 64:
        raise InvalidMessageError(f"expiry_us is {in_microseconds}, which does not fit into 64 bits")
    return int(in_microseconds) - ((int(in_microseconds) >> 63) << 64)


def _as_ids(msg_ids: Any) -> np.ndarray:
    if isinstance(msg_ids, np.ndarray):
        if msg_ids.dtype != np.uint8 or msg_ids.ndim != 2 or msg_ids.shape[1] != 16:
            raise InvalidMessageError("msg_ids as an array is of shape (n, 16) and of uint8")
        return np.ascontiguousarray(msg_ids)
    ids = list(msg_ids)
    if any(len(msg_id) != 16 for msg_id in ids):
        raise InvalidMessageError("a message id has 16 bytes")
    return np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16)


def _seq_id_column(seq_ids: Any) -> np.ndarray:
    """Convert sequence ids to an int64 array; OffsetOutOfRangeError if one is not a sequence id."""
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


def _size_column(sizes: Any, count: int) -> np.ndarray:
    array = np.asarray(sizes)
    if array.shape != (count,) or (count and array.dtype.kind not in "iu"):
        raise InvalidMessageError(f"sizes are {count} integers, not an array of {array.dtype} {array.shape}")
    if count and not 0 <= int(array.min()) <= int(array.max()) <= 0xFFFFFFFF:
        raise InvalidMessageError("a size is not between 0 and 2**32 - 1")
    return np.ascontiguousarray(array, dtype=np.int64)


def _terms_of(messages: Sequence[Message | bytes]) -> list[bytes]:
    """Return the terms of messages, some of which may be terms already."""
    listed: list[Any] = messages if isinstance(messages, list) else list(messages)
    if set(map(type, listed)) <= {bytes}:
        return listed
    return [
        bytes(message) if isinstance(message, (bytes, bytearray, memoryview)) else message.term for message in listed
    ]


def _body_sizes(terms: list[bytes], found: np.ndarray) -> np.ndarray:
    """Fill in the sizes of bodies that the scan of the terms did not find (-1)."""
    for i in np.flatnonzero(found < 0).tolist():
        found[i] = len(Message.from_term(terms[i]).body)
    return found
