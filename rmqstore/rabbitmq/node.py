"""A node's data directory: what is in it besides classic queues, and which directories are nodes.

Owns the names of quorum queues, streams and other parts that this version does not read, and which names a vhost's
directories have.  It reads names and sizes, and of a quorum queue its `config`; it never writes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rmqstore.errors import StoreError
from rmqstore.files.listing import listing
from rmqstore.files.listing import unread_parts as parts_unread_by
from rmqstore.files.open_file import is_directory, read_small_file
from rmqstore.rabbitmq import term

__all__ = [
    "STORES",
    "UnreadPart",
    "find_vhosts",
    "is_vhost",
    "nodes_below",
    "store_path",
    "unread_part_of",
    "unread_parts",
]

STORES = ("msg_store_persistent", "msg_store_transient")
"""The message stores of a vhost."""

# Of a stream's directory the name is `<vhost>_<queue>_<nanoseconds>`, with other characters replaced.
_STREAM = re.compile(r"(.+)_(\d{10,20})")
_REPLACED = re.compile(r"[^A-Za-z0-9_-]")
# What each directory of a vhost may hold.  Strange names of message files are findings already.
_OF_VHOST = re.compile(r"queues|msg_store_(persistent|transient)|\.vhost|\.config|recovery\.dets")
_OF_QUEUE = re.compile(r"\.queue_name|\d+\.idx|journal\.jif|\d+\.q[is]|.*\.sqs")
_OF_STORE = re.compile(r".*\.(rdq|rdt|sqs|rdq\.rmqstore)|clean\.dot|(file_summary|msg_store_index)\.ets")


class UnreadPart(NamedTuple):
    """A part of a node's data directory, or of a vhost in it, that this version does not read.

    Attributes
    ----------
    path : str
    kind : str
        ``"quorum queue"``, ``"stream"``, ``"log of quorum queues"``, ``"metadata in Khepri"``, ``"directory"`` or ``"file"``.
    vhost, queue : str
        Whose it is, as far as its files say; of a stream only the names that are in the name of its directory.
    size : int
        Bytes of its files.
    """

    path: str
    kind: str
    vhost: str
    queue: str
    size: int

    @property
    def sentence(self) -> str:
        """str: for people."""
        what = f"{self.kind} {self.queue!r}" if self.queue else self.kind
        where = f" of vhost {self.vhost!r}" if self.vhost else ""
        return f"{what}{where} ({self.size} bytes) is not read by this version"


def store_path(vhost_path: str, persistent: bool) -> str:
    """str: the directory of a vhost's persistent or transient message store."""
    return os.path.join(vhost_path, STORES[0 if persistent else 1])


def find_vhosts(path: str | os.PathLike[str]) -> list[str]:
    """Find the vhost directories at or below a path.

    Parameters
    ----------
    path : path
        A vhost's directory, a node's data directory, or one between.

    Returns
    -------
    list of str
        Sorted.

    Raises
    ------
    StoreError
        There are none.
    PermissionError
        This user may not look.
    """
    root = os.fspath(path)
    if not is_directory(root):
        raise StoreError("this is a file, not a directory" if os.path.isfile(root) else "there is no such directory", root)
    if is_vhost(root):
        return [root]
    for below in ("msg_stores/vhosts", "vhosts", ""):
        folder = os.path.join(root, below) if below else root
        if is_directory(folder):
            found = [path for path in listing(folder).checked().paths if is_vhost(path)]
            if found:
                return found
    nodes = [os.path.join(root, os.path.relpath(each, root)) for each in nodes_below(root)]
    above = _vhost_above(root)
    parts = unread_parts(root)
    if above is not None:
        message = f"this is a part of a vhost: give the vhost's directory, {above}"
    elif parts:
        nums = Counter(part.kind for part in parts)
        kinds = ", ".join(f"{number} x {kind}" for kind, number in nums.items())
        message = f"this node's directory has no classic queues, and this version reads nothing else; it has {kinds}"
    elif nodes:
        more = f" (and {len(nodes) - 10} more)" if len(nodes) > 10 else ""
        newest = max(nodes, key=_last_written)
        message = (
            f"this directory holds {len(nodes)} nodes: {', '.join(nodes[:10])}{more}; give one of them, of which "
            f"{newest} was written to last"
            if len(nodes) > 1
            else f"this directory holds a node: give {nodes[0]}"
        )
    elif os.path.basename(os.path.abspath(root)) in ("quorum", "stream", "coordination"):
        message = (
            "these are a node's quorum queues, streams or metadata, which this version does not read; give the node's "
            "data directory or a vhost for its classic queues"
        )
    else:
        message = (
            "this is not a vhost and has none: give a directory that holds queues/ and msg_store_persistent/, as "
            "<node's data directory>/msg_stores/vhosts/<name> does, or the node's data directory"
        )
    raise StoreError(message, root)


def _vhost_above(path: str) -> str | None:
    # Of queues/<directory> two above.
    at = os.path.abspath(path)
    for _ in range(2):
        at, name = os.path.split(at)
        if name in ("queues", *STORES) and is_vhost(at):
            return at
    return None


def _last_written(node: str) -> float:
    places = (node, os.path.join(node, "msg_stores", "vhosts"))
    inside = [entry.stat().st_mtime for place in places for entry in listing(place).existing()]
    return max([os.stat(node).st_mtime, *inside])


