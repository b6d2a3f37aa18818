"""Complete queues in RocksDB from the log, for readers.

A broker writes no log of this database and flushes it rarely, so next to a running one it may lack everything.  These parts of
the commit log are scanned: from the database's checkpoint to the log's end, and on as the log grows; where the first or last
record of a segment has no unit; where queue offsets have gaps; all of it if the database is damaged.  Nothing is written (I7).
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator

from rmqstore import _numpy as np
from rmqstore._core import Verdict, check_record
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.consumequeue.database_queues import CollectedQueues, DatabaseQueues, UnitStream
from rmqstore.consumequeue.queue_folders import can_name_queue
from rmqstore.errors import CorruptionError
from rmqstore.files.os_errors import is_unreadable
from rmqstore.message import MessageExt, is_queued
from rmqstore.rocksdb.database import closed_folder
from rmqstore.rocksdb.queues import QueueDatabase
from rmqstore.spans import joined, without
from rmqstore.store.dispatch_rules import DeletedTopics, QueueLife, database_life
from rmqstore.store.dispatcher import LogDispatcher
from rmqstore.store.recovery import learn_delays

__all__ = ["Completion", "QueueDatabaseState"]

logger = logging.getLogger(__name__)

# The records at either end of a segment that are looked up, to find one whose unit shows if the database has those around it.
_RECORDS_ASKED = 64
# The bytes searched for the last records, at first and at most: the blank at the end is as long as a record at most.
_FIRST_LOOK, _LOOK_BACK = 1 << 16, 1 << 24
# The first bytes of both magics of a record.
_MAGIC = b"\xda\xa3\x20"


@dataclasses.dataclass(frozen=True, slots=True)
class QueueDatabaseState:
    """The queues in RocksDB of a store, and the parts of them that came from the log.

    Attributes
    ----------
    path : str
        The directory of the database.
    queues : int
        The number of queues that have units there.
    checkpoint : int or None
        Phy offset up to which records are in it; None if nothing was flushed yet.  Later units come from the log
        (`MessageStore.undispatched`).
    completed : tuple of (int, int)
        Phy offsets, begin and end, of the ranges scanned before the checkpoint: units there were lost, or are damaged.
    damage : tuple of str
        A text for each part of the database that cannot be read.
    """

    path: str
    queues: int
    checkpoint: int | None
    completed: tuple[tuple[int, int], ...]
    damage: tuple[str, ...]


class Completion:
    """The queues in RocksDB of one store that is only read, and the parts of the log that were scanned for them.

    `served` is the part after the database's checkpoint; `ranges` are others, where units were missing.
    """

    def __init__(self, folders: tuple[str, ...], root: str, commit_log: CommitLog, queues: ConsumeQueueStore):
        folder = folders[0]
        if len(folders) > 1:
            logger.warning("%s and %s both have queues in RocksDB; the second is not read", *folders[:2])
        self.commit_log, self.queues = commit_log, queues
        self.served: tuple[int, int] | None = None
        self.ranges: list[tuple[int, int]] = []
        database: QueueDatabase | None = None
        damage: CorruptionError | None = None
        try:
            closed = closed_folder(folder)
            if closed is not None:
                raise closed
            database = QueueDatabase(folder)
        except CorruptionError as error:
            damage = error
        except OSError as error:
            if not is_unreadable(error):
                raise
            text = (
                f"the RocksDB database of the queues cannot be read ({error.strerror or error}): let this user read it, or "
                "restore it from a copy where the disk fails"
            )
            damage = CorruptionError(text, folder if error.filename is None else os.fsdecode(error.filename))
        if damage is not None:
            logger.warning("%s: %s; the queues are made from the log", damage.path, damage.message)
        self.begin = self._place(-1 if database is None else database.checkpoint)
        self._done_to = self.begin
        self.source = DatabaseQueues(
            root, folder, database, queues.config, queues.pool, self._log_bounds, self._batch_num, self._complete
        )
        if database is not None and database.log_damage is not None:
            # The database has an older state; the rest is in the log.
            damage = CorruptionError(f"the RocksDB database: {database.log_damage}", folder)
            logger.warning("%s: %s; what it lacks is taken from the log", damage.path, damage.message)
        if damage is not None:
            self.source.damage.append(damage)
        for topic, queue_id in () if database is None else database.last:
            if not can_name_queue(topic):
                logger.warning(
                    "%s: queue %d of %r is not read: no queue can have this name", folder, queue_id, topic[:80]
                )
        # Only brokers that dispatch to further queues write them into records.
        config = dataclasses.replace(queues.config, enable_lmq=True, enable_multi_dispatch=True)
        self._tail = CollectedQueues(root, config, queues.pool, read_only=True)
        self._config = config
        queues.source = self.source
        queues.refresh()
        if "message_delay_level" in commit_log.config.assumed:
            learn_delays(commit_log, queues)
        for begin, end in self._lost():
            self._complete(begin, end, every_queue=True)

    @property
    def database(self) -> QueueDatabase | None:
        """QueueDatabase or None: None where it could not be opened."""
        return self.source.database

    @property
    def state(self) -> QueueDatabaseState:
        """QueueDatabaseState: the present state."""
        database = self.database
        return QueueDatabaseState(
            self.source.path,
            0 if database is None else len(database.last),
            None if database is None or database.checkpoint < 0 else database.checkpoint,
            tuple(self.ranges),
            tuple(error.message for error in self.source.damage),
        )

    @property
    def damage(self) -> list[CorruptionError]:
        """list of CorruptionError: the parts of the database that could not be read."""
        return self.source.damage

    def _log_bounds(self) -> tuple[int, int]:
        # The log's end may not be known yet; units of what is after it point to no record.
        offsets = self.commit_log.files.offsets
        return self.commit_log.min_offset, offsets[-1] + self.commit_log.segment_size if offsets else 0

    def _batch_num(self, phy_offset: int, size: int) -> int:
        message = self.commit_log.look_up(phy_offset, size)
        if message is None or not message.is_inner_batch:
            return 0
        text = message.properties.get("INNER_NUM", "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0

    def _place(self, checkpoint: int) -> int:
        # A record begins at a checkpoint, unless that is damaged or of another log.
        log = self.commit_log
        if checkpoint >= log.max_offset:
            return log.max_offset
        if checkpoint <= log.min_offset:
            return log.min_offset
        segment = log.files.find(checkpoint)
        if segment is not None:
            pos = checkpoint - segment.file_from_offset
            if check_record(segment.region, pos, segment.file_from_offset, 0)[0] in (Verdict.RECORD, Verdict.BLANK):
                return checkpoint
        return max(checkpoint - checkpoint % log.segment_size, log.min_offset)

    # ------------------------------------------------------------------------------------------------- completing

    def catch_up(self, end: int) -> None:
        """Collect the units of new records up to `end`; the first call collects all after the checkpoint."""
        with self.queues.lock:
            if end <= self._done_to:
                return
            self._dispatch(self._tail, self._done_to, end)
            self._done_to = end
            found = self._tail.collected()
            for key, units in found.items():
                self.source.add(key, units)
            if found:
                self.served = self.begin, end
            self._refresh_queues(set(found))

    def _dispatch(self, queues: CollectedQueues, begin: int, end: int) -> None:
        for topic in self.queues.batch_topics:
            queues.add_batch_topic(topic)
        dispatcher = _CompletingDispatcher(self.commit_log, queues, self.source)
        for stretch, columns in self.commit_log.scans(begin, end, keys=False):
            dispatcher.dispatch_stretch(stretch, columns)
        dispatcher.finish()
        for topic in queues.batch_topics - self.queues.batch_topics:
            self.queues.add_batch_topic(topic)

    def _complete(self, begin: int | None, end: int | None, *, every_queue: bool = False) -> None:
        """Collect the units between two places before the checkpoint, of queues that the database has; both None = all.

        With `every_queue` also of others, which may have lost all units; otherwise those are of deleted topics.
        """
        with self.queues.lock:
            low, high = self.commit_log.min_offset, self.begin
            wanted = (max(low if begin is None else begin, low), min(high if end is None else end, high))
            missing = without(*wanted, self.ranges)
            if not missing:
                return
            # Set first: reads during the dispatch may ask for the same range.
            self.ranges = joined([*self.ranges, wanted])
            found = CollectedQueues(self._tail.root, self._config, self.queues.pool, read_only=True)
            for place in missing:
                self._dispatch(found, *place)
            database = self.database
            for key, units in found.collected().items():
                if database is None or every_queue or key in database.last:
                    self.source.add(key, units)
            self._refresh_queues(set(found.collected()), whole=True)

    def _refresh_queues(self, keys: set[tuple[str, int]], *, whole: bool = False) -> None:
        # Open queues pick up the collected units.
        again = set()
        for queue in self.queues.opened():
            if (queue.topic, queue.queue_id) not in keys:
                continue
            if isinstance(queue.files, UnitStream):
                if whole:
                    queue.min_for = None
                queue.files.take_in(whole=whole)
            elif queue.in_memory or self.source.goes_beyond(queue):
                again.add((queue.topic, queue.queue_id))
        self.queues.look_again(again)
        self.queues.refresh()

    # ------------------------------------------------------------------------------------------------------- holes

    def _lost(self) -> list[tuple[int, int]]:
        """Return the ranges before the checkpoint of which the database lacks units, by the ends of the segments.

        A broker that was killed recovers from the start of a segment; units of records before it that were not flushed are lost.
        They may be of a part of one segment.
        """
        log, database = self.commit_log, self.database
        if database is None:
            return [(log.min_offset, self.begin)]
        starts = [max(base, log.min_offset) for base in log.files.offsets if base < self.begin]
        ends = [*starts, self.begin][1:]
        first = [self._has_unit(database, self._records_from(start)) for start in starts]
        last = [self._has_unit(database, self._records_before(end)) for end in ends]
        found = []
        for i, part in enumerate(zip(starts, ends, strict=True)):
            following = first[i + 1] if i + 1 < len(first) else None
            if first[i] is False or last[i] is False or (last[i] is None and following is False):
                found.append(part)
        return joined(found)

    def _records_from(self, phy_offset: int) -> Iterator[MessageExt]:
        # The first records of a segment.
        log = self.commit_log
        end = phy_offset - phy_offset % log.segment_size + log.segment_size
        for _ in range(_RECORDS_ASKED):
            message = log.look_up(phy_offset) if phy_offset < end else None
            if message is None:
                return
            yield message
            phy_offset += message.size

    def _records_before(self, end: int) -> Iterator[MessageExt]:
        # The last records before a place that ends a segment or follows a record, the last one first.
        log = self.commit_log
        segment = log.files.find(end - 1)
        if segment is None:
            return
        region, base = segment.region, segment.file_from_offset
        pos, size, left = end - base, _FIRST_LOOK, _RECORDS_ASKED
        low = max(pos - _LOOK_BACK, 0)
        while pos > low:
            # Records begin before the magic, and the last one looked at was at `pos`.
            begin = max(pos - size, low)
            data = region.read(begin, pos - begin)
            at = data.rfind(_MAGIC)
            while at >= 4 and left:
                if check_record(region, begin + at - 4, base, 0)[0] is Verdict.RECORD:
                    message = log.look_up(base + begin + at - 4)
                    if message is not None:
                        left -= 1
                        yield message
                at = data.rfind(_MAGIC, 0, at)
            if not left or begin == low:
                return
            # The magic, or the bytes before it, may cross the edge.
            pos, size = begin + 8, min(size * 4, _LOOK_BACK)

    def _has_unit(self, database: QueueDatabase, messages: Iterable[MessageExt]) -> bool | None:
        # True if the first of these that should have a unit has one; None if there is no such record.
        for message in messages:
            last = database.last.get((message.topic, message.queue_id))
            if last is not None and message.queue_offset <= last.queue_offset and is_queued(message.sys_flag):
                try:
                    return database.value(message.topic, message.queue_id, message.queue_offset) is not None
                except CorruptionError as error:
                    self.source.report(error)
                    return None
        return None


class _CompletingDispatcher(LogDispatcher):
    # Dispatches into queues that collect what a database lacks; its units count as units of the queue.

    def __init__(self, commit_log: CommitLog, queues: CollectedQueues, source: DatabaseQueues):
        super().__init__(source.root, commit_log, queues, None)
        self.source = source
        database = source.database
        kept = frozenset() if database is None else frozenset(topic for topic, _ in database.last)
        self.deleted = DeletedTopics(source.root, kept)

    def _follow(self, queue: ConsumeQueue, columns: RecordColumns, rows: np.ndarray) -> bool:
        return self.source.database_of((queue.topic, queue.queue_id)) is None and super()._follow(queue, columns, rows)

    def _life(self, queue: AnyConsumeQueue) -> QueueLife | None:
        key = queue.topic, queue.queue_id
        if key not in self._lives and (database := self.source.database_of(key)) is not None:
            life = database_life(self.commit_log, database, *key, self.source.report)
            if life is not None:
                self._lives[key] = life
        return super()._life(queue)

    def _end(self, queue: AnyConsumeQueue) -> tuple[int, int]:
        end, phy_offset = super()._end(queue)
        key = queue.topic, queue.queue_id
        if (database := self.source.database_of(key)) is not None:
            last = database.last[key]
            if last.phy_offset > phy_offset:
                return last.queue_offset + 1, last.phy_offset
        return end, phy_offset

    def _begin_again(self, queue: AnyConsumeQueue) -> None:
        super()._begin_again(queue)
        self.source.begin_again((queue.topic, queue.queue_id))
