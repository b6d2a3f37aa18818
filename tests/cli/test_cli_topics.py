"""rmqstore topics and queues: every figure is what the broker's own files and reads say; offsets set."""

from __future__ import annotations

import os
import shlex
import shutil

import golden
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
    assert "only: Batches, Documents" in run("queues", broker, "XYZ").stderr


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
# offsets set


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
    result = run("offsets", "set", copy, "--group", "G-billing", "--topic", "Orders", "--time", time, "--json")
    for value in json_lines(result):
        got = json_lines(run("get", copy, "Orders", value["queue_id"], "--time", time, "--max-num", 1, "--json"))
        assert value["queue_offset"] == got[0]["queue_offset"]
        assert value["before"] == before["G-billing", "Orders", value["queue_id"]]
        before["G-billing", "Orders", value["queue_id"]] = value["queue_offset"]
    # That it goes back was asked for.
    assert progress(copy) == before and result.stderr == ""
    for option, wanted in (("--earliest", 0), ("--latest", 2501)):
        assert run("offsets", "set", copy, "--group", "new", "--topic", "Orders", "--queue", 1, option).exit_code == 0
        assert progress(copy)["new", "Orders", 1] == wanted
    assert (copy / "config" / "consumerOffset.json.bak").exists()


def test_set_outside_of_a_queue_is_said(golden_copy):
    copy = golden_copy("broker")
    result = run("offsets", "set", copy, "--group", "g", "--topic", "Orders", "--queue", 1, "--queue-offset", 5000)
    assert result.exit_code == 0 and "has queue offsets 0 to 2501; 5000 is outside" in result.stderr


def test_reset_refuses(golden_copy):
    copy = golden_copy("broker")
    tree = golden.tree(copy)
    group = ["--group", "g"]
    assert run("offsets", "set", copy, *group, "--topic", "Orders").exit_code == 2
    assert run("offsets", "set", copy, *group, "--topic", "Orders", "--earliest", "--latest").exit_code == 2
    result = run("offsets", "set", copy, *group, "--topic", "Nope", "--latest")
    assert result.exit_code == 1 and "Orders" in result.stderr
    changed = {path for path in golden.tree(copy).items() ^ tree.items()}
    assert {os.path.basename(str(path)) for path, *_ in changed} <= {"lock"}


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
