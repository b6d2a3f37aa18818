"""What a cut of the log would delete: its whole messages from a place on, counted before anything is cut.

Owns the count, for the command line.  It opens the log read-only and changes nothing; where a log is cut is decided by
`rmqstore.store.recovery` alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.message import decode_java_utf8

__all__ = ["LostMessages", "messages_behind"]


@dataclass(slots=True)
class LostMessages:
    """The messages of a log from a place on.

    Attributes
    ----------
    phy_offset : int
        The place.
    messages, size : int
        Whole messages, and their bytes.
    damaged_size : int
        Bytes up to the end that are no whole message.
    first_store_timestamp, last_store_timestamp : int or None
        Least and greatest store time of the whole ones, ms since epoch.
    topics : dict of str to int
        Whole messages by topic.
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
    """Count what the log of the store at `path` holds from `phy_offset` on.

    Parameters
    ----------
    config : StoreConfig
        Its geometry.
    phy_offset : int
        Where it is counted from; a message whose CRC fails is damaged.
    progress : callable, optional
        Told how many bytes of log were gone over, and of how many.

    Returns
    -------
    LostMessages

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
