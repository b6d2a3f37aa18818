"""Which files of a directory make up a stream, and what is wrong with the others.

Owns the names and lengths that the files of a stream have, and the words about those that differ.  It opens no file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rmqstore.errors import GeometryError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import offset_of_name
from rmqstore.remedies import InferConfig, Recover, Sentence

__all__ = ["Handling", "Listed", "StreamFiles"]


class Handling(NamedTuple):
    """How the files of one kind are made, read and restored.

    Attributes
    ----------
    staging : path or None
        The directory in which new files are made before they are renamed into place; None for their own.
    is_usual_size : callable or None
        Return True if the store's files of this kind were made with the size that is expected.  It is asked about a file of
        another length: such a file is damaged then, and the size is wrong otherwise, so that no file can be read.
    advice : str
        As for `MappedFile`.
    repair : str
        How to rebuild a file that was cut short and has no copy; "" if nothing does.
    """

    staging: str | os.PathLike[str] | None = None
    is_usual_size: Callable[[], bool] | None = None
    advice: str = "normal"
    repair: str = ""


class Listed(NamedTuple):
    """A problem with the name or length of a file.

    Attributes
    ----------
    problem : GeometryError
    harmless : bool
        A reader can go on.
    damaged : bool
        Part of what the file held is gone.
    tidied : bool
        A writer deletes it.
    """

    problem: GeometryError
    harmless: bool = True
    damaged: bool = False
    tidied: bool = False


class StreamFiles:
    """The files of `size` bytes in the directory `path`, as `problems` finds them.

    Attributes
    ----------
    offsets : list of int
        Of the first byte of each file, ascending.
    zero_length : str or None
        The path of a last file without a byte.
    """

    def __init__(self, path: str, size: int, handling: Handling):
        self.path, self.size, self.handling = path, size, handling
        self.offsets: list[int] = []
        self.zero_length: str | None = None

    def problems(self, read_only: bool) -> Iterator[Listed]:
        """List the directory: take what fits into `offsets`, and yield what does not."""
        entries = listing(self.path)
        # A file in the place of a folder above this one, which then holds nothing.
        below_file = isinstance(entries.problem, NotADirectoryError) and not os.path.lexists(self.path)
        if entries.problem is not None and not (read_only and below_file):
            raise entries.problem
        sized: list[tuple[int, int, str]] = []
        for entry in entries:
            offset = offset_of_name(entry.name)
            if offset is None or not entry.is_file():
                if offset is not None and entry.is_symlink() and not os.path.exists(entry.path):
                    detail = "a link that leads nowhere stands for a file of the store; bring back what it leads to"
                else:
                    kind = "file" if entry.is_file() else "directory"
                    detail = f"a {kind} that is not part of the store lies among its files; move it away"
                # A file of this name is missing.
                yield Listed(GeometryError(detail, entry.path, 0), damaged=offset is not None)
                continue
            with contextlib.suppress(FileNotFoundError):
                # Another process may delete it while this runs.
                sized.append((offset, entry.stat().st_size, entry.path))
        if sized and sized[-1][1] == 0:
            self.zero_length = sized.pop()[2]
            detail = (
                "the newest file has no bytes, which is what a crash while it was being made leaves; opening the store for "
                "writing deletes it. If it had messages, restore it from a copy first"
            )
            yield Listed(GeometryError(detail, self.zero_length, 0), tidied=True)
        for offset, length, path in sized:
            if length != self.size:
                listed = self._of_length(length, path)
                yield listed
                if not listed.harmless:
                    continue
            if offset % self.size:
                detail = (
                    f"the name is not a multiple of the file size {self.size}; restore the name or the "
                    "size with which the store was written"
                )
                yield Listed(GeometryError(detail, path, 0), damaged=True)
                continue
            if self.offsets and offset != self.offsets[-1] + self.size:
                detail = (
                    f"the file before it begins at {self.offsets[-1]}, so one at "
                    f"{self.offsets[-1] + self.size} is missing; restore it, or open the store read-only to "
                    "get out what is there"
                )
                yield Listed(GeometryError(detail, path, 0))
            self.offsets.append(offset)

    def _of_length(self, length: int, path: str) -> Listed:
        size = self.size
        pos = min(length, size)
        if self.handling.is_usual_size is None or not self.handling.is_usual_size():
            detail = Sentence(
                f"the file has {length} bytes where the configuration says {size}; open the store with the sizes that it "
                "was written with",
                InferConfig(),
            )
            return Listed(GeometryError(detail, path, pos), harmless=False)
        what = "it was cut short, and what it lost reads as zeros" if length < size else "what follows them is not read"
        repair = self.handling.repair or Sentence(
            f"truncate -s {size} FILE gives it its size, what it lost is then damage that ", Recover("skip"), " passes over"
        )
        detail = Sentence(
            f"the file has {length} bytes where the store's files have {size}: {what}. Read-only the rest can be read. To "
            "write, restore the file from a copy; without one, ",
            repair,
        )
        return Listed(GeometryError(detail, path, pos), damaged=True)
