"""What is in a queue: questions that a store answers by queue offset or by time, and waiting for what comes.

Owns the part of `MessageStore` that asks, with its words: each call makes a `Selection` of its arguments, which `Reading` answers.
It changes nothing on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rmqstore.arguments import Boundary, Moment, milliseconds, one_queue, one_text, whole_number
from rmqstore.selection import of_queue, row_num
from rmqstore.store.columns import table_options
from rmqstore.store.reading import Reading
from rmqstore.store.results import GetMessageResult
from rmqstore.store.store_state import StoreState

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["QueueQuestions"]


class QueueQuestions:
    """Answers questions about the queues of one store; a base of `MessageStore`."""

    _state: StoreState
    _reading: Reading

    def topics(self) -> list[str]:
        """list of str: topics that have a queue, sorted."""
        self._state.check_open()
        return self._state.topics()

    def queue_ids(self, topic: str) -> list[int]:
        """list of int: the queues of `topic`, ascending.

        Raises
        ------
        OSError
            No queue is seen, and a folder that may hold some cannot be read.
        """
        self._state.check_open()
        topic = one_text(topic, "topic")
        found = [queue_id for name, queue_id in self._state.keys() if name == topic]
        if not found:
            self._state.queues.check_seen(topic)
        return found

    def min_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """int: queue offset of the first message that is still there, 0 for an unknown queue."""
        self._state.check_open()
        return self._state.settled(self._reading.bounds_of, *one_queue(topic, queue_id))[0]

    def max_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """int: queue offset of the next message to come, 0 for an unknown queue."""
        self._state.check_open()
        return self._state.settled(self._reading.bounds_of, *one_queue(topic, queue_id))[1]

    def offset_by_time(self, topic: str, queue_id: int, timestamp: Moment, boundary: Boundary = "lower") -> int:
        """int: queue offset that belongs to a store time.

        Parameters
        ----------
        timestamp : int or datetime
            ms since epoch, or a `datetime` (aware, or naive as local time).
        boundary : {"lower", "upper"}
            "lower": the first message stored at or after `timestamp`, the max offset if there is none; "upper": the last one
            stored at or before it, the min offset if there is none (RocketMQ 5.1.1 and later).

        Notes
        -----
        Messages are read one by one until one is found, for "lower" from the oldest, for "upper" from the newest: half a
        second to a second for a GiB of log in memory.  The store remembers the time ranges of what was read, 8192 messages at
        a time, and skips by these.  Where the clock was set back, messages between two results may have other times.

        Raises
        ------
        ValueError
            `timestamp` looks like seconds (see `rmqstore.arguments.milliseconds`), or `boundary` is unknown.
        """
        self._state.check_open()
        timestamp = milliseconds(timestamp, "timestamp", up=boundary == "lower")
        return self._state.settled(self._reading.offset_by_time, *one_queue(topic, queue_id), timestamp, boundary)

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
        return self._state.settled(self._reading.get, selection, max_bytes)

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
        return self._state.settled(self._reading.table, selection, table_options(selection, columns, views))

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
        return self._reading.wait_for_messages(is_there, timeout)

    async def wait_for_messages_async(self, is_there: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in an event loop like `wait_for_messages` does in a thread; no thread waits (docs/asyncio.md).

        A put in any thread of this process wakes the loop.  Any number of tasks may wait, and each may be cancelled.
        """
        return await self._reading.wait_for_messages_async(is_there, timeout)
