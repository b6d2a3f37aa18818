"""The types of AMQP 0-9-1: properties and header tables, decoded so that encoding them gives the bytes that a node writes.

Owns the names under which the types are public; the work is done by the compiled `_term`.  It knows no message and no file.
Where Python's types cannot tell AMQP's apart, a small type of this module says which one it is; plain values are
encoded as a node's usual clients do: bool as ``t``, int as ``I`` or beyond 32 bits as ``l``, float as ``d``, str as ``S``,
bytes as ``x``, list as ``A``, dict as ``F``, None as ``V``, `decimal.Decimal` as ``D`` and `datetime.datetime` as ``T``.
"""

from __future__ import annotations

from rmqstore.rabbitmq._term import (
    PROPERTY_NAMES,
    FieldInt,
    Float32,
    Int8,
    Int16,
    Int64,
    Table,
    Timestamp,
    UInt8,
    UInt16,
    UInt32,
    decode_properties,
    decode_table,
    encode_properties,
    encode_table,
)

__all__ = [
    "PROPERTY_NAMES",
    "FieldInt",
    "Float32",
    "Int8",
    "Int16",
    "Int64",
    "Table",
    "Timestamp",
    "UInt8",
    "UInt16",
    "UInt32",
    "decode_properties",
    "decode_table",
    "encode_properties",
    "encode_table",
]
