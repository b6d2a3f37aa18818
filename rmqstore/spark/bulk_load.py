"""Bulk load: a new store from a DataFrame, written by many tasks, with the bytes that one process would write.

Owns where every record comes: which segment, which place in its queue.  Two passes over the rows: the first spools them
with the sizes of their records, the second encodes each segment as a whole, with `_rows.RowBatch`, as `put_table` does;
queues and index are then a rebuild of the new log.  It never writes into a store that is there, and what it makes has
its name only when it is whole: the work lies in a folder beside it, which is renamed at the end.

A task writes files of its own and names them last, so that it may run twice.  Everything but `bulk_load` is plain functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmqstore import _core
from rmqstore._core import Region
from rmqstore._dispatch import TopicTable
from rmqstore._rows import RowBatch
from rmqstore.config import StoreConfig, system_clock
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.durable import fsync_directory, make_directories
from rmqstore.files.listing import is_empty
from rmqstore.files.mapped_file import MappedFile, name_of_offset
from rmqstore.message import MAX_RETRY_TOPIC_LENGTH, MAX_TOPIC_LENGTH, host_to_bytes
from rmqstore.offline.rebuild import RebuildJob
from rmqstore.offline.rebuild_swap import delete_tree
from rmqstore.spark.batches import without_marks
from rmqstore.spark.mapper import Mapper, spark_mapper
from rmqstore.spark.rebuild import rebuild_with
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.message_store import MessageStore
from rmqstore.store.table_writing import TablePart, table_parts

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["BulkLoadReport", "bulk_load", "load_spooled"]

_BLANK_SIZE = int(_core.RecordLayout.BLANK_SIZE)
_ROWS = 8192
# Answers of `RowBatch.take_columns`.
_NEW_QUEUE = -2
_UNSOUND = -3

QueueKey = tuple[str, int]


@dataclass(slots=True)
class BulkLoadReport:
    """What a bulk load did.

    Attributes
    ----------
    path : str
        The new store.
    records, index_entries : int
    segments : int
        Files of the commit log.
    log_bytes : int
        Where the log ends.
    """

    path: str
    records: int = 0
    index_entries: int = 0
    segments: int = 0
    log_bytes: int = 0


@dataclass(frozen=True)
class LoadPlan:
    """What every task of a bulk load must know.

    Attributes
    ----------
    work : str
        The new store as long as it has not its name.
    config : StoreConfig
    store_timestamp : int or None
        The store time of all rows, ms since epoch; None takes it from the rows.
    """

    work: str
    config: StoreConfig
    store_timestamp: int | None

    @property
    def spool(self) -> str:
        """str: where the first pass leaves the rows."""
        return os.path.join(self.work, ".rmqstore-bulk-load")


@dataclass
class PartitionSummary:
    """What the first pass found in a partition.

    Attributes
    ----------
    partition : int
        Its place in the order of the rows.
    name : str
        How its files in the spool begin.
    rows : int
    largest : int
        Bytes of its largest record.
    first_timestamp, last_timestamp : int
        Store times, ms since epoch.
    queues : dict of (str, int) to int
        How many rows each queue gets.
    """

    partition: int
    name: str
    rows: int = 0
    largest: int = 0
    first_timestamp: int = 0
    last_timestamp: int = 0
    queues: dict[QueueKey, int] = field(default_factory=dict)


class RowRange(NamedTuple):
    """Rows of one partition that come into one segment.

    Attributes
    ----------
    name : str
        As of `PartitionSummary`.
    first, num : int
    queues : tuple of (str, int, int)
        Topic, queue id and the queue offset of the partition's first row in that queue.
    """

    name: str
    first: int
    num: int
    queues: tuple[tuple[str, int, int], ...]


class Segment(NamedTuple):
    """A segment to be written: the offset of its first byte, its rows, and whether a blank record closes it."""

    base: int
    ranges: tuple[RowRange, ...]
    closed: bool


# ----------------------------------------------------------------------------------------------------- rows as records


class _Rows:
    """Takes rows of tables as the core encodes them."""

    def __init__(self, config: StoreConfig):
        self.topics = TopicTable()
        max_topic = MAX_RETRY_TOPIC_LENGTH if config.auto_message_version_on_topic_len else MAX_TOPIC_LENGTH
        self.batch = RowBatch(
            self.topics,
            host_to_bytes(config.store_host),
            {},
            config.max_message_size,
            max_topic,
            config.enabled_append_prop_crc,
        )

    def take(self, part: TablePart, first: int) -> None:
        """Fill the batch with a part; `first` is the number of its first row for messages.

        Raises
        ------
        InvalidMessageError
            A row cannot be stored, or takes more than encoding it (transactions, delays, inner batches, further queues).
        """
        rows = self.batch
        rows.clear()
        table = part.rows()
        at, why = rows.take_columns(table, 0)
        while why == _NEW_QUEUE:
            self._check(part, at, first)
            topic = self.topics.add(part.topic(at).encode())
            self.topics.add_queue(topic, part.queue_id(at))
            at, why = rows.take_columns(table, at)
        if why == _UNSOUND:
            raise InvalidMessageError(f"row {first + at}: an Arrow array leads outside itself; validate the table")
        if why:
            self._check(part, at, first)
            raise InvalidMessageError(
                f"row {first + at} is not a plain message: transactions, delayed messages, inner batches and messages of "
                "further queues cannot be bulk-loaded; put them with MessageStore.put_table"
            )

    def _check(self, part: TablePart, at: int, first: int) -> None:
        try:
            part.message(at).validate()
        except InvalidMessageError as error:
            raise InvalidMessageError(f"row {first + at}: {error.message}", error.path) from None

    def counts(self) -> dict[QueueKey, int]:
        """How many rows of the batch each queue gets."""
        return {self.key(number): count for number, count in self.batch.queues()}

    def key(self, number: int) -> QueueKey:
        """Topic and queue id of a queue's number."""
        topic, queue_id = self.topics.queues[number]
        return self.topics.topics[topic].decode(), queue_id


