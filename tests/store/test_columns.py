"""Columns: every row equals the message that the same place of the store gives, and the oracle's record of those bytes.

Owns the pinned schema, the odd messages (malformed text, repeated properties, IPv6, compressed and damaged bodies) and the
comparison of scans, queue tables and query tables with `messages`, `get_message` and `query_message`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import golden
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmqstore import (
    Message,
    MessageStore,
    MissingDependencyError,
    OffsetOutOfRangeError,
    StoreClosedError,
    StoreConfig,
    _columns,
    _core,
    sources,
)
from rmqstore.message import compress_body, compression_flags, decode_java_utf8
from rmqstore.store import columns, placed_columns

pa = pytest.importorskip("pyarrow")

T0 = 1700000000000
ALL = _columns.COLUMN_NAMES
GEOMETRY = {
    "mapped_file_size_commit_log": 1 << 16,
    "mapped_file_size_consume_queue": 2000,
    "mapper_file_size_batch_consume_queue": 4600,
    "max_hash_slot_num": 100,
    "max_index_num": 400,
}


def row_of(message, names=ALL) -> dict:
    """Return the expected row of a message, in the values that Arrow returns."""
    row = {name: getattr(message, name) for name in names if name not in ("body", "size", "properties")}
    if "size" in names:
        row["size"] = message.size
    if "body" in names:
        row["body"] = message.body_stored if message.corrupt else message.body
    if "properties" in names:
        row["properties"] = list(message.properties.items())
    return {name: row[name] for name in names}


def plain(batches, names=ALL, views=False) -> list[dict]:
    """The rows of record batches, times as milliseconds; every batch is valid Arrow."""
    rows = []
    for batch in batches:
        assert batch.num_rows
        batch.validate(full=True)
        assert batch.schema.equals(columns.scan_schema(names, views))
        # Readers take the other columns for never null, as Spark's does.
        assert {name for name in names if batch.column(name).null_count} <= columns.NULLABLE_COLUMNS
        for name in ("born_timestamp", "store_timestamp"):
            if name in names:
                batch = batch.set_column(names.index(name), name, batch.column(name).cast(pa.int64()))
        rows += batch.to_pylist()
    return rows


def scanned(store, names=ALL, **options) -> list[dict]:
    """The rows of a scan, which are the same as views."""
    rows = plain(store.scan(names, **options), names)
    assert plain(store.scan(names, views=True, **options), names, views=True) == rows
    return rows


def check_scan(store, **options):
    rows = scanned(store, **options)
    assert rows == [row_of(message) for message in store.messages()]
    return rows


# -------------------------------------------------------------------------------------------------------- the schema


def test_the_schema_is_this_one_for_ever():
    assert str(columns.scan_schema(ALL)) == (
        "topic: string\n"
        "queue_id: int32\n"
        "queue_offset: int64\n"
        "phy_offset: int64\n"
        "size: int32\n"
        "msg_id: string\n"
        "keys: list<item: string>\n"
        "  child 0, item: string\n"
        "tags: string\n"
        "body: binary\n"
        "properties: map<string, string>\n"
        "  child 0, entries: struct<key: string not null, value: string> not null\n"
        "      child 0, key: string not null\n"
        "      child 1, value: string\n"
        "born_timestamp: timestamp[ms, tz=UTC]\n"
        "store_timestamp: timestamp[ms, tz=UTC]\n"
        "born_host: string\n"
        "store_host: string\n"
        "flag: int32\n"
        "sys_flag: int32\n"
        "reconsume_times: int32\n"
        "prepared_transaction_offset: int64\n"
        "corrupt: bool\n"
        "unique_key: string\n"
        "body_stored: binary"
    )
    assert columns.scan_schema().names == [name for name in ALL if name not in ("unique_key", "body_stored")]
    assert columns.scan_schema(["tags", "topic"]).names == ["tags", "topic"]


def test_the_documented_schema_is_the_schema():
    text = (Path(__file__).resolve().parents[2] / "docs" / "columns.md").read_text(encoding="utf-8")
    _, _, section = text.partition("\n## The schema\n")
    rows = re.findall(r"(?m)^- `(\w+)` \(`([^`]+)`\)", section.partition("\n## ")[0])
    assert [list(row) for row in rows] == [
        [field.name, str(field.type)] for field in columns.scan_schema(ALL)
    ]


@pytest.mark.parametrize("wrong", [["topics"], ["topic", "topic"]])
def test_columns_that_do_not_exist(base, wrong):
    with MessageStore.open(base, read_only=True) as store, pytest.raises(ValueError, match="column"):
        store.scan(wrong)


def test_pyarrow_is_an_extra(base):
    statements = (
        "import sys\n"
        "sys.modules['pyarrow'] = None\n"
        "from rmqstore import MessageStore, MissingDependencyError\n"
        f"with MessageStore.open({str(base)!r}, read_only=True) as store:\n"
        "    try:\n"
        "        store.scan()\n"
        "    except MissingDependencyError as error:\n"
        "        print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", statements], capture_output=True, text=True, check=False)
    assert "rmqstore[arrow]" in ran.stdout, ran.stderr


# ------------------------------------------------------------------------------------------------------ golden stores


@pytest.mark.parametrize("name", golden.STORES)
@pytest.mark.parametrize("batch_size", [53, 8192])
def test_scans_of_golden_stores_equal_messages(golden_store, name, batch_size):
    with MessageStore.open(golden_store(name), read_only=True) as store:
        rows = check_scan(store, batch_size=batch_size)
        assert len(rows) >= 41
        assert plain(store.scan(), columns.DEFAULT_COLUMNS) == [
            {name: row[name] for name in columns.DEFAULT_COLUMNS} for row in rows
        ]


@pytest.mark.parametrize("name", golden.STORES)
def test_scans_of_golden_stores_equal_the_oracle(golden_store, name):
    root = golden_store(name)
    records = {record.physical_offset: record for record in oracle.records_of(oracle.segments(oracle.read_files(root)))}
    with MessageStore.open(root, read_only=True) as store:
        for row in plain(store.scan(ALL)):
            record = records.pop(row["phy_offset"])
            assert dict(row["properties"]) == record.properties
            for name in (
                "topic queue_id flag queue_offset sys_flag born_timestamp born_host store_timestamp store_host "
                "reconsume_times prepared_transaction_offset keys tags unique_key msg_id"
            ).split():
                assert row[name] == getattr(record, name), name
            assert row["body_stored"] == record.body
            assert row["corrupt"] is not record.body_is_sound
        # A store that was killed may have whole records after the end that its reader is sure of.
        assert not [at for at in records if at < store.commit_log.max_offset]


@pytest.mark.parametrize("views", [False, True])
def test_dictionaries(broker, views):
    pytest.importorskip("lz4.frame")
    chosen = ["topic", "tags", "body", "born_host"]
    options = {"columns": chosen, "views": views, "batch_size": 500}
    with MessageStore.open(broker, read_only=True) as store:
        whole = store.scan(**options).read_all()
        reader = store.scan(**options, read_dictionary=["topic", "tags"])
        assert reader.schema.equals(columns.scan_schema(chosen, views, ["topic", "tags"]))
        encoded = reader.read_all()
        encoded.validate(full=True)
        assert encoded.to_pylist() == whole.to_pylist()
        assert str(encoded.schema.field("tags").type) == "dictionary<values=string, indices=int32, ordered=0>"
        # Of few matches small batches are put together, and so are their dictionaries.
        few = store.scan(["tags"], tags=["TagA"], views=views, read_dictionary="tags").read_all()
        assert few.column("tags").to_pylist() == [tag for tag in whole.column("tags").to_pylist() if tag == "TagA"]
        for wrong in (["body"], ["nothing"], "keys"):
            with pytest.raises(ValueError, match="cannot be a dictionary"):
                store.scan(["topic"], read_dictionary=wrong)


@pytest.mark.parametrize("name", ALL)
def test_each_column_alone(broker, name):
    with MessageStore.open(broker, read_only=True) as store:
        assert scanned(store, (name,)) == [row_of(message, (name,)) for message in store.messages()]


# ------------------------------------------------------------------------------------------------------- odd messages


class OddLog:
    """A store whose log is written byte by byte, with the oracle's encoder; nothing is dispatched."""

    def __init__(self, root: Path, segment_size: int = 1 << 16):
        self.root, self.size = root, segment_size
        self.data = bytearray()
        (root / "commitlog").mkdir(parents=True)

    def add(self, properties: bytes = b"", **fields) -> int:
        """Append one record; its offset."""
        at = len(self.data)
        record = {"topic": "Odd", "body": b"body", "born_host": "127.0.0.1:1"} | fields
        self.data += oracle.encode_record(properties=properties, phy_offset=at, **record)
        return at

    def open(self) -> MessageStore:
        assert len(self.data) <= self.size
        path = self.root / "commitlog" / f"{0:020d}"
        path.write_bytes(bytes(self.data) + bytes(self.size - len(self.data)))
        config = StoreConfig(**GEOMETRY | {"mapped_file_size_commit_log": self.size})
        return MessageStore.open(self.root, config=config, read_only=True)


