"""Views of rows of the usual kind, which are written in one pass, and of the others between them.

Owns the borders of that pass: where a name or a value no longer stands in its view, where a record is not of the usual
kind, where there is no room, and where memory ends.  It owns too that the memory of batches is used again only when
nobody holds it.  Rows are compared with those that are copied and with `messages`.
"""

from __future__ import annotations

import gc
import itertools
import random

import numpy as np
import oracle
import pytest
from mappings import mappings
from test_columns import ALL, OddLog, check_scan, plain, row_of, scanned

from rmqstore import Message, MessageStore, StoreConfig, _columns
from rmqstore._core import Region, Verdict
from rmqstore.message import compress_body, compression_flags
from rmqstore.store import columns

pa = pytest.importorskip("pyarrow")

SEGMENT = 1 << 20
# Stands for malformed bytes until the log is whole.
MALFORMED = "?" * 18
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def properties(pairs) -> bytes:
    """Names and values as a record holds them."""
    return b"".join(b"%s\x01%s\x02" % (name.encode(), value.encode()) for name, value in pairs)


def usual_text(rng: random.Random) -> bytes:
    """Properties as most messages have them, of lengths around those that a view holds."""
    pairs = [("KEYS", " ".join(LETTERS[: rng.randrange(1, 20)] for _ in range(rng.choice([1, 1, 1, 2, 3]))))]
    pairs += [("TAGS", rng.choice(["paid", "shipped", "a tag of sixteen"]))] * rng.randrange(2)
    pairs += [("UNIQ_KEY", f"{rng.randrange(16**12):032X}")] * rng.randrange(2)
    pairs += [(LETTERS[k : k + rng.randrange(1, 20)], "v" * rng.randrange(1, 16)) for k in range(rng.randrange(3))]
    return properties(pairs)


def unusual_fields(rng: random.Random) -> dict:
    """Changes that make a record unusual."""
    return rng.choice(
        [
            {"born_host": "[2001:db8::1]:7"},
            {"store_host": "[::1]:10911"},
            {"topic": "主题"},
            {"topic": MALFORMED},
            {"properties": "标签\x01值\x02".encode() * 2},
            {"properties": b"TAGS\x01\xff\x02"},
            {"properties": b"a\x01b\x02a\x01c\x02"},
            {"properties": b"long\x01" + b"x" * 300 + b"\x02"},
            {"properties": b""},
            {"properties": b"a\x01b\x01c\x02"},
            {"properties": b"".join(b"n%d\x01v\x02" % i for i in range(30))},
            {"body": compress_body(b"to be decompressed" * 9, "ZLIB"), "sys_flag": compression_flags("ZLIB")},
            {"body": b"no zlib at all", "sys_flag": compression_flags("ZLIB")},
        ]
    )


def add_any(log: OddLog, rng: random.Random, unusual: float) -> None:
    """Append a record of the usual kind or, in that part of cases, of another."""
    fields = {
        "topic": rng.choice(["T", "Orders", "a topic beyond twelve", "t" * 60]),
        "body": rng.randbytes(rng.choice([0, 1, 12, 13, 40])),
        "born_host": rng.choice(["127.0.0.1:1", "10.0.0.9:65535"]),
        "queue_id": rng.randrange(4),
        "store_timestamp": 1_700_000_000_000 + len(log.data),
        "properties": usual_text(rng),
    }
    log.add(**fields | (unusual_fields(rng) if rng.random() < unusual else {}))


@pytest.mark.parametrize("unusual", [0, 0.01, 0.2, 0.9])
@pytest.mark.parametrize("batch_size", [7, 200, 8192])
def test_rows_of_all_kinds_are_those_of_a_scan_that_copies(tmp_path, unusual, batch_size):
    rng = random.Random(batch_size + int(100 * unusual))
    log = OddLog(tmp_path / "store", SEGMENT)
    for _ in range(900):
        add_any(log, rng, unusual)
    log.data = log.data.replace(MALFORMED.encode(), b"\xff\xfe" * 9)
    with log.open() as store:
        rows = check_scan(store, batch_size=batch_size)
        assert len(rows) == 900
        for name in ALL:
            assert scanned(store, (name,), batch_size=batch_size) == [{name: row[name]} for row in rows]
        for _ in range(8):
            names = tuple(rng.sample(ALL, rng.randrange(2, len(ALL))))
            wanted = [{name: row[name] for name in names} for row in rows]
            assert plain(store.scan(names, views=True, batch_size=batch_size), names, views=True) == wanted
        for choice in (
            {"topic": ["Orders", "主题"]},
            {"queue_id": [1, 3], "topic": "t" * 60},
            {"begin": rows[400]["store_timestamp"], "end": rows[600]["store_timestamp"]},
            {"tags": ["paid"], "queue_id": 2},
        ):
            assert 0 < len(scanned(store, batch_size=batch_size, **choice)) < 900


