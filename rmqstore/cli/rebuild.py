"""rmqstore rebuild and recover: the commands that repair a store.

They replace or delete nothing without a confirmation, on the terminal or by --yes.
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
from rmqstore.cli.group import FOUND_NOTHING, exit_not_found, orderly_end
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
    help="Permanently drop the N queue units and index entries that point outside the commit log; the error names N.",
)


@click.command(name="rebuild")
@path_argument
@click.option(
    "--what", multiple=True, type=click.Choice(["index", "consumequeue"]), help="Structure to rebuild; by default both."
)
@click.option("-O", "--output", type=click.Path(), help="Build in this directory, and do not change the store.")
@click.option(
    "--rocksdb",
    is_flag=True,
    help="Write the consume queues to a RocksDB database, for a broker with storeType=defaultRocksDB, instead of files.",
)
@drop_units_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@store_options
def rebuild_command(
    path: str, what: tuple[str, ...], output: str | None, rocksdb: bool, drop_units: int, yes: bool, given: Given
) -> None:
    """Rebuild the index and the consume queues from the commit log.

    THIS COMMAND WRITES. Stop the broker first. Without --output it replaces index/ and consumequeue/ of the store when
    the new files are complete and checked against the log; the commit log never changes. If it is interrupted, run the
    same command again. Queues in RocksDB are kept under another name. Nothing is replaced if the old files refer to
    missing segments.
    """
    kinds = what or (("consumequeue",) if rocksdb else ("index", "consumequeue"))
    if rocksdb and kinds != ("consumequeue",):
        raise click.UsageError("--rocksdb requires --what consumequeue, and no other --what")
    config = given.config(path)
    if output is None and not rocksdb:
        # Check the options before the confirmation.
        check_config(path, kinds, config, drop_units)
    if output is None and not yes:
        note(f"This replaces {' and '.join(f'{kind}/' for kind in kinds)} in {path} with files built from the commit log.")
        _agree("this replaces files of the store", "give --yes (or --output DIR)")
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
                with contextlib.suppress(OSError):
                    os.rmdir(output)
            note(f"The store was not changed, and nothing was built in {output}.")
        elif os.path.isdir(os.path.join(path, REBUILD_DIRECTORY)):
            note("The new files are complete, but have not replaced the old ones yet: run the same command again to finish.")
        else:
            note("The store was not changed.")
        raise
    except CorruptionError as error:
        exit_not_found(error_text(error))
    _print(report, output or path, given)


def _agree(does: str, otherwise: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(f"{does}, and there is no terminal to confirm it on: {otherwise}")
    if not click.confirm("Continue?", err=True):
        exit_not_found("nothing was changed")


def _print(report: RebuildReport, target: str, given: Given) -> None:
    printer = Printer(given.as_json)
    if given.as_json:
        value = dataclasses.asdict(report)
        value["damage"] = [dict(zip(("phy_offset", "size", "verdict"), each)) for each in report.damage]
        printer.json_line({"type": "rebuild", **value})
    else:
        for offset, size, verdict in report.damage:
            if verdict in ("BAD_BODY_CRC", "BAD_PROP_CRC"):
                # Its lengths are valid, so a broker would dispatch it.
                what = f"the message of {size} bytes at phy offset {offset} is damaged, and keeps its queue offset"
            else:
                what = f"skipped {size} damaged bytes at phy offset {offset}"
            printer.line(f"{what}: {VERDICT_WORDS.get(verdict, verdict)}")
        if report.gone:
            note(f"note: {gone_text(report.gone)}")
        if report.resumed:
            printer.line(f"finished an interrupted rebuild: {' and '.join(report.what)} in {escape(target)}")
        else:
            printer.line(f"rebuilt {' and '.join(report.what)} in {escape(target)}")
            printer.line(
                f"{report.records} records, {report.units} queue units, {report.index_entries} index entries from "
                f"{format_size(report.log_bytes)} of log"
            )
            if printer.terminal:
                printer.line(f"{report.seconds:.2f} s")
        for folder in report.moved_aside:
            printer.line(f"the old queues are kept in {escape(folder)}")
        if report.moved_aside:
            there = queue_databases(target)
            needed = "storeType=defaultRocksDB" if there else "storeType=default"
            if there and os.path.basename(there[0]) == PLACES[1]:
                needed += " and useSeparateStorePathForRocksdbCQ=true"
            printer.line(f"the broker now requires {needed}")
    if report.damage:
        click.get_current_context().exit(FOUND_NOTHING)


@click.command(name="recover")
@path_argument
@click.option(
    "--mode",
    type=click.Choice(RECOVERY_MODES),
    default="strict",
    show_default=True,
    help="If whole records follow damage in the log: fail (strict), truncate the log there as RocketMQ does, which deletes "
    "everything after it, or skip the damage and keep the records after it.",
)
@drop_units_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation before --mode truncate.")
@store_options
def recover_command(path: str, mode: Recovery, drop_units: int, yes: bool, given: Given) -> None:
    """Recover a store after a crash, as a broker does at startup, and shut it down cleanly.

    THIS COMMAND WRITES. Stop the broker first. Incomplete data after the last whole record is cut off; queues and index
    are aligned with the log. With --mode strict a store with damage in the middle of its log is not changed, and the
    messages that --mode truncate would delete are counted.
    """
    refuse_other_log(path, given.overrides().get("unknown", {}))
    check_store_path(path)
    if not os.path.isdir(os.path.join(path, "commitlog")):
        without_log(path)
        raise of_error(StoreError("there is no commit log; restore commitlog/", path))
    config = given.config(path)
    lost: dict[str, Any] | None = None
    try:
        # Without damage all modes are the same; with damage the first error names it.
        first: Recovery = "skip" if mode == "skip" else "strict"
        with MessageStore.open(path, config=config, recovery=first, drop_units=drop_units, reconfigure=True) as store:
            report = store.recovery_report
    except CorruptionError as error:
        place = _place_of(error)
        if mode == "skip" or (mode == "strict" and place is None):
            raise
        if place is None:
            # Opening the store reports the rest.
            text = "--mode truncate deletes no messages."
        else:
            with Progress("counting the messages after the damage", "bytes") as progress:
                lost = messages_behind(path, config, place, progress)
            text = _lost_text(lost)
        if mode == "strict":
            shown = of_error(error)
            shown.hint = f"{shown.hint} {text}".strip()
            raise shown from None
        note(typed(error.what))
        note(text)
        if not yes:
            _agree("--mode truncate deletes these messages", "give --yes")
        with MessageStore.open(path, config=config, recovery=mode, drop_units=drop_units, reconfigure=True) as store:
            report = store.recovery_report
    assert report is not None
    printer = Printer(given.as_json)
    if given.as_json:
        value = {"type": "recovery", "path": path, **report.as_dict(), "mode": mode}
        printer.json_line(value | ({} if lost is None else {"lost": lost}))
    else:
        printer.line(f"last shutdown: {'clean' if report.clean else 'not clean'}")
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
    # The phy offset of damage in the log, or None.
    if error.path is None or error.pos is None or os.path.basename(os.path.dirname(error.path)) != "commitlog":
        return None
    base = offset_of_name(os.path.basename(error.path))
    return None if base is None else base + error.pos


def _lost_text(lost: dict[str, Any]) -> str:
    if not lost["messages"]:
        return f"--mode truncate deletes no whole messages, only {format_size(lost['damaged_size'])} of damaged data."
    topics = [f"{topic} ({number})" for topic, number in lost["topics"].items()]
    rest = f" and {len(topics) - 8} more" if len(topics) > 8 else ""
    return (
        f"--mode truncate deletes {lost['messages']} whole messages, {format_size(lost['size'])}, stored "
        f"{format_time(lost['first_store_timestamp'])} to {format_time(lost['last_store_timestamp'])}, of {', '.join(topics[:8])}"
        f"{rest}; --mode skip keeps them."
    )
