"""State and rows that the searches for all kinds of pending messages share.

Records of a topic are read as columns: by its queues, at places, or along the log where no queue points to them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rmqstore.errors import CorruptionError, MissingDependencyError, StoreError
from rmqstore.rocksdb.database import Database, may_be_database
from rmqstore.rocksdb.index import index_folder
from rmqstore.selection import Selection
from rmqstore.store.columns import ColumnOptions, Columns, import_pyarrow
from rmqstore.store.local_queue import LocalQueue
from rmqstore.store.message_store import MessageStore
from rmqstore.store.placed_columns import rows_at

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Problem", "Search"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something at `pos` bytes of `path` that could not be read, or cannot be right, so that the answer may lack messages."""

    path: str
    pos: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.text} [{self.path}{'' if self.pos is None else f', position {self.pos}'}]"


@dataclass
class Search:
    """A search for pending messages; `now` is in ms since epoch, `batches` are rows of pending messages."""

    store: MessageStore
    now: int
    batches: list[pa.RecordBatch] = field(default_factory=list)
    sources: list[PendingSource] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: The phy offset from which the log was scanned, for records that no queue points to; None if it was not.
    walked_from: int | None = None

    def tell(self, text: str, path: str | None = None, pos: int | None = None) -> None:
        """Note a problem, by default of the whole store."""
        self.problems.append(Problem(self.store.path if path is None else path, pos, text))

    def problem(self, error: Exception, path: str | None = None) -> None:
        """Note an error; the search continues."""
        if isinstance(error, StoreError):
            self.tell(error.message, path or error.path, error.pos)
            return
        named = os.fsdecode(error.filename) if isinstance(error, OSError) and error.filename is not None else None
        self.tell((isinstance(error, OSError) and error.strerror) or str(error), path or named)

    def take_problems(self, errors: Iterable[CorruptionError]) -> None:
        """Note the errors of a reader."""
        for error in errors:
            self.problem(error)

    def source(self, kind: str, name: str, begin: str = "") -> PendingSource:
        """Return a new source, which is listed."""
        made = PendingSource(kind, name, begin)
        self.sources.append(made)
        return made

    def take(
        self, source: PendingSource, records: Records, columns: dict[str, Any], keep: np.ndarray | None = None
    ) -> None:
        """Add pending records as rows of `source`, see `rows`."""
        batch = rows(records, source, self.now, columns, keep)
        source.pending += batch.num_rows
        self.add(batch)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        if batch.num_rows:
            self.batches.append(batch)

    # ------------------------------------------------------------------------------------------------------- the store

    @functools.cached_property
    def topics(self) -> frozenset[str]:
        """frozenset of str: the topics of the store, also those that only the log has."""
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
        if error is not None:
            self.tell(f"consumer progress: {error}", os.path.join(self.store.path, "config"))
        return progress

    @property
    def has_database(self) -> bool:
        """bool: there is a database in ``rocksdbstore/``, readable or not."""
        return may_be_database(index_folder(self.store.path))

    @functools.cached_property
    def database(self) -> Database | None:
        """Database or None: ``rocksdbstore/``; None where there is no database, or it cannot be read, which is a problem."""
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
                self.tell(text, path)
            return database
        return None

    def stored_in_database(self, read: Callable[[Database], T], otherwise: T) -> tuple[T, bool]:
        """Return what `read` returns for the database, and True; `otherwise` and False if there is no readable database."""
        if self.database is not None:
            try:
                return read(self.database), True
            except StoreError as error:
                self.problem(error)
        return otherwise, False

    def records_of(
        self, topic: str, begins: Mapping[int, int], *, body: bool = False, zero_is_noted: bool = False
    ) -> Iterator[Records]:
        """Yield the records of a topic: of each queue from its begin, by default from its first record.

        A missing queue that has a begin is a problem; with `zero_is_noted` also if its begin is 0.
        """
        store = self.store
        # If folders of queues cannot be read, the log is scanned instead.
        there = [] if store.queues.unseen else store.queue_ids(topic)
        if store.unserved is None:
            for queue_id in sorted(each for each in begins if each not in there and (begins[each] or zero_is_noted)):
                text = f"there is no queue {queue_id} of {topic}, for which the offset {begins[queue_id]} is noted; "
                text += "what waits in it is not known: verify tells whether the log has it, and rebuild makes it"
                self.tell(text, store.path)
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
        """Note that the answer depends on a scan of the log from this offset."""
        self.walked_from = phy_offset if self.walked_from is None else min(phy_offset, self.walked_from)

    def tell_damage(self, end: int) -> None:
        """Note the damage that a scan of the log up to `end` skipped."""
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
            self.tell(text, path, pos)

    def _of_queue(self, topic: str, queue_id: int, begin: int, body: bool) -> Iterator[Records]:
        store = self.store
        queue = store.queues.find(topic, queue_id)
        if queue is None:
            return
        low, high = queue.bounds(store.commit_log.min_offset)
        if begin > high:
            self.tell(
                f"queue {queue_id} of {topic} ends at {high}, before the offset {begin} noted for it: a broker goes on "
                "at the end, and none of its messages counts as waiting"
            )
        lost = 0
        columns = _columns(store, None, body)
        source = LocalQueue(queue, store.commit_log)
        for places in source.places(max(begin, low), _INT64_MAX):
            batches, taken = rows_at(source.log, columns, places.phy_offsets, source, places)
            lost += len(places) - len(taken)
            if len(taken):
                yield Records(_one(batches, columns), taken, source.resolved_codes(places.tags_codes[taken]))
        if lost:
            self.tell(f"{lost} units of queue {queue_id} of {topic} lead to no record; verify names them")


