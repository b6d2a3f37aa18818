"""Messages as Apache Arrow columns: the schema, and the ways from the log, a queue or the index to it.

Owns the names and types of the columns and the making of Arrow arrays over the core's buffers, without a copy.  It never
decodes a record (`_core.ArrowColumns` does that) and imports pyarrow only when columns are asked for.  A row equals the
`MessageExt` that the same place of the log gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rmqstore._core import COLUMN_NAMES, ArrowColumns
from rmqstore.commit_log import CommitLog
from rmqstore.errors import CorruptionError, MissingDependencyError, UnsupportedFormatError
from rmqstore.message import decompress_body, host_from_bytes

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["DEFAULT_COLUMNS", "record_batches", "scan_schema"]

DEFAULT_COLUMNS = tuple(name for name in COLUMN_NAMES if name not in ("unique_key", "body_stored"))
"""The columns of a scan that names none: all but those that repeat what another one holds."""

# Bodies and properties of one batch; far below the 2 GiB that Arrow's 32-bit offsets reach.
_BATCH_BYTES = 64 * 1024 * 1024
_INT64_RANGE = (-(2**63), 2**63 - 1)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingDependencyError(
            "columns need the library pyarrow: install it with 'pip install rmqstore[arrow]'"
        ) from None
    return pyarrow


def _types(pa: Any) -> dict[str, Any]:
    text, time = pa.string(), pa.timestamp("ms", tz="UTC")
    return {
        "topic": text,
        "queue_id": pa.int32(),
        "queue_offset": pa.int64(),
        "phy_offset": pa.int64(),
        "size": pa.int32(),
        "msg_id": text,
        "keys": pa.list_(text),
        "tags": text,
        "body": pa.binary(),
        "properties": pa.map_(text, text),
        "born_timestamp": time,
        "store_timestamp": time,
        "born_host": text,
        "store_host": text,
        "flag": pa.int32(),
        "sys_flag": pa.int32(),
        "reconsume_times": pa.int32(),
        "prepared_transaction_offset": pa.int64(),
        "corrupt": pa.bool_(),
        "unique_key": text,
        "body_stored": pa.binary(),
    }


def chosen_columns(columns: Iterable[str] | None) -> tuple[str, ...]:
    """tuple of str: the names that `columns` asks for, in its order; `DEFAULT_COLUMNS` for None.

    Raises
    ------
    ValueError
        A name that no column has, or one that comes twice.
    """
    if columns is None:
        return DEFAULT_COLUMNS
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    for i, name in enumerate(names):
        if name not in COLUMN_NAMES:
            raise ValueError(f"there is no column {name!r}; there are {', '.join(COLUMN_NAMES)}")
        if name in names[:i]:
            raise ValueError(f"column {name!r} is asked for twice")
    return names


def scan_schema(columns: Iterable[str] | None = None) -> pa.Schema:
    """pyarrow.Schema: the names and types of these columns (docs/columns.md); without names those of a scan.

    Raises
    ------
    ValueError
        A name that no column has, or one that comes twice.
    MissingDependencyError
        pyarrow is not installed.
    """
    pa = _pyarrow()
    types = _types(pa)
    return pa.schema([pa.field(name, types[name]) for name in chosen_columns(columns)])


def _decompress(body: bytes, sys_flag: int) -> bytes | None:
    # In a column damage is a value; that a library is missing is an error, as it would hide sound bodies.
    try:
        return decompress_body(body, sys_flag)
    except (CorruptionError, UnsupportedFormatError):
        return None


class Columns:
    """Arrow record batches out of `ArrowColumns`.

    Parameters
    ----------
    columns : iterable of str, optional
        As of `chosen_columns`.
    batch_size : int
        Rows of a batch at most.
    crc_check : int
        As of `CommitLog.crc_check`.
    """

    def __init__(self, columns: Iterable[str] | None, batch_size: int, crc_check: int):
        self.pa = _pyarrow()
        self.schema = scan_schema(columns)
        self.out = ArrowColumns(
            self.schema.names,
            capacity=batch_size,
            byte_limit=_BATCH_BYTES,
            check_crc=crc_check,
            decompress=_decompress,
            host_text=host_from_bytes,
        )
        self._entry = self.pa.struct(
            [self.pa.field("key", self.pa.string(), nullable=False), self.pa.field("value", self.pa.string())]
        )

    def take(self) -> pa.RecordBatch:
        """pyarrow.RecordBatch: the rows that were filled in since the last one."""
        pa = self.pa
        num, parts = self.out.take()
        buffer = pa.py_buffer
        arrays = []
        for field in self.schema:
            values, valid, null_num, data, child, more_data, more_child = parts[field.name]
            buffers = [None if valid is None else buffer(valid), buffer(values)]
            type = field.type
            if field.name == "keys":
                texts = pa.Array.from_buffers(pa.string(), len(child) - 1, [None, buffer(child), buffer(data)], 0)
                arrays.append(pa.Array.from_buffers(type, num, buffers, 0, children=[texts]))
            elif field.name == "properties":
                length = len(child) - 1
                entries = pa.Array.from_buffers(
                    self._entry,
                    length,
                    [None],
                    0,
                    children=[
                        pa.Array.from_buffers(pa.string(), length, [None, buffer(child), buffer(data)], 0),
                        pa.Array.from_buffers(pa.string(), length, [None, buffer(more_child), buffer(more_data)], 0),
                    ],
                )
                arrays.append(pa.Array.from_buffers(type, num, buffers, 0, children=[entries]))
            else:
                if data is not None:
                    buffers.append(buffer(data))
                arrays.append(pa.Array.from_buffers(type, num, buffers, null_num))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def record_batches(log: CommitLog, columns: Columns, begin: int | None, end: int | None) -> Iterator[pa.RecordBatch]:
    """The chosen records from `begin` to `end` as record batches, none of them empty.

    Parameters
    ----------
    begin, end : int, optional
        As of `CommitLog.entries`.
    """
    for _ in log.fill(columns.out, begin, end):
        if columns.out.count:
            yield columns.take()
