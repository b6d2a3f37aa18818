"""Open the files of a store carefully, and read them without a mapping.

Owns what is opened at all: a regular file and nothing else, so that no reader waits at a FIFO.  It knows no store and no
record.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from rmqstore._core import nonzero_size
from rmqstore.files.os_errors import is_unreadable, naming_errors, with_path

__all__ = [
    "is_directory",
    "last_nonzero",
    "open_regular",
    "open_with_size",
    "read_ahead",
    "read_at",
    "read_small_file",
    "why_unreadable",
    "written_end",
    "written_extents",
]

# More than a broker's JSON with millions of entries has.
_SMALL = 256 << 20


def open_regular(path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """int: a descriptor of the file `path`, to read it unless `flags` say otherwise; every file of a store is opened so.

    - `flags`, `mode`: as for `os.open`; O_CLOEXEC is added.
    """
    return open_with_size(path, flags, mode)[0]


def open_with_size(path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> tuple[int, int]:
    """(int, int): the descriptor of `open_regular`, and the size of the file in bytes."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status.st_size
    os.close(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "this is not a regular file; move it away", path)


def read_at(fd: int, size: int, pos: int) -> bytes:
    """Read `size` bytes at `pos`; fewer where the file ends."""
    parts = []
    while size > 0 and (data := os.pread(fd, min(size, 1 << 26), pos)):
        parts.append(data)
        pos, size = pos + len(data), size - len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def is_directory(path: str) -> bool:
    """bool: there is such a directory; where nobody may look, unlike with `os.path.isdir`, that is no "no"."""
    if not path:
        return False
    try:
        os.stat(os.path.join(path, "."))
    except PermissionError as error:
        raise with_path(error, path) from None
    except (OSError, ValueError):
        return False
    return True


def why_unreadable(path: str) -> OSError | None:
    """Return the error of a file that exists and cannot be read; None if it can be read, or is gone.

    Only its first byte is read: what is damaged further on is met where it is read.
    """
    try:
        with naming_errors(path):
            fd = open_regular(path)
            try:
                os.pread(fd, 1, 0)
            finally:
                os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_unreadable(error):
            raise
        return error
    return None


def read_small_file(path: str) -> bytes | None:
    """bytes or None: what a small file holds, such as a broker's JSON; None when it is missing or empty."""
    try:
        with open(open_regular(path), "rb") as file:
            # A sparse file may say any length, and would take as much memory.
            size = os.fstat(file.fileno()).st_size
            if size > _SMALL:
                text = f"a file of {size} bytes where at most {_SMALL} are read; move it away"
                raise OSError(errno.EFBIG, text, path)
            return file.read() or None
    except FileNotFoundError:
        return None


def read_ahead(path: str, pos: int = 0, size: int | None = None) -> None:
    """Let the system begin to read a stretch of a file that is going to be read whole, by default up to its end.

    If the last byte is in memory, nothing is read.  Errors are ignored: the reader of the file gets them.
    """
    with contextlib.suppress(OSError, AttributeError):
        fd = open_regular(path)
        try:
            if size is None:
                size = max(os.fstat(fd).st_size - pos, 0)
            if size > 0 and not _is_in_memory(fd, pos + size - 1):
                os.posix_fadvise(fd, pos, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def _is_in_memory(fd: int, pos: int) -> bool:
    # Of a stretch that is in memory the system would look for each page.
    try:
        return bool(os.preadv(fd, [bytearray(1)], pos, os.RWF_NOWAIT))
    except (OSError, AttributeError):
        return False


def written_extents(fd: int, begin: int, end: int) -> list[tuple[int, int]] | None:
    """Where from `begin` to `end` the file system says that something was written; None where it does not tell."""
    extents: list[tuple[int, int]] = []
    at = begin
    try:
        while at < end and len(extents) < 100_000:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                return extents if error.errno == errno.ENXIO else None
            if start >= end:
                return extents
            at = min(os.lseek(fd, start, os.SEEK_HOLE), end)
            extents.append((start, at))
    except (OSError, AttributeError):
        return None
    return extents if at >= end else [*extents, (at, end)]


def written_end(fd: int) -> int:
    """int: the position after the last byte of a file that is not zero, 0 without one; holes are not read."""
    size = os.fstat(fd).st_size
    extents = written_extents(fd, 0, size)
    for begin, end in reversed([(0, size)] if extents is None else extents):
        last = last_nonzero(fd, begin, end)
        if last > begin:
            return last
    return 0


def last_nonzero(fd: int, begin: int, end: int) -> int:
    """int: the position after the last byte from `begin` to `end` that is not zero, read by `pread`; `begin` if none is."""
    piece = 1 << 20
    for at in range(begin + (end - 1 - begin) // piece * piece, begin - 1, -piece):
        # Shorter than asked for where the file is; zeros stand for what it lacks.
        size = nonzero_size(os.pread(fd, min(piece, end - at), at))
        if size:
            return at + size
    return begin
