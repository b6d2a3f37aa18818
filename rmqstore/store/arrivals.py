"""Arrivals: what wakes those that wait for messages, threads and event loops alike.

Owns the condition that every put tells, and which futures of which loop are to be woken by it.  No thread is used for a
waiter in an event loop, and a loop gets one call for all of its waiters however many puts come before it runs.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

__all__ = ["Arrivals"]


class Arrivals(threading.Condition):
    """A condition that wakes futures of event loops too; as of `threading.Condition` otherwise."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self._futures: dict[asyncio.AbstractEventLoop, set[asyncio.Future[None]]] = {}

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """asyncio.Future: done after the next `notify_all`, to be given to `forget`; called in the thread of `loop`."""
        made = loop.create_future()
        with self:
            self._futures.setdefault(loop, set()).add(made)
        return made

    def forget(self, future: asyncio.Future[None]) -> None:
        """Wake this one no more."""
        loop = future.get_loop()
        with self:
            futures = self._futures.get(loop, set())
            futures.discard(future)
            if not futures:
                self._futures.pop(loop, None)

    def notify_all(self) -> None:
        """Wake every thread and every future; the caller holds the lock."""
        super().notify_all()
        if self._futures:
            woken, self._futures = self._futures, {}
            for loop, futures in woken.items():
                # A loop that was closed has nobody left who waits.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_wake, futures)


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
