"""Reading a store as a Spark DataFrame: the schema, the partitions, and the record batches of each.

Owns what Spark asks of the reader of a batch, and which filters it answers by itself.  It never decodes a record (`batches`
does, with the compiled core) and changes nothing on disk.

The end of the log is fixed when Spark plans a DataFrame, once for each ``load()`` (PySpark 4.3) or for each job (4.0): what
a writer appends afterwards belongs to the next one.  A task opens the one segment that its piece lies in, and lists nothing.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql.datasource import (
    DataSourceReader,
    InputPartition,
)
from pyspark.sql.types import DataType, StringType, StructField, StructType

from rmqstore._columns import COLUMN_NAMES
from rmqstore.errors import StoreError
from rmqstore.spark.batches import ReadJob, piece_batches, queue_piece_batches, spark_arrow_schema
from rmqstore.spark.options import CORRUPT_COLUMN, ReadOptions, store_config
from rmqstore.spark.plan import LogPlan, Piece, QueuePiece, queue_pieces
from rmqstore.spark.schemas import check_field, spark_type
from rmqstore.spark.task import spare_collector
from rmqstore.spark.tiered import TieredPiece, tiered_piece_batches, tiered_pieces
from rmqstore.store.columns import DEFAULT_COLUMNS, NULLABLE_COLUMNS, scan_schema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FilteringStoreReader", "PiecePartition", "StoreReader", "checked_schema", "read_partition", "spark_schema"]

NULLABLE = NULLABLE_COLUMNS | {CORRUPT_COLUMN}


def _type_of(name: str) -> DataType:
    return StringType() if name == CORRUPT_COLUMN else spark_type(scan_schema([name]).field(0).type)


def spark_schema(columns: Iterable[str] | None = None, *, damage: bool = True) -> StructType:
    """pyspark.sql.types.StructType: these columns of a scan (docs/columns.md), and ``_corrupt`` if it is among them.

    Without rows of damage, which have few values, only ``tags`` and ``unique_key`` are nullable.
    """
    names = DEFAULT_COLUMNS if columns is None else columns
    return StructType([StructField(name, _type_of(name), damage or name in NULLABLE) for name in names])


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in pyspark.__version__.split(".")[:2])


def checked_schema(schema: StructType, options: ReadOptions) -> pa.Schema:
    """pyarrow.Schema: what the reader yields for the columns that a user's schema asks for.

    Raises
    ------
    StoreError
        A column that no store has, one that comes twice, one of another type or NOT NULL where it has nulls, or no column
        where this PySpark cannot count rows without.
    """
    if not schema.fields and _version() < (4, 3):
        raise StoreError(
            f"PySpark {pyspark.__version__} loses the rows of a schema without columns; name one, as queue_id int"
        )
    wanted = {name: _type_of(name) for name in (*COLUMN_NAMES, CORRUPT_COLUMN)}
    for i, field in enumerate(schema.fields):
        if field.name in schema.fieldNames()[:i]:
            raise StoreError(f"column {field.name!r} is asked for twice; name it once and select it twice")
        check_field(field, wanted)
        if not field.nullable and (field.name in NULLABLE or options.corrupt == "report"):
            why = "" if field.name in NULLABLE else " and corrupt=report gives rows without it"
            raise StoreError(f"the schema says that column {field.name} is never null{why}; leave NOT NULL out")
    return spark_arrow_schema(schema.fieldNames(), {field.name for field in schema.fields if not field.nullable})


class PiecePartition(InputPartition):
    """What one task reads: a piece of the log or of a queue, maybe in tiered storage.

    Attributes
    ----------
    piece : Piece, QueuePiece or TieredPiece
    first : bool
        `piece.begin` is known to be the beginning of a record.
    segment_size : int or None
        Bytes of a segment, where the reader may have been made before there was any.
    """

    def __init__(self, piece: Piece | QueuePiece | TieredPiece, first: bool = False, segment_size: int | None = None):
        self.piece = piece
        self.first = first
        self.segment_size = segment_size


class StoreReader(DataSourceReader):
    """Reads a store that stays as it is when the job is planned.

    Parameters
    ----------
    options : ReadOptions
    schema : StructType
        Only these columns are decoded.
    raw : mapping of str
        The options as Spark gives them, for the geometry.
    """

    def __init__(self, options: ReadOptions, schema: StructType, raw: Any):
        arrow_schema = checked_schema(schema, options)
        # Tiered storage may have what was lost.
        ends = options.tiered is None
        self.plan: LogPlan | None = LogPlan.of(options.path, store_config(options.path, raw, index=False), ends=ends)
        if not ends or options.mode == "queue":
            # Units may have been lost along with their messages.
            self.plan.warn_of_lost()
        if ends and not os.path.isdir(os.path.join(options.path, "commitlog")):
            # A name that is spelled wrongly would give no rows.
            raise StoreError("there is no store here; give the folder that holds commitlog/", options.path)
        self.job = ReadJob.of(self.plan, options, arrow_schema)
        # Filters that contradict each other leave nothing to read.
        self.nothing = False

    def __getstate__(self) -> dict[str, Any]:
        # Tasks need no list of segments.
        return {**self.__dict__, "plan": None}

    def partitions(self) -> list[InputPartition]:
        """The pieces of the log, in its order; with ``mode=queue`` those of the queues.  Those of tiered storage come first."""
        options, plan = self.job.options, self.plan
        selection = options.selection
        if self.nothing or plan is None:
            return []
        if selection.topics is None:
            plan.warn_of_light_queues()
        older: list[InputPartition] = [PiecePartition(piece) for piece in tiered_pieces(plan, options)]
        if options.mode == "queue":
            pieces = queue_pieces(plan, selection, options.partition_bytes)
            return [*older, *(PiecePartition(piece) for piece in pieces)]
        plan.refuse_light_queues(selection.topics)
        return older + [
            PiecePartition(piece)
            for piece in plan.pieces(options.partition_bytes, selection.begin_phy_offset, selection.end_phy_offset)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The record batches of one piece."""
        return read_partition(self.job, partition)


