"""Options and output files of an export: JSON lines, CSV, Arrow, Parquet (these two need pyarrow), or a file for each body."""

from __future__ import annotations

import contextlib
import csv
import datetime
import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rmqstore._columns import COLUMN_NAMES
from rmqstore.config import StoreConfig
from rmqstore.errors import MissingDependencyError
from rmqstore.files.mapped_file import name_of_offset
from rmqstore.files.output_file import OutputFolder, format_of
from rmqstore.message import BodyText, MessageExt, body_text, json_pieces
from rmqstore.store.columns import chosen_columns, import_pyarrow, scan_schema
from rmqstore.texts import harmless_cell

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "BODY_FORMS", "COMPRESSIONS", "CORRUPT_MODES", "FORMATS", "MANIFEST", "ArrowFile", "Csv", "ExportOptions", "Files",
    "JsonLines", "Layout", "Sink", "compressed", "import_zstandard", "iso_time", "layout_of", "message_row",
]  # fmt: skip

FORMATS = ("jsonl", "csv", "arrow", "parquet", "files")
"""The formats of an export."""

BODY_FORMS = ("text", "hex", "base64", "raw", "none")
"""Forms of bodies: text where they are UTF-8 (else base64), hexadecimal, base64, unchanged bytes, or no body."""

CORRUPT_MODES = ("fail", "report", "skip")
"""Effects of damage: end the export, write the message with ``corrupt`` set, or skip and count it."""

COMPRESSIONS = {
    "jsonl": ("none", "gzip", "zstd"),
    "csv": ("none", "gzip", "zstd"),
    "arrow": ("none", "lz4", "zstd"),
    "parquet": ("none", "snappy", "gzip", "zstd"),
    "files": ("none",),
}
"""The compressions of each format."""

BODIES = ("body", "body_stored")
"""The columns that hold bodies."""

DECODED = frozenset({"body", "corrupt"})
"""Columns that need the decompressed body."""

JUDGED = frozenset({*BODIES, "corrupt"})
"""Columns that need the CRC."""


@dataclass(frozen=True)
class ExportOptions:
    """Options for reading a store and writing the output of an export.

    Attributes
    ----------
    format : {"jsonl", "csv", "arrow", "parquet", "files"} or None
        None means the format of the output's ending, ``jsonl`` for an open file.
    columns : iterable of str or None
        Columns of `MessageStore.scan`; None means all but those that repeat others.
    body : {"text", "hex", "base64", "raw", "none"} or None
        None means ``raw`` for Arrow, Parquet and single files, ``text`` otherwise: bodies that are not UTF-8 become base64, and
        ``body_encoding`` is "base64" then.
    corrupt : {"fail", "report", "skip"}
        Damage ends the export, is written, or is skipped.  CRCs are checked for the columns ``body`` and ``corrupt`` only.
    compression : str or None
        One of `COMPRESSIONS`; None means that of the output's ending (``.gz``, ``.zst``), zstd for Parquet.
    force : bool
        Replace an existing file; a folder is never replaced.
    shown : bool
        The output is a terminal: everything outside ASCII is escaped.
    safe_csv : bool
        In CSV, put an apostrophe before each text that a spreadsheet would run as a formula.
    only_known_topics : bool
        Make no output if the store has none of the selection's topics; otherwise the output has no rows.
    config : StoreConfig or None
        None means `StoreConfig.infer`.
    tiered : path or None
        The broker's tieredStoreFilePath: messages that the local log no longer has come from there first, queue by queue; not with
        a range of phy offsets, which are places of the local log.
    """

    format: str | None = None
    columns: Iterable[str] | None = None
    body: str | None = None
    corrupt: str = "fail"
    compression: str | None = None
    force: bool = False
    shown: bool = False
    safe_csv: bool = False
    only_known_topics: bool = False
    config: StoreConfig | None = None
    tiered: str | os.PathLike[str] | None = None


