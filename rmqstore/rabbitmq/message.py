"""A message as RabbitMQ stores it: one Erlang term, read lazily or made with the bytes of a node.

Owns the rules for a new message (a broker's limits, the persistent flag), the choice between queue index and message
store, and the description of messages that cannot be read.  Parsing and encoding are the compiled `_term`'s; it opens no
file.  Invariants: a `Message` never changes; `term` has the bytes that were read.

Source of all rules: RabbitMQ 3.10.8 on OTP 25; message containers: 3.13 and 4.x.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rmqstore.errors import CorruptionError, InvalidMessageError, StoreError
from rmqstore.rabbitmq import _term

__all__ = [
    "DEFAULT_EMBED_BELOW",
    "LostMessage",
    "LostMessages",
    "Message",
    "checked_term",
    "undecoded",
]

logger = logging.getLogger(__name__)

# queue_index_embed_msgs_below
DEFAULT_EMBED_BELOW = 4096


def _name(text: str, what: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidMessageError(f"{what} is a {type(text).__name__}, not a str")
    encoded = text.encode("utf-8", "surrogateescape")
    if len(encoded) > 255:
        raise InvalidMessageError(f"{what} has {len(encoded)} bytes; AMQP allows 255")
    return encoded


def _parts(
    properties: Mapping[str, Any] | bytes | None,
    exchange: str,
    routing_keys: Sequence[str],
    vhost: str,
    persistent: bool | None,
) -> tuple[bytes, bytes, list[bytes], bytes, bool]:
    """Encode the parts of a term other than payload and identity."""
    if isinstance(routing_keys, (str, bytes)):
        raise InvalidMessageError("routing_keys is a sequence of str: give a list, such as ['key']")
    if isinstance(properties, bytes):
        encoded = properties
        delivery_mode = _term.decode_properties(properties).get("delivery_mode")
    else:
        given = {} if properties is None else properties if isinstance(properties, dict) else dict(properties)
        delivery_mode = given.get("delivery_mode")
        encoded = _term.encode_properties(given)
    if delivery_mode is not None and delivery_mode not in (1, 2):
        raise InvalidMessageError(f"delivery_mode is {delivery_mode!r}; a node takes 1 and 2 only")
    if not isinstance(vhost, str):
        raise InvalidMessageError(f"vhost is a {type(vhost).__name__}, not a str")
    keys = [_name(key, "a routing key") for key in routing_keys]
    lasting = delivery_mode == 2 if persistent is None else bool(persistent)
    return encoded, _name(exchange, "exchange"), keys, vhost.encode("utf-8", "surrogateescape"), lasting


class Message(_term.MessageTerm):
    """A message, made from its parts or parsed from a term.

    Parameters
    ----------
    body : bytes-like
    properties : mapping of str to value, or bytes, optional
        By the names of `amqp.PROPERTY_NAMES`, with header values for `amqp.encode_table`; or the published property flags
        and list as bytes.
    exchange : str
    routing_keys : sequence of str
        The routing key, and those of the headers CC and BCC.
    vhost : str
    persistent : bool, optional
        Default: the property `delivery_mode` is 2, as a node decides.
    msg_id : bytes, optional
        16 bytes, unique in the node; default: random.

    Raises
    ------
    InvalidMessageError
        The format cannot hold a value, or a node would refuse it.
    """

    def __init__(
        self,
        body: bytes | bytearray | memoryview = b"",
        *,
        properties: Mapping[str, Any] | bytes | None = None,
        exchange: str = "",
        routing_keys: Sequence[str] = (),
        vhost: str = "/",
        persistent: bool | None = None,
        msg_id: bytes | None = None,
    ):
        if not isinstance(body, (bytes, bytearray, memoryview)):
            raise InvalidMessageError(f"the body is a {type(body).__name__}, not bytes")
        if msg_id is None:
            msg_id = os.urandom(16)
        elif len(msg_id) != 16:
            raise InvalidMessageError(f"msg_id has {len(msg_id)} bytes, not 16")
        parts = _parts(properties, exchange, routing_keys, vhost, persistent)
        self.load(_term.message_term(bytes(body), *parts, bytes(msg_id)))

    def embedded(self, embed_below: int = DEFAULT_EMBED_BELOW) -> bool:
        """Check that a node puts the message into the queue index, and not into the message store.

        Body and properties together must be below `embed_below`, `queue_index_embed_msgs_below` (RabbitMQ 3.10.8).
        """
        body_size = self.body_size
        return body_size < embed_below and body_size + self.properties_size < embed_below

    def __bytes__(self) -> bytes:
        return self.term

    def __eq__(self, other: object) -> bool:
        return self.term == other.term if isinstance(other, Message) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.term)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return type(self).from_term, (self.term,)

    def __repr__(self) -> str:
        size = f"{self.body_size} bytes" if self.readable else "unreadable content"
        return f"<Message {size}, exchange {self.exchange!r}, routing keys {self.routing_keys!r}>"


def checked_term(msg_id: bytes, message: Any, path: str) -> Any:
    """Return the term of a message for a message store.

    InvalidMessageError, with `path`, if it is not well-formed, or holds another id.
    """
    if not isinstance(msg_id, bytes) or len(msg_id) != 16:
        raise InvalidMessageError(f"a message id is of 16 bytes, not {msg_id!r}", path)
    term: Any = message if isinstance(message, (bytes, bytearray, memoryview)) else message.term
    if _term.extent(term) != len(term):
        try:
            _term.decode(term)
        except CorruptionError as error:
            raise InvalidMessageError(f"byte {error.pos} of the message's term: {error.message}", path) from None
    found = _term.message_id_of(term)
    # A term of an unknown shape, perhaps of a later version, is not checked.
    if found is not None and found != msg_id:
        raise InvalidMessageError(
            f"the term holds the message id {found.hex()}, not {msg_id.hex()}; a node would not boot on it", path
        )
    return term


class LostMessage(NamedTuple):
    """A message in a queue's index whose bytes are missing, damaged, or cannot be decoded.

    Attributes
    ----------
    queue : str
    seq_id : int
        Negative for a message that no index has.
    msg_id : bytes
        16 bytes.
    level : int or None
        Of a priority queue.
    path, pos : str, int
        Its entry in a file of the index, or its bytes in a message file.
    embedded : bool
        Its bytes should be in the queue's own files; otherwise in the vhost's message store.
    reason : str
        Why they cannot be decoded, or not be read although they may be whole; empty if they are lost.
    undecoded : bool
        The bytes are whole, and `MessageStore.read_term` and a directory's `entries` return them.
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
    """Return why a whole message, or its `properties`, cannot be decoded here; None if they can."""
    try:
        if not message.readable:
            message.body_size  # noqa: B018
        elif properties:
            message.properties  # noqa: B018
    except StoreError as error:
        return error.message
    return None


class LostMessages:
    """Calls `on_lost` with each lost message; without it, `warn` logs one warning for all."""

    def __init__(self, on_lost: Callable[[LostMessage], None] | None):
        self._on_lost = on_lost
        self._number = 0
        self._first: LostMessage | None = None

    def add(self, lost: LostMessage) -> None:
        """Report one."""
        if self._on_lost is not None:
            self._on_lost(lost)
            return
        self._number += 1
        self._first = self._first or lost

    def warn(self) -> None:
        """Log their number, unless `on_lost` was called."""
        if self._first is not None:
            logger.warning(
                "queue %s: lost messages left out: %d, the first is %s; verify says more",
                self._first.queue,
                self._number,
                self._first,
            )
