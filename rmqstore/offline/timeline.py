"""timeline: how many messages and bytes came into a log when, told by places of it and not by all of it.

Owns the choice of these places and what is concluded from them.  A log of up to 32 MiB is gone over, and the answer is exact.
Of a longer one a bounded number of records is looked at, however long it is: starts of segments, and records that units of the
largest queues lead to.  Between two of these places bytes are taken to have come evenly, and further places are looked at where
that may be most wrong.  How many records a stretch has follows from the records at its ends.  It only reads.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmqstore import _core
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import OffsetOutOfRangeError, StoreError
from rmqstore.store.message_store import MessageStore

__all__ = ["EXACT_BYTES", "Timeline", "TimelineBin", "timeline"]

EXACT_BYTES = 32 << 20
"""A log of no more bytes is gone over as a whole."""

# Queues that may be asked for the record at a place, and looked at to find the largest ones.
_QUEUES_ASKED = 16
_QUEUES_LOOKED_AT = 1024
# Places that are spread evenly before others are chosen.
_EVEN = 64
# From a place on records are stepped over until so many bytes: how many there are says how large they are.
_RUN = 32 * 1024
# So far a place is searched for a record where no queue leads to one.
_SEARCH = 256 * 1024
# What lies outside is not a time.
_TIME_MAX = 2**62


@dataclass(frozen=True, slots=True)
class TimelineBin:
    """Messages and bytes of records with store times from `begin` to before `end`, ms since epoch."""

    begin: int
    end: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What came when.

    Attributes
    ----------
    bins : tuple of TimelineBin
        One after the other, equally long; empty for a log without records.
    exact : bool
        Every record was looked at.
    places : int
        How many places of the log were looked at, where not all were.
    units : int
        How many units of queues were read to find them.
    """

    bins: tuple[TimelineBin, ...] = ()
    exact: bool = True
    places: int = 0
    units: int = 0

    def as_dict(self) -> dict[str, Any]:
        """dict: the fields, bins as a list of dicts."""
        return {
            "bins": [dataclasses.asdict(each) for each in self.bins],
            "exact": self.exact,
            "places": self.places,
            "units": self.units,
        }


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    phy_offset: int
    store_timestamp: int
    # Records from here on, and their bytes.
    records: int
    bytes: int


def timeline(
    store: MessageStore,
    *,
    bins: int = 60,
    places: int = 256,
    queues: Iterable[tuple[str, int]] | None = None,
    messages: int | None = None,
) -> Timeline:
    """Messages and bytes by store time.

    Parameters
    ----------
    store : MessageStore
    bins : int
        How many equally long times; fewer where the log spans fewer milliseconds.
    places : int
        At most so many places of a log above `EXACT_BYTES` are looked at.
    queues : iterable of (str, int), optional
        Topic and queue id of large queues, which lead to records; by default the largest of the first 1024.
    messages : int, optional
        How many messages there are, where that is known: what was concluded is scaled so that its sum is right.

    Raises
    ------
    ValueError
        `bins` or `places` is below 2.
    """
    if bins < 2 or places < 2:
        raise ValueError(f"bins is {bins}, places {places}; give at least 2 of each")
    log = store.commit_log
    low, high = log.min_offset, log.max_offset
    if high <= low:
        return Timeline()
    if high - low <= EXACT_BYTES:
        return _exact(log, low, high, bins)
    with log.single_records():
        look = _Look(store, _largest(store) if queues is None else queues)
        found = _ordered(look.spread(low, high, places))
    if len(found) < 2:
        return Timeline((), False, look.places, look.units)
    return Timeline(_binned(found, low, high, bins, messages), False, look.places, look.units)


# ----------------------------------------------------------------------------------------------------------------- exact


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
    first, last = int(time.min()), int(time.max())
    edges = _edges(first, last, bins)
    step = edges[1] - edges[0]
    number = (time - first) // step
    count = len(edges) - 1
    messages = np.bincount(number, minlength=count)
    total = np.zeros(count, np.int64)
    np.add.at(total, number, size)
    return Timeline(tuple(TimelineBin(edges[i], edges[i + 1], int(messages[i]), int(total[i])) for i in range(count)))


