"""The command line of RabbitMQ's classic queues: ``rmqstore rabbitmq …``.

Owns options, printing and exit codes, which are those of `rmqstore.cli`; every answer comes from the functions of
`rmqstore.rabbitmq`.  It stands beside the command line because the two sides of the package meet only there.  ``import`` writes
into a queue, ``repair`` and ``export`` write a new directory or file; everything else only reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO

import click

from rmqstore.cli.errors import CannotOpenError, did_you_mean
from rmqstore.cli.group import FOUND_NOTHING, StoreGroup, nothing, orderly_end
from rmqstore.cli.options import force_option, gathered, json_option, optioned
from rmqstore.cli.paths import STORE_PATH, check_vhost_path
from rmqstore.cli.terminal import Printer, Progress, escape, format_size, format_time, note
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.rabbitmq import (
    Consequence,
    Finding,
    FoundMessage,
    LostMessage,
    Problem,
    Queue,
    QueuedMessage,
    Vhost,
    file_messages,
    find_vhosts,
    node_process,
    repair,
    unreferenced_messages,
    verify,
)
from rmqstore.rabbitmq.importing import import_messages
from rmqstore.rabbitmq.node import store_path, unread_parts
from rmqstore.rabbitmq.problem import UNREAD_FORMAT, UNREADABLE, unreadable_file
from rmqstore.rabbitmq.transfer import FORMATS, export, found_object, message_object, object_message
from rmqstore.rabbitmq.unreferenced import count_unreferenced, is_message_file

__all__ = ["main"]

_BODY_SHOWN = 60
# Of the messages of an answer that are lost so many are named, unless the answer is JSON.
_LOST_SHOWN = 20
# The number of unread parts of a node that are named, unless the answer is JSON.
_UNREAD_SHOWN = 20


def _path(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("path", type=STORE_PATH)(function)


@dataclasses.dataclass(frozen=True)
class _Given:
    """The options that every command has."""

    segment_entry_count: int | None
    as_json: bool

    def vhosts(self, path: str) -> Iterator[Vhost]:
        """Yield the vhosts below `path`, each open while it is used."""
        check_vhost_path(path)
        _note_running(path)
        _note_unread(path)
        for each in find_vhosts(path):
            with Vhost.open(each, segment_entry_count=self.segment_entry_count) as vhost:
                yield vhost

    def vhost(self, path: str, name: str | None) -> Vhost:
        """Open the only vhost below `path`, or the one of this name."""
        check_vhost_path(path)
        found = [Vhost.open(each, segment_entry_count=self.segment_entry_count) for each in find_vhosts(path)]
        matching = [vhost for vhost in found if name is None or vhost.name == name]
        for vhost in found:
            if len(matching) != 1 or vhost is not matching[0]:
                vhost.close()
        if not matching:
            near = did_you_mean(name or "", (vhost.name for vhost in found))
            raise CannotOpenError(
                f"there is no vhost {name!r} here" + (f": {near}" if near else ""),
                f"There are: {', '.join(escape(repr(v.name)) for v in found)}",
            )
        if len(matching) > 1:
            raise CannotOpenError(
                f"there are {len(matching)} vhosts here: say which",
                "--vhost NAME, one of: " + ", ".join(escape(repr(vhost.name)) for vhost in matching),
            )
        return matching[0]


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every command has; it gets them as one argument `given`."""
    return optioned(
        gathered(_Given, "given")(function),
        click.option(
            "--segment-entry-count",
            type=click.IntRange(1, 16384),
            help="Entries a segment, where .config is wrong; by default it says so, or the segments show it.",
        ),
        json_option,
    )


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Which messages: of these queues of a vhost, or those that no index has."""

    queue_names: tuple[str, ...]
    vhost_name: str | None
    unreferenced: bool

    def check(self, path: str) -> None:
        """Raise UsageError where queues are given for messages that are of none."""
        if (self.unreferenced or is_message_file(path)) and self.queue_names:
            raise click.UsageError("messages without an index are of no queue: give no --queue")


def _note_running(path: str) -> None:
    pid = node_process(path)
    if pid is not None:
        note(f"process {pid} has files of this directory open: what is shown may be half-written; stop the node first")


def _note_unread(path: str) -> None:
    """Name what a node's data directory holds besides classic queues: no answer of these commands covers it."""
    if not os.path.isdir(path):
        return
    parts = unread_parts(path)
    for part in parts[:_UNREAD_SHOWN]:
        note(f"{part.path}: {part.sentence}")
    if len(parts) > _UNREAD_SHOWN:
        note(f"and {len(parts) - _UNREAD_SHOWN} more that are not read: rmqstore rabbitmq info --json lists them")


