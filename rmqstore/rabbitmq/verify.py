"""verify: everything in a vhost that is not as a node leaves it, and what the real node would do about it.

Owns the comparison of index, message store, recovery terms and definitions with one another, and the words for each
consequence.  It only reads, never stops at the first finding, and answers with `Finding` values instead of exceptions.
Consequences were seen with RabbitMQ 3.10.8, 4.0.5 and 4.3.6 (docs/rabbitmq.md has the table).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from rmqstore import errors
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.rabbitmq import _term
from rmqstore.rabbitmq.index_directory import IndexEntry
from rmqstore.rabbitmq.layout import LEGACY_SEGMENT_ENTRY_COUNT
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.node import find_vhosts, store_path
from rmqstore.rabbitmq.problem import UNREAD_FORMAT, UNREADABLE, Problem
from rmqstore.rabbitmq.queue import Queue
from rmqstore.rabbitmq.queue_directory import QueueDirectory, is_journal_end
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2
from rmqstore.rabbitmq.unreferenced import count_unreferenced
from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["Consequence", "Finding", "verify"]


class Consequence(str, Enum):
    """What the real node does when it is started on what a finding is about.

    Seen with 3.10.8; of queues of version 2 with 4.0.5 and 4.3.6 too (docs/rabbitmq.md).
    """

    HANGS = "hangs"
    """The node hangs at boot, with an error in its log at best."""
    DROPS = "drops"
    """The node boots without these messages."""
    REDELIVERS = "redelivers"
    """The node delivers messages again that were acknowledged, or marks all as redelivered."""
    CRASHES = "crashes"
    """The queue's process crashes when it comes to the message."""
    HIDES = "hides"
    """The queue looks empty, and its process crashes at the first publish."""
    BLOCKS = "blocks"
    """The queue's process crashes at every start, and nobody can reach any message of the queue."""
    RESTARTS = "restarts"
    """The queue's process crashes when it comes to the message, restarts without it, and marks all as redelivered."""
    IGNORES = "ignores"
    """RabbitMQ 4.3 and later ignores the files, with every message in them; 4.0 converts them."""
    DELETES_SEGMENT = "deletes_segment"
    """The node deletes the N.qi and the N.qs, with all messages in them."""
    DELETES = "deletes"
    """The node deletes the whole directory at boot."""
    FORGETS = "forgets"
    """The node knows nothing of these messages, and deletes them."""
    REPAIRS = "repairs"
    """The node repairs it by itself, and nothing is lost."""
    NONE = "none"
    """The node does not notice."""

    @property
    def sentence(self) -> str:
        """str: for people."""
        return _SENTENCES[self]


_SENTENCES = {
    Consequence.HANGS: "the real node hangs at boot",
    Consequence.DROPS: "the real node boots without it",
    Consequence.REDELIVERS: "the real node delivers again",
    Consequence.CRASHES: "the queue crashes on the real node when it comes to it",
    Consequence.HIDES: "the queue looks empty on the real node, and crashes at its first publish",
    Consequence.BLOCKS: "the queue crashes at every start on the real node, and none of its messages can be reached",
    Consequence.RESTARTS: "the queue crashes at it on the real node, goes on without it, and redelivers all messages",
    Consequence.IGNORES: "RabbitMQ 4.3 and later ignores it, with every message in it; 4.0 converts it",
    Consequence.DELETES_SEGMENT: "the real node deletes this .qi and its .qs, with all messages in them",
    Consequence.DELETES: "the real node deletes the directory at boot",
    Consequence.FORGETS: "the real node does not know these messages, and deletes them",
    Consequence.REPAIRS: "the real node repairs it at boot",
    Consequence.NONE: "the real node does not notice",
}


@dataclass(frozen=True, slots=True)
class Finding(errors.Finding):
    """One thing that is wrong, and what the real node does about it.

    Attributes
    ----------
    path, pos, kind, detail : str, int, str, str
        Where it is and what, as of `rmqstore.Finding`.
    consequence : Consequence
        What the real node does about it.
    queue : str
        The queue that it is about, empty if it is about more than one.
    messages : int
        How many messages it is about, 0 where that is not a matter of messages.
    """

    consequence: Consequence
    queue: str = ""
    messages: int = 0


