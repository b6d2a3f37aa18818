"""Whether queues hold already what records of the log leave in them: a comparison that lets a recovery read the log once.

Owns that comparison; it changes nothing on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rmqstore import _numpy as np
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.consumequeue.queue_look import PlainQueue
from rmqstore.message import decode_java_utf8
from rmqstore.store.dispatch_rules import unit_rows
from rmqstore.store.queue_lives import DeletedTopics, life_of

__all__ = ["Agreement"]


class Agreement:
    """Whether the queues hold already, exactly, what records leave behind in them; it only reads.

    Parameters
    ----------
    commit_log : CommitLog
    queues : ConsumeQueueStore
    plain : dict of (str, int) to PlainQueue
        Queues that were found in order and may be compared without being opened.

    Attributes
    ----------
    ends : dict of (str, int) to int
        For every queue that was compared the number after the last unit that was found right.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        queues: ConsumeQueueStore,
        plain: Mapping[tuple[str, int], PlainQueue] = MappingProxyType({}),
    ):
        self.commit_log = commit_log
        self.queues = queues
        self.plain = plain
        self.ends: dict[tuple[str, int], int] = {}
        self._deleted = DeletedTopics(queues.root)

    def holds(self, columns: RecordColumns) -> bool:
        """bool: every unit is there, says what its record needs, and follows the one before.

        False also where it takes a dispatcher to tell: batch queues, records that are in several queues.
        """
        chosen, odd = columns.queued()
        if odd:
            rows = unit_rows(columns)
            if rows.batches.any() or len(rows.further):
                return False
        groups, order = columns.by_queue(chosen)
        for number, start, end in groups:
            topic, queue_id = columns.topics.queues[number]
            key = decode_java_utf8(columns.topics.topics[topic]), queue_id
            own = order[start:end]
            if not self._follow(key, columns, own):
                own = self._of_this_queue(key, columns, own)
                if len(own) and not self._follow(key, columns, own):
                    return False
        return True

    def _follow(self, key: tuple[str, int], columns: RecordColumns, rows: np.ndarray) -> bool:
        first = int(columns.queue_offset[rows[0]])
        if self.ends.get(key, first) != first or not self._agrees(key, columns, rows):
            return False
        self.ends[key] = first + len(rows)
        return True

    def _of_this_queue(self, key: tuple[str, int], columns: RecordColumns, rows: np.ndarray) -> np.ndarray:
        # Without the records of a topic that was deleted, which need no unit.
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
        """bool: a queue has lost units meanwhile that were found right."""
        for key, end in self.ends.items():
            number = self.queues.unit_num(*key)
            if number is not None and number < end:
                return True
        return False

    def _agrees(self, key: tuple[str, int], columns: RecordColumns, rows: np.ndarray) -> bool:
        plain = self.plain.get(key)
        agrees = None if plain is None else self.queues.plain_agrees(plain, *key, columns, rows)
        if agrees is None:
            queue = self.queues.find(*key)
            agrees = queue is not None and queue.agrees(columns, rows)
        return agrees
