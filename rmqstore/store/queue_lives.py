"""Topics that were deleted, and deleted and created again: which records of the log belong to no queue that is there.

The log keeps the records of a deleted topic until retention deletes their segments.  Owns the two rules for them: a topic that
the broker does not list is gone, and where a queue's offsets begin again, the records before belong to a queue that is gone.
It only reads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, NamedTuple

from rmqstore import _numpy as np
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.queue_folders import can_name_queue
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.listing import listing
from rmqstore.files.os_errors import is_missing
from rmqstore.message import is_light_queue

if TYPE_CHECKING:
    from rmqstore.rocksdb.queues import QueueDatabase

__all__ = ["DeletedTopics", "QueueLife", "gone_text", "last_beginning", "life_of"]

_FOLDERS = ("consumequeue", "batchconsumequeue")
# So many topics are named in one sentence.
_NAMED = 8


class QueueLife(NamedTuple):
    """The first unit of a queue: its queue offset, and the phy offset of its record."""

    queue_offset: int
    phy_offset: int

    def earlier(self, queue_offsets: np.ndarray, phy_offsets: np.ndarray) -> np.ndarray:
        """bool array: records of a queue of the same name that was deleted before this one began."""
        # In one queue both offsets rise together.
        earlier: np.ndarray = (phy_offsets < self.phy_offset) & (queue_offsets >= self.queue_offset)
        return earlier


def life_of(commit_log: CommitLog, topic: str, queue_id: int, queue_offset: int, phy_offset: int) -> QueueLife | None:
    """The life of a queue whose first unit says this; None where it does not point to such a record in the log."""
    message = commit_log.look_up(phy_offset)
    if message is None or (message.topic, message.queue_id, message.queue_offset) != (topic, queue_id, queue_offset):
        return None
    return QueueLife(queue_offset, phy_offset)


def database_life(
    commit_log: CommitLog,
    database: QueueDatabase,
    topic: str,
    queue_id: int,
    report: Callable[[CorruptionError], None],
) -> QueueLife | None:
    """As `life_of`, of a queue in RocksDB; `report` is told of damage there."""
    try:
        first = database.at_or_after(topic, queue_id, 0)
    except CorruptionError as error:
        report(error)
        return None
    return None if first is None else life_of(commit_log, topic, queue_id, first.queue_offset, first.phy_offset)


def last_beginning(queue_offsets: np.ndarray, nums: np.ndarray, end: int, *, alone: bool) -> int:
    """The last row at which the offsets of a queue begin again from 0, -1 for none.

    Parameters
    ----------
    queue_offsets, nums : integer arrays
        Of records of one queue in the order of the log, and how many messages each holds.
    end : int
        Where the queue ends before the first of them, 0 without units.
    alone : bool
        Believe it of the last row too, after which none goes on from 0.
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
        # A queue offset that is 0 by damage is followed by one that goes on from those before.
        following = int(queue_offsets[row + 1])
        if 0 < following <= max(reached - 1, int(nums[row])):
            begins = row
    return begins


class DeletedTopics:
    """Which topics were deleted, as the broker's settings say.

    Parameters
    ----------
    root : str
        The store's directory.
    kept : container of str
        Topics that have queues elsewhere than in files.
    """

    def __init__(self, root: str, kept: Container[str] = ()):
        self.root = root
        self.kept = kept
        self._known: dict[str, bool] = {}
        self._names: frozenset[str] | None = None
        self._were_read = False

    def is_deleted(self, topic: str) -> bool:
        """bool: the broker does not list the topic, and it has no queue.

        False where the settings are missing or cannot be read whole, and for names that brokers do not list.
        """
        known = self._known.get(topic)
        if known is None:
            known = self._known[topic] = self._judge(topic)
        return known

    def _judge(self, topic: str) -> bool:
        from rmqstore.consumer.system_names import is_system_topic

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
            # One that cannot be listed is there.
            if found or (found.error is not None and not is_missing(found.error)):
                return True
        return False


def _listed_topics(root: str) -> frozenset[str] | None:
    # None unless all of what the broker kept can be read: a backup may be older than a topic.
    with contextlib.suppress(StoreError, OSError):
        from rmqstore.consumer.settings_sources import settings_sources

        sources = settings_sources(root, "topics", quiet=True)
        if sources and all(each.readable and not each.findings and not each.path.endswith(".bak") for each in sources):
            # Every broker lists topics of its own.
            return frozenset(name for each in sources for name in each.tables.get("topicConfigTable", {})) or None
    return None


def gone_text(records: dict[str, int]) -> str:
    """str: a sentence about records of topics that are gone, given their number by topic."""
    named = [f"{topic} ({records[topic]})" for topic in sorted(records)]
    rest = f" and {len(named) - _NAMED} more topics" if len(named) > _NAMED else ""
    return (
        f"{sum(records.values())} records are of topics that were deleted, or deleted and created again, and belong to no "
        f"queue: {', '.join(named[:_NAMED])}{rest}"
    )