# What a segment's reader meets keeps the node from booting: the reader crashes, and the message store waits for it for ever.
_SEGMENT = {
    "nul_file": Consequence.REPAIRS,
    # It takes the mark for an ack.
    "torn_mark": Consequence.DROPS,
}
# Of a journal the node reads what comes before damage; what the damage says of marks crashes the merge.
_JOURNAL = {
    "torn_record": Consequence.DROPS,
    "zero_stretch": Consequence.DROPS,
    "ack_without_publish": Consequence.REPAIRS,
}
_TERMS = {
    "bad_terms": Consequence.REDELIVERS,
    "segment_count_mismatch": Consequence.HIDES,
    "next_seq_id_too_low": Consequence.HIDES,
}
COPIED_SEGMENT = "copied_segment"
# What the compiled reader says of headers that are whole and beyond its limit.
_TOO_DEEP = "the term is nested deeper than"
UNREADABLE_STORE = "unreadable_store"
UNREFERENCED = "unreferenced_messages"
# Segments between two messages of a queue; more than this are a damaged sequence id, and more than a node has patience for.
WIDEST_GAP = 1 << 20
# What says that the files were changed after the recovery terms were written.
STALE = {"bad_terms", "segment_count_mismatch", "next_seq_id_too_low", "count_mismatch"}
STORE_CONSEQUENCES = {
    "leftover_rdt": Consequence.REPAIRS,
    "rdt_without_rdq": Consequence.HANGS,
    "strange_name": Consequence.HANGS,
    UNREADABLE: Consequence.HANGS,
    "clean_state_ignored": Consequence.REPAIRS,
    # A node takes it as it is.
    "clean_state_misfit": Consequence.CRASHES,
    "zero_tail": Consequence.REPAIRS,
    "overlapping_records": Consequence.NONE,
    UNREAD_FORMAT: Consequence.NONE,
}
_SMALL_FILES = {
    "bad_config": Consequence.HANGS,
    "segment_entry_count_mismatch": Consequence.HANGS,
    "bad_recovery_terms": Consequence.REDELIVERS,
    UNREADABLE: Consequence.HANGS,
}


def verify(
    path: str | os.PathLike[str],
    *,
    segment_entry_count: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Finding]:
    """Look for everything that is wrong in a vhost, or in all vhosts of a node; nothing is changed.

    Parameters
    ----------
    path : path
        A vhost's directory or a node's data directory; the node must not run.
    segment_entry_count : int, optional
        As of `Vhost.open`.
    progress : callable, optional
        Called with (queue directories done, in all), now and then and at the end.

    Yields
    ------
    Finding
        By vhost: its small files, its queues, its message store.

    Raises
    ------
    StoreError
        There is no such directory, or no vhost in it.
    """
    for each in find_vhosts(path):
        with Vhost.open(each, segment_entry_count=segment_entry_count, check_terms=True) as vhost:
            yield from verify_vhost(vhost, progress)