_unreferenced_option = click.option(
    "--unreferenced",
    is_flag=True,
    help="Only the whole messages that no index has: acknowledged, or their index is lost.",
)


def _queue(vhost: Vhost, name: str) -> Queue:
    """Queue: the one of this name; the error says which name is near."""
    try:
        return vhost.queue(name)
    except StoreError as error:
        near = did_you_mean(name, (queue.name for queue in vhost.queues()))
        raise StoreError(f"{error.message}: {near}" if near else error.message, error.path) from None


_vhost_option = click.option("--vhost", "vhost_name", help="Which vhost, where PATH has more than one.")


@click.group(cls=StoreGroup, name="rabbitmq")
def main() -> None:
    """Look into RabbitMQ's classic queues on disk, repair them, and carry messages out and in.

    PATH is a vhost's directory (<data>/msg_stores/vhosts/<hash>) or the node's data directory. Stop the node first.
    """


# ----------------------------------------------------------------------------------------------------------- describing


def _store_object(vhost: Vhost, persistent: bool) -> dict[str, Any] | None:
    error = vhost.open_store(persistent)
    if error is not None:
        return {"unreadable": str(error)}
    store = vhost.store(persistent)
    if store is None:
        return None
    return {
        "files": len(store.files),
        "size": store.file_size,
        "valid_size": store.valid_size,
        "clean": store.clean,
    }


def _info_object(vhost: Vhost) -> dict[str, Any]:
    queues = vhost.queues()
    return {
        "type": "vhost",
        "name": vhost.name,
        "path": vhost.path,
        "layout": "pre-3.7" if vhost.is_pre_3_7 else "3.7",
        "clean": vhost.clean,
        "segment_entry_count": vhost.segment_entry_count,
        "segment_entry_count_source": vhost.segment_entry_count_source,
        "queues": len(queues),
        "declared": None
        if vhost.definitions is None
        else sum(definition.vhost == vhost.name for definition in vhost.definitions.values()),
        "messages": sum(queue.depth for queue in queues),
        "unreferenced": None if vhost.open_store(True) is not None else count_unreferenced(vhost)[0],
        "persistent_store": _store_object(vhost, True),
        "transient_store": _store_object(vhost, False),
    }


@main.command()
@_path
@_options
def info(path: str, given: _Given) -> None:
    """Say what a vhost, or each vhost of a node, has on disk.

    Files of an index that cannot be read as a whole are named on stderr, and the exit code is 1.
    """
    printer = Printer(given.as_json)
    incomplete = _Incomplete()
    if given.as_json and os.path.isdir(path):
        for part in unread_parts(path):
            printer.json_line({"type": "unread", **part._asdict()})
    for vhost in given.vhosts(path):
        value = _info_object(vhost)
        incomplete.look(vhost, vhost.queues(), all_queues=True)
        incomplete.look_at_stores(vhost)
        if given.as_json:
            printer.json_line(value)
            continue
        source = {"inferred": " (.config is missing or wrong; inferred)", "default": " (nothing says; the default)"}
        declared = "" if value["declared"] is None else f", {value['declared']} declared on the node"
        pairs = [
            ("vhost", vhost.name),
            ("path", vhost.path),
            ("last stop", "clean" if vhost.clean else "not clean, or changed since"),
            ("entries a segment", f"{vhost.segment_entry_count}{source.get(vhost.segment_entry_count_source, '')}"),
            ("queues", f"{value['queues']} with a directory{declared}"),
            ("messages", str(value["messages"])),
        ]
        for name, key in (("persistent store", "persistent_store"), ("transient store", "transient_store")):
            store = value[key]
            if store is not None and "unreadable" in store:
                pairs.append((name, f"cannot be read: {store['unreadable']}"))
            elif store is not None:
                valid = f", {format_size(store['valid_size'])} of it valid" if key == "persistent_store" else ""
                pairs.append((name, f"{store['files']} files, {format_size(store['size'])}{valid}"))
        if value["unreferenced"]:
            pairs.append(("in no index", f"{_whole(value['unreferenced'])}: acknowledged, or the index is lost"))
        printer.fields(pairs)
        for problem in vhost.problems:
            note(f"{problem.path}: {problem.detail}")
        printer.line()
    _end([], incomplete.end())


