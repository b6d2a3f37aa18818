"""Bodies that are not what their compression flag says: every face marks them, and gives them as they are stored.

Brokers have such records: a half message that was put back after a check keeps the flag, while its body was decompressed; some
clients send raw DEFLATE.
"""

from __future__ import annotations

import base64
import csv
import json
import sys
import zlib

import anyio
import httpx
import pytest
import tiered_oracle
from click.testing import CliRunner
from every_disk import open_tiered

from rmqstore import ChecksumError, CorruptionError, Message, MessageStore, StoreConfig, StoreError, verify
from rmqstore.cli import main
from rmqstore.flatfile.flat_verify import verify_flat
from rmqstore.message import compress_body
from rmqstore.offline.export import ExportOptions, export
from rmqstore.selection import Selection
from rmqstore.spark.batches import ReadJob, piece_batches, spark_arrow_schema
from rmqstore.spark.options import ReadOptions
from rmqstore.spark.plan import LogPlan
from rmqstore.store.columns import scan_schema

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SENT = b'{"order":8}' * 30
_RAW = zlib.compressobj(wbits=-15)
# By key: sysFlag, the body as it is stored, and as it is given.
SOUND = {
    "plain": (0, b"plain", b"plain"),
    "zlib": (0x301, zlib.compress(SENT), SENT),
    "old-zlib": (0x1, zlib.compress(SENT), SENT),
    "lz4": (0x101, compress_body(SENT, "LZ4"), SENT),
    "zstd": (0x201, compress_body(SENT, "ZSTD"), SENT),
    "empty": (0x1, b"", b""),
    "empty-type-4": (0x401, b"", b""),
    "nothing-packed": (0x301, zlib.compress(b""), b""),
    "type-without-flag": (0x400, b"plain too", b"plain too"),
}
ODD = {
    "plain-as-old-zlib": (0x1, b"never compressed"),
    "plain-as-zlib": (0x301, b"never compressed"),
    "plain-as-lz4": (0x101, b"never compressed"),
    "plain-as-zstd": (0x201, b"never compressed"),
    "plain-as-type-4": (0x401, b"never compressed"),
    "raw-deflate": (0x1, _RAW.compress(SENT) + _RAW.flush()),
    "cut-zlib": (0x301, zlib.compress(SENT)[:-3]),
    "cut-lz4": (0x101, compress_body(SENT, "LZ4")[:-3]),
    "cut-zstd": (0x201, compress_body(SENT, "ZSTD")[:-3]),
}
BODIES = {key: sent for key, (_, _, sent) in SOUND.items()} | {key: stored for key, (_, stored) in ODD.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("flags") / "store"
    geometry = {"mapped_file_size_commit_log": 1 << 16, "max_hash_slot_num": 100, "max_index_num": 400}
    with MessageStore.open(path, config=StoreConfig(**geometry)) as store:
        for key in BODIES:
            flag, stored = SOUND[key][:2] if key in SOUND else ODD[key]
            store.put_message(Message("Orders", stored, keys=[key], sys_flag=flag))
    return path


@pytest.fixture
def store(path):
    with MessageStore.open(path, read_only=True) as store:
        yield store


def cli(*arguments):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def judged(rows) -> dict:
    return {row["keys"][0]: (bytes(row["body"]), row["corrupt"]) for row in rows}


EVERY = {key: (body, key in ODD) for key, body in BODIES.items()}


def test_messages(store):
    assert {message.keys[0]: message.corrupt for message in store.messages()} == {key: key in ODD for key in BODIES}
    for message in store.messages():
        (key,) = message.keys
        assert message.crc_agrees
        if key in SOUND:
            assert message.body == BODIES[key] and message.damage is None
            continue
        assert message.body_stored == BODIES[key] and message.damage
        for _ in range(2):
            with pytest.raises(StoreError, match=f"message at phy offset {message.phy_offset}: "):
                _ = message.body
        value = message.as_dict()
        assert value["corrupt"] and value["damage"] in value["body_error"]
        # Whoever asks for one gets it: its CRC agrees.
        assert store.message_at(message.phy_offset).corrupt
    assert [hit.corrupt for hit in store.query_message("Orders", "raw-deflate")] == [True]


@pytest.mark.parametrize("views", [False, True])
def test_columns(store, views):
    names = ["keys", "body", "corrupt"]
    batches = list(store.scan(names, views=views))
    for batch in batches:
        batch.validate(full=True)
    assert judged(row for batch in batches for row in batch.to_pylist()) == EVERY
    assert judged(store.get_table("Orders", 0, columns=names, views=views).to_pylist()) == EVERY
    assert judged(store.query_table(list(BODIES), "Orders", names, views=views).to_pylist()) == EVERY
    # One column alone says the same.
    for name, wanted in (("body", [*BODIES.values()]), ("corrupt", [key in ODD for key in BODIES])):
        assert [value for batch in store.scan([name], views=views) for value in batch[name].to_pylist()] == wanted


def test_a_missing_library_is_no_damage(path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with MessageStore.open(path, read_only=True) as store:
        marked = {message.keys[0] for message in store.messages() if message.corrupt}
        rows = [row for batch in store.scan(["keys", "corrupt"]) for row in batch.to_pylist()]
    assert marked == {row["keys"][0] for row in rows if row["corrupt"]} == {key for key in ODD if "lz4" not in key}
    assert "rmqstore[compression]" in caplog.text
    kinds = [finding.kind for finding in verify(path)]
    # That they were not looked at is one finding.
    assert (kinds.count("bad_body"), kinds.count("not_checked")) == (len(marked), 1)


def test_sql_and_polars(path):
    polars = pytest.importorskip("polars")
    from rmqstore.polars import scan_store

    assert judged(scan_store(path).select("keys", "body", "corrupt").collect().to_dicts()) == EVERY
    assert scan_store(path).filter(polars.col("corrupt")).collect().height == len(ODD)
    result = cli("sql", path, "select keys, body from messages where corrupt and tags is null", "--json")
    assert [json.loads(line)["keys"] for line in result.stdout.splitlines()] == [[key] for key in ODD]


def test_verify_names_each_with_advice_that_can_be_followed(path, tmp_path):
    findings = [finding for finding in verify(path) if finding.kind == "bad_body"]
    with MessageStore.open(path, read_only=True) as store:
        places = [message.phy_offset for message in store.messages() if message.keys[0] in ODD]
    assert [finding.pos for finding in findings] == places
    result = cli("verify", path)
    assert result.exit_code == 1 and f"rmqstore export {path} --corrupt report" in result.stdout
    # The advice, followed.
    assert cli("export", path, "--corrupt", "report", "-O", tmp_path / "out.parquet").exit_code == 0
    assert judged(pq.read_table(tmp_path / "out.parquet").to_pylist()) == EVERY


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.arrow", "a.parquet", "files"])
@pytest.mark.parametrize("keys", [None, ("raw-deflate", "zstd")])
def test_export(path, tmp_path, name, keys):
    kind = "files" if name == "files" else None
    selection = Selection(topics=("Orders",), keys=keys)
    chosen = {key: each for key, each in EVERY.items() if not keys or key in keys}
    bad = [key for key in chosen if key in ODD]

    def exported(mode, **options):
        report = export(path, tmp_path / (mode + name), selection, ExportOptions(format=kind, corrupt=mode, **options))
        assert report.corrupt_records == len(bad)
        return rows_of(tmp_path / (mode + name), name)

    with pytest.raises(CorruptionError, match="compression flag") as raised:
        export(path, tmp_path / name, selection, ExportOptions(format=kind))
    assert not isinstance(raised.value, ChecksumError) and raised.value.path.endswith("0" * 20)
    assert judged(exported("skip")) == {key: each for key, each in chosen.items() if key not in ODD}
    assert judged(exported("report")) == chosen
    # Bodies as they are stored are all sound.
    columns = ["keys", "body_stored"]
    assert (
        export(
            path, tmp_path / ("stored" + name), selection, ExportOptions(format=kind, columns=columns)
        ).corrupt_records
        == 0
    )


def rows_of(path, name):
    if name.endswith(".parquet"):
        return pq.read_table(path).to_pylist()
    if name.endswith(".arrow"):
        return pa.ipc.open_file(path).read_all().to_pylist()
    if name == "files":
        rows = [json.loads(line) for line in (path / "messages.jsonl").read_text().splitlines()]
        return [row | {"body": (path / row["body_file"]).read_bytes()} for row in rows]
    if name.endswith(".csv"):
        with open(path, newline="") as file:
            rows = [row | {"keys": [row["keys"]], "corrupt": row["corrupt"] == "true"} for row in csv.DictReader(file)]
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        text, encoding = row["body"], row["body_encoding"]
        row["body"] = text.encode() if encoding == "utf-8" else base64.b64decode(text)
    return rows


@pytest.mark.parametrize("command", ["get", "query", "dump", "tail"])
def test_commands(path, command):
    arguments = {
        "get": (path, "Orders", 0),
        "query": (path, "Orders", *BODIES),
        "dump": (path,),
        "tail": (path, "Orders", "-n", 100),
    }[command]
    result = cli(command, *arguments, "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert {row["keys"][0]: row["corrupt"] for row in rows if "keys" in row} == {key: key in ODD for key in BODIES}
    text = cli(command, *arguments).stdout
    assert text.count("CORRUPT (") == len(ODD) and "cannot be decompressed" in text


def test_console(path):
    console = pytest.importorskip("rmqstore.console")

    def asked(url):
        async def ask():
            transport = httpx.ASGITransport(app=console.app(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.get(url)

        return anyio.run(ask)

    rows = asked("/api/messages?topic=Orders").json()["messages"]
    assert {row["keys"][0]: row["corrupt"] for row in rows} == {key: key in ODD for key in BODIES}
    for row in rows:
        (key,) = row["keys"]
        one = asked(f"/api/message/{row['phy_offset']}?body=hex").json()
        assert (bytes.fromhex(one["body"]), one["corrupt"]) == EVERY[key]
        assert (row["damage"] is not None, one["damage"] is not None) == (key in ODD,) * 2
        page = asked(f"/message/{row['phy_offset']}").text
        assert ("contradicts its compression flag" in page) == (key in ODD)
        assert asked(f"/message/{row['phy_offset']}/body").content == BODIES[key]


def test_the_schema_has_no_null_bodies(store):
    batch = store.scan(["body"]).read_all()
    assert batch.schema == scan_schema(["body"]) and batch["body"].null_count == 0


def test_tiered_storage(tmp_path):
    sent = [
        tiered_oracle.Sent(
            "Orders", 0, (f"k{number}",), None, f"U{number}", b"never compressed", 1_700_000_000_000 + number
        )
        for number in range(3)
    ]
    tiered_oracle.write_tiered(tmp_path, sent, log_size=1 << 16, queue_size=600)
    (log,) = [path for path in (tmp_path / "tiered").rglob("*") if path.is_file() and path.parent.name == "COMMIT_LOG"]
    data = bytearray(log.read_bytes())
    # The last byte of the first record's sysFlag, which no CRC covers.
    data[39] |= 1
    log.write_bytes(data)
    with open_tiered(tmp_path / "tiered", tmp_path / "store") as store:
        assert [finding.kind for finding in verify_flat(store.tiered)] == ["bad_body"]
        assert [message.corrupt for message in store.get_message("Orders", 0, 0).messages] == [True, False, False]
        rows = store.scan(["body", "corrupt"]).read_all().to_pylist()
    assert rows == [{"body": b"never compressed", "corrupt": corrupt} for corrupt in (True, False, False)]


@pytest.mark.parametrize("decode_body", ["true", "false"])
def test_spark_reads_them_as_damage(path, decode_body):
    plan = LogPlan.of(str(path))
    names = ["keys", "body", "corrupt"]

    def read(corrupt):
        options = ReadOptions.parse({"path": str(path), "corrupt": corrupt, "decode_body": decode_body})
        schema = spark_arrow_schema([*names, "_corrupt"] if corrupt == "report" else names)
        return [
            row
            for piece in plan.pieces()
            for batch in piece_batches(ReadJob.of(plan, options, schema), piece)
            for row in batch.to_pylist()
        ]

    if decode_body == "false":
        # In their stored form all are sound.
        assert len(read("fail")) == len(BODIES) and not any(row["corrupt"] for row in read("report"))
        return
    with pytest.raises(CorruptionError, match="cannot be decompressed; option corrupt=skip"):
        read("fail")
    assert judged(read("skip")) == {key: each for key, each in EVERY.items() if key not in ODD}
    rows = read("report")
    assert judged(rows) == EVERY
    for row in rows:
        assert (row["_corrupt"] is not None and row["_corrupt"].endswith("UNREADABLE_BODY")) == row["corrupt"]