def verify_vhost(vhost: Vhost, progress: Callable[[int, int], None] | None = None) -> Iterator[Finding]:
    """The same of a vhost that was opened with ``check_terms=True``."""
    _ = vhost.definitions  # whose files may be unreadable, which is one of the problems
    for problem in vhost.problems:
        consequence = _SMALL_FILES.get(problem.kind, Consequence.NONE)
        if problem.kind in ("missing_config", "unreadable_config"):
            # A node then takes the count of before 3.8.17, and finds other messages than there are if it was not that.
            fits = vhost.segment_entry_count == LEGACY_SEGMENT_ENTRY_COUNT
            consequence = Consequence.NONE if fits else Consequence.REDELIVERS
        yield _finding(problem, consequence)
    for name in ("queues", "msg_store_persistent", "msg_store_transient"):
        place = os.path.join(vhost.path, name)
        if os.path.lexists(place) and not os.path.isdir(place):
            yield Finding(place, 0, "no_directory", "there is something else, or a link to nothing", Consequence.HANGS)
    for problem in vhost.strays:
        # A node clears away whatever has not the name of one of its queues (rabbit_queue_index:start).
        yield _finding(problem, Consequence.HANGS if problem in vhost.incomplete else Consequence.DELETES)
    for problem in vhost.gone:
        stated = vhost.terms[os.path.basename(problem.path)]["persistent_count"]
        yield Finding(problem.path, 0, problem.kind, problem.detail, Consequence.DROPS, messages=stated)
    for persistent in (True, False):
        error = vhost.open_store(persistent)
        if error is not None:
            place = os.fsdecode(error.filename) if error.filename is not None else store_path(vhost.path, persistent)
            detail = f"it cannot be read, so that no message of the store is known: {error.strerror}"
            yield Finding(place, 0, UNREADABLE_STORE, detail, Consequence.HANGS)
    queues = vhost.queues()
    total = sum(len(queue.directories) for queue in queues)
    done = 0
    for queue in queues:
        yield from _verify_definition(vhost, queue)
        for directory in queue.directories:
            yield from _verify_directory(vhost, queue, directory)
            done += 1
            if progress is not None:
                progress(done, total)
    for persistent in (True, False):
        store = vhost.store(persistent) if vhost.open_store(persistent) is None else None
        if store is not None:
            for problem in store.problems:
                # The transient store is deleted at every boot, whatever is in it.
                consequence = (
                    STORE_CONSEQUENCES.get(problem.kind, Consequence.DROPS) if persistent else Consequence.NONE
                )
                yield _finding(problem, consequence)
    yield from _verify_unreferenced(vhost)


def _verify_unreferenced(vhost: Vhost) -> Iterator[Finding]:
    try:
        number, first = count_unreferenced(vhost) if may_lack_entries(vhost) else (0, "")
    except (StoreError, OSError):
        return  # a finding of its own
    if number:
        detail = (
            f"{number} whole messages in message files are in no index that can be read: their index is lost, or they "
            "were acknowledged; rmqstore rabbitmq export --unreferenced saves them"
        )
        yield Finding(first, 0, UNREFERENCED, detail, Consequence.FORGETS, messages=number)


def may_lack_entries(vhost: Vhost) -> bool:
    """bool: something shows that an index lacks messages, so that those that no index has need not be acknowledged ones."""
    places = [*vhost.incomplete, *(problem for each in vhost.directories for problem in each.incomplete)]
    # What cannot be read has them perhaps; of segments that lack entries the count of all says enough.
    return (
        any(problem.kind not in (UNREADABLE, "segment_count_mismatch") for problem in places)
        or any(map(lacking, vhost.directories))
        or not os.path.lexists(os.path.join(vhost.path, "queues"))
    )


def lacking(directory: QueueDirectory) -> int:
    """int: the persistent messages that the recovery terms count and that no index of the queue has, as far as it is read."""
    stated = (directory.terms or {}).get("persistent_count")
    if type(stated) is not int or any(problem.kind == UNREADABLE for problem in directory.problems):
        return 0
    found = sum(len(index.persistent_sizes) for index in directory.indexes)
    return max(0, stated - found)


def _finding(problem: Problem, consequence: Consequence, queue: str = "") -> Finding:
    messages = 1 if problem.seq_id is not None else 0
    return Finding(problem.path, problem.pos or 0, problem.kind, problem.detail, consequence, queue, messages)


def _verify_definition(vhost: Vhost, queue: Queue) -> Iterator[Finding]:
    for directory in queue.directories:
        if directory.is_misplaced:
            detail = f"its .queue_name says queue {queue.name!r}, whose directory has another name; export its messages"
            depth = sum(index.depth for index in directory.indexes)
            yield Finding(directory.path, 0, "misplaced_directory", detail, Consequence.DELETES, queue.name, depth)
    if vhost.definitions is not None and queue.definition is None:
        for directory in queue.directories:
            detail = "the node knows no durable queue of this name in its Mnesia tables; declare the queue, or export its messages"
            yield Finding(directory.path, 0, "unknown_queue", detail, Consequence.DELETES, queue.name, queue.depth)


