"""Messages of a queue as Arrow record batches: the columns of an export, and of Spark.

Owns the schema, and how the terms of a batch are brought together from segments, journal and message store; they are decoded
by the compiled core, many at once, into buffers over which Arrow's arrays are made.  It only reads.  A message whose bytes
are lost or damaged, or of which a column that is asked for cannot be decoded, is left out and named, as `Queue.messages`
does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmqstore._core import Region
from rmqstore.errors import CorruptionError, MissingDependencyError
from rmqstore.rabbitmq import _term
from rmqstore.rabbitmq._core import ENTRY_EMBEDDED, ENTRY_PERSISTENT
from rmqstore.rabbitmq.amqp import header_text, utf8
from rmqstore.rabbitmq.index_directory import JOURNAL, IndexColumns, IndexEntry
from rmqstore.rabbitmq.layout import QueueName, map_file
from rmqstore.rabbitmq.message import LostMessage, LostMessages, Message, undecoded
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.queue_index import QueueIndex

if TYPE_CHECKING:
    import pyarrow as pa

    from rmqstore.rabbitmq.queue import QueueDirectory

__all__ = ["COLUMNS", "Batches", "arrow_array", "pyarrow", "schema"]

# What the index says of a message; everything else is in the message.
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
    """pyarrow.Schema: of these columns.

    ``level`` is null but for priority queues; ``expiry`` is in ms; ``headers`` are JSON text, in which bytes, times and
    decimals are objects such as ``{"$binary": base64}``; properties that a message has not are null.

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


class _Rows(NamedTuple):
    """What an index says of the messages of a batch, a row each.

    `embedded` where the bytes should be in the queue's own files, which the column ``location`` calls `location`; `paths`
    are the files of the index that know the messages.
    """

    columns: IndexColumns
    persistent: np.ndarray
    embedded: np.ndarray
    delivered: np.ndarray
    paths: list[str]
    location: str


