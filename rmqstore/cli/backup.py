"""rmqstore backup: a copy of a store that is in use."""

from __future__ import annotations

import dataclasses

import click

from rmqstore.cli.options import Given, path_argument, store_options
from rmqstore.cli.terminal import Printer, escape
from rmqstore.store.backup import back_up
from rmqstore.texts import format_size


@click.command(name="backup")
@path_argument
@click.argument("folder", type=click.Path())
@store_options
def backup_command(path: str, folder: str, given: Given) -> None:
    """Back up a store into a folder, also while a broker or a program writes to it.

    FOLDER is new, empty or an earlier backup, which is brought up to date. It is a store itself: open it, or a copy of it, to
    restore. Full files are hard links to those of the store if both are in one file system.
    """
    printer = Printer(given.as_json)
    report = back_up(path, folder, given.config(path, read_only=True))
    if given.as_json:
        printer.json_line(dataclasses.asdict(report))
        return
    files = [f"{report.linked} linked", f"{report.copied} copied ({format_size(report.copied_size)})"]
    files += [f"{number} {what}" for number, what in ((report.kept, "unchanged"), (report.removed, "removed")) if number]
    printer.line(f"{escape(report.path)}: files: {', '.join(files)}; the log up to phy offset {report.max_offset}")
