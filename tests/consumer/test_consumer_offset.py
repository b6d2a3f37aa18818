"""Tests of rmqstore.consumer.consumer_offset and json_files: the fastjson dialect and the broker's offsets.

Owns what a broker's file says, written from the format's description, and a model of a directory that says what a kill or a
power loss may leave at every step of a persist.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import signal
import threading
import time

import golden
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import rmqstore.consumer.consumer_offset
from rmqstore.consumer import json_files
from rmqstore.consumer.consumer_offset import ConsumerOffsets
from rmqstore.consumer.json_files import parse_fastjson
from rmqstore.errors import CorruptionError, ReadOnlyError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        (" \n", None),
        ("\ufeff{}", {}),
        ("{0:1,'1':2,\"2\":3,a:4}", {"0": 1, "1": 2, "2": 3, "a": 4}),
        ("{-1:+2,}", {"-1": 2}),
        ('{,,"a":1,,}', {"a": 1}),
        ('{/* x */"a"/**/:/* */1 // end\n}', {"a": 1}),
        ('{"a":1,"a":2}', {"a": 2}),
        ("[1,,2,]", [1, 2]),
        ('["\\u0041\\x42\\/\\ud83d\\ude00"]', ["AB/😀"]),
        ("[true,false,null]", [True, False, None]),
        ("{'订,5:x':{5:1}}", {"订,5:x": {"5": 1}}),
        ("[.5,1.,2e3,7L]", [0.5, 1.0, 2000.0, 7]),
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
        ("{1.5:2}", 1),
        ('{{"a":[]}:1}', 1),
        ("[" + "1" * 5000 + "]", 1),
        ("[1, 1e9999999999999999999]", 4),
        ("[1,NaN]", 3),
    ],
)
def test_damaged_text_says_where(text, pos):
    with pytest.raises(CorruptionError, match="damaged JSON") as caught:
        parse_fastjson(text, "offsets.json")
    assert (caught.value.path, caught.value.pos) == ("offsets.json", pos)


def test_depth_is_bounded():
    assert parse_fastjson("[" * 64 + "]" * 64)
    for text in ("[" * 65, "[" * 65 + "]" * 65, '{"a":' * 100000, "{{" * 100000):
        with pytest.raises(CorruptionError, match="64 levels"):
            parse_fastjson(text)


@pytest.mark.parametrize("piece", [" ", "\n \t", "/**/", "/* * */ ", "//\n", "/*", "// ", "1/**/ ,", "\\'", "*", "*/", ",", "'"])
@pytest.mark.parametrize("begin", ['{"a":1', "[", "['", "{'a':/*", "{a://"])
def test_repeated_text_is_read_in_linear_time(begin, piece):
    # Exponential or quadratic time would never end: atheris found 30 blanks before a zero byte.
    with pytest.raises(CorruptionError):
        parse_fastjson(begin + piece * 20_000 + "\0")


@given(st.text(alphabet=st.sampled_from("{}[],:'\"\\0.1-ea /*\n订"), max_size=30))
def test_any_text_fails_cleanly(text):
    try:
        parse_fastjson(text)
    except CorruptionError as error:
        assert error.pos is not None and 0 <= error.pos <= len(text.encode())


@given(st.text(alphabet=st.sampled_from('{}[],:".012-\n 订'), max_size=30))
@example('{\n\t"a5:":{0:1,-7\t:2,10:{0:3},0:4}}')
@example('{"a,5:b":{5:1}}')
def test_names_that_are_numbers_are_read_as_token_by_token(text):
    def value(text):
        try:
            return repr(parse_fastjson(text))
        except CorruptionError:
            return "damaged"

    # JSON has no comments.
    assert value(text) == value("/**/" + text)


def test_a_brokers_file_is_not_read_token_by_token(monkeypatch):
    monkeypatch.setattr(json_files, "_json_parts", None)
    queues = ",".join(f"{queue}:{7 * queue}" for queue in range(1000))
    document = parse_fastjson(f'{{\n\t"offsetTable":{{\n\t\t"T@g":{{{queues}\n\t\t}}\n\t}}\n}}')
    assert document == {"offsetTable": {"T@g": {str(queue): 7 * queue for queue in range(1000)}}}


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
    version = '{"dataVersion":{"counter":null,"new":"x","timestamp":"5"}}'
    assert ConsumerOffsets.load(write(path, version)).data_version == {"timestamp": 5}


BAD_ENTRIES = [
    '{"offsetTable":{"t@g":{0:null}}}',
    '{"offsetTable":{"t@g":{"x":1}}}',
    '{"offsetTable":{"t@g":{0:9223372036854775808}}}',
    '{"offsetTable":{"t@g":{4294967296:1}}}',
    '{"offsetTable":{"t@g":{0:true}}}',
    '{"offsetTable":{"t@g":[1]}}',
    '{"lmqOffsetTable":{"t@g":"x"}}',
    '{"pullOffsetTable":{"t@g":[1]}}',
]
BAD_FILES = [
    '{"offsetTable":{"t@g":{0:1e999999999}}}',
    '{"offsetTable":{{"t":"g"}:{0:1}}}',
    '{"dataVersion":{"counter":"x"}}',
    '{"offsetTable":[1]}',
    '{"offsetTable":{"t@g":{0:1',
    '{"offsetTable":{}}x',
    "[1]",
]


@pytest.mark.parametrize("text", BAD_ENTRIES + BAD_FILES)
def test_what_the_reader_refuses(text, tmp_path, caplog):
    path = write(tmp_path / "c.json", text)
    with pytest.raises(CorruptionError, match="no backup"):
        ConsumerOffsets.load(path, read_only=False)
    write(tmp_path / "c.json.bak", '{"offsetTable":{"t@g":{0:1}}}')
    with caplog.at_level(logging.WARNING):
        offsets = ConsumerOffsets.load(path)
    assert offsets.get("g", "t", 0) == 1 and offsets.source == str(path) + ".bak" and offsets.findings == []
    assert "backup is used" in caplog.text
    assert path.read_text() == text and sorted(p.name for p in tmp_path.iterdir()) == ["c.json", "c.json.bak"]


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_file_that_tells_no_entries(text, tmp_path):
    with pytest.raises(CorruptionError, match="no backup"):
        ConsumerOffsets.load(write(tmp_path / "c.json", text))


@pytest.mark.parametrize("text", BAD_ENTRIES)
@pytest.mark.parametrize("in_backup", [False, True])
def test_a_bad_entry_hides_no_other_group(text, in_backup, tmp_path, caplog):
    path = tmp_path / "c.json"
    good = '"a@good":{0:7},"b@good":{3:8}'
    whole = text.replace('"offsetTable":{', f'"offsetTable":{{{good},') if '"offsetTable"' in text else (
        text[:-1] + f',"offsetTable":{{{good}}}}}'
    )  # fmt: skip
    write(tmp_path / ("c.json.bak" if in_backup else "c.json"), whole)
    if in_backup:
        write(path, "{torn")
    with caplog.at_level(logging.WARNING):
        offsets = ConsumerOffsets.load(path)
    assert offsets.get("good", "a", 0) == 7 and offsets.get("good", "b", 3) == 8
    (finding,) = offsets.findings
    assert finding.path == offsets.source == str(path) + (".bak" if in_backup else "")
    assert finding.kind == "bad_consumer_offset" and "the other groups are read" in finding.detail
    assert finding.detail in caplog.text
    assert offsets.get("g", "t", 0) == -1
    with pytest.raises(CorruptionError):
        ConsumerOffsets.load(path, read_only=False)


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


@pytest.mark.parametrize("useless", ["{torn", "", " \n", "null", "\0" * 64, None])
def test_a_useless_main_file_never_replaces_a_good_backup(useless, tmp_path):
    path, backup = tmp_path / "c.json", tmp_path / "c.json.bak"
    good = '{"offsetTable":{"t@g":{0:1}}}'
    write(backup, good)
    if useless is not None:
        write(path, useless)
    offsets = ConsumerOffsets.load(path, read_only=False)
    assert offsets.get("g", "t", 0) == 1 and offsets.dirty, "the main file has to be written again"
    offsets.commit("g", "t", 0, 2)
    assert offsets.persist()
    assert backup.read_text() == good
    assert ConsumerOffsets.load(path).get("g", "t", 0) == 2
    offsets.commit("g", "t", 0, 3)
    assert offsets.persist()
    assert ConsumerOffsets.load(backup).get("g", "t", 0) == 2


def test_both_files_damaged_and_nothing_is_changed(tmp_path):
    write(tmp_path / "c.json", "{torn")
    write(tmp_path / "c.json.bak", "{torn too")
    write(tmp_path / "c.json.rmqstore-tmp-1", '{"offsetTable":{}}')
    before = contents(tmp_path)
    with pytest.raises(CorruptionError, match="repair one of them"):
        ConsumerOffsets.load(tmp_path / "c.json", read_only=False)
    assert contents(tmp_path) == before


def test_only_own_leftovers_are_deleted(tmp_path):
    own = ["c.json.rmqstore-tmp-0f", "c.json.bak.rmqstore-tmp-0f"]
    others = ["c.json.tmp", "c.json.damaged", "d.json.rmqstore-tmp-0f", "rmqstore-tmp-0f", "c.json.bak"]
    for name in own + others:
        write(tmp_path / name, "{}")
    ConsumerOffsets.load(tmp_path / "c.json")
    assert sorted(contents(tmp_path)) == sorted(own + others)
    ConsumerOffsets.load(tmp_path / "c.json", read_only=False)
    assert sorted(contents(tmp_path)) == sorted(others)


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


NOW = 1_700_000_000_000


def contents(directory):
    """Relative name -> bytes of every file below `directory`, None for a directory."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes() for path in directory.rglob("*")
    }


