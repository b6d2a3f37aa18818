"""The message files of a directory: their sizes, the parts in use, and the place of each message.

Owns the table of places with its reference counts, the descriptors, the current file, and the failure that ends writing.
Opening after a crash, and merging, are `message_recovery`'s.  It is not thread-safe: `MessageStore` has the lock.

Invariants: only the highest file is appended to; the sums are those of the summaries; a file without references is
deleted, unless it is the highest; after a failed write or sync nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rmqstore.errors import OpenReadOnly, Sentence, StoreError
from rmqstore.files.durable import fsync_directory, write_all
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import naming_errors, unread_format, with_path
from rmqstore.rabbitmq import _messages
from rmqstore.rabbitmq.layout import lock_directory, map_file
from rmqstore.rabbitmq.problem import UNREAD_FORMAT, Problem

__all__ = ["MAX_FILE", "RDT", "FileSummary", "Locations", "MessageFiles", "encode_record"]

_MAX_OPEN_FILES = 64
# Part of the key of a leftover N.rdt, which a read-only store reads in its place.
RDT = 1 << 30
MAX_FILE = RDT - 1
_RECORD_EXTRA = int(_messages.MessageRecordLayout.MESSAGE_RECORD_EXTRA)
_FILE_NAME = re.compile(r"(0|[1-9]\d{0,9})\.(rdq|rdt)")
# An unfinished N.rdq of itself and N.rdt; no node knows the name, and the next opening makes it again.
_STAGED = re.compile(r"(0|[1-9]\d{0,9})\.rdq\.rmqstore")


def encode_record(msg_id: bytes, term: bytes) -> bytes:
    """Encode the record of a message in an N.rdq."""
    mark = bytes((_messages.MessageRecordLayout.MESSAGE_RECORD_MARK,))
    return b"".join(((len(term) + 16).to_bytes(8, "big"), msg_id, term, mark))


class FileSummary(NamedTuple):
    """The size of the records in use in a message file, and of the file, in bytes."""

    valid_size: int
    file_size: int


class Locations(NamedTuple):
    """The places of messages, a row each, in the order of files and positions.

    `msg_id` (n, 16) uint8; `refcount` and `file` (n,) int32; `pos` and `size` (n,) int64, bytes of the whole record, 25
    more than its term.  A message without a reference has a `refcount` of 0 until its file goes.
    """

    msg_id: np.ndarray
    refcount: np.ndarray
    file: np.ndarray
    pos: np.ndarray
    size: np.ndarray


class MessageFiles(NotCopied):
    """The files in `path`, and the table of the messages in them.

    `unreadable` are files that a read-only opening could not open or does not read, by path.  `summaries` are [valid size,
    file size] by number of the file, ascending, `valid_size` and `size` the sums; `current` is the highest number, -1
    without a file.  `failure` is the reason that ended writing.
    """

    def __init__(self, path: str, file_size_limit: int, scan_mode: str):
        self.path = path
        self.file_size_limit = file_size_limit
        self.scan_mode = scan_mode
        self.problems: list[Problem] = []
        self.unreadable: dict[str, OSError] = {}
        self.table = _messages.LocationTable()
        self.summaries: dict[int, list[int]] = {}
        self.current = -1
        self.valid_size = 0
        self.size = 0
        self.failure: str | None = None
        self._directory_fd = -1
        self._fds: dict[int, int] = {}
        self._current_fd = -1
        self._unsynced = False
        self._names_unsynced = False

    def path_of(self, key: int) -> str:
        """Return the path of N.rdq; with `RDT` in the key, of N.rdt."""
        return os.path.join(self.path, f"{key & ~RDT}.{'rdt' if key & RDT else 'rdq'}")

    def listing(self) -> tuple[list[int], list[int], list[str]]:
        """List the numbers of the .rdq and of the .rdt, and staged names of this package, ascending."""
        rdq: list[int] = []
        rdt: list[int] = []
        staged: list[str] = []
        for name in listing(self.path).checked().names:
            match = _FILE_NAME.fullmatch(name)
            if match is not None and int(match[1]) <= MAX_FILE:
                (rdq if match[2] == "rdq" else rdt).append(int(match[1]))
            elif _STAGED.fullmatch(name):
                staged.append(name)
            elif name.endswith(".sqs"):
                path = os.path.join(self.path, name)
                detail = f"files that end in .sqs are not read by this version ({os.path.getsize(path)} bytes)"
                self.unreadable[path] = unread_format(path, detail)
                self.problems.append(Problem(path, 0, UNREAD_FORMAT, detail, None))
            elif name.endswith((".rdq", ".rdt")):
                detail = "the name is not a number that a store gives a file; a node stops with an error or reads it"
                self.problems.append(Problem(os.path.join(self.path, name), 0, "strange_name", detail, None))
        return sorted(rdq), sorted(rdt), staged

    # ------------------------------------------------------------------------------------------- opening and closing

    def lock(self) -> None:
        """Keep other writers out; StoreLockedError if one has the store open."""
        self._directory_fd = lock_directory(
            self.path,
            Sentence("the message store is open for writing already; close it there", OpenReadOnly()),
        )

    def add_up(self) -> None:
        """Take the sums and the current file from the summaries."""
        self.valid_size = sum(valid for valid, _ in self.summaries.values())
        self.size = sum(size for _, size in self.summaries.values())
        self.current = max((key for key in self.summaries if not key & RDT), default=-1)

    def begin(self, end: int | None) -> None:
        """Get ready for writing: delete files without references, cut the current one at `end`, by default its known size."""
        for number in [number for number in list(self.summaries)[:-1] if self.summaries[number][0] == 0]:
            self.delete(number)
        if not self.summaries:
            self.summaries[0] = [0, 0]
        number = next(reversed(self.summaries))
        path = self.path_of(number)
        self._current_fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        if end is None:
            end = self.summaries[number][1]
        if os.fstat(self._current_fd).st_size != end:
            with naming_errors(path):
                os.ftruncate(self._current_fd, end)
            self._unsynced = True
        self.size += end - self.summaries[number][1]
        self.summaries[number][1] = end
        self.current = number
        self._names_unsynced = True

    def close(self) -> None:
        """Release the lock and all descriptors, without writing anything."""
        fds = [*self._fds.values(), self._current_fd, self._directory_fd]
        self._fds.clear()
        self._current_fd = self._directory_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    # ------------------------------------------------------------------------------------------------------- reading

    def entry(self, msg_id: bytes) -> tuple[int, int, int, int] | None:
        """Return reference count, file, position and size of a message's record; None if it is in no file."""
        entry = self.table.get(msg_id)
        # A message of a deleted file must not come back.
        return entry if entry is not None and entry[1] in self.summaries else None

    def fd(self, key: int) -> int:
        """Return a descriptor for reading a file, which stays open."""
        if key == self.current and self._current_fd >= 0:
            return self._current_fd
        fd = self._fds.pop(key, -1)
        if fd < 0:
            fd = open_regular(self.path_of(key))
            if len(self._fds) >= _MAX_OPEN_FILES:
                os.close(self._fds.pop(next(iter(self._fds))))
        # The last used one is closed last.
        self._fds[key] = fd
        return fd

    def forget_fd(self, key: int) -> None:
        """Close the descriptor of a file that is gone."""
        fd = self._fds.pop(key, -1)
        if fd >= 0:
            os.close(fd)

    def live(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, positions and sizes of the messages in use in a file, ascending, and the ids of the others."""
        valid, size = self.summaries[number]
        region = map_file(self.path_of(number)) if size else None
        if region is not None:
            try:
                found, places, terms, _, end, _ = _messages.scan_messages(region)
            finally:
                region.close()
            refcounts, files, positions, sizes = self.table.entries(found)
            here = (files == number) & (positions == places) & (sizes == terms + _RECORD_EXTRA)
            used = here & (refcounts > 0)
            if end >= size and int(sizes[used].sum()) == valid and self.scan_mode != "bytewise":
                return found[used], positions[used], sizes[used], found[here & ~used]
        # A sequential scan does not find records after damage; the table has them.
        ids, counts, _, positions, sizes = self.table.columns(number)
        used = counts > 0
        order = np.flatnonzero(used)[np.argsort(positions[used], kind="stable")]
        return ids[order], positions[order], sizes[order], ids[~used]

    # ------------------------------------------------------------------------------------------------------- writing

    def refer_again(self, msg_id: bytes, entry: tuple[int, int, int, int]) -> None:
        """Add a reference to a message that is there."""
        refcount, file, pos, size = entry
        self.table.put(msg_id, refcount + 1, file, pos, size)
        if refcount == 0:
            self.summaries[file][0] += size
            self.valid_size += size

    def append(self, data: bytes, places: Sequence[tuple[bytes, int, int, int]]) -> None:
        """Append records to the current file, and begin the next one if it is full.

        `places` has the message id, reference count, position and size of each record in `data`.
        """
        number, size = self.current, len(data)
        summary = self.summaries[number]
        pos = summary[1]
        self.table.reserve(len(self.table) + len(places))
        self._unsynced = True
        try:
            write_all(self._current_fd, data, pos)
        except OSError as error:
            # As the next opening would do; until then readers meet whole records only.
            with contextlib.suppress(OSError):
                os.ftruncate(self._current_fd, pos)
            named = with_path(error, self.path_of(number))
            self.fail(named)
            raise named from error
        for msg_id, refcount, at, record_size in places:
            self.table.put(msg_id, refcount, number, at, record_size)
        summary[0] += size
        summary[1] += size
        self.valid_size += size
        self.size += size
        if summary[1] >= self.file_size_limit:
            self._roll()

    def _roll(self) -> None:
        number = self.current
        if number >= MAX_FILE:
            raise StoreError("the numbers of message files are used up", self.path)
        path = self.path_of(number + 1)
        try:
            self.sync()
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self.fail(error)
            raise
        self._fds[number] = self._current_fd
        self._current_fd = fd
        self.summaries[number + 1] = [0, 0]
        self.current = number + 1
        self._names_unsynced = True

    def drop_reference(self, msg_id: bytes) -> int:
        """Remove a reference and return the number left; delete a file without any.  KeyError for an unknown message."""
        entry = self.entry(msg_id)
        if entry is None or entry[0] == 0:
            raise KeyError(f"the message store {self.path} has no message {msg_id.hex()}")
        refcount, file, pos, size = entry
        self.table.put(msg_id, refcount - 1, file, pos, size)
        if refcount == 1:
            summary = self.summaries[file]
            summary[0] -= size
            self.valid_size -= size
            if summary[0] == 0 and file != self.current:
                self.delete(file)
        return refcount - 1

    def delete(self, number: int) -> None:
        """Delete a file without references that is not the current one."""
        try:
            dead = self.live(number)[3]
            os.unlink(self.path_of(number))
        except OSError as error:
            self.fail(error)
            raise
        self.forget_fd(number)
        self.table.discard_many(dead)
        self.size -= self.summaries.pop(number)[1]

    def take_merged(
        self, destination: int, source: int, moves: list[tuple[np.ndarray, np.ndarray, np.ndarray]], size: int
    ) -> None:
        """Note that `destination` was replaced by the `size` bytes in use in it and in `source`.

        `moves` has for each of the two the ids that moved, their new places, and the ids that are gone.
        """
        # Readers meet the new file from now, whatever becomes of the old one.
        self.forget_fd(destination)
        self.forget_fd(source)
        for ids, positions, dead in moves:
            self.table.move(ids, destination, positions)
            self.table.discard_many(dead)
        self.size += size - self.summaries[destination][1] - self.summaries[source][1]
        self.summaries[destination][:] = [size, size]
        del self.summaries[source]

    def sync(self) -> None:
        """Force written bytes and the names of new files to the disk."""
        if self._unsynced:
            with naming_errors(self.path_of(self.current)):
                os.fsync(self._current_fd)
            self._unsynced = False
        if self._names_unsynced:
            fsync_directory(self.path)
            self._names_unsynced = False

    def fail(self, error: OSError) -> None:
        """End writing."""
        self.failure = str(error)
