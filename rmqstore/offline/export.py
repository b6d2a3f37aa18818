"""Messages of a store as files that other tools read: JSON lines, CSV, Arrow, Parquet, or a file for each body.

Owns which messages a selection means, the order in which they come (that of the log), and what damage does.  It opens stores
read-only and never changes one.  Invariants:

- An output has its name only when it is complete (`output_file`).
- Memory does not grow with the number of messages: what is held is a batch, and for a look-up by key 8 bytes for each hit.
- A message that is chosen is written or reported; where the index does not reach, the log itself is searched.
- JSON lines, CSV and single files need no library; Arrow and Parquet need pyarrow.  All formats give the same rows.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import gzip
import heapq
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Protocol

from rmqstore import _numpy as np
from rmqstore._columns import COLUMN_NAMES, ArrowColumns
from rmqstore._core import Verdict, check_record
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.unit_queue import REPAIR
from rmqstore.errors import (
    ChecksumError,
    CorruptionError,
    Finding,
    MissingDependencyError,
    OffsetOutOfRangeError,
)
from rmqstore.files.mapped_file import name_of_offset
from rmqstore.files.output_file import OutputFile, OutputFolder, format_of
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.index.key_source import SoughtKeys
from rmqstore.index.log_index import LogIndex
from rmqstore.message import (
    OTHER_MESSAGE,
    BodyText,
    MessageExt,
    body_text,
    json_pieces,
)
from rmqstore.offline.export_tiered import older_batches, older_messages
from rmqstore.remedies import Sentence
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.spans import without
from rmqstore.store.columns import (
    ColumnOptions,
    Columns,
    chosen_columns,
    import_pyarrow,
    scan_schema,
)
from rmqstore.store.local_queue import LocalQueue
from rmqstore.store.message_store import MessageStore
from rmqstore.store.queue_columns import chosen, rows_at
from rmqstore.store.tiered_only import tiered_spans
from rmqstore.texts import harmless_cell

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "BODY_FORMS",
    "COMPRESSIONS",
    "CORRUPT_MODES",
    "FORMATS",
    "ExportReport",
    "Selection",
    "export",
]

FORMATS = ("jsonl", "csv", "arrow", "parquet", "files")
"""The formats of an export."""

BODY_FORMS = ("text", "hex", "base64", "raw", "none")
"""How bodies are written: text where they are UTF-8 (else base64), hexadecimal, base64, bytes as they are, or not at all."""

CORRUPT_MODES = ("fail", "report", "skip")
"""What damage does: end the export, be passed over and counted, or be written with ``corrupt`` set."""

COMPRESSIONS = {
    "jsonl": ("none", "gzip", "zstd"),
    "csv": ("none", "gzip", "zstd"),
    "arrow": ("none", "lz4", "zstd"),
    "parquet": ("none", "snappy", "gzip", "zstd"),
    "files": ("none",),
}
"""The compressions of each format."""

logger = logging.getLogger(__name__)

_BODIES = ("body", "body_stored")
# A CRC covers the body, so it is looked at where a body or a word about it is asked for; the compression where the body
# is not asked for as it is stored.
_DECODED = frozenset({"body", "corrupt"})
_JUDGED = frozenset({*_BODIES, "corrupt"})
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_TIMES = ("born_timestamp", "store_timestamp")
_BATCH_ROWS = 8192
_BATCH_BYTES = 16 << 20
# Row groups of a Parquet file end with so many rows or bytes.
_GROUP_ROWS = 1 << 17
_GROUP_BYTES = 64 << 20
# Files in one folder of single bodies.
_FOLDER_FILES = 10_000
_CSV_END = "\r\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Damaged places of tiered storage that are named one by one.
_NAMED = 20
MANIFEST = "messages.jsonl"
"""The file that describes single bodies, in their folder."""


# ------------------------------------------------------------------------------------------------------------------ damage


@dataclass
class _Damage:
    """What damage does, and how much of it there was."""

    log: CommitLog
    mode: str
    records: int = 0
    stretches: int = 0
    size: int = 0
    findings: int = 0
    # Of tiered storage: the queue whose messages are looked at.
    queue: FlatQueue | None = None

    def where(self, phy_offset: int) -> tuple[str, int]:
        if self.queue is not None:
            return self.queue.log.place_of(phy_offset)
        pos = phy_offset % self.log.segment_size
        return os.path.join(self.log.path, name_of_offset(phy_offset - pos)), pos

    def stretch(self, begin: int, end: int, verdict: Verdict | None) -> None:
        """A part of the log that holds no record, or another than its queue says; None where no segment holds it."""
        if verdict is None:
            # Retention may have taken the oldest segments since the export began: that is not damage.
            self.log.refresh()
            if end <= self.log.min_offset:
                self.log.warn_of_missing(begin, end)
                return
        if self.mode == "fail":
            what = ("the segment is missing",) if verdict is None else ("no whole record begins here (", verdict, ")")
            if verdict is Verdict.RECORD:
                what = (f"the record is another message than its queue leads to ({OTHER_MESSAGE})",)
            raise CorruptionError(
                Sentence(
                    *what,
                    f", phy offset {begin}; corrupt='skip' (--corrupt skip) passes over it, and rmqstore verify lists all that is "
                    "wrong",
                ),
                *self.where(begin),
            )
        self.stretches += 1
        self.size += end - begin

    def units(self, queue: AnyConsumeQueue, begin: int, end: int) -> None:
        """Queue offsets for which no unit is there, of a queue that had some there, or has some after them."""
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
                f"no unit of queue {name} is there for queue offsets {begin} to {end - 1}; {REPAIR}; corrupt='skip' "
                "(--corrupt skip) passes over it",
                queue.files.path,
            )
        self.stretches += 1

    def finding(self, finding: Finding) -> None:
        """A place of tiered storage that holds no message of its queue."""
        if self.mode == "fail":
            advice = (
                "corrupt='skip' (--corrupt skip) passes over it, and rmqstore verify --tiered lists all that is wrong"
            )
            raise CorruptionError(f"{finding.detail}; {advice}", finding.path, finding.pos)
        self.stretches += 1
        self.findings += 1
        if self.findings <= _NAMED:
            logger.warning("%s: %s; these messages are left out", finding.path, finding.detail)

    def is_sound_in(self, queue: FlatQueue, message: MessageExt, names: Sequence[str]) -> bool:
        """bool: as `is_sound`, of a message in tiered storage."""
        self.queue = queue
        try:
            return self.is_sound(message, names)
        finally:
            self.queue = None

    def record(self, message: MessageExt) -> bool:
        """bool: write this message, which is corrupt."""
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
        """bool: as `record`, of a row of columns."""
        message = (self.log if self.queue is None else self.queue.log).look_up(phy_offset)
        if message is None:
            raise CorruptionError(
                f"the record at phy offset {phy_offset} changed while it was read", *self.where(phy_offset)
            )
        return self.record(message)

    def is_sound(self, message: MessageExt, names: Sequence[str]) -> bool:
        """bool: write these columns of this message."""
        damaged = not message.crc_agrees if _DECODED.isdisjoint(names) else message.corrupt
        return _JUDGED.isdisjoint(names) or not damaged or self.record(message)


# ------------------------------------------------------------------------------------------------- where the messages are


class _Source:
    """The places of the chosen messages in a log, in its order, some at a time."""

    def __init__(
        self,
        store: MessageStore,
        selection: Selection,
        damage: _Damage,
        progress: Callable[[int, int], None] | None,
    ):
        self.store, self.log = store, store.commit_log
        self.selection = selection
        self.damage = damage
        # Where segments began that were told to be missing.
        self._missing: set[int] = set()
        low = self.log.min_offset
        high = self.log.max_offset
        self.begin = low if selection.begin_phy_offset is None else max(selection.begin_phy_offset, low)
        self.end = high if selection.end_phy_offset is None else max(min(selection.end_phy_offset, high), self.begin)
        if low < self.begin == selection.begin_phy_offset:
            # Any number may be given; a pass begins with a record.
            base = self.begin - self.begin % self.log.segment_size
            self.begin = self.log.step_to(max(base, low), self.begin)
        self.progress = progress

    @property
    def is_scan(self) -> bool:
        """bool: a pass over the log, whose rows the core chooses alone."""
        return self.selection.keys is None and not self.selection.by_queue

    def tell(self, phy_offset: int) -> None:
        if self.progress is not None and self.end > self.begin:
            self.progress(min(max(phy_offset, self.begin), self.end) - self.begin, self.end - self.begin)

    def _within_times(self, begin: int, end: int) -> tuple[int, int]:
        # Without the segments at both ends of which no record was stored in the range; what they hold that is no record does
        # not matter either.  Times may fall, so that each record is compared.
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
        """Fill `out` with what the core chooses between two places."""
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
            # What lies in front of damage is judged first, so that the first damage is the one that is told.
            for stretch in stretches:
                before = int(np.searchsorted(phy_offsets, stretch[0]))
                yield phy_offsets[:before]
                self.damage.stretch(*stretch)
                phy_offsets = phy_offsets[before:]
            stretches.clear()
            yield phy_offsets

    def look_up(self, phy_offset: int) -> MessageExt | None:
        """The message at a place that `offsets` gave, None where none begins; a missing segment is told once."""
        message = self.log.look_up(phy_offset)
        if message is None and self.log.region_of(phy_offset) is None:
            base = phy_offset - phy_offset % self.log.segment_size
            if base not in self._missing:
                self._missing.add(base)
                self.damage.stretch(max(base, self.begin), min(base + self.log.segment_size, self.end), None)
        return message

    def offsets(self) -> Iterator[np.ndarray]:
        """The phy offsets of messages among which the chosen ones are, in ascending order."""
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
        candidates = index.candidates(sought)
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
        # What lies between the spans of the index files was perhaps never indexed, or its file is lost.
        for first, last in sorted(spans):
            newest = self.log.look_up(last)
            if last < at or newest is None:
                # Its end is not a record, so the file is not believed: the log itself is searched.
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
        # A message may be in several queues that are asked for.
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
        older = tiered_spans(self.store, topic, queue_id)
        newest = -1

        def on_gone(first: int, last: int) -> None:
            # What tiered storage has is read from there.
            for begin, end in without(first, last, older):
                self.damage.units(queue, begin, end)

        source = LocalQueue(queue, self.log)
        high = max(min(high, queue.max_queue_offset), low)
        if self.selection.begin is not None or self.selection.end is not None:
            first, last = (
                source.find_in_times(low, high, self.selection.times, newest=newest_first)
                for newest_first in (False, True)
            )
            low, high = (low, low) if first is None or last is None else (first, last + 1)
        for each in queue.places(low, high, on_gone):
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
                    self.damage.stretch(phy_offset, phy_offset + max(size, 0), self._judged(phy_offset, size))
                elif phy_offset > newest:
                    # In a damaged queue offsets may fall; what was passed is not given twice.
                    newest = phy_offset
                    yield phy_offset

    def _judged(self, phy_offset: int, size: int) -> Verdict | None:
        try:
            mapped_file = self.log.segment(phy_offset)
            base = mapped_file.file_from_offset
            verdict, found, _ = check_record(mapped_file.region, phy_offset - base, base, 0)
            return Verdict.BAD_SIZE if verdict is Verdict.RECORD and found != size else verdict
        except OffsetOutOfRangeError:
            return None


def _messages(source: _Source, names: Sequence[str]) -> Iterator[MessageExt]:
    damage = source.damage
    yield from older_messages(
        source.store, source.selection, lambda queue, message: damage.is_sound_in(queue, message, names)
    )
    for phy_offsets in source.offsets():
        for phy_offset in phy_offsets.tolist():
            message = source.look_up(phy_offset)
            if message is not None and source.selection.has(message) and source.damage.is_sound(message, names):
                yield message


def _batches(source: _Source, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    # The same rows as those of `_messages`, as record batches.
    judged = not _JUDGED.isdisjoint(columns)
    extra = [name for name in ("corrupt", "phy_offset") if judged and name not in columns]
    decode = not _DECODED.isdisjoint(columns)
    options = ColumnOptions([*columns, *extra], _BATCH_ROWS, byte_limit=_BATCH_BYTES, decode=decode)
    made = Columns(options, source.log.crc_check)
    for queue, batch in older_batches(source.store, source.selection, made):
        source.damage.queue = queue
        sound = _sound_rows(batch, columns, source.damage, judged)
        source.damage.queue = None
        yield sound
    if source.is_scan:
        ready: list[pa.RecordBatch] = []

        def take() -> None:
            if made.out.count:
                ready.append(_sound_rows(made.take(), columns, source.damage, judged))

        def on_damage(begin: int, end: int, verdict: Verdict | None) -> None:
            # What lies in front of it is judged first, so that the first damage is the one that is told.
            take()
            source.damage.stretch(begin, end, verdict)

        for _ in source.fill(made.out, source.begin, source.end, on_damage):
            take()
            yield from ready
            ready.clear()
        return
    source.selection.choose(made.out, by_place=True)
    for phy_offsets in source.offsets():
        chosen = [
            phy_offset
            for phy_offset in phy_offsets.tolist()
            if (message := source.look_up(phy_offset)) is not None and source.selection.has(message)
        ]
        for batch in rows_at(source.log, made, np.array(chosen, np.int64))[0]:
            yield _sound_rows(batch, columns, source.damage, judged)


def _sound_rows(batch: pa.RecordBatch, columns: tuple[str, ...], damage: _Damage, judged: bool) -> pa.RecordBatch:
    if not judged:
        return batch
    bad = batch.column("corrupt").to_numpy(zero_copy_only=False)
    if bad.any():
        keep = np.ones(len(bad), bool)
        for place in np.flatnonzero(bad).tolist():
            keep[place] = damage.row(batch.column("phy_offset")[place].as_py())
        batch = batch.filter(import_pyarrow().array(keep))
    return batch.select(list(columns))


@contextlib.contextmanager
def _compressed(file: IO[bytes], compression: str) -> Iterator[IO[bytes]]:
    if compression == "gzip":
        # No name and no time: the same messages give the same bytes.
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            yield packed  # type: ignore[misc]
    elif compression == "zstd":
        with _import_zstandard().ZstdCompressor().stream_writer(file, closefd=False) as packed:
            yield packed
    else:
        yield file


def _import_zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError(
            "files compressed with zstd need the library zstandard: install it with 'pip install rmqstore[compression]'"
        ) from None
    return zstandard


# ----------------------------------------------------------------------------------------------------------------- writing


def _body(message: MessageExt, name: str) -> bytes:
    return message.body_stored if name == "body_stored" or message.corrupt else message.body


def message_row(message: MessageExt, columns: Sequence[str], form: str, zeros: bool = True) -> dict[str, Any]:
    """dict: these columns of a message as values that JSON can hold; times are ms since epoch.

    After ``body`` stands ``body_encoding``: utf-8, hex or base64.  Bodies are those of `body_text`, which takes `zeros`.
    """
    row: dict[str, Any] = {}
    for name in columns:
        if name in _BODIES:
            row[name], row[f"{name}_encoding"] = body_text(_body(message, name), form, zeros)
        else:
            row[name] = getattr(message, name)
    return row


class _Writer(Protocol):
    def message(self, message: MessageExt) -> None: ...

    def close(self) -> None: ...


def _visible(text: str) -> str:
    # What a terminal could obey or hide, as JSON escapes it.
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _write_json(file: IO[bytes], row: dict[str, Any], shown: bool = False) -> None:
    for piece in json_pieces(row, _encode):
        file.write(_bytes(piece, shown))
    file.write(b"\n")


def _bytes(text: str, shown: bool) -> bytes:
    return (_visible(text) if shown else text).encode("utf-8", "backslashreplace")


class _JsonLines:
    def __init__(self, file: IO[bytes], columns: Sequence[str], form: str, shown: bool):
        self.file, self.columns, self.form, self.shown = file, columns, form, shown

    def message(self, message: MessageExt) -> None:
        _write_json(self.file, message_row(message, self.columns, self.form), self.shown)

    def close(self) -> None:
        pass


def iso_time(timestamp: int) -> str:
    """str: ms since epoch as ISO 8601 in UTC; the bare number where no calendar reaches."""
    try:
        moment = _EPOCH + datetime.timedelta(milliseconds=timestamp)
    except OverflowError:
        return str(timestamp)
    return moment.isoformat(timespec="milliseconds")


class _Csv:
    def __init__(self, file: IO[bytes], columns: Sequence[str], form: str, shown: bool, safe: bool):
        self.file, self.columns, self.form, self.shown, self.safe = file, columns, form, shown, safe
        # Lines end with "\n" alone, which every tool reads, but Python before 3.13 puts a field that holds "\r" in quotes
        # only where a line ends with it: `write` takes it away again.
        self.rows = csv.writer(self, lineterminator=_CSV_END)
        self.rows.writerow(
            [each for name in columns for each in ([name, f"{name}_encoding"] if name in _BODIES else [name])]
        )

    def write(self, text: str) -> None:
        # One call for each row.
        self.file.write(text.removesuffix(_CSV_END).encode("utf-8", "backslashreplace") + b"\n")

    def message(self, message: MessageExt) -> None:
        # Readers of CSV take no zero bytes.
        row = message_row(message, self.columns, self.form, zeros=False)
        cells: list[str] = []
        for name, value in row.items():
            if type(value) is BodyText:
                self._write_long(cells, value)
                cells = [""]
                continue
            cell = _cell(name, value)
            # A number may be negative.
            if self.safe and not isinstance(value, int):
                cell = harmless_cell(cell)
            cells.append(_visible(cell) if self.shown else cell)
        self.rows.writerow(cells)

    def _write_long(self, before: list[str], body: BodyText) -> None:
        # The cells before a large body, and the body in pieces.
        if before:
            part = io.StringIO()
            csv.writer(part, lineterminator="").writerow([*before, ""])
            self.file.write(part.getvalue().encode("utf-8", "backslashreplace"))
        self.file.write(b'"')
        for number, piece in enumerate(body):
            text = harmless_cell(piece) if self.safe and number == 0 else piece
            self.file.write(_bytes(text.replace('"', '""'), self.shown))
        self.file.write(b'"')

    def close(self) -> None:
        pass


def _cell(name: str, value: Any) -> str:
    if type(value) is str:
        return value
    if value is None:
        return ""
    if name == "keys":
        return " ".join(value)
    if name == "properties":
        return _encode(value)
    if name in _TIMES:
        return iso_time(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


class _Files:
    def __init__(self, folder: OutputFolder, columns: Sequence[str], by_number: bool):
        self.folder = folder
        # In tiered storage each queue has a phy offset 0.
        self.by_number = by_number
        self.columns = [name for name in columns if name not in _BODIES]
        self.source = "body_stored" if "body_stored" in columns and "body" not in columns else "body"
        self.num = 0
        self.manifest = folder.new_file(MANIFEST)

    def message(self, message: MessageExt) -> None:
        row = message_row(message, self.columns, "raw")
        body = _body(message, self.source)
        # Nothing of the store is part of a name.
        folder = f"bodies/{self.num // _FOLDER_FILES:06}"
        if self.num == 0:
            self.folder.make_folder("bodies")
        if self.num % _FOLDER_FILES == 0:
            self.folder.make_folder(folder)
        self.num += 1
        number = self.num - 1 if self.by_number else message.phy_offset
        row["body_file"] = f"{folder}/{name_of_offset(number)}"
        with self.folder.new_file(row["body_file"]) as file:
            file.write(body)
        _write_json(self.manifest, row)

    def close(self) -> None:
        self.manifest.flush()
        os.fsync(self.manifest.fileno())
        self.manifest.close()


class _Sink(io.RawIOBase):
    """What pyarrow writes to.  Its writers end a file properly even when they are thrown away; then nothing goes on."""

    def __init__(self, file: IO[bytes]):
        self.file: IO[bytes] | None = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(memoryview(data).cast("B")) if self.file is None else self.file.write(data)

    def abandon(self) -> None:
        self.file = None


class _ArrowFile:
    """Record batches into an Arrow or Parquet file; Parquet's row groups are gathered."""

    def __init__(self, file: _Sink, format: str, columns: Sequence[str], form: str, compression: str, seekable: bool):
        pa = self.pa = import_pyarrow()
        self.form = form
        self.schema = _arrow_schema(pa, columns, form)
        self.ready: list[Any] = []
        self.rows = self.size = 0
        self.groups = format == "parquet"
        if format == "arrow":
            options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
            # A stream can be written to a pipe, and read from one.
            new = pa.ipc.new_file if seekable else pa.ipc.new_stream
            self.writer = new(file, self.schema, options=options)
        else:
            import pyarrow.parquet

            self.writer = pyarrow.parquet.ParquetWriter(
                file, self.schema, compression="NONE" if compression == "none" else compression
            )

    def batch(self, batch: pa.RecordBatch) -> None:
        batch = _arrow_batch(self.pa, batch, self.schema, self.form)
        if not self.groups:
            self.writer.write_batch(batch)
            return
        self.ready.append(batch)
        self.rows += batch.num_rows
        self.size += batch.nbytes
        if self.rows >= _GROUP_ROWS or self.size >= _GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if self.ready:
            table = self.pa.Table.from_batches(self.ready, schema=self.schema)
            self.writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self.ready, self.rows, self.size = [], 0, 0

    def close(self) -> None:
        self._write_group()
        self.writer.close()


