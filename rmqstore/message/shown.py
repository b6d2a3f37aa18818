"""Messages as HTML tables in notebooks, and bodies as text.

A few stored bytes may be a large body, and its text may take six times its bytes (a zero is ``\\u0000`` in JSON), so the
text of a large body is returned in pieces.  Everything in a message is hostile: tables escape and cut it
(`rmqstore.texts`), and do not decompress a body.
"""

from __future__ import annotations

import base64
import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rmqstore.texts import format_time, html_table, preview

__all__ = ["BodyText", "body_text", "json_pieces", "message_html", "messages_html", "shown_body", "text_pieces"]

# The largest body that becomes one text; the size of a piece of a larger one, a multiple of three for base64.
_WHOLE = 256 * 1024
_PIECE = 48 * 1024
_ROWS = 10
_HEADER = ("topic", "queue", "queue offset", "stored", "keys", "tags", "body")


class BodyText:
    """The text of a large body: iterate over its pieces.

    Parameters
    ----------
    body : bytes
    encoding : {"utf-8", "hex", "base64"}
    """

    def __init__(self, body: bytes, encoding: str):
        self._body, self._encoding = body, encoding

    def __iter__(self) -> Iterator[str]:
        if self._encoding == "utf-8":
            yield from text_pieces(self._body)
            return
        for first in range(0, len(self._body), _PIECE):
            piece = self._body[first : first + _PIECE]
            yield piece.hex() if self._encoding == "hex" else base64.b64encode(piece).decode("ascii")

    def __str__(self) -> str:
        return "".join(self)


def text_pieces(body: bytes, errors: str = "strict") -> Iterator[str]:
    """Decode UTF-8 piece by piece; `errors` as in `bytes.decode`."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    for first in range(0, len(body), _PIECE):
        yield decoder.decode(body[first : first + _PIECE], first + _PIECE >= len(body))


def _is_text(body: bytes) -> bool:
    try:
        for _ in text_pieces(body):
            pass
        return True
    except UnicodeDecodeError:
        return False


def body_text(body: bytes, form: str = "text", zeros: bool = True) -> tuple[str | BodyText, str]:
    """Return a body as text, and its encoding.

    Parameters
    ----------
    body : bytes
    form : {"text", "hex", "base64"}
        With ``text`` a body that is not UTF-8 becomes base64.
    zeros : bool
        False: a body with zero bytes becomes base64 too.
    """
    if form == "text":
        encoding = "utf-8" if (zeros or b"\0" not in body) and _is_text(body) else "base64"
    else:
        encoding = form
    text = BodyText(body, encoding)
    return (str(text) if len(body) <= _WHOLE else text), encoding


def json_pieces(value: Mapping[str, Any], encode: Callable[[Any], str]) -> Iterator[str]:
    """Encode an object as JSON, a `BodyText` in pieces; `encode` makes JSON of everything else."""
    if not any(type(item) is BodyText for item in value.values()):
        yield encode(value)
        return
    lead = "{"
    for name, item in value.items():
        yield f"{lead}{encode(name)}:"
        lead = ","
        if type(item) is BodyText:
            yield '"'
            for piece in item:
                yield encode(piece)[1:-1]
            yield '"'
        else:
            yield encode(item)
    yield "}"


def message_html(message: Any, kind: str, fields: Iterable[tuple[str, object]], body: str) -> str:
    """Return a `Message` or `MessageExt` as a table: `fields`, keys, tags, some of the properties, and the body."""
    rows = [*fields, ("keys", _keys(message)), ("tags", message.tags)]
    if message.born_timestamp is not None:
        rows.append(("born", format_time(message.born_timestamp)))
    others = [(name, value) for name, value in message.properties.items() if name not in ("KEYS", "TAGS")]
    rows += others[:_ROWS]
    if len(others) > _ROWS:
        rows.append(("properties", f"{len(others) - _ROWS} more"))
    rows.append(("body", body))
    return html_table(kind, (), [(name, "" if value is None else value) for name, value in rows])


def messages_html(messages: Sequence[Any], caption: str) -> str:
    """Return the first messages as a table, one a line; the caption ends with their number."""
    rows = [
        (
            message.topic, message.queue_id, message.queue_offset, format_time(message.store_timestamp), _keys(message),
            message.tags or "", shown_body(message.body_stored, message.sys_flag, not message.crc_agrees),
        )
        for message in messages[:_ROWS]
    ]  # fmt: skip
    more = f"; the first {_ROWS} of {len(messages)}" if len(messages) > _ROWS else ""
    return html_table(caption + more, _HEADER, rows)


def shown_body(stored: bytes, sys_flag: int = 0, corrupt: bool = False) -> str:
    """Return a stored body as text for a cell of a table."""
    if corrupt:
        return f"corrupt: {preview(stored)}"
    return f"compressed, {len(stored)} bytes" if sys_flag & 1 else preview(stored)


def _keys(message: Any) -> str:
    return ", ".join(message.keys[:_ROWS])
