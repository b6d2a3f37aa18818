"""The short ways of put, get and query: a compiled answer for the usual call, the method as written for all others.

Owns that both ways are one call to whoever makes it: signature, arguments by name, subclasses, errors, a store that
closes, attributes of messages that somebody changed.  What they answer is compared in test_reading.py, test_model.py.
"""

from __future__ import annotations

import threading

import pytest

from rmqstore import Message, MessageExt, MessageStore, StoreConfig
from rmqstore.errors import StoreClosedError, StorePoisonedError
from rmqstore.store.results import GetMessageResult, PutResult, QueryResult

SMALL = {"mapped_file_size_commit_log": 1 << 20, "max_hash_slot_num": 100, "max_index_num": 4000}


@pytest.fixture
def store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**SMALL)) as opened:
        opened.put_messages([Message("T", b"%d" % i, keys=[f"k{i}"], tags="ab"[i % 2]) for i in range(40)])
        opened.put_message(Message("T", b"last", keys=["k40"]))
        yield opened


def test_arguments_by_place_and_by_name_are_the_same(store):
    gets = [
        store.get_message("T", 0, 3, 5),
        store.get_message("T", 0, 3, max_num=5),
        store.get_message("T", 0, queue_offset=3, max_num=5),
        store.get_message("T", queue_id=0, queue_offset=3, max_num=5),
        store.get_message(topic="T", queue_id=0, queue_offset=3, max_num=5),
        # Not in the method's order, or one left out: the long way takes them.
        store.get_message("T", max_num=5, queue_offset=3),
        store.get_message("T", 0, max_num=5, queue_offset=3),
        store.get_message("T", 0, 3, 5, None),
        store.get_message("T", 0, 3, max_num=5, max_bytes=None),
        MessageStore.get_message(store, "T", 0, 3, 5),
        store.get_message(*["T", 0, 3], **{"max_num": 5}),
    ]
    assert all(got == gets[0] for got in gets)
    assert [message.body for message in gets[0]] == [b"3", b"4", b"5", b"6", b"7"]
    found = [
        store.query_message("T", "k7", 3),
        store.query_message("T", "k7", max_num=3),
        store.query_message("T", "k7"),
        store.query_message(topic="T", key="k7"),
        store.query_message("T", key="k7"),
        store.query_message(key="k7", topic="T"),
    ]
    assert all(each == found[0] and type(each) is QueryResult and not each.truncated for each in found)
    assert [message.body for message in found[0]] == [b"7"] and found[0].complete
    first = store.put_message(Message("T", b"x"), 0).queue_offset
    assert store.put_message(Message("T", b"x"), queue_id=0).queue_offset == first + 1
    assert type(store.put_message(message=Message("T", b"x"))) is PutResult


def test_wrong_arguments_are_refused_as_a_function_refuses_them(store):
    for call in (
        lambda: store.get_message(),
        lambda: store.query_message("T"),
        lambda: store.query_message("T", "k", 1, 2, 3, 4, 5, 6),
        lambda: store.query_message("T", "k", keys=1),
        lambda: store.put_message(),
        lambda: store.get_message("T", topic="T"),
    ):
        with pytest.raises(TypeError, match=r"(get|query|put)_message\(\)"):
            call()
    with pytest.raises(AttributeError):
        MessageStore.query_message(object(), "T", "k")
    unfinished = MessageStore.__new__(MessageStore)
    with pytest.raises(AttributeError):
        unfinished.query_message("T", "k")


def test_what_is_found_is_what_is_there(store):
    assert store.query_message("T", "nobody") == [] and store.query_message("U", "k1") == []
    assert store.query_message("T", "k1", 0).truncated and store.query_message("T", "k1", max_num=0) == []
    store.put_messages([Message("T", b"s%d" % i, keys=["same", f"other{i}"]) for i in range(5)])
    assert [message.body for message in store.query_message("T", "same")] == [b"s4", b"s3", b"s2", b"s1", b"s0"]
    two = store.query_message("T", "same", 2)
    assert [message.body for message in two] == [b"s4", b"s3"] and two.truncated
    assert [message.body for message in store.query_message("T", "other2")] == [b"s2"]
    got = store.get_message("T", 0, 0, 1)
    assert type(got) is GetMessageResult
    assert (got.min_queue_offset, got.max_queue_offset, got.next_queue_offset) == (0, 46, 1)


def test_two_keys_of_one_hash_are_told_apart(tmp_path):
    # "Aa" and "BB" have one hash in Java.
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**SMALL)) as store:
        for key in ("Aa", "BB", "AaAa", "BBBB", "AaBB"):
            store.put_message(Message("T", key.encode(), keys=[key]))
        for key in ("Aa", "BB", "AaAa", "BBBB", "AaBB"):
            assert [message.body for message in store.query_message("T", key)] == [key.encode()]
        assert store.query_message("T", "BBAa") == []


