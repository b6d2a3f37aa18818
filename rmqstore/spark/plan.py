"""Pieces of a log and of its queues, each to be read by a task of its own.

A piece owns the records that begin in it, wherever it is cut, so adjoining pieces have every record once.  It never imports
pyspark, and it only reads.

The first record of a piece is never guessed.  Bytes in a body may look like a record in every detail, so magic, lengths, own
offset and CRC prove nothing here.  The search begins where a record certainly does: at the start of the segment, or at a
unit of a consume queue that agrees with its record; from there it steps from header to header.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rmqstore import _core
from rmqstore._core import UnitLayout
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import queue_directories
from rmqstore.errors import OffsetOutOfRangeError, UnsupportedFormatError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import MappedFilePool, name_of_offset, offset_of_name
from rmqstore.files.open_file import open_regular
from rmqstore.message import MessageExt, is_light_queue
from rmqstore.selection import Selection
from rmqstore.spans import Span
from rmqstore.store.local_queue import refuse_light_queues
from rmqstore.store.lost_log import claimed_end, lost_ranges, lost_text
from rmqstore.store.recovery import claimed_by_queues
from rmqstore.store.undispatched import Undispatched

__all__ = [
    "PARTITION_BYTES",
    "LogPlan",
    "Piece",
    "QueuePiece",
    "first_offset",
    "is_no_file",
    "open_log",
    "queue_pieces",
    "segment_path",
]

logger = logging.getLogger(__name__)

PARTITION_BYTES = 128 * 1024 * 1024
"""Bytes of log in a piece, where nothing else is said."""

# A cut so near to its segment's start, or to a known record, is reached by stepping over headers alone.
_NEAR = 1024 * 1024
# Queues that are asked for a record before a cut; one that is near enough ends the search.
_QUEUES_ASKED = 64
_UNIT_SIZE = int(UnitLayout.UNIT_SIZE)
_UNIT = struct.Struct(">qiq")
_NOWHERE = (2**63 - 1, 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """The records that begin from phy offset `begin` to before `end`, all in one segment.

    A piece is `missing` if no segment is there that holds them; such a one may span many segments.
    """

    begin: int
    end: int
    missing: bool = False


@dataclass(frozen=True, slots=True)
class QueuePiece:
    """The messages of a queue from queue offset `begin` to before `end`."""

    topic: str
    queue_id: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class LogPlan:
    """A log at one moment.

    Attributes
    ----------
    root : str
        The store's directory.
    config : StoreConfig
    segments : tuple of int
        Phy offset of each segment that is there, ascending.
    begin, end : int
        Phy offsets of the oldest byte and after the last record.
    lost : tuple of (int, int)
        Phy offsets, begin and end, of the parts that the log lost, see `MessageStore.lost_log`.
    light_queue : str or None
        The name of a light queue, if the store has any.
    """

    root: str
    config: StoreConfig
    segments: tuple[int, ...]
    begin: int
    end: int
    lost: tuple[Span, ...] = ()
    light_queue: str | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], config: StoreConfig | None = None, *, ends: bool = False) -> LogPlan:
        """Plan the log of the store in `path`, which a broker may be writing; nothing is changed, and no lock taken.

        The end is after the last whole record.  Damage in the newest segment does not end the log where whole, newer
        records follow it.

        Parameters
        ----------
        config : StoreConfig, optional
            By default `StoreConfig.infer`.
        ends : bool
            Include lost ends: what the checkpoint, the index or queues point to after the newest record, and what is no
            file (a directory, a broken link) just before the oldest segment or after the newest, full one.

        Raises
        ------
        StoreError
            There is no such directory.
        GeometryError
            The segments are not as long as `config` says.
        """
        root = os.path.abspath(check_store_root(path))
        if config is None:
            config = StoreConfig.infer(root, read_only=True)
        pool = MappedFilePool(2)
        log = CommitLog(root, config, pool, read_only=True)
        queues = ConsumeQueueStore(root, config, pool, read_only=True)
        try:
            log.load()
            checkpoint = Checkpoint.load_or_zeros(os.path.join(root, "checkpoint"))
            claimed = claimed_end(root, checkpoint)
            log.follow()
            queues.load()
            claimed = max(claimed, claimed_by_queues(log, queues, checkpoint))
            begin, end = log.min_offset, log.known_end()
            lost = lost_ranges(log, claimed)
            if ends:
                begin, end = _with_lost_ends(log, begin, end)
                end = max([end, *(last for _, last in lost)])
            light_queue = next((topic for topic, _ in queues.keys() if is_light_queue(topic)), None)
            return cls(root, config, log.files.offsets, begin, end, lost, light_queue)
        finally:
            queues.close()
            log.close()

    def warn_of_lost(self) -> None:
        """Warn of the parts of the log that are lost."""
        for begin, end in self.lost:
            logger.warning("%s: %s", os.path.join(self.root, "commitlog"), lost_text(begin, end))

    def warn_of_light_queues(self) -> None:
        """Warn if the store has light queues: a filter on the topic, which Spark applies, finds none of their messages."""
        try:
            self.refuse_light_queues(() if self.light_queue is None else (self.light_queue,))
        except UnsupportedFormatError as error:
            logger.warning("%s: %s; a filter on the column topic finds none of them", self.root, error.message)

    def refuse_light_queues(self, topics: Iterable[str] | None) -> None:
        """Raise UnsupportedFormatError if one of `topics` is a light queue, which a scan of the log cannot find."""
        if not any(map(is_light_queue, topics or ())):
            return
        with self.queues() as (log, queues, _):
            refuse_light_queues(log, queues.find, topics)

    @contextlib.contextmanager
    def queues(self) -> Iterator[tuple[CommitLog, ConsumeQueueStore, Undispatched]]:
        """Open the log and its queues, with units in memory for records that the queues on disk lack."""
        log, queues = self.open(), ConsumeQueueStore(self.root, self.config, MappedFilePool(16), read_only=True)
        try:
            queues.load()
            undispatched = Undispatched(self.root, log, queues)
            undispatched.look()
            yield log, queues, undispatched
        finally:
            queues.close()
            log.close()

    def open(self) -> CommitLog:
        """Open the whole log read-only, without a listing; the caller closes it."""
        log = CommitLog(self.root, self.config, MappedFilePool(64), read_only=True)
        log.files.take(self.segments, self.end)
        return log

    def pieces(
        self, partition_bytes: int = PARTITION_BYTES, begin: int | None = None, end: int | None = None
    ) -> list[Piece]:
        """Cut the log from `begin` to `end` at multiples of `partition_bytes` from the start of each segment.

        The pieces have no gap between them; stretches without a segment are pieces of their own.  By default, and at most,
        they have all that is there.
        """
        size = self.config.mapped_file_size_commit_log
        at = self.begin if begin is None else max(begin, self.begin)
        stop = self.end if end is None else min(end, self.end)
        made = []
        # From here on no segment is known to have anything.
        known = next((begin for begin, end in self.lost if end >= self.end), stop)
        while at < stop:
            if at >= known:
                made.append(Piece(at, stop, missing=True))
                break
            place = bisect_right(self.segments, at) - 1
            if place < 0 or at >= self.segments[place] + size:
                place = bisect_left(self.segments, at)
                until = min(self.segments[place], stop) if place < len(self.segments) else stop
                made.append(Piece(at, until, missing=True))
            else:
                base = self.segments[place]
                until = min(at + partition_bytes - (at - base) % partition_bytes, base + size, stop, known)
                made.append(Piece(at, until))
            at = until
        return made


def _with_lost_ends(log: CommitLog, begin: int, end: int) -> tuple[int, int]:
    size, offsets = log.segment_size, log.files.offsets
    paths = [problem.path for problem in log.files.problems if problem.path is not None]
    lost = {offset_of_name(os.path.basename(path)) for path in paths if not os.path.isfile(path)}
    if offsets and end == offsets[-1] + size:
        while end in lost:
            end += size
    while offsets and begin - size in lost:
        begin -= size
    return begin, end


def is_no_file(path: str) -> bool:
    """Return True if there is something else than a regular file."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return os.path.islink(path)


