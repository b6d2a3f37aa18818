"""A message on one line, as a format string says: ``--format '%t %k %s'``.

Owns the letters, those of kcat where it has the same thing.  What a terminal may obey is escaped in every value, line
ends too, so that a message is one line wherever the output goes; ``--json`` and ``export`` have the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import click

from rmqstore.cli.terminal import escape, format_time
from rmqstore.errors import StoreError
from rmqstore.message import BodyText, MessageExt, text_pieces

__all__ = ["LETTERS", "LineFormat", "format_option"]


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
    """A format string that was read.

    Raises
    ------
    ValueError
        It has a letter, or an escape, that means nothing.
    """

    def __init__(self, text: str):
        self._parts: list[str | tuple[str, Callable[[MessageExt], object]]] = []
        at = 0
        for found in _PIECE.finditer(text):
            self._parts += [text[at : found.start()], self._piece(found)]
            at = found.end()
        self._parts.append(text[at:])
        # A line a message, whether the format ends with one or not.
        last = "".join(part if isinstance(part, str) else part[0] for part in self._parts)
        if last.endswith("\n"):
            while not self._parts[-1]:
                self._parts.pop()
            end = self._parts.pop()
            assert isinstance(end, str)
            self._parts.append(end.removesuffix("\n"))

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
