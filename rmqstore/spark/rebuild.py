"""Distributed rebuild: index and consume queues rebuilt from the commit log, by many processes that share its directory.

Owns the passes over the log, what each task leaves behind, and putting it together in the order of the log.  The bytes are
those of the single-process `rmqstore.rebuild`, from which the swap, the marker and the rules of dispatching are taken.
Everything but `rebuild` itself is plain functions over paths: Spark only maps them, in any order, twice or again after a
kill.  It never changes the commit log, and the old files stay in place until the new ones are complete and verified.

What holds it together: a task writes either a file of its own, which it names last, or a range of a shared file that
follows from the log alone, so that whoever writes it again writes the same bytes; what depends on the order of the log
is computed from the summaries of the pieces; pieces must meet, each where the one before ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmqstore import _core
from rmqstore._columns import RecordColumns
from rmqstore._core import PRE_FILL_SIZE, IndexLayout, SlotHeads, UnitLayout, Verdict
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.commitlog.log_walk import Stretch
from rmqstore.config import StoreConfig, system_clock
from rmqstore.consumequeue.consume_queue import can_name_queue, queue_directories, queue_directory
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.mapped_file import (
    MappedFilePool,
    fsync_directory,
    make_directories,
    name_of_offset,
    read_small_file,
)
from rmqstore.files.store_lock import StoreLock
from rmqstore.index.index_service import index_name_after
from rmqstore.offline.rebuild import (
    REBUILD_DIRECTORY,
    RebuildReport,
    delete_tree,
    finish_swap,
    folders_of,
    free_output,
    kinds_of,
    known_config,
    mark_complete,
    moved_aside,
    refuse_assumed,
    swap,
)
from rmqstore.offline.verify import Finding, verify_index_file, verify_queue, verify_records
from rmqstore.spark.plan import PARTITION_BYTES, Piece, first_offset
from rmqstore.store.dispatcher import (
    CommitLogDispatcher,
    IndexProgress,
    multi_dispatch_places,
    multi_dispatch_problem,
    queued_rows,
    without_unit,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Buffer

__all__ = ["rebuild", "rebuild_with"]

logger = logging.getLogger(__name__)

_INNER_BATCH = 0x80
_SMALLEST_RECORD = int(_core.RecordLayout.RECORD_FIXED_SIZE)
_UNIT_SIZE = int(UnitLayout.UNIT_SIZE)
_UNIT = np.dtype([("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_ENTRY_SIZE = int(IndexLayout.ENTRY_SIZE)
_HEADER_SIZE = int(IndexLayout.INDEX_HEADER_SIZE)
_DAMAGED_BODY = (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC)
_WHOLE = (Verdict.RECORD, Verdict.BLANK, None, *_DAMAGED_BODY)
# Records that are read at once, and entries that are made at once.
_ROWS = 32768
_ENTRIES = 1 << 20
_PAGE = 4096
# A span of an index file has no fewer entries than this: merging slot heads costs more than it gains then.
_SMALLEST_SPAN = 1 << 21
# Index files are cut where there would be so many times more tasks at once than files.
_IDLE = 4
# So few units are looked at by the driver sooner than by tasks.
_FEW_UNITS = 1 << 25
# So many tasks a pass over the log has at the most; each then takes several pieces, and the driver one summary a task.
_MAX_TASKS = 4096
# And so many pieces a task, where there are enough of them.
_PIECES = 8
# So many tasks go to the cluster at once, together with the function.
_MAPPED_TASKS = 8192
# Work that is done in no time is put together to so many tasks.
_SMALL_WORK_TASKS = 64

QueueKey = tuple[str, int]
#: Applies a function to (plan, task) for every task, somewhere, and gives the answers in the order of the tasks.
Mapper = Callable[[Callable[[Any, Any], Any], Any, Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class RebuildPlan:
    """What every task of a rebuild must know; it fits a few kilobytes whatever the size of the log.

    Attributes
    ----------
    root : str
        The store.
    work : str
        Where the finished folders come; below it `build` is the scratch of this plan.
    kinds : tuple of str
    config : StoreConfig
    begin, end : int
        The log, phy offsets in bytes.
    missing : tuple of (int, int)
        Where a segment is missing: begin and end.
    piece_size : int
        Bytes; a segment is cut at multiples of it.
    batch_topics : frozenset of str
        Topics that are known to have batch queues.
    direct : bool
        Units can be put into place by pass 1; with an extension every unit depends on those before it.
    by_queues : bool
        Units of the old queues may show the way to the first record of a piece.
    key : str
        Stands for all of this.
    """

    root: str
    work: str
    kinds: tuple[str, ...]
    config: StoreConfig
    begin: int
    end: int
    missing: tuple[tuple[int, int], ...]
    piece_size: int
    batch_topics: frozenset[str]
    direct: bool
    by_queues: bool
    key: str

    @property
    def build(self) -> str:
        """str: the scratch folder; a rebuild of another log, or of other options, has another."""
        return os.path.join(self.work, f"build-{self.key}")

    @property
    def piece_num(self) -> int:
        """int: how many pieces there are."""
        return sum(self._counts())

    def _counts(self) -> list[int]:
        # Pieces of every unbroken run of segments.
        per_segment = -(-self.config.mapped_file_size_commit_log // self.piece_size)
        counts = []
        for begin, end in self.runs():
            whole, rest = divmod(end - begin, self.config.mapped_file_size_commit_log)
            counts.append(whole * per_segment + -(-rest // self.piece_size))
        return counts

    def runs(self) -> list[tuple[int, int]]:
        """list of (int, int): the parts of the log between missing segments."""
        starts = [self.begin, *(end for _, end in self.missing)]
        ends = [*(begin for begin, _ in self.missing), self.end]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]

    def piece(self, number: int) -> Piece:
        """The piece of that number, from 0 on."""
        size = self.config.mapped_file_size_commit_log
        per_segment = -(-size // self.piece_size)
        for (begin, end), count in zip(self.runs(), self._counts(), strict=True):
            if number < count:
                segment = begin + number // per_segment * size
                at = segment + number % per_segment * self.piece_size
                return Piece(at, min(at + self.piece_size, segment + size, end))
            number -= count
        raise IndexError("there is no such piece")

    def segment(self, phy_offset: int) -> int:
        """int: offset of the first byte of the segment that holds `phy_offset`."""
        return phy_offset - phy_offset % self.config.mapped_file_size_commit_log

    def folder(self, *names: str) -> str:
        """str: a folder in the scratch, made if it is missing; the scratch itself must be there."""
        path = self.build
        for name in names:
            path = os.path.join(path, name)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
        return path


# ------------------------------------------------------------------------------------------------------ the log in pieces


@contextlib.contextmanager
def _segments(plan: RebuildPlan, offsets: Iterable[int]) -> Iterator[CommitLog]:
    # A log of only these segments: a task lists no directory.
    log = CommitLog(plan.root, plan.config, MappedFilePool(4), read_only=True)
    try:
        log.queue.take(offsets, plan.end)
        yield log
    finally:
        log.close()


def _stretches(
    log: CommitLog, begin: int, cut: int, end: int, columns: RecordColumns | None = None, **options: bool
) -> Iterator[Stretch]:
    # As `CommitLog.stretches` for what begins before `cut`, but damage goes on to the record after it wherever in the
    # segment that is, as it does for whoever reads the whole log up to `end`.
    at = begin
    while at < cut:
        for stretch in log.stretches(at, cut, columns, **options):
            at = stretch.end
            if at >= cut and stretch.verdict not in _WHOLE:
                mapped_file = log.queue.find(stretch.begin)
                assert mapped_file is not None
                base, region = mapped_file.file_from_offset, mapped_file.region
                start, limit = stretch.begin - base + 1, min(end - base, region.size)
                if base + limit > cut:
                    found = _core.find_record(region, start, base, limit) if start < limit else -1
                    at = base + (found if found >= 0 else limit)
                stretch = stretch._replace(end=at)
            yield stretch


# ------------------------------------------------------------------------------------------------------------- summaries


class PartsDoNotMeetError(CorruptionError):
    """One part of the log ends where the next does not begin."""


@dataclass
class LogSummary:
    """What is known of a part of the log: enough to say where everything in it goes, once it is known what lies before it.

    Attributes
    ----------
    first, reached : int
        Where its first record begins, and where the log goes on after its last one, phy offsets.
    records : int
    entry_nums : list of int
        Index entries of every piece.
    last_has_keys : bool or None
        Whether the last record has index entries; None without a record.
    queues : dict of (str, int) to list
        Per queue: offset and phy offset of its first unit, the same of its last, and how many units.
    fills : list of (str, int, int, int)
        Topic, queue id, and which units of the queue no record gives (begin, end).
    alone : set of (str, int)
        Queues whose units do not follow from the records one by one.
    batch_topics : set of str
        Topics of which inner batches were found.
    further : bool
        There are records with units in further queues.
    damage : list of (int, int, str)
        As `RebuildReport.damage`.
    """

    first: int
    reached: int
    records: int = 0
    entry_nums: list[int] = field(default_factory=list)
    last_has_keys: bool | None = None
    queues: dict[QueueKey, list[int]] = field(default_factory=dict)
    fills: list[tuple[str, int, int, int]] = field(default_factory=list)
    alone: set[QueueKey] = field(default_factory=set)
    batch_topics: set[str] = field(default_factory=set)
    further: bool = False
    damage: list[tuple[int, int, str]] = field(default_factory=list)

    def to_json(self) -> str:
        """str: itself as text."""
        values = dataclasses.asdict(self)
        values["queues"] = [[*key, *value] for key, value in self.queues.items()]
        values["alone"], values["batch_topics"] = sorted(self.alone), sorted(self.batch_topics)
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> LogSummary:
        """What `to_json` wrote."""
        values = json.loads(text)
        values["queues"] = {(topic, queue_id): rest for topic, queue_id, *rest in values["queues"]}
        values["alone"] = {(topic, queue_id) for topic, queue_id in values["alone"]}
        values["batch_topics"] = set(values["batch_topics"])
        values["fills"] = [tuple(fill) for fill in values["fills"]]
        values["damage"] = [tuple(part) for part in values["damage"]]
        return cls(**values)

    def join(self, following: LogSummary, plan: RebuildPlan) -> None:
        """Take in the part that follows.

        Raises
        ------
        CorruptionError
            The parts do not meet.
        """
        if self.reached != following.first:
            if (self.reached, following.first) not in plan.missing:
                raise PartsDoNotMeetError(
                    f"one part of the log ends at phy offset {self.reached}, the next begins at {following.first}; the log "
                    "was changed while it was read: see to it that nobody writes, and start the rebuild again",
                    os.path.join(plan.root, "commitlog"),
                )
            self.damage.append((self.reached, following.first - self.reached, "missing segment"))
        self.reached = following.reached
        self.records += following.records
        self.entry_nums += following.entry_nums
        if following.last_has_keys is not None:
            self.last_has_keys = following.last_has_keys
        self.fills += following.fills
        self.alone |= following.alone
        self.batch_topics |= following.batch_topics
        self.further |= following.further
        self.damage += following.damage
        for key, place in following.queues.items():
            mine = self.queues.get(key)
            if mine is None:
                self.queues[key] = list(place)
                continue
            if not _follows(*mine[2:4], *place[:2]):
                self.alone.add(key)
            elif place[0] > mine[2] + 1:
                self.fills.append((*key, mine[2] + 1, place[0]))
            mine[2:] = [*place[2:4], mine[4] + place[4]]


def _follows(offset: int, phy_offset: int, next_offset: int, next_phy_offset: int) -> bool:
    # Whether a queue offset can be that of a later record: it rises, and by no more than the log between has room for.
    # What rises so from record to record no dispatcher finds implausible, however the records are put together.
    return 1 <= next_offset - offset <= (next_phy_offset - phy_offset) // _SMALLEST_RECORD


def _write_named(path: str, data: Buffer) -> None:
    # Under a name of its own first, so that a second attempt, or a kill, leaves the whole file or none.
    temporary = f"{path}.{uuid.uuid4().hex}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# ------------------------------------------------------------------------------------------------------- pass 1: the records


def scan_pieces(plan: RebuildPlan, numbers: tuple[int, int]) -> str:
    """Pass 1 for the pieces from `numbers[0]` to before `numbers[1]`: units into place, entries into a spool.

    Returns
    -------
    str
        The `LogSummary` of all of them, as text.
    """
    joined: LogSummary | None = None
    for number in range(*numbers):
        summary = _scan_piece(plan, number)
        if joined is None:
            joined = summary
        else:
            joined.join(summary, plan)
    assert joined is not None
    return joined.to_json()


def _spool_path(plan: RebuildPlan, number: int) -> str:
    return os.path.join(plan.build, "pieces", f"{number:010d}.entries")


def _summary_path(plan: RebuildPlan, number: int) -> str:
    return os.path.join(plan.build, "pieces", f"{number:010d}.json")


def _scan_piece(plan: RebuildPlan, number: int) -> LogSummary:
    plan.folder("pieces")
    done = read_small_file(_summary_path(plan, number))
    if done is not None:
        return LogSummary.from_json(done)
    piece = plan.piece(number)
    with _segments(plan, [plan.segment(piece.begin)]) as log:
        scan = _PieceScan(plan, log, first_offset(log, piece, plan.by_queues))
        scan.run(piece)
    if "index" in plan.kinds:
        scan.write_entries(_spool_path(plan, number))
    scan.write_units()
    # The last to be named: whoever finds it finds the rest.
    _write_named(_summary_path(plan, number), scan.summary.to_json().encode())
    return scan.summary


class _PieceScan:
    """Reads the records of one piece."""

    def __init__(self, plan: RebuildPlan, log: CommitLog, first: int):
        self.plan = plan
        self.log = log
        self.summary = LogSummary(first, first)
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.units: dict[QueueKey, list[np.ndarray]] = {}
        self.with_queues, self.with_index = "consumequeue" in plan.kinds, "index" in plan.kinds
        self._topics: list[str] = []

    def run(self, piece: Piece) -> None:
        plan, log, summary = self.plan, self.log, self.summary
        columns = RecordColumns(_ROWS)
        damaged = RecordColumns(1, columns.topics)
        for stretch in _stretches(log, summary.first, piece.end, plan.end, columns, keys=self.with_index):
            summary.reached = stretch.end
            if stretch.verdict is Verdict.RECORD:
                self._take(columns)
                continue
            if stretch.verdict in _DAMAGED_BODY:
                # Its lengths are whole, so it keeps its place in its queue and under its keys; readers mark it as corrupt.
                for _ in log.stretches(stretch.begin, stretch.end, damaged, check_crc=False, keys=self.with_index):
                    self._take(damaged)
            if stretch.verdict is not Verdict.BLANK:
                what = "missing segment" if stretch.verdict is None else stretch.verdict.name
                summary.damage.append((stretch.begin, stretch.end - stretch.begin, what))
        if self.with_index:
            summary.entry_nums = [sum(len(part[0]) for part in self.entries)]

    def _take(self, columns: RecordColumns) -> None:
        n = columns.count
        if not n:
            return
        refuse_assumed(columns, self.plan.config, self.plan.kinds, self.plan.root)
        self.summary.records += n
        if self.with_index:
            self._take_entries(columns)
        if self.with_queues:
            self._take_units(columns)

    def _take_entries(self, columns: RecordColumns) -> None:
        n = columns.count
        starts = columns.key_start[: n + 1]
        counts = np.diff(starts)
        self.summary.last_has_keys = bool(counts[-1])
        if starts[n]:
            phy_offsets = np.repeat(columns.phy_offset[:n], counts)
            times = np.repeat(columns.store_timestamp[:n], counts)
            self.entries.append((phy_offsets, times, columns.key_hash[: starts[n]].copy()))

    def _take_units(self, columns: RecordColumns) -> None:
        plan, summary = self.plan, self.summary
        n = columns.count
        queued, inner = queued_rows(columns)
        for topic in columns.topics.topics[len(self._topics) :]:
            self._topics.append(topic.decode("utf-8", "rmqstore.java"))
        if (inner & queued).any():
            summary.batch_topics |= {self._topics[number] for number in set(columns.topic[:n][inner & queued].tolist())}
        # What the dispatcher has something to tell of is left to it.
        for row in np.flatnonzero(queued & ((columns.sys_flag[:n] & _INNER_BATCH) != 0) & ~inner).tolist():
            summary.alone.add((self._topics[columns.topic[row]], int(columns.queue_id[row])))
        if plan.config.enable_lmq and plan.config.enable_multi_dispatch:
            for row in np.flatnonzero(queued & (columns.multi_dispatch[:n] != 0)).tolist():
                message = self.log.look_up(int(columns.phy_offset[row]))
                places = [] if message is None else multi_dispatch_places(message, plan.config)
                summary.alone |= {(name, 0) for name, _ in places}
                if message is not None and multi_dispatch_problem(message, plan.config) is not None:
                    summary.alone.add((self._topics[columns.topic[row]], int(columns.queue_id[row])))
                summary.further |= bool(places)
        groups, order = columns.by_queue(queued.view(np.uint8))
        for number, start, end in groups:
            topic_number, queue_id = columns.topics.queues[number]
            key = self._topics[topic_number], queue_id
            if not can_name_queue(key[0]):
                summary.alone.add(key)
            self._take_queue(key, columns, order[start:end])

    def _take_queue(self, key: QueueKey, columns: RecordColumns, rows: np.ndarray) -> None:
        place = self.summary.queues.get(key)
        first, last = rows[0], rows[-1]
        ends = [
            int(columns.queue_offset[first]), int(columns.phy_offset[first]),
            int(columns.queue_offset[last]), int(columns.phy_offset[last]),
        ]  # fmt: skip
        if place is None:
            self.summary.queues[key] = [*ends, len(rows)]
        if not self.plan.direct or key[0] in self.plan.batch_topics or key in self.summary.alone:
            self.summary.alone.add(key)
        elif ends[0] < 0 or (place is not None and not _follows(*place[2:4], *ends[:2])):
            self.summary.alone.add(key)
        else:
            parts = self.units.setdefault(key, [])
            if place is not None and ends[0] > place[2] + 1:
                parts.append(_filling(ends[0] - place[2] - 1))
            part = _units_of(columns, rows)
            if part is None:
                self.summary.alone.add(key)
            else:
                parts.append(part)
        if place is not None:
            place[2:] = [*ends[2:], place[4] + len(rows)]

    def write_units(self) -> None:
        """Put the units into their places; files have holes where other pieces write."""
        for (topic, queue_id), parts in self.units.items():
            if (topic, queue_id) not in self.summary.alone:
                number = self.summary.queues[topic, queue_id][0]
                _write_units(self.plan, topic, queue_id, number, b"".join(part.tobytes() for part in parts))

    def write_entries(self, path: str) -> None:
        """Spool the entries: phy offsets, store timestamps, index hashes."""
        columns = [[part[i] for part in self.entries] for i in range(3)]
        _write_named(path, b"".join(part.tobytes() for column in columns for part in column))


def _filling(count: int) -> np.ndarray:
    part = np.zeros(count, _UNIT)
    part["size"] = PRE_FILL_SIZE
    return part


def _units_of(columns: RecordColumns, rows: np.ndarray) -> np.ndarray | None:
    # The units of records of one queue, gaps filled; None where a queue offset cannot be right.
    part = np.empty(len(rows), _UNIT)
    part["phy_offset"], part["size"] = columns.phy_offset[rows], columns.size[rows]
    part["tags_code"] = columns.tags_code[rows]
    if columns.run_length(rows) == len(rows):
        return part
    offsets, phy_offsets = columns.queue_offset[rows], columns.phy_offset[rows]
    steps = np.diff(offsets)
    if ((steps < 1) | (steps > np.diff(phy_offsets) // _SMALLEST_RECORD)).any():
        return None
    spread = _filling(int(offsets[-1] - offsets[0]) + 1)
    spread[offsets - offsets[0]] = part
    return spread


def _runs(pos: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    # Without the pages that are all zeros, which a file has as holes: where each run begins, and its bytes.
    starts = np.concatenate([[0], np.arange(_PAGE - pos % _PAGE, len(data), _PAGE)])
    written = np.flatnonzero(np.maximum.reduceat(np.frombuffer(data, np.uint8), starts))
    ends = np.append(starts[1:], len(data))
    for run in np.split(written, np.flatnonzero(np.diff(written) != 1) + 1):
        if len(run):
            begin, end = int(starts[run[0]]), int(ends[run[-1]])
            yield pos + begin, data[begin:end]


def _write_at(path: str, size: int, pos: int, data: Buffer) -> None:
    # Through the file, not through a mapping: pages of a shared file are not this task's alone, and a full disk is an error.
    # Nobody else writes to the same bytes, unless the same ones, so that what is zero stays a hole.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        for at, view in _runs(pos, memoryview(data).cast("B")) if len(memoryview(data)) else ():
            while len(view):
                written = os.pwrite(fd, view, at)
                view, at = view[written:], at + written
    finally:
        os.close(fd)


def _write_units(plan: RebuildPlan, topic: str, queue_id: int, number: int, data: bytes) -> None:
    # From unit `number` on; files are made as they are needed.
    file_size = plan.config.consume_queue_file_size
    queue_directory(plan.build, "consumequeue", topic, queue_id)  # Refuses a topic that leads elsewhere.
    directory = plan.folder("units", topic, str(queue_id))
    at, view = number * _UNIT_SIZE, memoryview(data)
    while len(view):
        base = at - at % file_size
        part = view[: base + file_size - at]
        _write_at(os.path.join(directory, name_of_offset(base)), file_size, at - base, part)
        view, at = view[len(part) :], at + len(part)


def fill_units(plan: RebuildPlan, fills: Sequence[tuple[str, int, int, int]]) -> None:
    """Write pre-fill units, which readers pass over, where queues have gaps: topic, queue id, first number, end of each."""
    for topic, queue_id, begin, end in fills:
        for at in range(begin, end, _ENTRIES):
            _write_units(plan, topic, queue_id, at, _filling(min(_ENTRIES, end - at)).tobytes())


# ---------------------------------------------------------------------------------------- queues that take a dispatcher


def dispatch_alone(plan: RebuildPlan, task: tuple[list[int], list[QueueKey], list[str]]) -> tuple[int, list[Any]]:
    """Build some queues as the single-process rebuild does.

    Parameters
    ----------
    task : (list of int, list of (str, int), list of str)
        The segments with records of these queues, the queues, and all topics with batch queues.

    Returns
    -------
    (int, list)
        How many units, and the records whose queue offset cannot be.
    """
    segments, queues, batch_topics = task
    target = os.path.join(plan.build, "alone")
    report = os.path.join(target, "report.json")
    text = read_small_file(report)
    if text is None:
        attempt = f"{target}.{uuid.uuid4().hex}"
        os.mkdir(attempt)
        try:
            found = _dispatch_alone(plan, attempt, segments, frozenset(queues), batch_topics)
            _write_named(os.path.join(attempt, "report.json"), json.dumps(found).encode())
            os.rename(attempt, target)
        except BaseException as error:
            delete_tree(attempt, ignore_errors=True)
            # Another attempt was there first.
            if not isinstance(error, OSError) or not os.path.exists(report):
                raise
        text = read_small_file(report)
        assert text is not None
    units, misplaced = json.loads(text)
    return units, misplaced


def _dispatch_alone(
    plan: RebuildPlan, target: str, segments: list[int], queues: frozenset[QueueKey], batch_topics: list[str]
) -> tuple[int, list[Any]]:
    store = ConsumeQueueStore(target, plan.config, MappedFilePool(plan.config.max_mapped_files, sparse=True))
    try:
        with _segments(plan, segments) as log:
            for topic in batch_topics:
                store.add_batch_topic(topic)
            dispatcher = CommitLogDispatcher(log, store, None)
            dispatcher.only = queues
            # As many at once as the single-process rebuild reads: what it believes of a queue offset depends on that.
            columns = RecordColumns()
            damaged = RecordColumns(1, columns.topics)
            for base in segments:
                end = min(base + log.segment_size, plan.end)
                for stretch in log.stretches(base, end, columns, keys=False):
                    if stretch.verdict is Verdict.RECORD:
                        dispatcher.dispatch_columns(columns, IndexProgress(), allow_gaps=True)
                    elif stretch.verdict in _DAMAGED_BODY:
                        for _ in log.stretches(stretch.begin, stretch.end, damaged, check_crc=False, keys=False):
                            dispatcher.dispatch_columns(damaged, IndexProgress(), allow_gaps=True)
        store.flush()
        return dispatcher.counts.units, dispatcher.counts.misplaced
    finally:
        store.close()


# --------------------------------------------------------------------------------------------- passes 2 and 3: the index


class EntryPlace(NamedTuple):
    """Where an index entry is spooled: the piece, and its number there from 0 on."""

    piece: int
    number: int


class Span(NamedTuple):
    """A run of entries of one index file, for one task.

    Attributes
    ----------
    file : int
        Number of the file, from 0 on.
    number, of : int
        Which span of the file, from 0 on, and how many it has.
    first : int
        Number of the first entry in the file, from 1 on.
    parts : tuple of (int, int, int)
        Where the entries are spooled: piece, number of the first there, how many.
    begin : EntryPlace
        The file's first entry.
    before : EntryPlace or None
        The last entry of the file before.
    """

    file: int
    number: int
    of: int
    first: int
    parts: tuple[tuple[int, int, int], ...]
    begin: EntryPlace
    before: EntryPlace | None


class _Spool:
    """The spooled entries of a piece, mapped."""

    def __init__(self, path: str):
        data = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)
        n = len(data) // 20
        self.phy_offsets = data[: 8 * n].view(np.int64)
        self.store_timestamps = data[8 * n : 16 * n].view(np.int64)
        self.hashes = data[16 * n :].view(np.int32)


def _entry(plan: RebuildPlan, place: EntryPlace) -> tuple[int, int]:
    # phy offset and store timestamp of a spooled entry.
    spool = _Spool(_spool_path(plan, place.piece))
    return int(spool.phy_offsets[place.number]), int(spool.store_timestamps[place.number])


def spans_of(plan: RebuildPlan, entry_nums: Sequence[int], span_size: int) -> list[Span]:
    """Say which entries come into which index file, and cut the files into spans of at most `span_size` entries."""
    per_file = plan.config.max_index_num - 1
    starts = np.concatenate([[0], np.cumsum(np.asarray(entry_nums, np.int64))])
    total = int(starts[-1])

    def place(number: int) -> EntryPlace:
        piece = int(np.searchsorted(starts, number, side="right")) - 1
        return EntryPlace(piece, number - int(starts[piece]))

    spans = []
    for file, begin in enumerate(range(0, total, per_file)):
        end = min(begin + per_file, total)
        of = -(-(end - begin) // span_size)
        bounds = [begin + (end - begin) * i // of for i in range(of + 1)]
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            parts, at = [], low
            while at < high:
                piece, first = place(at)
                count = min(high, int(starts[piece + 1])) - at
                parts.append((piece, first, count))
                at += count
            before = place(begin - 1) if begin else None
            spans.append(Span(file, number, of, low - begin + 1, tuple(parts), place(begin), before))
    return spans


def _span_name(span: Span, number: int) -> str:
    # Of a span of the same file; a rebuild that is gone on with may cut it into another number of spans.
    return f"{span.file:010d}-{number:06d}-of-{span.of}"


def _heads_path(plan: RebuildPlan, span: Span, number: int) -> str:
    return os.path.join(plan.build, "heads", _span_name(span, number))


def note_heads(plan: RebuildPlan, span: Span) -> None:
    """Pass 2: the newest entry of every hash slot that the span uses, as a file."""
    plan.folder("heads")
    path = _heads_path(plan, span, span.number)
    if os.path.exists(path):
        return
    heads = SlotHeads(plan.config.max_hash_slot_num)
    at = span.first
    for piece, first, count in span.parts:
        heads.note(np.asarray(_Spool(_spool_path(plan, piece)).hashes[first : first + count]), at)
        at += count
    _write_named(path, np.stack(heads.used()).data)


def _index_path(plan: RebuildPlan, file: int) -> str:
    return os.path.join(plan.build, "files", f"{file:010d}")


def write_span(plan: RebuildPlan, span: Span) -> None:
    """Pass 3: the entries of a span into their place; the last span of a file writes slots and header as well."""
    plan.folder("files")
    plan.folder("written")
    mark = os.path.join(plan.build, "written", _span_name(span, span.number))
    if os.path.exists(mark):
        return
    config = plan.config
    heads = SlotHeads(config.max_hash_slot_num)
    for number in range(span.number):
        heads.merge(*np.fromfile(_heads_path(plan, span, number), np.int32).reshape(2, -1))
    begin_phy_offset, begin_timestamp = _entry(plan, span.begin)
    before = 0 if span.before is None else _entry(plan, span.before)[1]
    path, size = _index_path(plan, span.file), config.index_file_size
    entries_at = _HEADER_SIZE + 4 * config.max_hash_slot_num
    at = span.first
    for piece, first, count in span.parts:
        spool = _Spool(_spool_path(plan, piece))
        for start in range(first, first + count, _ENTRIES):
            part = slice(start, min(start + _ENTRIES, first + count))
            hashes, phy_offsets = np.asarray(spool.hashes[part]), np.asarray(spool.phy_offsets[part])
            times = np.asarray(spool.store_timestamps[part])
            data = heads.encode(hashes, phy_offsets, times, at, begin_timestamp, before)
            _write_at(path, size, entries_at + at * _ENTRY_SIZE, data.data)
            at += part.stop - part.start
    if span.number == span.of - 1:
        last_phy_offset, last_timestamp = (
            int(spool.phy_offsets[part.stop - 1]),
            int(spool.store_timestamps[part.stop - 1]),
        )
        _write_at(path, size, _HEADER_SIZE, heads.table().data)
        header = begin_timestamp, last_timestamp, begin_phy_offset, last_phy_offset, heads.used_num, at
        _write_at(path, size, 0, _header(*header))
    _write_named(mark, b"")


def _header(begin: int, end: int, begin_phy_offset: int, end_phy_offset: int, used: int, count: int) -> bytes:
    numbers = np.array([begin, end, begin_phy_offset, end_phy_offset], ">i8").tobytes()
    return numbers + np.array([used, count], ">i4").tobytes()


def write_empty_file(plan: RebuildPlan, task: tuple[int, EntryPlace | None]) -> None:
    """The file, without an entry, that RocketMQ makes for a record without keys; it begins where the one before ends."""
    plan.folder("files")
    file, before = task
    phy_offset, timestamp = (0, 0) if before is None else _entry(plan, before)
    phy_offset, timestamp = max(phy_offset, 0), max(timestamp, 0)
    header = _header(timestamp, timestamp, phy_offset, phy_offset, 0, 1)
    _write_at(_index_path(plan, file), plan.config.index_file_size, 0, header)


# ----------------------------------------------------------------------------------------------------------- verification


def check_pieces(
    plan: RebuildPlan, task: tuple[int, int, int, list[str], list[int]]
) -> tuple[list[Finding], dict[QueueKey, int], int]:
    """Compare what was built with the records of the pieces from `task[0]` to before `task[1]`.

    Every record's unit and entries are looked at: that they are there, in order, and say what the record needs.  The CRCs
    were checked when the records were read first.

    Parameters
    ----------
    task : (int, int, int, list of str, list of int)
        The pieces, the number of the first piece's first entry in the whole index, from 0 on, the topics with batch queues,
        and the phy offsets of records that have no unit because they are misplaced.

    Returns
    -------
    (list of Finding, dict of (str, int) to int, int)
        The first findings, how many units of each queue belong to these records, and the number after the last entry.
    """
    first, last, entry, batch_topics, misplaced = task
    findings: list[Finding] = []
    covered: dict[QueueKey, int] = {}
    for number in range(first, last):
        piece = plan.piece(number)
        summary = _scan_piece(plan, number)
        with _segments(plan, [plan.segment(piece.begin)]) as log:
            columns = RecordColumns(_ROWS)
            found, units, entry = verify_records(
                log,
                plan.work,
                plan.config,
                columns,
                _stretches(
                    log, summary.first, piece.end, plan.end, columns, check_crc=False, keys="index" in plan.kinds
                ),
                queues="consumequeue" in plan.kinds,
                batch_topics=batch_topics,
                first_entry=entry if "index" in plan.kinds else None,
                without_unit=frozenset(misplaced),
            )
        findings += found
        for key, count in units.items():
            covered[key] = covered.get(key, 0) + count
        if findings:
            break
    return findings, covered, entry


def check_part(plan: RebuildPlan, task: tuple[int, int, int, list[str], list[int]] | str) -> Any:
    """`check_file` for a name, `check_pieces` for pieces."""
    return check_file(plan, task) if isinstance(task, str) else check_pieces(plan, task)


def check_file(plan: RebuildPlan, name: str) -> list[Finding]:
    """Compare slots, chains and header of an index file with its entries, and force it to the disk."""
    with _segments(plan, _offsets(plan)) as log:
        findings = verify_index_file(log, plan.work, plan.config, name, plan.end)
    _force(os.path.join(plan.work, "index", name))
    return findings


def check_queues(plan: RebuildPlan, queues: Sequence[tuple[str, int, int, bool]]) -> list[Finding]:
    """Look for units of queues that belong to no record, and force them to the disk.

    Parameters
    ----------
    queues : list of (str, int, int, bool)
        Topic, queue id, how many units belong to records, and whether it is a batch queue.
    """
    findings = []
    with _segments(plan, _offsets(plan)) as log:
        for topic, queue_id, covered, batch in queues:
            findings += verify_queue(log, plan.work, plan.config, topic, queue_id, covered, batch=batch)
            _force_queue(plan, topic, queue_id)
    return findings


def _force_queue(plan: RebuildPlan, topic: str, queue_id: int) -> None:
    for folder in folders_of(("consumequeue",)):
        directory = os.path.join(plan.work, folder, topic, str(queue_id))
        if os.path.isdir(directory):
            for entry in os.scandir(directory):
                _force(entry.path)
            fsync_directory(directory)
            fsync_directory(os.path.dirname(directory))


def _force(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _offsets(plan: RebuildPlan) -> list[int]:
    size = plan.config.mapped_file_size_commit_log
    return [base for begin, end in plan.runs() for base in range(begin, end, size)]


# ------------------------------------------------------------------------------------------------------------- the driver


def rebuild_with(
    mapper: Mapper,
    path: str | os.PathLike[str],
    what: Iterable[str] = ("index", "consumequeue"),
    config: StoreConfig | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    partition_bytes: int | None = None,
    parallelism: int = 1,
) -> RebuildReport:
    """As `rebuild`, with tasks mapped by `mapper`.

    Parameters
    ----------
    mapper : callable
        Called as ``mapper(function, plan, tasks)``: applies the function to (plan, task) for every task, in any order,
        wherever, more than once if it must, and returns the answers in the order of the tasks.
    path, what, config, output, partition_bytes
        As of `rebuild`.
    parallelism : int
        How many tasks run at once; files of the index are cut into spans where they are fewer than that.
    """
    started = time.perf_counter()
    root = os.path.abspath(check_store_root(path))
    kinds = kinds_of(what)
    if (partition_bytes is not None and partition_bytes < 1) or parallelism < 1:
        raise ValueError(f"partition_bytes is {partition_bytes}, parallelism {parallelism}; both must be at least 1")
    if output is not None:
        config = known_config(root, config, kinds)
        target = os.path.abspath(free_output(output, kinds))
        work = os.path.join(target, REBUILD_DIRECTORY)
        report = _run(mapper, root, work, kinds, config, partition_bytes, parallelism)
        for folder in folders_of(kinds):
            if os.path.isdir(os.path.join(work, folder)):
                os.rename(os.path.join(work, folder), os.path.join(target, folder))
        delete_tree(work)
        fsync_directory(target)
        report.output = target
    else:
        with StoreLock(root):
            work = os.path.join(root, REBUILD_DIRECTORY)
            complete = finish_swap(root, work)
            if complete and set(kinds) <= set(complete):
                return RebuildReport(complete, root, resumed=True, seconds=time.perf_counter() - started)
            config = known_config(root, config, kinds)
            report = _run(mapper, root, work, kinds, config, partition_bytes, parallelism)
            mark_complete(work, kinds)
            swap(root, work, kinds)
            if "consumequeue" in kinds:
                report.moved_aside = moved_aside(root)
    report.seconds = time.perf_counter() - started
    return report


def _run(
    mapper: Mapper,
    root: str,
    work: str,
    kinds: tuple[str, ...],
    config: StoreConfig,
    piece_size: int | None,
    parallelism: int,
) -> RebuildReport:
    # Without queues the way to a piece begins at its segment's start, so that smaller pieces are read again and again.
    by_queues = next(queue_directories(root, "consumequeue"), None) is not None
    if piece_size is None:
        piece_size = PARTITION_BYTES if by_queues else config.mapped_file_size_commit_log
    while True:
        plan = _make_plan(root, work, kinds, config, piece_size, by_queues)
        _start(plan)
        try:
            report = _build(mapper, plan, parallelism)
            break
        except PartsDoNotMeetError as error:
            delete_tree(work, ignore_errors=True)
            if not by_queues:
                raise
            logger.warning("an old consume queue shows a wrong way (%s); the rebuild begins again without them", error)
            by_queues = False
        except StoreError:
            # Trying again would find the same; what else may happen (a worker that died, a full disk) leaves what is done.
            delete_tree(work, ignore_errors=True)
            raise
    # Rubbish from here on.
    delete_tree(plan.build)
    return report


def _make_plan(
    root: str, work: str, kinds: tuple[str, ...], config: StoreConfig, piece_size: int, by_queues: bool
) -> RebuildPlan:
    config = dataclasses.replace(config, clock=system_clock)
    log = CommitLog(root, config, MappedFilePool(4), read_only=True)
    try:
        log.load()
        end = log.find_end_behind_damage()
        offsets = [base for base in log.queue.offsets if base < end]
        state = [(base, os.stat(log.queue.file(base).path).st_mtime_ns) for base in offsets]
    finally:
        log.close()
    size = config.mapped_file_size_commit_log
    missing = tuple((low + size, high) for low, high in itertools.pairwise(offsets) if high > low + size)
    store = ConsumeQueueStore(root, config, MappedFilePool(1), read_only=True)
    store.load_topics(os.path.join(root, "config", "topics.json"))
    batch_topics = frozenset(
        {topic for topic, _, _ in queue_directories(root, "batchconsumequeue")} | store.batch_topics
    )
    options = (root, kinds, config, offsets[0] if offsets else 0, end, missing, piece_size, by_queues, batch_topics)
    key = hashlib.sha256(repr((*options[:-1], sorted(batch_topics), state)).encode()).hexdigest()[:16]
    return RebuildPlan(
        root=root,
        work=work,
        kinds=kinds,
        config=config,
        begin=offsets[0] if offsets else 0,
        end=end,
        missing=missing,
        piece_size=min(piece_size, size),
        batch_topics=batch_topics,
        direct=not config.enable_consume_queue_ext,
        by_queues=by_queues,
        key=key,
    )


def _start(plan: RebuildPlan) -> None:
    # What an earlier attempt at the very same left is gone on with; anything else goes.
    names = os.listdir(plan.work) if os.path.isdir(plan.work) else []
    if os.path.basename(plan.build) not in names:
        delete_tree(plan.work, ignore_errors=True)
        make_directories(plan.build)
    else:
        logger.info("going on with what is in %s", plan.build)


def _groups(count: int, parallelism: int) -> list[tuple[int, int]]:
    # Consecutive pieces for one task each: some, as Spark needs as long for a task as a piece takes, but enough tasks that
    # all end at about the same time.
    size = max(min(_PIECES, count // (3 * parallelism)), -(-count // _MAX_TASKS), 1)
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def _together(work: list[Any]) -> list[list[Any]]:
    size = max(1, -(-len(work) // _SMALL_WORK_TASKS))
    return [work[at : at + size] for at in range(0, len(work), size)]


def _build(mapper: Mapper, plan: RebuildPlan, parallelism: int) -> RebuildReport:
    report = RebuildReport(plan.kinds, plan.root)
    groups = _groups(plan.piece_num, parallelism)
    summary = LogSummary(plan.begin, plan.begin)
    summaries = [LogSummary.from_json(text) for text in mapper(scan_pieces, plan, groups)]
    for each in summaries:
        summary.join(each, plan)
    if plan.end > plan.begin and summary.reached < plan.end:
        raise CorruptionError(
            f"the log was read up to phy offset {summary.reached}, but ends at {plan.end}; please report this",
            os.path.join(plan.root, "commitlog"),
        )
    report.records, report.damage, report.log_bytes = summary.records, summary.damage, plan.end - plan.begin
    index_names: list[str] = []
    if "index" in plan.kinds:
        report.index_entries = sum(summary.entry_nums)
        index_names = _build_index(mapper, plan, summary, parallelism)
    if "consumequeue" in plan.kinds:
        _build_queues(mapper, plan, summary, summaries, groups, report)
    _assemble(plan, summary, index_names)
    _verify(mapper, plan, summary, groups, index_names, sorted(without_unit(report.damage)))
    return report


def _build_index(mapper: Mapper, plan: RebuildPlan, summary: LogSummary, parallelism: int) -> list[str]:
    total, per_file = sum(summary.entry_nums), plan.config.max_index_num - 1
    file_num = -(-total // per_file)
    # One task a file needs no slot heads of others, and a pass less.  Files are cut only where most of what runs tasks
    # would stand idle.
    cut = bool(total) and parallelism >= _IDLE * file_num
    span_size = max(min(total, per_file) * file_num // parallelism + 1, _SMALLEST_SPAN) if cut else per_file
    spans = spans_of(plan, summary.entry_nums, min(span_size, per_file))
    mapper(note_heads, plan, [span for span in spans if span.number < span.of - 1])
    mapper(write_span, plan, spans)
    if summary.records and total % per_file == 0 and not summary.last_has_keys:
        # RocketMQ (5.5.0) rolls a full file for the next record even if that has no keys.
        before = None
        if spans:
            piece, first, count = spans[-1].parts[-1]
            before = EntryPlace(piece, first + count - 1)
        write_empty_file(plan, (file_num, before))
        file_num += 1
    text = read_small_file(os.path.join(plan.build, "names.json"))
    if text is None:
        names: list[str] = []
        for _ in range(file_num):
            names.append(index_name_after(names[-1] if names else None, time.time_ns() // 1_000_000))
        text = json.dumps(names).encode()
        _write_named(os.path.join(plan.build, "names.json"), text)
    return list(json.loads(text))


def _build_queues(
    mapper: Mapper,
    plan: RebuildPlan,
    summary: LogSummary,
    summaries: list[LogSummary],
    groups: list[tuple[int, int]],
    report: RebuildReport,
) -> None:
    batch_topics = plan.batch_topics | summary.batch_topics
    fills = list(summary.fills)
    for key, (first, phy_offset, *_) in summary.queues.items():
        if key[0] in batch_topics or first > phy_offset // _SMALLEST_RECORD + 1:
            summary.alone.add(key)
        # Files begin at a multiple of their size, and the first with the file that holds the first unit.
        begin = first - first % (plan.config.consume_queue_file_size // _UNIT_SIZE)
        if begin < first:
            fills.append((*key, begin, first))
    fills = [fill for fill in fills if fill[:2] not in summary.alone]
    mark = os.path.join(plan.build, "filled")
    if fills and not os.path.exists(mark):
        mapper(fill_units, plan, _together(fills))
        _write_named(mark, b"")
    report.units = sum(place[4] for key, place in summary.queues.items() if key not in summary.alone)
    if not summary.alone:
        return
    segments: set[int] = set()
    for each, numbers in zip(summaries, groups, strict=True):
        if each.further or not summary.alone.isdisjoint(each.queues):
            segments |= {plan.segment(plan.piece(number).begin) for number in range(*numbers)}
    tasks = [(sorted(segments), sorted(summary.alone), sorted(batch_topics))]
    for units, misplaced in mapper(dispatch_alone, plan, tasks):
        report.units += units
        report.damage += [tuple(part) for part in misplaced]


def _assemble(plan: RebuildPlan, summary: LogSummary, index_names: list[str]) -> None:
    # Renames only; each may be the last before a kill, and is not done twice.
    for kind in plan.kinds:
        make_directories(os.path.join(plan.work, kind))
    for number, name in enumerate(index_names):
        _move(_index_path(plan, number), os.path.join(plan.work, "index", name))
    if "consumequeue" not in plan.kinds:
        return
    for topic, queue_id in sorted(summary.queues):
        if (topic, queue_id) not in summary.alone:
            source = os.path.join(plan.build, "units", topic, str(queue_id))
            _move(source, queue_directory(plan.work, "consumequeue", topic, queue_id))
    alone = os.path.join(plan.build, "alone")
    for kind in folders_of(("consumequeue",)):
        for topic, queue_id, source in queue_directories(alone, kind):
            _move(source, queue_directory(plan.work, kind, topic, queue_id))


def _move(source: str, target: str) -> None:
    if os.path.exists(source):
        make_directories(os.path.dirname(target))
        os.rename(source, target)
    elif not os.path.exists(target):
        raise CorruptionError("what a task had built is gone; start the rebuild again", source)


def _verify(
    mapper: Mapper,
    plan: RebuildPlan,
    summary: LogSummary,
    groups: list[tuple[int, int]],
    index_names: list[str],
    misplaced: list[int],
) -> None:
    batch_topics = sorted(plan.batch_topics | summary.batch_topics)
    starts = [0, *np.cumsum(summary.entry_nums, dtype=np.int64).tolist()] if summary.entry_nums else None
    tasks = [(*numbers, starts[numbers[0]] if starts else 0, batch_topics, misplaced) for numbers in groups]
    covered: dict[QueueKey, int] = {}
    # In one go: a pass costs a moment even where it has little to do.
    answers = mapper(check_part, plan, [*tasks, *index_names])
    for (_, last, *_), (findings, units, entry) in zip(tasks, answers, strict=False):
        _refuse(findings)
        for key, count in units.items():
            covered[key] = covered.get(key, 0) + count
        if starts and entry != starts[last]:
            finding = Finding(
                plan.work, 0, "missing_entry", f"entry {entry} of the index comes next, not {starts[last]}"
            )
            _refuse([finding])
    for findings in answers[len(tasks) :]:
        _refuse(findings)
    queues = sorted(
        {
            (topic, queue_id)
            for kind in folders_of(("consumequeue",))
            for topic, queue_id, _ in queue_directories(plan.work, kind)
        }
    )
    if "consumequeue" in plan.kinds:
        checks = [(*key, covered.get(key, 0), key[0] in batch_topics) for key in queues]
        few = sum(covered.values()) < _FEW_UNITS and len(checks) <= _SMALL_WORK_TASKS
        for findings in [check_queues(plan, checks)] if few else mapper(check_queues, plan, _together(checks)):
            _refuse(findings)
    for folder in folders_of(plan.kinds):
        if os.path.isdir(os.path.join(plan.work, folder)):
            fsync_directory(os.path.join(plan.work, folder))
    fsync_directory(plan.work)


def _refuse(findings: list[Finding]) -> None:
    for finding in findings:
        raise CorruptionError(
            f"what was rebuilt does not agree with the log ({finding.kind}: {finding.detail}); nothing was swapped in, please "
            "report this",
            finding.path,
            finding.pos,
        )


# -------------------------------------------------------------------------------------------------------------- on Spark


def rebuild(
    spark: SparkSession,
    path: str | os.PathLike[str],
    what: Iterable[str] = ("index", "consumequeue"),
    config: StoreConfig | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    partition_bytes: int | None = None,
    parallelism: int | None = None,
) -> RebuildReport:
    """Rebuild index and queues from the commit log, as `rmqstore.rebuild` does, with the tasks of a Spark session.

    The bytes are the same, names of index files aside.  Every executor must see the store, and the output, under the same
    path, and may write there in place: a local disk, NFS, CephFS, Lustre, but no object store.

    Parameters
    ----------
    spark : SparkSession
        Classic or Connect.
    path : path
        The store's root.  Nobody else may have it open for writing; the driver holds its lock.
    what : iterable of {"index", "consumequeue"}
    config : StoreConfig, optional
        As of `rmqstore.rebuild`.
    output : path, optional
        Build into this directory, which must not hold them already, and leave the store as it is.
    partition_bytes : int, optional
        Bytes of log for one task; memory of a task grows with it.  By default 128 MiB, or a whole segment where the store
        has no consume queues that show where records begin.
    parallelism : int, optional
        How many tasks run at once; by default what Spark says.

    Returns
    -------
    RebuildReport

    Raises
    ------
    GeometryError, StoreLockedError, CorruptionError
        As of `rmqstore.rebuild`; the old files are untouched.

    Notes
    -----
    A rebuild that was killed, or whose job failed, leaves what its tasks had finished in ``.rmqstore-rebuild``.  The same
    call goes on with that, if nothing was written to the log meanwhile.
    """
    if parallelism is None:
        parallelism = default_parallelism(spark)
    return rebuild_with(
        spark_mapper(spark), path, what, config, output, partition_bytes=partition_bytes, parallelism=parallelism
    )


def default_parallelism(spark: SparkSession) -> int:
    """int: how many tasks Spark says it runs at once."""
    try:
        return max(spark.sparkContext.defaultParallelism, 1)
    except Exception:  # A session of Spark Connect has no context, and its error is no public name.
        return int(spark.conf.get("spark.default.parallelism", "16") or 16)


def spark_mapper(spark: SparkSession) -> Mapper:
    """Mapper: runs every task as a task of Spark's; what a task finds wrong with a store is raised here as it is there."""

    def mapper(function: Callable[[Any, Any], Any], plan: Any, tasks: Sequence[Any]) -> list[Any]:
        answers: list[Any] = []
        for first in range(0, len(tasks), _MAPPED_TASKS):
            answers += _map_tasks(spark, function, plan, list(tasks[first : first + _MAPPED_TASKS]))
        return answers

    return mapper


def _map_tasks(spark: SparkSession, function: Callable[[Any, Any], Any], plan: Any, tasks: list[Any]) -> list[Any]:
    def run(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        from rmqstore.spark.task import spare_collector

        spare_collector()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                answer = pickle.dumps(_answer(function, plan, tasks[number]))
                yield pa.RecordBatch.from_arrays(
                    [pa.array([number], pa.int64()), pa.array([answer], pa.binary())], names=["number", "answer"]
                )

    # One task for each number, also through Spark Connect, which knows no RDDs.
    frame = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(run, "number long, answer binary")
    answers: list[Any] = [None] * len(tasks)
    for row in frame.collect():
        answers[row["number"]] = pickle.loads(bytes(row["answer"]))
    for error, _ in answers:
        if error is not None:
            raise error
    return [answer for _, answer in answers]


def _answer(function: Callable[[Any, Any], Any], plan: Any, task: Any) -> tuple[StoreError | None, Any]:
    # What is wrong with a store stays wrong however often Spark tries again; other errors are left to it.
    try:
        return None, function(plan, task)
    except StoreError as error:
        return error, None
