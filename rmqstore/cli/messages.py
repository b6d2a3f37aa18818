"""A message as a line, as text, as a JSON object, or as a format string says: ``--format '%t %k %s'``.

Owns how every command shows a message, and the letters of a format, which are kcat's where it has the same thing.  Invariant:
what a terminal may obey is escaped, line ends too in a format; JSON has the bytes.
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
        printer.json_line(message.json_row(form.body))
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


def _body(message: MessageExt) -> bytes:
    try:
        return message.body
    except StoreError:
        # It cannot be decoded, and is given as it is stored.
        return message.body_stored


def _keys_size(message: MessageExt) -> int:
    keys = message.keys
    return len(" ".join(keys).encode("utf-8", "surrogateescape")) if keys else -1


# By letter: what it is, and its value.
LETTERS: dict[str, tuple[str, Callable[[MessageExt], object]]] = {
    "t": ("topic", lambda message: message.topic),
    "p": ("queue id", lambda message: message.queue_id),
    "o": ("queue offset", lambda message: message.queue_offset),
    "k": ("keys, with a space between them", lambda message: " ".join(message.keys)),
    "K": ("bytes of the keys, -1 without any", _keys_size),
    "s": ("body, as --body says", lambda message: ""),
    "S": ("bytes of the body", lambda message: len(_body(message))),
    "T": ("store time, ms since epoch", lambda message: message.store_timestamp),
    "h": (
        "properties, name=value with commas between them",
        lambda message: ",".join(f"{name}={value}" for name, value in message.properties.items()),
    ),
    "d": ("store time, ISO 8601 in the local zone", lambda message: format_time(message.store_timestamp)),
    "b": ("born time, ISO 8601 in the local zone", lambda message: format_time(message.born_timestamp)),
    "B": ("born host", lambda message: message.born_host),
    "H": ("store host", lambda message: message.store_host),
    "g": ("tag", lambda message: message.tags or ""),
    "u": ("unique key, the producer's message id", lambda message: message.unique_key or ""),
    "i": ("offset message id", lambda message: message.msg_id),
    "P": ("phy offset", lambda message: message.phy_offset),
    "z": ("bytes in the log", lambda message: message.size),
    "r": ("how often it was given out again", lambda message: message.reconsume_times),
}
_PIECE = re.compile(r"%(.?)|\\(x[0-9a-fA-F]{2}|.?)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


class LineFormat:
    """A format string that was read; ValueError for a letter, or an escape, that means nothing."""

    def __init__(self, text: str):
        self._parts: list[str | tuple[str, Callable[[MessageExt], object]]] = []
        # A line a message, whether the format ends with one or not.
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
                what = f"%{letter} is not a part of a message" if letter else "it ends with a single %"
                raise ValueError(f"{what}; the letters are {' '.join('%' + each for each in LETTERS)} and %%")
            return letter, LETTERS[letter][1]
        if escaped.startswith("x"):
            return chr(int(escaped[1:], 16)) if len(escaped) == 3 else self._no_escape(escaped)
        return _ESCAPES[escaped] if escaped in _ESCAPES else self._no_escape(escaped)

    @staticmethod
    def _no_escape(text: str) -> str:
        raise ValueError(rf"\{text} is not an escape: write \n, \t, \r, \\ or \x and two hex digits")

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
    help="A line for each message: %t topic, %p queue, %o queue offset, %k keys, %s body, %T store time in ms, %h "
    "properties, and more (docs/cli.md); \\n and \\t as in C.",
)
