"""Output to the terminal: tables, JSON lines, notes, progress; and the parameter type for times.

Control and other invisible characters from a store are escaped.  Results go to stdout, notes and progress to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any, Literal, TextIO

import click

from rmqstore.message import json_pieces
from rmqstore.texts import escape, format_size, format_time, parse_time, short_time

__all__ = [
    "BEGIN_HELP",
    "END_HELP",
    "END_TIME",
    "TIME",
    "Printer",
    "Progress",
    "discard",
    "escape",
    "format_number",
    "format_size",
    "format_time",
    "note",
    "parse_time",
]


class _TimeType(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    name = "TIME"

    def __init__(self, *, end: bool = False):
        self.end = end

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_time(value, end=self.end)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TIME = _TimeType()
# A day is its last ms.
END_TIME = _TimeType(end=True)
BEGIN_HELP = "Only messages stored at or after: ISO time, 2026-11-21, 10:30, yesterday, '2h ago', or ms since epoch."
END_HELP = "Only messages stored at or before; a day includes all of it."
# The minimum width of a column of long texts.
_LEAST_WIDTH = 16
# Characters that JSON leaves raw although a terminal may obey or hide them.
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
        """Print a line, which the caller has escaped."""
        sys.stdout.write(text + "\n")

    def line_of(self, pieces: Iterable[str]) -> None:
        """Print a line in pieces, which the caller has escaped."""
        for piece in pieces:
            sys.stdout.write(piece)
        sys.stdout.write("\n")

    def json_line(self, value: dict[str, Any]) -> None:
        """Print a JSON object; a `BodyText` in it is written in pieces."""
        encode = json.JSONEncoder(ensure_ascii=self._ascii, separators=(",", ":")).encode
        escaped = (
            _RAW_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", piece) for piece in json_pieces(value, encode)
        )
        self.line_of(escaped)

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Print names and values, one pair a line."""
        rows = [(name, escape(value)) for name, value in pairs]
        if self.terminal:
            self._print_grid(rows)
            return
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.line(f"{name:<{width}}  {value}".rstrip())

    def time(self, timestamp: int | None, timespec: str = "seconds") -> str:
        """Format ms since epoch: short and local on a terminal, ISO 8601 elsewhere; tables do not wrap it."""
        return _Whole(short_time(timestamp, timespec=timespec) if self.terminal else format_time(timestamp))

    def number(self, number: int) -> str:
        """Format a count, on a terminal with its digits in groups."""
        return format_number(number) if self.terminal else str(number)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        left: int | Container[int] = 1,
        *,
        optional: str | None = None,
    ) -> None:
        """Print a table; columns are aligned right, except the first `left`, or those with these numbers.

        The column `optional`, one of the first `left`, is omitted if all its cells are empty.  On a terminal long texts wrap,
        and if the table is still too wide each row becomes a block of lines.  The digits of an int are grouped there, so that
        offsets, which go into commands, come as text.
        """
        if optional is not None:
            number = columns.index(optional)
            if not any(row[number] for row in rows):
                columns = [*columns[:number], *columns[number + 1 :]]
                rows = [[*row[:number], *row[number + 1 :]] for row in rows]
                left = left - 1 if isinstance(left, int) else left
        if isinstance(left, int):
            left = range(left)
        columns = [escape(column) for column in columns]
        if self.terminal:
            self._fitted_table(title, columns, [[_cell(cell) for cell in row] for row in rows], left)
            return
        cells = [[escape(str(cell)) for cell in row] for row in rows]
        widths = [max([len(column), *(len(row[number]) for row in cells)]) for number, column in enumerate(columns)]
        self.line(f"\n{title}")
        for row in [list(columns), *cells]:
            parts = (
                f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(row, widths))
            )
            self.line(("  " + "  ".join(parts)).rstrip())

    def _fitted_table(self, title: str, columns: Sequence[str], cells: list[list[str]], left: Container[int]) -> None:
        from rich.cells import cell_len
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(file=sys.stdout, highlight=False)
        console.print(Text(f"\n{title}", style="italic"))
        table = Table(box=None, pad_edge=False, header_style="bold")
        least = 2 * (len(columns) - 1)
        for number, column in enumerate(columns):
            whole = number not in left or all(isinstance(row[number], _Whole) for row in cells)
            width = max(cell_len(each) for each in [column, *(row[number] for row in cells)])
            least += width if whole else min(width, _LEAST_WIDTH)
            justify: Literal["left", "right"] = "left" if number in left else "right"
            table.add_column(Text(column), justify=justify, no_wrap=whole, overflow="fold")
        if least > console.width:
            for number, row in enumerate(cells):
                if number:
                    self.line()
                self._print_grid(list(zip(columns, row, strict=True)))
            return
        for row in cells:
            # Text, so that nothing in a store is taken for markup.
            table.add_row(*map(Text, row))
        console.print(table)

    def _print_grid(self, rows: Iterable[tuple[str, str]]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(Text(name), Text(value))
        Console(file=sys.stdout, highlight=False).print(grid)


class _Whole(str):
    """A text that never wraps."""

    __slots__ = ()


def _cell(cell: object) -> str:
    if isinstance(cell, _Whole):
        return cell
    if isinstance(cell, int) and not isinstance(cell, bool):
        return _Whole(format_number(cell))
    return escape(str(cell))


def note(text: str) -> None:
    """Print a line on stderr, after all output so far."""
    sys.stdout.flush()
    try:
        click.echo(escape(text), err=True)
    except BrokenPipeError:
        raise
    except OSError:
        # For example the disk is full; the result and its exit code are right anyway.
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Redirect `stream`, which cannot be written, to /dev/null; the interpreter would otherwise exit with 120."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def format_rate(per_second: float | None, unit: str) -> str:
    """Format a rate; "" if it is unknown."""
    if per_second is None:
        return ""
    if unit == "bytes":
        return f"{format_size(round(per_second))}/s"
    return f"{format_number(round(per_second))} {unit}/s"


def format_number(number: int) -> str:
    """Format a number with its digits in groups of three."""
    return f"{number:,}".replace(",", " ")


class Progress:
    """A progress bar on stderr, if that is a terminal.

    `unit` is the unit of `done` and `total`, and of the rate: "bytes", another word, or "" for no rate.
    """

    def __init__(self, what: str, unit: str = ""):
        self.what = what
        self.unit = unit
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console
            from rich.table import Column
            from rich.text import Text

            unit = self.unit

            class RateColumn(progress.ProgressColumn):
                def render(self, task: Any) -> Text:
                    return Text(format_rate(task.finished_speed or task.speed, unit), no_wrap=True)

            console = Console(file=sys.stderr)
            columns = [
                progress.TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                # On a narrow terminal the bar shrinks, the figures do not.
                progress.BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4, max_width=40)),
                progress.TaskProgressColumn(table_column=Column(no_wrap=True)),
                *([RateColumn(Column(no_wrap=True))] if unit and console.width >= 60 else []),
                progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            ]
            redirect = sys.stdout.isatty()
            self._bar = progress.Progress(
                *columns, console=console, transient=True, redirect_stdout=redirect, redirect_stderr=False, expand=True
            )
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
