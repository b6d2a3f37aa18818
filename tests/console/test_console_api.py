"""The console's answers: each compared with what the package's functions, the command line or the real broker say.

Owns the JSON API, the OpenAPI document, paging, and what a store that grows, is replaced or vanishes does to the pages.  The
application is asked in this process, through ASGI, without a network; browsers, attacks and load have files of their own.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import time
import zlib
from urllib.parse import quote

import golden
import pytest
from click.testing import CliRunner

from rmqstore import Message, MessageStore, StoreConfig, describe, rebuild, verify
from rmqstore.cli import main
from rmqstore.message import SysFlag

pytest.importorskip("starlette", reason="needs the extra console")
anyio = pytest.importorskip("anyio")
httpx = pytest.importorskip("httpx")

from rmqstore import console  # noqa: E402
from rmqstore.console.questions import QUESTIONS, openapi_document  # noqa: E402
from rmqstore.console.rendering import json_text  # noqa: E402

HOST = "127.0.0.1:8080"
TINY = StoreConfig(
    mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=2000, max_hash_slot_num=100, max_index_num=400,
    clean_resource_interval=0,
)  # fmt: skip
ORIGIN = {"Origin": f"http://{HOST}"}
TOKEN = "a token that is long"


class Asker:
    """Asks an application as a browser would that follows no redirect."""

    def __init__(self, app):
        self.app = app

    def ask(self, method, path, headers=None, **options):
        async def asked():
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
                return await client.request(method, path, headers=headers, **options)

        return anyio.run(asked)

    def get(self, path, headers=None):
        return self.ask("GET", path, headers)

    def json(self, path):
        response = self.get(path)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        return response.json()

    def page(self, path):
        response = self.get(path)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        return response.text


@pytest.fixture(scope="module")
def asker(broker):
    return Asker(console.app(broker))


@pytest.fixture
def grown(tmp_path):
    """A store of this test's own that is open for writing, and an Asker for it."""
    with MessageStore.open(tmp_path / "store", config=TINY) as store:
        yield store, Asker(console.app(store.path, config=TINY))


def pages_of(asker, query):
    """(phy offsets of all pages, number of pages) of a search."""
    found, cursor, number = [], None, 0
    while True:
        value = asker.json(f"/api/messages?{query}" + (f"&cursor={quote(cursor)}" if cursor else ""))
        found += [row["phy_offset"] for row in value["messages"]]
        number += 1
        cursor = value["next_cursor"]
        if cursor is None:
            return found, number
        assert number < 10_000, "the cursors lead in a circle"


# ---------------------------------------------------------------------------------------------------------- what is shown


def test_the_overview_says_what_describe_says(asker, broker):
    value, known = asker.json("/api/overview"), describe(broker)
    log = value["commit_log"]
    assert (log["min_offset"], log["max_offset"], log["segments"]) == (0, 5069798, 5)
    assert log["first_store_timestamp"] == known.commit_log.first_store_timestamp
    assert log["last_store_timestamp"] == known.commit_log.last_store_timestamp
    assert [topic["topic"] for topic in value["topics"]] == list(known.topics)
    assert value["messages"] == sum(queue.max_queue_offset - queue.min_queue_offset for queue in known.queues)
    assert value["index"]["files"] == 5 and value["index"]["fill"] == pytest.approx(4360 / 7999)
    assert value["clean"] and {each["name"]: each["state"] for each in value["health"]}["queues"] == "good"
    text = asker.page("/")
    assert "5069798" in text and "Orders" in text and str(value["messages"]) in text


def test_queues_say_what_describe_says(asker, broker):
    rows = asker.json("/api/queues")["queues"]
    assert [
        (row["topic"], row["queue_id"], row["kind"], row["min_queue_offset"], row["max_queue_offset"], row["files"])
        for row in rows
    ] == [
        (each.topic, each.queue_id, each.kind, each.min_queue_offset, each.max_queue_offset, each.files)
        for each in describe(broker).queues
    ]
    assert len(asker.json("/api/queues?topic=Orders")["queues"]) == 4
    assert asker.get("/api/queues?topic=nothing").status_code == 404


def test_a_queue_is_read_in_order_from_end_to_end(asker, broker):
    with MessageStore.open(broker, read_only=True) as store:
        high = store.max_queue_offset("Orders", 3)
        wanted = store.get_table("Orders", 3, columns=["phy_offset"]).column("phy_offset").to_pylist()
    start, found = 0, []
    while start is not None:
        value = asker.json(f"/api/queues/Orders/3?from={start}&max_num=700")
        found += [row["unit"]["phy_offset"] for row in value["rows"]]
        assert all(row["message"]["phy_offset"] == row["unit"]["phy_offset"] for row in value["rows"])
        start = value["newer"]
    assert found == wanted and len(found) == high
    # By default the newest; and the way back.
    newest = asker.json("/api/queues/Orders/3?max_num=10")
    assert [row["unit"]["queue_offset"] for row in newest["rows"]] == list(range(high - 10, high))
    assert newest["newer"] is None and newest["older"] == high - 20


