"""The console as an ASGI application: routes, errors as pages or JSON, startup and shutdown.

The pages of a single store are at the root; with several stores, those of each are below ``/stores/<number>``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Scope

from rmqstore._version import __version__
from rmqstore.config import StoreConfig
from rmqstore.console.followed_store import StoreGoneError
from rmqstore.console.gate import (
    INTERNAL_ERROR,
    LOOPBACK_NAMES,
    Admission,
    Gate,
    is_for_programs,
    local_address,
    path_of,
    way_back,
)
from rmqstore.console.questions import QUESTIONS, Number, Question, openapi_document
from rmqstore.console.rendering import render, url
from rmqstore.console.rows import BadQueryError, NotFoundError, check_choice, error_text
from rmqstore.console.traffic import Outgoing
from rmqstore.console.views import Console
from rmqstore.errors import GeometryError, StoreError
from rmqstore.files.os_errors import is_unreadable
from rmqstore.selection import INT64_MAX
from rmqstore.texts import escape

__all__ = ["app"]

logger = logging.getLogger(__name__)

_SHORTEST_TOKEN = 8
_LARGEST_LOGIN = 16 * 1024
_STATIC_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

_Endpoint = Callable[[Request], Response]


class _PlaceConvertor(Convertor[int]):
    """A whole number of at most 19 digits; Starlette's own accepts more than Python converts."""

    regex = "[0-9]{1,19}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


