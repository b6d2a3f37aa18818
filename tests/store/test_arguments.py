"""Times and choices as callers give them: numbers and datetimes are one, seconds are refused, choices have their types.

Owns `rmqstore.arguments` and that every call of a store that takes a store time goes through it.
"""

from __future__ import annotations

import datetime
import enum
import math
import os
import re
import time
import typing
from decimal import Decimal

import numpy as np
import pytest

from rmqstore import ConsumerOffsets, Message, MessageStore, OffsetOutOfRangeError, StoreConfig, arguments, verify
from rmqstore.arguments import Boundary, IndexType, Recovery, milliseconds
from rmqstore.rabbitmq import Message as RabbitMessage
from rmqstore.selection import Selection
from rmqstore.store.recovery import RECOVERY_MODES

UTC = datetime.timezone.utc
START = 1_700_000_000_000
SMALL = {"mapped_file_size_commit_log": 1 << 20, "max_hash_slot_num": 100, "max_index_num": 4000}


def moment(ms: int, zone: datetime.tzinfo | None = UTC, microseconds: int = 0) -> datetime.datetime:
    """The time `ms` after the epoch in a zone, None for naive local time."""
    aware = datetime.datetime(1970, 1, 1, tzinfo=UTC) + datetime.timedelta(milliseconds=ms, microseconds=microseconds)
    return aware.astimezone(zone) if zone is not None else aware.astimezone().replace(tzinfo=None)


@pytest.fixture
def store(tmp_path):
    times = iter(range(START, START + 1000))
    config = StoreConfig(**SMALL, clock=lambda: next(times))
    with MessageStore.open(tmp_path / "store", config=config) as opened:
        for i in range(10):
            opened.put_message(Message("T", b"%d" % i, keys=["k"]))
        yield opened


@pytest.mark.parametrize("value", [0, 1000, -5, 999_999_999, 3_000_000_000, START, 2**63, 1.5, float("inf"), True])
def test_numbers_stay_what_they_are(value):
    assert milliseconds(value, "begin") is value


def test_datetimes_are_exact_in_every_zone():
    for ms in (START, 0, -1, 253_402_300_799_999, 1_700_000_000_001):
        for hours in (-11, 0, 5.5):
            zone = datetime.timezone(datetime.timedelta(hours=hours))
            if 0 <= ms < 10**13:
                assert milliseconds(moment(ms, zone), "t") == ms
        assert milliseconds(moment(ms), "t") == ms and milliseconds(moment(ms), "t", up=True) == ms
    assert milliseconds(moment(START, microseconds=1), "t") == START
    assert milliseconds(moment(START, microseconds=1), "t", up=True) == START + 1
    assert milliseconds(moment(START, microseconds=-1), "t") == START - 1


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/St_Johns"])
def test_a_naive_datetime_is_local_time(zone, monkeypatch):
    if not hasattr(time, "tzset"):
        pytest.skip("this system cannot change its zone")
    had = os.environ.get("TZ")
    try:
        os.environ["TZ"] = zone
        time.tzset()
        assert milliseconds(moment(START, None), "t") == START
        assert milliseconds(datetime.datetime.fromtimestamp(START / 1000), "t") == START
    finally:
        os.environ.pop("TZ") if had is None else os.environ.update(TZ=had)
        time.tzset()


@pytest.mark.parametrize("value", [1_000_000_000, 1_700_000_000, 2_999_999_999, 1_700_000_000.25])
def test_seconds_are_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^end_timestamp is [0-9.]+, which looks like seconds: give ms"):
        milliseconds(value, "end_timestamp")


@pytest.mark.parametrize("value", ["2024-01-01", b"x", None, datetime.date(2024, 1, 1), [1], datetime.timedelta(1)])
def test_what_is_no_time_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^begin is .*; give ms since epoch, or a datetime$"):
        milliseconds(value, "begin")


