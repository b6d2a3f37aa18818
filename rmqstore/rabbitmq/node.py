"""A node's data directory: its vhosts, its durable queues, and the parts that this version does not read.

Owns the names of directories in a node and a vhost, and Mnesia's table `rabbit_durable_queue`: the dumped table (.DCD) and
the logs since (.DCL, PREVIOUS.LOG, LATEST.LOG), which are disk_log images (checked with OTP 25.2.3).  Queues in Khepri
(RabbitMQ 4) are not known.  It never writes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.listing import listing
from rmqstore.files.listing import unread_parts as parts_unread_by
from rmqstore.files.open_file import is_directory, open_regular, read_small_file
from rmqstore.rabbitmq import term

__all__ = [
    "STORES",
    "QueueDefinition",
    "UnreadPart",
    "data_directory",
    "durable_queues",
    "find_vhosts",
    "is_vhost",
    "nodes_below",
    "store_path",
    "unread_part_of",
    "unread_parts",
]

STORES = ("msg_store_persistent", "msg_store_transient")
"""The message stores of a vhost."""

# A stream's directory: `<vhost>_<queue>_<nanoseconds>`, with other characters replaced.
_STREAM = re.compile(r"(.+)_(\d{10,20})")
_REPLACED = re.compile(r"[^A-Za-z0-9_-]")
# Names in each directory of a vhost.  Strange names of message files are findings already.
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
        From its files, if they have them; for a stream the parts of its directory's name.
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
    """Return the directory of a vhost's persistent or transient message store."""
    return os.path.join(vhost_path, STORES[0 if persistent else 1])


def find_vhosts(path: str | os.PathLike[str]) -> list[str]:
    """Find the vhost directories at or below a path: a vhost's directory, a node's data directory, or one between; sorted.

    Raises
    ------
    StoreError
        There is no vhost.
    PermissionError
        The directory is not readable.
    """
    root = os.fspath(path)
    if not is_directory(root):
        raise StoreError("this is a file, not a directory" if os.path.isfile(root) else "there is no such directory", root)
    if is_vhost(root):
        return [root]
    for folder in _places_of_vhosts(root):
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
    # A queue's directory is two levels below.
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
    """List the parts of a node's data directory, of vhosts or of a vhost that this version does not read, by path.

    These are a node's quorum queues, streams and other directories, and a vhost's files and directories outside its queues
    and message stores.  OSError if a directory cannot be listed.
    """
    root = os.fspath(path)
    found = [part for vhost in _vhosts(root) for part in _strays(vhost)]
    return sorted([*found, *_parts(root)] if is_node(root) else found)


def unread_part_of(data: str | None, vhost: str, queue: str) -> UnreadPart | None:
    """Find the quorum queue or stream of this name in a node's data directory."""
    stream = _REPLACED.sub("_", f"{vhost}_{queue}")
    for part in unread_parts(data) if data is not None else ():
        if part.kind == "quorum queue" and (part.vhost, part.queue) == (vhost, queue):
            return part
        if part.kind == "stream" and _stream_name(os.path.basename(part.path)) == stream:
            return part
    return None


def is_node(path: str) -> bool:
    """Check for a node's data directory, by the names in it."""
    return any(os.path.isdir(os.path.join(path, name)) for name in ("msg_stores", "quorum", "stream", "coordination"))


def nodes_below(path: str) -> list[str]:
    """List data directories of nodes in this directory or one below it, by name."""
    found: list[str] = []
    for folder in _directories(path):
        found += [folder] if is_node(folder) else filter(is_node, _directories(folder))
    return sorted(found)


def _directories(path: str) -> list[str]:
    return listing(path, os.DirEntry.is_dir).paths


def is_vhost(path: str) -> bool:
    """Check for a vhost's directory, by the names in it."""
    # A node's data directory of before 3.7 has the same names, but for .vhost.
    return any(os.path.isdir(os.path.join(path, name)) for name in ("queues", *STORES)) or os.path.isfile(
        os.path.join(path, ".vhost")
    )


def _places_of_vhosts(root: str) -> list[str]:
    return [os.path.join(root, "msg_stores", "vhosts"), os.path.join(root, "vhosts"), root]


def _vhosts(root: str) -> list[str]:
    if is_vhost(root):
        return [root]
    for place in _places_of_vhosts(root):
        found = [*filter(is_vhost, _directories(place))]
        if found:
            return found
    return []


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
        # The default vhost's name is one replaced character.
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
    """Read vhost and queue in the `config` of a quorum queue; empty if it has no names."""
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
    return sum(os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names)


# ------------------------------------------------------------------------------------------------------ durable queues

