"""The command line: its answers, exit codes, manners on a terminal and in a pipe, and every example of docs/cli.md.

Owns the running of documented commands (a ``console`` block: lines after ``$`` are run by a shell, what follows is their
output, stderr included).  Commands that write get a store of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import golden
import pytest
from click.testing import CliRunner

from rmqstore import Message, MessageStore, StoreConfig, cli
from rmqstore.cli import main
from rmqstore.cli.terminal import escape, format_size, format_time, parse_time

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "cli.md"
DELAYS = ["-o", "messageDelayLevel=1s 2s 30m 1h"]


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def run(*arguments, **options):
    """The click result of a command in this process; anything that escapes is an error of the test."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def environment(**extra):
    return {**os.environ, "TZ": "UTC", "PYTHONIOENCODING": "utf-8", "COLUMNS": "200", **extra}


def start(*arguments, **options):
    """The command in a process of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
    options.setdefault("env", environment())
    return subprocess.Popen([sys.executable, "-m", "rmqstore", *map(str, arguments)], **options)


def json_lines(result):
    assert result.exit_code in (0, 1), result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# docs/cli.md


# A command whose own words have no shell syntax, and what is done with its answer.  What `recover` has to tell it logs, which
# goes to stderr only where no program has set up logging, as pytest has.
IN_THIS_PROCESS = re.compile(
    r"""(?P<command>rmqstore (?!recover)(?:'[^']*'|[^|;&><$'"`*])+?)(?: (?P<errors>2>&1|2>/dev/null))?"""
    r"""(?: ?\| (?P<filter>(?:(?!rmqstore|PIPESTATUS|\$\?).)+)|; echo "exit code \$\?")"""
)


def run_document(text: str, directory: Path) -> str:
    """The document with the outputs that its commands have now, run in order in `directory`, the current one.

    A command goes on in lines that begin with ``> ``, as a shell shows it; what it answers must not begin so.

    A command runs in this process, which is quicker than another Python: one without shell syntax, one whose answer is only
    filtered, and one after which only its exit code is shown.  All others run in a shell.
    """
    shell = f'rmqstore() {{ "{sys.executable}" -m rmqstore "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n'

    def run_block(match: re.Match[str]) -> str:
        lines = []
        for typed in re.findall(r"(?m)^\$ (.*(?:\n> .*)*)$", match[1]):
            command = typed.replace("\\\n> ", "").replace("\n> ", "\n")
            words = shlex.split(command)
            if words[0] == "rmqstore" and not re.search(r"[|;&><$]", command.replace("||", "")):
                lines.append(f"$ {typed}\n{run(*words[1:]).output}")
                continue
            script, given, shown = command, None, ""
            if parts := IN_THIS_PROCESS.fullmatch(command):
                result = run(*shlex.split(parts["command"])[1:])
                if parts["filter"] is None:
                    said = result.stdout if parts["errors"] == "2>/dev/null" else result.output
                    lines.append(f"$ {typed}\n{said}exit code {result.exit_code}\n")
                    continue
                script = parts["filter"]
                given = (result.output if parts["errors"] == "2>&1" else result.stdout).encode()
                shown = "" if parts["errors"] else result.stderr
            ran = subprocess.run(
                ["bash", "-c", shell + script],
                cwd=directory,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                **({"stdin": subprocess.DEVNULL} if given is None else {"input": given}),
            )
            lines.append(f"$ {typed}\n{shown}{ran.stdout.decode()}")
        return f"```console\n{''.join(lines)}```"

    return re.sub(r"```console\n(.*?)```", run_block, text, flags=re.DOTALL)


def test_documented_commands_answer_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    golden.unpack("sample", tmp_path)
    text = DOCUMENT.read_text(encoding="utf-8")
    commands = re.findall(r"(?m)^\$ rmqstore (\w+)", text)
    # RabbitMQ's are run by tests/rabbitmq/test_rabbitmq_docs.py.
    # `completion` and `demo` print what is too long for a document, and `serve` goes on for ever:
    # tests/cli/test_cli_examples.py runs them.
    assert {*commands} >= {*cli._COMMANDS} - {"completion", "demo", "serve"}
    assert run_document(text, tmp_path) == text


