"""Plain messages and tables: the short ways into a store write the bytes that the long way writes.

The long way (`Writing.put` over `LongWay.prepare`) is the one that the golden stores and the oracle hold; here one call per
message, batches and Arrow tables are held to it, row by row and byte by byte.
"""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import rmqstore
from rmqstore import DiskFullError, InvalidMessageError, Message, MessageStore, StoreConfig
from rmqstore.cli import main
from rmqstore.errors import MissingDependencyError, StorePoisonedError
from rmqstore.message import SysFlag, compress_body, compression_flags
from rmqstore.store.writing import LongWay

pa = pytest.importorskip("pyarrow")

T0 = 1_700_000_000_000
SMALL = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "max_hash_slot_num": 10,
    "max_index_num": 20,
    "clean_resource_interval": 0,
}


def config(**options) -> StoreConfig:
    return StoreConfig(**{**SMALL, "clock": lambda: T0, **options})


def tree(root) -> dict[str, bytes]:
    """The contents of log, queues and index files; index files by their order, since their names are times."""
    found = {}
    for kind in ("commitlog", "consumequeue", "consumequeue_ext", "index"):
        for folder, _, names in sorted(os.walk(root / kind)):
            for number, name in enumerate(sorted(names)):
                path = os.path.join(folder, name)
                place = f"index/{number}" if kind == "index" else os.path.relpath(path, root)
                with open(path, "rb") as file:
                    found[place] = file.read()
    return found


def long_way(store: MessageStore) -> MessageStore:
    store._writing.rows = store._state.appender = None
    return store


TEXT = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\x01\x02"), max_size=12
) | st.sampled_from(["A-1", "ключ", "鍵", "𝒌😀", "x" * 200])
KEY = TEXT.map(lambda text: text.replace(" ", "")).filter(bool)
NAME = st.sampled_from(["a", "b", "UNIQ_KEY", "WAIT", "трасса", "KEYS2", "TRACE_ON"])
HOST = st.none() | st.sampled_from(["10.0.0.1:1", "10.0.0.2:65535", "[2001:db8::1]:9"])
I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
ROW = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["Orders", "Other", "a-b_c%d|e", "%RETRY%" + "g" * 140, "SCHEDULE_TOPIC_XXXX"]),
        "queue_id": st.sampled_from([0, 1, 7, 2**31 - 1]),
        "body": st.binary(max_size=80),
        "keys": st.lists(KEY, max_size=4),
        "tags": st.none() | TEXT,
        "properties": st.dictionaries(NAME, TEXT, max_size=3),
        "flag": I32,
        "born_timestamp": st.none() | I64,
        "born_host": HOST,
        "store_host": HOST,
        "sys_flag": st.sampled_from([0, 1, 2, 0x101, 0x200]),
        "reconsume_times": I32,
        "prepared_transaction_offset": I64,
    }
)


def message_of(row: dict) -> Message:
    return Message(**{name: value for name, value in row.items() if name != "queue_id"})


def table_of(rows: list[dict]) -> pa.Table:
    columns = {name: [row[name] for row in rows] for name in ROW_TYPES}
    columns["properties"] = [list(row["properties"].items()) for row in rows]
    table = pa.table({name: pa.array(columns[name], kind) for name, kind in ROW_TYPES.items()})
    # The bodies are what records are to hold, whatever the flags say of them.
    return table.rename_columns({"body": "body_stored"})


ROW_TYPES = {
    "topic": pa.string(),
    "queue_id": pa.int32(),
    "body": pa.binary(),
    "keys": pa.list_(pa.string()),
    "tags": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "flag": pa.int32(),
    "born_timestamp": pa.int64(),
    "born_host": pa.string(),
    "store_host": pa.string(),
    "sys_flag": pa.int32(),
    "reconsume_times": pa.int32(),
    "prepared_transaction_offset": pa.int64(),
}


