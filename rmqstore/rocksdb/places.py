"""Where a broker keeps the database of its queues.

Owns the names of these folders.  It opens nothing and is cheap to import: every opening of a store asks it.
"""

from __future__ import annotations

import os

__all__ = ["PLACES", "queue_databases"]

PLACES = ("consumequeue", "consumequeue_rocksdb")
"""The folders of a store in which a broker keeps the database of its queues."""


def queue_databases(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """tuple of str: the folders of the store at `root` that hold queues in RocksDB, of `PLACES`; a broker has one at most."""
    folders = (os.path.join(os.fspath(root), name) for name in PLACES)
    return tuple(folder for folder in folders if os.path.isfile(os.path.join(folder, "CURRENT")))
