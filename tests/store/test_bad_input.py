"""Bad input gets its own clear error: of our types, naming the file and the position, saying what to do.

Files of a wrong size or name, stores with parts missing, messages that no store may hold, offsets and times at the ends
of 64 bits, hostile records, stores opened twice or used after closing.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import textwrap

import golden
import oracle
import pytest

from rmqstore import (
    ChecksumError,
    CorruptionError,
    GeometryError,
    IndexFile,
    InvalidMessageError,
    LostLogError,
    Message,
    MessageStore,
    OffsetOutOfRangeError,
    StoreClosedError,
    StoreConfig,
    StoreError,
    StoreLockedError,
    rebuild,
)

T0 = 1700000000000
MAX = 2**63 - 1
GEOMETRY = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "max_hash_slot_num": 10,
    "max_index_num": 20,
}
BASE = golden.geometry("base")


def config_of(**options) -> StoreConfig:
    return StoreConfig(**{**GEOMETRY, **options})


def traces(root) -> dict[str, tuple[int, bytes]]:
    """Sizes and contents of all files but the lock, which a try to open may make."""
    return {path: data for path, data in oracle.read_files(root).items() if path != "lock"}


def refused(root, kind, match, path=None, *, pos=None, config=None, read_only=False) -> StoreError:
    """Opening must raise `kind`, name `path` (and `pos`), and leave every byte as it was."""
    before = traces(root)
    with pytest.raises(kind, match=match) as caught:
        MessageStore.open(root, config=config, read_only=read_only)
    error = caught.value
    if path is not None:
        assert error.path == str(path)
        assert str(path) in str(error)
    if pos is not None:
        assert error.pos == pos
        assert f"position {pos}" in str(error)
    assert traces(root) == before
    # It gave the store back: the next one gets the same answer and not "locked".
    with pytest.raises(kind, match=match):
        MessageStore.open(root, config=config, read_only=read_only)
    return error


# ---------------------------------------------------------------------------------------------------- wrong geometry


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("size", [2048, 8192, 1 << 30])
def test_wrong_segment_size(golden_copy, read_only, size):
    root = golden_copy("base")
    config = StoreConfig(**{**BASE, "mapped_file_size_commit_log": size})
    refused(
        root, GeometryError, rf"4096 bytes where the configuration says {size}.*StoreConfig\.infer",
        root / "commitlog" / f"{0:020}", pos=min(4096, size), config=config, read_only=read_only,
    )  # fmt: skip


@pytest.mark.parametrize("size", [100, 400, 6_000_000])
def test_wrong_queue_file_size(golden_copy, size):
    root = golden_copy("base")
    config = StoreConfig(**{**BASE, "mapped_file_size_consume_queue": size})
    error = refused(root, GeometryError, rf"200 bytes where the configuration says {size}", config=config)
    assert error.path.startswith(str(root / "consumequeue"))
    # A reader takes each queue's own size.
    with MessageStore.open(root, config=config, read_only=True) as store:
        gets = [store.get_message("TopicTest", 0, begin) for begin in (0, 10, 20)]
        assert [message.queue_offset for got in gets for message in got] == list(range(30))


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(("slots", "entries"), [(20, 20), (10, 40), (5_000_000, 20_000_000), (15, 19)])
def test_wrong_index_numbers(golden_copy, slots, entries, read_only):
    root = golden_copy("base")
    name = sorted(os.listdir(root / "index"))[0]
    config = StoreConfig(**{**BASE, "max_hash_slot_num": slots, "max_index_num": entries})
    if config.index_file_size == 480:
        # 15 slots and 19 entries make the same length; only the contents could tell, and they are not asked here.
        assert (slots, entries) == (15, 19)
        return
    error = refused(
        root, GeometryError, f"480 bytes, but max_hash_slot_num={slots}", config=config, read_only=read_only
    )
    assert os.path.dirname(error.path) == str(root / "index")
    with pytest.raises(GeometryError, match=f"480 bytes, but {slots} slots and {entries} entries") as caught:
        IndexFile.open(root / "index" / name, config)
    assert caught.value.path == str(root / "index" / name)
    assert os.path.getsize(root / "index" / name) == 480


def test_sizes_that_java_cannot_compute():
    with pytest.raises(GeometryError, match="32 bits"):
        StoreConfig(max_hash_slot_num=2**29, max_index_num=20_000_000)


# ---------------------------------------------------------------------------------------- files of an odd or no length

PARTS = ("commitlog", "consumequeue/TopicTest/0", "index")


ODD_LENGTHS = [
    (part, which, length)
    for part in PARTS
    for which in ("first", "middle", "last")
    for length in (0, 1, 13, 199, 4097)
    # A last file of 0 bytes is what a crash between making it and giving it its length leaves: see the tests below.
    if length or which != "last" or part == "index"
]


@pytest.mark.parametrize(("part", "which", "length"), ODD_LENGTHS)
def test_files_of_an_odd_length(golden_copy, part, which, length):
    root = golden_copy("base")
    names = sorted(os.listdir(root / part))
    assert len(names) == 3
    path = root / part / names[{"first": 0, "middle": 1, "last": 2}[which]]
    os.truncate(path, length)
    config = StoreConfig(**BASE)
    size = {"commitlog": 4096, "index": 480}.get(part, 200)
    refused(root, GeometryError, f"has {length} bytes", path, pos=min(length, size), config=config)
    # Without a config the sizes are those that most files have.  A reader reads the rest:
    # tests/store/test_damaged_files.py.
    refused(root, GeometryError, f"has {length} bytes.*restore the file from a copy", path)


@pytest.mark.parametrize("part", ["commitlog", "consumequeue/TopicTest/0"])
def test_a_last_file_of_no_length_is_the_remains_of_a_crash(golden_copy, part):
    root = golden_copy("base")
    size = 4096 if part == "commitlog" else 200
    path = root / part / f"{3 * size:020}"
    path.touch()
    with MessageStore.open(root, config=StoreConfig(**BASE), read_only=True) as store:
        assert len(list(store.messages())) == 41
        assert store.max_queue_offset("TopicTest", 0) == 30
    assert path.exists()
    with MessageStore.open(root, config=StoreConfig(**BASE)) as store:
        assert len(list(store.messages())) == 41
        assert store.max_queue_offset("TopicTest", 0) == 30
        assert not path.exists()
        assert store.put_message(Message("TopicTest")).queue_offset == 30


@pytest.mark.parametrize("how", ["emptied", "deleted"])
def test_a_log_that_lost_its_newest_segment_is_refused(golden_copy, how):
    # After an orderly exit the queues say that the log went on; after a crash it could not be told.
    root = golden_copy("base")
    newest = root / "commitlog" / f"{8192:020}"
    if how == "emptied":
        os.truncate(newest, 0)
    else:
        newest.unlink()
    refused(root, LostLogError, "Nothing was changed", config=StoreConfig(**BASE))


@pytest.mark.parametrize("abort", [False, True])
def test_a_queue_that_lost_its_newest_file_is_filled_again(golden_copy, abort):
    root = golden_copy("base")
    if abort:
        (root / "abort").write_text("1")
    os.truncate(root / "consumequeue" / "TopicTest" / "0" / f"{400:020}", 0)
    with MessageStore.open(root, config=StoreConfig(**BASE)) as store:
        assert store.max_queue_offset("TopicTest", 0) == 30
        assert [message.queue_offset for message in store.get_message("TopicTest", 0, 20, 32)] == list(range(20, 30))


@pytest.mark.parametrize("length", [1, 7, 4097, 8192])
def test_a_checkpoint_of_an_odd_length(golden_copy, length):
    root = golden_copy("base")
    os.truncate(root / "checkpoint", length)
    refused(root, GeometryError, "checkpoint file has 4096 bytes", root / "checkpoint", config=StoreConfig(**BASE))


def test_a_missing_checkpoint_or_lock_is_no_error(golden_copy):
    root = golden_copy("base")
    for name in ("checkpoint", "lock", "abort.bak"):
        os.unlink(root / name)
    with MessageStore.open(root, config=StoreConfig(**BASE)) as store:
        assert len(list(store.messages())) == 41


# --------------------------------------------------------------------------------------------- strays and missing parts


@pytest.mark.parametrize("part", ["commitlog", "consumequeue/TopicTest/0"])
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("notes.txt", "not part of the store.*move it away"),
        ("0000000000000000004096", "not part of the store.*move it away"),
        ("-0000000000000000001", "not part of the store.*move it away"),
        ("٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠", "not part of the store.*move it away"),
        ("99999999999999999999", "not part of the store.*move it away"),
        (f"{100:020}", "not a multiple|is missing"),
        (f"{1 << 40:020}", "not a multiple|is missing"),
    ],
)
def test_stray_files(golden_copy, part, name, match):
    root = golden_copy("base")
    path = root / part / name
    path.write_bytes(bytes(4096 if part == "commitlog" else 200))
    refused(root, GeometryError, match, path, config=StoreConfig(**BASE))


@pytest.mark.parametrize("part", [*PARTS])
def test_stray_folders(golden_copy, part):
    root = golden_copy("base")
    path = root / part / ("20231114221320000" if part == "index" else "folder")
    path.mkdir()
    refused(root, GeometryError, "directory.*move it away", path, config=StoreConfig(**BASE))
    with MessageStore.open(root, config=StoreConfig(**BASE), read_only=True) as store:
        assert len(list(store.messages())) == 41


@pytest.mark.parametrize("part", ["checkpoint", "config/consumerOffset.json"])
@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_what_is_no_file_is_not_waited_for(golden_copy, part, kind):
    root = golden_copy("base")
    path = root / part
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    with pytest.raises(OSError, match="not a regular file; move it away" if kind == "fifo" else "directory") as caught:
        # A reader does without a checkpoint, and a writer does not.
        with MessageStore.open(root, config=StoreConfig(**BASE), read_only=part != "checkpoint") as store:
            store.consumer_offsets.list()
    assert caught.value.filename == str(path)
    with MessageStore.open(root, config=StoreConfig(**BASE), read_only=True) as store:
        assert len(list(store.messages())) == 41


def test_stray_names_in_the_index_are_passed_over_as_in_java(golden_copy):
    root = golden_copy("base")
    (root / "index" / "notes.txt").write_text("hello")
    with MessageStore.open(root, config=StoreConfig(**BASE)) as store:
        assert len(store.index_service.names) == 3
        assert len(store.query_message("TopicTest", "k1")) == 1
    assert (root / "index" / "notes.txt").read_text() == "hello"


@pytest.mark.parametrize("part", ["commitlog", "consumequeue/TopicTest/0"])
def test_a_missing_middle_file(golden_copy, part):
    root = golden_copy("base")
    size = 4096 if part == "commitlog" else 200
    os.unlink(root / part / f"{size:020}")
    refused(
        root, GeometryError, f"begins at 0, so one at {size} is missing; restore it, or open the store read-only",
        root / part / f"{2 * size:020}", config=StoreConfig(**BASE),
    )  # fmt: skip
    with MessageStore.open(root, config=StoreConfig(**BASE), read_only=True) as store:
        messages = list(store.messages())
        if part == "commitlog":
            # 4096 to 8191 are gone: their messages cannot be had, the others can.
            assert len(messages) == sum(not 4096 <= line["offset"] < 8192 for line in golden.lines("base", "msg"))
            with pytest.raises(OffsetOutOfRangeError, match="segment that held phy offset 4096 is missing"):
                store.message_at(4096)
            assert store.query_message("TopicTest", "key3") == []
            assert len(store.query_message("TopicTest", "key23")) == 1
        else:
            assert len(messages) == 41
            assert store.get_message("TopicTest", 0, 12).status.name == "OFFSET_FOUND_NULL"
            assert store.get_message("TopicTest", 0, 12).next_queue_offset == 20


def test_simple_and_batch_queues_of_one_topic(golden_copy):
    root = golden_copy("base")
    shutil.copytree(root / "consumequeue" / "TopicTest" / "0", root / "consumequeue" / "BatchTopic" / "0")
    refused(root, GeometryError, "'BatchTopic' has both simple and batch queues", config=StoreConfig(**BASE))


def test_a_file_where_the_store_should_be(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with pytest.raises((StoreError, OSError), match="file"):
        MessageStore.open(path)
    with pytest.raises(ValueError, match="strict, truncate, skip"):
        MessageStore.open(tmp_path / "new", recovery="hope")
    assert not (tmp_path / "new").exists()


# -------------------------------------------------------------------------------------------------------- bad messages


@pytest.fixture
def store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=config_of()) as opened:
        opened.put_message(Message("T", b"first", keys=["k"]))
        yield opened


def nothing_changed(store):
    assert store.commit_log.max_offset == store.message_at(0).size
    assert store.topics() == ["T"]
    assert sorted(os.listdir(os.path.join(store.path, "consumequeue"))) == ["T"]
    assert not os.path.exists(os.path.join(os.path.dirname(store.path), "x"))


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (
            Message("T", bytes(4096)),
            "a segment of 4096 bytes holds at most 4088: shorten it, or use a store with larger",
        ),
        (Message("T", bytes(3997)), "takes 4089 bytes"),
        (Message(""), "topic is empty"),
        (Message("a" * 128), "at most 127 are allowed: shorten it"),
        (Message("%RETRY%" + "a" * 249), "at most 255"),
        (Message("%DLQ%" + "a" * 251), "at most 255"),
        (Message("../x"), "characters that a broker refuses"),
        (Message("/etc/x"), "characters that a broker refuses"),
        (Message("a/b"), "'/'"),
        (Message("a.b"), "'.'"),
        (Message(".."), "'.'"),
        (Message("a b"), "' '"),
        (Message("a\0b"), r"x00"),
        (Message("订单"), "use letters, digits"),
        (Message("a\n"), "characters that a broker refuses"),
        (Message("T", properties={"p": "v" * 32767}), "at most 32767: move large values into the body"),
        (Message("T", properties={"p": "é" * 17000}), "at most 32767"),
        (Message("T", properties={"a\x01b": "v"}), "separate properties"),
        (Message("T", properties={"a": "v\x02"}), "separate properties"),
        (Message("T", tags="a\x02b"), "separate properties"),
        (Message("T", properties={"KEYS": "  "}), "KEYS property holds no key"),
        (Message("T", properties={"": "v"}), "empty name"),
        (Message("T", flag=2**31), "flag is 2147483648: give an int from -2147483648 to 2147483647"),
        (Message("T", born_timestamp=2**63), "born_timestamp"),
        (Message("T", prepared_transaction_offset=-(2**63) - 1), "prepared_transaction_offset"),
        (Message("T", reconsume_times=2**31), "reconsume_times"),
        (Message("T", born_host="example.org:1"), "example.org"),
        (Message("T", store_host="1.2.3.4"), "1.2.3.4"),
    ],
)
def test_messages_that_cannot_be_stored(store, message, match):
    for put in (lambda: store.put_message(message), lambda: store.put_messages([Message("T"), message])):
        with pytest.raises(InvalidMessageError, match=match):
            put()
        nothing_changed(store)
    with pytest.raises(InvalidMessageError):
        # The rules for batches may be broken as well.
        store.put_message_batch([message])
    nothing_changed(store)
    # The store goes on.
    assert store.put_message(Message("T")).queue_offset == 1


@pytest.mark.parametrize("keys", [["a b"], ["a\x01"], ["\x02"], [""], ["a", ""], "   ", [5], ["a", None]])
def test_keys_with_separators(keys):
    with pytest.raises(InvalidMessageError, match="key"):
        Message("T", keys=keys)


@pytest.mark.parametrize("body", ["text", 5, None, [1, 2], object()])
def test_bodies_that_are_not_bytes(body):
    with pytest.raises(InvalidMessageError, match="encode it first"):
        Message("T", body)


def test_a_body_over_max_message_size(tmp_path):
    config = config_of(mapped_file_size_commit_log=1 << 20, max_message_size=10_000)
    with MessageStore.open(tmp_path, config=config) as store:
        assert store.put_message(Message("T", bytes(10_000))).phy_offset == 0
        end = store.commit_log.max_offset
        with pytest.raises(
            InvalidMessageError, match=r"10001 bytes, max_message_size allows 10000.*raise max_message_size"
        ):
            store.put_message(Message("T", bytes(10_001)))
        assert store.commit_log.max_offset == end
    with MessageStore.open(tmp_path / "default", config=config_of(mapped_file_size_commit_log=1 << 23)) as store:
        assert store.put_message(Message("T", bytes(4 << 20))).size == 92 + (4 << 20)
        with pytest.raises(InvalidMessageError, match="4194305 bytes, max_message_size allows 4194304"):
            store.put_message(Message("T", bytes((4 << 20) + 1)))


@pytest.mark.parametrize("queue_id", [-1, 2**31, 1.5, "0", None, True + 2**40])
def test_bad_queue_ids(store, queue_id):
    with pytest.raises((InvalidMessageError, TypeError, ValueError)):
        store.put_message(Message("T"), queue_id)
    nothing_changed(store)


def test_the_largest_queue_id(store):
    assert store.put_message(Message("T"), 2**31 - 1).queue_offset == 0
    assert store.queue_ids("T") == [0, 2**31 - 1]


# --------------------------------------------------------------------------- hostile records in a log that is recovered


HOSTILE_TOPICS = ["../x", "../../x", "..", ".", "a/b", "/tmp/rmqstore-hostile", "a\0b", "é" * 60, "a b", "*"]
ESCAPING = ["../x", "../../x", "..", ".", "a/b", "/tmp/rmqstore-hostile", "a\0b"]


def hostile_store(root, topics, *, properties=b"") -> None:
    """A store of one segment, not closed in order and without queues, whose records have these topics."""
    log = b""
    for number, topic in enumerate(topics):
        log += oracle.encode_record(
            topic=topic, body=b"%d" % number, phy_offset=len(log), store_timestamp=T0, born_timestamp=T0,
            properties=properties or [("KEYS", f"k{number}")], queue_offset=topics[:number].count(topic),
        )  # fmt: skip
    (root / "commitlog").mkdir(parents=True)
    (root / "commitlog" / f"{0:020}").write_bytes(log.ljust(4096, b"\0"))
    (root / "abort").write_text("1")


@pytest.mark.parametrize("topic", HOSTILE_TOPICS)
def test_a_hostile_topic_in_the_log_stays_inside_the_store(tmp_path, topic):
    root = tmp_path / "a" / "b" / "store"
    hostile_store(root, ["Good", topic, "Good"])
    around = {path for path in tmp_path.rglob("*") if root not in path.parents}
    try:
        with MessageStore.open(root, config=config_of()) as store:
            opened = True
            # Whatever it does about the record, the others are there and nothing escaped.
            assert [message.body for message in store.get_message("Good")] == [b"0", b"2"]
            assert store.message_at(0).topic == "Good"
            assert [message.topic for message in store.messages()] == ["Good", topic, "Good"]
    except StoreError as error:
        opened = False
        assert topic in ESCAPING, error
        assert error.path is not None and str(error.path).startswith(str(root))
    assert {path for path in tmp_path.rglob("*") if root not in path.parents} == around
    assert not os.path.exists("/tmp/rmqstore-hostile")
    if topic not in ESCAPING:
        assert opened
    for folder, _, files in os.walk(root / "consumequeue"):
        assert os.path.relpath(folder, root / "consumequeue").count("/") <= 1
        assert all(name.isdigit() for name in files)
    # Reading it as it is works in any case.
    with MessageStore.open(root, config=config_of(), read_only=True) as store:
        assert [message.topic for message in store.messages()] == ["Good", topic, "Good"]
        assert store.get_message(topic, 0).status.name in ("NO_MESSAGE_IN_QUEUE", "FOUND")


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("topic", HOSTILE_TOPICS)
def test_a_hostile_topic_in_a_log_that_is_rebuilt(tmp_path, topic, beside):
    root = tmp_path / "a" / "b" / "store"
    output = tmp_path / "a" / "b" / "output" if beside else None
    hostile_store(root, ["Good", topic, "Good"])
    log = (root / "commitlog" / f"{0:020}").read_bytes()
    parents = {root, *([output] if beside else [])}
    around = {path for path in tmp_path.rglob("*") if not parents & {path, *path.parents}}
    try:
        rebuild(root, config=config_of(), output=output)
    except StoreError as error:
        assert topic in ESCAPING, error
        assert error.path is not None and str(error.path).startswith(str(tmp_path / "a" / "b"))
    else:
        units = ((output or root) / "consumequeue" / "Good" / "0" / f"{0:020}").read_bytes()
        assert [oracle.decode_unit(units, pos).size > 0 for pos in (0, 20, 40)] == [True, True, False]
    assert {path for path in tmp_path.rglob("*") if not parents & {path, *path.parents}} == around
    assert not os.path.exists("/tmp/rmqstore-hostile")
    assert (root / "commitlog" / f"{0:020}").read_bytes() == log
    for top in parents:
        for folder, _, _ in os.walk(top / "consumequeue"):
            assert os.path.relpath(folder, top / "consumequeue").count("/") <= 1


@pytest.mark.parametrize("name", ["../x", "..", "a/b", "", ".", "a\0b"])
def test_hostile_names_of_light_queues(tmp_path, name):
    root = tmp_path / "a" / "b" / "store"
    raw = f"INNER_MULTI_DISPATCH\x01%LMQ%good,{name}\x02INNER_MULTI_QUEUE_OFFSET\x010,0\x02".encode()
    hostile_store(root, ["Good"], properties=raw)
    config = config_of(enable_lmq=True, enable_multi_dispatch=True)
    around = {path for path in tmp_path.rglob("*") if root not in path.parents}
    try:
        with MessageStore.open(root, config=config) as store:
            assert len(store.get_message("Good")) == 1
    except StoreError as error:
        assert error.path is not None and str(error.path).startswith(str(root))
    assert {path for path in tmp_path.rglob("*") if root not in path.parents} == around
    for folder, _, _ in os.walk(root / "consumequeue"):
        assert os.path.relpath(folder, root / "consumequeue").count("/") <= 1
    message = Message("T", properties={"INNER_MULTI_DISPATCH": name})
    if name:
        with MessageStore.open(tmp_path / "other", config=config) as store:
            if "/" in name and name not in (".", ".."):
                # Java leaves such names out; either way nothing may be made outside.
                try:
                    store.put_message(message)
                except InvalidMessageError:
                    pass
            else:
                with pytest.raises(InvalidMessageError):
                    store.put_message(message)
        assert not (tmp_path / "x").exists()
        assert not (tmp_path / "other" / "x").exists()


def test_a_hostile_queue_offset_in_the_log_makes_no_huge_files(tmp_path):
    root = tmp_path / "store"
    log = oracle.encode_record(topic="T", store_timestamp=T0, queue_offset=2**60)
    (root / "commitlog").mkdir(parents=True)
    (root / "commitlog" / f"{0:020}").write_bytes(log.ljust(4096, b"\0"))
    (root / "abort").write_text("1")
    try:
        with MessageStore.open(root, config=config_of()) as store:
            assert store.message_at(0).queue_offset == 2**60
    except StoreError as error:
        assert error.path is not None
    used = sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(root) for name in names)
    assert used < 1 << 20


# --------------------------------------------------------------------------------------------------- offsets and times


@pytest.mark.parametrize("offset", [-1, -(2**63), 2**63 - 1, 2**40, 2**63, -(2**70), 10**30])
def test_offsets_outside_the_log(store, offset):
    end = store.commit_log.max_offset
    with pytest.raises(OffsetOutOfRangeError, match=f"outside the log, which holds 0 to {end}") as caught:
        store.message_at(offset)
    assert caught.value.path == os.path.join(store.path, "commitlog")
    assert isinstance(caught.value, IndexError)
    with pytest.raises(OffsetOutOfRangeError):
        store.message_at(end)


@pytest.mark.parametrize("offset", [1, 4, 36, 92])
def test_offsets_where_no_record_begins(store, offset):
    with pytest.raises(CorruptionError, match=f"no record begins at phy offset {offset}.*take offsets from") as caught:
        store.message_at(offset)
    assert caught.value.path == os.path.join(store.path, "commitlog", f"{0:020}")
    assert caught.value.pos == offset


def test_a_blank_is_no_message(tmp_path):
    with MessageStore.open(tmp_path, config=config_of()) as store:
        put = store.put_message(Message("T", bytes(3000)))
        store.put_message(Message("T", bytes(3000)))
        with pytest.raises(CorruptionError, match=f"no record begins at phy offset {put.size} .BLANK."):
            store.message_at(put.size)


def test_a_damaged_body(golden_copy):
    root = golden_copy("base")
    path = root / "commitlog" / f"{0:020}"
    data = bytearray(path.read_bytes())
    data[91] ^= 1
    path.write_bytes(data)
    with MessageStore.open(root, config=StoreConfig(**BASE), read_only=True) as store:
        with pytest.raises(ChecksumError, match="record at phy offset 0 does not agree with its CRC") as caught:
            store.message_at(0)
        assert (caught.value.path, caught.value.pos) == (str(path), 0)
        with pytest.raises(ChecksumError):
            store.message_by_id("0A00000100002A9F0000000000000000")
        first, *others = store.get_message("TopicTest", 0)
        assert first.corrupt and not any(message.corrupt for message in others)
        assert next(store.messages()).corrupt


@pytest.mark.parametrize("queue_offset", [-1, -(2**63), 2**62, 2**63 - 1])
def test_queue_offsets_out_of_range(store, queue_offset):
    got = store.get_message("T", 0, queue_offset)
    assert got.messages == []
    if queue_offset < 0:
        assert (got.status.name, got.next_queue_offset) == ("OFFSET_TOO_SMALL", 0)
    else:
        assert (got.status.name, got.next_queue_offset) == ("OFFSET_OVERFLOW_BADLY", 1)


@pytest.mark.parametrize("max_num", [-1, 0, 2**31, 2**63 - 1, 2**70])
def test_odd_numbers_of_messages(store, max_num):
    # RocketMQ always gives the first message, however few were asked for.
    assert len(store.get_message("T", 0, 0, max_num)) == 1
    assert len(store.query_message("T", "k", max_num)) == (1 if max_num > 0 else 0)
    assert len(store.get_message("T", 0, 0, 10, max_bytes=max_num)) == 1


@pytest.mark.parametrize(
    "msg_id",
    [
        "",
        "x",
        "0" * 31,
        "0" * 33,
        "0" * 55,
        "G" * 32,
        " " * 32,
        "0A00000100002A9F00000000000000é0",
        "-" * 32,
        "0x" + "0" * 30,
    ],
)
def test_bad_message_ids(store, msg_id):
    with pytest.raises(InvalidMessageError, match=r"message id|msg_id|hex"):
        store.message_by_id(msg_id)


def test_message_ids_of_other_offsets(store):
    with pytest.raises(OffsetOutOfRangeError):
        store.message_by_id("0A00000100002A9F0000000000010000")
    with pytest.raises(InvalidMessageError, match="negative phy offset"):
        store.message_by_id("0A00000100002A9FFFFFFFFFFFFFFFFF")
    with pytest.raises(CorruptionError):
        store.message_by_id("0A00000100002A9F0000000000000001")


def test_index_file_with_bad_offsets_and_times(tmp_path):
    with IndexFile.create(tmp_path / "1", config_of()) as index:
        for phy_offset in (-1, -(2**63)):
            with pytest.raises(OffsetOutOfRangeError, match="negative"):
                index.put_key("T#k", phy_offset, T0)
            with pytest.raises(OffsetOutOfRangeError, match="negative"):
                index.put_keys(["T#a", "T#k"], [0, phy_offset], [T0, T0])
        for phy_offset, time in ((2**63, T0), (0, 2**63), (0, -(2**63) - 1), ("0", T0), (0, None)):
            with pytest.raises((OverflowError, TypeError)):
                index.put_key("T#k", phy_offset, time)
        with pytest.raises(TypeError):
            index.put_key(b"T#k", 0, T0)
        with pytest.raises(ValueError, match="2 keys, 1 phy_offsets"):
            index.put_keys(["T#a", "T#b"], [1], [T0, T0])
        assert index.index_count == 1
        assert not any(index.mapped_file.hold())
        assert index.put_key("T#k", MAX, MAX)
        assert index.put_key("T#k", 0, 0)
        assert index.put_key("T#k", 5, -(2**63))
        assert index.select_phy_offset("T#k", 64, -(2**63), MAX) == [5, 0, MAX]
        assert index.select_phy_offset("T#k", -1) == []
        assert index.select_phy_offset("T#k", 64, MAX, 0) == []


@pytest.mark.parametrize("now", [0, 1, -1, -(2**63), 2**63 - 1, T0])
def test_store_times_at_the_ends_of_64_bits(tmp_path, now):
    config = config_of(clock=lambda: now)
    with MessageStore.open(tmp_path, config=config) as store:
        for number in range(30):
            put = store.put_message(Message("T", bytes(200), keys=[f"k{number % 2}"]))
            assert put.store_timestamp == now
        live = list(store.messages())
        assert {message.store_timestamp for message in live} == {message.born_timestamp for message in live} == {now}
        assert len(store.query_message("T", "k0", begin=now, end=now)) == 15
        assert store.query_message("T", "k0", begin=now + 1) == []
        assert store.query_message("T", "k0", end=now - 1) == []
        store.query_offsets("T", "k0")
        store.query_message("T", "k0", compat=True)
        if now != -1:
            # -1 stands for "unknown" in RocketMQ.
            assert store.offset_by_time("T", 0, now) == 0
            assert store.offset_by_time("T", 0, now, "upper") == 29
    for abort in (False, True):
        if abort:
            (tmp_path / "abort").write_text("1")
        with MessageStore.open(tmp_path, config=config) as store:
            assert list(store.messages()) == live
            assert store.max_queue_offset("T") == 30
            assert len(store.query_message("T", "k1", begin=now, end=now)) == 15


@pytest.mark.parametrize("born", [0, -1, -(2**63), 2**63 - 1])
def test_born_times_at_the_ends_of_64_bits(store, born):
    put = store.put_message(Message("T", born_timestamp=born))
    assert store.message_at(put.phy_offset).born_timestamp == born


@pytest.mark.parametrize("now", [2**63, -(2**63) - 1])
def test_a_clock_beyond_64_bits(tmp_path, now):
    with MessageStore.open(tmp_path, config=config_of(clock=lambda: now)) as store:
        with pytest.raises(InvalidMessageError, match=r"correct config\.clock"):
            store.put_message(Message("T"))
        assert store.commit_log.max_offset == 0


@pytest.mark.parametrize(("begin", "end"), [(MAX, 0), (-(2**63), MAX), (MAX, MAX), (0, 0), (-1, -1), (-(2**80), 2**80)])
def test_query_ranges_at_the_ends_of_64_bits(store, begin, end):
    hits = store.query_message("T", "k", begin=begin, end=end)
    assert len(hits) == (1 if begin <= store.message_at(0).store_timestamp <= end else 0)
    if -(2**63) <= begin <= MAX:
        store.query_message("T", "k", begin=begin, end=end, compat=True)
        assert store.query_offsets("T", "k", begin=begin, end=end) is not None
    assert store.offset_by_time("T", 0, min(max(begin, -(2**63)), MAX)) in (0, 1)


def test_an_index_header_of_lies(golden_copy):
    # Counts and slots that point anywhere: an answer or our error, never a hang or a read outside the file.
    root = golden_copy("base")
    for path in sorted((root / "index").iterdir()):
        for pos, number in ((36, 2**31 - 1), (36, -1), (40, 2**31 - 1), (40, -(2**31)), (96, 1), (0, -1)):
            data = bytearray(path.read_bytes())
            struct.pack_into(">i", data, pos, number)
            other = root / "other"
            other.write_bytes(data)
            with IndexFile.open(other, StoreConfig(**BASE), read_only=True) as index:
                for key in ("TopicTest#k1", "TopicTest#key0", "TopicTest#key23", "x"):
                    assert len(index.select_phy_offset(key)) <= 64


# ------------------------------------------------------------------------------------------------- opened twice, closed


def test_a_second_opening_in_one_process(tmp_path):
    with MessageStore.open(tmp_path, config=config_of()) as store:
        for path in (tmp_path, str(tmp_path), os.path.join(tmp_path, ".", "x", "..")):
            with pytest.raises(StoreLockedError, match=r"this process .* has the store open.*read_only=True") as caught:
                MessageStore.open(path, config=config_of())
            assert caught.value.path
        link = tmp_path.parent / "link"
        link.symlink_to(tmp_path)
        with pytest.raises(StoreLockedError):
            MessageStore.open(link, config=config_of())
        assert store.put_message(Message("T")).queue_offset == 0
    with MessageStore.open(tmp_path, config=config_of()) as store:
        assert store.put_message(Message("T")).queue_offset == 1


OPEN_IN_ANOTHER_PROCESS = textwrap.dedent("""
    import ast, sys
    from rmqstore import MessageStore, StoreConfig, StoreLockedError
    try:
        MessageStore.open(sys.argv[1], config=StoreConfig(**ast.literal_eval(sys.argv[2])))
    except StoreLockedError as error:
        print("locked:", error)
    else:
        print("opened")
