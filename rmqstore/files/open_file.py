"""Open regular files only, so that no reader waits at a FIFO, and read them without a mapping."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from rmqstore._core import nonzero_size
from rmqstore.files.os_errors import is_unreadable, naming_errors, with_path

__all__ = [
    "is_directory",
    "last_nonzero",
    "open_regular",
    "open_with_size",
    "opened",
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
    """Open a file of a store like `os.open`, with O_CLOEXEC; OSError for anything but a regular file."""
    return open_with_size(path, flags, mode)[0]


def open_with_size(path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> tuple[int, int]:
    """Return the descriptor of `open_regular`, and the size of the file in bytes."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status.st_size
    os.close(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "this is not a regular file; move it away", path)


@contextlib.contextmanager
def opened(path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file like `open_regular`, and close it at the end of a ``with`` statement."""
    fd = open_regular(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def read_at(fd: int, size: int, pos: int) -> bytes:
    """Read `size` bytes at `pos`; fewer where the file ends."""
    parts = []
    while size > 0 and (data := os.pread(fd, min(size, 1 << 26), pos)):
        parts.append(data)
        pos, size = pos + len(data), size - len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def is_directory(path: str) -> bool:
    """Return True if the directory exists; PermissionError, unlike `os.path.isdir`, in an unreadable folder."""
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
    """Return the error of reading the first byte of an existing file; None if it is readable, or missing."""
    try:
        with naming_errors(path):
            with opened(path) as fd:
                os.pread(fd, 1, 0)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_unreadable(error):
            raise
        return error
    return None


def read_small_file(path: str) -> bytes | None:
    """Return the content of a small file, such as a broker's JSON; None if it is missing or empty."""
    try:
        with open(open_regular(path), "rb") as file:
            # A sparse file may have any length, and would take as much memory.
            size = os.fstat(file.fileno()).st_size
            if size > _SMALL:
                text = f"a file of {size} bytes where at most {_SMALL} are read; move it away"
                raise OSError(errno.EFBIG, text, path)
            return file.read() or None
    except FileNotFoundError:
        return None


def read_ahead(path: str, pos: int = 0, size: int | None = None) -> None:
    """Start reading a part of a file into memory, by default up to its end, unless its last byte is there; ignore errors."""
    with contextlib.suppress(OSError, AttributeError):
        with opened(path) as fd:
            if size is None:
                size = max(os.fstat(fd).st_size - pos, 0)
            if size > 0 and not _is_in_memory(fd, pos + size - 1):
                os.posix_fadvise(fd, pos, size, os.POSIX_FADV_WILLNEED)


def _is_in_memory(fd: int, pos: int) -> bool:
    try:
        return bool(os.preadv(fd, [bytearray(1)], pos, os.RWF_NOWAIT))
    except (OSError, AttributeError):
        return False


def written_extents(fd: int, begin: int, end: int) -> list[tuple[int, int]] | None:
    """Return the written ranges between `begin` and `end` by the file system; None if it does not report them."""
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
    """Return the position after the last byte of a file that is not zero, 0 for none; holes are not read."""
    size = os.fstat(fd).st_size
    extents = written_extents(fd, 0, size)
    for begin, end in reversed([(0, size)] if extents is None else extents):
        last = last_nonzero(fd, begin, end)
        if last > begin:
            return last
    return 0


def last_nonzero(fd: int, begin: int, end: int) -> int:
    """Return the position after the last byte from `begin` to `end` that is not zero, `begin` for none; reads by `pread`."""
    piece = 1 << 20
    for at in range(begin + (end - 1 - begin) // piece * piece, begin - 1, -piece):
        size = nonzero_size(os.pread(fd, min(piece, end - at), at))
        if size:
            return at + size
    return begin