def test_damaged_bodies_among_them(tmp_path):
    log = OddLog(tmp_path / "store", SEGMENT)
    offsets = [log.add(usual_text(random.Random(i)), body=b"body %d" % i) for i in range(200)]
    for at in offsets[::7]:
        log.data[at + 88] ^= 1
    with log.open() as store:
        for options in ({}, {"batch_size": 5}):
            assert [row["corrupt"] for row in check_scan(store, **options)] == [i % 7 == 0 for i in range(200)]


def test_names_and_values_around_what_a_view_holds(tmp_path):
    log = OddLog(tmp_path / "store", SEGMENT)
    for _ in range(2):
        for name in range(1, 20):
            for value in range(1, 20):
                log.add(properties([("p" * name, LETTERS[:value]), ("KEYS", LETTERS[value:][:name])]))
    with log.open() as store:
        rows = check_scan(store)
        assert rows[18 * 19 + 13]["properties"][0] == ("p" * 19, LETTERS[:14])


def test_long_names_and_values_are_views_of_the_segment(tmp_path):
    log = OddLog(tmp_path / "store", SEGMENT)
    text = properties([("a name of twenty bytes", "a value of twenty bytes"), ("KEYS", "a-key-of-more-than-twelve")])
    for _ in range(100):
        log.add(text, topic="a topic of nineteen")
    with log.open() as store:
        (batch,) = store.scan(ALL, views=True)
        base = batch.column("body_stored").buffers()[3].address
        column = batch.column("properties")
        for array in (column.keys, column.items, batch.column("keys").values, batch.column("topic")):
            views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)[: len(array)]
            assert set(views[views[:, 0] > 12, 2].tolist()) == {1}
            assert array.buffers()[3].address == base
        assert batch.column("properties").keys.buffers()[2].size == 0


def test_ten_thousand_names(tmp_path):
    log = OddLog(tmp_path / "store", 4 << 20)
    for i in range(10_000):
        log.add(properties([(f"name-{i:05d}-{'x' * (i % 9)}", f"{i}"), ("TAGS", "t")]))
    with log.open() as store:
        rows = scanned(store)
        assert len({row["properties"][0][0] for row in rows}) == 10_000
        assert rows == [row_of(message) for message in store.messages()]


def test_as_many_pieces_as_a_text_may_have(tmp_path):
    log = OddLog(tmp_path / "store", SEGMENT)
    for i in range(300):
        log.add(properties([(f"n{k}", f"{i % 10}{k}") for k in range(20 + i % 8)]))
    for i in range(300):
        log.add(properties([("KEYS", " ".join("k" * (1 + i % 2) for _ in range(100)))]))
    with log.open() as store:
        check_scan(store)
        assert plain(store.scan(ALL, views=True, batch_size=90), views=True) == scanned(store)


@pytest.mark.parametrize("which", ["born_host", "store_host"])
def test_hosts_that_change_with_every_row(tmp_path, which):
    log = OddLog(tmp_path / "store", SEGMENT)
    for i in range(3000):
        log.add(b"TAGS\x01t\x02", **{which: f"10.{i % 7}.{i % 200}.{i % 13}:{i * 21}"})
        if i % 500 == 499:
            log.add(b"TAGS\x01t\x02", **{which: f"[2001:db8::{i:x}]:{i}"})
    with log.open() as store:
        rows = check_scan(store)
        assert rows[20][which] == "10.6.20.7:420"
        assert check_scan(store, batch_size=100) == rows


@pytest.mark.parametrize("limit", [1, 300, 5000])
def test_batches_end_before_they_take_more_bytes(tmp_path, limit):
    log = OddLog(tmp_path / "store", SEGMENT)
    for i in range(120):
        add_any(log, random.Random(i), 0)
    with log.open() as store:
        # A row counts for its topic and properties and 64 bytes more.
        sizes = [64 + len(record.topic) + len(record.properties_raw) for record in oracle.records_of(bytes(log.data))]
        made = columns.Columns(columns.ColumnOptions(("keys", "properties", "topic"), 8192, True, byte_limit=limit), 1)
        at, cuts = 0, [0]
        while at < len(log.data):
            at, _ = made.out.fill(store.commit_log.segment(0).region, at, len(log.data), 0)
            cuts.append(cuts[-1] + made.take().num_rows)
        assert cuts[-1] == len(sizes) == 120
        for begin, end in itertools.pairwise(cuts):
            assert end == begin + 1 or sum(sizes[begin:end]) <= limit
            assert end == 120 or sum(sizes[begin : end + 1]) > limit


