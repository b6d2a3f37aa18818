"""Reading a long log: pieces that threads process ahead of the caller, and a constant working set.

Owns the bounds of pieces, the threads, and releasing pages after a scan.  A piece counts only if the records before it lead to its
begin.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from rmqstore import _core
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.files.mapped_file_queue import MappedFileQueue
from rmqstore.files.open_file import read_ahead

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["SCAN_WINDOW", "Division", "Piece", "Pieces", "ScanProgress", "search_in"]

SCAN_WINDOW = 32 * 1024 * 1024
"""The number of bytes of the scanned log that stay in memory."""

# Bytes of the log that are read ahead of the first piece, and the bytes of each step.
_READ_AHEAD, _READ_AHEAD_STEP = 64 * 1024 * 1024, 16 * 1024 * 1024


class ScanProgress:
    """Releases the scanned pages, so that the working set is constant."""

    __slots__ = ("_at", "_files")

    def __init__(self, files: MappedFileQueue):
        self._files = files
        self._at = -1

    def reach(self, offset: int) -> None:
        """Note that the scan is done before `offset`."""
        if self._at < 0:
            self._at = offset
        if offset - self._at < SCAN_WINDOW:
            return
        while self._at < offset:
            mapped_file = self._files.find(self._at)
            if mapped_file is None:
                break
            pos = self._at - mapped_file.file_from_offset
            size = min(offset - self._at, mapped_file.size - pos)
            if mapped_file.mapped:
                mapped_file.region.release_pages(pos, size)
            self._at += size
        self._at = offset


def usable_cpus() -> int:
    """Return the number of processors for this process, or of the machine if that is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def search_in(region: _core.Region, base: int, search: _core.RecordSearch | None) -> _core.RecordSearch:
    """Return the last search if it is for the same segment, which keeps its sums, or a new one."""
    return _core.RecordSearch(region, base) if search is None or search.region is not region else search


Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(slots=True)
class Piece(Generic[Job, Result]):
    """A piece of the log for another thread, from a place where a whole record seems to begin; `work` processes it."""

    begin: int
    job: Job
    work: Callable[[], Result]
    _done: Future[Result]

    @property
    def is_done(self) -> bool:
        """True if the work is done, or failed."""
        return self._done.done()

    def result(self) -> Result | None:
        """Wait for the result of the work; None if it raised: the caller tries again."""
        return None if self._done.exception() is not None else self._done.result()

    def work_here(self) -> bool:
        """Do the work in the caller's thread; False if another thread started it."""
        if not self._done.cancel():
            return False
        # See `Pieces._executor`.
        from concurrent.futures import Future

        self._done = Future()
        try:
            self._done.set_result(self.work())
        except Exception as error:
            self._done.set_exception(error)
        return True

    def abandon(self) -> None:
        """Cancel the work, or wait for its end."""
        if not self._done.cancel():
            self._done.exception()


class Division(NamedTuple):
    """The division of a log into pieces.

    - `size`, `search`: the approximate length of a piece, and of the search for the next record after it, in bytes.
    - `threads`: the number of threads at most; not more than usable processors.
    - `caller_works`: the caller is one of them: it waits by `result_of`.
    - `ahead`: the number of pieces that are started or wait for the caller; None for one more than there are threads.
    """

    size: int
    search: int
    threads: int
    caller_works: bool = False
    ahead: int | None = None


