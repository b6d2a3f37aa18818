"""The places of the messages that have keys, and these messages as columns of Arrow, see `MessageStore.query_table`.

Owns which candidates of an index count, in what order, and the columns ``key`` and ``key_number``.  It decides nothing about
damage: the index is told of entries that lead elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore._columns import KeyTexts, text_arrays
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.index.key_source import Candidates, KeySource, SoughtKeys
from rmqstore.message import encode_java_utf8
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.store.columns import ColumnOptions, Columns, chosen_columns, import_pyarrow, scan_schema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["AskedKeys", "first_places", "key_table", "newest_first", "query_schema", "text_buffers"]

# Rows of a batch of what keys find: most queries are one batch.
_KEY_ROWS = 32768


def query_schema(columns: Iterable[str] | None = None, views: bool = False) -> pa.Schema:
    """pyarrow.Schema: of what `MessageStore.query_table` gives: ``key`` and ``key_number``, then `scan_schema`."""
    import_pyarrow()
    return _query_schema(chosen_columns(columns), views)


class AskedKeys:
    """The keys of a question as columns, and what is asked about them.

    Parameters
    ----------
    keys, topics
        As of `MessageStore.query_table`.
    selection : Selection
        Of it the store times, `index_type`, and `max_num` for each key.

    Attributes
    ----------
    column : pyarrow.Array
        The texts of the keys.
    sought : SoughtKeys
    """

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
    """Return where the records are that have the keys, of each key at most `max_num`, each once and in the order of the index.

    The index is told of candidates that are wrong.
    """
    candidates = source.candidates(sought)
    if candidates.falling:
        taken = sought.matching(log, candidates, max_num)[1]
        _doubt(source, sought, candidates, taken, max_num)
        return candidates[taken]
    # A record that was indexed twice, or entries that do not follow the log.
    matches = sought.matching(log, candidates)[1]
    source.doubt(sought, candidates[~matches])
    return _each_once(candidates[matches], max_num)


def key_table(log: CommitLog, source: KeySource | None, asked: AskedKeys, options: ColumnOptions) -> pa.Table:
    """pyarrow.Table: the messages that keys find, see `MessageStore.query_table`."""
    pa = import_pyarrow()
    sought, key_column, max_num = asked.sought, asked.column, asked.max_num
    low, high = sought.selection.times
    candidates = Candidates.of([], [])
    if source is not None and max_num > 0 and low <= high:
        candidates = source.candidates(sought)
        if not candidates.falling:
            candidates = newest_first(first_places(log, source, sought, max_num))
    made = Columns(dataclasses.replace(options, batch_size=min(max(len(candidates), 1), _KEY_ROWS)), log.crc_check)
    parts, taken = sought.matching(log, candidates, max_num, made.out, made.take_arrays)
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


def _each_once(candidates: Candidates, max_num: int) -> Candidates:
    # The first `max_num` entries of each key, each record once, where it came first.
    numbers, phy_offsets = candidates.numbers, candidates.phy_offsets
    order = np.lexsort((np.arange(len(numbers)), phy_offsets, numbers))
    again = (np.diff(numbers[order]) == 0) & (np.diff(phy_offsets[order]) == 0)
    once = candidates[np.sort(np.delete(order, np.flatnonzero(again) + 1))]
    rank = np.arange(len(once)) - np.searchsorted(once.numbers, once.numbers)
    return once[rank < max_num]