def _queue_object(vhost: Vhost, queue: Queue) -> dict[str, Any]:
    return {
        "type": "queue",
        "vhost": queue.vhost,
        "name": queue.name,
        "index_version": queue.index_version,
        "levels": [each.queue_name.priority if each.queue_name else None for each in queue.directories],
        "directories": [each.name for each in queue.directories],
        "depth": queue.depth,
        "size": queue.size,
        "segments": sum(len(index.segments) for each in queue.directories for index in each.indexes),
        "next_seq_id": max((index.next_seq_id for each in queue.directories for index in each.indexes), default=0),
        "declared": None if vhost.definitions is None else queue.definition is not None,
        "problems": len(queue.problems),
    }


@main.command()
@_path
@_options
def queues(path: str, given: _Given) -> None:
    """List the queues that have a directory, with what is live in them.

    Files of an index that cannot be read as a whole are named on stderr, and the exit code is 1.
    """
    printer = Printer(given.as_json)
    any_queue = False
    incomplete = _Incomplete()
    for vhost in given.vhosts(path):
        rows = []
        incomplete.look(vhost, vhost.queues(), all_queues=True)
        for queue in vhost.queues():
            any_queue = True
            value = _queue_object(vhost, queue)
            if given.as_json:
                printer.json_line(value)
            else:
                levels = (
                    len(queue.directories) if queue.directories[0].queue_name and None not in value["levels"] else ""
                )
                declared = {None: "?", True: "yes", False: "NO"}[value["declared"]]
                rows.append(
                    (queue.name, f"v{queue.index_version}", declared, levels, value["depth"], format_size(value["size"]),
                     value["segments"], value["next_seq_id"], value["problems"] or "")
                )  # fmt: skip
        if rows:
            columns = (
                "queue",
                "index",
                "declared",
                "levels",
                "messages",
                "bodies",
                "segments",
                "next seq id",
                "problems",
            )
            printer.table(f"vhost {escape(vhost.name)}", columns, rows, left=3)
    _end([], incomplete.end())
    if not any_queue:
        nothing("no queue has a directory here")


# ------------------------------------------------------------------------------------------------------------- dumping


def _message_line(message: QueuedMessage) -> str:
    marks = [
        f"{message.seq_id:>10}",
        f"{message.size:>8} B",
        f"{message.location:<5}",
        "P" if message.persistent else "t",
        "R" if message.delivered else "-",
    ]
    if message.level is not None:
        marks.append(f"level {message.level}")
    if message.expiry is not None:
        marks.append(f"expires {format_time(message.expiry)}")
    keys = ",".join(message.routing_keys)
    text = message.body[: 4 * _BODY_SHOWN].decode("utf-8", "replace")[:_BODY_SHOWN]
    return "  ".join([*marks, escape(f"{message.exchange or '(default)'}/{keys}"), escape(text)])


