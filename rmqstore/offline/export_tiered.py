"""What an export takes from tiered storage: the chosen messages that the local log no longer has, queue by queue.

Owns finding them and giving them as messages or as record batches, in the order of their queues.  What damage does is the
export's own choice; `export` gives it in, and no place is passed over that it does not hear of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rmqstore import _numpy as np
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.message import MessageExt
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import STEP
from rmqstore.store.columns import Columns
from rmqstore.store.message_store import MessageStore
from rmqstore.store.placed_columns import chosen, rows_at
from rmqstore.store.results import QueryResult

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["older_batches", "older_messages"]


def _places(store: MessageStore, selection: Selection) -> Iterator[tuple[FlatQueue, list[int]]]:
    # Log offsets of the chosen messages of one queue, some at a time.
    wanted: set[tuple[str, int, int]] | None = None
    if selection.keys and selection.topics:
        wanted = {
            (message.topic, message.queue_id, message.queue_offset)
            for topic in dict.fromkeys(selection.topics)
            for key in dict.fromkeys(selection.keys)
            for message in store.older.with_key(QueryResult(), Selection((topic,), keys=(key,), max_num=INT64_MAX))
        }
    for queue, begin, end in store.older.ranges(selection):
        for each in queue.places(begin, end, STEP):
            places = chosen(queue, each, selection)
            found = []
            for row, queue_offset in enumerate(places.queue_offsets.tolist()):
                if wanted is not None and (queue.topic, queue.queue_id, queue_offset) not in wanted:
                    continue
                message = queue.log.look_up(int(places.phy_offsets[row]), int(places.sizes[row]))
                if message is None or not message.check_queue(queue.topic, queue.queue_id, queue_offset):
                    queue.report_unread(places[row : row + 1])
                elif selection.has(message):
                    found.append(int(places.phy_offsets[row]))
            if found:
                yield queue, found


def older_messages(
    store: MessageStore, selection: Selection, is_sound: Callable[[FlatQueue, MessageExt], bool]
) -> Iterator[MessageExt]:
    """The chosen messages that only tiered storage has; a unit that leads to no message of its queue is reported.

    Parameters
    ----------
    is_sound : callable
        Whether to give a message whose CRC or body may be wrong.
    """
    for queue, offsets in _places(store, selection):
        for offset in offsets:
            message = queue.log.look_up(offset)
            if message is None:
                _report_gone(queue, offset)
            elif is_sound(queue, message):
                yield message


def older_batches(
    store: MessageStore, selection: Selection, columns: Columns
) -> Iterator[tuple[FlatQueue, pa.RecordBatch]]:
    """The same as record batches of these columns, each of one queue."""
    for queue, offsets in _places(store, selection):
        batches, taken = rows_at(queue.log, columns, np.array(offsets, np.int64))
        for batch in batches:
            yield queue, batch
        for number in np.setdiff1d(np.arange(len(offsets)), taken).tolist():
            _report_gone(queue, offsets[number])


def _report_gone(queue: FlatQueue, log_offset: int) -> None:
    # It was there a moment ago; what the columns were not chosen to is no matter of a hole.
    hole = queue.log.hole_at(log_offset)
    if hole is not None:
        queue.report(hole.finding)
