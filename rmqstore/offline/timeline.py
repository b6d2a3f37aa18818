"""Messages and bytes over time, estimated by sampling the log; and those after a place, counted.

A log of up to 32 MiB is scanned.  Of a longer one at most 256 records are read, at even distances.  Between two of them bytes
are taken to have come evenly, and messages by the sizes of the records at both.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.message import decode_java_utf8
from rmqstore.store.message_store import MessageStore

__all__ = ["EXACT_BYTES", "Timeline", "TimelineBin", "timeline"]

EXACT_BYTES = 32 << 20
"""A log of no more bytes is scanned as a whole."""

# Records that are read of a longer log, at even distances: so no column is wrong by more than two of them.
_PLACES = 256
# Bytes of records after a place, whose number says how large they are.
_RUN = 32 * 1024
# Bytes after a place in which a record is looked for.
_SEARCH = 1 << 20
# What lies outside is not a time.
_TIME_MAX = 2**62


@dataclass(frozen=True, slots=True)
class TimelineBin:
    """Messages and bytes of records with store times from `begin` up to but not including `end`, ms since epoch."""

    begin: int
    end: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What came when: bins one after the other, equally long; `exact` if every record was read, else at `places` of the log."""

    bins: tuple[TimelineBin, ...] = ()
    exact: bool = True
    places: int = 0

    def as_dict(self) -> dict[str, Any]:
        """dict: the fields, bins as a list of dicts."""
        return {"bins": [dataclasses.asdict(each) for each in self.bins], "exact": self.exact, "places": self.places}


class _Place(NamedTuple):
    phy_offset: int
    store_timestamp: int
    # Messages a byte, here.
    density: float


def timeline(store: MessageStore, *, bins: int = 60, messages: int | None = None) -> Timeline:
    """Estimate messages and bytes by store time, in at most `bins` (2 or more) equally long times.

    The estimate is scaled to `messages`, the number of all messages, where that is known.
    """
    if bins < 2:
        raise ValueError(f"bins is {bins}; give at least 2")
    log = store.commit_log
    low, high = log.min_offset, log.max_offset
    if high <= low:
        return Timeline()
    if high - low <= EXACT_BYTES:
        return _exact(log, low, high, bins)
    with log.single_records():
        places = _spread(log, low, high)
    found = _ordered(places)
    return Timeline(_binned(found, low, high, bins, messages) if len(found) > 1 else (), False, len(places))


def _exact(log: CommitLog, low: int, high: int, bins: int) -> Timeline:
    times, sizes = [], []
    for stretch, columns in log.scans(low, high, keys=False):
        if stretch.verdict is Verdict.RECORD:
            times.append(columns.store_timestamp[: columns.count].copy())
            sizes.append(columns.size[: columns.count].astype(np.int64))
    if not times:
        return Timeline()
    time, size = np.concatenate(times), np.concatenate(sizes)
    known = (time >= 0) & (time < _TIME_MAX)
    time, size = time[known], size[known]
    if not len(time):
        return Timeline()
    edges = _edges(int(time.min()), int(time.max()), bins)
    messages, total = (np.histogram(time, edges, weights=weights)[0] for weights in (None, size))
    return Timeline(_bins(edges, messages, total))


def _bins(edges: list[int], messages: np.ndarray, sizes: np.ndarray) -> tuple[TimelineBin, ...]:
    columns = zip(edges[:-1], edges[1:], messages.tolist(), sizes.tolist(), strict=True)
    return tuple(TimelineBin(begin, end, int(num), int(size)) for begin, end, num, size in columns)


