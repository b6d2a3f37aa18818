"""Charts, long lists and settings of the console: what they say, how little they look at, and that nothing in them is markup.

Owns the store of many topics, of which every page is told by counts (queues looked at, queues opened), never by the clock.
"""

from __future__ import annotations

import json
import os
import re
import shutil

import golden
import many_topics
import pytest

pytest.importorskip("starlette", reason="needs the extra console")
pytest.importorskip("httpx")

from console_pages import parse
from test_console_api import TINY, Asker

import rmqstore
from rmqstore import Message, MessageStore, console
from rmqstore.console import list_answers, overview_answers, survey
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.offline.timeline import timeline
from rmqstore.texts import format_size

TOPICS = 700


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return many_topics.make(tmp_path_factory.mktemp("many") / "store", TOPICS)


@pytest.fixture
def counts(monkeypatch):
    """Queues that were looked at, and queues that were opened."""
    seen = {"looks": [], "opened": []}
    look, opened = ConsumeQueueStore.look, ConsumeQueueStore._open
    monkeypatch.setattr(
        ConsumeQueueStore,
        "look",
        lambda self, *key, **more: (seen["looks"].append(key[:2]), look(self, *key, **more))[1],
    )
    monkeypatch.setattr(
        ConsumeQueueStore, "_open", lambda self, *key: (seen["opened"].append(key), opened(self, *key))[1]
    )
    return seen


def wait_for_the_survey(asker):
    thread = asker.app.state.consoles[""].overview_answers.survey._thread
    if thread is not None:
        thread.join(240)


# ------------------------------------------------------------------------------------------------------- many topics


def test_a_page_of_many_topics_looks_at_what_it_shows(many, counts, monkeypatch):
    for module in (survey, overview_answers):
        monkeypatch.setattr(module, "AT_ONCE", 150)
    # The thread that looks at the others waits, as if it had much to do.
    monkeypatch.setattr(survey.Survey, "_survey_in_parts", lambda self, *arguments: None)
    asker = Asker(console.app(many))
    value = asker.json("/api/overview?max_num=40&first=20")
    assert [topic["topic"] for topic in value["topics"]] == [f"Topic-{n:05d}" for n in range(19, 59)]
    assert [topic["messages"] for topic in value["topics"]] == [3 + n % 5 for n in range(19, 59)]
    assert (value["topics_number"], value["queues"], value["queues_looked_at"]) == (TOPICS + 1, TOPICS + 1, 0)
    assert len(counts["looks"]) == 40
    page = asker.page("/?first=100")
    assert f"0 of {TOPICS + 1} queues" in page and "Topic-00150" in page
    assert len(counts["looks"]) <= 40 + 100 + 16
    assert asker.json("/api/queues?max_num=30")["number"] == TOPICS + 1
    assert len(counts["looks"]) <= 40 + 100 + 16 + 30
    # Nothing is opened but the queues that lead to records for the picture, none here.
    assert counts["opened"] == []


def test_the_others_follow_in_a_thread(many, counts, monkeypatch):
    for module in (survey, overview_answers):
        monkeypatch.setattr(module, "AT_ONCE", 150)
    asker = Asker(console.app(many))
    asker.json("/api/overview?max_num=1")
    wait_for_the_survey(asker)
    value = asker.json("/api/overview?max_num=1&sort=-messages&topic=topic-")
    assert value["queues_looked_at"] == value["queues"] == TOPICS + 1
    wanted = sum(3 + n % 5 for n in range(TOPICS))
    assert value["sums"]["messages"] == wanted and value["messages"] == wanted + 7
    assert value["sums"]["complete"] and value["topics"][0]["messages"] == 7
    # Once each, whoever asks, and the page's topic besides.
    looked_at = len(counts["looks"])
    assert looked_at <= TOPICS + 2 and counts["opened"] == []
    assert "read so far" not in asker.page("/")
    assert len(counts["looks"]) == looked_at


def test_metrics_of_many_topics_open_no_queue(many, counts):
    pytest.importorskip("prometheus_client")
    text = Asker(console.app(many)).get("/metrics").text
    assert text.count("\nrmqstore_topic_messages{") == TOPICS + 1
    assert len(counts["looks"]) == TOPICS + 1 and counts["opened"] == []


def test_the_first_metrics_ask_the_system_once_for_everything(many, monkeypatch):
    pytest.importorskip("prometheus_client")
    calls = {"scandir": 0, "open": 0, "pread": 0}
    for name in calls:
        real = getattr(os, name)

        def counted(*arguments, _name=name, _real=real, **more):
            place = arguments[0]
            if _name == "pread" or (isinstance(place, str) and "Topic-" in place):
                calls[_name] += 1
            return _real(*arguments, **more)

        monkeypatch.setattr(os, name, counted)
    assert Asker(console.app(many)).get("/metrics").status_code == 200
    # Each topic's folder and each queue's are listed once, though the store is opened, besides the first 512 that tell the
    # length of files; each file is opened and read once.  What else the store reads of its own files is little.
    assert 2 * TOPICS <= calls["scandir"] <= 2 * TOPICS + 2 * 512
    assert calls["open"] == TOPICS and TOPICS <= calls["pread"] <= TOPICS + 50