def test_names_that_an_address_could_misread(tmp_path):
    # A broker's retry topics hold %, and a directory may hold anything but a slash.
    names = ["%RETRY%G-1", "a b?c#d&e=f", "..%2f..", "+", "ü\u202e", "two\nlines"]
    path = tmp_path / "store"
    with MessageStore.open(path, config=TINY) as store:
        store.put_message(Message("Plain", b"x", keys=["k1&2#3%"]))
        store.put_message(Message("%RETRY%G-1", b"y", keys=["k"]))
    for name in names[1:]:
        shutil.copytree(path / "consumequeue" / "Plain", path / "consumequeue" / name)
    os.rename(path / "consumequeue" / "+", os.fsencode(path / "consumequeue") + b"/\xff\xfe")
    asker = Asker(console.app(path))
    for name in ["Plain", *[each for each in names if each != "+"]]:
        assert asker.json(f"/api/queues/{quote(name, safe='')}/0")["topic"] == name
    stray = asker.json("/api/queues/%FF%FE/0")
    assert stray["topic"] == "\udcff\udcfe"
    page = asker.page("/queues")
    assert "/queues/%FF%FE/0" in page and "\u202e" not in page and "\\u202e" in page
    assert "/queues/%25RETRY%25G-1/0" in page and asker.page("/queues/%FF%FE/0")
    found = asker.json(f"/api/messages?topic=Plain&key={quote('k1&2#3%', safe='')}")["messages"]
    assert len(found) == 1
    page = asker.page(f"/message/{found[0]['phy_offset']}")
    assert "/messages?topic=Plain&amp;key=k1%262%233%25" in page


def test_index_files_and_their_chains(asker, broker):
    files = asker.json("/api/index")["files"]
    assert [(each["entries"], each["slots_used"]) for each in files] == [
        (7999, 952), (7999, 954), (7999, 978), (7999, 967), (4360, 931)
    ]  # fmt: skip
    # As `rmqstore dump --what index` finds them by walking (docs/cli.md).
    for file, longest in zip(files, (618, 605, 605, 613, 657), strict=True):
        value = asker.json(f"/api/index/{file['name']}")
        chains = value["chains"]
        assert (chains["longest"], chains["slots_used"]) == (longest, file["slots_used"])
        assert chains["slots_used"] + chains["slots_empty"] == value["slots"] == 1000
        assert sum(each["slots"] for each in chains["bins"]) == chains["slots_used"]
        assert chains["mean"] == pytest.approx(file["entries"] / file["slots_used"])
        assert "<svg" in asker.page(f"/index/{file['name']}")
    for name in ("20260101000000000", "%2E%2E", "..%2Fcheckpoint", "%2Fetc%2Fpasswd", "0" * 5000):
        assert asker.get(f"/index/{name}").status_code == 404
        assert asker.get(f"/api/index/{name}").status_code == 404


def test_consumers_lag_as_the_command_line_says(asker, broker):
    rows = asker.json("/api/consumers")["consumers"]
    shown = CliRunner().invoke(main, ["offsets", str(broker), "--json"]).stdout.splitlines()
    wanted = [row for row in map(json.loads, shown) if row.pop("type") == "progress"]
    assert rows == [{**row, "error": None} for row in wanted]
    with MessageStore.open(broker, read_only=True) as store:
        for row in rows:
            if row["lag"]:
                waiting = store.get_message(row["topic"], row["queue_id"], max(row["queue_offset"], 0), 1).messages[0]
                assert row["waiting_since"] == waiting.store_timestamp
            else:
                assert row["waiting_since"] is None
    assert (
        "G-billing" in asker.page("/consumers")
        and "G-retry" not in asker.page("/consumers?group=G-billing").split("<table")[1]
    )