def _verify_directory(vhost: Vhost, queue: Queue, directory: QueueDirectory) -> Iterator[Finding]:
    try:
        indexes = directory.indexes
    except (StoreError, OSError) as error:
        detail = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        yield Finding(directory.path, 0, UNREADABLE, f"it cannot be read: {detail}", Consequence.HANGS, queue.name)
        return
    for problem in directory.unreadable:
        yield _finding(problem, Consequence.HANGS, queue.name)
    if directory.has_version_1 and vhost.version_4 is not None and indexes:
        depth = indexes[0].depth
        detail = f"{depth} messages in an index of version 1, and this directory is of RabbitMQ 4.x ({vhost.version_4})"
        yield Finding(directory.path, 0, "version_1_in_4", detail, Consequence.IGNORES, queue.name, depth)
    for index in indexes:
        for problem in index.problems:
            yield _finding(problem, _index_consequence(index, problem), queue.name)
        # Half-way from one version to the other the terms count both.
        if index.recovered_clean and (isinstance(index, QueueIndex) or len(indexes) == 1):
            yield from _verify_counts(index, directory, queue)
        yield from _verify_messages(vhost, queue, index)


def _index_consequence(index: QueueIndex | QueueIndexV2, problem: Problem) -> Consequence:
    if isinstance(index, QueueIndexV2):
        if problem.kind in _VERSION_2_AFTER_A_CLEAN_STOP and index.recovered_clean:
            return Consequence.RESTARTS
        if problem.kind == "bad_head" and problem.path.endswith(".qs"):
            return Consequence.BLOCKS
        return _VERSION_2.get(problem.kind) or _TERMS.get(problem.kind, Consequence.DROPS)
    if problem.kind in _TERMS:
        return _TERMS[problem.kind]
    if problem.path.endswith(".idx"):
        return _SEGMENT.get(problem.kind, Consequence.HANGS)
    if is_journal_end(index, problem):
        # As after a crash: nothing was lost that was ever whole.  An orderly stop leaves no such end.
        return Consequence.DROPS if index.recovered_clean else Consequence.REPAIRS
    return _JOURNAL.get(problem.kind, Consequence.HANGS)


# A node goes by the name: it does not find renamed entries where they were, and gives copied ones twice.
_VERSION_2 = {
    "nul_file": Consequence.REPAIRS,
    COPIED_SEGMENT: Consequence.REDELIVERS,
    UNREADABLE: Consequence.HANGS,
    "torn_entry": Consequence.BLOCKS,
    "bad_status": Consequence.BLOCKS,
    "bad_location": Consequence.CRASHES,
    "bad_head": Consequence.DELETES_SEGMENT,
}
# After a crash the node leaves these entries out at boot.
_VERSION_2_AFTER_A_CLEAN_STOP = {"outside", "size_mismatch", "bad_crc", "missing_store", "segment_count_mismatch"} | {
    "store_without_index"
}


def _verify_counts(index: QueueIndex | QueueIndexV2, directory: QueueDirectory, queue: Queue) -> Iterator[Finding]:
    terms = directory.terms or {}
    persistent = index.persistent_sizes
    for name, found in (("persistent_count", len(persistent)), ("persistent_bytes", int(persistent.sum()))):
        stated = terms.get(name)
        if isinstance(stated, int) and stated != found:
            detail = f"the recovery terms say {name} is {stated}, the files {found}: they were changed after the stop"
            consequence = Consequence.HIDES if isinstance(index, QueueIndex) else Consequence.RESTARTS
            yield Finding(directory.path, 0, "count_mismatch", detail, consequence, queue.name)


