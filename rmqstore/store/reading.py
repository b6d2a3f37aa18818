"""Reading a queue: its units, and the records they lead to.

Owns the walk of a get (RocketMQ 5.5.0 DefaultMessageStore.getMessage) and its limits, the filter by tag, and how one waits for
new messages.  It opens no file: queues and log do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rmqstore import _core, _read
from rmqstore._read import QueueGets
from rmqstore.arguments import check_boundary, check_timeout
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.message import MessageExt
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.store.columns import ColumnOptions, Columns, queue_table
from rmqstore.store.queue_times import find_in_times
from rmqstore.store.results import GetMessageResult, GetMessageStatus
from rmqstore.store.store_state import LOOK_INTERVAL, StoreState

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Reading"]

_UNIT_SIZE = int(_core.UnitLayout.UNIT_SIZE)
# RocketMQ 5.5.0 examines at most 16000 bytes of units in one get (MessageStoreConfig.maxFilterMessageSize).
_EXAMINED = 16000 // 20
MAX_PULL_BYTES = 128 * 1024 * 1024
MIN_PULL_BYTES = 100
# A reader beside a writer looks for new messages at these pauses (seconds), longer while nothing comes.
_SHORTEST_POLL, _LONGEST_POLL = 0.01, 0.5


class Reading:
    """Reads the queues of one store, where `QueueGets` leaves it to this."""

    def __init__(self, state: StoreState):
        self.state = state
        self.read_only, self.commit_log, self.queues = state.read_only, state.commit_log, state.queues
        state.queue_gets = QueueGets(
            self.queues,
            ConsumeQueue,
            self.commit_log.files,
            MessageExt,
            self.commit_log.crc_check,
            GetMessageResult,
            GetMessageStatus.FOUND,
            _EXAMINED,
            MAX_PULL_BYTES,
            LOOK_INTERVAL,
            state.read_only,
        )

    def get(self, selection: Selection, max_bytes: int | None) -> GetMessageResult:
        """See `MessageStore.get_message`; of `selection` one queue, `begin_queue_offset`, `max_num` and the tags."""
        queue_offset, max_num = selection.begin_queue_offset, selection.max_num
        assert queue_offset is not None and max_num is not None
        queue = self.state.queue(selection.topic, selection.queue_id, queue_offset + max_num)
        low, high = self.state.bounds(queue)
        status = GetMessageStatus.NO_MESSAGE_IN_QUEUE
        following = 0
        if queue is not None and high > 0:
            if queue_offset < low:
                status, following = GetMessageStatus.OFFSET_TOO_SMALL, low
            elif queue_offset == high:
                status, following = GetMessageStatus.OFFSET_OVERFLOW_ONE, queue_offset
            elif queue_offset > high:
                status, following = GetMessageStatus.OFFSET_OVERFLOW_BADLY, high
            elif isinstance(queue, ConsumeQueue) and (
                selection.tags is None or (queue.ext is None and not queue.torn_units())
            ):
                return self.read_queued(queue, selection, max_bytes, (low, high))
            else:
                return self.walk(queue, selection, max_bytes, (low, high))
        return GetMessageResult(status, [], following, low, high)

    def read_queued(
        self, queue: ConsumeQueue, selection: Selection, max_bytes: int | None, bounds: tuple[int, int]
    ) -> GetMessageResult:
        """What `walk` gives, for a simple queue without an extension, or when all tags are wanted: one call a segment."""
        queue_offset = selection.begin_queue_offset or 0
        max_num = min(max(selection.max_num or 0, 0), INT64_MAX)
        limit = MAX_PULL_BYTES if max_bytes is None else min(max(max_bytes, MIN_PULL_BYTES), MAX_PULL_BYTES)
        log, messages = self.commit_log, []  # type: ignore[var-annotated]
        found = queue.region_of(queue_offset, max(_EXAMINED, max_num))
        codes = selection.tag_codes
        tags = None if selection.tags is None else frozenset(selection.tags)
        at = size = 0
        following, missing, full, examined = queue_offset, False, False, False
        if found is not None:
            units, pos, num = found
            while at < num and not full:
                phy_offset = _core.read_unit(units, pos + at * _UNIT_SIZE)[0]
                segment = log.region_of(phy_offset)
                # What no segment holds is passed over, but not before the unit's limits and tags were looked at.
                region, base, first, end = (units, 0, 0, 0) if segment is None else segment
                done, last, size, full, gone = _read.read_queued(
                    units, pos + at * _UNIT_SIZE, num - at, region, base, first, end,
                    MessageExt, messages, size, max_num, limit, log.crc_check, codes, tags, queue.topic, queue.queue_id,
                    queue_offset + at,
                )  # fmt: skip
                missing |= gone
                if last >= 0:
                    examined, following = True, queue_offset + at + last + 1
                at += done
                if segment is None and not done and not full:
                    missing, examined, at = missing or not messages, True, at + 1
                    following = queue_offset + at
        if messages:
            status = GetMessageStatus.FOUND
        elif examined:
            status = GetMessageStatus.MESSAGE_WAS_REMOVING if missing else GetMessageStatus.NO_MATCHED_MESSAGE
        else:
            status, following = GetMessageStatus.OFFSET_FOUND_NULL, queue.next_file_offset(queue_offset)
        return GetMessageResult(status, messages, following, *bounds)

    def walk(
        self, queue: AnyConsumeQueue, selection: Selection, max_bytes: int | None, bounds: tuple[int, int]
    ) -> GetMessageResult:
        """Unit by unit, within the `bounds` of the queue; the rest as of `get`."""
        queue_offset, max_num = selection.begin_queue_offset or 0, selection.max_num or 0
        limit = MAX_PULL_BYTES if max_bytes is None else min(max(max_bytes, MIN_PULL_BYTES), MAX_PULL_BYTES)
        examine = max(_EXAMINED, max_num)
        messages: list[MessageExt] = []
        taken = size = 0
        status = GetMessageStatus.NO_MATCHED_MESSAGE
        following = queue_offset
        examined = False
        for unit in queue.read(queue_offset, examine):
            if taken and (taken + unit.num > max_num or size + unit.size > limit):
                break
            examined = True
            following = unit.queue_offset + unit.num
            # An extension that cannot be read lets pass.
            if selection.tags is not None and not selection.may_have_code(queue.tags_code(unit)):
                continue
            message = self.commit_log.look_up(unit.phy_offset, unit.size)
            if message is None:
                if not messages:
                    status = GetMessageStatus.MESSAGE_WAS_REMOVING
                continue
            message.check_queue(queue.topic, queue.queue_id, unit.queue_offset)
            if selection.tags is not None and message.tags not in selection.tags:
                continue
            messages.append(message)
            taken += unit.num
            size += unit.size
        if messages:
            status = GetMessageStatus.FOUND
        elif not examined:
            status, following = GetMessageStatus.OFFSET_FOUND_NULL, queue.next_file_offset(queue_offset)
        return GetMessageResult(status, messages, following, *bounds)

    def table(self, selection: Selection, options: ColumnOptions) -> pa.Table:
        """See `MessageStore.get_table`; of `selection` one queue, its offsets, `max_num` and the tags."""
        queue = self.state.queue(selection.topic, selection.queue_id)
        made = Columns(options, self.commit_log.crc_check, selection, by_place=True)
        return queue_table(self.commit_log, queue, made, selection, self.state.bounds(queue)[0])

    def bounds_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        """(int, int): as of `StoreState.bounds`."""
        return self.state.bounds(self.state.queue(topic, queue_id))

    def offset_by_time(self, topic: str, queue_id: int, timestamp: float, boundary: str = "lower") -> int:
        """See `MessageStore.offset_by_time`."""
        self.state.check_open()
        check_boundary(boundary)
        newest = boundary == "upper"
        times = (Selection(end=timestamp) if newest else Selection(begin=timestamp)).times

        def ask() -> int:
            low, high = self.bounds_of(topic, queue_id)
            found = self.find_in_times(topic, queue_id, low, high, times, newest=newest)
            return found if found is not None else low if newest else high

        return self.state.settled(ask)

    def find_in_times(
        self, topic: str, queue_id: int, begin: int, end: int, times: tuple[int, int], *, newest: bool
    ) -> int | None:
        """Find a message by store time, as `queue_times.find_in_times` does; None for an unknown queue, too."""
        queue = self.state.queue(topic, queue_id)
        return None if queue is None else find_in_times(self.commit_log, queue, begin, end, times, newest=newest)

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
