"""Queues in RocksDB are read as any others: what the real store answers, what only the log has, damage, and a live writer."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import sys
import threading
import time

import golden
import pytest
import rocksdb_stores
from click.testing import CliRunner

pytest.importorskip("rocksdict")

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.cli import main
from rmqstore.consumequeue import database_queues
from rmqstore.consumer.consumer_offset import ConsumerOffsets
from rmqstore.errors import MissingDependencyError, UnsupportedFormatError

SMALL = {"mapped_file_size_commit_log": 16384, "mapped_file_size_consume_queue": 2000, "message_index_enable": False}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A function: the store of this name, unpacked once; nobody writes to it."""
    folders = {}

    def of(name):
        if name not in folders:
            folders[name] = rocksdb_stores.unpack(name, tmp_path_factory.mktemp("rocksdb"))
        return folders[name]

    trees = {}
    yield lambda name: trees.setdefault(name, (of(name), golden.tree(of(name))))[0]
    for name, (root, before) in trees.items():
        assert golden.tree(root) == before, name


@pytest.fixture
def copied(tmp_path):
    """A function: a store of this name of the test's own."""
    return lambda name: rocksdb_stores.unpack(name, tmp_path / "copy")


@pytest.fixture
def short_stretches(monkeypatch):
    """Stretches of 16 units, so that small stores have many."""
    monkeypatch.setattr(database_queues, "STRETCH_UNITS", 16)
    monkeypatch.setattr(database_queues, "_STRETCH_SIZE", 16 * 20)
    monkeypatch.setattr(database_queues, "_STRETCHES_KEPT", 5)


def answers(store, wanted=None):
    """The phy offsets of every queue by queue offset, read by gets."""
    found = {}
    for topic in store.topics():
        for queue_id in store.queue_ids(topic):
            low, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
            at, places = low, {}
            while at < high:
                result = store.get_message(topic, queue_id, at, 1000)
                assert not any(message.corrupt for message in result.messages)
                for message in result.messages:
                    places[message.phy_offset] = message
                assert result.next_queue_offset > at, (topic, queue_id, at, result.status)
                at = result.next_queue_offset
            found[topic, queue_id] = sorted(places)
    return found


def in_log(root, topics=None):
    """The same by the second reader, from the log alone."""
    found = rocksdb_stores.queued(root)
    return {
        key: sorted({record["phy_offset"] for record in records.values()})
        for key, records in found.items()
        if topics is None or key[0] in topics
    }


# -------------------------------------------------------------------------------------------- what the real store answers


@pytest.mark.parametrize("name", rocksdb_stores.STORES)
def test_every_answer_of_the_real_store(stores, name):
    with MessageStore.open(stores(name), read_only=True) as store:
        assert store.queue_database.damage == () and store.queue_database.completed == ()
        assert (store.undispatched is None) == (name == "store")
        (bounds,) = rocksdb_stores.lines(name, "store")
        assert (store.commit_log.min_offset, store.commit_log.max_offset) == (bounds["minPhy"], bounds["maxPhy"])
        queues = {(line["topic"], line["queueId"]): line for line in rocksdb_stores.lines(name, "queue")}
        assert set(queues) == {(topic, queue) for topic in store.topics() for queue in store.queue_ids(topic)}
        for (topic, queue_id), line in queues.items():
            found = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
            assert found == (line["min"], line["max"]), line
        num = 0
        for line in rocksdb_stores.lines(name, "msg"):
            (message,) = store.get_message(line["topic"], line["queueId"], line["queueOffset"], 1).messages
            assert (message.phy_offset, message.size, message.queue_offset) == (
                line["phy"],
                line["size"],
                line["queueOffset"],
            )
            assert (message.born_timestamp, message.store_timestamp) == (line["born"], line["store"])
            assert hashlib.sha256(message.body).hexdigest() == line["bodySha256"]
            assert message.tags == line.get("tags") and not message.corrupt
            num += 1
        assert num > 1000
        for line in rocksdb_stores.lines(name, "byTime"):
            topic, queue_id = line["topic"], line["queueId"]
            found = store.offset_by_time(topic, queue_id, line["time"], line["boundary"].lower())
            # Before the first message the real one says 0, which nobody can read any more; here it is the first one.
            assert found == max(line["offset"], store.min_queue_offset(topic, queue_id)), line