MALFORMED = [
    b"\xff",
    b"\xc0\x80",
    b"\xc3",
    b"\xe4\xb8",
    b"\xe4\xb8\xad",
    b"\xed\xa0\x80",
    b"\xed\xa0\x80\xed\xb0\x80",
    b"\xed\xbf",
    b"\xf0\x9f\x98\x80",
    b"\xf0\x9f\x98",
    b"\xf0\x9f",
    b"\xf0",
    b"\xf4\x90\x80\x80",
    b"\xf8\x88\x80\x80\x80",
    b"\xe0\x80\x80",
    b"\x80",
    b"a\xe4b",
    "ü€😀".encode(),
]


def test_text_is_read_as_java_reads_it(tmp_path):
    log = OddLog(tmp_path / "store")
    for piece in MALFORMED:
        for text in (piece, b"a" + piece, piece + b"z", piece * 3, b"x" * 70 + piece + b"y" * 70):
            log.add(
                b"KEYS\x01" + text + b" k\x02TAGS\x01" + text + b"\x02UNIQ_KEY\x01" + text + b"\x02" + text + b"\x01v"
            )
    with log.open() as store:
        rows = check_scan(store)
        assert rows[0]["tags"] == "\ufffd"


@given(text=st.binary(max_size=12) | st.lists(st.sampled_from(MALFORMED), max_size=6).map(b"".join))
def test_any_bytes_are_read_as_java_reads_them(text, tmp_path_factory):
    log = OddLog(tmp_path_factory.mktemp("odd") / "store", 4096)
    text = text.replace(b"\x01", b"!").replace(b"\x02", b"?")
    log.add(b"TAGS\x01" + text + b"\x02")
    with log.open() as store:
        (row,) = check_scan(store)
        assert row["tags"] == (decode_java_utf8(text) or None)


PROPERTIES = [
    b"\x02",
    b"\x01\x02",
    b"a\x02",
    b"a\x01\x02",
    b"\x01b\x02",
    b"a\x01b",
    b"a\x01b\x02a\x01c\x02",
    b"a\x01b\x02c\x01d\x02a\x01e\x02c\x01\x02a\x01f",
    b"a\x01b\x01c\x01\x02",
    b"KEYS\x01a  b \x02",
    b"KEYS\x01 \x02",
    b"KEYS\x01a\x02KEYS\x01\x02",
    b"TAGS\x01a\x02TAGS\x01b\x02",
    b"\xff\x01a\x02\xfe\x01b\x02",
    b"\x02\x02\x02a\x01b\x02\x02",
    b"KEYS\x01k1 k2\x02UNIQ_KEY\x01U\x02TAGS\x01t\x02WAIT\x01true\x02",
    b"".join(b"n%d\x01v%d\x02" % (i % 60, i) for i in range(100)),
    b"".join(b"n%d\x01v%d\x02" % (i, i) for i in range(70)),
    b"".join(b"%c\x01%c\x02" % (i, i) for i in range(33, 127)) * 2,
    b"x" * 62 + b"\x01" + b"y" * 63 + b"\x02" + b"z" * 64 + b"\x01\x02\x01",
]


def test_properties_are_cut_by_javas_rules(tmp_path):
    log = OddLog(tmp_path / "store")
    for text in PROPERTIES:
        log.add(text)
    with log.open() as store:
        check_scan(store)


