"""Templates and what they are given: filters, addresses, the page as a response.

Owns the environment in which every template is rendered.  It escapes whatever a template puts into a page; the filter ``t``
also makes visible what cannot be seen.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from functools import cache
from typing import Any

import jinja2
from starlette.responses import Response
from starlette.types import Scope

from rmqstore._version import __version__
from rmqstore.console.bodies import lines
from rmqstore.console.lists import other_way
from rmqstore.texts import escape, format_size, format_time

__all__ = ["duration", "render", "url"]


def url(root: str, *segments: object, **query: object) -> str:
    """str: an address of the console; a text of the store is one segment, whatever is in it."""
    path = "/".join(urllib.parse.quote(str(each), safe="", errors="surrogateescape") for each in segments)
    left = {name: str(value) for name, value in query.items() if value is not None and value != ""}
    return f"{root}/{path}" + (f"?{urllib.parse.urlencode(left, errors='surrogateescape')}" if left else "")


def duration(ms: float | None) -> str:
    """str: a length of time for people."""
    if ms is None:
        return "-"
    seconds = abs(ms) / 1000
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


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
        "lines": lines,
        "time": format_time,
        "size": format_size,
        "duration": duration,
    }
    environment.filters |= filters
    environment.globals |= {"version": __version__, "other_way": other_way}
    return environment


def _html(text: str, status: int = 200) -> Response:
    # What no UTF-8 holds (a file name's stray bytes) was made visible before; anything left becomes "?".
    return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")


def render(scope: Scope, template: str, status: int = 200, /, **values: Any) -> Response:
    """Response: a template as a page; `values` are what it shows."""
    root = scope.get("root_path", "")

    def below(*segments: object, **query: object) -> str:
        return url(root, *segments, **query)

    path = scope["path"].removeprefix(root).split("/")
    text = _templates().get_template(template).render(url=below, here=path[1] if len(path) > 1 else "", **values)
    return _html(text, status)
