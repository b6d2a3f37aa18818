"""Opening a store read-only leaves no trace (I7): not by opening, not by reading all there is, not on a foreign store.

Directories that may not be written are tried for real: as root by a child process that gave its rights away.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import golden
import pytest
from mappings import mappings
from scratch import folder_for_everybody

from rmqstore import (
    IndexFile,
    Message,
    MessageStore,
    ReadOnlyError,
    StoreConfig,
    StoreError,
    StoreLockedError,
    describe,
    verify,
)
from rmqstore._dispatch import TopicTable
from rmqstore._rows import RowBatch
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.unit_queue import Unit

SMALL = StoreConfig(
    mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10, max_index_num=20
)


def traces(root) -> dict[str, tuple]:
    """All that a write could change below `root`, the root included: contents, sizes, modes, links, times."""
    found = {}
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            status = os.stat(path, follow_symlinks=False)
            digest = ""
            if stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    digest = (
                        hashlib.file_digest(file, "sha256").hexdigest()
                        if sys.version_info >= (3, 11)
                        else (hashlib.sha256(file.read()).hexdigest())
                    )
            found[os.path.relpath(path, root)] = (
                digest, status.st_size, status.st_blocks, status.st_mode, status.st_uid, status.st_gid, status.st_ino,
                status.st_nlink, status.st_mtime_ns, status.st_ctime_ns,
            )  # fmt: skip
    return found


def read_everything(store: MessageStore) -> int:
    """Use every reading operation of an opened store; the number of messages seen."""
    store.refresh()
    messages = list(store.messages())
    assert sum(1 for _ in store.commit_log.entries()) >= len(messages)
    for message in messages[:: max(len(messages) // 50, 1)]:
        assert store.message_at(message.phy_offset) == message
        assert store.message_by_id(message.msg_id) == message
        assert isinstance(message.body, bytes)
        for key in [*message.keys, message.unique_key]:
            if key:
                store.query_message(message.topic, key)
                store.query_message(message.topic, key, compat=True)
                store.query_offsets(message.topic, key)
        if message.tags:
            store.query_message(message.topic, message.tags, index_type="T")
    for topic in store.topics():
        for queue_id in store.queue_ids(topic):
            low, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
            for queue_offset in (low - 1, low, high - 1, high, high + 1):
                store.get_message(topic, queue_id, queue_offset)
                store.get_message(topic, queue_id, queue_offset, tags="TagA")
            for boundary in ("lower", "upper"):
                store.offset_by_time(topic, queue_id, 1700000020000, boundary)
    # What is not there is not made either.
    assert len(store.get_message("no such topic", 7)) == 0
    assert store.queues.find("no such topic", 7) is None
    assert store.query_message("no such topic", "k") == []
    assert store.offset_by_time("no such topic", 0, 0) == 0
    assert store.consumer_offsets.list() is not None
    store.consumer_offsets.get("no such group", "no such topic", 0)
    for index in store.index_service.files():
        assert index.header.index_count >= 1
    return len(messages)


@pytest.mark.parametrize("given", ["infer", "explicit"])
@pytest.mark.parametrize("name", golden.STORES)
def test_leaves_no_trace(golden_copy, name, given):
    root = golden_copy(name)
    before = traces(root)
    config = None if given == "infer" else StoreConfig(**golden.geometry(name))
    with MessageStore.open(root, read_only=True, config=config) as store:
        assert traces(root) == before
        assert read_everything(store) >= 41
        assert store.recovery_report is None
        assert traces(root) == before
    assert traces(root) == before
    assert before["lock"][1] in (0, 4)


@pytest.mark.parametrize("name", golden.STORES)
def test_describing_and_verifying_leave_no_trace(golden_copy, name):
    root = golden_copy(name)
    before = traces(root)
    config = StoreConfig(**golden.geometry(name))
    describe(root, config)
    describe(root)
    list(verify(root, config))
    StoreConfig.infer(root)
    assert traces(root) == before


def test_no_descriptor_of_the_lock_is_opened(golden_copy):
    # Closing any descriptor of that file would give up a lock that this process holds (POSIX).
    root = golden_copy("base")
    opened = []
    active = True

    def watch(event, arguments):
        if active and event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(str(root)):
            opened.append((os.path.relpath(arguments[0], root), arguments[2]))

    sys.addaudithook(watch)
    try:
        with MessageStore.open(root, read_only=True) as store:
            read_everything(store)
    finally:
        active = False
    assert any(path.startswith("commitlog") for path, _ in opened)
    assert "lock" not in {path for path, _ in opened}
    write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    assert [item for item in opened if item[1] & write_flags] == []


def test_mappings_are_read_only(golden_copy):
    root = golden_copy("base")
    with MessageStore.open(root, read_only=True) as store:
        read_everything(store)
        mapped = mappings(root)
        assert len(mapped) > 5
        assert {line.split()[1][:2] for line in mapped} == {"r-"}


# --------------------------------------------------------------------------------- directories that are write-protected


def in_a_child_without_rights(work) -> None:
    """Run `work()` in a forked process that may write nowhere; its failure is the test's."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        text = "child ended early"
        try:
            os.close(reader)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            work()
            text = "well"
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    assert answer == "well", answer


