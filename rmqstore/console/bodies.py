"""Bodies as a page shows them: as text, as JSON laid out again, as hexadecimal; in parts.

Owns these three views.  What they give is text with everything invisible made visible; a template escapes it.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from rmqstore.console.anatomy import hex_lines
from rmqstore.texts import escape

__all__ = ["JSON_SHOWN", "body_view", "json_text", "lines"]

_BODY_SHOWN = 64 * 1024
JSON_SHOWN = 512 * 1024
# Everything that a JSON document is made of; it was parsed before, so that nothing else occurs.
_JSON_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+)', re.DOTALL)
_INDENT_DEPTH = 40


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def json_text(body: bytes, limit: int) -> str | None:
    """str: a body that is JSON, indented, each of its values spelled as it was; None where it is none.

    Parameters
    ----------
    limit : int
        About how many characters to give at most; an ellipsis stands for the rest.
    """
    try:
        text = body.decode("utf-8")
        json.loads(text, parse_constant=_no_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    out: list[str] = []
    size = depth = 0
    before = ""
    for match in _JSON_TOKEN.finditer(text):
        token = match[1]
        if token in "]}":
            depth -= 1
        broken = before and (
            (before in "[{," and not (before in "[{" and token in "]}")) or (token in "]}" and before not in "[{")
        )
        if broken:
            out.append("\n" + "  " * min(depth, _INDENT_DEPTH))
            size += len(out[-1])
        out.append(token + " " if token == ":" else token)
        size += len(token)
        if token in "[{":
            depth += 1
        before = token
        if size > limit:
            out.append("\n…")
            break
    return "".join(out)


def lines(text: str) -> str:
    """str: a body as text, line by line, with everything invisible made visible."""
    return "\n".join(escape(line) for line in text.replace("\r\n", "\n").split("\n"))


def _is_text(part: bytes) -> bool:
    try:
        # A character may be cut at the end of the part.
        codecs.getincrementaldecoder("utf-8")().decode(part)
        return True
    except UnicodeDecodeError:
        return False


def body_view(body: bytes, mode: str, start: int) -> dict[str, Any]:
    """What a page shows of a body: in the mode that was asked for, or in the one that fits."""
    start = min(start, max(len(body) - 1, 0))
    part = body[start : start + _BODY_SHOWN]
    note, document = "", None
    if mode == "json" or (not mode and start == 0 and body[:64].lstrip()[:1] in (b"{", b"[")):
        document = json_text(body, JSON_SHOWN) if len(body) <= JSON_SHOWN else None
        if document is None and mode == "json":
            note, mode = "The body is no JSON, or too long to be laid out; this is its text.", "text"
    if not mode:
        mode = "json" if document is not None else "text" if _is_text(part) else "hex"
    if mode == "json":
        assert document is not None
        shown, start, part = lines(document), 0, body
    elif mode == "text":
        shown = lines(part.decode("utf-8", "backslashreplace"))
    else:
        shown = "\n".join(f"{pos:>10}  {text:<47}  {plain}" for pos, text, plain in hex_lines(part, start))
    following = start + len(part)
    return {
        "mode": mode,
        "shown": shown,
        "body_note": note,
        "body_first": start,
        "body_end": following,
        "body_length": len(body),
        "body_older": max(0, start - _BODY_SHOWN) if start else None,
        "body_newer": following if following < len(body) else None,
    }