def test_a_document_that_is_wrong_is_noticed(tmp_path):
    text = "```console\n$ echo right\nright\n$ echo wrong\nother\n```\n"
    assert run_document(text, tmp_path) == text.replace("other", "wrong")
    text = (
        '```console\n$ rmqstore --version | cut -c 1-9\nrmqstore,\n$ rmqstore info none; echo "exit code $?"\n'
        'Error: wrong\nexit code 0\n$ rmqstore info none 2>/dev/null; echo "exit code $?"\nexit code 3\n'
        "$ rmqstore info none 2>&1 | grep -c Error\n1\n$ rmqstore info none 2>/dev/null | wc -c\n0\n```\n"
    )
    wrong = "Error: wrong\nexit code 0"
    assert re.fullmatch(
        re.escape(text).replace(re.escape(wrong), r"Error: (?s:.+)\nexit code 3"), run_document(text, tmp_path)
    )


def test_every_command_has_a_section_and_help():
    text = DOCUMENT.read_text(encoding="utf-8")
    listed = re.findall(r"(?m)^  (\w+) {2,}\S", run("--help").stdout.partition("Commands:")[2])
    assert listed == sorted(cli._COMMANDS) and len(listed) >= 16
    for name in listed:
        assert f"\n## {name}\n" in text
        result = run(name, "--help")
        assert result.exit_code == 0 and "Usage:" in result.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def test_info_json_is_complete(broker):
    (value,) = json_lines(run("info", broker, "--json"))
    geometry = golden.geometry("broker")
    bounds = next(golden.lines("broker", "store"))
    assert value["clean"] is True
    assert (value["commit_log"]["min_offset"], value["commit_log"]["max_offset"]) == (
        bounds["minPhy"],
        bounds["maxPhy"],
    )
    told = {name: wanted for name, wanted in geometry.items() if name not in value["assumed"]}
    assert {name: value["config"][name] for name in told} == told and len(told) > 4
    queues = {(line["topic"], line["queueId"]): len(line["units"]) for line in golden.lines("broker", "queue")}
    found = {(queue["topic"], queue["queue_id"]): queue["messages"] for queue in value["queues"]}
    assert {key: found[key] for key in queues} == queues and len(queues) > 20
    assert len(value["index_files"]) == 5 and all(
        index["entries"] <= index["capacity"] for index in value["index_files"]
    )
    assert {"group": "G-billing", "topic": "Orders", "queue_id": 1, "offset": 2498, "lag": 3} in value[
        "consumer_offsets"
    ]
    assert value["checkpoint"]["index_msg_timestamp"] > 0


def test_info_says_when_a_store_was_not_closed(broker_killed):
    assert json_lines(run("info", broker_killed, "--json"))[0]["clean"] is False
    assert "abort" in run("info", broker_killed).stdout


def test_log_dump_is_every_record_that_java_read(broker):
    wanted = {line["offset"]: line for line in golden.lines("broker", "msg")}
    blanks = [(line["offset"], line["size"]) for line in golden.lines("broker", "blank")]
    dumped = json_lines(run("dump", broker, "--json"))
    records = {value["phy_offset"]: value for value in dumped if value["type"] == "record"}
    assert records.keys() == wanted.keys() and len(records) > 10_000
    for offset, line in wanted.items():
        value = records[offset]
        assert (value["size"], value["topic"], value["queue_id"], value["queue_offset"], value["store_timestamp"]) == (
            line["size"], line["topic"], line["queueId"], line["queueOffset"], line["store"],
        )  # fmt: skip
    assert [value["phy_offset"] for value in dumped if value["type"] == "blank"] == [offset for offset, _ in blanks]
    assert not [value for value in dumped if value["type"] == "damage"]
    text = run("dump", broker)
    assert len(text.stdout.splitlines()) == len(dumped)


def test_queue_dump_is_every_unit_that_java_read(golden_store):
    for name in ("broker", "compaction"):
        for line in golden.lines(name, "queue"):
            dumped = json_lines(
                run(
                    "dump",
                    golden_store(name),
                    "--what",
                    "queue",
                    "--topic",
                    line["topic"],
                    "--queue",
                    line["queueId"],
                    "--json",
                )
            )
            units = {
                value["queue_offset"]: (value["phy_offset"], value["size"], value["tags_code"]) for value in dumped
            }
            wanted = {}
            for unit in line["units"]:
                number, *fields = map(int, unit.split(":"))
                wanted[number] = tuple(fields)
            assert units == wanted


