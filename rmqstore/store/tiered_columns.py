"""The messages of tiered storage as Arrow columns: units lead to records, and the compiled decoder reads these in place.

Owns cutting queues into stretches, decoding them ahead on further threads, and telling apart what was not chosen from what cannot
be read.  It never decodes a record by itself, and keeps a constant working set.  A row is the same as one of a scan of a log;
its phy offset is the offset in the tiered log of its queue.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rmqstore import _numpy as np
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.pieces import SCAN_WINDOW, usable_cpus
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.flatfile.flat_store import FlatRange, FlatStore
from rmqstore.selection import Selection
from rmqstore.sources import Places
from rmqstore.store.columns import ColumnOptions, Columns
from rmqstore.store.key_columns import query_schema
from rmqstore.store.queue_columns import chosen, read_places, rows_at

if TYPE_CHECKING:
    from concurrent.futures import Future

    import pyarrow as pa

__all__ = ["FlatScan", "key_rows_table"]

# Units that one thread decodes at a time, about so many bytes of records at most, and how many threads decode at most.
_STRETCH_UNITS = 32768
_STRETCH_BYTES = 16 * 1024 * 1024
_THREADS = 4


# Places of a queue that one thread decodes.
_Stretch = tuple[FlatQueue, Places]
# Its batches, and the places at which there is no record.
_Decoded = tuple[list["pa.RecordBatch"], Places]


class FlatScan:
    """Decodes messages of tiered storage in order, on further threads ahead of the caller where there is more than a little.

    Parameters
    ----------
    selection : Selection
    options : ColumnOptions
    crc_check : int
        See `CommitLog.crc_check`.
    check_open : callable
        Raises when the store was closed.
    """

    def __init__(
        self, selection: Selection, options: ColumnOptions, crc_check: int, check_open: Callable[[], object]
    ):
        self.selection, self.options, self.crc_check, self.check_open = selection, options, crc_check, check_open
        self._passed = _Passed()
        # Errors of the arguments come at once.
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
        # The first stretch is decoded before there is any thread: small storages, and callers that want one batch, need none.
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
        # What was read is given before what could not be, which may end the scan.
        batches, unread = decoded
        batches.reverse()
        while batches:
            self.check_open()
            yield batches.pop()
        stretch[0].report_unread(unread)
        if not columns.views:
            self._passed.add(stretch)


class _Passed:
    """Lets go of the pages of what was given, so that a long scan keeps a constant working set."""

    def __init__(self) -> None:
        self.size = 0
        self.parts: list[tuple[FlatQueue, int, int]] = []

    def add(self, stretch: _Stretch) -> None:
        """Say that nothing of `stretch` is needed any more."""
        queue, places = stretch
        begin, end = int(places.phy_offsets.min()), int((places.phy_offsets + places.sizes).max())
        if end <= begin:
            return
        self.parts.append((queue, begin, end))
        self.size += end - begin
        if self.size >= SCAN_WINDOW:
            for queue, first, last in self.parts:
                queue.log.release_pages(first, last)
            self.parts, self.size = [], 0


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
    """pyarrow.Table: as of `MessageStore.query_table`, of messages that were found.

    Parameters
    ----------
    rows : sequence of (int, (str, int) or None, int)
        For each message the number of its key, the queue of tiered storage that has it or None for the local log, and its
        offset in that log.
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