def segment_path(root: str, config: StoreConfig, phy_offset: int) -> tuple[str, int]:
    """Return the path of the segment for this offset, whether or not it exists, and the position in it."""
    pos = phy_offset % config.mapped_file_size_commit_log
    return os.path.join(root, "commitlog", name_of_offset(phy_offset - pos)), pos


def open_log(root: str, config: StoreConfig, piece: Piece) -> CommitLog:
    """Open the log read-only with only the segment of a piece, without a listing; the caller closes it."""
    log = CommitLog(root, config, MappedFilePool(2), read_only=True)
    size = config.mapped_file_size_commit_log
    log.files.take([] if piece.missing else [piece.begin - piece.begin % size], piece.end)
    return log


def first_offset(log: CommitLog, piece: Piece) -> int:
    """Return the offset at which reading a piece begins: the first place of a log scan at or after `piece.begin`.

    It may be a record, a blank record or a damaged stretch, and be after `piece.end`.
    """
    base = piece.begin - piece.begin % log.segment_size
    if piece.missing or piece.begin == base:
        return piece.begin
    try:
        near = _record_before(log, piece.begin, base) if piece.begin - base > _NEAR else None
        return log.step_to(base if near is None else near, piece.begin)
    except OffsetOutOfRangeError:
        # The segment expired; reading the piece says so.
        return piece.begin


