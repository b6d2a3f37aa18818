"""Messages: those of a real node, rebuilt with the same bytes; the parts, the rules, and damage."""

from __future__ import annotations

import decimal
import pickle
import re

import classic_queue_oracle as oracle
import golden_rabbitmq
import numpy as np
import pytest

from rmqstore._core import Region
from rmqstore.errors import CorruptionError, InvalidMessageError, StoreClosedError, UnsupportedFormatError
from rmqstore.rabbitmq import _term, amqp
from rmqstore.rabbitmq.batches import COLUMNS, arrow_array
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.term import Atom, decode, encode

LARGE = {"02-kill9-segment-plus-journal", "06-kill9-multisegment", "30-kill9-default-2048-segments"}


def message_terms(vhost, most=400):
    """(path, term) of the messages of a vhost, of files with very many only some."""
    for path in sorted(vhost.rglob("*")):
        data = path.read_bytes() if path.suffix in (".jif", ".idx", ".rdq", ".qs") else b""
        if path.suffix == ".jif":
            terms = [record.pub.term for record in oracle.parse_journal(data).records if record.pub]
        elif path.suffix == ".idx":
            terms = [record.pub.term for record in oracle.parse_segment(data, 0, 16384).records if record.pub]
        elif path.suffix == ".rdq":
            terms = [record.term for record in oracle.parse_rdq(data).records]
        elif path.suffix == ".qs":
            terms = [term for _, term, _ in oracle.parse_qs(data)[2]]
        else:
            continue
        for term in terms[:: max(1, len(terms) // most)]:
            if term:
                yield path, term


def everything(message):
    """All that a message says."""
    sizes = message.body_size, message.properties_size
    names = message.exchange, message.routing_keys, message.vhost, message.msg_id, message.persistent
    return message.body, message.properties, sizes, names


@pytest.mark.parametrize("case", golden_rabbitmq.cases())
def test_every_message_of_a_node_is_read_and_made_again(case, golden_vhost):
    count = 0
    for path, term in message_terms(golden_vhost(case)):
        message = Message.from_term(term)
        expected = oracle.message_of(oracle.decode(term))
        assert message.body == expected.body, path
        assert message.body_size == len(expected.body)
        assert message.exchange == expected.exchange.decode()
        assert message.routing_keys == [key.decode() for key in expected.routing_keys]
        assert message.vhost == expected.vhost.decode()
        assert message.msg_id == expected.msg_id == _term.message_id_of(term)
        assert message.persistent is expected.persistent
        assert list(message.properties) == list(expected.properties)
        assert message.term == bytes(message) == term
        assert encode(decode(term)) == term
        if message.raw_properties is not None:
            made = Message(
                message.body,
                properties=message.properties,
                exchange=message.exchange,
                routing_keys=message.routing_keys,
                vhost=message.vhost,
                msg_id=message.msg_id,
            )
            assert made.term == term
            assert made == message and hash(made) == hash(message)
            assert made.properties == message.properties
        count += 1
    assert count or case.startswith("1") or case == "19-clean-v2"


MESSAGE = Message(b"hello", exchange="ex", routing_keys=["a", "b"], vhost="v", msg_id=bytes(range(16)))
CONTENT = (Atom("content"), 60, Atom("none"), b"\x10\0\2", Atom("rabbit_framing_amqp_0_9_1"), [b"lo", b"hel"])


def test_the_term_of_a_message_equals_the_oracles():
    for body in (b"", b"x", b"x" * 131064, bytes(300_000)):
        message = Message(body, properties={"delivery_mode": 2}, routing_keys=["q"], msg_id=b"i" * 16)
        assert message.term == oracle.message_term(body, b"i" * 16)
        assert message.body == body
    assert MESSAGE.term == oracle.message_term(
        b"hello",
        bytes(range(16)),
        properties=b"\0\0",
        exchange=b"ex",
        routing_keys=[b"a", b"b"],
        vhost=b"v",
        persistent=False,
    )
    assert pickle.loads(pickle.dumps(MESSAGE)) == MESSAGE
    assert Message().msg_id != Message().msg_id


def test_the_rule_for_embedding():
    two = {"delivery_mode": 2}
    assert Message(bytes(4092), properties=two).embedded()
    assert not Message(bytes(4093), properties=two).embedded()
    assert not Message(b"", properties=two).embedded(0)
    assert Message(b"", properties=two).embedded(4)
    assert not Message(b"", properties=two).embedded(3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"body": "text"},
        {"routing_keys": "key"},
        {"routing_keys": ["k" * 256]},
        {"exchange": "e" * 256},
        {"exchange": b"e"},
        {"msg_id": b"short"},
        {"properties": {"delivery_mode": 3}},
        {"properties": {"delivery_mode": -1}},
        {"properties": {"nonsense": 1}},
        {"properties": {"type": 1}},
        {"properties": {"type": "t" * 256}},
        {"properties": {"headers": [1]}},
        {"properties": {"headers": {"n" * 256: 1}}},
        {"properties": {"headers": {1: 1}}},
        {"properties": {"headers": {"a": 1 << 64}}},
        {"properties": {"headers": {"a": object()}}},
        {"properties": {"timestamp": -1}},
        {"properties": {"timestamp": "now"}},
    ],
)
def test_what_a_node_would_refuse_is_refused(arguments):
    with pytest.raises(InvalidMessageError):
        Message(**arguments)


