"""Tests of rmqstore.message against the test vectors, the golden stores and Java's rules."""

from __future__ import annotations

import base64
import json
import pickle
import random
import struct
import sys
import zlib

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqstore._core import java_string_hash
from rmqstore.errors import CorruptionError, InvalidMessageError, MissingDependencyError, UnsupportedFormatError
from rmqstore.message import (
    MAX_PROPERTIES_SIZE,
    CompressionType,
    Message,
    MessageExt,
    SysFlag,
    compress_body,
    compression_flags,
    decode_java_utf8,
    decompress_body,
    encode_inner_batch,
    encode_java_utf8,
    host_from_bytes,
    host_to_bytes,
    offset_message_id,
    parse_message_id,
    parse_properties,
    properties_to_bytes,
    properties_to_text,
    tags_code,
)

V4 = host_to_bytes("10.0.0.1:10911")


def record(**changes):
    """A decoded record as `_core.decode_record` gives it."""
    fields = {
        "total_size": 120, "version": 1, "body_crc": 0, "queue_id": 3, "flag": 9, "queue_offset": 7, "phy_offset": 168,
        "sys_flag": 0, "born_timestamp": 1700000000123, "born_host": host_to_bytes("192.168.1.10:50000"),
        "store_timestamp": 1700000000456, "store_host": V4, "reconsume_times": 2, "prepared_transaction_offset": 77,
        "body": b"hello", "topic": "TopicTest", "properties": b"KEYS\x01k1 k2\x02TAGS\x01TagA\x02", "crc_ok": True,
    }  # fmt: skip
    assert set(changes) <= set(fields)
    return tuple((fields | changes).values())