def test_index_dump_has_every_entry_and_chain(broker):
    dumped = json_lines(run("dump", broker, "--what", "index", "--json"))
    by_file = {}
    for value in dumped:
        by_file.setdefault(value["file"], []).append(value)
    assert len(by_file) == 5
    for name, values in by_file.items():
        raw = (broker / "index" / name).read_bytes()
        header = next(value for value in values if value["type"] == "index_header")
        entries = [value for value in values if value["type"] == "index_entry"]
        slots = [value for value in values if value["type"] == "index_slot"]
        (chains,) = [value for value in values if value["type"] == "index_chains"]
        assert header["index_count"] == int.from_bytes(raw[36:40], "big") == len(entries) + 1
        for value in (entries[0], entries[-1]):
            at = value["pos"]
            assert int.from_bytes(raw[at : at + 4], "big") == value["key_hash"]
            assert int.from_bytes(raw[at + 4 : at + 12], "big") == value["phy_offset"]
        # Every entry is in exactly one chain.
        assert sum(value["chain"] for value in slots) == len(entries)
        assert chains["slots_used"] == len(slots) == header["hash_slot_count"]
        assert chains["longest_chain"] == max(value["chain"] for value in slots)
        for value in slots:
            assert int.from_bytes(raw[value["pos"] : value["pos"] + 4], "big") == value["newest"]


def test_query_finds_what_java_finds(broker):
    lines = [line for line in golden.lines("broker", "query") if line["offsets"]][::400]
    assert len(lines) > 20
    for line in lines:
        found = json_lines(run("query", broker, line["topic"], line["key"], "--json", "--body", "none"))
        assert [value["phy_offset"] for value in found] == list(dict.fromkeys(line["offsets"])), line["key"]
        assert all("body" not in value for value in found)


def test_query_compat_is_ascending_and_by_place_equals_by_key(broker):
    offsets = [value["phy_offset"] for value in json_lines(run("query", broker, "Orders", "ORD-100000", "--json"))]
    compat = [
        value["phy_offset"] for value in json_lines(run("query", broker, "Orders", "ORD-100000", "--compat", "--json"))
    ]
    assert compat == sorted(offsets) and len(compat) == 4
    (by_offset,) = json_lines(run("query", broker, "--phy-offset", offsets[0], "--json"))
    (by_id,) = json_lines(run("query", broker, "--id", by_offset["msg_id"], "--json"))
    assert by_id == by_offset


def test_query_types(broker):
    (value,) = json_lines(run("query", broker, "--phy-offset", 0, "--json"))
    assert json_lines(run("query", broker, "Orders", value["unique_key"], "--type", "unique", "--json")) == [value]
    assert run("query", broker, "Orders", value["unique_key"], "--type", "key").exit_code == 1
    assert run("query", broker, "Orders", "ORD-100000", "--type", "unique").exit_code == 1
    tagged = json_lines(run("query", broker, "Orders", "created", "--type", "tag", "--max-num", 5000, "--json"))
    assert len(tagged) > 1000 and {value["tags"] for value in tagged} == {"created"}


def test_bodies(broker):
    (text,) = json_lines(run("query", broker, "--phy-offset", 1348, "--json"))
    (raw,) = json_lines(run("query", broker, "--phy-offset", 1348, "--json", "--body", "hex"))
    assert raw["body_encoding"] == "hex" and len(bytes.fromhex(raw["body"])) == raw["body_size"] == text["body_size"]
    shown = run("query", broker, "--phy-offset", 1348, "--body", "hex").stdout.splitlines()[1]
    assert bytes.fromhex(shown) == bytes.fromhex(raw["body"])
    large = run("query", broker, "Orders", "大键").stdout.splitlines()[1]
    assert large.endswith(f"... {200_000 - 1024} more bytes, see --json")


def test_get_goes_over_files_and_tags(broker):
    everything = json_lines(run("get", broker, "Orders", 1, "--max-num", 10_000, "--json", "--body", "none"))
    assert [value["queue_offset"] for value in everything] == list(range(2501))
    paid = json_lines(run("get", broker, "Orders", 1, "--tags", "paid", "--max-num", 10_000, "--json"))
    assert [value["phy_offset"] for value in paid] == [
        value["phy_offset"] for value in everything if value["tags"] == "paid"
    ]
    middle = everything[1234]["store_timestamp"]
    late = json_lines(
        run("get", broker, "Orders", 1, "--time", middle, "--max-num", 10_000, "--json", "--body", "none")
    )
    assert late == [value for value in everything if value["store_timestamp"] >= middle]


