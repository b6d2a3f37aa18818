"""A file of a store that is in the memory of this process only.

Owns what differs from a `MappedFile` that is on disk: it is never let go, reserved, or flushed.
"""

from __future__ import annotations

import os
from typing import IO

from rmqstore._core import Region
from rmqstore.files.mapped_file import MappedFile

__all__ = ["MemoryFile"]


class MemoryFile(MappedFile):
    """A file of a store that is in this process's memory only: what a reader works out, and must not write to disk.

    Parameters
    ----------
    path : str
        The name that it would have.
    size : int
        Bytes, zero at first; pages that are not written take no memory.
    content : buffer
        Its first bytes.
    """

    __slots__ = ()

    def __init__(self, path: str, size: int, *, file_from_offset: int = 0, content: bytes | memoryview = b""):
        super().__init__(path, size, file_from_offset=file_from_offset)
        with _memory() as file:
            os.ftruncate(file.fileno(), size)
            region = Region.map(file.fileno(), size, True)
        if len(content):
            region.write(0, content)
        self._region = region

    def let_go(self) -> None:
        """Keep the bytes: no file has them."""

    def is_current(self) -> bool:
        """bool: True, as nobody else can replace it."""
        return True

    def mark_dirty(self, end: int | None = None) -> None:
        """Nothing: it never goes to a disk."""

    def reserve(self) -> None:
        """Nothing: it takes no disk."""


def _memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("rmqstore", os.MFD_CLOEXEC), "w+b", 0)
    # macOS.  Imported where it is needed, as it loads much.
    import tempfile

    return tempfile.TemporaryFile()
