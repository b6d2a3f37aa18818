"""A store in which this user may not look into one folder: the rest is read, the folder is named, a writer refuses.

Every mode that keeps a user out: neither listed nor searched (000), listed only (444), searched only (111).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import golden
import pytest
import small_store
from click.testing import CliRunner
from small_store import options_of
from unprivileged import closed

from rmqstore import Finding, InvalidMessageError, Message, MessageStore, StoreConfig, verify
from rmqstore.cli import main
from rmqstore.cli.verify import NextSteps

pytest.importorskip("polars")

SMALL = {**small_store.SMALL, "mapped_file_size_consume_queue": 200}
SIZES = options_of(SMALL)
TOPIC, QUEUE = "consumequeue/T", "consumequeue/T/0"
FOLDERS = ["consumequeue", TOPIC, QUEUE, "index"]
MODES = [0, 0o444, 0o111]


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as opened:
        for number in range(20):
            for topic in "TU":
                opened.put_message(Message(topic, b"%d" % number, keys=[f"K{number}", f"only{topic}"], tags="a"))
        opened.consumer_offsets.commit("group", "T", 0, 3)
    return path


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def ask(caplog):
    """Run a command while one folder is closed; the answer, and all that was said beside it."""

    def asked(store, folder, mode, *args):
        caplog.clear()
        with closed(store / folder, mode):
            done = run(*args)
        return done, done.stderr + caplog.text

    return asked


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_needs_no_closed_folder_is_read(store, tmp_path, folder, mode):
    with closed(store / folder, mode):
        # The log has all, and tells of every message what a queue or the index would.
        done = run("query", store, "T", "K3", "--format", "%s")
        assert (done.exit_code, done.stdout) == (0, "3\n"), done.stderr
        done = run("query", store, "--key", "onlyT", "--max-num", 100, "--format", "%s")
        assert done.exit_code == 0 and len(done.stdout.splitlines()) == 20, done.stderr
        for topic in ("", "T"):
            done = run("tail", store, *topic, "-n", 5, "--format", "%t %s")
            expected = [f"T {number}" for number in range(15, 20)] if topic else ["T 18", "U 18", "T 19", "U 19"]
            assert done.stdout.splitlines()[-len(expected) :] == expected, done.stderr
        done = run("tail", store, "--key", "K2", "--format", "%t %s")
        assert done.stdout == "T 2\nU 2\n", done.stderr
        done = run("export", store, "-O", tmp_path / "all.jsonl", "--topic", "T", "--queue", "0")
        assert done.exit_code == 0 and len((tmp_path / "all.jsonl").read_bytes().splitlines()) == 20, done.stderr
        for condition, rows in [("true", 40), ("'K3' = any(keys)", 2), ("topic = 'T' and queue_offset = 3", 1)]:
            done = run("sql", store, f"select count(*) as n from messages where {condition}", "--json")
            assert json.loads(done.stdout)["n"] == rows, (condition, done.stderr)
        with MessageStore.open(store, read_only=True) as opened:
            if folder != "consumequeue":
                assert opened.get_table("U", 0).num_rows == opened.max_queue_offset("U", 0) == 20
            assert [message.body for message in opened.query_message("T", "K3")] == [b"3"]


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_could_not_be_looked_into_is_named(store, ask, folder, mode):
    done, said = ask(store, folder, mode, "info", store, "--json", *SIZES)
    assert done.exit_code == 0 and str(store / folder) in said
    assert any(each["path"].startswith(str(store / folder)) for each in json.loads(done.stdout)["damaged_files"])
    assert "no queue on disk" not in ask(store, folder, mode, "info", store, *SIZES)[0].stdout
    with closed(store / folder, mode):
        found = list(verify(store, StoreConfig(**SMALL)))
    # One finding for each folder or file that is closed, and nothing is called missing, or wrong.
    assert found and {finding.kind for finding in found} == {"file"}
    assert all(finding.path.startswith(str(store / folder)) for finding in found)
    assert len({finding.path for finding in found}) == len(found)
    assert all("Permission denied" in finding.detail for finding in found)
    done, said = ask(store, folder, mode, "metrics", store)
    assert done.exit_code == 0 and "\nrmqstore_up 1.0\n" in done.stdout and str(store / folder) in said


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("folder", ["consumequeue", TOPIC, QUEUE])
def test_a_queue_in_a_closed_folder_is_not_said_to_be_missing(store, ask, folder, mode):
    progress = ["offsets", "set", store, "--group", "g", "--topic", "T", "--latest"]
    for command in (["get", store, "T", 0], ["queues", store, "T"], progress):
        done, said = ask(store, folder, mode, *command, *SIZES)
        # Where the topic's folder may be listed, its queues are known, and only left out of the list.
        listed = command[0] == "queues" and (folder == QUEUE or (folder, mode) == (TOPIC, 0o444))
        assert done.exit_code == (1 if listed else 3), (command, said)
        assert str(store / folder) in said and "Permission denied" in said
        assert "no queue of" not in said and "has no queue" not in said
    with closed(store / folder, mode), MessageStore.open(store, read_only=True, config=StoreConfig(**SMALL)) as opened:
        for question in (opened.get_message, opened.min_queue_offset, opened.get_table):
            with pytest.raises(PermissionError):
                question("T", 0)
        if opened.queues.unseen:
            with pytest.raises(PermissionError):
                opened.queue_ids("T")
            with pytest.raises(PermissionError):
                opened.message_by_id("0" * 31 + "Z")
        assert opened.consumer_progress()[0] == {("group", "T"): {0: 3}}
    done, _ = ask(store, folder, mode, "offsets", store, "--json", *SIZES)
    assert json.loads(done.stdout.splitlines()[0])["lag"] is None
    done, said = ask(store, folder, mode, "topics", store, "--json", *SIZES)
    shown = [json.loads(line)["topic"] for line in done.stdout.splitlines()]
    assert shown == ([] if folder == "consumequeue" else ["U"]), said
    assert str(store / folder) in said and "has no queues" not in said


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_writer_refuses(store, ask, tmp_path, folder, mode):
    before = sorted(os.listdir(store))
    (tmp_path / "rows.jsonl").write_text('{"topic":"T"}\n')
    commands = [["import", store, tmp_path / "rows.jsonl"], ["rebuild", store, "--yes"], ["recover", store]]
    for command in [*commands, ["rebuild", store, "--output", tmp_path / "new"]]:
        done, said = ask(store, folder, mode, *command)
        assert done.exit_code == 3 and str(store / folder) in said, (command, said)
    with closed(store / folder, mode), pytest.raises(PermissionError):
        MessageStore.open(store)
    assert not (tmp_path / "new").exists() or not os.listdir(tmp_path / "new")
    assert sorted(os.listdir(store)) == before and "abort" not in before


def test_what_is_not_in_order_where_a_folder_is_closed(store):
    (store / "abort").write_text("1")
    with closed(store / TOPIC), MessageStore.open(store, read_only=True, config=StoreConfig(**SMALL)) as opened:
        assert opened.unserved == (0, opened.commit_log.max_offset)
        assert opened.max_queue_offset("U", 0) == 20
    with closed(store / QUEUE), MessageStore.open(store, read_only=True, config=StoreConfig(**SMALL)) as opened:
        assert opened.unserved is not None and opened.max_queue_offset("U", 0) == 20


def test_a_writer_does_not_guess_kinds_of_queues_where_settings_are_closed(store, ask):
    for command in (["recover", store], ["rebuild", store, "--yes"]):
        done, said = ask(store, "config", 0, *command)
        assert done.exit_code == 3 and "topics.json" in said, (command, said)
    assert ask(store, "config", 0, "verify", store, *SIZES)[0].exit_code == 1


@pytest.mark.parametrize("folder", ["consumequeue", "consumequeue/SCHEDULE_TOPIC_XXXX"])
def test_what_waits_is_found_once_where_queues_are_closed(tmp_path, ask, folder):
    broker = golden.unpack("broker", tmp_path)
    asked = ["pending", broker, "--json"]

    def waiting(answer):
        rows = [json.loads(line) for line in answer.stdout.splitlines()]
        return sorted((row["kind"], row["phy_offset"]) for row in rows if "phy_offset" in row)

    whole = run(*asked)
    done, said = ask(broker, folder, 0, *asked)
    assert waiting(done) == waiting(whole) != [], said


def test_an_id_is_not_said_to_be_nowhere(store):
    with closed(store / TOPIC), MessageStore.open(store, read_only=True, config=StoreConfig(**SMALL)) as opened:
        with pytest.raises(InvalidMessageError, match="nor has a message of topic U"):
            opened.message_by_id("0" * 31 + "Z", "U")


# ------------------------------------------------------------------------------------------- options that name a path


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["info", "{store}", "--config", "{path}"], "broker.conf"),
        (["info", "{store}", "--tiered", "{path}"], ""),
        (["metrics", "{store}", "--findings", "{path}"], "verify.jsonl"),
    ],
    ids=lambda value: value[2] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("above", [True, False])
def test_an_option_below_a_closed_folder_is_not_said_to_name_nothing(store, tmp_path, ask, command, name, above):
    folder = tmp_path / "etc" / "broker"
    folder.mkdir(parents=True)
    path = folder / name
    if name:
        path.write_text("")
    done, said = ask(folder.parent if above else folder, "", 0, *(each.format(store=store, path=path) for each in command))
    assert done.exit_code == 3 and f"Permission denied [{path}" in said and "Run the command as a user with access" in said


def test_an_option_that_names_nothing_is_wrong_usage(store, tmp_path):
    for option in ("--config", "--tiered"):
        done = run("info", store, option, tmp_path / "none")
        assert done.exit_code == 2 and "does not exist" in done.stderr


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_advice_for_a_closed_folder_is_to_open_it(store, ask, folder, mode):
    done, _ = ask(store, folder, mode, "verify", store, *SIZES)
    advice = done.stdout.partition("next steps")[2]
    assert "file: give this user read access (chmod, chown), then verify again" in advice and "rmqstore rebuild" not in advice


def test_advice_names_no_pipe_that_is_gone_by_then(store):
    (store / "consumequeue" / "T" / "0" / "stray").write_text("")
    for config, said in [("/dev/fd/63", "broker.conf"), (str(store / "lock"), str(store / "lock"))]:
        steps = NextSteps(str(store), (), config)
        steps.take(Finding(str(store / "consumequeue" / "T"), 0, "missing_unit", ""))
        assert steps.steps()[0][1] == f"rmqstore rebuild {store} --config {said} --what consumequeue"
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m rmqstore verify {store} --config <(echo mappedFileSizeCommitLog=4096)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "--config broker.conf" in done.stdout and "/dev/fd" not in done.stdout
