"""The batch source: every option, schemas and projection, damage, and stores that are not as they should be."""

from __future__ import annotations

import datetime
import gc
import inspect
import os
import shutil
import zlib
from functools import reduce

import pytest
from stores import SEGMENT, START, make_store, messages, overwrite, scanned, small_config

from rmqstore import Message, MessageStore, StoreError
from rmqstore.message import SysFlag
from rmqstore.store.columns import DEFAULT_COLUMNS

pytestmark = [pytest.mark.spark, pytest.mark.java]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("source") / "store")


def read(spark, path, schema=None, **options):
    reader = spark.read.format("rocketmq-store")
    if schema is not None:
        reader = reader.schema(schema)
    return reader.options(**options).load(str(path))


def plain(row):
    """A row of Spark as the dict that a scan gives."""
    values = row.asDict()
    for name, value in values.items():
        if isinstance(value, bytearray):
            values[name] = bytes(value)
        elif isinstance(value, datetime.datetime):
            values[name] = value.astimezone(datetime.timezone.utc)
    return values


def expected(path, columns=None, **choice):
    rows = scanned(path, columns, **choice)
    for row in rows:
        if "properties" in row:
            row["properties"] = dict(row["properties"])
    return rows


def offsets(frame):
    return [row.phy_offset for row in frame.select("phy_offset").collect()]


