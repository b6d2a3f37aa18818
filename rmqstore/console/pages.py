"""The pages of the console.

Owns what each address shows and how an error looks; the answers come from `rmqstore.console.answers`.  Text of a store
gets into a page only through a template that escapes it, with control and bidirectional characters made visible.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib
import json
import logging
import math
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import resources
from typing import Any, TypeVar

import anyio
import jinja2
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from rmqstore._version import __version__
from rmqstore.config import StoreConfig
from rmqstore.console.anatomy import file_name, hex_lines
from rmqstore.console.answers import LARGE_BODY, Answers, BadQueryError, NotFoundError, json_text
from rmqstore.console.followed_store import FollowedStore, StoreGoneError
from rmqstore.console.gate import Gate, is_for_programs, local_address, path_of, way_back
from rmqstore.console.rabbitmq_answers import RabbitmqAnswers
from rmqstore.console.verify_run import VerifyRun
from rmqstore.errors import GeometryError, StoreError
from rmqstore.texts import escape, format_size, format_time, parse_time

__all__ = ["Console", "Entrance", "Pages", "error_page", "refused_page"]

logger = logging.getLogger(__name__)

_INT64_MAX = 2**63 - 1
_BODY_SHOWN = 64 * 1024
_JSON_SHOWN = 512 * 1024
_LIST_SHOWN = 200
_LARGEST_LOGIN = 16 * 1024
_DOWNLOADS_AT_ONCE = 4
_DOWNLOAD_PART = 256 * 1024
# Seconds that a reader may take nothing; who sleeps does not keep others from downloading.
_DOWNLOAD_PATIENCE = 60
_METRICS_KEPT = 1.0
_PENDING_KEPT = 10.0
# What a verify run goes by and the files do not always tell; the command line notes the same.
_TOLD_BY_NO_FILE = ("message_delay_level", "index_tags")
KEY_TYPES = {"": None, "any": None, "unique": "U", "key": "K", "tag": "T"}
_STATIC_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Response])


# ------------------------------------------------------------------------------------------------------------- templates


def _url(root: str, *segments: object, **query: object) -> str:
    """str: an address of the console; a text of the store is one segment, whatever is in it."""
    path = "/".join(urllib.parse.quote(str(each), safe="", errors="surrogateescape") for each in segments)
    left = {name: str(value) for name, value in query.items() if value is not None and value != ""}
    return f"{root}/{path}" + (f"?{urllib.parse.urlencode(left, errors='surrogateescape')}" if left else "")


def _duration(ms: float | None) -> str:
    if ms is None:
        return "-"
    seconds = abs(ms) / 1000
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _lines(text: str) -> str:
    """str: a body as text, line by line, with everything invisible made visible."""
    return "\n".join(escape(line) for line in text.replace("\r\n", "\n").split("\n"))


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
    }
    environment.filters |= filters
    environment.globals |= {"version": __version__}
    return environment


def _html(text: str, status: int = 200) -> Response:
    # What no UTF-8 holds (a file name's stray bytes) was made visible before; anything left becomes "?".
    return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")


def _render(scope: Scope, template: str, status: int = 200, /, **values: Any) -> Response:
    root = scope.get("root_path", "")

    def url(*segments: object, **query: object) -> str:
        return _url(root, *segments, **query)

    path = scope["path"].removeprefix(root).split("/")
    text = _templates().get_template(template).render(url=url, here=path[1] if len(path) > 1 else "", **values)
    return _html(text, status)


def _error(scope: Scope, status: int, title: str, text: str) -> Response:
    if is_for_programs(path_of(scope)):
        return JSONResponse({"error": text, "status": status}, status)
    shown: dict[str, Any] = {"title": title, "text": text}
    known = getattr(scope["app"].state, "stores", {}).get(scope.get("root_path", ""))
    if known is not None:
        shown |= {"store_path": known[0], "with_rabbitmq": known[1]}
    return _render(scope, "error.html", status, **shown)


def refused_page(scope: Scope) -> Response:
    """Response: 401, with a form for the token."""
    if is_for_programs(path_of(scope)):
        response: Response = JSONResponse({"error": "give the token: Authorization: Bearer …", "status": 401}, 401)
    else:
        response = _render(scope, "login.html", 401, next=way_back(scope))
    response.headers["WWW-Authenticate"] = 'Bearer realm="rmqstore"'
    return response


async def error_page(request: Request, error: Exception) -> Response:
    """Response: for an address that is none, or a method that it does not take."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = _error(request.scope, 405, "Not like that", "This address does not take that method.")
        response.headers.update(error.headers or {})
        return response
    return _error(request.scope, 404, "Not found", "There is no page at this address.")


