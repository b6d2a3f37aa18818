"""rmqstore rebuild and recover: the commands that repair a store.

Owns the questions before something is replaced or deleted, and the words of what was done; the work is
`rmqstore.offline.rebuild`'s and the store's own recovery.  Invariant: nothing is replaced or deleted before the user
has agreed, by an answer or by --yes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from typing import Any

import click

from rmqstore.arguments import Recovery
from rmqstore.cli.errors import error_text, of_error, typed
from rmqstore.cli.group import FOUND_NOTHING, nothing, orderly_end
from rmqstore.cli.options import Given, path_argument, store_options
from rmqstore.cli.paths import check_store_path
from rmqstore.cli.terminal import Printer, Progress, escape, format_size, format_time, note
from rmqstore.commitlog.log_walk import VERDICT_WORDS
from rmqstore.config.places import refuse_other_log, without_log
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.mapped_file import offset_of_name
from rmqstore.offline.rebuild import REBUILD_DIRECTORY, RebuildReport, check_config, rebuild
from rmqstore.offline.rebuild_queue_database import rebuild_queue_database
from rmqstore.offline.timeline import messages_behind
from rmqstore.rocksdb.database import PLACES, queue_databases
from rmqstore.store.dispatch_rules import gone_text
from rmqstore.store.message_store import MessageStore
from rmqstore.store.recovery import RECOVERY_MODES

drop_units_option = click.option(
    "--drop-units",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Drop for good the N queue units and index entries that lead outside the commit log; the refusal says how many.",
)


@click.command(name="rebuild")
@path_argument
@click.option(
    "--what", multiple=True, type=click.Choice(["index", "consumequeue"]), help="What to rebuild; by default both."
)
@click.option("-O", "--output", type=click.Path(), help="Build into this directory and leave the store as it is.")
@click.option(
    "--rocksdb",
    is_flag=True,
    help="Make the consume queues a RocksDB database, for a broker with storeType=defaultRocksDB, instead of files.",
)
@drop_units_option
@click.option("--yes", is_flag=True, help="Replace without asking.")
@store_options
def rebuild_command(
    path: str, what: tuple[str, ...], output: str | None, rocksdb: bool, drop_units: int, yes: bool, given: Given
) -> None:
    """Rebuild index and consume queues from the commit log.

    THIS COMMAND WRITES. Without --output it replaces index/ and consumequeue/ of the store, after the new files are
    complete and checked against the log; the commit log is never touched and the broker must not run. An interrupted
    rebuild leaves the store as it was: run it again. Queues in RocksDB are kept under another name. Where segments are
    missing that the old files lead to, nothing is replaced.
    """
    kinds = what or (("consumequeue",) if rocksdb else ("index", "consumequeue"))
    if rocksdb and kinds != ("consumequeue",):
        raise click.UsageError("--rocksdb is for --what consumequeue alone")
    config = given.config(path)
    if output is None and not rocksdb:
        # Who is asked has then nothing left to give.
        check_config(path, kinds, config, drop_units)
    if output is None and not yes:
        replaced = f"{' and '.join(kinds)} of {path} will be replaced by what the commit log says."
        _agree("this replaces files of the store", "give --yes (or --output DIR)", replaced)
    is_new = output is not None and not os.path.lexists(output)
    try:
        with orderly_end(), Progress("rebuilding", "bytes") as progress:
            if rocksdb:
                report = rebuild_queue_database(path, config, output, progress, drop_units=drop_units)
            else:
                report = rebuild(path, kinds, config, output, progress, drop_units=drop_units)
    except (KeyboardInterrupt, SystemExit):
        if output is not None:
            if is_new:
                # It was made for what is not built.
                with contextlib.suppress(OSError):
                    os.rmdir(output)
            note(f"The store is as it was, and nothing was built in {output}.")
        elif os.path.isdir(os.path.join(path, REBUILD_DIRECTORY)):
            note(
                "The new files are complete, their exchange with the old ones is not: run the same command again, which ends it."
            )
        else:
            note("The store is as it was.")
        raise
    except CorruptionError as error:
        nothing(error_text(error))
    _print(report, output or path, given)


def _agree(does: str, otherwise: str, what: str = "") -> None:
    # Ask on the terminal; a No ends the command.
    if not sys.stdin.isatty():
        raise click.UsageError(f"{does}; without a terminal to ask on {otherwise}")
    if what:
        note(what)
    if not click.confirm("Go on?", err=True):
        nothing("nothing was changed")


def _print(report: RebuildReport, target: str, given: Given) -> None:
    printer = Printer(given.as_json)
    if given.as_json:
        value = dataclasses.asdict(report)
        value["damage"] = [dict(zip(("phy_offset", "size", "verdict"), each)) for each in report.damage]
        printer.json_line({"type": "rebuild", **value})
    else:
        for offset, size, verdict in report.damage:
            if verdict in ("BAD_BODY_CRC", "BAD_PROP_CRC"):
                # Its lengths are whole, so it keeps its place, as the broker's own dispatch gives it.
                what = f"the message of {size} bytes at phy offset {offset} is damaged and keeps its place"
            else:
                what = f"nothing was built of {size} bytes at phy offset {offset}"
            printer.line(f"{what}: {VERDICT_WORDS.get(verdict, verdict)}")
        if report.gone:
            note(f"note: {gone_text(report.gone)}")
        if report.resumed:
            printer.line(f"finished the swap of an earlier rebuild: {' and '.join(report.what)} in {escape(target)}")
        else:
            printer.line(f"rebuilt {' and '.join(report.what)} in {escape(target)}")
            printer.line(
                f"{report.records} records, {report.units} queue units, {report.index_entries} index entries from "
                f"{format_size(report.log_bytes)} of log"
            )
            if printer.terminal:
                printer.line(f"{report.seconds:.2f} s")
        for folder in report.moved_aside:
            printer.line(f"what held the queues is kept in {escape(folder)}")
        if report.moved_aside:
            # A rebuild of files moves nothing else aside than a database.
            there = queue_databases(target)
            needed = "storeType=defaultRocksDB" if there else "storeType=default"
            if there and os.path.basename(there[0]) == PLACES[1]:
                needed += " and useSeparateStorePathForRocksdbCQ=true"
            printer.line(f"the broker needs {needed} now")
    if report.damage:
        click.get_current_context().exit(FOUND_NOTHING)


@click.command(name="recover")
@path_argument
@click.option(
    "--mode",
    type=click.Choice(RECOVERY_MODES),
    default="strict",
    show_default=True,
    help="Where the log is damaged in front of whole records: refuse; cut it there as RocketMQ does, which deletes "
    "everything after it; or keep what is whole on both sides.",
)
@drop_units_option
@click.option("--yes", is_flag=True, help="Do not ask before --mode truncate deletes.")
@store_options
def recover_command(path: str, mode: Recovery, drop_units: int, yes: bool, given: Given) -> None:
    """Do what a start after a crash does, say what it was, and close the store in order.

    THIS COMMAND WRITES. The log is judged first; with --mode strict a store with damage in the middle of its log is
    left exactly as it is, and what --mode truncate would delete is counted. What a crash left torn after the last whole
    record is cut; queues and index are brought into line with the log. The broker must not run.
    """
    refuse_other_log(path, given.overrides().get("unknown", {}))
    check_store_path(path)
    if not os.path.isdir(os.path.join(path, "commitlog")):
        without_log(path)
        raise of_error(StoreError("there is no commit log here, which recovery begins with; put commitlog/ back", path))
    config = given.config(path)
    lost: dict[str, Any] | None = None
    try:
        # Where nothing is to be cut or passed over, every mode does the same: only the first refusal says what is at stake.
        first: Recovery = "skip" if mode == "skip" else "strict"
        with MessageStore.open(path, config=config, recovery=first, drop_units=drop_units) as store:
            report = store.recovery_report
    except CorruptionError as error:
        place = _place_of(error)
        if mode == "skip" or (mode == "strict" and place is None):
            raise
        if place is None:
            # Opening it says what else is wrong.
            text = "--mode truncate deletes no message that the log has."
        else:
            with Progress("counting what a cut deletes", "bytes") as progress:
                lost = messages_behind(path, config, place, progress)
            text = _lost_text(lost)
        if mode == "strict":
            told = of_error(error)
            told.hint = f"{told.hint} {text}".strip()
            raise told from None
        note(typed(error.what))
        note(text)
        if not yes:
            _agree("--mode truncate deletes that", "give --yes")
        with MessageStore.open(path, config=config, recovery=mode, drop_units=drop_units) as store:
            report = store.recovery_report
    assert report is not None
    printer = Printer(given.as_json)
    if given.as_json:
        value = {"type": "recovery", "path": path, **report.as_dict(), "mode": mode}
        printer.json_line(value | ({} if lost is None else {"lost": lost}))
    else:
        printer.line(f"{'closed in order' if report.clean else 'not closed in order'} before")
        printer.line(f"scanned      {report.records} records, phy offsets {report.began_at} to {report.end}")
        printer.line(f"cut          {format_size(report.bytes_cut)}, {report.segments_deleted} segments of the log")
        printer.line(
            f"queues       {report.units_cut} units cut, {report.units_written} written, {report.units_mended} repaired"
        )
        printer.line(f"index        {report.index_entries_cut} entries cut, {report.index_entries_written} written")
        if report.gone:
            note(f"note: {gone_text(report.gone)}")
        for offset, size, verdict in report.damage:
            printer.line(f"left damaged {size} bytes at phy offset {offset}: {VERDICT_WORDS.get(verdict, verdict)}")
        if printer.terminal:
            printer.line(f"{report.seconds:.2f} s")
    if report.damage:
        click.get_current_context().exit(FOUND_NOTHING)


def _place_of(error: CorruptionError) -> int | None:
    # The phy offset at which a log was found damaged; None if the error is about something else.
    if error.path is None or error.pos is None or os.path.basename(os.path.dirname(error.path)) != "commitlog":
        return None
    base = offset_of_name(os.path.basename(error.path))
    return None if base is None else base + error.pos


def _lost_text(lost: dict[str, Any]) -> str:
    if not lost["messages"]:
        return f"--mode truncate deletes no whole message, and {format_size(lost['damaged_size'])} that are none."
    topics = [f"{topic} ({number})" for topic, number in lost["topics"].items()]
    rest = f" and {len(topics) - 8} more" if len(topics) > 8 else ""
    return (
        f"--mode truncate deletes {lost['messages']} whole messages, {format_size(lost['size'])}, stored "
        f"{format_time(lost['first_store_timestamp'])} to {format_time(lost['last_store_timestamp'])}, of {', '.join(topics[:8])}"
        f"{rest}; --mode skip keeps them."
    )