def parse_record(data: bytes) -> tuple:
    """A whole record read with plain struct, so that these tests do not hang on the compiled decoder."""
    total, magic, crc, queue_id, flag, queue_offset, phy, sys_flag, born = struct.unpack_from(">iIiiiqqiq", data)
    assert total == len(data)
    pos = 48
    born_host = data[pos : pos + (20 if sys_flag & 0x10 else 8)]
    pos += len(born_host)
    (stored,) = struct.unpack_from(">q", data, pos)
    pos += 8
    store_host = data[pos : pos + (20 if sys_flag & 0x20 else 8)]
    pos += len(store_host)
    reconsume, prepared, body_size = struct.unpack_from(">iqi", data, pos)
    pos += 16
    body = data[pos : pos + body_size]
    pos += body_size
    version = 1 if magic == 0xDAA320A7 else 2
    (topic_size,) = struct.unpack_from(">B" if version == 1 else ">H", data, pos)
    pos += version
    topic = data[pos : pos + topic_size].decode()
    properties = data[pos + topic_size + 2 :]
    return (
        total, version, crc, queue_id, flag, queue_offset, phy, sys_flag, born, born_host, stored, store_host,
        reconsume, prepared, body, topic, properties, (zlib.crc32(body) & 0x7FFFFFFF) == crc,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- vectors


def test_t1_tags_codes():
    for case in golden.vectors()["T1"]:
        code = tags_code(case["string"])
        assert code == (case["signed"] if case["string"] else 0)
        assert (code & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big").hex() == case["tags_code"]
    assert tags_code(None) == tags_code("") == 0


def test_t12_message_ids():
    for case in golden.vectors()["T12"]["ids"]:
        assert offset_message_id(case["store_host"], case["phy_offset"]) == case["msg_id"]
        assert offset_message_id(host_to_bytes(case["store_host"]), case["phy_offset"]) == case["msg_id"]
        assert parse_message_id(case["msg_id"]) == (case["store_host"], case["phy_offset"])
        assert parse_message_id(case["msg_id"].lower()) == (case["store_host"], case["phy_offset"])


def test_t13_properties_text():
    vector = golden.vectors()["T13"]
    assert properties_to_bytes(dict(vector["pairs"])).hex() == vector["hex"]
    for case in vector["parse"]:
        assert parse_properties(case["text"].encode()) == case["properties"]


def test_t7_property_crc():
    vector = golden.vectors()["T7"]
    assert MessageExt(record(properties=bytes.fromhex(vector["tail"]))).properties_crc == vector["value"]
    data = bytes.fromhex(vector["record"]["hex"])
    message = MessageExt(parse_record(data))
    assert message.properties_crc == zlib.crc32(data[:-20]) & 0x7FFFFFFF == 142064868
    assert MessageExt(record()).properties_crc is None
    assert MessageExt(record(properties=b"__CRC32#\x01078036070x\x02")).properties_crc is None
    assert MessageExt(record(properties=b"a\x01x__CRC32#\x010780607090\x02")).properties_crc is None


@pytest.mark.parametrize("name", ["base", "propcrc", "ext", "compaction", "broker"])
def test_golden_records_read_as_java_reads_them(name, golden_store):
    root = golden_store(name)
    size = golden.geometry(name)["mapped_file_size_commit_log"]
    count = 0
    for line in golden.lines(name, "msg"):
        path = root / "commitlog" / f"{line['offset'] // size * size:020d}"
        with open(path, "rb") as file:
            file.seek(line["offset"] % size)
            message = MessageExt(parse_record(file.read(line["size"])))
        assert message.properties == line.get("props", {})
        assert message.msg_id == line["msgId"]
        # Java prints IPv6 addresses without the short form.
        for host, java_host in ((message.born_host, line["bornHost"]), (message.store_host, line["storeHost"])):
            assert host_to_bytes(host) == host_to_bytes(java_host.removeprefix("/"))
        assert (message.topic, message.queue_id, message.queue_offset) == (
            line["topic"], line["queueId"], line["queueOffset"],
        )  # fmt: skip
        assert (message.flag, message.sys_flag, message.size) == (line["flag"], line["sysFlag"], line["size"])
        assert (message.born_timestamp, message.store_timestamp) == (line["born"], line["store"])
        assert (message.reconsume_times, message.prepared_transaction_offset) == (line["reconsume"], line["prepared"])
        assert len(message.body_stored) == line["bodyLen"] and message.crc == line["bodyCrc"]
        assert not message.corrupt
        # Parsed properties are written back unchanged if the writer kept the last separator.
        if message.properties_stored.endswith(b"\x02"):
            assert properties_to_bytes(message.properties) == message.properties_stored
        count += 1
    assert count == len(list(golden.lines(name, "msg"))) > 0


def test_bodies_of_the_broker_as_sent(golden_store):
    root = golden_store("broker")
    compressed = 0
    for line in golden.sent():
        if not line["kind"].startswith("compressed") or "offset_msg_id" not in line:
            continue
        _, phy_offset = parse_message_id(line["offset_msg_id"])
        with open(root / "commitlog" / f"{phy_offset // 1048576 * 1048576:020d}", "rb") as file:
            file.seek(phy_offset % 1048576)
            size = int.from_bytes(file.read(4), "big")
            file.seek(phy_offset % 1048576)
            message = MessageExt(parse_record(file.read(size)))
        assert message.sys_flag & SysFlag.COMPRESSED
        assert len(message.body) == line["body_len"] and zlib.crc32(message.body) & 0x7FFFFFFF == line["body_crc"]
        assert message.body is message.body
        compressed += 1
    assert compressed >= 100


# ------------------------------------------------------------------------------------------------------ java text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xed\xa0\x80", "\ufffd"),
        (b"a\xed\xbf\xbfb", "a\ufffdb"),
        (b"\xed\xa0", "\ufffd"),
        (b"\xed\xa0x", "\ufffdx"),
        (b"\xed\xa0\x80\xed\xb0\x80", "\ufffd\ufffd"),
        (b"\xed", "\ufffd"),
        (b"\xc0\x80", "\ufffd\ufffd"),
        (b"\xe4\xb8", "\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd"),
        (b"\xf0\x9f\x98x", "\ufffdx"),
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),
        (b"\x80\xff", "\ufffd\ufffd"),
        ("订单😀".encode(), "订单😀"),
    ],
)
def test_decode_java_utf8(data, text):
    assert decode_java_utf8(data) == text