def _found_line(found: FoundMessage) -> str:
    message = found.message
    keys = ",".join(message.routing_keys)
    text = message.body[: 4 * _BODY_SHOWN].decode("utf-8", "replace")[:_BODY_SHOWN]
    place = f"{os.path.basename(found.path)}:{found.pos}"
    queue = f"queue {found.queue}  " if found.queue else ""
    size = f"{message.body_size:>8} B"
    mark = "P" if message.persistent else "t"
    return "  ".join(
        [f"{place:>14}", size, mark, escape(f"{queue}{message.exchange or '(default)'}/{keys}"), escape(text)]
    )


def _whole(number: int) -> str:
    return "1 whole message" if number == 1 else f"{number} whole messages"


def _dump_found(
    messages: Iterator[FoundMessage], printer: Printer, max_num: int | None, lost: _Lost, incomplete: _Incomplete
) -> None:
    shown = 0
    for found in islice(messages, max_num):
        shown += 1
        if printer.as_json:
            printer.json_line({"type": "message", **found_object(found)})
        else:
            printer.line(_found_line(found))
    lost.end()
    _end([lost], incomplete.end())
    if not shown:
        nothing("there are no such messages")


def _lost_sentence(number: int) -> str:
    what = "message is" if number == 1 else "messages are"
    return f"{number} {what} live in the index and lost on disk: rmqstore rabbitmq verify says more"


def _undecoded_sentence(number: int) -> str:
    what = "1 message is" if number == 1 else f"{number} messages are"
    return f"{what} whole on disk and left out, as this release cannot decode them or their properties are damaged"


def _unreadable_sentence(number: int) -> str:
    what = "message is" if number == 1 else "messages are"
    return f"{number} {what} live in the index, and may be whole in files that cannot be read: make them readable"


class _Incomplete:
    """Names on stderr each file of an index behind whose damage messages may stand that an answer lacks."""

    def __init__(self) -> None:
        self.places: dict[str, list[Problem]] = {}

    def __call__(self, problem: Problem) -> None:
        self.places.setdefault(problem.path, []).append(problem)

    def look(self, vhost: Vhost, queues: list[Queue], *, all_queues: bool) -> None:
        for problem in vhost.incomplete if all_queues else ():
            self(problem)
        for queue in queues:
            for problem in queue.incomplete:
                self(problem)

    def look_at_stores(self, vhost: Vhost) -> None:
        for persistent in (True, False):
            error = vhost.open_store(persistent)
            if error is not None:
                self(unreadable_file(store_path(vhost.path, persistent), error))
                continue
            store = vhost.store(persistent)
            for problem in store.problems if store is not None else ():
                if problem.kind in (UNREADABLE, UNREAD_FORMAT):
                    self(problem)

    def end(self) -> int:
        """int: how many files there were."""
        for problems in self.places.values():
            more = f" (and {len(problems) - 1} more in this file)" if len(problems) > 1 else ""
            note(f"{problems[0].place}: {problems[0].kind}: {problems[0].detail}{more}")
        return len(self.places)


def _incomplete_sentence(number: int) -> str:
    what = "1 file cannot" if number == 1 else f"{number} files cannot"
    return f"{what} be read as a whole, so that messages may be missing here: rmqstore rabbitmq verify says more"


def _end(lost: Sequence[_Lost], incomplete: int) -> None:
    """Say each reason why an answer lacks something, and end with the exit code of findings if there is one."""
    numbers = (
        (sum(each.number - each.unreadable - each.undecoded for each in lost), _lost_sentence),
        (sum(each.undecoded for each in lost), _undecoded_sentence),
        (sum(each.unreadable for each in lost), _unreadable_sentence),
        (incomplete, _incomplete_sentence),
    )
    sentences = [sentence(number) for number, sentence in numbers if number]
    for each in sentences[:-1]:
        note(each)
    if sentences:
        nothing(sentences[-1])


