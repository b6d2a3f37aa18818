"""AMQP 0-9-1 properties and tables: every type of a field, bytes that come back, values that no field holds, damage."""

from __future__ import annotations

import datetime
import decimal
import pickle
import struct

import classic_queue_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmqstore.errors import CorruptionError, InvalidMessageError
from rmqstore.rabbitmq import amqp

# Each type of a field: its bytes after the name, and the value.
FIELDS = [
    (b"t\0", False),
    (b"t\1", True),
    (b"b\x80", amqp.Int8(-128)),
    (b"B\xff", amqp.UInt8(255)),
    (b"s\x80\0", amqp.Int16(-32768)),
    (b"u\xff\xff", amqp.UInt16(65535)),
    (b"I\x80\0\0\0", -(2**31)),
    (b"I\0\0\0\5", 5),
    (b"i\xff\xff\xff\xff", amqp.UInt32(2**32 - 1)),
    (b"l\0\0\0\0\0\0\0\5", amqp.Int64(5)),
    (b"l\0\0\1\0\0\0\0\0", 2**40),
    (b"l\x80\0\0\0\0\0\0\0", -(2**63)),
    (b"f\x3f\xc0\0\0", amqp.Float32(1.5)),
    (b"d\x3f\xf8\0\0\0\0\0\0", 1.5),
    (b"D\2\0\0\1\x3a", decimal.Decimal("3.14")),
    (b"D\0\0\0\0\0", decimal.Decimal(0)),
    (b"D\5\xff\xff\xff\xff", decimal.Decimal("42949.67295")),
    (b"S\0\0\0\4text", "text"),
    (b"S\0\0\0\1\xff", "\udcff"),
    (b"S\0\0\0\2\xc3\xa9", "é"),
    (b"A\0\0\0\0", []),
    (b"T\0\0\0\0\x65\x53\xf1\0", amqp.Timestamp(1700000000)),
    (b"T\xff\xff\xff\xff\xff\xff\xff\xff", amqp.Timestamp(2**64 - 1)),
    (b"F\0\0\0\0", {}),
    (b"A\0\0\0\x0at\1VS\0\0\0\2ab", [True, None, "ab"]),
    (b"F\0\0\0\7\1aI\0\0\0\7", {"a": 7}),
    (b"V", None),
    (b"x\0\0\0\2\0\xff", b"\0\xff"),
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda part: repr(part)[:30])
def test_every_type_of_a_field(field, value):
    table = b"\4name" + field
    decoded = amqp.decode_table(table)
    assert decoded == {"name": value}
    assert type(decoded["name"]) is type(value)
    assert amqp.encode_table(decoded) == table
    assert amqp.encode_table(pickle.loads(pickle.dumps(decoded))) == table
    inside = b"\1aA" + struct.pack(">I", len(field)) + field
    assert amqp.encode_table(amqp.decode_table(inside)) == inside


def test_letters_of_the_specification_are_taken_as_a_node_takes_them():
    decoded = amqp.decode_table(b"\1kL\0\0\0\0\0\0\0\5")
    assert decoded == {"k": 5} and amqp.encode_table(decoded) == b"\1kl\0\0\0\0\0\0\0\5"
    with pytest.raises(CorruptionError, match="'U' is not a type"):
        amqp.decode_table(b"\1kU\0\5")


def test_plain_values_get_the_types_of_the_usual_clients():
    zone = datetime.timezone.utc
    for value, field in [
        (2**31 - 1, b"I\x7f\xff\xff\xff"),
        (2**31, b"l\0\0\0\0\x80\0\0\0"),
        ((1,), b"A\0\0\0\5I\0\0\0\1"),
        (bytearray(b"a"), b"x\0\0\0\1a"),
        (datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=zone), b"T\0\0\0\0\x65\x53\xf1\0"),
    ]:
        assert amqp.encode_table({"n": value}) == b"\1n" + field
    assert amqp.Timestamp(1700000000).datetime == datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=zone)


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63) - 1,
        object(),
        decimal.Decimal("-1"),
        decimal.Decimal("NaN"),
        decimal.Decimal("1e5"),
        decimal.Decimal(2**32),
        datetime.datetime(2023, 1, 1),
        datetime.datetime(1900, 1, 1, tzinfo=datetime.timezone.utc),
        {"k" * 256: 1},
        {b"k": 1},
    ],
)
def test_what_no_field_holds_is_refused(value):
    with pytest.raises(InvalidMessageError):
        amqp.encode_table({"n": value})


def test_lists_that_are_too_deep_are_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(InvalidMessageError):
        amqp.encode_table({"n": value})