def _parts(plan: LoadPlan, batch: pa.RecordBatch) -> list[TablePart]:
    return table_parts(batch, {}, keep_timestamps=plan.store_timestamp is None, max_rows=_ROWS)


# ------------------------------------------------------------------------------------------------------ pass 1: the sizes


def spool_rows(plan: LoadPlan, partition: int, batches: Iterable[pa.RecordBatch]) -> PartitionSummary:
    """Pass 1 for one partition: the rows into an Arrow file, beside it where their records end and how many each queue gets.

    Raises
    ------
    InvalidMessageError
        A row cannot be stored, or its store time lies before the one of the row before.
    """
    pa = import_pyarrow()
    summary = PartitionSummary(partition, f"{partition:08d}-{uuid.uuid4().hex}")
    path = os.path.join(plan.spool, summary.name)
    rows = _Rows(plan.config)
    sizes: list[np.ndarray] = []
    # Of every batch of the file: the number of its first row, and how many rows of the partition each queue got before.
    places: list[tuple[int, list[tuple[str, int, int]]]] = []
    writer = None
    try:
        for batch in batches:
            batch = without_marks(batch)
            if not batch.num_rows:
                continue
            if writer is None:
                writer = pa.ipc.new_file(path + ".arrow", batch.schema)
            places.append((summary.rows, [(*key, count) for key, count in summary.queues.items()]))
            for part in _parts(plan, batch):
                rows.take(part, summary.rows)
                sizes.append(rows.batch.columns()[3])
                for key, count in rows.counts().items():
                    summary.queues[key] = summary.queues.get(key, 0) + count
                _note_times(summary, part.store_timestamps())
                summary.rows += part.num
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
            ends = np.cumsum(np.concatenate(sizes), dtype=np.int64)
            summary.largest = max(int(part.max()) for part in sizes if len(part))
            ends.tofile(path + ".ends")
            with open(path + ".json", "w", encoding="utf-8") as file:
                json.dump(places, file)
    except BaseException:
        for suffix in (".arrow", ".ends", ".json"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + suffix)
        raise
    return summary


