"""Arrow record batches of a piece, in the layout that Spark wants, with its damage.

It never imports pyspark, opens nothing but the piece that it is given, and keeps one batch in memory.  `fail` raises at the
first thing that is not a whole record.  `report` adds a row whose ``_corrupt`` names file, position and verdict; where no
record could be read, the row has only ``phy_offset`` and ``size`` besides, where a unit of a queue is gone only ``topic``,
``queue_id`` and ``queue_offset``.  `skip` leaves it out, with a warning of the task where a file is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import queue_directory
from rmqstore.consumequeue.unit_queue import REPAIR
from rmqstore.errors import ChecksumError, CorruptionError
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.flatfile.flat_files import FlatLog
from rmqstore.message import OTHER_MESSAGE, MessageExt
from rmqstore.sources import DamagePolicy, Part
from rmqstore.spark.options import CORRUPT_COLUMN, UNREADABLE_BODY, ReadOptions
from rmqstore.spark.plan import LogPlan, Piece, QueuePiece, first_offset, is_no_file, open_log, segment_path
from rmqstore.store.columns import ColumnOptions, Columns, import_pyarrow, scan_schema
from rmqstore.store.local_queue import LocalQueue
from rmqstore.store.placed_columns import queue_batches
from rmqstore.store.undispatched import Undispatched

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "PieceReader",
    "ReadJob",
    "in_spark_layout",
    "marked_verdict",
    "piece_batches",
    "queue_piece_batches",
    "spark_arrow_schema",
]

logger = logging.getLogger(__name__)

# A batch ends with this many rows or bytes of bodies and properties: larger ones wait for memory, smaller ones cost more to
# pass on.  This many rows of a number or two are a quarter of a megabyte.
_BATCH_ROWS = 32768
_BATCH_BYTES = 1024 * 1024
_INT32_MAX = 2**31 - 1
ADVICE = "option corrupt=skip passes over it, corrupt=report shows it"
# The milliseconds that 64 bits hold in microseconds.
_MOST_MS = (2**63 - 1) // 1000


def spark_arrow_schema(columns: Iterable[str], never_null: Container[str] = ()) -> pa.Schema:
    """Return the Arrow schema of these columns with Spark's types: times in µs, its names of fields.

    Those of `never_null` are declared as such, which spares Spark a check of every value.
    """
    pa = import_pyarrow()
    text = pa.string()
    types = {
        "keys": pa.list_(pa.field("element", text)),
        "properties": pa.map_(text, text),
        "born_timestamp": pa.timestamp("us", tz="UTC"),
        "store_timestamp": pa.timestamp("us", tz="UTC"),
        CORRUPT_COLUMN: text,
    }
    kinds = {name: types.get(name) or scan_schema([name]).field(0).type for name in columns}
    return pa.schema([pa.field(name, kind, name not in never_null) for name, kind in kinds.items()])


@dataclass(frozen=True)
class ReadJob:
    """The part of a read job that every task needs.

    Attributes
    ----------
    root : str
        The store's directory.
    config : StoreConfig
    log_end : int
        Phy offset of the end of the log when the job was planned.
    options : ReadOptions
    schema : pyarrow.Schema
        Of `spark_arrow_schema`; one without columns asks for batches that have only a number of rows.  With
        ``corrupt=report`` every column of it has to be nullable.
    """

    root: str
    config: StoreConfig
    log_end: int
    options: ReadOptions
    schema: pa.Schema

    @classmethod
    def of(cls, plan: LogPlan, options: ReadOptions, schema: pa.Schema) -> ReadJob:
        """Make the job that reads a planned log."""
        return cls(plan.root, plan.config, plan.end, options, schema)


def marked_verdict(message: MessageExt | None) -> str:
    """Name the fault of a whole record that is marked as corrupt: an unreadable body, or another message than its unit's."""
    return UNREADABLE_BODY if message is not None and message.corrupt else OTHER_MESSAGE


