"""A look at a queue in its files says what the opened queue says, and opens none.

Owns the comparison over every golden store, over queues of several files, shortened logs and damage.
"""

from __future__ import annotations

import os
import random

import golden
import many_topics
import pytest

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.consumequeue import consume_queue_store
from rmqstore.consumequeue.queue_look import look_at_files, look_at_queue, unit_in_files

TINY = StoreConfig(
    mapped_file_size_commit_log=1 << 16, mapped_file_size_consume_queue=2000, max_hash_slot_num=100, max_index_num=400,
    clean_resource_interval=0,
)  # fmt: skip


def compare(path, config=None) -> int:
    """How many queues were looked at in their files; each look is that of the opened queue."""
    in_files = 0
    with MessageStore.open(path, config=config, read_only=True) as store:
        low = store.commit_log.min_offset
        for topic, queue_id in store.queues.keys():
            look = store.queues.look(topic, queue_id, low, sizes=True)
            units = [store.queues.unit(topic, queue_id, at) for at in range(look.max_queue_offset + 2)]
            in_files += store.queues._is_in_files(topic, queue_id)
            queue = store.queues.find(topic, queue_id)
            assert look == look_at_queue(queue, low, sizes=True)
            assert (look.min_queue_offset, look.max_queue_offset) == queue.bounds(low)
            assert units == [queue.unit(at) for at in range(look.max_queue_offset + 2)]
            if look.exact:
                chosen = range(look.min_queue_offset, look.max_queue_offset)
                records = {unit.phy_offset: unit.size for at in chosen if (unit := queue.unit(at)) is not None}
                assert look.log_bytes == sum(records.values())
            else:
                assert look.log_bytes > 0
    return in_files


@pytest.mark.parametrize("name", golden.STORES)
def test_golden_stores(golden_store, name):
    found = compare(golden_store(name), StoreConfig.infer(golden_store(name)))
    # A queue with an extension is opened, to say what that takes, and so is any where the system does not tell holes.
    assert found or (golden_store(name) / "consumequeue_ext").is_dir() or not hasattr(os, "SEEK_DATA")


def test_queues_of_several_files_and_a_log_whose_start_is_gone(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=TINY) as store:
        for size in (10, 400):
            store.put_messages([Message("T", bytes(size))] * 950, [n % 3 for n in range(950)])
    assert compare(path) == 3
    for segment in sorted((path / "commitlog").iterdir())[:4]:
        segment.unlink()
    assert compare(path) == 3
    # And the first of one queue's files.
    sorted((path / "consumequeue" / "T" / "1").iterdir())[0].unlink()
    assert compare(path) == 3


def test_a_long_file_is_halved(tmp_path):
    path = many_topics.make(tmp_path / "store", 0)
    rng = random.Random(5)
    for number in (408, 409, 410, 4095, 4096, 100_000, 299_999, 300_000):
        folder = path / "consumequeue" / f"Long-{number}" / "0"
        folder.mkdir(parents=True)
        phy_offset, data = 0, bytearray()
        for _ in range(number):
            size = rng.randrange(100, 200)
            data += many_topics.UNIT.pack(phy_offset, size, 7)
            phy_offset += size
        (folder / ("0" * 20)).write_bytes(data)
        os.truncate(folder / ("0" * 20), 6_000_000)
        look = look_at_files(str(folder), 6_000_000, 0, sizes=True)
        assert (look.min_queue_offset, look.max_queue_offset) == (0, number)
        assert look.last.queue_offset == number - 1 and look.last.phy_offset + look.last.size == phy_offset
        # All sizes lie within a third of their mean.
        assert look.log_bytes == pytest.approx(phy_offset, rel=0.05) and look.exact == (number <= 4096)
        middle = phy_offset // 2
        first = look_at_files(str(folder), 6_000_000, middle).min_queue_offset
        units = [many_topics.UNIT.unpack_from(data, 20 * at)[0] for at in (first - 1, first)]
        assert units[0] < middle <= units[1]


