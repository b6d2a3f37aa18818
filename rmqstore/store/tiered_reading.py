"""Queues of a store whose older messages are in tiered storage, read as one.

Owns how the two parts of a queue follow each other: what the local log no longer has comes from the flat files, each queue
offset once.  Offsets that neither has are not a silent gap: an answer that would pass over them is an error, or a finding.
It is for stores opened read-only; those without tiered storage never come here.
"""

from __future__ import annotations

from functools import partial

from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import Finding, StoreError
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import Joined, Part
from rmqstore.spans import Span, without
from rmqstore.store.reading import local_queue
from rmqstore.store.store_state import StoreState
from rmqstore.store.tiered_columns import FlatRange, flat_ranges
from rmqstore.store.tiered_shares import are_believed, in_log

__all__ = [
    "TieredQueues",
    "gap_finding",
    "report_gap",
    "tiered_parts",
    "tiered_ranges",
]


def tiered_parts(state: StoreState, queue: FlatQueue, *, tell: bool = False) -> list[Span]:
    """list of (int, int): the queue offsets that are read from tiered storage, first and one after the last, ascending.

    The local queue has the others, by its units.  Where these do not lead to their messages at both ends, tiered
    storage gives all that it has.  With `tell`, offsets between the two that neither has are reported.
    """
    local = _local_queue(state, queue)
    low, high = state.bounds(local)
    begin, end = queue.min_queue_offset, queue.max_queue_offset
    if not are_believed(state.commit_log, queue, local):
        return without(begin, end, [])
    if tell and begin < end < low:
        report_gap(queue, end, low)
    return without(begin, end, [(low, high)] if low < high else [])


def _local_queue(state: StoreState, queue: FlatQueue) -> AnyConsumeQueue | None:
    local = state.queue(queue.topic, queue.queue_id)
    low, high = state.bounds(local)
    if queue.max_queue_offset < low:
        # The broker uploaded more before it deleted that from its log.
        for older in state.older:
            older.refresh()
    if low >= high and state.undispatched.left_out is not None:
        raise StoreError(
            f"queue {queue.topic}/{queue.queue_id} has no units beside the log, so nobody knows what is in both; "
            "rebuild them first: rmqstore rebuild --what consumequeue",
            state.path,
        )
    return local


def tiered_ranges(state: StoreState, flat_store: FlatStore, selection: Selection) -> list[FlatRange]:
    """list of FlatRange: what tiered storage has and a scan of the local log does not give; gaps are reported."""
    pairs = [(part.queue, _local_queue(state, part.queue)) for part in flat_ranges(flat_store, selection)]
    found = []
    for (queue, local), spans in zip(pairs, in_log(state.commit_log, pairs)):
        begin, end = queue.min_queue_offset, queue.max_queue_offset
        # A local queue whose messages are all gone still says where it ended.
        low = spans[0][0] if spans else state.bounds(local)[0]
        if end < low:
            report_gap(queue, end, low)
        found += [FlatRange(queue, *part) for part in without(begin, end, spans)]
    return found


def report_gap(queue: FlatQueue, begin: int, end: int) -> None:
    """Report that the queue offsets from `begin` to before `end` are in neither."""
    queue.report(gap_finding(queue, begin, end))


def gap_finding(queue: FlatQueue, begin: int, end: int) -> Finding:
    """Return the finding that the queue offsets from `begin` up to but not including `end` are in neither."""
    detail = f"queue offsets {begin} to {end} of {queue.topic}/{queue.queue_id} are in neither the local log nor tiered storage"
    return Finding(queue.units.path, 0, "gap", f"{detail}; go on at {end}")


class TieredQueues:
    """The queues of a store and of its tiered storage, each joined."""

    def __init__(self, state: StoreState, flat_store: FlatStore):
        self.state, self.flat_store = state, flat_store

    def queue(self, topic: str, queue_id: int, known_to: int = INT64_MAX) -> Joined:
        """Return a queue with the messages of tiered storage and of the local log; for `known_to` see `StoreState.queue`."""
        flat = self.flat_store.queue(topic, queue_id)
        if flat is None:
            return local_queue(self.state, topic, queue_id, known_to)
        if flat.lacks_units is not None:
            self.flat_store.report(flat.lacks_units)
        older = tiered_parts(self.state, flat)
        parts = [Part(flat, *span) for span in older]
        for local in local_queue(self.state, topic, queue_id, known_to).parts:
            left = without(local.begin, local.end, older)
            parts += [Part(local.queue, *span, span[1] == local.end) for span in left]
            if local.begin >= local.end:
                parts.append(local)
        return Joined(parts, partial(report_gap, flat))
