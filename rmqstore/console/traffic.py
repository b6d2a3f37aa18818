"""Bounds on what visitors take: connections, the time that one may be silent, and memory for answers on their way.

Owns these bounds.  uvicorn's own limits do not replace them: ``limit_concurrency`` refuses requests but accepts connections, so
silent ones take all file descriptors of the process, those of the store with them; no time-out of it ends a connection on which
a request never comes, or a reader that takes nothing.
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
# Seconds that the rest of a request may take; longer than the server's own limit between two requests.
_PATIENCE = 30.0
# Seconds that a reader may take nothing of an answer.
_READER_PATIENCE = 60
_PART = 256 * 1024
# Bytes of answers on their way; room for three of the largest bodies that are unpacked, and for pages next to them.
_MOST_HELD = 256 * 1024 * 1024
# Answers up to this size are not counted: connections are bounded, and each has one answer at a time.
_SMALL = 16 * 1024


def _most() -> int:
    # Half of the files that the process may open is for the store.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(min(_MOST_CONNECTIONS, soft // 2), 1)


def backlog() -> int:
    """int: connections that may wait to be accepted; asyncio accepts all of them before it reads from the first."""
    return max(min(_BACKLOG, _most() // 4), 1)


class Connection(H11Protocol):
    """A connection that ends when a request does not come in time, or when a new connection needs its place.

    Of connections without a request the one that has waited longest makes room.  A connection whose request is being
    answered never ends for another.
    """

    waiting_since = 0.0
    _seen: tuple[Any, int] | None = (None, 0)
    _look: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """bool: no request of it is being answered: one is still to come, or the rest of one."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept it, or close it where there is no room."""
        super().connection_made(transport)
        # Sending waits until the operating system has all of it: nothing counts as sent that is still in memory here.
        transport.set_write_buffer_limits(high=0)
        self.waiting_since = time.monotonic()
        if len(self.connections) > _most() and not self._make_room():
            transport.abort()
            return
        self._look = self.loop.call_later(_PATIENCE, self._look_after)

    def _make_room(self) -> bool:
        # The visitor may still be reading what is in the buffer.
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
        """Stop looking after it."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.waiting_since = time.monotonic()
        super().on_response_complete()

    def _look_after(self) -> None:
        # An answer may take as long as it takes, a request may not.  A closing connection counts while some of its bytes go out.
        idle = self.waits or self.transport.is_closing()
        state = (self.cycle, self.transport.get_write_buffer_size()) if idle else None
        if state is not None and state == self._seen:
            self.transport.abort()
            return
        self._seen = state
        self._look = self.loop.call_later(_PATIENCE, self._look_after)


class Outgoing:
    """ASGI middleware: sends answers in parts, and refuses one for which there is no room next to those on their way.

    Attributes
    ----------
    held : int
        Bytes of answers that are on their way.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have it answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(self, scope, send)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self.held -= answer.counted
            if answer.counted and not self.held:
                # glibc keeps what many threads needed at the same time, up to tens of MiB, until it is told.
                tell_allocator("malloc_trim", 0)


def tell_allocator(name: str, *numbers: int) -> None:
    """Call a function of glibc's allocator; another C library has none of that name."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*numbers)


class _Answer:
    # Ignores what the application sends after the answer was refused, or its reader given up.

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
                # One that is larger than the room goes out alone.
                if self._outgoing.held and self._outgoing.held + size > _MOST_HELD:
                    await self._refuse()
                    return
                self.counted = size
                self._outgoing.held += size
            await self._wait(message)
        except TimeoutError:
            # The server closes the connection, since the body is not whole.
            self._ended = True
            logger.warning("a reader of %s took nothing for %d s", escape(self._scope["path"]), _READER_PATIENCE)

    async def _refuse(self) -> None:
        text = "many answers wait for slow readers; ask again"
        response = said(self._scope, text, 503, {"Retry-After": "2"})
        forbid(response.headers)
        await self._wait({"type": "http.response.start", "status": 503, "headers": response.raw_headers})
        await self._parts({"type": "http.response.body", "body": response.body})
        self._ended = True

    async def _parts(self, message: Message) -> None:
        # Each part waits until the one before it is sent: a server takes a whole body at once, and would keep it for a slow
        # reader after it was counted as sent.  So the end comes after the last part.
        body = memoryview(message.get("body", b""))
        if len(body) <= _SMALL:
            await self._wait(message)
            return
        for first in range(0, len(body), _PART):
            part = bytes(body[first : first + _PART])
            await self._wait({"type": "http.response.body", "body": part, "more_body": True})
            # A server learns that the reader left when the loop goes on, and then takes nothing more.
            await anyio.lowlevel.checkpoint()
        if not message.get("more_body", False):
            await self._wait({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait(self, message: Message) -> None:
        with anyio.fail_after(_READER_PATIENCE):
            await self._send(message)
