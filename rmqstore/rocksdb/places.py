"""Where a broker keeps the database of its queues, and what makes a folder a database.

Owns the names of these folders.  It opens nothing and is cheap to import: every opening of a store asks it.
"""

from __future__ import annotations

import contextlib
import os

from rmqstore.errors import StoreError
from rmqstore.files.listing import listing
from rmqstore.files.os_errors import is_unreadable, with_path

__all__ = [
    "FOLDERS", "PLACES", "check_queue_databases", "closed_databases", "closed_folder", "is_database", "may_be_database",
    "queue_databases", "state_of_files",
]  # fmt: skip

PLACES = ("consumequeue", "consumequeue_rocksdb")
"""The folders of a store in which a broker keeps the database of its queues."""
FOLDERS = {
    "consumequeue_rocksdb": "queues in RocksDB",
    "rocksdbstore": "the index, timers and transactions in RocksDB",
    "kvStore": "pop records",
    "config": "its settings",
    "config/topics": "topics in RocksDB",
    "config/subscriptionGroups": "subscription groups in RocksDB",
    "config/consumerOffsets": "consumer progress in RocksDB",
    "config/metadata": "its settings in RocksDB",
    "config/rdb": "its settings in RocksDB",
}
"""The folders of a store that are a broker's databases or hold some, and what is in them."""


def is_database(path: str | os.PathLike[str]) -> bool:
    """bool: the directory holds a RocksDB database, be it one that lost its file ``CURRENT``; directories do not matter."""
    if os.path.isfile(os.path.join(path, "CURRENT")):
        return True
    # A topic may be named like that, so that it is a directory.
    return bool(listing(path, lambda entry: entry.name.startswith("MANIFEST-") and not entry.is_dir()))


def may_be_database(path: str | os.PathLike[str]) -> bool:
    """bool: as `is_database`, or the directory is there and may not be looked into: then its opening says so."""
    return is_database(path) or closed_folder(path) is not None


def closed_folder(path: str | os.PathLike[str]) -> OSError | None:
    """OSError or None: why the system does not give out the directory `path`; None where it does, or there is none."""
    try:
        listing(path).checked()
        # One that may be listed and not searched gives out no file.
        os.stat(os.path.join(path, "CURRENT"))
    except OSError as error:
        # Below a folder that is closed itself nobody knows whether it is there.
        if is_unreadable(error) and os.path.lexists(path):
            return with_path(error, os.fspath(path))
    return None


def state_of_files(path: str | os.PathLike[str]) -> tuple[tuple[str, int, int], ...]:
    """Return name, length and time of the files that change when a broker writes into the database at `path`."""
    found = []
    for entry in listing(path, lambda entry: entry.name == "CURRENT" or entry.name.endswith((".sst", ".log"))).existing():
        # A broker deletes files while this runs.
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            found.append((entry.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


def check_queue_databases(root: str | os.PathLike[str]) -> None:
    """Raise OSError where the store at `root` may have queues in RocksDB, in a folder that the system does not give out."""
    for folder in queue_databases(root):
        closed = closed_folder(folder)
        if closed is not None:
            raise closed


def closed_databases(root: str | os.PathLike[str]) -> list[StoreError]:
    """list of StoreError: the folders of the store at `root` that may be databases, of `FOLDERS`, and cannot be looked into."""
    found: dict[str, StoreError] = {}
    for name, what in FOLDERS.items():
        path = os.path.join(os.fspath(root), *name.split("/"))
        error = None if os.path.dirname(name) in found else closed_folder(path)
        if error is not None:
            text = f"this folder, in which a broker keeps {what}, cannot be looked into ({error.strerror}); let this user list "
            found[name] = StoreError(text + "and search it", path)
    return list(found.values())


def queue_databases(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """tuple of str: the folders of the store at `root` that hold queues in RocksDB, of `PLACES`; a broker has one at most."""
    files, database = (os.path.join(os.fspath(root), name) for name in PLACES)
    # The first has queue files more often than not; the second is nothing but a database.
    found = [files] if is_database(files) else []
    return (*found, database) if may_be_database(database) else tuple(found)