@dataclass(frozen=True)
class Layout:
    """The final options of an export; see `ExportOptions`."""

    format: str
    columns: tuple[str, ...]
    body: str
    compression: str
    shown: bool
    safe_csv: bool


def layout_of(options: ExportOptions, path: str | None) -> Layout:
    """Return the final options for an output with this path, None for an open file.

    Raises ValueError for an unknown value, or one that does not fit the format; MissingDependencyError for a missing library.
    """
    said, compression = ("jsonl", None) if path is None else format_of(path)
    format = options.format or said
    if format is None:
        raise ValueError(
            f"the name {path!r} does not tell the format; give one of {', '.join(FORMATS)}, or a name that ends with "
            ".jsonl, .csv, .arrow or .parquet"
        )
    if compression is not None and format not in ("jsonl", "csv"):
        raise ValueError(
            f"a {format} file is compressed inside: leave .gz and .zst out of its name, and give --compress"
        )
    if options.safe_csv and format != "csv":
        raise ValueError(f"safe_csv is for CSV, and the format is {format}")
    binary = format in ("arrow", "parquet", "files")
    form = ("raw" if binary else "text") if options.body is None else options.body
    given = ((format, "format", FORMATS), (options.corrupt, "corrupt", CORRUPT_MODES), (form, "body", BODY_FORMS))
    for value, what, known in given:
        if value not in known:
            raise ValueError(f"{what} is {value!r}; give {', '.join(known[:-1])} or {known[-1]}")
    if form == "raw" and not binary:
        raise ValueError(f"{format} has no place for raw bytes; give text, hex, base64 or none, or another format")
    if format == "files" and form != "raw":
        raise ValueError("the format files writes bodies as they are; leave body out, or choose another format")
    names = chosen_columns(options.columns)
    if format == "files" and JUDGED.isdisjoint(names):
        names = (*names, "body")
    if form == "none":
        names = tuple(name for name in names if name not in BODIES)
    if not names:
        raise ValueError(f"no column is left; there are {', '.join(COLUMN_NAMES)}")
    compression = options.compression or compression or ("zstd" if format == "parquet" else "none")
    if compression not in COMPRESSIONS[format]:
        raise ValueError(f"{format} is not compressed with {compression}; give {', '.join(COMPRESSIONS[format])}")
    if compression == "zstd" and format in ("jsonl", "csv"):
        import_zstandard()
    if format in ("arrow", "parquet"):
        import_pyarrow()
    if format == "files" and path is None:
        raise ValueError("the format files makes a folder; give its name")
    return Layout(format, names, form, compression, options.shown, options.safe_csv)


def import_zstandard() -> Any:
    """Import zstandard; MissingDependencyError says how to install it."""
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError(
            "files compressed with zstd need the library zstandard: install it with 'pip install rmqstore[compression]'"
        ) from None
    return zstandard


# ----------------------------------------------------------------------------------------------------------- files

MANIFEST = "messages.jsonl"
"""The file that describes single bodies, in their folder."""

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_TIMES = ("born_timestamp", "store_timestamp")
# Limits of a row group of a Parquet file.
_GROUP_ROWS = 1 << 17
_GROUP_BYTES = 64 << 20
# Files in one folder of single bodies.
_FOLDER_FILES = 10_000
_CSV_END = "\r\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@contextlib.contextmanager
def compressed(file: IO[bytes], compression: str) -> Iterator[IO[bytes]]:
    """Open a file whose content is compressed and written to `file`."""
    if compression == "gzip":
        # Without a name and a time, so that the same messages become the same bytes.
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            yield packed  # type: ignore[misc]
    elif compression == "zstd":
        with import_zstandard().ZstdCompressor().stream_writer(file, closefd=False) as packed:
            yield packed
    else:
        yield file


def _body(message: MessageExt, name: str) -> bytes:
    return message.body_stored if name == "body_stored" or message.corrupt else message.body


