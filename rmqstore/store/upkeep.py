"""What goes on beside the messages of a store that is open for writing: timers, files prepared ahead, retention, pages ahead.

Owns the two threads and their tasks.  What a task does to files belongs to the modules that it calls; a task that fails is
tried again, and only a failed write ends the store.  The threads do not keep a store alive that was forgotten.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from rmqstore.errors import StoreLockedError
from rmqstore.files.store_lock import StoreLock
from rmqstore.store.flushing import Flushing
from rmqstore.store.housekeeping import Housekeeping, Task
from rmqstore.store.populating import PopulateAhead
from rmqstore.store.retention import DiskSpace, RetentionReport, delete_expired_files, used_ratio
from rmqstore.store.store_state import StoreState
from rmqstore.store.writing import Writing

__all__ = ["Upkeep"]

logger = logging.getLogger(__name__)

# Files smaller than this are made when they are needed; larger ones beforehand, from this part of the one before on.
_PREPARE_FROM_SIZE = 1 << 20
_PREPARE_AT = 0.5
# RocketMQ 5.5.0 persists consumer progress for the first time after 10 s and looks for expired files after 60 s.
_FIRST_PERSIST = 10_000
_FIRST_CLEAN = 60_000
_HOLD_INTERVAL = 10_000


class Upkeep:
    """The threads of a store that is open for writing, and their tasks.

    Parameters
    ----------
    state : StoreState
    flushing : Flushing
    writing : Writing
        Which a full disk stops, and space starts again.
    store_lock : StoreLock
    """

    def __init__(self, state: StoreState, flushing: Flushing, writing: Writing, store_lock: StoreLock):
        self.state, self.flushing, self.writing = state, flushing, writing
        self._store_lock = store_lock
        self._housekeeping: Housekeeping | None = None
        self._populating: Housekeeping | None = None
        self._populate_ahead: PopulateAhead | None = None
        self._no_space: int | None = None

    def start(self) -> None:
        """Start the threads."""
        config = self.state.config
        self._housekeeping = Housekeeping(
            self,
            [
                Task("flush of the commit log", config.flush_interval_commit_log, Upkeep.flush_log),
                Task("flush of queues and index", config.flush_interval_consume_queue, Upkeep.flush),
                Task(
                    "persisting of consumer progress",
                    config.flush_consumer_offset_interval,
                    Upkeep.persist,
                    _FIRST_PERSIST,
                ),
                Task(
                    "deletion of expired files",
                    config.clean_resource_interval,
                    Upkeep.clean,
                    _FIRST_CLEAN,
                ),
                Task("holding of the lock", _HOLD_INTERVAL, Upkeep.hold_lock),
            ],
            f"rmqstore-housekeeping {os.path.basename(os.path.realpath(self.state.path))}",
        )

        if config.populate_ahead_size and config.mapped_file_size_commit_log >= _PREPARE_FROM_SIZE:
            self._populate_ahead = PopulateAhead(
                self.state.commit_log.files, self.state.queues, self.state.index_service, config.populate_ahead_size
            )
            self._populating = Housekeeping(
                self,
                [Task("populating", 1, Upkeep.populate, 0)],
                f"rmqstore-populating {os.path.basename(os.path.realpath(self.state.path))}",
            )
            # A new file begins with pages that nobody touched.
            self.state.pool.on_create = self._populating.wake

    def stop(self) -> None:
        """End the threads, and wait for that."""
        for thread in (self._housekeeping, self._populating):
            if thread is not None:
                thread.stop()

    def end_with(self, last: Callable[[], None]) -> None:
        """Let the housekeeping thread call `last` after the task that runs now, and end; this waits for nothing."""
        if self._housekeeping is not None:
            self._housekeeping.end_with(last)

    def flush_log(self) -> None:
        """Make the next files, and flush the log where that is due."""
        if self.state.poison is None:
            self.prepare_next_files()
            self.flushing.flush_log_when_due()

    def flush(self) -> None:
        """Flush queues, and in the longer interval everything, where that is due."""
        self.flushing.flush_when_due()

    def persist(self) -> None:
        """Write the progress of consumer groups."""
        self.state.progress.persist()

    def populate(self) -> int:
        """Make pages ready ahead of the writer; when to come again, in ms."""
        if self._populate_ahead is None or self.state.poison is not None:
            return _HOLD_INTERVAL
        return self._populate_ahead.look()

    def prepare_next_files(self) -> None:
        """Allocate the next segment and index file where the current ones are half full."""
        # The next segment and index file are allocated before they are needed: a put never waits for that, and a full
        # disk is known while there is still room.
        log, index_service = self.state.commit_log.files, self.state.index_service
        try:
            if self.state.commit_log.segment_size >= _PREPARE_FROM_SIZE and log.offsets and not log.prepared:
                used = self.state.commit_log.max_offset - log.offsets[-1]
                if used >= self.state.commit_log.segment_size * _PREPARE_AT:
                    log.prepared.prepare()
            if (
                index_service is not None
                and self.state.config.index_file_size >= _PREPARE_FROM_SIZE
                and index_service.fill >= _PREPARE_AT
            ):
                index_service.prepared.prepare()
            self._no_space = None
        except OSError as error:
            # Once for a cause, not once a tick.
            if self._no_space != error.errno:
                self._no_space = error.errno
                logger.error(
                    "%s: the next file cannot be allocated (%s); puts fail when the current one is full: free space",
                    self.state.path,
                    error,
                )

    def clean(self) -> None:
        """Delete what is expired, in the hours that the config says."""
        if self.state.poison is None:
            pause = None if self._housekeeping is None else self._housekeeping.pause
            self.delete_expired_files(False, pause or (lambda milliseconds: True))

    def delete_expired_files(self, manually: bool, pause: Callable[[int], bool]) -> RetentionReport:
        """Delete what is expired, and stop or start writes by how full the disk is."""
        space = DiskSpace.judge(used_ratio(self.state.path), self.state.config, self.state.disk_full)
        if space.full != self.state.disk_full:
            with self.state.lock:
                self.state.disk_full = space.full
                self.writing.take_writes()
            if space.full:
                logger.error(
                    "%s takes no writes: its disk is used to %d %%; free space, or raise disk_space_warning_level_ratio",
                    self.state.path,
                    space.used_ratio * 100,
                )
            else:
                logger.info("%s takes writes again: its disk is used to %d %%", self.state.path, space.used_ratio * 100)
        return delete_expired_files(self.state, space, manually=manually, pause=pause)

    def hold_lock(self) -> None:
        """Take the lock of the store again, should it be lost."""
        # A POSIX lock is lost as soon as this process closes any other descriptor of the file, as a backup of the
        # directory within this process does.
        if self._store_lock is not None and self.state.poison is None:
            try:
                self._store_lock.hold()
            except StoreLockedError as error:
                self.state.fail(error)
                raise
