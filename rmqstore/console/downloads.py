"""Answers on their way to their readers: sent in parts, and only so many bytes of them at one time.

Owns what of an answer waits in memory for a reader that is slow, or takes nothing: how many bytes, of one host too, and
for how long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
import anyio.lowlevel
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rmqstore.console.gate import forbid, host_of, said
from rmqstore.texts import escape

__all__ = ["Download", "Outgoing"]

logger = logging.getLogger(__name__)

_DOWNLOAD_PART = 256 * 1024
# Seconds that a reader may take nothing; who sleeps does not keep others from downloading.
_DOWNLOAD_PATIENCE = 60
_MOST_HELD = 64 * 1024 * 1024
# Answers up to this are not counted: connections are bounded, and the next answer of one waits until this one is taken.
_SMALL = 16 * 1024
# Tells `Outgoing` that something else bounds the answer.
_FEW = "rmqstore.few"


class Download(Response):
    """Bytes that a browser stores and does not show; `done` is called when they are sent, or cannot be.

    Whoever gives `done` lets only some of these go out at one time, so that they are not counted among all answers.
    """

    def __init__(self, data: bytes, name: str, done: Callable[[], None] | None):
        super().__init__(
            data,
            media_type="application/octet-stream",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            await send({**message, _FEW: True} if self._done is not None else message)

        try:
            await super().__call__(scope, receive, send_marked)
        finally:
            self.body = b""
            if self._done is not None:
                self._done()


class Outgoing:
    """ASGI middleware: sends answers in parts, and refuses one for which there is no room beside those that wait.

    All answers together hold so many bytes at the most, and each host no more than it leaves free: one host at most
    half, two at most a third each.  So no number of hosts takes all of it, and a further one is answered.

    Attributes
    ----------
    held : dict of str to int
        Bytes of answers that are on their way, by host.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self.held: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have it answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(self, scope, send)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self.let_go(answer.host, answer.counted)

    def take(self, host: str, size: int) -> bool:
        """bool: there is room for an answer of that size, which is counted from now on."""
        total, own = sum(self.held.values()), self.held.get(host, 0)
        # One that is larger than the room goes out alone, or nobody would ever get it.
        if total and own + size > _MOST_HELD - total - size:
            return False
        self.held[host] = own + size
        return True

    def let_go(self, host: str, size: int) -> None:
        """Count it no more."""
        left = self.held.pop(host, 0) - size
        if left > 0:
            self.held[host] = left


class _Answer:
    # One answer on its way; it stops taking what the application gives where it was refused, or its reader given up.

    def __init__(self, outgoing: Outgoing, scope: Scope, send: Send):
        self._outgoing, self._scope, self._send = outgoing, scope, send
        self._ended = False
        self.host, self.counted = host_of(scope.get("client")), 0

    async def send(self, message: Message) -> None:
        if self._ended:
            return
        few = message.pop(_FEW, False)
        try:
            if message["type"] != "http.response.start":
                await self._parts(message)
                return
            size = int(Headers(raw=message["headers"]).get("content-length", 0))
            if size > _SMALL and not few:
                if not self._outgoing.take(self.host, size):
                    await self._refuse()
                    return
                self.counted = size
            await self._wait(message)
        except TimeoutError:
            # The connection is closed by the server, since the body is not whole.
            self._ended = True
            logger.warning("a reader of %s took nothing for %d s", escape(self._scope["path"]), _DOWNLOAD_PATIENCE)

    async def _refuse(self) -> None:
        text = "many answers wait at this moment for readers that are slow; ask again"
        response = said(self._scope, text, 503, {"Retry-After": "2"})
        forbid(response.headers)
        await self._wait({"type": "http.response.start", "status": 503, "headers": response.raw_headers})
        await self._parts({"type": "http.response.body", "body": response.body})
        self._ended = True

    async def _parts(self, message: Message) -> None:
        # Each part waits until the one before it is on its way: a server takes in a whole body at once, and would keep
        # it for a reader that takes nothing, after it was counted as sent.  So the end comes after the last part.
        body = memoryview(message.get("body", b""))
        if len(body) <= _SMALL:
            await self._wait(message)
            return
        for first in range(0, len(body), _DOWNLOAD_PART):
            part = bytes(body[first : first + _DOWNLOAD_PART])
            await self._wait({"type": "http.response.body", "body": part, "more_body": True})
            # A server learns that the reader left when the loop goes on, and then takes nothing more.
            await anyio.lowlevel.checkpoint()
        if not message.get("more_body", False):
            await self._wait({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait(self, message: Message) -> None:
        with anyio.fail_after(_DOWNLOAD_PATIENCE):
            await self._send(message)
