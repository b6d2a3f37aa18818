"""Dispatching: from records in the commit log to queue units and index entries.

It writes the units and entries that `dispatch_rules` derives from a record.  It is idempotent: existing units are compared and,
where they differ, repaired.  It never appends to the log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rmqstore import _numpy as np
from rmqstore._core import RecordLayout, Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore._rows import FileEnd, settle
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.log_walk import Stretch
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import can_name_queue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import CorruptionError
from rmqstore.index.index_service import IndexService
from rmqstore.store.dispatch_rules import (
    DeletedTopics,
    QueueEnds,
    QueueLife,
    further_places,
    last_beginning,
    life_of,
    unit_rows,
)

__all__ = ["CommitLogDispatcher", "DispatchCounts", "IndexProgress", "LogDispatcher", "QueueGapError", "QueueKindError"]

logger = logging.getLogger(__name__)

_SMALLEST_RECORD = int(RecordLayout.RECORD_FIXED_SIZE)
# A unit of a batch queue has 16 bits for the number of its messages.
_LARGEST_BATCH = 0x7FFF
_WRONG_CRC = (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC)


class QueueGapError(CorruptionError):
    """A record's queue offset lies beyond the end of its queue: earlier records of the queue were not dispatched."""


class QueueKindError(CorruptionError):
    """A topic that has simple queues holds inner batches, which only batch queues can hold."""

    def __init__(self, message: str, path: str, topic: str):
        super().__init__(message, path)
        self.topic = topic


@dataclass(slots=True)
class IndexProgress:
    """The end of the index: it has all entries below `phy_offset`, and the first `entry_num` of the record there."""

    phy_offset: int = -1
    entry_num: int = 0

    @classmethod
    def of(cls, index_service: IndexService) -> IndexProgress:
        """Find the end by the newest entries."""
        progress = cls()
        for index in index_service.files():
            count = min(index.index_count, index.index_num)
            if count <= 1:
                continue
            if progress.phy_offset < 0:
                progress.phy_offset = index.read_entry(count - 1)[1]
            num = index.tail_num(progress.phy_offset)
            progress.entry_num += num
            if num < count - 1:
                break
        return progress


@dataclass(slots=True)
class DispatchCounts:
    """The numbers of a dispatch; `first` is the lowest phy offset of a record that got a unit.

    `misplaced` are records with an impossible value: phy offset, size, and kind.  With "BAD_QUEUE_OFFSET" and "BAD_TOPIC" the
    record has no unit; with "BAD_INNER_NUM" an inner batch counts as one message; with "BAD_MULTI_DISPATCH" a further queue or
    its queue offset is impossible.  `gone` counts by topic the records of topics and queues that were deleted.
    """

    records: int = 0
    units: int = 0
    units_mended: int = 0
    index_entries: int = 0
    first: int | None = None
    misplaced: list[tuple[int, int, str]] = field(default_factory=list)
    gone: dict[str, int] = field(default_factory=dict)

    def put(self, units: int, phy_offset: int) -> None:
        """Count units of records that begin with the one at `phy_offset`."""
        self.units += units
        if units and (self.first is None or phy_offset < self.first):
            self.first = phy_offset


