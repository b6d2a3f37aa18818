"""Force names and bytes to the disk: directories, whole trees, the data of one file."""

from __future__ import annotations

import contextlib
import os

from rmqstore.files.os_errors import full_disk, naming_errors

__all__ = ["force_data", "fsync_directory", "fsync_tree", "make_directories", "write_all"]

# Up to this number, folders are forced one by one, a millisecond each on a disk; more take one call for the whole file system.
_FEW_FOLDERS = 256


def fsync_directory(path: str) -> None:
    """Make the names in directory `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming_errors(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(path: str) -> None:
    """Make the names in directory `path`, and in all directories below it, durable."""
    folders = [folder for folder, _, _ in os.walk(path)]
    if len(folders) > _FEW_FOLDERS and _sync_file_system(path):
        # Other file systems may be mounted below.
        device = os.stat(path).st_dev
        folders = [folder for folder in folders if os.stat(folder).st_dev != device]
    for folder in folders:
        fsync_directory(folder)


def _sync_file_system(path: str) -> bool:
    # One call for everything written to a file system (Linux 2.6.39; failures are reported since 5.8); False if it is missing.
    import ctypes

    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return False
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if syncfs(fd) != 0:
            errno = ctypes.get_errno()
            raise OSError(errno, os.strerror(errno), path)
    finally:
        os.close(fd)
    return True


def make_directories(path: str) -> None:
    """Create directory `path` and what is missing above it; their names are durable afterwards."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError), naming_errors(directory):
            os.mkdir(directory)
        fsync_directory(os.path.dirname(directory) or ".")


def force_data(fd: int) -> None:
    """Force a file's bytes and changed size to the disk: `fdatasync`, or `fsync` on macOS."""
    getattr(os, "fdatasync", os.fsync)(fd)


def write_all(fd: int, data: bytes | memoryview, pos: int | None = None) -> None:
    """Write all bytes of `data` at `pos`, or at the file's position; OSError if the disk is full."""
    rest = memoryview(data)
    while rest:
        done = os.write(fd, rest) if pos is None else os.pwrite(fd, rest, pos)
        if not done:
            raise full_disk()
        rest = rest[done:]
        pos = None if pos is None else pos + done
