"""The data source ``rocketmq-store``: its names, and which reader or writer Spark gets."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, DataSourceWriter
from pyspark.sql.types import StructType

from rmqstore.spark.options import CORRUPT_COLUMN, FORMAT, ReadOptions
from rmqstore.spark.rabbitmq import QueueSource
from rmqstore.spark.reader import StoreReader, StoreStreamReader, spark_schema
from rmqstore.store.columns import DEFAULT_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["FORMAT", "StoreSource", "ensure_registered", "register"]

_registered: weakref.WeakSet[SparkSession] = weakref.WeakSet()


def register(spark: SparkSession) -> None:
    """Register the formats in a session: ``rocketmq-store`` to read, follow and write, ``rabbitmq-queue`` to read.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        The environment that ``PYSPARK_PYTHON`` names, on every node, must hold rmqstore.
    """
    spark.dataSource.register(StoreSource)
    spark.dataSource.register(QueueSource)
    _registered.add(spark)


def ensure_registered(spark: SparkSession) -> None:
    """Call `register` unless that was done for this session: Spark warns of a second time."""
    if spark not in _registered:
        register(spark)


class StoreSource(DataSource):
    """The data source ``rocketmq-store``; `register` makes it known."""

    @classmethod
    def name(cls) -> str:
        """Return ``rocketmq-store``."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the schema of option ``columns``, or of a scan; with ``_corrupt`` if ``corrupt=report``."""
        options = ReadOptions.parse(self.options)
        columns = DEFAULT_COLUMNS if options.columns is None else options.columns
        if options.corrupt == "report" and CORRUPT_COLUMN not in columns:
            columns = (*columns, CORRUPT_COLUMN)
        return spark_schema(columns, damage=options.corrupt == "report")

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch job."""
        return StoreReader(ReadOptions.parse(self.options), schema, self.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader that follows a growing store."""
        return StoreStreamReader(ReadOptions.parse(self.options), schema, self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch job."""
        from rmqstore.spark.writer import StoreWriter

        return StoreWriter(schema, overwrite, self.options)