""")


def open_in_another_process(root) -> str:
    command = [sys.executable, "-c", OPEN_IN_ANOTHER_PROCESS, str(root), repr(GEOMETRY)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_second_opening_in_another_process(tmp_path):
    with MessageStore.open(tmp_path, config=config_of()) as store:
        store.put_message(Message("T"))
        answer = open_in_another_process(tmp_path)
        assert answer.startswith(f"locked: process {os.getpid()} (")
        assert str(tmp_path / "lock") in answer
        assert store.put_message(Message("T")).queue_offset == 1
    assert open_in_another_process(tmp_path) == "opened\n"


def test_a_failed_second_opening_does_not_give_the_lock_away(tmp_path):
    with MessageStore.open(tmp_path, config=config_of()):
        with pytest.raises(StoreLockedError):
            MessageStore.open(tmp_path, config=config_of())
        assert open_in_another_process(tmp_path).startswith("locked")


@pytest.mark.parametrize("read_only", [True, False])
def test_use_after_close(golden_copy, read_only):
    store = MessageStore.open(golden_copy("base"), config=StoreConfig(**BASE), read_only=read_only)
    index = next(store.index_service.files())
    queue = store.queues.find("TopicTest", 0)
    commit_log = store.commit_log
    mapped_file = commit_log.segment(0)
    messages = store.messages()
    message = next(messages)
    view = mapped_file.hold(0, 100)
    wanted = bytes(view)
    store.close()
    store.close()
    assert store.closed
    assert "closed" in repr(store)
    calls = [
        lambda: store.put_message(Message("T")),
        lambda: store.put_messages([]),
        lambda: store.put_message_batch([Message("T")]),
        store.flush,
        store.refresh,
        lambda: store.message_at(0),
        lambda: store.message_by_id("0A00000100002A9F0000000000000000"),
        lambda: list(store.messages()),
        lambda: list(messages),
        lambda: store.get_message("TopicTest", 0),
        lambda: store.query_message("TopicTest", "k1"),
        lambda: store.query_message("TopicTest", "k1", compat=True),
        lambda: store.query_offsets("TopicTest", "k1"),
        lambda: store.offset_by_time("TopicTest", 0, 0),
        store.topics,
        lambda: store.queue_ids("TopicTest"),
        lambda: store.min_queue_offset("TopicTest"),
        lambda: store.max_queue_offset("TopicTest"),
        lambda: index.select_phy_offset("TopicTest#k1"),
        lambda: index.header,
        lambda: queue.unit(0),
        lambda: commit_log.message_at(0),
        lambda: mapped_file.region,
        lambda: mapped_file.hold(),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(StoreClosedError, match="closed"):
            pytest.fail(f"call {number} gave {call()!r}")
    with pytest.raises(StoreClosedError):
        with store:
            store.topics()
    # Messages that were read stay: they are copies, and a view keeps its memory.
    assert message.body == b"hello"
    assert message.properties["KEYS"] == "k1 k2"
    assert bytes(view) == wanted
    view.release()


def test_errors_are_ours_and_say_where():
    error = GeometryError("what to do", "/store/file", 17)
    assert isinstance(error, StoreError)
    assert str(error) == "what to do [/store/file, position 17]"
    assert (error.message, error.path, error.pos) == ("what to do", "/store/file", 17)