def test_topics_in_every_order_and_page(many):
    asker = Asker(console.app(many))
    rows = {topic["topic"]: topic for topic in asker.json("/api/overview?max_num=1000")["topics"]}
    assert len(rows) == TOPICS + 1
    for column in overview_answers.TOPIC_COLUMNS:
        for sort in (column, f"-{column}"):
            found = []
            for first in range(0, TOPICS + 1, 300):
                found += asker.json(f"/api/overview?sort={sort}&max_num=300&first={first}")["topics"]
            assert {each["topic"] for each in found} == set(rows) and len(found) == len(rows)
            values = [each[column] for each in found if each[column] is not None]
            assert values == sorted(values, reverse=sort.startswith("-")), sort
    page = asker.page("/?sort=-messages&topic=Topic")
    assert 'aria-sort="descending"' in page and 'name="sort" value="-messages"' in page
    following = re.search(r'rel="next" href="([^"]+)"', page)[1].replace("&amp;", "&")
    assert "sort=-messages" in following and "topic=Topic" in following and asker.page(following)
    for wrong in (
        "/?sort=x",
        "/api/overview?sort=--messages",
        "/queues?sort=kind",
        "/consumers?groups=x",
        "/settings?what=x",
    ):
        assert asker.get(wrong).status_code == 400, wrong


# ------------------------------------------------------------------------------------------------------------ sums


def test_bytes_in_the_log_are_those_of_the_records(broker):
    asker = Asker(console.app(broker))
    sizes: dict[tuple[str, int], int] = {}
    with MessageStore.open(broker, read_only=True) as store:
        for topic, queue_id in store.queues.keys():
            queue = store.queues.find(topic, queue_id)
            low, high = queue.bounds(0)
            units = {unit.phy_offset: unit.size for at in range(low, high) if (unit := queue.unit(at))}
            sizes[topic, queue_id] = sum(units.values())
    value = asker.json("/api/queues")
    for row in value["queues"]:
        wanted = sizes[row["topic"], row["queue_id"]]
        assert row["log_bytes_exact"] and row["log_bytes"] == wanted, row
    assert value["complete"] and value["sums"]["messages"] == sum(row["messages"] for row in value["queues"])
    largest = asker.json("/api/largest")
    assert largest["topics"][0]["topic"] == "Orders"
    total = sum(topic["log_bytes"] for topic in largest["topics"]) + largest["others"]["log_bytes"]
    assert total == value["sums"]["log_bytes"]
    page = asker.page("/")
    orders = format_size(sum(size for (topic, _), size in sizes.items() if topic == "Orders"))
    assert f'<td data-label="In the log" class="num">{orders}</td>' in page and "Queue files" not in page


def test_queues_consumers_and_index_files_in_order(broker):
    asker = Asker(console.app(broker))
    cases = (
        ("/api/queues?max_num=1000&", "queues", overview_answers.QUEUE_COLUMNS[1:]),
        ("/api/consumers?", "consumers", ("queue_offset", "max_queue_offset", "lag", "waiting_since")),
        ("/api/index?", "files", ("name", "entries", "fill", "slots_used", "mean_chain")),
    )
    for path, list_name, columns in cases:
        usual = asker.json(path)[list_name]
        for column in columns:
            for sort in (column, f"-{column}"):
                rows = asker.json(f"{path}sort={sort}")[list_name]
                values = [row[column] for row in rows if row[column] is not None]
                assert values == sorted(values, reverse=sort.startswith("-")), (path, sort)
                assert len(rows) == len(usual) and [row[column] for row in rows[len(values) :]] == [None] * (
                    len(rows) - len(values)
                )
    for path in ("/queues?sort=-messages", "/consumers?sort=-lag&groups=-age", "/index?sort=fill"):
        assert "aria-sort" in asker.page(path)


def test_groups_are_the_sums_of_their_queues(broker):
    asker = Asker(console.app(broker))
    rows = asker.json("/api/consumers")["consumers"]
    groups = asker.json("/api/groups?sort=-lag")["groups"]
    lags: dict[str, int] = {}
    for row in rows:
        lags[row["group"]] = lags.get(row["group"], 0) + (row["lag"] or 0)
    assert {group["group"]: group["lag"] for group in groups} == lags
    assert [group["lag"] for group in groups] == sorted(lags.values(), reverse=True)
    for group in groups:
        waiting = [row["waiting_since"] for row in rows if row["group"] == group["group"] and row["waiting_since"]]
        assert group["waiting_since"] == min(waiting, default=None)
        assert (group["age"] is None) == (group["waiting_since"] is None)
    ages = [group["age"] for group in asker.json("/api/groups?sort=-age")["groups"]]
    assert [age is None for age in ages] == sorted(age is None for age in ages)
    assert len(asker.json("/api/groups?first=1&max_num=1")["groups"]) == 1


