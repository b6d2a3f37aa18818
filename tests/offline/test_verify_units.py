"""verify of queues: what the extension says, and units of batch queues that no batch needs or whose file is gone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rmqstore import Message, MessageStore, StoreConfig, rebuild, verify

NOW = 1_700_000_000_000
UNIT, ENTRY = 46, 20
CONFIG = StoreConfig(
    mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=400,
    mapper_file_size_batch_consume_queue=3 * UNIT, max_hash_slot_num=20, max_index_num=200, clock=lambda: NOW,
)  # fmt: skip
EXTENDED = CONFIG.replace(enable_consume_queue_ext=True, mapped_file_size_consume_queue_ext=100)
BATCHES = 8


@pytest.fixture
def batches(tmp_path) -> Path:
    """Batches of two messages, three in each file of the queue, the last of three files with two."""
    with MessageStore.open(tmp_path / "s", config=CONFIG) as store:
        for number in range(BATCHES):
            inner = {"KEYS": f"k{number}", "INNER_NUM": "2"}
            store.put_message(Message("Inner", b"%d" % number, sys_flag=0xC0, properties=inner))
            store.put_message(Message("Other", b"%d" % number))
    assert list(verify(tmp_path / "s", CONFIG)) == []
    return tmp_path / "s"


def queue_file(root: Path, number: int) -> Path:
    return root / "batchconsumequeue" / "Inner" / "0" / f"{number * 3 * UNIT:020}"


def read(root: Path) -> list[int]:
    """Queue offsets of the batches as a reader gets them who follows `next_queue_offset` from 0 on."""
    found, at = [], 0
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        while at < store.max_queue_offset("Inner", 0):
            got = store.get_message("Inner", 0, at, 32)
            found += [message.queue_offset for message in got.messages]
            assert got.next_queue_offset > at
            at = got.next_queue_offset
    return found


@pytest.mark.parametrize("source", range(BATCHES))
def test_a_batch_unit_that_stands_behind_the_end_once_more_is_found(batches, source):
    path = queue_file(batches, source // 3)
    unit = path.read_bytes()[source % 3 * UNIT :][:UNIT]
    with open(queue_file(batches, 2), "r+b") as file:
        file.seek(2 * UNIT)
        file.write(unit)
    found = [each for each in verify(batches, CONFIG) if each.kind == "dangling_unit"]
    assert [(each.path, each.pos) for each in found] == [(str(queue_file(batches, 2)), 2 * UNIT)]
    assert "that another unit leads to" in found[0].detail


def test_a_batch_unit_that_leads_to_a_message_of_another_queue_is_found(batches):
    with MessageStore.open(batches, config=CONFIG, read_only=True) as store:
        other = store.get_message("Other", 0, 3, 1).messages[0]
    unit = other.phy_offset.to_bytes(8, "big") + other.size.to_bytes(4, "big") + bytes(8) + NOW.to_bytes(8, "big")
    with open(queue_file(batches, 2), "r+b") as file:
        file.seek(2 * UNIT)
        file.write((unit + (2 * BATCHES).to_bytes(8, "big") + (1).to_bytes(2, "big")).ljust(UNIT, b"\0"))
    (found,) = verify(batches, CONFIG)
    assert found.kind == "dangling_unit" and "where no record of Inner/0 lies" in found.detail


@pytest.mark.parametrize("length", [None, 0, 100])
@pytest.mark.parametrize("number", [0, 1])
def test_the_rest_of_a_batch_queue_is_read_where_a_file_is_lost(batches, caplog, number, length):
    if length is None:
        queue_file(batches, number).unlink()
    else:
        os.truncate(queue_file(batches, number), length)
    # Of 100 bytes two units are left.
    lost = range(6 * number + (4 if length == 100 else 0), 6 * number + 6)
    wanted = [offset for offset in range(0, 2 * BATCHES, 2) if offset not in lost]
    assert read(batches) == wanted
    with MessageStore.open(batches, config=CONFIG, read_only=True) as store:
        for offset in range(2 * BATCHES):
            got = store.get_message("Inner", 0, offset, 1)
            assert [message.queue_offset for message in got.messages] == [offset // 2 * 2] * (offset not in lost)
        assert store.offset_by_time("Inner", 0, NOW) == wanted[0]
        assert store.offset_by_time("Inner", 0, NOW, boundary="upper") == wanted[-1]
        assert store.offset_by_time("Inner", 0, NOW + 1) == 2 * BATCHES
    found = list(verify(batches, CONFIG))
    assert any(each.kind == "missing_unit" and "Inner/0" in each.detail for each in found)


def extended(root: Path) -> None:
    with MessageStore.open(root, config=EXTENDED) as store:
        for number in range(9):
            store.put_message(Message("T", b"%d" % number, tags=("TagA", "TagB", None)[number % 3]))


def test_every_flipped_bit_of_an_extension_is_found(request, tmp_path):
    extended(tmp_path)
    assert list(verify(tmp_path, EXTENDED)) == []
    silent = []
    for path in sorted((tmp_path / "consumequeue_ext" / "T" / "0").iterdir()):
        data = path.read_bytes()
        # A file holds four entries of 20 bytes, and ends with a mark.
        for at in range(ENTRY if path.name.endswith("200") else 4 * ENTRY):
            for bit in range(8) if request.config.getoption("--slow") else (at % 8, (at + 3) % 8):
                changed = bytearray(data)
                changed[at] ^= 1 << bit
                path.write_bytes(changed)
                if not list(verify(tmp_path, EXTENDED)):
                    silent.append((path.name, at, bit))
        path.write_bytes(data)
    assert silent == []


def test_the_finding_says_what_the_extension_says(tmp_path):
    extended(tmp_path)
    path = tmp_path / "consumequeue_ext" / "T" / "0" / f"{100:020}"
    with open(path, "r+b") as file:
        file.seek(ENTRY + 9)
        file.write(b"\1")
    (found,) = verify(tmp_path, EXTENDED)
    assert (found.kind, found.pos) == ("bad_unit", 100)
    assert "unit 5 is " in found.detail and "tags code 1 " in found.detail and "at 120 of the extension" in found.detail


@pytest.mark.parametrize("source", [0, 3])
def test_an_address_that_another_unit_has_is_torn(tmp_path, source):
    extended(tmp_path)
    path = tmp_path / "consumequeue" / "T" / "0" / ("0" * 20)
    with open(path, "r+b") as file:
        file.seek(source * 20 + 12)
        address = file.read(8)
        file.seek(7 * 20 + 12)
        # Return the remains of a unit after a kill during its cut, word by word from the end, or after a power loss.
        file.write(address)
        file.seek(8 * 20)
        file.write(bytes(20))
    (tmp_path / "abort").touch()
    with MessageStore.open(tmp_path, config=EXTENDED) as store:
        for first, tag in enumerate(("TagA", "TagB")):
            got = store.get_message("T", 0, 0, 32, tag).messages
            assert [message.queue_offset for message in got] == [first, first + 3, first + 6]
    assert list(verify(tmp_path, EXTENDED)) == []


def test_a_newest_extension_file_without_bytes_stops_no_writer(tmp_path):
    extended(tmp_path)
    # The file that a process made which died before it gave it its size, or that lost what it held.
    newest = max((tmp_path / "consumequeue_ext" / "T" / "0").iterdir())
    os.truncate(newest, 0)
    (tmp_path / "abort").touch()
    with MessageStore.open(tmp_path, config=EXTENDED) as store:
        for first, tag in enumerate(("TagA", "TagB")):
            got = store.get_message("T", 0, 0, 32, tag).messages
            assert [message.queue_offset for message in got] == [first, first + 3, first + 6]
        store.put_message(Message("T", b"9", tags="TagA"))
    assert list(verify(tmp_path, EXTENDED)) == []


def test_a_light_queue_whose_oldest_file_is_lost_is_found(tmp_path):
    config = CONFIG.replace(enable_lmq=True, enable_multi_dispatch=True, mapped_file_size_consume_queue=60)
    with MessageStore.open(tmp_path, config=config) as store:
        for number in range(4):
            store.put_message(Message("T", b"%d" % number, properties={"INNER_MULTI_DISPATCH": "%LMQ%a"}))
    (tmp_path / "consumequeue" / "%LMQ%a" / "0" / f"{0:020}").unlink()
    found = list(verify(tmp_path, config))
    # A rebuild brings them back.
    assert [each.kind for each in found] == ["missing_unit"] * 2
    assert "%LMQ%a/0 has no unit 0" in found[0].detail and "%LMQ%a/0 lacks 3 units in all" in found[1].detail


@pytest.mark.parametrize("lost", ["consumequeue", os.path.join("consumequeue", "%LMQ%a")])
@pytest.mark.parametrize("two_files", [False, True])
def test_lost_light_queues_are_found_and_made_again(tmp_path, lost, two_files):
    # If no queue has them, the file of progress does.
    root = tmp_path / "store"
    with MessageStore.open(root, config=CONFIG.replace(enable_lmq=True, enable_multi_dispatch=True)) as store:
        for number in range(4):
            store.put_message(Message("T", b"%d" % number, keys=["k"], properties={"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b"}))
        store.consumer_offsets.commit("G", "T", 0, 1)
    if two_files:
        (root / "config" / "consumerOffset.json").write_text("{}")

    def queues():
        return {path: path.read_bytes() for path in (root / "consumequeue").glob("*/*/*")}

    before = queues()
    given = {"mapped_file_size_consume_queue": CONFIG.mapped_file_size_consume_queue, "message_delay_level": "1s"}
    assert list(verify(root, StoreConfig.infer(root, **given))) == []
    shutil.rmtree(root / lost)
    found = list(verify(root, StoreConfig.infer(root, **given)))
    assert {each.kind for each in found} == {"missing_unit"} and any("%LMQ%a" in each.detail for each in found)
    rebuild(root, what=("consumequeue",), config=StoreConfig.infer(root, **given))
    assert queues() == before
    assert list(verify(root, StoreConfig.infer(root, **given))) == []


def test_a_stray_unit_behind_the_end_hides_no_message(tmp_path):
    config = CONFIG.replace(mapped_file_size_commit_log=1024)
    with MessageStore.open(tmp_path, config=config) as store:
        puts = [store.put_message(Message("T", bytes(500))) for _ in range(4)]
    # Retention took what the first three units lead to.
    for number in range(3):
        (tmp_path / "commitlog" / f"{number * 1024:020}").unlink()
    path = tmp_path / "consumequeue" / "T" / "0" / ("0" * 20)
    with open(path, "r+b") as file:
        file.seek(4 * 20 + 8)
        file.write(b"\0\0\7\7")
    with MessageStore.open(tmp_path, config=config, read_only=True) as store:
        assert store.min_queue_offset("T", 0) == 3
        assert [message.phy_offset for message in store.get_message("T", 0, 3, 32).messages] == [puts[3].phy_offset]
    (found,) = verify(tmp_path, config)
    assert (found.kind, found.path, found.pos) == ("dangling_unit", str(path), 80)


@pytest.mark.parametrize("source", range(4))
def test_a_unit_of_a_light_queue_that_stands_behind_the_end_once_more_is_found(tmp_path, source):
    config = CONFIG.replace(enable_lmq=True, enable_multi_dispatch=True)
    with MessageStore.open(tmp_path, config=config) as store:
        for number in range(4):
            names = ("%LMQ%a", "%LMQ%b,%LMQ%a")[number % 2]
            store.put_message(Message("T", b"%d" % number, properties={"INNER_MULTI_DISPATCH": names}))
    assert list(verify(tmp_path, config)) == []
    path = tmp_path / "consumequeue" / "%LMQ%a" / "0" / ("0" * 20)
    unit = path.read_bytes()[source * 20 :][:20]
    with open(path, "r+b") as file:
        file.seek(80)
        file.write(unit)
    for asked in (config, CONFIG):
        (found,) = verify(tmp_path, asked)
        assert (found.kind, found.path, found.pos) == ("dangling_unit", str(path), 80)
