"""describe: what a store is, as plain values.

Owns the summary that the command line shows: geometry, bounds of the log, queues, index files, checkpoint, consumer
progress.  It only reads, and reads little: file lists, headers, the last segment and the last file of each queue.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.files.listing import ask_again, listing
from rmqstore.files.os_errors import is_missing
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    from rmqstore.files.listing import UnreadPart
    from rmqstore.offline.layout import StoreLayout
    from rmqstore.store.completion import QueueDatabaseState

__all__ = [
    "CheckpointDescription",
    "CommitLogDescription",
    "IndexFileDescription",
    "QueueDescription",
    "StoreDescription",
    "describe",
    "rocksdb_folders",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CommitLogDescription:
    """The log: bytes, and the store times of the first and last message (ms since epoch, None when there is none)."""

    segments: int
    segment_size: int
    min_offset: int
    max_offset: int
    first_store_timestamp: int | None
    last_store_timestamp: int | None


@dataclass(frozen=True, slots=True)
class QueueDescription:
    """One consume queue: `kind` is "SimpleCQ" or "BatchCQ", as RocketMQ names them."""

    topic: str
    queue_id: int
    kind: str
    min_queue_offset: int
    max_queue_offset: int
    files: int

    @classmethod
    def of(cls, queue: AnyConsumeQueue, min_offset: int) -> QueueDescription:
        """QueueDescription: of an open queue whose log begins at phy offset `min_offset`."""
        low, high = queue.bounds(min_offset)
        return cls(queue.topic, queue.queue_id, queue.cq_type, low, high, queue.disk_files)

    def as_dict(self) -> dict[str, Any]:
        """dict: the fields, and `messages`, how many are still there."""
        return {**dataclasses.asdict(self), "messages": self.max_queue_offset - self.min_queue_offset}


@dataclass(frozen=True, slots=True)
class IndexFileDescription:
    """One index file; timestamps in ms since epoch, offsets in bytes of the log."""

    name: str
    entries: int
    capacity: int
    used_slots: int
    begin_timestamp: int
    end_timestamp: int
    begin_phy_offset: int
    end_phy_offset: int


@dataclass(frozen=True, slots=True)
class CheckpointDescription:
    """The checkpoint's six fields; ms since epoch and bytes of the log."""

    physic_msg_timestamp: int
    logics_msg_timestamp: int
    index_msg_timestamp: int
    master_flushed_offset: int
    confirm_phy_offset: int
    logics_physical_offset: int


@dataclass(frozen=True, slots=True)
class StoreDescription:
    """A store.

    Attributes
    ----------
    path : str
    clean : bool
        There is no ``abort`` file: the last user closed the store in order, or none uses it now.
    config : StoreConfig
        The geometry; what the files do not tell is listed in ``config.assumed``.
    commit_log : CommitLogDescription
    queues : tuple of QueueDescription
        By topic and queue id.
    index_files : tuple of IndexFileDescription
        Oldest first.
    checkpoint : CheckpointDescription
    consumer_offsets : dict of (str, str) to dict of int to int
        Next queue offset by (group, topic) and queue id.
    consumer_offsets_error : str or None
        What of them cannot be read: all, or some.
    damaged_files : tuple of (str, str)
        Path and what is wrong, of files that do not have their length: segments, queue files, index files.
    rocksdb : tuple of str
        As of `rocksdb_folders`.
    undispatched, unserved : tuple of (int, int) or None
        As of `MessageStore`.
    queue_database : QueueDatabaseState or None
        As of `MessageStore`.
    layout : StoreLayout or None
        What it keeps where, and which versions may have written it.
    unseen_queues : tuple of str
        Folders of queues that cannot be looked into, so that it is not known which queues are in them.
    unread_queues : tuple of (str, int)
        Topic and queue id of the queues that are there, and of which the system does not give out a folder or file.
    unread : tuple of UnreadPart
        What lies in the store and is not read: its path, the number of files and their bytes.
    """

    path: str
    clean: bool
    config: StoreConfig
    commit_log: CommitLogDescription
    queues: tuple[QueueDescription, ...]
    index_files: tuple[IndexFileDescription, ...]
    checkpoint: CheckpointDescription
    consumer_offsets: dict[tuple[str, str], dict[int, int]]
    consumer_offsets_error: str | None = None
    damaged_files: tuple[tuple[str, str], ...] = ()
    rocksdb: tuple[str, ...] = ()
    undispatched: tuple[int, int] | None = None
    unserved: tuple[int, int] | None = None
    queue_database: QueueDatabaseState | None = None
    layout: StoreLayout | None = None
    unseen_queues: tuple[str, ...] = ()
    unread_queues: tuple[tuple[str, int], ...] = ()
    unread: tuple[UnreadPart, ...] = ()

    def __repr__(self) -> str:
        # As long for a store of many queues as for one of few; the fields have all of it.
        from rmqstore.texts import escape, format_size, format_time

        log, topics = self.commit_log, self.topics
        lines = [
            f"StoreDescription of {self.path!r}, {'clean' if self.clean else 'in use, or not closed in order'}",
            f"  commit log: {log.segments} segments of {format_size(log.segment_size)}, "
            f"phy offsets {log.min_offset} to {log.max_offset}",
            f"  stored: {format_time(log.first_store_timestamp)} to {format_time(log.last_store_timestamp)}",
            f"  queues: {len(self.queues)} of {len(topics)} topics{_some(topics)}",
            f"  index files: {len(self.index_files)}, {sum(index.entries for index in self.index_files)} entries",
            f"  consumer offsets: {len(self.consumer_offsets)} of group and topic",
        ]
        if self.config.assumed:
            lines.append(f"  assumed: {', '.join(self.config.assumed)}")
        if self.undispatched is not None:
            lines.append(f"  not dispatched: phy offsets {self.undispatched[0]} to {self.undispatched[1]}")
        if self.layout is not None:
            lines.append(f"  {escape(self.layout.text[:300])}")
        if self.consumer_offsets_error is not None:
            lines.append(f"  consumer offsets cannot be read: {escape(self.consumer_offsets_error[:200])}")
        if self.damaged_files:
            lines.append(f"  damaged files: {len(self.damaged_files)}{_some([path for path, _ in self.damaged_files])}")
        if self.unread:
            lines.append(f"  not read: {'; '.join(escape(str(part)) for part in self.unread[:3])}")
        if self.queue_database is not None:
            lines.append(f"  queues in RocksDB: {escape(self.queue_database.path)}")
        if self.rocksdb:
            lines.append(f"  RocksDB in: {', '.join(escape(folder) or '.' for folder in self.rocksdb)}")
        return "\n".join(lines)

    @property
    def queues_elsewhere(self) -> bool:
        """bool: the log has messages, no queue has a file, and there is a RocksDB that may hold the queues and is not read."""
        log = self.commit_log
        if self.queue_database is not None:
            return False
        return bool(self.rocksdb) and log.max_offset > log.min_offset and not any(each.files for each in self.queues)

    @property
    def topics(self) -> tuple[str, ...]:
        """tuple of str: the topics that have queues, sorted."""
        return tuple(sorted({queue.topic for queue in self.queues}))


