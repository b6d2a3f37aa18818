"""Whole messages of message files, read without an index: of one file, or those of a vhost that no index entry refers to.

Owns which records of `N.rdq`, `N.rdt` and `N.qs` no live entry leads to.  A healthy store has such records too: those of
messages that were acknowledged, until the node frees their space.  Nothing on the disk tells them from messages whose
index is lost, so that both are given.  It only reads.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.open_file import open_regular
from rmqstore.rabbitmq._messages import MessageFlag, MessageRecordLayout
from rmqstore.rabbitmq.message import LostMessage, LostMessages, Message, undecoded
from rmqstore.rabbitmq.message_recovery import scan_file
from rmqstore.rabbitmq.node import store_path
from rmqstore.rabbitmq.problem import UNREADABLE, Problem
from rmqstore.rabbitmq.queue import QueueDirectory
from rmqstore.rabbitmq.queue_index_v2 import PER_QUEUE, QueueIndexV2, read_store_v2
from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["FoundMessage", "count_unreferenced", "file_messages", "is_message_file", "unreferenced_messages"]

_MESSAGE_FILE = re.compile(r".*\.(rdq|rdt|qs|sqs)")
_HEAD = MessageRecordLayout.MESSAGE_RECORD_TERM


class FoundMessage(NamedTuple):
    """A whole message of a message file.  No index says where in a queue it was, or whether it was acknowledged.

    Attributes
    ----------
    path, pos : str, int
        Its record.
    queue : str
        The queue of an `N.qs`; empty for a message of the shared store, whose routing keys say where it was sent.
    msg_id : bytes
        16 bytes.
    message : Message
    """

    path: str
    pos: int
    queue: str
    msg_id: bytes
    message: Message


def is_message_file(path: str | os.PathLike[str]) -> bool:
    """bool: a file with the name of a message file, by itself."""
    return os.path.isfile(path) and _MESSAGE_FILE.fullmatch(os.path.basename(os.fspath(path))) is not None


def file_messages(
    path: str | os.PathLike[str],
    on_lost: Callable[[LostMessage], None] | None = None,
    on_problem: Callable[[Problem], None] | None = None,
) -> Iterator[FoundMessage]:
    """Read every whole message of one message file, in the order of the file.

    Parameters
    ----------
    path : path
        An N.rdq, N.rdt or N.qs, with or without the rest of its vhost.
    on_lost : callable, optional
        Called with each message that is whole and cannot be decoded; by default a warning says how many there are.
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
    lost = LostMessages(on_lost)
    if file.endswith(".sqs") or not is_message_file(file):
        raise StoreError("this is not a message file that this version reads; give an N.rdq, N.rdt or N.qs", file)
    records = _queue_records(file, on_problem) if file.endswith(".qs") else _store_records(file, on_problem)
    for pos, term in records:
        yield from _decoded(file, pos, "", term, lost)
    lost.warn()


def unreferenced_messages(
    vhost: Vhost, on_lost: Callable[[LostMessage], None] | None = None
) -> Iterator[FoundMessage]:
    """Read the whole messages of a vhost's message files that no live index entry refers to.

    They were acknowledged and the node has not freed their space yet, or the index that had them is lost.

    Parameters
    ----------
    vhost : Vhost
    on_lost : callable, optional
        As of `file_messages`.

    Raises
    ------
    OSError
        A message file cannot be read.
    """
    lost = LostMessages(on_lost)
    for directory, path, places in _queue_files(vhost):
        for pos, term in _queue_records(path, None):
            if pos not in places:
                yield from _decoded(path, pos, directory.owner, term, lost)
    known = _references(vhost)
    for path in _store_files(vhost, known):
        for pos, term in _store_records(path, None, known):
            yield from _decoded(path, pos, "", term, lost)
    lost.warn()


def count_unreferenced(vhost: Vhost) -> tuple[int, str]:
    """Count the messages of `unreferenced_messages`, without decoding them; and the path of the first, or an empty one.

    Files that cannot be read, which are problems of the vhost, are not counted.
    """
    known = _references(vhost)
    number, first = 0, ""
    counts = chain(
        ((path, (pos for pos, _ in _queue_records(path, None) if pos not in places)) for _, path, places in _queue_files(vhost)),
        ((path, _whole_records(path, None, known)) for path in _store_files(vhost, known)),
    )
    for path, records in counts:
        with contextlib.suppress(OSError):
            found = sum(1 for _ in records)
            number, first = number + found, first or (path if found else "")
    return number, first