def calls(store):
    """Every call that takes a store time, with its answers after and before a time."""

    def bodies(batches):
        return [body for batch in batches for body in batch.column("body").to_pylist()]

    return {
        "query_message": (
            lambda t: [m.body for m in store.query_message("T", "k", begin=t)],
            lambda t: [m.body for m in store.query_message("T", "k", end=t)],
        ),
        "query_message compat": (
            lambda t: [m.body for m in store.query_message("T", "k", begin=t, compat=True)],
            lambda t: [m.body for m in store.query_message("T", "k", end=t, compat=True)],
        ),
        "query_table": (
            lambda t: bodies([store.query_table(["k"], "T", ["body"], begin=t)]),
            lambda t: bodies([store.query_table(["k"], "T", ["body"], end=t)]),
        ),
        "query_offsets": (
            lambda t: store.query_offsets("T", "k", begin=t),
            lambda t: store.query_offsets("T", "k", end=t),
        ),
        "scan": (
            lambda t: bodies(store.scan(["body"], begin=t)),
            lambda t: bodies(store.scan(["body"], end=t)),
        ),
        "offset_by_time": (
            lambda t: store.offset_by_time("T", 0, t),
            lambda t: store.offset_by_time("T", 0, t, "upper"),
        ),
        "export": (
            lambda t: Selection(begin=t).check_times().times[0],
            lambda t: Selection(end=t).check_times().times[1],
        ),
    }