_TABLE = "rabbit_durable_queue"
_MAGIC = b"\x01\x02\x03\x04"
_ITEM = b"bWLA"
# An item of this size or more has an MD5 of its length after its head.
_LONG_ITEM = 65528


@dataclass(frozen=True)
class QueueDefinition:
    """A durable queue of the node.

    Attributes
    ----------
    vhost, name : str
    type : str
        ``rabbit_classic_queue``, ``rabbit_quorum_queue``, ``rabbit_stream_queue``; empty if it is unknown.
    arguments : dict
        The ``x-`` arguments of its declaration.
    """

    vhost: str
    name: str
    type: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def levels(self) -> tuple[int | None, ...]:
        """tuple: the priority levels, each with a directory; ``(None,)`` for a queue without priorities."""
        highest = self.arguments.get("x-max-priority")
        if isinstance(highest, bool) or not isinstance(highest, int) or not 0 < highest <= 255:
            return (None,)
        return tuple(range(highest + 1))


def data_directory(vhost_path: str | os.PathLike[str]) -> str | None:
    """Return the node's data directory of a vhost directory ``<it>/msg_stores/vhosts/<vhost>``; None for another path."""
    parts = os.path.abspath(os.fspath(vhost_path)).split(os.sep)
    return os.sep.join(parts[:-3]) if parts[-3:-1] == ["msg_stores", "vhosts"] else None


def _items(path: str) -> Iterator[Any]:
    """Yield the terms of a disk_log, up to the first incomplete item."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return
    if data[:4] != _MAGIC:
        return
    pos = 8
    while pos + 8 <= len(data):
        size = int.from_bytes(data[pos : pos + 4], "big")
        if data[pos + 4 : pos + 8] != _ITEM:
            return
        pos += 8 + (16 if size >= _LONG_ITEM else 0)
        if pos + size > len(data):
            return
        try:
            yield term.decode(data[pos : pos + size])
        except CorruptionError:
            return
        pos += size


def _definition(record: Any) -> QueueDefinition | None:
    """Parse an amqqueue record of any version: the name is the second field, arguments are the first list of triples."""
    if not isinstance(record, tuple) or len(record) < 3 or record[0] != "amqqueue":
        return None
    name = record[1]
    if not isinstance(name, tuple) or len(name) != 4 or name[2] != "queue":
        return None
    arguments: dict[str, Any] = {}
    kind = ""
    for part in record[2:]:
        if isinstance(part, list) and part and all(isinstance(each, tuple) and len(each) == 3 for each in part):
            for key, _, value in part:
                if isinstance(key, bytes):
                    arguments[key.decode("utf-8", "surrogateescape")] = (
                        value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
                    )
        elif isinstance(part, str) and part.startswith("rabbit_") and part.endswith("_queue"):
            kind = str(part)
    texts = [each.decode("utf-8", "surrogateescape") if isinstance(each, bytes) else str(each) for each in name]
    return QueueDefinition(texts[1], texts[3], kind, arguments)


def _changes(entry: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield key, record and operation for this table in an entry of a log: one change, or a commit with lists of them."""
    if not isinstance(entry, tuple):
        return
    if (
        len(entry) == 3
        and isinstance(entry[0], tuple)
        and len(entry[0]) == 2
        and entry[0][0] == _TABLE
        and entry[2] in ("write", "delete", "delete_object")
    ):
        yield entry[0][1], entry[1], str(entry[2])
    elif entry and entry[0] == "commit":
        for part in entry[1:]:
            if isinstance(part, list):
                for each in part:
                    yield from _changes(each)


def durable_queues(directory: str | os.PathLike[str]) -> dict[tuple[str, str], QueueDefinition] | None:
    """Read the durable queues of a stopped node, by vhost and name.

    `directory` is the node's data directory (``RABBITMQ_MNESIA_DIR``); None if it has no such Mnesia table.
    """
    folder = os.fspath(directory)
    table = os.path.join(folder, _TABLE)
    if not any(os.path.exists(table + suffix) for suffix in (".DCD", ".DCL")):
        return None
    found: dict[Any, Any] = {}
    for record in _items(table + ".DCD"):
        if isinstance(record, tuple) and record and record[0] == "amqqueue":
            found[repr(record[1])] = record
    logs = [table + ".DCL", os.path.join(folder, "PREVIOUS.LOG"), os.path.join(folder, "LATEST.LOG")]
    for path in logs:
        for entry in _items(path):
            for key, record, operation in _changes(entry):
                if operation == "write":
                    found[repr(key)] = record
                else:
                    found.pop(repr(key), None)
    queues = filter(None, map(_definition, found.values()))
    return {(queue.vhost, queue.name): queue for queue in queues}
