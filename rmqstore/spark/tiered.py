"""Partitions of tiered storage: messages that the local log no longer has, queue by queue, in pieces along the flat files.

It never imports pyspark and only reads.  A message that both have is read from the local log, so no message comes twice; the
local log is planned first, so no message is missed between them.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmqstore.errors import CorruptionError, Finding, StoreError
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.flatfile.flat_files import FlatFiles
from rmqstore.flatfile.flat_queue import UNIT_SIZE, FlatQueue
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.sources import EXPIRED, DamagePolicy, Part
from rmqstore.spans import Span, without
from rmqstore.spark.batches import ADVICE, PieceReader, ReadJob
from rmqstore.spark.options import CORRUPT_COLUMN, ReadOptions
from rmqstore.spark.plan import LogPlan
from rmqstore.store.tiered import in_log

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TieredPiece", "tiered_piece_batches", "tiered_pieces"]

logger = logging.getLogger(__name__)

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class TieredPiece:
    """The messages of a queue of tiered storage from queue offset `begin` to before `end`.

    Attributes
    ----------
    path : str
        The queue's folder.
    log_sizes, unit_sizes : dict
        Sizes as for `FlatFiles`, of the files that the plan knew for the piece, there or not: a task names those that it misses.
    """

    path: str
    topic: str
    queue_id: int
    begin: int
    end: int
    log_sizes: dict[int, int]
    unit_sizes: dict[int, int]


def tiered_pieces(plan: LogPlan, options: ReadOptions) -> Iterator[TieredPiece]:
    """Cut what only tiered storage has into pieces of about `options.partition_bytes`, none of more than one COMMIT_LOG file.

    Queues that cannot be listed or have no units, and queue offsets that are in neither part, are an error with
    ``corrupt=fail``; otherwise they have no piece, and are named in a warning.  There is no piece without the root of tiered
    storage, or with a range of phy offsets.  `plan` is that of the broker's local store.

    Raises
    ------
    StoreError
        There is no tiered storage; or queues of the local store are gone, so that nobody knows what is in both.
    """
    # Files that go while the plan is made are reported by the tasks.
    selection = options.selection
    # A range of phy offsets is one of the local log.
    if not options.tiered or selection.begin_phy_offset is not None or selection.end_phy_offset is not None:
        return
    damage = DamagePolicy("fail" if options.corrupt == "fail" else "report", ADVICE)
    flat_store = FlatStore(options.tiered, plan.root, damage=damage, goes_on=True)
    for text in flat_store.notes:
        logger.warning("tiered storage: %s", text)
    try:
        queues = [part.queue for part in flat_store.ranges(selection)]
        for queue, spans in zip(queues, _local_spans(plan, queues, by_log=options.mode != "queue")):
            begin, end = queue.min_queue_offset, queue.max_queue_offset
            if spans and end < spans[0][0]:
                queue.report_gap(end, spans[0][0])
            said = [flat_store.said(kind, queue.topic, queue.queue_id) for kind in ("COMMIT_LOG", "CONSUME_QUEUE")]
            for first, last in without(begin, end, spans):
                for at, until in _cut(queue, first, last, options.partition_bytes):
                    ends = [queue.unit_at(number) for number in (at, until - 1)]
                    # Without these units the records may be anywhere.
                    low = 0 if ends[0] is None else ends[0][0]
                    high = _INT64_MAX if ends[1] is None else ends[1][0] + max(ends[1][1], 1)
                    logs = _known(queue.log, said[0], low, high)
                    units = _known(queue.units, said[1], at * UNIT_SIZE, until * UNIT_SIZE)
                    yield TieredPiece(queue.path, queue.topic, queue.queue_id, at, until, logs, units)
    finally:
        flat_store.close()
        # No task reports what has no piece.
        for finding in damage.findings:
            logger.warning("%s: %s; what may be there is left out", finding.path, finding.detail)


def _known(files: FlatFiles, said: Mapping[int, int] | None, begin: int, end: int) -> dict[int, int]:
    # The sizes of the files that hold, or held, offsets from `begin` to before `end`.
    known = dict.fromkeys(files.bases, 0) | dict(said or {})
    for base in files.bases:
        mapped_file = files.find(base)
        known[base] = max(known[base], 0 if mapped_file is None else mapped_file.size)
    return {base: size for base, size in known.items() if base < end and base + size > begin}


def _local_spans(plan: LogPlan, flat_queues: Sequence[FlatQueue], by_log: bool) -> list[list[Span]]:
    # For each queue of tiered storage the queue offsets that the planned log has.
    with plan.queues() as (log, queues, undispatched):
        if undispatched.left_out is not None:
            raise StoreError(
                "not all of the log has units, so nobody knows what it shares with tiered storage; rebuild the queues first: "
                "rmqstore rebuild --what consumequeue",
                plan.root,
            )
        local = [queues.find(flat.topic, flat.queue_id) for flat in flat_queues]
        if not by_log:
            return [[] if queue is None else [queue.bounds(plan.begin)] for queue in local]
        known = in_log(log, list(zip(flat_queues, local)))
        # A local queue whose messages are all gone still says where it ended.
        ends = [(0, 0) if queue is None else (queue.bounds(plan.begin)[0],) * 2 for queue in local]
        return [spans or [end] for spans, end in zip(known, ends)]


def _cut(queue: FlatQueue, begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    at = begin
    while at < end:
        unit = queue.unit_at(at)
        mapped_file = None if unit is None else queue.log.find(unit[0])
        if unit is None or mapped_file is None:
            # The task that reads a missing file reports it.
            yield at, end
            return
        limit = min(unit[0] + size, mapped_file.file_from_offset + mapped_file.size)
        until = _first_at(queue, at + 1, end, limit)
        yield at, until
        at = until


def _first_at(queue: FlatQueue, begin: int, end: int, log_offset: int) -> int:
    # The first queue offset, at least `begin`, whose record begins at or after `log_offset`; a missing unit counts as after it.
    def place(number: int) -> int:
        unit = queue.unit_at(number)
        return _INT64_MAX if unit is None else unit[0]

    return begin + bisect_left(range(begin, end), log_offset, key=place)


class _TieredReader(PieceReader):
    # Damage by the flat files' own names.
    queue: FlatQueue

    def place(self, phy_offset: int) -> tuple[str, int]:
        return self.queue.log.place_of(phy_offset)

    def finding(self, finding: Finding) -> None:
        if self.mode == "fail":
            raise CorruptionError(f"{finding.detail}; {self.advice}", finding.path, finding.pos)
        self.take()
        if self.mode == "report":
            text = f"{finding.path}, position {finding.pos}: {finding.detail}"
            values = {"topic": self.queue.topic, "queue_id": self.queue.queue_id, CORRUPT_COLUMN: text}
            self.ready.append(self.one_row(values))
        elif finding.kind in ("missing_file", EXPIRED) and finding.path not in self.warned_of:
            self.warned_of.add(finding.path)
            logger.warning("%s: %s; its messages are left out", finding.path, finding.detail)


def tiered_piece_batches(job: ReadJob, piece: TieredPiece) -> Iterator[pa.RecordBatch]:
    """Yield the chosen messages of a piece of tiered storage, in queue order; otherwise like `piece_batches`.

    Raises
    ------
    CorruptionError, ChecksumError
        With ``corrupt=fail``, at the first damage; names file and position.  What the broker deleted since the job was
        planned is damage too.
    """
    pool = MappedFilePool(64)
    reader = _TieredReader(job)
    queue = FlatQueue(
        piece.path, piece.topic, piece.queue_id, pool, reader, piece.log_sizes, piece.unit_sizes, goes_on=True,
    )  # fmt: skip
    reader.queue, reader.log = queue, queue.log
    try:
        yield from reader.queue_part(Part(queue, piece.begin, piece.end))
    finally:
        queue.close()