def test_a_frame_holds_what_a_scan_gives(spark, path):
    from pyspark.sql.pandas.types import to_arrow_schema

    from rmqstore.spark.source import StoreSource

    frame = read(spark, path, partition_bytes="6000")
    assert frame.columns == list(DEFAULT_COLUMNS)
    assert [plain(row) for row in frame.collect()] == expected(path)
    pieces = [6000, 6000, SEGMENT - 12000]
    with MessageStore.open(path, read_only=True) as store:
        whole, rest = divmod(store.commit_log.max_offset, SEGMENT)
    assert frame.rdd.getNumPartitions() == whole * len(pieces) + -(-rest // 6000)
    # The reader yields the types that Spark expects of this schema.
    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        for options in ({}, {"corrupt": "report"}):
            schema = read(spark, path, **options).schema
            yielded = StoreSource({"path": str(path), **options}).reader(schema).job.schema
            assert yielded.equals(to_arrow_schema(schema, timezone="UTC"))


def test_projection(spark, path, monkeypatch):
    # A schema, or option columns, says what is decoded; none at all still counts.
    frame = read(spark, path, "tags string, unique_key string, store_timestamp timestamp, body_stored binary")
    want = expected(path, ["tags", "unique_key", "store_timestamp", "body_stored"])
    assert [plain(row) for row in frame.collect()] == want
    frame = read(spark, path, columns="properties, keys")
    assert [plain(row) for row in frame.collect()] == expected(path, ["properties", "keys"])
    from pyspark.sql.types import StructType

    from rmqstore.spark import reader
    from rmqstore.spark.options import ReadOptions

    if reader._version() >= (4, 3):
        assert read(spark, path, StructType([]), partition_bytes="5000").count() == 400
    monkeypatch.setattr(reader.pyspark, "__version__", "4.0.1")
    with pytest.raises(StoreError, match="loses the rows"):
        reader.checked_schema(StructType([]), ReadOptions(str(path)))
    monkeypatch.undo()
    assert read(spark, path, "topic string").where("topic = 'Stock'").count() == 134


def test_columns_without_nulls_are_declared_so(spark, path):
    # Spark then looks at no value before it takes it, which is a tenth of a scan.
    frame = read(spark, path)
    assert {field.name for field in frame.schema.fields if field.nullable} == {"tags"}
    assert all(field.nullable for field in read(spark, path, corrupt="report").schema.fields)
    # A user's schema may say it, of any of them; what it leaves open stays open.
    mixed = read(spark, path, "topic string not null, phy_offset bigint, tags string")
    assert [field.nullable for field in mixed.schema.fields] == [False, True, True]
    assert [plain(row) for row in mixed.collect()] == expected(path, ["topic", "phy_offset", "tags"])
    for mode in ("commitlog", "queue"):
        for names in (["topic", "store_timestamp"], ["unique_key", "keys", "body_stored", "properties"]):
            chosen = read(spark, path, columns=",".join(names), mode=mode, partition_bytes="5000")
            assert [field.nullable for field in chosen.schema.fields] == [name == "unique_key" for name in names]
            rows, want = [plain(row) for row in chosen.collect()], expected(path, names)
            if mode == "queue":
                rows, want = sorted(rows, key=str), sorted(want, key=str)
            assert rows == want
    # A union with rows of damage, and a filter that asks for nulls.
    both = read(spark, path).unionByName(read(spark, path, corrupt="report").drop("_corrupt"))
    assert both.count() == 800
    assert both.where("topic is null").count() == frame.where("topic is null").count() == 0


def test_filters(spark, path):
    # Each option alone and all together; the columns that are compared need not be asked for.
    some = {
        "topic": ("Orders", {"topic": "Orders"}),
        "queue_id": ("1", {"queue_id": 1}),
        "tags": ("EU || US", {"tags": "EU || US"}),
        "begin": (str(START + 50_000), {"begin": START + 50_000}),
        "end": ("2023-11-14T22:18:20+00:00", {"end": START + 300_000}),
        "begin_phy_offset": ("20001", {"begin_phy_offset": None}),
        "end_phy_offset": ("90001", {"end_phy_offset": None}),
    }
    everything = expected(path, ["phy_offset"])
    frames, wants, names = [], [], []
    for chosen in [[name] for name in some] + [list(some)]:
        choice = {}
        for name in chosen:
            choice.update({key: value for key, value in some[name][1].items() if value is not None})
        want = [row["phy_offset"] for row in expected(path, ["phy_offset"], **choice)]
        if "begin_phy_offset" in chosen:
            want = [at for at in want if at >= 20001]
        if "end_phy_offset" in chosen:
            want = [at for at in want if at < 90001]
        options = {name: some[name][0] for name in chosen}
        frames.append(read(spark, path, "phy_offset long", partition_bytes="20000", **options))
        wants.append(want)
        names.append(chosen)
    from pyspark.sql import functions as F

    union = reduce(lambda a, b: a.union(b), [f.withColumn("n", F.lit(i)) for i, f in enumerate(frames)])
    found = [[] for _ in frames]
    for row in union.collect():
        found[row.n].append(row.phy_offset)
    for name, got, want in zip(names, found, wants, strict=True):
        assert got == want and 0 < len(want) < len(everything), name


def test_bodies_as_they_are_stored(spark, tmp_path):
    with MessageStore.open(tmp_path / "store", config=small_config()) as store:
        body = b"compress me " * 40
        store.put_message(Message("Orders", zlib.compress(body), sys_flag=SysFlag.COMPRESSED))
        store.put_message(Message("Orders", b"plain"))
        stored = [bytes(message.body_stored) for message in store.messages()]
    assert stored[0] != body
    frame = read(spark, tmp_path / "store", "body binary, body_stored binary", decode_body="false")
    assert [tuple(map(bytes, row)) for row in frame.collect()] == [(each, each) for each in stored]
    frame = read(spark, tmp_path / "store", "body binary")
    assert [bytes(row.body) for row in frame.collect()] == [body, b"plain"]


def test_queues(spark, path):
    frame = read(spark, path, mode="queue", partition_bytes="9000", columns="topic,queue_id,queue_offset,body")
    rows = [plain(row) for row in frame.collect()]
    with MessageStore.open(path, read_only=True) as store:
        columns = ["topic", "queue_id", "queue_offset", "body"]
        tables = [store.get_table(topic, number, columns=columns) for topic in store.topics() for number in (0, 1)]
    assert rows == [row for table in tables for row in table.to_pylist()]
    assert frame.rdd.getNumPartitions() > 4
    chosen = read(spark, path, mode="queue", topic="Stock", queue_id="1", tags="EU", columns="topic,queue_id,tags")
    assert {tuple(row) for row in chosen.collect()} == {("Stock", 1, "EU")}


# ---------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def damaged(tmp_path_factory, path):
    """A store with one record that fails its CRC, one stretch that nothing can be read of, and one segment that is gone."""
    damaged = shutil.copytree(path, tmp_path_factory.mktemp("damaged") / "store")
    rows = scanned(path, ["phy_offset", "size"])
    overwrite(damaged, rows[10]["phy_offset"] + 90, b"\xff\xff")
    overwrite(damaged, rows[20]["phy_offset"], bytes(100))
    os.unlink(damaged / "commitlog" / f"{3 * SEGMENT:020d}")
    return damaged, rows


def place_of(phy_offset):
    return f"{phy_offset - phy_offset % SEGMENT:020d}, position {phy_offset % SEGMENT}"


def test_damage_fails_a_job(spark, damaged):
    path, rows = damaged
    for number, what in ((10, "does not agree with its CRC"), (20, "no whole record begins")):
        at = rows[number]["phy_offset"]
        with pytest.raises(Exception) as info:
            read(spark, path, begin_phy_offset=str(at), end_phy_offset=str(at + 1)).collect()
        assert what in str(info.value) and place_of(at) in str(info.value)
    with pytest.raises(Exception, match=f"the segment is missing.*{place_of(3 * SEGMENT)}"):
        read(spark, path, "phy_offset long", begin_phy_offset=str(2 * SEGMENT)).collect()


def test_damage_is_reported_or_passed_over(spark, damaged):
    path, rows = damaged
    frame = read(spark, path, corrupt="report", partition_bytes="3000")
    assert frame.columns == [*DEFAULT_COLUMNS, "_corrupt"]
    found = frame.select("phy_offset", "size", "topic", "corrupt", "_corrupt").collect()
    told = [row for row in found if row._corrupt]
    assert [row._corrupt.rpartition("/")[2] for row in told] == [
        f"{place_of(rows[10]['phy_offset'])}: BAD_BODY_CRC",
        f"{place_of(rows[20]['phy_offset'])}: EMPTY",
        f"{place_of(3 * SEGMENT)}: MISSING",
    ]
    assert [row.topic for row in told] == ["Orders", None, None]
    assert [row.corrupt for row in told] == [True, None, None]
    assert [row.size for row in told[1:]] == [rows[20]["size"], SEGMENT]
    gone = [row for row in rows if 3 * SEGMENT <= row["phy_offset"] < 4 * SEGMENT]
    whole = [row["phy_offset"] for row in rows if row not in [rows[10], rows[20], *gone]]
    assert [row.phy_offset for row in found if not row._corrupt] == whole
    assert offsets(read(spark, path, "phy_offset long, body binary", corrupt="skip")) == whole


def test_a_directory_in_the_place_of_a_segment_is_damage(spark, path, tmp_path):
    store = shutil.copytree(path, tmp_path / "store")
    segment = store / "commitlog" / f"{0:020d}"
    segment.unlink()
    segment.mkdir()
    left = [row["phy_offset"] for row in scanned(path, ["phy_offset"]) if row["phy_offset"] >= SEGMENT]
    for mode in ("commitlog", "queue"):
        with pytest.raises(Exception, match=f"move it away.*{segment}, position"):
            read(spark, store, mode=mode).collect()
        found = read(spark, store, corrupt="report", mode=mode, columns="phy_offset").collect()
        assert sorted(row.phy_offset for row in found if row._corrupt is None) == left
        told = {row._corrupt.partition(", position")[0] for row in found if row._corrupt}
        assert told == {str(segment)}


def test_units_that_are_gone_are_damage_too(spark, path, tmp_path):
    store = shutil.copytree(path, tmp_path / "store")
    frame = read(spark, store, mode="queue", topic="Orders", queue_id="0", columns="queue_offset")
    num = frame.count()
    file = store / "consumequeue" / "Orders" / "0" / f"{400:020d}"
    file.unlink()
    # A plan of before or one of now: the file lies between others.
    with pytest.raises(Exception) as info:
        read(spark, store, mode="queue", columns="body").collect()
    assert "queue offsets 20 to 39 of Orders/0" in str(info.value) and f"{file}, position 0" in str(info.value)
    options = {"mode": "queue", "topic": "Orders", "queue_id": "0"}
    found = read(spark, store, corrupt="report", **options).collect()
    (told,) = [row for row in found if row._corrupt]
    assert told._corrupt == f"{file}, position 0: MISSING, queue offsets 20 to 39 of Orders/0"
    assert (told.topic, told.queue_id, told.queue_offset, told.size, told.phy_offset) == ("Orders", 0, 20, None, None)
    assert len(found) - 1 == read(spark, store, corrupt="skip", **options).count() == num - 20


# ------------------------------------------------------------------------------------------- what cannot be, and growth


def test_a_store_that_is_being_written(spark, tmp_path):
    with MessageStore.open(tmp_path / "store", config=small_config()) as store:
        for message, queue_id in messages(100):
            store.put_message(message, queue_id)
        frame = read(spark, tmp_path / "store", "phy_offset long")
        assert frame.count() == 100
        for message, queue_id in messages(50, 100):
            store.put_message(message, queue_id)
        # Each load sees what was there when it was planned.
        assert read(spark, tmp_path / "store", "phy_offset long").count() == 150


def test_errors_say_what_to_do(spark, path, tmp_path):
    cut = shutil.copytree(path, tmp_path / "cut")
    last = sorted(os.listdir(cut / "commitlog"))[-1]
    os.truncate(cut / "commitlog" / last, 500)
    conf = tmp_path / "broker.conf"
    conf.write_text("mapedFileSizeCommitLog=8192\n")
    for options, schema, message in (
        ({"path": str(tmp_path / "none")}, None, "does not exist"),
        ({"mapped_file_size_commit_log": "8192"}, None, "position 8192"),
        ({"broker_conf": str(conf)}, None, "position 8192"),
        ({"topics": "A"}, None, "there is no option 'topics'"),
        ({}, "body string", "column body is binary, the schema says string"),
        ({}, "bodies binary", "there is no column 'bodies'"),
        ({}, "topic string, body binary, topic string", "column 'topic' is asked for twice"),
        ({}, "topic string, tags string not null", "column tags is never null; leave NOT NULL out"),
        ({"corrupt": "report"}, "topic string not null", "corrupt=report gives rows without it; leave NOT NULL out"),
    ):
        with pytest.raises(Exception) as info:
            read(spark, options.pop("path", str(path)), schema, **options).collect()
        assert message in str(info.value), options
    assert read(spark, path, "topic string", mapped_file_size_commit_log=str(SEGMENT)).count() == 400
    # A segment that was cut short hides nothing of the others, and what it lost is damage.
    for options in ({}, {"mapped_file_size_commit_log": str(SEGMENT)}):
        assert 300 < read(spark, cut, "topic string", corrupt="skip", **options).count() < 400
        with pytest.raises(Exception, match="no whole record begins"):
            read(spark, cut, "topic string", **options).count()
    conf.write_text(f"mapedFileSizeCommitLog={SEGMENT}\nmaxHashSlotNum=50\n")
    assert read(spark, path, "topic string", broker_conf=str(conf)).count() == 400


def test_batches_are_large_enough_to_be_worth_handing_over_and_small_enough_for_a_cache(tmp_path):
    import pyarrow as pa

    from rmqstore.spark.batches import ReadJob, piece_batches, spark_arrow_schema
    from rmqstore.spark.options import ReadOptions
    from rmqstore.spark.plan import LogPlan

    num = 40_000
    config = small_config(mapped_file_size_commit_log=64 << 20)
    with MessageStore.open(tmp_path, config=config) as store:
        bodies = pa.array([b"x" * 200] * num, pa.binary())
        store.put_table(pa.table({"body": bodies}), topic="Orders", queue_id=0)
    plan = LogPlan.of(tmp_path, config)
    (piece,) = plan.pieces()

    def batches(*columns):
        options = ReadOptions.parse({"path": str(tmp_path)})
        return list(piece_batches(ReadJob.of(plan, options, spark_arrow_schema(columns)), piece))

    for columns in (("phy_offset",), ("topic", "store_timestamp"), ("topic", "body"), tuple(DEFAULT_COLUMNS)):
        found = batches(*columns)
        assert sum(batch.num_rows for batch in found) == num
        for batch in found[:-1]:
            assert 250_000 <= batch.nbytes <= 1_600_000


def test_a_worker_leaves_its_imports_out_of_collections_and_nobody_else_does(spark, path):
    from rmqstore.spark.plan import LogPlan
    from rmqstore.spark.reader import PiecePartition
    from rmqstore.spark.source import StoreSource

    source = StoreSource({"path": str(path)})
    reader = source.reader(source.schema())
    piece = LogPlan.of(path).pieces()[0]

    def frozen_by_a_read():
        num = sum(batch.num_rows for batch in reader.read(PiecePartition(piece)))
        return num, gc.get_freeze_count()

    def in_a_worker(batches):
        import pyarrow as pa

        for _ in batches:
            num, frozen = frozen_by_a_read()
            yield pa.RecordBatch.from_arrays([pa.array([num]), pa.array([frozen])], names=["num", "frozen"])

    before = gc.get_freeze_count()
    here, after = frozen_by_a_read()
    assert here > 0 and after == before
    (row,) = spark.range(0, 1, 1, 1).mapInArrow(in_a_worker, "num long, frozen long").collect()
    assert row.num == here
    assert row.frozen > 10_000  # objects of the modules that are there


def test_what_a_task_imports_is_left_out_from_the_next_task_on(monkeypatch):
    import sys
    import types

    import pyspark

    from rmqstore.spark import tasks

    frozen = []
    monkeypatch.setattr(tasks, "gc", types.SimpleNamespace(freeze=lambda: frozen.append(len(sys.modules))))
    monkeypatch.setattr(tasks, "_modules_spared", 0)
    tasks.spare_collector()
    assert frozen == []
    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: object())
    tasks.spare_collector()
    tasks.spare_collector()
    assert len(frozen) == 1
    monkeypatch.setitem(sys.modules, "a_module_that_a_task_imports", types.ModuleType("it"))
    tasks.spare_collector()
    tasks.spare_collector()
    assert len(frozen) == 2