class Pieces(Generic[Job, Result]):
    """Pieces of the log, which other threads process ahead of the caller's scan.

    The begin of a piece is found like the end of damage, by magic, lengths, own offset and CRC.  The result of a piece counts if
    the caller's scan reaches its begin, and is dropped otherwise.  No piece extends past a segment.

    - `make`: creates a job; only one piece at a time has it.
    - `thread_num`: the number of threads; with one there are none, but pieces begin at the same offsets.
    """

    def __init__(
        self,
        files: MappedFileQueue,
        end: int,
        make: Callable[[], Job],
        division: Division,
        *,
        worth_it: bool = True,
    ):
        self._files = files
        self._end = end
        self._make = make
        self._size, self._search = division.size, division.search
        self._behind: _core.RecordSearch | None = None
        self.thread_num = min(usable_cpus(), division.threads)
        self._caller_works = division.caller_works
        self._ahead = self.thread_num + 1 if division.ahead is None else division.ahead
        self._in_pieces = worth_it and files.mapped_file_size >= division.size
        self._pieces: deque[Piece[Job, Result]] = deque()
        self._spare: list[Job] = []
        # The begin of the next piece, -1 if unknown.
        self._next = -1
        # The end of the read-ahead.
        self._asked = 0
        self._threads: ThreadPoolExecutor | None = None
        # Thread ids, and their process.
        self._members: set[int] = set()
        self._process = -1

    def come_to(self, at: int) -> Piece[Job, Result] | None:
        """Return the piece that begins at `at`, which the scan reached, or None."""
        if self._threads is not None and self._process != os.getpid():
            self._forget()
        if self._pieces and self._pieces[0].begin < at:
            self._drop()
        return self._pieces.popleft() if self._pieces and self._pieces[0].begin == at else None

    def end_behind(self, at: int) -> int:
        """Return the end of the piece that holds `at`, -1 if unknown."""
        if not self._pieces and self._next <= at:
            self._next = self._piece_end(at)
        return self._pieces[0].begin if self._pieces else self._next

    def result_of(self, piece: Piece[Job, Result]) -> Result | None:
        """Return `Piece.result`; while another thread works at this piece, the caller works at later ones."""
        if not piece.work_here():
            for later in self._pieces:
                if piece.is_done:
                    break
                later.work_here()
        return piece.result()

    def put_back(self, job: Job) -> None:
        """Return a job for a later piece."""
        self._spare.append(job)

    def _forget(self) -> None:
        # A child process has none of its parent's threads.
        self._threads, self.thread_num, self._next = None, 1, -1
        self._pieces.clear()

    def _drop(self) -> None:
        # All of them, so that the bounds of pieces do not depend on the number of threads.
        for piece in self._pieces:
            piece.abandon()
            self._spare.append(piece.job)
        self._pieces.clear()
        self._next = -1

    def _piece_end(self, begin: int) -> int:
        # The begin of the next piece, -1 if none is found in a short time.
        mapped_file = self._files.find(begin) if self._in_pieces else None
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
            return -1  # It expired.
        self._behind = search_in(region, base, self._behind)
        found = self._behind.find(goal - base, limit - base)
        return base + found if found >= 0 else -1

    def launch(self, work: Callable[[Job, _core.Region, int, int, int], Result]) -> None:
        """Start threads on the next pieces.

        - `work`: called with a job, the region of a segment, the bounds of a piece in it, and the offset of its first byte.
        """
        self._read_ahead()
        while self.thread_num > 1 and self._next >= 0 and len(self._pieces) < self._ahead:
            begin = self._next
            mapped_file = self._files.find(begin)
            if mapped_file is None:
                return
            base, following = mapped_file.file_from_offset, self._piece_end(begin)
            limit = following if following >= 0 else min(self._end, base + mapped_file.size)
            if limit - begin > self._size + self._search:
                # It has no known end; the caller scans it in steps.
                return
            try:
                region = mapped_file.region
            except OffsetOutOfRangeError:
                return
            job = self._spare.pop() if self._spare else self._make()
            here = partial(work, job, region, begin - base, limit - base, base)
            try:
                done = self._executor().submit(here)
            except RuntimeError:
                # The interpreter ends, or there is no thread: the caller does it all.
                self.thread_num = 1
                return
            self._next = following
            self._pieces.append(Piece(begin, job, here, done))

    def _read_ahead(self) -> None:
        # The operating system takes threads that read one file in several places for random access, and reads little ahead.
        at = self._pieces[0].begin if self._pieces else self._next
        if self.thread_num <= 1 or at < 0:
            return
        self._asked = max(self._asked, at)
        while self._asked < self._end and self._asked + _READ_AHEAD_STEP <= at + _READ_AHEAD:
            mapped_file = self._files.find(self._asked)
            if mapped_file is None:
                return
            pos = self._asked - mapped_file.file_from_offset
            size = min(_READ_AHEAD_STEP, mapped_file.size - pos, self._end - self._asked)
            read_ahead(mapped_file.path, pos, size)
            self._asked += size

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            # Imported here because most users scan no large log.
            from concurrent.futures import ThreadPoolExecutor

            members = self._members
            self._process = os.getpid()
            self._threads = ThreadPoolExecutor(
                self.thread_num - self._caller_works, "rmqstore-scan", initializer=lambda: members.add(threading.get_ident())
            )
            # An unclosed scan must end before the interpreter clears its modules.
            atexit.register(self.close)
        return self._threads

    def close(self) -> None:
        """Stop the threads after their current work."""
        threads, self._threads, self.thread_num = self._threads, None, 1
        if threads is None:
            return
        atexit.unregister(self.close)
        if self._process == os.getpid():
            # A garbage collection may close a scan in one of its own threads.
            threads.shutdown(wait=threading.get_ident() not in self._members, cancel_futures=True)
        self._pieces.clear()
