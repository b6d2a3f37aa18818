"""The commit log: every message of a store, one record behind the other, in segments of fixed size.

Owns appending (a record that does not fit closes the segment with a blank record), reading a record at its offset,
stepping over the records, and finding where the log ends.  It never decides what a damaged log means (recovery and
verify do) and never builds a queue or an index.  A record is taken for one only if magic, lengths and its own physical
offset agree.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from rmqstore import _columns, _core, _read
from rmqstore._append import RowBatch
from rmqstore._columns import ArrowColumns, RecordColumns
from rmqstore._core import Verdict
from rmqstore.config import StoreConfig, is_usual_size
from rmqstore.errors import (
    ChecksumError,
    CorruptionError,
    InvalidMessageError,
    OffsetOutOfRangeError,
    StoreChangedError,
    StoreError,
)
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, NotCopied
from rmqstore.files.mapped_file_queue import MappedFileQueue
from rmqstore.message import MessageExt

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Blank", "CommitLog", "Damage", "Stretch"]

# A scan keeps at most so many bytes of the log behind itself in memory.
_SCAN_WINDOW = 32 * 1024 * 1024
# A log that is scanned ahead is cut in pieces of about so many bytes; how far behind that the next record is looked for, how many
# rows one may have before it is too many for the columns, how many are waiting, and how many threads work at them.
_PIECE = 8 * 1024 * 1024
_PIECE_SEARCH = 256 * 1024
_PIECE_ROWS = 32768
_PIECES_AHEAD = 3
_THREADS = 2
# How far `entries` reads ahead of its caller: messages, and bytes of records.
_READ_AHEAD_NUM = 64
_READ_AHEAD_SIZE = 1024 * 1024
_BLANK_SIZE = int(_core.RecordLayout.BLANK_SIZE)
# Sizes, magic, CRC, queue, offsets, flags and times: no two records of a log agree in these.
_HEAD_SIZE = 64


@dataclass(frozen=True, slots=True)
class Blank:
    """The record that closes a segment; `size` bytes from `phy_offset` are the rest of the segment."""

    phy_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Damage:
    """`size` bytes from `phy_offset` in which no record could be read; `verdict` is what was found at their start."""

    phy_offset: int
    size: int
    verdict: Verdict


class Stretch(NamedTuple):
    """A part of the log, as `CommitLog.stretches` finds it.

    Attributes
    ----------
    begin, end : int
        Offsets in bytes.
    verdict : Verdict or None
        RECORD: whole records, one behind the other.  BLANK: the record that closes a segment, and the rest of it.  None: no
        segment holds these offsets.  Anything else: what was found at `begin` is no whole record.
    records : int
        How many records.
    last_record : int
        Offset of the last of them, -1 if there is none.
    """

    begin: int
    end: int
    verdict: Verdict | None
    records: int = 0
    last_record: int = -1


class ScanProgress:
    """Lets go of the pages behind a scan, so that it keeps a constant working set."""

    __slots__ = ("_at", "_queue")

    def __init__(self, queue: MappedFileQueue):
        self._queue = queue
        self._at = -1

    def reach(self, offset: int) -> None:
        """Say that the scan needs nothing before `offset` any more."""
        if self._at < 0:
            self._at = offset
        if offset - self._at < _SCAN_WINDOW:
            return
        while self._at < offset:
            mapped_file = self._queue.find(self._at)
            if mapped_file is None:
                break
            pos = self._at - mapped_file.file_from_offset
            size = min(offset - self._at, mapped_file.size - pos)
            if mapped_file.mapped:
                mapped_file.region.release_pages(pos, size)
            self._at += size
        self._at = offset


def _usable_cpus() -> int:
    # Those that this process may run on, where the system tells.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Walk:
    """Steps over the records of a stretch; `CommitLog._stretches` calls it."""

    def __init__(self, crc_check: int):
        self.crc_check = crc_check

    def __call__(self, region: _core.Region, start: int, limit: int, base: int) -> tuple[int, Verdict, int, int]:
        """(int, Verdict, int, int): where it ended and why, how many records were passed, offset of the last one or -1."""
        limit = min(limit, start + _SCAN_WINDOW)
        pos, verdict, num, last = _columns.walk(region, start, limit, base, self.crc_check)
        return pos, verdict, num, base + last if num else -1

    def empty(self) -> None:
        """Say that the stretch holds no records."""


class _Scan:
    """Fills columns with the records of a stretch; otherwise as `_Walk`."""

    def __init__(self, log: CommitLog, columns: RecordColumns, crc_check: int, keys: bool):
        self.log = log
        self.columns = columns
        self.crc_check = crc_check
        self.keys = keys

    def __call__(self, region: _core.Region, start: int, limit: int, base: int) -> tuple[int, Verdict, int, int]:
        pos, verdict = self.fill(self.columns, region, start, limit, base)
        num = self.columns.count
        return pos, verdict, num, int(self.columns.phy_offset[num - 1]) if num else -1

    def fill(
        self, columns: RecordColumns, region: _core.Region, start: int, limit: int, base: int
    ) -> tuple[int, Verdict]:
        """(int, Verdict): as `_columns.scan`."""
        config = self.log.config
        return _columns.scan(
            region, start, limit, base, columns, self.log.delays, self.crc_check, config.index_tags, self.keys
        )

    def empty(self) -> None:
        """Say that the stretch holds no records."""
        self.columns.count = 0


Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Piece(Generic[Job, Result]):
    """A piece of the log that another thread works at, from a place where a whole record seems to begin.

    Attributes
    ----------
    begin : int
        Offset in bytes.
    job : object
        What the work is done with.
    """

    begin: int
    job: Job
    _done: Future[Result]

    def result(self) -> Result | None:
        """object or None: what the work gave, waited for; None if it raised, as it will again in the caller, or will not."""
        return None if self._done.exception() is not None else self._done.result()

    def abandon(self) -> None:
        """See that nobody works at it any more; who does is waited for."""
        if not self._done.cancel():
            self._done.exception()


class Pieces(Generic[Job, Result]):
    """Pieces of the log, which further threads work at ahead of the caller, who goes over it.

    Where a piece begins is found as behind damage, by magic, lengths, own offset and CRC.  That a record does begin there is
    certain only once the way from record to record comes by, so that the work at a piece counts if the caller comes to its
    begin, and is thrown away otherwise.  No piece goes beyond a segment.

    Parameters
    ----------
    log : CommitLog
    end : int
        Where the caller will stop.
    make : callable
        Makes a job; only one piece at a time has it.
    size, search : int
        About how long a piece is, and how far behind that the next record is looked for, in bytes.
    threads : int
        How many threads work at most, on as many usable processors.
    ahead : int, optional
        How many pieces are worked at or wait for the caller; one more than there are threads by default.
    worth_it : bool
        Cut the log in pieces at all.

    Attributes
    ----------
    thread_num : int
        How many threads may work; with one there are none, but pieces begin in the same places.
    """

    def __init__(
        self,
        log: CommitLog,
        end: int,
        make: Callable[[], Job],
        *,
        size: int,
        search: int,
        threads: int,
        ahead: int | None = None,
        worth_it: bool = True,
    ):
        self._log = log
        self._end = end
        self._make = make
        self._size = size
        self._search = search
        self._behind: _core.RecordSearch | None = None
        self.thread_num = min(_usable_cpus(), threads)
        self._ahead = self.thread_num + 1 if ahead is None else ahead
        self._in_pieces = worth_it and log.segment_size >= size
        self._pieces: deque[Piece[Job, Result]] = deque()
        self._spare: list[Job] = []
        # Where the piece behind those that are known begins, -1 where that is not known.
        self._next = -1
        self._threads: ThreadPoolExecutor | None = None
        # The threads themselves, and the process that has them.
        self._members: set[int] = set()
        self._process = -1

    def come_to(self, at: int) -> Piece[Job, Result] | None:
        """Piece or None: the one that begins at `at`, to which the way from record to record came."""
        if self._threads is not None and self._process != os.getpid():
            self._forget()
        if self._pieces and self._pieces[0].begin < at:
            self._drop()
        return self._pieces.popleft() if self._pieces and self._pieces[0].begin == at else None

    def end_behind(self, at: int) -> int:
        """int: where the piece that `at` lies in ends, -1 where that is not known."""
        if not self._pieces and self._next <= at:
            self._next = self._piece_end(at)
        return self._pieces[0].begin if self._pieces else self._next

    def put_back(self, job: Job) -> None:
        """Give a job for a later piece."""
        self._spare.append(job)

    def _forget(self) -> None:
        # A child process has none of its parent's threads, which nobody may wait for.
        self._threads, self.thread_num, self._next = None, 1, -1
        self._pieces.clear()

    def _drop(self) -> None:
        # All of them, so that where pieces begin does not depend on how many threads there are.
        for piece in self._pieces:
            piece.abandon()
            self._spare.append(piece.job)
        self._pieces.clear()
        self._next = -1

    def _piece_end(self, begin: int) -> int:
        # Where the next piece begins, -1 where there is none that can be found in a short time.
        mapped_file = self._log.queue.find(begin) if self._in_pieces else None
        if mapped_file is None:
            return -1
        base = mapped_file.file_from_offset
        goal, segment_end = begin + self._size, base + mapped_file.size
        if goal >= min(segment_end, self._end):
            return segment_end if segment_end < self._end else -1
        limit = min(goal + self._search, segment_end, self._end)
        try:
            region = mapped_file.region
        except OffsetOutOfRangeError:
            return -1  # It expired meanwhile.
        self._behind = _search_in(region, base, self._behind)
        found = self._behind.find(goal - base, limit - base)
        return base + found if found >= 0 else -1

    def launch(self, work: Callable[[Job, _core.Region, int, int, int], Result]) -> None:
        """Let threads work at what lies ahead.

        Parameters
        ----------
        work : callable
            Called with a job, the region of a segment, the bounds of a piece as positions in it, and the offset of the
            region's first byte.
        """
        while self.thread_num > 1 and self._next >= 0 and len(self._pieces) < self._ahead:
            begin = self._next
            mapped_file = self._log.queue.find(begin)
            if mapped_file is None:
                return
            base, following = mapped_file.file_from_offset, self._piece_end(begin)
            limit = following if following >= 0 else min(self._end, base + mapped_file.size)
            if limit - begin > self._size + self._search:
                # It has no known end, and the caller goes over it in steps.
                return
            try:
                region = mapped_file.region
            except OffsetOutOfRangeError:
                return
            job = self._spare.pop() if self._spare else self._make()
            try:
                done = self._executor().submit(work, job, region, begin - base, limit - base, base)
            except RuntimeError:
                # The interpreter is about to end, or the system gives no thread: the caller does it all.
                self.thread_num = 1
                return
            self._next = following
            self._pieces.append(Piece(begin, job, done))

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            # Imported here because most who import this module scan no large log.
            from concurrent.futures import ThreadPoolExecutor

            members = self._members
            self._process = os.getpid()
            self._threads = ThreadPoolExecutor(
                self.thread_num, "rmqstore-scan", initializer=lambda: members.add(threading.get_ident())
            )
            # While the interpreter takes its modules apart it is too late for what a scan that nobody closed would do.
            atexit.register(self.close)
        return self._threads

    def close(self) -> None:
        """End the threads; what they work at is waited for."""
        threads, self._threads, self.thread_num = self._threads, None, 1
        if threads is None:
            return
        atexit.unregister(self.close)
        if self._process == os.getpid():
            # A garbage collection may close a scan in one of its own threads.
            threads.shutdown(wait=threading.get_ident() not in self._members, cancel_futures=True)
        self._pieces.clear()


class _ScanAhead(_Scan):
    """Fills columns with `Pieces` of the log, which further threads do ahead of the caller.

    Parameters
    ----------
    log : CommitLog
    end : int
        Where the caller will stop.
    crc_check : int
    keys : bool
    worth_it : bool
        Cut the log in pieces at all.
    """

    def __init__(self, log: CommitLog, end: int, crc_check: int, keys: bool, *, worth_it: bool):
        super().__init__(log, RecordColumns(_PIECE_ROWS), crc_check, keys)
        self._pieces: Pieces[RecordColumns, tuple[int, Verdict]] = Pieces(
            log,
            end,
            lambda: RecordColumns(_PIECE_ROWS),
            size=_PIECE,
            search=_PIECE_SEARCH,
            threads=_THREADS,
            ahead=_PIECES_AHEAD,
            worth_it=worth_it,
        )

    def __call__(self, region: _core.Region, start: int, limit: int, base: int) -> tuple[int, Verdict, int, int]:
        at = base + start
        piece = self._pieces.come_to(at)
        if piece is not None:
            self._pieces.put_back(self.columns)
            self.columns = piece.job
        until = self._pieces.end_behind(at)
        self._pieces.launch(self.fill)
        result = None if piece is None else piece.result()
        if result is None:
            # What went wrong in another thread goes wrong here again, or does not.
            limit = min(limit, start + _SCAN_WINDOW, until - base if until >= 0 else limit)
            result = self.fill(self.columns, region, start, limit, base)
        pos, verdict = result
        num = self.columns.count
        return pos, verdict, num, int(self.columns.phy_offset[num - 1]) if num else -1

    def close(self) -> None:
        """End the threads."""
        self._pieces.close()


class CommitLog(NotCopied):
    """The commit log below a store's root directory.

    Parameters
    ----------
    root : path
        The store's root; the segments lie in ``commitlog`` below it.
    config : StoreConfig
        `mapped_file_size_commit_log` is the size of a segment in bytes.
    pool : MappedFilePool
    read_only : bool
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: StoreConfig,
        pool: MappedFilePool,
        *,
        read_only: bool = False,
    ):
        self.config = config
        self.segment_size = config.mapped_file_size_commit_log
        self.queue = MappedFileQueue(
            os.path.join(root, "commitlog"),
            self.segment_size,
            pool,
            read_only=read_only,
            staging=root,
            is_usual_size=lambda: is_usual_size(root, "commitlog", self.segment_size),
        )
        self.delays = array("q", config.delay_levels)
        self._refreshing = threading.Lock()
        # The newest record that a reader beside a writer saw: its phy offset and first bytes.
        self._last_seen: tuple[int, bytes] = (-1, b"")
        # The segment that was walked last: its offset, its records, the position and the first bytes of the last of them.
        self._walked: tuple[int, int, int, bytes] = (-1, 0, 0, b"")
        # How CRCs are checked, see `_core.decode_record`.
        self.crc_check = 2 if config.force_verify_prop_crc else 1

    def renew_lock(self) -> None:
        """Give up the lock that another thread of a parent process may have held at a fork."""
        self._refreshing = threading.Lock()

    def load(self) -> None:
        """List the segments.  The end of the log is not known yet: see `find_end` and `set_end`."""
        self.queue.load()

    @property
    def path(self) -> str:
        """str: the directory of the segments."""
        return self.queue.path

    @property
    def min_offset(self) -> int:
        """int: offset of the oldest byte that is there, 0 for an empty log."""
        low = self.queue.min_offset
        return low if low > 0 else 0

    @property
    def max_offset(self) -> int:
        """int: offset behind the last record."""
        return self.queue.wrote_where

    def set_end(self, offset: int) -> None:
        """Say where the log ends."""
        self.queue.wrote_where = offset

    def _walk_from_start(self, base: int) -> tuple[int, Verdict, int, int]:
        # As `_columns.walk` through a whole segment; one that was walked before from its last record on, if that is still there:
        # opening asks several times, and a segment holds millions of records.
        region = self.queue.file(base).region
        walked, num, last, head = self._walked
        if walked == base and last + _HEAD_SIZE <= region.size and region.read(last, _HEAD_SIZE) == head:
            pos, verdict, more, newest = _columns.walk(region, last, self.segment_size, base)
            num, last = num - 1 + more, newest
        else:
            more = 0
        if more == 0:
            pos, verdict, num, last = _columns.walk(region, 0, self.segment_size, base)
        self._walked = (base, num, last, region.read(last, _HEAD_SIZE)) if num else (-1, 0, 0, b"")
        return pos, verdict, num, last

    def find_end(self) -> int:
        """int: offset behind the last record that can be reached from the start of the newest segment that holds any.

        Reads only record headers; nothing is changed.  This is where a broker that was shut down in order would go on.
        """
        for base in reversed(self.queue.offsets):
            pos, verdict, num, _ = self._walk_from_start(base)
            if verdict == Verdict.BLANK:
                return base + self.segment_size
            if num or verdict != Verdict.EMPTY or base == self.queue.min_offset:
                return base + pos
        return self.min_offset

    def last_store_timestamp(self) -> int | None:
        """int or None: store time of the last record in the newest segment that holds any, ms since epoch."""
        for base in reversed(self.queue.offsets):
            _, _, num, last = self._walk_from_start(base)
            if num:
                return _core.check_record(self.queue.file(base).region, last, base, 0)[2]
        return None

    def find_end_behind_damage(self, reached: int = -1) -> int:
        """int: as `find_end`, but behind damage in the newest segment if whole records follow it there.

        Old records that a truncation of RocketMQ left behind the end do not count: they are older than the record before.

        Parameters
        ----------
        reached : int
            Where whole records that follow each other from the oldest one on came to nothing (`Verdict.EMPTY`), if that is
            known: where no later segment holds any, this is what `find_end` would find once more.
        """
        later = [base for base in self.queue.offsets if base > reached]
        if reached >= 0 and all(self._begins_empty(base) for base in later):
            end = reached
        else:
            end = self.find_end()
        return self._end_behind(end)

    def _end_behind(self, end: int) -> int:
        # Where what follows `end` comes to an end, if whole records that are not older follow there; else `end`.
        search: _core.RecordSearch | None = None
        limit, newest = 0, -1
        while (mapped_file := self.queue.find(end)) is not None:
            base, region = mapped_file.file_from_offset, mapped_file.region
            if end - base + 1 >= region.size:
                break
            if search is None or search.region is not region:
                search = _core.RecordSearch(region, base)
                limit, newest = mapped_file.last_nonzero(end - base + 1), -1
            found = search.find(end - base + 1, limit)
            if found < 0:
                break
            if newest < 0:
                newest = self._newest_before(end)
            if _core.check_record(region, found, base, 0)[2] < newest:
                break
            pos, verdict, num, last = _columns.walk(region, found, region.size, base)
            if num:
                newest = _core.check_record(region, last, base, 0)[2]
            end = base + (region.size if verdict == Verdict.BLANK else pos)
        return end

    def _begins_empty(self, base: int) -> bool:
        return _core.check_record(self.queue.file(base).region, 0, base, 0)[0] is Verdict.EMPTY

    def known_end(self) -> int:
        """int: the end for a reader that wants everything: behind damage in the newest segment if records follow it there.

        After `follow`; beside a writer it is the end that `follow` or `refresh` found.
        """
        return self._known_end(self.find_end())

    def _known_end(self, reached: int) -> int:
        # `reached` is what `find_end` found a moment ago, which walked through the newest segment for it.
        end, behind = self.max_offset, self._end_behind(reached)
        mapped_file = self.queue.find(reached)
        if behind <= reached or mapped_file is None:
            return end
        base = mapped_file.file_from_offset
        # A writer that went on meanwhile left a whole record here, before it wrote the next one.
        now = _core.check_record(mapped_file.region, reached - base, base, 0)[0]
        return end if now in (Verdict.RECORD, Verdict.BLANK) else behind

    def _newest_before(self, end: int) -> int:
        # Store time of the last record in front of `end` in its segment, 0 if there is none.
        mapped_file = self.queue.find(end)
        if mapped_file is None:
            return 0
        base, region = mapped_file.file_from_offset, mapped_file.region
        at, newest, search = 0, 0, _core.RecordSearch(region, base)
        while at < end - base:
            pos, _, _, last = _columns.walk(region, at, end - base, base)
            if last >= 0:
                newest = _core.check_record(region, last, base, 0)[2]
            found = search.find(pos + 1, end - base)
            if found < 0:
                break
            at = found
        return newest

    def refresh(self) -> None:
        """Take in what another process appended since (read-only use)."""
        with self._refreshing:
            self._check_last_seen()
            self.queue.refresh()
            end = self.queue.wrote_where
            while (mapped_file := self.queue.find(end)) is not None:
                base, region = mapped_file.file_from_offset, mapped_file.region
                pos, verdict, _, last = _columns.walk(region, end - base, self.segment_size, base, self.crc_check)
                if last >= 0 and _is_unfinished(region, last):
                    pos, verdict = last, Verdict.EMPTY
                end = base + (self.segment_size if verdict == Verdict.BLANK else pos)
                if last >= 0 and pos > last:
                    self._last_seen = (base + last, region.read(last, _HEAD_SIZE))
                if verdict != Verdict.BLANK:
                    # What lies there is no record, nor the zeros in front of one that is being written.
                    if verdict not in (Verdict.EMPTY, Verdict.RECORD):
                        end = self._end_behind(end)
                    break
            self.queue.wrote_where = end

    def follow(self) -> None:
        """Find the end, and remember what is there, so that `refresh` notices when a writer cuts it (read-only use).

        Damage in the newest segment is no end where whole records follow it, as of `known_end`.
        """
        end = reached = self.find_end()
        for base in reversed(self.queue.offsets):
            region = self.queue.file(base).region
            _, verdict, num, last = self._walk_from_start(base)
            if num and verdict != Verdict.BLANK:
                # Nothing lies behind the newest record yet, so it may be on its way.
                sound = _core.check_record(region, last, base, self.crc_check)[0] == Verdict.RECORD
                if not sound or _is_unfinished(region, last):
                    end = base + last
                    _, _, num, last = _columns.walk(region, 0, last, base)
            if num:
                self._last_seen = (base + last, region.read(last, _HEAD_SIZE))
                break
        self.set_end(end)
        self.set_end(max(self._known_end(reached), end))

    def _check_last_seen(self) -> None:
        # A writer that recovers cuts what a crash left torn; a reader that saw it must not go on behind it.
        phy_offset, head = self._last_seen
        mapped_file = self.queue.find(phy_offset) if head else None
        if mapped_file is None:
            return
        self.queue.forget_replaced_behind(phy_offset)
        replaced = self.queue.was_replaced()
        try:
            now = mapped_file.region.read(phy_offset - mapped_file.file_from_offset, _HEAD_SIZE)
        except OffsetOutOfRangeError:
            return
        if replaced or now != head:
            raise StoreChangedError(
                f"the record that was at phy offset {phy_offset} is not there any more: the log was cut or replaced since "
                "this store was opened (its writer recovered it after a crash, maybe); open it again",
                mapped_file.path,
                phy_offset - mapped_file.file_from_offset,
            )

    # ------------------------------------------------------------------------------------------------------ writing

    def append(self, rows: list[tuple[Any, ...]], *, together: bool = False) -> list[tuple[int, int]]:
        """Append records.

        Parameters
        ----------
        rows : list of tuple
            As `_core.encode_records` takes them.
        together : bool
            All in one segment, as RocketMQ stores a classic batch.

        Returns
        -------
        list of (int, int)
            phy offset and size in bytes of each.

        Raises
        ------
        InvalidMessageError
            A record (or the batch) does not fit an empty segment; nothing was written.
        OSError
            A segment could not be made; nothing was written.
        """
        prop_crc = self.config.enabled_append_prop_crc
        sizes = [record_size_of(row, prop_crc) for row in rows]
        room = self.segment_size - _BLANK_SIZE
        largest = max(sizes, default=0)
        whole = sum(sizes) if together else largest
        if whole > room:
            raise InvalidMessageError(
                f"{'the batch' if together else 'the record'} takes {whole} bytes, a segment of {self.segment_size} "
                f"bytes holds at most {room}: shorten it, or use a store with larger segments",
                self.path,
            )
        self._make_room([whole] if together else sizes)
        placed: list[tuple[int, int]] = []
        done = 0
        while done < len(rows):
            mapped_file = self.queue.file_for_append()
            base = mapped_file.file_from_offset
            at = self.queue.wrote_where
            remaining = base + self.segment_size - at
            written: list[int] = []
            if not together or whole + _BLANK_SIZE <= remaining:
                mapped_file.mark_dirty()
                written = _core.encode_records(mapped_file.region, at - base, base, rows, done, prop_crc)
            for size in written:
                placed.append((at, size))
                at += size
            self.queue.wrote_where = at
            done += len(written)
            if done < len(rows):
                if self.segment_size - (at - base) >= _BLANK_SIZE:
                    mapped_file.mark_dirty()
                    _core.write_blank(mapped_file.region, at - base)
                self.queue.wrote_where = base + self.segment_size
        return placed

    def append_rows(self, batch: RowBatch) -> int:
        """Encode numbered rows at the end; a segment is closed where one does not fit.

        Returns
        -------
        int
            phy offset behind the last record.

        Raises
        ------
        InvalidMessageError
            A record does not fit an empty segment; nothing was written.
        OSError
            A segment could not be made; nothing was written.
        """
        last = self.queue.last()
        room = last.file_from_offset + self.segment_size - self.queue.wrote_where if last is not None else 0
        rolls, largest = batch.room(room, self.segment_size)
        if largest + _BLANK_SIZE > self.segment_size:
            raise InvalidMessageError(
                f"the record takes {largest} bytes, a segment of {self.segment_size} bytes holds at most "
                f"{self.segment_size - _BLANK_SIZE}: shorten it, or use a store with larger segments",
                self.path,
            )
        # Segments are made before the first byte is written, so that a full disk leaves nothing half done.
        if last is not None and room:
            last.reserve()
        self.queue.prepare(rolls)
        done = 0
        while done < batch.count:
            mapped_file = self.queue.file_for_append()
            base = mapped_file.file_from_offset
            mapped_file.mark_dirty()
            done, pos = batch.encode(mapped_file.region, self.queue.wrote_where - base, base, done)
            self.queue.wrote_where = base + pos
            if done < batch.count:
                if self.segment_size - pos >= _BLANK_SIZE:
                    _core.write_blank(mapped_file.region, pos)
                self.queue.wrote_where = base + self.segment_size
        return self.queue.wrote_where

    def _make_room(self, sizes: list[int]) -> None:
        # Segments are made before the first byte is written, so that a full disk leaves nothing half done.
        last = self.queue.last()
        room = last.file_from_offset + self.segment_size - self.queue.wrote_where if last is not None else 0
        if last is not None and room:
            last.reserve()
        if sum(sizes) + _BLANK_SIZE <= room:
            return
        rolls = 0
        for size in sizes:
            if size + _BLANK_SIZE > room:
                rolls += 1
                room = self.segment_size
            room -= size
        self.queue.prepare(rolls)

    # ------------------------------------------------------------------------------------------------------ reading

    def segment(self, phy_offset: int) -> MappedFile:
        """The segment that holds `phy_offset`.

        Raises
        ------
        OffsetOutOfRangeError
            The offset is negative, before the oldest or behind the last record, or in a segment that is missing.
        """
        if phy_offset >= self.max_offset and self.queue.read_only:
            self.refresh()
        if phy_offset < 0 or phy_offset >= self.max_offset or phy_offset < self.min_offset:
            raise OffsetOutOfRangeError(
                f"phy offset {phy_offset} is outside the log, which holds {self.min_offset} to {self.max_offset}",
                self.path,
            )
        mapped_file = self.queue.find(phy_offset)
        if mapped_file is None:
            raise OffsetOutOfRangeError(f"the segment that held phy offset {phy_offset} is missing", self.path)
        return mapped_file

    def message_at(self, phy_offset: int) -> MessageExt:
        """The message whose record begins at `phy_offset`.

        Raises
        ------
        OffsetOutOfRangeError
            The offset is outside the log.
        CorruptionError
            No record begins there.
        ChecksumError
            A CRC does not agree; `look_up` gives the message all the same.
        """
        known = self.look_up(phy_offset)
        if known is not None and not known.corrupt:
            return known
        # What follows says what is wrong.
        mapped_file = self.segment(phy_offset)
        region = mapped_file.region
        pos = phy_offset - mapped_file.file_from_offset
        message = _read.read_message(region, pos, mapped_file.file_from_offset, MessageExt, self.crc_check)
        if isinstance(message, Verdict):
            raise CorruptionError(
                f"no record begins at phy offset {phy_offset} ({message.name}); take offsets from a queue, the index or "
                "a scan",
                mapped_file.path,
                pos,
            )
        if message.corrupt:
            raise ChecksumError(
                f"the record at phy offset {phy_offset} does not agree with its CRC; get_message and scans return it "
                "marked as corrupt",
                mapped_file.path,
                pos,
            )
        return message

    def look_up(self, phy_offset: int, size: int | None = None) -> MessageExt | None:
        """The message at `phy_offset`, marked as corrupt if a CRC fails; None where no record of this size begins."""
        known = _read.read_recent(self.queue, phy_offset, MessageExt, self.crc_check)
        if known is not None:
            return known if size in (None, known.store_size) else None
        found = self.region_of(phy_offset)
        if found is None:
            return None
        region, base, _, _ = found
        message = _read.read_message(region, phy_offset - base, base, MessageExt, self.crc_check)
        if isinstance(message, Verdict) or size not in (None, message.store_size):
            return None
        return message

    def region_of(self, phy_offset: int) -> tuple[_core.Region, int, int, int] | None:
        """The mapped segment that holds `phy_offset`, None where `look_up` finds none.

        Returns
        -------
        (Region, int, int, int)
            The segment, the offset of its first byte, and the bounds of what the log holds, in bytes.
        """
        queue = self.queue
        known = queue.recent(phy_offset)
        if known is not None:
            return known
        offsets = queue.file_offsets
        low, end = queue.min_offset, queue.wrote_where
        try:
            # What lies outside may have been appended since, which `segment` looks for.
            mapped_file = queue.find(phy_offset) if low <= phy_offset < end else self.segment(phy_offset)
            if mapped_file is None:
                return None
            region = mapped_file.region
            queue.remember(region, mapped_file.file_from_offset, offsets)
            return region, mapped_file.file_from_offset, queue.min_offset, queue.wrote_where
        except OffsetOutOfRangeError:
            return None

    def store_timestamp_at(self, phy_offset: int, *, behind_end: bool = False) -> int:
        """int: store time of the record at `phy_offset` in ms since epoch, -1 if no record begins there.

        Parameters
        ----------
        behind_end : bool
            Look behind the end as well, which recovery does not know yet.
        """
        if not behind_end and not self.min_offset <= phy_offset < self.max_offset:
            return -1
        mapped_file = self.queue.find(phy_offset)
        if mapped_file is None:
            return -1
        try:
            region = mapped_file.region
        except OffsetOutOfRangeError:
            return -1  # It expired meanwhile.
        base = mapped_file.file_from_offset
        verdict, _, timestamp = _core.check_record(region, phy_offset - base, base, 0)
        return timestamp if verdict == Verdict.RECORD else -1

    def times_of(self, begin: int, end: int) -> tuple[int | None, int | None]:
        """(int or None, int or None): store times of the first whole record from `begin` on, and of the first from `end` on.

        Milliseconds since the epoch; at the end of the log that of the newest record, None where there is none.
        """

        def time_from(offset: int) -> int | None:
            known = self.store_timestamp_at(offset) if offset < self.max_offset else -1
            if known >= 0:
                return known
            found = (each.store_timestamp for each in self.entries(offset) if isinstance(each, MessageExt))
            return next(found, None) or self.last_store_timestamp()

        return time_from(begin), time_from(end)

    @contextlib.contextmanager
    def single_records(self) -> Iterator[None]:
        """Say that records far from each other are looked at in the ``with`` block: the system then reads nothing around them."""
        self.queue.advise("random")
        try:
            yield
        finally:
            self.queue.advise("normal")

    def stretches(
        self,
        begin: int,
        end: int,
        columns: RecordColumns | None = None,
        *,
        check_crc: bool = True,
        keys: bool = True,
        resume: bool = True,
    ) -> Iterator[Stretch]:
        """Go over the log from `begin` to `end`, stretch by stretch; whatever reads all of it reads it through this.

        Parameters
        ----------
        begin, end : int
            Offsets; a record must begin at the first one.
        columns : RecordColumns, optional
            Filled with the records of each stretch of records, and emptied at every other one; without them the records are
            only stepped over.
        check_crc : bool
            A record whose CRC fails is a stretch of its own, with the verdict on it.
        keys : bool
            Compute index hashes (`_columns.scan`).
        resume : bool
            Go on behind what cannot be read, at the next whole record, which is recognised by magic, lengths, its own offset
            and CRC.  Otherwise it is the last stretch; how far it goes is not looked for, so its end is its begin.

        Yields
        ------
        Stretch
            In order, without a gap between them.  They keep a constant working set however long the log is.
        """
        crc_check = self.crc_check if check_crc else 0
        if columns is None:
            return self._stretches(begin, end, _Walk(crc_check), resume)
        return self._stretches(begin, end, _Scan(self, columns, crc_check, keys), resume)

    def scans(
        self, begin: int, end: int, *, check_crc: bool = True, keys: bool = True, resume: bool = True
    ) -> Iterator[tuple[Stretch, RecordColumns]]:
        """As `stretches` with columns, which further threads fill ahead of the caller where that is worth it.

        The stretches are the same whether there are such threads or not, but not those of `stretches`.

        Yields
        ------
        (Stretch, RecordColumns)
            The columns hold the records of the stretch until the next one is asked for, and each of them has topics of its
            own; there are not more than a handful.
        """
        scan = _ScanAhead(self, end, self.crc_check if check_crc else 0, keys, worth_it=end - begin >= 2 * _PIECE)
        try:
            for stretch in self._stretches(begin, end, scan, resume):
                yield stretch, scan.columns
        finally:
            scan.close()

    def _stretches(self, begin: int, end: int, step: _Walk | _Scan, resume: bool) -> Iterator[Stretch]:
        at, search = begin, None
        passed = ScanProgress(self.queue)
        while at < end:
            passed.reach(at)
            mapped_file = self.queue.find(at)
            if mapped_file is None:
                step.empty()
                until = min([base for base in self.queue.offsets if base > at], default=end)
                yield Stretch(at, min(until, end) if resume else at, None)
                if not resume:
                    return
                at = until
                continue
            base, region = mapped_file.file_from_offset, mapped_file.region
            start, limit = at - base, min(end - base, region.size)
            pos, verdict, num, last = step(region, start, limit, base)
            at = base + pos
            if num:
                yield Stretch(base + start, at, Verdict.RECORD, num, last)
            if verdict in (Verdict.COLUMNS_FULL, Verdict.LIMIT):
                continue
            step.empty()
            if verdict == Verdict.BLANK:
                until = base + region.size
            elif not resume:
                until = at
            elif verdict in (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC):
                # Its lengths are whole, so it is known where it ends.
                until = at + region.get_i32(pos)
            else:
                search = _search_in(region, base, search)
                found = search.find(pos + 1, limit)
                until = base + (found if found >= 0 else limit)
            yield Stretch(at, until, verdict)
            if verdict != Verdict.BLANK and not resume:
                return
            at = until

    def scan_columns(
        self, begin: int, end: int, columns: RecordColumns, *, check_crc: bool = True
    ) -> Iterator[tuple[int, Verdict | None]]:
        """Fill `columns` again and again with the records from `begin` to `end`; `stretches` up to the first damage.

        Yields
        ------
        (int, Verdict or None)
            Where the stretch ends, and the verdict on it.
        """
        for stretch in self.stretches(begin, end, columns, check_crc=check_crc, resume=False):
            yield stretch.end, stretch.verdict

    def entries(self, begin: int | None = None, end: int | None = None) -> Iterator[MessageExt | Blank | Damage]:
        """Everything in the log in order: messages, blanks, and stretches in which nothing could be read.

        A damaged stretch ends at the next whole record, which is recognised by magic, lengths, its own offset and CRC.
        A message whose CRC fails is yielded with `corrupt` set.  Up to 64 messages, or 1 MiB of records, are read ahead.

        Parameters
        ----------
        begin, end : int, optional
            Offsets of a record to begin with and of where to stop; by default the whole log.
        """
        for page in self.pages(begin, end):
            if isinstance(page, list):
                yield from page
            else:
                yield page

    def pages(self, begin: int | None = None, end: int | None = None) -> Iterator[list[MessageExt] | Blank | Damage]:
        """As `entries`, with messages that follow each other in lists, as they are read ahead."""
        at = self.min_offset if begin is None else max(begin, self.min_offset)
        stop = self.max_offset if end is None else min(end, self.max_offset)
        passed = ScanProgress(self.queue)
        # Whoever wants the first message only is not to wait for many.
        num, search = 1, None
        while at < stop:
            passed.reach(at)
            mapped_file = self.queue.find(at)
            if mapped_file is None:
                following = [base for base in self.queue.offsets if base > at]
                until = min(following[0], stop) if following else stop
                yield Damage(at, until - at, Verdict.EMPTY)
                at = until
                continue
            base = mapped_file.file_from_offset
            try:
                region = mapped_file.region
            except OffsetOutOfRangeError:
                # It expired meanwhile, and so did what is older.
                at = max(base + self.segment_size, self.min_offset)
                continue
            messages, pos = _read.read_messages(
                region, at - base, stop - base, base, MessageExt, num, _READ_AHEAD_SIZE, self.crc_check
            )
            if messages:
                yield messages
                at = base + pos
                num = min(2 * num, _READ_AHEAD_NUM)
                continue
            verdict = _core.check_record(region, at - base, base, 0)[0]
            if verdict is Verdict.RECORD:
                # Its writer made it whole just now.
                continue
            if verdict is Verdict.BLANK:
                yield Blank(at, base + self.segment_size - at)
                at = base + self.segment_size
            else:
                search = _search_in(region, base, search)
                found = search.find(at - base + 1)
                until = min(base + (found if found >= 0 else self.segment_size), stop)
                yield Damage(at, until - at, verdict)
                at = until

    def fill(
        self,
        columns: ArrowColumns,
        begin: int | None = None,
        end: int | None = None,
        on_damage: Callable[[int, int, Verdict | None], None] | None = None,
    ) -> Iterator[int]:
        """Fill `columns` with the chosen records of the log; what `entries` passes over as damage has no row.

        Parameters
        ----------
        columns : ArrowColumns
        begin, end : int, optional
            As of `entries`.
        on_damage : callable, optional
            Told of each stretch that is passed over: its begin, its end (maybe behind `end`), and what was found at its
            begin; None where no segment holds it.  It may take the columns, and raise.

        Yields
        ------
        int
            Where the pass goes on, whenever the columns are full and at the end; they must be taken by then.
        """
        at = self.min_offset if begin is None else max(begin, self.min_offset)
        stop = self.max_offset if end is None else min(end, self.max_offset)
        passed = ScanProgress(self.queue)
        search = None
        while at < stop:
            passed.reach(at)
            mapped_file = self.queue.find(at)
            if mapped_file is None:
                until = min((base for base in self.queue.offsets if base > at), default=stop)
                if on_damage is not None:
                    on_damage(at, until, None)
                at = until
                continue
            base = mapped_file.file_from_offset
            try:
                region = mapped_file.region
            except OffsetOutOfRangeError:
                # It expired meanwhile, and so did what is older.
                until = max(base + self.segment_size, self.min_offset)
                if on_damage is not None:
                    on_damage(at, until, None)
                at = until
                continue
            limit = min(stop, at + _SCAN_WINDOW) - base
            pos, verdict = columns.fill(region, at - base, limit, base)
            at = base + pos
            if verdict == Verdict.COLUMNS_FULL:
                yield at
            elif verdict == Verdict.BLANK:
                at = base + self.segment_size
            elif verdict != Verdict.LIMIT:
                search = _search_in(region, base, search)
                found = search.find(pos + 1)
                until = base + (found if found >= 0 else self.segment_size)
                if on_damage is not None:
                    on_damage(at, until, verdict)
                at = until
        yield at

    def step_to(self, begin: int, goal: int) -> int:
        """Step over record headers, and over damage as `fill` does, to the first place at or after `goal`.

        Parameters
        ----------
        begin : int
            Where a record begins, or a segment.
        goal : int
            An offset in the same segment, or its end.

        Returns
        -------
        int
            Where `fill` goes on when it began at `begin`: a record, a blank record, a damaged stretch, or the segment's end.
        """
        at = begin
        mapped_file = self.queue.find(begin)
        if mapped_file is None:
            return max(begin, goal)
        base, region = mapped_file.file_from_offset, mapped_file.region
        passed = ScanProgress(self.queue)
        search = _core.RecordSearch(region, base)
        while at < goal:
            passed.reach(at)
            pos, verdict, _, _ = _columns.walk(region, at - base, min(goal, at + _SCAN_WINDOW) - base, base)
            at = base + pos
            if verdict == Verdict.BLANK:
                at = base + region.size
            elif verdict != Verdict.LIMIT:
                found = search.find(pos + 1)
                at = base + (found if found >= 0 else region.size)
        return at

    def flush(self) -> None:
        """Force everything written to the disk."""
        self.queue.flush()

    def close(self) -> None:
        """Close the segments."""
        self.queue.close()


