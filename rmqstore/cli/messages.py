"""A message as a line, as text and as a JSON object.

Owns how every command shows a message, so that two commands show one message alike.  It opens nothing: the message
comes from its caller.  Invariant: what a terminal may obey is escaped, and JSON has the bytes.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable
from typing import Any

import click

from rmqstore.cli.errors import did_you_mean
from rmqstore.cli.formats import LineFormat, format_option
from rmqstore.cli.options import gathered, optioned
from rmqstore.cli.terminal import Printer, escape, format_time
from rmqstore.errors import StoreError
from rmqstore.message import MessageExt, is_light_queue
from rmqstore.store.message_store import MessageStore

_BODY_SHOWN = 1024


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """How messages are shown: as a line of a format, or with their bodies as text, as hex or not at all."""

    line_format: LineFormat | None
    body: str

    def printer(self, as_json: bool) -> Printer:
        """Return what prints them; UsageError where both ways to print messages are asked for."""
        if as_json and self.line_format is not None:
            raise click.UsageError("give --json or --format, not both")
        return Printer(as_json)


def form_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--format`` and ``--body``; the command gets them as one argument `form`."""
    body_option = click.option(
        "--body", type=click.Choice(["text", "hex", "none"]), default="text", show_default=True, help="How to show bodies."
    )
    return optioned(gathered(MessageForm, "form")(function), format_option, body_option)


def about_topic(store: MessageStore, topic: str) -> str:
    """Return what follows "nothing found": that a light queue's messages are elsewhere, or which topics the store has."""
    known = store.topics()
    if topic in known:
        if not is_light_queue(topic):
            return ""
        return (
            f"; {topic} is a light queue, whose messages were sent to other topics: rmqstore get {shlex.quote(store.path)} "
            f"{shlex.quote(topic)} 0 reads it"
        )
    if store.queues.unseen:
        return "; which topics the store has is not known, as folders of queues cannot be looked into"
    near = did_you_mean(topic, known)
    if near:
        return f"; the store has no topic {topic}: {near}"
    rest = f" and {len(known) - 10} more" if len(known) > 10 else ""
    return f"; the store has no topic {topic}, it has: {', '.join(known[:10]) or 'none'}{rest}"


def about_queues(store: MessageStore, topic: str, queue_ids: Iterable[int]) -> str:
    """str: as `about_topic`, also where the topic is there and one of these queues is not: which it has."""
    known = [queue_id for name, queue_id in store.queues.keys() if name == topic]
    if known and any(queue_id not in known for queue_id in queue_ids):
        rest = f" and {len(known) - 20} more" if len(known) > 20 else ""
        return f"; the topic has: {', '.join(map(str, known[:20]))}{rest}"
    return about_topic(store, topic)


def uncovered_text(store: MessageStore, uncovered: tuple[tuple[int, int], ...], advice: str) -> str:
    """str: which part of the log an answer leaves out, by place and store time."""
    size = sum(end - begin for begin, end in uncovered)
    shown = [
        f"phy offsets {begin} to {end} (stored {format_time(times[0])} to {format_time(times[1])})"
        for begin, end in uncovered[:5]
        for times in [store.commit_log.times_of(begin, end)]
    ]
    rest = f" and {len(uncovered) - 5} stretches more" if len(uncovered) > 5 else ""
    return f"{size} bytes of the log were not looked at, which the index does not cover: {', '.join(shown)}{rest}; {advice}"


def message_object(message: MessageExt, body: str) -> dict[str, Any]:
    """What ``--json`` prints of a message; `body` is "text", "hex" or "none"."""
    return message.json_row(body)


def message_line(message: MessageExt, time: str) -> str:
    """What identifies a message, on one line; `time` is its store time."""
    parts = [
        time,
        f"phy {message.phy_offset:>12}",
        f"{message.size:>6} B",
        f"{escape(message.topic)}/{message.queue_id} #{message.queue_offset}",
    ]
    if message.tags:
        parts.append(f"tags={escape(message.tags)}")
    if message.keys:
        parts.append(f"keys={escape(' '.join(message.keys))}")
    if message.corrupt:
        parts.append(f"CORRUPT ({message.damage})")
    return "  ".join(parts)


def print_message(printer: Printer, message: MessageExt, form: MessageForm) -> None:
    """Print a message as a line with its body below, as the line of a format, or as an object."""
    if printer.as_json:
        printer.json_line(message_object(message, form.body))
        return
    if form.line_format is not None:
        printer.line_of(form.line_format(message, form.body))
        return
    printer.line(message_line(message, printer.time(message.store_timestamp, "milliseconds")))
    if form.body == "none":
        return
    try:
        raw = message.body
    except StoreError as error:
        if not message.corrupt:
            printer.line(f"    the body cannot be decoded: {escape(error.message)}")
        raw = message.body_stored
    rest = len(raw) - _BODY_SHOWN
    shown = raw[:_BODY_SHOWN]
    text = shown.hex(" ") if form.body == "hex" else escape(shown.decode("utf-8", "backslashreplace"))
    printer.line(f"    {text}" + (f" ... {rest} bytes more, --json shows all" if rest > 0 else ""))
