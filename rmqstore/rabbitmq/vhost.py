"""A vhost's directory: its queues by name, and where their messages are.

Owns which directories belong to which queue, and which state the last stop left (clean, or not).  It only reads; what
writes is `QueueIndex`, `MessageStore`, and the functions of `repair` and `importing`.  What is damaged is skipped and noted
in `problems`, so that everything that is whole can be read.  Rules: RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np

from rmqstore._shown import shows
from rmqstore.errors import CorruptionError, StoreClosedError, StoreError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.os_errors import failed_read
from rmqstore.rabbitmq import dets, layout, term
from rmqstore.rabbitmq.definitions import QueueDefinition, data_directory, durable_queues
from rmqstore.rabbitmq.index_directory import IndexEntry
from rmqstore.rabbitmq.layout import QueueName
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.message_store import MessageStore
from rmqstore.rabbitmq.node import find_vhosts, is_vhost, unread_part_of
from rmqstore.rabbitmq.problem import UNREADABLE, Problem, unreadable_file
from rmqstore.rabbitmq.queue import Queue
from rmqstore.rabbitmq.queue_directory import QueueDirectory
from rmqstore.rabbitmq.segment_count import find_segment_count
from rmqstore.rabbitmq.version_4 import sign_of_version_4
from rmqstore.rabbitmq.vhost_stores import VhostStores

__all__ = ["Vhost"]

# What the hash of a queue's name looks like.
_HASH = re.compile(r"[0-9A-Z]{1,25}")


@shows(
    "clean", "client_refs", "close", "closed", "definitions", "directories", "incomplete", "is_pre_3_7", "name", "open",
    "path", "problems", "queue", "queues", "references", "segment_entry_count", "segment_entry_count_source",
    "store", "terms", "version_4",
)  # fmt: skip
class Vhost(NotCopied):
    """The directory of one vhost, opened by `Vhost.open`.

    Attributes
    ----------
    path : str
    name : str
        As ``.vhost`` says.
    segment_entry_count : int
        Entries a segment of version 1.
    segment_entry_count_source : str
        ``"given"``, ``"config"``, ``"inferred"`` from the segments where ``.config`` cannot be right, or ``"default"``.
    terms : dict of str to dict
        Recovery terms by directory, empty after an unclean stop.
    problems : list of Problem
        What was met in the vhost's own small files.
    closed : bool
        `close` was called.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("a vhost is opened, not made: use Vhost.open(path)")

    def _take(self, path: str, segment_entry_count: int | None, check_terms: bool) -> None:
        self.path = path
        self.check_terms = check_terms
        self.closed = False
        queues = self._queue_directories()
        self.name = layout.read_vhost_name(self.path, queues)
        self.segment_entry_count, self.segment_entry_count_source, self.problems = find_segment_count(
            self.path, segment_entry_count, queues
        )
        self.terms = self._read_terms()
        self._stores = VhostStores(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        read_only: bool = True,
        segment_entry_count: int | None = None,
        check_terms: bool = False,
    ) -> Vhost:
        """Open the vhost in `path`; nothing is changed.

        Parameters
        ----------
        path : path
            ``<node's data directory>/msg_stores/vhosts/<name>``; of a node before 3.7, its data directory.
        read_only : bool
            Only True is possible: a vhost is written through `repair`, `import_messages`, `QueueIndex` and `MessageStore`.
        segment_entry_count : int, optional
            By default what ``.config`` says, or what the segments show where that cannot be right.
        check_terms : bool
            Look at every embedded message when an index is opened; `verify` does.

        Raises
        ------
        StoreError
            There is no such directory, or it is not a vhost.
        """
        if not read_only:
            raise ValueError(
                "a vhost is opened read-only: use rmqstore.rabbitmq.repair or import_messages, or QueueIndex and MessageStore, "
                "to write"
            )
        root = os.fspath(path)
        if not os.path.isdir(root):
            raise StoreError("there is no such directory", root)
        if not is_vhost(root):
            below = find_vhosts(root)
            raise StoreError(f"this directory is not a vhost, but has {len(below)}: open for instance {below[0]}", root)
        # Whole, as the paths of problems are.
        vhost = cls.__new__(cls)
        vhost._take(os.path.abspath(root), segment_entry_count, check_terms)
        return vhost

    def __enter__(self) -> Vhost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Vhost {self.name!r} in {self.path}>"

    def close(self) -> None:
        """Close all files."""
        if self.closed:
            return
        self.closed = True
        for directory in self.__dict__.get("directories", ()):
            directory.close()
        self._stores.close()

    # ------------------------------------------------------------------------------------------------ small files

    @cached_property
    def is_pre_3_7(self) -> bool:
        """bool: laid out as before 3.7, where all vhosts of a node share the directories."""
        return not os.path.exists(os.path.join(self.path, ".vhost")) and any(
            name.startswith(("rabbit_durable_queue.", "schema.DAT")) for name in listing(self.path).checked().names
        )

    def _queue_directories(self) -> list[str]:
        # An error is one of `strays`.
        return listing(os.path.join(self.path, "queues"), os.DirEntry.is_dir).names

    @cached_property
    def strays(self) -> list[Problem]:
        """list of Problem: what lies below ``queues`` and is no directory, by name; or why that cannot be listed."""
        folder = os.path.join(self.path, "queues")
        if not os.path.isdir(folder):
            return []
        detail = "there is something else than a queue's directory, or a link to nothing; put the directory back"
        found = listing(folder, lambda entry: not entry.is_dir())
        if found.error is not None:
            return [unreadable_file(folder, found.error)]
        return [Problem(path, 0, "no_directory", detail, None) for path in found.paths]

    @cached_property
    def incomplete(self) -> list[Problem]:
        """list of Problem: where a queue may be that is not among `queues`, since its directory is not there to be read."""
        return [each for each in self.strays if each.kind == UNREADABLE or self._may_be_queue(each.path)] + self.gone

    @cached_property
    def gone(self) -> list[Problem]:
        """list of Problem: directories that are not there, of queues that had messages when the node stopped cleanly."""
        if any(each.kind == UNREADABLE for each in self.strays):
            return []
        present = {each.name for each in self.directories} | {os.path.basename(each.path) for each in self.strays}
        detail = "there is no such directory, and the recovery terms say that it had {} messages; put it back"
        return [
            Problem(os.path.join(self.path, "queues", name), None, "missing_directory", detail.format(count))
            for name, count in ((name, each.get("persistent_count")) for name, each in self.terms.items())
            if type(count) is int and count > 0 and name not in present
        ]

    @cached_property
    def has_unused(self) -> bool:
        """bool: the persistent message store has, or may have, messages that no live entry refers to."""
        store = self.store() if self.open_store(True) is None else None
        # A clean state counts the references of the last stop.
        return store is not None and any(
            each.file_size > (0 if store.clean else each.valid_size) for each in store.files.values()
        )

    def _may_be_queue(self, path: str) -> bool:
        # As far as that can be told.
        name = os.path.basename(path)
        if self.definitions is None:
            return _HASH.fullmatch(name) is not None
        return any(
            name == self.directory_of(each.vhost, each.name, level)
            for each in self.definitions.values()
            for level in each.levels
        )

    def _read_terms(self) -> dict[str, dict[str, Any]]:
        path = os.path.join(self.path, "recovery.dets")
        if not os.path.exists(path):
            return {}
        try:
            table = dets.read(path)
        except (StoreError, OSError) as error:
            self.problems.append(
                Problem(path, getattr(error, "pos", None) or 0, "bad_recovery_terms", str(error), None)
            )
            return {}
        found = dets.recovery_terms(table)
        self.problems += [
            Problem(path, problem.pos, "bad_recovery_terms", problem.detail, None) for problem in table.problems
        ]
        return found

    @cached_property
    def definitions(self) -> dict[tuple[str, str], QueueDefinition] | None:
        """dict or None: the durable queues of the node that this vhost stands in, by vhost and name; None if not known."""
        folder = self.path if self.is_pre_3_7 else data_directory(self.path)
        try:
            return None if folder is None else durable_queues(folder)
        except OSError as error:
            self.problems.append(unreadable_file(folder or "", error))
            return None

    @cached_property
    def version_4(self) -> str | None:
        """str or None: what shows that RabbitMQ 4.x wrote this directory; None for one of 3.x.

        4.x writes no index of version 1, and 4.3 ignores one, so that nothing may be written here.  In doubt a
        directory with queues of version 2 is one of 4.x.
        """
        return sign_of_version_4(self)

    def refuse_version_4(self, advice: str) -> None:
        """Raise StoreError, which ends with `advice`, where `version_4` shows a directory of 4.x."""
        if self.version_4 is not None:
            raise StoreError(
                f"this directory is of RabbitMQ 4.x ({self.version_4}); this version writes index version 1 only, which "
                f"a node of 4.3 or later ignores, with all messages in it; {advice}",
                self.path,
            )

    # ----------------------------------------------------------------------------------------------------- queues

    def _check_open(self) -> None:
        if self.closed:
            raise StoreClosedError("the vhost is closed; open it again", self.path)

    @cached_property
    def directories(self) -> list[QueueDirectory]:
        """list of QueueDirectory: all below ``queues``, by name."""
        found = [QueueDirectory(self, name) for name in self._queue_directories()]
        unnamed = {each.name: each for each in found if each.queue_name is None}
        if unnamed:
            for definition in (self.definitions or {}).values():
                for level in definition.levels:
                    name = self.directory_of(definition.vhost, definition.name, level)
                    if name in unnamed:
                        unnamed[name].queue_name = QueueName(definition.vhost, definition.name, level)
            for each in unnamed.values():
                if each.queue_name is None:
                    each.queue_name = each.name_by_messages()
        return found

    def directory_of(self, vhost: str, queue: str, level: int | None = None) -> str:
        """str: the name that a node gives the directory of a queue, or of a level of it."""
        if not self.is_pre_3_7:
            return layout.queue_directory(vhost, queue, level)
        name = queue.encode("utf-8", "surrogateescape") + (b"" if level is None else bytes((0, level)))
        resource = (term.Atom("resource"), vhost.encode("utf-8", "surrogateescape"), term.Atom("queue"), name)
        return layout.base36_md5(term.encode(resource, atoms="latin1"))

    def queues(self) -> list[Queue]:
        """list of Queue: those that have a directory, by name."""
        self._check_open()
        levels: dict[tuple[str, str], list[QueueDirectory]] = {}
        for directory in self.directories:
            stub = directory.queue_name
            key = (self.name, f"<{directory.name}>") if stub is None else (stub.vhost, stub.queue)
            levels.setdefault(key, []).append(directory)
        found = []
        for (vhost, name), directories in levels.items():
            directories.sort(key=lambda each: (each.queue_name.priority or 0) if each.queue_name else 0)
            queue = Queue(self, name, directories, (self.definitions or {}).get((vhost, name)))
            queue.vhost = vhost
            found.append(queue)
        return sorted(found, key=lambda each: (each.vhost, each.name))

    def queue(self, name: str) -> Queue:
        """Queue: the one of this name; a queue that was never written to has no directory, and is empty.

        Raises
        ------
        StoreError
            No directory is this queue's, and the node's definitions do not name it; or it is a quorum queue or a
            stream.
        """
        for each in self.queues():
            if each.name == name:
                return each
        definition = (self.definitions or {}).get((self.name, name))
        node = data_directory(self.path)
        part = unread_part_of(node, self.name, name)
        kind = part.kind if part is not None else ""
        if definition is not None and definition.type not in ("", "rabbit_classic_queue"):
            kind = kind or definition.type
        if kind:
            raise StoreError(
                f"queue {name!r} is a {kind}, not a classic queue: this version does not read it",
                part.path if part is not None else node,
            )
        if definition is not None:
            return Queue(self, name, [], definition)
        raise StoreError(f"there is no queue {name!r}", self.path)

    # --------------------------------------------------------------------------------------------------- messages

    def references(self) -> np.ndarray:
        """ndarray: message ids, ``(n, 16)`` uint8, of all live persistent entries whose message lies in the store."""
        self._check_open()
        parts = [index.references() for each in self.directories for index in each.indexes]
        return np.concatenate(parts) if parts else np.zeros((0, 16), np.uint8)

    def client_refs(self) -> list[bytes]:
        """list of bytes: what the queues' recovery terms are known by in the message store."""
        refs = [terms.get("persistent_ref") for terms in self.terms.values()]
        return [bytes(ref) for ref in refs if isinstance(ref, (bytes, bytearray))]

    def store(self, persistent: bool = True) -> MessageStore | None:
        """MessageStore or None: the persistent or the transient message store, opened read-only; None if there is none.

        Raises
        ------
        OSError
            Its directory cannot be read; of a file of it, that is one of its `problems`.  Every call says the same.
        """
        self._check_open()
        return self._stores.get(persistent)

    def open_store(self, persistent: bool) -> OSError | None:
        """OSError or None: why a message store cannot be read."""
        try:
            self.store(persistent)
        except OSError as error:
            return error
        return None

    @cached_property
    def clean(self) -> bool:
        """bool: the last stop was clean, so that a node would keep numbers and redelivered flags of all queues."""
        if not self.terms or self.open_store(True) is not None:
            return False
        store = self.store()
        return store is None or store.clean

    def stored_term(self, entry: IndexEntry) -> bytes | None:
        """bytes or None: the term of a message that is not embedded in its index entry; None where it is lost.

        Raises
        ------
        OSError
            The file that has it, or may have it, cannot be read.
        CorruptionError
            Its record is not what was there when the message store was opened.
        """
        if entry.path.endswith(".qs"):
            raise failed_read(entry.path, "the file cannot be read")
        store = self.store(entry.persistent)
        try:
            return None if store is None else store.read_term(entry.msg_id)
        except KeyError:
            return None

    def message_of(self, entry: IndexEntry) -> tuple[Message, str] | None:
        """(Message, location) or None: what an index entry leads to; None where it is lost or not what the entry says.

        Raises
        ------
        OSError
            The file that has it, or may have it, cannot be read.
        """
        if entry.message is not None:
            try:
                return Message.from_term(entry.message), ("index" if entry.path.endswith((".idx", ".jif")) else "queue")
            except CorruptionError:
                return None
        try:
            stored = self.stored_term(entry)
            return None if stored is None else (Message.from_term(stored), "store")
        except CorruptionError:
            return None
