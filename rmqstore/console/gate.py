"""Who may ask what: hosts, tokens, methods, where a request comes from, and what every response forbids a browser.

Owns the checks in front of all pages.  A request that fails one reaches no page.  Pages show what a store holds, which may be
written by anybody: every response carries a policy under which no script but the console's own files can run.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import urllib.parse
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rmqstore.texts import escape

__all__ = ["Gate", "is_loopback"]

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
_COOKIE_AGE = 7 * 24 * 3600
# What is answered without a token: what a page of refusal needs, and whether the server lives.
_OPEN = ("/healthz", "/login")


def is_loopback(host: str) -> bool:
    """bool: only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(header: str) -> str | None:
    """str: the name in a Host header, lower case, without port; None where it is malformed."""
    try:
        parts = urllib.parse.urlsplit(f"//{header}")
        if parts.path or parts.query or parts.fragment or parts.username is not None or not parts.hostname:
            return None
        _ = parts.port  # raises for what is no number
        return parts.hostname.rstrip(".")
    except ValueError:
        return None


class Gate:
    """ASGI middleware.

    Parameters
    ----------
    app : ASGI application
    token : str or None
        What a browser or a program must know; None lets everybody in whom the hosts let in.
    allowed_hosts : iterable of str
        Names that a Host header may have; with ``"*"`` any.
    any_address : bool
        IP addresses are allowed too: a page that was bound to another name cannot have one.
    realm : str
        Tells the cookies of consoles on one machine apart.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        allowed_hosts: Iterable[str],
        any_address: bool = False,
        realm: str = "",
    ):
        self._app = app
        self._token = token
        self._hosts = {host.lower().strip("[]") for host in allowed_hosts}
        self._any_address = any_address
        self.cookie = "rmqstore_" + hashlib.sha256(realm.encode("utf-8", "surrogateescape")).hexdigest()[:8]
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
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
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
            await _plain("This is an error in rmqstore; the server's log has it.", 500)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        path: str = scope["path"]
        hosts = headers.getlist("host")
        host = _host_name(hosts[0]) if len(hosts) == 1 else None
        if host is None or not self._is_allowed(host):
            return _plain("This console does not answer to that host name; give it with --allowed-host.", 400)
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return _plain("Only GET, HEAD and POST are answered here.", 405, {"Allow": "GET, HEAD, POST"})
        site = headers.get("sec-fetch-site", "")
        if scope["method"] == "POST":
            if not self._is_same_origin(scope, headers):
                return _plain("A request from another site was refused.", 403)
        elif site in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return _plain("A request from another site was refused.", 403)
        if self._token is None or path in _OPEN or path.startswith("/static/"):
            return None
        query = urllib.parse.parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given and self.is_token(given[-1]) and scope["method"] in ("GET", "HEAD"):
            # Once in the address, then in a cookie: an address is kept in histories and sent to others.
            rest = urllib.parse.urlencode([each for each in query if each[0] != "token"])
            raw: bytes = scope.get("raw_path") or urllib.parse.quote(path).encode()
            target = raw.decode("latin-1").partition("?")[0].replace("\\", "%5C") + (f"?{rest}" if rest else "")
            # A path that begins with two slashes would name another host.
            response: Response = RedirectResponse("/" + target.lstrip("/"), 303)
            self.let_in(response, secure=scope.get("scheme") == "https")
            return response
        if self._knows_token(headers):
            return None
        return _Refused(path)

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
        return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), self._secret)

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


class _Refused(Response):
    """401: for browsers a form that asks for the token, for programs a sentence."""

    def __init__(self, path: str):
        super().__init__(status_code=401)
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from rmqstore.console.pages import refused_page

        await refused_page(scope, self._path)(scope, receive, send)


def _plain(text: str, status: int, headers: dict[str, Any] | None = None) -> Response:
    return PlainTextResponse(text + "\n", status, headers=headers)
