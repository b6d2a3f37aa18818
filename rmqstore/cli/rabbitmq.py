"""The command line of RabbitMQ's classic queues: ``rmqstore rabbitmq …``.

Owns options, printing and exit codes, which are those of `rmqstore.cli`; every answer comes from the functions of
`rmqstore.rabbitmq`.  ``import`` writes into a queue, ``repair`` and ``export`` write a new directory or file; everything
else only reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, BinaryIO

import click

from rmqstore.cli.errors import CannotOpenError, did_you_mean
from rmqstore.cli.group import FOUND_NOTHING, StoreGroup, exit_not_found, orderly_end
from rmqstore.cli.options import force_option, gathered, json_option, optioned
from rmqstore.cli.paths import STORE_PATH, check_vhost_path
from rmqstore.cli.terminal import Printer, Progress, escape, format_size, format_time, note
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.rabbitmq import (
    Consequence,
    Finding,
    FoundMessage,
    LostMessage,
    Message,
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
# Lost messages, and unread parts of a node, that are named, unless the answer is JSON.
_NAMED = 20


# -------------------------------------------------------------------------------------------------------------- options


@dataclasses.dataclass(frozen=True)
class _Given:
    """The options that every command has."""

    segment_entry_count: int | None
    as_json: bool

    def open(self, path: str) -> Vhost:
        """Open one vhost."""
        return Vhost.open(path, segment_entry_count=self.segment_entry_count)

    def vhosts(self, path: str) -> Iterator[Vhost]:
        """Yield the vhosts below `path`, each open while it is used."""
        check_vhost_path(path)
        _note_surroundings(path)
        for each in find_vhosts(path):
            with self.open(each) as vhost:
                yield vhost

    def vhost(self, path: str, name: str | None) -> Vhost:
        """Open the only vhost below `path`, or the one of this name."""
        check_vhost_path(path)
        found = [self.open(each) for each in find_vhosts(path)]
        matching = [vhost for vhost in found if name is None or vhost.name == name]
        for vhost in found:
            if len(matching) != 1 or vhost is not matching[0]:
                vhost.close()
        if len(matching) == 1:
            return matching[0]
        names = ", ".join(escape(repr(vhost.name)) for vhost in matching or found)
        if matching:
            raise CannotOpenError(f"there are {len(matching)} vhosts here: say which", f"--vhost NAME, one of: {names}")
        near = did_you_mean(name or "", (vhost.name for vhost in found))
        raise CannotOpenError(f"there is no vhost {name!r} here" + (f": {near}" if near else ""), f"There are: {names}")


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The selected messages: of these queues of a vhost, or those in no index."""

    queue_names: tuple[str, ...]
    vhost_name: str | None
    unreferenced: bool

    def check(self, path: str) -> None:
        """Raise UsageError if queues are given for messages without a queue."""
        if (self.unreferenced or is_message_file(path)) and self.queue_names:
            raise click.UsageError("messages without an index are of no queue: give no --queue")

    def queues(self, vhost: Vhost) -> list[Queue]:
        """Return the queues of these names, by default all; the error suggests a similar name."""
        found = []
        for name in self.queue_names:
            try:
                found.append(vhost.queue(name))
            except StoreError as error:
                near = did_you_mean(name, (queue.name for queue in vhost.queues()))
                raise StoreError(f"{error.message}: {near}" if near else error.message, error.path) from None
        return found if self.queue_names else vhost.queues()