@settings(max_examples=12)
@given(rows=st.lists(ROW, min_size=1, max_size=40), prop_crc=st.booleans(), index_tags=st.booleans())
def test_every_way_writes_the_same_bytes(tmp_path_factory, rows, prop_crc, index_tags):
    root = tmp_path_factory.mktemp("ways")
    options = config(enabled_append_prop_crc=prop_crc, index_tags=index_tags)
    messages, queue_ids = [message_of(row) for row in rows], [row["queue_id"] for row in rows]
    results = {}

    def put(way: str) -> None:
        with MessageStore.open(root / way, config=options) as store:
            if way == "long":
                long_way(store)
                results[way] = [store.put_message(*each) for each in zip(messages, queue_ids, strict=True)]
            elif way == "one":
                results[way] = [store.put_message(*each) for each in zip(messages, queue_ids, strict=True)]
            elif way == "batch":
                results[way] = store.put_messages(messages, queue_ids)
            else:
                found = store.put_table(table_of(rows))
                results[way] = list(
                    zip(
                        *(
                            column.tolist()
                            for column in (found.phy_offset, found.queue_offset, found.store_timestamp, found.size)
                        ),
                        strict=True,
                    )
                )
        results[way, "files"] = tree(root / way)

    for way in ("long", "one", "batch", "table"):
        put(way)
    assert results["one"] == results["batch"] == results["long"]
    assert results["table"] == [(each[0], each[1], each[3], each[4]) for each in results["long"]]
    for way in ("one", "batch", "table"):
        assert results[way, "files"] == results["long", "files"], way


def test_plain_messages_take_the_short_way(tmp_path, monkeypatch):
    message = Message("Orders", b"paid", keys=["A-1"], tags="EU", properties={"名": "価"})
    with MessageStore.open(tmp_path / "s", config=config()) as store:
        store.put_message(message)
        monkeypatch.setattr(LongWay, "prepare", lambda *args, **kwargs: pytest.fail("the long way was taken"))
        before = store.commit_log.max_offset
        appended = [store.put_message(message) for _ in range(3)]
        with monkeypatch.context() as patched:
            # One call per message does not even begin a batch.
            patched.setattr(store._writing, "rows", None)
            appended.append(store.put_message(message))
        assert [put.queue_offset for put in appended] == [1, 2, 3, 4]
        assert store.commit_log.max_offset == before + 4 * appended[0].size
        store.put_messages([message] * 5)
        store.put_table(pa.table({"body": [b"x"] * 5}), topic="Orders")
        assert store.max_queue_offset("Orders") == 15
        assert len(store.query_message("Orders", "A-1", max_num=100)) == 10


def test_results_are_named_tuples_that_a_collection_may_look_at(tmp_path):
    import gc

    with MessageStore.open(
        tmp_path / "s", config=config(max_index_num=5000, mapped_file_size_commit_log=1 << 20)
    ) as store:
        puts = store.put_messages([Message("Orders", b"x", keys="k")] * 1500)
        gc.collect()
        assert {type(put).__name__ for put in puts} == {"PutResult"}
        assert puts[7]._asdict() == dict(zip(puts[7]._fields, tuple(puts[7]), strict=True))
        assert [put.queue_offset for put in puts] == list(range(1500))
        assert store.message_by_id(puts[9].msg_id).queue_offset == 9
        del puts
        gc.collect()


@pytest.mark.parametrize(
    "special",
    [
        {"properties": {"DELAY": "3"}, "topic": "SCHEDULE_TOPIC_XXXX"},
        {"properties": {"DELAY": "3"}},
        {"sys_flag": int(SysFlag.TRANSACTION_PREPARED)},
        {"sys_flag": int(SysFlag.TRANSACTION_ROLLBACK)},
        {"sys_flag": int(SysFlag.TRANSACTION_COMMIT)},
        {"properties": {"__CRC32#": "1"}},
        {"properties": {"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b"}},
    ],
    ids=str,
)
def test_special_rows_among_plain_ones_are_put_as_messages_are(tmp_path, special):
    rows = [
        {"topic": "Orders", "body": b"%d" % i, "keys": [f"k{i}"], "tags": "T", "properties": {"a": "b"}, "sys_flag": 0}
        for i in range(6)
    ]
    rows[3].update(special)
    options = config(enable_lmq=True, enable_multi_dispatch=True)
    with MessageStore.open(tmp_path / "long", config=options) as store:
        long_way(store).put_messages([Message(**row) for row in rows])
    with MessageStore.open(tmp_path / "batch", config=options) as store:
        store.put_messages([Message(**row) for row in rows])
    with MessageStore.open(tmp_path / "table", config=options) as store:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        columns["properties"] = pa.array(
            [list(each.items()) for each in columns["properties"]], ROW_TYPES["properties"]
        )
        store.put_table(pa.table(columns))
    assert tree(tmp_path / "batch") == tree(tmp_path / "long") == tree(tmp_path / "table")


