"""Where a broker keeps the database of its queues, and what makes a folder a database.

Owns the names of these folders.  It opens nothing and is cheap to import: every opening of a store asks it.
"""

from __future__ import annotations

import os

__all__ = ["PLACES", "is_database", "may_be_database", "queue_databases"]

PLACES = ("consumequeue", "consumequeue_rocksdb")
"""The folders of a store in which a broker keeps the database of its queues."""


def is_database(path: str | os.PathLike[str]) -> bool:
    """bool: the directory holds a RocksDB database, be it one that lost its file ``CURRENT``; directories do not matter."""
    if os.path.isfile(os.path.join(path, "CURRENT")):
        return True
    try:
        with os.scandir(path) as entries:
            # A topic may be named like that, so that it is a directory.
            return any(entry.name.startswith("MANIFEST-") and not entry.is_dir() for entry in entries)
    except OSError:
        return False


def may_be_database(path: str | os.PathLike[str]) -> bool:
    """bool: as `is_database`, or the directory is there and may not be looked into: then its opening says so."""
    if is_database(path):
        return True
    try:
        if os.path.isdir(path):
            os.scandir(path).close()
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def queue_databases(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """tuple of str: the folders of the store at `root` that hold queues in RocksDB, of `PLACES`; a broker has one at most."""
    folders = (os.path.join(os.fspath(root), name) for name in PLACES)
    return tuple(folder for folder in folders if is_database(folder))
