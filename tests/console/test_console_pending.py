"""Pending messages in the console: page, API and metrics."""

from __future__ import annotations

import golden
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("starlette", reason="needs the extra console")
pytest.importorskip("httpx")

from test_console_api import TINY, Asker

from rmqstore import Message, MessageStore, console
from rmqstore.offline.pending import pending


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return golden.unpack("broker", tmp_path_factory.mktemp("broker"))


def test_the_api_says_what_the_function_says(root):
    asker, known = Asker(console.app(root)), pending(root)
    value = asker.json("/api/pending?max_num=1000")
    assert value["number"] == len(known) == len(value["messages"]) == 55
    assert value["messages"] == [
        message.as_dict() | {"overdue": row["overdue"]} for message, row in zip(known, value["messages"])
    ]
    assert value["totals"] == [total.as_dict() for total in known.totals]
    assert value["problems"] == [] and value["notes"] == known.notes
    assert {source["name"] for source in value["sources"]} == {source.name for source in known.sources}
    some = asker.json("/api/pending?kind=timer&first=2&max_num=2")
    assert (some["number"], [row["keys"] for row in some["messages"]]) == (5, [["TIM-7"], ["TIM-8"]])
    assert asker.json("/api/pending?topic=Payments")["number"] == 20
    assert asker.get("/api/pending?kind=nothing").status_code == 400


def test_the_page(root):
    asker = Asker(console.app(root))
    page = asker.page("/pending")
    assert "REM-10" in page and "overdue" in page and "%RETRY%G-retry" in page
    assert "PAY-2" in asker.page("/pending?kind=transaction") and "PAY-2" not in asker.page("/pending?kind=timer")
    assert asker.get("/pending?kind=nothing").status_code == 400
    assert 'href="/pending"' in asker.page("/")


def test_what_cannot_be_read_is_on_the_page(tmp_path):
    root = golden.unpack("broker", tmp_path)
    (root / "config" / "timercheck").write_bytes(b"x")
    asker = Asker(console.app(root))
    assert "config/timercheck" in asker.page("/pending") and "instead of 56" in asker.page("/pending")
    assert asker.json("/api/pending")["problems"][0]["path"].endswith("config/timercheck")


def test_texts_of_the_store_are_no_markup(tmp_path):
    with MessageStore.open(tmp_path / "store", config=TINY) as store:
        hostile = "<script>x</script>"
        given = {"REAL_TOPIC": hostile, "TIMER_OUT_MS": "1795239198800", "UNIQ_KEY": hostile, "PGROUP": hostile}
        for topic in ("rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC"):
            store.put_message(Message(topic, b"x", keys=[hostile], properties=given))
    page = Asker(console.app(tmp_path / "store")).page("/pending")
    assert "&lt;script&gt;" in page and "<script>x" not in page


def test_metrics_have_it_when_they_are_asked(root):
    pytest.importorskip("prometheus_client")
    asker = Asker(console.app(root))
    assert "rmqstore_pending" not in asker.get("/metrics").text
    text = asker.get("/metrics?pending=true").text
    assert 'rmqstore_pending_messages{kind="transaction",topic="Payments"} 20.0' in text
    assert "rmqstore_pending" not in asker.get("/metrics").text
