"""The console over a store whose index and settings are in RocksDB: every page of a key, health, consumers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import rocksdb_files

pytest.importorskip("rocksdict")
pytest.importorskip("starlette")

from rmqstore import MessageStore
from rmqstore.console.overview_answers import OverviewAnswers
from rmqstore.offline.describe import consumer_columns, consumer_places, rows_of
from rmqstore.selection import Selection
from rmqstore.store.pages import key_page

ASKED = {"first": 0, "max_num": 10, "sort": "topic", "topic": ""}


def pages(store: MessageStore, topic: str, key: str, kind: str | None, size: int, **span: int) -> list[int]:
    cursor, found = None, []
    while True:
        page = key_page(
            store,
            Selection((topic,), keys=(key,), index_type=kind, max_num=size, **span),
            cursor,
            lambda each: {"phy": each.phy_offset},
        )
        assert len(page.rows) <= size and page.uncovered == ()
        found += [row["phy"] for row in page.rows]
        if page.following is None:
            return found
        cursor = page.following


@pytest.mark.parametrize("name", ["store", "store.killed"])
def test_pages_of_a_key(name, tmp_path):
    path = rocksdb_files.unpack(name, tmp_path)
    with MessageStore.open(path, read_only=True) as store:
        for topic, key, kind in (
            ("Orders", "CUST-7", None),
            ("Orders", "paid", "T"),
            ("Orders", "user", "K"),
            ("Orders", "a@K@b", None),
            ("Orders", "nothing", None),
        ):
            needed = [message.phy_offset for message in store.query_message(topic, key, 10000, index_type=kind)]
            for size in (1, 7, 1000):
                assert pages(store, topic, key, kind, size) == needed, (key, size)
            if needed:
                times = [store.message_at(phy).store_timestamp for phy in needed]
                inside = [phy for phy, time in zip(needed, times, strict=True) if times[-1] <= time <= times[-1] + 2]
                assert pages(store, topic, key, kind, 3, begin=times[-1], end=times[-1] + 2) == inside
        assert store.database_index.damage is None


def test_pages_over_a_damaged_database(tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(rocksdb_files.unpack("store", tmp_path / "whole"), path)
    with MessageStore.open(path, read_only=True) as store:
        needed = [message.phy_offset for message in store.query_message("Orders", "paid", 10000, index_type="T")]
    (table, *_) = sorted((path / "rocksdbstore").glob("*.sst"), key=lambda each: -each.stat().st_size)
    data = bytearray(table.read_bytes())
    for at in range(0, len(data) // 2, 500):
        data[at] ^= 0x10
    Path(table).write_bytes(data)
    with MessageStore.open(path, read_only=True) as store:
        assert pages(store, "Orders", "paid", "T", 10) == needed


def test_health_and_consumers(tmp_path):
    path = rocksdb_files.unpack("store", tmp_path)
    with MessageStore.open(path, read_only=True) as store:
        health = {each["name"]: each for each in OverviewAnswers().overview(store, ASKED)["health"]}
        assert health["index"]["state"] == "good" and "in RocksDB" in health["index"]["text"]
        assert "consumer progress" not in health
        found = rows_of(consumer_columns(store, consumer_places(store)))
        rows = {(row["group"], row["topic"], row["queue_id"]): row for row in found}
        assert rows["G-billing", "Orders", 0]["queue_offset"] == 314 and rows["G-billing", "Orders", 0]["lag"] == 3
    shutil.rmtree(path / "config" / "consumerOffsets")
    (path / "config" / "consumerOffset.json").write_text('{"offsetTable":{"Orders@G":{0:1},"Orders@bad":{0:"x"}}}')
    with MessageStore.open(path, read_only=True) as store:
        health = {each["name"]: each for each in OverviewAnswers().overview(store, ASKED)["health"]}
        assert health["consumer progress"]["state"] == "bad" and "Orders@bad" in health["consumer progress"]["text"]
        assert {group for group, *_ in consumer_places(store)} == {"G"}
