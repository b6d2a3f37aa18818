"""Tests of rmqstore.consumer_offset: the fastjson dialect, the broker's offsets and a broadcasting consumer's."""

from __future__ import annotations

import logging

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqstore.consumer_offset import ConsumerOffsets, LocalOffsets, format_fastjson, parse_fastjson
from rmqstore.errors import CorruptionError

PRETTY = ("consumerOffset.empty.pretty", "consumerOffset.pretty", "delayOffset.nodv.pretty", "delayOffset.pretty",
          "lmqConsumerOffset.pretty", "offsets.local.pretty", "topics.pretty")  # fmt: skip


@pytest.mark.parametrize("name", PRETTY)
def test_golden_texts_are_reproduced(name):
    text = golden.json_bytes(name).decode()
    assert format_fastjson(parse_fastjson(text)) == text


def test_t14():
    vector = golden.vectors()["T14"]
    texts = [text for text in vector.values() if isinstance(text, str) and text.startswith("{")]
    assert len(texts) >= 2
    for text in texts:
        assert format_fastjson(parse_fastjson(text)) == text


def test_escapes():
    value = {"a": "\"\\\b\t\n\f\r\x01\x7f\x9f\u2028\u2029/'<\u00a0订😀"}
    text = format_fastjson(value)
    assert text == ('{\n\t"a":"\\"\\\\\\b\\t\\n\\f\\r\\u0001\\u007F\\u009F\\u2028\\u2029/\'<\u00a0订😀"\n}')
    assert parse_fastjson(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        (" \n", None),
        ("\ufeff{}", {}),
        ("{0:1,'1':2,\"2\":3,a:4}", {0: 1, "1": 2, "2": 3, "a": 4}),
        ("{-1:+2,}", {-1: 2}),
        ('{,,"a":1,,}', {"a": 1}),
        ('{/* x */"a"/**/:/* */1 // end\n}', {"a": 1}),
        ('{"a":1,"a":2}', {"a": 2}),
        ("[1,,2,]", [1, 2]),
        ('["\\u0041\\x42\\/\\ud83d\\ude00"]', ["AB/😀"]),
        ("[true,false,null]", [True, False, None]),
        ("{{\"b\":1,c:'x'}:34}", {(("b", 1), ("c", "x")): 34}),
        ("{{}:1}", {(): 1}),
        ("[9223372036854775807,-9223372036854775808]", [2**63 - 1, -(2**63)]),
        ("[[],[[1]],{}]", [[], [[1]], {}]),
    ],
)
def test_what_fastjson_accepts(text, value):
    assert parse_fastjson(text) == value


@pytest.mark.parametrize(
    ("text", "pos"),
    [
        ("{", 1),
        ("[1", 2),
        ("[1 2]", 3),
        ('{"a":1 "b":2}', 7),
        ('{"a" 1}', 5),
        ('{"a":}', 5),
        ('{"a":1}x', 7),
        ('{"订":1}x', 9),
        ('["abc', 1),
        ('["\\q"]', 2),
        ('["\\u12"]', 2),
        ("[tru]", 1),
        ("[+]", 1),
        ("/* x", 0),
        ("{1.5:2}", 2),
        ('{{"a":[]}:1}', 9),
        ("[" + "1" * 65 + "]", 1),
    ],
)
def test_damaged_text_says_where(text, pos):
    with pytest.raises(CorruptionError, match="damaged JSON") as caught:
        parse_fastjson(text, "offsets.json")
    assert (caught.value.path, caught.value.pos) == ("offsets.json", pos)


def test_depth_is_bounded():
    assert parse_fastjson("[" * 64 + "]" * 64)
    for text in ("[" * 65, '{"a":' * 100000, "{{" * 100000):
        with pytest.raises(CorruptionError, match="64 levels"):
            parse_fastjson(text)


@given(st.text(alphabet=st.sampled_from("{}[],:'\"\\0.1-ea /*\n订"), max_size=30))
def test_any_text_fails_cleanly(text):
    try:
        parse_fastjson(text)
    except CorruptionError as error:
        assert error.pos is not None and 0 <= error.pos <= len(text.encode())


json_keys = st.one_of(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1))
json_values = st.recursive(
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(json_keys, inner, max_size=3)),
    max_leaves=12,
)


@given(json_values)
def test_format_and_parse_round_trip(value):
    assert parse_fastjson(format_fastjson(value)) == value


