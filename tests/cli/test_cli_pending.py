"""rmqstore pending: tables, JSON lines, files, exit codes."""

from __future__ import annotations

import csv
import json

import golden
import pytest
from click.testing import CliRunner

pytest.importorskip("pyarrow")

import pyarrow.ipc
import pyarrow.parquet

from rmqstore.cli import main


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    return golden.unpack("broker", tmp_path_factory.mktemp("broker"))


def run(*arguments):
    return CliRunner().invoke(main, ["pending", *map(str, arguments)])


def test_tables(broker):
    answer = run(broker, "--max-num", "2")
    assert answer.exit_code == 0, answer.output
    assert [line.split()[-2:] for line in answer.stdout.splitlines()[3:7]] == [
        ["20", "20"],
        ["10", "10"],
        ["5", "5"],
        ["20", "0"],
    ]
    assert answer.stdout.count("level 3") == 2 and "there are 55" in answer.stderr
    assert "%RETRY%G-retry" in answer.stdout and "sources" in answer.stdout
    assert "messages\n  kind" not in run(broker, "--max-num", "0").stdout


def test_json_lines(broker):
    answer = run(broker, "--json", "--kind", "timer", "--kind", "transaction", "--now", "2026-11-21T06:00:00Z")
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    kinds = [line["kind"] for line in lines if line["type"] == "pending"]
    assert kinds == ["timer"] * 5 + ["transaction"] * 20
    assert {line["overdue"] for line in lines if line["type"] == "pending" and line["kind"] == "timer"} == {False}
    totals = [line for line in lines if line["type"] == "total"]
    assert [(line["kind"], line["messages"]) for line in totals] == [("timer", 5), ("transaction", 20)]
    assert {line["name"] for line in lines if line["type"] == "source"} >= {"timerlog", "RMQ_SYS_TRANS_HALF_TOPIC"}


def test_what_is_overdue_or_goes_to_a_topic(broker):
    lines = run(
        broker, "--json", "--overdue", "--topic", "Reminders", "--now", "2026-11-21T06:10:00Z"
    ).stdout.splitlines()
    found = [json.loads(line) for line in lines if '"type":"pending"' in line]
    assert len(found) == 10 and {line["kind"] for line in found} == {"delayed"}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "jsonl"])
def test_files(broker, tmp_path, kind):
    path = tmp_path / f"pending.{kind}"
    answer = run(broker, "-O", path)
    assert answer.exit_code == 0 and "wrote 55 messages" in answer.stderr
    if kind == "parquet":
        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif kind == "arrow":
        rows = pyarrow.ipc.open_file(path).read_all().to_pylist()
    elif kind == "csv":
        rows = list(csv.DictReader(path.open()))
    else:
        rows = [json.loads(line) for line in path.open()]
    assert len(rows) == 55 and rows[0]["topic"] == "Reminders" and int(rows[0]["phy_offset"]) == 4832780
    assert run(broker, "-O", path).exit_code == 3
    assert run(broker, "-O", path, "--force").exit_code == 0


def test_wrong_use(broker, tmp_path):
    assert run(broker, "-O", tmp_path / "pending.txt").exit_code == 2
    assert run(broker, "-O", broker / "pending.csv").exit_code != 0
    assert run(broker, "--kind", "nothing").exit_code == 2
    assert run(tmp_path / "nowhere").exit_code == 3
    answer = run(broker, "--kind", "dlq")
    assert answer.exit_code == 1 and "no messages are pending" in answer.stderr


def test_damage_is_said_and_the_rest_listed(tmp_path):
    root = golden.unpack("broker", tmp_path)
    (root / "config" / "timercheck").write_bytes(b"x")
    answer = run(root)
    assert answer.exit_code == 1 and "timercheck" in answer.stderr
    assert "transaction" in answer.stdout
