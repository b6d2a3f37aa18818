"""The pages of the console.

Owns what each address shows and how an error looks; the answers come from `rmqstore.console.answers`.  Text of a store
gets into a page only through a template that escapes it, with control and bidirectional characters made visible.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import resources
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import Scope

from rmqstore._version import __version__
from rmqstore.config import StoreConfig
from rmqstore.console.anatomy import file_name
from rmqstore.console.answers import LARGE_BODY, Answers
from rmqstore.console.bodies import JSON_SHOWN, body_view
from rmqstore.console.charts import bars, time_columns
from rmqstore.console.consumer_answers import CONSUMER_COLUMNS, GROUP_COLUMNS, group_rows
from rmqstore.console.downloads import Download
from rmqstore.console.errors import BadQueryError, NotFoundError, error_text
from rmqstore.console.followed_store import FollowedStore, StoreGoneError
from rmqstore.console.gate import Gate, is_for_programs, local_address, path_of, way_back
from rmqstore.console.index_answers import INDEX_COLUMNS
from rmqstore.console.lists import choices, in_order, sums
from rmqstore.console.overview_answers import QUEUE_COLUMNS, TOPIC_COLUMNS
from rmqstore.console.parameters import (
    INT64_MAX,
    asked_messages,
    choice,
    name_of,
    place_of,
    queue_of,
    some_number,
    whole_number,
)
from rmqstore.console.rabbitmq_answers import RABBITMQ_COLUMNS, RabbitmqAnswers
from rmqstore.console.rendering import duration, render, url
from rmqstore.console.settings_answers import SETTINGS_COLUMNS
from rmqstore.console.verify_run import VerifyRun
from rmqstore.errors import GeometryError, StoreError
from rmqstore.files.os_errors import is_unreadable
from rmqstore.store.message_store import MessageStore
from rmqstore.texts import escape, format_size

__all__ = ["Console", "Entrance", "Pages", "error_page", "refused_page"]

logger = logging.getLogger(__name__)

_LIST_SHOWN = 200
_TOPICS_SHOWN = 100
_LARGEST_LOGIN = 16 * 1024
_DOWNLOADS_AT_ONCE = 4
_BINS = 60
_DRAWN = 15
_METRICS_KEPT = 1.0
_PENDING_KEPT = 10.0
# What a verify run goes by and the files do not always tell; the command line notes the same.
_TOLD_BY_NO_FILE = ("message_delay_level", "index_tags")
_STATIC_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Response])


def _error(scope: Scope, status: int, title: str, text: str) -> Response:
    if is_for_programs(path_of(scope)):
        return JSONResponse({"error": text, "status": status}, status)
    shown: dict[str, Any] = {"title": title, "text": text}
    known = getattr(scope["app"].state, "stores", {}).get(scope.get("root_path", ""))
    if known is not None:
        shown |= {"store_path": known[0], "with_rabbitmq": known[1]}
    return render(scope, "error.html", status, **shown)


def refused_page(scope: Scope) -> Response:
    """Response: 401, with a form for the token."""
    if is_for_programs(path_of(scope)):
        response: Response = JSONResponse({"error": "give the token: Authorization: Bearer …", "status": 401}, 401)
    else:
        response = render(scope, "login.html", 401, next=way_back(scope))
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
            text = error_text(error)
            if is_unreadable(error):
                text += ": let the user that the console runs as read it, or restore it from a copy where the disk fails"
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


# ------------------------------------------------------------------------------------------------------------- the pages


def metrics_text(store: MessageStore, run: VerifyRun, with_pending: bool = False) -> bytes:
    """bytes: the metrics of an open store; those of findings if a run was finished; those of what waits if asked.

    Raises
    ------
    StoreError
        A library is missing, or the store cannot be read.
    """
    # Loaded when it is asked for: the other pages do without its library.
    metrics = importlib.import_module("rmqstore.offline.metrics")
    last = run.last_finished()
    findings = None if last is None else metrics.Findings(last[0], last[1])
    # `FollowedStore` refreshed it, or opened it, when this request asked for it.
    text: bytes = metrics.text(metrics.collect(store, findings=findings, with_pending=with_pending, refresh=False))
    return text


PENDING_KINDS = ("delayed", "timer", "transaction", "retry", "dlq")


class Console:
    """What pages and API of one store share."""

    def __init__(self, path: str, config: StoreConfig | None, rabbitmq: Sequence[str]):
        self.path = path
        self.config = config
        self.store = FollowedStore(path, config)
        self.answers = Answers(path, self.store.use)
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
            return Download(data, name, None)
        if not self._downloads.acquire(blocking=False):
            raise StoreError("many large messages are being sent at this moment; ask again")
        return Download(data, name, self._downloads.release)

    def metrics(self, store: MessageStore, with_pending: bool = False) -> bytes:
        """bytes: the store's metrics as Prometheus reads them, with what the last verify run found.

        With `with_pending` also what still waits, which is looked for less often.
        """
        # One at a time, and what was just made serves those that waited.
        with self._metrics_lock:
            made = self._metrics.get(with_pending)
            if made is None or time.monotonic() - made[0] > (_PENDING_KEPT if with_pending else _METRICS_KEPT):
                made = time.monotonic(), metrics_text(store, self.verify_run, with_pending)
                self._metrics[with_pending] = made
            return made[1]

    def close(self) -> None:
        """End a verify run and let the store go."""
        self.verify_run.stop(timeout=5)
        self.answers.close()
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
            # Nobody is there to read this; it is not an error of the console.
            return _error(request.scope, 400, "That cannot be asked", "The form came in part only.")
        form = dict(urllib.parse.parse_qsl(body.decode("utf-8", "replace")))
        target = form.get("next", "/")
        if self.gate is None or not self.gate.is_token(form.get("token", "")):
            return render(request.scope, "login.html", 401, next=target, wrong=True)
        # Nothing but a path of this server: no other host, no scheme.
        response = RedirectResponse(local_address(target), 303)
        self.gate.let_in(response, secure=request.url.scheme == "https")
        return response

    async def stores(self, request: Request) -> Response:
        """The stores of this server."""
        return await run_in_threadpool(render, request.scope, "stores.html", paths=list(enumerate(self.paths)))


class Pages:
    """The pages of one store; every method is an endpoint, run in a thread."""

    def __init__(self, console: Console):
        self._console = console
        self._answers = console.answers

    def _page(self, request: Request, template: str, /, **values: Any) -> Response:
        return render(
            request.scope,
            template,
            store_path=self._console.path,
            with_rabbitmq=bool(self._console.rabbitmq.paths),
            **values,
        )

    @answering
    def overview(self, request: Request) -> Response:
        """What the store is and how it is."""
        first = some_number(request, "first", 0, 0, INT64_MAX)
        sort = choice(request, "sort", choices(TOPIC_COLUMNS))
        name = request.query_params.get("topic", "")
        with self._console.store.use() as store:
            value = self._answers.overview(store, first, _TOPICS_SHOWN, sort, name)
            line = self._answers.timeline(store, _BINS)
            largest = self._answers.bytes_by_topic(store)
        rows = [
            (escape(each["topic"]), each["log_bytes"], format_size(each["log_bytes"])) for each in largest["topics"]
        ]
        if largest["others"]["log_bytes"] > 0:
            others = largest["others"]
            rows.append((f"{others['topics']} others", others["log_bytes"], format_size(others["log_bytes"])))
        return self._page(
            request, "overview.html", value=value, first=first, step=_TOPICS_SHOWN, sort=sort, topic=name, line=line,
            messages_chart=time_columns(line["bins"], "messages"),
            bytes_chart=time_columns(line["bins"], "bytes", format_size),
            largest=largest, largest_chart=bars(rows),
        )  # fmt: skip

    @answering
    def queues(self, request: Request) -> Response:
        """The queues of a topic, or all."""
        topic = request.query_params.get("topic", "") or None
        first = some_number(request, "first", 0, 0, INT64_MAX)
        sort = choice(request, "sort", choices(QUEUE_COLUMNS))
        with self._console.store.use() as store:
            # A store without queues has this page all the same.
            value = self._answers.queues(store, topic, first, _LIST_SHOWN, sort)
        return self._page(request, "queues.html", value=value, step=_LIST_SHOWN, topic=topic or "")

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
                return RedirectResponse(url(root, "message", phy_offset), 303)
            topics = store.topics()
            selection = asked_messages(request, size)
            order = choice(request, "order", ("newest", "oldest"))
            page = None
            if selection.keys:
                page = self._answers.by_key(store, selection, cursor)
            elif asked["topic"]:
                page = self._answers.by_time(store, selection, cursor, newest_first=order == "newest")
        # A time as '2h ago' would mean another one on the next page.
        same = {**asked, "begin": selection.begin, "end": selection.end, "size": size}
        following = (
            None if page is None or page.following is None else url(root, "messages", **same, cursor=page.following)
        )
        return self._page(
            request, "messages.html", asked=asked, page=page, following=following, cursor=cursor, size=size,
            start=url(root, "messages", **same), topics=topics[:1000],
        )  # fmt: skip

    @answering
    def message(self, request: Request) -> Response:
        """One message: everything about it, down to where its bytes lie."""
        phy_offset = place_of(request)
        mode = choice(request, "body", ("", "text", "json", "hex"))
        start = some_number(request, "from", 0, 0, INT64_MAX)
        with self._console.store.use() as store:
            with self._answers.few_at_once(store, phy_offset):
                value = self._answers.message(store, phy_offset)
                body, problem = self._answers.body(store, phy_offset)
                value |= problem
                view = body_view(body, mode, start)
                del body
        return self._page(request, "message.html", value=value, **view)

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
        first = some_number(request, "first", 0, 0, INT64_MAX)
        sort = choice(request, "sort", ("-name", *(each for each in choices(INDEX_COLUMNS) if each != "-name")))
        with self._console.store.use() as store:
            rows, problems = self._answers.index(store), self._answers.index_problems(store)
            in_database = store.database_index.is_used()
        newest = rows[-_DRAWN:]
        ordered = in_order(rows, sort)
        return self._page(
            request, "index.html", rows=ordered[first : first + _LIST_SHOWN], number=len(rows), first=first,
            step=_LIST_SHOWN, sort=sort, sums=sums(rows, "entries", "slots_used", "size"), drawn=newest, problems=problems,
            in_database=in_database,
            fill_chart=bars(
                [(each["name"], each["fill"], f"{100 * each['fill']:.1f} %") for each in newest], whole=1.0
            ),
            chain_chart=bars(
                [(each["name"], each["mean_chain"] or 0, f"{each['mean_chain'] or 0:.2f}") for each in newest]
            ),
        )  # fmt: skip

    @answering
    def index_file(self, request: Request) -> Response:
        """One index file; `damage` is why not all of its items can be looked up."""
        with self._console.store.use() as store:
            value = self._answers.index_file(store, request.path_params["name"])
        # By the logarithm: a few long chains are what matters.
        rows = [
            (
                str(each["from"]) if each["from"] == each["to"] else f"{each['from']} to {each['to']}",
                math.log10(each["slots"] + 1),
                f"{each['slots']} slots",
            )
            for each in value["chains"]["bins"]
        ]
        return self._page(request, "index_file.html", value=value, chart=bars(rows))

    @answering
    def consumers(self, request: Request) -> Response:
        """Progress and lag of the consumer groups."""
        group = request.query_params.get("group", "")
        first = some_number(request, "first", 0, 0, INT64_MAX)
        sort = choice(request, "sort", choices(CONSUMER_COLUMNS))
        group_sort = choice(request, "groups", choices(GROUP_COLUMNS))
        with self._console.store.use() as store:
            rows = self._answers.consumers(store, sort)
        every = group_rows(rows, group_sort)
        groups = [each for each in every if not group or each["group"] == group]
        chosen = [row for row in rows if not group or row["group"] == group]
        drawn = in_order(groups, "-lag")[:_DRAWN]
        oldest = [each for each in in_order(groups, "-age")[:_DRAWN] if each["age"] is not None]
        return self._page(
            request, "consumers.html", rows=chosen[first : first + _LIST_SHOWN], number=len(chosen), first=first,
            step=_LIST_SHOWN, group=group, groups=groups[:_LIST_SHOWN], group_number=len(groups),
            all_groups=every[:1000], sort=sort, group_sort=group_sort, now=now_ms(),
            sums={"lag": sum(row["lag"] for row in chosen if (row["lag"] or 0) > 0), "queues": len(chosen)},
            lag_chart=bars([(escape(each["group"]), each["lag"], str(each["lag"])) for each in drawn]),
            age_chart=bars([(escape(each["group"]), max(each["age"], 0), duration(each["age"])) for each in oldest]),
        )  # fmt: skip

    @answering
    def settings(self, request: Request) -> Response:
        """Topics, groups, offsets and pop records, as the broker has them when it starts."""
        what = choice(request, "what", tuple(SETTINGS_COLUMNS))
        first = some_number(request, "first", 0, 0, INT64_MAX)
        sort = choice(request, "sort", choices(SETTINGS_COLUMNS[what]))
        name = request.query_params.get("name", "")
        # Also where the log cannot be read: the settings do not need it.
        value = self._answers.settings(what, first, _LIST_SHOWN, sort, name)
        return self._page(request, "settings.html", value=value, step=_LIST_SHOWN, name=name, now=now_ms())

    @answering
    def pending(self, request: Request) -> Response:
        """What still waits."""
        kind = choice(request, "kind", ("", *PENDING_KINDS))
        topic = request.query_params.get("topic", "")
        first = some_number(request, "first", 0, 0, INT64_MAX)
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
        return RedirectResponse(url(request.scope.get("root_path", ""), "verify"), 303)

    @answering
    def verify_stop(self, request: Request) -> Response:
        """End the verify run."""
        self._console.verify_run.stop(timeout=2)
        return RedirectResponse(url(request.scope.get("root_path", ""), "verify"), 303)

    @answering
    def rabbitmq(self, request: Request) -> Response:
        """The vhosts."""
        places = self._console.rabbitmq
        return self._page(request, "rabbitmq.html", rows=places.vhosts() if places.paths else [], paths=places.paths)

    @answering
    def rabbitmq_vhost(self, request: Request) -> Response:
        """One vhost."""
        first = some_number(request, "first", 0, 0, INT64_MAX)
        sort = choice(request, "sort", choices(RABBITMQ_COLUMNS))
        value = self._console.rabbitmq.vhost(request.path_params["number"])
        rows = in_order(value["queue_list"], sort)
        return self._page(
            request, "rabbitmq_vhost.html", value=value, rows=rows[first : first + _LIST_SHOWN], first=first, sort=sort,
            step=_LIST_SHOWN, sums=sums(rows, "depth", "size"),
        )  # fmt: skip

    @answering
    def rabbitmq_queue(self, request: Request) -> Response:
        """One queue of a vhost and its messages, or one of them."""
        number, name = request.path_params["number"], name_of(request, "/queues/")
        place = whole_number(request, "message", None)
        if place is not None:
            value = self._console.rabbitmq.message(number, name, place)
            text = json.dumps(value, ensure_ascii=False, indent=2)
            return self._page(request, "rabbitmq_message.html", value=value, name=name, text=text[:JSON_SHOWN])
        first = some_number(request, "first", 0, 0, INT64_MAX)
        size = some_number(request, "size", 50, 1, 500)
        value = self._console.rabbitmq.queue(number, name, first, size)
        return self._page(request, "rabbitmq_queue.html", value=value)

    @answering
    def metrics(self, request: Request) -> Response:
        """Prometheus's text format."""
        with self._console.store.use() as store:
            text = self._console.metrics(store, choice(request, "pending", ("false", "true")) == "true")
        return Response(text, media_type=importlib.import_module("rmqstore.offline.metrics").content_type())


def now_ms() -> int:
    """int: ms since epoch."""
    return time.time_ns() // 1_000_000
