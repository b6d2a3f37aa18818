"""Queues that only collect: the units that records of the log need, kept as arrays until somebody builds a queue of them.

Owns collecting, in queue order and each unit once.  Nothing here is a file, and nothing is filled up: a queue may begin at any
offset and have holes.
"""

from __future__ import annotations

import threading

from rmqstore import _numpy as np
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.consumequeue.unit_queue import Unit

__all__ = ["CollectedBatchQueue", "CollectedQueue", "CollectedQueues", "CollectedUnits"]

_COLUMNS = 5


class CollectedUnits:
    """Units of one queue, by queue offset.

    - `begin`, `end`: queue offset of the first one, and after the last one; 0 and 0 without any.
    """

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._parts: list[tuple[np.ndarray, ...]] = []
        # Others ask for units while more are added.
        self._lock = threading.Lock()

    def renew_lock(self) -> None:
        """Give up the lock that another thread of a parent process may have held at a fork."""
        self._lock = threading.Lock()

    def add(self, *columns: np.ndarray) -> None:
        """Add units: queue offsets (ascending), phy offsets, sizes, tags codes, how many messages each record holds."""
        first, last = int(columns[0][0]), int(columns[0][-1])
        with self._lock:
            self.begin = min(self.begin, first) if self._parts else first
            self._parts.append(columns)
            self.end = max(self.end, last + 1)

    def first(self) -> Unit | None:
        """The unit with the lowest queue offset, None without any."""
        columns = self.columns(self.begin, self.begin + 1)
        return Unit(*(int(each[0]) for each in columns)) if len(columns[0]) else None

    def clear(self) -> int:
        """Forget every unit; how many there were."""
        num = len(self.columns(self.begin, self.end)[0])
        with self._lock:
            self.begin = self.end = 0
            self._parts = []
        return num

    def columns(self, begin: int, end: int) -> tuple[np.ndarray, ...]:
        """The units with queue offsets from `begin` to before `end`, as `add` took them; of an offset the first that came."""
        with self._lock:
            if not self._parts:
                return tuple(np.empty(0, np.int64) for _ in range(_COLUMNS))
            if len(self._parts) > 1:
                joined = [np.concatenate(each) for each in zip(*self._parts, strict=True)]
                _, first = np.unique(joined[0], return_index=True)
                self._parts = [tuple(each[first] for each in joined)]
            (part,) = self._parts
        low, high = np.searchsorted(part[0], (begin, end))
        return tuple(each[low:high] for each in part)


class _Collecting:
    # What both kinds of queues do that collect their units and have no files.

    def __init__(self, topic: str, queue_id: int):
        self.topic, self.queue_id = topic, queue_id
        self.units_there = CollectedUnits()
        self._last: Unit | None = None

    def load(self) -> None:
        """Nothing: it has no files."""

    def close(self) -> None:
        """Nothing: it has no files."""

    def last_record(self) -> Unit | None:
        """The newest unit, None without any."""
        return self._last

    def first_record(self) -> Unit | None:
        """The oldest unit, None without any."""
        return self.units_there.first()

    def begin_again(self) -> int:
        """Forget every unit, like `UnitQueue.begin_again`."""
        self._last = None
        return self.units_there.clear()


class CollectedQueue(_Collecting, ConsumeQueue):
    """A simple queue that collects its units."""

    @property
    def unit_num(self) -> int:
        """int: queue offset after the last unit."""
        return self.units_there.end

    def put(self, unit: Unit, store_timestamp: int, *, extended: bool = True) -> bool:
        """Take one unit."""
        one = [np.array([value], np.int64) for value in (unit.phy_offset, unit.size, unit.tags_code, store_timestamp)]
        return self.put_units(unit.queue_offset, *one) > 0

    def put_units(
        self,
        queue_offset: int,
        phy_offsets: np.ndarray,
        sizes: np.ndarray,
        tags_codes: np.ndarray,
        store_timestamps: np.ndarray,
    ) -> int:
        """Take units that follow each other, as of `ConsumeQueue.put_units`; those before the end are passed over."""
        skip = min(max(self.unit_num - queue_offset, 0), len(phy_offsets))
        count = len(phy_offsets) - skip
        if count <= 0:
            return 0
        first = queue_offset + skip
        # The arrays that came are filled again with the next records.
        columns = [np.array(each[skip:], np.int64) for each in (phy_offsets, sizes, tags_codes)]
        self.units_there.add(np.arange(first, first + count, dtype=np.int64), *columns, np.ones(count, np.int64))
        self._last = Unit(first + count - 1, *(int(each[-1]) for each in columns))
        return count


class CollectedBatchQueue(_Collecting, BatchConsumeQueue):
    """A batch queue that collects its units."""

    @property
    def max_queue_offset(self) -> int:
        """int: queue offset of the next message."""
        return 0 if self._last is None else self._last.queue_offset + self._last.num

    def put(self, unit: Unit, store_timestamp: int, *, extended: bool = True) -> bool:
        """Take one unit."""
        if self._last is not None and unit.phy_offset <= self._last.phy_offset:
            return False
        self.units_there.add(*(np.array([value], np.int64) for value in unit))
        self._last = unit
        return True


class CollectedQueues(ConsumeQueueStore):
    """Queues to dispatch into, which collect; none has files."""

    def _make(self, topic: str, queue_id: int) -> AnyConsumeQueue:
        if topic in self._batch_topics:
            return CollectedBatchQueue(topic, queue_id)
        return CollectedQueue(topic, queue_id)

    def forget(self, topic: str, queue_id: int) -> None:
        """Take a queue out of the list again."""
        with self._lock:
            self._queues.pop((topic, queue_id), None)

    def collected(self) -> dict[tuple[str, int], CollectedUnits]:
        """dict of (str, int) to CollectedUnits: those of each queue that has any, by topic and queue id."""
        found = {}
        for queue in self.opened():
            assert isinstance(queue, CollectedQueue | CollectedBatchQueue)
            if queue.last_record() is not None:
                found[queue.topic, queue.queue_id] = queue.units_there
        return found
