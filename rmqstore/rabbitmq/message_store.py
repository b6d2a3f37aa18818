"""The message store of a vhost: bodies that are shared between queues, in N.rdq files.

Owns the files of one ``msg_store_persistent`` (or ``_transient``) directory: appending and rolling, reference counts,
deletion of empty files, merging of half-empty ones, the scan after a crash, the clean state and the lock.  It never reads a
queue: reference counts are on no disk, so after a crash its caller says who refers to what.

Invariants: only the highest file is appended to; whatever step a process dies at, every message that was whole before is
whole for the next opening, and for a real node; a read-only store changes nothing and locks nothing; after a failed write or
sync nothing is written any more.  Rules: RabbitMQ 3.10.8 (docs/rabbitmq.md); numbers like §8.4 are its sections.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import itertools
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmqstore._core import Region
from rmqstore.errors import (
    CorruptionError,
    InvalidMessageError,
    ReadOnlyError,
    StoreChangedError,
    StoreClosedError,
    StoreError,
    StoreLockedError,
    StorePoisonedError,
)
from rmqstore.files.mapped_file import NotCopied, fsync_directory, naming_errors, open_regular
from rmqstore.rabbitmq import _core, _term
from rmqstore.rabbitmq.problem import Problem
from rmqstore.rabbitmq.term import Atom, consult, decode, encode

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from rmqstore.rabbitmq.message import Message

    References = Mapping[bytes, int] | np.ndarray | Callable[[], "Mapping[bytes, int] | np.ndarray"]

__all__ = [
    "DEFAULT_FILE_SIZE_LIMIT",
    "FileScan",
    "FileSummary",
    "Locations",
    "MessageStore",
    "scan_file",
]

#: `msg_store_file_size_limit` of a node, bytes.
DEFAULT_FILE_SIZE_LIMIT = 16 * 2**20

CLEAN_FILES = ("clean.dot", "file_summary.ets", "msg_store_index.ets")
_GARBAGE_FRACTION = 0.5
_MAX_PAIRS = 2
_MAX_OPEN_FILES = 64
# Part of the key of a leftover N.rdt, which a read-only store reads where it lies.
_RDT = 1 << 30
_MAX_FILE = _RDT - 1
_FILE_NAME = re.compile(r"(0|[1-9]\d{0,9})\.(rdq|rdt)")
# A step of making N.rdq out of itself and N.rdt; no node knows the name, and the next opening starts the step again.
_STAGED = re.compile(r"(0|[1-9]\d{0,9})\.rdq\.rmqstore")
_COPY_SIZE = 1 << 20


class FileSummary(NamedTuple):
    """What is known of a message file.

    Attributes
    ----------
    valid_size : int
        Bytes of records that are referred to.
    file_size : int
        Bytes of the file.
    """

    valid_size: int
    file_size: int


class Locations(NamedTuple):
    """Where messages lie, a row each, in the order of files and positions.

    Attributes
    ----------
    msg_id : numpy.ndarray
        (n, 16) uint8.
    refcount : numpy.ndarray
        (n,) int32; 0 for a message that nobody refers to, whose file was not cleaned up yet.
    file : numpy.ndarray
        (n,) int32: the number of the N.rdq.
    pos, size : numpy.ndarray
        (n,) int64: place and size of the whole record in bytes, 25 more than its term.
    """

    msg_id: np.ndarray
    refcount: np.ndarray
    file: np.ndarray
    pos: np.ndarray
    size: np.ndarray


class FileScan(NamedTuple):
    """What a message file holds, a row for each record, in the order of the file.

    Attributes
    ----------
    msg_id : numpy.ndarray
        (n, 16) uint8.
    pos : numpy.ndarray
        (n,) int64: where the record begins, bytes.
    size : numpy.ndarray
        (n,) int64: bytes of the term; negative where the record is too short for an id.
    flags : numpy.ndarray
        (n,) uint8 of `MessageFlag`.
    end : int
        Where the scan ended.
    problems : list of Problem
    """

    msg_id: np.ndarray
    pos: np.ndarray
    size: np.ndarray
    flags: np.ndarray
    end: int
    problems: list[Problem]


def _stop_problem(path: str, region: Region, end: int, stop: int) -> Problem | None:
    # What the end of a scan means, if it is not the end of the file.
    if stop == _core.MessageStop.STOP_END:
        return None
    left = region.size - end
    if stop == _core.MessageStop.STOP_WORK:
        return Problem(path, end, "overlapping_records", "more overlapping records than a real file has", None)
    if stop == _core.MessageStop.STOP_ZERO:
        if region.last_nonzero(end, left) == end:
            return Problem(path, end, "zero_tail", f"the last {left} bytes are zero; they hold nothing", None)
        return Problem(
            path, end, "zero_size", f"a size of zero; a node up to 3.12 reads none of the {left} bytes from here", None
        )
    return Problem(
        path, end, "torn_record", f"a record that does not fit; a node up to 3.12 reads none of the {left} bytes", None
    )


def _map(path: str) -> Region | None:
    # None for an empty file, which cannot be mapped.
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        with naming_errors(path):
            return Region.map(fd, size) if size else None
    finally:
        os.close(fd)


def _located(error: StoreError, path: str) -> StoreError:
    # The compiled module knows no paths.
    return type(error)(error.message, path, error.pos)


def _refer(table: _core.LocationTable, references: Mapping[bytes, int] | np.ndarray) -> None:
    if isinstance(references, np.ndarray):
        table.reserve(len(table) + len(references))
        table.refer(np.ascontiguousarray(references, np.uint8))
        return
    table.reserve(len(table) + len(references))
    ids, counts = [], []
    for msg_id, count in references.items():
        if len(msg_id) != 16:
            raise ValueError(f"a message id has 16 bytes, not {len(msg_id)}: {msg_id!r}")
        ids.append(msg_id)
        counts.append(count)
        if len(ids) == 65536:
            table.refer(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16), np.array(counts, np.int64))
            ids, counts = [], []
    if ids:
        table.refer(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16), np.array(counts, np.int64))


def scan_file(
    path: str | os.PathLike[str],
    mode: str = "sequential",
    *,
    references: Mapping[bytes, int] | np.ndarray | None = None,
    check_terms: bool = False,
) -> FileScan:
    """Read the records of one message file, damaged or not; never raises for damage.

    Parameters
    ----------
    path : str or os.PathLike
        An N.rdq or N.rdt.
    mode : str
        "sequential": as RabbitMQ up to 3.12 does, from record to record (§8.1); a record without its mark is a row without
        `MESSAGE_WRITTEN`.  "bytewise": as 3.13 and later (§11), which needs `references`.  "salvage": at every position
        a record whose term is well-formed, of exactly its length, and holds the record's id.  "auto": sequential as far as it
        goes, and if it meets damage, with what salvage finds besides.
    references : mapping of bytes to int, or numpy.ndarray
        Ids (n, 16) uint8, or as keys of a mapping; for "bytewise" only.
    check_terms : bool
        Look at every term as well: whether it is well-formed and holds the id of its record (`MESSAGE_TERM_OK`).  Not for
        "bytewise".

    Returns
    -------
    FileScan

    Raises
    ------
    OSError
        The file cannot be read.
    """
    path = os.fspath(path)
    problems: list[Problem] = []
    none = (np.empty((0, 16), np.uint8), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))
    if mode not in ("sequential", "bytewise", "salvage", "auto"):
        raise ValueError(f"mode is {mode!r}, not sequential, bytewise, salvage or auto")
    if mode == "bytewise" and references is None:
        raise ValueError("a bytewise scan accepts what is referred to: give references, or take mode='salvage'")
    region = _map(path)
    if region is None:
        return FileScan(*none, 0, problems)
    try:
        if mode == "bytewise":
            table = _core.LocationTable()
            _refer(table, references if references is not None else {})
            end = table.scan(region, 0, _core.MessageScan.SCAN_BYTEWISE)[7]
            ids, _, _, pos, size = table.columns(0)
            order = np.argsort(pos, kind="stable")
            flags = np.full(len(pos), _core.MessageFlag.MESSAGE_WRITTEN, np.uint8)
            return FileScan(
                ids[order],
                pos[order],
                size[order] - _core.MessageRecordLayout.MESSAGE_RECORD_EXTRA,
                flags,
                end,
                problems,
            )
        first = _core.MessageScan.SCAN_SALVAGE if mode == "salvage" else _core.MessageScan.SCAN_SEQUENTIAL
        ids, pos, size, flags, end, stop = _core.scan_messages(region, 0, first, -1, check_terms)
        problem = _stop_problem(path, region, end, stop)
        if problem is not None:
            problems.append(problem)
        damaged = stop != _core.MessageStop.STOP_END or not (flags & _core.MessageFlag.MESSAGE_WRITTEN).all()
        if mode == "auto" and damaged:
            more = _core.scan_messages(region, 0, _core.MessageScan.SCAN_SALVAGE)
            end = more[4]
            new = ~np.isin(more[1], pos)
            order = np.argsort(np.concatenate((pos, more[1][new])), kind="stable")
            ids, pos = np.concatenate((ids, more[0][new]))[order], np.concatenate((pos, more[1][new]))[order]
            size, flags = np.concatenate((size, more[2][new]))[order], np.concatenate((flags, more[3][new]))[order]
    finally:
        region.close()
    for row in np.flatnonzero(flags & _core.MessageFlag.MESSAGE_WRITTEN == 0)[:1000]:
        problems.append(
            Problem(path, int(pos[row]), "unwritten_record", "a record without its mark; this message is lost", None)
        )
    if check_terms:
        good = _core.MessageFlag.MESSAGE_WRITTEN | _core.MessageFlag.MESSAGE_TERM_OK
        for row in np.flatnonzero(flags & good == _core.MessageFlag.MESSAGE_WRITTEN)[:1000]:
            detail = "the message's term is damaged, or holds another id than its record; a node fails when it reads it"
            problems.append(Problem(path, int(pos[row]), "bad_term", detail, None))
    for row in np.flatnonzero(flags & _core.MessageFlag.MESSAGE_TOO_SHORT)[:1000]:
        problems.append(
            Problem(path, int(pos[row]), "short_record", "a record too short for an id; a node may stop here", None)
        )
    return FileScan(ids, pos, size, flags, end, problems)


class _CleanState(NamedTuple):
    table: _core.LocationTable
    files: dict[int, list[int]]
    client_refs: list[bytes]
    node: str


class MessageStore(NotCopied):
    """The messages of a vhost that do not lie in a queue's index; made by `open`, usable in a ``with`` statement.

    All methods may be called from several threads; one lock guards them.

    Attributes
    ----------
    path : str
        The directory.
    read_only : bool
    file_size_limit : int
        Bytes at which the next file is begun.
    clean : bool
        The state of an orderly close was found and taken; otherwise the files were scanned.
    dirty_reason : str or None
        Why there was no clean state.
    client_refs : list of bytes
        The queues' references that ``clean.dot`` held, 16 bytes each; empty unless `clean`.
    missing : numpy.ndarray
        (n, 16) uint8: ids that are referred to and were found nowhere; the node drops their index entries.
    problems : list of Problem
        What was wrong with the files when the store was opened.
    """

    def __init__(self) -> None:
        raise TypeError("use MessageStore.open")

    path: str
    read_only: bool
    file_size_limit: int
    clean: bool
    dirty_reason: str | None
    client_refs: list[bytes]
    missing: np.ndarray
    problems: list[Problem]

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
            The directory; made if it is not there, unless `read_only`.
        file_size_limit : int
            Bytes (`msg_store_file_size_limit` of the node).
        read_only : bool
            Change nothing and lock nothing.
        references : mapping, numpy.ndarray or callable, optional
            Who refers to what, from all queues of the vhost: {msg_id: count}, or ids (n, 16) uint8 of which each row counts
            one, or a function that returns either and is called only if the store is not clean.  A message that nobody
            refers to becomes garbage, as in a node.  None: every whole message counts as referred to once.
        client_refs : iterable of bytes, optional
            The `persistent_ref` of all queues with recovery terms; the clean state counts only if it was made for the same
            ones (§7.2).  None: whatever it was made for.
        scan : str
            How files are scanned that were not closed in order: "sequential" exactly as a node up to 3.12, "bytewise" as
            3.13 and later, "auto" sequential, and behind damage every record whose term is whole.

        Returns
        -------
        MessageStore

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
        store = cls.__new__(cls)
        store.path = os.fspath(path)
        store.read_only = read_only
        store.file_size_limit = file_size_limit
        store.clean = False
        store.dirty_reason = None
        store.client_refs = []
        store.missing = np.empty((0, 16), np.uint8)
        store.problems = []
        store._scan_mode = scan
        store._lock = threading.RLock()
        store._directory_fd = -1
        store._fds = {}
        store._current_fd = -1
        store._current = -1
        store._valid_sum = 0
        store._size_sum = 0
        store._files = {}
        store._table = _core.LocationTable()
        store._pid = os.getpid()
        store._poison = None
        store._closed = False
        store._unsynced = False
        store._names_unsynced = False
        store._merging_suspended = False
        store._node = "nonode@nohost"
        if not read_only:
            os.makedirs(store.path, exist_ok=True)
            store._take_lock()
        try:
            store._open(references, None if client_refs is None else sorted(client_refs))
        except BaseException:
            store._release()
            raise
        return store

    # The rest of the state; all of it is guarded by _lock.
    _scan_mode: str
    _lock: threading.RLock
    _directory_fd: int
    _fds: dict[int, int]
    _current_fd: int
    # File number -> [valid size, file size], ascending; the last one is the current file.
    _files: dict[int, list[int]]
    # Its number, and the sums over the files, which every write and remove needs.
    _current: int
    _valid_sum: int
    _size_sum: int
    _table: _core.LocationTable
    _pid: int
    _poison: str | None
    _closed: bool
    _unsynced: bool
    _names_unsynced: bool
    _merging_suspended: bool
    _node: str

    # ----------------------------------------------------------------------------------------------------- opening

    def _take_lock(self) -> None:
        # The node takes no lock of its own, so this one only keeps writers of this package apart.
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise StoreLockedError(
                    "the message store is open for writing already; close it there, or open it with read_only=True",
                    self.path,
                ) from None
            raise
        self._directory_fd = fd

    def _file_path(self, key: int) -> str:
        return os.path.join(self.path, f"{key & ~_RDT}.{'rdt' if key & _RDT else 'rdq'}")

    def _list(self) -> tuple[list[int], list[int], list[str]]:
        # Numbers of the .rdq, those of the .rdt, and staged names of this package; ascending.
        rdq: list[int] = []
        rdt: list[int] = []
        staged: list[str] = []
        for name in sorted(os.listdir(self.path)):
            match = _FILE_NAME.fullmatch(name)
            if match is not None and int(match[1]) <= _MAX_FILE:
                (rdq if match[2] == "rdq" else rdt).append(int(match[1]))
            elif _STAGED.fullmatch(name):
                staged.append(name)
            elif name.endswith((".rdq", ".rdt")):
                detail = "the name is no number that a store gives a file; a node stops with an error or reads it"
                self.problems.append(Problem(os.path.join(self.path, name), 0, "strange_name", detail, None))
        return sorted(rdq), sorted(rdt), staged

    def _open(self, references: References | None, client_refs: list[bytes] | None) -> None:
        rdq, rdt, staged = self._list()
        state = None
        if rdt:
            self.dirty_reason = "a merge was under way (N.rdt)"
        elif not rdq and not any(os.path.exists(os.path.join(self.path, name)) for name in CLEAN_FILES):
            self.dirty_reason = "the store is empty"
        else:
            try:
                state = self._read_clean_state(rdq, client_refs)
            except FileNotFoundError as error:
                self.dirty_reason = f"there is no {os.path.basename(error.filename)}"
            except StoreError as error:
                self.dirty_reason = str(error)
                self.problems.append(
                    Problem(error.path or self.path, error.pos or 0, "clean_state_ignored", error.message, None)
                )
        for name in staged if not self.read_only else ():
            # Part of a step that is taken again from its beginning.
            os.unlink(os.path.join(self.path, name))
        end = None
        if state is not None:
            self.clean = True
            self._table, self._files, self.client_refs, self._node = state
            if not self.read_only:
                self._forget_clean_state()
        else:
            # Everything that may fail for a reason of the caller comes before the first change.
            if callable(references):
                references = references()
            adopt = references is None
            if references is not None:
                _refer(self._table, references)
            for number in rdt:
                rdq = self._take_over_rdt(number, rdq)
            if not self.read_only:
                self._forget_clean_state()
            end = self._scan_files(rdq, rdt if self.read_only else [], adopt)
        self._valid_sum = sum(valid for valid, _ in self._files.values())
        self._size_sum = sum(size for _, size in self._files.values())
        self._current = max((key for key in self._files if not key & _RDT), default=-1)
        if self.read_only:
            return
        for number in [number for number in list(self._files)[:-1] if self._files[number][0] == 0]:
            self._delete_file(number)
        if not self._files:
            self._files[0] = [0, 0]
        number = next(reversed(self._files))
        path = self._file_path(number)
        self._current_fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        if end is None:
            end = self._files[number][1]
        if os.fstat(self._current_fd).st_size != end:
            with naming_errors(path):
                os.ftruncate(self._current_fd, end)
            self._unsynced = True
        self._size_sum += end - self._files[number][1]
        self._files[number][1] = end
        self._current = number
        self._names_unsynced = True

    def _take_over_rdt(self, number: int, rdq: list[int]) -> list[int]:
        # §8.4: what a merge had saved goes behind the records of its file.  A node appends it to the file as it is; where the
        # crash came between extending the file and copying back, there are zeros, at which its scan ends, and it loses what
        # it saved.  Here it goes to where the scan ends, and nothing is ever half done: the new file replaces the old one.
        rdt_path, path = self._file_path(number | _RDT), self._file_path(number)
        self.problems.append(
            Problem(rdt_path, 0, "leftover_rdt", "a merge was interrupted; its messages are kept", None)
        )
        if number not in rdq:
            self.problems.append(
                Problem(rdt_path, 0, "rdt_without_rdq", f"there is no {number}.rdq; a node stops with an error", None)
            )
            if not self.read_only:
                os.rename(rdt_path, path)
                fsync_directory(self.path)
                return sorted([*rdq, number])
            return rdq
        if self.read_only:
            return rdq
        region = _map(path)
        end, tail = 0, 0
        if region is not None:
            try:
                end, stop = _core.scan_messages(region)[4:]
                tail = 0 if stop == _core.MessageStop.STOP_END else region.last_nonzero(end, region.size - end) - end
            finally:
                region.close()
        staged = f"{path}.rmqstore"
        with (
            naming_errors(staged),
            open(open_regular(path), "rb") as old,
            open(open_regular(rdt_path), "rb") as saved,
            open(staged, "wb") as new,
        ):
            _copy(old, 0, end, new)
            _copy(saved, 0, os.fstat(saved.fileno()).st_size, new)
            _copy(old, end, tail, new)
            new.flush()
            os.fsync(new.fileno())
        os.rename(staged, path)
        fsync_directory(self.path)
        os.unlink(rdt_path)
        return rdq

    def _scan_files(self, rdq: list[int], rdt: list[int], adopt: bool) -> int:
        # §8.5.  Fills the table and the summaries; the end of the last valid record of the highest file.
        mode = _core.MessageScan.SCAN_BYTEWISE if self._scan_mode == "bytewise" else _core.MessageScan.SCAN_SEQUENTIAL
        # A leftover .rdt first: where it is appended instead, its copies are met first.
        keys = sorted([*rdq, *(number | _RDT for number in rdt)], key=lambda key: (key & ~_RDT, not key & _RDT))
        end = 0
        for key in keys:
            path = self._file_path(key)
            region = _map(path)
            end = 0
            self._files[key] = [0, 0]
            if region is None:
                continue
            try:
                _, _, _, end, unwritten, short, fault, at, stop = self._table.scan(region, key, mode, adopt)
                if unwritten:
                    detail = f"{unwritten} records without their mark, this the first; their messages are lost"
                    self.problems.append(Problem(path, fault, "unwritten_record", detail, None))
                if short:
                    detail = f"{short} records too short for an id; a node may stop with an error"
                    self.problems.append(Problem(path, fault, "short_record", detail, None))
                problem = _stop_problem(path, region, at, stop)
                if problem is not None:
                    self.problems.append(problem)
                if self._scan_mode == "auto" and (stop != _core.MessageStop.STOP_END or unwritten or short):
                    # From the beginning: a wrong size leads past whole records before anything is noticed.
                    found = self._table.scan(region, key, _core.MessageScan.SCAN_SALVAGE, adopt)
                    if found[1]:
                        detail = (
                            f"{found[1]} messages beside damage were found by their terms; a node up to 3.12 loses them"
                        )
                        self.problems.append(Problem(path, at, "messages_beside_damage", detail, None))
                        end = max(end, found[3])
                self._files[key][1] = region.size
            finally:
                region.close()
        unlocated = self._table.columns(-1)
        self.missing = unlocated[0]
        self._table.discard_many(self.missing)
        numbers = sorted(self._files)
        if numbers:
            sizes = [self._files[number][1] for number in numbers]
            valid, _ = self._table.sums(np.array(numbers, np.int64), np.array(sizes, np.int64))
            self._files = {number: [int(valid[i]), sizes[i]] for i, number in enumerate(numbers)}
        return end

    def _read_clean_state(self, rdq: list[int], client_refs: list[bytes] | None) -> _CleanState:
        # §7.2.5, §9.  Raises CorruptionError with the reason, or FileNotFoundError.
        clean_path, summary_path, index_path = (os.path.join(self.path, name) for name in CLEAN_FILES)
        for path in (summary_path, index_path):
            if not os.path.exists(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        with open(open_regular(clean_path), "rb") as file:
            text = file.read()
        try:
            said = {str(pair[0]): pair[1] for pair in consult(text)}
            refs = [bytes(ref) for ref in said["client_refs"]]
            module = said["index_module"]
        except (StoreError, KeyError, TypeError, IndexError, ValueError) as error:
            raise CorruptionError("the file is not what an orderly stop leaves", clean_path, 0) from error
        if str(module) != "rabbit_msg_store_ets_index":
            raise CorruptionError(f"the index was of the kind {module}, which is none of ours", clean_path, 0)
        if client_refs is not None and sorted(refs) != client_refs:
            raise CorruptionError("the state was made for other queues than those with recovery terms", clean_path, 0)

        with open(open_regular(summary_path), "rb") as file:
            data = file.read()
        files: dict[int, list[int]] = {}
        for row in _ets_rows(data, summary_path):
            if not isinstance(row, tuple) or len(row) != 8 or not all(type(row[i]) is int for i in (1, 2, 5)):
                raise CorruptionError(f"{row!r} is no summary of a file", summary_path, 0)
            number, valid, size = row[1], row[2], row[5]
            path = self._file_path(number) if 0 <= number <= _MAX_FILE else summary_path
            if number not in rdq:
                raise CorruptionError(f"{number}.rdq is known to the clean state and is not there", path, 0)
            actual = os.stat(path).st_size
            if not 0 <= valid <= size <= actual:
                raise CorruptionError(
                    f"the clean state says {size} bytes, {valid} of them in use; the file has {actual}", path, 0
                )
            files[number] = [valid, size]
        extra = sorted(set(rdq) - set(files))
        if extra and extra[-1] > max(files, default=-1):
            raise CorruptionError("the clean state does not know the file", self._file_path(extra[-1]), 0)
        for number in extra:
            # A node that is stopped may not get round to deleting a file that it has merged into its neighbour.
            detail = "the clean state does not know the file; nothing in it is in use"
            self.problems.append(Problem(self._file_path(number), 0, "unknown_file", detail, None))
        files = dict(sorted(files.items()))

        with open(open_regular(index_path), "rb") as file:
            data = file.read()
        header, at = _ets_header(data, index_path)
        table = _core.LocationTable(len(data) // 60)
        try:
            loaded, at = table.load_ets_items(data, at)
        except StoreError as error:
            raise _located(error, index_path) from None
        _check_ets_end(data, at, loaded, index_path)
        numbers = np.array(list(files), np.int64)
        valid, wrong = table.sums(numbers, np.array([size for _, size in files.values()], np.int64))
        if wrong:
            raise CorruptionError(
                f"{wrong} messages of the clean state lie in no file, or behind its end", index_path, 0
            )
        for i, number in enumerate(files):
            if int(valid[i]) != files[number][0]:
                raise CorruptionError(
                    f"the clean state says {files[number][0]} bytes of {number}.rdq are in use, its places say {valid[i]}",
                    summary_path,
                    0,
                )
        return _CleanState(table, files, refs, str(header.get("node", "nonode@nohost")))

    def _forget_clean_state(self) -> None:
        # From here on a crash must leave a store that is scanned.
        gone = False
        for name in CLEAN_FILES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))
                gone = True
        if gone:
            fsync_directory(self.path)

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
        if self._poison is not None:
            raise StorePoisonedError(
                f"an earlier failure ended writing ({self._poison}); open the store again", self.path
            )

    @property
    def closed(self) -> bool:
        """bool: `close` or `abandon` was called."""
        return self._closed

    @property
    def current_file(self) -> int:
        """int: the number of the file that is appended to; -1 in a read-only store without files."""
        return self._current

    @property
    def files(self) -> dict[int, FileSummary]:
        """dict of int to FileSummary: by the number of the file, ascending."""
        with self._lock:
            return {number: FileSummary(*sizes) for number, sizes in self._files.items() if not number & _RDT}

    @property
    def valid_size(self) -> int:
        """int: bytes of all records that are referred to."""
        with self._lock:
            return self._valid_sum

    @property
    def file_size(self) -> int:
        """int: bytes of all files."""
        with self._lock:
            return self._size_sum

    def _entry(self, msg_id: bytes) -> tuple[int, int, int, int] | None:
        entry = self._table.get(msg_id)
        # What was written off with its file must not come to life again.
        return entry if entry is not None and entry[1] in self._files else None

    def refcount(self, msg_id: bytes) -> int:
        """int: how often a message is referred to; 0 for one that is not there."""
        with self._lock:
            entry = self._entry(msg_id)
            return 0 if entry is None else entry[0]

    def contains(self, msg_id: bytes) -> bool:
        """bool: the message is there and referred to."""
        return self.refcount(msg_id) > 0

    def __contains__(self, msg_id: object) -> bool:
        return isinstance(msg_id, bytes) and self.contains(msg_id)

    def locations(self) -> Locations:
        """Locations: where all messages lie, also those that nobody refers to any more."""
        with self._lock:
            ids, refcounts, files, positions, sizes = self._table.columns()
        order = np.lexsort((positions, files))
        return Locations(ids[order], refcounts[order], files[order], positions[order], sizes[order])

    def read_term(self, msg_id: bytes) -> bytes:
        """Read the external term of a message.

        Raises
        ------
        KeyError
            There is no such message.
        CorruptionError
            Its record is not what was there when the store was opened.
        StoreChangedError
            A writer removed the file since this store was opened read-only.
        StoreClosedError
            The store is closed.
        """
        with self._lock:
            self._check_open()
            entry = self._entry(msg_id)
            if entry is None or entry[0] == 0:
                raise KeyError(f"the message store {self.path} has no message {msg_id.hex()}")
            _, file, pos, size = entry
            try:
                record = os.pread(self._fd(file), size, pos)
            except FileNotFoundError:
                raise StoreChangedError(
                    "the file of the message is gone; its writer has removed or merged it, so open the store again",
                    self._file_path(file),
                ) from None
        if (
            len(record) != size
            or int.from_bytes(record[:8], "big") != size - 9
            or record[8:24] != msg_id
            or record[-1] != _core.MessageRecordLayout.MESSAGE_RECORD_MARK
        ):
            raise CorruptionError(
                f"the record of message {msg_id.hex()} has changed; was a node started on this directory?",
                self._file_path(file),
                pos,
            )
        return record[24:-1]

    def read(self, msg_id: bytes) -> Message:
        """Read a message; raises what `read_term` does, and CorruptionError for a term that is no message."""
        from rmqstore.rabbitmq.message import Message

        return Message.from_term(self.read_term(msg_id))

    def _fd(self, key: int) -> int:
        if key == self._current and self._current_fd >= 0:
            return self._current_fd
        fd = self._fds.pop(key, -1)
        if fd < 0:
            fd = open_regular(self._file_path(key))
            if len(self._fds) >= _MAX_OPEN_FILES:
                os.close(self._fds.pop(next(iter(self._fds))))
        # The one that was used last is let go last.
        self._fds[key] = fd
        return fd

    def _forget_fd(self, key: int) -> None:
        fd = self._fds.pop(key, -1)
        if fd >= 0:
            os.close(fd)

    # ------------------------------------------------------------------------------------------------------ writing

    def write(self, msg_id: bytes, message: Message | Buffer) -> bool:
        """Write a message, or add a reference if it is there already (§8.3).

        Parameters
        ----------
        msg_id : bytes
            16 bytes.
        message : Message or bytes-like
            The message, or its external term.

        Returns
        -------
        bool
            It was new, so its data were written.

        Raises
        ------
        InvalidMessageError
            The term is not well-formed, or holds another id: a node would not boot on it.
        StorePoisonedError
            An earlier failure ended writing.
        OSError
            The write failed; the store takes no more.
        """
        term = _term_of(msg_id, message, self.path)
        with self._lock:
            self._check_writable()
            entry = self._entry(msg_id)
            if entry is not None:
                self._refer_again(msg_id, entry)
                return False
            record = _core.encode_message_record(msg_id, term)
            size = len(record)
            self._append(record, size, ((msg_id, 1, self._files[self._current][1], size),))
            return True

    def write_many(self, msg_ids: Iterable[bytes], messages: Iterable[Message | Buffer]) -> int:
        """Write messages in order, as `write` does one, with one system call for many.

        Returns
        -------
        int
            How many were new.

        Raises
        ------
        InvalidMessageError
            A message cannot be written; nothing was.
        """
        pairs = [
            (msg_id, _term_of(msg_id, message, self.path)) for msg_id, message in zip(msg_ids, messages, strict=True)
        ]
        new = 0
        with self._lock:
            self._check_writable()
            batch: list[bytes] = []
            places: dict[bytes, list[int]] = {}  # msg_id -> [reference count, position, size] of what is in the batch
            end = self._files[self._current][1]
            batch_size = 0
            for msg_id, term in pairs:
                waiting = places.get(msg_id)
                if waiting is not None:
                    waiting[0] += 1
                    continue
                entry = self._entry(msg_id)
                if entry is not None:
                    self._refer_again(msg_id, entry)
                    continue
                record = _core.encode_message_record(msg_id, term)
                places[msg_id] = [1, end + batch_size, len(record)]
                batch.append(record)
                batch_size += len(record)
                new += 1
                if end + batch_size >= self.file_size_limit or batch_size >= _COPY_SIZE:
                    self._append(
                        b"".join(batch),
                        batch_size,
                        [(one, place[0], place[1], place[2]) for one, place in places.items()],
                    )
                    batch, places, batch_size = [], {}, 0
                    end = self._files[self._current][1]
            if batch:
                self._append(
                    b"".join(batch), batch_size, [(one, place[0], place[1], place[2]) for one, place in places.items()]
                )
        return new

    def _refer_again(self, msg_id: bytes, entry: tuple[int, int, int, int]) -> None:
        refcount, file, pos, size = entry
        self._table.put(msg_id, refcount + 1, file, pos, size)
        if refcount == 0:
            self._files[file][0] += size
            self._valid_sum += size

    def _append(self, data: bytes, size: int, places: Sequence[tuple[bytes, int, int, int]]) -> None:
        # `places`: message id, reference count, position and size of each record in `data`.
        number = self._current
        summary = self._files[number]
        pos = summary[1]
        self._table.reserve(len(self._table) + len(places))
        self._unsynced = True
        try:
            written = os.pwrite(self._current_fd, data, pos)
            while written < size:
                more = os.pwrite(self._current_fd, memoryview(data)[written:], pos + written)
                if more == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += more
        except OSError as error:
            # The next opening would cut the tail as well; without it a reader sees whole records only.
            with contextlib.suppress(OSError):
                os.ftruncate(self._current_fd, pos)
            named = OSError(error.errno, error.strerror, self._file_path(number))
            self._fail(named)
            raise named from error
        for msg_id, refcount, at, record_size in places:
            self._table.put(msg_id, refcount, number, at, record_size)
        summary[0] += size
        summary[1] += size
        self._valid_sum += size
        self._size_sum += size
        if summary[1] >= self.file_size_limit:
            self._roll()
            self._merge_while_worth_it()

    def _roll(self) -> None:
        number = self._current
        if number >= _MAX_FILE:
            raise StoreError("the numbers of message files are used up", self.path)
        path = self._file_path(number + 1)
        try:
            self._sync_current()
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._fail(error)
            raise
        # The full file's descriptor serves readers from now on.
        self._fds[number] = self._current_fd
        self._current_fd = fd
        self._files[number + 1] = [0, 0]
        self._current = number + 1
        self._names_unsynced = True

    def _fail(self, error: OSError) -> None:
        self._poison = str(error)

    def remove(self, msg_id: bytes) -> int:
        """Take away one reference to a message; its data go with its file, or when that is merged (§8.3, §8.4).

        Returns
        -------
        int
            How many references are left.

        Raises
        ------
        KeyError
            There is no such message.
        StorePoisonedError
            An earlier failure ended writing.
        """
        with self._lock:
            left = self._remove(msg_id)
            self._merge_while_worth_it()
            return left

    def remove_many(self, msg_ids: Iterable[bytes]) -> None:
        """Take away one reference for each id, as a node does for a batch: merging comes after all of them.

        Raises
        ------
        KeyError
            There is no such message; those before it were taken away.
        """
        with self._lock:
            try:
                for msg_id in msg_ids:
                    self._remove(msg_id)
            finally:
                if self._poison is None and not self._closed and not self.read_only:
                    self._merge_while_worth_it()

    def _remove(self, msg_id: bytes) -> int:
        self._check_writable()
        entry = self._entry(msg_id)
        if entry is None or entry[0] == 0:
            raise KeyError(f"the message store {self.path} has no message {msg_id.hex()}")
        refcount, file, pos, size = entry
        self._table.put(msg_id, refcount - 1, file, pos, size)
        if refcount == 1:
            summary = self._files[file]
            summary[0] -= size
            self._valid_sum -= size
            if summary[0] == 0 and file != self._current:
                self._delete_file(file)
        return refcount - 1

    def _live(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        # Ids, positions and sizes of what is referred to in a file, ascending, and the ids of what is not any more.
        valid, size = self._files[number]
        region = _map(self._file_path(number)) if size else None
        if region is not None:
            try:
                ids, positions, sizes, dead, end = self._table.live(region, number)
            finally:
                region.close()
            if end >= size and int(sizes.sum()) == valid and self._scan_mode != "bytewise":
                return ids, positions, sizes, dead
        # Records that were found behind damage are not met from record to record; the table knows them.
        ids, refcounts, _, positions, sizes = self._table.columns(number)
        used = refcounts > 0
        order = np.flatnonzero(used)[np.argsort(positions[used], kind="stable")]
        return ids[order], positions[order], sizes[order], ids[~used]

    def _delete_file(self, number: int) -> None:
        # A file that is not the current one and that nobody refers to.
        try:
            dead = self._live(number)[3]
            os.unlink(self._file_path(number))
        except OSError as error:
            self._fail(error)
            raise
        self._forget_fd(number)
        self._table.discard_many(dead)
        self._size_sum -= self._files.pop(number)[1]

    # ------------------------------------------------------------------------------------------------------ merging

    def _merge_while_worth_it(self) -> None:
        # §8.4: a node looks after every batch of removes, after every roll and after every merge.  It has up to two pairs in
        # work, whose garbage still counts while it decides; a busy node therefore merges one pair more than the share of
        # garbage asks for, and so does this.
        under_way: collections.deque[tuple[int, int]] = collections.deque()
        while not self._merging_suspended and (under_way or self._is_merging_worth_it()):
            while len(under_way) < _MAX_PAIRS and self._is_merging_worth_it():
                pair = self._pair_to_merge({number for pair in under_way for number in pair})
                if pair is None:
                    break
                under_way.append(pair)
            if not under_way:
                return
            pair = under_way.popleft()
            try:
                self._merge(*pair)
            except OSError as error:
                # As long as nothing was replaced, a full disk is no reason to refuse removes and writes.
                if self._poison is not None:
                    raise
                self._merging_suspended = True
                self.problems.append(Problem(self._file_path(pair[0]), 0, "merge_failed", str(error), None))

    def _is_merging_worth_it(self) -> bool:
        size = self._size_sum
        return size > 2 * self.file_size_limit and (size - self._valid_sum) / size > _GARBAGE_FRACTION

    def _pair_to_merge(self, locked: Collection[int] = ()) -> tuple[int, int] | None:
        # The first two neighbours, the current file not among them, that fit into one file and are not empty.
        numbers = list(self._files)
        for destination, source in itertools.pairwise(numbers[:-1]):
            first, second = self._files[destination][0], self._files[source][0]
            if destination in locked or source in locked:
                continue
            if first > 0 and second > 0 and first + second <= self.file_size_limit:
                return destination, source
        return None

    def merge(self) -> int:
        """Merge neighbouring files as long as two fit into one, whatever the share of garbage is.

        Returns
        -------
        int
            How many files were merged into their left neighbour.

        Raises
        ------
        OSError
            A file could not be written; if it was the copy, everything is as it was before.
        StorePoisonedError
            An earlier failure ended writing.
        """
        with self._lock:
            self._check_writable()
            self._merging_suspended = False
            merged = 0
            while (pair := self._pair_to_merge()) is not None:
                self._merge(*pair)
                merged += 1
            return merged

    def _merge(self, destination: int, source: int) -> None:
        # §8.4 with the same result, byte for byte, by other steps.  A node copies aside what lies behind the first gap,
        # cuts the file, and copies back; between the two its own recovery loses messages.  Here the .rdt gets the whole
        # new file and takes the place of the old one.  A crash leaves, before the rename, an .rdt whose records are all
        # whole elsewhere; after it, a source whose messages are in the destination as well.
        moves = []
        path, rdt_path = self._file_path(destination), self._file_path(destination | _RDT)
        at = 0
        try:
            with open(rdt_path, "wb") as new, naming_errors(rdt_path):
                for number in (destination, source):
                    ids, positions, sizes, dead = self._live(number)
                    with open(open_regular(self._file_path(number)), "rb") as old:
                        for begin, size in _runs(positions, sizes):
                            _copy(old, begin, size, new)
                    ends = at + np.cumsum(sizes)
                    moves.append((ids, ends - sizes, dead))
                    at = int(ends[-1])
                new.flush()
                os.fsync(new.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(rdt_path)
            raise
        try:
            os.rename(rdt_path, path)
        except OSError as error:
            self._fail(error)
            raise
        # From here on the new file is the one that readers meet, whatever becomes of the old one.
        self._forget_fd(destination)
        self._forget_fd(source)
        for ids, positions, dead in moves:
            self._table.move(ids, destination, positions)
            self._table.discard_many(dead)
        self._size_sum += at - self._files[destination][1] - self._files[source][1]
        self._files[destination][:] = [at, at]
        del self._files[source]
        try:
            # The source may only go when the name of the new file is on the disk.
            fsync_directory(self.path)
            os.unlink(self._file_path(source))
        except OSError as error:
            self._fail(error)
            raise

    # -------------------------------------------------------------------------------------------- syncing and closing

    def _sync_current(self) -> None:
        if self._unsynced:
            with naming_errors(self._file_path(self.current_file)):
                os.fsync(self._current_fd)
            self._unsynced = False
        if self._names_unsynced:
            fsync_directory(self.path)
            self._names_unsynced = False

    def sync(self) -> None:
        """Force everything that was written to the disk.

        Raises
        ------
        OSError
            The system could not; the store takes no more writes.
        StorePoisonedError
            An earlier failure ended writing.
        """
        with self._lock:
            self._check_writable()
            try:
                self._sync_current()
            except OSError as error:
                self._fail(error)
                raise

    def close(self, client_refs: Iterable[bytes] | None = None) -> None:
        """Force everything to the disk and close; closing twice does nothing.

        Parameters
        ----------
        client_refs : iterable of bytes, optional
            The `persistent_ref` of every durable queue that was closed in order, as its recovery terms say: the clean state
            is written for them, and the next opening scans nothing.  None: no clean state, so that the next opening, here
            or in a node, scans.

        Raises
        ------
        StorePoisonedError
            A clean state was asked for after a failure; the store is closed without one.
        OSError
            Something could not be written; the store is closed, and not clean.
        """
        with self._lock:
            if self._closed:
                return
            try:
                if not self.read_only and self._poison is None and self._pid == os.getpid():
                    self._sync_current()
                    if client_refs is not None:
                        self._write_clean_state(list(client_refs))
                elif not self.read_only and client_refs is not None:
                    self._check_writable()
            finally:
                self._release()

    def abandon(self) -> None:
        """Close without forcing or writing anything, as a crash of the process would leave it."""
        with self._lock:
            self._release()

    def _write_clean_state(self, client_refs: list[bytes]) -> None:
        clean_path, summary_path, index_path = (os.path.join(self.path, name) for name in CLEAN_FILES)
        numbers = list(self._files)
        undefined = Atom("undefined")
        rows = []
        for i, number in enumerate(numbers):
            left = numbers[i - 1] if i else undefined
            right = numbers[i + 1] if i + 1 < len(numbers) else undefined
            valid, size = self._files[number]
            row = (Atom("file_summary"), number, valid, left, right, size, Atom("false"), 0)
            rows.append(_ets_item(encode(row)))
        items = self._table.ets_items()
        tables = (
            (summary_path, "rabbit_msg_store_file_summary", "ordered_set", b"".join(rows), len(rows)),
            (index_path, "rabbit_msg_store_ets_index", "set", items, len(self._table)),
        )
        for path, name, kind, objects, count in tables:
            _write_file(path, _ets_bytes(name, kind, objects, count, self._node))
        refs = ",".join("<<" + ",".join(map(str, ref)) + ">>" for ref in client_refs)
        # This one last: without it the other two mean nothing.
        text = f"{{client_refs,[{refs}]}}.\n{{index_module,rabbit_msg_store_ets_index}}.\n"
        fsync_directory(self.path)
        _write_file(clean_path, text.encode())
        fsync_directory(self.path)

    def _release(self) -> None:
        self._closed = True
        fds = [*self._fds.values(), self._current_fd, self._directory_fd]
        self._fds.clear()
        self._current_fd = self._directory_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        # A store that was only forgotten must not keep its lock for as long as the process lives.
        if hasattr(self, "_directory_fd"):
            self._release()

    def __enter__(self) -> MessageStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        """int: messages that are referred to."""
        with self._lock:
            return int((self._table.columns()[1] > 0).sum())

    def __iter__(self) -> Iterator[bytes]:
        """The ids of the messages that are referred to, in the order of files and positions."""
        places = self.locations()
        ids = places.msg_id[places.refcount > 0].tobytes()
        return (ids[at : at + 16] for at in range(0, len(ids), 16))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"MessageStore({self.path!r}, {state}, {len(self._files)} files)"


def _term_of(msg_id: bytes, message: Any, path: str) -> Buffer:
    if not isinstance(msg_id, bytes) or len(msg_id) != 16:
        raise InvalidMessageError(f"a message id is of 16 bytes, not {msg_id!r}", path)
    term = message if isinstance(message, (bytes, bytearray, memoryview)) else message.term
    if _term.extent(term) != len(term):
        fault = _term.check(term) or (0, "no term")
        raise InvalidMessageError(f"byte {fault[0]} of the message's term: {fault[1]}", path)
    found = _term.message_id_of(term)
    # A term of a shape that is not known here (compressed, or of a later version) is its writer's business.
    if found is not None and found != msg_id:
        raise InvalidMessageError(
            f"the term holds the message id {found.hex()}, not {msg_id.hex()}; a node would not boot on it", path
        )
    return term


def _runs(positions: np.ndarray, sizes: np.ndarray) -> list[tuple[int, int]]:
    # Records that lie one behind the other are copied as one.
    starts = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1] + sizes[:-1])))
    ends = np.append(starts[1:], len(positions)) - 1
    return [
        (int(positions[first]), int(positions[last] + sizes[last] - positions[first]))
        for first, last in zip(starts, ends, strict=True)
    ]


def _copy(source: Any, begin: int, size: int, destination: Any) -> None:
    source.seek(begin)
    while size > 0:
        data = source.read(min(size, _COPY_SIZE))
        if not data:
            raise OSError(errno.EIO, "the file is shorter than its records", source.name)
        destination.write(data)
        size -= len(data)


def _write_file(path: str, data: bytes) -> None:
    with naming_errors(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# --------------------------------------------------------------------------------------------------- ets tables (§9.3)

_ETS_HEAD = bytes.fromhex("0102030463584d0b")


def _ets_item(term: bytes) -> bytes:
    return len(term).to_bytes(4, "big") + b"bWLA" + term


def _ets_bytes(name: str, kind: str, objects: bytes, count: int, node: str) -> bytes:
    # Only what a node needs to load the table (3.10.8): it also writes ids, owner and memory of the table that it had.
    no, yes = Atom("false"), Atom("public")
    header = (
        (Atom("read_concurrency"), no),
        (Atom("write_concurrency"), no),
        (Atom("compressed"), no),
        (Atom("name"), Atom(name)),
        (Atom("size"), count),
        (Atom("node"), Atom(node)),
        (Atom("named_table"), no),
        (Atom("type"), Atom(kind)),
        (Atom("keypos"), 2),
        (Atom("protection"), yes),
        (Atom("major_version"), 1),
        (Atom("minor_version"), 0),
        (Atom("extended_info"), [Atom("object_count")]),
    )
    end = [Atom("$end_of_table"), [(Atom("count"), count)]]
    return _ETS_HEAD + _ets_item(encode(header)) + objects + _ets_item(encode(end))


def _ets_header(data: bytes, path: str) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(data[8:12], "big")
    if data[:8] != _ETS_HEAD or data[12:16] != b"bWLA" or not 0 < size <= len(data) - 16:
        raise CorruptionError("the file is no table that was closed", path, 0)
    try:
        pairs = decode(data[16 : 16 + size])
        return {str(key): value for key, value in pairs}, 16 + size
    except (StoreError, TypeError, ValueError) as error:
        raise CorruptionError("the table's header cannot be understood", path, 16) from error


def _ets_rows(data: bytes, path: str) -> list[Any]:
    # The objects of a small table.
    _, at = _ets_header(data, path)
    rows: list[Any] = []
    while True:
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] != b"bWLA" or size > len(data) - at - 8:
            raise CorruptionError("the table is cut short", path, at)
        try:
            row = decode(data[at + 8 : at + 8 + size])
        except (StoreError, ValueError) as error:
            raise CorruptionError("an object of the table cannot be understood", path, at) from error
        if isinstance(row, list):
            _check_ets_end(data, at, len(rows), path)
            return rows
        rows.append(row)
        at += 8 + size


def _check_ets_end(data: bytes, at: int, count: int, path: str) -> None:
    size = int.from_bytes(data[at : at + 4], "big")
    with contextlib.suppress(StoreError, TypeError, ValueError, IndexError):
        end = decode(data[at + 8 : at + 8 + size])
        if at + 8 + size == len(data) and str(end[0]) == "$end_of_table" and end[1][0][1] == count:
            return
    raise CorruptionError("the table does not end as one that is whole", path, at)
