"""Following a store: offsets, limits, growth, what retention took, and a stream that is killed and started again."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from spark_setting import spark_environment
from stores import SEGMENT, make_store, messages, overwrite, scanned, small_config

from rmqstore import Message, MessageStore

pytest.importorskip("pyspark")
from rmqstore.spark.reader import LIMITS

needs_limits = pytest.mark.skipif(not LIMITS, reason="PySpark before 4.2 knows no limits for a batch")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("stream") / "store", 300)


@pytest.fixture(scope="module")
def rows(path):
    return scanned(path, ["phy_offset", "size"])


def stream_reader(path, columns=("phy_offset",), available_now=False, **options):
    """The reader that Spark talks to, without Spark."""
    from rmqstore.spark.options import ReadOptions
    from rmqstore.spark.reader import StoreStreamReader, spark_schema

    raw = {"path": str(path), **options}
    reader = StoreStreamReader(ReadOptions.parse(raw), spark_schema(columns), raw)
    if available_now:
        reader.prepareForTriggerAvailableNow()
    return reader


def followed(reader, start=None, most=1000):
    """The batches that a reader gives to its end: a list of lists of phy offsets, and the offsets between them."""
    at = reader.initialOffset() if start is None else start
    batches, places = [], [at]
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at and len(batches) < most:
        found = [
            value
            for partition in reader.partitions(at, end)
            for batch in reader.read(partition)
            for value in batch.column("phy_offset").to_pylist()
        ]
        batches.append(found)
        places.append(end)
        at = json.loads(json.dumps(end))
    return batches, [place["phy_offset"] for place in places]


@needs_limits
def test_limits(path, rows):
    offsets = [row["phy_offset"] for row in rows]
    sizes = {row["phy_offset"]: row["size"] for row in rows}
    batches, places = followed(stream_reader(path))
    assert batches == [offsets] and places[0] == 0
    for options in (
        {"max_rows_per_trigger": "7"},
        {"max_rows_per_trigger": "1"},
        {"max_bytes_per_trigger": "1000"},
        {"max_bytes_per_trigger": "20000", "partition_bytes": "3000"},
        {"max_bytes_per_trigger": "1"},
        {"max_bytes_per_trigger": "3000", "max_rows_per_trigger": "4"},
    ):
        batches, places = followed(stream_reader(path, **options))
        assert [at for batch in batches for at in batch] == offsets, options
        most_rows = int(options.get("max_rows_per_trigger", 10**9))
        most_bytes = int(options.get("max_bytes_per_trigger", 10**9))
        assert all(len(batch) <= most_rows for batch in batches)
        # One record is taken however large it is.
        assert all(end - at <= most_bytes or len(batch) <= 1 for batch, at, end in zip(batches, places, places[1:]))
        # Every offset is a place that a scan comes by: a record, the blank behind one, or a segment's start.
        known = {*offsets, *(at + sizes[at] for at in offsets), *range(0, offsets[-1], SEGMENT)}
        assert set(places) <= known
        if most_rows > 1 and most_bytes > 500:
            assert min(len(batch) for batch in batches[:-1]) >= 1


def test_where_it_begins_and_ends(path, rows):
    offsets = [row["phy_offset"] for row in rows]
    end = rows[-1]["phy_offset"] + rows[-1]["size"]
    assert stream_reader(path, starting_offset="latest").initialOffset() == {"phy_offset": end}
    assert followed(stream_reader(path, starting_offset="latest"))[0] == []
    for begin, stop in ((1, 5000), (20001, 60001), (offsets[33], offsets[77])):
        options = {"begin_phy_offset": str(begin), "end_phy_offset": str(stop)}
        for limit in ({}, {"max_rows_per_trigger": "9"}, {"max_bytes_per_trigger": "2000"}):
            batches, _ = followed(stream_reader(path, **options, **limit))
            assert [at for batch in batches for at in batch] == [at for at in offsets if begin <= at < stop]
    assert stream_reader(path).reportLatestOffset() == {"phy_offset": end}


def test_an_older_spark_asks_for_the_end_alone(path, rows):
    # Before PySpark 4.2 there is neither a start nor a limit.
    reader = stream_reader(path, max_rows_per_trigger="3")
    assert reader.latestOffset() == {"phy_offset": rows[-1]["phy_offset"] + rows[-1]["size"]}


def test_growth(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=small_config()) as store:
        store.put_messages([message for message, _ in messages(10)])
        reader = stream_reader(path)
        seen, places = followed(reader)
        for part in range(12):
            store.put_messages([message for message, _ in messages(25, 10 + 25 * part)])
            more, places = followed(reader, {"phy_offset": places[-1]})
            seen += more
        assert [at for batch in seen for at in batch] == [row["phy_offset"] for row in scanned(path, ["phy_offset"])]
        # Messages after the trigger belong to the next run.
        reader = stream_reader(path, available_now=True)
        store.put_messages([message for message, _ in messages(25)])
        batches, _ = followed(reader)
        assert sum(map(len, batches)) == 310
        reader.stop()


@needs_limits
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_store_without_a_segment_is_waited_for(tmp_path, has_folder):
    # Spark takes the reader that reads along to its tasks as it was before there was anything.
    store = tmp_path / "store"
    (store / "commitlog" if has_folder else store).mkdir(parents=True)
    reader, in_tasks = stream_reader(store), pickle.loads(pickle.dumps(stream_reader(store)))
    start = reader.initialOffset()
    assert followed(reader, start) == ([], [0])
    assert reader.partitions(start, start) == []
    if has_folder:
        # A Java store makes a file and then extends it.
        (store / "commitlog" / f"{0:020d}").write_bytes(b"")
        assert followed(reader, start) == ([], [0])
        (store / "commitlog" / f"{0:020d}").unlink()
    make_store(store, 100)
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    found = [
        value
        for partition in reader.partitions(start, end)
        for batch in in_tasks.read(pickle.loads(pickle.dumps(partition)))
        for value in batch.column("phy_offset").to_pylist()
    ]
    assert found == [row["phy_offset"] for row in scanned(store, ["phy_offset"])]
    assert end["phy_offset"] > SEGMENT
    # And from then on as ever.
    with MessageStore.open(store, config=small_config()) as writer:
        for message, queue_id in messages(20, 100):
            writer.put_message(message, queue_id)
    (batch,), _ = followed(reader, end)
    assert len(batch) == 20


def test_a_first_segment_that_comes_while_the_size_is_asked_for(tmp_path, monkeypatch):
    store = tmp_path / "store"
    store.mkdir()
    reader = stream_reader(store)
    take_config, calls = type(reader)._take_config, []

    def then_it_comes(self):
        take_config(self)
        if not calls:
            make_store(store, 10)
        calls.append(self.config.mapped_file_size_commit_log)

    monkeypatch.setattr(type(reader), "_take_config", then_it_comes)
    (batch,), _ = followed(reader)
    assert len(batch) == 10 and calls == [1 << 30, SEGMENT]


def test_a_size_that_was_given_is_not_guessed(tmp_path):
    from rmqstore import GeometryError

    store = tmp_path / "store"
    store.mkdir()
    conf = tmp_path / "broker.conf"
    conf.write_text("mapedFileSizeCommitLog=8192\n")
    for options in ({"mapped_file_size_commit_log": "8192"}, {"broker_conf": str(conf)}):
        reader = stream_reader(store, **options)
        start = reader.initialOffset()
        make_store(store, 10)
        with pytest.raises(GeometryError, match="configuration says 8192"):
            followed(reader, start)
        shutil.rmtree(store)
        store.mkdir()


def test_growth_while_it_is_read(tmp_path):
    # A writer on another thread; every batch is read while it writes.
    path = tmp_path / "store"
    num = 3000
    with MessageStore.open(path, config=small_config()) as store:
        store.put_message(Message("Orders", b"first"))

        def write():
            for i, (message, queue_id) in enumerate(messages(num)):
                store.put_message(message, queue_id)
                if i % 50 == 0:
                    time.sleep(0.002)

        reader = stream_reader(path, max_bytes_per_trigger="30000", partition_bytes="9000")
        writer = threading.Thread(target=write)
        writer.start()
        seen, batches, at = [], 0, reader.initialOffset()
        while writer.is_alive() or len(seen) <= num:
            more, places = followed(reader, at, most=1)
            at = {"phy_offset": places[-1]}
            batches += len(more)
            seen += [each for batch in more for each in batch]
        writer.join()
        assert seen == [row["phy_offset"] for row in scanned(path, ["phy_offset"])]
        assert batches > 20


def test_a_log_that_was_cut(tmp_path):
    from rmqstore import LostLogError, OffsetOutOfRangeError

    path = make_store(tmp_path / "store", 60)
    readers = [stream_reader(path), stream_reader(path, fail_on_data_loss="false")]
    places = [followed(reader)[1][-1] for reader in readers]
    rows = scanned(path, ["phy_offset", "size"])
    # A recovery cut the last records, and others were put there.
    overwrite(path, rows[-3]["phy_offset"], bytes(SEGMENT - rows[-3]["phy_offset"] % SEGMENT))
    with pytest.raises(LostLogError) as lost:
        MessageStore.open(path, config=small_config(), recovery="truncate")
    with MessageStore.open(path, config=small_config(), recovery="truncate", drop_units=lost.value.num) as store:
        store.put_message(Message("Late", b"x" * 2000))
    with pytest.raises(OffsetOutOfRangeError, match="cut or replaced"):
        followed(readers[0], {"phy_offset": places[0]})
    # A stream that comes back with its checkpoint finds that no record begins there, before it reads anything.
    late = {"phy_offset": places[0]}
    with pytest.raises(OffsetOutOfRangeError, match=f"nothing begins at phy offset {places[0]}.*position"):
        followed(stream_reader(path), late)
    for reader in (readers[1], stream_reader(path, fail_on_data_loss="false")):
        assert followed(reader, late)[0] in ([], [[]])
    fresh, _ = followed(stream_reader(path))
    assert [at for batch in fresh for at in batch] == [row["phy_offset"] for row in scanned(path, ["phy_offset"])]


def test_damage_behind_which_records_follow(path, tmp_path, rows):
    damaged = shutil.copytree(path, tmp_path / "store")
    overwrite(damaged, rows[-9]["phy_offset"], bytes(20))
    overwrite(damaged, rows[40]["phy_offset"], bytes(20))
    want = [row["phy_offset"] for i, row in enumerate(rows) if i not in (40, len(rows) - 9)]
    for limit in ({}, {"max_rows_per_trigger": "5"}, {"max_bytes_per_trigger": "1500"}):
        batches, _ = followed(stream_reader(damaged, corrupt="skip", partition_bytes="700", **limit))
        assert [at for batch in batches for at in batch] == want
    with pytest.raises(Exception, match=f"position {rows[40]['phy_offset'] % SEGMENT}"):
        followed(stream_reader(damaged))


def test_what_retention_took(path, tmp_path, rows):
    from rmqstore import OffsetOutOfRangeError

    store = shutil.copytree(path, tmp_path / "store")
    reader, lenient = stream_reader(store), stream_reader(store, fail_on_data_loss="false")
    at, end = reader.initialOffset(), reader.latestOffset({"phy_offset": 0}, reader.getDefaultReadLimit())
    parts = reader.partitions(at, end)
    for base in (0, SEGMENT):
        os.unlink(store / "commitlog" / f"{base:020d}")
    left = [row["phy_offset"] for row in rows if row["phy_offset"] >= 2 * SEGMENT]
    with pytest.raises(
        OffsetOutOfRangeError, match=r"phy offset 0 on are not there any more.*fail_on_data_loss.*0{20}"
    ):
        reader.partitions(at, end)
    with pytest.raises(Exception, match=r"missing.*fail_on_data_loss"):
        list(reader.read(parts[0]))
    batches, _ = followed(lenient, at)
    assert [each for batch in batches for each in batch] == left
    # A gap in the middle, and a store that is another one.
    os.unlink(store / "commitlog" / f"{4 * SEGMENT:020d}")
    with pytest.raises(OffsetOutOfRangeError, match="are missing"):
        stream_reader(store).partitions({"phy_offset": 2 * SEGMENT}, end)
    batches, _ = followed(stream_reader(store, fail_on_data_loss="false"), at)
    assert [each for batch in batches for each in batch] == [each for each in left if each // SEGMENT != 4]
    other = make_store(tmp_path / "other", 20)
    with pytest.raises(OffsetOutOfRangeError, match="but the log ends at"):
        followed(stream_reader(other), end)
    batches, _ = followed(stream_reader(other, fail_on_data_loss="false"), end)
    assert len(batches) == 1 and len(batches[0]) == 20


@needs_limits
@pytest.mark.spark
@pytest.mark.java
def test_a_stream_of_spark(spark, path, tmp_path, rows):
    batches = {}

    def keep(frame, number):
        batches[number] = [row.phy_offset for row in frame.select("phy_offset").collect()]

    def run(checkpoint, **options):
        batches.clear()
        stream = spark.readStream.format("rocketmq-store").schema("phy_offset long, body binary").options(**options)
        query = (
            stream.load(str(path))
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
        return query

    query = run("a", max_rows_per_trigger="120")
    assert [len(batches[number]) for number in sorted(batches)] == [120, 120, 60]
    assert [at for number in sorted(batches) for at in batches[number]] == [row["phy_offset"] for row in rows]
    end = rows[-1]["phy_offset"] + rows[-1]["size"]
    assert json.loads(query.lastProgress["sources"][0]["endOffset"]) == {"phy_offset": end}
    # The checkpoint says that all was seen.
    run("a")
    assert not batches
    run("b", max_bytes_per_trigger="40000")
    assert [at for number in sorted(batches) for at in batches[number]] == [row["phy_offset"] for row in rows]
    assert len(batches) == -(-end // 40000)


@pytest.mark.spark
@pytest.mark.java
def test_a_stream_of_spark_goes_on_when_the_first_segment_comes(spark, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    found = []
    query = (
        spark.readStream.format("rocketmq-store").schema("phy_offset long, body binary").load(str(store))
        .writeStream.foreachBatch(lambda frame, number: found.extend(row.phy_offset for row in frame.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(processingTime="0 seconds")
        .start()
    )  # fmt: skip
    try:
        query.processAllAvailable()
        assert found == []
        make_store(store, 100)
        query.processAllAvailable()
    finally:
        query.stop()
    assert found == [row["phy_offset"] for row in scanned(store, ["phy_offset"])]


CHILD = """
import sys
from pyspark.sql import SparkSession
import spark_setting, rmqstore.spark
builder = SparkSession.builder.master("local[2]")
for name, value in spark_setting.SETTINGS.items():
    builder = builder.config(name, value)
