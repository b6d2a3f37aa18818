"""The disk of a real node before damage: the same queues in many vhosts, made once a session.

Owns the operations: which queues there are, what is published and acked.  It never imports rmqstore and decodes nothing.  Small
numbers make much of the format appear with few messages: 64 entries a segment, a flush after 100 actions, message files of
64 KiB.  A vhost for each case lets one boot decide on many cases; all vhosts are alike but for their names, which are in the
bodies.

Two images of the whole data of the node: `clean` after an orderly stop, `killed` after the same, a boot, some more operations
and `kill -9`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

from rabbitmq_node import Field, Node, Outgoing, receive, send

SEGMENT_ENTRY_COUNT = 64
MAX_JOURNAL_ENTRIES = 100
FILE_SIZE_LIMIT = 65536
SETTINGS = {
    "queue_index_segment_entry_count": str(SEGMENT_ENTRY_COUNT),
    "queue_index_max_journal_entries": str(MAX_JOURNAL_ENTRIES),
    "msg_store_file_size_limit": str(FILE_SIZE_LIMIT),
}
NUMBER = 30
DAY = "86400000"
MAX_PRIORITY = 2

#: Queues and their arguments; all durable.
QUEUES: dict[str, dict[str, Any]] = {
    # Embedded messages over several segments, some acked, the first segment gone; in `killed` more of both in the journal.
    "small": {},
    # Messages in the store, over several of its files, some acked.
    "big": {},
    # Bound to one exchange: the same messages in both, large ones stored once.
    "fan.a": {},
    "fan.b": {},
    # One directory for each priority.
    "priority": {"x-max-priority": MAX_PRIORITY},
    # Headers of every type, expiry, CC and BCC, a body of several frames.
    "properties": {},
    "copies": {},
    # Transient messages among persistent ones.
    "lazy": {"x-queue-mode": "lazy"},
    # Version 2 of the index.
    "two": {"x-queue-version": 2},
    # Empty until the operations before the kill: a journal and no segment.
    "fresh": {},
    # Never used: no directory.
    "unused": {},
}

HEADERS: dict[str, Any] = {
    "longstr": "text",
    "utf-8": "grün",
    "binary": b"\x00\xff",
    "signedint": -5,
    "long": 2**40,
    "bool": True,
    "false": False,
    "void": None,
    "double": Field("d", struct.pack(">d", 2.5)),
    "float": Field("f", struct.pack(">f", 0.5)),
    "byte": Field("b", struct.pack(">b", -3)),
    "unsignedbyte": Field("B", b"\xfe"),
    "short": Field("s", struct.pack(">h", -300)),
    "unsignedshort": Field("u", struct.pack(">H", 60000)),
    "unsignedint": Field("i", struct.pack(">I", 4_000_000_000)),
    "decimal": Decimal("3.14"),
    "timestamp": datetime(2024, 2, 29, 12, tzinfo=timezone.utc),
    "table": {"inner": {"deep": [1, "two", {"three": 3}]}},
    "array": [1, True, None, "x", [2]],
}
ALL_PROPERTIES: dict[str, Any] = {
    "content_type": "text/plain",
    "content_encoding": "utf-8",
    "priority": 7,
    "correlation_id": "c-1",
    "reply_to": "answers",
    "expiration": DAY,
    "message_id": "m-1",
    "timestamp": 1_700_000_000,
    "type": "t",
    "user_id": "guest",
    "app_id": "rmqstore",
    "cluster_id": "c",
}


@dataclass(frozen=True)
class Images:
    """Both images; copy them with `Node.restore`."""

    vhosts: tuple[str, ...]
    clean: Path
    killed: Path

    def image(self, state: str) -> Path:
        """`clean` or `killed`."""
        return {"clean": self.clean, "killed": self.killed}[state]


def vhost_names(number: int = NUMBER) -> tuple[str, ...]:
    """v00, v01, ..."""
    return tuple(f"v{i:02}" for i in range(number))


def build(
    node: Node,
    folder: Path,
    number: int = NUMBER,
    more: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> Images:
    """Make both images below `folder`; the node, which must not run yet, does not run afterwards.

    `more` are further vhosts with queues by name and their arguments, which stay empty: {vhost: {queue: arguments}}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images = Images(vhost_names(number), folder / "clean", folder / "killed")
    node.start()
    stay_awake(node)
    node.add_vhosts([*images.vhosts, *(more or {})])
    _for_each(images.vhosts, lambda vhost: fill(node, vhost))
    for vhost, queues in (more or {}).items():
        declare(node, vhost, queues)
    node.rest()
    node.save(images.clean)
    node.start()
    stay_awake(node)
    _for_each(images.vhosts, lambda vhost: fill_more(node, vhost))
    node.kill9()
    node.save(images.killed)
    return images


def _for_each(vhosts: Iterable[str], work: Callable[[str], None]) -> None:
    # Most of the time is spent waiting for confirms.
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, vhosts))


def stay_awake(node: Node) -> None:
    """Keep the queues from hibernating, which would move journals into segments whenever the machine is slow."""
    node.eval(
        "spawn(fun Ask() -> case catch rabbit_amqqueue:list() of "
        "Queues when is_list(Queues) -> [catch rabbit_amqqueue:stat(Q) || Q <- Queues], timer:sleep(300), Ask(); "
        "_ -> stopped end end), ok"
    )