class _RestConvertor(Convertor[str]):
    """The rest of the address; the name of a folder may contain a line break."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("place", _PlaceConvertor())
register_url_convertor("rest", _RestConvertor())


def app(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    config: StoreConfig | None = None,
    token: str | None = None,
    rabbitmq: Iterable[str | os.PathLike[str]] = (),
    allowed_hosts: Iterable[str] = LOOPBACK_NAMES,
    any_address: bool = False,
) -> Starlette:
    """Return the console as an ASGI application.

    Parameters
    ----------
    path : path or sequence of paths
        The root of a store.  With several stores, the pages of each are below ``/stores/<number>``.
    config : StoreConfig, optional
        The geometry of the stores; by default inferred from their files.
    token : str, optional
        Required for every request: as ``Authorization: Bearer``, or once as ``?token=``, which sets a cookie.
    rabbitmq : iterable of path
        RabbitMQ vhosts, or data directories of nodes, to show as well.
    allowed_hosts : iterable of str
        Accepted Host headers; by default those of the loopback interface.  ``"*"`` accepts any.
    any_address : bool
        Also accept any IP address as Host, for a server that does not know its own addresses.

    Returns
    -------
    starlette.applications.Starlette

    Raises
    ------
    ValueError
        There is no path, or the token has fewer than 8 characters.

    Notes
    -----
    The console shows message bodies: set a token if other machines can reach it.
    """
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths:
        raise ValueError("path is empty; give the path of a store")
    if token is not None and len(token.strip()) < _SHORTEST_TOKEN:
        raise ValueError(
            f"token has fewer than {_SHORTEST_TOKEN} characters; give one that is hard to guess, or None"
        )
    places = [os.fspath(each) for each in rabbitmq]
    consoles = [Console(os.fspath(each), config, places) for each in paths]
    realm = "\n".join(os.path.abspath(console.path) for console in consoles)
    admission = Admission(token, allowed_hosts, any_address, realm)
    entrance = _Entrance([console.path for console in consoles], admission)
    routes: list[BaseRoute] = [
        Route("/healthz", entrance.health),
        Route("/login", entrance.login, methods=["POST"]),
        Route("/static/{name}", entrance.static),
    ]
    if len(consoles) == 1:
        routes += _routes(consoles[0])
    else:
        routes.append(Route("/", entrance.stores))
        for number, console in enumerate(consoles):
            routes.append(
                Mount(f"/stores/{number}", routes=[Route("/static/{name}", entrance.static), *_routes(console)])
            )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for console in consoles:
                console.close()

    made = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Outgoing), Middleware(Gate, admission=admission, refused=_refused_page)],
        exception_handlers={404: _error_page, 405: _error_page},
    )
    # For error pages, which belong to no page of a store.
    made.state.consoles = {
        f"/stores/{number}" if len(consoles) > 1 else "": console for number, console in enumerate(consoles)
    }
    return made


def _routes(console: Console) -> list[BaseRoute]:
    routes: list[BaseRoute] = [
        Route("/message/{phy_offset:place}/body", _download(console.body, "body")),
        Route("/message/{phy_offset:place}/record", _download(console.record, "record")),
        Route("/metrics", _metrics(console)),
    ]
    for question in QUESTIONS:
        if question.name == "openapi":
            routes.append(Route("/api/openapi.json", _openapi))
            continue
        path = question.path.replace("/{topic}/{queue_id}", "/{place:rest}").replace("{number}", "{number:place}")
        path = path.replace("{phy_offset}", "{phy_offset:place}").replace("/queues/{name}", "/queues/{name:rest}")
        routes.append(Route(f"/api{path}", _api(console, question), methods=[question.method]))
        if question.page_rows is not None:
            page_path = "/" if path == "/overview" else path
            routes.append(Route(page_path, _page(console, question), methods=[question.method]))
    return routes


def _api(console: Console, question: Question) -> _Endpoint:
    def endpoint(request: Request) -> Response:
        value = console.answer(question.name, question.read(request, page=False))
        return _json(value, 200 if question.method == "GET" else 202)

    return _answering(endpoint)


def _openapi(request: Request) -> Response:
    return _json(openapi_document(request.scope.get("root_path", "")))


def _json(value: Any, status: int = 200) -> Response:
    # ASCII only: everything else in a text of a store, stray bytes included, is escaped.
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")


def _page(console: Console, question: Question) -> _Endpoint:
    page = getattr(console, f"{question.name}_page", None)

    def endpoint(request: Request) -> Response:
        asked = question.read(request, page=True)
        if question.method == "POST":
            console.answer(question.name, asked)
            return RedirectResponse(url(request.scope.get("root_path", ""), "verify"), 303)
        values = {"value": console.answer(question.name, asked)} if page is None else page(asked, request)
        if isinstance(values, Response):
            return values
        values |= {"asked": asked, "step": asked.get("max_num", question.page_rows), "now": time.time_ns() // 1_000_000}
        return render(request.scope, f"{question.name}.html", **_every_page(console), **values)

    return _answering(endpoint)


def _every_page(console: Console) -> dict[str, Any]:
    return {"store_path": console.path, "with_rabbitmq": bool(console.rabbitmq_answers.paths)}


def _download(read: Callable[[int], bytes], name: str) -> _Endpoint:
    def endpoint(request: Request) -> Response:
        phy_offset = request.path_params["phy_offset"]
        if phy_offset > INT64_MAX:
            raise NotFoundError(f"phy offset {phy_offset} is out of range")
        # Browsers save it, and never show it.
        disposition = f'attachment; filename="{name}-{phy_offset}.bin"'
        return Response(
            read(phy_offset), media_type="application/octet-stream", headers={"Content-Disposition": disposition}
        )

    return _answering(endpoint)


def _metrics(console: Console) -> _Endpoint:
    def endpoint(request: Request) -> Response:
        metrics = importlib.import_module("rmqstore.offline.metrics")
        given = request.query_params
        with_pending = check_choice("pending", given.get("pending", ""), ("false", "true")) == "true"
        top = Number("top", "", metrics.TOP).read(given.get("top", ""))
        text = console.metrics(with_pending, tuple(given.getlist("topic")), top or 0)
        return Response(text, media_type=metrics.content_type())

    return _answering(endpoint)


# -------------------------------------------------------------------------------------------------------------------- errors


def _answering(endpoint: _Endpoint) -> _Endpoint:
    """Turn an error of `endpoint` into a response; never into a traceback."""

    def wrapped(request: Request) -> Response:
        scope = request.scope
        try:
            try:
                return endpoint(request)
            except GeometryError:
                # The geometry may have been inferred while the store was being created: infer it again.
                return endpoint(request)
        except NotFoundError as error:
            return _error(scope, 404, "Not found", str(error))
        except BadQueryError as error:
            return _error(scope, 400, "Bad request", str(error))
        except StoreGoneError as error:
            return _error(scope, 503, "Service unavailable", str(error), retry_after=5)
        except (StoreError, OSError) as error:
            text = error_text(error)
            if is_unreadable(error):
                text += ". Give the console's user read access, or restore the file from a backup if the disk fails."
            if isinstance(error, GeometryError):
                text += ". Start rmqstore serve with -o NAME=VALUE or --config broker.conf."
            return _error(scope, 503, "Service unavailable", text, retry_after=2)
        except Exception:
            logger.exception("an error at %s", escape(scope["path"]))
            return _error(scope, 500, "Internal server error", INTERNAL_ERROR)

    return wrapped


def _error(scope: Scope, status: int, title: str, text: str, retry_after: int | None = None) -> Response:
    if is_for_programs(path_of(scope)):
        response: Response = JSONResponse({"error": text, "status": status}, status)
    else:
        shown: dict[str, Any] = {"title": title, "text": text}
        console = getattr(scope["app"].state, "consoles", {}).get(scope.get("root_path", ""))
        if console is not None:
            shown |= _every_page(console)
        response = render(scope, "error.html", status, **shown)
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    return response


def _refused_page(scope: Scope) -> Response:
    if is_for_programs(path_of(scope)):
        text = "a token is required: send the header Authorization: Bearer TOKEN"
        response: Response = JSONResponse({"error": text, "status": 401}, 401)
    else:
        response = render(scope, "login.html", 401, next=way_back(scope))
    response.headers["WWW-Authenticate"] = 'Bearer realm="rmqstore"'
    return response


async def _error_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "GET")
        response = _error(request.scope, 405, "Method not allowed", f"This address supports only {allowed}.")
        response.headers.update(error.headers or {})
        return response
    return _error(request.scope, 404, "Not found", "There is no page at this address.")


class _Entrance:
    """The pages that all stores of a server share: assets, the login form, the list of stores."""

    def __init__(self, paths: Sequence[str], admission: Admission):
        self.paths = list(paths)
        self.admission = admission
        folder = resources.files("rmqstore.console") / "static"
        # Looked up by name, so that no address can become a path.
        self._static = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = self._static.get(name)
        if content is None:
            return PlainTextResponse("Not found\n", 404)
        kind = _STATIC_TYPES.get(os.path.splitext(name)[1], "application/octet-stream")
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    async def login(self, request: Request) -> Response:
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > _LARGEST_LOGIN:
                    return _error(request.scope, 413, "Content too large", "The form is larger than 16 KiB.")
        except ClientDisconnect:
            # No reader is left, and the console is not at fault.
            return _error(request.scope, 400, "Bad request", "The form is incomplete.")
        form = dict(urllib.parse.parse_qsl(body.decode("utf-8", "replace")))
        target = form.get("next", "/")
        if not self.admission.is_token(form.get("token", "")):
            return render(request.scope, "login.html", 401, next=target, wrong=True)
        response = RedirectResponse(local_address(target), 303)
        self.admission.let_in(response, secure=request.url.scheme == "https")
        return response

    async def stores(self, request: Request) -> Response:
        return await run_in_threadpool(render, request.scope, "stores.html", paths=list(enumerate(self.paths)))
