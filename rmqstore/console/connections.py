"""Connections of visitors: how many there are at one time, from one host too, and how long one may keep silent.

Owns these bounds.  A process has so many file descriptors; connections that say nothing would take them all, and with them the
store's files and everybody else's connections.  Whoever comes when there is no room is let in as long as another connection
only waits: that one ends, the longest wait first, and of the host that has the most.  So no host can keep another out, or
itself, by connections that say nothing.  A connection whose request is being answered never ends for somebody else.
"""

from __future__ import annotations

import asyncio
import resource
import weakref
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rmqstore.console.gate import host_of

__all__ = ["Connection", "backlog"]

# Seconds that the rest of a request may keep others waiting; longer than the server's own limit between two requests.
_PATIENCE = 30.0
_MOST = 4096
_BACKLOG = 2048


def _most() -> int:
    """int: connections at one time; half of what the process may open is for the store."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(_MOST, soft // 2), 1)


def backlog() -> int:
    """int: connections that may wait to be accepted; asyncio accepts as many before it looks at the first."""
    return max(min(_BACKLOG, _most() // 4), 1)


class _Visitors:
    """The connections of one server, by host; of each host in the order in which they began to wait."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[Connection, None]] = {}

    def take(self, connection: Connection) -> bool:
        """bool: there is room for it, or there was made."""
        most = _most()
        own = self._hosts.setdefault(connection.host, {})
        own[connection] = None
        if len(own) > max(most // 2, 1):
            return self._end_one([own])
        if sum(map(len, self._hosts.values())) > most:
            return self._end_one(sorted(self._hosts.values(), key=len, reverse=True))
        return True

    def _end_one(self, hosts: Iterable[dict[Connection, None]]) -> bool:
        for connections in hosts:
            for each in list(connections):
                # The newest of its host is whom room is made for; of what was answered the visitor may still be reading.
                if each.waits and not each.is_new and not each.transport.get_write_buffer_size():
                    self.leave(each)
                    each.transport.abort()
                    return True
        return False

    def begins_to_wait(self, connection: Connection) -> None:
        """Note that it was answered: others have waited longer now."""
        own = self._hosts.get(connection.host, {})
        if connection in own:
            del own[connection]
            own[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget it, once or again."""
        own = self._hosts.get(connection.host)
        if own is not None:
            own.pop(connection, None)
            if not own:
                del self._hosts[connection.host]


_servers: weakref.WeakKeyDictionary[ServerState, _Visitors] = weakref.WeakKeyDictionary()


class Connection(H11Protocol):
    """A connection that ends when it is one too many, or when a request does not come, or not wholly, for too long."""

    host = ""
    is_new = True
    _seen: tuple[Any, int] | None = (None, 0)
    _look: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """bool: no request of it is being answered: one is still to come, or the rest of one."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, or hang up."""
        super().connection_made(transport)
        # What is sent waits until the system has all of it, so that no answer counts as sent that is still kept here.
        transport.set_write_buffer_limits(high=0)
        self.host = host_of(self.client)
        self._visitors = _servers.setdefault(self.server_state, _Visitors())
        if not self._visitors.take(self):
            self._visitors.leave(self)
            transport.abort()
            return
        self.is_new = False
        self._look = self.loop.call_later(_PATIENCE, self._look_after)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._visitors.leave(self)
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Let the next request come."""
        self._visitors.begins_to_wait(self)
        super().on_response_complete()

    def _look_after(self) -> None:
        # A request that the server answers may take as long as it takes; one that is still to come may not.  An answer that
        # is on its way counts as long as some of it is taken; the end of one that was given up, too.
        idle = self.waits or self.transport.is_closing()
        state = (self.cycle, self.transport.get_write_buffer_size()) if idle else None
        if state is not None and state == self._seen:
            self.transport.abort()
            return
        self._seen = state
        self._look = self.loop.call_later(_PATIENCE, self._look_after)