def test_options_override_what_is_inferred(broker, tmp_path):
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerName=b\nmapedFileSizeCommitLog=1048576\nmessageDelayLevel=1s 2s 30m 1h\n")
    (value,) = json_lines(run("info", broker, "--json", "--config", conf))
    # What neither the files nor the broker.conf tell has the broker's default, and is known therefore.
    assert value["assumed"] == [] and value["config"]["message_delay_level"] == "1s 2s 30m 1h"
    assert value["config"]["max_index_num"] == 8000
    (value,) = json_lines(run("info", broker, "--json", "--config", conf, "-o", "message_delay_level=5s"))
    assert value["config"]["message_delay_level"] == "5s"
    for spelling in ("maxMsgsNumBatch", "max_msgs_num_batch"):
        (value,) = json_lines(run("info", broker, "--json", "-o", f"{spelling}=7"))
        assert value["config"]["max_msgs_num_batch"] == 7
    (value,) = json_lines(run("info", broker, "--json", "-o", "cleanFileForciblyEnable=FALSE"))
    assert value["config"]["clean_file_forcibly_enable"] is False


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1795239159596", 1795239159596),
        ("2026-11-21T05:32:39.596+00:00", 1795239159596),
        ("2026-11-21T05:32:39.596Z", 1795239159596),
        ("2026-11-21T06:32:39.596000+01:00", 1795239159596),
        ("2026-11-21 05:32:39", 1795239159000),
        ("2026-11-21", 1795219200000),
        ("2026-11-21T05:32:39.5Z", 1795239159500),
    ],
)
def test_times(text, expected):
    assert parse_time(text) == expected