def message_row(message: MessageExt, columns: Sequence[str], form: str, zeros: bool = True) -> dict[str, Any]:
    """Return these columns of a message as values that JSON can hold, times in ms since epoch.

    After ``body`` comes ``body_encoding``: utf-8, hex or base64; `zeros` is for `body_text`.
    """
    row: dict[str, Any] = {}
    for name in columns:
        if name in BODIES:
            row[name], row[f"{name}_encoding"] = body_text(_body(message, name), form, zeros)
        else:
            row[name] = getattr(message, name)
    return row


def _visible(text: str) -> str:
    # Characters that a terminal could obey or hide are escaped as in JSON.
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _write_json(file: IO[bytes], row: dict[str, Any], shown: bool = False) -> None:
    for piece in json_pieces(row, _encode):
        file.write(_bytes(piece, shown))
    file.write(b"\n")


def _bytes(text: str, shown: bool) -> bytes:
    return (_visible(text) if shown else text).encode("utf-8", "backslashreplace")


class JsonLines:
    """Writes one JSON object a line."""

    def __init__(self, file: IO[bytes], layout: Layout):
        self.file, self.layout = file, layout

    def message(self, message: MessageExt) -> None:
        """Write a message."""
        _write_json(self.file, message_row(message, self.layout.columns, self.layout.body), self.layout.shown)

    def close(self) -> None:
        """Write what is left."""


def iso_time(timestamp: int) -> str:
    """Return ms since epoch as ISO 8601 in UTC; the bare number beyond the calendar."""
    try:
        moment = _EPOCH + datetime.timedelta(milliseconds=timestamp)
    except OverflowError:
        return str(timestamp)
    return moment.isoformat(timespec="milliseconds")


class Csv(JsonLines):
    """Writes rows of CSV after a line of names."""

    def __init__(self, file: IO[bytes], layout: Layout):
        super().__init__(file, layout)
        # Lines end with "\n" alone, which every tool reads, but Python before 3.13 quotes a field with "\r" only if lines end with
        # it: `write` removes it.
        self.rows = csv.writer(self, lineterminator=_CSV_END)
        self.rows.writerow(
            [each for name in layout.columns for each in ([name, f"{name}_encoding"] if name in BODIES else [name])]
        )

    def write(self, text: str) -> None:
        """Write a row; the csv module calls it."""
        self.file.write(text.removesuffix(_CSV_END).encode("utf-8", "backslashreplace") + b"\n")

    def message(self, message: MessageExt) -> None:
        """Write a message."""
        # Readers of CSV refuse zero bytes.
        row = message_row(message, self.layout.columns, self.layout.body, zeros=False)
        cells: list[str] = []
        for name, value in row.items():
            if type(value) is BodyText:
                self._write_long(cells, value)
                cells = [""]
                continue
            cell = _cell(name, value)
            # A number may be negative.
            if self.layout.safe_csv and not isinstance(value, int):
                cell = harmless_cell(cell)
            cells.append(_visible(cell) if self.layout.shown else cell)
        self.rows.writerow(cells)

    def _write_long(self, before: list[str], body: BodyText) -> None:
        # The cells before a large body, and the body in pieces.
        if before:
            part = io.StringIO()
            csv.writer(part, lineterminator="").writerow([*before, ""])
            self.file.write(part.getvalue().encode("utf-8", "backslashreplace"))
        self.file.write(b'"')
        for number, piece in enumerate(body):
            text = harmless_cell(piece) if self.layout.safe_csv and number == 0 else piece
            self.file.write(_bytes(text.replace('"', '""'), self.layout.shown))
        self.file.write(b'"')


