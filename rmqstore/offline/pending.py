"""pending: find the messages of a store that are not delivered yet.

Pending are messages of delay levels and timers that are not due or not delivered, half messages that are not settled, retries
that their group has not consumed, and dead letters.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from rmqstore.arguments import Moment, milliseconds
from rmqstore.config import StoreConfig, system_clock
from rmqstore.errors import StoreClosedError, StoreError
from rmqstore.offline.pending_queues import search_delayed, search_dlq, search_retry, search_transactions
from rmqstore.offline.pending_search import PendingSource, Problem, Search, schema
from rmqstore.offline.pending_timers import search_timers
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.lost_log import lost_text
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["KINDS", "Pending", "PendingMessage", "PendingTotal", "pending"]

Kind = Literal["delayed", "timer", "transaction", "retry", "dlq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SEARCHES = {
    "delayed": search_delayed,
    "timer": search_timers,
    "transaction": search_transactions,
    "retry": search_retry,
    "dlq": search_dlq,
}
# The number of rows that become objects together.
_STEP = 4096


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A pending message; times in ms since epoch.

    `topic`, `queue_id` are its target, or the origin of a retry or a dead letter; `group` is the consumer group of these, the
    producer group of a transaction.  `due` is the time of delivery, `overdue` is true if that is before now; both are None for
    transactions, retries and dead letters.  `check_times` is the number of questions to the producer of a transaction.
    `stored_topic`, `stored_queue_id`, `queue_offset`, `phy_offset` are the place of the record, `source` is `PendingSource.name`.
    """

    kind: str
    topic: str | None
    queue_id: int | None
    group: str | None
    keys: tuple[str, ...]
    tags: str | None
    unique_key: str | None
    born_timestamp: int
    store_timestamp: int
    due: int | None
    overdue: bool | None
    level: int | None
    check_times: int | None
    reconsume_times: int
    size: int
    stored_topic: str
    stored_queue_id: int
    queue_offset: int
    phy_offset: int
    source: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return {**{name: getattr(self, name) for name in _FIELDS}, "keys": list(self.keys)}


_FIELDS = tuple(each.name for each in dataclasses.fields(PendingMessage))


@dataclass(frozen=True, slots=True)
class PendingTotal:
    """The pending messages of one kind for one topic; times in ms since epoch, None where no message has one."""

    kind: str
    topic: str | None
    messages: int
    overdue: int
    first_born_timestamp: int
    first_due: int | None
    last_due: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return dataclasses.asdict(self)


@dataclass
class Pending:
    """The pending messages of a store; an iterable of `PendingMessage`, by kind and due time.

    Messages due before `now` (ms since epoch) are overdue.  `unordered` is an Arrow table with a row a message
    (`rmqstore.offline.pending_search.schema`), in the order of the search.  `sources` are the places that were read; `problems`
    are unreadable or wrong places, because of which messages may be missing.
    """

    path: str
    now: int
    unordered: pa.Table
    sources: list[PendingSource] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def table(self) -> pa.Table:
        """pyarrow.Table: a row a message, by kind, and in it by due time and phy offset."""
        return _ordered(self.unordered)

    def __len__(self) -> int:
        return int(self.unordered.num_rows)

    def __iter__(self) -> Iterator[PendingMessage]:
        pa = import_pyarrow()
        times = [name for name in _FIELDS if pa.types.is_timestamp(schema().field(name).type)]
        for batch in self.table.to_batches(max_chunksize=_STEP):
            columns = [
                (batch.column(name).view(pa.int64()) if name in times else batch.column(name)).to_pylist()
                for name in _FIELDS
            ]
            keys = _FIELDS.index("keys")
            columns[keys] = [tuple(each) for each in columns[keys]]
            for values in zip(*columns):
                yield PendingMessage(*values)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{number} {kind}" for kind, number in self.counts.items() if number)
        return f"<Pending {self.path!r}: {numbers or 'nothing'}; {len(self.problems)} problems>"

    @property
    def counts(self) -> dict[str, int]:
        """dict: messages by kind, of all kinds."""
        found: dict[str, int] = dict.fromkeys(KINDS, 0)
        for each in self.unordered.column("kind").value_counts().to_pylist():
            found[each["values"]] = each["counts"]
        return found

    @property
    def totals(self) -> list[PendingTotal]:
        """list of PendingTotal: by kind and topic."""
        pa = import_pyarrow()
        found = self.unordered
        numbers = {name: found.column(name).cast(pa.int64()) for name in ("overdue", "born_timestamp", "due")}
        table = pa.table({"kind": found.column("kind"), "topic": found.column("topic"), **numbers})
        grouped = table.group_by(["kind", "topic"]).aggregate(
            [("born_timestamp", "count"), ("overdue", "sum"), ("born_timestamp", "min"), ("due", "min"), ("due", "max")]
        )
        names = ("kind", "topic", "born_timestamp_count", "overdue_sum", "born_timestamp_min", "due_min", "due_max")
        totals = [
            PendingTotal(kind, topic, messages, overdue or 0, *times)
            for kind, topic, messages, overdue, *times in zip(*(grouped.column(name).to_pylist() for name in names))
        ]
        return sorted(totals, key=lambda total: (KINDS.index(total.kind), total.topic or ""))


