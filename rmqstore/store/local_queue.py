"""A queue of the local store as a source of messages, read as RocketMQ 5.5.0 does (DefaultMessageStore.getMessage)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._columns import ArrowColumns
from rmqstore._core import Region, Verdict, check_record
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.pieces import ScanProgress
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.unit_queue import BLOCK_UNITS
from rmqstore.errors import OffsetOutOfRangeError, UnsupportedFormatError
from rmqstore.message import MessageExt, _read, is_light_queue
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import STEP, DamagePolicy, Places, Pulled, fill_from
from rmqstore.spans import Span

__all__ = ["EXAMINED", "LocalQueue", "judge", "refuse_light_queues"]

_UNIT_SIZE = int(_core.UnitLayout.UNIT_SIZE)
EXAMINED = 16000 // 20
"""Units that one get examines at most (RocketMQ 5.5.0 MessageStoreConfig.maxFilterMessageSize, in bytes)."""


class LocalQueue:
    """A queue and its log; see `QueueSource` for the methods."""

    def __init__(self, queue: AnyConsumeQueue, log: CommitLog, damage: DamagePolicy | None = None):
        self.queue, self.log, self.damage = queue, log, damage

    @property
    def topic(self) -> str:
        """str: the queue's."""
        return self.queue.topic

    @property
    def queue_id(self) -> int:
        """int: the queue's."""
        return self.queue.queue_id

    def places(self, begin: int, end: int, step: int = STEP) -> Iterator[Places]:
        """Yield places, see `QueueSource.places`; the queue sets the steps."""
        return self.queue.places(begin, end, self.damage)

    def resolved_codes(self, codes: np.ndarray) -> np.ndarray:
        """Resolve addresses in the extension, see `QueueSource.resolved_codes`."""
        return self.queue.resolved_codes(codes)

    def read(self, selection: Selection, end: int, max_bytes: int) -> Pulled:
        """Read messages, see `QueueSource.read`; a get ends with the queue's file, not at `end`."""
        if selection.tags is None or (self.queue.ext is None and not self.queue.torn_units()):
            found = self.queue.region_of(selection.begin_queue_offset or 0, max(EXAMINED, selection.max_num or 0))
            if found is not None:
                return self.read_units(*found, selection, max_bytes)
        return self.walk(selection, max_bytes)

    def read_units(self, units: Region, pos: int, num: int, selection: Selection, max_bytes: int) -> Pulled:
        """Read 20-byte units of one file whose tags codes are known, with one call for each segment."""
        queue_offset = selection.begin_queue_offset or 0
        max_num = min(max(selection.max_num or 0, 0), INT64_MAX)
        log, messages = self.log, []  # type: ignore[var-annotated]
        codes = selection.tag_codes
        tags = None if selection.tags is None else frozenset(selection.tags)
        at = size = 0
        following, missing, full, examined = queue_offset, False, False, False
        while at < num and not full:
            phy_offset = units.get_i64(pos + at * _UNIT_SIZE)
            segment = log.region_of(phy_offset)
            # A unit that points to no segment is skipped after its limits and tags were compared.
            region, base, first, last_offset = (units, 0, 0, 0) if segment is None else segment
            done, last, size, full, gone = _read.read_queued(
                units, pos + at * _UNIT_SIZE, num - at, region, base, first, last_offset,
                messages, size, max_num, max_bytes, log.crc_check, codes, tags, self.topic, self.queue_id,
                queue_offset + at,
            )  # fmt: skip
            missing |= gone
            if last >= 0:
                examined, following = True, queue_offset + at + last + 1
            at += done
            if segment is None and not done and not full:
                missing, examined, at = missing or not messages, True, at + 1
                following = queue_offset + at
        return self._pulled(messages, following, examined, missing)

    def _pulled(self, messages: list[MessageExt], following: int, examined: bool, missing: bool) -> Pulled:
        if not messages and not examined:
            return Pulled(messages, self.queue.next_file_offset(following), "OFFSET_FOUND_NULL")
        return Pulled(messages, following, "MESSAGE_WAS_REMOVING" if missing else "NO_MATCHED_MESSAGE")

    def walk(self, selection: Selection, max_bytes: int) -> Pulled:
        """Read unit by unit: any kind of queue."""
        queue_offset, max_num = selection.begin_queue_offset or 0, selection.max_num or 0
        messages: list[MessageExt] = []
        taken = size = 0
        following, missing, examined = queue_offset, False, False
        for unit in self.queue.read(queue_offset, max(EXAMINED, max_num)):
            if taken and (taken + unit.num > max_num or size + unit.size > max_bytes):
                break
            examined = True
            following = unit.queue_offset + unit.num
            # A code that cannot be read passes.
            if selection.tags is not None and not selection.may_have_code(self.queue.tags_code(unit)):
                continue
            message = self.log.look_up(unit.phy_offset, unit.size)
            if message is None:
                missing |= not messages
                continue
            message.check_queue(self.topic, self.queue_id, unit.queue_offset)
            if selection.tags is not None and message.tags not in selection.tags:
                continue
            messages.append(message)
            taken += unit.num
            size += unit.size
        return self._pulled(messages, following, examined, missing)

    def find_in_times(self, begin: int, end: int, times: Span, *, newest: bool) -> int | None:
        """Search store times, see `QueueSource.find_in_times`; units that point to no record are skipped."""
        out = ArrowColumns(("store_timestamp",), BLOCK_UNITS)
        passed = ScanProgress(self.log.files)

        def times_of(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
            found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
            for each in self.queue.numbered_places(first, last):
                places = each.where(each.are_real)
                if len(places):
                    passed.reach(int(places.phy_offsets[0]))
                taken = fill_from(self.log, places, out)
                num, parts, _ = out.take()
                stored = np.frombuffer(parts["store_timestamp"][0], np.int64)[:num]
                found.append((places.queue_offsets[taken], stored))
            return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])

        spans = self.queue.spans(begin, end, backward=newest)
        return self.queue.times.find(spans, times, times_of, newest=newest)

    def report_unread(self, places: Places) -> None:
        """Report missing records, see `QueueSource.report_unread`; without a policy, warn of records before the log."""
        phy_offsets, sizes = places.phy_offsets[places.are_real], places.sizes[places.are_real]
        if self.damage is None:
            low = self.log.min_offset
            before = phy_offsets[phy_offsets < low]
            if len(before):
                self.log.warn_of_missing(int(before.min()), low)
            return
        for phy_offset, size in zip(phy_offsets.tolist(), sizes.tolist()):
            self.damage.stretch(phy_offset, phy_offset + size, judge(self.log, phy_offset, size))


