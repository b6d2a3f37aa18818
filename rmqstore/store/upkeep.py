"""The background threads of a store that is open for writing: timers, files prepared ahead, retention, pages ahead of the writer.

A task that fails is logged and tried again when it is due next; only a failed write ends the store.  A thread holds a weak
reference to its store, and ends when the store is garbage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.errors import StoreError, StoreLockedError
from rmqstore.files.mapped_file_queue import MappedFileQueue
from rmqstore.files.store_lock import StoreLock
from rmqstore.index.index_service import IndexService
from rmqstore.store.flushing import Flushing
from rmqstore.store.retention import DiskSpace, RetentionReport, delete_expired_files, used_ratio
from rmqstore.store.store_state import StoreState
from rmqstore.store.writing import Writing

__all__ = ["Housekeeping", "PopulateAhead", "Task", "Upkeep"]

logger = logging.getLogger(__name__)


class Task(NamedTuple):
    """Something to be done repeatedly: ms from the end of one run to the next (0: never), and to the first if that differs.

    `run` takes the owner; an int that it returns is the interval until the next run.
    """

    name: str
    interval: int
    run: Callable[[Any], object]
    first: int | None = None


class Housekeeping:
    """A thread that runs `tasks` on `owner`, weakly referenced, until `stop` or until `owner` is garbage."""

    def __init__(self, owner: object, tasks: Iterable[Task], name: str):
        self._owner = weakref.ref(owner)
        self._tasks = [task for task in tasks if task.interval > 0]
        self._stopping = threading.Event()
        # Not an Event: a finalizer may put into it, whatever this thread is doing when the collector runs.
        self._woken: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start = time.monotonic()
        due = [start + (task.interval if task.first is None else task.first) / 1000 for task in self._tasks]
        while True:
            woken, last = self._wait(min(due) - time.monotonic() if due else None)
            if self._stopping.is_set():
                return
            if last is not None:
                last()
                return
            if woken:
                due = [0.0] * len(due)
            owner = self._owner()
            if owner is None:
                return
            for number, task in enumerate(self._tasks):
                if due[number] > time.monotonic() or self._stopping.is_set():
                    continue
                interval = task.interval
                try:
                    answer = task.run(owner)
                    if type(answer) is int:
                        interval = answer
                except Exception as error:
                    logger.error("%s: %s failed: %s", self._thread.name, task.name, error)
                due[number] = time.monotonic() + interval / 1000
            # The thread must not be what keeps the store alive while it waits.
            del owner

    def _wait(self, seconds: float | None) -> tuple[bool, Callable[[], None] | None]:
        # Whether it was woken, and what it ends with.
        last, woken = None, False
        with contextlib.suppress(Empty):
            last, woken = self._woken.get(timeout=None if seconds is None else max(0.0, seconds)), True
            while last is None:
                last = self._woken.get_nowait()
        return woken, last

    def pause(self, milliseconds: int) -> bool:
        """Wait so long within a task; False if the thread is to stop."""
        return not self._stopping.wait(milliseconds / 1000)

    def wake(self) -> None:
        """Run every task now, or once more after the run that is going on."""
        self._woken.put(None)

    def end_with(self, last: Callable[[], None]) -> None:
        """Call `last` on the thread after the task that runs now, and end it; may be called in a finalizer."""
        self._woken.put(last)

    def stop(self) -> None:
        """End the thread after the task that runs now, and wait for that."""
        self._stopping.set()
        self._woken.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """bool: the thread runs."""
        return self._thread.is_alive()


# Looks this often (ms) while something is written, and less and less often while nothing is.  Each look takes the
# interpreter lock from the writer for a moment.
_SHORTEST, _LONGEST = 20, 160
# Ahead of an end lies so often what was written between two looks: the next look may come late.
_LOOKS_AHEAD = 4
# At once, so that a writer that overtook is noticed, and a close waits for no more than this.
_STEP = 2 << 20
# Less than this is not worth a call, and a writer that needs less is slow.
_LEAST_STEP = 64 << 10
# Entries between two looks, from which on the hash slots are made ready: they are some thousand pages.
_MANY_ENTRIES = 100
# A queue takes 20 bytes a message; with more queues than this each grows too slowly for it to matter.
_MOST_QUEUES = 64


class _Window:
    """One end: its place and file at the last look, up to where pages are ready, and how much is expected to be written."""

    __slots__ = ("end", "expected", "file", "ready")

    def __init__(self, end: int):
        self.end = self.ready = end
        self.file: int | None = None
        self.expected = 0.0

    def move(self, end: int, weight: float) -> int:
        """The end is here now; int: by how much it grew."""
        grown = end - self.end
        if grown < 0:
            # The stream was cut; some pages after the cut are ready, but which is not worth keeping.
            self.ready, grown = end, 0
        self.end = end
        # A batch comes as a whole, and then nothing for some looks.
        self.expected = max(grown * weight, self.expected / 2)
        return grown


class PopulateAhead:
    """The pages ahead of the ends of a store's log, queues and newest index file."""

    def __init__(self, log: MappedFileQueue, queues: ConsumeQueueStore, index_service: IndexService | None, size: int):
        self.size = size
        self._log = log
        self._queues = queues
        self._index_service = index_service
        self._windows: weakref.WeakKeyDictionary[MappedFileQueue, _Window] = weakref.WeakKeyDictionary()
        self._index_name: str | None = None
        self._index_window = _Window(0)
        self._slots_ready = False
        self._interval = _SHORTEST

    def look(self) -> int:
        """Make pages ready ahead of every end that grew; int: ms until the next look is worth while."""
        # What came together in a long pause says less about the next moment.
        weight = _LOOKS_AHEAD * _SHORTEST / self._interval
        grew = self._follow(self._log, weight)
        queues = self._queues.opened()
        if len(queues) <= _MOST_QUEUES:
            for queue in queues:
                grew |= self._follow(queue.files, weight)
        # An index file that is closed meanwhile needs no pages.
        with contextlib.suppress(StoreError):
            grew |= self._follow_index(weight)
        self._interval = _SHORTEST if grew else min(self._interval + self._interval // 4 + 1, _LONGEST)
        return self._interval

    def _follow(self, files: MappedFileQueue, weight: float) -> bool:
        window = self._windows.get(files)
        if window is None:
            window = self._windows[files] = _Window(files.wrote_where)
        offsets = files.offsets
        if not offsets:
            return False
        is_new, window.file = window.file != offsets[-1], offsets[-1]
        grown = window.move(files.wrote_where, weight)
        end, wanted = window.end, self._wanted(window)
        file_end = offsets[-1] + files.mapped_file_size
        target = min(end + wanted, file_end)
        start = max(window.ready, end)
        if target - start >= _step(wanted) or start < target == file_end:
            while start < target and files.populate(start, min(start + _STEP, target)):
                window.ready = min(start + _STEP, target)
                start = max(window.ready, files.wrote_where)
        if end + wanted > file_end:
            files.populate(file_end, end + wanted)
        return grown > 0 or is_new

    def _follow_index(self, weight: float) -> bool:
        service = self._index_service
        index = None if service is None else service.opened_newest()
        if service is None or index is None:
            return False
        mapped_file = index.mapped_file
        end = index.entry_pos(min(index.index_count, index.index_num - 1))
        if index.name != self._index_name:
            self._index_name, self._index_window, self._slots_ready = index.name, _Window(end), False
        window = self._index_window
        grown = window.move(end, weight)
        # Slots are written in no order, so that all of them are needed from the first entries on.
        slots_end = index.entry_pos(0)
        if not self._slots_ready and slots_end <= self.size and grown * weight >= _LOOKS_AHEAD * _MANY_ENTRIES * 20:
            self._slots_ready = mapped_file.populate(0, slots_end)
        wanted = self._wanted(window)
        target = min(end + wanted, mapped_file.size)
        start = max(window.ready, end)
        if target - start >= _step(wanted) and mapped_file.populate(start, target - start):
            window.ready = target
        if end + wanted > mapped_file.size:
            service.prepared.populate(min(slots_end + _STEP, self.size))
        return grown > 0

    def _wanted(self, window: _Window) -> int:
        # Bytes that should be ready ahead of the end.
        return min(int(window.expected), self.size) if window.expected >= _LEAST_STEP else 0


def _step(wanted: int) -> int:
    return max(min(wanted // _LOOKS_AHEAD, _STEP), _LEAST_STEP)


# Files smaller than this are made when they are needed; larger ones beforehand, from this part of the one before on.
_PREPARE_FROM_SIZE = 1 << 20
_PREPARE_AT = 0.5
# RocketMQ 5.5.0 persists consumer progress for the first time after 10 s and looks for expired files after 60 s.
_FIRST_PERSIST = 10_000
_FIRST_CLEAN = 60_000
_HOLD_INTERVAL = 10_000


class Upkeep:
    """The threads of a store that is open for writing, and their tasks."""

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
                Task("deletion of expired files", config.clean_resource_interval, Upkeep.clean, _FIRST_CLEAN),
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
                    log.prepared.prepare(self.state.commit_log.space(1))
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
                self.writing.enable_writes()
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