class _Terms(NamedTuple):
    """Where the terms of a batch are, a row each: `sizes` bytes from `positions` in the source of this number, if `there`."""

    sources: list[Any]
    numbers: np.ndarray
    positions: np.ndarray
    sizes: np.ndarray
    there: np.ndarray

    def read(self, row: int) -> bytes:
        source, at, size = self.sources[self.numbers[row]], int(self.positions[row]), int(self.sizes[row])
        term: bytes = source[at : at + size] if isinstance(source, bytes) else source.read(at, size)
        return term


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
        Called with each message that is left out; by default a warning at the end says how many there were.
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
        self._sources: dict[str, Region | None] = {}
        # Why messages of the batch that is being made cannot be read, by the number of the row.
        self._reasons: dict[int, str] = {}

    def of_directory(self, directory: QueueDirectory) -> Iterator[pa.RecordBatch]:
        """Read a queue's directory."""
        index = directory.indexes[0] if len(directory.indexes) == 1 else None
        if isinstance(index, QueueIndex):
            yield from self._of_version_1(directory.path, index)
            self._lost.warn()
        else:
            yield from self.of_entries(directory.entries())

    def of_entries(self, entries: Iterable[IndexEntry]) -> Iterator[pa.RecordBatch]:
        """Read the messages of these entries."""
        entries = iter(entries)
        while rows := list(islice(entries, BATCH_ROWS // 8)):
            yield from self._of_entries(rows)
        self._lost.warn()

    # ------------------------------------------------------------------------------------------------- version 1

    def _of_version_1(self, path: str, index: QueueIndex) -> Iterator[pa.RecordBatch]:
        columns = index.columns()
        deliver = index.next_deliver_seq_id
        weights = np.cumsum(np.maximum(columns.term_size, columns.size))
        first, count = 0, len(columns.seq_id)
        while first < count:
            # Bodies in the store are as large as their size says.
            before = int(weights[first - 1]) if first else 0
            end = min(first + BATCH_ROWS, int(np.searchsorted(weights, before + _BATCH_BYTES, "right")))
            end = max(end, first + 1)
            yield from self._of_columns(path, IndexColumns(*(column[first:end] for column in columns)), deliver)
            first = end

    def _source(self, path: str) -> Region | None:
        if path not in self._sources:
            for old in list(self._sources)[:-8]:
                region = self._sources.pop(old)
                if region is not None:
                    region.close()
            self._sources[path] = map_file(path)
        return self._sources[path]

    def _of_columns(self, path: str, rows: IndexColumns, deliver: int) -> Iterator[pa.RecordBatch]:
        def path_of(segment: int) -> str:
            return os.path.join(path, JOURNAL if segment < 0 else f"{segment}.idx")

        embedded = (rows.flags & ENTRY_EMBEDDED) != 0
        persistent = (rows.flags & ENTRY_PERSISTENT) != 0
        there = np.ones(len(rows.seq_id), bool)
        sources: list[Region | bytes] = []
        numbers = np.zeros(len(there), np.int32)
        positions = rows.term_pos.copy()
        sizes = rows.term_size.copy()
        for segment in np.unique(rows.segment[embedded]).tolist():
            source = self._source(path_of(segment))
            chosen = embedded & (rows.segment == segment)
            if source is None:
                there[chosen] = False
                continue
            numbers[chosen] = len(sources)
            sources.append(source)
        if not embedded.all():
            held, at = [], 0
            for i in np.flatnonzero(~embedded).tolist():
                term = self._stored(rows.msg_id[i].tobytes(), bool(persistent[i]), i)
                there[i] = term is not None
                if term is not None:
                    positions[i], sizes[i] = at, len(term)
                    held.append(term)
                    at += len(term)
            numbers[~embedded] = len(sources)
            sources.append(b"".join(held))
        paths = [path_of(segment) for segment in rows.segment.tolist()]
        yield from self._batch(
            _Rows(rows, persistent, embedded, rows.seq_id < deliver, paths, "index"),
            _Terms(sources, numbers, positions, sizes, there),
        )

    def _stored(self, msg_id: bytes, persistent: bool, row: int) -> bytes | None:
        try:
            store = self._stores(persistent)
            return None if store is None else store.read_term(msg_id)
        except (KeyError, CorruptionError):
            return None
        except OSError as error:
            self._reasons[row] = str(error)
            return None

    # ------------------------------------------------------------------------------------------------- version 2

    def _term_of(self, entry: IndexEntry, row: int) -> bytes | None:
        if entry.path.endswith(".qs"):
            self._reasons[row] = f"the file cannot be read: {entry.path}"
            return None
        return self._stored(entry.msg_id, entry.persistent, row)

    def _of_entries(self, entries: list[IndexEntry]) -> Iterator[pa.RecordBatch]:
        terms = [
            entry.message if entry.message is not None else self._term_of(entry, row)
            for row, entry in enumerate(entries)
        ]
        sizes = np.array([len(term or b"") for term in terms], np.int64)
        index = IndexColumns(
            np.array([entry.seq_id for entry in entries], np.int64),
            np.array([entry.size for entry in entries], np.int64),
            np.zeros(len(entries), np.uint8),
            # As the compiled reader has them: all 64 bits, which `_batch` takes for what they are.
            np.array([entry.expiry_us for entry in entries], np.uint64).view(np.int64),
            np.frombuffer(b"".join(entry.msg_id for entry in entries), np.uint8).reshape(-1, 16),
            np.zeros(len(entries), np.int64),
            np.array([entry.pos or 0 for entry in entries], np.int64),
            sizes,
        )
        rows = _Rows(
            index,
            np.array([entry.persistent for entry in entries]),
            np.array([entry.message is not None or not any(entry.msg_id) for entry in entries]),
            np.array([entry.delivered for entry in entries]),
            [entry.path for entry in entries],
            "queue",
        )
        there = np.array([term is not None for term in terms])
        sources = [b"".join(term or b"" for term in terms)]
        yield from self._batch(
            rows, _Terms(sources, np.zeros(len(entries), np.int32), np.cumsum(sizes) - sizes, sizes, there)
        )

    # --------------------------------------------------------------------------------------------------- a batch

    def _batch(self, rows: _Rows, terms: _Terms) -> Iterator[pa.RecordBatch]:
        # One batch, or none where nothing is left.
        pa, columns = pyarrow(), rows.columns
        # The status says which terms are not messages; a count needs it too.
        decoded = _term.message_columns(
            terms.sources or [b""],
            np.where(terms.there, terms.positions, 0),
            np.where(terms.there, terms.sizes, 0),
            terms.numbers,
            ["status", *self._of_messages],
        )
        status = decoded["status"]
        whole = terms.there & (status != _term.RowStatus.ROW_DAMAGED)
        good = whole & (status != _term.RowStatus.ROW_UNREADABLE)
        made = {name: arrow_array(decoded, name) for name in self._of_messages}
        # Nulls would say that the message has no properties.
        if not _OF_PROPERTIES.isdisjoint(self._of_messages):
            good &= status != _term.RowStatus.ROW_BAD_PROPERTIES
        if "headers" in made:
            good &= ~(decoded["headers"][2].astype(bool) & made["headers"].is_null().to_numpy(zero_copy_only=False))
        batch = pa.RecordBatch.from_arrays(
            [
                made[field.name] if field.name in made else self._of_the_index(field, rows, len(good))
                for field in self._schema
            ],
            schema=self._schema,
        )
        if not good.all():
            for i in np.flatnonzero(~good).tolist():
                reason = undecoded(Message.from_term(terms.read(i))) if whole[i] else None
                place = int(columns.pos[i]), reason or self._reasons.get(i, ""), bool(reason)
                self._lost.add(
                    LostMessage(
                        self._name.queue,
                        int(columns.seq_id[i]),
                        columns.msg_id[i].tobytes(),
                        self._name.priority,
                        rows.paths[i],
                        bool(rows.embedded[i]),
                        *place,
                    )
                )
            batch = batch.filter(pa.array(good))
        self._reasons.clear()
        if batch.num_rows:
            yield batch

    def _of_the_index(self, field: Any, rows: _Rows, count: int) -> pa.Array:
        pa, name, columns = pyarrow(), field.name, rows.columns
        of_the_queue = {"vhost": self._name.vhost, "queue": self._name.queue, "level": self._name.priority}
        if name in of_the_queue:
            value = of_the_queue[name]
            return pa.repeat(pa.scalar(utf8(value) if isinstance(value, str) else value, field.type), count)
        if name == "msg_id":
            ids = np.ascontiguousarray(columns.msg_id)
            return pa.Array.from_buffers(field.type, count, [None, pa.py_buffer(ids)])
        if name == "expiry":
            milliseconds = (columns.expiry_us.view(np.uint64) // np.uint64(1000)).view(np.int64)
            return pa.array(milliseconds, pa.int64(), mask=columns.expiry_us == 0).view(field.type)
        if name == "location":
            return pa.array(["store", rows.location]).take(pa.array(rows.embedded.astype(np.int8)))
        numbers = {"seq_id": columns.seq_id, "size": columns.size}
        return pa.array({**numbers, "persistent": rows.persistent, "delivered": rows.delivered}[name])


# ---------------------------------------------------------------------------------------------------- Arrow arrays


def pyarrow() -> Any:
    """The module pyarrow; MissingDependencyError where it is not installed."""
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
    """JSON of the decoded tables of headers, null where the table is damaged."""
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
    """A column of `_term.message_columns` as an Arrow array, mostly without a copy.

    A timestamp is null beyond 2**63 seconds.  Bytes that are not UTF-8 are replaced in texts, value by value, in the
    columns where there are such.
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
