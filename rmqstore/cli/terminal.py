"""What the command line prints and reads: escaped text, sizes, times, tables, JSON lines, progress.

Owns the look of an answer, never an answer.  Text from a store never reaches the terminal raw: control and other
invisible characters are escaped.  Answers go to stdout; notes and progress go to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Container, Iterable, Sequence
from typing import Any, TextIO

import click

from rmqstore.texts import escape, format_size, format_time, parse_time

__all__ = ["TIME", "Printer", "Progress", "discard", "escape", "format_size", "format_time", "note", "parse_time"]


class _TimeType(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_time(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TIME = _TimeType()
# What JSON leaves raw although a terminal may obey or hide it; inside a JSON string \u.... means the same.
_RAW_IN_JSON = re.compile(
    "[\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


class Printer:
    """Prints answers on stdout: tables and lines for people, or one JSON object a line."""

    def __init__(self, as_json: bool):
        self.as_json = as_json
        self.terminal = not as_json and sys.stdout.isatty()
        self._ascii = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") != "utf8"

    def line(self, text: str = "") -> None:
        """One line, which the caller has escaped."""
        sys.stdout.write(text + "\n")

    def json_line(self, value: dict[str, Any]) -> None:
        """One JSON object."""
        text = json.dumps(value, ensure_ascii=self._ascii, separators=(",", ":"))
        sys.stdout.write(_RAW_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values, one a line."""
        rows = list(pairs)
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            text = f"{name:<{width}}  {escape(value)}".rstrip()
            if self.terminal:
                columns = max(shutil.get_terminal_size().columns, width + 20)
                text = textwrap.fill(text, columns, subsequent_indent=" " * (width + 2), drop_whitespace=False)
            self.line(text)

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], left: int | Container[int] = 1
    ) -> None:
        """A table; all columns but the first `left`, or those of these numbers, hold numbers.

        Sized to a terminal, plain columns elsewhere.
        """
        if isinstance(left, int):
            left = range(left)
        cells = [[escape(str(cell)) for cell in row] for row in rows]
        if self.terminal:
            from rich import box
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text

            shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
            for number, column in enumerate(columns):
                shown.add_column(column, justify="left" if number in left else "right", overflow="fold")
            for row in cells:
                # Text, so that nothing in a store is taken for markup.
                shown.add_row(*(Text(cell) for cell in row))
            Console(file=sys.stdout, highlight=False).print(shown)
            return
        widths = [max([len(column), *(len(row[number]) for row in cells)]) for number, column in enumerate(columns)]
        self.line(f"\n{title}")
        for row in [list(columns), *cells]:
            parts = (
                f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(row, widths))
            )
            self.line(("  " + "  ".join(parts)).rstrip())


def note(text: str) -> None:
    """A line for people on stderr, after all that stdout has got so far."""
    sys.stdout.flush()
    try:
        click.echo(escape(text), err=True)
    except BrokenPipeError:
        raise
    except OSError:
        # Nobody can be told, as where stderr's disk is full.  The answer, and its exit code, are not less right for it.
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Send what `stream` holds, and all that follows, to nowhere: its file takes nothing more.

    Otherwise the interpreter tries once more at its end, fails again, and changes the exit code to 120.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def format_rate(per_second: float | None, unit: str) -> str:
    """str: so many of `unit` a second; "" where it is not known yet."""
    if per_second is None:
        return ""
    if unit == "bytes":
        return f"{format_size(round(per_second))}/s"
    return f"{format_number(round(per_second))} {unit}/s"


def format_number(number: int) -> str:
    """str: `number` for people, its digits in groups of three."""
    return f"{number:,}".replace(",", " ")


class Progress:
    """A bar on stderr, drawn only if that is a terminal; until it is called it shows that something goes on.

    Parameters
    ----------
    what : str
        What is being done.
    unit : str
        What `done` and `total` count: "bytes" shows a rate in sizes a second, another word in that many a second, "" none.
    """

    def __init__(self, what: str, unit: str = ""):
        self.what = what
        self.unit = unit
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.table import Column

            class RateColumn(TextColumn):
                def render(self, task: Task) -> Any:
                    task.fields["rate"] = format_rate(task.finished_speed or task.speed, unit)
                    return super().render(task)

            unit = self.unit
            columns = [
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                # The bar gives way where the terminal is narrow; the figures do not.
                BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4, max_width=40)),
                TaskProgressColumn(table_column=Column(no_wrap=True)),
            ]
            if unit and Console(file=sys.stderr).width >= 60:
                columns.append(RateColumn("{task.fields[rate]}", table_column=Column(no_wrap=True)))
            # Time left while it is at work, time taken where that is not known yet.
            columns.append(TimeRemainingColumn(compact=True, elapsed_when_finished=True))
            self._bar = Progress(
                *columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=False, expand=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=None, rate="")
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """So much of `total` is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