@settings(max_examples=100)
@given(
    texts=st.lists(
        st.lists(
            st.sampled_from([b"\x01", b"\x02", b"a", b"b", b"KEYS", b"TAGS", b" ", b"\xff", b"x" * 17]), max_size=40
        ).map(b"".join),
        min_size=1,
        max_size=8,
    )
)
def test_any_properties(texts, tmp_path_factory):
    log = OddLog(tmp_path_factory.mktemp("odd") / "store")
    for text in texts:
        log.add(text)
    with log.open() as store:
        check_scan(store, batch_size=3)


USUAL = b"KEYS\x01ORD-1 ORD-2\x02UNIQ_KEY\x010A00000100002A9F\x02WAIT\x01true\x02TAGS\x01paid\x02x\x02\x01y\x02n\x01a\x01b\x02"


def texts_like(usual: bytes) -> list[bytes]:
    """Texts of one length that differ from a usual one in one byte, some of the usual ones between them."""
    texts = []
    for pos in range(len(usual)):
        for byte in b"\x00\x01\x02\x03 A\x7f\x80\xff":
            texts += [usual, usual[:pos] + bytes([byte]) + usual[pos + 1 :]]
    return texts


@pytest.mark.parametrize(
    "usual", [USUAL, USUAL[:-1], b"a\x01b\x02c\x01d", b"TAGS\x01" + b"t" * 244, b"t\x01" + b"u" * 255]
)
def test_texts_of_one_length_are_told_apart(tmp_path, usual):
    """The pieces of the text before are taken for the next one only where all separators and names are the same."""
    log = OddLog(tmp_path / "store", 1 << 20)
    texts = texts_like(usual)
    offsets = [log.add(text) for text in texts]
    # There are no bytes after the last record.
    log.size = len(log.data)
    with log.open() as store:
        rows = check_scan(store)
        assert [row["phy_offset"] for row in rows] == offsets
        for tag in {row["tags"] for row in rows if row["tags"]} & {"t" * 244, "paid", "pai\x7f"}:
            assert scanned(store, tags=[tag]) == [row for row in rows if row["tags"] == tag]
        region, messages = store.commit_log.segment(0).region, list(store.messages())
        zeros, places = np.zeros(len(texts), np.int32), np.array(offsets, np.int64)
        for key in ("ORD-1", "ORD-2", "OR ", "0A00000100002A9F", "ORD-1\x03"):
            sought = _columns.KeyTexts(*key_offsets([key]), *key_offsets(["Odd"]))
            matches = [key in message.keys or key == message.unique_key for message in messages]
            for names in ((), ALL):
                found = np.ones(len(texts), np.uint8)
                out = _columns.ArrowColumns(names, capacity=len(texts))
                where = ([region], np.zeros(1, np.int64), zeros, places)
                assert out.fill_matching(*where, found, zeros, sought, 3, 2**62) == len(texts)
                assert found.tolist() == matches
                assert out.take()[0] == sum(matches)


