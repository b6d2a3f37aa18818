"""A store that loses files while it is read: what is read and what is named as gone is what was there at first.

Retention, or somebody by hand, takes segments and files of queues between the moment at which a reading is settled and
the one at which it comes by.
"""

from __future__ import annotations

import logging
import os
import re
import shutil

import pytest

from rmqstore import CorruptionError, Message, MessageStore, StoreConfig
from rmqstore.commitlog import pieces as pieces_module
from rmqstore.commitlog.log_walk import Damage
from rmqstore.offline import export as export_module
from rmqstore.offline.export import ExportOptions, export
from rmqstore.selection import Selection
from rmqstore.store import columns as columns_module

pytest.importorskip("pyarrow")

SEGMENT = 16384
NUM = 200


def config():
    return StoreConfig(
        mapped_file_size_commit_log=SEGMENT,
        mapped_file_size_consume_queue=400,
        mapper_file_size_batch_consume_queue=3 * 46,
        max_hash_slot_num=50,
        max_index_num=200,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store of 200 messages in five segments, 20 units in a file of the queue, and ten inner batches."""
    path = tmp_path_factory.mktemp("gone") / "store"
    with MessageStore.open(path, config=config()) as store:
        for number in range(NUM):
            store.put_message(Message("Orders", b"%06d" % number + b"x" * 250, keys=["K"], tags="AB"[number % 2]), 0)
            if number % 20 == 0:
                store.put_message(Message("Inner", b"%d" % number, sys_flag=0xC0, properties={"INNER_NUM": "2"}))
        assert len(store.commit_log.files) > 4
    return path


@pytest.fixture
def path(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "store")


@pytest.fixture
def planned(whole):
    with MessageStore.open(whole, config=config(), read_only=True) as store:
        return [message.phy_offset for message in store.messages()]


def unlink(path, *numbers):
    for number in numbers:
        (path / "commitlog" / f"{number * SEGMENT:020d}").unlink()


def named(caplog):
    """The phy offsets that warnings name, as ranges."""
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    found = [re.search(r"no segment holds phy offsets (\d+) to (\d+)", text) for text in texts]
    return [(int(each[1]), int(each[2])) for each in found if each]


def without(planned, ranges):
    return [at for at in planned if not any(begin <= at < end for begin, end in ranges)]


# Which segments go, and whether the reader looks at the store again before it goes on.
LOSSES = [((0,), False), ((0,), True), ((0, 1), True), ((2,), False), ((0, 3), True), ((4,), False)]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("numbers", "refresh"), LOSSES)
def test_a_scan_names_what_it_did_not_come_to(path, planned, caplog, numbers, refresh, begun, views):
    with MessageStore.open(path, config=config(), read_only=True) as store:
        reader = iter(store.scan(["phy_offset", "body"], batch_size=10, views=views))
        found = next(reader).column("phy_offset").to_pylist() if begun else []
        unlink(path, *numbers)
        # A mapped file is read to its end, even if it is deleted.
        store.commit_log.files.let_go()
        if refresh:
            store.refresh()
        for batch in reader:
            found += batch.column("phy_offset").to_pylist()
    gone = named(caplog)
    assert found == without(planned, gone) or (begun and found == planned[:10] + without(planned[10:], gone))
    if not begun:
        assert {begin // SEGMENT for begin, _ in gone} == set(numbers) or gone == [(0, len(numbers) * SEGMENT)]
        assert len(found) < len(planned)


@pytest.mark.parametrize(("numbers", "refresh"), LOSSES)
def test_messages_and_pages_name_what_they_did_not_come_to(path, planned, caplog, numbers, refresh):
    copy = shutil.copytree(path, path.parent / "copy")
    with MessageStore.open(path, config=config(), read_only=True) as store:
        reader = store.messages()
        # It begins with the first message, which is a page of its own, so that the oldest segment goes half read.
        found = [next(reader).phy_offset]
        unlink(path, *numbers)
        store.commit_log.files.let_go()
        if refresh:
            store.refresh()
        found += [message.phy_offset for message in reader]
    gone = named(caplog)
    assert found == planned[:1] + without(planned[1:], gone) and len(found) < len(planned)
    assert {begin // SEGMENT for begin, _ in gone} == set(numbers) or gone == [(0, len(numbers) * SEGMENT)]
    caplog.clear()
    with MessageStore.open(copy, config=config(), read_only=True) as store:
        reader = store.commit_log.pages()
        pages = [next(reader)]
        unlink(copy, *numbers)
        store.commit_log.files.let_go()
        if refresh:
            store.refresh()
        pages += reader
    # A range without a segment is a page of its own, or was reported.
    damaged = [(page.phy_offset, page.phy_offset + page.size) for page in pages if isinstance(page, Damage)]
    found = [message.phy_offset for page in pages if isinstance(page, list) for message in page]
    assert found[1:] == without(planned[1:], [*damaged, *named(caplog)]) and len(found) < len(planned)
    assert bool(damaged) == refresh


def test_a_scan_of_many_threads_names_what_it_did_not_come_to(path, planned, caplog, monkeypatch):
    for name, value in (("_PIECE", 2048), ("_LONG_PIECE", 2048), ("_PIECE_BYTES_PER_ROW", 0), ("_PIECE_SEARCH", 1024)):
        monkeypatch.setattr(columns_module, name, value)
    monkeypatch.setattr(pieces_module, "usable_cpus", lambda: 8)
    for numbers, refresh in LOSSES:
        caplog.clear()
        store_path = shutil.copytree(path, path.parent / "-".join(map(str, (*numbers, refresh))))
        with MessageStore.open(store_path, config=config(), read_only=True) as store:
            reader = store.scan(["phy_offset"], batch_size=10)
            unlink(store_path, *numbers)
            store.commit_log.files.let_go()
            if refresh:
                store.refresh()
            found = [at for batch in reader for at in batch.column(0).to_pylist()]
        assert found == without(planned, named(caplog))
        assert len(found) < len(planned)


def test_a_range_that_begins_before_the_log_is_nothing_that_went(path, caplog):
    unlink(path, 0)
    with MessageStore.open(path, config=config(), read_only=True) as store:
        rows = store.scan(["phy_offset"], begin_phy_offset=0).read_all().num_rows
        assert rows == store.scan(["phy_offset"]).read_all().num_rows == sum(1 for _ in store.messages())
        assert store.scan(["phy_offset"], begin_phy_offset=5, end_phy_offset=9).read_all().num_rows == 0
        assert not list(store.messages(begin_phy_offset=5, end_phy_offset=9))
    assert not named(caplog)


def test_a_gap_is_named_once_for_each_store_that_is_opened(path, planned, caplog):
    unlink(path, 2)
    with MessageStore.open(path, config=config(), read_only=True) as store:
        for _ in range(3):
            assert store.scan(["phy_offset"]).read_all().num_rows == len(without(planned, named(caplog))) < len(planned)
            assert sum(1 for _ in store.messages()) == len(without(planned, named(caplog)))
        assert named(caplog) == [(2 * SEGMENT, 3 * SEGMENT)]


def test_a_table_of_a_queue_names_what_no_segment_holds(path, caplog):
    unlink(path, 1)
    with MessageStore.open(path, config=config(), read_only=True) as store:
        table = store.get_table("Orders", 0, columns=["phy_offset"])
        assert named(caplog) == [(SEGMENT, 2 * SEGMENT)]
        assert 100 < len(table) < NUM
        # By key too.
        caplog.clear()
    with MessageStore.open(path, config=config(), read_only=True) as store:
        assert store.query_table(["K"], "Orders", ["phy_offset"], NUM).num_rows == len(table)
        assert named(caplog) == [(SEGMENT, 2 * SEGMENT)]


@pytest.mark.parametrize(("topic", "base", "first", "end"), [("Orders", 400, 20, 40), ("Inner", 138, 6, 12)])
def test_a_table_of_a_queue_names_the_units_that_are_lost(path, caplog, topic, base, first, end):
    kind = "consumequeue" if topic == "Orders" else "batchconsumequeue"
    (path / kind / topic / "0" / f"{base:020d}").unlink()
    with MessageStore.open(path, config=config(), read_only=True) as store:
        tables = [store.get_table(topic, 0, columns=["queue_offset"]).column(0).to_pylist() for _ in range(2)]
        high = store.max_queue_offset(topic, 0)
        step = 1 if topic == "Orders" else 2
        assert tables[0] == tables[1] == [*range(0, first, step), *range(end, high, step)]
    texts = [record.getMessage() for record in caplog.records if "lacks the units" in record.getMessage()]
    assert len(texts) == 1 and f"{topic}/0 lacks the units of queue offsets {first} to {end - 1};" in texts[0]


def test_a_lazy_frame_names_what_it_did_not_come_to(path, planned, caplog):
    polars = pytest.importorskip("polars")
    from rmqstore.polars import scan_store

    unlink(path, 2)
    frame = scan_store(path, config=config())
    for chosen in (frame, frame.filter(polars.col("keys").list.contains("K"), polars.col("topic") == "Orders")):
        caplog.clear()
        found = chosen.select("phy_offset").collect()["phy_offset"].to_list()
        assert named(caplog) == [(2 * SEGMENT, 3 * SEGMENT)]
        assert 100 < len(found) < NUM + 10


def rows_of(path, output, selection, **options):
    report = export(
        path, output, selection, ExportOptions(columns=["phy_offset"], config=config(), force=True, **options)
    )
    return report, [int(text) for text in re.findall(r"\d+", output.read_text())]


SELECTIONS = {
    "scan": Selection(),
    "key": Selection(topics=("Orders",), keys=("K",)),
    "queue": Selection(topics=("Orders",), begin_queue_offset=0),
}


@pytest.mark.parametrize("chosen", SELECTIONS)
def test_an_export_names_what_it_did_not_come_to(path, tmp_path, caplog, monkeypatch, chosen):
    output = tmp_path / "out.jsonl"
    _, before = rows_of(path, output, SELECTIONS[chosen])
    assert len(before) >= NUM
    settled = export_module.Source.__init__

    def then_they_go(self, *arguments):
        settled(self, *arguments)
        unlink(path, *numbers)
        self.log.files.let_go()

    # Retention, after the export knows what there is: a warning.
    monkeypatch.setattr(export_module.Source, "__init__", then_they_go)
    numbers = (0,)
    caplog.clear()
    _, found = rows_of(path, output, SELECTIONS[chosen])
    assert found == without(before, named(caplog)) and len(found) < len(before)
    assert all(end <= SEGMENT for _, end in named(caplog))
    # A missing file in the middle is damage.
    numbers = (3,)
    with pytest.raises(CorruptionError, match="the segment is missing"):
        rows_of(path, output, SELECTIONS[chosen])
    numbers = ()
    report, found = rows_of(path, output, SELECTIONS[chosen], corrupt="skip")
    assert report.damaged_stretches > 0
    assert found == [at for at in before if at // SEGMENT not in (0, 3)]


def test_an_export_by_queue_takes_lost_units_for_damage(path, tmp_path):
    output, selection = tmp_path / "out.jsonl", SELECTIONS["queue"]
    _, before = rows_of(path, output, selection)
    (path / "consumequeue" / "Orders" / "0" / f"{800:020d}").unlink()
    with pytest.raises(CorruptionError, match=r"queue Orders/0 is there for queue offsets 40 to 59; .*--corrupt skip"):
        rows_of(path, output, selection)
    report, found = rows_of(path, output, selection, corrupt="skip")
    assert found == before[:40] + before[60:] and report.damaged_stretches == 1
    # Only where they are asked for.
    _, found = rows_of(path, output, Selection(topics=("Orders",), begin_queue_offset=60))
    assert found == before[60:]
    os.truncate(path / "consumequeue" / "Orders" / "0" / f"{1200:020d}", 100)
    with pytest.raises(CorruptionError, match="queue offsets 65 to 79"):
        rows_of(path, output, Selection(topics=("Orders",), begin_queue_offset=60))