def open_consumer(path, **options):
    return ConsumerOffsets.load(path, read_only=False, clock=lambda: NOW, **options)


def document_of(path):
    return parse_fastjson(path.read_text(encoding="utf-8"))


def expected(table, version=(0, 0, NOW), lmq=None):
    """The file of a broker of 5.3.x with {topic@group: {queue id: offset}}."""
    groups = {}
    for key in table:
        if key.count("@") == 1:
            topic, group = key.split("@")
            groups.setdefault(group, []).append(topic)
    document = {
        "dataVersion": dict(zip(("counter", "stateVersion", "timestamp"), version, strict=True)),
        "groupTopicMap": groups,
        "offsetTable": {key: {str(queue_id): offset for queue_id, offset in table[key].items()} for key in table},
    }
    return document if lmq is None else {**document, "lmqOffsetTable": lmq}


def same(document):
    """`document` for comparing: the order of topics is that of a Java map."""
    return {**document, "groupTopicMap": {group: sorted(topics) for group, topics in document["groupTopicMap"].items()}}


def golden_document(name):
    return same(parse_fastjson(golden.json_bytes(name).decode()))


def test_golden_text_from_commits(tmp_path):
    path = tmp_path / "config" / "consumerOffset.json"
    offsets = open_consumer(path)
    for group, topic, queue_id, offset in [
        ("group_a", "TopicTest", 10, 2**63 - 1),
        ("group_b", "TopicTest", 3, 5000000000),
        ("group_a", "%RETRY%group_a", 0, 7),
        ("group_a", "TopicTest", 0, 123),
        ("group_a", "TopicTest", 1, 0),
    ]:
        offsets.commit(group, topic, queue_id, offset)
    assert offsets.persist()
    assert same(document_of(path)) == golden_document("consumerOffset.pretty")
    assert offsets.remove("group_a") == 2 and offsets.remove(topic="TopicTest") == 1
    assert offsets.persist()
    assert same(document_of(path)) == golden_document("consumerOffset.empty.pretty")
    backup = tmp_path / "config" / "consumerOffset.json.bak"
    assert same(document_of(backup)) == golden_document("consumerOffset.pretty")
    assert sorted(contents(tmp_path / "config")) == ["consumerOffset.json", "consumerOffset.json.bak"]