def unread_parts(path: str | os.PathLike[str]) -> list[UnreadPart]:
    """List what a node's data directory, or a vhost, holds that this version does not read, by path.

    Parameters
    ----------
    path : path
        A node's data directory, a vhost's, or one that holds vhosts.

    Returns
    -------
    list of UnreadPart
        Of a node also its quorum queues, streams and further directories.  Of a vhost the files and directories that are no
        part of its queues and message stores.

    Raises
    ------
    OSError
        A directory cannot be listed.
    """
    root = os.fspath(path)
    found = [part for vhost in _vhosts(root) for part in _strays(vhost)]
    return sorted([*found, *_parts(root)] if is_node(root) else found)


def unread_part_of(data: str | None, vhost: str, queue: str) -> UnreadPart | None:
    """UnreadPart or None: the quorum queue or stream of this name in a node's data directory."""
    stream = _REPLACED.sub("_", f"{vhost}_{queue}")
    for part in unread_parts(data) if data is not None else ():
        if part.kind == "quorum queue" and (part.vhost, part.queue) == (vhost, queue):
            return part
        if part.kind == "stream" and _stream_name(os.path.basename(part.path)) == stream:
            return part
    return None


def is_node(path: str) -> bool:
    """bool: a node's data directory, by the names in it."""
    return any(os.path.isdir(os.path.join(path, name)) for name in ("msg_stores", "quorum", "stream", "coordination"))


def nodes_below(path: str) -> list[str]:
    """list of str: data directories of nodes in this directory or one below it, by name."""
    found: list[str] = []
    for folder in _directories(path):
        found += [folder] if is_node(folder) else filter(is_node, _directories(folder))
    return sorted(found)


def _directories(path: str) -> list[str]:
    return listing(path, os.DirEntry.is_dir).paths


def is_vhost(path: str) -> bool:
    """bool: a vhost's directory, by the names in it."""
    # A node's data directory of before 3.7 looks the same, but for .vhost.
    return any(os.path.isdir(os.path.join(path, name)) for name in ("queues", *STORES)) or os.path.isfile(
        os.path.join(path, ".vhost")
    )


def _vhosts(root: str) -> list[str]:
    if is_vhost(root):
        return [root]
    places = (os.path.join(root, "msg_stores", "vhosts"), os.path.join(root, "vhosts"), root)
    return next((found for place in places if (found := [*filter(is_vhost, _directories(place))])), [])


def _strays(vhost: str) -> Iterator[UnreadPart]:
    queues = os.path.join(vhost, "queues")
    places: list[tuple[str, re.Pattern[str]]] = [(os.path.join(vhost, name), _OF_STORE) for name in STORES]
    places += [(folder, _OF_QUEUE) for folder in _directories(queues)]
    if os.path.isfile(os.path.join(vhost, ".vhost")):
        places.append((vhost, _OF_VHOST))
    for folder, names in places:
        yield from _unread(folder, lambda name, names=names: names.fullmatch(name) is not None)  # type: ignore[misc]
    yield from _unread(queues, lambda name: os.path.isdir(os.path.join(queues, name)))


def _unread(folder: str, is_read: Callable[[str], bool]) -> Iterator[UnreadPart]:
    for part in parts_unread_by(folder, is_read):
        kind = "directory" if os.path.isdir(part.path) else "file"
        yield UnreadPart(part.path, kind, "", "", part.size)


def _parts(root: str) -> Iterator[UnreadPart]:
    for node in _directories(os.path.join(root, "quorum")):
        log = sum(os.path.getsize(path) for path in listing(node, os.DirEntry.is_file).checked().paths)
        queues = _directories(node)
        if queues and log:
            yield UnreadPart(node, "log of quorum queues", "", "", log)
        for folder in queues:
            vhost, queue = _resource(folder)
            yield UnreadPart(folder, "quorum queue", vhost, queue or os.path.basename(folder), _size(folder))
    for folder in _directories(os.path.join(root, "stream")):
        name = _stream_name(os.path.basename(folder))
        # The default vhost's name is one character that was replaced.
        vhost, queue = ("/", name[2:]) if name.startswith("__") else ("", name)
        yield UnreadPart(folder, "stream", vhost, queue, _size(folder))
    metadata = os.path.join(root, "coordination")
    if os.path.isdir(metadata) and not os.path.lexists(os.path.join(root, "schema.DAT")):
        yield UnreadPart(metadata, "metadata in Khepri", "", "", _size(metadata))
    known = {"msg_stores", "quorum", "stream", "coordination"}
    for folder in _directories(root):
        if os.path.basename(folder) not in known and _size(folder):
            yield UnreadPart(folder, "directory", "", "", _size(folder))


def _stream_name(folder: str) -> str:
    match = _STREAM.fullmatch(folder)
    return match[1] if match is not None else folder


def _resource(folder: str) -> tuple[str, str]:
    """Vhost and queue that the `config` of a quorum queue names; empty where it names none."""
    try:
        values = term.consult(read_small_file(os.path.join(folder, "config")) or b"")
    except (StoreError, OSError):
        return "", ""
    return next(_resources(values), ("", ""))


def _resources(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, tuple) and len(value) == 4 and value[0] == "resource" and value[2] == "queue":
        vhost, queue = value[1], value[3]
        if isinstance(vhost, bytes) and isinstance(queue, bytes):
            yield vhost.decode("utf-8", "surrogateescape"), queue.decode("utf-8", "surrogateescape")
    elif isinstance(value, dict):
        for each in value.values():
            yield from _resources(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _resources(each)


def _size(folder: str) -> int:
    return sum(
        os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names
    )
