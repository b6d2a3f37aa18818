"""Files of an import, opened; rows of JSON lines and CSV as tables to put, each error with its line.

Nothing outside the folder of a list of single bodies is read because of what that list says.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import csv
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.files.open_file import open_regular
from rmqstore.files.output_file import format_of
from rmqstore.offline.export_files import MANIFEST, import_zstandard
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.table_writing import IGNORED_COLUMNS, LONE_KEY, TABLE_COLUMNS, lone_key

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BOUNDS", "Bounds", "Chunk", "Input"]


@dataclass(frozen=True)
class Bounds:
    """How much is held at once.

    Attributes
    ----------
    rows, size : int
        Rows and bytes of a part.
    largest : int
        Bytes that one row may have.
    """

    rows: int
    size: int
    largest: int


# A longer line is no message: a broker's have 4 MiB at most unless it is told otherwise.
BOUNDS = Bounds(rows=2048, size=8 << 20, largest=256 << 20)
"""Rows and bytes that are held at once, and bytes of a row."""


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file, and the place of each in it."""

    table: pa.Table
    file: str
    unit: str
    numbers: Sequence[int]

    def place(self, row: int) -> str:
        """Where a row is: file and line."""
        return f"{self.file}, {self.unit} {self.numbers[row]}"

    def span(self) -> str:
        """Where the rows are, the first and the last."""
        return f"{self.file}, {self.unit}s {self.numbers[0]} to {self.numbers[-1]}"


class Input:
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
        head = self.head()
        if compression is None:
            compression = (
                "gzip" if head.startswith(b"\x1f\x8b") else "zstd" if head.startswith(b"\x28\xb5\x2f\xfd") else None
            )
        self.compression = compression
        self.format = format or told or self._guess()
        if self.compression is not None and self.format in ("arrow", "parquet"):
            raise StoreError(f"a {self.format} file that is compressed as a whole cannot be read; unpack it", self.name)

    def head(self) -> bytes:
        """The first bytes of the file, as they are."""
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
        """The file unpacked, from its begin."""
        self.file.seek(0)
        try:
            if self.compression == "gzip":
                with gzip.GzipFile(fileobj=self.file, mode="rb") as file:
                    yield io.BufferedReader(file)
            elif self.compression == "zstd":
                zstandard = import_zstandard()
                try:
                    yield io.BufferedReader(_Zstd(self.file, zstandard))
                except zstandard.ZstdError as error:
                    raise StoreError(f"the file cannot be unpacked: {error}", self.name) from None
            else:
                yield self.file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise StoreError(f"the file cannot be unpacked: {error}", self.name) from None

    def done(self) -> int:
        """How many of its bytes were read."""
        with contextlib.suppress(OSError, ValueError):
            return self.file.tell()
        return self.size

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class _Zstd(io.RawIOBase):
    """The contents of a file of zstd frames; the library's own reader takes a file that was cut for one that ended."""

    # Bytes that are unpacked at once, each 4 to 128 KiB at worst.
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


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
ENCODINGS = ("body_encoding", "body_stored_encoding")
"""Columns that say how a body is written."""

ALSO_IGNORED = ("version", "crc", "body_size", "body_error")
"""Columns that `rmqstore query --json` has beside those of an export."""

_KNOWN = frozenset({*TABLE_COLUMNS, *IGNORED_COLUMNS, *ALSO_IGNORED, *ENCODINGS, "body_stored", "body_file"})
_TEXTS = ("topic", "tags", "born_host", "store_host")
_TIMES = ("born_timestamp", "store_timestamp")
_NUMBERS = ("queue_id", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset")


def _wrong(input: Input, number: int, text: str) -> InvalidMessageError:
    return InvalidMessageError(f"{input.name}, line {number}: {text}")


def _json_rows(input: Input) -> Iterator[tuple[int, int, dict[str, Any]]]:
    # Number of the line, its bytes, and its values.
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


class _CsvLines:
    """The lines of a file of CSV, and how much of them was read since a row began."""

    def __init__(self, input: Input, file: IO[str]):
        self._input, self._file = input, file
        self.number = 1
        self.size = 0

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(BOUNDS.largest + 1 - self.size)
        self.size += len(line)
        if self.size > BOUNDS.largest:
            raise _wrong(self._input, self.number, f"the row has more than {BOUNDS.largest >> 20} MiB; is this a file of CSV?")
        if not line:
            raise StopIteration
        return line


def _csv_rows(input: Input) -> Iterator[tuple[int, int, dict[str, Any]]]:
    before = csv.field_size_limit(BOUNDS.largest)
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


def _csv_objects(input: Input, lines: _CsvLines) -> Iterator[tuple[int, int, dict[str, Any]]]:
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


def _csv_object(input: Input, number: int, cells: dict[str, str]) -> dict[str, Any]:
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


def row_chunks(input: Input) -> Iterator[Chunk]:
    """Read a file of JSON lines or CSV, some rows at a time."""
    pa = import_pyarrow()
    rows = _json_rows(input) if input.format == "jsonl" else _csv_rows(input)
    numbers: list[int] = []
    gathered: list[dict[str, Any]] = []
    size = 0
    for number, length, row in rows:
        value = _values(input, number, row)
        # A body may be a file of its own.
        length = max(length, len(value.get("body") or b"")) + 256
        if gathered and (len(gathered) >= BOUNDS.rows or size + length > BOUNDS.size):
            yield Chunk(_table(pa, gathered), input.name, "line", numbers)
            numbers, gathered, size = [], [], 0
        numbers.append(number)
        gathered.append(value)
        size += length
    if gathered:
        yield Chunk(_table(pa, gathered), input.name, "line", numbers)


def _values(input: Input, number: int, row: dict[str, Any]) -> dict[str, Any]:
    # The row with the types of Arrow's columns; whatever is wrong is said with its line.
    values: dict[str, Any] = {}
    try:
        if lone_key(row):
            raise ValueError(LONE_KEY)
        for name, value in row.items():
            if name not in _KNOWN:
                raise ValueError(f"there is no column {name!r}; {_KNOWN_TEXT}")
            if name in ("body", "body_stored"):
                values[name] = decoded(name, value, row)
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


def decoded(name: str, value: Any, row: dict[str, Any]) -> bytes | None:
    """Decode a body as its ``…_encoding`` in `row` says; ValueError or TypeError says what is wrong."""
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
        body = file.read(BOUNDS.largest + 1)
    if len(body) > BOUNDS.largest:
        raise ValueError(f"body_file {name!r} has more than {BOUNDS.largest >> 20} MiB")
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
