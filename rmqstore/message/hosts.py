"""Hosts as a record holds them, and the message ids that a broker makes of a host and a phy offset."""

from __future__ import annotations

import functools
import re
import struct

from rmqstore.errors import CorruptionError, InvalidMessageError

__all__ = ["host_from_bytes", "host_to_bytes", "offset_message_id", "parse_message_id"]

_I32 = struct.Struct(">i")


def host_to_bytes(host: str) -> bytes:
    """Encode ``"ip:port"`` or ``"[v6]:port"`` as a record does: 4 or 16 address bytes, then the port as i32.

    Returns
    -------
    bytes
        8 bytes for IPv4, 20 for IPv6, big-endian.

    Raises
    ------
    InvalidMessageError
        The text is not a numeric address with a port of 0 to 65535.
    """
    if not isinstance(host, str):
        raise InvalidMessageError(f"host {host!r} is not text: write it as '10.0.0.1:10911' or '[2001:db8::1]:10911'")
    return _pack_host(host)


# The same few hosts come with every message.
@functools.lru_cache(maxsize=4096)
def _pack_host(host: str) -> bytes:
    import ipaddress

    try:
        address, colon, port_text = host.rpartition(":")
        if not colon or not port_text.isascii() or not port_text.isdigit():
            raise ValueError(host)
        port = int(port_text)
        if port > 65535:
            raise ValueError(host)
        if address.startswith("[") and address.endswith("]"):
            packed = ipaddress.IPv6Address(address[1:-1]).packed
        else:
            packed = ipaddress.IPv4Address(address).packed
    except ValueError:
        raise InvalidMessageError(
            f"host {host!r} is not a numeric address and a port: write it as '10.0.0.1:10911' or '[2001:db8::1]:10911'"
        ) from None
    return packed + _I32.pack(port)


def host_from_bytes(data: bytes) -> str:
    """Text of a host as a record holds it (8 or 20 bytes): ``"ip:port"`` or ``"[v6]:port"`` in compressed form.

    Raises
    ------
    CorruptionError
        The data is neither 8 nor 20 bytes long.
    """
    if len(data) == 8:
        return f"{data[0]}.{data[1]}.{data[2]}.{data[3]}:{_I32.unpack_from(data, 4)[0]}"
    if len(data) == 20:
        import ipaddress

        return f"[{ipaddress.IPv6Address(bytes(data[:16])).compressed}]:{_I32.unpack_from(data, 16)[0]}"
    raise CorruptionError(f"a stored host takes 8 or 20 bytes, not {len(data)}")


def offset_message_id(store_host: str | bytes, phy_offset: int) -> str:
    """Message id that a broker returns: upper-case hex of the store host (text or its 8 or 20 bytes) and the offset.

    32 digits for an IPv4 host, 56 for IPv6.
    """
    host = host_to_bytes(store_host) if isinstance(store_host, str) else bytes(store_host)
    return (host + phy_offset.to_bytes(8, "big", signed=True)).hex().upper()


def parse_message_id(msg_id: str) -> tuple[str, int]:
    """Store host and phy offset of an offset message id.

    Raises
    ------
    InvalidMessageError
        Not 32 or 56 hex digits, or a negative offset.
    """
    if not isinstance(msg_id, str) or len(msg_id) not in (32, 56) or not re.fullmatch("[0-9a-fA-F]+", msg_id):
        raise InvalidMessageError(
            f"{msg_id!r} is not an offset message id: it has 32 (IPv4) or 56 (IPv6) hex digits; "
            "a producer's unique key is looked up with query_message"
        )
    data = bytes.fromhex(msg_id)
    phy_offset = int.from_bytes(data[-8:], "big", signed=True)
    if phy_offset < 0:
        raise InvalidMessageError(f"message id {msg_id} holds a negative phy offset: it is a unique key or damaged")
    return host_from_bytes(data[:-8]), phy_offset