@pytest.fixture
def protected_root():
    """A function that unpacks a golden store where everybody may read and nobody but root may write."""
    # Not below tmp_path: its parents are closed to other users.
    top = Path(tempfile.mkdtemp(prefix="rmqstore-read-only-", dir=folder_for_everybody()))
    top.chmod(0o755)

    def unpacked(name):
        root = golden.unpack(name, top / name)
        for folder, _, files in os.walk(top, topdown=False):
            for file in files:
                os.chmod(os.path.join(folder, file), 0o444)
            if folder != str(top):
                os.chmod(folder, 0o555)
        return root

    yield unpacked
    for folder, _, _ in os.walk(top):
        os.chmod(folder, 0o755)
    shutil.rmtree(top)


@pytest.mark.parametrize("name", golden.STORES)
def test_works_in_a_directory_that_may_not_be_written(protected_root, name):
    root = protected_root(name)
    before = traces(root)

    def work():
        for target in ("new", "commitlog/new"):
            try:
                open(root / target, "w")
            except PermissionError:
                continue
            raise AssertionError("the directory is not protected, so this test would show nothing")
        with MessageStore.open(root, read_only=True) as store:
            assert read_everything(store) >= 41
        with MessageStore.open(root, read_only=True, config=StoreConfig(**golden.geometry(name))) as store:
            assert read_everything(store) >= 41
        try:
            MessageStore.open(root)
        except PermissionError as error:
            assert str(root) in str(error)
        else:
            raise AssertionError("opened for writing without the right to")

    in_a_child_without_rights(work)
    assert traces(root) == before


def test_an_index_file_alone_in_a_protected_directory(protected_root):
    root = protected_root("base")
    config = StoreConfig(**golden.geometry("base"))

    def work():
        for path in sorted((root / "index").iterdir()):
            with IndexFile.open(path, config, read_only=True) as index:
                assert index.header.index_count > 1
            try:
                IndexFile.open(path, config).put_key("T#k", 1, 1)
            except PermissionError:
                continue
            raise AssertionError("opened for writing without the right to")

    in_a_child_without_rights(work)


# --------------------------------------------------------------------------------------------- next to a running broker

HOLD_LOCK = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""

TRY_LOCK = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
except OSError:
    print("taken")
else:
    print("free")
