"""Commands on a terminal: progress with rate and time left, colours, narrow windows; and plain text everywhere else."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import unicodedata

import pytest
from test_cli import DELAYS, environment, on_a_terminal, run, utc  # noqa: F401

from rmqstore.cli.terminal import format_number, format_rate

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

SLOW = """
import time
from rmqstore.cli.terminal import Progress
with Progress("copying", {unit!r}) as progress:
    for done in range(0, 11):
        progress(done * {step}, 10 * {step})
        time.sleep(0.12)
print("done")
"""


def run_on_a_terminal(code, width=100, **extra):
    """All that a program wrote to its terminal, control sequences included."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=child, stdout=child, stderr=child,
        env=environment(TERM="xterm-256color", COLUMNS=str(width), **extra),
    )  # fmt: skip
    os.close(child)
    output = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the other end is closed.
        while select.select([parent], [], [], 60)[0]:
            part = os.read(parent, 65536)
            if not part:
                break
            output += part
    os.close(parent)
    assert process.wait(timeout=240) == 0, output
    return output.decode()


def cells(line):
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


def lines_of(output):
    return re.split(r"[\r\n]+", CONTROL.sub("", output))


def test_progress_shows_percent_rate_and_time_left():
    output = run_on_a_terminal(SLOW.format(unit="bytes", step=1 << 20))
    lines = [line for line in lines_of(output) if line.startswith("copying")]
    assert len(lines) > 3
    assert any(re.search(r" \d+%", line) for line in lines)
    assert any(re.search(r"\d+\.\d [KMG]iB/s", line) for line in lines), lines
    assert any(re.search(r"\d\d:\d\d", line) for line in lines), lines
    # Coloured, and gone at the end.
    assert "\x1b[3" in output and lines_of(output)[-2:] == ["done", ""]


def test_progress_in_other_units_and_in_none():
    lines = lines_of(run_on_a_terminal(SLOW.format(unit="messages", step=5000)))
    assert any(re.search(r"\d+ \d\d\d messages/s", line) for line in lines), lines
    lines = lines_of(run_on_a_terminal(SLOW.format(unit="", step=1)))
    assert any(line.startswith("copying") for line in lines) and not any("/s" in line for line in lines)


def test_progress_fits_the_window():
    # One process for all widths: starting it costs more than what it does.
    widths = (20, 40, 59, 60, 200)
    code = "import os\n" + "".join(
        f"os.environ['COLUMNS'] = '{width}'\nprint('at {width}')\n{SLOW.format(unit='bytes', step=1 << 20)}"
        for width in widths
    )
    _, *parts = re.split(r"(?m)^at (\d+)\r?$", CONTROL.sub("", run_on_a_terminal(code)))
    assert parts[::2] == [str(width) for width in widths]
    for width, part in zip(widths, parts[1::2], strict=True):
        lines = lines_of(part)
        assert any(line.startswith("copying") for line in lines), width
        assert max(map(cells, lines)) <= width, (width, lines)


def test_progress_without_colours():
    output = run_on_a_terminal(SLOW.format(unit="bytes", step=1 << 20), NO_COLOR="1")
    assert "copying" in output and not re.search(r"\x1b\[[0-9;]*3[0-7]m|\x1b\[[0-9;]*38;", output)


def test_progress_is_silent_where_nobody_looks():
    ran = subprocess.run(
        [sys.executable, "-c", SLOW.format(unit="bytes", step=1)], capture_output=True, env=environment(), check=True
    )
    assert (ran.stdout, ran.stderr) == (b"done\n", b"")


def test_an_interrupted_command_clears_its_bar(broker):
    code = SLOW.replace('print("done")', "").replace(
        "time.sleep(0.12)", "time.sleep(0.12)\n        if done == 4: raise KeyboardInterrupt"
    )
    code = "try:\n" + "\n".join("    " + line for line in code.format(unit="bytes", step=7).splitlines())
    output = run_on_a_terminal(code + "\nexcept KeyboardInterrupt:\n    print('ended')\n")
    assert lines_of(output)[-2:] == ["ended", ""]
    # The cursor that was hidden is back.
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") >= 0


