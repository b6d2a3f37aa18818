"""A store of a program knows how it was made: its options are in a file of its own, written before the first segment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from rmqstore import (
    CorruptionError,
    GeometryError,
    Message,
    MessageStore,
    StoreConfig,
    StoreNotFoundError,
    rebuild,
    verify,
)
from rmqstore.config.saved_options import OPTIONS_FILE

CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 16,
    mapped_file_size_consume_queue=2000,
    max_hash_slot_num=100,
    max_index_num=400,
    flush_disk_type="SYNC_FLUSH",
    file_reserved_time=720,
    clean_resource_interval=0,
    generate_unique_key=True,
)
SIZES = ("mapped_file_size_commit_log", "mapped_file_size_consume_queue", "max_hash_slot_num", "max_index_num")


def make(root, *messages, config=CONFIG):
    with MessageStore.open(root, config=config) as store:
        store.put_messages(list(messages))
    return root


@pytest.mark.parametrize("messages", [(), (Message("T", b"x"),), (Message("T", b"x", keys="k"),)])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_opened_without_a_config_continues_as_it_was_made(tmp_path, messages, read_only):
    root = make(tmp_path / "store", *messages)
    with MessageStore.open(root, read_only=read_only) as store:
        assert store.config == CONFIG and store.config.assumed == ()
    with MessageStore.open(root) as store:
        assert store.put_message(Message("T", b"y", keys="later")).queue_offset == len(messages)
        assert [message.body for message in store.query_message("T", "later")] == [b"y"]


def test_the_options_are_there_before_the_first_segment(tmp_path):
    root = tmp_path / "store"
    program = (
        "import os, sys\n"
        "from rmqstore import MessageStore, StoreConfig\n"
        "store = MessageStore.open(sys.argv[1], config=StoreConfig(mapped_file_size_commit_log=4096))\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(root)]).returncode == 9
    assert not os.path.exists(root / "commitlog") or not os.listdir(root / "commitlog")
    with MessageStore.open(root, read_only=True) as store:
        assert store.config.mapped_file_size_commit_log == 4096
    with MessageStore.open(root) as store:
        assert store.config.mapped_file_size_commit_log == 4096


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mapped_file_size_commit_log", 1 << 17), ("max_index_num", 500), ("max_index_num", 20_000_000),
        ("file_reserved_time", 24), ("delete_when", "05"), ("message_index_enable", False),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_them_is_refused_by_name(tmp_path, name, value):
    root = make(tmp_path / "store", Message("T", b"x"))
    before = (root / OPTIONS_FILE).read_bytes()
    changed = CONFIG.replace(**{name: value})
    with pytest.raises(GeometryError, match=f"made with {name}=.*reconfigure") as caught:
        MessageStore.open(root, config=changed)
    assert caught.value.path == str(root / OPTIONS_FILE) and (root / OPTIONS_FILE).read_bytes() == before
    if name not in SIZES:
        with MessageStore.open(root, config=changed, reconfigure=True) as store:
            assert getattr(store.config, name) == value
        with MessageStore.open(root) as store:
            assert store.config == changed


def test_options_left_at_their_defaults_take_the_saved_values(tmp_path):
    root = make(tmp_path / "store", Message("T", b"x"))
    sizes = StoreConfig(**{name: getattr(CONFIG, name) for name in SIZES})
    assert sizes.flush_disk_type == "ASYNC_FLUSH"
    with MessageStore.open(root, config=sizes) as store:
        assert store.config == CONFIG.replace(clean_resource_interval=10_000)
    with MessageStore.open(root, config=sizes, reconfigure=True) as store:
        assert store.config == sizes
    with MessageStore.open(root) as store:
        assert store.config == sizes


def test_a_size_of_files_that_exist_cannot_be_changed(tmp_path):
    root = make(tmp_path / "store", Message("T", b"x"))
    with pytest.raises(GeometryError):
        MessageStore.open(root, config=CONFIG.replace(mapped_file_size_commit_log=1 << 17), reconfigure=True)
    with MessageStore.open(root) as store:
        assert store.config == CONFIG


def test_options_of_a_process_may_differ(tmp_path):
    root = make(tmp_path / "store", Message("T", b"x"))
    with MessageStore.open(root, config=CONFIG.replace(max_mapped_files=10, flush_interval_commit_log=100)) as store:
        assert store.config.max_mapped_files == 10
    with MessageStore.open(root) as store:
        assert store.config == CONFIG


def test_a_store_of_a_broker_gets_no_such_file(tmp_path):
    root = make(tmp_path / "store", Message("T", b"x", keys="k"))
    os.unlink(root / OPTIONS_FILE)
    with MessageStore.open(root) as store:
        assert [getattr(store.config, name) for name in SIZES] == [getattr(CONFIG, name) for name in SIZES]
        assert store.config.flush_disk_type == "ASYNC_FLUSH"
    with MessageStore.open(root, config=CONFIG):
        pass
    assert not (root / OPTIONS_FILE).exists()


def test_files_decide_where_they_differ(tmp_path):
    # Another program made the files anew, such as a rebuild with other sizes.
    root, other = make(tmp_path / "store", Message("T", b"x", keys="k")), CONFIG.replace(max_hash_slot_num=50, max_index_num=90)
    make(tmp_path / "other", Message("T", b"x", keys="k"), config=other)
    shutil.rmtree(root / "index")
    shutil.copytree(tmp_path / "other" / "index", root / "index")
    config = StoreConfig.infer(root)
    assert (config.max_hash_slot_num, config.max_index_num, config.flush_disk_type) == (50, 90, "SYNC_FLUSH")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"format": 1}', '{"format": 2, "options": {}}',
        '{"options": {"flush_disk_type": "x"}}', '{"options": {"max_index_num": "5"}}', "\x00" * 100,
    ],
)  # fmt: skip
def test_a_damaged_file_stops_a_writer_and_no_reader(tmp_path, text, caplog):
    root = make(tmp_path / "store", Message("T", b"x", keys="k"))
    (root / OPTIONS_FILE).write_text(text)
    with pytest.raises(CorruptionError, match="move it away") as caught:
        MessageStore.open(root)
    assert caught.value.path == str(root / OPTIONS_FILE)
    with MessageStore.open(root, read_only=True) as store:
        assert [message.body for message in store.query_message("T", "k")] == [b"x"]
    assert "are not used" in caplog.text
    os.unlink(root / OPTIONS_FILE)
    with MessageStore.open(root) as store:
        assert store.get_message("T").messages


def test_options_of_a_newer_release_are_ignored(tmp_path):
    root = make(tmp_path / "store", Message("T", b"x"))
    document = json.loads((root / OPTIONS_FILE).read_text())
    document["options"]["of_a_newer_release"] = 1
    (root / OPTIONS_FILE).write_text(json.dumps(document))
    assert StoreConfig.infer(root) == CONFIG


# ---------------------------------------------------------------------------------------------------- no store yet

def test_a_store_that_is_not_there_has_an_error_of_its_own(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(StoreNotFoundError):
            MessageStore.open(path, read_only=True)
        with pytest.raises(StoreNotFoundError):
            MessageStore.open(path, create=False)


def test_a_reader_waits_for_the_writer(tmp_path):
    root = tmp_path / "store"
    with pytest.raises(StoreNotFoundError):
        MessageStore.open(root, read_only=True, wait=0.1)
    with pytest.raises(ValueError, match="read_only"):
        MessageStore.open(root, wait=1)
    program = (
        "import sys, time; from rmqstore import Message, MessageStore, StoreConfig; print(flush=True); time.sleep(0.3)\n"
        "store = MessageStore.open(sys.argv[1], config=StoreConfig(mapped_file_size_commit_log=4096))\n"
        "store.put_message(Message('T', b'x')); sys.stdin.read()"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        writer.stdout.readline()
        with MessageStore.open(root, read_only=True, wait=60) as reader:
            assert reader.wait_for_messages(lambda: reader.max_queue_offset("T", 0) == 1, 60)
            assert [message.body for message in reader.get_message("T").messages] == [b"x"]
    finally:
        writer.communicate()
    assert writer.returncode == 0


def test_a_change_that_the_files_refuse_is_not_saved(tmp_path):
    root = make(tmp_path / "store", Message("T", b"x", keys="k"))
    for changes in ({"mapped_file_size_commit_log": 1 << 17}, {"max_hash_slot_num": 50}):
        with pytest.raises(GeometryError):
            MessageStore.open(root, config=CONFIG.replace(**changes), reconfigure=True)
    with MessageStore.open(root, config=CONFIG) as store:
        assert store.config == CONFIG
    with pytest.raises(ValueError, match="reconfigure is for writing"):
        MessageStore.open(root, read_only=True, reconfigure=True)


def test_a_rebuild_with_other_options_saves_them(tmp_path):
    root = make(tmp_path / "store", *(Message("T", b"x", keys=f"k{i}", tags="t") for i in range(50)))
    changed = CONFIG.replace(max_hash_slot_num=200, max_index_num=900, index_tags=False)
    rebuild(root, config=changed)
    assert StoreConfig.infer(root) == changed and list(verify(root)) == []
    with MessageStore.open(root) as store:
        assert store.config == changed