def _arrow_schema(pa: Any, columns: Sequence[str], form: str) -> pa.Schema:
    fields = []
    for each in scan_schema(columns):
        if each.name in _BODIES and form != "raw":
            fields += [pa.field(each.name, pa.string()), pa.field(f"{each.name}_encoding", pa.string())]
        else:
            fields.append(each)
    return pa.schema(fields)


def _arrow_batch(pa: Any, batch: pa.RecordBatch, schema: pa.Schema, form: str) -> pa.RecordBatch:
    if form == "raw" or not any(name in _BODIES for name in batch.schema.names):
        return batch
    arrays = []
    for name in batch.schema.names:
        array = batch.column(name)
        if name not in _BODIES:
            arrays.append(array)
            continue
        pairs = [(str(text), how) for text, how in (body_text(body, form) for body in array.to_pylist())]
        arrays += [pa.array([text for text, _ in pairs], pa.string()), pa.array([how for _, how in pairs], pa.string())]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# ------------------------------------------------------------------------------------------------------------------ export


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes
    ----------
    output, format : str
        ``-`` for a file that the caller opened; empty where none was made, as the store has no such topic.
    messages : int
        Rows written.
    corrupt_records : int
        Messages whose CRC is wrong or whose body cannot be decompressed: left out with ``skip``, among `messages` with
        ``report``, their bodies as they are stored.
    damaged_stretches, damaged_size : int
        Parts of the log, and their bytes, that hold no record; nothing can be written of them.  Places of tiered storage
        count as stretches without a size, and the first of them are named in warnings.
    columns : tuple of str
    notes : tuple of str
        What is not known of tiered storage, and what that means; as of `TieredStore.notes`.
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
    *,
    config: StoreConfig | None = None,
    format: str | None = None,
    columns: Iterable[str] | None = None,
    body: str | None = None,
    corrupt: str = "fail",
    compression: str | None = None,
    force: bool = False,
    shown: bool = False,
    safe_csv: bool = False,
    progress: Callable[[int, int], None] | None = None,
    tiered: str | os.PathLike[str] | None = None,
    only_known_topics: bool = False,
) -> ExportReport:
    """Write messages of the store at `path` to a file, in the order of the log; the store is only read.

    Parameters
    ----------
    path : path
        The store's root; a broker may be running on it.  What is put after the call began is left out.
    output : path or binary file
        The format ``files`` makes a folder.  A path has its name only when all is written; a file that the caller opened is
        neither closed nor forced to the disk.
    selection : Selection, optional
        By default everything.
    config : StoreConfig, optional
        By default `StoreConfig.infer`.
    format : {"jsonl", "csv", "arrow", "parquet", "files"}, optional
        By default what the ending of `output` says, ``jsonl`` for an open file.
    columns : iterable of str, optional
        As of `MessageStore.scan`; by default all but those that repeat others.
    body : {"text", "hex", "base64", "raw", "none"}, optional
        How bodies are written.  By default ``raw`` for Arrow, Parquet and single files, ``text`` otherwise: bodies that are not
        UTF-8 become base64, and ``body_encoding`` says so.
    corrupt : {"fail", "report", "skip"}
        What damage does.  Without ``body`` and ``corrupt`` among the columns CRCs are not looked at.
    compression : str, optional
        One of `COMPRESSIONS`; by default what the ending says (``.gz``, ``.zst``), zstd for Parquet.
    force : bool
        Replace a file that exists; a folder is never replaced.
    shown : bool
        The output is a terminal: everything outside ASCII is escaped.
    safe_csv : bool
        In CSV, put an apostrophe before each text that a spreadsheet would run as a formula; an import does not take it
        away.
    progress : callable, optional
        Called with (bytes of the log done, bytes in all).
    tiered : path, optional
        The broker's tieredStoreFilePath: what the local log no longer has comes from there first, queue by queue; not with a
        range of phy offsets, which are places of the local log.
    only_known_topics : bool
        Make no output, and replace none, where the store has none of the selection's topics: a name that was mistyped leaves
        nothing that looks like an answer.  Otherwise the output is there, without a row.

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
        An option that there is not, or one that does not fit the format.
    MissingDependencyError
        The format needs a library that is not installed.
    """
    is_path = isinstance(output, (str, os.PathLike))
    target = os.fspath(output) if is_path else "-"  # type: ignore[arg-type]
    told, told_compression = format_of(target) if is_path else ("jsonl", None)
    if format is None:
        format = told
        if format is None:
            raise ValueError(
                f"the name {target!r} does not tell the format; give one of {', '.join(FORMATS)}, or a name that ends with "
                ".jsonl, .csv, .arrow or .parquet"
            )
    if told_compression is not None and format not in ("jsonl", "csv"):
        raise ValueError(
            f"a {format} file is compressed inside: leave .gz and .zst out of its name, and give --compress"
        )
    if safe_csv and format != "csv":
        raise ValueError(f"safe_csv is for CSV, and the format is {format}")
    names, form, compression = _checked(format, columns, body, corrupt, compression or told_compression)
    if format in ("arrow", "parquet"):
        import_pyarrow()
    read_only = [path] if tiered is None else [path, tiered]
    with contextlib.ExitStack() as stack:
        # That the output cannot be written is said before anything is read.
        folder = None
        file: IO[bytes] | None = None
        if format == "files":
            if not is_path:
                raise ValueError("the format files makes a folder; give its name")
            folder = OutputFolder(target, outside=read_only)
        elif is_path:
            opened = OutputFile(target, force=force, outside=read_only)
        store = stack.enter_context(MessageStore.open(path, config=config, read_only=True, tiered=tiered))
        log = store.commit_log
        damage = _Damage(log, corrupt)
        notes: tuple[str, ...] = ()
        if store.tiered is not None:
            store.tiered.on_damage, store.tiered.goes_on = damage.finding, True
            notes = tuple(store.tiered.notes)
        source = _Source(store, Selection() if selection is None else selection.check_times(), damage, progress)
        source.tell(source.begin)
        if folder is not None:
            writer: Any = _Files(stack.enter_context(folder), names, by_number=tiered is not None)
            stack.callback(writer.manifest.close)
        else:
            file = stack.enter_context(opened) if is_path else output  # type: ignore[assignment]
            assert file is not None
            packed = file if format in ("arrow", "parquet") else stack.enter_context(_compressed(file, compression))
            if format == "jsonl":
                writer = _JsonLines(packed, names, form, shown)
            elif format == "csv":
                writer = _Csv(packed, names, form, shown, safe_csv)
            else:
                sink = _Sink(packed)
                stack.callback(sink.abandon)
                writer = _ArrowFile(sink, format, names, form, compression, is_path and file.seekable())
        number = 0
        if format in ("arrow", "parquet"):
            for batch in _batches(source, names):
                if batch.num_rows:
                    writer.batch(batch)
                    number += batch.num_rows
        else:
            for message in _messages(source, names):
                writer.message(message)
                number += 1
        writer.close()
        source.tell(source.end)
        topics = {*(source.selection.topics or ())}
        if only_known_topics and is_path and not number and topics and topics.isdisjoint(store.topics()):
            (opened if folder is None else folder).drop()
            target = ""
    return ExportReport(target, format, number, damage.records, damage.stretches, damage.size, names, notes)


