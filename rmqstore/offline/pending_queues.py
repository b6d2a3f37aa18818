"""Pending messages of plain queues: delay levels, retry topics and dead-letter topics.

Owns from which queue offset on messages of these wait: config/delayOffset.json for delay levels, the group's progress
for retries.  It only reads.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rmqstore._core import EXT_ADDRESS_MAX
from rmqstore.consumer.json_files import load_with_backup, whole_number
from rmqstore.errors import CorruptionError
from rmqstore.message import DLQ_PREFIX, RETRY_PREFIX, SCHEDULE_TOPIC
from rmqstore.offline.pending_rows import PendingSource, Records, Waiting, int32_property
from rmqstore.offline.pending_search import Problem, Search, taken_down
from rmqstore.store.columns import import_pyarrow

__all__ = ["search_delayed", "search_dlq", "search_retry"]


def search_delayed(search: Search) -> None:
    """Find what waits in the queues of the delay levels."""
    path = os.path.join(search.store.path, "config", "delayOffset.json")
    offsets: dict[int, int] = {}
    known = False
    try:
        (offsets, odd), read = load_with_backup(path, True, _delay_offsets)
        known = read is not None
        taken_down(search, odd)
    except (CorruptionError, OSError) as error:
        search.problem(error)
    else:
        if not known and SCHEDULE_TOPIC in search.topics:
            search.notes.append(
                "there is no config/delayOffset.json: of each delay level all messages are taken to wait that are not on "
                "their topic"
            )
    if SCHEDULE_TOPIC not in search.topics and not offsets:
        return
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
    begins = {level - 1: offset for level, offset in offsets.items()}
    # A broker notes a level only after it found its queue.
    for records in search.records_of(SCHEDULE_TOPIC, begins, zero_is_noted=True):
        levels = records.numbers_of("queue_id") + 1
        waiting = Waiting(
            topic=records.properties.text("REAL_TOPIC"),
            queue_id=int32_property(records, "REAL_QID"),
            due=_due_by_level(search, records, levels),
            level=np.minimum(levels, 2**31 - 1),
        )
        search.take(source, records, waiting)


def _due_by_level(search: Search, records: Records, levels: np.ndarray) -> np.ndarray:
    unknown = np.ones(len(records), bool) if records.tags_codes is None else records.tags_codes <= EXT_ADDRESS_MAX
    if records.tags_codes is not None and not unknown.any():
        # The unit of such a queue holds when its message is due instead of the hash of its tags.
        return records.tags_codes
    delays = np.array([0, *search.store.config.delay_levels], np.int64)
    due: np.ndarray = records.numbers_of("store_timestamp") + delays[np.clip(levels, 0, len(delays) - 1)]
    if records.tags_codes is not None:
        # As a broker: where the extension holds nothing, the level says it.
        due[~unknown] = records.tags_codes[~unknown]
        text = f"{np.count_nonzero(unknown)} units of {SCHEDULE_TOPIC} lead nowhere in the extension of their queue; when their "
        text += f"messages are due follows from message_delay_level {search.store.config.message_delay_level!r}"
        search.problems.append(Problem(search.store.path, None, text))
    return due


def check_delay_offsets(root: str) -> tuple[dict[int, int], list[CorruptionError]]:
    """Return the offsets of config/delayOffset.json by level, and its problems; a file without members, or none, is right.

    Raises
    ------
    CorruptionError, OSError
        It cannot be read, and has no backup.
    """
    told: list[CorruptionError] = []

    def decode(document: Any, path: str) -> tuple[dict[int, int], list[CorruptionError]]:
        return ({}, []) if document == {} else _delay_offsets(document, path)

    (offsets, problems), _ = load_with_backup(os.path.join(root, "config", "delayOffset.json"), True, decode, told)
    return offsets, told + problems


def _delay_offsets(document: Any, path: str) -> tuple[dict[int, int], list[CorruptionError]]:
    """Next queue offset by delay level, and what is none: of such a level all messages count."""
    if document is None:
        return {}, []
    table = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise CorruptionError("delayOffset.json has no offsetTable", path)
    offsets: dict[int, int] = {}
    odd = []
    for level, offset in table.items():
        try:
            number = whole_number(level, "a level", path, 32)
            value = whole_number(offset, f"the offset of level {number}", path)
        except CorruptionError as error:
            odd.append(CorruptionError(f"delayOffset.json: {error.message}", path))
            continue
        if 1 <= number <= 1 << 20 and value >= 0:
            offsets[number] = value
        else:
            odd.append(CorruptionError(f"delayOffset.json: level {number} with the offset {value}", path))
    return offsets, odd


def search_retry(search: Search) -> None:
    """Find what groups have not consumed of their retry topics."""
    for topic in sorted(name for name in search.topics if name.startswith(RETRY_PREFIX)):
        begins, group = _progress(search, topic)
        known = "the group's progress"
        if not begins:
            known = "the first message of each queue"
            search.notes.append(f"no progress in {topic} was found: all its messages are taken to wait")
        # Queues of pop consumers have the topic after the group.
        name = group or topic[len(RETRY_PREFIX) :].partition("+")[0]
        _whole_queues(search, search.source("retry", topic, known), begins, name)


def search_dlq(search: Search) -> None:
    """Find the dead letters of groups."""
    for topic in sorted(name for name in search.topics if name.startswith(DLQ_PREFIX)):
        begins, _ = _progress(search, topic)
        known = "the progress of those who consume it" if begins else "the first message of each queue"
        _whole_queues(search, search.source("dlq", topic, known), begins, topic[len(DLQ_PREFIX) :])


def _progress(search: Search, topic: str) -> tuple[dict[int, int], str | None]:
    # The least of all groups that read the topic: what one of them has not got waits.
    found: dict[int, int] = {}
    groups = [group for group, name in search.progress if name == topic]
    for group in groups:
        for queue_id, offset in search.progress[group, topic].items():
            found[queue_id] = min(offset, found.get(queue_id, offset))
    return found, groups[0] if len(groups) == 1 else None


def _whole_queues(search: Search, source: PendingSource, begins: dict[int, int], group: str) -> None:
    import pyarrow.compute as pc

    pa = import_pyarrow()
    for records in search.records_of(source.name, begins):
        properties = records.properties
        real = pc.coalesce(
            properties.text("DLQ_ORIGIN_TOPIC"), properties.text("RETRY_TOPIC"), records.texts_of("topic")
        )
        search.take(source, records, Waiting(topic=real, group=pa.repeat(group, len(records))))