def test_a_log_that_ends_with_its_last_page(tmp_path):
    """Nothing is read after the last record, where no memory of the file is mapped."""
    log = OddLog(tmp_path / "store", 8192)
    text = b"KEYS\x01k\x02TAGS\x01t\x02"
    while len(log.data) <= 8192 - 400:
        log.add(text)
    size = log.add(text)
    log.add(text, body=b"b" * (4 + 8192 - 2 * len(log.data) + size))
    assert len(log.data) == 8192
    path = tmp_path / "segment"
    path.write_bytes(log.data)
    with path.open("rb") as file:
        region = Region.map(file.fileno(), 8192)
    made = columns.Columns(columns.ColumnOptions(ALL, 8192, True), 1)
    assert made.out.fill(region, 0, 8192, 0)[0] == 8192
    batch = made.take()
    batch.validate(full=True)
    assert batch.column("keys").to_pylist() == [["k"]] * batch.num_rows
    assert batch.column("properties").to_pylist() == [[("KEYS", "k"), ("TAGS", "t")]] * batch.num_rows
    del batch
    region.close()


def filled(tmp_path, num=4000) -> MessageStore:
    """A store of messages whose bodies say which they are."""
    config = StoreConfig(mapped_file_size_commit_log=SEGMENT, max_hash_slot_num=100, max_index_num=20000)
    store = MessageStore.open(tmp_path / "store", config=config)
    store.put_messages([Message("T", b"%06d" % i * 5, keys=[f"key-{i:020d}"], tags="t") for i in range(num)])
    return store


@pytest.mark.parametrize("views", [False, True])
def test_memory_that_somebody_holds_is_not_used_again(tmp_path, views):
    rng = random.Random(3)
    with filled(tmp_path) as store:
        expected = [row for batch in store.scan(ALL, batch_size=500) for row in batch.to_pylist()]
        held = []
        for _ in range(3):
            at = 0
            for batch in store.scan(ALL, batch_size=500, views=views, use_threads=False):
                # Some batches stay, of others a column or a part of one, and most go.
                kept = rng.choice([None, None, "all", "msg_id", "keys", "queue_offset", "properties"])
                if kept == "all":
                    held.append((at, None, batch))
                elif kept:
                    start = rng.randrange(400)
                    held.append((at + start, kept, batch.column(kept).slice(start, 60)))
                at += batch.num_rows
        assert len(held) > 6
    for at, name, part in held:
        rows = expected[at : at + len(part)]
        assert part.to_pylist() == (rows if name is None else [row[name] for row in rows])


def test_a_column_of_numbers_holds_no_segment(tmp_path):
    def mapped() -> bool:
        return bool(mappings(f"{store.path}/commitlog/"))

    store = filled(tmp_path, 100)
    (batch,) = store.scan(ALL, views=True)
    numbers, keys = batch.column("queue_offset"), batch.column("keys").values
    del batch
    store.close()
    gc.collect()
    assert mapped() and keys[99].as_py() == f"key-{99:020d}"
    del keys
    gc.collect()
    assert not mapped() and numbers.to_pylist() == list(range(100))


def test_a_library_that_does_not_take_an_array(tmp_path):
    with filled(tmp_path, 100) as store:
        region = store.commit_log.segment(0).region
        out = _columns.ArrowColumns(["topic", "keys", "properties", "body"], views=True)
        types = columns.scan_schema(out.columns, views=True).types
        taken = []

        def refuse(address, kind):
            if len(taken) == 2:
                raise ValueError("no more")
            taken.append(pa.Array._import_from_c(address, kind))
            return taken[-1]

        out.fill(region, 0, SEGMENT, 0)
        with pytest.raises(ValueError, match="no more"):
            out.take_arrays(refuse, types)
        # Rows that were taken stay; the others are gone.
        assert out.count == 0 and taken[0].to_pylist() == ["T"] * 100
        assert out.fill(region, 0, SEGMENT, 0)[1] in (Verdict.EMPTY, Verdict.LIMIT)
        assert [len(each) for each in out.take_arrays(pa.Array._import_from_c, types)] == [100] * 4
    assert taken[1].to_pylist()[99] == [f"key-{99:020d}"]