def test_a_subclass_may_have_its_own(tmp_path):
    class Counting(MessageStore):
        asked = 0

        def query_message(self, topic, key, *rest, **named):
            self.asked += 1
            return super().query_message(topic, key, *rest, **named)

    with Counting.open(tmp_path / "store", config=StoreConfig(**SMALL)) as store:
        store.put_message(Message("T", b"x", keys=["k"]))
        assert [message.body for message in store.query_message("T", "k")] == [b"x"] and store.asked == 1


def test_a_closed_store_answers_nothing(store):
    get, query, put = store.get_message, store.query_message, store.put_message
    assert get("T") and query("T", "k1")
    store.close()
    for call in (lambda: get("T"), lambda: query("T", "k1"), lambda: put(Message("T", b"x"))):
        with pytest.raises(StoreClosedError):
            call()


def test_a_clock_that_fails_changes_nothing_and_one_that_is_no_clock_too(tmp_path):
    times = [1, 2]
    config = StoreConfig(**SMALL, clock=lambda: times.pop() if times else "now")
    with MessageStore.open(tmp_path / "store", config=config) as store:
        store.put_message(Message("T", b"1"))
        store.put_message(Message("T", b"2"))
        with pytest.raises(TypeError):
            store.put_message(Message("T", b"3"))
        times.append(9)
        assert store.put_message(Message("T", b"4")).queue_offset == 2


def test_a_clock_that_was_set_back_is_asked_once_for_a_put(tmp_path):
    # The short way has asked it when it leaves such a put to the method.
    times = [10_000_000, 20_000_000, 5_000_000, 5_000_001, 30_000_000, 4_000_000, 4_000_001]
    left = iter(times)
    config = StoreConfig(**SMALL, clock=lambda: next(left))
    with MessageStore.open(tmp_path / "store", config=config) as store:
        told = [store.put_message(Message("T", b"x", keys=["k"])).store_timestamp for _ in times]
        left = iter([1] * 10)
        assert told == times
        assert [message.store_timestamp for message in store.messages()] == times


def test_a_put_that_fails_while_it_writes_poisons_the_store(store):
    with pytest.raises(StorePoisonedError):
        store._state.fail(OSError("the disk is gone"))
        assert store._state.appender is None
        store.put_message(Message("T", b"x"))
    assert store.get_message("T", 0, 40, 1).messages[0].body == b"last"


def test_who_waits_is_woken(store):
    woken = threading.Event()
    end = store.max_queue_offset("T")
    waiter = threading.Thread(
        target=lambda: store.wait_for_messages(lambda: store.max_queue_offset("T") > end, 30) and woken.set()
    )
    waiter.start()
    while not store._state.waiting:
        pass
    store.put_message(Message("T", b"x"))
    waiter.join(240)
    assert woken.is_set()


def test_messages_take_the_place_of_those_that_are_gone(store):
    page = store.get_message("T", 0, 0, 40)
    assert page.messages[3].properties == {"KEYS": "k3", "TAGS": "b"}
    kept = page.messages[5]
    del page
    for _ in range(3):
        for at in range(0, 40, 4):
            messages = store.get_message("T", 0, at, 4).messages
            assert [message.keys for message in messages] == [[f"k{i}"] for i in range(at, at + 4)]
            assert [message.tags for message in messages] == ["ab"[i % 2] for i in range(at, at + 4)]
            messages[0].properties["TAGS"] = "other"
            assert messages[0].tags == "other"
    assert (kept.body, kept.tags, kept.properties) == (b"5", "b", {"KEYS": "k5", "TAGS": "b"})


@pytest.mark.parametrize(
    "texts",
    [
        [b"KEYS\x01a b\x02TAGS\x01t\x02", b"KEYS\x01a b\x02TAGS\x01u\x02", b"TAGS\x01t\x02KEYS\x01a b\x02"],
        [b"K\x01\x02KEYS\x01a\x02TAGS\x01", b"KEYS\x01a b\x02TAGS\x01t\x02"],
        [b"KEYS\x01k\x02KEYS\x01l\x02", b"KEYS\x01k\x02KEYS\x01m\x02", b"KEYS\x01k\x01KEYS\x01m\x02"],
        [b"TAGS\x01\xc3\xa9\x02", b"TAGS\x01ab\x02", b"TAGS\x01\xff\xfe\x02"],
        [b"UNIQ_KEY\x01" + b"u" * 60 + b"\x02TAGS\x01t\x02", b"UNIQ_KEY\x01" + b"v" * 60 + b"\x02TAGX\x01t\x02"],
        [b"UNIQ_KEY\x01" + b"u" * 160 + b"\x02TAGS\x01t\x02", b"\x02" * 176, b""],
    ],
)
def test_properties_are_told_apart_whatever_came_before(texts):
    # Texts of one length in turn, so often that their layouts are learnt, and given up again.
    for text in texts * 60:
        message = MessageExt(
            (100, 1, 0, 0, 0, 0, 0, 0, 0, bytes(8), 0, bytes(8), 0, 0, b"", "T", text, True)
        )  # fmt: skip
        keys, tags, unique_key = message.keys, message.tags, message.unique_key
        parsed = message.properties
        assert tags == parsed.get("TAGS") and unique_key == parsed.get("UNIQ_KEY")
        assert keys == [key for key in parsed.get("KEYS", "").split(" ") if key]
