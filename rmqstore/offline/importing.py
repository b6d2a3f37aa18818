"""Messages from files into a store: JSON lines, CSV, Arrow, Parquet, and the folders that an export of single bodies makes.

Owns the reading of such files, where a row of them stands (file and line), and the order of steps of an import.  It never
decides whether a message may be stored: that are the rules of `MessageStore.put_table`.  Invariants:

- Every row of every file is read and checked before the first is put.  A file that cannot be taken changes nothing.
- A store that is new has its name only when all rows are in it; until then it lies beside its place as ``….part``.
- Rows are put in the order of the files.  Memory does not grow with their number.
- Nothing outside the folder of a list of single bodies is read because of what that list says.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import csv
import dataclasses
import datetime
import gzip
import io
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rmqstore.config import StoreConfig
from rmqstore.errors import InvalidMessageError, MissingDependencyError, StoreError
from rmqstore.files.listing import is_empty
from rmqstore.files.open_file import open_regular
from rmqstore.files.output_file import OutputFolder, format_of
from rmqstore.offline.export import MANIFEST
from rmqstore.offline.import_bounds import bounded_parts, check_messages, parquet_batches
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.message_store import MessageStore
from rmqstore.store.opening import has_store
from rmqstore.store.table_rows import IGNORED_COLUMNS, LONE_KEY, TABLE_COLUMNS, lone_key

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["IMPORT_FORMATS", "ImportReport", "import_files"]

IMPORT_FORMATS = ("jsonl", "csv", "arrow", "parquet")
"""The formats of files that can be imported; a folder of single bodies is one of JSON lines."""

_ROWS = 2048
_BYTES = 8 << 20
# A line that is longer is none: a broker's messages have 4 MiB at most unless it is told otherwise.
_LINE_MAX = 256 << 20
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_ENCODINGS = ("body_encoding", "body_stored_encoding")
# What `rmqstore query --json` says of a message beside that.
_ALSO_IGNORED = ("version", "crc", "body_size", "body_error")
_KNOWN = frozenset({*TABLE_COLUMNS, *IGNORED_COLUMNS, *_ALSO_IGNORED, *_ENCODINGS, "body_stored", "body_file"})
_TEXTS = ("topic", "tags", "born_host", "store_host")
_TIMES = ("born_timestamp", "store_timestamp")
_NUMBERS = ("queue_id", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset")
# Which property holds a column.
_PROPERTIES = {"keys": "KEYS", "tags": "TAGS"}
_ROW = re.compile(r"row ([0-9]+):? (.*)", re.DOTALL)


@dataclass(frozen=True)
class ImportReport:
    """What `import_files` did.

    Attributes
    ----------
    path : str
    created : bool
        The store is new; without a message none is made.
    messages : int
    first_phy_offset, end_phy_offset : int
        Where the messages lie in the log, in bytes; both are the log's end for no messages.
    """

    path: str
    created: bool
    messages: int
    first_phy_offset: int
    end_phy_offset: int


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a file, and where each stands in it."""

    table: pa.Table
    file: str
    unit: str
    numbers: Sequence[int]

    def place(self, row: int) -> str:
        return f"{self.file}, {self.unit} {self.numbers[row]}"

    def span(self) -> str:
        return f"{self.file}, {self.unit}s {self.numbers[0]} to {self.numbers[-1]}"


# ----------------------------------------------------------------------------------------------------------------- reading


