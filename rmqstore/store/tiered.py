"""Read what the local log no longer has from tiered storage, by queue, by key and in scans, each message once.

Units of a local queue count if those at both ends point to their messages and the message before them is older than the log;
otherwise the log is scanned once.  Queue offsets that neither has are reported.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.pieces import SCAN_WINDOW, usable_cpus
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import OffsetOutOfRangeError, StoreError
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.flatfile.flat_store import FlatRange, FlatStore
from rmqstore.message import MessageExt, encode_java_utf8
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import DamagePolicy, Joined, Part, Places
from rmqstore.spans import Span, joined, without
from rmqstore.store.columns import ColumnOptions, Columns, scan_log
from rmqstore.store.placed_columns import AskedKeys, chosen, query_schema, read_places, rows_at
from rmqstore.store.results import QueryResult
from rmqstore.store.store_state import Older, StoreState

if TYPE_CHECKING:
    from concurrent.futures import Future

    import pyarrow as pa

__all__ = ["FlatScan", "Tiered", "in_log", "key_rows_table"]

# The most units and about the most bytes of records that one thread decodes at a time, and the most threads.
_STRETCH_UNITS = 32768
_STRETCH_BYTES = 16 * 1024 * 1024
_THREADS = 4


# Places of a queue that one thread decodes.
_Stretch = tuple[FlatQueue, Places]
# Its batches, and the places at which there is no record.
_Decoded = tuple[list["pa.RecordBatch"], Places]


class FlatScan:
    """Decodes messages of tiered storage in order, on further threads ahead of the caller where there is more than a little."""

    def __init__(self, selection: Selection, options: ColumnOptions, crc_check: int, check_open: Callable[[], object]):
        self.selection, self.options, self.crc_check, self.check_open = selection, options, crc_check, check_open
        # Stretches whose pages are still to be released, each as queue, begin and end; and their bytes.
        self._passed: list[tuple[FlatQueue, int, int]] = []
        self._passed_size = 0
        # Errors of the arguments are raised at once.
        self._spare = [self._columns()]

    def _columns(self) -> Columns:
        return Columns(self.options, self.crc_check, self.selection, by_place=True)

    def read(self, ranges: Iterable[FlatRange], *, use_threads: bool) -> pa.RecordBatchReader:
        """Return the chosen messages of these ranges as record batches, none of them empty; `use_threads` decodes ahead."""
        (columns,) = self._spare
        return columns.pa.RecordBatchReader.from_batches(columns.schema, self._batches(ranges, use_threads))

    def _batches(self, ranges: Iterable[FlatRange], use_threads: bool) -> Iterator[pa.RecordBatch]:
        stretches = (each for part in ranges for each in _stretches(part))
        thread_num = min(usable_cpus(), _THREADS) if use_threads else 1
        # The first stretch is decoded before any thread starts: small storages, and callers that want one batch, need none.
        for stretch in stretches if thread_num < 2 else itertools.islice(stretches, 1):
            (columns,) = self._spare
            yield from self._given(stretch, columns, self._decoded(stretch, columns))
        second = next(stretches, None)
        if second is not None:
            yield from self._ahead(itertools.chain((second,), stretches), thread_num)

    def _ahead(self, stretches: Iterator[_Stretch], thread_num: int) -> Iterator[pa.RecordBatch]:
        # Imported here because most scans of tiered storage are small.
        from concurrent.futures import ThreadPoolExecutor

        waiting: deque[tuple[_Stretch, Columns, Future[_Decoded]]] = deque()
        threads = ThreadPoolExecutor(thread_num, "rmqstore-scan")

        def next_batches() -> Iterator[pa.RecordBatch]:
            stretch, columns, decoded = waiting.popleft()
            batches, unread = decoded.result()
            self._spare.append(columns)
            yield from self._given(stretch, columns, (batches, unread))

        try:
            for stretch in stretches:
                columns = self._spare.pop() if self._spare else self._columns()
                waiting.append((stretch, columns, threads.submit(self._decoded, stretch, columns)))
                if len(waiting) > thread_num:
                    yield from next_batches()
            while waiting:
                yield from next_batches()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def _decoded(self, stretch: _Stretch, columns: Columns) -> _Decoded:
        queue, places = stretch
        return read_places(queue, columns, chosen(queue, places, self.selection))

    def _given(self, stretch: _Stretch, columns: Columns, decoded: _Decoded) -> Iterator[pa.RecordBatch]:
        # Batches come before the report of unreadable places, which may end the scan.
        batches, unread = decoded
        batches.reverse()
        while batches:
            self.check_open()
            yield batches.pop()
        stretch[0].report_unread(unread)
        if not columns.views:
            self._release(*stretch)

    def _release(self, queue: FlatQueue, places: Places) -> None:
        # Releases the pages of many stretches at once, so that a long scan keeps a constant working set.
        begin, end = int(places.phy_offsets.min()), int((places.phy_offsets + places.sizes).max())
        if end > begin:
            self._passed.append((queue, begin, end))
            self._passed_size += end - begin
        if self._passed_size >= SCAN_WINDOW:
            for queue, first, last in self._passed:
                queue.log.release_pages(first, last)
            self._passed, self._passed_size = [], 0


def _stretches(part: FlatRange) -> Iterator[_Stretch]:
    for places in part.queue.places(part.begin, part.end, _STRETCH_UNITS):
        at = 0
        ends = np.cumsum(np.clip(places.sizes, 0, None).astype(np.int64))
        while at < len(places):
            done = int(ends[at - 1]) if at else 0
            until = max(int(np.searchsorted(ends, done + _STRETCH_BYTES)), at + 1)
            yield part.queue, places[at:until]
            at = until


def key_rows_table(
    log: CommitLog,
    flat_store: FlatStore,
    rows: Sequence[tuple[int, tuple[str, int] | None, int]],
    keys: Sequence[str],
    options: ColumnOptions,
) -> pa.Table:
    """Return a table like `MessageStore.query_table`, of messages that were found.

    A row is the number of a key, the queue of tiered storage that has the message (None: the log), and the offset in that log.
    """
    made = Columns(dataclasses.replace(options, batch_size=max(len(rows), 1)), log.crc_check)
    pa = made.pa
    tables, order = [], np.empty(len(rows), np.int64)
    done = 0
    sources: dict[tuple[str, int] | None, list[int]] = {}
    for row, (_, source, _) in enumerate(rows):
        sources.setdefault(source, []).append(row)
    for source, places in sources.items():
        offsets = np.array([rows[row][2] for row in places], np.int64)
        queue = None if source is None else flat_store.queue(*source)
        batches, taken = rows_at(log if queue is None else queue.log, made, offsets)
        tables += batches
        order[done : done + len(taken)] = np.array(places)[taken]
        done += len(taken)
    table = pa.Table.from_batches(tables, schema=made.schema)
    wanted = np.argsort(order[:done], kind="stable")
    if options.views:
        # Arrow does not take rows of views by their numbers.
        parts = [table.slice(row, 1) for row in wanted.tolist()]
        table = pa.concat_tables(parts) if parts else table
    else:
        table = table.take(pa.array(wanted))
    numbers = np.array([rows[row][0] for row in np.sort(order[:done]).tolist()], np.int32)
    first = [pa.array([keys[number] for number in numbers.tolist()], pa.string()), pa.array(numbers, pa.int32())]
    return pa.Table.from_arrays([*first, *table.columns], schema=query_schema(options.names, options.views))


class Tiered(Older):
    """The older messages of a store, in tiered storage; for stores that are open read-only."""

    one_log = False
    flat_store: FlatStore

    def __init__(self, state: StoreState, flat_store: FlatStore):
        self.state, self.flat_store = state, flat_store

    @property
    def notes(self) -> list[str]:
        """See `Older`."""
        return self.flat_store.notes

    def keys(self) -> list[tuple[str, int]]:
        """See `Older`."""
        return self.flat_store.keys()

    def pass_over(self, damage: DamagePolicy) -> None:
        """See `Older`."""
        self.flat_store.damage, self.flat_store.goes_on = damage, True

    def refresh(self, *, uploads: bool) -> None:
        """See `Older`."""
        if uploads:
            self.flat_store.load()
        else:
            self.flat_store.refresh()

    def close(self) -> None:
        """See `Older`."""
        self.flat_store.close()

    # ------------------------------------------------------------------------------------------------------------ by queue

    def queue(self, topic: str, queue_id: int, local: Joined) -> Joined:
        """See `Older`."""
        flat = self.flat_store.queue(topic, queue_id)
        if flat is None:
            return local
        flat.report_lacking()
        older = self._spans(flat)
        parts = [Part(flat, *span) for span in older]
        for each in local.parts:
            left = without(each.begin, each.end, older)
            parts += [Part(each.queue, *span, span[1] == each.end) for span in left]
            if each.begin >= each.end:
                parts.append(each)
        return Joined(parts, flat.report_gap)

    def _spans(self, queue: FlatQueue, *, tell: bool = False) -> list[Span]:
        # The queue offsets to read from tiered storage; with `tell`, reports offsets that neither has.
        local = self._local_queue(queue)
        low, high = self.state.bounds(local)
        begin, end = queue.min_queue_offset, queue.max_queue_offset
        if not _are_trusted(self.state.commit_log, queue, local):
            return without(begin, end, [])
        if tell and begin < end < low:
            queue.report_gap(end, low)
        return without(begin, end, [(low, high)] if low < high else [])

    def _local_queue(self, queue: FlatQueue) -> AnyConsumeQueue | None:
        local = self.state.queue(queue.topic, queue.queue_id)
        low, high = self.state.bounds(local)
        if queue.max_queue_offset < low:
            # The broker uploaded these before it deleted them from its log.
            self.flat_store.refresh()
        if low >= high and self.state.undispatched.left_out is not None:
            raise StoreError(
                f"queue {queue.topic}/{queue.queue_id} has no units next to the log, so it is unknown which messages are in both; "
                "rebuild them first: rmqstore rebuild --what consumequeue",
                self.state.path,
            )
        return local

    def spans(self, topic: str, queue_id: int) -> list[Span]:
        """See `Older`."""
        queue = self.flat_store.queue(topic, queue_id)
        return [] if queue is None else self._spans(queue)

    def ranges(self, selection: Selection) -> Iterator[FlatRange]:
        """See `Older`."""
        if selection.begin_phy_offset is not None or selection.end_phy_offset is not None:
            return
        if not selection.by_queue:
            yield from self._not_in_log(selection)
            return
        low = selection.begin_queue_offset or 0
        high = INT64_MAX if selection.end_queue_offset is None else selection.end_queue_offset
        for queue, _, _ in self.flat_store.ranges(selection):
            for begin, end in self._spans(queue, tell=True):
                if max(begin, low) < min(end, high):
                    yield FlatRange(queue, max(begin, low), min(end, high))

    def _not_in_log(self, selection: Selection) -> Iterator[FlatRange]:
        # The messages that a scan of the local log lacks.
        pairs = [(part.queue, self._local_queue(part.queue)) for part in self.flat_store.ranges(selection)]
        for (queue, local), spans in zip(pairs, in_log(self.state.commit_log, pairs)):
            begin, end = queue.min_queue_offset, queue.max_queue_offset
            # A local queue whose messages are all gone still shows where it ended.
            low = spans[0][0] if spans else self.state.bounds(local)[0]
            if end < low:
                queue.report_gap(end, low)
            yield from (FlatRange(queue, *part) for part in without(begin, end, spans))

    def scan(self, selection: Selection, options: ColumnOptions, *, use_threads: bool) -> pa.RecordBatchReader:
        """See `Older`."""
        log = self.state.commit_log
        self.state.refresh()
        # The ranges are settled now: messages that the local log loses during the scan are in neither.
        ranges = list(self.ranges(selection))
        older = FlatScan(selection, options, log.crc_check, self.state.check_open).read(ranges, use_threads=use_threads)
        local = scan_log(log, selection, options, use_threads=use_threads)
        import pyarrow

        return pyarrow.RecordBatchReader.from_batches(older.schema, itertools.chain(older, local))

    # -------------------------------------------------------------------------------------------------------------- by key

    def with_key(self, local: QueryResult, selection: Selection) -> QueryResult:
        """See `Older`."""
        max_num = selection.max_num or 0
        if max_num < 0 or local.truncated:
            return local
        known = {(message.queue_id, message.queue_offset) for message in local}
        found = self.flat_store.find_messages(selection)
        older = [message for message in found if (message.queue_id, message.queue_offset) not in known]
        room = max_num - len(local)
        return QueryResult([*local, *older[:room]], len(older) > room, local.uncovered)

    def with_id(self, msg_id: str, topics: Iterable[str]) -> Iterator[MessageExt]:
        """See `Older`."""
        for topic in topics:
            yield from self.flat_store.find_messages(Selection((topic,), keys=(msg_id,), index_type="U"))

    def table(self, asked: AskedKeys, options: ColumnOptions, query: Callable[[Selection], QueryResult]) -> pa.Table:
        """See `Older`; each key is asked for by itself."""
        rows: list[tuple[int, tuple[str, int] | None, int]] = []
        for number, (topic, key) in enumerate(asked.sought.pairs()):
            selection = dataclasses.replace(asked.sought.selection, topics=(topic,), keys=(key,))
            local = query(selection)
            for position, message in enumerate(self.with_key(local, selection)):
                place = None if position < len(local) else (topic, message.queue_id)
                rows.append((number, place, message.phy_offset))
        return key_rows_table(self.state.commit_log, self.flat_store, rows, asked.column.to_pylist(), options)


# ------------------------------------------------------------------------------------------------- what the log has as well


def _are_trusted(log: CommitLog, flat: FlatQueue, local: AnyConsumeQueue | None) -> bool:
    """Return True if the units of a local queue point to its messages where they begin, and where they or tiered storage end."""
    low, high = _bounds(log, local)
    if local is None or low >= high:
        return True
    last = max(min(high, flat.max_queue_offset) - 1, low)
    return _message_of(log, local, low) is not None and _message_of(log, local, last) is not None


def in_log(log: CommitLog, queues: Sequence[tuple[FlatQueue, AnyConsumeQueue | None]]) -> list[list[Span]]:
    """Return for each queue of tiered storage the queue offsets that a scan of the local log reads, ascending and apart.

    If units are in doubt, the log is scanned once for all queues.
    """
    found: list[list[Span]] = []
    doubted: dict[tuple[bytes, int], list[Span]] = {}
    until = log.min_offset
    for flat, local in queues:
        spans: list[Span] = []
        place = _uncertain_to(log, flat, local)
        if place > log.min_offset:
            doubted[encode_java_utf8(flat.topic), flat.queue_id] = spans
            until = max(until, place)
        if place < log.max_offset:
            spans.append(_bounds(log, local))
        found.append(spans)
    if doubted:
        _scan_for(log, until, doubted)
    return [joined(spans) for spans in found]


def _bounds(log: CommitLog, local: AnyConsumeQueue | None) -> Span:
    return (0, 0) if local is None else local.bounds(log.min_offset)


def _message_of(log: CommitLog, local: AnyConsumeQueue, queue_offset: int) -> MessageExt | None:
    # The message of a unit; None if the unit points to no message, or to another one.
    unit = local.unit(queue_offset)
    message = None if unit is None else log.look_up(unit.phy_offset, unit.size)
    if unit is None or message is None or not message.check_queue(local.topic, local.queue_id, unit.queue_offset):
        return None
    return message


def _uncertain_to(log: CommitLog, flat: FlatQueue, local: AnyConsumeQueue | None) -> int:
    # The phy offset up to which units do not show what the log has of the queue: the log's begin if all is certain, its end if
    # nothing is.
    begin, end = log.min_offset, log.max_offset
    if begin >= end:
        return begin
    if not _is_whole(log):
        # Units point to segments that are gone.
        return end
    low, high = _bounds(log, local)
    if local is None or low >= high:
        return begin if _is_before(log, flat, flat.max_queue_offset - 1) else end
    first = _message_of(log, local, low)
    if first is None or high < flat.max_queue_offset or not _are_trusted(log, flat, local):
        return end
    # If units are gone or zero, the log may have messages before the first unit that is left.
    known = flat.max_queue_offset >= low and _is_before(log, flat, low - 1)
    return begin if known or low <= flat.min_queue_offset else first.phy_offset


def _is_whole(log: CommitLog) -> bool:
    offsets = log.files.file_offsets
    return all(before + log.segment_size == after for before, after in itertools.pairwise(offsets))


def _is_before(log: CommitLog, flat: FlatQueue, queue_offset: int) -> bool:
    # True if this message of tiered storage was surely stored before all that the log has.
    if queue_offset < flat.min_queue_offset:
        return True
    try:
        return 0 <= flat.store_timestamp_of(queue_offset) < log.store_timestamp_at(log.min_offset)
    except OffsetOutOfRangeError:
        return False  # Its broker deleted it.


def _scan_for(log: CommitLog, until: int, wanted: dict[tuple[bytes, int], list[Span]]) -> None:
    # A scan also returns records with a wrong CRC, marked; prepared and rolled back transactions are in no queue.
    for stretch, columns in log.scans(log.min_offset, until, check_crc=False, keys=False):
        if stretch.verdict is not Verdict.RECORD:
            continue
        groups, order = columns.by_queue(columns.queued()[0])
        for number, first, last in groups:
            topic, queue_id = columns.topics.queues[number]
            spans = wanted.get((columns.topics.topics[topic], queue_id))
            if spans is not None:
                offsets = columns.queue_offset[order[first:last]]
                cuts = np.flatnonzero(np.diff(offsets) != 1) + 1
                begins, ends = np.r_[0, cuts], np.r_[cuts, len(offsets)] - 1
                spans += zip(offsets[begins].tolist(), (offsets[ends] + 1).tolist())
