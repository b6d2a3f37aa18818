"""Messages of a queue as Arrow record batches: the columns of an export, and of Spark.

Owns the schema, and how the terms of a batch are brought together from segments, journal and message store; they are decoded
by the compiled core, many at once.  It only reads.  A message whose bytes are lost or damaged, or of which a column
that is asked for cannot be decoded, is passed over and told of, as `Queue.messages` does.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmqstore._core import Region
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.rabbitmq import _term, amqp
from rmqstore.rabbitmq.amqp import Timestamp
from rmqstore.rabbitmq.columns import arrow_arrays, pyarrow
from rmqstore.rabbitmq.directory import map_file
from rmqstore.rabbitmq.index_columns import IndexColumns, IndexEntry
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.queue_index import ENTRY_EMBEDDED, ENTRY_PERSISTENT, QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "Batches", "LostMessage", "json_value", "schema"]

logger = logging.getLogger(__name__)

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
#: AMQP's types of numbers that JSON does not tell apart.
NUMBERS = {
    getattr(amqp, name): f"${name.lower()}"
    for name in (
        "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "SpecInt16", "SpecInt64", "Float32"
    )
}  # fmt: skip
BATCH_ROWS = 8192
_BATCH_BYTES = 16 << 20


def json_value(value: Any) -> Any:
    """The value of a property or header as JSON has it; what JSON has no type for becomes an object of one ``$`` name."""
    if isinstance(value, amqp.Table):
        return {"$pairs": [[name, json_value(item)] for name, item in value.pairs]}
    if isinstance(value, Mapping):
        table = {str(name): json_value(item) for name, item in value.items()}
        # A table that looks like such an object must not become what it looks like.
        return {"$table": table} if len(table) == 1 and next(iter(table)).startswith("$") else table
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, Timestamp):
        return {"$timestamp": int(value)}
    if type(value) in NUMBERS:
        plain = value.real
        # JSON has no word for these.
        return {NUMBERS[type(value)]: repr(float(plain)) if isinstance(plain, float) and plain - plain != 0 else plain}
    if isinstance(value, (bytes, bytearray)):
        return {"$binary": base64.b64encode(value).decode()}
    if isinstance(value, datetime.datetime):
        return {"$timestamp": int(value.timestamp())}
    if isinstance(value, decimal.Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"$float": repr(value)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool) or value is None:
        return value
    return int(value) if isinstance(value, int) else value


def header_text(headers: dict[str, Any]) -> str:
    """str: a table of headers as JSON."""
    text = json.dumps(json_value(headers), ensure_ascii=False, separators=(",", ":"))
    return _utf8(text)


def _utf8(text: str) -> str:
    # What is not UTF-8 in a store is a surrogate here, which Arrow refuses; JSON reads it out of the escape again.
    return text.encode("utf-8", "backslashreplace").decode()


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


class LostMessage(NamedTuple):
    """A message that a queue's index has, and whose bytes are not there, are not a message, or cannot be decoded.

    Attributes
    ----------
    queue : str
    seq_id : int
        Negative for a message that no index has.
    msg_id : bytes
        16 bytes.
    level : int or None
        Of a priority queue.
    path : str
        The file of the index that knows it, or the message file.
    embedded : bool
        Its bytes should stand in the queue's own files; otherwise in the vhost's message store.
    pos : int
        Where in `path` its entry or its bytes begin.
    reason : str
        Why they cannot be read although they may be whole, as of an unreadable file, or why they cannot be decoded;
        empty where they are lost.
    undecoded : bool
        The bytes are there and cannot be decoded.  `entries` of a queue's directory, and `MessageStore.read_term`, give
        them as they are.
    """

    queue: str
    seq_id: int
    msg_id: bytes
    level: int | None
    path: str
    embedded: bool
    pos: int = 0
    reason: str = ""
    undecoded: bool = False

    def __str__(self) -> str:
        level = "" if self.level is None else f" of level {self.level}"
        if self.undecoded and self.seq_id < 0:
            return f"message {self.msg_id.hex()}, {self.path}:{self.pos} cannot be decoded: {self.reason}"
        if self.undecoded:
            where = f"{self.path}:{self.pos}" + ("" if self.embedded else ", in the message store")
            what = f"seq_id {self.seq_id}{level} (message {self.msg_id.hex()}, {where})"
            return f"{what} cannot be decoded: {self.reason}"
        where = "the queue's own files" if self.embedded else "the message store"
        which = f"seq_id {self.seq_id}{level} (message {self.msg_id.hex()}, {self.path})"
        return f"{which} cannot be read: {self.reason}" if self.reason else f"{which} has no whole bytes in {where}"


def undecoded(message: Message, properties: bool = True) -> str | None:
    """str or None: why a message whose term is whole has no body, or no `properties` if they are asked for, here."""
    try:
        if not message.readable:
            message.body_size  # noqa: B018
        elif properties:
            message.properties  # noqa: B018
    except StoreError as error:
        return error.message
    return None


class LostMessages:
    """Tells of each lost message, or in one warning of all where nobody listens."""

    def __init__(self, on_lost: Callable[[LostMessage], None] | None):
        self._on_lost = on_lost
        self._number = 0
        self._first: LostMessage | None = None

    def add(self, lost: LostMessage) -> None:
        """Take note of one."""
        if self._on_lost is not None:
            self._on_lost(lost)
            return
        self._number += 1
        self._first = self._first or lost

    def warn(self) -> None:
        """Say how many nobody was told of."""
        if self._first is not None:
            logger.warning(
                "queue %s: lost messages left out: %d, the first is %s; verify says more",
                self._first.queue,
                self._number,
                self._first,
            )


class Batches:
    """Goes over the live messages of a queue's directory.

    Parameters
    ----------
    path : str
        The directory.
    indexes : sequence of QueueIndex or QueueIndexV2
        Opened read-only.
    stores : callable
        Called with True or False, it gives the persistent or the transient message store, or None; only where one is needed.
    vhost, queue, level
        What the columns of these names say.
    columns : sequence of str
        Of `COLUMNS`; only these are decoded.
    on_lost : callable, optional
        Told of each message that is passed over; by default a warning at the end says how many there were.
    """

    def __init__(
        self,
        path: str,
        indexes: Sequence[QueueIndex | QueueIndexV2],
        entries: Iterable[IndexEntry],
        stores: Any,
        *,
        vhost: str,
        queue: str,
        level: int | None,
        columns: Sequence[str] = COLUMNS,
        on_lost: Callable[[LostMessage], None] | None = None,
    ):
        self._on_lost = on_lost
        self._path = path
        self._indexes = indexes
        self._entries = entries
        self._stores = stores
        self._vhost, self._queue, self._level = vhost, queue, level
        self._columns = tuple(columns)
        self._schema = schema(columns)
        self._of_messages = [name for name in columns if name not in _OF_THE_INDEX]
        self._sources: dict[int, Region | None] = {}
        # Why messages of the batch that is being made cannot be read, by the number of the row.
        self._reasons: dict[int, str] = {}

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """pyarrow.RecordBatch: up to 8192 messages each, in the order of sequence ids."""
        lost = LostMessages(self._on_lost)
        if len(self._indexes) == 1 and isinstance(self._indexes[0], QueueIndex):
            yield from self._of_version_1(self._indexes[0], lost)
        else:
            entries = iter(self._entries)
            while rows := list(islice(entries, BATCH_ROWS // 8)):
                yield from self._of_entries(rows, lost)
        lost.warn()

    # ------------------------------------------------------------------------------------------------- version 1

    def _of_version_1(self, index: QueueIndex, lost: LostMessages) -> Iterator[pa.RecordBatch]:
        columns = index.columns()
        deliver = index.next_deliver_seq_id
        weights = np.cumsum(np.maximum(columns.term_size, columns.size))
        first, count = 0, len(columns.seq_id)
        while first < count:
            # Bodies in the store are as large as their size says.
            before = int(weights[first - 1]) if first else 0
            end = min(first + BATCH_ROWS, int(np.searchsorted(weights, before + _BATCH_BYTES, "right")))
            end = max(end, first + 1)
            rows = IndexColumns(*(column[first:end] for column in columns))
            batch = self._batch(rows, deliver, lost)
            if batch is not None:
                yield batch
            first = end

    def _source(self, segment: int) -> Region | None:
        if segment not in self._sources:
            for old in list(self._sources)[:-8]:
                region = self._sources.pop(old)
                if region is not None:
                    region.close()
            path = os.path.join(self._path, "journal.jif" if segment < 0 else f"{segment}.idx")
            self._sources[segment] = map_file(path)
        return self._sources[segment]

    def _batch(self, rows: IndexColumns, deliver: int, lost: LostMessages) -> pa.RecordBatch | None:
        embedded = (rows.flags & ENTRY_EMBEDDED) != 0
        persistent = (rows.flags & ENTRY_PERSISTENT) != 0
        there = np.ones(len(rows.seq_id), bool)
        sources: list[Region | bytes] = []
        numbers = np.zeros(len(there), np.int32)
        positions = rows.term_pos.copy()
        sizes = rows.term_size.copy()
        for segment in np.unique(rows.segment[embedded]).tolist():
            source = self._source(segment)
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
        paths = [os.path.join(self._path, "journal.jif" if each < 0 else f"{each}.idx") for each in rows.segment.tolist()]
        return self._finish(
            rows, there, persistent, embedded, rows.seq_id < deliver, sources, positions, sizes, numbers, lost, paths
        )

    def _stored(self, msg_id: bytes, persistent: bool, row: int) -> bytes | None:
        try:
            store: MessageStore | None = self._stores(persistent)
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

    def _of_entries(self, entries: list[IndexEntry], lost: LostMessages) -> Iterator[pa.RecordBatch]:
        terms = [
            entry.message if entry.message is not None else self._term_of(entry, row)
            for row, entry in enumerate(entries)
        ]
        there = np.array([term is not None for term in terms])
        sizes = np.array([len(term or b"") for term in terms], np.int64)
        positions = np.cumsum(sizes) - sizes
        rows = IndexColumns(
            np.array([entry.seq_id for entry in entries], np.int64),
            np.array([entry.size for entry in entries], np.int64),
            np.zeros(len(entries), np.uint8),
            # As the compiled reader has them: all 64 bits, which `_finish` takes for what they are.
            np.array([entry.expiry_us for entry in entries], np.uint64).view(np.int64),
            np.frombuffer(b"".join(entry.msg_id for entry in entries), np.uint8).reshape(-1, 16),
            np.zeros(len(entries), np.int64),
            np.array([entry.pos or 0 for entry in entries], np.int64),
            sizes,
        )
        batch = self._finish(
            rows,
            there,
            np.array([entry.persistent for entry in entries]),
            np.array([entry.message is not None or not any(entry.msg_id) for entry in entries]),
            np.array([entry.delivered for entry in entries]),
            [b"".join(term or b"" for term in terms)],
            positions,
            sizes,
            np.zeros(len(entries), np.int32),
            lost,
            [entry.path for entry in entries],
            "queue",
        )
        if batch is not None:
            yield batch

    # --------------------------------------------------------------------------------------------------- a batch

    def _finish(
        self,
        rows: IndexColumns,
        there: np.ndarray,
        persistent: np.ndarray,
        inside: np.ndarray,
        delivered: np.ndarray,
        sources: list[Any],
        positions: np.ndarray,
        sizes: np.ndarray,
        numbers: np.ndarray,
        lost: LostMessages,
        paths: list[str],
        embedding: str = "index",
    ) -> pa.RecordBatch | None:
        pa = pyarrow()
        # The status says which terms are not messages; a count needs it too.
        decoded = _term.message_columns(
            sources or [b""],
            np.where(there, positions, 0),
            np.where(there, sizes, 0),
            numbers,
            ["status", *self._of_messages],
        )
        status = decoded["status"]
        whole = there & (status != _term.RowStatus.ROW_DAMAGED)
        good = whole & (status != _term.RowStatus.ROW_UNREADABLE)
        made = arrow_arrays(decoded, self._of_messages, header_text=header_text)
        # Nulls would say that the message has no properties.
        if not _OF_PROPERTIES.isdisjoint(self._of_messages):
            good &= status != _term.RowStatus.ROW_BAD_PROPERTIES
        if "headers" in made:
            good &= ~(decoded["headers"][2].astype(bool) & made["headers"].is_null().to_numpy(zero_copy_only=False))
        count = len(good)
        of_the_queue = {"vhost": _utf8(self._vhost), "queue": _utf8(self._queue), "level": self._level}
        arrays = []
        for field in self._schema:
            name = field.name
            if name in made:
                arrays.append(made[name])
            elif name in of_the_queue:
                arrays.append(pa.repeat(pa.scalar(of_the_queue[name], field.type), count))
            elif name == "seq_id":
                arrays.append(pa.array(rows.seq_id))
            elif name == "size":
                arrays.append(pa.array(rows.size))
            elif name == "msg_id":
                ids = np.ascontiguousarray(rows.msg_id)
                arrays.append(pa.Array.from_buffers(field.type, count, [None, pa.py_buffer(ids)]))
            elif name == "persistent":
                arrays.append(pa.array(persistent))
            elif name == "delivered":
                arrays.append(pa.array(delivered))
            elif name == "expiry":
                milliseconds = (rows.expiry_us.view(np.uint64) // np.uint64(1000)).view(np.int64)
                arrays.append(pa.array(milliseconds, pa.int64(), mask=rows.expiry_us == 0).view(field.type))
            else:
                arrays.append(pa.array(["store", embedding]).take(pa.array(inside.astype(np.int8))))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if not good.all():
            for i in np.flatnonzero(~good).tolist():
                reason = None
                if whole[i]:
                    source, at, size = sources[numbers[i]], int(positions[i]), int(sizes[i])
                    term = source[at : at + size] if isinstance(source, bytes) else source.read(at, size)
                    reason = undecoded(Message.from_term(term))
                lost.add(
                    LostMessage(
                        self._queue,
                        int(rows.seq_id[i]),
                        rows.msg_id[i].tobytes(),
                        self._level,
                        paths[i],
                        bool(inside[i]),
                        int(rows.pos[i]),
                        reason or self._reasons.get(i, ""),
                        bool(reason),
                    )
                )
            batch = batch.filter(pa.array(good))
        self._reasons.clear()
        return batch if batch.num_rows else None
