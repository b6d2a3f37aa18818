"""The store that a console shows, refreshed or reopened when it changes, and one verify run at a time.

Nothing is written, locked or created.  One store is open at a time, plus those that requests still use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rmqstore.config import StoreConfig
from rmqstore.console.gate import INTERNAL_ERROR
from rmqstore.errors import GeometryError, StoreChangedError, StoreClosedError, StoreError
from rmqstore.offline.verify import Finding, verify
from rmqstore.store.message_store import MessageStore

__all__ = ["FollowedStore", "StoreGoneError", "VerifyRun"]

# Seconds between two refreshes of an open store.
_REFRESH_INTERVAL = 0.5
_REFRESH_SHARE = 10
_PARTS = ("commitlog", "consumequeue", "batchconsumequeue", "consumequeue_ext", "index")
_FINDINGS_KEPT = 10_000
# Seconds to wait for a run that was stopped, before it counts as running.
_ENDING = 10.0

_Identity = tuple[tuple[int, int] | None, ...]


class StoreGoneError(StoreError):
    """The store was deleted or moved away."""


@dataclasses.dataclass
class _Held:
    # An open store, and the number of requests that use it.

    store: MessageStore
    identity: _Identity
    refresh_at: float
    users: int = 0
    retired: bool = False


class FollowedStore:
    """The store at `path`, reopened when it is replaced; without `config` its geometry is inferred at every opening."""

    def __init__(self, path: str | os.PathLike[str], config: StoreConfig | None = None):
        self.path = os.fspath(path)
        self.config = config
        self._lock = threading.Lock()
        self._held: _Held | None = None

    def _identity(self) -> _Identity:
        # A rebuild swaps whole folders, and a restored backup replaces all.
        found: list[tuple[int, int] | None] = []
        for name in ("", *_PARTS):
            try:
                status = os.stat(os.path.join(self.path, name) if name else self.path)
                found.append((status.st_dev, status.st_ino))
            except (FileNotFoundError, NotADirectoryError):
                found.append(None)
            except OSError:
                # For example a link loop, which opening the store reports.
                if not name:
                    raise
                found.append(None)
        if found[0] is None:
            raise StoreGoneError("the store was deleted or moved; reload this page when it is back", self.path)
        return tuple(found)

    @contextlib.contextmanager
    def use(self) -> Iterator[MessageStore]:
        """Return the current store for the ``with`` block; callers must not close it.

        Raises
        ------
        StoreGoneError
            Its directory, or its log, was deleted or moved away.
        StoreError, OSError
            It cannot be opened; a later call tries again.
        """
        with self._lock:
            held = self._current()
            held.users += 1
        try:
            yield held.store
        except (GeometryError, StoreChangedError, StoreClosedError):
            # The geometry may have been inferred while the store was being created; the next request reopens it.
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
            if begun < held.refresh_at:
                return held
            try:
                held.store.refresh()
                ended = time.monotonic()
                # A refresh of tens of thousands of queues takes a while; most of the time must go to requests.
                held.refresh_at = ended + max(_REFRESH_INTERVAL, _REFRESH_SHARE * (ended - begun))
                return held
            except (StoreError, OSError):
                # Its writer cut, replaced or was still creating files.
                identity = self._identity()
        if held is not None and held.identity[1] is not None and identity[1] is None:
            raise StoreGoneError("the store's commitlog folder is missing; reload this page when it is back", self.path)
        store = MessageStore.open(self.path, config=self.config, read_only=True)
        self._retire()
        self._held = _Held(store, identity, time.monotonic() + _REFRESH_INTERVAL)
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
        """Close the store when no request uses it."""
        with self._lock:
            self._retire()


class StoppedError(Exception):
    """The run was stopped."""


class VerifyRun:
    """A verify run in a thread over the store at `path`; it keeps the first 10 000 findings and counts all."""

    def __init__(self, path: str, config: StoreConfig | None):
        self._path = path
        self._config = config
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = "idle"
        self._error: str | None = None
        self._done = self._total = 0
        self._started: float | None = None
        self._ended: float | None = None
        self._findings: list[Finding] = []
        self._kinds: Counter[str] = Counter()
        # One finding may represent several.
        self._num_findings = 0
        self._finished: tuple[dict[str, int], int] | None = None

    def start(self) -> bool:
        """Start a run, after one that was stopped has ended; False if one is running."""
        with self._lock:
            ending = self._thread if self._state == "running" and self._stop.is_set() else None
        if ending is not None:
            ending.join(_ENDING)
        with self._lock:
            if self._state == "running":
                return False
            self._stop.clear()
            self._state, self._error = "running", None
            self._done = self._total = 0
            self._findings, self._kinds, self._num_findings = [], Counter(), 0
            self._started, self._ended = time.time(), None
            self._thread = threading.Thread(target=self._run, name="rmqstore-console-verify", daemon=True)
            self._thread.start()
            return True

    def stop(self, timeout: float) -> bool:
        """Stop the run at its next step, and wait for that up to `timeout` seconds; False if none is running."""
        with self._lock:
            thread = self._thread
            if self._state != "running" or thread is None:
                return False
            self._stop.set()
        thread.join(timeout)
        return True

    def _progress(self, done: int, total: int) -> None:
        if self._stop.is_set():
            raise StoppedError
        self._done, self._total = done, total

    def _run(self) -> None:
        state, error = "finished", None
        try:
            for finding in verify(self._path, self._config, self._progress):
                if self._stop.is_set():
                    raise StoppedError
                with self._lock:
                    self._kinds[finding.kind] += finding.num
                    self._num_findings += 1
                    if len(self._findings) < _FINDINGS_KEPT:
                        self._findings.append(finding)
        except StoppedError:
            state = "stopped"
        except (StoreError, OSError, ValueError) as failure:
            state, error = "failed", str(failure)
        except BaseException:
            state, error = "failed", INTERNAL_ERROR
            raise
        finally:
            with self._lock:
                self._state, self._error, self._ended = state, error, time.time()
                if state == "finished":
                    self._finished = dict(self._kinds), int(self._ended * 1000)

    def last_finished(self) -> tuple[dict[str, int], int] | None:
        """Return the number of findings by kind, and the end (ms since epoch), of the last finished run, or None."""
        with self._lock:
            return self._finished

    def status(self, first: int = 0, size: int = 200) -> dict[str, Any]:
        """Return the state (idle, running, finished, stopped or failed), progress in bytes of log, and a page of findings."""
        with self._lock:
            started, ended = self._started, self._ended
            seconds = None if started is None else (time.time() if ended is None else ended) - started
            rate = self._done / seconds if seconds and self._done else None
            left = (self._total - self._done) / rate if rate and self._state == "running" else None
            return {
                "state": self._state,
                "error": self._error,
                "done": self._done,
                "total": self._total,
                "started": None if started is None else int(started * 1000),
                "seconds": None if seconds is None else round(seconds, 3),
                "bytes_per_second": rate,
                "seconds_left": None if left is None else round(left, 1),
                "number": self._kinds.total(),
                "kinds": dict(sorted(self._kinds.items())),
                "findings": [dataclasses.asdict(finding) for finding in self._findings[first : first + size]],
                "first": first,
                "kept": len(self._findings),
                "told": self._num_findings,
            }
