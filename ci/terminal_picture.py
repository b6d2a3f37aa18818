"""Draws what commands answer on the sample store as a picture for README.md: ``terminal_picture.py [FILE.svg]``.

Owns the choice of the commands (`COMMANDS`).  Each runs as a user runs it, in a folder of its own with the sample store
that comes with the package, and what it says is what the picture says; rich draws it.  Times are UTC, and nothing in the
picture is loaded from elsewhere.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
WIDTH = 100
# What is typed, and how many lines of the answer are shown.
COMMANDS = (
    ("rmqstore info store", 6),
    ("rmqstore tail store Orders -n 2 --tags 'paid || shipped'", 4),
    ("rmqstore verify store -o messageDelayLevel='1s 2s 30m 1h'", 1),
)


def answers(folder: Path) -> list[tuple[str, list[str]]]:
    """The commands with the lines that they answer in `folder`."""
    environment = {**os.environ, "TZ": "UTC", "COLUMNS": str(WIDTH), "PYTHONIOENCODING": "utf-8"}

    def run(command: str) -> str:
        line = command.replace("rmqstore", f'"{sys.executable}" -m rmqstore', 1)
        done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, check=True)
        return done.stdout.decode()

    run("rmqstore demo --unpack store")
    return [(command, run(command).splitlines()[:lines]) for command, lines in COMMANDS]


def drawn(shown: list[tuple[str, list[str]]]) -> str:
    """Commands and answers as an SVG."""
    console = Console(
        record=True, file=io.StringIO(), width=WIDTH, color_system="truecolor", force_terminal=True, highlight=False
    )
    for number, (command, lines) in enumerate(shown):
        console.print(Text.assemble("\n" if number else "", ("$ ", "bold green"), (command, "bold")))
        for line in lines:
            console.print(Text(line), no_wrap=True, overflow="ellipsis")
    svg = console.export_svg(title="rmqstore", theme=MONOKAI, unique_id="rmqstore")
    # The fonts would come from another machine; those that are there do.
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    with tempfile.TemporaryDirectory() as scratch:
        target.write_text(drawn(answers(Path(scratch))), encoding="utf-8")
