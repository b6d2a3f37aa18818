"""Estimate messages and bytes over time by sampling the log, and count the messages after a place.

A log of up to 32 MiB is scanned.  In a longer one some records are read at each of 256 places, at even distances; they represent
the bytes up to the next place.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.message import decode_java_utf8
from rmqstore.store.message_store import MessageStore

__all__ = ["EXACT_BYTES", "messages_behind", "timeline"]

EXACT_BYTES = 32 << 20
"""A log of at most this size is scanned as a whole."""

# Places in a longer log, records that are read at each, and bytes in which the first of them is searched.
_PLACES = 256
_RECORDS = 64
_SEARCH = 8 << 20
_TIME_MAX = 2**62


def timeline(store: MessageStore, *, bins: int = 60, messages: int | None = None) -> dict[str, Any]:
    """Estimate messages and bytes by store time, in at most `bins` (2 or more) equal intervals.

    The estimate is scaled to `messages`, the number of all messages, if it is given.

    Returns
    -------
    dict
        ``bins``: dicts with ``begin``, ``end`` (ms since epoch, the end excluded), ``messages`` and ``bytes``; ``exact``: every
        record was read; ``places``: the number of places that were sampled.
    """
    if bins < 2:
        raise ValueError(f"bins is {bins}; give at least 2")
    log = store.commit_log
    low, high = log.min_offset, log.max_offset
    exact = high - low <= EXACT_BYTES
    if exact:
        scan = log.scans(low, high, keys=False)
        runs = [_run(columns, 1.0) for stretch, columns in scan if stretch.verdict is Verdict.RECORD]
    else:
        runs = list(_samples(log, low, high))
    answer: dict[str, Any] = {"bins": [], "exact": exact, "places": 0 if exact else len(runs)}
    time, size, weight = (np.concatenate([np.empty(0), *(run[i] for run in runs)]) for i in range(3))
    known = (time >= 0) & (time < _TIME_MAX)
    time, size, weight = time[known], size[known], weight[known]
    if not len(time):
        return answer
    first, last = int(time.min()), int(time.max())
    if not exact:
        # A damaged time may be far from all others.
        first, last = sorted((int(time[0]), log.last_store_timestamp() or int(time[-1])))
        time = np.clip(time, first, last)
    step = max(-(-(last - first + 1) // bins), 1)
    edges = list(range(first, last + 1 + step, step))
    counts, sizes = (np.cumsum(np.histogram(time, edges, weights=each)[0]) for each in (weight, weight * size))
    if not exact:
        # Blanks at the ends of segments are bytes of the log too.
        sizes *= (high - low) / sizes[-1]
        counts *= (messages or counts[-1]) / counts[-1]
    # Rounding before the differences keeps the sums right.
    columns = (np.diff(np.rint(each), prepend=0).astype(np.int64).tolist() for each in (counts, sizes))
    names = ("begin", "end", "messages", "bytes")
    answer["bins"] = [dict(zip(names, each)) for each in zip(edges[:-1], edges[1:], *columns, strict=True)]
    return answer


# Store times, sizes, and the number of records that each represents.
_Run = tuple["np.ndarray", "np.ndarray", "np.ndarray"]


def _run(columns: RecordColumns, weight: float) -> _Run:
    num = columns.count
    return columns.store_timestamp[:num].copy(), columns.size[:num].copy(), np.full(num, weight)


def _samples(log: CommitLog, low: int, high: int) -> Iterator[_Run]:
    gap = -(-(high - low) // _PLACES)
    columns = RecordColumns(_RECORDS)
    with log.single_records():
        for begin in range(low, high, gap):
            end = min(begin + min(gap, _SEARCH), high)
            for stretch in log.stretches(begin, end, columns, check_crc=False, keys=False):
                if stretch.verdict is Verdict.RECORD:
                    yield _run(columns, gap / (stretch.end - stretch.begin))
                    break


def messages_behind(
    path: str, config: StoreConfig, phy_offset: int, progress: Callable[[int, int], object] | None = None
) -> dict[str, Any]:
    """Count the messages in the log of the store at `path` from `phy_offset`; a message whose CRC fails is damaged.

    Returns
    -------
    dict
        ``phy_offset``; ``messages`` and ``size``: the whole ones, and their bytes; ``damaged_size``: all other bytes up to the
        end; ``first_store_timestamp`` and ``last_store_timestamp``: the least and greatest, ms since epoch, None without a
        message; ``topics``: messages by topic.

    Raises
    ------
    StoreError, OSError
        The log cannot be read.
    """
    messages = size = damaged = 0
    times: list[int] = []
    topics: Counter[str] = Counter()
    with contextlib.closing(CommitLog(path, config, MappedFilePool(config.max_mapped_files), read_only=True)) as log:
        log.load()
        end = log.find_end_behind_damage()
        log.set_end(end)
        for stretch, columns in log.scans(phy_offset, end, keys=False):
            if progress is not None:
                progress(stretch.end - phy_offset, end - phy_offset)
            if stretch.verdict is Verdict.RECORD:
                rows = columns.count
                messages, size = messages + rows, size + stretch.end - stretch.begin
                stored = columns.store_timestamp[:rows]
                times = [min([int(stored.min()), *times]), max([int(stored.max()), *times])]
                for number, count in zip(*np.unique(columns.topic[:rows], return_counts=True), strict=True):
                    topics[decode_java_utf8(columns.topics.topics[int(number)])] += int(count)
            elif stretch.verdict is not Verdict.BLANK:
                damaged += stretch.end - stretch.begin
    first, last = times or (None, None)
    return {
        "phy_offset": phy_offset, "messages": messages, "size": size, "damaged_size": damaged,
        "first_store_timestamp": first, "last_store_timestamp": last, "topics": dict(topics.most_common()),
    }  # fmt: skip