def read_partition(job: ReadJob, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The record batches of a piece, for the batch reader and the one that follows a store."""
    if not isinstance(partition, PiecePartition):
        # Spark makes a partition of its own where there is none.
        return iter(())
    spare_collector()
    piece = partition.piece
    if isinstance(piece, TieredPiece):
        return tiered_piece_batches(job, piece)
    if isinstance(piece, QueuePiece):
        return queue_piece_batches(job, piece)
    if partition.segment_size is not None and partition.segment_size != job.config.mapped_file_size_commit_log:
        job = replace(job, config=job.config.replace(mapped_file_size_commit_log=partition.segment_size))
    return piece_batches(job, piece, first=partition.first)


def _met(options: ReadOptions, name: str, values: set[Any]) -> ReadOptions:
    # Only these values of what may be several already.
    given = getattr(options.selection, name)
    kept = values if given is None else values & set(given)
    # No tag at all is as good as no topic: nothing is chosen.
    changes: dict[str, Any] = {name: tuple(sorted(kept))} if kept else {"topics": ()}
    return replace(options, selection=replace(options.selection, **changes))


def _within(options: ReadOptions, names: tuple[str, str], low: int | None, high: int | None) -> ReadOptions:
    begin, end = getattr(options.selection, names[0]), getattr(options.selection, names[1])
    if low is not None:
        begin = low if begin is None else max(begin, low)
    if high is not None:
        end = high if end is None else min(end, high)
    changes: dict[str, Any] = {names[0]: begin, names[1]: end}
    return replace(options, selection=replace(options.selection, **changes))


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


def _microseconds(value: Any) -> int:
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        raise TypeError("no point in time")
    return (value - _EPOCH) // datetime.timedelta(microseconds=1)


def push_filter(options: ReadOptions, kind: str, column: str, value: Any) -> ReadOptions | None:
    """ReadOptions or None: `options` narrowed down by a filter, which they then answer exactly; None where they cannot.

    Parameters
    ----------
    kind : str
        The name of a filter class of `pyspark.sql.datasource`.
    column : str
    value : object
        As Spark gives it.
    """
    if kind == "IsNotNull":
        return options if column in ("topic", "queue_id", "store_timestamp", "phy_offset") else None
    equal = kind in ("EqualTo", "EqualNullSafe", "In")
    values = list(value) if kind == "In" else [value]
    if kind == "In":
        values = [each for each in values if each is not None]
    if column in ("topic", "tags") and equal and all(isinstance(each, str) for each in values):
        if column == "tags" and {"", "*"} & set(values):
            # They are no tags to a subscription.
            return None
        return _met(options, "topics" if column == "topic" else "tags", set(values))
    if column == "queue_id" and equal and all(type(each) is int for each in values):
        return _met(options, "queue_ids", set(values))
    if kind == "In":
        return None
    if column == "phy_offset" and type(value) is int:
        # From the first, before the second.
        bounds = {
            "EqualTo": (value, value + 1),
            "EqualNullSafe": (value, value + 1),
            "GreaterThan": (value + 1, None),
            "GreaterThanOrEqual": (value, None),
            "LessThan": (None, value),
            "LessThanOrEqual": (None, value + 1),
        }.get(kind)
        return None if bounds is None else _within(options, ("begin_phy_offset", "end_phy_offset"), *bounds)
    if column == "store_timestamp":
        try:
            at = _microseconds(value)
        except TypeError:
            return None
        # Records have whole milliseconds, both ends are included.
        floor, ceil = at // 1000, -(-at // 1000)
        times = {
            "EqualTo": (ceil, floor),
            "EqualNullSafe": (ceil, floor),
            "GreaterThan": (floor + 1, None),
            "GreaterThanOrEqual": (ceil, None),
            "LessThan": (None, ceil - 1),
            "LessThanOrEqual": (None, floor),
        }.get(kind)
        return None if times is None else _within(options, ("begin", "end"), *times)
    return None


class FilteringStoreReader(StoreReader):
    """As `StoreReader`, and answers what filters it can by itself."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        """Take the filters on topic, queue_id, tags, store_timestamp and phy_offset; gives back the others."""
        options = self.job.options
        for each in filters:
            column = each.attribute[0] if len(getattr(each, "attribute", ())) == 1 else ""
            narrowed = push_filter(options, type(each).__name__, column, getattr(each, "value", None))
            if column == "topic" and narrowed is not None and options.mode == "queue" and self.plan is not None:
                # Spark compares, and no row of a light queue has it as its topic.
                self.plan.refuse_light_queues(narrowed.selection.topics)
            if column == "phy_offset" and options.tiered is not None:
                # Each queue of tiered storage counts by itself, so Spark compares.
                narrowed = None
            if narrowed is not None and (options.mode == "commitlog" or column not in ("topic", "queue_id")):
                options = narrowed
                self.job = replace(self.job, options=options)
                # A row that tells of damage is null in these columns, so Spark has to leave it out.
                if options.corrupt != "report":
                    continue
            yield each
        self.nothing = () in (options.selection.topics, options.selection.queue_ids)