def test_none_members_are_left_out_and_odd_values_refused():
    assert format_fastjson({"a": None}) == "{}"
    assert format_fastjson({1: None, 2: 3}) == "{2:3\n}"
    with pytest.raises(TypeError, match="float"):
        format_fastjson({"a": 1.5})


# ------------------------------------------------------------------------------------------------ ConsumerOffsets


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_offsets_of_5_3(tmp_path):
    path = tmp_path / "consumerOffset.json"
    path.write_bytes(golden.json_bytes("consumerOffset.pretty"))
    offsets = ConsumerOffsets.load(path)
    assert offsets.get("group_a", "TopicTest", 0) == 123
    assert offsets.get("group_a", "TopicTest", 10) == 2**63 - 1
    assert offsets.get("group_b", "TopicTest", 3) == 5000000000
    assert offsets.get("group_a", "%RETRY%group_a", 0) == 7
    assert offsets.get("group_a", "TopicTest", 2) == offsets.get("x", "TopicTest", 0) == -1
    assert offsets.list() == {
        ("group_a", "%RETRY%group_a"): {0: 7},
        ("group_b", "TopicTest"): {3: 5000000000},
        ("group_a", "TopicTest"): {0: 123, 1: 0, 10: 2**63 - 1},
    }
    assert offsets.data_version == {"counter": 0, "stateVersion": 0, "timestamp": 1700000000000}
    assert offsets.source == str(path)
    offsets.list()["group_b", "TopicTest"][3] = 0
    assert offsets.get("group_b", "TopicTest", 3) == 5000000000


def test_lmq_offsets(tmp_path):
    path = tmp_path / "lmqConsumerOffset.json"
    path.write_bytes(golden.json_bytes("lmqConsumerOffset.pretty"))
    offsets = ConsumerOffsets.load(path)
    assert offsets.get("%LMQ%g", "%LMQ%t", 0) == 9 and offsets.get("%LMQ%g", "%LMQ%t", 1) == -1
    assert offsets.get("g", "T", 0) == 8
    assert offsets.list() == {("g", "T"): {0: 8}, ("%LMQ%g", "%LMQ%t"): {0: 9}}


@pytest.mark.parametrize("name", golden.BROKER_STORES)
def test_offsets_of_a_5_5_0_broker(name, golden_store):
    offsets = ConsumerOffsets.load(golden_store(name) / "config" / "consumerOffset.json")
    if name == "broker":
        assert offsets.get("G-wall@broadcast", "Batches", 1) == 180
        assert [offsets.get("G-billing", "Orders", queue) for queue in range(4)] == [2499, 2498, 2500, 2500]
        assert offsets.pull_offset_table["Orders@G-billing"] == {0: 2500, 1: 2501, 2: 2501, 3: 2501}
        assert offsets.list()["CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_HALF_TOPIC"] == {0: 60}
    assert offsets.offset_table


@pytest.mark.parametrize("name", golden.BROKER_STORES)
def test_every_config_file_of_a_broker_is_read(name, golden_store):
    files = sorted((golden_store(name) / "config").glob("*.json"))
    assert len(files) >= 5
    for path in files:
        assert isinstance(parse_fastjson(path.read_text(encoding="utf-8"), str(path)), dict)


def test_what_the_reader_accepts(tmp_path):
    path = write(tmp_path / "c.json", "\ufeff{offsetTable:{'t@g':{0:'5','1':1.5,2:-3,2:4,/*x*/},},other:[1]}")
    assert ConsumerOffsets.load(path).offset_table == {"t@g": {0: 5, 1: 1, 2: 4}}
    assert ConsumerOffsets.load(write(path, "{}")).offset_table == {}
    assert ConsumerOffsets.load(write(path, '{"offsetTable":null}')).offset_table == {}
    assert ConsumerOffsets.load(write(path, " ")).offset_table == {}


