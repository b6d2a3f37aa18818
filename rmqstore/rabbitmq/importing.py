"""Messages into a stopped node's queue.

Owns the order of the steps of an import, and its refusals: of queues that the node does not know, and of damage that could
lose messages.  It never writes under a running node.  Invariant: after a kill at any step, the node boots with all earlier
messages.  Rules: RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rmqstore.errors import CorruptionError, DeclareQueue, InvalidMessageError, Sentence, StoreError, StoreLockedError
from rmqstore.files.listing import listing
from rmqstore.rabbitmq import layout
from rmqstore.rabbitmq.batches import BATCH_ROWS
from rmqstore.rabbitmq.dets import write_recovery_terms
from rmqstore.rabbitmq.index_directory import JOURNAL
from rmqstore.rabbitmq.layout import QueueName, lock_directory
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.message_files import RDT, MessageFiles
from rmqstore.rabbitmq.message_recovery import check_files
from rmqstore.rabbitmq.message_store import DEFAULT_FILE_SIZE_LIMIT, MessageStore
from rmqstore.rabbitmq.node import store_path
from rmqstore.rabbitmq.problem import Problem
from rmqstore.rabbitmq.queue import QueueDirectory
from rmqstore.rabbitmq.queue_index import QueueIndex, checked_expiry
from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["ImportReport", "import_messages", "node_process"]

_BATCH_BYTES = 16 << 20
# An import that needs more memory uses a temporary file.
_SPOOL_BYTES = 64 << 20
_SPOOLED = struct.Struct("<qq")
# With a wrong count, acks of the journal would belong to other entries.
_WRONG_COUNT = {"bad_config", "segment_entry_count_mismatch"}
_LEGACY_COUNT = {"missing_config", "unreadable_config"}


@dataclass(frozen=True)
class ImportReport:
    """The result of `import_messages`.

    Attributes
    ----------
    queue : str
    directory : str
        The queue's, or its level's.
    messages : int
    first_seq_id : int
        Sequence id of the first of them.
    embedded, stored : int
        Numbers of messages in the index, and in the message store.
    state : str
        ``"exact"``: the node keeps flags and numbers; ``"dirty"``: it marks every message of the vhost as redelivered.
    """

    queue: str
    directory: str
    messages: int
    first_seq_id: int
    embedded: int
    stored: int
    state: str


def node_process(path: str | os.PathLike[str]) -> int | None:
    """Find a process that has files below `path` open, such as a running node; None also without /proc."""
    root = os.path.realpath(os.fspath(path)) + os.sep
    processes = listing("/proc", lambda entry: entry.name.isdigit() and int(entry.name) != os.getpid())
    for process in processes.names:
        for path in listing(f"/proc/{process}/fd").paths:
            with contextlib.suppress(OSError):
                opened = os.readlink(path)
                # A process that only lists folders, such as du, is not a node.
                if opened.startswith(root) and not os.path.isdir(opened):
                    return int(process)
    return None


def import_messages(
    path: str | os.PathLike[str],
    queue: str,
    messages: Iterable[Message | tuple[Message, int | None]],
    *,
    state: str = "auto",
    level: int | None = None,
    declared: bool = False,
    embed_below: int = 4096,
    segment_entry_count: int | None = None,
) -> ImportReport:
    """Put messages after those of a queue of a stopped node.

    Parameters
    ----------
    path : path
        The vhost's directory.
    queue : str
        A durable queue in the node's Mnesia tables.
    messages : iterable of Message, or of (Message, expiry in ms since epoch or None)
        They become persistent.  All are read, some into a temporary file, before anything is changed.  A message whose
        ``msg_id`` is in use gets a new one, unless the message store has the same bytes under it.
    state : {"auto", "exact", "dirty"}
        ``"exact"`` keeps numbers and redelivered flags of all queues, and needs a clean stop of the node.  With ``"dirty"``
        the node recovers as after a crash, and marks all messages as redelivered.  By default exact if possible.
    level : int, optional
        The level of a priority queue; needed for one.
    declared : bool
        The node knows the queue although no Mnesia table is next to `path`; else it would delete the directory.
    embed_below : int
        The node's ``queue_index_embed_msgs_below``, in bytes.
    segment_entry_count : int, optional
        See `Vhost.open`.

    Raises
    ------
    StoreError
        The node does not know the queue or would not boot, the directory is of RabbitMQ 4.x, the queue is of version
        2, `state` is not possible, or a damaged or unreadable file may hide messages in use.  Nothing was changed.
    InvalidMessageError
        One of `messages` is not a message; nothing was changed.
    StoreLockedError
        The node runs, or another process writes; nothing was changed.
    OSError, KeyboardInterrupt
        Writing failed or was interrupted.  All earlier messages are there, as after an unclean stop, and perhaps some of
        the new ones.
    """
    if state not in ("auto", "exact", "dirty"):
        raise ValueError(f"state is {state!r}, not auto, exact or dirty")
    _check_stopped(path)
    with Vhost.open(path, segment_entry_count=segment_entry_count) as vhost:
        name = vhost.name
        _directory_to_import(vhost, queue, level, declared)
    with _Spool(name) as spool:
        spool.take(messages)
        # Reading the source may have taken long.
        _check_stopped(path)
        with Vhost.open(path, segment_entry_count=segment_entry_count, check_terms=True) as vhost:
            directory = _directory_to_import(vhost, queue, level, declared)
            _refuse_doubt(vhost)
            present = next((each for each in vhost.directories if each.name == directory), None)
            exact = _usable(vhost.terms.get(directory), present)
            if state == "exact" and not exact:
                raise StoreError(
                    "the queue has no recovery terms that could be used: the node was not stopped cleanly, or never ran this "
                    "queue; use state='dirty'",
                    vhost.path,
                )
            exact = exact and state != "dirty"
            first = 0
            for index in [] if present is None else present.indexes:
                if isinstance(index, QueueIndex):
                    index.refuse_damage()  # as it does when it is opened for writing
                first = index.next_seq_id
            if not spool.count:
                return ImportReport(queue, directory, 0, first, 0, 0, "exact" if exact else "dirty")
            return _Import(vhost, QueueName(name, queue, level), directory, exact, embed_below).run(spool)


def _usable(terms: Mapping[str, Any] | None, directory: QueueDirectory | None) -> bool:
    """Check that a queue's recovery terms are there and valid."""
    if terms is None or directory is not None:
        return directory is not None and directory.clean
    # Nothing persistent ever went into it.
    return not terms.get("segments", True) and all(
        type(terms.get(name)) is int and 0 <= terms[name] < 1 << 62 for name in ("next_seq_id", "next_deliver_seq_id")
    )


