"""What the overview says of a store's health: one line a part, good, worth a note, or bad.

Owns the wording of these lines.  Each is told by what is known of an open store anyway; only a verify compares every byte.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from rmqstore.console.anatomy import file_name
from rmqstore.console.survey import Surveyed
from rmqstore.store.message_store import MessageStore
from rmqstore.store.retention import used_ratio

__all__ = ["disk", "health"]

# RocketMQ warns above this part of the disk (diskSpaceWarningLevelRatio).
_DISK_WARNING = 0.9


def disk(path: str) -> dict[str, Any] | None:
    """dict: bytes of the disk below `path`, and the used part of it; None where nobody can tell."""
    try:
        usage = shutil.disk_usage(path)
        return {"total": usage.total, "free": usage.free, "used_ratio": used_ratio(path)}
    except OSError:
        return None


def health(store: MessageStore, last: int | None, surveyed: Surveyed) -> list[dict[str, str]]:
    """list of dict: name, state ("good", "note", "bad") and text of each part.

    Parameters
    ----------
    last : int or None
        Store time of the newest message, ms since epoch.
    """
    found: list[dict[str, str]] = []

    def note(name: str, state: str, text: str) -> None:
        found.append({"name": name, "state": state, "text": text})

    if os.path.exists(os.path.join(store.path, "abort")):
        note("closing", "note", "there is an abort file: the store is in use, or was not closed in order")
    else:
        note("closing", "good", "closed in order")
    if os.path.exists(os.path.join(store.path, ".rmqstore-rebuild")):
        note("rebuild", "bad", "a rebuild was interrupted or is running; run the same rebuild again if none is")
    damaged = [(problem.path or store.path, problem.message) for problem in store.damaged_files()]
    queue_files = sum(
        os.path.relpath(path, store.path).startswith("consumequeue") and path not in store.queues.unseen
        for path, _ in damaged
    )
    errors = surveyed.errors
    if errors:
        note("queues", "bad", f"{len(errors)} queues cannot be read, the first: {errors[0]}")
    elif store.queues.unseen:
        folders = ", ".join(file_name(folder, store.path) for folder in sorted(store.queues.unseen))
        note("queues", "bad", f"which there are is not known, as this cannot be looked into: {folders}")
    elif queue_files:
        note(
            "queues", "bad", f"{queue_files} of their files are damaged; what those lost is not shown, or reads as zeros: see files"
        )
    elif not surveyed.complete:
        note("queues", "good", f"the {len(surveyed.rows)} of {surveyed.number} that were looked at so far can be read")
    else:
        note("queues", "good", "every queue can be read")
    log = store.commit_log
    database = store.queue_database
    if database is not None:
        gone_over = sum(end - begin for begin, end in database.completed)
        text = f"{database.queues} queues in {database.path}"
        if gone_over:
            text += f"; units of {gone_over} bytes of the log were lost or are damaged, and are read from it"
        note("queues in RocksDB", "bad" if gone_over or database.damage else "good", text)
    if store.undispatched is not None:
        begin, end = store.undispatched
        unserved = (
            ""
            if store.unserved is None
            else f"; of these the last {end - store.unserved[0]} are shown in no queue here"
        )
        note(
            "dispatch",
            "note" if store.unserved is None else "bad",
            f"no queue leads to {end - begin} bytes of the log, from phy offset {begin} on{unserved}",
        )
    point = store.checkpoint
    if last is not None and point.physic_msg_timestamp < last:
        seconds = (last - point.physic_msg_timestamp) / 1000
        if point.physic_msg_timestamp:
            note("checkpoint", "note", f"{seconds:.1f} s behind the log")
        elif os.path.lexists(point.path):
            note("checkpoint", "bad", "it cannot be read, or has no times; a verify run says more")
        else:
            note("checkpoint", "note", "the checkpoint was never written")
    else:
        note("checkpoint", "good", "up to the end of the log")
    if store.index_service is None:
        note("index", "note", "the config says not to index")
    else:
        newest = store.index_service.newest()
        if newest is None and store.database_index.is_used():
            behind = log.max_offset - store.database_index.last_offset
            note("index", "good", f"in RocksDB; its last record lies {behind} bytes before the end of the log")
        elif newest is None and (store.index_service.passed_over or store.database_index.damage is not None):
            note("index", "bad", "it cannot be read, and queries by key search the log, up to a bound: see files")
        elif newest is None:
            state = "note" if log.max_offset == log.min_offset else "bad"
            note(
                "index",
                state,
                "there is no index file; queries by key search the log, up to a bound. rmqstore rebuild makes the index",
            )
        else:
            behind = log.max_offset - newest.header.end_phy_offset
            if behind >= 0:
                note("index", "good", f"its newest entry lies {behind} bytes before the end of the log")
            else:
                note("index", "bad", f"its newest entry lies {-behind} bytes beyond the end of the log, which lost its end")
    room = disk(store.path)
    if room is not None:
        state = "bad" if room["used_ratio"] > _DISK_WARNING else "good"
        note("disk", state, f"{100 * room['used_ratio']:.1f} % of it is used")
    problem = store.consumer_progress()[1]
    if problem is not None:
        note("consumer progress", "bad", f"cannot be read: {problem}")
    elif (second := store.consumer_offsets.not_read) is not None:
        note("consumer progress", "note", f"a second file is not read: {file_name(second, store.path)}")
    for path, message in damaged:
        note("files", "bad", f"{file_name(path, store.path)}: {message}")
    return found
