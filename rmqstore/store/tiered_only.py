"""What only tiered storage has of an open store.

Owns which queue offsets these are, for a reader that goes over queues and log by itself, as an export does. It reads no message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rmqstore.selection import INT64_MAX, Selection
from rmqstore.spans import Span
from rmqstore.store.tiered_columns import FlatRange, flat_ranges
from rmqstore.store.tiered_reading import tiered_parts, tiered_ranges

if TYPE_CHECKING:
    from rmqstore.store.message_store import MessageStore

__all__ = ["only_tiered", "tiered_spans"]


def only_tiered(store: MessageStore, selection: Selection) -> Iterator[FlatRange]:
    """Yield what of a selection is not in the local log, queue by queue; nothing for a range of the local log."""
    if store.tiered is None or selection.begin_phy_offset is not None or selection.end_phy_offset is not None:
        return
    if not selection.by_queue:
        yield from tiered_ranges(store._state, store.tiered, selection)
        return
    low = selection.begin_queue_offset or 0
    high = INT64_MAX if selection.end_queue_offset is None else selection.end_queue_offset
    for queue, _, _ in flat_ranges(store.tiered, selection):
        for begin, end in tiered_parts(store._state, queue, tell=True):
            if max(begin, low) < min(end, high):
                yield FlatRange(queue, max(begin, low), min(end, high))


def tiered_spans(store: MessageStore, topic: str, queue_id: int) -> list[Span]:
    """Return the queue offsets of a queue that are read from tiered storage; first, and one after the last."""
    queue = None if store.tiered is None else store.tiered.queue(topic, queue_id)
    return [] if queue is None else tiered_parts(store._state, queue)
