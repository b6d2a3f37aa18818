"""Writing a DataFrame: appending with ``df.write.format("rocketmq-store")``, and a new store with `bulk_load`.

Owns the two steps of both.  Each task spools its rows as an Arrow file in a folder of the job below the store's directory;
then the driver opens the store for writing and puts the files in the order of the partitions.  An append puts nothing unless
every row can be stored.  A new store gets its name only when it is complete.  It never writes from two processes and leaves
nothing of a job that failed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rmqstore.config import StoreConfig
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.files.durable import fsync_directory, make_directories
from rmqstore.files.listing import is_empty
from rmqstore.spark.options import (
    CORRUPT_COLUMN,
    QUEUE_ID_MAX,
    boolean,
    check_names,
    number,
    store_config,
    store_path,
)
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["SPOOL_PREFIX", "BulkLoadReport", "StoreWriter", "bulk_load"]

SPOOL_PREFIX = ".rmqstore-spark-"
"""How the name of a job's folder begins; it is in the store's directory while the job runs."""

_WRITE = {"topic", "queue_id", "tags", "keep_timestamps"}


@dataclass
class SpooledRows(WriterCommitMessage):
    """The result of a task: a file in the job's folder, or None for a partition without rows."""

    partition: int
    name: str | None


def spool_rows(spool: str, batches: Iterable[pa.RecordBatch]) -> SpooledRows:
    """Write the rows of a partition into the folder `spool`; each attempt of a task has a file of its own."""
    pa = import_pyarrow()
    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    name = f"{partition:08d}-{uuid.uuid4().hex}.arrow"
    path = os.path.join(spool, name)
    writer = None
    try:
        for batch in batches:
            if writer is None:
                writer = pa.ipc.new_file(path, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise
    return SpooledRows(partition, None if writer is None else name)


@contextlib.contextmanager
def spooled_tables(spool: str, spooled: Iterable[SpooledRows | None], root: str) -> Iterator[list[pa.Table]]:
    """Map the spooled rows, in the order of the partitions and without ``_corrupt``; raise if a row is marked there."""
    pa = import_pyarrow()
    named = sorted((each.partition, each.name) for each in spooled if each is not None and each.name is not None)
    tables = []
    with contextlib.ExitStack() as files:
        for _, name in named:
            table = pa.ipc.open_file(files.enter_context(pa.memory_map(os.path.join(spool, name)))).read_all()
            if CORRUPT_COLUMN in table.column_names:
                if table.column(CORRUPT_COLUMN).null_count < table.num_rows:
                    raise InvalidMessageError(
                        f"rows are marked in column {CORRUPT_COLUMN}; leave them out: where({CORRUPT_COLUMN} is null)", root
                    )
                table = table.drop_columns([CORRUPT_COLUMN])
            tables.append(table)
        yield tables


class StoreWriter(DataSourceArrowWriter):
    """A writer that appends rows; their columns are those of `MessageStore.put_table`.

    Options ``topic``, ``queue_id`` and ``tags`` have one value for all rows, instead of a column; ``keep_timestamps`` takes
    the store timestamps from the rows.  A store that does not exist is created with the given geometry, or RocketMQ's.

    Raises
    ------
    StoreError
        Overwriting was asked for, or an option does not exist or makes no sense.
    """

    def __init__(self, schema: StructType, overwrite: bool, options: Mapping[str, str]):
        self.root = os.path.abspath(store_path(options))
        if overwrite:
            raise StoreError(
                "a store is only ever appended to: use mode('append'), or rmqstore.spark.bulk_load for a new store",
                self.root,
            )
        check_names(options, _WRITE)
        self.config = store_config(self.root, options)
        self.literals: dict[str, Any] = {name: options[name] for name in ("topic", "tags") if name in options}
        if "queue_id" in options:
            self.literals["queue_id"] = number("queue_id", options["queue_id"], high=QUEUE_ID_MAX)
        for name in self.literals:
            if name in schema.fieldNames():
                raise StoreError(f"{name} is a column and an option; give one of them", self.root)
        self.keep_timestamps = boolean("keep_timestamps", options.get("keep_timestamps", "false"))
        self.spool = os.path.join(self.root, SPOOL_PREFIX + uuid.uuid4().hex)
        # Made here and by no task, so that an attempt which outlives the job cannot bring it back.
        os.makedirs(self.spool)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SpooledRows:
        """Spool the rows of one partition."""
        return spool_rows(self.spool, iterator)

    def commit(self, messages: list[Any]) -> None:
        """Put what the tasks spooled, partition by partition.

        Raises
        ------
        StoreLockedError
            A broker or another process has the store open; nothing was changed.
        InvalidMessageError
            A row cannot be stored; nothing was put.
        """
        try:
            with spooled_tables(self.spool, messages, self.root) as tables:
                if tables:
                    table = import_pyarrow().concat_tables(tables)
                    with MessageStore.open(self.root, config=self.config) as store:
                        store.put_table(table, keep_timestamps=self.keep_timestamps, **self.literals)
        finally:
            self.abort(messages)

    def abort(self, messages: list[Any]) -> None:
        """Delete what the job spooled."""
        shutil.rmtree(self.spool, ignore_errors=True)
        with contextlib.suppress(OSError):
            # If it was made for the job, and nothing else is in it.
            os.rmdir(self.root)


@dataclass(frozen=True)
class BulkLoadReport:
    """The result of a bulk load.

    Attributes
    ----------
    path : str
        The new store.
    records : int
    segments : int
        Files of the commit log.
    log_bytes : int
        End of the log, in bytes.
    """

    path: str
    records: int
    segments: int
    log_bytes: int


def bulk_load(
    df: DataFrame,
    path: str | os.PathLike[str],
    config: StoreConfig | None = None,
    order_by: Sequence[str] = ("store_timestamp",),
) -> BulkLoadReport:
    """Write a DataFrame as a new store; the bytes are those of `MessageStore.put_table` with the same rows in this order.

    Spark sorts the rows and spools them below `path`; the driver puts them.  Every executor must see `path` under the same
    name as the driver does.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Columns as in `MessageStore.put_table`; one of timestamps ``store_timestamp`` gives the store times.  Without it
        messages are stored at the time at which they are put.
    path : path
        The new store; nothing, or an empty directory, may be there.
    config : StoreConfig, optional
        Its geometry; by default RocketMQ's.
    order_by : sequence of str
        Columns by which the log is ordered; it begins with ``store_timestamp`` where that is a column.  An empty one takes
        the order that the DataFrame has.

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
    bytes are wanted again.
    """
    missing = [name for name in order_by if name not in df.columns]
    if missing:
        raise ValueError(f"there is no column {', '.join(missing)} to order by; give order_by")
    root = os.path.abspath(path)
    if os.path.exists(root) and not (os.path.isdir(root) and is_empty(root)):
        raise StoreError(
            "there is something already; bulk_load makes a new store, df.write.format('rocketmq-store') appends to one",
            root,
        )
    make_directories(os.path.dirname(root))
    work = f"{root}.rmqstore-{uuid.uuid4().hex}"
    spool = os.path.join(work, SPOOL_PREFIX + "load")
    os.makedirs(spool)
    try:
        spooled = _spool(df.orderBy(*order_by) if order_by else df, spool)
        report = _put_spooled(spooled, spool, work, config, keep_timestamps="store_timestamp" in df.columns)
        shutil.rmtree(spool)
        # An empty directory may be there: a rename takes its place.
        os.rename(work, root)
        fsync_directory(os.path.dirname(root))
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return BulkLoadReport(root, *report)


def _spool(df: DataFrame, spool: str) -> list[SpooledRows]:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pa = import_pyarrow()
        yield pa.RecordBatch.from_pydict({"spooled": [pickle.dumps(spool_rows(spool, batches))]})

    return [pickle.loads(bytes(row["spooled"])) for row in df.mapInArrow(run, "spooled binary").collect()]


def _put_spooled(
    spooled: Sequence[SpooledRows], spool: str, work: str, config: StoreConfig | None, *, keep_timestamps: bool
) -> tuple[int, int, int]:
    # Table by table, so that memory follows the partition and not the whole; nothing is left if one fails.
    records = 0
    with spooled_tables(spool, spooled, work) as tables, MessageStore.open(work, config=config) as store:
        for table in tables:
            store.put_table(table, keep_timestamps=keep_timestamps)
            records += table.num_rows
        return records, len(store.commit_log.files.offsets), store.commit_log.max_offset
