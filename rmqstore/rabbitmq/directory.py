"""A directory with one writer, and its files as they are mapped: what queue index and message store share.

Owns no state and no bytes.  A node takes no such lock, so it only keeps writers of this package apart.
"""

from __future__ import annotations

import fcntl
import os

from rmqstore._core import Region
from rmqstore.errors import StoreLockedError
from rmqstore.files.open_file import open_regular, read_small_file
from rmqstore.files.os_errors import is_locked, naming_errors

__all__ = ["lock_directory", "map_file", "read_present"]


def lock_directory(path: str, refusal: str) -> int:
    """int: a descriptor that holds the lock on a directory; StoreLockedError with `refusal` where it is held."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if not is_locked(error):
            raise
        raise StoreLockedError(refusal, path) from None
    return fd


def read_present(path: str) -> bytes:
    """bytes: what a small file holds, as of `read_small_file`; FileNotFoundError where it is missing."""
    data = read_small_file(path)
    if data is None:
        os.stat(path)
    return data or b""


def map_file(path: str) -> Region | None:
    """Region or None: None for an empty file, which cannot be mapped."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if not size:
            return None
        with naming_errors(path):
            region = Region.map(fd, size)
        region.path = path
        return region
    finally:
        os.close(fd)
