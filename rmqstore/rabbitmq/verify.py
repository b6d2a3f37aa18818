"""verify: everything in a vhost that a node does not leave there, and the real node's reaction to it.

Owns the comparison of index, message store, recovery terms and definitions, the consequence of each problem, and the
judgement of an entry with its message (`Met`), which `repair` uses too.  It only reads, and yields `Finding` values instead
of exceptions.  Consequences were seen with RabbitMQ 3.10.8, 4.0.5 and 4.3.6 (docs/rabbitmq.md has the table).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from rmqstore import errors
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.rabbitmq import _term
from rmqstore.rabbitmq.layout import LEGACY_SEGMENT_ENTRY_COUNT
from rmqstore.rabbitmq.live_index import IndexEntry, LiveIndex
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.node import STORES, find_vhosts, store_path
from rmqstore.rabbitmq.problem import UNREAD_FORMAT, UNREADABLE, Problem
from rmqstore.rabbitmq.queue import Queue, QueueDirectory, is_journal_end
from rmqstore.rabbitmq.queue_index import QueueIndex
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2
from rmqstore.rabbitmq.unreferenced import count_unreferenced
from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["Consequence", "Finding", "verify"]


class Consequence(str, Enum):
    """The real node's reaction to a finding when it is started; `sentence` is for people.

    Seen with 3.10.8; of queues of version 2 with 4.0.5 and 4.3.6 too (docs/rabbitmq.md).
    """

    sentence: str

    def __new__(cls, value: str, sentence: str) -> Consequence:
        member = str.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member

    HANGS = "hangs", "the real node hangs at boot"
    DROPS = "drops", "the real node boots without it"
    REDELIVERS = "redelivers", "the real node delivers again"
    CRASHES = "crashes", "the queue crashes on the real node when it comes to it"
    HIDES = "hides", "the queue looks empty on the real node, and crashes at its first publish"
    BLOCKS = ("blocks", "the queue crashes at every start on the real node, and none of its messages can be reached")
    RESTARTS = ("restarts", "the queue crashes at it on the real node, goes on without it, and redelivers all messages")
    IGNORES = "ignores", "RabbitMQ 4.3 and later ignores it, with every message in it; 4.0 converts it"
    DELETES_SEGMENT = "deletes_segment", "the real node deletes this .qi and its .qs, with all messages in them"
    DELETES = "deletes", "the real node deletes the directory at boot"
    FORGETS = "forgets", "the real node does not know these messages, and deletes them"
    REPAIRS = "repairs", "the real node repairs it at boot"
    NONE = "none", "the real node does not notice"


@dataclass(frozen=True, slots=True)
class Finding(errors.Finding):
    """One thing that is wrong, and what the real node does about it.

    Attributes
    ----------
    path, pos, kind, detail : str, int, str, str
        See `rmqstore.Finding`.
    consequence : Consequence
        The real node's reaction.
    queue : str
        The queue that it is about, empty if it is about more than one.
    messages : int
        How many messages it is about, 0 where that is not a matter of messages.
    """

    consequence: Consequence
    queue: str = ""
    messages: int = 0


# What a segment's reader meets keeps the node from booting: the reader crashes, and the message store waits for it without end.
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
# The compiled reader's message about whole headers beyond its limit.
_TOO_DEEP = "the term is nested deeper than"
UNREADABLE_STORE = "unreadable_store"
UNREFERENCED = "unreferenced_messages"
# Segments between two messages of a queue; more than this are a damaged sequence id, and more than a node has patience for.
WIDEST_GAP = 1 << 20
# Problems that show a change of files after the recovery terms were written.
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
    """Yield a `Finding` for everything that is wrong in a vhost, or in all vhosts of a node; nothing is changed.

    Parameters
    ----------
    path : path
        A vhost's directory or a node's data directory; the node must not run.
    segment_entry_count : int, optional
        See `Vhost.open`.
    progress : callable, optional
        Called with (queue directories done, in all).

    Raises
    ------
    StoreError
        There is no such directory, or no vhost in it.
    """
    for each in find_vhosts(path):
        with Vhost.open(each, segment_entry_count=segment_entry_count, check_terms=True) as vhost:
            yield from verify_vhost(vhost, progress)


def verify_vhost(vhost: Vhost, progress: Callable[[int, int], None] | None = None) -> Iterator[Finding]:
    """Verify a vhost that was opened with ``check_terms=True``."""
    _ = vhost.definitions  # adds unreadable files to the problems
    for problem in vhost.problems:
        consequence = _SMALL_FILES.get(problem.kind, Consequence.NONE)
        if problem.kind in ("missing_config", "unreadable_config"):
            # A node then uses the count of before 3.8.17, and finds wrong messages if the files have another one.
            fits = vhost.segment_entry_count == LEGACY_SEGMENT_ENTRY_COUNT
            consequence = Consequence.NONE if fits else Consequence.REDELIVERS
        yield _finding(problem, consequence)
    for name in ("queues", *STORES):
        place = os.path.join(vhost.path, name)
        if os.path.lexists(place) and not os.path.isdir(place):
            yield Finding(place, 0, "no_directory", "there is something else, or a link to nothing", Consequence.HANGS)
    for problem in vhost.strays:
        # A node deletes everything without the name of one of its queues (rabbit_queue_index:start).
        yield _finding(problem, Consequence.HANGS if problem in vhost.incomplete else Consequence.DELETES)
    for problem in vhost.gone:
        stated = vhost.terms[os.path.basename(problem.path)]["persistent_count"]
        yield Finding(problem.path, 0, problem.kind, problem.detail, Consequence.DROPS, messages=stated)
    for persistent in (True, False):
        error = vhost.open_store(persistent)
        if not isinstance(error, OSError):
            continue
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
        store = vhost.open_store(persistent)
        for problem in store.problems if isinstance(store, MessageStore) else ():
            # The transient store is deleted at every boot.
            consequence = STORE_CONSEQUENCES.get(problem.kind, Consequence.DROPS)
            yield _finding(problem, consequence if persistent else Consequence.NONE)
    yield from _verify_unreferenced(vhost)


def _verify_unreferenced(vhost: Vhost) -> Iterator[Finding]:
    try:
        number, first = count_unreferenced(vhost) if _may_lack_entries(vhost) else (0, "")
    except (StoreError, OSError):
        return  # a finding of its own
    if number:
        detail = (
            f"{number} whole messages in message files are in no index that can be read: their index is lost, or they "
            "were acknowledged; rmqstore rabbitmq export --unreferenced saves them"
        )
        yield Finding(first, 0, UNREFERENCED, detail, Consequence.FORGETS, messages=number)


def _may_lack_entries(vhost: Vhost) -> bool:
    """Check for signs that an index lacks messages, so that messages without an index may not be acknowledged."""
    places = [*vhost.incomplete, *(problem for each in vhost.directories for problem in each.incomplete)]
    # An unreadable file may have them; for segments that lack entries, `lacking` has the total.
    return (
        any(problem.kind not in (UNREADABLE, "segment_count_mismatch") for problem in places)
        or any(directory.lacking for directory in vhost.directories)
        or not os.path.lexists(os.path.join(vhost.path, "queues"))
    )


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
    indexes = directory.indexes
    for problem in directory.unreadable:
        yield _finding(problem, Consequence.HANGS, queue.name)
    if directory.has_version_1 and vhost.version_4 is not None and indexes:
        depth = indexes[0].depth
        detail = f"{depth} messages in an index of version 1, and this directory is of RabbitMQ 4.x ({vhost.version_4})"
        yield Finding(directory.path, 0, "version_1_in_4", detail, Consequence.IGNORES, queue.name, depth)
    for index in indexes:
        for problem in index.problems:
            yield _finding(problem, _index_consequence(index, problem), queue.name)
        # In a half-converted directory the terms count both versions.
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
        # After a crash the lost record was never whole.  An orderly stop leaves no such end.
        return Consequence.DROPS if index.recovered_clean else Consequence.REPAIRS
    return _JOURNAL.get(problem.kind, Consequence.HANGS)


# A node uses the name of a file: it does not find renamed entries, and delivers copied ones twice.
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
_VERSION_2_AFTER_A_CLEAN_STOP = {
    "outside", "size_mismatch", "bad_crc", "missing_store", "segment_count_mismatch", "store_without_index"
}  # fmt: skip


def _verify_counts(index: LiveIndex, directory: QueueDirectory, queue: Queue) -> Iterator[Finding]:
    terms = directory.terms or {}
    persistent = index.persistent_sizes
    for name, found in (("persistent_count", len(persistent)), ("persistent_bytes", int(persistent.sum()))):
        stated = terms.get(name)
        if isinstance(stated, int) and stated != found:
            detail = f"the recovery terms say {name} is {stated}, the files {found}: they were changed after the stop"
            consequence = Consequence.HIDES if isinstance(index, QueueIndex) else Consequence.RESTARTS
            yield Finding(directory.path, 0, "count_mismatch", detail, consequence, queue.name)


def _verify_messages(vhost: Vhost, queue: Queue, index: LiveIndex) -> Iterator[Finding]:
    lost: list[IndexEntry] = []
    transient: list[IndexEntry] = []
    hidden: list[IndexEntry] = []
    why: OSError | None = None
    last: int | None = None
    for entry in index:
        if last is not None and (entry.seq_id - last) // vhost.segment_entry_count > WIDEST_GAP:
            detail = f"sequence id {entry.seq_id} comes after {last}: the node goes through every segment between them"
            yield Finding(entry.path, entry.pos, "implausible_gap", detail, Consequence.CRASHES, queue.name, 1)
        last = entry.seq_id
        met = Met.of(vhost, entry)
        embedded = entry.message is not None
        # A transient message in the store is dropped at any start.
        if met.reason is not None and (embedded or entry.persistent):
            place = "" if embedded else " in the message store"
            detail = f"the message of sequence id {entry.seq_id}{place} cannot be read: {met.reason}"
            yield Finding(entry.path, entry.pos, "bad_message", detail, Consequence.CRASHES, queue.name, 1)
        elif met.is_falsely_transient:
            transient.append(entry)
        elif met.unread is not None and entry.persistent:
            hidden.append(entry)
            why = why or met.unread
        # A lost message of a queue's own file is a problem already.
        elif met.is_lost and entry.persistent and (isinstance(index, QueueIndex) or any(entry.msg_id)):
            lost.append(entry)
    # A queue that is not durable has such entries, and no node reads it again.
    if vhost.definitions is not None and queue.definition is None:
        transient = []
    for entries, kind, what, consequence in (
        (lost, "lost_message", "entries lead to no message in the message store", Consequence.DROPS),
        (transient, "transient_entry", "entries say transient, and their messages persistent", Consequence.CRASHES),
        (
            hidden,
            "unreadable_message",
            f"entries lead to what cannot be read, and may be whole ({why})",
            Consequence.HANGS,
        ),
    ):
        if entries:
            number = len(entries)
            some = ", ".join(str(each.seq_id) for each in entries[:10]) + (", …" if number > 10 else "")
            detail = f"{number} {what}: sequence ids {some}"
            yield Finding(entries[0].path, entries[0].pos, kind, detail, consequence, queue.name, number)


class Met(NamedTuple):
    """An index entry and its message, as `verify` and `repair` judge it.

    Attributes
    ----------
    term : bytes or None
        The message's, if it can be read.
    reason : str or None
        Why neither a node nor a reader can use it.
    unread : OSError or None
        The file that has it, or may have it, cannot be read.
    own_id : bytes or None
        The id in the term of a stored message, if that is not the entry's.
    """

    entry: IndexEntry
    term: bytes | None
    reason: str | None
    unread: OSError | None = None
    own_id: bytes | None = None

    @classmethod
    def of(cls, vhost: Vhost, entry: IndexEntry) -> Met:
        """Read the message of an entry."""
        term, error = vhost.term_of(entry)
        if term is None:
            unread = error if isinstance(error, OSError) else None
            return cls(entry, None, str(error) if isinstance(error, CorruptionError) else None, unread)
        reason = unreadable(term)
        if reason is None and entry.message is None:
            own_id = _term.message_id_of(term)
            if own_id is not None and own_id != entry.msg_id:
                reason = f"its term holds the id {own_id.hex()}, its record and this entry {entry.msg_id.hex()}"
                return cls(entry, term, reason, own_id=own_id)
        return cls(entry, term, reason)

    @property
    def is_lost(self) -> bool:
        """bool: the message is not there, and no unreadable file may have it."""
        return self.term is None and self.reason is None and self.unread is None

    @property
    def is_falsely_transient(self) -> bool:
        """bool: an entry of version 1 is transient, and its embedded message persistent."""
        entry = self.entry
        if entry.persistent or entry.message is None or not entry.path.endswith((".idx", ".jif")):
            return False
        return self.reason is None and bool(Message.from_term(entry.message).persistent)


def unreadable(term: bytes) -> str | None:
    """Return why the message in a term cannot be read; None if it can."""
    try:
        message = Message.from_term(term)
        if not message.readable:
            return None  # another protocol than AMQP 0-9-1: whole for a node
        message.body  # noqa: B018
    except StoreError as error:
        return error.message
    try:
        message.properties  # noqa: B018
    except StoreError as error:
        # Only this reader limits the depth of headers.
        return None if error.message.startswith(_TOO_DEEP) else error.message
    return None
