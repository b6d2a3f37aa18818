"""Queues whose files have another size than those of the store, as after a change of mappedFileSizeConsumeQueue."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from click.testing import CliRunner

from rmqstore import ConsumerOffsets, GeometryError, Message, MessageStore, StoreConfig, rebuild, verify
from rmqstore.cli import main

SMALL = StoreConfig(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=2000, max_hash_slot_num=20,
                    max_index_num=2000, clean_resource_interval=0)  # fmt: skip


@pytest.fixture
def root(tmp_path):
    """A store with 150 messages each of Old, in files of 2000 bytes, and of New and Few (10), in files of 4000."""
    root = tmp_path / "store"
    with MessageStore.open(root, config=SMALL) as store:
        for topic, number in (("Old", 150), ("New", 250), ("Few", 10)):
            store.put_messages([Message(topic, b"%d" % each, keys=[f"{topic}-{each}"]) for each in range(number)])
    for topic in ("New", "Few"):
        folder = root / "consumequeue" / topic / "0"
        units = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
        shutil.rmtree(folder)
        folder.mkdir()
        for base in range(0, len(units.rstrip(b"\0")), 4000):
            (folder / f"{base:020d}").write_bytes(units[base : base + 4000].ljust(4000, b"\0"))
    return root


def test_all_messages_are_read(root, caplog):
    with MessageStore.open(root, read_only=True) as store:
        assert store.config.consume_queue_file_size == 2000
        for topic, number in (("Old", 150), ("New", 250), ("Few", 10)):
            # Before it is opened, and after.
            assert store.queues.look(topic, 0, 0).max_queue_offset == number
            assert store.queues.unit(topic, 0, number - 1).queue_offset == number - 1
            assert store.queues.unit(topic, 0, number) is None
            own = ConsumerOffsets(root.parent / "own.json", read_only=False)
            got = [message.body for message in store.consume(topic, "g", offsets=own, timeout=0)]
            assert got == [b"%d" % each for each in range(number)]
        assert not store.damaged_files() and not caplog.records
        assert sum(queue.size for queue in store.stats().queues if queue.topic == "New") == 8000
    result = CliRunner().invoke(main, ["queues", str(root), "--json"])
    rows = {row["topic"]: row["max_queue_offset"] for row in map(json.loads, result.stdout.splitlines()) if "topic" in row}
    assert rows == {"Old": 150, "New": 250, "Few": 10}


def test_verify_names_the_queues_and_its_advice_helps(root):
    found = [(finding.kind, os.path.relpath(finding.path, root)) for finding in verify(root)]
    assert sorted(found) == [("file", "consumequeue/Few/0"), ("file", "consumequeue/New/0")]
    with pytest.raises(GeometryError, match="4000 bytes"):
        with MessageStore.open(root) as store:
            store.get_message("New")
    result = CliRunner().invoke(main, ["verify", str(root)])
    assert result.exit_code == 1 and "--what consumequeue" in result.stdout
    rebuild(root, what=("consumequeue",), config=StoreConfig.infer(root, message_delay_level="1s"))
    assert list(verify(root)) == []


def test_a_single_short_file_was_cut(root):
    path = root / "consumequeue" / "Few" / "0" / f"{0:020d}"
    os.truncate(path, 1000)
    with MessageStore.open(root, read_only=True) as store:
        assert len(store.get_message("Few").messages) == 10
        assert [each.path for each in store.damaged_files()] == [str(path)]
