"""Reading a store as a Spark DataFrame: the schema, and the readers of a batch and of a stream.

Owns what Spark asks of a reader, the offsets of a stream, and how much of the log a micro-batch takes.  It never decodes a
record (`batches` does, with the compiled core), changes nothing on disk and locks nothing; the store may be a broker's that
runs on this host.

Batch: the end of the log is fixed when Spark plans a DataFrame, once for each ``load()`` (PySpark 4.3) or for each job
(4.0): what a writer appends afterwards belongs to the next one.  A task opens the segment of its piece, and lists nothing.

Stream: an offset is ``{"phy_offset": n}``, where n is a place at which a scan of the log comes by: a record, a blank record,
a damaged stretch, or the end.  What is between two offsets never changes, so a batch that Spark asks for again has the same
rows, and with a sink that tells batches apart every message arrives once.  PySpark before 4.2 asks for the newest offset
without saying where a stream is and how much it wants: there a batch takes all that is new, whatever the limits are.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from rmqstore import _core
from rmqstore._columns import COLUMN_NAMES
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.errors import GeometryError, OffsetOutOfRangeError, StoreChangedError, StoreError
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.spark.batches import ReadJob, piece_batches, queue_piece_batches, spark_arrow_schema
from rmqstore.spark.options import CORRUPT_COLUMN, ReadOptions, store_config, tells_segment_size
from rmqstore.spark.plan import LogPlan, Piece, QueuePiece, first_offset, queue_pieces, segment_path
from rmqstore.spark.tasks import spare_collector
from rmqstore.spark.tiered import TieredPiece, tiered_piece_batches, tiered_pieces
from rmqstore.store.columns import DEFAULT_COLUMNS, NULLABLE_COLUMNS

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    LIMITS = True
except ImportError:  # before PySpark 4.2
    LIMITS = False
    SupportsTriggerAvailableNow = object  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PiecePartition", "StoreReader", "StoreStreamReader", "spark_schema"]

logger = logging.getLogger(__name__)

NULLABLE = NULLABLE_COLUMNS | {CORRUPT_COLUMN}
# The end of the log, for a piece that ends before it.
_FAR = 2**62


def spark_schema(columns: Iterable[str] | None = None, *, damage: bool = True) -> StructType:
    """Return the Spark schema of these columns of a scan (docs/columns.md), and ``_corrupt`` if it is among them.

    Without rows of damage, which have few values, only ``tags`` and ``unique_key`` are nullable.
    """
    schema = spark_arrow_schema(DEFAULT_COLUMNS if columns is None else columns)
    return StructType(
        [StructField(each.name, from_arrow_type(each.type), damage or each.name in NULLABLE) for each in schema]
    )


def check_field(field: StructField, wanted: StructType) -> None:
    """Raise StoreError for a field that is not among the `wanted` ones, or has another type there."""
    if field.name not in wanted.fieldNames():
        raise StoreError(f"there is no column {field.name!r}; there are {', '.join(wanted.fieldNames())}")
    ours, theirs = wanted[field.name].dataType.simpleString(), field.dataType.simpleString()
    if theirs != ours:
        raise StoreError(
            f"column {field.name} is {ours}, the schema says {theirs}; give the first and cast the DataFrame"
        )


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in pyspark.__version__.split(".")[:2])


def checked_schema(schema: StructType, options: ReadOptions) -> pa.Schema:
    """Return the Arrow schema that the reader yields for a user's schema.

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
    wanted = spark_schema((*COLUMN_NAMES, CORRUPT_COLUMN))
    for i, field in enumerate(schema.fields):
        if field.name in schema.fieldNames()[:i]:
            raise StoreError(f"column {field.name!r} is asked for twice; name it once and select it twice")
        check_field(field, wanted)
        if not field.nullable and (field.name in NULLABLE or options.corrupt == "report"):
            why = "" if field.name in NULLABLE else " and corrupt=report gives rows without it"
            raise StoreError(f"the schema says that column {field.name} is never null{why}; leave NOT NULL out")
    return spark_arrow_schema(schema.fieldNames(), {field.name for field in schema.fields if not field.nullable})


# -------------------------------------------------------------------------------------------------------------- batch


class PiecePartition(InputPartition):
    """The work of one task: a piece of the log or of a queue, maybe in tiered storage.

    With `first`, `piece.begin` is known to be the beginning of a record.  `segment_size` is in bytes, and given where the
    reader may have been made before there was a segment.
    """

    def __init__(self, piece: Piece | QueuePiece | TieredPiece, first: bool = False, segment_size: int | None = None):
        self.piece = piece
        self.first = first
        self.segment_size = segment_size