def test_generated_unique_keys_are_in_every_row(tmp_path):
    with MessageStore.open(tmp_path / "s", config=config(generate_unique_key=True)) as store:
        store.put_table(pa.table({"body": [b"a", b"b"]}), topic="Orders")
        store.put_messages([Message("Orders"), Message("Orders")])
        keys = [message.unique_key for message in store.get_message("Orders")]
        assert len(set(keys)) == 4 and None not in keys
        assert [len(store.query_message("Orders", key)) for key in keys] == [1] * 4


# ------------------------------------------------------------------------------------------------------ what is refused

BAD_ROWS = [
    {"topic": ""},
    {"topic": None},
    {"topic": "with space"},
    {"topic": "t" * 128},
    {"topic": "%RETRY%" + "t" * 249},
    {"queue_id": -1},
    {"queue_id": 2**31},
    {"keys": [""]},
    {"keys": ["a b"]},
    {"keys": ["a\x01"]},
    {"keys": [None]},
    {"tags": "a\x02"},
    {"properties": [("", "x")]},
    {"properties": [("a\x01", "x")]},
    {"properties": [("a", "\x02")]},
    {"properties": [("a", "1"), ("a", "2")]},
    {"properties": [("KEYS", "other")]},
    {"properties": [("TAGS", "other")]},
    {"properties": [("big", "x" * 32768)]},
    {"properties": [("DELAY", "soon")]},
    {"flag": 2**31},
    {"reconsume_times": -(2**31) - 1},
    {"body": b"x" * 101},
    {"born_host": "somewhere"},
    {"sys_flag": int(SysFlag.INNER_BATCH)},
]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=lambda row: str(row)[:40])
@pytest.mark.parametrize("at", [0, 8500])
def test_a_row_that_cannot_be_stored_is_named_and_nothing_is_written(tmp_path, bad, at):
    num = 8600
    rows = {"topic": "Orders", "queue_id": 0, "keys": ["k"], "tags": "t", "properties": [("p", "q")], "flag": 0}
    rows.update({"body": b"", "born_host": "1.2.3.4:5", "sys_flag": 0, "reconsume_times": 0})
    kinds = {**ROW_TYPES, "queue_id": pa.int64(), "flag": pa.int64(), "reconsume_times": pa.int64()}
    columns = {name: [value] * num for name, value in rows.items()}
    for name, value in bad.items():
        columns[name][at] = value
    table = pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})
    options = config(max_message_size=100, max_index_num=50_000, mapped_file_size_commit_log=1 << 22)
    with MessageStore.open(tmp_path / "s", config=options) as store:
        store.put_message(Message("Orders", b"first"))
        before = tree(tmp_path / "s")
        with pytest.raises(InvalidMessageError) as caught:
            store.put_table(table)
        if "born_host" not in bad:
            assert f"row {at}" in str(caught.value)
        assert tree(tmp_path / "s") == before
        assert store.put_message(Message("Orders", b"next")).queue_offset == 1


def test_a_bad_message_in_a_batch_leaves_nothing_behind(tmp_path):
    with MessageStore.open(tmp_path / "s", config=config()) as store:
        for bad in (
            Message("no such topic!"),
            Message("Orders", properties={"a": "\x01"}),
            Message("Orders", keys="  x "),
        ):
            bad.properties.setdefault("DELAY", "x")
            with pytest.raises(InvalidMessageError):
                store.put_messages([Message("Fresh"), bad])
        assert store.topics() == [] and store.commit_log.max_offset == 0
        with pytest.raises(InvalidMessageError, match="segment"):
            store.put_messages([Message("Orders", b"x" * 5000)] * 3)
        with pytest.raises(InvalidMessageError, match="segment"):
            store.put_table(pa.table({"body": [b"x" * 5000]}), topic="Orders")
        assert store.topics() == [] and store.commit_log.max_offset == 0


