"""The cost of a store with many queues and groups, and the limits of its display: queues read, rows printed, labels."""

from __future__ import annotations

import json

import many_topics
import pytest
from click.testing import CliRunner

from rmqstore import MessageStore, describe
from rmqstore.cli import main
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.offline.describe import consumer_columns, consumer_places, rows_of

TOPICS, GROUPS = 120, 6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = many_topics.make(tmp_path_factory.mktemp("many") / "store", TOPICS, file_size=4000)
    table = {
        f"Topic-{topic:05d}@group-{group}": {"0": group} for topic in range(TOPICS) for group in range(GROUPS)
    }
    (path / "config").mkdir(exist_ok=True)
    (path / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    return path


@pytest.fixture
def asked(monkeypatch):
    """By method of `ConsumeQueueStore`, with how many arguments of which queue it was called."""
    calls = {"look": [], "find": [], "unit": []}

    def counted(name):
        method = getattr(ConsumeQueueStore, name)

        def call(self, *arguments, **options):
            calls[name].append(arguments)
            return method(self, *arguments, **options)

        monkeypatch.setattr(ConsumeQueueStore, name, call)

    for name in calls:
        counted(name)
    return calls


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_each_queue_is_asked_once_for_all_groups(store, asked):
    with MessageStore.open(store, read_only=True) as opened:
        for calls in asked.values():
            calls.clear()
        rows = rows_of(consumer_columns(opened, consumer_places(opened)))
        assert len(asked["look"]) == len({each[:2] for each in asked["look"]}) == TOPICS
        assert not asked["find"]
        # Units are read with the look.
        assert not asked["unit"]
        ends = {topic: opened.max_queue_offset(topic, 0) for topic in opened.topics()}
    assert len(rows) == TOPICS * GROUPS
    for row in rows:
        end = ends[row["topic"]]
        assert row["max_queue_offset"] == end
        assert row["lag"] == (None if row["queue_offset"] > end else end - row["queue_offset"])
        assert (row["waiting_since"] is not None) == bool(row["lag"])


def test_a_description_opens_no_queue(store, asked):
    description = describe(store)
    assert len(description.queues) == TOPICS + 1
    # That of the records was dispatched to.
    assert {each[0] for each in asked["find"]} <= {"Records"}
    assert len(asked["look"]) == TOPICS + 1


def test_tables_of_many_rows_are_sums(store, monkeypatch):
    monkeypatch.setattr("rmqstore.cli.info._QUEUES_SHOWN", 50)
    monkeypatch.setattr("rmqstore.cli.offsets._ROWS_SHOWN", 50)
    short, whole = run("info", store), run("info", store, "--all")
    assert "\nqueues, by topic\n" in short.stdout and "--all" in short.stderr
    assert "\nqueues\n" in whole.stdout and "--all" not in whole.stderr
    row = next(line for line in short.stdout.splitlines() if "Topic-00007" in line)
    assert row.split() == ["Topic-00007", "1", "5", "1"]
    assert len(json.loads(run("info", store, "--json").stdout)["queues"]) == TOPICS + 1

    short, whole = run("offsets", store), run("offsets", store, "--all")
    assert "consumer progress" not in short.stdout and "\nsums\n" in short.stdout and "--all" in short.stderr
    assert short.stdout.strip() in whole.stdout and whole.stdout.count("Topic-") == TOPICS * GROUPS
    assert "consumer progress" in run("offsets", store, "--topic", "Topic-00007").stdout
    lines = run("offsets", store, "--json").stdout.splitlines()
    assert len(lines) == TOPICS * GROUPS + GROUPS


def series(*options):
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(run("metrics", *options).stdout)
    return {family.name: family.samples for family in families}


def left_out(found):
    return {each.labels["of"]: each.value for each in found["rmqstore_left_out"]}


def test_metrics_are_of_what_lags_most(store):
    whole, bounded = series(store), series(store, "--top", "10")
    assert left_out(whole) == {"topics": 0, "groups": 0}
    assert len(whole["rocketmq_producer_offset"]) == TOPICS + 1
    assert left_out(bounded) == {"topics": TOPICS + 1 - 10, "groups": TOPICS * GROUPS - 10}
    lags = sorted((each.value for each in whole["rocketmq_group_diff"]), reverse=True)
    assert sorted((each.value for each in bounded["rocketmq_group_diff"]), reverse=True) == lags[:10]
    assert len(bounded["rmqstore_consumer_lag_messages"]) == len(bounded["rmqstore_queue_max_offset"]) == 10
    # Sums of the store are those of all its queues.
    for name in ("rmqstore_files", "rmqstore_size_bytes", "rmqstore_log_behind_queues_bytes", "rmqstore_damaged_files"):
        assert bounded[name] == whole[name]
    named = series(store, "--topic", "Topic-00003", "--topic", "Records")
    assert {each.labels["topic"] for each in named["rocketmq_producer_offset"]} == {"Topic-00003", "Records"}
    assert {each.labels["topic"] for each in named["rocketmq_group_diff"]} == {"Topic-00003"}
    assert left_out(named) == {"topics": TOPICS - 1, "groups": (TOPICS - 1) * GROUPS}


def test_the_text_of_metrics_does_not_grow_with_the_store(store):
    lines = [len(run("metrics", store, "--top", top).stdout.splitlines()) for top in (0, 5, 10)]
    assert 0 < lines[2] - lines[0] <= 10 * 20 and lines[1] < lines[2]
