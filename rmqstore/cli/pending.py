"""rmqstore pending: the messages of a store that wait for a time, a commit, a retry or an operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import click

from rmqstore.cli.group import FOUND_NOTHING, exit_not_found, orderly_end
from rmqstore.cli.messages import about_topic
from rmqstore.cli.options import Given, TableFile, gathered, path_argument, store_options, table_file_options
from rmqstore.cli.terminal import TIME, Printer, format_number, format_size, note
from rmqstore.files.output_file import OutputFile
from rmqstore.offline.pending import KINDS, Pending, pending

_TEXT_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The messages to list, and the time before which they are overdue."""

    kinds: tuple[str, ...]
    topic: str | None
    overdue: bool
    now: int | None
    max_num: int


@click.command(name="pending")
@path_argument
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only this kind; repeatable.")
@click.option("--topic", help="Only messages to or from this topic.")
@click.option("--overdue", is_flag=True, help="Only messages that were due before now.")
@click.option("--now", type=TIME, help="Time to use as now, instead of the clock's.")
@click.option(
    "--max-num", type=click.IntRange(0), default=50, show_default=True, help="Maximum number of messages; 0 for totals only."
)
@table_file_options("Write all messages to this .parquet, .arrow, .csv or .jsonl file.")
@store_options
@gathered(_Asked, "asked")
def pending_command(path: str, asked: _Asked, file: TableFile, given: Given) -> None:
    """List pending messages: delayed, timer, transactions, retries, dead letters.

    Works on the store of a running or killed broker. The exit code is 1 if nothing is pending, or if some files could not
    be read, which are named on stderr.
    """
    kind, made = file.kind(), file.make(path)
    with given.open(path) as store:
        found = pending(store, kinds=asked.kinds or None, topic=asked.topic, now=asked.now)
        about = "" if asked.topic is None or len(found) else about_topic(store, asked.topic)
    if asked.overdue:
        import pyarrow.compute as pc

        rows = found.unordered
        found.unordered = rows.filter(pc.fill_null(rows.column("overdue"), False))
    if made is not None and kind is not None:
        size = _write(found, made, kind, file)
        note(f"wrote {format_number(len(found))} messages to {file.output} ({format_size(size)})")
    else:
        _show(found, Printer(given.as_json), asked.max_num)
    for text in found.notes:
        note(f"note: {text}")
    for problem in found.problems:
        note(f"unreadable or damaged: {problem}")
    if found.problems:
        click.get_current_context().exit(FOUND_NOTHING)
    if not len(found):
        exit_not_found(f"no messages are pending{about}")


def _show(found: Pending, printer: Printer, max_num: int) -> None:
    if printer.as_json:
        for message in found:
            printer.json_line({"type": "pending", **message.as_dict()})
        for total in found.totals:
            printer.json_line({"type": "total", **total.as_dict()})
        for source in found.sources:
            printer.json_line({"type": "source", **vars(source)})
        for problem in found.problems:
            printer.json_line({"type": "problem", "path": problem.path, "pos": problem.pos, "text": problem.text})
        for text in found.notes:
            printer.json_line({"type": "note", "text": text})
        return
    if len(found):
        printer.table(
            "pending",
            ("kind", "topic", "oldest", "first due", "last due", "messages", "overdue"),
            [
                (
                    total.kind,
                    total.topic if total.topic is not None else "-",
                    printer.time(total.first_born_timestamp),
                    printer.time(total.first_due),
                    printer.time(total.last_due),
                    total.messages,
                    total.overdue,
                )
                for total in found.totals
            ],
            left=5,
        )
    if len(found) and max_num:
        _show_messages(found, printer, max_num)
    if found.sources:
        printer.table(
            "sources",
            ("kind", "source", "read from", "pending", "delivered", "recalled"),
            [
                (each.kind, each.name, each.begin, each.pending, each.came_out, each.recalled)
                for each in found.sources
            ],
            left=3,
        )


def _show_messages(found: Pending, printer: Printer, max_num: int) -> None:
    rows: list[tuple[object, ...]] = []
    for message in found:
        if len(rows) == max_num:
            break
        extra = [f"level {message.level}"] if message.level is not None else []
        if message.kind == "transaction":
            extra.append(_checks_text(message.check_times))
        if message.group is not None:
            extra.append(message.group)
        if message.overdue:
            extra.append("overdue")
        rows.append(
            (
                message.kind,
                "-" if message.topic is None else message.topic,
                _short(" ".join(message.keys) or message.unique_key or "-"),
                printer.time(message.born_timestamp),
                printer.time(message.due),
                " ".join(extra) or "-",
                str(message.queue_offset),
                str(message.phy_offset),
            )
        )
    printer.table(
        "messages",
        ("kind", "topic", "keys", "born", "due", "details", "queue offset", "phy offset"),
        rows,
        left=6,
    )
    if len(found) > max_num:
        note(f"there are {format_number(len(found))} messages; give --max-num, --json or -O FILE for more")


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}..."


def _write(found: Pending, made: OutputFile, kind: str, table: TableFile) -> int:
    with orderly_end(), made as file:
        if kind == "parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(found.table, file)
        elif kind == "arrow":
            import pyarrow.ipc

            with pyarrow.ipc.new_file(file, found.table.schema) as writer:
                writer.write_table(found.table)
        else:
            rows: Iterable[list[Any]] = ([*message.as_dict().values()] for message in found)
            if kind == "csv":
                rows = ([" ".join(each) if isinstance(each, list) else each for each in row] for row in rows)
            table.write_rows(file, kind, found.table.column_names, rows)
        return file.tell()


def _checks_text(times: int | None) -> str:
    if times is None:
        return "checks unknown"
    return "checked once" if times == 1 else f"checked {times} times"
