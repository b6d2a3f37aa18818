"""One selection, the same messages wherever it is asked: compared with the oracle and, column by column, with each other."""

from __future__ import annotations

import dataclasses

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.selection import Selection

START = 1_700_000_000_000


def test_keys_and_tags_are_those_of_the_oracle(golden_store):
    root = golden_store("base")
    log = {int(path.name): path.read_bytes() for path in sorted((root / "commitlog").iterdir())}
    records = {record.phy_offset: record for record in oracle.records_of(log)}
    tried = 0
    with MessageStore.open(root, read_only=True) as store:
        for message in store.messages():
            record = records[message.phy_offset]
            unique = record.unique_key or "u"
            asked = {"k1", "k2", "k", "k1 k2", "", " ", "nothing", "x" * 300, *record.keys, unique}
            for key in asked | {each[:-1] for each in asked} | {each + "x" for each in asked}:
                chosen = Selection((record.topic,), keys=(key,))
                expected = {
                    None: key != "" and (key == record.unique_key or key in record.keys),
                    "U": key != "" and key == record.unique_key,
                    "K": key != "" and key in record.keys,
                    "T": key == record.tags,
                }
                for kind, answer in expected.items():
                    assert dataclasses.replace(chosen, index_type=kind).has(message) is answer, (key, kind)
                assert not dataclasses.replace(chosen, topics=(record.topic + "x",)).has(message)
                tried += expected[None]
            for tag in {"TagA", "Tag", "TagAA", record.tags or "none"}:
                assert Selection(tags=tag).has(message) is (tag == record.tags)
    assert tried > 40


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    clock = iter(range(START, START + 10_000))
    config = StoreConfig(
        mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=100, max_hash_slot_num=100, max_index_num=4000,
        clock=lambda: next(clock),
    )  # fmt: skip
    with MessageStore.open(tmp_path_factory.mktemp("selection") / "store", config=config) as made:
        for number in range(60):
            tags = (None, "Aa", "BB", "C")[number % 4]
            made.put_message(Message(f"T{number % 3}", b"x", keys=[f"k{number % 7}"], tags=tags), queue_id=number % 2)
        yield made


some = st.none() | st.integers(0, 59)


@given(
    st.none() | st.sets(st.sampled_from(["T0", "T1", "other"])),
    st.none() | st.sets(st.integers(0, 2)),
    st.sampled_from([None, "", "*", "Aa", "BB", "Aa || C", "Aa||*", ["BB", "C"], [], "nobody"]),
    some, some, some, some,
)  # fmt: skip
def test_columns_are_the_messages_that_it_has(store, topics, queue_ids, tags, low, high, first, last):
    pytest.importorskip("pyarrow")
    messages = list(store.messages())
    places = [message.phy_offset for message in messages]
    begin, end = (None if each is None else messages[each].store_timestamp for each in (low, high))
    begin_phy, end_phy = (None if each is None else places[each] for each in (first, last))
    chosen = Selection(
        None if topics is None else tuple(topics), None if queue_ids is None else tuple(queue_ids), tags, None, begin, end,
        begin_phy, end_phy,
    )  # fmt: skip
    rows = store.scan(
        ["phy_offset"], topic=topics, queue_id=queue_ids, tags=tags, begin=begin, end=end, begin_phy_offset=begin_phy,
        end_phy_offset=end_phy,
    ).read_all()  # fmt: skip
    assert rows.column(0).to_pylist() == [message.phy_offset for message in messages if chosen.has(message)]


def test_what_it_says_of_a_tags_code_never_hides_a_message(store):
    # "Aa" and "BB" have the same hash, so that only the text tells them apart.
    for tags in ("Aa", "BB", "C", "Aa || C", "nobody", None):
        chosen = Selection(("T0",), (0,), tags)
        queue = store.queues.find("T0", 0)
        units = list(queue.read(0, 100))
        sure = [store.message_at(unit.phy_offset) for unit in units if chosen.may_have_code(queue.tags_code(unit))]
        found = store.get_message("T0", 0, 0, 100, tags).messages
        assert [each for each in sure if chosen.has(each)] == found == store.get_message("T0", 0, 0, 100, chosen.tags).messages
        assert {each.tags for each in found} <= (set(chosen.tags) if chosen.tags else {None, "Aa", "BB", "C"})


def test_what_it_cannot_be_is_named():
    for wrong, name in (({"topics": (1,)}, "topics"), ({"keys": 5}, "keys"), ({"queue_ids": (2**31,)}, "queue_ids"),
                        ({"begin_phy_offset": "x"}, "begin_phy_offset"), ({"index_type": "X"}, "index_type"),
                        ({"begin_queue_offset": 1}, "a range of queue offsets needs a topic")):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=name):
            Selection(**wrong)
    # A predicate may name any time; who gives one by hand is asked whether seconds were meant.
    assert Selection(begin=1_700_000_000).times[0] == 1_700_000_000
    with pytest.raises(ValueError, match="looks like seconds"):
        Selection(begin=1_700_000_000).check_times()
