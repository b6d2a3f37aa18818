"""Where a store keeps its queues, index and settings, and which of its files and folders nothing reads.

It reads file lists, and a few keys of databases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rmqstore.config import StoreConfig
from rmqstore.consumequeue.queue_folders import QUEUE_FOLDERS, is_queue_name
from rmqstore.consumer.settings_sources import SettingsKind
from rmqstore.files.listing import UnreadPart, listing, unread_parts
from rmqstore.files.mapped_file import STAGING_PREFIX, offset_of_name
from rmqstore.index.index_service import is_index_name
from rmqstore.offline.verify_databases import has_index_database
from rmqstore.rocksdb.places import FOLDERS, PLACES, closed_folder, queue_databases
from rmqstore.rocksdb.settings import settings_layouts

__all__ = ["store_layout", "unread_in"]

_KINDS: tuple[SettingsKind, ...] = ("topics", "subscription_groups", "consumer_offsets")
_FORMS = {
    "separate": "RocksDB (three databases)",
    "single": "RocksDB (config/metadata)",
    "v2": "RocksDB (config/rdb, v2)",
}
_SETTINGS_FILES = frozenset(("topics.json", "subscriptionGroup.json", "consumerOffset.json", "lmqConsumerOffset.json"))
# Of a store's root: what this package reads or writes, and small files of a broker without a message.
_READ = frozenset(
    (
        "commitlog", "consumequeue", "batchconsumequeue", "consumequeue_ext", "index", "config", "checkpoint", "abort", "lock",
        "timerwheel", "timerlog", "tiered_index_file", "epochFileCheckpoint", "brokerIdentity", ".rmqstore-rebuild",
        *(name.split("/")[0] for name in FOLDERS),
    )
)  # fmt: skip


def store_layout(root: str | os.PathLike[str], config: StoreConfig) -> dict[str, str]:
    """Return where the store at `root` keeps "queues", "index" and "settings"; what is nowhere is left out."""
    root = os.fspath(root)
    queues = ["files"] if _has_files(os.path.join(root, "consumequeue")) else []
    if queues and os.path.isdir(os.path.join(root, "consumequeue_ext")):
        queues = ["files with an extension"]
    if _has_files(os.path.join(root, "batchconsumequeue")):
        queues.append("batch files")
    queues += [f"RocksDB ({os.path.basename(folder)})" for folder in queue_databases(root)]
    index = []
    if any(map(is_index_name, listing(os.path.join(root, "index")).names)):
        tags = "" if "index_tags" in config.assumed else " with tags" if config.index_tags else " without tags"
        index.append("files" + tags)
    if has_index_database(root):
        index.append("RocksDB")
    if closed_folder(os.path.join(root, "config")) is not None:
        settings = ["unknown (config/ cannot be read)"]
    else:
        settings = [] if _SETTINGS_FILES.isdisjoint(listing(os.path.join(root, "config")).names) else ["JSON"]
        layouts = {layout for kind in _KINDS for layout in settings_layouts(root, kind)}
        settings += [form for layout, form in _FORMS.items() if layout in layouts]
    parts = {"queues": queues, "index": index, "settings": settings}
    return {name: " and ".join(places) for name, places in parts.items() if places}


def _has_files(path: str) -> bool:
    return any(
        listing(os.path.join(path, topic, queue)).names
        for topic in listing(path).names
        for queue in listing(os.path.join(path, topic)).names
    )


def unread_in(root: str | os.PathLike[str]) -> tuple[UnreadPart, ...]:
    """List the files and folders of a store that no reader knows.

    In the root: logs of DLedger, ``compaction``, further folders.  In the folders of log, queues and index: what has no name of a
    segment, topic, queue or file there.
    """
    root = os.fspath(root)
    found = []
    for part in unread_parts(root, _is_read):
        if os.path.basename(part.path) == "compaction":
            # Without a compacted topic there is nothing but its positions.
            inside = unread_parts(part.path, lambda name: name.startswith("position-checkpoint"))
            if not inside:
                continue
        found.append(part)
    for folder in ("commitlog", "timerlog"):
        found += unread_parts(os.path.join(root, folder), _is_segment)
    found += unread_parts(os.path.join(root, "index"), is_index_name)
    databases = queue_databases(root)
    for kind in QUEUE_FOLDERS:
        found += _unread_beside_queues(os.path.join(root, kind), os.path.join(root, kind) in databases)
    return tuple(found)


def _unread_beside_queues(folder: str, is_database: bool) -> Iterator[UnreadPart]:
    # A database is read as a whole.
    topics = set(listing(folder, os.DirEntry.is_dir).names)
    yield from unread_parts(folder, lambda name: is_database or name in topics)
    for topic in topics:
        yield from _unread_of_topic(os.path.join(folder, topic))


def _unread_of_topic(folder: str) -> Iterator[UnreadPart]:
    queues = [name for name in listing(folder, os.DirEntry.is_dir).names if is_queue_name(name)]
    yield from unread_parts(folder, lambda name: name in queues)
    for queue in queues:
        yield from unread_parts(os.path.join(folder, queue), _is_segment)


def _is_segment(name: str) -> bool:
    return offset_of_name(name) is not None


def _is_read(name: str) -> bool:
    # Snapshots of the wheel end in a number; what a rebuild moved aside is named by it.
    aside, _, end = name.partition(".")
    return (
        name in _READ
        or name.startswith((STAGING_PREFIX, "timerwheel."))
        or (aside in _READ and end in ("bak", "tmp", "backup"))
        or (aside in PLACES and end.startswith(("rocksdb-", "files-")))
    )
