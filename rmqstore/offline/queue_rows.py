"""What a store holds of each of its queues, one row a queue.

Owns the columns of a queue's row, for the command line and for SQL.  It reads the first and the last unit of a queue
and the records that they lead to, and every unit only where the bytes are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.files.listing import ask_again
from rmqstore.offline.describe import QueueDescription
from rmqstore.store.message_store import MessageStore

__all__ = ["queue_rows"]


def queue_rows(
    store: MessageStore,
    topic: str | None = None,
    *,
    with_bytes: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """The queues of a store, or of one topic, ordered as the store has them.

    Parameters
    ----------
    with_bytes : bool
        Also the bytes of its records in the log, which every unit is read for.
    progress : callable, optional
        Told how many queues were read, and of how many.

    Yields
    ------
    dict
        ``topic``, ``queue_id``, ``kind``, ``min_queue_offset``, ``max_queue_offset``, ``messages``, ``files``,
        ``first_store_timestamp`` and ``last_store_timestamp`` (ms since epoch, None where there is no message), and
        ``size`` (bytes) where it is asked for.  Of a queue that the system does not give out there is a warning.

    Raises
    ------
    OSError
        No queue of `topic` is seen, and the system does not give out a folder in which they may be.
    """
    names = [name for name in store.queues.keys() if topic in (None, name[0])]
    if topic is not None and not names:
        store.queues.check_seen(topic)
    for number, (name, queue_id) in enumerate(names):
        if progress is not None:
            progress(number, len(names))
        try:
            row = ask_again(partial(_row, store, name, queue_id, with_bytes), store.refresh)
        except OSError as error:
            store.queues.leave_out(name, queue_id, error)
            continue
        if row is not None:
            yield row


def _row(store: MessageStore, topic: str, queue_id: int, with_bytes: bool) -> dict[str, Any] | None:
    queue = store.queues.find(topic, queue_id)
    if queue is None:
        return None
    described = QueueDescription.of(queue, store.commit_log.min_offset)
    low, high = described.min_queue_offset, described.max_queue_offset
    first, last = queue.unit(low) if low < high else None, queue.last_record()
    value = {
        **described.as_dict(),
        "first_store_timestamp": None if first is None else _time_at(store, first.phy_offset),
        "last_store_timestamp": None if last is None else _time_at(store, last.phy_offset),
    }
    if with_bytes:
        value["size"] = _bytes(queue, low, high)
    return value


def _time_at(store: MessageStore, phy_offset: int) -> int | None:
    timestamp = store.commit_log.store_timestamp_at(phy_offset)
    return timestamp if timestamp >= 0 else None


def _bytes(queue: AnyConsumeQueue, low: int, high: int) -> int:
    # The sizes of the records that the units from `low` up to but not including `high` lead to.
    total = 0
    for places in queue.places(low, high):
        total += int(places.sizes[places.are_real].sum())
    return total
