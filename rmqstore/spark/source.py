"""The data source ``rocketmq-store``: what Spark calls by that name.

Owns the names and which reader or writer answers for them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from rmqstore.spark.options import CORRUPT_COLUMN, FORMAT, ReadOptions
from rmqstore.spark.rabbitmq import QueueSource
from rmqstore.spark.reader import FilteringStoreReader, StoreReader, spark_schema
from rmqstore.spark.stream import StoreStreamReader
from rmqstore.store.columns import DEFAULT_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["FORMAT", "FilteringStoreSource", "StoreSource", "ensure_registered", "register"]

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


_registered: weakref.WeakSet[SparkSession] = weakref.WeakSet()


def register(spark: SparkSession, *, filter_pushdown: bool = False) -> None:
    """Make the formats known to a session: ``rocketmq-store`` to read, follow and write, ``rabbitmq-queue`` to read.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        The environment that ``PYSPARK_PYTHON`` names, on every node, must hold rmqstore.
    filter_pushdown : bool
        Take filters on topic, queue_id, tags, store_timestamp and phy_offset from queries, besides the options.  It needs
        ``spark.sql.python.filterPushdown.enabled``.  Then use each loaded DataFrame in one place of one query: PySpark 4.3
        plans a Python source once for each ``load()``, so that whatever else is made of the same DataFrame silently lacks
        the rows that the first filter left out.  `load` again for each use, or choose by options, which are always exact.

    Raises
    ------
    ValueError
        `filter_pushdown` without the setting that it needs.
    """
    if filter_pushdown and str(spark.conf.get(PUSHDOWN, "false")).lower() != "true":
        raise ValueError(f"filter_pushdown needs the setting {PUSHDOWN}=true, which Spark has not; set it first")
    spark.dataSource.register(FilteringStoreSource if filter_pushdown else StoreSource)
    spark.dataSource.register(QueueSource)
    _registered.add(spark)


def ensure_registered(spark: SparkSession) -> None:
    """`register` unless that was done for this session; what was chosen there stays, and Spark has nothing to warn of."""
    if spark not in _registered:
        register(spark)


class StoreSource(DataSource):
    """The data source ``rocketmq-store``; `register` makes it known."""

    @classmethod
    def name(cls) -> str:
        """str: ``rocketmq-store``."""
        return FORMAT

    def schema(self) -> StructType:
        """The columns that are asked for by option ``columns``, or all of a scan; ``_corrupt`` too with ``corrupt=report``."""
        options = ReadOptions.parse(self.options)
        columns = DEFAULT_COLUMNS if options.columns is None else options.columns
        if options.corrupt == "report" and CORRUPT_COLUMN not in columns:
            columns = (*columns, CORRUPT_COLUMN)
        return spark_schema(columns, damage=options.corrupt == "report")

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of a batch job."""
        return StoreReader(ReadOptions.parse(self.options), schema, self.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """The reader that follows a growing store."""
        return StoreStreamReader(ReadOptions.parse(self.options), schema, self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The writer of a batch job."""
        from rmqstore.spark.writer import StoreWriter

        return StoreWriter(schema, overwrite, self.options)


class FilteringStoreSource(StoreSource):
    """`StoreSource` where Spark may push filters down."""

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of a batch job."""
        return FilteringStoreReader(ReadOptions.parse(self.options), schema, self.options)
