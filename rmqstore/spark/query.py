"""Messages by key, on a cluster: the index files of a store, asked for a DataFrame of keys.

Owns how the work is cut: keys are arranged by hash slot, so that a task reads one range of each file's slots.  Every hit is
compared with its record by `rmqstore.store.placed_columns.key_table`, so that no foreign key of the same hash is among them.
It changes nothing on disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from rmqstore._columns import KeyTexts
from rmqstore.arguments import DEFAULT_LOG_BYTES, IndexType, Moment
from rmqstore.config import StoreConfig
from rmqstore.errors import StoreChangedError
from rmqstore.index.index_service import IndexService
from rmqstore.index.log_index import LogIndex
from rmqstore.selection import Selection
from rmqstore.spark.batches import in_spark_layout, spark_arrow_schema
from rmqstore.spark.plan import LogPlan
from rmqstore.spark.reader import spark_schema
from rmqstore.spark.tasks import spare_collector
from rmqstore.store.columns import DEFAULT_COLUMNS, ColumnOptions, chosen_columns, import_pyarrow
from rmqstore.store.placed_columns import AskedKeys, key_table, text_buffers

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

__all__ = ["query"]

logger = logging.getLogger(__name__)

_KEYS_AT_ONCE = 4096


@dataclass(frozen=True)
class _KeyJob:
    """The part of a query that every task needs; pickled with the function that it runs.

    Attributes
    ----------
    plan : LogPlan
    files : list of str
        Names of the index files when the query was made.
    columns : tuple of str
    selection : Selection
        Store times, kind of key, and the number of messages of a key.
    with_log : bool
        The index files leave out a part of the log, which is searched too.
    """

    plan: LogPlan
    files: list[str]
    columns: tuple[str, ...]
    selection: Selection
    with_log: bool

    def batches(self, keys: list[str], topics: list[str]) -> Iterator[pa.RecordBatch]:
        """Look up keys, each with its topic."""
        spare_collector()
        pa, schema = import_pyarrow(), spark_arrow_schema(self.columns)
        log = self.plan.open()
        index_service = IndexService(self.plan.root, self.plan.config, read_only=True)
        try:
            index_service.load()
            # A frame is read whenever its rows are asked for.  Retention takes the oldest files; nothing else may.
            left = [name for name in self.files if name in index_service.names]
            if self.files and (not left or left != self.files[-len(left) :]):
                raise StoreChangedError(
                    "the index files were replaced since the query was made; repeat the query", index_service.path
                )
            index_service.take(left)
            index = LogIndex(self.plan.root, log, index_service)
            if self.with_log:
                index.cover(DEFAULT_LOG_BYTES)
            for first in range(0, len(keys), _KEYS_AT_ONCE):
                part = slice(first, first + _KEYS_AT_ONCE)
                asked = AskedKeys(
                    pa.array(keys[part], pa.string()), pa.array(topics[part], pa.string()), self.selection
                )
                table = key_table(log, index, asked, ColumnOptions(self.columns))
                while index_service.note_damage():
                    # Search the log for entries that a damaged file hides.
                    LogIndex(self.plan.root, log, index_service).cover(DEFAULT_LOG_BYTES)
                    table = key_table(log, index, asked, ColumnOptions(self.columns))
                for batch in table.combine_chunks().to_batches():
                    laid_out = in_spark_layout(batch.select(list(self.columns)), schema)
                    arrays = [batch.column("key"), *laid_out.columns]
                    yield pa.RecordBatch.from_arrays(arrays, names=["key", *self.columns])
        finally:
            index_service.close()
            log.close()


def query(
    spark: SparkSession,
    path: str | os.PathLike[str],
    topic: str | None,
    keys: Iterable[str] | DataFrame,
    columns: Iterable[str] | None = None,
    *,
    max_num: int = 64,
    begin: Moment | None = None,
    end: Moment | None = None,
    index_type: IndexType | None = None,
    config: StoreConfig | None = None,
) -> DataFrame:
    """Find messages by their keys, through the index files; exact hits only.

    Each task searches up to 1 GiB of the log that the index files do not cover; if there is more, a warning is logged.
    There are as many tasks as shuffles have (``spark.sql.shuffle.partitions``).

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
    path : path
        The store's directory, the same on every node.
    topic : str or None
        The topic of all keys; None takes it from a column ``topic`` of `keys`.
    keys : iterable of str, or DataFrame
        Keys, or a DataFrame with a column ``key``.  A key that comes twice is looked up once.
    columns : iterable of str, optional
        As in a scan.
    max_num : int
        The newest messages of a key, at most this many.
    begin, end : int or datetime, optional
        Store time range, inclusive and exact: ms since epoch, or a `datetime` (aware, or naive as local time).
    index_type : {None, "U", "K", "T"}
        As in `MessageStore.query_message`: keys and unique keys, one of both, or tags.
    config : StoreConfig, optional
        By default `StoreConfig.infer`.

    Returns
    -------
    DataFrame
        The column ``key``, then the asked ones; without order.  A key without messages has no row.  The frame asks the index
        files that were there when it was made: reading it after they were replaced (`rebuild`) is a `StoreChangedError`.

    Raises
    ------
    TypeError, ValueError
        Keys that are not text, a column that does not exist, an index type that does not exist.
    StoreError
        There is no such store, or its geometry is unclear.
    """
    selection = Selection(begin=begin, end=end, index_type=index_type, max_num=max_num).check_times()
    names = DEFAULT_COLUMNS if columns is None else chosen_columns(columns)
    if not isinstance(keys, DataFrame):
        if topic is None:
            raise ValueError("topic is None, which needs a DataFrame of keys with a column topic")
        chosen = [keys] if isinstance(keys, str) else list(keys)
        for key in chosen:
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not text: give str")
        keys = spark.createDataFrame([(key,) for key in chosen], "key string")
    plan = LogPlan.of(path, config)
    index_service = IndexService(plan.root, plan.config, read_only=True)
    index_service.load()
    files = list(index_service.names)
    with_log = _leaves_out(plan, index_service)
    plan.warn_of_lost()
    return _by_slot(keys, topic, _KeyJob(plan, files, names, selection, with_log))


def _leaves_out(plan: LogPlan, index_service: IndexService) -> bool:
    # True if the index files leave out a part of the log; warns if that is more than will be searched.
    log = plan.open()
    try:
        stretches = LogIndex(plan.root, log, index_service).stretches()
    finally:
        log.close()
        index_service.close()
    size = sum(end - begin for begin, end in stretches)
    if size > DEFAULT_LOG_BYTES:
        logger.warning(
            "%s: the index does not cover %d bytes of the log, from phy offset %d to %d; the newest %d bytes of these are "
            "searched, so that keys of older messages may be missing. rmqstore rebuild --what index rebuilds the index",
            plan.root, size, stretches[0][0], stretches[-1][1], DEFAULT_LOG_BYTES,
        )  # fmt: skip
    return bool(stretches)


def _by_slot(keys: DataFrame, topic: str | None, job: _KeyJob) -> DataFrame:
    chosen = keys.select("key", (F.col("topic") if topic is None else F.lit(topic)).alias("topic")).dropna()
    slot_num, by_tag = job.plan.config.max_hash_slot_num, job.selection.index_type == "T"
    with_slot = StructType([*chosen.schema.fields, StructField("_slot", IntegerType())])
    found = StructType([StructField("key", StringType()), *spark_schema(job.columns).fields])

    def add_slot(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pa = import_pyarrow()
        for batch in batches:
            hashes = KeyTexts(*text_buffers(batch.column(0)), *text_buffers(batch.column(1))).hashes(by_tag)
            arrays = [*batch.columns, pa.array(hashes % slot_num, pa.int32())]
            yield pa.RecordBatch.from_arrays(arrays, names=["key", "topic", "_slot"])

    def look_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from job.batches(batch.column(0).to_pylist(), batch.column(1).to_pylist())

    slots = chosen.dropDuplicates().mapInArrow(add_slot, with_slot)
    return slots.repartitionByRange("_slot").sortWithinPartitions("_slot").mapInArrow(look_up, found)
