"""The ten-minute walk: exit codes on damage, next steps, warnings before data is lost.

Owns small stores with damage at known places, and what a command says about it; what it finds is in the tests of each room.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from test_cli import json_lines, run, utc  # noqa: F401

from rmqstore import Message, MessageStore, StoreConfig, verify
from rmqstore.cli import rebuild as rebuild_module
from rmqstore.cli.verify import NextSteps
from rmqstore.commitlog.log_walk import DAMAGE_KINDS
from rmqstore.errors import Finding
from rmqstore.texts import format_size, format_time

ROOT = Path(__file__).resolve().parents[2]

SMALL = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "max_hash_slot_num": 10,
    "max_index_num": 100,
    "clean_resource_interval": 0,
}
GEOMETRY = [f"-o{name}={value}" for name, value in SMALL.items()]


@pytest.fixture
def store(tmp_path):
    """Twelve messages in one queue, each with a key of its own and the key ALL; returns the path and the puts."""
    path = tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as opened:
        puts = [
            opened.put_message(Message("Orders", b"body %d" % n, keys=[f"K-{n}", "ALL"], tags="EU" if n % 2 else "US"))
            for n in range(12)
        ]
    return path, puts


def damage(path, pos, data):
    with open(path / "commitlog" / ("0" * 20), "r+b") as file:
        file.seek(pos)
        file.write(data)


def spoil_body(path, put):
    # The body stands after 84 bytes and its length.
    damage(path, put.phy_offset + 88, b"X")


def spoil_magic(path, put):
    damage(path, put.phy_offset + 4, bytes(4))


# ---------------------------------------------------------------------------------------------------------------------
# A message that is damaged


def test_get_of_a_corrupt_message_shows_it_and_ends_with_1(store):
    path, puts = store
    assert run("get", path, "Orders", 0, *GEOMETRY).exit_code == 0
    spoil_body(path, puts[3])
    result = run("get", path, "Orders", 0, *GEOMETRY)
    assert result.exit_code == 1 and result.stdout.count("CORRUPT") == 1 and result.stdout.count("phy ") == 12
    assert f"1 message is CORRUPT; next: rmqstore verify {path}" in result.stderr
    # One that is not shown says nothing.
    assert run("get", path, "Orders", 0, "--max-num", 3, *GEOMETRY).exit_code == 0
    result = run("get", path, "Orders", 0, "--json", *GEOMETRY)
    assert result.exit_code == 1 and [each["corrupt"] for each in json_lines(result)].count(True) == 1
    spoil_body(path, puts[5])
    assert "2 messages are CORRUPT" in run("get", path, "Orders", 0, *GEOMETRY).stderr


def test_get_says_which_message_cannot_be_read_at_all(store):
    path, puts = store
    spoil_magic(path, puts[3])
    result = run("get", path, "Orders", 0, *GEOMETRY)
    assert result.exit_code == 1 and result.stdout.count("phy ") == 11
    assert (
        f"1 unit of Orders/0 points to missing or damaged messages: queue offset 3 (phy offset {puts[3].phy_offset}); "
        f"next: rmqstore verify {path}" in result.stderr
    )
    spoil_magic(path, puts[10])
    result = run("get", path, "Orders", 0, *GEOMETRY)
    assert "2 units of Orders/0 point to missing or damaged messages: queue offset 3, 10 (phy" in result.stderr
    # With tags, one that has others is not missed.
    assert run("get", path, "Orders", 0, "--tags", "US", "--max-num", 4, *GEOMETRY).exit_code == 0
    assert run("get", path, "Orders", 0, "--tags", "EU", *GEOMETRY).exit_code == 1
    # Only what lies in what was asked for counts.
    assert run("get", path, "Orders", 0, "--begin-queue-offset", 4, "--max-num", 5, *GEOMETRY).exit_code == 0
    # Nothing else is there: the sentence is the same, not "nothing at queue offset".
    result = run("get", path, "Orders", 0, "--begin-queue-offset", 10, "--max-num", 1, *GEOMETRY)
    assert result.exit_code == 1 and "queue offset 10" in result.stderr


def test_query_of_a_corrupt_message_shows_it_and_ends_with_1(store):
    path, puts = store
    assert run("query", path, "Orders", "ALL", *GEOMETRY).exit_code == 0
    spoil_body(path, puts[3])
    assert run("query", path, "Orders", "K-4", *GEOMETRY).exit_code == 0
    for command in (["Orders", "K-3"], ["--key", "K-3"], ["Orders", "K-4", "ALL"], ["--phy-offset", puts[3].phy_offset]):
        result = run("query", path, *command, *GEOMETRY)
        assert result.exit_code == 1 and result.stdout.count("CORRUPT (CRC)") == 1, command
        assert "CORRUPT" in result.stderr and f"next: rmqstore verify {path}" in result.stderr


def test_query_says_where_the_log_cannot_be_read(store):
    path, puts = store
    spoil_magic(path, puts[3])
    result = run("query", path, "Orders", "ALL", *GEOMETRY)
    assert result.exit_code == 1 and result.stdout.count("phy ") == 11
    size, place = puts[3].size, puts[3].phy_offset
    assert f"{size} bytes of the log at phy offset {place} cannot be read and may contain more messages; next:" in result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Findings of verify, and next steps


def test_units_in_a_row_are_one_finding(store):
    path, puts = store
    folder = path / "consumequeue" / "Orders" / "0"
    first, second = sorted(folder.iterdir())
    assert second.name == f"{200:020}"
    # Units 4 to 9 and 10 to 11, which are another file's; unit 6 stays.
    for file, number, at in ((first, 4, 80), (first, 5, 100), (first, 7, 140), (first, 8, 160), (first, 9, 180), (second, 10, 0)):
        with open(file, "r+b") as stream:
            stream.seek(at)
            stream.write((puts[number].phy_offset + 1).to_bytes(8, "big"))
    found = [each for each in verify(path, StoreConfig(**SMALL)) if each.kind == "bad_unit"]
    assert [(each.path, each.pos, each.num) for each in found] == [
        (str(first), 80, 2), (str(first), 140, 3), (str(second), 0, 1)
    ]  # fmt: skip
    assert found[0].detail.startswith("units 4 to 5, 2 in a row; unit 4 is ")
    assert found[2].detail.startswith("unit 10 is ")
    result = run("verify", path, *GEOMETRY)
    assert result.exit_code == 1 and re.search(r"bad_unit +6\b", result.stdout) and "6 findings" in result.stdout
    lines = json_lines(run("verify", path, "--json", *GEOMETRY))
    assert [each["num"] for each in lines if each["type"] == "finding"] == [2, 3, 1]
    assert lines[-1]["findings"] == 6 and lines[-1]["kinds"] == {"bad_unit": 6}


def test_units_that_lead_nowhere_are_one_finding(store):
    path, puts = store
    # The last three records are gone from the log, and their units are still there.
    begin = puts[9].phy_offset
    damage(path, begin, bytes(puts[11].phy_offset + puts[11].size - begin))
    found = [each for each in verify(path, StoreConfig(**SMALL)) if each.kind == "dangling_unit"]
    assert [(each.pos, each.num) for each in found] == [(180, 1), (0, 2)]
    assert "units 10 to 11, 2 in a row; unit 10 says" in found[1].detail


def test_a_unit_of_a_record_that_names_its_own_topic_as_a_further_queue_leads_somewhere(tmp_path):
    config = StoreConfig(**SMALL, enable_lmq=True, enable_multi_dispatch=True)
    with MessageStore.open(tmp_path, config=config) as store:
        store.put_message(Message("Orders", b"alone"), 1)
        for _ in range(2):
            store.put_message(Message("Orders", b"twice", properties={"INNER_MULTI_DISPATCH": "Orders"}), 1)
        other = store.put_message(Message("Pay", b"other"))
    with open(tmp_path / "consumequeue" / "Orders" / "0" / ("0" * 20), "r+b") as stream:
        stream.seek(40)
        stream.write(other.phy_offset.to_bytes(8, "big") + other.size.to_bytes(4, "big") + bytes(8))
    assert [(each.kind, each.pos, each.num) for each in verify(tmp_path, config)] == [("dangling_unit", 40, 1)]


def test_a_file_that_is_not_whole_comes_before_what_follows_from_it(store):
    path, _ = store
    file = path / "consumequeue" / "Orders" / "0" / ("0" * 20)
    os.truncate(file, 60)
    found = [each for each in verify(path, StoreConfig(**SMALL)) if each.path == str(file)]
    assert [(each.kind, each.num) for each in found] == [("file", 1), ("bad_unit", 7)]


def test_verify_says_what_comes_next(store, monkeypatch):
    path, puts = store
    path = path.rename(path.with_name("a store"))
    spoil_body(path, puts[3])
    (path / "commitlog" / "notes.txt").write_text("x")
    unit = path / "consumequeue" / "Orders" / "0" / ("0" * 20)
    with open(unit, "r+b") as stream:
        stream.write((1).to_bytes(8, "big"))
    shutil.rmtree(path / "index")
    (path / "checkpoint").write_bytes(b"x" * 20)
    result = run("verify", path, *GEOMETRY)
    told = result.stdout.split("next steps\n")[1].splitlines()
    options = " ".join(each.replace("-o", "-o ", 1) for each in GEOMETRY)
    recover, rebuild = f"rmqstore recover '{path}' {options}", f"rmqstore rebuild '{path}' {options}"
    assert [line.strip() for line in told] == [
        f"file: move foreign files away, restore a short or missing segment from a backup or a slave; then {recover}",
        f"bad_body_crc: restore the segment from a backup or a slave; without one it cannot be repaired: rmqstore export '{path}' "
        f"{options} --corrupt skip exports the undamaged messages, {recover} --mode skip keeps those after the damage",
        f"bad_checkpoint: move the file away, then {recover}",
        f"bad_unit: {rebuild} --what consumequeue",
        f"missing_index: {rebuild} --what index",
    ]
    last = json_lines(run("verify", path, "--json", *GEOMETRY))[-1]
    assert [f"{kinds}: {step}" for kinds, step in last["next"].items()] == [line.strip() for line in told]


def test_every_kind_of_finding_has_a_next_step():
    """Every kind that stands in the sources as the third of a `Finding`, or the second of `finding_of`."""
    kinds = set(DAMAGE_KINDS.values())
    for file in ("offline", "flatfile", "consumer"):
        for path in (ROOT / "rmqstore" / file).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    at = {"Finding": 2, "finding_of": 1}.get(node.func.id)
                    # Path and position may be one argument.
                    at = at and at - any(isinstance(each, ast.Starred) for each in node.args)
                    if at is not None and len(node.args) > at and isinstance(node.args[at], ast.Constant):
                        kinds.add(node.args[at].value)
    assert len(kinds) > 35
    for kind in kinds:
        steps = NextSteps("s")
        steps.take(Finding("s/commitlog/0", 0, kind, ""))
        ((_, step),) = steps.steps()
        assert step and "docs/formats.md" not in step, kind


# ---------------------------------------------------------------------------------------------------------------------
# Losses of a recovery


def files_of(path):
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def two_topics(path):
    """Twelve messages of two topics, a second apart, the fifth of which is damaged; the puts."""
    clock = iter(range(1_700_000_000_000, 1_700_000_100_000, 1000)).__next__
    with MessageStore.open(path, config=StoreConfig(**SMALL, clock=clock)) as store:
        puts = [store.put_message(Message("A" if n % 3 else "B", b"body %d" % n)) for n in range(12)]
    spoil_magic(path, puts[4])
    return puts


def test_recover_says_what_a_cut_loses_before_it_cuts(tmp_path, utc):  # noqa: F811
    path = tmp_path / "store"
    puts = two_topics(path)
    before = files_of(path)
    size = sum(put.size for put in puts[5:])
    times = [format_time(put.store_timestamp) for put in (puts[5], puts[11])]
    loss = f"--mode truncate deletes 7 whole messages, {format_size(size)}, stored {times[0]} to {times[1]}, of A (5), B (2)"
    refused = run("recover", path, *GEOMETRY)
    assert refused.exit_code == 3 and loss in refused.stderr and "; --mode skip keeps them." in refused.stderr
    asked = run("recover", path, "--mode", "truncate", *GEOMETRY)
    assert asked.exit_code == 2 and loss in asked.stderr and "--yes" in asked.stderr
    assert files_of(path) == before
    done = run("recover", path, "--mode", "truncate", "--yes", "--json", *GEOMETRY)
    assert done.exit_code == 0 and loss in done.stderr
    (value,) = json_lines(done)
    assert value["mode"] == "truncate" and value["end"] == puts[4].phy_offset
    assert value["lost"] == {
        "phy_offset": puts[4].phy_offset, "messages": 7, "size": size, "damaged_size": puts[4].size,
        "first_store_timestamp": puts[5].store_timestamp, "last_store_timestamp": puts[11].store_timestamp,
        "topics": {"A": 5, "B": 2},
    }  # fmt: skip
    with MessageStore.open(path, config=StoreConfig(**SMALL), read_only=True) as store:
        assert sum(1 for _ in store.messages()) == 4


def test_a_no_to_a_cut_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "store"
    two_topics(path)
    before = files_of(path)
    # A terminal on which somebody types n.
    monkeypatch.setattr(rebuild_module, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    result = run("recover", path, "--mode", "truncate", *GEOMETRY, input="n\n")
    assert result.exit_code == 1 and "7 whole messages" in result.stderr and "nothing was changed" in result.stderr
    assert files_of(path) == before


def test_a_recovery_that_cuts_no_message_asks_nothing(store):
    path, _ = store
    result = run("recover", path, "--mode", "truncate", "--json", *GEOMETRY)
    (value,) = json_lines(result)
    assert result.exit_code == 0 and value["mode"] == "truncate" and "lost" not in value


def test_queues_that_go_on_after_the_log_are_cut_when_asked(store):
    path, puts = store
    begin = puts[6].phy_offset
    damage(path, begin, bytes(puts[11].phy_offset + puts[11].size - begin))
    assert run("recover", path, *GEOMETRY).exit_code == 3
    result = run("recover", path, "--mode", "truncate", *GEOMETRY)
    assert result.exit_code == 2 and "--mode truncate deletes no" in result.stderr
    # 6 units, and the entries of their keys and tags.
    result = run("recover", path, "--mode", "truncate", "--yes", *GEOMETRY)
    assert result.exit_code == 3 and "--drop-units 24" in result.stderr
    result = run("recover", path, "--mode", "truncate", "--yes", "--drop-units", "24", *GEOMETRY)
    assert result.exit_code == 0 and "6 units cut" in result.stdout


def test_advice_about_a_short_file_is_of_its_kind(store):
    path, _ = store
    os.truncate(path / "consumequeue" / "Orders" / "0" / ("0" * 20), 100)
    result = run("recover", path, *GEOMETRY)
    assert result.exit_code == 3 and "rmqstore rebuild --what consumequeue" in result.stderr
    assert "truncate -s" not in result.stderr
    # And that is what helps.
    assert run("rebuild", path, "--what", "consumequeue", "--yes", *GEOMETRY).exit_code == 0
    assert run("recover", path, *GEOMETRY).exit_code == 0
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as opened:
        opened.put_messages([Message("Orders", b"x" * 100) for _ in range(60)])
    os.truncate(path / "commitlog" / ("0" * 20), 4000)
    result = run("recover", path, *GEOMETRY)
    assert result.exit_code == 3 and "truncate -s 4096 FILE" in result.stderr
    assert "rmqstore recover --mode skip skips the lost part" in result.stderr
    assert "consumequeue" not in result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Topics in an order, groups of RocketMQ's own


def test_topics_by_bytes_messages_and_time_with_a_total(tmp_path, utc):  # noqa: F811
    clock = iter(range(1_700_000_000_000, 1_700_000_100_000, 1000)).__next__
    with MessageStore.open(tmp_path / "s", config=StoreConfig(**SMALL, clock=clock)) as store:
        for topic, number, size in (("Many", 5, 10), ("Large", 2, 500), ("New", 1, 10)):
            for _ in range(number):
                store.put_message(Message(topic, b"x" * size))
    for sort, wanted in (
        ("name", ["Large", "Many", "New"]),
        ("messages", ["Many", "Large", "New"]),
        ("bytes", ["Large", "Many", "New"]),
        ("time", ["New", "Large", "Many"]),
    ):
        objects = json_lines(run("topics", tmp_path / "s", "--sort", sort, "--json", *GEOMETRY))
        assert [each["topic"] for each in objects] == wanted, sort
        lines = run("topics", tmp_path / "s", "--sort", sort, *GEOMETRY).stdout.splitlines()
        assert [line.split()[0] for line in lines[3:]] == [*wanted, "total"], sort
        assert lines[-1].split()[:3] == ["total", "of", "3"]
        cells = lines[-1].split()
        assert cells[3:5] == ["3", "8"]
        if sort == "bytes":
            assert cells[5:] == format_size(sum(each["size"] for each in objects)).split()
            assert objects[0]["size"] > objects[1]["size"] > objects[2]["size"]
    # Of one topic there is nothing to add up.
    assert "total" not in run("topics", tmp_path / "s", "Many", *GEOMETRY).stdout


def test_offsets_of_a_path_are_those_that_show_shows(golden_copy):
    path = golden_copy("broker")
    shown = run("offsets", "show", path)
    assert shown.exit_code == 0 and run("offsets", path).stdout == shown.stdout
    narrowed = run("offsets", path, "--group", "G-billing", "--json")
    assert narrowed.stdout == run("offsets", "show", path, "--group", "G-billing", "--json").stdout != ""
    wrong = run("offsets", "shwo", path)
    assert wrong.exit_code == 2 and "Did you mean show?" in wrong.stderr


def test_groups_and_topics_of_rocketmq_are_marked(tmp_path):
    path = tmp_path / "s"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as store:
        for topic in ("Orders", "%RETRY%billing", "%DLQ%billing", "RMQ_SYS_TRACE_TOPIC"):
            store.put_message(Message(topic, b"x"))
            store.consumer_offsets.commit("billing", topic, 0, 0)
        for group in ("TOOLS_CONSUMER", "CID_ONSAPI_OWNER", "CID_RMQ_SYS_TRANS"):
            store.consumer_offsets.commit(group, "Orders", 0, 1)
    rows = json_lines(run("offsets", path, "--json", *GEOMETRY))
    kinds = {(row["group"], row["topic"]): row["kind"] for row in rows if row["type"] == "progress"}
    assert kinds == {
        ("billing", "Orders"): "", ("billing", "%RETRY%billing"): "retry", ("billing", "%DLQ%billing"): "dlq",
        ("billing", "RMQ_SYS_TRACE_TOPIC"): "system", ("TOOLS_CONSUMER", "Orders"): "system",
        ("CID_ONSAPI_OWNER", "Orders"): "system", ("CID_RMQ_SYS_TRANS", "Orders"): "system",
    }  # fmt: skip
    sums = {row["group"]: row["kind"] for row in rows if row["type"] == "group"}
    assert {group for group, kind in sums.items() if kind == "system"} == set(sums) - {"billing"}
    text = run("offsets", path, *GEOMETRY).stdout
    assert re.search(r"TOOLS_CONSUMER +Orders +system", text) and re.search(r"TOOLS_CONSUMER +system +1", text)
    # Where nothing is marked there is no such column.
    assert " kind " not in run("offsets", path, "--group", "billing", "--topic", "Orders", *GEOMETRY).stdout


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is left behind, nobody is asked in vain


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv.gz", "x.parquet", "folder"])
def test_an_export_of_an_unknown_topic_leaves_nothing(store, tmp_path, name):
    path, _ = store
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    kind = ["--format", "files"] if name == "folder" else []
    result = run("export", path, "--topic", "Oders", "-O", tmp_path / "out" / name, *kind, *GEOMETRY)
    assert result.exit_code == 3  # There is no such folder.
    (tmp_path / "out").mkdir()
    result = run("export", path, "--topic", "Oders", "-O", tmp_path / "out" / name, *kind, *GEOMETRY)
    assert result.exit_code == 1 and "did you mean Orders?" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []
    # A topic that is there, and had no message in that time, is an answer.
    never = ["--topic", "Orders", "--end", "2001-01-01"]
    result = run("export", path, *never, "-O", tmp_path / "out" / name, *kind, *GEOMETRY)
    assert result.exit_code == 1 and [each.name for each in (tmp_path / "out").iterdir()] == [name]


def test_an_export_of_an_unknown_topic_replaces_nothing(store, tmp_path):
    path, _ = store
    (tmp_path / "kept.jsonl").write_text("what was there")
    result = run("export", path, "--topic", "Oders", "-O", tmp_path / "kept.jsonl", "--force", "--json", *GEOMETRY)
    assert result.exit_code == 1 and (tmp_path / "kept.jsonl").read_text() == "what was there"
    (value,) = json_lines(result)
    assert value["output"] == "" and value["messages"] == value["size"] == 0
    # One of several is enough.
    wanted = ["--topic", "Oders", "--topic", "Orders"]
    assert run("export", path, *wanted, "-O", tmp_path / "kept.jsonl", "--force", *GEOMETRY).exit_code == 0
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 12


def test_rebuild_says_what_it_needs_before_it_asks(golden_copy, monkeypatch):
    path = golden_copy("broker")
    before = files_of(path)

    def asked(*arguments):
        raise AssertionError("somebody was asked")

    monkeypatch.setattr(rebuild_module, "_agree", asked)
    # Queues of delayed messages need the delay levels, an index that is gone its geometry, and its tags.
    for broken, options, needed in (
        (None, [], "message_delay_level"),
        (None, ["--what", "consumequeue"], "message_delay_level"),
        ("index", ["--what", "index"], "max_hash_slot_num"),
        ("index", ["--what", "index", "-omaxHashSlotNum=100", "-omaxIndexNum=400"], "index_tags"),
    ):
        if broken is not None:
            shutil.rmtree(path / broken, ignore_errors=True)
            before = files_of(path)
        result = run("rebuild", path, *options)
        assert result.exit_code == 3 and needed in result.stderr, (options, result.stderr)
        assert files_of(path) == before
    with pytest.raises(AssertionError, match="asked"):
        run("rebuild", path, "--what", "index", "-omaxHashSlotNum=100", "-omaxIndexNum=400", "-oindex_tags=True")


def test_help_marks_the_commands_that_write():
    from rmqstore.cli import _COMMANDS, main

    page = run("--help").stdout
    marked = set(re.findall(r"(?m)^  (\w+) +\[writes\] ", page))
    assert marked == {"import", "rebuild", "recover"}
    context = click.Context(main)
    for name in _COMMANDS:
        if name != "demo":
            command = main.get_command(context, name)
            assert ("THIS COMMAND WRITES" in (command.help or "")) == (name in marked), name
    assert set(re.findall(r"(?m)^  (\w+) +\[writes\] ", run("offsets", "--help").stdout)) == {"set"}
    for named in ("offsets set", "rabbitmq import"):
        assert named in " ".join(page.split())
