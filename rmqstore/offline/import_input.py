"""Files of an import, opened: their bytes unpacked, their format, and where each row is in them."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rmqstore.errors import StoreError
from rmqstore.files.output_file import format_of
from rmqstore.offline.export_files import MANIFEST
from rmqstore.offline.export_options import import_zstandard
from rmqstore.offline.import_bounds import Bounds

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BOUNDS", "Chunk", "Input"]

# A line that is longer is none: a broker's messages have 4 MiB at most unless it is told otherwise.
BOUNDS = Bounds(rows=2048, size=8 << 20, largest=256 << 20)
"""Rows and bytes that are held at once, and bytes of a row."""


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file, and where each stands in it."""

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
        """The file unpacked, from its begin on."""
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
