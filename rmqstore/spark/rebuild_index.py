"""Pass 2 of a rebuild, the index files, and the comparison of everything that was built with the log.

Owns which entry comes into which index file.  A task writes a whole file and forces it to the disk; `rmqstore.offline.verify`
says what is wrong with it.  The log, and what is compared, stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rmqstore._dispatch import RecordColumns
from rmqstore.errors import Finding
from rmqstore.files.durable import force_data, fsync_directory
from rmqstore.files.listing import listing
from rmqstore.index.index_file import IndexFile
from rmqstore.offline.compared import Compared
from rmqstore.offline.rebuild_swap import folders_of
from rmqstore.offline.verify import verify_index_file, verify_queue, verify_records
from rmqstore.spark.rebuild_records import ENTRIES, ENTRY, ROWS, QueueKey, RebuildPlan, spool_path

SegmentsTask = tuple[int, int, int, list[str], list[int], list[QueueKey]]


# --------------------------------------------------------------------------------------------------------- index files


class IndexTask(NamedTuple):
    """An index file that is to be written.

    Attributes
    ----------
    number : int
        Counted from 0.
    parts : tuple of (int, int, int)
        The spools of its entries: segment, number of the first one there, count.
    before : (int, int) or None
        The spool of the last entry of the preceding file: segment, number there.
    """

    number: int
    parts: tuple[tuple[int, int, int], ...]
    before: tuple[int, int] | None


def index_tasks(plan: RebuildPlan, entry_nums: Sequence[int]) -> list[IndexTask]:
    """Return the index files that take these numbers of entries of the segments."""
    tasks: list[IndexTask] = []
    parts: list[tuple[int, int, int]] = []
    before, room = None, plan.config.max_index_num - 1
    for segment, num in enumerate(entry_nums):
        at = 0
        while at < num:
            count = min(num - at, room)
            parts.append((segment, at, count))
            at, room = at + count, room - count
            if not room:
                tasks.append(IndexTask(len(tasks), tuple(parts), before))
                before, parts, room = (segment, at - 1), [], plan.config.max_index_num - 1
    if parts:
        tasks.append(IndexTask(len(tasks), tuple(parts), before))
    return tasks


def _entries(plan: RebuildPlan, segment: int, first: int, count: int) -> np.ndarray:
    return np.fromfile(spool_path(plan, segment), ENTRY, count, offset=first * ENTRY.itemsize)


def index_path(plan: RebuildPlan, number: int) -> str:
    """Return the scratch path of the index file of that number."""
    return os.path.join(plan.build, "files", f"{number:010d}")


def write_index_file(plan: RebuildPlan, task: IndexTask) -> None:
    """Pass 2: put the entries of a file, and force it to the disk."""
    folder, path = plan.folder("files"), index_path(plan, task.number)
    if os.path.exists(path):
        return
    temporary = os.path.join(folder, uuid.uuid4().hex)
    try:
        with IndexFile.create(temporary, plan.config, sparse=True) as index:
            if task.before is not None:
                # RocketMQ (5.5.0) begins a file with the time and the offset at which the one before ends.
                (last,) = _entries(plan, *task.before, 1)
                time, phy_offset = max(int(last["store_timestamp"]), 0), max(int(last["phy_offset"]), 0)
                index.write_header(time, time, phy_offset, phy_offset, 0, 0)
            for segment, first, count in task.parts:
                for at in range(0, count, ENTRIES):
                    part = _entries(plan, segment, first + at, min(ENTRIES, count - at))
                    hashes, phy_offsets, times = (
                        np.ascontiguousarray(part[name]) for name in ("hash", "phy_offset", "store_timestamp")
                    )
                    index.reserve_entries(hashes)
                    index.put_hashes(hashes, phy_offsets, times)
            index.flush()
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# ------------------------------------------------------------------------------------------------------ the comparison


def check_part(plan: RebuildPlan, task: SegmentsTask | str) -> Any:
    """Run `check_index_file` for a name, `check_segments` for segments."""
    return check_index_file(plan, task) if isinstance(task, str) else check_segments(plan, task)


def check_segments(plan: RebuildPlan, task: SegmentsTask) -> tuple[list[Finding], dict[QueueKey, int], int]:
    """Compare what was built with the records of the segments from `task[0]` to before `task[1]`.

    Every record's unit and entries must be there, in order, and have what the record needs.  The CRCs were checked in pass 1.
    `task` also has the number of the first entry in the whole index, the topics with batch queues, the phy offsets of records
    without a unit because they are misplaced, and the queues of deleted topics.  Returns the first findings, the number of
    units of each queue for these records, and the number after the last entry.
    """
    first, last, entry, batch_topics, misplaced, dropped = task
    findings: list[Finding] = []
    covered: dict[QueueKey, int] = {}
    for number in range(first, last):
        base, end = plan.bounds(number)
        with plan.open([base]) as log:
            columns = RecordColumns(ROWS)
            stretches = log.stretches(base, end, columns, check_crc=False, keys="index" in plan.kinds)
            with contextlib.closing(Compared(log, plan.work, plan.config, kinds=plan.kinds)) as compared:
                compared.without_unit, compared.without_queue = frozenset(misplaced), frozenset(dropped)
                found, units, entry = verify_records(
                    compared, columns, stretches, batch_topics=batch_topics, first_entry=entry
                )
        findings += found
        for key, count in units.items():
            covered[key] = covered.get(key, 0) + count
        if findings:
            break
    return findings, covered, entry


def check_index_file(plan: RebuildPlan, name: str) -> list[Finding]:
    """Compare slots, chains and header of an index file with its entries."""
    with plan.open(plan.segments) as log:
        with contextlib.closing(Compared(log, plan.work, plan.config, kinds=("index",))) as compared:
            return verify_index_file(compared, name, plan.end)


def check_queues(plan: RebuildPlan, queues: Sequence[tuple[str, int, int, bool]]) -> list[Finding]:
    """Find units of queues that belong to no record, and force the queues to the disk.

    Of each queue there are topic, queue id, how many units belong to records, and whether it is a batch queue.
    """
    findings = []
    with plan.open(plan.segments) as log:
        for topic, queue_id, covered, batch in queues:
            with contextlib.closing(Compared(log, plan.work, plan.config, kinds=("consumequeue",))) as compared:
                findings += verify_queue(compared, topic, queue_id, covered, batch=batch)
            for folder in folders_of(("consumequeue",)):
                directory = os.path.join(plan.work, folder, topic, str(queue_id))
                if os.path.isdir(directory):
                    for path in listing(directory).checked().paths:
                        with open(path, "rb+") as file:
                            force_data(file.fileno())
                    fsync_directory(directory)
                    fsync_directory(os.path.dirname(directory))
    return findings