class StoreReader(DataSourceReader):
    """A reader of a store as it is when the job is planned; only columns of `schema` are decoded.  `raw` has Spark's options."""

    def __init__(self, options: ReadOptions, schema: StructType, raw: Any):
        arrow_schema = checked_schema(schema, options)
        # Tiered storage may have what was lost.
        ends = not options.tiered
        self.plan: LogPlan | None = LogPlan.of(options.path, store_config(options.path, raw, index=False), ends=ends)
        if not ends or options.mode == "queue":
            # Units may have been lost along with their messages.
            self.plan.warn_of_lost()
        if ends and not os.path.isdir(os.path.join(options.path, "commitlog")):
            # A name that is spelled wrongly would give no rows.
            raise StoreError("there is no store here; give the folder that holds commitlog/", options.path)
        self.job = ReadJob.of(self.plan, options, arrow_schema)

    def __getstate__(self) -> dict[str, Any]:
        # Tasks need no list of segments.
        return {**self.__dict__, "plan": None}

    def partitions(self) -> list[InputPartition]:
        """Return the pieces of the log, or of the queues with ``mode=queue``, after those of tiered storage."""
        options, plan = self.job.options, self.plan
        selection = options.selection
        assert plan is not None
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
        """Yield the record batches of one piece."""
        return read_partition(self.job, partition)