def _verify_messages(vhost: Vhost, queue: Queue, index: QueueIndex | QueueIndexV2) -> Iterator[Finding]:
    lost: list[IndexEntry] = []
    transient: list[IndexEntry] = []
    hidden: list[tuple[IndexEntry, OSError]] = []
    last: int | None = None
    for entry in index:
        if last is not None and (entry.seq_id - last) // vhost.segment_entry_count > WIDEST_GAP:
            detail = f"sequence id {entry.seq_id} comes after {last}: the node goes through every segment between them"
            yield Finding(entry.path, entry.pos, "implausible_gap", detail, Consequence.CRASHES, queue.name, 1)
        last = entry.seq_id
        if entry.message is not None:
            reason = unreadable(entry.message)
            if reason is not None:
                detail = f"the message of sequence id {entry.seq_id} cannot be read: {reason}"
                yield Finding(entry.path, entry.pos, "bad_message", detail, Consequence.CRASHES, queue.name, 1)
            elif is_falsely_transient(entry):
                transient.append(entry)
            continue
        try:
            stored = vhost.stored_term(entry)
            reason = None if stored is None else unreadable(stored)
            found = None if stored is None else _term.message_id_of(stored)
            if reason is None and found is not None and found != entry.msg_id:
                reason = f"its term holds the id {found.hex()}, its record and this entry {entry.msg_id.hex()}"
        except OSError as error:
            if entry.persistent:
                hidden.append((entry, error))
            continue
        except CorruptionError as error:
            stored, reason = None, str(error)
        if stored is None and reason is None:
            # A transient one is dropped at any start.  Of a queue's own file each message is a problem already.
            if entry.persistent and (isinstance(index, QueueIndex) or any(entry.msg_id)):
                lost.append(entry)
            continue
        if reason is not None and entry.persistent:
            detail = f"the message of sequence id {entry.seq_id} in the message store cannot be read: {reason}"
            yield Finding(entry.path, entry.pos, "bad_message", detail, Consequence.CRASHES, queue.name, 1)
    if lost:
        some = ", ".join(str(entry.seq_id) for entry in lost[:10]) + (", …" if len(lost) > 10 else "")
        detail = f"{len(lost)} entries lead to no message in the message store: sequence ids {some}"
        yield Finding(lost[0].path, lost[0].pos, "lost_message", detail, Consequence.DROPS, queue.name, len(lost))
    # A queue that is not durable has such entries, and no node takes it up again.
    if transient and (vhost.definitions is None or queue.definition is not None):
        first, number = transient[0], len(transient)
        some = ", ".join(str(entry.seq_id) for entry in transient[:10]) + (", …" if number > 10 else "")
        detail = f"{number} entries say transient, and their messages persistent: sequence ids {some}"
        yield Finding(first.path, first.pos, "transient_entry", detail, Consequence.CRASHES, queue.name, number)
    if hidden:
        entry, why = hidden[0]
        some = ", ".join(str(each.seq_id) for each, _ in hidden[:10]) + (", …" if len(hidden) > 10 else "")
        detail = f"{len(hidden)} entries lead to what cannot be read, and may be whole ({why}): sequence ids {some}"
        consequence = Consequence.HANGS
        yield Finding(entry.path, entry.pos, "unreadable_message", detail, consequence, queue.name, len(hidden))


def is_falsely_transient(entry: IndexEntry) -> bool:
    """bool: an entry of version 1 whose message is embedded, can be read, and says itself that it is persistent."""
    if entry.persistent or entry.message is None or not entry.path.endswith((".idx", ".jif")):
        return False
    return bool(Message.from_term(entry.message).persistent)


def unreadable(term: bytes) -> str | None:
    """str or None: why the message in a term cannot be read; None if it can."""
    try:
        message = Message.from_term(term)
        if not message.readable:
            return None  # of a protocol that is not AMQP 0-9-1, which is whole for a node
        message.body  # noqa: B018
    except StoreError as error:
        return error.message
    try:
        message.properties  # noqa: B018
    except StoreError as error:
        # Headers may be nested as deep as a publisher likes; only the reader here has a limit.
        return None if error.message.startswith(_TOO_DEEP) else error.message
    return None
