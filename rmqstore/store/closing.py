"""Closing a store: in which order, and for whom: who has it, the end of the program, or nobody who has it any more.

Owns the parts of every store that is open for writing, so that they are whole when the store itself was forgotten.  A close
that was interrupted is finished by the next one.  A finalizer closes nothing: it may run within any allocation on any
thread, which may hold a lock that closing waits for.  It hands the parts to the store's housekeeping thread, and whoever
opens the store again, or the end of the program, waits for that.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import TYPE_CHECKING

from rmqstore.store.opening import close_in_order

if TYPE_CHECKING:
    from rmqstore.files.store_lock import StoreLock
    from rmqstore.store.flushing import Flushing
    from rmqstore.store.store_state import StoreState
    from rmqstore.store.upkeep import Upkeep

__all__ = ["Closing", "close_forgotten"]

logger = logging.getLogger(__name__)

# Strong references: what the collector finds with a forgotten store has lost its weak references before anyone is told.
_writers: dict[int, Closing] = {}
_forgotten: dict[int, Closing] = {}


def _after_fork_in_child() -> None:
    # They are the parent's to close.
    _writers.clear()
    _forgotten.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Closing:
    """Closes the parts of one store, once.

    Attributes
    ----------
    upkeep : Upkeep or None
        Its threads; None before they run, and read-only.
    store_lock : StoreLock or None
    done : bool
        Everything was given back.
    """

    def __init__(self, state: StoreState, flushing: Flushing):
        self.state, self.flushing = state, flushing
        self.upkeep: Upkeep | None = None
        self.store_lock: StoreLock | None = None
        self.done = False
        self._lock = threading.RLock()

    def renew_lock(self) -> None:
        """Make the lock new, in a forked child."""
        self._lock = threading.RLock()

    def keep(self) -> None:
        """Hold the parts of a store that is open for writing, until they are closed."""
        _writers[id(self)] = self

    def forget(self) -> None:
        """Take over from a store that was forgotten; called by its finalizer, it waits for nothing."""
        if _writers.pop(id(self), None) is not None and self.upkeep is not None:
            _forgotten[id(self)] = self
            self.upkeep.end_with(self._close_forgotten)

    def _close_forgotten(self) -> None:
        # On the housekeeping thread.  Whoever is closing it already may be waiting for this thread.
        if self._lock.acquire(blocking=False):
            try:
                self.close()
            except Exception as error:
                logger.error("%s was forgotten, and could not be closed in order: %s", self.state.path, error)
            finally:
                self._lock.release()

    def close(self) -> None:
        """As `MessageStore.close`."""
        state = self.state
        with self._lock:
            if state.closed:
                self._let_go()
                return
            # A forked child only lets go: the store, its lock and its abort file are the parent's, as is the thread.
            own = state.pid == os.getpid()
            if self.upkeep is not None and own:
                self.upkeep.stop()
            with state.lock:
                # From here on nothing is put; puts that wait for the disk get their flush.
                state.closing = True
                state.appender = None
            try:
                if not state.read_only and own:
                    with self.flushing.lock:
                        close_in_order(state, self.flushing)
            finally:
                self._let_go()

    def abandon(self, error: BaseException) -> None:
        """Let go of a store whose opening failed with `error`, as a crash would; `abort` stays."""
        # No task begins any more, of whichever thread.
        self.state.poison = error
        if self.upkeep is not None:
            self.upkeep.stop()
        self._let_go()

    def _let_go(self) -> None:
        # Each step may be done again: whatever an interrupt leaves undone is done by the next call.
        if self.done:
            return
        state = self.state
        state.closed = True
        for short_way in (state.key_query, state.queue_gets):
            if short_way is not None:
                short_way.closed = True
        state.older.close()
        try:
            with state.lock:
                state.close_files()
        finally:
            if self.store_lock is not None:
                self.store_lock.release()
            _writers.pop(id(self), None)
            _forgotten.pop(id(self), None)
            with state.arrived:
                state.arrived.notify_all()
            self.done = True


def close_forgotten(root: str | None = None) -> None:
    """Close what was forgotten of the store at `root`, or of all, and wait for it; what fails there is logged."""
    path = None if root is None else os.path.realpath(root)
    for closing in list(_forgotten.values()):
        if path is None or os.path.realpath(closing.state.path) == path:
            try:
                closing.close()
            except Exception as error:
                logger.error("%s was forgotten, and could not be closed in order: %s", closing.state.path, error)


# Runs before what is still open is closed, as its module was imported before this one.
atexit.register(close_forgotten)
