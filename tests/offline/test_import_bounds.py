"""Imports take memory for what a chunk of rows holds, whatever a small file stands for.

The limits are made small, and bytes are counted: those that Python and Arrow allocate.
"""

from __future__ import annotations

import errno
import gzip
import json
import shutil
import tracemalloc
from collections import namedtuple

import numpy as np
import pytest
from small_store import tree_bytes

from rmqstore import InvalidMessageError, Message, MessageStore, StoreConfig, StoreError
from rmqstore.offline import import_rows
from rmqstore.offline.import_rows import Input
from rmqstore.offline.importing import ImportOptions, import_files

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Usage = namedtuple("Usage", "total used free")
SMALL = 64 * 1024
ROWS = 3000
CONFIG = StoreConfig(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=100, max_index_num=400)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    bounded_by(monkeypatch, size=SMALL)


def bounded_by(monkeypatch, **values):
    monkeypatch.setattr(import_rows, "BOUNDS", import_rows.BOUNDS._replace(**values))


def chunks_of(path):
    input = Input(str(path), None)
    try:
        yield from (import_rows.row_chunks if input.format == "jsonl" else import_rows.arrow_chunks)(input)
    finally:
        input.close()


def plain_size(table) -> int:
    """Bytes of the rows themselves, as a table of their values takes them."""
    return sum(len(str(row)) for row in table.to_pylist())


@pytest.mark.parametrize("column", ["tags", "keys", "properties", "body", "born_host"])
def test_chunks_of_text_are_bounded_by_all_of_a_row(tmp_path, column):
    # A value of 4 KiB in one column, a thousand times.
    text = "t" * 4000
    value = {"keys": [text], "properties": {"p": text}}.get(column, text)
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for _ in range(1000):
            file.write(json.dumps({"topic": "T", column: value}) + "\n")
    numbers = []
    tracemalloc.start()
    for chunk in chunks_of(path):
        assert plain_size(chunk.table) < 2 * SMALL
        numbers += chunk.numbers
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(numbers) == 1000
    assert peak < 40 * SMALL


