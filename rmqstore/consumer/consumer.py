"""Consumer: read the queues of a topic for a group, wait for new messages, and commit progress.

Owns the position in each queue and the time of commits: a message counts as consumed when the next one is requested or `commit` is
called, so that a consumer that stops or dies gets it again (at least once).  Committed progress never passes a message that was not
handed out, unless retention deleted it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rmqstore.arguments import Moment, check_timeout, milliseconds, shown, whole_number
from rmqstore.consumer.consumer_offset import ConsumerOffsets, progress_key
from rmqstore.errors import StoreClosedError, StoreError
from rmqstore.message import MessageExt

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Consumer", "Wanted"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """The parameters of `MessageStore.consume`."""

    queue_ids: Sequence[int] | None
    tags: str | Iterable[str] | None
    max_num: int
    consume_from: Literal["first", "last", "progress"] | Moment
    timeout: float | None
    commit: Literal["each", "interval"]

    def __post_init__(self) -> None:
        if self.commit not in ("each", "interval"):
            raise ValueError(f"commit is {self.commit!r}: give 'each' or 'interval'")
        if self.max_num < 1:
            raise ValueError(f"max_num is {self.max_num}: give the messages to fetch at once, 1 or more")
        begin = self.consume_from
        if begin not in ("first", "last", "progress"):
            if not isinstance(begin, (str, bool)):
                begin = milliseconds(begin, "consume_from", up=True)
            if isinstance(begin, (str, bool)) or begin < 0:
                raise ValueError(
                    f"consume_from is {begin!r}: give 'first', 'last', 'progress', or a time (ms since epoch, or a datetime)"
                )
            object.__setattr__(self, "consume_from", begin)
        if self.tags is not None and not isinstance(self.tags, str):
            object.__setattr__(self, "tags", list(self.tags))
        check_timeout(self.timeout)


class Consumer(Iterator[MessageExt], AsyncIterator[MessageExt]):
    """The messages of a topic for a group, one by one; created by `MessageStore.consume`.

    Iterate in one thread by ``for``, or in one task of an event loop by ``async for``, in which no thread waits.  The next message
    commits the one before, and so does `commit`.  Nothing else does: a loop that ends by ``break``, an exception or a cancellation,
    in a ``with`` block or not, gets its last message again.

    Attributes
    ----------
    topic, group : str
    """

    def __init__(self, store: Any, topic: str, group: str, wanted: Wanted, offsets: ConsumerOffsets | None):
        if offsets is not None and not isinstance(offsets, ConsumerOffsets):
            raise TypeError(f"offsets is {shown(offsets)}; give ConsumerOffsets")
        progress_key(topic, group)
        self.topic, self.group = topic, group
        # `store` is a `MessageStore`, whose package imports this one; it persists its own offsets.
        self._store, self._wanted = store, wanted
        self._is_own = offsets is not None
        self._offsets: ConsumerOffsets = store.consumer_offsets if offsets is None else offsets
        self._persisted = time.monotonic()
        # The next queue offset of each queue; queues take turns.
        self._positions: dict[int, int] = {}
        self._turn: deque[int] = deque()
        self._fetched: deque[tuple[MessageExt, int]] = deque()
        self._fetched_from = -1
        # By queue the offset to commit for the messages that were returned.
        self._handed_out: dict[int, int] = {}
        self._closed = False
        self._find_queues(first=True)

    # ------------------------------------------------------------------------------------------------------- progress

    def commit(self, durable: bool = False) -> None:
        """Commit every message that was returned, including the last, without asking for the next one.

        - `durable`: write the group's progress to disk now, and nothing else; a killed process then gets none of these
          messages again.  Otherwise progress is on disk after `MessageStore.flush`, its `close`, or
          ``flush_consumer_offset_interval`` ms.
        """
        if self._store.closed and not self._is_own:
            raise StoreClosedError("the store is closed; open it again", self._store.path)
        self._commit_handed_out()
        if durable or self._is_due():
            self._persist()

    def _is_due(self) -> bool:
        if self._wanted.commit == "each":
            return True
        if not self._is_own:
            return False
        interval: int = self._store.config.flush_consumer_offset_interval
        return time.monotonic() - self._persisted >= interval / 1000

    def _persist(self) -> None:
        self._offsets.persist()
        self._persisted = time.monotonic()

    def _commit_handed_out(self) -> None:
        handed_out, self._handed_out = self._handed_out, {}
        for queue_id, following in handed_out.items():
            self._offsets.commit(self.group, self.topic, queue_id, following)

    async def _persist_in_thread(self) -> None:
        # The event loop must not wait for the disk.
        import asyncio

        await asyncio.to_thread(self._persist)

    def _queue_ids(self) -> Sequence[int]:
        chosen = self._wanted.queue_ids
        return self._store.queue_ids(self.topic) if chosen is None else chosen

    def _find_queues(self, first: bool = False) -> None:
        for queue_id in self._queue_ids():
            if queue_id in self._positions:
                continue
            position = self._offsets.get(self.group, self.topic, queue_id)
            low = self._store.min_queue_offset(self.topic, queue_id)
            high = self._store.max_queue_offset(self.topic, queue_id)
            if position > high:
                # A power cut took consumed messages before they were flushed; new ones get their queue offsets.
                logger.warning(
                    "%s: group %s consumed %s/%d up to %d, but the queue ends at %d; going on there",
                    self._store.path, self.group, self.topic, queue_id, position, high,
                )  # fmt: skip
                position = high
                self._offsets.commit(self.group, self.topic, queue_id, position)
            elif position < 0:
                position = low
                # All messages of a later queue are new.
                if first and self._wanted.consume_from != "first":
                    position = self._first_position(queue_id, low, high)
                    self._offsets.commit(self.group, self.topic, queue_id, position)
            self._positions[queue_id] = position
            self._turn.append(queue_id)

    def _first_position(self, queue_id: int, low: int, high: int) -> int:
        begin = self._wanted.consume_from
        if begin == "last":
            return high
        if begin == "progress":
            stored, problem = self._store.consumer_progress()
            offset = stored.get((self.group, self.topic), {}).get(queue_id)
            if offset is None and problem is not None:
                raise StoreError(f"the progress of group {self.group} in {self.topic} is unknown: {problem}", self._store.path)
            return low if offset is None or offset < 0 else min(offset, high)
        assert not isinstance(begin, str)
        first: int = self._store.offset_by_time(self.topic, queue_id, begin)
        return first

    # ------------------------------------------------------------------------------------------------------ iteration

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> MessageExt:
        if self._closed or self._store.closed:
            raise StopIteration
        try:
            self.commit()
            self._wait()
        except StoreClosedError:
            # Another thread closed the store: fetched messages could not be committed.
            if self._store.closed:
                raise StopIteration from None
            raise
        if not self._fetched:
            raise StopIteration
        return self._hand_out()

    def _hand_out(self) -> MessageExt:
        message, following = self._fetched.popleft()
        self._handed_out[self._fetched_from] = following
        return message

    def batches(self, size: int) -> Batches:
        """Iterate over lists of 1 to `size` messages, those that are there without waiting for more.

        The result is for ``for`` and ``async for``.  A batch counts as consumed when the next one is requested, or at `commit`.
        """
        return Batches(self, whole_number(size, "size", 1))

    def _batch(self, message: MessageExt, size: int) -> list[MessageExt]:
        batch = [message]
        while len(batch) < size:
            if self._fetched:
                batch.append(self._hand_out())
                continue
            try:
                if not self._fetch():
                    break
            except (StoreError, OSError):
                # The next request meets it too; what was taken must not be lost.
                break
        return batch

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> MessageExt:
        if self._closed or self._store.closed:
            raise StopAsyncIteration
        try:
            self._commit_handed_out()
            if self._is_due():
                await self._persist_in_thread()
            await self._wait_async()
        except StoreClosedError:
            if self._store.closed:
                raise StopAsyncIteration from None
            raise
        if not self._fetched:
            raise StopAsyncIteration
        return self._hand_out()

    async def _wait_async(self) -> None:
        import asyncio

        deadline = None if self._wanted.timeout is None else time.monotonic() + self._wanted.timeout
        while not self._fetched and not self._closed and not self._store.closed:
            # A fetch reads mapped memory: a thread would cost more, and hold the GIL too.
            if self._fetch():
                # Other tasks run after each fetch.
                await asyncio.sleep(0)
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            await self._store.wait_for_messages_async(self._is_there, left)

    def _wait(self) -> None:
        deadline = None if self._wanted.timeout is None else time.monotonic() + self._wanted.timeout
        while not self._fetched and not self._store.closed:
            if self._fetch():
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            self._store.wait_for_messages(self._is_there, left)

    def _fetch(self) -> bool:
        # True if it fetched a message or moved a position.
        self._find_queues()
        for _ in range(len(self._turn)):
            queue_id = self._turn[0]
            self._turn.rotate(-1)
            position = self._positions[queue_id]
            got = self._store.get_message(self.topic, queue_id, position, self._wanted.max_num, self._wanted.tags)
            if got.messages:
                self._fetched.extend(zip(got.messages, _ends_of(got, position), strict=True))
                self._fetched_from = queue_id
                self._positions[queue_id] = got.next_queue_offset
                return True
            if got.next_queue_offset > position:
                if got.status.value in ("OFFSET_TOO_SMALL", "OFFSET_FOUND_NULL", "MESSAGE_WAS_REMOVING"):
                    logger.warning(
                        "%s: %s/%d from %d to %d was deleted before group %s consumed it",
                        self._store.path, self.topic, queue_id, position, got.next_queue_offset, self.group,
                    )  # fmt: skip
                # The group is past messages with other tags, and deleted ones.
                self._positions[queue_id] = got.next_queue_offset
                if self._handed_out:
                    # A batch is being collected, whose messages are not consumed yet.
                    self._handed_out[queue_id] = got.next_queue_offset
                else:
                    self._offsets.commit(self.group, self.topic, queue_id, got.next_queue_offset)
                return True
        return False

    def _is_there(self) -> bool:
        return any(
            queue_id not in self._positions
            or self._store.max_queue_offset(self.topic, queue_id) > self._positions[queue_id]
            for queue_id in self._queue_ids()
        )

    def close(self) -> None:
        """End the iteration; closing twice does nothing.  An uncommitted last message comes again."""
        if self._end() and (self._is_own or self._wanted.commit == "each"):
            self._persist()

    def _end(self) -> bool:
        if self._closed:
            return False
        self._closed = True
        self._fetched.clear()
        self._handed_out = {}
        return True

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def aclose(self) -> None:
        """Close in an event loop: a thread of asyncio's pool writes progress with a file of its own."""
        if self._end() and (self._is_own or self._wanted.commit == "each"):
            await self._persist_in_thread()

    async def __aenter__(self) -> Consumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"Consumer({self.topic!r}, {self.group!r}, {self._positions})"


class Batches(Iterator[list[MessageExt]], AsyncIterator[list[MessageExt]]):
    """The messages of a consumer in lists, see `Consumer.batches`."""

    def __init__(self, consumer: Consumer, size: int):
        self._consumer, self._size = consumer, size

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[MessageExt]:
        return self._consumer._batch(next(self._consumer), self._size)

    def __aiter__(self) -> Batches:
        return self

    async def __anext__(self) -> list[MessageExt]:
        return self._consumer._batch(await anext(self._consumer), self._size)


def _ends_of(got: Any, position: int) -> list[int]:
    # The offsets to commit after each message: those of the next ones.  A message has its own, unprotected one, so it counts only
    # within the bounds of the queue.
    ends = []
    for message in got.messages[1:]:
        position = min(max(message.queue_offset, position), got.next_queue_offset)
        ends.append(position)
    return [*ends, got.next_queue_offset]
