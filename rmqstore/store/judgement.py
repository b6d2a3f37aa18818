"""Judging the log of a store that is being recovered: where it ends, and from where on queues or index lack something.

Owns these decisions; it changes nothing on disk.  What whole records follow damage is searched for in every segment.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rmqstore import _core
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.log_walk import Stretch
from rmqstore.errors import CorruptionError
from rmqstore.remedies import ChooseRecovery, Sentence
from rmqstore.store.agreement import Agreement
from rmqstore.store.index_survey import IndexSurvey

__all__ = ["FAR", "Judgement", "LogJudge"]

logger = logging.getLogger(__name__)

FAR = 2**63 - 1
"""Beyond every phy offset."""


@dataclass(slots=True)
class Judgement:
    """The scanned part of the log: whole ranges, what is between them, where it ends, and what agrees with it.

    Attributes
    ----------
    begin, end : int
        Phy offsets of the first record, and of the end of the log.
    ranges : list of (int, int)
        Whole records, begin and end of each range.
    damage : list of (int, int, str)
        What is between them: offset, size, verdict.
    records, last_record : int
        Their number, and the phy offset of the last, -1 without any.
    dispatch_from : int
        Where the first record begins that queues or index lack something of, as far as was compared; `FAR` for none.
    """

    begin: int
    end: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    damage: list[tuple[int, int, str]] = field(default_factory=list)
    records: int = 0
    last_record: int = -1
    dispatch_from: int = FAR

    def note(self, stretch: Stretch) -> None:
        """Count the records of a stretch."""
        self.records += stretch.records
        self.last_record = stretch.last_record


class LogJudge:
    """Reads the log of one store, CRCs included, and judges it.

    Parameters
    ----------
    commit_log : CommitLog
    agreement : Agreement
        Compares records with the queues.
    index : IndexSurvey or None
    newest_unit_end : int
        Where the newest record that a queue points to ends.
    clean : bool
        The last user closed the store in order.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        agreement: Agreement,
        index: IndexSurvey | None,
        newest_unit_end: int,
        clean: bool,
    ):
        self.commit_log = commit_log
        self.agreement = agreement
        self.index_end = FAR if index is None else index.kept_end
        self.newest_unit_end = newest_unit_end
        self.clean = clean
        # For whole records after damage, in the segment that was searched last, and where it holds nothing but zeros any more.
        self._search: _core.RecordSearch | None = None
        self._search_limit = 0

    def judge(self, begin: int, marked_end: int, mode: str) -> Judgement:
        """Judge the log from `begin` on.

        Parameters
        ----------
        marked_end : int
            Where the checkpoint says that the log ends.
        mode : {"strict", "truncate", "skip"}
            As for `recover`.

        Raises
        ------
        CorruptionError
            The log is damaged in the middle and the mode is "strict".
        """
        judged = Judgement(begin, begin)
        at = start = begin
        while True:
            at, verdict = self._read_on(at, judged)
            if verdict is None:
                break
            following = self._whole_record_after(at, judged, max(self.newest_unit_end, marked_end))
            if following < 0 and not self._known_after(at):
                break
            mapped_file = self.commit_log.files.find(at)
            assert mapped_file is not None  # Something was found there.
            pos = at - mapped_file.file_from_offset
            behind = (
                f"whole records follow from phy offset {following}, in a log of {len(self.commit_log.files)} segments"
                if following >= 0
                else "queue units or later segments say that the log goes on there"
            )
            if mode == "strict":
                raise CorruptionError(
                    Sentence(f"the commit log is damaged at phy offset {at} (", verdict, f"), and {behind}", ChooseRecovery()),
                    mapped_file.path,
                    pos,
                )
            where = pos, mapped_file.path
            if mode == "truncate" or following < 0:
                logger.warning("the commit log is cut at phy offset %d, %d bytes into %s (%s)", at, *where, behind)
                break
            logger.warning("left %d damaged bytes in place at phy offset %d, %d bytes into %s", following - at, at, *where)
            judged.ranges.append((start, at))
            judged.damage.append((at, following - at, verdict.name))
            at = start = following
        judged.ranges.append((start, at))
        judged.end = at
        return judged

    def _read_on(self, at: int, judged: Judgement) -> tuple[int, Verdict | None]:
        # Reads records from `at` to the first place that holds none; that place and what is there, None after all segments.
        # As long as nothing is missing they are also compared with the queues.
        log = self.commit_log
        end = max((base + log.segment_size for base in log.files.offsets), default=at)
        if judged.dispatch_from == FAR:
            for stretch, columns in log.scans(at, end, keys=False, resume=False):
                if stretch.verdict is not Verdict.RECORD:
                    if stretch.verdict is not Verdict.BLANK:
                        return stretch.begin, stretch.verdict
                    continue
                judged.note(stretch)
                # An index that ends within these records may lack the rest of their entries.  Of its last record it lacks some
                # only after a crash.
                indexed = (stretch.last_record if self.clean else stretch.end) <= self.index_end
                if not indexed or not self.agreement.holds(columns):
                    judged.dispatch_from = stretch.begin
                    at = stretch.end
                    break
            else:
                return end, None
        for stretch in log.stretches(at, end, resume=False):
            if stretch.verdict is Verdict.RECORD:
                judged.note(stretch)
            elif stretch.verdict is not Verdict.BLANK:
                return stretch.begin, stretch.verdict
        return end, None

    def _whole_record_after(self, at: int, judged: Judgement, known_end: int) -> int:
        # The first whole record of this log after the damage, in this segment or a later one; -1 if there is none.
        log = self.commit_log
        for base in log.files.offsets:
            if base + log.segment_size <= at:
                continue
            mapped_file = log.files.file(base)
            pos = max(at + 1 - base, 0)
            if self._search is None or self._search.region is not mapped_file.region:
                self._search = _core.RecordSearch(mapped_file.region, base, log.crc_check)
                self._search_limit = mapped_file.last_nonzero(pos)
            found = self._search.find(pos, self._search_limit)
            if found >= 0:
                return base + found if self._belongs(base + found, judged, known_end) else -1
        return -1

    def _belongs(self, offset: int, judged: Judgement, known_end: int) -> bool:
        # RocketMQ's truncation leaves old records after the end (its issue 10666).  They are older than the last record of
        # the log and neither units nor the checkpoint's mark lead to them; whatever else is found there is part of this log.
        if known_end > offset or judged.last_record < 0:
            return True
        last = self.commit_log.store_timestamp_at(judged.last_record, behind_end=True)
        return self.commit_log.store_timestamp_at(offset, behind_end=True) >= last

    def _known_after(self, at: int) -> bool:
        # Without a whole record after it the end is a torn write, unless an orderly exit left units that point further, or
        # a later segment holds something.
        if self.clean and self.newest_unit_end > at:
            return True
        files = self.commit_log.files
        return any(base > at and files.file(base).last_nonzero() > 0 for base in files.offsets)