def answering(endpoint: _Endpoint) -> _Endpoint:
    """Make what goes wrong in a page or an API call a sentence with a status; never a traceback."""

    @wraps(endpoint)
    def wrapped(self: Any, request: Request) -> Response:
        scope = request.scope
        try:
            try:
                return endpoint(self, request)
            except GeometryError:
                # The sizes were perhaps told by files of a store in the making; they are asked again where none were given.
                return endpoint(self, request)
        except NotFoundError as error:
            return _error(scope, 404, "Not found", str(error))
        except BadQueryError as error:
            return _error(scope, 400, "That cannot be asked", str(error))
        except StoreGoneError as error:
            response = _error(scope, 503, "The store is gone", str(error))
            response.headers["Retry-After"] = "5"
            return response
        except (StoreError, OSError) as error:
            text = str(error)
            if isinstance(error, GeometryError):
                text += ". Options are given to rmqstore serve as -o NAME=VALUE, or with --config broker.conf."
            response = _error(scope, 503, "The store cannot be read now", text)
            response.headers["Retry-After"] = "2"
            return response
        except Exception:
            logger.exception("an error at %s", escape(scope["path"]))
            return _error(
                scope, 500, "An error in the console", "This is an error in rmqstore; the server's log has it."
            )

    return wrapped  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------------------ parameters


def whole_number(request: Request, name: str, default: int | None, low: int = 0, high: int = _INT64_MAX) -> int | None:
    """int: a parameter of the address; `default` where it is missing or empty.

    Raises
    ------
    BadQueryError
        It is no whole number, or out of range.
    """
    text = request.query_params.get(name, "").strip()
    if not text:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19 and low <= int(text) <= high):
        raise BadQueryError(f"{name} is {text[:40]!r}: give a whole number from {low} to {high}")
    return int(text)


def some_number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """int: as `whole_number`, which has a default."""
    value = whole_number(request, name, default, low, high)
    assert value is not None
    return value


def time_of(request: Request, name: str) -> int | None:
    """int: a time of the address in ms since epoch, None where it is missing or empty."""
    text = request.query_params.get(name, "").strip()
    if not text:
        return None
    try:
        value = parse_time(text[:100])
    except ValueError as error:
        raise BadQueryError(f"{name}: {error}") from None
    if not -_INT64_MAX <= value <= _INT64_MAX:
        raise BadQueryError(f"{name} is out of range")
    return value


def choice(request: Request, name: str, choices: Sequence[str]) -> str:
    """str: one of `choices`, of which the first is the default."""
    value = request.query_params.get(name, "") or choices[0]
    if value not in choices:
        raise BadQueryError(f"{name} is {value[:40]!r}: give one of {', '.join(each for each in choices if each)}")
    return value


def place_of(request: Request) -> int:
    """int: the phy offset in the address."""
    phy_offset = request.path_params["phy_offset"]
    if phy_offset > _INT64_MAX:
        raise NotFoundError("no log is that long")
    return int(phy_offset)


# ------------------------------------------------------------------------------------------------------------- the pages


def metrics_text(path: str, config: StoreConfig | None, run: VerifyRun, with_pending: bool = False) -> bytes:
    """bytes: the metrics of the store at `path`; those of findings if a run was finished; those of what waits if asked.

    Raises
    ------
    StoreError
        A library is missing, or the store cannot be read.
    """
    # Loaded when it is asked for: the other pages do without its library.
    metrics = importlib.import_module("rmqstore.offline.metrics")
    last = run.last_finished()
    findings = None if last is None else metrics.Findings(last[0], last[1])
    text: bytes = metrics.text(path, config, findings=findings, with_pending=with_pending)
    return text


PENDING_KINDS = ("delayed", "timer", "transaction", "retry", "dlq")