@pytest.mark.parametrize(
    "text",
    [
        '{"offsetTable":{"t@g":{0:null}}}',
        '{"offsetTable":{"t@g":{"x":1}}}',
        '{"offsetTable":{"t@g":{0:9223372036854775808}}}',
        '{"offsetTable":{"t@g":{4294967296:1}}}',
        '{"offsetTable":{"t@g":{0:1e999999999}}}',
        '{"offsetTable":{"t@g":{0:true}}}',
        '{"offsetTable":{"t@g":[1]}}',
        '{"offsetTable":[1]}',
        '{"offsetTable":{"t@g":{0:1',
        '{"offsetTable":{}}x',
        "[1]",
    ],
)
def test_what_the_reader_refuses(text, tmp_path, caplog):
    path = write(tmp_path / "c.json", text)
    with pytest.raises(CorruptionError, match="no backup"):
        ConsumerOffsets.load(path)
    write(tmp_path / "c.json.bak", '{"offsetTable":{"t@g":{0:1}}}')
    with caplog.at_level(logging.WARNING):
        offsets = ConsumerOffsets.load(path)
    assert offsets.get("g", "t", 0) == 1 and offsets.source == str(path) + ".bak"
    assert "backup is used" in caplog.text
    assert path.read_text() == text and sorted(p.name for p in tmp_path.iterdir()) == ["c.json", "c.json.bak"]


def test_missing_and_empty_files(tmp_path, caplog):
    path = tmp_path / "c.json"
    assert ConsumerOffsets.load(path).source is None and not caplog.text
    path.write_bytes(b"")
    assert ConsumerOffsets.load(path).list() == {}
    assert "no backup" in caplog.text
    write(tmp_path / "c.json.bak", '{"offsetTable":{"t@g":{0:1}}}')
    assert ConsumerOffsets.load(path).get("g", "t", 0) == 1
    path.unlink()
    assert ConsumerOffsets.load(path).get("g", "t", 0) == 1
    write(tmp_path / "c.json.bak", "{")
    with pytest.raises(CorruptionError, match="backup cannot be read") as caught:
        ConsumerOffsets.load(path)
    assert caught.value.path == str(path) + ".bak"


def test_a_damaged_file_never_takes_the_backups_place(tmp_path):
    path = write(tmp_path / "c.json", "{torn")
    write(tmp_path / "c.json.bak", '{"offsetTable":{"t@g":{0:1}}}')
    assert ConsumerOffsets.load(path, read_only=False).get("g", "t", 0) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.json.bak", "c.json.damaged"]
    assert (tmp_path / "c.json.damaged").read_text() == "{torn"


def test_every_truncation_and_bit_flip(tmp_path):
    data = golden.json_bytes("consumerOffset.pretty")
    path = tmp_path / "c.json"
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptionError):
            ConsumerOffsets.load(path)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            ConsumerOffsets.load(path)
        except CorruptionError:
            pass


# --------------------------------------------------------------------------------------------------- LocalOffsets


def test_local_offsets(tmp_path):
    path = tmp_path / "offsets.json"
    path.write_bytes(golden.json_bytes("offsets.local.pretty"))
    offsets = LocalOffsets.load(path)
    assert offsets.list() == {("broker-a", "TopicTest", 1): 34, ("broker-a", "TopicTest", 0): 12}
    assert offsets.get("TopicTest", 1) == offsets.get("TopicTest", 1, "broker-a") == 34
    assert offsets.get("TopicTest", 5) == offsets.get("TopicTest", 1, "broker-b") == -1


def test_local_offsets_of_a_5_5_0_client():
    (path,) = (golden.DATA / "rocketmq-broker" / "local-offsets").glob("*/*/offsets.json")
    offsets = LocalOffsets.load(path)
    assert [offsets.get("Batches", queue) for queue in range(4)] == [166, 180, 159, 149]


def test_local_offsets_other_forms(tmp_path):
    path = write(
        tmp_path / "offsets.json",
        '{"offsetTable":{"{\\"brokerName\\":\\"a\\",\\"queueId\\":1,\\"topic\\":\\"T\\"}":5,'
        '{"brokerName":"b","queueId":1,"topic":"T"}:6}}',
    )
    offsets = LocalOffsets.load(path)
    assert offsets.list() == {("a", "T", 1): 5, ("b", "T", 1): 6}
    with pytest.raises(ValueError, match="several brokers"):
        offsets.get("T", 1)


@pytest.mark.parametrize(
    "key", ["5", '"x"', '{"topic":"T"}', '{"topic":5,"queueId":1}', '"[1]"', '{"topic":"T","queueId":"x"}']
)
def test_bad_local_offsets(key, tmp_path):
    path = write(tmp_path / "offsets.json", f'{{"offsetTable":{{{key}:1}}}}')
    with pytest.raises(CorruptionError):
        LocalOffsets.load(path)