@pytest.mark.parametrize("name", rocksdb_stores.STORES)
def test_every_way_to_a_queue(stores, name, tmp_path):
    """Tables, tags, the consumer, and numbers say what the gets say."""
    root = stores(name)
    with MessageStore.open(root, read_only=True) as store:
        wanted = [line for line in rocksdb_stores.lines(name, "msg") if line["topic"] == "Orders"]
        for queue_id in range(4):
            of_queue = [line for line in wanted if line["queueId"] == queue_id]
            table = store.get_table("Orders", queue_id, columns=["queue_offset", "phy_offset", "tags"])
            assert table["phy_offset"].to_pylist() == [line["phy"] for line in of_queue]
            paid = store.get_table("Orders", queue_id, tags="paid", columns=["phy_offset"])["phy_offset"].to_pylist()
            assert paid == [line["phy"] for line in of_queue if line.get("tags") == "paid"] and paid
            got, at = [], 0
            while at < store.max_queue_offset("Orders", queue_id):
                result = store.get_message("Orders", queue_id, at, 100, tags="paid")
                got += [message.phy_offset for message in result.messages]
                at = result.next_queue_offset
            assert got == paid
        scanned = store.scan(["phy_offset"], topic="Orders").read_all()["phy_offset"].to_pylist()
        assert scanned == sorted(line["phy"] for line in wanted)
        stats = {(each.topic, each.queue_id): each for each in store.stats().queues}
        for line in rocksdb_stores.lines(name, "queue"):
            each = stats[line["topic"], line["queueId"]]
            assert (each.min_queue_offset, each.max_queue_offset) == (line["min"], line["max"])
            assert each.files == each.size == 0
        offsets = ConsumerOffsets.load(tmp_path / "offsets.json", read_only=False)
        with store.consume("Orders", "mine", offsets=offsets, consume_from="first", timeout=0) as consumer:
            taken = [message.phy_offset for message in consumer]
        assert sorted(taken) == scanned
        assert offsets.get("mine", "Orders", 0) == store.max_queue_offset("Orders", 0)


@pytest.mark.parametrize("name", rocksdb_stores.QUEUE_VARIANTS)
def test_small_stores(stores, name, short_stretches):
    root = stores(name)
    wanted = in_log(root, {"A", "B", "%LMQ%x", "%LMQ%y"} if name == "compacted" else None)
    with MessageStore.open(root, read_only=True) as store:
        found = answers(store)
        # A deleted topic is still in the log, and so is a further queue without a unit.
        assert found == {key: places for key, places in wanted.items() if name != "compacted" or key in found}
        bounds = {key: (store.min_queue_offset(*key), store.max_queue_offset(*key)) for key in found}
        completed = store.queue_database.completed
        assert bool(completed) == (name == "lost") and (store.undispatched is not None) == (name == "killed-wal")
    if name == "compacted":
        assert {bounds[topic, queue_id] for topic in "AB" for queue_id in (0, 1)} == {(454, 500)}
        assert bounds["%LMQ%x", 0] == (389, 429)
    elif name == "double-separate-lmq":
        assert bounds["%LMQ%x", 0] == bounds["%LMQ%y", 0] == (0, 60)
    elif name == "batch":
        assert bounds["Batch", 0] == (0, 12)
    elif name == "lost":
        assert sum(len(places) for places in found.values()) == 6000 and completed == ((0, 655360),)
    elif name == "killed-wal":
        assert sum(len(places) for places in found.values()) == 12000


def test_inner_batches(stores):
    with MessageStore.open(stores("batch"), read_only=True) as store:
        for offset in range(12):
            (message,) = store.get_message("Batch", 0, offset, 1).messages
            assert message.queue_offset == offset // 3 * 3 and message.is_inner_batch
        result = store.get_message("Batch", 0, 4, 3)
        assert result.next_queue_offset == 6 and (result.min_queue_offset, result.max_queue_offset) == (0, 12)


