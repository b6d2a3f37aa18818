"""Who may ask what: hosts, tokens, methods, where a request comes from, and what every response forbids a browser.

Owns the checks in front of all pages.  A request that fails one reaches no page.  Pages show what a store holds, which may be
written by anybody: every response carries a policy under which no script but the console's own files can run.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rmqstore.texts import escape

__all__ = [
    "Gate", "forbid", "is_for_programs", "is_loopback", "local_address", "path_of", "said", "way_back",
]  # fmt: skip

logger = logging.getLogger(__name__)

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With "no-referrer" a browser would hide the origin of the console's own forms as well.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# Characters of an address that the form for the token takes along.
_LONGEST_WAY = 4096
_COOKIE_AGE = 7 * 24 * 3600
# What is answered without a token: what a page of refusal needs, and whether the server lives.
_OPEN = ("/healthz", "/login")


def is_loopback(host: str) -> bool:
    """bool: only this machine can reach that address."""
    # An IPv6 address is as often written as an address of the web has it.
    host = host.strip("[]").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def path_of(scope: Scope) -> str:
    """str: the path of a request below the console's root, decoded."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_for_programs(path: str) -> bool:
    """bool: what is asked at this path below the root gets its errors as JSON."""
    return re.match("(/stores/[0-9]+)?/(api(/|$)|metrics$|healthz$)", path) is not None


def way_back(scope: Scope) -> str:
    """str: where to go on when the token was given: what was asked, but not the token, as an address on this server."""
    path: str = (
        (scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode()).decode("latin-1").partition("?")[0]
    )
    if scope["method"] == "POST":
        # What is done by POST has its page one level above.
        return local_address(path.rpartition("/")[0])
    query = [
        each
        for each in scope["query_string"].decode("latin-1").split("&")
        if each and urllib.parse.unquote_plus(each.partition("=")[0]) != "token"
    ]
    target = local_address(path + ("?" + "&".join(query) if query else ""))
    return target if len(target) <= _LONGEST_WAY else "/"


def local_address(target: str) -> str:
    """str: `target` as an address that leads nowhere but to this server, in printable ASCII."""
    # A browser takes a backslash for a slash, and a path that begins with two names another host.
    return "/" + urllib.parse.quote(target.lstrip("/\\"), safe="/%?&=+-._~:@!$'()*,;")


def _host_name(header: str) -> str | None:
    """str: the name in a Host header, lower case, without port; None where it is malformed."""
    try:
        parts = urllib.parse.urlsplit(f"//{header}")
        if parts.path or parts.query or parts.fragment or parts.username is not None or not parts.hostname:
            return None
        _ = parts.port  # raises for what is not a number
        return parts.hostname.rstrip(".")
    except ValueError:
        return None


def forbid(headers: MutableHeaders) -> None:
    """Add to the headers of an answer what a browser must not do with it."""
    for name, value in HEADERS.items():
        headers[name] = value
    headers.setdefault("Cache-Control", "no-store")


@dataclass(frozen=True)
class Admission:
    """Who is let in.

    Attributes
    ----------
    token : str or None
        What a browser or a program must know; None lets everybody in whom the hosts let in.
    allowed_hosts : tuple of str
        Names that a Host header may have; with ``"*"`` any.
    any_address : bool
        IP addresses are allowed too: a page that was bound to another name cannot have one.
    realm : str
        Tells the cookies of consoles on one machine apart.
    """

    token: str | None
    allowed_hosts: tuple[str, ...]
    any_address: bool = False
    realm: str = ""


