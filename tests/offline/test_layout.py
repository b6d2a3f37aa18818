"""The places of the parts of every golden store, by its files alone."""

from __future__ import annotations

import sys
from pathlib import Path

import golden
import pytest
import rocksdb_files

from rmqstore import MessageStore, StoreConfig, describe
from rmqstore.offline.describe import store_layout

FILES = {"queues": "files", "settings": "JSON"}


def layout_of(path: Path):
    before = golden.tree(path)
    layout = store_layout(path, StoreConfig.infer(path, read_only=True))
    assert golden.tree(path) == before
    return layout


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("4.9.7", FILES | {"index": "files without tags"}),
        ("5.1.4", FILES | {"index": "files without tags"}),
        ("5.3.3", FILES | {"queues": "files with an extension", "index": "files without tags"}),
        ("broker", FILES | {"index": "files with tags"}),
    ],
)
def test_versions(name, parts, tmp_path):
    assert layout_of(golden.unpack(name, tmp_path)) == parts


ALL_ROCKSDB = {
    "queues": "RocksDB (consumequeue)",
    "index": "RocksDB",
    "settings": "RocksDB (three databases)",
}


@pytest.mark.parametrize("name", ["store", "store.killed"])
def test_all_in_rocksdb(name, tmp_path):
    pytest.importorskip("rocksdict")
    path = rocksdb_files.unpack(name, tmp_path)
    layout = layout_of(path)
    assert layout == ALL_ROCKSDB
    assert describe(path).layout == layout


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("double", {"queues": "files and RocksDB (consumequeue)", "index": "files with tags"}),
        ("killed-wal", {"queues": "RocksDB (consumequeue)", "index": "RocksDB"}),
        ("timer-files", {"queues": "files", "settings": "JSON"}),
        ("timer-snapshot", {"queues": "files", "settings": "JSON"}),
    ],
)
def test_variants(name, parts, tmp_path):
    pytest.importorskip("rocksdict")
    layout = layout_of(rocksdb_files.unpack("variants", tmp_path, name))
    assert layout == parts


def test_without_rocksdict(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    layout = layout_of(rocksdb_files.unpack("store", tmp_path))
    assert layout["index"] == "RocksDB"
    assert layout["settings"] == "RocksDB (three databases)"


def test_a_new_store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=StoreConfig(mapped_file_size_commit_log=65536)) as store:
        config = store.config
    layout = store_layout(tmp_path / "store", config)
    assert "settings" not in layout
