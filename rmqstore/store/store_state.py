"""The shared state of an open store: its files, the append lock, waiting readers, and why it takes no writes.

After a failed write nothing more is written (`StoreState.fail`): the operating system reports it once, and may then forget it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rmqstore._core import StateFields
from rmqstore._rows import Appender
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import AssumedSizes, StoreConfig
from rmqstore.config.places import other_progress_file, progress_file
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore, unseen_text
from rmqstore.errors import GeometryError, ReadOnlyError, StoreClosedError, StoreError, StorePoisonedError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.listing import ask_again, listing
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.files.os_errors import is_not_a_file, is_unreadable
from rmqstore.index.database_index import DatabaseIndex
from rmqstore.index.index_service import IndexService
from rmqstore.index.log_index import LogIndex
from rmqstore.rocksdb.database import closed_databases
from rmqstore.selection import Selection
from rmqstore.sources import DamagePolicy, Joined
from rmqstore.spans import Span
from rmqstore.store.columns import ColumnOptions, scan_log
from rmqstore.store.lost_log import claimed_end, is_named, lost_ranges, lost_text
from rmqstore.store.recovery import claimed_by_queues
from rmqstore.store.undispatched import Undispatched

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from rmqstore.consumer.consumer_offset import ConsumerOffsets
    from rmqstore.flatfile.flat_store import FlatRange, FlatStore
    from rmqstore.message import MessageExt
    from rmqstore.message._read import KeyQuery, QueueGets
    from rmqstore.store.placed_columns import AskedKeys
    from rmqstore.store.results import QueryResult
    from rmqstore.store.stats import KnownNumbers

__all__ = ["LOOK_INTERVAL", "Arrivals", "GroupProgress", "Older", "StoreState"]

logger = logging.getLogger(__name__)


class Arrivals(threading.Condition):
    """A `threading.Condition` that also wakes futures of event loops."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self._futures: dict[asyncio.AbstractEventLoop, set[asyncio.Future[None]]] = {}

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return a future that is done after the next `notify_all`; call it in the thread of `loop`, and `forget` afterwards."""
        made = loop.create_future()
        with self:
            self._futures.setdefault(loop, set()).add(made)
        return made

    def forget(self, future: asyncio.Future[None]) -> None:
        """Stop waking this future."""
        loop = future.get_loop()
        with self:
            futures = self._futures.get(loop, set())
            futures.discard(future)
            if not futures:
                self._futures.pop(loop, None)

    def notify_all(self) -> None:
        """Wake every thread and every future; the caller holds the lock."""
        super().notify_all()
        if self._futures:
            woken, self._futures = self._futures, {}
            for loop, futures in woken.items():
                # A closed loop has no tasks that wait.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_wake, futures)


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class GroupProgress:
    """The progress of the consumer groups of one store."""

    def __init__(self, path: str, config: StoreConfig, *, read_only: bool):
        self.path = path
        self.config = config
        self.read_only = read_only
        self._offsets: ConsumerOffsets | None = None
        # The state of the config folder when the progress was read from a file.
        self._mark: object = None
        # The last warning.
        self._said = ""
        self._pid = os.getpid()
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace the lock, in a forked child."""
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Have `offsets` read the progress again."""
        with self._lock:
            self._offsets = self._mark = None

    def refresh(self) -> None:
        """Have `offsets` read the progress again, unless it was in a file and the config folder did not change."""
        with self._lock:
            if self._mark is None or self._mark != self._mark_of_files():
                self._offsets = self._mark = None

    def _mark_of_files(self) -> object:
        # A broker replaces files.
        try:
            found = [(each.name, each.stat()) for each in listing(os.path.join(self.path, "config")).existing()]
        except OSError:
            return None
        return [(name, status.st_ino, status.st_mtime_ns, status.st_size) for name, status in found]

    @property
    def offsets(self) -> ConsumerOffsets:
        """ConsumerOffsets: read when it is first asked for, see `MessageStore.consumer_offsets`."""
        with self._lock:
            if self._offsets is None:
                from rmqstore.consumer.settings_sources import offsets_in_databases

                # In doubt the newest file is read, and none is written.
                lmq = None if "enable_lmq" in self.config.assumed else self.config.enable_lmq
                mark = self._mark_of_files()
                self._offsets = offsets_in_databases(self.path, lmq)
                if self._offsets is None:
                    self._offsets, self._mark = self._of_file(lmq), mark
            return self._offsets

    def _of_file(self, lmq: bool | None) -> ConsumerOffsets:
        from rmqstore.consumer.consumer_offset import ConsumerOffsets

        path = progress_file(self.path, lmq)
        offsets = ConsumerOffsets.load(
            path,
            read_only=self.read_only or self._pid != os.getpid() or lmq is None,
            version_step=self.config.consumer_offset_update_version_step,
            clock=self.config.clock,
        )
        if lmq is None:
            offsets.refusal = (
                "the file of progress that the broker uses is not known: with enableLmq=true it is lmqConsumerOffset.json, "
                "else consumerOffset.json, and the store does not show which; give enable_lmq=True or False (-o enableLmq=true or "
                "-o enableLmq=false), as the broker has it"
            )
        second = other_progress_file(path)
        if second is not None:
            offsets.not_read = second
            reason = "the other one was written later" if lmq is None else f"enable_lmq is {lmq}"
            self._warn(
                f"{second} is not read: a broker uses one of two files of progress, and {reason}; change that with enable_lmq"
            )
        return offsets

    def _warn(self, text: str) -> None:
        # Each refresh reads the file again.
        if self._said != text:
            logger.warning("%s", text)
            self._said = text

    def list(self) -> tuple[dict[tuple[str, str], dict[int, int]], str | None]:
        """Return the progress of all groups, see `MessageStore.consumer_progress`."""
        try:
            offsets = self.offsets
            findings = offsets.findings
            problem = f"{findings[0].detail} [{findings[0].path}]" if findings else None
            if problem is not None and len(findings) > 1:
                problem += f", and {len(findings) - 1} more"
            return offsets.list(), problem
        except (StoreError, OSError) as error:
            text = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                text = f"{error.strerror} [{os.fsdecode(error.filename)}]"
            self._warn(f"the progress of consumer groups is not known: {text}")
            return {}, text

    def persist(self) -> None:
        """Write new commits to the file."""
        offsets = self._offsets
        if offsets is not None and not offsets.read_only:
            offsets.persist()


LOOK_INTERVAL = 0.005
"""Seconds between two checks of a reader for files that a writer replaced or extended."""

_INT64_MAX = 2**63 - 1
_T = TypeVar("_T")


class Older:
    """The messages of a store that are not in its log: none; `rmqstore.store.tiered.Tiered` has those in tiered storage.

    With `one_log`, phy offsets are places in the commit log; otherwise each queue of tiered storage has its own log.
    """

    one_log = True
    flat_store: FlatStore | None = None

    def __init__(self, state: StoreState):
        self.state = state

    @property
    def notes(self) -> Sequence[str]:
        """sequence of str: sentences about what is unknown."""
        return ()

    def keys(self) -> list[tuple[str, int]]:
        """Return topic and queue id of each queue."""
        return []

    def queue(self, topic: str, queue_id: int, local: Joined) -> Joined:
        """Return `local`, joined with the messages before it."""
        return local

    def spans(self, topic: str, queue_id: int) -> list[Span]:
        """Return the queue offsets of a queue that are not read from the log; first, and one after the last."""
        return []

    def ranges(self, selection: Selection) -> Iterator[FlatRange]:
        """Yield the messages of a selection that are not in the log, queue by queue; none for a range of phy offsets."""
        return iter(())

    def scan(self, selection: Selection, options: ColumnOptions, *, use_threads: bool) -> pa.RecordBatchReader:
        """Return the chosen messages; those that are not in the log come first."""
        if self.state.read_only:
            self.state.commit_log.refresh()
        return scan_log(self.state.commit_log, selection, options, use_threads=use_threads)

    def with_key(self, local: QueryResult, selection: Selection) -> QueryResult:
        """Return `local`, the messages in the log, followed by others; newest first."""
        return local

    def table(self, asked: AskedKeys, options: ColumnOptions, query: Callable[[Selection], QueryResult]) -> pa.Table:
        """Return the messages of many keys, for each those that `query` finds in the log and the others."""
        raise NotImplementedError

    def with_id(self, msg_id: str, topics: Iterable[str]) -> Iterator[MessageExt]:
        """Yield the messages of these topics with this unique key."""
        return iter(())

    def pass_over(self, damage: DamagePolicy) -> None:
        """Have readers continue after unreadable or deleted places, by the rules of `damage`."""

    def refresh(self, *, uploads: bool) -> None:
        """Pick up changes; `uploads` asks for those of the last second as well."""

    def close(self) -> None:
        """Release the files."""


class StoreState(StateFields):
    """The files of one store, and whether they may be read and written.

    `lock` is the append lock; it is never held while waiting for a flush.  `poison` is the error of a failed write.  `appender` is
    None while the store refuses writes.
    """

    appender: Appender | None
    key_query: KeyQuery | None
    queue_gets: QueueGets | None

    def __init__(self, path: str, config: StoreConfig, *, read_only: bool):
        self.path = path
        self.config = config
        self.read_only = read_only
        self.pool = MappedFilePool(config.max_mapped_files)
        self.commit_log = CommitLog(path, config, self.pool, read_only=read_only)
        self.queues = ConsumeQueueStore(path, config, self.pool, read_only=read_only)
        self.index_service: IndexService | None = (
            IndexService(path, config, read_only=read_only) if config.message_index_enable else None
        )
        self.undispatched = Undispatched(path, self.commit_log, self.queues)
        self.database_index = DatabaseIndex(path, self.commit_log)
        self.log_index = (
            None
            if self.index_service is None
            else LogIndex(path, self.commit_log, self.index_service, self.database_index)
        )
        self.checkpoint = Checkpoint(os.path.join(path, "checkpoint"), read_only=read_only)
        self.progress = GroupProgress(path, config, read_only=read_only)
        self._sizes = AssumedSizes(path)
        self.appender = None
        self.key_query = None
        self.queue_gets = None
        self.older = Older(self)
        self.known_numbers: KnownNumbers | None = None
        self.last_store_timestamp = 0
        self.waiting = 0
        # The last refresh of the log for queues in RocksDB (`time.monotonic`).
        self._looked_at = -1.0
        self.sync_flush = config.flush_disk_type == "SYNC_FLUSH"
        self.disk_full = False
        self.poison: BaseException | None = None
        self.closing = self.closed = False
        self.lost_log: tuple[tuple[int, int], ...] = ()
        self.pid = os.getpid()
        self.renew_locks()

    def renew_locks(self) -> None:
        """Replace all locks, in a forked child, where locks held by another thread of the parent are never released."""
        self.lock = threading.RLock()
        self.arrived = Arrivals()
        self.pool.lock = threading.RLock()
        self.queues.renew_lock()
        self.undispatched.renew_lock()
        self.progress.renew_lock()
        if self.log_index is not None:
            self.log_index.renew_lock()
        self.database_index.renew_lock()
        if self.index_service is not None:
            self.index_service.renew_locks()
        self.commit_log.renew_lock()

    def after_fork(self) -> None:
        """Forget, in a forked child, the prepared files and commits of the parent."""
        self.appender = None
        self.renew_locks()
        self.progress.forget()
        self.commit_log.files.prepared.forget()
        for queue in self.queues.opened():
            queue.forget_prepared()
        if self.index_service is not None:
            self.index_service.prepared.forget()

    def load(self) -> None:
        """Load the files; read-only, also make units for records without one."""
        self.commit_log.load()
        self.queues.load()
        if self.index_service is not None:
            self.index_service.load()
            if not self.read_only:
                # The next thorough flush forces a full file, which does not delay the put.
                self.index_service.flush_on_roll = False
        try:
            self.checkpoint = Checkpoint.load(self.checkpoint.path, read_only=self.read_only)
        except GeometryError as error:
            if not self.read_only:
                raise
            # A reader uses the files themselves.
            logger.warning("%s: %s", error.path, error.message)
        except OSError as error:
            if not (self.read_only and (is_unreadable(error) or is_not_a_file(error))):
                raise
            advice = "let this user read it, or restore it from a copy where the disk fails"
            logger.warning(
                "%s: the checkpoint cannot be read (%s) and counts as zeros; %s",
                self.checkpoint.path, error.strerror or error, "move it away" if is_not_a_file(error) else advice,
            )  # fmt: skip
        if self.read_only:
            claimed = claimed_end(self.path, self.checkpoint)
            self.commit_log.follow()
            self.undispatched.look()
            claimed = max(claimed, claimed_by_queues(self.commit_log, self.queues, self.checkpoint))
            self.lost_log = lost_ranges(self.commit_log, claimed)
            for begin, end in self.lost_log:
                logger.warning("%s: %s", self.commit_log.path, lost_text(begin, end))
            if self.lost_log and self.key_query is not None:
                # `KeyQuery` does not report lost parts.
                self.key_query.closed = True

    def close_files(self) -> None:
        """Close the files."""
        self.database_index.close()
        self.commit_log.close()
        self.queues.close()
        self.pool.let_go()
        if self.index_service is not None:
            self.index_service.close()

    def check_open(self) -> None:
        """Raise StoreClosedError after `close`."""
        if self.closed:
            raise StoreClosedError("the store is closed; open it again", self.path)

    def check_writable(self) -> None:
        """Raise an error if the store refuses writes."""
        self.check_open()
        if self.closing:
            raise StoreClosedError("the store is being closed; open it again", self.path)
        if self.read_only:
            raise ReadOnlyError("the store was opened read-only; open it with read_only=False to write", self.path)
        if self.pid != os.getpid():
            raise StoreError(
                "the store was opened by the parent of this process; a forked child must not write to it: open stores after "
                "the fork",
                self.path,
            )
        self.check_not_poisoned()

    def check_not_poisoned(self) -> None:
        """Raise StorePoisonedError after a failed write."""
        if self.poison is not None:
            why = f"failed ({self.poison})" if isinstance(self.poison, Exception) else "was interrupted"
            raise StorePoisonedError(
                f"an earlier write {why}; close the store and open it again, which recovers it", self.path
            ) from self.poison

    def fail(self, error: BaseException) -> None:
        """Refuse writes from now on, because of `error`."""
        self.appender = None
        if self.poison is None:
            self.poison = error
            logger.error("%s refuses writes from now on: %s", self.path, error if str(error) else type(error).__name__)

    def refresh(self, *, uploads: bool = False) -> None:
        """Pick up changes made by other processes, see `MessageStore.refresh`."""
        self.check_open()
        if self.read_only:
            self.learn()
            if self.log_index is not None and self.commit_log.files.was_replaced():
                self.log_index.forget()
            self.commit_log.refresh()
            self.queues.refresh()
            for queue in self.queues.opened():
                queue.refresh()
            self.undispatched.look()
            if self.index_service is not None:
                self.index_service.load()
            if self.log_index is not None:
                self.log_index.look_again()
            self.database_index.look_again()
            self.older.refresh(uploads=uploads)
            self.progress.refresh()

    def learn(self) -> None:
        """Replace assumed sizes of files by those of files that exist now (read-only use)."""
        config = self._sizes.learn(self.config)
        if config is not self.config:
            self.config = config
            if not self.commit_log.files.file_offsets:
                self.commit_log.take_config(config)
            self.queues.take_config(config)
            if self.index_service is not None:
                self.index_service.config = config
            self.queues.refresh()
            self.undispatched.invalidate()
            self.undispatched.look()

    def queue(self, topic: str, queue_id: int, known_to: int = _INT64_MAX) -> AnyConsumeQueue | None:
        """Return a queue, None for an unknown one.

        A reader checks for changes by a writer; if the queue has units up to `known_to`, not at every call.
        """
        if self.undispatched.completion is not None:
            return self._queue_of_database(topic, queue_id)
        queue = self.queues.find(topic, queue_id)
        if self.read_only:
            if queue is None:
                self.learn()
                self.queues.refresh()
                queue = self.queues.find(topic, queue_id)
            else:
                now = time.monotonic()
                if known_to > queue.unit_num or now - queue.refreshed_at >= LOOK_INTERVAL:
                    queue.refresh()
                    queue.refreshed_at = now
                    if not self.undispatched.is_current():
                        self.undispatched.look()
                        queue = self.queues.find(topic, queue_id)
        return queue

    def _queue_of_database(self, topic: str, queue_id: int) -> AnyConsumeQueue | None:
        # Newer units, also of new queues, are only in the log.
        now = time.monotonic()
        if now - self._looked_at >= LOOK_INTERVAL:
            self._looked_at = now
            self.commit_log.refresh()
            self.undispatched.look()
        queue = self.queues.find(topic, queue_id)
        if queue is not None and now - queue.refreshed_at >= LOOK_INTERVAL:
            queue.refresh()
            queue.refreshed_at = self._looked_at
        return queue

    def topics(self) -> list[str]:
        """Return the topics that have a queue, sorted."""
        return sorted({topic for topic, _ in self.keys()})

    def keys(self) -> list[tuple[str, int]]:
        """Return topic and queue id of every queue, sorted; also of those in tiered storage."""
        local, older = self.queues.keys(), self.older.keys()
        return sorted({*local, *older}) if older else local

    def bounds(self, queue: AnyConsumeQueue | None) -> tuple[int, int]:
        """Return the first queue offset of `queue` that is still there, and the one to come; 0 and 0 for None."""
        return (0, 0) if queue is None else queue.bounds(self.commit_log.min_offset)

    def damaged_files(self) -> list[StoreError]:
        """Return errors for damaged and unreadable files, see `MessageStore.damaged_files`."""
        log, queues = self.commit_log, self.queues
        listed = [log.files, *(queue.files for queue in queues.opened())]
        found: list[StoreError] = [problem for files in listed for problem in files.damaged()]
        named = {problem.path for problem in found}
        found += [
            StoreError(lost_text(begin, end), log.path)
            for begin, end in self.lost_log
            if not is_named(log, begin, end, named)
        ]
        found += [StoreError(unseen_text(error), folder) for folder, error in queues.unseen.items()]
        for (topic, queue_id), error in queues.unread.items():
            text = f"queue {queue_id} of {topic} cannot be read ({error.strerror or error}), and is left out"
            found.append(StoreError(text, None if error.filename is None else os.fsdecode(error.filename)))
        if self.index_service is not None:
            found += self.index_service.passed_over.values()
        completion, index_damage = self.undispatched.completion, self.database_index.damage
        databases: list[StoreError] = [
            *closed_databases(self.path),
            *(() if completion is None else completion.damage),
            *(() if index_damage is None else (index_damage,)),
        ]
        told = {problem.path for problem in found}
        for problem in databases:
            if problem.path not in told:
                told.add(problem.path)
                found.append(problem)
        return found

    def settled(self, ask: Callable[..., _T], *arguments: Any) -> _T:
        """Call `ask`, retrying when retention deletes a file it needs."""
        return ask_again(lambda: ask(*arguments), lambda: self.refresh(uploads=True))

    def checkpoint_now(self) -> Checkpoint:
        """Return the checkpoint as it is on disk now; zeros if it cannot be read."""
        return Checkpoint.load_or_zeros(self.checkpoint.path) if self.read_only else self.checkpoint