"""


def state_of_lock(root) -> str:
    """Return "free" if another process could take the store's lock, otherwise "taken"."""
    command = [sys.executable, "-c", TRY_LOCK, str(root / "lock")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_works_while_another_process_holds_the_lock(golden_copy):
    root = golden_copy("broker.killed")
    command = [sys.executable, "-c", HOLD_LOCK, str(root / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        before = traces(root)
        with pytest.raises(StoreLockedError, match=r"process \d+ \(.* has the store open.*read_only=True"):
            MessageStore.open(root)
        with MessageStore.open(root, read_only=True) as store:
            assert read_everything(store) > 10_000
        # Only the lock file itself may have been opened for trying.
        assert traces(root) == before
        assert state_of_lock(root) == "taken"
        other.stdin.close()
        other.wait()
    assert state_of_lock(root) == "free"


def test_a_reader_beside_the_writer_of_the_same_process(tmp_path):
    with MessageStore.open(tmp_path, config=SMALL) as writer:
        writer.put_message(Message("T", b"0", keys=["k"]))
        assert state_of_lock(tmp_path) == "taken"
        for _ in range(3):
            with MessageStore.open(tmp_path, read_only=True, config=SMALL) as reader:
                assert [message.body for message in reader.get_message("T")] == [b"0"]
        # The readers came and went and did not take the writer's lock away.
        assert state_of_lock(tmp_path) == "taken"
        assert (tmp_path / "abort").exists()
    assert state_of_lock(tmp_path) == "free"


def test_a_reader_follows_a_writer(tmp_path):
    # Without timers, which write the checkpoint whatever the reader does.
    quiet = SMALL.replace(
        flush_interval_commit_log=0, flush_interval_consume_queue=0, flush_consumer_offset_interval=0, clean_resource_interval=0
    )
    with (
        MessageStore.open(tmp_path, config=quiet) as writer,
        MessageStore.open(tmp_path, read_only=True, config=SMALL) as reader,
    ):
        assert list(reader.messages()) == []
        seen = 0
        for number in range(120):
            writer.put_message(Message(f"T{number % 2}", bytes(number), keys=[f"k{number}"], tags="t"), number % 3)
            if number % 7 == 0:
                reader.refresh()
                assert list(reader.messages()) == list(writer.messages())
                assert reader.topics() == writer.topics()
                for topic in writer.topics():
                    for queue_id in writer.queue_ids(topic):
                        assert reader.max_queue_offset(topic, queue_id) == writer.max_queue_offset(topic, queue_id)
                        assert list(reader.get_message(topic, queue_id)) == list(writer.get_message(topic, queue_id))
                for key in range(seen, number + 1):
                    (message,) = reader.query_message(f"T{key % 2}", f"k{key}")
                    assert len(message.body) == key
                seen = number
        before = traces(tmp_path)
        reader.refresh()
        read_everything(reader)
        assert traces(tmp_path) == before


# --------------------------------------------------------------------------------------------------- writes are refused


def writing_calls(store: MessageStore) -> dict:
    """Everything of a store and its parts that would change a file."""
    message = Message("TopicTest", b"x", keys=["k"])
    index = next(store.index_service.files())
    queue = store.queues.find("TopicTest", 0)
    mapped_file = store.commit_log.segment(0)

    def flush_dirty():
        mapped_file.mark_dirty(1)
        try:
            mapped_file.flush()
        finally:
            mapped_file.pool.dirty.discard(mapped_file)
            mapped_file._taken = False

    rows = RowBatch(TopicTable(), bytes(8), {}, 0)
    rows.take_prepared([(b"T", b"", b"", bytes(8), bytes(8), 0, 0, 0, 0, 1, 0, 0, 0, 0)])
    return {
        "put_message": lambda: store.put_message(message),
        "put_messages": lambda: store.put_messages([message, message], [0, 1]),
        "put_messages of nothing": lambda: store.put_messages([]),
        "put_message_batch": lambda: store.put_message_batch([message]),
        "flush": store.flush,
        "checkpoint": store.checkpoint.flush,
        "commit_log.append_rows": lambda: store.commit_log.append_rows(rows),
        "queue.put": lambda: queue.put(Unit(queue.max_queue_offset, 0, 100, 0), 0),
        "new queue": lambda: store.queues.find_or_create("New", 0).put(Unit(0, 0, 100, 0), 0),
        "queue.truncate": lambda: queue.files.truncate(0),
        "index.put_key": lambda: index.put_key("T#k", 1, 1),
        "index.put_keys": lambda: index.put_keys(["T#k"], [1], [1]),
        "index.write_header": lambda: index.write_header(1, 1, 1, 1, 1, 1),
        "index.relink": lambda: index.relink(1),
        "index.flush": index.flush,
        "mapped_file.flush": flush_dirty,
        "mapped_file.destroy": mapped_file.destroy,
        "region.write": lambda: mapped_file.region.write(0, b"x"),
        "region.zero": lambda: mapped_file.region.zero(0, 1),
    }


def test_every_writing_method_raises(golden_copy):
    root = golden_copy("base")
    before = traces(root)
    with MessageStore.open(root, read_only=True) as store:
        for name, call in writing_calls(store).items():
            with pytest.raises(ReadOnlyError, match="read-only"):
                pytest.fail(f"{name} gave {call()!r}")
            assert traces(root) == before, name
        read_everything(store)
    assert traces(root) == before


def test_views_cannot_be_written(golden_copy):
    with MessageStore.open(golden_copy("base"), read_only=True) as store:
        with store.commit_log.segment(0).hold() as view:
            assert view.readonly
            with pytest.raises(TypeError):
                view[0] = 0


def test_a_message_that_was_read_cannot_be_changed(golden_store):
    with MessageStore.open(golden_store("base"), read_only=True) as store:
        message = store.message_at(0)
        for name in ("topic", "body", "properties", "flag", "queue_id", "store_timestamp"):
            with pytest.raises(AttributeError):
                setattr(message, name, None)


# ------------------------------------------------------------------------------------------------ nothing to read there


def test_a_directory_that_is_not_there_is_not_made(tmp_path):
    for path in (tmp_path / "none", tmp_path / "none" / "deeper"):
        with pytest.raises(StoreError, match="does not exist") as caught:
            MessageStore.open(path, read_only=True)
        assert caught.value.path == str(path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="not a directory"):
        MessageStore.open(tmp_path / "file", read_only=True)
    assert os.listdir(tmp_path) == ["file"]


def test_an_empty_directory_stays_empty(tmp_path):
    with MessageStore.open(tmp_path, read_only=True, config=SMALL) as store:
        assert list(store.messages()) == []
        assert store.topics() == []
        assert (store.commit_log.min_offset, store.commit_log.max_offset) == (0, 0)
        assert store.query_message("T", "k") == []
    assert os.listdir(tmp_path) == []


def test_strange_things_do_not_keep_a_reader_out(golden_copy):
    # A broker refuses these when it starts; whoever wants to look at the store must still be able to.
    root = golden_copy("base")
    (root / "commitlog" / "notes.txt").write_text("hello")
    (root / "commitlog" / "folder").mkdir()
    (root / "consumequeue" / "TopicTest" / "0" / "notes.txt").write_text("hello")
    (root / "index" / "notes.txt").write_text("hello")
    (root / "consumequeue" / "file").write_text("hello")
    before = traces(root)
    with MessageStore.open(root, read_only=True, config=StoreConfig(**golden.geometry("base"))) as store:
        assert read_everything(store) == 41
    assert traces(root) == before


def test_a_queue_is_looked_at_only_when_asked_for(golden_store):
    with MessageStore.open(golden_store("broker"), read_only=True) as store:
        assert store.queues.opened() == []
        assert len(store._state.pool) <= 2
        store.max_queue_offset("Orders", 0)
        (queue,) = store.queues.opened()
        assert isinstance(queue, ConsumeQueue)


def test_a_shared_lock_of_ours_is_untouched(golden_copy):
    # A lock that this process took by other means outlives a reader.
    root = golden_copy("base")
    fd = os.open(root / "lock", os.O_RDWR)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        with MessageStore.open(root, read_only=True) as store:
            read_everything(store)
        assert state_of_lock(root) == "taken"
    finally:
        os.close(fd)
