"""Pass 1 of a rebuild: the records of a segment, their units put into place and their index entries into a spool.

Owns what tasks share: `RebuildPlan`, which goes to every task, and `LogSummary`, which comes back from it; and how they
write: a file of their own under its last name, or a range of a file that others share, always with the same bytes.  Queues
whose units do not follow from the records one by one are built by a dispatcher.  It never changes the commit log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rmqstore import _core
from rmqstore._core import PRE_FILL_SIZE, UnitLayout, Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import can_name_queue, queue_directory
from rmqstore.errors import CorruptionError
from rmqstore.files.durable import write_all
from rmqstore.files.mapped_file import MappedFilePool, name_of_offset
from rmqstore.files.open_file import read_small_file
from rmqstore.message import decode_java_utf8
from rmqstore.offline.rebuild import refuse_assumed
from rmqstore.offline.rebuild_swap import delete_tree
from rmqstore.store.dispatch_rules import further_places, unit_rows
from rmqstore.store.dispatcher import LogDispatcher

if TYPE_CHECKING:
    from typing_extensions import Buffer

SMALLEST_RECORD = int(_core.RecordLayout.RECORD_FIXED_SIZE)
UNIT_SIZE = int(UnitLayout.UNIT_SIZE)
DAMAGED_BODY = (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC)
# Records that are read at once, and entries or units that are made at once.
ROWS = 32768
ENTRIES = 1 << 20

_UNIT = np.dtype([("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
ENTRY = np.dtype([("phy_offset", "i8"), ("store_timestamp", "i8"), ("hash", "i4")])
"""A spooled index entry."""

QueueKey = tuple[str, int]


# ------------------------------------------------------------------------------------------------------- what is shared


@dataclass(frozen=True)
class RebuildPlan:
    """The part of a rebuild that every task needs.

    Attributes
    ----------
    root : str
        The store.
    work : str
        The parent of the finished folders, and of `build`, the scratch of this plan.
    kinds : tuple of str
    config : StoreConfig
    segments : tuple of int
        Offset of the first byte of each segment, ascending; tasks name segments by their place in here.
    end : int
        End of the log, in bytes.
    batch_topics : frozenset of str
        Topics that are known to have batch queues.
    key : str
        Differs for another log and other options.
    """

    root: str
    work: str
    kinds: tuple[str, ...]
    config: StoreConfig
    segments: tuple[int, ...]
    end: int
    batch_topics: frozenset[str]
    key: str

    @property
    def build(self) -> str:
        """The scratch folder; a rebuild of another log, or with other options, has another."""
        return os.path.join(self.work, f"build-{self.key}")

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the begin of a segment, and its end or that of the log."""
        base = self.segments[number]
        return base, min(base + self.config.mapped_file_size_commit_log, self.end)

    def folder(self, *names: str) -> str:
        """Return a folder in the scratch, created if it is missing; the scratch itself must exist."""
        path = self.build
        for name in names:
            path = os.path.join(path, name)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
        return path

    @contextlib.contextmanager
    def open(self, segments: Iterable[int]) -> Iterator[CommitLog]:
        """Open a log of only these segments, by their offsets, without a listing; the block's end closes it."""
        log = CommitLog(self.root, self.config, MappedFilePool(4), read_only=True)
        try:
            log.files.take(segments, self.end)
            yield log
        finally:
            log.close()


@dataclass
class LogSummary:
    """A summary of a part of the log; with those of the preceding parts it determines where everything in it goes.

    Attributes
    ----------
    records : int
    entry_nums : list of int
        Index entries of every segment.
    last_has_keys : bool or None
        True if the last record has index entries; None without a record.
    queues : dict of (str, int) to list
        Per queue: offset and phy offset of its first unit, the same of its last, and how many units.
    fills : list of (str, int, int, int)
        Topic, queue id, and the units of the queue that no record has (begin, end).
    alone : set of (str, int)
        Queues whose units do not follow from the records one by one.
    batch_topics : set of str
        Topics of which inner batches were found.
    further : bool
        There are records with units in further queues.
    damage : list of (int, int, str)
        As `RebuildReport.damage`.
    """

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
        """Return this as JSON."""
        values = dataclasses.asdict(self)
        values["queues"] = [[*key, *value] for key, value in self.queues.items()]
        values["alone"], values["batch_topics"] = sorted(self.alone), sorted(self.batch_topics)
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> LogSummary:
        """Parse the text of `to_json`."""
        values = json.loads(text)
        values["queues"] = {(topic, queue_id): rest for topic, queue_id, *rest in values["queues"]}
        values["alone"] = {(topic, queue_id) for topic, queue_id in values["alone"]}
        values["batch_topics"] = set(values["batch_topics"])
        values["fills"] = [tuple(fill) for fill in values["fills"]]
        values["damage"] = [tuple(part) for part in values["damage"]]
        return cls(**values)

    def join(self, following: LogSummary) -> None:
        """Add the part that follows."""
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
            if not can_follow(*mine[2:4], *place[:2]):
                self.alone.add(key)
            elif place[0] > mine[2] + 1:
                self.fills.append((*key, mine[2] + 1, place[0]))
            mine[2:] = [*place[2:4], mine[4] + place[4]]


