"""What `scan` returns: an Arrow reader that libraries take as it is, with our own exceptions for who iterates.

Owns the interface of the reader; what is in the rows is test_columns.py's, and its threads are test_scan_threads.py's.
"""

from __future__ import annotations

import gc
import weakref

import pytest

from rmqstore import Message, MessageStore, StoreClosedError, StoreConfig
from rmqstore.errors import CorruptionError
from rmqstore.store import columns

pa = pytest.importorskip("pyarrow")
# The folder tests/polars would be found by the name alone.
pytest.importorskip("polars.io.plugins")
polars = pytest.importorskip("polars")

NAMES = ["topic", "tags", "keys", "body", "properties", "store_timestamp"]


@pytest.fixture
def store(tmp_path):
    config = StoreConfig(
        mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=2000, max_hash_slot_num=100, max_index_num=400
    )
    with MessageStore.open(tmp_path / "store", config=config) as store:
        yield store


@pytest.fixture
def filled(store):
    store.put_messages(
        [Message("Orders" if n % 3 else "Stock", b"%d" % n, keys=[f"k{n}"], tags="EU") for n in range(200)]
    )
    return store


def test_it_is_a_reader_with_the_schema_of_the_columns(filled):
    reader = filled.scan(NAMES, topic="Orders", batch_size=16)
    assert isinstance(reader, pa.RecordBatchReader)
    assert reader.schema.equals(columns.scan_schema(NAMES), check_metadata=True)
    assert next(reader).num_rows == 16
    assert reader.read_next_batch().num_rows == 16
    rest = reader.read_all()
    assert rest.num_rows == 133 - 32
    assert list(reader) == []
    with pytest.raises(StopIteration):
        next(reader)


@pytest.mark.parametrize("choice", [{}, {"topic": "Orders"}, {"topic": "nowhere"}, {"end_phy_offset": 0}], ids=str)
def test_libraries_take_it_as_it_is(filled, choice):
    wanted = pa.Table.from_batches(list(filled.scan(NAMES, **choice)), schema=columns.scan_schema(NAMES))
    assert pa.table(filled.scan(NAMES, **choice)).equals(wanted)
    assert filled.scan(NAMES, **choice).read_all().equals(wanted)
    frame = polars.DataFrame(filled.scan(NAMES, **choice))
    assert frame.shape == (wanted.num_rows, len(NAMES)) and frame.equals(polars.from_arrow(wanted))
    if len(frame):
        # Without rows it asks for a schema, which it has no parameter for.
        assert polars.from_arrow(filled.scan(NAMES, **choice)).equals(frame)
    assert filled.scan(NAMES, **choice).read_pandas().shape == frame.shape


@pytest.mark.parametrize("choice", [{}, {"topic": "nowhere"}], ids=str)
def test_duckdb_takes_it_as_it_is(filled, choice):
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        connection.register("scanned", filled.scan(NAMES, **choice))
        question = "select count(*), max(octet_length(body)), min(keys[1]) from scanned"
        assert connection.execute(question).fetchone() == ((0, None, None) if choice else (200, 3, "k0"))


def test_an_empty_store_has_columns_all_the_same(store):
    assert polars.DataFrame(store.scan()).columns == list(columns.DEFAULT_COLUMNS)
    assert pa.table(store.scan(["body"])).to_pydict() == {"body": []}


@pytest.mark.parametrize(
    "wrong", [{"columns": ["nothing"]}, {"columns": ["body", "body"]}, {"batch_size": 0}, {"topic": 5}], ids=str
)
def test_wrong_arguments_are_said_at_the_call(store, wrong):
    with pytest.raises((ValueError, TypeError)):
        store.scan(**wrong)


def test_errors_are_ours_for_who_iterates(filled, monkeypatch):
    def fails(self, *arguments, **options):
        raise CorruptionError("no such bytes", "/some/file", 17)
        yield

    monkeypatch.setattr(type(filled.commit_log), "fill", fails)
    for read in (list, next, lambda reader: reader.read_all(), pa.Table.from_batches):
        with pytest.raises(CorruptionError) as caught:
            read(filled.scan(["body"]))
        assert (caught.value.message, caught.value.path, caught.value.pos) == ("no such bytes", "/some/file", 17)
    # Arrow's own stream has room for a text only.
    with pytest.raises(pa.ArrowInvalid, match=r"no such bytes \[/some/file, position 17\]"):
        pa.table(filled.scan(["body"]))


def test_a_store_that_is_closed_meanwhile(filled):
    reader = filled.scan(["body"], batch_size=7)
    kept = next(reader)
    filled.close()
    with pytest.raises(StoreClosedError):
        next(reader)
    assert list(reader) == []
    kept.validate(full=True)
    assert kept.column("body").to_pylist() == [b"%d" % n for n in range(7)]


def test_nothing_stays_behind_a_reader_that_is_dropped(filled, monkeypatch):
    made = []
    of_log = columns.record_batches

    def watched(*arguments):
        batches = of_log(*arguments)
        made.append(weakref.ref(batches))
        return batches

    monkeypatch.setattr(columns, "record_batches", watched)
    reader = filled.scan(["body"], batch_size=7)
    next(reader)
    stream = reader.__arrow_c_stream__()
    del reader
    gc.collect()
    assert made[0]() is not None
    del stream
    gc.collect()
    assert made[0]() is None
