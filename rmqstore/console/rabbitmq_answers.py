"""RabbitMQ's classic queues as values that JSON can hold.  A vhost is opened read-only for each answer, and closed after it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from rmqstore.console.rows import Asked, NotFoundError, error_text
from rmqstore.errors import StoreError
from rmqstore.rabbitmq import LostMessage, Queue, QueuedMessage, Vhost, find_vhosts, node_process
from rmqstore.rabbitmq.transfer import message_object

__all__ = ["RABBITMQ_COLUMNS", "RabbitmqAnswers"]

RABBITMQ_COLUMNS = ("name", "depth", "size")
"""The sortable columns of a vhost's queues."""

_PREVIEW = 120
# The most lost messages of a queue in an answer.
_LOST_SHOWN = 200
# The most vhosts that are open at once: each needs memory.
_AT_ONCE = 2


class RabbitmqAnswers:
    """The answers about the vhosts at or below some paths."""

    def __init__(self, paths: Sequence[str]):
        self.paths = tuple(paths)
        self._turn = threading.BoundedSemaphore(_AT_ONCE)

    def _places(self) -> list[str]:
        return [place for path in self.paths for place in find_vhosts(path)]

    @contextlib.contextmanager
    def _vhost(self, number: int) -> Iterator[Vhost]:
        places = self._places()
        if not 0 <= number < len(places):
            raise NotFoundError("there is no vhost with this number")
        with self._turn, Vhost.open(places[number]) as vhost:
            yield vhost

    def vhosts(self, asked: Asked) -> dict[str, Any]:
        """Return every vhost with its name, state, queues, messages and stores, or the reason why it cannot be read."""
        found = []
        for number, place in enumerate(self._places()):
            try:
                with self._turn, Vhost.open(place) as vhost:
                    found.append({"number": number, **_vhost_object(vhost), "error": None})
            except (StoreError, OSError) as error:
                found.append({"number": number, "name": place, "path": place, "error": error_text(error)})
        return {"vhosts": found}

    def vhost(self, asked: Asked) -> dict[str, Any]:
        """Return a vhost and its queues."""
        number = asked["number"]
        with self._vhost(number) as vhost:
            queues = vhost.queues()
            return {
                "number": number,
                **_vhost_object(vhost),
                "queue_list": [_queue_object(queue) for queue in queues],
                "problems": [{"path": each.path, "detail": each.detail} for each in vhost.problems],
            }

    def queue(self, asked: Asked) -> dict[str, Any]:
        """Return a queue and a page of its messages, oldest first, and the messages that are lost up to there."""
        number, first, size = asked["number"], asked["first"], asked["max_num"]
        with self._vhost(number) as vhost:
            queue = _queue(vhost, asked["name"])
            lost: list[LostMessage] = []
            rows = [_message_row(message) for message in _from(queue, first, size, lost.append)]
            return {
                "number": number,
                "vhost": vhost.name,
                **_queue_object(queue),
                "first": first,
                "rows": rows,
                "lost": [
                    {**each._asdict(), "msg_id": each.msg_id.hex(), "detail": str(each)} for each in lost[:_LOST_SHOWN]
                ],
                "lost_num": len(lost),
                "older": max(0, first - size) if first else None,
                "newer": first + size if first + len(rows) + len(lost) < queue.depth and len(rows) == size else None,
            }

    def message(self, number: int, name: str, place: int) -> dict[str, Any]:
        """Return one message, by its place in the queue."""
        with self._vhost(number) as vhost:
            queue = _queue(vhost, name)
            message = next(_from(queue, place, 1, lambda lost: None), None)
            if message is None:
                raise NotFoundError("the queue has no message at this place")
            return {"number": number, "place": place, **message_object(queue, message)}


def _queue(vhost: Vhost, name: str) -> Queue:
    for queue in vhost.queues():
        if queue.name == name:
            return queue
    raise NotFoundError("the vhost has no queue of this name on disk")


def _from(queue: Queue, first: int, number: int, on_lost: Callable[[LostMessage], None]) -> Iterator[QueuedMessage]:
    # `islice` takes no larger number.
    first = min(first, sys.maxsize - number)
    return islice(queue.messages(on_lost), first, first + number)


def _vhost_object(vhost: Vhost) -> dict[str, Any]:
    value = {**vhost.summary(), "running_process": node_process(vhost.path)}
    for name in ("persistent_store", "transient_store"):
        if value[name] is not None and "unreadable" in value[name]:
            value[name] = None
    return value


def _queue_object(queue: Queue) -> dict[str, Any]:
    problems = [{"path": each.path, "detail": each.detail} for each in queue.problems]
    return {**queue.summary(), "queue_problems": problems}


def _message_row(message: QueuedMessage) -> dict[str, Any]:
    text = message.body[: 4 * _PREVIEW].decode("utf-8", "backslashreplace")
    return {
        "seq_id": message.seq_id,
        "level": message.level,
        "exchange": message.exchange,
        "routing_keys": list(message.routing_keys),
        "size": message.size,
        "location": message.location,
        "persistent": message.persistent,
        "delivered": message.delivered,
        "expiry": message.expiry,
        "preview": text[:_PREVIEW],
        "preview_whole": len(message.body) == len(text) <= _PREVIEW,
    }