def _record_before(log: CommitLog, cut: int, base: int) -> int | None:
    # The last record at or before the cut that a consume queue has, None without one.  It counts only if the record agrees
    # with the unit, and is whole: after damage a scan goes on at whole records only.
    root = os.path.dirname(log.path)
    best = -1
    for asked, (topic, queue_id, directory) in enumerate(queue_directories(root, ConsumeQueue.kind)):
        if asked == _QUEUES_ASKED:
            break
        found = _unit_before(directory, log.config.consume_queue_file_size, cut)
        if found is None:
            continue
        number, phy_offset, size = found
        if phy_offset <= max(best, base):
            continue
        region = log.segment(phy_offset).region
        record = _core.decode_record(region, phy_offset - base, -1, 1)
        if not isinstance(record, tuple):
            continue
        message = MessageExt(record)
        said = message.phy_offset, message.size, message.queue_offset, message.queue_id, message.topic
        if said == (phy_offset, size, number, queue_id, topic) and message.crc_agrees:
            best = phy_offset
            if cut - best <= _NEAR:
                break
    return best if best > base else None


def _unit_before(directory: str, file_size: int, cut: int) -> tuple[int, int, int] | None:
    # Number, phy offset and size of the last unit of a queue whose phy offset is not above the cut, None without one.  The
    # files are read and not mapped: some twenty units are looked at.
    try:
        bases = sorted(offset for name in listing(directory).checked().names if (offset := offset_of_name(name)) is not None)
        place = bisect_right(bases, cut, key=lambda base: _read_unit(directory, base, 0)[0]) - 1
        if place < 0:
            return None
        base, num = bases[place], file_size // _UNIT_SIZE
        number = bisect_right(range(num), cut, key=lambda number: _read_unit(directory, base, number)[0]) - 1
        if number < 0:
            return None
        return (base // _UNIT_SIZE + number, *_read_unit(directory, base, number))
    except OSError:
        return None


def _read_unit(directory: str, base: int, number: int) -> tuple[int, int]:
    # Phy offset and size; a unit that was never written counts as after all others.
    fd = open_regular(os.path.join(directory, name_of_offset(base)))
    try:
        data = os.pread(fd, _UNIT_SIZE, number * _UNIT_SIZE)
    finally:
        os.close(fd)
    if len(data) < _UNIT_SIZE:
        return _NOWHERE
    phy_offset, size, _ = _UNIT.unpack(data)
    return (phy_offset, size) if size > 0 else _NOWHERE


def queue_pieces(plan: LogPlan, selection: Selection, size: int) -> Iterator[QueuePiece]:
    """Cut queues into pieces whose messages take about `size` bytes of the log, by the average over all queues.

    Of `selection` topics and queue ids count, and messages before `begin_phy_offset` have no piece.  A batch queue is one.
    """
    low = min(max(selection.begin_phy_offset or 0, plan.begin), plan.end)
    bounds = []
    with plan.queues() as (_, queues, _):
        for topic, queue_id in queues.keys():
            queue = queues.find(topic, queue_id)
            if queue is not None:
                bounds.append((queue, *queue.bounds(low)))
                queue.close()
    units = sum(max(end - begin, 0) for _, begin, end in bounds)
    step = max(size * units // max(plan.end - low, 1), 1)
    for queue, begin, end in bounds:
        if not selection.has_queue(queue.topic, queue.queue_id):
            continue
        for first, last in queue.cuts(begin, end, step):
            yield QueuePiece(queue.topic, queue.queue_id, first, last)
