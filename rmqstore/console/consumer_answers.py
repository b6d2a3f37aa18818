"""Consumer groups: how far each came in every queue, how much is left, since when it waits.

Owns these rows, their sums by group, and their order.  Units are read from their files one by one, so that no queue is opened
for a group's sake.
"""

from __future__ import annotations

import time
from typing import Any

from rmqstore.console.errors import error_text
from rmqstore.console.lists import in_order
from rmqstore.consumequeue.queue_look import QueueLook
from rmqstore.consumer.system_names import group_kind, progress_kind
from rmqstore.errors import StoreError
from rmqstore.store.message_store import MessageStore

__all__ = ["CONSUMER_COLUMNS", "GROUP_COLUMNS", "consumer_rows", "group_rows"]

GROUP_COLUMNS = ("group", "queues", "lag", "age")
CONSUMER_COLUMNS = ("group", "topic", "offset", "max_queue_offset", "lag", "waiting_since")


def consumer_rows(store: MessageStore) -> list[dict[str, Any]]:
    """list of dict: the progress of every group in every queue, by group, topic and queue id."""
    found = []
    looks: dict[tuple[str, int], QueueLook | Exception | None] = {}
    with store.commit_log.single_records():
        for (group, topic), offsets in sorted(store.consumer_offsets.list().items()):
            for queue_id, offset in sorted(offsets.items()):
                row: dict[str, Any] = {
                    "group": group,
                    "topic": topic,
                    "queue_id": queue_id,
                    "offset": offset,
                    "max_queue_offset": None,
                    "lag": None,
                    "waiting_since": None,
                    "last_store_timestamp": None,
                    "kind": progress_kind(group, topic),
                }
                key = topic, queue_id
                if key not in looks:
                    try:
                        looks[key] = store.queues.look(topic, queue_id, store.commit_log.min_offset)
                    except (StoreError, OSError) as error:
                        looks[key] = error
                look = looks[key]
                if isinstance(look, Exception):
                    row["error"] = error_text(look)
                elif look is not None:
                    try:
                        row |= _progress(store, topic, queue_id, look, offset)
                    except (StoreError, OSError) as error:
                        row["error"] = error_text(error)
                found.append(row)
    return found


def _progress(store: MessageStore, topic: str, queue_id: int, look: QueueLook, offset: int) -> dict[str, Any]:
    log, high = store.commit_log, look.max_queue_offset
    waiting = store.queues.unit(topic, queue_id, offset) if offset < high else None
    since = -1 if waiting is None else log.store_timestamp_at(waiting.phy_offset)
    newest = -1 if look.last is None else log.store_timestamp_at(look.last.phy_offset)
    return {
        "max_queue_offset": high,
        "lag": high - offset,
        "waiting_since": since if since >= 0 else None,
        "last_store_timestamp": newest if newest >= 0 else None,
    }


def group_rows(rows: list[dict[str, Any]], sort: str = "group") -> list[dict[str, Any]]:
    """list of dict: by group the sums over its queues.

    `lag` is of the queues that are there, `unknown` how many are not or end before the group's offset; `waiting_since` is the
    store time of the oldest message that is next in one of them, `age` how long ago that was, ms.
    """
    now = time.time_ns() // 1_000_000
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["group"]
        if name not in groups:
            groups[name] = {
                "group": name, "queues": 0, "lag": 0, "unknown": 0, "waiting_since": None, "kind": group_kind(name),
            }  # fmt: skip
        total = groups[name]
        total["queues"] += 1
        if row["lag"] is None or row["lag"] < 0:
            total["unknown"] += 1
        else:
            total["lag"] += row["lag"]
        since = row["waiting_since"]
        if since is not None and (total["waiting_since"] is None or since < total["waiting_since"]):
            total["waiting_since"] = since
    for total in groups.values():
        since = total["waiting_since"]
        total["age"] = None if since is None else now - since
    return in_order(groups.values(), sort)