def can_follow(offset: int, phy_offset: int, next_offset: int, next_phy_offset: int) -> bool:
    """Return True if a queue offset can follow: it rises, by at most the number of records that fit between."""
    # No dispatcher finds such a rise implausible, in whatever batches it reads the records.
    return 1 <= next_offset - offset <= (next_phy_offset - phy_offset) // SMALLEST_RECORD


# ------------------------------------------------------------------------------------------------------ how tasks write


def write_named(path: str, data: Buffer) -> None:
    """Write a file that gets its name when it is complete."""
    # Under a name of its own first, so that a second attempt, or a kill, leaves the whole file or none.
    temporary = f"{path}.{uuid.uuid4().hex}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _write_at(path: str, size: int, pos: int, data: memoryview) -> None:
    # Into a file of `size` bytes, which is made if it is missing.  Through the file, not through a mapping: pages of a shared
    # file are not this task's alone, and a full disk is an error.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        write_all(fd, data, pos)
    finally:
        os.close(fd)


# -------------------------------------------------------------------------------------------------------------- pass 1


def scan_segments(plan: RebuildPlan, numbers: tuple[int, int]) -> LogSummary:
    """Pass 1 for the segments from `numbers[0]` to before `numbers[1]`; what was done before is not read again."""
    joined = LogSummary()
    for number in range(*numbers):
        path = os.path.join(plan.folder("segments"), f"{number:010d}.json")
        done = read_small_file(path)
        if done is None:
            scan = _SegmentScan(plan, number)
            scan.run()
            # Named last: where it is, the rest is.
            write_named(path, scan.summary.to_json().encode())
            summary = scan.summary
        else:
            summary = LogSummary.from_json(done)
        joined.join(summary)
    return joined


def spool_path(plan: RebuildPlan, number: int) -> str:
    """Return the path of the spooled index entries of a segment."""
    return os.path.join(plan.build, "segments", f"{number:010d}.entries")