def _note_times(summary: PartitionSummary, times: np.ndarray) -> None:
    if not len(times):
        return
    if not summary.rows:
        summary.first_timestamp = summary.last_timestamp = int(times[0])
    if times[0] < summary.last_timestamp or (times[1:] < times[:-1]).any():
        raise InvalidMessageError(
            f"store timestamps fall after row {summary.rows} of partition {summary.partition}; order_by must begin with "
            "store_timestamp, or leave that column out"
        )
    summary.last_timestamp = int(times[-1])


# ----------------------------------------------------------------------------------------------------------- the layout


def lay_out(plan: LoadPlan, summaries: Sequence[PartitionSummary]) -> tuple[list[Segment], int]:
    """Say which rows come into which segment; some reads in the spooled sizes for every segment, whatever their number.

    Returns
    -------
    (list of Segment, int)
        The segments and where the log ends.

    Raises
    ------
    InvalidMessageError
        A record does not fit an empty segment, or store times fall from one partition to the next.
    """
    size = plan.config.mapped_file_size_commit_log
    following: dict[QueueKey, int] = {}
    segments: list[Segment] = []
    ranges: list[RowRange] = []
    pos, last_timestamp = 0, None
    for summary in sorted(summaries, key=lambda each: each.partition):
        if not summary.rows:
            continue
        if summary.largest + _BLANK_SIZE > size:
            raise InvalidMessageError(
                f"a record takes {summary.largest} bytes, a segment of {size} bytes holds at most {size - _BLANK_SIZE}: "
                "shorten it, or load with larger segments"
            )
        if plan.store_timestamp is None:
            if last_timestamp is not None and summary.first_timestamp < last_timestamp:
                raise InvalidMessageError(
                    f"store timestamps fall at the start of partition {summary.partition}; order_by must begin with "
                    "store_timestamp, or leave that column out"
                )
            last_timestamp = summary.last_timestamp
        queues = tuple((*key, following.get(key, 0)) for key in summary.queues)
        ends = np.memmap(os.path.join(plan.spool, summary.name + ".ends"), np.int64, "r")
        at = 0
        while at < summary.rows:
            before = int(ends[at - 1]) if at else 0
            until = int(np.searchsorted(ends, size - _BLANK_SIZE - pos + before, side="right"))
            if until > at:
                ranges.append(RowRange(summary.name, at, until - at, queues))
                pos += int(ends[until - 1]) - before
                at = until
            if at < summary.rows:
                segments.append(Segment(len(segments) * size, tuple(ranges), True))
                ranges, pos = [], 0
        for key, count in summary.queues.items():
            following[key] = following.get(key, 0) + count
    if ranges:
        segments.append(Segment(len(segments) * size, tuple(ranges), False))
    return segments, (len(segments) - 1) * size + pos if segments else 0


# ---------------------------------------------------------------------------------------------------- pass 2: the records


