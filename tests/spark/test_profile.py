"""A profile's figures against a plain count over one scan, and its page: whole, escaped, readable."""

from __future__ import annotations

import html.parser
import random
import re
from collections import Counter

import pytest
from stores import overwrite, scanned, small_config

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.errors import StoreError

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from rmqstore.spark.report import Figures, KeyFigures, TopKey, VolumeFigures, page, shown

HOUR = 3_600_000
HOSTILE = "<script>alert('x')</script>\u202e\x1b[31m\"&\u200b"


class Page(html.parser.HTMLParser):
    """The elements and the text of a page; refuses what is not closed."""

    VOID = {"meta", "br", "line", "rect"}

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID or (tag == "rect" and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def figures(**changes):
    volume = VolumeFigures(messages=10, bytes=4000, body_bytes=3000, stored_bytes=2000)
    known = {
        "path": "/store",
        "made_at": 1_700_000_000_000,
        "total": volume,
        "topics": [("Orders", volume)],
        "topic_num": 1,
        "tags": [("Orders", "EU", volume)],
        "tag_num": 1,
        "hours": [((1_700_000_000_000 // HOUR + i) * HOUR, 5, 2000) for i in range(2)],
        "sizes": [(5, 10)],
    }
    return Figures(**{**known, **changes})


def test_texts_of_a_store_say_nothing_but_themselves():
    volume = VolumeFigures(messages=10, bytes=4000, compressed=5, compressed_body_bytes=100, compressed_stored_bytes=20)
    text = page(
        figures(
            path=HOSTILE,
            topics=[(HOSTILE, volume)],
            tags=[(HOSTILE, HOSTILE, volume), (HOSTILE, None, volume), (HOSTILE, "", volume)],
            total=volume,
            keys=[KeyFigures(HOSTILE, 5, 7, 6)],
            top_keys=[TopKey(HOSTILE, HOSTILE, 5, 2)],
            options={"topic": HOSTILE},
            damaged=2,
            damaged_bytes=100,
        )
    )
    found = Page(text)
    kinds = {tag for tag, _ in found.elements}
    assert "script" not in kinds and kinds <= {
        *"html head meta title style body main h1 h2 p code br dl div dt dd small section figure svg desc text line rect".split(),
        *"table caption thead tbody tr th td span i footer".split(),
    }
    assert not any(name.startswith("on") or name in ("src", "href") for _, attrs in found.elements for name in attrs)
    assert not re.search("[\u202e\u200b\x1b]", text)
    assert "".join(found.text).count("<script>alert('x')</script>\\u{202e}\\u{1b}[31m\"&\\u{200b}") >= 8
    assert "http" not in text.replace("http-equiv", "")
    assert shown("x" * 100) == "x" * 59 + "…"


def test_plots_say_what_they_show_and_the_page_is_dark_where_that_is_wished():
    text = page(figures())
    svgs = [attrs for tag, attrs in Page(text).elements if tag == "svg" and "role" in attrs]
    assert len(svgs) == 3
    for attrs in svgs:
        for name in attrs["aria-labelledby"].split():
            assert re.search(rf'<(title|desc) id="{name}">[^<]+<', text)
    assert "prefers-color-scheme:dark" in text


def test_a_page_of_nothing():
    nothing = VolumeFigures()
    text = page(figures(total=nothing, topics=[], tags=[], topic_num=0, tag_num=0, hours=[], sizes=[]))
    assert "No messages." in text and Page(text)


@pytest.mark.parametrize("times", [[0, 2**63 // HOUR], [-(2**62) // HOUR, 5, 6], list(range(0, 100_000, 7))])
def test_times_that_no_calendar_has_do_not_stretch_the_axis(times):
    hours = [(hour * HOUR, 1 if abs(hour) > 2**30 else 100_000, 10) for hour in sorted(times)]
    text = page(figures(hours=hours))
    bars = [attrs for tag, attrs in Page(text).elements if tag == "rect" and attrs.get("height") != "10"]
    assert len(bars) < 500


def test_frequent_keys_are_bounded_and_never_overstated():
    import pyarrow as pa

    from rmqstore.spark.profile import frequent_keys

    chance = random.Random(5)
    drawn = [f"K{int(chance.paretovariate(0.7))}" for _ in range(20_000)]
    exact = Counter(drawn)
    batches = [
        pa.RecordBatch.from_pylist(
            [{"topic": "T", "key": key, "num": num} for key, num in Counter(drawn[at : at + 500]).items()]
            + [{"topic": "T", "key": None, "num": 500}]
        )
        for at in range(0, len(drawn), 500)
    ]
    known, uncounted = frequent_keys(batches, kept=100)
    assert len(known) <= 200 and 0 < uncounted < len(drawn) / 100
    for key, num in exact.items():
        assert known.get(("T", key), 0) <= num <= known.get(("T", key), 0) + uncounted
    assert frequent_keys(batches, kept=20_000) == ({("T", key): num for key, num in exact.items()}, 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("profile") / "store"
    times = iter(range(1_700_000_000_000, 2 * 10**12, 20 * 60_000))
    with MessageStore.open(root, config=small_config(clock=lambda: next(times))) as store:
        for i in range(200):
            topic = ("%RETRY%billing" if i % 10 == 0 else "Orders") if i % 3 else "Stock"
            keys = [f"K{i}", f"G{i % 7}"] if i % 5 else []
            store.put_message(Message(topic, b"x" * (i * 13 % 400), keys=keys, tags=("EU", HOSTILE, None)[i % 3]))
        places = [row["phy_offset"] for row in scanned_open(store)]
    # One that does not agree with its CRC, one that is no record.
    overwrite(root, places[20] + 95, b"???")
    overwrite(root, places[50], b"????")
    return root


def scanned_open(store):
    return [row for batch in store.scan(["phy_offset"]) for row in batch.to_pylist()]


@pytest.mark.spark
@pytest.mark.java
def test_figures_are_those_of_a_scan(spark, path, tmp_path):
    from rmqstore.spark import profile

    out = tmp_path / "profile"
    found = profile(spark, path, out, top_keys=9, partition_bytes=5000)
    rows = [row for row in scanned(path) if not row["corrupt"]]
    assert found.total.messages == len(rows) == 198
    assert found.total.bytes == sum(row["size"] for row in rows)
    assert found.total.body_bytes == found.total.stored_bytes == sum(len(row["body"]) for row in rows)
    assert found.damaged == 2 and found.damaged_bytes > 200 and found.topic_num == 3
    assert {topic: volume.messages for topic, volume in found.topics} == Counter(row["topic"] for row in rows)
    assert {(topic, tag): volume.messages for topic, tag, volume in found.tags} == Counter(
        (row["topic"], row["tags"]) for row in rows
    )
    assert found.tag_num == len(found.tags)
    hours = Counter(int(row["store_timestamp"].timestamp()) // 3600 * HOUR for row in rows)
    assert {hour: messages for hour, messages, _ in found.hours} == hours
    assert dict(found.sizes) == Counter(len(row["body"]).bit_length() for row in rows)
    # The record with the wrong CRC has its keys still.
    keys = Counter((row["topic"], key) for row in scanned(path) for key in row["keys"])
    assert {each.topic: each.keys for each in found.keys} == {
        topic: sum(num for (of, _), num in keys.items() if of == topic) for topic, _ in keys
    }
    for each in found.keys:
        assert abs(each.distinct - sum(topic == each.topic for topic, _ in keys)) <= 3
    most = sorted(keys.items(), key=lambda item: (-item[1], item[0]))[:9]
    assert [((each.topic, each.key), each.messages, each.uncounted) for each in found.top_keys] == [
        (key, num, 0) for key, num in most
    ]

    text = (out / "report.html").read_text(encoding="utf-8")
    assert text == page(found) and "2 damaged stretches" in text and "<script" not in text
    volume = spark.read.parquet(str(out / "volume.parquet"))
    assert volume.where("not damaged").groupBy().sum("messages").first()[0] == 198
    assert spark.read.parquet(str(out / "keys.parquet")).count() == len(found.keys)
    assert spark.read.parquet(str(out / "top_keys.parquet")).count() == 9
    with pytest.raises(StoreError, match="there is a profile already"):
        profile(spark, path, out)
    assert profile(spark, path, out, overwrite=True, topic="Stock", top_keys=0).topic_num == 1


@pytest.mark.spark
@pytest.mark.java
def test_compression_of_a_real_brokers_store(spark, golden_store, tmp_path):
    import golden

    from rmqstore.spark import profile

    config = StoreConfig(**golden.geometry("broker"))
    found = profile(spark, golden_store("broker"), tmp_path / "out", top_keys=0, partition_bytes=2**20)
    with MessageStore.open(golden_store("broker"), config=config, read_only=True) as store:
        rows = [row for batch in store.scan(["sys_flag", "body", "body_stored"]) for row in batch.to_pylist()]
    compressed = [row for row in rows if row["sys_flag"] & 1]
    assert found.total.messages == len(rows) and found.total.compressed == len(compressed) > 100
    assert found.total.compressed_body_bytes == sum(len(row["body"]) for row in compressed)
    assert found.total.compressed_stored_bytes == sum(len(row["body_stored"]) for row in compressed)
    assert found.total.body_bytes == sum(len(row["body"]) for row in rows)
