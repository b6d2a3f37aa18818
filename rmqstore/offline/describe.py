"""describe: describe a store, its queues and its consumer progress as plain values.

It reads file lists, headers, the newest segment, and the first and last unit of each queue; all units only for the bytes of a
queue.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
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
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    from rmqstore.consumequeue.queue_look import QueueLook
    from rmqstore.consumer.settings_sources import SettingsKind
    from rmqstore.store.completion import QueueDatabaseState

__all__ = [
    "CheckpointDescription", "CommitLogDescription", "IndexFileDescription", "Place", "QueueDescription", "StoreDescription",
    "consumer_columns", "consumer_places", "describe", "group_sums", "queue_rows", "rows_of", "store_layout", "unread_in",
]  # fmt: skip

_KINDS: tuple[SettingsKind, ...] = ("topics", "subscription_groups", "consumer_offsets")
_FORMS = {
    "separate": "RocksDB (three databases)",
    "single": "RocksDB (config/metadata)",
    "v2": "RocksDB (config/rdb, v2)",
}
_SETTINGS_FILES = frozenset(("topics.json", "subscriptionGroup.json", "consumerOffset.json", "lmqConsumerOffset.json"))
# Names in a store's root that this package reads or writes, and small files of a broker without messages.
_READ = frozenset(
    (
        "commitlog", "consumequeue", "batchconsumequeue", "consumequeue_ext", "index", "config", "checkpoint", "abort", "lock",
        "timerwheel", "timerlog", "tiered_index_file", "epochFileCheckpoint", "brokerIdentity", ".rmqstore-rebuild",
        OPTIONS_FILE,
        *(name.split("/")[0] for name in FOLDERS),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CommitLogDescription:
    """The log: bytes, and the store times of the first and last message (ms since epoch, None without a message)."""

    segments: int
    segment_size: int
    min_offset: int
    max_offset: int
    first_store_timestamp: int | None
    last_store_timestamp: int | None


@dataclass(frozen=True, slots=True)
class QueueDescription:
    """One consume queue: `kind` is RocketMQ's "SimpleCQ" or "BatchCQ"."""

    topic: str
    queue_id: int
    kind: str
    min_queue_offset: int
    max_queue_offset: int
    files: int

    @classmethod
    def of(cls, topic: str, queue_id: int, look: QueueLook) -> QueueDescription:
        """Return the description of a queue from a look at it."""
        return cls(topic, queue_id, look.kind, look.min_queue_offset, look.max_queue_offset, look.files)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, and `messages`, the number of messages in the queue."""
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
        The geometry; values that are not in the files are listed in ``config.assumed``.
    queues : tuple of QueueDescription
        By topic and queue id.
    index_files : tuple of IndexFileDescription
        Oldest first.
    consumer_offsets : dict of (str, str) to dict of int to int
        Next queue offset by (group, topic) and queue id.
    consumer_offsets_error : str or None
        The error if all or some of them cannot be read.
    damaged_files : tuple of (str, str)
        Path and problem of segments, queue files and index files with a wrong length.
    undispatched, unserved, queue_database
        See `MessageStore`.
    layout : dict of str to str
        Places by part, see `store_layout`.
    unseen_queues : tuple of str
        Unreadable folders that may contain queues.
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
        for topic, queue_id, look in _looks(store, dict.fromkeys(store.queues.keys(), ())):
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
    """Return the places of "queues", "index" and "settings" of the store at `root`, without missing parts."""
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
    """Return the files and folders of a store that this package does not read.

    In the root these are logs of DLedger, ``compaction`` and unknown folders; in the folders of log, queues and index everything
    without the name of a segment, topic, queue or file.
    """
    root = os.fspath(root)
    found = []
    for part in unread_parts(root, _is_read):
        if os.path.basename(part.path) == "compaction":
            # Without a compacted topic it contains only positions.
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
    # Snapshots of the wheel end in a number; a rebuild names what it moves aside.
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
        Add ``size``, the bytes of its records in the log; this reads every unit.
    progress : callable, optional
        Called with (queues read, queues in all).

    Raises
    ------
    OSError
        There is no queue of `topic`, and a folder that may contain one cannot be read.
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
"""Group, topic, queue id and queue offset of the progress of a group in a queue."""


def consumer_places(store: MessageStore, group: str | None = None, topic: str | None = None) -> list[Place]:
    """Return the queues of the topics that groups consume, by group, topic and queue id, without reading queues.

    The queue offset is the next to consume, -1 if the group has progress in other queues of the topic only.
    """
    queue_ids: dict[str, list[int]] = {}
    for name, queue_id in store.queues.keys():
        queue_ids.setdefault(name, []).append(queue_id)
    progress = store.consumer_offsets.list()
    return [
        (its_group, its_topic, queue_id, offsets.get(queue_id, -1))
        for its_group, its_topic in sorted(progress)
        if group in (None, its_group) and topic in (None, its_topic)
        for offsets in (progress[its_group, its_topic],)
        for queue_id in sorted({*queue_ids.get(its_topic, ()), *offsets})
    ]


def consumer_columns(
    store: MessageStore, places: Sequence[Place], on_error: Callable[[str, int, Any], object] | None = None
) -> dict[str, Sequence[Any]]:
    """Return columns by name, with a row for each of the `consumer_places`; each queue is read once for all groups.

    ``group``, ``topic``, ``queue_id`` and ``queue_offset`` are those of the place.  ``max_queue_offset`` and ``lag`` are None if
    the queue is missing or unreadable; ``lag`` also if the offset is after the end of the queue.  ``waiting_since`` is the store
    time of the next message, ms since epoch, or None; ``kind`` is that of `progress_kind`. `on_error` is called with topic, queue
    id and error of an unreadable queue; by default a missing permission is a warning, and another error is raised.
    """
    # Imported here because few programs need it.
    from rmqstore.consumer.settings_sources import progress_kind
    from rmqstore.store.stats import Consumers

    there = {*store.queues.keys()}
    asked: dict[tuple[str, int], set[int]] = {}
    for _, topic, queue_id, queue_offset in places:
        if (topic, queue_id) in there:
            asked.setdefault((topic, queue_id), set()).add(queue_offset)
    looks = {(topic, queue_id): look for topic, queue_id, look in _looks(store, asked, on_error)}
    consumers = Consumers(store.queues, store.commit_log)
    found = [
        consumers.end_and_time(topic, queue_id, queue_offset, looks.get((topic, queue_id)))
        for _, topic, queue_id, queue_offset in places
    ]
    ends, times = zip(*found) if places else ((), ())
    groups, topics, queue_ids, queue_offsets = zip(*places) if places else ((), (), (), ())
    kinds = {pair: progress_kind(*pair) for pair in {*zip(groups, topics)}}
    return {
        "group": groups,
        "topic": topics,
        "queue_id": queue_ids,
        "queue_offset": queue_offsets,
        "max_queue_offset": ends,
        "lag": [
            None if end is None or queue_offset > end else end - max(queue_offset, 0)
            for queue_offset, end in zip(queue_offsets, ends)
        ],
        "waiting_since": times,
        "kind": [kinds[pair] for pair in zip(groups, topics)],
    }


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return a dict for each row of columns of the same length."""
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def _looks(
    store: MessageStore,
    asked: Mapping[tuple[str, int], Collection[int]],
    on_error: Callable[[str, int, Any], object] | None = None,
) -> Iterator[tuple[str, int, QueueLook]]:
    # Readable queues, each with the units at these queue offsets.
    report: Callable[[str, int, Any], object] = on_error or store.queues.leave_out
    for (topic, queue_id), offsets in asked.items():
        try:
            look = store.queues.look(topic, queue_id, store.commit_log.min_offset, offsets=offsets)
        except (StoreError, OSError) as error:
            report(topic, queue_id, error)
            continue
        if look is not None:
            yield topic, queue_id, look


def group_sums(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the sums of `consumer_columns` by group.

    The dicts have ``group``, ``topics``, ``queues``, ``lag``, ``unknown`` (queues without a known lag), ``waiting_since`` (the
    oldest) and ``kind`` ("system" for RocketMQ's own, else "").
    """
    from rmqstore.consumer.settings_sources import group_kind

    sums = []
    rows = zip(*(columns[name] for name in ("group", "topic", "lag", "waiting_since")))
    for group, of_group in groupby(rows, itemgetter(0)):
        _, topics, lags, times = zip(*of_group)
        known = [lag for lag in lags if lag is not None]
        sums.append(
            {
                "group": group, "topics": len({*topics}), "queues": len(lags), "lag": sum(known),
                "unknown": len(lags) - len(known),
                "waiting_since": min((time for time in times if time is not None), default=None),
                "kind": group_kind(group),
            }
        )  # fmt: skip
    return sums
