"""The folders of queues, ``TOPIC/QUEUE_ID``: their names, and listing them.  It opens no file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

from rmqstore.errors import UnsupportedFormatError
from rmqstore.files.listing import Listing, listing
from rmqstore.files.os_errors import broken_link, is_missing, is_unreadable

QUEUE_FOLDERS = ("consumequeue", "batchconsumequeue", "consumequeue_ext")
"""The folders of a store that contain a folder for each topic, and in it one for each queue."""


def queue_directories(root: str, kind: str, unseen: dict[str, OSError] | None = None) -> Iterator[tuple[str, int, str]]:
    """Yield every queue below ``root/kind``: (topic, queue id, directory), sorted; skip other entries.

    - `kind`: ``consumequeue``, ``batchconsumequeue`` or ``consumequeue_ext``.
    - `unseen`: takes unreadable folders and their errors; without it the first of them raises.
    """
    folder = os.path.join(root, kind)
    for topic in _listing(folder, unseen, lambda _: True, is_missing).names:
        directory = f"{folder}{os.sep}{topic}"
        for queue_id in sorted(map(int, _listing(directory, unseen, is_queue_name).names)):
            yield topic, queue_id, f"{directory}{os.sep}{queue_id}"


def _listing(
    path: str, unseen: dict[str, OSError] | None, is_name: Callable[[str], bool], *passed: Callable[[OSError], bool]
) -> Listing:
    # The folders at `path` with valid names.
    found = listing(path, lambda entry: is_name(entry.name) and _is_folder(entry, unseen))
    if unseen is not None and found.unreadable is not None:
        unseen[path] = found.unreadable
        return found
    return found.checked(*passed)


@functools.lru_cache(maxsize=1024)
def is_queue_name(name: str) -> bool:
    """Return True if a folder of this name below a topic's is a queue."""
    digits = name.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= 10 and name == str(int(name))


def _is_folder(entry: os.DirEntry[str], unseen: dict[str, OSError] | None) -> bool:
    # A broken link may point to a disk that is not mounted: its content is unknown.
    try:
        if entry.is_dir():
            return True
        if unseen is not None and entry.is_symlink() and not os.path.exists(entry.path):
            unseen[entry.path] = broken_link(entry.path)
    except OSError as error:
        if unseen is None or not is_unreadable(error):
            raise
        unseen[entry.path] = error
    return False


def can_name_queue(topic: str) -> bool:
    """Return True if `topic` can be the name of a directory."""
    return (
        topic not in ("", ".", "..")
        and "/" not in topic
        and "\0" not in topic
        and len(topic.encode("utf-8", "replace")) <= 255
    )


def queue_directory(root: str, kind: str, topic: str, queue_id: int) -> str:
    """Return the directory of a queue."""
    if not can_name_queue(topic):
        raise UnsupportedFormatError(f"topic {topic[:80]!r} cannot name a queue's directory", root)
    return os.path.join(root, kind, topic, str(queue_id))