def test_the_reads_of_a_look_are_few_however_long_the_queue(tmp_path, monkeypatch):
    reads = []
    real = os.pread

    def counted(fd, count, offset):
        reads.append(count)
        return real(fd, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    for number in (3, 300_000):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / ("0" * 20)).write_bytes(b"".join(many_topics.UNIT.pack(100 * at, 100, 0) for at in range(number)))
        os.truncate(folder / ("0" * 20), 6_000_000)
        reads.clear()
        look_at_files(str(folder), 6_000_000, 5_000_000, sizes=True)
        assert len(reads) <= 80 and sum(reads) <= 100 * 1024


def test_units_are_read_while_their_file_is_open(tmp_path, monkeypatch):
    # Three files of 1000 units; the first 500 are before the log.
    for base in (0, 20_000, 40_000):
        numbers = range(base // 20, min(base // 20 + 1000, 2500))
        (tmp_path / f"{base:020}").write_bytes(b"".join(many_topics.UNIT.pack(100 * n, 100, n) for n in numbers))
        os.truncate(tmp_path / f"{base:020}", 20_000)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: (opened.append(path), real(path, *more))[1])
    look = look_at_files(str(tmp_path), 20_000, 50_000, offsets=(-1, 3, 700, 1600, 2499, 2500, 10**9))
    assert look.units == {n: (n, 100 * n, 100, n, 1) for n in (500, 700, 1600, 2499)}
    assert len(opened) == 3 == len(set(opened))
    assert look.units == {n: unit_in_files(str(tmp_path), 20_000, n) for n in look.units}


def test_what_is_not_as_a_writer_leaves_it_is_opened(golden_copy):
    for damage in ("gap", "short", "strange"):
        root = golden_copy("broker")
        folder = root / "consumequeue" / "Orders" / "1"
        first = min(folder.iterdir())
        if damage == "gap":
            with open(first, "r+b") as file:
                file.seek(200)
                file.write(bytes(40))
        elif damage == "short":
            os.truncate(first, 100)
        else:
            (folder / "notes.txt").write_text("x")
        config = StoreConfig.infer(golden_copy("broker"))
        size = config.consume_queue_file_size
        if damage != "gap":
            assert look_at_files(str(folder), size, 0) is None
        compare(root, config)


def test_every_file_of_a_queue_has_to_be_whole(tmp_path):
    # Five files, of which a look reads the ends only.
    for number in range(5):
        units = range(100 * number, 100 * number + (100 if number < 4 else 30))
        data = b"".join(many_topics.UNIT.pack(50 * at, 50, 0) for at in units)
        (tmp_path / f"{2000 * number:020}").write_bytes(data.ljust(2000, b"\0"))
    look = look_at_files(str(tmp_path), 2000, 0)
    assert (look.min_queue_offset, look.max_queue_offset, look.files) == (0, 430, 5)
    for number in range(5):
        for length in (1980, 2020):
            file = tmp_path / f"{2000 * number:020}"
            data = file.read_bytes()
            os.truncate(file, length)
            assert look_at_files(str(tmp_path), 2000, 0) is None, (number, length)
            file.write_bytes(data)
    assert look_at_files(str(tmp_path), 2000, 0) == look


def test_a_file_that_is_cut_under_a_look_is_opened_instead(tmp_path, monkeypatch):
    (tmp_path / ("0" * 20)).write_bytes(bytes(6000))
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, pos: real(fd, size, pos)[:-7])
    assert look_at_files(str(tmp_path), 6000, 0) is None
    monkeypatch.undo()
    assert look_at_files(str(tmp_path), 6000, 0).max_queue_offset == 0


def test_statistics_open_no_queue(tmp_path, monkeypatch):
    path = many_topics.make(tmp_path / "store", 200)
    opened = []
    real = consume_queue_store.ConsumeQueueStore._open
    monkeypatch.setattr(
        consume_queue_store.ConsumeQueueStore, "_open", lambda self, *key: (opened.append(key), real(self, *key))[1]
    )
    with MessageStore.open(path, read_only=True) as store:
        stats = {each.topic: each for each in store.stats().queues}
        assert len(stats) == 201 and opened == []
        assert [stats[f"Topic-{n:05d}"].messages for n in range(10)] == [3 + n % 5 for n in range(10)]
        assert all(each.last_store_timestamp for each in stats.values())