class _Input:
    """One input file, opened: its name for people, its bytes, and what compresses them."""

    def __init__(self, path: str, format: str | None):
        self.name = path
        if path == "-":
            self.name = "standard input"
            self.file: IO[bytes] = _spooled(sys.stdin.buffer)
            told, compression = None, None
        else:
            if os.path.isdir(path):
                path = os.path.join(path, MANIFEST)
                if not os.path.isfile(path):
                    raise StoreError(
                        f"the folder has no {MANIFEST}, so it is not an export of single bodies; give a file", self.name
                    )
                self.name = path
            self.file = open(path, "rb")
            if not self.file.seekable():
                # A pipe, as a shell's <(command) and /dev/stdin are.
                with self.file as pipe:
                    self.file = _spooled(pipe)
            told, compression = format_of(path)
        self.size = os.fstat(self.file.fileno()).st_size
        self.folder = os.path.dirname(os.path.abspath(path))
        head = self._head()
        if compression is None:
            compression = (
                "gzip" if head.startswith(b"\x1f\x8b") else "zstd" if head.startswith(b"\x28\xb5\x2f\xfd") else None
            )
        self.compression = compression
        self.format = format or told or self._guess()
        if self.compression is not None and self.format in ("arrow", "parquet"):
            raise StoreError(f"a {self.format} file that is compressed as a whole cannot be read; unpack it", self.name)

    def _head(self) -> bytes:
        self.file.seek(0)
        head = self.file.read(16)
        self.file.seek(0)
        return head

    def _guess(self) -> str:
        with self.text() as file:
            head = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
        if head.startswith(b"PAR1"):
            return "parquet"
        if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
            return "arrow"
        if head.startswith(b"{"):
            return "jsonl"
        if head[:5].isascii() and head[:1].isalpha():
            return "csv"
        raise StoreError("neither the name nor the content tells the format; give --format", self.name)

    @contextlib.contextmanager
    def text(self) -> Iterator[IO[bytes]]:
        self.file.seek(0)
        try:
            if self.compression == "gzip":
                with gzip.GzipFile(fileobj=self.file, mode="rb") as file:
                    yield io.BufferedReader(file)
            elif self.compression == "zstd":
                try:
                    import zstandard
                except ImportError:
                    raise MissingDependencyError(
                        "files compressed with zstd need the library zstandard: install it with "
                        "'pip install rmqstore[compression]'"
                    ) from None
                try:
                    yield io.BufferedReader(_Zstd(self.file, zstandard))
                except zstandard.ZstdError as error:
                    raise StoreError(f"the file cannot be unpacked: {error}", self.name) from None
            else:
                yield self.file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise StoreError(f"the file cannot be unpacked: {error}", self.name) from None

    def done(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self.file.tell()
        return self.size

    def chunks(self) -> Iterator[_Chunk]:
        if self.format == "jsonl":
            yield from _chunks_of_rows(self, "line", _json_rows(self))
        elif self.format == "csv":
            yield from _chunks_of_rows(self, "line", _csv_rows(self))
        else:
            yield from _arrow_chunks(self)

    def close(self) -> None:
        self.file.close()


class _Zstd(io.RawIOBase):
    """The contents of a file of zstd frames; the library's own reader takes a file that was cut for one that ended."""

    # What so many bytes unpack to is held at once: 128 KiB for 4 bytes at worst.
    _PIECE = 2048

    def __init__(self, file: IO[bytes], zstandard: Any):
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            piece = self._file.read(self._PIECE)
            if not piece:
                if self._frame is not None:
                    raise EOFError("compressed file ended before the end of its last frame was reached")
                return 0
            out = []
            while piece:
                if self._frame is None:
                    self._frame = self._decompressor.decompressobj()
                out.append(self._frame.decompress(piece))
                piece = b""
                if self._frame.eof:
                    # Files that were put together have several frames.
                    piece, self._frame = self._frame.unused_data, None
            self._ready = memoryview(b"".join(out))
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken


def _spooled(file: IO[bytes]) -> IO[bytes]:
    # What can be read only once, as a file: it is read twice.
    spool = tempfile.TemporaryFile()
    try:
        shutil.copyfileobj(file, spool, 1 << 20)
    except BaseException:
        spool.close()
        raise
    return spool


def _wrong(input: _Input, number: int, text: str) -> InvalidMessageError:
    return InvalidMessageError(f"{input.name}, line {number}: {text}")


def _json_rows(input: _Input) -> Iterator[tuple[int, int, dict[str, Any]]]:
    # Number of the line, its bytes, and its values.
    with input.text() as file:
        number = 0
        while line := file.readline(_LINE_MAX + 1):
            number += 1
            if len(line) > _LINE_MAX:
                raise _wrong(
                    input, number, f"the line has more than {_LINE_MAX >> 20} MiB; is this a file of JSON lines?"
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


class _CsvLines:
    """The lines of a file of CSV, and how much of them was read since a row began."""

    def __init__(self, input: _Input, file: IO[str]):
        self._input, self._file = input, file
        self.number = 1
        self.size = 0

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(_LINE_MAX + 1 - self.size)
        self.size += len(line)
        if self.size > _LINE_MAX:
            raise _wrong(self._input, self.number, f"the row has more than {_LINE_MAX >> 20} MiB; is this a file of CSV?")
        if not line:
            raise StopIteration
        return line


def _csv_rows(input: _Input) -> Iterator[tuple[int, int, dict[str, Any]]]:
    before = csv.field_size_limit(_LINE_MAX)
    try:
        with input.text() as file:
            text = io.TextIOWrapper(file, "utf-8-sig", newline="")
            try:
                yield from _csv_objects(input, _CsvLines(input, text))
            finally:
                with contextlib.suppress(ValueError):
                    text.detach()
    finally:
        csv.field_size_limit(before)


def _csv_objects(input: _Input, lines: _CsvLines) -> Iterator[tuple[int, int, dict[str, Any]]]:
    reader = csv.reader(lines, strict=True)
    names: list[str] | None = None
    first = 1
    while True:
        try:
            cells = next(reader, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise _wrong(input, first, f"this is no CSV in UTF-8: {error}") from None
        if cells is None:
            return
        if cells and names is None:
            names = cells
            for name in names:
                if name not in _KNOWN:
                    raise _wrong(
                        input,
                        first,
                        f"the first line names the columns, and there is no column {name!r}; {_KNOWN_TEXT}",
                    )
                if names.count(name) > 1:
                    raise _wrong(input, first, f"column {name!r} is named twice")
        elif cells and names is not None:
            if len(cells) != len(names):
                raise _wrong(input, first, f"there are {len(cells)} fields, the first line names {len(names)} columns")
            yield first, lines.size, _csv_object(input, first, dict(zip(names, cells, strict=True)))
        first = lines.number = reader.line_num + 1
        lines.size = 0


def _csv_object(input: _Input, number: int, cells: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, text in cells.items():
        if name in ("body", "body_stored"):
            # Empty is a body without a byte, and no body at all where its encoding is missing too.
            row[name] = text if text or cells.get(f"{name}_encoding", "utf-8") else None
        elif text == "":
            row[name] = None
        elif name in _NUMBERS:
            if not re.fullmatch("[+-]?[0-9]{1,19}", text):
                raise _wrong(input, number, f"{name} is {text!r}, not a whole number")
            row[name] = int(text)
        elif name in _TIMES:
            row[name] = int(text) if re.fullmatch("[+-]?[0-9]{1,19}", text) else text
        elif name == "properties":
            try:
                row[name] = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise _wrong(input, number, f"properties are no JSON object: {error}") from None
        elif name == "corrupt":
            if text.lower() not in ("true", "false"):
                raise _wrong(input, number, f"corrupt is {text!r}, not true or false")
            row[name] = text.lower() == "true"
        else:
            row[name] = text
    return row


_KNOWN_TEXT = f"known columns are {', '.join(TABLE_COLUMNS)}, body_encoding, body_stored, and what an export adds"


def _chunks_of_rows(input: _Input, unit: str, rows: Iterator[tuple[int, int, dict[str, Any]]]) -> Iterator[_Chunk]:
    pa = import_pyarrow()
    numbers: list[int] = []
    gathered: list[dict[str, Any]] = []
    size = 0
    for number, length, row in rows:
        value = _values(input, number, row)
        # A body may be a file of its own.
        length = max(length, len(value.get("body") or b"")) + 256
        if gathered and (len(gathered) >= _ROWS or size + length > _BYTES):
            yield _Chunk(_table(pa, gathered), input.name, unit, numbers)
            numbers, gathered, size = [], [], 0
        numbers.append(number)
        gathered.append(value)
        size += length
    if gathered:
        yield _Chunk(_table(pa, gathered), input.name, unit, numbers)


def _values(input: _Input, number: int, row: dict[str, Any]) -> dict[str, Any]:
    # The row with the types of Arrow's columns; whatever is wrong is said with its line.
    values: dict[str, Any] = {}
    try:
        if lone_key(row):
            raise ValueError(LONE_KEY)
        for name, value in row.items():
            if name not in _KNOWN:
                raise ValueError(f"there is no column {name!r}; {_KNOWN_TEXT}")
            if name in ("body", "body_stored"):
                values[name] = _decoded(name, value, row)
            elif name == "body_file":
                if "body" in row:
                    raise ValueError("there are both body and body_file")
                values["body"] = _body_of_file(input.folder, value)
            elif name == "corrupt":
                if value is not None and not isinstance(value, bool):
                    raise ValueError(f"corrupt is {value!r}, not true or false")
                values[name] = value
            elif name in TABLE_COLUMNS:
                values[name] = None if value is None else _value(name, value)
    except (ValueError, TypeError, binascii.Error) as error:
        raise _wrong(input, number, str(error)) from None
    except OSError as error:
        raise _wrong(input, number, f"{error.strerror} [{error.filename}]") from None
    return values


def _value(name: str, value: Any) -> Any:
    if name in _TEXTS:
        return _text(name, value)
    if name in _NUMBERS:
        return _number(name, value)
    if name in _TIMES:
        return _time(name, value)
    if name == "keys":
        # One text is split at spaces, as RocketMQ does.
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


def _decoded(name: str, value: Any, row: dict[str, Any]) -> bytes | None:
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


def _body_of_file(folder: str, name: Any) -> bytes:
    if name is None:
        raise ValueError("its body could not be decompressed when it was exported; leave such rows out")
    if not isinstance(name, str) or "\0" in name:
        raise ValueError(f"body_file is {name!r}, not the name of a file")
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, name))
    if os.path.isabs(name) or os.path.commonpath([root, path]) != root:
        raise ValueError(f"body_file is {name!r}, which leads out of the folder")
    with open(open_regular(path), "rb") as file:
        body = file.read(_LINE_MAX + 1)
    if len(body) > _LINE_MAX:
        raise ValueError(f"body_file {name!r} has more than {_LINE_MAX >> 20} MiB")
    return body


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
        # Rows that say nothing are rows all the same; literals may make messages of them.
        names = {"tags": None}
    return pa.table({name: pa.array([row.get(name) for row in rows], types[name]) for name in names})


def _arrow_chunks(input: _Input) -> Iterator[_Chunk]:
    pa = import_pyarrow()
    first = 1
    try:
        for batch in _arrow_batches(pa, input):
            # What a file says of its own offsets is looked at before anything follows them.
            batch.validate(full=True)
            names = batch.schema.names
            if len({*names}) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise StoreError(f"column {twice!r} is in the file twice; leave one of them out", input.name)
            for start, part in bounded_parts(batch, _ROWS, _BYTES, _LINE_MAX, input.name, first):
                part = _with_bodies(pa, part, input, first + start)
                numbers = range(first + start, first + start + part.num_rows)
                yield _Chunk(pa.Table.from_batches([part]), input.name, "row", numbers)
            first += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        # Arrow says of damage what it says of a disk; only the system has numbers for its errors.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise StoreError(f"this cannot be read as a file of {input.format}: {what}", input.name) from None


class _Bounded:
    """A file that gives no more than it has: a plain one takes memory for all that is asked, and Arrow asks unseen numbers."""

    def __init__(self, input: _Input):
        self._file, self._size = input.file, input.size

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._file.tell(), 0)
        return self._file.read(min(size, left) if size >= 0 else left)

    def seek(self, pos: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(pos, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        """Nothing: the input closes its file itself."""

    @property
    def closed(self) -> bool:
        return self._file.closed


def _arrow_batches(pa: Any, input: _Input) -> Iterator[pa.RecordBatch]:
    input.file.seek(0)
    file = pa.PythonFile(_Bounded(input), mode="r")
    if input.format == "parquet":
        yield from parquet_batches(file, _ROWS, _BYTES, input.name)
        return
    is_file = input._head().startswith(b"ARROW1")
    file.seek(8 if is_file else 0)
    check_messages(file, input.name)
    file.seek(0)
    if is_file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from pa.ipc.open_stream(file)


def _with_bodies(pa: Any, batch: pa.RecordBatch, input: _Input, first: int) -> pa.RecordBatch:
    # Bodies that are text with their encoding beside become bytes again.
    names = batch.schema.names
    for name in ("body", "body_stored"):
        if names.count(f"{name}_encoding") == 1 == names.count(name):
            bodies = []
            pairs = zip(batch.column(name).to_pylist(), batch.column(f"{name}_encoding").to_pylist(), strict=True)
            for number, (value, encoding) in enumerate(pairs, first):
                try:
                    bodies.append(_decoded(name, value, {f"{name}_encoding": encoding}))
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
    kept = [name for name in names if name not in _ENCODINGS and name not in _ALSO_IGNORED]
    return batch if len(kept) == len(names) else batch.select(kept)


def _is_text(pa: Any, kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _reconciled(table: pa.Table, literals: dict[str, Any]) -> pa.Table:
    # Exported rows have keys and tags twice, as columns and among the properties, which keep their order and their spaces.
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
            # The store refuses the column, and says why.
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


# ----------------------------------------------------------------------------------------------------------------- putting


def _is_store(path: str) -> bool:
    # A store into which nothing was put yet has no segment.
    return os.path.isdir(os.path.join(path, "commitlog")) or os.path.isfile(os.path.join(path, "checkpoint"))


def import_files(
    path: str | os.PathLike[str],
    files: Sequence[str | os.PathLike[str]],
    *,
    config: StoreConfig | None = None,
    format: str | None = None,
    topic: str | None = None,
    queue_id: int | None = None,
    tags: str | None = None,
    keys: Sequence[str] | None = None,
    keep_timestamps: bool = False,
    progress: Callable[[int, int], None] | None = None,
    on_stop: Callable[[int, str], None] | None = None,
) -> ImportReport:
    """Put the rows of files into the store at `path`, after what is there; a store that is not there is made.

    The columns are those of `MessageStore.put_table`, with ``body_encoding`` beside a body that is text.  What an export wrote
    can be imported as it is.

    Parameters
    ----------
    path : path
        Nobody else may write to the store.  Retention does not run meanwhile.
    files : sequence of path
        ``-`` is standard input; a folder is an export of single bodies.
    config : StoreConfig, optional
        By default what the store's files say, RocketMQ's defaults for a new one.
    format : {"jsonl", "csv", "arrow", "parquet"}, optional
        Of all files; by default what the ending of each says, or else its content.
    topic, queue_id, tags, keys
        For all rows, instead of what the files say.
    keep_timestamps : bool
        Take the store times from the files; they must not fall, nor lie before the store's last message.
    progress : callable, optional
        Called with (bytes done, bytes in all); every file counts twice, for checking and for putting.
    on_stop : callable, optional
        Called with (number of messages, place of the last of them), if an import into a store that was there ends early: these
        stay in it.

    Returns
    -------
    ImportReport

    Raises
    ------
    InvalidMessageError
        A row cannot be read or stored; the message names file and line (row for Arrow and Parquet).  Nothing was put.
    StoreError
        A file is not what it should be, there is no store in a folder that is not empty, or the disk has no room for what the
        rows of a small file stand for; nothing was put.
    StoreLockedError
        A broker or another process writes to the store; nothing was put.
    OSError, DiskFullError
        The system failed.  A new store is not there then; one that was there keeps what `on_stop` was told.
    MissingDependencyError
        pyarrow is not installed.
    """
    import_pyarrow()
    root = os.fspath(path)
    if not root:
        # It would be the working directory, which then were replaced by the new store.
        raise StoreError(
            "the name of the store is empty; give a store's root (the folder that holds commitlog/), or a name that is free"
        )
    if [os.fspath(each) for each in files].count("-") > 1:
        raise StoreError("standard input is given twice; give - once")
    created = not _is_store(root)
    if created and os.path.lexists(root) and not (os.path.isdir(root) and is_empty(root)):
        raise StoreError(
            "there is no store here, and the folder is not empty; give a store's root (the folder that holds commitlog/), or a "
            "name that is free",
            root,
        )
    if format is not None and format not in IMPORT_FORMATS:
        raise ValueError(f"format is {format!r}; give {', '.join(IMPORT_FORMATS[:-1])} or {IMPORT_FORMATS[-1]}")
    literals = {
        name: value
        for name, value in (("topic", topic), ("queue_id", queue_id), ("tags", tags), ("keys", keys))
        if value is not None
    }
    with contextlib.ExitStack() as stack:
        inputs = []
        for each in files:
            inputs.append(_Input(os.fspath(each), format))
            stack.callback(inputs[-1].close)
        job = _Import(inputs, literals, keep_timestamps, progress)
        if created:
            return job.into_new(root, config or StoreConfig())
        if config is None:
            config = StoreConfig.infer(root) if has_store(root) else StoreConfig()
        return job.into(root, config, on_stop)


class _Import:
    def __init__(
        self,
        inputs: list[_Input],
        literals: dict[str, Any],
        keep_timestamps: bool,
        progress: Callable[[int, int], None] | None,
    ):
        self.inputs = inputs
        self.literals = literals
        self.keep_timestamps = keep_timestamps
        self.progress = progress
        self.size = sum(each.size for each in inputs)
        self.put = 0
        self.last_place = ""

    def chunks(self, already: int, passes: int) -> Iterator[_Chunk]:
        before = already * self.size
        for input in self.inputs:
            for chunk in input.chunks():
                yield dataclasses.replace(chunk, table=_reconciled(chunk.table, self.literals))
                if self.progress is not None:
                    self.progress(before + input.done(), max(passes * self.size, 1))
            before += input.size
        if self.progress is not None:
            self.progress(before, max(passes * self.size, 1))

    def each(self, chunk: _Chunk, call: Callable[..., Any], check: Callable[..., Any]) -> Any:
        """`call` with the rows of `chunk`; `check` finds the row that is wrong where an error does not tell it."""
        try:
            return self._with(chunk.table, call)
        except (InvalidMessageError, TypeError, OverflowError) as error:
            text = _said(error)
            row = _ROW.match(text)
            if row is not None:
                raise InvalidMessageError(f"{chunk.place(int(row[1]))}: {row[2]}") from None
            for number in range(chunk.table.num_rows):
                try:
                    self._with(_one_row(chunk.table, number), check)
                except (InvalidMessageError, TypeError, OverflowError) as its_error:
                    its_text = re.sub("^row 0:? ", "", _said(its_error))
                    raise InvalidMessageError(f"{chunk.place(number)}: {its_text}") from None
            raise InvalidMessageError(f"{chunk.span()}: {text}") from None

    def _with(self, table: pa.Table, call: Callable[..., Any]) -> Any:
        return call(table, keep_timestamps=self.keep_timestamps, **self.literals)

    def into_new(self, root: str, config: StoreConfig) -> ImportReport:
        """Into a store that is not there: all or nothing, in one pass."""
        os.makedirs(os.path.dirname(os.path.realpath(root)), exist_ok=True)
        folder = OutputFolder(root)
        try:
            with (
                folder as made,
                MessageStore.open(made.part, config=config.replace(clean_resource_interval=0)) as store,
            ):
                for chunk in self.chunks(0, 1):
                    self.put += len(self.each(chunk, store.put_table, store.check_table))
                first, end = store.commit_log.min_offset, store.commit_log.max_offset
                if not self.put:
                    # Without a segment it would be no store to anybody, and no free name for the next import.
                    made.drop()
                    return ImportReport(root, False, 0, 0, 0)
        except StoreError:
            if not folder.was_taken:
                raise
            raise StoreError(
                "somebody else has made this while the import ran, and nothing was put; if it is a store, import once more "
                "to put the messages after those that it has",
                root,
            ) from None
        return ImportReport(root, True, self.put, first, end)

    def into(self, root: str, config: StoreConfig, on_stop: Callable[[int, str], None] | None) -> ImportReport:
        """Put into a store that is there: everything is checked first, then everything is put."""
        with MessageStore.open(root, config=config.replace(clean_resource_interval=0)) as store:
            last, size, free = None, 0, shutil.disk_usage(root).free
            # The newest segment may have its place on the disk already.
            room = free + store.commit_log.segment_size
            for chunk in self.chunks(0, 2):
                self.each(chunk, store.check_table, store.check_table)
                size += chunk.table.nbytes
                if size > room:
                    raise StoreError(
                        f"the rows up to {chunk.place(-1)} alone take {size} bytes, and the disk has {free} free; nothing was put. "
                        "Make room, or import fewer rows",
                        root,
                    )
                if self.keep_timestamps:
                    last = self._check_times(chunk, last)
            first = store.commit_log.max_offset
            try:
                for chunk in self.chunks(1, 2):
                    self.put += len(self.each(chunk, store.put_table, store.check_table))
                    self.last_place = chunk.place(-1)
            except BaseException:
                if on_stop is not None:
                    on_stop(self.put, self.last_place)
                raise
            return ImportReport(root, False, self.put, first, store.commit_log.max_offset)

    def _check_times(self, chunk: _Chunk, last: Any) -> Any:
        # Within a part the store looks by itself.
        times = chunk.table.column("store_timestamp")
        if len(times) and last is not None and _milliseconds(times[0]) < last:
            raise InvalidMessageError(
                f"{chunk.place(0)}: the store timestamp is before that of the row in front; sort by store_timestamp"
            )
        return _milliseconds(times[-1]) if len(times) else last


def _one_row(table: pa.Table, number: int) -> pa.Table:
    # A slice still has what lies in the lists and maps of other rows, and a cast looks at all of it.
    pa = import_pyarrow()
    try:
        return table.take(pa.array([number]))
    except pa.ArrowNotImplementedError:
        return table.slice(number, 1)


def _said(error: Exception) -> str:
    return error.message if isinstance(error, InvalidMessageError) else str(error)


def _milliseconds(value: Any) -> int:
    pa = import_pyarrow()
    if pa.types.is_timestamp(value.type):
        value = value.cast(pa.timestamp("ms", value.type.tz), safe=False).cast(pa.int64())
    return int(value.as_py())
