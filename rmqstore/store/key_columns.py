"""The messages of many keys as columns of Arrow, see `MessageStore.query_table`.

Owns which entries of the index become rows, in what order, and the columns ``key`` and ``key_number``.  It reads through
`columns` and the index service, and decides nothing about damage: entries that lead elsewhere are told to the service.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from rmqstore import _numpy as np
from rmqstore._columns import ArrowColumns, KeyTexts, text_arrays
from rmqstore.arguments import KEY_BITS
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.index.index_service import IndexService
from rmqstore.message import encode_java_utf8
from rmqstore.selection import Selection
from rmqstore.store.columns import (
    ColumnOptions,
    Columns,
    chosen_columns,
    doubt_entries,
    import_pyarrow,
    scan_schema,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["key_table", "query_schema", "text_buffers"]

# Rows of a batch of what keys find: most queries are one batch.
_KEY_ROWS = 32768
_INT64_MAX = 2**63 - 1


def query_schema(columns: Iterable[str] | None = None, views: bool = False) -> pa.Schema:
    """pyarrow.Schema: of what `MessageStore.query_table` gives: ``key`` and ``key_number``, then `scan_schema`."""
    import_pyarrow()
    return _query_schema(chosen_columns(columns), views)


def key_table(
    log: CommitLog,
    index_service: IndexService | None,
    keys: Any,
    topics: Any,
    selection: Selection,
    options: ColumnOptions,
    more: Callable[[list[Any], list[Any]], tuple[np.ndarray, np.ndarray]] | None = None,
) -> pa.Table:
    """pyarrow.Table: the messages that keys find, see `MessageStore.query_table`.

    Parameters
    ----------
    selection : Selection
        Of it the store times, `index_type`, and `max_num` for each key.
    more : callable, optional
        Gives for the texts of keys and topics the numbers and phy offsets of entries that no index file has.
    """
    pa = import_pyarrow()
    schema = _query_schema(options.names, options.views)
    times, index_type = selection.times, selection.index_type
    max_num = _INT64_MAX if selection.max_num is None else selection.max_num
    key_column = _text_column(pa, keys, "key")
    topic_column = _text_column(pa, topics, "topic")
    if len(topic_column) != len(key_column) and not isinstance(topics, str):
        raise ValueError(f"{len(topic_column)} topics for {len(key_column)} keys; give one, or one for each key")
    texts = KeyTexts(*text_buffers(key_column), *text_buffers(topic_column))
    numbers, phy_offsets, falling = np.empty(0, np.int32), np.empty(0, np.int64), True
    if index_service is not None and max_num > 0 and times[0] <= times[1]:
        numbers, phy_offsets, falling = index_service.entries(texts.hashes(index_type == "T"))
        if more is not None:
            others = more(key_column.to_pylist(), topic_column.to_pylist())
            numbers, phy_offsets = _each_once(np.append(numbers, others[0]), np.append(phy_offsets, others[1]))
            falling = True
    sought = _Sought(texts, KEY_BITS[index_type], times)
    if not falling:
        # A record that was indexed twice, or entries that do not follow the log: those of each key that count, in order.
        matches = _matching(log, ArrowColumns((), 1 << 30), phy_offsets, numbers, sought, _INT64_MAX)[1]
        if index_service is not None:
            doubt_entries(log, index_service, texts.hashes(index_type == "T")[numbers[~matches]], phy_offsets[~matches])
        numbers, phy_offsets = _newest(numbers[matches], phy_offsets[matches], max_num)
    made = Columns(dataclasses.replace(options, batch_size=min(max(len(numbers), 1), _KEY_ROWS)), log.crc_check)
    parts, taken = _matching(log, made.out, phy_offsets, numbers, sought, max_num, made.take_arrays)
    if index_service is not None and not taken.all():
        # Of a key with enough rows the others were not looked at.
        lacks = ~taken & (np.bincount(numbers[taken], minlength=len(key_column))[numbers] < max_num)
        doubt_entries(log, index_service, texts.hashes(index_type == "T")[numbers[lacks]], phy_offsets[lacks])
    if not taken.all():
        numbers = numbers[taken]
    key_numbers = pa.array(numbers, pa.int32())
    if len(numbers) != len(key_column) or (numbers != np.arange(len(numbers), dtype=np.int32)).any():
        key_column = key_column.take(key_numbers)
    if len(parts) == 1:
        return pa.Table.from_arrays([key_column, key_numbers, *parts[0]], schema=schema)
    chunked = [pa.chunked_array([part[i] for part in parts], field.type) for i, field in enumerate(made.schema)]
    return pa.Table.from_arrays([key_column, key_numbers, *chunked], schema=schema)


class _Sought(NamedTuple):
    texts: KeyTexts
    kinds: int
    times: tuple[int, int]


@functools.lru_cache(64)
def _query_schema(names: tuple[str, ...], views: bool) -> pa.Schema:
    pa = import_pyarrow()
    first = [pa.field("key", pa.string()), pa.field("key_number", pa.int32())]
    return pa.schema(first + list(scan_schema(names, views)))


def _text_column(pa: Any, texts: Any, what: str) -> Any:
    # An Arrow array of strings without nulls, its offsets from 0 on.
    if isinstance(texts, (pa.Array, pa.ChunkedArray)):
        texts = texts.cast(pa.string())
        if isinstance(texts, pa.ChunkedArray):
            texts = texts.combine_chunks()
        array = pa.concat_arrays([texts]) if not texts.offset else pa.array(texts.to_pylist(), pa.string())
    else:
        items = (texts,) if isinstance(texts, str) else tuple(texts)
        laid_out = text_arrays(items)
        if laid_out is not None:
            # ASCII, as nearly all texts are; the others are looked at one by one.
            buffers = [None, pa.py_buffer(laid_out[0]), pa.py_buffer(laid_out[1])]
            return pa.Array.from_buffers(pa.string(), len(items), buffers, 0)
        if set(map(type, items)) - {str}:
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
    """(int32 array, uint8 array): offsets and bytes of a pyarrow array of strings that begins at its buffers' start."""
    _, offsets, data = array.buffers()
    num = len(array)
    return (
        np.frombuffer(offsets, np.int32)[: num + 1] if offsets is not None and offsets.size else np.zeros(1, np.int32),
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8),
    )