class Console:
    """What pages and API of one store share."""

    def __init__(self, path: str, config: StoreConfig | None, rabbitmq: Sequence[str]):
        self.path = path
        self.config = config
        self.store = FollowedStore(path, config)
        self.answers = Answers(path)
        self.verify_run = VerifyRun(path, config)
        self.rabbitmq = RabbitmqAnswers(rabbitmq)
        self._metrics_lock = threading.Lock()
        self._metrics: dict[bool, tuple[float, bytes]] = {}
        self._downloads = threading.BoundedSemaphore(_DOWNLOADS_AT_ONCE)

    def download(self, data: bytes, name: str) -> Response:
        """Response: bytes as a file.  A slow reader keeps large ones in memory, so that only some go out at one time.

        Raises
        ------
        StoreError
            As many as may are being sent.
        """
        if len(data) <= LARGE_BODY:
            return _Download(data, name, None)
        if not self._downloads.acquire(blocking=False):
            raise StoreError("many large messages are being sent at this moment; ask again")
        return _Download(data, name, self._downloads.release)

    def metrics(self, with_pending: bool = False) -> bytes:
        """bytes: the store's metrics as Prometheus reads them, with what the last verify run found.

        With `with_pending` also what still waits, which is looked for less often.
        """
        # One at a time, and what was just made serves those that waited.
        with self._metrics_lock:
            made = self._metrics.get(with_pending)
            if made is None or time.monotonic() - made[0] > (_PENDING_KEPT if with_pending else _METRICS_KEPT):
                made = time.monotonic(), metrics_text(self.path, self.config, self.verify_run, with_pending)
                self._metrics[with_pending] = made
            return made[1]

    def close(self) -> None:
        """End a verify run and let the store go."""
        self.verify_run.stop(timeout=5)
        self.store.close()


class Entrance:
    """What all stores of a server share: assets, the token's form, the list of stores."""

    def __init__(self, paths: Sequence[str]):
        self.paths = list(paths)
        self.gate: Gate | None = None
        folder = resources.files("rmqstore.console") / "static"
        # Looked up by name: no part of an address ever becomes part of a path.
        self._static = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}

    async def health(self, request: Request) -> Response:
        """The server lives; says nothing about a store."""
        return JSONResponse({"status": "ok", "version": __version__})

    async def static(self, request: Request) -> Response:
        """A style sheet, a script, an image."""
        name = request.path_params["name"]
        content = self._static.get(name)
        if content is None:
            return PlainTextResponse("There is no such file.\n", 404)
        kind = _STATIC_TYPES.get(os.path.splitext(name)[1], "application/octet-stream")
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    async def login(self, request: Request) -> Response:
        """Take the token from the form, give the cookie."""
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > _LARGEST_LOGIN:
                    return _error(request.scope, 413, "Too much", "That is more than a token.")
        except ClientDisconnect:
            # Nobody is there to read this; it is no error of the console.
            return _error(request.scope, 400, "That cannot be asked", "The form came in part only.")
        form = dict(urllib.parse.parse_qsl(body.decode("utf-8", "replace")))
        target = form.get("next", "/")
        if self.gate is None or not self.gate.is_token(form.get("token", "")):
            return _render(request.scope, "login.html", 401, next=target, wrong=True)
        # Nothing but a path of this server: no other host, no scheme.
        response = RedirectResponse(local_address(target), 303)
        self.gate.let_in(response, secure=request.url.scheme == "https")
        return response

    async def stores(self, request: Request) -> Response:
        """The stores of this server."""
        return await run_in_threadpool(_render, request.scope, "stores.html", paths=list(enumerate(self.paths)))


