"""The golden tiered storages through the public API: every line of what the real system answers, and what it misses.

Owns the comparison of tiered storage, alone and with its local store, with a real 5.5.0 broker and with the oracle.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiered_oracle as oracle_tiered
from every_disk import open_tiered

from rmqstore import GetMessageStatus, MessageStore, StoreClosedError, StoreError, UnsupportedFormatError
from rmqstore.flatfile.flat_verify import verify_flat

LOCAL_MIN = 1_048_576


@pytest.fixture(scope="module", params=oracle_tiered.STORES)
def root(request, tmp_path_factory):
    return oracle_tiered.unpack(request.param, tmp_path_factory.mktemp("tiered"))


@pytest.fixture(scope="module")
def real():
    return oracle_tiered.lines("messages")


@pytest.fixture(scope="module")
def real_tiered():
    return oracle_tiered.lines("messages.tiered")


@pytest.fixture
def both(root):
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        yield store


@pytest.fixture
def tiered(root):
    with open_tiered(root / "tiered", root / "store") as store:
        yield store


def of_type(lines, kind):
    found = [line for line in lines if line["type"] == kind]
    assert found
    return found


def said(message):
    return (
        message.topic, message.queue_id, message.queue_offset, message.size, message.sys_flag,
        message.born_timestamp, message.store_timestamp, len(message.body), hashlib.sha256(message.body).hexdigest(),
        message.tags, message.unique_key, message.properties,
    )  # fmt: skip


def expected(line):
    return (
        line["topic"], line["queueId"], line["queueOffset"], line["size"], line["sysFlag"], line["born"], line["store"],
        line["bodyLen"], line["bodySha256"], line.get("tags"), line.get("uniqKey"), line["props"],
    )  # fmt: skip


def listing(folder):
    return {
        os.path.join(path, name): os.stat(os.path.join(path, name)).st_mtime_ns
        for path, _, names in os.walk(folder)
        for name in names
    }


# ------------------------------------------------------------------------------------------------------- tiered alone


def test_every_unit_and_message_of_the_flat_files(tiered, real_tiered):
    for line in of_type(real_tiered, "queue"):
        place = line["topic"], line["queueId"]
        assert (tiered.min_queue_offset(*place), tiered.max_queue_offset(*place)) == (line["tieredMin"], line["tieredCommitted"])
    units = {(line["topic"], line["queueId"], line["queueOffset"]): line for line in of_type(real_tiered, "unit")}
    lines = of_type(real_tiered, "msg")
    assert len(lines) == len(units) == 3007
    for line in lines:
        found = tiered.get_message(line["topic"], line["queueId"], line["queueOffset"], 1)
        assert found.status is GetMessageStatus.FOUND and found.next_queue_offset == line["queueOffset"] + 1
        (message,) = found.messages
        assert said(message) == expected(line)
        unit = units[line["topic"], line["queueId"], line["queueOffset"]]
        assert (message.phy_offset, message.size) == (unit["logOffset"], unit["size"]) == (line["phy"], line["size"])
        queue = tiered.tiered.queue(line["topic"], line["queueId"])
        assert queue.unit_at(line["queueOffset"]) == (unit["logOffset"], unit["size"], unit["tagsCode"])
        assert not message.corrupt


def test_index_files_of_the_real_index_service(tiered, real_tiered):
    files = sorted((each.begin_timestamp, each.end_timestamp) for each in tiered.tiered.index.files)
    assert files == sorted((line["timestamp"], line["endTimestamp"]) for line in of_type(real_tiered, "indexFile"))
    assert {each.slot_num for each in tiered.tiered.index.files} == {oracle_tiered.SLOTS}


def test_index_items_are_the_oracles(root, tiered):
    for index, wanted in zip(
        sorted(tiered.tiered.index.files, key=lambda each: each.begin_timestamp),
        sorted(oracle_tiered.Tiered(root).index_files(), key=lambda each: each.begin),
    ):
        assert (index.compacted, index.begin_timestamp, index.end_timestamp, index.used_slots) == wanted[:4]
        found = list(index.survey())
        assert [tuple(item) for item in found] == [tuple(item) for items in wanted.items for item in items]
        for key_hash in {item.hash for item in found}:
            chain = [tuple(each) for each in wanted.items[key_hash % oracle_tiered.SLOTS] if each.hash == key_hash]
            assert [tuple(item) for item in index.items(key_hash)] == chain


def has_key(record, key, kinds):
    properties = record.properties
    return ("U" in kinds and properties.get("UNIQ_KEY") == key) or (
        "K" in kinds and key in [each for each in properties.get("KEYS", "").split(" ") if each]
    )


def test_exact_queries_find_everything_with_and_without_the_local_store(root):
    data = oracle_tiered.Tiered(root)
    records = {queue: data.messages(*queue) for queue in data.queues()}
    keys = {"ORD-100400", "CUST-7", "user@example.com", "Aa", "BB", "订单-1001", "大键", "twice", "nobody", ""}
    stores = [
        open_tiered(root / "tiered", root / "store"),
        open_tiered(root / "tiered"),
    ]
    for store in stores:
        with store:
            for key in sorted(keys):
                for index_type, kinds in ((None, "UK"), ("K", "K"), ("U", "U")):
                    wanted = {
                        (queue_id, number)
                        for (topic, queue_id), each in records.items()
                        if topic == "Orders"
                        for number, record in enumerate(each)
                        if key and has_key(record, key, kinds)
                    }
                    found = store.query_message("Orders", key, 10_000, index_type=index_type)
                    got = [(message.queue_id, message.queue_offset) for message in found]
                    assert len(got) == len(set(got)) and set(got) == wanted, key
                    times = [message.store_timestamp for message in found]
                    assert times == sorted(times, reverse=True)
            unique = records["Payments", 0][3].properties["UNIQ_KEY"]
            assert [each.queue_offset for each in store.query_message("Payments", unique, index_type="U")] == [3]
            paid = store.query_message("Orders", "paid", 10_000, index_type="T")
            orders = [record for queue, each in records.items() if queue[0] == "Orders" for record in each]
            assert len(paid) == sum(record.properties.get("TAGS") == "paid" for record in orders)
            cut = store.query_message("Orders", "CUST-7", 2)
            assert len(cut) == 2 and cut.truncated
            begin, end = cut[1].store_timestamp, cut[0].store_timestamp
            assert len(store.query_message("Orders", "CUST-7", 64, begin, end)) == 2
            assert not store.query_message("Orders", "CUST-7", 64, end + 1)


def test_a_scan_is_every_message_in_queue_order(root, tiered):
    data = oracle_tiered.Tiered(root)
    for arguments in ({}, {"use_threads": False, "batch_size": 100}, {"views": True}):
        table = tiered.scan(["topic", "queue_id", "queue_offset", "phy_offset", "body", "keys", "corrupt"], **arguments).read_all()
        rows = [
            (topic, queue_id, number, record.phy_offset, record.body, record.properties.get("KEYS", "").split())
            for topic, queue_id in data.queues()
            for number, record in enumerate(data.messages(topic, queue_id))
        ]
        assert [
            (row["topic"], row["queue_id"], row["queue_offset"], row["phy_offset"], row["body"], row["keys"])
            for row in table.to_pylist()
        ] == rows
        assert not any(table["corrupt"].to_pylist())


def test_a_scan_chooses(tiered):
    every = tiered.scan().read_all().to_pylist()
    times = sorted(row["store_timestamp"] for row in every)
    low, high = times[1000], times[2000]
    some = tiered.scan(topic="Orders", queue_id=[0, 2], tags="paid || created", begin=low, end=high)
    wanted = [
        row
        for row in every
        if row["topic"] == "Orders" and row["queue_id"] in (0, 2) and row["tags"] in ("paid", "created")
        and low <= row["store_timestamp"] <= high
    ]  # fmt: skip
    assert some.read_all().to_pylist() == wanted and wanted
    assert tiered.scan(topic=["Nothing"]).read_all().num_rows == 0
    assert tiered.get_table("Orders", 1, 100, 7, columns="queue_offset")["queue_offset"].to_pylist() == list(range(100, 107))
    assert tiered.get_table("Nothing", 1, columns="queue_offset").num_rows == 0
    with_tags = tiered.get_table("Orders", 1, 10, 50, "paid", ["tags", "queue_offset"])
    assert with_tags.num_rows == 50 and set(with_tags["tags"].to_pylist()) == {"paid"}


def test_offsets_by_time(root, tiered, both):
    data = oracle_tiered.Tiered(root)
    for topic, queue_id in data.queues():
        stored = [record.store_timestamp for record in data.messages(topic, queue_id)]
        middle = stored[len(stored) // 2]
        for time in {0, stored[0] - 1, stored[0], middle, middle + 1, stored[-1], stored[-1] + 1}:
            lower, upper = bisect.bisect_left(stored, time), max(bisect.bisect_right(stored, time) - 1, 0)
            for store in (tiered, both):
                assert store.offset_by_time(topic, queue_id, time) == lower
                assert store.offset_by_time(topic, queue_id, time, "upper") == upper


def test_bounds_statuses_and_names(tiered):
    assert tiered.topics() == ["Batches", "Orders", "Payments"] and tiered.queue_ids("Orders") == [0, 1, 2]
    assert [(queue.topic, queue.queue_id, queue.max_queue_offset) for queue in tiered.tiered.queues()] == [
        ("Batches", 0, 90), ("Orders", 0, 960), ("Orders", 1, 956), ("Orders", 2, 956), ("Payments", 0, 45)
    ]  # fmt: skip
    for offset, status, following in (
        (960, GetMessageStatus.OFFSET_OVERFLOW_ONE, 960),
        (961, GetMessageStatus.OFFSET_OVERFLOW_BADLY, 960),
        (-1, GetMessageStatus.OFFSET_TOO_SMALL, 0),
    ):
        found = tiered.get_message("Orders", 0, offset)
        assert (found.status, found.next_queue_offset, found.messages) == (status, following, [])
    assert tiered.get_message("Nothing").status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
    assert tiered.get_message("../golden/Orders").status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
    assert tiered.get_message("Orders", 0, 5, tags="no such tag").status is GetMessageStatus.NO_MATCHED_MESSAGE
    assert len(tiered.get_message("Orders", 0, 5, 100, max_bytes=2000)) in (2, 3)


def test_nothing_is_wrong_and_nothing_is_written(root):
    before = listing(root)
    for local in (root / "store", None):
        with open_tiered(root / "tiered", local) as store:
            assert list(verify_flat(store.tiered)) == [] and store.tiered.problems == []
            assert bool(store.tiered.notes) == (local is None)
    done = []
    with open_tiered(root / "tiered", root / "store") as store:
        assert list(verify_flat(store.tiered, lambda number, whole: done.append((number, whole)))) == []
    assert done[-1][0] == done[-1][1] > 1_000_000
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        store.scan().read_all()
    assert listing(root) == before


# ------------------------------------------------------------------------------------------- with the local store, as one


def test_every_line_of_the_real_store(both, real):
    for line in of_type(real, "queue"):
        place = line["topic"], line["queueId"]
        assert (both.min_queue_offset(*place), both.max_queue_offset(*place)) == (line["min"], line["max"])
        assert both.get_message(*place, line["min"], 1).min_queue_offset == line["min"]
    lines = of_type(real, "msg")
    assert len(lines) == 3007
    for line in lines:
        (message,) = both.get_message(line["topic"], line["queueId"], line["queueOffset"], 1).messages
        assert said(message) == expected(line)
        # A read of the real one that begins in tiered storage goes on there over the first local message.
        assert message.phy_offset == line["phy"] or (message.phy_offset >= LOCAL_MIN and line["phy"] < LOCAL_MIN)


def test_exact_queries_find_what_the_real_one_misses(root, both, real):
    data = oracle_tiered.Tiered(root)
    records = [(q, number, record) for q in range(3) for number, record in enumerate(data.messages("Orders", q))]
    missed = set()
    for line in of_type(real, "query"):
        if line["topic"] != "Orders":
            continue
        wanted = {
            (queue_id, number)
            for queue_id, number, record in records
            if has_key(record, line["key"], "UK") and line["begin"] <= record.store_timestamp <= line["end"]
        }
        found = both.query_message(line["topic"], line["key"], 10_000, line["begin"], line["end"])
        assert {(message.queue_id, message.queue_offset) for message in found} == wanted and found.complete
        if len(line["queueIdAndOffset"]) < min(len(wanted), line["max"]):
            missed.add(line["key"])
    assert "ORD-100400" in missed
    assert len(both.query_message("Orders", "ORD-100400")) == 4
    with pytest.raises(UnsupportedFormatError, match="tiered storage"):
        both.query_message("Orders", "ORD-100400", compat=True)


def test_one_sequence_without_duplicates(both, real):
    maxima = {(line["topic"], line["queueId"]): line["max"] for line in of_type(real, "queue")}
    table = both.scan(["topic", "queue_id", "queue_offset"]).read_all().to_pylist()
    counted = Counter((row["topic"], row["queue_id"], row["queue_offset"]) for row in table)
    wanted = {(topic, queue_id, offset) for (topic, queue_id), end in maxima.items() for offset in range(end)}
    assert set(counted) >= wanted and set(counted.values()) == {1}
    for (topic, queue_id), end in maxima.items():
        assert both.get_table(topic, queue_id, columns="queue_offset")["queue_offset"].to_pylist() == list(range(end))
        at, offsets = 0, []
        while at < end:
            found = both.get_message(topic, queue_id, at, 100)
            assert found.status is GetMessageStatus.FOUND
            offsets += [message.queue_offset for message in found]
            at = found.next_queue_offset
        assert offsets == list(range(end))
    consumed = both.get_table("Orders", 1, 500, 100, "paid", ["queue_offset"])["queue_offset"].to_pylist()
    every = both.get_table("Orders", 1, 500, columns=["queue_offset", "tags"]).to_pylist()
    assert consumed == [row["queue_offset"] for row in every if row["tags"] == "paid"][:100]
    assert both.topics() == sorted({*both.topics(), "Orders", "Payments", "Batches"})
    assert both.get_message("Orders", 0, 960).status is GetMessageStatus.OFFSET_OVERFLOW_ONE
    assert both.get_message("Orders", 0, -1).next_queue_offset == 0


def test_a_table_of_keys_and_ids(both):
    keys = ["ORD-100400", "nobody", "CUST-7", "大键"]
    for views in (False, True):
        table = both.query_table(keys, "Orders", ["queue_id", "queue_offset", "body"], views=views)
        wanted = [
            (key, number, message.queue_id, message.queue_offset, message.body)
            for number, key in enumerate(keys)
            for message in both.query_message("Orders", key)
        ]
        assert [tuple(row.values()) for row in table.to_pylist()] == wanted
    first = both.get_message("Orders", 0, 0, 1).messages[0]
    assert both.message_by_id(first.unique_key).queue_offset == 0
    assert both.message_by_id(first.unique_key, "Orders").phy_offset == 0
    with pytest.raises(StoreError):
        both.message_by_id("0" * 32)


def test_a_store_without_metadata_says_so(root, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    os.remove(copy / "store" / "config" / "tieredStoreMetadata.json")
    with open_tiered(copy / "tiered", copy / "store") as store:
        assert len(store.tiered.notes) == 1 and "metadata" in store.tiered.notes[0]
        assert store.scan(["queue_id"]).read_all().num_rows == 3007
        assert len(store.query_message("Orders", "ORD-100400")) == 4
        assert list(verify_flat(store.tiered)) == []
    (copy / "store" / "config" / "tieredStoreMetadata.json").write_text("{ no metadata")
    with open_tiered(copy / "tiered", copy / "store") as store:
        assert [finding.kind for finding in verify_flat(store.tiered)] == ["bad_metadata"]
        assert store.scan(["queue_id"]).read_all().num_rows == 3007


def test_opening(root, tmp_path):
    with pytest.raises(StoreError, match="tieredStoreFilePath"):
        open_tiered(tmp_path / "nothing")
    with pytest.raises(StoreError, match="no tiered storage"):
        open_tiered(root / "store")
    with pytest.raises(ValueError, match="read_only=True"):
        MessageStore.open(root / "store", tiered=root / "tiered")
    shutil.copytree(root / "tiered", tmp_path / "several")
    (cluster,) = (tmp_path / "several").iterdir()
    shutil.copytree(cluster / "golden", cluster / "other")
    with pytest.raises(StoreError, match="golden of cluster golden, other of cluster golden"):
        open_tiered(tmp_path / "several")
    for store in (
        open_tiered(tmp_path / "several", broker="other"),
        open_tiered(tmp_path / "several", root / "store"),
    ):
        with store:
            assert store.max_queue_offset("Orders", 0) == 960
        with pytest.raises(StoreClosedError):
            store.get_message("Orders")


def test_a_broker_that_uploads_and_deletes_meanwhile(root, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(root / "tiered", copy)
    (folder,) = copy.glob("*_golden/golden/Orders/0")
    logs, units = (sorted((folder / kind).iterdir(), key=lambda path: path.name[8:]) for kind in ("COMMIT_LOG", "CONSUME_QUEUE"))
    last, whole = units[-1], units[-1].read_bytes()
    last.write_bytes(whole[:1000])
    with open_tiered(copy) as store:
        assert store.max_queue_offset("Orders", 0) == 850
        last.write_bytes(whole)
        store.refresh()
        assert store.max_queue_offset("Orders", 0) == 960 and len(store.get_message("Orders", 0, 955)) == 5
        # Retention: the oldest files go, and messages begin with the first whole one of the log.
        first = store.get_message("Orders", 0, 0, 200).messages + store.get_message("Orders", 0, 200, 200).messages
        logs[0].unlink()
        store.refresh()
        begin = next(each.queue_offset for each in first if each.phy_offset >= int(logs[1].name[8:]))
        assert store.min_queue_offset("Orders", 0) == begin > 100
        assert store.get_message("Orders", 0, 0).status is GetMessageStatus.OFFSET_TOO_SMALL
        left = store.scan(["queue_offset"], topic="Orders", queue_id=0).read_all()
        assert left["queue_offset"].to_pylist() == list(range(begin, 960))
        assert len(store.query_message("Orders", "ORD-100000")) == 0
        assert list(verify_flat(store.tiered)) == []


def test_data_are_there():
    assert {path.name for path in Path(oracle_tiered.DATA).iterdir()} >= {"store.tar.xz", "store.running.tar.xz"}


def test_odd_arguments_are_named(tiered):
    pytest.importorskip("pyarrow")
    topic = tiered.topics()[0]
    queue_id = tiered.queue_ids(topic)[0]
    numbers = {
        "queue_id": [
            lambda value: tiered.min_queue_offset(topic, value),
            lambda value: tiered.max_queue_offset(topic, value),
            lambda value: tiered.get_message(topic, value),
            lambda value: tiered.get_table(topic, value),
            lambda value: tiered.offset_by_time(topic, value, 0),
            lambda value: tiered.scan(queue_id=[0, value]),
        ],
        "queue_offset": [
            lambda value: tiered.get_message(topic, queue_id, value),
            lambda value: tiered.get_table(topic, queue_id, value),
        ],
        "max_num": [
            lambda value: tiered.get_message(topic, queue_id, 0, value),
            lambda value: tiered.get_table(topic, queue_id, 0, "1" if value is None else value),
            lambda value: tiered.query_message(topic, "k", value),
        ],
        "max_bytes": [lambda value: tiered.get_message(topic, queue_id, max_bytes="1" if value is None else value)],
        "batch_size": [lambda value: tiered.scan(batch_size=value)],
    }
    words = {
        "topic": [
            tiered.queue_ids,
            tiered.min_queue_offset,
            tiered.max_queue_offset,
            tiered.get_message,
            tiered.get_table,
            lambda value: tiered.offset_by_time(value, 0, 0),
            lambda value: tiered.query_message(value, "k"),
            lambda value: tiered.scan(topic=[topic, value]),
        ],
        "key": [lambda value: tiered.query_message(topic, value)],
        "tags": [
            lambda value: tiered.get_message(topic, tags=["a", value]),
            lambda value: tiered.get_table(topic, tags=["a", value]),
            lambda value: tiered.scan(tags=["a", value]),
        ],
    }
    for wrong, by_name in (([None, "1", b"1", 1.5, [1]], numbers), ([None, 1, b"T", ["T"]], words)):
        for name, calls in by_name.items():
            for call in calls:
                for value in wrong:
                    with pytest.raises((TypeError, ValueError), match=rf"^{name} is "):
                        call(value)
    high = tiered.max_queue_offset(np.str_(topic), np.int32(queue_id))
    assert high > 0 and tiered.offset_by_time(topic, np.int64(queue_id), np.int64(2**60)) == high
    assert tiered.get_table(np.str_(topic), np.int32(queue_id), np.int64(0), np.int64(2)).num_rows == 2
    assert len(tiered.get_message(topic, np.int32(queue_id), np.int64(high - 1), np.int64(2)).messages) == 1
    assert tiered.scan(topic=np.array([topic]), queue_id=np.int64(queue_id), batch_size=np.int64(5)).read_all().num_rows > 0