def pending(
    store: str | os.PathLike[str] | MessageStore,
    *,
    kinds: str | Iterable[str] | None = None,
    topic: str | None = None,
    config: StoreConfig | None = None,
    now: Moment | None = None,
) -> Pending:
    """Find the pending messages of a store; nothing is changed, a running broker is not disturbed.

    Parameters
    ----------
    store : path or MessageStore
    kinds : str or iterable of str, optional
        Of "delayed", "timer", "transaction", "retry" and "dlq"; all by default.
    topic : str, optional
        Only messages with this `PendingMessage.topic`.
    config : StoreConfig, optional
        Of a path; by default `StoreConfig.infer`.
    now : int or datetime, optional
        Messages due before it are overdue; by default the time of this machine.

    Raises
    ------
    ValueError
        There is no such kind.
    MissingDependencyError
        pyarrow is not installed.
    StoreError, GeometryError
        There is no store, or its files do not fit the geometry.  Damage in a store is in `Pending.problems`.
    """
    import_pyarrow()
    wanted = KINDS if kinds is None else (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in wanted:
        if kind not in KINDS:
            raise ValueError(f"there is no kind {kind!r} of pending messages; there are {', '.join(KINDS)}")
    moment = system_clock() if now is None else int(milliseconds(now, "now"))
    if isinstance(store, MessageStore):
        return _search(store, wanted, topic, moment)
    with MessageStore.open(store, config=config, read_only=True) as opened:
        return _search(opened, wanted, topic, moment)


def _search(store: MessageStore, kinds: Iterable[str], topic: str | None, now: int) -> Pending:
    pa = import_pyarrow()
    if store.read_only:
        store.refresh()
    search = Search(store, now)
    for begin, end in store.lost_log:
        search.problem(StoreError(lost_text(begin, end), store.commit_log.path))
    # The log of a store with a writer grows while this runs.
    end = store.commit_log.max_offset
    try:
        for kind in KINDS:
            if kind in kinds:
                try:
                    _SEARCHES[kind](search)
                except StoreClosedError:
                    raise
                except (StoreError, OSError) as error:
                    # An unreadable kind does not hide the others.
                    search.problem(error)
    finally:
        database = search.__dict__.get("database")
        if database is not None:
            database.close()
    table = pa.Table.from_batches(search.batches, schema=schema())
    table = _without_delivered(search, table, end)
    search.tell_damage(end)
    if topic is not None:
        import pyarrow.compute as pc

        table = table.filter(pc.equal(table.column("topic"), topic))
    return Pending(store.path, now, table, search.sources, search.problems, search.notes)


def _ordered(table: pa.Table) -> pa.Table:
    import pyarrow.compute as pc

    pa = import_pyarrow()
    rank = pc.index_in(table.column("kind"), pa.array(KINDS)).to_numpy()
    due = table.column("due").cast(pa.int64()).fill_null(2**63 - 1).to_numpy()
    order = np.lexsort((table.column("phy_offset").to_numpy(), due, rank))
    return table if (np.diff(order) == 1).all() else table.take(pa.array(order))


def _without_delivered(search: Search, table: pa.Table, end: int) -> pa.Table:
    """Return the rows without those whose message is on its topic already.

    A broker writes its progress from time to time.  After a kill the progress is out of date, so each message that was due before
    the end of the log is searched in the log.
    """
    import pyarrow.compute as pc

    pa = import_pyarrow()
    last = search.store.commit_log.last_store_timestamp()
    if not table.num_rows or not last:
        return table
    due = table.column("due").cast(pa.int64()).fill_null(2**63 - 1).to_numpy()
    suspected = np.flatnonzero(due <= last)
    if not len(suspected):
        return table
    suspects = table.take(pa.array(suspected))
    topics = [name for name in pc.unique(suspects.column("topic")).to_pylist() if name is not None]
    columns = ["topic", "unique_key", "phy_offset", "reconsume_times"]
    waiting: dict[tuple[Any, ...], list[tuple[int, int, int]]] = {}
    rows = zip(
        suspected.tolist(), *(suspects.column(name).to_pylist() for name in ("kind", *columns)), due[suspected].tolist()
    )
    for place, kind, topic, key, phy_offset, times, when in rows:
        if key is not None:
            waiting.setdefault((topic, key, times if kind == "delayed" else None), []).append((phy_offset, when, place))
    keys = pa.array(sorted({key for _, key, _ in waiting}), pa.string())
    begin = int(pc.min(suspects.column("phy_offset")).as_py())
    search.walk_from(begin)
    scan = search.store.scan(
        [*columns, "store_timestamp"],
        topic=topics,
        begin_phy_offset=begin,
        end_phy_offset=end,
    )
    delivered: set[int] = set()
    for batch in scan:
        near = batch.filter(pc.is_in(batch.column("unique_key"), value_set=keys))
        stored = near.column("store_timestamp").view(pa.int64()).to_pylist()
        found = zip(*(near.column(name).to_pylist() for name in columns), stored)
        for topic, key, phy_offset, times, when in found:
            for known in ((topic, key, times), (topic, key, None)):
                for at, due_at, place in waiting.get(known, ()):
                    if phy_offset > at and when >= due_at:
                        delivered.add(place)
    if not delivered:
        return table
    keep = np.ones(table.num_rows, bool)
    keep[list(delivered)] = False
    gone = table.filter(pa.array(~keep)).column("source").value_counts().to_pylist()
    for each in gone:
        for source in search.sources:
            if source.name == each["values"]:
                source.pending -= each["counts"]
                source.came_out += each["counts"]
                break
    return table.filter(pa.array(keep))