def _queue_files(vhost: Vhost) -> Iterator[tuple[QueueDirectory, str, set[int]]]:
    """The N.qs of all queues, with the positions that live entries lead to."""
    for directory in vhost.directories:
        index = next((each for each in directory.indexes if isinstance(each, QueueIndexV2)), None)
        unreadable = _unreadable(directory.problems)
        for name in directory.files:
            path = os.path.join(directory.path, name)
            if index is not None and name.endswith(".qs") and directory.is_read(name) and path not in unreadable:
                segment = index.segments.get(int(name[:-3]))
                places = set() if segment is None else set(segment.pos[segment.location == PER_QUEUE].tolist())
                yield directory, path, places


def _unreadable(problems: list[Problem]) -> set[str]:
    return {problem.path for problem in problems if problem.kind == UNREADABLE}


def _queue_records(path: str, on_problem: Callable[[Problem], None] | None) -> Iterator[tuple[int, bytes]]:
    store = read_store_v2(path)
    if on_problem is not None:
        for problem in store.problems:
            on_problem(problem)
    for row in np.flatnonzero(store.verdict == 0).tolist():
        yield int(store.pos[row]), store.terms[row]


def _references(vhost: Vhost) -> set[bytes]:
    """Ids that live entries refer to.  Each id that was met joins them: a compacted file has a message twice."""
    ids = vhost.references().tobytes()
    return {ids[at : at + 16] for at in range(0, len(ids), 16)}


def _store_files(vhost: Vhost, known: set[bytes]) -> list[str]:
    """The message files of the shared store that hold more than the messages of the ids that are `known`."""
    store = vhost.store()
    if store is None:
        return []
    unreadable = _unreadable(store.problems)
    places = store.locations()
    ids = places.msg_id.tobytes()
    used: Counter[int] = Counter()
    for row, (number, size) in enumerate(zip(places.file.tolist(), places.size.tolist(), strict=True)):
        if ids[16 * row : 16 * row + 16] in known:
            used[number] += size
    return list(_files_beyond(vhost, store.files, used, unreadable))


def _files_beyond(vhost: Vhost, numbers: Iterable[int], used: Counter[int], unreadable: set[str]) -> Iterator[str]:
    for number in numbers:
        path = os.path.join(store_path(vhost.path, True), f"{number}.rdq")
        # Where all bytes are in use, there is nothing else.
        if path not in unreadable and used[number] < os.path.getsize(path):
            yield path
        left = path[:-3] + "rdt"
        if left not in unreadable and os.path.isfile(left):
            yield left


def _whole_records(
    path: str, on_problem: Callable[[Problem], None] | None, known: set[bytes]
) -> Iterator[tuple[int, int, bytes]]:
    """Position, size of the term and id of each whole record whose id is not `known` yet."""
    scan = scan_file(path, "auto")
    if on_problem is not None:
        for problem in scan.problems:
            on_problem(problem)
    flags = MessageFlag.MESSAGE_WRITTEN | MessageFlag.MESSAGE_TOO_SHORT
    for row in np.flatnonzero(scan.flags & flags == MessageFlag.MESSAGE_WRITTEN).tolist():
        msg_id = scan.msg_id[row].tobytes()
        if msg_id not in known:
            known.add(msg_id)
            yield int(scan.pos[row]), int(scan.size[row]), msg_id


def _store_records(
    path: str, on_problem: Callable[[Problem], None] | None, known: set[bytes] | None = None
) -> Iterator[tuple[int, bytes]]:
    fd = open_regular(path)
    try:
        for pos, size, _ in _whole_records(path, on_problem, set() if known is None else known):
            yield pos, os.pread(fd, size, pos + _HEAD)
    finally:
        os.close(fd)


def _decoded(path: str, pos: int, queue: str, term: bytes, lost: LostMessages) -> Iterator[FoundMessage]:
    try:
        message = Message.from_term(term)
    except CorruptionError:
        return  # no message: bytes that look like a record
    msg_id = message.msg_id or bytes(16)
    reason = undecoded(message)
    if reason is None:
        yield FoundMessage(path, pos, queue, msg_id, message)
    else:
        lost.add(LostMessage(queue, -1, msg_id, None, path, True, pos, reason, True))
