"""Export messages of a store to JSON lines, CSV, Arrow, Parquet, or a file for each body, in the order of the log.

Each chosen message is written or reported; the log is scanned where it is not indexed.  Memory does not grow with the number of
messages, except for 8 bytes for each hit of a search by key.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore._columns import ArrowColumns
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.unit_queue import REPAIR
from rmqstore.errors import ChecksumError, CorruptionError, Finding, Sentence
from rmqstore.files.mapped_file import name_of_offset
from rmqstore.files.output_file import OutputFile, OutputFolder
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.index.key_source import SoughtKeys
from rmqstore.index.log_index import LogIndex
from rmqstore.message import OTHER_MESSAGE, MessageExt
from rmqstore.offline.export_files import (
    DECODED,
    JUDGED,
    ArrowFile,
    Csv,
    ExportOptions,
    Files,
    JsonLines,
    Sink,
    compressed,
    layout_of,
)
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import STEP, DamagePolicy
from rmqstore.spans import without
from rmqstore.store.columns import ColumnOptions, Columns, import_pyarrow
from rmqstore.store.local_queue import LocalQueue, judge
from rmqstore.store.message_store import MessageStore
from rmqstore.store.placed_columns import chosen, rows_at
from rmqstore.store.results import QueryResult

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ExportOptions", "ExportReport", "Selection", "export"]

logger = logging.getLogger(__name__)

_BATCH_ROWS = 8192
_BATCH_BYTES = 16 << 20
# Damaged places of tiered storage that are reported one by one.
_NAMED = 20
_ADVICE = "corrupt='skip' (--corrupt skip) passes over it"


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    `output` is ``-`` for a file that the caller opened, and empty if none was made because the store has no such topic.
    `corrupt_records` is the number of messages with a wrong CRC or compression: left out with ``skip``, among `messages` with
    ``report``.  `damaged_stretches` counts parts of the log without a record, `damaged_size` their bytes; places of tiered storage
    count without a size.  `notes` are those of tiered storage.
    """

    output: str
    format: str
    messages: int
    corrupt_records: int
    damaged_stretches: int
    damaged_size: int
    columns: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())


