"""A store whose older messages are in tiered storage: reading both as one.

Owns how the two parts of a queue follow each other: what the local log no longer has comes from the flat files, each queue
offset once.  Offsets that neither has are not a silent gap: an answer that would pass over them is an error, or a finding.
It is for stores opened read-only; those without tiered storage never come here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import Finding, StoreError
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.selection import Selection
from rmqstore.spans import Span, without
from rmqstore.store.columns import ColumnOptions, Columns
from rmqstore.store.reading import MAX_PULL_BYTES, MIN_PULL_BYTES, Reading
from rmqstore.store.results import GetMessageResult, GetMessageStatus
from rmqstore.store.store_state import StoreState
from rmqstore.store.tiered_columns import FlatRange, Stretch, flat_ranges, stretch_batches
from rmqstore.store.tiered_shares import are_believed, in_log

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "TieredReading",
    "flat_table",
    "gap_finding",
    "get_flat",
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
    if queue.max_queue_offset < low and state.tiered is not None:
        # The broker uploaded more before it deleted that from its log.
        state.tiered.refresh()
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


def get_flat(
    queue: FlatQueue, selection: Selection, end: int, max_bytes: int | None, bounds: tuple[int, int]
) -> GetMessageResult:
    """GetMessageResult: messages of tiered storage from the first queue offset, which it has, to before `end`."""
    limit = MAX_PULL_BYTES if max_bytes is None else min(max(max_bytes, MIN_PULL_BYTES), MAX_PULL_BYTES)
    messages, following = queue.read(selection, end, limit)
    status = GetMessageStatus.FOUND if messages else GetMessageStatus.NO_MATCHED_MESSAGE
    return GetMessageResult(status, messages, following, *bounds)


class TieredReading(Reading):
    """As `Reading`, of a store and its tiered storage."""

    def __init__(self, state: StoreState, flat_store: FlatStore):
        super().__init__(state)
        self.flat_store = flat_store
        # The short way knows the local queues alone.
        assert state.queue_gets is not None
        state.queue_gets.closed = True

    def _parts(self, topic: str, queue_id: int) -> tuple[FlatQueue | None, list[tuple[int, int]]]:
        queue = self.flat_store.queue(topic, queue_id)
        if queue is None:
            return None, []
        if queue.lacks_units is not None:
            self.flat_store.report(queue.lacks_units)
        return queue, tiered_parts(self.state, queue)

    def bounds_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        """(int, int): first queue offset that is in either, and the one to come."""
        low, high = super().bounds_of(topic, queue_id)
        parts = self._parts(topic, queue_id)[1]
        if not parts:
            return low, high
        return (parts[0][0] if low >= high else min(low, parts[0][0])), max(high, parts[-1][1])

    def get(self, selection: Selection, max_bytes: int | None) -> GetMessageResult:
        """See `MessageStore.get_message`."""
        topic, queue_id = selection.topic, selection.queue_id
        queue_offset = selection.begin_queue_offset or 0
        queue, parts = self._parts(topic, queue_id)
        if queue is None or not parts:
            return super().get(selection, max_bytes)
        bounds = self.bounds_of(topic, queue_id)
        for begin, end in parts:
            if begin <= queue_offset < end:
                return get_flat(queue, selection, end, max_bytes, bounds)
        low, high = super().bounds_of(topic, queue_id)
        if queue_offset < bounds[0]:
            return GetMessageResult(GetMessageStatus.OFFSET_TOO_SMALL, [], *bounds[:1], *bounds)
        if queue_offset >= bounds[1]:
            one = queue_offset == bounds[1]
            status = GetMessageStatus.OFFSET_OVERFLOW_ONE if one else GetMessageStatus.OFFSET_OVERFLOW_BADLY
            return GetMessageResult(status, [], bounds[1], *bounds)
        if not low <= queue_offset < high:
            # Between the two, or after the local one and before the flat files go on.
            begins = [low, *(begin for begin, _ in parts)]
            following = min((begin for begin in begins if begin > queue_offset), default=bounds[1])
            report_gap(queue, queue_offset, following)
            return GetMessageResult(GetMessageStatus.OFFSET_FOUND_NULL, [], following, *bounds)
        found = super().get(selection, max_bytes)
        return GetMessageResult(found.status, found.messages, found.next_queue_offset, *bounds)

    def table(self, selection: Selection, options: ColumnOptions) -> pa.Table:
        """See `MessageStore.get_table`."""
        topic, queue_id = selection.topic, selection.queue_id
        queue, parts = self._parts(topic, queue_id)
        local = super().bounds_of(topic, queue_id)
        if queue is None or not parts:
            return super().table(selection, options)
        tables: list[Any] = []
        left = selection.max_num
        at = max(selection.begin_queue_offset or 0, self.bounds_of(topic, queue_id)[0])
        for begin, until, is_flat in _pieces(parts, local):
            if until <= at or left == 0:
                continue
            if begin > at:
                report_gap(queue, at, begin)
            # What is put meanwhile is read too.
            last = None if until == local[1] and not is_flat else until
            part = dataclasses.replace(
                selection, begin_queue_offset=max(begin, at), end_queue_offset=last, max_num=left
            )
            if is_flat:
                table = flat_table(queue, part, options, self.commit_log.crc_check, self.state.check_open)
            else:
                table = super().table(part, options)
            tables.append(table)
            left = None if left is None else left - table.num_rows
            at = until
        if not tables:
            nothing = dataclasses.replace(selection, begin_queue_offset=max(at, local[1]), max_num=0)
            return super().table(nothing, options)
        return tables[0] if len(tables) == 1 else _concat(tables)

    def find_in_times(
        self, topic: str, queue_id: int, begin: int, end: int, times: tuple[int, int], *, newest: bool
    ) -> int | None:
        """Find a message by store time, as of `Reading`, in both."""
        queue, parts = self._parts(topic, queue_id)
        pieces = _pieces(parts, super().bounds_of(topic, queue_id))
        for first, last, is_flat in reversed(pieces) if newest else pieces:
            span = max(first, begin), min(last, end)
            if is_flat:
                assert queue is not None
                found = queue.find_in_times(*span, times, newest=newest)
            else:
                found = super().find_in_times(topic, queue_id, *span, times, newest=newest)
            if found is not None:
                return found
        return None


def _pieces(parts: list[Span], local: Span) -> list[tuple[int, int, bool]]:
    # The queue offsets that tiered storage gives, and those that the local log does, in order; True for the first.
    return sorted([(*part, True) for part in parts] + [(*part, False) for part in without(*local, parts)])


def flat_table(
    queue: FlatQueue, selection: Selection, options: ColumnOptions, crc_check: int, check_open: Callable[[], object]
) -> pa.Table:
    """pyarrow.Table: messages of tiered storage between the queue offsets of `selection`, which it has."""
    made = Columns(options, crc_check, selection, by_place=True)
    batches: list[Any] = []
    num = 0
    begin, end = selection.begin_queue_offset or 0, selection.end_queue_offset or 0
    step = options.batch_size if selection.tags is None else 8192
    for units in queue.unit_arrays(begin, end, step):
        check_open()
        found, findings = stretch_batches(made, Stretch(queue, *units), selection)
        for finding in findings:
            queue.report(finding)
        batches += found
        num += sum(batch.num_rows for batch in found)
        if selection.max_num is not None and num >= selection.max_num:
            break
    return made.pa.Table.from_batches(batches, schema=made.schema).slice(0, selection.max_num)


def _concat(tables: list[Any]) -> Any:
    import pyarrow

    return pyarrow.concat_tables(tables)