class _Lost:
    """Prints each lost message of a queue in its turn, the first of many; and those that cannot be read."""

    def __init__(self, printer: Printer, *, shown: bool = True):
        self.printer = printer
        self.shown = shown
        self.number = 0
        self.unreadable = self.undecoded = 0

    def __call__(self, lost: LostMessage) -> None:
        self.number += 1
        self.undecoded += lost.undecoded
        self.unreadable += bool(lost.reason) and not lost.undecoded
        if self.printer.as_json and self.shown:
            value = {**lost._asdict(), "msg_id": lost.msg_id.hex()}
            self.printer.json_line({"type": "lost", **value})
        elif self.number <= _LOST_SHOWN:
            text = f"{'left out' if lost.undecoded else 'not readable' if lost.reason else 'lost'}: {lost}"
            self.printer.line(escape(text)) if self.shown else note(f"queue {lost.queue}: {text}")

    def end(self) -> int:
        """int: how many there were."""
        if self.number > _LOST_SHOWN and not (self.printer.as_json and self.shown):
            text = f"and {self.number - _LOST_SHOWN} more are lost" + (" or cannot be read" if self.unreadable else "")
            self.printer.line(text) if self.shown else note(text)
        return self.number


@main.command()
@_path
@click.option(
    "--queue",
    "queue_names",
    callback=lambda ctx, param, value: () if value is None else (value,),
    help="Only this queue.",
)
@_vhost_option
@_unreferenced_option
@click.option("--max-num", type=click.IntRange(min=1), help="At most so many messages a queue.")
@_options
@gathered(_Chosen, "wanted")
def dump(path: str, wanted: _Chosen, max_num: int | None, given: _Given) -> None:
    """Print the live messages, oldest first; P = persistent, R = would be delivered as redelivered.

    PATH can be one message file too (N.rdq, N.rdt, N.qs): all whole messages of it are printed, with their position.

    One whose bytes are lost is named in its place, files of an index that cannot be read as a whole are named on
    stderr, and the exit code is 1.
    """
    printer = Printer(given.as_json)
    shown = 0
    ended = []
    incomplete = _Incomplete()
    _note_running(path)
    _note_unread(path)
    wanted.check(path)
    if is_message_file(path):
        lost = _Lost(printer)
        _dump_found(file_messages(path, lost, incomplete), printer, max_num, lost, incomplete)
        return
    with given.vhost(path, wanted.vhost_name) as vhost:
        if wanted.unreferenced:
            lost = _Lost(printer)
            incomplete.look_at_stores(vhost)
            _dump_found(unreferenced_messages(vhost, lost), printer, max_num, lost, incomplete)
            return
        chosen = [_queue(vhost, name) for name in wanted.queue_names] or vhost.queues()
        incomplete.look(vhost, chosen, all_queues=not wanted.queue_names)
        for queue in chosen:
            if not given.as_json:
                printer.line(f"queue {escape(queue.name)}: {queue.depth} messages")
            lost = _Lost(printer)
            for number, message in enumerate(queue.messages(lost, decoded=given.as_json)):
                if number == max_num:
                    break
                shown += 1
                if given.as_json:
                    printer.json_line({"type": "message", **message_object(queue, message)})
                else:
                    printer.line(_message_line(message))
            lost.end()
            ended.append(lost)
            if not given.as_json:
                printer.line()
    _end(ended, incomplete.end())
    if not shown:
        nothing("there are no messages")


# --------------------------------------------------------------------------------------------------- verify and repair


def _finding_object(finding: Finding) -> dict[str, Any]:
    value = dataclasses.asdict(finding)
    # Always one.
    del value["num"]
    return {"type": "finding", **value, "consequence": finding.consequence.value}


