"""How far consumer groups are: one row a group and queue, and their sums by group.

Owns what lag is, for the command line and for SQL: messages of a queue that a group has not consumed, as a broker
counts them.  It reads the offsets of the groups, the bounds of their queues, and of each queue with a lag the store time
of the one message that is next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rmqstore.consumer.system_names import group_kind, progress_kind
from rmqstore.errors import StoreError
from rmqstore.store.message_store import MessageStore

__all__ = ["consumer_rows", "group_sums"]


def consumer_rows(store: MessageStore, group: str | None = None, topic: str | None = None) -> Iterator[dict[str, Any]]:
    """The queues of the topics that groups consume, ordered by group, topic and queue.

    Parameters
    ----------
    group, topic : str, optional
        Only these.

    Yields
    ------
    dict
        ``group``, ``topic``, ``queue_id``, ``queue_offset`` (the next one to consume; -1 where the group has progress
        in other queues of the topic only, and begins at the first message), ``max_queue_offset`` and ``lag``.  Both are
        None where the queue is gone, or cannot be read; the lag is None too where the group's offset lies after the end
        of the queue.  ``waiting_since`` is when the next message was stored, ms since the epoch; None where none waits,
        or it is not known because the message is deleted or damaged.  ``kind`` is as of `progress_kind`.
    """
    queue_ids: dict[str, list[int]] = {}
    for name, queue_id in store.queues.keys():
        queue_ids.setdefault(name, []).append(queue_id)
    for (its_group, its_topic), offsets in sorted(store.consumer_offsets.list().items()):
        if group not in (None, its_group) or topic not in (None, its_topic):
            continue
        there = queue_ids.get(its_topic, [])
        for queue_id in sorted({*there, *offsets}):
            queue_offset = offsets.get(queue_id, -1)
            newest: int | None = None
            if queue_id in there:
                try:
                    newest = store.max_queue_offset(its_topic, queue_id)
                    queue = store.queues.find(its_topic, queue_id)
                    if newest == 0 and queue_offset > 0 and (queue is None or not queue.disk_files):
                        # Only its folder is left: nobody knows what it held.
                        newest = None
                except OSError as error:
                    store.queues.leave_out(its_topic, queue_id, error)
                    newest = None
            lag = None if newest is None or newest < queue_offset else newest - max(queue_offset, 0)
            yield {
                "group": its_group, "topic": its_topic, "queue_id": queue_id, "queue_offset": queue_offset,
                "max_queue_offset": newest, "lag": lag,
                "waiting_since": _stored(store, its_topic, queue_id, max(queue_offset, 0)) if lag else None,
                "kind": progress_kind(its_group, its_topic),
            }  # fmt: skip


def _stored(store: MessageStore, topic: str, queue_id: int, queue_offset: int) -> int | None:
    try:
        unit = store.queues.unit(topic, queue_id, queue_offset)
        stored = -1 if unit is None else store.commit_log.store_timestamp_at(unit.phy_offset)
    except (StoreError, OSError):
        return None
    return stored if stored >= 0 else None


def group_sums(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """list of dict: by group ``group``, ``topics``, ``queues``, ``lag``, ``unknown``, ``waiting_since``, ``kind``.

    ``unknown`` are the queues of which the lag is not known; ``waiting_since`` is the oldest one of them all, or None;
    ``kind`` is "system" for a group of RocketMQ's own, else "".

    Parameters
    ----------
    rows : iterable of dict
        As of `consumer_rows`.
    """
    sums: dict[str, dict[str, Any]] = {}
    topics: dict[str, set[str]] = {}
    for row in rows:
        name = row["group"]
        if name not in sums:
            sums[name] = {
                "group": name, "topics": 0, "queues": 0, "lag": 0, "unknown": 0, "waiting_since": None,
                "kind": group_kind(name),
            }  # fmt: skip
        each = sums[name]
        topics.setdefault(name, set()).add(row["topic"])
        each["queues"] += 1
        each["lag"] += row["lag"] or 0
        each["unknown"] += row["lag"] is None
        since = row["waiting_since"]
        if since is not None and (each["waiting_since"] is None or since < each["waiting_since"]):
            each["waiting_since"] = since
    for name, each in sums.items():
        each["topics"] = len(topics[name])
    return list(sums.values())
