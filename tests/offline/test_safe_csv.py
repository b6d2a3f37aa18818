"""CSV for spreadsheets: no text is a formula with --safe-csv, and every text is what it was without."""

from __future__ import annotations

import csv
import gzip
import io

import pytest
from click.testing import CliRunner
from small_store import SMALL, options_of

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.cli import main
from rmqstore.offline.export import ExportOptions, export
from rmqstore.texts import harmless_cell

FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1+1"]
SIZES = options_of(SMALL)


@pytest.fixture
def store(tmp_path):
    config = StoreConfig(**SMALL, clock=lambda: 1_795_000_000_123)
    with MessageStore.open(tmp_path / "store", config=config) as opened:
        for text in FORMULAS:
            opened.put_message(Message("T", text.encode(), keys=text.strip(), tags=text, flag=-7))
            opened.put_message(Message("%DLQ%g", b"a", tags=text))
    return tmp_path / "store"


def run(*words):
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done


def rows(text):
    return [*csv.DictReader(io.StringIO(text, newline=""))]


def test_export(store, tmp_path):
    columns = ["topic", "keys", "tags", "flag", "born_timestamp", "body"]
    config = StoreConfig(**SMALL)
    export(store, tmp_path / "exact.csv", options=ExportOptions(columns=columns, config=config))
    exact = rows((tmp_path / "exact.csv").read_bytes().decode())
    assert [row["body"] for row in exact if row["topic"] == "T"] == FORMULAS
    export(store, tmp_path / "safe.csv.gz", options=ExportOptions(columns=columns, config=config, safe_csv=True))
    safe = rows(gzip.decompress((tmp_path / "safe.csv.gz").read_bytes()).decode())
    for before, after in zip(exact, safe, strict=True):
        for name, text in before.items():
            assert after[name] == (text if name == "flag" else harmless_cell(text))
            # A number stays one.
            assert after[name] == "-7" or not after[name].startswith(tuple("=+-@\t\r\n\uff1d"))
    shown = run("export", store, "--format", "csv", "--columns", ",".join(columns), "--safe-csv", *SIZES)
    assert rows(shown.stdout) == safe


def test_answers_of_sql(store, tmp_path):
    pytest.importorskip("polars.io.plugins")
    question = "select tags, keys, -1 as number, tags as \"=head\" from messages where topic = 'T'"
    run("sql", store, question, "-O", tmp_path / "a.csv", *SIZES)
    run("sql", store, question, "-O", tmp_path / "b.csv", "--safe-csv", *SIZES)
    exact, safe = (rows((tmp_path / name).read_bytes().decode()) for name in ("a.csv", "b.csv"))
    assert [row["tags"] for row in exact] == [row["=head"] for row in exact] == FORMULAS
    assert [row["tags"] for row in safe] == [row["'=head"] for row in safe] == [f"'{text}" for text in FORMULAS]
    assert {row["number"] for row in safe} == {"-1"} and [row["keys"] for row in safe] == [row["keys"] for row in exact]


def test_what_is_pending(store, tmp_path):
    pytest.importorskip("pyarrow")
    run("pending", store, "-O", tmp_path / "a.csv", *SIZES)
    run("pending", store, "-O", tmp_path / "b.csv", "--safe-csv", *SIZES)
    exact, safe = (rows((tmp_path / name).read_bytes().decode()) for name in ("a.csv", "b.csv"))
    assert {row["tags"] for row in exact} == {*FORMULAS}
    assert [row["tags"] for row in safe] == [f"'{row['tags']}" for row in exact]


@pytest.mark.parametrize("command", ["export", "sql", "pending"])
def test_other_formats_have_no_such_cells(store, tmp_path, command):
    if command == "sql":
        pytest.importorskip("polars.io.plugins")
    words = [command, store, *(["select 1"] if command == "sql" else []), "-O", tmp_path / "a.jsonl", "--safe-csv"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 2 and "--safe-csv requires CSV" in done.stderr and not (tmp_path / "a.jsonl").exists()
    with pytest.raises(ValueError, match="safe_csv is for CSV"):
        export(store, tmp_path / "a.jsonl", options=ExportOptions(safe_csv=True))
