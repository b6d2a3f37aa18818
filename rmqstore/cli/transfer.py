"""rmqstore export and import: messages out of a store into files, and from files into a store.

Owns how a choice of messages and a format are typed, and the words of the reports; the work is
`rmqstore.offline.export`'s and `rmqstore.offline.importing`'s.  Export reads only.  Invariants: an output file is
whole or not there, and an import that finds a bad row has put nothing.
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
# Offsets and times of a store have 64 bits.
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
    help="The file (with --format files the folder) to make; - is standard output, as by default.",
)
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="By default what FILE's ending says, jsonl for standard output.",
)
@topics_option
@queues_option
@tags_option
@click.option("--key", "keys", multiple=True, help="Only messages with this key or unique key; repeatable.")
@begin_option
@end_option
@click.option("--begin-phy-offset", type=_OFFSET, help="Records that begin at or after this phy offset.")
@click.option("--end-phy-offset", type=_OFFSET, help="Records that begin before this phy offset.")
@click.option(
    "--begin-queue-offset", type=_OFFSET, help="Messages at or after this place in their queue; needs --topic."
)
@click.option("--end-queue-offset", type=_OFFSET, help="Messages before this place in their queue; needs --topic.")
@click.option("--columns", metavar="A,B", callback=_names, help="Only these columns, in this order; by default all.")
@click.option(
    "--body",
    type=click.Choice(BODY_FORMS),
    help="How bodies are written. text: base64 where a body is not UTF-8; raw, for arrow, parquet and files: bytes.",
)
@click.option(
    "--corrupt",
    type=click.Choice(CORRUPT_MODES),
    default="fail",
    show_default=True,
    help="What damage does: end the export, be left out, or be written with corrupt=true.",
)
@click.option(
    "--compress",
    "compression",
    type=click.Choice(_COMPRESSION_NAMES),
    help="By default what FILE's ending says (.gz, .zst), zstd for parquet.",
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
    """Write messages to a file: JSON lines, CSV, Arrow, Parquet, or a file for each body.

    All conditions must hold. The messages come in the order of the log, bodies are decompressed. FILE has its name only
    when all is written. The store is only read, and a broker may be running on it.
    """
    to_stdout = output == "-"
    format = options.format or ("jsonl" if to_stdout else format_of(output)[0])
    shown = to_stdout and sys.stdout.isatty()
    check_safe_csv(options.safe_csv, format)
    if to_stdout and format == "files":
        raise click.UsageError("--format files makes a folder: give its name with --output")
    if shown and (format in ("arrow", "parquet") or options.compression not in (None, "none")):
        raise click.UsageError("this is nothing for a terminal: give --output FILE, or send it on with | or >")
    options = dataclasses.replace(
        options, format=format, shown=shown, only_known_topics=True, config=given.config(path, read_only=True),
        tiered=given.tiered,
    )  # fmt: skip
    # A bar would be among the lines.
    bar = contextlib.nullcontext() if shown else Progress("exporting", "bytes")
    with as_usage(), orderly_end(), bar as progress:
        report = export(path, sys.stdout.buffer if to_stdout else output, selection, options, progress)
    _tell_export(report, to_stdout, given)
    if not report.messages:
        _tell_near_topics(path, selection.topics or (), given)
        click.get_current_context().exit(FOUND_NOTHING)


def _tell_near_topics(path: str, topics: tuple[str, ...], given: Given) -> None:
    """Say of each topic that was asked for and is not there which may have been meant."""
    if not topics or not os.path.isdir(os.path.join(path, "commitlog")):
        return
    with given.open(path) as store:
        for topic in topics:
            about = about_topic(store, topic)
            if about:
                note(about.removeprefix("; "))


def _tell_export(report: ExportReport, to_stdout: bool, given: Given) -> None:
    for text in report.notes:
        note(f"note: tiered storage: {text}")
    if given.as_json and not to_stdout:
        value = dataclasses.asdict(report)
        Printer(True).json_line({"type": "export", **value, "size": _size_of(report.output)})
        return
    if report.damaged_stretches:
        check = " --tiered" if given.tiered else ""
        note(
            f"{report.damaged_stretches} damaged stretches were skipped "
            f"({format_size(report.damaged_size)}); rmqstore verify{check} lists them"
        )
    if report.corrupt_records:
        note(
            f"{report.corrupt_records} corrupt messages; they are among the {report.messages} only with --corrupt report"
        )
    if not report.messages:
        note("no message matches")
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
    help="Of every FILE; by default what its ending says, or else its content.",
)
@click.option("--topic", help="The topic of all messages, whatever the files say.")
@click.option("--queue", "queue_id", type=click.IntRange(min=0, max=2**31 - 1), help="The queue of all messages.")
@click.option("--tags", help="The tag of all messages.")
@click.option("--key", "keys", multiple=True, help="The keys of all messages; repeatable.")
@click.option(
    "--keep-timestamps", is_flag=True, help="Take store times from the files, where they must not fall, instead of now."
)
@store_options
@gathered(ImportOptions, "options", "format", "topic", "queue_id", "tags", "keys", "keep_timestamps")
def import_command(path: str, files: tuple[str, ...], options: ImportOptions, given: Given) -> None:
    """Put the messages of files into a store, after those that are there; a new store is made.

    THIS COMMAND WRITES, and no broker may run on the store. FILE is JSON lines, Arrow or Parquet as export writes them; - is
    standard input. Everything is read and checked before the first message is put.
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
            note(f"the first {number} messages, up to {place}, are in the store")

    try:
        with orderly_end(), Progress("importing", "bytes") as progress:
            report = import_files(path, files, options, progress, on_stop)
    except StoreError as error:
        raise of_error(error) from None
    levels_given = given.config_file is not None or "message_delay_level" in given.overrides()
    if report.created and not levels_given and os.path.isdir(os.path.join(path, "consumequeue", SCHEDULE_TOPIC)):
        note(
            f"note: delayed messages were put, and their due times follow the levels {config.message_delay_level!r}, "
            "which nobody gave; if the broker has others, import into a new store with -o message_delay_level=..."
        )
    if given.as_json:
        printer.json_line({"type": "import", **dataclasses.asdict(report)})
    elif not report.messages and not os.path.isdir(os.path.join(path, "commitlog")):
        printer.line(f"0 messages are in the files, and no store was made in {escape(report.path)}")
    else:
        where = "the new store" if report.created else "the store"
        printer.line(
            f"{report.messages} messages put into {where} {escape(report.path)}, phy offsets {report.first_phy_offset} to "
            f"{report.end_phy_offset}"
        )
    if not report.messages:
        click.get_current_context().exit(FOUND_NOTHING)
