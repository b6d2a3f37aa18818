"""describe: what a store is, and rows of its queues and of consumer progress, as plain values.

It reads file lists, headers, the newest segment, and the first and last unit of each queue; every unit only for the bytes of a
queue.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rmqstore.config import StoreConfig
from rmqstore.config.saved_options import OPTIONS_FILE
from rmqstore.consumequeue.queue_folders import QUEUE_FOLDERS, is_queue_name
from rmqstore.errors import OffsetOutOfRangeError, StoreError
from rmqstore.files.listing import UnreadPart, ask_again, listing, unread_parts
from rmqstore.files.mapped_file import STAGING_PREFIX, offset_of_name
from rmqstore.index.index_service import is_index_name
from rmqstore.offline.verify_databases import has_index_database
from rmqstore.rocksdb.database import FOLDERS, PLACES, closed_folder, queue_databases
from rmqstore.rocksdb.settings import settings_layouts
from rmqstore.store.backup import BACKUP_FILE, BACKUP_PARTS
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    from rmqstore.consumequeue.queue_look import QueueLook
    from rmqstore.consumer.settings_sources import SettingsKind
    from rmqstore.store.completion import QueueDatabaseState

__all__ = [
    "CheckpointDescription", "CommitLogDescription", "IndexFileDescription", "Place", "QueueDescription",
    "StoreDescription", "consumer_places", "consumer_rows", "describe", "group_sums", "queue_rows", "store_layout", "unread_in",
]  # fmt: skip

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
        OPTIONS_FILE, BACKUP_FILE, BACKUP_PARTS,
        *(name.split("/")[0] for name in FOLDERS),
    )
)  # fmt: skip


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
    def of(cls, topic: str, queue_id: int, look: QueueLook) -> QueueDescription:
        """QueueDescription: of a queue that was looked at."""
        return cls(topic, queue_id, look.kind, look.min_queue_offset, look.max_queue_offset, look.files)

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
    clean : bool
        There is no ``abort`` file: the store was closed in order, and is not in use.
    config : StoreConfig
        The geometry; what the files do not contain is listed in ``config.assumed``.
    queues : tuple of QueueDescription
        By topic and queue id.
    index_files : tuple of IndexFileDescription
        Oldest first.
    consumer_offsets : dict of (str, str) to dict of int to int
        Next queue offset by (group, topic) and queue id.
    consumer_offsets_error : str or None
        What of them cannot be read: all, or some.
    damaged_files : tuple of (str, str)
        Path and what is wrong, of files that do not have their length: segments, queue files, index files.
    undispatched, unserved, queue_database
        See `MessageStore`.
    layout : dict of str to str
        Part to place, see `store_layout`.
    unseen_queues : tuple of str
        Folders that cannot be read, in which queues may be.
    unread : tuple of UnreadPart
        Files and folders in the store that are not read.
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
    undispatched: tuple[int, int] | None = None
    unserved: tuple[int, int] | None = None
    queue_database: QueueDatabaseState | None = None
    layout: dict[str, str] = field(default_factory=dict)
    unseen_queues: tuple[str, ...] = ()
    unread: tuple[UnreadPart, ...] = ()

    def __repr__(self) -> str:
        from rmqstore.texts import format_size, format_time

        log, topics = self.commit_log, self.topics
        return "\n".join(
            [
                f"StoreDescription of {self.path!r}, {'clean' if self.clean else 'in use, or not closed in order'}",
                f"  commit log: {log.segments} segments of {format_size(log.segment_size)}, "
                f"phy offsets {log.min_offset} to {log.max_offset}",
                f"  stored: {format_time(log.first_store_timestamp)} to {format_time(log.last_store_timestamp)}",
                f"  queues: {len(self.queues)} of {len(topics)} topics",
                f"  index files: {len(self.index_files)}, {sum(index.entries for index in self.index_files)} entries",
                f"  consumer offsets: {len(self.consumer_offsets)} of group and topic",
                f"  damaged files: {len(self.damaged_files)}",
            ]
        )

    @property
    def topics(self) -> tuple[str, ...]:
        """tuple of str: the topics that have queues, sorted."""
        return tuple(sorted({queue.topic for queue in self.queues}))


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
    with MessageStore.open(path, config=config, read_only=True) as store, store.commit_log.single_records():
        log = store.commit_log
        first = next(store.messages(), None)
        queues = []
        last: int | None = None
        for topic, queue_id, look in _looks(store, store.queues.keys()):
            queues.append(QueueDescription.of(topic, queue_id, look))
            time = None if look.last is None else _time_at(store, look.last.phy_offset)
            if time is not None and (last is None or time > last):
                last = time
        if last is None:
            last = log.last_store_timestamp()
        index_files = []
        service = store.index_service
        for index in () if service is None else map(service.file, service.names):
            header = dataclasses.asdict(index.header)
            used_slots, count = header.pop("hash_slot_count"), header.pop("index_count")
            index_files.append(IndexFileDescription(index.name, count - 1, index.index_num - 1, used_slots, **header))
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
            CheckpointDescription(**store.checkpoint.as_dict()),
            *store.consumer_progress(),
            tuple((problem.path or store.path, problem.message) for problem in store.damaged_files()),
            store.undispatched,
            store.unserved,
            store.queue_database,
            store_layout(store.path, store.config),
            tuple(sorted(store.queues.unseen)),
            unread_in(store.path),
        )


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

    In the root these are logs of DLedger, ``compaction`` and further folders; in the folders of log, queues and index what has no
    name of a segment, topic, queue or file.
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
        topics = listing(os.path.join(root, kind), os.DirEntry.is_dir)
        if os.path.join(root, kind) not in databases:
            found += unread_parts(os.path.join(root, kind), set(topics.names).__contains__)
        for folder in topics.paths:
            queues = [each for each in listing(folder, os.DirEntry.is_dir).names if is_queue_name(each)]
            found += unread_parts(folder, queues.__contains__)
            for queue in queues:
                found += unread_parts(os.path.join(folder, queue), _is_segment)
    return tuple(found)


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


def queue_rows(
    store: MessageStore,
    topic: str | None = None,
    *,
    with_bytes: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the queues of a store, or of one topic, as dicts: `QueueDescription`, and first and last store time.

    Parameters
    ----------
    with_bytes : bool
        Also ``size``, the bytes of its records in the log; every unit is read for it.
    progress : callable, optional
        Called with (queues read, queues in all).

    Raises
    ------
    OSError
        There is no queue of `topic`, and a folder in which it may be cannot be read.
    """
    names = [name for name in store.queues.keys() if topic in (None, name[0])]
    if topic is not None and not names:
        store.queues.check_seen(topic)
    for number, (name, queue_id) in enumerate(names):
        if progress is not None:
            progress(number, len(names))
        try:
            row = ask_again(partial(_row, store, name, queue_id, with_bytes), store.refresh)
        except OSError as error:
            store.queues.leave_out(name, queue_id, error)
            continue
        if row is not None:
            yield row


