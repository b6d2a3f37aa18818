"""Messages that an index has and that cannot be given: each as a value, and one warning of all.

Owns how they are named.  It reads nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from rmqstore.errors import StoreError
from rmqstore.rabbitmq.message import Message

__all__ = ["LostMessage", "LostMessages", "undecoded"]

logger = logging.getLogger(__name__)


class LostMessage(NamedTuple):
    """A message that a queue's index has, and whose bytes are not there, are not a message, or cannot be decoded.

    Attributes
    ----------
    queue : str
    seq_id : int
        Negative for a message that no index has.
    msg_id : bytes
        16 bytes.
    level : int or None
        Of a priority queue.
    path : str
        The file of the index that knows it, or the message file.
    embedded : bool
        Its bytes should stand in the queue's own files; otherwise in the vhost's message store.
    pos : int
        Where in `path` its entry or its bytes begin.
    reason : str
        Why they cannot be read although they may be whole, as of an unreadable file, or why they cannot be decoded;
        empty where they are lost.
    undecoded : bool
        The bytes are there and cannot be decoded.  `entries` of a queue's directory, and `MessageStore.read_term`, give
        them as they are.
    """

    queue: str
    seq_id: int
    msg_id: bytes
    level: int | None
    path: str
    embedded: bool
    pos: int = 0
    reason: str = ""
    undecoded: bool = False

    def __str__(self) -> str:
        level = "" if self.level is None else f" of level {self.level}"
        if self.undecoded and self.seq_id < 0:
            return f"message {self.msg_id.hex()}, {self.path}:{self.pos} cannot be decoded: {self.reason}"
        if self.undecoded:
            where = f"{self.path}:{self.pos}" + ("" if self.embedded else ", in the message store")
            what = f"seq_id {self.seq_id}{level} (message {self.msg_id.hex()}, {where})"
            return f"{what} cannot be decoded: {self.reason}"
        where = "the queue's own files" if self.embedded else "the message store"
        which = f"seq_id {self.seq_id}{level} (message {self.msg_id.hex()}, {self.path})"
        return f"{which} cannot be read: {self.reason}" if self.reason else f"{which} has no whole bytes in {where}"


def undecoded(message: Message, properties: bool = True) -> str | None:
    """str or None: why a message whose term is whole has no body, or no `properties` if they are asked for, here."""
    try:
        if not message.readable:
            message.body_size  # noqa: B018
        elif properties:
            message.properties  # noqa: B018
    except StoreError as error:
        return error.message
    return None


class LostMessages:
    """Tells of each lost message, or in one warning of all where nobody listens."""

    def __init__(self, on_lost: Callable[[LostMessage], None] | None):
        self._on_lost = on_lost
        self._number = 0
        self._first: LostMessage | None = None

    def add(self, lost: LostMessage) -> None:
        """Take note of one."""
        if self._on_lost is not None:
            self._on_lost(lost)
            return
        self._number += 1
        self._first = self._first or lost

    def warn(self) -> None:
        """Say how many nobody was told of."""
        if self._first is not None:
            logger.warning(
                "queue %s: lost messages left out: %d, the first is %s; verify says more",
                self._first.queue,
                self._number,
                self._first,
            )
