"""Read the files of an import as tables of rows; errors name the line or row.

The size of each table is known before it is decoded: a small file of Arrow or Parquet may have gigabytes of rows that share a value
(a dictionary, a view, a run).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from rmqstore import _numpy as np
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.files.output_file import format_of
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.table_writing import IGNORED_COLUMNS, LONE_KEY, TABLE_COLUMNS, lone_key

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BOUNDS", "Chunk", "Input", "arrow_chunks", "reconciled", "row_chunks"]


class Bounds(NamedTuple):
    """Rows and bytes that are in memory at once, and the largest size of a row in bytes."""

    rows: int
    size: int
    largest: int


# A longer line is not a message: a broker's default limit is 4 MiB.
BOUNDS = Bounds(rows=2048, size=8 << 20, largest=256 << 20)


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file, and the place of each in it."""

    table: pa.Table
    file: str
    unit: str
    numbers: Sequence[int]

    def place(self, row: int) -> str:
        """Return file and line of a row."""
        return f"{self.file}, {self.unit} {self.numbers[row]}"

    def span(self) -> str:
        """Return file and lines of the first and the last row."""
        return f"{self.file}, {self.unit}s {self.numbers[0]} to {self.numbers[-1]}"


class Input:
    """An open input file, with its name for messages, its size and its compression."""

    def __init__(self, path: str, format: str | None):
        self.name = "standard input" if path == "-" else path
        if path == "-":
            self.file: IO[bytes] = _spooled(sys.stdin.buffer)
            told, compression = None, None
        else:
            self.file = open(path, "rb")
            if not self.file.seekable():
                # A pipe, for instance a shell's <(command) or /dev/stdin.
                with self.file as pipe:
                    self.file = _spooled(pipe)
            told, compression = format_of(path)
        self.size = os.fstat(self.file.fileno()).st_size
        if compression is None:
            head = self.head()
            packed = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
            compression = next((name for magic, name in packed if head.startswith(magic)), None)
        self.compression = compression
        self.format = format or told or self._guess()
        if self.format == "csv":
            raise StoreError("CSV is not imported; give JSON lines, Arrow or Parquet", self.name)
        if self.compression is not None and self.format != "jsonl":
            raise StoreError(f"a {self.format} file that is compressed as a whole cannot be read; unpack it", self.name)

    def head(self) -> bytes:
        """Return the first bytes of the file, unchanged."""
        self.file.seek(0)
        return self.file.read(16)

    def _guess(self) -> str:
        with self.text() as file:
            head = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
        if head.startswith(b"PAR1"):
            return "parquet"
        if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
            return "arrow"
        if head.startswith(b"{"):
            return "jsonl"
        raise StoreError("neither the name nor the content tells the format; give --format", self.name)

    @contextlib.contextmanager
    def text(self) -> Iterator[IO[bytes]]:
        """Open the unpacked file."""
        if self.compression is None:
            self.file.seek(0)
            yield self.file
            return
        packed = import_pyarrow().CompressedInputStream(self.arrow_file(), self.compression)
        try:
            yield io.BufferedReader(packed)
        except OSError as error:
            # An error of the operating system has a number.
            if error.errno is not None:
                raise
            raise StoreError(f"the file cannot be unpacked: {error}", self.name) from None

    def arrow_file(self) -> Any:
        """Return the unchanged file for pyarrow, at its begin."""
        self.file.seek(0)
        return import_pyarrow().PythonFile(_Bounded(self), mode="r")

    def done(self) -> int:
        """Return the number of bytes that were read."""
        with contextlib.suppress(OSError, ValueError):
            return self.file.tell()
        return self.size

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class _Bounded:
    """An input for Arrow, whose requests may be hostile: a plain file allocates all requested bytes."""

    closed = False

    def __init__(self, input: Input):
        self._file, self._size = input.file, input.size

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._file.tell(), 0)
        return self._file.read(min(size, left) if size >= 0 else left)

    def seek(self, pos: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(pos, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        """Do nothing: the input closes its file."""


def _spooled(file: IO[bytes]) -> IO[bytes]:
    # A copy of what can be read only once: it is read twice.
    spool = tempfile.TemporaryFile()
    try:
        shutil.copyfileobj(file, spool, 1 << 20)
        spool.flush()
    except BaseException:
        spool.close()
        raise
    return spool


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
ENCODINGS = ("body_encoding", "body_stored_encoding")
"""Columns with the encodings of bodies."""

ALSO_IGNORED = ("version", "crc", "body_size", "body_error")
"""Columns that `rmqstore query --json` has in addition to those of an export."""

_KNOWN = frozenset({*TABLE_COLUMNS, *IGNORED_COLUMNS, *ALSO_IGNORED, *ENCODINGS, "body_stored"})
_TEXTS = ("topic", "tags", "born_host", "store_host")
_TIMES = ("born_timestamp", "store_timestamp")
_NUMBERS = ("queue_id", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset")


def _wrong(input: Input, number: int, text: str) -> InvalidMessageError:
    return InvalidMessageError(f"{input.name}, line {number}: {text}")


def _json_rows(input: Input) -> Iterator[tuple[int, int, dict[str, Any]]]:
    # The number, the size and the values of each line.
    with input.text() as file:
        number = 0
        while line := file.readline(BOUNDS.largest + 1):
            number += 1
            if len(line) > BOUNDS.largest:
                raise _wrong(
                    input, number, f"the line has more than {BOUNDS.largest >> 20} MiB; is this a file of JSON lines?"
                )
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _wrong(input, number, f"this is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise _wrong(input, number, f"a message is a JSON object, not {type(row).__name__}")
            yield number, len(line), row


_KNOWN_TEXT = f"known columns are {', '.join(TABLE_COLUMNS)}, body_encoding, body_stored, and what an export adds"


def row_chunks(input: Input) -> Iterator[Chunk]:
    """Read a file of JSON lines, some rows at a time."""
    pa = import_pyarrow()
    numbers: list[int] = []
    gathered: list[dict[str, Any]] = []
    size = 0
    for number, length, row in _json_rows(input):
        value = _values(input, number, row)
        length += 256
        if gathered and (len(gathered) >= BOUNDS.rows or size + length > BOUNDS.size):
            yield Chunk(_table(pa, gathered), input.name, "line", numbers)
            numbers, gathered, size = [], [], 0
        numbers.append(number)
        gathered.append(value)
        size += length
    if gathered:
        yield Chunk(_table(pa, gathered), input.name, "line", numbers)


def _values(input: Input, number: int, row: dict[str, Any]) -> dict[str, Any]:
    # The row with the types of Arrow's columns; errors name its line.
    values: dict[str, Any] = {}
    try:
        if lone_key(row):
            raise ValueError(LONE_KEY)
        for name, value in row.items():
            if name not in _KNOWN:
                raise ValueError(f"there is no column {name!r}; {_KNOWN_TEXT}")
            if name in ("body", "body_stored"):
                values[name] = decoded(name, value, row)
            elif name == "corrupt":
                if value is not None and not isinstance(value, bool):
                    raise ValueError(f"corrupt is {value!r}, not true or false")
                values[name] = value
            elif name in TABLE_COLUMNS:
                values[name] = None if value is None else _value(name, value)
    except (ValueError, TypeError, binascii.Error) as error:
        raise _wrong(input, number, str(error)) from None
    return values


def _value(name: str, value: Any) -> Any:
    if name in _TEXTS:
        return _text(name, value)
    if name in _NUMBERS:
        return _number(name, value)
    if name in _TIMES:
        return _time(name, value)
    if name == "keys":
        # RocketMQ splits one text at spaces.
        keys = [key for key in value.split(" ") if key] if isinstance(value, str) else value
        if not isinstance(keys, list):
            raise ValueError(f"keys are {value!r}, not a list of texts")
        return [_text("a key", key) for key in keys]
    if not isinstance(value, dict):
        raise ValueError(f"{name} are {value!r}, not an object")
    return [(_text("a property's name", key), _text(f"property {key!r}", each)) for key, each in value.items()]


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is {value!r}, which UTF-8 cannot hold") from None
    return value


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is {value!r}, not a whole number of 64 bits")
    return value


def _time(name: str, value: Any) -> int:
    if not isinstance(value, str):
        return _number(name, value)
    try:
        moment = datetime.datetime.fromisoformat(re.sub("[zZ]$", "+00:00", value))
    except ValueError:
        raise ValueError(f"{name} is {value!r}, neither ms since the epoch nor an ISO time") from None
    if moment.tzinfo is None:
        raise ValueError(f"{name} is {value!r}, without a zone; add Z or +00:00")
    return (moment - _EPOCH) // datetime.timedelta(milliseconds=1)


def decoded(name: str, value: Any, row: dict[str, Any]) -> bytes | None:
    """Decode a body with its ``…_encoding`` in `row`; ValueError or TypeError for a wrong one."""
    encoding = row.get(f"{name}_encoding", "utf-8")
    if value is None:
        if f"{name}_encoding" in row and encoding is None:
            raise ValueError("its body could not be decompressed when it was exported; leave such rows out")
        return None
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not a text")
    if encoding == "utf-8":
        return _text(name, value).encode()
    if encoding == "hex":
        return bytes.fromhex(value)
    if encoding == "base64":
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{name} is not base64: {error}") from None
    raise ValueError(f"{name}_encoding is {encoding!r}, not utf-8, hex or base64")


def _types(pa: Any) -> dict[str, Any]:
    text = pa.large_string()
    return {
        **dict.fromkeys(_TEXTS, text),
        **dict.fromkeys((*_NUMBERS, *_TIMES), pa.int64()),
        "keys": pa.large_list(text),
        "properties": pa.map_(text, text),
        "body": pa.large_binary(),
        "body_stored": pa.large_binary(),
        "corrupt": pa.bool_(),
    }


def _table(pa: Any, rows: list[dict[str, Any]]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    types = _types(pa)
    if not names:
        # Literals may make messages of rows without values.
        names = {"tags": None}
    return pa.table({name: pa.array([row.get(name) for row in rows], types[name]) for name in names})


# --------------------------------------------------------------------------------------------------- Arrow and Parquet

# The properties of columns.
_PROPERTIES = {"keys": "KEYS", "tags": "TAGS"}


def arrow_chunks(input: Input) -> Iterator[Chunk]:
    """Read a file of Arrow or Parquet, some rows at a time."""
    pa = import_pyarrow()
    first = 1
    try:
        for batch in _arrow_batches(pa, input):
            # Offsets in the file are hostile until they are checked.
            batch.validate(full=True)
            names = batch.schema.names
            if len({*names}) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise StoreError(f"column {twice!r} is in the file twice; leave one of them out", input.name)
            for start, part in bounded_parts(batch, input.name, first):
                part = _with_bodies(pa, part, input, first + start)
                numbers = range(first + start, first + start + part.num_rows)
                yield Chunk(pa.Table.from_batches([part]), input.name, "row", numbers)
            first += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        # Arrow raises OSError for damage too, but without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise StoreError(f"this cannot be read as a file of {input.format}: {what}", input.name) from None


def _arrow_batches(pa: Any, input: Input) -> Iterator[pa.RecordBatch]:
    is_file = input.head().startswith(b"ARROW1")
    file = input.arrow_file()
    if input.format == "parquet":
        yield from parquet_batches(file, input.name)
        return
    if is_file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from pa.ipc.open_stream(file)


def _with_bodies(pa: Any, batch: pa.RecordBatch, input: Input, first: int) -> pa.RecordBatch:
    # Bodies that are text with an encoding become bytes.
    names = batch.schema.names
    for name in ("body", "body_stored"):
        if names.count(f"{name}_encoding") == 1 == names.count(name):
            bodies = []
            pairs = zip(batch.column(name).to_pylist(), batch.column(f"{name}_encoding").to_pylist(), strict=True)
            for number, (value, encoding) in enumerate(pairs, first):
                try:
                    bodies.append(decoded(name, value, {f"{name}_encoding": encoding}))
                except (ValueError, TypeError) as error:
                    raise InvalidMessageError(f"{input.name}, row {number}: {error}") from None
            arrays = [pa.array(bodies, pa.large_binary()) if each == name else batch.column(each) for each in names]
            batch = pa.RecordBatch.from_arrays(arrays, names=names)
        elif "corrupt" in names and name in names and batch.column(name).null_count:
            row = batch.column(name).is_null().to_pylist().index(True)
            if not batch.column("corrupt")[row].as_py():
                raise InvalidMessageError(
                    f"{input.name}, row {first + row}: its body could not be decompressed when it was exported; leave such "
                    "rows out"
                )
    kept = [name for name in names if name not in ENCODINGS and name not in ALSO_IGNORED]
    return batch if len(kept) == len(names) else batch.select(kept)


def _is_text(pa: Any, kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def reconciled(table: pa.Table, literals: dict[str, Any]) -> pa.Table:
    """Remove values that a table has twice, and those that `literals` replace.

    Exported rows have keys and tags as columns and among the properties, which keep their order and their spaces.
    """
    pa = import_pyarrow()
    import pyarrow.compute as pc

    given = [name for name in table.column_names if name in literals]
    table = table.drop_columns(given) if given else table
    if "properties" not in table.column_names or not pa.types.is_map(table.schema.field("properties").type):
        return table
    kind = table.schema.field("properties").type
    place = table.column_names.index("properties")
    if not (_is_text(pa, kind.key_type) and _is_text(pa, kind.item_type)):
        kind = pa.map_(pa.large_string(), pa.large_string())
        try:
            table = table.set_column(place, "properties", table.column("properties").cast(kind))
        except pa.ArrowException:
            # The store refuses the column with a message.
            return table
    replaced = {_PROPERTIES[name] for name in literals if name in _PROPERTIES}
    if replaced:
        rows = [
            None if row is None else [pair for pair in row if pair[0] not in replaced]
            for row in table.column("properties").to_pylist()
        ]
        table = table.set_column(place, "properties", pa.array(rows, kind))
    for name, property in _PROPERTIES.items():
        if name not in table.column_names:
            continue
        told = pc.map_lookup(table.column("properties"), pa.scalar(property, kind.key_type), "last").cast(
            pa.large_string()
        )
        column = table.column(name)
        texts = column
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            if not _is_text(pa, column.type.value_type):
                continue
            texts = pc.binary_join(column.cast(pa.large_list(pa.large_string())), pa.scalar(" ", pa.large_string()))
        elif not _is_text(pa, column.type):
            continue
        same = told
        if name == "keys":
            same = pc.utf8_trim(pc.replace_substring_regex(told, " +", " "), " ")
        agrees = pc.fill_null(pc.equal(same, texts.cast(pa.large_string())), False)
        place = table.column_names.index(name)
        table = table.set_column(place, name, pc.if_else(agrees, pa.scalar(None, column.type), column))
    return table


# Bytes that are always unpacked at once; anything larger may be at most this many times its size in the file.
_UNPACKED = 256 << 20
_RATIO = 1000
# More values than a message can have properties.
_VALUES = 1 << 16
_ROW = 64


def _sizes(array: Any) -> np.ndarray:
    # The size of each value as plain Arrow, in bytes.
    pa = import_pyarrow()
    types, kind, num = pa.types, array.type, len(array)
    if isinstance(kind, pa.BaseExtensionType):
        return _sizes(array.storage)
    if types.is_dictionary(kind):
        sizes, places = _sizes(array.dictionary), _filled(array.indices)
        return sizes[places] + 4 if len(sizes) else np.zeros(num, np.int64)
    if types.is_run_end_encoded(kind):
        ends = np.asarray(array.run_ends.to_numpy(zero_copy_only=False), np.int64)
        runs = np.searchsorted(ends, np.arange(num) + array.offset, side="right")
        return np.asarray(_sizes(array.values)[runs])
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)
        return np.asarray(views[array.offset : array.offset + num, 0], np.int64) + 16
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return _filled(_compute().binary_length(array)) + 8
    if types.is_fixed_size_binary(kind):
        return np.full(num, kind.byte_width, np.int64)
    if types.is_map(kind):
        return _in_lists(array, _sizes(array.keys) + _sizes(array.items))
    if types.is_list(kind) or types.is_large_list(kind):
        return _in_lists(array, _sizes(array.values))
    # Numbers; the store refuses other types.
    return np.full(num, 16, np.int64)


def _compute() -> Any:
    import pyarrow.compute

    return pyarrow.compute


def _filled(numbers: Any) -> np.ndarray:
    return np.asarray(_compute().fill_null(numbers, 0).to_numpy(zero_copy_only=False), np.int64)


def _in_lists(array: Any, sizes: np.ndarray) -> np.ndarray:
    ends = np.asarray(array.offsets.to_numpy(zero_copy_only=False), np.int64)
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return np.asarray(sums[ends[1:]] - sums[ends[:-1]] + 8)


def bounded_parts(batch: pa.RecordBatch, name: str, first: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut a validated batch into parts within the bounds, as plain Arrow, and yield each with the number of its first row.

    `name` and `first` are the file, and the number of the batch's first row in it.  Raises InvalidMessageError for a row that is
    too large.
    """
    sizes = np.full(batch.num_rows, _ROW, np.int64)
    for column in batch.columns:
        sizes += _sizes(column)
    for row in np.flatnonzero(sizes > BOUNDS.largest)[:1].tolist():
        raise InvalidMessageError(f"{name}, row {first + row}: it has {sizes[row]} bytes; a message has {BOUNDS.largest} at most")
    ends = np.cumsum(sizes)
    start = 0
    while start < batch.num_rows:
        before = int(ends[start - 1]) if start else 0
        end = min(max(int(np.searchsorted(ends, before + BOUNDS.size, side="right")), start + 1), start + BOUNDS.rows)
        part = batch.slice(start, end - start)
        columns = [_plain(column) for column in part.columns]
        yield start, type(part).from_arrays(columns, names=part.schema.names)
        start = end


def _plain(array: Any) -> Any:
    # Without the dictionaries of `parquet_batches`.
    pa = import_pyarrow()
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    children: tuple[Any, ...] = ()
    if pa.types.is_map(array.type):
        children = array.keys, array.items
    elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        children = (array.values,)
    if not any(pa.types.is_dictionary(each.type) for each in children):
        return array
    begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    offsets = _compute().subtract(array.offsets, begin)
    if array.null_count:
        # A null in the offsets is a null in the list.
        absent = np.append(array.is_null().to_numpy(zero_copy_only=False), False)
        offsets = pa.array(offsets.to_numpy(zero_copy_only=False), offsets.type, mask=absent)
    return type(array).from_arrays(offsets, *(_plain(each.slice(begin, end - begin)) for each in children))


def parquet_batches(file: Any, name: str) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a Parquet file within the bounds: fewer rows if rows may be large.

    Texts are dictionaries, so that a shared value is in memory once.  Raises StoreError for a row group that unpacks to much more
    than messages do.
    """
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(file)
    leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    reader = pyarrow.parquet.ParquetFile(file, metadata=metadata, read_dictionary=texts)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        weight = sum(max(leaf.length, 0) for leaf in leaves)
        for column, leaf in enumerate(leaves):
            chunk = group.column(column)
            packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
            what = f"column {leaf.path} of row group {number}"
            if unpacked > max(_UNPACKED, _RATIO * packed):
                raise StoreError(
                    f"{what} unpacks to {unpacked} bytes from {packed}; write the file again in smaller row groups", name
                )
            if chunk.num_values > _VALUES * group.num_rows:
                raise StoreError(
                    f"{what} has {chunk.num_values} values in {group.num_rows} rows: too many for messages", name
                )
            weight += unpacked // max(group.num_rows, 1) + 8 * -(-chunk.num_values // max(group.num_rows, 1))
        yield from reader.iter_batches(max(min(BOUNDS.rows, BOUNDS.size // max(weight, 1)), 1), row_groups=[number])
