"""Texts that are not ASCII, valid and not: views, copies, gets, queries and the comparison with a key say what Java reads.

Owns the border between bytes that are taken as they stand and bytes that have to be decoded. What Java reads is known from
the error handler of `rmqstore.message.message`, which other tests hold against Java itself.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_columns import OddLog, check_scan

from rmqstore import Message, MessageStore, StoreConfig

pytest.importorskip("pyarrow")

# Every border of table 3-7 of the Unicode standard, from both sides, and characters of each length.
PIECES = [
    b"a", b"Z-9", b"\x7f", b"\xc2\x80", b"\xdf\xbf", b"\xe0\xa0\x80", b"\xed\x9f\xbf", b"\xee\x80\x80",
    b"\xef\xbf\xbf", b"\xef\xbf\xbd", b"\xf0\x90\x80\x80", b"\xf4\x8f\xbf\xbf", "订单号".encode(), "é".encode(),
    "😀".encode(), b"\x80", b"\xbf", b"\xc0\x80", b"\xc1\xbf", b"\xc2", b"\xe0\x9f\xbf", b"\xe0\xa0", b"\xed\xa0\x80",
    b"\xed\xbf\xbf", b"\xe8\xae", b"\xf0\x8f\xbf\xbf", b"\xf0\x90\x80", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80",
    b"\xf7\xbf\xbf\xbf", b"\xf8", b"\xfe", b"\xff",
]  # fmt: skip
WHOLE = [piece for piece in PIECES if piece.decode("utf-8", "ignore").encode() == piece]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=14).map(b"".join)
whole_texts = st.lists(st.sampled_from(WHOLE), min_size=1, max_size=14).map(b"".join)


def read(text: bytes) -> str:
    return text.decode("utf-8", "rmqstore.java")


@settings(max_examples=25)
@given(st.lists(st.tuples(texts | whole_texts, texts | whole_texts, texts), min_size=1, max_size=12))
@example([("支付".encode(), b"k" * 13 + "é".encode() + b"m" * 3, b"v" * 15 + b"\xe8\xae")] * 3)
def test_every_way_to_a_text_says_the_same(tmp_path_factory, rows):
    root = tmp_path_factory.mktemp("utf8")
    log = OddLog(root / "store", 1 << 20)
    for tags, key, value in rows * 2:
        log.add(b"KEYS\x01" + key + b"\x02TAGS\x01" + tags + b"\x02" + tags + b"\x01" + value + b"\x02")
    with log.open() as store:
        # Scans that copy, scans of views and messages are compared with each other there.
        check_scan(store)
        messages = list(store.messages())
        assert [message.tags for message in messages] == [read(tags) for tags, _, _ in rows * 2]
        assert [message.keys for message in messages] == [[read(key)] for _, key, _ in rows * 2]
        for tags, _, _ in rows:
            chosen = store.scan(["phy_offset"], tags=[read(tags)]).read_all().column(0).to_pylist()
            assert chosen == [each.phy_offset for each in messages if each.tags == read(tags)]


def test_each_length_and_each_place_of_a_fault(tmp_path):
    """One fault at each place of a text of each length, so that no lane and no tail of a block is left out."""
    log, expected = OddLog(tmp_path / "store", 4 << 20), []
    rng = random.Random(5)
    for size in range(1, 50):
        for place in range(size):
            text = bytearray(b"".join(rng.choice(WHOLE) for _ in range(size)))[: size + 3]
            text[place] = rng.choice([0x80, 0xBF, 0xC2, 0xE8, 0xF0, 0xFF, 0x41])
            log.add(b"TAGS\x01" + bytes(text) + b"\x02")
            expected.append(read(bytes(text)))
    with log.open() as store:
        assert [message.tags for message in store.messages()] == expected
        for views in (False, True):
            assert store.scan(["tags"], views=views).read_all().column(0).to_pylist() == expected


def test_hits_by_keys_that_are_not_ascii(tmp_path):
    config = StoreConfig(
        mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=2000, max_hash_slot_num=50, max_index_num=4000
    )
    keys = ["订单号-1", "é", "😀-2", "ключ", "k\ufffd", "A-1", "Ā", "x" * 20 + "末"]
    with MessageStore.open(tmp_path / "store", config=config) as store:
        for number in range(80):
            store.put_message(Message("T", b"x", keys=[keys[number % 8], "共同"], tags="标签"), queue_id=0)
        for kind in (None, "K"):
            for number, key in enumerate(keys):
                found = store.query_message("T", key, index_type=kind)
                assert [hit.queue_offset for hit in found] == list(range(72 + number, -1, -8)), (key, kind)
        assert len(store.query_message("T", "共同", 100)) == 80 == len(store.query_message("T", "标签", 100, index_type="T"))
        assert not store.query_message("T", "订单号") and not store.query_message("T", "\udcff")
        table = store.query_table(keys, "T", ["keys"])
        assert table.num_rows == 80 and table.column("keys").to_pylist()[0] == [keys[0], "共同"]


def test_malformed_keys_are_found_by_what_java_reads(tmp_path):
    log = OddLog(tmp_path / "store", 1 << 20)
    keys = [b"\xff\xfe", b"a\xe8\xae", "a\ufffd".encode(), b"\xed\xa0\x80", b"a\xe8\xae\xa2"]
    for key in keys:
        log.add(b"KEYS\x01" + key + b"\x02", topic="T")
    with log.open() as store:
        # No index covers them: the log itself is searched.
        for key in {read(key) for key in keys}:
            expected = [number for number, each in enumerate(keys) if read(each) == key]
            assert [hit.phy_offset for hit in store.query_message("T", key)] == [
                message.phy_offset for number, message in reversed(list(enumerate(store.messages()))) if number in expected
            ], key
