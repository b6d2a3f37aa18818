"""Flush the log, queues, index and checkpoint to the disk, with group commit.

Files are forced first, then the checkpoint that covers them.  No interval is decided here, and no thread started.  Invariants:

- With SYNC_FLUSH a put returns after its record is on the disk; puts of many threads share one flush (group commit).
- No thread waits for the disk while it holds the append lock: the files to flush are listed under it and forced outside.
- After a failed or interrupted flush the store refuses writes: its files are not forced again.
- A record that is older than the checkpoint's times is put after a flush that allows for it (`is_too_old`).
"""

from __future__ import annotations

import threading
import time

from rmqstore.errors import FlushDiskTimeoutError, StoreChangedError
from rmqstore.files.checkpoint import SAFETY_MARGIN
from rmqstore.index.index_file import IndexFile
from rmqstore.store.store_state import StoreState

__all__ = ["Flushing"]

_PAGE = 4096


class Flushing:
    """Flushes of one store, and group commit.

    `lock` is taken before the append lock.  The log is on the disk up to `flushed_where`, all else up to `all_flushed_where`; -1
    is unknown.
    """

    def __init__(self, state: StoreState):
        self.state = state
        self.flushed_where = self.all_flushed_where = 0
        # The last times of older index files by name, and the first times of segments by offset, which are final: a flush does
        # not open old files again.
        self._index_ends: dict[str, int] = {}
        self._begun: dict[int, int] = {}
        # The times for queues and index that the present flush will write.
        self._times_to_come = (0, 0)
        # The end of the log when the clock was set back, and the time after that.
        self._set_back: tuple[int, int] | None = None
        self._log_flush_time = self._queue_flush_time = time.monotonic()
        self.renew_locks()

    def renew_locks(self) -> None:
        """Replace the locks, in a forked child."""
        self.lock = threading.Lock()
        # A `with` takes the lock itself: an interrupt between the two calls of Condition.__exit__ would keep it forever.
        self._log_lock = threading.Lock()
        self._log_flushed = threading.Condition(self._log_lock)
        # The token of the thread that forces the log now.
        self._log_turn: object | None = None

    def flush_all(self, queue_pages: int = 0, *, closing: bool = False) -> None:
        """Force everything to the disk; the caller holds the flush lock.

        With `queue_pages` queues that grew by fewer pages wait for the next flush, and the checkpoint does not cover queues.
        """
        index_files: list[IndexFile] = []
        try:
            with self.state.lock:
                self._check_own_files()
                queue_files = self.state.queues.take_dirty(queue_pages)
                if self.state.index_service is not None and not queue_pages:
                    index_files = self.state.index_service.take_dirty()
                end, timestamp = self.state.commit_log.max_offset, self.state.last_store_timestamp
                for_java = (0, 0, 0) if queue_pages else self._index_for_java(end, timestamp, closing)
                self._times_to_come = for_java[1:]
            checkpoint = self.state.checkpoint
            self.flush_log()
            for mapped_file in queue_files:
                mapped_file.flush()
            for index in index_files:
                index.force()
            checkpoint.physic_msg_timestamp = max(checkpoint.physic_msg_timestamp, timestamp)
            if not queue_pages:
                checkpoint.flushed_offset = checkpoint.log_end = end
                checkpoint.logics_physical_offset, reached_time, checkpoint.index_msg_timestamp = for_java
                checkpoint.logics_msg_timestamp = min(timestamp, reached_time)
                self.all_flushed_where = end
                self._queue_flush_time = time.monotonic()
            checkpoint.flush()
        except BaseException as error:
            self.state.fail(error)
            raise

    def _index_for_java(self, end: int, timestamp: int, closing: bool) -> tuple[int, int, int]:
        # Values of the checkpoint for queues and index: a phy offset, its time, and the last time of index files.  A Java store
        # (5.5.0) that finds `abort` deletes every index file that ends after the second time.  While the store is open, the
        # offset must therefore be within the newest full index file: all keys after it are then indexed again.  If the clock
        # was set back, an older file may end later.
        index_service = self.state.index_service
        if index_service is None:
            return end, timestamp, timestamp
        names = index_service.names
        for number in reversed(range(len(names))):
            index = index_service.file(names[number])
            if index.is_full or (closing and index.index_count > 1):
                header = index.header
                self._index_ends = {
                    name: self._index_ends.get(name) or index_service.file(name).header.end_timestamp
                    for name in names[:number]
                }
                reached = end if closing else min(end, header.end_phy_offset)
                latest = max([header.end_timestamp, *self._index_ends.values()])
                times = self._times_to_begin_before(reached)
                if self._set_back is not None and reached <= self._set_back[0]:
                    # The next segment may begin then.
                    times.append(self._set_back[1] + SAFETY_MARGIN - 1)
                return reached, min([header.end_timestamp, *times]), latest
        return (end, timestamp, timestamp) if closing else (0, 0, 0)

    def _allow_for_clock(self) -> None:
        # A Java store writes the time of the newest full index file.  If the clock was set back, an older one ends later; after
        # a kill of this process before its first flush, a Java store would delete that.
        checkpoint, index_service = self.state.checkpoint, self.state.index_service
        if index_service is None or not checkpoint.index_msg_timestamp:
            return
        full = [index.header for index in index_service.files() if index.is_full]
        on_disk = [each.end_phy_offset for each in full if each.end_timestamp == checkpoint.index_msg_timestamp]
        reached = max([checkpoint.logics_physical_offset, *on_disk[:1]])
        times = [each.end_timestamp for each in full if each.end_phy_offset <= reached]
        checkpoint.index_msg_timestamp = max([checkpoint.index_msg_timestamp, *times])

    def allow_for_abort(self, end: int) -> None:
        """Reduce the checkpoint to what an open store with a log up to `end` may claim of queues and index.

        The checkpoint of a closed store claims that all was dispatched.  After a kill of this process before its first flush, a
        Java store would delete the newest index file, because of `abort`, and begin after the first of its keys.
        """
        checkpoint = self.state.checkpoint
        self._allow_for_clock()
        reached, begin, _ = self._index_for_java(end, checkpoint.logics_msg_timestamp, False)
        checkpoint.logics_physical_offset = min(checkpoint.logics_physical_offset, reached)
        checkpoint.logics_msg_timestamp = min(checkpoint.logics_msg_timestamp, begin)
        if not reached:
            # It covered a file that is not full.  Without an offset, its time alone would cover that file once it is full.
            checkpoint.index_msg_timestamp = 0
        # The checkpoint does not cover these files: none of them was forced here.
        self._index_ends = {}

    def is_too_old(self, timestamp: int) -> bool:
        """Check if a crash after a record of this time makes a Java broker lose keys; the caller holds the append lock."""
        index_service, checkpoint = self.state.index_service, self.state.checkpoint
        if index_service is None:
            return False
        begin, latest = self._times_to_come
        # The broker would begin with a segment that begins with this record, and not index earlier records again.
        if 0 < timestamp <= max(begin, checkpoint.logics_msg_timestamp) - SAFETY_MARGIN:
            return True
        # The broker would keep the index file of this record and delete older ones, whose records then count as indexed.
        return timestamp <= max(latest, checkpoint.index_msg_timestamp) and self._has_later_index()

    def _has_later_index(self) -> bool:
        # True if a full index file ends after the checkpoint's time.
        index_service = self.state.index_service
        assert index_service is not None
        latest = self.state.checkpoint.index_msg_timestamp
        for name in reversed(index_service.names):
            # The checkpoint covers files that were full at the last flush, before the newest of them.
            if name in self._index_ends:
                break
            index = index_service.file(name)
            if index.is_full and index.header.end_timestamp > latest:
                return True
        return False

    def allow_for(self, timestamp: int) -> None:
        """Flush everything, and let the checkpoint allow for a record that `is_too_old`; without the append lock."""
        with self.lock:
            with self.state.lock:
                self._set_back = self.state.commit_log.max_offset, timestamp
            self.flush_all()

    def _times_to_begin_before(self, offset: int) -> list[int]:
        # For each segment after `offset` the latest time before it.  A Java store dispatches from the newest segment that begins
        # no later than the checkpoint's time; if the clock was set back, that may be after records it lacks.
        log = self.state.commit_log
        begun = {
            base: self._begun.get(base) or log.store_timestamp_at(base) for base in log.files.offsets if base > offset
        }
        # A segment without a record yet has no time.
        self._begun = {base: timestamp for base, timestamp in begun.items() if timestamp >= 0}
        return [timestamp + SAFETY_MARGIN - 1 for timestamp in self._begun.values()]

    def _check_own_files(self) -> None:
        # A Java broker (5.5.0) recovers before it takes the lock: when it is refused, it has already replaced the newest index
        # file by one of its own.
        last = self.state.commit_log.files.last()
        ours = last is None or not last.mapped or last.is_current()
        if ours and self.state.index_service is not None:
            ours = self.state.index_service.is_whole()
        if not ours:
            error = StoreChangedError(
                "files of the index or the log were deleted or replaced by somebody else while this store was open (a broker "
                "that was started on it does so before the lock stops it); close it and open it again, which recovers it",
                self.state.path,
            )
            self.state.fail(error)
            raise error

    def flush_log(self) -> None:
        """Force the log to the disk."""
        turn = object()
        try:
            with self._log_lock:
                self._log_flushed.wait_for(lambda: self._log_turn is None)
                self._log_turn = turn
            self._force_dirty_segments()
        finally:
            self._end_turn(turn)

    def _end_turn(self, turn: object) -> None:
        # A thread that was interrupted may not have had its turn.
        if self._log_turn is turn:
            with self._log_lock:
                self._log_turn = None
                self._log_flushed.notify_all()

    def _force_dirty_segments(self) -> None:
        try:
            with self.state.lock:
                files, end = self.state.commit_log.files.take_dirty(), self.state.commit_log.max_offset
            for mapped_file in files:
                mapped_file.flush()
        except BaseException as error:
            self.state.fail(error)
            raise
        self.flushed_where = max(self.flushed_where, end)
        self._log_flush_time = time.monotonic()

    def wait_until_flushed(self, end: int) -> None:
        """Return when the log is on the disk up to `end`.

        Group commit: the first thread forces all records appended so far.  The other threads wake together afterwards; the first
        one whose record came later forces the next group.
        """
        turn = object()
        try:
            with self._log_lock:
                done_or_free = self._log_flushed.wait_for(
                    lambda: self.flushed_where >= end or self._log_turn is None,
                    self.state.config.sync_flush_timeout / 1000,
                )
                if self.flushed_where >= end:
                    return
                if done_or_free:
                    self.state.check_not_poisoned()
                    self._log_turn = turn
            if not done_or_free:
                raise FlushDiskTimeoutError(
                    f"the message is stored before phy offset {end}, but the disk did not take it within sync_flush_timeout "
                    f"= {self.state.config.sync_flush_timeout} ms; it may be lost if the machine fails now. Look at the disk, "
                    "then call flush()",
                    self.state.path,
                )
            self._force_dirty_segments()
        finally:
            self._end_turn(turn)

    def flush_log_when_due(self) -> None:
        """Flush the log as RocketMQ's FlushRealTimeService does: some pages at once, or all there is after the longer interval."""
        if self.state.poison is None:
            fresh = self.state.commit_log.max_offset - self.flushed_where
            passed = 1000 * (time.monotonic() - self._log_flush_time)
            thorough = passed >= self.state.config.flush_commit_log_thorough_interval
            if fresh > 0 and (thorough or fresh // _PAGE >= self.state.config.flush_commit_log_least_pages):
                self.flush_log()

    def flush_when_due(self) -> None:
        """Flush as RocketMQ's FlushConsumeQueueService does; the index and the checkpoint join the thorough flush."""
        if self.state.poison is None and self.state.commit_log.max_offset > self.all_flushed_where:
            passed = 1000 * (time.monotonic() - self._queue_flush_time)
            thorough = passed >= self.state.config.flush_consume_queue_thorough_interval
            with self.lock:
                self.flush_all(0 if thorough else max(self.state.config.flush_consume_queue_least_pages, 1))
