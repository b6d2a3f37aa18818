"""The store that a console shows: opened read-only once, followed while it grows, opened again when it was replaced.

Owns when the store is looked at again and when an open one is let go.  It never writes, locks or creates anything, and
keeps one open store at a time besides those that requests still use: many requests share one set of mapped files.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from rmqstore.config import StoreConfig
from rmqstore.errors import GeometryError, StoreChangedError, StoreClosedError, StoreError
from rmqstore.store.message_store import MessageStore

__all__ = ["FollowedStore", "StoreGoneError"]

# So often (seconds) an open store takes in what its writer did.
_REFRESH_INTERVAL = 0.5
_REFRESH_SHARE = 10
_PARTS = ("commitlog", "consumequeue", "batchconsumequeue", "consumequeue_ext", "index")

_Identity = tuple[tuple[int, int] | None, ...]


class StoreGoneError(StoreError):
    """The store that was shown is not there any more."""


class _Held:
    """An open store, and how many requests use it."""

    def __init__(self, store: MessageStore, identity: _Identity):
        self.store = store
        self.identity = identity
        self.users = 0
        self.retired = False
        self.look_again_at = time.monotonic() + _REFRESH_INTERVAL


class FollowedStore:
    """A store on disk, whatever becomes of it.

    Parameters
    ----------
    path : path
        Its root.
    config : StoreConfig, optional
        Its geometry; by default found from the files at every opening.
    """

    def __init__(self, path: str | os.PathLike[str], config: StoreConfig | None = None):
        self.path = os.fspath(path)
        self.config = config
        self._lock = threading.Lock()
        self._held: _Held | None = None

    def _identity(self) -> _Identity:
        # A rebuild swaps whole folders, and whoever restores a backup makes all again.
        found: list[tuple[int, int] | None] = []
        for name in ("", *_PARTS):
            try:
                status = os.stat(os.path.join(self.path, name) if name else self.path)
            except (FileNotFoundError, NotADirectoryError):
                found.append(None)
            except OSError:
                # Links that lead round: the opening says what of it can be read.
                if not name:
                    raise
                found.append(None)
            else:
                found.append((status.st_dev, status.st_ino))
        if found[0] is None:
            raise StoreGoneError(
                "the store is not there any more, or was moved; this page shows it when it is back", self.path
            )
        return tuple(found)

    @contextlib.contextmanager
    def use(self) -> Iterator[MessageStore]:
        """The store as it is now, for the time of the ``with`` block; never close it.

        Raises
        ------
        StoreGoneError
            Its directory, or its log, is not there any more.
        StoreError, OSError
            It cannot be opened; a later call tries again.
        """
        with self._lock:
            held = self._current()
            held.users += 1
        try:
            yield held.store
        except (GeometryError, StoreChangedError, StoreClosedError):
            # What was taken for its geometry may have been that of a store in the making; the next request opens it again.
            with self._lock:
                if self._held is held:
                    self._retire()
            raise
        finally:
            with self._lock:
                held.users -= 1
                self._close_unused(held)

    def _current(self) -> _Held:
        identity = self._identity()
        held = self._held
        if held is not None and held.identity == identity:
            begun = time.monotonic()
            if begun < held.look_again_at:
                return held
            try:
                held.store.refresh()
                ended = time.monotonic()
                # Tens of thousands of queues take a while to look at; most of the time is for answers.
                held.look_again_at = ended + max(_REFRESH_INTERVAL, _REFRESH_SHARE * (ended - begun))
                return held
            except (StoreError, OSError):
                # Its writer cut or replaced files, or was still making them: what is known of it stands no longer.
                identity = self._identity()
        if held is not None and held.identity[1] is not None and identity[1] is None:
            raise StoreGoneError(
                "the store's commitlog folder is gone; this page shows the store when it is back", self.path
            )
        store = MessageStore.open(self.path, config=self.config, read_only=True)
        self._retire()
        self._held = _Held(store, identity)
        return self._held

    def _retire(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.retired = True
            self._close_unused(held)

    def _close_unused(self, held: _Held) -> None:
        if held.retired and held.users == 0:
            held.store.close()

    def close(self) -> None:
        """Let go of the store as soon as no request uses it."""
        with self._lock:
            self._retire()
