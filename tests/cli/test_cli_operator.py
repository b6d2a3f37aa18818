"""An operator's questions: keys without a topic, times and days, one-line formats, near names.

Owns the promises about what people type and read; that tables fit a terminal is in test_cli_terminal.py, that one file
alone can be read in tests/offline/test_single_file.py.
"""

from __future__ import annotations

import copy
import datetime
import json
import logging
import pickle
import re
import shutil
import time

import click
import golden
import golden_rabbitmq
import pytest
from test_cli import DELAYS, DOCUMENT, HOSTILE, assert_harmless, json_lines, run, utc  # noqa: F401

from rmqstore import Message, MessageStore, StoreConfig, errors
from rmqstore._core import Verdict
from rmqstore.cli import main
from rmqstore.cli.errors import typed, warning_text
from rmqstore.cli.messages import LETTERS
from rmqstore.commitlog.log_walk import VERDICT_WORDS
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.texts import parse_time, short_time

SMALL = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "max_hash_slot_num": 10,
    "max_index_num": 20,
    "clean_resource_interval": 0,
}
GEOMETRY = [f"-o{name}={value}" for name, value in SMALL.items()]


def stored_at(path, times, topics=("A", "B")):
    """A store with a message at each of these ms, in turn in each topic."""
    clock = iter(times)
    now = [0]

    def tick():
        now[0] = next(clock, now[0])
        return now[0]

    with MessageStore.open(path, config=StoreConfig(**SMALL, clock=lambda: now[0])) as store:
        for number, _ in enumerate(times):
            tick()
            store.put_message(Message(topics[number % len(topics)], b"%d" % number, keys=[f"k{number}", "all"]))
    return path


