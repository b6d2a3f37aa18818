"""Delete expired files of a store by RocketMQ's rules (5.5.0, DefaultMessageStore): hour of the day, age, disk space.

Segments go first, the oldest first and the newest never; then queue and index files that point only to deleted segments.  A
reader keeps its file until it is done.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.files.durable import fsync_directory
from rmqstore.store.store_state import StoreState

__all__ = ["DiskSpace", "RetentionReport", "delete_expired_files", "is_time_to_delete", "used_ratio"]

logger = logging.getLogger(__name__)

_HOUR = 3_600_000  # ms


@dataclass(slots=True)
class RetentionReport:
    """The numbers of files that one round deleted, and the used part of the disk (0 to 1, -1 if the directory is missing)."""

    segments: int = 0
    queue_files: int = 0
    index_files: int = 0
    used_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The used part of the disk (0 to 1; -1 if unknown), judged by RocketMQ's three ratios.

    Writes stop above `disk_space_warning_level_ratio`; above `disk_space_clean_forcibly_ratio` segments go at any hour and
    whatever their age, if `clean_file_forcibly_enable`; above `disk_max_used_space_ratio` expired ones go at any hour.
    """

    used_ratio: float
    full: bool
    delete_at_once: bool
    delete_expired: bool

    @classmethod
    def judge(cls, ratio: float, config: StoreConfig, was_full: bool = False) -> DiskSpace:
        """Apply RocketMQ's bounds: warning level 35 to 90 %, forcible 30 to 85 %, maximum 10 to 95 %.

        A disk that was full stays so until it is used below the forcible ratio, so that writes do not stop and start.
        """
        warning = min(max(config.disk_space_warning_level_ratio, 35), 90) / 100
        forcible = min(max(config.disk_space_clean_forcibly_ratio, 30), 85) / 100
        most = min(max(config.disk_max_used_space_ratio, 10), 95) / 100
        full = ratio > warning or (was_full and ratio > forcible)
        return cls(ratio, full, ratio > forcible, ratio < 0 or ratio > most)


def used_ratio(path: str) -> float:
    """Return the used part of the disk below `path`, rounded up to whole percents; -1 if `path` does not exist.

    Space for root counts as neither used nor free, as in RocketMQ (UtilAll.getDiskPartitionSpaceUsedPercent).
    """
    try:
        status = os.statvfs(path)
    except OSError:
        return -1.0
    used = status.f_blocks - status.f_bfree
    whole = used + status.f_bavail
    return math.ceil(100 * used / whole) / 100 if whole else -1.0


def is_time_to_delete(config: StoreConfig, now: int) -> bool:
    """Return True if the local hour of `now` (ms since epoch) is one of `delete_when`."""
    hours = {int(hour) for hour in config.delete_when.split(";") if hour.strip()}
    return time.localtime(now / 1000).tm_hour in hours


def delete_expired_files(
    state: StoreState, space: DiskSpace, *, manually: bool, pause: Callable[[int], bool]
) -> RetentionReport:
    """Run one round of deletion; the append lock is held whenever a list of files changes.

    `manually` ignores the hour; `pause` waits this many ms between two segments, and returns False to end the round.
    """
    commit_log, config, lock = state.commit_log, state.commit_log.config, state.lock
    now = state.config.clock()
    report = RetentionReport(used_ratio=space.used_ratio)
    force = space.delete_at_once and config.clean_file_forcibly_enable
    if manually or space.delete_expired or space.delete_at_once or is_time_to_delete(config, now):
        report.segments = _delete_segments(commit_log, lock, now, force, pause)
        if space.delete_at_once and not report.segments:
            logger.warning(
                "the disk of %s is used to %d %%, and no segment can be deleted",
                commit_log.path,
                space.used_ratio * 100,
            )
    # Also files that an earlier round, or a process that was killed, left.
    oldest = commit_log.min_offset
    if oldest > 0:
        for queue in state.queues.opened() if not report.segments else list(state.queues):
            with lock:
                report.queue_files += queue.delete_before(oldest)
        if state.index_service is not None:
            with lock:
                report.index_files = state.index_service.delete_expired(oldest)
    return report


def _delete_segments(
    commit_log: CommitLog, lock: threading.RLock, now: int, force: bool, pause: Callable[[int], bool]
) -> int:
    config = commit_log.config
    deleted = 0
    while deleted < config.delete_file_batch_max:
        with lock:
            if len(commit_log.files) < 2:
                break
            first = commit_log.files.file(commit_log.files.offsets[0])
            try:
                age = now - int(os.stat(first.path).st_mtime * 1000)
            except FileNotFoundError:
                logger.warning("%s was deleted by another process", first.path)
                commit_log.files.drop_first().mark_deleted()
                continue
            if not force and age < config.file_reserved_time * _HOUR:
                break
            commit_log.files.drop_first()
        # Outside the lock: deleting a gigabyte may take long.
        try:
            first.destroy()
        except BaseException:
            # It is part of the log again, so that units and entries that point to it stay.
            with lock:
                commit_log.files.take_back(first)
            raise
        deleted += 1
        logger.info(
            "deleted %s, which was last written %.1f h ago%s",
            first.path,
            age / _HOUR,
            ": the disk is full" if force else "",
        )
        if deleted < config.delete_file_batch_max and not pause(config.delete_commit_log_files_interval):
            break
    if deleted:
        fsync_directory(commit_log.path)
    return deleted
