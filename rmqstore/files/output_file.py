"""Output files and folders that get their name when they are complete.

Owns the temporary name, the flush and the rename, and the checks before anything is written: the name must be free, and outside
the stores that are read.  Invariants:

- Nothing that exists is opened, emptied or followed: a temporary name is new, random, and in an open directory.
- A kill leaves the old files, and at most a file or folder whose name ends in ``.part``.
- A device or a pipe is written to, and never replaced.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from typing import IO

from rmqstore.errors import StoreError
from rmqstore.files.durable import fsync_directory
from rmqstore.files.listing import is_empty
from rmqstore.files.os_errors import has_no_links, naming_errors, taken_name

__all__ = ["OutputFile", "OutputFolder", "check_outside", "format_of", "make_part"]

_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".parquet": "parquet",
}
_COMPRESSED_ENDINGS = {".gz": "gzip", ".zst": "zstd"}
_EXISTS = "the output exists; give another name, or --force to replace it"
_NOT_EMPTY = "the output exists and is not an empty folder; give the name of a new one"
# Flags for a new file.
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_Path = str | os.PathLike[str]


def _temporary(name: str) -> str:
    # Cut, as some file systems limit a name to 143 bytes.
    return f"{os.fsdecode(os.fsencode(name)[:100])}.{os.urandom(8).hex()}.part"


def make_part(folder: str, name: str) -> str:
    """Create an empty directory in `folder` that only this user may enter, for the future `name`; return its path."""
    part = os.path.join(folder, _temporary(name))
    os.mkdir(part, 0o700)
    return part


class _Output:
    """The place of an output: its open folder, and its temporary name there."""

    def __init__(self, path: _Path, outside: Iterable[_Path]):
        # A link stays; its target is replaced.
        self.path = os.path.realpath(os.fspath(path))
        folder, name = os.path.split(os.fspath(path))
        self.is_link = self.path != os.path.join(os.path.realpath(folder), name)
        self.dropped = False
        self._outside = list(outside)
        self._name = os.path.basename(self.path)
        self._part = ""
        self._folder = -1
        # Errors come before anything is read.
        os.close(self._open_folder())

    def drop(self) -> None:
        """Discard the output: the old file stays."""
        self.dropped = True

    def _open_folder(self) -> int:
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for root in self._outside:
                check_outside(self.path, root, folder)
        except BaseException:
            os.close(folder)
            raise
        return folder

    def _close_folder(self) -> None:
        folder, self._folder = self._folder, -1
        if folder >= 0:
            os.close(folder)

    def _check_part(self, descriptor: int) -> None:
        # Other users with write access to the folder may have renamed it.
        with naming_errors(self.path):
            there = os.stat(self._part, dir_fd=self._folder, follow_symlinks=False)
        if not os.path.samestat(os.fstat(descriptor), there):
            raise StoreError(
                f"another process replaced {self._part} while it was written; give a folder that only you may write in",
                self.path,
            )


class OutputFile(_Output):
    """A file that gets its name when it is complete; a ``with`` statement returns the open file.

    It is written as ``<path>.<random>.part`` in the same folder, forced to the disk and renamed at the end.  An error or Ctrl-C
    removes that file; a kill leaves it.  A device or pipe is written directly.

    - `outside`: stores that are only read: the output must not be in them.
    """

    def __init__(self, path: _Path, *, force: bool = False, outside: Iterable[_Path] = ()):
        super().__init__(path, outside)
        self.force = force
        self._file: IO[bytes] | None = None
        given = os.fspath(path)
        if os.path.isdir(self.path):
            raise StoreError("the output is a directory; give the name of a file in it", self.path)
        # By the given path: the target of /dev/stdout may have no other.
        self._device = given if os.path.exists(given) and not os.path.isfile(given) else None
        if self._device is None and os.path.lexists(self.path) and not force:
            raise StoreError(_EXISTS, self.path)

    def __enter__(self) -> IO[bytes]:
        if self._device is not None:
            # Without O_TRUNC: another process may have created a file there.
            self._file = open(os.open(self._device, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC), "wb")
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.close()
                raise StoreError(_EXISTS, self.path)
            return self._file
        self._folder = self._open_folder()
        self._part = _temporary(self._name)
        try:
            self._file = open(os.open(self._part, _NEW, 0o666, dir_fd=self._folder), "wb")
        except BaseException:
            self.abandon()
            self._close_folder()
            raise
        return self._file

    def __exit__(self, kind: object, *exc_info: object) -> None:
        file = self._file
        assert file is not None
        if self._device is not None:
            file.close()
            return
        try:
            if kind is None and not self.dropped:
                file.flush()
                os.fsync(file.fileno())
                self._check_part(file.fileno())
                self._rename()
                fsync_directory(os.path.dirname(self.path))
        finally:
            # After an error, flushing the buffer would only fail again.
            with contextlib.suppress(OSError, ValueError):
                file.close()
            self.abandon()
            self._close_folder()

    def _rename(self) -> None:
        folder = self._folder
        if self.force:
            os.replace(self._part, self._name, src_dir_fd=folder, dst_dir_fd=folder)
            return
        # A link fails if a name is taken, a rename would replace it; some file systems have no links.
        try:
            os.link(self._part, self._name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            raise StoreError(_EXISTS, self.path) from None
        except OSError as error:
            if not has_no_links(error):
                raise
            if os.path.lexists(self.path):
                raise StoreError(_EXISTS, self.path) from None
            os.rename(self._part, self._name, src_dir_fd=folder, dst_dir_fd=folder)

    def abandon(self) -> None:
        """Remove the temporary file, if there is one."""
        with contextlib.suppress(OSError):
            os.unlink(self._part, dir_fd=self._folder)


class OutputFolder(_Output):
    """A folder that gets its name when it is complete, like `OutputFile`; it may replace an empty folder only.

    Only this user may enter it while it is written.

    - `kept`: an error leaves it under its temporary path.
    - `was_taken`: another process took its name in the meantime.
    """

    def __init__(self, path: _Path, *, outside: Iterable[_Path] = ()):
        super().__init__(path, outside)
        self.part = ""
        self.kept = self.was_taken = False
        self._made = -1
        if os.path.lexists(self.path) and not (os.path.isdir(self.path) and is_empty(self.path)):
            raise StoreError(_NOT_EMPTY, self.path)

    def __enter__(self) -> OutputFolder:
        self._folder = self._open_folder()
        self._part = _temporary(self._name)
        self.part = os.path.join(os.path.dirname(self.path), self._part)
        try:
            os.mkdir(self._part, 0o700, dir_fd=self._folder)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._made = os.open(self._part, flags, dir_fd=self._folder)
        except BaseException:
            self._clear()
            raise
        return self

    def make_folder(self, name: str) -> None:
        """Create a folder in this one."""
        os.mkdir(name, dir_fd=self._made)

    def new_file(self, name: str) -> IO[bytes]:
        """Create a file in this folder, open for writing."""
        return open(os.open(name, _NEW, 0o666, dir_fd=self._made), "wb")

    def __exit__(self, kind: object, *exc_info: object) -> None:
        try:
            if kind is None and not self.dropped:
                self._check_part(self._made)
                umask = os.umask(0)
                os.umask(umask)
                os.fchmod(self._made, 0o777 & ~umask)
                self._rename()
                fsync_directory(os.path.dirname(self.path))
        finally:
            self._clear()

    def _rename(self) -> None:
        # It replaces an empty folder, and nothing else.
        try:
            os.rename(self.part, self.path)
        except OSError as error:
            if not taken_name(error):
                raise
            self.was_taken = True
            raise StoreError(_NOT_EMPTY, self.path) from None

    def _clear(self) -> None:
        made, self._made = self._made, -1
        if made >= 0:
            os.close(made)
        if not self.kept:
            # Imported here as it loads the compression libraries.
            import shutil

            shutil.rmtree(self.part, ignore_errors=True)
        self._close_folder()


def format_of(path: _Path) -> tuple[str | None, str | None]:
    """Return the format and the compression by the ending of a file's name, each or None."""
    stem, ending = os.path.splitext(os.fspath(path).lower())
    compression = _COMPRESSED_ENDINGS.get(ending)
    if compression is not None:
        ending = os.path.splitext(stem)[1]
    return _ENDINGS.get(ending), compression


def check_outside(output: _Path, root: _Path, folder: int | None = None) -> None:
    """Refuse an output in a store that is only read.

    - `folder`: an open descriptor of the output's folder, whose path may have changed.
    """
    inside, store = os.path.realpath(os.fspath(output)), os.path.realpath(os.fspath(root))
    if os.path.commonpath([inside, store]) == store or (folder is not None and _is_within(folder, store)):
        raise StoreError("the output is in the store; give a place outside of it", os.fspath(output))


def _is_within(folder: int, root: str) -> bool:
    # By inode numbers, as a folder may have several paths.
    with contextlib.suppress(OSError):
        store, up, below = os.stat(root), ".", None
        at = os.stat(up, dir_fd=folder)
        while below is None or not os.path.samestat(at, below):
            if os.path.samestat(at, store):
                return True
            up, below = f"{up}/..", at
            at = os.stat(up, dir_fd=folder)
    return False