def _refuse_doubt(vhost: Vhost) -> None:
    """Raise StoreError if references may be missing: the message store deletes messages without references."""
    legacy = vhost.segment_entry_count == layout.LEGACY_SEGMENT_ENTRY_COUNT
    wrong_count = _WRONG_COUNT if legacy else _WRONG_COUNT | _LEGACY_COUNT
    doubts = [problem for problem in vhost.problems if problem.kind in wrong_count]
    doubts += vhost.incomplete
    doubts += [problem for directory in vhost.directories for problem in directory.incomplete]
    doubts += _doubts_of_store(store_path(vhost.path, persistent=True))
    if doubts:
        first = doubts[0]
        more = f" (and {len(doubts) - 1} more; verify names them)" if len(doubts) > 1 else ""
        raise StoreError(
            f"{first.kind}: {first.detail}{more}; an import could delete messages that are in use, so "
            "nothing was changed; make the file readable or put it back, or run `rmqstore rabbitmq repair` and import "
            "into its output",
            first.path,
            first.pos,
        )


def _doubts_of_store(path: str) -> list[Problem]:
    # Message files that cannot be opened, have a strange name, or would be renamed.
    if not os.path.isdir(path):
        return []
    files = MessageFiles(path, DEFAULT_FILE_SIZE_LIMIT, "auto")
    rdq, rdt, _ = files.listing()
    check_files(files, rdq, rdt, read_only=True)
    return files.problems + [
        Problem(files.path_of(number | RDT), 0, "rdt_without_rdq", f"there is no {number}.rdq", None)
        for number in rdt
        if number not in rdq
    ]


def _check_stopped(path: str | os.PathLike[str]) -> None:
    pid = node_process(path)
    if pid is not None:
        raise StoreLockedError(f"process {pid} has files of this directory open; stop the node first", os.fspath(path))