def test_a_row_that_is_too_long_is_refused_before_it_is_read(tmp_path, monkeypatch):
    bounded_by(monkeypatch, largest=1 << 20)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b'{"topic":"T"}\n{"body":"')
        for _ in range(1000):
            file.write(b"     " * 4 + b"x" * (1 << 14))
    tracemalloc.start()
    with pytest.raises(InvalidMessageError, match="line 2: the line has more than 1 MiB"):
        list(chunks_of(tmp_path / "a.jsonl.gz"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def shared(value, rows=ROWS):
    """A column in which all rows have one value, which is there once."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))


def lists_of(values, rows=ROWS):
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), values)


def views_of(value, rows=ROWS):
    """A column of views into the same bytes."""
    one = pa.array([value], pa.binary_view())
    _, views, *data = one.buffers()
    return pa.Array.from_buffers(pa.binary_view(), rows, [None, pa.py_buffer(views.to_pybytes() * rows), *data])


LARGE = b"x" * 20_000
TABLES = {
    "body": {"body": shared(LARGE)},
    "tags": {"tags": shared("t" * 20_000)},
    "keys": {"keys": lists_of(shared("k" * 20_000))},
    "properties": {
        "properties": pa.MapArray.from_arrays(
            pa.array(np.arange(ROWS + 1, dtype=np.int32)), shared("name"), shared("v" * 20_000)
        )
    },
    "views": {"body": views_of(LARGE)},
    "runs": {"body": pa.RunEndEncodedArray.from_arrays(pa.array([ROWS], pa.int32()), pa.array([LARGE]))},
}
PARQUET = [name for name in TABLES if name not in ("views", "runs")]


def table_of(name):
    return pa.table({"topic": shared("T"), **TABLES[name]})


def written(path, name, ending):
    table = table_of(name)
    if ending == "parquet":
        pq.write_table(table, path, compression="zstd", store_schema=False)
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        new = pa.ipc.new_file if ending == "arrow" else pa.ipc.new_stream
        with new(str(path), table.schema, options=options) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize(
    ("ending", "name"),
    [("parquet", name) for name in PARQUET] + [(ending, name) for ending in ("arrow", "arrows") for name in TABLES],
)
def test_a_value_that_all_rows_share_is_not_multiplied(tmp_path, ending, name):
    path = written(tmp_path / f"a.{'arrow' if ending == 'arrows' else ending}", name, ending)
    assert path.stat().st_size < 300_000
    before = pa.total_allocated_bytes()
    rows = 0
    for chunk in chunks_of(path):
        assert plain_size(chunk.table) < 2 * SMALL
        assert pa.total_allocated_bytes() - before < 1 << 20
        rows += chunk.table.num_rows
        assert list(chunk.numbers) == list(range(rows - chunk.table.num_rows + 1, rows + 1))
        if rows > 100:
            return
    raise AssertionError("there are more rows")


def test_large_values_of_their_own_come_in_few_rows(tmp_path):
    # A file of large messages has no value twice.
    bodies = [bytes([number % 256, number // 256]) * 15_000 for number in range(400)]
    table = pa.table({"topic": ["T"] * 400, "body": bodies, "keys": [[f"k{number}", "all"] for number in range(400)]})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, row_group_size=50)
    before, found = pa.total_allocated_bytes(), []
    for chunk in chunks_of(tmp_path / "a.parquet"):
        assert pa.total_allocated_bytes() - before < 6 << 20
        found += chunk.table.column("body").to_pylist()
    assert found == bodies
    report = import_files(tmp_path / "s", [tmp_path / "a.parquet"], ImportOptions(config=CONFIG))
    assert report.messages == 400
    with MessageStore.open(tmp_path / "s", read_only=True) as store:
        assert [message.body for message in store.messages()] == bodies
        assert [message.keys for message in store.messages()] == table["keys"].to_pylist()


@pytest.mark.parametrize("name", ["body", "keys", "properties"])
@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_shared_values_arrive(tmp_path, monkeypatch, name, ending):
    offsets = pa.array([0, 1, 1, 2, 3, 3], pa.int32())
    values = {
        "body": {"body": shared(b"body", 5)},
        "keys": {"keys": pa.ListArray.from_arrays(pa.array([0, 2, None, 2, 3, 5], pa.int32()), shared("k", 5))},
        "properties": {"properties": pa.MapArray.from_arrays(offsets, shared("n", 3), shared("v", 3))},
    }[name]
    table = pa.table({"topic": shared("T", 5), **values})
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table, path, store_schema=False)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    # Parts begin within lists.
    bounded_by(monkeypatch, rows=2)
    assert import_files(tmp_path / "s", [path], ImportOptions(config=CONFIG)).messages == 5
    with MessageStore.open(tmp_path / "s", read_only=True) as store:
        messages = list(store.messages())
    if name == "body":
        assert [message.body for message in messages] == [b"body"] * 5
    elif name == "keys":
        assert [message.keys for message in messages] == [["k"] * 2, [], [], ["k"], ["k"] * 2]
    else:
        assert ["n" in message.properties for message in messages] == [True, False, True, True, False]


def test_pages_of_zeros_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(import_rows, "_UNPACKED", 1 << 20)
    table = pa.table({"topic": ["T"] * 64, "body": [bytes(1 << 17)] * 64})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    before = pa.total_allocated_bytes()
    with pytest.raises(StoreError, match=r"unpacks to [0-9]+ bytes from [0-9]+; write the file again"):
        import_files(tmp_path / "s", [tmp_path / "a.parquet"], ImportOptions(config=CONFIG))
    assert pa.total_allocated_bytes() - before < 1 << 20 and not (tmp_path / "s").exists()


def test_a_row_that_no_message_can_be_is_named(tmp_path, monkeypatch):
    bounded_by(monkeypatch, largest=10_000)
    for ending in ("parquet", "arrow"):
        path = written(tmp_path / f"a.{ending}", "tags", ending)
        with pytest.raises(InvalidMessageError, match=r"row 1: it has [0-9]+ bytes"):
            import_files(tmp_path / "s", [path], ImportOptions(config=CONFIG))
    many = pa.table({"topic": ["T"], "keys": pa.array([[None] * (1 << 17)], pa.list_(pa.string()))})
    pq.write_table(many, tmp_path / "many.parquet")
    with pytest.raises(StoreError, match="values in 1 rows"):
        import_files(tmp_path / "s", [tmp_path / "many.parquet"], ImportOptions(config=CONFIG))


@pytest.mark.parametrize("name", PARQUET)
def test_rows_that_the_disk_has_no_room_for_are_refused_before_any_is_put(tmp_path, monkeypatch, name):
    root, path = tmp_path / "s", written(tmp_path / "a.parquet", name, "parquet")
    with MessageStore.open(root, config=CONFIG) as store:
        store.put_message(Message("T", b"mine"))
    before = tree_bytes(root)
    room = Usage(10**9, 0, 1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    allocated = pa.total_allocated_bytes()
    with pytest.raises(
        StoreError, match=r"row [0-9]+ alone take [0-9]+ bytes, and the disk has 1048576 free; nothing was put"
    ):
        import_files(root, [path], ImportOptions(config=CONFIG))
    assert pa.total_allocated_bytes() - allocated < 1 << 20
    after = tree_bytes(root)
    assert {name: after[name] for name in before if name not in ("checkpoint", "lock")} == {
        name: data for name, data in before.items() if name not in ("checkpoint", "lock")
    }


def test_a_disk_that_becomes_full_leaves_no_new_store(tmp_path, monkeypatch):
    path = written(tmp_path / "a.parquet", "body", "parquet")
    put, times = MessageStore.put_table, iter(range(3))

    def full(*given, **more):
        if next(times, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(*given, **more)

    monkeypatch.setattr(MessageStore, "put_table", full)
    with pytest.raises(OSError, match="No space left"):
        import_files(tmp_path / "s", [path], ImportOptions(config=CONFIG))
    assert [each.name for each in tmp_path.iterdir()] == ["a.parquet"]