def test_golden_text_of_light_message_queues(tmp_path):
    path = tmp_path / "lmqConsumerOffset.json"
    offsets = open_consumer(path, version_step=2)
    offsets.commit("g", "T", 0, 8)
    for offset in (1, 5, 9):
        offsets.commit("%LMQ%g", "%LMQ%t", 0, offset)
    assert offsets.persist()
    # Commits of light message queues do not move the data version.
    assert same(document_of(path)) == golden_document("lmqConsumerOffset.pretty")
    assert offsets.get("%LMQ%g", "%LMQ%t", 0) == 9 and offsets.get("g", "T", 0) == 8
    with pytest.raises(ValueError, match="only queue 0"):
        offsets.commit("%LMQ%g", "%LMQ%t", 1, 9)
    assert offsets.remove(group="%LMQ%g") == 1 and offsets.persist()
    assert same(document_of(path)) == expected({"T@g": {0: 8}}, lmq={})


def test_the_table_of_light_message_queues_is_used_where_it_exists(tmp_path):
    path = tmp_path / "c.json"
    write(path, '{"lmqOffsetTable":{},"offsetTable":{}}')
    with_table = open_consumer(path)
    with_table.commit("%LMQ%g", "t", 0, 5)
    with_table.persist()
    assert with_table.lmq_offset_table == {"t@%LMQ%g": 5} and with_table.offset_table == {}
    assert ConsumerOffsets.load(path).get("%LMQ%g", "t", 0) == 5
    path.unlink()
    (tmp_path / "c.json.bak").unlink()
    without = open_consumer(path)
    without.commit("%LMQ%g", "t", 3, 5)
    without.persist()
    assert same(document_of(path)) == expected({"t@%LMQ%g": {3: 5}})


names = st.text(
    st.characters(exclude_characters="@", exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=8
)
commits = st.tuples(
    st.one_of(names, names.map(lambda name: name + "@broadcast")),
    names,
    st.one_of(st.integers(0, 40), st.just(63)),
    st.one_of(st.integers(0, 100), st.integers(0, 2**63 - 1)),
)


@given(st.lists(commits, max_size=30), st.booleans())
def test_commits_give_the_document_of_a_broker(tmp_path_factory, changes, twice):
    path = tmp_path_factory.mktemp("offsets") / "consumerOffset.json"
    offsets = open_consumer(path)
    table = {}
    for number, (group, topic, queue_id, offset) in enumerate(changes):
        offsets.commit(group, topic, queue_id, offset)
        table.setdefault(f"{topic}@{group}", {})[queue_id] = offset
        if twice and number == len(changes) // 2:
            offsets.persist()
            offsets = open_consumer(path)
    offsets.persist()
    if changes:
        assert same(document_of(path)) == same(expected(table))
    else:
        assert not path.exists()
    again = ConsumerOffsets.load(path)
    assert again.offset_table == table
    assert again.list() == {tuple(reversed(key.split("@", 1))): queues for key, queues in table.items()}


def test_data_version_moves_once_in_so_many_commits(tmp_path):
    times = iter(range(1000, 2000))
    path = tmp_path / "c.json"
    write(path, '{"dataVersion":{"counter":41,"stateVersion":3,"timestamp":7},"offsetTable":{}}')
    offsets = ConsumerOffsets.load(path, read_only=False, version_step=3, clock=lambda: next(times))
    offsets.commit("g", "t", 0, 1)
    offsets.commit("g", "t", 0, 2)
    assert offsets.persist() and offsets.data_version == {"counter": 41, "stateVersion": 3, "timestamp": 7}
    offsets.commit("g", "t", 0, 2)
    assert offsets.data_version == {"counter": 42, "stateVersion": 3, "timestamp": 1000}
    assert offsets.persist() and same(document_of(path)) == expected({"t@g": {0: 2}}, version=(42, 3, 1000))
    for _ in range(6):
        offsets.commit("h", "t", 1, 5)
    assert offsets.data_version == {"counter": 44, "stateVersion": 3, "timestamp": 1002}
    assert ConsumerOffsets(path, read_only=False).data_version == {}
    standard = ConsumerOffsets.load(path, read_only=False)
    for offset in range(499):
        standard.commit("g", "t", 0, offset)
    assert standard.data_version["counter"] == 42
    standard.commit("g", "t", 0, 0)
    assert standard.data_version["counter"] == 43
    with pytest.raises(ValueError, match="version_step"):
        ConsumerOffsets(path, version_step=0)


def test_the_counter_wraps_as_a_java_long(tmp_path):
    path = write(tmp_path / "c.json", f'{{"dataVersion":{{"counter":{2**63 - 1}}}}}')
    offsets = open_consumer(path, version_step=1)
    offsets.commit("g", "t", 0, 1)
    offsets.persist()
    assert ConsumerOffsets.load(path).data_version == {"counter": -(2**63), "stateVersion": 0, "timestamp": NOW}


def test_nothing_is_written_when_nothing_changed(tmp_path, monkeypatch):
    path = tmp_path / "config" / "consumerOffset.json"
    offsets = open_consumer(path)
    assert not offsets.persist() and not offsets.dirty and not path.parent.exists()
    offsets.commit("g", "t", 0, 5)
    assert offsets.dirty and offsets.persist() and not offsets.dirty
    before = golden.tree(tmp_path)
    calls = record_calls(monkeypatch)
    offsets.commit("g", "t", 0, 5)
    assert offsets.remove("other") == 0
    assert not offsets.persist()
    assert calls == [] and golden.tree(tmp_path) == before


def test_a_smaller_offset_counts_and_is_logged(tmp_path, caplog):
    offsets = open_consumer(tmp_path / "c.json")
    offsets.commit("g", "t", 3, 100)
    offsets.commit("g", "t", 3, 200)
    assert not caplog.records
    offsets.commit("g", "t", 3, 7)
    assert offsets.get("g", "t", 3) == 7
    assert [record.getMessage() for record in caplog.records] == ["the offset of t@g, queue 3, goes back from 200 to 7"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "t", 0, 0), "group is ''"),
        (("g", "", 0, 0), "topic is ''"),
        (("g", "t@x", 0, 0), "none of '@'"),
        (("g", "t\ud800", 0, 0), "lone surrogates"),
        (("g\udfff", "t", 0, 0), "lone surrogates"),
        ((None, "t", 0, 0), "group is None"),
        (("g", b"t", 0, 0), "topic is b't'"),
        (("g", "t", -1, 0), "queue_id is -1"),
        (("g", "t", 2**31, 0), r"queue_id is 2147483648: give a whole number from 0 to 2\*\*31 - 1"),
        (("g", "t", True, 0), "queue_id is True"),
        (("g", "t", 0, -1), "offset is -1"),
        (("g", "t", 0, 2**63), r"0 to 2\*\*63 - 1"),
    ],
)
def test_commit_refuses(arguments, message, tmp_path):
    offsets = open_consumer(tmp_path / "c.json")
    with pytest.raises(ValueError, match=message):
        offsets.commit(*arguments)
    assert offsets.list() == {} and not offsets.dirty


