"""RabbitMQ's classic queues as plain values.

Owns the shape of these answers and the list of vhosts.  A vhost is opened, read-only, for each answer and closed after it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from rmqstore.console.rows import NotFoundError, error_text
from rmqstore.errors import StoreError
from rmqstore.rabbitmq import LostMessage, Queue, QueuedMessage, Vhost, find_vhosts, node_process
from rmqstore.rabbitmq.transfer import message_object

__all__ = ["RABBITMQ_COLUMNS", "RabbitmqAnswers"]

RABBITMQ_COLUMNS = ("name", "depth", "size")
"""Columns that the queues of a vhost can be sorted by."""

_PREVIEW = 120
# So many lost messages of a queue are named.
_LOST_SHOWN = 200
# Vhosts that are read at one time: each takes memory of its own.
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
            raise NotFoundError("there is no vhost of that number")
        with self._turn, Vhost.open(places[number]) as vhost:
            yield vhost

    def vhosts(self) -> list[dict[str, Any]]:
        """Every vhost: name, state, queues, messages, stores; one that cannot be read with the reason."""
        found = []
        for number, place in enumerate(self._places()):
            try:
                with self._turn, Vhost.open(place) as vhost:
                    found.append({"number": number, **_vhost_object(vhost), "error": None})
            except (StoreError, OSError) as error:
                found.append({"number": number, "name": place, "path": place, "error": error_text(error)})
        return found

    def vhost(self, number: int) -> dict[str, Any]:
        """One vhost and its queues."""
        with self._vhost(number) as vhost:
            queues = vhost.queues()
            return {
                "number": number,
                **_vhost_object(vhost),
                "queue_list": [_queue_object(queue) for queue in queues],
                "problems": [{"path": each.path, "detail": each.detail} for each in vhost.problems],
            }

    def queue(self, number: int, name: str, first: int, size: int) -> dict[str, Any]:
        """One queue of a vhost and its messages from the `first` on, oldest first; and those that are lost up to there."""
        with self._vhost(number) as vhost:
            queue = _queue(vhost, name)
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
        """One message, by its place in the queue."""
        with self._vhost(number) as vhost:
            queue = _queue(vhost, name)
            message = next(_from(queue, place, 1, lambda lost: None), None)
            if message is None:
                raise NotFoundError("this queue has no message at that place")
            return {"number": number, "place": place, **message_object(queue, message)}


def _queue(vhost: Vhost, name: str) -> Queue:
    for queue in vhost.queues():
        if queue.name == name:
            return queue
    raise NotFoundError("this vhost has no queue of that name on disk")


def _from(queue: Queue, first: int, number: int, on_lost: Callable[[LostMessage], None]) -> Iterator[QueuedMessage]:
    # An address may name more than `islice` can count to; no queue is that long.
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
