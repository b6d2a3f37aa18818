"""Imports: what an export wrote goes into a new store with the same bytes, and what cannot be taken changes nothing.

The strongest case is a real broker's log, byte for byte, by way of every format.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading

import golden
import pytest
from click.testing import CliRunner

from rmqstore import InvalidMessageError, Message, MessageStore, StoreConfig, StoreError, StoreLockedError, verify
from rmqstore.cli import main
from rmqstore.offline.export import ExportOptions, export
from rmqstore.offline.importing import IMPORT_FORMATS, ImportOptions, import_files
from rmqstore.store.columns import DEFAULT_COLUMNS

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

T0 = 1_700_000_000_000
SMALL = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "max_hash_slot_num": 10,
    "max_index_num": 20,
    "clean_resource_interval": 0,
}
# For thousands of messages: what is checked is not the rolling of files, and a file costs more than the messages in it.
ROOMY = {
    **SMALL,
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 1 << 16,
    "max_hash_slot_num": 1000,
    "max_index_num": 10_000,
}
# The command line's new store has the default sizes, 1.4 GB, unless it is told.
SMALL_OPTIONS = [word for name, value in ROOMY.items() for word in ("-o", f"{name}={value}")]
FILES = {"jsonl": "a.jsonl", "arrow": "a.arrow", "parquet": "a.parquet"}
BODIES = [b"", b"plain", b"zero\0byte", b"\xff\xfe", b'"q",\n;\r\n', "鍵 😀".encode(), bytes(range(256)) * 4]


def config(**options):
    return StoreConfig(**{**SMALL, "clock": lambda: T0, **options})


def run(*arguments, **options):
    result = CliRunner().invoke(main, ["import", *map(str, arguments)], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def log_bytes(root):
    return {path.name: path.read_bytes() for path in sorted((root / "commitlog").iterdir())}


def contents(root):
    """Every message as what it says of itself, its place included."""
    with MessageStore.open(root, read_only=True) as store:
        return [message.as_dict() for message in store.messages()]


@pytest.fixture
def small(tmp_path):
    with MessageStore.open(tmp_path / "small", config=config()) as store:
        for i, body in enumerate(BODIES):
            store.put_message(
                Message(
                    f"T{i % 2}", body, keys=[f"K{i}", "ALL"], tags="t" if i % 3 else None, properties={"n": str(i)}
                ),
                queue_id=i % 2,
            )
    return tmp_path / "small"


# ---------------------------------------------------------------------------------------------------------------------
# There and back


@pytest.mark.parametrize("kind", FILES)
def test_a_brokers_log_comes_back_byte_for_byte(broker, tmp_path, kind):
    target = tmp_path / FILES[kind]
    # Bodies as the records hold them, so that compressed ones stay as they were.
    names = [name for name in DEFAULT_COLUMNS if name != "body"] + ["body_stored"]
    export(broker, target, options=ExportOptions(format=kind, columns=names))
    told = []
    report = import_files(
        tmp_path / "new",
        [target],
        ImportOptions(config=StoreConfig(**golden.geometry("broker")), keep_timestamps=True),
        progress=lambda done, total: told.append((done, total)),
    )
    assert (report.created, report.messages) == (True, 11013)
    assert log_bytes(tmp_path / "new") == log_bytes(broker)
    assert list(verify(tmp_path / "new", StoreConfig(**golden.geometry("broker")))) == []
    again = tmp_path / ("again." + kind)
    export(tmp_path / "new", again, options=ExportOptions(columns=names))
    assert again.read_bytes() == target.read_bytes()
    assert told[-1][0] == told[-1][1] == target.stat().st_size
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("form", ["text", "hex", "base64"])
@pytest.mark.parametrize("kind", IMPORT_FORMATS)
def test_every_form_of_bodies_comes_back(small, tmp_path, kind, form):
    export(small, tmp_path / f"a.{kind}", options=ExportOptions(body=form))
    import_files(tmp_path / "new", [tmp_path / f"a.{kind}"], ImportOptions(config=config(), keep_timestamps=True))
    assert contents(tmp_path / "new") == contents(small)


def test_several_files_packed_and_without_endings(small, tmp_path, monkeypatch):
    for kind in IMPORT_FORMATS:
        export(small, tmp_path / f"a.{kind}")
        os.rename(tmp_path / f"a.{kind}", tmp_path / kind)
    export(small, tmp_path / "packed.jsonl.gz")
    export(small, tmp_path / "packed.jsonl.zst")
    os.rename(tmp_path / "packed.jsonl.gz", tmp_path / "gzipped")
    files = [tmp_path / name for name in (*IMPORT_FORMATS, "gzipped", "packed.jsonl.zst")]
    report = import_files(tmp_path / "new", files, ImportOptions(config=config()))
    assert report.messages == 5 * len(BODIES)
    with MessageStore.open(tmp_path / "new", read_only=True) as store:
        bodies = [message.body for message in store.messages()]
    assert bodies == BODIES * 5
    # The arrow stream that goes through a pipe, and standard input of any format.
    for kind in (*IMPORT_FORMATS, "gzip"):
        data = io.BytesIO()
        if kind == "gzip":
            export(small, data, options=ExportOptions(compression="gzip"))
        else:
            export(small, data, options=ExportOptions(format=kind))
        # A pipe, which has no positions; what is written fits into it.
        reading, writing = os.pipe()
        assert len(data.getvalue()) <= fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        os.write(writing, data.getvalue())
        os.close(writing)
        with open(reading, "rb") as pipe:
            done = run(tmp_path / "new", "-", "--json", input=pipe)
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["messages"] == len(BODIES)
    done = subprocess.run(
        [sys.executable, "-m", "rmqstore", "import", str(tmp_path / "new"), "-", "--json"],
        input=data.getvalue(), capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["messages"] == len(BODIES)


def test_what_query_prints_can_be_imported(broker, tmp_path):
    result = CliRunner().invoke(main, ["query", str(broker), "Orders", "ORD-100000", "--json"])
    (tmp_path / "found.jsonl").write_text(result.stdout)
    assert run(tmp_path / "new", tmp_path / "found.jsonl", *SMALL_OPTIONS).exit_code == 0
    with MessageStore.open(tmp_path / "new", read_only=True) as store:
        assert [message.keys for message in store.messages()] == [
            json.loads(line)["keys"] for line in result.stdout.splitlines()
        ]


def test_literals_stand_for_all_rows(small, tmp_path):
    for kind in ("jsonl", "parquet"):
        export(small, tmp_path / f"a.{kind}")
        target = tmp_path / f"new-{kind}"
        result = run(
            target,
            tmp_path / f"a.{kind}",
            "--topic",
            "Other",
            "--queue",
            3,
            "--tags",
            "new",
            "--key",
            "A",
            "--key",
            "B",
            *SMALL_OPTIONS,
        )
        assert result.exit_code == 0, result.output
        with MessageStore.open(target, read_only=True) as store:
            messages = list(store.messages())
        assert len(messages) == len(BODIES)
        for message in messages:
            assert (message.topic, message.queue_id, message.tags, message.keys) == ("Other", 3, "new", ["A", "B"])
        assert messages[3].properties["n"] == "3"
        # Without --keep-timestamps they are stored now.
        assert messages[0].store_timestamp > T0


def test_rows_written_by_hand(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '\ufeff{"topic": "A", "body": "x", "keys": "one two", "properties": {"p": "v"}, '
        '"born_timestamp": "2026-11-21T05:32:39.596Z"}\n'
        "\n"
        '{"topic": "A", "queue_id": 2, "keys": ["k"], "body": "ff00", "body_encoding": "hex"}\r\n'
        '{"topic": "A"}'
    )
    report = import_files(tmp_path / "new", [tmp_path / "a.jsonl"], ImportOptions(config=config()))
    assert report.messages == 3
    with MessageStore.open(tmp_path / "new", config=config(), read_only=True) as store:
        messages = list(store.messages())
    assert [message.body for message in messages] == [b"x", b"\xff\0", b""]
    assert [message.keys for message in messages] == [["one", "two"], ["k"], []]
    assert messages[0].born_timestamp == 1795239159596
    assert messages[0].properties["p"] == "v"


def test_csv_is_refused_by_name(tmp_path):
    (tmp_path / "a.csv").write_text("topic,body\nT,x\n")
    with pytest.raises(StoreError, match="CSV is not imported; give JSON lines, Arrow or Parquet"):
        import_files(tmp_path / "new", [tmp_path / "a.csv"], ImportOptions(config=config()))
    assert os.listdir(tmp_path) == ["a.csv"]


# ---------------------------------------------------------------------------------------------------------------------
# Refused rows and files

WRONG = {
    "jsonl": [
        ('{"topic":"A"}\n{"topic":"A"\n', "line 2: this is no JSON"),
        ('{"topic":"A"}\n\n[1]\n', "line 3: a message is a JSON object, not list"),
        ('{"topic":"A"}\n{"body":"x"}\n', "line 2: topic None"),
        ('{"topic":5}\n', "line 1: topic is 5, not a text"),
        ('{"topic":"A","bdy":"x"}\n', "line 1: there is no column 'bdy'"),
        ('{"topic":"A","queue_id":"1"}\n', "line 1: queue_id is '1', not a whole number"),
        ('{"topic":"A","queue_id":true}\n', "line 1: queue_id is True"),
        ('{"topic":"A","queue_id":-1}\n', "line 1: queue_id is -1"),
        ('{"topic":"A","flag":1e400}\n', "line 1: flag is inf"),
        ('{"topic":"A","flag":99999999999999999999}\n', "line 1: flag is 9999"),
        ('{"topic":"A","keys":[1]}\n', "line 1: a key is 1, not a text"),
        ('{"topic":"A","keys":{"a":1}}\n', "line 1: keys are"),
        ('{"topic":"A","properties":{"a":1}}\n', "line 1: property 'a' is 1"),
        ('{"topic":"A","properties":["a"]}\n', "line 1: properties are"),
        ('{"topic":"A","properties":{"a":"\\u0001"}}\n', "line 1: property"),
        ('{"topic":"A","tags":"\\ud800"}\n', "line 1: tags is .*, which UTF-8 cannot hold"),
        ('{"topic":"A","body":"zz","body_encoding":"hex"}\n', "line 1: non-hexadecimal"),
        ('{"topic":"A","body":"!","body_encoding":"base64"}\n', "line 1: body is not base64"),
        ('{"topic":"A","body":"x","body_encoding":"rot13"}\n', "line 1: body_encoding is 'rot13'"),
        ('{"topic":"A","body":null,"body_encoding":null}\n', "line 1: its body could not be decompressed"),
        ('{"topic":"A","corrupt":true}\n', "line 1: is marked as corrupt"),
        ('{"topic":"A","born_timestamp":"yesterday"}\n', "line 1: born_timestamp is 'yesterday'"),
        ('{"topic":"A","born_timestamp":"2026-11-21T05:32:39"}\n', "line 1: born_timestamp .* without a zone"),
        ('{"topic":"A","store_host":"nowhere"}\n', "store_host|nowhere"),
        ('{"topic":"A b"}\n', "line 1: .*topic"),
        ("[" * 100_000 + "\n", "line 1: this is no JSON"),
    ],
}


@pytest.mark.parametrize("kind, text, message", [(kind, *each) for kind, cases in WRONG.items() for each in cases])
def test_bad_rows_name_their_line_and_nothing_is_put(tmp_path, kind, text, message):
    folder = tmp_path / "in"
    folder.mkdir()
    file = folder / f"a.{kind}"
    file.write_text(text)
    with pytest.raises(InvalidMessageError, match=message) as caught:
        import_files(tmp_path / "new", [file], ImportOptions(config=config()))
    assert str(file) in str(caught.value)
    assert os.listdir(tmp_path) == ["in"]
    # Into a store that is there, behind good rows: they are not put either.
    with MessageStore.open(tmp_path / "there", config=config()) as store:
        store.put_message(Message("A", b"first", keys=["K"]))
    before = log_bytes(tmp_path / "there")
    (folder / "good.jsonl").write_text('{"topic":"A","body":"good"}\n' * 5000)
    with pytest.raises(InvalidMessageError, match=message):
        import_files(tmp_path / "there", [folder / "good.jsonl", file], ImportOptions(config=config()))
    assert log_bytes(tmp_path / "there") == before
    assert len(contents(tmp_path / "there")) == 1


def test_a_bad_row_far_in_a_table_is_named(tmp_path):
    for name, write in (("a.parquet", pq.write_table), ("a.arrow", None)):
        rows = [{"topic": "A", "body": b"x"} for _ in range(5000)]
        rows[4321]["topic"] = "no good"
        table = pa.Table.from_pylist(rows)
        if write is not None:
            write(table, tmp_path / name)
        else:
            with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
                writer.write_table(table)
        with pytest.raises(InvalidMessageError, match=f"{name}, row 4322: "):
            import_files(tmp_path / "new", [tmp_path / name], ImportOptions(config=config()))
        assert not (tmp_path / "new").exists()


def test_what_is_no_such_file(tmp_path, small):
    export(small, tmp_path / "a.parquet")
    export(small, tmp_path / "a.arrow")
    export(small, tmp_path / "a.jsonl.gz")
    for name in ("a.parquet", "a.arrow", "a.jsonl.gz"):
        data = (tmp_path / name).read_bytes()
        # Arrow has no sums over its bytes, so only its lengths and offsets can tell.
        holed = [] if name == "a.arrow" else [data[:60] + bytes(200) + data[260:]]
        for damaged in (data[: len(data) // 2], data[:10], b"", *holed):
            (tmp_path / ("bad-" + name)).write_bytes(damaged)
            try:
                report = import_files(tmp_path / "new", [tmp_path / ("bad-" + name)], ImportOptions(config=config()))
            except StoreError as error:
                assert "bad-" + name in str(error)
                assert not (tmp_path / "new").exists()
            else:
                # An empty file of packed lines has no row.
                assert (name, damaged, report.messages) == ("a.jsonl.gz", b"", 0)
                assert not (tmp_path / "new").exists()
    # A name of a column that is not a text.
    data = bytearray((tmp_path / "a.arrow").read_bytes())
    while (place := data.find(b"born_host")) >= 0:
        data[place] = 0xF5
    (tmp_path / "bad-name.arrow").write_bytes(data)
    with pytest.raises(StoreError, match="cannot be read as a file of arrow"):
        import_files(tmp_path / "new", [tmp_path / "bad-name.arrow"], ImportOptions(config=config()))
    (tmp_path / "noise").write_bytes(b"\x80\x81\x82" * 50)
    assert run(tmp_path / "new", tmp_path / "noise").exit_code == 3
    assert run(tmp_path / "new", tmp_path / "missing.jsonl").exit_code == 3
    assert run(tmp_path / "new", tmp_path).exit_code == 3
    assert run(tmp_path / "new").exit_code == 2


def test_marked_and_unreadable_rows_of_a_table_are_refused(tmp_path):
    table = pa.table({"topic": ["A", "A"], "body": pa.array([b"x", None]), "corrupt": [False, False]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InvalidMessageError, match="row 2: its body could not be decompressed"):
        import_files(tmp_path / "new", [tmp_path / "a.parquet"], ImportOptions(config=config()))
    pq.write_table(table.set_column(2, "corrupt", pa.array([False, True])), tmp_path / "a.parquet")
    with pytest.raises(InvalidMessageError, match="row 2: is marked as corrupt"):
        import_files(tmp_path / "new", [tmp_path / "a.parquet"], ImportOptions(config=config()))


TEXTS = pa.map_(pa.string(), pa.string())
OBJECTS = pa.map_(pa.string(), pa.struct([("b", pa.int8())]))
ODD = {
    "a number beyond 64 bits": ([("flag", pa.array([1, 2**64 - 1], pa.uint64()))], "row 2: column 'flag' .*18446744073"),
    "values that are no texts": (
        [("tags", ["x", "y"]), ("properties", pa.array([[("a", {"b": 1})], []], OBJECTS))],
        "row 1: column 'properties' is map",
    ),
    "bytes that are no text": (
        [("tags", ["x", "y"]), ("properties", pa.array([[], [("a", b"\xff")]], pa.map_(pa.string(), pa.binary())))],
        "row 2: column 'properties' .*UTF8",
    ),
    "keys that are no texts": (
        [("keys", [[{"a": 1}], []]), ("properties", pa.array([[], []], TEXTS))],
        "row 1: column 'keys' is list",
    ),
    "tags twice": ([("tags", ["x", "y"])] * 2 + [("properties", pa.array([[], []], TEXTS))], "column 'tags' .*twice"),
    "properties twice": ([("properties", pa.array([[], []], TEXTS))] * 2, "column 'properties' .*twice"),
    "encodings twice": ([("body_encoding", ["hex", "hex"])] * 2, "column 'body_encoding' .*twice"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_odd_columns_of_a_table_are_named(tmp_path, kind):
    columns, message = ODD[kind]
    columns = [("topic", ["A", "A"]), ("body", ["00", "01"]), *columns]
    table = pa.Table.from_arrays([pa.array(each) for _, each in columns], names=[name for name, _ in columns])
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for options in ({}, {"keep_timestamps": False, "queue_id": 1}):
        with pytest.raises(StoreError, match=message) as caught:
            import_files(tmp_path / "new", [tmp_path / "a.arrow"], ImportOptions(config=config(), **options))
        assert "a.arrow" in str(caught.value)
    assert os.listdir(tmp_path) == ["a.arrow"]


def test_properties_of_other_types_are_texts(tmp_path):
    kind = pa.map_(pa.binary(), pa.int64())
    table = pa.table({"topic": ["A"], "tags": ["7"], "properties": pa.array([[(b"TAGS", 7), (b"n", 1)]], kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    import_files(tmp_path / "one", [tmp_path / "a.parquet"], ImportOptions(config=config()))
    import_files(tmp_path / "two", [tmp_path / "a.parquet"], ImportOptions(config=config(), tags="t"))
    for name, tags in (("one", "7"), ("two", "t")):
        with MessageStore.open(tmp_path / name, config=config(), read_only=True) as store:
            (message,) = store.messages()
            assert message.properties == {"TAGS": tags, "n": "1"}


def test_times_that_fall_are_refused(tmp_path, small):
    export(small, tmp_path / "a.jsonl")
    rows = [json.loads(line) for line in open(tmp_path / "a.jsonl", encoding="utf-8")]
    many = [{**rows[1], "store_timestamp": T0 + i} for i in range(3000)]
    many[2500]["store_timestamp"] = T0 - 5
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, many)))
    for target in ("new", "small"):
        with pytest.raises(InvalidMessageError, match="line 2501: store timestamps fall"):
            import_files(
                tmp_path / target, [tmp_path / "b.jsonl"], ImportOptions(config=config(), keep_timestamps=True)
            )
    assert len(contents(small)) == len(BODIES)
    # Between two parts it shows only there.
    many[2500]["store_timestamp"] = T0 + 2500
    many[2047]["store_timestamp"] = T0 + 5000
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, many)))
    with pytest.raises(InvalidMessageError, match="line 2049: the store timestamp is before"):
        import_files(small, [tmp_path / "b.jsonl"], ImportOptions(config=config(), keep_timestamps=True))
    assert len(contents(small)) == len(BODIES)


# ---------------------------------------------------------------------------------------------------------------------
# Stores


def test_files_without_a_message_make_no_store(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "one.jsonl").write_text('{"topic":"A","body":"x"}\n')
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        done = run(tmp_path / name, tmp_path / "none.jsonl")
        assert done.exit_code == 1 and "no store was created" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["none.jsonl", "one.jsonl", "there"] and not os.listdir(tmp_path / "there")
    # The place is free for an import that has messages.
    assert import_files(tmp_path / "new", [tmp_path / "one.jsonl"], ImportOptions(config=config())).created
    report = import_files(tmp_path / "new", [tmp_path / "none.jsonl"], ImportOptions(config=config()))
    assert (report.created, report.messages) == (False, 0) and len(contents(tmp_path / "new")) == 1


def test_where_no_store_may_come_into_being(tmp_path, small):
    export(small, tmp_path / "a.jsonl")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary").write_text("dear diary")
    result = run(tmp_path / "home", tmp_path / "a.jsonl")
    assert result.exit_code == 3 and "not empty" in result.stderr
    assert os.listdir(tmp_path / "home") == ["diary"]
    result = run(tmp_path / "a.jsonl", tmp_path / "a.jsonl")
    assert result.exit_code == 3
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", tmp_path / "a.jsonl", "-o", "max_index_num=nonsense").exit_code == 2
    options = [part for name, value in SMALL.items() for part in ("-o", f"{name}={value}")]
    assert run(tmp_path / "empty", tmp_path / "a.jsonl", *options).exit_code == 0
    assert run(tmp_path / "deep" / "er" / "new", tmp_path / "a.jsonl", *options).exit_code == 0
    assert len(contents(tmp_path / "deep" / "er" / "new")) == len(contents(tmp_path / "empty")) == len(BODIES)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_a_store_that_is_written_by_another(small, tmp_path):
    export(small, tmp_path / "a.jsonl")
    with MessageStore.open(small, config=config()):
        with pytest.raises(StoreLockedError):
            import_files(small, [tmp_path / "a.jsonl"], ImportOptions(config=config()))
    assert len(contents(small)) == len(BODIES)


def test_an_import_is_appended(golden_copy, tmp_path):
    root = golden_copy("broker")
    before = contents(root)
    export(root, tmp_path / "a.parquet")
    result = run(root, tmp_path / "a.parquet", "--json", "-o", "messageDelayLevel=1s 2s 30m 1h")
    value = json.loads(result.stdout)
    assert (value["created"], value["messages"], value["first_phy_offset"]) == (False, 11013, 5069798)
    after = contents(root)
    assert after[: len(before)] == before
    assert [each["body"] for each in after[len(before) :]] == [each["body"] for each in before]
    with MessageStore.open(root, read_only=True) as store:
        assert len(store.query_message("Orders", "ORD-100000")) == 8
        assert store.max_queue_offset("Payments", 0) == 10
    assert list(verify(root, StoreConfig(**golden.geometry("broker")))) == []


class Stop(Exception):
    pass


def test_an_import_that_is_stopped_says_what_is_in_the_store(small, tmp_path):
    (tmp_path / "b.jsonl").write_text("".join(f'{{"topic":"A","body":"{i}"}}\n' for i in range(9000)))
    size = (tmp_path / "b.jsonl").stat().st_size
    told = []

    def stop_at(limit):
        def progress(done, total):
            if done > limit:
                raise Stop

        return progress

    # While it is checked nothing is put.
    with pytest.raises(Stop):
        import_files(
            small,
            [tmp_path / "b.jsonl"],
            ImportOptions(config=config()),
            progress=stop_at(size // 2),
            on_stop=lambda *each: told.append(each),
        )
    assert (told, len(contents(small))) == ([], len(BODIES))
    with pytest.raises(Stop):
        import_files(
            small,
            [tmp_path / "b.jsonl"],
            ImportOptions(config=config()),
            progress=stop_at(size + size // 2),
            on_stop=lambda *each: told.append(each),
        )
    ((number, place),) = told
    assert 0 < number < 9000
    assert place == f"{tmp_path / 'b.jsonl'}, line {number}"
    assert [each["body"] for each in contents(small)[len(BODIES) :]] == [str(i) for i in range(number)]
    # A new store is there as a whole or not at all.
    with pytest.raises(Stop):
        import_files(
            tmp_path / "new", [tmp_path / "b.jsonl"], ImportOptions(config=config()), progress=stop_at(size // 2)
        )
    assert sorted(os.listdir(tmp_path)) == ["b.jsonl", "small"]


def test_a_kill_leaves_no_half_store(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"topic":"A","keys":["K"],"body":"x"}\n' * 9000)
    program = (
        "import sys, time\n"
        "import rmqstore.offline.importing as engine\n"
        "from rmqstore.cli import main\n"
        "each, calls = engine._Import.each, []\n"
        "def stop(self, chunk, *calls_of):\n"
        "    calls.append(each(self, chunk, *calls_of))\n"
        "    if len(calls) == 3:\n"
        "        print('stopped', file=sys.stderr, flush=True)\n"
        # Not one long sleep: a signal that came just before it would be looked at after it.
        "        for _ in range(6000):\n"
        "            time.sleep(0.01)\n"
        "    return calls[-1]\n"
        "engine._Import.each = stop\n"
        "main(['import', *sys.argv[1:]])\n"
    )
    options = [part for name, value in ROOMY.items() for part in ("-o", f"{name}={value}")]
    for number in (signal.SIGKILL, signal.SIGINT):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "new"), str(tmp_path / "b.jsonl"), *options],
            stderr=subprocess.PIPE,
            text=True,
            # A run in the background of a shell inherits that the signal is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert child.stderr.readline() == "stopped\n"
        child.send_signal(number)
        code = child.wait(240)
        child.stderr.close()
        assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
        assert not (tmp_path / "new").exists()
    assert run(tmp_path / "new", tmp_path / "b.jsonl", *options).exit_code == 0
    assert len(contents(tmp_path / "new")) == 9000


def test_readers_see_an_import_grow(small, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"topic":"A","body":"x"}\n' * 5000)
    seen = []
    thread = threading.Thread(
        target=lambda: seen.append(import_files(small, [tmp_path / "b.jsonl"], ImportOptions(config=config())))
    )
    thread.start()
    with MessageStore.open(small, config=config(), read_only=True) as reader:
        thread.join(240)
        reader.refresh()
        assert reader.max_queue_offset("A") == 5000
    assert seen[0].messages == 5000


def test_without_pyarrow_it_says_what_to_install(small, tmp_path, monkeypatch):
    export(small, tmp_path / "a.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run(tmp_path / "new", tmp_path / "a.jsonl")
    assert result.exit_code == 3
    assert "rmqstore[arrow]" in result.stderr


@pytest.mark.parametrize("by_program", [True, False])
def test_into_a_store_into_which_nothing_was_put(tmp_path, by_program):
    root = tmp_path / "store"
    MessageStore.open(root, config=config()).close()
    (tmp_path / "rows.jsonl").write_text('{"topic":"T","body":"x"}\n')
    for command in ("info", "verify", "rebuild", "recover", "tail"):
        result = CliRunner().invoke(main, [command, str(root)])
        assert result.exit_code == 3
        assert f"the store is empty [{root}]" in result.stderr
    if by_program:
        assert import_files(root, [tmp_path / "rows.jsonl"], ImportOptions(config=config())).messages == 1
    else:
        result = run(root, tmp_path / "rows.jsonl", *SMALL_OPTIONS)
        assert result.exit_code == 3 and "made with mapped_file_size_commit_log=4096" in result.stderr
        result = run(root, tmp_path / "rows.jsonl")
        assert result.exit_code == 0, result.stderr
    with MessageStore.open(root, read_only=True) as store:
        assert [message.body for message in store.messages()] == [b"x"]


def test_into_a_store_without_a_message_with_the_usual_sizes(tmp_path, monkeypatch):
    root = tmp_path / "store"
    MessageStore.open(root, config=config()).close()
    monkeypatch.setattr("rmqstore.offline.importing.StoreConfig", lambda: config())
    (tmp_path / "rows.jsonl").write_text('{"topic":"T","body":"x"}\n')
    assert import_files(root, [tmp_path / "rows.jsonl"]).messages == 1