def test_times_in_the_local_zone_and_back(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    assert parse_time("2026-11-21T13:32:39.596") == 1795239159596
    assert format_time(1795239159596) == "2026-11-21T13:32:39.596+08:00"
    assert format_time(2**63 - 1) == f"{2**63 - 1} ms" and format_time(-(2**63)) == f"{-(2**63)} ms"


def test_times_ago():
    now = time.time_ns() // 1_000_000
    assert abs(parse_time("2h ago") - (now - 7_200_000)) < 5000
    assert abs(parse_time("1.5 d ago") - (now - 129_600_000)) < 5000
    assert abs(parse_time("2 hours ago") - (now - 7_200_000)) < 5000
    assert abs(parse_time("1 day ago") - (now - 86_400_000)) < 5000
    # Seconds, and a date that could be milliseconds, are in 1970: nobody means them.
    for wrong in (
        "tomorrow",
        "2h",
        "2026-13-01",
        "",
        "9999999999999999999999",
        "2 fortnights ago",
        "1795239159",
        "20261121",
    ):
        with pytest.raises(ValueError, match="is not a time"):
            parse_time(wrong)


def test_sizes():
    assert [format_size(size) for size in (0, 1023, 1024, 5069798, 2**30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "4.8 MiB",
        "1.0 GiB",
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Exit codes


def test_nothing_found_is_1(broker):
    for arguments in (
        ["query", broker, "Orders", "no-such-key"],
        ["query", broker, "--phy-offset", 7],
        ["query", broker, "--phy-offset", 2**62],
        ["query", broker, "--id", "no-hex"],
        ["query", broker, "Orders", "--id", f"{2**40:032X}"],
        ["get", broker, "Orders", 99],
        ["get", broker, "Orders", 0, "--begin-queue-offset", 2500],
        ["dump", broker, "--what", "queue", "--topic", "NoSuchTopic"],
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (1, "") and result.stderr, arguments


def test_wrong_usage_is_2(broker, tmp_path):
    for arguments in (
        ["no-such-command"],
        ["query", broker],
        ["query", broker, "Orders"],
        ["query", broker, "Orders", "k", "--id", "00"],
        ["query", broker, "Orders", "k", "--begin", "tomorrow"],
        ["query", broker, "--key", "k", "--compat"],
        ["query", broker, "Orders", "k", "--json", "--format", "%t"],
        ["query", broker, "Orders", "k", "--format", "%x"],
        ["get", broker, "Orders", "0", "--begin-queue-offset", 1, "--time", 1],
        ["dump", broker, "--what", "queue"],
        ["dump", broker, "--what", "index", "--topic", "Orders"],
        ["info", broker, "-o", "noSuchOption=1"],
        ["info", broker, "-o", "max_index_num"],
        ["info", broker, "-o", "max_index_num=many"],
        ["info", broker, "-o", "max_msgs_num_batch=0"],
        ["info", broker, "-o", "clock=1"],
        ["info", broker, "--config", tmp_path / "none.conf"],
        ["rebuild", broker, "--what", "commitlog"],
        ["rebuild", broker, *DELAYS],
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "") and "Error" in result.stderr, arguments


def test_cannot_open_is_3_and_names_the_file(broker, golden_copy, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    (tmp_path / "empty" / "commitlog").mkdir(parents=True)
    for command in (["info"], ["verify"], ["dump"], ["query", "--phy-offset", "0"], ["rebuild", "--yes"]):
        for path in (tmp_path / "missing", file):
            result = run(command[0], path, *command[1:])
            assert result.exit_code == 3 and str(path) in result.stderr and not result.stdout, (command, path)
    # A log without any segment is one that a writer is about to make: its sizes are assumed.
    result = run("info", tmp_path / "empty")
    assert result.exit_code == 0 and "mapped_file_size_commit_log" in result.stdout.partition("assumed")[2]
    result = run("info", broker, "-o", "mapped_file_size_commit_log=4096")
    assert result.exit_code == 3 and "commitlog/0" in result.stderr
    copy = golden_copy("broker")
    name = sorted(path.name for path in (copy / "index").iterdir())[0]
    with open(copy / "index" / name, "r+b") as odd:
        odd.truncate(1000)
    assert run("info", copy).exit_code == 0
    result = run("info", copy, "-omax_hash_slot_num=7", "-omax_index_num=7")
    assert result.exit_code == 3 and "/index/" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_3(golden_copy):
    copy = golden_copy("base")
    segment = next((copy / "commitlog").iterdir())
    segment.chmod(0)
    result = run("info", copy)
    assert result.exit_code == 3 and segment.name in result.stderr


def test_findings_are_1(golden_copy):
    copy = golden_copy("broker")
    assert run("verify", copy, *DELAYS).exit_code == 0
    with open(copy / "commitlog" / ("0" * 20), "r+b") as segment:
        segment.seek(1000)
        segment.write(b"X")
    result = run("verify", copy, *DELAYS, "--json")
    *findings, summary = json_lines(result)
    assert result.exit_code == 1
    assert [(finding["kind"], finding["pos"]) for finding in findings] == [("bad_body_crc", 894)]
    (step,) = summary.pop("next").items()
    assert step[0] == "bad_body_crc" and f"rmqstore recover {copy}" in step[1]
    assert summary == {"type": "summary", "findings": 1, "kinds": {"bad_body_crc": 1}}
    shown = run("query", copy, "--phy-offset", 894)
    assert shown.exit_code == 1 and "CORRUPT" in shown.stdout


def test_a_geometry_that_cannot_be_told_is_a_finding_for_verify(golden_copy):
    copy = golden_copy("broker")
    for segment in (copy / "commitlog").iterdir():
        os.truncate(segment, 0)
    result = run("verify", copy, "--json")
    assert result.exit_code == 1 and json_lines(result)[0]["kind"] == "geometry"


def test_every_command_but_rebuild_leaves_no_trace(golden_copy):
    copy = golden_copy("broker.killed")
    before = golden.tree(copy)
    run("info", copy), run("verify", copy), run("dump", copy, "--end-phy-offset", 5000), run("get", copy, "Orders", 0)
    run("dump", copy, "--what", "index"), run("query", copy, "Orders", "ORD-100000"), run("rebuild", copy)
    assert golden.tree(copy) == before


# ---------------------------------------------------------------------------------------------------------------------
# Rebuild


def test_rebuild_in_place_and_into_a_directory(golden_copy, tmp_path):
    copy = golden_copy("broker")
    before = {
        path.relative_to(copy): path.read_bytes() for path in (copy / "consumequeue").rglob("*") if path.is_file()
    }
    result = run("rebuild", copy, *DELAYS, "--output", tmp_path / "out", "--json")
    (report,) = json_lines(result)
    assert report["type"] == "rebuild" and report["records"] > 10_000 and report["damage"] == []
    assert {path: (tmp_path / "out" / path).read_bytes() for path in before} == before
    shutil.rmtree(copy / "consumequeue")
    result = run(
        "rebuild", copy, "--what", "consumequeue", *DELAYS, "-o", "mapped_file_size_consume_queue=6000", "--yes"
    )
    assert result.exit_code == 0, result.output
    assert {path: (copy / path).read_bytes() for path in before} == before


def test_rebuild_of_a_damaged_log_says_so(golden_copy, tmp_path):
    copy = golden_copy("broker")
    with open(copy / "commitlog" / ("0" * 20), "r+b") as segment:
        segment.seek(1000)
        segment.write(b"X")
    result = run("rebuild", copy, *DELAYS, "--output", tmp_path / "out")
    assert result.exit_code == 1 and "454 bytes at phy offset 894" in result.stdout


def test_rebuild_asks_on_a_terminal(golden_copy):
    copy = golden_copy("broker")
    before = golden.tree(copy)
    for answer, code in ((b"n\n", 1), (b"\x04", 1), (b"y\n", 0)):
        output, returncode = on_a_terminal("rebuild", copy, *DELAYS, answer=answer)
        assert "This replaces" in output and returncode == code, output
        if code:
            assert golden.tree(copy) == before
    assert golden.tree(copy) != before and run("verify", copy, *DELAYS).exit_code == 0


def test_ctrl_c_at_the_question_is_130(golden_copy):
    copy = golden_copy("broker")
    before = golden.tree(copy)
    parent, child = pty.openpty()

    def take_terminal():
        # Its own session with this terminal, so that the key becomes a signal.
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = start(
        "rebuild", copy, *DELAYS, stdin=child, stdout=child, stderr=child, preexec_fn=take_terminal,
        env=environment(TERM="xterm"),
    )  # fmt: skip
    os.close(child)
    output = b""
    while b"[y/N]" not in output:
        assert select.select([parent], [], [], 60)[0], output
        output += os.read(parent, 65536)
    # Python's readline may miss a signal that comes just before it waits; then a person presses the keys again, but not once
    # the command has said that it ends: after that Python itself may be stopped by a signal while it goes.
    for _ in range(300):
        os.write(parent, b"\x03")
        said = b""
        while not said.strip() and select.select([parent], [], [], 0.2)[0]:
            try:
                said += os.read(parent, 65536).replace(b"^C", b"")
            except OSError:  # Linux says EIO when the other end is closed.
                break
        if said.strip() or process.poll() is not None:
            break
    assert process.wait(timeout=240) == 130, said
    os.close(parent)
    assert golden.tree(copy) == before


def test_ctrl_c_during_a_rebuild_leaves_the_store_whole(golden_copy):
    copy = golden_copy("broker")
    before = {
        path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != "lock"
    }
    # The progress callback waits, so that the signal comes while the rebuild is in the middle.
    code = (
        "import sys, time, rmqstore.cli as cli, rmqstore.cli.rebuild as command\n"
        "class Waiting(command.Progress):\n"
        "    def __call__(self, done, total):\n"
        "        print('building', flush=True)\n"
        # Not one long sleep: a signal that came just before it would be looked at after it.
        "        for _ in range(6000):\n"
        "            time.sleep(0.01)\n"
        "command.Progress = Waiting\n"
        "cli.main(sys.argv[1:])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "rebuild", str(copy), "--yes", *DELAYS],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        # A run in the background of a shell inherits that the signal is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout.readline() == b"building\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130 and b"The store was not changed" in errors and b"Traceback" not in errors, errors
    after = {
        path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != "lock"
    }
    assert after == before
    assert run("rebuild", copy, "--yes", *DELAYS).exit_code == 0
    assert run("verify", copy, *DELAYS).exit_code == 0


def test_a_rebuild_that_was_killed_leaves_the_store_whole(golden_copy):
    copy = golden_copy("broker")
    before = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    code = (
        "import os, signal, sys, rmqstore.cli as cli, rmqstore.cli.rebuild as command\n"
        "class Deadly(command.Progress):\n"
        "    def __call__(self, done, total):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "command.Progress = Deadly\n"
        "cli.main(sys.argv[1:])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "rebuild", str(copy), "--yes", *DELAYS], env=environment(), check=False
    )
    assert ran.returncode == -signal.SIGKILL
    after = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    left = {name for name in after.keys() - before.keys()}
    assert left and {name.parts[0] for name in left} == {".rmqstore-rebuild"}
    assert {name: after[name] for name in before if name.name != "lock"} == {
        name: content for name, content in before.items() if name.name != "lock"
    }
    assert run("verify", copy, *DELAYS).exit_code == 0
    # The next one clears what was begun, and works.
    assert run("rebuild", copy, "--yes", *DELAYS).exit_code == 0
    assert not (copy / ".rmqstore-rebuild").exists()


def test_a_rebuild_that_was_interrupted_in_the_exchange_is_ended_by_the_next(golden_copy, monkeypatch):
    copy = golden_copy("broker")
    queues = {
        path.relative_to(copy): path.read_bytes() for path in (copy / "consumequeue").rglob("*") if path.is_file()
    }
    shutil.rmtree(copy / "consumequeue" / "Orders")
    rename = os.rename

    def interrupted(source, target):
        if str(target) == str(copy / "consumequeue"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr("os.rename", interrupted)
    result = run("rebuild", copy, "--yes", *DELAYS)
    assert result.exit_code == 130 and "run the same command again" in result.stderr, result.output
    monkeypatch.undo()
    monkeypatch.setenv("TZ", "UTC")
    options = [
        f"-o{name}={golden.geometry('broker')[name]}" for name in ("mapped_file_size_consume_queue", "index_tags")
    ]
    result = run("rebuild", copy, "--yes", *DELAYS, *options)
    assert result.exit_code == 0 and "finished an interrupted rebuild" in result.stdout, result.output
    assert {path: (copy / path).read_bytes() for path in queues} == queues
    assert run("verify", copy, *DELAYS).exit_code == 0


def test_a_store_that_somebody_writes_is_not_rebuilt(golden_copy):
    copy = golden_copy("base")
    config = StoreConfig(**golden.geometry("base"))
    with MessageStore.open(copy, config=config):
        result = run("rebuild", copy, "--yes", "-o", "index_tags=false", "-o", "max_hash_slot_num=10")
        assert result.exit_code == 3 and "lock" in result.stderr
        assert run("info", copy).exit_code == 0


# ---------------------------------------------------------------------------------------------------------------------
# Terminals, pipes, hostile content

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\u2028\r\n\x7f"


def on_a_terminal(*arguments, answer=b"", width=100):
    """(all that a command wrote to its terminal, its exit code)."""
    parent, child = pty.openpty()
    process = start(
        *arguments, stdin=child, stdout=child, stderr=child, env=environment(TERM="xterm", COLUMNS=str(width))
    )  # fmt: skip
    os.close(child)
    output = b""
    if answer:
        os.write(parent, answer)
    with contextlib.suppress(OSError):  # Linux says EIO when the other end is closed.
        while select.select([parent], [], [], 60)[0]:
            part = os.read(parent, 65536)
            if not part:
                break
            output += part
    os.close(parent)
    return output.decode(), process.wait(timeout=240)


@pytest.fixture
def hostile_store(tmp_path):
    config = StoreConfig(
        mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=2000, max_hash_slot_num=10, max_index_num=100
    )
    root = tmp_path / "hostile"
    with MessageStore.open(root, config=config) as store:
        # A separator of the format cannot be in a key; everything else can.
        store.put_message(Message("Topic", HOSTILE.encode(), keys=["k" + HOSTILE], tags="t" + HOSTILE))
        store.put_message(Message("Topic", b"\xff\xfe[red]markup[/red]", keys=["[bold]k[/bold]"]))
    return root


def assert_harmless(text: str, allowed="\n"):
    assert not [char for char in text if not char.isprintable() and char not in allowed], text


def test_hostile_content_does_not_reach_the_terminal(hostile_store):
    for arguments in (
        ["dump"],
        ["get", "Topic", "0"],
        ["query", "Topic", "k" + HOSTILE],
        ["query", "Topic", "x" + HOSTILE],
    ):
        for options in ([], ["--json"]):
            result = run(arguments[0], hostile_store, *arguments[1:], *options)
            assert result.output
            assert_harmless(result.output)
    shown = run("get", hostile_store, "Topic", 0).stdout
    assert "\\x1b[2J\\x9b31m\\u202e\\u2028\\r\\n\\x7f" in shown and "[red]markup[/red]" in shown
    (first, _) = json_lines(run("get", hostile_store, "Topic", 0, "--json"))
    assert first["body"] == HOSTILE and first["tags"] == "t" + HOSTILE


def test_hostile_file_names_do_not_reach_the_terminal(golden_copy):
    copy = golden_copy("broker")
    (copy / "commitlog" / "\x1b[2J\u202e").write_bytes(b"")
    result = run("verify", copy)
    assert result.exit_code == 1 and "\\x1b[2J" in result.output
    assert_harmless(result.output)
    (copy / "consumequeue" / "\x1b[2JTopic" / "0").mkdir(parents=True)
    result = run("info", copy)
    assert_harmless(result.output)


def test_a_path_that_is_no_text(golden_copy, tmp_path):
    root = os.path.join(os.fsencode(tmp_path), b"st\xffre")
    shutil.copytree(os.fsencode(golden_copy("base")), root)
    for options in ([], ["--json"]):
        process = start("info", os.fsdecode(root), *options)
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0 and errors == b"" and b"\\udcff" in output
    assert json.loads(output)["path"].endswith("st\udcffre")


def test_damage_anywhere_ends_in_an_answer_or_an_error_of_ours(golden_copy):
    copy = golden_copy("base")
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
    chooser = random.Random(5)
    geometry = [f"-o{name}={value}" for name, value in golden.geometry("base").items()]
    codes = set()
    for _ in range(60):
        path = chooser.choice(files)
        content = path.read_bytes()
        at, bit = chooser.randrange(min(len(content), 600)), 1 << chooser.randrange(8)
        path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        for arguments in (
            ["info"], ["verify"], ["dump"], ["dump", "--what", "index"], ["dump", "--what", "queue", "--topic", "TopicTest"],
            ["get", "TopicTest", "0"], ["query", "BatchTopic", "ib"], ["query", "--phy-offset", "0"],
        ):  # fmt: skip
            for options in (geometry, ["--json"]):
                # Anything but an orderly exit is raised by `run`.
                result = run(arguments[0], copy, *arguments[1:], *options)
                assert result.exit_code in (0, 1, 3), (path, at, bit, arguments)
                codes.add(result.exit_code)
        path.write_bytes(content)
    assert {0, 1} <= codes


def test_escape():
    assert escape("plain 取消 😀 ü") == "plain 取消 😀 ü"
    assert escape("a\tb\x00\x1b\u200b\ud800") == "a\\tb\\x00\\x1b\\u200b\\ud800"


def test_a_terminal_gets_a_table_of_its_width(broker):
    output, returncode = on_a_terminal("info", broker, width=90)
    assert returncode == 0 and "Orders" in output
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).splitlines()
    assert max(map(len, lines)) <= 90
    # Piped, no line is cut or folded.
    piped = run("info", broker).stdout
    assert "\x1b" not in piped and max(map(len, piped.splitlines())) > 120


def test_a_bar_is_shown_only_on_a_terminal(broker):
    output, returncode = on_a_terminal("verify", broker, *DELAYS)
    assert returncode == 0 and "verifying" in output and "nothing is wrong" in output
    result = run("verify", broker, *DELAYS)
    assert result.stderr == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_in_other_encodings(broker, encoding):
    arguments = ["get", broker, "Orders", "3", "--max-num", "1"]
    process = start(*arguments, env=environment(PYTHONIOENCODING=encoding, LC_ALL="C"))
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert ("tags=取消" if encoding == "utf-8" else "tags=\\u53d6\\u6d88") in output.decode(encoding)
    process = start(*arguments, "--json", env=environment(PYTHONIOENCODING=encoding, LC_ALL="C"))
    assert json.loads(process.communicate(timeout=240)[0].decode(encoding))["tags"] == "取消"


def test_a_reader_that_leaves_ends_it_quietly(broker):
    process = start("dump", broker)
    line = process.stdout.readline()
    process.stdout.close()
    assert line.split()[:2] == [b"0", b"484"]
    errors = process.stderr.read()
    assert process.wait(timeout=240) == 141 and errors == b""


def test_through_head(broker):
    ran = subprocess.run(
        f'"{sys.executable}" -m rmqstore dump "{broker}" --json | head -n 2',
        shell=True, capture_output=True, env=environment(), check=True, timeout=240,
    )  # fmt: skip
    assert len(ran.stdout.splitlines()) == 2 and ran.stderr == b""


def test_starting_loads_nothing_heavy():
    code = (
        "import sys, rmqstore.cli\n"
        "heavy = {'pyarrow', 'pyspark', 'rich', 'lz4', 'zstandard', 'asyncio', 'rmqstore.demo'}\n"
        "print(*sorted(heavy & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert ran.stdout.strip() == ""


def test_demo_is_a_command(tmp_path):
    result = run("demo", "--unpack", tmp_path / "store")
    assert result.exit_code == 0 and (tmp_path / "store" / "commitlog").is_dir()


def test_version():
    from rmqstore import __version__

    assert run("--version").stdout.strip() == f"rmqstore, version {__version__}"


def test_the_list_of_commands_says_what_each_says_of_itself():
    import click

    context = click.Context(cli.main)
    for name, (_, _, short) in cli._COMMANDS.items():
        command = cli.main.get_command(context, name)
        assert command.name == name
        assert (command.help or "").split("\n\n")[0].replace("\n", " ").strip() == short
