"""Columns that do not copy: where their values lie, what they keep mapped and for how long.

That they hold the same rows as columns that are copied is in `test_columns`, for every kind of store and damage there.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import duckdb
import numpy as np
import polars
import pytest
from mappings import mappings

from rmqstore import Message, MessageStore, StoreClosedError, StoreConfig, _columns
from rmqstore._core import Region
from rmqstore.store import columns

pa = pytest.importorskip("pyarrow")

SEGMENT = 65536
CONFIG = StoreConfig(mapped_file_size_commit_log=SEGMENT, max_hash_slot_num=100, max_index_num=1000)
LONG = "a text of more than twelve bytes"


@pytest.fixture
def store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        for number in range(300):
            properties = {"PROP": LONG, "name of more than twelve": "short", "标签": "值" * 9}
            store.put_message(
                Message("T", b"%d " % number * 60, keys=[f"key-{number:020d}", "k"], tags="tag", properties=properties)
            )
        yield store


def mapped(store) -> int:
    """How many mappings of segments this process has."""
    return len(mappings(f"{store.path}/commitlog/"))


def ranges(array) -> list[tuple[int, int]]:
    """Begin and end of the memory of the long values of a view column."""
    buffers = array.buffers()
    views = np.frombuffer(buffers[1], np.int32).reshape(-1, 4)[array.offset : array.offset + len(array)]
    places = []
    for length, _, number, pos in views.tolist():
        if length > 12:
            begin = buffers[2 + number].address + pos
            places.append((begin, begin + length))
    return places


def test_values_lie_in_the_segment(store):
    names = ["body", "keys", "properties", "unique_key", "topic", "body_stored", "msg_id"]
    path = os.path.join(store.path, "commitlog", f"{0:020d}")
    (region,) = [line.split()[0] for line in mappings(path) if line.endswith(path)]
    low, high = (int(end, 16) for end in region.split("-"))
    batch = next(iter(store.scan(names, end_phy_offset=SEGMENT // 2, views=True)))
    for array in (
        batch.column("body"),
        batch.column("body_stored"),
        batch.column("keys").values,
        batch.column("properties").keys,
        batch.column("properties").items,
    ):
        places = ranges(array)
        assert len(places) >= batch.num_rows and all(low <= begin and end <= high for begin, end in places)
    # Values that differ from the record's bytes are in memory of the batch.
    assert all(not low <= begin < high for begin, _ in ranges(batch.column("msg_id")))
    assert set(ranges(batch.column("body"))) == set(ranges(batch.column("body_stored")))
    # Only what the rows span of a segment is lent, so that what writes whole buffers does not write a gigabyte.
    assert sum(buffer.size for buffer in batch.column("body").buffers()[3:]) <= SEGMENT // 2 + 4096


def test_text_that_is_read_otherwise_is_copied(tmp_path):
    sound, odd = "标" * 9, b"\xff" * 20
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_message(Message("T", b"x", properties={"a": sound, "b": "?" * 20}))
        path = Path(store.path) / "commitlog" / f"{0:020d}"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"?" * 20, odd))
    with MessageStore.open(tmp_path / "store", config=CONFIG, read_only=True) as store:
        (batch,) = store.scan(["properties"], views=True)
        values = batch.column("properties").items
        texts = dict(batch.column("properties").to_pylist()[0])
        assert texts["a"] == sound and texts["b"] == "\ufffd" * 20
        numbers = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, 4)[: len(values), 2].tolist()
        by_name = dict(zip(texts, numbers, strict=True))
        assert by_name["a"] == 1 and by_name["b"] == 0


def test_a_batch_outlives_the_store_and_the_file(store):
    names = columns.COLUMN_NAMES
    expected = [row for batch in store.scan(names) for row in batch.to_pylist()]
    kept = list(store.scan(names, views=True, batch_size=50))
    part = kept[0].column("body").slice(3, 2)
    first = expected[3]["body"]
    store.close()
    assert mapped(store) > 1
    for name in os.listdir(Path(store.path) / "commitlog"):
        os.unlink(Path(store.path) / "commitlog" / name)
    assert [row for batch in kept for row in batch.to_pylist()] == expected
    found = []
    thread = threading.Thread(target=lambda values: found.append(values[0].as_py()), args=(part,))
    thread.start()
    thread.join()
    assert found == [first]
    del kept
    gc.collect()
    # The rest of a batch is enough to keep its segment, and only that one.
    assert mapped(store) == 1 and part[0].as_py() == first
    del part
    gc.collect()
    assert mapped(store) == 0


def test_polars_and_duckdb_keep_what_they_need(store):
    expected = [batch.column("body").to_pylist() for batch in store.scan(["body"])]
    viewed = pa.Table.from_batches(store.scan(["topic", "body"], views=True))
    frame = polars.from_arrow(viewed)
    lengths = duckdb.sql("select sum(octet_length(body)) from viewed").fetchall()
    del viewed
    store.close()
    gc.collect()
    assert frame["body"].to_list() == [body for bodies in expected for body in bodies]
    assert lengths == [(sum(len(body) for bodies in expected for body in bodies),)]


def test_retention_does_not_wait_for_views(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_messages([Message("T", b"%3d" % number * 300) for number in range(300)])
        first = next(iter(store.scan(["body"], views=True, use_threads=False)))
        rows = first.to_pylist()
        oldest = Path(store.path) / "commitlog" / f"{0:020d}"
        os.utime(oldest, (0, 0))
        assert store.delete_expired_files().segments == 1 and not oldest.exists()
        assert first.to_pylist() == rows


def test_a_close_between_filling_and_taking(store):
    out = _columns.ArrowColumns(["body"], views=True)
    region = store.commit_log.files.find(0).region
    out.fill(region, 0, 4096, 0)
    assert out.count
    store.close()
    with pytest.raises(StoreClosedError):
        out.take()
    assert out.count == 0 and out.take()[0] == 0


def test_rows_of_one_batch_from_many_calls(store):
    # A batch may be filled in several passes, back and forth; a place before an earlier one is another stretch.
    region = store.commit_log.files.find(0).region
    offsets = [message.phy_offset for message in store.messages() if message.phy_offset < SEGMENT // 2]
    made = columns.Columns(columns.ColumnOptions(["body"], 8192, True), 1)
    places = [5, 3, 9, 0, 7]
    for place in places:
        at = offsets[place]
        made.out.fill(region, at, at + 1, 0)
    batch = made.take()
    assert batch.column("body").to_pylist() == [b"%d " % place * 60 for place in places]
    batch.validate(full=True)


def test_a_segment_beyond_the_reach_of_views(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**31 + 4096)
    with path.open("rb") as file:
        region = Region.map(file.fileno(), 2**31 + 4096)
    out = _columns.ArrowColumns(["body"], views=True)
    with pytest.raises(ValueError, match="2 GiB"):
        out.fill(region, 0, 100, 0)
    region.close()