def test_inner_batches_whose_database_cannot_be_opened(stores, tmp_path):
    with MessageStore.open(stores("batch"), read_only=True) as store:
        whole = {
            key: [(each.queue_offset, each.body) for each in store.get_message(*key, 0, 1000)]
            for key in store._state.keys()
        }
    root = tmp_path / "store"
    shutil.copytree(stores("batch"), root)
    for table in (root / "consumequeue").glob("*.sst"):
        table.unlink()
    with MessageStore.open(root, read_only=True) as store:
        assert set(store._state.keys()) == whole.keys()
        for key, messages in whole.items():
            assert [(each.queue_offset, each.body) for each in store.get_message(*key, 0, 1000)] == messages
        assert store.stats().queues


def test_a_database_that_holds_a_part_of_a_migrated_store(tmp_path, short_stretches):
    """Files of a broker that has gone over to RocksDB since: older units there, later ones here, the rest in the log."""
    root, wanted = plain_store(tmp_path / "s", 120)
    units, offsets = database_of(root)
    for queue_id in (0, 1):
        shutil.rmtree(root / "consumequeue" / "B" / str(queue_id))
    part = {key: value for key, value in units.items() if not key.startswith(b"\0\0\0\1\1A\1\0\0\0\0\1") or key[-1] >= 20}
    rocksdb_stores.write_database(root / "consumequeue_rocksdb", {"default": part, "offset": offsets})
    with MessageStore.open(root, read_only=True, config=StoreConfig(**SMALL)) as store:
        assert answers(store) == wanted


# ----------------------------------------------------------------------------------------- damage, lost units, odd entries


def plain_store(path, num, **more):
    """A store with queue files, of topics A and B, and what is in its queues."""
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as store:
        for number in range(num):
            store.put_message(Message("AB"[number % 3 == 0], b"x" * 100, tags=f"t{number % 5}"), number % 2)
        return path, answers(store)


def database_of(root):
    """The entries that a broker's database would have of all records: of units, and of family ``offset``."""
    units, offsets, end = {}, {}, 0
    for (topic, queue_id), records in rocksdb_stores.queued(root).items():
        for queue_offset, record in sorted(records.items()):
            tags = record["properties"].get("TAGS")
            code = 0
            for letter in tags or "":
                code = (31 * code + ord(letter)) & 0xFFFFFFFF
            code -= (code >> 31) << 32
            unit = record["phy_offset"], record["size"], code, record["store_timestamp"]
            units[rocksdb_stores.unit_key(topic, queue_id, queue_offset)] = struct.pack(">qiqq", *unit)
            offsets[rocksdb_stores.max_key(topic, queue_id)] = struct.pack(">qq", record["phy_offset"], queue_offset)
            end = max(end, record["phy_offset"] + record["size"])
    offsets[rocksdb_stores.max_key("CHECKPOINT_TOPIC", 0)] = struct.pack(">q", end)
    return units, offsets


def rocksdb_store(path, num, change=lambda units, offsets: None):
    """The same store with its queues in RocksDB, after `change(units, offsets)`."""
    root, wanted = plain_store(path, num)
    shutil.rmtree(root / "consumequeue")
    units, offsets = database_of(root)
    change(units, offsets)
    rocksdb_stores.write_database(root / "consumequeue", {"default": units, "offset": offsets})
    return root, wanted


def opened(root):
    return MessageStore.open(root, read_only=True, config=StoreConfig(**SMALL))


def phy_of(value):
    return struct.unpack_from(">q", value)[0]


