"""Tiered storage that loses files while it is read: what is read and what is named as gone is what was there at first."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiered_oracle as oracle_tiered
from every_disk import open_tiered, reported_to

from rmqstore import CorruptionError, MessageStore
from rmqstore.flatfile import flat_index, flat_verify
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.flatfile.flat_verify import verify_flat
from rmqstore.offline import export as export_module
from rmqstore.offline.export import ExportOptions, export
from rmqstore.selection import Selection
from rmqstore.spark import tiered as spark_tiered
from rmqstore.spark.batches import ReadJob, spark_arrow_schema
from rmqstore.spark.options import ReadOptions
from rmqstore.spark.plan import LogPlan
from rmqstore.spark.tiered import tiered_piece_batches, tiered_pieces

pytest.importorskip("pyarrow")

COLUMNS = ("topic", "queue_id", "queue_offset", "_corrupt")
# 960 messages are there; the first 558 of them only in tiered storage, in log files of 208 and 200 units in a file of units.
ALL, OLDER = 960, 558
GONE = {
    ("COMMIT_LOG", 0): (0, 208),
    ("COMMIT_LOG", 1): (208, 416),
    ("CONSUME_QUEUE", 0): (0, 200),
    ("CONSUME_QUEUE", 1): (200, 400),
}
CASES = [(*each, said) for each in GONE for said in (True, False)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return oracle_tiered.unpack("store", tmp_path_factory.mktemp("tiered"))


@pytest.fixture
def copied(whole, tmp_path):
    """Makes a copy, with the metadata or without."""

    def copy(said=True):
        root = shutil.copytree(whole, tmp_path / "copy")
        for path in () if said else (root / "store" / "config").glob("tieredStoreMetadata.json*"):
            path.unlink()
        return root

    return copy


def delete(root, kind, number):
    """Delete one file of Orders/0, and let mappings of others go so that nobody has them still."""
    files = sorted((root / "tiered").glob(f"*/golden/Orders/0/{kind}/*"), key=lambda path: path.name[8:])
    files[number].unlink()
    return files[number].name


def let_go(queue):
    for files in (queue.log, queue.units):
        for mapped_file in files._layout[2].values():
            mapped_file.let_go()


def named(texts):
    """The queue offsets that are named: single ones, and ranges without their ends."""
    found = set()
    for text in texts:
        one = re.search(r"record of queue offset (\d+),", text)
        found |= (
            {int(one[1])} if one else set(range(*map(int, re.search(r"queue offsets (\d+) to (\d+)", text).groups())))
        )
    return found


def said_to_be_left_out(caplog):
    return [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]


@pytest.mark.parametrize("when", ["planned", "listed"])
@pytest.mark.parametrize(("kind", "number", "said"), CASES)
def test_a_task_of_spark_names_what_was_planned_and_is_gone(copied, monkeypatch, caplog, kind, number, said, when):
    root = copied(said)
    plan = LogPlan.of(root / "store")
    options = ReadOptions(str(root / "store"), None, Selection(("Orders",), (0,)), 30_000, tiered=str(root / "tiered"))
    pieces = list(tiered_pieces(plan, options))
    assert (pieces[0].begin, pieces[-1].end) == (0, OLDER) and len(pieces) > 10
    name = []

    class ThenItGoes(FlatQueue):
        def places(self, *arguments):
            if not name:
                name.append(delete(root, kind, number))
            let_go(self)
            return super().places(*arguments)

    if when == "planned":
        name.append(delete(root, kind, number))
    else:
        monkeypatch.setattr(spark_tiered, "FlatQueue", ThenItGoes)

    def read(corrupt):
        job = ReadJob.of(plan, replace(options, corrupt=corrupt), spark_arrow_schema(COLUMNS))
        # The piece in which it goes comes first.
        low, high = GONE[kind, number]
        ordered = sorted(pieces, key=lambda piece: not low <= piece.begin < high)
        batches = (tiered_piece_batches(job, piece) for piece in ordered)
        return [row for each in batches for batch in each for row in batch.to_pylist()]

    lost = set(range(*GONE[kind, number]))
    rows = read("report")
    assert {row["queue_offset"] for row in rows if row["_corrupt"] is None} == set(range(OLDER)) - lost
    bad = [row for row in rows if row["_corrupt"] is not None]
    assert named(row["_corrupt"] for row in bad) == lost
    assert all((row["topic"], row["queue_id"], row["queue_offset"]) == ("Orders", 0, None) for row in bad)
    assert all(name[0] in row["_corrupt"] for row in bad)
    caplog.clear()
    assert {row["queue_offset"] for row in read("skip")} == set(range(OLDER)) - lost
    texts = said_to_be_left_out(caplog)
    # Once for each piece and file.
    assert texts and all(name[0] in text for text in texts) and len(texts) <= len(pieces)
    with pytest.raises(CorruptionError, match=rf"is gone|have no units.*corrupt=skip passes over it.*{name[0]}"):
        read("fail")


def opened(root, found=None):
    store = MessageStore.open(root / "store", read_only=True, tiered=root / "tiered")
    store.tiered.damage = reported_to(found)
    return store


READERS = {
    "scan": lambda store: store.scan(["queue_offset"], topic="Orders", queue_id=0, batch_size=50),
    "one thread": lambda store: store.scan(["queue_offset"], topic="Orders", queue_id=0, use_threads=False),
    "table": lambda store: store.get_table("Orders", 0, columns=["queue_offset"]),
}


@pytest.mark.parametrize("how", READERS)
@pytest.mark.parametrize(("kind", "number", "said"), CASES)
def test_scans_and_tables_name_what_they_did_not_come_to(copied, caplog, kind, number, said, how):
    found = []
    root = copied(said)
    with opened(root, found) as store:
        queue = store.tiered.queue("Orders", 0)
        reader = None if how == "table" else READERS[how](store)
        name = delete(root, kind, number)
        let_go(queue)
        rows = (READERS[how](store) if reader is None else reader.read_all()).column(0).to_pylist()
        lost = set(range(*GONE[kind, number]))
        assert set(rows) == set(range(ALL)) - lost and len(rows) == len(set(rows))
        texts = said_to_be_left_out(caplog)
        if number == 0:
            # Retention begins with the oldest.
            assert not found and len(texts) == 1 and name in texts[0] and "retention" in texts[0]
        else:
            assert named(each.detail for each in found) == lost and not texts
            assert all(name in each.path for each in found)
            store.tiered.damage.mode = "fail"
            with pytest.raises(CorruptionError, match="was deleted since it was listed"):
                READERS["table"](store)


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
@pytest.mark.parametrize(("kind", "number", "said"), CASES)
def test_an_export_names_what_it_did_not_come_to(copied, tmp_path, caplog, monkeypatch, kind, number, said, way):
    root = copied(said)
    settled = export_module.Source.__init__

    def then_it_goes(self, store, *arguments):
        settled(self, store, *arguments)
        queue = store.tiered.queue("Orders", 0)
        delete(root, kind, number)
        let_go(queue)

    monkeypatch.setattr(export_module.Source, "__init__", then_it_goes)
    chosen = Selection(topics=("Orders",), queue_ids=(0,))

    def run(corrupt):
        options = ExportOptions(way, ["queue_offset"], corrupt=corrupt, force=True, tiered=root / "tiered")
        return export(root / "store", tmp_path / "out", chosen, options)

    left = ALL - (GONE[kind, number][1] - GONE[kind, number][0])
    if number == 0:
        report = run("fail")
        assert (report.messages, report.damaged_stretches) == (left, 0)
        assert len(said_to_be_left_out(caplog)) == 1
        return
    with pytest.raises(CorruptionError, match=r"was deleted since it was listed.*--corrupt skip"):
        run("fail")


@pytest.mark.parametrize(("kind", "number", "said"), CASES)
def test_what_goes_while_verify_runs(copied, caplog, monkeypatch, kind, number, said):
    root = copied(said)
    looked_at = flat_verify._Verify._queue

    def then_it_goes(self, queue):
        if (queue.topic, queue.queue_id) == ("Orders", 0):
            delete(root, kind, number)
            let_go(queue)
        yield from looked_at(self, queue)

    monkeypatch.setattr(flat_verify._Verify, "_queue", then_it_goes)
    with open_tiered(root / "tiered", root / "store") as tiered:
        assert not list(verify_flat(tiered.tiered)) or number
    if number == 0:
        assert len(said_to_be_left_out(caplog)) == 1


@pytest.mark.parametrize("kind", ["COMMIT_LOG", "CONSUME_QUEUE"])
def test_a_get_answers_by_what_is_there_now(copied, kind):
    root = copied(said=False)
    end = GONE[kind, 0][1]
    with opened(root) as store:
        assert store.get_message("Orders", 0, 0, 1).messages[0].queue_offset == 0
        queue = store.tiered.queue("Orders", 0)
        delete(root, kind, 0)
        let_go(queue)
        result = store.get_message("Orders", 0, 0)
        assert (result.status.name, result.next_queue_offset) == ("OFFSET_TOO_SMALL", end)
        assert store.get_message("Orders", 0, end, 1).messages[0].queue_offset == end
    root.rename(root.with_name("first"))
    root = copied(said=False)
    with opened(root) as store:
        queue = store.tiered.queue("Orders", 0)
        delete(root, kind, 0)
        let_go(queue)
        assert store.offset_by_time("Orders", 0, 1_000_000_000_000) == end


def test_a_scan_that_is_under_way_while_another_call_looks_again(copied, caplog):
    root = copied(said=False)
    with opened(root) as store:
        reader = READERS["one thread"](store)
        delete(root, "CONSUME_QUEUE", 0)
        let_go(store.tiered.queue("Orders", 0))
        store.tiered.load()
        rows = reader.read_all().column(0).to_pylist()
        assert sorted(rows) == list(range(200, ALL))
        assert named(said_to_be_left_out(caplog)) == set(range(200))


def test_units_that_lead_before_every_file_are_damage_and_no_error_of_ours(copied):
    # As where the first file of a log is lost and nothing says so.
    root = copied(said=False)
    delete(root, "COMMIT_LOG", 0)
    first = min((root / "tiered").glob("*/golden/Orders/0/COMMIT_LOG/*"), key=lambda path: path.name[8:])
    first.write_bytes(bytes(60) + first.read_bytes()[60:])
    found = []
    with opened(root, found) as store:
        rows = READERS["table"](store).column(0).to_pylist()
        assert sorted(rows) == list(range(209, ALL))
        assert len(found) == 209


def test_logging_is_that_of_the_package(copied, caplog):
    root = copied()
    with opened(root) as store, caplog.at_level(logging.WARNING, "rmqstore"):
        reader = READERS["scan"](store)
        delete(root, "COMMIT_LOG", 0)
        let_go(store.tiered.queue("Orders", 0))
        reader.read_all()
        # Once for each store that is opened.
        READERS["table"](store)
    assert len(said_to_be_left_out(caplog)) == 1


def index_files(root):
    return sorted((root / "tiered").glob("*/golden/rmq_sys_INDEX/0/INDEX/*"), key=lambda path: path.name[8:])


def test_index_files_that_go_are_asked_for_no_more(copied, monkeypatch):
    root = copied(said=False)
    asked = "Orders", "ORD-100400"
    with opened(root) as store:
        wanted = [message.queue_offset for message in store.query_message(*asked)]
        index_files(root)[0].unlink()
        for index in store.tiered.index.files:
            index.file.let_go()
        assert [message.queue_offset for message in store.query_message(*asked)] == wanted == [536, 535, 534, 533]
    with open_tiered(root / "tiered", root / "store") as tiered:
        expected = [(each.kind, each.path) for each in verify_flat(tiered.tiered)]
    root.rename(root.with_name("first"))
    root = copied(said=False)
    looked_at = flat_verify._Verify._index

    def then_it_goes(self, queues):
        index_files(root)[0].unlink()
        for index in self.flat_store.index.files:
            index.file.let_go()
        yield from looked_at(self, queues)

    monkeypatch.setattr(flat_verify._Verify, "_index", then_it_goes)
    with open_tiered(root / "tiered", root / "store") as tiered:
        assert len(list(verify_flat(tiered.tiered))) >= len(expected)


def test_a_local_index_file_that_goes_while_it_is_opened(tmp_path, monkeypatch):
    root = oracle_tiered.unpack("store.running", tmp_path)
    with opened(root) as store:
        wanted = [message.queue_offset for message in store.query_message("Orders", "ORD-100400")]
        assert not all(index.compacted for index in store.tiered.index.files)
    made = flat_index.FlatIndexFile

    def then_it_goes(mapped_file, **options):
        if not options["compacted"]:
            Path(mapped_file.path).unlink(missing_ok=True)
        return made(mapped_file, **options)

    monkeypatch.setattr(flat_index, "FlatIndexFile", then_it_goes)
    with opened(root) as store:
        assert [message.queue_offset for message in store.query_message("Orders", "ORD-100400")] == wanted
        assert wanted and all(index.compacted for index in store.tiered.index.files)
