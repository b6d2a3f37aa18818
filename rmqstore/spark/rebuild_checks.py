"""What was rebuilt, compared with the log by many tasks before anything is swapped in, and forced to the disk.

Owns which task looks at what; `rmqstore.offline.verify` says what is wrong.  It changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from rmqstore._dispatch import RecordColumns
from rmqstore.errors import Finding
from rmqstore.files.durable import fsync_directory
from rmqstore.files.listing import listing
from rmqstore.offline.compared import Compared
from rmqstore.offline.rebuild_swap import folders_of
from rmqstore.offline.verify import verify_index_file, verify_queue, verify_records
from rmqstore.spark.rebuild_plan import ROWS, QueueKey, RebuildPlan, segment_offsets, segments_of, stretches_of
from rmqstore.spark.rebuild_records import scan_piece

PiecesTask = tuple[int, int, int, list[str], list[int], list[QueueKey]]


def check_pieces(
    plan: RebuildPlan, task: PiecesTask
) -> tuple[list[Finding], dict[QueueKey, int], int]:
    """Compare what was built with the records of the pieces from `task[0]` to before `task[1]`.

    Every record's unit and entries are looked at: that they are there, in order, and say what the record needs.  The CRCs
    were checked when the records were read first.

    Parameters
    ----------
    task : (int, int, int, list of str, list of int, list of (str, int))
        The pieces, the number of the first piece's first entry in the whole index, from 0 on, the topics with batch queues,
        the phy offsets of records that have no unit because they are misplaced, and queues of topics that were deleted.

    Returns
    -------
    (list of Finding, dict of (str, int) to int, int)
        The first findings, how many units of each queue belong to these records, and the number after the last entry.
    """
    first, last, entry, batch_topics, misplaced, dropped = task
    findings: list[Finding] = []
    covered: dict[QueueKey, int] = {}
    for number in range(first, last):
        piece = plan.piece(number)
        summary = scan_piece(plan, number)
        with segments_of(plan, [plan.segment(piece.begin)]) as log:
            columns = RecordColumns(ROWS)
            stretches = stretches_of(
                log, summary.first, piece.end, plan.end, columns, check_crc=False, keys="index" in plan.kinds
            )
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


def check_part(plan: RebuildPlan, task: PiecesTask | str) -> Any:
    """`check_file` for a name, `check_pieces` for pieces."""
    return check_file(plan, task) if isinstance(task, str) else check_pieces(plan, task)


def check_file(plan: RebuildPlan, name: str) -> list[Finding]:
    """Compare slots, chains and header of an index file with its entries, and force it to the disk."""
    with segments_of(plan, segment_offsets(plan)) as log:
        with contextlib.closing(Compared(log, plan.work, plan.config, kinds=("index",))) as compared:
            findings = verify_index_file(compared, name, plan.end)
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
    with segments_of(plan, segment_offsets(plan)) as log:
        for topic, queue_id, covered, batch in queues:
            with contextlib.closing(Compared(log, plan.work, plan.config, kinds=("consumequeue",))) as compared:
                findings += verify_queue(compared, topic, queue_id, covered, batch=batch)
            _force_queue(plan, topic, queue_id)
    return findings


def _force_queue(plan: RebuildPlan, topic: str, queue_id: int) -> None:
    for folder in folders_of(("consumequeue",)):
        directory = os.path.join(plan.work, folder, topic, str(queue_id))
        if os.path.isdir(directory):
            for path in listing(directory).checked().paths:
                _force(path)
            fsync_directory(directory)
            fsync_directory(os.path.dirname(directory))


def _force(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
