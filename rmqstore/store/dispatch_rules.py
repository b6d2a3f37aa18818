"""The rules of dispatching (RocketMQ 5.5.0): which units a record leaves, and whether queues have them already.

They cover what `RecordColumns.queued` does not: inner batches, the further queues that records name (INNER_MULTI_DISPATCH, light
queues), and records of topics that were deleted, or deleted and created again.  Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from rmqstore import _numpy as np
from rmqstore._dispatch import RecordColumns, TopicTable
from rmqstore._rows import FileEnd, settle
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import can_name_queue
from rmqstore.consumequeue.queue_look import PlainQueue
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.listing import listing
from rmqstore.files.os_errors import is_missing
from rmqstore.message import RETRY_PREFIX, SCHEDULE_TOPIC, MessageExt, SysFlag, decode_java_utf8, is_light_queue

if TYPE_CHECKING:
    from rmqstore.rocksdb.queues import QueueDatabase

__all__ = [
    "Agreement",
    "DeletedTopics",
    "QueueEnds",
    "QueueLife",
    "UnitRows",
    "further_places",
    "gone_text",
    "last_beginning",
    "life_of",
    "multi_dispatch_allowed",
    "names_further_queue",
    "unit_rows",
    "without_unit",
]

_INNER_BATCH = SysFlag.INNER_BATCH.value
# The digits of an int64; Python is slow with far longer numbers.
_DIGITS = 19


class UnitRows(NamedTuple):
    """The rows of columns that leave units, and those of them that are inner batches, as arrays of bool; row numbers of others.

    `bad_batches` have the flag of an inner batch and no number of messages; `further` name further queues.
    """

    queued: np.ndarray
    batches: np.ndarray
    bad_batches: np.ndarray
    further: np.ndarray


def unit_rows(columns: RecordColumns) -> UnitRows:
    """Return which rows leave units; if `RecordColumns.queued` finds no odd row, its first value is enough."""
    n = columns.count
    queued = columns.queued()[0].view(np.bool_)
    flagged = queued & ((columns.sys_flag[:n] & _INNER_BATCH) != 0)
    batches = flagged & (columns.inner_num[:n] > 0)
    further = np.flatnonzero(queued & (columns.multi_dispatch[:n] != 0))
    return UnitRows(queued, batches, np.flatnonzero(flagged & ~batches), further)


def without_unit(damage: Iterable[tuple[int, int, str]]) -> frozenset[int]:
    """Return the phy offsets of the records in `damage`, a report's, that have no unit because they are misplaced."""
    return frozenset(phy_offset for phy_offset, _, kind in damage if kind in ("BAD_QUEUE_OFFSET", "BAD_TOPIC"))


def names_further_queue(message: MessageExt, name: str, number: int | None = None) -> bool:
    """Return True if a record names this further queue, with this queue offset if given, whatever the config."""
    names, numbers = _further_lists(message)
    if name not in names or number is None:
        return name in names
    if len(numbers) != len(names) or names.count(name) > 1:
        return True
    stated = numbers[names.index(name)]
    return _is_place(name, stated) and int(stated) == number


def further_places(message: MessageExt, config: StoreConfig) -> tuple[list[tuple[str, int]], str | None]:
    """Return the further queues that a record names, each with its queue offset there; the queue id is 0.

    The second value is the end of a sentence about a record that names them wrongly, None for others.
    """
    if not (config.enable_lmq and config.enable_multi_dispatch and multi_dispatch_allowed(message.topic)):
        return [], None
    names, numbers = _further_lists(message)
    if names == [""] or len(names) != len(numbers):
        return [], None if numbers == [""] else "names another number of further queues than it has queue offsets for"
    places: list[tuple[str, int]] = []
    problem = None
    for name, number in zip(names, numbers):
        if _is_place(name, number):
            places.append((name, int(number)))
        elif problem is None:
            problem = f"names the further queue {name[:80]!r} with queue offset {number[:80]!r}, which cannot be"
    return places, problem


def _further_lists(message: MessageExt) -> tuple[list[str], list[str]]:
    # The names of further queues and the queue offsets there; one empty text each if the record names none.
    names, numbers = (message.properties.get(name, "") for name in ("INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET"))
    return names.split(","), numbers.split(",")


def _is_place(name: str, number: str) -> bool:
    return can_name_queue(name) and number.isascii() and number.isdigit() and len(number) <= _DIGITS


def multi_dispatch_allowed(topic: str) -> bool:
    """Return True if records of `topic` may name further queues (RocketMQ 5.5.0 MultiDispatch)."""
    return not topic.startswith((RETRY_PREFIX, "rmq_sys_")) and topic != SCHEDULE_TOPIC