def key_offsets(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Texts as `KeyTexts` takes them."""
    parts = [text.encode() for text in texts]
    return np.cumsum([0, *map(len, parts)], dtype=np.int32), np.frombuffer(b"".join(parts), np.uint8)


def test_the_largest_properties(tmp_path):
    log = OddLog(tmp_path / "store", 1 << 18)
    log.add(b"a\x01b\x02" * 8191)
    log.add(b"".join(b"%c%c\x01b\x02" % (33 + i // 90, 33 + i % 90) for i in range(6500)))
    log.add(b"KEYS\x01" + b" k" * 16000)
    log.add(b"KEYS\x01" + b"\xff" * 32000)
    log.add(b"\xff" * 32000)
    with log.open() as store:
        rows = check_scan(store)
        assert rows[0]["properties"] == [("a", "b")]
        assert len(rows[2]["keys"]) == 16000


HOSTS = [
    "0.0.0.0:0",
    "255.255.255.255:65535",
    "10.0.0.1:10911",
    "[::]:0",
    "[::1]:65535",
    "[2001:db8::2:0:0:1]:10911",
    "[1:2:3:4:5:6:7:8]:1",
    "[::ffff:102:304]:1",
    "[fe80:1111:2222:3333:4444:5555:6666:7777]:12345",
]


def test_hosts(tmp_path):
    log = OddLog(tmp_path / "store", 1 << 18)
    many = [f"10.{i % 7}.{i % 251}.{i % 13}:{i * 31}" for i in range(700)] + [
        f"[2001:db8::{i:x}]:{i}" for i in range(300)
    ]
    for store_host in [*HOSTS, *HOSTS, *many, *many[:50]]:
        for born_host in (HOSTS[2], HOSTS[5]) if store_host in HOSTS else (HOSTS[4],):
            log.add(store_host=store_host, born_host=born_host)
    with log.open() as store:
        check_scan(store, batch_size=100)


def test_a_port_that_no_writer_leaves(tmp_path):
    log = OddLog(tmp_path / "store")
    for port in (-1, -(2**31), 2**31 - 1, 65536):
        at = log.add()
        log.data[at + 52 : at + 56] = port.to_bytes(4, "big", signed=True)
    with log.open() as store:
        assert [row["born_host"] for row in check_scan(store)] == [
            "127.0.0.1:-1",
            "127.0.0.1:-2147483648",
            "127.0.0.1:2147483647",
            "127.0.0.1:65536",
        ]


def test_compressed_bodies(tmp_path):
    pytest.importorskip("lz4.frame")
    pytest.importorskip("zstandard")
    log = OddLog(tmp_path / "store")
    for kind in ("LZ4", "ZSTD", "ZLIB"):
        for body in (b"x" * 5000, b"short"):
            log.add(body=compress_body(body, kind), sys_flag=compression_flags(kind))
            log.add(body=compress_body(body, kind)[:-3], sys_flag=compression_flags(kind))
    log.add(body=compress_body(b"old writers", "ZLIB"), sys_flag=1)
    log.add(body=b"", sys_flag=1)
    log.add(body=b"unknown type", sys_flag=1 | 5 << 8)
    with log.open() as store:
        rows = check_scan(store)
        assert rows[0]["body"] == b"x" * 5000
        assert rows[1]["body"] == rows[1]["body_stored"] and rows[1]["corrupt"]
        assert rows[-3]["body"] == b"old writers"
        assert scanned(store, ("body",), batch_size=2) == [{"body": row["body"]} for row in rows]
        assert sum(row["corrupt"] for row in rows) == 7


def test_a_missing_library_is_an_error(tmp_path, monkeypatch):
    pytest.importorskip("lz4.frame")
    log = OddLog(tmp_path / "store")
    log.add(body=compress_body(b"x" * 500, "LZ4"), sys_flag=compression_flags("LZ4"))
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with log.open() as store:
        with pytest.raises(MissingDependencyError, match="compression"):
            list(store.scan(["body"]))
        assert len(plain(store.scan(["body_stored"]), ("body_stored",))) == 1


def test_a_body_that_does_not_fit_its_crc(tmp_path):
    log = OddLog(tmp_path / "store")
    log.add()
    bad = log.add(body=compress_body(b"x" * 500, "ZLIB"), sys_flag=compression_flags("ZLIB"))
    log.data[bad + 90] ^= 1
    log.add()
    with log.open() as store:
        rows = check_scan(store)
        assert [row["corrupt"] for row in rows] == [False, True, False]
        assert rows[1]["body"] == rows[1]["body_stored"]


def test_property_crcs(golden_copy):
    root = golden_copy("propcrc")
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[44] ^= 1  # the born time: only the property CRC covers it
    path.write_bytes(data)
    with MessageStore.open(root, read_only=True) as store:
        assert [row["corrupt"] for row in check_scan(store)][:2] == [True, False]
    config = StoreConfig(**golden.geometry("base") | {"force_verify_prop_crc": True})
    with MessageStore.open(golden_copy("base"), config=config, read_only=True) as store:
        assert all(row["corrupt"] for row in check_scan(store))


def put_odd_messages(store, n=300, seed=1):
    rng = random.Random(seed)
    for i in range(n):
        topic = rng.choice(["Orders", "Pay", "T" * 127, "%RETRY%" + "g" * 200])
        message = Message(
            topic,
            rng.randbytes(rng.choice([0, 1, 15, 16, 17, 200, 3000])),
            keys=[rng.choice(["k1", "订单", "k" * 40, "é"]) + str(rng.randrange(20)) for _ in range(rng.randrange(4))],
            tags=rng.choice([None, "TagA", "Aa", "BB", "标"]),
            properties={"UNIQ_KEY": f"U{i}", "p": "v" * rng.randrange(90)} if i % 3 else None,
            flag=rng.randrange(-(2**31), 2**31),
            born_timestamp=rng.choice([0, -1, T0, 2**40]),
            born_host=rng.choice([None, "10.0.0.9:1234", "[2001:db8::2]:1"]),
            reconsume_times=rng.randrange(20),
            prepared_transaction_offset=rng.randrange(2**60),
            sys_flag=rng.choice([0, 0, 0, 4, 8, 12]),
        )
        store.put_message(message, rng.randrange(3))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A store of odd messages over several segments whose clock goes on by a second each, open for writing."""
    now = [T0]

    def clock():
        now[0] += 1000
        return now[0]

    config = StoreConfig(**GEOMETRY, clock=clock, clean_resource_interval=0)
    with MessageStore.open(tmp_path_factory.mktemp("odd") / "store", config=config) as store:
        put_odd_messages(store)
        assert len(store.commit_log.files.offsets) > 3
        yield store


@pytest.mark.parametrize("batch_size", [1, 2, 64, 8192])
def test_scan_of_a_writable_store(odd, batch_size):
    rows = check_scan(odd, batch_size=batch_size)
    with MessageStore.open(odd.path, read_only=True) as reader:
        assert plain(reader.scan(ALL, batch_size=batch_size)) == rows


# ------------------------------------------------------------------------------------------------------------ filters

FILTERS = [
    {"topic": "Orders"},
    {"topic": ["Orders", "Pay"]},
    {"topic": ["NoSuchTopic"]},
    {"topic": []},
    {"topic": "T" * 127, "queue_id": 1},
    {"queue_id": [0, 2]},
    {"queue_id": []},
    {"queue_id": [-1, 2**31 - 1, 1]},
    {"tags": "TagA"},
    {"tags": "Aa"},
    {"tags": "TagA || 标"},
    {"tags": ["BB", "nothing"]},
    {"tags": "*"},
    {"topic": "Pay", "tags": "BB", "queue_id": (0, 1)},
    {"begin": T0 + 100_000},
    {"end": T0 + 100_000},
    {"begin": T0 + 50_000, "end": T0 + 60_000, "topic": "Orders"},
    {"begin": 2**62},
    {"begin_phy_offset": 40_000},
    {"end_phy_offset": 40_000},
    {"begin_phy_offset": 70_001, "end_phy_offset": 140_003, "tags": "Aa"},
    {"begin_phy_offset": -5, "end_phy_offset": 2**60},
    {"begin_phy_offset": 2**60},
]


def keeps(message, topic=None, queue_id=None, tags=None, begin=None, end=None) -> bool:
    texts = tags.split(" || ") if isinstance(tags, str) else tags
    return (
        (topic is None or message.topic in ([topic] if isinstance(topic, str) else topic))
        and (queue_id is None or message.queue_id in ([queue_id] if isinstance(queue_id, int) else queue_id))
        and (texts is None or "*" in texts or message.tags in texts)
        and (begin is None or message.store_timestamp >= begin)
        and (end is None or message.store_timestamp <= end)
    )


@pytest.mark.parametrize("number", range(len(FILTERS)))
def test_filters(odd, number):
    filters = dict(FILTERS[number])
    begin, end = filters.pop("begin_phy_offset", None), filters.pop("end_phy_offset", None)
    wanted = [row_of(message) for message in odd.messages(begin, end) if keeps(message, **filters)]
    assert scanned(odd, **FILTERS[number], batch_size=50) == wanted
    names = ("phy_offset",)
    assert scanned(odd, names, **FILTERS[number]) == [{"phy_offset": row["phy_offset"]} for row in wanted]


def test_splits_of_the_log_give_every_row_once(odd):
    whole = plain(odd.scan(["phy_offset"]), ("phy_offset",))
    for size in (1000, 12345, 65536):
        parts = []
        for begin in range(0, odd.commit_log.max_offset, size):
            parts += plain(
                odd.scan(["phy_offset"], begin_phy_offset=begin, end_phy_offset=begin + size), ("phy_offset",)
            )
        assert parts == whole


def test_filters_read_text_as_java_does(tmp_path):
    log = OddLog(tmp_path / "store")
    log.add(b"TAGS\x01\xff\x02")
    log.add(b"TAGS\x01\xed\xa0\x80\x02")
    log.add("TAGS\x01标\x02".encode())
    with log.open() as store:
        assert [row["phy_offset"] for row in plain(store.scan(ALL, tags=["\ufffd"]))] == [
            message.phy_offset for message in store.messages() if message.tags == "\ufffd"
        ]
        assert len(plain(store.scan(ALL, tags=["标"]))) == 1


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 2**31}, {"batch_size": -1}])
def test_impossible_batches(odd, options):
    with pytest.raises(ValueError, match="rows"):
        odd.scan(**options)


