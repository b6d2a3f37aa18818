"""Access control: checks of the host, token, method and origin of every request, and the security headers of every response.

Pages show data that anybody may have written to the store: a policy in every response allows only the console's own scripts.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import urllib.parse
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rmqstore.texts import escape

__all__ = [
    "INTERNAL_ERROR", "LOOPBACK_NAMES", "Admission", "Gate", "forbid", "is_for_programs", "is_loopback", "local_address",
    "path_of", "said", "way_back",
]  # fmt: skip

logger = logging.getLogger(__name__)

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # "no-referrer" would also hide the origin of the console's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
INTERNAL_ERROR = "an error in rmqstore; see the server's log"
# The longest address that the login form returns to.
_LONGEST_WAY = 4096
_COOKIE_AGE = 7 * 24 * 3600
# Addresses that need no token.
_OPEN = ("/healthz", "/login")


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    # URLs have IPv6 addresses in brackets.
    host = host.strip("[]").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def path_of(scope: Scope) -> str:
    """Return the path of a request below the console's root, decoded."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_for_programs(path: str) -> bool:
    """Return True if errors at this path below the root are JSON."""
    return re.match("(/stores/[0-9]+)?/(api(/|$)|metrics$|healthz$)", path) is not None


def way_back(scope: Scope) -> str:
    """Return the address to continue at after the login: that of the request, without the token."""
    path: str = (
        (scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode()).decode("latin-1").partition("?")[0]
    )
    if scope["method"] == "POST":
        # The page of an action is one level above.
        return local_address(path.rpartition("/")[0])
    query = [
        each
        for each in scope["query_string"].decode("latin-1").split("&")
        if each and urllib.parse.unquote_plus(each.partition("=")[0]) != "token"
    ]
    target = local_address(path + ("?" + "&".join(query) if query else ""))
    return target if len(target) <= _LONGEST_WAY else "/"


def local_address(target: str) -> str:
    """Return `target` as an address on this server, in printable ASCII."""
    # Browsers read a backslash as a slash, and two leading slashes begin another host's name.
    return "/" + urllib.parse.quote(target.lstrip("/\\"), safe="/%?&=+-._~:@!$'()*,;")


def _host_name(header: str) -> str | None:
    # In lower case, without port; None if it is malformed.
    try:
        parts = urllib.parse.urlsplit(f"//{header}")
        if parts.path or parts.query or parts.fragment or parts.username is not None or not parts.hostname:
            return None
        _ = parts.port  # raises ValueError unless it is a number
        return parts.hostname.rstrip(".")
    except ValueError:
        return None


def forbid(headers: MutableHeaders) -> None:
    """Add the security headers to those of a response."""
    for name, value in HEADERS.items():
        headers[name] = value
    headers.setdefault("Cache-Control", "no-store")


class Admission:
    """The hosts and the token that requests need.

    Parameters
    ----------
    token : str or None
        The token; None admits every request to an allowed host.
    allowed_hosts : iterable of str
        Accepted Host headers; ``"*"`` accepts any.
    any_address : bool
        Also accept any IP address as Host.
    realm : str
        Distinguishes the cookies of consoles on one machine.
    """

    def __init__(self, token: str | None, allowed_hosts: Iterable[str], any_address: bool, realm: str):
        self.needs_token = token is not None
        self._hosts = {host.lower().strip("[]") for host in allowed_hosts}
        self._any_address = any_address
        self._cookie = "rmqstore_" + hashlib.sha256(realm.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        # Without the line break at the end of a file or a variable.
        self._secret = (token or "").strip().encode("utf-8", "surrogateescape")
        # The cookie is derived from the token and does not contain it.
        self._session = hmac.new(self._secret, b"rmqstore console session", hashlib.sha256).hexdigest()

    def has_host(self, host: str) -> bool:
        """Return True if requests to this host name are allowed."""
        if "*" in self._hosts or host in self._hosts:
            return True
        if not self._any_address:
            return False
        try:
            ipaddress.ip_address(host)
            return True
        except ValueError:
            return False

    def is_token(self, text: str) -> bool:
        """Compare a text with the token, in constant time."""
        return hmac.compare_digest(text.strip().encode("utf-8", "surrogateescape"), self._secret)

    def has_bearer(self, headers: Headers) -> bool:
        """Return True if the Authorization header contains the token."""
        kind, _, value = headers.get("authorization", "").partition(" ")
        # Starlette decodes headers as Latin-1.
        given = value.strip().encode("latin-1", "replace")
        return kind.lower() == "bearer" and hmac.compare_digest(given, self._secret)

    def has_cookie(self, headers: Headers) -> bool:
        """Return True if the request has the cookie of `let_in`."""
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        return hmac.compare_digest(cookie.encode("utf-8", "surrogateescape"), self._session.encode())

    def let_in(self, response: Response, *, secure: bool) -> None:
        """Set the cookie in the browser that sent the token."""
        response.set_cookie(
            self._cookie, self._session, max_age=_COOKIE_AGE, httponly=True, samesite="strict", secure=secure
        )


class Gate:
    """ASGI middleware that rejects requests; `refused` makes the response to a request without the token."""

    def __init__(self, app: ASGIApp, *, admission: Admission, refused: Callable[[Scope], Response]):
        self._app = app
        self._admission = admission
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
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
            response = said(scope, INTERNAL_ERROR, 500)
            await response(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        path = path_of(scope)
        hosts = headers.getlist("host")
        host = _host_name(hosts[0]) if len(hosts) == 1 else None
        if host is None or not self._admission.has_host(host):
            return said(scope, "Host not allowed: start rmqstore serve with --allowed-host NAME.", 400)
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return said(scope, "Method not allowed: use GET, HEAD or POST.", 405, {"Allow": "GET, HEAD, POST"})
        site = headers.get("sec-fetch-site", "")
        if scope["method"] == "POST":
            if not self._is_same_origin(scope, headers):
                return said(scope, "Forbidden: the request comes from another site.", 403)
        elif site in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return said(scope, "Forbidden: the request comes from another site.", 403)
        if not self._admission.needs_token or path in _OPEN or path.startswith("/static/"):
            return None
        query = urllib.parse.parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given and self._admission.is_token(given[-1]) and scope["method"] in ("GET", "HEAD"):
            # Move the token from the address, which histories keep, to a cookie.
            response: Response = RedirectResponse(way_back(scope), 303)
            self._admission.let_in(response, secure=scope.get("scheme") == "https")
            return response
        if self._admission.has_cookie(headers) or self._admission.has_bearer(headers):
            return None
        return self._refused(scope)

    def _is_same_origin(self, scope: Scope, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if site is not None and site != "same-origin":
            return False
        if origin is not None:
            return origin == f"{scope.get('scheme', 'http')}://{headers.get('host', '')}"
        if site is not None:
            return True
        # A program with the token; no other site can make a browser send that header.
        return self._admission.needs_token and self._admission.has_bearer(headers)


def said(scope: Scope, text: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a sentence, as JSON for programs."""
    if is_for_programs(path_of(scope)):
        return JSONResponse({"error": text, "status": status}, status, headers=headers)
    return PlainTextResponse(text + "\n", status, headers=headers)