def test_encode_java_utf8():
    assert encode_java_utf8("a\ud83dz") == b"a?z"
    assert encode_java_utf8("\ud83d\ude00") == "😀".encode()
    assert encode_java_utf8("\ude00\ud83d") == b"??"


def java_parse(text: str) -> dict[str, str]:
    """The rules of section 2.4 as they are written: positions in UTF-16 code units."""
    units = text.encode("utf-16-be", "surrogatepass")
    chars = [units[i : i + 2].decode("utf-16-be", "surrogatepass") for i in range(0, len(units), 2)]
    result = {}
    start = 0
    while start < len(chars):
        end = chars.index("\x02", start) if "\x02" in chars[start:] else len(chars)
        if end - start >= 3:
            cut = chars.index("\x01", start) if "\x01" in chars[start:] else -1
            if start < cut < end - 1:
                join = lambda part: "".join(part).encode("utf-16-be", "surrogatepass").decode("utf-16-be")  # noqa: E731
                result[join(chars[start:cut])] = join(chars[cut + 1 : end])
        start = end + 1
    return result


@given(st.text(alphabet=st.sampled_from("ab\x01\x02订😀"), max_size=24))
def test_parse_properties_follows_the_written_rules(text):
    assert parse_properties(text.encode()) == java_parse(text)


@given(st.binary(max_size=40))
def test_cutting_bytes_or_text_is_the_same(data):
    pieces = {}
    for piece in data.split(b"\x02"):
        name, _, value = piece.partition(b"\x01")
        if name and value:
            pieces[decode_java_utf8(name)] = decode_java_utf8(value)
    assert parse_properties(data) == pieces


def check_names(text: bytes) -> None:
    """Compare keys, tags and unique key of a record before and after its properties are parsed."""
    message, parsed = MessageExt(record(properties=text)), MessageExt(record(properties=text))
    wanted = parse_properties(text)
    assert parsed.properties == wanted
    for each in (message, parsed):
        assert each.tags == wanted.get("TAGS") and each.unique_key == wanted.get("UNIQ_KEY")
        assert each.keys == [key for key in wanted.get("KEYS", "").split(" ") if key]


names_in_pieces = st.lists(
    st.sampled_from([b"KEYS\x01", b"TAGS\x01", b"UNIQ_KEY\x01", b"KEYS", b"TAG", b"XKEYS\x01", b"\x01", b"\x02", b"\x02", b"k1 k2",
                     b" ", b"\xe8\xae\xa2", b"\xff", b"\x00", b"x" * 17, b"y" * 70]),
    max_size=16,
)  # fmt: skip


@given(names_in_pieces.map(b"".join))
def test_keys_tags_and_unique_key_are_those_of_the_properties(text):
    check_names(text)


@pytest.mark.parametrize("name", [b"KEYS", b"TAGS", b"UNIQ_KEY"])
def test_they_are_found_wherever_they_stand(name):
    # Texts are looked through 64 bytes at a time, and longer ones than 112 bytes are kept elsewhere.
    piece = name + b"\x01a b\x02"
    for before in (*range(76), *range(100, 140)):
        for behind in (b"", b"z\x011\x02", b"z" * 60, name + b"\x01\x02", piece.replace(b"a", b"c")):
            filler = b"p" * (before - 3) + b"\x011\x02" if before > 3 else b"\x02" * before
            check_names(filler + piece + behind)
            check_names(filler + piece[:-1])


plain_text = st.text(
    alphabet=st.characters(blacklist_characters="\x01\x02", blacklist_categories=("Cs",)), min_size=1, max_size=12
)


@given(st.dictionaries(plain_text, plain_text, max_size=6))
def test_properties_round_trip(properties):
    data = properties_to_bytes(properties)
    assert parse_properties(data) == properties
    assert list(parse_properties(data)) == list(properties)
    assert parse_properties(data[:-1]) == properties


