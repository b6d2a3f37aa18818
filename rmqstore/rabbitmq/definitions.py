"""The durable queues that a stopped node knows, as its Mnesia files say.

Owns reading the table `rabbit_durable_queue` of a node's data directory: the dumped table (.DCD), what was logged since
(.DCL) and what has not been dumped at all (PREVIOUS.LOG, LATEST.LOG), which are disk_log images of Erlang's OTP (checked
with OTP 25.2.3).  It never writes: definitions are the node's.  Where a node keeps them otherwise (Khepri, RabbitMQ 4), the
answer is that they are not known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rmqstore.errors import CorruptionError
from rmqstore.files.open_file import open_regular
from rmqstore.rabbitmq import term

__all__ = ["QueueDefinition", "data_directory", "durable_queues"]

_TABLE = "rabbit_durable_queue"
_MAGIC = b"\x01\x02\x03\x04"
_ITEM = b"bWLA"
# An item of this size or more has an MD5 of its length after its head.
_LONG_ITEM = 65528


@dataclass(frozen=True)
class QueueDefinition:
    """A durable queue of the node.

    Attributes
    ----------
    vhost, name : str
    type : str
        ``rabbit_classic_queue``, ``rabbit_quorum_queue``, ``rabbit_stream_queue``; empty where the node says none.
    arguments : dict
        The ``x-`` arguments that it was declared with.
    """

    vhost: str
    name: str
    type: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def levels(self) -> tuple[int | None, ...]:
        """tuple: the priority levels, of which each has a directory; ``(None,)`` for a queue without."""
        highest = self.arguments.get("x-max-priority")
        if isinstance(highest, bool) or not isinstance(highest, int) or not 0 < highest <= 255:
            return (None,)
        return tuple(range(highest + 1))


def fate_of_expired(definition: QueueDefinition | None) -> str:
    """str: what the node does with messages of this queue that have expired, as far as its own arguments say.

    A policy can name an exchange too; the arguments go before it.  None: the node's definitions are not known.
    """
    if definition is None:
        return "the node drops them, or dead-letters them if the queue's arguments or a policy say so, which is not known here"
    exchange, key = (definition.arguments.get(f"x-dead-letter-{name}") for name in ("exchange", "routing-key"))
    if not isinstance(exchange, str):
        return "the node drops them, unless a policy names a dead-letter exchange"
    if exchange == "":
        if isinstance(key, str):
            return f"the node dead-letters them into queue {key!r}"
        return "the node dead-letters them into the queues that their own routing keys name"
    routing = f"routing key {key!r}" if isinstance(key, str) else "their own routing keys"
    return f"the node dead-letters them to exchange {exchange!r} with {routing}"


def data_directory(vhost_path: str | os.PathLike[str]) -> str | None:
    """str or None: the node's data directory that this vhost directory stands in (``<it>/msg_stores/vhosts/<vhost>``)."""
    parts = os.path.abspath(os.fspath(vhost_path)).split(os.sep)
    return os.sep.join(parts[:-3]) if parts[-3:-1] == ["msg_stores", "vhosts"] else None


def _items(path: str) -> Iterator[Any]:
    """The terms of a disk_log; ends at the first item that is not whole, as a log that was being written does."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return
    if data[:4] != _MAGIC:
        return
    pos = 8
    while pos + 8 <= len(data):
        size = int.from_bytes(data[pos : pos + 4], "big")
        if data[pos + 4 : pos + 8] != _ITEM:
            return
        pos += 8 + (16 if size >= _LONG_ITEM else 0)
        if pos + size > len(data):
            return
        try:
            yield term.decode(data[pos : pos + size])
        except CorruptionError:
            return
        pos += size


def _definition(record: Any) -> QueueDefinition | None:
    """The queue of an amqqueue record of any version: the name comes second, arguments are the first list of triples."""
    if not isinstance(record, tuple) or len(record) < 3 or record[0] != "amqqueue":
        return None
    name = record[1]
    if not isinstance(name, tuple) or len(name) != 4 or name[2] != "queue":
        return None
    arguments: dict[str, Any] = {}
    kind = ""
    for part in record[2:]:
        if isinstance(part, list) and part and all(isinstance(each, tuple) and len(each) == 3 for each in part):
            for key, _, value in part:
                if isinstance(key, bytes):
                    arguments[key.decode("utf-8", "surrogateescape")] = (
                        value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
                    )
        elif isinstance(part, str) and part.startswith("rabbit_") and part.endswith("_queue"):
            kind = str(part)
    texts = [each.decode("utf-8", "surrogateescape") if isinstance(each, bytes) else str(each) for each in name]
    return QueueDefinition(texts[1], texts[3], kind, arguments)


def _changes(entry: Any) -> Iterator[tuple[Any, Any, str]]:
    """(key, record, operation) for this table in an entry of a log: one change, or a commit that holds lists of them."""
    if not isinstance(entry, tuple):
        return
    if (
        len(entry) == 3
        and isinstance(entry[0], tuple)
        and len(entry[0]) == 2
        and entry[0][0] == _TABLE
        and entry[2] in ("write", "delete", "delete_object")
    ):
        yield entry[0][1], entry[1], str(entry[2])
    elif entry and entry[0] == "commit":
        for part in entry[1:]:
            if isinstance(part, list):
                for each in part:
                    yield from _changes(each)


def durable_queues(directory: str | os.PathLike[str]) -> dict[tuple[str, str], QueueDefinition] | None:
    """Read which durable queues a stopped node knows.

    Parameters
    ----------
    directory : path
        The node's data directory (``RABBITMQ_MNESIA_DIR``).

    Returns
    -------
    dict of (str, str) to QueueDefinition, or None
        By vhost and name; None where the directory has no such Mnesia table.
    """
    folder = os.fspath(directory)
    table = os.path.join(folder, _TABLE)
    if not any(os.path.exists(table + suffix) for suffix in (".DCD", ".DCL")):
        return None
    found: dict[Any, Any] = {}
    for record in _items(table + ".DCD"):
        if isinstance(record, tuple) and record and record[0] == "amqqueue":
            found[repr(record[1])] = record
    logs = [table + ".DCL", os.path.join(folder, "PREVIOUS.LOG"), os.path.join(folder, "LATEST.LOG")]
    for path in logs:
        for entry in _items(path):
            for key, record, operation in _changes(entry):
                if operation == "write":
                    found[repr(key)] = record
                else:
                    found.pop(repr(key), None)
    queues = filter(None, map(_definition, found.values()))
    return {(queue.vhost, queue.name): queue for queue in queues}
