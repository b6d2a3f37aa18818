"""Scans of the log: record by record, stretch by stretch, as messages, into columns, or by headers alone.

Owns the results of a scan, and how it passes damage: at the next whole record, recognised by magic, lengths, its own offset and
CRC.  It never decides the consequences of damage.  The working set is constant for a log of any length.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rmqstore import _core, _dispatch
from rmqstore._columns import ArrowColumns
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.pieces import SCAN_WINDOW, Division, Pieces, ScanProgress, search_in
from rmqstore.config import StoreConfig
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.files.mapped_file import name_of_offset
from rmqstore.files.mapped_file_queue import MappedFileQueue
from rmqstore.message import MessageExt, _read

__all__ = ["Blank", "Damage", "LogWalk", "Stretch"]

logger = logging.getLogger(__name__)

# Scans ahead: bytes of a piece, bytes in which its end is searched, rows at most, waiting pieces, threads.
_PIECE = 8 * 1024 * 1024
_PIECE_SEARCH = 256 * 1024
_PIECE_ROWS = 32768
_PIECES_AHEAD = 3
_THREADS = 2
# Messages and bytes of records that `entries` reads ahead.
_READ_AHEAD_NUM = 64
_READ_AHEAD_SIZE = 1024 * 1024

DAMAGE_KINDS = {verdict: verdict.name.lower() for verdict in Verdict if verdict.name.startswith("BAD_")}
"""The kind of a `Finding` about bytes that are not a whole record, by the verdict on them."""
VERDICT_WORDS = {
    Verdict.EMPTY.name: "nothing but zeros",
    Verdict.RECORD.name: "a whole record",
    Verdict.BLANK.name: "the blank that ends a segment",
    Verdict.BAD_MAGIC.name: "no magic number of a record",
    Verdict.BAD_SIZE.name: "an impossible size",
    Verdict.BAD_LENGTH.name: "lengths that do not fit",
    Verdict.BAD_PHY_OFFSET.name: "a wrong phy offset",
    Verdict.BAD_BODY_CRC.name: "a wrong body CRC",
    Verdict.BAD_PROP_CRC.name: "a wrong CRC of the properties",
}
"""Descriptions of bytes in place of a record, for people; data has the names."""


@dataclass(frozen=True, slots=True)
class Blank:
    """The record that closes a segment; `size` bytes from `phy_offset` are the rest of the segment."""

    phy_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Damage:
    """`size` unreadable bytes from `phy_offset`; `verdict` is the verdict on their start."""

    phy_offset: int
    size: int
    verdict: Verdict


class Stretch(NamedTuple):
    """A part of the log, see `CommitLog.stretches`.

    - `verdict`: RECORD: consecutive whole records.  BLANK: the record that closes a segment, and the rest of it.  None: no segment
      holds these offsets.  Otherwise no whole record begins at `begin`.
    - `last_record`: offset of the last record, -1 for none.
    """

    begin: int
    end: int
    verdict: Verdict | None
    records: int = 0
    last_record: int = -1

    @property
    def is_damage(self) -> bool:
        """True for neither whole records nor the end of a segment, and if no segment holds the offsets."""
        return self.verdict not in (Verdict.RECORD, Verdict.BLANK)

    @property
    def as_damage(self) -> tuple[int, int, str]:
        """Phy offset, bytes and kind of damage for the report of a rebuild."""
        return self.begin, self.end - self.begin, "missing segment" if self.verdict is None else self.verdict.name


class _Walk:
    """A step over the records of a stretch, for `LogWalk.stretches`."""

    def __init__(self, crc_check: int):
        self.crc_check = crc_check

    def __call__(self, region: _core.Region, start: int, limit: int, base: int) -> tuple[int, Verdict, int, int]:
        """Return the end, the verdict there, the number of records, and the offset of the last one or -1."""
        limit = min(limit, start + SCAN_WINDOW)
        pos, verdict, num, last = _dispatch.walk(region, start, limit, base, self.crc_check)
        return pos, verdict, num, base + last if num else -1

    def empty(self) -> None:
        """Note that the stretch holds no records."""


class _Scan:
    """A step that fills columns with the records of a stretch, like `_Walk`."""

    def __init__(self, log: LogWalk, columns: RecordColumns, crc_check: int, keys: bool):
        self.log = log
        self.columns = columns
        self.crc_check = crc_check
        self.keys = keys

    def __call__(self, region: _core.Region, start: int, limit: int, base: int) -> tuple[int, Verdict, int, int]:
        return self.result(*self.fill(self.columns, region, start, limit, base))

    def result(self, pos: int, verdict: Verdict) -> tuple[int, Verdict, int, int]:
        """Return the result of a step that filled the columns up to `pos`."""
        num = self.columns.count
        return pos, verdict, num, int(self.columns.phy_offset[num - 1]) if num else -1

    def fill(
        self, columns: RecordColumns, region: _core.Region, start: int, limit: int, base: int
    ) -> tuple[int, Verdict]:
        """Call `_dispatch.scan`."""
        config = self.log.config
        return _dispatch.scan(
            region, start, limit, base, columns, self.log.delays, self.crc_check, config.index_tags, self.keys
        )

    def empty(self) -> None:
        """Note that the stretch holds no records."""
        self.columns.count = 0


class _ScanAhead(_Scan):
    """A step that takes columns from other threads, which fill them with `Pieces` of the log ahead of the caller."""

    def __init__(self, log: LogWalk, end: int, crc_check: int, keys: bool, *, worth_it: bool):
        super().__init__(log, RecordColumns(_PIECE_ROWS), crc_check, keys)
        self._pieces: Pieces[RecordColumns, tuple[int, Verdict]] = Pieces(
            log.files,
            end,
            lambda: RecordColumns(_PIECE_ROWS),
            Division(_PIECE, _PIECE_SEARCH, _THREADS, ahead=_PIECES_AHEAD),
            worth_it=worth_it,
        )

    def __call__(self, region: _core.Region, start: int, limit: int, base: int) -> tuple[int, Verdict, int, int]:
        at = base + start
        piece = self._pieces.come_to(at)
        if piece is not None:
            self._pieces.put_back(self.columns)
            self.columns = piece.job
        until = self._pieces.end_behind(at)
        self._pieces.launch(self.fill)
        result = None if piece is None else piece.result()
        if result is None:
            # An error of another thread may occur here again.
            limit = min(limit, start + SCAN_WINDOW, until - base if until >= 0 else limit)
            result = self.fill(self.columns, region, start, limit, base)
        return self.result(*result)

    def close(self) -> None:
        """End the threads."""
        self._pieces.close()


class LogWalk:
    """Scans of the segments in `files`."""

    def __init__(self, files: MappedFileQueue, config: StoreConfig):
        self.files, self.config = files, config
        self.delays = array("q", config.delay_levels)
        # See `_core.decode_record`.
        self.crc_check = 2 if config.force_verify_prop_crc else 1
        self._warned_of: set[int] = set()

    @property
    def segment_size(self) -> int:
        """The size of each segment in bytes."""
        return self.files.mapped_file_size

    @property
    def path(self) -> str:
        """The directory of the segments."""
        return self.files.path

    @property
    def min_offset(self) -> int:
        """The offset of the oldest existing byte, 0 for an empty log."""
        low = self.files.min_offset
        return low if low > 0 else 0

    @property
    def max_offset(self) -> int:
        """The offset after the last record."""
        return self.files.wrote_where

    def _segment_of(self, at: int, stop: int) -> tuple[_core.Region | None, int, bool]:
        # The segment that holds `at`, its first offset, and False.  Without it None, the first offset of the next segment, and True
        # if retention deleted the segment, with all older ones.
        mapped_file = self.files.find(at)
        if mapped_file is None:
            return None, min([base for base in self.files.offsets if base > at] + [stop]), False
        try:
            return mapped_file.region, mapped_file.file_from_offset, False
        except OffsetOutOfRangeError:
            return None, max(mapped_file.file_from_offset + self.segment_size, self.files.min_offset), True

    def _bounds(self, begin: int | None, end: int | None) -> tuple[int, int]:
        # The existing part of these offsets.
        low, high = max(self.files.min_offset, 0), self.files.wrote_where
        return low if begin is None else max(begin, low), high if end is None else min(end, high)

    def stretches(
        self,
        begin: int,
        end: int,
        columns: RecordColumns | None = None,
        *,
        check_crc: bool = True,
        keys: bool = True,
        resume: bool = True,
    ) -> Iterator[Stretch]:
        """Yield the stretches of the log from `begin` to `end`, in order and without a gap.

        - `begin`, `end`: offsets; a record must begin at the first one.
        - `columns`: filled with the records of each stretch of records, and emptied at every other one.
        - `check_crc`: a record with a wrong CRC is a stretch of its own, with the verdict on it.
        - `keys`: compute index hashes (`_dispatch.scan`).
        - `resume`: continue after damage at the next whole record, which is recognised by magic, lengths, its own offset and CRC.
          Otherwise the damage is the last stretch, and its end is its begin.
        """
        crc_check = self.crc_check if check_crc else 0
        if columns is None:
            return self._stretches(begin, end, _Walk(crc_check), resume)
        return self._stretches(begin, end, _Scan(self, columns, crc_check, keys), resume)

    def scans(
        self, begin: int, end: int, *, check_crc: bool = True, keys: bool = True, resume: bool = True
    ) -> Iterator[tuple[Stretch, RecordColumns]]:
        """Yield stretches with columns like `stretches`; for a long log other threads fill them ahead.

        The stretches are the same with and without threads, but differ from those of `stretches`.

        - Yields (Stretch, RecordColumns): the columns hold the records until the next step.  There are a handful of them, each with
          its own topics.
        """
        scan = _ScanAhead(self, end, self.crc_check if check_crc else 0, keys, worth_it=end - begin >= 2 * _PIECE)
        try:
            for stretch in self._stretches(begin, end, scan, resume):
                yield stretch, scan.columns
        finally:
            scan.close()

    def _stretches(self, begin: int, end: int, step: _Walk | _Scan, resume: bool) -> Iterator[Stretch]:
        at, search = begin, None
        passed = ScanProgress(self.files)
        while at < end:
            passed.reach(at)
            mapped_file = self.files.find(at)
            if mapped_file is None:
                step.empty()
                until = min([base for base in self.files.offsets if base > at], default=end)
                yield Stretch(at, min(until, end) if resume else at, None)
                if not resume:
                    return
                at = until
                continue
            base, region = mapped_file.file_from_offset, mapped_file.region
            start, limit = at - base, min(end - base, region.size)
            pos, verdict, num, last = step(region, start, limit, base)
            at = base + pos
            if num:
                yield Stretch(base + start, at, Verdict.RECORD, num, last)
            if verdict in (Verdict.COLUMNS_FULL, Verdict.LIMIT):
                continue
            step.empty()
            if verdict == Verdict.BLANK:
                until = base + region.size
            elif not resume:
                until = at
            elif verdict in (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC):
                # Its lengths are whole, so its end is known.
                until = at + region.get_i32(pos)
            else:
                search = search_in(region, base, search)
                found = search.find(pos + 1, limit)
                until = base + (found if found >= 0 else limit)
            yield Stretch(at, until, verdict)
            if verdict != Verdict.BLANK and not resume:
                return
            at = until

    def entries(
        self,
        begin: int | None = None,
        end: int | None = None,
        *,
        on_gone: Callable[[int, int], object] | None = None,
    ) -> Iterator[MessageExt | Blank | Damage]:
        """Yield everything in the log in order: messages, blanks, and damaged stretches.

        A damaged stretch ends at the next whole record, which is recognised by magic, lengths, its own offset and CRC.
        A message with a wrong CRC has `corrupt` set.  Up to 64 messages, or 1 MiB of records, are read ahead.

        - `begin`, `end`: offsets of a record and of the end; by default the whole log.
        - `on_gone`: called with the first and one after the last offset of a segment that was deleted in the meantime and is
          skipped; by default a warning.
        """
        for page in self.pages(begin, end, on_gone=on_gone):
            if isinstance(page, list):
                yield from page
            else:
                yield page

    def pages(
        self,
        begin: int | None = None,
        end: int | None = None,
        *,
        on_gone: Callable[[int, int], object] | None = None,
        on_missing: Callable[[int, int], object] | None = None,
    ) -> Iterator[list[MessageExt] | Blank | Damage]:
        """Yield the same as `entries`, with consecutive messages in lists.

        - `on_missing`: called with offsets that no segment holds, before they come as damage.
        """
        at, stop = self._bounds(begin, end)
        passed = ScanProgress(self.files)
        # The first message comes without waiting for others.
        num, search = 1, None
        while at < stop:
            passed.reach(at)
            region, base, is_gone = self._segment_of(at, stop)
            if region is None:
                if is_gone:
                    (on_gone or self.warn_of_missing)(at, min(base, stop))
                else:
                    if on_missing is not None:
                        on_missing(at, base)
                    yield Damage(at, base - at, Verdict.EMPTY)
                at = base
                continue
            messages, pos = _read.read_messages(
                region, at - base, stop - base, base, num, _READ_AHEAD_SIZE, self.crc_check
            )
            if messages:
                yield messages
                at = base + pos
                num = min(2 * num, _READ_AHEAD_NUM)
                continue
            verdict = _core.check_record(region, at - base, base, 0)[0]
            if verdict is Verdict.RECORD:
                # Its writer completed it just now.
                continue
            if verdict is Verdict.BLANK:
                yield Blank(at, base + self.segment_size - at)
                at = base + self.segment_size
            else:
                search = search_in(region, base, search)
                found = search.find(at - base + 1)
                until = min(base + (found if found >= 0 else self.segment_size), stop)
                yield Damage(at, until - at, verdict)
                at = until

    def fill(
        self,
        columns: ArrowColumns,
        begin: int | None = None,
        end: int | None = None,
        on_damage: Callable[[int, int, Verdict | None], None] | None = None,
    ) -> Iterator[int]:
        """Fill `columns` with the chosen records of the log, without damaged stretches.

        - `on_damage`: called with the begin, the end (maybe after `end`), and the verdict of each skipped stretch; None if no
          segment holds it, also before the oldest one.  It may take the columns, and raise.
        - Yields int: the next offset, when the columns are full and at the end; the caller must take the rows.
        """
        at, stop = self._bounds(begin, end)
        if on_damage is not None and begin is not None and begin < min(at, stop):
            on_damage(begin, min(at, stop), None)
        passed = ScanProgress(self.files)
        search = None
        while at < stop:
            passed.reach(at)
            region, base, _ = self._segment_of(at, stop)
            if region is None:
                if on_damage is not None:
                    on_damage(at, base, None)
                at = base
                continue
            limit = min(stop, at + SCAN_WINDOW) - base
            pos, verdict = columns.fill(region, at - base, limit, base)
            at = base + pos
            if verdict == Verdict.COLUMNS_FULL:
                yield at
            elif verdict == Verdict.BLANK:
                at = base + self.segment_size
            elif verdict != Verdict.LIMIT:
                search = search_in(region, base, search)
                found = search.find(pos + 1)
                until = base + (found if found >= 0 else self.segment_size)
                if on_damage is not None:
                    on_damage(at, until, verdict)
                at = until
        yield at

    def step_to(self, begin: int, goal: int) -> int:
        """Step over record headers, and over damage like `fill`, to the first offset at or after `goal` at which `fill` continues.

        - `begin`: the offset of a record or a segment.
        """
        # Every scan passes the start of every segment.
        at = max(begin, goal - goal % self.segment_size)
        mapped_file = self.files.find(at)
        if mapped_file is None:
            return max(at, goal)
        base, region = mapped_file.file_from_offset, mapped_file.region
        passed = ScanProgress(self.files)
        search = _core.RecordSearch(region, base)
        while at < goal:
            passed.reach(at)
            pos, verdict, _, _ = _dispatch.walk(region, at - base, min(goal, at + SCAN_WINDOW) - base, base)
            at = base + pos
            if verdict == Verdict.BLANK:
                at = base + region.size
            elif verdict != Verdict.LIMIT:
                found = search.find(pos + 1)
                at = base + (found if found >= 0 else region.size)
        return at

    def step_before(self, begin: int, goal: int) -> int:
        """Step like `step_to`, to the last place at or before `goal`; at least `begin`, or its segment's start."""
        answer = at = max(begin, goal - goal % self.segment_size)
        mapped_file = self.files.find(at)
        while mapped_file is not None and at < goal:
            base = mapped_file.file_from_offset
            pos, verdict, _, last = _dispatch.walk(mapped_file.region, at - base, goal - base, base)
            if verdict == Verdict.LIMIT:
                return goal if base + pos == goal else base + last
            answer = base + pos
            at = self.step_to(answer, answer + 1)
            if at > goal:
                break
            answer = at
        return answer

    def step_over(self, begin: int, goal: int, num: int) -> int:
        """Step like `step_to`, over `num` records, but not past `goal`."""
        at = begin
        while at < goal and num > 0:
            mapped_file = self.files.find(at)
            if mapped_file is None:
                at = min((base for base in self.files.offsets if base > at), default=goal)
                continue
            base = mapped_file.file_from_offset
            pos, verdict, passed, _ = _dispatch.walk(mapped_file.region, at - base, goal - base, base, 0, num)
            at, num = base + pos, num - passed
            if verdict != Verdict.LIMIT:
                at = self.step_to(at, at + 1)
        return min(at, goal)

    def warn_of_missing(self, begin: int, end: int) -> None:
        """Log once for each missing segment that its messages are left out; `begin` and `end` are rounded to segments."""
        base, end = begin - begin % self.segment_size, -(-end // self.segment_size) * self.segment_size
        if base not in self._warned_of:
            self._warned_of.add(base)
            logger.warning(
                "%s: no segment holds phy offsets %d to %d, retention deleted it or it is lost; its messages are left out",
                os.path.join(self.path, name_of_offset(base)), base, end,
            )  # fmt: skip
