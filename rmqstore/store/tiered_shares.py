"""Which messages of tiered storage the local log has too, so that reading both gives each message once.

Owns when the units of a local queue are believed, and the pass over the log where they are not.  It changes nothing,
and what tiered storage has is never believed to be in the log for the word of a unit alone: units at both ends have to
lead to their messages, and the message in front of them has to be older than the log.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.message import MessageExt, encode_java_utf8
from rmqstore.spans import Span, joined

__all__ = ["are_believed", "in_log"]


def are_believed(log: CommitLog, flat: FlatQueue, local: AnyConsumeQueue | None) -> bool:
    """bool: the units of a local queue lead to its messages where they begin, and where they or tiered storage end."""
    low, high = _bounds(log, local)
    if local is None or low >= high:
        return True
    last = max(min(high, flat.max_queue_offset) - 1, low)
    return _message_of(log, local, low) is not None and _message_of(log, local, last) is not None


def in_log(log: CommitLog, queues: Sequence[tuple[FlatQueue, AnyConsumeQueue | None]]) -> list[list[Span]]:
    """For each queue of tiered storage the queue offsets of the messages that a scan of the local log gives.

    Units say it where that is certain.  Otherwise the log is gone over once for all queues, as far as there is doubt.

    Parameters
    ----------
    queues : sequence of (FlatQueue, queue or None)
        Each with the local queue of the same topic and number.

    Returns
    -------
    list of list of (int, int)
        Queue offsets, the first and one after the last; ascending and apart.
    """
    found: list[list[Span]] = []
    doubted: dict[tuple[bytes, int], list[Span]] = {}
    until = log.min_offset
    for flat, local in queues:
        spans: list[Span] = []
        place = _doubted_to(log, flat, local)
        if place > log.min_offset:
            doubted[encode_java_utf8(flat.topic), flat.queue_id] = spans
            until = max(until, place)
        if place < log.max_offset:
            spans.append(_bounds(log, local))
        found.append(spans)
    if doubted:
        _go_over(log, until, doubted)
    return [joined(spans) for spans in found]


def _bounds(log: CommitLog, local: AnyConsumeQueue | None) -> Span:
    return (0, 0) if local is None else local.bounds(log.min_offset)


def _message_of(log: CommitLog, local: AnyConsumeQueue, queue_offset: int) -> MessageExt | None:
    # The message that a unit leads to; None where that is no message, or another one.
    unit = local.unit(queue_offset)
    message = None if unit is None else log.look_up(unit.phy_offset, unit.size)
    if unit is None or message is None or not message.check_queue(local.topic, local.queue_id, unit.queue_offset):
        return None
    return message


def _doubted_to(log: CommitLog, flat: FlatQueue, local: AnyConsumeQueue | None) -> int:
    # Up to which phy offset nobody knows what the log has of the queue: the log's begin where all is certain, its end
    # where the units say nothing.
    begin, end = log.min_offset, log.max_offset
    if begin >= end:
        return begin
    if not _is_whole(log):
        # Units lead into segments that are gone.
        return end
    low, high = _bounds(log, local)
    if local is None or low >= high:
        return begin if _is_before(log, flat, flat.max_queue_offset - 1) else end
    first = _message_of(log, local, low)
    if first is None or high < flat.max_queue_offset or not are_believed(log, flat, local):
        return end
    # Where units are gone or zero the log may have messages in front of the first unit that is left.
    known = flat.max_queue_offset >= low and _is_before(log, flat, low - 1)
    return begin if known or low <= flat.min_queue_offset else first.phy_offset


def _is_whole(log: CommitLog) -> bool:
    offsets = log.files.file_offsets
    return all(before + log.segment_size == after for before, after in itertools.pairwise(offsets))


def _is_before(log: CommitLog, flat: FlatQueue, queue_offset: int) -> bool:
    # Whether this message of tiered storage was stored before all that the log has; in doubt it was not.
    if queue_offset < flat.min_queue_offset:
        return True
    try:
        return 0 <= flat.store_timestamp_of(queue_offset) < log.store_timestamp_at(log.min_offset)
    except OffsetOutOfRangeError:
        return False  # Its broker deleted it meanwhile.


def _go_over(log: CommitLog, until: int, wanted: dict[tuple[bytes, int], list[Span]]) -> None:
    # A record whose CRC is wrong is given by a scan too, marked; prepared and rolled back transactions are in no queue.
    for stretch, columns in log.scans(log.min_offset, until, check_crc=False, keys=False):
        if stretch.verdict is not Verdict.RECORD:
            continue
        groups, order = columns.by_queue(columns.queued()[0])
        for number, first, last in groups:
            topic, queue_id = columns.topics.queues[number]
            spans = wanted.get((columns.topics.topics[topic], queue_id))
            if spans is not None:
                offsets = columns.queue_offset[order[first:last]]
                cuts = np.flatnonzero(np.diff(offsets) != 1) + 1
                begins, ends = np.r_[0, cuts], np.r_[cuts, len(offsets)] - 1
                spans += zip(offsets[begins].tolist(), (offsets[ends] + 1).tolist())
