"""Which message of a queue in the local log has a store time in a range.

Owns reading the times of units: those of the records that they lead to, whatever kind of queue it is.  What leads to no record
has no time, and is warned of as in other reads of a queue.
"""

from __future__ import annotations

from collections.abc import Iterator

from rmqstore import _numpy as np
from rmqstore._columns import ArrowColumns
from rmqstore._core import PRE_FILL_SIZE
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.located import located
from rmqstore.commitlog.pieces import ScanProgress
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.unit_times import BLOCK_UNITS
from rmqstore.store.columns import queue_places

__all__ = ["find_in_times"]


def find_in_times(
    log: CommitLog, queue: AnyConsumeQueue, begin: int, end: int, times: tuple[int, int], *, newest: bool
) -> int | None:
    """Return the queue offset of the first message stored in a range of times; of the last with `newest`; None for none.

    Parameters
    ----------
    begin, end : int
        Search from queue offset `begin` up to but not including `end`.
    times : (int, int)
        ms since epoch, both included.
    """
    if isinstance(queue, BatchConsumeQueue):
        begin, end = queue.start_of(begin), queue.start_of(end)
    out = ArrowColumns(("store_timestamp",), BLOCK_UNITS)
    passed = ScanProgress(log.files)

    def times_of(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for phy_offsets, queue_offsets, sizes in _places(queue, first, last):
            is_real = (sizes > 0) & ((phy_offsets != 0) | (sizes != PRE_FILL_SIZE))
            phy_offsets, sizes = phy_offsets[is_real], sizes[is_real]
            if len(phy_offsets):
                passed.reach(int(phy_offsets[0]))
            taken = np.zeros(len(phy_offsets), np.uint8)
            for part, regions, bases, numbers in located(log, phy_offsets):
                out.fill_at(regions, bases, numbers, phy_offsets[part], sizes[part], taken[part])
            num, parts, _ = out.take()
            stored = np.frombuffer(parts["store_timestamp"][0], np.int64)[:num]
            found.append((queue_offsets[is_real][taken != 0], stored))
        return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])

    return queue.times.find(queue.spans(begin, end, backward=newest), times, times_of, newest=newest)


def _places(queue: AnyConsumeQueue, begin: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    # Phy offset, queue offset and size of the units with these numbers.
    if not isinstance(queue, BatchConsumeQueue):
        for phy_offsets, queue_offsets, sizes, _ in queue_places(queue, begin, end):
            yield phy_offsets, queue_offsets, sizes
        return
    while begin < end:
        phy_offsets, sizes, queue_offsets = queue.units(begin, end - begin)
        yield phy_offsets, queue_offsets, sizes
        begin = begin + len(phy_offsets) if len(phy_offsets) else queue.next_file_unit(begin)