@main.command(name="verify")
@_path
@_options
def verify_command(path: str, given: _Given) -> None:
    """Look for everything that is wrong, and say what the real node would do; exit code 1 if anything is wrong."""
    printer = Printer(given.as_json)
    kinds: Counter[tuple[str, str]] = Counter()
    check_vhost_path(path)
    _note_running(path)
    _note_unread(path)
    with Progress("verifying", "queues") as progress:
        for finding in verify(path, segment_entry_count=given.segment_entry_count, progress=progress):
            kinds[finding.kind, finding.consequence.sentence] += 1
            if given.as_json:
                printer.json_line(_finding_object(finding))
            else:
                printer.line(
                    f"{escape(finding.path)}:{finding.pos}: {finding.kind}: {escape(finding.detail)} "
                    f"({finding.consequence.sentence})"
                )
            sys.stdout.flush()
    if given.as_json:
        names: Counter[str] = Counter()
        for (kind, _), number in kinds.items():
            names[kind] += number
        printer.json_line({"type": "summary", "findings": kinds.total(), "kinds": dict(sorted(names.items()))})
    elif not kinds:
        unread = os.path.isdir(path) and unread_parts(path)
        printer.line("nothing is wrong in the classic queues" if unread else "nothing is wrong")
    else:
        rows = [(kind, sentence, number) for (kind, sentence), number in sorted(kinds.items())]
        printer.table(f"{kinds.total()} findings", ("kind", "consequence", "number"), rows, left=2)
    if kinds:
        click.get_current_context().exit(FOUND_NOTHING)


@main.command(name="repair")
@_path
@click.argument("output", type=click.Path())
@_vhost_option
@_options
def repair_command(path: str, output: str, vhost_name: str | None, given: _Given) -> None:
    """Write to OUTPUT a vhost directory that a real node boots on, with everything that is whole; PATH stays as it is."""
    printer = Printer(given.as_json)
    with given.vhost(path, vhost_name) as vhost:
        source = vhost.path
    _note_unread(path)
    pid = node_process(source)
    if pid is not None:
        raise CannotOpenError(f"process {pid} has files of this directory open; stop the node first")
    with orderly_end(), Progress("repairing", "queues") as progress:
        report = repair(source, output, segment_entry_count=given.segment_entry_count, progress=progress)
    for finding in report.findings:
        # Of the transient store a node wants nothing.
        if finding.kind == UNREADABLE and finding.consequence is not Consequence.NONE:
            note(f"{finding.path}: {finding.detail}; the output lacks what is in it: make it readable and repair again")
    if given.as_json:
        for queue in report.queues:
            printer.json_line({"type": "queue", **dataclasses.asdict(queue)})
        for finding in report.findings:
            printer.json_line(_finding_object(finding))
        printer.json_line(
            {
                "type": "summary",
                "source": report.source,
                "output": report.output,
                "messages": report.messages,
                "lost": report.lost,
                "unreadable": report.unreadable,
                "unreferenced": report.unreferenced,
                "findings": len(report.findings),
            }
        )
        return
    rows = [
        (
            queue.name if queue.level is None else f"{queue.name} level {queue.level}",
            queue.files,
            queue.redelivered,
            queue.messages,
            queue.lost or "",
            queue.transient or "",
            queue.expired or "",
        )
        for queue in report.queues
    ]
    columns = ("queue", "files", "redelivered", "messages", "lost", "transient", "expired")
    printer.table("queues", columns, rows, left=3)
    for queue in report.queues:
        if queue.expired:
            printer.line(escape(f"queue {queue.name}: {queue.expired} have expired: {queue.fate_of_expired}"))
    unreadable = f", {report.unreadable} could not be read" if report.unreadable else ""
    printer.line(
        f"\n{report.messages} messages will be delivered, {report.lost} are lost{unreadable}; "
        f"{len(report.findings)} findings"
    )
    if report.unreferenced:
        printer.line(
            f"In no index, so that the node does not deliver it: {_whole(report.unreferenced)} (acknowledged, or the "
            f"index is lost).\nTo see them: rmqstore rabbitmq dump --unreferenced {escape(shlex.quote(report.source))}"
        )
    printer.line(
        f"Now, with the node stopped, move {escape(report.source)} away and {escape(report.output)} to its name."
    )


# ---------------------------------------------------------------------------------------------------- export and import


@dataclasses.dataclass(frozen=True)
class _Output:
    """The file that an export makes."""

    output: str
    kind: str | None
    force: bool