def test_commit_takes_no_fractions(tmp_path):
    offsets = open_consumer(tmp_path / "c.json")
    for queue_id, offset in ((0.0, 1), (0, 1.0), ("0", 1), (0, None)):
        with pytest.raises(TypeError):
            offsets.commit("g", "t", queue_id, offset)
    assert not offsets.dirty


def test_groups_with_an_at_sign(tmp_path, golden_copy):
    path = golden_copy("broker") / "config" / "consumerOffset.json"
    before = ConsumerOffsets.load(path)
    offsets = open_consumer(path)
    offsets.commit("G-wall@broadcast", "Batches", 1, 181)
    offsets.commit("G-new@broadcast", "Orders", 0, 1)
    offsets.persist()
    after = ConsumerOffsets.load(path)
    assert after.get("G-wall@broadcast", "Batches", 1) == 181
    assert after.pull_offset_table == before.pull_offset_table != {}
    assert after.data_version == before.data_version
    document = parse_fastjson(path.read_text())
    assert document.keys() == {"dataVersion", "groupTopicMap", "offsetTable", "pullOffsetTable"}
    # Like the broker: a key with a second @ belongs to no group.
    assert document["groupTopicMap"].keys() == {"CID_RMQ_SYS_TRANS", "G-retry", "G-billing"}
    assert after.list().keys() == before.list().keys() | {("G-new@broadcast", "Orders")}
    assert offsets.remove("G-wall") == 1, "its pull offsets; the broadcasting group is another one"
    assert offsets.get("G-wall@broadcast", "Batches", 1) == 181
    assert offsets.remove("G-billing", "Payments") == 0 and offsets.remove("G-billing", "Orders") == 1
    assert offsets.remove(topic="Batches") == 1
    offsets.persist()
    assert {topic for _, topic in ConsumerOffsets.load(path).list()} == {
        "Orders", "Payments", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
    }  # fmt: skip
    assert ConsumerOffsets.load(path).pull_offset_table.keys() == {"Payments@G-retry"}
    with pytest.raises(ValueError, match="a group, a topic or both"):
        offsets.remove()


@pytest.mark.parametrize(("key", "group"), [("t@g", "g"), ("t@g@", "g"), ("@g", "g"), ("t@", None), ("t@g@b", None),
                                            ("t", None), ("t@@g", None)])  # fmt: skip
def test_group_topic_map_cuts_as_java_splits(key, group, tmp_path):
    path = write(tmp_path / "c.json", f'{{"offsetTable":{{"{key}":{{0:1}}}}}}')
    offsets = open_consumer(path)
    offsets.commit("other", "topic", 0, 1)
    offsets.persist()
    document = parse_fastjson(path.read_text())
    del document["groupTopicMap"]["other"]
    assert document["groupTopicMap"] == ({} if group is None else {group: [key.split("@")[0]]})
    assert document["offsetTable"][key] == {"0": 1}