def _directory_to_import(vhost: Vhost, queue: str, level: int | None, declared: bool) -> str:
    """Return the name of the directory to write into, after all checks that the node will read it."""

    def refuse(wrong: bool, text: str | Sentence, path: str = vhost.path) -> None:
        if wrong:
            raise StoreError(text, path)

    refuse(vhost.is_pre_3_7, "this is the layout of before 3.7, which is only read; import into a later node's vhost")
    refuse(
        not vhost.name, "nothing tells the vhost's name, of which the names of directories are made; write it into .vhost"
    )
    vhost.refuse_version_4("publish the messages to the running node instead")
    definitions = vhost.definitions
    definition = None if definitions is None else definitions.get((vhost.name, queue))
    refuse(
        definitions is not None and definition is None,
        f"the node knows no durable queue {queue!r} in vhost {vhost.name!r}: at its next start it would delete the "
        "directory; declare the queue on the running node first",
    )
    unknown = f"whether the node knows queue {queue!r} cannot be told here, and it would delete the directory of one that it "
    unknown += "does not know; give the vhost inside the node's data directory, or say "
    refuse(definitions is None and not declared, Sentence(unknown, DeclareQueue()))
    if definition is not None:
        kind, levels = definition.type, definition.levels
        refuse(kind not in ("", "rabbit_classic_queue"), f"queue {queue!r} is a {kind}, not a classic queue")
        with_levels = levels != (None,)
        wanted = f"give a level from 0 to {levels[-1]}" if with_levels else "give no level"
        refuse(level not in levels, f"queue {queue!r} has {'' if with_levels else 'no '}priorities; {wanted}")
    name = layout.queue_directory(vhost.name, queue, level)
    for each in vhost.directories:
        stub = each.queue_name
        if stub is not None and stub.queue == queue:
            has, wanted = ("no ", "give no level") if level is not None else ("", "give its level")
            refuse((stub.priority is None) != (level is None), f"queue {queue!r} has {has}priorities; {wanted}", each.path)
            refuse(
                stub.priority == level and each.name != name,
                f"this directory says that it is queue {queue!r}, but in vhost {vhost.name!r} the queue's is {name}; is .vhost "
                "right?",
                each.path,
            )
        refuse(
            each.name == name and each.index_version != 1,
            "the queue's index is of version 2, which this version only reads; publish the messages to the running "
            "node instead",
            each.path,
        )
    return name


class _Import:
    """One import, in an order that keeps all earlier messages after a kill at any step, at worst as after an unclean stop."""

    def __init__(self, vhost: Vhost, name: QueueName, directory: str, exact: bool, embed_below: int):
        self.vhost = vhost
        self.name = name
        self.directory = directory
        self.exact = exact
        self.embed_below = embed_below
        self.terms = {name: dict(terms) for name, terms in vhost.terms.items()}
        self.path = os.path.join(vhost.path, "queues", directory)

    def run(self, spool: _Spool) -> ImportReport:
        vhost = self.vhost
        references = vhost.references()
        refs = vhost.client_refs() if self.exact else None
        terms = self.terms.pop(self.directory) if self.exact else None
        if not self.exact:
            self.terms.clear()
        vhost.close()
        made = not os.path.isdir(self.path)
        if not made:
            # Meet a writer of the queue before the message store deletes its clean state.
            os.close(lock_directory(self.path, "the queue is open for writing already; close it there"))
        store = MessageStore.open(store_path(vhost.path, persistent=True), references=references, client_refs=refs)
        try:
            # From now a node finds this queue, or all, as after an unclean stop, and nothing is lost.
            self._write_terms()
            index = QueueIndex.open(
                self.path,
                segment_entry_count=vhost.segment_entry_count,
                create=True,
                terms=terms,
                store_clean=store.clean,
                is_stored=store.contains,
            )
            try:
                self._write_stub()
                first = index.next_seq_id
                embedded = self._put(index, store, spool)
                # Messages have to be on the disk before the entries that refer to them.
                store.sync()
                index.flush()
                new_terms = index.close()
            finally:
                index.abandon()
            if self.exact and new_terms is not None:
                self.terms[self.directory] = new_terms
                self._write_terms()
            # With a clean state, lost messages of other queues would crash these.
            store.close(None if len(store.missing) else refs)
        except BaseException:
            store.abandon()
            if made:
                self._remove_empty()
            raise
        state = "exact" if self.exact else "dirty"
        return ImportReport(self.name.queue, self.directory, spool.count, first, embedded, spool.count - embedded, state)

    def _put(self, index: QueueIndex, store: MessageStore, spool: _Spool) -> int:
        """Write the messages, and return the number of embedded ones."""
        missing = {row.tobytes() for row in store.missing}
        embedded = 0
        held: list[tuple[bool, Message, int | None]] = []
        weight = 0
        for message, expiry in spool:
            inside = message.embedded(self.embed_below)
            if not inside and not _may_store(store, message, missing):
                message = _of_queue(message, message.vhost or "/", None)
            embedded += inside
            held.append((inside, message, expiry))
            weight += len(message.term)
            if len(held) >= BATCH_ROWS or weight >= _BATCH_BYTES:
                self._put_batch(index, store, held)
                held, weight = [], 0
        self._put_batch(index, store, held)
        return embedded

    def _put_batch(self, index: QueueIndex, store: MessageStore, held: list[tuple[bool, Message, int | None]]) -> None:
        stored = [message for inside, message, _ in held if not inside]
        if stored:
            store.write_many([message.msg_id or b"" for message in stored], stored)
            # The index may flush by itself.
            store.sync()
        for inside, group in itertools.groupby(held, lambda each: each[0]):
            rows = list(group)
            messages = [message for _, message, _ in rows]
            index.publish_many(
                messages if inside else None,
                msg_ids=[message.msg_id or b"" for message in messages],
                sizes=[message.body_size for message in messages],
                expiries=[expiry for _, _, expiry in rows],
                persistent=True,
                deliver=True,
            )

    def _write_terms(self) -> None:
        write_recovery_terms(os.path.join(self.vhost.path, "recovery.dets"), self.terms)

    def _write_stub(self) -> None:
        path = os.path.join(self.path, ".queue_name")
        # After a kill it may be missing or empty.
        if os.path.lexists(path) and (not os.path.isfile(path) or os.path.getsize(path)):
            return
        with open(path + ".unfinished", "wb") as file:
            file.write(layout.format_queue_name(self.name.vhost, self.name.queue, self.name.priority))
        os.replace(path + ".unfinished", path)

    def _remove_empty(self) -> None:
        # The new directory, if it is still empty.
        with contextlib.suppress(OSError):
            entries = listing(self.path).checked()
            empty = {".queue_name", ".queue_name.unfinished"}
            if all(entry.name in empty or (entry.name == JOURNAL and not entry.stat().st_size) for entry in entries):
                for path in entries.paths:
                    os.unlink(path)
                os.rmdir(self.path)


