"""Exports: every format says what Java reads from a broker's store, every condition what a plain loop would choose.

What is chosen is compared with a loop over all messages, what a message is with what the real store read.  Damage is made by
writing into copies.  Kills and interrupts hit a process of its own.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib

import golden
import pytest
from click.testing import CliRunner

from rmqstore import (
    ChecksumError,
    CorruptionError,
    Message,
    MessageStore,
    StoreConfig,
    StoreError,
)
from rmqstore.cli import main
from rmqstore.files.output_file import format_of
from rmqstore.offline.export import ExportOptions, export
from rmqstore.offline.export_files import FORMATS, message_row
from rmqstore.selection import Selection

csv.field_size_limit(1 << 30)
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
HOSTILE = [
    b"",
    b"plain",
    b'quotes "and", commas; semicolons',
    b"lines\nmore\r\nand\rmore",
    b"zero\0byte",
    b"\xff\xfe no text",
    "\ufeffbom ключ 鍵 😀 \u202e\x1b[31m\x7f\x85\u2028".encode(),
    b"=1+1",
    b"<script>alert(1)</script>",
    b" spaces ",
    bytes(range(256)) * 8,
]


def run(*arguments, **options):
    result = CliRunner().invoke(main, ["export", *map(str, arguments)], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows_of(path):
    """The rows of a text export as dicts."""
    with open(path, encoding="utf-8", newline="") as file:
        if str(path).endswith(".csv"):
            return list(csv.DictReader(file))
        return [json.loads(line) for line in file]


def body_of(row, name="body"):
    import base64

    text, encoding = row[name], row[f"{name}_encoding"]
    if encoding == "utf-8":
        return text.encode()
    return bytes.fromhex(text) if encoding == "hex" else base64.b64decode(text)


def small_store(path, bodies=HOSTILE, **options):
    clock = iter(range(T0, T0 + 10**9))
    config = StoreConfig(**{**SMALL, "clock": lambda: next(clock), **options})
    with MessageStore.open(path, config=config) as store:
        for i, body in enumerate(bodies):
            store.put_message(
                Message(f"T{i % 3}", body, keys=[f"K-{i}", "ALL"], tags=f"tag{i % 2}", properties={"n": str(i)}),
                queue_id=i % 2,
            )
    return path


# ---------------------------------------------------------------------------------------------------------------------
# The contents of a file


def test_json_lines_are_what_java_reads(broker, tmp_path):
    report = export(broker, tmp_path / "a.jsonl")
    rows = {row["phy_offset"]: row for row in rows_of(tmp_path / "a.jsonl")}
    expected = {line["offset"]: line for line in golden.lines("broker", "msg")}
    assert report.messages == len(rows) == len(expected) > 10_000
    assert list(rows) == sorted(rows)
    for offset, line in expected.items():
        row = rows[offset]
        assert (row["topic"], row["queue_id"], row["queue_offset"]) == (
            line["topic"],
            line["queueId"],
            line["queueOffset"],
        )
        assert (row["size"], row["msg_id"], row["flag"]) == (line["size"], line["msgId"], line["flag"])
        assert (row["born_timestamp"], row["store_timestamp"]) == (line["born"], line["store"])
        assert (f"/{row['born_host']}", f"/{row['store_host']}") == (line["bornHost"], line["storeHost"])
        assert row["properties"] == line["props"]
        assert row["corrupt"] is False
    # Bodies as the producers sent them, decompressed.
    by_id = {row["msg_id"]: row for row in rows.values()}
    compressed = checked = 0
    for sent in golden.sent():
        row = by_id.get(sent.get("offset_msg_id"))
        if row is not None and "body_crc" in sent and row["topic"] == sent.get("topic"):
            body = body_of(row)
            assert (len(body), zlib.crc32(body) & 0x7FFFFFFF) == (sent["body_len"], sent["body_crc"])
            checked += 1
            compressed += row["sys_flag"] & 1
    assert checked > 1000
    assert compressed > 100


def test_all_formats_have_the_same_rows(broker, tmp_path):
    with MessageStore.open(broker, read_only=True) as store:
        want = pa.Table.from_batches(store.scan())
    for name in ("a.jsonl", "a.csv", "a.arrow", "a.parquet"):
        assert export(broker, tmp_path / name).messages == want.num_rows
    assert pa.ipc.open_file(tmp_path / "a.arrow").read_all().equals(want)
    assert pq.read_table(tmp_path / "a.parquet").equals(want)
    lines = rows_of(tmp_path / "a.jsonl")
    for row, told in zip(want.to_pylist(), lines, strict=True):
        assert told.pop("body_encoding") in ("utf-8", "base64")
        told["body"] = row.pop("body") and told["body"]
        for name in ("born_timestamp", "store_timestamp"):
            row[name] = round(row[name].timestamp() * 1000)
        row["properties"] = dict(row["properties"])
        assert told == {"body": told["body"], **row}
    bodies = want.column("body").to_pylist()
    for name in ("a.jsonl", "a.csv"):
        assert [body_of(row) for row in rows_of(tmp_path / name)] == bodies
    for row, told in zip(rows_of(tmp_path / "a.csv"), lines, strict=True):
        assert row["keys"] == " ".join(told["keys"])
        assert json.loads(row["properties"]) == told["properties"]
        assert (row["tags"] or None) == told["tags"]
        assert row["phy_offset"] == str(told["phy_offset"])
        assert row["store_timestamp"].endswith("+00:00")


@pytest.mark.parametrize("form", ["text", "hex", "base64"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.arrow", "a.parquet"])
def test_hostile_bodies_come_through(tmp_path, name, form):
    small_store(tmp_path / "s")
    export(tmp_path / "s", tmp_path / name, options=ExportOptions(body=form))
    if name in ("a.arrow", "a.parquet"):
        table = pa.ipc.open_file(tmp_path / name).read_all() if name == "a.arrow" else pq.read_table(tmp_path / name)
        rows = table.to_pylist()
    else:
        rows = rows_of(tmp_path / name)
    assert [body_of(row) for row in rows] == HOSTILE
    assert {row["body_encoding"] for row in rows} <= ({"utf-8", "base64"} if form == "text" else {form})
    # Text stays text where it can.
    if form == "text":
        assert rows[3]["body"] == HOSTILE[3].decode()


def test_a_lone_carriage_return_ends_no_row_of_csv(tmp_path):
    with MessageStore.open(tmp_path / "s", config=StoreConfig(**SMALL, clock=lambda: T0)) as store:
        store.put_message(Message("T", b"one\rtwo", keys=["k\r1"], tags="a\rb"))
        store.put_message(Message("T", b"last", tags="c"))
    export(tmp_path / "s", tmp_path / "a.csv")
    assert [(row["keys"], row["tags"], body_of(row)) for row in rows_of(tmp_path / "a.csv")] == [
        ("k\r1", "a\rb", b"one\rtwo"),
        ("", "c", b"last"),
    ]
    # Other rows end as before, with a line feed alone.
    assert b"\r\n" not in (tmp_path / "a.csv").read_bytes()


def test_single_files(tmp_path):
    small_store(tmp_path / "s")
    report = export(tmp_path / "s", tmp_path / "out", options=ExportOptions(format="files"))
    rows = rows_of(tmp_path / "out" / "messages.jsonl")
    assert report.messages == len(rows) == len(HOSTILE)
    assert [(tmp_path / "out" / row["body_file"]).read_bytes() for row in rows] == HOSTILE
    assert "body" not in rows[0]
    assert rows[4]["properties"]["n"] == "4"
    # Never into a folder that has something in it, whatever it is told.
    with pytest.raises(StoreError, match="not an empty folder"):
        export(tmp_path / "s", tmp_path / "out", options=ExportOptions(format="files", force=True))
    (tmp_path / "empty").mkdir()
    assert export(tmp_path / "s", tmp_path / "empty", options=ExportOptions(format="files")).messages == len(HOSTILE)
    assert sorted(os.listdir(tmp_path)) == ["empty", "out", "s"]


@pytest.mark.parametrize("compress, ending", [("gzip", ".gz"), ("zstd", ".zst")])
def test_compressed_text(tmp_path, compress, ending):
    small_store(tmp_path / "s")
    export(tmp_path / "s", tmp_path / "a.jsonl")
    export(tmp_path / "s", tmp_path / f"b.jsonl{ending}")
    packed = (tmp_path / f"b.jsonl{ending}").read_bytes()
    if compress == "gzip":
        plain = gzip.decompress(packed)
    else:
        zstandard = pytest.importorskip("zstandard")
        plain = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    assert plain == (tmp_path / "a.jsonl").read_bytes()
    # The same messages give the same bytes, at whatever time.
    export(tmp_path / "s", tmp_path / f"c.jsonl{ending}", options=ExportOptions(compression=compress))
    assert (tmp_path / f"c.jsonl{ending}").read_bytes() == packed


def test_columns_in_their_order(tmp_path):
    small_store(tmp_path / "s")
    export(tmp_path / "s", tmp_path / "a.csv", options=ExportOptions(columns=["tags", "phy_offset", "unique_key"]))
    assert list(rows_of(tmp_path / "a.csv")[0]) == ["tags", "phy_offset", "unique_key"]
    export(tmp_path / "s", tmp_path / "a.parquet", options=ExportOptions(columns=["tags", "phy_offset", "unique_key"]))
    assert pq.read_table(tmp_path / "a.parquet").column_names == ["tags", "phy_offset", "unique_key"]
    export(tmp_path / "s", tmp_path / "b.jsonl", options=ExportOptions(body="none"))
    assert not {"body", "body_encoding"} & set(rows_of(tmp_path / "b.jsonl")[0])


def test_without_pyarrow_text_goes_and_columns_say_what_to_install(tmp_path):
    small_store(tmp_path / "s")
    export(tmp_path / "s", tmp_path / "a.jsonl")
    program = (
        "import sys; sys.modules['pyarrow'] = None\nfrom rmqstore.cli import main\nmain(['export', *sys.argv[1:]])\n"
    )

    def without(*arguments):
        return subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=240
        )

    for name in ("b.jsonl", "b.csv", "b.jsonl.gz"):
        assert without(tmp_path / "s", "-O", tmp_path / name).returncode == 0
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    refused = without(tmp_path / "s", "-O", tmp_path / "b.parquet")
    assert refused.returncode == 3
    assert "rmqstore[arrow]" in refused.stderr
    assert not (tmp_path / "b.parquet").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Which messages

MIDDLE = 1795239165000
SELECTIONS = [
    {"topics": ("Orders",)},
    {"topics": ("Orders", "Payments"), "queue_ids": (1, 3)},
    {"tags": "created || tx"},
    {"topics": ("Orders",), "tags": "取消"},
    {"begin": MIDDLE, "end": MIDDLE + 500},
    {"begin": MIDDLE},
    {"end": MIDDLE},
    {"begin_phy_offset": 1, "end_phy_offset": 2_000_001},
    {"begin_phy_offset": 1_048_000, "end_phy_offset": 1_049_500},
    {"begin_phy_offset": 6_000_000},
    {"topics": ("Orders",), "begin_queue_offset": 100, "end_queue_offset": 105},
    {"topics": ("Orders", "Payments"), "queue_ids": (2,), "begin_queue_offset": 2490, "tags": "created||paid"},
    {"topics": ("Batches",), "begin_queue_offset": 20, "end_queue_offset": 60},
    {"topics": ("Orders",), "keys": ("CUST-1", "ORD-100000")},
    {"topics": ("Orders", "Payments"), "keys": ("PAY-3", "CUST-2"), "begin": MIDDLE},
    {"keys": ("CUST-1",)},
    {"topics": ("Orders",), "keys": ("CUST-1",), "begin_phy_offset": 1_000_001, "end_phy_offset": 4_000_000},
    {"topics": ("Orders",), "keys": ("CUST-1",), "begin_queue_offset": 0, "end_queue_offset": 2100},
    {"topics": ("no such topic",)},
    {"topics": ("Orders",), "keys": ("no such key",)},
]


def wanted(messages, selection):
    """The messages that a selection means, by a plain loop."""
    tags = selection.get("tags")
    names = None if tags is None else [name.strip() for name in tags.split("||")]
    for message in messages:
        low, high = selection.get("begin_queue_offset"), selection.get("end_queue_offset")
        if (
            ("topics" not in selection or message.topic in selection["topics"])
            and ("queue_ids" not in selection or message.queue_id in selection["queue_ids"])
            and (names is None or message.tags in names)
            and message.store_timestamp >= selection.get("begin", 0)
            and message.store_timestamp <= selection.get("end", 2**62)
            and message.phy_offset >= selection.get("begin_phy_offset", 0)
            and message.phy_offset < selection.get("end_phy_offset", 2**62)
            and (low is None or message.queue_offset >= low)
            and (high is None or message.queue_offset < high)
            and ("keys" not in selection or {*message.keys, message.unique_key} & set(selection["keys"]))
        ):
            yield message.phy_offset


@pytest.fixture(scope="module")
def broker_messages(broker):
    with MessageStore.open(broker, read_only=True) as store:
        return list(store.messages())


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda value: "-".join(value))
def test_selections_are_those_of_a_plain_loop(broker, broker_messages, tmp_path, selection):
    want = list(wanted(broker_messages, selection))
    assert (
        want
        or any("no such" in name for name in selection.get("topics", ()) + selection.get("keys", ()))
        or (selection == {"begin_phy_offset": 6_000_000})
    ), "this selection tests nothing"
    assert len(want) < len(broker_messages)
    columns = ["phy_offset", "body"]
    report = export(broker, tmp_path / "a.jsonl", Selection(**selection), ExportOptions(columns=columns))
    assert [row["phy_offset"] for row in rows_of(tmp_path / "a.jsonl")] == want
    assert report.messages == len(want)
    export(broker, tmp_path / "a.arrow", Selection(**selection), ExportOptions(columns=columns))
    assert pa.ipc.open_file(tmp_path / "a.arrow").read_all().column("phy_offset").to_pylist() == want


def test_a_range_of_queue_offsets_needs_a_topic(broker):
    with pytest.raises(ValueError, match="needs a topic"):
        Selection(begin_queue_offset=1)
    assert run(broker, "--begin-queue-offset", 1).exit_code == 2


@pytest.mark.parametrize("lost", ["newest", "oldest", "one in the middle", "all", "two"])
def test_a_key_is_found_where_index_files_are_lost(golden_copy, broker_messages, tmp_path, lost):
    root = golden_copy("broker")
    names = sorted(os.listdir(root / "index"))
    for name in {
        "newest": names[-1:],
        "oldest": names[:1],
        "one in the middle": names[2:3],
        "all": names,
        "two": names[1:3],
    }[lost]:
        (root / "index" / name).unlink()
    for keys in (("CUST-1",), ("ORD-100000", "ORD-102499"), ("CUST-77",)):
        selection = {"topics": ("Orders",), "keys": keys}
        want = list(wanted(broker_messages, selection))
        for name in ("a.jsonl", "a.arrow"):
            export(root, tmp_path / name, Selection(**selection), ExportOptions(columns=["phy_offset"], force=True))
        assert [row["phy_offset"] for row in rows_of(tmp_path / "a.jsonl")] == want
        assert pa.ipc.open_file(tmp_path / "a.arrow").read_all().column("phy_offset").to_pylist() == want


def test_a_header_of_an_index_file_that_lies_hides_nothing(golden_copy, broker_messages, tmp_path):
    root = golden_copy("broker")
    names = sorted(os.listdir(root / "index"))
    (root / "index" / names[1]).unlink()
    with open(root / "index" / names[0], "r+b") as file:
        # The phy offsets of the first and last entry: they now say that the file reaches into the middle of a record.
        file.seek(16)
        file.write((0).to_bytes(8, "big") + (4_000_001).to_bytes(8, "big"))
    selection = {"topics": ("Orders",), "keys": ("CUST-1",)}
    export(root, tmp_path / "a.jsonl", Selection(**selection), ExportOptions(columns=["phy_offset"]))
    assert [row["phy_offset"] for row in rows_of(tmp_path / "a.jsonl")] == list(wanted(broker_messages, selection))


def test_clocks_that_step_back_lose_nothing(tmp_path):
    times = [T0 + i * 60_000 for i in range(300)]
    # Half an hour back and forth, around segments' bounds too.
    times = [each - 1_800_000 if (i // 7) % 2 else each for i, each in enumerate(times)]
    clock = iter(times)
    config = StoreConfig(**{**SMALL, "clock": lambda: next(clock)})
    with MessageStore.open(tmp_path / "s", config=config) as store:
        for i in range(300):
            store._state.last_store_timestamp = 0
            store.put_message(Message("T", b"x" * 100, keys=["K"]), queue_id=0)
            if i == 299:
                clock = iter(lambda: times[-1], None)
        messages = list(store.messages())
        assert len(store.commit_log.files) > 5
    for low, high in [
        (T0 + 3_000_000, T0 + 6_000_000),
        (T0 + 9_000_000, T0 + 9_000_001),
        (0, T0),
        (T0 + 17_000_000, 2**62),
    ]:
        selection = {"begin": low, "end": high}
        export(tmp_path / "s", tmp_path / "a.jsonl", Selection(**selection), ExportOptions(force=True))
        assert [row["phy_offset"] for row in rows_of(tmp_path / "a.jsonl")] == list(wanted(messages, selection))


# ---------------------------------------------------------------------------------------------------------------------
# Damage


@pytest.fixture
def damaged(golden_copy):
    """A broker's store with a flipped body, a broken record in the middle, and one in the newest segment."""
    root = golden_copy("broker")
    with MessageStore.open(root, read_only=True) as store:
        messages = list(store.messages())
    flipped = messages[2]
    broken = next(each for each in messages if each.phy_offset > 1_500_000)
    newest = next(each for each in messages if each.phy_offset > 4_600_000)

    def write(phy_offset, pos, data):
        name = f"{phy_offset // 1048576 * 1048576:020}"
        with open(root / "commitlog" / name, "r+b") as file:
            file.seek(phy_offset % 1048576 + pos)
            file.write(data)

    write(flipped.phy_offset, 120, b"\xaa\x55\xaa")
    write(broken.phy_offset, 4, b"\0\0\0\0")
    write(newest.phy_offset, 4, b"\1\2\3\4")
    return root, messages, flipped, broken, newest


