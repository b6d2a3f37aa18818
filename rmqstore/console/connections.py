"""Connections of visitors: how many there are at one time, and how long one may keep silent.

Owns both bounds.  A process has so many file descriptors; connections that say nothing would take them all, and with them the
store's files and everybody else's connections.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connection"]

# Seconds that the rest of a request may keep others waiting; longer than the server's own limit between two requests.
_PATIENCE = 30.0
_MOST = 4096


def _most() -> int:
    """int: connections at one time; half of what the process may open is for the store."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(_MOST, soft // 2), 1)


class Connection(H11Protocol):
    """A connection that ends when it is one too many, or when a request does not come, or not wholly, for too long."""

    _seen: tuple[Any, int] | None = (None, 0)
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, or hang up."""
        super().connection_made(transport)
        if len(self.connections) > _most():
            transport.abort()
            return
        self._look = self.loop.call_later(_PATIENCE, self._look_after)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _look_after(self) -> None:
        # A request that the server answers may take as long as it takes; one that is still to come may not.  An answer that
        # is on its way counts as long as some of it is taken.
        cycle = self.cycle
        waiting = cycle is None or cycle.response_complete or cycle.more_body
        state = (cycle, self.transport.get_write_buffer_size()) if waiting else None
        if state is not None and state == self._seen:
            self.transport.abort()
            return
        self._seen = state
        self._look = self.loop.call_later(_PATIENCE, self._look_after)
