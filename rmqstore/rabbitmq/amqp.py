"""The types of AMQP 0-9-1, decoded so that encoding them makes the bytes of a node; and their values as JSON.

Owns the public names of the types, which the compiled `_term` implements, and JSON objects of one ``$`` name for types that
JSON does not have.  It knows no message and no file.  Types that Python does not distinguish have a class in this module;
plain values are encoded as by a node's usual clients: bool as ``t``, int as ``I`` or beyond 32 bits as ``l``, float as
``d``, str as ``S``, bytes as ``x``, list as ``A``, dict as ``F``, None as ``V``, `decimal.Decimal` as ``D`` and
`datetime.datetime` as ``T``.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Mapping
from typing import Any

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
    "from_json",
    "header_text",
    "json_value",
    "utf8",
]

# AMQP's types of numbers that JSON does not distinguish.
_NUMBERS = {kind: f"${kind.__name__.lower()}" for kind in (Int8, Int16, Int64, UInt8, UInt16, UInt32, Float32)}


def json_value(value: Any) -> Any:
    """Convert the value of a property or header to JSON, with objects of one ``$`` name for types that JSON does not have."""
    if isinstance(value, Table):
        return {"$pairs": [[name, json_value(item)] for name, item in value.pairs]}
    if isinstance(value, Mapping):
        table = {str(name): json_value(item) for name, item in value.items()}
        # A table that looks like such an object has to stay a table.
        return {"$table": table} if len(table) == 1 and next(iter(table)).startswith("$") else table
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, Timestamp):
        return {"$timestamp": int(value)}
    if type(value) in _NUMBERS:
        plain = value.real
        # JSON has no word for these.
        return {_NUMBERS[type(value)]: repr(float(plain)) if isinstance(plain, float) and plain - plain != 0 else plain}
    if isinstance(value, (bytes, bytearray)):
        return {"$binary": base64.b64encode(value).decode()}
    if isinstance(value, datetime.datetime):
        return {"$timestamp": int(value.timestamp())}
    if isinstance(value, decimal.Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"$float": repr(value)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool) or value is None:
        return value
    return int(value) if isinstance(value, int) else value


def header_text(headers: dict[str, Any]) -> str:
    """Return a table of headers as JSON."""
    text = json.dumps(json_value(headers), ensure_ascii=False, separators=(",", ":"))
    return utf8(text)


def utf8(text: str) -> str:
    """Return text that Arrow takes."""
    # Arrow refuses surrogates, which stand for bytes that are not UTF-8; JSON reads the escapes.
    return text.encode("utf-8", "backslashreplace").decode()


_FROM_JSON = {
    "$binary": lambda text: base64.b64decode(text, validate=True),
    "$timestamp": Timestamp,
    "$decimal": decimal.Decimal,
    "$float": float,
    "$table": lambda table: {name: from_json(item) for name, item in table.items()},
    "$pairs": lambda pairs: Table((name, from_json(item)) for name, item in pairs),
    **{name: kind for kind, name in _NUMBERS.items()},
    "$float32": lambda number: Float32(float(number)),
}


def from_json(value: Any) -> Any:
    """Convert JSON of `json_value` back to the value."""
    if isinstance(value, dict):
        if len(value) == 1:
            (name,) = value
            if name in _FROM_JSON:
                return _FROM_JSON[name](value[name])
        return {name: from_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value
