"""rmqstore sql: answers in every form, questions that are wrong, and stores that are not at their best."""

from __future__ import annotations

import csv
import datetime
import json
import os
import shutil
import sys

import golden
import pytest
from test_cli import HOSTILE, assert_harmless, json_lines, run

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.cli import sql as sql_command
from rmqstore.commitlog.commit_log import CommitLog

# The folder tests/polars would be found by the name alone.
pytest.importorskip("polars.io.plugins")
polars = pytest.importorskip("polars")

# What Python 3.10 has knows less of SQL.
since_2 = pytest.mark.skipif(polars.__version__.startswith("1."), reason="Polars before 2.0 does not know such SQL")
since_2_1 = pytest.mark.skipif(
    tuple(map(int, polars.__version__.split(".")[:2])) < (2, 1), reason="Polars before 2.1 does not know such SQL"
)
CONFIG = StoreConfig(
    mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=2000, max_hash_slot_num=100, max_index_num=400
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return golden.unpack("broker", tmp_path_factory.mktemp("sql"))


@pytest.fixture
def odd(tmp_path):
    """A store whose values are of all kinds."""
    with MessageStore.open(tmp_path / "odd", config=CONFIG.replace(clock=lambda: 1_795_000_000_123)) as store:
        store.put_message(Message("Odd", b"\xff\x00", keys=["k1", "k2"], properties={"amount": "12.50"}))
        store.put_message(Message("Odd", f"a{HOSTILE}".encode(), tags=f"t{HOSTILE}"[:50]))
    return tmp_path / "odd"


QUESTION = "select queue_id, queue_offset, tags, keys from messages where topic = 'Orders' and 'ORD-100000' = any(keys)"


def test_the_answer_is_what_java_read(store):
    topics = {}
    for line in golden.lines("broker", "msg"):
        topics.setdefault(line["topic"], []).append(line["store"])
    found = json_lines(
        run(
            "sql",
            store,
            "select topic, count(*) as n, max(store_timestamp) as newest from messages group by topic",
            "--json",
        )
    )
    assert {row["topic"]: (row["n"], row["newest"]) for row in found} == {
        topic: (len(times), max(times)) for topic, times in topics.items()
    }
    rows = json_lines(run("sql", store, "select * from queues", "--json"))
    shown = json_lines(run("queues", store, "--json"))
    assert rows == [{name: value for name, value in row.items() if name != "type"} for row in shown]
    rows = json_lines(run("sql", store, "select * from consumers", "--json"))
    shown = [row for row in json_lines(run("offsets", "show", store, "--json")) if row["type"] == "progress"]
    assert rows == [{name: value for name, value in row.items() if name != "type"} for row in shown] and rows


def test_a_key_is_asked_of_the_index(store, monkeypatch):
    def forbidden(*arguments, **options):
        raise AssertionError("the log is read")

    wanted = json_lines(run("sql", store, QUESTION, "--json"))
    assert [row["queue_offset"] for row in wanted] == [0, 0, 0, 0]
    monkeypatch.setattr(CommitLog, "fill", forbidden)
    monkeypatch.setattr(CommitLog, "scans", forbidden)
    assert json_lines(run("sql", store, QUESTION, "--json")) == wanted


def test_files_have_what_json_has(store, tmp_path):
    asked = (
        "select topic, queue_id, keys, tags, store_timestamp, properties, body from messages where topic = 'Payments'"
    )
    rows = json_lines(run("sql", store, asked, "--json"))
    assert len(rows) == 20
    for ending in ("parquet", "arrow", "jsonl", "csv"):
        done = run("sql", store, asked, "-O", tmp_path / f"a.{ending}")
        assert (done.exit_code, done.stdout) == (0, "") and f"a.{ending}" in done.stderr
    frame = polars.read_parquet(tmp_path / "a.parquet")
    assert frame.schema["store_timestamp"] == polars.Datetime("ms", "UTC") and frame.schema["body"] == polars.Binary
    assert frame.equals(polars.read_ipc(tmp_path / "a.arrow"))
    assert frame["keys"].to_list() == [row["keys"] for row in rows]
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == rows
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [json.loads(row["keys"]) for row in table] == [row["keys"] for row in rows]
    assert [int(row["store_timestamp"]) for row in table] == [row["store_timestamp"] for row in rows]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.arrow", "a.csv", "a.jsonl", "a.parquet"]


def test_an_output_is_whole_or_not_there(store, tmp_path):
    target = tmp_path / "a.parquet"
    target.write_text("mine")
    refused = run("sql", store, "select topic from queues", "-O", target)
    assert refused.exit_code == 3 and "--force" in refused.stderr and target.read_text() == "mine"
    wrong = run("sql", store, "select cast(body as text) from messages", "-O", target, "--force")
    assert wrong.exit_code == 2 and target.read_text() == "mine" and [*tmp_path.iterdir()] == [target]
    assert run("sql", store, "select topic from queues", "-O", target, "--force").exit_code == 0
    assert polars.read_parquet(target).columns == ["topic"]
    inside = run("sql", store, "select topic from queues", "-O", store / "a.parquet")
    assert inside.exit_code == 3 and "is in the store" in inside.stderr
    # No row is an answer too.
    assert run("sql", store, "select topic from queues where topic = ''", "-O", target, "--force").exit_code == 0
    assert polars.read_parquet(target).shape == (0, 1)
    for name in ("a.txt", "a.csv.gz", "a"):
        assert run("sql", store, "select topic from queues", "-O", tmp_path / name).exit_code == 2


def test_values_of_all_kinds(odd):
    first, second = json_lines(run("sql", odd, "select * from messages", "--json"))
    assert first["body"] == "\\xff00" and first["keys"] == ["k1", "k2"] and first["tags"] is None
    assert first["store_timestamp"] == 1_795_000_000_123 and first["corrupt"] is False
    assert first["properties"] == {"KEYS": "k1 k2", "amount": "12.50"} | {
        name: text for name, text in first["properties"].items() if name not in ("KEYS", "amount")
    }
    assert second["body"] == f"a{HOSTILE}"
    asked = "select topic, tags, keys, properties, body, store_timestamp from messages"
    for shown in (run("sql", odd, asked), run("sql", odd, asked, "--json")):
        assert_harmless(shown.output)
    (row,) = json_lines(
        run(
            "sql", odd,
            "select store_timestamp::date as day, max(store_timestamp) - min(store_timestamp) as span, "
            "store_timestamp::time as clock, sum(size) * 1.5 as f from messages group by 1, 3",
            "--json",
        )
    )  # fmt: skip
    assert row["day"] == "2026-11-18" and row["span"] == 0 and isinstance(row["f"], float)
    table = run(
        "sql", odd, "select count(*) as n, topic, store_timestamp from messages group by topic, store_timestamp"
    )
    assert table.stdout.splitlines()[-1].split()[:2] == ["2", "Odd"]
    shown = datetime.datetime.fromisoformat(table.stdout.split()[-1])
    assert shown == datetime.datetime.fromtimestamp(1_795_000_000.123, datetime.timezone.utc)


def test_long_answers_are_cut_on_a_terminal_only(store):
    shown = run("sql", store, "select phy_offset from messages")
    assert len(shown.stdout.splitlines()) == 3 + 1000 and "there are 11013 rows" in shown.stderr
    assert len(json_lines(run("sql", store, "select phy_offset from messages", "--json"))) == 11013


@since_2_1
def test_messages_of_a_time(store):
    asked = ("select count(*) as n, min(store_timestamp) as low, max(store_timestamp) as high from messages", "--json")
    (row,) = json_lines(run("sql", store, *asked, "--begin", "2026-11-21T05:32:40Z", "--end", "2026-11-21T05:32:41Z"))
    times = [line["store"] for line in golden.lines("broker", "msg")]
    within = [time for time in times if 1795239160000 <= time <= 1795239161000]
    assert row == {"n": len(within), "low": min(within), "high": max(within)} and within
    by_text = "where store_timestamp between '2026-11-21 05:32:40' and '2026-11-21T06:32:41+01:00'"
    assert json_lines(run("sql", store, f"{asked[0]} {by_text}", "--json")) == [row]
    nothing = run("sql", store, "select topic from messages", "--begin", "1h ago")
    assert (nothing.exit_code, nothing.stdout) == (1, "") and "no row" in nothing.stderr


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("select nothing from queues", ["nothing", "queue_id"]),
        ("select * from nowhere", ["nowhere", "messages", "consumers", "index_entries", "queues"]),
        ("select from", ["sql parser error"]),
        ("select nofunction(topic) from queues", ["nofunction"]),
        ("select topic from queues; select topic from queues", ["statement"]),
        ("selec topic from queues", ["SELECT"]),
        ("", ["SELECT"]),
        ("delete from messages", ["read-only"]),
        ("drop table messages", ["read-only"]),
        ("/* harmless */ (( truncate table messages", ["read-only"]),
        pytest.param(
            "select topic from messages where store_timestamp > now()", ["zone", "--begin"], marks=since_2_1, id="now"
        ),
        (f'select * from "{HOSTILE}"', ["was not found"]),
    ],
)
@pytest.mark.parametrize("how", [(), ("--json",)])
def test_a_wrong_question_is_wrong_usage(store, question, words, how):
    done = run("sql", store, question, *how)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert all(word in done.stderr for word in words) and "Traceback" not in done.stderr
    assert "RESOLVING" not in done.stderr
    assert_harmless(done.stderr)


