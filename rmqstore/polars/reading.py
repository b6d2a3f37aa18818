"""Readings by Polars' own threads, which the end of the program ends.

Owns the list of readings that are at work.  Polars leaves a source alone in the middle of a batch where a query fails or
its limit is met, and a thread that is still in Python when the interpreter is taken apart aborts the process.
Invariant: at the end of the program no thread of Polars is in a reading, and none begins one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rmqstore.config import StoreConfig
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Reading"]

_working: set[Reading] = set()
_changed = threading.Condition()
_over = False


class Reading:
    """The frames that one query reads from a store; an iterator.

    Parameters
    ----------
    source, config
        As of `scan_store`: a store that is only known by its path is open while it is read.
    frames : callable
        Called with the open store, returns the frames.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | MessageStore,
        config: StoreConfig | None,
        frames: Callable[[MessageStore], Iterator[pl.DataFrame]],
    ):
        self.store: MessageStore | None = None
        if isinstance(source, MessageStore):
            self.store, self._frames = source, frames(source)
        else:
            self._frames = self._opened(source, config, frames)

    def _opened(
        self,
        source: str | os.PathLike[str],
        config: StoreConfig | None,
        frames: Callable[[MessageStore], Iterator[pl.DataFrame]],
    ) -> Iterator[pl.DataFrame]:
        with MessageStore.open(source, config=config, read_only=True) as self.store:
            yield from frames(self.store)

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> pl.DataFrame:
        with _changed:
            if _over:
                raise StopIteration
            _working.add(self)
        try:
            return next(self._frames)
        finally:
            with _changed:
                _working.discard(self)
                _changed.notify_all()


def _end_all() -> None:
    global _over
    with _changed:
        _over = True
        while _working:
            for each in _working:
                # A batch may take minutes, but not of a store that is closed.
                if each.store is not None:
                    with contextlib.suppress(Exception):
                        each.store.close()
            # A store that is being opened now is closed the next time.
            _changed.wait(0.1)


def _after_fork_in_child() -> None:
    # The threads are the parent's.
    global _changed
    _changed = threading.Condition()
    _working.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_end_all)
