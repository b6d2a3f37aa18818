"""The lock of a store, its ``abort`` file, and the list of objects that this process has open for writing.

Owns the ``lock`` file: an exclusive POSIX record lock on byte 0, which also excludes a Java broker (``flock`` would not), and the
list of stores that this process holds: a POSIX lock vanishes when the process closes any descriptor of the file.  Readers never
touch either file.  Invariants:

- A forked child holds, closes and reports nothing: the lock stays with the parent.
- The end of the program closes everything on the list, the newest first, after all threads but daemons.  It logs failures.
- A garbage-collected object gets a warning and ends as by a crash, unless `_when_forgotten` does better without waiting: a
  collection may run on a thread that holds a lock that closing needs.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import itertools
import logging
import os
import struct
import sys
import threading
import warnings
import weakref

from rmqstore.errors import OpenReadOnly, Sentence, StoreLockedError
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import is_locked, naming_errors

__all__ = ["ClosedAtExit", "StoreLock", "abort_mark", "abort_process", "is_held"]

logger = logging.getLogger(__name__)


class _Held:
    """The locks of this process: open files by the store's real path.

    A `StoreLock` keeps a reference: an ending interpreter may clear this module before it calls the last finalizers.
    """

    def __init__(self) -> None:
        self.files: dict[str, io.FileIO] = {}
        # Reentrant: a garbage collection inside may release the lock of a forgotten store.
        self.lock = threading.RLock()


_held = _Held()

# struct flock of 64-bit Linux: type, whence, start, length, process.
_FLOCK = "hhqqi"


def _forget_after_fork() -> None:
    # The lock is the parent's, which closing a file here does not change.
    for file in _held.files.values():
        file.close()
    _held.files.clear()
    _held.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def _holder(fd: int) -> str:
    # The process that holds the lock, and its command, as far as the operating system reports them.
    process = 0
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, struct.error):
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
            kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
            process = 0 if kind == fcntl.F_UNLCK else process
    if process <= 0:
        return "another process"
    with contextlib.suppress(OSError):
        with open(f"/proc/{process}/cmdline", "rb") as file:
            words = [" ".join(word.decode("utf-8", "replace").split()) for word in file.read(4096).split(b"\0")]
        words = [word for word in words if word]
        command = " ".join(words)
        # A broker's command line is kilobytes of class path; its beginning and its main class suffice.
        return f"process {process} ({command if len(command) <= 120 else f'{command[:80]} ... {words[-1][:80]}'})"
    return f"process {process}"


def abort_mark(root: str) -> tuple[int, int] | None:
    """Return inode and time (ns since epoch) of the store's `abort` file, None without one.

    Opening the store for writing writes the file, and an orderly close deletes it.
    """
    try:
        status = os.stat(os.path.join(root, "abort"))
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def abort_process(root: str) -> int:
    """Return the process in the `abort` file of the store at `root`; -1 for none, like RocketMQ before 5.0.0."""
    try:
        with open(open_regular(os.path.join(root, "abort")), "rb") as file:
            text = file.read(32)
    except OSError:
        return -1
    return int(text) if text.isdigit() else -1


def is_held(root: str) -> bool:
    """Return True if a visible process, maybe this one, has the store at `root` open for writing; only Linux knows of others.

    The lock file is not opened: closing it would release a lock of this process.
    """
    if os.path.realpath(root) in _held.files:
        return True
    try:
        status = os.stat(os.path.join(root, "lock"))
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            locks = file.read()
    except OSError:
        return False
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(" POSIX " in line and place in line.split() for line in locks.splitlines())


class StoreLock(NotCopied):
    """The right to write to the store at `root`, from creation to `release`; usable in a ``with`` statement."""

    def __init__(self, root: str):
        # An io.FileIO closes its descriptor in one step that no interrupt can split.
        self._file: io.FileIO | None = None
        self._held = _held
        self._pid = os.getpid()
        self.path = os.path.join(root, "lock")
        self._key = os.path.realpath(root)
        with self._held.lock:
            if self._key in self._held.files:
                raise StoreLockedError(
                    Sentence(
                        f"this process ({os.getpid()}) has the store open for writing already; close it first",
                        OpenReadOnly(),
                    ),
                    self.path,
                )
            file = io.FileIO(open_regular(self.path, os.O_RDWR | os.O_CREAT), "r+")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
                with naming_errors(self.path):
                    os.pwrite(file.fileno(), b"lock", 0)
            except OSError as error:
                holder = _holder(file.fileno())
                file.close()
                if is_locked(error):
                    raise StoreLockedError(
                        Sentence(f"{holder} has the store open for writing; stop it", OpenReadOnly("the store")),
                        self.path,
                    ) from None
                raise
            except BaseException:
                file.close()
                raise
            self._file = self._held.files[self._key] = file

    def hold(self) -> None:
        """Take the lock once more, in case that this process lost it by closing another descriptor of the file."""
        with self._held.lock:
            file = self._file
            if file is None or file.closed or self._pid != os.getpid():
                return
            if not os.path.exists(self.path) or not os.path.samestat(os.stat(self.path), os.fstat(file.fileno())):
                raise StoreLockedError(
                    "the lock file was deleted or replaced, so that it keeps nobody out any more; close the store here, and "
                    "leave the file alone while a store is open",
                    self.path,
                )
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except OSError as error:
                if not is_locked(error):
                    raise
                raise StoreLockedError(
                    f"this process lost the lock of the store, because it opened and closed {self.path} elsewhere, and "
                    f"{_holder(file.fileno())} took it; close the store here",
                    self.path,
                ) from None

    def release(self) -> None:
        """Release the lock; twice, and in a forked child, it does nothing."""
        held = self._held
        with held.lock:
            if self._file is None:
                return
            self._file.close()
            # After an interrupt the next call finishes this; another object may hold the lock by then.
            if held.files.get(self._key) is self._file:
                del held.files[self._key]

    def __del__(self) -> None:
        # A forgotten store must not keep its lock until the process ends.
        self.release()

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


_opened: weakref.WeakSet[ClosedAtExit] = weakref.WeakSet()
_numbers = itertools.count(1)


class ClosedAtExit:
    """A base of objects that must be closed after writing; they call `_note_open` and `_note_closed`."""

    # The process that has it open for writing, 0 for none; and its number in the order of openings.
    _writer_pid: int = 0
    _opening: int = 0

    def close(self) -> object:
        """Force everything to the disk and release it."""
        raise NotImplementedError

    def _note_open(self) -> None:
        self._writer_pid, self._opening = os.getpid(), next(_numbers)
        _opened.add(self)

    def _note_closed(self) -> None:
        self._writer_pid = 0
        _opened.discard(self)

    def _when_forgotten(self) -> None:
        # Called by a finalizer: it must not wait for a lock, a thread or a disk.
        pass

    def __del__(self) -> None:
        if self._writer_pid and self._writer_pid == os.getpid():
            self._writer_pid = 0
            try:
                warnings.warn(
                    f"unclosed {self!r}: it was forgotten; close it, best with a with statement",
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
            # A filter may turn it into an error.
            warnings.warn(
                f"unclosed {each!r}: the end of the program closes it; close it yourself, best with a with statement",
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


# Registered by the import, so that functions that a program registers later, and that may use a store, run before.
atexit.register(_close_all)
