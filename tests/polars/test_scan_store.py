"""A store as a LazyFrame: the rows are those of a scan and a filter, and what a filter says saves reading.

That something is not read is shown by taking the reading away, not by time.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from mappings import mappings

from rmqstore import Message, MessageStore, MissingDependencyError, StoreConfig
from rmqstore.cli import main
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.errors import StoreClosedError, StoreError
from rmqstore.polars import scan, scan_store, scan_tables
from rmqstore.polars import scan as reading_module
from rmqstore.polars.predicate import Limit, limits_of

# The folder tests/polars would be found by the name alone.
pytest.importorskip("polars.io.plugins")
pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")

col = pl.col
# Before 2.0 Polars puts an error of its own around that of a source, which has its text.
WRAPPED = () if int(pl.__version__.partition(".")[0]) > 1 else (pl.exceptions.ComputeError,)
T0 = 1_795_000_000_000
ROWS = 600
GEOMETRY = {
    "mapped_file_size_commit_log": 32768, "mapped_file_size_consume_queue": 2000, "max_hash_slot_num": 100,
    "max_index_num": 400,
}  # fmt: skip


def time_of(number: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp((T0 + number) / 1000, datetime.timezone.utc)


def put(store: MessageStore, begin: int, end: int) -> None:
    for number in range(begin, end):
        message = Message(
            ("Orders", "Pay", "Stock")[number % 3],
            b"x" * (number % 50),
            keys=[f"k{number % 200}", "all", f"n{number}"] if number % 7 else (),
            tags=("EU", "US", None)[number % 3 - number % 2],
            properties={"UNIQ_KEY": f"U{number}"} if number % 5 else {},
        )
        store.put_message(message, queue_id=number // 3 % 4)


def build(path: Path, **options) -> Path:
    clock = iter(range(T0, T0 + 10**9))
    with MessageStore.open(path, config=StoreConfig(**GEOMETRY, clock=lambda: next(clock), **options)) as store:
        put(store, 0, ROWS)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build(tmp_path_factory.mktemp("polars") / "store")


@pytest.fixture(scope="module")
def whole(path):
    with MessageStore.open(path, read_only=True) as store:
        frame = pl.DataFrame(store.scan([*scan.DEFAULT_COLUMNS, "unique_key"]))
    # A frame's integers have 64 bits, so that sums do not wrap.
    return frame.cast({pl.Int32: pl.Int64})


@pytest.fixture
def no_log(monkeypatch):
    """The log is not scanned; a record that a unit or entry points to is still read."""

    def forbidden(*arguments, **options):
        raise AssertionError("the log is read")

    monkeypatch.setattr(CommitLog, "fill", forbidden)
    monkeypatch.setattr(CommitLog, "scans", forbidden)


def place(whole, number: int, name: str = "phy_offset"):
    return whole[name][number]


# --------------------------------------------------------------------------------------------------------------- rows


def test_without_a_filter_it_is_the_scan(path, whole):
    frame = scan_store(path)
    assert dict(frame.collect_schema()) == dict(whole.schema)
    assert frame.collect().equals(whole)
    assert frame.select("body", "topic").collect().equals(whole.select("body", "topic"))
    assert scan_store(str(path), ["topic", "size"]).collect().equals(whole.select("topic", "size"))
    assert frame.select(pl.len()).collect().item() == ROWS


def test_sums_do_not_wrap(path, monkeypatch):
    frame = scan_store(path)
    assert not {pl.Int8, pl.Int16, pl.Int32} & {*frame.collect_schema().dtypes()}
    for name, table in scan_tables(path).items():
        assert not {pl.Int8, pl.Int16, pl.Int32} & {*table.collect_schema().dtypes()}, name
    # Offsets as large as with messages of 2 GiB.
    whole = MessageStore.scan_selected

    def large(self, selection, options):
        reader = whole(self, selection, options)
        for batch in reader:
            at = batch.schema.get_field_index("size")
            yield batch.set_column(at, "size", pa.array([2**31 - 1] * batch.num_rows, pa.int32())) if at >= 0 else batch

    monkeypatch.setattr(MessageStore, "scan_selected", large)
    wanted = ROWS // 3 * (2**31 - 1)
    sums = frame.group_by("topic").agg(col("size").sum()).collect()
    assert sums["size"].to_list() == [wanted] * 3
    question = "select topic, sum(size) as s from messages group by topic"
    assert pl.SQLContext(scan_tables(path)).execute(question).collect()["s"].to_list() == [wanted] * 3
    result = CliRunner().invoke(main, ["sql", str(path), question, "--json"])
    assert [json.loads(line)["s"] for line in result.stdout.splitlines()] == [wanted] * 3


def conditions(whole) -> list:
    offset = place(whole, 100)
    return [
        col("topic") == "Orders",
        col("topic") == "Stock",
        pl.lit("Pay") == col("topic"),
        col("topic") != "Orders",
        col("topic").is_in(["Orders", "nowhere"]),
        col("topic") > "Orders",
        col("topic").str.starts_with("O"),
        col("queue_id") == 2,
        col("queue_id") >= 3,
        col("queue_id").is_in([1, 3]),
        col("queue_id") < 2.5,
        col("queue_id").cast(pl.Int64).is_in([0, 2**40]),
        col("queue_offset") == 5,
        col("queue_offset") >= 40,
        col("queue_offset").is_between(7, 12),
        col("queue_offset").is_between(0, 2),
        col("queue_offset").is_in([3, 4, 9]),
        col("tags") == "EU",
        col("tags").is_null(),
        col("tags").is_in(["EU", None], nulls_equal=True),
        col("tags").is_in(["*"]),
        col("tags").eq_missing(pl.lit("US")),
        col("keys").list.contains("n50"),
        col("keys").list.contains("k7"),
        col("keys").list.contains("all"),
        col("keys").list.contains("none"),
        pl.lit("k9").is_in(col("keys")),
        col("keys").list.len() == 0,
        col("unique_key") == "U11",
        col("unique_key").is_in(["U12", "U13", "U15"]),
        col("store_timestamp") >= time_of(300),
        col("store_timestamp") < time_of(20),
        col("store_timestamp") == time_of(33),
        col("store_timestamp").is_between(time_of(10), time_of(20), closed="none"),
        col("store_timestamp") > time_of(400) + datetime.timedelta(microseconds=300),
        col("phy_offset") == offset,
        col("phy_offset") == offset + 1,
        col("phy_offset").is_in([offset, 0, -5, 2**60]),
        col("phy_offset") >= offset,
        col("phy_offset") < offset,
        col("msg_id") == place(whole, 100, "msg_id"),
        col("msg_id") == "nothing",
        col("size") > 150,
        pl.lit(True),
        pl.lit(False),
    ]


@pytest.mark.parametrize("number", range(45))
def test_every_condition_keeps_the_rows_that_polars_keeps(path, whole, number):
    condition = conditions(whole)[number]
    wanted = whole.filter(condition)
    assert scan_store(path).filter(condition).collect().equals(wanted)
    assert scan_store(path).filter(condition).collect(engine="streaming").equals(wanted)
    # A column that only the filter is about is not in the answer.
    assert scan_store(path).filter(condition).select("size", "flag").collect().equals(wanted.select("size", "flag"))


@pytest.mark.parametrize("seed", range(60))
def test_conditions_that_are_joined(path, whole, seed):
    draw, pool = random.Random(seed), conditions(whole)

    def made(depth: int):
        kind = draw.randrange(5)
        if not depth or kind == 0:
            return draw.choice(pool)
        if kind == 1:
            return ~made(depth - 1)
        one, two = made(depth - 1), made(depth - 1)
        return one | two if kind == 2 else one & two

    condition = made(3)
    assert scan_store(path).filter(condition).collect().equals(whole.filter(condition))


def test_a_long_chain_of_conditions(path, whole):
    condition = pl.any_horizontal([col("topic") == "Orders"])
    for number in range(100):
        condition = condition | (col("queue_offset") == 1000 + number)
    assert scan_store(path).filter(condition).collect().equals(whole.filter(condition))


def test_limits_count_the_rows_in_front_of_a_later_filter(path, whole):
    orders = col("topic") == "Orders"
    frame = scan_store(path)
    assert frame.head(10).collect().equals(whole.head(10))
    assert frame.head(10).filter(orders).collect().equals(whole.head(10).filter(orders))
    assert frame.filter(orders).head(10).collect().equals(whole.filter(orders).head(10))
    assert frame.slice(5, 7).collect().equals(whole.slice(5, 7))
    assert frame.tail(3).collect().equals(whole.tail(3))
    assert frame.head(0).collect().equals(whole.head(0))


# ----------------------------------------------------------------------------------------------------- what is not read


@pytest.mark.parametrize(
    "more", [pl.lit(True), col("topic") == "Orders", col("topic").is_in(["Orders", "Pay"])], ids=str
)
def test_a_key_asks_the_index_and_not_the_log(path, whole, no_log, more):
    for condition in (
        col("keys").list.contains("n100"),
        col("keys").list.contains("k7"),
        pl.lit("k9").is_in(col("keys")),
        col("unique_key").is_in(["U12", "U13", "U14"]),
        (col("unique_key") == "U12") & (col("store_timestamp") > time_of(0)),
        col("keys").list.contains("k7") | col("keys").list.contains("n100"),
        col("keys").list.contains("all") & col("keys").list.contains("n100"),
    ):
        wanted = whole.filter(condition & more)
        assert scan_store(path).filter(condition & more).collect().equals(wanted)
    with pytest.raises((AssertionError, *WRAPPED), match="the log is read"):
        scan_store(path).filter(col("tags") == "EU").collect()


def test_a_place_of_a_queue_asks_the_queue_and_not_the_log(path, whole, no_log):
    orders = col("topic") == "Orders"
    for condition in (
        orders & (col("queue_id") == 2) & (col("queue_offset") == 5),
        orders & (col("queue_offset").is_between(5, 9)),
        orders & (col("queue_id").is_in([1, 2])) & (col("queue_offset") > 40),
        orders & col("queue_offset").is_in([3, 4, 9]),
    ):
        assert scan_store(path).filter(condition).collect().equals(whole.filter(condition))
    # A message without a unit may be in the log.
    for condition in (orders & (col("queue_offset") == 0), orders & (col("queue_offset") == 10_000)):
        with pytest.raises((AssertionError, *WRAPPED), match="the log is read"):
            scan_store(path).filter(condition).collect()


def test_a_place_of_the_log_is_all_that_is_read(path, whole, monkeypatch):
    ranges = []
    of_log = MessageStore.scan_selected

    def watched(self, selection, *arguments, **options):
        ranges.append((selection.begin_phy_offset, selection.end_phy_offset))
        return of_log(self, selection, *arguments, **options)

    monkeypatch.setattr(MessageStore, "scan_selected", watched)
    at, other = place(whole, 100), place(whole, 500)
    for condition in (
        col("phy_offset") == at,
        col("msg_id") == place(whole, 100, "msg_id"),
        (col("phy_offset").is_in([at, other])) & (col("msg_id") == place(whole, 100, "msg_id")),
    ):
        ranges.clear()
        assert scan_store(path).filter(condition).collect().equals(whole[100:101])
        assert ranges == [(at, at + 1)]
    ranges.clear()
    condition = (col("phy_offset") >= at) & (col("phy_offset") < other)
    assert scan_store(path).filter(condition).collect().equals(whole[100:500])
    assert ranges == [(at, other)]


def test_a_scan_is_told_what_a_filter_says(path, whole, monkeypatch):
    told = []
    of_log = MessageStore.scan_selected

    def watched(self, selection, options):
        told.append((selection, options))
        return of_log(self, selection, options)

    monkeypatch.setattr(MessageStore, "scan_selected", watched)
    condition = (
        col("topic").is_in(["Orders", "Pay"])
        & (col("tags") == "EU")
        & (col("queue_id") <= 2)
        & (col("queue_id") >= 1)
        & (col("store_timestamp") >= time_of(10))
        & (col("store_timestamp") < time_of(90))
    )
    found = scan_store(path).filter(condition).select(col("size").sum()).collect()
    assert found.item() == whole.filter(condition)["size"].sum()
    ((selection, options),) = told
    assert set(options.names) == {"topic", "tags", "queue_id", "store_timestamp", "size"}
    assert (selection.topics, selection.tags, selection.queue_ids) == (("Orders", "Pay"), ("EU",), (1, 2))
    assert selection.times == (T0 + 10, T0 + 89)
    told.clear()
    assert scan_store(path).select("topic").head(3).collect().height == 3
    assert told[0][1].names == ("topic",) and told[0][1].batch_size == 3


def test_topics_that_no_queue_tells_of_may_have_a_key(path, no_log, monkeypatch):
    condition = col("keys").list.contains("n100")
    monkeypatch.setattr(MessageStore, "unserved", (0, 1))
    assert scan_store(path).filter(condition & (col("topic") == "Pay")).collect().height == 1
    with pytest.raises((AssertionError, *WRAPPED), match="the log is read"):
        scan_store(path).filter(condition).collect()


def test_what_cannot_be_is_not_looked_for(path, whole, no_log):
    condition = (col("queue_id") == 1) & (col("queue_id") == 2)
    assert scan_store(path).filter(condition).collect().equals(whole.clear())


# ------------------------------------------------------------------------------------ stores that are not at their best


@pytest.mark.parametrize("lost", ["all", "first", "last"])
def test_keys_that_no_index_file_covers(tmp_path, lost):
    root = build(tmp_path / "store")
    files = sorted((root / "index").iterdir())
    assert len(files) > 2
    for file in {"all": files, "first": files[:1], "last": files[-1:]}[lost]:
        file.unlink()
    for number in (1, 300, 599):
        found = scan_store(root).filter(col("keys").list.contains(f"n{number}")).collect()
        assert found["store_timestamp"].to_list() == [time_of(number)]


def test_keys_of_a_store_without_an_index(tmp_path):
    root = build(tmp_path / "store", message_index_enable=False)
    config = StoreConfig(**GEOMETRY, message_index_enable=False)
    found = scan_store(root, config=config).filter(col("unique_key") == "U301").collect()
    assert found["store_timestamp"].to_list() == [time_of(301)]


def test_queues_that_are_gone(tmp_path, whole):
    root = build(tmp_path / "store")
    for file in (root / "consumequeue" / "Orders").rglob("*"):
        if file.is_file():
            file.write_bytes(bytes(file.stat().st_size))
    condition = (col("topic") == "Orders") & (col("queue_id") == 2) & col("queue_offset").is_between(5, 9)
    assert scan_store(root).filter(condition).collect().equals(whole.filter(condition))


def test_a_unit_that_leads_elsewhere(tmp_path, whole):
    root = build(tmp_path / "store")
    file = next((root / "consumequeue" / "Orders" / "2").iterdir())
    units = bytearray(file.read_bytes())
    units[6 * 20 : 7 * 20] = units[8 * 20 : 9 * 20]
    file.write_bytes(units)
    condition = (col("topic") == "Orders") & (col("queue_id") == 2) & col("queue_offset").is_between(5, 9)
    assert scan_store(root).filter(condition).collect().equals(whole.filter(condition))


def test_every_answer_is_of_its_own_time(tmp_path):
    config = StoreConfig(**GEOMETRY)
    with MessageStore.open(tmp_path / "store", config=config) as writer:
        put(writer, 0, 10)
        with MessageStore.open(tmp_path / "store", config=config, read_only=True) as reader:
            frames = [scan_store(tmp_path / "store"), scan_store(reader), scan_store(writer)]
            for end in (20, 300):
                put(writer, end - 10 if end == 20 else 20, end)
                for frame in frames:
                    assert frame.select(pl.len()).collect().item() == end
                    newest = end - 1
                    assert frame.filter(col("keys").list.contains(f"n{newest}")).collect().height == 1
                    at = (col("topic") == "Pay") & (col("queue_id") == 1) & (col("queue_offset") >= 1)
                    assert (
                        frame.filter(at).collect().height
                        == sum(number % 3 == 1 and number // 3 % 4 == 1 for number in range(end)) - 1
                    )


def test_an_empty_store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**GEOMETRY)) as store:
        for source in (store, tmp_path / "store"):
            frame = scan_store(source, config=StoreConfig(**GEOMETRY))
            assert frame.collect().is_empty()
            for condition in (col("keys").list.contains("k"), col("phy_offset") == 0, col("topic") == "Orders"):
                assert frame.filter(condition).collect().is_empty()


# -------------------------------------------------------------------------------------------------- errors and the rest


def test_errors_come_as_themselves(path, tmp_path):
    with pytest.raises(ValueError, match="there is no column 'nothing'"):
        scan_store(path, ["nothing"])
    with pytest.raises((StoreError, *WRAPPED), match="does not exist"):
        scan_store(tmp_path / "nowhere").collect()
    with MessageStore.open(path, read_only=True) as store:
        frame = scan_store(store)
    for engine in ("auto", "streaming"):
        with pytest.raises((StoreClosedError, *WRAPPED), match="closed"):
            frame.collect(engine=engine)


def test_a_store_is_closed_when_its_answer_is_there(path):
    def opened() -> int:
        gc.collect()
        return len(mappings(path))

    if not os.path.exists("/proc/self/maps"):
        pytest.skip("nothing tells what is mapped")
    scan_store(path).collect()
    assert opened() == 0
    scan_store(path).filter(col("topic") == "Orders").head(2).collect()
    assert opened() == 0


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingDependencyError, match=r"pip install rmqstore\[polars\]"):
        scan_store("store")
    with pytest.raises(MissingDependencyError, match=r"pip install rmqstore\[polars\]"):
        scan_tables("store")


def test_polars_is_loaded_by_the_first_call(path):
    program = (
        "import sys, rmqstore.polars\n"
        "assert not {'polars', 'pyarrow'} & set(sys.modules)\n"
        f"print(rmqstore.polars.scan_store({os.fspath(path)!r}).collect().height)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == (f"{ROWS}\n", "")


# ----------------------------------------------------------------------------------------------------------- predicates


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        (col("topic") == "a", {"topic": Limit(frozenset("a"))}),
        (pl.lit("a") == col("topic"), {"topic": Limit(frozenset("a"))}),
        (col("topic").is_in(["a", "b"]), {"topic": Limit(frozenset("ab"))}),
        (col("topic").is_in(pl.Series(["a", "b"])), {"topic": Limit(frozenset("ab"))}),
        (col("topic").is_in(["a", None]), {}),
        (col("topic") > "a", {}),
        (~(col("topic") == "a"), {}),
        (col("body") == b"a", {}),
        (col("topic") == col("tags"), {}),
        (col("queue_id") > 3, {"queue_id": Limit(None, 4, None)}),
        (pl.lit(3) > col("queue_id"), {"queue_id": Limit(None, None, 2)}),
        (col("queue_id") == 2.5, {}),
        (col("queue_id").is_between(1, 4, closed="none"), {"queue_id": Limit(None, 1, 4)}),
        (col("store_timestamp") >= time_of(5), {"store_timestamp": Limit(None, T0 + 5, None)}),
        (
            col("store_timestamp") == time_of(5) + datetime.timedelta(microseconds=1),
            {"store_timestamp": Limit(None, T0 + 5, T0 + 6)},
        ),
        (col("store_timestamp") >= datetime.datetime(2026, 1, 1), {}),
        ((col("queue_id") > 3) & (col("queue_id") <= 9), {"queue_id": Limit(None, 4, 9)}),
        ((col("queue_id") > 3) & col("queue_id").is_in([1, 5]), {"queue_id": Limit(frozenset({5}))}),
        ((col("queue_id") == 3) | (col("queue_id") == 9), {"queue_id": Limit(frozenset({3, 9}))}),
        ((col("queue_id") == 3) | (col("queue_id") > 9), {"queue_id": Limit(None, 3, None)}),
        ((col("topic") == "a") | (col("queue_id") == 3), {}),
        (
            ((col("topic") == "a") & (col("queue_id") == 3)) | (col("topic") == "b"),
            {"topic": Limit(frozenset("ab"))},
        ),
        (col("keys").list.contains("a") & col("keys").list.contains("b"), {"keys": Limit(frozenset("a"))}),
        (col("keys").list.contains("a") | pl.lit("b").is_in(col("keys")), {"keys": Limit(frozenset("ab"))}),
        (col("keys") == ["a"], {}),
    ],
    # Sets have their texts in any order, and tests are to have the same name in every process.
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_what_a_predicate_says_of_its_columns(condition, wanted):
    assert limits_of(condition) == wanted
    # Polars serializes and deserializes it.
    assert limits_of(pl.Expr.deserialize(condition.meta.serialize())) == wanted


# ---------------------------------------------------------------------------------------------------------- more tables


def test_tables(path, whole):
    tables = scan_tables(path)
    assert list(tables) == ["messages", "queues", "index_entries", "consumers"]
    assert tables["messages"].collect().equals(whole)
    queues = tables["queues"].collect()
    assert queues.height == 12 and queues["messages"].sum() == ROWS
    assert queues["first_store_timestamp"].min() == time_of(0) and queues["last_store_timestamp"].max() == time_of(599)
    (row,) = tables["queues"].filter((col("topic") == "Pay") & (col("queue_id") == 1)).collect().to_dicts()
    assert (row["kind"], row["min_queue_offset"], row["max_queue_offset"]) == ("SimpleCQ", 0, 50)
    entries = tables["index_entries"].collect()
    texts = [whole[name].drop_nulls().len() for name in ("unique_key", "tags")]
    assert entries.height == sum(texts) + whole["keys"].list.len().sum()
    named = (col("keys").list.len() > 0) | col("unique_key").is_not_null() | col("tags").is_not_null()
    assert set(entries["phy_offset"]) == set(whole.filter(named)["phy_offset"])
    assert entries.group_by("file").agg(col("entry").min())["entry"].to_list() == [1] * entries["file"].n_unique()
    assert tables["index_entries"].select("key_hash").head(3).collect().equals(entries.select("key_hash").head(3))
    assert tables["consumers"].collect().is_empty()


def test_the_progress_of_consumers(tmp_path):
    root = build(tmp_path / "store")
    with MessageStore.open(root, config=StoreConfig(**GEOMETRY)) as store:
        store.consumer_offsets.commit("billing", "Orders", 2, 41)
    # A broker counts like this: a queue in which the group has no progress is consumed from its start.
    found = {row.pop("queue_id"): row for row in scan_tables(root)["consumers"].collect().to_dicts()}
    assert len(found) > 1 and {(row["group"], row["topic"]) for row in found.values()} == {("billing", "Orders")}
    shown = {queue_id: (row["queue_offset"], row["max_queue_offset"], row["lag"]) for queue_id, row in found.items()}
    assert shown.pop(2) == (41, 50, 9) and set(shown.values()) == {(-1, 50, 50)}


ABANDONED = """
import sys, threading, time
from rmqstore import MessageStore
from rmqstore.polars.scan import Reading

at_work = threading.Event()

def frames(store):
    # Like a thread of Polars in a large scan.
    at_work.set()
    while not store.closed:
        time.sleep(0.001)
    print("its store was closed", flush=True)
    yield from ()

source = MessageStore.open(sys.argv[2], read_only=True) if sys.argv[1] == "store" else sys.argv[2]
threading.Thread(target=list, args=(Reading(source, None, frames),), daemon=True).start()
assert at_work.wait(60)
sys.exit(5)
"""


@pytest.mark.parametrize("source", ["store", "path"])
def test_a_reading_that_a_query_left_alone_ends_with_the_program(path, source):
    """Its thread was in Python while the interpreter was taken apart, which aborts a process in a thread of Polars."""
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED, source, str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "its store was closed\n", "")


def test_a_reading_after_the_end_of_the_program(path, monkeypatch):
    reading = reading_module.Reading(path, None, lambda store: iter([1, 2]))
    assert next(reading) == 1
    monkeypatch.setattr(reading_module, "_over", True)
    assert list(reading) == []