@main.command(name="export")
@_path
@click.option(
    "-O", "--output", default="-", metavar="FILE", help="The file to make; - is standard output, as by default."
)
@click.option("--queue", "queue_names", multiple=True, help="Only this queue; repeatable.")
@_vhost_option
@_unreferenced_option
@click.option("--format", "kind", type=click.Choice(FORMATS), help="By default what FILE's ending says, else jsonl.")
@force_option
@_options
@gathered(_Output, "target")
@gathered(_Chosen, "wanted")
def export_command(path: str, wanted: _Chosen, target: _Output, given: _Given) -> None:
    """Write the live messages to one file: JSON lines, Arrow or Parquet.

    PATH can be one message file too (N.rdq, N.rdt, N.qs): all whole messages of it are written.

    A message whose bytes are lost, and files of an index that cannot be read as a whole, are named on stderr, and
    the exit code is 1.
    """
    _note_running(path)
    _note_unread(path)
    lost = _Lost(Printer(given.as_json), shown=False)
    incomplete = _Incomplete()
    wanted.check(path)
    with contextlib.ExitStack() as stack:
        source: Vhost | str = path
        if not is_message_file(path):
            source = stack.enter_context(given.vhost(path, wanted.vhost_name))
            for name in wanted.queue_names:
                _queue(source, name)
            if wanted.unreferenced:
                incomplete.look_at_stores(source)
        with orderly_end(), Progress("exporting", "messages") as progress:
            number = export(
                source,
                sys.stdout.buffer if target.output == "-" else target.output,
                queues=wanted.queue_names or None,
                format=target.kind,
                force=target.force,
                progress=progress,
                on_lost=lost,
                on_incomplete=incomplete,
                unreferenced=wanted.unreferenced,
            )
    if given.as_json and target.output != "-":
        value = {"type": "export", "output": target.output, "messages": number, "lost": lost.number - lost.unreadable}
        Printer(True).json_line({**value, "unreadable": lost.unreadable})
    else:
        note(f"{number} messages")
    lost.end()
    _end([lost], incomplete.end())
    if not number:
        click.get_current_context().exit(FOUND_NOTHING)


def _objects(file: BinaryIO) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield object_message(json.loads(line))
        except InvalidMessageError as error:
            raise InvalidMessageError(f"line {number}: {error.message}") from None
        except (ValueError, RecursionError) as error:
            raise InvalidMessageError(f"line {number} is no JSON: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Target:
    """The queue that messages are put into, and what is known of it."""

    queue_name: str
    vhost_name: str | None
    state: str
    level: int | None
    declared: bool


@main.command(name="import")
@_path
@click.argument("queue_name", metavar="QUEUE")
@click.argument("file", type=click.File("rb"))
@_vhost_option
@click.option(
    "--state",
    type=click.Choice(["auto", "exact", "dirty"]),
    default="auto",
    show_default=True,
    help="exact: flags and numbers of all queues stay; needs a clean stop. dirty: the node counts everything again.",
)
@click.option("--level", type=click.IntRange(0, 255), help="The level of a priority queue.")
@click.option(
    "--declared", is_flag=True, help="The node knows this queue, although its definitions cannot be read here."
)
@_options
@gathered(_Target, "target")
def import_command(path: str, file: BinaryIO, target: _Target, given: _Given) -> None:
    """Put the messages of FILE (JSON lines as of export; '-' is standard input) after those of a stopped node's QUEUE."""
    with given.vhost(path, target.vhost_name) as vhost:
        source = vhost.path
    report = import_messages(
        source,
        target.queue_name,
        _objects(file),
        state=target.state,
        level=target.level,
        declared=target.declared,
        segment_entry_count=given.segment_entry_count,
    )
    if given.as_json:
        Printer(True).json_line({"type": "import", **dataclasses.asdict(report)})
    else:
        note(
            f"{report.messages} messages in queue {target.queue_name}, from sequence id {report.first_seq_id} on; "
            f"state: {report.state}"
        )
    if not report.messages:
        click.get_current_context().exit(FOUND_NOTHING)
