"""Light queues (%LMQ%): found as queues, and refused where messages are chosen by their own topic; never 0 rows in silence."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from small_store import SMALL

from rmqstore import Message, MessageStore, StoreConfig, UnsupportedFormatError
from rmqstore.cli import main
from rmqstore.offline.export import ExportOptions, export
from rmqstore.selection import Selection

pytest.importorskip("pyarrow")

CONFIG = StoreConfig(**SMALL, enable_lmq=True, enable_multi_dispatch=True, index_tags=True)
LIGHT = "%LMQ%dev"
# Texts, like those of Spark.
SMALL_OPTIONS = {name: str(value) for name, value in SMALL.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Six messages of T, the odd ones for two light queues too; the light queue's offsets are others than theirs."""
    path = tmp_path_factory.mktemp("light") / "store"
    with MessageStore.open(path, config=CONFIG) as store:
        for number in range(6):
            names = {"INNER_MULTI_DISPATCH": f"{LIGHT},%LMQ%other"} if number % 2 else {}
            store.put_message(Message("T", b"%d" % number, keys=["K"], tags="A", properties=names), number % 3)
    return path


def refused(call):
    with pytest.raises(Exception, match=f"{LIGHT} is a light queue.*get_table") as caught:
        call()
    return caught.value


def test_a_scan_refuses_one(root):
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        for topic in (LIGHT, ["T", LIGHT]):
            assert isinstance(refused(lambda topic=topic: store.scan(["body"], topic=topic)), UnsupportedFormatError)
        assert store.scan(["body"], topic="%LMQ%nobody").read_all().num_rows == 0
        assert store.get_table(LIGHT, columns=["body"])["body"].to_pylist() == [b"1", b"3", b"5"]


def test_one_that_messages_were_sent_to_is_a_topic(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_message(Message(LIGHT, b"direct"))
        assert store.scan(["body"], topic=LIGHT).read_all().num_rows == 1


def test_frames_and_sql_refuse_one(root):
    polars = pytest.importorskip("polars")
    from rmqstore.polars import scan_store

    frame = scan_store(root, config=CONFIG)
    for more in (
        True,
        polars.col("queue_offset") >= 1,
        polars.col("phy_offset") == 0,
        polars.col("keys").list.contains("K"),
    ):
        refused(lambda more=more: frame.filter((polars.col("topic") == LIGHT) & more).collect())
    done = CliRunner().invoke(main, ["sql", str(root), f"select body from messages where topic = '{LIGHT}'"])
    assert done.exit_code == 3 and "is a light queue" in done.stderr


@pytest.mark.parametrize("name", ["out.jsonl", "out.arrow"])
def test_an_export_has_its_messages(root, tmp_path, name):
    def exported(**choice):
        path = tmp_path / name
        export(
            root,
            path,
            Selection(**choice),
            ExportOptions(config=CONFIG, columns=["topic", "body"], body="text", force=True),
        )
        if name.endswith(".jsonl"):
            return [json.loads(line)["body"] for line in path.read_text().splitlines()]
        import pyarrow as pa

        return pa.ipc.open_file(path).read_all()["body"].to_pylist()

    assert exported(topics=(LIGHT,)) == ["1", "3", "5"]
    assert exported(topics=(LIGHT, "T")) == ["0", "1", "2", "3", "4", "5"]
    assert exported(topics=(LIGHT,), queue_ids=(0,), begin_queue_offset=1) == ["3", "5"]
    assert exported(topics=(LIGHT,), tags="A", keys=("K",), end_queue_offset=2) == ["1", "3"]
    assert exported(topics=(LIGHT,), tags="B") == exported(topics=("%LMQ%nobody",)) == []


def test_spark_refuses_one_by_the_log_and_reads_it_as_a_queue(root):
    from rmqstore.spark.plan import LogPlan, queue_pieces

    plan = LogPlan.of(root, CONFIG)
    refused(lambda: plan.refuse_light_queues([LIGHT]))
    plan.refuse_light_queues(["T", "%LMQ%nobody"])
    assert [(piece.begin, piece.end) for piece in queue_pieces(plan, Selection(topics=(LIGHT,)), 1 << 20)] == [(0, 3)]


@pytest.mark.parametrize("mode", ["commitlog", "queue"])
def test_a_filter_of_spark_never_finds_nothing_in_silence(root, caplog, mode):
    pytest.importorskip("pyspark")
    from rmqstore.spark.options import ReadOptions
    from rmqstore.spark.reader import StoreReader, spark_schema

    def partitions(**options):
        given = {"path": str(root), "mode": mode, **SMALL_OPTIONS, **options}
        return StoreReader(ReadOptions.parse(given), spark_schema(["body"], damage=False), given).partitions()

    # The source never learns of a filter.
    assert partitions()
    assert "is a light queue" in caplog.text and "with the options topic and mode=queue" in caplog.text
    caplog.clear()
    assert partitions(topic="T")
    assert not caplog.text
    if mode == "queue":
        assert partitions(topic=LIGHT)