def _some(names: Sequence[str]) -> str:
    from rmqstore.texts import escape

    if not names:
        return ""
    return f": {', '.join(escape(name) for name in names[:3])}{', …' if len(names) > 3 else ''}"


def describe(path: str | os.PathLike[str], config: StoreConfig | None = None) -> StoreDescription:
    """Describe the store at `path`; nothing is changed, a running broker is not disturbed.

    Parameters
    ----------
    config : StoreConfig, optional
        Its geometry; by default `StoreConfig.infer`.

    Raises
    ------
    StoreError, GeometryError
        There is no store, or its files do not fit the geometry.
    """
    gone = (FileNotFoundError, OffsetOutOfRangeError)
    return ask_again(lambda: _describe_once(path, config), gone=gone, tries=10)


def _describe_once(path: str | os.PathLike[str], config: StoreConfig | None) -> StoreDescription:
    # Imported where it is used, as few programs use it.
    from rmqstore.offline.layout import store_layout, unread_in

    with MessageStore.open(path, config=config, read_only=True) as store, store.commit_log.single_records():
        log = store.commit_log
        first = next(store.messages(), None)
        queues = []
        last: int | None = None
        for topic, queue_id in store.queues.keys():
            try:
                queue = store.queues.find(topic, queue_id)
                if queue is None:
                    continue
                unit = queue.last_record()
                described = QueueDescription.of(queue, log.min_offset)
            except FileNotFoundError:
                raise
            except OSError as error:
                store.queues.leave_out(topic, queue_id, error)
                continue
            if unit is not None:
                time = log.store_timestamp_at(unit.phy_offset)
                if time >= 0 and (last is None or time > last):
                    last = time
            queues.append(described)
        if last is None:
            last = log.last_store_timestamp()
        index_files = []
        if store.index_service is not None:
            for name in store.index_service.names:
                index = store.index_service.file(name)
                header = index.header
                index_files.append(
                    IndexFileDescription(
                        name,
                        header.index_count - 1,
                        index.index_num - 1,
                        header.hash_slot_count,
                        header.begin_timestamp,
                        header.end_timestamp,
                        header.begin_phy_offset,
                        header.end_phy_offset,
                    )
                )
        point = store.checkpoint
        return StoreDescription(
            os.fspath(path),
            not os.path.exists(os.path.join(store.path, "abort")),
            store.config,
            CommitLogDescription(
                len(log.files),
                log.segment_size,
                log.min_offset,
                log.max_offset,
                None if first is None else first.store_timestamp,
                last,
            ),
            tuple(queues),
            tuple(index_files),
            CheckpointDescription(
                point.physic_msg_timestamp,
                point.logics_msg_timestamp,
                point.index_msg_timestamp,
                point.master_flushed_offset,
                point.confirm_phy_offset,
                point.logics_physical_offset,
            ),
            *store.consumer_progress(),
            tuple((problem.path or store.path, problem.message) for problem in store.damaged_files()),
            rocksdb_folders(store.path),
            store.undispatched,
            store.unserved,
            store.queue_database,
            store_layout(store.path, store.config),
            tuple(sorted(store.queues.unseen)),
            tuple(sorted(store.queues.unread)),
            unread_in(store.path),
        )


def rocksdb_folders(root: str) -> tuple[str, ...]:
    """tuple of str: the folders below `root` that are a RocksDB, relative to it and sorted.

    A broker with ``storeType=defaultRocksDB`` keeps its queues in one instead of in queue files; others keep timers, the
    index or config there.  RocksDB has a file ``MANIFEST-`` and a number in each of its folders.
    """
    found = []
    for folder in ("", "config"):
        below = listing(os.path.join(root, folder), os.DirEntry.is_dir)
        if below.error is not None and not is_missing(below.error):
            # The rest of an answer needs none of them.
            logger.warning(
                "%s: whether a RocksDB lies there cannot be told: %s", os.path.join(root, folder), below.error.strerror
            )
        found += [os.path.join(folder, entry.name) for entry in below if _is_rocksdb(entry.path)]
    return tuple(sorted(found))


def _is_rocksdb(path: str) -> bool:
    # One that lost its file CURRENT is one too; a topic may be a directory of such a name.
    return bool(listing(path, lambda entry: entry.name.startswith("MANIFEST-") and not entry.is_dir()))