@pytest.mark.parametrize("name", list(calls(None)))
def test_every_call_takes_datetimes_and_refuses_seconds(store, name):
    begins, ends = calls(store)[name]
    for ms in (START, START + 4, START + 9, START + 20):
        for given in (moment(ms), moment(ms, None), moment(ms, datetime.timezone(datetime.timedelta(hours=-7)))):
            assert begins(given) == begins(ms), given
            assert ends(given) == ends(ms), given
    if name in ("query_message", "query_table", "scan", "export", "offset_by_time"):
        # Between two milliseconds: inwards.
        assert begins(moment(START + 4, microseconds=300)) == begins(START + 5) != begins(START + 4)
        assert ends(moment(START + 4, microseconds=300)) == ends(START + 4) != ends(START + 5)
    for ask in (begins, ends):
        for seconds in (START // 1000, START / 1000):
            with pytest.raises(ValueError, match="looks like seconds"):
                ask(seconds)


def test_a_group_begins_at_a_datetime(store):
    def first(consume_from, group):
        with store.consume("T", group, consume_from=consume_from, timeout=0) as consumer:
            return next(consumer).body

    assert first(START + 4, "a") == first(moment(START + 4), "b") == first(moment(START + 4, None), "c") == b"4"
    assert first(moment(START + 4, microseconds=1), "d") == b"5"
    for wrong in (START // 1000, "middle", -1, True):
        with pytest.raises(ValueError, match="consume_from is"):
            store.consume("T", "e", consume_from=wrong)


def test_a_born_time_may_be_a_datetime(store):
    import pyarrow as pa

    message = Message("T", b"x", born_timestamp=moment(START + 5, None))
    assert message.born_timestamp == START + 5
    put = store.put_message(message)
    assert store.message_at(put.phy_offset).born_timestamp == START + 5
    puts = store.put_table(pa.table({"body": [b"y"]}), topic="T", born_timestamp=moment(START + 6))
    assert store.message_at(int(puts.phy_offset[0])).born_timestamp == START + 6
    assert store.check_table(pa.table({"body": [b"y"]}), topic="T", born_timestamp=moment(START + 6)) == 1


def test_choices_are_types_that_say_what_is_taken(store, tmp_path):
    assert RECOVERY_MODES == typing.get_args(Recovery) == ("strict", "truncate", "skip")
    names = vars(arguments) | vars(typing)
    for method, parameter, choice in (
        ("open", "recovery", Recovery),
        ("query_message", "index_type", IndexType | None),
        ("query_table", "index_type", IndexType | None),
        ("query_offsets", "index_type", IndexType | None),
        ("offset_by_time", "boundary", Boundary),
    ):
        function = getattr(MessageStore, method)
        function = getattr(function, "__wrapped__", getattr(function, "__func__", function))
        assert eval(function.__annotations__[parameter], names) == choice, method
    for index_type in (None, *typing.get_args(IndexType)):
        store.query_message("T", "k", index_type=index_type)
        store.query_table(["k"], "T", ["body"], index_type=index_type)
        store.query_offsets("T", "k", index_type=index_type)
    for boundary in typing.get_args(Boundary):
        store.offset_by_time("T", 0, START, boundary)
    for recovery in typing.get_args(Recovery):
        MessageStore.open(tmp_path / recovery, config=StoreConfig(**SMALL), recovery=recovery).close()
    for ask in (
        lambda: store.query_message("T", "k", index_type="X"),
        lambda: store.query_table(["k"], "T", index_type="X"),
        lambda: store.query_offsets("T", "k", index_type="X"),
        lambda: store.offset_by_time("T", 0, START, "middle"),
        lambda: MessageStore.open(tmp_path / "other", recovery="X"),
    ):
        with pytest.raises(ValueError, match=r"is '(X|middle)'"):
            ask()


class Word(str, enum.Enum):
    TOPIC, KEY, TAG, NAME, VALUE = "T", "k", "t", "name", "value"
    UNIQUE = "7F0000010000518C0000000000000001"


@pytest.mark.parametrize("text", [lambda word: word, lambda word: np.str_(word.value)], ids=["enum", "numpy"])
@pytest.mark.parametrize("put", ["put_message", "put_messages", "put_message_batch"])
def test_texts_that_are_of_a_class_made_from_str_are_those_texts(tmp_path, text, put):
    """The core takes str alone; it refused others after the record was written, and the store refused writes from then on."""
    properties = {text(Word.NAME): text(Word.VALUE), "UNIQ_KEY": text(Word.UNIQUE)}
    message = Message(text(Word.TOPIC), b"0", keys=text(Word.KEY), tags=text(Word.TAG), properties=properties)
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**SMALL)) as store:
        getattr(store, put)(message if put == "put_message" else [message, message])
        (found, *_) = store.get_message("T").messages
        plain = {"KEYS": "k", "TAGS": "t", "name": "value", "UNIQ_KEY": Word.UNIQUE.value}
        assert (found.topic, found.properties) == ("T", plain) and type(found.properties["name"]) is str
        topic = text(Word.TOPIC)
        for key, kind in ((text(Word.KEY), None), (text(Word.UNIQUE), "U"), (text(Word.TAG), "T")):
            assert store.query_message(topic, key, index_type=kind)
            assert store.query_message(topic, key, index_type=kind, compat=True)
            assert store.query_offsets(topic, key, index_type=kind)
        assert store.message_by_id(text(Word.UNIQUE)).body == b"0"
        assert store.get_message(text(Word.TOPIC), tags=text(Word.TAG)).messages
        store.put_message(Message("T", b"1"))


@pytest.mark.parametrize("wait", ["wait_for_messages", "consume"])
def test_nobody_waits_for_a_time_that_is_no_number(store, wait):
    with pytest.raises(ValueError, match="timeout is nan"):
        store.wait_for_messages(lambda: False, math.nan) if wait == "wait_for_messages" else store.consume(
            "T", "g", timeout=math.nan
        )


def test_times_without_an_end(store):
    for low, high, num in ((-math.inf, math.inf, 10), (math.inf, None, 0), (None, -math.inf, 0), (-math.inf, START, 1)):
        assert len(store.query_message("T", "k", begin=low, end=high)) == num
        assert store.query_table(["k"], "T", ["body"], begin=low, end=high).num_rows == num
        assert store.scan(["body"], begin=low, end=high).read_all().num_rows == num


