"""Recovery: what happens between opening a store for writing and its first use.

`recover` reads as the description of it: judge the log and decide where it ends, cut what a crash left, bring the queues and
the index into line with the log by dispatching what they lack.  It owns the cuts and the report; where the log ends is
decided in `judgement`.  Invariants:

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
from typing import TYPE_CHECKING, Any, get_args

from rmqstore import _core
from rmqstore._core import Verdict
from rmqstore.arguments import Recovery
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.consumequeue.queue_look import PlainQueue
from rmqstore.consumequeue.unit_queue import UnitQueue
from rmqstore.errors import StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.index.index_service import IndexService
from rmqstore.message import SCHEDULE_TOPIC
from rmqstore.store.dispatch_rules import Agreement, gone_text, names_further_queue
from rmqstore.store.dispatcher import DispatchCounts, IndexProgress, LogDispatcher, QueueGapError
from rmqstore.store.judgement import FAR, IndexSurvey, Judgement, LogJudge
from rmqstore.store.lost_log import end_of_known, refuse_loss

if TYPE_CHECKING:
    from rmqstore.store.store_state import StoreState

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
    state: StoreState,
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
        What to do where the log is damaged before whole records: refuse; cut the log there, as RocketMQ does, which deletes
        everything after it; keep everything and go on after it.
    drop_units : int
        How many queue units and index entries that point outside the log may be dropped, as for `lost_log.refuse_loss`.
    before_writing : callable
        Called once with the phy offset at which the log ends, after that was judged and before the first change on disk.

    Raises
    ------
    CorruptionError
        The log is damaged in the middle and the mode is "strict"; nothing was changed.
    LostLogError
        Other units and entries than `drop_units` point outside the log; nothing was changed.
    """
    started = time.perf_counter()
    if "message_delay_level" in state.commit_log.config.assumed:
        learn_delays(state.commit_log, state.queues)
    recovery = _Recovery(state, clean)
    recovery.judge(mode, drop_units)
    before_writing(recovery.judged.end)
    report = RecoveryReport(mode=mode, clean=clean)
    recovery.cut(report)
    recovery.dispatch(report)
    recovery.finish(report)
    report.seconds = time.perf_counter() - started
    if not clean or report.bytes_cut or report.units_written or report.index_entries_written:
        logger.info("recovered %s: %s", state.commit_log.path, report)
    return report


