"""Messages as read: the fast ways out of a store give exactly what the slow ones give.

Owns the comparison of `StoredMessage` with the tuple of `decode_record`, of a page that is read in one call with the walk
unit by unit, and of the key search with the comparison of decoded messages; on stores of real brokers, on the same stores
with bytes changed, and with several threads at once.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import random
import shutil
import sys
import threading
import time

import golden
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqstore import Message, MessageStore, StoreConfig, _core
from rmqstore._core import Verdict
from rmqstore.commitlog.log_walk import Blank, Damage
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.errors import OffsetOutOfRangeError, StoreClosedError, StoreError
from rmqstore.index.key_source import SoughtKeys
from rmqstore.message import MessageExt, _read, parse_properties, tags_code
from rmqstore.selection import Selection, of_key, of_queue
from rmqstore.sources import Joined, Part
from rmqstore.store.local_queue import EXAMINED, LocalQueue
from rmqstore.store.reading import get_from
from rmqstore.store.results import GetMessageResult, QueryResult

FIELDS = (1, 1, 0, 2, 3, 4, 5, 0, 7, b"\x7f\0\0\1\0\0\0\1", 8, b"\x7f\0\0\1\0\0\0\2", 9, 10, b"body", "T", b"", True)
TEXTS = st.lists(
    st.sampled_from(
        [b"KEYS", b"TAGS", b"UNIQ_KEY", b"KEY", b"KEYSS", b"x", b"\x01", b"\x02", b" ", b"\xff", "é".encode()]
    ),
    max_size=14,
).map(b"".join)


def message_with(properties: bytes) -> MessageExt:
    fields = list(FIELDS)
    fields[16] = properties
    return MessageExt(tuple(fields))


@given(TEXTS)
def test_keys_and_tags_are_those_of_the_parsed_properties(properties):
    message, parsed = message_with(properties), parse_properties(properties)
    assert message.keys == [key for key in parsed.get("KEYS", "").split(" ") if key]
    assert message.tags == parsed.get("TAGS")
    assert message.unique_key == parsed.get("UNIQ_KEY")
    assert message.properties == parsed and message.properties is message.properties
    # A change of the dict changes the message.
    message.properties.update(KEYS="a  b", TAGS="other")
    assert (message.keys, message.tags) == (["a", "b"], "other")


def test_a_message_is_its_record():
    message = MessageExt(FIELDS)
    assert message.__reduce__() == (MessageExt, (FIELDS,))
    for other in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert type(other) is MessageExt and other == message and hash(other) == hash(message)
    for place, other in enumerate((2, 2, 1, 3, 4, 5, 6, 1, 8, b"h", 9, b"h", 10, 11, b"", "U", b"p", False)):
        assert MessageExt((*FIELDS[:place], other, *FIELDS[place + 1 :])) != message, place
    for name in (
        "topic",
        "body",
        "properties",
        "queue_offset",
        "flag",
        "born_host",
        "store_host",
        "corrupt",
        "something",
    ):
        with pytest.raises(AttributeError):
            setattr(message, name, 1)
    for wrong in ((), FIELDS[:-1], (*FIELDS[:15], None, *FIELDS[16:]), (*FIELDS[:14], "text", *FIELDS[15:])):
        with pytest.raises((TypeError, ValueError)):
            MessageExt(wrong)
    with pytest.raises(TypeError):
        MessageExt(None)
    for place in (9, 11):
        with pytest.raises(ValueError, match="8 or 20 bytes"):
            MessageExt((*FIELDS[:place], b"h" * 21, *FIELDS[place + 1 :]))


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    """A store of messages with properties of every length around the one up to which they stand in the message itself."""
    config = StoreConfig(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=10, max_index_num=1000)
    with MessageStore.open(tmp_path_factory.mktemp("lengths") / "store", config=config) as store:
        hosts = {"born_host": "[2001:db8::1]:1", "store_host": "10.0.0.1:2"}, {"store_host": "[2001:db8::2]:3"}, {}
        store.put_messages(
            [
                Message(f"T{n % 3}", b"b" * n, tags="t", properties={"p": "v" * n}, **hosts[n % 3])
                for n in [*range(130), 1000, 32000]
            ]
        )
        yield store


def test_messages_of_every_length(lengths):
    region = lengths.commit_log.files.file(0).region
    records, pos = [], 0
    while isinstance(record := _core.decode_record(region, pos), tuple):
        records.append(record)
        pos += record[0]
    messages, end = _read.read_messages(region, 0, len(region), 0, 1000, len(region))
    assert end == pos and len(messages) == 132
    for message, record in zip(messages, records, strict=True):
        assert type(message) is MessageExt and message._record == record
        assert (message.tags, message.unique_key, message.keys) == ("t", None, [])
        assert message.properties_stored == record[16] and message.topic == record[15] and message.body == record[14]
        for name in ("flag", "sys_flag", "reconsume_times", "prepared_transaction_offset", "born_timestamp"):
            with pytest.raises(AttributeError):
                setattr(message, name, 1)
    assert [message.properties["p"] for message in messages[1:]] == ["v" * len(message.body) for message in messages[1:]]
    assert messages == [MessageExt(record) for record in records]
    assert pickle.loads(pickle.dumps(messages)) == messages


def test_messages_are_freed(lengths):
    # A reference too few ends the process at some time, one too many shows in the counts.
    region = lengths.commit_log.files.file(0).region
    counts = []
    for _ in range(4):
        for message in _read.read_messages(region, 0, len(region), 0, 100, len(region))[0] * 3:
            message.topic, message.body, message.tags, message._record, repr(message)
            message.properties["x"] = "y"
        message = None
        gc.collect()
        counts.append([sys.getrefcount(each) for each in (MessageExt, None, "T0")] + [sys.getallocatedblocks()])
    # Objects that are made once exist after the first round.
    assert all(abs(now - before) < 40 for now, before in zip(counts[-1], counts[1], strict=True)), counts


def test_a_message_that_leads_back_to_itself_is_collected(lengths):
    region = lengths.commit_log.files.file(0).region
    collected = []

    class Note:
        def __del__(self):
            collected.append(1)

    for made in (lambda: _read.read_message(region, 0, 0), lambda: MessageExt(FIELDS)):
        message, note = made(), Note()
        message.properties["note"] = note
        note.message = message
        del message, note
        gc.collect()
    assert len(collected) == 2


@pytest.fixture(scope="module")
def stores(golden_store):
    opened = {}

    def open_store(name):
        if name not in opened:
            opened[name] = MessageStore.open(
                golden_store(name), config=StoreConfig(**golden.geometry(name)), read_only=True
            )
        return opened[name]

    yield open_store
    for store in opened.values():
        store.close()


def slow_entries(store: MessageStore) -> list:
    """The log by way of `decode_record`."""
    log, found = store.commit_log, []
    for entry in log.entries():
        mapped_file = log.files.find(entry.phy_offset)
        base = mapped_file.file_from_offset
        record = _core.decode_record(mapped_file.region, entry.phy_offset - base, -1, log.crc_check)
        if isinstance(entry, MessageExt):
            assert entry._record == record and type(entry) is MessageExt
            assert entry == MessageExt(record)
        else:
            assert isinstance(entry, (Blank, Damage))
            assert not isinstance(record, tuple) or record[6] != entry.phy_offset
        found.append(entry)
    return found


def same_hash(text: str) -> str:
    """Another text with the same Java hash: the first character one higher, the second 31 lower."""
    other = chr(ord(text[0]) + 1) + chr(ord(text[1]) - 31) + text[2:]
    assert tags_code(other) == tags_code(text)
    return other


def same_pages(store: MessageStore, rng: random.Random, rounds: int) -> int:
    """Compare pages of every simple queue; how many messages were in them."""
    texts = sorted({message.tags for message in itertools.islice(store.messages(), 500) if message.tags})
    # A subscription as it should be, one of two tags, and one whose hash fits while the text does not.
    tags = [tuple(texts[:1]), tuple(texts[-2:]), tuple(same_hash(text) for text in texts[:1] if len(text) > 1)]
    count = 0
    for topic, queue_id in store.queues.keys():
        queue = store.queues.find(topic, queue_id)
        if not isinstance(queue, ConsumeQueue):
            continue
        low, high = store._state.bounds(queue)
        starts = range(low, high) if high - low <= rounds else sorted(rng.sample(range(low, high), rounds))
        for at in starts:
            for max_num, max_bytes in ((32, None), (1, None), (0, 100), (3, 1000), (-1, 5000), (2**70, 3000)):
                for wanted in (None, ("nothing has this tag",), *tags):
                    if wanted is None or queue.ext is None:
                        selection = of_queue(topic, queue_id, at, max_num, wanted)
                        source = LocalQueue(queue, store.commit_log)
                        limit = 2**27 if max_bytes is None else max_bytes
                        found = queue.region_of(at, max(EXAMINED, max_num))
                        pulled = source.walk(selection, limit)
                        assert found is None or source.read_units(*found, selection, limit) == pulled, selection
                        page = get_from(Joined([Part(source, low, high)]), selection, max_bytes)
                        assert (page.messages, page.next_queue_offset) == pulled[:2]
                        count += len(page)
                        if wanted is None and max_bytes is None:
                            # Everything lies where the page before was, or the answer is to go the long way.
                            queue.refreshed_at = float("inf")
                            recent = store._state.queue_gets.get(topic, queue_id, at, max_num)
                            assert recent is None or recent == page
                            # A reader looks for more where it would come to the end.
                            seen = not store.read_only or at + max_num <= high
                            assert recent is not None or not seen or crosses_files(store, queue, at, page), (topic, at)
                            queue.refreshed_at = -1.0
    return count


def crosses_files(store: MessageStore, queue: ConsumeQueue, at: int, page: GetMessageResult) -> bool:
    """Return True if a page needs more than one file of units or of the log, or is empty."""
    phy_offsets = {unit.phy_offset // store.commit_log.segment_size for unit in queue.read(at, 800)}
    return not page.messages or len(phy_offsets) > 1


def by_text(store: MessageStore, selection: Selection) -> QueryResult:
    """Find messages by key, comparing decoded texts."""
    source = store._querying.source
    places = dict.fromkeys(next(source.candidates(SoughtKeys.of(selection).at_any_time())).phy_offsets.tolist())
    found = [message for message in map(store.commit_log.look_up, places) if message and selection.has(message)]
    messages = sorted(found[: max(selection.max_num, 0)], key=lambda message: -message.phy_offset)
    return QueryResult(messages, len(found) > max(selection.max_num, 0) and bool(selection.max_num >= 0))


def same_answers(store: MessageStore, rng: random.Random, rounds: int) -> int:
    """Compare queries by key, unique key and tag; how many messages they found."""
    asked = {("T", "nobody", None), ("nobody", "k", "T")}
    times = [0]
    for message in itertools.islice(store.messages(), 3000):
        times.append(message.store_timestamp)
        for key in [*message.keys, *filter(None, [message.unique_key])]:
            asked |= {(message.topic, key, kind) for kind in (None, "U", "K")}
        if message.tags:
            asked.add((message.topic, message.tags, "T"))
    chosen = sorted(asked, key=repr)
    count = 0
    for topic, key, kind in rng.sample(chosen, min(rounds, len(chosen))):
        for max_num in (0, 1, 2, 64, 2**70):
            low, high = sorted((rng.choice(times), rng.choice([*times, 2**63 - 1])))
            for begin, end in ((None, None), (low, high), (2**70, None), (None, -(2**70))):
                found = store.query_message(topic, key, max_num, begin, end, index_type=kind)
                expected = by_text(store, of_key(topic, key, max_num, begin, end, kind))
                assert found == expected and found.truncated == expected.truncated, (topic, key, kind, max_num)
                count += len(found)
    return count


@pytest.mark.parametrize("name", golden.STORES)
def test_stores_of_real_brokers(stores, name):
    store, rng = stores(name), random.Random(3)
    assert any(isinstance(entry, MessageExt) for entry in slow_entries(store))
    assert same_pages(store, rng, 12)
    assert same_answers(store, rng, 60)


@pytest.mark.parametrize("name", ["base", "broker"])
@pytest.mark.parametrize("part", ["commitlog", "consumequeue", "index"])
def test_the_same_with_changed_bytes(golden_copy, name, part):
    root, rng = golden_copy(name), random.Random(f"{name} {part}")
    with MessageStore.open(root, config=StoreConfig(**golden.geometry(name)), read_only=True) as store:
        ends = {"commitlog": store.commit_log.max_offset}
    for round_number in range(6):
        for path in sorted((root / part).rglob("*")):
            if path.is_file():
                data = bytearray(path.read_bytes())
                used = len(bytes(data).rstrip(b"\0")) or 1
                for _ in range(min(40, used // 20 + 1)):
                    data[rng.randrange(used)] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
        with MessageStore.open(root, config=StoreConfig(**golden.geometry(name)), read_only=True) as store:
            if part == "commitlog":
                # The end is not searched again, so that everything before it is met.
                store.commit_log.set_end(ends["commitlog"])
                store.commit_log.refresh = lambda: None
            slow_entries(store)
            same_pages(store, rng, 5)
            same_answers(store, rng, 25)
            for phy_offset in rng.sample(
                range(max(store.commit_log.max_offset, 1)), 60 if store.commit_log.max_offset else 1
            ):
                found = store.commit_log.look_up(phy_offset)
                assert found is None or found.phy_offset == phy_offset, round_number


def test_records_one_behind_the_other(stores):
    region = stores("base").commit_log.files.file(0).region
    one_by_one, pos = [], 0
    while isinstance(message := _read.read_message(region, pos, 0), MessageExt):
        one_by_one.append(message)
        pos += message.size
    assert len(one_by_one) > 12
    ends = [message.phy_offset + message.size for message in one_by_one]

    def read(begin, limit=2**62, max_num=2**62, max_bytes=2**62):
        messages, end = _read.read_messages(region, begin, limit, 0, max_num, max_bytes)
        assert end == (messages[-1].phy_offset + messages[-1].size if messages else begin)
        return messages

    assert read(0) == one_by_one and read(ends[3]) == one_by_one[4:]
    assert read(0, max_num=7) == one_by_one[:7] and read(0, max_num=0) == read(0, max_bytes=0) == read(0, limit=0) == []
    for number in (0, 1, 9):
        assert read(0, limit=ends[number]) == read(0, limit=ends[number] - 1) == one_by_one[: number + 1]
        assert read(0, max_bytes=ends[number]) == one_by_one[: number + 1]
        assert read(0, limit=ends[number] + 1) == read(0, max_bytes=ends[number] + 1) == one_by_one[: number + 2]


def test_what_is_no_record_gives_the_verdict(golden_store, stores):
    store = stores("base")
    region = store.commit_log.files.file(0).region
    size = len(region)
    for pos in range(0, size, 7):
        record = _core.decode_record(region, pos)
        message = _read.read_message(region, pos, 0)
        if isinstance(record, tuple):
            assert message._record == record if record[6] == pos else message is Verdict.BAD_PHY_OFFSET
        else:
            assert message is record
        messages, end = _read.read_messages(region, pos, pos + 1, 0, 9, size)
        assert (messages, end) == (
            ([message], pos + message.size) if isinstance(message, MessageExt) else ([], pos)
        )
    for pos in (-1, size + 1, 2**62):
        with pytest.raises(OffsetOutOfRangeError):
            _read.read_message(region, pos, 0)
        with pytest.raises(OffsetOutOfRangeError):
            _read.read_messages(region, pos, size, 0, 1, size)
    for pos, num in ((-1, 1), (0, -1), (size, 1), (0, 2**61), (0, size)):
        with pytest.raises(StoreError):
            _read.read_queued(region, pos, num, region, 0, 0, size, [], 0, 1, 1, 1, None, None, "T", 0, 0)
    assert region.pins == 0


def test_a_search_that_the_caller_leads_astray(stores):
    store = stores("base")
    index = store.index_service.file(store.index_service.names[0])
    message = next(message for message in store.messages() if message.keys)
    region = store.commit_log.files.file(0).region

    def find(region_of):
        # A stream that knows no file, so that the caller is asked for each.
        query = _read.KeyQuery(store.index_service, region_of, 1, _core.FileStream(), math.inf)
        return query.find([index], message.topic, message.keys[0], 0, 0, 2**63 - 1, 64)

    for wrong in (lambda _: (region, 0, 0), lambda _: 5, lambda _: (5, 0, 0, 0), lambda _: 1 / 0):
        with pytest.raises((TypeError, ValueError, ZeroDivisionError)):
            find(wrong)
    for answer in (
        None,
        (None, 0, 0, 0),
        (region, 2**62, 0, 2**63 - 1),
        (region, -(2**62), 0, 2**63 - 1),
        (region, 0, 9, 3),
    ):
        assert not find(lambda _, answer=answer: answer)
    for wrong in ([None], [5], 5):
        with pytest.raises(TypeError):
            _read.KeyQuery(store.index_service, lambda _: None, 1, _core.FileStream(), math.inf).find(
                wrong, "T", "k", 0, 0, 1, 1
            )
    assert index.region.pins == region.pins == 0


@pytest.mark.parametrize("name", ["base", "propcrc", "broker"])
def test_the_short_way_of_a_query_finds_what_the_long_one_does(stores, name):
    store = stores(name)
    # All files at once, however many they are.
    files = _core.OpenedIndexes()
    files.opened_files = tuple(store.index_service.newest_first())
    assert files.opened_files
    query = _read.KeyQuery(files, store.commit_log.region_of, 1, store.commit_log.files, math.inf)
    asked = {("T", "k"), ("no such topic", "k"), ("", "")}
    for message in itertools.islice(store.messages(), 0, None, 5):
        asked |= {(message.topic, key) for key in (*message.keys, message.unique_key or "none", "", " ", "not there")}
    assert len(asked) > 10
    answered = 0
    for topic, key in sorted(asked):
        for max_num in (0, 1, 2, 64, 2**62):
            found = query.recent(topic, key, max_num)
            # With a time it goes the long way.
            expected = store.query_message(topic, key, max_num, 0)
            if found is not None:
                assert found == expected and found.truncated == expected.truncated and type(found) is QueryResult
                answered += 1
    # Keys that are not ASCII, and chains whose offsets do not fall, are the caller's.
    assert answered > len(asked)


def test_what_the_short_way_of_a_query_leaves_to_the_long_one(tmp_path):
    class Text(str):
        pass

    config = StoreConfig(mapped_file_size_commit_log=1 << 16, max_hash_slot_num=10, max_index_num=5)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        puts = [store.put_message(Message("T", b"x", keys=f"k{i}")) for i in range(3)]
        query = store._state.key_query
        assert query.recent("T", "k1", 64) is None and len(store.query_message("T", "k1")) == 1
        # The first query opens the files.
        assert [each.phy_offset for each in query.recent("T", "k1", 64)] == [puts[1].phy_offset]
        for topic, key, max_num in (
            ("T", "k\ufffd", 1), (Text("T"), "k1", 1), ("T", Text("k1"), 1), (b"T", "k1", 1), ("T", None, 1),
            ("T", "k1", -1), ("T", "k1", 2**63), ("T", "k1", True), ("T", "k1", 1.0), ("T", "k1", None),
        ):  # fmt: skip
            assert query.recent(topic, key, max_num) is None
        assert [each.phy_offset for each in store.query_message("T", "k1", True)] == [puts[1].phy_offset]
        assert store.query_message("T", "k1", -1) == [] and len(store.query_message("T", "k1", 2**70)) == 1
        # A reader next to a writer checks from time to time, and when the newest file is full.
        with MessageStore.open(tmp_path / "store", read_only=True) as reader:
            assert len(reader.query_message("T", "k2")) == 1
            timed = _read.KeyQuery(
                reader.index_service, reader.commit_log.region_of, 1, reader.commit_log.files, 3600
            )
            timed.looked_at = time.monotonic()
            assert len(timed.recent("T", "k2", 64)) == 1
            timed.looked_at = time.monotonic() - 3600
            assert timed.recent("T", "k2", 64) is None
            store.put_messages([Message("T", b"x", keys=f"n{i}") for i in range(2)])
            timed.looked_at = time.monotonic()
            assert timed.recent("T", "k2", 64) is None
            assert len(reader.query_message("T", "n1")) == 1
    assert query.recent("T", "k1", 64) is None
    with pytest.raises(StoreClosedError, match="the store is closed"):
        store.query_message("T", "k1")


def test_a_long_chain_is_left_to_columns(tmp_path):
    config = StoreConfig(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=1, max_index_num=5000)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        store.put_messages([Message("T", b"%d" % i, keys="often" if i % 2 else f"rare{i}") for i in range(4000)])
        found = store.query_message("T", "often", 3000)
        assert store._state.key_query.recent("T", "often", 3000) is None
        assert [message.body for message in found] == [b"%d" % i for i in range(3999, 0, -2)] and not found.truncated
        assert store.query_message("T", "often", 5) == found[:5]


def test_a_closed_store_says_so(tmp_path):
    config = StoreConfig(mapped_file_size_commit_log=4096, max_hash_slot_num=10, max_index_num=50)
    store = MessageStore.open(tmp_path / "store", config=config)
    store.put_message(Message("T", b"x", keys="k"))
    messages = store.get_message("T").messages + list(store.query_message("T", "k"))
    store.close()
    for call in (lambda: store.get_message("T"), lambda: store.query_message("T", "k"), lambda: store.message_at(0)):
        with pytest.raises(StoreClosedError):
            call()
    # Messages are copies.
    shutil.rmtree(tmp_path / "store")
    assert [(message.body, message.keys, message.topic) for message in messages] == [(b"x", ["k"], "T")] * 2


def test_readers_on_threads_beside_a_writer(tmp_path):
    # Each page and each answer is right at any time; files are small, so that all of them roll.
    config = StoreConfig(
        mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=400, max_hash_slot_num=10, max_index_num=300
    )
    failures: list[BaseException] = []
    done = threading.Event()
    before = sys.getswitchinterval()
    with MessageStore.open(tmp_path / "store", config=config) as store:
        put = [0]

        def read_pages() -> None:
            while not done.is_set():
                at = 0
                while True:
                    page = store.get_message("T", 0, at, max_num=32)
                    if not page.messages:
                        break
                    for number, message in enumerate(page.messages, at):
                        assert (message.queue_offset, message.body) == (number, b"%d" % number)
                        assert message.keys == [f"k{number % 50}", f"u{number}"] and not message.corrupt
                    at = page.next_queue_offset

        def query() -> None:
            rng = random.Random(threading.get_ident())
            while not done.is_set():
                known = put[0]
                if known:
                    number = rng.randrange(known)
                    assert [message.body for message in store.query_message("T", f"u{number}")] == [b"%d" % number]
                    some = store.query_message("T", f"k{number % 50}", 10_000)
                    assert {b"%d" % i for i in range(number % 50, known, 50)} <= {message.body for message in some}

        def guarded(work) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(work,)) for work in (read_pages, query, query)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for i in range(1500):
                store.put_message(Message("T", b"%d" % i, keys=[f"k{i % 50}", f"u{i}"]))
                put[0] = i + 1
        finally:
            done.set()
            for thread in threads:
                thread.join(120)
            sys.setswitchinterval(before)
    assert failures == []
