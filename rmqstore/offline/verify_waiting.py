"""verify: what waits in a store's timer files, and in the families of timers and transactions in RocksDB.

Owns what `verify` says of these: files and entries that are damaged, and those that lead to no record of the right topic.  It
only reads.  Which messages wait is another question, see `rmqstore.offline.pending`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.errors import CorruptionError, Finding, MissingDependencyError, StoreError
from rmqstore.offline.verify_unread import unread_database
from rmqstore.rocksdb.database import Database
from rmqstore.rocksdb.index import index_folder, may_have_entries
from rmqstore.rocksdb.places import may_be_database
from rmqstore.rocksdb.waiting import TIMER_FAMILY, TRANSACTION_FAMILY, read_timers, read_transactions
from rmqstore.timer.waiting_units import waiting_units

__all__ = ["verify_waiting"]

_TIMER_TOPIC, _HALF_TOPIC = "rmq_sys_wheel_timer", "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"
# Entries that are told one by one.
_TOLD = 20


def verify_waiting(commit_log: CommitLog, root: str) -> Iterator[Finding]:
    """Look for what is wrong in timer files, and in timers and transactions in RocksDB.

    Yields
    ------
    Finding
        "bad_timer", "bad_transaction", "damaged_database", or "not_checked" where the database cannot be read.
    """
    yield from _timer_files(commit_log, root)
    path = index_folder(root)
    if not may_be_database(path):
        return
    try:
        with Database(path) as database:
            yield from _families(commit_log, database)
    except MissingDependencyError as error:
        if may_have_entries(root):
            yield Finding(path, 0, "not_checked", f"timers and transactions in RocksDB: {error.message}")
    except CorruptionError as error:
        yield Finding(error.path or path, 0, "damaged_database", f"timers and transactions in RocksDB: {error.message}")
    except (StoreError, OSError) as error:
        yield unread_database(path, error, "timers and transactions in RocksDB")


def _timer_files(commit_log: CommitLog, root: str) -> Iterator[Finding]:
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
            # What fired is there for a while, and is read here too.
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
        for number, problem in enumerate(problems):
            if number == _TOLD:
                yield Finding(path, 0, kind, f"{len(problems) - _TOLD} more entries that are none")
                break
            yield Finding(path, 0, kind, problem.message)
        topic = _TIMER_TOPIC if family == TIMER_FAMILY else _HALF_TOPIC
        yield from _leads(commit_log, path, kind, topic, iter(wanted))


def _leads(
    commit_log: CommitLog, path: str, kind: str, topic: str, wanted: Iterator[tuple[str, int, int | None]]
) -> Iterator[Finding]:
    # Each must lead to a record of the topic; those whose record is deleted are told together.
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
        detail = f"{gone} that wait lead in front of the log, which begins at {low}: their messages are deleted"
        yield Finding(path, 0, kind, detail)
