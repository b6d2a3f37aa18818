"""The lock of a store: who may write to it.

Owns the ``lock`` file: an exclusive POSIX record lock on byte 0, which excludes a Java broker as well (``flock`` would
not), and the list of stores that this process holds, because a POSIX lock vanishes as soon as any descriptor of the
file is closed in the process.  Readers never touch it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading

from rmqstore.errors import StoreLockedError

__all__ = ["StoreLock"]

_held: set[str] = set()
_held_lock = threading.Lock()


class StoreLock:
    """The right to write to the store at `root`; held from its making to `release`, also usable in a ``with``.

    Raises
    ------
    StoreLockedError
        Another process, or this one, holds it.
    OSError
        The file cannot be made.
    """

    def __init__(self, root: str):
        self._fd = -1
        self.path = os.path.join(root, "lock")
        self._key = os.path.realpath(root)
        with _held_lock:
            if self._key in _held:
                raise StoreLockedError(
                    "this process has the store open for writing already; close it first, or open it with read_only=True",
                    self.path,
                )
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
                os.pwrite(fd, b"lock", 0)
            except OSError as error:
                os.close(fd)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise StoreLockedError(
                        "another process (a broker, or another rmqstore) has the store open for writing; stop it, or open "
                        "the store with read_only=True",
                        self.path,
                    ) from None
                raise
            _held.add(self._key)
            self._fd = fd

    def release(self) -> None:
        """Give it back; doing so twice does nothing."""
        with _held_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                _held.discard(self._key)

    def __del__(self) -> None:
        # A store that was only forgotten must not keep its lock for as long as the process lives.
        self.release()

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()
