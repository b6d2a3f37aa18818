"""Whole messages of message files, read without an index: of one file, or those of a vhost that no index entry refers to.

Owns the search for records of `N.rdq`, `N.rdt` and `N.qs` without a live entry.  A healthy store has such records too:
those of acknowledged messages, until the node frees their space.  The disk does not distinguish them from messages whose
index is lost, so that both are read.  It only reads.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.open_file import open_regular
from rmqstore.rabbitmq._messages import MessageFlag, MessageRecordLayout
from rmqstore.rabbitmq.message import LostMessage, LostMessages, Message, undecoded
from rmqstore.rabbitmq.message_recovery import scan_file
from rmqstore.rabbitmq.problem import Problem
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2, read_store_v2
from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["FoundMessage", "count_unreferenced", "file_messages", "is_message_file", "unreferenced_messages"]

_MESSAGE_FILE = re.compile(r".*\.(rdq|rdt|qs|sqs)")
_HEAD = MessageRecordLayout.MESSAGE_RECORD_TERM


class FoundMessage(NamedTuple):
    """A whole message of a message file.  Its place in a queue, and whether it was acknowledged, is unknown.

    `path` and `pos` are its record; `queue` that of an `N.qs`, empty for the shared store; `msg_id` has 16 bytes.
    """

    path: str
    pos: int
    queue: str
    msg_id: bytes
    message: Message


def is_message_file(path: str | os.PathLike[str]) -> bool:
    """Check that a path is a file with the name of a message file."""
    return os.path.isfile(path) and _MESSAGE_FILE.fullmatch(os.path.basename(os.fspath(path))) is not None


def file_messages(
    path: str | os.PathLike[str],
    on_lost: Callable[[LostMessage], None] | None = None,
    on_problem: Callable[[Problem], None] | None = None,
) -> Iterator[FoundMessage]:
    """Read every whole message of one message file (N.rdq, N.rdt or N.qs), in the order of the file.

    Parameters
    ----------
    path : path
    on_lost : callable, optional
        Called with each whole message that cannot be decoded; by default a warning has their number.
    on_problem : callable, optional
        Called with each `Problem` of the file.

    Raises
    ------
    StoreError
        It is not a message file that this version reads.
    OSError
        The file cannot be read.
    """
    file = os.fspath(path)
    if file.endswith(".sqs") or not is_message_file(file):
        raise StoreError("this is not a message file that this version reads; give an N.rdq, N.rdt or N.qs", file)
    lost = LostMessages(on_lost)
    yield from _messages(_File(file, "", set()), lost, on_problem)
    lost.warn()


def unreferenced_messages(vhost: Vhost, on_lost: Callable[[LostMessage], None] | None = None) -> Iterator[FoundMessage]:
    """Read the whole messages of a vhost's message files that no live index entry refers to.

    They were acknowledged and their space is not freed yet, or their index is lost.  For `on_lost` see `file_messages`.
    OSError if a message file cannot be read.
    """
    lost = LostMessages(on_lost)
    for file in _files(vhost):
        yield from _messages(file, lost)
    lost.warn()


def count_unreferenced(vhost: Vhost) -> tuple[int, str]:
    """Count the messages of `unreferenced_messages` in readable files, without decoding them; and the path of the first."""
    number, first = 0, ""
    for file in _files(vhost):
        with contextlib.suppress(OSError):
            found = sum(1 for _ in _places(file))
            number, first = number + found, first or (file.path if found else "")
    return number, first


class _File(NamedTuple):
    """A message file, and its known messages: positions in an N.qs, else ids."""

    path: str
    queue: str
    known: set[Any]


def _files(vhost: Vhost) -> Iterator[_File]:
    """Yield the message files that may hold messages without live entries."""
    for directory in vhost.directories:
        index = next((each for each in directory.indexes if isinstance(each, QueueIndexV2)), None)
        unreadable = {problem.path for problem in directory.problems if problem.is_unreadable}
        for name in directory.files if index is not None else ():
            path = os.path.join(directory.path, name)
            if index is not None and name.endswith(".qs") and directory.is_read(name) and path not in unreadable:
                segment = index.segments.get(int(name[:-3]))
                used = [] if segment is None else segment.places[1].tolist()
                yield _File(path, directory.owner, set(used))
    store = vhost.store()
    if store is None:
        return
    references = vhost.references().tobytes()
    known = {references[at : at + 16] for at in range(0, len(references), 16)}
    unreadable = {problem.path for problem in store.problems if problem.is_unreadable}
    places = store.locations()
    ids = places.msg_id.tobytes()
    sizes: Counter[int] = Counter()
    for row, (number, size) in enumerate(zip(places.file.tolist(), places.size.tolist(), strict=True)):
        if ids[16 * row : 16 * row + 16] in known:
            sizes[number] += size
    for number in store.files:
        path = os.path.join(store.path, f"{number}.rdq")
        # A file with all bytes in use has no others.
        if path not in unreadable and sizes[number] < os.path.getsize(path):
            yield _File(path, "", known)
        left = path[:-3] + "rdt"
        if left not in unreadable and os.path.isfile(left):
            yield _File(left, "", known)


def _places(file: _File, on_problem: Callable[[Problem], None] | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield the position of each whole record that is not known yet, and position and size of its term."""
    if file.path.endswith(".qs"):
        store = read_store_v2(file.path)
        pos, size, keys, head, problems = store.pos, store.term_size, store.pos, 8, store.problems
        whole = store.verdict == 0
    else:
        scan = scan_file(file.path, "auto")
        flags = scan.flags & (MessageFlag.MESSAGE_WRITTEN | MessageFlag.MESSAGE_TOO_SHORT)
        pos, size, keys, head, problems = scan.pos, scan.size, scan.msg_id, _HEAD, scan.problems
        whole = flags == MessageFlag.MESSAGE_WRITTEN
    if on_problem is not None:
        for problem in problems:
            on_problem(problem)
    for row in np.flatnonzero(whole).tolist():
        key = keys[row].tobytes() if keys is not pos else int(pos[row])
        if key not in file.known:
            # A compacted file has a message twice.
            file.known.add(key)
            yield int(pos[row]), int(pos[row]) + head, int(size[row])


def _messages(
    file: _File, lost: LostMessages, on_problem: Callable[[Problem], None] | None = None
) -> Iterator[FoundMessage]:
    with open(open_regular(file.path), "rb") as opened:
        for pos, at, size in _places(file, on_problem):
            opened.seek(at)
            try:
                message = Message.from_term(opened.read(size))
            except CorruptionError:
                continue  # bytes that look like a record
            msg_id = message.msg_id or bytes(16)
            reason = undecoded(message)
            if reason is None:
                yield FoundMessage(file.path, pos, file.queue, msg_id, message)
            else:
                lost.add(LostMessage(file.queue, -1, msg_id, None, file.path, True, pos, reason, True))
