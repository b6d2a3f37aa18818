"""Reading a queue, wherever its messages are: as messages, as a table, by store time.

Owns the statuses and limits of a get (RocketMQ 5.5.0 DefaultMessageStore.getMessage), and how one waits for new messages.  It opens
no file: the sources of a queue do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rmqstore._read import QueueGets
from rmqstore.arguments import check_boundary, check_timeout
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.message import MessageExt
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import Joined, Part
from rmqstore.store.columns import ColumnOptions, Columns
from rmqstore.store.local_queue import EXAMINED, LocalQueue
from rmqstore.store.queue_columns import queue_batches
from rmqstore.store.results import GetMessageResult, GetMessageStatus
from rmqstore.store.store_state import LOOK_INTERVAL, StoreState

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Reading", "get_from", "local_queue", "offset_by_time", "table_from"]

MAX_PULL_BYTES = 128 * 1024 * 1024
MIN_PULL_BYTES = 100
# A reader beside a writer looks for new messages at these pauses (seconds), longer while nothing comes.
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


def table_from(queue: Joined, selection: Selection, options: ColumnOptions, crc_check: int) -> pa.Table:
    """Read messages of a queue as a table, see `MessageStore.get_table`; of `selection` the same as `get_from`."""
    columns = Columns(options, crc_check, selection, by_place=True)
    batches = list(queue_batches(queue.between(selection.begin_queue_offset or 0), columns, selection))
    return columns.pa.Table.from_batches(batches, schema=columns.schema).slice(0, selection.max_num)


def offset_by_time(queue: Joined, timestamp: float, boundary: str) -> int:
    """Find a queue offset by store time, see `MessageStore.offset_by_time`."""
    check_boundary(boundary)
    newest = boundary == "upper"
    times = (Selection(end=timestamp) if newest else Selection(begin=timestamp)).times
    found = queue.find_in_times(times, newest=newest)
    return found if found is not None else queue.bounds[0 if newest else 1]


class Reading:
    """Reads the queues of one store, where `QueueGets` leaves it to this."""

    def __init__(self, state: StoreState):
        self.state = state
        self.read_only = state.read_only
        state.queue_gets = QueueGets(
            state.queues,
            ConsumeQueue,
            state.commit_log.files,
            MessageExt,
            state.commit_log.crc_check,
            GetMessageResult,
            GetMessageStatus.FOUND,
            EXAMINED,
            MAX_PULL_BYTES,
            LOOK_INTERVAL,
            state.read_only,
        )
        # It knows the queues of the log alone.
        state.queue_gets.closed = not state.older.one_log

    def queue_of(self, topic: str, queue_id: int, known_to: int = INT64_MAX) -> Joined:
        """Return a queue with all its messages; for `known_to` see `StoreState.queue`."""
        return self.state.older.queue(topic, queue_id, local_queue(self.state, topic, queue_id, known_to))

    def get(self, selection: Selection, max_bytes: int | None) -> GetMessageResult:
        """See `MessageStore.get_message`; of `selection` one queue, `begin_queue_offset`, `max_num` and the tags."""
        known_to = (selection.begin_queue_offset or 0) + (selection.max_num or 0)
        return get_from(self.queue_of(selection.topic, selection.queue_id, known_to), selection, max_bytes)

    def table(self, selection: Selection, options: ColumnOptions) -> pa.Table:
        """See `MessageStore.get_table`; of `selection` one queue, its offsets, `max_num` and the tags."""
        queue = self.queue_of(selection.topic, selection.queue_id)
        return table_from(queue, selection, options, self.state.commit_log.crc_check)

    def bounds_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the first queue offset that is there, and the one to come."""
        return self.queue_of(topic, queue_id).bounds

    def offset_by_time(self, topic: str, queue_id: int, timestamp: float, boundary: str = "lower") -> int:
        """See `MessageStore.offset_by_time`."""
        self.state.check_open()
        check_boundary(boundary)
        return self.state.settled(lambda: offset_by_time(self.queue_of(topic, queue_id), timestamp, boundary))

    def wait_for_messages(self, is_there: Callable[[], bool], timeout: float | None = None) -> bool:
        """See `MessageStore.wait_for_messages`."""
        self.state.check_open()
        check_timeout(timeout)
        if not self.read_only:
            with self.state.arrived:
                self.state.waiting += 1
                try:
                    return (
                        self.state.arrived.wait_for(lambda: self.state.closed or is_there(), timeout)
                        and not self.state.closed
                    )
                finally:
                    self.state.waiting -= 1
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _SHORTEST_POLL
        while not self.state.closed:
            self.state.refresh()
            if is_there():
                return True
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0:
                return False
            time.sleep(left)
            pause = min(pause * 2, _LONGEST_POLL)
        return False

    async def wait_for_messages_async(self, is_there: Callable[[], bool], timeout: float | None = None) -> bool:
        """See `MessageStore.wait_for_messages_async`."""
        import asyncio

        state, loop = self.state, asyncio.get_running_loop()
        state.check_open()
        check_timeout(timeout)
        deadline = None if timeout is None else loop.time() + timeout
        if not self.read_only:
            arrived = state.arrived
            with arrived:
                state.waiting += 1
            try:
                while not state.closed:
                    # Made before the question: what comes after it wakes this one.
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
