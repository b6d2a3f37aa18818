"""Appending a DataFrame to a store with ``df.write.format("rocketmq-store")``.

Owns the two steps of such a job.  Each task spools its rows as an Arrow file in a folder of the job below the store's
directory; then the driver opens the store for writing and puts the files in the order of the partitions, as one table.
Nothing is put unless every row can be stored.  It never writes from two processes and leaves nothing of a job that failed.

A store has one writer, so the rate is that of one process; `rmqstore.spark.bulk_load` makes a new store with many.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rmqstore.errors import StoreError
from rmqstore.spark.batches import without_marks
from rmqstore.spark.options import QUEUE_ID_MAX, boolean, check_names, number, store_config, store_path
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SPOOL_PREFIX", "StoreWriter"]

SPOOL_PREFIX = ".rmqstore-spark-"
"""How the folder of a job begins; it lies in the store's directory while the job runs."""

_WRITE = {"topic", "queue_id", "tags", "keep_timestamps"}


@dataclass
class SpooledRows(WriterCommitMessage):
    """What a task left: a file of the job's folder, none for a partition without rows."""

    partition: int
    name: str | None
    rows: int


class StoreWriter(DataSourceArrowWriter):
    """Appends rows; their columns are those of `MessageStore.put_table`.

    Parameters
    ----------
    schema : StructType
    overwrite : bool
        Refused.
    options : mapping of str
        ``topic``, ``queue_id``, ``tags``: one value for all rows, instead of a column.  ``keep_timestamps``: take the store
        timestamps from the rows.  A store that is not there yet is made with the given geometry, or RocketMQ's.

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
        """Spool the rows of one partition.  A task may run twice: each attempt has a file of its own, and Spark names one."""
        pa = import_pyarrow()
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        name = f"{partition:08d}-{uuid.uuid4().hex}.arrow"
        path = os.path.join(self.spool, name)
        rows = 0
        writer = None
        try:
            for batch in iterator:
                if writer is None:
                    writer = pa.ipc.new_file(path, batch.schema)
                writer.write_batch(batch)
                rows += batch.num_rows
            if writer is not None:
                writer.close()
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise
        return SpooledRows(partition, name if writer is not None else None, rows)

    def commit(self, messages: list[Any]) -> None:
        """Put what the tasks spooled, partition by partition.

        Raises
        ------
        StoreLockedError
            A broker or another process has the store open; nothing was changed.
        InvalidMessageError
            A row cannot be stored; nothing was put.
        """
        pa = import_pyarrow()
        spooled = sorted((each for each in messages if each is not None and each.name), key=lambda each: each.partition)
        try:
            with contextlib.ExitStack() as files:
                tables = []
                for each in spooled:
                    source = files.enter_context(pa.memory_map(os.path.join(self.spool, each.name)))
                    tables.append(pa.ipc.open_file(source).read_all())
                if tables:
                    self._put(pa.concat_tables(tables))
        finally:
            self._clear()

    def _put(self, table: pa.Table) -> None:
        table = without_marks(table, self.root)
        with MessageStore.open(self.root, config=self.config) as store:
            store.put_table(table, keep_timestamps=self.keep_timestamps, **self.literals)

    def abort(self, messages: list[Any]) -> None:
        """Clear up after a job that failed."""
        self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self.spool, ignore_errors=True)
        with contextlib.suppress(OSError):
            # If it was made for the job, and nothing else is in it.
            os.rmdir(self.root)
