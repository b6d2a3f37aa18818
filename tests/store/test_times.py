"""Selections by store time where clocks stepped back or jumped ahead: exactly the messages of that time, by every way in.

Each answer is compared with all messages of the log, one by one.
"""

from __future__ import annotations

import itertools
import json
import shutil
from typing import Any

import pytest
import tiered_oracle
from click.testing import CliRunner
from every_disk import open_tiered

from rmqstore import Message, MessageStore, StoreConfig, pending
from rmqstore.cli import main
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.consumequeue import unit_queue
from rmqstore.consumequeue.unit_queue import UnitTimes
from rmqstore.offline.export import ExportOptions, export
from rmqstore.selection import Selection
from rmqstore.store.pages import time_page

T0, HOUR, DAY = 1_700_000_000_000, 3_600_000, 86_400_000
NUM = 120
SMALL = {
    "mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 400, "mapper_file_size_batch_consume_queue": 230,
    "max_hash_slot_num": 20, "max_index_num": 60, "message_index_enable": True,
}  # fmt: skip
OPTIONS = [f"-o{name}={value}" for name, value in SMALL.items() if name != "message_index_enable"]


def stepped(at: int, by: int, until: int = NUM) -> list[int]:
    """Times a second apart, but for those from `at` to before `until`."""
    return [T0 + 1000 * number + (by if at <= number < until else 0) for number in range(NUM)]


