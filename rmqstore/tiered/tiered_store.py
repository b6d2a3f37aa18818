"""TieredStore: what one broker has in tiered storage, opened for reading.

Owns what users meet: open and close, and every operation with its words; `FlatStore` does the work, and `store` the columns.
It writes nothing and takes no lock, also beside a running broker.  What cannot be read is an error that names the file, or a
finding for `on_damage`; no answer is shorter without one or the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rmqstore._shown import shows
from rmqstore.arguments import (
    Boundary,
    IndexType,
    Moment,
    check_boundary,
    milliseconds,
    one_queue,
    one_text,
    whole_number,
)
from rmqstore.errors import Finding
from rmqstore.files.listing import ask_again
from rmqstore.files.mapped_file import NotCopied
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.flatfile.flat_verify import verify_flat
from rmqstore.selection import Selection, of_key, of_queue, of_scan, row_num
from rmqstore.sources import Joined, Part
from rmqstore.store.columns import ColumnOptions, table_options
from rmqstore.store.reading import get_from, offset_by_time, table_from
from rmqstore.store.results import GetMessageResult, QueryResult
from rmqstore.store.tiered_columns import FlatScan, flat_ranges
from rmqstore.store.tiered_reading import gap_finding

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TieredQueue", "TieredStore"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TieredQueue:
    """A queue in tiered storage.

    Attributes
    ----------
    topic : str
    queue_id : int
    min_queue_offset, max_queue_offset : int
        Of the first message that is there, and the one after the last that was uploaded.
    log_bytes : int
        Bytes of its records.
    log_files, unit_files : int
        Flat files of COMMIT_LOG and CONSUME_QUEUE.
    """

    topic: str
    queue_id: int
    min_queue_offset: int
    max_queue_offset: int
    log_bytes: int
    log_files: int
    unit_files: int


@shows(
    "broker", "close", "get_message", "get_table", "max_queue_offset", "min_queue_offset", "notes",
    "offset_by_time", "open", "path", "query_message", "queue_ids", "queues", "refresh", "scan", "topics",
    "verify",
)  # fmt: skip
class TieredStore(NotCopied):
    """Tiered storage; made by `TieredStore.open`, to be closed, best by a ``with`` statement.

    Attributes
    ----------
    path : str
    """

    flat_store: FlatStore
    path: str

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("tiered storage is opened, not made: use TieredStore.open(path)")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        store: str | os.PathLike[str] | None = None,
        *,
        cluster: str | None = None,
        broker: str | None = None,
        on_damage: Callable[[Finding], object] | None = None,
    ) -> TieredStore:
        """Open the tiered storage in directory `path` (RocketMQ's tieredStoreFilePath; its Posix provider).

        Parameters
        ----------
        store : path, optional
            The root of the broker's local store: its metadata tell of files that are missing at an end, and its newest index
            file is not uploaded yet.  Without it sizes are those of the files, which `notes` says.
        cluster, broker : str, optional
            Whose messages; needed where several brokers keep theirs here.
        on_damage : callable, optional
            Called with a `Finding` for each place that an answer cannot look at; the rest is read.  Without it the answer is
            a CorruptionError.

        Raises
        ------
        StoreError
            There is no tiered storage there, or that of several brokers.
        """
        tiered = cls.__new__(cls)
        tiered.flat_store = FlatStore(path, store, cluster=cluster, broker=broker, on_damage=on_damage)
        tiered.path = tiered.flat_store.path
        return tiered

    def close(self) -> None:
        """Let go of the files; closing twice does nothing."""
        self.flat_store.close()

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TieredStore({self.path!r}, {'closed' if self.flat_store.closed else self.flat_store.broker})"

    @property
    def broker(self) -> str:
        """str: the broker whose messages these are."""
        return self.flat_store.broker

    @property
    def notes(self) -> list[str]:
        """list of str: what is not known without a local store or metadata that can be read, and what that means."""
        return self.flat_store.notes

    def refresh(self) -> None:
        """Take in what the broker uploaded and deleted since."""
        self.flat_store.load()

    def _settled(self, ask: Callable[[], _T]) -> _T:
        return ask_again(ask, self.flat_store.load)

    # ------------------------------------------------------------------------------------------------------- queues

    def topics(self) -> list[str]:
        """list of str: topics that have a queue, sorted."""
        return sorted({topic for topic, _ in self.flat_store.keys()})

    def queue_ids(self, topic: str) -> list[int]:
        """list of int: the queues of `topic`, ascending."""
        topic = one_text(topic, "topic")
        return [queue_id for _, queue_id in self.flat_store.keys(topic)]

    def queues(self) -> list[TieredQueue]:
        """list of TieredQueue: every queue, by topic and queue id."""
        return [
            TieredQueue(
                queue.topic, queue.queue_id, queue.min_queue_offset, queue.max_queue_offset,
                queue.log.max_offset - queue.log.min_offset, len(queue.log), len(queue.units),
            )
            for queue in self.flat_store.queues()
        ]  # fmt: skip

    def _queue(self, topic: str, queue_id: int) -> FlatQueue | None:
        queue = self.flat_store.queue(topic, queue_id)
        if queue is not None and queue.lacks_units is not None:
            self.flat_store.report(queue.lacks_units)
        return queue

    def min_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """int: queue offset of the first message that is there, 0 for an unknown queue."""
        queue = self._queue(*one_queue(topic, queue_id))
        return 0 if queue is None else queue.min_queue_offset

    def max_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """int: queue offset after the last message that was uploaded, 0 for an unknown queue."""
        queue = self._queue(*one_queue(topic, queue_id))
        return 0 if queue is None else queue.max_queue_offset

    def get_message(
        self,
        topic: str,
        queue_id: int = 0,
        queue_offset: int = 0,
        max_num: int = 32,
        tags: str | Iterable[str] | None = None,
        *,
        max_bytes: int | None = None,
    ) -> GetMessageResult:
        """Read messages of a queue from `queue_offset` on; parameters as of `MessageStore.get_message`.

        A result ends with a file of units, and in front of a place that cannot be read; a get that begins there tells of it.
        At the end of the queue it looks, once a second at most, whether more was uploaded.  `phy_offset` of a message is the
        offset in the tiered log of its queue.

        Raises
        ------
        CorruptionError
            Nothing can be read at `queue_offset`, and no `on_damage` was given.
        """
        max_bytes = None if max_bytes is None else whole_number(max_bytes, "max_bytes")
        selection = of_queue(topic, queue_id, queue_offset, whole_number(max_num, "max_num"), tags)
        topic, queue_id, queue_offset = selection.topic, selection.queue_id, selection.begin_queue_offset or 0

        def ask() -> GetMessageResult:
            queue = self._queue(topic, queue_id)
            if queue is None or queue_offset >= queue.max_queue_offset:
                # Maybe the broker uploaded more.
                self.flat_store.refresh()
                queue = self._queue(topic, queue_id)
            return get_from(_whole(queue), selection, max_bytes)

        return self._settled(ask)

    def offset_by_time(self, topic: str, queue_id: int, timestamp: Moment, boundary: Boundary = "lower") -> int:
        """int: queue offset that belongs to a store time, as of `MessageStore.offset_by_time`; 0 for an unknown queue.

        Raises
        ------
        ValueError
            `timestamp` looks like seconds; or there is no such `boundary`.
        CorruptionError
            As of `get_message`, for a message that the search comes by: from the oldest on for "lower", from the newest for
            "upper".
        """
        check_boundary(boundary)
        topic, queue_id = one_queue(topic, queue_id)
        at = milliseconds(timestamp, "timestamp", up=boundary == "lower")
        return self._settled(lambda: offset_by_time(_whole(self._queue(topic, queue_id)), at, boundary))

    def query_message(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: Moment | None = None,
        end: Moment | None = None,
        *,
        index_type: IndexType | None = None,
        compat: bool = False,
    ) -> QueryResult:
        """Find messages by key.

        All index files are looked at, also those that only the local store has; where one is missing, damaged, or does not
        reach so far, the records are gone over.  The real broker asks fewer (docs/tiered.md) and misses messages.

        Parameters
        ----------
        topic, key : str
        max_num : int
        begin, end : int or datetime, optional
            Store time range, inclusive and exact, as of `MessageStore.query_message`.
        index_type : {None, "U", "K", "T"}
            None: unique key or keys; "U" only the unique key, "K" only the keys, "T" the tag (found in the units, as
            index files here have no tags).
        compat : bool
            Answer as RocketMQ's index service of tiered storage (5.5.0): only files made between begin and end, keys compared
            by hash, times by whole seconds, ordered by queue and offset.

        Returns
        -------
        QueryResult
            Newest first, each once, every one checked against its topic and key; `truncated` when there are more.

        Raises
        ------
        ValueError
            A time looks like seconds; or there is no such `index_type`.
        CorruptionError
            A place cannot be looked at, and no `on_damage` was given.
        """
        selection = of_key(topic, key, max_num, begin, end, index_type)
        topic, key, max_num = selection.topic, selection.key, selection.max_num or 0
        if compat:
            return QueryResult(self._settled(lambda: self.flat_store.like_java(topic, key, max_num, *selection.times)))
        found = self.flat_store.find_messages(selection)
        return QueryResult(found[: max(max_num, 0)], len(found) > max(max_num, 0))

    # ------------------------------------------------------------------------------------------------------ columns

    def scan(
        self,
        columns: Iterable[str] | None = None,
        *,
        topic: str | Iterable[str] | None = None,
        queue_id: int | Iterable[int] | None = None,
        tags: str | Iterable[str] | None = None,
        begin: Moment | None = None,
        end: Moment | None = None,
        batch_size: int = 8192,
        use_threads: bool = True,
        views: bool = False,
        read_dictionary: Iterable[str] = (),
    ) -> pa.RecordBatchReader:
        """The messages as Arrow record batches, queue by queue in the order of their offsets; parameters as of `MessageStore.scan`.

        ``phy_offset`` is the offset in the tiered log of the message's queue.

        Raises
        ------
        ValueError, MissingDependencyError
            As of `MessageStore.scan`.
        CorruptionError
            While reading: after the batches before a place that cannot be read, if no `on_damage` was given.
        """
        selection = of_scan(topic, queue_id, tags, begin, end)
        options = ColumnOptions(columns, whole_number(batch_size, "batch_size"), views, read_dictionary)
        flat_store = self.flat_store
        flat_store.check_open()
        flat_store.refresh()
        scan = FlatScan(selection, options, 1, flat_store.check_open)
        return scan.read(flat_ranges(flat_store, selection), use_threads=use_threads)

    def get_table(
        self,
        topic: str,
        queue_id: int = 0,
        queue_offset: int = 0,
        max_num: int | None = None,
        tags: str | Iterable[str] | None = None,
        columns: Iterable[str] | None = None,
        *,
        views: bool = False,
    ) -> pa.Table:
        """Messages of a queue from `queue_offset` on as an Arrow table, as of `MessageStore.get_table`.

        Raises
        ------
        ValueError, MissingDependencyError, CorruptionError
            As of `scan`.
        """
        selection = of_queue(topic, queue_id, queue_offset, row_num(max_num), tags)
        options = table_options(selection, columns, views)

        def ask() -> pa.Table:
            queue = self._queue(selection.topic, selection.queue_id)
            return table_from(_whole(queue), selection, options, 1)

        return self._settled(ask)

    # ------------------------------------------------------------------------------------------------------- verify

    def gaps(self, begins: Mapping[tuple[str, int], int]) -> Iterator[Finding]:
        """Look for queue offsets that neither tiered storage nor the local store has any more.

        Parameters
        ----------
        begins : mapping of (str, int) to int
            By topic and queue id the first queue offset of each local queue.

        Yields
        ------
        Finding
            Of kind "gap".
        """
        # The broker uploads before it deletes, so what is listed after the local queues has all of it.
        self.flat_store.refresh()
        for part in flat_ranges(self.flat_store, Selection()):
            queue = part.queue
            begin, end = queue.max_queue_offset, begins.get((queue.topic, queue.queue_id), 0)
            if queue.min_queue_offset < begin < end:
                yield gap_finding(queue, begin, end)

    def verify(self, progress: Callable[[int, int], object] | None = None) -> Iterator[Finding]:
        """Look for everything that is wrong: files, units against records, index items against records; nothing is changed.

        Parameters
        ----------
        progress : callable, optional
            Called with (bytes of records done, bytes in all), now and then and at the end.

        Yields
        ------
        Finding
        """
        own = self.flat_store
        flat_store = FlatStore(
            own.path,
            own.store_path,
            cluster=own.cluster,
            broker=own.broker,
            on_damage=lambda finding: None,
            goes_on=True,
        )
        try:
            yield from verify_flat(flat_store, progress)
        finally:
            flat_store.close()


def _whole(queue: FlatQueue | None) -> Joined:
    # A queue of tiered storage alone.
    return Joined(() if queue is None else (Part(queue, queue.min_queue_offset, queue.max_queue_offset),))
