"""Tests of rmqstore.config: defaults, broker.conf, and the geometry that a store's files tell."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shutil
import struct
import time
from pathlib import Path

import golden
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rmqstore.config.store_config
from rmqstore._core import index_key_hash
from rmqstore.config import StoreConfig, infer, parse_java_properties, system_clock
from rmqstore.errors import GeometryError, StoreNotFoundError

# ------------------------------------------------------------------------------------------------ fields and checks


def test_defaults_are_those_of_rocketmq():
    config = StoreConfig()
    assert config.index_file_size == 420_000_040
    assert config.consume_queue_file_size == 6_000_000 and config.batch_consume_queue_file_size == 300_000 * 46
    assert len(config.delay_levels) == 18
    assert config.delay_levels[:3] == (1000, 5000, 10000) and config.delay_levels[-1] == 7_200_000
    assert (config.index_tags, config.store_host, config.assumed, config.unknown) == (True, "127.0.0.1:10911", (), {})
    assert abs(config.clock() - time.time() * 1000) < 5000 and config.clock is system_clock


def test_rounding_to_whole_units():
    config = StoreConfig(mapped_file_size_consume_queue=201, mapper_file_size_batch_consume_queue=47)
    assert (config.consume_queue_file_size, config.batch_consume_queue_file_size) == (220, 92)


def test_config_is_frozen_pickled_and_replaced():
    config = StoreConfig(max_hash_slot_num=10, assumed=("max_index_num", "index_tags"), unknown={"a": "b"})
    with pytest.raises(AttributeError):
        config.max_hash_slot_num = 11
    assert pickle.loads(pickle.dumps(config)) == config and hash(config) == hash(config.replace())
    changed = config.replace(max_index_num=20)
    assert (changed.max_index_num, changed.max_hash_slot_num, changed.assumed) == (20, 10, ("index_tags",))
    with pytest.raises(TypeError):
        StoreConfig(5)
    with pytest.raises(TypeError):
        StoreConfig(max_hash_slots=5)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mapped_file_size_commit_log": 0}, ValueError, "mapped_file_size_commit_log"),
        ({"mapped_file_size_commit_log": 2**31}, ValueError, "2147483647"),
        ({"mapped_file_size_consume_queue": -20}, ValueError, "mapped_file_size_consume_queue"),
        ({"mapped_file_size_consume_queue": 2**31 - 1}, GeometryError, "32 bits"),
        ({"max_hash_slot_num": 0}, ValueError, "max_hash_slot_num"),
        ({"max_index_num": 1}, ValueError, "max_index_num"),
        ({"max_index_num": 107_000_000}, GeometryError, "32 bits"),
        ({"max_index_num": "20"}, ValueError, "give an int"),
        ({"max_index_num": True}, ValueError, "give an int"),
        ({"index_tags": 1}, ValueError, "give a bool"),
        ({"flush_disk_type": "FAST"}, ValueError, "ASYNC_FLUSH"),
        ({"message_delay_level": "1s 5x"}, ValueError, "5x"),
        ({"message_delay_level": "s"}, ValueError, "message_delay_level"),
        ({"delete_when": "25"}, ValueError, "delete_when"),
        ({"disk_max_used_space_ratio": 101}, ValueError, "0 to 100"),
        ({"max_mapped_files": 0}, ValueError, "max_mapped_files"),
        ({"store_host": "localhost"}, ValueError, "host"),
        ({"clock": 5}, ValueError, "clock"),
    ],
)
def test_bad_values(options, error, match):
    with pytest.raises(error, match=match):
        StoreConfig(**options)


def test_delay_units():
    assert StoreConfig(message_delay_level="1s 2m 3h 4d").delay_levels == (1000, 120_000, 10_800_000, 345_600_000)
    assert StoreConfig(message_delay_level="").delay_levels == ()


# -------------------------------------------------------------------------------------------------------- broker.conf


def test_from_properties(tmp_path):
    path = tmp_path / "broker.conf"
    path.write_text(
        "# a comment\n! another\n\nbrokerName = broker-a\n"
        "mapedFileSizeCommitLog=1048576\nmappedFileSizeConsumeQueue: 6000\nmaxHashSlotNum 1000\n"
        "maxIndexNum=\\\n   8000\nenabledAppendPropCRC=TRUE\ncleanFileForciblyEnable=false\nflushDiskType=SYNC_FLUSH\n"
        "messageDelayLevel=1s 2s \\\n  30m 1h\nmapperFileSizeBatchConsumeQueue=460\nenableLmq=true\n"
        "brokerIP1=10.0.0.7\nlistenPort=10921\nnote=\\u8ba2\\u5355\\ud83d\\ude00\n",
        encoding="ascii",
    )
    config = StoreConfig.from_properties(path, max_mapped_files=7)
    assert config.mapped_file_size_commit_log == 1048576 and config.mapped_file_size_consume_queue == 6000
    assert (config.max_hash_slot_num, config.max_index_num) == (1000, 8000)
    assert config.enabled_append_prop_crc and not config.clean_file_forcibly_enable and config.enable_lmq
    assert config.flush_disk_type == "SYNC_FLUSH" and config.delay_levels == (1000, 2000, 1_800_000, 3_600_000)
    assert config.mapper_file_size_batch_consume_queue == 460 and config.store_host == "10.0.0.7:10921"
    assert config.unknown == {"brokerName": "broker-a", "note": "订单😀"} and config.max_mapped_files == 7
    assert StoreConfig.from_properties({"maxIndexNum": 30, "listenPort": "1"}).store_host == "127.0.0.1:1"
    assert StoreConfig.from_properties({"brokerIP1": "2001:db8::1"}).store_host == "[2001:db8::1]:10911"


def test_every_option_is_used():
    sources = [
        path.read_text(encoding="utf-8")
        for path in Path(rmqstore.__file__).parent.rglob("*.py*")
        if path.suffix in (".py", ".pyx") and path.name != "store_config.py"
    ]
    own = Path(rmqstore.config.store_config.__file__).read_text(encoding="utf-8")
    for item in dataclasses.fields(StoreConfig):
        # One that only a property of the class reads is used there as `self.…`.
        used = re.compile(rf"\b{item.name}\b")
        assert any(map(used.search, sources)) or f"self.{item.name}" in own, f"nothing reads {item.name}"


def test_every_option_has_rocketmqs_name():
    from rmqstore.config import fields_by_option

    for name in ("mappedFileSizeConsumeQueueExt", "maxMsgsNumBatch", "flushCommitLogThoroughInterval", "forceVerifyPropCRC",
                 "enableMultiDispatch", "diskMaxUsedSpaceRatio", "autoMessageVersionOnTopicLen",
                 "fileReservedTime"):  # fmt: skip
        assert name in fields_by_option(StoreConfig)
    for name in ("indexTags", "storeHost", "clock", "assumed", "unknown", "maxMappedFiles"):
        assert name not in fields_by_option(StoreConfig)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("maxIndexNum=many", "line 3: option maxIndexNum is 'many'"),
        ("enableLmq=yes", "line 3: option enableLmq is 'yes'"),
        ("mappedFileSizeCommitLog=5", "line 3: option mappedFileSizeCommitLog: mapped_file_size_commit_log is 5"),
        ("brokerIP1=somewhere", "line 3: option brokerIP1"),
        ("messageDelayLevel=soon", "line 3: option messageDelayLevel"),
        ("x=\\u12", "line 3"),
    ],
)
def test_bad_lines_are_named(line, match, tmp_path):
    path = tmp_path / "broker.conf"
    path.write_text(f"# one\nbrokerName=b\n{line}\n")
    with pytest.raises(ValueError, match=match) as caught:
        StoreConfig.from_properties(path)
    assert str(path) in str(caught.value)


def test_missing_properties_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        StoreConfig.from_properties(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a=b", [("a", "b", 1)]),
        ("a : b\r\nc\td", [("a", "b", 1), ("c", "d", 2)]),
        ("a", [("a", "", 1)]),
        ("a\\=b\\:c\\ d = e=f ", [("a=b:c d", "e=f ", 1)]),
        ("a=1,\\\n  2\nb=3", [("a", "1,2", 1), ("b", "3", 3)]),
        ("a=x\\\\\nb=3", [("a", "x\\", 1), ("b", "3", 2)]),
        ("a=\\t\\n\\q\\", [("a", "\t\nq", 1)]),
        ("a=\\\n#b", [("a", "#b", 1)]),
        ("  # c\n ! d\n", []),
        ("= x", [("", "x", 1)]),
    ],
)
def test_java_properties(text, items):
    assert list(parse_java_properties(text)) == items


@given(st.text(alphabet=st.sampled_from("ab=: \\u0\n#"), max_size=20))
def test_any_properties_text_fails_cleanly(text):
    try:
        list(parse_java_properties(text))
    except ValueError as error:
        assert "line" in str(error)


# -------------------------------------------------------------------------------------------------------------- infer


@pytest.mark.parametrize("name", golden.STORES)
def test_infer_golden_stores(name, golden_store):
    root = golden_store(name)
    before = golden.tree(root)
    config = StoreConfig.infer(root)
    expected = golden.geometry(name)
    assert "message_delay_level" in config.assumed
    for option, value in expected.items():
        if option not in config.assumed:
            assert getattr(config, option) == value, option
    unknown = {"message_delay_level", "mapped_file_size_consume_queue_ext", "mapper_file_size_batch_consume_queue"}
    assert set(config.assumed) <= unknown
    hosts = dict.fromkeys(golden.BROKER_STORES, "127.0.0.1:20876")
    hosts |= dict.fromkeys(golden.VERSION_STORES, "127.0.0.1:20911")
    assert config.store_host == hosts.get(name, "10.0.0.1:10911")
    assert golden.tree(root) == before


def test_infer_takes_what_is_given(golden_store):
    config = StoreConfig.infer(golden_store("broker"), message_delay_level="1s 2s 30m 1h", index_tags=False,
                               store_host="1.2.3.4:5")  # fmt: skip
    assert (config.delay_levels[-1], config.index_tags, config.store_host) == (3_600_000, False, "1.2.3.4:5")
    assert not {"message_delay_level", "index_tags"} & set(config.assumed)
    with pytest.raises(TypeError, match="no_such"):
        StoreConfig.infer(golden_store("broker"), no_such=1)


@pytest.fixture
def store(golden_store, tmp_path):
    """A copy of the golden store `base` to damage."""
    return shutil.copytree(golden_store("base"), tmp_path / "store")


def test_infer_missing_and_empty_stores(tmp_path):
    with pytest.raises(StoreNotFoundError, match="no store directory"):
        StoreConfig.infer(tmp_path / "none")
    with pytest.raises(StoreNotFoundError, match="no store in this directory"):
        StoreConfig.infer(tmp_path)
    (tmp_path / "config").mkdir()
    with pytest.raises(GeometryError, match="mapped_file_size_commit_log"):
        StoreConfig.infer(tmp_path)
    config = StoreConfig.infer(tmp_path, mapped_file_size_commit_log=4096)
    assert config.mapped_file_size_commit_log == 4096
    assert set(config.assumed) == {
        "mapped_file_size_consume_queue", "mapper_file_size_batch_consume_queue", "mapped_file_size_consume_queue_ext",
        "max_hash_slot_num", "max_index_num", "index_tags", "message_delay_level",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "option"),
    [
        ("commitlog/00000000000000004096", "mapped_file_size_commit_log"),
        ("consumequeue/TopicTest/0/00000000000000000200", "mapped_file_size_consume_queue"),
        ("index/20261121012643070", "max_hash_slot_num"),
    ],
)
@pytest.mark.parametrize("size", [0, 100])
def test_infer_takes_the_length_of_most_files(store, file, option, size):
    wanted = getattr(StoreConfig.infer(store), option)
    os.truncate(store / file, size)
    config = StoreConfig.infer(store)
    assert getattr(config, option) == wanted and option not in config.assumed


def test_infer_with_units_cut(store):
    for path in (store / "consumequeue").rglob("0*"):
        if path.is_file():
            os.truncate(path, 190)
    with pytest.raises(GeometryError, match="whole units of 20"):
        StoreConfig.infer(store)
    assert StoreConfig.infer(store, mapped_file_size_consume_queue=190).consume_queue_file_size == 200


def test_infer_ignores_stray_files(store):
    (store / "commitlog" / "notes.txt").write_text("x")
    (store / "commitlog" / ("0" * 19 + "9.bak")).write_text("x")
    (store / "index" / "stray").mkdir()
    assert StoreConfig.infer(store).mapped_file_size_commit_log == 4096


def test_infer_without_index_and_queues(store):
    shutil.rmtree(store / "index")
    shutil.rmtree(store / "consumequeue")
    assert {"max_hash_slot_num", "max_index_num", "index_tags", "mapped_file_size_consume_queue"} <= set(
        StoreConfig.infer(store).assumed
    )


def test_empty_index_of_odd_size_is_not_guessed(store):
    for path in (store / "index").iterdir():
        path.write_bytes(bytes(480))
    with pytest.raises(GeometryError, match="max_hash_slot_num"):
        StoreConfig.infer(store)
    config = StoreConfig.infer(store, max_hash_slot_num=10)
    assert config.max_index_num == 20 and "max_index_num" not in config.assumed and "index_tags" in config.assumed
    assert StoreConfig.infer(store, max_index_num=20).max_hash_slot_num == 10
    for wrong in ({"max_hash_slot_num": 11}, {"max_index_num": 22}):
        with pytest.raises(GeometryError, match="does not fit"):
            StoreConfig.infer(store, **wrong)


def test_index_size_that_no_geometry_has(store):
    for path in (store / "index").iterdir():
        os.truncate(path, 479)
    with pytest.raises(GeometryError, match="no number of slots"):
        StoreConfig.infer(store)


# Steps of seven bits meet every byte, each at another of its bits than the byte before.
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_one_bit_flipped_never_gives_a_wrong_geometry(store, stride):
    files = sorted((store / "index").iterdir())
    rest = {path: path.read_bytes() for path in files}
    for path in files[1:]:
        path.unlink()
    data = rest[files[0]]
    told = 0
    for bit in range(0, len(data) * 8, stride):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        files[0].write_bytes(flipped)
        try:
            config = StoreConfig.infer(store, mapped_file_size_consume_queue=200, enable_consume_queue_ext=False)
        except GeometryError:
            continue
        assert (config.max_hash_slot_num, config.max_index_num) == (10, 20), bit
        told += 1
    assert told > 500 // stride


# An index written here, from the format alone.


def write_index(path, slots, entries, keys, *, phy_step=100, first_phy=0, legacy_count=False, sparse=True, torn=None):
    """Put (topic, key) pairs as Java does: entry, slot, header; `torn` keeps the header from counting the last put."""
    hashes = np.array([index_key_hash(topic, key) for topic, key in keys], dtype=np.int64)
    count = len(keys)
    numbers = np.arange(1, count + 1)
    places = hashes % slots
    order = np.argsort(places, kind="stable")
    previous = np.zeros(count, dtype=np.int64)
    same = places[order][1:] == places[order][:-1]
    previous[order[1:][same]] = numbers[order[:-1][same]]
    table = np.zeros(slots, dtype=">i4")
    table[places] = numbers
    data = np.zeros(count, dtype=[("h", ">i4"), ("p", ">i8"), ("d", ">i4"), ("n", ">i4")])
    data["h"], data["p"], data["n"] = hashes, first_phy + phy_step * np.arange(count), previous
    data["d"] = np.arange(count) // 10
    counted = count if torn is None else count - 1
    end_phy = int(data["p"][counted - 1]) if counted else 0
    used = len(set(places[:counted].tolist()))
    slot_count = counted if legacy_count else used
    with open(path, "wb") as file:
        file.truncate(40 + 4 * slots + 20 * entries)
        file.write(struct.pack(">qqqqii", 1700000000000, 1700000009000, first_phy, end_phy, slot_count, counted + 1))
        file.write(table.tobytes())
        file.seek(40 + 4 * slots + 20)
        file.write(data.tobytes())
        if not sparse:
            file.write(bytes(40 + 4 * slots + 20 * entries - file.tell()))
    return path


def infer_index(root):
    config = StoreConfig.infer(root, mapped_file_size_commit_log=4096)
    return config.max_hash_slot_num, config.max_index_num, config.assumed


@given(data=st.data())
def test_any_split_is_found(data, tmp_path_factory):
    slots = data.draw(st.integers(1, 60))
    entries = data.draw(st.integers(2, 60))
    count = data.draw(st.integers(1, entries - 1))
    keys = [("T", data.draw(st.text(alphabet="abcAB#", min_size=1, max_size=4))) for _ in range(count)]
    root = tmp_path_factory.mktemp("store")
    (root / "index").mkdir()
    options = {"phy_step": data.draw(st.sampled_from([0, 1, 100])), "first_phy": data.draw(st.sampled_from([0, 7])),
               "legacy_count": data.draw(st.booleans())}  # fmt: skip
    write_index(root / "index" / "20261121012643046", slots, entries, keys, **options)
    try:
        found = infer_index(root)
    except GeometryError as error:
        # Refusing is right only when nothing tells where an entry lies: all of them at offset 0.
        assert "give max_hash_slot_num" in str(error)
        assert options["first_phy"] == 0 and (options["phy_step"] == 0 or count == 1)
    else:
        assert found[:2] == (slots, entries)


def test_put_that_was_cut_off(tmp_path):
    (tmp_path / "index").mkdir()
    keys = [("T", f"k{i}") for i in range(50)]
    write_index(tmp_path / "index" / "1", 37, 90, keys, first_phy=9, torn=True)
    assert infer_index(tmp_path)[:2] == (37, 90)


def test_two_geometries_are_refused(tmp_path):
    (tmp_path / "index").mkdir()
    keys = [("T", f"k{i}") for i in range(20)]
    write_index(tmp_path / "index" / "1", 40, 92, keys, first_phy=9)
    write_index(tmp_path / "index" / "2", 50, 90, keys, first_phy=9)
    with pytest.raises(GeometryError, match="disagree") as caught:
        infer_index(tmp_path)
    assert caught.value.path is not None


def test_default_size_is_taken_for_an_empty_index_but_listed(tmp_path):
    (tmp_path / "index").mkdir()
    with open(tmp_path / "index" / "1", "wb") as file:
        file.truncate(420_000_040)
    slots, entries, assumed = infer_index(tmp_path)
    assert (slots, entries) == (5_000_000, 20_000_000) and {"max_hash_slot_num", "max_index_num"} <= set(assumed)


@pytest.mark.parametrize("slots", [5_000_000, 5_000_005, 4_000_000])
def test_a_part_of_a_large_index_is_read(tmp_path, monkeypatch, slots):
    (tmp_path / "index").mkdir()
    entries = (105_000_000 - slots) // 5
    keys = [("Orders", f"A-{i}") for i in range(300_000)]
    write_index(tmp_path / "index" / "1", slots, entries, keys, first_phy=9)
    sizes, read = [], infer.read_at
    monkeypatch.setattr(infer, "read_at", lambda descriptor, size, pos: sizes.append(size) or read(descriptor, size, pos))
    assert infer_index(tmp_path)[:2] == (slots, entries)
    # The slot table and as much of the entries, of a file of 420 MB.
    assert sum(sizes) < 2 * 4 * slots + (1 << 20), sizes


def test_index_tags_without_evidence(golden_store, tmp_path):
    store = shutil.copytree(golden_store("broker"), tmp_path / "store")
    for path in (store / "commitlog").iterdir():
        path.write_bytes(bytes(1048576))
    config = StoreConfig.infer(store)
    assert config.index_tags and "index_tags" in config.assumed and config.store_host == "127.0.0.1:10911"


def test_hostile_first_records(golden_store, tmp_path):
    store = shutil.copytree(golden_store("base"), tmp_path / "store")
    path = store / "commitlog" / ("0" * 20)
    data = path.read_bytes()
    topic_length = 88 + int.from_bytes(data[84:88], "big")
    for pos in range(200):
        for turn, value in enumerate((0, 0x7F, 0xFF)):
            # Numbers of several bytes meet every value by taking turns; the length of the topic has one byte.
            if pos % 3 == turn or pos == topic_length:
                path.write_bytes(data[:pos] + bytes([value]) + data[pos + 1 :])
                config = StoreConfig.infer(store)
                assert config.mapped_file_size_commit_log == 4096