def _row(store: MessageStore, topic: str, queue_id: int, with_bytes: bool) -> dict[str, Any] | None:
    look = store.queues.look(topic, queue_id, store.commit_log.min_offset)
    if look is None:
        return None
    low, high, last = look.min_queue_offset, look.max_queue_offset, look.last
    first = store.queues.unit(topic, queue_id, low) if low < high else None
    value = {
        **QueueDescription.of(topic, queue_id, look).as_dict(),
        "first_store_timestamp": None if first is None else _time_at(store, first.phy_offset),
        "last_store_timestamp": None if last is None else _time_at(store, last.phy_offset),
    }
    if with_bytes:
        queue = store.queues.find(topic, queue_id)
        steps = () if queue is None else queue.places(low, high)
        value["size"] = sum(int(each.sizes[each.are_real].sum()) for each in steps)
    return value


def _time_at(store: MessageStore, phy_offset: int) -> int | None:
    timestamp = store.commit_log.store_timestamp_at(phy_offset)
    return timestamp if timestamp >= 0 else None


Place = tuple[str, str, int, int]
"""(group, topic, queue id, queue offset) of the progress of a group in a queue."""


def consumer_places(store: MessageStore, group: str | None = None, topic: str | None = None) -> list[Place]:
    """Return the queues of the topics that groups consume, by group, topic and queue id; looks at no queue.

    The queue offset is consumed next, -1 where the group has progress in other queues of the topic only.
    """
    queue_ids: dict[str, list[int]] = {}
    for name, queue_id in store.queues.keys():
        queue_ids.setdefault(name, []).append(queue_id)
    return [
        (its_group, its_topic, queue_id, offsets.get(queue_id, -1))
        for (its_group, its_topic), offsets in sorted(store.consumer_offsets.list().items())
        if group in (None, its_group) and topic in (None, its_topic)
        for queue_id in sorted({*queue_ids.get(its_topic, ()), *offsets})
    ]