# ---------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pages_of_a_key_are_the_whole_query(asker, broker, size):
    with MessageStore.open(broker, read_only=True) as store:
        cases = [("CUST-1", "any", None), ("ORD-100000", "key", "K"), ("created", "tag", "T"), ("nothing", "any", None)]
        for key, kind, index_type in cases:
            if size == 1 and kind == "tag":
                continue
            wanted = store.query_message("Orders", key, 10**6, index_type=index_type)
            found, number = pages_of(asker, f"topic=Orders&key={key}&type={kind}&max_num={size}")
            assert found == [message.phy_offset for message in wanted], key
            # A full last page knows that nothing follows.
            assert number == max(-(-len(wanted) // size), 1)
        assert len(store.query_message("Orders", "created", 10**6, index_type="T")) > 64


def test_pages_of_a_key_in_a_time_range(asker, broker):
    with MessageStore.open(broker, read_only=True) as store:
        every = store.query_message("Orders", "paid", 10**6, index_type="T")
        begin, end = every[-500].store_timestamp, every[200].store_timestamp
        wanted = [message.phy_offset for message in every if begin <= message.store_timestamp <= end]
    found, _ = pages_of(asker, f"topic=Orders&key=paid&type=tag&begin={begin}&end={end}&max_num=97")
    assert found == wanted and 64 < len(wanted) < len(every)


@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_pages_by_time_are_the_log(asker, broker, order):
    with MessageStore.open(broker, read_only=True) as store:
        every = [message for message in store.messages() if message.topic == "Orders"]
        queued = {
            message.phy_offset
            for queue_id in store.queue_ids("Orders")
            for message in store.get_message("Orders", queue_id, 0, 10**6).messages
        }
    assert queued
    times = sorted(message.store_timestamp for message in every)
    for begin, end in [(None, None), (times[1000], times[1300]), (times[-1] + 1, None), (None, times[0] - 1)]:
        wanted = [
            message.phy_offset
            for message in every
            if message.sys_flag & 0xC not in (4, 12)
            and (begin is None or message.store_timestamp >= begin)
            and (end is None or message.store_timestamp <= end)
        ]
        if order == "newest":
            wanted.reverse()
        query = f"topic=Orders&order={order}&max_num=450"
        query += "" if begin is None else f"&begin={begin}"
        query += "" if end is None else f"&end={end}"
        assert pages_of(asker, query)[0] == wanted


def test_a_page_is_gone_on_with_while_the_store_grows(grown):
    store, asker = grown
    # More than one index file: 400 places each.
    first = [store.put_message(Message("T", b"%d" % i, keys=["k"])).phy_offset for i in range(500)]
    value = asker.json("/api/messages?topic=T&key=k&max_num=100")
    found = [row["phy_offset"] for row in value["messages"]]
    cursor = value["next_cursor"]
    for i in range(300):
        store.put_message(Message("T", b"later %d" % i, keys=["k"]))
    while cursor is not None:
        value = asker.json(f"/api/messages?topic=T&key=k&max_num=100&cursor={cursor}")
        found += [row["phy_offset"] for row in value["messages"]]
        cursor = value["next_cursor"]
    assert found == first[::-1]
    # From the start it is all of them, a message with the key twice once.
    store.put_message(Message("T", b"twice", keys=["k", "k"]))
    assert len(pages_of(asker, "topic=T&key=k&max_num=64")[0]) == 801


def test_a_message_is_found_by_every_name_that_it_has(asker, broker):
    with MessageStore.open(broker, read_only=True) as store:
        message = store.message_at(484)
    for query in (f"id={message.msg_id}", f"id={message.msg_id.lower()}", f"id={message.unique_key}", "offset=484"):
        response = asker.get(f"/messages?{query}")
        assert (response.status_code, response.headers["location"]) == (303, "/message/484"), query
    assert asker.json(f"/api/messages?id={message.unique_key}")["messages"][0]["phy_offset"] == 484
    assert asker.get("/messages?id=nothing").status_code == 404
    assert asker.get(f"/api/messages?id={'F' * 32}").status_code == 404


@pytest.mark.parametrize("name", ["broker", "base", "ext", "propcrc"])
def test_every_record_is_explained_to_its_last_byte(golden_store, name):
    root = golden_store(name)
    asker = Asker(console.app(root))
    config = StoreConfig.infer(root)
    step = 211 if name == "broker" else 1
    with MessageStore.open(root, config=config, read_only=True) as store:
        messages = list(store.messages())[::step]
        for message in messages:
            value = asker.json(f"/api/message/{message.phy_offset}")
            at, read = 0, b""
            segment = (root / value["record"]["file"]).read_bytes()
            for field in value["record"]["fields"]:
                assert field["pos"] == at and field["phy_offset"] == message.phy_offset + at
                at += field["size"]
                if not field["bytes_cut"]:
                    read = bytes.fromhex(field["bytes"])
                    begin = value["record"]["pos"] + field["pos"]
                    assert read == segment[begin : begin + field["size"]], field
            assert at == message.size == value["record"]["size"]
            shown = {field["name"]: field for field in value["record"]["fields"]}
            assert shown["topic"]["value"] == message.topic and shown["body"]["size"] == len(message.body_stored)
            assert int(shown["store timestamp"]["value"]) == message.store_timestamp
            assert shown["store host"]["value"] == message.store_host
            assert shown["body CRC"]["meaning"] == "matches the body"
            assert "not part of any field" not in shown
            assert value["properties"] == message.properties
            body = value["body"].encode() if value["body_encoding"] == "utf-8" else base64.b64decode(value["body"])
            assert body == message.body
            if message.sys_flag & SysFlag.TRANSACTION_MASK in (
                SysFlag.TRANSACTION_PREPARED,
                SysFlag.TRANSACTION_ROLLBACK,
            ):
                assert value["units"] == []
            for unit in value["units"]:
                assert unit["state"] == "agrees", unit
                data = (root / unit["file"]).read_bytes()
                assert bytes.fromhex(unit["bytes"]) == data[unit["pos"] : unit["pos"] + unit["size"]]
    assert len(messages) > 20


def test_index_entries_lie_where_the_page_says(asker, broker):
    with MessageStore.open(broker, read_only=True) as store:
        messages = list(store.messages())[5::397]
    seen = 0
    for message in messages:
        for entry in asker.json(f"/api/message/{message.phy_offset}")["entries"]:
            assert entry["state"] == "found", (message, entry)
            data = (broker / entry["path"]).read_bytes()
            raw = data[entry["pos"] : entry["pos"] + 20]
            assert raw == bytes.fromhex(entry["bytes"])
            assert int.from_bytes(raw[:4], "big") == entry["hash"]
            assert int.from_bytes(raw[4:12], "big") == message.phy_offset
            head = int.from_bytes(data[entry["slot_pos"] : entry["slot_pos"] + 4], "big")
            assert head == entry["head"]
            # The chain is walked here once more, over the bytes.
            steps = 0
            while head != entry["entry"]:
                at = 40 + 4 * 1000 + 20 * head
                head = int.from_bytes(data[at + 16 : at + 20], "big")
                steps += 1
            assert (entry["chain"], entry["newer_in_chain"]) == ("reached", steps)
            seen += 1
    assert seen > 50


def test_a_missing_unit_and_a_missing_entry_are_said(golden_copy):
    root = golden_copy("broker")
    shutil.rmtree(root / "index")
    shutil.rmtree(root / "consumequeue" / "Orders" / "1")
    value = Asker(console.app(root)).json("/api/message/484")
    assert [unit["state"] for unit in value["units"]] == ["missing"] and value["entries"]
    assert {entry["state"] for entry in value["entries"]} == {"missing"}


def test_a_damaged_record_is_shown_and_said_to_be_so(golden_copy):
    root = golden_copy("broker")
    with open(root / "commitlog" / ("0" * 20), "r+b") as file:
        file.seek(1000)
        file.write(b"X")
    asker = Asker(console.app(root))
    value = asker.json("/api/message/894")
    assert value["corrupt"] and value["body"]
    assert "the body has" in {field["name"]: field for field in value["record"]["fields"]}["body CRC"]["meaning"]
    assert "does not match its CRC" in asker.page("/message/894")
    assert asker.get("/message/895").status_code == 404


def test_bodies_as_text_json_hex_and_file(grown):
    store, asker = grown
    bodies = [
        b"plain\ntext \xe2\x82\xac",
        b'{"a": [1.10, {"b": "\\u20ac"}], "a": 2}',
        bytes(range(256)),
        b"",
        b"x" * 200_000,
    ]
    places = [store.put_message(Message("T", body)).phy_offset for body in bodies]
    page = asker.page(f"/message/{places[0]}")
    assert "plain\ntext €" in page
    page = asker.page(f"/message/{places[1]}")
    assert "1.10" in page and page.count("&#34;a&#34;") == 2, "values and repeated names stay as they were sent"
    assert "10 11 12 13" in asker.page(f"/message/{places[2]}") and "The body is empty" in asker.page(
        f"/message/{places[3]}"
    )
    text = asker.page(f"/message/{places[2]}?body=text")
    assert "\\x1b" in text and "\x1b" not in text
    assert "showing 65536 to 131072" in asker.page(f"/message/{places[4]}?body=text&from=65536")
    for place, body in zip(places, bodies, strict=True):
        response = asker.get(f"/message/{place}/body")
        assert response.content == body
        assert response.headers["content-type"] == "application/octet-stream"
        assert response.headers["content-disposition"].startswith("attachment")
        value = asker.json(f"/api/message/{place}?body=hex")
        assert bytes.fromhex(value["body"]) == body
        assert base64.b64decode(asker.json(f"/api/message/{place}?body=base64")["body"]) == body
        record = asker.get(f"/message/{place}/record").content
        assert len(record) == value["size"] and body in record
    assert asker.json(f"/api/message/{places[0]}?body=none").get("body") is None


def test_json_is_laid_out_without_a_change():
    assert json_text(b'{"a": "\\ud800", "a":1e999999,"b":[ ],"c":[1.10,{}]}', 1000) == (
        '{\n  "a": "\\ud800",\n  "a": 1e999999,\n  "b": [],\n  "c": [\n    1.10,\n    {}\n  ]\n}'
    )
    assert json_text(b'"[a, {b}]"', 100) == '"[a, {b}]"'
    for broken in (b"NaN", b"{", b"\xff", b"[1,]", b"[" * 100_000):
        assert json_text(broken, 100) is None
    for text in ('[1, [2, 3], {"x": [], "y": {"z": null}}, "\\""]', "[[[]]]", "0", '{"k": "a\\\\"}'):
        assert json.loads(json_text(text.encode(), 10_000)) == json.loads(text)
    # A deep document of many values grows no further than it is told.
    assert len(json_text(b"[" * 500 + b"1," * 50_000 + b"1" + b"]" * 500, 10_000)) < 11_000


def test_a_small_body_that_unpacks_to_a_large_one(grown):
    store, asker = grown
    packed = zlib.compress(bytes(8 << 20))
    assert len(packed) < 16 * 1024
    place = store.put_message(Message("T", packed, sys_flag=SysFlag.COMPRESSED.value, keys=["k"])).phy_offset
    row = asker.json("/api/messages?topic=T&key=k")["messages"][0]
    assert row["preview"] is None and "more than 65536" in row["body_error"]
    assert len(asker.page(f"/message/{place}")) < 1 << 20
    assert asker.get(f"/message/{place}/body").content == bytes(8 << 20)
    value = asker.json(f"/api/message/{place}")
    assert value["body"] is None and "/body" in value["body_error"]


def test_nothing_invisible_reaches_a_page(grown):
    store, asker = grown
    text = "a\u202eb\x1bc\x00d\u200be\u2028f<script>alert(1)</script>\"'&"
    place = store.put_message(
        Message("T", text.encode(), keys=[text.replace(" ", "")], tags="t\u202e", properties={"p\u2066": text})
    ).phy_offset
    for path in ("/", "/queues", "/queues/T/0", "/messages?topic=T", f"/message/{place}", f"/message/{place}?body=hex"):
        page = asker.page(path)
        for char in "\u202e\x1b\x00\u200b\u2028\u2066":
            assert char not in page, (path, char)
        assert "<script>alert" not in page


# -------------------------------------------------------------------------------------------------------- a store that moves


def test_a_store_that_grows_is_followed(grown):
    store, asker = grown
    assert asker.json("/api/overview")["messages"] == 0
    store.put_messages([Message("T", b"x", keys=["k"])] * 3)
    assert len(asker.json("/api/messages?topic=T&key=k")["messages"]) == 3
    store.put_message(Message("New", b"y", keys=["k"]), queue_id=5)
    assert len(asker.json("/api/messages?topic=New&key=k")["messages"]) == 1
    deadline = time.monotonic() + 20
    while (value := asker.json("/api/overview"))["messages"] != 4:
        assert time.monotonic() < deadline
    assert [topic["topic"] for topic in value["topics"]] == ["New", "T"]
    assert len(asker.json("/api/queues/New/5")["rows"]) == 1


def test_a_store_that_is_rebuilt_vanishes_and_comes_back(golden_copy):
    root = golden_copy("broker")
    asker = Asker(console.app(root))
    before = pages_of(asker, "topic=Orders&key=CUST-1")
    names = {each["name"] for each in asker.json("/api/index")["files"]}
    rebuild(root, config=StoreConfig.infer(root, message_delay_level="1s 2s 30m 1h"))
    assert {each["name"] for each in asker.json("/api/index")["files"]} != names
    assert pages_of(asker, "topic=Orders&key=CUST-1") == before
    away = root.with_name("away")
    os.rename(root, away)
    for path in ("/", "/messages?topic=Orders&key=CUST-1", "/message/484", "/index", "/consumers", "/queues"):
        response = asker.get(path)
        assert response.status_code == 503 and "was deleted or moved" in response.text, path
        assert "Traceback" not in response.text and response.headers["retry-after"]
    response = asker.get("/api/overview")
    assert response.status_code == 503 and "was deleted or moved" in response.json()["error"]
    assert asker.get("/healthz").status_code == 200 and asker.get("/verify").status_code == 200
    os.rename(away, root)
    assert pages_of(asker, "topic=Orders&key=CUST-1") == before
    shutil.rmtree(root / "commitlog")
    assert asker.get("/message/484").status_code == 503
    shutil.rmtree(root)
    assert asker.get("/").status_code == 503


def test_a_store_in_the_making_is_shown_when_it_is_made(golden_copy, tmp_path):
    made, path = golden_copy("broker"), tmp_path / "store"
    path.mkdir()
    asker = Asker(console.app(path))
    assert asker.get("/").status_code in (200, 503)
    for name in ("commitlog", "consumequeue", "index", "config"):
        (path / name).mkdir()
        assert asker.get("/").status_code in (200, 503)
    # The log first, which does not tell the sizes of the others; the folders stay the same ones.
    for name in ("commitlog", "config", "consumequeue", "index"):
        for each in sorted((made / name).iterdir()):
            if each.is_dir():
                shutil.copytree(each, path / name / each.name)
            else:
                shutil.copyfile(each, path / name / each.name)
            assert asker.get("/").status_code in (200, 503)
            assert asker.get("/messages?topic=Orders&key=CUST-1").status_code in (200, 503)
    deadline = time.monotonic() + 20
    while asker.get("/").status_code != 200 or asker.json("/api/overview")["commit_log"]["max_offset"] != 5069798:
        assert time.monotonic() < deadline
    assert asker.json("/api/messages?topic=Orders&key=CUST-1")["messages"]


def test_files_that_do_not_fit_are_said_and_not_thrown(golden_copy):
    root = golden_copy("broker")
    for queue_file in (root / "consumequeue" / "Orders" / "1").iterdir():
        os.truncate(queue_file, 100)
    asker = Asker(console.app(root, config=StoreConfig.infer(golden_copy("broker"))))
    value = asker.json("/api/overview")
    assert {each["name"]: each["state"] for each in value["health"]}["queues"] == "bad"
    told = [each["text"] for each in value["health"] if each["name"] == "files"]
    names = sorted(path.name for path in (root / "consumequeue" / "Orders" / "1").iterdir())
    assert [text.partition(":")[0] for text in told] == [f"consumequeue/Orders/1/{name}" for name in names]
    assert all("100 bytes" in text for text in told)
    # What is left of it can be read, and so can the others.
    assert [row["error"] for row in asker.json("/api/queues?topic=Orders")["queues"]] == [None] * 4
    assert asker.get("/queues/Orders/1").status_code == 200
    (root / "config" / "consumerOffset.json").write_text("{")
    (root / "config" / "consumerOffset.json.bak").unlink(missing_ok=True)
    again = Asker(console.app(root))
    assert again.get("/consumers").status_code == 503


# ------------------------------------------------------------------------------------------------------------------ verify


def wait_for_run(asker):
    deadline = time.monotonic() + 240
    while (status := asker.json("/api/verify?max_num=1000"))["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return status


def test_units_in_a_row_are_one_row_and_counted_one_by_one(golden_copy):
    root = golden_copy("broker")
    file = min((root / "consumequeue" / "Orders" / "1").iterdir())
    os.truncate(file, 100)
    asker = Asker(console.app(root))
    assert asker.ask("POST", "/verify/start", ORIGIN).status_code == 303
    status = wait_for_run(asker)
    wanted = list(verify(root))
    assert status["told"] == status["kept"] == len(status["findings"]) == len(wanted)
    assert status["number"] == sum(finding.num for finding in wanted) > 200
    assert "are kept" not in asker.page("/verify")


def test_a_verify_run_finds_what_verify_finds(golden_copy):
    root = golden_copy("broker")
    with open(root / "commitlog" / ("0" * 20), "r+b") as file:
        file.seek(1000)
        file.write(b"X")
    asker = Asker(console.app(root))
    assert asker.json("/api/verify")["state"] == "idle"
    response = asker.ask("POST", "/verify/start", ORIGIN)
    assert (response.status_code, response.headers["location"]) == (303, "/verify")
    status = wait_for_run(asker)
    wanted = list(verify(root))
    assert status["state"] == "finished" and status["done"] == status["total"] == 5069798
    assert [(each["path"], each["pos"], each["kind"]) for each in status["findings"]] == [
        (each.path, each.pos, each.kind) for each in wanted
    ]
    assert status["number"] == len(wanted) > 0
    page = asker.page("/verify")
    assert "bad_body_crc" in page and f"<code>commitlog/{'0' * 20}</code>" in page
    assert "message_delay_level" in page, "what was assumed is said, as the command line does"
    assert asker.ask("POST", "/api/verify/stop", ORIGIN).status_code == 202


def test_one_run_at_a_time_and_it_can_be_stopped(asker, monkeypatch):
    import threading

    from rmqstore.console import followed_store

    going_on, ended = threading.Event(), threading.Event()

    def endless(path, config, progress):
        try:
            while True:
                progress(1, 10)
                going_on.set()
                time.sleep(0.001)
                yield from ()
        finally:
            ended.set()

    monkeypatch.setattr(followed_store, "verify", endless)
    run = followed_store.VerifyRun("anywhere", None)
    assert run.start() and going_on.wait(240)
    assert not run.start(), "a second one beside it"
    assert run.status()["state"] == "running" and run.status()["done"] == 1
    assert run.stop(timeout=240) and ended.wait(240)
    assert run.status()["state"] == "stopped" and not run.stop(timeout=0)
    monkeypatch.setattr(followed_store, "verify", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    assert run.start()
    run._thread.join(240)
    assert (run.status()["state"], run.status()["error"]) == ("failed", "gone")


# ------------------------------------------------------------------------------------------------------------ API and gate


def test_the_openapi_document_is_valid_and_complete(asker):
    validator = pytest.importorskip("openapi_spec_validator")
    document = asker.json("/api/openapi.json")
    validator.validate(document)
    assert document["openapi"].startswith("3.1") and document == openapi_document()
    described = {(path, method.upper()) for path, operations in document["paths"].items() for method in operations}
    assert {path for path, _ in described} >= {"/api/overview", "/api/messages", "/api/message/{phy_offset}"}
    assert len(described) == len(QUESTIONS)


@pytest.mark.parametrize(
    "path",
    [
        "/messages?topic=Orders&key=x&begin=someday", "/messages?key=x", "/messages?offset=x", "/messages?offset=-1",
        "/messages?topic=Orders&key=x&type=y", "/messages?topic=Orders&max_num=0", "/messages?topic=Orders&max_num=100000",
        "/messages?topic=Orders&key=x&cursor=..", "/messages?topic=Orders&key=x&cursor=1.2.3",
        "/messages?topic=Orders&cursor=x", "/messages?topic=Orders&begin=99999999999999999999", "/?first=x",
        "/queues/Orders/1?from=x", "/message/484?body=html", "/message/484?from=x", f"/messages?offset={'9' * 5000}",
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_said(asker, path):
    response = asker.get(path)
    assert response.status_code == 400, response.text
    assert "Traceback" not in response.text and "text/html" in response.headers["content-type"]
    assert response.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    "path",
    [
        "/nothing", "/message/7", "/message/99999999999", f"/message/{'9' * 19}", f"/message/{'9' * 5000}", "/message/x",
        "/queues/Orders/99", "/queues/x/y", "/queues/..%2F..%2Fetc/0", "/static/console.py", "/static/..%2Fpages.py",
        "/rabbitmq/0", "/api/nothing", "/api/message/7", "/messages?topic=nothing",
    ],
)  # fmt: skip
def test_what_is_not_there_is_404(asker, path):
    response = asker.get(path)
    assert response.status_code == 404
    assert ("application/json" if path.startswith("/api/") else "text/") in response.headers["content-type"]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_an_error_of_our_own_is_no_traceback(broker, monkeypatch, caplog):
    from rmqstore.console.overview_answers import OverviewAnswers

    monkeypatch.setattr(OverviewAnswers, "overview", lambda *_: 1 / 0)
    asker = Asker(console.app(broker))
    response = asker.get("/")
    assert response.status_code == 500 and "ZeroDivisionError" not in response.text
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert "ZeroDivisionError" in caplog.text


def test_who_may_ask(broker):
    open_to_all = Asker(console.app(broker))
    for host, status in [
        (HOST, 200), ("localhost:9", 200), ("LOCALHOST", 200), ("[::1]:8080", 200), ("evil.example", 400),
        ("127.0.0.1.evil.example", 400), ("10.0.0.1", 400), ("", 400), ("a b", 400), ("localhost@evil.example", 400),
        ("localhost/x", 400), ("localhost:x", 400),
    ]:  # fmt: skip
        assert open_to_all.get("/", {"Host": host}).status_code == status, host
    for headers, status in [
        ({}, 403), ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), (ORIGIN, 303),
        ({"Origin": "https://127.0.0.1:8080"}, 403), ({"Origin": "http://127.0.0.1:9"}, 403),
        ({**ORIGIN, "Sec-Fetch-Site": "cross-site"}, 403), ({"Sec-Fetch-Site": "same-origin"}, 303),
    ]:  # fmt: skip
        assert open_to_all.ask("POST", "/verify/stop", headers).status_code == status, headers
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        assert open_to_all.ask(method, "/").status_code == 405
    assert open_to_all.ask("POST", "/", ORIGIN).status_code == 405
    assert (
        open_to_all.get("/api/overview", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}).status_code
        == 403
    )


def test_the_token_is_shown_once_and_then_in_a_cookie(broker):
    asker = Asker(console.app(broker, token=TOKEN))
    for path in (
        "/",
        "/messages",
        "/api/overview",
        "/metrics",
        "/api/openapi.json",
        "/nothing",
        "/healthzX",
        "/loginX",
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": b"Bearer \xff"}, {"Cookie": "a=b"}):
            assert asker.get(path, headers).status_code == 401, path
        assert "Orders" not in asker.get(path).text
    assert asker.get("/?token=wrong").status_code == 401
    assert asker.get("/healthz").status_code == 200 and asker.get("/static/console.css").status_code == 200
    assert asker.get("/", {"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    response = asker.get(f"/queues?topic=Orders&token={quote(TOKEN)}")
    assert (response.status_code, response.headers["location"]) == (303, "/queues?topic=Orders")
    given = response.headers["set-cookie"]
    assert "HttpOnly" in given and "SameSite=strict" in given and TOKEN not in given
    cookie = given.partition(";")[0]
    assert asker.get("/", {"Cookie": cookie}).status_code == 200
    # Another console's cookie, of the same token, opens nothing else than this token does.
    assert asker.get("/", {"Cookie": cookie + "x"}).status_code == 401
    for path in ("//evil.example/", "/%5Cevil.example", "//evil.example/%2F"):
        location = asker.get(f"http://{HOST}{path}?token={quote(TOKEN)}").headers["location"]
        assert location.startswith("/") and not location.startswith(("//", "/\\"))
    wrong = asker.ask("POST", "/login", ORIGIN, content="token=wrong&next=/")
    assert wrong.status_code == 401 and "Wrong token" in wrong.text
    right = asker.ask("POST", "/login", ORIGIN, content=f"token={quote(TOKEN)}&next=//evil.example/")
    assert right.status_code == 303 and right.headers["location"] == "/evil.example/"
    assert right.headers["set-cookie"].partition(";")[0] == cookie
    assert asker.ask("POST", "/login", {}, content=f"token={quote(TOKEN)}").status_code == 403
    for token in ("", "   ", "short"):
        with pytest.raises(ValueError, match="token"):
            console.app(broker, token=token)


def test_several_stores_on_one_server(broker, base):
    asker = Asker(console.app([broker, base], token=None))
    assert "/stores/0/" in asker.page("/") and "/stores/1/" in asker.page("/")
    first, second = asker.json("/stores/0/api/overview"), asker.json("/stores/1/api/overview")
    assert (first["path"], second["path"]) == (str(broker), str(base))
    page = asker.page("/stores/0/messages?topic=Orders&key=CUST-1")
    links = {part.partition('"')[0] for part in page.split('href="')[1:]}
    assert links and all(link.startswith(("/stores/0/", "#")) for link in links), links
    assert asker.get("/stores/0/static/console.css").status_code == 200
    assert asker.get("/stores/1/message/0").status_code == 200 and asker.get("/stores/2/").status_code == 404
    assert asker.get("/stores/0/queues/Orders/1").status_code == 200
    response = asker.get("/stores/0/messages?offset=484")
    assert response.headers["location"] == "/stores/0/message/484"


def test_metrics_are_those_of_the_store_and_of_its_last_run(broker):
    parser = pytest.importorskip("prometheus_client.parser")

    def samples():
        response = asker.get("/metrics")
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
        families = parser.text_string_to_metric_families(response.text)
        return {(each.name, *sorted(each.labels.items())): each.value for family in families for each in family.samples}

    asker = Asker(console.app(broker))
    first = samples()
    offsets = {name: value for name, value in first.items() if name[0] == "rmqstore_consumer_queue_offset"}
    wanted = asker.json("/api/consumers")["consumers"]
    assert sorted(offsets.values()) == sorted(row["queue_offset"] for row in wanted if row["queue_offset"] >= 0)
    assert not any("finding" in name[0] for name in first)
    asker.ask("POST", "/verify/start", ORIGIN)
    assert wait_for_run(asker)["state"] == "finished"
    deadline = time.monotonic() + 20
    while not any("finding" in name[0] for name in samples()):
        assert time.monotonic() < deadline


def test_metrics_are_of_the_topics_that_are_asked_for(asker):
    pytest.importorskip("prometheus_client")
    whole = asker.get("/metrics").text
    for query, topics in (("top=1", 1), ("topic=Orders&topic=Payments", 2), ("topic=Orders&topic=Payments&top=1", 1)):
        text = asker.get(f"/metrics?{query}").text
        assert text.count("rocketmq_producer_offset{") == topics < whole.count("rocketmq_producer_offset{")
        assert 'rmqstore_left_out{of="topics"} 0.0' not in text
    for wrong in ("top=x", "top=-1", "pending=maybe"):
        assert asker.get(f"/metrics?{wrong}").status_code == 400


def test_a_reading_console_leaves_no_trace(golden_copy):
    root = golden_copy("broker")
    before = golden.tree(root)
    app = console.app(root)
    asker = Asker(app)
    for path in ("/", "/queues", "/queues/Orders/1", "/messages?topic=Orders", "/message/484", "/index", "/consumers"):
        asker.page(path)
    asker.ask("POST", "/verify/start", ORIGIN)
    assert wait_for_run(asker)["state"] == "finished"
    assert golden.tree(root) == before


# ----------------------------------------------------------------------------------------------------------- the command


def serve(*arguments):
    return CliRunner().invoke(main, ["serve", *map(str, arguments)])


def test_serve_refuses_what_is_not_safe(broker, tmp_path):
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.com"):
        result = serve(broker, "--host", host)
        assert result.exit_code == 2 and "--token-file" in result.stderr, host
    for token in ("", "short"):
        assert serve(broker, "--token", token).exit_code == 2
    (tmp_path / "token").write_text("\n")
    assert serve(broker, "--token-file", tmp_path / "token").exit_code == 2
    assert serve(broker, "--token", TOKEN, "--token-file", tmp_path / "token").exit_code == 2


def test_serve_says_what_it_cannot_open(broker, tmp_path):
    result = serve(tmp_path / "nothing")
    assert result.exit_code == 3 and str(tmp_path / "nothing") in result.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = serve(broker, "--port", taken.getsockname()[1])
    assert result.exit_code == 3 and "--port" in result.stderr
    result = serve(broker, "--rabbitmq", tmp_path / "nothing")
    assert result.exit_code == 3 and str(tmp_path / "nothing") in result.stderr
