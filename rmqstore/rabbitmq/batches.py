"""Messages of a queue as Arrow record batches: the columns of an export, and of Spark.

Owns the schema.  The compiled core decodes the terms of a batch into buffers for Arrow's arrays, from the files of an
index and from message stores.  It only reads.  A message whose bytes are lost or damaged, or with a requested column that
cannot be decoded, is left out and named, as `Queue.messages` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmqstore.errors import CorruptionError, MissingDependencyError
from rmqstore.rabbitmq import _term
from rmqstore.rabbitmq._core import ENTRY_EMBEDDED, ENTRY_PERSISTENT, terms_at
from rmqstore.rabbitmq.amqp import header_text, utf8
from rmqstore.rabbitmq.layout import QueueName
from rmqstore.rabbitmq.live_index import ENTRY_REDELIVERED, IndexColumns, LiveIndex, opened_source, release
from rmqstore.rabbitmq.message import LostMessage, LostMessages, Message, undecoded
from rmqstore.rabbitmq.message_store import MessageStore, find_term

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "Batches", "arrow_array", "pyarrow", "schema"]

# Columns from the index; the others are from the message.
_OF_THE_INDEX = ("vhost", "queue", "level", "seq_id", "msg_id", "persistent", "delivered", "expiry", "size", "location")
_TEXTS = (
    "content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id", "type", "user_id", "app_id",
    "cluster_id",
)  # fmt: skip
_OF_PROPERTIES = {*_TEXTS, "headers", "delivery_mode", "priority", "timestamp"}
#: Columns of a batch, in their order.
COLUMNS = (
    *_OF_THE_INDEX, "exchange", "routing_keys", "body", *_TEXTS, "headers", "delivery_mode", "priority", "timestamp"
)  # fmt: skip
BATCH_ROWS = 8192
_BATCH_BYTES = 16 << 20


def schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """Return the pyarrow.Schema of these columns.

    ``level`` is null except for priority queues; ``expiry`` is in ms; ``headers`` are JSON text, with objects such as
    ``{"$binary": base64}`` for bytes, times and decimals; missing properties are null.

    Raises
    ------
    ValueError
        There is no such column.
    """
    pa = pyarrow()
    types = {
        "level": pa.int16(),
        "seq_id": pa.int64(),
        "msg_id": pa.binary(16),
        "persistent": pa.bool_(),
        "delivered": pa.bool_(),
        "expiry": pa.timestamp("ms", "UTC"),
        "size": pa.int64(),
        "routing_keys": pa.list_(pa.string()),
        "body": pa.binary(),
        "delivery_mode": pa.uint8(),
        "priority": pa.uint8(),
        "timestamp": pa.timestamp("s", "UTC"),
    }
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise ValueError(f"there is no column {unknown[0]!r}; there are {', '.join(COLUMNS)}")
    return pa.schema([pa.field(name, types.get(name, pa.string())) for name in columns])


class Batches:
    """Makes batches of the live messages of a queue, up to 8192 each, in the order of sequence ids.

    Parameters
    ----------
    name : QueueName
        For the columns ``vhost``, ``queue`` and ``level``.
    stores : callable
        Called with True or False, it returns the persistent or the transient message store, or None.
    columns : sequence of str
        Of `COLUMNS`; only these are decoded.
    on_lost : callable, optional
        Called with each message that is left out; by default a warning at the end has their number.
    """

    def __init__(
        self,
        name: QueueName,
        stores: Callable[[bool], MessageStore | None],
        columns: Sequence[str] = COLUMNS,
        on_lost: Callable[[LostMessage], None] | None = None,
    ):
        self._name = name
        self._stores = stores
        self._schema = schema(columns)
        self._of_messages = [name for name in columns if name not in _OF_THE_INDEX]
        self._lost = LostMessages(on_lost)
        # The files of the index that the last batch used.
        self._sources: dict[int, Any] = {}

    def of_index(self, index: LiveIndex) -> Iterator[pa.RecordBatch]:
        """Read the messages of an index."""
        columns = index.columns()
        # Bodies in the store are as large as their size says.
        weights = np.cumsum(np.maximum(columns.term_size, columns.size))
        first, count = 0, len(columns.seq_id)
        try:
            while first < count:
                before = int(weights[first - 1]) if first else 0
                end = min(first + BATCH_ROWS, int(np.searchsorted(weights, before + _BATCH_BYTES, "right")))
                end = max(end, first + 1)
                yield from self._batch(index, columns.rows(slice(first, end)))
                first = end
        finally:
            self._keep_sources(())
        self._lost.warn()

    def _keep_sources(self, files: Collection[int]) -> None:
        for file in self._sources.keys() - files:
            release(self._sources.pop(file))

    def _batch(self, index: LiveIndex, rows: IndexColumns) -> Iterator[pa.RecordBatch]:
        # One batch, or none where nothing is left.
        pa = pyarrow()
        there = rows.term_size > 0
        positions, sizes, numbers = rows.term_pos.copy(), rows.term_size.copy(), np.zeros(len(there), np.int32)
        files, numbers[there] = np.unique(rows.file[there], return_inverse=True)
        self._keep_sources(files.tolist())
        for file in files.tolist():
            if file not in self._sources:
                self._sources[file] = opened_source(index, file)
        sources = [self._sources[file] for file in files.tolist()]
        reasons: dict[int, str] = {}
        held, at = [], 0
        for i in np.flatnonzero(~there).tolist():
            place = bool(rows.flags[i] & ENTRY_PERSISTENT), index.path_of(int(rows.file[i]))
            term, error = find_term(self._stores, rows.msg_id[i].tobytes(), *place)
            if term is not None:
                there[i] = True
                positions[i], sizes[i], numbers[i] = at, len(term), len(sources)
                held.append(term)
                at += len(term)
            elif isinstance(error, OSError):
                reasons[i] = str(error)
        sources.append(b"".join(held))
        # The status says which terms are not messages; a count needs it too.
        decoded = _term.message_columns(sources, positions, sizes, numbers, ["status", *self._of_messages])
        status = decoded["status"]
        whole = there & (status != _term.RowStatus.ROW_DAMAGED)
        good = whole & (status != _term.RowStatus.ROW_UNREADABLE)
        made = {name: arrow_array(decoded, name) for name in self._of_messages}
        # Nulls would say that the message has no properties.
        if not _OF_PROPERTIES.isdisjoint(self._of_messages):
            good &= status != _term.RowStatus.ROW_BAD_PROPERTIES
        if "headers" in made:
            good &= ~(decoded["headers"][2].astype(bool) & made["headers"].is_null().to_numpy(zero_copy_only=False))
        columns = [
            made[field.name] if field.name in made else self._of_the_index(field, rows, index.location)
            for field in self._schema
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        for i in np.flatnonzero(~good).tolist():
            reason = None
            if whole[i]:
                (term,) = terms_at(sources[numbers[i]], positions[i : i + 1], sizes[i : i + 1])
                reason = undecoded(Message.from_term(term))
            self._lost.add(
                LostMessage(
                    self._name.queue,
                    int(rows.seq_id[i]),
                    rows.msg_id[i].tobytes(),
                    self._name.priority,
                    index.path_of(int(rows.file[i])),
                    bool(rows.flags[i] & ENTRY_EMBEDDED),
                    int(rows.pos[i]),
                    reason or reasons.get(i, ""),
                    bool(reason),
                )
            )
        batch = batch if good.all() else batch.filter(pa.array(good))
        if batch.num_rows:
            yield batch

    def _of_the_index(self, field: Any, rows: IndexColumns, location: str) -> pa.Array:
        pa, name, count = pyarrow(), field.name, len(rows.seq_id)
        of_the_queue = {"vhost": self._name.vhost, "queue": self._name.queue, "level": self._name.priority}
        if name in of_the_queue:
            value = of_the_queue[name]
            return pa.repeat(pa.scalar(utf8(value) if isinstance(value, str) else value, field.type), count)
        if name == "msg_id":
            return pa.Array.from_buffers(field.type, count, [None, pa.py_buffer(np.ascontiguousarray(rows.msg_id))])
        if name == "expiry":
            milliseconds = (rows.expiry_us.view(np.uint64) // np.uint64(1000)).view(np.int64)
            return pa.array(milliseconds, pa.int64(), mask=rows.expiry_us == 0).view(field.type)
        if name == "location":
            embedded = (rows.flags & ENTRY_EMBEDDED) != 0
            return pa.array(["store", location]).take(pa.array(embedded.astype(np.int8)))
        if name in ("persistent", "delivered"):
            return pa.array((rows.flags & (ENTRY_PERSISTENT if name == "persistent" else ENTRY_REDELIVERED)) != 0)
        return pa.array(rows.seq_id if name == "seq_id" else rows.size)


# ---------------------------------------------------------------------------------------------------- Arrow arrays


def pyarrow() -> Any:
    """Import pyarrow; MissingDependencyError if it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise MissingDependencyError("this needs pyarrow: install it with pip install 'rmqstore[arrow]'") from None
    return pyarrow