def test_batches_are_cut_by_bytes_too(odd, monkeypatch):
    monkeypatch.setattr(columns, "_BATCH_BYTES", 10_000)
    batches = list(odd.scan(ALL))
    assert len(batches) > 5
    assert plain(batches) == [row_of(message) for message in odd.messages()]
    monkeypatch.setattr(columns, "_BATCH_BYTES", 1)
    assert [batch.num_rows for batch in odd.scan(["body"])].count(1) > 100


# -------------------------------------------------------------------------------------------- damage, writers, threads


def damaged(root: Path, flips, out: Path) -> MessageStore:
    shutil.copytree(root, out)
    for at, bit in flips:
        path = out / "commitlog" / f"{at // 65536 * 65536:020d}"
        data = bytearray(path.read_bytes())
        data[at % 65536] ^= 1 << bit
        path.write_bytes(data)
    return MessageStore.open(out, config=StoreConfig(**GEOMETRY), read_only=True)


@pytest.fixture(scope="module")
def odd_copy(odd, tmp_path_factory):
    odd.flush()
    target = tmp_path_factory.mktemp("copy") / "store"
    shutil.copytree(odd.path, target)
    return target


@pytest.mark.parametrize("rounds", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_flipped_bits_are_flagged_or_passed_over(odd_copy, tmp_path, rounds):
    rng = random.Random(7)
    with MessageStore.open(odd_copy, read_only=True) as store:
        messages = list(store.messages())
    for number in range(rounds):
        flips = []
        for _ in range(rng.randrange(1, 12)):
            message = rng.choice(messages)
            # Headers and lengths are the interesting bytes.
            flips.append((message.phy_offset + rng.randrange(min(message.size, 120)), rng.randrange(8)))
        with damaged(odd_copy, flips, tmp_path / str(number)) as store:
            check_scan(store, batch_size=rng.choice([1, 10, 8192]))
            for begin in (0, 1, 65536, 99_999):
                assert scanned(store, begin_phy_offset=begin) == [row_of(message) for message in store.messages(begin)]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_segment_is_passed_over(odd_copy, tmp_path, missing):
    shutil.copytree(odd_copy, tmp_path / "store")
    (tmp_path / "store" / "commitlog" / f"{missing * 65536:020d}").unlink()
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**GEOMETRY), read_only=True) as store:
        assert check_scan(store)


def test_an_empty_store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**GEOMETRY)) as store:
        assert list(store.scan()) == []


def test_a_closed_store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**GEOMETRY)) as store:
        store.put_messages([Message("T", b"x") for _ in range(10)])
        batches = store.scan(batch_size=5)
        first = next(batches)
    with pytest.raises(StoreClosedError):
        next(batches)
    with pytest.raises(StoreClosedError):
        store.scan()
    # The reader owns the batch.
    first.validate(full=True)
    assert first.column("body").to_pylist() == [b"x"] * 5


def test_a_batch_outlives_everything(odd):
    kept = list(odd.scan(ALL, batch_size=16))
    rows = plain(kept)
    for _ in range(3):
        list(odd.scan(ALL, batch_size=16))
    assert plain(kept) == rows


def test_a_reader_beside_a_writer(tmp_path):
    config = StoreConfig(**GEOMETRY)
    with MessageStore.open(tmp_path / "store", config=config) as writer:
        writer.put_message(Message("T", b"0"))
        with MessageStore.open(tmp_path / "store", config=config, read_only=True) as reader:
            assert len(plain(reader.scan(ALL))) == 1
            for n in range(1, 40):
                writer.put_messages([Message("T", b"%d" % n + b"x" * 900) for _ in range(30)])
                assert len(plain(reader.scan(("phy_offset",)), ("phy_offset",))) == 1 + 30 * n


@contextlib.contextmanager
def written_meanwhile(store, num):
    """A thread puts `num` batches of ten; the event that it sets in the end."""
    done = threading.Event()

    def write():
        for n in range(num):
            store.put_messages([Message("T", b"%d" % n * 50, keys=[f"k{n}"]) for _ in range(10)])
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield done
    finally:
        thread.join()


def test_scans_while_a_thread_writes(tmp_path):
    config = StoreConfig(**GEOMETRY)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        before = 0
        with written_meanwhile(store, 200) as done:
            while not done.is_set():
                batches = list(store.scan(ALL, batch_size=100))
                num = sum(batch.num_rows for batch in batches)
                assert num >= before
                assert not any(any(batch.column("corrupt").to_pylist()) for batch in batches)
                before = num
        assert len(check_scan(store)) == 2000


def test_two_threads_do_not_share_columns():
    class Text(str):
        def encode(self, *args):
            # Called while the columns are being filled.
            for use in (made.take, made.choose, lambda: made.fill(region, 0, region.size, 0)):
                with pytest.raises(RuntimeError, match="thread"):
                    use()
            return str.encode(self, *args)

    made = _columns.ArrowColumns(["store_host"], host_text=lambda host: Text("[::1]:1"))
    record = oracle.encode_record(topic="T", store_host="[::1]:1")
    with tempfile.TemporaryFile() as file:
        file.write(record + bytes(100))
        file.flush()
        region = _core.Region.map(file.fileno(), os.fstat(file.fileno()).st_size)
        assert made.fill(region, 0, region.size, 0)[1] == _core.Verdict.EMPTY
        assert made.take()[0] == 1


