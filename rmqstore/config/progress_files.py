"""The files of consumer progress: which of two a broker uses.

Owns their names, and the choice between them for reading, for writing and for inferring ``enableLmq``.

Facts (RocketMQ to 5.5.1): a broker with ``enableLmq=true`` keeps all groups in ``config/lmqConsumerOffset.json``, any other in
``config/consumerOffset.json``.  Neither reads the other file, which stays after the option is changed.
"""

from __future__ import annotations

import os

__all__ = ["is_named", "other_progress_file", "progress_file"]

_PLAIN, _LMQ = "consumerOffset.json", "lmqConsumerOffset.json"


def progress_file(root: str | os.PathLike[str], lmq: bool | None = None) -> str:
    """Return the path of the file that holds the progress of consumer groups, whether it exists or not.

    Parameters
    ----------
    lmq : bool, optional
        The broker's ``enableLmq``; where it is not known, the file that was written last counts.
    """
    plain, light = (os.path.join(root, "config", name) for name in (_PLAIN, _LMQ))
    if lmq is None:
        lmq = _written(light) > _written(plain)
    return light if lmq else plain


def other_progress_file(path: str) -> str | None:
    """Return the path of the second file of progress next to the one at `path`, or None; in a closed folder the first is named."""
    folder, name = os.path.split(path)
    other = os.path.join(folder, _PLAIN if name == _LMQ else _LMQ)
    return other if os.path.lexists(other) or os.path.lexists(other + ".bak") else None


def is_named(path: str) -> bool:
    """Return True if `path` exists, also as a broken symlink, or cannot be looked at: reading it says what is wrong."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _written(path: str) -> int:
    # A broker that was killed may have left the backup alone.
    for name in (path, path + ".bak"):
        try:
            return os.stat(name).st_mtime_ns
        except OSError:
            continue
    return -1
