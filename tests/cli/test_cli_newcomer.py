"""The first minutes: no arguments, wrong paths, wrong words, completion; each answer says what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import golden_rabbitmq
import pytest
from click.shell_completion import ShellComplete
from test_cli import HOSTILE, assert_harmless, environment, run, utc  # noqa: F401

from rmqstore.cli import main
from rmqstore.cli.group import of_error


@pytest.fixture
def vhost(tmp_path):
    return golden_rabbitmq.unpack("02-kill9-segment-plus-journal", tmp_path / "rabbit")


# ---------------------------------------------------------------------------------------------------------------------
# No arguments


def test_without_arguments_it_shows_the_first_steps(tmp_path, monkeypatch, golden_copy):
    monkeypatch.chdir(tmp_path)
    result = run()
    assert result.exit_code == 0 and result.stderr == ""
    assert "First steps:" in result.stdout and "rmqstore info PATH" in result.stdout
    copy = golden_copy("broker")
    copy.rename(tmp_path / "store")
    assert "rmqstore info store " in run().stdout
    monkeypatch.chdir(tmp_path / "store")
    assert "rmqstore info . " in run().stdout
    (tmp_path / "hostile").mkdir()
    monkeypatch.chdir(tmp_path / "hostile")
    (tmp_path / "hostile" / "a;b\x1b[2J" / "commitlog").mkdir(parents=True)
    assert_harmless(run().stdout)
    assert "rmqstore info PATH" in run().stdout


def test_the_first_steps_name_commands_that_exist(tmp_path, monkeypatch):
    import click

    monkeypatch.chdir(tmp_path)
    page = run().stdout
    named = re.findall(r"(?m)^  rmqstore (\w+)", page)
    assert len(named) > 5
    for name in named:
        assert main.get_command(click.Context(main), name) is not None
    assert all(len(line) <= 120 for line in page.splitlines())


# ---------------------------------------------------------------------------------------------------------------------
# Wrong paths and words


COMMANDS = [
    ["info"], ["verify"], ["dump"], ["query", "--phy-offset", "0"], ["get", "T", "0"], ["tail"], ["topics"], ["queues"],
    ["rebuild", "--yes"], ["recover"], ["offsets", "show"], ["export"], ["metrics"], ["serve", "--port", "0"],
    ["sql", "select * from queues"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_says_what_a_wrong_path_is(command, golden_copy, vhost, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    golden_copy("base").rename("store")
    os.mkdir("empty")
    os.mkdir("other")
    Path("other/notes.txt").touch()
    segment = next(Path("store/commitlog").iterdir())
    queue = next(path for path in Path("store/consumequeue").glob("*/0"))
    words, options = (command[:2], command[2:]) if command[0] == "offsets" else (command[:1], command[1:])
    for path, sentence, advice in (
        ("store/commitlog", "a folder inside a store", "root of the store: store\n"),
        (segment, "a file inside a store", "root of the store: store\n"),
        (queue, "a folder inside a store", "root of the store: store\n"),
        ("store/index", "a folder inside a store", "root of the store: store\n"),
        (".", "not a store, but contains one", "./store"),
        ("empty", "is empty", "commitlog/"),
        ("other", "not a RocketMQ store", "storePathRootDir"),
        ("other/notes.txt", "not a directory", "commitlog/"),
        ("no/such", "no such directory", "commitlog/"),
        (vhost, "RabbitMQ", "rmqstore rabbitmq info"),
        ("x" + HOSTILE.replace("/", ""), "no such directory", "commitlog/"),
    ):
        if command == ["dump"] and path == segment:
            # It takes one file alone too.
            continue
        if command == ["dump"] and path == "other/notes.txt":
            sentence, advice = "not a file of a store that is known", "known files are segments"
        result = run(*words, path, *options)
        assert (result.exit_code, result.stdout) == (3, ""), (path, result.output)
        assert sentence in result.stderr and advice in result.stderr, (path, result.stderr)
        assert_harmless(result.stderr)
    # A store is not one of them, and neither is one whose log is lost.
    if command[0] != "serve":
        assert run(*words, "store", *options, "-o", "messageDelayLevel=1s").exit_code in (0, 1)


def test_the_advice_can_be_followed(golden_copy, vhost, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    golden_copy("base").rename("my store")
    for path in ("my store/commitlog", "."):
        advice = run("info", path).stderr.strip().splitlines()[-1].partition(": ")[2]
        ran = subprocess.run(
            ["bash", "-c", f'"{sys.executable}" -m rmqstore info {advice}'],
            env=environment(), capture_output=True, timeout=240, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, (advice, ran.stderr)
    assert run("info", "my store/commitlog").stderr.endswith("Give the root of the store: 'my store'\n")


def test_rabbitmq_commands_know_a_rocketmq_store(broker, vhost):
    for command in ("info", "queues", "dump", "verify"):
        result = run("rabbitmq", command, broker)
        assert (result.exit_code, result.stdout) == (3, ""), command
        assert "this is a RocketMQ store" in result.stderr and "Try: rmqstore info" in result.stderr
    assert run("rabbitmq", "queues", vhost).exit_code == 0


def test_words_that_are_no_command(broker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, advice in (
        (["inof"], "Did you mean info?"),
        (["topic"], "Did you mean topics?"),
        (["offsets", "sett"], "Did you mean set?"),
        ([str(broker)], "Give the path after the command"),
        (["x" + HOSTILE], "--help"),
    ):
        result = run(*words)
        assert (result.exit_code, result.stdout) == (2, "") and advice in result.stderr, result.stderr
        assert_harmless(result.stderr)


@pytest.mark.parametrize("command", ["export", "rebuild", "rabbitmq export", "info"])
def test_a_second_path_is_told_where_output_goes(broker, command):
    result = run(*command.split(), broker, "out.parquet")
    told = result.stderr
    assert result.exit_code == 2
    hint = "Give the output file with --output"
    assert "unexpected extra argument (out.parquet)" in told and told.count(hint) == (command != "info")


def test_a_topic_that_is_not_there_is_said_with_those_that_are(broker):
    for arguments in (
        ["get", broker, "Oders", "0"], ["query", broker, "Oders", "k"], ["tail", broker, "Oders"], ["queues", broker, "Oders"],
    ):  # fmt: skip
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (1, "") and "did you mean Orders?" in result.stderr, arguments
    assert "the topic has queues: 0, 1, 2, 3" in run("get", broker, "Orders", 7).stderr
    assert "did you mean" not in run("query", broker, "Orders", "k").stderr


@pytest.mark.parametrize("command", ["info", "dump", "tail", "tail -f", "topics", "verify"])
def test_output_that_cannot_be_written(broker, command):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    shell = f'"{sys.executable}" -m rmqstore {command} "{broker}" > /dev/full; echo "$?"'
    ran = subprocess.run(
        ["bash", "-c", shell], env=environment(), capture_output=True, text=True, timeout=240, check=True
    )
    assert ran.stdout == "3\n" and "No space left on device: the output cannot be written" in ran.stderr
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr


def test_a_quota_is_a_full_disk():
    told = of_error(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    assert told.message.endswith("the output cannot be written") and told.hint.startswith("Free space")


def test_findings_that_cannot_be_written_are_not_findings(golden_copy):
    # The command ended with the exit code of findings, and the interpreter with 120: nobody had seen any.
    copy = golden_copy("broker")
    shutil.rmtree(copy / "consumequeue" / "Orders")
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    for redirection in ("> /dev/full", "> /dev/full 2> /dev/full"):
        shell = f'"{sys.executable}" -m rmqstore verify "{copy}" {redirection}; echo "$?" >&3'
        ran = subprocess.run(
            ["bash", "-c", f"exec 3>&1; {shell}"], env=environment(), capture_output=True, text=True, timeout=240, check=True
        )
        assert ran.stdout == "3\n" and "Exception ignored" not in ran.stderr


def test_streams_that_are_closed(broker):
    for redirection, code in ((">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0)):
        shell = f'"{sys.executable}" -m rmqstore info "{broker}" {redirection}'
        ran = subprocess.run(["bash", "-c", shell], env=environment(), capture_output=True, timeout=240, check=False)
        assert ran.returncode == code and b"Traceback" not in ran.stderr, ran.stderr


def test_warnings_of_the_package_are_harmless_notes(golden_copy):
    copy = golden_copy("base")
    code = (
        "import logging, sys\n"
        "import rmqstore, rmqstore.cli.info as info\n"
        "def describe(path, config):\n"
        "    logging.getLogger('rmqstore.test').warning('about %s', 'T\\x1b[2J\\u202e')\n"
        "    return rmqstore.describe(path, config)\n"
        "info.describe = describe\n"
        "from rmqstore.cli import main\n"
        "main(['info', sys.argv[1]])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(copy)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert ran.stderr == "about T\\x1b[2J\\u202e\n"
    assert_harmless(ran.stdout)


# ---------------------------------------------------------------------------------------------------------------------
# Completion


def completed(*words):
    """What a shell would be offered for the last word: (kind, text) each."""
    *before, last = map(str, words)
    items = ShellComplete(main, {}, "rmqstore", "_RMQSTORE_COMPLETE").get_completions(before, last)
    return [(item.type, item.value) for item in items]


def test_completion_of_commands_options_and_what_a_store_holds(broker, tmp_path):
    assert completed("ta") == [("plain", "tail")]
    assert completed("offsets", "se") == [("plain", "set")]
    assert completed("tail", "--fol") == [("plain", "--follow")]
    assert completed("info", "sto") == [("dir", "sto")]
    assert completed("get", broker, "Or") == [("plain", "Orders")]
    assert completed("offsets", "show", broker, "--group", "G-b") == [("plain", "G-billing")]
    assert ("plain", "max_index_num=") in completed("info", broker, "-o", "max_")
    # Nothing that is not there makes a noise in the middle of a line.
    for words in (["get", tmp_path / "none", ""], ["offsets", "show", tmp_path, "--group", ""]):
        assert completed(*words) == []


def test_hostile_topics_are_not_offered(golden_copy):
    copy = golden_copy("base")
    (copy / "consumequeue" / "Top\x1b[2J" / "0").mkdir(parents=True)
    assert ("plain", "TopicTest") in completed("get", copy, "Top")
    assert not [value for _, value in completed("get", copy, "Top") if not value.isprintable()]


def test_completing_a_command_loads_none(broker):
    code = (
        "import sys\n"
        "from click.shell_completion import ShellComplete\n"
        "from rmqstore.cli import main\n"
        "items = ShellComplete(main, {}, 'rmqstore', 'X').get_completions([], '')\n"
        "assert len(items) > 10 and all(item.help for item in items if not item.value.startswith('-'))\n"
        "print(*sorted({'pyarrow', 'pyspark', 'rich', 'rmqstore.demo', 'rmqstore.spark', 'rmqstore.cli.tail'} & {*sys.modules}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert ran.stdout.strip() == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell):
    result = run("completion", shell)
    assert result.exit_code == 0 and f"_RMQSTORE_COMPLETE={shell}_complete" in result.stdout
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed here, so that its syntax cannot be checked")
    subprocess.run([program, "-n"], input=result.stdout.encode(), check=True, timeout=240)


def test_the_script_works_in_bash(broker, tmp_path):
    program = tmp_path / "rmqstore"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rmqstore "$@"\n')
    program.chmod(0o755)
    script = (
        f'PATH={tmp_path}:$PATH; eval "$(rmqstore completion bash)"; complete -p rmqstore\n'
        f'COMP_WORDS=(rmqstore get {broker} Ord); COMP_CWORD=3; _rmqstore_completion rmqstore; echo "${{COMPREPLY[@]}}"\n'
    )
    ran = subprocess.run(
        ["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=240, check=True
    )
    assert ran.stdout.splitlines() == ["complete -o nosort -F _rmqstore_completion rmqstore", "Orders"], ran.stderr
