"""The examples in every command's ``--help``: there are some for each, and every line of them runs on a real store."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys

import click
import golden
import golden_rabbitmq
import pytest
from test_cli import DOCUMENT, IN_THIS_PROCESS, environment, run, utc  # noqa: F401

from rmqstore.cli import main
from rmqstore.cli.group import EXAMPLES


def commands(group=main, words=()):
    """Every command by the words that lead to it; groups among them."""
    context = click.Context(group, info_name=" ".join(["rmqstore", *words]))
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*words, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))


COMMANDS = {" ".join(words): command for words, command in commands()}


def shown(command):
    """The lines under ``Examples:`` in the help of a command."""
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    section = re.search(r"\n  Examples:\n((?:    .*\n)+)", result.stdout)
    assert section is not None, f"the help of {command} has no examples: add them to rmqstore/cli/group.py"
    return [line.strip() for line in section[1].splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_ends_with_examples_of_the_command(command):
    lines = shown(command)
    assert all(f"rmqstore {command}" in line for line in lines), lines
    assert max(map(len, lines)) <= 132


def test_there_are_no_examples_of_commands_that_are_not():
    assert EXAMPLES.keys() <= COMMANDS.keys()


def lines_to_run():
    for command in COMMANDS:
        for line in EXAMPLES.get(command, ()):
            yield pytest.param(line, id=line.replace("/", "|"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with ``store``, ``vhost`` and the programs that examples name, and the store's bounds; made again for writers."""
    root = tmp_path_factory.mktemp("examples")
    golden.unpack("sample", root)
    golden_rabbitmq.unpack("02-kill9-segment-plus-journal", root / "unpacked").rename(root / "vhost")
    return root


@pytest.mark.parametrize("line", list(lines_to_run()))
def test_every_example_runs(line, place, tmp_path, monkeypatch):
    for name in ("store", "vhost"):
        shutil.copytree(place / name, tmp_path / name)
    # A demo of a million messages is a test of its own.
    words = shlex.split(line)
    if words == ["rmqstore", "demo"]:
        line += " --messages 2000"
    elif words[:2] == ["rmqstore", "demo"] and "--unpack" not in words:
        line = f"rmqstore demo --messages 2000 --dir {tmp_path}"
    endless = "-f" in words or words[1] == "serve"
    each = line.split(" && ")
    if not endless and not any(re.search(r"^(?!rmqstore )|[|;&><$]", part.replace("||", "")) for part in each):
        # In this process, which is quicker.
        monkeypatch.chdir(tmp_path)
        for part in each:
            result = run(*shlex.split(part)[1:])
            assert result.exit_code == 0 and "Error" not in result.stderr, result.output
        # It says something, or makes a file.
        assert result.output or len(list(tmp_path.iterdir())) > 2
        return
    parts = IN_THIS_PROCESS.fullmatch(line)
    if not endless and "| head" not in line and parts and parts["filter"] and not parts["errors"]:
        # Only what is filtered, and the filter, which does not leave before the end.
        monkeypatch.chdir(tmp_path)
        result = run(*shlex.split(parts["command"])[1:])
        assert result.exit_code == 0 and "Error" not in result.stderr, result.output
        filtered = subprocess.run(
            ["bash", "-c", f"set -o pipefail\npython3() {{ '{sys.executable}' \"$@\"; }}\n{parts['filter']}"],
            input=result.stdout, capture_output=True, text=True, env=environment(), timeout=120, check=True,
        )  # fmt: skip
        assert filtered.stdout and not filtered.stderr
        return
    functions = f'rmqstore() {{ "{sys.executable}" -m rmqstore "$@"; }}\npython3() {{ "{sys.executable}" "$@"; }}\n'
    if endless:
        # The shell gives its place to the program, which then gets the signal.
        functions, line = "", f'exec "{sys.executable}" -m ' + line
    process = subprocess.Popen(
        ["bash", "-c", f"set -o pipefail\n{functions}{line}"], cwd=tmp_path, env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    first = ""
    try:
        if endless:
            first = process.stdout.readline()
            assert first.strip()
            process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
        output = first + output
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in errors and "Usage:" not in errors and "Error" not in errors, errors
    # Every example finds what it looks for.
    # `head` may be gone before the program has written all.
    codes = (0, 130) if endless else (0, 141) if "| head" in line else (0,)
    assert process.returncode in codes, (process.returncode, errors)
    assert output or errors or words[0] == "eval", "it said nothing"
