"""Answers that are never wrong: what is not known is said, and what was not looked at is never "not there".

Stores here lose parts, or are left as a killed broker leaves them.  What an answer must be comes from the store before it
lost anything, or from what a real broker's own code read.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import struct
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracle
import pytest
from click.testing import CliRunner
from mappings import MAPS, mappings

from rmqstore import ConsumerOffsets, GeometryError, Message, MessageStore, StoreConfig
from rmqstore._core import index_key_hash
from rmqstore.cli import main
from rmqstore.errors import CorruptionError, InvalidMessageError, OffsetOutOfRangeError
from rmqstore.index.index_service import IndexService
from rmqstore.offline.export import ExportOptions, export
from rmqstore.offline.rebuild import rebuild
from rmqstore.selection import Selection, of_queue
from rmqstore.sources import Places
from rmqstore.store.columns import ColumnOptions, Columns
from rmqstore.store.local_queue import LocalQueue
from rmqstore.store.placed_columns import read_places

pyarrow = importlib.util.find_spec("pyarrow")

SMALL = {
    "mapped_file_size_commit_log": 8192,
    "mapped_file_size_consume_queue": 400,
    "max_hash_slot_num": 10,
    "max_index_num": 40,
    # Copied folders hold every byte of a file, also of one that lies with holes on the disk.
    "mapped_file_size_consume_queue_ext": 4096,
    "clean_resource_interval": 0,
}


def run(*arguments):
    """Return the answer of the command line."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def put_some(path, num=60, **more):
    """A closed store: `num` messages of topics A and B, with keys k0, k1, … of their own and "same"; their places."""
    with MessageStore.open(path, config=StoreConfig(**{**SMALL, **more})) as store:
        puts = [
            store.put_message(
                Message(
                    "AB"[i % 2],
                    b"%d" % i,
                    keys=[f"k{i}", "same"],
                    tags=f"t{i % 3}",
                    properties={"UNIQ_KEY": f"{i:032X}"},
                ),
                queue_id=i % 4 // 2,
            )
            for i in range(num)
        ]
        store.consumer_offsets.commit("g", "A", 0, 5)
        store.consumer_offsets.commit("g", "B", 0, 2)
    return puts


# ---------------------------------------------------------------------------------------------------- lag, queues elsewhere


