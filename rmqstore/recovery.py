"""Recovery: what happens between opening a store for writing and its first use.

`recover` reads as the description of it: judge the log, decide where it ends, cut what a crash left behind, bring the
queues and the index into line with the log by dispatching what they lack.  It owns these decisions and the report on
them.  Invariants:

- Nothing is changed on disk before the whole scanned part of the log was judged: a store that is refused is untouched.
- A segment that holds a whole record of this log is never deleted unless `recovery="truncate"` asked for it.
- The newest index file survives: it is cut at its last consistent entry and dispatched from there on (RocketMQ 5.5.0
  deletes it after every unclean exit).
- A gap in a queue is filled from the log, going back to the oldest segment if need be, never papered over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rmqstore import _core
from rmqstore._core import RecordColumns, Verdict
from rmqstore.checkpoint import Checkpoint
from rmqstore.commit_log import CommitLog
from rmqstore.consume_queue import BatchConsumeQueue, ConsumeQueue
from rmqstore.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.dispatcher import CommitLogDispatcher, DispatchCounts, IndexProgress, QueueGapError
from rmqstore.errors import CorruptionError
from rmqstore.index_file import IndexFile
from rmqstore.index_service import IndexService

__all__ = ["RECOVERY_MODES", "RecoveryReport", "recover"]

logger = logging.getLogger(__name__)

RECOVERY_MODES = ("strict", "truncate", "skip")


@dataclass(slots=True)
class RecoveryReport:
    """What opening did.  Offsets and sizes in bytes of the commit log.

    Attributes
    ----------
    clean : bool
        The last user closed the store in order (there was no ``abort`` file).
    began_at, end : int
        The scanned part of the log; `end` is where the log goes on.
    records : int
        Records scanned and compared with queues and index.
    damage : list of (int, int, str)
        Stretches of the log that could not be read and were left as they are: offset, size, verdict.
    bytes_cut, segments_deleted : int
        What lay behind the end, and the files that held nothing else.
    units_cut, units_written, units_mended : int
        Queue units that pointed behind the end, that were missing, that said something else than the log.
    index_entries_cut, index_entries_written : int
    seconds : float
    """

    clean: bool = True
    began_at: int = 0
    end: int = 0
    records: int = 0
    damage: list[tuple[int, int, str]] = field(default_factory=list)
    bytes_cut: int = 0
    segments_deleted: int = 0
    units_cut: int = 0
    units_written: int = 0
    units_mended: int = 0
    index_entries_cut: int = 0
    index_entries_written: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        text = (
            f"{'clean' if self.clean else 'unclean'} exit before; scanned {self.records} records from {self.began_at} to "
            f"{self.end} in {self.seconds:.3f} s; cut {self.bytes_cut} bytes, {self.units_cut} units, "
            f"{self.index_entries_cut} index entries; wrote {self.units_written} units and "
            f"{self.index_entries_written} index entries, mended {self.units_mended} units"
        )
        return text + (f"; {len(self.damage)} damaged stretches left in place" if self.damage else "")


@dataclass(slots=True)
class _Judgement:
    """The scanned part of the log: whole stretches, what lies between, and where it ends."""

    begin: int
    end: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    damage: list[tuple[int, int, str]] = field(default_factory=list)
    last_record: int = -1
    last_timestamp: int = 0


def recover(
    commit_log: CommitLog,
    queues: ConsumeQueueStore,
    index_service: IndexService | None,
    checkpoint: Checkpoint,
    *,
    clean: bool,
    mode: str = "strict",
    before_writing: Callable[[], None] = lambda: None,
) -> RecoveryReport:
    """Bring a loaded store into a state in which it may be written.

    Parameters
    ----------
    clean : bool
        The last user closed it in order.
    mode : {"strict", "truncate", "skip"}
        What to do where the log is damaged in front of whole records: refuse; cut the log there, as RocketMQ does,
        which deletes everything behind; keep everything and go on behind it.
    before_writing : callable
        Called once after the log was judged and before the first change on disk.

    Raises
    ------
    CorruptionError
        The log is damaged in the middle and the mode is "strict"; nothing was changed.
    """
    started = time.perf_counter()
    report = RecoveryReport(clean=clean)
    newest_unit_end = max((_end_of_last_unit(queue) for queue in queues), default=-1)
    begin = _where_to_begin(commit_log, index_service, checkpoint, newest_unit_end, clean)
    judged = _judge(commit_log, begin, newest_unit_end, clean, mode)
    before_writing()

    report.began_at, report.end, report.damage = judged.begin, judged.end, judged.damage
    report.bytes_cut, report.segments_deleted = _cut_log(commit_log, judged.end)
    for queue in queues:
        queue.tidy()
        report.units_cut += queue.cut(judged.end)
        if not clean and isinstance(queue, ConsumeQueue):
            report.units_cut += queue.cut_unresolved()
        if not clean and isinstance(queue, BatchConsumeQueue):
            # Batch units are found by what stands in them, so they are of use only up to the first odd one.
            consistent = queue.consistent_num()
            if consistent < queue.unit_num:
                report.units_cut += queue.truncate(consistent)
    progress = IndexProgress()
    if index_service is not None:
        report.index_entries_cut = _cut_index(commit_log, index_service, checkpoint, judged.end, clean)
        progress = IndexProgress.of(index_service)

    counts = _dispatch(commit_log, queues, index_service, judged, progress, mend=not clean)
    report.records = counts.records
    report.units_written, report.units_mended = counts.units, counts.units_mended
    report.index_entries_written = counts.index_entries
    report.damage += counts.misplaced
    checkpoint.confirm_phy_offset = max(judged.last_record, 0)
    report.seconds = time.perf_counter() - started
    if not clean or report.bytes_cut or report.units_written or report.index_entries_written:
        logger.info("recovered %s: %s", commit_log.path, report)
    return report


def _end_of_last_unit(queue: AnyConsumeQueue) -> int:
    unit = queue.last_record()
    return -1 if unit is None else unit.phy_offset + unit.size


def _where_to_begin(
    commit_log: CommitLog,
    index_service: IndexService | None,
    checkpoint: Checkpoint,
    newest_unit_end: int,
    clean: bool,
) -> int:
    # After an orderly exit everything up to the newest unit is as it should be.  After a crash everything stored before
    # the checkpoint's time is on disk.  In both cases all segments are looked at, where RocketMQ 5.5.0 stops after ten.
    bases = commit_log.queue.offsets
    if not bases:
        return 0
    begin = bases[0]
    for base in reversed(bases):
        verdict, _, timestamp = _core.check_record(commit_log.queue.file(base).region, 0, base, commit_log.crc_check)
        if verdict != Verdict.RECORD or timestamp == 0:
            continue
        if base < newest_unit_end if clean else timestamp <= checkpoint.min_timestamp:
            begin = base
            break
    if clean and index_service is not None and not index_service.names:
        # The index was lost; RocketMQ would begin a new one and never find the older keys.
        begin = bases[0]
    if not clean and index_service is not None:
        # What the index lacks is dispatched again from the log, however far back that is.
        kept = _kept_end(index_service, checkpoint, clean)
        base = max(kept, bases[0]) // commit_log.segment_size * commit_log.segment_size
        begin = min(begin, base if base in bases else bases[0])
    return begin


def _judge(commit_log: CommitLog, begin: int, newest_unit_end: int, clean: bool, mode: str) -> _Judgement:
    """Walk the log from `begin`, CRCs included, and decide where it ends; nothing is changed."""
    judged = _Judgement(begin, begin)
    at = start = begin
    queue = commit_log.queue
    # Whether the place where the log ends was looked at; it was not where simply no further segment exists.
    decided = True
    while (mapped_file := queue.find(at)) is not None:
        base, region = mapped_file.file_from_offset, mapped_file.region
        pos, verdict, _, last = _core.walk(region, at - base, region.size, base, commit_log.crc_check)
        if last >= 0:
            judged.last_record = base + last
            judged.last_timestamp = _core.check_record(region, last, base, 0)[2]
        at = base + pos
        if verdict == Verdict.BLANK and base + region.size not in queue.offsets:
            # RocketMQ would stand on the blank; behind it is the same place for the next record.
            at = base + region.size
            decided = False
            break
        if verdict in (Verdict.BLANK, Verdict.LIMIT):
            at = base + region.size
            continue
        following = _whole_record_behind(commit_log, at)
        if following < 0 and not _known_behind(commit_log, at, newest_unit_end, clean):
            break
        if following >= 0 and not _belongs(commit_log, following, judged, newest_unit_end):
            break
        where = f"{at - base} bytes into {mapped_file.path}"
        behind = (
            f"whole records follow from phy offset {following}, in a log of {len(queue)} segments"
            if following >= 0
            else "queue units or later segments say that the log goes on there"
        )
        if mode == "strict":
            raise CorruptionError(
                f"the commit log is damaged at phy offset {at} ({verdict.name}), and {behind}; nothing was changed. "
                'Open it read-only to get out what is whole, with recovery="skip" to go on behind the damage, or with '
                'recovery="truncate" to cut the log there as RocketMQ does, which deletes everything behind',
                mapped_file.path,
                at - base,
            )
        if mode == "truncate" or following < 0:
            logger.warning("the commit log is cut at phy offset %d, %s (%s)", at, where, behind)
            break
        logger.warning("left %d damaged bytes in place at phy offset %d, %s", following - at, at, where)
        judged.ranges.append((start, at))
        judged.damage.append((at, following - at, verdict.name))
        at = start = following
    else:
        decided = False
    if not decided and clean and newest_unit_end > at and mode == "strict":
        raise CorruptionError(
            f"the commit log ends at phy offset {at}, but the queues of this store, which was closed in order, go on to "
            f"{newest_unit_end}: its newest segments are missing or empty; nothing was changed. Restore them, open it read-only "
            'to get out what is there, or with recovery="truncate" to cut the queues',
            queue.path,
        )
    judged.ranges.append((start, at))
    judged.end = at
    return judged


def _whole_record_behind(commit_log: CommitLog, at: int) -> int:
    # The first whole record behind the damage, in this segment or a later one; -1 if there is none.
    for base in commit_log.queue.offsets:
        if base + commit_log.segment_size <= at:
            continue
        mapped_file = commit_log.queue.file(base)
        pos = max(at + 1 - base, 0)
        found = _core.find_record(mapped_file.region, pos, base, mapped_file.last_nonzero(pos), commit_log.crc_check)
        if found >= 0:
            return base + found
    return -1


def _known_behind(commit_log: CommitLog, at: int, newest_unit_end: int, clean: bool) -> bool:
    # Without a whole record behind it the end is a torn write, unless an orderly exit left units that point further, or
    # a later segment holds something.
    if clean and newest_unit_end > at:
        return True
    for base in commit_log.queue.offsets:
        if base > at:
            if commit_log.queue.file(base).last_nonzero() > 0:
                return True
    return False


def _belongs(commit_log: CommitLog, offset: int, judged: _Judgement, newest_unit_end: int) -> bool:
    # RocketMQ's truncation leaves old records behind the end (its issue 10666).  They are older than the last record of
    # the log and no unit points at them; whatever else is found there is part of this log.
    if newest_unit_end > offset:
        return True
    return commit_log_timestamp(commit_log, offset) >= judged.last_timestamp


def commit_log_timestamp(commit_log: CommitLog, offset: int) -> int:
    """int: store timestamp of the record at `offset`, also behind the end that is known so far; -1 if there is none."""
    mapped_file = commit_log.queue.find(offset)
    if mapped_file is None:
        return -1
    base = mapped_file.file_from_offset
    verdict, _, timestamp = _core.check_record(mapped_file.region, offset - base, base, 0)
    return timestamp if verdict == Verdict.RECORD else -1


def _cut_log(commit_log: CommitLog, end: int) -> tuple[int, int]:
    queue = commit_log.queue
    queue.tidy()
    bytes_cut = 0
    mapped_file = queue.find(end)
    if mapped_file is not None:
        bytes_cut = mapped_file.last_nonzero(end - mapped_file.file_from_offset) - (end - mapped_file.file_from_offset)
    queue.wrote_where = max(end, queue.wrote_where)
    deleted = queue.truncate(end)
    queue.wrote_where = end
    return bytes_cut, deleted


def _where_to_cut(index_service: IndexService, checkpoint: Checkpoint, end: int, clean: bool) -> tuple[int, int] | None:
    """The number of the index file to keep up to which count, all newer ones to go; None if all are as they should be.

    A file that became full has been flushed, and the checkpoint says so.  All others may lack pages after a crash: the
    oldest of them that does is where the index ends, as entries follow the order of the log.
    """
    names = index_service.names
    first = len(names)
    for number in range(len(names) - 1, -1, -1):
        index = index_service.file(names[number])
        header = index.header
        there = min(header.index_count, index.index_num)
        newest = number == len(names) - 1
        agrees = there == header.index_count and (there <= 1 or index.read_entry(there - 1)[1] == header.end_phy_offset)
        whole = agrees and (newest or there == index.index_num) and (there <= 1 or header.end_phy_offset < end)
        flushed = not newest and header.end_timestamp <= checkpoint.index_msg_timestamp
        if whole and (clean or flushed):
            break
        first = number
    for number in range(first, len(names)):
        index = index_service.file(names[number])
        before = index_service.file(names[number - 1]) if number else None
        begin = 0 if before is None else before.read_entry(min(before.index_count, before.index_num) - 1)[1]
        count = index.consistent_count(end, begin)
        newest = number == len(names) - 1
        if count < (index.index_count if newest else index.index_num) or (not newest and count <= 1):
            return number, count
    # Slots and chains of files that may lack pages are set right even if every entry is there.
    return (len(names) - 1, index_service.file(names[-1]).index_count) if first < len(names) else None


def _kept_end(index_service: IndexService, checkpoint: Checkpoint, clean: bool) -> int:
    # phy offset of the last entry that a cut will leave, -1 if none.
    cut = _where_to_cut(index_service, checkpoint, 2**63 - 1, clean)
    number, count = (len(index_service.names) - 1, None) if cut is None else cut
    while number >= 0:
        index = index_service.file(index_service.names[number])
        count = min(index.index_count, index.index_num) if count is None else count
        if count > 1:
            return int(index.read_entry(count - 1)[1])
        number, count = number - 1, None
    return -1


def _cut_index(
    commit_log: CommitLog, index_service: IndexService, checkpoint: Checkpoint, end: int, clean: bool
) -> int:
    """Cut the index at the last consistent entry; the number of entries dropped."""
    cut = _where_to_cut(index_service, checkpoint, end, clean)
    if cut is None:
        return 0
    number, count = cut
    names = index_service.names
    dropped = 0
    for name in reversed(names[number + 1 :]):
        index = index_service.file(name)
        dropped += max(min(index.index_count, index.index_num) - 1, 0)
        index_service.remove(name)
    for position in range(number, -1, -1):
        index = index_service.file(names[position])
        there = min(index.index_count, index.index_num)
        keep = count if position == number else there
        if position < number and index.header.end_timestamp <= checkpoint.index_msg_timestamp:
            break
        dropped += there - keep
        index.relink(keep)
        _mend_header(commit_log, index_service, index, keep)
        if position == number and keep <= 1 and number:
            index_service.remove(names[number])
    return dropped


def _mend_header(commit_log: CommitLog, index_service: IndexService, index: IndexFile, count: int) -> None:
    begin, end_time, begin_phy, end_phy, slots, stored = index.read_header()
    if count > 1:
        begin_phy, end_phy = index.read_entry(1)[1], index.read_entry(count - 1)[1]
        first, last = commit_log_timestamp(commit_log, begin_phy), commit_log_timestamp(commit_log, end_phy)
        begin = first if first >= 0 else begin
        end_time = last if last >= 0 else end_time
    elif index.name == index_service.names[0]:
        begin = end_time = begin_phy = end_phy = 0
    mended = (begin, end_time, begin_phy, end_phy, slots, stored)
    if mended != index.read_header():
        index.write_header(*mended)


def _dispatch(
    commit_log: CommitLog,
    queues: ConsumeQueueStore,
    index_service: IndexService | None,
    judged: _Judgement,
    progress: IndexProgress,
    *,
    mend: bool,
) -> DispatchCounts:
    columns = RecordColumns()
    dispatcher = CommitLogDispatcher(commit_log, queues, index_service)
    oldest = commit_log.min_offset
    ranges = judged.ranges
    whole = judged.begin <= oldest
    while True:
        try:
            for begin, end in ranges:
                for _, _ in commit_log.scan_columns(begin, end, columns, check_crc=False):
                    # Entries are put once: what the first pass put is below the progress of a second.
                    dispatcher.dispatch_columns(columns, progress, allow_gaps=whole, mend=mend)
            return dispatcher.counts
        except QueueGapError as gap:
            logger.warning("%s; dispatching the whole log again", gap)
            if index_service is not None:
                progress = IndexProgress.of(index_service)
            ranges = _whole_ranges(commit_log, judged)
            whole = True


def _whole_ranges(commit_log: CommitLog, judged: _Judgement) -> list[tuple[int, int]]:
    # From the oldest record to the judged part, as far as it can be read, then the judged part.
    ranges: list[tuple[int, int]] = []
    at = commit_log.min_offset
    while at < judged.begin:
        mapped_file = commit_log.queue.find(at)
        if mapped_file is None:
            break
        base, region = mapped_file.file_from_offset, mapped_file.region
        pos, verdict, _, _ = _core.walk(region, at - base, region.size, base, commit_log.crc_check)
        if pos > at - base:
            ranges.append((at, base + pos))
        if verdict in (Verdict.BLANK, Verdict.LIMIT):
            at = base + region.size
        else:
            found = _core.find_record(region, pos + 1, base) if pos + 1 < region.size else -1
            at = base + found if found >= 0 else base + region.size
    return ranges + judged.ranges
