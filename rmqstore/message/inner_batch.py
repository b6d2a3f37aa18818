"""Several messages as the body of one: the client form that RocketMQ's producers send and inner batches keep.

Every length that comes out of a body is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rmqstore.errors import CorruptionError, InvalidMessageError
from rmqstore.message.properties import properties_to_bytes

if TYPE_CHECKING:
    from rmqstore.message.message import Message

__all__ = ["encode_inner_batch", "split_client_form"]

_I16 = struct.Struct(">h")
_CLIENT_FORM = struct.Struct(">iiiii")  # size, magic 0, CRC 0, flag, body length


def encode_inner_batch(messages: Iterable[Message]) -> bytes:
    """Body of an inner batch: the messages in client form, one after the other.

    Client form: i32 size, i32 0, i32 0, i32 flag, i32 body length, body, i16 properties length, properties.

    Raises
    ------
    InvalidMessageError
        A message that `Message.validate` refuses, messages of several topics, or none at all.
    """
    parts: list[bytes] = []
    topic: str | None = None
    for message in messages:
        message.validate()
        if topic is not None and message.topic != topic:
            raise InvalidMessageError(
                f"a batch is of one topic, this one has {topic!r} and {message.topic!r}: put them in two"
            )
        topic = message.topic
        properties = properties_to_bytes(message.properties)
        size = _CLIENT_FORM.size + len(message.body) + _I16.size + len(properties)
        parts += (
            _CLIENT_FORM.pack(size, 0, 0, message.flag, len(message.body)),
            message.body,
            _I16.pack(len(properties)),
            properties,
        )
    if topic is None:
        raise InvalidMessageError("a batch needs at least one message")
    return b"".join(parts)


def split_client_form(data: bytes, phy_offset: int) -> Iterable[tuple[int, int, bytes, bytes]]:
    """The messages of an inner batch's body: bytes each takes, flag, body, properties as bytes.

    Raises
    ------
    CorruptionError
        The lengths do not fit together; names the batch and the byte of its body.
    """

    def broken(pos: int, what: str) -> CorruptionError:
        return CorruptionError(f"the batch at phy offset {phy_offset} is damaged at byte {pos} of its body: {what}")

    pos = 0
    while pos < len(data):
        rest = len(data) - pos
        if rest < _CLIENT_FORM.size + _I16.size:
            raise broken(pos, f"{rest} bytes are too few for a message")
        size, _, _, flag, body_size = _CLIENT_FORM.unpack_from(data, pos)
        if not _CLIENT_FORM.size + _I16.size <= size <= rest:
            raise broken(pos, f"a message of {size} bytes, {rest} are left")
        if not 0 <= body_size <= size - _CLIENT_FORM.size - _I16.size:
            raise broken(pos, f"a body of {body_size} bytes in a message of {size}")
        body_end = pos + _CLIENT_FORM.size + body_size
        (properties_size,) = _I16.unpack_from(data, body_end)
        if body_end + _I16.size + properties_size != pos + size:
            raise broken(pos, f"properties of {properties_size} bytes do not fill the message")
        body = data[pos + _CLIENT_FORM.size : body_end]
        yield size, flag, body, data[body_end + _I16.size : pos + size]
        pos += size