CLOCKS = {
    "3 days ahead over segments": stepped(30, 3 * DAY, 75),
    "rises": stepped(0, 0),
    "5 s back": stepped(40, -5000),
    "2 h back": stepped(40, -2 * HOUR),
    "3 days back": stepped(61, -3 * DAY),
    "ahead within a segment": stepped(33, 2 * HOUR, 35),
    "back within a segment": stepped(44, -3 * DAY, 46),
}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks of 8 units, so that small queues have several."""
    monkeypatch.setattr(unit_queue, "BLOCK_UNITS", 8)


def put(store: MessageStore, number: int) -> None:
    keys = [f"K{number}", "ALL"]
    if number % 5 == 4:
        inner = {"KEYS": " ".join(keys), "INNER_NUM": "2"}
        store.put_message(Message("Inner", b"%060d" % number, sys_flag=0xC0, properties=inner))
    else:
        store.put_message(Message("A" if number % 5 else "B", b"%060d" % number, keys=keys), number % 2)


def config_of(name: str, times: Any = ()) -> StoreConfig:
    clock = itertools.chain(times, itertools.repeat(T0)).__next__
    extended = {
        "enable_consume_queue_ext": list(CLOCKS).index(name) % 2 == 1,
        "mapped_file_size_consume_queue_ext": 300,
    }
    return StoreConfig(**SMALL, **extended, clock=clock)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A function: the store of this clock, made once; nobody writes to it."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("times") / "store"
            with MessageStore.open(made[name], config=config_of(name, CLOCKS[name])) as store:
                for number in range(NUM):
                    put(store, number)
        return made[name]

    return of


def opened(stores, name, **options):
    return MessageStore.open(stores(name), config=config_of(name), read_only=True, **options)


def moments(times):
    """Times around each place where a clock was changed, and beyond all of them."""
    bends = [0, NUM - 1]
    for number, (before, after) in enumerate(itertools.pairwise(times)):
        if after - before != 1000:
            bends += [number, number + 1]
    return sorted({times[number] + more for number in bends for more in (-1, 0, 2500)} | {0, 2**63 - 1})


def ranges(times):
    low, high = min(times), max(times)
    middle = times[NUM // 2]
    return [(None, middle), (middle, None), (low + 1, high - 1), (T0 + 20_000, T0 + 50_000), (T0 + DAY, T0 + 4 * DAY)]


def check_offsets(store: MessageStore, everything, at) -> None:
    """Compare `offset_by_time` of every queue with its messages."""
    for topic, queue_id in {(message.topic, message.queue_id) for message in everything}:
        own = [message for message in everything if (message.topic, message.queue_id) == (topic, queue_id)]
        low, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
        for moment in at:
            later = [message.queue_offset for message in own if message.store_timestamp >= moment]
            earlier = [message.queue_offset for message in own if message.store_timestamp <= moment]
            assert store.offset_by_time(topic, queue_id, moment) == min(later, default=high), (topic, moment)
            assert store.offset_by_time(topic, queue_id, moment, "upper") == max(earlier, default=low), (topic, moment)


@pytest.mark.parametrize("name", CLOCKS)
def test_offsets_by_time(stores, name):
    with opened(stores, name) as store:
        everything = list(store.messages())
        assert [message.store_timestamp for message in everything] == CLOCKS[name]
        # The second time by what is remembered.
        for _ in range(2):
            check_offsets(store, everything, moments(CLOCKS[name]))


@pytest.mark.parametrize("name", CLOCKS)
def test_every_selection(stores, name, tmp_path):
    root, times = stores(name), CLOCKS[name]
    with opened(stores, name) as store:
        everything = list(store.messages())
        for begin, end in ranges(times):
            low, high = -(2**63) if begin is None else begin, 2**63 - 1 if end is None else end
            wanted = [message for message in everything if low <= message.store_timestamp <= high]
            places = [message.phy_offset for message in wanted]
            of_a = [message.phy_offset for message in wanted if message.topic == "A"]
            assert store.scan(["phy_offset"], begin=begin, end=end).read_all()["phy_offset"].to_pylist() == places
            found = store.query_message("A", "ALL", 1000, begin=begin, end=end)
            assert [message.phy_offset for message in found] == of_a[::-1]
            table = store.query_table(["ALL"], "A", ["phy_offset"], max_num=1000, begin=begin, end=end)
            assert table["phy_offset"].to_pylist() == of_a[::-1]
            for topic in ("A", "Inner"):
                for newest_first in (False, True):
                    assert paged(store, topic, begin, end, newest_first) == sorted(
                        (message.phy_offset for message in wanted if message.topic == topic), reverse=newest_first
                    )
            for selection in (
                Selection(begin=begin, end=end),
                Selection(("A",), keys=("ALL",), begin=begin, end=end),
                Selection(("A", "B", "Inner"), begin=begin, end=end, begin_queue_offset=0),
            ):
                out = tmp_path / "out.jsonl"
                export(root, out, selection, ExportOptions(columns=["phy_offset"], config=config_of(name), force=True))
                assert [json.loads(line)["phy_offset"] for line in open(out)] == (of_a if selection.keys else places)


def paged(store, topic, begin, end, newest_first):
    found, cursor = [], None
    while True:
        asked = Selection((topic,), begin=begin, end=end, max_num=7)
        page = time_page(store, asked, cursor, lambda message: {"at": message.phy_offset}, newest_first=newest_first)
        found += [row["at"] for row in page.rows]
        cursor = page.following
        if cursor is None:
            return found


def run(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_commands(stores):
    name = "3 days ahead over segments"
    root = stores(name)
    with opened(stores, name) as store:
        own = [message for message in store.messages() if (message.topic, message.queue_id) == ("A", 1)]
    for begin, end in ((T0 + 20_000, T0 + 90_000), (T0 + DAY, T0 + 4 * DAY)):
        wanted = [message.queue_offset for message in own if begin <= message.store_timestamp <= end]
        command = ("get", root, "A", 1, "--begin", begin, "--end", end, "--json", *OPTIONS)
        found = run(*command, "--max-num", 500)
        assert [line["queue_offset"] for line in lines(found)] == wanted and found.stderr == ""
        # Where it goes on, past what was stored at other times, and that there is no more.
        for num in range(1, len(wanted)):
            note = run(*command, "--max-num", num).stderr
            assert note == f"there are more messages; continue with --begin-queue-offset {wanted[num]}\n"
        assert run(*command, "--max-num", len(wanted)).stderr == ""
        exported = run("export", root, "--topic", "A", "--queue", 1, "--begin", begin, "--end", end, *OPTIONS)
        assert [line["queue_offset"] for line in lines(exported)] == wanted
    nothing = run("get", root, "A", 1, "--begin", T0 + DAY, "--end", T0 + 2 * DAY, *OPTIONS)
    assert nothing.exit_code == 1 and "was stored in this time" in nothing.stderr


def test_progress_by_time(tmp_path):
    root, name = tmp_path / "s", "3 days back"
    with MessageStore.open(root, config=config_of(name, CLOCKS[name])) as store:
        for number in range(NUM):
            put(store, number)
        own = [message for message in store.messages() if (message.topic, message.queue_id) == ("A", 0)]
        moment = T0 + 55_000
        wanted = next(message.queue_offset for message in own if message.store_timestamp >= moment)
        consumer = store.consume("A", group="late", queue_ids=[0], consume_from=moment, timeout=0)
        assert next(iter(consumer)).queue_offset == wanted
        consumer.close()
        store.consumer_offsets.commit("g", "A", 0, 5)
        store.consumer_offsets.persist()
    of_a = ("--group", "g", "--topic", "A", "--queue", 0)
    (line,) = lines(run("offsets", "set", root, *of_a, "--time", moment, "--json"))
    assert (line["before"], line["queue_offset"]) == (5, wanted)


def test_a_writer_and_a_reader_beside_it(tmp_path):
    times, name = CLOCKS["3 days back"], "3 days back"
    with MessageStore.open(tmp_path / "s", config=config_of(name, times)) as store:
        put(store, 0)
        with MessageStore.open(tmp_path / "s", config=config_of(name), read_only=True) as reader:
            for number in range(1, NUM):
                put(store, number)
                if number % 17 == 0 or number == NUM - 1:
                    everything = list(store.messages())
                    check_offsets(store, everything, (times[0], times[number], times[number] + 1, T0 + 50_000))
                    check_offsets(reader, everything, (times[0], times[number], T0 + 50_000))


def test_what_was_read_once_is_skipped(stores, monkeypatch):
    asked = []
    find = UnitTimes.find

    def counted(self, spans, times, times_of, *, newest):
        def read(first, last):
            asked.append(last - first)
            return times_of(first, last)

        return find(self, spans, times, read, newest=newest)

    monkeypatch.setattr(UnitTimes, "find", counted)
    with opened(stores, "rises") as store:
        for moment, boundary, blocks in (
            (T0, "lower", 1),
            (T0 + 10 * DAY, "upper", 1),
            (T0 + 10 * DAY, "lower", 4),
            # Of the last, which may grow, nothing is remembered.
            (T0 + 10 * DAY, "lower", 1),
            (T0 + 60_000, "lower", 1),
            (T0 - 1, "upper", 1),
        ):
            asked.clear()
            store.offset_by_time("A", 0, moment, boundary)
            assert len(asked) == blocks, (moment, boundary)


def test_an_export_reads_the_segments_of_its_time(stores, tmp_path, monkeypatch):
    root, name = stores("rises"), "rises"
    with opened(stores, name) as store:
        everything, size = list(store.messages()), store.commit_log.segment_size
        assert len(store.commit_log.files.offsets) >= 5
    begin, end = everything[60].store_timestamp, everything[62].store_timestamp
    parts = []
    fill = CommitLog.fill

    def told(self, columns, first, last, on_damage=None):
        if columns.columns:
            parts.append((first // size, -(-last // size)))
        return fill(self, columns, first, last, on_damage)

    monkeypatch.setattr(CommitLog, "fill", told)
    export(root, tmp_path / "out.jsonl", Selection(begin=begin, end=end), ExportOptions(config=config_of(name)))
    assert parts == [(everything[60].phy_offset // size, everything[62].phy_offset // size + 1)]
    assert len(open(tmp_path / "out.jsonl").readlines()) == 3


def test_damage_outside_the_time_does_not_end_an_export(stores, tmp_path):
    name = "3 days ahead over segments"
    shutil.copytree(stores(name), tmp_path / "s")
    with opened(stores, name) as store:
        everything = list(store.messages())
    with open(tmp_path / "s" / "commitlog" / f"{0:020}", "r+b") as file:
        file.seek(everything[3].phy_offset)
        file.write(bytes(8))
    selection = Selection(begin=T0 + DAY)
    export(tmp_path / "s", tmp_path / "out.jsonl", selection, ExportOptions(config=config_of(name)))
    assert len(open(tmp_path / "out.jsonl").readlines()) == 45
    # A message that cannot be read has no time.
    with MessageStore.open(tmp_path / "s", config=config_of(name), read_only=True) as store:
        sound = [message for message in everything if message.phy_offset != everything[3].phy_offset]
        check_offsets(store, sound, moments(CLOCKS[name]))


def test_queue_names_far_apart_are_not_walked(tmp_path):
    with MessageStore.open(tmp_path / "s", config=config_of("rises", CLOCKS["rises"])) as store:
        for number in range(30):
            put(store, number)
    folder = tmp_path / "s" / "consumequeue" / "A" / "0"
    (folder / f"{400 * 2**50:020}").write_bytes((folder / f"{0:020}").read_bytes())
    with MessageStore.open(tmp_path / "s", config=config_of("rises"), read_only=True) as store:
        assert store.offset_by_time("A", 0, T0 + 12_000) == 3
        store.offset_by_time("A", 0, T0 + DAY)


def test_tiered_storage(tmp_path):
    times = CLOCKS["3 days ahead over segments"]
    sent = [
        tiered_oracle.Sent("A", number % 2, (f"K{number}",), None, f"U{number}", b"%020d" % number, time)
        for number, time in enumerate(times)
    ]
    tiered_oracle.write_tiered(tmp_path, sent)
    with open_tiered(tmp_path / "tiered", tmp_path / "store") as store:
        for queue_id in (0, 1):
            own = list(enumerate(times[queue_id::2]))
            for moment in moments(times):
                later = [offset for offset, time in own if time >= moment]
                earlier = [offset for offset, time in own if time <= moment]
                assert store.offset_by_time("A", queue_id, moment) == min(later, default=len(own))
                assert store.offset_by_time("A", queue_id, moment, "upper") == max(earlier, default=0)
        for begin, end in ranges(times):
            wanted = sorted(time for time in times if (begin or 0) <= time <= (end or 2**62))
            found = store.scan(["store_timestamp"], begin=begin, end=end).read_all()["store_timestamp"]
            assert sorted(found.cast("int64").to_pylist()) == wanted


@pytest.mark.parametrize("name", ["3 days ahead over segments", "2 h back"])
def test_a_log_whose_older_part_is_in_tiered_storage(tmp_path, name):
    times = CLOCKS[name]
    with MessageStore.open(tmp_path / "store", config=config_of("rises", times)) as store:
        for number in range(NUM):
            store.put_message(Message("A", b"%060d" % number, keys=[f"K{number}"]), number % 2)
        # Of what was uploaded the local log has a part still.
        for base in store.commit_log.files.offsets[:2]:
            (tmp_path / "store" / "commitlog" / f"{base:020}").unlink()
    sent = [
        tiered_oracle.Sent("A", number % 2, (f"K{number}",), None, f"U{number}", b"%060d" % number, time)
        for number, time in enumerate(times[:70])
    ]
    tiered_oracle.write_tiered(tmp_path, sent)
    paths = {"read_only": True, "tiered": tmp_path / "tiered", "config": config_of("rises")}
    with MessageStore.open(tmp_path / "store", **paths) as store:
        assert store.commit_log.min_offset > 0
        for queue_id in (0, 1):
            own = list(enumerate(times[queue_id::2]))
            for moment in moments(times):
                later = [offset for offset, time in own if time >= moment]
                earlier = [offset for offset, time in own if time <= moment]
                assert store.offset_by_time("A", queue_id, moment) == min(later, default=len(own))
                assert store.offset_by_time("A", queue_id, moment, "upper") == max(earlier, default=0)
        for begin, end in ranges(times):
            wanted = sorted(time for time in times if (begin or 0) <= time <= (end or 2**62))
            found = store.scan(["store_timestamp"], begin=begin, end=end).read_all()["store_timestamp"]
            assert sorted(found.cast("int64").to_pylist()) == wanted
            out = tmp_path / "out.jsonl"
            for selection in (
                Selection(begin=begin, end=end),
                Selection(("A",), begin=begin, end=end, begin_queue_offset=0),
            ):
                export(
                    tmp_path / "store",
                    out,
                    selection,
                    ExportOptions(tiered=tmp_path / "tiered", config=config_of("rises"), force=True),
                )
                assert sorted(json.loads(line)["store_timestamp"] for line in open(out)) == wanted


def test_settled_transactions_where_the_clock_went_back(tmp_path):
    now = [T0 + DAY]
    config = StoreConfig(**SMALL, clock=lambda: now[0])
    with MessageStore.open(tmp_path / "s", config=config) as store:
        for number in range(6):
            given = {
                "REAL_TOPIC": "Pay",
                "REAL_QID": "0",
                "TRAN_MSG": "true",
                "PGROUP": "p",
                "__transactionId__": f"t{number}",
            }
            store.put_message(Message("RMQ_SYS_TRANS_HALF_TOPIC", b"h", properties={**given, "UNIQ_KEY": f"t{number}"}))
        now[0] = T0
        store.put_message(Message("RMQ_SYS_TRANS_OP_HALF_TOPIC", b"0,1,2,4,", tags="d"))
    found = pending(tmp_path / "s", kinds="transaction", config=config)
    assert sorted(message.queue_offset for message in found) == [3, 5]


def test_frames(stores):
    polars = pytest.importorskip("polars")
    from rmqstore.polars import scan_store

    name = "3 days ahead over segments"
    for begin, end in ((T0 + 20_000, T0 + 90_000), (T0 + DAY, T0 + 4 * DAY)):
        time = polars.col("store_timestamp").dt.epoch("ms")
        lazy = scan_store(str(stores(name)), config=config_of(name))
        low, high = (polars.lit(each).cast(polars.Datetime("ms", "UTC")) for each in (begin, end))
        frame = lazy.filter(polars.col("store_timestamp").is_between(low, high)).select(time).collect()
        assert frame["store_timestamp"].to_list() == [each for each in CLOCKS[name] if begin <= each <= end]


def test_pieces_of_spark(stores):
    # Run tasks; needs neither Spark nor Java.
    from rmqstore.spark.batches import ReadJob, piece_batches, spark_arrow_schema
    from rmqstore.spark.options import ReadOptions
    from rmqstore.spark.plan import LogPlan

    name = "3 days ahead over segments"
    plan, schema = LogPlan.of(stores(name), config_of(name)), spark_arrow_schema(("queue_offset", "store_timestamp"))
    for begin, end in ranges(CLOCKS[name]):
        options = ReadOptions(plan.root, selection=Selection(begin=begin, end=end))
        found = []
        for piece in plan.pieces(3000):
            for batch in piece_batches(ReadJob.of(plan, options, schema), piece):
                found += batch.column("store_timestamp").cast("int64").to_pylist()
        low, high = begin or 0, end or 2**63
        assert found == [1000 * time for time in CLOCKS[name] if low <= time <= high]


def test_queues_in_rocksdb(stores, tmp_path):
    pytest.importorskip("rocksdict")
    from rmqstore.offline.rebuild_queue_database import rebuild_queue_database

    name = "3 days ahead over segments"
    root = shutil.copytree(stores(name), tmp_path / "s")
    rebuild_queue_database(root, config_of(name))
    with MessageStore.open(root, config=config_of(name), read_only=True) as store:
        everything = list(store.messages())
        assert store.queue_database is not None and len(everything) == NUM
        for _ in range(2):
            check_offsets(store, everything, moments(CLOCKS[name]))