def judge(log: CommitLog, phy_offset: int, size: int) -> Verdict | None:
    """Return the verdict on a place without a record of this size; None if no segment holds it."""
    try:
        mapped_file = log.segment(phy_offset)
        base = mapped_file.file_from_offset
        verdict, found, _ = check_record(mapped_file.region, phy_offset - base, base, 0)
        return Verdict.BAD_SIZE if verdict is Verdict.RECORD and found != size else verdict
    except OffsetOutOfRangeError:
        return None


def refuse_light_queues(
    commit_log: CommitLog, find: Callable[[str, int], AnyConsumeQueue | None], topics: Iterable[str] | None
) -> None:
    """Raise UnsupportedFormatError if one of `topics` is a light queue, which no message has as its own topic."""
    for topic in topics or ():
        queue = find(topic, 0) if is_light_queue(topic) else None
        if queue is None:
            continue
        first = next(iter(queue.read(queue.bounds(commit_log.min_offset)[0], 1)), None)
        message = None if first is None else commit_log.look_up(first.phy_offset)
        if message is None or message.topic != topic:
            raise UnsupportedFormatError(
                f"{topic} is a light queue: its messages were sent to other topics, so that no row has it as its topic. Read it "
                "as a queue: get_message, get_table or consume, rmqstore get or export, or Spark with the options topic and "
                "mode=queue",
                commit_log.path,
            )