_path = click.argument("path", type=STORE_PATH)
_queue_option = click.option("--queue", "queue_names", multiple=True, help="Only this queue; repeatable.")
_vhost_option = click.option("--vhost", "vhost_name", help="Which vhost, where PATH has more than one.")
_unreferenced_option = click.option(
    "--unreferenced",
    is_flag=True,
    help="Only the whole messages that no index has: acknowledged, or their index is lost.",
)


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every command, as one argument `given`."""
    return optioned(
        gathered(_Given, "given")(function),
        click.option(
            "--segment-entry-count",
            type=click.IntRange(1, 16384),
            help="Entries a segment, where .config is wrong; by default it says so, or the segments show it.",
        ),
        json_option,
    )


def _note_surroundings(path: str) -> None:
    """Note a process that has files of `path` open, and the parts of a node that are not read."""
    pid = node_process(path)
    if pid is not None:
        note(f"process {pid} has files of this directory open: what is shown may be half-written; stop the node first")
    parts = unread_parts(path) if os.path.isdir(path) else []
    for part in parts[:_NAMED]:
        note(f"{part.path}: {part.sentence}")
    if len(parts) > _NAMED:
        note(f"and {len(parts) - _NAMED} more that are not read: rmqstore rabbitmq info --json lists them")


@click.group(cls=StoreGroup, name="rabbitmq")
def main() -> None:
    """Inspect, repair, export and import RabbitMQ's classic queues on disk.

    PATH is a vhost's directory (<data>/msg_stores/vhosts/<hash>) or the node's data directory. Stop the node first.
    """


# ----------------------------------------------------------------------------------------------- what an answer lacks


class _Missing:
    """Gaps of an answer: lost messages, and damaged files that may hide messages.

    Lost messages are printed in their order on stdout, with `shown` False on stderr; files on stderr at the end.
    """

    def __init__(self, printer: Printer, *, shown: bool = True):
        self.printer = printer
        self.shown = shown
        self.lost = self.unreadable = self.undecoded = 0
        self.places: dict[str, list[Problem]] = {}

    def on_lost(self, lost: LostMessage) -> None:
        self.undecoded += lost.undecoded
        self.unreadable += bool(lost.reason) and not lost.undecoded
        self.lost += not lost.reason
        if self.printer.as_json and self.shown:
            self.printer.json_line({"type": "lost", **lost._asdict(), "msg_id": lost.msg_id.hex()})
        elif self.number <= _NAMED:
            text = f"{'left out' if lost.undecoded else 'not readable' if lost.reason else 'lost'}: {lost}"
            self._line(text if self.shown else f"queue {lost.queue}: {text}")

    def on_incomplete(self, problem: Problem) -> None:
        self.places.setdefault(problem.path, []).append(problem)

    @property
    def number(self) -> int:
        return self.lost + self.unreadable + self.undecoded

    def _line(self, text: str) -> None:
        self.printer.line(escape(text)) if self.shown else note(text)

    def look(self, vhost: Vhost, queues: list[Queue], *, all_queues: bool) -> None:
        """Collect problems of queues, and of the vhost with `all_queues`, that may hide messages."""
        for problem in vhost.incomplete if all_queues else ():
            self.on_incomplete(problem)
        for queue in queues:
            for problem in queue.incomplete:
                self.on_incomplete(problem)

    def look_at_stores(self, vhost: Vhost) -> None:
        """Collect unreadable parts of the message stores."""
        for persistent in (True, False):
            store = vhost.open_store(persistent)
            if isinstance(store, OSError):
                self.on_incomplete(unreadable_file(store_path(vhost.path, persistent), store))
                continue
            for problem in store.problems if store is not None else ():
                if problem.kind in (UNREADABLE, UNREAD_FORMAT):
                    self.on_incomplete(problem)

    def end(self) -> None:
        """Print each reason for a gap, and exit with the code of findings if there is one."""
        if self.number > _NAMED and not (self.printer.as_json and self.shown):
            cannot = " or cannot be read" if self.unreadable else ""
            self._line(f"and {self.number - _NAMED} more are lost{cannot}")
        for problems in self.places.values():
            more = f" (and {len(problems) - 1} more in this file)" if len(problems) > 1 else ""
            note(f"{problems[0].place}: {problems[0].kind}: {problems[0].detail}{more}")
        files = len(self.places)
        reasons = (
            (self.lost, f"{_messages(self.lost)} live in the index and lost on disk: rmqstore rabbitmq verify says more"),
            (
                self.undecoded,
                f"{_messages(self.undecoded)} whole on disk and left out, as this release cannot decode them or their "
                "properties are damaged",
            ),
            (
                self.unreadable,
                f"{_messages(self.unreadable)} live in the index, and may be whole in files that cannot be read: make "
                "them readable",
            ),
            (
                files,
                f"{files} {'file' if files == 1 else 'files'} cannot be read as a whole, so that messages may be missing "
                "here: rmqstore rabbitmq verify says more",
            ),
        )
        sentences = [sentence for number, sentence in reasons if number]
        for each in sentences[:-1]:
            note(each)
        if sentences:
            exit_not_found(sentences[-1])


def _messages(number: int) -> str:
    return "1 message is" if number == 1 else f"{number} messages are"


def _whole(number: int) -> str:
    return "1 whole message" if number == 1 else f"{number} whole messages"


# ----------------------------------------------------------------------------------------------------------- describing


@main.command()
@_path
@_options
def info(path: str, given: _Given) -> None:
    """Say what a vhost, or each vhost of a node, has on disk.

    Files of an index that cannot be read as a whole are named on stderr, and the exit code is 1.
    """
    printer = Printer(given.as_json)
    missing = _Missing(printer)
    if given.as_json and os.path.isdir(path):
        for part in unread_parts(path):
            printer.json_line({"type": "unread", **part._asdict()})
    for vhost in given.vhosts(path):
        value = {
            "type": "vhost",
            **vhost.summary(),
            "segment_entry_count_source": vhost.segment_entry_count_source,
            "declared": None
            if vhost.definitions is None
            else sum(definition.vhost == vhost.name for definition in vhost.definitions.values()),
            "unreferenced": None if isinstance(vhost.open_store(True), OSError) else count_unreferenced(vhost)[0],
        }
        missing.look(vhost, vhost.queues(), all_queues=True)
        missing.look_at_stores(vhost)
        if given.as_json:
            printer.json_line(value)
        else:
            _print_info(printer, vhost, value)
    missing.end()


def _print_info(printer: Printer, vhost: Vhost, value: dict[str, Any]) -> None:
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
    for name in ("persistent_store", "transient_store"):
        store = value[name]
        if store is None:
            continue
        if "unreadable" in store:
            text = f"cannot be read: {store['unreadable']}"
        else:
            valid = f", {format_size(store['valid_size'])} of it valid" if name == "persistent_store" else ""
            text = f"{store['files']} files, {format_size(store['size'])}{valid}"
        pairs.append((name.replace("_", " "), text))
    if value["unreferenced"]:
        pairs.append(("in no index", f"{_whole(value['unreferenced'])}: acknowledged, or the index is lost"))
    printer.fields(pairs)
    for problem in vhost.problems:
        note(f"{problem.path}: {problem.detail}")
    printer.line()


@main.command()
@_path
@_options
def queues(path: str, given: _Given) -> None:
    """List the queues that have a directory, with what is live in them.

    Files of an index that cannot be read as a whole are named on stderr, and the exit code is 1.
    """
    printer = Printer(given.as_json)
    missing = _Missing(printer)
    any_queue = False
    columns = ("queue", "index", "declared", "levels", "messages", "bodies", "segments", "next seq id", "problems")
    for vhost in given.vhosts(path):
        rows = []
        missing.look(vhost, vhost.queues(), all_queues=True)
        for queue in vhost.queues():
            any_queue = True
            levels = [each.level for each in queue.directories]
            value = {
                "type": "queue",
                "vhost": queue.vhost,
                **queue.summary(),
                "levels": levels,
                "segments": sum(len(index.segments) for index in queue.indexes),
                "next_seq_id": max((index.next_seq_id for index in queue.indexes), default=0),
                "problems": len(queue.problems),
            }
            if given.as_json:
                printer.json_line(value)
                continue
            declared = {None: "?", True: "yes", False: "NO"}[value["declared"]]
            rows.append(
                (queue.name, f"v{queue.index_version}", declared, "" if None in levels else len(levels), value["depth"],
                 format_size(value["size"]), value["segments"], value["next_seq_id"], value["problems"] or "")
            )  # fmt: skip
        if rows:
            printer.table(f"vhost {escape(vhost.name)}", columns, rows, left=3)
    missing.end()
    if not any_queue:
        exit_not_found("no queue has a directory here")


# ------------------------------------------------------------------------------------------------------------- dumping


def _route_and_body(message: Message, queue: str = "") -> list[str]:
    text = message.body[: 4 * _BODY_SHOWN].decode("utf-8", "replace")[:_BODY_SHOWN]
    return [escape(f"{queue}{message.exchange or '(default)'}/{','.join(message.routing_keys)}"), escape(text)]


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
    return "  ".join([*marks, *_route_and_body(message.message)])


def _found_line(found: FoundMessage) -> str:
    message = found.message
    place = f"{os.path.basename(found.path)}:{found.pos}"
    marks = [f"{place:>14}", f"{message.body_size:>8} B", "P" if message.persistent else "t"]
    return "  ".join([*marks, *_route_and_body(message, f"queue {found.queue}  " if found.queue else "")])


@main.command()
@_path
@_queue_option
@_vhost_option
@_unreferenced_option
@click.option("--max-num", type=click.IntRange(min=1), help="At most this many messages a queue.")
@_options
@gathered(_Chosen, "wanted")
def dump(path: str, wanted: _Chosen, max_num: int | None, given: _Given) -> None:
    """Print the live messages, oldest first; P = persistent, R = would be delivered as redelivered.

    PATH can be one message file too (N.rdq, N.rdt, N.qs): all whole messages of it are printed, with their position.

    One whose bytes are lost is named in its place, files of an index that cannot be read as a whole are named on
    stderr, and the exit code is 1.
    """
    printer = Printer(given.as_json)
    missing = _Missing(printer)
    _note_surroundings(path)
    wanted.check(path)
    if is_message_file(path):
        shown = _dump_found(file_messages(path, missing.on_lost, missing.on_incomplete), printer, max_num)
    else:
        with given.vhost(path, wanted.vhost_name) as vhost:
            if wanted.unreferenced:
                missing.look_at_stores(vhost)
                shown = _dump_found(unreferenced_messages(vhost, missing.on_lost), printer, max_num)
            else:
                chosen = wanted.queues(vhost)
                missing.look(vhost, chosen, all_queues=not wanted.queue_names)
                shown = sum(_dump_queue(queue, printer, max_num, missing) for queue in chosen)
    missing.end()
    if not shown:
        exit_not_found("there are no such messages" if wanted.unreferenced or is_message_file(path) else "there are no messages")


def _dump_found(messages: Iterator[FoundMessage], printer: Printer, max_num: int | None) -> int:
    shown = 0
    for found in islice(messages, max_num):
        shown += 1
        if printer.as_json:
            printer.json_line({"type": "message", **found_object(found)})
        else:
            printer.line(_found_line(found))
    return shown


def _dump_queue(queue: Queue, printer: Printer, max_num: int | None, missing: _Missing) -> int:
    shown = 0
    if not printer.as_json:
        printer.line(f"queue {escape(queue.name)}: {queue.depth} messages")
    for message in islice(queue.messages(missing.on_lost, decoded=printer.as_json), max_num):
        shown += 1
        if printer.as_json:
            printer.json_line({"type": "message", **message_object(queue, message)})
        else:
            printer.line(_message_line(message))
    if not printer.as_json:
        printer.line()
    return shown


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
    _note_surroundings(path)
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
    pid = node_process(source)
    if pid is not None:
        raise CannotOpenError(f"process {pid} has files of this directory open; stop the node first")
    _note_surroundings(path)
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
        names = ("source", "output", "messages", "lost", "unreadable", "unreferenced")
        totals = {name: getattr(report, name) for name in names}
        printer.json_line({"type": "summary", **totals, "findings": len(report.findings)})
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


@main.command(name="export")
@_path
@click.option(
    "-O", "--output", default="-", metavar="FILE", help="The file to make; - is standard output, as by default."
)
@_queue_option
@_vhost_option
@_unreferenced_option
@click.option("--format", "kind", type=click.Choice(FORMATS), help="By default what FILE's ending says, else jsonl.")
@force_option
@_options
@gathered(_Chosen, "wanted")
def export_command(path: str, wanted: _Chosen, output: str, kind: str | None, force: bool, given: _Given) -> None:
    """Write the live messages to one file: JSON lines, Arrow or Parquet.

    PATH can be one message file too (N.rdq, N.rdt, N.qs): all whole messages of it are written.

    A message whose bytes are lost, and files of an index that cannot be read as a whole, are named on stderr, and
    the exit code is 1.
    """
    _note_surroundings(path)
    missing = _Missing(Printer(given.as_json), shown=False)
    wanted.check(path)
    with contextlib.ExitStack() as stack:
        source: Vhost | str = path
        if not is_message_file(path):
            source = stack.enter_context(given.vhost(path, wanted.vhost_name))
            wanted.queues(source)
            if wanted.unreferenced:
                missing.look_at_stores(source)
        with orderly_end(), Progress("exporting", "messages") as progress:
            number = export(
                source,
                sys.stdout.buffer if output == "-" else output,
                queues=wanted.queue_names or None,
                format=kind,
                force=force,
                progress=progress,
                on_lost=missing.on_lost,
                on_incomplete=missing.on_incomplete,
                unreferenced=wanted.unreferenced,
            )
    if given.as_json and output != "-":
        value = {"type": "export", "output": output, "messages": number, "lost": missing.number - missing.unreadable}
        Printer(True).json_line({**value, "unreadable": missing.unreadable})
    else:
        note(f"{number} messages")
    missing.end()
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
def import_command(
    path: str, queue_name: str, file: BinaryIO, vhost_name: str | None, state: str, level: int | None, declared: bool,
    given: _Given,
) -> None:  # fmt: skip
    """Put the messages of FILE (JSON lines as of export; '-' is standard input) after those of a stopped node's QUEUE."""
    with given.vhost(path, vhost_name) as vhost:
        source = vhost.path
    report = import_messages(
        source,
        queue_name,
        _objects(file),
        state=state,
        level=level,
        declared=declared,
        segment_entry_count=given.segment_entry_count,
    )
    if given.as_json:
        Printer(True).json_line({"type": "import", **dataclasses.asdict(report)})
    else:
        note(
            f"{report.messages} messages in queue {queue_name}, from sequence id {report.first_seq_id} on; "
            f"state: {report.state}"
        )
    if not report.messages:
        click.get_current_context().exit(FOUND_NOTHING)
