"""Settings wherever a broker keeps them: goldens, the choice between several places, hostile entries, the command."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import sys
import tempfile
from pathlib import Path

import golden
import pytest
import rocksdb_files
from click.testing import CliRunner
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

pytest.importorskip("rocksdict")

import rmqstore
from rmqstore import ConsumerOffsets, MessageStore, StoreConfig, verify
from rmqstore.cli import main
from rmqstore.consumer.settings_sources import offsets_in_databases
from rmqstore.errors import CorruptionError, MissingDependencyError, ReadOnlyError, StoreError

OFFSETS = {
    ("G-billing", "%LMQ%x"): {0: 77},
    ("G-billing", "Orders"): {0: 1000, 1: 1001, 2: 1002},
    ("G@odd", "Orders"): {1: 5},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return rocksdb_files.unpack("store", tmp_path_factory.mktemp("settings"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    return rocksdb_files.unpack("store.killed", tmp_path_factory.mktemp("settings"))


def command(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["settings", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


# ------------------------------------------------------------------------------------------------------------ goldens


@pytest.mark.parametrize("name", ["config-separate", "config-single", "config-v2", "config-killed"])
def test_golden_settings(name, tmp_path):
    path = rocksdb_files.unpack("variants", tmp_path, name)
    before = golden.tree(path)
    found = rmqstore.settings(path)
    assert golden.tree(path) == before
    assert found.findings == () and found.pop_records == () and found.reasons == {}
    assert found.consumer_offsets == OFFSETS
    assert found.subscription_groups["G-billing"]["retryMaxTimes"] == 7
    # The kill lost what is forbidden, and v2 does not keep it.
    kept = name in ("config-separate", "config-single")
    assert found.forbidden == ({"G-billing": {"Orders": 2}} if kept else {})
    assert found.pull_offsets == ({("G-billing", "Orders"): {1: 999}} if name == "config-v2" else {})
    form = {"config-killed": "separate"}.get(name, name.removeprefix("config-"))
    assert {(source.kind, source.form, source.taken) for source in found.sources} == {
        (kind, form, True) for kind in ("topics", "subscription_groups", "consumer_offsets")
    }
    assert "Plain" not in found.topics
    if name == "config-v2":
        # The file has no entry of a topic, although its data version counts three changes.
        assert found.topics == {} and found.data_versions["topics"]["counter"] == 3
        assert found.data_versions["consumer_offsets"] == {"counter": 5, "stateVersion": 0, "timestamp": 1795424471530}
    else:
        orders = found.topics["Orders"]
        assert (orders["readQueueNums"], orders["writeQueueNums"]) == (3, 5)
        assert orders["attributes"] == {"message.type": "FIFO"}
        assert found.data_versions["topics"]["counter"] == 2 and found.data_versions["consumer_offsets"] == {}


def test_golden_stores(store, killed):
    for path, name in ((store, "store"), (killed, "killed")):
        found = rmqstore.settings(path)
        assert found.findings == () and {"Orders", "Pops", "Batches", "Payments", "Reminders"} <= set(found.topics)
        # Of five that were popped two were acknowledged, in the order in which they were handed out.
        pops = [line for line in rocksdb_files.lines("sent") if line["kind"] == "pop" and "pop_time" in line]
        pop = pops[0] if name == "store" else pops[-1]
        records = [each for each in found.pop_records if each.pop_time == pop["pop_time"]]
        assert [each.queue_offset for each in records] == [2, 3, 4]
        assert {(each.group, each.topic, each.queue_id, each.retry) for each in records} == {("G-pop", "Pops", 0, 0)}
        assert {each.visible_time - each.pop_time for each in records} == {pop["invisible"]} == {600000}
        assert list(found.pop_records) == sorted(found.pop_records, key=lambda each: each.visible_time)
        with MessageStore.open(path, read_only=True) as opened:
            assert opened.consumer_offsets.list() == found.consumer_offsets
            assert opened.consumer_progress() == (found.consumer_offsets, None)
            assert opened.consumer_offsets.source == str(path / "config" / "consumerOffsets")
    assert rmqstore.settings(store).consumer_offsets[("G-billing", "Orders")] == {0: 314, 1: 314, 2: 314, 3: 313}


@pytest.mark.parametrize("name", golden.VERSION_STORES + ("broker",))
def test_settings_of_json_files(name, tmp_path):
    path = golden.unpack(name, tmp_path)
    found = rmqstore.settings(path)
    assert found.findings == ()
    assert {source.form for source in found.sources} == {"json"}
    for kind, file, table in (
        (found.topics, "topics.json", "topicConfigTable"),
        (found.subscription_groups, "subscriptionGroup.json", "subscriptionGroupTable"),
    ):
        text = (path / "config" / file).read_text()
        assert kind == json.loads(text)[table]
    with MessageStore.open(path, read_only=True) as opened:
        assert opened.consumer_offsets.list() == found.consumer_offsets
        assert type(opened.consumer_offsets) is ConsumerOffsets


def test_exact_texts(tmp_path):
    config = tmp_path / "config"
    config.mkdir()
    for name in ("topics", "consumerOffset"):
        (config / f"{name}.json").write_bytes(golden.json_bytes(f"{name}.pretty"))
    found = rmqstore.settings(tmp_path)
    assert found.topics["Ord"]["attributes"] == {"message.type": "FIFO"} and found.topics["Ord"]["order"] is True
    assert found.consumer_offsets[("group_a", "TopicTest")] == {0: 123, 1: 0, 10: 9223372036854775807}
    (config / "lmqConsumerOffset.json").write_bytes(golden.json_bytes("lmqConsumerOffset.pretty"))
    (config / "consumerOffset.json").unlink()
    assert rmqstore.settings(tmp_path).consumer_offsets == {("%LMQ%g", "%LMQ%t"): {0: 9}, ("g", "T"): {0: 8}}


def test_a_store_without_settings(tmp_path):
    found = rmqstore.settings(tmp_path)
    assert found.sources == () and found.topics == {} and found.consumer_offsets == {}
    with pytest.raises(StoreError):
        rmqstore.settings(tmp_path / "nothing")


# ------------------------------------------------------------------------------------------------- several places


def json_file(config: Path, kind: str, counter: int, tables: dict, timestamp: int = 0) -> None:
    version = {"counter": counter, "stateVersion": 0, "timestamp": timestamp}
    (config / kind).write_text(json.dumps({"dataVersion": version, **tables}))


def topic(name: str, queues: int = 1, **attributes: str) -> dict:
    return {"topicName": name, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6, "attributes": attributes}


def v1(counter: int) -> bytes:
    return json.dumps({"counter": counter, "stateVersion": 0, "timestamp": 5000}).encode()


@pytest.mark.parametrize(("counter", "merged"), [(4, False), (5, False), (6, True)])
def test_a_json_file_beside_a_database(counter, merged, tmp_path):
    config = tmp_path / "config"
    rocksdb_files.write(
        config / "topics",
        {
            "default": {b"A": json.dumps(topic("A", 2)).encode(), b"B": json.dumps(topic("B", 2)).encode()},
            "kvDataVersion": {b"kvDataVersionKey": v1(5)},
        },
    )
    json_file(config, "topics.json", counter, {"topicConfigTable": {"B": topic("B", 9), "C": topic("C", 9)}})
    rocksdb_files.write(
        config / "consumerOffsets",
        {"default": {b"A@g": b'{"offsetTable":{"0":1}}'}, "kvDataVersion": {b"kvDataVersionKey": v1(5)}},
    )
    json_file(config, "consumerOffset.json", counter, {"offsetTable": {"B@g": {"0": 2}}})
    found = rmqstore.settings(tmp_path)
    queues = {name: members["readQueueNums"] for name, members in found.topics.items()}
    assert queues == ({"A": 2, "B": 9, "C": 9} if merged else {"A": 2, "B": 2})
    # Offsets are replaced as a whole.
    assert found.consumer_offsets == ({("g", "B"): {0: 2}} if merged else {("g", "A"): {0: 1}})
    assert {(source.kind, source.form): source.taken for source in found.sources} == {
        ("topics", "separate"): True,
        ("topics", "json"): merged,
        ("consumer_offsets", "separate"): not merged,
        ("consumer_offsets", "json"): merged,
    }
    reason = (
        "config/topics.json has data version 6"
        if merged
        else f"config/topics.json {counter}: a broker takes the former"
    )
    assert reason in found.reasons["topics"]
    assert found.data_versions["topics"]["counter"] == max(counter, 5)


def test_separate_databases_beside_the_single_one(tmp_path):
    config = tmp_path / "config"
    for folder, family, version_family, counter, name in (
        ("metadata", "topic", "topicVersion", 3, "A"),
        ("topics", "default", "kvDataVersion", 4, "B"),
    ):
        rocksdb_files.write(
            config / folder,
            {
                family: {name.encode(): json.dumps(topic(name)).encode()},
                version_family: {b"kvDataVersionKey": v1(counter)},
            },
        )
    assert set(rmqstore.settings(tmp_path).topics) == {"A", "B"}
    rocksdb_files.write(config / "metadata", {"topicVersion": {b"kvDataVersionKey": v1(4)}})
    assert set(rmqstore.settings(tmp_path).topics) == {"A"}


def v2_name(table: int, name: str) -> bytes:
    data = name.encode()
    return struct.pack(">bhbh", 1, table, 2, len(data)) + data


def v2_offset(table: int, group: str, topic: str, queue_id: int) -> bytes:
    data = topic.encode()
    return v2_name(table, group) + b"\1" + struct.pack(">h", len(data)) + data + b"\1" + struct.pack(">i", queue_id)


@pytest.mark.parametrize(("timestamp", "form"), [(4999, "v2"), (5000, "v2"), (5001, "json")])
def test_v2_beside_a_json_file(timestamp, form, tmp_path):
    config = tmp_path / "config"
    rocksdb_files.write(
        config / "rdb",
        {
            "default": {
                v2_name(3, "取消"): b"\1" + json.dumps(topic("取消", 7)).encode(),
                struct.pack(">bhb", 1, 3, 1) + b"data_version": struct.pack(">qqq", 0, 5000, 1),
            }
        },
    )
    json_file(config, "topics.json", 9, {"topicConfigTable": {"J": topic("J")}}, timestamp)
    found = rmqstore.settings(tmp_path)
    assert set(found.topics) == ({"取消"} if form == "v2" else {"J"})
    assert [source.form for source in found.sources if source.taken and source.kind == "topics"] == [form]
    assert "was changed after" in found.reasons["topics"]


# ------------------------------------------------------------------------------------------------- hostile entries


def test_one_bad_entry_hides_no_other(tmp_path):
    config = tmp_path / "config"
    good = json.dumps(topic("good")).encode()
    rocksdb_files.write(
        config / "topics",
        {
            "default": {b"bad": b"{torn", b"good": good, b"\xff": good, b"list": b"[1]", b"zzz": good},
            "kvDataVersion": {b"kvDataVersionKey": b'{"counter":"x"}'},
        },
    )
    offsets = {
        b"T@bad": b'{"offsetTable":{"0":null}}',
        b"T@g": b'{"offsetTable":{0:7,"1":8}}',
        b"T@odd": b'{"offsetTable":[]}',
        b"T@torn": b'{"offsetTable":{"0":1',
    }
    rocksdb_files.write(config / "consumerOffsets", {"default": offsets})
    (config / "subscriptionGroup.json").write_text('{"subscriptionGroupTable":{"bad":1,"good":{"retryMaxTimes":3}}}')
    found = rmqstore.settings(tmp_path)
    assert set(found.topics) == {"good", "zzz"}
    # Queue ids without quotes are what fastjson 1 wrote.
    assert found.consumer_offsets == {("g", "T"): {0: 7, 1: 8}}
    assert found.subscription_groups == {"good": {"retryMaxTimes": 3}}
    details = " ".join(finding.detail for finding in found.findings)
    assert len(found.findings) == 8
    for name in ("'bad'", "'\\\\xff'", "'list'", "counter", "T@bad", "T@odd", "T@torn"):
        assert name in details, name
    code, out, err = command(tmp_path)
    assert code == 1 and "good" in out and "bad" in err


V2 = {
    v2_offset(1, "G", "T", 0): struct.pack(">q", 10),
    v2_offset(1, "G", "T", 1): struct.pack(">q", 11),
    v2_offset(2, "G", "T", 1): struct.pack(">q", 9),
    v2_name(3, "T"): b"\1" + json.dumps(topic("T")).encode(),
    v2_name(4, "G"): b'\1{"groupName":"G"}',
}


def test_bad_keys_of_v2(tmp_path):
    bad = {
        v2_name(1, "G"): bytes(8),
        v2_name(1, "G") + b"\2": bytes(8),
        v2_offset(1, "G", "T", 3)[:-1]: bytes(8),
        v2_offset(1, "G", "T", 4): bytes(7),
        struct.pack(">bhbh", 1, 1, 2, -1) + b"G": bytes(8),
        struct.pack(">bhbh", 1, 1, 2, 30000) + b"G": bytes(8),
        struct.pack(">bhb", 1, 1, 2): bytes(8),
        v2_name(3, "X") + b"!": b"\1{}",
        v2_name(3, "Y"): b"\2{}",
        v2_name(3, "Z"): b"",
        struct.pack(">bhb", 1, 3, 1) + b"data_version": b"short",
    }
    rocksdb_files.write(tmp_path / "config" / "rdb", {"default": V2 | bad})
    found = rmqstore.settings(tmp_path)
    assert found.consumer_offsets == {("G", "T"): {0: 10, 1: 11}} and found.pull_offsets == {("G", "T"): {1: 9}}
    assert set(found.topics) == {"T"} and set(found.subscription_groups) == {"G"}
    assert len(found.findings) == len(bad)


@example_settings(max_examples=30)
@given(
    entries=st.dictionaries(
        st.binary(max_size=12) | st.binary(max_size=12).map(lambda data: struct.pack(">bhb", 1, 1, 2) + data)
        | st.tuples(st.text(max_size=4), st.text(max_size=4), st.integers(-1, 3)).map(lambda key: v2_offset(1, *key)),
        st.binary(max_size=12) | st.integers(-(2**63), 2**63 - 1).map(lambda number: struct.pack(">q", number)),
        max_size=8,
    )
)  # fmt: skip
def test_any_keys_and_values_of_v2(entries):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        rocksdb_files.write(path / "config" / "rdb", {"default": entries | V2})
        found = rmqstore.settings(path)
        assert found.consumer_offsets[("G", "T")].items() >= {(0, 10), (1, 11)}
        prefix = struct.pack(">bhb", 1, 1, 2)
        of_table = {key: value for key, value in (entries | V2).items() if key.startswith(prefix)}
        read = sum(map(len, found.consumer_offsets.values()))
        assert read + len([each for each in found.findings if "consumer_offsets" in each.detail]) == len(of_table)


@example_settings(max_examples=20)
@given(
    values=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
        st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace"))
        | st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=4,
        ).map(lambda value: json.dumps(value).encode())
        | st.dictionaries(st.integers(-5, 5).map(str), st.integers(), max_size=3).map(
            lambda table: json.dumps({"offsetTable": table}).encode()
        ),
        max_size=6,
    )
)
def test_any_values_of_v1(values):
    entries = {name.encode(): value for name, value in values.items()}
    good = {b"good@G": b'{"offsetTable":{"3":4}}'}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for name in ("topics", "subscriptionGroups", "consumerOffsets"):
            rocksdb_files.write(path / "config" / name, {"default": entries | good})
        found = rmqstore.settings(path)
        assert found.consumer_offsets[("G", "good")] == {3: 4}
        for table, kind in ((found.topics, "topics"), (found.subscription_groups, "subscriptionGroups")):
            bad = [each for each in found.findings if each.path.endswith(kind)]
            assert len(table) + len(bad) == len(entries | good)
        for what in ("topics", "subscriptionGroups", "consumerOffsets"):
            json.dumps(found.config_json(what))


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
NAMES = st.sampled_from(["dataVersion", "topicConfigTable", "subscriptionGroupTable", "forbiddenTable", "offsetTable"])


@given(
    document=st.dictionaries(NAMES, ANY_JSON | st.dictionaries(st.text(max_size=3), ANY_JSON, max_size=3)) | ANY_JSON
)
def test_any_json_files(document):
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config"
        config.mkdir()
        for name in ("topics", "subscriptionGroup", "consumerOffset"):
            (config / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
        found = rmqstore.settings(folder)
        tables = document if isinstance(document, dict) else {}
        table = tables.get("topicConfigTable")
        if isinstance(table, dict):
            good = {name for name, value in table.items() if isinstance(value, dict)}
            # A file whose other tables cannot be is told as a whole.
            assert set(found.topics) == good or found.findings
        json.dumps([found.config_json(what) for what in ("topics", "subscriptionGroups", "consumerOffsets")])


def pop_entry(**changes: object) -> tuple[bytes, bytes]:
    members = {
        "popTime": 1000, "groupId": "G", "topicId": "T", "queueId": 1, "retryFlag": 0, "invisibleTime": 50, "offset": 7,
        "attemptTimes": 0, "attemptId": "", "suspend": False,
    }  # fmt: skip
    key = struct.pack(">q", 1050) + b"G@T@" + struct.pack(">i", 1) + b"@" + struct.pack(">q", 7)
    return key, json.dumps(members | changes).encode()


def test_bad_pop_records(tmp_path):
    key, value = pop_entry()
    entries = {key: value}
    bads = [
        b"{",
        b"[]",
        b"1",
        b"",
        *(pop_entry(**{name: None})[1] for name in ("popTime", "groupId", "offset", "retryFlag")),
    ]
    bads += [pop_entry(queueId=2)[1], pop_entry(topicId="X")[1], pop_entry(popTime=True)[1], pop_entry(popTime=999)[1]]
    for number, bad in enumerate(bads):
        entries[struct.pack(">q", 1050 + number + 1) + key[8:]] = bad
    entries |= {b"": b"{}", b"short": value, key.replace(b"@", b"#"): value}
    rocksdb_files.write(tmp_path / "kvStore", {"popState": entries})
    found = rmqstore.settings(tmp_path)
    (record,) = found.pop_records
    assert (record.visible_time, record.queue_id, record.queue_offset, record.invisible_time) == (1050, 1, 7, 50)
    assert len(found.findings) == len(bads) + 3


@pytest.mark.parametrize(
    "kind",
    [
        "config/topics",
        "config/consumerOffsets",
        "kvStore",
        "config/rdb",
        "config/metadata",
    ],
)
def test_flips_and_truncations_are_no_shorter_answer(kind, store, tmp_path):
    variant = {"config/rdb": "config-v2", "config/metadata": "config-single"}.get(kind)
    source = store if variant is None else rocksdb_files.unpack("variants", tmp_path / "golden", variant)
    root = tmp_path / "store"
    shutil.copytree(source / kind, root / kind)
    folder = root / kind
    whole = rmqstore.settings(root)

    def content(found):
        return (
            found.topics, found.subscription_groups, found.forbidden, found.consumer_offsets, found.pull_offsets,
            found.pop_records,
        )  # fmt: skip

    assert any(content(whole)) and whole.findings == ()
    told = 0
    tables = sorted(folder.glob("*.sst"))
    for table in tables:
        data = table.read_bytes()
        step = max(1, len(data) * len(tables) // 15)
        damaged = [data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :] for at in range(0, len(data), step)]
        damaged += [data[:at] for at in range(0, len(data), step)]
        for text in damaged:
            table.write_bytes(text)
            found = rmqstore.settings(root)
            assert found.findings or content(found) == content(whole)
            told += bool(found.findings)
        table.unlink()
        assert rmqstore.settings(root).findings
        table.write_bytes(data)
    assert told > 5


@pytest.mark.parametrize("kind", ["config/topics", "config/consumerOffsets", "kvStore"])
def test_damage_of_a_manifest_is_no_shorter_answer(kind, store, tmp_path, monkeypatch):
    """RocksDB takes one whose end it cannot read for one that ended before, and shows what there was then."""
    monkeypatch.setattr("rmqstore.rocksdb.database._PAUSE", 0)
    shutil.copytree(store / kind, tmp_path / kind)
    whole = rmqstore.settings(tmp_path)
    assert whole.findings == () and (whole.topics or whole.consumer_offsets or whole.pop_records)
    (manifest,) = (tmp_path / kind).glob("MANIFEST-*")
    data = manifest.read_bytes()
    shorter = 0
    for at in range(0, len(data), max(1, len(data) // 17)):
        for text in (data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :], data[:at]):
            manifest.write_bytes(text)
            found = rmqstore.settings(tmp_path)
            same = (found.topics, found.consumer_offsets, found.pop_records) == (
                whole.topics, whole.consumer_offsets, whole.pop_records,
            )  # fmt: skip
            assert same or {finding.kind for finding in found.findings} <= {"damaged_database", "bad_settings"} != set()
            assert found.findings or same, (at, len(text))
            shorter += not same and any("MANIFEST" in finding.detail for finding in found.findings)
    assert shorter


@pytest.mark.parametrize("kind", ["config/topics", "config/consumerOffsets", "kvStore"])
def test_flips_in_a_log_are_no_shorter_answer(kind, killed, tmp_path):
    shutil.copytree(killed / kind, tmp_path / kind)
    whole = rmqstore.settings(tmp_path)
    assert whole.findings == ()
    log = [path for path in sorted((tmp_path / kind).glob("*.log")) if path.stat().st_size][-1]
    data = log.read_bytes()
    for at in range(3, len(data), max(1, len(data) // 15)):
        for text in (data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :], data[:at]):
            log.write_bytes(text)
            found = rmqstore.settings(tmp_path)
            # A log that was cut between two entries says nothing of those that followed.
            cut_between = len(text) < len(data) and not found.findings
            assert cut_between or {finding.kind for finding in found.findings} == {"damaged_database"}


@pytest.mark.parametrize(
    "kind", ["config/topics", "config/consumerOffsets", "kvStore", "config/rdb", "config/metadata"]
)
def test_a_database_without_its_log_is_told(kind, store, killed, tmp_path, monkeypatch):
    monkeypatch.setattr("rmqstore.rocksdb.database._PAUSE", 0)
    variant = {"config/rdb": "config-v2", "config/metadata": "config-single"}.get(kind)
    source = killed if variant is None else rocksdb_files.unpack("variants", tmp_path / "golden", variant)
    folder = tmp_path / kind
    shutil.copytree(source / kind, folder)
    assert rmqstore.settings(tmp_path).findings == ()
    logs = sorted(folder.glob("*.log"))
    for log in logs[:-1]:
        log.unlink()
    logs[-1].rename(tmp_path / "log")
    for make, text in ((None, "(*.log) is gone"), (logs[-1].mkdir, f"{logs[-1].name} is not a file")):
        if make is not None:
            make()
        before = golden.tree(folder)
        found = rmqstore.settings(tmp_path).findings
        assert {finding.kind for finding in found} == {"damaged_database"} and golden.tree(folder) == before
        assert all(finding.path == str(folder) and text in finding.detail for finding in found)
        assert all("newest entries may be missing" in finding.detail for finding in found)
        code, _, err = command(tmp_path)
        assert code == 1 and "entries may be missing" in err
    # One that is elsewhere, and linked, is a file.
    logs[-1].rmdir()
    logs[-1].symlink_to(tmp_path / "log")
    assert not [finding for finding in rmqstore.settings(tmp_path).findings if "log" in finding.detail]


def test_offsets_show_and_verify_tell_of_a_lost_log(killed, tmp_path, caplog):
    shutil.copytree(killed, tmp_path / "store")
    for log in (tmp_path / "store" / "config" / "consumerOffsets").glob("*.log"):
        log.unlink()
    CliRunner().invoke(main, ["offsets", "show", str(tmp_path / "store")])
    assert "newest entries may be missing" in caplog.text
    found = [finding for finding in verify(tmp_path / "store") if "entries may be missing" in finding.detail]
    assert [os.path.basename(finding.path) for finding in found] == ["consumerOffsets"]


# ------------------------------------------------------------------------------------------------- progress and others


def test_progress_in_rocksdb_is_read_and_never_written(store, tmp_path):
    path = tmp_path / "store"
    shutil.copytree(store, path)
    before = golden.tree(path)
    with MessageStore.open(path, read_only=True) as opened:
        with pytest.raises(ReadOnlyError, match="is in RocksDB"):
            opened.consumer_offsets.commit("G-billing", "Orders", 0, 1)
        own = ConsumerOffsets.load(tmp_path / "mine.json", read_only=False)
        consumer = opened.consume("Orders", "G-billing", timeout=0, offsets=own, consume_from="progress")
        left = [(message.queue_id, message.queue_offset) for message in consumer]
        newest = {queue: opened.max_queue_offset("Orders", queue) for queue in range(4)}
    stands = {0: 314, 1: 314, 2: 314, 3: 313}
    assert sorted(left) == [(queue, at) for queue in range(4) for at in range(stands[queue], newest[queue])]
    assert own.list()[("G-billing", "Orders")] == newest
    assert golden.tree(path) == before
    result = CliRunner().invoke(
        main, ["offsets", "set", str(path), "--group", "G-billing", "--topic", "Orders", "--latest"]
    )
    assert result.exit_code == 3 and "is in RocksDB" in result.stderr
    assert golden.tree(path) == before
    stats = rmqstore.describe(path)
    assert stats.consumer_offsets[("G-pop", "Pops")] == {0: 0} and stats.consumer_offsets_error is None
    with MessageStore.open(path, read_only=True) as opened:
        lags = {(each.group, each.queue_id): each.lag for each in opened.stats().consumers if each.topic == "Orders"}
    assert lags == {("G-billing", queue): newest[queue] - stands[queue] for queue in range(4)}


def test_a_writer_starts_no_second_file_of_progress(tmp_path):
    config = StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=10, max_index_num=100)
    path = tmp_path / "store"
    rocksdb_files.write(path / "config" / "rdb", {"default": V2})
    with MessageStore.open(path, config=config) as writer:
        writer.put_message(rmqstore.Message("T", b"body"), queue_id=0)
        assert writer.consumer_offsets.get("G", "T", 0) == 10
        with pytest.raises(ReadOnlyError, match="is in RocksDB"):
            writer.consume("T", "G", timeout=0)
        writer.flush()
    assert sorted(each.name for each in (path / "config").iterdir()) == ["rdb"]


def test_batch_queues_by_the_topics_in_rocksdb(tmp_path):
    path = tmp_path / "store"
    entries = {v2_name(3, "B"): b"\1" + json.dumps(topic("B", **{"queue.type": "BatchCQ"})).encode()}
    rocksdb_files.write(path / "config" / "rdb", {"default": V2 | entries})
    with MessageStore.open(path, config=StoreConfig(mapped_file_size_commit_log=65536)) as writer:
        assert writer.queues.batch_topics == {"B"}


def test_part_of_the_progress(tmp_path):
    path = golden.unpack("broker", tmp_path)
    file = path / "config" / "consumerOffset.json"
    file.write_text('{"offsetTable":{"Orders@G-billing":{0:5},"Orders@bad":{0:"x"}}}')
    with MessageStore.open(path, read_only=True) as opened:
        progress, problem = opened.consumer_progress()
    assert progress == {("G-billing", "Orders"): {0: 5}} and "Orders@bad" in problem
    assert rmqstore.describe(path).consumer_offsets == progress
    found = [finding for finding in rmqstore.verify(path) if finding.kind == "bad_consumer_offset"]
    assert len(found) == 1 and "Orders@bad" in found[0].detail
    assert rmqstore.settings(path).consumer_offsets == progress


JSON_FILES = ("topics.json", "subscriptionGroup.json", "consumerOffset.json", "delayOffset.json")


def config_findings(path):
    """Findings of verify and settings below config, by file and kind; settings shows no delays and no timers."""
    verified = [(finding.path, finding.kind, finding.detail) for finding in verify(path) if "/config" in finding.path]
    shown = [(finding.path, finding.kind, finding.detail) for finding in rmqstore.settings(path).findings]
    assert shown == [each for each in verified if not re.search("delayOffset|timercheck", each[0])]
    return sorted({(os.path.basename(name), kind) for name, kind, _ in verified})


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Path:
    return golden.unpack("broker", tmp_path_factory.mktemp("broker"))


@pytest.fixture
def config(broker, tmp_path) -> Path:
    shutil.copytree(broker, tmp_path / "store")
    assert config_findings(tmp_path / "store") == []
    return tmp_path / "store" / "config"


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_file_without_a_backup_that_cannot_be_read_is_told(name, config, caplog):
    path, kind = config / name, "bad_consumer_offset" if name == "consumerOffset.json" else "bad_settings"
    (config / f"{name}.bak").unlink(missing_ok=True)
    whole = path.read_bytes()
    for text in (b"", b" \n", bytes(100), b'{"x":', b"[]"):
        path.write_bytes(text)
        assert config_findings(config.parent) == [(name, kind)], text
    path.unlink()
    assert config_findings(config.parent) == []
    path.symlink_to(path)
    assert config_findings(config.parent) == [(name, "file")]
    path.unlink()
    path.symlink_to("nowhere")
    assert config_findings(config.parent) == [(name, kind)]
    path.unlink()
    path.mkdir()
    assert config_findings(config.parent) == [(name, "file")]
    path.rmdir()
    # A backup counts where the file is missing or empty, as a kill leaves it; of a damaged file it may be older.
    (config / f"{name}.bak").write_bytes(whole)
    assert config_findings(config.parent) == []
    path.write_bytes(b"")
    assert config_findings(config.parent) == []
    path.write_bytes(bytes(100))
    assert config_findings(config.parent) == [(name, kind)]
    assert rmqstore.settings(config.parent).topics and rmqstore.settings(config.parent).consumer_offsets


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_file_of_another_kind_is_told(name, config):
    path, kind = config / name, "bad_consumer_offset" if name == "consumerOffset.json" else "bad_settings"
    (config / f"{name}.bak").unlink(missing_ok=True)
    others = [path.read_text() for path in sorted(config.glob("*.json")) if path.name != name]
    others += ['{"filterDataByTopic":{}}', '{"orderInfoCount":0,"table":{}}', '{"dataVersion":{},"timingCount":{}}']
    assert len(others) > 5
    for text in others:
        path.write_text(text)
        assert config_findings(config.parent) == [(name, kind)], text[:60]
    # Empty values of brokers, and values that a later release may add.
    tables = {"topics.json": "topicConfigTable", "subscriptionGroup.json": "subscriptionGroupTable"}
    own = f'"{tables.get(name, "offsetTable")}":{{}}'
    for text in ("{}", f"{{{own}}}", f'{{"dataVersion":{{"counter":1}},{own}}}', f'{{"new":1,{own}}}'):
        path.write_text(text)
        assert config_findings(config.parent) == [], text
    if name != "delayOffset.json":
        for text in ('{"dataVersion":{"counter":0}}', '{"new":{}}'):
            path.write_text(text)
            assert config_findings(config.parent) == [], text


def test_swapped_and_empty_files_are_told_by_the_commands(config, caplog):
    (config / "topics.json").rename(config / "other")
    (config / "subscriptionGroup.json").rename(config / "topics.json")
    (config / "other").rename(config / "subscriptionGroup.json")
    code, _, err = command(config.parent)
    assert code == 1 and "it holds what belongs into subscriptionGroup.json, and nothing of topics.json" in err
    assert "it holds what belongs into topics.json, and nothing of subscriptionGroup.json" in err
    shutil.copyfile(config / "subscriptionGroup.json", config / "consumerOffset.json")
    shown = CliRunner().invoke(main, ["offsets", "show", str(config.parent)])
    assert shown.exit_code == 3 and "what belongs into topics.json" in shown.stderr
    with pytest.raises(CorruptionError, match=r"what belongs into topics\.json"):
        ConsumerOffsets.load(config / "consumerOffset.json", read_only=False)
    (config / "consumerOffset.json").write_bytes(b"")
    (config / "consumerOffset.json.bak").unlink(missing_ok=True)
    shown = CliRunner().invoke(main, ["offsets", "show", str(config.parent)])
    assert shown.exit_code == 1 and "is empty, or a broken symlink, and has no backup" in caplog.text
    code, _, err = command(config.parent)
    assert code == 1 and "is empty, or a broken symlink, and has no backup" in err
    verified = CliRunner().invoke(main, ["verify", str(config.parent)])
    assert verified.exit_code == 1 and "rmqstore settings" in verified.stdout + verified.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_config_folder_that_may_not_be_read_is_told(config):
    config.chmod(0)
    try:
        wanted = [(name, "file") for name in JSON_FILES] + [("timercheck", "bad_timer")]
        assert config_findings(config.parent) == sorted(wanted)
    finally:
        config.chmod(0o755)


def test_a_database_that_may_not_be_looked_into_is_told(tmp_path, monkeypatch):
    folders = [tmp_path / "config" / "topics", tmp_path / "config" / "consumerOffsets", tmp_path / "kvStore"]
    for folder in folders:
        folder.mkdir(parents=True)
    assert rmqstore.settings(tmp_path).findings == ()
    scandir = os.scandir

    def refused(path):
        if str(path) in map(str, folders):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    found = rmqstore.settings(tmp_path).findings
    assert {(finding.path, finding.kind) for finding in found} == {(str(folder), "file") for folder in folders}
    with pytest.raises(CorruptionError, match="consumer_offsets are not known: Permission denied"):
        offsets_in_databases(tmp_path, None)


def test_files_that_may_not_be_read_hide_no_other(store, tmp_path, monkeypatch):
    whole = rmqstore.settings(store)
    allowed = os.access
    for below, kind in (("topics", "topics"), ("kvStore", "pop records"), ("consumerOffsets", "consumer_offsets")):
        monkeypatch.setattr("os.access", lambda name, mode, below=below: f"/{below}/" not in str(name) and allowed(name, mode))
        found = rmqstore.settings(store)
        (finding,) = found.findings
        assert finding.kind == "file" and f"/{below}/" in finding.path
        assert finding.detail == f"{kind} are not known: Permission denied"
        assert found.subscription_groups == whole.subscription_groups
        assert bool(found.topics) == (below != "topics") and bool(found.pop_records) == (below != "kvStore")
        assert bool(found.consumer_offsets) == (below != "consumerOffsets")
        code, out, err = command(store)
        assert code == 1 and "Permission denied" in out + err
        assert finding.path in {each.path for each in verify(store)} or "not_checked" in {each.kind for each in verify(store)}


def test_without_rocksdict(store, tmp_path, monkeypatch):
    path = tmp_path / "store"
    shutil.copytree(store, path)
    # Of this store no queue could be read either.
    config = StoreConfig.infer(path, mapped_file_size_consume_queue=6_000_000, message_delay_level="1s 2s 30m 1h")
    rmqstore.rebuild(path, what=("consumequeue",), config=config)
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(MissingDependencyError, match=r"rmqstore\[rocksdb\]"):
        rmqstore.settings(path)
    code, _, err = command(path)
    assert code == 3 and "rmqstore[rocksdb]" in err
    with MessageStore.open(path, read_only=True) as opened:
        with pytest.raises(MissingDependencyError):
            _ = opened.consumer_offsets
        progress, problem = opened.consumer_progress()
        assert progress == {} and "rmqstore[rocksdb]" in problem
        own = ConsumerOffsets(path / "absent.json", read_only=False)
        with pytest.raises(StoreError, match="is unknown"):
            opened.consume("Orders", "G-billing", timeout=0, offsets=own, consume_from="progress")


def test_a_database_of_offsets_that_cannot_be_opened(store, tmp_path):
    path = tmp_path / "store"
    shutil.copytree(store, path)
    next((path / "config" / "consumerOffsets").glob("MANIFEST-*")).unlink()
    with MessageStore.open(path, read_only=True) as opened:
        with pytest.raises(CorruptionError, match="consumer_offsets are not known"):
            _ = opened.consumer_offsets
        assert opened.consumer_progress()[0] == {}


# -------------------------------------------------------------------------------------------------------- the command


def test_the_command(store, tmp_path):
    code, out, err = command(store)
    assert code == 0 and not err
    for text in ("topics\n", "subscription groups\n", "consumer offsets\n", "pop records", "sources\n"):
        assert text in out
    assert command(tmp_path)[0] == 3
    (tmp_path / "config").mkdir()
    assert command(tmp_path)[0] == 1


def test_the_shapes_of_rocketmqs_tools(store):
    _, out, _ = command(store, "--what", "topics", "--json")
    topics = json.loads(out)
    assert list(topics) == ["dataVersion", "topicConfigTable"] and topics["dataVersion"]["counter"] == 6
    assert topics["topicConfigTable"]["Batches"] == {
        "attributes": {}, "order": False, "perm": 6, "readQueueNums": 2, "topicFilterType": "SINGLE_TAG",
        "topicName": "Batches", "topicSysFlag": 0, "writeQueueNums": 2,
    }  # fmt: skip
    _, out, _ = command(store, "--what", "consumerOffsets", "--json")
    assert json.loads(out) == {
        "offsetTable": {"Orders@G-billing": {"0": 314, "1": 314, "2": 314, "3": 313}, "Pops@G-pop": {"0": 0}}
    }
    _, out, _ = command(store, "--json")
    types = [json.loads(line)["type"] for line in out.splitlines()]
    assert types == ["topics", "subscriptionGroups", "consumerOffsets", *["pop_record"] * 3, *["source"] * 4]