def _edges(first: int, last: int, bins: int) -> list[int]:
    # Of bins that cover both times, as long as each other.
    step = max(-(-(last - first + 1) // bins), 1)
    return list(range(first, last + 1 + step, step))


def _spread(log: CommitLog, low: int, high: int) -> list[_Place]:
    # Places at even distances, in order; the last of `_PLACES` is the end.
    gap = -(-(high - low) // (_PLACES - 1))
    found = {place for begin in range(low, high, gap) if (place := _at_or_after(log, begin, gap)) is not None}
    places = sorted(found)
    last = log.last_store_timestamp()
    if last is not None and 0 <= last < _TIME_MAX and places:
        # The end is not a record, but what lies before it came until then.
        places.append(_Place(high, last, places[-1].density))
    return places


def _at_or_after(log: CommitLog, phy_offset: int, gap: int) -> _Place | None:
    # The first whole record at that place, or within `gap` bytes after it.
    known = log.region_of(phy_offset)
    if known is None:
        return None
    region, base, _, _ = known
    at = phy_offset - base
    found = _core.RecordSearch(region, base).find(at, min(at + min(gap, _SEARCH), region.size))
    if found < 0:
        # The end of a segment may have no record.
        left = phy_offset + gap - (base + log.segment_size)
        return _at_or_after(log, base + log.segment_size, left) if left > 0 else None
    begin = base + found
    time = log.store_timestamp_at(begin)
    end = min(begin + _RUN, base + log.segment_size, log.max_offset)
    run = next(iter(log.stretches(begin, end, check_crc=False, resume=False)), None)
    if not 0 <= time < _TIME_MAX or run is None or run.verdict is not Verdict.RECORD:
        return None
    return _Place(begin, time, run.records / (run.end - run.begin))


def _ordered(places: Sequence[_Place]) -> list[_Place]:
    # As many of them as have times in order: a clock that was set back, or a damaged time, is passed over.
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for number, place in enumerate(places):
        at = bisect_right(ends, place.store_timestamp)
        before.append(last[at - 1] if at else -1)
        if at == len(ends):
            ends.append(place.store_timestamp)
            last.append(number)
        else:
            ends[at], last[at] = place.store_timestamp, number
    found = []
    number = last[-1] if last else -1
    while number >= 0:
        found.append(places[number])
        number = before[number]
    return found[::-1]


def _binned(places: Sequence[_Place], low: int, high: int, bins: int, messages: int | None) -> tuple[TimelineBin, ...]:
    offsets = np.array([each.phy_offset for each in places], np.float64)
    times = np.array([each.store_timestamp for each in places], np.float64)
    density = np.array([each.density for each in places], np.float64)
    records = np.concatenate(([0.0], np.cumsum(np.diff(offsets) * (density[1:] + density[:-1]) / 2)))
    # Of places with the same time the last one says how far the log was then.
    is_last = np.append(times[1:] > times[:-1], True)
    edges = _edges(places[0].store_timestamp, places[-1].store_timestamp, bins)
    reached = np.interp(np.array(edges, np.float64), times[is_last], offsets[is_last])
    reached[0], reached[-1] = low, high
    came = np.interp(reached, offsets, records)
    if messages and came[-1] > came[0]:
        came = (came - came[0]) * (messages / (came[-1] - came[0]))
    # Rounded before the differences are taken, so that the sums stay right.
    up_to, num = np.rint(reached).astype(np.int64), np.rint(came).astype(np.int64)
    return _bins(edges, np.diff(num), np.diff(up_to))


@dataclass(slots=True)
class LostMessages:
    """The messages of a log from `phy_offset`: how many whole ones, and their bytes.

    `damaged_size` are the bytes up to the end that are no whole message; the timestamps are the least and greatest store time of
    the whole ones, ms since epoch; `topics` counts them by topic.
    """

    phy_offset: int
    messages: int = 0
    size: int = 0
    damaged_size: int = 0
    first_store_timestamp: int | None = None
    last_store_timestamp: int | None = None
    topics: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """dict: every attribute under its name, fit for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def messages_behind(
    path: str, config: StoreConfig, phy_offset: int, progress: Callable[[int, int], object] | None = None
) -> LostMessages:
    """Count what the log of the store at `path` holds from `phy_offset`; a message whose CRC fails is damaged.

    Raises
    ------
    StoreError, OSError
        The log cannot be read.
    """
    found = LostMessages(phy_offset)
    topics: Counter[str] = Counter()
    log = CommitLog(path, config, MappedFilePool(config.max_mapped_files), read_only=True)
    try:
        log.load()
        end = log.find_end_behind_damage()
        log.set_end(end)
        for stretch, columns in log.scans(phy_offset, end, keys=False):
            if progress is not None:
                progress(stretch.end - phy_offset, end - phy_offset)
            if stretch.verdict is not Verdict.RECORD:
                if stretch.verdict is not Verdict.BLANK:
                    found.damaged_size += stretch.end - stretch.begin
                continue
            rows = columns.count
            found.messages += rows
            found.size += stretch.end - stretch.begin
            times = columns.store_timestamp[:rows]
            first, last = int(times.min()), int(times.max())
            if found.first_store_timestamp is None or first < found.first_store_timestamp:
                found.first_store_timestamp = first
            if found.last_store_timestamp is None or last > found.last_store_timestamp:
                found.last_store_timestamp = last
            for number, count in zip(*np.unique(columns.topic[:rows], return_counts=True), strict=True):
                topics[decode_java_utf8(columns.topics.topics[int(number)])] += int(count)
    finally:
        log.close()
    found.topics = dict(topics.most_common())
    return found
