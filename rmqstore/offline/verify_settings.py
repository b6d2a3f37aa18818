"""Verify checkpoint, settings and timer files of a store, and its timers and transactions in RocksDB."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.errors import CorruptionError, Finding, MissingDependencyError, StoreError, finding_of
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.os_errors import is_unreadable
from rmqstore.message import SCHEDULE_TOPIC
from rmqstore.offline.compared import Compared, unread_database, unread_file
from rmqstore.rocksdb.database import Database, may_be_database
from rmqstore.rocksdb.index import index_folder, may_have_entries
from rmqstore.rocksdb.waiting import TIMER_FAMILY, TRANSACTION_FAMILY, read_timers, read_transactions

if TYPE_CHECKING:
    from rmqstore.consumer.settings_sources import SettingsKind

__all__ = ["checkpoint_findings", "settings_findings"]


def checkpoint_findings(compared: Compared, end: int, last_timestamp: int) -> Iterator[Finding]:
    """Compare the checkpoint with a log that ends at `end`, and whose newest record was stored at `last_timestamp`."""
    path = os.path.join(compared.root, "checkpoint")
    try:
        checkpoint = Checkpoint.load(path, read_only=True)
    except (StoreError, OSError) as error:
        if is_unreadable(error):
            yield unread_file(path, error, "its times and offsets are not compared with the log")
        else:
            yield Finding(path, 0, "bad_checkpoint", str(error))
        return
    newest = max(last_timestamp, 0)
    if compared.commit_log.min_offset > 0 or compared.unread:
        # If the clock was set back, deleted or unreadable records may be newer than all others.
        newest = max(newest, compared.config.clock())
    for pos, name in ((0, "physic_msg_timestamp"), (8, "logics_msg_timestamp"), (16, "index_msg_timestamp")):
        value = getattr(checkpoint, name)
        if value < 0 or value > newest:
            detail = f"{name} is {value}, but the newest record was stored at {last_timestamp}; a recovery that trusts it "
            yield Finding(path, pos, "bad_checkpoint", detail + "skips what it should look at")
    for pos, name in ((32, "confirm_phy_offset"), (40, "logics_physical_offset")):
        value = getattr(checkpoint, name)
        if value < 0 or value > end:
            yield Finding(path, pos, "bad_checkpoint", f"{name} is {value}, the log ends at {end}")


def _delay_offsets(compared: Compared, queues_known: bool) -> Iterator[Finding]:
    # It imports NumPy.
    from rmqstore.offline.pending_queues import check_delay_offsets

    path = os.path.join(compared.root, "config", "delayOffset.json")
    try:
        offsets, problems = check_delay_offsets(compared.root)
        for problem in problems:
            yield finding_of(problem, "bad_settings", path)
        for level, offset in sorted(offsets.items()):
            end = _end_of_queue(compared, SCHEDULE_TOPIC, level - 1) if queues_known else 0
            if 0 < end < offset:
                text = (
                    f"delayOffset.json: the offset {offset} of level {level} is after the end of its queue, {end}: a broker "
                    "goes on at the end, and delivers none of the messages before it"
                )
                yield Finding(path, 0, "bad_settings", text)
    except CorruptionError as error:
        yield finding_of(error, "bad_settings", path)
    except OSError as error:
        yield finding_of(error, "file", path, "progress of delay levels is not known: ")


def _end_of_queue(compared: Compared, topic: str, queue_id: int) -> int:
    # 0 for a missing queue, or an unreadable one, which is another finding.
    with contextlib.suppress(StoreError, OSError):
        look = compared.queues.look(topic, queue_id, compared.commit_log.min_offset)
        return 0 if look is None else look.max_queue_offset
    return 0


def settings_findings(compared: Compared, queues_known: bool) -> Iterator[Finding]:
    """Check the settings of a store; with `queues_known` the ends of queues are those of files."""
    from rmqstore.consumer.settings_sources import settings_sources
    from rmqstore.rocksdb.waiting import has_pop_records, pop_records

    kinds: tuple[SettingsKind, ...] = ("topics", "subscription_groups", "consumer_offsets")
    for kind in kinds:
        path = os.path.join(compared.root, "config")
        try:
            for source in settings_sources(compared.root, kind, quiet=True):
                yield from source.findings
        except (StoreError, OSError) as error:
            yield Finding(path, 0, "not_checked", f"{kind}: {error}")
    yield from _delay_offsets(compared, queues_known)
    if has_pop_records(compared.root):
        findings: list[Finding] = []
        try:
            for _ in pop_records(compared.root, findings):
                pass
        except (StoreError, OSError) as error:
            findings.append(unread_database(os.path.join(compared.root, "kvStore"), error, "pop records"))
        yield from findings


_TIMER_TOPIC, _HALF_TOPIC = "rmq_sys_wheel_timer", "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"
# The number of entries that are reported one by one.
_TOLD = 20


def verify_waiting(commit_log: CommitLog, root: str) -> Iterator[Finding]:
    """Check timer files, and timers and transactions in RocksDB."""
    yield from _timer_files(commit_log, root)
    path = index_folder(root)
    if not may_be_database(path):
        return
    try:
        with Database(path) as database:
            yield from _families(commit_log, database)
    except (StoreError, OSError) as error:
        if not isinstance(error, MissingDependencyError) or may_have_entries(root):
            yield unread_database(path, error, "timers and transactions in RocksDB")


def _timer_files(commit_log: CommitLog, root: str) -> Iterator[Finding]:
    # It imports NumPy.
    from rmqstore.timer.timer_files import waiting_units

    try:
        waiting = waiting_units(root)
    except OSError as error:
        yield Finding(root, 0, "file", f"timer files: {error}")
        return
    for problem in waiting.problems:
        yield Finding(problem.path or root, problem.pos or 0, "bad_timer", problem.message)
    units = waiting.units
    wanted = (
        (f"the unit at {position} of the timer log", phy_offset, size)
        for position, phy_offset, size in zip(
            units["position"].tolist(), units["phy_offset"].tolist(), units["record_size"].tolist(), strict=True
        )
    )
    yield from _leads(commit_log, os.path.join(root, "timerlog"), "bad_timer", _TIMER_TOPIC, wanted)


def _families(commit_log: CommitLog, database: Database) -> Iterator[Finding]:
    path = database.path
    for family, kind in ((TIMER_FAMILY, "bad_timer"), (TRANSACTION_FAMILY, "bad_transaction")):
        wanted: list[tuple[str, int, int | None]] = []
        try:
            # Read all entries: fired timers stay for a while.
            for _ in database.items(family=family):
                pass
            if family == TIMER_FAMILY:
                timers = read_timers(database)
                problems = timers.problems
                wanted = [(f"the timer {key!r} of {time}", phy, None) for (time, key), phy in timers.timers.items()]
            else:
                transactions = read_transactions(database)
                problems = transactions.problems
                wanted = [(f"the transaction of phy offset {phy}", phy, None) for phy in transactions.check_times]
        except CorruptionError as error:
            yield Finding(path, 0, "damaged_database", f"{error.message}")
            continue
        yield from (Finding(path, 0, kind, problem.message) for problem in problems[:_TOLD])
        if len(problems) > _TOLD:
            yield Finding(path, 0, kind, f"{len(problems) - _TOLD} more entries that cannot be read")
        topic = _TIMER_TOPIC if family == TIMER_FAMILY else _HALF_TOPIC
        yield from _leads(commit_log, path, kind, topic, iter(wanted))


def _leads(
    commit_log: CommitLog, path: str, kind: str, topic: str, wanted: Iterator[tuple[str, int, int | None]]
) -> Iterator[Finding]:
    # Each must point to a record of the topic; those of deleted records are one finding.
    low, gone, wrong = commit_log.min_offset, 0, 0
    for name, phy_offset, size in wanted:
        if 0 <= phy_offset < low:
            gone += 1
            continue
        message = commit_log.look_up(phy_offset, size)
        if message is not None and message.topic == topic:
            continue
        wrong += 1
        if wrong <= _TOLD:
            yield Finding(path, 0, kind, f"{name} leads to phy offset {phy_offset}, where no record of {topic} is")
    if wrong > _TOLD:
        yield Finding(path, 0, kind, f"{wrong - _TOLD} more lead to no record of {topic}")
    if gone:
        detail = f"{gone} pending ones point before the log, which begins at {low}: their messages are deleted"
        yield Finding(path, 0, kind, detail)
