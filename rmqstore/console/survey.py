"""A survey of all queues of a store, for the sums and the order of lists.

Few queues are read at once; many are read part by part in a thread, so that the cost of a page depends on what it shows.
Results are cached.  No queue is opened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rmqstore.console.rows import error_text, file_name
from rmqstore.consumequeue.consume_queue_store import unseen_text
from rmqstore.errors import StoreError
from rmqstore.store.message_store import MessageStore

__all__ = ["AT_ONCE", "Survey", "Surveyed", "queue_row", "topic_rows", "unread_folders"]

AT_ONCE = 2000
"""The most queues that one request reads; a thread reads the rest."""

_KEPT = 1.0
# A survey may use a tenth of the time.
_KEPT_TIMES = 10
# Queues between two checks that the store is still the same.
_PART = 200

Key = tuple[str, int]


def unread_folders(store: MessageStore, topic: str | None = None) -> list[dict[str, str]]:
    """Return path and detail of the unreadable folders that may contain queues (of `topic`)."""
    return [
        {"path": file_name(folder, store.path), "detail": unseen_text(error)}
        for folder, error in store.queues.unseen_of(topic)
    ]


def queue_row(store: MessageStore, topic: str, queue_id: int) -> dict[str, Any] | None:
    """Return the row of a queue, with `error` if it cannot be read; None if there is no such queue."""
    log = store.commit_log
    try:
        look = store.queues.look(topic, queue_id, log.min_offset, sizes=True)
    except (StoreError, OSError) as error:
        return {
            "topic": topic, "queue_id": queue_id, "kind": "", "min_queue_offset": 0, "max_queue_offset": 0, "messages": 0,
            "files": 0, "size": 0, "log_bytes": None, "log_bytes_exact": False, "last_store_timestamp": None,
            "error": error_text(error),
        }  # fmt: skip
    if look is None:
        return None
    stored = -1 if look.last is None else log.store_timestamp_at(look.last.phy_offset)
    return {
        "topic": topic, "queue_id": queue_id, "kind": look.kind, "min_queue_offset": look.min_queue_offset,
        "max_queue_offset": look.max_queue_offset, "messages": look.messages, "files": look.files, "size": look.size,
        "log_bytes": look.log_bytes, "log_bytes_exact": look.exact,
        "last_store_timestamp": stored if stored >= 0 else None, "error": None,
    }  # fmt: skip


@dataclass
class Surveyed:
    """A survey so far: the number of queues of the store, and the rows of those that were read."""

    number: int
    rows: dict[Key, dict[str, Any]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if every queue was read."""
        return len(self.rows) >= self.number

    @cached_property
    def topics(self) -> dict[str, dict[str, Any]]:
        """The sums over its queues, by topic."""
        return topic_rows(self.rows.values())

    @property
    def errors(self) -> list[str]:
        """The errors of the queues that cannot be read."""
        return [row["error"] for row in self.rows.values() if row["error"] is not None]


def topic_rows(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sums over queues by topic, in the order of the rows."""
    topics: dict[str, dict[str, Any]] = {}
    for row in rows:
        topic = topics.get(row["topic"])
        if topic is None:
            topic = topics[row["topic"]] = {
                "topic": row["topic"], "queues": 0, "messages": 0, "total": 0, "size": 0, "kind": row["kind"],
                "log_bytes": 0, "log_bytes_exact": True, "last_store_timestamp": None, "unread_queues": 0,
            }  # fmt: skip
        topic["queues"] += 1
        topic["unread_queues"] += row["error"] is not None
        topic["messages"] += row["messages"]
        topic["total"] += row["max_queue_offset"]
        topic["size"] += row["size"]
        topic["log_bytes"] += row["log_bytes"] or 0
        topic["log_bytes_exact"] &= row["log_bytes_exact"]
        stored = row["last_store_timestamp"]
        if stored is not None and (topic["last_store_timestamp"] is None or stored > topic["last_store_timestamp"]):
            topic["last_store_timestamp"] = stored
    return topics


class Survey:
    """The surveys of one store; `use` opens it for a ``with`` block in the thread.  Without `use` there is no thread."""

    def __init__(self, use: Callable[[], AbstractContextManager[MessageStore]] | None = None):
        self._use = use
        self._lock = threading.Lock()
        self._known: Surveyed | None = None
        self._store: MessageStore | None = None
        self._keep_until = 0.0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def known(self, store: MessageStore) -> Surveyed:
        """Return the newest survey, which may be incomplete if there are many queues."""
        with self._lock:
            if self._store is not store:
                # A thread over another store notices, and ends.
                self._store, self._known, self._thread, self._keep_until = store, None, None, 0.0
            known = self._known
            if self._thread is not None or (known is not None and time.monotonic() < self._keep_until):
                assert known is not None
                return known
            keys = store.queues.keys()
            if len(keys) <= AT_ONCE or self._use is None:
                begun = time.monotonic()
                found = Surveyed(len(keys))
                with store.commit_log.single_records():
                    self._look(store, keys, found)
                self._ended(found, begun)
                return found
            if known is None:
                known = self._known = Surveyed(len(keys))
            self._thread = threading.Thread(
                target=self._survey_in_parts, args=(store, keys), daemon=True, name="rmqstore console survey"
            )
            self._thread.start()
            return known

    def _look(self, store: MessageStore, keys: list[Key], found: Surveyed) -> None:
        for key in keys:
            row = queue_row(store, *key)
            if row is None:
                found.number -= 1
            else:
                found.rows[key] = row

    def _ended(self, found: Surveyed, begun: float) -> None:
        now = time.monotonic()
        self._known = found
        self._keep_until = now + max(_KEPT, _KEPT_TIMES * (now - begun))

    def _survey_in_parts(self, expected: MessageStore, keys: list[Key]) -> None:
        assert self._use is not None
        begun = time.monotonic()
        found = Surveyed(len(keys))
        try:
            for first in range(0, len(keys), _PART):
                if self._closed.is_set():
                    return
                with self._use() as store:
                    if store is not expected:
                        return
                    with store.commit_log.single_records():
                        self._look(store, keys[first : first + _PART], found)
                    with self._lock:
                        if self._store is not expected:
                            return
                        known = self._known
                        if known is None or not known.complete:
                            # During the first survey, publish a copy of the finished part.
                            self._known = Surveyed(found.number, dict(found.rows))
                        if first + _PART >= len(keys):
                            self._ended(found, begun)
        except (StoreError, OSError):
            # The store was deleted or replaced: the next request reports it, or starts again.
            pass
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def close(self) -> None:
        """Stop the thread before its next part."""
        self._closed.set()
