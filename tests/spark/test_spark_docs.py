"""Every block of the documents that needs Spark (``python spark``) runs.

Owns what these blocks take for granted: a session `spark`, the store at `path`, a frame of messages `df`, a frame of `keys`,
and the folders of the documents.  Frames that a block makes are read, and streams are followed to their end, since Spark
does nothing before that.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from documents import fences_of, markdown_files, run_python
from stores import SEGMENT, make_store

from rmqstore import Message, MessageStore
from rmqstore.rabbitmq import Message as QueueMessage
from rmqstore.rabbitmq import QueueIndex
from rmqstore.rabbitmq.layout import format_config, queue_directory

ROOT = Path(__file__).resolve().parent.parent.parent

VHOST = "data/rabbit/msg_stores/vhosts/628WB79CIFDYO9LJI6DKMI09L"


def blocks_of(path):
    return [fence for fence in fences_of(path) if fence.info == "python spark" and not fence.not_run]


PAGES = [path for path in markdown_files() if blocks_of(path)]


@pytest.fixture
def folder(tmp_path):
    """The documents' folders: a store with Orders, and a vhost with two queues."""
    store = make_store(tmp_path / "store", 60)
    with MessageStore.open(store) as opened:
        opened.put_message(Message("Orders", b"paid", keys=["ORD-1001", "CUST-7"], tags="EU"))
        assert opened.config.mapped_file_size_commit_log == SEGMENT
    vhost = tmp_path / VHOST
    (vhost / "queues").mkdir(parents=True)
    (vhost / ".vhost").write_bytes(b"/")
    (vhost / ".config").write_bytes(format_config(2048))
    for name in ("orders", "payments"):
        with QueueIndex.open(vhost / "queues" / queue_directory("/", name), segment_entry_count=2048, create=True) as index:
            index.publish_many([QueueMessage(b"paid", routing_keys=[name])], deliver=True)
        (vhost / "queues" / queue_directory("/", name) / ".queue_name").write_text(f"VHOST: /\nQUEUE: {name}\n")
    (tmp_path / "data" / "rocketmq").mkdir()
    return tmp_path


def use(names):
    """Do what a frame or a stream stands for."""
    for value in names.values():
        if hasattr(value, "processAllAvailable"):
            value.processAllAvailable()
            value.stop()
        elif hasattr(value, "isStreaming") and not value.isStreaming:
            assert value.limit(3).collect()


@pytest.mark.spark
@pytest.mark.java
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_run(path, spark, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    frame = spark.read.format("rocketmq-store").load(str(folder / "store"))
    names = {"spark": spark, "path": str(folder / "store"), "df": frame}
    names["keys"] = spark.createDataFrame([("ORD-1001",), ("K7",)], ["key"])
    try:
        for fence in blocks_of(path):
            before, names = names, run_python(path, [fence], folder, names)
            # Only what is new: a rebuild replaces the files that frames of before were planned for.
            use({name: value for name, value in names.items() if value is not before.get(name)})
    finally:
        monkeypatch.undo()
        time.tzset()


def test_there_are_blocks_for_spark():
    assert {path.name for path in PAGES} >= {"start.md", "spark.md", "spark-cluster.md"}


def test_documented_options_are_those_of_the_source():
    from rmqstore.spark.options import _COMMON, _READ, ReadOptions

    text = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    # In a table, or in a list where a row of it would be too long: - `name` (default): meaning.
    rows = re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\|", text)
    rows += re.findall(r"(?m)^- (`\w+`(?:, `\w+`)*)(?: \(([^)]*)\))?:", text)
    documented = {name: default.strip() for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(documented) >= _COMMON | _READ
    plain = ReadOptions("x")
    for name in ("mode", "corrupt", "starting_offset"):
        assert documented[name] == f"`{getattr(plain, name)}`"
    for name in ("decode_body", "fail_on_data_loss"):
        assert documented[name] == f"`{str(getattr(plain, name)).lower()}`"
    assert plain.partition_bytes == 128 * 2**20 and documented["partition_bytes"] == "`128m`"
