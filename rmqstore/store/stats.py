"""Plain numbers of an open store: how much is in it, how far it reaches, how far its readers and its files are behind.

Every number is in the files or follows from what the store knows, so that nothing is spent on a put or a get.  It changes
nothing, opens no queue that can be read in its files, and reads no more than headers, the ends of queues and one record for each.

A queue is looked at again when its folder changes, or a unit follows its last one.  While the log does not grow, even that is not
read: the log grows before a queue does.  This holds once the newest record is in its queue, the last of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from rmqstore.errors import OffsetOutOfRangeError, StoreError
from rmqstore.index.index_service import IndexService
from rmqstore.store.flushing import Flushing
from rmqstore.store.retention import used_ratio
from rmqstore.store.store_state import StoreState

if TYPE_CHECKING:
    from rmqstore.commitlog.commit_log import CommitLog
    from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
    from rmqstore.consumequeue.queue_look import QueueLook
    from rmqstore.consumequeue.unit_queue import Unit

__all__ = ["ConsumerStats", "Consumers", "DiskStats", "IndexFileStats", "QueueStats", "StoreStats", "take_stats"]

_Progress = Mapping[tuple[str, str], Mapping[int, int]]


class QueueStats(NamedTuple):
    """One consume queue.

    Attributes
    ----------
    topic : str
    queue_id : int
    min_queue_offset, max_queue_offset : int
        Of the first message that the log still holds, and of the next one to come.
    files, size : int
        Files of the queue and of its extension, and their bytes.
    last_store_timestamp : int or None
        Of the newest message, ms since epoch; None where the queue is empty or leads nowhere.
    """

    topic: str
    queue_id: int
    min_queue_offset: int
    max_queue_offset: int
    files: int
    size: int
    last_store_timestamp: int | None

    @property
    def messages(self) -> int:
        """int: messages that are still there."""
        return self.max_queue_offset - self.min_queue_offset


class ConsumerStats(NamedTuple):
    """The progress of one group in one queue.

    Attributes
    ----------
    group, topic : str
    queue_id : int
    queue_offset : int
        What the group consumes next; -1 where it has progress in other queues of the topic only.
    max_queue_offset : int or None
        Of the queue; None where the queue, or every file of it, is gone: nobody knows what it held.
    next_store_timestamp : int or None
        Store time of the message that is next, ms since epoch; None where nothing is left.
    """

    group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_queue_offset: int | None
    next_store_timestamp: int | None

    @property
    def lag(self) -> int | None:
        """int or None: messages that the group has not consumed, as a broker counts them; None where the queue is gone.

        Negative where the group's offset lies beyond the end of the queue.
        """
        return None if self.max_queue_offset is None else self.max_queue_offset - max(self.queue_offset, 0)


@dataclass(frozen=True, slots=True)
class IndexFileStats:
    """One index file; timestamps are ms since epoch."""

    name: str
    entries: int
    max_entries: int
    used_slots: int
    slots: int
    begin_timestamp: int
    end_timestamp: int
    size: int


@dataclass(frozen=True, slots=True)
class DiskStats:
    """The disk below the store: bytes, and the used part of it (0 to 1, -1 if unknown) as RocketMQ computes it.

    `usable` is what of `free` is not kept for root.
    """

    total: int
    free: int
    usable: int
    used_ratio: float


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What `MessageStore.stats` says.

    Attributes
    ----------
    path : str
    timestamp : int
        When this was taken, ms since epoch.
    clean : bool
        There is no ``abort`` file: nobody writes, and the last who did closed the store in order.
    writable, disk_full : bool
        Of the `MessageStore` that was asked.
    min_phy_offset, max_phy_offset : int
        Bounds of the log in bytes.
    segments, segment_size : int
        Files of the log, and bytes of each.
    first_store_timestamp, last_store_timestamp : int or None
        Of the oldest message (None where no record begins the log) and of the newest, ms since epoch.
    dispatched_phy_offset : int
        After the last record that a queue leads to; what lies between this and `max_phy_offset` is in no queue.
    unflushed_size : int or None
        Bytes of the log that are perhaps not on the disk yet; None for a store that is not open for writing.
    checkpoint : dict of str to int
        The checkpoint's six fields by name.
    queues : tuple of QueueStats
        By topic and queue id.
    index_files : tuple of IndexFileStats
        Oldest first.
    consumers : tuple of ConsumerStats
        By group, topic and queue id.
    disk : DiskStats
    files : dict of str to int
        Files of the parts ``commitlog``, ``consumequeue`` and ``index``.
    sizes : dict of str to int
        Bytes of the same parts; files have their whole size, although a file system may keep the unused rest as a hole.
    consumer_offsets_error : str or None
        Why the progress of consumer groups cannot be read; `consumers` is empty then, which says nothing.
    damaged_files : int
        How many files and folders are damaged, or cannot be read: `MessageStore.damaged_files` names them, and
        `consumer_offsets_error` one more.
    unread_queues : tuple of (str, int)
        Topic and queue id of the queues that `queues` lacks because they cannot be read.
    unseen_folders : tuple of str
        Folders that cannot be looked into, so that `queues` may lack those in them.
    """

    path: str
    timestamp: int
    clean: bool
    writable: bool
    disk_full: bool
    min_phy_offset: int
    max_phy_offset: int
    segments: int
    segment_size: int
    first_store_timestamp: int | None
    last_store_timestamp: int | None
    dispatched_phy_offset: int
    unflushed_size: int | None
    checkpoint: dict[str, int]
    queues: tuple[QueueStats, ...]
    index_files: tuple[IndexFileStats, ...]
    consumers: tuple[ConsumerStats, ...]
    disk: DiskStats
    files: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    consumer_offsets_error: str | None = None
    damaged_files: int = 0
    unread_queues: tuple[tuple[str, int], ...] = ()
    unseen_folders: tuple[str, ...] = ()


