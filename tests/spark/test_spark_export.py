"""Exported files against what one scan gives, and counting."""

from __future__ import annotations

import base64
import datetime
import json
from collections import Counter

import pytest
from stores import overwrite, scanned, small_config

from rmqstore import Message, MessageStore

pytestmark = [pytest.mark.spark, pytest.mark.java]

HOUR = 3_600_000
# Two days, cut where a zone other than UTC would cut elsewhere.
MIDNIGHT = 1_700_006_400_000
BODIES = [b"plain", 'größe\n"quoted", 取消'.encode(), b"\xff\xfe\x00bytes" * 20, b"", b"not \xc3\x28 utf-8"]
TOPICS = ["Orders", "%RETRY%billing", "123"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("export") / "store"
    times = iter([MIDNIGHT - 2 * HOUR + i * HOUR // 3 for i in range(60)])
    with MessageStore.open(root, config=small_config(clock=lambda: next(times))) as store:
        for i in range(30):
            message = Message(TOPICS[i % 3], BODIES[i % 5], keys=[f"K{i}", "all"], tags=("EU", None)[i % 2])
            store.put_message(message, i % 2)
    return root


def moments(rows):
    return [row["store_timestamp"] for row in rows]


def test_parquet_has_all_columns_in_folders_of_topic_and_utc_day(spark, path, tmp_path):
    from rmqstore.spark import export

    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    spark.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
    try:
        report = export(spark, path, tmp_path / "out", partition_bytes=3000)
        rows = [row.asDict() for row in spark.read.parquet(str(tmp_path / "out")).orderBy("phy_offset").collect()]
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
        spark.conf.unset("spark.sql.sources.partitionColumnTypeInference.enabled")
    expected = scanned(path)
    assert report.messages == len(rows) == len(expected) == 30
    assert report.columns[-2:] == ("topic", "day") and set(report.columns) == {*expected[0], "day"}
    days = set()
    for row, want in zip(rows, expected, strict=True):
        day = row.pop("day")
        days.add(day)
        assert day == want["store_timestamp"].date().isoformat()
        assert (row["topic"], bytes(row["body"]), row["keys"]) == (want["topic"], want["body"], want["keys"])
        assert row["store_timestamp"].astimezone(datetime.timezone.utc) == want["store_timestamp"]
        assert row["properties"] == dict(want["properties"])
    assert len(days) == 2
    folders = {each.name for each in (tmp_path / "out").iterdir() if each.is_dir()}
    assert folders == {"topic=Orders", "topic=%25RETRY%25billing", "topic=123"}


def test_json_has_text_where_a_body_is_utf8_and_base64_elsewhere(spark, path, tmp_path):
    from pyspark.errors import AnalysisException

    from rmqstore.spark import export

    out = tmp_path / "out"
    report = export(spark, path, out, format="json", partition_by=(), topic=["Orders", "123"])
    rows = [json.loads(line) for file in out.glob("*.json") for line in file.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row["phy_offset"])
    expected = [row for row in scanned(path) if row["topic"] in ("Orders", "123")]
    assert report.messages == len(rows) == len(expected) == 20
    seen = Counter()
    for row, want in zip(rows, expected, strict=True):
        seen[row["body_encoding"]] += 1
        body = row["body"].encode() if row["body_encoding"] == "utf-8" else base64.b64decode(row["body"], validate=True)
        assert body == want["body"] and row["tags"] == want["tags"] and row["keys"] == want["keys"]
        assert datetime.datetime.fromisoformat(row["store_timestamp"].replace("Z", "+00:00")) == want["store_timestamp"]
    assert seen["utf-8"] == 12 and seen["base64"] == 8
    with pytest.raises(AnalysisException, match="already exists"):
        export(spark, path, out, format="json", partition_by=())
    export(spark, path, out, format="json", partition_by=(), save_mode="append", topic="Orders")
    assert sum(len(file.read_text().splitlines()) for file in out.glob("*.json")) == 30


def test_json_of_chosen_columns_in_folders_of_the_hour(spark, path, tmp_path):
    from rmqstore.spark import export

    out = tmp_path / "out"
    columns = ["topic", "body", "keys", "properties"]
    report = export(spark, path, out, format="json", partition_by=["hour"], columns=columns)
    assert report.columns == ("topic", "body", "body_encoding", "keys", "properties", "hour")
    found = Counter()
    for file in out.glob("hour=*/*.json"):
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            assert list(row) == list(report.columns[:-1]) and row["keys"][-1] == "all"
            assert row["properties"]["KEYS"] == " ".join(row["keys"])
            coded = row["body_encoding"] == "base64"
            found[int(file.parent.name[5:]), base64.b64decode(row["body"]) if coded else row["body"].encode()] += 1
    assert found == Counter((row["store_timestamp"].hour, row["body"]) for row in scanned(path))


def test_count(spark, path):
    from rmqstore.spark.export import count

    rows = scanned(path)
    assert count(spark, path, partition_bytes=2000) == 30
    assert count(spark, path, topic="123", tags=["EU"]) == 5
    groups = Counter((row["topic"], row["store_timestamp"].date(), row["tags"]) for row in rows)
    assert count(spark, path, by=["topic", "day", "tags"]) == groups


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"format": "xml"}, "format is 'xml'; give parquet, json or orc"),
        ({"partition_by": ["body"]}, "partition_by has 'body'"),
        ({"partition_by": ["day", "day"]}, "partition_by has 'day'"),
        ({"save_mode": "ignore"}, "save_mode is 'ignore'"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_is_written(spark, path, tmp_path, arguments, text):
    from rmqstore.spark import export

    with pytest.raises(ValueError, match=text):
        export(spark, path, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_damage_stops_an_export_unless_it_is_passed_over(spark, tmp_path):
    from pyspark.errors import PySparkException

    from rmqstore.spark import export

    root = tmp_path / "store"
    with MessageStore.open(root, config=small_config()) as store:
        places = [store.put_message(Message("Orders", b"message %d" % i, keys=[f"K{i}"])).phy_offset for i in range(99)]
    overwrite(root, places[7] + 92, b"XXXX")
    with pytest.raises(PySparkException, match=r"commitlog/0{20}, position \d+"):
        export(spark, root, tmp_path / "out", partition_by=())
    assert not list((tmp_path / "out").glob("*.parquet"))
    report = export(spark, root, tmp_path / "out", partition_by=(), save_mode="overwrite", corrupt="skip")
    assert report.messages == 98