_FOLDERS = ("consumequeue", "batchconsumequeue")
# The most topics named in one sentence.
_NAMED = 8


class QueueLife(NamedTuple):
    """The first unit of a queue: its queue offset, and the phy offset of its record."""

    queue_offset: int
    phy_offset: int

    def earlier(self, queue_offsets: np.ndarray, phy_offsets: np.ndarray) -> np.ndarray:
        """Return as an array of bool which records are of a queue of this name that was deleted before."""
        # In one queue both offsets rise.
        earlier: np.ndarray = (phy_offsets < self.phy_offset) & (queue_offsets >= self.queue_offset)
        return earlier


def life_of(commit_log: CommitLog, topic: str, queue_id: int, queue_offset: int, phy_offset: int) -> QueueLife | None:
    """Return the life of a queue with this first unit; None if the unit does not point to its record in the log."""
    message = commit_log.look_up(phy_offset)
    if message is None or (message.topic, message.queue_id, message.queue_offset) != (topic, queue_id, queue_offset):
        return None
    return QueueLife(queue_offset, phy_offset)


def database_life(
    commit_log: CommitLog, database: QueueDatabase, topic: str, queue_id: int, report: Callable[[CorruptionError], None]
) -> QueueLife | None:
    """Return the life of a queue in RocksDB, see `life_of`; `report` takes damage there."""
    try:
        first = database.at_or_after(topic, queue_id, 0)
    except CorruptionError as error:
        report(error)
        return None
    return None if first is None else life_of(commit_log, topic, queue_id, first.queue_offset, first.phy_offset)


def last_beginning(queue_offsets: np.ndarray, nums: np.ndarray, end: int, *, alone: bool) -> int:
    """Return the last row at which the offsets of a queue begin again from 0, -1 for none.

    `end` is where the queue ends before the rows.  With `alone` the last row counts too, after which none continues from 0.
    """
    begins = -1
    for row in np.flatnonzero(queue_offsets == 0).tolist():
        before = slice(max(begins, 0), row)
        reached = int((queue_offsets[before] + nums[before]).max(initial=end if begins < 0 else 0))
        if not reached:
            continue
        if row + 1 == len(queue_offsets):
            if alone:
                begins = row
            continue
        # After a queue offset that is 0 by damage the next one continues from those before.
        following = int(queue_offsets[row + 1])
        if 0 < following <= max(reached - 1, int(nums[row])):
            begins = row
    return begins


class DeletedTopics:
    """The deleted topics, by the broker's settings."""

    def __init__(self, root: str, kept: Container[str] = ()):
        self.root = root
        self.kept = kept
        self._known: dict[str, bool] = {}
        self._names: frozenset[str] | None = None
        self._were_read = False

    def is_deleted(self, topic: str) -> bool:
        """Return True if the broker does not list the topic, and it has no queue.

        False if the settings are missing or cannot be read whole, and for names that brokers do not list.
        """
        known = self._known.get(topic)
        if known is None:
            known = self._known[topic] = self._judge(topic)
        return known

    def _judge(self, topic: str) -> bool:
        from rmqstore.consumer.settings_sources import is_system_topic

        if topic in self.kept or is_system_topic(topic) or is_light_queue(topic):
            return False
        if not self._were_read:
            self._names, self._were_read = _listed_topics(self.root), True
        return self._names is not None and topic not in self._names and not self._has_queues(topic)

    def _has_queues(self, topic: str) -> bool:
        if not can_name_queue(topic):
            return False
        for folder in _FOLDERS:
            found = listing(os.path.join(self.root, folder, topic))
            # A folder that cannot be listed exists.
            if found or (found.error is not None and not is_missing(found.error)):
                return True
        return False


def _listed_topics(root: str) -> frozenset[str] | None:
    # None unless all of the broker's settings can be read: a backup may be older than a topic.
    with contextlib.suppress(StoreError, OSError):
        from rmqstore.consumer.settings_sources import settings_sources

        sources = settings_sources(root, "topics", quiet=True)
        if sources and all(each.readable and not each.findings and not each.path.endswith(".bak") for each in sources):
            # Every broker lists topics of its own, so an empty list is damage.
            return frozenset(name for each in sources for name in each.tables.get("topicConfigTable", {})) or None
    return None


def gone_text(records: dict[str, int]) -> str:
    """Return a sentence about records of deleted topics, whose numbers `records` has by topic."""
    named = [f"{topic} ({records[topic]})" for topic in sorted(records)]
    rest = f" and {len(named) - _NAMED} more topics" if len(named) > _NAMED else ""
    return (
        f"{sum(records.values())} records are of topics that were deleted, or deleted and created again, and belong to no "
        f"queue: {', '.join(named[:_NAMED])}{rest}"
    )