def take_stats(state: StoreState, flushing: Flushing) -> StoreStats:
    """Read the numbers of an open store, see `MessageStore.stats`."""
    # Of each queue the newest record is read, wherever in the log it is.
    with state.commit_log.single_records() if state.read_only else contextlib.nullcontext():
        stats = _numbers(state, flushing)
    # Known when all queues were looked at.
    problems = state.damaged_files()
    damaged = len(problems)
    config = os.path.join(state.path, "config")
    # Where the folder cannot be read, that was counted.
    if stats.consumer_offsets_error is not None and not any((each.path or "").startswith(config) for each in problems):
        damaged += 1
    return dataclasses.replace(stats, damaged_files=damaged)


def _numbers(state: StoreState, flushing: Flushing) -> StoreStats:
    commit_log, own = state.commit_log, not state.read_only
    low, high = commit_log.min_offset, commit_log.max_offset
    checkpoint, (progress, progress_error) = state.checkpoint_now(), state.progress.list()
    undispatched = state.undispatched.served or state.undispatched.left_out
    # Until the newest record is in its queue, queues grow while the log does not.
    is_settled = undispatched is None and state.queues.dispatched_end(commit_log) == high
    known = state.known_numbers
    if known is None or known.low != low:
        known = KnownNumbers(low, -1, {}, {})
    queues = _queues(state, known.queues, progress, grown=known.high != high or not is_settled)
    queue_stats = [queue.stats for queue in queues.found.values()]
    pairs = _pairs(state, queues.found, progress, {} if queues.unread else known.pairs, queues.known_topics)
    state.known_numbers = KnownNumbers(low, high if is_settled else -1, queues.found, pairs)
    index_files = [] if state.index_service is None else _index_files(state.index_service)
    first = commit_log.store_timestamp_at(low)
    return StoreStats(
        path=state.path,
        timestamp=state.config.clock(),
        clean=not os.path.exists(os.path.join(state.path, "abort")),
        writable=own and state.poison is None,
        disk_full=state.disk_full,
        min_phy_offset=low,
        max_phy_offset=high,
        segments=len(commit_log.files),
        segment_size=commit_log.segment_size,
        first_store_timestamp=first if first >= 0 else None,
        last_store_timestamp=_newest(state, queue_stats),
        dispatched_phy_offset=queues.dispatched if undispatched is None else min(queues.dispatched, undispatched[0]),
        unflushed_size=max(high - max(flushing.flushed_where, low), 0) if own else None,
        checkpoint=checkpoint.as_dict(),
        queues=tuple(queue_stats),
        index_files=tuple(index_files),
        consumers=tuple(chain.from_iterable(pair.consumers for pair in pairs.values())),
        disk=_disk(state.path),
        files={
            "commitlog": len(commit_log.files),
            "consumequeue": sum(each.files for each in queue_stats),
            "index": len(index_files),
        },
        sizes={
            "commitlog": len(commit_log.files) * commit_log.segment_size,
            "consumequeue": sum(each.size for each in queue_stats),
            "index": sum(each.size for each in index_files),
        },
        consumer_offsets_error=progress_error,
        unread_queues=tuple(queues.unread),
        unseen_folders=tuple(sorted(state.queues.unseen)),
    )