class _Recovery:
    """One recovery, step by step: `judge` only reads, then come `cut`, `dispatch` and `finish`."""

    judged: Judgement

    def __init__(self, state: StoreState, clean: bool):
        self.commit_log, self.queues, self.index_service = state.commit_log, state.queues, state.index_service
        self.checkpoint = state.checkpoint
        self.clean = clean
        looked, self.index = self._look()
        self.newest_unit_end, self.plain = looked
        # After a crash every queue is going to be opened, by what is known of it.
        self.agreement = Agreement(self.commit_log, self.queues, self.plain if clean else {})
        self.queues.plain_queues = {} if clean else dict(self.plain)
        self.lacks_older = False

    def _look(self) -> tuple[tuple[int, dict[tuple[str, int], PlainQueue]], IndexSurvey | None]:
        # `look_at_queues`, and the survey of the index; both only read.  A large index is read in a thread of its own.
        if self.index_service is None:
            return look_at_queues(self.queues), None
        surveyed = self.commit_log, self.index_service, self.checkpoint, self.clean
        if not _is_large(self.index_service):
            looked = look_at_queues(self.queues)
            return looked, IndexSurvey(*surveyed)
        # Imported here because most stores that are opened have less.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1, "rmqstore-survey") as thread:
            survey = thread.submit(IndexSurvey, *surveyed)
            return look_at_queues(self.queues), survey.result()

    def judge(self, mode: str, drop_units: int) -> None:
        """Decide where the log ends; parameters and errors are those of `recover`."""
        begin = _where_to_begin(self.commit_log, self.index, self.checkpoint, self.newest_unit_end, self.clean)
        judge = LogJudge(self.commit_log, self.agreement, self.index, self.newest_unit_end, self.clean)
        self.judged = judge.judge(begin, self.checkpoint.log_end, mode)
        known_end = max(self.newest_unit_end, -1 if self.index is None else self.index.kept_end + 1)
        if known_end > self.judged.end:
            end = end_of_known(self.commit_log, self.judged.end, self.checkpoint, self.clean)
            kinds = ("consumequeue",) if self.index is None else ("consumequeue", "index")
            refuse_loss(self.commit_log, end, kinds, drop_units, replaced=False)

    def cut(self, report: RecoveryReport) -> None:
        """Cut off the log, the queues and the index what is after the end or cannot be trusted."""
        judged, segment_size = self.judged, self.commit_log.segment_size
        report.began_at, report.end, report.damage = judged.begin, judged.end, judged.damage
        report.bytes_scanned = judged.end - judged.begin
        report.segments_scanned = len(range(judged.begin // segment_size, -(-judged.end // segment_size)))
        report.records = judged.records
        report.bytes_cut, report.segments_deleted = _cut_log(self.commit_log, judged.end)
        report.units_cut = self._cut_queues()
        if self.agreement.was_cut():
            # What was compared is gone: something before it was wrong.
            judged.units_from = judged.begin
        if self.index is not None:
            report.index_entries_cut, report.index_files_deleted = self.index.cut(judged.end)
            report.index_files_kept = len(self.index.index_service.names)

    def dispatch(self, report: RecoveryReport) -> None:
        """Dispatch the records that queues or index may lack something of."""
        report.dispatched_from = min(self.judged.dispatch_from, self.judged.end)
        counts = self._dispatch()
        report.units_written, report.units_mended = counts.units, counts.units_mended
        report.index_entries_written = counts.index_entries
        report.damage += counts.misplaced
        report.gone = counts.gone
        if counts.gone:
            logger.info("%s: %s", self.commit_log.path, gone_text(counts.gone))

    def finish(self, report: RecoveryReport) -> None:
        """Close the holes of lost messages in the queues, and bring the checkpoint into line."""
        if self.judged.damage:
            _fill_holes(self.queues, self.judged.damage[0][0])
        self.queues.plain_queues = {}
        self.queues.forget_empty_batch_queues()
        self.checkpoint.confirm_phy_offset = max(self.judged.last_record, 0)
        if report.bytes_cut or report.units_cut or report.index_entries_cut:
            self._limit_checkpoint()
        if self.clean:
            # Otherwise all of them are going to be flushed.
            self.queues.set_aside(self.queues.config.max_mapped_files)

    def _limit_checkpoint(self) -> None:
        # A time in the checkpoint after that of the newest record covers records that were cut: a recovery that trusts it
        # would begin too late.  With an earlier one it only reads more.
        last, checkpoint = self.judged.last_record, self.checkpoint
        newest = max(self.commit_log.store_timestamp_at(last, behind_end=True), 0) if last >= 0 else 0
        checkpoint.physic_msg_timestamp = min(checkpoint.physic_msg_timestamp, newest)
        checkpoint.logics_msg_timestamp = min(checkpoint.logics_msg_timestamp, newest)
        # Index files end later where the clock was set back.
        files = () if self.index_service is None else self.index_service.files()
        ends = (index.header.end_timestamp for index in files)
        checkpoint.index_msg_timestamp = min(checkpoint.index_msg_timestamp, max(ends, default=newest))

    # ---------------------------------------------------------------------------------------------------- the queues

    def _cut_queues(self) -> int:
        # Drops the units that point after the end of the log, and after a crash those that cannot be trusted; their number.
        dropped, clean, judged = 0, self.clean, self.judged
        for topic, queue_id in self.queues.keys():
            found = self.plain.get((topic, queue_id))
            # Where the last unit is not the one that leads furthest, only a part of it may be there; one that leads into the
            # judged part is held against the log.
            if found is not None and found.furthest_end <= judged.end:
                if clean or found.last_end == found.furthest_end <= judged.begin:
                    continue
                if found.last_end == found.furthest_end and self._is_right(topic, queue_id):
                    continue
            queue = self.queues.find(topic, queue_id)
            if queue is None:
                continue
            self._note_lack(0 <= queue.lowest_behind_end() < judged.begin)
            queue.tidy()
            dropped += queue.cut(judged.end, self._before_cut)
            if not clean:
                dropped += self._truncate(queue, queue.sound_end(self.commit_log.min_offset))
                if not self._is_right(topic, queue_id):
                    while self._leads_to_another(queue):
                        dropped += self._truncate(queue, queue.unit_num - 1)
        return dropped

    def _is_right(self, topic: str, queue_id: int) -> bool:
        # The last unit of an open queue was compared with its record.
        end = self.agreement.end((topic, queue_id))
        return end is not None and end == self.queues.unit_num(topic, queue_id)

    def _before_cut(self, queue: UnitQueue, number: int) -> None:
        self._note_lack(queue.leads_before(number, self.judged.begin))

    def _note_lack(self, lacks: bool) -> None:
        # Records before the judged part lost their units: those that followed a damaged unit.
        if lacks and not self.lacks_older:
            self.lacks_older = True
            # Should this opening come to no end, the next one has to know: the queue is not going to show it.
            self.checkpoint.flushed_offset, self.checkpoint.logics_msg_timestamp = -1, 0
            self.checkpoint.flush()

    def _truncate(self, queue: AnyConsumeQueue, number: int) -> int:
        # Drops unit `number` and later ones; their number.
        if number >= queue.unit_num:
            return 0
        self._before_cut(queue, number)
        return queue.truncate(number)

    def _leads_to_another(self, queue: AnyConsumeQueue) -> bool:
        # Whether the last unit leads to where the log is whole, and to no record of this queue.  Such a unit was cut once, or
        # its message was, and lost power brought it back after the log had gone on with others.  One that leads into damage
        # stays: its message keeps its place.
        unit = queue.last_record()
        if unit is None:
            return False
        ranges = self.judged.ranges
        at = bisect_right(ranges, unit.phy_offset, key=lambda each: each[0]) - 1
        if at < 0 or unit.phy_offset >= ranges[at][1]:
            return False
        message = self.commit_log.look_up(unit.phy_offset, unit.size)
        if message is None:
            return True
        own = (message.topic, message.queue_id) == (queue.topic, queue.queue_id)
        return not own and not names_further_queue(message, queue.topic)

    # --------------------------------------------------------------------------------------------------- dispatching

    def _dispatch(self) -> DispatchCounts:
        log, judged = self.commit_log, self.judged
        dispatcher = LogDispatcher(self.queues.root, log, self.queues, self.index_service)
        dispatcher.repair = not self.clean
        if self.lacks_older:
            logger.warning("queues of %s lack units of older records; dispatching the whole log again", log.path)
            judged.units_from, dispatcher.allow_gaps, ranges = 0, True, self._whole_log()
        else:
            dispatcher.allow_gaps = judged.begin <= log.min_offset
            ranges = judged.ranges
        while True:
            # Entries are put once: what a first pass put is below the progress of a second.
            if self.index_service is not None:
                dispatcher.progress = IndexProgress.of(self.index_service)
            try:
                # The queues are right up to `units_from`.
                dispatcher.queues = None
                self._dispatch_ranges(dispatcher, ranges, judged.entries_from, judged.units_from)
                dispatcher.queues = self.queues
                self._dispatch_ranges(dispatcher, ranges, judged.units_from, FAR)
                dispatcher.finish()
                return dispatcher.counts
            except QueueGapError as gap:
                logger.warning("%s; dispatching the whole log again", gap)
                judged.units_from, dispatcher.allow_gaps, ranges = 0, True, self._whole_log()

    def _dispatch_ranges(self, dispatcher: LogDispatcher, ranges: list[tuple[int, int]], first: int, last: int) -> None:
        # Dispatch the records of `ranges` from `first` up to but not including `last`.
        for begin, end in ranges:
            begin, end = max(begin, first), min(end, last)
            if begin >= end:
                continue
            for stretch, columns in self.commit_log.scans(begin, end, check_crc=False, resume=False):
                if stretch.verdict is Verdict.RECORD:
                    dispatcher.dispatch_columns(columns)

    def _whole_log(self) -> list[tuple[int, int]]:
        # From the oldest record to the judged part, as far as it can be read, then the judged part.
        older = self.commit_log.stretches(self.commit_log.min_offset, self.judged.begin)
        return [(each.begin, each.end) for each in older if each.verdict is Verdict.RECORD] + self.judged.ranges


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


def _where_to_begin(
    commit_log: CommitLog, index: IndexSurvey | None, checkpoint: Checkpoint, newest_unit_end: int, clean: bool
) -> int:
    # After an orderly exit everything up to the newest unit is as it should be.  After a crash everything stored before
    # the checkpoint's time is on disk.  In both cases all segments are looked at, where RocketMQ 5.5.0 stops after ten.
    bases = commit_log.files.offsets
    if not bases:
        return 0
    if not clean and checkpoint.flushed_offset >= 0:
        # This package's own word on what is on disk, which a Java store between then and now would have made void.
        return _segment_of(commit_log, min(checkpoint.flushed_offset, FAR if index is None else max(index.kept_end, 0)))
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
    """Where the newest record that a unit points at ends, and the queues that are in order."""
    newest, found = -1, {}
    for topic, queue_id in queues.keys():
        plain = queues.plain(topic, queue_id)
        if plain is not None:
            newest = max(newest, plain.last_end)
            found[topic, queue_id] = plain
        elif (queue := queues.find(topic, queue_id)) is not None:
            unit = queue.last_record()
            newest = max(newest, -1 if unit is None else unit.phy_offset + unit.size)
    return newest, found


def claimed_by_queues(commit_log: CommitLog, queues: ConsumeQueueStore, checkpoint: Checkpoint) -> int:
    """int: the phy offset up to which queues point, where the checkpoint knows of newer messages than the log; 0 otherwise."""
    if checkpoint.physic_msg_timestamp <= (commit_log.last_store_timestamp() or 0):
        return 0
    # More was forced than is there, or the clock was set back: units tell.
    claimed = look_at_queues(queues)[0]
    commit_log.refresh()
    return claimed


def _fill_holes(queues: ConsumeQueueStore, phy_offset: int) -> None:
    """Let no queue have a hole where a message was lost that lay after `phy_offset`."""
    for topic, queue_id in queues.keys():
        queue = queues.find(topic, queue_id)
        if queue is not None:
            queue.fill_holes(phy_offset)
    queues.set_aside(queues.config.max_mapped_files)