def write_segment(plan: LoadPlan, segment: Segment) -> int:
    """Pass 2 for one segment: encode its rows; how many."""
    target = os.path.join(plan.work, "commitlog", name_of_offset(segment.base))
    written = sum(each.num for each in segment.ranges)
    if os.path.exists(target):
        return written
    size = plan.config.mapped_file_size_commit_log
    made = MappedFile.allocate(plan.spool, size)
    try:
        fd = os.open(made, os.O_RDWR | os.O_CLOEXEC)
        try:
            region = Region.map(fd, size, True)
        finally:
            os.close(fd)
        pos = 0
        for each in segment.ranges:
            pos = _encode(plan, region, pos, segment.base, each)
        if segment.closed:
            _core.write_blank(region, pos)
        region.flush()
        region.close()
        os.rename(made, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
        raise
    return written


def _encode(plan: LoadPlan, region: Region, pos: int, base: int, rows: RowRange) -> int:
    # The position after the last record.
    pa = import_pyarrow()
    path = os.path.join(plan.spool, rows.name)
    with open(path + ".json", encoding="utf-8") as file:
        places = json.load(file)
    starts = [first for first, _ in places]
    number = int(np.searchsorted(starts, rows.first, side="right")) - 1
    following = {(topic, queue_id): offset for topic, queue_id, offset in rows.queues}
    for topic, queue_id, count in places[number][1]:
        following[topic, queue_id] += count
    taker = _Rows(plan.config)
    at, end = starts[number], rows.first + rows.num
    with pa.memory_map(path + ".arrow") as source:
        batches = pa.ipc.open_file(source)
        while at < end:
            batch = batches.get_batch(number)
            # What lies before the first row only counts.
            for part in _parts(plan, batch.slice(0, max(rows.first - at, 0))):
                taker.take(part, at)
                _count(taker, following)
            skip = max(rows.first - at, 0)
            chosen = batch.slice(skip, min(end - at, batch.num_rows) - skip)
            for part in _parts(plan, chosen):
                taker.take(part, at)
                wanted = {queue: following[taker.key(queue)] for queue, _ in taker.batch.queues()}
                taker.batch.number(wanted, plan.store_timestamp or 0, part.store_timestamps())
                done, pos = taker.batch.encode(region, pos, base, 0)
                if done != part.num:
                    raise StoreError(
                        "a segment is too small for the rows that were laid out for it; please report this", path
                    )
                _count(taker, following)
            at += batch.num_rows
            number += 1
    return pos


def _count(rows: _Rows, following: dict[QueueKey, int]) -> None:
    for key, count in rows.counts().items():
        following[key] += count


# ------------------------------------------------------------------------------------------------------------- the driver


@contextlib.contextmanager
def _new_store(path: str) -> Iterator[str]:
    # The folder in which the store is made; it gets its name at the end, or goes.
    root = os.path.abspath(path)
    if os.path.exists(root) and not (os.path.isdir(root) and is_empty(root)):
        raise StoreError(
            "there is something already; bulk_load makes a new store, df.write.format('rocketmq-store') appends to one",
            root,
        )
    make_directories(os.path.dirname(root))
    work = f"{root}.rmqstore-{uuid.uuid4().hex}"
    os.mkdir(work)
    try:
        yield work
        # An empty directory may be there: a rename takes its place.
        os.rename(work, root)
        fsync_directory(os.path.dirname(root))
    except BaseException:
        delete_tree(work, ignore_errors=True)
        raise


def start_plan(work: str, config: StoreConfig | None, *, keep_timestamps: bool) -> LoadPlan:
    """The plan of a load into `work`, which is there and empty.

    Parameters
    ----------
    keep_timestamps : bool
        Take the store timestamps from the rows; otherwise all have the time of now.

    Raises
    ------
    StoreError
        The configuration asks for what only one process can give.
    """
    config = StoreConfig() if config is None else config
    if config.generate_unique_key:
        raise StoreError(
            "generate_unique_key numbers messages one by one; give UNIQ_KEY in the properties instead", work
        )
    now = None if keep_timestamps else config.clock()
    plan = LoadPlan(work, dataclasses.replace(config, clock=system_clock), now)
    os.mkdir(plan.spool)
    os.mkdir(os.path.join(work, "commitlog"))
    return plan


def load_spooled(mapper: Mapper, plan: LoadPlan, summaries: Sequence[PartitionSummary]) -> BulkLoadReport:
    """Make the store of the spooled rows in `plan.work`: log, queues, index, checkpoint."""
    report = BulkLoadReport(plan.work)
    segments, report.log_bytes = lay_out(plan, summaries)
    report.segments, report.records = len(segments), sum(summary.rows for summary in summaries)
    if sum(mapper(write_segment, plan, segments)) != report.records:
        raise StoreError("not every row was written; please report this", plan.work)
    delete_tree(plan.spool)
    fsync_directory(os.path.join(plan.work, "commitlog"))
    if segments:
        what = ("index", "consumequeue") if plan.config.message_index_enable else ("consumequeue",)
        rebuilt = rebuild_with(mapper, RebuildJob.of(plan.work, what, plan.config))
        report.index_entries = rebuilt.index_entries
        if rebuilt.records != report.records or rebuilt.damage:
            raise StoreError(
                f"{rebuilt.records} of {report.records} records could be read again ({rebuilt.damage[:1]})", plan.work
            )
    last = max((summary.last_timestamp for summary in summaries if summary.rows), default=0)
    checkpoint = Checkpoint.load(os.path.join(plan.work, "checkpoint"))
    checkpoint.physic_msg_timestamp = last if plan.store_timestamp is None else plan.store_timestamp
    checkpoint.flush()
    # The store itself writes what else a store has; opened in order it reads no more than its newest segment.
    with MessageStore.open(plan.work, config=plan.config):
        pass
    # Nobody has confirmed anything of a new store.
    checkpoint = Checkpoint.load(os.path.join(plan.work, "checkpoint"))
    checkpoint.confirm_phy_offset = 0
    checkpoint.flush()
    return report


# -------------------------------------------------------------------------------------------------------------- on Spark


def bulk_load(
    df: DataFrame,
    path: str | os.PathLike[str],
    config: StoreConfig | None = None,
    order_by: Sequence[str] = ("store_timestamp",),
    *,
    parallelism: int | None = None,
) -> BulkLoadReport:
    """Write a DataFrame as a new store, with many tasks; the bytes are those of one process that puts the same rows.

    Every executor must see `path` under the same name, and so must the driver: a local disk, NFS, CephFS, Lustre, but no
    object store.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Columns as of `MessageStore.put_table`; one of timestamps ``store_timestamp`` gives the store times.  Without it all
        messages are stored at the time of the call.
    path : path
        The new store; nothing, or an empty directory, may be there.
    config : StoreConfig, optional
        Its geometry; by default RocketMQ's.
    order_by : sequence of str
        Columns by which the log is ordered; it begins with ``store_timestamp`` where that is a column.  An empty one takes
        the order that the DataFrame has.
    parallelism : int, optional
        How many tasks run at once; by default what Spark says.

    Returns
    -------
    BulkLoadReport

    Raises
    ------
    StoreError
        Something is at `path` already.
    InvalidMessageError
        A row cannot be stored, or store times fall; there is no store then.
    ValueError
        A column of `order_by` is not there.

    Notes
    -----
    Rows that are equal in all columns of `order_by` may come in any order: add columns that tell them apart where the same
    bytes are wanted again.  Transactions, delayed messages, inner batches and messages of further queues are refused.
    """
    missing = [name for name in order_by if name not in df.columns]
    if missing:
        raise ValueError(f"there is no column {', '.join(missing)} to order by; give order_by")
    ordered = df.orderBy(*order_by) if order_by else df
    spark = df.sparkSession
    with _new_store(os.fspath(path)) as work:
        plan = start_plan(work, config, keep_timestamps="store_timestamp" in df.columns)
        summaries = _spool(ordered, plan)
        report = load_spooled(spark_mapper(spark, parallelism), plan, summaries)
    report.path = os.path.abspath(path)
    return report


def _spool(ordered: DataFrame, plan: LoadPlan) -> list[PartitionSummary]:
    def run(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        from rmqstore.spark.task import spare_collector

        spare_collector()
        context = TaskContext.get()
        assert context is not None
        answer: tuple[StoreError | None, PartitionSummary | None]
        try:
            answer = None, spool_rows(plan, context.partitionId(), batches)
        except StoreError as error:
            answer = error, None
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(answer)], pa.binary())], names=["answer"])

    answers = [pickle.loads(bytes(row["answer"])) for row in ordered.mapInArrow(run, "answer binary").collect()]
    for error, _ in answers:
        if error is not None:
            raise error
    return [summary for _, summary in answers]
