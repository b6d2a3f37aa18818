"""Notebook output is short, and no stored text becomes markup or reaches a terminal.

Owns `_repr_html_` of messages, results and stores, and the text of `describe`.
"""

from __future__ import annotations

import html.parser
import re

import numpy as np
import pytest

import rmqstore
from rmqstore import Message, MessageExt, MessageStore, StoreConfig
from rmqstore.message import SysFlag
from rmqstore.store.results import PutResult, PutTableResult, QueryResult
from rmqstore.texts import html_table, preview

SMALL = {"mapped_file_size_commit_log": 1 << 20, "max_hash_slot_num": 100, "max_index_num": 4000}
EVIL = "<script>alert(1)</script>&\"'\x1b[31m\u202e"
ALLOWED = {"table", "caption", "thead", "tbody", "tr", "th", "td"}


class Reader(html.parser.HTMLParser):
    """Reads a table: its cells, and every tag and attribute that there is."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.rows = 0
        self.feed(text)
        self.close()
        assert not self.open, "a tag was left open"

    def handle_starttag(self, tag, attrs):
        assert not attrs
        self.tags.add(tag)
        self.open.append(tag)
        self.rows += tag == "tr"
        if tag in ("th", "td", "caption"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.cells[-1] += data


def shown(value) -> Reader:
    text = value._repr_html_()
    read = Reader(text)
    assert read.tags <= ALLOWED and len(text) < 8000
    assert not re.search("[\x00-\x1f\x7f\u202e]", text)
    return read


def evil_message(**more) -> Message:
    return Message("T", EVIL.encode(), keys=["<b>key</b>"], tags=EVIL[:20], properties={"<i>": EVIL}, **more)


@pytest.fixture
def store(tmp_path):
    with MessageStore.open(tmp_path / "<b>store", config=StoreConfig(**SMALL)) as opened:
        yield opened


def test_messages_are_shown_escaped_and_short(store):
    message = evil_message(born_timestamp=1_700_000_000_000)
    cells = shown(message).cells
    assert cells[0] == "Message of T" and "<b>key</b>" in cells and any("<script>" in cell for cell in cells)
    put = store.put_message(message)
    read = store.message_at(put.phy_offset)
    cells = shown(read).cells
    assert cells[0] == "MessageExt of T" and str(put.phy_offset) in cells and "\\x1b" in "".join(cells)
    long = Message("T", b"x" * 100_000, properties={f"p{i}": "v" * 1000 for i in range(20)})
    cells = shown(long).cells
    assert "10 more" in cells and any(cell.startswith("100000 bytes: xxx") for cell in cells)
    assert max(map(len, cells)) <= 81
    # Messages that `validate` refuses can be shown.
    shown(Message(EVIL, b""))


def test_bodies_are_not_decompressed_and_damage_is_said(store):
    bomb = MessageExt((100, 1, 0, 0, 0, 0, 0, 1, 0, bytes(8), 0, bytes(8), 0, 0, b"no zlib", "T", b"", True))
    assert bomb.sys_flag & SysFlag.COMPRESSED.value and "compressed, 7 bytes" in shown(bomb).cells
    damaged = MessageExt(
        (100, 1, 5, 0, 0, 0, 0, 1, -(2**63), bytes(8), 2**63 - 1, bytes(8), 0, 0, b"x", EVIL, b"", False)
    )  # fmt: skip
    cells = shown(damaged).cells
    assert "corrupt: CRC" in cells[0] and "corrupt: x" in cells and f"{2**63 - 1} ms" in cells
    shown(QueryResult([bomb, damaged]))


def test_results_show_their_first_lines(store):
    puts = store.put_messages([evil_message() for _ in range(25)])
    read = shown(puts)
    assert read.cells[0] == "25 messages put; the first 10" and read.rows == 11 and puts[0].msg_id in read.cells
    # Each look makes one while they are not all made.
    assert puts[0] is not puts[0], "a look at the first ones made them all"
    assert shown(puts[0]).rows == 2 and shown(puts[0]).cells[0] == "1 messages put"
    got = store.get_message("T")
    caption = "FOUND: 25 messages, next queue offset 25, the queue has 0 to 25; the first 10 of 25"
    assert shown(got).cells[0] == caption
    assert shown(got).rows == 11
    assert shown(store.get_message("U")).cells[0].startswith("NO_MESSAGE_IN_QUEUE: 0 messages")
    found = store.query_message("T", "<b>key</b>", 20)
    assert shown(found).cells[0] == "20 messages, there are more; the first 10 of 20"
    assert shown(QueryResult(uncovered=((0, 5),))).cells[0] == "0 messages, part of the log was not searched"
    columns = [np.arange(n, n + 30, dtype=np.int64) for n in (0, 100, 1_700_000_000_000, 50)]
    assert shown(PutTableResult(*columns)).rows == 11
    shown(PutResult(1, 2, EVIL, 3, 4))


def test_a_store_shows_itself_open_and_closed(store):
    store.put_messages([Message(f"Topic{i}", b"x") for i in range(30)])
    read = shown(store)
    assert "open" in read.cells[0] and any(cell.startswith("30: Topic0, Topic1") for cell in read.cells)
    store.close()
    read = shown(store)
    assert "closed" in read.cells[0] and read.rows == 0


def test_bodies_are_shown_as_text_where_they_are():
    assert preview(b"abc") == "abc" and preview("é".encode()) == "é" and preview(b"") == ""
    assert preview(b"a" * 80) == "a" * 80 and preview(b"a" * 79 + b"\xff").startswith("80 bytes: 61 61")
    assert preview(b"\xff\xfe") == "ff fe" and preview(b"\x80" * 4) == "80 80 80 80"
    # A character that the cut goes through.
    assert preview(b"a" * 79 + "é".encode()) == "81 bytes: " + "a" * 79
    assert preview(bytes([0xFF]) * 1000) == "1000 bytes: " + "ff " * 19 + "ff"
    Reader(html_table("<>", ["<a>"], [["</td>", None], ["&lt;", 1]]))


def test_describe_is_short_however_many_queues(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as store:
        store.put_messages([Message(f"Topic{i:03}", b"x", keys=["k"]) for i in range(100)])
        store.consumer_offsets.commit("g", "Topic001", 0, 1)
    description = rmqstore.describe(path)
    lines = repr(description).splitlines()
    assert len(lines) < 20 and max(map(len, lines)) < 200 and lines[0] == f"StoreDescription of {str(path)!r}, clean"
    assert "  queues: 100 of 100 topics" in lines
    assert "  index files: 1, 100 entries" in lines and "  consumer offsets: 1 of group and topic" in lines
    assert len(description.queues) == 100
