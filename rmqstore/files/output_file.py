"""Output files and folders that have their name only when they are complete.

Owns how an output is made beside its place, forced to the disk and renamed, and what is refused before anything is written: a
name that is taken, and a place in the store that is only read.  It never reads a store.  Invariants:

- A kill leaves what was there before, and at most a file or folder whose name ends in ``.part``.
- A device or a pipe is written to, and never replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from typing import IO

from rmqstore.errors import StoreError
from rmqstore.files.mapped_file import fsync_directory

__all__ = ["OutputFile", "OutputFolder", "check_outside", "format_of"]

_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".parquet": "parquet",
}
_COMPRESSED_ENDINGS = {".gz": "gzip", ".zst": "zstd"}


class OutputFile:
    """A file that has its name only when it is complete; used in a ``with`` statement, which gives the open file.

    It is written as ``<path>.part`` beside its place, forced to the disk and renamed at the end; an error, Ctrl-C included,
    removes that file, and a kill leaves nothing but it.  A device or pipe is written to as it is.

    Parameters
    ----------
    path : path
    force : bool
        Replace a file that is there.

    Raises
    ------
    StoreError
        There is such a file and `force` is not set, `path` is a directory, or another process is writing the same output.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool = False):
        # A link stays one; what it leads to is replaced.
        self.path = os.path.realpath(os.fspath(path))
        self.force = force
        self._part = self.path + ".part"
        self._file: IO[bytes] | None = None
        self._in_place = False
        self.dropped = False
        self._check()

    def _check(self) -> None:
        if os.path.isdir(self.path):
            raise StoreError("the output is a directory; give the name of a file in it", self.path)
        self._in_place = os.path.exists(self.path) and not os.path.isfile(self.path)
        if os.path.isfile(self.path) and not self.force:
            raise StoreError("the output exists; give another name, or --force to replace it", self.path)

    def drop(self) -> None:
        """Make no file after all: what was there stays."""
        self.dropped = True

    def __enter__(self) -> IO[bytes]:
        if self._in_place:
            self._file = open(self.path, "wb")
            return self._file
        # What an interrupted export left is taken over, unless somebody is still writing it.
        file = open(os.open(self._part, os.O_RDWR | os.O_CREAT, 0o666), "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(self._part)):
                raise BlockingIOError
            self._file = file
            file.truncate(0)
        except (BlockingIOError, FileNotFoundError):
            file.close()
            raise StoreError(
                "another process is writing this output; wait for it, or give another name", self.path
            ) from None
        except BaseException:
            self.abandon()
            file.close()
            raise
        return file

    def __exit__(self, kind: object, *exc_info: object) -> None:
        file = self._file
        assert file is not None
        if self._in_place:
            file.close()
            return
        try:
            if kind is None and not self.dropped:
                file.flush()
                os.fsync(file.fileno())
                # Somebody else may have made it meanwhile.
                self._check()
                os.replace(self._part, self.path)
                fsync_directory(os.path.dirname(self.path))
                return
        except BaseException:
            self.abandon()
            raise
        finally:
            # What is still buffered after an error would only fail again.
            with contextlib.suppress(OSError, ValueError):
                file.close()
        self.abandon()

    def abandon(self) -> None:
        """Take away what is half made, if this makes it."""
        if self._file is not None and not self._in_place:
            with contextlib.suppress(OSError):
                os.unlink(self._part)


def format_of(path: str | os.PathLike[str]) -> tuple[str | None, str | None]:
    """(str or None, str or None): the format and the compression that the ending of a file's name says."""
    stem, ending = os.path.splitext(os.fspath(path).lower())
    compression = _COMPRESSED_ENDINGS.get(ending)
    if compression is not None:
        ending = os.path.splitext(stem)[1]
    return _ENDINGS.get(ending), compression


def check_outside(output: str | os.PathLike[str], root: str | os.PathLike[str]) -> None:
    """Refuse an output that lies in a store: whoever only reads one leaves nothing in it.

    Raises
    ------
    StoreError
        It does.
    """
    inside, store = os.path.realpath(os.fspath(output)), os.path.realpath(os.fspath(root))
    if os.path.commonpath([inside, store]) == store:
        raise StoreError("the output lies in the store; give a place outside of it", os.fspath(output))


class OutputFolder:
    """A folder that has its name only when it is complete, as `OutputFile`; never replaced."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.path.realpath(os.fspath(path))
        self.part = ""
        self.dropped = False
        self._check()

    def _check(self) -> None:
        if os.path.lexists(self.path) and not (os.path.isdir(self.path) and not os.listdir(self.path)):
            raise StoreError("the output exists and is not an empty folder; give the name of a new one", self.path)

    def drop(self) -> None:
        """Make no folder after all."""
        self.dropped = True

    def __enter__(self) -> str:
        # A name of its own: a folder is not to be emptied because of how it is called.
        where, name = os.path.split(self.path)
        self.part = tempfile.mkdtemp(".part", name + ".", where)
        try:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(self.part, 0o777 & ~umask)
        except BaseException:
            shutil.rmtree(self.part, ignore_errors=True)
            raise
        return self.part

    def __exit__(self, kind: object, *exc_info: object) -> None:
        try:
            if kind is None and not self.dropped:
                self._check()
                os.rename(self.part, self.path)
                fsync_directory(os.path.dirname(self.path))
        finally:
            shutil.rmtree(self.part, ignore_errors=True)