class CommitLogDispatcher:
    """Writes units and index entries for records of the log.

    With `allow_gaps`, missing units become pre-fill units instead of a `QueueGapError`; with `repair`, units that differ from
    their records are rewritten.
    """

    allow_gaps = False
    repair = False

    def __init__(self, commit_log: CommitLog, queues: ConsumeQueueStore | None, index_service: IndexService | None):
        self.commit_log = commit_log
        self.queues = queues
        self.index_service = index_service
        self.progress = IndexProgress()
        # In simple queues a record with a batch's flag gets a simple unit, as in RocketMQ.  A rebuild, which does not know the
        # kind beforehand, needs an error instead.
        self.refuse_mixed_topics = False
        # If set, simple queues other than these get no units, except as further queues.
        self.only: frozenset[tuple[str, int]] | None = None
        self.counts = DispatchCounts()
        self._ends = QueueEnds()

    def dispatch_columns(self, columns: RecordColumns) -> None:
        """Dispatch the records in `columns`."""
        if columns.count == 0:
            return
        if self.queues is not None:
            self._dispatch_units(columns)
        if self.index_service is not None:
            self._dispatch_entries(columns)
        self.counts.records += columns.count

    def dispatch_stretch(self, stretch: Stretch, columns: RecordColumns) -> None:
        """Dispatch the records of a stretch of the log, also one whose CRC fails: it keeps its place, and readers mark it."""
        if stretch.verdict is Verdict.RECORD:
            self.dispatch_columns(columns)
        elif stretch.verdict in _WRONG_CRC:
            damaged = RecordColumns(1, columns.topics)
            for _ in self.commit_log.stretches(stretch.begin, stretch.end, damaged, check_crc=False):
                self.dispatch_columns(damaged)

    # -------------------------------------------------------------------------------------------------------- queues

    def _dispatch_units(self, columns: RecordColumns) -> None:
        assert self.queues is not None
        topics, keys = self._ends.names(columns.topics)
        # The core takes whole columns: NumPy releases the GIL in nearly every call, and a writer next to a busy thread gets it
        # back only milliseconds later.
        simple, odd = columns.queued()
        if odd or self.queues.batch_topics:
            simple = self._dispatch_odd(columns, topics, keys)
        left, written, phy_offset = settle(columns, simple, True)
        self.counts.put(written, phy_offset)
        if not left:
            return
        groups, order = columns.by_queue(simple)
        for number, start, end in groups:
            key, rows = keys[number], order[start:end]
            if self.only is not None and key not in self.only:
                continue
            queue = self._queue_for(columns, key, rows)
            if queue is not None:
                self._put_rows(queue, columns, rows)
                self._ends.set(columns.topics, number, self._file_end(queue, int(columns.queue_offset[rows[-1]]) + 1))

    def _file_end(self, queue: AnyConsumeQueue, queue_offset: int) -> FileEnd | None:
        # The file in which the core continues with the records of a queue.
        return queue.file_end(queue_offset)

    def _queue_for(self, columns: RecordColumns, key: tuple[str, int], rows: np.ndarray) -> AnyConsumeQueue | None:
        # None if the topic, which no CRC protects, cannot name a queue.
        assert self.queues is not None
        topic, queue_id = key
        if can_name_queue(topic):
            return self.queues.find_or_create(topic, queue_id)
        for row in rows.tolist():
            what = f"is of topic {topic[:80]!r}, which cannot name a queue's directory; it gets no unit"
            self._misplaced(columns, row, "BAD_TOPIC", what)
        return None

    def _dispatch_odd(self, columns: RecordColumns, topics: list[str], keys: list[tuple[str, int]]) -> np.ndarray:
        # Dispatches inner batches and further queues; returns the mask of the records for simple queues.
        assert self.queues is not None
        n = columns.count
        queued, batches, bad_batches, further = unit_rows(columns)
        for row in bad_batches.tolist():
            self._misplaced(columns, row, "BAD_INNER_NUM", "is an inner batch without a number of messages that can be")
        for number in set(columns.topic[:n][batches].tolist()):
            if not self.queues.add_batch_topic(topics[number]) and self.refuse_mixed_topics:
                raise QueueKindError(
                    f"topic {topics[number]!r} has simple queues, but the log holds inner batches of it; its queue.type "
                    "changed: rebuild the queues with the topic in config/topics.json",
                    self.commit_log.path,
                    topics[number],
                )
        batch_topics = np.array([self.queues.is_batch_topic(topic) for topic in topics], bool)
        if batch_topics.any():
            batched = queued & batch_topics[columns.topic[:n]]
            groups, order = columns.by_queue(batched.view(np.uint8))
            for number, start, end in groups:
                queue = self._queue_for(columns, keys[number], order[start:end])
                if queue is None:
                    continue
                for row in self._plausible(
                    queue, columns, order[start:end], columns.inner_base, _LARGEST_BATCH
                ).tolist():
                    self._dispatch_batch_unit(queue, columns, row)
            simple = queued & ~batched
        else:
            simple = queued
        for row in further.tolist():
            self._dispatch_multi(columns, row)
        as_bytes: np.ndarray = simple.view(np.uint8)
        return as_bytes

    def _put_rows(self, queue: AnyConsumeQueue, columns: RecordColumns, rows: np.ndarray) -> None:
        assert isinstance(queue, ConsumeQueue)
        if self._follow(queue, columns, rows) and columns.run_length(rows) == len(rows):
            # The usual case: nothing is damaged.
            self._put_run(queue, columns, rows)
            return
        if queue.agrees(columns, rows):
            return
        rows = self._plausible(queue, columns, rows, columns.queue_offset)
        # A run is a row of offsets that rise by one.
        done = 0
        while done < len(rows):
            run = columns.run_length(rows[done:])
            self._put_run(queue, columns, rows[done : done + run])
            done += run

    def _follow(self, queue: ConsumeQueue, columns: RecordColumns, rows: np.ndarray) -> bool:
        # True if the rows begin within the queue or at its end.
        return 0 <= int(columns.queue_offset[rows[0]]) <= queue.unit_num

    def _plausible(
        self,
        queue: AnyConsumeQueue,
        columns: RecordColumns,
        rows: np.ndarray,
        queue_offsets: np.ndarray,
        largest_batch: int = 1,
    ) -> np.ndarray:
        # No CRC protects a record's queue offset, and a queue would be filled up to a wrong one.  It is damaged if it is
        # above a later record's, if the log before it has no room for as many records, or if it is not above the one
        # before it while the next one is.
        offsets = queue_offsets[rows]
        bad = offsets < 0
        if len(rows) > 1 and (offsets[1:] <= offsets[:-1]).any():
            bad[1:-1] |= (offsets[1:-1] <= offsets[:-2]) & (offsets[2:] > offsets[:-2])
            lowest_behind = np.minimum.accumulate(np.where(bad, np.iinfo(np.int64).max, offsets)[::-1])[::-1]
            bad[:-1] |= offsets[:-1] > lowest_behind[1:]
        last = queue.last_record()
        number, phy_offset = (0, 0) if last is None else (queue.max_queue_offset, last.phy_offset)
        room = (columns.phy_offset[rows] - phy_offset) // _SMALLEST_RECORD + 1
        bad |= offsets > number + np.maximum(room, 0) * largest_batch
        if not bad.any():
            return rows
        for row in rows[bad].tolist():
            what = f"says queue offset {queue_offsets[row]} of {queue.topic}/{queue.queue_id}, which cannot be; it gets no unit"
            self._misplaced(columns, row, "BAD_QUEUE_OFFSET", what)
        good: np.ndarray = rows[~bad]
        return good

    def _misplaced(self, columns: RecordColumns, row: int, kind: str, what: str) -> None:
        phy_offset = int(columns.phy_offset[row])
        logger.warning("the record at phy offset %d %s", phy_offset, what)
        self.counts.misplaced.append((phy_offset, int(columns.size[row]), kind))

    def _put_run(self, queue: ConsumeQueue, columns: RecordColumns, rows: np.ndarray) -> None:
        queue_offset = int(columns.queue_offset[rows[0]])
        phy_offsets, sizes, tags_codes, store_timestamps = columns.units(rows)
        if queue_offset > queue.unit_num and not self.allow_gaps:
            raise QueueGapError(
                f"the record at phy offset {phy_offsets[0]} is number {queue_offset} of {queue.topic}/{queue.queue_id}, "
                f"which has units up to {queue.unit_num}",
                queue.files.path,
            )
        there = min(max(queue.unit_num - queue_offset, 0), len(rows))
        if self.repair and there:
            self._repair_units(queue, queue_offset, columns, rows[:there])
        if there < len(rows):
            units = queue.put_units(queue_offset, phy_offsets, sizes, tags_codes, store_timestamps)
            self.counts.put(units, int(phy_offsets[there]))

    def _repair_units(self, queue: ConsumeQueue, queue_offset: int, columns: RecordColumns, rows: np.ndarray) -> None:
        done = 0
        while done < len(rows):
            number = queue_offset + done
            phy, size, _ = queue.units(number, len(rows) - done)
            count = len(phy)
            if not count:
                # These expired with the queue's older files.
                done += 1
                continue
            part = rows[done : done + count]
            differ = (phy != columns.phy_offset[part]) | (size != columns.size[part])
            differ[queue.differing_tags(number, columns, part)] = True
            for i in np.flatnonzero(differ).tolist():
                row = part[i]
                # The unit of another whole record with the same queue offset stays, as in a broker.
                other = self.commit_log.look_up(int(phy[i]), int(size[i]))
                if other is not None and other.queue_offset == number + i and other.topic == queue.topic:
                    if int(phy[i]) != int(columns.phy_offset[row]):
                        continue
                unit = Unit(
                    number + i, int(columns.phy_offset[row]), int(columns.size[row]), int(columns.tags_code[row])
                )
                self.counts.units_mended += queue.repair(unit, int(columns.store_timestamp[row]))
            done += count

    def _dispatch_batch_unit(self, queue: AnyConsumeQueue, columns: RecordColumns, row: int) -> None:
        base, phy_offset, num = int(columns.inner_base[row]), int(columns.phy_offset[row]), int(columns.inner_num[row])
        unit = Unit(base, phy_offset, int(columns.size[row]), int(columns.tags_code[row]), max(num, 1))
        store_timestamp = int(columns.store_timestamp[row])
        if self.repair:
            self.counts.units_mended += queue.repair(unit, store_timestamp)
        end = queue.max_queue_offset
        if base > end and not self.allow_gaps:
            raise QueueGapError(
                f"the record at phy offset {phy_offset} is batch {base} of {queue.topic}/{queue.queue_id}, which has "
                f"messages up to {end}",
                queue.files.path,
            )
        self.counts.put(queue.put(unit, store_timestamp), phy_offset)

    def _dispatch_multi(self, columns: RecordColumns, row: int) -> None:
        # Dispatches a record to the further queues that it names (RocketMQ's LMQ).
        assert self.queues is not None
        phy_offset, size = int(columns.phy_offset[row]), int(columns.size[row])
        tags_code = int(columns.tags_code[row])
        message = self.commit_log.look_up(phy_offset)
        if message is None:
            return
        places, problem = further_places(message, self.queues.config)
        for name, number in places:
            queue = self.queues.find_or_create(name, 0)
            if not isinstance(queue, ConsumeQueue):
                continue
            unit = Unit(number, phy_offset, size, tags_code)
            last = queue.last_record()
            before = 0 if last is None else last.phy_offset
            if number > queue.unit_num + max((phy_offset - before) // _SMALLEST_RECORD + 1, 0):
                # As in `_plausible`.
                problem = f"says queue offset {number} of {name}/0, which cannot be"
            elif self.repair and number < queue.unit_num:
                self.counts.units_mended += queue.repair(unit, message.store_timestamp)
            else:
                units = queue.put(unit, message.store_timestamp, extended=False)
                self.counts.put(units, phy_offset)
        if problem is not None:
            logger.warning("the record at phy offset %d %s; it gets no unit there", phy_offset, problem)
            self.counts.misplaced.append((phy_offset, size, "BAD_MULTI_DISPATCH"))

    # --------------------------------------------------------------------------------------------------------- index

    def _dispatch_entries(self, columns: RecordColumns) -> None:
        assert self.index_service is not None
        progress = self.progress
        n = columns.count
        starts = columns.key_start[: n + 1]
        first = 0
        if progress.phy_offset >= columns.phy_offset[0]:
            first = int(np.searchsorted(columns.phy_offset[:n], progress.phy_offset, side="left"))
        begin, end = int(starts[first]) if first < n else int(starts[n]), int(starts[n])
        if first < n and int(columns.phy_offset[first]) == progress.phy_offset:
            begin = min(begin + progress.entry_num, int(starts[first + 1]))
        if begin >= end:
            if int(columns.phy_offset[n - 1]) > progress.phy_offset:
                self.index_service.current()
            return
        phy_offsets, store_timestamps = columns.key_records(begin, end)
        self.index_service.put_hashes(columns.key_hash[begin:end], phy_offsets, store_timestamps)
        self.counts.index_entries += end - begin
        if starts[n - 1] == starts[n]:
            # RocketMQ (5.5.0) rolls a full file for the next record even if that has no keys.
            self.index_service.current()


class LogDispatcher(CommitLogDispatcher):
    """Writes units and index entries for the records of a log, of which some may be of deleted topics.

    Queues may lack records that the log no longer has, so gaps are allowed.  Call `finish` after the last record.
    """

    allow_gaps = True

    def __init__(
        self, root: str, commit_log: CommitLog, queues: ConsumeQueueStore | None, index_service: IndexService | None
    ):
        super().__init__(commit_log, queues, index_service)
        self.deleted = DeletedTopics(root)
        # By topic the phy offset of the last record of a queue that began again later.
        self.deleted_after: dict[str, int] = {}
        # By queue the phy offset before the last record seen, from which the queue may have begun again.
        self._unsure: dict[tuple[str, int], int] = {}
        # The queues that `finish` dropped.
        self.dropped: set[tuple[str, int]] = set()
        # By queue whether it had no unit before.
        self._is_new: dict[tuple[str, int], bool] = {}
        self._lives: dict[tuple[str, int], QueueLife] = {}
        # By queue the phy offset up to which `counts.gone` includes its records; the log may be dispatched twice.
        self._counted: dict[tuple[str, int], int] = {}

    def finish(self) -> None:
        """Drop queues that this dispatcher created of a topic that was deleted after their last record."""
        assert self.queues is not None or not self._is_new
        for (topic, queue_id), is_new in self._is_new.items():
            queue = None if self.queues is None or not is_new else self.queues.find(topic, queue_id)
            first = None if queue is None else queue.first_record()
            if first is None or first.phy_offset > self.deleted_after.get(topic, -1):
                continue
            assert queue is not None and self.queues is not None
            self._begin_again(queue)
            self.queues.forget(topic, queue_id)
            self.dropped.add((topic, queue_id))

    def _queue_for(self, columns: RecordColumns, key: tuple[str, int], rows: np.ndarray) -> AnyConsumeQueue | None:
        if self.deleted.is_deleted(key[0]):
            self._leave_out(key, columns.phy_offset[rows])
            return None
        queue = super()._queue_for(columns, key, rows)
        if queue is not None and key not in self._is_new:
            self._is_new[key] = queue.last_record() is None
        before = self._unsure.pop(key, None)
        if before is not None and int(columns.queue_offset[rows[0]]) > 0:
            self._note_deletion(key[0], before)
        return queue

    def _follow(self, queue: ConsumeQueue, columns: RecordColumns, rows: np.ndarray) -> bool:
        # Rows that overlap the queue may be of a deleted one.
        last = queue.last_record()
        row = int(rows[0])
        return int(columns.queue_offset[row]) == queue.unit_num and (
            last is None or last.phy_offset < columns.phy_offset[row]
        )

    def _plausible(
        self,
        queue: AnyConsumeQueue,
        columns: RecordColumns,
        rows: np.ndarray,
        queue_offsets: np.ndarray,
        largest_batch: int = 1,
    ) -> np.ndarray:
        # Only rows of the queue that exists now, or that begins among them.
        nums = np.ones(len(rows), np.int64) if largest_batch == 1 else np.maximum(columns.inner_num[rows], 1)
        key = queue.topic, queue.queue_id
        life = self._life(queue)
        if life is not None:
            earlier = life.earlier(queue_offsets[rows], columns.phy_offset[rows])
            if earlier.any():
                self._leave_out(key, columns.phy_offset[rows[earlier]])
                self._note_deletion(key[0], int(columns.phy_offset[rows[earlier]][-1]))
                rows, nums = rows[~earlier], nums[~earlier]
        if not len(rows):
            return rows
        end, last_phy_offset = self._end(queue)
        goes_on = last_phy_offset < columns.phy_offset[rows[0]]
        begins = last_beginning(queue_offsets[rows], nums, end if goes_on else 0, alone=self._is_new.get(key, False))
        if begins < 0:
            return super()._plausible(queue, columns, rows, queue_offsets, largest_batch)
        before = int(columns.phy_offset[rows[begins - 1]]) if begins else last_phy_offset
        self._leave_out(key, columns.phy_offset[rows[:begins]])
        if max(end if goes_on else 0, begins) > 1:
            # One record may have 0 by damage: alone it proves nothing about other queues of the topic.
            if begins + 1 < len(rows):
                self._note_deletion(key[0], before)
            else:
                self._unsure[key] = before
        if last_phy_offset < columns.phy_offset[rows[begins]]:
            self._begin_again(queue)
        return super()._plausible(queue, columns, rows[begins:], queue_offsets, largest_batch)

    def _file_end(self, queue: AnyConsumeQueue, queue_offset: int) -> FileEnd | None:
        # The following records show whether the queue began again.
        unsure = (queue.topic, queue.queue_id) in self._unsure
        return super()._file_end(queue, -1 if unsure else queue_offset)

    def _life(self, queue: AnyConsumeQueue) -> QueueLife | None:
        key = queue.topic, queue.queue_id
        life = self._lives.get(key)
        first = queue.first_record() if life is None else None
        if first is not None:
            life = life_of(self.commit_log, *key, first.queue_offset, first.phy_offset)
            if life is not None:
                self._lives[key] = life
        return life

    def _end(self, queue: AnyConsumeQueue) -> tuple[int, int]:
        # The queue offset after the last unit, and its phy offset.
        last = queue.last_record()
        return (0, -1) if last is None else (queue.max_queue_offset, last.phy_offset)

    def _begin_again(self, queue: AnyConsumeQueue) -> None:
        key = queue.topic, queue.queue_id
        last = queue.last_record()
        dropped = queue.begin_again()
        if last is not None:
            self._counted[key] = max(self._counted.get(key, -1), last.phy_offset)
        self.counts.gone[key[0]] = self.counts.gone.get(key[0], 0) + dropped
        if self._is_new[key]:
            self.counts.units -= dropped
        self._lives.pop(key, None)

    def _leave_out(self, key: tuple[str, int], phy_offsets: np.ndarray) -> None:
        if not len(phy_offsets):
            return
        topic, last = key[0], int(phy_offsets[-1])
        num = int((phy_offsets > self._counted.get(key, -1)).sum())
        self.counts.gone[topic] = self.counts.gone.get(topic, 0) + num
        self._counted[key] = max(self._counted.get(key, -1), last)

    def _note_deletion(self, topic: str, phy_offset: int) -> None:
        self.deleted_after[topic] = max(self.deleted_after.get(topic, -1), phy_offset)
