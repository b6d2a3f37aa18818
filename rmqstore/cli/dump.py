"""rmqstore dump: the structures on disk, of a store or of a single file.

Unlike `verify` it compares no files.  Damage in the log is a line with its position, and the dump continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from rmqstore._core import IndexLayout
from rmqstore.cli.group import exit_not_found
from rmqstore.cli.messages import about_queues
from rmqstore.cli.options import Given, path_argument, selecting, store_options
from rmqstore.cli.paths import complete_topic
from rmqstore.cli.terminal import Printer, Progress, escape, format_time
from rmqstore.commitlog.log_walk import VERDICT_WORDS, Blank, Damage
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.errors import StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.index.index_file import IndexFile
from rmqstore.message import MessageExt
from rmqstore.offline.single_file import KINDS, StoreFile, identify
from rmqstore.selection import Selection
from rmqstore.store.message_store import MessageStore

_PREVIEW = 60
_UNIT_HEAD = f"{'queue offset':>14}  {'phy offset':>14}  {'size':>9}  {'tags code':>20}  messages"


@click.command()
@path_argument
@click.option(
    "--what", type=click.Choice(["log", "queue", "index"]), help="Part of the store to dump.  [default: log]"
)
@click.option("--begin-phy-offset", type=click.IntRange(min=0), help="Start at this phy offset.")
@click.option("--end-phy-offset", type=click.IntRange(min=0), help="Stop before this phy offset.")
@click.option("--topic", help="Only this topic; required by --what queue.", shell_complete=complete_topic)
@click.option("--queue", "queue_id", type=click.IntRange(min=0), help="Only this queue; requires --topic.")
@store_options
@selecting("begin_phy_offset", "end_phy_offset", "topic", "queue_id")
def dump(path: str, what: str | None, selection: Selection, given: Given) -> None:
    """Print the structures on disk, including damaged ones.

    log: a line for each record, blank and damaged part. queue: the units of a topic's queues. index: the header, entries
    and slots (with chain lengths) of every index file. PATH may also be a single file, anywhere: a segment, a queue file,
    an index file, or the checkpoint.
    """
    if os.path.isfile(path):
        if what is not None or selection.topics is not None or selection.queue_ids is not None:
            raise click.UsageError("--what, --topic and --queue require the path of a store, not of a file")
        _dump_file(Printer(given.as_json), path, selection, given)
        return
    what = what or "log"
    if what == "queue" and selection.topics is None:
        raise click.UsageError("--what queue requires --topic")
    if what == "index" and selection.topics is not None:
        raise click.UsageError("omit --topic: the index contains hashes, and no topics")
    if selection.queue_ids is not None and selection.topics is None:
        raise click.UsageError("--queue requires --topic")
    printer = Printer(given.as_json)
    with given.open(path) as store:
        if what == "log":
            shown = _dump_log(printer, store, selection)
        elif what == "queue":
            shown = _dump_queues(printer, store, selection)
        else:
            shown = _dump_index(printer, store, selection)
        if not shown:
            about = "" if selection.topics is None else about_queues(store, selection.topic, selection.queue_ids or ())
            exit_not_found(f"nothing to dump{about}")


def _dump_progress(what: str, unit: str) -> contextlib.AbstractContextManager[Progress | None]:
    # No bar between the lines on a terminal.
    return contextlib.nullcontext() if sys.stdout.isatty() else Progress(what, unit)


def _dump_log(printer: Printer, store: MessageStore, selection: Selection) -> int:
    begin, end = selection.begin_phy_offset, selection.end_phy_offset
    log = store.commit_log
    first = max(log.min_offset, begin or 0)
    last = log.max_offset if end is None else min(end, log.max_offset)
    # The store stops at damage in its newest segment; more records may follow.
    if end is None or end > log.max_offset:
        last = log.find_end_behind_damage()
        log.set_end(last)
        last = last if end is None else min(end, last)
    # Start at the beginning of a record: the middle of one would look like damage.
    start = first if log.look_up(first) is not None else max(first - first % log.segment_size, log.min_offset)
    return _print_log(printer, log.entries(start, last), selection, start, last)[0]


def _print_log(
    printer: Printer, entries: Iterable[MessageExt | Blank | Damage], selection: Selection, begin: int, end: int
) -> tuple[int, int]:
    """Print the selected entries; return the number of lines, and of those with damage."""
    shown = damaged = 0
    with _dump_progress("dumping the log", "bytes") as progress:
        for number, entry in enumerate(entries):
            if progress is not None and number % 512 == 0:
                progress(entry.phy_offset - begin, max(end - begin, 1))
            if not _is_within(selection, entry.phy_offset, entry.size):
                continue
            if isinstance(entry, MessageExt):
                if not selection.has_queue(entry.topic, entry.queue_id):
                    continue
                damaged += entry.corrupt
            elif selection.topics is not None and isinstance(entry, Blank):
                continue
            shown += 1
            damaged += isinstance(entry, Damage)
            if printer.as_json:
                printer.json_line(_log_object(entry))
            else:
                printer.line(_log_line(entry, printer.time))
    return shown, damaged


def _log_object(entry: MessageExt | Blank | Damage) -> dict[str, Any]:
    if isinstance(entry, MessageExt):
        return {"type": "record", **entry.json_row()}
    if isinstance(entry, Blank):
        return {"type": "blank", "phy_offset": entry.phy_offset, "size": entry.size}
    return {"type": "damage", "phy_offset": entry.phy_offset, "size": entry.size, "verdict": entry.verdict.name}


def _log_line(entry: MessageExt | Blank | Damage, time: Callable[[int, str], str]) -> str:
    if isinstance(entry, Blank):
        return f"{entry.phy_offset:>12}  {entry.size:>7}  BLANK to the end of the segment"
    if isinstance(entry, Damage):
        return f"{entry.phy_offset:>12}  {entry.size:>7}  DAMAGE: {VERDICT_WORDS[entry.verdict.name]}"
    parts = [
        f"{entry.phy_offset:>12}  {entry.size:>7}",
        f"{escape(entry.topic)}/{entry.queue_id} #{entry.queue_offset}",
        time(entry.store_timestamp, "milliseconds"),
        f"keys={escape(' '.join(entry.keys))}" if entry.keys else "",
        f"tags={escape(entry.tags)}" if entry.tags else "",
        f"CORRUPT ({entry.damage})" if entry.corrupt else "",
        _preview(entry),
    ]
    return "  ".join(part for part in parts if part)


def _preview(message: MessageExt) -> str:
    try:
        raw = message.body
    except StoreError:
        return f"({len(message.body_stored)} bytes that cannot be decompressed)"
    text = escape(raw[: 4 * _PREVIEW].decode("utf-8", "backslashreplace"))
    if len(text) <= _PREVIEW and len(raw) <= 4 * _PREVIEW:
        return text
    # Drop an incomplete escape at the end.
    cut = re.sub(r"\\(x[0-9a-f]?|u[0-9a-f]{0,3}|U[0-9a-f]{0,7})?$", "", text[:_PREVIEW])
    return f"{cut}... ({len(raw)} bytes)"


def _queues_of(store: MessageStore, selection: Selection) -> Iterator[AnyConsumeQueue]:
    for queue_id in store.queue_ids(selection.topic):
        chosen = selection.has_queue(selection.topic, queue_id)
        queue = store.queues.find(selection.topic, queue_id) if chosen else None
        if queue is not None:
            yield queue


def _dump_queues(printer: Printer, store: MessageStore, selection: Selection) -> int:
    shown = 0
    for queue in _queues_of(store, selection):
        low, high = queue.bounds(0)
        if not printer.as_json:
            printer.line(f"{escape(queue.topic)}/{queue.queue_id}  {queue.cq_type}  queue offsets {low} to {high}")
            printer.line(_UNIT_HEAD)
        at = low
        while at < high:
            following = at
            for unit in queue.read(at, 4096):
                following = unit.queue_offset + max(unit.num, 1)
                if not _is_within(selection, unit.phy_offset):
                    continue
                shown += 1
                if printer.as_json:
                    printer.json_line(
                        {"type": "unit", "topic": queue.topic, "queue_id": queue.queue_id, **unit._asdict()}
                    )
                else:
                    printer.line(_unit_line(unit.queue_offset, unit.phy_offset, unit.size, unit.tags_code, unit.num))
            # A file is missing, or contains only pre-fill units.
            at = following if following > at else max(queue.next_file_offset(at), at + 1)
    return shown


def _is_within(selection: Selection, phy_offset: int, size: int = 1) -> bool:
    # True if some of the bytes are in the selected part of the log.
    begin, end = selection.begin_phy_offset, selection.end_phy_offset
    return phy_offset + size > (begin or 0) and (end is None or phy_offset < end)


def _unit_line(queue_offset: int | str, phy_offset: int, size: int, tags_code: int, num: int) -> str:
    return f"{queue_offset:>14}  {phy_offset:>14}  {size:>9}  {tags_code:>20}  {num}"


def _dump_index(printer: Printer, store: MessageStore, selection: Selection) -> int:
    if store.index_service is None:
        return 0
    shown = 0
    for name in store.index_service.names:
        _dump_index_file(printer, store.index_service.file(name), selection)
        shown += 1
    return shown


def _dump_index_file(printer: Printer, index: IndexFile, selection: Selection) -> None:
    _dump_index_header(printer, index)
    with _dump_progress(f"dumping {index.name}", "entries") as progress:
        depths = _dump_entries(printer, index, selection, progress)
    longest, used = _dump_slots(printer, index, depths)
    if printer.as_json:
        printer.json_line({"type": "index_chains", "file": index.name, "slots_used": used, "longest_chain": longest})
    else:
        printer.line(f"{used} of {index.slot_num} slots used; the longest chain has {longest} entries")


def _dump_index_header(printer: Printer, index: IndexFile) -> None:
    header = dataclasses.asdict(index.header)
    if printer.as_json:
        printer.json_line(
            {"type": "index_header", "file": index.name, **header, "slots": index.slot_num, "capacity": index.index_num}
        )
        return
    printer.line(f"index file {escape(index.name)}: {index.slot_num} slots, {index.index_num} entries")
    for field, value in header.items():
        printer.line(f"  {field:<18} {value}" + (f"  {format_time(value)}" if field.endswith("timestamp") else ""))


def _dump_entries(
    printer: Printer, index: IndexFile, selection: Selection, progress: Progress | None
) -> array[int]:
    """Print the entries; return the length of the chain from each one down, -1 if it does not decrease."""
    count = min(index.index_count, index.index_num)
    depths = array("i", bytes(4 * max(count, 1)))
    start = index.header.begin_timestamp
    if not printer.as_json:
        printer.line(f"{'entry':>10}  {'slot':>10}  {'hash':>11}  {'phy offset':>14}  {'seconds':>8}  {'previous':>10}")
    for number in range(1, count):
        key_hash, phy_offset, seconds, previous = index.read_entry(number)
        if 0 < previous < number:
            depths[number] = depths[previous] + 1 if depths[previous] > 0 else -1
        else:
            # A chain ends at 0; any other entry that is not older is damage.
            depths[number] = 1 if previous == 0 else -1
        if progress is not None and number % 4096 == 0:
            progress(number, count)
        if not _is_within(selection, phy_offset):
            continue
        slot = key_hash % index.slot_num
        if printer.as_json:
            printer.json_line(
                {
                    "type": "index_entry", "file": index.name, "index": number, "pos": index.entry_pos(number), "slot": slot,
                    "key_hash": key_hash, "phy_offset": phy_offset, "seconds": seconds,
                    "timestamp": start + 1000 * seconds, "previous": previous,
                }
            )  # fmt: skip
        else:
            damage = "  DAMAGE: the previous entry is not older" if depths[number] < 0 else ""
            printer.line(
                f"{number:>10}  {slot:>10}  {key_hash:>11}  {phy_offset:>14}  {seconds:>8}  {previous:>10}{damage}"
            )
    return depths


def _dump_slots(printer: Printer, index: IndexFile, depths: array[int]) -> tuple[int, int]:
    """Print the used slots with their newest entry and chain length; return the longest chain and the number of used slots."""
    longest = used = 0
    if not printer.as_json:
        printer.line(f"{'slot':>10}  {'newest entry':>12}  {'chain':>6}")
    for slot in range(index.slot_num):
        newest = index.read_slot(slot)
        if newest == 0:
            continue
        used += 1
        chain = depths[newest] if 0 < newest < len(depths) else -1
        longest = max(longest, chain)
        if printer.as_json:
            pos = int(IndexLayout.INDEX_HEADER_SIZE) + slot * int(IndexLayout.SLOT_SIZE)
            printer.json_line(
                {"type": "index_slot", "file": index.name, "slot": slot, "pos": pos, "newest": newest, "chain": chain}
            )
        else:
            damage = "  DAMAGE: no such entry" if chain < 0 else ""
            printer.line(f"{slot:>10}  {newest:>12}  {chain:>6}{damage}")
    return longest, used


# ------------------------------------------------------------------------------------------------------- one file alone


def _dump_file(printer: Printer, path: str, selection: Selection, given: Given) -> None:
    """Print the content of a file; exit with the code of findings if it is damaged or empty."""
    file = identify(path)
    if printer.as_json:
        printer.json_line({"type": "file", **dataclasses.asdict(file)})
    else:
        printer.line(f"{escape(path)}: {_file_text(file)}")
    if file.kind == "index":
        with contextlib.closing(file.index_file(given.overrides())) as index:
            _dump_index_file(printer, index, selection)
        return
    if file.kind == "checkpoint":
        fields = Checkpoint.load(path, read_only=True).as_dict()
        if printer.as_json:
            printer.json_line({"type": file.kind, **fields})
        else:
            rows = []
            for name, value in fields.items():
                time = f"  {printer.time(value)}" if value and name.endswith("timestamp") else ""
                rows.append((name, f"{value}{time}"))
            printer.fields(rows)
        return
    damaged = 0
    if file.kind == "segment":
        begin = file.base or 0
        shown, damaged = _print_log(printer, file.records(), selection, begin, begin + file.size)
    else:
        shown = _dump_unit_file(printer, file, selection)
    if damaged:
        exit_not_found(f"{damaged} damaged records or parts")
    if not shown:
        exit_not_found("the file is empty" if selection == Selection() else "the file contains nothing in this range")


def _file_text(file: StoreFile) -> str:
    text = f"{KINDS[file.kind]}, {file.size} bytes"
    if file.topic is not None:
        text += f", of {escape(file.topic)}/{file.queue_id}"
    if file.base is None:
        return text
    first = {"segment": "phy offset", "queue": "queue offset"}.get(file.kind)
    return text if first is None else f"{text}, first {first} {file.base}"


def _dump_unit_file(printer: Printer, file: StoreFile, selection: Selection) -> int:
    shown = 0
    names = {} if file.topic is None else {"topic": file.topic, "queue_id": file.queue_id}
    is_queue = file.kind != "queue_extension"
    if not printer.as_json:
        printer.line(_UNIT_HEAD if is_queue else f"{'address':>20}  {'tags code':>20}  stored")
    for unit in file.units():
        if is_queue and not _is_within(selection, unit["phy_offset"]):
            continue
        shown += 1
        if printer.as_json:
            printer.json_line({"type": "unit" if is_queue else "extension", **names, **unit})
        elif is_queue:
            place = unit.get("queue_offset", f"unit {unit['pos'] // 20}")
            printer.line(_unit_line(place, unit["phy_offset"], unit["size"], unit["tags_code"], unit.get("num", 1)))
        else:
            address = unit.get("address", f"byte {unit['pos']}")
            printer.line(f"{address:>20}  {unit['tags_code']:>20}  {printer.time(unit['store_timestamp'])}")
    return shown
