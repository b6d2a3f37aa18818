"""What a store keeps where, and which of its files and folders nothing reads.

It reads little: file lists, and a few keys of databases.  No configuration is guessed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rmqstore.config import StoreConfig
from rmqstore.consumequeue.queue_folders import QUEUE_FOLDERS, is_queue_name
from rmqstore.consumer.settings_sources import SettingsKind
from rmqstore.errors import MissingDependencyError, StoreError
from rmqstore.files.listing import UnreadPart, listing, unread_parts
from rmqstore.files.mapped_file import STAGING_PREFIX, offset_of_name
from rmqstore.index.index_service import is_index_name
from rmqstore.rocksdb.database import Database
from rmqstore.rocksdb.index import index_folder, may_have_entries
from rmqstore.rocksdb.places import FOLDERS, PLACES, closed_folder, may_be_database, queue_databases
from rmqstore.rocksdb.settings import settings_layouts
from rmqstore.rocksdb.waiting import has_pop_records

__all__ = ["store_layout", "unread_in"]

_KINDS: tuple[SettingsKind, ...] = ("topics", "subscription_groups", "consumer_offsets")
_FORMS = {
    "separate": "RocksDB (three databases)",
    "single": "RocksDB (config/metadata)",
    "v2": "RocksDB (config/rdb, v2)",
}
_SPECIAL = (b"lastOffsetPy", b"lastStoreTimeStamp")
# Of a store's root: what this package reads or writes, and small files of a broker without a message.
_READ = frozenset(
    (
        "commitlog", "consumequeue", "batchconsumequeue", "consumequeue_ext", "index", "config", "checkpoint", "abort", "lock",
        "timerwheel", "timerlog", "tiered_index_file", "epochFileCheckpoint", "brokerIdentity", ".rmqstore-rebuild",
        *(name.split("/")[0] for name in FOLDERS),
    )
)  # fmt: skip


def store_layout(root: str | os.PathLike[str], config: StoreConfig) -> dict[str, str]:
    """dict of str to str: where the store at `root` keeps its parts; parts that are nowhere are left out.

    The parts are "queues", "index", "settings", "timers", "transactions", "pop records" and "tiered storage".

    Parameters
    ----------
    config : StoreConfig
        Options of the store, see `StoreConfig.infer`.
    """
    root = os.fspath(root)
    families = _families(root)
    parts = {
        "queues": _queues(root),
        "index": _index(root, config, families),
        "settings": _settings(root),
        "timers": _timers(root, families),
        "transactions": _transactions(root, families),
        "pop records": "RocksDB (kvStore)" if has_pop_records(root) else "",
        "tiered storage": _tiered(root),
    }
    return {name: where for name, where in parts.items() if where}


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


# -------------------------------------------------------------------------------------------------------------- parts


def _has_files(path: str) -> bool:
    return any(
        listing(os.path.join(path, topic, queue)).names
        for topic in listing(path).names
        for queue in listing(os.path.join(path, topic)).names
    )


def _joined(parts: list[str]) -> str:
    return " and ".join(part for part in parts if part)


def _queues(root: str) -> str:
    files = "files" if _has_files(os.path.join(root, "consumequeue")) else ""
    if files and os.path.isdir(os.path.join(root, "consumequeue_ext")):
        files = "files with an extension"
    batch = "batch files" if _has_files(os.path.join(root, "batchconsumequeue")) else ""
    databases = [f"RocksDB ({os.path.basename(folder)})" for folder in queue_databases(root)]
    return _joined([files, batch, *databases])


def _families(root: str) -> dict[str, bool] | str:
    # Which families of the database of index, timers and transactions have entries, or why that is not known.
    path = index_folder(root)
    if not may_be_database(path):
        return {}
    try:
        with Database(path) as database:
            return {
                family: any(key not in _SPECIAL for key, _ in _first(database, family, len(_SPECIAL) + 1))
                for family in database.families
            }
    except MissingDependencyError:
        return "rocksdict is not installed" if may_have_entries(root) else {}
    except (StoreError, OSError):
        return "it cannot be read"


def _first(database: Database, family: str, num: int) -> Iterator[tuple[bytes, bytes]]:
    for _, item in zip(range(num), database.items(family=family), strict=False):
        yield item


def _in_database(families: dict[str, bool] | str, family: str) -> str:
    if isinstance(families, str):
        return f"maybe RocksDB ({families})"
    return "RocksDB" if families.get(family) else ""


def _index(root: str, config: StoreConfig, families: dict[str, bool] | str) -> str:
    files = ""
    if any(name.isdigit() for name in listing(os.path.join(root, "index")).names):
        files = "files" if "index_tags" in config.assumed else f"files with{'' if config.index_tags else 'out'} tags"
    return _joined([files, _in_database(families, "default")])


def _settings(root: str) -> str:
    if closed_folder(os.path.join(root, "config")) is not None:
        return "not known (config/ cannot be looked into)"
    forms = [form for layout, form in _FORMS.items() if any(layout in settings_layouts(root, kind) for kind in _KINDS)]
    return _joined(["JSON" if _has_json(root) else "", *forms])


def _has_json(root: str) -> bool:
    files = ("topics.json", "subscriptionGroup.json", "consumerOffset.json", "lmqConsumerOffset.json")
    return any(name in files for name in listing(os.path.join(root, "config")).names)


def _timers(root: str, families: dict[str, bool] | str) -> str:
    names = listing(root).names
    files = ""
    if "timerwheel" in names or listing(os.path.join(root, "timerlog")).names:
        snapshots = any(name.startswith("timerwheel.") for name in names)
        files = "file wheel with snapshots" if snapshots else "file wheel"
    return _joined([files, _in_database(families, "timer") if isinstance(families, dict) else ""])


def _transactions(root: str, families: dict[str, bool] | str) -> str:
    files = os.path.isdir(os.path.join(root, "consumequeue", "RMQ_SYS_TRANS_HALF_TOPIC"))
    in_database = _in_database(families, "trans") if isinstance(families, dict) else ""
    return _joined(["half topic" if files else "", in_database])


def _tiered(root: str) -> str:
    places = [
        name
        for name in ("config/tieredStoreMetadata.json", "tiered_index_file")
        if os.path.exists(os.path.join(root, *name.split("/")))
    ]
    return f"used ({', '.join(places)})" if places else ""