def test_damage_ends_an_export_and_says_where(damaged, tmp_path):
    root, _, flipped, broken, _ = damaged
    for name in ("a.jsonl", "a.parquet", "a.csv.gz"):
        with pytest.raises(ChecksumError, match=f"phy offset {flipped.phy_offset}.*--corrupt") as caught:
            export(root, tmp_path / name)
        assert caught.value.pos == flipped.phy_offset
        with pytest.raises(CorruptionError, match="no whole record") as caught:
            export(root, tmp_path / name, Selection(begin_phy_offset=1_048_576))
        assert caught.value.pos == broken.phy_offset - 1_048_576
        assert caught.value.path.endswith("00000000000001048576")
    assert os.listdir(tmp_path) == ["copy-1"]
    result = run(root, "-O", tmp_path / "a.jsonl")
    assert result.exit_code == 3
    assert "--corrupt skip" in result.stderr


@pytest.mark.parametrize("mode", ["skip", "report"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.arrow", "a.parquet"])
def test_damage_is_passed_over_and_counted(damaged, tmp_path, mode, name):
    root, messages, flipped, broken, newest = damaged
    report = export(
        root, tmp_path / name, options=ExportOptions(corrupt=mode, columns=["phy_offset", "body", "corrupt"])
    )
    lost = {broken.phy_offset, newest.phy_offset} | ({flipped.phy_offset} if mode == "skip" else set())
    want = [message.phy_offset for message in messages if message.phy_offset not in lost]
    if name in ("a.arrow", "a.parquet"):
        table = pa.ipc.open_file(tmp_path / name).read_all() if name == "a.arrow" else pq.read_table(tmp_path / name)
        rows = table.to_pylist()
    else:
        rows = rows_of(tmp_path / name)
    # The records behind the damage in the newest segment are there too.
    assert [int(row["phy_offset"]) for row in rows] == want
    assert (report.corrupt_records, report.damaged_stretches) == (1, 2)
    assert report.damaged_size == broken.size + newest.size
    marked = [int(row["phy_offset"]) for row in rows if row["corrupt"] in (True, "true")]
    assert marked == ([flipped.phy_offset] if mode == "report" else [])


def test_damage_is_told_at_the_command_line(damaged, tmp_path):
    root, _, _, _, _ = damaged
    result = run(root, "-O", tmp_path / "a.jsonl", "--corrupt", "skip")
    assert result.exit_code == 0
    assert "2 damaged parts of the log" in result.stderr
    assert "1 corrupt messages" in result.stderr
    result = run(root, "-O", tmp_path / "b.jsonl", "--corrupt", "skip", "--json")
    value = json.loads(result.stdout)
    assert (value["type"], value["corrupt_records"], value["damaged_stretches"]) == ("export", 1, 2)


def test_units_that_lead_nowhere_are_damage(damaged, tmp_path):
    root, _, _, broken, _ = damaged
    place = {"topics": (broken.topic,), "queue_ids": (broken.queue_id,), "begin_queue_offset": broken.queue_offset}
    with pytest.raises(CorruptionError, match="no whole record"):
        export(root, tmp_path / "a.jsonl", Selection(**place, end_queue_offset=broken.queue_offset + 2))
    report = export(
        root,
        tmp_path / "a.jsonl",
        Selection(**place, end_queue_offset=broken.queue_offset + 2),
        ExportOptions(corrupt="skip"),
    )
    assert (report.messages, report.damaged_stretches) == (1, 1)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "files"])