def test_groups_of_rocketmq_are_marked(broker):
    asker = Asker(console.app(broker))
    groups = asker.json("/api/groups")["groups"]
    assert {each["group"]: each["kind"] for each in groups} == {
        each["group"]: "system" if each["group"].startswith("CID_RMQ_SYS_") else "" for each in groups
    }
    marked = [row for row in asker.json("/api/consumers")["consumers"] if row["kind"] == "system"]
    assert marked and all(row["topic"].startswith("RMQ_SYS_") for row in marked)
    assert asker.page("/consumers").count("<small>system</small>") == 1 + len(marked)


def test_a_page_of_consumers_looks_at_its_queues_and_sums_are_kept(many, counts, tmp_path, monkeypatch):
    path = tmp_path / "store"
    shutil.copytree(many, path)
    with MessageStore.open(path, read_only=True) as store:
        topics = store.topics()
    (path / "config").mkdir(exist_ok=True)
    table = {f"{topic}@G{group}": {"0": group} for topic in topics for group in range(4)}
    (path / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    monkeypatch.setattr(list_answers, "_SUMS_KEPT", 1000.0)
    asker = Asker(console.app(path))
    asker.json("/api/openapi.json")
    counts["looks"].clear()
    value = asker.json("/api/consumers?max_num=30&first=20")
    assert len(value["consumers"]) == 30 and value["number"] == 4 * len(topics)
    assert [(row["group"], row["topic"]) for row in value["consumers"]] == [("G0", topic) for topic in topics[20:50]]
    assert len(counts["looks"]) == 30
    # An order by lag, and the sums, need all once.
    whole = asker.json("/api/consumers?sort=-lag&max_num=10")
    assert len(counts["looks"]) <= 30 + len(topics) + 10
    assert [row["lag"] for row in whole["consumers"]] == sorted((row["lag"] for row in whole["consumers"]), reverse=True)
    counts["looks"].clear()
    assert asker.json("/api/consumers?sort=-lag&max_num=10") == whole
    assert len(asker.json("/api/groups")["groups"]) == 4
    assert len(counts["looks"]) <= 10
    counts["looks"].clear()
    page = asker.page("/consumers?group=G1&first=200")
    assert f"201 to 400 of {len(topics)}" in page and 'rel="prev"' in page and 'rel="next"' in page
    assert len(counts["looks"]) <= 200 + len(topics) and not counts["opened"]


# ------------------------------------------------------------------------------------------------------------ charts


def test_the_picture_of_the_log_is_the_timeline(broker):
    asker = Asker(console.app(broker))
    value = asker.json("/api/timeline?bins=20")
    with MessageStore.open(broker, read_only=True) as store:
        assert value == timeline(store, bins=20)
        assert sum(each["messages"] for each in value["bins"]) == sum(1 for _ in store.messages())
    page = asker.page("/")
    assert "Exact: all records were read" in page
    # A column for each bin, and a row of the table below for each.
    bins = len(asker.json("/api/timeline")["bins"])
    plot = page.split('aria-labelledby="messages-chart-title"')[1].split("</svg>")[0]
    assert plot.count('<rect class="bar"') == bins
    heights = [float(each) for each in re.findall(r'<rect class="bar"[^>]* height="([\d.]+)"', plot)]
    counts = [each["messages"] for each in asker.json("/api/timeline")["bins"]]
    assert heights == pytest.approx([120 * each / max(counts) for each in counts], abs=0.1)
    assert asker.get("/api/timeline?bins=1").status_code == 400


def test_a_sampled_picture_says_so(broker, monkeypatch):
    from rmqstore.offline import timeline as module

    monkeypatch.setattr(module, "EXACT_BYTES", 0)
    monkeypatch.setattr(overview_answers, "EXACT_BYTES", 0)
    asker = Asker(console.app(broker))
    value = asker.json("/api/timeline")
    assert not value["exact"] and 0 < value["places"] <= 257
    assert sum(each["messages"] for each in value["bins"]) == asker.json("/api/overview")["messages"]
    page = asker.page("/")
    assert f"Estimated from {value['places']} samples of the log" in page


def test_every_picture_has_its_table(broker):
    asker = Asker(console.app(broker))
    for path, number in (("/", 3), ("/consumers", 2), ("/index", 2), ("/index/20261121053239614", 1)):
        page = asker.page(path)
        assert page.count("<svg") == number, path
        titles = re.findall(r'<svg[^>]* aria-labelledby="([^"]+)"', page)
        assert len(titles) == number and all(f'<figcaption id="{title}">' in page for title in titles)
        assert page.index("<svg") < page.index("<table") and "<script" not in page


def test_names_in_pictures_and_settings_are_no_markup(tmp_path):
    hostile = '<svg onload=alert(1)>"&\u202e'
    path = tmp_path / "store"
    with MessageStore.open(path, config=TINY) as store:
        store.put_message(Message("T", b"x"))
    shutil.move(path / "consumequeue" / "T", path / "consumequeue" / hostile.replace("/", ""))
    (path / "config").mkdir(exist_ok=True)
    offsets = {"offsetTable": {f"T@{hostile}": {"0": 0}}}
    (path / "config" / "consumerOffset.json").write_text(json.dumps(offsets))
    (path / "config" / "topics.json").write_text(
        '{"topicConfigTable":{"<script>x":{"topicName":"<script>x","perm":"<b>","readQueueNums":{"<i>":1},"<u>":["<s>"]},"T":7}}'
    )
    asker = Asker(console.app(path))
    for target in (
        "/",
        "/queues",
        "/consumers",
        "/settings",
        "/settings?sort=-perm",
        "/settings?what=consumer_offsets",
    ):
        page = asker.page(target)
        assert parse(page).faults == []
        for tag in ("<svg onload", "<script>x", "<b>", "<i>", "<u>", "<s>"):
            assert tag not in page, (target, tag)
    plot = asker.page("/").split('aria-labelledby="largest-chart-title"')[1].split("</svg>")[0]
    assert "&lt;svg onload=alert(1)&gt;&#34;&amp;\\u202e" in plot


# ---------------------------------------------------------------------------------------------------------- settings


def test_settings_are_those_of_the_function(broker):
    asker, known = Asker(console.app(broker)), rmqstore.settings(broker)
    value = asker.json("/api/settings?max_num=1000")
    assert [row["topic"] for row in value["rows"]] == list(known.topics)
    for row in value["rows"]:
        assert row["readQueueNums"] == known.topics[row["topic"]]["readQueueNums"]
    groups = asker.json("/api/settings?what=subscription_groups&max_num=1000")["rows"]
    assert [row["group"] for row in groups] == list(known.subscription_groups)
    offsets = asker.json("/api/settings?what=consumer_offsets&max_num=1000")["rows"]
    for column, table in (("offset", known.consumer_offsets), ("pull_offset", known.pull_offsets)):
        shown = {
            (row["group"], row["topic"], row["queue_id"]): row[column] for row in offsets if row[column] is not None
        }
        assert shown == {
            (*key, queue_id): offset for key, queues in table.items() for queue_id, offset in queues.items()
        }
    assert value["numbers"] == {
        "topics": len(known.topics), "subscription_groups": len(groups), "consumer_offsets": len(offsets),
        "pop_records": len(known.pop_records),
    }  # fmt: skip
    assert {source["path"] for source in value["sources"]} >= {"config/topics.json"}
    some = asker.json("/api/settings?name=ord&sort=-topic&first=0&max_num=1")
    assert (some["number"], some["rows"][0]["topic"]) == (1, "Orders")
    page = asker.page("/settings")
    assert "Orders" in page and "config/topics.json" in page and 'href="/settings"' in asker.page("/")
    assert "G-billing" in asker.page("/settings?what=subscription_groups")
    assert "This directory contains none" in asker.page("/settings?what=pop_records")


def test_settings_that_cannot_be_read_are_said(golden_copy):
    root = golden_copy("broker")
    (root / "config" / "topics.json").write_text("{")
    (root / "config" / "topics.json.bak").unlink(missing_ok=True)
    asker = Asker(console.app(root))
    value = asker.json("/api/settings")
    assert value["rows"] == [] and [each["path"] for each in value["findings"]] == ["config/topics.json"]
    assert "config/topics.json" in asker.page("/settings") and "cannot be read" in asker.page("/settings")
    before = golden.tree(root)
    asker.page("/settings?what=consumer_offsets")
    assert golden.tree(root) == before


def test_pop_records_and_settings_in_rocksdb(tmp_path):
    pytest.importorskip("rocksdict")
    import rocksdb_files

    for name, what in (("store", "topics"), ("config-v2", "subscription_groups")):
        path = (
            rocksdb_files.unpack("variants", tmp_path / name, name)
            if name != "store"
            else rocksdb_files.unpack(name, tmp_path)
        )
        known = rmqstore.settings(path)
        value = Asker(console.app(path)).json(f"/api/settings?what={what}&max_num=1000")
        assert len(value["rows"]) == len(known.topics if what == "topics" else known.subscription_groups) > 0
        assert {each["form"] for each in value["sources"]} & {"separate", "single", "v2"}