class Pages:
    """The pages of one store; every method is an endpoint, run in a thread."""

    def __init__(self, console: Console):
        self._console = console
        self._answers = console.answers

    def _page(self, request: Request, template: str, /, **values: Any) -> Response:
        return _render(
            request.scope,
            template,
            store_path=self._console.path,
            with_rabbitmq=bool(self._console.rabbitmq.paths),
            **values,
        )

    @answering
    def overview(self, request: Request) -> Response:
        """What the store is and how it is."""
        first = some_number(request, "first", 0, 0, _INT64_MAX)
        name = request.query_params.get("topic", "")
        with self._console.store.use() as store:
            value = self._answers.overview(store)
        topics = [topic for topic in value["topics"] if name.lower() in topic["topic"].lower()]
        return self._page(
            request, "overview.html", value=value, topics=topics[first : first + _LIST_SHOWN], number=len(topics),
            first=first, step=_LIST_SHOWN, topic=name,
        )  # fmt: skip

    @answering
    def queues(self, request: Request) -> Response:
        """The queues of a topic, or all."""
        topic = request.query_params.get("topic", "") or None
        first = some_number(request, "first", 0, 0, _INT64_MAX)
        with self._console.store.use() as store:
            rows = self._answers.queues(store, topic)
        return self._page(
            request, "queues.html", rows=rows[first : first + _LIST_SHOWN], number=len(rows), first=first,
            step=_LIST_SHOWN, topic=topic or "",
        )  # fmt: skip

    @answering
    def queue(self, request: Request) -> Response:
        """One queue and its messages."""
        topic, queue_id = queue_of(request)
        start = whole_number(request, "from", None)
        size = some_number(request, "size", 50, 1, 500)
        with self._console.store.use() as store:
            value = self._answers.queue(store, topic, queue_id, start, size)
        return self._page(request, "queue.html", value=value, size=size)

    @answering
    def messages(self, request: Request) -> Response:
        """Messages by key, by id, by place, by time."""
        asked = {name: request.query_params.get(name, "") for name in ("topic", "key", "type", "begin", "end", "order")}
        size = some_number(request, "size", 50, 1, 500)
        cursor = request.query_params.get("cursor") or None
        phy_offset = whole_number(request, "offset", None)
        root = request.scope.get("root_path", "")
        with self._console.store.use() as store:
            if request.query_params.get("id", "").strip():
                phy_offset = self._answers.place_of_id(store, request.query_params["id"], asked["topic"] or None)
            if phy_offset is not None:
                return RedirectResponse(_url(root, "message", phy_offset), 303)
            topics = store.topics()
            begin, end = time_of(request, "begin"), time_of(request, "end")
            order = choice(request, "order", ("newest", "oldest"))
            kind = choice(request, "type", tuple(KEY_TYPES))
            page = None
            if asked["key"]:
                page = self._answers.by_key(
                    store, asked["topic"], asked["key"], KEY_TYPES[kind], begin, end, cursor, size
                )
            elif asked["topic"]:
                page = self._answers.by_time(store, asked["topic"], begin, end, order == "newest", cursor, size)
        # A time as '2h ago' would mean another one on the next page.
        same = {**asked, "begin": begin, "end": end, "size": size}
        following = (
            None if page is None or page.following is None else _url(root, "messages", **same, cursor=page.following)
        )
        return self._page(
            request, "messages.html", asked=asked, page=page, following=following, cursor=cursor, size=size,
            start=_url(root, "messages", **same), topics=topics[:1000],
        )  # fmt: skip

    @answering
    def message(self, request: Request) -> Response:
        """One message: everything about it, down to where its bytes lie."""
        phy_offset = place_of(request)
        mode = choice(request, "body", ("", "text", "json", "hex"))
        start = some_number(request, "from", 0, 0, _INT64_MAX)
        with self._console.store.use() as store:
            with self._answers.few_at_once(store, phy_offset):
                value = self._answers.message(store, phy_offset)
                body, body_error = self._answers.body(store, phy_offset)
                view = _body_view(body, mode, start)
                del body
        return self._page(request, "message.html", value=value, body_error=body_error, **view)

    @answering
    def body(self, request: Request) -> Response:
        """The body as a file, never as something that a browser shows."""
        phy_offset = place_of(request)
        with self._console.store.use() as store:
            with self._answers.few_at_once(store, phy_offset):
                body, _ = self._answers.body(store, phy_offset)
                return self._console.download(body, f"body-{phy_offset}.bin")

    @answering
    def record(self, request: Request) -> Response:
        """The record's bytes as a file, or as a hex dump."""
        phy_offset = place_of(request)
        with self._console.store.use() as store:
            with self._answers.few_at_once(store, phy_offset):
                data = self._answers.record(store, phy_offset)
                return self._console.download(data, f"record-{phy_offset}.bin")

    @answering
    def index(self, request: Request) -> Response:
        """The index files."""
        first = some_number(request, "first", 0, 0, _INT64_MAX)
        with self._console.store.use() as store:
            rows = self._answers.index(store)[::-1]
        return self._page(
            request,
            "index.html",
            rows=rows[first : first + _LIST_SHOWN],
            number=len(rows),
            first=first,
            step=_LIST_SHOWN,
        )

    @answering
    def index_file(self, request: Request) -> Response:
        """One index file."""
        with self._console.store.use() as store:
            value = self._answers.index_file(store, request.path_params["name"])
        return self._page(request, "index_file.html", value=value, bars=_bars(value["chains"]["bins"]))

    @answering
    def consumers(self, request: Request) -> Response:
        """Progress and lag of the consumer groups."""
        group = request.query_params.get("group", "")
        first = some_number(request, "first", 0, 0, _INT64_MAX)
        with self._console.store.use() as store:
            rows = self._answers.consumers(store)
        groups: dict[str, dict[str, Any]] = {}
        for row in rows:
            total = groups.setdefault(row["group"], {"group": row["group"], "queues": 0, "lag": 0, "unknown": 0})
            total["queues"] += 1
            if row["lag"] is None or row["lag"] < 0:
                total["unknown"] += 1
            else:
                total["lag"] += row["lag"]
        chosen = [row for row in rows if not group or row["group"] == group]
        return self._page(
            request, "consumers.html", rows=chosen[first : first + _LIST_SHOWN], number=len(chosen), first=first,
            step=_LIST_SHOWN, group=group, groups=list(groups.values())[:_LIST_SHOWN], now=now_ms(),
        )  # fmt: skip

    @answering
    def pending(self, request: Request) -> Response:
        """What still waits."""
        kind = choice(request, "kind", ("", *PENDING_KINDS))
        topic = request.query_params.get("topic", "")
        first = some_number(request, "first", 0, 0, _INT64_MAX)
        with self._console.store.use() as store:
            value = self._answers.pending(store, kind or None, topic or None, first, _LIST_SHOWN)
        for problem in value["problems"]:
            problem["path"] = file_name(problem["path"], self._console.path)
        return self._page(
            request, "pending.html", value=value, kind=kind, topic=topic, kinds=PENDING_KINDS, first=first, step=_LIST_SHOWN,
        )  # fmt: skip

    @answering
    def verify(self, request: Request) -> Response:
        """The verify run and its findings."""
        first = some_number(request, "first", 0, 0, 10_000_000)
        status = self._console.verify_run.status(first, _LIST_SHOWN)
        for finding in status["findings"]:
            finding["path"] = file_name(finding["path"], self._console.path)
        assumed: dict[str, Any] = {}
        # A run goes on, and its findings stay, also while the store cannot be opened.
        with contextlib.suppress(StoreError, OSError), self._console.store.use() as store:
            assumed = {name: getattr(store.config, name) for name in _TOLD_BY_NO_FILE if name in store.config.assumed}
        return self._page(request, "verify.html", value=status, step=_LIST_SHOWN, assumed=assumed)

    @answering
    def verify_start(self, request: Request) -> Response:
        """Begin a verify run."""
        with self._console.store.use():
            self._console.verify_run.start()
        return RedirectResponse(_url(request.scope.get("root_path", ""), "verify"), 303)

    @answering
    def verify_stop(self, request: Request) -> Response:
        """End the verify run."""
        self._console.verify_run.stop(timeout=2)
        return RedirectResponse(_url(request.scope.get("root_path", ""), "verify"), 303)

    @answering
    def rabbitmq(self, request: Request) -> Response:
        """The vhosts."""
        places = self._console.rabbitmq
        return self._page(request, "rabbitmq.html", rows=places.vhosts() if places.paths else [], paths=places.paths)

    @answering
    def rabbitmq_vhost(self, request: Request) -> Response:
        """One vhost."""
        first = some_number(request, "first", 0, 0, _INT64_MAX)
        value = self._console.rabbitmq.vhost(request.path_params["number"])
        return self._page(request, "rabbitmq_vhost.html", value=value, first=first, step=_LIST_SHOWN)

    @answering
    def rabbitmq_queue(self, request: Request) -> Response:
        """One queue of a vhost and its messages, or one of them."""
        number, name = request.path_params["number"], name_of(request, "/queues/")
        place = whole_number(request, "message", None)
        if place is not None:
            value = self._console.rabbitmq.message(number, name, place)
            text = json.dumps(value, ensure_ascii=False, indent=2)
            return self._page(request, "rabbitmq_message.html", value=value, name=name, text=text[:_JSON_SHOWN])
        first = some_number(request, "first", 0, 0, _INT64_MAX)
        size = some_number(request, "size", 50, 1, 500)
        value = self._console.rabbitmq.queue(number, name, first, size)
        return self._page(request, "rabbitmq_queue.html", value=value)

    @answering
    def metrics(self, request: Request) -> Response:
        """Prometheus's text format."""
        with self._console.store.use():
            text = self._console.metrics(choice(request, "pending", ("false", "true")) == "true")
        return Response(text, media_type=importlib.import_module("rmqstore.offline.metrics").content_type())