def _validity(pa: Any, valid: np.ndarray) -> Any:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _texts(offsets: np.ndarray, data: np.ndarray, valid: Any, count: int, utf8: bool) -> pa.Array:
    pa = pyarrow()
    array = pa.Array.from_buffers(pa.binary(), count, [valid, pa.py_buffer(offsets), pa.py_buffer(data)])
    if utf8:
        return array.view(pa.string())
    found = [None if value is None else value.decode("utf-8", "replace") for value in array.to_pylist()]
    return pa.array(found, pa.string())


def _header_texts(columns: _term.MessageColumns) -> list[str | None]:
    """Convert tables of headers to JSON; None for a damaged table."""
    offsets, data, valid = columns["headers"]
    content, ends = data.tobytes(), offsets.tolist()
    found: list[str | None] = []
    # Messages of one sender mostly have the same headers.
    known: dict[bytes, str | None] = {}
    for i, has in enumerate(valid.tolist()):
        if not has:
            found.append(None)
            continue
        table = content[ends[i] : ends[i + 1]]
        if table not in known:
            if len(known) >= 4096:
                known.clear()
            try:
                known[table] = header_text(_term.decode_table(table))
            except CorruptionError:
                known[table] = None
        found.append(known[table])
    return found


def arrow_array(columns: _term.MessageColumns, name: str) -> pa.Array:
    """Convert a column of `_term.message_columns` to an Arrow array, mostly without a copy.

    A timestamp is null beyond 2**63 seconds.  Bytes that are not UTF-8 are replaced in texts.
    """
    pa = pyarrow()
    count = columns.count
    if name == "headers":
        return pa.array(_header_texts(columns), pa.string())
    if name == "routing_keys":
        lists, offsets, data, valid = columns[name]
        keys = _texts(offsets, data, None, int(lists[-1]), columns.utf8[name])
        buffers = [_validity(pa, valid), pa.py_buffer(lists)]
        return pa.Array.from_buffers(pa.list_(pa.string()), count, buffers, children=[keys])
    if name in ("timestamp", "delivery_mode", "priority"):
        numbers, valid = columns[name]
        kind = pa.uint8()
        if name == "timestamp":
            kind, valid = pa.timestamp("s", "UTC"), valid.astype(bool) & (numbers < 1 << 63)
        return pa.Array.from_buffers(kind, count, [_validity(pa, valid), pa.py_buffer(numbers)])
    offsets, data, valid = columns[name]
    bits = _validity(pa, valid)
    if name == "body":
        return pa.Array.from_buffers(pa.binary(), count, [bits, pa.py_buffer(offsets), pa.py_buffer(data)])
    return _texts(offsets, data, bits, count, columns.utf8[name])
