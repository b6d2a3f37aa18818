"""Keys with many messages: the index is walked as far as the answer needs, with the rows of a search of all records.

The number of entries that a walk visits is counted from where it stopped in the chain.
"""

from __future__ import annotations

import functools
import itertools
import random
import shutil

import numpy as np
import pytest

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.index import index_service
from rmqstore.index.index_file import IndexFile
from rmqstore.selection import of_key
from rmqstore.store import pages
from rmqstore.store.pages import key_page

pytest.importorskip("pyarrow")

NUM, START, STEP = 6000, 1_700_000_000_000, 400
TIMES = START + NUM // 2 * STEP, START + (NUM // 2 + 300) * STEP
# The slots are so few that other keys are in every chain.
SLOTS = 8
CONFIG = StoreConfig(mapped_file_size_commit_log=1 << 18, max_hash_slot_num=SLOTS, max_index_num=4000, index_tags=False)


class Store:
    """A store with hot keys in several index files, its messages, and the entries that were visited."""

    def __init__(self, path, monkeypatch):
        clock = iter(range(START, START + NUM * STEP, STEP))
        config = CONFIG.replace(clock=lambda: next(clock, START + NUM * STEP))
        rng = random.Random(4)
        with MessageStore.open(path, config=config) as writer:
            for number in range(NUM):
                # Each third message has the hottest key; "Aa0" and "BB0" have the same hash.
                key = "Aa0" if number % 3 == 0 else f"K{rng.randrange(100)}"
                writer.put_message(Message("T", b"%d" % number, keys=[key, "BB0"] if number % 2 == 0 else [key]))
        self.path, self.visited, self.compared = path, 0, 0
        self.store = MessageStore.open(path, config=config, read_only=True)
        self.messages = [(m.phy_offset, m.store_timestamp, m.keys) for m in self.store.messages()][::-1]
        self.monkeypatch = monkeypatch
        self.count()

    def count(self) -> None:
        chain_entries = index_service.chain_entries
        select_chain = IndexFile.select_chain

        def counted(index, hashes, cursors, wanted, number, *times):
            walked = np.flatnonzero((wanted > 0) & (cursors >> 32 == number))
            before = cursors.copy()
            answer = chain_entries(index, hashes, cursors, wanted, number, *times)
            for key in walked.tolist():
                ended = cursors[key] >> 32 != number
                self.visited += steps(index, int(hashes[key]), int(before[key] - (number << 32)),
                                      0 if ended else int(cursors[key] - (number << 32)))  # fmt: skip
            self.compared += len(answer[0])
            return answer

        def selected(index, key_hash, entry=-1, *more):
            phy_offsets, following = select_chain(index, key_hash, entry, *more)
            self.visited += steps(index, key_hash, max(entry, 0), following)
            self.compared += len(phy_offsets)
            return phy_offsets, following

        self.monkeypatch.setattr(index_service, "chain_entries", counted)
        self.monkeypatch.setattr(IndexFile, "select_chain", selected)

    def ask(self, call):
        self.visited = self.compared = 0
        return call()

    def wanted(self, key, max_num, low=0, high=1 << 62):
        """The phy offsets of an answer, from all records."""
        found = (phy_offset for phy_offset, time, keys in self.messages if key in keys and low <= time <= high)
        return list(itertools.islice(found, max_num))

    def table(self, keys, max_num, low=None, high=None):
        table = self.ask(lambda: self.store.query_table(keys, "T", ["phy_offset"], max_num, low, high))
        rows = [[] for _ in keys]
        for number, phy_offset in zip(table["key_number"].to_pylist(), table["phy_offset"].to_pylist()):
            rows[number].append(phy_offset)
        return rows


def steps(index: IndexFile, key_hash: int, entry: int, stop: int) -> int:
    """The number of entries from `entry` (0 for the newest) up to but not including `stop` in a chain."""
    depths = depths_of(index)
    return depths[entry or index.read_slot(key_hash % index.slot_num)] - depths[stop]


@functools.lru_cache
def depths_of(index: IndexFile) -> list[int]:
    """For each entry of a file the number of entries of its chain up to it."""
    depths = [0]
    for entry in range(1, index.index_count):
        depths.append(depths[index.read_entry(entry)[3]] + 1)
    return depths


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        made = Store(tmp_path_factory.mktemp("hot") / "store", patch)
        with made.store:
            yield made


KEYS = [f"K{number}" for number in range(100)]


@pytest.mark.parametrize("max_num", [1, 32])
def test_the_number_of_rows_bounds_the_walk(hot, max_num):
    assert len(hot.store.index_service.names) == 3
    # Of 2000 messages; two of five entries with its hash are those of the other key.
    assert hot.table(["Aa0"], max_num) == [hot.wanted("Aa0", max_num)]
    assert hot.compared <= 12 * max_num and hot.visited <= 40 * max_num
    one = hot.visited
    assert hot.table(["Aa0"] * 100, max_num) == [hot.wanted("Aa0", max_num)] * 100
    assert hot.visited <= 100 * one