@pytest.mark.parametrize("lost", [(0, 16384), (5000, 16384), (5000, 32768), (40000, 49152), (20000, 65536)])
def test_units_that_a_kill_took(tmp_path, lost, short_stretches):
    """A recovery begins at a segment's start; what lay before it and was not flushed is gone."""

    def lose(units, offsets):
        for key in [key for key, value in units.items() if lost[0] <= phy_of(value) < lost[1]]:
            del units[key]

    root, wanted = rocksdb_store(tmp_path / "s", 400, lose)
    with opened(root) as store:
        assert answers(store) == wanted
        assert any(begin <= lost[0] + 400 and lost[1] - 400 <= end for begin, end in store.queue_database.completed)


def test_a_queue_of_which_everything_was_lost(tmp_path):
    def lose(units, offsets):
        for key in [key for key, value in units.items() if phy_of(value) < 16384 or key[5:6] == b"B"]:
            del units[key]
        for queue_id in (0, 1):
            del offsets[rocksdb_stores.max_key("B", queue_id)]

    root, wanted = rocksdb_store(tmp_path / "s", 400, lose)
    with opened(root) as store:
        found = answers(store)
        assert found["A", 0] == wanted["A", 0]
        # Of a queue that the database does not know, what lies where it lacks all units.
        assert found["B", 0] == [place for place in wanted["B", 0] if place < store.queue_database.completed[0][1]]


@pytest.mark.parametrize("left", [0, 5])
def test_a_hole_in_one_segment_and_a_queue_that_began_in_it(tmp_path, left):
    """Both ends of the hole are in one segment, and a queue has all of its units in it, or all but its last ones."""
    root = tmp_path / "s"
    with MessageStore.open(root, config=StoreConfig(**SMALL)) as store:
        for number in range(200):
            name = "C" if 40 <= number < 50 or (195 <= number and left) else "A"
            store.put_message(Message(name, b"x" * 100, tags="t"))
        wanted = answers(store)
    shutil.rmtree(root / "consumequeue")
    units, offsets = database_of(root)
    lost = {key for key, value in units.items() if 5000 <= phy_of(value) < 16384}
    assert sum(key[5:6] == b"C" for key in lost) == 10 and any(phy_of(value) < 5000 for value in units.values())
    if not left:
        del offsets[rocksdb_stores.max_key("C", 0)]
    rocksdb_stores.write_database(
        root / "consumequeue", {"default": {key: units[key] for key in units.keys() - lost}, "offset": offsets}
    )
    with opened(root) as store:
        assert answers(store) == wanted
        assert store.queue_database.completed == ((0, 16384),)


def test_any_units_that_are_missing_between_others(tmp_path, short_stretches):
    chosen = random.Random(7)
    for number in range(8):

        def lose(units, offsets):
            names = sorted(units)
            firsts = {key[:-8]: key for key in reversed(names)}
            lasts = {key[:-8]: key for key in names}
            inner = [key for key in names if key not in (firsts[key[:-8]], lasts[key[:-8]])]
            for key in chosen.sample(inner, chosen.randrange(1, len(inner))):
                del units[key]

        root, wanted = rocksdb_store(tmp_path / f"s{number}", 250, lose)
        with opened(root) as store:
            assert answers(store) == wanted
            assert store.queue_database.completed


@pytest.mark.parametrize("checkpoint", [0, 1, 4000, 16384, 16390, 40000, 10**6, 2**62, -5, None])
def test_any_checkpoint(tmp_path, checkpoint, short_stretches):
    """Whatever it says: units that the database has are not doubled, and what it lacks comes from the log."""

    def change(units, offsets):
        name = rocksdb_stores.max_key("CHECKPOINT_TOPIC", 0)
        if checkpoint is None:
            del offsets[name]
            return
        offsets[name] = struct.pack(">q", checkpoint)
        for key in [key for key, value in units.items() if phy_of(value) >= checkpoint]:
            del units[key]
        for key in [key for key, value in offsets.items() if key != name]:
            left = [unit for unit in units if unit[5:6] == key[5:6] and unit[10:11] == key[14:15] and unit[7:11] == key[11:15]]
            if left:
                last = max(left)
                offsets[key] = units[last][:8] + last[-8:]
            else:
                del offsets[key]

    root, wanted = rocksdb_store(tmp_path / "s", 400, change)
    with opened(root) as store:
        assert answers(store) == wanted
        assert (store.undispatched is None) == (checkpoint is not None and checkpoint >= 10**6)


