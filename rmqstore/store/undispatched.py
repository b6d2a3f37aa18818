"""Serve readers the end of the log that no queue on disk points to, as after a kill of its broker.

Units are made in memory by the rules of recovery; nothing is written (I7).  Writers dispatch this part themselves.  `completion`
does the same for queues in RocksDB.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.consumequeue.queue_look import PlainQueue
from rmqstore.errors import CorruptionError, GeometryError, StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.os_errors import is_unreadable
from rmqstore.files.store_lock import abort_mark, is_held
from rmqstore.rocksdb.database import queue_databases
from rmqstore.store.dispatch_rules import Agreement
from rmqstore.store.dispatcher import LogDispatcher
from rmqstore.store.recovery import dispatched_before_crash, look_at_queues

if TYPE_CHECKING:
    from rmqstore.store.completion import Completion

__all__ = ["MAX_UNDISPATCHED", "Undispatched"]

logger = logging.getLogger(__name__)

# The bytes of the log scanned before and after the newest unit of any queue: more than a broker leaves, unless queues are lost.
MAX_UNDISPATCHED = 1 << 30
# Seconds between two checks of a reader for a writer that ended and left undispatched records.
_LOOK_INTERVAL = 1.0
# Seconds after the log grew during which a writer is assumed: one on another machine, or in a container, cannot be seen.
_QUIET = 5.0


class Undispatched:
    """The units in memory that queues of a store that is only read lack on disk.

    `served` is the range of the log (phy offsets) whose units are in memory; `left_out` the range that may be in no queue, because
    it is longer than `MAX_UNDISPATCHED`, or because a queue or a folder of queues cannot be read.
    """

    def __init__(self, root: str, commit_log: CommitLog, queues: ConsumeQueueStore):
        self.root = root
        self.commit_log = commit_log
        self.queues = queues
        self.served: tuple[int, int] | None = None
        self.left_out: tuple[int, int] | None = None
        self.completion: Completion | None = None
        self._looked = False
        self._mark: tuple[int, int] | None = None
        # The end of the log up to which units were made, and the end seen last.
        self._done_to = self._seen_to = -1
        self._looked_at = self._grew_at = -math.inf
        self._lock = threading.Lock()

    def look(self) -> None:
        """Make units for new records; does nothing unless the log grew since the last call, or a writer had the store."""
        with self._lock:
            if not self._looked:
                folders = queue_databases(self.root)
                if folders:
                    # Imported here because few stores have such a database.
                    from rmqstore.store.completion import Completion

                    self.completion = Completion(folders, self.root, self.commit_log, self.queues)
                self._looked = True
            if self.completion is not None:
                self.completion.catch_up(self.commit_log.max_offset)
                self.served = self.completion.served
            else:
                self._look(abort_mark(self.root), self.commit_log.max_offset, time.monotonic())

    def invalidate(self) -> None:
        """Have the next `look` make all units again, as all queues are opened again."""
        with self._lock:
            self.served = None
            self._done_to, self._looked_at = -1, -math.inf

    def renew_lock(self) -> None:
        """Replace the lock, which another thread of the parent process may have held at a fork."""
        self._lock = threading.Lock()

    def _look(self, mark: tuple[int, int] | None, end: int, now: float) -> None:
        if 0 <= self._seen_to != end:
            # A writer is running, and dispatches its records.
            self._grew_at = now
        self._seen_to = end
        if mark == self._mark and self._done_to == end:
            return
        if mark == self._mark and now - self._looked_at < _LOOK_INTERVAL:
            return
        self._looked_at = now
        if self.served is not None:
            self.queues.forget_memory()
        self.served = self.left_out = None
        self._mark, self._done_to = mark, end
        # A writer that closed the store has dispatched all.
        if end <= self.commit_log.min_offset or (mark is None and self.queues.keys() and not self.queues.unseen):
            return
        if self.queues.unseen:
            # Any record may be in a queue that this user cannot read.
            self.left_out = self.commit_log.min_offset, end
            return
        if now - self._grew_at < _QUIET or is_held(self.root):
            self._done_to = -1
        else:
            try:
                self._serve(end)
            except (CorruptionError, GeometryError) as error:
                self._leave_out(end, error)
            except OSError as error:
                if not is_unreadable(error):
                    raise
                self._leave_out(end, error)

    def is_current(self) -> bool:
        """Return True if no writer opened the store since `look`, or if nothing is served."""
        return self.served is None or self.completion is not None or abort_mark(self.root) == self._mark

    def _serve(self, end: int) -> None:
        newest, plain = look_at_queues(self.queues)
        begin = min(max(newest, self.commit_log.min_offset), end)
        until = min(end, begin + MAX_UNDISPATCHED)
        begin = self._first_missing(begin, plain)
        self.queues.set_aside(self.queues.config.max_mapped_files)
        dispatcher = LogDispatcher(self.root, self.commit_log, self.queues, None)
        with self.queues.in_memory():
            for stretch, columns in self.commit_log.scans(begin, until, keys=False):
                if stretch.verdict is Verdict.RECORD:
                    dispatcher.dispatch_columns(columns)
            dispatcher.finish()
        if dispatcher.counts.first is None:
            # The queues lack nothing: those on disk are seen to grow.
            self.queues.forget_memory()
        else:
            begin = dispatcher.counts.first
            self.served = begin, until
        if until < end:
            self.left_out = until, end
            logger.warning(
                "%s: no queue leads to %d bytes of the log, from phy offset %d on; of these %d are served, and messages from "
                "phy offset %d on are in no queue here. Rebuild the queues (rmqstore rebuild --what consumequeue), or read the log",
                self.root, end - begin, begin, until - begin, until,
            )  # fmt: skip

    def _surely_dispatched(self) -> int:
        # The phy offset up to which queues had everything before the crash.
        checkpoint = Checkpoint.load_or_zeros(os.path.join(self.root, "checkpoint"))
        return max(dispatched_before_crash(self.commit_log, checkpoint), self.commit_log.min_offset)

    def _leave_out(self, end: int, error: StoreError | OSError) -> None:
        # The log and the other queues can be read in spite of one damaged queue.
        self.queues.forget_memory()
        begin = min(self._surely_dispatched(), end)
        self.left_out = begin, end
        logger.warning(
            "%s: whether queues lead to all of the log from phy offset %d on cannot be said, as one cannot be read: %s",
            self.root, begin, error if isinstance(error, StoreError) else f"{error.strerror} [{error.filename}]",
        )  # fmt: skip

    def _first_missing(self, newest: int, plain: Mapping[tuple[str, int], PlainQueue]) -> int:
        # A queue may lack units that are older than the newest unit of another: many messages put at once are dispatched queue by
        # queue, and at a loss of power one queue's file may be on disk and another's not.
        begin = max(self._surely_dispatched(), newest - MAX_UNDISPATCHED)
        agreement = Agreement(self.commit_log, self.queues, plain)
        for stretch, columns in self.commit_log.scans(begin, newest, check_crc=False, keys=False):
            if stretch.verdict is Verdict.RECORD and not agreement.holds(columns):
                return stretch.begin
        return newest