@pytest.mark.parametrize(
    ("kind", "value"),
    [(amqp.Int8, 128), (amqp.UInt8, -1), (amqp.UInt16, 65536), (amqp.Int64, 2**63), (amqp.Timestamp, -1)],
)
def test_the_types_know_their_ranges(kind, value):
    with pytest.raises(ValueError):
        kind(value)


def test_a_name_that_occurs_twice_loses_nothing():
    table = b"\1at\1\1bV\1at\0"
    decoded = amqp.decode_table(table)
    assert decoded == {"a": True, "b": None}
    assert decoded.pairs == (("a", True), ("b", None), ("a", False))
    assert amqp.encode_table(decoded) == table
    assert amqp.encode_table(pickle.loads(pickle.dumps(decoded))) == table


ALL = {
    "content_type": "text/plain",
    "content_encoding": "utf-8",
    "headers": {"a": 1, "b": {"c": ["d", None]}},
    "delivery_mode": 2,
    "priority": 7,
    "correlation_id": "corr",
    "reply_to": "reply",
    "expiration": "1000",
    "message_id": "id",
    "timestamp": amqp.Timestamp(1700000000),
    "type": "type",
    "user_id": "guest",
    "app_id": "app",
    "cluster_id": "cluster",
}


def oracle_value(typed):
    """The oracle's field as a value of Python."""
    letter, value = typed
    if letter == "A":
        return [oracle_value(one) for one in value]
    if letter == "F":
        return {name.decode(): oracle_value(one) for name, one in value}
    return value.decode("utf-8", "surrogateescape") if letter == "S" else value


def test_properties_one_by_one_and_all():
    for chosen in [{}, ALL, *({name: value} for name, value in ALL.items())]:
        data = amqp.encode_properties(chosen)
        assert amqp.decode_properties(data) == chosen
        assert list(amqp.decode_properties(data)) == list(chosen)
        seen = oracle.decode_properties(data)
        if "headers" in seen:
            seen["headers"] = {name.decode(): oracle_value(typed) for name, typed in seen["headers"]}
        assert {name: value.decode() if isinstance(value, bytes) else value for name, value in seen.items()} == chosen
    assert amqp.encode_properties({"delivery_mode": 2, "type": None}) == b"\x10\0\2"


def test_flags_that_go_on():
    # Bit 0 says that another word of flags follows; the class basic has nothing to say there.
    assert amqp.decode_properties(b"\x10\1\0\0\2") == {"delivery_mode": 2}
    assert amqp.decode_properties(b"\x10\1\0\1\0\0\2") == {"delivery_mode": 2}
    for wrong in (b"\x10\1\0\2\2", b"\x10\1", b"\x10\2\2", b"\x10\1\x80\0\2"):
        with pytest.raises(CorruptionError):
            amqp.decode_properties(wrong)


names = st.text(max_size=20)
fields = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=30)
    | st.binary(max_size=30)
    | st.integers(0, 2**32 - 1).map(lambda number: decimal.Decimal(number).scaleb(-3))
    | st.integers(-128, 127).map(amqp.Int8)
    | st.integers(0, 2**16 - 1).map(amqp.UInt16)
    | st.integers(-(2**31), 2**31 - 1).map(amqp.Int64)
    | st.integers(0, 2**64 - 1).map(amqp.Timestamp)
    | st.floats(width=32, allow_nan=False).map(amqp.Float32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(names, fields, max_size=6))
@settings(max_examples=50, deadline=None)
def test_tables_come_back(table):
    data = amqp.encode_table(table)
    assert amqp.decode_table(data) == table
    assert amqp.encode_table(amqp.decode_table(data)) == data


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_table_or_refused(data):
    for decode in (amqp.decode_table, amqp.decode_properties):
        try:
            decode(data)
        except CorruptionError as error:
            assert error.pos is not None and 0 <= error.pos <= len(data)


def test_every_flipped_bit_and_every_cut():
    data = amqp.encode_properties({**ALL, "headers": {str(i): value for i, (_, value) in enumerate(FIELDS)}})
    for at in range(8 * len(data)):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        try:
            amqp.decode_properties(bytes(changed))
        except CorruptionError:
            pass
    for size in range(len(data)):
        with pytest.raises(CorruptionError):
            amqp.decode_properties(data[:size])


def test_deep_tables_are_refused():
    for depth, good in ((200, True), (300, False), (50_000, False)):
        content = b""
        for _ in range(depth):
            content = b"\1aF" + struct.pack(">I", len(content)) + content
        if good:
            assert amqp.encode_table(amqp.decode_table(content)) == content
        else:
            with pytest.raises(CorruptionError):
                amqp.decode_table(content)
