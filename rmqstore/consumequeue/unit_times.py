"""Searching the units of a queue by store time: clocks step back and jump ahead, so times do not have to rise.

Owns the order in which blocks of units are searched, and the times that are remembered of each.  A block is skipped only where
the times of all its units are known.  It reads neither units nor records: callers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rmqstore import _numpy as np
from rmqstore.spans import Span

__all__ = ["BLOCK_UNITS", "UnitTimes"]

BLOCK_UNITS = 8192
"""The number of units of which times are read at once."""

TimesOf = Callable[[int, int], tuple["np.ndarray", "np.ndarray"]]
"""By the numbers of units, first and one after the last: queue offsets and store times of those that lead to a record."""


class UnitTimes:
    """The least and the greatest store time of each block of units that were read and all lead to records."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def find(self, spans: Iterable[Span], times: tuple[int, int], times_of: TimesOf, *, newest: bool) -> int | None:
        """Return the queue offset of the first unit with a store time in a range; of the last with `newest`; None for none.

        Parameters
        ----------
        spans : iterable of (int, int)
            The numbers of the units to search, in the order of the search.
        times : (int, int)
            ms since epoch, both included.
        times_of : callable
            Reads the times of at most `BLOCK_UNITS` units.
        """
        low, high = times
        for begin, end in spans:
            blocks = range(begin // BLOCK_UNITS, -(-end // BLOCK_UNITS))
            for block in reversed(blocks) if newest else blocks:
                known = self._known.get(block)
                if known is not None and (known[1] < low or known[0] > high):
                    continue
                first, last = max(begin, block * BLOCK_UNITS), min(end, (block + 1) * BLOCK_UNITS)
                queue_offsets, stored = times_of(first, last)
                if len(stored) == BLOCK_UNITS:
                    self._known[block] = int(stored.min()), int(stored.max())
                found = np.flatnonzero((stored >= low) & (stored <= high))
                if len(found):
                    return int(queue_offsets[found[-1 if newest else 0]])
        return None