def _cell(name: str, value: Any) -> str:
    if type(value) is str:
        return value
    if value is None:
        return ""
    if name == "keys":
        return " ".join(value)
    if name == "properties":
        return _encode(value)
    if name in _TIMES:
        return iso_time(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


class Files:
    """Writes a file for each body, and a list of them."""

    def __init__(self, folder: OutputFolder, layout: Layout, by_number: bool):
        self.folder, columns = folder, layout.columns
        # In tiered storage each queue has a phy offset 0.
        self.by_number = by_number
        self.columns = [name for name in columns if name not in BODIES]
        self.source = "body_stored" if "body_stored" in columns and "body" not in columns else "body"
        self.num = 0
        self.manifest = folder.new_file(MANIFEST)

    def message(self, message: MessageExt) -> None:
        """Write a message."""
        row = message_row(message, self.columns, "raw")
        body = _body(message, self.source)
        # Names contain no text of the store, which may be hostile.
        folder = f"bodies/{self.num // _FOLDER_FILES:06}"
        if self.num == 0:
            self.folder.make_folder("bodies")
        if self.num % _FOLDER_FILES == 0:
            self.folder.make_folder(folder)
        self.num += 1
        number = self.num - 1 if self.by_number else message.phy_offset
        row["body_file"] = f"{folder}/{name_of_offset(number)}"
        with self.folder.new_file(row["body_file"]) as file:
            file.write(body)
        _write_json(self.manifest, row)

    def close(self) -> None:
        """Write what is left."""
        self.manifest.flush()
        os.fsync(self.manifest.fileno())
        self.manifest.close()


class Sink(io.RawIOBase):
    """The file that pyarrow writes to; its writers complete a file even when they are deleted, which `abandon` prevents."""

    def __init__(self, file: IO[bytes]):
        self.file: IO[bytes] | None = file

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write bytes, and return their number."""
        return len(memoryview(data).cast("B")) if self.file is None else self.file.write(data)

    def abandon(self) -> None:
        """Write nothing more."""
        self.file = None


class ArrowFile:
    """Writes record batches to an Arrow or Parquet file; rows are gathered for Parquet's row groups."""

    def __init__(self, file: Sink, layout: Layout, seekable: bool):
        pa = self.pa = import_pyarrow()
        self.form, compression = layout.body, layout.compression
        self.schema = _arrow_schema(pa, layout.columns, layout.body)
        self.ready: list[Any] = []
        self.rows = self.size = 0
        self.groups = layout.format == "parquet"
        if layout.format == "arrow":
            options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
            # A stream can be written to a pipe, and read from one.
            new = pa.ipc.new_file if seekable else pa.ipc.new_stream
            self.writer = new(file, self.schema, options=options)
        else:
            import pyarrow.parquet

            self.writer = pyarrow.parquet.ParquetWriter(
                file, self.schema, compression="NONE" if compression == "none" else compression
            )

    def batch(self, batch: pa.RecordBatch) -> None:
        """Write rows."""
        batch = _arrow_batch(self.pa, batch, self.schema, self.form)
        if not self.groups:
            self.writer.write_batch(batch)
            return
        self.ready.append(batch)
        self.rows += batch.num_rows
        self.size += batch.nbytes
        if self.rows >= _GROUP_ROWS or self.size >= _GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if self.ready:
            table = self.pa.Table.from_batches(self.ready, schema=self.schema)
            self.writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self.ready, self.rows, self.size = [], 0, 0

    def close(self) -> None:
        """Write what is left."""
        self._write_group()
        self.writer.close()


def _arrow_schema(pa: Any, columns: Sequence[str], form: str) -> pa.Schema:
    fields = []
    for each in scan_schema(columns):
        if each.name in BODIES and form != "raw":
            fields += [pa.field(each.name, pa.string()), pa.field(f"{each.name}_encoding", pa.string())]
        else:
            fields.append(each)
    return pa.schema(fields)


def _arrow_batch(pa: Any, batch: pa.RecordBatch, schema: pa.Schema, form: str) -> pa.RecordBatch:
    if form == "raw" or not any(name in BODIES for name in batch.schema.names):
        return batch
    arrays = []
    for name in batch.schema.names:
        array = batch.column(name)
        if name not in BODIES:
            arrays.append(array)
            continue
        pairs = [(str(text), how) for text, how in (body_text(body, form) for body in array.to_pylist())]
        arrays += [pa.array([text for text, _ in pairs], pa.string()), pa.array([how for _, how in pairs], pa.string())]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