def test_units_beyond_the_last_one_and_beyond_the_log(tmp_path):
    def change(units, offsets):
        value = struct.pack(">qiqq", 10**9, 200, 0, 5)
        for queue_offset in range(134, 140):
            units[rocksdb_stores.unit_key("A", 0, queue_offset)] = value
        units[rocksdb_stores.unit_key("A", 1, 133)] = value
        offsets[rocksdb_stores.max_key("A", 1)] = struct.pack(">qq", 10**9, 133)

    root, wanted = rocksdb_store(tmp_path / "s", 400, change)
    with opened(root) as store:
        assert store.max_queue_offset("A", 0) == len(wanted["A", 0]) and answers(store) == wanted


@pytest.mark.parametrize("queue_offset", [10**6, 2**40, 2**57])
def test_a_last_unit_far_away_takes_no_memory(tmp_path, queue_offset):
    def change(units, offsets):
        value = units[max(key for key in units if key.startswith(rocksdb_stores.unit_key("A", 0, 0)[:-8]))]
        units[rocksdb_stores.unit_key("A", 0, queue_offset)] = value
        offsets[rocksdb_stores.max_key("A", 0)] = value[:8] + struct.pack(">q", queue_offset)

    root, wanted = rocksdb_store(tmp_path / "s", 400, change)
    with opened(root) as store:
        found = answers(store)
        assert found == wanted and "no room" in store.queue_database.damage[0]


@pytest.mark.parametrize("value", [b"", bytes(27), bytes(29)])
def test_an_entry_that_is_no_unit(tmp_path, value, caplog):
    def change(units, offsets):
        units[rocksdb_stores.unit_key("A", 0, 50)] = value

    root, wanted = rocksdb_store(tmp_path / "s", 400, change)
    with opened(root) as store:
        assert answers(store) == wanted
        assert len(store.queue_database.damage) == 1 and "impossible entry" in caplog.text


