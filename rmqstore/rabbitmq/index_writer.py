"""Opening of a queue index after a stop, and its writing: torn ends off, the journal to its file and into the segments.

Owns the lock on the directory itself, the journal's descriptor, the failure that ends writing, and recovery by terms or,
after a crash, without them (section 7.4).  It is not thread-safe: `QueueIndex` has the lock.

Invariants: a segment is only appended to, by one write of whole records, or deleted; the journal is emptied after the
segments have its entries; a file that someone else changed is not written; after a failure nothing is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rmqstore.errors import OpenReadOnly, Sentence, StoreChangedError
from rmqstore.files.durable import fsync_directory, write_all
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import naming_errors
from rmqstore.rabbitmq._core import ENTRY_DELIVER, ENTRY_EMBEDDED, ENTRY_PERSISTENT, Segment
from rmqstore.rabbitmq.index_directory import IndexDirectory
from rmqstore.rabbitmq.layout import lock_directory
from rmqstore.rabbitmq.live_index import IndexColumns, StatedTerms, embedded_terms, stated_terms

__all__ = ["IndexWriter", "checked_terms", "next_seq_ids", "recover"]

logger = logging.getLogger(__name__)


class IndexWriter(NotCopied):
    """The one writer of a directory; `failure` is the error that ended writing."""

    def __init__(self, directory: IndexDirectory):
        self.failure: BaseException | None = None
        self._directory = directory
        self._journal_fd = -1
        self._lock_fd = -1

    def lock(self) -> None:
        """Keep other writers out; StoreLockedError if one has the queue open."""
        self._lock_fd = lock_directory(
            self._directory.path, Sentence("another writer has the queue open; close it first", OpenReadOnly())
        )

    def open_journal(self) -> None:
        """Open the journal, and cut incomplete records off its end and the ends of the segments."""
        directory = self._directory
        path, used = directory.path_of(-1), directory.journal.used
        self._journal_fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        self._cut_tails()
        if directory.journal_size != used:
            with self._poisoning(path):
                os.ftruncate(self._journal_fd, used)
                os.fsync(self._journal_fd)
            directory.journal_size = used

    def close(self) -> None:
        """Release the directory, without writing anything."""
        for fd in (self._journal_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._journal_fd = self._lock_fd = -1

    @contextlib.contextmanager
    def _poisoning(self, path: str) -> Iterator[None]:
        try:
            with naming_errors(path):
                yield
        except BaseException as error:
            self.failure = error
            raise

    def _cut_tails(self) -> None:
        # A crash left part of a record at the end of a file; there is no whole record in it.
        for number, segment in sorted(self._directory.journal.segments.items()):
            if segment.end == segment.size or segment.size < 0:
                continue
            path = self._directory.path_of(number)
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
            segment.size = segment.end

    def sync(self) -> None:
        """Write the journal's new bytes and force them to the disk."""
        with self._poisoning(self._directory.path_of(-1)):
            self._write_journal()

    def _write_journal(self) -> None:
        directory, journal, path = self._directory, self._directory.journal, self._directory.path_of(-1)
        data = journal.unwritten()
        if not data:
            return
        with naming_errors(path):
            self._check_unchanged(self._journal_fd, path, max(journal.written, directory.journal_size))
            write_all(self._journal_fd, data, journal.written)
            os.fsync(self._journal_fd)
        journal.written += len(data)
        directory.journal_size = journal.written

    def flush(self) -> None:
        """Move the journal into the segments, and empty it, as `QueueIndex.flush`."""
        directory, journal = self._directory, self._directory.journal
        path = directory.path_of(-1)
        with self._poisoning(path):
            seqs, words = journal.collect()
            touched = set(np.unique(seqs // directory.segment_entry_count).tolist())
            doomed = [number for number, segment in journal.segments.items() if segment.unacked == 0]
            if journal.written:
                # The journal has to be as new as the segments: a node does not boot on a deliver whose ack is in a
                # segment, or whose publish was deleted with one.
                self._write_journal()
            names_changed = False
            for number in sorted(touched.union(doomed)):
                segment = journal.segments.get(number)
                if segment is None:
                    continue
                if segment.unacked == 0:
                    if segment.size >= 0:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(directory.path_of(number))
                        names_changed = True
                    journal.forget(segment)
                else:
                    names_changed |= segment.size < 0
                    self._append(segment, *directory.part(segment, seqs, words))
            if names_changed:
                fsync_directory(directory.path)
            self._check_unchanged(self._journal_fd, path, max(journal.written, directory.journal_size))
            os.ftruncate(self._journal_fd, 0)
            journal.clear()
            directory.journal_size = 0

    def _append(self, segment: Segment, seqs: np.ndarray, words: np.ndarray) -> None:
        path = self._directory.path_of(segment.number)
        journal = self._directory.journal
        blob = journal.encode(segment, seqs, words)
        old = max(segment.size, 0)
        with naming_errors(path):
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                self._check_unchanged(fd, path, old)
                try:
                    write_all(fd, blob)
                    os.fsync(fd)
                except BaseException:
                    # A node hangs on part of a record; the journal still has all of it.
                    with contextlib.suppress(OSError):
                        os.ftruncate(fd, old)
                    raise
            finally:
                os.close(fd)
        journal.applied(segment, seqs, words)

    def _check_unchanged(self, fd: int, path: str, size: int) -> None:
        if os.fstat(fd).st_size != size:
            raise StoreChangedError("the file was changed by someone else; is a node running on this directory?", path)


# ------------------------------------------------------------------------------------------------------------- recovery


def checked_terms(
    directory: IndexDirectory, terms: Mapping[str, Any] | Iterable[tuple[str, Any]], chosen: range | None
) -> StatedTerms | None:
    """Parse the terms of an orderly stop, with a problem for each that the files contradict; None for other terms."""
    highest = directory.highest_seq_id()
    live = directory.unacked() if chosen is None else None
    found = stated_terms(directory, 1, terms, live, highest, directory.problems)
    return None if found is None else found._replace(next_seq_id=max(found.next_seq_id, highest + 1))


def next_seq_ids(directory: IndexDirectory, clean: StatedTerms | None) -> tuple[int, int]:
    """Return the sequence ids of the next publish and of the next deliver."""
    if clean is not None:
        return clean.next_seq_id, min(clean.next_deliver_seq_id, clean.next_seq_id)
    remaining = [number for number, count in directory.unacked().items() if count]
    after = (max(remaining) + 1) * directory.segment_entry_count if remaining else 0
    return after, after


def recover(
    directory: IndexDirectory,
    writer: IndexWriter,
    clean: StatedTerms | None,
    store_clean: bool,
    is_stored: Callable[[bytes], bool] | None,
) -> None:
    """Change the files as a node does when it opens the queue."""
    directory.refuse_damage()
    writer.open_journal()
    if clean is None or not store_clean:
        _settle(directory, clean is None, is_stored)
        writer.flush()
    elif directory.merged or directory.problems:
        writer.flush()


def _settle(directory: IndexDirectory, dirty: bool, is_stored: Callable[[bytes], bool] | None) -> None:
    """Ack entries that are transient or in no store; in a dirty queue mark the rest as delivered (section 7.4)."""
    for numbers in directory.parts():
        columns = directory.columns_of(numbers, True)
        present = _persistent(directory, columns)
        if is_stored is not None:
            for i in np.flatnonzero((columns.flags & ENTRY_EMBEDDED) == 0).tolist():
                present[i] = bool(is_stored(columns.msg_id[i].tobytes()))
        undelivered = (columns.flags & ENTRY_DELIVER) == 0
        for seqs, ack in ((columns.seq_id[undelivered & (dirty | ~present)], False), (columns.seq_id[~present], True)):
            verdict, _ = directory.journal.marks(seqs, ack)
            assert verdict == 0, "an entry that was just listed takes its marks"


def _persistent(directory: IndexDirectory, columns: IndexColumns) -> np.ndarray:
    persistent: np.ndarray = (columns.flags & ENTRY_PERSISTENT) != 0
    for row, term in embedded_terms(directory, columns).items():
        # The embedded message decides, as in a node; a message of 3.13 or later has another end.
        persistent[row] = term.endswith(b"true") or (persistent[row] and not term.endswith(b"false"))
    return persistent
