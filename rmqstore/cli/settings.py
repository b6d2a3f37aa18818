"""rmqstore settings: a broker's topics, groups, offsets and pop records, from JSON files or RocksDB.  No log is needed."""

from __future__ import annotations

import dataclasses
import os

import click

from rmqstore.cli.errors import typed
from rmqstore.cli.group import FOUND_NOTHING, exit_not_found
from rmqstore.cli.options import json_option, path_argument
from rmqstore.cli.paths import check_store_path
from rmqstore.cli.terminal import Printer, note
from rmqstore.offline.settings import Settings, settings

_KINDS = {"topics": "topics", "subscriptionGroups": "subscription_groups", "consumerOffsets": "consumer_offsets"}
_FORMS = {
    "json": "JSON file",
    "separate": "separate RocksDB",
    "single": "RocksDB for all settings",
    "v2": "RocksDB, configManagerVersion=v2",
    "kvStore": "RocksDB",
}


@click.command(name="settings")
@path_argument
@click.option(
    "--what",
    type=click.Choice([*_KINDS, "popRecords"]),
    help="Only this list.",
)
@json_option
def settings_command(path: str, what: str | None, as_json: bool) -> None:
    """Show a broker's topics, groups, consumer offsets and pop records.

    They are read from the JSON files in config/ or from RocksDB; if there are several, from the one that a broker loads at
    startup. The objects of --json are those of mqadmin rocksDBConfigToJson. The exit code is 1 if some files cannot be
    read; the rest is shown.
    """
    if not any(os.path.isdir(os.path.join(path, name)) for name in ("config", "kvStore")):
        check_store_path(path)
    found = settings(path)
    printer = Printer(as_json)
    if not found.sources:
        exit_not_found("no settings: there are no JSON files and no RocksDB in config/, and there is no kvStore/")
    if as_json:
        _print_json(printer, found, what)
    else:
        _print_tables(printer, found, what)
    for finding in found.findings:
        note(f"{finding.path}: {finding.kind}: {typed(finding.detail)}")
    if found.findings:
        click.get_current_context().exit(FOUND_NOTHING)


def _print_json(printer: Printer, found: Settings, what: str | None) -> None:
    for name in _KINDS:
        if what == name:
            printer.json_line(found.config_json(name))
        elif what is None:
            printer.json_line({"type": name, **found.config_json(name)})
    if what in (None, "popRecords"):
        for record in found.pop_records:
            printer.json_line({"type": "pop_record", **dataclasses.asdict(record)})
    if what is None:
        for source in found.sources:
            printer.json_line(
                {"type": "source", **dataclasses.asdict(source), "reason": found.reasons.get(source.kind)}
            )
        for finding in found.findings:
            printer.json_line({"type": "finding", **dataclasses.asdict(finding)})


def _print_tables(printer: Printer, found: Settings, what: str | None) -> None:
    if what in (None, "topics"):
        _print_topics(printer, found)
    if what in (None, "subscriptionGroups"):
        _print_groups(printer, found)
    if what in (None, "consumerOffsets"):
        for title, table in (("consumer offsets", found.consumer_offsets), ("pull offsets", found.pull_offsets)):
            rows = [
                (group, topic, str(queue_id), str(offset))
                for (group, topic), queues in table.items()
                for queue_id, offset in queues.items()
            ]
            if rows or title == "consumer offsets":
                printer.table(title, ("group", "topic", "queue", "offset"), rows, left=2)
    if found.pop_records and what in (None, "popRecords"):
        printer.table(
            "pop records: delivered, not acknowledged",
            ("group", "topic", "popped", "visible again", "queue", "offset", "retry", "attempts"),
            [
                (
                    each.group, each.topic, printer.time(each.pop_time), printer.time(each.visible_time), str(each.queue_id),
                    str(each.queue_offset), each.retry, each.attempt_times,
                )
                for each in found.pop_records
            ],
            left=4,
        )  # fmt: skip
    kind = None if what is None else _KINDS.get(what, "pop_records")
    sources = [source for source in found.sources if kind in (None, source.kind)]
    printer.table(
        "sources",
        ("settings", "source", "form", "written", "used", "version", "entries"),
        [
            (
                source.kind, source.path, _FORMS[source.form], printer.time(source.timestamp),
                "yes" if source.taken else "no", "" if source.counter is None else str(source.counter), source.entries,
            )
            for source in sources
        ],
        left=5,
    )  # fmt: skip
    for name, reason in found.reasons.items():
        if kind in (None, name):
            note(f"{name}: {reason}")


def _print_topics(printer: Printer, found: Settings) -> None:
    printer.table(
        "topics",
        ("topic", "permissions", "attributes", "order", "read queues", "write queues"),
        [
            (
                name, _permissions(members.get("perm")), _attributes(members.get("attributes")),
                "yes" if members.get("order") is True else "no", members.get("readQueueNums", ""),
                members.get("writeQueueNums", ""),
            )
            for name, members in found.topics.items()
        ],
        left=4,
    )  # fmt: skip


def _print_groups(printer: Printer, found: Settings) -> None:
    printer.table(
        "subscription groups",
        ("group", "consumes", "broadcast", "orderly", "attributes", "forbidden", "retries", "retry queues"),
        [
            (
                name,
                "no" if members.get("consumeEnable") is False else "yes",
                "no" if members.get("consumeBroadcastEnable") is False else "yes",
                "yes" if members.get("consumeMessageOrderly") is True else "no",
                _attributes(members.get("attributes")),
                _attributes(found.forbidden.get(name)),
                members.get("retryMaxTimes", ""),
                members.get("retryQueueNums", ""),
            )
            for name, members in found.subscription_groups.items()
        ],
        left=6,
    )


def _permissions(perm: object) -> str:
    if not isinstance(perm, int):
        return ""
    return "".join(letter if perm & bit else "-" for letter, bit in (("R", 4), ("W", 2), ("X", 1)))


def _attributes(attributes: object) -> str:
    if not isinstance(attributes, dict):
        return ""
    return ", ".join(f"{name}={value}" for name, value in sorted(attributes.items()))
