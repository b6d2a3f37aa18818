"""A search for pending messages: what it goes over, what it found, and what it could not read.

Owns the state that the searches of all kinds share, and how records of a topic are come by: by its queues, and along
the log for what no queue leads to.  It decides nothing about what waits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rmqstore.errors import CorruptionError, MissingDependencyError, StoreError
from rmqstore.offline.pending_rows import PendingSource, Records, Waiting, records_in_log, records_of_queue, rows
from rmqstore.rocksdb.database import Database, is_database
from rmqstore.rocksdb.index import index_folder
from rmqstore.rocksdb.places import may_be_database
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Problem", "Search"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that could not be read, or cannot be right, so that the answer may lack messages.

    Attributes
    ----------
    path : str
        The file or directory.
    pos : int or None
        Position in it, bytes.
    text : str
    """

    path: str
    pos: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.text} [{self.path}{'' if self.pos is None else f', position {self.pos}'}]"


@dataclass
class Search:
    """What a search for pending messages goes over and finds.

    Attributes
    ----------
    store : MessageStore
    now : int
        ms since epoch.
    batches : list of pyarrow.RecordBatch
        Rows that wait.
    sources, problems : list
    notes : list of str
        What to know about the answer that is not damage.
    """

    store: MessageStore
    now: int
    batches: list[pa.RecordBatch] = field(default_factory=list)
    sources: list[PendingSource] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: The phy offset from which on the log was gone over, for what no queue tells; None: it was not.
    walked_from: int | None = None

    def problem(self, error: Exception, path: str | None = None) -> None:
        """Take an error down; the search goes on."""
        if isinstance(error, StoreError):
            where = self.store.path if error.path is None else error.path
            self.problems.append(Problem(where if path is None else path, error.pos, error.message))
        else:
            named = os.fsdecode(error.filename) if isinstance(error, OSError) and error.filename is not None else None
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.problems.append(Problem(path or named or self.store.path, None, text))

    def source(self, kind: str, name: str, begin: str = "") -> PendingSource:
        """PendingSource: a new one, listed."""
        made = PendingSource(kind, name, begin)
        self.sources.append(made)
        return made

    def take(
        self, source: PendingSource, records: Records, waiting: Waiting, keep: np.ndarray | None = None
    ) -> None:
        """Take records that wait as rows of `source`; `keep` says which."""
        batch = rows(records, source, self.now, waiting, keep)
        source.pending += batch.num_rows
        self.add(batch)

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows."""
        if batch.num_rows:
            self.batches.append(batch)

    # ------------------------------------------------------------------------------------------------------- the store

    @functools.cached_property
    def topics(self) -> frozenset[str]:
        """frozenset of str: the topics of the store, those included that only the log tells of."""
        found = set(self.store.topics())
        unserved = self.store.unserved
        if unserved is not None:
            self.walk_from(unserved[0])
            for batch in self.store.scan(["topic"], begin_phy_offset=unserved[0], read_dictionary=["topic"]):
                found.update(batch.column(0).dictionary.to_pylist())
        return frozenset(found)

    @functools.cached_property
    def progress(self) -> dict[tuple[str, str], dict[int, int]]:
        """dict: next queue offset by (group, topic) and queue id."""
        progress, error = self.store.consumer_progress()
        config = os.path.join(self.store.path, "config")
        if error is not None:
            self.problems.append(Problem(config, None, f"consumer progress: {error}"))
        elif not progress:
            for name in ("consumerOffsets", "metadata", "rdb"):
                if is_database(os.path.join(config, name)):
                    self.notes.append(
                        "consumer progress was not found in the JSON file of config; "
                        f"config/{name} is a RocksDB that may hold it"
                    )
        return progress

    @property
    def has_database(self) -> bool:
        """bool: there is a database in ``rocksdbstore/``, readable or not."""
        return may_be_database(index_folder(self.store.path))

    @functools.cached_property
    def database(self) -> Database | None:
        """Database or None: ``rocksdbstore/``; None where there is none, or it cannot be read: then a problem."""
        path = index_folder(self.store.path)
        if not self.has_database:
            return None
        try:
            database = Database(path)
        except MissingDependencyError as error:
            self.problem(error, path)
        except (StoreError, OSError) as error:
            self.problem(error)
        else:
            if database.log_damage is not None:
                text = f"its log or MANIFEST is damaged ({database.log_damage}); what follows the damage is taken from the log"
                self.problems.append(Problem(path, None, text))
            return database
        return None

    def stored_in_database(self, read: Callable[[Database], T], otherwise: T) -> tuple[T, bool]:
        """What `read` finds in the database, and True; `otherwise` and False where there is none, or it cannot be read."""
        if self.database is not None:
            try:
                return read(self.database), True
            except StoreError as error:
                self.problem(error)
        return otherwise, False

    def records_of(
        self, topic: str, begins: Mapping[int, int], *, body: bool = False, zero_is_noted: bool = False
    ) -> Iterator[Records]:
        """The records of a topic: of each queue from its begin on, from the queue's first one where none is given.

        A queue that is gone although a begin is noted for it is a problem; with `zero_is_noted` also where that is 0.
        """
        store = self.store
        # Where folders of queues cannot be looked into the log is gone over, which has what is in all of them.
        there = [] if store.queues.unseen else store.queue_ids(topic)
        if store.unserved is None:
            for queue_id in sorted(each for each in begins if each not in there and (begins[each] or zero_is_noted)):
                text = f"there is no queue {queue_id} of {topic}, for which the offset {begins[queue_id]} is noted; "
                text += "what waits in it is not known: verify tells whether the log has it, and rebuild makes it"
                self.problems.append(Problem(store.path, None, text))
        for queue_id in there:
            try:
                yield from self._of_queue(topic, queue_id, begins.get(queue_id, 0), body)
            except (StoreError, OSError) as error:
                self.problem(error)
        if store.unserved is None:
            return
        self.walk_from(store.unserved[0])
        for records in records_in_log(store, (topic,), store.unserved[0], body=body):
            queue_ids, offsets = records.numbers_of("queue_id"), records.numbers_of("queue_offset")
            keep = np.ones(len(records), bool)
            for queue_id, begin in begins.items():
                keep &= (queue_ids != queue_id) | (offsets >= begin)
            chosen = chosen_records(records, keep)
            if chosen is not None:
                yield chosen

    def walk_from(self, phy_offset: int) -> None:
        """Note that the answer hangs on a walk along the log from here on."""
        self.walked_from = phy_offset if self.walked_from is None else min(phy_offset, self.walked_from)

    def tell_damage(self, end: int) -> None:
        """Take down what a walk along the log up to `end` passed over."""
        if self.walked_from is None:
            return
        log = self.store.commit_log
        stretches = log.stretches(max(self.walked_from, log.min_offset), end, check_crc=False)
        damage = [each for each in stretches if each.is_damage]
        if damage:
            first, size = damage[0].begin, sum(each.end - each.begin for each in damage)
            text = f"damaged stretches of the log: {len(damage)}, {size} bytes, the first at phy offset {first}; what "
            text += "waits may be in them, or what delivered or settled others; rmqstore verify names them"
            segment = log.files.find(first)
            path, pos = (log.path, None) if segment is None else (segment.path, first - segment.file_from_offset)
            self.problems.append(Problem(path, pos, text))

    def _of_queue(self, topic: str, queue_id: int, begin: int, body: bool) -> Iterator[Records]:
        queue = self.store.queues.find(topic, queue_id)
        if queue is None:
            return
        low, high = queue.bounds(self.store.commit_log.min_offset)
        if begin > high:
            self.problems.append(
                Problem(
                    self.store.path,
                    None,
                    f"queue {queue_id} of {topic} ends at {high}, in front of the offset {begin} noted for it: a broker goes on "
                    "at the end, and none of its messages counts as waiting",
                )
            )
        lost = 0
        for records, missing in records_of_queue(self.store, queue, max(begin, low), body=body):
            lost += missing
            if records is not None:
                yield records
        if lost:
            self.problems.append(
                Problem(
                    self.store.path,
                    None,
                    f"{lost} units of queue {queue_id} of {topic} lead to no record; verify names them",
                )
            )


def chosen_records(records: Records, keep: np.ndarray) -> Records | None:
    """Records or None: those that `keep` says, None for none."""
    if keep.all():
        return records
    if not keep.any():
        return None
    codes = None if records.tags_codes is None else records.tags_codes[keep]
    return Records(records.batch.filter(import_pyarrow().array(keep)), records.numbers[keep], codes)


def taken_down(search: Search, errors: list[CorruptionError]) -> None:
    """Take errors of a reader down as problems."""
    for error in errors:
        search.problem(error)