def test_a_message_with_decoded_properties():
    undefined = Atom("undefined")
    headers = [
        (b"s", Atom("longstr"), b"text"),
        (b"I", Atom("signedint"), -5),
        (b"l", Atom("long"), 1 << 40),
        (b"l5", Atom("long"), 5),
        (b"t", Atom("bool"), Atom("true")),
        (b"V", Atom("void"), undefined),
        (b"d", Atom("double"), 1.5),
        (b"f", Atom("float"), 1.5),
        (b"x", Atom("binary"), b"\0\xff"),
        (b"T", Atom("timestamp"), 1700000000),
        (b"D", Atom("decimal"), (2, 314)),
        (b"b", Atom("byte"), -1),
        (b"A", Atom("array"), [(Atom("longstr"), b"in"), (Atom("table"), [(b"k", Atom("bool"), Atom("false"))])]),
    ]
    record = (Atom("P_basic"), b"text/plain", undefined, headers, 2, *[undefined] * 5, 1700000001, *[undefined] * 4)
    value = list(decode(MESSAGE.term))
    value[3] = (Atom("content"), 60, record, Atom("none"), Atom("none"), [b"hello"])
    message = Message.from_term(encode(tuple(value)))
    assert message.raw_properties is None
    assert message.properties_size == 1300
    assert list(message.properties) == ["content_type", "headers", "delivery_mode", "timestamp"]
    table = b"".join(
        bytes((len(name),)) + name + field
        for name, field in [
            (b"s", b"S\0\0\0\4text"),
            (b"I", b"I\xff\xff\xff\xfb"),
            (b"l", b"l\0\0\1\0\0\0\0\0"),
            (b"l5", b"l\0\0\0\0\0\0\0\5"),
            (b"t", b"t\1"),
            (b"V", b"V"),
            (b"d", b"d\x3f\xf8\0\0\0\0\0\0"),
            (b"f", b"f\x3f\xc0\0\0"),
            (b"x", b"x\0\0\0\2\0\xff"),
            (b"T", b"T\0\0\0\0\x65\x53\xf1\0"),
            (b"D", b"D\2\0\0\1\x3a"),
            (b"b", b"b\xff"),
            (b"A", b"A\0\0\0\x10S\0\0\0\2inF\0\0\0\4\1kt\0"),
        ]
    )
    # The same dict as from the encoded form, so that it encodes the same.
    assert _term.encode_table(message.properties["headers"]) == table
    assert message.properties["headers"] == _term.decode_table(table)
    damaged = list(record)
    for place, wrong in ((0, Atom("P_other")), (1, 5), (3, [1]), (3, [(b"k", Atom("bool"), 1)]), (4, 256), (10, -1)):
        value[3] = (
            Atom("content"),
            60,
            (*damaged[:place], wrong, *damaged[place + 1 :]),
            Atom("none"),
            Atom("none"),
            [],
        )
        broken = Message.from_term(encode(tuple(value)))
        with pytest.raises(CorruptionError):
            everything(broken)


