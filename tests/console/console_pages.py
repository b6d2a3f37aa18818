"""Rules for every response of the console, and a crawler that checks all of them.

Owns the rules (headers, no inline script or style, nothing from elsewhere, no invisible characters) and the order of the walk.
It reads HTML with the standard library's parser, so that character references are seen as what a browser makes of them.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import urlencode, urljoin, urlsplit

from console_server import Answer, ConsoleServer

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_LOADS = {"src", "srcset", "poster", "data", "background", "manifest"}
_LEADS = {"href", "action", "formaction", "xlink:href", "ping", "cite"}
_FORBIDDEN = {"base", "embed", "frame", "iframe", "object", "style", "applet", "template"}


@dataclass
class Page:
    """A parsed page: its elements, its text, and what breaks the rules."""

    elements: Counter[str] = field(default_factory=Counter)
    links: list[str] = field(default_factory=list)
    forms: list[tuple[str, str, list[tuple[str, str]]]] = field(default_factory=list)
    text: str = ""
    title: str = ""
    headings: list[str] = field(default_factory=list)
    language: str | None = None
    faults: list[str] = field(default_factory=list)


def invisible(text: str) -> list[str]:
    """The characters of `text` that a reader cannot see or that move what follows, as hexadecimal code points."""
    odd = {character for character in text if character not in "\n\r\t" and unicodedata.category(character) in
           ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")}  # fmt: skip
    # The soft hyphen is how HTML says where a long word may break.
    return sorted(f"U+{ord(character):04X}" for character in odd if character != "\xad")


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.texts: list[str] = []

    def fault(self, what: str) -> None:
        self.page.faults.append(f"line {self.getpos()[0]}: {what}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        page = self.page
        page.elements[tag] += 1
        if tag not in _VOID:
            self.open.append(tag)
        if tag in _FORBIDDEN:
            self.fault(f"<{tag}> in a page")
        values = {name: value or "" for name, value in attrs}
        if len(values) != len(attrs):
            self.fault(f"<{tag}> with an attribute twice: {attrs}")
        for name, value in values.items():
            if name.startswith("on") or name in ("style", "srcdoc"):
                self.fault(f"<{tag} {name}={value!r}>: inline script or style")
            if name in _LOADS | _LEADS:
                self._address(tag, name, value)
            # A field must hold what it was given, or asking again would ask for something else.
            if not (name == "value" and tag in ("input", "option")) and (odd := invisible(value)):
                self.fault(f"<{tag} {name}={value!r}> has {odd}")
        if "id" in values:
            self.ids[values["id"]] += 1
        if tag == "html":
            page.language = values.get("lang")
        if tag == "script" and "src" not in values and values.get("type") not in ("application/json",):
            self.fault("a script without src")
        if tag == "meta" and values.get("http-equiv", "").lower() not in ("", "x-ua-compatible", "refresh"):
            self.fault(f"<meta http-equiv={values['http-equiv']!r}>")
        if tag == "meta" and values.get("http-equiv", "").lower() == "refresh" and "url" in values["content"].lower():
            self.fault(f"a page that leads elsewhere by itself: {values['content']!r}")
        if tag == "a" and "href" in values:
            page.links.append(values["href"])
        if tag == "form":
            page.forms.append((values.get("method", "get").lower(), values.get("action", ""), []))
        if tag in ("input", "select", "textarea") and page.forms and "form" in self.open and "name" in values:
            kind = values.get("type", "")
            if kind not in ("submit", "button", "reset") and (kind not in ("checkbox", "radio") or "checked" in values):
                page.forms[-1][2].append((values["name"], values.get("value", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if "script" in self.open and data.strip():
            self.fault(f"a script in the page: {data[:80]!r}")
        if odd := invisible(data):
            self.fault(f"text has {odd}: {data[:80]!r}")
        if self.open and self.open[-1] == "title" and "svg" not in self.open:
            self.page.title += data
        if self.open and self.open[-1] == "h1":
            self.page.headings.append(data)
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        if "pwned" in data:
            self.fault(f"a comment holds text of the store: {data[:80]!r}")

    def _address(self, tag: str, name: str, value: str) -> None:
        parts = urlsplit(value.strip())
        if parts.scheme not in ("", "http", "https") or (name in _LOADS and parts.scheme):
            self.fault(f"<{tag} {name}={value[:80]!r}> leads to {parts.scheme}")
        elif parts.netloc:
            self.fault(f"<{tag} {name}={value[:80]!r}> leads to another host")


def parse(text: str) -> Page:
    """Parse a page and note what breaks the rules."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    page = parser.page
    page.text = "".join(parser.texts)
    page.faults += [f"the id {name!r} comes {count} times" for name, count in parser.ids.items() if count > 1]
    if page.elements["html"] != 1 or page.elements["body"] != 1:
        page.faults.append(f"{page.elements['html']} html and {page.elements['body']} body elements")
    if not page.language:
        page.faults.append("no language")
    if page.elements["h1"] != 1 or not "".join(page.headings).strip():
        page.faults.append(f"{page.elements['h1']} headings of the first rank: {page.headings}")
    if page.elements["main"] != 1:
        page.faults.append(f"{page.elements['main']} main elements")
    if not page.title.strip():
        page.faults.append("no title")
    return page


