"""Distributed rebuild: index and consume queues rebuilt from the commit log, by many processes that share its directory.

Owns the order of the passes, and combining what their tasks return: `rebuild_records` is pass 1, `rebuild_index` pass 2 and
the comparison with the log.  The bytes are those of the single-process `rmqstore.rebuild`, from which the swap, the marker
and the rules of dispatching are taken.  The passes are plain functions over paths: Spark only maps them, in any order,
twice or again after a kill.  Nothing here changes the commit log, and the old files stay in place until the new ones are
complete and verified.

A task writes either a file of its own, which it names last, or a range of a shared file that follows from the log alone, so
that a second attempt writes the same bytes.  What depends on the order of the log is computed from the summaries of the
segments.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig, system_clock
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import queue_directories, queue_directory
from rmqstore.errors import CorruptionError, Finding, StoreError
from rmqstore.files.durable import fsync_directory, make_directories
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.files.open_file import read_small_file
from rmqstore.index.index_service import index_name_after
from rmqstore.offline.rebuild import RebuildJob, RebuildReport, refuse_findings
from rmqstore.offline.rebuild_swap import delete_tree, folders_of
from rmqstore.spark.rebuild_index import (
    IndexTask,
    check_part,
    check_queues,
    index_path,
    index_tasks,
    write_index_file,
)
from rmqstore.spark.rebuild_records import (
    SMALLEST_RECORD,
    UNIT_SIZE,
    LogSummary,
    QueueKey,
    RebuildPlan,
    dispatch_alone,
    fill_units,
    scan_segments,
    write_named,
)
from rmqstore.spark.tasks import Map, parallelism_of, spark_map
from rmqstore.store.dispatch_rules import DeletedTopics, without_unit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["rebuild", "rebuild_with"]

logger = logging.getLogger(__name__)

# Fewer units than this are compared by the driver sooner than by tasks.
_FEW_UNITS = 1 << 25
# The most tasks that scan the log; each scans several segments then, and returns one summary to the driver.
_MAX_TASKS = 4096
# Segments of a task, where there are enough of them.
_SEGMENTS = 8
# Small pieces of work are combined into this number of tasks.
_SMALL_WORK_TASKS = 64


def rebuild_with(run: Map, job: RebuildJob, parallelism: int = 1) -> RebuildReport:
    """Rebuild as `rebuild` does, with tasks that `run` runs, about `parallelism` at once."""
    output = None if job.output is None else os.path.abspath(job.output)
    job = dataclasses.replace(job, root=os.path.abspath(job.root), output=output)
    return job.run(partial(_build, run, parallelism), resumable=True)


def _build(run: Map, parallelism: int, job: RebuildJob, work: str) -> RebuildReport:
    plan = _make_plan(job, work)
    if os.path.basename(plan.build) in listing(work).existing().names:
        logger.info("resuming from %s", plan.build)
    else:
        # Scratch of any other attempt.
        delete_tree(work, ignore_errors=True)
        make_directories(plan.build)
    try:
        report = _Rebuild(run, parallelism, plan).run()
    except StoreError:
        # A second attempt would fail too.  After other errors (a dead worker, a full disk) the finished work stays.
        delete_tree(work, ignore_errors=True)
        raise
    delete_tree(plan.build)
    return report


def _make_plan(job: RebuildJob, work: str) -> RebuildPlan:
    root, kinds = job.root, job.kinds
    config = dataclasses.replace(job.known_config, clock=system_clock)
    log = CommitLog(root, config, MappedFilePool(4), read_only=True)
    try:
        log.load()
        end = log.find_end_behind_damage()
        segments = tuple(base for base in log.files.offsets if base < end)
        times = [os.stat(log.files.file(base).path).st_mtime_ns for base in segments]
    finally:
        log.close()
    # Of queues that are to be written nobody guesses the kind: where the topics may not be read, that is an error.
    store = ConsumeQueueStore(root, config, MappedFilePool(1), read_only="consumequeue" not in kinds)
    store.load_topics(os.path.join(root, "config", "topics.json"))
    batch_topics = frozenset(
        {topic for topic, _, _ in queue_directories(root, "batchconsumequeue")} | store.batch_topics
    )
    state = (root, kinds, config, segments, times, end, sorted(batch_topics))
    key = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    return RebuildPlan(root, work, kinds, config, segments, end, batch_topics, key)


def _groups(count: int, parallelism: int) -> list[tuple[int, int]]:
    # Consecutive segments for one task each: some, as Spark needs as long for a task as a segment takes, but enough tasks
    # that all end at about the same time.
    size = max(min(_SEGMENTS, count // (3 * parallelism)), -(-count // _MAX_TASKS), 1)
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def _together(work: list[Any]) -> list[list[Any]]:
    size = max(1, -(-len(work) // _SMALL_WORK_TASKS))
    return [work[at : at + size] for at in range(0, len(work), size)]


class _Rebuild:
    """One run of the passes of a plan, with the results of their tasks."""

    def __init__(self, run: Map, parallelism: int, plan: RebuildPlan):
        self.map, self.plan = run, plan
        self.report = RebuildReport(plan.kinds, plan.root)
        # The segments of each task that scans the log, and its summary of them.
        self.groups = _groups(len(plan.segments), parallelism)
        self.summaries: list[LogSummary] = []
        # Of the whole log.
        self.summary = LogSummary()
        self.index_names: list[str] = []
        # Queues of topics that were deleted, of which nothing was built.
        self.dropped: set[QueueKey] = set()

    def run(self) -> RebuildReport:
        """Build, verify, and force to the disk."""
        self._scan()
        if "index" in self.plan.kinds:
            self._build_index()
        if "consumequeue" in self.plan.kinds:
            self._build_queues()
        self._assemble()
        self._verify()
        return self.report

    def _scan(self) -> None:
        plan, summary, report = self.plan, self.summary, self.report
        self.summaries = self.map(scan_segments, plan, self.groups)
        for each in self.summaries:
            summary.join(each)
        size = plan.config.mapped_file_size_commit_log
        missing = [
            (low + size, high - low - size, "missing segment")
            for low, high in itertools.pairwise(plan.segments)
            if high > low + size
        ]
        report.damage = sorted([*summary.damage, *missing])
        report.records, report.index_entries = summary.records, sum(summary.entry_nums)
        report.log_bytes = plan.end - plan.segments[0] if plan.segments else 0

    def _build_index(self) -> None:
        plan, summary = self.plan, self.summary
        tasks = index_tasks(plan, summary.entry_nums)
        if summary.records and not summary.last_has_keys and sum(summary.entry_nums) % (plan.config.max_index_num - 1) == 0:
            # RocketMQ (5.5.0) rolls a full file for the next record even if that has no keys.
            before = None
            if tasks:
                segment, first, count = tasks[-1].parts[-1]
                before = segment, first + count - 1
            tasks.append(IndexTask(len(tasks), (), before))
        self.map(write_index_file, plan, tasks)
        text = read_small_file(os.path.join(plan.build, "names.json"))
        if text is None:
            names: list[str] = []
            for _ in tasks:
                names.append(index_name_after(names[-1] if names else None, time.time_ns() // 1_000_000))
            text = json.dumps(names).encode()
            write_named(os.path.join(plan.build, "names.json"), text)
        self.index_names = list(json.loads(text))

    def _build_queues(self) -> None:
        plan, summary = self.plan, self.summary
        deleted = DeletedTopics(plan.root)
        self._drop({key for key in summary.queues if deleted.is_deleted(key[0])})
        fills = [fill for fill in summary.fills if fill[:2] not in self.dropped]
        for key, (first, phy_offset, *_) in summary.queues.items():
            if key[0] in self._batch_topics or first > phy_offset // SMALLEST_RECORD + 1:
                summary.alone.add(key)
            # Files begin at a multiple of their size, and the first with the file that holds the first unit.
            begin = first - first % (plan.config.consume_queue_file_size // UNIT_SIZE)
            if begin < first:
                fills.append((*key, begin, first))
        fills = [fill for fill in fills if fill[:2] not in summary.alone]
        mark = os.path.join(plan.build, "filled")
        if fills and not os.path.exists(mark):
            self.map(fill_units, plan, _together(fills))
            write_named(mark, b"")
        self.report.units = sum(place[4] for key, place in summary.queues.items() if key not in summary.alone)
        if summary.alone:
            self._build_alone()

    @property
    def _batch_topics(self) -> frozenset[str]:
        return self.plan.batch_topics | self.summary.batch_topics

    def _build_alone(self) -> None:
        plan, summary, report = self.plan, self.summary, self.report
        segments: set[int] = set()
        for each, numbers in zip(self.summaries, self.groups, strict=True):
            if each.further or not summary.alone.isdisjoint(each.queues):
                segments.update(plan.segments[slice(*numbers)])
        tasks = [(sorted(segments), sorted(summary.alone), sorted(self._batch_topics))]
        for units, misplaced, gone, deleted_after, alone_dropped in self.map(dispatch_alone, plan, tasks):
            report.units += units
            report.damage += [tuple(part) for part in misplaced]
            for topic, num in gone.items():
                report.gone[topic] = report.gone.get(topic, 0) + num
            earlier = {
                key
                for key, (_, phy_offset, *_) in summary.queues.items()
                if key not in summary.alone and phy_offset <= deleted_after.get(key[0], -1)
            }
            report.units -= sum(summary.queues[key][4] for key in earlier)
            self._drop(earlier)
            self.dropped |= set(alone_dropped)

    def _drop(self, keys: set[QueueKey]) -> None:
        # Queues of topics that were deleted: what tasks wrote for them stays in the scratch.
        gone = self.report.gone
        for key in keys:
            gone[key[0]] = gone.get(key[0], 0) + self.summary.queues.pop(key)[4]
        self.summary.alone -= keys
        self.dropped |= keys

    def _assemble(self) -> None:
        # Renames only; each may be the last before a kill, and is not done twice.
        plan, summary = self.plan, self.summary
        for kind in plan.kinds:
            make_directories(os.path.join(plan.work, kind))
        for number, name in enumerate(self.index_names):
            _move(index_path(plan, number), os.path.join(plan.work, "index", name))
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

    def _verify(self) -> None:
        plan, entry_nums = self.plan, self.summary.entry_nums
        batch_topics = sorted(self._batch_topics)
        starts = [0, *np.cumsum(entry_nums, dtype=np.int64).tolist()] if entry_nums else None
        left_out = sorted(without_unit(self.report.damage)), sorted(self.dropped)
        tasks = [(*numbers, starts[numbers[0]] if starts else 0, batch_topics, *left_out) for numbers in self.groups]
        covered: dict[QueueKey, int] = {}
        # In one go: a pass costs a moment even where it has little to do.
        answers = self.map(check_part, plan, [*tasks, *self.index_names])
        for (_, last, *_), (findings, units, entry) in zip(tasks, answers, strict=False):
            refuse_findings(findings)
            for key, count in units.items():
                covered[key] = covered.get(key, 0) + count
            if starts and entry != starts[last]:
                finding = Finding(
                    plan.work, 0, "missing_entry", f"entry {entry} of the index comes next, not {starts[last]}"
                )
                refuse_findings([finding])
        for findings in answers[len(tasks) :]:
            refuse_findings(findings)
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
            for findings in [check_queues(plan, checks)] if few else self.map(check_queues, plan, _together(checks)):
                refuse_findings(findings)
        for folder in folders_of(plan.kinds):
            if os.path.isdir(os.path.join(plan.work, folder)):
                fsync_directory(os.path.join(plan.work, folder))
        fsync_directory(plan.work)


def _move(source: str, target: str) -> None:
    if os.path.exists(source):
        make_directories(os.path.dirname(target))
        os.rename(source, target)
    elif not os.path.exists(target):
        raise CorruptionError("a file that a task had built is gone; start the rebuild again", source)


def rebuild(
    spark: SparkSession,
    path: str | os.PathLike[str],
    what: Iterable[str] = ("index", "consumequeue"),
    config: StoreConfig | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    drop_units: int = 0,
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
        As in `rmqstore.rebuild`.
    output : path, optional
        Build into this directory, which must not hold them already, and leave the store as it is.
    drop_units : int
        As in `rmqstore.rebuild`.

    Returns
    -------
    RebuildReport

    Raises
    ------
    GeometryError, LostLogError, StoreLockedError, CorruptionError
        As in `rmqstore.rebuild`; the old files are untouched.

    Notes
    -----
    A rebuild that was killed, or whose job failed, leaves the finished work of its tasks in ``.rmqstore-rebuild``.  The same
    call resumes from there, unless the log has changed.
    """
    job = RebuildJob.of(path, what, config, output, drop_units)
    return rebuild_with(spark_map(spark), job, parallelism_of(spark))
