"""The message store of a vhost: bodies that are shared between queues, in N.rdq files.

Owns the operations of `MessageStore` on one ``msg_store_persistent`` (or ``_transient``) directory, under one lock.  It
never reads a queue: reference counts are not on disk, so that the caller gives them after a crash.

Invariants: after a death at any step, every message that was whole before is whole for the next opening, and for a real
node; a read-only store changes nothing and locks nothing; after a failed write or sync nothing is written.  Rules:
RabbitMQ 3.10.8 (docs/rabbitmq.md); numbers like §8.4 are its sections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from rmqstore.errors import (
    CorruptionError,
    ReadOnlyError,
    StoreChangedError,
    StoreClosedError,
    StoreLockedError,
    StorePoisonedError,
)
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.os_errors import failed_read, with_path
from rmqstore.files.store_lock import ClosedAtExit
from rmqstore.rabbitmq import _messages
from rmqstore.rabbitmq.clean_state import CLEAN_FILES, write_clean_state
from rmqstore.rabbitmq.message import Message, checked_term
from rmqstore.rabbitmq.message_files import RDT, FileSummary, Locations, MessageFiles, encode_record
from rmqstore.rabbitmq.message_recovery import FileScan, Opened, merge_all, recover, scan_file
from rmqstore.rabbitmq.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from rmqstore.rabbitmq.message_recovery import References

__all__ = [
    "DEFAULT_FILE_SIZE_LIMIT",
    "FileScan",
    "MessageStore",
    "find_term",
    "scan_file",
]

#: `msg_store_file_size_limit` of a node, bytes.
DEFAULT_FILE_SIZE_LIMIT = 16 * 2**20
# Bytes that `write_many` appends at once, about.
_BATCH_SIZE = 1 << 20


class MessageStore(ClosedAtExit, NotCopied):
    """The messages of a vhost that are not in a queue's index; made by `open`, usable in a ``with`` statement.

    Methods may be called from several threads.  A store that is open for writing and was not closed is closed with a
    ResourceWarning when the program ends; one that was garbage-collected ends as in a crash.

    Attributes
    ----------
    path : str
    read_only : bool
    file_size_limit : int
        Bytes at which the next file begins.
    clean : bool
        The state of an orderly close is used; otherwise the files were scanned.  A read-only store also scans them when that
        state lacks a message.
    dirty_reason : str or None
        The reason to scan.
    client_refs : list of bytes
        The queues' references in ``clean.dot``, 16 bytes each; empty unless `clean`.
    missing : numpy.ndarray
        (n, 16) uint8: ids that are referred to and were found in no readable file; a node drops their entries.
    problems : list of Problem
        Damage that the opening met.
    """

    def __init__(
        self,
        files: MessageFiles | None = None,
        opened: Opened | None = None,
        references: References | None = None,
        read_only: bool = False,
    ):
        if not isinstance(files, MessageFiles) or opened is None:
            raise TypeError("a message store is made by opening it: use MessageStore.open(path)")
        self.path = files.path
        self.read_only = read_only
        self.file_size_limit = files.file_size_limit
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._references = references
        # The result of a scan in spite of a clean state, after a fault of that.
        self._scanned: tuple[MessageFiles, Opened] | None = None
        self._take(files, opened)
        if not read_only:
            self._note_open()

    def _take(self, files: MessageFiles, opened: Opened) -> None:
        self._files, self.problems = files, files.problems
        self.dirty_reason, self.client_refs, self.missing, self._node = opened
        self.clean = opened.dirty_reason is None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        file_size_limit: int = DEFAULT_FILE_SIZE_LIMIT,
        read_only: bool = False,
        references: References | None = None,
        client_refs: Iterable[bytes] | None = None,
        scan: str = "auto",
    ) -> MessageStore:
        """Open a message store directory.

        Parameters
        ----------
        path : str or os.PathLike
            The directory; created if it is missing, unless `read_only`.
        file_size_limit : int
            Bytes (`msg_store_file_size_limit` of the node).
        read_only : bool
            Change nothing and lock nothing.
        references : mapping, numpy.ndarray or callable, optional
            References from all queues of the vhost: {msg_id: count}, or ids (n, 16) uint8 of which each row counts one, or
            a function that returns either and is called only if the store is not clean.  A message without a reference
            becomes garbage, as in a node.  None: every whole message counts as referred to once.
        client_refs : iterable of bytes, optional
            The `persistent_ref` of all queues with recovery terms; a clean state for others is not used (§7.2).  None: any
            clean state is used.
        scan : str
            The scan without a clean state: "sequential" exactly as a node up to 3.12, "bytewise" as 3.13 and later, "auto"
            sequential, and after damage every record whose term is whole.

        Raises
        ------
        StoreLockedError
            Another process, or this one, has it open for writing.
        FileNotFoundError
            `read_only`, and there is no such directory.
        OSError
            A file cannot be read or changed.
        """
        if file_size_limit < 1:
            raise ValueError(f"file_size_limit is {file_size_limit}; it must be at least 1")
        if scan not in ("auto", "sequential", "bytewise"):
            raise ValueError(f"scan is {scan!r}, not auto, sequential or bytewise")
        if scan == "bytewise" and references is None:
            raise ValueError("a bytewise scan accepts what is referred to: give references, or take scan='auto'")
        files = MessageFiles(os.fspath(path), file_size_limit, scan)
        if not read_only:
            os.makedirs(files.path, exist_ok=True)
            files.lock()
        try:
            opened = recover(files, references, None if client_refs is None else sorted(client_refs), read_only)
        except BaseException:
            files.close()
            raise
        return cls(files, opened, references, read_only)

    # ------------------------------------------------------------------------------------------------ what there is

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the message store is closed; open it again", self.path)

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise ReadOnlyError(
                "the message store was opened read-only; open it with read_only=False to write", self.path
            )
        if self._pid != os.getpid():
            raise StoreLockedError(
                "the message store is open for writing in the process that this one was forked from", self.path
            )
        if self._files.failure is not None:
            raise StorePoisonedError(
                f"an earlier failure ended writing ({self._files.failure}); open the store again", self.path
            )

    @property
    def closed(self) -> bool:
        """bool: `close` or `abandon` was called."""
        return self._closed

    @property
    def files(self) -> dict[int, FileSummary]:
        """dict of int to FileSummary: by the number of the file, ascending; writes go to the last one."""
        with self._lock:
            return {number: FileSummary(*sizes) for number, sizes in self._files.summaries.items() if not number & RDT}

    @property
    def valid_size(self) -> int:
        """int: bytes of all records that are referred to."""
        with self._lock:
            return self._files.valid_size

    @property
    def file_size(self) -> int:
        """int: bytes of all files."""
        with self._lock:
            return self._files.size

    def refcount(self, msg_id: bytes) -> int:
        """Count the references to a message; 0 for one that is not there."""
        with self._lock:
            entry = self._entry(msg_id)
            return 0 if entry is None else entry[0]

    def _entry(self, msg_id: bytes) -> tuple[int, int, int, int] | None:
        entry = self._files.entry(msg_id)
        # A caller without references asks for any id; most missing ones never existed.
        if (entry is None or entry[0] == 0) and self._references is not None:
            if self._mend(msg_id, "lacks" if entry is None else "counts no reference to"):
                entry = self._files.entry(msg_id)
        return entry

    def _mend(self, msg_id: bytes, fault: str) -> bool:
        """Switch from the clean state to a scan, if that finds a message; True if it does.

        No checksum ties the clean state to the message files.  It is kept if a scan does not find the message either.  A
        writer has deleted it already.
        """
        if self._closed or not self.clean or not self.read_only:
            return False
        if self._scanned is None:
            path = os.path.join(self.path, CLEAN_FILES[2])
            detail = f"the clean state {fault} message {msg_id.hex()}, which a scan of the message files finds"
            files = MessageFiles(self.path, self.file_size_limit, self._files.scan_mode)
            self._scanned = files, recover(
                files, self._references, None, True, Problem(path, 0, "clean_state_misfit", detail, None)
            )
        files, opened = self._scanned
        found = files.entry(msg_id)
        if found is None or found[0] == 0:
            return False
        self._files.close()
        self._take(files, opened)
        return True

    def contains(self, msg_id: bytes) -> bool:
        """Check that a message is there and referred to."""
        return self.refcount(msg_id) > 0

    def __contains__(self, msg_id: object) -> bool:
        return isinstance(msg_id, bytes) and self.contains(msg_id)

    def locations(self) -> Locations:
        """Return the places of all messages, those without references too."""
        with self._lock:
            ids, refcounts, files, positions, sizes = self._files.table.columns()
        order = np.lexsort((positions, files))
        return Locations(ids[order], refcounts[order], files[order], positions[order], sizes[order])

    def read_term(self, msg_id: bytes) -> bytes:
        """Read the external term of a message.

        Raises
        ------
        KeyError
            There is no such message.
        CorruptionError
            Its record has changed since the store was opened.
        StoreChangedError
            A writer has removed the file since this store was opened read-only.
        OSError
            The file that has the message, or may have it, cannot be read.
        """
        with self._lock:
            self._check_open()
            while True:
                entry = self._entry(msg_id)
                if entry is None or entry[0] == 0:
                    if entry is None and self._files.unreadable:
                        path, error = next(iter(self._files.unreadable.items()))
                        raise with_path(error, path)
                    raise KeyError(f"the message store {self.path} has no message {msg_id.hex()}")
                _, file, pos, size = entry
                try:
                    record = os.pread(self._files.fd(file), size, pos)
                except FileNotFoundError:
                    raise StoreChangedError(
                        "the file of the message is gone; its writer has removed or merged it, so open the store again",
                        self._files.path_of(file),
                    ) from None
                if (
                    len(record) == size
                    and int.from_bytes(record[:8], "big") == size - 9
                    and record[8:24] == msg_id
                    and record[-1] == _messages.MessageRecordLayout.MESSAGE_RECORD_MARK
                ):
                    return record[24:-1]
                if not self._mend(msg_id, "leads elsewhere for"):
                    raise CorruptionError(
                        f"the record of message {msg_id.hex()} has changed; was a node started on this directory?",
                        self._files.path_of(file),
                        pos,
                    )

    def read(self, msg_id: bytes) -> Message:
        """Read a message; raises what `read_term` does, and CorruptionError for a term that is not a message."""
        return Message.from_term(self.read_term(msg_id))

    # ------------------------------------------------------------------------------------------------------ writing

    def write(self, msg_id: bytes, message: Message | Buffer) -> bool:
        """Write a message (or its external term) with an id of 16 bytes, or add a reference if it is there (§8.3).

        Returns True if it was new.  InvalidMessageError for a term that is not well-formed or holds another id;
        StorePoisonedError after an earlier failure; after an OSError the store refuses writes.
        """
        return self.write_many((msg_id,), (message,)) == 1

    def write_many(self, msg_ids: Iterable[bytes], messages: Iterable[Message | Buffer]) -> int:
        """Write messages as `write` does, with one system call for many, and return the number of new ones.

        InvalidMessageError if one cannot be written; then no message was.
        """
        pairs = [
            (msg_id, checked_term(msg_id, message, self.path)) for msg_id, message in zip(msg_ids, messages, strict=True)
        ]
        new = 0
        with self._lock:
            self._check_writable()
            files = self._files
            batch: list[bytes] = []
            places: dict[bytes, list[int]] = {}  # msg_id -> [reference count, position, size] of what is in the batch
            end = files.summaries[files.current][1]
            batch_size = 0

            def append() -> None:
                files.append(b"".join(batch), [(one, count, at, size) for one, (count, at, size) in places.items()])

            for msg_id, term in pairs:
                waiting = places.get(msg_id)
                if waiting is not None:
                    waiting[0] += 1
                    continue
                entry = files.entry(msg_id)
                if entry is not None:
                    files.refer_again(msg_id, entry)
                    continue
                record = encode_record(msg_id, term)
                places[msg_id] = [1, end + batch_size, len(record)]
                batch.append(record)
                batch_size += len(record)
                new += 1
                if end + batch_size >= self.file_size_limit or batch_size >= _BATCH_SIZE:
                    append()
                    batch, places, batch_size = [], {}, 0
                    end = files.summaries[files.current][1]
            if batch:
                append()
        return new

    def remove(self, msg_id: bytes) -> int:
        """Remove one reference to a message and return how many are left (§8.3, §8.4).

        Its bytes go with its file, or with `merge`.  KeyError if there is no such message; StorePoisonedError after a failure.
        """
        with self._lock:
            self._check_writable()
            return self._files.drop_reference(msg_id)

    def remove_many(self, msg_ids: Iterable[bytes]) -> None:
        """Remove one reference for each id; KeyError at an unknown message, after those before it were removed."""
        with self._lock:
            for msg_id in msg_ids:
                self.remove(msg_id)

    # ------------------------------------------------------------------------------------------------------ merging

    def merge(self) -> int:
        """Merge neighbouring files while the messages of two fit into one, and return the number of merges.

        Only this call merges.  After an OSError of a copy everything is as before; StorePoisonedError after a failure.
        """
        with self._lock:
            self._check_writable()
            return merge_all(self._files)

    # -------------------------------------------------------------------------------------------- syncing and closing

    def sync(self) -> None:
        """Force all written bytes to the disk; after an OSError the store refuses writes."""
        with self._lock:
            self._check_writable()
            try:
                self._files.sync()
            except OSError as error:
                self._files.fail(error)
                raise

    def close(self, client_refs: Iterable[bytes] | None = None) -> None:
        """Force everything to the disk and close; closing twice does nothing.

        Parameters
        ----------
        client_refs : iterable of bytes, optional
            The `persistent_ref` of every durable queue that was closed in order.  A clean state is written for them, so that
            the next opening scans nothing.  None: no clean state.

        Raises
        ------
        StorePoisonedError
            No clean state was written after a failure; the store is closed.
        OSError
            A write failed; the store is closed, and not clean.
        """
        with self._lock:
            if self._closed:
                return
            try:
                if not self.read_only and self._files.failure is None and self._pid == os.getpid():
                    self._files.sync()
                    if client_refs is not None:
                        write_clean_state(self._files, list(client_refs), self._node)
                elif not self.read_only and client_refs is not None:
                    self._check_writable()
            finally:
                self._release()

    def abandon(self) -> None:
        """Close without forcing or writing anything, as after a crash."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        self._closed = True
        self._note_closed()
        self._files.close()

    def __del__(self) -> None:
        # A forgotten store must not keep its lock.
        super().__del__()
        if hasattr(self, "_files"):
            self._release()

    def __enter__(self) -> MessageStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Count the messages that are referred to."""
        with self._lock:
            return int((self._files.table.columns()[1] > 0).sum())

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the ids of messages that are referred to, in the order of files and positions."""
        places = self.locations()
        ids = places.msg_id[places.refcount > 0].tobytes()
        return (ids[at : at + 16] for at in range(0, len(ids), 16))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"MessageStore({self.path!r}, {state}, {len(self._files.summaries)} files)"


def find_term(
    stores: Callable[[bool], MessageStore | None], msg_id: bytes, persistent: bool, path: str
) -> tuple[bytes | None, CorruptionError | OSError | None]:
    """Find the term of a message that is not embedded; None and why it cannot be read; both None if it is lost.

    `stores` returns the persistent or the transient store, `path` is the file of the message's index entry.  OSError: the
    file that has the term, or may have it, cannot be read.  CorruptionError: its record has changed.
    """
    if path.endswith(".qs"):
        return None, failed_read(path, "the file cannot be read")
    try:
        store = stores(persistent)
        return None if store is None else store.read_term(msg_id), None
    except KeyError:
        return None, None
    except (CorruptionError, OSError) as error:
        return None, error