def test_empty_values_are_written_and_lost():
    assert properties_to_text({"a": "", "b": None, "c": "1"}) == "a\x01\x02c\x011\x02"
    assert parse_properties(b"a\x01\x02c\x011\x02") == {"c": "1"}


# ---------------------------------------------------------------------------------------------------- hosts, ids


@given(st.ip_addresses(), st.integers(0, 65535))
def test_hosts_round_trip(address, port):
    host = f"{address.compressed}:{port}" if address.version == 4 else f"[{address.compressed}]:{port}"
    data = host_to_bytes(host)
    assert len(data) == (8 if address.version == 4 else 20)
    assert data == address.packed + port.to_bytes(4, "big")
    assert parse_message_id(offset_message_id(host, 2**63 - 1))[1] == 2**63 - 1
    if address.version == 4:
        assert host_from_bytes(data) == host
    else:
        assert host_to_bytes(host_from_bytes(data)) == data


@pytest.mark.parametrize("host", ["", "x", "10.0.0.1", "10.0.0.1:", "10.0.0.1:70000", "::1:80", "[::1]", "localhost:1",
                                  "1.2.3:4", "10.0.0.1:-1", "[1.2.3.4]:5", "10.0.0.1:\u0661", None])  # fmt: skip
def test_bad_hosts(host):
    with pytest.raises(InvalidMessageError, match="host"):
        host_to_bytes(host)


@pytest.mark.parametrize("size", [0, 7, 9, 16, 21])
def test_bad_stored_host(size):
    with pytest.raises(CorruptionError, match="8 or 20"):
        host_from_bytes(bytes(size))


@pytest.mark.parametrize(
    "msg_id", ["", "x", "0" * 31, "g" * 32, "0" * 33, "0" * 48, " " + "0" * 31, "0" * 16 + "F" * 16]
)
def test_bad_message_ids(msg_id):
    with pytest.raises(InvalidMessageError):
        parse_message_id(msg_id)


# ------------------------------------------------------------------------------------------------------- Message


def test_message_fields_and_order():
    message = Message("Orders", bytearray(b"paid"), keys=["A-1", "B"], tags="EU", properties={"x": "1", "y": None})
    assert type(message.body) is bytes and message.body == b"paid"
    assert list(message.properties.items()) == [("KEYS", "A-1 B"), ("TAGS", "EU"), ("x", "1")]
    assert (message.keys, message.tags, message.unique_key, message.delay_level) == (["A-1", "B"], "EU", None, 0)
    message.validate()
    own_place = Message("T", properties={"x": "1", "KEYS": "k", "DELAY": "3", "UNIQ_KEY": "u"}, tags="t")
    assert list(own_place.properties) == ["TAGS", "x", "KEYS", "DELAY", "UNIQ_KEY"]
    assert (own_place.delay_level, own_place.unique_key) == (3, "u")
    assert Message("T", keys="a  b").keys == ["a", "b"]
    assert Message("T", tags="").tags is None
    assert Message("T", memoryview(b"abc")[::2]).body == b"ac"