class _SegmentScan:
    """A scan of one segment."""

    def __init__(self, plan: RebuildPlan, number: int):
        self.plan = plan
        self.number = number
        self.summary = LogSummary()
        self.entries: list[np.ndarray] = []
        self.units: dict[QueueKey, list[np.ndarray]] = {}
        self.with_queues, self.with_index = "consumequeue" in plan.kinds, "index" in plan.kinds
        self._topics: list[str] = []

    def run(self) -> None:
        plan, summary = self.plan, self.summary
        at, end = plan.bounds(self.number)
        columns = RecordColumns(ROWS)
        damaged = RecordColumns(1, columns.topics)
        with plan.open([at]) as self.log:
            for stretch in self.log.stretches(at, end, columns, keys=self.with_index):
                at = stretch.end
                if stretch.verdict is Verdict.RECORD:
                    self._take(columns)
                    continue
                if stretch.verdict in DAMAGED_BODY:
                    # Its lengths are sound, so it keeps its place in its queue and its keys; readers mark it as corrupt.
                    for _ in self.log.stretches(stretch.begin, at, damaged, check_crc=False, keys=self.with_index):
                        self._take(damaged)
                if stretch.is_damage:
                    summary.damage.append(stretch.as_damage)
        if at < end:
            raise CorruptionError(
                f"the log was read up to phy offset {at}, but ends at {end}; please report this",
                os.path.join(plan.root, "commitlog"),
            )
        if self.with_index:
            entries = np.concatenate([np.empty(0, ENTRY), *self.entries])
            summary.entry_nums = [len(entries)]
            write_named(spool_path(plan, self.number), entries.data)
        for (topic, queue_id), parts in self.units.items():
            if (topic, queue_id) not in summary.alone:
                first = summary.queues[topic, queue_id][0]
                _write_units(plan, topic, queue_id, first, b"".join(part.tobytes() for part in parts))

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
            entries = np.empty(starts[n], ENTRY)
            entries["phy_offset"] = np.repeat(columns.phy_offset[:n], counts)
            entries["store_timestamp"] = np.repeat(columns.store_timestamp[:n], counts)
            entries["hash"] = columns.key_hash[: starts[n]]
            self.entries.append(entries)

    def _take_units(self, columns: RecordColumns) -> None:
        plan, summary = self.plan, self.summary
        n = columns.count
        queued, batches, bad_batches, further = unit_rows(columns)
        for topic in columns.topics.topics[len(self._topics) :]:
            self._topics.append(decode_java_utf8(topic))
        summary.batch_topics |= {self._topics[number] for number in set(columns.topic[:n][batches].tolist())}
        # The dispatcher reports these.
        for row in bad_batches.tolist():
            summary.alone.add((self._topics[columns.topic[row]], int(columns.queue_id[row])))
        if plan.config.enable_lmq and plan.config.enable_multi_dispatch:
            for row in further.tolist():
                message = self.log.look_up(int(columns.phy_offset[row]))
                places, problem = ([], None) if message is None else further_places(message, plan.config)
                summary.alone |= {(name, 0) for name, _ in places}
                if problem is not None:
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
        if self.plan.config.enable_consume_queue_ext or key[0] in self.plan.batch_topics or key in self.summary.alone:
            self.summary.alone.add(key)
        elif ends[0] < 0 or (place is not None and not can_follow(*place[2:4], *ends[:2])):
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
    if ((steps < 1) | (steps > np.diff(phy_offsets) // SMALLEST_RECORD)).any():
        return None
    spread = _filling(int(offsets[-1] - offsets[0]) + 1)
    spread[offsets - offsets[0]] = part
    return spread


def _write_units(plan: RebuildPlan, topic: str, queue_id: int, number: int, data: bytes) -> None:
    # From unit `number` on; files are made as they are needed.
    file_size = plan.config.consume_queue_file_size
    queue_directory(plan.build, "consumequeue", topic, queue_id)  # Refuses a topic that leads elsewhere.
    directory = plan.folder("units", topic, str(queue_id))
    at, view = number * UNIT_SIZE, memoryview(data)
    while len(view):
        base = at - at % file_size
        part = view[: base + file_size - at]
        _write_at(os.path.join(directory, name_of_offset(base)), file_size, at - base, part)
        view, at = view[len(part) :], at + len(part)


def fill_units(plan: RebuildPlan, fills: Sequence[tuple[str, int, int, int]]) -> None:
    """Write pre-fill units, which readers skip, into gaps: topic, queue id, first number and end of each."""
    for topic, queue_id, begin, end in fills:
        for at in range(begin, end, ENTRIES):
            _write_units(plan, topic, queue_id, at, _filling(min(ENTRIES, end - at)).tobytes())


def dispatch_alone(
    plan: RebuildPlan, task: tuple[list[int], list[QueueKey], list[str]]
) -> tuple[int, list[Any], dict[str, int], dict[str, int], list[QueueKey]]:
    """Build some queues as the single-process rebuild does.

    `task` has the segments with records of these queues, the queues, and all topics with batch queues.  The answer has the
    number of units, the records whose queue offset cannot be, and of `LogDispatcher` what is gone, after which records
    topics were deleted, and the queues that were dropped for it.
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
            write_named(os.path.join(attempt, "report.json"), json.dumps(found).encode())
            os.rename(attempt, target)
        except BaseException as error:
            delete_tree(attempt, ignore_errors=True)
            # Another attempt was there first.
            if not isinstance(error, OSError) or not os.path.exists(report):
                raise
        text = read_small_file(report)
        assert text is not None
    units, misplaced, gone, deleted_after, dropped = json.loads(text)
    return units, misplaced, gone, deleted_after, [(topic, queue_id) for topic, queue_id in dropped]


def _dispatch_alone(
    plan: RebuildPlan, target: str, segments: list[int], queues: frozenset[QueueKey], batch_topics: list[str]
) -> tuple[int, list[Any], dict[str, int], dict[str, int], list[QueueKey]]:
    store = ConsumeQueueStore(target, plan.config, MappedFilePool(plan.config.max_mapped_files))
    try:
        with plan.open(segments) as log:
            for topic in batch_topics:
                store.add_batch_topic(topic)
            dispatcher = LogDispatcher(plan.root, log, store, None)
            dispatcher.only = queues
            # The batch size of the single-process rebuild: it determines which queue offsets the dispatcher trusts.
            columns = RecordColumns()
            for base in segments:
                end = min(base + log.segment_size, plan.end)
                for stretch in log.stretches(base, end, columns, keys=False):
                    dispatcher.dispatch_stretch(stretch, columns)
            dispatcher.finish()
        store.flush()
        counts = dispatcher.counts
        return counts.units, counts.misplaced, counts.gone, dispatcher.deleted_after, sorted(dispatcher.dropped)
    finally:
        store.close()