def consumer_rows(
    store: MessageStore, places: Iterable[Place], on_error: Callable[[str, int, Any], object] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a dict for each of the `consumer_places`; each queue is looked at once, for all groups.

    ``max_queue_offset`` and ``lag`` are None where the queue is gone or cannot be read; ``lag`` also where the offset is after
    the end of the queue.  ``waiting_since`` is when the next message was stored, ms since epoch, or None; ``kind`` is that of
    `progress_kind`.

    - `on_error`: called with topic, queue id and error of a queue that cannot be read; by default a warning where this user may
      not read it, and the error is raised otherwise.
    """
    # Imported where it is used, as few programs use it.
    from rmqstore.consumer.settings_sources import progress_kind
    from rmqstore.store.stats import Consumers

    there = {*store.queues.keys()}
    looks: dict[tuple[str, int], QueueLook | None] = {}
    consumers = Consumers(store.queues, store.commit_log)
    of_topic, kind = None, ""
    for group, topic, queue_id, queue_offset in places:
        if of_topic != (group, topic):
            of_topic, kind = (group, topic), progress_kind(group, topic)
        key = topic, queue_id
        if key not in looks:
            found = _looks(store, [key] if key in there else [], on_error)
            looks[key] = next((look for _, _, look in found), None)
        end, time = consumers.end_and_time(topic, queue_id, queue_offset, looks[key])
        yield {
            "group": group, "topic": topic, "queue_id": queue_id, "queue_offset": queue_offset, "max_queue_offset": end,
            "lag": None if end is None or queue_offset > end else end - max(queue_offset, 0), "waiting_since": time,
            "kind": kind,
        }  # fmt: skip


def _looks(
    store: MessageStore,
    names: Iterable[tuple[str, int]],
    on_error: Callable[[str, int, Any], object] | None = None,
) -> Iterator[tuple[str, int, QueueLook]]:
    # The queues that can be read.
    report: Callable[[str, int, Any], object] = on_error or store.queues.leave_out
    for topic, queue_id in names:
        try:
            look = store.queues.look(topic, queue_id, store.commit_log.min_offset)
        except (StoreError, OSError) as error:
            report(topic, queue_id, error)
            continue
        if look is not None:
            yield topic, queue_id, look


def group_sums(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """list of dict: the rows of `consumer_rows` by group: ``group``, ``topics``, ``queues``, ``lag``, ``unknown`` (queues without a
    known lag), ``waiting_since`` (the oldest), ``kind`` ("system" for RocketMQ's own, else "").
    """
    from rmqstore.consumer.settings_sources import group_kind

    sums: dict[str, dict[str, Any]] = {}
    topics: dict[str, set[str]] = {}
    for row in rows:
        name = row["group"]
        if name not in sums:
            sums[name] = {
                "group": name, "topics": 0, "queues": 0, "lag": 0, "unknown": 0, "waiting_since": None,
                "kind": group_kind(name),
            }  # fmt: skip
        each = sums[name]
        topics.setdefault(name, set()).add(row["topic"])
        each["queues"] += 1
        each["lag"] += row["lag"] or 0
        each["unknown"] += row["lag"] is None
        since = row["waiting_since"]
        if since is not None and (each["waiting_since"] is None or since < each["waiting_since"]):
            each["waiting_since"] = since
    for name, each in sums.items():
        each["topics"] = len(topics[name])
    return list(sums.values())