class _Queue(NamedTuple):
    # Numbers of one queue, and its folder's inode and time of change.
    stats: QueueStats
    look: QueueLook
    folder: tuple[int, int] | None


class _Pair(NamedTuple):
    # Numbers of a group in a topic, and the offsets that they are of.
    offsets: Mapping[int, int]
    consumers: list[ConsumerStats]


class KnownNumbers(NamedTuple):
    """Numbers of queues and groups as of a log with these bounds; `high` is -1 while a record may not be in its queue."""

    low: int
    high: int
    queues: dict[tuple[str, int], _Queue]
    pairs: dict[tuple[str, str], _Pair]


class _Queues(NamedTuple):
    # Numbers of all queues, topics of which all numbers were known, which queues could not be read, and where the newest record
    # that one points to ends.
    found: dict[tuple[str, int], _Queue]
    known_topics: set[str]
    unread: list[tuple[str, int]]
    dispatched: int


def _queues(
    state: StoreState, known: Mapping[tuple[str, int], _Queue], progress: _Progress, *, grown: bool
) -> _Queues:
    low, high = state.commit_log.min_offset, state.commit_log.max_offset
    of_topic: dict[str, list[Mapping[int, int]]] = {}
    for (_, topic), offsets in progress.items():
        of_topic.setdefault(topic, []).append(offsets)
    found, unread, dispatched = {}, [], low
    keys = state.queues.keys()
    changed = {topic for topic, _ in known.keys() - keys}
    for topic, queue_id in keys:
        folder = state.queues.folder_mark(topic, queue_id)
        queue = known.get((topic, queue_id))
        if (
            queue is None
            or folder is None
            or queue.folder != folder
            or queue.look.end > high
            or (grown and not state.queues.ends_as(topic, queue_id, queue.look))
        ):
            changed.add(topic)
            try:
                places = {offsets.get(queue_id, -1) for offsets in of_topic.get(topic, ())}
                queue = _look(state, topic, queue_id, folder, places)
            except OSError as error:
                state.queues.leave_out(topic, queue_id, error)
                unread.append((topic, queue_id))
                continue
            if queue is None:
                continue
        dispatched = max(dispatched, min(queue.look.end, high))
        found[topic, queue_id] = queue
    return _Queues(found, {topic for topic, _ in keys} - changed, unread, dispatched)


def _look(
    state: StoreState, topic: str, queue_id: int, folder: tuple[int, int] | None, offsets: set[int]
) -> _Queue | None:
    look = state.queues.look(topic, queue_id, state.commit_log.min_offset, offsets=offsets)
    if look is None:
        return None
    stats = QueueStats(
        topic,
        queue_id,
        look.min_queue_offset,
        look.max_queue_offset,
        look.files + look.ext_files,
        look.size + look.ext_size,
        _time_of(state.commit_log, look.last),
    )
    return _Queue(stats, look, folder)


def _time_of(commit_log: CommitLog, unit: Unit | None) -> int | None:
    time = -1 if unit is None else commit_log.store_timestamp_at(unit.phy_offset)
    return time if time >= 0 else None