def test_columns_of_a_closed_region():
    number, place = np.zeros(1, np.int32), np.zeros(1, np.int64)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4096))
        file.flush()
        region, other = (_core.Region.map(file.fileno(), 4096) for _ in range(2))
    made = _columns.ArrowColumns(ALL)
    with pytest.raises(OffsetOutOfRangeError):
        made.fill(region, 4097, 4097, 0)
    region.close()
    with pytest.raises(StoreClosedError):
        made.fill(region, 0, 4096, 0)
    with pytest.raises(StoreClosedError):
        made.fill_at([other, region], np.zeros(2, np.int64), number, place, number[:0], np.zeros(1, np.uint8))
    # Nothing stays pinned, and the columns can be used again.
    assert other.pins == 0
    taken = np.ones(1, np.uint8)
    for numbers in (number, number - 1, number + 1):
        for offset in (0, -1, 4096, 2**62):
            assert made.fill_at([other], place, numbers, place + offset, number[:0], taken) == 1
            assert not taken[0]
    assert made.take()[0] == 0
    for wrong in (
        ([other] * 65, np.zeros(65, np.int64), number, place, number, taken),
        ([other], np.zeros(2, np.int64), number, place, number, taken),
        ([other], place, number[:0], place, number, taken),
        ([other], place, number, place, np.zeros(2, np.int32), taken),
        ([other], place, number, place, number, taken[:0]),
        ([other], place, number, place, number, taken, 2),
    ):
        with pytest.raises(ValueError):
            made.fill_at(*wrong)
    with pytest.raises(TypeError):
        made.fill_at([None], place, number, place, number, taken)
    texts = _columns.KeyTexts(*key_offsets(["k"]), *key_offsets(["T"]))
    with pytest.raises(StoreClosedError):
        made.fill_matching([other, region], np.zeros(2, np.int64), number, place, taken, number, texts, 3, 1)
    for wrong in (
        ([other], place, number, place, taken, number[:0], texts, 3, 1),
        ([other], place, number, place, taken[:0], number, texts, 3, 1),
        ([other], place, number, place, taken, number, texts, 3, 1, 2),
        ([other], place, number, place, taken, number, texts, 3, 1, -1),
    ):
        with pytest.raises(ValueError):
            made.fill_matching(*wrong)
    for numbers in (number, number - 1, number + 1):
        taken[0] = 1
        assert made.fill_matching([other], place, number, place, taken, numbers, texts, 3, 1) == 1
        assert not taken[0]
    assert other.pins == 0


@pytest.mark.parametrize(
    "options", [{"columns": ["nothing"]}, {"capacity": 0}, {"byte_limit": 0}, {"byte_limit": 2**30}]
)
def test_impossible_columns(options):
    with pytest.raises(ValueError):
        _columns.ArrowColumns(**{"columns": ["body"]} | options)


def test_retention_takes_segments_from_under_a_scan(tmp_path):
    config = StoreConfig(**GEOMETRY)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        store.put_messages([Message("T", b"x" * 900) for _ in range(300)])
        with MessageStore.open(tmp_path / "store", config=config, read_only=True) as reader:
            batches = reader.scan(("phy_offset",), batch_size=5)
            next(batches)
            for base in reader.commit_log.files.offsets[1:3]:
                (tmp_path / "store" / "commitlog" / f"{base:020d}").unlink()
            rows = plain(batches, ("phy_offset",))
            assert rows and not any(65536 <= row["phy_offset"] < 3 * 65536 for row in rows)
            assert rows[-1]["phy_offset"] > 3 * 65536


# -------------------------------------------------------------------------------------------------- tables of a queue


def table_rows(table, names=ALL, views=False):
    assert table.schema.equals(columns.scan_schema(names, views))
    return plain(table.to_batches(), names, views)


def read_queue(store, topic, queue_id, tags=None) -> list:
    found, at = [], store.min_queue_offset(topic, queue_id)
    while at < store.max_queue_offset(topic, queue_id):
        got = store.get_message(topic, queue_id, at, 1000, tags)
        found += got.messages
        at = got.next_queue_offset
    return found


@pytest.mark.parametrize("name", golden.STORES)
def test_tables_of_golden_queues_equal_get_message(golden_store, name):
    with MessageStore.open(golden_store(name), read_only=True) as store:
        num = 0
        for topic in store.topics():
            for queue_id in store.queue_ids(topic):
                messages = read_queue(store, topic, queue_id)
                table = store.get_table(topic, queue_id, columns=ALL)
                assert table_rows(table) == [row_of(message) for message in messages]
                assert table_rows(store.get_table(topic, queue_id, columns=ALL, views=True), views=True) == table_rows(
                    table
                )
                num += len(messages)
                for tags in {message.tags for message in messages if message.tags}:
                    assert table_rows(store.get_table(topic, queue_id, tags=tags, columns=ALL)) == [
                        row_of(message) for message in read_queue(store, topic, queue_id, tags)
                    ]
        assert num


@pytest.mark.parametrize("tags", [None, "Aa", "TagA || 标", "nothing", "*"])
def test_parts_of_a_queue(odd, tags):
    messages = read_queue(odd, "Orders", 1, tags)
    names = ("phy_offset", "queue_offset", "body")
    whole = [row_of(message, names) for message in messages]
    assert table_rows(odd.get_table("Orders", 1, tags=tags, columns=names), names) == whole
    end = odd.max_queue_offset("Orders", 1)
    for queue_offset in (-3, 0, 1, 7, end - 1, end, end + 5, 2**60):
        for max_num in (0, 1, 5, 10**6, None):
            rows = table_rows(odd.get_table("Orders", 1, queue_offset, max_num, tags, names), names)
            assert rows == [row for row in whole if row["queue_offset"] >= queue_offset][:max_num]


def test_queues_that_do_not_exist(odd):
    assert odd.get_table("NoSuchTopic").num_rows == 0
    assert odd.get_table("Orders", 77, columns=["body"]).schema.names == ["body"]
    with pytest.raises(ValueError, match="max_num"):
        odd.get_table("Orders", max_num=-1)


def test_a_unit_that_does_not_fit_its_record_has_no_row(odd_copy, tmp_path):
    shutil.copytree(odd_copy, tmp_path / "store")
    path = tmp_path / "store" / "consumequeue" / "Orders" / "1" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[3 * 20 + 11] ^= 1  # the size in unit 3
    data[5 * 20 + 2] ^= 1  # a phy offset far after the end
    path.write_bytes(data)
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**GEOMETRY), read_only=True) as store:
        rows = table_rows(store.get_table("Orders", 1, columns=ALL))
        assert rows == [row_of(message) for message in read_queue(store, "Orders", 1)]
        assert [row["queue_offset"] for row in rows[:5]] == [0, 1, 2, 4, 6]