def test_message_equality_and_repr():
    message = Message("T", b"b", keys=["k"], flag=3)
    assert message == Message("T", b"b", keys="k", flag=3) != Message("T", b"b", keys="k")
    assert message != "T"
    assert repr(message) == "Message('T', b'b', properties={'KEYS': 'k'}, flag=3)"
    assert "<40 bytes>" in repr(Message("T", bytes(40)))
    assert pickle.loads(pickle.dumps(message)) == message
    with pytest.raises(TypeError):
        hash(message)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"body": "text"}, "encode"),
        ({"body": 5}, "int"),
        ({"body": None}, "NoneType"),
        ({"keys": ["a b"]}, "space"),
        ({"keys": [""]}, "empty key"),
        ({"keys": ["a\x01"]}, "separate"),
        ({"keys": [5]}, "not text"),
        ({"keys": "  "}, "spaces"),
        ({"tags": 5}, "tags"),
        ({"keys": ["a"], "properties": {"KEYS": "b"}}, "twice"),
    ],
)
def test_constructor_refuses(arguments, match):
    with pytest.raises(InvalidMessageError, match=match):
        Message("T", **arguments)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (Message(""), "empty"),
        (Message(7), "not text"),
        (Message("a b/c"), r"' ' '/'"),
        (Message("订单"), "refuses"),
        (Message("T\n"), "refuses"),
        (Message("t" * 128), "127"),
        (Message("%RETRY%" + "g" * 249), "255"),
        (Message("T", properties={"": "x"}), "empty name"),
        (Message("T", properties={"a\x01": "x"}), "separate"),
        (Message("T", properties={"a": "x\x02"}), "separate"),
        (Message("T", tags="x\x01"), "separate"),
        (Message("T", keys="x\x02 y"), "separate"),
        (Message("T", properties={"KEYS": " "}), "KEYS"),
        (Message("T", properties={"DELAY": "x"}), "DELAY"),
        (Message("T", properties={"a": "x" * MAX_PROPERTIES_SIZE}), "32767"),
        (Message("T", flag=2**31), "flag"),
        (Message("T", born_timestamp=2**63), "born_timestamp"),
        (Message("T", born_timestamp=1.5), "born_timestamp"),
        (Message("T", born_host="x:1"), "host"),
        (Message("T", store_host="[::1]"), "host"),
    ],
)
def test_validate_refuses(message, match):
    with pytest.raises(InvalidMessageError, match=match):
        message.validate()


@pytest.mark.parametrize("properties", [{"a": 5}, {5: "a"}, {"a": b"x"}])
def test_properties_are_texts(properties):
    with pytest.raises(InvalidMessageError, match=r"property .*: give texts"):
        Message("T", properties=properties)


def test_validate_accepts_the_limits():
    Message("t" * 127).validate()
    Message("%RETRY%" + "g" * 248).validate()
    Message("%DLQ%" + "g" * 250).validate()
    Message("%LMQ%a|b_c-d").validate()
    Message("T", properties={"a": "x" * (MAX_PROPERTIES_SIZE - 3)}).validate()
    Message("T", properties={"e": ""}, born_timestamp=2**63 - 1, flag=-(2**31)).validate()


# --------------------------------------------------------------------------------------------------- compression


@pytest.mark.parametrize("type", list(CompressionType))
@pytest.mark.parametrize(
    "body", [b"x", b"hello " * 10000, random.Random(7).randbytes(70000)], ids=["one byte", "repeating", "random"]
)
def test_compression_round_trip(type, body):
    stored = compress_body(body, type)
    assert decompress_body(stored, compression_flags(type)) == body
    assert stored == compress_body(body, type.name.lower())
    assert decompress_body(stored, compression_flags(type) & ~1) == stored
    if type is CompressionType.ZLIB:
        assert decompress_body(stored, 1) == body


@pytest.mark.parametrize("type", list(CompressionType))
def test_broken_streams(type):
    flags = compression_flags(type)
    stored = compress_body(b"hello world " * 50, type)
    for size in range(1, len(stored)):
        with pytest.raises(CorruptionError):
            decompress_body(stored[:size], flags)
    with pytest.raises(CorruptionError):
        decompress_body(b"garbage that is no stream", flags)
    assert decompress_body(b"", flags) == b""


