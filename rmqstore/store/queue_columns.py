"""Messages of a queue as Arrow columns, whatever kind of queue it is: its places, and the records there.

Owns the one way from `Places` to record batches.  What a queue lacks, and units that lead to no record, are reported by the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rmqstore import _numpy as np
from rmqstore.message import encode_java_utf8
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import LogSource, Part, Places, QueueSource, without_record
from rmqstore.store.columns import Columns

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["chosen", "queue_batches", "queue_rows", "read_places", "rows_at"]


def rows_at(
    log: LogSource, columns: Columns, phy_offsets: np.ndarray
) -> tuple[list[pa.RecordBatch], np.ndarray]:
    """Return the chosen records at these offsets as batches, and the numbers of the offsets that became rows."""
    return _rows(log, columns, phy_offsets)


def queue_rows(queue: QueueSource, columns: Columns, places: Places) -> tuple[list[pa.RecordBatch], np.ndarray]:
    """Return the chosen records at these places of a queue as batches, and the numbers of the places that became rows.

    A row whose record is another message is marked as corrupt.
    """
    return _rows(queue.log, columns, places.phy_offsets, queue, places)


def _rows(
    log: LogSource,
    columns: Columns,
    phy_offsets: np.ndarray,
    queue: QueueSource | None = None,
    places: Places | None = None,
) -> tuple[list[pa.RecordBatch], np.ndarray]:
    topic = None if queue is None else encode_java_utf8(queue.topic)
    batches = []
    taken = np.zeros(len(phy_offsets), np.uint8)
    any_size = np.empty(0, np.int32)
    for part, regions, bases, numbers in log.located(phy_offsets):
        first, num = 0, len(numbers)
        while first < num:
            first = columns.out.fill_at(
                regions,
                bases,
                numbers,
                phy_offsets[part],
                any_size if places is None else places.sizes[part],
                taken[part],
                first,
                topic,
                0 if queue is None else queue.queue_id,
                None if places is None else places.queue_offsets[part],
            )
            if first < num:
                batches.append(columns.take())
    if columns.out.count:
        batches.append(columns.take())
    return batches, np.flatnonzero(taken)


def chosen(queue: QueueSource, places: Places, selection: Selection) -> Places:
    """Return the places that may lead to a message that is asked for, by tags codes and phy offsets."""
    if selection.tags is not None:
        places = places.where(selection.may_have_codes(queue.resolved_codes(places.tags_codes)))
    if selection.begin_phy_offset is not None:
        places = places.where(places.phy_offsets >= selection.begin_phy_offset)
    if selection.end_phy_offset is not None:
        places = places.where(places.phy_offsets < selection.end_phy_offset)
    return places


def read_places(queue: QueueSource, columns: Columns, places: Places) -> tuple[list[pa.RecordBatch], Places]:
    """Return the chosen records at these places as batches, and the places at which no record of its size begins."""
    batches, rows = queue_rows(queue, columns, places)
    if len(rows) == len(places):
        return batches, Places.none()
    left = places[np.setdiff1d(np.arange(len(places)), rows, assume_unique=True)]
    return batches, left[without_record(queue.log, left)]


def queue_batches(parts: Iterable[Part], columns: Columns, selection: Selection) -> Iterator[pa.RecordBatch]:
    """Yield the chosen messages of these parts of queues, in their order.

    Parameters
    ----------
    columns : Columns
        Of the same selection, with ``by_place``.
    selection : Selection
        Of it the tags, the phy offsets, and `max_num`: batches end with as many rows at least.
    """
    left = INT64_MAX if selection.max_num is None else selection.max_num
    units = ((part.queue, each) for part in parts for each in part.queue.places(part.begin, part.end))
    for queue, each in units if left > 0 else ():
        places = chosen(queue, each, selection)
        at = 0
        while at < len(places) and left > 0:
            part = places if not at and left >= len(places) else places[at : at + left]
            batches, unread = read_places(queue, columns, part)
            at += len(part)
            left -= sum(batch.num_rows for batch in batches)
            # What was read is given before what could not be, which may be an error.
            yield from batches
            if len(unread):
                queue.report_unread(unread)
        if left <= 0:
            return