def now_ms() -> int:
    """int: ms since epoch."""
    return int(parse_time("now"))


def _raw_path(request: Request) -> str:
    """str: the path below the console's root, with stray bytes kept as file names have them."""
    raw = request.scope.get("raw_path")
    if raw is None:
        path: str = request.scope["path"]
    else:
        path = urllib.parse.unquote(raw.decode("latin-1").partition("?")[0], errors="surrogateescape")
    return path.removeprefix(request.scope.get("root_path", ""))


def queue_of(request: Request) -> tuple[str, int]:
    """(str, int): topic and queue id in the address."""
    match = re.fullmatch("(?:/api)?/queues/(.+)/(-?[0-9]{1,10})", _raw_path(request), re.DOTALL)
    if match is None:
        raise NotFoundError("a queue's address is its topic and its number")
    return match[1], int(match[2])


def name_of(request: Request, before: str) -> str:
    """str: the last part of the address, behind `before`; it may hold slashes."""
    return _raw_path(request).partition(before)[2]


class _Download(Response):
    """Bytes that a browser stores and does not show; `done` is called when they are sent, or cannot be."""

    def __init__(self, data: bytes, name: str, done: Callable[[], None] | None):
        super().__init__(
            data,
            media_type="application/octet-stream",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In parts, each of which waits until the one before it is on its way: a server takes in a whole body at once, and
        # would keep it for a reader that takes nothing, after this download was counted as sent.
        body = memoryview(self.body)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for first in range(0, len(body), _DOWNLOAD_PART):
                with anyio.fail_after(_DOWNLOAD_PATIENCE):
                    part = bytes(body[first : first + _DOWNLOAD_PART])
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            with anyio.fail_after(_DOWNLOAD_PATIENCE):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # The connection is closed by the server, since the body is not whole.
            logger.warning("a reader of %s took nothing for %d s", escape(scope["path"]), _DOWNLOAD_PATIENCE)
        finally:
            del body
            self.body = b""
            if self._done is not None:
                self._done()


def _is_text(part: bytes) -> bool:
    try:
        # A character may be cut at the end of the part.
        codecs.getincrementaldecoder("utf-8")().decode(part)
        return True
    except UnicodeDecodeError:
        return False


def _body_view(body: bytes, mode: str, start: int) -> dict[str, Any]:
    """What a page shows of a body: in the mode that was asked for, or in the one that fits."""
    start = min(start, max(len(body) - 1, 0))
    part = body[start : start + _BODY_SHOWN]
    note, document = "", None
    if mode == "json" or (not mode and start == 0 and body[:64].lstrip()[:1] in (b"{", b"[")):
        document = json_text(body, _JSON_SHOWN) if len(body) <= _JSON_SHOWN else None
        if document is None and mode == "json":
            note, mode = "The body is no JSON, or too long to be laid out; this is its text.", "text"
    if not mode:
        mode = "json" if document is not None else "text" if _is_text(part) else "hex"
    if mode == "json":
        assert document is not None
        shown, start, part = _lines(document), 0, body
    elif mode == "text":
        shown = _lines(part.decode("utf-8", "backslashreplace"))
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


def _bars(bins: list[dict[str, int]]) -> list[dict[str, Any]]:
    """The bars of the chain lengths, heights from 0 to 100 by the logarithm: a few long chains are what matters."""
    highest = math.log10(max([each["slots"] for each in bins], default=0) + 1) or 1.0
    return [
        {
            "label": str(each["from"]) if each["from"] == each["to"] else f"{each['from']}–{each['to']}",
            "slots": each["slots"],
            "height": round(100 * math.log10(each["slots"] + 1) / highest, 1),
        }
        for each in bins
    ]