class QueueEnds:
    """The file of each queue in which the core continues with its units (`_rows.settle`), for all columns of one pass."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int], FileEnd | None] = {}
        self._tables: dict[TopicTable, tuple[list[str], list[tuple[str, int]]]] = {}

    def names(self, table: TopicTable) -> tuple[list[str], list[tuple[str, int]]]:
        """Return the topics of `table` as text, and its queues as topic and queue id; set their files in `table`."""
        topics, keys = self._tables.setdefault(table, ([], []))
        topics.extend(map(decode_java_utf8, table.topics[len(topics) :]))
        for topic, queue_id in table.queues[len(keys) :]:
            key = topics[topic], queue_id
            table.ends[len(keys)] = self._ends.get(key)
            keys.append(key)
        return topics, keys

    def get(self, key: tuple[str, int]) -> FileEnd | None:
        """Return the file of a queue, None if it has none."""
        return self._ends.get(key)

    def set(self, table: TopicTable, number: int, end: FileEnd | None) -> None:
        """Set the file of queue `number` in `table`."""
        table.ends[number] = self._ends[self._tables[table][1][number]] = end


class Agreement:
    """A read-only check that queues have exactly the units of their records."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: ConsumeQueueStore,
        plain: Mapping[tuple[str, int], PlainQueue] = MappingProxyType({}),
    ):
        self.commit_log = commit_log
        self.queues = queues
        self.plain = plain
        # By queue the queue offset after its last record that agreed, unless the core has its file.
        self._ends: dict[tuple[str, int], int] = {}
        self._files = QueueEnds()
        self._deleted = DeletedTopics(queues.root)

    def holds(self, columns: RecordColumns) -> bool:
        """Return True if every unit is there, agrees with its record, and follows the one before.

        Also False if only a dispatcher can decide: batch queues, records that are in several queues.
        """
        chosen, odd = columns.queued()
        if odd:
            rows = unit_rows(columns)
            if rows.batches.any() or len(rows.further):
                return False
        keys = self._files.names(columns.topics)[1]
        if not settle(columns, chosen, False)[0]:
            return True
        groups, order = columns.by_queue(chosen)
        for number, start, end in groups:
            key, own = keys[number], order[start:end]
            if not self._follow(key, columns, own):
                own = self._of_this_queue(key, columns, own)
                if len(own) and not self._follow(key, columns, own):
                    return False
            following = self._ends.get(key)
            if following is not None and self.queues.unit_num(*key) is not None:
                queue = self.queues.find(*key)
                self._files.set(columns.topics, number, None if queue is None else queue.file_end(following))
        return True

    def end(self, key: tuple[str, int]) -> int | None:
        """Return the queue offset after the last record of a queue that agreed; None for no record."""
        file = self._files.get(key)
        return self._ends.get(key) if file is None else file.following

    def _follow(self, key: tuple[str, int], columns: RecordColumns, rows: np.ndarray) -> bool:
        first = int(columns.queue_offset[rows[0]])
        if self.end(key) not in (None, first) or not self._agrees(key, columns, rows):
            return False
        self._ends[key] = first + len(rows)
        return True

    def _of_this_queue(self, key: tuple[str, int], columns: RecordColumns, rows: np.ndarray) -> np.ndarray:
        # Records of a deleted topic need no unit.
        queue = self.queues.find(*key)
        if queue is None:
            return rows[:0] if self._deleted.is_deleted(key[0]) else rows
        first = queue.first_record()
        life = None if first is None else life_of(self.commit_log, *key, first.queue_offset, first.phy_offset)
        if life is None:
            return rows
        of_this: np.ndarray = rows[~life.earlier(columns.queue_offset[rows], columns.phy_offset[rows])]
        return of_this

    def was_cut(self) -> bool:
        """Return True if a queue has lost units since they agreed."""
        for key in self._ends:
            number, end = self.queues.unit_num(*key), self.end(key)
            if number is not None and end is not None and number < end:
                return True
        return False

    def _agrees(self, key: tuple[str, int], columns: RecordColumns, rows: np.ndarray) -> bool:
        # A queue that came up before is opened, so that the core has its file.
        plain = self.plain.get(key) if key not in self._ends else None
        agrees = None if plain is None else self.queues.plain_agrees(plain, *key, columns, rows)
        if agrees is None:
            queue = self.queues.find(*key)
            agrees = queue is not None and queue.agrees(columns, rows)
        return agrees