def _edges(first: int, last: int, bins: int) -> list[int]:
    # Of bins that cover both times, as long as each other.
    step = max(-(-(last - first + 1) // bins), 1)
    return list(range(first, last + 1 + step, step))


# --------------------------------------------------------------------------------------------------------------- sampled


def _largest(store: MessageStore) -> list[tuple[str, int]]:
    low = store.commit_log.min_offset
    found = []
    for topic, queue_id in store.queues.keys()[:_QUEUES_LOOKED_AT]:
        try:
            look = store.queues.look(topic, queue_id, low)
        except (StoreError, OSError):
            continue
        if look is not None:
            found.append((look.messages, topic, queue_id))
    return [(topic, queue_id) for _, topic, queue_id in heapq.nlargest(_QUEUES_ASKED, found)]


class _Look:
    """Looks at places of a log; counts what that takes."""

    def __init__(self, store: MessageStore, queues: Iterable[tuple[str, int]]):
        self.log = store.commit_log
        self.places = self.units = 0
        self._queues: list[tuple[AnyConsumeQueue, int, int]] = []
        for topic, queue_id in list(queues)[:_QUEUES_ASKED]:
            try:
                queue = store.queues.find(topic, queue_id)
                if queue is not None:
                    first = queue.first_unit_at_or_after(self.log.min_offset)
                    self._queues.append((queue, first, queue.unit_num))
            except (StoreError, OSError):
                continue

    def spread(self, low: int, high: int, limit: int) -> list[_Place]:
        """Places from `low` to `high`, in order: some evenly, then where much time lies over many bytes."""
        even = min(_EVEN, limit)
        found: dict[int, _Place] = {}
        gap = (high - low) // even
        for number in range(even):
            place = self._at_or_after(low + number * gap, gap)
            if place is not None:
                found[place.phy_offset] = place
        last = self.log.last_store_timestamp()
        places = sorted(found.values())
        if last is not None and 0 <= last < _TIME_MAX and places:
            # The end is not a record, but what lies before it came until then.
            places.append(_Place(high, last, places[-1].records, places[-1].bytes))
        waiting = [_weighed(a, b) for a, b in itertools.pairwise(places)]
        heapq.heapify(waiting)
        while waiting and self.places < limit:
            weight, before, after = heapq.heappop(waiting)
            if not weight:
                break
            middle = (before.phy_offset + after.phy_offset) // 2
            place = self._at_or_after(middle, (after.phy_offset - before.phy_offset) // 2)
            if place is None or not before.phy_offset < place.phy_offset < after.phy_offset:
                continue
            places.append(place)
            heapq.heappush(waiting, _weighed(before, place))
            heapq.heappush(waiting, _weighed(place, after))
        return sorted(places)

    def _at_or_after(self, phy_offset: int, gap: int) -> _Place | None:
        # A whole record at that place or soon after it; `gap` is how far the places around it are.
        self.places += 1
        best: int | None = None
        base = phy_offset - phy_offset % self.log.segment_size
        if base == phy_offset or phy_offset == self.log.min_offset:
            best = phy_offset
        for queue, low, high in self._queues:
            if best is not None and best - phy_offset <= gap // 8:
                break
            found = self._unit_at_or_after(queue, low, high, phy_offset)
            if found is not None and (best is None or found < best):
                best = found
        place = None if best is None else self._place(best)
        if place is None or place.phy_offset - phy_offset > gap:
            searched = self._searched(phy_offset)
            place = place if searched is None else self._place(searched)
        return place

    def _unit_at_or_after(self, queue: AnyConsumeQueue, low: int, high: int, phy_offset: int) -> int | None:
        found = None
        try:
            while low < high:
                middle = (low + high) // 2
                self.units += 1
                phy_offsets, sizes, _ = queue.units(middle, 1)
                # A unit that leads to no record has phy offset 0, or no size.
                if not len(phy_offsets) or sizes[0] <= 0 or phy_offsets[0] < max(phy_offset, 1):
                    low = middle + 1
                else:
                    high, found = middle, int(phy_offsets[0])
        except OffsetOutOfRangeError:
            # Its file expired while this runs.
            return None
        return found

    def _searched(self, phy_offset: int) -> int | None:
        known = self.log.region_of(phy_offset)
        if known is None:
            return None
        region, base, _, _ = known
        found = _core.RecordSearch(region, base).find(phy_offset - base, min(phy_offset - base + _SEARCH, region.size))
        return None if found < 0 else base + found

    def _place(self, phy_offset: int) -> _Place | None:
        time = self.log.store_timestamp_at(phy_offset)
        if not 0 <= time < _TIME_MAX:
            return None
        base = phy_offset - phy_offset % self.log.segment_size
        end = min(phy_offset + _RUN, base + self.log.segment_size, self.log.max_offset)
        run = next(iter(self.log.stretches(phy_offset, end, check_crc=False, resume=False)), None)
        if run is None or run.verdict is not Verdict.RECORD:
            return None
        return _Place(phy_offset, time, run.records, run.end - run.begin)


def _weighed(before: _Place, after: _Place) -> tuple[int, _Place, _Place]:
    # The more bytes and time lie between two places, the more wrong it may be that they came evenly.
    weight = (after.phy_offset - before.phy_offset) * max(after.store_timestamp - before.store_timestamp, 0)
    return -weight, before, after


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
    density = np.array([each.records / each.bytes for each in places], np.float64)
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
    return tuple(
        TimelineBin(edges[i], edges[i + 1], int(num[i + 1] - num[i]), int(up_to[i + 1] - up_to[i]))
        for i in range(len(edges) - 1)
    )
