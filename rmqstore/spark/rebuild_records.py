"""Pass 1 of a rebuild: the records of a piece, their units put into place and their index entries into a spool.

Owns that pass, and the queues whose units do not follow from the records one by one, which a dispatcher builds alone.
It never changes the commit log.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from rmqstore._core import PRE_FILL_SIZE, Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import can_name_queue, queue_directory
from rmqstore.files.mapped_file import MappedFilePool, name_of_offset
from rmqstore.files.open_file import read_small_file
from rmqstore.message import decode_java_utf8
from rmqstore.offline.rebuild import refuse_assumed
from rmqstore.offline.rebuild_swap import delete_tree
from rmqstore.spark.plan import Piece, first_offset
from rmqstore.spark.rebuild_files import write_at, write_named
from rmqstore.spark.rebuild_plan import (
    DAMAGED_BODY,
    ENTRIES,
    ROWS,
    SMALLEST_RECORD,
    UNIT_SIZE,
    LogSummary,
    QueueKey,
    RebuildPlan,
    can_follow,
    segments_of,
    stretches_of,
)
from rmqstore.store.dispatch_rules import multi_dispatch_places, multi_dispatch_problem, unit_rows
from rmqstore.store.dispatcher import LogDispatcher

_UNIT = np.dtype([("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])


def scan_pieces(plan: RebuildPlan, numbers: tuple[int, int]) -> str:
    """Pass 1 for the pieces from `numbers[0]` to before `numbers[1]`: units into place, entries into a spool.

    Returns
    -------
    str
        The `LogSummary` of all of them, as text.
    """
    joined: LogSummary | None = None
    for number in range(*numbers):
        summary = scan_piece(plan, number)
        if joined is None:
            joined = summary
        else:
            joined.join(summary, plan)
    assert joined is not None
    return joined.to_json()


def spool_path(plan: RebuildPlan, number: int) -> str:
    """str: where the index entries of a piece wait for their files."""
    return os.path.join(plan.build, "pieces", f"{number:010d}.entries")


def _summary_path(plan: RebuildPlan, number: int) -> str:
    return os.path.join(plan.build, "pieces", f"{number:010d}.json")


def scan_piece(plan: RebuildPlan, number: int) -> LogSummary:
    """Pass 1: what a piece of the log holds; a piece that was done before is not read again."""
    plan.folder("pieces")
    done = read_small_file(_summary_path(plan, number))
    if done is not None:
        return LogSummary.from_json(done)
    piece = plan.piece(number)
    with segments_of(plan, [plan.segment(piece.begin)]) as log:
        scan = _PieceScan(plan, log, first_offset(log, piece, plan.by_queues))
        scan.run(piece)
    if "index" in plan.kinds:
        scan.write_entries(spool_path(plan, number))
    scan.write_units()
    # The last to be named: whoever finds it finds the rest.
    write_named(_summary_path(plan, number), scan.summary.to_json().encode())
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
        columns = RecordColumns(ROWS)
        damaged = RecordColumns(1, columns.topics)
        for stretch in stretches_of(log, summary.first, piece.end, plan.end, columns, keys=self.with_index):
            summary.reached = stretch.end
            if stretch.verdict is Verdict.RECORD:
                self._take(columns)
                continue
            if stretch.verdict in DAMAGED_BODY:
                # Its lengths are whole, so it keeps its place in its queue and under its keys; readers mark it as corrupt.
                for _ in log.stretches(stretch.begin, stretch.end, damaged, check_crc=False, keys=self.with_index):
                    self._take(damaged)
            if stretch.is_damage:
                summary.damage.append(stretch.as_damage)
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
        queued, batches, bad_batches, further = unit_rows(columns)
        for topic in columns.topics.topics[len(self._topics) :]:
            self._topics.append(decode_java_utf8(topic))
        summary.batch_topics |= {self._topics[number] for number in set(columns.topic[:n][batches].tolist())}
        # What the dispatcher has something to report of is left to it.
        for row in bad_batches.tolist():
            summary.alone.add((self._topics[columns.topic[row]], int(columns.queue_id[row])))
        if plan.config.enable_lmq and plan.config.enable_multi_dispatch:
            for row in further.tolist():
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

    def write_units(self) -> None:
        """Put the units into their places; files have holes where other pieces write."""
        for (topic, queue_id), parts in self.units.items():
            if (topic, queue_id) not in self.summary.alone:
                number = self.summary.queues[topic, queue_id][0]
                _write_units(self.plan, topic, queue_id, number, b"".join(part.tobytes() for part in parts))

    def write_entries(self, path: str) -> None:
        """Spool the entries: phy offsets, store timestamps, index hashes."""
        columns = [[part[i] for part in self.entries] for i in range(3)]
        write_named(path, b"".join(part.tobytes() for column in columns for part in column))


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
        write_at(os.path.join(directory, name_of_offset(base)), file_size, at - base, part)
        view, at = view[len(part) :], at + len(part)


def fill_units(plan: RebuildPlan, fills: Sequence[tuple[str, int, int, int]]) -> None:
    """Write pre-fill units, which readers pass over, where queues have gaps: topic, queue id, first number, end of each."""
    for topic, queue_id, begin, end in fills:
        for at in range(begin, end, ENTRIES):
            _write_units(plan, topic, queue_id, at, _filling(min(ENTRIES, end - at)).tobytes())


def dispatch_alone(
    plan: RebuildPlan, task: tuple[list[int], list[QueueKey], list[str]]
) -> tuple[int, list[Any], dict[str, int], dict[str, int], list[QueueKey]]:
    """Build some queues as the single-process rebuild does.

    Parameters
    ----------
    task : (list of int, list of (str, int), list of str)
        The segments with records of these queues, the queues, and all topics with batch queues.

    Returns
    -------
    (int, list, dict, dict, list)
        How many units, the records whose queue offset cannot be, and of `LogDispatcher` what is gone, after which records
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
    store = ConsumeQueueStore(target, plan.config, MappedFilePool(plan.config.max_mapped_files, sparse=True))
    try:
        with segments_of(plan, segments) as log:
            for topic in batch_topics:
                store.add_batch_topic(topic)
            dispatcher = LogDispatcher(plan.root, log, store, None)
            dispatcher.only = queues
            # As many at once as the single-process rebuild reads: what it believes of a queue offset depends on that.
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