spark = builder.config("spark.sql.warehouse.dir", sys.argv[2] + "/warehouse").getOrCreate()
rmqstore.spark.register(spark)
stream = spark.readStream.format("rocketmq-store").schema("phy_offset long, body binary")
query = (
    stream.option("max_rows_per_trigger", "100").option("partition_bytes", "12000").load(sys.argv[1])
    .writeStream.format("json").option("checkpointLocation", sys.argv[2] + "/checkpoint")
    .trigger(**({"availableNow": True} if sys.argv[3] == "now" else {"processingTime": "0 seconds"}))
    .start(sys.argv[2] + "/out")
)
query.awaitTermination()
"""


@needs_limits
@pytest.mark.spark
@pytest.mark.java
def test_a_killed_stream_gives_every_message_once(spark, tmp_path):
    # The sink keeps the files of whole batches; a batch that was cut short is asked for again by its offsets.
    path = make_store(tmp_path / "store", 500)
    work = tmp_path / "work"
    work.mkdir()
    environment = spark_environment()

    def start(how):
        log = open(tmp_path / "child.log", "a")
        command = [sys.executable, "-c", CHILD, str(path), str(work), how]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def begun():
        offsets = work / "checkpoint" / "offsets"
        return sum(name.isdigit() for name in os.listdir(offsets)) if offsets.exists() else 0

    child = start("on")
    deadline = time.monotonic() + 240
    while begun() < 2 and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    # Python, its workers and the JVM, all at once, in the middle of whatever they do.
    os.killpg(child.pid, signal.SIGKILL)
    assert child.wait(240) == -signal.SIGKILL, (tmp_path / "child.log").read_text()[-2000:]
    before = begun()
    assert 2 <= before < 5
    with MessageStore.open(path, config=small_config()) as store:
        store.put_message(Message("Orders", b"message 000500 and last"))
    child = start("now")
    assert child.wait(180) == 0, (tmp_path / "child.log").read_text()[-2000:]
    got = spark.read.schema("phy_offset long, body binary").json(str(work / "out")).select("phy_offset").collect()
    assert sorted(row.phy_offset for row in got) == [row["phy_offset"] for row in scanned(path, ["phy_offset"])]
    assert len(got) == 501