def test_many_hot_keys(hot):
    rows = hot.table(KEYS, 1)
    assert rows == [hot.wanted(key, 1) for key in KEYS]
    # One entry of each key; 40 messages have each key, 4000 the keys together.
    assert hot.compared == 100 and hot.visited < 100 * 600
    for max_num in (32, 39, 1000):
        assert hot.table(KEYS, max_num) == [hot.wanted(key, max_num) for key in KEYS]
    assert hot.compared == 4000


@pytest.mark.parametrize("max_num", [1, 32, 1000])
def test_times_in_the_middle(hot, max_num):
    low, high = TIMES
    keys = ["Aa0", "BB0", *KEYS[:7], "Aa0", "none"]
    assert hot.table(keys, max_num, low, high) == [hot.wanted(key, max_num, low, high) for key in keys]
    assert hot.table(["Aa0"], max_num, low, high) == [hot.wanted("Aa0", max_num, low, high)]
    # Of other times the records of up to a second are read, and the first entry of each file.
    inside = sum(low - 1000 <= time <= high + 1000 for _, time, _ in hot.messages)
    assert hot.compared <= min(12 * max_num, inside) + 8
    for _, at, _ in hot.messages[:: NUM // 12]:
        for low, high in ((at, at), (at - 1, at - 1), (at + 1, at + STEP), (at - 3000, at), (None, at), (at, None)):
            times = low or 0, high or 1 << 62
            assert hot.table(["Aa0", "BB0"], 5, low, high) == [hot.wanted(key, 5, *times) for key in ("Aa0", "BB0")]


def shown(hot, key, max_num, low, high):
    """The rows of all pages, and of each page the number of entries visited and compared."""
    rows, counts, cursor = [], [], None
    while True:
        page = hot.ask(
            lambda cursor=cursor: key_page(
                hot.store, of_key("T", key, max_num, low, high, None), cursor, lambda message: message.phy_offset
            )
        )
        rows.append(page.rows)
        counts.append((hot.visited, hot.compared))
        cursor = page.following
        if cursor is None:
            return rows, counts


def test_a_page_begins_where_the_time_range_begins(hot, monkeypatch):
    monkeypatch.setattr(pages, "_STEPS", 300)
    low, high = TIMES
    rows, counts = shown(hot, "Aa0", 20, low, high)
    wanted = hot.wanted("Aa0", 1000, low, high)
    assert len(wanted) > 90 and list(itertools.chain(*rows)) == wanted
    assert [len(page) for page in rows[:4]] == [20] * 4
    # A stretch of a chain has 128 entries; each page walks it again up to its last row.
    assert all(compared <= 2 * 128 + 20 for _, compared in counts)
    assert sum(visited for visited, _ in counts) <= 2 * sum(
        steps(index, index_service.index_key_hash("T", "Aa0"), 0, 0) for index in hot.store.index_service.newest_first()
    )
    assert shown(hot, "Aa0", 7, None, None)[0] == [list(each) for each in batched(hot.wanted("Aa0", NUM), 7)]


def batched(items, size):
    return [items[at : at + size] for at in range(0, len(items), size)]


def change_diffs(path, change):
    """Change the time of each tenth entry of the index files."""
    for file in sorted((path / "index").iterdir()):
        with IndexFile.open(file, CONFIG) as index:
            for entry in range(2, index.index_count, 10):
                diff = change(index.read_entry(entry)[2])
                index.region.write(index.entry_pos(entry) + 12, diff.to_bytes(4, "big", signed=True))


@pytest.fixture
def copied(tmp_path, hot):
    shutil.copytree(hot.path, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    "change", [lambda diff: -1, lambda diff: 0x7FFFFFFF if diff > 9 else diff], ids=["negative", "greatest"]
)
def test_times_that_no_entry_has(copied, hot, change):
    change_diffs(copied, change)
    # The greatest number is what does not fit, so that nothing is later than it.
    low, high = (TIMES[0], None) if change(10) > 0 else TIMES
    with MessageStore.open(copied, config=CONFIG, read_only=True) as store:
        found = store.query_table(["Aa0"], "T", ["phy_offset"], 10_000, low, high)["phy_offset"].to_pylist()
        assert found != [] and set(found) <= set(hot.wanted("Aa0", NUM, low, high or 1 << 62))
        if change(10) < 0:
            assert found == hot.wanted("Aa0", NUM, low, high) and store.index_service.distrusted


def test_a_header_with_another_begin_time_hides_nothing(copied, hot):
    for file in sorted((copied / "index").iterdir()):
        with IndexFile.open(file, CONFIG) as index:
            header = index.read_header()
            index.write_header(header[0] + 90_000, *header[1:])
    low, high = TIMES
    with MessageStore.open(copied, config=CONFIG, read_only=True) as store:
        found = store.query_table(["Aa0", "K1"], "T", ["phy_offset"], 10_000, low, high)["phy_offset"].to_pylist()
        assert found == hot.wanted("Aa0", NUM, low, high) + hot.wanted("K1", NUM, low, high)