def declare(node: Node, vhost: str, queues: Mapping[str, Mapping[str, Any]]) -> None:
    """Durable queues with their arguments."""
    with node.channel(vhost) as channel:
        for name, arguments in queues.items():
            channel.queue_declare(name, durable=True, arguments=dict(arguments))


def _bind(node: Node, vhost: str) -> None:
    with node.channel(vhost) as channel:
        channel.exchange_declare("fan", "fanout", durable=True)
        for name in ("fan.a", "fan.b"):
            channel.queue_bind(name, "fan")


def small_body(vhost: str, i: int) -> bytes:
    """Of message `i` of the queue small."""
    return b"small-%04d-" % i + vhost.encode()


def big_body(vhost: str, i: int) -> bytes:
    """Of message `i` of the queue big, between 5 and 7 KB."""
    return (b"big-%04d-" % i + vhost.encode()).ljust(5000 + 37 * (i % 50), b"%c" % (65 + i % 26))


def acked_small(i: int) -> bool:
    """Whether `fill` acks message `i` of small: the first 70, then each third up to 192."""
    return i < 70 or (i < 192 and i % 3 == 0)


def fill(node: Node, vhost: str) -> None:
    """The contents of both images."""
    declare(node, vhost, QUEUES)
    _bind(node, vhost)
    with node.channel(vhost) as channel:
        send(channel, (Outgoing(small_body(vhost, i), routing_key="small") for i in range(260)))
        send(channel, (Outgoing(big_body(vhost, i), routing_key="big") for i in range(34)))
        send(channel, _fan_out(vhost))
        send(
            channel,
            (
                Outgoing(b"priority-%d-%02d-" % (i % 4, i) + vhost.encode(), {"priority": i % 4}, "", "priority")
                for i in range(12)
            ),
        )
        send(channel, _with_properties(vhost))
        send(channel, _lazy(vhost))
        send(channel, (Outgoing(b"two-%02d-" % i + vhost.encode(), {}, "", "two") for i in range(30)))
        send(channel, (Outgoing(big_body(vhost, i), {}, "", "two") for i in range(4)))
    with node.channel(vhost) as channel:
        receive(channel, "small", ack=acked_small, limit=192)
        receive(channel, "big", ack=lambda i: i < 3 or i % 4 == 0, limit=30)
        receive(channel, "fan.a", ack=True, limit=4)
        receive(channel, "two", ack=True, limit=5)


def _fan_out(vhost: str) -> Iterator[Outgoing]:
    for i in range(8):
        body = b"fan-%d-" % i + vhost.encode()
        yield Outgoing(body if i % 2 else body.ljust(6000, b"."), {}, "fan", "key")


def _with_properties(vhost: str) -> Iterator[Outgoing]:
    name = vhost.encode()
    yield Outgoing(b"none-" + name, {}, "", "properties")
    yield Outgoing(b"all-" + name, {**ALL_PROPERTIES, "headers": HEADERS}, "", "properties")
    yield Outgoing(b"stored-" + name + b"-" * 5000, {**ALL_PROPERTIES, "headers": HEADERS}, "", "properties")
    yield Outgoing(b"cc-" + name, {"headers": {"CC": ["copies"], "n": 1}}, "", "properties")
    # The broker strips BCC, and then keeps the properties decoded.
    yield Outgoing(b"bcc-" + name, {"headers": {"BCC": ["copies"], **HEADERS}, "type": "b"}, "", "properties")
    yield Outgoing(b"frames-" + name + bytes(300_000), {}, "", "properties")
    yield Outgoing(b"", {"message_id": "empty"}, "", "properties")


def _lazy(vhost: str) -> Iterator[Outgoing]:
    for i in range(8):
        body = b"lazy-%d-" % i + vhost.encode()
        yield Outgoing(body if i < 6 else body.ljust(5000, b"."), {"delivery_mode": 1 + i % 2}, "", "lazy")


def fill_more(node: Node, vhost: str) -> None:
    """The other contents of the image `killed`, mostly in journals."""
    with node.channel(vhost) as channel:
        # The first segment is acked from the journal; what was published before the boot is in segments.
        receive(channel, "small", ack=lambda i: i % 2 == 0, limit=12)
        receive(channel, "big", ack=True, limit=2)
        send(channel, (Outgoing(b"fresh-%02d-" % i + vhost.encode(), {}, "", "fresh") for i in range(16)))
        send(channel, (Outgoing(b"two-more-%02d-" % i + vhost.encode(), {}, "", "two") for i in range(3)))
    with node.channel(vhost) as channel:
        receive(channel, "fresh", ack=True, limit=3)
        # Acks lie in the process for up to 200 ms, but are written with what is confirmed after them.
        send(channel, (Outgoing(small_body(vhost, i), {}, "", "small") for i in range(260, 276)))
        send(channel, (Outgoing(big_body(vhost, i), {}, "", "big") for i in range(34, 37)))
        send(channel, (Outgoing(b"fresh-%02d-" % i + vhost.encode(), {}, "", "fresh") for i in range(16, 20)))


def queues_and_levels() -> Sequence[tuple[str, int | None]]:
    """Every directory that a filled vhost has: the name of its queue and the priority."""
    found: list[tuple[str, int | None]] = []
    for name, arguments in QUEUES.items():
        levels = arguments.get("x-max-priority")
        found += [(name, None)] if levels is None else [(name, level) for level in range(levels + 1)]
    return [one for one in found if one[0] != "unused"]
