"""Limits on connections, on how long one may be idle, and on the memory of responses that are being sent.

uvicorn's limits do not replace them: ``limit_concurrency`` rejects requests but accepts connections, so that idle ones use up
the file descriptors that the store needs; no timeout ends a connection without a request, or a client that reads nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import resource
import time
from typing import Any

import anyio
import anyio.lowlevel
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rmqstore.console.gate import forbid, said
from rmqstore.texts import escape

__all__ = ["Connection", "Outgoing", "backlog", "tell_allocator"]

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 4096
_BACKLOG = 2048
# Seconds for the rest of a request; more than the server's own limit between two requests.
_PATIENCE = 30.0
# Seconds in which a client must read something.
_READER_PATIENCE = 60
_PART = 256 * 1024
# Bytes of responses that are being sent: three of the largest decompressed bodies, and pages.
_MOST_HELD = 256 * 1024 * 1024
# Smaller responses are not counted: the number of connections is limited, and each sends one response at a time.
_SMALL = 16 * 1024


def _most() -> int:
    # Half of the process's file descriptors are for the store.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(min(_MOST_CONNECTIONS, soft // 2), 1)


def backlog() -> int:
    """Return how many connections may wait to be accepted; asyncio accepts all of them before it reads from the first."""
    return max(min(_BACKLOG, _most() // 4), 1)


class Connection(H11Protocol):
    """A connection that is closed if a request takes too long, or if it has been idle longest when a new one needs room."""

    waiting_since = 0.0
    _seen: tuple[Any, int] | None = (None, 0)
    _look: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """True if no request is being answered."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or close it if there is no room."""
        super().connection_made(transport)
        # Sending waits for the operating system, so that no data counts as sent while it is in memory here.
        transport.set_write_buffer_limits(high=0)
        self.waiting_since = time.monotonic()
        if len(self.connections) > _most() and not self._make_room():
            transport.abort()
            return
        self._look = self.loop.call_later(_PATIENCE, self._look_after)

    def _make_room(self) -> bool:
        # A client may still be reading the data in the buffer.
        idle = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and each.waits and not each.transport.get_write_buffer_size()
        ]
        if not idle:
            return False
        longest = min(idle, key=lambda each: each.waiting_since)
        self.connections.discard(longest)
        longest.transport.abort()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.waiting_since = time.monotonic()
        super().on_response_complete()

    def _look_after(self) -> None:
        # Responses have no time limit, requests have.  A closing connection is alive while its buffer shrinks.
        idle = self.waits or self.transport.is_closing()
        state = (self.cycle, self.transport.get_write_buffer_size()) if idle else None
        if state is not None and state == self._seen:
            self.transport.abort()
            return
        self._seen = state
        self._look = self.loop.call_later(_PATIENCE, self._look_after)


class Outgoing:
    """ASGI middleware that sends responses in parts, and rejects one that exceeds the memory for responses."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count the bytes of the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(self, scope, send)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self.held -= answer.counted
            if answer.counted and not self.held:
                # glibc otherwise keeps up to tens of MiB that many threads needed at once.
                tell_allocator("malloc_trim", 0)


def tell_allocator(name: str, *numbers: int) -> None:
    """Call a function of glibc's allocator, if the C library has it."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*numbers)


class _Answer:
    # Ignores all that the application sends after the response was rejected or timed out.

    def __init__(self, outgoing: Outgoing, scope: Scope, send: Send):
        self._outgoing, self._scope, self._send = outgoing, scope, send
        self._ended = False
        self.counted = 0

    async def send(self, message: Message) -> None:
        if self._ended:
            return
        try:
            if message["type"] != "http.response.start":
                await self._parts(message)
                return
            size = int(Headers(raw=message["headers"]).get("content-length", 0))
            if size > _SMALL:
                # A response larger than the limit is sent alone.
                if self._outgoing.held and self._outgoing.held + size > _MOST_HELD:
                    await self._refuse()
                    return
                self.counted = size
                self._outgoing.held += size
            await self._wait(message)
        except TimeoutError:
            # The server closes the connection, because the body is incomplete.
            self._ended = True
            logger.warning("client of %s read nothing for %d s; connection closed", escape(self._scope["path"]), _READER_PATIENCE)

    async def _refuse(self) -> None:
        text = "Service unavailable: too many responses are being sent; try again later."
        response = said(self._scope, text, 503, {"Retry-After": "2"})
        forbid(response.headers)
        await self._wait({"type": "http.response.start", "status": 503, "headers": response.raw_headers})
        await self._parts({"type": "http.response.body", "body": response.body})
        self._ended = True

    async def _parts(self, message: Message) -> None:
        # Send part by part: the server would buffer a whole body for a slow client after it was counted as sent.
        body = memoryview(message.get("body", b""))
        if len(body) <= _SMALL:
            await self._wait(message)
            return
        for first in range(0, len(body), _PART):
            part = bytes(body[first : first + _PART])
            await self._wait({"type": "http.response.body", "body": part, "more_body": True})
            # Let the server notice that the client is gone.
            await anyio.lowlevel.checkpoint()
        if not message.get("more_body", False):
            await self._wait({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait(self, message: Message) -> None:
        with anyio.fail_after(_READER_PATIENCE):
            await self._send(message)