def _newest(state: StoreState, queue_stats: list[QueueStats]) -> int | None:
    # The store time of the newest message.
    times = [each.last_store_timestamp for each in queue_stats if each.last_store_timestamp is not None]
    if not state.read_only and state.last_store_timestamp:
        times.append(state.last_store_timestamp)
    return max(times) if times else state.commit_log.last_store_timestamp()


def _index_files(index_service: IndexService) -> list[IndexFileStats]:
    result = []
    for name in index_service.names:
        try:
            index = index_service.file(name)
            header = index.header
        except (OffsetOutOfRangeError, FileNotFoundError):
            continue  # It expired meanwhile.
        result.append(
            IndexFileStats(
                name,
                max(header.index_count - 1, 0),
                index.index_num - 1,
                max(header.hash_slot_count, 0),
                index_service.config.max_hash_slot_num,
                header.begin_timestamp,
                header.end_timestamp,
                index_service.config.index_file_size,
            )
        )
    return result


def _pairs(
    state: StoreState,
    queues: Mapping[tuple[str, int], _Queue],
    progress: _Progress,
    known: Mapping[tuple[str, str], _Pair],
    known_topics: set[str],
) -> dict[tuple[str, str], _Pair]:
    kept = {
        pair: found
        for pair, found in known.items()
        if pair[1] in known_topics and progress.get(pair) == found.offsets
    }
    if len(kept) == len(progress):
        return kept
    of_topic: dict[str, dict[int, QueueLook]] = {}
    for (topic, queue_id), queue in queues.items():
        of_topic.setdefault(topic, {})[queue_id] = queue.look
    pairs = {}
    consumers = Consumers(state.queues, state.commit_log)
    for group, topic in sorted(progress):
        pair = kept.get((group, topic))
        if pair is None:
            # Also where the group has no offset, as a broker counts.
            offsets, looks, found = progress[group, topic], of_topic.get(topic, {}), []
            for queue_id in sorted({*looks, *offsets}):
                offset = offsets.get(queue_id, -1)
                end, time = consumers.end_and_time(topic, queue_id, offset, looks.get(queue_id))
                found.append(ConsumerStats(group, topic, queue_id, offset, end, time))
            pair = _Pair(offsets, found)
        pairs[group, topic] = pair
    return pairs


class Consumers:
    """Work out the progress of groups; a message is read once for all groups that are at it."""

    def __init__(self, queues: ConsumeQueueStore, commit_log: CommitLog):
        self._queues, self._commit_log = queues, commit_log
        self._times: dict[tuple[str, int, int], int | None] = {}

    def end_and_time(
        self, topic: str, queue_id: int, queue_offset: int, look: QueueLook | None
    ) -> tuple[int | None, int | None]:
        """Return `max_queue_offset` and `next_store_timestamp` of `ConsumerStats`; `look` is None if the queue cannot be read.

        The look should have the unit at this queue offset.
        """
        if look is None or (queue_offset > 0 and not look.files and not look.max_queue_offset):
            # Of a queue whose folder is all that is left, the end is not known.
            return None, None
        # A broker skips what is gone.
        low, end = look.min_queue_offset, look.max_queue_offset
        place = topic, queue_id, queue_offset if queue_offset > low else low
        if place[2] >= end:
            return end, None
        if place not in self._times:
            self._times[place] = self._time(place, look)
        return end, self._times[place]

    def _time(self, place: tuple[str, int, int], look: QueueLook) -> int | None:
        last, number = look.last, place[2]
        with contextlib.suppress(StoreError, OSError):
            if last is not None and last.queue_offset == number:
                return _time_of(self._commit_log, last)
            return _time_of(self._commit_log, look.units[number] if number in look.units else self._queues.unit(*place))
        return None


def _disk(path: str) -> DiskStats:
    try:
        status = os.statvfs(path)
    except OSError:
        return DiskStats(0, 0, 0, -1.0)
    size = status.f_frsize
    return DiskStats(status.f_blocks * size, status.f_bfree * size, status.f_bavail * size, used_ratio(path))