def test_a_queue_over_many_segments(tmp_path):
    config = StoreConfig(**GEOMETRY | {"mapped_file_size_commit_log": 4096, "max_mapped_files": 8})
    with MessageStore.open(tmp_path / "store", config=config) as store:
        store.put_messages([Message("T", b"x" * 900, keys=[f"k{i % 7}"]) for i in range(800)])
        assert len(store.commit_log.files.offsets) > 150
        rows = table_rows(store.get_table("T", columns=ALL))
        assert rows == [row_of(message) for message in store.messages()]
        # A batch of views leads into 64 segments at most.
        viewed = store.get_table("T", columns=ALL, views=True)
        assert viewed.column("body").num_chunks > 2 and table_rows(viewed, views=True) == rows
        assert plain(store.scan(ALL, views=True), views=True) == rows
        table = store.query_table(["k3"], "T", ["phy_offset"], max_num=10**6)
        assert table.column("phy_offset").to_pylist() == [
            message.phy_offset for message in store.query_message("T", "k3", max_num=10**6)
        ]


# --------------------------------------------------------------------------------------------------- tables of queries


def check_query(store, pairs, names=("phy_offset", "body", "corrupt"), **options):
    table = store.query_table([key for _, key in pairs], [topic for topic, _ in pairs], names, **options)
    assert table.schema.equals(placed_columns.query_schema(names))
    wanted = [
        {"key": key, "key_number": number} | row_of(message, names)
        for number, (topic, key) in enumerate(pairs)
        for message in store.query_message(topic, key, **options)
    ]
    assert table.to_pylist() == wanted
    return wanted


@pytest.mark.parametrize("name", golden.STORES)
def test_queries_of_golden_stores_equal_query_message(golden_store, name):
    with MessageStore.open(golden_store(name), read_only=True) as store:
        messages = list(store.messages())
        pairs = {(message.topic, key) for message in messages for key in (*message.keys, message.unique_key or "none")}
        pairs = [*random.Random(3).sample(sorted(pairs), min(len(pairs), 700)), ("Orders", "no such key"), ("", "")]
        assert check_query(store, pairs)
        check_query(store, pairs[:50] * 3, max_num=2)
        tags = sorted({(message.topic, message.tags) for message in messages if message.tags})
        check_query(store, tags, index_type="T", max_num=10**6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num": 1},
        {"max_num": 0},
        {"max_num": 10**9},
        {"begin": T0 + 100_000},
        {"end": T0 + 100_000, "max_num": 3},
        {"begin": T0 + 50_000, "end": T0 + 200_000},
        {"begin": T0 + 9, "end": T0},
        {"index_type": "U"},
        {"index_type": "K"},
        {"index_type": "T"},
    ],
    ids=str,
)
def test_queries(odd, options):
    pairs = [
        (topic, f"{text}{i}") for topic in ("Orders", "Pay", "None") for text in ("k1", "订单", "é") for i in range(20)
    ]
    pairs += [("Orders", f"U{i}") for i in range(300)] + [("Orders", "TagA"), ("Pay", "标"), ("Orders", "\ufffd")]
    random.Random(1).shuffle(pairs)
    check_query(odd, pairs, **options)


COLLIDING = ["Aa", "BB"]  # one Java hash, and so have all texts made of them


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """Many index files of few slots, keys and topics of one hash, keys in many messages and several times in one."""
    rng = random.Random(5)
    now = [T0]

    def clock():
        now[0] += rng.choice([0, 1, 700])
        return now[0]

    texts = ["".join(rng.choices(COLLIDING, k=k)) for k in range(1, 6) for _ in range(6)] + ["", "k", "订单", "x" * 300]
    config = StoreConfig(
        **GEOMETRY | {"max_hash_slot_num": 5, "max_index_num": 90, "mapped_file_size_commit_log": 1 << 14},
        clock=clock,
        clean_resource_interval=0,
    )
    with MessageStore.open(tmp_path_factory.mktemp("crowded") / "store", config=config) as store:
        for i in range(600):
            keys = rng.choices(texts, k=rng.randrange(4))
            message = Message(
                rng.choice(COLLIDING),
                b"%d" % i * rng.randrange(40),
                keys=[key for key in keys if key],
                tags=rng.choice([None, *texts[:-4]]),
                properties={"UNIQ_KEY": rng.choice(texts[:-4])} if rng.random() < 0.5 else {},
            )
            store.put_message(message)
        assert len(list(store.index_service.files())) > 10
        assert len(store.commit_log.files.offsets) > 3
        yield store, texts


@pytest.mark.parametrize("max_num", [1, 2, 7, 64, 10**6])
@pytest.mark.parametrize("index_type", [None, "U", "K", "T"])
@pytest.mark.parametrize("times", [{}, {"begin": T0 + 40_000, "end": T0 + 90_000}], ids=["always", "times"])
def test_queries_where_hashes_and_keys_repeat(crowded, monkeypatch, max_num, index_type, times):
    store, texts = crowded
    pairs = [(topic, key) for topic in (*COLLIDING, "CC") for key in [*texts, "no such key", "BBBBBBAa"]]
    rng = random.Random(max_num)
    pairs = rng.choices(pairs, k=120)
    options = {"max_num": max_num, "index_type": index_type} | times
    rows = check_query(store, pairs, **options)
    assert rows
    # The places of few segments at a time, and batches that end in the midst of a key's rows.
    monkeypatch.setattr(sources, "MAX_REGIONS", 2)
    monkeypatch.setattr(placed_columns, "_KEY_ROWS", 3)
    assert check_query(store, pairs[:40], **options) == [row for row in rows if row["key_number"] < 40]


def test_queries_of_entries_that_do_not_follow_the_log(crowded, tmp_path):
    shutil.copytree(crowded[0].path, tmp_path / "store")
    with MessageStore.open(tmp_path / "store", config=crowded[0].config) as store:
        rng, messages = random.Random(6), [message for message in store.messages() if message.keys]
        for message in rng.sample(messages, 80):
            store.index_service.put_hashes(
                np.array([_core.index_key_hash(message.topic, message.keys[0])], np.int32),
                np.array([message.phy_offset], np.int64),
                np.array([message.store_timestamp], np.int64),
            )
        pairs = rng.choices([(message.topic, message.keys[-1]) for message in messages] + [("Aa", "none")], k=90)
        for max_num in (1, 3, 1000):
            check_query(store, pairs, max_num=max_num)