@pytest.fixture
def zone(monkeypatch):
    def set_zone(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


# ---------------------------------------------------------------------------------------------------------------------
# Times and days


@pytest.mark.parametrize(
    "name, first",
    [
        # Clocks go forward and back; where midnight is skipped; where it comes twice; where a whole day is skipped.
        ("Europe/Berlin", "2026-03-27"),
        ("Europe/Berlin", "2026-10-23"),
        ("America/Sao_Paulo", "2018-11-02"),
        ("America/Sao_Paulo", "2018-02-16"),
        ("America/Havana", "2018-11-02"),
        ("Pacific/Apia", "2011-12-28"),
        ("UTC", "2026-12-30"),
    ],
)
def test_days_share_no_millisecond_and_leave_none_out(zone, name, first):
    zone(name)
    day = datetime.date.fromisoformat(first)
    lengths = []
    for number in range(5):
        today, following = (str(day + datetime.timedelta(days=n)) for n in (number, number + 1))
        begin, end = parse_time(today), parse_time(today, end=True)
        assert end + 1 == parse_time(following)
        lengths.append((end + 1 - begin) / 3_600_000)
        if lengths[-1]:
            shown = [datetime.datetime.fromtimestamp(ms / 1000).date().isoformat() for ms in (begin, end)]
            assert shown == [today, today]
    assert set(lengths) <= {0, 23, 24, 25} and (name == "UTC" or set(lengths) != {24})


def test_words_for_days_and_times_of_day(zone):
    zone("Asia/Kolkata")
    now = datetime.datetime.now()
    today, yesterday = str(now.date()), str(now.date() - datetime.timedelta(days=1))
    assert parse_time("today") == parse_time(today) and parse_time("yesterday", end=True) + 1 == parse_time("today")
    assert parse_time("yesterday") == parse_time(yesterday)
    for text, iso in (
        ("10:30", f"{today}T10:30"),
        ("9:05:07", f"{today}T09:05:07"),
        ("10:30:00.250", f"{today}T10:30:00.250"),
        ("today 23:59", f"{today}T23:59"),
        ("yesterday 10:30", f"{yesterday}T10:30"),
    ):
        # A moment is the same at both ends.
        assert parse_time(text) == parse_time(iso) == parse_time(text, end=True), text
    for wrong in ("25:00", "10:60", "yesterday10", "todayy", "10:3", "tomorrow 10:30"):
        with pytest.raises(ValueError, match="is not a time: write"):
            parse_time(wrong)


def test_daily_exports_share_no_message_and_lose_none(tmp_path, zone):
    zone("Europe/Berlin")
    # The day on which the clocks go back has 25 hours.
    midnights = [parse_time(f"2026-10-{day}") for day in (24, 25, 26, 27)]
    times = sorted(ms + near for ms in midnights for near in (-1, 0, 1))
    path = stored_at(tmp_path / "s", times)
    by_day = {}
    for day in ("2026-10-23", "2026-10-24", "2026-10-25", "2026-10-26", "2026-10-27"):
        # The zone counts, and no run of a test sees the clock jump here.
        result = run("export", path, "--begin", day, "--end", day, "--columns", "body", *GEOMETRY)
        by_day[day] = [json.loads(line)["body"] for line in result.stdout.splitlines()]
    assert [len(rows) for rows in by_day.values()] == [1, 3, 3, 3, 2]
    together = [int(row) for rows in by_day.values() for row in rows]
    assert together == list(range(len(times)))
    # The same of one that names the moment: both ends are part of the range.
    answer = run("query", path, "A", "all", "--begin", times[2], "--end", times[4], "--json", *GEOMETRY)
    assert [row["store_timestamp"] for row in json_lines(answer)] == [times[4], times[2]]


def test_get_by_time(broker):
    every = json_lines(run("get", broker, "Orders", 0, "--max-num", 10_000, "--json", "--body", "none"))
    begin, end = every[700]["store_timestamp"], every[750]["store_timestamp"]
    wanted = [row for row in every if begin <= row["store_timestamp"] <= end]
    asked = ["get", broker, "Orders", 0, "--max-num", 10_000, "--json", "--body", "none"]
    assert json_lines(run(*asked, "--begin", begin, "--end", end)) == wanted and len(wanted) >= 51
    assert json_lines(run(*asked, "--time", begin, "--end", end)) == wanted
    paid = [row for row in wanted if row["tags"] == "paid"]
    assert json_lines(run(*asked, "--begin", begin, "--end", end, "--tags", "paid")) == paid
    result = run(*asked, "--begin", begin, "--end", begin - 1)
    assert (result.exit_code, result.stdout) == (1, "") and "stored in this time" in result.stderr
    short = run("get", broker, "Orders", 0, "--begin", begin, "--end", end, "--max-num", 5, "--body", "none")
    assert f"--begin-queue-offset {wanted[5]['queue_offset']}" in short.stderr
    assert "more" not in run(*asked[:-3], "--begin", begin, "--end", end, "--body", "none").stderr


def test_short_times():
    now = datetime.datetime(2026, 11, 21, 9, 0)
    ms = 1795239159596
    assert short_time(ms, now) == "05:32:39" and short_time(ms, now, "milliseconds") == "05:32:39.596"
    later = datetime.datetime(2026, 12, 1)
    assert [short_time(ms, later, form) for form in ("minutes", "seconds", "milliseconds")] == [
        "11-21 05:32", "11-21 05:32:39", "11-21 05:32:39.596",
    ]  # fmt: skip
    next_year = datetime.datetime(2027, 11, 21)
    assert [short_time(ms, next_year, form) for form in ("minutes", "seconds", "milliseconds")] == [
        "2026-11-21", "2026-11-21 05:32", "2026-11-21 05:32:39.596",
    ]  # fmt: skip
    assert short_time(None, now) == "-" and short_time(2**63 - 1, now).endswith(" ms")


# ---------------------------------------------------------------------------------------------------------------------
# Keys without a topic, ids


def test_a_key_without_a_topic_is_found_in_all(broker):
    lines = [line for line in golden.lines("broker", "query") if line["offsets"] and line.get("indexType") is None]
    by_key = {}
    for line in lines:
        by_key.setdefault(line["key"], set()).update(line["offsets"])
    keys = ["ORD-100000", "CUST-1", *sorted(by_key)[:: len(by_key) // 6]]
    for key in keys:
        found = json_lines(run("query", broker, "--key", key, "--max-num", 64, "--json", "--body", "none"))
        offsets = [row["phy_offset"] for row in found]
        assert offsets == sorted(by_key[key], reverse=True)[:64], key
    result = run("query", broker, "--key", "no-such-key")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no message of any topic has key no-such-key" in result.stderr


def test_of_several_topics_the_newest_come_first_and_the_rest_is_said(tmp_path):
    path = stored_at(tmp_path / "s", list(range(1_700_000_000_000, 1_700_000_000_009)), ("A", "B", "C"))
    whole = json_lines(run("query", path, "--key", "all", "--json", *GEOMETRY))
    assert [row["topic"] for row in whole] == ["C", "B", "A"] * 3
    result = run("query", path, "--key", "all", "--max-num", 4, "--json", *GEOMETRY)
    assert json_lines(result) == whole[:4] and "more than 4" in result.stderr
    tagged = run("query", path, "--key", "all", "--type", "tag", *GEOMETRY)
    assert tagged.exit_code == 1 and "no message of any topic has tag all" in tagged.stderr
    # A range of times, and both keys and topics named.
    some = json_lines(run("query", path, "--key", "all", "--begin", whole[5]["store_timestamp"], "--json", *GEOMETRY))
    assert some == whole[:6]
    assert json_lines(run("query", path, "B", "--key", "all", "--json", *GEOMETRY)) == whole[1::3]


def test_without_an_index_the_log_answers_and_says_what_it_left_out(tmp_path):
    path = tmp_path / "s"
    config = StoreConfig(**SMALL, message_index_enable=False)
    with MessageStore.open(path, config=config) as store:
        for number in range(60):
            store.put_message(Message("A", b"x" * 100, keys=[f"k{number}"]))
    options = [*GEOMETRY, "-o", "messageIndexEnable=false"]
    for key in ("k0", "k59"):
        assert len(json_lines(run("query", path, "--key", key, "--json", *options))) == 1
    result = run("query", path, "--key", "k0", "--max-log-bytes", 5000, "--json", *options)
    (said,) = json_lines(result)
    assert result.exit_code == 1 and said["complete"] is False and said["uncovered"][0][0] == 0
    assert "in the part of the log that was searched" in result.stderr


def test_an_id_of_either_kind_is_one_question(broker):
    (message,) = json_lines(run("query", broker, "--phy-offset", 894, "--json"))
    with MessageStore.open(broker, read_only=True) as store:
        for msg_id in (message["msg_id"], message["unique_key"], f" {message['msg_id'].lower()} "):
            assert json_lines(run("query", broker, "--id", msg_id, "--json")) == [message]
        for msg_id in (message["msg_id"], message["unique_key"], message["msg_id"].lower()):
            assert store.message_by_id(msg_id).phy_offset == 894
        with pytest.raises(InvalidMessageError):
            store.message_by_id("no id")


def test_one_topic_of_topics(broker):
    rows = {row["topic"]: row for row in json_lines(run("topics", broker, "--json"))}
    assert json_lines(run("topics", broker, "Orders", "--json")) == [rows["Orders"]]
    result = run("topics", broker, "Oders", "--json")
    assert (result.exit_code, result.stdout) == (1, "") and "did you mean Orders?" in result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Formats


def test_every_letter_is_documented_and_says_what_the_json_says(broker):
    page = DOCUMENT.read_text(encoding="utf-8")
    documented = dict(re.findall(r"(?m)^\| `%(\w)` \| (.+?) \|", page))
    assert documented == {letter: what for letter, (what, _) in LETTERS.items()}
    (value,) = json_lines(run("query", broker, "--phy-offset", 1348, "--json"))
    wanted = {
        "t": value["topic"], "p": value["queue_id"], "o": value["queue_offset"], "k": " ".join(value["keys"]),
        "K": len(" ".join(value["keys"]).encode()), "S": value["body_size"], "T": value["store_timestamp"],
        "u": value["unique_key"], "i": value["msg_id"], "P": value["phy_offset"], "z": value["size"],
        "g": value["tags"], "r": value["reconsume_times"], "B": value["born_host"], "H": value["store_host"],
        "d": "2026-11-21T05:32:39.731+00:00",
    }  # fmt: skip
    form = "\\t".join(f"%{letter}" for letter in wanted)
    shown = run("query", broker, "--phy-offset", 1348, "--format", form).stdout
    assert shown.removesuffix("\n").split("\t") == [str(each) for each in wanted.values()]
    properties = run("query", broker, "--phy-offset", 1348, "--format", "%h").stdout
    assert "region=EU,TAGS=取消" in properties
    raw = run("query", broker, "--phy-offset", 1348, "--format", "%s", "--body", "hex").stdout
    assert len(bytes.fromhex(raw)) == value["body_size"]
    assert run("query", broker, "--phy-offset", 1348, "--format", "<%s>", "--body", "none").stdout == "<>\n"


def test_a_format_gives_a_line_for_each_message(broker):
    for command in (["get", broker, "Orders", 0, "--max-num", 3], ["tail", broker, "Orders", "-n", 3]):
        lines = run(*command, "--format", "%t/%p %o").stdout.splitlines()
        assert len(lines) == 3 and all(re.fullmatch(r"Orders/\d \d+", line) for line in lines)
        # One line end at the end is no second one; elsewhere it is what it says.
        assert run(*command, "--format", r"%t/%p %o\n").stdout.splitlines() == lines
        assert len(run(*command, "--format", r"%t\n%o").stdout.splitlines()) == 6
    assert run("query", broker, "--phy-offset", 0, "--format", r"100%% \x41\\").stdout == "100% A\\\n"
    for wrong, sentence in (("%t %y", "unknown %y"), ("%", "% at the end"), (r"\q", "unknown escape"), (r"\x4", "unknown escape")):
        result = run("query", broker, "--phy-offset", 0, "--format", wrong)
        assert (result.exit_code, result.stdout) == (2, "") and sentence in result.stderr, result.stderr


def test_a_format_lets_nothing_through_to_a_terminal(tmp_path):
    path = tmp_path / "s"
    with MessageStore.open(path, config=StoreConfig(**SMALL)) as store:
        text = HOSTILE.replace("\x02", "").replace("\x01", "")
        store.put_message(Message("T", text.encode(), keys=["k"], properties={"p": text}))
    form = " ".join(f"%{letter}" for letter in LETTERS)
    result = run("get", path, "T", 0, "--format", form, *GEOMETRY)
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 1
    assert_harmless(result.stdout)
    assert_harmless(run("get", path, "T", 0, "--format", "%" + HOSTILE[:1]).output)


# ---------------------------------------------------------------------------------------------------------------------
# Lag


def test_lag_has_one_name_and_its_sums_are_those_of_the_metrics(broker):
    rows = json_lines(run("offsets", "show", broker, "--json"))
    progress = [row for row in rows if row["type"] == "progress"]
    sums = {row["group"]: row for row in rows if row["type"] == "group"}
    assert all(row.keys() >= {"lag", "queue_offset", "max_queue_offset"} and "behind" not in row for row in progress)
    by_group = {}
    metrics = json_lines(run("metrics", broker, "--json"))
    for sample in metrics:
        if sample["name"] == "rocketmq_group_diff":
            group = sample["labels"]["group"]
            by_group[group] = by_group.get(group, 0) + sample["value"]
    assert by_group.keys() == sums.keys() and len(sums) > 2
    for group, row in sums.items():
        assert row["lag"] == by_group[group] == sum(each["lag"] for each in progress if each["group"] == group)
        assert row["unknown"] == 0
    assert sums["G-billing"]["lag"] == 6
    with MessageStore.open(broker, read_only=True) as store:
        for row in progress:
            at = max(row["queue_offset"], 0)
            waiting = store.get_message(row["topic"], row["queue_id"], at).messages[:1] if row["lag"] else []
            assert row["waiting_since"] == (waiting[0].store_timestamp if waiting else None), row
    since = [row["waiting_since"] for row in progress if row["group"] == "G-billing" and row["waiting_since"]]
    assert sums["G-billing"]["waiting_since"] == min(since) and len(since) == 4
    text = run("offsets", "show", broker, "--group", "G-billing").stdout
    assert "lag" in text and "behind" not in text and re.search(r"(?m)^  G-billing +1 +4 +6  2026-.*\+00:00$", text)
    assert "behind" not in run("offsets", "--help").output


def test_lag_that_nobody_knows_is_no_number(golden_copy):
    copy = golden_copy("broker")
    offsets = copy / "config" / "consumerOffset.json"
    # A broker writes queue ids without quotes.
    value = json.loads(re.sub(r"(?m)^(\s*)(\d+):", r'\1"\2":', offsets.read_text()))
    value["offsetTable"]["Gone@G-billing"] = {"0": 7}
    value["offsetTable"]["Orders@G-billing"] = {"0": 99_999, "1": 2501, "2": 2501}
    offsets.write_text(json.dumps(value))
    rows = json_lines(run("offsets", "show", copy, "--group", "G-billing", "--json"))
    found = {(row.get("topic"), row.get("queue_id")): row for row in rows}
    assert (found["Gone", 0]["lag"], found["Gone", 0]["max_queue_offset"]) == (None, None)
    assert found["Orders", 0]["lag"] is None and found["Orders", 0]["max_queue_offset"] == 2500
    # A queue in which the group has no progress is consumed from its start.
    assert (found["Orders", 3]["queue_offset"], found["Orders", 3]["lag"]) == (-1, 2501)
    first = json_lines(run("get", copy, "Orders", 3, "--begin-queue-offset", 0, "--max-num", 1, "--json"))[0]
    assert rows[-1] == {
        "type": "group", "group": "G-billing", "topics": 2, "queues": 5, "lag": 2501, "unknown": 2,
        "waiting_since": first["store_timestamp"], "kind": "",
    }  # fmt: skip
    text = run("offsets", "show", copy, "--group", "G-billing").stdout
    assert "2501 + unknown" in text and re.search(r"Gone +0 +7 +- +unknown", text)


# ---------------------------------------------------------------------------------------------------------------------
# Words and near names


def test_near_names_are_offered_wherever_a_name_is_asked_for(broker, tmp_path):
    vhost = golden_rabbitmq.unpack("02-kill9-segment-plus-journal", tmp_path / "rabbit")
    for arguments, code, wanted in (
        (["export", broker, "--topic", "Oders"], 1, "did you mean Orders?"),
        (["dump", broker, "--what", "queue", "--topic", "Oders"], 1, "did you mean Orders?"),
        (["topics", broker, "Oders"], 1, "did you mean Orders?"),
        (["pending", broker, "--topic", "Remindrs"], 1, "did you mean Reminders?"),
        (["get", broker, "Orders", 7], 1, "the topic has queues: 0, 1, 2, 3"),
        (["tail", broker, "Orders", "--queue", 7], 1, "the topic has queues: 0, 1, 2, 3"),
        (["dump", broker, "--what", "queue", "--topic", "Orders", "--queue", 7], 1, "the topic has queues: 0, 1, 2, 3"),
        (["offsets", "show", broker, "--group", "G-biling"], 1, "did you mean G-billing?"),
        (["offsets", "show", broker, "--group", "G-billing", "--topic", "Oders"], 1, "did you mean Orders?"),
        (["offsets", "show", broker, "--topic", "Oders"], 1, "did you mean Orders?"),
        (["info", broker, "-o", "maxIndexNumb=3"], 2, "did you mean max_index_num"),
        (["info", broker, "--jsn"], 2, "Did you mean --json"),
        (["vrify", broker], 2, "Did you mean verify?"),
        (["rabbitmq", "dump", vhost, "--queue", "qq"], 3, "did you mean q?"),
        (["rabbitmq", "export", vhost, "--queue", "qq"], 3, "did you mean q?"),
        (["rabbitmq", "dump", vhost, "--vhost", "k2"], 3, "did you mean k02?"),
    ):
        result = run(*arguments)
        assert result.exit_code == code, (arguments, result.output)
        # What was looked at is listed by this one.
        assert result.stdout == "" or arguments[0] == "pending", (arguments, result.output)
        # Newer clicks put options in quotes.
        assert wanted.lower() in result.stderr.lower().replace("'--", "--"), (arguments, result.stderr)
        assert_harmless(result.stderr)


def test_a_group_that_is_new_may_be_a_slip(golden_copy):
    copy = golden_copy("broker")
    asked = ["offsets", "set", copy, "--topic", "Orders", "--latest", "--group"]
    result = run(*asked, "G-biling")
    assert result.exit_code == 0 and "has no progress yet; did you mean G-billing?" in result.stderr
    assert run(*asked, "quite-another").stderr == ""


#: What a program would write, and names of enums.
PROGRAM = re.compile(
    r"""\w=(?:True|False|None)\b|(?:recovery|config)=|StoreConfig\.|\b(?:BAD|OFFSET|NO)_[A-Z]+|\((?:EMPTY|BLANK|MISSING)\)"""
)


def said(*arguments):
    result = run(*arguments)
    assert not PROGRAM.search(result.stderr) and result.exit_code, (arguments, result.stderr)
    return result.stderr


def test_messages_name_what_can_be_typed(golden_copy, tmp_path):
    copy = golden_copy("broker")
    assert "-o message_delay_level='1s 5s" in said("rebuild", copy, "--output", tmp_path / "new")
    segment = copy / "commitlog" / "00000000000001048576"
    data = bytearray(segment.read_bytes())
    data[4:8] = b"XXXX"
    segment.write_bytes(data)
    (copy / "abort").touch()
    (copy / "checkpoint").unlink()
    text = said("recover", copy, *DELAYS)
    assert "rmqstore recover --mode skip" in text and "--mode truncate" in text and "no magic number" in text
    result = run("recover", copy, "--mode", "skip", *DELAYS)
    assert "phy offset 1048576: no magic number of a record" in result.stdout
    assert "verdict" in run("dump", copy, "--json", "--begin-phy-offset", 1048576).stdout
    assert "DAMAGE: no magic number of a record" in run("dump", copy).stdout
    assert "(no magic number of a record)" in run("verify", copy, *DELAYS).stdout
    with MessageStore.open(copy, recovery="skip"):
        text = said("rebuild", copy, "--yes", *DELAYS)
        assert "read-only commands still work" in text
        reset = said("offsets", "set", copy, "--group", "g", "--topic", "Orders", "--latest")
        assert "read-only commands" in reset
    (copy / "commitlog" / "00000000000000000000").write_bytes(bytes(100))
    assert "rmqstore recover --mode skip skips the lost part" in said("recover", copy, *DELAYS)
    assert "--config" in said("info", copy, "-o", "mappedFileSizeCommitLog=4096")
    said("get", copy, "Orders", 0, "--begin-queue-offset", 99_999)
    said("get", copy, "Orders", 99)
    said("query", copy, "--phy-offset", 1_048_577)


def test_every_remedy_is_spelled_for_python_and_for_the_command_line():
    kinds = {kind.__name__ for kind in errors.Remedy.__subclasses__()}
    for remedy, python, shell in (
        (errors.ChooseRecovery(), 'recovery="skip" to go on', "rmqstore recover --mode skip keeps"),
        (errors.Recover("skip"), "recovery='skip'", "rmqstore recover --mode skip"),
        (errors.GiveOptions(("a_b='1s 2s'", "c=1")), "config=StoreConfig.infer(path, a_b='1s 2s', c=1)", "-o a_b='1s 2s' -o c=1"),
        (errors.GiveOptions(("a=...", "b=..."), infer=False), "a=... and b=...", "-o a=... -o b=..."),
        (errors.UseBrokerConf(), "StoreConfig.from_properties('broker.conf')", "--config broker.conf"),
        (errors.InferConfig(), "StoreConfig.infer(path)", "omit -o and --config"),
        (errors.OpenReadOnly("the store"), ", or open the store with read_only=True", "; read-only commands still work"),
        (errors.DropUnits(3, recovery=True), "MessageStore.open(path, drop_units=3)", "rmqstore recover --drop-units 3"),
        (errors.DropUnits(3, recovery=False), "drop_units=3", "--drop-units 3"),
        (errors.DeclareQueue(), "declared=True", "--declared"),
    ):
        kinds.discard(type(remedy).__name__)
        error = StoreError(errors.Sentence("it is wrong; ", remedy, " helps"), "a file", 7)
        assert error.remedies == (remedy,) and error.what == "it is wrong; "
        assert str(error).startswith("it is wrong; ") and str(error).endswith(" helps [a file, position 7]")
        assert python in str(error)
        assert shell in typed(error.message) and "True" not in typed(error.message)
        again = pickle.loads(pickle.dumps(copy.deepcopy(error)))
        assert str(again) == str(error) and again.remedies == error.remedies
        record = logging.LogRecord("rmqstore", logging.WARNING, "", 0, "%s: %s", ("a file", error.message), None)
        assert warning_text(record) == f"a file: {typed(error.message)}"
    assert not kinds
    sentence = errors.Sentence("not a record (", Verdict.BAD_SIZE, ")")
    assert sentence == "not a record (BAD_SIZE)" and typed(sentence) == "not a record (an impossible size)"
    assert {each.name for each in Verdict} - {"COLUMNS_FULL", "LIMIT"} == set(VERDICT_WORDS)


# ---------------------------------------------------------------------------------------------------------------------
# mqadmin


#: What an operator types there, that the page must have an answer for.
MQADMIN = {
    "queryMsgByKey", "queryMsgByUniqueKey", "queryMsgById", "queryMsgByOffset", "queryMsgTraceById", "queryCq",
    "printMsg", "printMsgByQueue", "consumerProgress", "topicStatus", "topicList", "exportMetadata",
    "rocksDBConfigToJson",
    "dumpCompactionLog",
}  # fmt: skip


def test_what_stands_instead_of_mqadmin_exists():
    page = DOCUMENT.read_text(encoding="utf-8")
    (table,) = re.findall(r"(?m)^\| mqadmin \| rmqstore \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    rows = [re.fullmatch(r"\| `(\w+)[^|]*\| (.*) \|", line) for line in table.splitlines()]
    assert all(rows) and {row[1] for row in rows} >= MQADMIN
    seen = set()
    for row in rows:
        lines = re.findall(r"`rmqstore ([^`]+)`", row[2])
        assert lines, row[0]
        for line in lines:
            words = line.split()
            command, context = main, click.Context(main)
            while isinstance(command, click.Group):
                name = words.pop(0)
                command = command.get_command(context, name)
                assert command is not None, line
                seen.add(name)
                context = click.Context(command, parent=context, info_name=name)
            # Options and their choices exist, and so many arguments are taken; words in capitals stand for others.
            values = {"TIME": "2026-11-20", "QUEUE": "0", "OFFSET": "0"}
            given = [values.get(word, word) for word in words]
            command.make_context(command.name, given, parent=context.parent, resilient_parsing=False).close()
    assert {"query", "get", "dump", "offsets", "topics", "queues", "settings", "export"} <= seen


def test_a_log_of_a_compacted_topic_is_dumped_as_a_segment(broker, tmp_path):
    # RocketMQ writes each record's own place in that log into it, so that it looks like a segment of that name.
    folder = tmp_path / "compaction" / "compactionLog" / "Orders" / "0"
    folder.mkdir(parents=True)
    path = folder / ("0" * 20)
    path.write_bytes((broker / "commitlog" / ("0" * 20)).read_bytes()[:65536])
    first, *rows = json_lines(run("dump", path, "--json"))
    assert first["kind"] == "segment" and rows[0]["type"] == "record" and len(rows) > 100


# ---------------------------------------------------------------------------------------------------------------------
# What an operator met who saw the tool for the first time


def test_an_index_folder_that_is_gone_is_rebuilt_with_what_the_error_says(golden_copy):
    path = golden_copy("broker")
    slots, entries = (StoreConfig.infer(path).max_hash_slot_num, StoreConfig.infer(path).max_index_num)
    shutil.rmtree(path / "index")
    refused = run("rebuild", path, "--what", "index", "--yes")
    assert refused.exit_code == 3
    text = " ".join(refused.stderr.split())
    assert "-o max_hash_slot_num=5000000 -o max_index_num=20000000" in text and "index_tags" in text and "broker.conf" in text
    assert not (path / "index").exists()
    options = [f"-omax_hash_slot_num={slots}", f"-omax_index_num={entries}", "-oindex_tags=true"]
    assert run("rebuild", path, "--what", "index", "--yes", *options).exit_code == 0
    assert run("verify", path, *DELAYS).exit_code == 0


def test_what_truncate_leaves_verify_finds_nothing_wrong_with(tmp_path):
    path = tmp_path / "store"
    base = 1_700_000_000_000
    stored_at(path, [base + 60_000 * number for number in range(12)])
    with MessageStore.open(path, read_only=True) as store:
        places = [message.phy_offset for message in store.messages()]
    segment, at = divmod(places[6], 4096)
    with open(path / "commitlog" / f"{segment * 4096:020d}", "r+b") as file:
        file.seek(at + 4)
        file.write(b"\0\0\0\0")
    (path / "abort").touch()
    assert run("recover", path, *GEOMETRY, "--mode", "truncate", "--yes").exit_code == 0
    found = run("verify", path, *GEOMETRY)
    assert (found.exit_code, found.stdout) == (0, "nothing is wrong\n"), found.stdout
    assert Checkpoint.load(path / "checkpoint", read_only=True).physic_msg_timestamp == base + 60_000 * 5


def test_a_rebuild_says_which_damaged_message_keeps_its_place(tmp_path):
    path = stored_at(tmp_path / "store", range(1_700_000_000_000, 1_700_000_000_012))
    with MessageStore.open(path, read_only=True) as store:
        first, second = [message.phy_offset for message in store.messages()][3:5]
    with open(path / "commitlog" / f"{first // 4096 * 4096:020d}", "r+b") as file:
        # The body lies after 84 bytes of fixed fields and its own length.
        file.seek(first % 4096 + 88)
        file.write(b"X")
    done = run("rebuild", path, *GEOMETRY, "--what", "consumequeue", "--yes")
    assert f"the message of {second - first} bytes at phy offset {first} is damaged, and keeps its queue offset" in done.stdout
    assert "skipped" not in done.stdout and "12 queue units" in done.stdout


def test_an_import_says_whose_delay_levels_it_took(broker, tmp_path):
    everything = tmp_path / "all.jsonl"
    assert run("export", broker, "-O", everything, "--topic", "SCHEDULE_TOPIC_XXXX", *DELAYS).exit_code == 0
    sizes = [f"-o{name}={value}" for name, value in SMALL.items()] + ["-omapped_file_size_commit_log=1048576"]
    done = run("import", tmp_path / "assumed", everything, "--keep-timestamps", *sizes)
    assert done.exit_code == 0 and "message_delay_level" in done.stderr and "due by the default levels" in done.stderr
    done = run("import", tmp_path / "given", everything, "--keep-timestamps", *sizes, *DELAYS)
    assert done.exit_code == 0 and "message_delay_level" not in done.stderr


def test_verify_does_not_say_that_it_compared_what_it_did_not(broker):
    done = run("verify", broker)
    assert "due times of delayed messages are not checked" in " ".join(done.stderr.split())
    assert "not compared" not in run("verify", broker, *DELAYS).stderr
