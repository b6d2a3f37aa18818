"""Scans into Arrow on several threads: the rows of one thread in its order, whatever the pieces and the threads.

Owns logs in whose bodies whole records lie that say that they begin there, so that pieces begin in wrong places.  What the rows
of one thread must be is the matter of `test_columns.py`.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import golden
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_columns import written_meanwhile

from rmqstore import Message, MessageStore, MissingDependencyError, StoreClosedError, StoreConfig, _columns
from rmqstore.commitlog import commit_log, pieces
from rmqstore.message import compress_body, compression_flags
from rmqstore.store import columns

pa = pytest.importorskip("pyarrow")

ALL = _columns.COLUMN_NAMES
SEGMENT = 1 << 15
T0 = 1700000000000


@pytest.fixture
def seen(monkeypatch):
    """How many pieces of other threads counted, and how many were thrown away."""
    counts = Counter()
    come_to, abandon = pieces.Pieces.come_to, pieces.Piece.abandon

    def counted(self, at):
        piece = come_to(self, at)
        counts["taken"] += piece is not None
        return piece

    def dropped(self):
        counts["dropped"] += 1
        abandon(self)

    monkeypatch.setattr(pieces.Pieces, "come_to", counted)
    monkeypatch.setattr(pieces.Piece, "abandon", dropped)
    return counts


def set_pieces(monkeypatch, piece: int, search: int = 2000, threads: int = 3) -> None:
    """Set the bytes of pieces, whatever the batches, and the number of threads."""
    for name, value in (
        ("_PIECE", piece), ("_LONG_PIECE", piece), ("_PIECE_BYTES_PER_ROW", 0), ("_PIECE_SEARCH", search), ("_THREADS", threads),
    ):  # fmt: skip
        monkeypatch.setattr(columns, name, value)
    monkeypatch.setattr(pieces, "usable_cpus", lambda: 8)


def scan_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rmqstore-scan")]


def table_of(batches, batch_size: int = 8192):
    """The rows of a scan, each batch of which is valid Arrow, not empty and not too large."""
    batches = list(batches)
    for batch in batches:
        assert 0 < batch.num_rows <= batch_size
        batch.validate(full=True)
    return pa.Table.from_batches(batches, schema=batches[0].schema) if batches else None


def check_equal(store, asked=ALL, batch_size=8192, **filters):
    """Scan on one thread and on several; the rows."""
    one = table_of(store.scan(asked, batch_size=batch_size, use_threads=False, **filters), batch_size)
    more = table_of(store.scan(asked, batch_size=batch_size, **filters), batch_size)
    assert not scan_threads()
    if one is None:
        assert more is None
        return []
    assert more.schema.equals(one.schema, check_metadata=True) and more.schema.equals(columns.scan_schema(asked))
    assert more.equals(one)
    # Equality of floating point, nulls and empty texts is all that `equals` could be mild about.
    assert more.column(asked[0]).to_pylist() == one.column(asked[0]).to_pylist()
    return one


def store_of(root: Path, data: bytes, **options: int) -> MessageStore:
    """A store of this log alone, read-only."""
    folder = root / "commitlog"
    folder.mkdir(parents=True)
    for base in range(0, len(data), SEGMENT):
        part = data[base : base + SEGMENT]
        (folder / oracle.file_name(base)).write_bytes(part + bytes(SEGMENT - len(part)))
    return MessageStore.open(root, config=StoreConfig(mapped_file_size_commit_log=SEGMENT, **options), read_only=True)


def record_at(at: int, number: int, draw: random.Random) -> bytes:
    topic, tags = draw.choice(("Orders", "Pay")), draw.choice(("paid", "标"))
    properties = f"KEYS\x01k{number} again\x02TAGS\x01{tags}\x02n{number % 5}\x01{'v' * draw.randrange(9)}\x02"
    if number % 9 == 8:
        properties = ""
    kind, body = draw.randrange(6), draw.randbytes(draw.choice((0, 5, 90, 300)))
    sys_flag = 0
    if kind == 0:
        body, sys_flag = compress_body(b"x" * 400, "ZLIB"), compression_flags("ZLIB")
    fields = {
        "topic": topic,
        "queue_id": draw.randrange(3),
        "queue_offset": number,
        "store_timestamp": T0 + number,
        "properties": properties.encode(),
        "sys_flag": sys_flag,
    }
    if kind < 3:
        return oracle.encode_record(body=body, phy_offset=at, **fields)
    # A body that holds records, each of which says that it lies where it does.
    mark = b"here begins what looks like records"
    head = oracle.encode_record(body=mark, phy_offset=at, **fields).index(mark)
    body = draw.randbytes(8)
    for _ in range(draw.randrange(1, 4)):
        body += oracle.encode_record(topic="Fake", body=b"!" * 20, phy_offset=at + head + len(body))
    return oracle.encode_record(body=body, phy_offset=at, **fields)


def make_log(num: int, seed: int) -> tuple[bytes, list[int]]:
    """The bytes of a log of so many records, with blanks behind the last record of each segment, and where they begin."""
    draw = random.Random(seed)
    data, places = bytearray(), []
    for number in range(num):
        record = record_at(len(data), number, draw)
        room = SEGMENT - len(data) % SEGMENT
        if len(record) + 8 > room:
            data += room.to_bytes(4, "big") + bytes.fromhex("cbd43194") + bytes(room - 8)
            record = record_at(len(data), number, draw)
        places.append(len(data))
        data += record
    return bytes(data), places


@pytest.fixture(scope="module")
def made():
    return make_log(500, 3)


@pytest.fixture
def odd(made, tmp_path):
    with store_of(tmp_path / "odd", made[0]) as store:
        assert len(store.commit_log.files.offsets) > 4
        yield store


# ----------------------------------------------------------------------------------------------------------- equal rows


@pytest.mark.parametrize("name", golden.STORES)
def test_golden_stores(golden_store, monkeypatch, seen, name):
    set_pieces(monkeypatch, 20_000 if name in golden.BROKER_STORES else 500)
    with MessageStore.open(golden_store(name), read_only=True) as store:
        for batch_size in (53, 8192):
            assert check_equal(store, batch_size=batch_size).num_rows >= 41
        check_equal(store, columns.DEFAULT_COLUMNS)
        check_equal(store, ("corrupt",))
    assert seen["taken"] > 10


@pytest.mark.parametrize("piece", [100, 700, 5000, SEGMENT, SEGMENT + 1])
@pytest.mark.parametrize("threads", [2, 4])
def test_any_piece(odd, monkeypatch, seen, piece, threads):
    for search in (60, 2000):
        set_pieces(monkeypatch, piece, search, threads)
        for batch_size in (1, 50, 8192):
            assert check_equal(odd, batch_size=batch_size).num_rows == 500
    # A segment that is shorter than a piece has none.
    assert bool(seen["taken"]) is (piece <= SEGMENT)
    # The pieces of all but the longest begin in what only looks like a record, too.
    assert piece > 5000 or seen["dropped"]


FILTERS = [
    {"topic": "Orders"},
    {"topic": ["Pay", "Fake"]},
    {"topic": "Fake"},
    {"topic": []},
    {"queue_id": 1},
    {"queue_id": [0, 2], "topic": "Pay"},
    {"tags": "paid"},
    {"tags": "标 || nothing"},
    {"begin": T0 + 100},
    {"end": T0 + 450, "begin": T0 + 90, "tags": "paid"},
    {"begin": T0 + 499},
    {"begin_phy_offset": 40_001, "end_phy_offset": 140_003},
    {"begin_phy_offset": 50_000, "topic": "Pay"},
    {"begin_phy_offset": -5, "end_phy_offset": 2**60},
    {"begin_phy_offset": 2**60},
]


@pytest.mark.parametrize("number", range(len(FILTERS)))
def test_filters(odd, monkeypatch, number):
    for piece in (400, 3000):
        set_pieces(monkeypatch, piece)
        for batch_size in (1, 20, 8192):
            check_equal(odd, batch_size=batch_size, **FILTERS[number])
        # The reader may be iterated only once.
        filters = {name: iter(value) if isinstance(value, list) else value for name, value in FILTERS[number].items()}
        found = [row for batch in odd.scan(iter(["phy_offset"]), **filters) for row in batch.to_pylist()]
        wanted = odd.scan(["phy_offset"], use_threads=False, **FILTERS[number])
        assert found == [row for batch in wanted for row in batch.to_pylist()]


@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 90), st.integers(0, 7)), max_size=8),
    zeros=st.none() | st.tuples(st.floats(0, 1), st.integers(1, 3000)),
    piece=st.integers(80, 6000),
    search=st.integers(50, 4000),
    threads=st.integers(2, 4),
    batch_size=st.sampled_from([1, 3, 40, 8192]),
    begin=st.none() | st.integers(0, 60_000),
)
# Each example scans four times.
@settings(max_examples=settings().max_examples // 4, deadline=None)
def test_damage(made, tmp_path_factory, flips, zeros, piece, search, threads, batch_size, begin):
    data, places = bytearray(made[0]), made[1]
    for where, pos, bit in flips:
        # Headers and lengths are the interesting bytes.
        at = places[int(where * len(places))] + pos
        if at < len(data):
            data[at] ^= 1 << bit
    if zeros is not None:
        at = int(zeros[0] * len(data))
        data[at : at + zeros[1]] = bytes(len(data[at : at + zeros[1]]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_pieces(monkeypatch, piece, search, threads)
        with store_of(tmp_path_factory.mktemp("damage") / "store", bytes(data)) as store:
            check_equal(store, batch_size=batch_size, begin_phy_offset=begin)
            check_equal(store, ("phy_offset", "tags"), batch_size, tags="paid")


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_missing_segment(made, tmp_path, monkeypatch, missing):
    set_pieces(monkeypatch, 900)
    # Opening reads the log, as there are no queues; what stays mapped stays readable.
    with store_of(tmp_path / "store", made[0], max_mapped_files=1) as store:
        (tmp_path / "store" / "commitlog" / oracle.file_name(missing * SEGMENT)).unlink()
        assert check_equal(store).num_rows < 500
    with MessageStore.open(
        tmp_path / "store", config=StoreConfig(mapped_file_size_commit_log=SEGMENT), read_only=True
    ) as store:
        assert 0 < check_equal(store).num_rows < 500


def test_segments_that_expire_meanwhile(made, tmp_path, monkeypatch):
    set_pieces(monkeypatch, 900)
    for steps in (1, 2, 10):
        root = tmp_path / str(steps)
        with store_of(root, made[0]) as store:
            scan = store.scan(["phy_offset"], batch_size=9)
            found = [row["phy_offset"] for _ in range(steps) for row in next(scan).to_pylist()]
            for base in (1, 2):
                (root / "commitlog" / oracle.file_name(base * SEGMENT)).unlink()
            found += [row["phy_offset"] for batch in scan for row in batch.to_pylist()]
            # Batches that were decoded ahead may be missing, all others are there.
            assert found == sorted(set(found)) and set(found) <= set(made[1])
            assert set(found) >= {at for at in made[1] if not 1 <= at // SEGMENT <= 2}


def test_a_writer_that_deletes_what_expired(tmp_path, monkeypatch):
    set_pieces(monkeypatch, 900)
    config = StoreConfig(mapped_file_size_commit_log=SEGMENT, clean_resource_interval=0)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        store.put_messages([Message("T", b"x" * 300) for _ in range(400)])
        scan = store.scan(["phy_offset"], batch_size=5)
        found = [row["phy_offset"] for _ in range(4) for row in next(scan).to_pylist()]
        last = store.commit_log.files.offsets[-1]
        assert store.commit_log.files.delete_before(3 * SEGMENT) == 3
        found += [row["phy_offset"] for batch in scan for row in batch.to_pylist()]
        assert found == sorted(set(found)) and found[-1] > last


def test_scans_while_a_thread_writes(tmp_path, monkeypatch):
    set_pieces(monkeypatch, 2000)
    with MessageStore.open(tmp_path / "store", config=StoreConfig(mapped_file_size_commit_log=SEGMENT)) as store:
        before = 0
        with written_meanwhile(store, 60) as done:
            while not done.is_set():
                found = table_of(store.scan(ALL, batch_size=100), 100)
                num = 0 if found is None else found.num_rows
                assert num >= before
                assert not num or not any(found.column("corrupt").to_pylist())
                before = num
        assert check_equal(store).num_rows == 600


# ------------------------------------------------------------------------------------------------------ sizes of batches


def test_compressed_bodies_that_become_large(tmp_path, monkeypatch, seen):
    data = bytearray()
    for _ in range(400):
        body = compress_body(b"y" * 4000, "ZLIB")
        data += oracle.encode_record(
            topic="T", body=body, sys_flag=compression_flags("ZLIB"), phy_offset=len(data), queue_offset=len(data)
        )
    assert len(data) < 2 * SEGMENT
    data = data[: SEGMENT // 160 * 160]
    stops = []
    fill = commit_log.CommitLog.fill

    def watched(self, out, begin=None, end=None, on_damage=None):
        if threading.current_thread() is threading.main_thread():
            yield from fill(self, out, begin, end, on_damage)
            return
        for at in fill(self, out, begin, end, on_damage):
            stops.append((at, end))
            yield at

    with store_of(tmp_path / "store", bytes(data)) as store:
        rows = store.scan(use_threads=False)
        wanted = sum(batch.num_rows for batch in rows)
        assert wanted > 100
        monkeypatch.setattr(columns, "_BATCH_BYTES", 20_000)
        monkeypatch.setattr(commit_log.CommitLog, "fill", watched)
        set_pieces(monkeypatch, 4000)
        assert check_equal(store).num_rows == wanted
    assert seen["taken"]
    # A batch holds five of these bodies, a piece has some thirty: no thread comes to the end of its piece, but that of the
    # last one, which is shorter.
    assert stops and all(at < end for at, end in stops if end < max(end for _, end in stops))


def test_batches_are_not_small_because_of_pieces(odd, monkeypatch):
    set_pieces(monkeypatch, 700)
    for batch_size in (16, 80, 400):
        for filters in ({}, {"topic": "Pay"}, {"tags": "paid", "queue_id": 1}):
            sizes = [batch.num_rows for batch in odd.scan(["phy_offset", "keys"], batch_size=batch_size, **filters)]
            # One that could not be put together with the one behind it is small, and the last one.
            assert all(a + b >= batch_size // 8 for a, b in itertools.pairwise(sizes))
            assert len(sizes) <= 2 + 16 * sum(sizes) / batch_size
    assert [batch.num_rows for batch in odd.scan(["phy_offset"], batch_size=1)] == [1] * 500


def test_large_bodies_are_not_copied_to_put_batches_together(odd, monkeypatch):
    set_pieces(monkeypatch, 700)
    put_together = []
    concat = pa.concat_batches
    monkeypatch.setattr(pa, "concat_batches", lambda held: put_together.append(len(held)) or concat(held))
    many = list(odd.scan(["body"]))
    assert max(put_together) > 1
    put_together.clear()
    monkeypatch.setattr(columns, "_JOINED_BYTES", 1)
    few = list(odd.scan(["body"]))
    assert not put_together
    assert pa.Table.from_batches(few).equals(pa.Table.from_batches(many))


@pytest.mark.parametrize(
    ("batch_size", "segment", "size"),
    [(1, 1 << 30, 8 << 20), (8192, 1 << 30, 8 << 20), (32768, 1 << 30, 16 << 20), (2**30, 1 << 30, 32 << 20),
     (2**30, 16 << 20, 16 << 20)],
)  # fmt: skip
def test_pieces_are_longer_for_large_batches(monkeypatch, batch_size, segment, size):
    class Log:
        min_offset, max_offset, segment_size, files = 0, 1 << 33, segment, None

    asked = []

    def stop(log, end, make, division):
        asked.append(division.size)
        raise ArithmeticError

    monkeypatch.setattr(columns, "Pieces", stop)
    made = columns.Columns(columns.ColumnOptions(["size"], batch_size), 1)
    with pytest.raises(ArithmeticError):
        next(columns.record_batches(Log(), made, None, None, lambda: made))
    assert asked == [size]


# -------------------------------------------------------------------------------------------------------------- threads


def test_threads_begin_behind_the_first_batch_and_end_with_the_scan(odd, monkeypatch):
    set_pieces(monkeypatch, 700)
    scan = odd.scan(ALL, batch_size=2)
    assert not scan_threads()
    next(scan)
    assert not scan_threads()
    next(scan)
    assert 0 < len(scan_threads()) <= 3
    del scan
    assert not scan_threads()
    # A stream that another library reads keeps them as long as it is there.
    stream = pa.RecordBatchReader.from_stream(odd.scan(ALL, batch_size=2))
    next(stream), next(stream)
    assert scan_threads()
    stream.close()
    assert not scan_threads()
    with pytest.raises(ZeroDivisionError):
        for number, _ in enumerate(odd.scan(ALL, batch_size=2)):
            1 // (number - 5)
    gc.collect()
    assert not scan_threads()
    made = columns.Columns(columns.ColumnOptions(ALL, 2), odd.commit_log.crc_check)
    scan = columns.record_batches(
        odd.commit_log, made, None, None, lambda: columns.Columns(columns.ColumnOptions(ALL, 2), odd.commit_log.crc_check)
    )
    next(scan), next(scan)
    with pytest.raises(ZeroDivisionError) as held:
        scan.throw(ZeroDivisionError)
    assert held.tb and not scan_threads()


def test_who_has_no_threads(odd, monkeypatch):
    def goes_without(asked=ALL, **how):
        for _ in odd.scan(asked, batch_size=2, **how):
            if scan_threads():
                return False
        return True

    set_pieces(monkeypatch, 700)
    assert not goes_without()
    assert goes_without(use_threads=False)
    # A log of less than two pieces.
    assert goes_without(begin_phy_offset=0, end_phy_offset=1399)
    monkeypatch.setattr(pieces, "usable_cpus", lambda: 1)
    assert goes_without()
    set_pieces(monkeypatch, SEGMENT + 1)
    assert goes_without()
    set_pieces(monkeypatch, 700)
    # Without columns there are no rows to count.
    assert goes_without([])


def test_no_more_is_decoded_ahead_than_a_few_pieces(odd, monkeypatch):
    set_pieces(monkeypatch, 700, threads=2)
    launched = []
    submit = pieces.Pieces.launch

    def counted(self, work):
        submit(self, work)
        launched.append(len(self._pieces))

    monkeypatch.setattr(pieces.Pieces, "launch", counted)
    for _ in odd.scan(ALL, batch_size=3):
        pass
    assert max(launched) == 3


def test_who_waits_for_a_piece_works_at_a_later_one(odd):
    log = odd.commit_log
    ahead = pieces.Pieces(log.files, log.max_offset, object, pieces.Division(700, 2000, threads=2, caller_works=True))
    ahead.thread_num = 2
    begun, helped = threading.Event(), threading.Event()
    caller = threading.current_thread()

    def work(job, region, begin, limit, base):
        if threading.current_thread() is caller:
            helped.set()
            return "here"
        begun.set()
        return "there" if helped.wait(240) else "nobody came"

    try:
        begin = ahead.end_behind(0)
        ahead.launch(work)
        assert begun.wait(240)
        piece = ahead.come_to(begin)
        assert ahead.result_of(piece) == "there" and helped.is_set()
        piece = ahead.come_to(ahead.end_behind(begin))
        assert piece.is_done and ahead.result_of(piece) == "here"
        assert len(scan_threads()) == 1
    finally:
        helped.set()
        ahead.close()


def test_a_thread_that_cannot_be_started(odd, monkeypatch, seen):
    set_pieces(monkeypatch, 700)
    started = []
    start = threading.Thread.start

    def fails(self):
        started.append(self)
        if len(started) % 2 == 0:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails)
    for _ in range(3):
        assert check_equal(odd, batch_size=5).num_rows == 500
    assert len(started) > 2


def test_what_goes_wrong_in_another_thread_is_done_again(odd, monkeypatch):
    set_pieces(monkeypatch, 700)
    decompress, failed = columns._decompress, []

    def fails_elsewhere(body, sys_flag):
        if threading.current_thread() is not threading.main_thread() and len(failed) % 3 != 2:
            failed.append(body)
            raise MemoryError
        failed.append(None)
        return decompress(body, sys_flag)

    monkeypatch.setattr(columns, "_decompress", fails_elsewhere)
    for batch_size in (1, 3, 8192):
        assert check_equal(odd, batch_size=batch_size).num_rows == 500
    assert any(failed)


def test_an_error_comes_once_and_behind_the_rows_in_front_of_it(odd, monkeypatch):
    set_pieces(monkeypatch, 700)
    wanted = [row for batch in odd.scan(["phy_offset", "body"], use_threads=False) for row in batch.to_pylist()]
    calls = []

    def fails(body, sys_flag):
        calls.append(body)
        if len(calls) > 60:
            raise MissingDependencyError("no such library")
        return b"x" * 400

    monkeypatch.setattr(columns, "_decompress", fails)
    rows, scan = [], odd.scan(["phy_offset", "body"], batch_size=4)
    with pytest.raises(MissingDependencyError):
        for batch in scan:
            rows += batch.to_pylist()
    assert list(scan) == []
    assert not scan_threads()
    assert rows and rows == wanted[: len(rows)]


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_store_that_is_closed(made, tmp_path, monkeypatch, steps):
    set_pieces(monkeypatch, 700)
    with store_of(tmp_path / "store", made[0]) as store:
        scan = store.scan(ALL, batch_size=16)
        kept = [next(scan) for _ in range(steps)]
        wanted = [batch.to_pylist() for batch in kept]
        time.sleep(0.05)
    with pytest.raises(StoreClosedError):
        next(scan)
    assert list(scan) == []
    assert not scan_threads()
    assert [batch.to_pylist() for batch in kept] == wanted


def test_two_scans_side_by_side(odd, monkeypatch):
    set_pieces(monkeypatch, 900)
    wanted = table_of(odd.scan(ALL, use_threads=False))
    one, other = odd.scan(ALL, batch_size=7), odd.scan(ALL, batch_size=7)
    both = list(zip(one, other))
    for number in range(2):
        assert pa.Table.from_batches([pair[number] for pair in both]).equals(wanted)
    found = {}

    def scan(name):
        found[name] = table_of(odd.scan(ALL, batch_size=50))

    readers = [threading.Thread(target=scan, args=(n,)) for n in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert all(found[n].equals(wanted) for n in range(4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_goes_on_alone(odd, monkeypatch):
    set_pieces(monkeypatch, 700)
    wanted = table_of(odd.scan(ALL, use_threads=False))
    scan = odd.scan(ALL, batch_size=8)
    first = [next(scan) for _ in range(3)]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if pa.Table.from_batches(first + list(scan)).equals(wanted) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pa.Table.from_batches(first + list(scan)).equals(wanted)


def test_a_scan_that_its_own_thread_closes(odd, monkeypatch):
    # As a garbage collection may that comes in one.
    set_pieces(monkeypatch, 3000)
    suspended, closed = threading.Event(), threading.Event()
    decompress = columns._decompress

    def closes(body, sys_flag):
        if threading.current_thread() is not threading.main_thread() and not closed.is_set():
            assert suspended.wait(240)
            held.clear()
            closed.set()
        return decompress(body, sys_flag)

    monkeypatch.setattr(columns, "_decompress", closes)
    held = [odd.scan(["body"], batch_size=1)]
    next(held[0]), next(held[0])
    suspended.set()
    assert closed.wait(240)
    for thread in scan_threads():
        thread.join(240)
    assert not scan_threads()


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "del scan", "1 // 0"])
def test_an_interpreter_that_ends(made, tmp_path, end):
    store_of(tmp_path / "store", made[0]).close()
    statements = (
        "import rmqstore.store.columns as columns, rmqstore.commitlog.pieces as pieces\n"
        "from rmqstore import MessageStore, StoreConfig\n"
        "columns._PIECE = columns._LONG_PIECE = 700\n"
        "columns._PIECE_BYTES_PER_ROW = 0\n"
        "pieces.usable_cpus = lambda: 4\n"
        f"config = StoreConfig(mapped_file_size_commit_log={SEGMENT})\n"
        f"store = MessageStore.open({str(tmp_path / 'store')!r}, config=config, read_only=True)\n"
        "scan = store.scan(batch_size=2)\n"
        "next(scan), next(scan), next(scan)\n"
        f"{end}\n"
    )
    ran = subprocess.run([sys.executable, "-c", statements], capture_output=True, text=True, check=False, timeout=240)
    expected = {"raise SystemExit(3)": 3, "1 // 0": 1}.get(end, 0)
    assert ran.returncode == expected
    assert ("ZeroDivisionError" in ran.stderr) is (end == "1 // 0") and "Exception ignored" not in ran.stderr
