"""The duties of any index by key: an index of a dict, asked alone and together with the store's own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.index.key_source import Candidates, Merged, SoughtKeys
from rmqstore.selection import Selection
from rmqstore.store.placed_columns import first_places

CONFIG = StoreConfig(
    mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=2000, max_hash_slot_num=50, max_index_num=100,
    clock=lambda: 1_700_000_000_000,
)  # fmt: skip


class DictIndex:
    """Phy offsets by topic and key."""

    def __init__(self, places: dict[tuple[str, str], list[int]]):
        self.places = places
        self.rejected: list[tuple[int, int]] = []

    def candidates(self, sought: SoughtKeys, wanted: object = None) -> Iterator[Candidates]:
        found = [
            (number, phy_offset)
            for number, pair in enumerate(sought.pairs())
            for phy_offset in sorted(set(self.places.get(pair, [])), reverse=True)
        ]
        yield Candidates.of([number for number, _ in found], [phy_offset for _, phy_offset in found])

    def covered(self) -> list[tuple[int, int]]:
        return [(0, 100)]

    def doubt(self, sought: SoughtKeys, rejected: Candidates) -> None:
        self.rejected += zip(rejected.numbers.tolist(), rejected.phy_offsets.tolist())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "store"
    with MessageStore.open(path, config=CONFIG) as writer:
        for number in range(90):
            writer.put_message(Message("T", b"x" * 100, keys=[f"K{number % 4}"]), queue_id=0)
    with MessageStore.open(path, config=CONFIG, read_only=True) as reader:
        yield reader


def test_a_dict_is_an_index(store):
    rng = random.Random(5)
    messages = list(store.messages())
    pairs = [("T", f"K{number}") for number in (3, 0, 2)]
    there = {pair: [each.phy_offset for each in messages if pair[1] in each.keys] for pair in pairs}
    wrong = messages[1].phy_offset
    index = DictIndex({pair: rng.sample(places, len(places)) + [wrong] for pair, places in there.items()})
    sought = SoughtKeys.of_pairs(pairs, Selection())
    for max_num in (1, 5, 1000):
        index.rejected.clear()
        found = first_places(store.commit_log, index, sought, max_num)
        assert list(zip(found.numbers.tolist(), found.phy_offsets.tolist())) == [
            (number, phy_offset) for number, pair in enumerate(pairs) for phy_offset in there[pair][::-1][:max_num]
        ]
        # Of a key with enough messages the older candidates are not compared.
        assert index.rejected == ([] if max_num < 1000 else [(0, wrong), (1, wrong), (2, wrong)])


def test_several_indexes_are_one(store):
    messages = list(store.messages())
    key = Selection(("T",), keys=("K1",))
    places = [each.phy_offset for each in messages if "K1" in each.keys]
    one, two = DictIndex({("T", "K1"): places[::3]}), DictIndex({("T", "K1"): [*places[::2], messages[0].phy_offset]})
    merged = Merged(one, two)
    assert next(merged.candidates(SoughtKeys.of(key))).phy_offsets.tolist() == sorted(
        {messages[0].phy_offset, *places[::3], *places[::2]}, reverse=True
    )
    assert merged.covered() == [(0, 100)]
    found = first_places(store.commit_log, merged, SoughtKeys.of(key), 1000)
    assert found.phy_offsets.tolist() == sorted({*places[::3], *places[::2]}, reverse=True)
    assert one.rejected == two.rejected == [(0, messages[0].phy_offset)]
    whole = Merged(one, store._querying.source)
    assert first_places(store.commit_log, whole, SoughtKeys.of(key), 7).phy_offsets.tolist() == places[::-1][:7]
