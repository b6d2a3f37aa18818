"""A store whose older messages are in tiered storage: reading and querying both as one.

Owns how the two parts of a queue follow each other: what the local log no longer has comes from the flat files, each queue
offset once.  Offsets that neither has are not a silent gap: an answer that would pass over them is an error, or a finding.
It is for stores opened read-only; those without tiered storage never come here.

Facts (RocketMQ 5.5.0, TieredMessageStore): below the oldest store time of the local log a query by key goes on in tiered
storage, with that time as its end, whatever end was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rmqstore.arguments import check_index_type
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import Finding, StoreError
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.message import MessageExt
from rmqstore.spans import Span, without
from rmqstore.store.columns import chosen_columns, tag_texts, time_range
from rmqstore.store.querying import Querying
from rmqstore.store.reading import MAX_PULL_BYTES, MIN_PULL_BYTES, Reading
from rmqstore.store.results import GetMessageResult, GetMessageStatus, QueryResult
from rmqstore.store.store_state import StoreState
from rmqstore.store.tiered_columns import FlatRange, chosen, flat_ranges, key_rows_table, stretch_batches, tags_codes
from rmqstore.store.tiered_shares import are_believed, in_log

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "TieredQuerying",
    "TieredReading",
    "flat_table",
    "gap_finding",
    "get_flat",
    "query_flat",
    "report_gap",
    "tiered_parts",
    "tiered_ranges",
]

_INT64_MAX = 2**63 - 1


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


def tiered_ranges(
    state: StoreState, flat_store: FlatStore, topics: Iterable[str] | None, queue_ids: Iterable[int] | None
) -> list[FlatRange]:
    """list of FlatRange: what tiered storage has and a scan of the local log does not give; gaps are reported.

    Parameters
    ----------
    topics, queue_ids : iterable, optional
        Only these.
    """
    pairs = [(part.queue, _local_queue(state, part.queue)) for part in flat_ranges(flat_store, topics, queue_ids)]
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
    queue: FlatQueue,
    queue_offset: int,
    end: int,
    max_num: int,
    max_bytes: int | None,
    wanted: dict[int, set[str]] | None,
    bounds: tuple[int, int],
) -> GetMessageResult:
    """GetMessageResult: messages of tiered storage from `queue_offset`, which it has, to before `end`."""
    limit = MAX_PULL_BYTES if max_bytes is None else min(max(max_bytes, MIN_PULL_BYTES), MAX_PULL_BYTES)
    messages, following = queue.read(queue_offset, end, min(max(max_num, 0), _INT64_MAX), limit, wanted)
    status = GetMessageStatus.FOUND if messages else GetMessageStatus.NO_MATCHED_MESSAGE
    return GetMessageResult(status, messages, following, *bounds)


def query_flat(
    flat_store: FlatStore, topic: str, key: str, index_type: str | None, low: int, high: int
) -> list[MessageExt]:
    """list of MessageExt: the messages of tiered storage with a key and a store time in the range, newest first."""
    found = flat_store.find_messages(topic, key, index_type)
    return [message for message in found if low <= message.store_timestamp <= high]


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

    def get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_num: int,
        max_bytes: int | None,
        wanted: dict[int, set[str]] | None,
    ) -> GetMessageResult:
        """See `MessageStore.get_message`."""
        queue, parts = self._parts(topic, queue_id)
        if queue is None or not parts:
            return super().get(topic, queue_id, queue_offset, max_num, max_bytes, wanted)
        bounds = self.bounds_of(topic, queue_id)
        for begin, end in parts:
            if begin <= queue_offset < end:
                return get_flat(queue, queue_offset, end, max_num, max_bytes, wanted, bounds)
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
        found = super().get(topic, queue_id, queue_offset, max_num, max_bytes, wanted)
        return GetMessageResult(found.status, found.messages, found.next_queue_offset, *bounds)

    def table(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_num: int | None,
        wanted: dict[int, set[str]] | None,
        columns: Iterable[str] | None,
        views: bool,
        end: int = _INT64_MAX,
    ) -> pa.Table:
        """See `MessageStore.get_table`; `end` is of the local queue alone."""
        queue, parts = self._parts(topic, queue_id)
        local = super().bounds_of(topic, queue_id)
        if queue is None or not parts:
            return super().table(topic, queue_id, queue_offset, max_num, wanted, columns, views, end)
        tags = tag_texts(wanted)
        names = chosen_columns(columns)
        tables: list[Any] = []
        left = max_num
        at = max(queue_offset, self.bounds_of(topic, queue_id)[0])
        for begin, until, is_flat in _pieces(parts, local):
            if until <= at or left == 0:
                continue
            if begin > at:
                report_gap(queue, at, begin)
            first = max(begin, at)
            if is_flat:
                table = flat_table(
                    queue, first, until, left, tags, names, views, self.commit_log.crc_check, self.state.check_open
                )
            else:
                # What is put meanwhile is read too.
                last = _INT64_MAX if until == local[1] else until
                table = super().table(topic, queue_id, first, left, wanted, names, views, last)
            tables.append(table)
            left = None if left is None else left - table.num_rows
            at = until
        if not tables:
            return super().table(topic, queue_id, max(at, local[1]), 0, wanted, names, views)
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
    queue: FlatQueue,
    begin: int,
    end: int,
    max_num: int | None,
    tags: list[str] | None,
    columns: Iterable[str] | None,
    views: bool,
    crc_check: int,
    check_open: Callable[[], object],
) -> pa.Table:
    """pyarrow.Table: messages of tiered storage from queue offset `begin` to before `end`, at most `max_num`."""
    step = 8192 if max_num is None else min(max(max_num, 1), 8192)
    made = chosen(columns, step, crc_check, views, (), tags, (-_INT64_MAX - 1, _INT64_MAX))()
    codes = tags_codes(tags)
    batches: list[Any] = []
    num = 0
    for first, offsets, sizes, unit_codes in queue.unit_arrays(begin, end, 8192 if tags is not None else step):
        check_open()
        found, findings = stretch_batches(made, queue, first, offsets, sizes, unit_codes, codes)
        for finding in findings:
            queue.report(finding)
        batches += found
        num += sum(batch.num_rows for batch in found)
        if max_num is not None and num >= max_num:
            break
    return made.pa.Table.from_batches(batches, schema=made.schema).slice(0, max_num)


def _concat(tables: list[Any]) -> Any:
    import pyarrow

    return pyarrow.concat_tables(tables)


class TieredQuerying(Querying):
    """As `Querying`, of a store and its tiered storage."""

    def __init__(self, state: StoreState, flat_store: FlatStore):
        super().__init__(state)
        self.flat_store = flat_store
        if state.key_query is not None:
            # The short way knows the local index alone.
            state.key_query.closed = True

    def _older(
        self, local: QueryResult, topic: str, key: str, index_type: str | None, low: int, high: int
    ) -> list[MessageExt]:
        # The messages that the local log did not give, whatever the units of its queues say.
        found = query_flat(self.flat_store, topic, key, index_type, low, high)
        known = {(message.queue_id, message.queue_offset) for message in local}
        return [message for message in found if (message.queue_id, message.queue_offset) not in known]

    def query(
        self,
        topic: str,
        key: str,
        max_num: int,
        begin: float | None,
        end: float | None,
        max_log_bytes: int | None,
        progress: Callable[[int, int], object] | None,
        index_type: str | None,
    ) -> _BothResult:
        """See `MessageStore.query_message`; those of the local log first, which are newer."""
        local = super().query(topic, key, max_num, begin, end, max_log_bytes, progress, index_type)
        if max_num < 0 or local.truncated:
            whole = _BothResult(local, local.truncated, local.uncovered)
            whole.local_num = len(local)
            return whole
        older = self._older(local, topic, key, index_type, *time_range(begin, end))
        room = max_num - len(local)
        found = _BothResult([*local, *older[:room]], len(older) > room, local.uncovered)
        found.local_num = len(local)
        return found

    def like_java(
        self, topic: str, key: str, max_num: int, begin: float | None, end: float | None, index_type: str | None
    ) -> QueryResult:
        """RocketMQ's TieredMessageStore.queryMessage."""
        log = self.commit_log
        earliest = log.store_timestamp_at(log.min_offset)
        if earliest <= 0:
            return super().like_java(topic, key, max_num, begin, end, index_type)
        low, high = int(begin or 0), _INT64_MAX if end is None else int(end)
        found = QueryResult() if high < earliest else super().like_java(topic, key, max_num, begin, end, index_type)
        if len(found) < max_num and low < earliest:
            found.extend(self.flat_store.like_java(topic, key, max_num - len(found), low, earliest))
        return found

    def table(
        self,
        keys: Any,
        topic: str | Iterable[str],
        columns: Iterable[str] | None,
        max_num: int,
        begin: float | None,
        end: float | None,
        index_type: str | None,
        max_log_bytes: int | None,
        progress: Callable[[int, int], object] | None,
        views: bool,
    ) -> pa.Table:
        """See `MessageStore.query_table`; each key is asked for by itself."""
        check_index_type(index_type)
        texts = _texts(keys, "key")
        topics = _texts(topic, "topic") if not isinstance(topic, str) else [topic] * len(texts)
        if len(topics) != len(texts):
            raise ValueError(f"{len(topics)} topics for {len(texts)} keys; give one, or one for each key")
        names = chosen_columns(columns)
        rows: list[tuple[int, tuple[str, int] | None, int]] = []
        for number, (text, name) in enumerate(zip(texts, topics)):
            found = self.query(name, text, max_num, begin, end, max_log_bytes, progress, index_type)
            for position, message in enumerate(found):
                place = (name, message.queue_id) if position >= found.local_num else None
                rows.append((number, place, message.phy_offset))
        return key_rows_table(self.commit_log, self.flat_store, rows, texts, names, views)


def _texts(values: Any, what: str) -> list[str]:
    values = values.to_pylist() if hasattr(values, "to_pylist") else [values] if isinstance(values, str) else list(values)
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{what} {value!r} is not text: give str")
    return values  # type: ignore[no-any-return]


class _BothResult(QueryResult):
    # How many of the messages are the local log's, which come first.
    __slots__ = ("local_num",)
    local_num: int
