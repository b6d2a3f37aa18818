"""Tests of OSErrors by their meaning, and OSErrors that name a path.

No other package tests an `errno`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import TypeGuard

from rmqstore.errors import DiskFullError

__all__ = [
    "broken_link", "failed_read", "full_disk", "has_no_links", "is_broken_link", "is_denied",
    "is_full", "is_locked", "is_missing", "is_not_a_file", "is_too_large", "is_unreadable", "missing_file",
    "naming_errors", "says_full", "taken_name", "unread_format", "with_path",
]  # fmt: skip

# Errors about one file; others (too many open files) concern the process.
_UNREADABLE = frozenset(
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EIO", "EBADMSG", "EUCLEAN", "ESTALE", "ELOOP")
    if hasattr(errno, name)
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FULL = (*_NO_SPACE, errno.EFBIG)
# Linux has one number for ENOTSUP and EOPNOTSUPP, macOS two.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def is_missing(error: Exception) -> TypeGuard[OSError]:
    """Return True if there is no such file or directory: nothing is there, or a file where a directory is expected."""
    return isinstance(error, (FileNotFoundError, NotADirectoryError))


def is_unreadable(error: Exception) -> TypeGuard[OSError]:
    """Return True if a file exists but cannot be read (permission, I/O error, link loop)."""
    return isinstance(error, OSError) and error.errno in _UNREADABLE


def is_not_a_file(error: OSError) -> bool:
    """Return True if `open_regular` found something other than a file: a directory, a FIFO, a device."""
    return error.errno in (errno.EISDIR, errno.EINVAL)


def is_denied(error: OSError) -> bool:
    """Return True if this user lacks the permission, and another user may have it."""
    return error.errno == errno.EACCES


def is_full(error: Exception) -> TypeGuard[OSError]:
    """Return True if the disk, a quota or a limit of file sizes leaves no room."""
    return isinstance(error, OSError) and error.errno in _FULL


def says_full(text: str) -> bool:
    """Return True if the text of a library's error is about a full disk, see `is_full`."""
    return any(f"(os error {number})" in text or os.strerror(number) in text for number in _FULL)


def is_too_large(error: OSError) -> bool:
    """Return True if `read_small_file` refused a file for its length."""
    return error.errno == errno.EFBIG


def is_locked(error: OSError) -> bool:
    """Return True if another process holds the lock that was asked for."""
    return error.errno in (errno.EAGAIN, errno.EACCES)


def has_no_links(error: OSError) -> bool:
    """Return True if the file system, or the protection of the file, allows no hard link."""
    return error.errno in _NO_LINKS


def taken_name(error: OSError) -> bool:
    """Return True if a folder could not be renamed because something has the name already."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def is_broken_link(error: OSError) -> bool:
    """Return True if a link points to nothing or to itself."""
    return error.errno in (errno.ESTALE, errno.ELOOP)


def broken_link(path: str) -> OSError:
    """Return the error of a link that points to nothing; it is one of an unreadable file."""
    return OSError(errno.ESTALE, "it is a broken symlink", path)


def missing_file(path: str, text: str = os.strerror(errno.ENOENT)) -> FileNotFoundError:
    """Return the error of a file that is not there."""
    return FileNotFoundError(errno.ENOENT, text, path)


def failed_read(path: str, text: str) -> OSError:
    """Return the error of a file that cannot be read for the reason `text`."""
    return OSError(errno.EIO, text, path)


def unread_format(path: str, text: str) -> OSError:
    """Return the error of a file in a format that is not read."""
    return OSError(errno.ENOTSUP, text, path)


def full_disk(
    path: str | None = None, error: OSError | None = None, text: str = "free space, then try again"
) -> DiskFullError:
    """Return the error of a write for which the disk, or a quota, has no room; `text` is what to do."""
    number = errno.ENOSPC if error is None else error.errno or errno.ENOSPC
    full = DiskFullError(f"{os.strerror(number)}: {text}", path)
    full.errno = number
    return full


def with_path(error: OSError, path: str) -> OSError:
    """Return the same error about `path`."""
    return full_disk(path, error) if error.errno in _NO_SPACE else OSError(error.errno, error.strerror, path)


@contextlib.contextmanager
def naming_errors(path: str) -> Iterator[None]:
    """Name `path` in an OSError that names no file, and raise DiskFullError for a full disk."""
    try:
        yield
    except OSError as error:
        named = error.filename
        if named is not None and (error.errno not in _NO_SPACE or isinstance(error, DiskFullError)):
            raise
        raise with_path(error, path if named is None else os.fsdecode(named)) from error
