"""The end of the log, and the check of a reader that a writer did not cut it.

Owns the walk to the end by record headers, the search after damage in the newest segment, and the newest record that a reader
saw.  It changes nothing on disk.
"""

from __future__ import annotations

import os
import threading
import time

from rmqstore import _core, _dispatch
from rmqstore._core import Verdict
from rmqstore.commitlog.log_walk import LogWalk
from rmqstore.config import StoreConfig
from rmqstore.errors import OffsetOutOfRangeError, StoreChangedError
from rmqstore.files.checkpoint import marked_end
from rmqstore.files.mapped_file_queue import MappedFileQueue
from rmqstore.files.store_lock import abort_mark
from rmqstore.message import MessageExt

__all__ = ["LogEnd"]

# Sizes, magic, CRC, queue, offsets, flags and times: they differ in any two records of a log.
_HEAD_SIZE = 64
# A broker copies a record within microseconds of its store time; a reader waits this long (ms), also for a stopped writer.
_COPIED_WITHIN = 5000


class LogEnd(LogWalk):
    """The search for the end of the segments."""

    def __init__(self, files: MappedFileQueue, config: StoreConfig):
        super().__init__(files, config)
        self._refreshing = threading.Lock()
        # Phy offset and first bytes of the newest record that this reader saw.
        self._last_seen: tuple[int, bytes] = (-1, b"")
        # The last walked segment: its offset, its number of records, position and first bytes of its last record.
        self._walked: tuple[int, int, int, bytes] = (-1, 0, 0, b"")

    def renew_lock(self) -> None:
        """Replace the lock after a fork."""
        self._refreshing = threading.Lock()

    def _walk_from_start(self, base: int) -> tuple[int, Verdict, int, int]:
        # `_dispatch.walk` through a whole segment; a second walk starts at the last record, if it is still there.  Opening a store
        # walks several times, and a segment holds millions of records.
        region = self.files.file(base).region
        walked, num, last, head = self._walked
        if walked == base and last + _HEAD_SIZE <= region.size and region.read(last, _HEAD_SIZE) == head:
            pos, verdict, more, newest = _dispatch.walk(region, last, self.segment_size, base)
            num, last = num - 1 + more, newest
        else:
            more = 0
        if more == 0:
            pos, verdict, num, last = _dispatch.walk(region, 0, self.segment_size, base)
        self._walked = (base, num, last, region.read(last, _HEAD_SIZE)) if num else (-1, 0, 0, b"")
        return pos, verdict, num, last

    def find_end(self) -> int:
        """Return the offset after the last record that can be reached from the start of the newest segment with records.

        A broker that was shut down in order continues here.
        """
        for base in reversed(self.files.offsets):
            pos, verdict, num, _ = self._walk_from_start(base)
            if verdict == Verdict.BLANK:
                return base + self.segment_size
            if num or verdict != Verdict.EMPTY or base == self.files.min_offset:
                return base + pos
        return max(self.files.min_offset, 0)

    def last_store_timestamp(self) -> int | None:
        """Return the store time of the last record in the newest segment with records, also after damage; ms since epoch."""
        for base in reversed(self.files.offsets):
            pos, verdict, num, last = self._walk_from_start(base)
            limit = min(self.files.wrote_where - base, self.segment_size)
            if verdict != Verdict.BLANK and pos < limit:
                # Damage: the log continues after it.
                newest = self._newest_in(base, limit)
                if newest:
                    return newest
            elif num:
                return _core.check_record(self.files.file(base).region, last, base, 0)[2]
        return None

    def last_record(self) -> int:
        """Return the phy offset of the last record before `find_end`, -1 for none."""
        for base in reversed(self.files.offsets):
            _, _, num, last = self._walk_from_start(base)
            if num:
                return base + last
        return -1

    def find_end_behind_damage(self) -> int:
        """Return `find_end`, or the end after damage in the newest segment if whole records follow it.

        Old records that a truncation of RocketMQ left do not count: they are older than the record before, and beyond the end in
        the checkpoint.
        """
        return self._end_behind(self.find_end())

    def _end_behind(self, end: int) -> int:
        # The end of whole records that follow `end`, also in later segments and after more damage; `end` without such records.
        newest, after = -1, end + 1
        for base in self.files.offsets:
            if base + self.segment_size <= end:
                continue
            mapped_file = self.files.file(base)
            region, search, limit = mapped_file.region, None, 0
            while (start := max(after - base, 0)) < region.size:
                if search is None:
                    search, limit = _core.RecordSearch(region, base), mapped_file.last_nonzero(start)
                found = search.find(start, limit)
                if found < 0:
                    break
                if newest < 0:
                    newest = self._newest_before(end)
                # Remains after a cut by RocketMQ are older than the record before.  So are records after the clock was set back,
                # but these are before the end in the checkpoint's mark.
                is_older = _core.check_record(region, found, base, 0)[2] < newest
                if is_older and base + found >= marked_end(os.path.dirname(self.files.path)):
                    return end
                pos, verdict, num, last = _dispatch.walk(region, found, region.size, base)
                if num:
                    newest = _core.check_record(region, last, base, 0)[2]
                end = base + (region.size if verdict == Verdict.BLANK else pos)
                after = end + (verdict != Verdict.BLANK)
        return end

    def known_end(self) -> int:
        """Return the end for a reader of everything, after damage in the newest segment if records follow; call `follow` first."""
        return self._known_end(self.find_end())

    def _known_end(self, reached: int) -> int:
        # `reached` is the result of `find_end`.
        end, behind = self.files.wrote_where, self._end_behind(reached)
        mapped_file = self.files.find(reached)
        if behind <= reached or mapped_file is None:
            return end
        base = mapped_file.file_from_offset
        # A running writer completes the record here before it writes the next one.
        now = _core.check_record(mapped_file.region, reached - base, base, 0)[0]
        return end if now in (Verdict.RECORD, Verdict.BLANK) else behind

    def _newest_before(self, end: int) -> int:
        # The store time of the last record before `end` in its segment, 0 for none.
        mapped_file = self.files.find(end)
        if mapped_file is None:
            return 0
        base = mapped_file.file_from_offset
        return self._newest_in(base, end - base)

    def _newest_in(self, base: int, limit: int) -> int:
        # The same for the first `limit` bytes of a segment.
        region = self.files.file(base).region
        at, newest, search = 0, 0, _core.RecordSearch(region, base)
        while at < limit:
            pos, _, _, last = _dispatch.walk(region, at, limit, base)
            if last >= 0:
                newest = _core.check_record(region, last, base, 0)[2]
            found = search.find(pos + 1, limit)
            if found < 0:
                break
            at = found
        return newest

    def refresh(self) -> None:
        """Pick up records that another process appended (read-only use)."""
        with self._refreshing:
            self._check_last_seen()
            self.files.refresh()
            end = self.files.wrote_where
            while (mapped_file := self.files.find(end)) is not None:
                base, region = mapped_file.file_from_offset, mapped_file.region
                pos, verdict, _, last = _dispatch.walk(region, end - base, self.segment_size, base, self.crc_check)
                if last >= 0 and self._is_unfinished(region, last):
                    pos, verdict = last, Verdict.EMPTY
                end = base + (self.segment_size if verdict == Verdict.BLANK else pos)
                if last >= 0 and pos > last:
                    self._last_seen = (base + last, region.read(last, _HEAD_SIZE))
                if verdict != Verdict.BLANK:
                    # Neither a record, nor zeros before one that is being written.
                    if verdict not in (Verdict.EMPTY, Verdict.RECORD):
                        end = self._end_behind(end)
                    break
            self.files.wrote_where = end

    def follow(self) -> None:
        """Find the end, see `known_end`, and remember the last record, so that `refresh` detects a cut (read-only use)."""
        end = reached = self.find_end()
        for base in reversed(self.files.offsets):
            region = self.files.file(base).region
            _, verdict, num, last = self._walk_from_start(base)
            if num and verdict != Verdict.BLANK:
                # The newest record may still be written.
                sound = _core.check_record(region, last, base, self.crc_check)[0] == Verdict.RECORD
                if not sound or self._is_unfinished(region, last):
                    end = base + last
                    _, _, num, last = _dispatch.walk(region, 0, last, base)
            if num:
                self._last_seen = (base + last, region.read(last, _HEAD_SIZE))
                break
        self.files.wrote_where = end
        self.files.wrote_where = max(self._known_end(reached), end)

    def _check_last_seen(self) -> None:
        # A recovering writer cuts torn records; a reader that saw them must not continue after them.
        phy_offset, head = self._last_seen
        mapped_file = self.files.find(phy_offset) if head else None
        if mapped_file is None:
            return
        self.files.forget_replaced_behind(phy_offset)
        replaced = self.files.was_replaced()
        try:
            now = mapped_file.region.read(phy_offset - mapped_file.file_from_offset, _HEAD_SIZE)
        except OffsetOutOfRangeError:
            return
        if replaced or now != head:
            raise StoreChangedError(
                f"the record at phy offset {phy_offset} is gone: the log was cut or replaced since this store was opened (maybe "
                "its writer recovered it after a crash); open it again",
                mapped_file.path,
                phy_offset - mapped_file.file_from_offset,
            )

    def _is_unfinished(self, region: _core.Region, pos: int) -> bool:
        # A Java broker copies a record from start to end: its last bytes may be missing.  Brokers of 4.9.1 to 5.1.4 also store
        # properties that end in zeros: such records are whole in a closed store, or after a while.
        record = _core.decode_record(region, pos, -1, 0)
        if not isinstance(record, tuple):
            return True
        message = MessageExt(record)
        if not (message.topic.endswith("\0") or message.properties_stored.endswith(b"\0")):
            return False
        return (
            abort_mark(os.path.dirname(self.files.path)) is not None
            and abs(time.time_ns() // 1_000_000 - message.store_timestamp) < _COPIED_WITHIN
        )
