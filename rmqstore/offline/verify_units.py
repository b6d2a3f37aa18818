"""Verify queue files: compare the units of one queue with its records, in the order of the log."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator

from rmqstore import _numpy as np
from rmqstore._core import EXT_ADDRESS_BASE, EXT_ADDRESS_MAX
from rmqstore._dispatch import RecordColumns
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import Finding, StoreError, finding_of
from rmqstore.files.open_file import why_unreadable
from rmqstore.files.os_errors import is_unreadable
from rmqstore.message import SCHEDULE_TOPIC
from rmqstore.offline.compared import Compared, unread_file
from rmqstore.store.dispatch_rules import QueueLife, life_of, names_further_queue

_NOT_COMPARED = "the queue is not compared with the log"


class QueueCheck:
    """Compares the units of one queue with its records.

    Attributes
    ----------
    queue : AnyConsumeQueue or None
        None where there is no queue, or it cannot be read.
    problems : list of Finding
        Why the queue is not compared.
    covered : int
        The number of units that belong to a record.
    gone, deleted_after : int
        The number of records of a deleted topic, or of a deleted queue of this name; phy offset of the last record whose queue
        began again, -1 for none.
    """

    def __init__(self, compared: Compared, topic: str, queue_id: int):
        self.compared = compared
        self.topic, self.queue_id = topic, queue_id
        self.queue: AnyConsumeQueue | None = None
        self.problems: list[Finding] = []
        self.covered = self.gone = self.missing_num = 0
        self.deleted_after = -1
        # If there is no queue: the queue offset and the phy offset of the first record that needs it.
        self._first_missing: tuple[int, int] | None = None
        self._files_told = False
        # Wrong units in a row as one finding, and the numbers of the first and the last.
        self._run: tuple[Finding, int, int] | None = None
        try:
            self.queue = compared.queues.find(topic, queue_id)
        except (StoreError, OSError) as error:
            problem = finding_of(error, "file", compared.root)
            if is_unreadable(error):
                # The folder is reported once for all queues that may be in it.
                self._files_told = problem.path in compared.queues.unseen
                problem = unread_file(problem.path, error, _NOT_COMPARED)
            self.problems.append(problem)
        for files in () if self.queue is None else self.queue.file_lists():
            for path in [files.file(base).path for base in files.offsets]:
                unreadable = why_unreadable(path)
                if unreadable is not None:
                    self.problems.append(unread_file(path, unreadable, _NOT_COMPARED))

    @property
    def by_base(self) -> bool:
        """bool: it is a batch queue, whose units have the base offsets of inner batches."""
        return self.queue is not None and self.queue.kind == BatchConsumeQueue.kind

    def records(self, columns: RecordColumns, rows: np.ndarray) -> Iterator[Finding]:
        """Compare the units of the records in `rows`, an array of int64 with rows of `columns`."""
        queue = self.queue
        if self.problems:
            return
        if queue is None:
            yield from self.missing(int(columns.queue_offset[rows[0]]), int(columns.phy_offset[rows[0]]), len(rows))
            return
        if queue.agrees(columns, rows):
            self.covered += len(rows)
            return
        rows = self._of_this_life(columns, rows)
        if isinstance(queue, BatchConsumeQueue):
            yield from self._compare_batches(queue, columns, rows)
            return
        # Each run of queue offsets without a gap is compared at once.
        for run in np.split(rows, np.flatnonzero(np.diff(columns.queue_offset[rows]) != 1) + 1):
            yield from self._compare(queue, columns, run)

    @functools.cached_property
    def _life(self) -> QueueLife | None:
        first = None if self.queue is None else self.queue.first_record()
        if first is None:
            return None
        place = first.queue_offset, first.phy_offset
        if self.compared.is_built:
            return QueueLife(*place)
        return life_of(self.compared.commit_log, self.topic, self.queue_id, *place)

    def _of_this_life(self, columns: RecordColumns, rows: np.ndarray) -> np.ndarray:
        # The rows without the records of a deleted queue of this name.
        if self._life is None:
            return rows
        queue_offsets = columns.inner_base if self.by_base else columns.queue_offset
        phy_offsets = columns.phy_offset[rows]
        earlier = self._life.earlier(queue_offsets[rows], phy_offsets)
        if earlier.any():
            self.gone += int(earlier.sum())
            self.deleted_after = int(phy_offsets[earlier].max())
        of_this: np.ndarray = rows[~earlier]
        return of_this

    def _compare(self, queue: ConsumeQueue, columns: RecordColumns, rows: np.ndarray) -> Iterator[Finding]:
        checks_tags = not (self.topic == SCHEDULE_TOPIC and "message_delay_level" in self.compared.config.assumed)
        while len(rows):
            first = int(columns.queue_offset[rows[0]])
            there = first >= queue.first_unit
            phy, sizes, codes = queue.units(first if there else queue.unit_num, len(rows) if there else 0)
            part, rows = rows[: len(phy) or 1], rows[len(phy) or 1 :]
            if not len(phy):
                yield from self.missing(first, int(columns.phy_offset[part[0]]), 1)
                continue
            differ = (phy != columns.phy_offset[part]) | (sizes != columns.size[part])
            if checks_tags:
                differ[queue.differing_tags(first, columns, part)] = True
            self.covered += len(part)
            for i in np.flatnonzero(differ).tolist():
                row = int(part[i])
                code, time = int(columns.tags_code[row]), int(columns.store_timestamp[row])
                needed = str(code) if queue.ext is None else f"{code} (tags code {code} and store time {time})"
                detail = (
                    f"unit {first + i} is {int(phy[i])}:{int(sizes[i])}:{_said(queue, int(codes[i]))}, the record at phy offset "
                    f"{columns.phy_offset[row]} needs {columns.phy_offset[row]}:{columns.size[row]}:{needed}"
                )
                yield from self.tell(queue, first + i, "bad_unit", detail)

    def _compare_batches(self, queue: BatchConsumeQueue, columns: RecordColumns, rows: np.ndarray) -> Iterator[Finding]:
        for row in rows.tolist():
            base, phy, size = int(columns.inner_base[row]), int(columns.phy_offset[row]), int(columns.size[row])
            unit = queue.unit(base)
            if unit is None:
                yield from self.missing(base, phy, 1)
                continue
            self.covered += 1
            expected = (base, phy, size, int(columns.tags_code[row]), max(int(columns.inner_num[row]), 1))
            time, needed = queue.store_timestamp(base), int(columns.store_timestamp[row])
            if tuple(unit) != expected or time != needed:
                detail = f"the unit of batch {base} is {(*unit, time)}, the record needs {(*expected, needed)}"
                yield Finding(queue.files.path, 0, "bad_unit", detail)

    def missing_queue(self, deleted_after: int = -1) -> Iterator[Finding]:
        """Report a queue that does not exist, if records need it that are not of a topic deleted after this phy offset."""
        if self._first_missing is None or self.problems:
            return
        queue_offset, phy_offset = self._first_missing
        if phy_offset <= deleted_after:
            self.gone += self.missing_num
            return
        path = os.path.join(self.compared.root, "consumequeue", self.topic, str(self.queue_id))
        detail = f"{self.topic}/{self.queue_id} has no unit {queue_offset} for the record at phy offset {phy_offset}: the topic "
        detail += f"was deleted, or its queue is lost; it lacks {self.missing_num} units in all"
        yield Finding(path, 0, "missing_unit", detail)

    def tell(self, queue: AnyConsumeQueue, number: int, kind: str, detail: str) -> Iterator[Finding]:
        """Note a wrong unit; consecutive units of one file become one finding, which is yielded after the last."""
        if self._run is not None:
            finding, first, last = self._run
            if finding.kind == kind and last + 1 == number and number % queue.units_per_file:
                self._run = finding, first, number
                return
        yield from self.end_run()
        mapped_file = queue.files.find(number * queue.unit_size)
        assert mapped_file is not None
        pos = number * queue.unit_size - mapped_file.file_from_offset
        self._run = Finding(mapped_file.path, pos, kind, detail), number, number

    def end_run(self) -> Iterator[Finding]:
        """Yield the finding of the last wrong units; call this where `finish` is not called."""
        if self._run is not None:
            finding, first, last = self._run
            self._run = None
            if last > first:
                num = last - first + 1
                detail = f"units {first} to {last}, {num} in a row; {finding.detail}"
                finding = dataclasses.replace(finding, detail=detail, num=num)
            yield finding

    def missing(self, queue_offset: int, phy_offset: int, num: int) -> Iterator[Finding]:
        """Note `num` records without a unit: the first one is a finding, the rest is counted; see `missing_queue` too."""
        self.missing_num += num
        if self.queue is None:
            self._first_missing = self._first_missing or (queue_offset, phy_offset)
        elif self.missing_num == num:
            detail = f"{self.topic}/{self.queue_id} has no unit {queue_offset} for the record at phy offset {phy_offset}"
            yield Finding(self.queue.files.path, 0, "missing_unit", detail)

    def finish(self) -> Iterator[Finding]:
        """Check what no record needs: the files, bytes after the end, units that point to no record."""
        yield from self.files()
        if self.problems:
            return
        yield from self.end_run()
        queue = self.queue
        if queue is None:
            return
        if self.missing_num > 1:
            detail = f"{self.topic}/{self.queue_id} lacks {self.missing_num} units in all"
            yield Finding(queue.files.path, 0, "missing_unit", detail)
        first = queue.first_unit_at_or_after(self.compared.commit_log.min_offset)
        end = queue.files.wrote_where
        for mapped_file, pos, size in queue.files.written_after(end):
            detail = f"unit {end // queue.unit_size} was never written, but {size} bytes from it on are not zero"
            yield Finding(mapped_file.path, pos, "gap_in_queue", detail)
        if queue.unit_num - first > self.covered:
            yield from self._dangling(queue, first)
            yield from self.end_run()

    def _dangling(self, queue: AnyConsumeQueue, first: int) -> Iterator[Finding]:
        # There are more units than records.
        by_base, reached = isinstance(queue, BatchConsumeQueue), -1
        for number in queue.numbers(first) if isinstance(queue, BatchConsumeQueue) else range(first, queue.unit_num):
            unit = queue.unit_of(number) if isinstance(queue, BatchConsumeQueue) else queue.unit(number)
            if unit is None or self.compared.is_unread(unit.phy_offset, unit.phy_offset + 1):
                continue
            message = self.compared.commit_log.look_up(unit.phy_offset, unit.size)
            own = self.topic, self.queue_id, unit.queue_offset
            points = f"where no record of {self.topic}/{self.queue_id} lies"
            if message is not None and (message.topic, message.queue_id, message.queue_offset) == own:
                if not by_base or unit.phy_offset > reached:
                    reached = unit.phy_offset
                    continue
                points = "that another unit leads to"
            elif message is not None and not by_base and names_further_queue(message, self.topic, number):
                continue
            detail = f"unit {number} says {unit.phy_offset}:{unit.size}, {points}"
            yield from self.tell(queue, number, "dangling_unit", detail)

    def files(self) -> Iterator[Finding]:
        """Report problems of the files as a whole, once; they come before the findings that follow from them."""
        if not self._files_told:
            self._files_told = True
            yield from self.problems
            for files in () if self.queue is None else self.queue.file_lists():
                for problem in files.problems:
                    yield finding_of(problem, "file", files.path)


def _said(queue: ConsumeQueue, code: int) -> str:
    # A tags code as the unit has it, with the entry of the extension that it points to.
    if queue.ext is None or code > EXT_ADDRESS_MAX:
        return str(code)
    entry = queue.ext.get(code)
    said = "nothing" if entry is None else f"tags code {entry[0]} and store time {entry[1]}"
    return f"{code} ({said} at {code - EXT_ADDRESS_BASE} of the extension)"