# The bytes of node 3.10.8 for a message with every type of a header, and with the headers CC and BCC, of which it removed one.
DECODED_BY_A_NODE = bytes.fromhex(
    "83680664000d62617369635f6d65737361676568046400087265736f757263656d000000012f64000865786368616e67656d0000000265"
    "786c000000036d00000002726b6d0000000263636d000000036263636a6806640007636f6e74656e74613c680f640007505f6261736963"
    "640009756e646566696e6564640009756e646566696e65646c0000001568036d0000000174640004626f6f6c6400047472756568036d00"
    "0000027466640004626f6f6c64000566616c736568036d00000001626400046279746562fffffffb68036d000000014264000c756e7369"
    "676e65646279746561c868036d000000017364000573686f727462fffffed468036d000000017564000d756e7369676e656473686f7274"
    "620000ea6068036d00000001496400097369676e6564696e7462fffffff968036d000000016964000b756e7369676e6564696e746e0400"
    "00286bee68036d000000016c6400046c6f6e676e060000000000000168036d000000026c356400046c6f6e67610568036d000000016664"
    "0005666c6f6174463ff800000000000068036d0000000164640006646f75626c6546400200000000000068036d00000001446400076465"
    "63696d616c68026102620000013a68036d00000001536400076c6f6e677374726d000000047465787468036d000000017864000662696e"
    "6172796d0000000200ff68036d0000000156640004766f6964640009756e646566696e656468036d000000014164000561727261796c00"
    "00000468026400097369676e6564696e74610168026400076c6f6e677374726d00000001616802640004766f6964640009756e64656669"
    "6e656468026400057461626c656c0000000168036d000000016b64000561727261796c000000026802640004626f6f6c64000474727565"
    "6802640006646f75626c654640040000000000006a6a6a68036d000000015464000974696d657374616d70626553f10068036d00000001"
    "466400057461626c656c0000000168036d00000002696e6400057461626c656c0000000168036d00000001616400097369676e6564696e"
    "7461016a6a68036d000000014c6400046c6f6e67610968036d00000002434364000561727261796c0000000168026400076c6f6e677374"
    "726d0000000263636a6a6102640009756e646566696e6564640009756e646566696e6564640009756e646566696e6564640009756e6465"
    "66696e6564640009756e646566696e6564640009756e646566696e6564640009756e646566696e6564640009756e646566696e65646400"
    "09756e646566696e6564640009756e646566696e65646400046e6f6e656400046e6f6e656c000000016d0000000563636263636a6d0000"
    "0010230663d1689a6fcfa8d865566d27c34564000474727565"
)


def test_what_a_node_decoded_is_what_was_published():
    message = Message.from_term(DECODED_BY_A_NODE)
    assert (message.body, message.exchange, message.routing_keys) == (b"ccbcc", "ex", ["rk", "cc", "bcc"])
    assert message.raw_properties is None and message.properties_size == 2100
    expected = {
        "t": True, "tf": False, "b": amqp.Int8(-5), "B": amqp.UInt8(200), "s": amqp.Int16(-300), "u": amqp.UInt16(60000), "I": -7,
        "i": amqp.UInt32(4000000000), "l": 1 << 40, "l5": amqp.Int64(5), "f": amqp.Float32(1.5), "d": 2.25,
        "D": decimal.Decimal("3.14"), "S": "text", "x": b"\0\xff", "V": None, "A": [1, "a", None, {"k": [True, 2.5]}],
        "T": amqp.Timestamp(1700000000), "F": {"in": {"a": 1}}, "L": amqp.Int64(9), "CC": ["cc"],
    }  # fmt: skip
    assert message.properties == {"headers": expected, "delivery_mode": 2}
    assert amqp.encode_table(message.properties["headers"]) == amqp.encode_table(expected)
    assert encode(decode(DECODED_BY_A_NODE)) == DECODED_BY_A_NODE


def in_utf8(term):
    """A term with its atoms as OTP 26 writes them; no string in it looks like an atom."""
    return re.sub(rb"d\0([\x01-\x1f])(?=[a-z])", rb"w\1", term)