def test_a_store_stays_where_it_is_after_a_change_of_the_working_directory(tmp_path, monkeypatch):
    """A daemon changes to the root; below the new directory there is a store of the same name."""
    for name in "ab":
        (tmp_path / name).mkdir()
        with MessageStore.open(tmp_path / name / "store", config=StoreConfig(**SMALL)) as store:
            store.put_message(Message("T", name.encode(), keys=["k"]))
    before = {path: path.read_bytes() for path in (tmp_path / "b").rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path / "a")
    config = StoreConfig(**SMALL)
    with MessageStore.open("store", config=config) as writer, MessageStore.open("store", read_only=True) as reader:
        offsets = ConsumerOffsets.load("offsets.json", read_only=False)
        monkeypatch.chdir(tmp_path / "b")
        for number in range(30):
            writer.put_message(Message("T", b"a" * 100_000, keys=["new"]), number % 3)
        assert {each.body[:1] for each in reader.messages()} == {b"a"} and len(reader.query_message("T", "new")) == 30
        assert reader.query_message("T", "k")[0].body == b"a"
        offsets.commit("g", "T", 0, 5)
        offsets.persist()
    assert {path: path.read_bytes() for path in (tmp_path / "b").rglob("*") if path.is_file()} == before
    assert (tmp_path / "a" / "offsets.json").exists()
    with MessageStore.open(tmp_path / "a" / "store", read_only=True) as store:
        assert sum(1 for _ in store.messages()) == 31 and list(verify(tmp_path / "a" / "store")) == []


@pytest.mark.parametrize("text", [Word.KEY, np.str_("k")], ids=["enum", "numpy"])
def test_progress_by_names_of_a_class_made_from_str(tmp_path, text):
    offsets = ConsumerOffsets.load(tmp_path / "offsets.json", read_only=False)
    offsets.commit(text, "T", 0, 1)
    offsets.commit("g", text, 0, 2)
    offsets.persist()
    again = ConsumerOffsets.load(tmp_path / "offsets.json", read_only=True)
    assert again.offset_table == {"T@k": {0: 1}, "k@g": {0: 2}}


# --------------------------------------------------------------------------------------- texts and whole numbers


NO_NUMBERS = [None, "x", b"1", 1.5, math.nan, [1], ["x"]]
NO_TEXTS = [5, 1.5, math.nan, True, b"T", [None], ["T", 5], [b"T"]]


def odd_calls(store):
    """By parameter the calls that take it; a number that is not asked for may also be None."""
    number = {
        "queue_id": [lambda value: store.scan(queue_id=value), lambda value: store.get_table("T", value)],
        "begin_phy_offset": [
            lambda value: store.scan(begin_phy_offset=value),
            lambda value: next(store.messages(value)),
        ],
        "end_phy_offset": [
            lambda value: store.scan(end_phy_offset=value),
            lambda value: next(store.messages(0, value)),
        ],
        "batch_size": [lambda value: store.scan(batch_size=value)],
        "queue_offset": [lambda value: store.get_table("T", 0, value), lambda value: store.get_message("T", 0, value)],
        "max_num": [
            lambda value: store.get_table("T", 0, 0, value),
            lambda value: store.get_message("T", 0, 0, value),
            lambda value: store.query_message("T", "k", value),
            lambda value: store.query_offsets("T", "k", value, 0, 1),
            lambda value: store.query_table(["k"], "T", max_num=value),
        ],
        "max_bytes": [lambda value: store.get_message("T", 0, 0, 1, max_bytes=value)],
        "max_log_bytes": [lambda value: store.query_message("T", "k", max_log_bytes=value)],
        "queue_ids": [lambda value: Selection(queue_ids=(value,))],
        "begin_queue_offset": [lambda value: Selection(topics=("T",), begin_queue_offset=value)],
    }
    text = {
        "topic": [
            lambda value: store.scan(topic=value),
            lambda value: store.query_table(["k"], value),
            lambda value: store.query_message(value, "k"),
            lambda value: store.get_message(value),
            lambda value: store.get_table(value),
            lambda value: store.message_by_id("0" * 32, value),
        ],
        "tags": [
            lambda value: store.scan(tags=value),
            lambda value: store.get_message("T", tags=value),
            lambda value: store.get_table("T", tags=value),
            lambda value: Selection(tags=value),
        ],
        "key": [lambda value: store.query_message("T", value)],
        "topics": [lambda value: Selection(topics=value)],
        "keys": [lambda value: Selection(keys=value), lambda value: store.query_table(value, "T")],
    }
    return number, text