def test_what_follows_a_stream():
    zlib_stored, lz4_stored, zstd_stored = (compress_body(b"ab" * 50, type) for type in ("ZLIB", "LZ4", "ZSTD"))
    body = b"ab" * 50
    skippable = struct.pack("<II", 0x184D2A53, 3) + b"xyz"
    assert decompress_body(zlib_stored + b"anything", 0x301) == body
    assert decompress_body(lz4_stored + lz4_stored, 0x101) == body + body
    assert decompress_body(skippable + lz4_stored + skippable, 0x101) == body
    assert decompress_body(zstd_stored + zstd_stored, 0x201) == body + body
    assert decompress_body(skippable + zstd_stored + skippable, 0x201) == body
    assert decompress_body(zstd_stored + b"xyz", 0x201) == body
    for stored, flags in (
        (lz4_stored + b"x", 0x101),
        (lz4_stored + b"garbage", 0x101),
        (lz4_stored + skippable[:-1], 0x101),
        (zstd_stored + b"garbage", 0x201),
        (skippable, 0x101),
    ):
        with pytest.raises(CorruptionError):
            decompress_body(stored, flags)


@pytest.mark.parametrize("type", list(CompressionType))
def test_bombs_are_bounded(type):
    stored = compress_body(bytes(64 * 1024 * 1024), type)
    with pytest.raises(CorruptionError, match="more than 1048576 bytes"):
        decompress_body(stored, compression_flags(type), 1048576)
    exact = compress_body(bytes(1000), type)
    assert decompress_body(exact, compression_flags(type), 1000) == bytes(1000)
    with pytest.raises(CorruptionError, match="more than"):
        decompress_body(exact, compression_flags(type), 999)


@pytest.mark.parametrize("kind", [4, 5, 6, 7])
def test_unknown_compression_type(kind):
    with pytest.raises(UnsupportedFormatError, match=str(kind)):
        decompress_body(b"x", 1 | kind << 8)


def test_unknown_type_name():
    with pytest.raises(ValueError, match="LZ4, ZSTD or ZLIB"):
        compress_body(b"x", "GZIP")


@pytest.mark.parametrize(("type", "library"), [("LZ4", "lz4"), ("ZSTD", "zstandard")])
def test_missing_library_names_the_extra(type, library, monkeypatch):
    stored = compress_body(b"x", type)
    for name in list(sys.modules):
        if name.partition(".")[0] == library:
            monkeypatch.setitem(sys.modules, name, None)
    for call in (lambda: compress_body(b"x", type), lambda: decompress_body(stored, compression_flags(type))):
        with pytest.raises(MissingDependencyError, match=r"pip install rmqstore\[compression\]"):
            call()


@given(st.binary(min_size=1, max_size=60), st.sampled_from([1, 0x101, 0x201, 0x301]))
def test_hostile_bodies_fail_cleanly(body, flags):
    try:
        decompress_body(body, flags, 100000)
    except CorruptionError:
        pass


# ---------------------------------------------------------------------------------------------------- MessageExt


def test_message_ext_fields():
    message = MessageExt(record())
    assert (message.topic, message.body, message.keys, message.tags) == ("TopicTest", b"hello", ["k1", "k2"], "TagA")
    assert (message.born_host, message.store_host) == ("192.168.1.10:50000", "10.0.0.1:10911")
    assert message.msg_id == "0A00000100002A9F00000000000000A8"
    assert message.transaction_type == SysFlag(0) and not message.is_inner_batch
    assert MessageExt(record(sys_flag=0xC)).transaction_type is SysFlag.TRANSACTION_ROLLBACK
    assert message.inner_messages() == [message]
    assert message == MessageExt(record()) != MessageExt(record(queue_id=4))
    assert pickle.loads(pickle.dumps(message)) == message and len({message, MessageExt(record())}) == 1
    assert "TopicTest/3" in repr(message)
    with pytest.raises(AttributeError):
        message.topic = "other"


def test_corrupt_body_stays_as_stored():
    stored = compress_body(b"hello", "LZ4")
    message = MessageExt(record(body=stored, sys_flag=0x101, crc_ok=False))
    assert message.corrupt and message.body == stored
    assert MessageExt(record(body=stored, sys_flag=0x101)).body == b"hello"
    broken = MessageExt(record(body=b"xxxx", sys_flag=0x101))
    with pytest.raises(CorruptionError, match="phy offset 168"):
        _ = broken.body
    assert "body_error" in broken.as_dict()


