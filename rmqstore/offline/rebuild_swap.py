"""Put rebuilt queues and index in the place of the old ones, by renames that can be repeated after a kill."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from rmqstore import _core
from rmqstore.errors import GeometryError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.durable import fsync_directory
from rmqstore.files.listing import listing
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import naming_errors
from rmqstore.rocksdb.database import PLACES, is_database, queue_databases
from rmqstore.store.opening import REBUILD_COMPLETE

__all__ = [
    "QUEUE_DATABASE", "delete_tree", "finish_swap", "folders_of", "mark_complete", "move_built", "moved_aside", "swap",
    "swap_database",
]  # fmt: skip

logger = logging.getLogger(__name__)

QUEUE_DATABASE = "queue_database"
"""The mark of a complete build that is a database of queues (`rebuild_queue_database`); the name of its place follows."""
FOLDERS = {"index": ("index",), "consumequeue": ("consumequeue", "batchconsumequeue", "consumequeue_ext")}
"""The folders of a store by kind."""


def folders_of(kinds: Iterable[str]) -> list[str]:
    """Return the folders of a store that contain these kinds."""
    return [folder for kind in kinds for folder in FOLDERS[kind]]


def move_built(work: str, target: str, kinds: Iterable[str]) -> None:
    """Move the folders that were built in `work` to `target`; existing ones are not replaced."""
    for folder in folders_of(kinds):
        if os.path.isdir(os.path.join(work, folder)):
            os.rename(os.path.join(work, folder), os.path.join(target, folder))
    fsync_directory(target)


def mark_complete(work: str, kinds: Iterable[str]) -> None:
    """Mark the folders in `work` as complete, so that only the swap is left; a power failure leaves the whole mark or none."""
    marker = os.path.join(work, REBUILD_COMPLETE)
    with naming_errors(marker + ".new"), open(marker + ".new", "w", encoding="ascii") as file:
        file.write(" ".join(kinds))
        file.flush()
        os.fsync(file.fileno())
    os.rename(marker + ".new", marker)
    fsync_directory(work)


def finish_swap(root: str, work: str) -> tuple[str, ...]:
    """Swap in what an earlier rebuild completed, and return it: kinds of `rebuild`, `QUEUE_DATABASE` alone, or nothing."""
    marker = os.path.join(work, REBUILD_COMPLETE)
    if not os.path.exists(marker):
        return ()
    with open(open_regular(marker), encoding="ascii") as file:
        complete = tuple(file.read().split())
    if complete[:1] == (QUEUE_DATABASE,):
        swap_database(root, work, complete[1])
        return complete[:1]
    swap(root, work, complete)
    return complete


def delete_tree(path: str, ignore_errors: bool = False) -> None:
    """Delete a directory and all that is in it."""
    # Imported here because it imports the compression libraries.
    import shutil

    shutil.rmtree(path, ignore_errors=ignore_errors)


def swap(root: str, work: str, kinds: tuple[str, ...]) -> None:
    """Put the new folders in place of the old ones; a kill after any step is harmless, and no step is done twice."""
    for folder in folders_of(kinds):
        new, place, old = os.path.join(work, folder), os.path.join(root, folder), os.path.join(work, "old-" + folder)
        swapped = os.path.join(work, "swapped-" + folder)
        if os.path.isdir(new):
            if is_database(place):
                _move_aside(root, folder, "rocksdb")
            if os.path.isdir(place) and not os.path.exists(old):
                os.rename(place, old)
            os.rename(new, place)
        elif folder not in kinds and os.path.isdir(place) and not (os.path.exists(old) or os.path.exists(swapped)):
            # The log has no records for this kind of queue, so the old folder is stale.
            os.rename(place, old)
        with open(swapped, "w"):
            pass
        fsync_directory(work)
        fsync_directory(root)
    if "consumequeue" in kinds:
        for place in queue_databases(root):
            _move_aside(root, os.path.basename(place), "rocksdb")
        fsync_directory(root)
    if "index" in kinds:
        _raise_checkpoint(root)
    _clear(root, work)


def swap_database(root: str, work: str, folder: str) -> tuple[str, ...]:
    """Put the new database of queues in the place `folder`, like `swap`, and return the folders that were moved aside."""
    new, place = os.path.join(work, "queues"), os.path.join(root, folder)
    aside = []
    if os.path.isdir(new):
        # A broker does not start with a database in the other place too.
        for old in dict.fromkeys((*queue_databases(root), place)):
            if os.path.isdir(old):
                aside.append(_move_aside(root, os.path.basename(old), "rocksdb" if is_database(old) else "files"))
        os.rename(new, place)
    fsync_directory(work)
    fsync_directory(root)
    _clear(root, work)
    return tuple(aside)


def _clear(root: str, work: str) -> None:
    # Without the mark, nothing in `work` is needed.
    os.unlink(os.path.join(work, REBUILD_COMPLETE))
    fsync_directory(work)
    try:
        delete_tree(work)
    except OSError as error:
        logger.warning("%s is no longer needed, but could not be deleted: %s", work, error)
    fsync_directory(root)


def _move_aside(root: str, folder: str, kind: str) -> str:
    # Next to the other folders of the store, where a broker ignores it.
    number = 1
    while os.path.exists(aside := os.path.join(root, f"{folder}.{kind}-{number}")):
        number += 1
    os.rename(os.path.join(root, folder), aside)
    logger.info("what held queues in %s is called %s now", folder, aside)
    return aside


def moved_aside(root: str, kinds: tuple[str, ...] = ("rocksdb",)) -> tuple[str, ...]:
    """Return the folders of queues of these kinds ("rocksdb", "files") that rebuilds moved aside."""
    found = []
    for name in listing(root).checked().names:
        folder, _, end = name.rpartition(".")
        kind, _, number = end.partition("-")
        path = os.path.join(root, name)
        if folder in PLACES and kind in kinds and number.isdigit() and (kind == "files" or is_database(path)):
            found.append(path)
    return tuple(sorted(found))


def _raise_checkpoint(root: str) -> None:
    # A real broker that finds an abort file deletes index files newer than this time (RocketMQ 5.5.0).
    directory = os.path.join(root, "index")
    names = listing(directory, lambda entry: entry.name.isdigit()).existing().names
    try:
        checkpoint = Checkpoint.load(os.path.join(root, "checkpoint"))
    except GeometryError as error:
        # No writer opens the store with this checkpoint, so nothing trusts it; the rebuilt files are right anyway.
        logger.warning("%s", error)
        return
    if names:
        with open(open_regular(os.path.join(directory, names[-1])), "rb") as file:
            file.seek(int(_core.IndexLayout.INDEX_END_TIMESTAMP))
            end = int.from_bytes(file.read(8), "big", signed=True)
        checkpoint.index_msg_timestamp = max(checkpoint.index_msg_timestamp, end)
        checkpoint.flush()