def test_rates_and_numbers():
    assert format_rate(None, "bytes") == ""
    assert format_rate(2.5 * 1024**2, "bytes") == "2.5 MiB/s"
    assert format_rate(12345.6, "messages") == "12 346 messages/s"
    assert [format_number(number) for number in (0, 999, 1000, 1234567)] == ["0", "999", "1 000", "1 234 567"]


TABLES = (["info"], ["topics", "--bytes"], ["queues"], ["offsets", "show"], ["verify", *DELAYS])


@pytest.mark.parametrize("width", [40, 80, 132])
def test_tables_fit_the_window(broker, width):
    commands = []
    for arguments in TABLES:
        words = arguments[:2] if arguments[0] == "offsets" else arguments[:1]
        commands.append([*words, str(broker), *arguments[len(words) :]])
    # One process for all commands: starting it costs more than what it does.
    code = (
        "from rmqstore.cli import main\n"
        f"for arguments in {commands!r}:\n"
        "    try:\n"
        "        main(arguments)\n"
        "        code = 0\n"
        "    except SystemExit as end:\n"
        "        code = end.code or 0\n"
        "    print('ended with', code, flush=True)\n"
    )
    parts = lines_of(run_on_a_terminal(code, width))
    answers, begin = [], 0
    for number, line in enumerate(parts):
        if line.startswith("ended with"):
            assert line == "ended with 0"
            answers.append(parts[begin:number])
            begin = number + 1
    assert len(answers) == len(TABLES)
    for arguments, lines in zip(TABLES, answers, strict=True):
        assert any(line.strip() for line in lines), arguments
        assert max(map(cells, lines)) <= width, (arguments, lines)


#: A time as a terminal shows it: of today, of this year, of another.
SHORT = re.compile(r"(?:\d{4}-\d\d-\d\d(?: \d\d:\d\d)?|\d\d-\d\d \d\d:\d\d(?::\d\d)?|\d\d:\d\d:\d\d)(?: |$)")


@pytest.mark.parametrize("command, times", [("topics", 2), ("queues", 2), ("offsets", 0)])
def test_no_time_is_broken_at_80(broker, command, times):
    words = [command, "show"] if command == "offsets" else [command]
    output, code = on_a_terminal(*words, broker, width=80)
    text = CONTROL.sub("", output)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    assert code == 0 and max(map(cells, lines)) <= 80
    values = [json.loads(line) for line in run(*words, broker, "--json").stdout.splitlines()]
    waiting = sum(value.get("waiting_since") is not None for value in values if value["type"] == "group")
    values = [value for value in values if value["type"] in ("topic", "queue", "progress")]
    # A table, whatever the length of one name.
    assert any(line.startswith("group" if command == "offsets" else "topic ") and "  " in line.strip() for line in lines)
    assert sum(len(SHORT.findall(line)) for line in lines) == times * len(values) + waiting
    shown = re.sub(r"\s", "", text)
    assert shown.count("Long_name_of_a_") >= (command != "offsets")


def test_what_no_line_holds_stands_one_below_the_other(broker):
    output, code = on_a_terminal("queues", broker, "Orders", width=40)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", output))]
    assert code == 0 and max(map(cells, lines)) <= 40
    assert sum(line.startswith("topic  ") and line.endswith("Orders") for line in lines) == 4
    assert "messages      2 501" in lines and "max           2501" in lines


def test_help_is_plain_on_a_narrow_terminal():
    for command in ([], ["tail"], ["topics"]):
        output, code = on_a_terminal(*command, "--help", width=60)
        assert code == 0 and "Usage: rmqstore" in output and "\x1b" not in output


@pytest.mark.parametrize("command", ["topics", "queues", "info", "tail"])
def test_piped_output_is_plain(broker, command):
    result = run(command, broker)
    assert result.exit_code == 0 and "\x1b" not in result.output
    assert not [line for line in result.stdout.splitlines() if line != line.rstrip()]