def test_bodies_that_cannot_be_decompressed(tmp_path, name):
    config = StoreConfig(**SMALL, clock=lambda: T0)
    with MessageStore.open(tmp_path / "s", config=config) as store:
        store.put_message(Message("T", zlib.compress(b"sound" * 9), keys=["K"], sys_flag=0x301))
        store.put_message(Message("T", b"this is no zlib", sys_flag=0x301))
        store.put_message(Message("T", b"plain", keys=["K"]))
    kind = "files" if name == "files" else None
    with pytest.raises(CorruptionError, match="cannot be decompressed"):
        export(tmp_path / "s", tmp_path / name, options=ExportOptions(format=kind))
    assert (
        export(tmp_path / "s", tmp_path / ("1" + name), options=ExportOptions(format=kind, corrupt="skip")).messages
        == 2
    )
    report = export(tmp_path / "s", tmp_path / ("2" + name), options=ExportOptions(format=kind, corrupt="report"))
    assert (report.messages, report.corrupt_records) == (3, 1)
    if name == "a.parquet":
        assert pq.read_table(tmp_path / "2a.parquet").column("body").to_pylist() == [
            b"sound" * 9,
            b"this is no zlib",
            b"plain",
        ]
    elif name == "a.jsonl":
        rows = rows_of(tmp_path / "2a.jsonl")
        assert [(row["body"], row["body_encoding"]) for row in rows][1] == ("this is no zlib", "utf-8")
    else:
        rows = rows_of(tmp_path / "2files" / "messages.jsonl")
        assert (tmp_path / "2files" / rows[1]["body_file"]).read_bytes() == b"this is no zlib"
        assert (tmp_path / "2files" / rows[0]["body_file"]).read_bytes() == b"sound" * 9