@since_2
def test_questions_that_begin_otherwise(store):
    for question in (
        "-- how many\n select count(*) as n from queues",
        " /* how many */ with q as (select * from queues) select count(*) as n from q",
        "(select count(*) as n from queues)",
    ):
        (row,) = json_lines(run("sql", "--json", "--", store, question))
        assert row["n"] > 20


def test_what_the_store_says_ends_as_its_errors_do(store, monkeypatch):
    from rmqstore.errors import CorruptionError

    def fails(*arguments, **options):
        raise CorruptionError("no such bytes", "some/file", 7)

    monkeypatch.setattr(CommitLog, "fill", fails)
    done = run("sql", store, "select max(size) from messages")
    assert done.exit_code == 3 and "no such bytes [some/file, position 7]" in done.stderr


def test_without_polars_it_says_what_to_install(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    done = run("sql", store, "select 1")
    assert done.exit_code == 3 and "pip install rmqstore[sql]" in done.stderr


def test_queues_that_are_lost_are_as_the_log_tells(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_messages([Message("Orders", b"x", keys=[f"k{n}"]) for n in range(10)])
    shutil.rmtree(tmp_path / "store" / "consumequeue")
    (row,) = json_lines(run("sql", tmp_path / "store", "select sum(messages) as n from queues", "--json"))
    assert row == {"n": 10}
    (row,) = json_lines(run("sql", tmp_path / "store", "select topic from messages where 'k3' = any(keys)", "--json"))
    assert row == {"topic": "Orders"}


@pytest.mark.parametrize("born", [2**62, -(2**62), 253_402_300_800_000])
def test_times_that_no_calendar_reaches_end_nothing(tmp_path, born):
    """Any producer may say when its message was born, and no CRC covers a record's head."""
    usual = 1_795_000_000_123
    with MessageStore.open(tmp_path / "s", config=CONFIG.replace(clock=lambda: usual)) as store:
        for time in (born, usual):
            store.put_message(Message("T", b"x", born_timestamp=time))
    asked = "select born_timestamp as b, store_timestamp as s, born_timestamp - store_timestamp as d from messages"
    wanted = [{"b": born, "s": usual, "d": born - usual}, {"b": usual, "s": usual, "d": 0}]
    assert json_lines(run("sql", tmp_path / "s", asked, "--json")) == wanted
    for name in ("a.jsonl", "a.csv"):
        assert run("sql", tmp_path / "s", asked, "-O", tmp_path / name).exit_code == 0
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == wanted
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        assert [int(row["b"]) for row in csv.DictReader(file)] == [born, usual]
    shown = run("sql", tmp_path / "s", asked)
    assert shown.exit_code == 0 and f"{born} ms" in shown.stdout and "2026-11-18T11:06:40.123+00:00" in shown.stdout
    (row,) = json_lines(run("sql", tmp_path / "s", "select array_agg(born_timestamp) as b from messages", "--json"))
    assert row == {"b": [born, usual]}


def test_a_queue_whose_name_is_not_utf8(tmp_path):
    """Every question to the queues ended with a traceback."""
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_messages([Message("Orders", b"x", keys=["k"]), Message("Pay", b"x", keys=["k"])])
    queues = os.fsencode(tmp_path / "store/consumequeue")
    os.rename(queues + b"/Pay", queues + b"/Pay\xff")
    rows = json_lines(run("sql", tmp_path / "store", "select topic, messages from queues order by topic", "--json"))
    assert [row["topic"] for row in rows] == ["Orders", "Pay\\udcff"]
    for asked in ("select topic from messages where 'k' = any(keys)", "select * from consumers"):
        done = run("sql", tmp_path / "store", asked, "--json")
        assert done.exit_code in (0, 1) and isinstance(done.exception, (SystemExit, type(None)))


@pytest.mark.parametrize("terminal, columns", [(False, 80), (True, 80), (True, 20)])
def test_the_names_of_columns_are_escaped(odd, monkeypatch, terminal, columns):
    """They come from the question, and the question may come from somebody else."""
    monkeypatch.setenv("COLUMNS", str(columns))
    printer = sql_command.Printer(False)
    printer.terminal = terminal
    monkeypatch.setattr(sql_command, "Printer", lambda as_json: printer)
    asked = f'select 1 as "a{HOSTILE}", 2 as "[/no]markup", \'{"x" * 30}\' as "b\x9b31m" from messages'
    done = run("sql", odd, asked)
    assert done.exit_code == 0, done.output
    assert_harmless(done.output)
    assert "[/no]" in done.stdout
