"""Housekeeping: the background threads of a store that is open for writing.

Owns a thread and when each of its tasks is due; what a task does belongs to the store.  It never keeps a store alive: the
thread holds a weak reference, and ends when the store was forgotten, after what `end_with` gave it.  A task that fails is
logged and tried again when it is due next; tasks decide themselves what a failure means for the store.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

__all__ = ["Housekeeping", "Task"]

logger = logging.getLogger(__name__)


class Task(NamedTuple):
    """Something to be done again and again; times in ms.

    Attributes
    ----------
    name : str
        For logs.
    interval : int
        From the end of one run to the start of the next; 0 = never.
    run : callable
        Takes the owner.  If it returns an int, that is the interval until it runs again.
    first : int or None
        When it runs for the first time, counted from the start; None = after `interval`.
    """

    name: str
    interval: int
    run: Callable[[Any], object]
    first: int | None = None


class Housekeeping:
    """A thread that runs `tasks` on `owner` until `stop`, or until nobody else holds `owner`.

    Parameters
    ----------
    owner : object
        What the tasks are about; only a weak reference is kept.
    tasks : iterable of Task
    name : str
        Of the thread.
    """

    def __init__(self, owner: object, tasks: Iterable[Task], name: str):
        self._owner = weakref.ref(owner)
        self._tasks = [task for task in tasks if task.interval > 0]
        self._stopping = threading.Event()
        # Not an Event: a finalizer may put into it, whatever this thread is doing when the collector runs.
        self._woken: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start = time.monotonic()
        due = [start + (task.interval if task.first is None else task.first) / 1000 for task in self._tasks]
        while True:
            woken, last = self._wait(min(due) - time.monotonic() if due else None)
            if self._stopping.is_set():
                return
            if last is not None:
                last()
                return
            if woken:
                due = [0.0] * len(due)
            owner = self._owner()
            if owner is None:
                return
            for number, task in enumerate(self._tasks):
                if due[number] > time.monotonic() or self._stopping.is_set():
                    continue
                interval = task.interval
                try:
                    answer = task.run(owner)
                    if type(answer) is int:
                        interval = answer
                except Exception as error:
                    logger.error("%s: %s failed: %s", self._thread.name, task.name, error)
                due[number] = time.monotonic() + interval / 1000
            # The thread must not be what keeps the store alive while it waits.
            del owner

    def _wait(self, seconds: float | None) -> tuple[bool, Callable[[], None] | None]:
        # Whether it was woken, and what it ends with.
        last, woken = None, False
        with contextlib.suppress(Empty):
            last, woken = self._woken.get(timeout=None if seconds is None else max(0.0, seconds)), True
            while last is None:
                last = self._woken.get_nowait()
        return woken, last

    def pause(self, milliseconds: int) -> bool:
        """Wait so long within a task; False if the thread is to stop."""
        return not self._stopping.wait(milliseconds / 1000)

    def wake(self) -> None:
        """Run every task now, or once more after the run that is going on."""
        self._woken.put(None)

    def end_with(self, last: Callable[[], None]) -> None:
        """Call `last` on the thread after the task that runs now, and end it; may be called in a finalizer."""
        self._woken.put(last)

    def stop(self) -> None:
        """End the thread after the task that runs now, and wait for that."""
        self._stopping.set()
        self._woken.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """bool: the thread runs."""
        return self._thread.is_alive()
