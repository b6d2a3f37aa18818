"""One verify run at a time, in a thread of its own, with its progress and its findings.

Owns the run's state and its thread.  It only reads the store; findings are kept up to a bound and counted beyond it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from typing import Any

from rmqstore.config import StoreConfig
from rmqstore.errors import StoreError
from rmqstore.offline.verify import Finding, verify

__all__ = ["VerifyRun"]

_FINDINGS_KEPT = 10_000
# Seconds to wait for a run that was told to end, before it is said to be going on.
_ENDING = 10.0


class StoppedError(Exception):
    """Somebody ended the run."""


class VerifyRun:
    """Verifies the store at `path` when it is told to.

    Parameters
    ----------
    path : str
    config : StoreConfig, optional
        As of `rmqstore.verify`.
    """

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
        # Findings, of which one may stand for several things in a row.
        self._told = 0
        self._finished: tuple[dict[str, int], int] | None = None

    def start(self) -> bool:
        """Begin a run; False if one is going on.  One that was told to end is waited for."""
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
            self._findings, self._kinds, self._told = [], Counter(), 0
            self._started, self._ended = time.time(), None
            self._thread = threading.Thread(target=self._run, name="rmqstore-console-verify", daemon=True)
            self._thread.start()
            return True

    def stop(self, timeout: float | None = None) -> bool:
        """End the run at its next step, and wait up to `timeout` seconds for that; False if none is going on."""
        with self._lock:
            thread = self._thread
            if self._state != "running" or thread is None:
                return False
            self._stop.set()
        if timeout is not None:
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
                    self._told += 1
                    if len(self._findings) < _FINDINGS_KEPT:
                        self._findings.append(finding)
        except StoppedError:
            state = "stopped"
        except (StoreError, OSError, ValueError) as failure:
            state, error = "failed", str(failure)
        except BaseException:
            state, error = "failed", "an error in rmqstore itself; the server's log has it"
            raise
        finally:
            with self._lock:
                self._state, self._error, self._ended = state, error, time.time()
                if state == "finished":
                    self._finished = dict(self._kinds), int(self._ended * 1000)

    def last_finished(self) -> tuple[dict[str, int], int] | None:
        """(findings by kind, ms since epoch of the end) of the last run that went to its end; None if there was none."""
        with self._lock:
            return self._finished

    def status(self, first: int = 0, size: int = 200) -> dict[str, Any]:
        """dict: state ("idle", "running", "finished", "stopped", "failed"), progress in bytes of log, and findings."""
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
                "told": self._told,
            }
