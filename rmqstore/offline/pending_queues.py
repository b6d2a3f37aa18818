"""Pending messages of plain queues: delay levels, retry topics and dead-letter topics.

Owns from which queue offset on messages of these wait: config/delayOffset.json for delay levels, the group's progress
for retries.  It only reads.
"""

from __future__ import annotations

import os

import numpy as np

from rmqstore.consumer.fastjson import parse_fastjson
from rmqstore.errors import CorruptionError
from rmqstore.message import SCHEDULE_TOPIC
from rmqstore.offline.pending_rows import Records, int32_property, rows
from rmqstore.offline.pending_search import Search
from rmqstore.store.columns import import_pyarrow

__all__ = ["search_delayed", "search_dlq", "search_retry"]

_RETRY_PREFIX, _DLQ_PREFIX = "%RETRY%", "%DLQ%"


def search_delayed(search: Search) -> None:
    """Find what waits in the queues of the delay levels."""
    if SCHEDULE_TOPIC not in search.topics:
        return
    path = os.path.join(search.store.path, "config", "delayOffset.json")
    offsets, known = {}, True
    try:
        offsets = _delay_offsets(path)
    except FileNotFoundError:
        known = False
        search.notes.append(
            "there is no config/delayOffset.json: of each delay level all messages are taken to wait that are not on "
            "their topic"
        )
    except (CorruptionError, OSError) as error:
        known = False
        search.problem(error)
    source = search.source(
        "delayed",
        SCHEDULE_TOPIC,
        "the offsets of config/delayOffset.json" if known else "the first message of each queue",
    )
    store = search.store
    if store.undispatched is not None and "message_delay_level" in store.config.assumed:
        search.notes.append(
            "when delayed messages without a unit on disk are due follows from message_delay_level, which the store "
            f"does not tell: {store.config.message_delay_level!r} is assumed"
        )
    for records in search.records_of(SCHEDULE_TOPIC, {level - 1: offset for level, offset in offsets.items()}):
        levels = records.numbers_of("queue_id") + 1
        batch = rows(
            records,
            "delayed",
            source.name,
            search.now,
            topic=records.properties.text("REAL_TOPIC"),
            queue_id=int32_property(records, "REAL_QID"),
            due=_due_by_level(search, records, levels),
            level=np.minimum(levels, 2**31 - 1),
        )
        source.pending += batch.num_rows
        search.add(batch)


def _due_by_level(search: Search, records: Records, levels: np.ndarray) -> np.ndarray:
    if records.tags_codes is not None:
        # The unit of such a queue holds when its message is due instead of the hash of its tags.
        return records.tags_codes
    delays = np.array([0, *search.store.config.delay_levels], np.int64)
    due: np.ndarray = records.numbers_of("store_timestamp") + delays[np.clip(levels, 0, len(delays) - 1)]
    return due


def _delay_offsets(path: str) -> dict[int, int]:
    """dict of int to int: next queue offset by delay level."""
    with open(path, encoding="utf-8", errors="replace") as file:
        document = parse_fastjson(file.read(), path)
    table = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise CorruptionError("delayOffset.json has no offsetTable", path)
    offsets = {}
    for level, offset in table.items():
        number = int(level) if isinstance(level, str) and level.isascii() and level.isdigit() else level
        whole = isinstance(number, int) and isinstance(offset, int) and not isinstance(offset, bool)
        if not whole or not 1 <= number <= 1 << 20 or not 0 <= offset < 1 << 63:
            raise CorruptionError(f"delayOffset.json: level {level!r} with the offset {offset!r}", path)
        offsets[number] = offset
    return offsets


def search_retry(search: Search) -> None:
    """Find what groups have not consumed of their retry topics."""
    for topic in sorted(name for name in search.topics if name.startswith(_RETRY_PREFIX)):
        begins, group = _progress(search, topic)
        known = "the group's progress"
        if not begins:
            known = "the first message of each queue"
            search.notes.append(f"no progress in {topic} was found: all its messages are taken to wait")
        # Queues of pop consumers have the topic after the group.
        name = group or topic[len(_RETRY_PREFIX) :].partition("+")[0]
        _whole_queues(search, "retry", topic, begins, name, known)


def search_dlq(search: Search) -> None:
    """Find the dead letters of groups."""
    for topic in sorted(name for name in search.topics if name.startswith(_DLQ_PREFIX)):
        begins, _ = _progress(search, topic)
        known = "the progress of those who consume it" if begins else "the first message of each queue"
        _whole_queues(search, "dlq", topic, begins, topic[len(_DLQ_PREFIX) :], known)


def _progress(search: Search, topic: str) -> tuple[dict[int, int], str | None]:
    # The least of all groups that read the topic: what one of them has not got waits.
    found: dict[int, int] = {}
    groups = [group for group, name in search.progress if name == topic]
    for group in groups:
        for queue_id, offset in search.progress[group, topic].items():
            found[queue_id] = min(offset, found.get(queue_id, offset))
    return found, groups[0] if len(groups) == 1 else None


def _whole_queues(search: Search, kind: str, topic: str, begins: dict[int, int], group: str, known: str) -> None:
    import pyarrow.compute as pc

    pa = import_pyarrow()
    source = search.source(kind, topic, known)
    for records in search.records_of(topic, begins):
        properties = records.properties
        real = pc.coalesce(
            properties.text("DLQ_ORIGIN_TOPIC"), properties.text("RETRY_TOPIC"), records.texts_of("topic")
        )
        batch = rows(records, kind, source.name, search.now, topic=real, group=pa.repeat(group, len(records)))
        source.pending += batch.num_rows
        search.add(batch)