def test_unknown_members_are_kept(tmp_path):
    path = write(
        tmp_path / "c.json",
        '{"aFirst":null,"dataVersion":{"counter":1,"extra":{"x":[1,{"y":null}]},"timestamp":5},'
        '"middle":{"n":null,"f":1.25,"t":true,7:{"deep":"\\u0001"}},"offsetTable":{"t@g":{0:1}},"zLast":["s",null]}',
    )
    for offset in (2, 3):
        offsets = open_consumer(path)
        offsets.commit("g", "t", 0, offset)
        offsets.persist()
        assert document_of(path) == {
            "aFirst": None,
            "dataVersion": {"counter": 1, "extra": {"x": [1, {"y": None}]}, "stateVersion": 0, "timestamp": 5},
            "groupTopicMap": {"g": ["t"]},
            "middle": {"n": None, "f": 1.25, "t": True, "7": {"deep": "\x01"}},
            "offsetTable": {"t@g": {"0": offset}},
            "zLast": ["s", None],
        }
        # Numbers as names are quoted but for queue ids: the reader of 5.5.0 cannot skip others.
        assert '"7":' in path.read_text() and f"{{0:{offset}}}" in path.read_text()


def test_a_file_of_4_x_gets_the_new_members(tmp_path):
    path = write(tmp_path / "c.json", '{"offsetTable":{"t@g":{0:1}}}')
    offsets = open_consumer(path)
    assert offsets.data_version == {}
    offsets.commit("g", "t", 0, 2)
    offsets.persist()
    assert same(document_of(path)) == expected({"t@g": {0: 2}})


def test_bounds_are_the_last_good_values(tmp_path):
    path = tmp_path / "c.json"
    offsets = open_consumer(path)
    offsets.commit('g"\\\n', "%RETRY%订😀", 2**31 - 1, 2**63 - 1)
    offsets.commit("g", "t", 0, 0)
    offsets.persist()
    assert ConsumerOffsets.load(path).list() == {
        ('g"\\\n', "%RETRY%订😀"): {2**31 - 1: 2**63 - 1},
        ("g", "t"): {0: 0},
    }


def test_read_only_offsets_change_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / "c.json", "{torn")
    write(tmp_path / "c.json.bak", '{"offsetTable":{"t@g":{0:1}}}')
    write(tmp_path / "c.json.rmqstore-tmp-00", "")
    before = golden.tree(tmp_path)
    calls = record_calls(monkeypatch)
    offsets = ConsumerOffsets.load(path)
    assert offsets.get("g", "t", 0) == 1 and not offsets.dirty
    for call in (
        lambda: offsets.commit("g", "t", 0, 2),
        lambda: offsets.remove("g"),
        offsets.persist,
    ):
        with pytest.raises(ReadOnlyError, match="read_only=False"):
            call()
    assert offsets.get("g", "t", 0) == 1
    assert calls == [] and golden.tree(tmp_path) == before


# ------------------------------------------------------------------------------------------ kill, power loss, faults

CALLS = ("open", "write", "fsync", "close", "link", "replace", "rename", "unlink", "mkdir")


def record_calls(monkeypatch, before=None, after=None):
    """Have every changing call of `os` noted, as (name, arguments); opening for reading is none, closing is always one."""
    calls = []

    def wrapped(name, call):
        def run(*arguments, **options):
            changing = name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY)
            if not changing:
                return call(*arguments, **options)
            calls.append((name, arguments))
            if before is not None:
                arguments = before(name, arguments) or arguments
            result = call(*arguments, **options)
            if after is not None:
                after(name, arguments, result)
            return result

        return run

    for name in CALLS:
        monkeypatch.setattr(os, name, wrapped(name, getattr(os, name)))
    return calls


def short_writes(name, arguments):
    """Let a write take no more than 40 bytes, so that it has an inside."""
    return (arguments[0], bytes(arguments[1])[:40]) if name == "write" else None


def no_links(name, arguments):
    if name == "link":
        raise OSError(errno.EPERM, "Operation not permitted", arguments[0])


LINKS = pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])


class Subject:
    """A file with a table of one number: what was committed last."""

    def __init__(self, path):
        self.path = path
        self.offsets = self.load(read_only=False)

    def load(self, read_only=True, path=None):
        return ConsumerOffsets.load(path or self.path, read_only=read_only)

    def commit(self, number, offsets=None):
        offsets = offsets or self.offsets
        offsets.commit("g", "T", 0, number)

    def number(self, offsets):
        (value,) = offsets.list().values()
        return value[0]

    def loaded(self, path=None, read_only=True):
        offsets = self.load(read_only, path)
        return self.number(offsets) if offsets.list() else None


def restore(directory, files):
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, data in sorted(files.items()):
        if data is None:
            (directory / name).mkdir(parents=True)
        else:
            (directory / name).write_bytes(data)


def check_all_goes_on(subject, path, least):
    """After a kill: what is loaded, and that the next process writes and reads on."""
    value = subject.loaded(path)
    assert value == subject.loaded(path, read_only=False)
    assert value in least, (value, least)
    offsets = subject.load(read_only=False, path=path)
    assert not [name for name in os.listdir(path.parent) if "rmqstore-tmp" in name]
    subject.commit(77, offsets)
    assert offsets.persist()
    assert subject.loaded(path) == 77
    return value