def test_message_containers():
    annotations = {
        Atom("x"): b"ex",
        Atom("rk"): [b"a", b"b"],
        Atom("id"): bytes(16),
        Atom("d"): Atom("false"),
        Atom("ts"): 1,
    }
    latin1 = encode((Atom("mc"), Atom("mc_amqpl"), CONTENT, annotations))
    for term in (latin1, in_utf8(latin1)):
        message = Message.from_term(term)
        assert (message.form, message.body, message.exchange, message.routing_keys) == (
            "mc",
            b"hello",
            "ex",
            ["a", "b"],
        )
        assert (message.properties, message.msg_id, message.persistent) == ({"delivery_mode": 2}, bytes(16), False)
        assert message.vhost is None
        assert _term.message_id_of(term) == bytes(16)
    words = {Atom("exchange"): b"ex", Atom("routing_keys"): [b"a"], Atom("durable"): Atom("false")}
    early = Message.from_term(encode((Atom("mc"), Atom("mc_amqpl"), CONTENT, words)))
    assert (early.exchange, early.routing_keys, early.persistent) == ("ex", ["a"], False)
    assert Message.from_term(encode((Atom("mc"), Atom("mc_amqpl"), CONTENT, {}))).persistent is True
    assert Message.from_term(encode((Atom("mc"), Atom("mc_amqpl"), CONTENT, {}))).msg_id is None
    other = Message.from_term(encode((Atom("mc"), Atom("mc_amqp"), [Atom("whatever")], annotations)))
    assert not other.readable
    assert (other.exchange, other.routing_keys, other.msg_id, other.persistent) == ("ex", ["a", "b"], bytes(16), False)
    assert "unreadable" in repr(other)
    for name in ("body", "properties", "raw_properties", "body_size", "properties_size"):
        with pytest.raises(UnsupportedFormatError):
            getattr(other, name)


def test_what_is_no_message():
    value = decode(MESSAGE.term)
    content = value[3]
    wrong = [
        Atom("x"),
        (Atom("basic_message"),),
        (Atom("other"), *value[1:]),
        (*value[:1], (Atom("resource"), 1, Atom("exchange"), b""), *value[2:]),
        (*value[:2], [1], *value[3:]),
        (*value[:2], [Atom("a"), b"b"], *value[3:]),
        (*value[:3], content[:5], *value[4:]),
        (*value[:3], (*content[:3], Atom("none"), *content[4:]), *value[4:]),
        (*value[:3], (*content[:5], Atom("none")), *value[4:]),
        (*value[:4], b"short", value[5]),
        (*value[:5], Atom("maybe")),
        (*value[:5], 1),
    ]
    for one in wrong:
        with pytest.raises(CorruptionError) as caught:
            Message.from_term(encode(one))
        assert caught.value.pos is not None
    with pytest.raises(CorruptionError):
        Message.from_term(MESSAGE.term + b"\0")
    with pytest.raises(CorruptionError):
        Message.from_term(b"")


def test_texts_that_are_no_utf8_stay_what_they_are():
    term = oracle.message_term(b"", bytes(16), exchange=b"\xff", routing_keys=[b"\xfe\x80"], properties=b"\x80\0\1\xff")
    message = Message.from_term(term)
    assert message.exchange == "\udcff" and message.routing_keys == ["\udcfe\udc80"]
    assert message.properties == {"content_type": "\udcff"}
    again = Message(
        properties=message.properties,
        exchange=message.exchange,
        routing_keys=message.routing_keys,
        msg_id=bytes(16),
        persistent=True,
    )
    assert again.term == term


