"""One queue in tiered storage: its units and the records that they point to, by queue offset, store time and key.

Holes, and units that point to no record, are reported to `damage`.

Facts (RocketMQ 5.5.0): COMMIT_LOG holds the records of the queue back to back, with the offset in this log at bytes 28 to 35
instead of the one that they had; CONSUME_QUEUE holds 20-byte units, base offset = 20 * queue offset of the first.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from rmqstore import _numpy as np
from rmqstore._columns import ArrowColumns
from rmqstore._core import UnitLayout, Verdict
from rmqstore.consumequeue.unit_queue import BLOCK_UNITS, UnitTimes
from rmqstore.errors import Finding, Sentence
from rmqstore.files.mapped_file import MappedFilePool, NotCopied
from rmqstore.flatfile.flat_files import FlatFiles, FlatLog
from rmqstore.index.key_source import Candidates, SoughtKeys
from rmqstore.message import MessageExt, _read, encode_java_utf8
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import EXPIRED, STEP, DamagePolicy, Places, Pulled, fill_from, without_record
from rmqstore.spans import without

__all__ = ["FlatQueue"]

UNIT_SIZE = int(UnitLayout.UNIT_SIZE)
_UNIT = struct.Struct(">qiq")
# Units that one read examines at most (RocketMQ's maxFilterMessageSize).
_EXAMINED = 16000 // UNIT_SIZE


class FlatQueue(NotCopied):
    """A queue of one topic in tiered storage; unreadable places are reported to `damage`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        topic: str,
        queue_id: int,
        pool: MappedFilePool,
        damage: DamagePolicy,
        log_sizes: Mapping[int, int] | None = None,
        unit_sizes: Mapping[int, int] | None = None,
        *,
        goes_on: bool = False,
    ):
        self.path = os.fspath(path)
        self.topic, self.queue_id = topic, queue_id
        self.damage = damage
        self.log = FlatLog(os.path.join(self.path, "COMMIT_LOG"), pool, log_sizes, goes_on=goes_on)
        self.units = FlatFiles(os.path.join(self.path, "CONSUME_QUEUE"), pool, unit_sizes, goes_on=goes_on)
        self.min_queue_offset = self.max_queue_offset = 0
        self._known_times = UnitTimes()
        self._find_bounds()

    def load(self, log_sizes: Mapping[int, int] | None = None, unit_sizes: Mapping[int, int] | None = None) -> None:
        """List the folders again."""
        self._known_times = UnitTimes()
        # Units first: records are written before their units.
        self.units.load(unit_sizes)
        self.log.load(log_sizes)
        self._find_bounds()

    def _find_bounds(self) -> None:
        low, high = -(-self.units.min_offset // UNIT_SIZE), self.units.max_offset // UNIT_SIZE
        # The file may be deleted at any time; then the bounds of the units count.
        there = self.log.min_offset > 0 and self.log.region_if_there(self.log.min_offset) is not None
        first = self.log.look_up(self.log.min_offset) if there else None
        if first is not None and low < first.queue_offset < high:
            # A damaged number must not hide messages, so it counts only if its unit points to the record.
            there = self.units.region_if_there(first.queue_offset * UNIT_SIZE) is not None
            unit = self.unit_at(first.queue_offset) if there else None
            if unit is not None and unit[0] == self.log.min_offset:
                low = first.queue_offset
        self.min_queue_offset, self.max_queue_offset = low, max(high, low)

    @property
    def problems(self) -> list[Finding]:
        """list of Finding: problems of the files, holes included."""
        found = [*self.log.problems, *self.units.problems]
        lacks = self.lacks_units
        return found if lacks is None or lacks in found else [*found, lacks]

    @property
    def lacks_units(self) -> Finding | None:
        """Finding or None: the reason if the bounds of the queue are unknown: records without units, or an unreadable folder."""
        if self.units.unreadable is not None or self.log.unreadable is not None:
            return self.units.unreadable or self.log.unreadable
        if not len(self.log) or len(self.units) or self.units.holes:
            return None
        return Finding(self.units.path, 0, "missing_file", "there are no units, but the queue has records")

    def report_lacking(self) -> None:
        """Report that the bounds of the queue are unknown, if so."""
        if self.lacks_units is not None:
            self.damage.finding(self.lacks_units)

    def report_gap(self, begin: int, end: int) -> None:
        """Report queue offsets that neither tiered storage nor the local store has."""
        self.damage.finding(self.gap(begin, end))

    def gap(self, begin: int, end: int) -> Finding:
        """Return the finding that the queue offsets from `begin` up to but not including `end` no longer exist."""
        detail = f"queue offsets {begin} to {end} of {self.topic}/{self.queue_id} are in neither the local log nor tiered storage"
        return Finding(self.units.path, 0, "gap", f"{detail}; go on at {end}")

    def unit_of(self, log_offset: int) -> tuple[int, bool]:
        """Return the queue offset of the unit that points to this log offset, -1 for none; and False if that unit may be lost."""
        low, high = self.min_queue_offset, self.max_queue_offset
        while low < high:
            middle = (low + high) // 2
            unit = self.unit_at(middle)
            if unit is None or unit[1] <= 0:
                return -1, False
            if unit[0] == log_offset:
                return middle, True
            low, high = (middle + 1, high) if unit[0] < log_offset else (low, middle)
        return -1, True

    # ------------------------------------------------------------------------------------------------------ single

    def unit_at(self, queue_offset: int) -> tuple[int, int, int] | None:
        """Return log offset, record size and tags code of a unit; None if no file has it."""
        found = self.units.region_of(queue_offset * UNIT_SIZE)
        if found is None:
            return None
        region, base = found
        pos = queue_offset * UNIT_SIZE - base
        return _UNIT.unpack(region.read(pos, UNIT_SIZE)) if pos + UNIT_SIZE <= region.size else None

    def judge(self, log_offset: int, size: int, queue_offset: int) -> Finding:
        """Return why the unit at `queue_offset` points to no record of this size, or to that of another message."""
        # A deleted file becomes a hole.
        self.log.region_if_there(log_offset)
        self.units.region_if_there(queue_offset * UNIT_SIZE)
        if size <= 0:
            return self._blank(queue_offset, 1)
        unit_path, unit_pos = self.units.place_of(queue_offset * UNIT_SIZE)
        path, pos = self.log.place_of(log_offset)
        hole = self.log.hole_at(log_offset)
        if hole is not None:
            detail = (
                f"the record of queue offset {queue_offset}, at log offset {log_offset}, is gone: {hole.finding.detail}"
            )
            return Finding(path, pos, EXPIRED if hole.finding.kind == EXPIRED else "missing_file", detail)
        found = self.log.verdict_at(log_offset)
        if found is None:
            detail = f"leads to log offset {log_offset}, and the log holds {self.log.min_offset} to {self.log.max_offset}"
            return Finding(unit_path, unit_pos, "bad_unit", detail)
        other = self.log.look_up(log_offset, size)
        if other is not None:
            detail = f"queue offset {queue_offset} leads to log offset {log_offset}, where the record says that it is queue offset "
            detail += f"{other.queue_offset} of {other.topic}/{other.queue_id}"
            if (other.topic, other.queue_id) == (self.topic, self.queue_id) and other.queue_offset != queue_offset:
                known = self.unit_at(other.queue_offset)
                if known is not None and known[0] == log_offset:
                    # Another unit points to the record too, so that this one is wrong.
                    return Finding(unit_path, unit_pos, "bad_unit", detail)
            return Finding(path, pos, "bad_record", detail)
        verdict, actual = found
        what = (f"a record of {actual} bytes",) if verdict is Verdict.RECORD else ("no record (", verdict, ")")
        detail = Sentence(
            *what, f" where queue offset {queue_offset} has one of {size} bytes, at log offset {log_offset}"
        )
        return Finding(path, pos, "bad_record", detail)

    def _blank(self, queue_offset: int, num: int) -> Finding:
        path, pos = self.units.place_of(queue_offset * UNIT_SIZE)
        which = f"unit of queue offset {queue_offset} has"
        if num > 1:
            which = f"units of queue offsets {queue_offset} to {queue_offset + num} have"
        return Finding(path, pos, "bad_unit", f"the {which} no size, and so no record", num=num)

    def _blank_to(self, queue_offset: int, end: int) -> int:
        # The queue offset after a run of units without a size, in one file.
        found = self.units.region_of(queue_offset * UNIT_SIZE)
        while found is not None and queue_offset < end:
            pos = queue_offset * UNIT_SIZE - found[1]
            num = min((found[0].size - pos) // UNIT_SIZE, end - queue_offset, STEP)
            sizes = np.frombuffer(found[0].read(pos, max(num, 0) * UNIT_SIZE), _unit_type())["s"]
            written = np.flatnonzero(sizes > 0)
            if len(written) or num <= 0:
                return queue_offset + (int(written[0]) if len(written) else 0)
            queue_offset += num
        return queue_offset

    def no_unit(self, queue_offset: int) -> tuple[Finding, int]:
        """Return why no file has the unit at `queue_offset`, and the queue offset of the next one."""
        begin = queue_offset * UNIT_SIZE
        hole = next((each for each in self.units.holes if each.begin < begin + UNIT_SIZE and each.end > begin), None)
        if hole is None and begin < self.units.min_offset:
            return self._gone(queue_offset, -(-self.units.min_offset // UNIT_SIZE))
        if hole is None:
            # Its files are not cut at multiples of a unit.
            detail = f"queue offset {queue_offset} has no whole unit"
            return Finding(*self.units.place_of(begin), "bad_unit", detail), queue_offset + 1
        following = max(-(-hole.end // UNIT_SIZE), queue_offset + 1)
        detail = f"queue offsets {queue_offset} to {following} have no units: {hole.finding.detail}"
        kind = EXPIRED if hole.finding.kind == EXPIRED else "missing_file"
        return Finding(hole.finding.path, hole.finding.pos, kind, detail), following

    def _gone(self, begin: int, end: int) -> tuple[Finding, int]:
        kind = EXPIRED if begin < self.min_queue_offset else "missing_file"
        detail = f"queue offsets {begin} to {end} of {self.topic}/{self.queue_id} were deleted in the meantime"
        return Finding(self.path, 0, kind, detail), end

    def read(self, selection: Selection, end: int, max_bytes: int) -> Pulled:
        """Read messages for one get, see `QueueSource`; it ends before an unreadable place, and reports one that is the first."""
        queue_offset, max_num = selection.begin_queue_offset or 0, min(max(selection.max_num or 0, 0), INT64_MAX)
        found = self._read_whole(selection, end, max_num, max_bytes)
        if found is not None:
            return Pulled(*found)
        messages: list[MessageExt] = []
        size, last = 0, min(end, queue_offset + max(_EXAMINED, max_num))
        at = queue_offset
        while at < last:
            unit = self.unit_at(at)
            if unit is None:
                if messages:
                    break
                finding, at = self.no_unit(at)
                self.damage.finding(finding)
                continue
            log_offset, record_size, code = unit
            if messages and (len(messages) >= max_num or size + record_size > max_bytes):
                break
            if not selection.may_have_code(code):
                at += 1
                continue
            message = self.log.look_up(log_offset, record_size)
            if message is None:
                if messages:
                    break
                self.damage.finding(self.judge(log_offset, record_size, at))
                at += 1
                continue
            message.check_queue(self.topic, self.queue_id, at)
            at += 1
            if selection.tags is not None and message.tags not in selection.tags:
                continue
            messages.append(message)
            size += record_size
        return Pulled(messages, min(at, max(end, queue_offset)))

    def _read_whole(
        self, selection: Selection, end: int, max_num: int, max_bytes: int
    ) -> tuple[list[MessageExt], int] | None:
        # Read like `read`, with one call of the core a flat file, within one file of units; None if a unit points to no record.
        queue_offset = selection.begin_queue_offset or 0
        units = self.units.region_of(queue_offset * UNIT_SIZE)
        if units is None or max_num < 1:
            return None
        begin = queue_offset * UNIT_SIZE - units[1]
        num = min((units[0].size - begin) // UNIT_SIZE, end - queue_offset, max(_EXAMINED, max_num))
        codes = selection.tag_codes
        tags = None if selection.tags is None else frozenset(selection.tags)
        messages: list[MessageExt] = []
        at = size = 0
        following, full = queue_offset, False
        while at < num and not full:
            pos = begin + at * UNIT_SIZE
            log = self.log.region_of(units[0].get_i64(pos))
            if log is None:
                return None
            (region, base), before = log, len(messages)
            done, last, size, full, gone = _read.read_queued(
                units[0], pos, num - at, region, base, base, base + region.size, messages, size, max_num, max_bytes,
                self.log.crc_check, codes, tags, self.topic, self.queue_id, queue_offset + at,
            )  # fmt: skip
            if gone or not (done or full):
                return None
            chosen = done
            if codes is not None:
                read = np.frombuffer(units[0].read(pos, done * UNIT_SIZE), _unit_type())
                chosen = int(np.count_nonzero(selection.may_have_codes(read["c"].astype(np.int64))))
            if len(messages) - before < chosen:
                # A record between them is damaged, or a hash is that of another tag.
                return None
            if last >= 0:
                following = queue_offset + at + last + 1
            at += done
        return messages, following

    # -------------------------------------------------------------------------------------------------- by time

    def store_timestamp_of(self, queue_offset: int) -> int:
        """Return the store time of a message in ms since epoch, -1 if its unit does not point to it."""
        unit = self.unit_at(queue_offset)
        message = None if unit is None else self.log.look_up(unit[0], unit[1])
        # A wrong unit may point to the record of another message.
        if message is None or not message.check_queue(self.topic, self.queue_id, queue_offset):
            return -1
        return message.store_timestamp

    def find_in_times(self, begin: int, end: int, times: tuple[int, int], *, newest: bool) -> int | None:
        """Find a message by store time, see `rmqstore.sources.QueueSource`."""
        begin, end = max(begin, self.min_queue_offset), min(end, self.max_queue_offset)
        holes = [(hole.begin // UNIT_SIZE, -(-hole.end // UNIT_SIZE)) for hole in self.units.holes]
        there = without(begin, end, holes)
        parts = sorted([*((*span, True) for span in there), *((*span, False) for span in without(begin, end, there))])
        for first, last, is_there in reversed(parts) if newest else parts:
            if not is_there:
                self.damage.finding(self.no_unit(first)[0])
                continue
            found = self._known_times.find([(first, last)], times, self._times, newest=newest)
            if found is not None:
                return found
        return None

    def _times(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        # The `times_of` of `UnitTimes.find`.  A wrong unit may point to the record of another message.
        out = ArrowColumns(("store_timestamp", "queue_offset"), BLOCK_UNITS)
        out.choose([encode_java_utf8(self.topic)], [self.queue_id])
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for places in self.places(begin, end, BLOCK_UNITS):
            taken = fill_from(self.log, places, out)
            num, parts, _ = out.take()
            stored, said = (np.frombuffer(parts[name][0], np.int64)[:num] for name in out.columns)
            numbers = places.queue_offsets[taken]
            right = said == numbers
            rest = places.queue_offsets[~np.isin(places.queue_offsets, numbers[right])]
            reached = begin
            for queue_offset in rest.tolist():
                if queue_offset >= reached:
                    finding, reached = self.why_unread(queue_offset, int(places.queue_offsets[-1]) + 1)
                    self.damage.finding(finding)
            found.append((numbers[right], stored[right]))
        return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])

    def why_unread(self, queue_offset: int, end: int) -> tuple[Finding, int]:
        """Return why the message at `queue_offset` cannot be read, and the queue offset, `end` at most, at which to continue."""
        unit = self.unit_at(queue_offset)
        if unit is None:
            return self.no_unit(queue_offset)
        if unit[1] > 0:
            return self.judge(unit[0], unit[1], queue_offset), queue_offset + 1
        following = self._blank_to(queue_offset, end)
        return self._blank(queue_offset, following - queue_offset), following

    # -------------------------------------------------------------------------------------------------------- many

    def places(self, begin: int, end: int, step: int = STEP) -> Iterator[Places]:
        """Yield the places from queue offset `begin` up to but not including `end`, see `rmqstore.sources.QueueSource`."""
        at, stop = begin, min(end, self.max_queue_offset)
        if begin < min(self.min_queue_offset, end):
            finding, at = self._gone(begin, min(self.min_queue_offset, end))
            self.damage.finding(finding)
        while at < stop:
            found = self.units.region_if_there(at * UNIT_SIZE)
            pos = 0 if found is None else at * UNIT_SIZE - found[1]
            num = 0 if found is None else min((found[0].size - pos) // UNIT_SIZE, stop - at, step)
            if found is None or num <= 0:
                finding, at = self.no_unit(at)
                self.damage.finding(finding)
                continue
            packed = np.frombuffer(found[0].read(pos, num * UNIT_SIZE), _unit_type())
            offsets, sizes, codes = packed["o"].astype(np.int64), packed["s"].astype(np.int32), packed["c"].astype(np.int64)
            yield Places(offsets, np.arange(at, at + num), sizes, codes)
            at += num
        if max(at, stop) < end:
            self.damage.finding(self._gone(max(at, stop), end)[0])

    def resolved_codes(self, codes: np.ndarray) -> np.ndarray:
        """Return the tags codes themselves: there is no extension."""
        return codes

    def report_unread(self, places: Places) -> None:
        """Report units that point to no record, or to that of another message, one by one."""
        for unit in zip(places.phy_offsets.tolist(), places.sizes.tolist(), places.queue_offsets.tolist()):
            self.damage.finding(self.judge(*unit))

    def find_keys(self, sought: SoughtKeys, begin: int, end: int) -> Iterator[int]:
        """Scan the records for a key, and yield log offsets; queue offsets are from `begin` up to but not including `end`."""
        # Tags are in the units.
        units = Selection(tags=sought.selection.keys if sought.selection.index_type == "T" else None)
        for each in self.places(begin, end):
            places = each[units.may_have_codes(each.tags_codes)]
            same = np.zeros(len(places), np.int32)
            taken = sought.matching(self.log, Candidates(same, places.phy_offsets))[1]
            yield from places.phy_offsets[taken].tolist()
            rest = places[~taken]
            self.report_unread(rest[without_record(self.log, rest)])

    def close(self) -> None:
        """Close the files."""
        self.log.close()
        self.units.close()


def _unit_type() -> Any:
    return np.dtype([("o", ">i8"), ("s", ">i4"), ("c", ">i8")])
