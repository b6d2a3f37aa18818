"""rmqstore export and import: messages from a store to files, and from files to a store.

An output file appears only when it is complete, and an import that finds a bad row puts exit_not_found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys

import click

from rmqstore.cli.errors import as_usage, of_error
from rmqstore.cli.group import FOUND_NOTHING, orderly_end
from rmqstore.cli.messages import about_topic
from rmqstore.cli.options import (
    Given,
    begin_option,
    check_safe_csv,
    end_option,
    force_option,
    gathered,
    note_assumed,
    path_argument,
    queues_option,
    safe_csv_option,
    selecting,
    store_options,
    tags_option,
    tiered_option,
    topics_option,
)
from rmqstore.cli.terminal import Printer, Progress, escape, format_size, note
from rmqstore.errors import StoreError
from rmqstore.files.output_file import format_of
from rmqstore.message import SCHEDULE_TOPIC
from rmqstore.offline.export import ExportReport, export
from rmqstore.offline.export_files import BODY_FORMS, COMPRESSIONS, CORRUPT_MODES, FORMATS, ExportOptions
from rmqstore.offline.importing import IMPORT_FORMATS, ImportOptions, import_files
from rmqstore.selection import Selection
from rmqstore.store.opening import saved_config

_COMPRESSION_NAMES = sorted({name for names in COMPRESSIONS.values() for name in names})
_OFFSET = click.IntRange(min=0, max=2**63 - 1)


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


@click.command(name="export")
@path_argument
@click.option(
    "-O",
    "--output",
    default="-",
    metavar="FILE",
    help="File to create (with --format files, the folder).  [default: -, standard output]",
)
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="Format; by default that of FILE's extension, or jsonl on standard output.",
)
@topics_option
@queues_option
@tags_option
@click.option("--key", "keys", multiple=True, help="Only messages with this key or unique key; repeatable.")
@begin_option
@end_option
@click.option("--begin-phy-offset", type=_OFFSET, help="Only records that begin at or after this phy offset.")
@click.option("--end-phy-offset", type=_OFFSET, help="Only records that begin before this phy offset.")
@click.option(
    "--begin-queue-offset", type=_OFFSET, help="Only messages at or after this queue offset; requires --topic."
)
@click.option("--end-queue-offset", type=_OFFSET, help="Only messages before this queue offset; requires --topic.")
@click.option("--columns", metavar="A,B", callback=_names, help="Only these columns, in this order; by default all.")
@click.option(
    "--body",
    type=click.Choice(BODY_FORMS),
    help="Format of bodies. text: UTF-8, or base64 if a body is not; raw: bytes, for arrow, parquet and files.",
)
@click.option(
    "--corrupt",
    type=click.Choice(CORRUPT_MODES),
    default="fail",
    show_default=True,
    help="On damage: end the export, export damaged messages with corrupt=true, or skip them.",
)
@click.option(
    "--compress",
    "compression",
    type=click.Choice(_COMPRESSION_NAMES),
    help="Compression; by default that of FILE's extension (.gz, .zst), and zstd for parquet.",
)
@force_option
@safe_csv_option
@tiered_option
@store_options
@gathered(ExportOptions, "options", "format", "columns", "body", "corrupt", "compression", "force", "safe_csv")
@selecting(
    "topics", "queue_ids", "tags", "keys", "begin", "end",
    "begin_phy_offset", "end_phy_offset", "begin_queue_offset", "end_queue_offset",
)  # fmt: skip
def export_command(path: str, output: str, options: ExportOptions, selection: Selection, given: Given) -> None:
    """Export messages as JSON lines, CSV, Arrow, Parquet, or one file per body.

    Messages must match all conditions; they are in the order of the log, with decompressed bodies. FILE appears only when
    it is complete. A broker may be running on the store.
    """
    to_stdout = output == "-"
    format = options.format or ("jsonl" if to_stdout else format_of(output)[0])
    shown = to_stdout and sys.stdout.isatty()
    check_safe_csv(options.safe_csv, format)
    if to_stdout and format == "files":
        raise click.UsageError("--format files creates a folder: give its name with --output")
    if shown and (format in ("arrow", "parquet") or options.compression not in (None, "none")):
        raise click.UsageError("binary output to a terminal: give --output FILE, or redirect it with | or >")
    options = dataclasses.replace(
        options, format=format, shown=shown, only_known_topics=True, config=given.config(path, read_only=True),
        tiered=given.tiered,
    )  # fmt: skip
    # No bar between the lines on a terminal.
    bar = contextlib.nullcontext() if shown else Progress("exporting", "bytes")
    with as_usage(), orderly_end(), bar as progress:
        report = export(path, sys.stdout.buffer if to_stdout else output, selection, options, progress)
    _print_export(report, to_stdout, given)
    if not report.messages:
        _note_near_topics(path, selection.topics or (), given)
        click.get_current_context().exit(FOUND_NOTHING)


def _note_near_topics(path: str, topics: tuple[str, ...], given: Given) -> None:
    if not topics or not os.path.isdir(os.path.join(path, "commitlog")):
        return
    with given.open(path) as store:
        for topic in topics:
            about = about_topic(store, topic)
            if about:
                note(about.removeprefix("; "))


def _print_export(report: ExportReport, to_stdout: bool, given: Given) -> None:
    for text in report.notes:
        note(f"note: tiered storage: {text}")
    if given.as_json and not to_stdout:
        value = dataclasses.asdict(report)
        Printer(True).json_line({"type": "export", **value, "size": _size_of(report.output)})
        return
    if report.damaged_stretches:
        check = " --tiered" if given.tiered else ""
        note(
            f"{report.damaged_stretches} damaged parts of the log were skipped "
            f"({format_size(report.damaged_size)}); rmqstore verify{check} lists them"
        )
    if report.corrupt_records:
        note(
            f"{report.corrupt_records} corrupt messages; the {report.messages} include them only with --corrupt report"
        )
    if not report.messages:
        note("no messages match")
    elif to_stdout:
        note(f"{report.messages} messages")
    else:
        note(f"{report.messages} messages in {report.output} ({format_size(_size_of(report.output))})")


def _size_of(path: str) -> int:
    try:
        if not os.path.isdir(path):
            return os.path.getsize(path)
        return sum(
            os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names
        )  # fmt: skip
    except OSError:
        return 0


@click.command(name="import")
@path_argument
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--format",
    type=click.Choice(IMPORT_FORMATS),
    help="Format of every FILE; by default that of its extension, or of its content.",
)
@click.option("--topic", help="Put all messages into this topic, instead of those in the files.")
@click.option(
    "--queue", "queue_id", type=click.IntRange(min=0, max=2**31 - 1), help="Put all messages into this queue."
)
@click.option("--tags", help="Set the tag of all messages.")
@click.option("--key", "keys", multiple=True, help="Set the keys of all messages; repeatable.")
@click.option(
    "--keep-timestamps", is_flag=True, help="Keep the store times in the files, which must not decrease."
)
@store_options
@gathered(ImportOptions, "options", "format", "topic", "queue_id", "tags", "keys", "keep_timestamps")
def import_command(path: str, files: tuple[str, ...], options: ImportOptions, given: Given) -> None:
    """Append messages from files to a store, which is created if it does not exist.

    THIS COMMAND WRITES. Stop the broker first. FILE is JSON lines, Arrow or Parquet as written by export; - is standard
    input. All files are read and checked before the first message is put.
    """
    printer = Printer(given.as_json)
    if os.path.isdir(os.path.join(path, "commitlog")):
        config = given.config(path)
        note_assumed(
            config, ("max_hash_slot_num", "max_index_num", "mapped_file_size_consume_queue", "message_delay_level")
        )
    else:
        with as_usage():
            config = saved_config(path).replace(**given.overrides())

    options = dataclasses.replace(options, config=config, keys=options.keys or None)

    def on_stop(number: int, place: str) -> None:
        if number:
            note(f"the first {number} messages, up to {place}, were put into the store")

    try:
        with orderly_end(), Progress("importing", "bytes") as progress:
            report = import_files(path, files, options, progress, on_stop)
    except StoreError as error:
        raise of_error(error) from None
    levels_given = given.config_file is not None or "message_delay_level" in given.overrides()
    if report.created and not levels_given and os.path.isdir(os.path.join(path, "consumequeue", SCHEDULE_TOPIC)):
        note(
            f"note: delayed messages are due by the default levels {config.message_delay_level!r}; if the broker has others, "
            "import into a new store with -o message_delay_level=..."
        )
    if given.as_json:
        printer.json_line({"type": "import", **dataclasses.asdict(report)})
    elif not report.messages and not os.path.isdir(os.path.join(path, "commitlog")):
        printer.line(f"the files contain no messages; no store was created in {escape(report.path)}")
    else:
        where = "the new store" if report.created else "the store"
        printer.line(
            f"{report.messages} messages put into {where} {escape(report.path)}, phy offsets {report.first_phy_offset} to "
            f"{report.end_phy_offset}"
        )
    if not report.messages:
        click.get_current_context().exit(FOUND_NOTHING)