class Gate:
    """ASGI middleware.

    Parameters
    ----------
    app : ASGI application
    admission : Admission
    refused : callable
        Answers a request without the right token.
    """

    def __init__(self, app: ASGIApp, *, admission: Admission, refused: Callable[[Scope], Response]):
        self._app = app
        # Whoever types a token, and every header, has it without the line break that a file or a variable ends with.
        token = None if admission.token is None else admission.token.strip()
        self._token = token
        self._hosts = {host.lower().strip("[]") for host in admission.allowed_hosts}
        self._refused = refused
        self._any_address = admission.any_address
        self.cookie = (
            "rmqstore_" + hashlib.sha256(admission.realm.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        )
        # The cookie is made from the token and is not the token.
        secret = b"" if token is None else token.encode("utf-8", "surrogateescape")
        self._secret = secret
        self._session = hmac.new(secret, b"rmqstore console session", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                forbid(MutableHeaders(scope=message))
            await send(message)

        response = self._refusal(scope)
        if response is not None:
            await response(scope, receive, send_guarded)
            return
        try:
            await self._app(scope, receive, send_guarded)
        except Exception:
            logger.exception("an error at %s", escape(scope["path"]))
            if begun:
                raise
            response = said(scope, "This is an error in rmqstore; the server's log has it.", 500)
            await response(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        path = path_of(scope)
        hosts = headers.getlist("host")
        host = _host_name(hosts[0]) if len(hosts) == 1 else None
        if host is None or not self._is_allowed(host):
            return said(scope, "This console does not answer to that host name; give it with --allowed-host.", 400)
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return said(scope, "Only GET, HEAD and POST are answered here.", 405, {"Allow": "GET, HEAD, POST"})
        site = headers.get("sec-fetch-site", "")
        if scope["method"] == "POST":
            if not self._is_same_origin(scope, headers):
                return said(scope, "A request from another site was refused.", 403)
        elif site in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return said(scope, "A request from another site was refused.", 403)
        if self._token is None or path in _OPEN or path.startswith("/static/"):
            return None
        query = urllib.parse.parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given and self.is_token(given[-1]) and scope["method"] in ("GET", "HEAD"):
            # Once in the address, then in a cookie: an address is kept in histories and sent to others.
            response: Response = RedirectResponse(way_back(scope), 303)
            self.let_in(response, secure=scope.get("scheme") == "https")
            return response
        if self._knows_token(headers):
            return None
        return self._refused(scope)

    def _is_allowed(self, host: str) -> bool:
        if "*" in self._hosts or host in self._hosts:
            return True
        if not self._any_address:
            return False
        try:
            ipaddress.ip_address(host)
            return True
        except ValueError:
            return False

    def _is_same_origin(self, scope: Scope, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if site is not None and site != "same-origin":
            return False
        if origin is not None:
            return origin == f"{scope.get('scheme', 'http')}://{headers.get('host', '')}"
        if site is not None:
            return True
        # No browser: a program that shows its token, which no other site can make a browser do.
        return self._token is not None and self._bearer(headers)

    def is_token(self, text: str) -> bool:
        """bool: it is the token; takes the same time whatever it is."""
        return hmac.compare_digest(text.strip().encode("utf-8", "surrogateescape"), self._secret)

    def _bearer(self, headers: Headers) -> bool:
        kind, _, value = headers.get("authorization", "").partition(" ")
        # Headers are bytes, which Starlette gives as Latin-1.
        given = value.strip().encode("latin-1", "replace")
        return kind.lower() == "bearer" and hmac.compare_digest(given, self._secret)

    def _knows_token(self, headers: Headers) -> bool:
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        return hmac.compare_digest(cookie.encode("utf-8", "surrogateescape"), self._session.encode()) or self._bearer(
            headers
        )

    def let_in(self, response: Response, *, secure: bool) -> None:
        """Give a browser that showed the token the cookie."""
        response.set_cookie(
            self.cookie, self._session, max_age=_COOKIE_AGE, httponly=True, samesite="strict", secure=secure
        )


def said(scope: Scope, text: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """Response: a sentence, as JSON where programs ask."""
    if is_for_programs(path_of(scope)):
        return JSONResponse({"error": text, "status": status}, status, headers=headers)
    return PlainTextResponse(text + "\n", status, headers=headers)