def test_a_lost_segment_is_damage(golden_copy, tmp_path):
    root = golden_copy("broker")
    (root / "commitlog" / f"{1048576 * 2:020}").unlink()
    try:
        config = StoreConfig.infer(root)
    except StoreError:
        config = StoreConfig(**golden.geometry("broker"))
    with pytest.raises(StoreError):
        export(root, tmp_path / "a.jsonl", options=ExportOptions(config=config))
    assert not (tmp_path / "a.jsonl").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Output files


def test_an_output_that_exists_is_kept_unless_forced(tmp_path):
    small_store(tmp_path / "s")
    target = tmp_path / "a.jsonl"
    target.write_text("mine")
    result = run(tmp_path / "s", "-O", target)
    assert (result.exit_code, target.read_text()) == (3, "mine")
    assert "--force" in result.stderr
    assert run(tmp_path / "s", "-O", target, "--force").exit_code == 0
    assert len(rows_of(target)) == len(HOSTILE)
    # One that fails in the middle leaves what was there.
    target.write_text("mine")
    with pytest.raises(ZeroDivisionError):
        export(
            tmp_path / "s",
            target,
            options=ExportOptions(force=True),
            progress=lambda done, total: 1 / 0 if done else None,
        )
    assert target.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "s"]


def test_a_link_stays_and_a_directory_is_refused(tmp_path):
    small_store(tmp_path / "s")
    (tmp_path / "there").mkdir()
    os.symlink(tmp_path / "there" / "b.jsonl", tmp_path / "a.jsonl")
    export(tmp_path / "s", tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").is_symlink()
    assert len(rows_of(tmp_path / "there" / "b.jsonl")) == len(HOSTILE)
    assert run(tmp_path / "s", "-O", tmp_path / "there", "--format", "jsonl").exit_code == 3
    assert run(tmp_path / "s", "-O", tmp_path / "no" / "such" / "a.jsonl").exit_code == 3


def test_nothing_is_written_into_the_store(golden_copy, tmp_path):
    root = golden_copy("broker")
    before = golden.tree(root)
    os.symlink(root / "config", tmp_path / "link")
    for output in (root / "a.jsonl", root / "commitlog" / "a.jsonl", tmp_path / "link" / "a.jsonl", root):
        result = run(root, "-O", output, "--format", "jsonl")
        assert (result.exit_code, "is in the store" in result.stderr) == (3, True)
    assert run(root, "-O", root / "bodies", "--format", "files").exit_code == 3
    pytest.importorskip("prometheus_client")
    assert CliRunner().invoke(main, ["metrics", str(root), "-O", str(root / "a.prom")]).exit_code == 3
    assert golden.tree(root) == before


def test_a_range_of_queue_offsets_within_a_batch(tmp_path):
    config = StoreConfig(**SMALL)
    with MessageStore.open(tmp_path / "s", config=config) as store:
        for number in (3, 5):
            inner = Message("B", b"x" * 10, keys=["K"], properties={"INNER_NUM": str(number)}, sys_flag=0x80)
            store.put_message(inner)
    for begin, end, want in [(0, 1, [0]), (2, 3, [0]), (3, 4, [3]), (2, 4, [0, 3]), (7, 99, [3]), (8, 9, [])]:
        for name in ("a.jsonl", "a.arrow"):
            selection = Selection(topics=("B",), begin_queue_offset=begin, end_queue_offset=end)
            export(
                tmp_path / "s",
                tmp_path / name,
                selection,
                ExportOptions(columns=["queue_offset"], config=config, force=True),
            )
        assert [row["queue_offset"] for row in rows_of(tmp_path / "a.jsonl")] == want
        table = pa.ipc.open_file(tmp_path / "a.arrow").read_all()
        assert table.column("queue_offset").to_pylist() == want


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("kind", ["jsonl", "csv", "arrow", "parquet"])
def test_a_full_disk_is_an_error(tmp_path, kind):
    small_store(tmp_path / "s")
    result = run(tmp_path / "s", "-O", "/dev/full", "--format", kind)
    assert result.exit_code == 3
    assert "No space left" in result.stderr


def slow_export(store, target, *more):
    """An export in a process of its own that stops after its first batch until it is killed."""
    program = (
        "import sys, time\n"
        "import rmqstore.offline.export as engine\n"
        "from rmqstore.cli import main\n"
        "tell = engine.Source.tell\n"
        "def stop(self, at):\n"
        "    tell(self, at)\n"
        "    if at > self.begin:\n"
        "        print('stopped', file=sys.stderr, flush=True)\n"
        # Not one long sleep: a signal that came just before it would be looked at after it.
        "        for _ in range(6000):\n"
        "            time.sleep(0.01)\n"
        "engine.Source.tell = stop\n"
        "main(['export', *sys.argv[1:]])\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(store), "-O", str(target), *more], stderr=subprocess.PIPE, text=True,
        # A run in the background of a shell inherits that the signal is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert child.stderr.readline() == "stopped\n"
    return child


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv.gz", "a.parquet", "files"])
def test_an_interrupt_leaves_nothing_and_a_kill_no_output(broker, tmp_path, name):
    more = ["--format", "files"] if name == "files" else []
    # Ctrl-C, and a kill that can be answered.
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143))[: 2 if name == "files" else 1]:
        child = slow_export(broker, tmp_path / name, *more)
        assert any(each.endswith(".part") for each in os.listdir(tmp_path)), "it had not begun to write"
        child.send_signal(number)
        assert child.wait(240) == code
        child.stderr.close()
        assert os.listdir(tmp_path) == []
    child = slow_export(broker, tmp_path / name, *more)
    child.kill()
    child.wait(240)
    child.stderr.close()
    assert not (tmp_path / name).exists()
    # Leftovers do not disturb the next one.
    assert run(broker, "-O", tmp_path / name, "--topic", "Payments", *more).exit_code == 0
    assert (tmp_path / name).exists()