def test_what_is_no_whole_number_or_no_text_is_named(store):
    pytest.importorskip("pyarrow")
    numbers, texts = odd_calls(store)
    arrays = (texts["topic"][1], texts["keys"][1])
    for wrong, by_name in ((NO_NUMBERS, numbers), (NO_TEXTS, texts)):
        for name, each in by_name.items():
            for call in each:
                for value in wrong:
                    if value is None or (value == [1] and call in (numbers["queue_id"][0], numbers["queue_ids"][0])):
                        continue  # Of many parameters that is a value.
                    with pytest.raises((TypeError, ValueError)) as caught:
                        call(value)
                    # Of an array of Arrow it is said of one of its values.
                    words = (f"{name} is ", f"{name.removesuffix('s')} ") if call in arrays else (f"{name} is ",)
                    assert any(word in str(caught.value) for word in words), (value, caught.value)


@pytest.mark.parametrize("number", [2**31, 2**63, 2**64, -(2**31) - 1, -(2**63) - 1])
def test_a_queue_id_of_more_than_32_bits_is_named(store, number):
    pytest.importorskip("pyarrow")
    for call in (
        lambda: store.scan(queue_id=number),
        lambda: store.scan(queue_id=[0, number]),
        lambda: Selection(queue_ids=(number,)),
    ):
        with pytest.raises(ValueError, match=rf"queue_ids? is {number}; give an int from -2\*\*31 to 2\*\*31 - 1"):
            call()


@pytest.mark.parametrize("number", [10, 2**31, 2**63 - 1, 2**63, 2**64])
def test_more_than_there_can_be_is_all(store, number):
    pytest.importorskip("pyarrow")
    assert store.get_table("T", 0, 0, number).num_rows == 10
    assert store.query_table(["k"], "T", max_num=number).num_rows == 10
    assert len(store.get_message("T", 0, 0, number).messages) == 10
    assert len(store.query_message("T", "k", number)) == 10
    assert store.scan(end_phy_offset=number * 10**6).read_all().num_rows == 10


def test_a_batch_of_more_rows_than_there_can_be(store):
    pytest.importorskip("pyarrow")
    for number in (0, -1, 2**30 + 1, 2**63, 2**64):
        with pytest.raises(ValueError, match=rf"batch_size is {number} rows; give 1 to 2\*\*30"):
            store.scan(batch_size=number)


def test_whole_numbers_and_texts_of_others(store):
    pytest.importorskip("pyarrow")
    assert store.scan(queue_id=np.array([0, 1]), topic=np.array(["T"])).read_all().num_rows == 10
    assert store.get_table(np.str_("T"), np.int32(0), np.int64(2), np.float64(3)).num_rows == 3
    assert Selection(topics=iter(["T"]), keys="k", queue_ids=[np.int64(1)]) == Selection(("T",), (1,), None, ("k",))


def test_a_time_that_is_no_number_is_named(store):
    for call in (
        lambda: store.query_message("T", "k", begin=math.nan),
        lambda: store.query_offsets("T", "k", 1, math.nan, 1),
    ):
        with pytest.raises(ValueError, match="begin is nan; give ms since epoch, or a datetime"):
            call()
    with pytest.raises(TypeError, match="begin is None; give ms since epoch"):
        store.query_offsets("T", "k", 1, None, 1)


