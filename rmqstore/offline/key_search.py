"""Messages by key where nobody knows the topic.

The index holds a hash of topic and key together, so it is asked once for each topic; the log is scanned where there is no
index, or where topics cannot be seen.  What was not searched is reported as by `MessageStore.query_message`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import deque

from rmqstore.errors import StoreError
from rmqstore.message import MessageExt
from rmqstore.offline.settings import settings
from rmqstore.selection import Selection
from rmqstore.store.message_store import MessageStore
from rmqstore.store.querying import LogLook
from rmqstore.store.results import QueryResult

__all__ = ["find_in_all_topics", "topics_to_ask"]


def topics_to_ask(store: MessageStore) -> list[str]:
    """list of str: the topics that have a queue, and those that the broker's settings name, sorted."""
    names = set(store.topics())
    # They are a help and nothing more: messages are in topics that have queues.
    with contextlib.suppress(StoreError, OSError):
        names.update(settings(store.path).topics)
    return sorted(names)


def find_in_all_topics(
    store: MessageStore, selection: Selection, look: LogLook, topics: list[str] | None = None
) -> QueryResult:
    """Find the messages of all topics that have a key, newest first, each compared with its message.

    `selection` has one key, `index_type`, store times and `max_num`; `look` says how many bytes of the log that the index does not
    cover are searched; `topics` are those of `topics_to_ask`, for a search for several keys.  Errors are those of
    `MessageStore.query_message`.
    """
    names = topics_to_ask(store) if topics is None else topics
    max_num = selection.max_num or 0
    if store.index_service is None or (store.queues.unseen and store.older.one_log):
        return _in_log(store, selection, look)
    found = []
    uncovered: tuple[tuple[int, int], ...] = ()
    truncated = False
    for name in names:
        hits = store.query_message(
            name, selection.key, max_num, selection.begin, selection.end, *look, index_type=selection.index_type
        )
        truncated |= hits.truncated
        uncovered = hits.uncovered
        if hits:
            found.append(hits)

    def newest_first(message: MessageExt) -> tuple[int, int]:
        # With tiered storage each queue has phy offsets of its own.
        return (0 if store.older.one_log else -message.store_timestamp, -message.phy_offset)

    messages = list(itertools.islice(heapq.merge(*found, key=newest_first), max_num + 1))
    return QueryResult(messages[:max_num], truncated or len(messages) > max_num, uncovered)


def _in_log(store: MessageStore, selection: Selection, look: LogLook) -> QueryResult:
    log, max_num, (max_log_bytes, progress) = store.commit_log, selection.max_num or 0, look
    low, high = log.min_offset, log.max_offset
    # Whole segments, the newest ones: a record is known to begin where a segment does.
    first = next((base for base in log.files.offsets if max_log_bytes is None or base >= high - max_log_bytes), high)
    first = min(max(first, low), high)
    found: deque[MessageExt] = deque(maxlen=max_num + 1)
    for number, message in enumerate(store.messages(first) if first < high else ()):
        if progress is not None and number % 4096 == 0:
            progress(message.phy_offset - first, max(high - first, 1))
        if selection.has(message):
            found.append(message)
    messages = list(found)[::-1]
    uncovered = ((low, first),) if first > low else ()
    return QueryResult(messages[:max_num], len(messages) > max_num, uncovered)