def _each_once(numbers: np.ndarray, phy_offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # Ordered by number, of one number the last first.
    order = np.lexsort((-phy_offsets, numbers))
    numbers, phy_offsets = numbers[order], phy_offsets[order]
    first = np.ones(len(numbers), bool)
    first[1:] = (numbers[1:] != numbers[:-1]) | (phy_offsets[1:] != phy_offsets[:-1])
    return numbers[first].astype(np.int32), phy_offsets[first].astype(np.int64)


def _matching(
    log: CommitLog,
    out: ArrowColumns,
    phy_offsets: np.ndarray,
    numbers: np.ndarray,
    sought: _Sought,
    max_num: int,
    take: Callable[[], list[Any]] | None = None,
) -> tuple[list[list[Any]], np.ndarray]:
    # The rows of those records that have the key of their number and a time in the range, at most `max_num` of one number,
    # and which places they are of.  The places of a number lie one after the other.  `take` takes the arrays of a batch;
    # without it the rows are only found.
    batches = []
    taken = np.zeros(len(phy_offsets), np.uint8)
    out.choose(begin_timestamp=sought.times[0], end_timestamp=sought.times[1])
    for part, regions, bases, places in log.located(phy_offsets):
        at, num = 0, len(places)
        while at < num:
            first = part.start + at
            # How many rows the key has of which others were looked at before.
            run = int(np.searchsorted(numbers, numbers[first])) if first else 0
            at = out.fill_matching(
                regions,
                bases,
                places,
                phy_offsets[part],
                taken[part],
                numbers[part],
                sought.texts,
                sought.kinds,
                max_num,
                at,
                int(np.count_nonzero(taken[run:first])),
            )
            if at < num and take is not None:
                batches.append(take())
    if out.count and take is not None:
        batches.append(take())
    return batches, taken.view(np.bool_)


def _newest(numbers: np.ndarray, phy_offsets: np.ndarray, max_num: int) -> tuple[np.ndarray, np.ndarray]:
    # The first `max_num` entries of each key, each record once, where it came first; then the newest record first.  The
    # entries of a key lie one after the other.
    order = np.lexsort((np.arange(len(numbers)), phy_offsets, numbers))
    again = (np.diff(numbers[order]) == 0) & (np.diff(phy_offsets[order]) == 0)
    first = np.sort(np.delete(order, np.flatnonzero(again) + 1))
    numbers, phy_offsets = numbers[first], phy_offsets[first]
    rank = np.arange(len(numbers)) - np.searchsorted(numbers, numbers)
    kept = rank < max_num
    numbers, phy_offsets = numbers[kept], phy_offsets[kept]
    order = np.lexsort((-phy_offsets, numbers))
    return numbers[order], phy_offsets[order]
