"""Messages as notebooks show them: short tables of HTML.

Owns how fields are shown; which ones a message has, it says itself.  Everything in a message is hostile: all of it is
escaped and cut (`rmqstore.texts`), and a compressed body is not decompressed for a look at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rmqstore.texts import format_time, html_table, preview

__all__ = ["message_html", "messages_html", "shown_body"]

_ROWS = 10
_HEADER = ("topic", "queue", "queue offset", "stored", "keys", "tags", "body")


def message_html(message: Any, kind: str, fields: Iterable[tuple[str, object]], body: str) -> str:
    """str: a `Message` or `MessageExt`, a field a line: `fields`, keys, tags, some of the properties, and the body."""
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
    """str: the first of some `MessageExt`, one a line; the caption ends with how many there are."""
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
    """str: what a line says of a body as it is stored."""
    if corrupt:
        return f"corrupt: {preview(stored)}"
    return f"compressed, {len(stored)} bytes" if sys_flag & 1 else preview(stored)


def _keys(message: Any) -> str:
    return ", ".join(message.keys[:_ROWS])
