"""Read queues: messages, tables, offsets by time, and waiting for new messages.

The statuses and limits of a get are those of RocketMQ 5.5.0 (DefaultMessageStore.getMessage).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rmqstore.arguments import (
    Boundary,
    Moment,
    check_boundary,
    check_timeout,
    milliseconds,
    one_queue,
    one_text,
    whole_number,
)
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.message._read import QueueGets
from rmqstore.selection import INT64_MAX, Selection, of_queue, row_num
from rmqstore.sources import Joined, Part
from rmqstore.spans import Span
from rmqstore.store.columns import ColumnOptions, Columns
from rmqstore.store.local_queue import EXAMINED, LocalQueue
from rmqstore.store.placed_columns import queue_batches
from rmqstore.store.results import GetMessageResult, GetMessageStatus
from rmqstore.store.store_state import LOOK_INTERVAL, StoreState

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["QueueQuestions", "get_from", "local_queue"]

MAX_PULL_BYTES = 128 * 1024 * 1024
MIN_PULL_BYTES = 100
# The pauses (seconds) of a reader that waits for messages of a writer, longer while none come.
_SHORTEST_POLL, _LONGEST_POLL = 0.01, 0.5


def local_queue(state: StoreState, topic: str, queue_id: int, known_to: int = INT64_MAX) -> Joined:
    """Return a queue of a store with the messages that its commit log has; for `known_to` see `StoreState.queue`."""
    queue = state.queue(topic, queue_id, known_to)
    if queue is None:
        return Joined(())
    return Joined((Part(LocalQueue(queue, state.commit_log), *state.bounds(queue), True),))


def get_from(queue: Joined, selection: Selection, max_bytes: int | None) -> GetMessageResult:
    """Read messages of a queue, see `MessageStore.get_message`; of `selection` `begin_queue_offset`, `max_num` and the tags."""
    low, high = queue.bounds
    queue_offset = selection.begin_queue_offset or 0
    if high <= 0:
        return GetMessageResult(GetMessageStatus.NO_MESSAGE_IN_QUEUE, [], 0, low, high)
    if queue_offset < low:
        return GetMessageResult(GetMessageStatus.OFFSET_TOO_SMALL, [], low, low, high)
    if queue_offset >= high:
        one = queue_offset == high
        status = GetMessageStatus.OFFSET_OVERFLOW_ONE if one else GetMessageStatus.OFFSET_OVERFLOW_BADLY
        return GetMessageResult(status, [], high, low, high)
    part = queue.part_at(queue_offset)
    if part is None:
        following = queue.following(queue_offset)
        queue.on_gap(queue_offset, following)
        return GetMessageResult(GetMessageStatus.OFFSET_FOUND_NULL, [], following, low, high)
    limit = MAX_PULL_BYTES if max_bytes is None else min(max(max_bytes, MIN_PULL_BYTES), MAX_PULL_BYTES)
    messages, following, nothing = part.queue.read(selection, part.end, limit)
    status = GetMessageStatus.FOUND if messages else GetMessageStatus[nothing]
    return GetMessageResult(status, messages, following, low, high)


def queue_gets(state: StoreState) -> QueueGets:
    """Return the compiled gets, which read queues whose messages are all in the log."""
    log = state.commit_log
    gets = QueueGets(
        state.queues, ConsumeQueue, log.files, log.crc_check, GetMessageStatus.FOUND, EXAMINED, MAX_PULL_BYTES, LOOK_INTERVAL,
        state.read_only,
    )  # fmt: skip
    gets.closed = not state.older.one_log
    return gets


class QueueQuestions:
    """Answers questions about the queues of one store; a base of `MessageStore`."""

    _state: StoreState

    def _queue(self, topic: str, queue_id: int, known_to: int = INT64_MAX) -> Joined:
        # With all its messages; for `known_to` see `StoreState.queue`.
        return self._state.older.queue(topic, queue_id, local_queue(self._state, topic, queue_id, known_to))

    def _bounds(self, topic: str, queue_id: int) -> Span:
        self._state.check_open()
        place = one_queue(topic, queue_id)
        return self._state.settled(lambda: self._queue(*place).bounds)

    def topics(self) -> list[str]:
        """Return the topics that have a queue, sorted."""
        self._state.check_open()
        return self._state.topics()

    def queue_ids(self, topic: str) -> list[int]:
        """Return the queue ids of `topic`, ascending.

        Raises
        ------
        OSError
            No queue was found, and a folder that may hold some cannot be read.
        """
        self._state.check_open()
        topic = one_text(topic, "topic")
        found = [queue_id for name, queue_id in self._state.keys() if name == topic]
        if not found:
            self._state.queues.check_seen(topic)
        return found

    def min_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """Return the queue offset of the first message that is still there, 0 for an unknown queue."""
        return self._bounds(topic, queue_id)[0]

    def max_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """Return the queue offset of the next message to come, 0 for an unknown queue."""
        return self._bounds(topic, queue_id)[1]

    def offset_by_time(self, topic: str, queue_id: int, timestamp: Moment, boundary: Boundary = "lower") -> int:
        """Return the queue offset that belongs to a store time.

        Parameters
        ----------
        timestamp : int or datetime
            ms since epoch, or a `datetime` (aware, or naive as local time).
        boundary : {"lower", "upper"}
            "lower": the first message stored at or after `timestamp`, else the max offset; "upper": the last one stored at or
            before it, else the min offset (RocketMQ 5.1.1 and later).

        Notes
        -----
        Messages are read one by one until one is found, for "lower" from the oldest, for "upper" from the newest: half a
        second to a second for a GiB of log in memory.  The store remembers the time range of each 8192 messages that were read,
        and skips by these.  If the clock was set back, messages between two results may have other times.

        Raises
        ------
        ValueError
            `timestamp` looks like seconds (see `rmqstore.arguments.milliseconds`), or `boundary` is unknown.
        """
        self._state.check_open()
        timestamp = milliseconds(timestamp, "timestamp", up=boundary == "lower")
        check_boundary(boundary)
        place, newest = one_queue(topic, queue_id), boundary == "upper"
        times = (Selection(end=timestamp) if newest else Selection(begin=timestamp)).times

        def ask() -> int:
            queue = self._queue(*place)
            found = queue.find_in_times(times, newest=newest)
            return found if found is not None else queue.bounds[0 if newest else 1]

        return self._state.settled(ask)

    def get_message(
        self,
        topic: str,
        queue_id: int = 0,
        queue_offset: int = 0,
        max_num: int = 32,
        tags: str | Iterable[str] | None = None,
        *,
        max_bytes: int | None = None,
    ) -> GetMessageResult:
        """Read messages of a queue, beginning with `queue_offset`, as a broker does (RocketMQ 5.5.0).

        A result ends with the queue file, so it may be shorter than `max_num` although more follows: continue at
        `next_queue_offset`.  The first message is returned whatever the limits.  A damaged record, or one that is not the
        message of its unit, is marked as `corrupt`.  Bounds of a store that is open read-only may be 5 ms old.

        Parameters
        ----------
        tags : str or iterable of str, optional
            Tags to keep, compared as text: ``"a || b"`` or a list; None, ``""`` and ``"*"`` keep all.
        max_bytes : int, optional
            Stop before the records together take more, at least 100; 128 MiB by default.
        """
        gets = self._state.queue_gets
        if gets is not None and tags is None and max_bytes is None:
            found = gets.get(topic, queue_id, queue_offset, max_num)
            if found is not None:
                return found
        self._state.check_open()
        max_bytes = None if max_bytes is None else whole_number(max_bytes, "max_bytes")
        selection = of_queue(topic, queue_id, queue_offset, whole_number(max_num, "max_num"), tags)
        known_to = (selection.begin_queue_offset or 0) + (selection.max_num or 0)
        place = selection.topic, selection.queue_id
        return self._state.settled(lambda: get_from(self._queue(*place, known_to), selection, max_bytes))

    def get_table(
        self,
        topic: str,
        queue_id: int = 0,
        queue_offset: int = 0,
        max_num: int | None = None,
        tags: str | Iterable[str] | None = None,
        columns: Iterable[str] | None = None,
        *,
        views: bool = False,
    ) -> pa.Table:
        """Read messages of a queue as an Arrow table, in queue order, beginning with `queue_offset`; one row a record.

        Parameters
        ----------
        queue_offset : int
            If this message is gone, the table begins with the oldest one that is still there.
        max_num : int, optional
            The greatest number of rows; by default up to the end of the queue, which fewer rows mean, too.
        tags : str or iterable of str, optional
            As for `get_message`.
        columns, views
            As for `scan`, whose errors are also raised here.
        """
        self._state.check_open()
        selection = of_queue(topic, queue_id, queue_offset, row_num(max_num), tags)
        rows = 8192 if selection.max_num is None else min(max(selection.max_num, 1), 8192)
        options, crc_check = ColumnOptions(columns, rows, views), self._state.commit_log.crc_check
        place = selection.topic, selection.queue_id

        def ask() -> pa.Table:
            columns = Columns(options, crc_check, selection, by_place=True)
            parts = self._queue(*place).between(selection.begin_queue_offset or 0)
            batches = list(queue_batches(parts, columns, selection))
            return columns.pa.Table.from_batches(batches, schema=columns.schema).slice(0, selection.max_num)

        return self._state.settled(ask)

    def wait_for_messages(self, is_there: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `is_there` returns True; it is called after every put, or in a read-only store after pauses.

        Parameters
        ----------
        is_there : callable
            Without arguments; must not wait itself.
        timeout : float, optional
            Seconds.

        Returns
        -------
        bool
            False after `timeout`, or when the store was closed.
        """
        self._state.check_open()
        check_timeout(timeout)
        if not self._state.read_only:
            with self._state.arrived:
                self._state.waiting += 1
                try:
                    return (
                        self._state.arrived.wait_for(lambda: self._state.closed or is_there(), timeout)
                        and not self._state.closed
                    )
                finally:
                    self._state.waiting -= 1
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _SHORTEST_POLL
        while not self._state.closed:
            self._state.refresh()
            if is_there():
                return True
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0:
                return False
            time.sleep(left)
            pause = min(pause * 2, _LONGEST_POLL)
        return False

    async def wait_for_messages_async(self, is_there: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in an event loop like `wait_for_messages` does in a thread; no thread waits (docs/asyncio.md).

        A put in any thread of this process wakes the loop.  Any number of tasks may wait, and each may be cancelled.
        """
        import asyncio

        state, loop = self._state, asyncio.get_running_loop()
        state.check_open()
        check_timeout(timeout)
        deadline = None if timeout is None else loop.time() + timeout
        if not state.read_only:
            arrived = state.arrived
            with arrived:
                state.waiting += 1
            try:
                while not state.closed:
                    # Made before `is_there`, so that a put after it wakes this one.
                    woken = arrived.future(loop)
                    try:
                        if is_there():
                            return True
                        left = None if deadline is None else deadline - loop.time()
                        if left is not None and left <= 0:
                            return False
                        if not state.closed:
                            await asyncio.wait((woken,), timeout=left)
                    finally:
                        arrived.forget(woken)
                return False
            finally:
                with arrived:
                    state.waiting -= 1
        pause = _SHORTEST_POLL
        while not state.closed:
            state.refresh()
            if is_there():
                return True
            left = pause if deadline is None else min(pause, deadline - loop.time())
            if left <= 0:
                return False
            await asyncio.sleep(left)
            pause = min(pause * 2, _LONGEST_POLL)
        return False