def test_calls_for_bounds_places_and_consumers_name_what_is_odd(store):
    numbers = {
        "phy_offset": [store.message_at],
        "queue_id": [
            lambda value: store.min_queue_offset("T", value),
            lambda value: store.max_queue_offset("T", value),
            lambda value: store.offset_by_time("T", value, START),
        ],
        "max_num": [lambda value: store.consume("T", "g", max_num=value)],
        "queue_ids": [lambda value: store.consume("T", "g", queue_ids=[0, value])],
    }
    words = {
        "topic": [
            store.queue_ids,
            store.min_queue_offset,
            store.max_queue_offset,
            lambda value: store.offset_by_time(value, 0, START),
            lambda value: store.consume(value, "g"),
        ],
        "group": [lambda value: store.consume("T", value)],
        "msg_id": [store.message_by_id, store.phy_offset_by_id],
    }
    for wrong, by_name in ((NO_NUMBERS, numbers), ([None, *NO_TEXTS], words)):
        for name, each in by_name.items():
            for call in each:
                for value in wrong:
                    with pytest.raises((TypeError, ValueError), match=rf"^{name} is "):
                        call(value)
    for value in (5, b"a", [5]):
        with pytest.raises(TypeError, match=r"^tags is "):
            store.consume("T", "g", tags=value)
    for value in ("1", b"1", [1]):
        for call in (lambda v: store.consume("T", "g", timeout=v), lambda v: store.wait_for_messages(bool, v)):
            with pytest.raises(TypeError, match=r"^timeout is "):
                call(value)
    with pytest.raises(ValueError, match=r"queue_ids is 1180591620717411303424; give an int from"):
        store.consume("T", "g", queue_ids=[2**70])


def test_bounds_and_places_by_numbers_of_numpy(store):
    for kind in (np.int32, np.int64, np.uint8, np.float64, bool):
        assert store.message_at(kind(0)).body == b"0"
        assert (store.min_queue_offset("T", kind(0)), store.max_queue_offset(np.str_("T"), kind(0))) == (0, 10)
        assert store.offset_by_time("T", kind(0), START + 3) == 3
    assert store.queue_ids(np.str_("T")) == [0]
    with store.consume(np.str_("T"), "g", queue_ids=np.array([0]), max_num=np.int64(3), timeout=np.float32(0)) as consumer:
        assert [message.body for message in consumer] == [b"%d" % i for i in range(10)]
    for number in (2**70, -(2**70), np.uint64(2**63 + 1)):
        assert store.max_queue_offset("T", number) == 0
        with pytest.raises(OffsetOutOfRangeError):
            store.message_at(number)


NANS = [Decimal("NaN"), Decimal("sNaN")]


@pytest.mark.parametrize("value", NANS, ids=str)
def test_numbers_of_the_module_decimal_that_are_none(store, value):
    """They are compared with nothing: `decimal.InvalidOperation` came out of every call."""
    pytest.importorskip("pyarrow")
    for begins, ends in calls(store).values():
        for ask in (begins, ends):
            with pytest.raises(ValueError, match=r"^\w+ is Decimal\('s?NaN'\); give ms since epoch, or a datetime"):
                ask(value)
    for name, asks in odd_calls(store)[0].items():
        for ask in asks:
            with pytest.raises((TypeError, ValueError), match=f"{name} is "):
                ask(value)
    with pytest.raises(ValueError, match="timeout is "):
        store.wait_for_messages(lambda: False, value)


@pytest.mark.parametrize("value", [math.inf, Decimal("Infinity")])
def test_raw_offsets_of_all_times(store, value):
    assert len(store.query_offsets("T", "k", 64, -value, value)) == 10
    assert len(store.query_message("T", "k", begin=-value, end=value)) == 10


def test_objects_of_another_kind_are_named(store):
    """Each was an AttributeError from somewhere within."""
    offsets = ConsumerOffsets.load("nowhere.json", read_only=True)
    for call, text in (
        (lambda: Message("T", b"x", properties="abc"), "properties is 'abc': give a mapping"),
        (lambda: store.put_message_batch("abc"), "messages holds a str, which is not a Message"),
        (lambda: store.put_message_batch([Message("T", b"x"), 5]), "messages holds a int, which is not a Message"),
        (lambda: store.consume("T", "g", offsets="x"), "offsets is 'x'; give ConsumerOffsets"),
        (lambda: offsets.get(5, "T", 0), "group is 5; give a text"),
        (lambda: RabbitMessage(b"x", vhost=5), "vhost is a int, not a str"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            call()
    assert store.max_queue_offset("T", 0) == 10