def _search_in(region: _core.Region, base: int, search: _core.RecordSearch | None) -> _core.RecordSearch:
    # The search of the damage before, if that lies in the same segment: what it summed up it need not sum up again.
    return _core.RecordSearch(region, base) if search is None or search.region is not region else search


def _is_unfinished(region: _core.Region, pos: int) -> bool:
    # A Java broker copies a record from its start to its end, so that the last bytes may still be missing; topic and
    # properties end in a character, never in zero.
    record = _core.decode_record(region, pos, -1, 0)
    if not isinstance(record, tuple):
        return True
    message = MessageExt(record)
    return message.topic.endswith("\0") or message.properties_stored.endswith(b"\0")


def record_size_of(row: tuple[Any, ...], prop_crc: bool) -> int:
    """int: size in bytes of the record that `row` makes."""
    topic, body, properties, born_host, store_host = row[:5]
    properties_size = len(properties)
    if prop_crc:
        properties_size += _core.RecordLayout.PROP_CRC_SIZE + (properties_size > 0 and properties[-1] != 2)
    size = _core.record_size(len(topic), len(body), properties_size, 0, row[9])
    return size + (len(born_host) - 8) + (len(store_host) - 8)


def check_store_root(path: str | os.PathLike[str]) -> str:
    """str: `path`, if it is a directory that a store can be read from.

    Raises
    ------
    StoreError
        It does not exist or is no directory.
    """
    root = os.fspath(path)
    if not os.path.isdir(root):
        kind = "is not a directory" if os.path.exists(root) else "does not exist"
        raise StoreError(f"the store's directory {kind}; give the folder that holds commitlog/", root)
    return root