@pytest.mark.parametrize(
    ("body", "encoding", "text"),
    [("订单".encode(), "utf-8", "订单"), (b"\xff\x00", "base64", base64.b64encode(b"\xff\x00").decode())],
)
def test_to_dict_goes_into_json(body, encoding, text):
    value = json.loads(json.dumps(MessageExt(record(body=body)).as_dict()))
    assert (value["body"], value["body_encoding"], value["body_size"]) == (text, encoding, len(body))
    assert value["keys"] == ["k1", "k2"] and value["store_host"] == "10.0.0.1:10911" and value["phy_offset"] == 168


def inner_batch(golden_store):
    line = next(line for line in golden.lines("base", "msg") if line["offset"] == 2500)
    data = (golden_store("base") / "commitlog" / f"{0:020d}").read_bytes()
    return MessageExt(parse_record(data[line["offset"] : line["offset"] + line["size"]]))


def test_inner_batch_of_the_golden_store(golden_store):
    batch = inner_batch(golden_store)
    inner = batch.inner_messages()
    assert [message.queue_offset for message in inner] == [3, 4, 5]
    assert [message.body for message in inner] == [b"batch0", b"batch1", b"batch2"]
    assert [message.keys for message in inner] == [["bk0"], ["bk1"], ["bk2"]]
    assert all(
        m.phy_offset == 2500 and m.sys_flag == 0 and m.size == 99 and m.topic == "BatchTopic" for m in inner
    )
    assert all(m.crc == zlib.crc32(m.body) & 0x7FFFFFFF for m in inner)
    rebuilt = encode_inner_batch([Message("BatchTopic", m.body, flag=m.flag, properties=m.properties) for m in inner])
    assert rebuilt == batch.body


def test_hostile_inner_batches(golden_store):
    batch = inner_batch(golden_store)
    fields = list(batch.__reduce__()[1][0])
    for size in range(1, len(batch.body)):
        if size % 99:
            fields[14] = batch.body[:size]
            with pytest.raises(CorruptionError, match="phy offset 2500"):
                MessageExt(tuple(fields)).inner_messages()
    for bit in range(len(batch.body) * 8):
        data = bytearray(batch.body)
        data[bit // 8] ^= 1 << bit % 8
        fields[14] = bytes(data)
        try:
            assert len(MessageExt(tuple(fields)).inner_messages()) == 3
        except CorruptionError:
            pass
    fields[17] = False
    with pytest.raises(CorruptionError, match="CRC"):
        MessageExt(tuple(fields)).inner_messages()


def test_encode_inner_batch_refuses():
    with pytest.raises(InvalidMessageError, match="at least one"):
        encode_inner_batch([])
    with pytest.raises(InvalidMessageError, match="one topic"):
        encode_inner_batch([Message("A"), Message("B")])
    with pytest.raises(InvalidMessageError, match="empty"):
        encode_inner_batch([Message("")])


@given(
    st.lists(
        st.tuples(st.binary(max_size=20), st.dictionaries(plain_text, plain_text, max_size=2)), min_size=1, max_size=5
    )
)
def test_inner_batch_round_trip(parts):
    parts = [(body, {k: v for k, v in properties.items() if k not in ("KEYS", "DELAY")}) for body, properties in parts]
    body = encode_inner_batch([Message("T", body, properties=properties, flag=5) for body, properties in parts])
    batch = MessageExt(record(body=body, sys_flag=0xC0, properties=b"INNER_BASE\x01100\x02", topic="T"))
    inner = batch.inner_messages()
    assert [(m.body, m.properties, m.flag) for m in inner] == [(b, p, 5) for b, p in parts]
    assert [m.queue_offset for m in inner] == list(range(100, 100 + len(parts)))


def test_java_hash_is_that_of_the_stored_text():
    # A key with a lone surrogate is stored, and so indexed, with a question mark.
    assert java_string_hash(decode_java_utf8(encode_java_utf8("a\ud83dz"))) == java_string_hash("a?z")
