"""Messages as lines with their bodies, as JSON objects, or by a format string: ``--format '%t %k %s'``.

The letters of a format are kcat's where it has the same field.  Control characters are escaped, including line ends.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from rmqstore.cli.errors import did_you_mean
from rmqstore.cli.options import gathered, optioned
from rmqstore.cli.terminal import Printer, escape, format_time
from rmqstore.errors import StoreError
from rmqstore.message import BodyText, MessageExt, is_light_queue, text_pieces
from rmqstore.store.message_store import MessageStore

_BODY_SHOWN = 1024


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """The format of messages: ``--format``, and the form of bodies ("text", "hex" or "none")."""

    line_format: LineFormat | None
    body: str

    def printer(self, as_json: bool) -> Printer:
        """Return the printer; raise UsageError if both ``--json`` and ``--format`` are given."""
        if as_json and self.line_format is not None:
            raise click.UsageError("give --json or --format, not both")
        return Printer(as_json)


def form_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--format`` and ``--body``, and pass them as one argument `form`."""
    body_option = click.option(
        "--body", type=click.Choice(["text", "hex", "none"]), default="text", show_default=True, help="Format of bodies."
    )
    return optioned(gathered(MessageForm, "form")(function), format_option, body_option)


def about_topic(store: MessageStore, topic: str) -> str:
    """Return the end of a "not found" message: a hint about light queues, or the topics of the store."""
    known = store.topics()
    if topic in known:
        if not is_light_queue(topic):
            return ""
        return (
            f"; {topic} is a light queue, whose messages were sent to other topics; read it with: rmqstore get "
            f"{shlex.quote(store.path)} {shlex.quote(topic)} 0"
        )
    if store.queues.unseen:
        return "; the topics of the store are unknown, because folders of queues cannot be read"
    near = did_you_mean(topic, known)
    if near:
        return f"; the store has no topic {topic}: {near}"
    rest = f" and {len(known) - 10} more" if len(known) > 10 else ""
    return f"; the store has no topic {topic}, only: {', '.join(known[:10]) or 'none'}{rest}"


def about_queues(store: MessageStore, topic: str, queue_ids: Iterable[int]) -> str:
    """Return the same as `about_topic`, or the queues of the topic if it lacks one of `queue_ids`."""
    known = [queue_id for name, queue_id in store.queues.keys() if name == topic]
    if known and any(queue_id not in known for queue_id in queue_ids):
        rest = f" and {len(known) - 20} more" if len(known) > 20 else ""
        return f"; the topic has queues: {', '.join(map(str, known[:20]))}{rest}"
    return about_topic(store, topic)


def uncovered_text(store: MessageStore, uncovered: tuple[tuple[int, int], ...], advice: str) -> str:
    """Return a message with the parts of the log that were not searched, by phy offset and store time."""
    size = sum(end - begin for begin, end in uncovered)
    shown = [
        f"phy offsets {begin} to {end} (stored {format_time(times[0])} to {format_time(times[1])})"
        for begin, end in uncovered[:5]
        for times in [store.commit_log.times_of(begin, end)]
    ]
    rest = f" and {len(uncovered) - 5} more ranges" if len(uncovered) > 5 else ""
    return f"{size} bytes of the log are not indexed and were not searched: {', '.join(shown)}{rest}; {advice}"


def _message_line(message: MessageExt, time: str) -> str:
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
    """Print a message as a line with its body below, by a format, or as a JSON object."""
    if printer.as_json:
        printer.json_line(message.json_row(form.body))
        return
    if form.line_format is not None:
        printer.line_of(form.line_format(message, form.body))
        return
    printer.line(_message_line(message, printer.time(message.store_timestamp, "milliseconds")))
    if form.body == "none":
        return
    try:
        raw = message.body
    except StoreError as error:
        if not message.corrupt:
            printer.line(f"    the body cannot be decompressed: {escape(error.message)}")
        raw = message.body_stored
    rest = len(raw) - _BODY_SHOWN
    shown = raw[:_BODY_SHOWN]
    text = shown.hex(" ") if form.body == "hex" else escape(shown.decode("utf-8", "backslashreplace"))
    printer.line(f"    {text}" + (f" ... {rest} more bytes, see --json" if rest > 0 else ""))


