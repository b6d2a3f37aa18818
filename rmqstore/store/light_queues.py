"""Light queues (RocketMQ's LMQ): further queues of messages that were sent to other topics.

Owns the refusal to look for them where messages are chosen by their own topic.  It reads the first message of
such a queue and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import UnsupportedFormatError
from rmqstore.message import is_light_queue

__all__ = ["refuse_light_queues"]


def refuse_light_queues(
    commit_log: CommitLog, find: Callable[[str, int], AnyConsumeQueue | None], topics: Iterable[str] | None
) -> None:
    """Raise UnsupportedFormatError where one of `topics` is a light queue: no message has it as its own topic.

    Parameters
    ----------
    find : callable
        Called with a topic and a queue id; returns the queue.
    topics : iterable of str, optional
    """
    for topic in topics or ():
        queue = find(topic, 0) if is_light_queue(topic) else None
        if queue is None:
            continue
        first = next(iter(queue.read(queue.bounds(commit_log.min_offset)[0], 1)), None)
        message = None if first is None else commit_log.look_up(first.phy_offset)
        if message is None or message.topic != topic:
            raise UnsupportedFormatError(
                f"{topic} is a light queue: its messages were sent to other topics, so that no row has it as its topic. Read it "
                "as a queue: get_message, get_table or consume, rmqstore get or export, or Spark with the options topic and "
                "mode=queue",
                commit_log.path,
            )
