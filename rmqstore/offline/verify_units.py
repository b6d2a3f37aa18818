"""What is wrong in one queue's files, compared with the records of a log in their order, as findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rmqstore import _numpy as np
from rmqstore._core import EXT_ADDRESS_BASE, EXT_ADDRESS_MAX
from rmqstore._dispatch import RecordColumns
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import Finding, StoreError, finding_of
from rmqstore.files.open_file import why_unreadable
from rmqstore.files.os_errors import is_unreadable
from rmqstore.message import SCHEDULE_TOPIC, MessageExt
from rmqstore.offline.compared import Compared, unread_file
from rmqstore.store.dispatch_rules import QueueLife, life_of, names_further_queue

_NOT_COMPARED = "the queue is not compared with the log"


@dataclass
class _Run:
    # Units of one file that are wrong in the same way, from the unit `first` to `last`; `detail` is about the first.
    path: str
    pos: int
    kind: str
    detail: str
    first: int
    last: int


class QueueCheck:
    """Compares the units of one queue with the records as they come."""

    def __init__(self, compared: Compared, topic: str, queue_id: int):
        self.compared = compared
        self.topic, self.queue_id = topic, queue_id
        # None where there is none, or none that can be read; then `problem` says why.
        self.queue: AnyConsumeQueue | None = None
        self.problem: Finding | None = None
        self.units: _SimpleUnits | _BatchUnits | None = None
        # How many of its units belong to a record that was seen.
        self.covered = 0
        # Records that were seen of a topic, or of a queue of this name, that was deleted; phy offset of the last of them whose
        # queue began again, -1 for none.
        self.gone, self.deleted_after = 0, -1
        self.missing_reported = 0
        # Of a queue that is not there: the queue offset and the phy offset of the first record that needs it.
        self._first_missing: tuple[int, int] | None = None
        self._life: QueueLife | None = None
        self._asked_life = False
        self._files_told = False
        self._run: _Run | None = None
        self._further_problems: list[Finding] = []
        try:
            self.queue = compared.queues.find(topic, queue_id)
        except (StoreError, OSError) as error:
            self.problem = finding_of(error, "file", compared.root)
            if is_unreadable(error):
                # The folder was reported, once for all queues that may be in it.
                self._files_told = self.problem.path in compared.queues.unseen
                self.problem = unread_file(self.problem.path, error, _NOT_COMPARED)
            return
        if self.queue is not None:
            self.units = _UNITS[self.queue.kind](self, self.queue)
        unread = list(self._unread_files())
        if unread:
            self.problem, *self._further_problems = unread

    def _unread_files(self) -> Iterator[Finding]:
        for files in () if self.queue is None else self.queue.file_lists():
            for base in files.offsets:
                path = files.file(base).path
                error = why_unreadable(path)
                if error is not None:
                    yield unread_file(path, error, _NOT_COMPARED)

    def records(self, columns: RecordColumns, rows: np.ndarray) -> Iterator[Finding]:
        """Compare the units of the records in `rows`, an array of int64 with rows of `columns`."""
        if self.problem is not None:
            return
        if self.queue is None or self.units is None:
            yield from self.missing(int(columns.queue_offset[rows[0]]), int(columns.phy_offset[rows[0]]), len(rows))
            return
        if self.queue.agrees(columns, rows):
            self.covered += len(rows)
            return
        rows = self._of_this_life(columns, rows, self.units.queue_offsets(columns))
        if len(rows):
            yield from self.units.compare(columns, rows)

    def _of_this_life(self, columns: RecordColumns, rows: np.ndarray, queue_offsets: np.ndarray) -> np.ndarray:
        # The rows without the records of a queue of this name that was deleted.
        queue = self.queue
        assert queue is not None
        if not self._asked_life:
            self._asked_life = True
            first = queue.first_record()
            if first is not None:
                place = first.queue_offset, first.phy_offset
                key = self.topic, self.queue_id
                is_built = self.compared.is_built
                self._life = QueueLife(*place) if is_built else life_of(self.compared.commit_log, *key, *place)
        if self._life is None:
            return rows
        phy_offsets = columns.phy_offset[rows]
        earlier = self._life.earlier(queue_offsets[rows], phy_offsets)
        if earlier.any():
            self.gone += int(earlier.sum())
            self.deleted_after = int(phy_offsets[earlier].max())
        of_this: np.ndarray = rows[~earlier]
        return of_this

    def missing_queue(self, deleted_after: int = -1) -> Iterator[Finding]:
        """The queue, if it is not there and records need it that are not of a topic deleted after this phy offset."""
        if self._first_missing is None or self.problem is not None:
            return
        queue_offset, phy_offset = self._first_missing
        if phy_offset <= deleted_after:
            self.gone += self.missing_reported
            return
        yield Finding(
            os.path.join(self.compared.root, "consumequeue", self.topic, str(self.queue_id)),
            0,
            "missing_unit",
            f"{self.topic}/{self.queue_id} has no unit {queue_offset} for the record at phy offset {phy_offset}: the topic was "
            f"deleted, or its queue is lost; it lacks {self.missing_reported} units in all",
        )

    def tell(self, queue: AnyConsumeQueue, number: int, kind: str, detail: str) -> Iterator[Finding]:
        """Note a wrong unit: units of one file that follow each other are one finding, which comes after the last."""
        run = self._run
        if run is not None and run.kind == kind and run.last + 1 == number and number % queue.units_per_file:
            run.last = number
            return
        yield from self.end_run()
        mapped_file = queue.files.find(number * queue.unit_size)
        assert mapped_file is not None
        pos = number * queue.unit_size - mapped_file.file_from_offset
        self._run = _Run(mapped_file.path, pos, kind, detail, number, number)

    def end_run(self) -> Iterator[Finding]:
        """The units that were found wrong last, if they were not told yet; call this where `finish` is not called."""
        run, self._run = self._run, None
        if run is not None:
            num = run.last - run.first + 1
            detail = run.detail if num == 1 else f"units {run.first} to {run.last}, {num} in a row; {run.detail}"
            yield Finding(run.path, run.pos, run.kind, detail, num=num)

    def missing(self, queue_offset: int, phy_offset: int, num: int) -> Iterator[Finding]:
        """Note `num` records without a unit: the first one is a finding, the rest is counted; see `missing_queue` too."""
        self.missing_reported += num
        if self.queue is None:
            self._first_missing = self._first_missing or (queue_offset, phy_offset)
        elif self.missing_reported == num:
            yield Finding(
                self.queue.files.path,
                0,
                "missing_unit",
                f"{self.topic}/{self.queue_id} has no unit {queue_offset} for the record at phy offset {phy_offset}",
            )

    def finish(self) -> Iterator[Finding]:
        """What no record told: its files, bytes after its end, units that lead nowhere."""
        yield from self.files()
        if self.problem is not None:
            return
        yield from self.end_run()
        queue, units = self.queue, self.units
        if queue is None or units is None:
            return
        if self.missing_reported > 1:
            yield Finding(
                queue.files.path,
                0,
                "missing_unit",
                f"{self.topic}/{self.queue_id} lacks {self.missing_reported} units in all",
            )
        first = queue.first_unit_at_or_after(self.compared.commit_log.min_offset)
        yield from self._tail(queue)
        if queue.unit_num - first > self.covered:
            # More units than records: find the ones that lead nowhere.
            for number, unit, lies in units.dangling(first):
                detail = f"unit {number} says {unit.phy_offset}:{unit.size}, {lies}"
                yield from self.tell(queue, number, "dangling_unit", detail)
            yield from self.end_run()

    def record_of(self, unit: Unit) -> MessageExt | None:
        """The record that a unit leads to, None where none begins."""
        return self.compared.commit_log.look_up(unit.phy_offset, unit.size)

    def is_unread(self, unit: Unit) -> bool:
        """Return whether a unit leads to a segment that cannot be read."""
        return self.compared.is_unread(unit.phy_offset, unit.phy_offset + 1)

    def is_own(self, message: MessageExt, queue_offset: int) -> bool:
        """Return whether a message is of this queue, at this queue offset."""
        own = self.topic, self.queue_id, queue_offset
        return (message.topic, message.queue_id, message.queue_offset) == own

    def files(self) -> Iterator[Finding]:
        """What is wrong with its files as a whole, once: it comes before what follows from it."""
        if self._files_told:
            return
        self._files_told = True
        if self.problem is not None:
            yield self.problem
            yield from self._further_problems
        for files in () if self.queue is None else self.queue.file_lists():
            for problem in files.problems:
                yield finding_of(problem, "file", files.path)

    def _tail(self, queue: AnyConsumeQueue) -> Iterator[Finding]:
        end = queue.files.wrote_where
        for mapped_file, pos, size in queue.files.written_after(end):
            yield Finding(
                mapped_file.path,
                pos,
                "gap_in_queue",
                f"unit {end // queue.unit_size} was never written, but {size} bytes from it on are not zero",
            )


# ------------------------------------------------------------------------------------------------------ units of one kind


# Both have the queue offsets of records as their kind of queue has them, the comparison of units with records, and the units
# from a number on that point to no record of the queue (number, unit, where it points).


class _SimpleUnits:
    by_base = False

    def __init__(self, check: QueueCheck, queue: ConsumeQueue):
        self.check, self.queue = check, queue

    def queue_offsets(self, columns: RecordColumns) -> np.ndarray:
        return columns.queue_offset

    def compare(self, columns: RecordColumns, rows: np.ndarray) -> Iterator[Finding]:
        check, queue = self.check, self.queue
        offsets = columns.queue_offset[rows]
        phy_offsets, sizes, tags = columns.phy_offset[rows], columns.size[rows], columns.tags_code[rows]
        checks_tags = not (check.topic == SCHEDULE_TOPIC and "message_delay_level" in check.compared.config.assumed)
        # A run of queue offsets that go on by one is compared at once.
        ends = [*(np.flatnonzero(np.diff(offsets) != 1) + 1).tolist(), len(rows)]
        done = 0
        while done < len(rows):
            first = int(offsets[done])
            while ends[0] <= done:
                del ends[0]
            run = ends[0]
            phy, size, code = (
                queue.units(first, run - done) if first >= queue.first_unit else queue.units(queue.unit_num, 0)
            )
            count = len(phy)
            if not count:
                yield from check.missing(first, int(phy_offsets[done]), 1)
                done += 1
                continue
            part = slice(done, done + count)
            differ = (phy != phy_offsets[part]) | (size != sizes[part])
            if checks_tags:
                differ[queue.differing_tags(first, columns, rows[part])] = True
            check.covered += count
            for i in np.flatnonzero(differ).tolist():
                yield from check.tell(
                    queue,
                    first + i,
                    "bad_unit",
                    f"unit {first + i} is {int(phy[i])}:{int(size[i])}:{_said(queue, int(code[i]))}, the record at "
                    f"phy offset {int(phy_offsets[done + i])} "
                    f"needs {int(phy_offsets[done + i])}:{int(sizes[done + i])}:"
                    f"{_needed(queue, int(tags[done + i]), int(columns.store_timestamp[rows[done + i]]))}",
                )
            done += count

    def dangling(self, first: int) -> Iterator[tuple[int, Unit, str]]:
        check = self.check
        for number in range(first, self.queue.unit_num):
            unit = self.queue.unit(number)
            if unit is None or check.is_unread(unit):
                continue
            message = check.record_of(unit)
            if message is None or not (
                check.is_own(message, number) or names_further_queue(message, check.topic, number)
            ):
                yield number, unit, f"where no record of {check.topic}/{check.queue_id} lies"


class _BatchUnits:
    by_base = True

    def __init__(self, check: QueueCheck, queue: BatchConsumeQueue):
        self.check, self.queue = check, queue

    def queue_offsets(self, columns: RecordColumns) -> np.ndarray:
        return columns.inner_base

    def compare(self, columns: RecordColumns, rows: np.ndarray) -> Iterator[Finding]:
        check, queue = self.check, self.queue
        for row in rows.tolist():
            base, phy, size = int(columns.inner_base[row]), int(columns.phy_offset[row]), int(columns.size[row])
            unit = queue.unit(base)
            if unit is None:
                yield from check.missing(base, phy, 1)
                continue
            check.covered += 1
            expected = (base, phy, size, int(columns.tags_code[row]), max(int(columns.inner_num[row]), 1))
            time, needed = queue.store_timestamp(base), int(columns.store_timestamp[row])
            if tuple(unit) != expected or time != needed:
                yield Finding(
                    queue.files.path,
                    0,
                    "bad_unit",
                    f"the unit of batch {base} is {(*unit, time)}, the record needs {(*expected, needed)}",
                )

    def dangling(self, first: int) -> Iterator[tuple[int, Unit, str]]:
        # Each batch was looked for in `compare`; these are the units that no batch needs.
        check, reached = self.check, -1
        for number in self.queue.numbers(first):
            unit = self.queue.unit_of(number)
            if check.is_unread(unit):
                continue
            message = check.record_of(unit)
            own = message is not None and check.is_own(message, unit.queue_offset)
            if own and unit.phy_offset > reached:
                reached = unit.phy_offset
                continue
            lies = "that another unit leads to" if own else f"where no record of {check.topic}/{check.queue_id} lies"
            yield number, unit, lies


_UNITS: dict[str, Any] = {ConsumeQueue.kind: _SimpleUnits, BatchConsumeQueue.kind: _BatchUnits}


def _said(queue: ConsumeQueue, code: int) -> str:
    # What stands in a unit as its tags code, with what it leads to in the extension.
    if queue.ext is None or code > EXT_ADDRESS_MAX:
        return str(code)
    entry = queue.ext.get(code)
    said = "nothing" if entry is None else f"tags code {entry[0]} and store time {entry[1]}"
    return f"{code} ({said} at {code - EXT_ADDRESS_BASE} of the extension)"


def _needed(queue: ConsumeQueue, tags_code: int, store_timestamp: int) -> str:
    if queue.ext is None:
        return str(tags_code)
    return f"{tags_code} (tags code {tags_code} and store time {store_timestamp})"