def test_every_flipped_bit_of_a_message_is_read_or_refused():
    term = Message(
        b"hello", properties={"headers": {"a": [1, {"b": 1 << 40}]}, "type": "t"}, routing_keys=["k"], msg_id=bytes(16)
    ).term
    for at in range(len(term) * 8):
        changed = bytearray(term)
        changed[at // 8] ^= 1 << at % 8
        try:
            everything(Message.from_term(bytes(changed)))
        except (CorruptionError, UnsupportedFormatError):
            pass
    for size in range(len(term)):
        with pytest.raises(CorruptionError):
            Message.from_term(term[:size])


# ---------------------------------------------------------------------------------------------------------------------
# Columns


def rows_of(columns):
    """The rows of `MessageColumns` as dicts; None where a value is null."""
    rows = [{} for _ in range(columns.count)]
    for name, arrays in columns.columns.items():
        for i, row in enumerate(rows):
            if name == "status":
                row[name] = int(arrays[i])
            elif not arrays[-1][i]:
                row[name] = None
            elif name == "routing_keys":
                lists, offsets, data, _ = arrays
                row[name] = [data[offsets[j] : offsets[j + 1]].tobytes() for j in range(lists[i], lists[i + 1])]
            elif len(arrays) == 3:
                row[name] = arrays[1][arrays[0][i] : arrays[0][i + 1]].tobytes()
            else:
                row[name] = int(arrays[0][i])
    return rows


def row_of(term):
    """The row that the message of `term` should be, by way of `Message`."""
    message = Message.from_term(term)
    encode_text = lambda text: text.encode("utf-8", "surrogateescape")  # noqa: E731
    row = dict.fromkeys(_term.MESSAGE_COLUMNS)
    row.update(status=0, exchange=encode_text(message.exchange))
    row["routing_keys"] = [encode_text(key) for key in message.routing_keys]
    if not message.readable:
        row["status"] = 2
        return row
    row["body"] = message.body
    try:
        properties = message.properties
    except CorruptionError:
        row.update(status=3)
        return row
    for name, value in properties.items():
        if name == "headers":
            row[name] = _term.encode_table(value)
        else:
            row[name] = encode_text(value) if isinstance(value, str) else value
    return row


def columns_of(terms, columns=_term.MESSAGE_COLUMNS, source=bytes):
    sizes = np.array([len(term) for term in terms], np.int64)
    positions = np.cumsum(np.concatenate(([3], sizes)))[:-1].astype(np.int64)
    return _term.message_columns(source(b"???" + b"".join(terms) + b"?"), positions, sizes, columns=columns)


def some_terms():
    properties = {
        "content_type": "text/plain", "content_encoding": "é", "headers": {"a": [1]}, "delivery_mode": 2, "priority": 9,
        "correlation_id": "c", "reply_to": "r", "expiration": "5", "message_id": "m", "timestamp": 2**64 - 1, "type": "t",
        "user_id": "u", "app_id": "", "cluster_id": "x",
    }  # fmt: skip
    terms = [Message(b"", msg_id=bytes(16)).term, MESSAGE.term]
    terms.append(Message(bytes(range(256)) * 1100, properties=properties, routing_keys=["", "k", "l"]).term)
    value = list(decode(MESSAGE.term))
    undefined = Atom("undefined")
    record = (Atom("P_basic"), undefined, undefined, [(b"k", Atom("long"), 5)], 2, *[undefined] * 10)
    value[3] = (Atom("content"), 60, record, Atom("none"), Atom("none"), [b"lo", b"hel"])
    terms.append(encode(tuple(value)))
    annotations = {Atom("x"): b"ex", Atom("rk"): [b"a"], Atom("id"): bytes(16)}
    terms.append(encode((Atom("mc"), Atom("mc_amqpl"), CONTENT, annotations)))
    terms.append(encode((Atom("mc"), Atom("mc_amqpl"), value[3], annotations)))
    terms.append(encode((Atom("mc"), Atom("mc_amqp"), [], annotations)))
    value[3] = (*CONTENT[:3], b"\xff", *CONTENT[4:])
    terms.append(encode(tuple(value)))
    terms.append(oracle.message_term(b"x", bytes(16), exchange=b"\xff"))
    return terms


def test_columns_say_what_messages_say():
    terms = some_terms()
    columns = columns_of(terms)
    assert rows_of(columns) == [row_of(term) for term in terms]
    assert len(columns) == columns.count == len(terms)
    assert columns.utf8["type"] and not columns.utf8["exchange"]
    # Some columns only, in the order that was asked for.
    some = columns_of(terms, ("routing_keys", "body"))
    assert list(some.columns) == ["routing_keys", "body"]
    assert columns_of(terms[:8]).utf8["exchange"]
    assert columns_of([]).count == 0


def test_columns_of_damaged_terms():
    good = MESSAGE.term
    terms = [
        good,
        good[:-1],
        b"\x83",
        b"",
        b"\x83P\xff\xff\xff\xff",
        good + b"?",
        b"\x83P" + bytes(4),
        good,
    ]
    rows = rows_of(columns_of(terms))
    assert [row["status"] for row in rows] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert rows[0] == rows[7] == row_of(good)
    assert all(set(row.values()) <= {None, 1, 0} for row in rows[1:7])
    # Places that do not lie inside the source.
    for position, size in [
        (-1, 5),
        (0, -1),
        (5, 2**62),
        (2**62, 5),
        (0, len(good) + 1),
        (1, len(good)),
        (2**63 - 1, 2**63 - 1),
    ]:
        places = np.array([position], np.int64), np.array([size], np.int64)
        assert rows_of(_term.message_columns(good, *places))[0]["status"] == 1


def test_columns_from_several_sources(tmp_path):
    terms = some_terms()
    path = tmp_path / "terms"
    path.write_bytes(b"".join(terms))
    with open(path, "rb") as file:
        region = Region.map(file.fileno(), path.stat().st_size)
    sizes = np.array([len(term) for term in terms], np.int64)
    positions = (np.cumsum(sizes) - sizes).astype(np.int64)
    expected = [row_of(term) for term in terms]
    assert rows_of(_term.message_columns(region, positions, sizes)) == expected
    order = np.array([3, 1, 0, 2])
    numbers = np.array([0, 1, 0, 2], np.int32)
    sources = [region, path.read_bytes(), bytearray(path.read_bytes())]
    columns = _term.message_columns(sources, positions[order], sizes[order], numbers)
    assert rows_of(columns) == [expected[i] for i in order]
    assert region.pins == 0
    for wrong in (3, -1):
        with pytest.raises(ValueError):
            _term.message_columns(sources, positions[:1], sizes[:1], np.array([wrong], np.int32))
    with pytest.raises(ValueError):
        _term.message_columns(sources, positions[:2], sizes[:1])
    with pytest.raises(ValueError):
        _term.message_columns(sources, positions, sizes, columns=["nonsense"])
    assert region.pins == 0
    region.close()
    with pytest.raises(StoreClosedError):
        _term.message_columns(region, positions, sizes)


def test_columns_of_every_flipped_bit():
    term = Message(b"hello", properties={"headers": {"a": 1}, "type": "t"}, routing_keys=["k"]).term
    changed = []
    for at in range(8 * len(term)):
        other = bytearray(term)
        other[at // 8] ^= 1 << at % 8
        changed.append(bytes(other))
    for other, row in zip(changed, rows_of(columns_of(changed))):
        try:
            expected = row_of(other)
        except CorruptionError:
            assert row["status"] == 1
        else:
            # Fields of headers are the reader's to decode.
            if expected["status"] == 3 and row["status"] == 0:
                with pytest.raises(CorruptionError):
                    _term.decode_table(row["headers"])
            else:
                assert {**row, "headers": None} == {**expected, "headers": None}


@pytest.mark.parametrize("case", golden_rabbitmq.cases())
def test_columns_of_a_nodes_messages(case, golden_vhost):
    terms = [term for _, term in message_terms(golden_vhost(case), most=60)]
    assert rows_of(columns_of(terms)) == [row_of(term) for term in terms]


def test_columns_as_arrow_arrays():
    pa = pytest.importorskip("pyarrow")
    terms = [*some_terms(), b"damaged"]
    columns = columns_of(terms)
    arrays = {name: arrow_array(columns, name) for name in COLUMNS if name in columns.columns}
    for array in arrays.values():
        array.validate(full=True)
    batch = pa.RecordBatch.from_pydict(arrays)
    for got, row in zip(batch.to_pylist(), rows_of(columns)):
        for name in ("delivery_mode", "priority", "body"):
            assert got[name] == row[name]
        if row["routing_keys"] is not None:
            assert got["routing_keys"] == [key.decode() for key in row["routing_keys"]]
        assert got["exchange"] == (None if row["exchange"] is None else row["exchange"].decode("utf-8", "replace"))
        assert (got["headers"] is None) == (row["headers"] is None)
    assert arrays["timestamp"].null_count == len(terms)  # The only one there is lies beyond what Arrow can say.
    assert arrow_array(columns_of([]), "body").to_pylist() == []
    good = Message(b"", properties={"timestamp": 1700000000, "headers": {}}).term
    arrays = {name: arrow_array(columns_of([good, good]), name) for name in ("timestamp", "headers")}
    assert arrays["timestamp"].to_pylist()[0].year == 2023 and arrays["headers"].to_pylist() == ["{}", "{}"]
    broken = columns_of([good])
    broken.columns["headers"] = (np.array([0, 1], np.int32), np.array([5], np.uint8), np.ones(1, np.uint8))
    assert arrow_array(broken, "headers").to_pylist() == [None]