def _checked(
    format: str, columns: Iterable[str] | None, body: str | None, corrupt: str, compression: str | None
) -> tuple[tuple[str, ...], str, str]:
    for value, what, known in [(format, "format", FORMATS), (corrupt, "corrupt", CORRUPT_MODES)]:
        if value not in known:
            raise ValueError(f"{what} is {value!r}; give {', '.join(known[:-1])} or {known[-1]}")
    if body is not None and body not in BODY_FORMS:
        raise ValueError(f"body is {body!r}; give {', '.join(BODY_FORMS[:-1])} or {BODY_FORMS[-1]}")
    binary = format in ("arrow", "parquet", "files")
    form = body or ("raw" if binary else "text")
    if form == "raw" and not binary:
        raise ValueError(f"{format} has no place for raw bytes; give text, hex, base64 or none, or another format")
    if format == "files" and form != "raw":
        raise ValueError("the format files writes bodies as they are; leave body out, or choose another format")
    names = chosen_columns(columns)
    if format == "files" and _JUDGED.isdisjoint(names):
        names = (*names, "body")
    if form == "none":
        names = tuple(name for name in names if name not in _BODIES)
    if not names:
        raise ValueError(f"no column is left; there are {', '.join(COLUMN_NAMES)}")
    compression = compression or ("zstd" if format == "parquet" else "none")
    if compression not in COMPRESSIONS[format]:
        raise ValueError(f"{format} is not compressed with {compression}; give {', '.join(COMPRESSIONS[format])}")
    if compression == "zstd" and format in ("jsonl", "csv"):
        _import_zstandard()
    return names, form, compression