def test_entries_in_the_order_of_their_keys():
    newer = (np.array([2, 0, 2, 1, 2], np.int32), np.array([90, 80, 90, 70, 60], np.int64))
    older = (np.array([3, 2, 0], np.int32), np.array([5, 60, 80], np.int64))
    numbers, offsets, falling = _columns.entries_by_key([newer, older], 5)
    assert (numbers.tolist(), offsets.tolist(), falling) == ([0, 1, 2, 2, 3], [80, 70, 90, 60, 5], True)
    numbers, offsets, falling = _columns.entries_by_key([older, newer], 4)
    assert (numbers.tolist(), offsets.tolist(), falling) == ([0, 1, 2, 2, 2, 3], [80, 70, 60, 90, 60, 5], False)
    numbers, offsets, falling = _columns.entries_by_key([], 0)
    assert (numbers.tolist(), offsets.tolist(), falling) == ([], [], True)
    assert (numbers.dtype, offsets.dtype) == (np.int32, np.int64)
    wrong = [(newer[0] - 1, newer[1]), (newer[0], older[1])]
    for parts, num in (([newer], 2), ([newer], 0), (wrong[:1], 9), (wrong[1:], 9), ([], -1)):
        with pytest.raises(ValueError):
            _columns.entries_by_key(parts, num)


def test_texts_laid_out():
    for texts in (
        [],
        [""],
        ["a" * k for k in range(40)],
        ["", "kéy"[:1], "", "\x00\x7f"],
        [f"{i:x}" * 9 for i in range(99)],
    ):
        offsets, data = _columns.text_arrays(tuple(texts))
        assert (offsets.dtype, data.dtype) == (np.int32, np.uint8)
        assert [bytes(data[a:b]).decode() for a, b in itertools.pairwise(offsets)] == texts
        assert offsets[0] == 0 and offsets[-1] == len(data)
    for texts in (["é"], ["a", "订"], ["\ud800"], [b"a"], [None], ["a", 1], [np.str_("a")]):
        assert _columns.text_arrays(tuple(texts)) is None


def test_keys_and_topics_that_differ_in_one_byte(tmp_path):
    # Index entries that lead to a record with another key or topic of the same length, as after a collision of hashes.
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**GEOMETRY)) as store:
        for length in [*range(1, 20), 31, 32, 33, 64]:
            topic, key = "t" * length, "k" * length
            place = store.put_message(Message(topic, b"x", keys=[key])).phy_offset
            pairs = [(topic, key[:at] + "j" + key[at + 1 :]) for at in range(length)]
            pairs += [(topic[:at] + "s" + topic[at + 1 :], key) for at in range(length)]
            hashes = np.array([_core.index_key_hash(*pair) for pair in pairs], np.int32)
            where = np.full(len(pairs), place, np.int64)
            times = np.full(len(pairs), store.message_at(place).store_timestamp, np.int64)
            store.index_service.put_hashes(hashes, where, times)
            rows = check_query(store, [*pairs, (topic, key)])
            assert [row["key_number"] for row in rows] == [len(pairs)]


def test_one_topic_for_all_keys(odd):
    keys = [f"k1{i}" for i in range(20)] * 2
    table = odd.query_table(keys, "Orders", max_num=5)
    assert table.schema.equals(placed_columns.query_schema())
    for other in (
        odd.query_table(tuple(keys), ["Orders"] * 40, max_num=5),
        odd.query_table(pa.array(keys), "Orders", max_num=5),
        odd.query_table(pa.array(["no", *keys, "no"]).slice(1, 40), "Orders", max_num=5),
        odd.query_table(pa.chunked_array([keys[:7], [], keys[7:]]), "Orders", max_num=5),
        odd.query_table(pa.array(keys, pa.large_string()), pa.array(["Orders"] * 40), max_num=5),
    ):
        assert other.equals(table)
    assert odd.query_table([], "Orders").num_rows == 0
    assert odd.query_table("k11", "Orders", ["keys"]).num_rows == len(odd.query_message("Orders", "k11"))


def test_keys_that_are_none(odd):
    for keys in ([1], [None], pa.array(["a", None])):
        with pytest.raises(TypeError, match="key"):
            odd.query_table(keys, "Orders")
    with pytest.raises(ValueError, match="topics"):
        odd.query_table(["a", "b", "c"], ["Orders", "Pay"])
    with pytest.raises(ValueError, match="index_type"):
        odd.query_table(["a"], "Orders", index_type="X")


def test_queries_where_the_index_holds_records_twice(golden_copy):
    # A file after a Java recovery, and entries that are older than those before them.
    for name in golden.RECOVERED_BY_JAVA:
        with MessageStore.open(golden_copy(name)) as store:
            index = store.index_service
            message = next(message for message in store.messages() if message.keys)
            key = message.keys[0]
            hits = [hit.phy_offset for hit in store.query_message(message.topic, key)]
            for phy_offset in (hits[0], hits[-1], hits[0]):
                index.current().put_key(f"{message.topic}#{key}", phy_offset, message.store_timestamp)
            check_query(store, [(message.topic, key), (message.topic, "none"), (message.topic, key)])
            check_query(store, [(message.topic, key)], max_num=1)


def test_a_store_without_an_index(tmp_path):
    config = StoreConfig(**GEOMETRY, message_index_enable=False)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        store.put_message(Message("T", b"x", keys=["k"]))
        assert store.query_table(["k"], "T").num_rows == 0


def test_key_texts_that_lead_outside():
    data = np.frombuffer(b"abc", np.uint8)
    one = np.array([0, 1], np.int32)
    for offsets in ([0, 4], [2, 1], [-1, 2]):
        with pytest.raises(ValueError, match="outside"):
            _columns.KeyTexts(np.array(offsets, np.int32), data, one, data).hashes()
        with pytest.raises(ValueError, match="outside"):
            _columns.KeyTexts(one, data, np.array(offsets, np.int32), data).hashes()
    for keys, topics in (
        (np.array([], np.int32), one),
        (np.array([0, 1, 2], np.int32), np.array([0, 1, 2, 3], np.int32)),
    ):
        with pytest.raises(ValueError, match="offsets"):
            _columns.KeyTexts(keys, data, topics, data)
    texts = _columns.KeyTexts(np.array([0, 1, 1, 3], np.int32), data, one, data)
    assert texts.hashes().tolist() == [_core.index_key_hash("a", key) for key in ("a", "", "bc")]
    assert texts.hashes(True).tolist() == [_core.index_key_hash("a", "T#" + key) for key in ("a", "", "bc")]