def read_partition(job: ReadJob, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a piece, for both readers."""
    if not isinstance(partition, PiecePartition):
        # Spark makes its own partition if we return none.
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


# ------------------------------------------------------------------------------------------------------------- stream


class StoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader that follows a store; only columns of `schema` are decoded.  `raw` has Spark's options."""

    def __init__(self, options: ReadOptions, schema: StructType, raw: Any):
        if options.mode != "commitlog":
            raise StoreError("a stream follows the log: leave option mode out")
        if options.tiered:
            raise StoreError(
                "a stream follows the local log: leave option tiered out, and read what is older as a batch"
            )
        # Deletion by retention is not damage.
        missing = "fail" if options.fail_on_data_loss else "skip"
        self.options = replace(options, missing=missing)
        self.schema = checked_schema(schema, options)
        self.root = check_store_root(options.path)
        self._raw = raw
        self._take_config()
        self._target: int | None = None
        # Offsets at which records of this log surely begin; what a checkpoint says may be of another one.
        self._places: deque[int] = deque(maxlen=8)
        self._log: CommitLog | None = None
        if not LIMITS and (options.max_bytes_per_trigger or options.max_rows_per_trigger):
            logger.warning(
                "this PySpark knows no limits for a batch; max_bytes_per_trigger and max_rows_per_trigger need 4.2"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A task opens what it reads by itself.
        return {**self.__dict__, "_log": None}

    # ---------------------------------------------------------------------------------------------------- where it is

    def _take_config(self) -> None:
        # First, as a segment may appear between the two.
        self._is_size_known = tells_segment_size(self.root, self._raw)
        self.config = store_config(self.root, self._raw, index=False, may_be_empty=True)

    def _opened(self) -> CommitLog:
        # The log, listed; of a store without a segment the size is asked for again until there is one.
        if not self._is_size_known:
            self._take_config()
        try:
            return self._listed()
        except GeometryError:
            if self._is_size_known:
                raise
        # The first segment came just now.
        self._take_config()
        return self._listed()

    def _listed(self) -> CommitLog:
        log = CommitLog(self.root, self.config, MappedFilePool(4), read_only=True)
        log.load()
        return log

    def _look(self) -> CommitLog:
        # The log with the end that it has now.
        log = self._log
        if log is not None and not self._is_size_known:
            log.close()
            log = self._log = None
        if log is not None:
            try:
                before = log.max_offset
                log.refresh()
                newest = log.files.offsets[-1] if log.files.offsets else 0
                if log.max_offset > before or newest <= before or not _begins_with_a_record(log, newest):
                    return log
                # Records follow after a damaged place.
                log.follow()
                log.set_end(max(log.known_end(), before))
                return log
            except (StoreChangedError, OffsetOutOfRangeError) as error:
                self._lost(f"the store was cut or replaced since the stream began ({error})")
                self._places.clear()
                log.close()
        log = self._opened()
        log.follow()
        log.set_end(log.known_end())
        self._log = log
        return log

    def _lost(self, what: str, phy_offset: int | None = None) -> None:
        # Messages are gone that the stream has not seen.
        path, pos = (self.root, None) if phy_offset is None else segment_path(self.root, self.config, phy_offset)
        if self.options.fail_on_data_loss:
            raise OffsetOutOfRangeError(
                f"{what}; option fail_on_data_loss=false goes on with what is there, and a new checkpoint begins again",
                path,
                pos,
            )
        logger.warning("%s; going on with what is there [%s]", what, path)

    def _place(self, log: CommitLog, offset: int) -> int:
        # The first place of a scan at or after an offset of the log that somebody else says is one.
        if offset in self._places or not log.min_offset < offset < log.max_offset:
            return max(offset, log.min_offset)
        place = first_offset(log, Piece(offset, log.max_offset, missing=log.files.find(offset) is None))
        if place != offset:
            self._lost(
                f"nothing begins at phy offset {offset}, where the stream is: the log was cut or replaced", offset
            )
        self._places.append(place)
        return place

    def _at(self, place: int) -> dict[str, int]:
        self._places.append(place)
        return {"phy_offset": place}

    def _place_at_or_after(self, log: CommitLog, begin: int, goal: int) -> int:
        # The first place of a scan at or after `goal`, coming from the place `begin`.
        return min(log.step_to(begin, min(goal, log.max_offset)), log.max_offset)

    def _place_before(self, log: CommitLog, begin: int, goal: int) -> int:
        # The last place of a scan at or before `goal`, but after `begin`.
        place = log.step_before(begin, goal)
        return place if place > begin else self._place_at_or_after(log, begin, begin + 1)

    # -------------------------------------------------------------------------------------------------- what Spark asks

    def initialOffset(self) -> dict[str, int]:
        """Return the start of a new stream: by options ``starting_offset`` and ``begin_phy_offset``, else the oldest message."""
        log = self._look()
        if self.options.starting_offset == "latest":
            return self._at(log.max_offset)
        begin = self.options.selection.begin_phy_offset or 0
        if begin <= log.min_offset:
            return self._at(log.min_offset)
        missing = begin >= log.max_offset or log.files.find(begin) is None
        return self._at(min(first_offset(log, Piece(begin, log.max_offset, missing=missing)), log.max_offset))

    def getDefaultReadLimit(self) -> Any:
        """Return the limit of options ``max_bytes_per_trigger`` and ``max_rows_per_trigger``; with both, both hold."""
        if not LIMITS:
            return None
        if self.options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self.options.max_bytes_per_trigger)
        if self.options.max_rows_per_trigger is not None:
            return ReadMaxRows(self.options.max_rows_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:
        """Return the end of the next batch: at least one record after `start`, if there is one, however small the limit."""
        log = self._look()
        goal = log.max_offset
        if self._target is not None:
            goal = min(goal, self._target)
        if start is None:
            return self._at(goal)
        if start["phy_offset"] > log.max_offset:
            # `partitions` says that the store is not the one that it was.
            return {"phy_offset": goal if self._target is None else max(goal, start["phy_offset"])}
        begin = self._place(log, start["phy_offset"])
        if self.options.selection.end_phy_offset is not None and self.options.selection.end_phy_offset < goal:
            goal = self._place_at_or_after(log, begin, self.options.selection.end_phy_offset)
        if goal <= begin:
            return {"phy_offset": max(goal, start["phy_offset"])}
        if LIMITS and limit is not None and not isinstance(limit, ReadAllAvailable):
            max_bytes, max_rows = self.options.max_bytes_per_trigger, self.options.max_rows_per_trigger
            if max_rows is not None:
                goal = log.step_over(begin, goal, max_rows)
            if max_bytes is not None and goal - begin > max_bytes:
                goal = min(goal, self._place_before(log, begin, begin + max_bytes))
        return self._at(goal)

    def reportLatestOffset(self) -> dict[str, int]:
        """Return the end of the log, for the progress of the stream."""
        return {"phy_offset": self._look().max_offset}

    def prepareForTriggerAvailableNow(self) -> None:
        """Note the end: this run stops there."""
        self._target = self._look().max_offset

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """Return the pieces between two offsets.

        Raises
        ------
        OffsetOutOfRangeError
            Messages between them are not there any more, and ``fail_on_data_loss`` is true.
        """
        begin, stop = start["phy_offset"], end["phy_offset"]
        if begin == stop:
            return []
        log = self._look()
        low, high = log.min_offset, log.max_offset
        if begin > high or stop > high:
            self._lost(
                f"the stream is at phy offset {max(begin, stop)}, but the log ends at {high}: it was cut or replaced",
                high,
            )
            begin, stop = (low if begin > high else begin), min(stop, high)
        if begin < low:
            self._lost(
                f"the messages from phy offset {begin} on are not there any more, the log begins at {low}: keep them longer, "
                "or let the stream keep up",
                begin,
            )
            begin = low
        begin = self._place(log, begin)
        plan = LogPlan(self.root, self.config, log.files.offsets, low, stop)
        plan.refuse_light_queues(self.options.selection.topics)
        made: list[InputPartition] = []
        for piece in plan.pieces(self.options.partition_bytes, begin, stop):
            if piece.missing:
                self._lost(f"the segments from phy offset {piece.begin} to {piece.end} are missing", piece.begin)
            else:
                made.append(PiecePartition(piece, piece.begin == begin, self.config.mapped_file_size_commit_log))
        return made

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of one piece."""
        return read_partition(ReadJob(self.root, self.config, _FAR, self.options, self.schema), partition)

    def stop(self) -> None:
        """Close the store."""
        if self._log is not None:
            self._log.close()
            self._log = None


def _begins_with_a_record(log: CommitLog, base: int) -> bool:
    return _core.check_record(log.files.file(base).region, 0, base, 0)[0] == Verdict.RECORD