@LINKS
def test_a_kill_at_every_step(links, tmp_path, monkeypatch):
    disk, scratch = tmp_path / "disk", tmp_path / "scratch"
    disk.mkdir()
    subject = Subject(disk / "config" / "x.json")
    path = scratch / "config" / "x.json"
    states = []

    def note(*_):
        states.append((wanted, contents(disk)))

    def before(name, arguments):
        note()
        if not links:
            no_links(name, arguments)
        return short_writes(name, arguments)

    with monkeypatch.context() as patch:
        calls = record_calls(patch, before, note)
        for number in range(4):
            wanted = (number - 1 if number else None, number)
            subject.commit(number)
            assert subject.offsets.persist()
            assert contents(disk).keys() - {"config"} == {"config/x.json", *(["config/x.json.bak"] if number else [])}
    assert {"open", "write", "fsync", "replace", "mkdir"} <= {name for name, _ in calls} and len(states) > 80
    seen = set()
    for (old, new), files in states:
        restore(scratch, files)
        if "config" in files:
            seen.add((new, check_all_goes_on(subject, path, (old, new))))
    # Every persist was seen from both sides.
    assert seen == {(number, value) for number in range(4) for value in (number - 1 if number else None, number)}
    # A main file that is torn after all: the backup is one of the last two and survives until there is another.
    torn = 0
    for (old, _new), files in states:
        main, backup = files.get("config/x.json"), files.get("config/x.json.bak")
        if main is None or backup is None:
            continue
        for bad in (
            b"",
            main[:1],
            main[: len(main) // 2],
            main[:-1],
            bytes(len(main)),
            main[:50] + bytes(len(main) - 50),
        ):
            torn += 1
            restore(scratch, {**files, "config/x.json": bad})
            assert check_all_goes_on(subject, path, (old - 1, old)) is not None
    assert torn > 100


NEEDS_PROC = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to know what a descriptor is")


class Disk:
    """The possible states of one directory after a power cut.

    The names that were made durable, any of the later changes, and of a file only what was synced is sure.
    """

    def __init__(self, directory):
        self.directory = str(directory)
        self.durable = {}
        self.pending = []
        self.inodes = {}
        self.synced = {}
        for name in os.listdir(directory):
            self.durable[name] = self.learn(os.path.join(directory, name))
            self.synced[self.durable[name]] = self.inodes[self.durable[name]]

    def learn(self, path):
        status = os.stat(path)
        with open(path, "rb") as file:
            self.inodes[status.st_ino] = file.read()
        return status.st_ino

    def inside(self, path):
        return isinstance(path, str) and os.path.dirname(path) == self.directory

    def after(self, name, arguments, result):
        if name == "open" and self.inside(arguments[0]):
            self.pending.append({os.path.basename(arguments[0]): self.learn(arguments[0])})
        elif name == "link":
            self.pending.append({os.path.basename(arguments[1]): os.stat(arguments[1]).st_ino})
        elif name == "replace":
            source, target = map(os.path.basename, arguments)
            self.pending.append({source: None, target: os.stat(arguments[1]).st_ino})
        elif name == "unlink":
            self.pending.append({os.path.basename(arguments[0]): None})
        elif name in ("write", "fsync"):
            status = os.fstat(arguments[0])
            target = os.readlink(f"/proc/self/fd/{arguments[0]}")
            if name == "write":
                self.learn(target)
            elif target == self.directory:
                for change in self.pending:
                    self.apply(self.durable, change)
                self.pending = []
            else:
                self.synced[status.st_ino] = self.inodes[status.st_ino]

    @staticmethod
    def apply(names, change):
        for name, inode in change.items():
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode

    def states(self):
        """Every directory that may be found: any subset of the changes, and unsynced files torn in several ways."""
        for chosen in itertools.product((False, True), repeat=len(self.pending)):
            names = dict(self.durable)
            for change, done in zip(self.pending, chosen, strict=True):
                if done:
                    self.apply(names, change)
            for damage in (lambda data: b"", lambda data: data[: len(data) // 2], lambda data: bytes(len(data))):
                yield {
                    name: self.synced[inode] if inode in self.synced else damage(self.inodes[inode])
                    for name, inode in names.items()
                }


@NEEDS_PROC
def test_new_directories_are_durable_before_the_file_is(tmp_path, monkeypatch):
    synced = []

    def after(name, arguments, _result):
        if name == "mkdir":
            synced.append(("made", arguments[0]))
        elif name == "fsync":
            synced.append(("synced", os.readlink(f"/proc/self/fd/{arguments[0]}")))

    subject = Subject(str(tmp_path / "a" / "b" / "x.json"))
    subject.commit(1)
    with monkeypatch.context() as patch:
        record_calls(patch, after=after)
        subject.offsets.persist()
    top = str(tmp_path)
    assert synced[:4] == [("made", f"{top}/a"), ("synced", top), ("made", f"{top}/a/b"), ("synced", f"{top}/a")]
    assert [(what, path.startswith(f"{top}/a/b/x.json.rmqstore-tmp-")) for what, path in synced[4:5]] == [
        ("synced", True)
    ]
    assert synced[5:] == [("synced", f"{top}/a/b")]


@NEEDS_PROC
@LINKS
def test_power_loss_at_every_step(links, tmp_path, monkeypatch):
    directory, scratch = tmp_path / "config", tmp_path / "scratch"
    subject = Subject(directory / "x.json")
    for number in (0, 1):
        subject.commit(number)
        subject.offsets.persist()
    disk = Disk(directory)
    found = {}

    def look(*_):
        for state in disk.states():
            found.setdefault(frozenset(state.items()), set()).add(wanted)

    def before(name, arguments):
        look()
        if not links:
            no_links(name, arguments)
        return short_writes(name, arguments)

    with monkeypatch.context() as patch:
        record_calls(patch, before, disk.after)
        for number in (2, 3):
            wanted = (number - 1, number)
            subject.commit(number)
            assert subject.offsets.persist()
            # Once persist has returned there is no going back.
            wanted = (number,)
            look()
    assert len(found) > 15
    values = set()
    for state, all_wanted in found.items():
        restore(scratch, dict(state))
        value = subject.loaded(scratch / "x.json")
        assert all(value in wanted for wanted in all_wanted), (value, all_wanted)
        values.add(value)
    assert values == {1, 2, 3}


class Fault:
    """Fails the call of a number, once; writes are short, so that a full disk shows in the middle of one too."""

    def __init__(self, code, failing, links=True):
        self.code, self.failing, self.links = code, failing, links
        self.close = os.close
        self.count = 0
        self.failed = None
        self.done = []

    def before(self, name, arguments):
        number, self.count = self.count, self.count + 1
        if number == self.failing:
            self.failed = name
            if name == "close":
                self.close(arguments[0])
            raise OSError(self.code, os.strerror(self.code))
        if not self.links:
            no_links(name, arguments)
        return short_writes(name, arguments)

    def after(self, name, *_):
        self.done.append(name)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@LINKS
def test_a_fault_at_every_call(links, code, tmp_path, monkeypatch):
    failed, written = set(), 0
    for failing in itertools.count():
        directory = tmp_path / str(failing)
        subject = Subject(directory / "x.json")
        for number in (0, 1):
            subject.commit(number)
            subject.offsets.persist()
        old = contents(directory)
        subject.commit(2)
        fault = Fault(code, failing, links)
        with monkeypatch.context() as patch:
            record_calls(patch, fault.before, fault.after)
            try:
                subject.offsets.persist()
            except OSError as error:
                assert (error.errno, error.filename) == (code, str(subject.path)) and "persist again" in str(error)
            else:
                assert fault.failed in (None, "unlink")
        if fault.failed is None:
            break
        failed.add(fault.failed)
        new = contents(directory)
        if fault.failed == "unlink":
            assert subject.loaded() == 2
            continue
        assert subject.offsets.dirty
        if fault.done.count("replace") == 2 and fault.failed != "replace":
            # Only that the names are durable is not known.
            written += 1
            assert subject.loaded() == 2 and new["x.json.bak"] == old["x.json"]
        elif not links and fault.failed == "replace" and fault.done.count("replace") == 2:
            # Without links the old backup gives way first.
            assert new == {"x.json": old["x.json"]}
        else:
            assert new == old
        assert subject.offsets.persist() and not subject.offsets.dirty
        assert subject.loaded() == 2 and contents(directory).keys() == {"x.json", "x.json.bak"}
        assert subject.loaded(str(subject.path) + ".bak") in (1, 2)
    assert failed >= {"open", "write", "fsync", "close", "replace"} and written == 3
    assert ("link" in failed) or not links


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_fault_at_the_first_file(code, tmp_path, monkeypatch):
    failed = set()
    for failing in itertools.count():
        directory = tmp_path / str(failing)
        subject = Subject(directory / "config" / "x.json")
        subject.commit(5)
        fault = Fault(code, failing)
        with monkeypatch.context() as patch:
            record_calls(patch, fault.before, fault.after)
            try:
                subject.offsets.persist()
            except OSError as error:
                assert error.errno == code
            else:
                assert fault.failed in (None, "unlink")
        if fault.failed is None:
            break
        failed.add(fault.failed)
        if "replace" not in fault.done:
            assert not [name for name, data in contents(tmp_path / str(failing)).items() if data is not None]
            assert subject.loaded() is None
        subject.offsets.persist()
        assert subject.loaded() == 5 and contents(directory / "config").keys() <= {"x.json", "x.json.bak"}
    assert failed >= {"mkdir", "open", "write", "fsync", "close", "replace"}


def test_a_link_that_fails_for_another_reason_is_an_error(tmp_path, monkeypatch):
    subject = Subject(tmp_path / "x.json")
    subject.commit(0)
    subject.offsets.persist()
    subject.commit(1)
    old = contents(tmp_path)

    def fail(name, arguments):
        if name == "link":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        record_calls(patch, fail)
        with pytest.raises(OSError, match="Disk quota exceeded: the offsets could not be saved") as caught:
            subject.offsets.persist()
    assert caught.value.errno == errno.EDQUOT and contents(tmp_path) == old


def test_main_file_and_backup_that_are_one_file(tmp_path):
    subject = Subject(tmp_path / "x.json")
    subject.commit(0)
    subject.offsets.persist()
    os.link(subject.path, tmp_path / "x.json.bak")
    subject.commit(1)
    assert subject.offsets.persist()
    assert subject.loaded() == 1 and subject.loaded(tmp_path / "x.json.bak") == 0
    assert contents(tmp_path).keys() == {"x.json", "x.json.bak"}


def test_the_directory_may_be_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offsets = ConsumerOffsets.load("x.json", read_only=False)
    for number in range(2):
        offsets.commit("g", "t", 0, number)
        assert offsets.persist()
    assert contents(tmp_path).keys() == {"x.json", "x.json.bak"}


def test_a_file_where_a_directory_should_be(tmp_path):
    write(tmp_path / "config", "not a directory")
    offsets = ConsumerOffsets(tmp_path / "config" / "x.json", read_only=False)
    offsets.commit("g", "t", 0, 1)
    with pytest.raises(OSError, match="could not be saved"):
        offsets.persist()
    assert contents(tmp_path) == {"config": b"not a directory"}


def test_commits_during_a_persist_are_not_lost_and_do_not_wait(tmp_path, monkeypatch):
    subject = Subject(tmp_path / "x.json")
    writing, go_on = threading.Event(), threading.Event()

    def block(name, arguments):
        if name == "fsync" and not writing.is_set():
            writing.set()
            assert go_on.wait(240)

    subject.commit(1)
    results = []
    with monkeypatch.context() as patch:
        record_calls(patch, block)
        thread = threading.Thread(target=lambda: results.append(subject.offsets.persist()))
        thread.start()
        assert writing.wait(240)
        subject.commit(2)
        assert subject.number(subject.offsets) == 2 and subject.offsets.dirty
        go_on.set()
        thread.join(240)
    assert results == [True]
    assert subject.loaded() == 1 and subject.offsets.dirty and subject.number(subject.offsets) == 2
    assert subject.offsets.persist() and not subject.offsets.dirty
    assert subject.loaded() == 2


def test_what_is_written_is_the_table_of_one_moment(tmp_path, monkeypatch):
    offsets = open_consumer(tmp_path / "x.json")
    for queue_id in range(3):
        offsets.commit("g", "t", queue_id, 1)
    first = offsets.list()
    real = rmqstore.consumer.consumer_offset._text

    def commit_meanwhile(document):
        monkeypatch.setattr(rmqstore.consumer.consumer_offset, "_text", real)
        offsets.commit("new", "t", 0, 1)
        offsets.commit("g", "t", 3, 1)
        return real(document)

    monkeypatch.setattr(rmqstore.consumer.consumer_offset, "_text", commit_meanwhile)
    assert offsets.persist()
    assert len(offsets.list()) == 2 and ConsumerOffsets.load(offsets.path).list() == first
    assert offsets.persist() and ConsumerOffsets.load(offsets.path).list() == offsets.list()


def in_threads(*functions):
    """Run the functions at the same time and give their errors to the test."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_one_writes_at_a_time(tmp_path, monkeypatch):
    subject = Subject(tmp_path / "x.json")
    meeting = threading.Barrier(2)
    met = []

    def meet(name, arguments):
        # Two that are inside at the same time meet here; one alone waits in vain.
        if name == "write":
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.05)
                met.append(1)
            meeting.reset()

    def commit_and_persist(first):
        for number in range(first, first + 5):
            subject.commit(number)
            subject.offsets.persist()

    with monkeypatch.context() as patch:
        record_calls(patch, meet)
        in_threads(lambda: commit_and_persist(0), lambda: commit_and_persist(100))
    assert not met and not subject.offsets.dirty
    assert subject.loaded() in (4, 104) and subject.loaded() == subject.number(subject.offsets)


def commit_read_and_persist(directory, rounds):
    """Four who commit, two who persist, one who loads the file: nothing goes back, nothing is torn, the end is complete."""
    path = directory / "consumerOffset.json"
    offsets = open_consumer(path, version_step=7)
    finished = threading.Event()
    committing = threading.Semaphore(0)
    seen = [0]

    def commit(group):
        try:
            for number in range(1, rounds + 1):
                offsets.commit(f"g{group}", f"T{number % 3}", number % 5, number)
                assert offsets.get(f"g{group}", f"T{number % 3}", number % 5) == number
        finally:
            committing.release()

    def persist():
        while not finished.is_set():
            offsets.persist()

    def read():
        last = {}
        while not finished.is_set():
            now = {(key, queue): offset for key, queues in ConsumerOffsets.load(path).list().items()
                   for queue, offset in queues.items()}  # fmt: skip
            assert all(now.get(key, 0) >= offset for key, offset in last.items())
            seen[0] += last != now
            last = now
            offsets.list()

    def wait():
        try:
            for _ in range(4):
                assert committing.acquire(timeout=120)
            # On a busy machine the reader may not have had its turn yet.
            end = time.monotonic() + 240
            while not seen[0] and time.monotonic() < end:
                time.sleep(0.001)
        finally:
            finished.set()

    in_threads(*[lambda group=group: commit(group) for group in range(4)], persist, persist, read, wait)
    offsets.persist()
    after = ConsumerOffsets.load(path)
    assert after.list() == offsets.list()
    for group in range(4):
        for number in range(rounds - 14, rounds + 1):
            assert after.get(f"g{group}", f"T{number % 3}", number % 5) == number
    assert after.data_version["counter"] == 4 * rounds // 7
    assert contents(directory).keys() <= {"consumerOffset.json", "consumerOffset.json.bak"}
    return seen[0]


def test_threads(tmp_path):
    assert commit_read_and_persist(tmp_path, 3000) > 0


@pytest.mark.slow
def test_threads_for_long(tmp_path):
    assert commit_read_and_persist(tmp_path, 300_000) > 10


def kill_a_writer(path, acknowledged, before):
    """Fork a writer that persists rising numbers and says so, kill it after some; return the last one that it said."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(receiver)
            subject = Subject(path)
            number = before
            while True:
                number += 1
                subject.commit(number)
                subject.offsets.persist()
                os.write(sender, number.to_bytes(8, "big"))
        finally:
            os._exit(code)
    os.close(sender)
    said = before
    try:
        for _ in range(acknowledged):
            data = os.read(receiver, 8)
            assert len(data) == 8, "the writer failed"
            said = int.from_bytes(data, "big")
        # The output before the signal makes the moment of the kill random.
        os.kill(child, signal.SIGKILL)
        while len(data := os.read(receiver, 8)) == 8:
            said = int.from_bytes(data, "big")
    finally:
        os.close(receiver)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return said


def kill_writers(path, kills):
    said = 0
    for kill in range(kills):
        said = kill_a_writer(path, 1 + kill % 4, said)
        value = Subject(path).loaded()
        assert value in (said, said + 1)
        names = contents(path.parent).keys()
        assert {"x.json"} <= names <= {"x.json", "x.json.bak"}
        said = value


def test_kill_9(tmp_path):
    kill_writers(tmp_path / "x.json", 25)


@pytest.mark.slow
def test_kill_9_often(tmp_path):
    kill_writers(tmp_path / "x.json", 1000)