def directives(policy: str | None) -> dict[str, list[str]]:
    """The directives of a content security policy."""
    assert policy, "there is no content security policy"
    found: dict[str, list[str]] = {}
    for part in policy.split(";"):
        name, *values = part.split()
        assert name not in found, f"{name} comes twice in {policy!r}"
        found[name] = values
    return found


def header_faults(answer: Answer) -> list[str]:
    """Return the headers that a response lacks."""
    faults = []
    try:
        policy = directives(answer.header("content-security-policy"))
    except AssertionError as error:
        return [str(error)]
    for name, values in policy.items():
        for value in values:
            if value not in ("'none'", "'self'") and not (name == "img-src" and value == "data:"):
                faults.append(f"the policy allows {value} as {name}")
    if policy.get("default-src") not in (["'none'"], ["'self'"]):
        faults.append(f"default-src is {policy.get('default-src')}")
    # These do not fall back to default-src.
    for name, allowed in (("frame-ancestors", [["'none'"]]), ("base-uri", [["'none'"], ["'self'"]]),
                          ("form-action", [["'none'"], ["'self'"]])):  # fmt: skip
        if policy.get(name) not in allowed:
            faults.append(f"{name} is {policy.get(name)}")
    if answer.header("x-content-type-options") != "nosniff":
        faults.append(f"x-content-type-options is {answer.header('x-content-type-options')}")
    if answer.header("referrer-policy") not in ("no-referrer", "same-origin"):
        faults.append(f"referrer-policy is {answer.header('referrer-policy')}")
    for name in ("access-control-allow-origin", "x-powered-by"):
        if answer.header(name) is not None:
            faults.append(f"{name} is {answer.header(name)}")
    if re.search(r"uvicorn|python|starlette", (answer.header("server") or ""), re.IGNORECASE):
        faults.append(f"the server says what it runs on: {answer.header('server')}")
    return faults


def answer_faults(answer: Answer) -> list[str]:
    """Return the faults of a response: headers, and the page or the JSON."""
    faults = header_faults(answer)
    kind = (answer.header("content-type") or "").replace(" ", "").lower()
    if kind == "text/html;charset=utf-8":
        faults += parse(answer.text).faults
        # A name or value that would start a script where the parser above is mistaken.
        if re.search(rb"<script>window|<img src=x|<svg onload|<iframe", answer.body):
            faults.append("markup of the store stands in the page")
    elif kind.startswith("application/json"):
        try:
            answer.json()
        except ValueError as error:
            faults.append(f"no JSON: {error}")
    elif kind == "application/octet-stream":
        if not (answer.header("content-disposition") or "").startswith("attachment"):
            faults.append(f"a download with content-disposition {answer.header('content-disposition')}")
    elif not kind.startswith(
        ("text/css", "text/javascript", "application/javascript", "text/plain", "image/", "text/event-stream")
    ):
        faults.append(f"content type {kind!r}")
    if b"Traceback (most recent" in answer.body and b"pwned" not in answer.body:
        faults.append("a traceback")
    return faults


def route(target: str) -> str:
    """The target without its values, which stands for all that look like it."""
    parts = urlsplit(target)
    segments = [segment for segment in parts.path.split("/") if segment]
    names = sorted({pair.partition("=")[0] for pair in parts.query.split("&") if pair})
    fixed = 2 if segments[:1] == ["api"] else 1
    return "/" + "/".join(segments[:fixed] + ["*"] * (len(segments) - fixed)) + "?" + "&".join(names)


def walk(
    server: ConsoleServer,
    start: Iterable[str] = ("/",),
    *,
    each: int = 8,
    limit: int = 250,
    statuses: Iterable[int] = (200,),
) -> tuple[Counter[str], list[str]]:
    """Follow links and GET forms from `start`, at most `each` of a route; count answers by route, list what is wrong."""
    seen: set[str] = set()
    routes: Counter[str] = Counter()
    faults: list[str] = []
    waiting = deque((target, "the start") for target in start)
    allowed = set(statuses)
    while waiting and sum(routes.values()) < limit:
        target, origin = waiting.popleft()
        name = route(target)
        if target in seen or routes[name] >= each:
            continue
        seen.add(target)
        if "/events" in target:
            continue  # a stream that does not end
        routes[name] += 1
        answer = server.get(target)
        where = f"{target} (linked from {origin})"
        if answer.status not in allowed:
            faults.append(f"{where}: status {answer.status}: {answer.body[:200]!r}")
        faults += [f"{where}: {fault}" for fault in answer_faults(answer)]
        if not (answer.header("content-type") or "").startswith("text/html"):
            continue
        page = parse(answer.text)
        found = list(page.links)
        for method, action, fields in page.forms:
            if method == "get":
                found.append(urljoin(target, action or target).partition("?")[0] + "?" + urlencode(fields))
        for link in found:
            parts = urlsplit(urljoin(target, link))
            if not parts.netloc:
                waiting.append((parts.path + ("?" + parts.query if parts.query else ""), target))
    return routes, faults
