"""Pages: templates, addresses, charts, and the views of a body.

Every value in a page is escaped; the filter ``t`` also makes invisible characters visible.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jinja2
from starlette.responses import Response
from starlette.types import Scope

from rmqstore._version import __version__
from rmqstore.console.questions import PENDING_KINDS
from rmqstore.console.rows import file_name, in_order, other_way, sums
from rmqstore.texts import escape, format_size, format_time

__all__ = ["JSON_SHOWN", "body_view", "json_text", "render", "url"]

_BODY_SHOWN = 64 * 1024
JSON_SHOWN = 512 * 1024
# The tokens of a valid JSON document.
_JSON_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+)', re.DOTALL)
_INDENT_DEPTH = 40
# Charts: horizontal positions are per cent of the page's width, vertical ones pixels.
_NAME_SHOWN = 34
_COLUMN_HEIGHT = 120
_TOP = 24
_ROW_HEIGHT = 40


def url(root: str, *segments: object, **query: object) -> str:
    """Return an address of the console; each of `segments` is one segment of the path, whatever it contains."""
    path = "/".join(urllib.parse.quote(str(each), safe="", errors="surrogateescape") for each in segments)
    left = {name: str(value) for name, value in query.items() if value is not None and value != ""}
    return f"{root}/{path}" + (f"?{urllib.parse.urlencode(left, errors='surrogateescape')}" if left else "")


def render(scope: Scope, template: str, status: int = 200, /, **values: Any) -> Response:
    """Render a template with these values as a page."""
    root = scope.get("root_path", "")

    def below(*segments: object, **query: object) -> str:
        return url(root, *segments, **query)

    path = scope["path"].removeprefix(root).split("/")
    text = _templates().get_template(template).render(url=below, here=path[1] if len(path) > 1 else "", **values)
    # Any stray bytes of file names that the template did not escape become "?".
    return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rmqstore.console", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "t": lambda text: "" if text is None else escape(str(text)),
        "lines": _lines,
        "time": format_time,
        "size": format_size,
        "duration": _duration,
        "in_order": in_order,
        "below": file_name,
    }
    environment.filters |= filters
    environment.globals |= {
        "version": __version__, "other_way": other_way, "sums": sums, "bars": _bars, "time_columns": _time_columns,
        "size": format_size, "duration": _duration, "pending_kinds": PENDING_KINDS,
    }  # fmt: skip
    return environment


def _duration(ms: float | None) -> str:
    if ms is None:
        return "-"
    seconds = abs(ms) / 1000
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


# -------------------------------------------------------------------------------------------------------------------- charts


def _time_columns(bins: Sequence[Mapping[str, Any]], what: str, show: Callable[[Any], str] = str) -> dict[str, Any]:
    """Return a column for each bin of a timeline, as high as its `what`, "messages" or "bytes"."""
    greatest = max((each[what] for each in bins), default=0)
    step = 100 / max(len(bins), 1)
    return {
        "height": _TOP + _COLUMN_HEIGHT + 28,
        "axis": _TOP + _COLUMN_HEIGHT,
        "top": _TOP,
        "greatest": show(greatest),
        "ends": (format_time(bins[0]["begin"]), format_time(bins[-1]["end"])) if bins else ("", ""),
        "columns": [
            {
                "x": round(number * step + step * 0.08, 3),
                "width": round(step * 0.84, 3),
                "y": round(_TOP + _COLUMN_HEIGHT * (1 - each[what] / (greatest or 1)), 1),
                "height": round(_COLUMN_HEIGHT * each[what] / (greatest or 1), 1),
                "name": format_time(each["begin"]),
                "value": show(each[what]),
            }
            for number, each in enumerate(bins)
        ],
    }


def _bars(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    value: str,
    show: str | Callable[[Any], str] = "{}",
    *,
    whole: float | None = None,
    logarithmic: bool = False,
) -> dict[str, Any]:
    """Return a bar for each row, with its `name` on the left and its `value`, formatted by `show`, on the right.

    `whole` is the value of a full bar, by default the greatest.
    """
    values = [max(row[value] or 0, 0) for row in rows]
    lengths = [math.log10(each + 1) if logarithmic else each for each in values]
    names = [escape(str(row[name])) for row in rows]
    highest = whole if whole is not None else max(lengths, default=0)
    return {
        "height": _ROW_HEIGHT * len(rows),
        "rows": [
            {
                "text_y": _ROW_HEIGHT * number + 14,
                "y": _ROW_HEIGHT * number + 20,
                "width": round(min(100 * length / highest, 100), 2) if highest > 0 else 0,
                "name": text if len(text) <= _NAME_SHOWN else text[: _NAME_SHOWN - 1] + "…",
                "value": show.format(each) if isinstance(show, str) else show(each),
            }
            for number, (text, each, length) in enumerate(zip(names, values, lengths, strict=True))
        ],
    }


# -------------------------------------------------------------------------------------------------------------------- bodies


def body_view(body: bytes, mode: str, start: int) -> dict[str, Any]:
    """Return a part of a body as text, JSON or hex; if `mode` is empty, in the view that fits."""
    start = min(start, max(len(body) - 1, 0))
    part = body[start : start + _BODY_SHOWN]
    note, document = "", None
    if mode == "json" or (not mode and start == 0 and body[:64].lstrip()[:1] in (b"{", b"[")):
        document = json_text(body, JSON_SHOWN) if len(body) <= JSON_SHOWN else None
        if document is None and mode == "json":
            note, mode = "The body is not JSON, or is too long to format; this is its text.", "text"
    if not mode:
        mode = "json" if document is not None else "text" if _is_text(part) else "hex"
    if mode == "json":
        assert document is not None
        shown, start, part = _lines(document), 0, body
    elif mode == "text":
        shown = _lines(part.decode("utf-8", "backslashreplace"))
    else:
        shown = "\n".join(_hex_lines(part, start))
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


def json_text(body: bytes, limit: int) -> str | None:
    """Return a JSON body indented, with its values unchanged, cut after about `limit` characters; None if it is not JSON."""
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


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _lines(text: str) -> str:
    return "\n".join(escape(line) for line in text.replace("\r\n", "\n").split("\n"))


def _is_text(part: bytes) -> bool:
    try:
        # A character may be cut at the end of the part.
        codecs.getincrementaldecoder("utf-8")().decode(part)
        return True
    except UnicodeDecodeError:
        return False


def _hex_lines(data: bytes, first: int, width: int = 16) -> Iterator[str]:
    for at in range(0, len(data), width):
        part = data[at : at + width]
        plain = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        yield f"{first + at:>10}  {part.hex(' '):<47}  {plain}"
