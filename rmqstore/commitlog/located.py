"""Places of a commit log as the core takes them: in parts that are in few segments each.

Owns finding the segments of many phy offsets at once. It reads no record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rmqstore import _numpy as np
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.errors import OffsetOutOfRangeError

__all__ = ["located"]

# The number of segments that the core takes in one call.
_REGIONS = 64


def located(log: CommitLog, phy_offsets: np.ndarray) -> Iterator[tuple[slice, list[Any], np.ndarray, np.ndarray]]:
    """Phy offsets in parts that lie in few segments each.

    Yields
    ------
    (slice, list of Region, numpy.ndarray of int64, numpy.ndarray of int32)
        Which part, the segments, where these begin, and for each offset the number of its segment, -1 where the log holds
        nothing.
    """
    if not len(phy_offsets):
        return
    lowest, highest = int(phy_offsets.min()), int(phy_offsets.max())
    if log.files.read_only and highest >= log.max_offset:
        log.refresh()
    low, high, size = log.min_offset, log.max_offset, log.segment_size
    if low <= lowest and highest < high and lowest // size == highest // size:
        regions, bases, (number,) = _segments(log, [lowest // size * size])
        yield slice(0, len(phy_offsets)), regions, bases, np.full(len(phy_offsets), number, np.int32)
        return
    inside = (phy_offsets >= low) & (phy_offsets < high)
    # Counted from 1 on; 0 where the log holds nothing.
    before_first = low // size - 1
    segments = np.where(inside, phy_offsets // size - before_first, 0)
    held = np.bincount(segments) > 0
    step = len(segments) if np.count_nonzero(held) <= _REGIONS else _REGIONS
    for first in range(0, len(segments), step):
        part = slice(first, first + step)
        if step < len(segments):
            held = np.bincount(segments[part]) > 0
        there = np.flatnonzero(held[1:]) + 1
        regions, bases, found = _segments(log, [(before_first + segment) * size for segment in there.tolist()])
        numbers = np.full(len(held), -1, np.int32)
        numbers[there] = found
        yield part, regions, bases, numbers[segments[part]]


def _segments(log: CommitLog, offsets: list[int]) -> tuple[list[Any], np.ndarray, list[int]]:
    # The segments that begin at these offsets, where they begin, and for each offset its number among them, -1 for none.
    numbers = []
    regions: list[Any] = []
    bases = []
    for offset in offsets:
        mapped_file = log.files.find(offset)
        try:
            region = None if mapped_file is None else mapped_file.region
        except OffsetOutOfRangeError:
            region = None  # It expired meanwhile.
        if region is None:
            log.warn_of_missing(offset, offset + log.segment_size)
        numbers.append(-1 if region is None else len(regions))
        if mapped_file is not None and region is not None:
            regions.append(region)
            bases.append(mapped_file.file_from_offset)
    return regions, np.array(bases, np.int64), numbers