def chosen_records(records: Records, keep: np.ndarray) -> Records | None:
    """Return the records for which `keep` is true; None if there are none."""
    if keep.all():
        return records
    if not keep.any():
        return None
    codes = None if records.tags_codes is None else records.tags_codes[keep]
    return Records(records.batch.filter(import_pyarrow().array(keep)), records.numbers[keep], codes)


RECORD_COLUMNS = (
    "topic", "queue_id", "queue_offset", "phy_offset", "size", "keys", "tags", "unique_key", "properties",
    "born_timestamp", "store_timestamp", "reconsume_times", "body_stored",
)  # fmt: skip
"""The columns that are decoded of a pending record; the last one only where it is needed."""

# Records that are decoded together.
_PIECE = 1 << 15
_INT64_MAX = 2**63 - 1


@dataclass
class PendingSource:
    """A place that was read: a topic, directory or family `name`, the begin of its pending entries, and their number.

    `came_out` counts entries that are on their topic already, although they are after the broker's progress; `recalled` those that
    were recalled.  Neither are pending.
    """

    kind: str
    name: str
    begin: str = ""
    pending: int = 0
    came_out: int = 0
    recalled: int = 0


@functools.cache
def schema() -> pa.Schema:
    """pyarrow.Schema: the columns of pending messages, see docs/pending.md."""
    pa = import_pyarrow()
    text, number, offset, time = pa.string(), pa.int32(), pa.int64(), pa.timestamp("ms", tz="UTC")
    return pa.schema(
        [
            pa.field("kind", text, nullable=False), ("topic", text), ("queue_id", number), ("group", text),
            ("keys", pa.list_(text)), ("tags", text), ("unique_key", text),
            ("born_timestamp", time), ("store_timestamp", time), ("due", time), ("overdue", pa.bool_()),
            ("level", number), ("check_times", number), ("reconsume_times", number), ("size", number),
            ("stored_topic", text), ("stored_queue_id", number), ("queue_offset", offset), ("phy_offset", offset),
            pa.field("source", text, nullable=False),
        ]
    )  # fmt: skip