def series(path):
    """The samples of a store's metrics, by name and labels."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from rmqstore.offline import metrics

    text = metrics.text(metrics.collect(path, StoreConfig(**SMALL))).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("what", ["folder", "files"])
def test_the_lag_in_a_queue_that_is_gone_is_unknown(tmp_path, what):
    put_some(tmp_path / "s")
    names = [
        ("rmqstore_consumer_lag_messages", (("group", "g"), ("queue_id", "0"), ("topic", topic))) for topic in "AB"
    ] + [("rocketmq_group_diff", (("group", "g"), ("topic", topic))) for topic in "AB"]
    found = series(tmp_path / "s")
    assert [found[name] for name in names] == [15 - 5, 15 - 2, 15 - 5 + 15, 15 - 2 + 15]
    folder = tmp_path / "s" / "consumequeue" / "A"
    shutil.rmtree(folder)
    if what == "files":
        (folder / "0").mkdir(parents=True)
    found = series(tmp_path / "s")
    assert [found.get(name) for name in names] == [None, 15 - 2, None, 15 - 2 + 15]
    assert ("rocketmq_group_get_latency_by_storetime", (("group", "g"), ("topic", "A"))) not in found
    with MessageStore.open(tmp_path / "s", read_only=True, config=StoreConfig(**SMALL)) as store:
        lags = {(each.topic, each.queue_id): each.lag for each in store.stats().consumers}
    assert lags == {("A", 0): None, ("B", 0): 13, ("B", 1): 15}
    answer = run("offsets", "show", tmp_path / "s", "-o", "max_hash_slot_num=10", "-o", "max_index_num=40")
    assert answer.exit_code == 0 and "unknown" in answer.stdout


def test_the_console_counts_no_lag_where_the_queue_is_gone(tmp_path):
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console

    put_some(tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / "consumequeue" / "A")
    client = testclient.TestClient(
        console.app(tmp_path / "s", config=StoreConfig(**SMALL)), base_url="http://localhost"
    )
    page = client.get("/consumers").text
    assert ">28 <small>unknown in 1 queues</small>" in page and "unknown: no queue" in page


# --------------------------------------------------------------------------------------------------------------- ids


def test_a_producers_id_is_an_id_too(tmp_path):
    path = tmp_path / "s"
    puts = put_some(path)
    # Read as an offset message id, this producer's id has phy offset 3109568622008467457.
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as store:
        unique = "7F0000010000518C2B27682FBF840001"
        place = store.put_message(Message("B", b"wanted", properties={"UNIQ_KEY": unique})).phy_offset
        assert store.message_by_id(unique).phy_offset == place
        assert store.message_by_id(unique, "B").body == b"wanted"
        with pytest.raises(
            OffsetOutOfRangeError, match=r"3109568622008467457 is outside the log.*topic A.*producer's id"
        ):
            store.message_by_id(unique, "A")
        # If both are possible, the record with this id at its place counts.
        assert store.message_by_id(puts[3].msg_id).phy_offset == puts[3].phy_offset
        # Number 7 of the producer, as an id, names a place in the first record; and 0 names that record itself.
        assert store.message_by_id(f"{7:032X}").body == b"7"
        with pytest.raises(InvalidMessageError, match=r"not an offset message id.*nor has a message of 2 topics"):
            store.message_by_id("no id")
    options = [each for name in ("max_hash_slot_num=10", "max_index_num=40") for each in ("-o", name)]
    answer = run("query", path, "--id", unique, *options)
    assert answer.exit_code == 0 and "wanted" in answer.stdout
    assert run("query", path, "B", "--id", unique, *options).stdout == answer.stdout
    answer = run("query", path, "A", "--id", unique, *options)
    assert answer.exit_code == 1 and "producer's id" in answer.stderr


def test_the_console_says_of_an_id_what_the_store_says(tmp_path):
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console

    puts = put_some(tmp_path / "s")
    client = testclient.TestClient(
        console.app(tmp_path / "s", config=StoreConfig(**SMALL)), base_url="http://localhost"
    )
    for msg_id, place in ((f"{7:032X}", puts[7].phy_offset), (puts[9].msg_id, puts[9].phy_offset)):
        found = client.get("/api/messages", params={"id": msg_id}).json()["messages"]
        assert [row["phy_offset"] for row in found] == [place]
    answer = client.get("/api/messages", params={"id": "7F0000010000518C2B27682FBF840001"})
    assert answer.status_code == 404 and "outside the log" in answer.text


# ------------------------------------------------------------------------------------ records of another message than the unit


@pytest.mark.parametrize("what", ["topic", "queue", "offset"])
def test_a_record_that_is_not_the_units_message_is_damaged(tmp_path, what):
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console

    path = tmp_path / "s"
    puts = put_some(path)
    # Of A/1: numbers 2, 6, 10 …; the record of the third is damaged outside of what its CRC covers.
    place = puts[10].phy_offset
    segment = path / "commitlog" / f"{place // 8192 * 8192:020}"
    data = bytearray(segment.read_bytes())
    record = place % 8192
    at = {"queue": record + 15, "offset": record + 27, "topic": data.index(b"10\x01A", record) + 3}[what]
    data[at] ^= 4
    segment.write_bytes(data)
    config = StoreConfig(**SMALL)
    with MessageStore.open(path, config=config, read_only=True) as store:
        for _ in range(2):
            # The second time by the files that the first one found.
            got = store.get_message("A", 1)
            assert [message.body for message in got] == [b"%d" % i for i in range(2, 60, 4)][: len(got)] and len(
                got
            ) == 15
            assert [message.corrupt for message in got] == [i == 2 for i in range(15)]
        assert "is not that of its queue unit" in got.messages[2].damage and got.messages[1].damage is None
        tagged = store.get_message("A", 1, tags="t1")
        assert [message.corrupt for message in tagged] == [message.body == b"10" for message in tagged]
        queue = store.queues.find("A", 1)
        walked = LocalQueue(queue, store.commit_log).walk(of_queue(queue.topic, queue.queue_id, 0, 32, None), 2**20)
        assert [message.corrupt for message in walked.messages] == [i == 2 for i in range(15)]
        with store.consume("A", "g2", offsets=ConsumerOffsets.load(tmp_path / "o.json", read_only=False), timeout=0) as consumer:
            assert [message.body for message in consumer if message.corrupt] == [b"10"]
    options = [each for name in ("max_hash_slot_num=10", "max_index_num=40") for each in ("-o", name)]
    lines = run("get", path, "A", 1, "--body", "none", *options).stdout.splitlines()
    assert ["CORRUPT (its topic, queue or queue offset is not" in line for line in lines] == [i == 2 for i in range(15)]
    (line,) = [json.loads(line) for line in run("get", path, "A", 1, "--json", *options).stdout.splitlines()][2:3]
    assert line["corrupt"] and "queue unit" in line["damage"]
    client = testclient.TestClient(console.app(path, config=config), base_url="http://localhost")
    rows = client.get("/api/queues/A/1", params={"from": 0}).json()["rows"]
    assert [row["message"]["corrupt"] for row in rows] == [i == 2 for i in range(15)]
    rows = client.get("/api/messages", params={"topic": "A"}).json()["messages"]
    assert [row["phy_offset"] for row in rows if row["corrupt"]] == [place]
    if pyarrow:
        tables_tell_of_the_other_message(path, config, place)
    chosen = ("--topic", "A", "--queue", 1, "--begin-queue-offset", 0)
    done = run("export", path, *chosen, *options, "-O", tmp_path / "out.jsonl")
    assert done.exit_code not in (0, 1) and "another message than its queue leads to" in done.stderr
    selection = Selection(topics=["A"], queue_ids=[1], begin_queue_offset=0)
    report = export(path, tmp_path / "o.jsonl", selection, ExportOptions(config=config, corrupt="skip"))
    assert (report.messages, report.damaged_stretches) == (14, 1)


def queue_rows(path, config, columns, size=10**9, **more):
    """What tasks of the Spark source yield for all queues of a store, in pieces of about `size` bytes."""
    batches, plan = (pytest.importorskip(f"rmqstore.spark.{name}") for name in ("batches", "plan"))
    from rmqstore.spark.options import ReadOptions

    chosen, schema = plan.LogPlan.of(path, config), batches.spark_arrow_schema(columns)
    selection = Selection(**{name: more.pop(name) for name in ("topics", "queue_ids", "tags") if name in more})
    options = ReadOptions(str(path), mode="queue", selection=selection, **more)
    return [
        row
        for piece in plan.queue_pieces(chosen, selection, size)
        for batch in batches.queue_piece_batches(batches.ReadJob.of(chosen, options, schema), piece)
        for row in batch.to_pylist()
    ]


def tables_tell_of_the_other_message(path, config, place):
    # They compared nothing but the size of the record with the unit.
    with MessageStore.open(path, config=config, read_only=True) as store:
        table = store.get_table("A", 1, columns=["phy_offset", "body", "corrupt"])
        assert table["corrupt"].to_pylist() == [i == 2 for i in range(15)]
        assert table["body"].to_pylist() == [b"%d" % i for i in range(2, 60, 4)]
        assert table["phy_offset"][2].as_py() == place
        tagged = store.get_table("A", 1, tags="t1", columns=["body", "corrupt"]).to_pylist()
        assert [row["corrupt"] for row in tagged] == [row["body"] == b"10" for row in tagged] and len(tagged) == 5
    chosen = {"topics": ("A",), "queue_ids": (1,)}
    with pytest.raises(CorruptionError, match="is another message: its topic, queue or queue offset"):
        queue_rows(path, config, ["body"], **chosen)
    assert len(queue_rows(path, config, ["body"], corrupt="skip", **chosen)) == 14
    rows = queue_rows(path, config, ["body", "_corrupt"], corrupt="report", **chosen)
    assert [row["_corrupt"] is not None for row in rows] == [i == 2 for i in range(15)]
    assert "is not that of its queue unit" in rows[2]["_corrupt"]


@pytest.mark.parametrize("names", ["%LMQ%x,%LMQ%y", "%LMQ%é,%LMQ%x"])
def test_messages_of_further_queues_are_whole(tmp_path, names):
    config = StoreConfig(**SMALL, enable_lmq=True, enable_multi_dispatch=True)
    with MessageStore.open(tmp_path / "s", config=config) as store:
        for i in range(4):
            store.put_message(Message("A", b"%d" % i, properties={"INNER_MULTI_DISPATCH": names}), queue_id=1)
            # Numbers of more than a digit, and none that is the same in two queues.
            store.put_messages([Message("A", b"-", properties={"INNER_MULTI_DISPATCH": "%LMQ%x"})] * 5, queue_id=0)
        for queue in names.split(","):
            for _ in range(2):
                pages = [store.get_message(queue, 0, first, num) for first, num in ((0, 4), (4, 16), (20, 16))]
                got = [message for page in pages for message in page]
                assert [message.body for message in got if message.body != b"-"] == [b"%d" % i for i in range(4)]
                assert not any(message.corrupt for message in got)
                if pyarrow:
                    table = store.get_table(queue, columns=["body", "corrupt"])
                    assert table.to_pylist() == [{"body": message.body, "corrupt": False} for message in got]
        if pyarrow:
            # A record of further queues is not that of each of them.
            queue = store.queues.find("%LMQ%x", 0)
            made = Columns(ColumnOptions(["corrupt"], 64), store.commit_log.crc_check)
            places, sizes, _ = queue.units(0, 24)
            num = len(places)
            assert num > 10
            for offsets, wrong in ((np.arange(num), 0), (np.arange(num) + 1, num)):
                given = Places(places, offsets, sizes, np.zeros(len(places), np.int64))
                (batch,), _ = read_places(LocalQueue(queue, store.commit_log), made, given)
                assert batch["corrupt"].true_count == wrong


# ------------------------------------------------------------------------------------------------ records after damage


def damage_record(path, place, how, size):
    """Damage the record at `place` of a store of `SMALL`: its head, or all of it."""
    with open(path / "commitlog" / f"{place // 8192 * 8192:020}", "r+b") as segment:
        segment.seek(place % 8192)
        segment.write({"zeros": bytes(size), "size": b"\0\0\0\1", "magic": b"\0\0\0\xff\1\2\3\4"}[how])


@pytest.mark.parametrize("how", ["zeros", "size", "magic"])
@pytest.mark.parametrize("segment", ["newest", "older"])
def test_damage_is_no_end_where_messages_follow_it(tmp_path, how, segment):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    puts = put_some(path)
    places = [put.phy_offset for put in puts]
    first = next(i for i, place in enumerate(places) if place >= places[-1] // 8192 * 8192)
    lost = first + 3 if segment == "newest" else 3
    assert len(puts) - first > 6
    damage_record(path, places[lost], how, puts[lost].size)
    left = places[:lost] + places[lost + 1 :]
    with MessageStore.open(path, config=config, read_only=True) as store:
        for _ in range(2):
            assert store.commit_log.max_offset == places[-1] + puts[-1].size
            assert [message.phy_offset for message in store.messages()] == left
            assert store.message_at(places[-1]).body == b"59"
            pages = [store.get_message(topic, queue_id) for topic in "AB" for queue_id in (0, 1)]
            assert sorted(each.phy_offset for page in pages for each in page) == left
            assert [each.phy_offset for each in store.query_message("B", "k59")] == places[-1:]
            if pyarrow:
                rows = [row for batch in store.scan(["phy_offset"]) for row in batch.to_pylist()]
                assert [row["phy_offset"] for row in rows] == left
            store.refresh()
    shown = run("tail", path, "A", "-n", 100, "--json", *OPTIONS)
    assert len(shown.stdout.splitlines()) == sum(i % 2 == 0 for i in range(60) if i != lost)


def test_an_unfinished_record_of_a_living_writer_is_the_end(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    with MessageStore.open(path, config=config) as writer:
        puts = [writer.put_message(Message("A", b"%d" % i)) for i in range(4)]
        end = puts[-1].phy_offset
        segment = path / "commitlog" / f"{0:020}"
        whole = segment.read_bytes()[end : end + puts[-1].size]
        with open(segment, "r+b") as file:
            # Like Java, write the first byte first.
            for size in (0, 4, 8, 30, puts[-1].size - 5):
                file.seek(end)
                file.write(whole[:size] + bytes(len(whole) - size))
                file.flush()
                with MessageStore.open(path, config=config, read_only=True) as reader:
                    for _ in range(2):
                        assert reader.commit_log.max_offset == end, size
                        assert [message.body for message in reader.messages()] == [b"0", b"1", b"2"]
                        reader.refresh()
                    file.seek(end)
                    file.write(whole)
                    file.flush()
                    reader.refresh()
                    assert len(list(reader.messages())) == 4
        writer.put_message(Message("A", b"4"))
        with MessageStore.open(path, config=config, read_only=True) as reader:
            writer.put_message(Message("A", b"5"))
            damage_record(path, puts[-1].phy_offset, "magic", puts[-1].size)
            reader.refresh()
            assert [message.body for message in reader.messages()] == [b"0", b"1", b"2", b"4", b"5"]


def test_a_follower_passes_damage_that_it_meets(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    with MessageStore.open(path, config=config) as writer:
        writer.put_message(Message("A", b"0"))
        with MessageStore.open(path, config=config, read_only=True) as reader:
            puts = [writer.put_message(Message("A", b"%d" % i)) for i in range(1, 5)]
            damage_record(path, puts[1].phy_offset, "magic", puts[1].size)
            reader.refresh()
            assert [message.body for message in reader.messages()] == [b"0", b"1", b"3", b"4"]


# ------------------------------------------------------------------------------------------- what the index does not cover


def content(messages):
    return [(message.phy_offset, message.topic, message.body) for message in messages]


def asked(store, num, **more):
    """Return the answers of a store by every key, unique key and tag."""
    answers = [store.query_message("AB"[i % 2], f"k{i}", **more) for i in range(num)]
    answers += [store.query_message("AB"[i % 2], f"{i:032X}", index_type="U", **more) for i in range(num)]
    answers += [store.query_message(topic, "same", 1000, **more) for topic in "AB"]
    answers += [store.query_message("A", tag, 1000, index_type="T", **more) for tag in ("t0", "t1", "t2")]
    return [content(answer) for answer in answers], answers


def lose_all(path):
    shutil.rmtree(path / "index")


def lose_files(*numbers):
    def lose(path):
        names = sorted(os.listdir(path / "index"))
        assert len(names) > 4
        for number in numbers:
            os.unlink(path / "index" / names[number])

    return lose


def damage_header(path):
    name = sorted(os.listdir(path / "index"))[2]
    data = bytearray((path / "index" / name).read_bytes())
    data[16:24] = struct.pack(">q", 17)
    (path / "index" / name).write_bytes(data)


def empty_file(path):
    name = sorted(os.listdir(path / "index"))[1]
    size = (path / "index" / name).stat().st_size
    (path / "index" / name).write_bytes(bytes(size))


LOSSES = {
    "all": lose_all, "oldest": lose_files(0), "middle": lose_files(2), "two": lose_files(1, 3), "newest": lose_files(-1),
    "newest two": lose_files(-1, -2),
    "header": damage_header, "empty": empty_file, "all but one": lambda path: lose_files(*range(3), -1)(path),
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_what_the_index_lacks_is_found_in_the_log(tmp_path, loss):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    put_some(path)
    with MessageStore.open(path, config=config, read_only=True) as store:
        wanted, answers = asked(store, 60)
        assert all(answer.complete and answer.uncovered == () for answer in answers) and all(wanted)
        java = [store.query_offsets("A", "same", 64), content(store.query_message("B", "same", compat=True))]
        table = store.query_table([f"k{i}" for i in range(0, 60, 2)], "A") if pyarrow else None
    LOSSES[loss](path)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    with MessageStore.open(path, config=config, read_only=True) as store:
        found, answers = asked(store, 60)
        assert found == wanted and all(answer.complete for answer in answers)
        # The second time by the short way.
        assert asked(store, 60)[0] == wanted
        if table is not None:
            assert store.query_table([f"k{i}" for i in range(0, 60, 2)], "A").equals(table)
        store.refresh()
        assert asked(store, 60)[0] == wanted
        # Java's answer stays Java's.
        lost = [store.query_offsets("A", "same", 64), content(store.query_message("B", "same", compat=True))]
        assert lost != java or loss == "header"
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


# What a field of an entry becomes.  A chain that ends early, or leaves out entries of its own, looks like any other.
ENTRY_DAMAGE = {
    "prev beyond the file": lambda entry: entry._replace(prev=2**31 - 1),
    "prev itself": lambda entry: entry._replace(prev=entry.number),
    "prev negative": lambda entry: entry._replace(prev=-5),
    "prev of another chain": lambda entry: entry._replace(prev=entry.foreign) if entry.foreign else None,
    "phy offset beyond the log": lambda entry: entry._replace(phy_offset=entry.phy_offset + 2**40),
    "phy offset negative": lambda entry: entry._replace(phy_offset=-entry.phy_offset - 1),
    "phy offset within a record": lambda entry: entry._replace(phy_offset=entry.phy_offset + 1),
    "phy offset of another record": lambda entry: entry._replace(phy_offset=entry.other),
    "key hash": lambda entry: entry._replace(key_hash=entry.key_hash ^ 64),
    "key hash negative": lambda entry: entry._replace(key_hash=entry.key_hash - 2**31),
    "slot beyond the file": 2**31 - 1,
    "slot negative": -1,
    "slot of another chain": "foreign",
}
Entry = namedtuple("Entry", "key_hash phy_offset time_diff prev number foreign other")


def damage_entry(file, number, what, places):
    """Damage an entry of an index file of `SMALL`, or the slot that leads to it; the phy offset that it had, or None."""
    data = bytearray(file.read_bytes())
    at = 80 + 20 * number
    fields = struct.unpack_from(">iqii", data, at)
    others = [i for i in range(1, number) if struct.unpack_from(">i", data, 80 + 20 * i)[0] % 10 != fields[0] % 10]
    other = places[(places.index(fields[1]) + 7) % len(places)]
    entry = Entry(*fields, number, max(others, default=0), other)
    if "slot" in what:
        value = ENTRY_DAMAGE[what]
        value = entry.foreign if value == "foreign" else value
        if not value:
            return None
        struct.pack_into(">i", data, 40 + 4 * (entry.key_hash % 10), value)
    elif (damaged := ENTRY_DAMAGE[what](entry)) is None:
        return None
    else:
        struct.pack_into(">iqii", data, at, *damaged[:4])
    file.write_bytes(data)
    return entry.phy_offset


@pytest.mark.parametrize("which", [2, -1], ids=["full file", "newest file"])
@pytest.mark.parametrize("what", ENTRY_DAMAGE)
def test_what_a_damaged_entry_hides_is_found_in_the_log(tmp_path, caplog, what, which):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    places = [put.phy_offset for put in put_some(path)]
    with MessageStore.open(path, config=config, read_only=True) as store:
        wanted = asked(store, 60)[0]
        tables = [store.query_table(["same", f"k{i}"], "AB"[i % 2], max_num=100) for i in range(60)] if pyarrow else []
    file = path / "index" / sorted(os.listdir(path / "index"))[which]
    sound = file.read_bytes()
    last = struct.unpack_from(">i", sound, 36)[0] - 1
    tried = 0
    for number in {1, 2, last // 2, last - 1, last}:
        file.write_bytes(sound)
        place = damage_entry(file, number, what, places)
        if place is None:
            continue
        tried += 1
        i = places.index(place)
        # Each by a reader who knows nothing of the damage yet, as it is the first that meets it.
        for key, answer in ((f"k{i}", wanted[i]), ("same", wanted[120 + i % 2])):
            with MessageStore.open(path, config=config, read_only=True) as store:
                assert content(store.query_message("AB"[i % 2], key, 1000)) == answer
        with MessageStore.open(path, config=config, read_only=True) as store:
            # The part that a bound leaves out is reported, and nothing else is missing.
            few = store.query_message("AB"[i % 2], f"k{i}", max_log_bytes=0)
            assert content(few) == wanted[i] or any(begin <= place < end for begin, end in few.uncovered)
            found, answers = asked(store, 60)
            assert found == wanted and all(answer.complete for answer in answers)
            assert asked(store, 60)[0] == wanted
        if pyarrow:
            with MessageStore.open(path, config=config, read_only=True) as store:
                assert store.query_table(["same", f"k{i}"], "AB"[i % 2], max_num=100).equals(tables[i])
    assert tried > 1 and any(str(file) in record.getMessage() for record in caplog.records)


def test_a_damaged_entry_of_a_store_that_is_written_to_hides_nothing(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    places = [put.phy_offset for put in put_some(path, 62)]
    with (
        MessageStore.open(path, config=config) as store,
        MessageStore.open(path, config=config, read_only=True) as reader,
    ):
        file = path / "index" / sorted(os.listdir(path / "index"))[-1]
        with open(file, "r+b") as damaged:
            for number in range(1, struct.unpack_from(">i", file.read_bytes(), 36)[0]):
                damaged.seek(80 + 20 * number + 16)
                damaged.write(struct.pack(">i", 2**30))
        for i in range(62, 72):
            place = store.put_message(Message("A", b"%d" % i, keys=[f"k{i}", "same"])).phy_offset
            for each in (store, reader):
                each.refresh()
                assert content(each.query_message("A", f"k{i}")) == [(place, "A", b"%d" % i)]
                assert len(each.query_message("A", "same", 1000)) == 31 + i - 61
                assert content(each.query_message("B", "k61")) == [(places[61], "B", b"61")]


def test_every_front_end_finds_what_a_damaged_entry_hides(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    places = [put.phy_offset for put in put_some(path)]
    wanted = run("query", path, "A", "same", "--max-num", 100, *OPTIONS, "--json").stdout
    file = path / "index" / sorted(os.listdir(path / "index"))[2]
    data = file.read_bytes()
    # Entries of that key, in their chain.
    key_hash = index_key_hash("A", "same")
    number = [i for i in range(1, 40) if struct.unpack_from(">i", data, 80 + 20 * i)[0] == key_hash][2]
    hidden = places.index(damage_entry(file, number, "prev beyond the file", places))
    found = run("query", path, "A", "same", "--max-num", 100, *OPTIONS, "--json")
    assert found.exit_code == 0 and found.stdout == wanted and len(wanted.splitlines()) == 30
    keys = [f"k{i}" for i in range(0, 60, 2)] + ["same"]
    for what in ("prev beyond the file", "phy offset within a record", "key hash"):
        file.write_bytes(data)
        damage_entry(file, number, what, places)
        selection = Selection(topics=["A", "B"], keys=["same"])
        report = export(path, tmp_path / "o.jsonl", selection, ExportOptions(config=config, force=True))
        assert report.messages == 60, (what, hidden)
        if importlib.util.find_spec("starlette"):
            console_pages_show_all(path, config, places)
        if importlib.util.find_spec("pyspark"):
            spark_finds_all(path, config, keys, places)


def console_pages_show_all(path, config, places):
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console

    client = testclient.TestClient(console.app(path, config=config), base_url="http://localhost")
    for size in (7, 100):
        parameters, found, uncovered = {"topic": "A", "key": "same", "size": size}, [], []
        while True:
            page = client.get("/api/messages", params=parameters).json()
            found += [row["phy_offset"] for row in page["messages"]]
            uncovered += page["uncovered"]
            if page["next_cursor"] is None:
                break
            parameters["cursor"] = page["next_cursor"]
        missing = set(places[::2]) - set(found)
        assert len(found) == len(set(found)) and sorted(found, reverse=True) == found
        # Rows that were hidden above an earlier page stay hidden, and this is reported.
        assert all(any(begin <= place < end for begin, end in uncovered) for place in missing)
        assert not missing or size == 7


def spark_finds_all(path, config, keys, places):
    pytest.importorskip("pyspark")
    from rmqstore.spark.plan import LogPlan
    from rmqstore.spark.query import _KeyJob

    files = sorted(os.listdir(path / "index"))
    selection = Selection(begin=0, end=2**62, max_num=100)
    search = _KeyJob(LogPlan.of(path, config), files, ("phy_offset",), selection, with_log=False)
    found = [row for batch in search.batches(keys, ["A"] * len(keys)) for row in batch.to_pylist()]
    assert sorted(row["phy_offset"] for row in found if row["key"] == "same") == places[::2]
    assert sorted(row["phy_offset"] for row in found if row["key"] != "same") == places[::2]


@pytest.mark.parametrize("loss", ["all", "middle", "newest two"])
def test_a_bound_on_the_search_is_said(tmp_path, loss):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    put_some(path, 120)
    with MessageStore.open(path, config=config, read_only=True) as store:
        wanted = asked(store, 120)[0]
        end = store.commit_log.max_offset
    LOSSES[loss](path)
    with MessageStore.open(path, config=config, read_only=True) as store:
        answer = store.query_message("A", "same", 1000, max_log_bytes=0)
        assert not answer.complete
        lost = sum(until - begin for begin, until in answer.uncovered)
        assert 0 < lost <= end and (loss != "all" or answer.uncovered == ((0, end),))
        seen = []
        half = store.query_message("A", "same", 1000, max_log_bytes=lost // 2, progress=lambda *at: seen.append(at))
        assert not half.complete and seen and all(done <= total for done, total in seen)
        # Of what is missing nothing lies outside of what the answer says that nobody looked at.
        whole = {place for place, *_ in wanted[240]}
        missing = whole - {message.phy_offset for message in half}
        assert missing and all(any(begin <= place < until for begin, until in half.uncovered) for place in missing)
        left = sum(until - begin for begin, until in half.uncovered)
        assert lost - lost // 2 <= left < lost - lost // 2 + 2000
        # Every kind of question says so, also where it finds something.
        for answer in asked(store, 120, max_log_bytes=0)[1]:
            assert not answer.complete
        found, answers = asked(store, 120, max_log_bytes=None)
        assert found == wanted and all(answer.complete for answer in answers)


def test_tags_that_no_index_has_are_not_said_to_be_absent(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL, index_tags=False)
    put_some(path, index_tags=False)
    with MessageStore.open(path, config=config, read_only=True) as store:
        answer = store.query_message("A", "t1", index_type="T")
        assert answer == [] and answer.uncovered == ((0, store.commit_log.max_offset),)
        assert store.query_message("A", "k2").complete
    with MessageStore.open(path, config=StoreConfig(**SMALL, message_index_enable=False), read_only=True) as store:
        assert not store.query_message("A", "k2").complete


def test_a_reader_beside_a_writer_has_the_writers_index(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    with (
        MessageStore.open(path, config=config) as writer,
        MessageStore.open(path, config=config, read_only=True) as reader,
    ):
        for i in range(80):
            place = writer.put_message(Message("A", b"%d" % i, keys=[f"k{i}", "same"])).phy_offset
            time.sleep(0.006 if i % 20 == 0 else 0)
            assert content(writer.query_message("A", f"k{i}")) == [(place, "A", b"%d" % i)]
            if i % 20 == 0:
                reader.refresh()
                assert content(reader.query_message("A", f"k{i}")) == [(place, "A", b"%d" % i)]
                assert len(reader.query_message("A", "same", 100)) == i + 1


@pytest.mark.parametrize("torn", [False, True])
def test_a_writer_that_is_ahead_of_its_reader_is_believed(tmp_path, caplog, torn):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    with (
        MessageStore.open(path, config=config) as writer,
        MessageStore.open(path, config=config, read_only=True) as reader,
    ):
        for i in range(80):
            writer.put_message(Message("A", b"%d" % i, keys=[f"k{i}"]))
            time.sleep(0.006 if i % 20 == 0 else 0)
            if i == 10:
                reader.refresh()
                assert reader.query_message("A", "k10").complete
        # The index is looked at before the log is: its files speak of records that the reader has not heard of.
        names = sorted(os.listdir(path / "index"))
        assert len(names) > 2
        if torn:
            # A state between the two writes of a put: the count is new, the end is of the entry before.
            with open(path / "index" / names[-1], "r+b") as file:
                header = bytearray(file.read(40))
                header[24:32] = struct.pack(">q", writer.query_message("A", "k78")[0].phy_offset)
                file.seek(0)
                file.write(header)
        reader.index_service.take(names)
        assert reader._state.log_index.stretches() == []
        for i in (3, 40, 78):
            answer = reader.query_message("A", f"k{i}")
            assert [message.body for message in answer] == [b"%d" % i] and answer.complete
    assert not caplog.records


def test_an_index_file_that_goes_while_it_is_looked_at(tmp_path, monkeypatch):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    put_some(path)
    real, gone = IndexService.file, []

    def file(self, name):
        if name == self.names[-1] and not gone:
            gone.append(name)
            raise OffsetOutOfRangeError("the index file was deleted since it was listed", name)
        return real(self, name)

    with MessageStore.open(path, config=config, read_only=True) as store:
        monkeypatch.setattr(IndexService, "file", file)
        store._state.log_index.cover(None)
        assert len(store.query_message("A", "same", 100)) == 30 and gone


OPTIONS = [each for name in ("max_hash_slot_num=10", "max_index_num=40") for each in ("-o", name)]


def test_the_command_line_searches_the_log_and_says_what_it_left_out(tmp_path):
    path = tmp_path / "s"
    put_some(path, 120)
    wanted = run("query", path, "A", "k2", *OPTIONS)
    assert wanted.exit_code == 0 and "phy" in wanted.stdout
    lose_all(path)
    assert run("query", path, "A", "k2", *OPTIONS).stdout == wanted.stdout
    cut = run("query", path, "A", "k2", *OPTIONS, "--max-log-bytes", 9000)
    assert cut.exit_code == 1 and cut.stdout == ""
    assert "has key k2 in the part of the log that was searched" in cut.stderr
    assert re.search(
        r"[0-9]{5} bytes of the log are not indexed and were not searched: phy offsets 0 to [0-9]+ \(stored 20.* to 20", cut.stderr
    )
    # The same where something is found: there may be more.
    cut = run("query", path, "A", "same", *OPTIONS, "--max-log-bytes", 9000, "--json")
    *messages, last = map(json.loads, cut.stdout.splitlines())
    assert cut.exit_code == 1 and messages and last["complete"] is False and last["uncovered"][0][0] == 0
    whole = run("query", path, "A", "same", *OPTIONS, "--json")
    assert whole.exit_code == 0 and len(whole.stdout.splitlines()) == 60


def test_many_keys_in_one_process(tmp_path):
    path = tmp_path / "s"
    put_some(path)
    several = run("query", path, "A", "k2", "k4", "k8", *OPTIONS)
    one_by_one = [run("query", path, "A", key, *OPTIONS).stdout for key in ("k2", "k4", "k8")]
    assert several.exit_code == 0 and several.stdout == "".join(one_by_one) and all(one_by_one)
    (tmp_path / "keys").write_text("k4\r\n\nk8\nnone\n")
    both = run("query", path, "A", "k2", "--keys-from", tmp_path / "keys", *OPTIONS)
    assert both.exit_code == 1 and both.stdout == several.stdout
    assert both.stderr.count("no message of topic A has key none") == 1
    piped = CliRunner().invoke(main, ["query", str(path), "A", "--keys-from", "-", *OPTIONS], input="k2\nk4\nk8")
    assert piped.exit_code == 0 and piped.stdout == several.stdout
    # Without a topic all are asked; this store has no other one with these keys.
    everywhere = run("query", path, "--keys-from", tmp_path / "keys", *OPTIONS)
    assert everywhere.exit_code == 1 and everywhere.stdout == "".join(one_by_one[1:])
    assert run("query", path, "A", *OPTIONS).exit_code == 2


@pytest.mark.parametrize("loss", ["all", "middle", "newest two"])
def test_the_console_searches_the_log(tmp_path, monkeypatch, loss):
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console
    from rmqstore.store import pages as store_pages

    path = tmp_path / "s"
    puts = put_some(path)
    LOSSES[loss](path)
    client = testclient.TestClient(console.app(path, config=StoreConfig(**SMALL)), base_url="http://localhost")

    def pages():
        found, cursor = [], ""
        while cursor is not None:
            value = client.get(
                "/api/messages", params={"topic": "A", "key": "same", "max_num": 7, "cursor": cursor}
            ).json()
            found += [row["phy_offset"] for row in value["messages"]]
            cursor = value["next_cursor"]
        return found, value

    found, value = pages()
    assert found == [put.phy_offset for put in puts[::2]][::-1] and value["complete"] and value["uncovered"] == []
    monkeypatch.setattr(store_pages, "_LOG_BYTES", 0)
    client = testclient.TestClient(console.app(path, config=StoreConfig(**SMALL)), base_url="http://localhost")
    less, value = pages()
    assert not value["complete"] and value["uncovered"] and set(less) < set(found)
    page = client.get("/messages", params={"topic": "A", "key": "none"}).text
    assert "The search is incomplete" in page and "in the part of the log that was searched" in page


# ------------------------------------------------------------------------------- what the broker stored and did not dispatch


def undispatched_store(path, *, first=50, second=31, mark=True, **more):
    """A store as a killed broker leaves it whose dispatching was `second` messages behind; beside it, one that is whole."""
    whole = path.with_name("whole")
    put_some(path, first, **more)
    for part in ("consumequeue", "index"):
        shutil.copytree(path / part, path.with_name(part))
    with MessageStore.open(path, config=StoreConfig(**{**SMALL, **more})) as store:
        for i in range(second):
            store.put_message(
                Message(
                    "ABC"[i % 3],
                    b"late%d" % i,
                    keys=[f"late{i}", "same"],
                    tags=f"t{i % 3}",
                    properties={"UNIQ_KEY": f"U{i}"},
                ),
                queue_id=i % 2,
            )
            if i % 7 == 0:
                # Half of a transaction, which gets no unit.
                store.put_message(Message("A", b"half", keys=["half"], sys_flag=4))
    shutil.copytree(path, whole)
    for part in ("consumequeue", "index"):
        shutil.rmtree(path / part)
        shutil.move(path.with_name(part), path / part)
    if mark:
        (path / "abort").write_bytes(b"12345")
    return whole


def answers_of(store):
    """Everything that queues say."""
    found = {}
    for topic in store.topics():
        for queue_id in store.queue_ids(topic):
            low, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
            got, at = [], low
            while at < high:
                page = store.get_message(topic, queue_id, at)
                assert page.status.name == "FOUND" and page.next_queue_offset > at and page.max_queue_offset == high
                got += content(page)
                at = page.next_queue_offset
            middle = store.message_at(got[len(got) // 2][0])
            time = [
                store.offset_by_time(topic, queue_id, middle.store_timestamp, boundary)
                for boundary in ("lower", "upper")
            ]
            tagged = content(store.get_message(topic, queue_id, low, 100, tags="t1"))
            table = store.get_table(topic, queue_id, columns=["phy_offset"]).num_rows if pyarrow else len(got)
            after = store.get_message(topic, queue_id, high).status.name
            found[topic, queue_id] = (low, high, got, tagged, table, after, time)
    return found


def tree(path):
    return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in path.rglob("*")}


@pytest.mark.parametrize("more", [{}, {"enable_consume_queue_ext": True}], ids=["plain", "ext"])
@pytest.mark.parametrize("loss", ["tail", "all", "all and marked"])
def test_what_was_not_dispatched_is_served(tmp_path, more, loss):
    path, config = tmp_path / "s", StoreConfig(**{**SMALL, **more})
    whole = undispatched_store(path, mark=loss != "all", **more)
    if loss != "tail":
        for kind in ("consumequeue", "consumequeue_ext"):
            shutil.rmtree(path / kind, ignore_errors=True)
    with MessageStore.open(whole, config=config, read_only=True) as store:
        wanted, end = answers_of(store), store.commit_log.max_offset
        assert store.undispatched is None and ("C", 1) in wanted
        lags = [(each.topic, each.queue_id, each.lag) for each in store.stats().consumers]
        by_key = [content(store.query_message(topic, "same", 100)) for topic in "ABC"]
    before = tree(path)
    with MessageStore.open(path, config=config, read_only=True) as store:
        assert answers_of(store) == wanted
        assert store.undispatched is not None and store.undispatched[1] == end and store.unserved is None
        store.refresh()
        assert answers_of(store) == wanted
        stats = store.stats()
        assert [(each.topic, each.queue_id, each.lag) for each in stats.consumers] == lags
        assert stats.dispatched_phy_offset == store.undispatched[0] < stats.max_phy_offset
        assert [content(store.query_message(topic, "same", 100)) for topic in "ABC"] == by_key
        offsets = ConsumerOffsets.load(tmp_path / "o.json", read_only=False)
        with store.consume("C", "g2", offsets=offsets, timeout=0) as consumer:
            assert sorted(content(consumer)) == sorted(wanted["C", 0][2] + wanted["C", 1][2])
    assert tree(path) == before
    # Recovery comes to the same.
    with MessageStore.open(path, config=config) as store:
        assert answers_of(store) == wanted and store.undispatched is None


def test_one_queue_that_cannot_be_read_hides_no_other_of_an_unclosed_store(tmp_path, caplog):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    undispatched_store(path, mark=True)
    with MessageStore.open(path, config=config) as store:
        inner = {"KEYS": "k", "INNER_NUM": "2"}
        store.put_message(Message("Inner", b"batch", sys_flag=0xC0, properties=inner))
        wanted = {key: answer for key, answer in answers_of(store).items() if key[0] != "Inner"}
        end = store.commit_log.max_offset
    (path / "abort").write_bytes(b"12345")
    # The only file of its kind: nothing else tells which length is right.
    file = path / "batchconsumequeue" / "Inner" / "0" / f"{0:020}"
    os.truncate(file, file.stat().st_size + 20)
    before = tree(path)
    with MessageStore.open(path, config=config, read_only=True) as store:
        assert store.unserved is not None and store.unserved[1] == end
        assert str(file) in caplog.text
        with pytest.raises(GeometryError):
            store.get_message("Inner", 0, 0)
        shown = [topic for topic in store.topics() if topic != "Inner"]
        store.topics = lambda: shown
        assert answers_of(store) == wanted
        assert len(list(store.messages())) > len(wanted)
    assert tree(path) == before


@pytest.mark.parametrize("mark", ["flushed", "lost", "damaged"])
@pytest.mark.parametrize("more", [{}, {"enable_consume_queue_ext": True}], ids=["plain", "ext"])
def test_one_queue_was_dispatched_and_another_not(tmp_path, more, mark):
    # Many messages that are put together are dispatched queue by queue, and queues are forced one after the other.
    config = StoreConfig(**{**SMALL, **more})
    for number, ahead in enumerate([["A/0"], ["A/1", "B/0"], ["C"], ["B"], ["A", "B", "C/1"], ["A", "B"]]):
        path = tmp_path / str(number) / "s"
        path.parent.mkdir()
        whole = undispatched_store(path, **more)
        for kind in ("consumequeue", "consumequeue_ext") if more else ("consumequeue",):
            for queue in ahead:
                shutil.rmtree(path / kind / queue, ignore_errors=True)
                shutil.copytree(whole / kind / queue, path / kind / queue)
        if mark == "lost":
            (path / "checkpoint").unlink()
        elif mark == "damaged":
            (path / "checkpoint").write_bytes(b"1234567")
        with MessageStore.open(whole, config=config, read_only=True) as store:
            wanted, end = answers_of(store), store.commit_log.max_offset
        before = tree(path)
        with MessageStore.open(path, config=config, read_only=True) as store:
            assert answers_of(store) == wanted, ahead
            begin, until = store.undispatched
            assert until == end
            # It begins at the first message that a queue lacks.
            first = min(place for key, answer in wanted.items() for place, _, body in answer[2] if body.startswith(b"late")
                        and not any(f"{key[0]}/{key[1]}".startswith(each) for each in ahead))  # fmt: skip
            assert begin == first == store.stats().dispatched_phy_offset
            store.refresh()
            assert answers_of(store) == wanted
        assert tree(path) == before


def test_a_reader_that_found_nothing_missing_sees_queues_grow(tmp_path):
    # It compares batch queues by dispatching them, and must not keep them for that.
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    put_some(path)
    with MessageStore.open(path, config=config) as store:
        store.put_message(Message("Inner", b"inner", sys_flag=0xC0, properties={"INNER_NUM": "2"}))
        store.put_message(Message("A", b"first"), queue_id=0)
    (path / "abort").write_bytes(b"1")
    with MessageStore.open(path, config=config, read_only=True) as reader:
        assert reader.undispatched is None
        with MessageStore.open(path, config=config) as store:
            store.put_message(Message("A", b"second"), queue_id=0)
        reader.refresh()
        assert content(reader.get_message("A", 0, 0, 100))[-1][2] == b"second"


@pytest.mark.parametrize("max_mapped_files", [2, 100])
def test_a_queue_that_is_rebuilt_under_other_names_is_read_anew(tmp_path, max_mapped_files):
    # After retention the units of batches are numbered from 0 again, so that no name of before is left; and the pool has let
    # go of the mapping that would tell.
    config = StoreConfig(
        **{**SMALL, "mapper_file_size_batch_consume_queue": 46 * 2, "max_mapped_files": max_mapped_files}
    )
    path = tmp_path / "s"
    with MessageStore.open(path, config=config) as store:
        for i in range(60):
            store.put_message(Message("Inner", b"%050d" % i, sys_flag=0xC0, properties={"INNER_NUM": "2"}))
            store.put_message(Message("A", b"%0200d" % i))
        store.flush()
    for name in sorted(os.listdir(path / "commitlog"))[:2]:
        os.utime(path / "commitlog" / name, (1, 1))
    with MessageStore.open(path, config=config) as store:
        assert store.delete_expired_files().segments == 2
    with MessageStore.open(path, config=config, read_only=True) as reader:
        wanted = answers_of(reader)
        reader.get_message("A", 0, wanted["A", 0][0])
        rebuild(path, ("consumequeue",), config)
        reader.refresh()
        assert answers_of(reader) == wanted
        with MessageStore.open(path, config=config) as store:
            store.put_message(Message("Inner", b"new", sys_flag=0xC0, properties={"INNER_NUM": "2"}))
            number = store.max_queue_offset("Inner", 0) - 2
        reader.refresh()
        assert reader.get_message("Inner", 0, number).messages[0].body == b"new"


@pytest.mark.parametrize("gap", [(3, 1), (5, 1), (1, 4), (7, 9), (16, 2), (9, 11)])
@pytest.mark.parametrize("size", [400, 4000])
def test_a_gap_in_a_queue_hides_nothing_before_it(tmp_path, gap, size):
    # A recovery that goes on after damage leaves pre-fill units for the messages that it lost.
    path, config = tmp_path / "s", StoreConfig(**{**SMALL, "mapped_file_size_consume_queue": size})
    times = iter(range(1_700_000_000_000, 1_700_000_009_000, 10))
    with MessageStore.open(path, config=config.replace(clock=lambda: next(times))) as store:
        for i in range(120):
            store.put_message(Message("A", b"%0100d" % i))
        expired = store.commit_log.files.offsets[1]
    (path / "commitlog" / f"{0:020d}").unlink()
    with MessageStore.open(path, config=config, read_only=True) as store:
        kept = {m.queue_offset: m.store_timestamp for m in store.messages()}
        low, high = min(kept), max(kept) + 1
        assert store.commit_log.min_offset == expired and store.min_queue_offset("A", 0) == low > 0
    lost = range(low + gap[0], low + gap[0] + gap[1])
    for number in lost:
        with (path / "consumequeue/A/0" / f"{number * 20 // size * size:020d}").open("r+b") as file:
            file.seek(number * 20 % size)
            file.write(oracle.PRE_FILL_UNIT)
        del kept[number]
    with MessageStore.open(path, config=config, read_only=True) as store:
        assert (store.min_queue_offset("A", 0), store.max_queue_offset("A", 0)) == (low, high)
        assert [m.queue_offset for m in pages(store, "A", 0)] == list(kept)
        assert [each.min_queue_offset for each in store.stats().queues] == [low]
        for time in range(min(kept.values()) - 15, max(kept.values()) + 20, 5):
            later = [number for number, stored in kept.items() if stored >= time]
            earlier = [number for number, stored in kept.items() if stored <= time]
            assert store.offset_by_time("A", 0, time) == (later[0] if later else high)
            assert store.offset_by_time("A", 0, time, "upper") == (earlier[-1] if earlier else low)


def test_how_far_before_the_newest_unit_is_looked(tmp_path, monkeypatch):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    whole = undispatched_store(path, second=60)
    shutil.rmtree(path / "consumequeue" / "C", ignore_errors=True)
    for topic in "AB":
        shutil.rmtree(path / "consumequeue" / topic)
        shutil.copytree(whole / "consumequeue" / topic, path / "consumequeue" / topic)
    with MessageStore.open(whole, config=config, read_only=True) as store:
        places = [place for key, answer in answers_of(store).items() if key[0] == "C" for place, *_ in answer[2]]
        end = store.commit_log.max_offset
    with MessageStore.open(path, config=config, read_only=True) as store:
        assert store.undispatched == (min(places), end) and store.unserved is None
    # Messages before it may be missing; none after it is.
    monkeypatch.setattr("rmqstore.store.undispatched.MAX_UNDISPATCHED", 4000)
    with MessageStore.open(path, config=config, read_only=True) as store:
        found = [place for key, answer in answers_of(store).items() if key[0] == "C" for place, *_ in answer[2]]
        assert 0 < len(found) < len(places) and set(found) >= {place for place in places if place >= end - 4000 + 500}


def test_the_front_ends_serve_what_was_not_dispatched(tmp_path):
    testclient = pytest.importorskip("starlette.testclient")
    from rmqstore import console

    path, config = tmp_path / "s", StoreConfig(**SMALL)
    whole = undispatched_store(path)

    def asked_by_all(path):
        client = testclient.TestClient(console.app(path, config=config), base_url="http://localhost")
        rows = client.get("/api/queues/C/1", params={"from": 0}).json()["rows"]
        by_time = client.get("/api/messages", params={"topic": "A"}).json()["messages"]
        return (
            run("get", path, "C", 1, *OPTIONS).stdout,
            run("query", path, "B", "late4", "late1", *OPTIONS).stdout,
            run("tail", path, "C", *OPTIONS).stdout,
            [row["message"]["phy_offset"] for row in rows],
            [row["phy_offset"] for row in by_time],
            client.get("/api/consumers").json(),
        )

    assert asked_by_all(path) == asked_by_all(whole)
    assert "bytes from phy offset" in run("info", path, *OPTIONS).stdout
    assert json.loads(run("info", path, *OPTIONS, "--json").stdout)["undispatched"][0] > 0
    assert "not dispatched" not in run("info", whole, *OPTIONS).stdout
    client = testclient.TestClient(console.app(path, config=config), base_url="http://localhost")
    assert "are not dispatched to queues" in client.get("/").text
    found, healthy = series(path), series(whole)
    assert found["rmqstore_log_behind_queues_bytes", ()] > healthy["rmqstore_log_behind_queues_bytes", ()]
    name = ("rmqstore_consumer_lag_messages", (("group", "g"), ("queue_id", "0"), ("topic", "A")))
    assert found[name] == healthy[name]


@pytest.mark.parametrize("loss", ["tail", "all"])
def test_spark_reads_queues_to_what_was_not_dispatched(tmp_path, loss):
    pytest.importorskip("pyarrow")
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    whole = undispatched_store(path)
    if loss == "all":
        shutil.rmtree(path / "consumequeue")

    def rows(path, size):
        return queue_rows(path, config, ["topic", "phy_offset", "body"], size)

    assert len(rows(whole, 10**9)) == 81
    for size in (500, 10**9):
        assert rows(path, size) == rows(whole, size)


def test_a_bound_on_what_is_served_is_said(tmp_path, monkeypatch, caplog):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    whole = undispatched_store(path, second=200)
    with MessageStore.open(whole, config=config, read_only=True) as store:
        wanted = answers_of(store)
    monkeypatch.setattr("rmqstore.store.undispatched.MAX_UNDISPATCHED", 6000)
    with MessageStore.open(path, config=config, read_only=True) as store:
        served = answers_of(store)
        assert all(got == wanted[key][2][: len(got)] for key, (_, _, got, *_) in served.items())
        begin, end = store.unserved
        assert end == store.commit_log.max_offset and begin == store.undispatched[0] + 6000
        missing = {m[0] for key in wanted for m in wanted[key][2]} - {m[0] for key in served for m in served[key][2]}
        assert missing and min(missing) >= begin
    assert "are in no queue here" in caplog.text
    answer = run("get", path, "A", 0, "--begin-queue-offset", 90, *OPTIONS)
    assert answer.exit_code == 1 and "are not in a queue; run rmqstore rebuild" in answer.stderr
    assert "queues end at phy offset" in run("info", path, *OPTIONS).stdout


def test_units_on_disk_win_when_a_writer_comes(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    whole = undispatched_store(path)
    with MessageStore.open(whole, config=config, read_only=True) as store:
        wanted = answers_of(store)
    with MessageStore.open(path, config=config, read_only=True) as reader:
        assert answers_of(reader) == wanted and reader.undispatched
        with MessageStore.open(path, config=config) as writer:
            time.sleep(0.01)
            place = writer.put_message(Message("A", b"new", keys=["new"])).phy_offset
            high = writer.max_queue_offset("A", 0)
            assert reader.max_queue_offset("A", 0) == high
            assert reader.undispatched is None
            assert reader.get_message("A", 0, high - 1).messages[0].phy_offset == place
            assert answers_of(reader) == answers_of(writer)
            assert content(reader.query_message("A", "new")) == [(place, "A", b"new")]
            # Beside a live writer nothing is made in memory: it dispatches by itself.
            with MessageStore.open(path, config=config, read_only=True) as other:
                assert other.undispatched is None and answers_of(other) == answers_of(writer)
    if MAPS.exists():
        assert not mappings(path)


@pytest.mark.parametrize("mark", [True, False], ids=["killed", "closed"])
@pytest.mark.parametrize("filler", [b"\0", b"\xff"], ids=["zeros", "noise"])
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("end_too", [False, True], ids=["start", "end and start"])
def test_a_segment_that_lost_its_start_is_read(tmp_path, mark, filler, num, end_too):
    # Lost power takes the first page of the newest segments, which then look as if nobody had written to them yet.
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    put_some(path, 150)
    with MessageStore.open(path, config=config, read_only=True) as store:
        whole = list(store.messages())
    segments = sorted((path / "commitlog").iterdir())
    bases = [int(each.name) for each in segments]
    newest = [base for base in bases if any(base <= m.phy_offset for m in whole)][-num:]
    lost = set()
    for base in newest:
        cut = [(base, 1000)]
        if end_too:
            last = [m for m in whole if m.phy_offset < base][-1].phy_offset
            cut.append((last, base - last))
        for begin, size in cut:
            with segments[bases.index(begin // 8192 * 8192)].open("r+b") as file:
                file.seek(begin % 8192)
                file.write(filler * size)
            lost |= {m.phy_offset for m in whole if begin - m.size < m.phy_offset < begin + size}
    if mark:
        (path / "abort").write_bytes(b"1")
    left = [(m.phy_offset, m.body) for m in whole if m.phy_offset not in lost]
    assert len(left) < len(whole) and left[-1][0] > newest[-1]
    before = tree(path)
    with MessageStore.open(path, config=config, read_only=True) as store:
        assert store.commit_log.max_offset == left[-1][0] + whole[-1].size
        assert [(m.phy_offset, m.body) for m in store.messages() if not m.corrupt] == left
        by_queue = [m.phy_offset for t in "AB" for q in (0, 1) for m in pages(store, t, q) if not m.corrupt]
        assert sorted(by_queue) == [place for place, _ in left]
        assert store.query_message("AB"[149 % 2], "k149")[0].phy_offset == left[-1][0]
    assert tree(path) == before


def pages(store, topic, queue_id):
    """Every message of a queue."""
    at, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
    while at < high:
        page = store.get_message(topic, queue_id, at)
        yield from page.messages
        assert page.next_queue_offset > at
        at = page.next_queue_offset


def take_back_entries(path, num):
    """Make the newest index file as it was before its last `num` entries were put."""
    newest = sorted((path / "index").iterdir())[-1]
    data = bytearray(newest.read_bytes())
    for _ in range(num):
        *ends, slots, count = struct.unpack(">qqqqii", data[:40])
        entry = 40 + 4 * SMALL["max_hash_slot_num"] + 20 * (count - 1)
        key_hash, _, _, before = struct.unpack(">iqii", data[entry : entry + 20])
        slot = 40 + 4 * (key_hash % SMALL["max_hash_slot_num"])
        data[slot : slot + 4] = struct.pack(">i", before)
        data[entry : entry + 20] = bytes(20)
        last = struct.unpack(">q", data[entry - 16 : entry - 8])[0] if count > 2 else 0
        data[:40] = struct.pack(">qqqqii", ends[0], ends[1], ends[2], last, slots - (before == 0), count - 1)
    with newest.open("r+b") as file:
        file.write(data)


def test_a_broker_that_died_between_two_entries(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    with MessageStore.open(path, config=config) as store:
        store.put_message(Message("A", b"0", keys=["same"]))
        place = store.put_message(Message("A", b"1", keys=["k1", "k2", "same"])).phy_offset
    for lost in range(4):
        if lost:
            take_back_entries(path, 1)
        (path / "abort").write_bytes(b"1")
        before = tree(path)
        with MessageStore.open(path, config=config, read_only=True) as store:
            for key in ("k1", "k2", "same"):
                for max_num in (1, 64):
                    found = store.query_message("A", key, max_num)
                    assert content(found)[0] == (place, "A", b"1") and found.complete
            assert len(store.query_message("A", "same")) == 2 and store.query_message("A", "same", 1).truncated
            assert store.query_table(["k1", "k2", "same"], topic="A", columns=["phy_offset"]).num_rows == 4
        assert tree(path) == before


def test_entries_that_lost_power_took_from_the_middle(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    with MessageStore.open(path, config=config) as store:
        store.put_message(Message("A", b"first", keys=["first"]))
        store.flush()
        for i in range(6):
            store.put_message(Message("A", b"%d" % i, keys=[f"k{i}"]))
        shutil.copytree(path, tmp_path / "crashed")
    newest = sorted((tmp_path / "crashed" / "index").iterdir())[-1]
    for i in range(5):
        data = bytearray(newest.read_bytes())
        entry = 40 + 4 * SMALL["max_hash_slot_num"] + 20 * (2 + i)
        data[entry : entry + 20] = bytes(20)
        newest.write_bytes(data)
        with MessageStore.open(tmp_path / "crashed", config=config, read_only=True) as store:
            for n in range(6):
                found = store.query_message("A", f"k{n}")
                assert [body for *_, body in content(found)] == [b"%d" % n] and found.complete


def test_a_writer_that_dies_beside_a_reader_before_it_indexes(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    with MessageStore.open(path, config=config) as store:
        store.put_message(Message("A", b"0", keys=["same"]))
    with MessageStore.open(path, config=config, read_only=True) as reader:
        assert len(reader.query_message("A", "same")) == 1
        for died in (1, 2):
            child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    writer = MessageStore.open(path, config=config)
                    writer.put_message(Message("A", b"%d" % died, keys=["same"]))
                    take_back_entries(path, 1)
                os._exit(0)
            os.waitpid(child, 0)
            reader.refresh()
            for max_num in (1, 64):
                found = reader.query_message("A", "same", max_num)
                assert content(found)[0][2] == b"%d" % died
            assert len(found) == died + 1 and found.complete


def test_a_writer_that_cannot_be_seen(tmp_path, monkeypatch):
    # In a container, or on another machine: the lock tells nothing.
    monkeypatch.setattr("rmqstore.store.undispatched.is_held", lambda root: False)
    monkeypatch.setattr("rmqstore.index.log_index.is_held", lambda root: False)
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    with MessageStore.open(path, config=config) as writer:
        writer.put_message(Message("A", b"first", keys=["k", "same"]))
        with MessageStore.open(path, config=config, read_only=True) as reader:
            for i in range(90):
                # Every third without keys, so that the index ends before the log does.
                keys = ["same", f"k{i}"] if i % 3 else []
                writer.put_message(Message("AB"[i % 2], b"%d" % i, keys=keys))
                if i % 10 == 9:
                    reader.refresh()
                    assert answers_of(reader) == answers_of(writer) and reader.undispatched is None
                    for key in ("same", f"k{i - 1}", f"k{i - 2}", "none"):
                        wanted = writer.query_message("A", key, 100)
                        assert reader.query_message("A", key, 100) == wanted and wanted.complete
                        assert reader.query_message("A", key, 2).truncated == (len(wanted) > 2)


def test_many_threads_ask_at_once(tmp_path):
    path, config = tmp_path / "s", StoreConfig(**SMALL)
    put_some(path, 120)
    with MessageStore.open(path, config=config, read_only=True) as store:
        wanted = content(store.query_message("A", "same", 1000))
    lose_files(1, 3)(path)
    for _ in range(5):
        with MessageStore.open(path, config=config, read_only=True) as store, ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(store.query_message, "A", "same", 1000) for _ in range(16)]
            assert [content(each.result()) for each in asked] == [wanted] * 16