@pytest.mark.parametrize(
    ("table", "options", "error", "words"),
    [
        ({"body": [b"x"]}, {}, InvalidMessageError, "topic"),
        ({"topic": ["a"], "colour": ["red"]}, {}, InvalidMessageError, "colour"),
        ({"topic": ["a"]}, {"topic": "b"}, InvalidMessageError, "twice"),
        ({"topic": [1]}, {}, TypeError, "topic"),
        ({"topic": ["a"], "body": [1.5]}, {}, TypeError, "body"),
        ({"topic": ["a"], "queue_id": [1.0]}, {}, TypeError, "queue_id"),
        ({"topic": ["a"], "properties": ["a=b"]}, {}, TypeError, "properties"),
        ({"topic": ["a"], "properties": [{"a": {"b": "c"}}]}, {}, TypeError, "'properties' is struct"),
        ({"topic": ["a"], "keys": [[["b"]]]}, {}, TypeError, "'keys' is list"),
        ({"topic": ["a"], "keys": [[b"\xff"]]}, {}, InvalidMessageError, r"'keys' \(list.* a value that it cannot hold"),
        ({"topic": ["a"], "corrupt": [[1]]}, {}, TypeError, "'corrupt' is list"),
        ({"topic": ["a"], "corrupt": ["perhaps"]}, {}, InvalidMessageError, r"'corrupt' \(string.* perhaps"),
        ({"topic": ["a"], "flag": pa.array([2**64 - 1], pa.uint64())}, {}, InvalidMessageError, r"'flag' \(uint64"),
        # As many seconds as 64 bits do not hold in ms.
        ({"topic": ["a"], "born_timestamp": pa.array([2**60], pa.timestamp("s"))}, {}, InvalidMessageError, "born_time"),
        ({"topic": ["a"]}, {"keep_timestamps": True}, InvalidMessageError, "store_timestamp"),
        ({"topic": ["a"]}, {"queue_id": "1"}, InvalidMessageError, "queue_id"),
        ({"topic": ["a"]}, {"tags": 3}, InvalidMessageError, "tags"),
        ({"topic": ["a"]}, {"tags": "\ud800"}, InvalidMessageError, "surrogate"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path, table, options, error, words):
    with MessageStore.open(tmp_path / "s", config=config()) as store:
        with pytest.raises(error, match=words):
            store.put_table(pa.table(table), **options)
        with pytest.raises(TypeError, match="not an Arrow table"):
            store.put_table([1, 2])
        assert store.commit_log.max_offset == 0


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with MessageStore.open(tmp_path / "s", config=config()) as store:
        with pytest.raises(MissingDependencyError, match=r"rmqstore\[arrow\]"):
            store.put_table(object())


# ---------------------------------------------------------------------------------------------------- columns and types


def both(tmp_path, table, messages, **options):
    """Put a table and messages into two stores; their files must be equal."""
    put = {
        name: options.pop(name)
        for name in list(options)
        if name in ("topic", "queue_id", "keys", "tags", "properties", "flag", "born_timestamp")
    }
    number = len(os.listdir(tmp_path))
    with MessageStore.open(tmp_path / f"t{number}", config=config(**options)) as store:
        result = store.put_table(table, **put)
    with MessageStore.open(tmp_path / f"m{number}", config=config(**options)) as store:
        long_way(store)
        for message, queue_id in messages:
            store.put_message(message, queue_id)
    assert tree(tmp_path / f"t{number}") == tree(tmp_path / f"m{number}")
    return result


KEYS = [["a", "b"], None, [], ["ü𝒌"]]
KINDS = {
    "list": pa.array(KEYS, pa.list_(pa.string())),
    "large": pa.array(KEYS, pa.large_list(pa.large_string())),
    "views": pa.array(KEYS, pa.list_view(pa.string())),
    "sliced": pa.array([["z"], *KEYS, ["z"]], pa.list_(pa.string())).slice(1, 4),
    "text": pa.array(["a b", None, "", "ü𝒌"]),
    "dictionary": pa.array(["a b", None, "", "ü𝒌"]).dictionary_encode(),
    "view": pa.array(["a b", None, "", "ü𝒌"], pa.string_view()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_every_arrow_type(tmp_path, kind):
    messages = [(Message("T", keys=keys or ()), 0) for keys in KEYS]
    both(tmp_path, pa.table({"keys": KINDS[kind]}), messages, topic="T")


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_texts_of_every_arrow_type(tmp_path, kind):
    texts = ["Orders", "Other", "Orders", "Third"]
    tags = ["x", None, "", "ñ"]
    table = pa.table({"topic": pa.array(texts).cast(kind), "tags": pa.array(tags, pa.string()).cast(kind)})
    messages = [(Message(topic, tags=tag), 3) for topic, tag in zip(texts, tags, strict=True)]
    both(tmp_path, table, messages, queue_id=3)
    both(tmp_path, table.slice(1, 2), messages[1:3], queue_id=3)


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3), pa.string(), pa.large_string()], ids=str
)
def test_bodies_of_every_arrow_type(tmp_path, kind):
    bodies = ["abc", None, "xyz"]
    values = bodies if kind in (pa.string(), pa.large_string()) else [None if b is None else b.encode() for b in bodies]
    messages = [(Message("T", (body or "").encode()), 0) for body in bodies]
    both(tmp_path, pa.table({"body": pa.array(values, kind)}), messages, topic="T")


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
def test_timestamps_of_every_unit_are_milliseconds(tmp_path, unit, zone):
    times = pa.array([T0, None, T0 + 1000], pa.int64()).cast(pa.timestamp("ms", zone)).cast(pa.timestamp(unit, zone))
    messages = [(Message("T", born_timestamp=time), 0) for time in (T0, None, T0 + 1000)]
    both(tmp_path, pa.table({"born_timestamp": times}), messages, topic="T")


def test_columns_of_nulls_and_missing_rows_are_as_if_they_were_not_there(tmp_path):
    nulls = {
        name: pa.nulls(2)
        for name in ("keys", "tags", "body", "properties", "flag", "born_timestamp", "born_host", "queue_id")
    }
    both(tmp_path, pa.table(nulls), [(Message("T"), 0)] * 2, topic="T")
    with MessageStore.open(tmp_path / "empty", config=config()) as store:
        assert len(store.put_table(pa.table({"topic": pa.array([], pa.string())}))) == 0
        assert store.commit_log.max_offset == 0


def test_literals_stand_for_columns(tmp_path):
    table = pa.table({"body": [b"a", b"b"]})
    literals = {
        "topic": "T",
        "queue_id": 2,
        "keys": ["k", "ł"],
        "tags": "x",
        "properties": {"p": "q", "n": None},
        "flag": -3,
        "born_timestamp": 77,
    }
    message = {name: value for name, value in literals.items() if name != "queue_id"}
    messages = [(Message(body=body, **message), 2) for body in (b"a", b"b")]
    both(tmp_path, table, messages, **literals)
    both(tmp_path, table, [(Message("T", body, keys="a b"), 0) for body in (b"a", b"b")], topic="T", keys="a b")
    # An ignored column alone may have the number of rows.
    both(tmp_path, pa.table({"phy_offset": [1, 2]}), [(Message("T"), 0)] * 2, topic="T")


def test_properties_given_twice_alike_are_written_once(tmp_path):
    table = pa.table(
        {
            "topic": ["T", "T"],
            "keys": [["a", "b"], None],
            "tags": ["x", None],
            "properties": pa.array(
                [[("p", "1"), ("KEYS", "a b"), ("TAGS", "x"), ("n", None)], [("KEYS", "c"), ("p", "")]],
                ROW_TYPES["properties"],
            ),
        }
    )
    messages = [
        (Message("T", keys=["a", "b"], tags="x", properties={"p": "1", "KEYS": "a b", "TAGS": "x"}), 0),
        (Message("T", properties={"KEYS": "c", "p": ""}), 0),
    ]
    both(tmp_path, table, messages)


def test_structs_are_properties_as_pandas_makes_them(tmp_path):
    table = pa.table({"properties": [{"a": "1", "b": None}, {"a": None, "b": "2"}]})
    messages = [(Message("T", properties={"a": "1"}), 0), (Message("T", properties={"b": "2"}), 0)]
    both(tmp_path, table, messages, topic="T")


def test_anything_with_the_c_stream_interface_is_a_table(tmp_path):
    class Frame:
        def __init__(self, table):
            self.table = table

        def __arrow_c_stream__(self, requested_schema=None):
            return self.table.__arrow_c_stream__(requested_schema)

    table = pa.table({"body": [b"a", b"b"]})
    messages = [(Message("T", b"a"), 0), (Message("T", b"b"), 0)]
    both(tmp_path, Frame(table), messages, topic="T")
    both(tmp_path, table.to_batches()[0], messages, topic="T")
    both(tmp_path, pa.concat_tables([table.slice(0, 1), table.slice(1, 1)]), messages, topic="T")


@pytest.mark.parametrize("name", ["base", "ext", "propcrc"])
def test_a_scanned_table_is_put_again(tmp_path, golden_store, name):
    fields = ["topic", "body_stored", "properties", *ROW_TYPES.keys() - {"body", "keys", "tags"}, "store_timestamp"]
    with MessageStore.open(golden_store(name), read_only=True) as source, MessageStore.open(tmp_path / name) as store:
        names = [each for each in rmqstore.store.columns.scan_schema(None).names if each not in ("keys", "tags")]
        scanned = pa.Table.from_batches(source.scan([*names, "body_stored"]))
        # Halves of transactions and batches have no places of their own in a queue.
        good = [not message.sys_flag & 0x8C for message in source.messages()]
        wanted = [message for message, each in zip(source.messages(), good, strict=True) if each]
        assert len(wanted) > 5
        scanned = scanned.filter(pa.array(good))
        store.put_table(scanned, keep_timestamps=True)
        for old, new in zip(wanted, store.messages(), strict=True):
            for field in fields:
                was, now = getattr(old, field), getattr(new, field)
                if field == "properties":
                    was, now = ({k: v for k, v in each.items() if k != "__CRC32#"} for each in (was, now))
                assert was == now, field
        # Bodies as they were sent are put as such.
        store.put_table(scanned.drop_columns("body_stored"))
        last = list(store.messages())[-1]
        assert last.body == wanted[-1].body
        assert not last.sys_flag & 0x701


def test_rows_that_are_marked_as_corrupt_or_lose_their_unique_key_are_refused(tmp_path):
    with MessageStore.open(tmp_path / "s", config=config()) as store:
        with pytest.raises(InvalidMessageError, match="row 1 is marked as corrupt"):
            store.put_table(pa.table({"topic": ["T"] * 3, "corrupt": [False, True, None]}))
        with pytest.raises(InvalidMessageError, match="UNIQ_KEY"):
            store.put_table(pa.table({"topic": ["T"], "unique_key": ["u"]}))
        assert store.commit_log.max_offset == 0
        assert len(store.put_table(pa.table({"topic": ["T"] * 2, "corrupt": [False, None]}))) == 2


def test_bits_of_compression_go_with_stored_bodies_only(tmp_path):
    flags = compression_flags("ZLIB")
    body = compress_body(b"long " * 50, "ZLIB")
    table = pa.table({"body": [body], "sys_flag": [flags]})
    stored = table.rename_columns({"body": "body_stored"})
    both(tmp_path, stored, [(Message("T", body, sys_flag=flags), 0)], topic="T")
    both(
        tmp_path,
        stored.append_column("body", pa.array([b"other"])),
        [(Message("T", body, sys_flag=flags), 0)],
        topic="T",
    )
    both(tmp_path, table, [(Message("T", body), 0)], topic="T")


def test_arrays_that_are_not_sound_are_refused(tmp_path):
    for offsets in ([0, 5, 2], [0, 4, 900], [-3, 1, 2]):
        buffers = [None, pa.py_buffer(np.array(offsets, np.int32).tobytes()), pa.py_buffer(b"abcdef")]
        with MessageStore.open(tmp_path / str(offsets[1]), config=config()) as store:
            with pytest.raises((InvalidMessageError, pa.ArrowInvalid)):
                body = pa.Array.from_buffers(pa.binary(), 2, buffers)
                store.put_table(pa.table({"body": body}), topic="T")
            assert store.commit_log.max_offset == 0


# ------------------------------------------------------------------------------------------------------- times and order


def test_kept_timestamps_are_those_of_one_process_with_that_clock(tmp_path):
    times = [T0, T0, T0 + 5, T0 + 2000]
    bodies = [b"a", b"b", b"c", b"d"]
    clock = iter(times)
    with MessageStore.open(tmp_path / "one", config=config(clock=lambda: next(clock))) as store:
        for body in bodies:
            store.put_message(Message("T", body, keys=["k"]))
        store.flush()
    stamps = pa.array(times, pa.timestamp("ms", "UTC"))
    table = pa.table({"body": bodies, "store_timestamp": stamps, "keys": [["k"]] * 4})
    with MessageStore.open(tmp_path / "table", config=config()) as store:
        result = store.put_table(table, topic="T", keep_timestamps=True)
        assert result.store_timestamp.tolist() == times
        for bad in ([T0 + 1999], [T0 + 3000, T0 + 2999], [None]):
            with pytest.raises(InvalidMessageError, match=r"store_?timestamp|store timestamps"):
                store.put_table(
                    pa.table({"store_timestamp": pa.array(bad, pa.timestamp("ms", "UTC"))}),
                    topic="T",
                    keep_timestamps=True,
                )
        assert store.max_queue_offset("T") == 4
        # Without the option the column is ignored.
        store.put_table(table, topic="Later")
        assert {message.store_timestamp for message in store.get_message("Later")} == {T0}
    first = {name: data for name, data in tree(tmp_path / "one").items() if "consumequeue/T/" in name}
    assert first == {name: data for name, data in tree(tmp_path / "table").items() if "consumequeue/T/" in name}


def test_kept_timestamps_reach_special_rows_as_well(tmp_path):
    table = pa.table(
        {
            "store_timestamp": [T0 + 1, T0 + 2],
            "sys_flag": [0, int(SysFlag.TRANSACTION_COMMIT)],
        }
    )
    with MessageStore.open(tmp_path / "s", config=config()) as store:
        assert store.put_table(table, topic="T", keep_timestamps=True).store_timestamp.tolist() == [T0 + 1, T0 + 2]
        assert [message.store_timestamp for message in store.messages()] == [T0 + 1, T0 + 2]


def test_large_tables_and_other_writers_at_once(tmp_path):
    options = config(
        mapped_file_size_commit_log=1 << 20,
        mapped_file_size_consume_queue=20_000,
        max_index_num=100_000,
        max_hash_slot_num=1000,
    )
    num = 20_000
    table = pa.table(
        {
            "queue_id": np.arange(num) % 3,
            "keys": [[f"t{i}"] for i in range(num)],
            "body": [b"%d" % i for i in range(num)],
        }
    )
    with MessageStore.open(tmp_path / "s", config=options) as store:

        def others():
            for i in range(300):
                store.put_message(Message("Orders", b"one", keys=[f"o{i}"]), 1)
                store.put_messages([Message("Orders", b"many")] * 3, 2)

        threads = [threading.Thread(target=others) for _ in range(2)]
        for thread in threads:
            thread.start()
        result = store.put_table(table, topic="Orders")
        for thread in threads:
            thread.join()
        assert sum(store.max_queue_offset("Orders", queue_id) for queue_id in range(3)) == num + 2 * 300 * 4
        for i in (0, 1, 9999, num - 1):
            message = store.message_at(int(result.phy_offset[i]))
            assert (message.body, message.queue_id, message.queue_offset) == (
                b"%d" % i,
                i % 3,
                int(result.queue_offset[i]),
            )
            assert [hit.phy_offset for hit in store.query_message("Orders", f"t{i}")] == [int(result.phy_offset[i])]
    assert [finding for finding in rmqstore.verify(tmp_path / "s", options)] == []


# -------------------------------------------------------------------------------------------------- when it cannot write


def test_a_store_that_takes_no_writes_says_so_on_the_short_way(tmp_path, monkeypatch):
    message = Message("Orders", b"x")
    store = MessageStore.open(tmp_path / "s", config=config())
    store.put_message(message)
    store.put_message(message)
    with monkeypatch.context() as patched:
        patched.setattr("rmqstore.store.upkeep.used_ratio", lambda path: 0.99)
        store.delete_expired_files()
        for put in (
            lambda: store.put_message(message),
            lambda: store.put_messages([message] * 2),
            lambda: store.put_table(pa.table({"topic": ["Orders"]})),
        ):
            with pytest.raises(DiskFullError):
                put()
    monkeypatch.setattr("rmqstore.store.upkeep.used_ratio", lambda path: 0.1)
    store.delete_expired_files()
    assert store.put_message(message).queue_offset == 2
    store._state.fail(OSError("the disk went away"))
    for put in (
        lambda: store.put_message(message),
        lambda: store.put_messages([message] * 2),
        lambda: store.put_table(pa.table({"topic": ["Orders"]})),
    ):
        with pytest.raises(StorePoisonedError):
            put()
    store.close()


def test_a_clock_that_fails_or_lies_changes_nothing(tmp_path):
    answers = [T0, T0]
    with MessageStore.open(tmp_path / "s", config=config(clock=lambda: answers.pop(0) if answers else 1 / 0)) as store:
        message = Message("Orders", b"x")
        store.put_message(message)
        store.put_message(message)
        end = store.commit_log.max_offset
        with pytest.raises(ZeroDivisionError):
            store.put_message(message)
        with pytest.raises(ZeroDivisionError):
            store.put_messages([message] * 3)
        answers.append(2**63)
        with pytest.raises((InvalidMessageError, OverflowError)):
            store.put_message(message)
        assert store.commit_log.max_offset == end
        answers.append(T0)
        assert store.put_message(message).queue_offset == 2


def test_a_clock_that_puts_a_message_itself_is_stopped(tmp_path):
    def clock() -> int:
        if nested.pop() if nested else False:
            store.put_message(Message("Orders", b"inner"))
        return T0

    nested: list[bool] = []
    with MessageStore.open(tmp_path / "s", config=config(clock=clock)) as store:
        store.put_message(Message("Orders", b"a"))
        store.put_message(Message("Orders", b"b"))
        nested.append(True)
        with pytest.raises(RuntimeError, match="clock"):
            store.put_message(Message("Orders", b"outer"))
        assert store.put_message(Message("Orders", b"c")).queue_offset == 3
        assert [message.body for message in store.messages()] == [b"a", b"b", b"inner", b"c"]


def test_files_that_went_from_under_the_short_way_are_found_again(tmp_path):
    # More queues than may be mapped: ends that were learned are let go of and learned again.
    with MessageStore.open(tmp_path / "s", config=config(max_mapped_files=2, max_index_num=5000)) as store:
        for i in range(600):
            put = store.put_message(Message(f"T{i % 5}", b"%d" % i, keys=[f"k{i}"]))
            assert put.queue_offset == i // 5
        for i in range(600):
            assert store.get_message(f"T{i % 5}", 0, i // 5, 1).messages[0].body == b"%d" % i
            assert store.query_message(f"T{i % 5}", f"k{i}")[0].body == b"%d" % i


def test_more_keys_than_the_short_way_takes(tmp_path):
    keys = [f"k{i}" for i in range(100)]
    with MessageStore.open(tmp_path / "s", config=config(max_index_num=5000)) as store:
        for _ in range(3):
            store.put_message(Message("Orders", b"x", keys=keys))
        assert [len(store.query_message("Orders", key)) for key in keys] == [3] * 100


def test_a_column_key_is_refused_unless_a_query_gave_it(tmp_path):
    # It was passed over in silence, and the message had no keys: only what a query gives has it, beside `key_number`.
    with MessageStore.open(tmp_path / "store", config=config()) as store:
        for columns in ({"key": ["k1"]}, {"key": ["k1"], "keys": [["k2"]]}):
            with pytest.raises(InvalidMessageError, match=r"column .key."):
                store.put_table(pa.table({"topic": ["T"], "body": [b"b"], **columns}))
        assert store.commit_log.max_offset == 0
        store.put_message(Message("T", b"b", keys="k1"))
        with pytest.raises(InvalidMessageError, match="column 'key'"):
            store.put_table(store.query_table(["k1"], "T", columns=["topic", "body"]))
        found = store.query_table(["k1"], "T", columns=["topic", "body", "keys"])
        assert {"key", "key_number"} <= set(found.column_names)
        store.put_table(found)
        assert [message.keys for message in store.query_message("T", "k1")] == [["k1"]] * 2
    (tmp_path / "rows.jsonl").write_text('{"topic": "T", "body": "b", "key": "k1"}\n')
    from pyarrow import parquet

    parquet.write_table(pa.table({"topic": ["T"], "body": [b"b"], "key": ["k1"]}), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        done = CliRunner().invoke(main, ["import", str(tmp_path / "store"), str(tmp_path / name)])
        assert done.exit_code not in (0, 1) and "column 'key'" in done.stderr, name
