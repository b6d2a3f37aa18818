"""Every block of the documents that needs Spark runs: programs (``python spark``) and commands (``sh spark``).

Owns what these blocks take for granted: a session `spark`, the store at `path`, a frame of messages `df`, a frame of `keys`,
and the folders of the documents.  Frames that a block makes are read, and streams are followed to their end, since Spark
does nothing before that.
"""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest
from documents import fences_of, markdown_files, run_python, with_paths_below
from stores import SEGMENT, make_store
from test_cli import run

from rmqstore import Message, MessageStore
from rmqstore.rabbitmq import Message as QueueMessage
from rmqstore.rabbitmq import QueueIndex
from rmqstore.rabbitmq.layout import format_config, queue_directory

ROOT = Path(__file__).resolve().parent.parent.parent

KINDS = ("python spark", "sh spark")
VHOST = "data/rabbit/msg_stores/vhosts/628WB79CIFDYO9LJI6DKMI09L"


def blocks_of(path):
    return [fence for fence in fences_of(path) if fence.info in KINDS and not fence.not_run]


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
            where = f"{path.name}:{fence.number}"
            if fence.info == "python spark":
                before, names = names, run_python(path, [fence], folder, names)
                # Only what is new: a rebuild replaces the files that frames of before were planned for.
                use({name: value for name, value in names.items() if value is not before.get(name)})
            else:
                # In this process, which has a session already.
                for line in with_paths_below(fence.text, folder).splitlines():
                    command = shlex.split(re.sub(r"(?:^| +)#.*", "", line))
                    if not command:
                        continue
                    assert command[0] == "rmqstore", where
                    result = run(*command[1:])
                    assert result.exit_code == 0, f"{where}: {line}\n{result.output}"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_there_are_blocks_for_spark():
    assert {path.name for path in PAGES} >= {"start.md", "spark.md", "spark-cluster.md"}