def test_a_flipped_bit_anywhere_is_never_a_shorter_answer(tmp_path):
    root, wanted = rocksdb_store(tmp_path / "s", 300)
    chosen = random.Random(3)
    damaged = 0
    for table in sorted((root / "consumequeue").glob("*.sst")):
        data = table.read_bytes()
        for _ in range(12):
            position = chosen.randrange(len(data))
            table.write_bytes(data[:position] + bytes([data[position] ^ 1 << chosen.randrange(8)]) + data[position + 1 :])
            with opened(root) as store:
                assert answers(store) == wanted
                damaged += bool(store.queue_database.damage)
        for cut in (0, len(data) // 2):
            table.write_bytes(data[:cut])
            with opened(root) as store:
                assert answers(store) == wanted and store.queue_database.damage
        table.write_bytes(data)
    assert damaged > 8


@pytest.mark.parametrize("change", ["gone", "garbled", "a pipe", "a folder"])
@pytest.mark.parametrize("name", ["MANIFEST", ".sst", "CURRENT"])
def test_a_file_of_the_database_that_is_gone_or_garbled(tmp_path, name, change):
    root, wanted = rocksdb_store(tmp_path / "s", 300)
    file = next(file for file in (root / "consumequeue").iterdir() if name in file.name)
    file.unlink()
    if change == "garbled":
        file.write_bytes(b"garbage")
    elif change == "a pipe":
        os.mkfifo(file)
    elif change == "a folder":
        file.mkdir()
    with opened(root) as store:
        assert answers(store) == wanted and store.queue_database.damage
    answer = run("info", root)
    assert answer.exit_code == 0 and "damaged: the RocksDB database cannot be opened" in answer.stdout


def test_a_record_whose_crc_fails_keeps_its_place(tmp_path):
    """As with queue files: it is given, and marked, also where the database has nothing of it."""
    root, wanted = rocksdb_store(tmp_path / "s", 300, lambda units, offsets: (units.clear(), offsets.clear()))
    place = wanted["A", 0][20]
    with open(root / "commitlog" / f"{place // 16384 * 16384:020}", "r+b") as segment:
        segment.seek(place % 16384 + 90)
        segment.write(b"!")
    with opened(root) as store:
        (message,) = store.get_message("A", 0, 20, 1).messages
        assert message.corrupt and message.phy_offset == place
        assert store.max_queue_offset("A", 0) == len(wanted["A", 0])


def test_a_topic_that_names_no_directory(tmp_path, caplog):
    def change(units, offsets):
        offsets[rocksdb_stores.max_key("a/b", 0)] = struct.pack(">qq", 0, 0)

    root, wanted = rocksdb_store(tmp_path / "s", 50, change)
    with opened(root) as store:
        assert answers(store) == wanted and "'a/b' is not read" in caplog.text


def test_damage_of_the_lmq_queues_too(copied):
    root = copied("compacted")
    for table in (root / "consumequeue").glob("*.sst"):
        table.unlink()
    with MessageStore.open(root, read_only=True) as store:
        assert answers(store) == in_log(root)


# --------------------------------------------------------------------------------------------------- writers, commands


def run(*arguments):
    options = [each for name, value in SMALL.items() if name != "message_index_enable" for each in ("-o", f"{name}={value}")]
    return CliRunner().invoke(main, [str(each) for each in (*arguments, *options)])


def test_beside_a_live_writer_the_log_is_read_on(tmp_path):
    """The database is what it was when it was opened; whatever a broker stores since comes from the log."""
    writer_root, root = tmp_path / "w", tmp_path / "r"
    with MessageStore.open(writer_root, config=StoreConfig(**SMALL)) as writer:
        for number in range(100):
            writer.put_message(Message("A", b"x" * 50), number % 2)
        writer.flush()
        units, offsets = database_of(writer_root)
        rocksdb_stores.write_database(root / "consumequeue", {"default": units, "offset": offsets})
        (root / "commitlog").symlink_to(writer_root / "commitlog")
        with opened(root) as store:
            assert answers(store) == answers(writer) and store.undispatched is None
            begin = store.commit_log.max_offset
            for number in range(300):
                writer.put_message(Message("AC"[number % 4 == 0], b"y" * 50), number % 2)
                if number % 50 == 0:
                    store.refresh()
                    assert answers(store) == answers(writer)
            (message,) = store.get_message("A", 1, store.max_queue_offset("A", 1) - 1).messages[:1]
            assert message.body == b"y" * 50
            store.refresh()
            assert answers(store) == answers(writer)
            assert store.undispatched == (begin, store.commit_log.max_offset)
            # Nobody has to refresh: at the end of a queue, and for a new one, a reader looks by itself.
            writer.put_message(Message("D", b"new"), 3)
            time.sleep(0.02)
            assert store.get_message("D", 3, 0).messages[0].body == b"new"
            put = writer.put_message(Message("A", b"more"), 1)
            time.sleep(0.02)
            assert store.get_message("A", 1, put.queue_offset).messages[0].body == b"more"
            assert store.wait_for_messages(lambda: store.max_queue_offset("C", 0) > 0, 1)


def test_threads_read_while_the_log_goes_on(tmp_path, short_stretches):
    """No thread sees a unit that is not there yet, or misses one below a queue's end."""
    writer_root, root = tmp_path / "w", tmp_path / "r"
    with MessageStore.open(writer_root, config=StoreConfig(**SMALL)) as writer:
        for number in range(50):
            writer.put_message(Message("A", b"%d" % number), 0)
        units, offsets = database_of(writer_root)
        rocksdb_stores.write_database(root / "consumequeue", {"default": units, "offset": offsets})
        (root / "commitlog").symlink_to(writer_root / "commitlog")
        with opened(root) as store:
            stop, failures = threading.Event(), []

            def read():
                dice = random.Random()
                try:
                    while not stop.is_set():
                        high = store.max_queue_offset("A", 0)
                        at = dice.randrange(high)
                        for wanted in (at, high - 1):
                            result = store.get_message("A", 0, wanted, 1)
                            found = [(message.body, message.corrupt) for message in result.messages]
                            assert found == [(b"%d" % wanted, False)], (wanted, high, result)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=read) for _ in range(2)]
            for thread in threads:
                thread.start()
            for number in range(50, 1200):
                writer.put_message(Message("A", b"%d" % number), 0)
                if number % 100 == 0:
                    time.sleep(0.01)
            stop.set()
            for thread in threads:
                thread.join()
            assert failures == []