def export(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | IO[bytes],
    selection: Selection | None = None,
    options: ExportOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write messages of the store at `path` to a file, in the order of the log; the store is only read.

    Parameters
    ----------
    path : path
        The store's root; a broker may be running on it.  Messages that are put after the call began are left out.
    output : path or binary file
        The format ``files`` makes a folder.  The output has its name only once it is complete; a file that the caller opened is
        neither closed nor forced to the disk.
    selection : Selection, optional
        By default everything.
    options : ExportOptions, optional
        By default JSON lines, or the format of the ending of `output`.
    progress : callable, optional
        Called with (bytes of the log done, bytes in all).

    Returns
    -------
    ExportReport

    Raises
    ------
    CorruptionError, ChecksumError
        Damage, with ``corrupt="fail"``; there is no output then.
    StoreError
        There is no store, or the output exists.
    ValueError
        An unknown option, or one that does not fit the format.
    MissingDependencyError
        The format needs a library that is not installed.
    """
    options = options or ExportOptions()
    target = os.fspath(output) if isinstance(output, (str, os.PathLike)) else None
    layout = layout_of(options, target)
    read_only = [each for each in (path, options.tiered) if each is not None]
    # Errors of the output come before anything is read.
    made: OutputFile | OutputFolder | None = None
    if target is not None and layout.format == "files":
        made = OutputFolder(target, outside=read_only)
    elif target is not None:
        made = OutputFile(target, force=options.force, outside=read_only)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(
            MessageStore.open(path, config=options.config, read_only=True, tiered=options.tiered)
        )
        damage = ExportDamage(store.commit_log, options.corrupt)
        store.older.pass_over(damage)
        source = Source(store, Selection() if selection is None else selection.check_times(), damage, progress)
        source.tell(source.begin)
        opened: Any = output if made is None else stack.enter_context(made)
        number = 0
        if layout.format in ("arrow", "parquet"):
            sink = Sink(opened)
            stack.callback(sink.abandon)
            writer: Any = ArrowFile(sink, layout, made is not None and opened.seekable())
            for batch in source.batches(layout.columns):
                if batch.num_rows:
                    writer.batch(batch)
                    number += batch.num_rows
        else:
            if layout.format == "files":
                writer = Files(opened, layout, not store.older.one_log)
                stack.callback(writer.manifest.close)
            else:
                packed = stack.enter_context(compressed(opened, layout.compression))
                writer = (JsonLines if layout.format == "jsonl" else Csv)(packed, layout)
            for message in source.messages(layout.columns):
                writer.message(message)
                number += 1
        writer.close()
        source.tell(source.end)
        topics = {*(source.selection.topics or ())}
        if options.only_known_topics and made is not None and not number and topics and topics.isdisjoint(store.topics()):
            made.drop()
            target = ""
    return ExportReport(
        "-" if target is None else target, layout.format, number, damage.records, damage.stretches, damage.size,
        layout.columns, tuple(store.older.notes),
    )  # fmt: skip


class ExportDamage(DamagePolicy):
    """Counts damage, and raises it if `mode` is "fail"."""

    def __init__(self, log: CommitLog, mode: str):
        super().__init__(mode, f"{_ADVICE}, and rmqstore verify --tiered lists all that is wrong")
        self.log = log
        self.records = self.stretches = self.size = self.places = 0
        # The queue of tiered storage that is being read.
        self.queue: FlatQueue | None = None

    def where(self, phy_offset: int) -> tuple[str, int]:
        """Return the file and the position in it."""
        if self.queue is not None:
            return self.queue.log.place_of(phy_offset)
        pos = phy_offset % self.log.segment_size
        return os.path.join(self.log.path, name_of_offset(phy_offset - pos)), pos

    def stretch(self, begin: int, end: int, verdict: Verdict | None) -> None:
        """Take a part of the log without a record, or with another than its queue says; `verdict` is None without a segment."""
        if verdict is None:
            # Segments that retention deleted since the export began are not damage.
            self.log.refresh()
            if end <= self.log.min_offset:
                self.log.warn_of_missing(begin, end)
                return
        if self.mode == "fail":
            what = ("the segment is missing",) if verdict is None else ("no whole record begins here (", verdict, ")")
            if verdict is Verdict.RECORD:
                what = (f"the record is another message than its queue leads to ({OTHER_MESSAGE})",)
            raise CorruptionError(
                Sentence(*what, f", phy offset {begin}; {_ADVICE}, and rmqstore verify lists all that is wrong"),
                *self.where(begin),
            )
        self.stretches += 1
        self.size += end - begin

    def units(self, queue: AnyConsumeQueue, begin: int, end: int) -> None:
        """Take queue offsets without a unit, of a queue that had them, or has later ones."""
        self.log.refresh()
        queue.refresh()
        name = f"{queue.topic}/{queue.queue_id}"
        if end <= queue.bounds(self.log.min_offset)[0]:
            logger.warning(
                "%s: retention took queue offsets %d to %d of %s since the export began; they are left out",
                queue.files.path, begin, end - 1, name,
            )  # fmt: skip
            return
        if self.mode == "fail":
            raise CorruptionError(
                f"no unit of queue {name} is there for queue offsets {begin} to {end - 1}; {REPAIR}; {_ADVICE}",
                queue.files.path,
            )
        self.stretches += 1

    def leave_out(self, finding: Finding) -> None:
        """Take a place of tiered storage without a message of its queue."""
        self.stretches += 1
        self.places += 1
        if self.places <= _NAMED:
            logger.warning("%s: %s; these messages are left out", finding.path, finding.detail)

    def record(self, message: MessageExt) -> bool:
        """Return True if this corrupt message is to be written."""
        if self.mode == "fail":
            what, kind = f"has a body that is not what its compression flag says ({message.damage})", CorruptionError
            if not message.crc_agrees:
                what, kind = "does not agree with its CRC", ChecksumError
            raise kind(
                f"the record at phy offset {message.phy_offset} {what}; corrupt='skip' (--corrupt skip) leaves it out, 'report' "
                "writes it as it is stored",
                *self.where(message.phy_offset),
            )
        self.records += 1
        return self.mode == "report"

    def row(self, phy_offset: int) -> bool:
        """Return True if a row of columns is to be written, whose message is corrupt."""
        message = (self.log if self.queue is None else self.queue.log).look_up(phy_offset)
        if message is None:
            raise CorruptionError(
                f"the record at phy offset {phy_offset} changed while it was read", *self.where(phy_offset)
            )
        return self.record(message)

    def is_sound(self, message: MessageExt, names: Sequence[str]) -> bool:
        """Return True if these columns of a message are to be written."""
        damaged = not message.crc_agrees if DECODED.isdisjoint(names) else message.corrupt
        return JUDGED.isdisjoint(names) or not damaged or self.record(message)


class Source:
    """The chosen messages of a store, in the order of the log, some at a time."""

    def __init__(
        self,
        store: MessageStore,
        selection: Selection,
        damage: ExportDamage,
        progress: Callable[[int, int], None] | None,
    ):
        self.store, self.log = store, store.commit_log
        self.selection = selection
        self.damage = damage
        # Begins of missing segments that were reported.
        self._missing: set[int] = set()
        low = self.log.min_offset
        high = self.log.max_offset
        self.begin = low if selection.begin_phy_offset is None else max(selection.begin_phy_offset, low)
        self.end = high if selection.end_phy_offset is None else max(min(selection.end_phy_offset, high), self.begin)
        if low < self.begin == selection.begin_phy_offset:
            # Any number may be given; a scan begins with a record.
            base = self.begin - self.begin % self.log.segment_size
            self.begin = self.log.step_to(max(base, low), self.begin)
        self.progress = progress

    def tell(self, phy_offset: int) -> None:
        """Report the progress of the export."""
        if self.progress is not None and self.end > self.begin:
            self.progress(min(max(phy_offset, self.begin), self.end) - self.begin, self.end - self.begin)

    def _within_times(self, begin: int, end: int) -> tuple[int, int]:
        # Leave out segments at both ends without a record in the range of times, and damage in them.  Times may fall, so that each
        # record is compared.
        if self.selection.begin is None and self.selection.end is None:
            return begin, end
        out = ArrowColumns((), 1)
        low, high = self.selection.times
        out.choose(begin_timestamp=low, end_timestamp=high)
        cuts = [begin, *(base for base in self.log.files.offsets if begin < base < end), end]
        while len(cuts) > 1 and not self._has_row(out, cuts[0], cuts[1]):
            cuts.pop(0)
            self.tell(cuts[0])
        while len(cuts) > 1 and not self._has_row(out, cuts[-2], cuts[-1]):
            cuts.pop()
        return cuts[0], cuts[-1]

    def _has_row(self, out: ArrowColumns, begin: int, end: int) -> bool:
        next(self.log.fill(out, begin, end), None)
        return out.take()[0] > 0

    def fill(
        self, out: ArrowColumns, begin: int, end: int, on_damage: Callable[[int, int, Verdict | None], None]
    ) -> Iterator[int]:
        """Fill `out` with the records that the core chooses between two places."""
        begin, end = self._within_times(begin, end)
        self.selection.choose(out)
        for at in self.log.fill(out, begin, end, on_damage):
            yield at
            self.tell(at)

    def _scanned(self, begin: int, end: int) -> Iterator[np.ndarray]:
        out = ArrowColumns(["phy_offset"], capacity=_BATCH_ROWS)
        stretches: list[tuple[int, int, Verdict | None]] = []
        for _ in self.fill(out, begin, end, lambda *stretch: stretches.append(stretch)):
            num, parts, _ = out.take()
            phy_offsets = np.frombuffer(parts["phy_offset"][0], np.int64)[:num].copy()
            # Records before damage are checked first, so that the first damage is reported.
            for stretch in stretches:
                before = int(np.searchsorted(phy_offsets, stretch[0]))
                yield phy_offsets[:before]
                self.damage.stretch(*stretch)
                phy_offsets = phy_offsets[before:]
            stretches.clear()
            yield phy_offsets

    def look_up(self, phy_offset: int) -> MessageExt | None:
        """Return the message at a place of `offsets`, None where none begins; a missing segment is reported once."""
        message = self.log.look_up(phy_offset)
        if message is None and self.log.region_of(phy_offset) is None:
            base = phy_offset - phy_offset % self.log.segment_size
            if base not in self._missing:
                self._missing.add(base)
                self.damage.stretch(max(base, self.begin), min(base + self.log.segment_size, self.end), None)
        return message

    def offsets(self) -> Iterator[np.ndarray]:
        """Yield phy offsets of messages, in ascending order; the chosen messages are among them."""
        if self.selection.by_queue:
            yield from self._queued()
        elif self.selection.keys and self.selection.topics and self.store.index_service is not None:
            yield from self._indexed()
        else:
            yield from self._scanned(self.begin, self.end)

    def _indexed(self) -> Iterator[np.ndarray]:
        service = self.store.index_service
        assert service is not None
        pairs = itertools.product(dict.fromkeys(self.selection.topics or ()), dict.fromkeys(self.selection.keys or ()))
        sought = SoughtKeys.of_pairs(list(pairs), self.selection)
        index = LogIndex(self.store.path, self.log, service)
        candidates = next(index.candidates(sought))
        index.doubt(sought, candidates)
        service.note_damage()
        spans = []
        for name in service.names:
            header = service.file(name).header
            if name in service.distrusted:
                continue
            if header.index_count > 1 and header.begin_phy_offset <= header.end_phy_offset:
                spans.append((header.begin_phy_offset, header.end_phy_offset))
        found = np.unique(candidates.phy_offsets)
        at = self.begin
        # Between the spans of the index files, records may have no entry, or their file is lost.
        for first, last in sorted(spans):
            newest = self.log.look_up(last)
            if last < at or newest is None:
                # The header is wrong, so the log is scanned instead.
                continue
            first = max(first, at)
            yield from self._scanned(at, min(first, self.end))
            here = found[(found >= first) & (found <= last) & (found < self.end)]
            for start in range(0, len(here), _BATCH_ROWS):
                part = here[start : start + _BATCH_ROWS]
                yield part
                self.tell(int(part[-1]))
            at = last + newest.size
            if at >= self.end:
                return
        yield from self._scanned(at, self.end)

    def _queued(self) -> Iterator[np.ndarray]:
        selection = self.selection
        low = selection.begin_queue_offset or 0
        high = INT64_MAX if selection.end_queue_offset is None else selection.end_queue_offset
        units = [
            self._units(topic, queue_id, low, high)
            for topic in dict.fromkeys(selection.topics or ())
            for queue_id in self.store.queue_ids(topic)
            if selection.has_queue(topic, queue_id)
        ]
        batch: list[int] = []
        # A message may be in several of the chosen queues.
        for phy_offset, _ in itertools.groupby(heapq.merge(*units)):
            batch.append(phy_offset)
            if len(batch) == _BATCH_ROWS:
                yield np.array(batch, np.int64)
                self.tell(batch[-1])
                batch = []
        if batch:
            yield np.array(batch, np.int64)

    def _units(self, topic: str, queue_id: int, low: int, high: int) -> Iterator[int]:
        queue = self.store.queues.find(topic, queue_id)
        if queue is None:
            return
        low = max(low, queue.bounds(self.log.min_offset)[0])
        older = self.store.older.spans(topic, queue_id)
        newest = -1
        source = LocalQueue(queue, self.log)
        high = max(min(high, queue.max_queue_offset), low)
        if self.selection.begin is not None or self.selection.end is not None:
            first, last = (
                source.find_in_times(low, high, self.selection.times, newest=newest_first)
                for newest_first in (False, True)
            )
            low, high = (low, low) if first is None or last is None else (first, last + 1)
        # Messages in tiered storage are read from there.
        steps = (queue.places(first, last, self.damage) for first, last in without(low, high, older))
        for each in itertools.chain.from_iterable(steps):
            places = chosen(source, each.where(each.are_real), self.selection)
            kept = (places.phy_offsets >= self.begin) & (places.phy_offsets < self.end)
            for first, last in older:
                kept &= (places.queue_offsets < first) | (places.queue_offsets >= last)
            places = places[kept]
            for phy_offset, queue_offset, size in zip(
                places.phy_offsets.tolist(), places.queue_offsets.tolist(), places.sizes.tolist()
            ):
                message = self.log.look_up(phy_offset, size)
                if message is None or not message.check_queue(topic, queue_id, queue_offset):
                    self.damage.stretch(phy_offset, phy_offset + max(size, 0), judge(self.log, phy_offset, size))
                elif phy_offset > newest:
                    # Offsets may fall in a damaged queue; each is yielded once.
                    newest = phy_offset
                    yield phy_offset

    def _older(self) -> Iterator[tuple[FlatQueue, list[int]]]:
        # Queues of tiered storage, and log offsets in them of chosen messages that the local log no longer has.
        older, selection = self.store.older, self.selection
        wanted: set[tuple[str, int, int]] | None = None
        if selection.keys and selection.topics:
            wanted = {
                (message.topic, message.queue_id, message.queue_offset)
                for topic in dict.fromkeys(selection.topics)
                for key in dict.fromkeys(selection.keys)
                for message in older.with_key(QueryResult(), Selection((topic,), keys=(key,), max_num=INT64_MAX))
            }
        for queue, begin, end in older.ranges(selection):
            self.damage.queue = queue
            for each in queue.places(begin, end, STEP):
                places = chosen(queue, each, selection)
                found = []
                for row, queue_offset in enumerate(places.queue_offsets.tolist()):
                    if wanted is not None and (queue.topic, queue.queue_id, queue_offset) not in wanted:
                        continue
                    message = queue.log.look_up(int(places.phy_offsets[row]), int(places.sizes[row]))
                    if message is None or not message.check_queue(queue.topic, queue.queue_id, queue_offset):
                        queue.report_unread(places[row : row + 1])
                    elif selection.has(message):
                        found.append(int(places.phy_offsets[row]))
                if found:
                    yield queue, found
        self.damage.queue = None

    def messages(self, names: Sequence[str]) -> Iterator[MessageExt]:
        """Yield the chosen messages, for these columns."""
        damage = self.damage
        for queue, offsets in self._older():
            for offset in offsets:
                message = queue.log.look_up(offset)
                if message is None:
                    _report_gone(queue, offset)
                elif damage.is_sound(message, names):
                    yield message
        for phy_offsets in self.offsets():
            for phy_offset in phy_offsets.tolist():
                message = self.look_up(phy_offset)
                if message is not None and self.selection.has(message) and damage.is_sound(message, names):
                    yield message

    def batches(self, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        """Yield the chosen messages as record batches of these columns."""
        judged = not JUDGED.isdisjoint(columns)
        extra = [name for name in ("corrupt", "phy_offset") if judged and name not in columns]
        decode = not DECODED.isdisjoint(columns)
        options = ColumnOptions([*columns, *extra], _BATCH_ROWS, byte_limit=_BATCH_BYTES, decode=decode)
        made = Columns(options, self.log.crc_check)
        for queue, offsets in self._older():
            older, taken = rows_at(queue.log, made, np.array(offsets, np.int64))
            for batch in older:
                yield _sound_rows(batch, columns, self.damage, judged)
            for number in np.setdiff1d(np.arange(len(offsets)), taken).tolist():
                _report_gone(queue, offsets[number])
        if self.selection.keys is None and not self.selection.by_queue:
            # The core alone chooses the rows.
            ready: list[pa.RecordBatch] = []

            def take() -> None:
                if made.out.count:
                    ready.append(_sound_rows(made.take(), columns, self.damage, judged))

            def on_damage(begin: int, end: int, verdict: Verdict | None) -> None:
                # Records before damage are checked first, so that the first damage is reported.
                take()
                self.damage.stretch(begin, end, verdict)

            for _ in self.fill(made.out, self.begin, self.end, on_damage):
                take()
                yield from ready
                ready.clear()
            return
        self.selection.choose(made.out, by_place=True)
        for phy_offsets in self.offsets():
            places = [
                phy_offset
                for phy_offset in phy_offsets.tolist()
                if (message := self.look_up(phy_offset)) is not None and self.selection.has(message)
            ]
            for batch in rows_at(self.log, made, np.array(places, np.int64))[0]:
                yield _sound_rows(batch, columns, self.damage, judged)


def _sound_rows(batch: pa.RecordBatch, columns: tuple[str, ...], damage: ExportDamage, judged: bool) -> pa.RecordBatch:
    if not judged:
        return batch
    bad = batch.column("corrupt").to_numpy(zero_copy_only=False)
    if bad.any():
        keep = np.ones(len(bad), bool)
        for place in np.flatnonzero(bad).tolist():
            keep[place] = damage.row(batch.column("phy_offset")[place].as_py())
        batch = batch.filter(import_pyarrow().array(keep))
    return batch.select(list(columns))


def _report_gone(queue: FlatQueue, log_offset: int) -> None:
    hole = queue.log.hole_at(log_offset)
    if hole is not None:
        queue.damage.finding(hole.finding)
