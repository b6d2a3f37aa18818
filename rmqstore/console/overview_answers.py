"""The store as a whole: its figures and health, a page of its topics or queues, and its messages over time.

If there are many queues, a page reads only those that it shows; sums and orders by a number cover the survey so far
(`rmqstore.console.survey`), and say how many queues that is.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from heapq import nlargest
from typing import Any

from rmqstore._version import __version__
from rmqstore.console.rows import Asked, Kept, NotFoundError, file_name, in_order, sums
from rmqstore.console.survey import AT_ONCE, Survey, Surveyed, queue_row, topic_rows, unread_folders
from rmqstore.offline.timeline import EXACT_BYTES, timeline
from rmqstore.store.message_store import MessageStore
from rmqstore.store.retention import used_ratio

__all__ = ["QUEUE_COLUMNS", "TOPIC_COLUMNS", "OverviewAnswers", "health"]

TOPIC_COLUMNS = ("topic", "queues", "messages", "log_bytes", "last_store_timestamp")
QUEUE_COLUMNS = ("queue", "messages", "min_queue_offset", "max_queue_offset", "log_bytes", "last_store_timestamp")
# Seconds for which the timeline is cached.
_TIMELINE_KEPT = 10.0
_TOPICS_DRAWN = 15
# RocketMQ's diskSpaceWarningLevelRatio.
_DISK_WARNING = 0.9


class OverviewAnswers:
    """Answers about all queues of one store; `use` is passed to `Survey`."""

    def __init__(self, use: Callable[[], AbstractContextManager[MessageStore]] | None = None):
        self.survey = Survey(use)
        self._timelines: Kept[dict[str, Any]] = Kept()

    def overview(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return the figures of the store, and a page of its topics."""
        first, sort, name = asked["first"], asked["sort"], asked["topic"]
        log = store.commit_log
        surveyed = self.survey.known(store)
        queues = self._queues_of_topics(store, surveyed, sort, name)
        topics = self._topic_rows(store, surveyed, list(queues.items())[first : first + asked["max_num"]])
        number = len(queues)
        last: int | None = None
        if surveyed.complete:
            last = max((t["last_store_timestamp"] or -1 for t in surveyed.topics.values()), default=-1)
        if last is None or last < 0:
            last = log.last_store_timestamp()
        oldest = next(store.messages(), None)
        return {
            "path": store.path,
            "version": __version__,
            "now": time.time_ns() // 1_000_000,
            "clean": not os.path.exists(os.path.join(store.path, "abort")),
            "commit_log": {
                "segments": len(log.files),
                "segment_size": log.segment_size,
                "min_offset": log.min_offset,
                "max_offset": log.max_offset,
                "size": log.max_offset - log.min_offset,
                "first_store_timestamp": None if oldest is None else oldest.store_timestamp,
                "last_store_timestamp": last,
            },
            "topics": topics,
            "topics_number": number,
            "topics_first": first,
            "sort": sort,
            "unread": unread_folders(store),
            "topic_number": len({topic for topic, _ in store.queues.keys()}),
            "queues": surveyed.number,
            "queues_looked_at": len(surveyed.rows),
            "messages": sum(topic["messages"] for topic in surveyed.topics.values()),
            "sums": _topic_sums(surveyed, name),
            "index": _index_summary(store),
            "checkpoint": store.checkpoint.as_dict(),
            "health": health(store, last, surveyed),
            "disk": _disk(store.path),
            "config": store.config.as_dict(),
            "assumed": list(store.config.assumed),
        }

    def _queues_of_topics(
        self, store: MessageStore, surveyed: Surveyed, sort: str, name: str
    ) -> dict[str, list[int]]:
        # The queue ids of each topic whose name contains `name`.
        queues: dict[str, list[int]] = {}
        wanted = name.lower()
        for topic, queue_id in store.queues.keys():
            if wanted in topic.lower():
                queues.setdefault(topic, []).append(queue_id)
        if sort.removeprefix("-") == "topic":
            names = sorted(queues, reverse=sort.startswith("-"))
        else:
            rows = [surveyed.topics.get(topic) or {"topic": topic} for topic in queues]
            names = [row["topic"] for row in in_order(rows, sort)]
        return {topic: queues[topic] for topic in names}

    def _topic_rows(
        self, store: MessageStore, surveyed: Surveyed, queues: Iterable[tuple[str, list[int]]]
    ) -> list[dict[str, Any]]:
        found = []
        looked_at = 0
        for topic, queue_ids in queues:
            known = surveyed.topics.get(topic)
            if known is None or known["queues"] < len(queue_ids):
                rows_now = []
                for queue_id in queue_ids:
                    row = surveyed.rows.get((topic, queue_id))
                    if row is None and looked_at < AT_ONCE:
                        looked_at += 1
                        row = queue_row(store, topic, queue_id)
                    if row is not None:
                        rows_now.append(row)
                known = topic_rows(rows_now).get(topic)
            if known is not None:
                found.append(known)
        return found

    # ------------------------------------------------------------------------------------------------------------ queues

    def queues(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return a page of the queues of a topic, or of all, and their sums.

        Raise `NotFoundError` if the topic has no queue, and OSError if it may have one in an unreadable folder.
        """
        topic, first, sort = asked["topic"] or None, asked["first"], asked["sort"]
        keys = [key for key in store.queues.keys() if topic is None or key[0] == topic]
        if topic is not None and not keys:
            store.queues.check_seen(topic)
            raise NotFoundError("this store has no queue of that topic")
        rows: dict[tuple[str, int], dict[str, Any]]
        if topic is not None and len(keys) <= AT_ONCE:
            found = {key: queue_row(store, *key) for key in keys}
            rows = {key: row for key, row in found.items() if row is not None}
            complete = True
        else:
            surveyed = self.survey.known(store)
            rows = {key: surveyed.rows[key] for key in keys if key in surveyed.rows}
            complete = surveyed.complete
        unread = unread_folders(store, topic)
        if sort.removeprefix("-") == "queue":
            ordered = keys[::-1] if sort.startswith("-") else keys
        else:
            chosen = [rows.get(key) or {"topic": key[0], "queue_id": key[1]} for key in keys]
            ordered = [(row["topic"], row["queue_id"]) for row in in_order(chosen, sort)]
        page = []
        for key in ordered[first : first + asked["max_num"]]:
            row = rows.get(key) or queue_row(store, *key)
            if row is not None:
                page.append(row)
        return {
            "queues": page,
            "number": len(keys),
            "first": first,
            "sort": sort,
            "looked_at": len(rows),
            "complete": complete and not unread,
            "unread": unread,
            "sums": sums(list(rows.values()), "messages", "files", "size", "log_bytes"),
        }

    # ------------------------------------------------------------------------------------------------------------- charts

    def largest(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return the topics with the most bytes in the log, and the sum of the others."""
        surveyed = self.survey.known(store)
        topics = nlargest(_TOPICS_DRAWN, surveyed.topics.values(), key=lambda topic: topic["log_bytes"])
        topics = [topic for topic in topics if topic["log_bytes"]]
        shown = sum(topic["log_bytes"] for topic in topics)
        total = sum(topic["log_bytes"] for topic in surveyed.topics.values())
        return {
            "topics": [
                {name: t[name] for name in ("topic", "messages", "log_bytes", "log_bytes_exact")} for t in topics
            ],
            "others": {"topics": len(surveyed.topics) - len(topics), "log_bytes": total - shown},
            "exact": all(topic["log_bytes_exact"] for topic in surveyed.topics.values()),
            "queues": surveyed.number,
            "queues_looked_at": len(surveyed.rows),
        }

    def timeline(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return messages and bytes by store time, see `rmqstore.offline.timeline`."""
        bins = asked["bins"]
        return self._timelines.get((store, bins), lambda: self._timeline(store, bins), _TIMELINE_KEPT)

    def _timeline(self, store: MessageStore, bins: int) -> dict[str, Any]:
        messages = None
        if store.commit_log.max_offset - store.commit_log.min_offset > EXACT_BYTES:
            surveyed = self.survey.known(store)
            messages = sum(row["messages"] for row in surveyed.rows.values()) if surveyed.complete else None
        return timeline(store, bins=bins, messages=messages)


def _topic_sums(surveyed: Surveyed, name: str) -> dict[str, Any]:
    chosen = [topic for topic in surveyed.topics.values() if name.lower() in topic["topic"].lower()]
    return {**sums(chosen, "queues", "messages", "log_bytes"), "topics": len(chosen), "complete": surveyed.complete}


def _index_summary(store: MessageStore) -> dict[str, Any] | None:
    service = store.index_service
    if service is None:
        return None
    newest = service.newest()
    header = None if newest is None else newest.header
    return {
        "files": len(service.names),
        "size": len(service.names) * store.config.index_file_size,
        "fill": service.fill,
        "end_phy_offset": None if header is None else header.end_phy_offset,
        "end_timestamp": None if header is None else header.end_timestamp,
    }


def _disk(path: str) -> dict[str, Any] | None:
    try:
        usage = shutil.disk_usage(path)
        return {"total": usage.total, "free": usage.free, "used_ratio": used_ratio(path)}
    except OSError:
        return None


def health(store: MessageStore, last: int | None, surveyed: Surveyed) -> list[dict[str, str]]:
    """Return name, state ("good", "note", "bad") and text of each part of the store, without a verify.

    `last` is the store time of the newest message, ms since epoch.
    """
    found: list[dict[str, str]] = []

    def note(name: str, state: str, text: str) -> None:
        found.append({"name": name, "state": state, "text": text})

    if os.path.exists(os.path.join(store.path, "abort")):
        note("shutdown", "note", "there is an abort file: the store is in use, or was not shut down cleanly")
    else:
        note("shutdown", "good", "clean")
    if os.path.exists(os.path.join(store.path, ".rmqstore-rebuild")):
        note("rebuild", "bad", "a rebuild is running or was interrupted; if none is running, run the same rebuild again")
    damaged = [(problem.path or store.path, problem.message) for problem in store.damaged_files()]
    queue_files = sum(
        os.path.relpath(path, store.path).startswith("consumequeue") and path not in store.queues.unseen
        for path, _ in damaged
    )
    errors = surveyed.errors
    if errors:
        note("queues", "bad", f"{len(errors)} queues cannot be read; the first error: {errors[0]}")
    elif store.queues.unseen:
        folders = ", ".join(file_name(folder, store.path) for folder in sorted(store.queues.unseen))
        note("queues", "bad", f"the list is incomplete, because folders cannot be read: {folders}")
    elif queue_files:
        note("queues", "bad", f"{queue_files} queue files are damaged, and their queues are incomplete: see files")
    elif not surveyed.complete:
        note("queues", "good", f"{len(surveyed.rows)} of {surveyed.number} queues read so far, without errors")
    else:
        note("queues", "good", "all queues can be read")
    log = store.commit_log
    database = store.queue_database
    if database is not None:
        gone_over = sum(end - begin for begin, end in database.completed)
        text = f"{database.queues} queues in {database.path}"
        if gone_over:
            text += f"; the units of {gone_over} bytes of the log are missing or damaged, and are read from the log"
        note("queues in RocksDB", "bad" if gone_over or database.damage else "good", text)
    if store.undispatched is not None:
        begin, end = store.undispatched
        unserved = (
            ""
            if store.unserved is None
            else f"; queues here lack the last {end - store.unserved[0]} of them"
        )
        note(
            "dispatch",
            "note" if store.unserved is None else "bad",
            f"{end - begin} bytes of the log, from phy offset {begin}, are not dispatched to queues{unserved}",
        )
    point = store.checkpoint
    if last is not None and point.physic_msg_timestamp < last:
        seconds = (last - point.physic_msg_timestamp) / 1000
        if point.physic_msg_timestamp:
            note("checkpoint", "note", f"{seconds:.1f} s behind the log")
        elif os.path.lexists(point.path):
            note("checkpoint", "bad", "unreadable, or without times; run verify for details")
        else:
            note("checkpoint", "note", "never written")
    else:
        note("checkpoint", "good", "up to date with the log")
    if store.index_service is None:
        note("index", "note", "disabled in the config")
    else:
        newest = store.index_service.newest()
        if newest is None and store.database_index.is_used():
            behind = log.max_offset - store.database_index.last_offset
            note("index", "good", f"in RocksDB; its last record is {behind} bytes before the end of the log")
        elif newest is None and (store.index_service.passed_over or store.database_index.damage is not None):
            note("index", "bad", "unreadable; queries by key search a limited part of the log: see files")
        elif newest is None:
            state = "note" if log.max_offset == log.min_offset else "bad"
            note(
                "index",
                state,
                "there are no index files; queries by key search a limited part of the log. Run rmqstore rebuild.",
            )
        else:
            behind = log.max_offset - newest.header.end_phy_offset
            if behind >= 0:
                note("index", "good", f"its newest entry is {behind} bytes before the end of the log")
            else:
                note("index", "bad", f"its newest entry is {-behind} bytes past the end of the log, which was truncated")
    room = _disk(store.path)
    if room is not None:
        state = "bad" if room["used_ratio"] > _DISK_WARNING else "good"
        note("disk", state, f"{100 * room['used_ratio']:.1f} % used")
    problem = store.consumer_progress()[1]
    if problem is not None:
        note("consumer progress", "bad", f"cannot be read: {problem}")
    elif (second := store.consumer_offsets.not_read) is not None:
        note("consumer progress", "note", f"a second file is ignored: {file_name(second, store.path)}")
    for path, message in damaged:
        note("files", "bad", f"{file_name(path, store.path)}: {message}")
    return found
