"""Messages at given places as Arrow columns: those of a queue, whatever its kind, and those that keys find.

A queue reports the records that it lacks; an index judges its entries that point elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore._columns import KeyTexts, text_arrays
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.index.key_source import Candidates, KeySource, SoughtKeys
from rmqstore.message import encode_java_utf8
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import LogSource, Part, Places, QueueSource, without_record
from rmqstore.store.columns import ColumnOptions, Columns, chosen_columns, import_pyarrow, scan_schema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "AskedKeys",
    "chosen",
    "first_places",
    "key_table",
    "newest_first",
    "query_schema",
    "queue_batches",
    "read_places",
    "rows_at",
    "text_buffers",
]


def rows_at(
    log: LogSource,
    columns: Columns,
    phy_offsets: np.ndarray,
    queue: QueueSource | None = None,
    places: Places | None = None,
) -> tuple[list[pa.RecordBatch], np.ndarray]:
    """Return the chosen records at these offsets as batches, and the numbers of the offsets that became rows.

    With the places of a queue, a row whose record is another message is marked as corrupt.
    """
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
    batches, rows = rows_at(queue.log, columns, places.phy_offsets, queue, places)
    if len(rows) == len(places):
        return batches, Places.none()
    left = places[np.setdiff1d(np.arange(len(places)), rows, assume_unique=True)]
    return batches, left[without_record(queue.log, left)]


def queue_batches(parts: Iterable[Part], columns: Columns, selection: Selection) -> Iterator[pa.RecordBatch]:
    """Yield the chosen messages of these parts of queues, in their order."""
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
            # Batches come before the report of unreadable places, which may be an error.
            yield from batches
            if len(unread):
                queue.report_unread(unread)
        if left <= 0:
            return


# Rows of a batch of what keys find: most queries are one batch.
_KEY_ROWS = 32768


def query_schema(columns: Iterable[str] | None = None, views: bool = False) -> pa.Schema:
    """Return the schema of `MessageStore.query_table`: ``key`` and ``key_number``, then `scan_schema`."""
    import_pyarrow()
    return _query_schema(chosen_columns(columns), views)


class AskedKeys:
    """The keys of a question as columns, and the conditions of its selection."""

    def __init__(self, keys: Any, topics: Any, selection: Selection):
        pa = import_pyarrow()
        self.column = column = _text_column(pa, keys, "key")
        topic_column = _text_column(pa, topics, "topic")
        if len(topic_column) != len(column) and not isinstance(topics, str):
            raise ValueError(f"{len(topic_column)} topics for {len(column)} keys; give one, or one for each key")
        self.sought = SoughtKeys(
            KeyTexts(*text_buffers(column), *text_buffers(topic_column)),
            selection,
            lambda: zip(itertools.cycle(topic_column.to_pylist()), column.to_pylist()),
        )
        self.max_num = INT64_MAX if selection.max_num is None else selection.max_num


def first_places(log: CommitLog, source: KeySource, sought: SoughtKeys, max_num: int) -> Candidates:
    """Return the places of records with the keys, of each key at most `max_num`, each once and in the order of the index."""
    wanted = np.full(len(sought.hashes), max_num)
    found = Candidates.of([], [])
    for candidates in source.candidates(sought, wanted):
        # A record that was indexed twice counts once.
        limit = max_num if candidates.falling else INT64_MAX
        taken = sought.matching(log, candidates, limit)[1]
        _doubt(source, sought, candidates, taken, limit)
        found = _each_once(found, candidates[taken], max_num)
        wanted[:] = max_num - np.bincount(found.numbers, minlength=len(wanted))
    return found


def key_table(log: CommitLog, source: KeySource | None, asked: AskedKeys, options: ColumnOptions) -> pa.Table:
    """Return the messages that keys find, see `MessageStore.query_table`."""
    pa = import_pyarrow()
    sought, key_column, max_num = asked.sought, asked.column, asked.max_num
    low, high = sought.selection.times
    rounds: Iterator[Candidates] = iter(())
    wanted = np.full(len(key_column), max_num)
    if source is not None and max_num > 0 and low <= high:
        rounds = source.candidates(sought, wanted)
    candidates = next(rounds, Candidates.of([], []))
    if candidates.falling:
        made, parts, taken = _filled(log, sought, candidates, max_num, options)
        wanted -= np.bincount(candidates.numbers[taken], minlength=len(wanted))
    if source is not None and (not candidates.falling or next(rounds, None) is not None):
        # Rows of several rounds would not be in the order of the keys.
        candidates = newest_first(first_places(log, source, sought, max_num))
        made, parts, taken = _filled(log, sought, candidates, max_num, options)
    if source is not None:
        _doubt(source, sought, candidates, taken, max_num)
    numbers = candidates.numbers if taken.all() else candidates.numbers[taken]
    key_numbers = pa.array(numbers, pa.int32())
    if len(numbers) != len(key_column) or (numbers != np.arange(len(numbers), dtype=np.int32)).any():
        key_column = key_column.take(key_numbers)
    schema = _query_schema(options.names, options.views)
    if len(parts) == 1:
        return pa.Table.from_arrays([key_column, key_numbers, *parts[0]], schema=schema)
    chunked = [pa.chunked_array([part[i] for part in parts], field.type) for i, field in enumerate(made.schema)]
    return pa.Table.from_arrays([key_column, key_numbers, *chunked], schema=schema)


def _filled(
    log: CommitLog, sought: SoughtKeys, candidates: Candidates, max_num: int, options: ColumnOptions
) -> tuple[Columns, list[list[pa.Array]], np.ndarray]:
    # The columns, the arrays of each batch, and which candidates became rows.
    made = Columns(dataclasses.replace(options, batch_size=min(max(len(candidates), 1), _KEY_ROWS)), log.crc_check)
    return made, *sought.matching(log, candidates, max_num, made.out, made.take_arrays)


def newest_first(candidates: Candidates) -> Candidates:
    """Return the same places, those of each key in the order of falling phy offsets."""
    return candidates[np.lexsort((-candidates.phy_offsets, candidates.numbers))]


def _doubt(source: KeySource, sought: SoughtKeys, candidates: Candidates, taken: np.ndarray, max_num: int) -> None:
    if taken.all():
        return
    # Of a key with enough rows the others were not compared.
    numbers = candidates.numbers
    lacks = ~taken & (np.bincount(numbers[taken], minlength=int(numbers[-1]) + 1)[numbers] < max_num)
    source.doubt(sought, candidates[lacks])


@functools.lru_cache(64)
def _query_schema(names: tuple[str, ...], views: bool) -> pa.Schema:
    pa = import_pyarrow()
    first = [pa.field("key", pa.string()), pa.field("key_number", pa.int32())]
    return pa.schema(first + list(scan_schema(names, views)))


def _text_column(pa: Any, texts: Any, what: str) -> Any:
    # An Arrow array of strings without nulls, whose offsets begin with 0.
    if isinstance(texts, (pa.Array, pa.ChunkedArray)):
        texts = texts.cast(pa.string())
        if isinstance(texts, pa.ChunkedArray):
            texts = texts.combine_chunks()
        array = pa.concat_arrays([texts]) if not texts.offset else pa.array(texts.to_pylist(), pa.string())
    else:
        items = (texts,) if isinstance(texts, str) else tuple(texts)
        laid_out = text_arrays(items)
        if laid_out is not None:
            # ASCII, as nearly all texts are.
            buffers = [None, pa.py_buffer(laid_out[0]), pa.py_buffer(laid_out[1])]
            return pa.Array.from_buffers(pa.string(), len(items), buffers, 0)
        for item in items:
            if not isinstance(item, str):
                raise TypeError(f"{what} {item!r} is not text: give str")
        try:
            array = pa.array(items, pa.string())
        except UnicodeEncodeError:
            # A lone surrogate is stored as "?".
            array = pa.array([encode_java_utf8(item).decode() for item in items], pa.string())
    if array.null_count:
        raise TypeError(f"a {what} is null: give text")
    return array


def text_buffers(array: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets (int32) and bytes (uint8) of a pyarrow array of strings that begins at its buffers' start."""
    _, offsets, data = array.buffers()
    num = len(array)
    return (
        np.frombuffer(offsets, np.int32)[: num + 1] if offsets is not None and offsets.size else np.zeros(1, np.int32),
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8),
    )


def _each_once(found: Candidates, later: Candidates, max_num: int) -> Candidates:
    # The first `max_num` entries of each key, each record once, where it came first.
    numbers = np.concatenate([found.numbers, later.numbers])
    phy_offsets = np.concatenate([found.phy_offsets, later.phy_offsets])
    order = np.lexsort((phy_offsets, numbers))
    again = (np.diff(numbers[order]) == 0) & (np.diff(phy_offsets[order]) == 0)
    once = np.sort(np.delete(order, np.flatnonzero(again) + 1))
    once = once[np.argsort(numbers[once], kind="stable")]
    rank = np.arange(len(once)) - np.searchsorted(numbers[once], numbers[once])
    return Candidates(numbers[once], phy_offsets[once])[rank < max_num]