def test_standard_output(tmp_path):
    small_store(tmp_path / "s")
    export(tmp_path / "s", tmp_path / "a.jsonl")
    for kind, more in [("jsonl", []), ("csv", ["--compress", "gzip"]), ("arrow", []), ("parquet", [])]:
        done = subprocess.run(
            [sys.executable, "-m", "rmqstore", "export", str(tmp_path / "s"), "--format", kind, *more],
            capture_output=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.decode().strip() == f"{len(HOSTILE)} messages"
        if kind == "jsonl":
            assert done.stdout == (tmp_path / "a.jsonl").read_bytes()
        elif kind == "csv":
            assert gzip.decompress(done.stdout).count(b"tag1") == len(HOSTILE) // 2 * 2
        elif kind == "arrow":
            assert pa.ipc.open_stream(done.stdout).read_all().num_rows == len(HOSTILE)
        else:
            assert pq.read_table(io.BytesIO(done.stdout)).num_rows == len(HOSTILE)


def test_on_a_terminal_nothing_hides(tmp_path, monkeypatch):
    small_store(tmp_path / "s")
    for kind in ("jsonl", "csv"):
        file = io.BytesIO()
        export(tmp_path / "s", file, options=ExportOptions(format=kind, shown=True))
        text = file.getvalue().decode()
        assert all(char.isprintable() or char in "\n" for char in text)
        assert "鍵" in text
        if kind == "jsonl":
            assert [body_of(json.loads(line)) for line in text.splitlines()] == HOSTILE


def test_what_makes_no_sense_is_wrong_usage(tmp_path):
    small_store(tmp_path / "s")
    for more in (
        ["-O", tmp_path / "noending"],
        ["-O", tmp_path / "a.jsonl", "--body", "raw"],
        ["-O", tmp_path / "a.csv", "--columns", "topic,nonsense"],
        ["-O", tmp_path / "a.csv", "--columns", "topic,topic"],
        ["-O", tmp_path / "a.parquet", "--compress", "lz4"],
        ["-O", tmp_path / "a.parquet.gz"],
        ["-O", tmp_path / "dir", "--format", "files", "--body", "hex"],
        ["--format", "files"],
        ["--begin", "yesterday-ish"],
    ):
        result = run(tmp_path / "s", *more)
        assert result.exit_code == 2, (more, result.output)
    assert os.listdir(tmp_path) == ["s"]
    assert run(tmp_path / "nowhere").exit_code == 3
    result = run(tmp_path / "s", "--topic", "Nope", "-O", tmp_path / "none.parquet")
    said = result.stderr.strip().splitlines()
    # A topic that is not there is said with those that are.
    wanted = ["no messages match", "the store has no topic Nope, only: T0, T1, T2"]
    assert (result.exit_code, said) == (1, wanted)
    # The command leaves no file then; the function makes one without a row.
    assert os.listdir(tmp_path) == ["s"]
    assert export(tmp_path / "s", tmp_path / "none.parquet", Selection(("Nope",))).messages == 0
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0


def test_endings():
    assert format_of("a/b.JSONL.gz") == ("jsonl", "gzip")
    assert format_of("x.csv.zst") == ("csv", "zstd")
    assert format_of("x.feather") == ("arrow", None)
    assert format_of("parquet") == (None, None)
    assert set(FORMATS) == {"jsonl", "csv", "arrow", "parquet", "files"}


# ---------------------------------------------------------------------------------------------------------------------
# Beside a writer, and much of it


def test_beside_a_writer(tmp_path):
    config = StoreConfig(
        **{**SMALL, "mapped_file_size_commit_log": 1 << 20, "max_hash_slot_num": 1000, "max_index_num": 5000}
    )
    with MessageStore.open(tmp_path / "s", config=config) as store:
        for i in range(500):
            store.put_message(Message("T", b"before %d" % i))
        ended = threading.Event()

        def write():
            while not ended.is_set():
                store.put_message(Message("T", b"later"))

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for number in range(5):
                name = tmp_path / f"a{number}.{'jsonl' if number % 2 else 'arrow'}"
                assert export(tmp_path / "s", name, options=ExportOptions(config=config)).messages >= 500
        finally:
            ended.set()
            thread.join()


def test_memory_does_not_grow_with_the_messages(tmp_path):
    peaks = {}
    for number in (500, 4000):
        config = StoreConfig(
            **{**SMALL, "mapped_file_size_commit_log": 1 << 24, "max_hash_slot_num": 1000, "max_index_num": 10000}
        )
        path = tmp_path / str(number)
        with MessageStore.open(path, config=config) as store:
            for _ in range(number // 100):
                store.put_messages([Message("T", os.urandom(16_000), keys=["K"]) for _ in range(100)])
        for name in ("a.jsonl", "a.parquet", "k.jsonl"):
            selection = Selection(topics=("T",), keys=("K",)) if name == "k.jsonl" else None
            before = pa.default_memory_pool().bytes_allocated()
            tracemalloc.start()
            export(path, tmp_path / name, selection, ExportOptions(force=True))
            peaks[name, number] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert pa.default_memory_pool().bytes_allocated() <= before + 1_000_000
    for name in ("a.jsonl", "k.jsonl"):
        assert peaks[name, 4000] < peaks[name, 500] + 4_000_000, peaks
    assert peaks["a.parquet", 4000] < 160_000_000, peaks


def test_a_message_as_a_row(broker):
    with MessageStore.open(broker, read_only=True) as store:
        message = store.message_at(0)
    assert message_row(message, ["size", "keys", "body"], "hex") == {
        "size": 484,
        "keys": ["ORD-100000", "CUST-0"],
        "body": message.body.hex(),
        "body_encoding": "hex",
    }
    assert time.time() > 0