class PieceReader(DamagePolicy):
    """A reader of one piece: converts columns to batches for Spark, in `ready`, and handles damage as option ``corrupt`` demands.

    `piece_end` is a phy offset: a damaged stretch belongs to the piece in which it begins, a missing one to each that it
    covers.
    """

    def __init__(self, job: ReadJob, log: CommitLog | None = None, piece_end: int | None = None):
        super().__init__(job.options.corrupt, ADVICE)
        self.pa = import_pyarrow()
        self.job = job
        self.log: CommitLog | FlatLog | None = log
        self.options, self.schema = options, schema = job.options, job.schema
        self.piece_end = job.log_end if piece_end is None else piece_end
        self.columns = columns = tuple(schema.names)
        self.source = {name: "body_stored" if name == "body" and not options.decode_body else name for name in columns}
        wanted = list(dict.fromkeys(self.source[name] for name in columns if name != CORRUPT_COLUMN))
        # A CRC covers the body, so it is computed where a body or a word about it is asked for.
        self.judged = bool({"body", "body_stored", "corrupt", CORRUPT_COLUMN} & set(columns))
        if self.judged:
            wanted += [name for name in ("corrupt", "phy_offset") if name not in wanted]
        # Without any column there is still a number of rows.
        self.made = Columns(
            ColumnOptions(wanted or ["queue_id"], _BATCH_ROWS, byte_limit=_BATCH_BYTES, decode=options.decode_body),
            1 if log is None else log.crc_check,
        )
        self.ready: list[pa.RecordBatch] = []

    def take(self) -> None:
        """Add what the columns hold."""
        if self.made.out.count:
            self.add(self.made.take())

    def drain(self) -> list[pa.RecordBatch]:
        """Return the batches that are ready, and forget them."""
        ready, self.ready = self.ready, []
        return ready

    def queue_part(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Yield the chosen messages of a part of a queue."""
        selection = self.options.selection
        selection.choose(self.made.out, by_place=True)
        for batch in queue_batches([part], self.made, selection):
            self.add(batch)
            yield from self.drain()
        yield from self.drain()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows to `ready`, those that are damaged in the way that was asked for."""
        texts = self.judge(batch) if self.judged and batch.column("corrupt").true_count else None
        if texts is not None and self.mode == "skip":
            batch = batch.filter(texts.is_null())
            texts = None
            if not batch.num_rows:
                return
        self.ready.append(self.laid_out(batch, texts))

    def judge(self, batch: pa.RecordBatch) -> Any:
        """Return the fault of each row as an Arrow array, null for whole records."""
        texts: list[str | None] = [None] * batch.num_rows
        offsets = batch.column("phy_offset")
        for row, bad in enumerate(batch.column("corrupt").to_pylist()):
            if bad:
                phy_offset = offsets[row].as_py()
                verdict = self.verdict_at(phy_offset)
                texts[row] = self.found(phy_offset, verdict, verdict not in (OTHER_MESSAGE, UNREADABLE_BODY))
        return self.pa.array(texts, self.pa.string())

    def place(self, phy_offset: int) -> tuple[str, int]:
        """Return the file that contains this offset, and the position in it."""
        return segment_path(self.job.root, self.job.config, phy_offset)

    def verdict_at(self, phy_offset: int) -> str:
        """Name the fault of the record at this offset."""
        assert self.log is not None
        found = self.log.region_of(phy_offset)
        if found is None:
            return "MISSING"
        verdict = _core.check_record(found[0], phy_offset - found[1], found[1], self.log.crc_check)[0]
        return marked_verdict(self.log.look_up(phy_offset)) if verdict is Verdict.RECORD else verdict.name

    def found(self, phy_offset: int, verdict: str, is_crc: bool = False, way: str | None = None) -> str:
        """Return the text for a damaged place, or raise it if damage is an error."""
        path, pos = self.place(phy_offset)
        if (way or self.mode) != "fail":
            return f"{path}, position {pos}: {verdict}"
        kind: type[CorruptionError] = CorruptionError
        advice, record = ADVICE, f"record at phy offset {phy_offset}"
        if verdict == "MISSING":
            restore = "restore it"
            if is_no_file(path):
                restore = "the thing in its place is not a file: move it away, and restore the segment"
            what = f"the segment is missing; {restore}"
            if self.options.missing is not None:
                advice = "option fail_on_data_loss=false goes on with what is there"
        elif verdict == OTHER_MESSAGE:
            what = f"the {record} is another message: {verdict}"
        elif is_crc:
            kind, what = ChecksumError, f"the {record} does not agree with its CRC"
        elif verdict == UNREADABLE_BODY:
            what = f"the body of the {record} cannot be decompressed"
        else:
            what = f"no whole record begins at phy offset {phy_offset} ({verdict})"
        raise kind(f"{what}; {advice}", path, pos)

    def stretch(self, begin: int, end: int, verdict: Verdict | None) -> None:
        """Handle a damaged stretch that `CommitLog.fill` reports."""
        way = (self.options.missing if verdict is None else None) or self.mode
        text = self.found(begin, "MISSING" if verdict is None else verdict.name, way=way)
        self.take()
        if verdict is None and way == "skip" and isinstance(self.log, CommitLog):
            self.log.warn_of_missing(begin, end)
        if way == "report":
            # One that no 32-bit size can hold has several rows.
            end = max(min(end, self.piece_end if verdict is None else self.job.log_end), begin + 1)
            while begin < end:
                size = min(end - begin, _INT32_MAX)
                self.ready.append(self.one_row({"phy_offset": begin, "size": size, CORRUPT_COLUMN: text}))
                begin += size

    def units(self, queue: AnyConsumeQueue, begin: int, end: int) -> None:
        """Handle missing units of a queue."""
        self.gone(queue.topic, queue.queue_id, begin, end, *queue.path_of(begin))

    def gone(self, topic: str, queue_id: int, first: int, end: int, path: str, pos: int | None = None) -> None:
        """Handle queue offsets of the plan whose units are missing; `path` and `pos` are the place of the first one."""
        what = f"queue offset {first}" if end - first == 1 else f"queue offsets {first} to {end - 1}"
        what += f" of {topic}/{queue_id}"
        if self.mode == "fail":
            raise CorruptionError(
                f"the plan of the job has {what}, and no unit of the queue is there for them: retention took them, or "
                f"a file is gone or cut short. Plan the job again to read what is left; otherwise {REPAIR}; {ADVICE}",
                path,
                pos,
            )
        text = f"{path if pos is None else f'{path}, position {pos}'}: MISSING, {what}"
        self.take()
        if self.mode == "skip":
            logger.warning("%s: passed over", text)
        else:
            values = {"topic": topic, "queue_id": queue_id, "queue_offset": first, CORRUPT_COLUMN: text}
            self.ready.append(self.one_row(values))

    def one_row(self, values: dict[str, Any]) -> pa.RecordBatch:
        """Return one row for a place without a record: these values by column, otherwise null."""
        if not self.columns:
            return self.counted(1)
        return self.pa.RecordBatch.from_arrays(
            [self.pa.array([values.get(field.name)], field.type) for field in self.schema], schema=self.schema
        )

    def counted(self, num: int) -> pa.RecordBatch:
        """Return a batch of `num` rows without columns."""
        pa = self.pa
        return pa.RecordBatch.from_struct_array(pa.array([{}] * num, pa.struct([])))

    def laid_out(self, batch: pa.RecordBatch, texts: Any) -> pa.RecordBatch:
        """Return the rows in Spark's layout."""
        pa = self.pa
        if not self.columns:
            return self.counted(batch.num_rows)
        arrays = []
        for field in self.schema:
            if field.name == CORRUPT_COLUMN:
                arrays.append(pa.nulls(batch.num_rows, field.type) if texts is None else texts)
            else:
                arrays.append(_as_type(pa, batch.column(self.source[field.name]), field))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _as_type(pa: Any, array: Any, field: Any) -> Any:
    if pa.types.is_timestamp(field.type):
        times = np.array(array.view(pa.int64()))
        if len(times) and not (times.min() >= -_MOST_MS and times.max() <= _MOST_MS):
            # Some producer's clock, or a damaged header, which no CRC of the body covers: no reason to end a job.
            np.clip(times, -_MOST_MS, _MOST_MS, out=times)
        times *= 1000
        return pa.Array.from_buffers(field.type, len(array), [None, pa.py_buffer(times)])
    if field.name == "keys":
        # The same buffers under Spark's name of the items.
        buffers = array.buffers()[:2]
        return pa.Array.from_buffers(
            field.type, len(array), buffers, array.null_count, array.offset, children=[array.values]
        )
    return array


def in_spark_layout(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a batch of a scan to the types of `spark_arrow_schema`."""
    pa = import_pyarrow()
    return pa.RecordBatch.from_arrays(
        [_as_type(pa, batch.column(field.name), field) for field in schema], schema=schema
    )


def piece_batches(job: ReadJob, piece: Piece, *, first: bool = False) -> Iterator[pa.RecordBatch]:
    """Yield the chosen records of a piece of the log, in its order, with the job's schema.

    With `first`, `piece.begin` is known to be the beginning of a record.

    Raises
    ------
    CorruptionError, ChecksumError
        With ``corrupt=fail``, at the first damage; names file and position.
    GeometryError
        The segment is not as long as the configuration says.
    """
    log = open_log(job.root, job.config, piece)
    try:
        reader = PieceReader(job, log, piece.end)
        if piece.missing or is_no_file(reader.place(piece.begin)[0]):
            reader.stretch(piece.begin, piece.end, None)
            yield from reader.ready
            return
        job.options.selection.choose(reader.made.out)
        begin = piece.begin if first else first_offset(log, piece)
        for _ in log.fill(reader.made.out, begin, piece.end, reader.stretch):
            reader.take()
            yield from reader.drain()
    finally:
        log.close()


def queue_piece_batches(job: ReadJob, piece: QueuePiece) -> Iterator[pa.RecordBatch]:
    """Yield the chosen messages of a piece of a queue, in queue order; otherwise as `piece_batches`.

    Missing units that the plan has are damage, like a missing segment.
    """
    pool = MappedFilePool(64)
    log = CommitLog(job.root, job.config, pool, read_only=True)
    queues = ConsumeQueueStore(job.root, job.config, pool, read_only=True)
    try:
        log.load()
        log.set_end(job.log_end)
        queues.load()
        queue = queues.find(piece.topic, piece.queue_id)
        if queue is None or queue.max_queue_offset < piece.end:
            # The plan has units that a broker did not come to write.
            Undispatched(job.root, log, queues).look()
            queue = queues.find(piece.topic, piece.queue_id)
        reader = PieceReader(job, log)
        if queue is None:
            folder = queue_directory(job.root, ConsumeQueue.kind, piece.topic, piece.queue_id)
            reader.gone(piece.topic, piece.queue_id, piece.begin, piece.end, folder)
            yield from reader.ready
            return
        yield from reader.queue_part(Part(LocalQueue(queue, log, reader), piece.begin, piece.end))
    finally:
        queues.close()
        log.close()
