"""Rows of pending messages: their columns, and how they are made of the records that wait.

Owns the schema of the answer and the reading of records as columns: by the units of a queue, at places, or along the
log.  It decides nothing about what waits.  Records are decoded by the compiled core; no Python object is made for one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.selection import Selection
from rmqstore.store.columns import ColumnOptions, Columns, import_pyarrow
from rmqstore.store.local_queue import LocalQueue
from rmqstore.store.message_store import MessageStore
from rmqstore.store.placed_columns import rows_at

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "PendingSource", "Properties", "Records", "Waiting", "records_at", "records_in_log", "records_of_queue", "rows", "schema",
]  # fmt: skip

RECORD_COLUMNS = (
    "topic", "queue_id", "queue_offset", "phy_offset", "size", "keys", "tags", "unique_key", "properties",
    "born_timestamp", "store_timestamp", "reconsume_times", "body_stored",
)  # fmt: skip
"""What is decoded of a record that waits; those without need leave out the last."""

# Records that are decoded together.
_PIECE = 1 << 15
_INT64_MAX = 2**63 - 1


@dataclass
class PendingSource:
    """A place that was looked at.

    Attributes
    ----------
    kind : str
    name : str
        The topic, directory or family.
    begin : str
        From where on its entries wait.
    pending : int
        Messages that wait by this place.
    came_out : int
        Of its entries, those that are on their topic already although what the broker noted says they wait: it was
        killed, or has not written down how far it came, and will deliver them once more.  They are not counted as
        pending.
    recalled : int
        Of its entries, those that were recalled.
    """

    kind: str
    name: str
    begin: str = ""
    pending: int = 0
    came_out: int = 0
    recalled: int = 0


@dataclass
class Waiting:
    """What is known of records that wait, an array a column; None is what the record has, or nothing.

    Attributes
    ----------
    topic, queue_id, group : pyarrow.Array or None
        The real ones.
    due : array of int64 or None
        ms since epoch.
    level, check_times : array or None
    """

    topic: Any = None
    queue_id: Any = None
    group: Any = None
    due: np.ndarray | None = None
    level: np.ndarray | None = None
    check_times: Any = None


@functools.cache
def schema() -> pa.Schema:
    """pyarrow.Schema: the columns of pending messages, see docs/pending.md."""
    pa = import_pyarrow()
    time = pa.timestamp("ms", tz="UTC")
    return pa.schema(
        [
            pa.field("kind", pa.string(), nullable=False),
            pa.field("topic", pa.string()),
            pa.field("queue_id", pa.int32()),
            pa.field("group", pa.string()),
            pa.field("keys", pa.list_(pa.string())),
            pa.field("tags", pa.string()),
            pa.field("unique_key", pa.string()),
            pa.field("born_timestamp", time),
            pa.field("store_timestamp", time),
            pa.field("due", time),
            pa.field("overdue", pa.bool_()),
            pa.field("level", pa.int32()),
            pa.field("check_times", pa.int32()),
            pa.field("reconsume_times", pa.int32()),
            pa.field("size", pa.int32()),
            pa.field("stored_topic", pa.string()),
            pa.field("stored_queue_id", pa.int32()),
            pa.field("queue_offset", pa.int64()),
            pa.field("phy_offset", pa.int64()),
            pa.field("source", pa.string(), nullable=False),
        ]
    )


class Properties:
    """One property of many records at a time.

    Parameters
    ----------
    array : pyarrow.MapArray
        The column ``properties``.
    """

    def __init__(self, array: Any):
        self._pa = import_pyarrow()
        self._num = len(array)
        first, last = (array.offsets[0].as_py(), array.offsets[-1].as_py()) if self._num else (0, 0)
        self._offsets = array.offsets.to_numpy() - first
        self._items = array.items[first:last] if len(array.items) != last - first else array.items
        names = array.keys[first:last] if len(array.keys) != last - first else array.keys
        encoded = names.dictionary_encode()
        self._names = {name: code for code, name in enumerate(encoded.dictionary.to_pylist())}
        self._codes = encoded.indices.to_numpy()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def text(self, name: str) -> Any:
        """pyarrow.Array of string: the property's value in each record, null where it has none."""
        pa = self._pa
        code = self._names.get(name)
        if code is None:
            return pa.nulls(self._num, pa.string())
        hits = np.flatnonzero(self._codes == code)
        places = np.searchsorted(self._offsets, hits, "right") - 1
        if len(hits) == self._num and (places == np.arange(self._num)).all():
            return self._items.take(pa.array(hits))
        chosen = np.full(self._num, -1, np.int64)
        chosen[places] = hits
        return self._items.take(pa.array(chosen, mask=chosen < 0))

    def whole(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(int64 array, bool array): the property as a whole number, and where there is one."""
        return whole_numbers(self.text(name))


def whole_numbers(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """(int64 array, bool array): texts as whole numbers, 0 for those that are none, and which are."""
    pa = import_pyarrow()
    import pyarrow.compute as pc

    try:
        numbers = pc.cast(texts, pa.int64())
    except pa.ArrowInvalid:
        # A hostile or damaged one is not a number; the others are.
        plain = pc.fill_null(pc.match_substring_regex(texts, r"^-?[0-9]{1,18}$"), False)
        numbers = pc.cast(pc.if_else(plain, texts, pa.scalar(None, pa.string())), pa.int64())
    there = pc.is_valid(numbers).to_numpy(zero_copy_only=False)
    return pc.fill_null(numbers, 0).to_numpy(), there


class Records:
    """Some records that may wait.

    Attributes
    ----------
    batch : pyarrow.RecordBatch
        Their columns (`RECORD_COLUMNS`).
    numbers : array
        Of what was asked for, the number that each record has.
    tags_codes : array or None
        Of their units, as far as an extension holds them; None where no unit was read.
    """

    def __init__(self, batch: pa.RecordBatch, numbers: np.ndarray, tags_codes: np.ndarray | None = None):
        self.batch = batch
        self.numbers = numbers
        self.tags_codes = tags_codes

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @functools.cached_property
    def properties(self) -> Properties:
        """Properties: those of the records."""
        return Properties(self.batch.column("properties"))

    def numbers_of(self, name: str) -> np.ndarray:
        """Array of int64: a column of whole numbers or of times (ms since epoch)."""
        column = self.batch.column(name)
        if column.type == schema().field("due").type:
            column = column.view(import_pyarrow().int64())
        return np.asarray(column.to_numpy(zero_copy_only=False), np.int64)

    def texts_of(self, name: str) -> Any:
        """pyarrow.Array: a column."""
        return self.batch.column(name)


def int32_property(records: Records, name: str) -> object:
    """pyarrow.Array of int32: a property as a number; null where it is not there, not a number, or does not fit."""
    pa = import_pyarrow()
    values, there = records.properties.whole(name)
    there &= (values >= -(2**31)) & (values < 2**31)
    return pa.array(np.where(there, values, 0), pa.int32(), mask=~there)


def _columns(store: MessageStore, topics: Iterable[str] | None, body: bool) -> Columns:
    names = RECORD_COLUMNS if body else RECORD_COLUMNS[:-1]
    selection = Selection(None if topics is None else tuple(topics))
    return Columns(ColumnOptions(names, _PIECE), store.commit_log.crc_check, selection)


def _one(batches: list[pa.RecordBatch], columns: Columns) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    pa = import_pyarrow()
    return pa.Table.from_batches(batches, schema=columns.schema).combine_chunks().to_batches()[0]


def records_at(store: MessageStore, phy_offsets: np.ndarray, topic: str) -> Iterator[Records]:
    """The records of a topic at these places, some at a time; a place that leads to none is left out."""
    columns = _columns(store, (topic,), False)
    for first in range(0, len(phy_offsets), _PIECE):
        part = np.ascontiguousarray(phy_offsets[first : first + _PIECE], np.int64)
        batches, taken = rows_at(store.commit_log, columns, part)
        if len(taken):
            yield Records(_one(batches, columns), first + taken)


def records_of_queue(
    store: MessageStore, queue: AnyConsumeQueue, begin: int, *, body: bool = False, end: int = _INT64_MAX
) -> Iterator[tuple[Records | None, int]]:
    """The records of a queue from queue offset `begin` on, with the tags codes of their units.

    Yields
    ------
    (Records or None, int)
        And how many units led to no record.
    """
    columns = _columns(store, None, body)
    source = LocalQueue(queue, store.commit_log)
    for places in source.places(begin, end):
        batches, taken = rows_at(source.log, columns, places.phy_offsets, source, places)
        codes = source.resolved_codes(places.tags_codes[taken])
        records = Records(_one(batches, columns), taken, codes) if len(taken) else None
        yield records, len(places) - len(taken)


def records_in_log(
    store: MessageStore, topics: Iterable[str], begin: int | None, *, body: bool = False
) -> Iterator[Records]:
    """The records of these topics from phy offset `begin` on, as a walk along the log finds them."""
    names = RECORD_COLUMNS if body else RECORD_COLUMNS[:-1]
    for batch in store.scan(names, topic=list(topics), begin_phy_offset=begin, batch_size=_PIECE):
        yield Records(batch, np.arange(batch.num_rows))


def rows(
    records: Records, source: PendingSource, now: int, waiting: Waiting, keep: np.ndarray | None = None
) -> pa.RecordBatch:
    """Make rows of pending messages (`schema`).

    Parameters
    ----------
    now : int
        What is due before is overdue, ms since epoch.
    keep : array of bool, optional
        Which of the records.
    """
    pa = import_pyarrow()
    num = len(records)
    batch = records.batch
    due = waiting.due

    def column(name: str, values: Any) -> Any:
        field = schema().field(name)
        if values is None:
            return pa.nulls(num, field.type)
        return values if isinstance(values, pa.Array) else pa.array(values, field.type)

    made = pa.RecordBatch.from_arrays(
        [
            pa.repeat(source.kind, num),
            batch.column("topic") if waiting.topic is None else waiting.topic,
            batch.column("queue_id") if waiting.queue_id is None else waiting.queue_id,
            column("group", waiting.group),
            *(batch.column(name) for name in ("keys", "tags", "unique_key", "born_timestamp", "store_timestamp")),
            column("due", None) if due is None else pa.array(due, pa.int64()).view(schema().field("due").type),
            column("overdue", None if due is None else due < now),
            column("level", waiting.level),
            column("check_times", waiting.check_times),
            batch.column("reconsume_times"),
            *(batch.column(name) for name in ("size", "topic", "queue_id", "queue_offset", "phy_offset")),
            pa.repeat(source.name, num),
        ],
        schema=schema(),
    )
    return made if keep is None or keep.all() else made.filter(pa.array(keep))
