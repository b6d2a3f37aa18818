"""Names and small files of a vhost's directory, and the locking of directories and mapping of files.

Owns the hash in directory names, `.config`, `.queue_name` and `.vhost`.  It writes nothing.  A node takes no lock, so that
a lock only excludes writers of this package.  Source of all rules: RabbitMQ 3.10.8.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from rmqstore._core import Region
from rmqstore.errors import CorruptionError, GeometryError, StoreLockedError
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import is_locked, naming_errors

__all__ = [
    "DEFAULT_SEGMENT_ENTRY_COUNT",
    "LEGACY_SEGMENT_ENTRY_COUNT",
    "MAX_SEGMENT_ENTRY_COUNT",
    "QueueName",
    "base36_md5",
    "format_config",
    "format_queue_name",
    "lock_directory",
    "map_file",
    "parse_queue_name",
    "queue_directory",
    "read_queue_name",
    "read_segment_entry_count",
    "read_vhost_name",
    "vhost_directory",
]

DEFAULT_SEGMENT_ENTRY_COUNT = 2048
# The value before 3.8.17, which a node uses if `.config` is missing or unreadable.
LEGACY_SEGMENT_ENTRY_COUNT = 16384
MAX_SEGMENT_ENTRY_COUNT = 16384

# Bytes that are read of a small file.
_MOST = 1 << 16
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SEGMENT_ENTRY_COUNT = re.compile(r"\{\s*segment_entry_count\s*,\s*(-?\d+)\s*\}\s*\.")
_COMMENT = re.compile(r"%[^\n]*")


def base36_md5(data: bytes) -> str:
    """Return the MD5 of some bytes as a number in base 36, a node's names of directories."""
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    number, digits = int.from_bytes(digest, "big"), ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits or "0"


def vhost_directory(vhost: str) -> str:
    """Return the name of a vhost's directory below ``msg_stores/vhosts``."""
    return base36_md5(vhost.encode("utf-8", "surrogateescape"))


def queue_directory(vhost: str, queue: str | bytes, priority: int | None = None) -> str:
    """Return the name of a queue's directory; each level of a priority queue (0 to its maximum) has its own."""
    name = queue if isinstance(queue, bytes) else queue.encode("utf-8", "surrogateescape")
    if priority is not None:
        name += bytes((0, priority))
    return base36_md5(b"queue" + vhost.encode("utf-8", "surrogateescape") + name)


class QueueName(NamedTuple):
    """The contents of a `.queue_name`.

    Attributes
    ----------
    vhost, queue : str
        Bytes that are not UTF-8 are kept as surrogates.
    priority : int or None
        The level, for a directory of a priority queue.
    index_version : int
        1 or 2.
    """

    vhost: str
    queue: str
    priority: int | None = None
    index_version: int = 1


def parse_queue_name(data: bytes) -> QueueName | None:
    """Parse a `.queue_name`; None for damage, as the file is informational."""
    match = re.fullmatch(rb"VHOST: (.*?)\nQUEUE: (.*?)\n(?:INDEX: v(\d+)\n)?", data, re.DOTALL)
    if match is None:
        return None
    name, priority = match[2], None
    if len(name) >= 2 and name[-2] == 0:
        name, priority = name[:-2], name[-1]
    version = int(match[3]) if match[3] else 1

    def decode(part: bytes) -> str:
        return part.decode("utf-8", "surrogateescape")

    return QueueName(decode(match[1]), decode(name), priority, version)


def read_queue_name(directory: str) -> QueueName | None:
    """Read the stub in a queue's directory; None if it is missing or unreadable."""
    try:
        with open(open_regular(os.path.join(directory, ".queue_name")), "rb") as file:
            return parse_queue_name(file.read(_MOST))
    except OSError:
        return None


def read_vhost_name(path: str, queues: Iterable[str]) -> str:
    """Return the name of the vhost in `path`, from ``.vhost``, else from the stubs in the directories of its queues.

    A node before 3.7 wrote neither; an unknown name is empty.
    """
    try:
        with open(open_regular(os.path.join(path, ".vhost")), "rb") as file:
            return file.read(_MOST).decode("utf-8", "surrogateescape")
    except OSError:
        pass
    for name in queues:
        found = read_queue_name(os.path.join(path, "queues", name))
        if found is not None and vhost_directory(found.vhost) == os.path.basename(path):
            return found.vhost
    return "/" if os.path.basename(path) == vhost_directory("/") else ""


def format_queue_name(vhost: str, queue: str, priority: int | None = None, index_version: int = 1) -> bytes:
    """Make the contents of a `.queue_name`."""
    name = queue.encode("utf-8", "surrogateescape") + (b"" if priority is None else bytes((0, priority)))
    head = b"VHOST: " + vhost.encode("utf-8", "surrogateescape") + b"\nQUEUE: " + name + b"\n"
    return head if index_version == 1 else head + b"INDEX: v%d\n" % index_version


def format_config(segment_entry_count: int) -> bytes:
    """Make the contents of a `.config`, as a node does."""
    return (
        b"%% This file is auto-generated! Edit at your own risk!\n{segment_entry_count, "
        + b"%d}." % segment_entry_count
    )


def read_segment_entry_count(vhost_path: str | os.PathLike[str]) -> int | None:
    """Read the entries a segment from a vhost's `.config`; None if there is no such file.

    CorruptionError if it has no number, GeometryError if that is not between 1 and 16384.
    """
    path = os.path.join(os.fspath(vhost_path), ".config")
    try:
        with open(open_regular(path), "rb") as file:
            text = file.read(65536).decode("latin-1")
    except FileNotFoundError:
        return None
    match = _SEGMENT_ENTRY_COUNT.search(_COMMENT.sub("", text))
    if match is None:
        raise CorruptionError(
            "the file says no segment_entry_count; give segment_entry_count, or write the file as a node does", path, 0
        )
    # Python refuses a number of thousands of digits.
    count = int(match[1][:10])
    if not 1 <= count <= MAX_SEGMENT_ENTRY_COUNT:
        raise GeometryError(f"segment_entry_count is {count}, not between 1 and {MAX_SEGMENT_ENTRY_COUNT}", path, 0)
    return count


def lock_directory(path: str, refusal: str) -> int:
    """Return a descriptor that holds the lock on a directory; StoreLockedError with `refusal` if it is locked."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if not is_locked(error):
            raise
        raise StoreLockedError(refusal, path) from None
    return fd


def map_file(path: str) -> Region | None:
    """Map a file; None for an empty one, which cannot be mapped."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if not size:
            return None
        with naming_errors(path):
            region = Region.map(fd, size)
        region.path = path
        return region
    finally:
        os.close(fd)
