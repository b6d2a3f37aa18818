"""rmqstore topics and queues: every figure is what the broker's own files and reads say; offsets reset; bench."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import golden
import pytest
import small_store
from test_cli import HOSTILE, assert_harmless, environment, json_lines, run, utc  # noqa: F401

from rmqstore import Message, MessageStore, StoreConfig


def told(name):
    """By (topic, queue id): the messages that Java read there, oldest first."""
    found = {}
    by_place = {line["offset"]: line for line in golden.lines(name, "msg")}
    for line in golden.lines(name, "queue"):
        units = [unit.split(":") for unit in line["units"]]
        found[line["topic"], line["queueId"]] = [(by_place.get(int(phy)), int(size)) for _, phy, size, _ in units]
    return found


def test_queues_are_what_java_read(broker):
    values = {
        (value["topic"], value["queue_id"]): value for value in json_lines(run("queues", broker, "--bytes", "--json"))
    }
    units = told("broker")
    assert values.keys() >= units.keys() and len(units) > 20
    for key, messages in units.items():
        value = values[key]
        assert (value["messages"], value["size"]) == (len(messages), sum(size for _, size in messages)), key
        if messages:
            assert (value["first_store_timestamp"], value["last_store_timestamp"]) == (
                messages[0][0]["store"],
                messages[-1][0]["store"],
            )
            assert value["max_queue_offset"] - value["min_queue_offset"] == value["messages"]


def test_topics_are_the_sums_of_their_queues(golden_store):
    for name in ("broker", "compaction", "ext", "base.running"):
        path = golden_store(name)
        geometry = [f"-o{option}={value}" for option, value in golden.geometry(name).items()]
        queues = json_lines(run("queues", path, "--bytes", "--json", *geometry))
        topics = {value["topic"]: value for value in json_lines(run("topics", path, "--bytes", "--json", *geometry))}
        assert [*topics] == sorted({value["topic"] for value in queues})
        for topic, value in topics.items():
            its = [each for each in queues if each["topic"] == topic]
            assert value["queues"] == len(its)
            for field in ("messages", "size"):
                assert value[field] == sum(each[field] for each in its)
            times = [each["first_store_timestamp"] for each in its if each["first_store_timestamp"] is not None]
            assert value["first_store_timestamp"] == min(times, default=None)


def test_queues_of_a_topic(broker):
    every = json_lines(run("queues", broker, "--json"))
    assert json_lines(run("queues", broker, "Orders", "--json")) == [row for row in every if row["topic"] == "Orders"]
    text = run("queues", broker, "Orders").stdout.splitlines()
    assert text[1:3] == [
        "queues",
        "  topic   kind      first stored                   last stored                    queue  min   max  messages  files",
    ]
    assert text[3].split() == [
        "Orders", "SimpleCQ", "2026-11-21T05:32:39.596+00:00", "2026-11-21T05:32:47.636+00:00", "0", "0", "2500", "2500", "9",
    ]  # fmt: skip
    result = run("queues", broker, "Odrers")
    assert (result.exit_code, result.stdout) == (1, "") and "did you mean Orders?" in result.stderr
    assert "it has: Batches, Documents" in run("queues", broker, "XYZ").stderr


def test_a_store_without_queues_is_listed_from_its_log(golden_copy, broker):
    copy = golden_copy("broker")
    shutil.rmtree(copy / "consumequeue")
    for command in ("topics", "queues"):
        result, whole = run(command, copy), run(command, broker)
        assert result.exit_code == 0 and "consumequeue" in result.stderr, result.stderr
        names = [line.split()[:1] for line in result.stdout.splitlines()]
        assert names == [line.split()[:1] for line in whole.stdout.splitlines()]


def test_hostile_topics_are_harmless(golden_copy):
    copy = golden_copy("broker")
    (copy / "consumequeue" / "\x1b[2JTopic" / "0").mkdir(parents=True)
    for command in ("topics", "queues"):
        for options in ([], ["--json"]):
            result = run(command, copy, *options)
            assert result.exit_code == 0 and "1b[2JTopic" in result.output
            assert_harmless(result.output)
    assert_harmless(run("queues", copy, "x" + HOSTILE).output)


# ---------------------------------------------------------------------------------------------------------------------
# offsets reset


def progress(path):
    return {
        (row["group"], row["topic"], row["queue_id"]): row["queue_offset"]
        for row in json_lines(run("offsets", "show", path, "--json"))
        if row["type"] == "progress"
    }


def test_reset_by_time_and_to_the_ends(golden_copy):
    copy = golden_copy("broker")
    before = progress(copy)
    time = 1795239165000
    result = run("offsets", "reset", copy, "--group", "G-billing", "--topic", "Orders", "--time", time, "--json")
    for value in json_lines(result):
        got = json_lines(run("get", copy, "Orders", value["queue_id"], "--time", time, "--max-num", 1, "--json"))
        assert value["queue_offset"] == got[0]["queue_offset"]
        assert value["before"] == before["G-billing", "Orders", value["queue_id"]]
        before["G-billing", "Orders", value["queue_id"]] = value["queue_offset"]
    # That it goes back was asked for.
    assert progress(copy) == before and result.stderr == ""
    for option, wanted in (("--earliest", 0), ("--latest", 2501)):
        assert run("offsets", "reset", copy, "--group", "new", "--topic", "Orders", "--queue", 1, option).exit_code == 0
        assert progress(copy)["new", "Orders", 1] == wanted
    assert (copy / "config" / "consumerOffset.json.bak").exists()


def test_set_outside_of_a_queue_is_said(golden_copy):
    copy = golden_copy("broker")
    result = run("offsets", "set", copy, "--group", "g", "--topic", "Orders", "--queue", 1, "--queue-offset", 5000)
    assert result.exit_code == 0 and "holds the queue offsets 0 to 2501, and not 5000" in result.stderr


def test_reset_refuses(golden_copy):
    copy = golden_copy("broker")
    tree = golden.tree(copy)
    group = ["--group", "g"]
    assert run("offsets", "reset", copy, *group, "--topic", "Orders").exit_code == 2
    assert run("offsets", "reset", copy, *group, "--topic", "Orders", "--earliest", "--latest").exit_code == 2
    result = run("offsets", "reset", copy, *group, "--topic", "Nope", "--latest")
    assert result.exit_code == 1 and "Orders" in result.stderr
    changed = {path for path in golden.tree(copy).items() ^ tree.items()}
    assert {os.path.basename(str(path)) for path, *_ in changed} <= {"lock"}


# ---------------------------------------------------------------------------------------------------------------------
# bench

SMALL = ["--messages", "2000", "--seconds", "0.1", "-o", "mapped_file_size_commit_log=4194304"]


def test_bench_measures_and_leaves_nothing(tmp_path):
    *steps, machine = json_lines(run("bench", tmp_path, *SMALL, "--json"))
    assert os.listdir(tmp_path) == []
    assert machine["type"] == "machine" and machine["mapped_file_size_commit_log"] == 4194304
    by_name = {step["name"]: step for step in steps}
    assert by_name["get in order"]["count"] == by_name["go over the log"]["count"] == 2000
    assert by_name["put one, ASYNC_FLUSH"]["count"] + by_name["put 1000 at once, ASYNC_FLUSH"]["count"] == 2000
    for name in ("flush 4 KiB (fsync)", "put one, SYNC_FLUSH", "query by key", "scan into Arrow"):
        assert by_name[name]["count"] > 0
    for step in steps:
        assert step["type"] == "step" and step["seconds"] > 0
        assert step["per_second"] == pytest.approx(step["count"] / step["seconds"], rel=0.01, abs=0.1)
        if step["median_us"] is not None:
            assert 0 < step["median_us"] <= step["p99_us"] <= step["longest_us"]
    text = run("bench", tmp_path, *SMALL)
    shown = [line for line in text.stdout.splitlines() if line.startswith("  ")]
    assert len(shown) == len(steps) + 1 and "Python" in text.stderr


def test_bench_fails_where_an_answer_is_wrong(tmp_path, monkeypatch):
    honest = MessageStore.query_message
    monkeypatch.setattr(MessageStore, "query_message", lambda self, *arguments: honest(self, *arguments)[:0])
    result = run("bench", tmp_path, *SMALL)
    assert result.exit_code == 3 and "wrong answer" in result.stderr and os.listdir(tmp_path) == []


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_bench_that_is_ended_leaves_nothing(tmp_path, number, code):
    process = subprocess.Popen(
        [sys.executable, "-m", "rmqstore", "bench", str(tmp_path), "--messages", "50000000", "--json",
         "-o", "mapped_file_size_commit_log=4194304", "--body-size", "0", "-o", "max_index_num=100000", "--seconds", "0.1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    # Two steps are done, and the long one is at work.
    assert json.loads(process.stdout.readline())["name"].startswith("flush")
    process.stdout.readline()
    assert os.listdir(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code and b"Traceback" not in errors, errors
    assert os.listdir(tmp_path) == []


def test_bench_where_it_cannot(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file"):
        result = run("bench", path)
        assert result.exit_code == 3 and "no such directory" in result.stderr
    result = run("bench", tmp_path, "--messages", 100_000_000, "--body-size", 4_000_000)
    assert result.exit_code == 3 and "are free" in result.stderr and "--messages" in result.stderr
    assert run("bench", tmp_path, "-o", "max_index_num=0").exit_code == 2
    assert os.listdir(tmp_path) == ["file"]


def test_bench_never_touches_a_store_that_is_there(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=StoreConfig(mapped_file_size_commit_log=65536)) as store:
        store.put_message(Message("Topic", b"body"))
    before = golden.tree(root)
    assert run("bench", root, *SMALL).exit_code == 0
    after = golden.tree(root)
    assert {path: after[path] for path in before} == before and after.keys() == before.keys()


def test_a_light_queue_is_not_called_empty(tmp_path):
    root = tmp_path / "store"
    with MessageStore.open(root, config=StoreConfig(enable_lmq=True, enable_multi_dispatch=True, **small_store.SMALL)) as store:
        store.put_message(Message("Orders", b"light", keys=["k"], properties={"INNER_MULTI_DISPATCH": "%LMQ%a"}))
    shown = run("tail", root, "%LMQ%a")
    assert shown.exit_code == 0 and "light" in shown.stdout
    for command in (
        ["query", str(root), "%LMQ%a", "k"],
        ["export", str(root), "--topic", "%LMQ%a", "--tags", "none", "-O", str(tmp_path / "out.jsonl")],
    ):
        result = run(*command)
        assert result.exit_code == 1 and "is a light queue" in result.stderr, command
        advice = result.stderr.partition("rmqstore get ")[2].partition(" reads it")[0]
        got = run("get", *shlex.split(advice))
        assert got.exit_code == 0 and "light" in got.stdout
