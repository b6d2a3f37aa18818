"""Metrics: valid text whatever a store holds, rocketmq-exporter's names with its labels and sums, numbers that are true.

The text is read by prometheus_client's own parser.  Expected numbers come from the queues of the golden broker as Java read
them, and from plain sums over the store's files.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import golden
import pytest
from click.testing import CliRunner

from rmqstore import Message, MessageStore, StoreConfig, StoreError, describe
from rmqstore.cli import main
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.errors import MissingDependencyError

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from rmqstore.offline import metrics

ROOT = Path(__file__).resolve().parents[2]
T0 = 1_700_000_000_000
SMALL = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "max_hash_slot_num": 10,
    "max_index_num": 20,
    "clean_resource_interval": 0,
}
# Names and labels as rocketmq-exporter has them (RMQMetricsCollector.java, 0.0.3), but for those labels that no disk tells:
# countOfOnlineConsumers and msgModel of the diffs; brokerHost (empty there), des, boottime and broker_version.
EXPORTER = {
    "rocketmq_producer_offset": {"cluster", "broker", "topic"},
    "rocketmq_topic_retry_offset": {"cluster", "broker", "topic"},
    "rocketmq_topic_dlq_offset": {"cluster", "broker", "group"},
    "rocketmq_consumer_offset": {"cluster", "broker", "topic", "group"},
    "rocketmq_group_diff": {"group", "topic"},
    "rocketmq_group_retrydiff": {"group", "topic"},
    "rocketmq_group_get_latency_by_storetime": {"cluster", "broker", "topic", "group"},
    "rocketmq_brokeruntime_commitlog_disk_ratio": {"cluster", "brokerIP"},
    "rocketmq_brokeruntime_consumequeue_disk_ratio": {"cluster", "brokerIP"},
    "rocketmq_brokeruntime_commitlogdir_capacity_total": {"cluster", "brokerIP"},
    "rocketmq_brokeruntime_commitlogdir_capacity_free": {"cluster", "brokerIP"},
    "rocketmq_brokeruntime_commitlog_maxoffset": {"cluster", "brokerIP"},
    "rocketmq_brokeruntime_commitlog_minoffset": {"cluster", "brokerIP"},
    "rocketmq_brokeruntime_earliest_message_timestamp": {"cluster", "brokerIP"},
    "rocketmq_brokeruntime_remain_howmanydata_toflush": {"cluster", "brokerIP"},
}


def series(text):
    """{(name, sorted labels): value} of an exposition text, each series once."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def value(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def run(*arguments, **options):
    result = CliRunner().invoke(main, ["metrics", *map(str, arguments)], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def retry_store(path, config=None):
    config = config or StoreConfig(**{**SMALL, "clock": lambda: T0})
    with MessageStore.open(path, config=config) as store:
        for i in range(10):
            store.put_message(Message("Orders", b"x", keys=[f"K{i}"]), queue_id=i % 3)
        store.put_message(Message("%RETRY%billing", b"again", keys=["K"]))
        store.put_message(Message("%DLQ%billing", b"dead", keys=["K"]))
        store.put_message(Message("%DLQ%billing", b"dead", keys=["K"]))
        store.consumer_offsets.commit("billing", "Orders", 0, 3)
        store.consumer_offsets.commit("billing", "%RETRY%billing", 0, 0)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def test_a_brokers_numbers(broker):
    found = series(metrics.text(metrics.collect(broker)))
    queues = list(golden.lines("broker", "queue"))
    (bounds,) = golden.lines("broker", "store")
    topics = {queue["topic"] for queue in queues}
    for topic in topics:
        ends = [queue["max"] for queue in queues if queue["topic"] == topic]
        assert value(found, "rocketmq_producer_offset", topic=topic) == sum(ends)
        assert value(found, "rmqstore_queues", topic=topic) == len(ends)
        assert value(found, "rmqstore_topic_messages", topic=topic) == sum(ends)
    for queue in queues:
        where = {"topic": queue["topic"], "queue_id": str(queue["queueId"])}
        assert value(found, "rmqstore_queue_min_offset", **where) == queue["min"]
        assert value(found, "rmqstore_queue_max_offset", **where) == queue["max"]
    assert value(found, "rocketmq_brokeruntime_commitlog_maxoffset", brokerIP="127.0.0.1:20876") == bounds["maxPhy"]
    assert value(found, "rocketmq_brokeruntime_commitlog_minoffset", brokerIP="127.0.0.1:20876") == bounds["minPhy"]
    times = [line["store"] for line in golden.lines("broker", "msg")]
    assert value(found, "rocketmq_brokeruntime_earliest_message_timestamp", brokerIP="127.0.0.1:20876") == min(times)
    assert value(found, "rmqstore_last_store_timestamp_seconds") == max(times) / 1000
    assert value(found, "rmqstore_log_bytes") == bounds["maxPhy"]
    # The broker's own file of progress.
    written = (broker / "config" / "consumerOffset.json").read_text()
    table = json.loads(re.sub(r"([{,]\s*)(\d+)\s*:", r'\1"\2":', written))["offsetTable"]
    assert table
    for key, offsets in table.items():
        topic, _, group = key.partition("@")
        ends = {queue["queueId"]: queue["max"] for queue in queues if queue["topic"] == topic}
        assert value(found, "rocketmq_consumer_offset", topic=topic, group=group) == sum(offsets.values())
        behind = sum(end - offsets.get(str(queue_id), 0) for queue_id, end in ends.items())
        assert value(found, "rocketmq_group_diff", topic=topic, group=group) == behind
    assert value(found, "rmqstore_clean") == 1
    for part, count in (("commitlog", 5), ("index", 5)):
        files = os.listdir(broker / part)
        assert value(found, "rmqstore_files", part=part) == len(files) == count
        assert value(found, "rmqstore_size_bytes", part=part) == sum(
            (broker / part / name).stat().st_size for name in files
        )
    size = sum(path.stat().st_size for path in (broker / "consumequeue").rglob("0*") if path.is_file())
    assert value(found, "rmqstore_size_bytes", part="consumequeue") == size
    description = describe(broker)
    assert value(found, "rmqstore_index_entries") == sum(index.entries for index in description.index_files)
    point = description.checkpoint
    assert value(found, "rmqstore_checkpoint_timestamp_seconds", part="commitlog") == point.physic_msg_timestamp / 1000
    assert value(found, "rmqstore_checkpoint_lag_seconds", part="commitlog") == pytest.approx(
        (max(times) - point.physic_msg_timestamp) / 1000
    )
    # A field of the checkpoint that nobody wrote is not a time.
    assert ("rmqstore_checkpoint_timestamp_seconds", (("part", "consumequeue"),)) not in found
    status = os.statvfs(broker)
    total = value(found, "rocketmq_brokeruntime_commitlogdir_capacity_total", brokerIP="127.0.0.1:20876")
    assert total == status.f_blocks * status.f_frsize
    assert 0 < value(found, "rocketmq_brokeruntime_commitlog_disk_ratio", brokerIP="127.0.0.1:20876") <= 1


def test_names_and_labels_of_the_exporter(tmp_path):
    retry_store(tmp_path / "s")
    with MessageStore.open(tmp_path / "s", config=StoreConfig(**SMALL)) as store:
        found = series(metrics.text(metrics.collect(store, cluster="c1", broker="b1")))
    exporter = {}
    for name, labels in found:
        if name.startswith("rocketmq_"):
            exporter.setdefault(name, set()).update(key for key, _ in labels)
    assert exporter == EXPORTER
    assert {name for name in metrics.names() if name.startswith("rocketmq_")} == set(EXPORTER)
    assert all(name.startswith(("rocketmq_", "rmqstore_")) for name in metrics.names())
    assert {name for name, _ in found} <= set(metrics.names())


def test_retry_and_dead_letter_topics(tmp_path):
    found = series(metrics.text(metrics.collect(retry_store(tmp_path / "s"))))
    assert value(found, "rocketmq_producer_offset", topic="Orders") == 10
    assert value(found, "rocketmq_topic_retry_offset", topic="%RETRY%billing") == 1
    assert value(found, "rocketmq_topic_dlq_offset", group="billing") == 2
    # Queues without progress are consumed from their start.
    assert value(found, "rocketmq_group_diff", topic="Orders", group="billing") == 1 + 3 + 3
    assert value(found, "rmqstore_consumer_lag_messages", topic="Orders", group="billing", queue_id="1") == 3
    assert value(found, "rocketmq_group_retrydiff", topic="%RETRY%billing", group="billing") == 1
    assert (
        "rmqstore_consumer_queue_offset",
        (("group", "billing"), ("queue_id", "1"), ("topic", "Orders")),
    ) not in found


def test_latency_is_the_age_of_what_is_next(tmp_path):
    times = iter(range(T0, T0 + 10**9, 1000))
    config = StoreConfig(**{**SMALL, "clock": lambda: next(times)})
    with MessageStore.open(tmp_path / "s", config=config) as store:
        puts = [store.put_message(Message("T", b"x", keys=["K"]), queue_id=i % 2) for i in range(6)]
        store.consumer_offsets.commit("g", "T", 0, 1)
        store.consumer_offsets.commit("g", "T", 1, 2)
        store.consumer_offsets.commit("done", "T", 0, 3)
        store.consumer_offsets.commit("done", "T", 1, 99)
        stats = store.stats()
    oldest = min(puts[2].store_timestamp, puts[5].store_timestamp)
    reader = StoreConfig(**{**SMALL, "clock": lambda: T0 + 60_000})
    found = series(metrics.text(metrics.collect(tmp_path / "s", reader)))
    assert value(found, "rocketmq_group_get_latency_by_storetime", topic="T", group="g") == T0 + 60_000 - oldest
    assert value(found, "rocketmq_group_get_latency_by_storetime", topic="T", group="done") == 0
    # Beyond the end: the exporter's sum says so; our lag has no sample, as nobody knows what the queue held.
    assert value(found, "rocketmq_group_diff", topic="T", group="done") == 3 - 99
    lag = "rmqstore_consumer_lag_messages"
    assert (lag, (("group", "done"), ("queue_id", "1"), ("topic", "T"))) not in found
    assert value(found, lag, topic="T", group="done", queue_id="0") == 0
    assert [(each.group, each.queue_id, each.lag) for each in stats.consumers] == [
        ("done", 0, 0), ("done", 1, -96), ("g", 0, 2), ("g", 1, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("read_only", [True, False])
def test_what_did_not_change_is_not_asked_again(tmp_path, monkeypatch, read_only):
    config = StoreConfig(**SMALL)
    looks, units = [], []
    look, unit = ConsumeQueueStore.look, ConsumeQueueStore.unit
    monkeypatch.setattr(
        ConsumeQueueStore, "look", lambda self, *key, **more: (looks.append(key[:2]), look(self, *key, **more))[1]
    )
    monkeypatch.setattr(ConsumeQueueStore, "unit", lambda self, *key: (units.append(key), unit(self, *key))[1])

    def asked(store):
        looks.clear(), units.clear()
        stats = store.stats()
        # The one unit is that of the newest record.
        counts = len(looks), max(len(units) - 1, 0)
        store._state.known_numbers = None
        anew = store.stats()
        assert (stats.queues, stats.consumers) == (anew.queues, anew.consumers)
        assert (stats.dispatched_phy_offset, stats.sizes) == (anew.dispatched_phy_offset, anew.sizes)
        return counts

    with MessageStore.open(tmp_path / "s", config=config) as writer:
        for topic in ("A", "B"):
            writer.put_messages([Message(topic, b"x") for _ in range(9)], queue_id=[0, 1, 2] * 3)
        progress = writer.consumer_offsets
        for group in ("g", "h"):
            for queue_id in (0, 1, 2):
                progress.commit(group, "A", queue_id, 1)
        writer.flush()
        with MessageStore.open(tmp_path / "s", config=config, read_only=True) as reader:
            store = reader if read_only else writer
            # A place is read once for both groups; a reader reads it with the look.
            assert asked(store) == ((6, 0) if read_only else (6, 3))
            assert asked(store) == (0, 0)
            # A group went on: its numbers in the topic are read again.
            progress.commit("g", "A", 0, 2)
            progress.persist()
            assert asked(store) == (0, 0 if read_only else 2)
            # The log went on: a reader looks at the queue that grew.
            writer.put_message(Message("B", b"y"), queue_id=2)
            assert asked(store) == ((1, 0) if read_only else (6, 3))
            assert store.stats().queues[-1].max_queue_offset == 4
            # Retention took a file, or somebody a queue.
            if read_only:
                shutil.rmtree(tmp_path / "s" / "consumequeue" / "A" / "2")
                assert asked(store) == (0, 0)
                assert [(each.topic, each.queue_id) for each in store.stats().queues] == [
                    ("A", 0), ("A", 1), ("B", 0), ("B", 1), ("B", 2)
                ]  # fmt: skip


def test_queues_that_lag_behind_the_log_are_asked_again(tmp_path):
    config = StoreConfig(**SMALL)
    with MessageStore.open(tmp_path / "s", config=config) as writer:
        writer.put_messages([Message("T", b"x"), Message("U", b"x")])
        queue = tmp_path / "s" / "consumequeue" / "U" / "0" / ("0" * 20)
        units = queue.read_bytes()
        with MessageStore.open(tmp_path / "s", config=config, read_only=True) as reader:
            queue.write_bytes(bytes(len(units)))
            assert [each.max_queue_offset for each in reader.stats().queues] == [1, 0]
            queue.write_bytes(units)
            assert [each.max_queue_offset for each in reader.stats().queues] == [1, 1]


def test_stats_of_a_store_that_is_written(tmp_path):
    config = StoreConfig(**SMALL)
    with MessageStore.open(tmp_path / "s", config=config) as store:
        empty = store.stats()
        assert (empty.max_phy_offset, empty.queues, empty.first_store_timestamp, empty.last_store_timestamp) == (
            0,
            (),
            None,
            None,
        )
        put = store.put_message(Message("T", b"x", keys=["K"]))
        stats = store.stats()
        assert stats.writable and not stats.clean and not stats.disk_full
        assert stats.max_phy_offset == stats.dispatched_phy_offset == put.size
        assert 0 <= stats.unflushed_size <= put.size
        assert stats.first_store_timestamp == stats.last_store_timestamp == put.store_timestamp
        (queue,) = stats.queues
        assert (queue.topic, queue.messages, queue.files, queue.size) == ("T", 1, 1, 200)
        store.flush()
        assert store.stats().unflushed_size == 0
        with MessageStore.open(tmp_path / "s", config=config, read_only=True) as reader:
            assert reader.stats().unflushed_size is None
            store.put_message(Message("T", b"y", keys=["K"]))
            # A reader takes in what the writer did, unless it is asked not to.
            store.put_message(Message("U", b"z"))
            assert [queue.topic for queue in reader.stats(refresh=False).queues] == ["T"]
            assert b'"U"' not in metrics.text(metrics.collect(reader, refresh=False))
            assert reader.stats().queues[0].max_queue_offset == 2
            assert b'rmqstore_queues{topic="U"}' in metrics.text(metrics.collect(reader))
    for refresh in (True, False):
        with pytest.raises(StoreError):
            store.stats(refresh=refresh)


def test_what_is_in_no_queue_is_told(golden_copy):
    root = golden_copy("broker")
    for name in os.listdir(root / "consumequeue" / "RMQ_SYS_TRANS_HALF_TOPIC" / "0"):
        (root / "consumequeue" / "RMQ_SYS_TRANS_HALF_TOPIC" / "0" / name).unlink()
    found = series(metrics.text(metrics.collect(root)))
    assert value(found, "rmqstore_log_behind_queues_bytes") > 0


# ---------------------------------------------------------------------------------------------------------------------
# Hostile names, broken stores

NAMES = [
    'quote" and {brace}',
    "back\\slash",
    "line\nbreak",
    "carriage\rreturn",
    "ключ 鍵 😀",
    "\u202eevil\x1b[31m\x7f",
    "#HELP x y",
    "} 1\nrocketmq_fake 1",
    "",
]


def test_hostile_names_stay_in_their_labels(tmp_path):
    store = retry_store(tmp_path / "s")
    for name in NAMES[:-1]:
        os.makedirs(store / "consumequeue" / name / "0")
    raw = os.path.join(os.fsencode(store / "consumequeue"), b"\xff\xfe not UTF-8")
    os.makedirs(os.path.join(raw, b"0"))
    offsets = {f"Orders@{name}": {"0": 1} for name in NAMES}
    offsets |= {f"{name.replace('@', '')}@group": {"0": 1, "7": 2} for name in NAMES}
    offsets |= {"Orders@\ud800 lone": {"0": 1}, "Orders@\\ud800 lone": {"0": 2}, "no at sign": {"0": 3}}
    (store / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": offsets}))
    text = metrics.text(metrics.collect(store, StoreConfig(**SMALL), cluster='c"\n', broker="\\"))
    found = series(text)
    topics = {dict(labels).get("topic") for name, labels in found if name == "rmqstore_queues"}
    assert {*NAMES[:-1], "Orders"} <= topics
    groups = {dict(labels).get("group", "") for name, labels in found if name == "rocketmq_group_diff"}
    assert {*NAMES, "\\ud800 lone"} <= groups
    assert {name for name, _ in found} <= set(metrics.names())
    assert all(dict(labels)["cluster"] == 'c"\n' for name, labels in found if name == "rmqstore_up")
    # Every line is a comment or a sample: nothing broke out.
    for line in text.decode().split("\n"):
        assert re.match(r"(#|rocketmq_|rmqstore_|$)", line), line


def test_a_store_that_cannot_be_read(tmp_path, broker):
    with pytest.raises(StoreError):
        metrics.text(metrics.collect(tmp_path / "none"))
    found = series(metrics.text(metrics.collect([tmp_path / "none", broker])))
    assert value(found, "rmqstore_up", store=str(tmp_path / "none")) == 0
    assert value(found, "rmqstore_up", store=str(broker)) == 1
    # Every series of several stores says whose it is, so that none is there twice.
    assert all("store" in dict(labels) for _, labels in found)
    found = series(metrics.text(metrics.collect([broker, str(broker) + os.sep])))
    assert len(found) > 200


def test_a_damaged_store_has_metrics(golden_copy):
    root = golden_copy("broker")
    with open(root / "commitlog" / f"{0:020}", "r+b") as file:
        file.write(b"\0" * 4096)
    with open(root / "config" / "consumerOffset.json", "w") as file:
        file.write("{")
    with open(root / "config" / "consumerOffset.json.bak", "w") as file:
        file.write('{"offsetTable": {}}')
    newest = root / "index" / sorted(os.listdir(root / "index"))[-1]
    with open(newest, "r+b") as file:
        file.write(b"\xff" * 40)
    found = series(metrics.text(metrics.collect(root, StoreConfig(**golden.geometry("broker")))))
    assert value(found, "rmqstore_up") == 1
    assert all(math.isfinite(each) for each in found.values())
    assert not any(name == "rocketmq_brokeruntime_earliest_message_timestamp" for name, _ in found)


def test_findings_become_metrics(broker):
    found = series(metrics.text(metrics.collect(broker, findings=metrics.Findings({"bad_unit": 2, "bad_body_crc": 1}, T0))))
    assert value(found, "rmqstore_verify_findings", kind="bad_unit") == 2
    assert value(found, "rmqstore_verify_timestamp_seconds") == T0 / 1000
    found = series(metrics.text(metrics.collect(broker, findings=metrics.Findings({}, T0))))
    assert value(found, "rmqstore_verify_findings") == 0


def test_families_for_a_registry(broker):
    from prometheus_client import CollectorRegistry, generate_latest

    class Collector:
        def collect(self):
            return metrics.collect(broker)

    registry = CollectorRegistry()
    registry.register(Collector())
    assert set(series(generate_latest(registry))) == set(series(metrics.text(metrics.collect(broker))))
    assert metrics.content_type().startswith("text/plain")


def test_without_the_library(tmp_path, monkeypatch):
    retry_store(tmp_path / "s")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependencyError, match=r"rmqstore\[metrics\]"):
        metrics.text(metrics.collect(tmp_path / "s"))
    assert run(tmp_path / "s").exit_code == 3
    with MessageStore.open(tmp_path / "s", read_only=True) as store:
        assert store.stats().queues


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_the_command(broker, tmp_path):
    result = run(broker)
    assert result.exit_code == 0
    assert set(series(result.stdout_bytes)) == set(series(metrics.text(metrics.collect(broker))))
    target = tmp_path / "rocketmq.prom"
    target.write_text("old")
    (tmp_path / "broker.conf").write_text("brokerClusterName = Shop\nbrokerName=broker-a\n")
    result = run(broker, "-O", target, "--config", tmp_path / "broker.conf")
    assert (result.exit_code, result.output) == (0, "")
    found = series(target.read_bytes())
    assert value(found, "rocketmq_producer_offset", cluster="Shop", broker="broker-a", topic="Orders") == 10003
    assert target.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["broker.conf", "rocketmq.prom"]
    result = run(broker, "-O", target, "--cluster", "Other", "--json")
    assert json.loads(result.stdout)["series"] == len(series(target.read_bytes()))
    # What cannot be read leaves the old file, whose age is what one looks at.
    before = target.read_bytes()
    assert run(tmp_path, "-O", target).exit_code == 3
    assert target.read_bytes() == before
    assert run(broker, tmp_path / "none", "-O", target).exit_code == 0
    assert value(series(target.read_bytes()), "rmqstore_up", store=str(tmp_path / "none")) == 0
    assert run(broker, broker, "-o", "max_index_num=5").exit_code == 2


def test_findings_at_the_command_line(golden_copy, tmp_path):
    root = golden_copy("broker")
    with open(root / "commitlog" / f"{0:020}", "r+b") as file:
        file.seek(1000)
        file.write(b"X")
    command = [sys.executable, "-m", "rmqstore", "verify", str(root), "--json", "-o", "messageDelayLevel=1s 2s 30m 1h"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 1
    (tmp_path / "findings.json").write_bytes(done.stdout)
    found = series(run(root, "--findings", tmp_path / "findings.json").stdout_bytes)
    assert value(found, "rmqstore_verify_findings", kind="bad_body_crc") == 1
    assert value(found, "rmqstore_verify_timestamp_seconds") > 1.6e9
    # A run that was broken off has no summary.
    (tmp_path / "findings.json").write_bytes(done.stdout.splitlines()[0])
    assert run(root, "--findings", tmp_path / "findings.json").exit_code == 3


# ---------------------------------------------------------------------------------------------------------------------
# The dashboard and the document

_FUNCTIONS = {
    "abs", "and", "avg", "by", "clamp_min", "count", "delta", "deriv", "group_left", "group_right", "ignoring", "increase",
    "label_values", "max", "min", "offset", "on", "or", "predict_linear", "rate", "sum", "time", "timestamp", "topk",
    "unless", "without",
}  # fmt: skip


def queries(value):
    """Every query of a Grafana dashboard, wherever it stands."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name in ("expr", "query", "definition") and isinstance(each, str):
                yield each
            else:
                yield from queries(each)
    elif isinstance(value, list):
        for each in value:
            yield from queries(each)


def names_in(query):
    """The metrics that a PromQL expression names: words that are no label, function, text or number."""
    bare = re.sub(r'"[^"]*"', '""', query)
    bare = re.sub(r"\$\w+|\[[^\]]*\]", " ", bare)
    bare = re.sub(r"\{[^}]*\}", " ", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"\blabel_values\s*\(([^,]*),[^)]*\)", r"\1", bare)
    return {word for word in re.findall(r"[a-zA-Z_:][\w:]*", bare) if word not in _FUNCTIONS}


def test_the_dashboard_asks_for_what_there_is():
    dashboard = json.loads((ROOT / "docs" / "grafana" / "rmqstore.json").read_text())
    assert dashboard["title"] and dashboard["uid"] and dashboard["schemaVersion"] >= 36
    found = list(queries({"panels": dashboard["panels"], "templating": dashboard["templating"]}))
    assert len(found) > 15
    asked = set()
    for query in found:
        names = names_in(query) - {"prometheus"}
        assert names <= set(metrics.names()), query
        asked |= names
    assert len(asked) > 15
    # Panels do not lie on each other, and have ids of their own.
    panels = [panel for panel in dashboard["panels"]]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells, panel["title"]
        cells |= mine
        if panel["type"] != "row":
            assert panel["targets"] and all("expr" in target for target in panel["targets"])
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_the_query_reader_sees_a_wrong_name():
    assert names_in('sum by (topic) (rate(made_up_metric{topic="x", by="rmqstore_up"}[5m])) / 2') == {"made_up_metric"}
    assert names_in("label_values(rmqstore_up, cluster)") == {"rmqstore_up"}


def test_the_document_lists_every_metric_with_its_labels(broker):
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- `((?:rocketmq|rmqstore)_\w+)` \(([^)]*)\):", text, re.MULTILINE)
    told = {name: set(re.findall(r"\w+", labels)) for name, labels in rows}
    assert len(rows) == len(told) and set(told) == set(metrics.names())
    findings = metrics.Findings({"bad_unit": 2}, T0)
    config = StoreConfig(**golden.geometry("broker"))
    asked = {"cluster": "c", "broker": "b", "findings": findings, "with_pending": True}
    found = series(metrics.text(metrics.collect(broker, config, **asked)))
    assert {name: {label for label, _ in labels} for name, labels in found} == {name: told[name] for name, _ in found}
    # Rules and alerts in the text ask for what there is, too.
    for query in re.findall(r"^\s*expr: (.*)$", text, re.MULTILINE):
        assert names_in(query) <= {*metrics.names(), "node_textfile_mtime_seconds"}, query


def test_what_waits_is_in_it_when_asked(tmp_path):
    pytest.importorskip("pyarrow")
    root = golden.unpack("broker", tmp_path)
    assert not any("pending" in name for name, _ in series(metrics.text(metrics.collect(root))))
    found = series(metrics.text(metrics.collect(root, with_pending=True, cluster="C")))
    assert value(found, "rmqstore_pending_messages", kind="timer", topic="Reminders", cluster="C") == 5
    assert value(found, "rmqstore_pending_messages", kind="delayed", topic="%RETRY%G-retry", cluster="C") == 20
    assert value(found, "rmqstore_pending_overdue_messages", kind="timer", topic="Reminders", cluster="C") == 5
    assert value(found, "rmqstore_pending_first_due_timestamp_seconds", kind="timer", topic="Reminders", cluster="C") == (
        1795242775.3
    )
    assert value(found, "rmqstore_pending_problems", cluster="C") == 0
    assert ("rmqstore_pending_overdue_messages", (("cluster", "C"), ("kind", "transaction"), ("topic", "Payments"))) not in found
    named = series(metrics.text(metrics.collect(root, with_pending=True, topics=["Reminders"])))
    assert {dict(labels)["topic"] for name, labels in named if name == "rmqstore_pending_messages"} == {"Reminders"}
    several = series(metrics.text(metrics.collect([root, tmp_path / "nowhere"], with_pending=True)))
    assert value(several, "rmqstore_pending_messages", kind="transaction", topic="Payments", store=str(root)) == 20
    assert value(several, "rmqstore_up", store=str(tmp_path / "nowhere")) == 0
    answer = CliRunner().invoke(main, ["metrics", str(root), "--pending"])
    assert answer.exit_code == 0 and 'rmqstore_pending_messages{kind="timer"' in answer.output