class Properties:
    """The column ``properties`` of many records, read by property."""

    def __init__(self, array: Any):
        self._pa = import_pyarrow()
        self._num = len(array)
        first, last = (array.offsets[0].as_py(), array.offsets[-1].as_py()) if self._num else (0, 0)
        self._offsets = array.offsets.to_numpy() - first
        self._items = array.items[first:last] if len(array.items) != last - first else array.items
        names = array.keys[first:last] if len(array.keys) != last - first else array.keys
        encoded = names.dictionary_encode()
        self._names = {name: code for code, name in enumerate(encoded.dictionary.to_pylist())}
        self._codes = encoded.indices.to_numpy()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def text(self, name: str) -> Any:
        """pyarrow.Array of string: the property's value in each record, null where it has none."""
        pa = self._pa
        code = self._names.get(name)
        if code is None:
            return pa.nulls(self._num, pa.string())
        hits = np.flatnonzero(self._codes == code)
        places = np.searchsorted(self._offsets, hits, "right") - 1
        if len(hits) == self._num and (places == np.arange(self._num)).all():
            return self._items.take(pa.array(hits))
        chosen = np.full(self._num, -1, np.int64)
        chosen[places] = hits
        return self._items.take(pa.array(chosen, mask=chosen < 0))

    def whole(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the property as whole numbers (int64 array, 0 for other texts), and which records have one (bool array)."""
        import pyarrow.compute as pc

        pa, texts = self._pa, self.text(name)
        try:
            numbers = pc.cast(texts, pa.int64())
        except pa.ArrowInvalid:
            # A hostile or damaged one is not a number; the others are.
            plain = pc.fill_null(pc.match_substring_regex(texts, r"^-?[0-9]{1,18}$"), False)
            numbers = pc.cast(pc.if_else(plain, texts, pa.scalar(None, pa.string())), pa.int64())
        there = pc.is_valid(numbers).to_numpy(zero_copy_only=False)
        return pc.fill_null(numbers, 0).to_numpy(), there

    def int32(self, name: str) -> Any:
        """pyarrow.Array of int32: the property as a number; null where it is not there, not a number, or does not fit."""
        values, there = self.whole(name)
        there &= (values >= -(2**31)) & (values < 2**31)
        return self._pa.array(np.where(there, values, 0), self._pa.int32(), mask=~there)


class Records:
    """Some records that may be pending: their columns (`RECORD_COLUMNS`), and the number of each among the requested places.

    `tags_codes` are those of their units, with codes from an extension; None where no unit was read.
    """

    def __init__(self, batch: pa.RecordBatch, numbers: np.ndarray, tags_codes: np.ndarray | None = None):
        self.batch = batch
        self.numbers = numbers
        self.tags_codes = tags_codes

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @functools.cached_property
    def properties(self) -> Properties:
        """Properties: the properties of the records."""
        return Properties(self.batch.column("properties"))

    def numbers_of(self, name: str) -> np.ndarray:
        """Return a column of whole numbers, or of times (ms since epoch), as an int64 array."""
        column = self.batch.column(name)
        if column.type == schema().field("due").type:
            column = column.view(import_pyarrow().int64())
        return np.asarray(column.to_numpy(zero_copy_only=False), np.int64)


def _columns(store: MessageStore, topics: Iterable[str] | None, body: bool) -> Columns:
    names = RECORD_COLUMNS if body else RECORD_COLUMNS[:-1]
    selection = Selection(None if topics is None else tuple(topics))
    return Columns(ColumnOptions(names, _PIECE), store.commit_log.crc_check, selection)


def _one(batches: list[pa.RecordBatch], columns: Columns) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    pa = import_pyarrow()
    return pa.Table.from_batches(batches, schema=columns.schema).combine_chunks().to_batches()[0]


def records_at(store: MessageStore, phy_offsets: np.ndarray, topic: str) -> Iterator[Records]:
    """Yield the records of a topic at these places, some at a time; places without one are left out."""
    columns = _columns(store, (topic,), False)
    for first in range(0, len(phy_offsets), _PIECE):
        part = np.ascontiguousarray(phy_offsets[first : first + _PIECE], np.int64)
        batches, taken = rows_at(store.commit_log, columns, part)
        if len(taken):
            yield Records(_one(batches, columns), first + taken)


def records_in_log(
    store: MessageStore, topics: Iterable[str], begin: int | None, *, body: bool = False
) -> Iterator[Records]:
    """Yield the records of these topics from phy offset `begin`, found by a scan of the log."""
    names = RECORD_COLUMNS if body else RECORD_COLUMNS[:-1]
    for batch in store.scan(names, topic=list(topics), begin_phy_offset=begin, batch_size=_PIECE):
        yield Records(batch, np.arange(batch.num_rows))


def rows(
    records: Records, source: PendingSource, now: int, columns: dict[str, Any], keep: np.ndarray | None = None
) -> pa.RecordBatch:
    """Return rows of pending messages (`schema`) for the records that `keep` chooses, by default for all.

    `columns` has arrays by name; other columns are those of the record, null if it has no such column.
    """
    pa = import_pyarrow()
    num, batch = len(records), records.batch
    made = {
        "kind": pa.repeat(source.kind, num), "source": pa.repeat(source.name, num),
        "stored_topic": batch.column("topic"), "stored_queue_id": batch.column("queue_id"), **columns,
    }  # fmt: skip
    if "due" in columns:
        made |= {"due": pa.array(columns["due"], pa.int64()).view(schema().field("due").type), "overdue": columns["due"] < now}
    arrays = []
    for each in schema():
        values = made.get(each.name)
        if values is None:
            values = batch.column(each.name) if each.name in batch.schema.names else pa.nulls(num, each.type)
        arrays.append(values if isinstance(values, pa.Array) else pa.array(values, each.type))
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema())
    return batch if keep is None or keep.all() else batch.filter(pa.array(keep))