def _body(message: MessageExt) -> bytes:
    try:
        return message.body
    except StoreError:
        # It cannot be decompressed.
        return message.body_stored


def _keys_size(message: MessageExt) -> int:
    keys = message.keys
    return len(" ".join(keys).encode("utf-8", "surrogateescape")) if keys else -1


LETTERS: dict[str, tuple[str, Callable[[MessageExt], object]]] = {
    "t": ("topic", lambda message: message.topic),
    "p": ("queue id", lambda message: message.queue_id),
    "o": ("queue offset", lambda message: message.queue_offset),
    "k": ("keys, separated by spaces", lambda message: " ".join(message.keys)),
    "K": ("size of the keys in bytes, -1 without keys", _keys_size),
    "s": ("body, in the form of --body", lambda message: ""),
    "S": ("size of the body in bytes", lambda message: len(_body(message))),
    "T": ("store time, ms since epoch", lambda message: message.store_timestamp),
    "h": (
        "properties, name=value separated by commas",
        lambda message: ",".join(f"{name}={value}" for name, value in message.properties.items()),
    ),
    "d": ("store time, ISO 8601 in the local zone", lambda message: format_time(message.store_timestamp)),
    "b": ("born time, ISO 8601 in the local zone", lambda message: format_time(message.born_timestamp)),
    "B": ("born host", lambda message: message.born_host),
    "H": ("store host", lambda message: message.store_host),
    "g": ("tag", lambda message: message.tags or ""),
    "u": ("unique key", lambda message: message.unique_key or ""),
    "i": ("offset message id", lambda message: message.msg_id),
    "P": ("phy offset", lambda message: message.phy_offset),
    "z": ("size of the record in bytes", lambda message: message.size),
    "r": ("number of redeliveries", lambda message: message.reconsume_times),
}
_PIECE = re.compile(r"%(.?)|\\(x[0-9a-fA-F]{2}|.?)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


class LineFormat:
    """A parsed format string; ValueError for an unknown letter or escape."""

    def __init__(self, text: str):
        self._parts: list[str | tuple[str, Callable[[MessageExt], object]]] = []
        # One line a message, with or without a line end in the format.
        text = re.sub(r"(?<!\\)\\n$|\n$", "", text)
        at = 0
        for found in _PIECE.finditer(text):
            self._parts += [text[at : found.start()], self._piece(found)]
            at = found.end()
        self._parts.append(text[at:])

    def _piece(self, found: re.Match[str]) -> str | tuple[str, Callable[[MessageExt], object]]:
        letter, escaped = found[1], found[2]
        if letter == "%":
            return "%"
        if letter is not None:
            if letter not in LETTERS:
                what = f"unknown %{letter}" if letter else "% at the end"
                raise ValueError(f"{what}; use {' '.join('%' + each for each in LETTERS)} or %%")
            return letter, LETTERS[letter][1]
        if escaped.startswith("x"):
            return chr(int(escaped[1:], 16)) if len(escaped) == 3 else self._no_escape(escaped)
        return _ESCAPES[escaped] if escaped in _ESCAPES else self._no_escape(escaped)

    @staticmethod
    def _no_escape(text: str) -> str:
        raise ValueError(rf"unknown escape \{text}; use \n, \t, \r, \\ or \x and two hex digits")

    def __call__(self, message: MessageExt, body: str) -> Iterator[str]:
        """Yield the message in pieces; `body` is "text", "hex" or "none"."""
        for part in self._parts:
            if isinstance(part, str):
                yield part
            elif part[0] == "s":
                raw = b"" if body == "none" else _body(message)
                if body == "hex":
                    yield from BodyText(raw, "hex")
                else:
                    yield from (escape(piece) for piece in text_pieces(raw, "backslashreplace"))
            else:
                yield escape(str(part[1](message)))


class _FormatType(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    name = "FORMAT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> LineFormat:
        if isinstance(value, LineFormat):
            return value
        try:
            return LineFormat(value)
        except ValueError as error:
            self.fail(escape(str(error)), param, ctx)


format_option = click.option(
    "--format",
    "line_format",
    type=_FormatType(),
    help="Format of the line for each message: %t topic, %p queue, %o queue offset, %k keys, %s body, %T store time in ms, "
    "%h properties, and more (docs/cli.md); \\n and \\t as in C.",
)