class _Spool:
    """The messages of an import, all read before the directory is changed, as their source may fail."""

    def __init__(self, vhost: str):
        self.vhost = vhost
        self.count = 0
        self._file = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, messages: Iterable[Message | tuple[Message, int | None]]) -> None:
        seen: set[bytes] = set()
        for each in messages:
            message, expiry = each if isinstance(each, tuple) else (each, None)
            if not isinstance(message, Message):
                raise InvalidMessageError(f"message {self.count} is a {type(message).__name__}, not a Message")
            if not message.readable:
                raise InvalidMessageError(f"message {self.count} is of a protocol that is not AMQP 0-9-1")
            expiry = checked_expiry(expiry)
            if message.msg_id is None or message.msg_id in seen:
                message = _of_queue(message, self.vhost, None)
            elif not message.persistent or message.vhost != self.vhost:
                message = _of_queue(message, self.vhost, message.msg_id)
            seen.add(message.msg_id or b"")
            self._file.write(_SPOOLED.pack(len(message.term), expiry or 0))
            self._file.write(message.term)
            self.count += 1

    def __iter__(self) -> Iterator[tuple[Message, int | None]]:
        self._file.seek(0)
        for _ in range(self.count):
            size, expiry = _SPOOLED.unpack(self._file.read(_SPOOLED.size))
            yield Message.from_term(self._file.read(size)), expiry or None


def _of_queue(message: Message, vhost: str, msg_id: bytes | None) -> Message:
    # Body and properties stay; vhost, persistence and id are those of the queue.
    raw = message.raw_properties
    return Message(
        message.body,
        properties=message.properties if message.annotated or raw is None else raw,
        exchange=message.exchange,
        routing_keys=message.routing_keys,
        vhost=vhost,
        persistent=True,
        msg_id=msg_id,
    )


def _may_store(store: MessageStore, message: Message, missing: set[bytes]) -> bool:
    """Check that no other message has the id of a message; the same message is shared."""
    msg_id = message.msg_id or b""
    if msg_id in missing:
        # An entry of another queue refers to an unknown message with this id.
        return False
    try:
        return store.read_term(msg_id) == message.term
    except KeyError:
        return True
    except CorruptionError:
        return False
