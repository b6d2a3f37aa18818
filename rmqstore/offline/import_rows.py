"""The files of an import, opened; rows of JSON lines as tables to put, each error with its line."""

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

from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.files.output_file import format_of
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.table_writing import IGNORED_COLUMNS, LONE_KEY, TABLE_COLUMNS, lone_key

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BOUNDS", "Bounds", "Chunk", "Input"]


class Bounds(NamedTuple):
    """Rows and bytes that are held at once, and bytes that one row may have."""

    rows: int
    size: int
    largest: int


# A longer line is no message: a broker's have 4 MiB at most unless it is told otherwise.
BOUNDS = Bounds(rows=2048, size=8 << 20, largest=256 << 20)


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
        self.name = "standard input" if path == "-" else path
        if path == "-":
            self.file: IO[bytes] = _spooled(sys.stdin.buffer)
            told, compression = None, None
        else:
            self.file = open(path, "rb")
            if not self.file.seekable():
                # A pipe, as a shell's <(command) and /dev/stdin are.
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
        """Return the first bytes of the file, as they are."""
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
        """The file unpacked, from its begin."""
        if self.compression is None:
            self.file.seek(0)
            yield self.file
            return
        packed = import_pyarrow().CompressedInputStream(self.arrow_file(), self.compression)
        try:
            yield io.BufferedReader(packed)
        except OSError as error:
            # Of the operating system's errors each has a number.
            if error.errno is not None:
                raise
            raise StoreError(f"the file cannot be unpacked: {error}", self.name) from None

    def arrow_file(self) -> Any:
        """Return the file as it is for pyarrow, from its begin."""
        self.file.seek(0)
        return import_pyarrow().PythonFile(_Bounded(self), mode="r")

    def done(self) -> int:
        """Return how many of its bytes were read."""
        with contextlib.suppress(OSError, ValueError):
            return self.file.tell()
        return self.size

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class _Bounded:
    """An input for Arrow, which asks for unseen numbers of bytes; a plain file takes memory for all that are asked for."""

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
        """Nothing: the input closes its file itself."""


def _spooled(file: IO[bytes]) -> IO[bytes]:
    # What can be read only once, as a file: it is read twice.
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
"""Columns that say how a body is written."""

ALSO_IGNORED = ("version", "crc", "body_size", "body_error")
"""Columns that `rmqstore query --json` has beside those of an export."""

_KNOWN = frozenset({*TABLE_COLUMNS, *IGNORED_COLUMNS, *ALSO_IGNORED, *ENCODINGS, "body_stored"})
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
