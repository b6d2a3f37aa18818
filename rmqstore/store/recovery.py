"""Recovery: what happens between opening a store for writing and its first use.

`recover` reads as the description of it: judge the log and decide where it ends, cut what a crash left behind, bring the
queues and the index into line with the log by dispatching what they lack.  It owns these decisions and the report on
them; what is sound in the index is `index_survey`'s.  Invariants:

- Nothing is changed on disk before the whole scanned part of the log was judged: a store that is refused is untouched.
- A segment that holds a whole record of this log is never deleted unless `recovery="truncate"` asked for it.
- The newest index file survives: it is cut at its last consistent entry and dispatched from there on (RocketMQ 5.5.0
  deletes it after every unclean exit).
- A gap in a queue is filled from the log, going back to the oldest segment if need be, never papered over.

The log is read once where everything is as it should be: the queues are compared with it while it is judged, and only from
the first thing that they or the index lack on it is read again and dispatched.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from rmqstore import _core
from rmqstore._core import Verdict
from rmqstore.arguments import Recovery
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.log_walk import Stretch
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.consumequeue.plain_queue import PlainQueue
from rmqstore.consumequeue.unit_queue import UnitQueue
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.index.index_service import IndexService
from rmqstore.message import SCHEDULE_TOPIC
from rmqstore.remedies import ChooseRecovery, Sentence
from rmqstore.store.dispatcher import (
    Agreement,
    DispatchCounts,
    IndexProgress,
    LogDispatcher,
    QueueGapError,
    names_further_queue,
)
from rmqstore.store.index_survey import IndexSurvey
from rmqstore.store.lost_log import end_of_known, refuse_loss
from rmqstore.store.queue_lives import gone_text

__all__ = [
    "RECOVERY_MODES",
    "RecoveryReport",
    "claimed_by_queues",
    "dispatched_before_crash",
    "learn_delays",
    "look_at_queues",
    "recover",
]

logger = logging.getLogger(__name__)

RECOVERY_MODES = get_args(Recovery)

_FAR = 2**63 - 1
# A delay that is longer is none: ten years in ms.
_LONGEST_DELAY = 10 * 365 * 86_400_000
# An index with fewer entries is looked at in less time than it takes to start a thread and wait for it.
_WORTH_A_THREAD = 300_000


@dataclass(slots=True)
class RecoveryReport:
    """What opening did.  Offsets and sizes in bytes of the commit log.

    Attributes
    ----------
    mode : str
        "strict", "truncate" or "skip": what was to be done about damage in the middle of the log.
    clean : bool
        The last user closed the store in order (there was no ``abort`` file).
    began_at, end : int
        The scanned part of the log; `end` is where the log goes on.
    bytes_scanned, segments_scanned, records : int
        What was looked at between them, every record with its CRC, and compared with its queue.
    damage : list of (int, int, str)
        Stretches of the log that could not be read and were left as they are: offset, size, verdict.
    gone : dict of str to int
        By topic, the dispatched records that have no unit because their topic, or their queue of that name, was deleted.
    bytes_cut, segments_deleted : int
        What lay after the end, and the files that held nothing else.
    dispatched_from : int
        From where on queues and index may have lacked something, so that the records were dispatched; `end` if nothing.
    units_cut, units_written, units_mended : int
        Queue units that pointed after the end, that were missing, that said something else than the log.
    index_files_kept, index_files_deleted, index_entries_cut, index_entries_written : int
        Index files that were there and stayed, that went because none of their entries was sound, and entries.
    seconds : float
        How long it took.
    """

    mode: str = "strict"
    clean: bool = True
    began_at: int = 0
    end: int = 0
    bytes_scanned: int = 0
    segments_scanned: int = 0
    records: int = 0
    damage: list[tuple[int, int, str]] = field(default_factory=list)
    gone: dict[str, int] = field(default_factory=dict)
    bytes_cut: int = 0
    segments_deleted: int = 0
    dispatched_from: int = 0
    units_cut: int = 0
    units_written: int = 0
    units_mended: int = 0
    index_files_kept: int = 0
    index_files_deleted: int = 0
    index_entries_cut: int = 0
    index_entries_written: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """dict: every attribute under its name, fit for JSON; `damage` as objects with phy_offset, size and verdict."""
        values = dataclasses.asdict(self)
        values["damage"] = [
            {"phy_offset": offset, "size": size, "verdict": verdict} for offset, size, verdict in self.damage
        ]
        return values

    def __str__(self) -> str:
        text = (
            f"{'clean' if self.clean else 'unclean'} exit before; scanned {self.records} records from {self.began_at} to "
            f"{self.end} in {self.seconds:.3f} s; cut {self.bytes_cut} bytes, {self.units_cut} units, "
            f"{self.index_entries_cut} index entries; wrote {self.units_written} units and "
            f"{self.index_entries_written} index entries, repaired {self.units_mended} units"
        )
        return text + (f"; {len(self.damage)} damaged stretches left in place" if self.damage else "")


def recover(
    commit_log: CommitLog,
    queues: ConsumeQueueStore,
    index_service: IndexService | None,
    checkpoint: Checkpoint,
    *,
    clean: bool,
    mode: str = "strict",
    drop_units: int = 0,
    before_writing: Callable[[int], None] = lambda end: None,
) -> RecoveryReport:
    """Bring a loaded store into a state in which it may be written.

    Parameters
    ----------
    clean : bool
        The last user closed it in order.
    mode : {"strict", "truncate", "skip"}
        What to do where the log is damaged in front of whole records: refuse; cut the log there, as RocketMQ does,
        which deletes everything after it; keep everything and go on after it.
    drop_units : int
        How many queue units and index entries may go that lead outside the log, as of `lost_log.refuse_loss`.
    before_writing : callable
        Called once with the phy offset at which the log ends, after that was judged and before the first change on disk.

    Raises
    ------
    CorruptionError
        The log is damaged in the middle and the mode is "strict"; nothing was changed.
    LostLogError
        Other units and entries than `drop_units` lead outside the log; nothing was changed.
    """
    started = time.perf_counter()
    report = RecoveryReport(mode=mode, clean=clean)
    if "message_delay_level" in commit_log.config.assumed:
        learn_delays(commit_log, queues)
    (newest_unit_end, plain), index = _look_at_both(commit_log, queues, index_service, checkpoint, clean)
    begin = _where_to_begin(commit_log, index, checkpoint, newest_unit_end, clean)
    judged = _judge(
        commit_log, Agreement(commit_log, queues, plain), index, begin, newest_unit_end, checkpoint.log_end, clean, mode
    )
    if max(newest_unit_end, -1 if index is None else index.kept_end + 1) > judged.end:
        end = end_of_known(commit_log, judged.end, checkpoint, clean)
        kinds = ("consumequeue",) if index is None else ("consumequeue", "index")
        refuse_loss(commit_log, end, kinds, drop_units, replaced=False)
    before_writing(judged.end)

    report.began_at, report.end, report.damage = judged.begin, judged.end, judged.damage
    report.bytes_scanned = judged.end - judged.begin
    report.segments_scanned = len(
        range(judged.begin // commit_log.segment_size, -(-judged.end // commit_log.segment_size))
    )
    report.records = judged.records
    report.bytes_cut, report.segments_deleted = _cut_log(commit_log, judged.end)
    report.units_cut, lacks_older = _cut_queues(queues, plain, judged, clean, checkpoint, commit_log)
    if judged.agreement.was_cut():
        # What was compared is gone: there was something wrong further in front.
        judged.dispatch_from = judged.begin
    if index is not None:
        report.index_entries_cut, report.index_files_deleted = index.cut(judged.end)
        report.index_files_kept = len(index.index_service.names)

    report.dispatched_from = min(judged.dispatch_from, judged.end)
    counts = _dispatch(commit_log, queues, index_service, judged, repair=not clean, whole=lacks_older)
    report.units_written, report.units_mended = counts.units, counts.units_mended
    report.index_entries_written = counts.index_entries
    report.damage += counts.misplaced
    report.gone = counts.gone
    if counts.gone:
        logger.info("%s: %s", commit_log.path, gone_text(counts.gone))
    if judged.damage:
        _fill_holes(queues, judged.damage[0][0])
    queues.forget_empty_batch_queues()
    checkpoint.confirm_phy_offset = max(judged.last_record, 0)
    if report.bytes_cut or report.units_cut or report.index_entries_cut:
        _believe_no_more_than(commit_log, judged.last_record, checkpoint, index_service)
    if clean:
        # Otherwise all of them are going to be flushed.
        queues.set_aside(queues.config.max_mapped_files)
    report.seconds = time.perf_counter() - started
    if not clean or report.bytes_cut or report.units_written or report.index_entries_written:
        logger.info("recovered %s: %s", commit_log.path, report)
    return report


def _believe_no_more_than(
    commit_log: CommitLog, last_record: int, checkpoint: Checkpoint, index_service: IndexService | None
) -> None:
    # A time of the checkpoint that is later than the newest record's speaks for records that were cut: a recovery that
    # trusts it would begin too late.  An earlier one only makes it look at more.
    newest = max(commit_log.store_timestamp_at(last_record, behind_end=True), 0) if last_record >= 0 else 0
    checkpoint.physic_msg_timestamp = min(checkpoint.physic_msg_timestamp, newest)
    checkpoint.logics_msg_timestamp = min(checkpoint.logics_msg_timestamp, newest)
    # Of the index it speaks for files, which end later where the clock was set back.
    ends = (index.header.end_timestamp for index in index_service.files()) if index_service is not None else ()
    checkpoint.index_msg_timestamp = min(checkpoint.index_msg_timestamp, max(ends, default=newest))


def learn_delays(commit_log: CommitLog, queues: ConsumeQueueStore) -> None:
    """Take the delay of each level, in ms, from the units of delayed messages; for a config that only assumes the levels."""
    # A unit of a delayed message holds its delivery time, which must not be repaired by delay levels that nobody gave: what
    # the queue of each level says, by most of its first and last units, goes before the defaults.
    for topic, queue_id in queues.keys():
        if topic != SCHEDULE_TOPIC or not 0 <= queue_id < len(commit_log.delays):
            continue
        queue = queues.find(topic, queue_id)
        found: Counter[int] = Counter()
        if isinstance(queue, ConsumeQueue):
            low, high = queue.first_unit, queue.unit_num
            for queue_offset in {*range(low, min(low + 8, high)), *range(max(high - 8, low), high)}:
                unit = queue.unit(queue_offset)
                tags_code = None if unit is None else queue.tags_code(unit)
                if unit is None or tags_code is None:
                    continue
                stored = commit_log.store_timestamp_at(unit.phy_offset, behind_end=True)
                if stored >= 0 and 0 < tags_code - stored <= _LONGEST_DELAY:
                    found[tags_code - stored] += 1
        if found:
            commit_log.delays[queue_id] = found.most_common(1)[0][0]


def _end_of_last_unit(queue: AnyConsumeQueue) -> int:
    unit = queue.last_record()
    return -1 if unit is None else unit.phy_offset + unit.size


def _look_at_both(
    commit_log: CommitLog,
    queues: ConsumeQueueStore,
    index_service: IndexService | None,
    checkpoint: Checkpoint,
    clean: bool,
) -> tuple[tuple[int, dict[tuple[str, int], PlainQueue]], IndexSurvey | None]:
    """`look_at_queues`, and the survey of the index; both only read.  A large index is looked at in a thread of its own."""
    if index_service is None:
        return look_at_queues(queues), None
    if not _is_large(index_service):
        looked = look_at_queues(queues)
        return looked, IndexSurvey(commit_log, index_service, checkpoint, clean)
    # Imported here because most stores that are opened have less.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1, "rmqstore-survey") as thread:
        surveyed = thread.submit(IndexSurvey, commit_log, index_service, checkpoint, clean)
        return look_at_queues(queues), surveyed.result()


def _is_large(index_service: IndexService) -> bool:
    names = index_service.names
    if not names:
        return False
    try:
        newest = index_service.file(names[-1])
        return (len(names) - 1) * newest.index_num + newest.index_count >= _WORTH_A_THREAD
    except (StoreError, OSError):
        # The survey meets it again, in its turn.
        return False


# ------------------------------------------------------------------------------------------------------------ the log


def _where_to_begin(
    commit_log: CommitLog,
    index: IndexSurvey | None,
    checkpoint: Checkpoint,
    newest_unit_end: int,
    clean: bool,
) -> int:
    # After an orderly exit everything up to the newest unit is as it should be.  After a crash everything stored before
    # the checkpoint's time is on disk.  In both cases all segments are looked at, where RocketMQ 5.5.0 stops after ten.
    bases = commit_log.files.offsets
    if not bases:
        return 0
    if not clean and checkpoint.flushed_offset >= 0:
        # This package's own word on what is on disk, which a Java store between then and now would have made void.
        return _segment_of(
            commit_log, min(checkpoint.flushed_offset, _FAR if index is None else max(index.kept_end, 0))
        )
    begin = bases[0]
    for base in reversed(bases):
        verdict, _, timestamp = _core.check_record(commit_log.files.file(base).region, 0, base, commit_log.crc_check)
        if verdict != Verdict.RECORD or timestamp == 0:
            continue
        if base < newest_unit_end if clean else timestamp <= checkpoint.min_timestamp:
            begin = base
            break
    if not clean and checkpoint.logics_physical_offset > 0:
        # A clock that was set back makes records look older than a flush that came before them; offsets never go back.
        begin = min(begin, _segment_of(commit_log, checkpoint.logics_physical_offset))
    if index is not None and clean and not index.index_service.names:
        # The index was lost; RocketMQ would begin a new one and never find the older keys.
        begin = bases[0]
    if index is not None and not clean:
        # What the index lacks is dispatched again from the log, however far back that is.
        begin = min(begin, _segment_of(commit_log, index.kept_end))
    return begin


def dispatched_before_crash(commit_log: CommitLog, checkpoint: Checkpoint) -> int:
    """Phy offset up to which every queue surely has its units on disk, though the store was not closed in order."""
    if checkpoint.flushed_offset >= 0:
        return min(checkpoint.flushed_offset, commit_log.max_offset)
    return _where_to_begin(commit_log, None, checkpoint, -1, clean=False)


def _segment_of(commit_log: CommitLog, offset: int) -> int:
    # Where the segment that holds `offset` begins; the oldest one if there is none.
    bases = commit_log.files.offsets
    base = max(offset, bases[0]) // commit_log.segment_size * commit_log.segment_size
    return base if base in bases else bases[-1] if base > bases[-1] else bases[0]


@dataclass(slots=True)
class _Judgement:
    """The scanned part of the log: whole stretches, what lies between, where it ends, and what agrees with it."""

    begin: int
    end: int
    agreement: Agreement
    ranges: list[tuple[int, int]] = field(default_factory=list)
    damage: list[tuple[int, int, str]] = field(default_factory=list)
    records: int = 0
    last_record: int = -1
    dispatch_from: int = _FAR
    # For whole records after damage, in the segment that was searched last, and where it holds nothing but zeros any more.
    search: _core.RecordSearch | None = None
    search_limit: int = 0

    @property
    def agrees(self) -> bool:
        """Nothing was missing so far."""
        return self.dispatch_from == _FAR


def _judge(
    commit_log: CommitLog,
    agreement: Agreement,
    index: IndexSurvey | None,
    begin: int,
    newest_unit_end: int,
    marked_end: int,
    clean: bool,
    mode: str,
) -> _Judgement:
    """Walk the log from `begin`, CRCs included, and decide where it ends; nothing is changed."""
    judged = _Judgement(begin, begin, agreement)
    at = start = begin
    while True:
        ended, verdict = _read_on(commit_log, at, judged, _FAR if index is None else index.kept_end, clean)
        at = ended
        if verdict is None:
            break
        following = _whole_record_behind(commit_log, at, judged, max(newest_unit_end, marked_end))
        if following < 0 and not _known_behind(commit_log, at, newest_unit_end, clean):
            break
        mapped_file = commit_log.files.find(at)
        assert mapped_file is not None  # Something was found there.
        pos = at - mapped_file.file_from_offset
        behind = (
            f"whole records follow from phy offset {following}, in a log of {len(commit_log.files)} segments"
            if following >= 0
            else "queue units or later segments say that the log goes on there"
        )
        if mode == "strict":
            raise CorruptionError(
                Sentence(f"the commit log is damaged at phy offset {at} (", verdict, f"), and {behind}", ChooseRecovery()),
                mapped_file.path,
                pos,
            )
        where = f"{pos} bytes into {mapped_file.path}"
        if mode == "truncate" or following < 0:
            logger.warning("the commit log is cut at phy offset %d, %s (%s)", at, where, behind)
            break
        logger.warning("left %d damaged bytes in place at phy offset %d, %s", following - at, at, where)
        judged.ranges.append((start, at))
        judged.damage.append((at, following - at, verdict.name))
        at = start = following
    judged.ranges.append((start, at))
    judged.end = at
    return judged


def _read_on(
    commit_log: CommitLog, at: int, judged: _Judgement, index_end: int, clean: bool
) -> tuple[int, Verdict | None]:
    """Read records from `at` to the first place that holds none; that place and what is there, None after all segments.

    As long as nothing is missing they are also compared with the queues.
    """
    end = max((base + commit_log.segment_size for base in commit_log.files.offsets), default=at)
    if judged.agrees:
        for stretch, columns in commit_log.scans(at, end, keys=False, resume=False):
            if stretch.verdict is not Verdict.RECORD:
                if stretch.verdict is not Verdict.BLANK:
                    return stretch.begin, stretch.verdict
                continue
            _note(judged, stretch)
            # An index that ends within these records may lack the rest of their entries.  Of its last record it lacks some
            # only after a crash.
            if (stretch.last_record if clean else stretch.end) > index_end or not judged.agreement.holds(columns):
                judged.dispatch_from = stretch.begin
                at = stretch.end
                break
        else:
            return end, None
    for stretch in commit_log.stretches(at, end, resume=False):
        if stretch.verdict is Verdict.RECORD:
            _note(judged, stretch)
        elif stretch.verdict is not Verdict.BLANK:
            return stretch.begin, stretch.verdict
    return end, None


def _note(judged: _Judgement, stretch: Stretch) -> None:
    judged.records += stretch.records
    judged.last_record = stretch.last_record


def _whole_record_behind(commit_log: CommitLog, at: int, judged: _Judgement, known_end: int) -> int:
    # The first whole record of this log after the damage, in this segment or a later one; -1 if there is none.
    for base in commit_log.files.offsets:
        if base + commit_log.segment_size <= at:
            continue
        mapped_file = commit_log.files.file(base)
        pos = max(at + 1 - base, 0)
        if judged.search is None or judged.search.region is not mapped_file.region:
            judged.search = _core.RecordSearch(mapped_file.region, base, commit_log.crc_check)
            judged.search_limit = mapped_file.last_nonzero(pos)
        found = judged.search.find(pos, judged.search_limit)
        if found >= 0:
            return base + found if _belongs(commit_log, base + found, judged, known_end) else -1
    return -1


def _belongs(commit_log: CommitLog, offset: int, judged: _Judgement, known_end: int) -> bool:
    # RocketMQ's truncation leaves old records after the end (its issue 10666).  They are older than the last record of
    # the log and neither units nor the checkpoint's mark lead to them; whatever else is found there is part of this log.
    if known_end > offset or judged.last_record < 0:
        return True
    last = commit_log.store_timestamp_at(judged.last_record, behind_end=True)
    return commit_log.store_timestamp_at(offset, behind_end=True) >= last


def _known_behind(commit_log: CommitLog, at: int, newest_unit_end: int, clean: bool) -> bool:
    # Without a whole record after it the end is a torn write, unless an orderly exit left units that point further, or
    # a later segment holds something.
    if clean and newest_unit_end > at:
        return True
    return any(base > at and commit_log.files.file(base).last_nonzero() > 0 for base in commit_log.files.offsets)


def _cut_log(commit_log: CommitLog, end: int) -> tuple[int, int]:
    """Cut the log at `end`; how many bytes lay after it in its segment, and how many segments are deleted."""
    files = commit_log.files
    files.tidy()
    bytes_cut = 0
    mapped_file = files.find(end)
    if mapped_file is not None:
        bytes_cut = mapped_file.last_nonzero(end - mapped_file.file_from_offset) - (end - mapped_file.file_from_offset)
    files.wrote_where = max(end, files.wrote_where)
    deleted = files.truncate(end)
    files.wrote_where = end
    return bytes_cut, deleted


# -------------------------------------------------------------------------------------------------------- the queues


def look_at_queues(queues: ConsumeQueueStore) -> tuple[int, dict[tuple[str, int], PlainQueue]]:
    """Where the newest record that a unit points at ends, and the queues that are in order.

    Those are not opened: there may be a hundred thousand of them.
    """
    newest, found = -1, {}
    for topic, queue_id in queues.keys():
        plain = queues.plain(topic, queue_id)
        if plain is not None:
            newest = max(newest, plain.last_end)
            found[topic, queue_id] = plain
        elif (queue := queues.find(topic, queue_id)) is not None:
            newest = max(newest, _end_of_last_unit(queue))
    return newest, found


def claimed_by_queues(commit_log: CommitLog, queues: ConsumeQueueStore, checkpoint: Checkpoint) -> int:
    """int: the phy offset up to which queues point, where the checkpoint knows of newer messages than the log; 0 otherwise."""
    if checkpoint.physic_msg_timestamp <= (commit_log.last_store_timestamp() or 0):
        return 0
    # More was forced than is there, or the clock was set back: units tell.
    claimed = look_at_queues(queues)[0]
    commit_log.refresh()
    return claimed


def _cut_queues(
    queues: ConsumeQueueStore,
    plain: dict[tuple[str, int], PlainQueue],
    judged: _Judgement,
    clean: bool,
    checkpoint: Checkpoint,
    commit_log: CommitLog,
) -> tuple[int, bool]:
    """Drop the units that point after the end of the log, and after a crash those that cannot be trusted.

    Their number, and whether records that lie in front of the judged part lost theirs: those that followed a damaged unit.
    """
    dropped, lacks_older = 0, False

    def note(lacks: bool) -> None:
        nonlocal lacks_older
        if lacks and not lacks_older:
            lacks_older = True
            # Should this opening come to no end, the next one has to know: the queue is not going to show it.
            checkpoint.flushed_offset, checkpoint.logics_msg_timestamp = -1, 0
            checkpoint.flush()

    def before_cut(queue: UnitQueue, number: int) -> None:
        note(queue.leads_before(number, judged.begin))

    for topic, queue_id in queues.keys():
        found = plain.get((topic, queue_id))
        # Where the last unit is not the one that leads furthest, only a part of it may be there; one that leads into the judged
        # part is held against the log.
        if found is not None and found.furthest_end <= judged.end:
            if clean or found.last_end == found.furthest_end <= judged.begin:
                continue
        queue = queues.find(topic, queue_id)
        if queue is None:
            continue
        note(0 <= queue.lowest_behind_end() < judged.begin)
        queue.tidy()
        dropped += queue.cut(judged.end, before_cut)
        if not clean and isinstance(queue, ConsumeQueue):
            dropped += _truncate(queue, queue.whole_end(), before_cut)
            dropped += _truncate(queue, queue.first_unresolved(commit_log.min_offset), before_cut)
        if not clean and isinstance(queue, BatchConsumeQueue):
            # Batch units are found by what stands in them, so they are of use only up to the first odd one.
            dropped += _truncate(queue, queue.consistent_num(), before_cut)
        if not clean and judged.agreement.ends.get((topic, queue_id)) != queue.unit_num:
            while _leads_to_another(queue, commit_log, judged):
                dropped += _truncate(queue, queue.unit_num - 1, before_cut)
    return dropped, lacks_older


def _leads_to_another(queue: AnyConsumeQueue, commit_log: CommitLog, judged: _Judgement) -> bool:
    # Whether the last unit leads to where the log is whole, and to no record of this queue.  Such a unit was cut once, or its
    # message was, and lost power brought it back after the log had gone on with others.  One that leads into damage stays:
    # its message keeps its place.
    unit = queue.last_record()
    if unit is None:
        return False
    at = bisect_right(judged.ranges, unit.phy_offset, key=lambda each: each[0]) - 1
    if at < 0 or unit.phy_offset >= judged.ranges[at][1]:
        return False
    message = commit_log.look_up(unit.phy_offset, unit.size)
    if message is None:
        return True
    own = (message.topic, message.queue_id) == (queue.topic, queue.queue_id)
    return not own and not names_further_queue(message, queue.topic)


def _truncate(queue: AnyConsumeQueue, number: int, before: Callable[[UnitQueue, int], None]) -> int:
    # Drops the units from `number` on; how many there were.
    if number >= queue.unit_num:
        return 0
    before(queue, number)
    return queue.truncate(number)


def _fill_holes(queues: ConsumeQueueStore, phy_offset: int) -> None:
    """Let no queue have a hole where a message was lost that lay after `phy_offset`."""
    for topic, queue_id in queues.keys():
        queue = queues.find(topic, queue_id)
        if isinstance(queue, ConsumeQueue):
            queue.fill_holes(phy_offset)
    queues.set_aside(queues.config.max_mapped_files)


# ------------------------------------------------------------------------------------------------------- dispatching


def _dispatch(
    commit_log: CommitLog,
    queues: ConsumeQueueStore,
    index_service: IndexService | None,
    judged: _Judgement,
    *,
    repair: bool,
    whole: bool,
) -> DispatchCounts:
    dispatcher = LogDispatcher(queues.root, commit_log, queues, index_service)
    if whole:
        logger.warning("queues of %s lack units of older records; dispatching the whole log again", commit_log.path)
        ranges = _whole_log(commit_log, judged)
    else:
        whole = judged.begin <= commit_log.min_offset
        ranges = [(max(begin, judged.dispatch_from), end) for begin, end in judged.ranges if end > judged.dispatch_from]
    while True:
        # Entries are put once: what a first pass put is below the progress of a second.
        progress = IndexProgress() if index_service is None else IndexProgress.of(index_service)
        try:
            for begin, end in ranges:
                for stretch, columns in commit_log.scans(begin, end, check_crc=False, resume=False):
                    if stretch.verdict is Verdict.RECORD:
                        dispatcher.dispatch_columns(columns, progress, allow_gaps=whole, repair=repair)
            dispatcher.finish()
            return dispatcher.counts
        except QueueGapError as gap:
            logger.warning("%s; dispatching the whole log again", gap)
            ranges = _whole_log(commit_log, judged)
            whole = True


def _whole_log(commit_log: CommitLog, judged: _Judgement) -> list[tuple[int, int]]:
    # From the oldest record to the judged part, as far as it can be read, then the judged part.
    older = commit_log.stretches(commit_log.min_offset, judged.begin)
    return [(each.begin, each.end) for each in older if each.verdict is Verdict.RECORD] + judged.ranges
