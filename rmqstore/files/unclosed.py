"""What was opened for writing and not closed: a warning where it was forgotten, a close when the program ends.

Owns the list of what this process has open for writing, by weak references, so that it keeps nothing alive.
Invariants:

- At the end of the program everything on the list is closed, the newest first: after all threads but daemons have
  ended, and before the interpreter takes itself apart.  One that fails is logged and holds up no other.
- What the collector finds gets a warning, and is let go as by a crash unless it says how to do better without waiting
  for anything: a collection runs within any allocation on any thread, which may hold a lock that closing waits for.
- A forked child closes nothing and warns of nothing: what it inherited is its parent's.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import warnings
import weakref

__all__ = ["ClosedAtExit"]

logger = logging.getLogger(__name__)

_opened: weakref.WeakSet[ClosedAtExit] = weakref.WeakSet()
_numbers = itertools.count(1)


class ClosedAtExit:
    """What has to be closed when it was opened for writing.

    `_note_open` is called at the end of the opening, `_note_closed` by whatever ends the writing.
    """

    # The process that has it open for writing, 0 while none has; and its turn among the others.
    _writer_pid: int = 0
    _opening: int = 0

    def close(self) -> object:
        """Force everything to the disk and give it back."""
        raise NotImplementedError

    def _note_open(self) -> None:
        self._writer_pid, self._opening = os.getpid(), next(_numbers)
        _opened.add(self)

    def _note_closed(self) -> None:
        self._writer_pid = 0
        _opened.discard(self)

    def _when_forgotten(self) -> None:
        # In a finalizer: it must not wait for a lock, a thread or a disk.
        pass

    def __del__(self) -> None:
        if self._writer_pid and self._writer_pid == os.getpid():
            self._writer_pid = 0
            try:
                warnings.warn(
                    f"unclosed {self!r}: it was forgotten; close it, best by a with statement",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
            finally:
                self._when_forgotten()


def _close_all() -> None:
    process = os.getpid()
    for each in sorted(_opened, key=lambda opened: -opened._opening):
        if each._writer_pid != process:
            continue
        each._writer_pid = 0
        try:
            # A filter may make an error of it.
            warnings.warn(
                f"unclosed {each!r}: it is closed now, at the end of the program; close it yourself, best by a with "
                "statement",
                ResourceWarning,
                stacklevel=2,
                source=each,
            )
        except ResourceWarning as warning:
            logger.error("%s", warning)
        try:
            each.close()
        except Exception as error:
            logger.error("%r could not be closed at the end of the program: %s", each, error)


# Registered by the import, so that what a program registers later, and may use a store, runs before.
atexit.register(_close_all)