def test_writing_is_refused(copied, stores):
    for name in ("store", "double-separate-lmq", "double"):
        root = copied(name)
        before = golden.tree(root)
        with pytest.raises(UnsupportedFormatError, match=r"rebuild --what consumequeue") as caught:
            MessageStore.open(root)
        assert str(root) in caught.value.path and golden.tree(root) == before
        shutil.rmtree(root)


def test_without_rocksdict_the_extra_is_named(stores, monkeypatch):
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    for name in ("store", "killed-wal", "double"):
        with pytest.raises(MissingDependencyError, match=r"pip install 'rmqstore\[rocksdb\]'"):
            MessageStore.open(stores(name), read_only=True)
    answer = CliRunner().invoke(main, ["info", str(stores("store"))])
    # Once: not also for the settings, which are in RocksDB too.
    assert answer.exit_code != 0 and answer.stderr.count("rmqstore[rocksdb]") == 1


def test_commands(stores, tmp_path):
    root = str(stores("store.killed"))
    value = json.loads(CliRunner().invoke(main, ["info", root, "--json"]).stdout)
    assert value["queue_database"]["checkpoint"] == 1680568 and value["queue_database"]["queues"] == 18
    assert value["undispatched"] == [1680568, 1860450]
    text = CliRunner().invoke(main, ["info", root]).stdout
    assert "consumequeue/: 18 queues, up to phy offset 1680568" in text and "179882 bytes from phy offset 1680568" in text
    rows = [json.loads(line) for line in CliRunner().invoke(main, ["topics", root, "--json"]).stdout.splitlines()]
    assert {row["topic"]: row["messages"] for row in rows if "messages" in row}["Orders"] > 1600
    last = CliRunner().invoke(main, ["tail", root, "Orders", "-n", "3", "--json"]).stdout.splitlines()
    wanted = sorted(line["phy"] for line in rocksdb_stores.lines("store.killed", "msg") if line["topic"] == "Orders")
    assert [json.loads(line)["phy_offset"] for line in last] == wanted[-3:]
    metrics = CliRunner().invoke(main, ["metrics", root])
    assert metrics.exit_code == 0 and 'topic="Orders"' in metrics.stdout


def test_the_console_shows_them(stores):
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console

    for name, text in (("store", "18 queues in"), ("lost", "are missing or damaged")):
        client = testclient.TestClient(console.app(stores(name)), base_url="http://localhost")
        page = client.get("/").text
        assert text in page, page


def test_other_threads_and_forks(stores):
    root = stores("lost")
    with MessageStore.open(root, read_only=True) as store:
        wanted = answers(store)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if answers(store) == wanted else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("part", range(4))
def test_every_flip_and_truncation_of_a_database(tmp_path, part):
    """Whichever byte of whichever file: all is there, from the database or from the log."""
    root, wanted = rocksdb_store(tmp_path / "s", 60)
    places = []
    for file in sorted((root / "consumequeue").iterdir()):
        if file.suffix == ".sst" or file.name.startswith(("MANIFEST", "CURRENT")):
            places += [(file, position) for position in range(0, file.stat().st_size, 3)]
    raised = 0
    for file, position in places[part::4]:
        data = file.read_bytes()
        flipped = data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]
        for changed in (flipped, data[:position]) if position % 5 == 0 else (flipped,):
            file.write_bytes(changed)
            with opened(root) as store:
                assert answers(store) == wanted, (file.name, position, len(changed))
                raised += bool(store.queue_database.damage)
        file.write_bytes(data)
    assert raised > len(places) // 8
