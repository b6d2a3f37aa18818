"""What is wrong in the commit log itself, as findings: its segments, what is no record, CRCs and bodies of records.

It only reads, and compares nothing with queues or index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.log_walk import DAMAGE_KINDS, Stretch
from rmqstore.errors import Finding
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.open_file import why_unreadable
from rmqstore.message import SysFlag, body_findings
from rmqstore.offline.compared import Compared
from rmqstore.offline.verify_unread import unread_file
from rmqstore.remedies import Sentence
from rmqstore.store.lost_log import end_of_known, units_outside

__all__ = ["LogCheck"]

_COMPRESSED = SysFlag.COMPRESSED.value


class LogCheck:
    """Checks a log and its records.

    Parameters
    ----------
    compared : Compared

    Attributes
    ----------
    end : int
        Where the log ends.
    """

    def __init__(self, compared: Compared):
        self.compared = compared
        self.end = 0
        # Errors about missing libraries that were reported.
        self.missing: set[str] = set()

    def leave_out_unread(self) -> list[Finding]:
        """Leave segments that cannot be read out of the log, and report them."""
        problems: list[Finding] = []
        files = self.compared.commit_log.files
        good = []
        for base in files.offsets:
            path = files.file(base).path
            error = why_unreadable(path)
            if error is None:
                good.append(base)
                continue
            problems.append(unread_file(path, error, "what leads to its records is not compared with them"))
            self.compared.unread.append((base, base + self.compared.commit_log.segment_size))
        if problems:
            files.take(good, files.wrote_where)
        return problems

    def no_record(self, stretch: Stretch) -> Iterator[Finding]:
        """Report a stretch of the log that is not a sound record."""
        log, at, verdict = self.compared.commit_log, stretch.begin, stretch.verdict
        mapped_file = log.files.find(at)
        if mapped_file is None or verdict is None:
            yield Finding(log.path, 0, "missing_segment", f"no segment holds phy offsets {at} to {stretch.end}")
            return
        region, path, pos = mapped_file.region, mapped_file.path, at - mapped_file.file_from_offset
        if verdict == Verdict.BLANK:
            return
        if verdict == Verdict.BAD_SIZE and region.get_i32(pos + 4) == _core.MAGIC_BLANK:
            detail = (
                f"the blank says {region.get_i32(pos)} bytes, {region.size - pos} are left; {stretch.end - at} are not a "
                "record"
            )
            yield Finding(path, pos, "bad_blank", detail)
        elif verdict in (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC):
            what = "body" if verdict == Verdict.BAD_BODY_CRC else "property"
            detail = f"the record at phy offset {at} does not agree with its {what} CRC"
            yield Finding(path, pos, DAMAGE_KINDS.get(verdict, "missing_blank"), detail)
        else:
            detail = Sentence(f"{stretch.end - at} bytes from phy offset {at} are not a record (", verdict, ")")
            yield Finding(path, pos, DAMAGE_KINDS.get(verdict, "missing_blank"), detail)

    def records(self, columns: RecordColumns, begin: int) -> Iterator[Finding]:
        """Check the records of a stretch that begins at `begin`."""
        yield from self._missing_crcs(columns, begin)
        yield from self._bodies(columns)

    def _missing_crcs(self, columns: RecordColumns, begin: int) -> Iterator[Finding]:
        if not self.compared.config.enabled_append_prop_crc:
            return
        mapped_file = self.compared.commit_log.segment(begin)
        path, base = mapped_file.path, mapped_file.file_from_offset
        for row in np.flatnonzero(columns.prop_crc[: columns.count] == 0).tolist():
            phy_offset = int(columns.phy_offset[row])
            yield Finding(
                path,
                phy_offset - base,
                "missing_prop_crc",
                f"the record at phy offset {phy_offset} has no property CRC, which a broker with enabledAppendPropCRC always "
                "writes; only its body is protected",
            )

    def _bodies(self, columns: RecordColumns) -> Iterator[Finding]:
        for phy_offset in columns.phy_offset[: columns.count][columns.sys_flag[: columns.count] & _COMPRESSED != 0].tolist():
            message = self.compared.commit_log.look_up(phy_offset)
            if message is not None:
                mapped_file = self.compared.commit_log.segment(phy_offset)
                pos = phy_offset - mapped_file.file_from_offset
                yield from body_findings(message, mapped_file.path, pos, self.missing)

    def tail(self) -> Iterator[Finding]:
        """Look for bytes after the end of the log."""
        for base in self.compared.commit_log.files.offsets:
            if base + self.compared.commit_log.segment_size <= self.end:
                continue
            mapped_file = self.compared.commit_log.files.file(base)
            pos = max(self.end - base, 0)
            last = mapped_file.last_nonzero(pos)
            if last > pos:
                yield Finding(
                    mapped_file.path,
                    pos,
                    "stale_tail",
                    f"{last - pos} bytes after the end of the log (phy offset {self.end}) are not zero; a later recovery of "
                    "a real broker may take old records among them for new ones",
                )

    def lost_end(self) -> Iterator[Finding]:
        """Look for units and entries that lead behind the end of the log."""
        # What a rebuild refuses to lose.  A gap in the middle is a finding of its own; segments that cannot be read are there.
        if self.compared.unread:
            return
        checkpoint = Checkpoint.load_or_zeros(os.path.join(self.compared.root, "checkpoint"))
        clean = not os.path.lexists(os.path.join(self.compared.root, "abort"))
        end = end_of_known(self.compared.commit_log, self.end, checkpoint, clean)
        found = list(units_outside(self.compared.commit_log, end, ("consumequeue", "index"), replaced=False))
        if found:
            first = min(found, key=lambda each: each.phy_offset)
            yield Finding(
                self.compared.commit_log.path,
                0,
                "missing_segment",
                f"{sum(each.num for each in found)} queue units and index entries lead behind the end of the log at phy offset "
                f"{self.end}, the first to {first.phy_offset} ({first.path}): its newest segments are missing",
            )
